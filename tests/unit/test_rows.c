#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "io/hash.h"
#include "io/json.h"
#include "io/mem.h"
#include "jobs/rows.h"
#include "row_model.h"

static mr_prompter *prompter;
static const char *model_path;
static mr_job job;

/* One line to a record; freed by the next call. */
static mr_plan_record rec;

static json_t *parse_bytes(const char *line, size_t len) {
  static json_t *last;
  const mr_row_source src = {"in.jsonl", 0, 7};
  mr_err e = MR_ERR_INIT;
  json_decref(last);
  mr_plan_record_free(&rec);
  last = NULL;
  assert_int_equal(mr_row_parse(&job, prompter, 0, 0, &src, line, len, &rec, &e), MR_OK);
  last = mr_json_parse(rec.json, rec.json_len, NULL, &e);
  assert_non_null(last);
  return last;
}

static json_t *parse(const char *line) {
  return parse_bytes(line, strlen(line));
}

/* A chat request with more members in its body. */
static json_t *chat(const char *members) {
  char line[2048];
  snprintf(line, sizeof line,
           "{\"custom_id\":\"c\",\"method\":\"POST\",\"url\":\"/v1/chat/"
           "completions\",\"body\":{"
           "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]%s}}",
           members);
  return parse(line);
}

static json_t *completion(const char *members) {
  char line[2048];
  snprintf(line, sizeof line,
           "{\"custom_id\":\"c\",\"method\":\"POST\",\"url\":\"/v1/completions\",\"body\":{%s}}",
           members);
  return parse(line);
}

static json_t *plain(const char *members) {
  char line[2048];
  snprintf(line, sizeof line, "{\"id\":\"p\",\"prompt\":\"hi\"%s}", members);
  return parse(line);
}

static const char *part(const json_t *v, const char *name) {
  const char *s = json_string_value(json_object_get(json_object_get(v, "error"), name));
  return s ? s : "";
}

static const char *dumped(const json_t *v) {
  static mr_text t;
  mr_text_clear(&t);
  if (!v)
    return "absent";
  mr_json_add(&t, v);
  return t.data;
}

typedef struct bad_case {
  const char *members, *param, *says;
} bad_case;

static void all_bad(json_t *(*make)(const char *), const bad_case *cases, size_t n) {
  for (size_t i = 0; i < n; i++) {
    const json_t *v = make(cases[i].members);
    if (rec.e.kind != MR_ROW_BAD || strcmp(part(v, "param"), cases[i].param) ||
        !strstr(part(v, "message"), cases[i].says))
      fail_msg("%s: kind %u, %s", cases[i].members, rec.e.kind, rec.json);
    assert_string_equal(part(v, "type"), "invalid_request_error");
  }
}

static void bad_parameters_are_named(void **state) {
  (void)state;
  static const bad_case cases[] = {
      {",\"max_tokens\":1.5", "max_tokens", "max_tokens is 1.5; it must be a whole number from 1"},
      {",\"max_tokens\":0", "max_tokens", "whole number from 1"},
      {",\"max_tokens\":[4]", "max_tokens", "max_tokens is [4]"},
      {",\"max_tokens\":99999999999999999999", "max_tokens", "whole number"},
      {",\"max_tokens\":4,\"max_completion_tokens\":5", "max_completion_tokens",
       "give one of them"},
      {",\"temperature\":-1", "temperature", "from 0"},
      {",\"temperature\":\"hot\"", "temperature", "\"hot\""},
      {",\"top_p\":0", "top_p", "above 0"},
      {",\"top_p\":1.5", "top_p", "up to 1"},
      {",\"top_k\":-2", "top_k", "all tokens"},
      {",\"n\":0", "n", "from 1 to 128"},
      {",\"n\":129", "n", "from 1 to 128"},
      {",\"stop\":\"\"", "stop", "none of them empty"},
      {",\"stop\":[\"a\",\"\"]", "stop", "none of them empty"},
      {",\"stop\":5", "stop", "list of texts"},
      {",\"stop\":[\"a\\u0000b\"]", "stop", "NUL"},
      {",\"stop\":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]", "stop", "at most 16"},
      {",\"stop_token_ids\":[257]", "stop_token_ids", "from 0 to 256"},
      {",\"seed\":1.5", "seed", "64 bits"},
      {",\"seed\":\"7\"", "seed", "64 bits"},
      {",\"seed\":18446744073709551616", "seed", "64 bits"},
      {",\"logprobs\":5", "logprobs", "true or false"},
      {",\"top_logprobs\":5", "top_logprobs", "needs logprobs: true"},
      {",\"logprobs\":true,\"top_logprobs\":21", "top_logprobs", "0 to 20"},
      {",\"logprobs\":true,\"top_logprobs\":-1", "top_logprobs", "0 to 20"},
      {",\"logit_bias\":{\"abc\":1}", "logit_bias", "\"abc\""},
      {",\"logit_bias\":{\"257\":1}", "logit_bias", "from 0 to 256"},
      {",\"logit_bias\":{\"1\":101}", "logit_bias", "-100 to 100"},
      {",\"frequency_penalty\":3", "frequency_penalty", "-2 to 2"},
      {",\"response_format\":\"json\"", "response_format", "text"},
      {",\"response_format\":{\"type\":\"zork\"}", "response_format", "text"},
      {",\"response_format\":{\"type\":\"json_object\"}", "response_format", "not supported"},
      {",\"tools\":[5]", "tools", "tools[0]"},
      {",\"tool_choice\":\"zork\"", "tool_choice", "auto"},
      {",\"tool_choice\":\"required\"", "tool_choice", "not supported"},
      {",\"model\":5", "model", "a name"},
      {",\"frobnicate\":1", "frobnicate", "unknown parameter frobnicate"},
      {",\"max_tokns\":1", "max_tokns", "did you mean max_tokens?"},
      {",\"prompt\":\"x\"", "prompt", "does not belong"},
      {",\"echo\":true", "echo", "does not belong"},
      {",\"guided_json\":{}", "guided_json", "not supported"},
      {",\"min_tokens\":9,\"max_tokens\":4", "min_tokens", "more than max_tokens"},
      {",\"repetition_penalty\":0", "repetition_penalty", "above 0"},
      {",\"stream\":\"yes\"", "stream", "true or false"},
  };
  all_bad(chat, cases, sizeof cases / sizeof *cases);
}

static void bad_completions_are_named(void **state) {
  (void)state;
  static const bad_case cases[] = {
      {"\"max_tokens\":4", "prompt", "missing"},
      {"\"prompt\":null", "prompt", "missing"},
      {"\"prompt\":5", "prompt", "a number"},
      {"\"prompt\":[]", "prompt", "empty list"},
      {"\"prompt\":\"\"", "prompt", "no tokens"},
      {"\"prompt\":[1,257]", "prompt", "from 0 to 256"},
      {"\"prompt\":[-1]", "prompt", "prompt[0] is out of range"},
      {"\"prompt\":[1,2.5]", "prompt", "prompt[1]"},
      {"\"prompt\":[\"a\",\"b\"]", "prompt", "a list of 2 prompts"},
      {"\"prompt\":\"a\",\"suffix\":\"b\"", "suffix", "not supported"},
      {"\"prompt\":\"a\",\"n\":2,\"best_of\":1", "best_of", "not below n"},
      {"\"prompt\":\"a\",\"n\":1,\"best_of\":2", "best_of", "not supported"},
      {"\"prompt\":\"a\",\"logprobs\":true", "logprobs", "0 to 20"},
      {"\"prompt\":\"a\",\"logprobs\":21", "logprobs", "0 to 20"},
      {"\"prompt\":\"a\",\"messages\":[]", "messages", "does not belong"},
      {"\"prompt\":\"a\",\"tools\":[]", "tools", "does not belong"},
  };
  all_bad(completion, cases, sizeof cases / sizeof *cases);
}

static void bad_lines_are_described(void **state) {
  (void)state;
  static const struct {
    const char *line, *param, *says;
  } cases[] = {
      {"hello", "", "not valid JSON"},
      {"[]", "", "the line is an array"},
      {"null", "", "the line is null"},
      {"{}", "", "a row needs custom_id"},
      {"{\"custom_id\":7,\"method\":\"POST\"}", "custom_id", "a number"},
      {"{\"custom_id\":\"\",\"method\":\"POST\"}", "custom_id", "empty"},
      {"{\"method\":\"POST\",\"url\":\"/v1/completions\",\"body\":{}}", "custom_id", "missing"},
      {"{\"custom_id\":\"a\",\"url\":\"/v1/completions\",\"body\":{}}", "method", "missing"},
      {"{\"custom_id\":\"a\",\"method\":\"GET\"}", "method", "must be POST"},
      {"{\"custom_id\":\"a\",\"method\":\"POST\",\"url\":\"/v1/embeddings\",\"body\":{}}", "url",
       "/v1/embeddings"},
      {"{\"custom_id\":\"a\",\"method\":\"POST\",\"url\":\"/v1/completions\"}", "body", "missing"},
      {"{\"custom_id\":\"a\",\"method\":\"POST\",\"url\":\"/v1/completions\",\"body\":[1]}", "body",
       "an array"},
      {"{\"prompt\":\"a\",\"messages\":[]}", "messages", "not both"},
      {"{\"prompt\":\"a\",\"choices\":[]}", "choices", "1 to"},
      {"{\"prompt\":\"a\",\"choices\":[\"b\",\"\"]}", "choices", "choices 1 is empty"},
      {"{\"prompt\":\"a\",\"continuation\":5}", "continuation", "a number"},
      {"{\"prompt\":\"a\",\"continuation\":\"b\",\"choices\":[\"c\"]}", "choices", "not both"},
      {"{\"prompt\":\"a\",\"id\":1.5}", "id", "whole number"},
      {"{\"messages\":\"hi\"}", "messages", "a list"},
      {"{\"messages\":[\"hi\"]}", "messages", "messages[0]"},
      {"{\"messages\":[{\"role\":5,\"content\":\"x\"}]}", "messages", "messages[0].role"},
      {"{\"messages\":[{\"role\":\"usr\",\"content\":\"x\"}]}", "messages", "\"usr\""},
      {"{\"messages\":[{\"role\":\"user\",\"content\":null}]}", "messages", "messages[0].content"},
      {"{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]}", "messages",
       "image_url"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const json_t *v = parse(cases[i].line);
    if (rec.e.kind != MR_ROW_BAD || strcmp(part(v, "param"), cases[i].param) ||
        !strstr(part(v, "message"), cases[i].says))
      fail_msg("%s: %s", cases[i].line, rec.json);
  }
}

static void good_parameters_are_kept(void **state) {
  (void)state;
  static const struct {
    const char *members, *params;
  } cases[] = {
      {"", "{\"max_tokens\":190}"},
      {",\"max_tokens\":null,\"temperature\":null", "{\"max_tokens\":190}"},
      {",\"max_tokens\":4e0", "{\"max_tokens\":4}"},
      {",\"max_completion_tokens\":4", "{\"max_tokens\":4}"},
      {",\"max_tokens\":4,\"seed\":-1", "{\"max_tokens\":4,\"seed\":-1}"},
      {",\"max_tokens\":4,\"seed\":9223372036854775807",
       "{\"max_tokens\":4,\"seed\":9223372036854775807}"},
      {",\"max_tokens\":4,\"logprobs\":true", "{\"max_tokens\":4,\"logprobs\":0}"},
      {",\"max_tokens\":4,\"logprobs\":true,\"top_logprobs\":3",
       "{\"max_tokens\":4,\"logprobs\":3}"},
      {",\"max_tokens\":4,\"logprobs\":false,\"top_logprobs\":null", "{\"max_tokens\":4}"},
      {",\"max_tokens\":4,\"temperature\":0,\"n\":2,\"stop\":[]",
       "{\"max_tokens\":4,\"n\":2,\"temperature\":0.0,\"stop\":[]}"},
      {",\"max_tokens\":4,\"response_format\":{\"type\":\"text\"},\"tools\":[],\"tool_choice\":"
       "\"none\"",
       "{\"max_tokens\":4}"},
      {",\"max_tokens\":4,\"user\":\"u\",\"metadata\":{\"a\":[]},\"store\":true",
       "{\"max_tokens\":4}"},
      {",\"max_tokens\":4,\"guided_json\":null,\"skip_special_tokens\":true", "{\"max_tokens\":4}"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const json_t *v = chat(cases[i].members);
    if (rec.e.kind != MR_ROW_BATCH_CHAT)
      fail_msg("%s: %s", cases[i].members, rec.json);
    assert_string_equal(dumped(json_object_get(v, "params")), cases[i].params);
  }
  /* "user:hi\n" and "A:" are 10 tokens of one byte */
  assert_int_equal(rec.e.n_prompt, 10);
  assert_memory_equal(rec.prompt,
                      ((const int32_t[]){'u', 's', 'e', 'r', ':', 'h', 'i', '\n', 'A', ':'}), 40);
  assert_int_equal(rec.e.n_out, 4);
  assert_int_equal(rec.e.line, 7);
}

static void lengths_meet_the_context(void **state) {
  (void)state;
  char line[512], text[301];
  const json_t *v = chat(",\"max_tokens\":1000");
  assert_int_equal(rec.e.n_out, 190);
  assert_non_null(strstr(dumped(json_object_get(v, "warnings")), "clamped to 190"));
  memset(text, 'x', 300);
  text[300] = '\0';
  snprintf(line, sizeof line, "{\"prompt\":\"%s\",\"max_tokens\":20}", text);
  v = parse(line);
  assert_int_equal(rec.e.kind, MR_ROW_BAD);
  assert_string_equal(part(v, "code"), "context_length_exceeded");
  assert_non_null(strstr(part(v, "message"), "300 tokens"));
  assert_non_null(strstr(part(v, "message"), "200 tokens, 101 too few"));
  job.long_prompt = MR_LONG_TRUNCATE_LEFT;
  text[299] = 'y';
  snprintf(line, sizeof line, "{\"prompt\":\"%s\",\"max_tokens\":20}", text);
  v = parse(line);
  job.long_prompt = MR_LONG_ERROR;
  assert_int_equal(rec.e.kind, MR_ROW_PLAIN);
  assert_int_equal(rec.e.n_prompt, 180);
  assert_int_equal(rec.prompt[179], 'y');
  assert_int_equal(rec.e.n_out, 20);
  assert_non_null(strstr(dumped(json_object_get(v, "warnings")), "cut at its beginning"));
}

static void defaults_serve_silent_rows(void **state) {
  (void)state;
  job.defaults = json_pack("{s:i, s:f}", "max_tokens", 7, "temperature", 0.5);
  plain("");
  assert_non_null(strstr(rec.json, "\"params\":{\"max_tokens\":7,\"temperature\":0.5}"));
  plain(",\"max_completion_tokens\":3,\"temperature\":null");
  assert_non_null(strstr(rec.json, "\"params\":{\"max_tokens\":3,\"temperature\":0.5}"));
  json_decref(job.defaults);
  job.defaults = NULL;
}

static void other_fields_pass_through(void **state) {
  (void)state;
  const json_t *v = plain(
      ",\"label\":{\"x\":[1,\"\xc3\xa9\"]},\"n\":1,\"user\":\"u\",\"usage\":5,\"topic\":null");
  assert_string_equal(dumped(json_object_get(v, "fields")),
                      "{\"label\":{\"x\":[1,\"\xc3\xa9\"]},\"user\":\"u\",\"topic\":null}");
  assert_non_null(strstr(dumped(json_object_get(v, "warnings")), "usage"));
  assert_string_equal(dumped(json_object_get(v, "id")), "\"p\"");
  v = parse("{\"prompt\":\"a\"}");
  assert_string_equal(dumped(json_object_get(v, "id")), "\"row-7\"");
  v = parse("{\"prompt\":\"a\",\"id\":12}");
  assert_string_equal(dumped(json_object_get(v, "id")), "\"12\"");
  assert_true(json_is_true(json_object_get(v, "id_is_number")));
}

static void content_in_parts_is_joined(void **state) {
  (void)state;
  parse("{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},"
        "{\"type\":\"text\",\"text\":\"b\"}]}]}");
  assert_int_equal(rec.e.kind, MR_ROW_PLAIN);
  assert_memory_equal(rec.prompt + 5, ((const int32_t[]){'a', '\n', 'b', '\n'}), 16);
}

static void scores(void **state) {
  (void)state;
  const json_t *v = parse("{\"prompt\":\"ab\",\"choices\":[\"c\",\"d\xc3\xa9\"],\"label\":1}");
  assert_int_equal(rec.e.kind, MR_ROW_SCORE);
  assert_int_equal(rec.n_cont, 2);
  assert_int_equal(rec.cont_len[1], 3);
  assert_int_equal(rec.e.n_out, 4);
  assert_string_equal(dumped(json_object_get(v, "choice_bytes")), "[1,3]");
  assert_string_equal(dumped(json_object_get(v, "fields")), "{\"label\":1}");
  parse("{\"prompt\":[1,2],\"continuation\":[3,4]}");
  assert_int_equal(rec.e.kind, MR_ROW_SCORE);
  assert_int_equal(rec.cont[1], 4);
}

static void nul_does_not_cut_a_text(void **state) {
  (void)state;
  parse("{\"prompt\":\"a\\u0000b\"}");
  assert_int_equal(rec.e.n_prompt, 3);
  assert_int_equal(rec.prompt[1], 0);
  parse_bytes("{\"prompt\":\"a\0b\"}", 16);
  assert_int_equal(rec.e.kind, MR_ROW_BAD);
}

static void a_record_becomes_a_request(void **state) {
  (void)state;
  mr_request q;
  mr_row_keep keep;
  mr_err e = MR_ERR_INIT;
  plain(",\"max_tokens\":5,\"temperature\":1e-45,\"top_k\":3,\"min_p\":0.25,\"seed\":-2,\"stop\":["
        "\"x\",\"yz\"],"
        "\"stop_token_ids\":[4],\"logit_bias\":{\"9\":-1.5},\"echo\":true,\"logprobs\":2,\"n\":3,"
        "\"min_tokens\":1");
  assert_int_equal(rec.e.kind, MR_ROW_PLAIN);
  rec.row = 77;
  assert_int_equal(mr_row_request(&rec, mr_prompter_vocab(prompter), &q, &keep, &e), MR_OK);
  assert_int_equal(q.tag, 77);
  assert_true(q.row_key == mr_hash_64("p", 1));
  assert_int_equal(q.task, MR_TASK_GENERATE);
  assert_int_equal(q.n_prompt, 2);
  const mr_sampling *s = &q.sampling;
  assert_true(s->temperature == 0 && s->min_p == 0.25f && s->top_k == 3 && s->top_p == 1);
  assert_true(s->has_seed && s->seed == (uint64_t)-2);
  assert_int_equal(s->max_tokens, 5);
  assert_int_equal(s->n, 3);
  assert_int_equal(s->n_stop, 2);
  assert_string_equal(s->stop[1], "yz");
  assert_int_equal(s->stop_ids[0], 4);
  assert_true(s->bias[0].id == 9 && s->bias[0].value == -1.5f);
  assert_int_equal(s->prompt_logprobs, 2); /* echo shows the prompt's too */
  mr_row_keep_free(&keep);
  parse("{\"prompt\":\"a\",\"continuation\":\"b\"}");
  assert_int_equal(mr_row_request(&rec, NULL, &q, &keep, &e), MR_OK);
  assert_int_equal(q.task, MR_TASK_SCORE);
  assert_int_equal(q.n_cont, 1);
  assert_int_equal(q.sampling.logprobs, 0);
  mr_row_keep_free(&keep);
  parse("{}");
  assert_int_not_equal(mr_row_request(&rec, NULL, &q, &keep, &e), MR_OK);
}

static int begin(void **state) {
  (void)state;
  mr_err e = MR_ERR_INIT;
  mr_job_init(&job);
  if (mr_prompter_open(&prompter, model_path = row_model_write(), &e) == MR_OK)
    return 0;
  mr_err_print(&e, stderr);
  return -1;
}

static int end(void **state) {
  (void)state;
  parse("{}");
  mr_plan_record_free(&rec);
  mr_prompter_close(prompter);
  build_remove(model_path);
  return 0;
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(bad_parameters_are_named),
      cmocka_unit_test(bad_completions_are_named),
      cmocka_unit_test(bad_lines_are_described),
      cmocka_unit_test(good_parameters_are_kept),
      cmocka_unit_test(lengths_meet_the_context),
      cmocka_unit_test(defaults_serve_silent_rows),
      cmocka_unit_test(other_fields_pass_through),
      cmocka_unit_test(content_in_parts_is_joined),
      cmocka_unit_test(scores),
      cmocka_unit_test(nul_does_not_cut_a_text),
      cmocka_unit_test(a_record_becomes_a_request),
  };
  return cmocka_run_group_tests(tests, begin, end);
}
