#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "io/mem.h"
#include "src/gptq.h"

enum { K = 96, N = 40, ROWS = 300 };

static float h[K * K], w[N * K];

static float uniform(uint64_t *s) {
  *s = *s * 6364136223846793005u + 1442695040888963407u;
  return (float)(*s >> 40) / (float)(1 << 23) - 1;
}

/* Rows with a few common directions, so that columns depend on each other. */
static void make(void) {
  uint64_t s = 7;
  float common[4][K];
  for (int c = 0; c < 4; c++)
    for (int i = 0; i < K; i++)
      common[c][i] = uniform(&s);
  memset(h, 0, sizeof h);
  for (int r = 0; r < ROWS; r++) {
    float x[K], a[4];
    for (int c = 0; c < 4; c++)
      a[c] = 2 * uniform(&s);
    for (int i = 0; i < K; i++) {
      x[i] = 0.3f * uniform(&s) * (float)(1 + i % 5);
      for (int c = 0; c < 4; c++)
        x[i] += a[c] * common[c][i];
    }
    for (int i = 0; i < K; i++)
      for (int j = 0; j < K; j++)
        h[i * K + j] += x[i] * x[j];
  }
  for (int i = 0; i < N * K; i++)
    w[i] = uniform(&s);
}

/* sum over rows of (a - b) H (a - b)' */
static double loss(const float *a, const float *b) {
  double sum = 0;
  for (int r = 0; r < N; r++)
    for (int i = 0; i < K; i++)
      for (int j = 0; j < K; j++)
        sum += (double)(a[r * K + i] - b[r * K + i]) * h[i * K + j] * (a[r * K + j] - b[r * K + j]);
  return sum;
}

static float to_halves(void *ctx, int row, int col, float v) {
  (void)ctx, (void)row, (void)col;
  return rintf(v * 2) / 2;
}

static void errors_are_made_up_for(void **state) {
  mr_err err = MR_ERR_INIT;
  (void)state;
  make();
  float plain[N * K];
  for (int i = 0; i < N * K; i++)
    plain[i] = to_halves(NULL, 0, 0, w[i]);
  for (int in_order = 0; in_order < 2; in_order++) {
    float out[N * K];
    mr_gptq *p;
    memcpy(out, w, sizeof out);
    assert_int_equal(mr_gptq_open(&p, h, K, 0.01, in_order, NULL, &err), MR_OK);
    assert_int_equal(mr_gptq_rows(p, out, N, to_halves, NULL, NULL, &err), MR_OK);
    mr_gptq_close(p);
    for (int i = 0; i < N * K; i++)
      assert_true(out[i] * 2 == rintf(out[i] * 2));
    double ours = loss(out, w), theirs = loss(plain, w);
    print_message("square error %.1f, without %.1f\n", ours, theirs);
    assert_true(ours < 0.5 * theirs);
  }
}

/* Values that are where they may be already stay there. */
static void nothing_to_round(void **state) {
  mr_gptq *p;
  mr_err err = MR_ERR_INIT;
  float same[N * K], before[N * K];
  (void)state;
  make();
  for (int i = 0; i < N * K; i++)
    before[i] = same[i] = to_halves(NULL, 0, 0, w[i]);
  assert_int_equal(mr_gptq_open(&p, h, K, 0.01, true, NULL, &err), MR_OK);
  assert_int_equal(mr_gptq_rows(p, same, N, to_halves, NULL, NULL, &err), MR_OK);
  for (int i = 0; i < N * K; i++)
    assert_true(same[i] == before[i]);
  mr_gptq_close(p);
}

static float drop_first(void *ctx, int row, int col, float v) {
  (void)ctx, (void)row;
  return col == 0 ? 0 : v;
}

static void least_squares(void **state) {
  static const float two[4] = {4, 2, 2, 3};
  float v[2] = {1, 1};
  mr_gptq *p;
  mr_err err = MR_ERR_INIT;
  (void)state;
  assert_int_equal(mr_gptq_open(&p, two, 2, 0, true, NULL, &err), MR_OK);
  assert_int_equal(mr_gptq_rows(p, v, 1, drop_first, NULL, NULL, &err), MR_OK);
  assert_true(v[0] == 0);
  assert_true(fabsf(v[1] - (1 + 2.0f / 3)) < 1e-6f); /* minimizes (w - v) H (w - v)' */
  mr_gptq_close(p);
}

static void two_of_four_stay(void **state) {
  mr_err err = MR_ERR_INIT;
  mr_gptq *p;
  float out[N * K], masked[N * K];
  (void)state;
  make();
  memcpy(out, w, sizeof out);
  assert_int_equal(mr_gptq_open(&p, h, K, 0.01, true, NULL, &err), MR_OK);
  assert_int_equal(mr_gptq_sparse(p, out, N, NULL, &err), MR_OK);
  mr_gptq_close(p);
  for (int i = 0; i < N * K; i += 4) {
    int zeros = 0;
    for (int c = 0; c < 4; c++) {
      zeros += out[i + c] == 0;
      masked[i + c] = out[i + c] == 0 ? 0 : w[i + c];
    }
    assert_int_equal(zeros, 2);
  }
  assert_true(loss(out, w) < 0.6 * loss(masked, w));
}

static void threads_change_nothing(void **state) {
  mr_err err = MR_ERR_INIT;
  float out[2][N * K];
  (void)state;
  make();
  for (int i = 0; i < 2; i++) {
    mr_pool *pool = mr_pool_new(1 + 2 * i, 0);
    mr_gptq *p;
    memcpy(out[i], w, sizeof w);
    assert_int_equal(mr_gptq_open(&p, h, K, 0.01, false, pool, &err), MR_OK);
    assert_int_equal(mr_gptq_rows(p, out[i], N, to_halves, NULL, pool, &err), MR_OK);
    mr_gptq_close(p);
    mr_pool_free(pool);
  }
  assert_memory_equal(out[0], out[1], sizeof w);
}

static void what_cannot_be_factored(void **state) {
  static const float bad[4] = {1, 3, 3, 1}, nan[4] = {NAN, 0, 0, 1};
  static const float dead[4] = {0, 0, 0, 2}; /* a column that nothing meets is damped */
  mr_err err = MR_ERR_INIT;
  mr_gptq *p;
  (void)state;
  assert_int_equal(mr_gptq_open(&p, bad, 2, 0, true, NULL, &err), MR_E_DATA);
  assert_null(p);
  mr_err_clear(&err);
  assert_int_equal(mr_gptq_open(&p, nan, 2, 0, true, NULL, &err), MR_E_DATA);
  mr_err_clear(&err);
  assert_int_equal(mr_gptq_open(&p, dead, 2, 0.01, false, NULL, &err), MR_OK);
  mr_gptq_close(p);
  make();
  mr_code rc = MR_E_NOMEM;
  for (int n = 0; rc; n++) {
    int64_t live = mr_mem_live();
    mr_err_clear(&err);
    mr_mem_fail_after(n);
    rc = mr_gptq_open(&p, h, K, 0.01, false, NULL, &err);
    mr_mem_fail_after(-1);
    if (rc)
      assert_int_equal(mr_mem_live(), live);
    assert_true(n < 20);
  }
  mr_gptq_close(p);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(errors_are_made_up_for), cmocka_unit_test(nothing_to_round),
      cmocka_unit_test(least_squares),          cmocka_unit_test(two_of_four_stay),
      cmocka_unit_test(threads_change_nothing), cmocka_unit_test(what_cannot_be_factored),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
