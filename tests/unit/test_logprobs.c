#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include <math.h>

#include "io/json.h"
#include "jobs/logprobs.h"
#include "row_model.h"
#include "src/prompt.h"

static mr_prompter *prompter; /* its vocabulary: a token a byte, 256 is a control token */

static const mr_vocab *vocab(void) {
  return mr_prompter_vocab(prompter);
}

static int begin(void **state) {
  (void)state;
  mr_err e = MR_ERR_INIT;
  mr_code rc = mr_prompter_open(&prompter, row_model_write(), &e);
  build_remove(build_path("model.gguf"));
  return rc;
}

static int end(void **state) {
  (void)state;
  mr_prompter_close(prompter);
  return 0;
}

/* The text is JSON, and equal to `want`. */
static void is(mr_text *t, const char *want) {
  json_t *a = mr_json_parse(t->data, t->len, NULL, NULL);
  json_t *b = mr_json_parse(want, strlen(want), NULL, NULL);
  assert_non_null(b);
  if (!a || !json_equal(a, b))
    fail_msg("%s\nis not\n%s", t->data, want);
  json_decref(a);
  json_decref(b);
  mr_text_free(t);
}

static const mr_sampled e_acute[] =
    {/* the two bytes of é, then x */
     {.id = 0xC3, .logprob = -1, .n_top = 2, .top_id = {0xC3, 'y'}, .top_logprob = {-1, -2}},
     {.id = 0xA9, .logprob = -0.5f},
     {.id = 'x', .logprob = -INFINITY, .n_top = 1, .top_id = {'"'}, .top_logprob = {-0.25f}}};

static void chats(void **state) {
  (void)state;
  mr_text t = {0};
  mr_logprobs_chat(&t, vocab(), e_acute, 3);
  is(&t, "{\"content\":["
         "{\"token\":\"\xEF\xBF\xBD\",\"logprob\":-1.0,\"bytes\":[195],\"top_logprobs\":["
         "{\"token\":\"\xEF\xBF\xBD\",\"logprob\":-1.0,\"bytes\":[195]},"
         "{\"token\":\"y\",\"logprob\":-2.0,\"bytes\":[121]}]},"
         "{\"token\":\"\xEF\xBF\xBD\",\"logprob\":-0.5,\"bytes\":[169],\"top_logprobs\":[]},"
         "{\"token\":\"x\",\"logprob\":null,\"bytes\":[120],\"top_logprobs\":["
         "{\"token\":\"\\\"\",\"logprob\":-0.25,\"bytes\":[34]}]}],\"refusal\":null}");
  mr_logprobs_chat(&t, NULL, e_acute, 1);
  is(&t, "{\"content\":[{\"token\":\"token_id:195\",\"logprob\":-1.0,\"bytes\":null,"
         "\"top_logprobs\":[{\"token\":\"token_id:195\",\"logprob\":-1.0,\"bytes\":null},"
         "{\"token\":\"token_id:121\",\"logprob\":-2.0,\"bytes\":null}]}],\"refusal\":null}");
  mr_logprobs_chat(&t, vocab(), NULL, 0);
  is(&t, "{\"content\":[],\"refusal\":null}");
}

static void completions(void **state) {
  (void)state;
  mr_text t = {0};
  const int offsets[] = {0, 0, 2}; /* é is emitted when it is whole */
  mr_logprobs_list l = {
      .list = e_acute, .offsets = offsets, .text = "\xC3\xA9x", .text_len = 3, .n = 3};
  mr_logprobs_completion(&t, vocab(), &l);
  is(&t, "{\"tokens\":[\"bytes:\\\\xC3\",\"bytes:\\\\xA9\",\"x\"],"
         "\"token_logprobs\":[-1.0,-0.5,null],"
         "\"top_logprobs\":[{\"bytes:\\\\xC3\":-1.0,\"y\":-2.0},{\"bytes:\\\\xA9\":-0.5},"
         "{\"\\\"\":-0.25,\"x\":null}],\"text_offset\":[0,0,1]}"); /* characters */
}

/* With echo the prompt comes first; its first token has no value. */
static void echo(void **state) {
  (void)state;
  mr_text t = {0};
  const int32_t ids[] = {'a', 'b'};
  const mr_sampled prompt[] = {{.id = 'a'}, {.id = 'b', .logprob = -3}};
  const int offsets[] = {0};
  mr_logprobs_list l = {.prompt_ids = ids,
                        .prompt = prompt,
                        .n_prompt = 2,
                        .prompt_chars = 2,
                        .list = e_acute + 2,
                        .offsets = offsets,
                        .text = "x",
                        .text_len = 1,
                        .n = 1};
  mr_logprobs_completion(&t, vocab(), &l);
  is(&t, "{\"tokens\":[\"a\",\"b\",\"x\"],\"token_logprobs\":[null,-3.0,null],"
         "\"top_logprobs\":[null,{\"b\":-3.0},{\"\\\"\":-0.25,\"x\":null}],"
         "\"text_offset\":[0,1,2]}");
}

/* Two tokens of one text: JSON holds a name once, and the more probable one counts. */
static void one_name_once(void **state) {
  (void)state;
  mr_text t = {0};
  const mr_sampled s[] = {{.id = 'a', .logprob = -5}, /* the first token of a prompt has no value */
                          {.id = 'b',
                           .logprob = -4,
                           .n_top = 3,
                           .top_id = {'b', 'b', 'c'},
                           .top_logprob = {-1, -2, -3}}};
  mr_logprobs_tops(&t, vocab(), s, 2);
  is(&t, "[null,{\"b\":-1.0,\"c\":-3.0}]");
}

static void prompts(void **state) {
  (void)state;
  mr_text t = {0};
  const mr_sampled s[] = {
      {.id = 'a', .logprob = -9},
      {.id = 'b', .logprob = -0.125f, .n_top = 2, .top_id = {'c', 'd'}, .top_logprob = {-1, -2}},
      {.id = 'c', .logprob = -1, .n_top = 1, .top_id = {'c'}, .top_logprob = {-1}},
      {.id = 'd', .logprob = NAN}};
  mr_logprobs_numbers(&t, s, 4, true);
  is(&t, "[null,-0.125,-1.0,null]");
  mr_logprobs_numbers(&t, s, 2, false);
  is(&t, "[-9.0,-0.125]");
  mr_logprobs_numbers(&t, s, 0, true);
  is(&t, "[]");
  mr_logprobs_by_id(&t, vocab(), s, 4);
  is(&t, "[null,"
         "{\"99\":{\"logprob\":-1.0,\"rank\":1,\"decoded_token\":\"c\"},"
         "\"100\":{\"logprob\":-2.0,\"rank\":2,\"decoded_token\":\"d\"},"
         "\"98\":{\"logprob\":-0.125,\"decoded_token\":\"b\"}},"
         "{\"99\":{\"logprob\":-1.0,\"rank\":1,\"decoded_token\":\"c\"}},"
         "{\"100\":{\"logprob\":null,\"decoded_token\":\"d\"}}]");
}

static void characters(void **state) {
  (void)state;
  assert_int_equal(mr_logprobs_chars("", 0), 0);
  assert_int_equal(mr_logprobs_chars("a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80", 10), 4);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(chats),   cmocka_unit_test(completions),
                                     cmocka_unit_test(echo),    cmocka_unit_test(one_name_once),
                                     cmocka_unit_test(prompts), cmocka_unit_test(characters)};
  return cmocka_run_group_tests(tests, begin, end);
}
