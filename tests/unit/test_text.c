#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "io/mem.h"
#include "io/text.h"

static void grows_and_terminates(void **state) {
  (void)state;
  mr_text t = {0};
  for (int i = 0; i < 1000; i++)
    mr_text_addf(&t, "%d,", i);
  assert_int_equal(t.len, 3890);
  assert_int_equal(strlen(t.data), t.len);
  assert_memory_equal(t.data + t.len - 4, "999,", 4);
  mr_text_clear(&t);
  char big[1000];
  memset(big, 'x', sizeof big - 1);
  big[sizeof big - 1] = '\0';
  mr_text_addf(&t, "<%s>", big);
  assert_int_equal(t.len, sizeof big + 1);
  mr_text_free(&t);
  assert_null(t.data);
}

static void fails_once_and_stays_failed(void **state) {
  (void)state;
  mr_text t = {0};
  mr_mem_fail_after(0);
  mr_text_adds(&t, "a");
  mr_mem_fail_after(-1);
  assert_true(t.failed);
  mr_text_adds(&t, "b");
  assert_int_equal(t.len, 0);
  mr_text_free(&t);
}

static void utf8_table(void **state) {
  (void)state;
  static const struct {
    const char *s;
    int64_t bad; /* offset of the first invalid byte, -1: none */
  } cases[] = {
      {"", -1},
      {"plain ascii, longer than eight bytes", -1},
      {"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", -1},
      {"\xf4\x8f\xbf\xbf", -1},
      {"12345678\xff", 8},
      {"a\x80", 1},
      {"\xc0\xaf", 0},
      {"\xe0\x80\x80", 0},
      {"\xed\xa0\x80", 0},
      {"\xf4\x90\x80\x80", 0},
      {"ab\xe2\x82", 2},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    assert_int_equal(mr_utf8_valid(cases[i].s, strlen(cases[i].s)), cases[i].bad);
}

static void utf8_round_trip(void **state) {
  (void)state;
  for (uint32_t c = 1; c < 0x110000; c += c < 0x3000 ? 1 : 97) {
    if (c >= 0xD800 && c < 0xE000)
      continue;
    mr_text t = {0};
    uint32_t back;
    mr_text_add_code(&t, c);
    assert_int_equal(mr_utf8_next(t.data, t.len, &back), t.len);
    assert_int_equal(back, c);
    for (size_t cut = 0; cut < t.len; cut++)
      assert_int_equal(mr_utf8_whole(t.data, cut), 0);
    assert_int_equal(mr_utf8_whole(t.data, t.len), t.len);
    mr_text_free(&t);
  }
  assert_int_equal(mr_utf8_whole("a\xff", 2), 2); /* invalid is not unfinished */
}

static void base64(void **state) {
  (void)state;
  static const char *const good[][2] = {
      {"", ""}, {"Zg==", "f"}, {"Zm8=", "fo"}, {"Zm9v", "foo"}, {"Zm9vYmFy", "foobar"}};
  for (size_t i = 0; i < 5; i++) {
    mr_text t = {0};
    assert_true(mr_base64_decode(good[i][0], strlen(good[i][0]), &t));
    assert_int_equal(t.len, strlen(good[i][1]));
    assert_true(!t.len || !memcmp(t.data, good[i][1], t.len));
    mr_text_free(&t);
  }
  static const char *const bad[] = {"Z", "Zg=", "Z===", "====", "Zm9v!mFy", "Zg==Zg=="};
  for (size_t i = 0; i < 6; i++) {
    mr_text t = {0};
    assert_false(mr_base64_decode(bad[i], strlen(bad[i]), &t));
    mr_text_free(&t);
  }
}

static void sizes_durations_clocks(void **state) {
  (void)state;
  uint64_t b;
  double s;
  int m;
  int64_t i;
  assert_true(mr_parse_size("512", &b) && b == 512);
  assert_true(mr_parse_size("8KiB", &b) && b == 8192);
  assert_true(mr_parse_size("1.5GiB", &b) && b == 1610612736);
  assert_false(mr_parse_size("8KB", &b));
  assert_false(mr_parse_size("-1", &b));
  assert_false(mr_parse_size("99999999999TiB", &b));
  assert_false(mr_parse_size("", &b));
  assert_true(mr_parse_duration("90", &s) && s == 90);
  assert_true(mr_parse_duration("1.5h", &s) && s == 5400);
  assert_false(mr_parse_duration("5 m", &s));
  assert_true(mr_parse_clock("06:30", &m) && m == 390);
  assert_false(mr_parse_clock("24:00", &m));
  assert_false(mr_parse_clock("6:30", &m));
  assert_true(mr_parse_int("-42", &i) && i == -42);
  assert_false(mr_parse_int("4x", &i));
  assert_false(mr_parse_int("9223372036854775808", &i));
}

static void nearest_name(void **state) {
  (void)state;
  static const char *const names[] = {"--max-tokens", "--max-batch", "--model", "--threads"};
  assert_string_equal(mr_nearest("--max-tokns", names, 4), "--max-tokens");
  assert_string_equal(mr_nearest("--thread", names, 4), "--threads");
  assert_null(mr_nearest("--zzzzzzzzzz", names, 4));
  static const char *const one[] = {"n"};
  assert_null(mr_nearest("x", one, 1)); /* nothing of it is the same */
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(grows_and_terminates),
      cmocka_unit_test(fails_once_and_stays_failed),
      cmocka_unit_test(utf8_table),
      cmocka_unit_test(utf8_round_trip),
      cmocka_unit_test(base64),
      cmocka_unit_test(sizes_durations_clocks),
      cmocka_unit_test(nearest_name),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
