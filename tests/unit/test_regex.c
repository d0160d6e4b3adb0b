#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "io/mem.h"
#include "io/text.h"
#include "src/regex.h"

/* The matches of a pattern, "[a][b]", or the error's words. */
static const char *found(const char *pattern, const char *text) {
  static char said[1200];
  mr_err e = MR_ERR_INIT;
  mr_regex *re;
  mr_regex_scratch scratch = {0};
  mr_match m = {0};
  int64_t live = mr_mem_live();
  size_t n = 0;
  said[0] = '\0';
  if (mr_regex_open(&re, pattern, strlen(pattern), &e)) {
    snprintf(said, sizeof said, "error: %s", e.text);
    return said;
  }
  while (mr_regex_next(re, &scratch, text, strlen(text), &m, &e) > 0)
    n += (size_t)snprintf(said + n, sizeof said - n, "[%.*s]", (int)(m.to - m.from), text + m.from);
  assert_int_equal(e.code, MR_OK);
  mr_regex_scratch_free(&scratch);
  mr_regex_close(re);
  assert_int_equal(mr_mem_live(), live);
  return said;
}

static void read_as_oniguruma_does(void **state) {
  (void)state;
  assert_string_equal(found("\\s", "a\xe1\xa0\x8e\xe2\x80\x80z"), "[\xe2\x80\x80]"); /* U+180E not
                                                                                      */
  assert_string_equal(found("[^\\S\n]+", "a \t\nb"), "[ \t]");
  assert_string_equal(found("\\w+", "a\xcc\x81_1\xc2\xb2 -b"), "[a\xcc\x81_1\xc2\xb2][b]");
  assert_string_equal(found("\\b", "ab c"), "[][][][]");
  assert_string_equal(found("[\\w-]+", "a-b c"), "[a-b][c]");
  assert_string_equal(found("\\h+", "fg09"), "[f][09]");
  assert_string_equal(found("\\u00e9", "e\xc3\xa9"), "[\xc3\xa9]");
  assert_string_equal(found("[^(\\s|[.,])]+", "a(b.c d)"), "[a][b][c][d]"); /* a class in a class */
  assert_string_equal(found("\\p{Letter}+", "ab1"), "[ab]");
  assert_string_equal(found("\\p{^L}", "a1"), "[1]");
  assert_string_equal(found("\\p{Han}+", "\xe6\xbc\xa2\xe3\x80\x81x"), "[\xe6\xbc\xa2]");
  assert_string_equal(found("^a$", "a\nb\na"), "[a][a]"); /* lines */
  assert_string_equal(found("a{,2}b", "aaab b"), "[aab][b]");
  assert_string_equal(found("a{b", "a{b"), "[a{b]");
  assert_string_equal(found("(?i:'S)", "x's"), "['s]");
  assert_string_equal(found("a*", "baac"), "[][aa][]"); /* no empty match behind a match */
}

static void what_it_cannot_say_is_refused(void **state) {
  static const char *const patterns[] = {
      "[a&&b]", "[a[^b]]", "[\\W]", "a{1,3}+", "(*FAIL)a", "(?m:a)",  "(?R)",   "\\X",
      "[a",     "a(",      "\\",    "\\pL",    "\\u00",    "\\u41}a", "(?C1)a", "\\p{Nonsense}"};
  (void)state;
  for (size_t i = 0; i < sizeof patterns / sizeof patterns[0]; i++)
    if (strncmp(found(patterns[i], "aaa"), "error: the pattern", 18))
      fail_msg("%s is not refused: %s", patterns[i], found(patterns[i], "aaa"));
}

static void sizes_and_steps_are_limited(void **state) {
  (void)state;
  mr_err e = MR_ERR_INIT;
  mr_regex *re = NULL;
  mr_text t = {0};
  for (size_t i = 0; i <= MR_REGEX_MAX; i++)
    mr_text_addc(&t, 'a');
  assert_int_equal(mr_regex_open(&re, t.data, t.len, &e), MR_E_DATA);
  assert_null(re);
  mr_err_clear(&e);
  assert_int_equal(mr_regex_open(&re, "(a|a|a)+$", 9, &e), MR_OK);
  mr_regex_scratch scratch = {0};
  mr_match m = {0};
  t.data[60] = 'b';
  assert_int_equal(mr_regex_next(re, &scratch, t.data, 61, &m, &e), -1); /* ends, and says so */
  assert_int_equal(e.code, MR_E_DATA);
  mr_regex_scratch_free(&scratch);
  mr_regex_close(re);
  mr_text_free(&t);
}

static void memory_may_run_out(void **state) {
  (void)state;
  int64_t live = mr_mem_live();
  mr_code c = MR_E_NOMEM;
  for (int64_t n = 0; c; n++) {
    mr_err e = MR_ERR_INIT;
    mr_regex *re = NULL;
    mr_mem_fail_after(n);
    c = mr_regex_open(&re, "\\w+|[^\\s]+", 10, &e);
    mr_mem_fail_after(-1);
    assert_true(c == MR_OK || c == MR_E_NOMEM);
    mr_regex_close(re);
    assert_int_equal(mr_mem_live(), live);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(read_as_oniguruma_does),
      cmocka_unit_test(what_it_cannot_say_is_refused),
      cmocka_unit_test(sizes_and_steps_are_limited),
      cmocka_unit_test(memory_may_run_out),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
