#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include <zlib.h>

#include "io/gunzip.h"
#include "io/mem.h"
#include "io/text.h"

static mr_err err;

/* Appends a gzip member that holds s. */
static void member(mr_text *t, const char *s, size_t len) {
  unsigned char buf[4096];
  z_stream z = {.next_in = (Bytef *)(uintptr_t)s, .avail_in = (uInt)len};
  assert_int_equal(deflateInit2(&z, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
  int r = Z_OK;
  while (r != Z_STREAM_END) {
    z.next_out = buf;
    z.avail_out = sizeof buf;
    r = deflate(&z, Z_FINISH);
    assert_true(r == Z_OK || r == Z_STREAM_END);
    mr_text_add(t, buf, sizeof buf - z.avail_out);
  }
  deflateEnd(&z);
}

/* Unpacks with `step` bytes of input and `cap` of output at a time. */
static mr_code unpack(const mr_text *in, size_t step, size_t cap, mr_text *out) {
  char buf[4096];
  mr_gunzip *z;
  mr_err_clear(&err);
  mr_code rc = mr_gunzip_open(&z, &err);
  if (rc)
    return rc;
  for (size_t at = 0; !rc && at < in->len; at += step) {
    size_t got = 1;
    mr_gunzip_feed(z, in->data + at, step < in->len - at ? step : in->len - at);
    while (!rc && got) {
      rc = mr_gunzip_read(z, buf, cap, &got, &err);
      if (!rc)
        mr_text_add(out, buf, got);
    }
  }
  if (!rc)
    rc = mr_gunzip_end(z, &err);
  mr_gunzip_close(z);
  return rc;
}

static void gives(const mr_text *in, const char *want, size_t len) {
  static const size_t steps[][2] = {{1, 1}, {1, 4096}, {7, 3}, {100000, 4096}};
  for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
    mr_text out = {0};
    assert_int_equal(unpack(in, steps[i][0], steps[i][1], &out), MR_OK);
    assert_int_equal(out.len, len);
    assert_memory_equal(out.data ? out.data : "", want, len);
    mr_text_free(&out);
  }
}

static void refuses(const mr_text *in, const char *words) {
  for (size_t step = 1; step < 100000; step *= 17) {
    mr_text out = {0};
    assert_int_equal(unpack(in, step, 64, &out), MR_E_DATA);
    if (!strstr(err.text, words))
      fail_msg("%s", err.text);
    mr_text_free(&out);
  }
}

static void members(void **state) {
  (void)state;
  mr_text t = {0};
  static char big[50000];
  for (size_t i = 0; i < sizeof big; i++)
    big[i] = (char)((i * i * 31) >> 7);
  member(&t, big, sizeof big);
  gives(&t, big, sizeof big);
  mr_text_clear(&t);
  member(&t, "one ", 4);
  member(&t, "", 0);
  member(&t, "two", 3);
  gives(&t, "one two", 7);
  mr_text_add(&t, "\0\0\0\0\0", 5); /* padding, as tapes have it */
  gives(&t, "one two", 7);
  mr_text_free(&t);
}

static void what_lies_behind(void **state) {
  (void)state;
  mr_text t = {0};
  member(&t, "x", 1);
  mr_text_adds(&t, "junk");
  refuses(&t, "behind");
  mr_text_clear(&t);
  member(&t, "x", 1);
  mr_text_add(&t, "\0", 1);
  member(&t, "y", 1); /* after padding nothing may follow */
  refuses(&t, "behind");
  mr_text_clear(&t);
  mr_text_adds(&t, "no gzip at all");
  refuses(&t, "broken");
  mr_text_free(&t);
}

/* Each bit of the checksum and of the length counts. */
static void checksums(void **state) {
  (void)state;
  mr_text t = {0};
  member(&t, "some text that is long enough", 29);
  for (size_t i = t.len - 8; i < t.len; i++)
    for (int bit = 0; bit < 8; bit++) {
      mr_text out = {0};
      t.data[i] = (char)(t.data[i] ^ 1 << bit);
      assert_int_equal(unpack(&t, 100, 100, &out), MR_E_DATA);
      t.data[i] = (char)(t.data[i] ^ 1 << bit);
      mr_text_free(&out);
    }
  gives(&t, "some text that is long enough", 29);
  mr_text_free(&t);
}

static void cut(void **state) {
  (void)state;
  mr_text t = {0};
  member(&t, "abc", 3);
  size_t first = t.len;
  member(&t, "def", 3);
  for (size_t n = 0; n < t.len; n++) {
    mr_text part = {.data = t.data, .len = n}, out = {0};
    mr_code rc = unpack(&part, 5, 100, &out);
    assert_int_equal(rc, n == first ? MR_OK : MR_E_DATA); /* a whole member is whole */
    if (rc)
      assert_non_null(strstr(err.text, "cut off"));
    mr_text_free(&out);
  }
  mr_text_free(&t);
}

static void memory(void **state) {
  (void)state;
  mr_text t = {0};
  member(&t, "abc", 3);
  int64_t live = mr_mem_live();
  mr_code rc = MR_E_NOMEM;
  int failed = 0;
  for (int n = 0; n < 50 && rc; n++) {
    mr_text out = {0};
    mr_mem_fail_after(n);
    rc = unpack(&t, 100, 100, &out);
    mr_mem_fail_after(-1);
    bool lost = !rc && out.failed; /* the test's own text */
    rc = lost ? MR_E_NOMEM : rc;
    assert_true(rc == MR_OK || rc == MR_E_NOMEM);
    failed += rc != MR_OK;
    mr_text_free(&out);
    assert_int_equal(mr_mem_live(), live);
  }
  assert_int_equal(rc, MR_OK);
  assert_true(failed >= 2);
  mr_text_free(&t);
  mr_gunzip_close(NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(members), cmocka_unit_test(what_lies_behind),
                                     cmocka_unit_test(checksums), cmocka_unit_test(cut),
                                     cmocka_unit_test(memory)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
