#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "io/gguf_write.h"
#include "io/mem.h"
#include "tests/unit/temp.h"

static const int64_t shape[2] = {64, 3};
static float values[5];
static uint8_t blocks[108];

static mr_code write_all(const char *path, mr_err *err) {
  mr_gguf_writer *w;
  mr_code rc = mr_gguf_write_open(&w, path, err);
  if (rc)
    return rc;
  mr_gguf_write_str(w, "general.architecture", "llama", 5);
  mr_gguf_write_u32(w, "a.count", 7);
  mr_gguf_write_f32(w, "a.real", 0.25f);
  mr_gguf_write_bool(w, "a.flag", true);
  mr_gguf_write_array(w, "a.texts", MR_GGUF_STRING, 2);
  mr_gguf_write_item_str(w, "", 0);
  mr_gguf_write_item_str(w, "x y", 3);
  mr_gguf_write_array(w, "a.ids", MR_GGUF_I32, 2);
  mr_gguf_write_item_i32(w, -5);
  mr_gguf_write_item_i32(w, 6);
  mr_gguf_write_array(w, "a.scores", MR_GGUF_F32, 1);
  mr_gguf_write_item_f32(w, -1.5f);
  int64_t n = 5;
  mr_gguf_write_tensor(w, "v", 0, 1, &n);
  mr_gguf_write_tensor(w, "m.weight", 2, 2, shape);
  rc = mr_gguf_write_begin(w, err);
  if (!rc)
    rc = mr_gguf_write_data(w, values, 8, err);
  if (!rc)
    rc = mr_gguf_write_data(w, values + 2, 12, err);
  if (!rc)
    rc = mr_gguf_write_data(w, blocks, sizeof blocks, err);
  if (!rc)
    rc = mr_gguf_write_finish(w, err);
  mr_gguf_write_free(w);
  return rc;
}

static void reads_back(void **state) {
  mr_err err = MR_ERR_INIT;
  mr_gguf *g;
  uint32_t n;
  float x;
  bool flag;
  uint64_t at = 0;
  (void)state;
  for (int i = 0; i < 5; i++)
    values[i] = (float)i;
  memset(blocks, 0x5a, sizeof blocks);
  assert_int_equal(write_all(temp_path("a"), &err), MR_OK);
  assert_int_equal(access(temp_path("a.tmp"), F_OK), -1);
  assert_int_equal(mr_gguf_open(&g, temp_path("a"), &err), MR_OK);
  assert_int_equal(mr_gguf_version(g), 3);
  assert_int_equal(mr_gguf_n_kv(g), 7);
  assert_true(mr_gguf_u32(g, "a.count", &n, &err) && n == 7);
  assert_true(mr_gguf_f32(g, "a.real", &x, &err) && x == 0.25f);
  assert_true(mr_gguf_bool(g, "a.flag", &flag, &err) && flag);
  const mr_gguf_kv *kv = mr_gguf_find(g, "a.texts");
  assert_int_equal(mr_gguf_item_str(kv, &at).len, 0);
  assert_int_equal(mr_gguf_item_str(kv, &at).len, 3);
  assert_int_equal(mr_gguf_item_int(mr_gguf_find(g, "a.ids"), 0), -5);
  assert_true(mr_gguf_item_real(mr_gguf_find(g, "a.scores"), 0) == -1.5);
  const mr_gguf_tensor *v = mr_gguf_find_tensor(g, "v"), *m = mr_gguf_find_tensor(g, "m.weight");
  assert_memory_equal(v->data, values, sizeof values);
  assert_int_equal(m->dims[0], 64);
  assert_int_equal(m->dims[1], 3);
  assert_memory_equal(m->data, blocks, sizeof blocks);
  assert_int_equal((m->data - v->data) % 32, 0);
  mr_gguf_close(g);
}

static void keys_are_copied(void **state) {
  mr_err err = MR_ERR_INIT;
  mr_gguf *a, *b;
  mr_gguf_writer *w;
  (void)state;
  assert_int_equal(write_all(temp_path("a"), &err), MR_OK);
  assert_int_equal(mr_gguf_open(&a, temp_path("a"), &err), MR_OK);
  assert_int_equal(mr_gguf_write_open(&w, temp_path("b"), &err), MR_OK);
  for (size_t i = 0; i < mr_gguf_n_kv(a); i++)
    mr_gguf_write_copy(w, mr_gguf_kv_at(a, i));
  assert_int_equal(mr_gguf_write_begin(w, &err), MR_OK);
  assert_int_equal(mr_gguf_write_finish(w, &err), MR_OK);
  mr_gguf_write_free(w);
  assert_int_equal(mr_gguf_open(&b, temp_path("b"), &err), MR_OK);
  assert_int_equal(mr_gguf_n_kv(a), mr_gguf_n_kv(b));
  for (size_t i = 0; i < mr_gguf_n_kv(a); i++) {
    const mr_gguf_kv *x = mr_gguf_kv_at(a, i), *y = mr_gguf_kv_at(b, i);
    assert_int_equal(x->type, y->type);
    assert_int_equal(x->bytes, y->bytes);
    assert_memory_equal(x->data, y->data, x->bytes);
  }
  mr_gguf_close(a);
  mr_gguf_close(b);
}

static void refuses(void **state) {
  static const int64_t odd[2] = {33, 1}, none[1] = {0}, huge[2] = {INT64_MAX / 2, 4};
  mr_err err = MR_ERR_INIT;
  mr_gguf_writer *w;
  int64_t n = 4;
  char name[80];
  (void)state;
  memset(name, 'n', sizeof name);
  name[65] = 0; /* one more than the format takes */
  temp_text("kept", "old");
  assert_int_equal(mr_gguf_write_open(&w, temp_path("kept"), &err), MR_OK);
  assert_false(mr_gguf_write_tensor(w, "t", 2, 2, odd));
  assert_false(mr_gguf_write_tensor(w, "t", 0, 1, none));
  assert_false(mr_gguf_write_tensor(w, "t", 0, 2, huge));
  assert_false(mr_gguf_write_tensor(w, "t", 4, 1, &n));
  assert_false(mr_gguf_write_tensor(w, name, 0, 1, &n));
  assert_int_equal(mr_gguf_write_begin(w, &err), MR_E_INTERNAL);
  mr_gguf_write_free(w);
  mr_err_clear(&err);
  assert_int_equal(mr_gguf_write_open(&w, temp_path("kept"), &err), MR_OK);
  assert_true(mr_gguf_write_tensor(w, "t", 0, 1, &n));
  assert_int_equal(mr_gguf_write_begin(w, &err), MR_OK);
  assert_int_equal(mr_gguf_write_finish(w, &err), MR_E_INTERNAL); /* no data */
  mr_err_clear(&err);
  assert_int_equal(mr_gguf_write_data(w, blocks, 17, &err), MR_E_INTERNAL); /* too much */
  mr_gguf_write_free(w);
  FILE *f = fopen(temp_path("kept"), "r");
  assert_string_equal(fgets(name, 10, f), "old");
  fclose(f);
  mr_err_clear(&err);
  assert_int_equal(mr_gguf_write_open(&w, "/none/such/file", &err), MR_E_CANTCREATE);
  assert_null(w);
}

static void allocations_fail(void **state) {
  mr_code rc = MR_E_NOMEM;
  (void)state;
  for (int i = 0; rc; i++) {
    mr_err err = MR_ERR_INIT;
    int64_t live = mr_mem_live();
    mr_mem_fail_after(i);
    rc = write_all(temp_path("m"), &err);
    mr_mem_fail_after(-1);
    assert_int_equal(mr_mem_live(), live);
    assert_true(rc == MR_OK || rc == MR_E_NOMEM);
    assert_true(i < 1000);
  }
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, temp_begin, temp_end)

int main(void) {
  const struct CMUnitTest tests[] = {TEST(reads_back), TEST(keys_are_copied), TEST(refuses),
                                     TEST(allocations_fail)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
