#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include <math.h>

#include "io/json.h"

static const char *refused(const char *s) {
  static mr_err e;
  mr_err_clear(&e);
  json_t *v = mr_json_parse(s, strlen(s), NULL, &e);
  if (v) {
    json_decref(v);
    return NULL;
  }
  assert_int_equal(e.code, MR_E_DATA);
  return e.text;
}

static void strict_parsing(void **state) {
  (void)state;
  static const char *const bad[] = {"",
                                    "{",
                                    "[1,]",
                                    "{\"a\":1,}",
                                    "nul",
                                    "NaN",
                                    "[Infinity]",
                                    "01",
                                    "1.",
                                    "+1",
                                    "\"a\tb\"",
                                    "\"\\x\"",
                                    "\"\\u12\"",
                                    "\"\\ud83d\"",
                                    "\"\\ude00\"",
                                    "1 2",
                                    "{\"a\":1,\"a\":2}",
                                    "1e999",
                                    "99999999999999999999",
                                    "\"a\xff\"",
                                    "\"\xed\xa0\x80\"",
                                    "'a'",
                                    "// x\n1"};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
    if (!refused(bad[i]))
      fail_msg("accepted: %s", bad[i]);
  static const char *const good[] = {"null",
                                     "-0.5e-3",
                                     "{}",
                                     " [1, 2.5, \"\\u0000\", true] ",
                                     "\"\\ud83d\\ude00\"",
                                     "9223372036854775807",
                                     "-9223372036854775808"};
  for (size_t i = 0; i < sizeof good / sizeof *good; i++)
    if (refused(good[i]))
      fail_msg("refused: %s", good[i]);
  assert_non_null(strstr(refused("\"a\xff\""), "invalid UTF-8 at byte 3"));
}

static void raw_nul_is_refused(void **state) {
  (void)state;
  mr_err e = MR_ERR_INIT;
  assert_null(mr_json_parse("\"a\0b\"", 5, NULL, &e));
  assert_int_equal(e.code, MR_E_DATA);
}

static void numbers_that_do_not_fit_are_told_apart(void **state) {
  (void)state;
  bool big;
  mr_err e = MR_ERR_INIT;
  assert_null(mr_json_parse("[99999999999999999999]", 22, &big, &e));
  assert_true(big);
  mr_err_clear(&e);
  assert_null(mr_json_parse("[9", 2, &big, &e));
  assert_false(big);
  json_t *v = mr_json_parse_lossy("[99999999999999999999]", 22);
  assert_true(json_real_value(json_array_get(v, 0)) > 9e19);
  json_decref(v);
}

static void deep_nesting_is_refused_and_some_is_not(void **state) {
  (void)state;
  enum { N = 100000 };
  static char s[2 * N + 1];
  memset(s, '[', N);
  memset(s + N, ']', N);
  assert_non_null(strstr(refused(s), "deeper than 512"));
  memset(s + N - 500, '[', 500);
  s[N + 500] = '\0';
  assert_null(refused(s + N - 500));
}

static const char *written(const json_t *v) {
  static mr_text t;
  mr_text_clear(&t);
  mr_json_add(&t, v);
  return t.data;
}

static void values_come_back_as_they_were(void **state) {
  (void)state;
  static const char *const same[] = {"null",
                                     "[true,false,-7,2.5,\"a\\\"\\\\b\"]",
                                     "{\"z\":1,\"a\":{\"b\":[]}}",
                                     "0.1",
                                     "1.0",
                                     "1e+300",
                                     "-2.5e-10",
                                     "9223372036854775807",
                                     "\"\\u0000\\n\\u001f\"",
                                     "\"h\xc3\xa9\xf0\x9f\x98\x80\"",
                                     "{\"\":{}}"};
  for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
    mr_err e = MR_ERR_INIT;
    json_t *v = mr_json_parse(same[i], strlen(same[i]), NULL, &e);
    assert_non_null(v);
    assert_string_equal(written(v), same[i]);
    json_decref(v);
  }
}

static void strings_are_valid_whatever_the_bytes(void **state) {
  (void)state;
  mr_text t = {0};
  char all[256];
  for (int i = 0; i < 256; i++)
    all[i] = (char)i;
  mr_json_add_string(&t, all, sizeof all);
  mr_err e = MR_ERR_INIT;
  json_t *v = mr_json_parse(t.data, t.len, NULL, &e);
  assert_non_null(v);
  assert_non_null(strstr(t.data, "\xEF\xBF\xBD"));
  json_decref(v);
  mr_text_free(&t);
}

static void numbers_that_are_none_are_null(void **state) {
  (void)state;
  mr_text t = {0};
  mr_json_add_real(&t, NAN);
  mr_json_add_float(&t, -INFINITY);
  mr_json_add_float(&t, -1.1f);
  mr_json_add_real(&t, -3);
  assert_string_equal(t.data, "nullnull-1.1-3.0");
  mr_text_free(&t);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(strict_parsing),
      cmocka_unit_test(raw_nul_is_refused),
      cmocka_unit_test(numbers_that_do_not_fit_are_told_apart),
      cmocka_unit_test(deep_nesting_is_refused_and_some_is_not),
      cmocka_unit_test(values_come_back_as_they_were),
      cmocka_unit_test(strings_are_valid_whatever_the_bytes),
      cmocka_unit_test(numbers_that_are_none_are_null),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
