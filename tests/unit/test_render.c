#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include <math.h>

#include "io/json.h"
#include "jobs/render.h"
#include "row_model.h"

static mr_prompter *prompter;
static const char *model_path;
static mr_job job;
static mr_render render;

/* v's value at "a.b.0.c", borrowed; NULL: not there. */
static json_t *at(const json_t *v, const char *path) {
  char part[64];
  while (v && *path) {
    size_t n = strcspn(path, ".");
    memcpy(part, path, n);
    part[n] = '\0';
    v = json_is_array(v) ? json_array_get(v, (size_t)(part[0] - '0')) : json_object_get(v, part);
    path += n + (path[n] == '.');
  }
  return (json_t *)(uintptr_t)v;
}

static const char *dumped(const json_t *v) {
  static mr_text t[4];
  static int k;
  mr_text *one = &t[k = (k + 1) % 4];
  mr_text_clear(one);
  if (!v)
    return "absent";
  mr_json_add(one, v);
  return one->data;
}

#define is_json(v, path, want) assert_string_equal(dumped(at(v, path)), want)

/* ---------------------------------------------------------------- rows and results made by hand */

typedef struct made { /* a row and the engine's answer to it */
  mr_plan_record rec;
  mr_result res;
  mr_choice choices[3];
  int32_t ids[3][4];
  mr_sampled logprobs[3][4], prompt[16];
  int offsets[3][4];
} made;

static void make_row(made *m, const char *line) {
  const mr_row_source src = {"in.jsonl", 0, 3};
  mr_err e = MR_ERR_INIT;
  *m = (made){0};
  assert_int_equal(mr_row_parse(&job, prompter, 0, 0, &src, line, strlen(line), &m->rec, &e),
                   MR_OK);
  m->rec.row = 5;
  m->res.choices = m->choices;
  m->res.n_prompt = m->rec.e.n_prompt;
}

/* Gives choice i this text, a token a byte, each with the logprob -1, -2 ... and one other token.
 */
static void answer(made *m, int i, const char *text, mr_finish finish) {
  mr_choice *c = &m->choices[i];
  int n = (int)strlen(text);
  m->res.n_choices = i + 1;
  *c = (mr_choice){.ids = m->ids[i],
                   .n_ids = n,
                   .n_sampled = n + (finish == MR_FINISH_STOP),
                   .finish = finish,
                   .text = (char *)(uintptr_t)text,
                   .text_len = (size_t)n,
                   .logprobs = m->logprobs[i],
                   .offsets = m->offsets[i],
                   .greedy = i == 0};
  for (int k = 0; k < n; k++) {
    m->ids[i][k] = (unsigned char)text[k];
    m->offsets[i][k] = k;
    m->logprobs[i][k] = (mr_sampled){.id = m->ids[i][k],
                                     .logprob = (float)-k - 1,
                                     .n_top = 1,
                                     .top_id = {'z'},
                                     .top_logprob = {-0.5f}};
    c->sum_logprob -= k + 1;
  }
}

/* The line as JSON; what it must be for every line is checked here. */
static json_t *rendered(made *m, bool want_error) {
  mr_text line = {0};
  mr_err e = MR_ERR_INIT;
  bool is_error;
  assert_int_equal(mr_render_result(&render, &m->rec, &m->res, &line, &is_error, &e), MR_OK);
  assert_int_equal(is_error, want_error);
  assert_int_equal(line.data[line.len - 1], '\n');
  assert_ptr_equal(strchr(line.data, '\n'), line.data + line.len - 1);
  json_t *v = mr_json_parse(line.data, line.len - 1, NULL, &e);
  if (!v)
    fail_msg("%s: %s", e.text, line.data);
  mr_text_free(&line);
  mr_plan_record_free(&m->rec);
  return v;
}

#define CHAT(members)                                                                              \
  "{\"custom_id\":\"c\\n1\",\"method\":\"POST\",\"url\":\"/v1/chat/"                               \
  "completions\",\"body\":{\"messages\":[{"                                                        \
  "\"role\":\"user\",\"content\":\"hi\"}]" members "}}"
#define COMPLETION(members)                                                                        \
  "{\"custom_id\":\"c\",\"method\":\"POST\",\"url\":\"/v1/"                                        \
  "completions\",\"body\":{\"prompt\":\"hi\"" members "}}"

/* ---------------------------------------------------------------- the OpenAI shapes */

static void a_chat(void **state) {
  (void)state;
  made m;
  make_row(&m, CHAT(",\"model\":\"mine\",\"stream\":true"));
  answer(&m, 0, "yes", MR_FINISH_STOP);
  json_t *v = rendered(&m, false);
  is_json(v, "custom_id", "\"c\\n1\"");
  is_json(v, "error", "null");
  is_json(v, "response.status_code", "200");
  is_json(v, "response.body.object", "\"chat.completion\"");
  is_json(v, "response.body.created", "1700000000");
  is_json(v, "response.body.model", "\"mine\"");
  is_json(v, "response.body.choices.0.message",
          "{\"role\":\"assistant\",\"content\":\"yes\",\"refusal\":null}");
  is_json(v, "response.body.choices.0.finish_reason", "\"stop\"");
  is_json(v, "response.body.choices.0.logprobs", "null");
  is_json(v, "response.body.usage",
          "{\"prompt_tokens\":10,\"completion_tokens\":4,\"total_tokens\":14}");
  assert_non_null(strstr(dumped(at(v, "warnings")), "stream"));
  assert_memory_equal(json_string_value(at(v, "response.body.id")), "chatcmpl-", 9);
  json_decref(v);
}

static void ids_belong_to_the_job_and_the_row(void **state) {
  (void)state;
  const char *ids[3];
  json_t *v[3];
  for (int i = 0; i < 3; i++) {
    made m;
    make_row(&m, CHAT(""));
    m.rec.row = i == 2 ? 6 : 5;
    answer(&m, 0, "a", MR_FINISH_LENGTH);
    v[i] = rendered(&m, false);
    ids[i] = json_string_value(at(v[i], "id"));
  }
  assert_string_equal(ids[0], ids[1]);
  assert_string_not_equal(ids[0], ids[2]);
  for (int i = 0; i < 3; i++)
    json_decref(v[i]);
}

static void chat_logprobs(void **state) {
  (void)state;
  made m;
  make_row(&m, CHAT(",\"logprobs\":true,\"top_logprobs\":1,\"n\":2,\"return_token_ids\":true"));
  answer(&m, 0, "a", MR_FINISH_LENGTH);
  answer(&m, 1, "\xc3\xa9", MR_FINISH_STOP);
  m.logprobs[1][1].logprob = -INFINITY;
  json_t *v = rendered(&m, false);
  is_json(v, "response.body.choices.0.logprobs.content",
          "[{\"token\":\"a\",\"logprob\":-1.0,\"bytes\":[97],\"top_logprobs\":[{\"token\":\"z\","
          "\"logprob\":-0.5,"
          "\"bytes\":[122]}]}]");
  is_json(v, "response.body.choices.1.logprobs.content.0.bytes", "[195]");
  is_json(v, "response.body.choices.1.logprobs.content.1.logprob", "null");
  is_json(v, "response.body.choices.1.index", "1");
  is_json(v, "response.body.choices.1.token_ids", "[195,169]");
  is_json(v, "response.body.choices.0.finish_reason", "\"length\"");
  assert_int_equal(json_array_size(at(v, "response.body.prompt_token_ids")), 10);
  json_decref(v);
}

static void a_completion_with_echo(void **state) {
  (void)state;
  made m;
  make_row(&m, COMPLETION(",\"echo\":true,\"logprobs\":1"));
  answer(&m, 0, "yo", MR_FINISH_LENGTH);
  for (int i = 0; i < 2; i++)
    m.prompt[i] = (mr_sampled){
        .id = "hi"[i], .logprob = -3, .n_top = 1, .top_id = {"hi"[i]}, .top_logprob = {-3}};
  m.res.prompt_logprobs = m.prompt;
  json_t *v = rendered(&m, false);
  is_json(v, "response.body.object", "\"text_completion\"");
  is_json(v, "response.body.model", "\"tiny\"");
  is_json(v, "response.body.choices.0.text", "\"hiyo\"");
  is_json(v, "response.body.choices.0.logprobs",
          "{\"tokens\":[\"h\",\"i\",\"y\",\"o\"],\"token_logprobs\":[null,-3.0,-1.0,-2.0],"
          "\"top_logprobs\":[null,{\"i\":-3.0},{\"z\":-0.5,\"y\":-1.0},{\"z\":-0.5,\"o\":-2.0}],"
          "\"text_offset\":[0,1,2,3]}");
  json_decref(v);
}

static void prompt_logprobs_by_id(void **state) {
  (void)state;
  made m;
  make_row(&m, COMPLETION(",\"prompt_logprobs\":1"));
  answer(&m, 0, "a", MR_FINISH_LENGTH);
  m.prompt[1] =
      (mr_sampled){.id = 'i', .logprob = -3, .n_top = 1, .top_id = {'e'}, .top_logprob = {-0.25f}};
  m.res.prompt_logprobs = m.prompt;
  json_t *v = rendered(&m, false);
  is_json(v, "response.body.choices.0.prompt_logprobs",
          "[null,{\"101\":{\"logprob\":-0.25,\"rank\":1,\"decoded_token\":\"e\"},"
          "\"105\":{\"logprob\":-3.0,\"decoded_token\":\"i\"}}]");
  json_decref(v);
}

/* ---------------------------------------------------------------- flat rows */

static void a_plain_row(void **state) {
  (void)state;
  made m;
  make_row(
      &m,
      "{\"label\":[1,\"\xc3\xa9\"],\"id\":7,\"prompt\":\"hi\",\"max_tokens\":4,\"temperature\":0}");
  answer(&m, 0, "ok", MR_FINISH_STOP);
  json_t *v = rendered(&m, false);
  assert_string_equal(
      dumped(v),
      "{\"id\":7,\"label\":[1,\"\xc3\xa9\"],\"output\":\"ok\",\"finish_reason\":\"stop\","
      "\"usage\":{\"prompt_tokens\":2,\"completion_tokens\":3,\"total_tokens\":5}}");
  json_decref(v);
}

static void everything_that_can_be_asked_for(void **state) {
  (void)state;
  made m;
  job.keep_prompt = true;
  make_row(
      &m,
      "{\"prompt\":\"hi\",\"n\":2,\"logprobs\":1,\"prompt_logprobs\":1,\"return_token_ids\":true}");
  job.keep_prompt = false;
  answer(&m, 0, "a", MR_FINISH_STOP);
  answer(&m, 1, "", MR_FINISH_LENGTH);
  m.prompt[1] = (mr_sampled){.id = 'i', .logprob = -3};
  m.res.prompt_logprobs = m.prompt;
  json_t *v = rendered(&m, false);
  is_json(v, "id", "\"row-3\"");
  is_json(v, "prompt", "\"hi\"");
  is_json(v, "output", "[\"a\",\"\"]");
  is_json(v, "finish_reason", "[\"stop\",\"length\"]");
  is_json(v, "token_ids", "[[97],[]]");
  is_json(v, "prompt_token_ids", "[104,105]");
  is_json(v, "prompt_token_logprobs", "[null,-3.0]");
  is_json(v, "prompt_top_logprobs", "[null,{\"i\":-3.0}]");
  is_json(v, "logprobs.0.tokens", "[\"a\"]");
  is_json(v, "logprobs.1.tokens", "[]");
  json_decref(v);
}

static void without_a_vocabulary_there_are_ids(void **state) {
  (void)state;
  made m;
  make_row(&m, "{\"prompt\":[1,2],\"logprobs\":0}");
  answer(&m, 0, "a", MR_FINISH_LENGTH);
  m.choices[0].text = NULL;
  m.choices[0].text_len = 0;
  m.choices[0].offsets = NULL;
  render.vocab = NULL;
  json_t *v = rendered(&m, false);
  render.vocab = mr_prompter_vocab(prompter);
  is_json(v, "output", "absent");
  is_json(v, "token_ids", "[97]");
  is_json(v, "logprobs.tokens", "[\"token_id:97\"]");
  json_decref(v);
}

static void a_score(void **state) {
  (void)state;
  made m;
  make_row(&m, "{\"id\":\"s\",\"prompt\":\"hi\",\"continuation\":\"ab\",\"gold\":1}");
  answer(&m, 0, "ab", MR_FINISH_LENGTH);
  json_t *v = rendered(&m, false);
  assert_string_equal(dumped(v),
                      "{\"id\":\"s\",\"gold\":1,\"logprob\":-3.0,\"token_logprobs\":[-1.0,-2.0],"
                      "\"is_greedy\":true,\"usage\":{\"prompt_tokens\":2,\"completion_tokens\":2,"
                      "\"total_tokens\":4}}");
  json_decref(v);
}

static void choices_are_compared(void **state) {
  (void)state;
  made m;
  make_row(&m, "{\"id\":\"s\",\"prompt\":\"hi\",\"choices\":[\"abc\",\"d\",\"ef\"]}");
  answer(&m, 0, "abc", MR_FINISH_LENGTH);
  answer(&m, 1, "d", MR_FINISH_LENGTH);
  answer(&m, 2, "ef", MR_FINISH_LENGTH);
  m.choices[0].sum_logprob = -2;
  m.choices[1].sum_logprob = -1.5;
  json_t *v = rendered(&m, false);
  is_json(v, "choice_logprobs", "[-2.0,-1.5,-3.0]");
  is_json(v, "choice_tokens", "[3,1,2]");
  is_json(v, "best", "1");
  is_json(v, "best_normalized", "0");
  is_json(v, "logprob", "absent");
  json_decref(v);
}

/* ---------------------------------------------------------------- errors */

static void a_row_that_failed_in_the_engine(void **state) {
  (void)state;
  made m;
  make_row(&m, CHAT(""));
  answer(&m, 0, "a", MR_FINISH_ERROR);
  mr_err_set(&m.res.err, MR_E_DATA, "logits are not finite");
  json_t *v = rendered(&m, true);
  is_json(v, "custom_id", "\"c\\n1\"");
  is_json(v, "line", "3");
  is_json(v, "file", "\"in.jsonl\"");
  is_json(v, "response.status_code", "500");
  is_json(v, "response.body.error",
          "{\"message\":\"logits are not "
          "finite\",\"type\":\"server_error\",\"param\":null,\"code\":\"engine_error\"}");
  json_decref(v);
}

static void bad_and_expired_rows(void **state) {
  (void)state;
  made m;
  mr_text line = {0};
  mr_err e = MR_ERR_INIT;
  make_row(&m, CHAT(",\"n\":0"));
  assert_int_equal(mr_render_bad(&render, &m.rec, &line, &e), MR_OK);
  json_t *v = mr_json_parse(line.data, line.len, NULL, &e);
  is_json(v, "custom_id", "\"c\\n1\"");
  is_json(v, "response.status_code", "400");
  is_json(v, "response.body.error.param", "\"n\"");
  json_decref(v);
  mr_plan_record_free(&m.rec);
  mr_text_clear(&line);

  make_row(&m, "nonsense");
  assert_int_equal(mr_render_bad(&render, &m.rec, &line, &e), MR_OK);
  v = mr_json_parse(line.data, line.len, NULL, &e);
  is_json(v, "custom_id", "null");
  is_json(v, "response.body.error.param", "null");
  json_decref(v);
  mr_plan_record_free(&m.rec);
  mr_text_clear(&line);

  const mr_row_error why = {"the time was over", "batch_expired", "", ""};
  make_row(&m, CHAT(""));
  assert_int_equal(mr_render_failed(&render, &m.rec, &why, &line, &e), MR_OK);
  v = mr_json_parse(line.data, line.len, NULL, &e);
  is_json(v, "response", "null");
  is_json(v, "error", "{\"code\":\"batch_expired\",\"message\":\"the time was over\"}");
  json_decref(v);
  mr_plan_record_free(&m.rec);
  mr_text_free(&line);
}

static int begin(void **state) {
  (void)state;
  static const char *const files[] = {"in.jsonl"};
  mr_err e = MR_ERR_INIT;
  mr_job_init(&job);
  if (mr_prompter_open(&prompter, model_path = row_model_write(), &e) != MR_OK) {
    mr_err_print(&e, stderr);
    return -1;
  }
  render = (mr_render){.job_id = "0123456789abcdef0123456789abcdef",
                       .created = 1700000000,
                       .model = "tiny",
                       .vocab = mr_prompter_vocab(prompter),
                       .files = files};
  return 0;
}

static int end(void **state) {
  (void)state;
  mr_prompter_close(prompter);
  build_remove(model_path);
  return 0;
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_chat),
      cmocka_unit_test(ids_belong_to_the_job_and_the_row),
      cmocka_unit_test(chat_logprobs),
      cmocka_unit_test(a_completion_with_echo),
      cmocka_unit_test(prompt_logprobs_by_id),
      cmocka_unit_test(a_plain_row),
      cmocka_unit_test(everything_that_can_be_asked_for),
      cmocka_unit_test(without_a_vocabulary_there_are_ids),
      cmocka_unit_test(a_score),
      cmocka_unit_test(choices_are_compared),
      cmocka_unit_test(a_row_that_failed_in_the_engine),
      cmocka_unit_test(bad_and_expired_rows),
  };
  return cmocka_run_group_tests(tests, begin, end);
}
