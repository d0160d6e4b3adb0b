#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "io/mem.h"
#include "io/safetensors_write.h"
#include "kernels/dtype.h"
#include "tests/unit/temp.h"

static const float values[6] = {1, 2, 3, 4, 5, 6};
static const int8_t bytes[3] = {-1, 0, 1};
static const int64_t matrix[2] = {3, 2}, vector[1] = {3}, none[1] = {0};

static mr_code write_all(mr_err *err) {
  mr_st_writer *w;
  mr_code rc = mr_st_write_open(&w, temp_path("model.safetensors"), err);
  if (rc)
    return rc;
  mr_st_write_tensor(w, "a \"b\"", MR_F32, 2, matrix);
  mr_st_write_tensor(w, "c", MR_I8, 1, vector);
  rc = mr_st_write_begin(w, err);
  if (!rc)
    rc = mr_st_write_data(w, values, 8, err);
  if (!rc)
    rc = mr_st_write_data(w, values + 2, 16, err);
  if (!rc)
    rc = mr_st_write_data(w, bytes, 3, err);
  if (!rc)
    rc = mr_st_write_finish(w, err);
  mr_st_write_free(w);
  return rc;
}

static void reads_back(void **state) {
  mr_err err = MR_ERR_INIT;
  mr_safetensors *s;
  (void)state;
  assert_int_equal(write_all(&err), MR_OK);
  assert_int_equal(mr_safetensors_open(&s, temp_dir, &err), MR_OK);
  const mr_gguf_tensor *a = mr_safetensors_find(s, "a \"b\""), *c = mr_safetensors_find(s, "c");
  assert_int_equal(mr_safetensors_n(s), 2);
  assert_true(a && a->dtype == MR_F32 && a->n_dims == 2 && a->dims[0] == 3 && a->dims[1] == 2);
  assert_memory_equal(a->data, values, sizeof values);
  assert_int_equal((uintptr_t)a->data % 8, 0);
  assert_true(c && c->dtype == MR_I8 && c->dims[0] == 3);
  assert_memory_equal(c->data, bytes, 3);
  mr_safetensors_close(s);
}

static void refuses(void **state) {
  (void)state;
  for (int what = 0; what < 5; what++) {
    mr_err err = MR_ERR_INIT;
    mr_st_writer *w;
    assert_int_equal(mr_st_write_open(&w, temp_path("x"), &err), MR_OK);
    mr_st_write_tensor(w, "a", what == 0 ? MR_Q4_0 : MR_F32, 1, what == 4 ? none : vector);
    if (what == 1)
      mr_st_write_tensor(w, "a", MR_F32, 1, vector);
    mr_code rc = mr_st_write_begin(w, &err);
    if (what < 2)
      assert_int_equal(rc, MR_E_INTERNAL);
    else if (what == 2)
      assert_int_equal(mr_st_write_finish(w, &err), MR_E_INTERNAL); /* no data */
    else if (what == 3)
      assert_int_equal(mr_st_write_data(w, values, 13, &err), MR_E_INTERNAL);
    else
      assert_int_equal(mr_st_write_finish(w, &err), MR_OK);
    mr_st_write_free(w);
  }
  mr_err err = MR_ERR_INIT;
  mr_st_writer *w;
  assert_int_equal(mr_st_write_open(&w, "/none/such", &err), MR_E_CANTCREATE);
}

static void allocations_fail(void **state) {
  mr_code rc = MR_E_NOMEM;
  (void)state;
  for (int n = 0; rc; n++) {
    mr_err err = MR_ERR_INIT;
    int64_t live = mr_mem_live();
    mr_mem_fail_after(n);
    rc = write_all(&err);
    mr_mem_fail_after(-1);
    assert_int_equal(mr_mem_live(), live);
    assert_true(rc == MR_OK || rc == MR_E_NOMEM);
    assert_true(n < 1000);
  }
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, temp_begin, temp_end)

int main(void) {
  const struct CMUnitTest tests[] = {TEST(reads_back), TEST(refuses), TEST(allocations_fail)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
