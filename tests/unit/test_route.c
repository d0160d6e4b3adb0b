#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "src/route.h"

static mr_config config_of(mr_scoring scoring, int n, int used) {
  mr_config c = {.n_experts = n, .n_experts_used = used, .route_scale = 1};
  c.arch.scoring = scoring;
  return c;
}

static void near(float got, double want) {
  if (!(fabs(got - want) < 1e-6))
    fail_msg("%g, not %g", (double)got, want);
}

static void softmax(void **state) {
  (void)state;
  mr_config c = config_of(MR_SCORE_SOFTMAX, 4, 2);
  const float logits[] = {1, 3, 2, 3};
  float room[8], weight[2];
  int32_t chosen[2];
  double sum = exp(1) + 2 * exp(3) + exp(2);
  mr_route(&c, logits, NULL, room, chosen, weight);
  assert_int_equal(chosen[0], 1); /* the lower of two alike */
  assert_int_equal(chosen[1], 3);
  near(weight[0], exp(3) / sum);
  c.arch.renorm = true;
  c.route_scale = 3;
  mr_route(&c, logits, NULL, room, chosen, weight);
  near(weight[0], 1.5);
  near(weight[1], 1.5);
}

/* A bias changes the choice, not the weight. */
static void biased_sigmoid(void **state) {
  (void)state;
  mr_config c = config_of(MR_SCORE_SIGMOID, 3, 1);
  const float logits[] = {2, 1, 0}, bias[] = {0, 0, 1};
  float room[6], weight[1];
  int32_t chosen[1];
  mr_route(&c, logits, bias, room, chosen, weight);
  assert_int_equal(chosen[0], 2);
  near(weight[0], 0.5);
}

/* The best expert is alone in its group; the best two together are elsewhere. */
static void groups(void **state) {
  (void)state;
  mr_config c = config_of(MR_SCORE_SIGMOID, 6, 2);
  const float logits[] = {3, -9, 2, 2, 0, 1};
  float room[12], weight[2];
  int32_t chosen[2];
  c.n_group = 3;
  c.topk_group = 1;
  mr_route(&c, logits, NULL, room, chosen, weight);
  assert_int_equal(chosen[0], 2);
  assert_int_equal(chosen[1], 3);
  c.group_best = true;
  mr_route(&c, logits, NULL, room, chosen, weight);
  assert_int_equal(chosen[0], 0);
  assert_int_equal(chosen[1], 1);
}

static void sparsemixer(void **state) {
  (void)state;
  mr_config c = config_of(MR_SCORE_SPARSEMIXER, 4, 2);
  const float logits[] = {1, 100, 99, 50};
  float room[8], weight[2];
  int32_t chosen[2];
  c.route_jitter = 0.01f;
  mr_route(&c, logits, NULL, room, chosen, weight);
  assert_int_equal(chosen[0], 1);
  assert_int_equal(chosen[1], 2);
  near(weight[0], 1 / (1 + exp(-1))); /* 99 is within 2 % of 100 */
  near(weight[1], 1);                 /* nothing else is near 99 */
}

/* Scores that are no numbers give experts that are in range. */
static void not_numbers(void **state) {
  (void)state;
  const float logits[] = {NAN, NAN, INFINITY, NAN};
  for (int s = MR_SCORE_SOFTMAX; s <= MR_SCORE_SPARSEMIXER; s++) {
    mr_config c = config_of((mr_scoring)s, 4, 3);
    float room[8], weight[3];
    int32_t chosen[3];
    mr_route(&c, logits, NULL, room, chosen, weight);
    for (int k = 0; k < 3; k++)
      assert_in_range(chosen[k], 0, 3);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(softmax),     cmocka_unit_test(biased_sigmoid), cmocka_unit_test(groups),
      cmocka_unit_test(sparsemixer), cmocka_unit_test(not_numbers),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
