#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "jobs/pace.h"

static void near_to(double x, double want, double within) {
  if (!(x > want - within && x < want + within))
    print_error("%g, expected %g\n", x, want);
  assert_true(x > want - within && x < want + within);
}

static void row(mr_pace *p, int tokens, double token_s, int n_out) {
  mr_choice c = {.n_sampled = tokens};
  mr_result r = {.choices = &c, .n_choices = 1, .admitted_s = 5, .first_token_s = 7};
  r.done_s = 7 + (tokens - 1) * token_s;
  mr_pace_row(p, &r, n_out);
}

static double expect(const mr_pace *p, double in, double out, double longest) {
  const mr_pace_work w = {in, out, longest};
  return mr_pace_expect_s(p, &w);
}

static void nothing_is_known_at_first(void **state) {
  (void)state;
  mr_pace p = {0};
  assert_false(mr_pace_known(&p));
  assert_true(expect(&p, 1000, 1000, 1000) == 0);
  mr_pace_step(&p, 100, 0, 0); /* a clock that stood still */
  mr_pace_step(&p, 0, 0, 1);
  assert_false(mr_pace_known(&p));
  mr_pace_step(&p, 100, 0, 0.1); /* 1,000 tokens a second, half as many of output */
  assert_true(mr_pace_known(&p));
  near_to(expect(&p, 2000, 500, 50), 3, 1e-9);
}

/* 10 ms a step, 0.5 ms a token of a prompt, 1 ms a token of an output. */
static double cost(double in, double out) {
  return 0.01 + 0.0005 * in + 0.001 * out;
}

static void costs_are_told_apart(void **state) {
  (void)state;
  mr_pace p = {0};
  for (int i = 0; i < 100; i++)
    mr_pace_step(&p, 400, 50, cost(400, 50));
  near_to(expect(&p, 10000, 5000, 100), 10, 1.5); /* 11 s of which the steps are a part */
  for (int i = 0; i < 100; i++)
    mr_pace_step(&p, 0, 10 + i, cost(0, 10 + i));
  near_to(expect(&p, 0, 2000, 100), 3, 0.2);
  near_to(expect(&p, 0, 100, 100), 1.1, 0.2); /* alone */
  near_to(expect(&p, 10000, 0, 0), 5, 0.4);
}

/* Batches that were all alike say nothing of smaller ones. */
static void alike_batches(void **state) {
  (void)state;
  mr_pace p = {0};
  for (int i = 0; i < 100; i++)
    mr_pace_step(&p, 0, 50, i % 2 ? 0.05 : 0.07);
  near_to(expect(&p, 0, 5000, 100), 6, 0.1);
  near_to(expect(&p, 0, 100, 100), 0.12, 0.02);
}

/* Rows that use half of what they may. */
static void rows_like_those_before(void **state) {
  (void)state;
  mr_pace p = {0};
  mr_pace_step(&p, 0, 50, 0.05);
  near_to(expect(&p, 0, 1000, 100), 1, 1e-9);
  for (int i = 0; i < 200; i++)
    row(&p, 50, 0.1, 100);
  near_to(expect(&p, 0, 1000, 100), 0.5, 1e-6);
}

/* Lengths that differ: the sum by the mean, the longest by more, never more than its limit. */
static void the_spread_counts(void **state) {
  (void)state;
  mr_pace p = {0};
  for (int i = 0; i < 100; i++)
    mr_pace_step(&p, 0, 1 + i, 0.1); /* the steps alone cost */
  for (int i = 0; i < 300; i++)
    row(&p, i % 2 ? 20 : 80, 0.1, 100);
  near_to(p.share, 0.5, 0.02);
  near_to(expect(&p, 0, 0, 100), 8, 0.6);
  for (int i = 0; i < 300; i++)
    row(&p, i % 4 ? 100 : 20, 0.1, 100);
  near_to(expect(&p, 0, 0, 100), 10, 0.5);
}

static void what_is_old_fades(void **state) {
  (void)state;
  mr_pace p = {0};
  for (int i = 0; i < 1000; i++) {
    mr_pace_step(&p, 0, 10, 1);
    row(&p, 100, 1, 100);
  }
  for (int i = 0; i < 2000; i++) {
    mr_pace_step(&p, 0, 10, 0.1);
    row(&p, 10, 0.01, 100);
  }
  near_to(expect(&p, 0, 1000, 1), 1, 0.1); /* it was 100 */
}

static void scores_have_no_tokens(void **state) {
  (void)state;
  mr_pace p = {0};
  mr_choice c = {.n_sampled = 0, .n_ids = 3};
  mr_result r = {.choices = &c, .n_choices = 1, .admitted_s = 1, .done_s = 2};
  mr_pace_row(&p, &r, 3);
  assert_int_equal(p.n, 0);
}

/* Of n choices each counts. */
static void choices(void **state) {
  (void)state;
  mr_pace p = {0};
  mr_choice c[2] = {{.n_sampled = 30}, {.n_sampled = 10}};
  mr_result r = {.choices = c, .n_choices = 2};
  mr_pace_row(&p, &r, 80);
  near_to(p.share, 0.5, 1e-9);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(nothing_is_known_at_first),
      cmocka_unit_test(costs_are_told_apart),
      cmocka_unit_test(alike_batches),
      cmocka_unit_test(rows_like_those_before),
      cmocka_unit_test(the_spread_counts),
      cmocka_unit_test(what_is_old_fades),
      cmocka_unit_test(scores_have_no_tokens),
      cmocka_unit_test(choices),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
