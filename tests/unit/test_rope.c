/* Rotary tables against the formulas of their papers, evaluated here pair by pair. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "io/mem.h"
#include "src/rope.h"

#define DIMS 64

static mr_config config(void) {
  return (mr_config){.arch = {.rope = MR_ROPE_NEOX},
                     .head_dim = 80,
                     .rope_dims = DIMS,
                     .rope_base = 10000,
                     .rope_factor = 1,
                     .context = 4096,
                     .rope_original_context = 1024,
                     .yarn_ext = 1,
                     .yarn_attn = 1,
                     .yarn_beta_fast = 32,
                     .yarn_beta_slow = 1};
}

static double plain_freq(int i, double base) {
  return pow(base, -2.0 * i / DIMS);
}

/* The row of pos must hold magnitude * cos and sin of pos * freq[i]. */
static void check_row(mr_rope_table *t, int pos, const double *freq, double magnitude) {
  mr_rope_fill(t, pos);
  const float *row = mr_rope_row(t, pos);
  for (int i = 0; i < DIMS / 2; i++) {
    assert_true(fabs(row[i] - magnitude * cos(pos * freq[i])) < 1e-6);
    assert_true(fabs(row[DIMS / 2 + i] - magnitude * sin(pos * freq[i])) < 1e-6);
  }
}

static void check_table(const mr_config *c, const float *factors, bool local, const double *freq,
                        double magnitude) {
  static const int at[] = {0, 1, 77, 1023, 4095};
  mr_err err = MR_ERR_INIT;
  mr_rope_table t;
  assert_int_equal(mr_rope_open(&t, c, factors, local, &err), MR_OK);
  assert_int_equal(t.n_rot, DIMS);
  for (size_t i = 0; i < sizeof at / sizeof *at; i++)
    check_row(&t, at[i], freq, magnitude);
  mr_rope_close(&t);
}

static void plain_and_linear(void **state) {
  (void)state;
  mr_config c = config();
  double freq[DIMS / 2];
  for (int i = 0; i < DIMS / 2; i++)
    freq[i] = plain_freq(i, 10000);
  check_table(&c, NULL, false, freq, 1);
  check_table(&c, NULL, true, freq, 1);
  c.rope_scaling = MR_SCALING_LINEAR;
  c.rope_factor = 4;
  for (int i = 0; i < DIMS / 2; i++)
    freq[i] /= 4;
  check_table(&c, NULL, false, freq, 1);
  check_table(&c, NULL, true, freq, 1); /* one base for all layers: one scaling */
  c.rope_base_local = 100;
  for (int i = 0; i < DIMS / 2; i++)
    freq[i] = plain_freq(i, 100);
  check_table(&c, NULL, true, freq, 1);
}

static void factors_of_the_file(void **state) {
  (void)state;
  mr_config c = config();
  double freq[DIMS / 2];
  float factors[DIMS / 2];
  for (int i = 0; i < DIMS / 2; i++) {
    factors[i] = 1 + 0.25f * (float)i;
    freq[i] = plain_freq(i, 10000) / factors[i];
  }
  check_table(&c, factors, false, freq, 1);
  c.rope_scaling = MR_SCALING_LONGROPE;
  c.yarn_attn = 1.19f;
  check_table(&c, factors, false, freq, c.yarn_attn);
}

/* Pairs that turn more than 32 times over the original context stay, those that turn less than once
 * are divided by the factor, those between are mixed along their number. */
static void yarn(void **state) {
  (void)state;
  mr_config c = config();
  double freq[DIMS / 2];
  c.rope_scaling = MR_SCALING_YARN;
  c.rope_factor = 4;
  int low = 0, high = 0, kept = 0, divided = 0;
  for (int i = 0; i < DIMS / 2; i++) {
    double turns = 1024 * plain_freq(i, 10000) / (2 * M_PI);
    low = turns >= 32 ? i : low;     /* the last with 32 turns or more */
    high = turns > 1 ? i + 1 : high; /* the first with 1 turn or less */
  }
  for (int i = 0; i < DIMS / 2; i++) {
    double mix = i <= low ? 0 : i >= high ? 1 : (double)(i - low) / (high - low);
    freq[i] = plain_freq(i, 10000) * (1 - mix + mix / 4);
    kept += mix == 0;
    divided += mix == 1;
  }
  assert_true(kept > 3 && divided > 3 && high > low + 3);
  check_table(&c, NULL, false, freq, 1 + 0.1 * log(4));
}

static void none_and_impossible(void **state) {
  (void)state;
  mr_config c = config();
  mr_err err = MR_ERR_INIT;
  mr_rope_table t;
  c.rope_dims = 81;
  assert_int_equal(mr_rope_open(&t, &c, NULL, false, &err), MR_E_DATA);
  c.rope_dims = 96; /* more than a head has */
  assert_int_equal(mr_rope_open(&t, &c, NULL, false, &err), MR_E_DATA);
  c.arch.rope = MR_ROPE_NONE;
  assert_int_equal(mr_rope_open(&t, &c, NULL, false, &err), MR_OK);
  assert_int_equal(t.n_rot, 0);
  mr_rope_fill(&t, 5);
  mr_rope_close(&t);
}

static void every_allocation_may_fail(void **state) {
  (void)state;
  mr_config c = config();
  int64_t live = mr_mem_live();
  for (int n = 0; n < 4; n++) {
    mr_err err = MR_ERR_INIT;
    mr_rope_table t;
    mr_mem_fail_after(n);
    mr_code rc = mr_rope_open(&t, &c, NULL, false, &err);
    mr_mem_fail_after(-1);
    assert_int_equal(rc, n < 3 ? MR_E_NOMEM : MR_OK);
    mr_rope_close(&t);
    assert_int_equal(mr_mem_live(), live);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(plain_and_linear),
      cmocka_unit_test(factors_of_the_file),
      cmocka_unit_test(yarn),
      cmocka_unit_test(none_and_impossible),
      cmocka_unit_test(every_allocation_may_fail),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
