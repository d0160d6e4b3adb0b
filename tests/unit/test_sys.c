#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "io/sys.h"

static int calls;

/* One byte at a time, with an EINTR before each: what the full calls must hide. */
static ssize_t dribble_write(int fd, const void *buf, size_t n) {
  if (calls++ % 2 == 0) {
    errno = EINTR;
    return -1;
  }
  return mr_sys_os.write(fd, buf, n ? 1 : 0);
}

static ssize_t dribble_pread(int fd, void *buf, size_t n, off_t at) {
  if (calls++ % 2 == 0) {
    errno = EINTR;
    return -1;
  }
  return mr_sys_os.pread(fd, buf, n ? 1 : 0, at);
}

static ssize_t full_disk(int fd, const void *buf, size_t n) {
  (void)fd, (void)buf, (void)n;
  errno = ENOSPC;
  return -1;
}

static int temp_file(void) {
  char path[] = "/tmp/millrace-sys-XXXXXX";
  int fd = mkstemp(path);
  assert_true(fd >= 0);
  unlink(path);
  return fd;
}

static void full_calls_hide_short_counts(void **state) {
  (void)state;
  mr_sys t = mr_sys_os;
  t.write = dribble_write;
  t.pread = dribble_pread;
  mr_sys_now = &t;
  int fd = temp_file();
  char back[16];
  assert_int_equal(mr_sys_write_full(fd, "0123456789", 10), 0);
  assert_int_equal(mr_sys_pread_full(fd, back, 10, 0), 10);
  assert_memory_equal(back, "0123456789", 10);
  assert_int_equal(mr_sys_pread_full(fd, back, 16, 4), 6); /* the end of the file comes early */
  mr_sys_now = &mr_sys_os;
  close(fd);
}

static void errors_come_through(void **state) {
  (void)state;
  mr_sys t = mr_sys_os;
  t.write = full_disk;
  mr_sys_now = &t;
  assert_int_equal(mr_sys_write_full(1, "x", 1), -1);
  assert_int_equal(errno, ENOSPC);
  mr_sys_now = &mr_sys_os;
  char c;
  assert_int_equal(mr_sys_read_full(-1, &c, 1), -1);
  assert_int_equal(errno, EBADF);
}

static void clock_goes_forward(void **state) {
  (void)state;
  double a = mr_sys_seconds(), b = mr_sys_seconds();
  assert_true(b >= a);
  assert_true(mr_sys_now->wall_s() > 1700000000);
}

/* Where the file ends early there is no error of the system; one of an earlier call is not it. */
static void an_early_end_is_an_error_of_its_own(void **state) {
  (void)state;
  char back[8];
  int fd = temp_file();
  assert_int_equal(mr_sys_write_full(fd, "01234", 5), 0);
  assert_int_equal(mr_sys_pread_all(fd, back, 5, 0), 0);
  errno = ENOENT;
  assert_int_equal(mr_sys_pread_all(fd, back, 5, 1), -1);
  assert_int_equal(errno, EIO);
  close(fd);
}

static void a_wait_ends_at_its_time(void **state) {
  (void)state;
  int ends[2];
  assert_int_equal(pipe(ends), 0);
  double from = mr_sys_seconds();
  mr_sys_wake_at(from + 0.05);
  assert_int_equal(mr_sys_now->await(ends[0]), -1);
  assert_int_equal(errno, EINTR);
  assert_true(mr_sys_seconds() >= from + 0.05);
  assert_int_equal(write(ends[1], "x", 1), 1);
  assert_int_equal(mr_sys_now->await(ends[0]), 0); /* what is there is read all the same */
  mr_sys_wake_at(0);
  close(ends[0]);
  close(ends[1]);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(full_calls_hide_short_counts),
      cmocka_unit_test(errors_come_through),
      cmocka_unit_test(clock_goes_forward),
      cmocka_unit_test(an_early_end_is_an_error_of_its_own),
      cmocka_unit_test(a_wait_ends_at_its_time),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
