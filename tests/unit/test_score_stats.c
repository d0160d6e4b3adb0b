#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>

#include "jobs/score_stats.h"

static void near(double x, double want) {
  if (!(fabs(x - want) <= 1e-6))
    print_error("%.12g is not %.12g\n", x, want);
  assert_true(fabs(x - want) <= 1e-6);
}

static void shares(void **state) {
  (void)state;
  mr_stats s = {0};
  for (int i = 0; i < 10; i++)
    mr_stats_add(&s, i % 2, 1);
  mr_mean e = mr_stats_estimate(&s, 0, 1);
  assert_int_equal(e.n, 10);
  near(e.mean, 0.5);
  near(e.error, 0.1666667); /* sqrt(2.5 / 9 / 10) */
  near(e.low, 0.2365931);
  near(e.high, 0.7634069);
  mr_stats none = {0};
  mr_stats_add_zeros(&none, 10); /* the interval holds at the edge too */
  e = mr_stats_estimate(&none, 0, 1);
  near(e.mean, 0);
  near(e.low, 0);
  near(e.high, 0.2775328);
}

static void zeros_are_rows(void **state) {
  (void)state;
  mr_stats a = {0}, b = {0};
  mr_stats_add(&a, 1, 1);
  mr_stats_add(&a, 0.5, 1);
  b = a;
  for (int i = 0; i < 3; i++)
    mr_stats_add(&a, 0, 1);
  mr_stats_add_zeros(&b, 3);
  mr_mean x = mr_stats_estimate(&a, 0, 1), y = mr_stats_estimate(&b, 0, 1);
  assert_int_equal(x.n, y.n);
  near(x.mean, 0.3);
  near(x.mean, y.mean);
  near(x.error, y.error);
  near(x.low, y.low);
}

static void uneven(void **state) {
  (void)state;
  mr_stats s = {0};
  mr_stats_add(&s, 1, 1);
  mr_stats_add(&s, 0.5, 1);
  mr_stats_add(&s, 0.75, 1);
  mr_mean e = mr_stats_estimate(&s, 0, 1);
  near(e.mean, 0.75);
  near(e.error, 0.25 / sqrt(3)); /* the deviation is 0.25 */
  near(e.low, 0.75 - 1.959964 * e.error);
  near(e.high, 1); /* not beyond what is possible */
}

static void ratios(void **state) {
  (void)state;
  mr_stats s = {0};
  mr_stats_add(&s, 10, 10);
  mr_stats_add(&s, 1, 2);
  mr_mean e = mr_stats_estimate(&s, 0, INFINITY);
  near(e.mean, 11.0 / 12);
  double r = 11.0 / 12, d = (10 - 10 * r) * (10 - 10 * r) + (1 - 2 * r) * (1 - 2 * r);
  near(e.error, sqrt(d * 2) / 12);
}

static void too_few(void **state) {
  (void)state;
  mr_stats s = {0};
  assert_true(isnan(mr_stats_estimate(&s, 0, 1).mean));
  mr_stats_add(&s, 1, 1);
  mr_mean e = mr_stats_estimate(&s, 0, 1);
  near(e.mean, 1);
  assert_true(isnan(e.error) && isnan(e.low) && isnan(e.high));
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(shares), cmocka_unit_test(zeros_are_rows),
                                     cmocka_unit_test(uneven), cmocka_unit_test(ratios),
                                     cmocka_unit_test(too_few)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
