#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "io/json.h"
#include "jobs/options.h"
#include "temp.h"

#define MAX_ARGS 24

/* Parses words separated by blanks; the job lives until the next call. */
static mr_job job;
static mr_err err;

static mr_code parse(mr_command cmd, const char *words) {
  static char buf[2048];
  char *argv[MAX_ARGS], *save = NULL;
  int argc = 0;
  snprintf(buf, sizeof buf, "cmd %s", words);
  for (char *w = strtok_r(buf, " ", &save); w && argc < MAX_ARGS; w = strtok_r(NULL, " ", &save))
    argv[argc++] = w;
  mr_job_free(&job);
  mr_job_init(&job);
  mr_err_clear(&err);
  return mr_job_parse(&job, cmd, argc, argv, &err);
}

static const char *param(const char *name) {
  static mr_text t;
  mr_text_clear(&t);
  const json_t *v = json_object_get(job.defaults, name);
  if (!v)
    return "absent";
  mr_json_add(&t, v);
  return t.data;
}

static void the_command_line(void **state) {
  (void)state;
  assert_int_equal(
      parse(MR_CMD_RUN, "a.jsonl b.jsonl -m M.gguf -o d/out.jsonl.zst --threads 3 --kv-memory=2GiB "
                        "--compute exact --tolerate 5% --until 06:30 --time-limit 90m --pin"),
      MR_OK);
  assert_int_equal(job.n_inputs, 2);
  assert_string_equal(job.inputs[1], "b.jsonl");
  assert_string_equal(job.model, "M.gguf");
  assert_string_equal(job.base, "d/out");
  assert_int_equal(job.format, MR_OUT_ZST);
  assert_int_equal(job.threads, 3);
  assert_true(job.kv_memory == 2ull << 30);
  assert_int_equal(job.compute, MR_COMPUTE_EXACT);
  assert_true(job.tolerate_percent && job.tolerate > 0.0499 && job.tolerate < 0.0501);
  assert_int_equal(job.until_min, 390);
  assert_true(job.time_limit_s == 5400);
  assert_true(job.pin);
  assert_string_equal(job.device, "auto");
  assert_true(job.max_line == 16u << 20);
  assert_int_equal(job.kv_type, -1);
}

/* What is said of a GPU comes to the engine. */
static void the_engine_is_told(void **state) {
  (void)state;
  mr_engine_opts o;
  assert_int_equal(parse(MR_CMD_RUN, "a.jsonl -m M.gguf -o out.jsonl --device sim --kv-type fp8 "
                                     "--device-memory 20MiB --device-weights int4"),
                   MR_OK);
  mr_job_engine_opts(&job, &o);
  assert_string_equal(o.device, "sim");
  assert_true(o.device_memory == 20 << 20);
  assert_int_equal(o.device_weights, 3);
  assert_int_equal(o.kv_type, MR_KV_FP8);
  assert_int_equal(parse(MR_CMD_RUN, "a.jsonl -m M.gguf -o out.jsonl --other-numerics"), MR_OK);
  assert_true(job.other_numerics);
}

static void forms_of_options(void **state) {
  (void)state;
  assert_int_equal(parse(MR_CMD_RUN, "-mM.gguf --output=o.jsonl -- --odd.jsonl"), MR_OK);
  assert_string_equal(job.inputs[0], "--odd.jsonl");
  assert_int_equal(job.format, MR_OUT_PLAIN);
  assert_int_equal(parse(MR_CMD_RUN, "- -m M -o -"), MR_OK);
  assert_int_equal(job.format, MR_OUT_STDOUT);
  assert_null(job.base);
  assert_int_equal(parse(MR_CMD_RUN, "a -m M -o out"), MR_OK);
  assert_string_equal(job.output, "out.jsonl.zst");
  assert_string_equal(job.base, "out");
  assert_int_equal(parse(MR_CMD_RUN, "a -m M -o o.jsonl.gz --order completion"), MR_OK);
  assert_int_equal(job.format, MR_OUT_GZ);
  assert_true(job.completion_order);
  assert_int_equal(parse(MR_CMD_RUN, "-h --nonsense"), MR_OK);
  assert_true(job.help);
}

static void defaults_of_rows(void **state) {
  (void)state;
  assert_int_equal(
      parse(MR_CMD_RUN,
            "a -m M -o o --defaults {\"temperature\":0.5,\"top_p\":0.9} --temperature 0 "
            "--max-tokens 64 --stop a --stop b"),
      MR_OK);
  assert_string_equal(param("temperature"), "0");
  assert_string_equal(param("top_p"), "0.9");
  assert_string_equal(param("max_tokens"), "64");
  assert_string_equal(param("stop"), "[\"a\",\"b\"]");
  assert_int_equal(parse(MR_CMD_RUN, "a -m M -o o --max-tokens 1.5"), MR_E_USAGE);
  assert_non_null(strstr(err.text, "max_tokens is 1.5; it must be a whole number from 1"));
  assert_int_equal(parse(MR_CMD_RUN, "a -m M -o o --defaults {\"temprature\":0}"), MR_E_USAGE);
  assert_non_null(strstr(err.text, "temperature"));
}

static void what_is_wrong_is_said(void **state) {
  (void)state;
  static const struct {
    const char *words, *says;
  } bad[] = {
      {"a -m M -o o --max-tokns 5", "did you mean --max-tokens?"},
      {"a -m M -o o --kv-disc 5GiB", "did you mean --kv-disk?"},
      {"a -m M -o o --kv-disk much", "a size"},
      {"a -m M -o o --kv-policy drop", "auto|fewer|spill|recompute"},
      {"a -m M -o o --threads 0", "a whole number from 1"},
      {"a -m M -o o --threads 2147483648", "from 1 to 2147483647"},
      {"a -m M -o o --threads", "needs a value"},
      {"a -m M -o o --pin=1", "takes no value"},
      {"a -m M -o o --kv-type int9", "f32|f16"},
      {"a -m M -o o --until 25:00", "HH:MM"},
      {"a -m M -o o --level 20", "from 1 to 19"},
      {"a -m M -o o --level 0", "from 1 to 19"},
      {"a -m M", "no output"},
      {"a -o o", "no model"},
      {"-m M -o o", "no input"},
      {"a -m M -o o.json", ".jsonl.zst"},
      {"a -m M -o o -x", "unknown option"},
  };
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    assert_int_equal(parse(MR_CMD_RUN, bad[i].words), MR_E_USAGE);
    if (!strstr(err.text, bad[i].says))
      fail_msg("%s: %s", bad[i].words, err.text);
  }
}

static void scores(void **state) {
  (void)state;
  char words[512];
  assert_int_equal(parse(MR_CMD_SCORE, "r.jsonl --ref a --ref b --metric f1,number --metric choice "
                                       "--ignore case,space --extract-match last -o rows.jsonl"),
                   MR_OK);
  assert_int_equal(job.score.refs.n, 2);
  assert_string_equal(job.score.refs.s[1], "b");
  assert_int_equal(job.score.metrics,
                   1u << MR_METRIC_F1 | 1u << MR_METRIC_NUMBER | 1u << MR_METRIC_CHOICE);
  assert_int_equal(job.score.ignore, MR_IGNORE_CASE | MR_IGNORE_SPACE);
  assert_int_equal(job.score.extract_last, 1);
  const char *f = temp_text(
      "job.json",
      "{\"model\":\"M\",\"inputs\":\"a\",\"output\":\"o\",\"score\":{\"ref\":[\"x\",\"y\"],"
      "\"metric\":\"f1\",\"by\":\"topic\",\"missing\":\"skip\"}}");
  assert_int_equal(parse(MR_CMD_RUN, f), MR_OK);
  assert_true(mr_job_has_score(&job) && job.score.refs.n == 2 && job.score.skip_missing == 1);
  assert_string_equal(job.score.by, "topic");
  snprintf(words, sizeof words, "%s --score-ref z --score-metric choice", f);
  assert_int_equal(parse(MR_CMD_RUN, words), MR_OK); /* in place of the file's */
  assert_int_equal(job.score.refs.n, 1);
  assert_int_equal(job.score.metrics, 1u << MR_METRIC_CHOICE);
  assert_int_equal(parse(MR_CMD_RUN, "a -m M -o o --metric f1"), MR_E_USAGE);
  assert_int_equal(parse(MR_CMD_SCORE, "a --score-metric f1"), MR_E_USAGE);
  assert_int_equal(parse(MR_CMD_SCORE, "a --metric f2"), MR_E_USAGE);
  assert_non_null(strstr(err.text, "--metric f2: it must be exact_match|"));
  assert_int_equal(parse(MR_CMD_SCORE, "a --metric f1,"), MR_E_USAGE);
  assert_int_equal(parse(MR_CMD_SCORE, "--metric f1"), MR_E_USAGE);
  assert_int_equal(parse(MR_CMD_SCORE, "a -o -"), MR_E_USAGE);
  assert_int_equal(parse(MR_CMD_RUN, "a -m M -o - --score-metric f1"), MR_E_USAGE);
  assert_int_equal(parse(MR_CMD_RUN, "a -m M -o o --score-ref -"), MR_E_USAGE);
  assert_int_equal(parse(MR_CMD_SCORE, "- --ref -"), MR_E_USAGE);
  assert_int_equal(parse(MR_CMD_SCORE, "- --ref r"), MR_OK);
  assert_int_equal(parse(MR_CMD_RUN, "a -m M -o o --score-extract x"), MR_OK);
  assert_true(mr_job_has_score(&job));
  assert_int_equal(parse(MR_CMD_RUN, "a -m M -o o"), MR_OK);
  assert_false(mr_job_has_score(&job));
}

static void job_files(void **state) {
  (void)state;
  char words[512];
  const char *f =
      temp_text("job.json", "{\"model\": \"F.gguf\", \"inputs\": [\"x.jsonl\", \"y.jsonl\"], "
                            "\"output\": \"out.jsonl\", \"max-tokens\": 64, \"threads\": 2, "
                            "\"kv\": {\"memory\": \"2GiB\", \"type\": \"f32\"}, \"expire\": true, "
                            "\"time-limit\": 60, \"stop\": [\"x\"], \"defaults\": {\"top_k\": 5}}");
  snprintf(words, sizeof words, "%s --threads 4", f);
  assert_int_equal(parse(MR_CMD_RUN, words), MR_OK);
  assert_string_equal(job.model, "F.gguf");
  assert_int_equal(job.n_inputs, 2);
  assert_int_equal(job.threads, 4);
  assert_true(job.kv_memory == 2ull << 30);
  assert_int_equal(job.kv_type, MR_KV_F32);
  assert_true(job.expire);
  assert_true(job.time_limit_s == 60);
  assert_string_equal(param("top_k"), "5");
  assert_string_equal(param("stop"), "[\"x\"]");
  snprintf(words, sizeof words, "%s z.jsonl --stop y -o -", f);
  assert_int_equal(parse(MR_CMD_RUN, words), MR_OK);
  assert_int_equal(job.n_inputs, 1);
  assert_string_equal(param("stop"), "[\"y\"]");
}

static void broken_job_files(void **state) {
  (void)state;
  static const struct {
    const char *text, *says;
  } bad[] = {
      {"{\"modle\": \"x\"}", "did you mean model?"},
      {"{\"kv\": {\"memry\": \"2GiB\"}}", "kv-memory"},
      {"{\"threads\": 1.5}", "threads"},
      {"{\"threads\": [1]}", "threads"},
      {"{\"pin\": \"yes\"}", "true or false"},
      {"{\"inputs\": []}", "inputs"},
      {"{\"inputs\": [5]}", "inputs[0]"},
      {"[]", "not a JSON object"},
      {"{\"model\": ", "not valid JSON"},
      {"{\"output\": \"a\\u0000b\"}", "output holds a NUL"}, /* and is not taken for a */
      {"{\"inputs\": [\"a\", \"b\\u0000\"]}", "inputs holds a NUL"},
      {"{\"score\": {\"ref\": [\"a\\u0000b\"]}}", "score-ref holds a NUL"},
      {"{\"lora\": {\"x\": \"d\\u0000e\"}}", "lora holds a NUL"},
      {"{\"defaults\": \"d\\u0000e\"}", "defaults holds a NUL"},
      {"{\"level\": 20}", "1 to 19"},
      {"{\"help\": true}", "unknown key"},
      {"{\"defaults\": {\"n\": 0}}", "n is 0"},
  };
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    assert_int_equal(parse(MR_CMD_RUN, temp_text("bad.json", bad[i].text)), MR_E_CONFIG);
    if (!strstr(err.text, bad[i].says))
      fail_msg("%s: %s", bad[i].text, err.text);
    assert_non_null(strstr(err.file, "bad.json"));
    assert_null(strstr(err.text, "did you mean help"));
  }
  assert_int_equal(parse(MR_CMD_RUN, "/nowhere/job.json"), MR_E_NOINPUT);
}

static void other_commands(void **state) {
  (void)state;
  assert_int_equal(parse(MR_CMD_STATUS, "out.jsonl.zst --json"), MR_OK);
  assert_string_equal(job.base, "out");
  assert_true(job.json);
  assert_int_equal(parse(MR_CMD_CHECK, "dir/out"), MR_OK);
  assert_string_equal(job.base, "dir/out");
  assert_int_equal(parse(MR_CMD_STATUS, ""), MR_E_USAGE);
  assert_int_equal(parse(MR_CMD_STATUS, "a b"), MR_E_USAGE);
  assert_int_equal(parse(MR_CMD_STATUS, "a --threads 2"), MR_E_USAGE);
  assert_int_equal(parse(MR_CMD_RUN, "a -m M -o o --json"), MR_E_USAGE);
}

static void an_output_that_is_an_input(void **state) {
  (void)state;
  char words[1024];
  mr_err e = MR_ERR_INIT;
  char in[256];
  snprintf(in, sizeof in, "%s", temp_text("in.jsonl", "{}\n"));
  assert_int_equal(symlink(in, temp_path("link.jsonl")), 0);
  snprintf(words, sizeof words, "%s -m M -o %s", in, temp_path("link.jsonl"));
  assert_int_equal(parse(MR_CMD_RUN, words), MR_OK);
  assert_int_equal(mr_job_check_output(&job, &e), MR_E_USAGE);
  mr_err_clear(&e);
  snprintf(words, sizeof words, "%s -m M -o %s", temp_dir, temp_path("new.jsonl"));
  assert_int_equal(parse(MR_CMD_RUN, words), MR_OK);
  assert_int_equal(mr_job_check_output(&job, &e), MR_E_USAGE);
  mr_err_clear(&e);
  snprintf(words, sizeof words, "%s -m M -o %s", in, temp_path("new.jsonl"));
  assert_int_equal(parse(MR_CMD_RUN, words), MR_OK);
  assert_int_equal(mr_job_check_output(&job, &e), MR_OK);
}

static void an_output_that_is_no_file(void **state) {
  (void)state;
  assert_int_equal(parse(MR_CMD_RUN, "a -m M -o /dev/full"), MR_E_CANTCREATE);
  assert_int_equal(parse(MR_CMD_RUN, "a -m M -o /tmp"), MR_E_USAGE);
  assert_int_equal(parse(MR_CMD_RUN, "a -m M -o /tmp/"), MR_E_USAGE);
}

static void result_options_have_sorted_keys(void **state) {
  (void)state;
  assert_int_equal(parse(MR_CMD_RUN, "a -m M -o o --context 100 --temperature 0"), MR_OK);
  json_t *o = mr_job_result_options(&job);
  const char *key, *last = "";
  json_t *v;
  json_object_foreach(o, key, v) {
    assert_true(strcmp(last, key) < 0);
    last = key;
  }
  assert_int_equal(json_integer_value(json_object_get(o, "context")), 100);
  json_decref(o);
}

static int end(void **state) {
  mr_job_free(&job);
  return temp_end(state);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(the_command_line),
      cmocka_unit_test(the_engine_is_told),
      cmocka_unit_test(forms_of_options),
      cmocka_unit_test(defaults_of_rows),
      cmocka_unit_test(what_is_wrong_is_said),
      cmocka_unit_test(scores),
      cmocka_unit_test(job_files),
      cmocka_unit_test(broken_job_files),
      cmocka_unit_test(other_commands),
      cmocka_unit_test(an_output_that_is_an_input),
      cmocka_unit_test(an_output_that_is_no_file),
      cmocka_unit_test(result_options_have_sorted_keys),
  };
  return cmocka_run_group_tests(tests, temp_begin, end);
}
