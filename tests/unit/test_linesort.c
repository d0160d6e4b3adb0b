#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "io/mem.h"
#include "jobs/linesort.h"
#include "temp.h"

enum { ROWS = 500 };

static void line_of(uint64_t row, char line[64], uint32_t *len) {
  *len = (uint32_t)snprintf(line, 64, "line %d%.*s\n", (int)row, (int)(row % 20),
                            "....................");
}

static mr_code take(void *ctx, uint64_t row, mr_line_kind kind, const char *line, size_t len,
                    mr_err *err) {
  uint64_t *next = ctx;
  char want[64];
  uint32_t n;
  (void)err;
  line_of(row, want, &n);
  assert_int_equal(row, (*next)++);
  assert_int_equal(kind, row % 3 == 0);
  assert_int_equal(len, n);
  assert_memory_equal(line, want, n);
  return MR_OK;
}

/* Rows in a scattered order; `twice` comes a second time, `never` does not come. */
static mr_code sort_rows(size_t bucket_bytes, int twice, int never, mr_err *e) {
  mr_linesort *s;
  char prefix[256], line[64];
  uint32_t len;
  uint64_t next = 0;
  snprintf(prefix, sizeof prefix, "%s", temp_path("bucket"));
  mr_code rc = mr_linesort_open(&s, prefix, ROWS, bucket_bytes, e);
  if (rc)
    return rc;
  for (uint64_t row = 0; row < ROWS; row++) {
    line_of(row, line, &len);
    mr_linesort_expect(s, row, len);
  }
  rc = mr_linesort_begin(s, e);
  for (uint64_t i = 0; !rc && i < ROWS + 1; i++) {
    uint64_t row = i * 211 % ROWS;
    if ((i == ROWS && twice < 0) || (int)row == never)
      continue;
    row = i == ROWS ? (uint64_t)twice : row;
    line_of(row, line, &len);
    rc = mr_linesort_add(s, row, row % 3 == 0 ? MR_LINE_ERROR : MR_LINE_RESULT, line, len, e);
  }
  if (!rc)
    rc = mr_linesort_emit(s, "name", take, &next, e);
  if (!rc)
    assert_int_equal(next, ROWS);
  mr_linesort_close(s);
  return rc;
}

static void rows_come_in_order(void **state) {
  (void)state;
  static const size_t buckets[] = {0, 1, 100, 1000, 10000};
  int64_t live = mr_mem_live();
  for (size_t i = 0; i < sizeof buckets / sizeof *buckets; i++) {
    mr_err e = MR_ERR_INIT;
    assert_int_equal(sort_rows(buckets[i], -1, -1, &e), MR_OK);
  }
  assert_int_equal(mr_mem_live(), live);
  assert_int_equal(rmdir(temp_dir), 0); /* no file is left */
  assert_int_equal(mr_durable_mkdir(temp_dir, &(mr_err)MR_ERR_INIT), MR_OK);
}

static void a_row_twice_or_never_is_found(void **state) {
  (void)state;
  for (size_t bucket = 0; bucket <= 1000; bucket += 1000) {
    mr_err e = MR_ERR_INIT;
    assert_int_equal(sort_rows(bucket, 77, -1, &e), MR_E_DATA);
    assert_non_null(strstr(e.text, "row 77 is there twice"));
    mr_err_clear(&e);
    assert_int_equal(sort_rows(bucket, -1, 78, &e), MR_E_DATA);
    assert_non_null(strstr(e.text, "row 78 is there not at all"));
    mr_err_clear(&e);
    assert_int_equal(sort_rows(bucket, -1, ROWS - 1, &e), MR_E_DATA);
    assert_non_null(strstr(e.text, "499 of 500 rows"));
  }
}

static void out_of_memory(void **state) {
  (void)state;
  int64_t live = mr_mem_live();
  int failed = 0;
  for (int n = 0;; n++, failed++) {
    mr_err e = MR_ERR_INIT;
    mr_mem_fail_after(n);
    mr_code rc = sort_rows(1000, -1, -1, &e);
    mr_mem_fail_after(-1);
    assert_int_equal(mr_mem_live(), live);
    if (rc == MR_OK)
      break;
    assert_int_equal(rc, MR_E_NOMEM);
  }
  assert_true(failed > 50);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(rows_come_in_order),
      cmocka_unit_test(a_row_twice_or_never_is_found),
      cmocka_unit_test(out_of_memory),
  };
  return cmocka_run_group_tests(tests, temp_begin, temp_end);
}
