#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "io/json.h"
#include "jobs/params.h"

#define VOCAB 100

static mr_params p;
static mr_row_error why;
static json_t *body, *defaults;

static json_t *json(const char *s) {
  json_t *v = s ? mr_json_parse(s, strlen(s), NULL, NULL) : NULL;
  assert_true(!s || v);
  return v;
}

static bool read(const char *b, const char *d, mr_shape shape) {
  json_decref(body);
  json_decref(defaults);
  body = json(b);
  defaults = json(d);
  why = (mr_row_error){0};
  return mr_params_read(&p, body, defaults, shape, VOCAB, &why);
}

static void good(const char *b, mr_shape shape) {
  if (!read(b, NULL, shape))
    fail_msg("%s: %s", b, why.message);
}

static void bad(const char *b, mr_shape shape, const char *param, const char *words) {
  if (read(b, NULL, shape))
    fail_msg("%s was taken", b);
  if (!strstr(why.message, words) || strcmp(why.param, param) != 0)
    fail_msg("%s: %s: %s", b, why.param, why.message);
  assert_string_equal(why.type, "invalid_request_error");
  assert_true(why.code[0]);
}

static void of_the_api(void **state) {
  (void)state;
  good("{}", MR_SHAPE_CHAT);
  assert_true(p.max_tokens == -1 && p.min_tokens == 0 && p.n == 1 && p.top_k == 0);
  assert_true(p.logprobs == -1 && p.prompt_logprobs == -1 && !p.has_seed);
  assert_true(p.temperature == 1 && p.top_p == 1 && p.min_p == 0 && p.repetition_penalty == 1);
  assert_true(p.add_generation_prompt && !p.ignore_eos && !p.echo && !p.stream);
  assert_null(p.stop);
}

/* null is as absent; the row goes before the job, the job before the API. */
static void who_wins(void **state) {
  (void)state;
  const char *d = "{\"temperature\":0.5,\"top_p\":0.25,\"max_tokens\":9,\"seed\":3}";
  assert_true(read("{\"temperature\":0,\"top_p\":null}", d, MR_SHAPE_CHAT));
  assert_true(p.temperature == 0 && p.top_p == 0.25 && p.max_tokens == 9);
  assert_true(p.has_seed && p.seed == 3);
  assert_true(read("{\"max_completion_tokens\":4}", d, MR_SHAPE_CHAT));
  assert_int_equal(p.max_tokens, 4);
  assert_true(read("{\"max_tokens\":4}", "{\"max_completion_tokens\":7}", MR_SHAPE_CHAT));
  assert_int_equal(p.max_tokens, 4);
  assert_true(read("{}", "{\"max_completion_tokens\":7}", MR_SHAPE_CHAT));
  assert_int_equal(p.max_tokens, 7);
}

static void ranges(void **state) {
  (void)state;
  static const struct {
    const char *name, *good, *bad;
  } edges[] = {
      {"max_tokens", "1", "0"},
      {"max_tokens", "9223372036854775807", "1.5"},
      {"max_completion_tokens", "9223372036854775807", "0"},
      {"min_tokens", "0", "-1"},
      {"n", "128", "129"},
      {"n", "1.0", "0"},
      {"temperature", "0", "-0.1"},
      {"temperature", "1000000", "1000001"},
      {"top_p", "1", "0"},
      {"top_p", "0.000001", "1.01"},
      {"top_k", "-1", "-2"},
      {"top_k", "2147483647", "2147483648"},
      {"min_tokens", "2147483647", "2147483648"},
      {"min_p", "1", "1.5"},
      {"repetition_penalty", "100", "0"},
      {"presence_penalty", "-2", "-2.1"},
      {"frequency_penalty", "2", "2.1"},
      {"prompt_logprobs", "20", "21"},
      {"ignore_eos", "true", "1"},
      {"return_token_ids", "false", "\"true\""},
      {"seed", "-9223372036854775808", "\"7\""},
      {"seed", "4e0", "0.5"},
  };
  for (size_t i = 0; i < sizeof edges / sizeof *edges; i++) {
    char b[128];
    bool min = !strcmp(edges[i].name, "min_tokens");
    snprintf(b, sizeof b, "{\"%s\":%s}", edges[i].name, edges[i].good);
    good(b, MR_SHAPE_COMPLETION);
    snprintf(b, sizeof b, "{\"%s\":%s}", edges[i].name, edges[i].bad);
    bad(b, MR_SHAPE_COMPLETION, edges[i].name, min ? "from 0" : "it must be");
    assert_non_null(strstr(why.message, edges[i].bad)); /* the value is named */
  }
}

static void together(void **state) {
  (void)state;
  good("{\"max_tokens\":5,\"max_completion_tokens\":5}", MR_SHAPE_CHAT);
  bad("{\"max_tokens\":5,\"max_completion_tokens\":6}", MR_SHAPE_CHAT, "max_completion_tokens",
      "give one of them");
  bad("{\"top_k\":2147483648}", MR_SHAPE_CHAT, "top_k", "1 to 2147483647"); /* the limit is said */
  bad("{\"min_tokens\":2147483648}", MR_SHAPE_CHAT, "min_tokens", "0 to 2147483647");
  bad("{\"max_tokens\":5,\"min_tokens\":6}", MR_SHAPE_CHAT, "min_tokens", "more than max_tokens");
  good("{\"n\":2,\"best_of\":2}", MR_SHAPE_COMPLETION);
  bad("{\"n\":2,\"best_of\":1}", MR_SHAPE_COMPLETION, "best_of", "not below n");
  bad("{\"echo\":true}", MR_SHAPE_PLAIN_CHAT, "echo", "for chats");
  good("{\"echo\":true}", MR_SHAPE_PLAIN_TEXT);
}

static void logprobs(void **state) {
  (void)state;
  good("{\"logprobs\":true,\"top_logprobs\":3}", MR_SHAPE_CHAT);
  assert_int_equal(p.logprobs, 3);
  good("{\"logprobs\":true}", MR_SHAPE_CHAT);
  assert_int_equal(p.logprobs, 0);
  good("{\"logprobs\":false}", MR_SHAPE_CHAT);
  assert_int_equal(p.logprobs, -1);
  bad("{\"logprobs\":3}", MR_SHAPE_CHAT, "logprobs", "true or false");
  bad("{\"top_logprobs\":3}", MR_SHAPE_CHAT, "top_logprobs", "needs logprobs");
  bad("{\"logprobs\":true,\"top_logprobs\":21}", MR_SHAPE_CHAT, "top_logprobs", "0 to 20");
  good("{\"logprobs\":5}", MR_SHAPE_COMPLETION);
  assert_int_equal(p.logprobs, 5);
  bad("{\"logprobs\":true}", MR_SHAPE_COMPLETION, "logprobs", "0 to 20");
  good("{\"logprobs\":2}", MR_SHAPE_PLAIN_CHAT); /* plain rows take both forms */
  good("{\"logprobs\":true,\"top_logprobs\":2}", MR_SHAPE_PLAIN_TEXT);
  assert_int_equal(p.logprobs, 2);
}

static void stops(void **state) {
  (void)state;
  good("{\"stop\":\"a\"}", MR_SHAPE_CHAT);
  good("{\"stop\":[\"a\",\"b\"],\"stop_token_ids\":[0,99]}", MR_SHAPE_CHAT);
  assert_int_equal(json_array_size(p.stop), 2);
  bad("{\"stop\":\"\"}", MR_SHAPE_CHAT, "stop", "empty");
  bad("{\"stop\":[\"a\",5]}", MR_SHAPE_CHAT, "stop", "list of texts");
  bad("{\"stop\":\"a\\u0000\"}", MR_SHAPE_CHAT, "stop", "NUL");
  bad("{\"stop\":[\"1\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\",\"8\",\"9\",\"10\",\"11\",\"12\","
      "\"13\",\"14\",\"15\",\"16\",\"17\"]}",
      MR_SHAPE_CHAT, "stop", "at most 16");
  bad("{\"stop_token_ids\":[100]}", MR_SHAPE_CHAT, "stop_token_ids", "0 to 99");
  bad("{\"stop_token_ids\":[-1]}", MR_SHAPE_CHAT, "stop_token_ids", "0 to 99");
  bad("{\"stop_token_ids\":3}", MR_SHAPE_CHAT, "stop_token_ids", "list");
}

static void biases(void **state) {
  (void)state;
  good("{\"logit_bias\":{\"0\":-100,\"99\":100}}", MR_SHAPE_CHAT);
  bad("{\"logit_bias\":{\"100\":1}}", MR_SHAPE_CHAT, "logit_bias", "\"100\"");
  bad("{\"logit_bias\":{\"-1\":1}}", MR_SHAPE_CHAT, "logit_bias", "\"-1\"");
  bad("{\"logit_bias\":{\"x\":1}}", MR_SHAPE_CHAT, "logit_bias", "\"x\"");
  bad("{\"logit_bias\":{\"1\":101}}", MR_SHAPE_CHAT, "logit_bias", "-100 to 100");
  bad("{\"logit_bias\":[]}", MR_SHAPE_CHAT, "logit_bias", "object");
}

static void harmless_or_not(void **state) {
  (void)state;
  good("{\"use_beam_search\":false,\"length_penalty\":1,\"bad_words\":[],\"suffix\":\"\"}",
       MR_SHAPE_COMPLETION);
  bad("{\"use_beam_search\":true}", MR_SHAPE_COMPLETION, "use_beam_search", "not supported");
  bad("{\"suffix\":\"x\"}", MR_SHAPE_COMPLETION, "suffix", "not supported");
  bad("{\"tool_choice\":\"required\"}", MR_SHAPE_CHAT, "tool_choice", "enforced");
  good("{\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}]}", MR_SHAPE_CHAT);
  assert_int_equal(json_array_size(p.tools), 1);
  good("{\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}],"
       "\"tool_choice\":\"none\"}",
       MR_SHAPE_CHAT);
  assert_null(p.tools);
  bad("{\"tools\":[{}]}", MR_SHAPE_CHAT, "tools", "tools[0]");
  bad("{\"documents\":[1]}", MR_SHAPE_CHAT, "documents", "documents[0]");
  bad("{\"model\":5}", MR_SHAPE_CHAT, "model", "a name");
}

/* What is written is read back as the same. */
static void written(void **state) {
  (void)state;
  good("{\"max_tokens\":7,\"min_tokens\":2,\"n\":3,\"temperature\":0.1,\"top_p\":0.3,\"top_k\":5,"
       "\"min_p\":0.05,\"repetition_penalty\":1.1,\"presence_penalty\":-0.5,"
       "\"frequency_penalty\":0.25,\"prompt_logprobs\":0,\"ignore_eos\":true,\"logprobs\":4,"
       "\"include_stop_str_in_output\":true,\"return_token_ids\":true,\"echo\":true,\"seed\":-1,"
       "\"stop\":[\"a\",\"\\u00e9\\n\"],\"stop_token_ids\":[1],\"logit_bias\":{\"5\":1.5}}",
       MR_SHAPE_COMPLETION);
  mr_params was = p;
  mr_text t = {0}, again = {0};
  mr_params_write(&p, &t);
  json_t *v = json(t.data);
  assert_true(mr_params_read(&p, v, NULL, MR_SHAPE_STORED, VOCAB, &why));
  assert_true(p.max_tokens == was.max_tokens && p.temperature == was.temperature &&
              p.top_p == was.top_p && p.seed == was.seed && p.has_seed &&
              p.logprobs == was.logprobs && p.prompt_logprobs == 0 && p.echo && p.ignore_eos &&
              p.include_stop && p.return_token_ids && p.min_p == was.min_p &&
              p.frequency_penalty == was.frequency_penalty);
  mr_params_write(&p, &again);
  assert_string_equal(t.data, again.data);
  json_decref(v);
  mr_text_free(&t);
  mr_text_free(&again);
  good("{}", MR_SHAPE_CHAT); /* what nobody set is not written */
  mr_params_write(&p, &t);
  assert_string_equal(t.data, "{}");
  mr_text_free(&t);
}

static bool names(const char *b, mr_shape shape) {
  json_t *v = json(b);
  why = (mr_row_error){0};
  bool is = mr_params_check_names(v, shape, &why);
  json_decref(v);
  return is;
}

static void known_names(void **state) {
  (void)state;
  assert_true(
      names("{\"messages\":[],\"temperature\":0,\"user\":\"u\",\"tools\":[]}", MR_SHAPE_CHAT));
  assert_true(names("{\"messages\":[],\"nonsense\":null}", MR_SHAPE_CHAT)); /* null is absent */
  assert_false(names("{\"temprature\":0}", MR_SHAPE_CHAT));
  assert_non_null(strstr(why.message, "did you mean temperature?"));
  assert_string_equal(why.code, "unknown_parameter");
  assert_false(names("{\"zzzzzzzzzz\":0}", MR_SHAPE_CHAT));
  assert_null(strstr(why.message, "did you mean"));
  assert_false(names("{\"prompt\":\"x\"}", MR_SHAPE_CHAT));
  assert_non_null(strstr(why.message, "/v1/chat/completions"));
  assert_false(names("{\"messages\":[]}", MR_SHAPE_COMPLETION));
  assert_false(names("{\"echo\":true}", MR_SHAPE_CHAT));
  assert_false(names("{\"tools\":[]}", MR_SHAPE_COMPLETION));
  assert_true(mr_params_is_known("seed") && mr_params_is_known("user") &&
              mr_params_is_known("guided_json") && !mr_params_is_known("topic"));
  assert_true(mr_params_is_ignored("user") && !mr_params_is_ignored("seed"));
}

static void defaults_of_a_job(void **state) {
  (void)state;
  json_t *v = json("{\"temperature\":0,\"stop_token_ids\":[1000000]}"); /* no model is known yet */
  assert_true(mr_params_check_defaults(v, &why));
  json_decref(v);
  v = json("{\"temperature\":-1}");
  assert_false(mr_params_check_defaults(v, &why));
  json_decref(v);
  v = json("{\"topic\":1}");
  assert_false(mr_params_check_defaults(v, &why));
  assert_string_equal(why.param, "topic");
  json_decref(v);
}

/* Messages end at a whole character. */
static void long_values(void **state) {
  (void)state;
  mr_text t = {0};
  mr_text_adds(&t, "{\"temperature\":\"");
  for (int i = 0; i < 100; i++)
    mr_text_adds(&t, "\xE2\x82\xAC");
  mr_text_adds(&t, "\"}");
  bad(t.data, MR_SHAPE_CHAT, "temperature", "...; it must be");
  assert_true(mr_utf8_valid(why.message, strlen(why.message)) < 0);
  mr_text_clear(&t);
  for (int i = 0; i < 300; i++)
    mr_text_adds(&t, "\xE2\x82\xAC");
  assert_false(mr_row_error_set(&why, t.data, "c", "%s", t.data));
  assert_true(mr_utf8_valid(why.message, strlen(why.message)) < 0 && strlen(why.message) > 500);
  assert_true(mr_utf8_valid(why.param, strlen(why.param)) < 0 && strlen(why.param) > 120);
  mr_text_free(&t);
  json_decref(body);
  json_decref(defaults);
  body = defaults = NULL;
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(of_the_api),
                                     cmocka_unit_test(who_wins),
                                     cmocka_unit_test(ranges),
                                     cmocka_unit_test(together),
                                     cmocka_unit_test(logprobs),
                                     cmocka_unit_test(stops),
                                     cmocka_unit_test(biases),
                                     cmocka_unit_test(harmless_or_not),
                                     cmocka_unit_test(written),
                                     cmocka_unit_test(known_names),
                                     cmocka_unit_test(defaults_of_a_job),
                                     cmocka_unit_test(long_values)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
