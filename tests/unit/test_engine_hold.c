/* Requests that are held back, so that others end sooner; memory that is held back. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "tests/unit/engine_rig.h"

#define ROWS 4

static int setup(void **state) {
  return tiny_begin(state, -1);
}

static mr_engine *open_tiny(void) {
  mr_engine_opts o = tiny_options("cpu", 0, 2 << 20);
  return open_engine(&o, tiny);
}

/* Row i may choose lengths[i] tokens. */
static const int lengths[ROWS] = {6, 12, 12, 4};

static mr_request request(int i) {
  static const int32_t prompt[] = {40, 41, 42, 43, 44};
  mr_request r = generate(prompt, 5, lengths[i]);
  r.tag = (uint64_t)i;
  r.sampling.temperature = 1;
  r.sampling.seed = 77 + i;
  r.sampling.ignore_eos = true;
  return r;
}

static void admit_all(mr_engine *e) {
  mr_err err = MR_ERR_INIT;
  for (int i = 0; i < ROWS; i++) {
    mr_request r = request(i);
    assert_int_equal(mr_engine_admit(e, &r, &err), MR_OK);
  }
}

static void expect_left(const mr_engine *e, uint64_t in, uint64_t tokens, uint64_t longest,
                        uint64_t held) {
  mr_engine_left left;
  mr_engine_left_get(e, &left);
  assert_int_equal(left.tokens, tokens);
  assert_int_equal(left.longest, longest);
  assert_int_equal(left.prompt_tokens, in);
  assert_int_equal(left.held, held);
}

static void the_longest_stand_back(void **state) {
  (void)state;
  mr_result *base[ROWS] = {NULL}, *held[ROWS] = {NULL};
  mr_engine *e = open_tiny();
  expect_left(e, 0, 0, 0, 0);
  admit_all(e);
  while (mr_engine_active(e))
    step(e, base);
  admit_all(e);
  expect_left(e, 20, 34, 12, 0);
  assert_true(mr_engine_hold(e)); /* row 2, the younger of two; it has not begun */
  expect_left(e, 15, 22, 12, 1);
  assert_true(mr_engine_release(e));
  step(e, held);
  expect_left(e, 0, 30, 11, 0);
  assert_true(mr_engine_hold(e)); /* row 2, the younger of two */
  expect_left(e, 0, 19, 11, 1);
  assert_true(mr_engine_hold(e)); /* row 1 */
  expect_left(e, 0, 8, 5, 2);
  for (int i = 0; i < 5; i++)
    step(e, held);
  assert_true(held[0] && held[3] && !held[1] && !held[2]);
  expect_left(e, 0, 0, 0, 2);
  assert_false(mr_engine_hold(e));
  assert_true(mr_engine_release(e)); /* row 1, the last */
  for (int i = 0; i < 11; i++)
    step(e, held);
  assert_true(held[1] && !held[2]);
  step(e, held); /* nobody but row 2 is left, so it goes on */
  assert_false(mr_engine_release(e));
  while (mr_engine_active(e))
    step(e, held);
  for (int i = 0; i < ROWS; i++) { /* nothing of it shows */
    assert_int_equal(held[i]->choices[0].n_ids, lengths[i]);
    assert_memory_equal(held[i]->choices[0].ids, base[i]->choices[0].ids,
                        (size_t)lengths[i] * sizeof(int32_t));
    mr_result_free(held[i]);
    mr_result_free(base[i]);
  }
  mr_engine_close(e);
}

/* The machine's memory is low: the cache grows no further, and all requests are answered as before;
 * where nothing could go on, it grows after all. */
static void low_memory(void **state) {
  (void)state;
  mr_engine_stats st;
  mr_err err = MR_ERR_INIT;
  mr_result *base[ROWS] = {NULL}, *low[ROWS] = {NULL};
  mr_engine *e = open_tiny();
  admit_all(e);
  while (mr_engine_active(e))
    step(e, base);
  mr_engine_close(e);
  e = open_tiny();
  mr_engine_memory_low(e, true);
  mr_request r = request(1); /* nobody has had a page yet */
  assert_int_equal(mr_engine_admit(e, &r, &err), MR_OK);
  step(e, low);
  mr_engine_memory_low(e, true);
  r = request(2);
  assert_int_equal(mr_engine_admit(e, &r, &err), MR_E_AGAIN);
  mr_engine_memory_low(e, false);
  assert_int_equal(mr_engine_admit(e, &r, &err), MR_OK);
  mr_engine_memory_low(e, true); /* it has no page, and waits */
  while (!low[1])
    step(e, low);
  mr_engine_stats_get(e, &st);
  assert_true(st.kv_pages_peak == 1 && st.kv_pages_held_back == st.kv_pages_total);
  while (!low[2])
    step(e, low);
  r = request(0);
  assert_int_equal(mr_engine_admit(e, &r, &err), MR_OK);
  while (!low[0])
    step(e, low);
  mr_engine_stats_get(e, &st);
  assert_int_equal(st.kv_pages_peak, 1);
  for (int i = 0; i < ROWS; i++) {
    if (low[i])
      assert_memory_equal(low[i]->choices[0].ids, base[i]->choices[0].ids,
                          (size_t)lengths[i] * sizeof(int32_t));
    mr_result_free(low[i]);
    mr_result_free(base[i]);
  }
  mr_engine_close(e);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(the_longest_stand_back),
                                     cmocka_unit_test(low_memory)};
  return cmocka_run_group_tests(tests, setup, tiny_end);
}
