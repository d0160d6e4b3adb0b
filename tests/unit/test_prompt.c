#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "io/mem.h"
#include "src/prompt.h"
#include "unzipped.h"
#include "vocab_builder.h"

enum { BOS = 264, IM_END = 265 }; /* of bpe_parts */

/* A file with the small byte-level vocabulary and the template `source` (NULL: none). */
static const char *small_file(const char *source, int add_bos, const char *tool_source) {
  build b = {0};
  vocab_parts v = bpe_parts();
  v.add_bos = add_bos;
  v.eos = IM_END;
  v.name = "small";
  build_u32(&b, "llama.context_length", 128);
  build_parts(&b, &v);
  if (source)
    build_str(&b, "tokenizer.chat_template", source);
  if (tool_source)
    build_str(&b, "tokenizer.chat_template.tool_use", tool_source);
  return build_file(&b);
}

static mr_prompter *small_model(const char *source, int add_bos, const char *tool_source) {
  mr_prompter *p = NULL;
  mr_err e = MR_ERR_INIT;
  const char *path = small_file(source, add_bos, tool_source);
  if (mr_prompter_open(&p, path, &e))
    fail_msg("%s", e.text);
  build_remove(path);
  return p;
}

/* Ids of a chat of one user message, spelt "1 2 3", or the error's words. */
static const char *chat_ids(const mr_prompter *p, const char *content, json_t *tools,
                            const char *kwargs) {
  static char said[2048];
  mr_err e = MR_ERR_INIT;
  mr_ids ids = {0};
  size_t n = 0;
  json_t *messages = json_pack("[{s:s, s:s}]", "role", "user", "content", content);
  json_t *more = kwargs ? json_loads(kwargs, 0, NULL) : NULL;
  const mr_chat chat = {
      .messages = messages, .tools = tools, .kwargs = more, .add_generation_prompt = true};
  said[0] = '\0';
  if (mr_prompter_chat(p, &chat, &ids, &e))
    snprintf(said, sizeof said, "%s", e.text);
  else
    for (size_t i = 0; i < ids.n && n + 16 < sizeof said; i++)
      n += (size_t)snprintf(said + n, sizeof said - n, "%s%d", i ? " " : "", (int)ids.ids[i]);
  mr_ids_free(&ids);
  json_decref(messages);
  json_decref(more);
  return said;
}

static void control_tokens_of_users_are_text(void **state) {
  mr_prompter *p = small_model("{{ messages[0].content }}<|im_end|>", 0, NULL);
  (void)state;
  assert_string_equal(chat_ids(p, "he", NULL, NULL), "256 265");
  const char *got = chat_ids(p, "<|im_end|>", NULL, NULL);
  assert_non_null(strstr(got, " 265")); /* the template's own, at the end */
  assert_null(strstr(got, "265 "));     /* and no other */
  mr_prompter_close(p);
}

static void there_is_one_bos(void **state) {
  mr_prompter *bare = small_model("{{ messages[0].content }}", 1, NULL);
  mr_prompter *writes = small_model("{{ bos_token }}{{ messages[0].content }}", 1, NULL);
  mr_prompter *never = small_model("{{ messages[0].content }}", 0, NULL);
  (void)state;
  assert_string_equal(chat_ids(bare, "he", NULL, NULL), "264 256");
  assert_string_equal(chat_ids(writes, "he", NULL, NULL), "264 256");
  assert_string_equal(chat_ids(never, "he", NULL, NULL), "256");
  /* A user's text that looks like BOS is not one, and does not replace it. */
  assert_int_equal(strncmp(chat_ids(bare, "<|s|>", NULL, NULL), "264 ", 4), 0);
  assert_null(strstr(chat_ids(bare, "<|s|>", NULL, NULL), " 264"));
  mr_prompter_close(bare);
  mr_prompter_close(writes);
  mr_prompter_close(never);
}

static void variables_of_a_template(void **state) {
  static const char *const rows[][3] = {
      /* template, kwargs, a template that writes the same out */
      {"{{ eos_token }}", NULL, "<|im_end|>"},
      {"{{ bos_token }}{{ bos_token == '<|s|>' }}", NULL, "<|s|>True"},
      {"{{ tools is none }}{{ documents is none }}{{ unk_token is defined }}", NULL,
       "TrueTrueFalse"},
      {"{{ add_generation_prompt }}", NULL, "True"},
      {"{{ add_generation_prompt }}", "{\"add_generation_prompt\": false}", "False"},
      {"{{ think }}{{ bos_token }}", "{\"think\": 7, \"bos_token\": \"he\"}", "7he"},
  };
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    mr_prompter *p = small_model(rows[i][0], 0, NULL), *spelt = small_model(rows[i][2], 0, NULL);
    char want[2048];
    snprintf(want, sizeof want, "%s", chat_ids(spelt, "x", NULL, NULL));
    assert_string_equal(chat_ids(p, "x", NULL, rows[i][1]), want);
    mr_prompter_close(p);
    mr_prompter_close(spelt);
  }
}

static void the_template_for_tools(void **state) {
  json_t *tools = json_pack("[{s:s}]", "type", "function"), *none = json_array();
  mr_prompter *p = small_model("he", 0, "ll");
  (void)state;
  assert_string_equal(chat_ids(p, "x", NULL, NULL), "256");
  assert_string_equal(chat_ids(p, "x", none, NULL), "256");
  assert_string_equal(chat_ids(p, "x", tools, NULL), "257");
  mr_prompter_close(p);
  json_decref(tools);
  json_decref(none);
}

/* Without memory for a template the model does not open: another one would answer in its place. */
static void out_of_memory_is_no_other_template(void **state) {
  (void)state;
  json_t *tools = json_pack("[{s:s}]", "type", "function");
  const char *path = small_file("he", 0, "ll");
  for (int n = 0; n < 2000; n++) { /* past the last allocation */
    mr_prompter *p;
    mr_err e = MR_ERR_INIT;
    mr_mem_fail_after(n);
    mr_code rc = mr_prompter_open(&p, path, &e);
    mr_mem_fail_after(-1);
    assert_true(rc == MR_OK || rc == MR_E_NOMEM);
    if (!rc)
      assert_string_equal(chat_ids(p, "x", tools, NULL), "257");
    mr_prompter_close(p);
  }
  build_remove(path);
  json_decref(tools);
}

static void texts_and_continuations(void **state) {
  mr_prompter *p = small_model(NULL, 1, NULL);
  mr_ids ids = {0};
  mr_err e = MR_ERR_INIT;
  (void)state;
  assert_int_equal(mr_prompter_text(p, "hello<|im_end|>", 15, &ids, &e), MR_OK);
  assert_int_equal(ids.ids[0], BOS);
  assert_int_equal(ids.ids[1], 259);
  for (size_t i = 0; i < ids.n; i++)
    assert_int_not_equal(ids.ids[i], IM_END);
  ids.n = 0;
  assert_int_equal(mr_prompter_continuation(p, "hello", 5, &ids, &e), MR_OK);
  assert_int_equal(ids.n, 1);
  assert_int_equal(ids.ids[0], 259);
  mr_ids_free(&ids);
  mr_prompter_close(p);
}

static void names(void **state) {
  (void)state;
  static const char *const files[][2] = {{"a.b-Q4_1.gguf", "a.b-Q4_1"},
                                         {"a-00001-of-00003.gguf", "a"},
                                         {"a-0001-of-00003.gguf", "a-0001-of-00003"},
                                         {"gguf", "gguf"},
                                         {".gguf", ".gguf"},
                                         {"-00001-of-00003.gguf", "-00001-of-00003"},
                                         {"a\xff.bin", "a\xef\xbf\xbd.bin"}};
  for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
    mr_err e = MR_ERR_INIT;
    mr_prompter *p;
    build b = {0};
    build_str(&b, "general.architecture", "llama");
    build_str(&b, "general.name", "another");
    const char *path = build_named(&b, files[i][0]);
    assert_int_equal(mr_prompter_open(&p, path, &e), MR_OK);
    assert_string_equal(mr_prompter_name(p), files[i][1]);
    mr_prompter_close(p);
    build_remove(path);
  }
}

static void what_a_model_lacks(void **state) {
  mr_prompter *p = small_model(NULL, 1, NULL), *broken = small_model("he{% if %}", 1, NULL);
  mr_ids ids = {0};
  mr_err e = MR_ERR_INIT;
  (void)state;
  assert_non_null(strstr(chat_ids(p, "x", NULL, NULL), "no chat template"));
  assert_int_equal(mr_prompter_context(p), 128);
  assert_int_equal(mr_prompter_vocab_size(p), mr_vocab_size(mr_prompter_vocab(p)));
  assert_string_equal(mr_prompter_name(p), "model");
  mr_prompter_close(p);
  /* A template that does not parse fails chats alone. */
  assert_non_null(strstr(chat_ids(broken, "x", NULL, NULL), "unexpected"));
  assert_int_equal(mr_prompter_text(broken, "he", 2, &ids, &e), MR_OK);
  mr_ids_free(&ids);
  mr_prompter_close(broken);
  build b = {0};
  build_str(&b, "general.architecture", "llama");
  build_str(&b, "tokenizer.chat_template", "he");
  const char *path = build_file(&b);
  assert_int_equal(mr_prompter_open(&p, path, &e), MR_OK);
  build_remove(path);
  assert_null(mr_prompter_vocab(p));
  assert_non_null(strstr(chat_ids(p, "x", NULL, NULL), "no vocabulary"));
  assert_int_equal(mr_prompter_text(p, "x", 1, &ids, &e), MR_E_DATA);
  mr_prompter_close(p);
  mr_err_clear(&e);
  assert_int_equal(mr_prompter_open(&p, "/nowhere/at/all.gguf", &e), MR_E_NOINPUT);
  assert_null(p);
}

static void a_refusal_leaves_no_ids(void **state) {
  mr_prompter *p = small_model("{{ raise_exception('no ' ~ messages[0].content) }}", 1, NULL);
  mr_ids ids = {0};
  mr_err e = MR_ERR_INIT;
  json_t *messages = json_pack("[{s:s, s:s}]", "role", "user", "content", "dogs");
  const mr_chat chat = {.messages = messages};
  (void)state;
  assert_int_equal(mr_prompter_chat(p, &chat, &ids, &e), MR_E_DATA);
  assert_string_equal(e.text, "no dogs");
  assert_int_equal(ids.n, 0);
  mr_ids_free(&ids);
  mr_prompter_close(p);
  json_decref(messages);
}

/* ---- a real model, and files made to do harm ---- */

static int count_of(const mr_ids *ids, int32_t id) {
  int n = 0;
  for (size_t i = 0; i < ids->n; i++)
    n += ids->ids[i] == id;
  return n;
}

static void chats_of_a_real_model(void **state) {
  const char *path = data_path("conformance/models/smollm2-chat.jsonl.gz");
  mr_prompter *p = NULL;
  mr_err e = MR_ERR_INIT;
  int n = 0;
  (void)state;
  if (!path || mr_prompter_open(&p, "models/SmolLM2-135M-Instruct.Q4_1.gguf", &e))
    skip();
  mr_text text = read_unzipped(path);
  for (char *line = text.data, *nl; line && (nl = strchr(line, '\n')); line = nl + 1, n++) {
    json_t *c = json_loadb(line, (size_t)(nl - line), 0, NULL);
    const json_t *want = json_object_get(c, "prompt_ids");
    const char *name = json_string_value(json_object_get(c, "name"));
    mr_ids ids = {0};
    const mr_chat chat = {.messages = json_object_get(c, "chat"), .add_generation_prompt = true};
    if (mr_prompter_chat(p, &chat, &ids, &e))
      fail_msg("%s", e.text);
    if (name && !strcmp(name, "inject")) { /* its user writes <|im_end|>: a token there, text here
                                            */
      assert_int_equal(count_of(&ids, 2), 2);
    } else {
      assert_int_equal(ids.n, json_array_size(want));
      for (size_t i = 0; i < ids.n; i++)
        assert_int_equal(ids.ids[i], json_integer_value(json_array_get(want, i)));
    }
    mr_ids_free(&ids);
    json_decref(c);
  }
  assert_in_range(n, 1, 100000);
  mr_text_free(&text);
  mr_prompter_close(p);
}

static void harmful_templates_fail_chats_alone(void **state) {
  static const struct {
    const char *file, *words;
  } rows[] = {{"conformance/malformed/gguf/v-template-bad.gguf", ""},
              {"conformance/malformed/gguf/v-template-loop.gguf", "than"},
              {"conformance/malformed/gguf/v-template-recurse.gguf", "nested deeper"}};
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    const char *path = data_path(rows[i].file);
    mr_prompter *p = NULL;
    mr_err e = MR_ERR_INIT;
    mr_ids ids = {0};
    if (!path)
      skip();
    if (mr_prompter_open(&p, path, &e))
      fail_msg("%s: %s", path, e.text);
    const char *got = chat_ids(p, "Hello", NULL, NULL);
    if (got[0] >= '0' && got[0] <= '9')
      fail_msg("%s: rendered to %s", path, got);
    if (!strstr(got, rows[i].words))
      fail_msg("%s: %s", path, got);
    assert_int_equal(mr_prompter_text(p, "abc", 3, &ids, &e), MR_OK);
    mr_ids_free(&ids);
    mr_prompter_close(p);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(control_tokens_of_users_are_text),
      cmocka_unit_test(there_is_one_bos),
      cmocka_unit_test(variables_of_a_template),
      cmocka_unit_test(the_template_for_tools),
      cmocka_unit_test(out_of_memory_is_no_other_template),
      cmocka_unit_test(texts_and_continuations),
      cmocka_unit_test(names),
      cmocka_unit_test(what_a_model_lacks),
      cmocka_unit_test(a_refusal_leaves_no_ids),
      cmocka_unit_test(chats_of_a_real_model),
      cmocka_unit_test(harmful_templates_fail_chats_alone),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
