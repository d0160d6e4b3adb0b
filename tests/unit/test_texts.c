#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "io/mem.h"
#include "jobs/texts.h"
#include "tests/unit/temp.h"
#include "tests/unit/tiny_gguf.h"

static mr_prompter *p;

static int begin(void **state) {
  mr_err err = MR_ERR_INIT;
  if (temp_begin(state))
    return -1;
  tiny_gguf_write(temp_path("m.gguf"), -1);
  return (int)mr_prompter_open(&p, temp_path("m.gguf"), &err);
}

static int end(void **state) {
  mr_prompter_close(p);
  return temp_end(state);
}

/* Ids 0..255 are the bytes. */
static void assert_text(const mr_tokens *t, const char *text) {
  assert_int_equal(t->n, strlen(text));
  for (int i = 0; i < t->n; i++)
    assert_int_equal(t->ids[i], (uint8_t)text[i]);
}

static void kinds_of_rows(void **state) {
  mr_texts t;
  mr_err err = MR_ERR_INIT;
  (void)state;
  temp_text("rows", "{\"text\": \"abc\", \"answer\": \"de\"}\n"
                    "{\"prompt\": \"fg\", \"output\": [\"hi\", \"no\"]}\n\n"
                    "{\"prompt\": [1, 2, 3]}\n"
                    "{\"messages\": [{\"role\": \"user\", \"content\": \"q\"}]}\n"
                    "{\"custom_id\": \"x\", \"body\": {\"prompt\": \"body\"}}\n"
                    "{\"prompt\": \"k\"}\n");
  assert_int_equal(mr_texts_read(&t, p, temp_path("rows"), 100, 1000, &err), MR_OK);
  assert_int_equal(t.n, 5); /* one token alone says nothing */
  assert_int_equal(t.n_used, 4);
  assert_text(&t.rows[0], "abcde");
  assert_text(&t.rows[1], "fghi");
  assert_int_equal(t.rows[2].ids[2], 3);
  assert_text(&t.rows[3], "body");
  assert_text(&t.rows[4], "user:q\n"); /* held back: the fourth */
  mr_texts_free(&t);
}

static void windows_and_limits(void **state) {
  mr_texts t;
  mr_err err = MR_ERR_INIT;
  (void)state;
  temp_text("rows", "{\"text\": \"0123456789\"}\n{\"text\": \"abcdefghij\"}\n");
  assert_int_equal(mr_texts_read(&t, p, temp_path("rows"), 4, 17, &err), MR_OK);
  assert_int_equal(t.tokens, 17);
  assert_int_equal(t.n, 5);
  assert_text(&t.rows[0], "0123");
  assert_text(&t.rows[2], "89");
  assert_text(&t.rows[3], "efg");
  assert_text(&t.rows[4], "abcd");
  mr_texts_free(&t);
  temp_text("rows", "{\"text\": \"0123456789\"}\n");
  assert_int_equal(mr_texts_read(&t, p, temp_path("rows"), 100, 1000, &err), MR_OK);
  assert_true(t.n == 1 && t.n_used == 1); /* the only one serves both */
  mr_texts_free(&t);
}

static void bad_rows(void **state) {
  static const char *const rows[] = {
      "{\"text\": \"ab\"}\n{\"q\": 1}\n", "{\"text\": \"ab\"}\n{\"prompt\": [1, -1]}\n",
      "{\"text\": \"ab\"}\n{\"prompt\": [1, 300]}\n", "{\"text\": \"ab\"}\n{oops\n"};
  mr_texts t;
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    mr_err err = MR_ERR_INIT;
    temp_text("rows", rows[i]);
    assert_int_equal(mr_texts_read(&t, p, temp_path("rows"), 10, 100, &err), MR_E_DATA);
    assert_int_equal(err.line, 2);
    mr_texts_free(&t);
  }
  mr_err err = MR_ERR_INIT;
  assert_int_equal(mr_texts_read(&t, p, temp_path("none"), 10, 100, &err), MR_E_NOINPUT);
  mr_texts_free(&t);
  mr_err_clear(&err);
  temp_text("rows", "\n");
  assert_int_equal(mr_texts_read(&t, p, temp_path("rows"), 10, 100, &err), MR_E_DATA);
  mr_texts_free(&t);
}

static void allocations_fail(void **state) {
  mr_code rc = MR_E_NOMEM;
  (void)state;
  temp_text("rows", "{\"text\": \"0123456789\"}\n{\"prompt\": [1, 2, 3]}\n");
  for (int n = 0; rc; n++) {
    mr_texts t;
    mr_err err = MR_ERR_INIT;
    int64_t live = mr_mem_live();
    mr_mem_fail_after(n);
    rc = mr_texts_read(&t, p, temp_path("rows"), 4, 100, &err);
    mr_mem_fail_after(-1);
    mr_texts_free(&t);
    assert_int_equal(mr_mem_live(), live);
    assert_true(rc == MR_OK || rc == MR_E_NOMEM);
    assert_true(n < 1000);
  }
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, begin, end)

int main(void) {
  const struct CMUnitTest tests[] = {TEST(kinds_of_rows), TEST(windows_and_limits), TEST(bad_rows),
                                     TEST(allocations_fail)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
