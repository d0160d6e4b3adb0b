/* The digest of a model: all that its results depend on. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "io/weights.h"
#include "tests/unit/tiny_hf.h"

static out_file file;

static const char *digest(const char *dir) {
  static char hex[33];
  mr_err err = MR_ERR_INIT;
  mr_weights *w;
  assert_int_equal(mr_weights_open(&w, dir, &err), MR_OK);
  assert_int_equal(mr_weights_digest(w, hex, &err), MR_OK);
  mr_weights_close(w);
  return hex;
}

/* A job must not go on with another tokenizer or template than it was begun with. */
static void every_file_of_a_directory_counts(void **state) {
  static const char *const names[] = {"config.json",
                                      "tokenizer.json",
                                      "tokenizer_config.json",
                                      "special_tokens_map.json",
                                      "generation_config.json",
                                      "chat_template.jinja",
                                      "additional_chat_templates/tool_use.jinja"};
  static const part layer[] = {{"input_layernorm", TINY_HF_WIDE, 0}};
  char before[33], rest[100];
  (void)state;
  const char *dir = write_model(&file, layer, 1, "\"model_type\":\"llama\"");
  mkdir(temp_path("model/additional_chat_templates"), 0700);
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    for (int k = 0; k < 2; k++) { /* that it is there, what is in it */
      memcpy(before, digest(dir), sizeof before);
      snprintf(rest, sizeof rest, "model/%s", names[i]);
      temp_text(rest, k ? "{}" : "{ }");
      if (!strcmp(before, digest(dir)))
        fail_msg("%s does not count", names[i]);
      assert_string_equal(digest(dir), digest(dir));
    }
  clear(&file);
}

static void files_that_cannot_be_read(void **state) {
  static const part layer[] = {{"input_layernorm", TINY_HF_WIDE, 0}};
  mr_err err = MR_ERR_INIT;
  mr_weights *w;
  char hex[33];
  (void)state;
  const char *dir = write_model(&file, layer, 1, "\"model_type\":\"llama\"");
  assert_int_equal(symlink("tokenizer.json", temp_path("model/tokenizer.json")), 0); /* of itself */
  assert_int_equal(mr_weights_open(&w, dir, &err), MR_OK);
  assert_int_equal(mr_weights_digest(w, hex, &err), MR_E_IO);
  assert_non_null(strstr(err.file, "tokenizer.json"));
  mr_weights_close(w);
  clear(&file);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, temp_begin, temp_end)

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(every_file_of_a_directory_counts),
      TEST(files_that_cannot_be_read),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
