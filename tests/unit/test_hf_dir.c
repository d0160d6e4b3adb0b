#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <cmocka.h>

#include "io/mem.h"
#include "src/hf_dir.h"
#include "src/prompt.h"
#include "starve.h"
#include "temp.h"

#define TOKENIZER                                                                                  \
  "{\"added_tokens\":[{\"id\":2,\"content\":\"<s>\",\"special\":true},{\"id\":3,\"content\":"      \
  "\"</s>\",\"special\":true},{\"id\":4,\"content\":\"<|im_end|>\",\"special\":true}],"            \
  "\"post_processor\":{\"type\":\"BertProcessing\",\"cls\":[\"<s>\",2],\"sep\":[\"</s>\",3]},"     \
  "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1},\"merges\":[]}}"

static const char *dir; /* of one test */

static void start(const char *name) {
  static char path[256];
  snprintf(path, sizeof path, "%s", temp_path(name));
  assert_int_equal(mkdir(path, 0700), 0);
  dir = path;
}

static void put(const char *name, const char *text) {
  char rest[128];
  snprintf(rest, sizeof rest, "%s/%s", strrchr(dir, '/') + 1, name);
  temp_text(rest, text);
}

static mr_prompter *opened(void) {
  mr_err e = MR_ERR_INIT;
  mr_prompter *p = NULL;
  if (mr_prompter_open(&p, dir, &e))
    fail_msg("%s: %s", e.file, e.text);
  return p;
}

static const char *said(const mr_prompter *p, const char *text, bool chat) {
  static char words[1200];
  mr_err e = MR_ERR_INIT;
  mr_ids ids = {0};
  size_t n = 0;
  json_t *messages = json_pack("[{s:s, s:s}]", "role", "user", "content", text);
  const mr_chat c = {.messages = messages, .add_generation_prompt = true};
  mr_code code =
      chat ? mr_prompter_chat(p, &c, &ids, &e) : mr_prompter_text(p, text, strlen(text), &ids, &e);
  snprintf(words, sizeof words, "%s", code ? e.text : "");
  for (size_t i = 0; i < ids.n; i++)
    n += (size_t)snprintf(words + n, sizeof words - n, i ? " %d" : "%d", (int)ids.ids[i]);
  json_decref(messages);
  mr_ids_free(&ids);
  return words;
}

static void a_whole_directory(void **state) {
  (void)state;
  start("whole");
  put("config.json", "{\"text_config\":{\"n_positions\":77,\"vocab_size\":8},\"eos_token_id\":1}");
  put("tokenizer.json", TOKENIZER);
  put("tokenizer_config.json",
      "{\"bos_token\":{\"content\":\"<s>\"},\"eos_token\":\"</s>\",\"pad_token\":null,"
      "\"model_max_length\":1000000000000000019884624838656,\"chat_template\":["
      "{\"name\":\"default\",\"template\":\"{{ bos_token }}{{ messages[0].content }}{{ eos_token "
      "}}\"},{\"name\":\"tool_use\",\"template\":\"t\"}],"
      "\"added_tokens_decoder\":{\"5\":{\"content\":\"<u>\"},\"2\":{\"content\":\"<s>\"}}}");
  put("special_tokens_map.json", "{\"pad_token\":\"a\",\"unk_token\":\"b\"}");
  put("generation_config.json", "{\"eos_token_id\":[4,99,-1],\"temperature\":0.5}");
  mr_prompter *p = opened();
  const mr_vocab *v = mr_prompter_vocab(p);
  assert_int_equal(mr_prompter_context(p), 77);
  assert_int_equal(mr_prompter_vocab_size(p), 8);
  assert_string_equal(mr_prompter_name(p), "whole");
  assert_int_equal(mr_vocab_size(v), 6);
  assert_int_equal(mr_vocab_bos(v), 2);
  assert_int_equal(mr_vocab_eos(v), 3);
  assert_true(mr_vocab_adds_bos(v));
  assert_true(mr_vocab_is_end(v, 3) && mr_vocab_is_end(v, 4));
  assert_false(mr_vocab_is_end(v, 1)); /* generation_config.json comes before config.json */
  assert_string_equal(said(p, "ab<u>", true), "2 0 1 5 3");
  assert_string_equal(said(p, "ba", false), "2 1 0");
  assert_string_equal(said(p, "a<s>", false),
                      "the vocabulary has no token for the character \"<\": this text cannot be "
                      "encoded with this model");
  assert_null(json_object_get(mr_prompter_variables(p), "pad_token"));
  assert_string_equal(json_string_value(json_object_get(mr_prompter_variables(p), "unk_token")),
                      "b");
  assert_non_null(mr_prompter_template(p, true, NULL));
  assert_ptr_not_equal(mr_prompter_template(p, true, NULL), mr_prompter_template(p, false, NULL));
  mr_prompter_close(p);
}

static void a_template_of_its_own_file(void **state) {
  (void)state;
  start("jinja");
  put("config.json", "{\"max_position_embeddings\":5,\"eos_token_id\":[1]}");
  put("tokenizer.json", TOKENIZER);
  put("tokenizer_config.json", "{\"bos_token\":\"<s>\",\"add_bos_token\":false,"
                               "\"chat_template\":\"b\"}");
  put("chat_template.jinja", "a{{ messages[0].content }}");
  mr_prompter *p = opened();
  assert_string_equal(said(p, "b", true), "0 1");
  assert_string_equal(said(p, "b", false), "1");
  assert_true(mr_vocab_is_end(mr_prompter_vocab(p), 1));
  assert_int_equal(mr_vocab_eos(mr_prompter_vocab(p)), 1);
  assert_false(mr_vocab_is_end(mr_prompter_vocab(p), 4)); /* a name alone: only where none is said
                                                           */
  mr_prompter_close(p);
}

static void ends_known_by_name(void **state) {
  (void)state;
  start("named");
  put("config.json", "{}");
  put("tokenizer.json", TOKENIZER);
  mr_prompter *p = opened();
  assert_true(mr_vocab_is_end(mr_prompter_vocab(p), 4));
  assert_int_equal(mr_prompter_vocab_size(p), 5);
  assert_true(mr_prompter_context(p) > 0);
  mr_prompter_close(p);
}

static void without_a_tokenizer(void **state) {
  (void)state;
  start("ids");
  put("config.json", "{\"max_position_embeddings\":64,\"vocab_size\":320}");
  mr_prompter *p = opened();
  assert_null(mr_prompter_vocab(p));
  assert_int_equal(mr_prompter_vocab_size(p), 320);
  assert_non_null(strstr(said(p, "a", false), "no vocabulary"));
  mr_prompter_close(p);
}

static void refuse(const char *words) {
  mr_err e = MR_ERR_INIT;
  mr_prompter *p = NULL;
  char all[2048];
  assert_int_equal(mr_prompter_open(&p, dir, &e), MR_E_DATA);
  assert_null(p);
  if (!strstr(mr_err_format(&e, all, sizeof all), words))
    fail_msg("\"%s\" does not say \"%s\"", all, words);
}

static void broken_directories(void **state) {
  (void)state;
  start("broken");
  refuse("without config.json");
  put("config.json", "[]");
  refuse("config.json: is not a JSON object");
  put("config.json", "{");
  refuse("config.json");
  put("config.json", "{}");
  put("tokenizer.json", "{\"model\":{\"type\":\"Magic\"}}");
  refuse("tokenizer.json: model \"Magic\" is not supported");
  put("tokenizer.json", "{\"model\"");
  refuse("tokenizer.json");
  put("tokenizer.json", TOKENIZER);
  put("generation_config.json", "{\"eos_token_id\":}");
  refuse("generation_config.json");
}

static void memory_may_run_out(void **state) {
  (void)state;
  start("memory");
  put("config.json", "\xEF\xBB\xBF{\"vocab_size\":8}"); /* with a byte order mark */
  put("tokenizer.json", TOKENIZER);
  put("tokenizer_config.json", "{\"bos_token\":\"<s>\",\"eos_token\":\"</s>\",\"add_eos_token\":"
                               "true,\"chat_template\":\"{{ bos_token }}\",\"model_max_length\":"
                               "1000000000000000019884624838656}");
  int64_t live = mr_mem_live();
  bool more = true;
  for (int64_t n = 0; more; n++) {
    mr_err e = MR_ERR_INIT;
    mr_prompter *p = NULL;
    mr_mem_fail_after(n);
    mr_code c = mr_prompter_open(&p, dir, &e);
    more = starved(n);
    assert_true(c == MR_OK || c == MR_E_NOMEM);
    assert_true(!c == (p != NULL));
    mr_prompter_close(p);
    assert_int_equal(mr_mem_live(), live);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_whole_directory),  cmocka_unit_test(a_template_of_its_own_file),
      cmocka_unit_test(ends_known_by_name), cmocka_unit_test(without_a_tokenizer),
      cmocka_unit_test(broken_directories), cmocka_unit_test(memory_may_run_out),
  };
  return cmocka_run_group_tests(tests, temp_begin, temp_end);
}
