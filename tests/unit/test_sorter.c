#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "io/mem.h"
#include "io/sorter.h"
#include "io/sys.h"
#include "temp.h"

typedef struct item {
  uint32_t key, number;
} item;

static int by_key(const void *a, const void *b) {
  const item *x = a, *y = b;
  if (x->key != y->key)
    return x->key < y->key ? -1 : 1;
  return (x->number > y->number) - (x->number < y->number);
}

static uint32_t random_at(uint32_t i) {
  return i * 2654435761u >> 7;
}

static void expect_sorted(mr_sorter *s, uint32_t n) {
  mr_err e = MR_ERR_INIT;
  uint64_t sum = 0, want = 0;
  item last = {0, 0}, now = {0, 0};
  bool more;
  for (uint32_t i = 0; i < n; i++) {
    assert_int_equal(mr_sorter_next(s, &now, &more, &e), MR_OK);
    assert_true(more);
    assert_true(i == 0 || by_key(&last, &now) < 0);
    assert_int_equal(now.key, random_at(now.number) % 97);
    sum += now.number;
    want += i;
    last = now;
  }
  assert_int_equal(sum, want);
  assert_int_equal(mr_sorter_next(s, &now, &more, &e), MR_OK);
  assert_false(more);
}

static mr_sorter *filled(uint32_t n, size_t memory) {
  mr_err e = MR_ERR_INIT;
  mr_sorter *s = NULL;
  assert_int_equal(mr_sorter_open(&s, temp_dir, sizeof(item), by_key, memory, &e), MR_OK);
  for (uint32_t i = 0; i < n; i++)
    assert_int_equal(mr_sorter_add(s, &(item){random_at(i) % 97, i}, &e), MR_OK);
  assert_int_equal(mr_sorter_count(s), n);
  assert_int_equal(mr_sorter_sort(s, &e), MR_OK);
  return s;
}

static void all_sizes_in_memory_and_through_files(void **state) {
  (void)state;
  static const uint32_t counts[] = {0, 1, 2, 7, 8, 9, 64, 65, 1000, 5000};
  static const size_t memories[] = {0, 1, 64, 512, 4096};
  int64_t live = mr_mem_live();
  for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
    for (size_t k = 0; k < sizeof memories / sizeof *memories; k++) {
      mr_err e = MR_ERR_INIT;
      mr_sorter *s = filled(counts[i], memories[k]);
      expect_sorted(s, counts[i]);
      assert_int_equal(mr_sorter_rewind(s, &e), MR_OK);
      expect_sorted(s, counts[i]);
      mr_sorter_close(s);
    }
  assert_int_equal(mr_mem_live(), live);
}

/* Its memory is what it was given, whatever the number of records. */
static void memory_does_not_grow(void **state) {
  (void)state;
  mr_mem_fail_above(40000);
  mr_sorter *s = filled(200000, 32768);
  expect_sorted(s, 200000);
  mr_sorter_close(s);
  mr_mem_fail_above(0);
}

static void nothing_is_left_in_the_folder(void **state) {
  (void)state;
  mr_sorter *s = filled(1000, 64);
  char command[160];
  mr_err e = MR_ERR_INIT;
  assert_int_equal(rmdir(temp_dir), 0);
  mr_sorter_close(s);
  snprintf(command, sizeof command, "%s", temp_dir);
  assert_int_equal(mr_durable_mkdir(command, &e), MR_OK);
}

/* ---- faults */

static int64_t left; /* calls until one fails */

static ssize_t f_write(int fd, const void *b, size_t n) {
  errno = ENOSPC;
  return left-- == 0 ? -1 : mr_sys_os.write(fd, b, n);
}

static ssize_t f_pread(int fd, void *b, size_t n, off_t at) {
  errno = EIO;
  return left-- == 0 ? -1 : mr_sys_os.pread(fd, b, n, at);
}

static int f_open(const char *path, int flags, mode_t mode) {
  errno = EACCES;
  return left-- == 0 ? -1 : mr_sys_os.open(path, flags, mode);
}

static mr_code sort_some(mr_err *err) {
  mr_sorter *s;
  item now;
  bool more = true;
  mr_code rc = mr_sorter_open(&s, temp_dir, sizeof(item), by_key, 256, err);
  if (rc)
    return rc;
  for (uint32_t i = 0; !rc && i < 500; i++)
    rc = mr_sorter_add(s, &(item){random_at(i) % 97, i}, err);
  if (!rc)
    rc = mr_sorter_sort(s, err);
  while (!rc && more)
    rc = mr_sorter_next(s, &now, &more, err);
  mr_sorter_close(s);
  return rc;
}

static void each_call_and_each_allocation_fails(void **state) {
  (void)state;
  int64_t live = mr_mem_live();
  for (int kind = 0; kind < 4; kind++) {
    int failures = 0;
    for (int64_t n = 0;; n++, failures++) {
      mr_err e = MR_ERR_INIT;
      mr_sys table = mr_sys_os;
      left = n;
      if (kind == 0)
        table.write = f_write;
      if (kind == 1)
        table.pread = f_pread;
      if (kind == 2)
        table.open = f_open;
      if (kind == 3)
        mr_mem_fail_after(n);
      mr_sys_now = &table;
      mr_code rc = sort_some(&e);
      mr_sys_now = &mr_sys_os;
      mr_mem_fail_after(-1);
      assert_int_equal(mr_mem_live(), live);
      if (rc == MR_OK)
        break;
      assert_int_equal(rc, kind == 3 ? MR_E_NOMEM : kind == 2 ? MR_E_CANTCREATE : MR_E_IO);
      assert_true(e.text[0]);
    }
    assert_true(failures > 0);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(all_sizes_in_memory_and_through_files),
      cmocka_unit_test(memory_does_not_grow),
      cmocka_unit_test(nothing_is_left_in_the_folder),
      cmocka_unit_test(each_call_and_each_allocation_fails),
  };
  return cmocka_run_group_tests(tests, temp_begin, temp_end);
}
