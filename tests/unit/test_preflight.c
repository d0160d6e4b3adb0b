#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include <sys/stat.h>

#include "conformance.h"
#include "io/json.h"
#include "io/mem.h"
#include "jobs/preflight.h"
#include "row_model.h"
#include "temp.h"

static mr_prompter *prompter;
static const char *model_path;

/* Runs preflight over files into a plan; NULL with the error in *e. */
static mr_plan *flight(mr_job *j, const mr_prompter *p, const char *const *inputs, int n,
                       mr_preflight_stats *stats, mr_err *e) {
  mr_plan_writer *w;
  mr_plan *plan = NULL;
  mr_err_clear(e);
  j->inputs = (char **)(uintptr_t)inputs;
  j->n_inputs = n;
  mkdir(temp_path("plan"), 0777);
  assert_int_equal(mr_plan_create(&w, temp_path("plan"), e), MR_OK);
  mr_code rc = mr_preflight_run(j, p, 0, 0, w, stats, NULL, NULL, e);
  j->inputs = NULL;
  j->n_inputs = 0;
  if (rc == MR_OK)
    rc = mr_plan_finish(w, e);
  else
    mr_plan_abandon(w);
  if (rc == MR_OK)
    mr_plan_open(&plan, temp_path("plan"), e);
  return plan;
}

/* "line:id" of good rows and "line!code" of bad ones. */
static const char *summary(const mr_plan *p) {
  static mr_text t;
  mr_text_clear(&t);
  mr_text_adds(&t, "");
  for (uint64_t i = 0; i < mr_plan_rows(p); i++) {
    mr_plan_record rec;
    mr_err e = MR_ERR_INIT;
    assert_int_equal(mr_plan_read(p, i, &rec, &e), MR_OK);
    json_t *v = mr_json_parse(rec.json, rec.json_len, NULL, &e);
    const json_t *code = json_object_get(json_object_get(v, "error"), "code");
    mr_text_addf(&t, "%s%llu%c%s", i ? " " : "", (unsigned long long)rec.e.line, code ? '!' : ':',
                 json_string_value(code ? code : json_object_get(v, "id")));
    json_decref(v);
    mr_plan_record_free(&rec);
  }
  return t.data;
}

static void files_in_order_with_their_lines(void **state) {
  (void)state;
  mr_job j;
  mr_err e;
  mr_preflight_stats s;
  mr_job_init(&j);
  const char *in[] = {
      temp_text("a.jsonl", "{\"prompt\":\"a\"}\n\n{\"prompt\":\"b\",\"id\":\"x\"}\n"),
      temp_text("b.jsonl", "\n{\"prompt\":\"c\"}\nnonsense\n{\"prompt\":\"d\",\"id\":\"x\"}\n"
                           "{\"prompt\":\"e\",\"id\":\"row-1\"}")};
  mr_plan *p = flight(&j, prompter, in, 2, &s, &e);
  assert_non_null(p);
  assert_string_equal(summary(p),
                      "1:row-1 3:x 2:file-2-row-2 3!invalid_json 4!duplicate_id 5!duplicate_id");
  assert_int_equal(s.rows, 6);
  assert_int_equal(s.bad_rows, 3);
  assert_int_equal(s.files, 2);
  assert_int_equal(mr_plan_bad_rows(p), 3);
  assert_int_equal(mr_plan_prompt_tokens(p), 3);
  assert_string_equal(mr_plan_digest(p), s.input_digest);
  assert_int_equal(strlen(s.input_digest), 32);
  assert_non_null(strstr(mr_plan_files(p)[1], "b.jsonl"));
  mr_plan_close(p);
}

static void repeated_ids_can_be_refused(void **state) {
  (void)state;
  mr_job j;
  mr_err e;
  mr_preflight_stats s;
  mr_job_init(&j);
  j.duplicates = MR_DUP_REFUSE;
  const char *in =
      temp_text("d.jsonl", "{\"prompt\":\"a\",\"id\":\"x\"}\n{\"prompt\":\"a\",\"id\":\"x\"}\n");
  assert_null(flight(&j, prompter, &in, 1, &s, &e));
  assert_int_equal(e.code, MR_E_DATA);
  assert_int_equal(e.line, 2);
  assert_non_null(strstr(e.text, "\"x\""));
}

/* Several batches of lines, read by several threads: the plan is that of one. */
static void threads_read_the_same(void **state) {
  (void)state;
  enum { LINES = 700 };
  mr_text t = {0};
  mr_preflight_stats s;
  mr_err e;
  mr_job j;
  char *one = NULL;
  for (int i = 0; i < LINES; i++) {
    if (i % 50 == 7)
      mr_text_adds(&t, "nonsense");
    else
      mr_text_addf(&t, "{\"prompt\":\"%.*s\",\"id\":\"%d\"}", i % 26, "abcdefghijklmnopqrstuvwxyz",
                   i % 600);
    mr_text_adds(&t, i % 3 ? "\n" : "\n\n");
  }
  char path[256];
  const char *in = path;
  snprintf(path, sizeof path, "%s", temp_text("many.jsonl", t.data));
  for (int threads = 1; threads <= 3; threads++) {
    mr_job_init(&j);
    j.threads = threads;
    mr_plan *p = flight(&j, prompter, &in, 1, &s, &e);
    if (!p)
      fail_msg("%d threads: %s", threads, e.text);
    assert_int_equal(mr_plan_rows(p), LINES);
    const char *now = summary(p);
    if (!one)
      one = mr_mem_copy(now, strlen(now));
    assert_string_equal(now, one);
    mr_plan_close(p);
  }
  mr_mem_free(one);
  mr_text_free(&t);
}

static void long_lines_are_error_rows(void **state) {
  (void)state;
  mr_job j;
  mr_err e;
  mr_preflight_stats s;
  mr_job_init(&j);
  j.max_line = 20;
  const char *in = temp_text(
      "l.jsonl", "{\"prompt\":\"a\"}\n{\"prompt\":\"aaaaaaaaaaaaaaaa\"}\n{\"prompt\":\"a\"}\n");
  mr_plan *p = flight(&j, prompter, &in, 1, &s, &e);
  assert_string_equal(summary(p), "1:row-1 2!line_too_long 3:row-3");
  mr_plan_close(p);
}

static bool stop(void *ctx, const mr_preflight_stats *s) {
  (void)s;
  return ++*(int *)ctx < 2;
}

static void it_can_be_stopped(void **state) {
  (void)state;
  mr_job j;
  mr_err e = MR_ERR_INIT;
  mr_preflight_stats s;
  mr_job_init(&j);
  mr_text t = {0};
  for (int i = 0; i < 2000; i++)
    mr_text_adds(&t, "{\"prompt\":\"a\"}\n");
  char *in[] = {(char *)(uintptr_t)temp_text("s.jsonl", t.data)};
  mr_text_free(&t);
  mr_plan_writer *w;
  int calls = 0;
  j.inputs = in;
  j.n_inputs = 1;
  assert_int_equal(mr_plan_create(&w, temp_dir, &e), MR_OK);
  assert_int_equal(mr_preflight_run(&j, prompter, 0, 0, w, &s, stop, &calls, &e), MR_E_STOPPED);
  assert_true(s.rows > 0 && s.rows < 2000);
  mr_plan_abandon(w);
}

/* ---------------------------------------------------------------- the conformance folder */

static bool has_line(const json_t *lines, uint64_t line) {
  for (size_t i = 0; i < json_array_size(lines); i++)
    if ((uint64_t)json_integer_value(json_array_get(lines, i)) == line)
      return true;
  return false;
}

/* One entry of the index against a plan, or against the error when there is none. */
static const char *judge(const json_t *x, const mr_plan *p, const mr_err *e) {
  const char *expect = json_string_value(json_object_get(x, "expect"));
  const json_t *bad = json_object_get(x, "lines_bad"), *ok = json_object_get(x, "lines_ok");
  if (!p)
    return strcmp(expect, "reject") && strcmp(expect, "either") ? "refused"
           : e->code != MR_E_DATA || strlen(e->text) < 10       ? "refused in other words"
                                                                : NULL;
  if (!strcmp(expect, "reject"))
    return "not refused";
  if (!strcmp(expect, "all-ok") && mr_plan_bad_rows(p))
    return "has bad rows";
  if (!strcmp(expect, "line-errors") && mr_plan_bad_rows(p) != json_array_size(bad))
    return "has another number of bad rows";
  mr_plan_scan s;
  mr_err unread = MR_ERR_INIT;
  mr_plan_scan_start(&s, p, &unread);
  while (mr_plan_scan_next(&s))
    if (s.e->kind == MR_ROW_BAD && json_array_size(bad) && !has_line(bad, s.e->line))
      return "has a bad row in another line";
  if (s.rc)
    return "has a plan that cannot be read";
  return mr_plan_rows(p) - mr_plan_bad_rows(p) < json_array_size(ok) ? "lacks good rows" : NULL;
}

static void broken_job_files(void **state) {
  (void)state;
  static char folder[4096], index[4200], model[4200], path[8400], line[8192];
  const char *data = data_path("conformance/malformed");
  if (!data)
    skip();
  snprintf(folder, sizeof folder, "%s", data);
  snprintf(index, sizeof index, "%s/jobs.index.jsonl", folder);
  snprintf(model, sizeof model, "%s/gguf/00-valid-baseline.gguf", folder);
  if (access("models/SmolLM2-135M-Instruct.Q4_1.gguf", R_OK) == 0)
    snprintf(model, sizeof model, "models/SmolLM2-135M-Instruct.Q4_1.gguf");
  mr_prompter *real;
  mr_err e = MR_ERR_INIT;
  assert_int_equal(mr_prompter_open(&real, model, &e), MR_OK);
  FILE *f = fopen(index, "r");
  assert_non_null(f);
  int entries = 0, wrong = 0;
  while (fgets(line, sizeof line, f)) {
    json_t *x = mr_json_parse(line, strlen(line), NULL, &e);
    const char *name = json_string_value(json_object_get(x, "file"));
    if (name) {
      mr_job j;
      mr_preflight_stats s;
      mr_job_init(&j);
      snprintf(path, sizeof path, "%s/jobs/%s", folder, name);
      const char *in = path;
      mr_plan *p = flight(&j, real, &in, 1, &s, &e);
      const char *what = judge(x, p, &e);
      if (what)
        print_message("%s %s: %s %s\n", name, what, p ? summary(p) : "", e.text);
      wrong += what != NULL;
      entries++;
      mr_plan_close(p);
      mr_err_clear(&e);
    }
    json_decref(x);
  }
  fclose(f);
  mr_prompter_close(real);
  assert_true(entries > 100);
  assert_int_equal(wrong, 0);
}

static int begin(void **state) {
  mr_err e = MR_ERR_INIT;
  if (temp_begin(state) ||
      mr_prompter_open(&prompter, model_path = row_model_write(), &e) != MR_OK) {
    mr_err_print(&e, stderr);
    return -1;
  }
  return 0;
}

static int end(void **state) {
  mr_prompter_close(prompter);
  build_remove(model_path);
  return temp_end(state);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(files_in_order_with_their_lines),
      cmocka_unit_test(repeated_ids_can_be_refused),
      cmocka_unit_test(threads_read_the_same),
      cmocka_unit_test(long_lines_are_error_rows),
      cmocka_unit_test(it_can_be_stopped),
      cmocka_unit_test(broken_job_files),
  };
  return cmocka_run_group_tests(tests, begin, end);
}
