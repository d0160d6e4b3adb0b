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

static void nothing_is_known_at_first(void **state) {
  (void)state;
  mr_pace p = {0};
  assert_true(mr_pace_expect_s(&p, 1000, 9, 1000) == 0);
  mr_pace_step(&p, 100, 0.1); /* 1,000 tokens a second, half as many of ten rows' output */
  near_to(mr_pace_expect_s(&p, 2000, 9, 50), 3, 1e-9);
  mr_pace_step(&p, 100, 0); /* a clock that stood still */
  row(&p, 10, 0.1, 10);
  near_to(mr_pace_expect_s(&p, 1000, 9, 10), 2, 1e-9);
}

/* Rows that use half of what they may, one token each 0.1 s, 2,000 tokens a second in all. */
static void rows_like_those_before(void **state) {
  (void)state;
  mr_pace p = {0};
  for (int i = 0; i < 500; i++)
    mr_pace_step(&p, i % 2 ? 100 : 300, 0.1);
  for (int i = 0; i < 200; i++)
    row(&p, 50, 0.1, 100);
  near_to(mr_pace_expect_s(&p, 0, 9, 100), 5, 0.3);
  near_to(mr_pace_expect_s(&p, 4000, 9, 100), 7, 0.4);
  near_to(mr_pace_expect_s(&p, 0, 9, 1000), 50, 3);
}

/* Lengths that differ: longer than the mean, never longer than the limit allows. */
static void the_spread_counts(void **state) {
  (void)state;
  mr_pace p = {0};
  mr_pace_step(&p, 100, 0.1);
  for (int i = 0; i < 300; i++)
    row(&p, i % 2 ? 20 : 80, 0.1, 100);
  near_to(mr_pace_expect_s(&p, 0, 9, 100), 8, 0.6);
  for (int i = 0; i < 300; i++)
    row(&p, i % 4 ? 100 : 20, 0.1, 100);
  near_to(mr_pace_expect_s(&p, 0, 9, 100), 10, 0.01);
}

static void what_is_old_fades(void **state) {
  (void)state;
  mr_pace p = {0};
  for (int i = 0; i < 1000; i++) {
    mr_pace_step(&p, 100, 0.1);
    row(&p, 100, 1, 100);
  }
  for (int i = 0; i < 400; i++) {
    mr_pace_step(&p, 1000, 0.1);
    row(&p, 10, 0.01, 100);
  }
  near_to(mr_pace_expect_s(&p, 0, 9, 100), 0.1, 0.1); /* it was 100 */
  near_to(mr_pace_expect_s(&p, 10000, 9, 0), 1, 0.1);
}

static void scores_have_no_tokens(void **state) {
  (void)state;
  mr_pace p = {0};
  mr_choice c = {.n_sampled = 0, .n_ids = 3};
  mr_result r = {.choices = &c, .n_choices = 1, .admitted_s = 1, .done_s = 2};
  mr_pace_step(&p, 100, 0.1);
  mr_pace_row(&p, &r, 3);
  near_to(mr_pace_expect_s(&p, 500, 9, 3), 0.5, 1e-9);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(nothing_is_known_at_first), cmocka_unit_test(rows_like_those_before),
      cmocka_unit_test(the_spread_counts),         cmocka_unit_test(what_is_old_fades),
      cmocka_unit_test(scores_have_no_tokens),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
