#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "io/hash.h"
#include "io/mem.h"

/* RFC 3720, B.4, and the check value of CRC-32C. */
static void crc32c_known(void **state) {
  (void)state;
  unsigned char b[32];
  memset(b, 0, sizeof b);
  assert_int_equal(mr_crc32c(0, b, 32), 0x8a9136aau);
  memset(b, 0xff, sizeof b);
  assert_int_equal(mr_crc32c(0, b, 32), 0x62a8ab43u);
  for (int i = 0; i < 32; i++)
    b[i] = (unsigned char)i;
  assert_int_equal(mr_crc32c(0, b, 32), 0x46dd794eu);
  assert_int_equal(mr_crc32c(0, "123456789", 9), 0xe3069283u);
  assert_int_equal(mr_crc32c(0, "", 0), 0);
}

static void crc32c_goes_on(void **state) {
  (void)state;
  unsigned char b[100];
  for (int i = 0; i < 100; i++)
    b[i] = (unsigned char)(i * 37 + 11);
  uint32_t whole = mr_crc32c(0, b, 100);
  for (size_t cut = 0; cut <= 100; cut++)
    assert_int_equal(mr_crc32c(mr_crc32c(0, b, cut), b + cut, 100 - cut), whole);
}

/* The digests of nothing, as xxhsum prints them. */
static void xxh3_known(void **state) {
  (void)state;
  char hex[MR_HASH_HEX];
  mr_hash_hex("", 0, hex);
  assert_string_equal(hex, "99aa06d3014798d86001c324468d497f");
  assert_true(mr_hash_64("", 0) == 0x2d06800538d394c2ull);
}

static void streaming_equals_whole(void **state) {
  (void)state;
  char text[5000], whole[MR_HASH_HEX], parts[MR_HASH_HEX];
  for (size_t i = 0; i < sizeof text; i++)
    text[i] = (char)(i * i >> 3);
  mr_hash_hex(text, sizeof text, whole);
  mr_hasher *h = mr_hasher_new();
  assert_non_null(h);
  for (size_t at = 0, n = 1; at < sizeof text; at += n, n = n * 2 + 1) {
    if (n > sizeof text - at)
      n = sizeof text - at;
    mr_hasher_add(h, text + at, n);
    mr_hasher_hex(h, parts); /* looking does not disturb */
  }
  assert_string_equal(parts, whole);
  mr_hasher_free(h);
}

static void file_digest(void **state) {
  (void)state;
  char path[] = "/tmp/mr_test_hash_XXXXXX", hex[MR_HASH_HEX], want[MR_HASH_HEX];
  int fd = mkstemp(path);
  assert_true(fd >= 0);
  assert_int_equal(write(fd, "hello", 5), 5);
  close(fd);
  uint64_t size = 0;
  mr_err e = MR_ERR_INIT;
  assert_int_equal(mr_hash_file(path, hex, &size, &e), MR_OK);
  mr_hash_hex("hello", 5, want);
  assert_string_equal(hex, want);
  assert_int_equal(size, 5);
  unlink(path);
  assert_int_equal(mr_hash_file(path, hex, &size, &e), MR_E_NOINPUT);
  assert_int_equal(mr_mem_live(), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(crc32c_known), cmocka_unit_test(crc32c_goes_on),
      cmocka_unit_test(xxh3_known),   cmocka_unit_test(streaming_equals_whole),
      cmocka_unit_test(file_digest),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
