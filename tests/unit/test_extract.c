#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include "io/mem.h"
#include "jobs/extract.h"

static mr_extracted find(const char *pattern, bool last, const char *text, char *part, size_t cap) {
  mr_extract *x;
  mr_err e = MR_ERR_INIT;
  size_t from = 0, to = 0;
  assert_int_equal(mr_extract_open(&x, pattern, strlen(pattern), last, &e), MR_OK);
  mr_extracted got = mr_extract_find(x, text, strlen(text), &from, &to);
  if (got == MR_EXTRACT_FOUND) {
    assert_true(from <= to && to <= strlen(text) && to - from < cap);
    memcpy(part, text + from, to - from);
    part[to - from] = '\0';
  }
  mr_extract_close(x);
  return got;
}

static void finds(const char *pattern, bool last, const char *text, const char *want) {
  char part[64] = "";
  assert_int_equal(find(pattern, last, text, part, sizeof part), MR_EXTRACT_FOUND);
  assert_string_equal(part, want);
}

static void parts(void **state) {
  (void)state;
  char part[64];
  finds("#### (-?[0-9.,]+)", false, "blah\n#### 42", "42");
  finds("answer is \\(?([A-D])", false, "The answer is (B), the answer is C", "B");
  finds("answer is \\(?([A-D])", true, "The answer is (B), the answer is C", "C");
  finds("[0-9]+", false, "a 1 b 22", "1");
  finds("[0-9]+", true, "a 1 b 22", "22");
  finds("(x)|(y)", false, "y", "y"); /* the group that took part */
  finds("x*", true, "", "");
  finds("x*", true, "axxb", ""); /* the last match is the empty one at the end */
  finds("(?s)^.*?(\\{.*\\})", false, "so:\n{\"a\":\n1}", "{\"a\":\n1}");
  finds("\\w+", false, "é!", "é");
  finds("(?=(aa))a", true, "aaa", "aa");
  assert_int_equal(find("[0-9]+", true, "none", part, sizeof part), MR_EXTRACT_NONE);
}

/* A pattern that takes exponential time ends, and says so. */
static void limits(void **state) {
  (void)state;
  char part[64], text[64];
  memset(text, 'a', 40);
  snprintf(text + 40, sizeof text - 40, "!");
  assert_int_equal(find("^(a+)+$", false, text, part, sizeof part), MR_EXTRACT_LIMIT);
}

static void refused(const char *pattern, size_t len) {
  mr_extract *x;
  mr_err e = MR_ERR_INIT;
  assert_int_equal(mr_extract_open(&x, pattern, len, false, &e), MR_E_USAGE);
  assert_null(x);
  assert_true(e.text[0]);
}

static void bad_patterns(void **state) {
  (void)state;
  refused("(", 1);
  refused("a\\Cb", 4); /* half of a character */
  refused("\xFF", 1);
  static char big[70000];
  memset(big, 'a', sizeof big);
  refused(big, sizeof big);
}

static void memory(void **state) {
  (void)state;
  int64_t live = mr_mem_live();
  mr_code rc = MR_E_NOMEM;
  int failures = 0;
  for (int n = 0; n < 100 && rc; n++) {
    mr_extract *x;
    mr_err e = MR_ERR_INIT;
    mr_mem_fail_after(n);
    rc = mr_extract_open(&x, "a(b)", 4, false, &e);
    mr_mem_fail_after(-1);
    assert_true(rc == MR_OK || rc == MR_E_NOMEM);
    failures += rc != MR_OK;
    mr_extract_close(x);
    assert_int_equal(mr_mem_live(), live);
  }
  assert_int_equal(rc, MR_OK);
  assert_true(failures > 2);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(parts), cmocka_unit_test(limits),
                                     cmocka_unit_test(bad_patterns), cmocka_unit_test(memory)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
