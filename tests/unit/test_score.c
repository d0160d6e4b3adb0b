#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include <math.h>

#include "io/json.h"
#include "io/mem.h"
#include "jobs/score.h"
#include "temp.h"

static mr_err err;
static json_t *result;
static mr_text rows; /* what mr_score_rows_to got */
static bool again; /* the files are there; that of rows is not finished, which waits for the disk */

static void read_rows(const char *path) {
  char buf[8192];
  FILE *f = fopen(path, "rb");
  assert_non_null(f);
  size_t n = fread(buf, 1, sizeof buf, f);
  fclose(f);
  mr_text_clear(&rows);
  mr_text_add(&rows, buf, n);
}

/* Scores the text of results; refs NULL: the results bring their own. The JSON is in `result`. */
static mr_code score(mr_score_opts *o, const char *results, const char *refs, bool part) {
  mr_score *s;
  mr_outfile *file = NULL;
  mr_outfile_info info;
  char ref_path[300], result_path[300], row_path[300];
  char *list[] = {ref_path};
  const char *paths[] = {result_path};
  if (!again) {
    temp_text("refs.jsonl", refs ? refs : "");
    temp_text("results.jsonl", results);
  }
  snprintf(ref_path, sizeof ref_path, "%s", temp_path("refs.jsonl"));
  snprintf(result_path, sizeof result_path, "%s", temp_path("results.jsonl"));
  snprintf(row_path, sizeof row_path, "%s", temp_path("rows.jsonl"));
  o->refs = (mr_list){list, refs != NULL};
  mr_err_clear(&err);
  json_decref(result);
  result = NULL;
  mr_code rc = mr_score_open(&s, o, &err);
  if (rc)
    return rc;
  if (part)
    mr_score_is_part(s);
  rc = mr_outfile_open(&file, row_path, MR_OUT_PLAIN, 3, &err);
  mr_score_rows_to(s, file);
  if (!rc)
    rc = mr_score_read(s, paths, 1, &err);
  if (!rc)
    rc = mr_score_finish(s, &err);
  if (!rc && !again)
    rc = mr_outfile_finish(file, &info, &err);
  mr_outfile_close(file);
  if (!rc && !(result = mr_score_to_json(s)))
    rc = MR_E_NOMEM;
  mr_score_close(s);
  if (!rc && !again)
    read_rows(row_path);
  return rc;
}

static void ok(mr_score_opts *o, const char *results, const char *refs) {
  mr_code rc = score(o, results, refs, false);
  if (rc)
    print_error("%s\n", err.text);
  assert_int_equal(rc, MR_OK);
}

static double field(const char *group, const char *metric, const char *name) {
  const json_t *o = group ? json_object_get(json_object_get(result, "groups"), group) : result;
  o = metric ? json_object_get(json_object_get(o, "metrics"), metric) : o;
  const json_t *v = json_object_get(o, name);
  return json_is_number(v) ? json_number_value(v) : NAN;
}

static void is(const char *group, const char *metric, double value, int n) {
  double v = field(group, metric, "value"), have = field(group, metric, "rows");
  if (!(fabs(v - value) < 1e-9) || have != n)
    print_error("%s %s is %g of %g rows\n", group ? group : "all", metric, v, have);
  assert_true(fabs(v - value) < 1e-9 && have == n);
}

#define BIT(metric) (1u << MR_METRIC_##metric)

static const char three[] = "{\"id\":\"a\",\"output\":\" Paris.\\n\"}\n"
                            "{\"id\":\"b\",\"output\":\"it is 42\"}\n"
                            "{\"id\":\"c\",\"output\":\"x\"}\n";
static const char four[] = "{\"id\":\"a\",\"answer\":\"Paris.\",\"t\":\"u\"}\n"
                           "{\"id\":\"b\",\"answer\":[\"41\",\"42\"],\"t\":\"v\"}\n"
                           "{\"id\":\"d\",\"answer\":\"y\",\"t\":\"u\"}\n"
                           "{\"id\":\"e\",\"answer\":\"z\",\"t\":\"w\"}\n";

/* What is missing counts as wrong, unless told otherwise; what has no reference is told. */
static void both_sides(void **state) {
  (void)state;
  mr_score_opts o = {.metrics = BIT(EXACT_MATCH) | BIT(CONTAINS), .by = (char *)"t"};
  ok(&o, three, four);
  is(NULL, "exact_match", 0.25, 4);
  is(NULL, "contains", 0.5, 4);
  is("u", "exact_match", 0.5, 2);
  is("v", "contains", 1, 1);
  is("w", "exact_match", 0, 1);
  assert_true(field(NULL, NULL, "results") == 3 && field(NULL, NULL, "missing") == 2 &&
              field(NULL, NULL, "unreferenced") == 1 && field(NULL, NULL, "scored") == 2);
  assert_non_null(strstr(rows.data, "{\"id\":\"d\",\"group\":\"u\",\"missing\":true}\n"));
  assert_non_null(strstr(rows.data, "\"answer\":\"it is 42\",\"reference\":[\"41\",\"42\"]}"));
  o.skip_missing = 1;
  ok(&o, three, four);
  is(NULL, "exact_match", 0.5, 2);
  is(NULL, "contains", 1, 2);
  assert_true(field(NULL, NULL, "missing") == 0);
}

static const char errors[] = "{\"custom_id\":\"e\",\"response\":{\"status_code\":400,\"body\":{}},"
                             "\"error\":null}\n{\"custom_id\":null,\"error\":{\"code\":\"x\"}}\n";

static void failed_rows(void **state) {
  (void)state;
  char text[1000];
  mr_score_opts o = {.metrics = BIT(EXACT_MATCH)};
  snprintf(text, sizeof text, "%s%s", errors, three);
  ok(&o, text, four); /* e is missing once, not twice */
  is(NULL, "exact_match", 0.25, 4);
  assert_true(field(NULL, NULL, "failed") == 2 && field(NULL, NULL, "missing") == 2);
  snprintf(text, sizeof text, "{\"id\":\"a\",\"output\":\"1\",\"label\":1}\n%s", errors);
  ok(&o, text, NULL); /* without references each line of an error is a row */
  is(NULL, "exact_match", 1.0 / 3, 3);
  o.skip_missing = 1;
  ok(&o, text, NULL);
  is(NULL, "exact_match", 1, 1);
}

/* Of a shard only its own rows count. */
static void a_shard(void **state) {
  (void)state;
  char text[1000];
  mr_score_opts o = {.metrics = BIT(EXACT_MATCH)};
  snprintf(text, sizeof text, "%s%s", three, errors);
  assert_int_equal(score(&o, text, four, true), MR_OK);
  is(NULL, "exact_match", 1.0 / 3, 3); /* a, b, and e, which failed; d is elsewhere */
}

static void repeated(void **state) {
  (void)state;
  mr_score_opts o = {.metrics = BIT(EXACT_MATCH)};
  const char *twice = "{\"id\":\"a\",\"output\":\"1\",\"answer\":1}\n"
                      "{\"id\":\"a\",\"output\":\"2\",\"answer\":1}\n";
  ok(&o, twice, NULL);
  is(NULL, "exact_match", 1, 1);
  assert_true(field(NULL, NULL, "repeated") == 1);
  ok(&o, twice, "{\"id\":\"a\",\"answer\":2}\n");
  is(NULL, "exact_match", 0, 1);
  assert_true(field(NULL, NULL, "repeated") == 1);
}

static void by_the_kind_of_row(void **state) {
  (void)state;
  mr_score_opts o = {.metrics = 0};
  ok(&o,
     "{\"id\":\"a\",\"output\":\"x\",\"answer\":\"x\",\"logprobs\":{\"token_logprobs\":[-1]}}\n"
     "{\"id\":\"b\",\"best\":1,\"best_normalized\":0,\"label\":\"B\"}\n"
     "{\"id\":\"c\",\"best\":0,\"best_normalized\":0,\"label\":[1,0]}\n"
     "{\"id\":\"d\",\"logprob\":-3,\"token_logprobs\":[-1,-2]}\n"
     "{\"id\":\"e\",\"logprob\":-1,\"token_logprobs\":[-1]}\n",
     NULL);
  is(NULL, "exact_match", 1, 1);
  is(NULL, "choice", 1, 2);
  is(NULL, "choice_normalized", 0.5, 2);
  is(NULL, "perplexity", exp(4.0 / 3), 2);
  assert_true(field(NULL, NULL, "unreferenced") == 0);
  assert_true(isnan(field(NULL, "f1", "value")));
}

static void bits(void **state) {
  (void)state;
  mr_score_opts o = {.metrics = BIT(BITS_PER_BYTE) | BIT(PERPLEXITY)};
  ok(&o, "{\"id\":\"a\",\"logprob\":-3,\"token_logprobs\":[-1,-2]}\n", /* bytes: of the reference */
     "{\"id\":\"a\",\"answer\":\"abcd\"}\n{\"id\":\"b\",\"answer\":\"q\"}\n");
  is(NULL, "bits_per_byte", 3 / M_LN2 / 4, 1); /* b is missing, and has no probability to count */
  is(NULL, "perplexity", exp(1.5), 1);
  assert_true(field(NULL, NULL, "missing") == 1);
}

static void outputs(void **state) {
  (void)state;
  const char *text = "{\"id\":\"a\",\"output\":[\"n\",\"y\",\"y\",\"n\"],\"answer\":\"y\"}\n";
  mr_score_opts o = {.metrics = BIT(EXACT_MATCH)};
  ok(&o, text, NULL);
  is(NULL, "exact_match", 0.5, 1);
  o.outputs = MR_OUTPUTS_BEST;
  ok(&o, text, NULL);
  is(NULL, "exact_match", 1, 1);
  o.outputs = MR_OUTPUTS_FIRST;
  ok(&o, text, NULL);
  is(NULL, "exact_match", 0, 1);
}

static void extraction(void **state) {
  (void)state;
  const char *text = "{\"id\":\"a\",\"output\":\"(A) no, (B)\",\"answer\":\"B\"}\n"
                     "{\"id\":\"b\",\"output\":\"B\",\"answer\":\"B\"}\n";
  mr_score_opts o = {.metrics = BIT(EXACT_MATCH) | BIT(REGEX), .extract = (char *)"\\(([A-D])\\)"};
  ok(&o, text, NULL);
  is(NULL, "exact_match", 0, 2);
  is(NULL, "regex", 0.5, 2);
  assert_true(field(NULL, NULL, "unextracted") == 1);
  o.extract_last = 1;
  ok(&o, text, NULL);
  is(NULL, "exact_match", 0.5, 2);
  assert_non_null(strstr(rows.data, "\"answer\":\"B\",\"reference\":\"B\"}"));
  assert_non_null(strstr(rows.data, "\"answer\":null"));
  o.extract = NULL;
  assert_int_equal(score(&o, text, NULL, false), MR_E_USAGE);
  o.extract = (char *)"(";
  assert_int_equal(score(&o, text, NULL, false), MR_E_USAGE);
}

static void texts(void **state) {
  (void)state;
  const char *text = "{\"id\":\"a\",\"output\":\"The Cat.\",\"answer\":\"a cat\"}\n"
                     "{\"id\":\"b\",\"output\":\"{\\\"a\\\": 1}\",\"answer\":1}\n"
                     "{\"id\":\"c\",\"output\":\"#### 1,000\",\"answer\":1000.0}\n";
  mr_score_opts o = {
      .metrics = BIT(EXACT_MATCH) | BIT(F1) | BIT(ROUGE_L) | BIT(NUMBER) | BIT(JSON_VALID),
      .ignore = MR_IGNORE_SPACE | MR_IGNORE_CASE | MR_IGNORE_PUNCTUATION | MR_IGNORE_ARTICLES};
  ok(&o, text, NULL);
  is(NULL, "exact_match", 2.0 / 3, 3); /* {"a": 1} is 1 without punctuation and articles */
  is(NULL, "json_valid", 1.0 / 3, 3);
  is(NULL, "number", 2.0 / 3, 3);
  is(NULL, "rouge_l", (0.5 + 2.0 / 3) / 3, 3); /* the cat, a 1: one word of 2; 1 000: none of 1000 0
                                                */
}

static void refused(mr_score_opts *o, const char *text, const char *refs, const char *words) {
  assert_int_equal(score(o, text, refs, false), MR_E_DATA);
  if (!strstr(err.text, words))
    print_error("%s\n", err.text);
  assert_non_null(strstr(err.text, words));
}

static void nothing_to_score(void **state) {
  (void)state;
  mr_score_opts o = {.metrics = BIT(EXACT_MATCH)};
  refused(&o, three, "{\"id\":\"q\",\"answer\":1}\n", "none of 3 results has its id");
  refused(&o, three, NULL, "--ref FILE");
  o.ref_field = (char *)"gold.x";
  refused(&o, three, NULL, "gold.x");
  refused(&o, "{\"id\":\"a\",\"output\":\"x\"}\n[1]\n", NULL, "not a JSON object");
  assert_int_equal(err.line, 2);
  refused(&o, "{\"id\":\"a\"", NULL, "JSON");
  assert_int_equal(err.line, 1);
  o = (mr_score_opts){.metrics = BIT(CHOICE)};
  refused(&o, three, four, "what the metrics need");
  o = (mr_score_opts){.metrics = BIT(EXACT_MATCH)}; /* no results: all are missing */
  ok(&o, "", four);
  is(NULL, "exact_match", 0, 4);
}

static void too_many_groups(void **state) {
  (void)state;
  mr_text t = {0};
  mr_score_opts o = {.metrics = BIT(EXACT_MATCH), .by = (char *)"id"};
  for (int i = 0; i <= MR_SCORE_GROUPS_MAX; i++)
    mr_text_addf(&t, "{\"id\":\"%d\",\"output\":\"x\",\"label\":\"x\"}\n", i);
  refused(&o, t.data, NULL, "more than 10000 values");
  mr_text_free(&t);
}

/* Whatever allocation fails: an error and no leak, never a wrong figure. */
static void memory(void **state) {
  (void)state;
  mr_score_opts o = {.metrics = ~0u & ((1u << MR_METRICS) - 1),
                     .extract = (char *)".+",
                     .ignore = MR_IGNORE_CASE | MR_IGNORE_ARTICLES | MR_IGNORE_SPACE,
                     .by = (char *)"t"};
  const char *text = "{\"id\":\"a\",\"output\":\"The  Paris\"}\n{\"id\":\"x\",\"output\":\"1\"}\n";
  mr_code rc = MR_E_NOMEM;
  ok(&o, text, four);
  json_decref(result);
  result = NULL;
  mr_text_free(&rows);
  int64_t live = mr_mem_live();
  int n = 0;
  again = true;
  for (; n < 5000 && rc; n += n < 100 ? 1 : 2) {
    mr_mem_fail_after(n);
    rc = score(&o, text, four, false);
    mr_mem_fail_after(-1);
    assert_true(rc == MR_OK || rc == MR_E_NOMEM);
  }
  assert_int_equal(rc, MR_OK);
  assert_true(n > 100);
  is(NULL, "contains", 0, 4);
  is("u", "f1", 0.5, 2); /* paris, and one that is missing */
  json_decref(result);
  result = NULL;
  mr_text_free(&rows);
  assert_int_equal(mr_mem_live(), live);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(both_sides),
                                     cmocka_unit_test(failed_rows),
                                     cmocka_unit_test(a_shard),
                                     cmocka_unit_test(repeated),
                                     cmocka_unit_test(by_the_kind_of_row),
                                     cmocka_unit_test(bits),
                                     cmocka_unit_test(outputs),
                                     cmocka_unit_test(extraction),
                                     cmocka_unit_test(texts),
                                     cmocka_unit_test(nothing_to_score),
                                     cmocka_unit_test(too_many_groups),
                                     cmocka_unit_test(memory)};
  return cmocka_run_group_tests(tests, temp_begin, temp_end);
}
