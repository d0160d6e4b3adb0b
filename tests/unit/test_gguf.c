#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <cmocka.h>
#include <jansson.h>
#include <xxhash.h>

#include "conformance.h"
#include "gguf_builder.h"
#include "io/gguf.h"
#include "io/mem.h"

static mr_gguf *opened(build *b) {
  mr_err e = MR_ERR_INIT;
  mr_gguf *g = NULL;
  const char *path = build_file(b);
  if (mr_gguf_open(&g, path, &e))
    fail_msg("%s", e.text);
  build_remove(path); /* the mapping stays */
  return g;
}

/* The file is refused with MR_E_DATA, and the message holds `words`. */
static void refused_bytes(const void *p, size_t n, const char *words) {
  mr_err e = MR_ERR_INIT;
  mr_gguf *g = NULL;
  const char *path = build_write("bad.gguf", p, n);
  int64_t live = mr_mem_live();
  mr_code rc = mr_gguf_open(&g, path, &e);
  build_remove(path);
  if (rc != MR_E_DATA || g || !strstr(e.text, words))
    fail_msg("code %d \"%s\", wanted \"%s\"", rc, e.text, words);
  assert_int_equal(mr_mem_live(), live);
}

static void refused(build *b, const char *words) {
  mr_text t = build_bytes(b);
  refused_bytes(t.data, t.len, words);
  mr_text_free(&t);
}

static void reads_all_types(void **state) {
  (void)state;
  build b = {0};
  int8_t i8 = -5;
  uint16_t u16 = 65535;
  int64_t i64 = -7;
  uint64_t u64 = UINT64_MAX;
  double f64 = 0.25, huge = 1e300;
  uint8_t yes = 1;
  build_raw(&b, "i8", MR_GGUF_I8, &i8, 1);
  build_raw(&b, "u16", MR_GGUF_U16, &u16, 2);
  build_raw(&b, "i64", MR_GGUF_I64, &i64, 8);
  build_raw(&b, "u64", MR_GGUF_U64, &u64, 8);
  build_raw(&b, "f64", MR_GGUF_F64, &f64, 8);
  build_raw(&b, "huge", MR_GGUF_F64, &huge, 8);
  build_raw(&b, "yes", MR_GGUF_BOOL, &yes, 1);
  build_f32(&b, "f32", 1.5f);
  build_str(&b, "text", "abc");
  mr_gguf *g = opened(&b);
  uint32_t u = 0;
  float f = 0;
  bool t = false;
  mr_str s;
  mr_err e = MR_ERR_INIT;
  assert_true(mr_gguf_u32(g, "u16", &u, &e) && u == 65535);
  assert_true(mr_gguf_f32(g, "f64", &f, &e) && f == 0.25f);
  assert_true(mr_gguf_f32(g, "f32", &f, &e) && f == 1.5f);
  assert_true(mr_gguf_bool(g, "yes", &t, &e) && t);
  assert_true(mr_gguf_str(g, "text", &s, &e) && s.len == 3 && memcmp(s.s, "abc", 3) == 0);
  assert_false(mr_gguf_u32(g, "absent", &u, &e));
  assert_int_equal(e.code, MR_OK);
  assert_int_equal(mr_gguf_item_int(mr_gguf_find(g, "i64"), 0), -7);
  assert_int_equal(mr_gguf_item_int(mr_gguf_find(g, "i8"), 0), -5);
  assert_int_equal(mr_gguf_item_int(mr_gguf_find(g, "u64"), 0), INT64_MAX);
  assert_int_equal(mr_gguf_item_int(mr_gguf_find(g, "i8"), 1), 0);
  static const char *const wrong[] = {"i8", "i64", "u64", "f32", "text", "yes"};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    mr_err_clear(&e);
    assert_false(mr_gguf_u32(g, wrong[i], &u, &e));
    assert_int_equal(e.code, MR_E_DATA);
    assert_non_null(strstr(e.text, wrong[i]));
    assert_true(e.offset > 0);
  }
  mr_err_clear(&e);
  assert_false(mr_gguf_f32(g, "huge", &f, &e));
  assert_int_equal(e.code, MR_E_DATA);
  mr_err_clear(&e);
  assert_false(mr_gguf_str(g, "i8", &s, &e) || mr_gguf_bool(g, "i8", &t, &e));
  assert_int_equal(e.code, MR_E_DATA);
  mr_gguf_close(g);
}

static void reads_arrays(void **state) {
  (void)state;
  build b = {0};
  int16_t v[3] = {1, -2, 3};
  mr_text strings = {0}, nested = {0};
  put_str(&strings, "one", 3);
  put_str(&strings, "", 0);
  put_str(&strings, "three", 5);
  put_u32(&nested, MR_GGUF_U8);
  put_u64(&nested, 2);
  put(&nested, "ab", 2);
  build_array(&b, "numbers", MR_GGUF_I16, 3, v, sizeof v);
  build_array(&b, "strings", MR_GGUF_STRING, 3, strings.data, strings.len);
  build_array(&b, "nested", MR_GGUF_ARRAY, 1, nested.data, nested.len);
  build_u32(&b, "after", 9);
  mr_gguf *g = opened(&b);
  const mr_gguf_kv *kv = mr_gguf_find(g, "numbers");
  assert_int_equal(kv->count, 3);
  assert_int_equal(mr_gguf_item_int(kv, 1), -2);
  assert_true(mr_gguf_item_real(kv, 2) == 3.0);
  kv = mr_gguf_find(g, "strings");
  uint64_t at = 0;
  assert_int_equal(mr_gguf_item_str(kv, &at).len, 3);
  assert_int_equal(mr_gguf_item_str(kv, &at).len, 0);
  assert_memory_equal(mr_gguf_item_str(kv, &at).s, "three", 5);
  assert_null(mr_gguf_item_str(kv, &at).s); /* past the end */
  uint32_t u;
  assert_true(mr_gguf_u32(g, "after", &u, NULL) && u == 9);
  mr_gguf_close(g);
  mr_text_free(&strings);
  mr_text_free(&nested);
}

static void reads_tensors(void **state) {
  (void)state;
  float v[4] = {1, 2, 3, 4};
  for (uint32_t align = 8; align <= 4096; align *= 8) {
    build b = {.align = align, .version = 2};
    build_u32(&b, "general.alignment", align);
    build_tensor(&b, "a", MR_Q4_0, 64, 3, NULL);
    build_tensor(&b, "b", MR_F32, 4, 0, v);
    mr_gguf *g = opened(&b);
    assert_int_equal(mr_gguf_version(g), 2);
    assert_int_equal(mr_gguf_n_tensors(g), 2);
    const mr_gguf_tensor *a = mr_gguf_find_tensor(g, "a"), *t = mr_gguf_find_tensor(g, "b");
    assert_null(mr_gguf_find_tensor(g, "c"));
    assert_int_equal(a->bytes, 108);
    assert_int_equal(a->dims[0], 64);
    assert_int_equal(a->dims[1], 3);
    assert_int_equal(a->dims[3], 1);
    assert_int_equal((uintptr_t)t->data % align, 0);
    assert_memory_equal(t->data, v, sizeof v);
    mr_gguf_close(g);
  }
}

static void finds_among_many(void **state) {
  (void)state;
  build b = {0};
  char name[32];
  for (uint32_t i = 0; i < 20000; i++) {
    snprintf(name, sizeof name, "key.%u", i);
    build_u32(&b, name, i * 3);
  }
  mr_gguf *g = opened(&b);
  for (uint32_t i = 0; i < 20000; i++) {
    uint32_t v = 0;
    snprintf(name, sizeof name, "key.%u", i);
    assert_true(mr_gguf_u32(g, name, &v, NULL) && v == i * 3);
  }
  assert_null(mr_gguf_find(g, "key.20000"));
  mr_gguf_close(g);
}

static void refuses_bad_heads(void **state) {
  (void)state;
  refused_bytes("", 0, "empty");
  refused_bytes("GG", 2, "magic");
  refused_bytes("FUGG\0\0\0\3", 8, "big-endian");
  refused_bytes("ggufxxxxxxxxxxxxxxxxxxxxxxxx", 28, "no GGUF");
  refused_bytes("GGUF\1\0\0\0xxxxxxxxxxxxxxxxxxx", 28, "version 1");
  refused_bytes("GGUF\3\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\200", 24, "keys");
  refused_bytes("GGUF\3\0\0\0\0\0\0\0\0\0\0\200\0\0\0\0\0\0\0\0", 24, "tensors");
}

/* Every prefix of a good file is refused (the last byte is one of a tensor). */
static void refuses_every_cut(void **state) {
  (void)state;
  build b = {0};
  float v[8] = {1};
  mr_text strings = {0};
  put_str(&strings, "one", 3);
  build_llama_keys(&b);
  build_array(&b, "strings", MR_GGUF_STRING, 1, strings.data, strings.len);
  build_tensor(&b, "t", MR_F32, 8, 0, v);
  mr_text t = build_bytes(&b);
  for (size_t n = 0; n < t.len; n++)
    refused_bytes(t.data, n, "");
  mr_text_free(&t);
  mr_text_free(&strings);
}

static void refuses_bad_keys(void **state) {
  (void)state;
  build b = {0};
  build_u32(&b, "twice", 1);
  build_u32(&b, "twice", 1);
  refused(&b, "key twice is there twice");
  build_u32(&b, "", 1);
  refused(&b, "empty");
  build_raw(&b, "odd", 99, "xxxx", 4);
  refused(&b, "key odd has the unknown type 99");
  build_array(&b, "odd", 77, 1, "xxxxxxxx", 8);
  refused(&b, "unknown type 77");
  build_raw(&b, "maybe", MR_GGUF_BOOL, "\7", 1);
  refused(&b, "a bool holds 7");
  build_array(&b, "maybes", MR_GGUF_BOOL, 2, "\1\2", 2);
  refused(&b, "a bool holds 2");
  build_array(&b, "long", MR_GGUF_U64, UINT64_MAX / 8 + 2, "xxxxxxxx", 8);
  refused(&b, "key long says");
  build_array(&b, "many", MR_GGUF_STRING, (uint64_t)1 << 40, "xxxxxxxx", 8);
  refused(&b, "key many says");
  build_raw(&b, "text", MR_GGUF_STRING, "\377\377\377\377\377\377\377\377", 8);
  refused(&b, "key text says");
  static const uint32_t bad[] = {0, 1, 7, 31, 48, 1u << 31};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    build_u32(&b, "general.alignment", bad[i]);
    refused(&b, "power of two");
  }
  build_str(&b, "general.alignment", "32");
  refused(&b, "general.alignment is a string");
  build_str(&b, "bad\033[31m\n", "x");
  build_str(&b, "bad\033[31m\n", "x");
  refused(&b, "bad\\x1b[31m\\x0a");
}

static void refuses_deep_arrays(void **state) {
  (void)state;
  build b = {0};
  mr_text deep = {0};
  for (int i = 0; i < 5000; i++) {
    put_u32(&deep, MR_GGUF_ARRAY);
    put_u64(&deep, 1);
  }
  build_array(&b, "deep", MR_GGUF_ARRAY, 1, deep.data, deep.len);
  refused(&b, "nested");
  mr_text_free(&deep);
}

/* One tensor entry with these numbers over 4096 bytes of data. */
static void refused_tensor(const char *name, uint32_t n_dims, uint64_t d0, uint64_t d1,
                           uint32_t type, uint64_t offset, const char *words) {
  build b = {0};
  uint64_t dims[4] = {d0, d1, 1, 1};
  static const char zero[4096];
  build_info(&b, name, n_dims, dims, type, offset);
  put(&b.data, zero, sizeof zero);
  refused(&b, words);
}

static void refuses_bad_tensors(void **state) {
  (void)state;
  char longer[80] = {0};
  memset(longer, 'n', 65);
  refused_tensor("a", 0, 0, 0, MR_F32, 0, "0 dimensions");
  refused_tensor("a", 5, 1, 1, MR_F32, 0, "5 dimensions");
  refused_tensor("a", 1u << 31, 1, 1, MR_F32, 0, "dimensions");
  refused_tensor("a", 2, 0, 4, MR_F32, 0, "dimension 0 is 0");
  refused_tensor("a", 2, (uint64_t)1 << 32, (uint64_t)1 << 32, MR_F32, 0, "too large");
  refused_tensor("a", 2, (uint64_t)1 << 62, 4, MR_F32, 0, "too large");
  refused_tensor("a", 2, (uint64_t)1 << 63, 1, MR_F32, 0, "too large");
  refused_tensor("a", 1, (uint64_t)1 << 62, 1, MR_F64, 0, "too large");
  refused_tensor("a", 2, 33, 32, MR_Q8_0, 0, "whole number of blocks");
  refused_tensor("a", 2, 32, 32, 4, 0, "type 4");
  refused_tensor("a", 2, 32, 32, UINT32_MAX, 0, "type 4294967295");
  refused_tensor("a", 2, 32, 32, MR_F32, 33, "alignment");
  refused_tensor("a", 2, 32, 32, MR_F32, 32, "cut short");
  refused_tensor("a", 2, 32, 32, MR_F32, UINT64_MAX - 31, "cut short");
  refused_tensor("", 2, 32, 32, MR_F32, 0, "empty");
  refused_tensor(longer, 2, 32, 32, MR_F32, 0, "limit is 64");
  build b = {0};
  build_tensor(&b, "same", MR_F32, 8, 0, NULL);
  build_tensor(&b, "same", MR_F32, 8, 0, NULL);
  refused(&b, "tensor same is there twice");
  uint64_t dims[1] = {32};
  build_tensor(&b, "under", MR_F32, 64, 0, NULL);
  build_info(&b, "over", 1, dims, MR_F32, 128);
  refused(&b, "lies over tensor under");
  build_u32(&b, "k", 1);
  put(&b.data, "0123456789012345678901234567890123456789", 40);
  refused(&b, "no tensors, but");
}

static void split_part(build *b, uint32_t no, uint32_t count, const char *tensor) {
  uint16_t n = (uint16_t)no, c = (uint16_t)count;
  build_raw(b, "split.no", MR_GGUF_U16, &n, 2);
  build_raw(b, "split.count", MR_GGUF_U16, &c, 2);
  build_u32(b, "split.tensors.count", 2);
  build_tensor(b, tensor, MR_F32, 8, 0, NULL);
}

static void opens_split_files(void **state) {
  (void)state;
  build b = {0};
  mr_err e = MR_ERR_INIT;
  mr_gguf *g;
  char first[256];
  split_part(&b, 0, 2, "a");
  snprintf(first, sizeof first, "%s", build_named(&b, "m-00001-of-00002.gguf"));
  assert_int_equal(mr_gguf_open(&g, first, &e), MR_E_NOINPUT);
  assert_non_null(strstr(e.file, "m-00002-of-00002.gguf"));
  assert_non_null(strstr(e.text, "part 2 of 2"));

  split_part(&b, 1, 2, "b");
  const char *second = build_named(&b, "m-00002-of-00002.gguf");
  mr_err_clear(&e);
  assert_int_equal(mr_gguf_open(&g, second, &e), MR_E_DATA);
  assert_non_null(strstr(e.text, "give its first part"));
  mr_err_clear(&e);
  assert_int_equal(mr_gguf_open(&g, first, &e), MR_OK);
  assert_int_equal(mr_gguf_files(g), 2);
  assert_int_equal(mr_gguf_n_tensors(g), 2);
  assert_int_equal(mr_gguf_find_tensor(g, "b")->file, 1);
  mr_gguf_close(g);

  split_part(&b, 1, 2, "a"); /* a tensor that the first part has */
  build_named(&b, "m-00002-of-00002.gguf");
  assert_int_equal(mr_gguf_open(&g, first, &e), MR_E_DATA);
  assert_non_null(strstr(e.text, "twice"));
  mr_err_clear(&e);
  split_part(&b, 0, 2, "b"); /* the wrong part */
  build_named(&b, "m-00002-of-00002.gguf");
  assert_int_equal(mr_gguf_open(&g, first, &e), MR_E_DATA);
  mr_err_clear(&e);
  split_part(&b, 0, 2, "b"); /* a name without the pattern */
  assert_int_equal(mr_gguf_open(&g, build_named(&b, "m.gguf"), &e), MR_E_DATA);
  assert_non_null(strstr(e.text, "part 2 of 2"));
  unlink(build_path("m.gguf"));
  unlink(build_path("m-00002-of-00002.gguf"));
  build_remove(first);
}

static void a_single_split_is_whole(void **state) {
  (void)state;
  build b = {0};
  build_u32(&b, "split.count", 1);
  build_u32(&b, "split.no", 5);
  mr_gguf_close(opened(&b));
}

static void refuses_what_is_no_file(void **state) {
  (void)state;
  mr_err e = MR_ERR_INIT;
  mr_gguf *g;
  assert_int_equal(mr_gguf_open(&g, build_path("absent.gguf"), &e), MR_E_NOINPUT);
  mr_err_clear(&e);
  assert_int_equal(mr_gguf_open(&g, build_folder(), &e), MR_E_DATA);
  mr_err_clear(&e);
  const char *fifo = build_path("fifo");
  assert_int_equal(mkfifo(fifo, 0600), 0);
  assert_int_equal(mr_gguf_open(&g, fifo, &e), MR_E_DATA); /* and does not wait */
  build_remove(fifo);
}

static void digest_of_content(void **state) {
  (void)state;
  build b = {0};
  char got[33], want[33];
  build_llama_keys(&b);
  mr_text t = build_bytes(&b);
  const char *path = build_write("d.gguf", t.data, t.len);
  mr_gguf *g;
  assert_int_equal(mr_gguf_open(&g, path, NULL), MR_OK);
  assert_int_equal(mr_gguf_digest(g, got, NULL), MR_OK);
  XXH128_hash_t h = XXH3_128bits(t.data, t.len);
  snprintf(want, sizeof want, "%016llx%016llx", (unsigned long long)h.high64,
           (unsigned long long)h.low64);
  assert_string_equal(got, want);
  mr_gguf_close(g);
  build_remove(path);
  mr_text_free(&t);
}

static void shows_names(void **state) {
  (void)state;
  char buf[12];
  assert_string_equal(mr_gguf_show((mr_str){"ab\0c", 4}, buf, sizeof buf), "ab\\x00c");
  assert_string_equal(mr_gguf_show((mr_str){"0123456789abcdef", 16}, buf, sizeof buf),
                      "01234567...");
  assert_string_equal(mr_gguf_show((mr_str){"", 0}, buf, sizeof buf), "");
}

static void every_allocation_may_fail(void **state) {
  (void)state;
  build b = {0};
  build_llama_keys(&b);
  build_llama_tensors(&b, MR_F32, NULL);
  const char *path = build_file(&b);
  int64_t live = mr_mem_live();
  int n = 0;
  for (mr_code rc = MR_E_NOMEM; rc != MR_OK; n++) {
    mr_gguf *g;
    mr_err e = MR_ERR_INIT;
    mr_mem_fail_after(n);
    rc = mr_gguf_open(&g, path, &e);
    mr_mem_fail_after(-1);
    assert_true(rc == MR_OK || rc == MR_E_NOMEM);
    mr_gguf_close(g);
    assert_int_equal(mr_mem_live(), live);
    assert_true(n < 100);
  }
  assert_true(n > 5);
  build_remove(path);
}

/* What the reader itself decides; the metadata of a model is test_config's, its tensors
 * test_model's. */
static void conformance_files(void **state) {
  (void)state;
  const char *index = data_path("conformance/malformed/gguf.index.jsonl");
  if (!index)
    skip();
  char path[4096], line[4096];
  int root = (int)(strlen(index) - strlen(".index.jsonl")), n = 0;
  FILE *f = fopen(index, "r");
  snprintf(path, sizeof path, "%s", index);
  while (fgets(line, sizeof line, f)) {
    json_t *o = json_loads(line, 0, NULL);
    const char *file = json_string_value(json_object_get(o, "file"));
    const char *expect = json_string_value(json_object_get(o, "expect"));
    bool ours = strchr("thn", file[0]) && strncmp(file, "n-missing", 9) &&
                strcmp(file, "n-dims-1d.gguf") && strcmp(file, "n-name-64.gguf");
    mr_err e = MR_ERR_INIT;
    mr_gguf *g = NULL;
    snprintf(path + root, sizeof path - (size_t)root, "/%s", file);
    mr_code rc = mr_gguf_open(&g, path, &e);
    if ((rc && !e.text[0]) || (rc && strcmp(expect, "accept") == 0) ||
        (!rc && ours && strcmp(expect, "reject") == 0))
      fail_msg("%s: code %d %s", file, rc, e.text);
    mr_gguf_close(g);
    json_decref(o);
    n++;
  }
  fclose(f);
  assert_true(n > 40);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(reads_all_types),
      cmocka_unit_test(reads_arrays),
      cmocka_unit_test(reads_tensors),
      cmocka_unit_test(finds_among_many),
      cmocka_unit_test(refuses_bad_heads),
      cmocka_unit_test(refuses_every_cut),
      cmocka_unit_test(refuses_bad_keys),
      cmocka_unit_test(refuses_deep_arrays),
      cmocka_unit_test(refuses_bad_tensors),
      cmocka_unit_test(opens_split_files),
      cmocka_unit_test(a_single_split_is_whole),
      cmocka_unit_test(refuses_what_is_no_file),
      cmocka_unit_test(digest_of_content),
      cmocka_unit_test(shows_names),
      cmocka_unit_test(every_allocation_may_fail),
      cmocka_unit_test(conformance_files),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
