#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "io/mem.h"
#include "jobs/accuracy.h"
#include "src/quantize.h"
#include "tests/unit/temp.h"
#include "tests/unit/tiny_gguf.h"

static int32_t ids[200];
static mr_pool *pool;
static char model[300], four[300];

static int begin(void **state) {
  mr_err err = MR_ERR_INIT;
  mr_quantize_report r;
  uint64_t s = 5;
  if (temp_begin(state))
    return -1;
  for (int i = 0; i < 200; i++)
    ids[i] = (int32_t)((s = s * 6364136223846793005u + 1) >> 56);
  snprintf(model, sizeof model, "%s", temp_path("m.gguf"));
  snprintf(four, sizeof four, "%s", temp_path("q.gguf"));
  tiny_gguf_write(model, -1);
  pool = mr_pool_new(2, 0);
  mr_quantize_opts o = {.in = model, .out = four, .dtype = MR_Q4_0, .head_dtype = MR_Q4_0};
  return pool ? (int)mr_quantize(&o, &r, &err) : -1;
}

static int end(void **state) {
  mr_pool_free(pool);
  return temp_end(state);
}

static mr_accuracy_sum compared(const char *a, bool a_exact, const char *b, bool b_exact) {
  mr_accuracy_way x = {a, a_exact, -1}, y = {b, b_exact, -1};
  mr_accuracy *acc;
  mr_tally t = {0};
  mr_err err = MR_ERR_INIT;
  assert_int_equal(mr_accuracy_open(&acc, &x, &y, pool, &err), MR_OK);
  assert_int_equal(mr_accuracy_window(acc), 256);
  assert_int_equal(mr_accuracy_add(acc, &t, ids, 150, &err), MR_OK);
  assert_int_equal(mr_accuracy_add(acc, &t, ids + 150, 50, &err), MR_OK);
  mr_accuracy_sum s = mr_tally_sum(&t);
  mr_tally_free(&t);
  mr_accuracy_close(acc);
  return s;
}

static void same_model(void **state) {
  mr_accuracy_sum s = compared(model, true, model, true);
  (void)state;
  assert_int_equal(s.tokens, 200);
  assert_true(s.kl == 0 && s.kl_p99 == 0 && s.same_percent == 100 && s.perplexity_percent == 0);
  assert_true(s.perplexity[0] > 1 && s.perplexity[0] == s.perplexity[1]);
}

/* Fewer bits are further away, and what is far is far from both sides. */
static void more_or_less(void **state) {
  mr_accuracy_sum fast = compared(model, true, model, false);
  mr_accuracy_sum bits = compared(model, true, four, true);
  mr_accuracy_sum back = compared(four, true, model, true);
  (void)state;
  print_message("int8 %.2g, 4 bits %.2g\n", fast.kl, bits.kl);
  assert_true(fast.kl > 0 && fast.kl < bits.kl && bits.kl < 1);
  assert_true(bits.kl_p99 > bits.kl && bits.same_percent <= fast.same_percent);
  assert_true(back.kl > bits.kl / 3 && back.kl < bits.kl * 3);
  assert_true(back.perplexity[0] == bits.perplexity[1]);
}

static void sums(void **state) {
  mr_err err = MR_ERR_INIT;
  mr_tally a = {0}, b = {0};
  (void)state;
  mr_accuracy_sum none = mr_tally_sum(&a);
  assert_int_equal(none.tokens, 0);
  assert_true(none.kl == 0 && none.perplexity_percent == 0);
  b.kl = mr_mem_alloc(100, sizeof *b.kl);
  b.cap = b.n = 100;
  for (int i = 0; i < 100; i++) {
    b.kl[i] = (float)(99 - i);
    b.sum += 99 - i;
  }
  b.same = 25;
  b.next = 50;
  b.nll[0] = 50 * log(10);
  b.nll[1] = 50 * log(11);
  assert_int_equal(mr_tally_join(&a, &b, &err), MR_OK);
  assert_int_equal(mr_tally_join(&a, &b, &err), MR_OK);
  mr_accuracy_sum s = mr_tally_sum(&a);
  assert_int_equal(s.tokens, 200);
  assert_true(fabs(s.kl - 49.5) < 1e-9 && s.kl_p99 == 99 && s.same_percent == 25);
  assert_true(fabs(s.perplexity[0] - 10) < 1e-9 && fabs(s.perplexity_percent - 10) < 1e-9);
  mr_tally_free(&a);
  mr_tally_free(&b);
}

static void refused(void **state) {
  mr_accuracy_way x = {model, true, -1}, gone = {"no-such-file", true, -1};
  mr_accuracy *acc;
  mr_err err = MR_ERR_INIT;
  mr_code rc = MR_E_NOMEM;
  (void)state;
  assert_int_equal(mr_accuracy_open(&acc, &x, &gone, pool, &err), MR_E_NOINPUT);
  assert_null(acc);
  for (int n = 0; rc; n++) {
    int64_t live = mr_mem_live();
    mr_err_clear(&err);
    mr_mem_fail_after(n);
    rc = mr_accuracy_open(&acc, &x, &x, pool, &err);
    mr_mem_fail_after(-1);
    mr_accuracy_close(acc);
    assert_int_equal(mr_mem_live(), live);
    assert_true(rc == MR_OK || rc == MR_E_NOMEM);
  }
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, begin, end)

int main(void) {
  const struct CMUnitTest tests[] = {TEST(same_model), TEST(more_or_less), cmocka_unit_test(sums),
                                     TEST(refused)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
