/* What the machine says of itself, with and without /proc. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "io/sys.h"
#include "src/machine.h"

static void here(void **state) {
  (void)state;
  char name[64];
  mr_memory m = mr_machine_memory();
  assert_true(m.total > (uint64_t)1 << 26);
  assert_in_range(m.available, 1, m.total);
  assert_true(strlen(mr_machine_cpu(name, sizeof name)) >= 3);
  assert_int_equal(strlen(mr_machine_cpu(name, 3)), 2); /* cut, and terminated */
}

static volatile unsigned sink;

/* On a machine with other work some of it is waited for, on a quiet one nothing; never more than
 * there was. */
static void waited(void **state) {
  (void)state;
  double at = mr_sys_seconds();
  mr_watch watch = mr_machine_watch();
  while (mr_sys_seconds() < at + 0.05)
    for (unsigned i = 0; i < 1000; i++)
      sink += i;
  double share = mr_machine_waited_share(&watch);
  assert_true(watch.waited_s >= 0 && share >= 0 && share <= 1);
}

static int no_file(const char *path, int flags, mode_t mode) {
  (void)path;
  (void)flags;
  (void)mode;
  errno = ENOENT;
  return -1;
}

static void nowhere(void **state) {
  (void)state;
  char name[64];
  mr_sys blind = mr_sys_os;
  blind.open = no_file;
  mr_sys_now = &blind;
  mr_memory m = mr_machine_memory();
  mr_machine_cpu(name, sizeof name);
  double none = mr_machine_watch().waited_s;
  mr_sys_now = &mr_sys_os;
  assert_true(none == 0);
  assert_true(m.total == 0 && m.available == 0);
  assert_string_equal(name, "cpu");
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(here), cmocka_unit_test(waited),
                                     cmocka_unit_test(nowhere)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
