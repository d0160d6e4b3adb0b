#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <errno.h>
#include <string.h>
#include <cmocka.h>

#include "io/json.h"
#include "io/mem.h"
#include "io/sys.h"
#include "io/zframe.h"
#include "jobs/refs.h"
#include "temp.h"

static mr_err err;

static mr_code open_text(mr_refs **r, const char *text, const char *field, const char *by) {
  const char *path = temp_text("refs.jsonl", text);
  mr_err_clear(&err);
  return mr_refs_open(r, &(mr_refs_opts){.files = &path, .n = 1, .field = field, .by = by}, &err);
}

static bool find(mr_refs *r, const char *id, mr_ref *ref) {
  bool found;
  assert_int_equal(mr_refs_find(r, (mr_str){id, strlen(id)}, ref, &found, &err), MR_OK);
  return found;
}

/* The answers of a row as JSON, "none" without a reference. */
static const char *answers(mr_refs *r, const char *id) {
  static mr_text t;
  mr_ref ref;
  mr_text_clear(&t);
  if (!find(r, id, &ref))
    return "none";
  mr_json_add(&t, ref.answers);
  return t.data;
}

static void forms_of_lines(void **state) {
  (void)state;
  mr_refs *r;
  assert_int_equal(open_text(&r,
                             "\xEF\xBB\xBF{\"id\":\"a\",\"answer\":\"x\"}\r\n\n"
                             "{\"custom_id\":\"b\",\"id\":\"q\",\"target\":4.5}\n"
                             "{\"id\":3,\"label\":true}\n"
                             "{\"answers\":[\"u\",1]}\n"
                             "{\"id\":\"c\",\"answer\":null}\n"
                             "{\"id\":\"d\",\"reference\":\"\\u0000\"}",
                             NULL, NULL),
                   MR_OK);
  assert_int_equal(mr_refs_count(r), 5);
  assert_int_equal(mr_refs_blank(r), 1);
  assert_string_equal(answers(r, "a"), "[\"x\"]");
  assert_string_equal(answers(r, "b"), "[4.5]");
  assert_string_equal(answers(r, "3"), "[true]");
  assert_string_equal(answers(r, "row-5"), "[\"u\",1]"); /* as the row in its place */
  assert_string_equal(answers(r, "d"), "[\"\\u0000\"]");
  assert_string_equal(answers(r, "c"), "none");
  assert_string_equal(answers(r, "q"), "none");
  assert_string_equal(answers(r, ""), "none");
  mr_refs_close(r);
}

static void fields(void **state) {
  (void)state;
  mr_refs *r;
  mr_ref ref;
  const char *text =
      "{\"id\":\"a\",\"answers\":{\"text\":[\"p\",\"q\"]},\"t\":{\"u\":7},\"a.b\":1}\n"
      "{\"id\":\"b\",\"answers\":{\"text\":\"z\"}}\n";
  assert_int_equal(open_text(&r, text, "answers.text", "t.u"), MR_OK);
  assert_string_equal(answers(r, "a"), "[\"p\",\"q\"]");
  assert_true(find(r, "a", &ref));
  assert_int_equal(ref.group.len, 1);
  assert_memory_equal(ref.group.s, "7", 1);
  assert_true(find(r, "b", &ref));
  assert_null(ref.group.s);
  mr_refs_close(r);
  assert_int_equal(open_text(&r, text, "a.b", NULL), MR_OK); /* a name with a point */
  assert_string_equal(answers(r, "a"), "[1]");
  assert_int_equal(mr_refs_blank(r), 1);
  mr_refs_close(r);
}

static void refused(const char *text, const char *field, int64_t line, const char *words) {
  mr_refs *r;
  int64_t live = mr_mem_live();
  assert_int_equal(open_text(&r, text, field, NULL), MR_E_DATA);
  assert_null(r);
  if (!strstr(err.text, words) || err.line != line)
    print_error("%lld: %s\n", (long long)err.line, err.text);
  assert_non_null(strstr(err.text, words));
  assert_int_equal(err.line, line);
  assert_non_null(strstr(err.file, "refs.jsonl"));
  assert_int_equal(mr_mem_live(), live);
}

static void bad_lines(void **state) {
  (void)state;
  refused("{\"id\":\"a\",\"answer\":1}\n{\"id\":\"b\",\"answer\":1}\n{\"id\":\"a\",\"answer\":2}\n",
          NULL, 3, "stands in line 1");
  refused("{\"id\":1,\"answer\":1}\n{\"id\":\"1\",\"answer\":1}\n", NULL, 2, "stands in line 1");
  refused("{\"id\":\"a\",\"answer\":1}\nno\n", NULL, 2, "JSON");
  refused("{\"id\":\"a\",\"answer\":1}\n[1]\n", NULL, 2, "not a JSON object");
  refused("{\"id\":1.5,\"answer\":1}\n", NULL, 1, "whole number");
  refused("{\"id\":\"a\",\"answer\":{}}\n", NULL, 1, "answers.text");
  refused("{\"id\":\"a\",\"answer\":[]}\n", NULL, 1, "not empty");
  refused("{\"id\":\"a\",\"answer\":[null]}\n", NULL, 1, "list of these");
  refused("{\"id\":\"a\",\"x\":1}\n{\"id\":\"b\"}\n", NULL, 1, "--ref-field");
  refused("{\"id\":\"a\",\"x\":1}\n", "y", 1, "field y");
  refused("{\"id\":\"a\",\"answer\":\"\xff\"}\n", NULL, 1, "UTF-8");
}

static void too_long(void **state) {
  (void)state;
  mr_text t = {0};
  mr_text_adds(&t, "{\"id\":\"a\",\"answer\":\"");
  for (size_t i = 0; i < MR_REFS_LINE_MAX / 16; i++)
    mr_text_adds(&t, "0123456789abcdef");
  mr_text_adds(&t, "\"}\n");
  refused(t.data, NULL, 1, "at most");
  mr_text_free(&t);
}

/* Many, in compressed files, looked up in order and in any order; those not asked for come in
 * theirs. */
enum { MANY = 20000 };

static const char *write_many(int from, int to, const char *name) {
  mr_zpack *z;
  mr_text t = {0}, out = {0};
  assert_int_equal(mr_zpack_open(&z, 1, &err), MR_OK);
  for (int i = from; i < to; i++)
    mr_text_addf(&t, "{\"id\":\"r%d\",\"answer\":\"%d %064d\"}\n", i, i * 7, i);
  assert_int_equal(mr_zpack_frame(z, t.data, t.len, &out, &err), MR_OK);
  mr_zpack_close(z);
  const char *path = temp_write(name, out.data, out.len);
  mr_text_free(&t);
  mr_text_free(&out);
  return path;
}

static void check_one(mr_refs *r, int i, bool asked) {
  char id[16], want[100];
  mr_ref ref;
  snprintf(id, sizeof id, "r%d", i);
  snprintf(want, sizeof want, "%d %064d", i * 7, i);
  assert_true(find(r, id, &ref));
  assert_string_equal(json_string_value(json_array_get(ref.answers, 0)), want);
  assert_int_equal(ref.asked, asked);
}

static void many(void **state) {
  (void)state;
  mr_refs *r;
  mr_ref ref;
  bool more;
  uint64_t at = 0;
  const char *files[] = {write_many(0, MANY / 2, "1.jsonl.zst"),
                         write_many(MANY / 2, MANY, "2.jsonl.zst")};
  assert_int_equal(mr_refs_open(&r, &(mr_refs_opts){.files = files, .n = 2}, &err), MR_OK);
  assert_int_equal(mr_refs_count(r), MANY);
  for (int i = 0; i < MANY; i += 2)
    check_one(r, i, false);
  for (int i = 0; i < 1000; i++)
    check_one(r, (int)((uint64_t)i * 7919 % (MANY / 2)) * 2, true);
  for (int i = 1; i < MANY; i += 2) {
    char id[16];
    int n = snprintf(id, sizeof id, "r%d", i);
    assert_int_equal(mr_refs_rest(r, &at, &ref, &more, &err), MR_OK);
    assert_true(more && ref.id.len == (size_t)n && !memcmp(ref.id.s, id, ref.id.len));
  }
  assert_int_equal(mr_refs_rest(r, &at, &ref, &more, &err), MR_OK);
  assert_false(more);
  assert_string_equal(answers(r, "r-1"), "none");
  mr_refs_close(r);
}

/* Ids of lines without one count files as inputs do; a double names both places. */
static void files(void **state) {
  (void)state;
  mr_refs *r;
  const char *list[] = {temp_text("a.jsonl", "{\"answer\":1}\n"),
                        temp_text("b.jsonl", "\n{\"answer\":2}\n")};
  assert_int_equal(mr_refs_open(&r, &(mr_refs_opts){.files = list, .n = 2}, &err), MR_OK);
  assert_string_equal(answers(r, "row-1"), "[1]");
  assert_string_equal(answers(r, "file-2-row-2"), "[2]");
  mr_refs_close(r);
  mr_err_clear(&err);
  list[1] = temp_text("b.jsonl", "\n{\"id\":\"row-1\",\"answer\":2}\n");
  assert_int_equal(mr_refs_open(&r, &(mr_refs_opts){.files = list, .n = 2}, &err), MR_E_DATA);
  if (!strstr(err.text, "line 1 of "))
    print_error("%s\n", err.text);
  assert_non_null(strstr(err.text, "line 1 of "));
  assert_non_null(strstr(err.text, "a.jsonl"));
  assert_int_equal(err.line, 2);
  mr_err_clear(&err);
  list[1] = temp_path("nothing");
  assert_int_equal(mr_refs_open(&r, &(mr_refs_opts){.files = list, .n = 2}, &err), MR_E_NOINPUT);
}

static void no_place(void **state) {
  (void)state;
  mr_refs *r;
  setenv("TMPDIR", "/nonexistent/millrace", 1);
  assert_int_equal(open_text(&r, "{\"id\":\"a\",\"answer\":1}\n", NULL, NULL), MR_E_CANTCREATE);
  unsetenv("TMPDIR");
}

/* The n-th call of one kind fails. */
static int calls_left;

static bool fails_now(void) {
  if (calls_left-- != 0)
    return false;
  errno = EIO;
  return true;
}

static ssize_t bad_write(int fd, const void *buf, size_t n) {
  return fails_now() ? -1 : mr_sys_os.write(fd, buf, n);
}

static ssize_t bad_pread(int fd, void *buf, size_t n, off_t at) {
  return fails_now() ? -1 : mr_sys_os.pread(fd, buf, n, at);
}

static void bad_disk(void **state) {
  (void)state;
  mr_refs *r;
  mr_ref ref;
  bool found;
  const char *text = "{\"id\":\"a\",\"answer\":1}\n";
  int64_t live = mr_mem_live();
  mr_sys bad = mr_sys_os;
  const char *path = temp_text("refs.jsonl", text);
  bad.write = bad_write;
  bad.pread = bad_pread;
  calls_left = 0;
  mr_err_clear(&err);
  mr_sys_now = &bad;
  mr_code rc = mr_refs_open(&r, &(mr_refs_opts){.files = &path, .n = 1}, &err);
  mr_sys_now = &mr_sys_os;
  assert_int_equal(rc, MR_E_IO);
  assert_int_equal(mr_mem_live(), live);
  assert_int_equal(open_text(&r, text, NULL, NULL), MR_OK);
  calls_left = 0;
  mr_sys_now = &bad;
  rc = mr_refs_find(r, (mr_str){"a", 1}, &ref, &found, &err);
  mr_sys_now = &mr_sys_os;
  assert_int_equal(rc, MR_E_IO);
  assert_false(found);
  assert_string_equal(answers(r, "a"), "[1]"); /* it answers again when the disk does */
  mr_refs_close(r);
}

static void memory(void **state) {
  (void)state;
  int64_t live = mr_mem_live();
  mr_code rc = MR_E_NOMEM;
  const char *path =
      temp_text("refs.jsonl", "{\"id\":\"a\",\"answer\":\"x\",\"t\":\"g\"}\n{\"answers\":[1,2]}\n");
  for (int n = 0; n < 2000 && rc; n++) {
    mr_refs *r;
    mr_ref ref;
    bool found = true;
    mr_err_clear(&err);
    mr_mem_fail_after(n);
    rc = mr_refs_open(&r, &(mr_refs_opts){.files = &path, .n = 1, .by = "t"}, &err);
    if (!rc)
      rc = mr_refs_find(r, (mr_str){"a", 1}, &ref, &found, &err);
    mr_mem_fail_after(-1);
    if (rc)
      assert_int_equal(err.code, MR_E_NOMEM);
    else
      assert_true(found);
    mr_refs_close(r);
    assert_int_equal(mr_mem_live(), live);
  }
  assert_int_equal(rc, MR_OK);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(forms_of_lines), cmocka_unit_test(fields),   cmocka_unit_test(bad_lines),
      cmocka_unit_test(too_long),       cmocka_unit_test(many),     cmocka_unit_test(files),
      cmocka_unit_test(no_place),       cmocka_unit_test(bad_disk), cmocka_unit_test(memory)};
  return cmocka_run_group_tests(tests, temp_begin, temp_end);
}
