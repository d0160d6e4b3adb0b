#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "io/err.h"

static void first_error_wins(void **state) {
  (void)state;
  mr_err e = MR_ERR_INIT;
  assert_int_equal(mr_err_set(&e, MR_E_DATA, "first %d", 1), MR_E_DATA);
  assert_int_equal(mr_err_set(&e, MR_E_IO, "second"), MR_E_IO);
  assert_int_equal(e.code, MR_E_DATA);
  assert_string_equal(e.text, "first 1");
  mr_err_clear(&e);
  assert_int_equal(e.code, MR_OK);
  assert_int_equal(mr_err_set(NULL, MR_E_IO, "nowhere"), MR_E_IO);
}

static void places(void **state) {
  (void)state;
  char buf[256];
  mr_err e = MR_ERR_INIT;
  mr_err_at(&e, MR_E_DATA, "rows.jsonl", 7, -1, "not JSON");
  assert_string_equal(mr_err_format(&e, buf, sizeof buf), "rows.jsonl:7: not JSON");
  e = (mr_err)MR_ERR_INIT;
  mr_err_at(&e, MR_E_DATA, "m.gguf", 0, 24, "bad key");
  assert_string_equal(mr_err_format(&e, buf, sizeof buf), "m.gguf: byte 24: bad key");
  e = (mr_err)MR_ERR_INIT;
  mr_err_set(&e, MR_E_DATA, "bad");
  mr_err_place(&e, "f", 0, -1);
  mr_err_place(&e, "g", 0, -1);
  assert_string_equal(mr_err_format(&e, buf, sizeof buf), "f: bad");
}

static void text_from_files_is_escaped(void **state) {
  (void)state;
  mr_err e = MR_ERR_INIT;
  mr_err_at(&e, MR_E_DATA, "a\nb", 0, -1, "arch \x1b[31m%s", "%n\x7f");
  assert_string_equal(e.file, "a\\x0ab");
  assert_string_equal(e.text, "arch \\x1b[31m%n\\x7f");
}

static void long_text_is_cut_whole(void **state) {
  (void)state;
  mr_err e = MR_ERR_INIT;
  char big[4000];
  memset(big, '\n', sizeof big - 1);
  big[sizeof big - 1] = '\0';
  mr_err_set(&e, MR_E_DATA, "%s", big);
  assert_true(strlen(e.text) < sizeof e.text);
  assert_int_equal(strlen(e.text) % 4, 0); /* escapes are never split */
}

static void codes_of_errno(void **state) {
  (void)state;
  static const struct {
    int no;
    mr_code fallback, want;
  } cases[] = {{ENOENT, MR_E_IO, MR_E_NOINPUT},
               {ENOENT, MR_E_CANTCREATE, MR_E_CANTCREATE},
               {ENOSPC, MR_E_CANTCREATE, MR_E_IO},
               {EACCES, MR_E_CANTCREATE, MR_E_CANTCREATE},
               {ENOMEM, MR_E_IO, MR_E_NOMEM}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    mr_err e = MR_ERR_INIT;
    errno = cases[i].no;
    assert_int_equal(mr_err_errno(&e, cases[i].fallback, "x", "cannot open"), cases[i].want);
    assert_non_null(strstr(e.text, strerror(cases[i].no)));
  }
  assert_int_equal(mr_err_exit(MR_E_NOMEM), 69);
  assert_int_equal(mr_err_exit(MR_E_STOPPED), 75);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(first_error_wins),
      cmocka_unit_test(places),
      cmocka_unit_test(text_from_files_is_escaped),
      cmocka_unit_test(long_text_is_cut_whole),
      cmocka_unit_test(codes_of_errno),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
