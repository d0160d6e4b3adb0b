#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "io/mem.h"
#include "jobs/dualscan.h"
#include "starve.h"
#include "temp.h"

/* Rows that are all output (10 tokens, 8 octaves up) and all prompt (100). */
#define OUTPUT(at, part) ((mr_scan_row){at, at, part, 8, 0, 10})
#define PROMPT(at, part) ((mr_scan_row){at, at, part, 0, 100, 0})

static mr_dual_scan *scan_of(const mr_scan_row *rows, int n, size_t memory) {
  mr_err e = MR_ERR_INIT;
  mr_dual_scan *d = NULL;
  assert_int_equal(mr_dual_scan_open(&d, temp_dir, memory, &e), MR_OK);
  for (int i = 0; i < n; i++) /* in any order */
    assert_int_equal(mr_dual_scan_add(d, &rows[i * 7 % n], &e), MR_OK);
  assert_int_equal(mr_dual_scan_sort(d, &e), MR_OK);
  assert_int_equal(mr_dual_scan_count(d), n);
  return d;
}

static void comes(mr_dual_scan *d, const int *want, int n) {
  mr_err e = MR_ERR_INIT;
  uint64_t row;
  bool more;
  for (int i = 0; i < n; i++) {
    assert_int_equal(mr_dual_scan_next(d, &row, &more, &e), MR_OK);
    assert_true(more);
    assert_int_equal(row, want[i]);
  }
}

static void order_is(const mr_scan_row *rows, const int *want, int n) {
  mr_err e = MR_ERR_INIT;
  uint64_t row;
  bool more;
  for (size_t memory = 0; memory <= 60; memory += 60) { /* in memory, and through files */
    mr_dual_scan *d = scan_of(rows, n, memory);
    comes(d, want, n / 2);
    assert_int_equal(mr_dual_scan_rewind(d, &e), MR_OK);
    comes(d, want, n);
    for (int i = 0; i < 2; i++) {
      assert_int_equal(mr_dual_scan_next(d, &row, &more, &e), MR_OK);
      assert_false(more);
    }
    mr_dual_scan_close(d);
  }
}

static void octaves(void **state) {
  (void)state;
  const struct {
    int64_t n;
    uint32_t octave;
  } cases[] = {{-1, 0}, {0, 0}, {1, 0}, {2, 1}, {3, 1}, {4, 2}, {511, 8}, {512, 9}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    assert_int_equal(mr_scan_octave(cases[i].n), cases[i].octave);
}

/* Output leads by a quarter: with four rows of each kind, two of it come before the first prompt.
 */
static void two_scans_take_turns(void **state) {
  (void)state;
  const mr_scan_row rows[] = {OUTPUT(0, 0), OUTPUT(1, 0), OUTPUT(2, 0), OUTPUT(3, 0),
                              PROMPT(4, 0), PROMPT(5, 0), PROMPT(6, 0), PROMPT(7, 0)};
  const int want[] = {0, 1, 7, 2, 6, 3, 4, 5};
  order_is(rows, want, 8);
  mr_dual_scan *d = scan_of(rows, 8, 0);
  assert_true(mr_dual_scan_blends(d));
  mr_dual_scan_close(d);
}

/* Each part by itself; one of a single kind in its order. */
static void parts_come_one_after_the_other(void **state) {
  (void)state;
  const mr_scan_row rows[] = {OUTPUT(0, 0), OUTPUT(1, 0), PROMPT(2, 0), PROMPT(3, 0), PROMPT(4, 4),
                              PROMPT(5, 4), PROMPT(6, 4), OUTPUT(7, 7), OUTPUT(8, 7), PROMPT(9, 7)};
  const int want[] = {0, 3, 1, 2, 4, 5, 6, 7, 9, 8};
  order_is(rows, want, 10);
}

/* Without kinds far enough apart there is one scan; so it is without rows. */
static void one_scan_where_kinds_are_near(void **state) {
  (void)state;
  mr_scan_row rows[] = {{0, 3, 0, 5, 10, 40}, {1, 2, 0, 4, 10, 20}, {2, 1, 0, 4, 900, 20}};
  const int want[] = {3, 2, 1};
  order_is(rows, want, 3);
  const mr_scan_row apart[] = {OUTPUT(0, 0), OUTPUT(1, 0), PROMPT(2, 2)}; /* by parts alone */
  for (int i = 0; i < 3; i++) {
    mr_dual_scan *d = scan_of(i == 1 ? apart : rows, i < 2 ? 3 : 0, 0);
    assert_false(mr_dual_scan_blends(d));
    mr_dual_scan_close(d);
  }
}

/* Any allocation that fails is told, and nothing is left. */
static void memory_may_run_out(void **state) {
  (void)state;
  const mr_scan_row rows[] = {OUTPUT(0, 0), OUTPUT(1, 0), PROMPT(2, 2), PROMPT(3, 2)};
  int64_t live = mr_mem_live();
  bool more = true;
  for (int64_t n = 0; more; n++) {
    mr_err e = MR_ERR_INIT;
    mr_dual_scan *d = NULL;
    mr_mem_fail_after(n);
    mr_code rc = mr_dual_scan_open(&d, temp_dir, 60, &e);
    for (int i = 0; i < 4 && !rc; i++)
      rc = mr_dual_scan_add(d, &rows[i], &e);
    if (!rc)
      rc = mr_dual_scan_sort(d, &e);
    more = starved(n);
    assert_true(rc ? rc == MR_E_NOMEM && e.text[0] : n > 5);
    if (d)
      mr_dual_scan_close(d);
    assert_int_equal(mr_mem_live(), live);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(octaves),
      cmocka_unit_test(two_scans_take_turns),
      cmocka_unit_test(parts_come_one_after_the_other),
      cmocka_unit_test(one_scan_where_kinds_are_near),
      cmocka_unit_test(memory_may_run_out),
  };
  return cmocka_run_group_tests(tests, temp_begin, temp_end);
}
