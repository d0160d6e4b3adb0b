#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "io/mem.h"
#include "src/calibrate.h"
#include "tests/unit/temp.h"
#include "tests/unit/tiny_gguf.h"

static int32_t ids[3][60];
static mr_tokens texts[3];
static mr_model *m;
static mr_pool *pool;

static int begin(void **state) {
  mr_err err = MR_ERR_INIT;
  uint64_t s = 5;
  if (temp_begin(state))
    return -1;
  for (int t = 0; t < 3; t++) {
    for (int i = 0; i < 60; i++)
      ids[t][i] = (int32_t)((s = s * 6364136223846793005u + 1) >> 56);
    texts[t] = (mr_tokens){ids[t], 20 + 20 * t};
  }
  pool = mr_pool_new(2, 0);
  tiny_gguf_write(temp_path("m.gguf"), -1);
  return pool && !mr_model_open(&m, temp_path("m.gguf"), &err) ? 0 : -1;
}

static int end(void **state) {
  mr_model_close(m);
  m = NULL;
  mr_pool_free(pool);
  return temp_end(state);
}

static mr_calibration *gathered(bool products, int first, int n, mr_pool *p) {
  mr_calibration *c;
  mr_err err = MR_ERR_INIT;
  assert_int_equal(mr_calibration_open(&c, m, p, &err), MR_OK);
  assert_int_equal(mr_calibration_run(c, texts, 3, products, first, n, &err), MR_OK);
  return c;
}

static const mr_site *site(const mr_calibration *c, int layer, int kind) {
  return mr_calibration_site(c, layer, (mr_site_kind)kind);
}

static void what_is_seen(void **state) {
  static const int width[] = {TINY_DIM, TINY_DIM, TINY_DIM, TINY_FF};
  mr_calibration *c = gathered(false, 0, TINY_LAYERS, pool);
  (void)state;
  for (int i = 0; i < TINY_LAYERS; i++)
    for (int k = 0; k < MR_SITES; k++) {
      const mr_site *s = site(c, i, k);
      assert_int_equal(s->k, width[k]);
      assert_int_equal(s->n, 20 + 40 + 60);
      assert_null(s->h);
      double sum = 0;
      for (int j = 0; j < s->k; j++) {
        assert_true(s->most[j] * s->most[j] <= s->square[j] * 1.0001);
        assert_true(s->mean[j] <= s->most[j] * 120.01f && s->square[j] > 0);
        sum += s->square[j];
      }
      if (k == MR_SITE_QKV) /* rows of an RMS norm with weights of one have a mean square of one */
        assert_true(sum / (120.0 * s->k) > 0.98 && sum / (120.0 * s->k) < 1.01);
    }
  mr_calibration_free(c);
}

/* The diagonal of the products is the squares; they are symmetric; a range of layers has those of
 * the whole, whatever the threads. */
static void products(void **state) {
  mr_pool *three = mr_pool_new(3, 0);
  mr_calibration *all = gathered(true, 0, TINY_LAYERS, pool), *one = gathered(true, 1, 1, three);
  (void)state;
  for (int k = 0; k < MR_SITES; k++) {
    const mr_site *a = site(all, 1, k), *b = site(one, 1, k);
    assert_memory_equal(a->h, b->h, (size_t)a->k * (size_t)a->k * sizeof(float));
    assert_int_equal(site(one, 0, k)->k, 0);
    for (int i = 0; i < a->k; i++) {
      double d = a->h[(size_t)i * (size_t)a->k + (size_t)i];
      assert_true(fabs(d - a->square[i]) < 1e-4 * d + 1e-6);
      for (int j = 0; j < i; j++)
        assert_true(fabsf(a->h[i * a->k + j] - a->h[j * a->k + i]) < 1e-3f);
    }
  }
  mr_calibration_free(all);
  mr_calibration_free(one);
  mr_pool_free(three);
}

static void layers_in_a_budget(void **state) {
  mr_calibration *c = gathered(false, 0, 1, pool);
  (void)state;
  assert_int_equal(mr_calibration_layers(c, 0), 1);
  assert_int_equal(mr_calibration_layers(c, UINT64_MAX / 2), TINY_LAYERS);
  mr_calibration_free(c);
  assert_int_equal(mr_site_of("attn_k"), MR_SITE_QKV);
  assert_int_equal(mr_site_of("ffn_down"), MR_SITE_DOWN);
  assert_int_equal(mr_site_of("token_embd"), -1);
}

static void allocations_fail(void **state) {
  mr_code rc = MR_E_NOMEM;
  (void)state;
  for (int n = 0; rc; n++) {
    mr_err err = MR_ERR_INIT;
    mr_calibration *c;
    mr_mem_fail_after(n);
    rc = mr_calibration_open(&c, m, pool, &err);
    if (!rc)
      rc = mr_calibration_run(c, texts, 1, true, 0, TINY_LAYERS, &err);
    mr_mem_fail_after(-1);
    mr_calibration_free(c);
    assert_true(rc == MR_OK || rc == MR_E_NOMEM);
    assert_true(n < 1000);
  }
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, begin, end)

int main(void) {
  const struct CMUnitTest tests[] = {TEST(what_is_seen), TEST(products), TEST(layers_in_a_budget),
                                     TEST(allocations_fail)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
