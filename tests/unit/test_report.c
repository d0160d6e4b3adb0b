#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "io/mem.h"
#include "jobs/report.h"

static mr_job_identity id;

static mr_report *make(void) {
  mr_report *r = mr_mem_alloc(1, sizeof *r);
  mr_err e = MR_ERR_INIT;
  assert_non_null(r);
  mr_report_init(r);
  memset(&id, 0, sizeof id);
  mr_hash_hex("a", 1, id.input_digest);
  mr_hash_hex("b", 1, id.model_digest);
  id.rows = 10;
  assert_int_equal(mr_identity_set_options(&id, json_object(), &e), MR_OK);
  mr_identity_make_id(&id);
  r->id = &id;
  r->model_path = "models/<b>&m\xff.gguf"; /* a path may hold any bytes */
  r->model_name = "m";
  r->output = "dir/out.jsonl.zst";
  return r;
}

static void drop(mr_report *r) {
  mr_report_free(r);
  mr_identity_free(&id);
  mr_mem_free(r);
  assert_int_equal(mr_mem_live(), 0);
}

static void quantiles_within_one_percent(void **state) {
  (void)state;
  mr_histogram *h = mr_mem_alloc(1, sizeof *h);
  assert_true(mr_histogram_quantile(h, 0.5) == 0);
  for (int i = 1; i <= 10000; i++)
    mr_histogram_add(h, i * 1e-4); /* 0.1 ms to 1 s, evenly */
  const double q[] = {0.5, 0.9, 0.99};
  for (int i = 0; i < 3; i++)
    assert_true(fabs(mr_histogram_quantile(h, q[i]) / q[i] - 1) < 0.0105);
  assert_true(mr_histogram_quantile(h, 1) <= 1.0);
  mr_histogram_add(h, 0);
  mr_histogram_add(h, 1e9); /* beyond the last bin: counted, not lost */
  assert_int_equal(h->n, 10002);
  mr_mem_free(h);
}

/* The timeline stays bounded, and merging loses no token and no second. */
static void timeline_is_bounded(void **state) {
  (void)state;
  mr_report *r = make();
  for (int i = 0; i < 100000; i++)
    mr_report_sample(r, 0.03, 5, i % 64);
  double tokens = 0, s = 0, batch = 0;
  for (int i = 0; i < r->timeline.n; i++) {
    tokens += r->timeline.point[i].tokens;
    s += r->timeline.point[i].seconds;
    batch += r->timeline.point[i].batch;
  }
  assert_in_range(r->timeline.n, MR_TIMELINE_POINTS / 4, MR_TIMELINE_POINTS);
  assert_true(fabs(tokens - 500000) < 1e-6 * 500000);
  assert_true(fabs(s - 3000) < 1e-6 * 3000);
  assert_true(fabs(batch / s - 31.5) < 0.1);
  drop(r);
}

/* The keys that the contract promises. */
static void json_has_its_keys(void **state) {
  (void)state;
  static const char *const keys[] = {
      "rows",          "rows_ok",  "rows_failed",    "prompt_tokens",  "prefill_tokens_computed",
      "output_tokens", "seconds",  "ttft_ms",        "tpot_ms",        "mfu",
      "mbu",           "batch",    "kv_spill_bytes", "kv_fetch_bytes", "peak_memory_bytes",
      "errors",        "version",  "digests",        "timeline",       "throughput",
      "engine",        "options",  "inputs",         "runs",           "peaks",
      "job_id",        "diagnosis"};
  static const char *const phases[] = {"preflight", "load",  "run",  "commit",
                                       "assemble",  "other", "total"};
  static const char *const points[] = {"p50", "p90", "p99", "mean", "max"};
  mr_report *r = make();
  json_t *o = mr_report_to_json(r);
  assert_non_null(o);
  for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
    if (!json_object_get(o, keys[i]))
      fail_msg("no %s", keys[i]);
  for (size_t i = 0; i < sizeof phases / sizeof *phases; i++)
    assert_true(json_is_number(json_object_get(json_object_get(o, "seconds"), phases[i])));
  for (size_t i = 0; i < sizeof points / sizeof *points; i++)
    assert_true(json_is_number(json_object_get(json_object_get(o, "ttft_ms"), points[i])));
  assert_true(json_is_null(json_object_get(o, "mfu"))); /* nothing measured: null, not 0 */
  json_decref(o);
  drop(r);
}

static void figures_are_right(void **state) {
  (void)state;
  mr_report *r = make();
  r->has_engine = true;
  r->info.arch = r->info.device = r->info.isa = r->info.scheme = r->info.kv_type = "x";
  r->run_s = 3;
  r->commit_s = 1;
  r->total_s = 8;
  r->stats.flops = 6e9;
  r->stats.bytes = 3e9;
  r->stats.output_tokens = 400;
  r->peak_ops = 8e9;
  r->peak_bytes = 1e10;
  r->info.packed_bytes = 1000;
  r->info.flops_per_prompt_token = 200;
  mr_choice c = {.n_sampled = 5};
  mr_result res = {.choices = &c, .n_choices = 1, .admitted_s = 1, .first_token_s = 3, .done_s = 4};
  mr_report_row(r, &res);
  json_t *o = mr_report_to_json(r);
  assert_true(fabs(json_number_value(json_object_get(o, "mfu")) - 0.25) < 1e-6);
  assert_true(fabs(json_number_value(json_object_get(o, "mbu")) - 0.1) < 1e-6);
  json_t *d = json_object_get(o, "diagnosis"); /* 0.75 s of arithmetic, 0.3 s of traffic in 3 s */
  assert_true(fabs(json_number_value(json_object_get(d, "compute_seconds")) - 0.75) < 1e-6);
  assert_true(fabs(json_number_value(json_object_get(d, "memory_seconds")) - 0.3) < 1e-6);
  assert_true(fabs(json_number_value(json_object_get(d, "rest_seconds")) - 2.25) < 1e-6);
  assert_true(fabs(json_number_value(json_object_get(d, "balance_tokens")) - 4) < 1e-6);
  assert_string_equal(json_string_value(json_object_get(d, "bound_by")), "overhead");
  json_t *t = json_object_get(o, "throughput");
  assert_true(fabs(json_number_value(json_object_get(t, "output_tokens_per_s")) - 100) < 1e-6);
  assert_true(fabs(json_number_value(json_object_get(json_object_get(o, "ttft_ms"), "mean")) -
                   2000) < 1e-6);
  assert_true(
      fabs(json_number_value(json_object_get(json_object_get(o, "tpot_ms"), "mean")) - 250) < 1e-6);
  assert_true(fabs(json_number_value(json_object_get(json_object_get(o, "seconds"), "other")) - 4) <
              1e-6);
  json_decref(o);
  drop(r);
}

/* Without scripts and outside files; what comes from outside is escaped; no figure is nan or inf.
 */
static void html_is_self_contained(void **state) {
  (void)state;
  mr_report *r = make();
  mr_text t = {0};
  mr_err e = MR_ERR_INIT;
  r->errors = json_pack("{s:i}", "<script>alert(1)</script>", 3);
  r->rows_failed = 3;
  for (int i = 0; i < 50; i++)
    mr_report_sample(r, 0.3, i, 3);
  json_t *o = mr_report_to_json(r);
  assert_int_equal(mr_report_html(o, &t, &e), MR_OK);
  assert_non_null(strstr(t.data, "<svg"));
  assert_non_null(strstr(t.data, "prefers-color-scheme"));
  assert_non_null(strstr(t.data, "&lt;script&gt;"));
  assert_non_null(strstr(t.data, "&lt;b&gt;&amp;m?"));
  static const char *const never[] = {"<script", "http:", "https:", "nan", "inf<", "src="};
  for (size_t i = 0; i < sizeof never / sizeof *never; i++)
    if (strstr(t.data, never[i]))
      fail_msg("the page holds %s", never[i]);
  assert_true(mr_utf8_valid(t.data, t.len) < 0);
  json_decref(o);
  mr_text_free(&t);
  drop(r);
}

/* A job of no rows has no chart, and no division by nothing. */
/* What was scored, by groups whose names come from a file; or why nothing was. */
static void html_of_scores(void **state) {
  (void)state;
  mr_report *r = make();
  mr_err e = MR_ERR_INIT;
  mr_text t = {0};
  json_t *o = mr_report_to_json(r);
  json_t *m = json_pack("{s:{s:f, s:n, s:n, s:i}}", "exact_match", "value", 0.25, "low", "high",
                        "rows", 1234);
  json_t *groups = json_object();
  for (int i = 0; i < 120; i++) {
    char name[32];
    snprintf(name, sizeof name, "<g%d>", i);
    assert_int_equal(json_object_set_new(groups, name, json_pack("{s:O}", "metrics", m)), 0);
  }
  json_t *score = json_pack("{s:i, s:i, s:o, s:o}", "missing", 7, "unreferenced", 0, "metrics", m,
                            "groups", groups);
  assert_int_equal(json_object_set_new(o, "score", score), 0);
  assert_int_equal(mr_report_html(o, &t, &e), MR_OK);
  assert_non_null(strstr(t.data, "<h2>Score</h2>"));
  assert_non_null(strstr(t.data, "<td>exact_match</td><td>0.2500</td><td>–</td><td>–</td>"
                                 "<td>1,234</td>"));
  assert_non_null(strstr(t.data, "&lt;g99&gt; · exact_match"));
  assert_null(strstr(t.data, "&lt;g100&gt;"));
  assert_non_null(strstr(t.data, "first 100 of 120 groups"));
  assert_null(strstr(t.data, "<g"));
  mr_text_clear(&t);
  assert_int_equal(json_object_set_new(o, "score", json_pack("{s:s}", "error", "a <b>")), 0);
  assert_int_equal(mr_report_html(o, &t, &e), MR_OK);
  assert_non_null(strstr(t.data, "<p>a &lt;b&gt;</p>"));
  mr_text_free(&t);
  json_decref(o);
  drop(r);
}

static void html_of_nothing(void **state) {
  (void)state;
  mr_report *r = make();
  mr_text t = {0};
  mr_err e = MR_ERR_INIT;
  json_t *o = mr_report_to_json(r);
  assert_int_equal(mr_report_html(o, &t, &e), MR_OK);
  assert_null(strstr(t.data, "nan"));
  assert_null(strstr(t.data, "<svg"));
  json_decref(o);
  mr_text_free(&t);
  drop(r);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(quantiles_within_one_percent),
      cmocka_unit_test(timeline_is_bounded),
      cmocka_unit_test(json_has_its_keys),
      cmocka_unit_test(figures_are_right),
      cmocka_unit_test(html_is_self_contained),
      cmocka_unit_test(html_of_scores),
      cmocka_unit_test(html_of_nothing),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
