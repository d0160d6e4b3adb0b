#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "io/lines.h"
#include "temp.h"

/* "number:text " of every line, with ! and the length for too long ones. */
static const char *lines_of(const char *path, size_t max, mr_err *e) {
  static mr_text t;
  mr_text_clear(&t);
  mr_text_adds(&t, "");
  mr_source *s;
  assert_int_equal(mr_source_open(&s, &path, 1, e), MR_OK);
  mr_lines l;
  mr_lines_init(&l, s, max, NULL);
  bool more;
  while (mr_source_next(s, &more, e) == MR_OK && more) {
    mr_line line;
    mr_lines_start(&l);
    while (mr_lines_next(&l, &line, e) == MR_OK && line.s) {
      mr_text_addf(&t, "%llu:", (unsigned long long)line.number);
      if (line.too_long)
        mr_text_addf(&t, "!%zu ", line.len);
      else
        mr_text_addf(&t, "%.*s ", (int)line.len, line.s);
    }
  }
  mr_lines_free(&l);
  mr_source_close(s);
  return t.data;
}

static const char *lines(const char *text, size_t max) {
  mr_err e = MR_ERR_INIT;
  const char *got = lines_of(temp_text("l.jsonl", text), max, &e);
  assert_int_equal(e.code, MR_OK);
  return got;
}

static void ends_and_blanks(void **state) {
  (void)state;
  assert_string_equal(lines("a\nb\n", 100), "1:a 2:b ");
  assert_string_equal(lines("a\r\nb", 100), "1:a 2:b ");
  assert_string_equal(lines("\n\n \t\r\na\n\n", 100), "4:a ");
  assert_string_equal(lines("", 100), "");
  assert_string_equal(lines("\n", 100), "");
  assert_string_equal(lines("\xEF\xBB\xBF"
                            "a\n\xEF\xBB\xBF"
                            "b",
                            100),
                      "1:a 2:\xEF\xBB\xBF"
                      "b ");
  assert_string_equal(lines("\xEF\xBB\xBF\nb", 100), "2:b ");
}

static void too_long_lines_are_passed_over(void **state) {
  (void)state;
  assert_string_equal(lines("123456\n12345\n\n1234567890", 5), "1:!6 2:12345 4:!10 ");
}

static void lines_cross_blocks(void **state) {
  (void)state;
  enum { LINE = 50000, N = 12 };
  char *text = malloc(N * (LINE + 1) + 1);
  for (int i = 0; i < N; i++) {
    memset(text + i * (LINE + 1), 'a' + i, LINE);
    text[i * (LINE + 1) + LINE] = '\n';
  }
  text[N * (LINE + 1)] = '\0';
  const char *got = lines(text, LINE);
  for (int i = 0; i < N; i++) {
    char head[16];
    int n = snprintf(head, sizeof head, "%d:", i + 1);
    assert_memory_equal(got, head, (size_t)n);
    got += n;
    assert_memory_equal(got, text + i * (LINE + 1), LINE);
    got += LINE + 1;
  }
  assert_string_equal(got, "");
  got = lines(text, LINE - 1);
  assert_non_null(strstr(got, "1:!50000 2:!50000 "));
  assert_non_null(strstr(got, "12:!50000 "));
  free(text);
}

static void the_digest_tells_files_apart(void **state) {
  (void)state;
  char hex[2][MR_HASH_HEX];
  for (int i = 0; i < 2; i++) {
    const char *paths[] = {temp_text("d1.jsonl", i ? "a\nb\n" : "a\n"),
                           temp_text("d2.jsonl", i ? "" : "b\n")};
    mr_err e = MR_ERR_INIT;
    mr_source *s;
    mr_hasher *h = mr_hasher_new();
    assert_int_equal(mr_source_open(&s, paths, 2, &e), MR_OK);
    mr_lines l;
    mr_lines_init(&l, s, 100, h);
    bool more;
    while (mr_source_next(s, &more, &e) == MR_OK && more) {
      mr_line line;
      mr_lines_start(&l);
      while (mr_lines_next(&l, &line, &e) == MR_OK && line.s)
        ;
    }
    assert_int_equal(l.text_bytes, 4);
    mr_hasher_hex(h, hex[i]);
    mr_hasher_free(h);
    mr_lines_free(&l);
    mr_source_close(s);
  }
  assert_string_not_equal(hex[0], hex[1]);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(ends_and_blanks),
      cmocka_unit_test(too_long_lines_are_passed_over),
      cmocka_unit_test(lines_cross_blocks),
      cmocka_unit_test(the_digest_tells_files_apart),
  };
  return cmocka_run_group_tests(tests, temp_begin, temp_end);
}
