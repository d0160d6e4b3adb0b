#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include <sys/stat.h>
#include <archive.h>
#include <archive_entry.h>

#include "io/source.h"
#include "io/text.h"
#include "temp.h"

/* Packs one text through a filter of libarchive into a file of the temporary directory. */
static const char *pack(const char *name, int filter, const char *text, size_t len) {
  const char *path = temp_path(name);
  struct archive *a = archive_write_new();
  struct archive_entry *e = archive_entry_new();
  archive_write_set_format_raw(a);
  archive_write_add_filter(a, filter);
  assert_int_equal(archive_write_open_filename(a, path), ARCHIVE_OK);
  archive_entry_set_filetype(e, AE_IFREG);
  assert_int_equal(archive_write_header(a, e), ARCHIVE_OK);
  assert_int_equal(archive_write_data(a, text, len), (la_ssize_t)len);
  archive_entry_free(e);
  assert_int_equal(archive_write_free(a), ARCHIVE_OK);
  return path;
}

typedef struct member {
  const char *path, *link, *text;
  unsigned type;
} member;

static const char *pack_members(const char *name, bool zip, int filter, const member *m, int n) {
  const char *path = temp_path(name);
  struct archive *a = archive_write_new();
  if (zip)
    archive_write_set_format_zip(a);
  else
    archive_write_set_format_pax_restricted(a);
  archive_write_add_filter(a, filter);
  assert_int_equal(archive_write_open_filename(a, path), ARCHIVE_OK);
  for (int i = 0; i < n; i++) {
    struct archive_entry *e = archive_entry_new();
    archive_entry_set_pathname(e, m[i].path);
    archive_entry_set_filetype(e, m[i].type ? m[i].type : AE_IFREG);
    archive_entry_set_perm(e, 0644);
    archive_entry_set_size(e, m[i].text ? (int64_t)strlen(m[i].text) : 0);
    if (m[i].link)
      archive_entry_set_symlink(e, m[i].link);
    assert_int_equal(archive_write_header(a, e), ARCHIVE_OK);
    if (m[i].text)
      archive_write_data(a, m[i].text, strlen(m[i].text));
    archive_entry_free(e);
  }
  assert_int_equal(archive_write_free(a), ARCHIVE_OK);
  return path;
}

/* Reads all inputs: "name|text" of each, in one string; the code in *rc. */
static char *all_of(const char *const *inputs, int n, mr_err *e) {
  static mr_text t;
  mr_text_clear(&t);
  mr_text_adds(&t, "");
  mr_source *s = NULL;
  bool more = false;
  mr_err_clear(e);
  if (mr_source_open(&s, inputs, n, e) != MR_OK)
    return t.data;
  while (mr_source_next(s, &more, e) == MR_OK && more) {
    const char *name = mr_source_name(s), *slash = strrchr(name, '/'), *data;
    size_t len;
    mr_text_addf(&t, "%s|", slash ? slash + 1 : name);
    while (mr_source_read(s, &data, &len, e) == MR_OK && len)
      mr_text_add(&t, data, len);
  }
  mr_source_close(s);
  return t.data;
}

static char *one(const char *path, mr_err *e) {
  return all_of(&path, 1, e);
}

static void every_packing_gives_the_text(void **state) {
  (void)state;
  static const struct {
    const char *name;
    int filter;
  } forms[] = {{"p.jsonl", ARCHIVE_FILTER_NONE},      {"g.jsonl.gz", ARCHIVE_FILTER_GZIP},
               {"z.jsonl.zst", ARCHIVE_FILTER_ZSTD},  {"x.jsonl.xz", ARCHIVE_FILTER_XZ},
               {"b.jsonl.bz2", ARCHIVE_FILTER_BZIP2}, {"noname", ARCHIVE_FILTER_ZSTD}};
  enum { LEN = 700000 };
  char *text = malloc(LEN + 1);
  for (int i = 0; i < LEN; i++)
    text[i] = "abcdefg\n"[(i * 7 + i / 1000) % 8];
  text[LEN] = '\0';
  for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
    mr_err e = MR_ERR_INIT;
    char *got = one(pack(forms[i].name, forms[i].filter, text, LEN), &e);
    assert_int_equal(e.code, MR_OK);
    assert_string_equal(strchr(got, '|') + 1, text);
  }
  free(text);
}

static void cut_or_changed_data_is_refused(void **state) {
  (void)state;
  static const struct {
    const char *name;
    int filter;
  } forms[] = {{"g.jsonl.gz", ARCHIVE_FILTER_GZIP},
               {"x.jsonl.xz", ARCHIVE_FILTER_XZ},
               {"b.jsonl.bz2", ARCHIVE_FILTER_BZIP2},
               {"z.jsonl.zst", ARCHIVE_FILTER_ZSTD}};
  char text[5000];
  for (size_t i = 0; i < sizeof text; i++)
    text[i] = (char)('a' + i * i % 23);
  for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
    const char *path = pack(forms[i].name, forms[i].filter, text, sizeof text);
    FILE *f = fopen(path, "rb");
    static char bytes[8192];
    size_t n = fread(bytes, 1, sizeof bytes, f);
    fclose(f);
    mr_err e = MR_ERR_INIT;
    one(temp_write(forms[i].name, bytes, n - 6), &e);
    assert_int_equal(e.code, MR_E_DATA);
    assert_non_null(strstr(e.file, forms[i].name));
    bytes[n / 2] ^= 4;
    if (forms[i].filter == ARCHIVE_FILTER_ZSTD)
      continue; /* libarchive writes zstd frames without a checksum */
    one(temp_write(forms[i].name, bytes, n), &e);
    assert_int_equal(e.code, MR_E_DATA);
  }
}

/* bzip2 ends where the head of the next stream is not whole, and libarchive is silent about it. */
static void bzip2_streams_whose_head_is_broken_are_refused(void **state) {
  (void)state;
  mr_err e = MR_ERR_INIT;
  static char bytes[4096];
  FILE *f = fopen(pack("b.jsonl.bz2", ARCHIVE_FILTER_BZIP2, "{}\n", 3), "rb");
  size_t n = fread(bytes, 1, sizeof bytes / 2, f);
  fclose(f);
  memcpy(bytes + n, bytes, n);
  assert_string_equal(one(temp_write("b.jsonl.bz2", bytes, 2 * n), &e), "b.jsonl.bz2|{}\n{}\n");
  assert_int_equal(e.code, MR_OK);
  for (size_t cut = 3; cut < 2 * n; cut++) {
    one(temp_write("b.jsonl.bz2", bytes, cut), &e);
    assert_int_equal(e.code, cut == n ? MR_OK : MR_E_DATA);
  }
  for (size_t at = n; at < n + 10; at++) {
    bytes[at] ^= 64;
    one(temp_write("b.jsonl.bz2", bytes, 2 * n), &e);
    assert_int_equal(e.code, MR_E_DATA);
    assert_non_null(strstr(e.file, "b.jsonl.bz2"));
    bytes[at] ^= 64;
  }
}

static void gzip_members_follow_each_other(void **state) {
  (void)state;
  static char bytes[4096];
  size_t n = 0;
  mr_err e = MR_ERR_INIT;
  for (int i = 0; i < 2; i++) {
    FILE *f =
        fopen(pack("one.gz", ARCHIVE_FILTER_GZIP, i ? "second\n" : "first\n", i ? 7 : 6), "rb");
    n += fread(bytes + n, 1, sizeof bytes - n, f);
    fclose(f);
  }
  assert_string_equal(one(temp_write("two.jsonl.gz", bytes, n), &e),
                      "two.jsonl.gz|first\nsecond\n");
  memset(bytes + n, 0, 512);
  assert_string_equal(one(temp_write("two.jsonl.gz", bytes, n + 512), &e),
                      "two.jsonl.gz|first\nsecond\n");
  assert_int_equal(e.code, MR_OK);
  bytes[n + 500] = 'x';
  one(temp_write("two.jsonl.gz", bytes, n + 512), &e);
  assert_int_equal(e.code, MR_E_DATA);
}

static void names_that_promise_packing_must_keep_it(void **state) {
  (void)state;
  mr_err e = MR_ERR_INIT;
  one(temp_text("plain.jsonl.gz", "{}\n"), &e);
  assert_int_equal(e.code, MR_E_DATA);
  one(temp_text("empty.jsonl.zst", ""), &e);
  assert_int_equal(e.code, MR_E_DATA);
  one(temp_text("text.tar", "{}\n"), &e);
  assert_int_equal(e.code, MR_E_DATA);
  assert_string_equal(one(temp_text("empty.jsonl", ""), &e), "empty.jsonl|");
  assert_int_equal(e.code, MR_OK);
}

static void archives_give_their_rows(void **state) {
  (void)state;
  const member m[] = {{"a/", NULL, NULL, AE_IFDIR},
                      {"a/one.jsonl", NULL, "1\n", 0},
                      {"README", NULL, "no", 0},
                      {"two.ndjson", NULL, "2", 0}};
  mr_err e = MR_ERR_INIT;
  for (int i = 0; i < 3; i++) {
    const char *name = i == 0 ? "t.tar" : i == 1 ? "t.tar.gz" : "t.zip";
    char *got = one(
        pack_members(name, i == 2, i == 1 ? ARCHIVE_FILTER_GZIP : ARCHIVE_FILTER_NONE, m, 4), &e);
    assert_int_equal(e.code, MR_OK);
    assert_non_null(strstr(got, "one.jsonl|1\n"));
    assert_non_null(strstr(got, ":two.ndjson|2"));
    assert_null(strstr(got, "README"));
  }
}

static void unsafe_members_refuse_the_archive(void **state) {
  (void)state;
  static const member bad[] = {
      {"/abs.jsonl", NULL, "1", 0},       {"../up.jsonl", NULL, "1", 0},
      {"a/../../up.jsonl", NULL, "1", 0}, {"l.jsonl", "/etc/passwd", NULL, AE_IFLNK},
      {"f.jsonl", NULL, NULL, AE_IFIFO},  {"d.jsonl", NULL, NULL, AE_IFCHR},
      {"a.jsonl.gz", NULL, "1", 0},       {"only.txt", NULL, "1", 0}};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    mr_err e = MR_ERR_INIT;
    one(pack_members("bad.tar", false, ARCHIVE_FILTER_NONE, &bad[i], 1), &e);
    if (e.code != MR_E_DATA)
      fail_msg("%s was not refused", bad[i].path);
  }
  const member dots = {"a..b/c..jsonl/..d.jsonl", NULL, "1", 0};
  mr_err e = MR_ERR_INIT;
  one(pack_members("ok.tar", false, ARCHIVE_FILTER_NONE, &dots, 1), &e);
  assert_int_equal(e.code, MR_OK);
}

static void directories_and_globs(void **state) {
  (void)state;
  mr_err e = MR_ERR_INIT;
  assert_int_equal(mkdir(temp_path("in[1]"), 0777), 0);
  temp_text("in[1]/b.jsonl", "b");
  temp_text("in[1]/a.jsonl", "a");
  temp_text("in[1]/note.txt", "no");
  assert_string_equal(one(temp_path("in[1]"), &e), "a.jsonl|ab.jsonl|b");
  temp_text("g1.jsonl", "1");
  temp_text("g2.jsonl", "2");
  assert_string_equal(one(temp_path("g?.jsonl"), &e), "g1.jsonl|1g2.jsonl|2");
  one(temp_path("h*.jsonl"), &e);
  assert_int_equal(e.code, MR_E_NOINPUT);
  one(temp_path("none.jsonl"), &e);
  assert_int_equal(e.code, MR_E_NOINPUT);
  assert_int_equal(mkdir(temp_path("void"), 0777), 0);
  one(temp_path("void"), &e);
  assert_int_equal(e.code, MR_E_NOINPUT);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_packing_gives_the_text),
      cmocka_unit_test(cut_or_changed_data_is_refused),
      cmocka_unit_test(bzip2_streams_whose_head_is_broken_are_refused),
      cmocka_unit_test(gzip_members_follow_each_other),
      cmocka_unit_test(names_that_promise_packing_must_keep_it),
      cmocka_unit_test(archives_give_their_rows),
      cmocka_unit_test(unsafe_members_refuse_the_archive),
      cmocka_unit_test(directories_and_globs),
  };
  return cmocka_run_group_tests(tests, temp_begin, temp_end);
}
