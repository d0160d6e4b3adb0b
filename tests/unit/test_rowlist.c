#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "jobs/rowlist.h"

static void text_of(const uint64_t *rows, size_t n, const char *want) {
  mr_rowlist l = {.end = 0};
  for (size_t i = 0; i < n; i++)
    mr_rowlist_add(&l, rows[i]);
  mr_rowlist_end(&l);
  assert_false(l.text.failed);
  assert_string_equal(l.text.data, want);
  mr_rowlist_at at = {.s = l.text.data};
  uint64_t row;
  for (size_t i = 0; i < n; i++) {
    assert_int_equal(mr_rowlist_next(&at, rows[n - 1] + 1, &row), 1);
    assert_int_equal(row, rows[i]);
  }
  assert_int_equal(mr_rowlist_next(&at, 1000, &row), 0);
  if (n) { /* the last row is not below `rows` */
    at = (mr_rowlist_at){.s = l.text.data};
    size_t good = 0;
    int got;
    while ((got = mr_rowlist_next(&at, rows[n - 1], &row)) == 1)
      good++;
    assert_int_equal(got, -1);
    assert_true(good < n);
  }
  mr_text_free(&l.text);
}

static void texts(void **state) {
  (void)state;
  text_of(NULL, 0, "");
  text_of((uint64_t[]){0}, 1, "0 1");
  text_of((uint64_t[]){3, 4, 9}, 3, "3 2 4 1");
  text_of((uint64_t[]){0, 1, 2, 5, 7, 8}, 6, "0 3 2 1 1 2");
  text_of((uint64_t[]){1000000000000}, 1, "1000000000000 1");
}

static void damaged(void **state) {
  (void)state;
  static const char *const texts[] = {
      "x",     "1",    "1 ",   " 1 1",  "1 x",
      "1 1 1", "1  1", "-1 1", "1 0",   "11 1",
      "0 11",  "5 6",  "1 1,", "1 1\n", "99999999999999999999999 1"};
  for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
    mr_rowlist_at at = {.s = texts[i]};
    uint64_t row;
    int got;
    while ((got = mr_rowlist_next(&at, 10, &row)) == 1)
      assert_true(row < 10);
    assert_int_equal(got, -1);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(texts), cmocka_unit_test(damaged)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
