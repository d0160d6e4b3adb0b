/* Slots on disk: what is put comes back, whatever the order; full disks, errors and flipped bits
 * lose a slot and nothing else. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "io/mem.h"
#include "io/spill.h"
#include "io/sys.h"
#include "tests/unit/temp.h"

#define SLOT 5000 /* no multiple of a sector */

static uint8_t block[SLOT], back[SLOT];

static const uint8_t *filled(int with) {
  for (size_t i = 0; i < SLOT; i++)
    block[i] = (uint8_t)(with * 31 + (int)i * 7 + (int)(i >> 8));
  return block;
}

static mr_spill *opened(uint64_t bytes) {
  mr_spill *s;
  mr_err err = MR_ERR_INIT;
  if (mr_spill_open(&s, temp_dir, SLOT, bytes, &err))
    fail_msg("%s: %s", err.file, err.text);
  return s;
}

static mr_spill_status fetched(mr_spill *s, int slot) {
  memset(back, 0, sizeof back);
  mr_spill_get(s, slot, back);
  while (mr_spill_state(s, slot) == MR_SPILL_READING)
    mr_spill_wait(s);
  return mr_spill_state(s, slot);
}

static void comes_back(void **state) {
  (void)state;
  enum { N = 40 };
  mr_spill *s = opened(N * 8192);
  int slots[N];
  assert_int_equal(mr_spill_room(s), N);
  for (int i = 0; i < N; i++)
    assert_true((slots[i] = mr_spill_put(s, filled(i))) >= 0);
  assert_int_equal(mr_spill_put(s, block), -1); /* full */
  for (int i = N - 1; i >= 0; i -= 2) {
    assert_int_equal(fetched(s, slots[i]), MR_SPILL_READY);
    assert_memory_equal(back, filled(i), SLOT);
    mr_spill_drop(s, slots[i]);
  }
  assert_int_equal(mr_spill_room(s), N / 2);
  for (int i = N - 1; i >= 0; i -= 2) /* the places are taken again */
    assert_true((slots[i] = mr_spill_put(s, filled(100 + i))) >= 0);
  for (int i = 0; i < N; i++) {
    assert_int_equal(fetched(s, slots[i]), MR_SPILL_READY);
    assert_memory_equal(back, filled(i % 2 ? 100 + i : i), SLOT);
  }
  mr_spill_stats st;
  mr_spill_stats_get(s, &st);
  assert_int_equal(st.written_bytes, (N + N / 2) * SLOT);
  assert_int_equal(st.read_bytes, (N + N / 2) * SLOT);
  assert_int_equal(st.failures, 0);
  mr_spill_close(s);
}

/* A block that is there is brought again, to another place too. */
static void comes_back_twice(void **state) {
  (void)state;
  static uint8_t other[SLOT];
  mr_spill *s = opened(8 * 8192);
  int slot = mr_spill_put(s, filled(3));
  assert_int_equal(fetched(s, slot), MR_SPILL_READY);
  mr_spill_get(s, slot, other);
  while (mr_spill_state(s, slot) == MR_SPILL_READING)
    mr_spill_wait(s);
  assert_int_equal(mr_spill_state(s, slot), MR_SPILL_READY);
  assert_memory_equal(other, filled(3), SLOT);
  mr_spill_close(s);
}

/* Dropped while it waits to be written: the place is free when that is over. */
static void dropped_early(void **state) {
  (void)state;
  mr_spill *s = opened(8 * 8192);
  for (int round = 0; round < 50; round++) {
    int slot = mr_spill_put(s, filled(round));
    assert_true(slot >= 0);
    mr_spill_drop(s, slot);
    while (mr_spill_room(s) < 4)
      mr_spill_wait(s);
  }
  for (int i = 0; i < 4; i++)
    mr_spill_put(s, filled(i));
  mr_spill_close(s); /* with writes waiting */
}

static void leaves_nothing(void **state) {
  (void)state;
  mr_spill *s = opened(8 * 8192), *t = opened(8 * 8192);
  assert_int_equal(rmdir(temp_dir), 0); /* it is empty though both are open */
  assert_int_equal(mkdir(temp_dir, 0700), 0);
  mr_spill_close(s);
  mr_spill_close(t);
}

static mr_sys fake;
static int writes_left, reads_left;

static ssize_t failing_pwrite(int fd, const void *buf, size_t n, off_t at) {
  if (writes_left-- <= 0) {
    errno = ENOSPC;
    return -1;
  }
  return mr_sys_os.pwrite(fd, buf, n, at);
}

static ssize_t failing_pread(int fd, void *buf, size_t n, off_t at) {
  if (reads_left-- <= 0) {
    errno = EIO;
    return -1;
  }
  return mr_sys_os.pread(fd, buf, n, at);
}

static ssize_t flipping_pread(int fd, void *buf, size_t n, off_t at) {
  ssize_t got = mr_sys_os.pread(fd, buf, n, at);
  ((uint8_t *)buf)[SLOT - 1] ^= 4;
  return got;
}

static void disk_full(void **state) {
  (void)state;
  enum { N = 12 };
  int slots[N], bad = 0, good = 0, none = 0;
  fake = mr_sys_os;
  fake.pwrite = failing_pwrite;
  writes_left = 3;
  mr_sys_now = &fake;
  mr_spill *s = opened(N * 8192);
  for (int i = 0; i < N; i++) {
    slots[i] = mr_spill_put(s, filled(i));
    while (slots[i] >= 0 && mr_spill_state(s, slots[i]) == MR_SPILL_WRITING)
      mr_spill_wait(s);
  }
  for (int i = 0; i < N; i++) {
    none += slots[i] < 0;
    if (slots[i] < 0)
      continue;
    bool ready = fetched(s, slots[i]) == MR_SPILL_READY;
    if (ready)
      assert_memory_equal(back, filled(i), SLOT);
    good += ready;
    bad += !ready;
  }
  assert_int_equal(good, 3);
  assert_true(bad > 0 && none > 0); /* it stops trying */
  assert_int_equal(mr_spill_room(s), 0);
  mr_spill_close(s);
  mr_sys_now = &mr_sys_os;
}

static void bad_reads(void **state) {
  (void)state;
  fake = mr_sys_os;
  fake.pread = failing_pread;
  reads_left = 1;
  mr_sys_now = &fake;
  mr_spill *s = opened(8 * 8192);
  int a = mr_spill_put(s, filled(1)), b = mr_spill_put(s, filled(2)), c = mr_spill_put(s, block);
  assert_int_equal(fetched(s, a), MR_SPILL_READY);
  assert_int_equal(fetched(s, b), MR_SPILL_BAD);
  fake.pread = flipping_pread;
  assert_int_equal(fetched(s, c), MR_SPILL_BAD);
  mr_spill_stats st;
  mr_spill_stats_get(s, &st);
  assert_int_equal(st.failures, 2);
  mr_spill_close(s);
  mr_sys_now = &mr_sys_os;
}

static int no_direct(const char *path, int flags, mode_t mode) {
  if (flags & O_DIRECT) {
    errno = EINVAL;
    return -1;
  }
  return mr_sys_os.open(path, flags, mode);
}

static void without_direct_io(void **state) {
  (void)state;
  fake = mr_sys_os;
  fake.open = no_direct;
  mr_sys_now = &fake;
  mr_spill *s = opened(8 * 8192);
  int slot = mr_spill_put(s, filled(7));
  assert_int_equal(fetched(s, slot), MR_SPILL_READY);
  assert_memory_equal(back, filled(7), SLOT);
  mr_spill_close(s);
  mr_sys_now = &mr_sys_os;
}

static void refused(void **state) {
  (void)state;
  mr_spill *s;
  mr_err err = MR_ERR_INIT;
  int64_t before = mr_mem_live();
  assert_true(mr_spill_open(&s, "/nowhere/at/all", SLOT, 1 << 20, &err) != MR_OK);
  assert_non_null(strstr(err.file, "/nowhere"));
  for (int n = 0; n < 3; n++) {
    mr_err_clear(&err);
    mr_mem_fail_after(n);
    assert_int_equal(mr_spill_open(&s, temp_dir, SLOT, 1 << 20, &err), MR_E_NOMEM);
    mr_mem_fail_after(-1);
  }
  assert_int_equal(mr_mem_live(), before);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(comes_back),        cmocka_unit_test(comes_back_twice),
      cmocka_unit_test(dropped_early),     cmocka_unit_test(leaves_nothing),
      cmocka_unit_test(disk_full),         cmocka_unit_test(bad_reads),
      cmocka_unit_test(without_direct_io), cmocka_unit_test(refused),
  };
  return cmocka_run_group_tests(tests, temp_begin, temp_end);
}
