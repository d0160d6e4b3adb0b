/* Adapters of latent attention beside the base give what the base gives with them merged into it,
 * whichever of its matrices they change. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "tests/unit/lora_rig.h"

enum { HEADS = 3, NOPE = 10, ROPE = 6, VALUES = 14, LATENT = 24, LOW = 20 };

static const char *latent_model(bool low) {
  static const tiny_latent sizes = {HEADS, NOPE, ROPE, VALUES, LATENT, LOW};
  return write_latent(&merged, &sizes, low);
}

/* kv_b alone, beside each of what it is multiplied with, and all at once. */
static void test_latent(void **unused) {
  (void)unused;
  static const char *const sets[] = {"attn_kv_b", "attn_kv_b attn_q_b attn_q",
                                     "attn_kv_b attn_output", "attn_q_b attn_q attn_output", NULL};
  for (size_t i = 0; i < 2 * sizeof sets / sizeof *sets; i++) {
    const char *dir = latent_model(i % 2);
    only = sets[i / 2];
    one_directory((void **)&dir);
  }
  only = NULL;
  const char *dirs[2], *dir = latent_model(true);
  char whole[300];
  write_merged(dir, dirs, whole);
  starve(dir, dirs[0]);
  check_mangled(dir, dirs[0], 300);
}

static void test_latent_fast(void **unused) {
  (void)unused;
  check_fast(latent_model(true));
}

/* A bias of queries goes through kv_b as the adapter leaves it; one of kv_b is refused. */
static void test_latent_bias(void **unused) {
  (void)unused;
  static const char q[] = "base_model.model.model.layers.1.self_attn.q_proj.base_layer.bias";
  mr_err err = MR_ERR_INIT;
  const char *dirs[2], *dir = latent_model(false);
  char whole[300];
  engine e;
  mr_lora *l;
  write_merged(dir, dirs, whole); /* `adapter` is that of dirs[1] */
  float *b = put(&adapter, q, 1, HEADS * (NOPE + ROPE)), *kv_b;
  fill(b, HEADS * (NOPE + ROPE), 1);
  kv_b = tensor_of("model.layers.1.self_attn.kv_b_proj.weight");
  const char *with = write_adapter("bias", plain_config());
  assert_int_equal(open_with(&e, &l, dir, &with, 1, &err), MR_OK);
  const float *bias = e.m->layers[1].q.lora->bias;
  assert_non_null(bias);
  for (int h = 0; h < HEADS; h++)
    for (int i = 0; i < LATENT + ROPE; i++) {
      double want = i < LATENT ? 0 : b[h * (NOPE + ROPE) + NOPE + i - LATENT];
      for (int j = 0; i < LATENT && j < NOPE; j++)
        want += (double)kv_b[(h * (NOPE + VALUES) + j) * LATENT + i] * b[h * (NOPE + ROPE) + j];
      assert_true(fabs(bias[h * (LATENT + ROPE) + i] - want) < 1e-5);
    }
  assert_null(e.m->layers[0].q.lora->bias);
  close_all(&e, l);
  put(&adapter, "base_model.model.model.layers.0.self_attn.kv_b_proj.lora_B.bias", 1,
      HEADS * (NOPE + VALUES));
  with = write_adapter("bias", plain_config());
  assert_int_equal(open_with(&e, &l, dir, &with, 1, &err), MR_E_DATA);
  assert_non_null(strstr(err.text, "bias of kv_b"));
  close_all(&e, l);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_latent, temp_begin, temp_end),
      cmocka_unit_test_setup_teardown(test_latent_fast, temp_begin, temp_end),
      cmocka_unit_test_setup_teardown(test_latent_bias, temp_begin, temp_end),
  };
  return cmocka_run_group_tests_name("lora_latent", tests, NULL, NULL);
}
