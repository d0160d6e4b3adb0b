#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "io/mem.h"
#include "io/slurp.h"

#define BYTES 40000 /* more than one read */

static char path[] = "/tmp/mr-slurp-XXXXXX";

static int make_file(void **state) {
  (void)state;
  char bytes[BYTES];
  memset(bytes, 'a', sizeof bytes);
  int fd = mkstemp(path);
  return fd < 0 || write(fd, bytes, sizeof bytes) != BYTES || close(fd);
}

static int remove_file(void **state) {
  (void)state;
  return unlink(path);
}

static void adds_the_whole_file(void **state) {
  (void)state;
  mr_text t = {0};
  mr_err err = MR_ERR_INIT;
  mr_text_adds(&t, "before ");
  assert_int_equal(mr_slurp_file(path, BYTES, &t, &err), MR_OK);
  assert_int_equal(t.len, 7 + BYTES);
  assert_memory_equal(t.data, "before aaa", 10);
  mr_text_free(&t);
}

static void refuses_a_byte_too_much(void **state) {
  (void)state;
  mr_text t = {0};
  mr_err err = MR_ERR_INIT;
  assert_int_equal(mr_slurp_file(path, BYTES - 1, &t, &err), MR_E_DATA);
  assert_string_equal(err.text, "is larger than 39999 bytes");
  assert_string_equal(err.file, path);
  assert_true(t.len < BYTES);
  mr_text_free(&t);
}

static void says_what_is_not_there(void **state) {
  (void)state;
  mr_text t = {0};
  mr_err err = MR_ERR_INIT;
  assert_int_equal(mr_slurp_file("/nowhere/at-all", 10, &t, &err), MR_E_NOINPUT);
  mr_err_clear(&err);
  assert_int_equal(mr_slurp(-1, "the file", 10, &t, &err), MR_E_IO);
  assert_string_equal(err.file, "the file");
}

static void tells_missing_memory(void **state) {
  (void)state;
  mr_text t = {0};
  mr_err err = MR_ERR_INIT;
  mr_mem_fail_after(0);
  mr_code rc = mr_slurp_file(path, BYTES, &t, &err);
  mr_mem_fail_after(-1);
  assert_int_equal(rc, MR_E_NOMEM);
  mr_text_free(&t);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(adds_the_whole_file),
      cmocka_unit_test(refuses_a_byte_too_much),
      cmocka_unit_test(says_what_is_not_there),
      cmocka_unit_test(tells_missing_memory),
  };
  return cmocka_run_group_tests(tests, make_file, remove_file);
}
