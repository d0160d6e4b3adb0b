#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include <math.h>

#include "io/json.h"
#include "jobs/score_line.h"

static json_t *object;

static mr_score_line read(const char *s) {
  mr_err e = MR_ERR_INIT;
  mr_score_line l;
  json_decref(object);
  object = mr_json_parse(s, strlen(s), NULL, &e);
  if (!object)
    print_error("%s\n", e.text);
  assert_non_null(object);
  assert_true(mr_score_line_read(&l, object));
  return l;
}

static void is_output(const mr_score_line *l, int i, const char *want) {
  mr_str s = mr_score_line_output(l, i);
  assert_int_equal(s.len, strlen(want));
  assert_memory_equal(s.s, want, s.len);
}

static void forms(void **state) {
  (void)state;
  mr_score_line l = read("{\"id\": 7, \"output\": \"x\"}");
  assert_true(json_is_integer(l.id));
  assert_int_equal(l.n_outputs, 1);
  is_output(&l, 0, "x");
  l = read("{\"id\": \"a\", \"output\": [\"x\", \"yy\"]}");
  assert_int_equal(l.n_outputs, 2);
  is_output(&l, 1, "yy");
  l = read("{\"id\":\"batch_1\",\"custom_id\":\"k\",\"response\":{\"status_code\":200,\"body\":"
           "{\"choices\":[{\"message\":{\"content\":\"hi\"}},{\"message\":{\"content\":null}}]}},"
           "\"error\":null}");
  assert_string_equal(json_string_value(l.id), "k");
  assert_int_equal(l.n_outputs, 2);
  is_output(&l, 0, "hi");
  is_output(&l, 1, ""); /* a tool call */
  l = read("{\"custom_id\":\"k\",\"response\":{\"body\":{\"choices\":[{\"text\":\"t\"}]}}}");
  is_output(&l, 0, "t");
  assert_false(l.failed);
}

static void failures(void **state) {
  (void)state;
  assert_true(read("{\"custom_id\":null,\"response\":{\"status_code\":400,\"body\":{\"error\":"
                   "{\"message\":\"m\"}}},\"error\":null}")
                  .failed);
  assert_true(read("{\"custom_id\":\"k\",\"response\":null,\"error\":{\"code\":\"batch_expired\"}}")
                  .failed);
  assert_true(read("{\"custom_id\":\"k\",\"error\":{\"code\":\"x\"}}").failed);
  assert_false(read("{\"id\":\"k\",\"output\":\"\",\"error\":{\"mine\":1}}").failed);
  assert_null(read("{\"custom_id\":null,\"id\":\"a\",\"output\":\"\"}").id);
}

/* What a plain row has beside its prompt comes back with the result, whatever it is called. */
static void fields_of_the_input(void **state) {
  (void)state;
  mr_score_line l = read("{\"id\":\"a\",\"response\":\"gold\",\"output\":\"x\",\"usage\":{}}");
  assert_false(l.failed);
  is_output(&l, 0, "x");
  l = read("{\"id\":\"a\",\"response\":{\"body\":{\"choices\":[]}},\"output\":\"x\",\"usage\":{}}");
  assert_int_equal(l.n_outputs, 1);
  is_output(&l, 0, "x");
  l = read("{\"id\":\"a\",\"error\":{\"code\":1},\"best\":2,\"usage\":{}}");
  assert_false(l.failed);
  assert_int_equal(mr_score_line_best(&l, false), 2);
}

static void choices(void **state) {
  (void)state;
  mr_score_line l = read("{\"id\":\"a\",\"best\":2,\"best_normalized\":0}");
  assert_int_equal(mr_score_line_best(&l, false), 2);
  assert_int_equal(mr_score_line_best(&l, true), 0);
  assert_int_equal(l.n_outputs, 0);
  l = read("{\"id\":\"a\",\"best\":\"2\",\"best_normalized\":-1}");
  assert_int_equal(mr_score_line_best(&l, false), -1);
  assert_int_equal(mr_score_line_best(&l, true), -1);
}

static void sums(const char *s, double sum, double tokens, double bytes) {
  double x, n, b;
  mr_score_line l = read(s);
  assert_true(mr_score_line_logprobs(&l, &x, &n, &b));
  assert_true(fabs(x - sum) < 1e-9 && n == tokens && b == bytes);
}

static void none(const char *s) {
  double x, n, b;
  mr_score_line l = read(s);
  assert_false(mr_score_line_logprobs(&l, &x, &n, &b));
}

static void probabilities(void **state) {
  (void)state;
  sums("{\"id\":\"a\",\"logprob\":-3,\"token_logprobs\":[-1,-2],\"continuation\":\" ab\"}", -3, 2,
       3);
  sums("{\"id\":\"a\",\"output\":\"ab\",\"logprobs\":{\"token_logprobs\":[-0.5,-0.25]}}", -0.75, 2,
       2);
  sums("{\"id\":\"a\",\"output\":[\"ab\",\"c\"],\"logprobs\":[{\"token_logprobs\":[-1]},"
       "{\"token_logprobs\":[-2]}]}",
       -3, 2, 3);
  sums(
      "{\"custom_id\":\"a\",\"response\":{\"body\":{\"choices\":[{\"message\":{\"content\":\"hi\"},"
      "\"logprobs\":{\"content\":[{\"logprob\":-1},{\"logprob\":-0.5}]}}]}}}",
      -1.5, 2, 2);
  sums("{\"id\":\"a\",\"output\":\"p ab\",\"logprobs\":{\"token_logprobs\":[null,-1,-2]}}", -3, 2,
       0); /* echo: the text is not that of these tokens */
  sums("{\"id\":\"a\",\"output\":\"x\",\"prompt_token_logprobs\":[null,-4]}", -4, 1, 0);
  none("{\"id\":\"a\",\"output\":\"x\"}");
  none("{\"id\":\"a\",\"output\":\"x\",\"logprobs\":{\"token_logprobs\":[]}}");
  none("{\"id\":\"a\",\"token_logprobs\":[-1,null]}"); /* a token of probability 0 */
  none("{\"id\":\"a\",\"token_logprobs\":[null]}");
  none("{\"custom_id\":\"a\",\"token_logprobs\":[-1],\"error\":{\"code\":\"x\"}}");
}

/* Of other types: as absent. */
static void odd(void **state) {
  (void)state;
  mr_score_line l = read("{\"id\":1.5,\"output\":{\"a\":1},\"best\":1e300,\"logprobs\":3,"
                         "\"response\":{\"body\":[]}}");
  assert_null(l.id);
  assert_int_equal(mr_score_line_best(&l, false), -1);
  l = read("{\"id\":\"a\",\"output\":[1,\"b\"]}");
  is_output(&l, 0, "");
  is_output(&l, 1, "b");
  l = read("{\"id\":\"a\",\"response\":{\"body\":{\"choices\":[{\"finish_reason\":\"stop\"}]}}}");
  assert_int_equal(l.n_outputs, 0);
  json_t *list = json_array();
  assert_false(mr_score_line_read(&l, list));
  json_decref(list);
  json_decref(object);
  object = NULL;
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(forms),
                                     cmocka_unit_test(failures),
                                     cmocka_unit_test(fields_of_the_input),
                                     cmocka_unit_test(choices),
                                     cmocka_unit_test(probabilities),
                                     cmocka_unit_test(odd)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
