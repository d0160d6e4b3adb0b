#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "io/mem.h"
#include "io/safetensors.h"
#include "kernels/dtype.h"
#include "tests/unit/temp.h"

#define TWO                                                                                        \
  "{\"__metadata__\":{\"format\":\"pt\"},"                                                         \
  "\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},"                             \
  "\"b.c\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[24,32]}}"

/* A file of this header and so many bytes of data; `len` is what it says of its header. */
static void put(const char *name, const char *header, uint64_t len, size_t data) {
  size_t n = strlen(header);
  uint8_t *all = calloc(8 + n + data, 1);
  assert_non_null(all);
  for (int i = 0; i < 8; i++)
    all[i] = (uint8_t)(len >> 8 * i);
  memcpy(all + 8, header, n);
  for (size_t i = 0; i < data; i++)
    all[8 + n + i] = (uint8_t)(i + 1);
  temp_write(name, all, 8 + n + data);
  free(all);
}

static void put_model(const char *header, size_t data) {
  put("model.safetensors", header, strlen(header), data);
}

static void refused(const char *wanted) {
  mr_safetensors *s;
  mr_err err = MR_ERR_INIT;
  assert_int_equal(mr_safetensors_open(&s, temp_dir, &err), MR_E_DATA);
  assert_null(s);
  if (!strstr(err.text, wanted))
    fail_msg("\"%s\" does not say \"%s\"", err.text, wanted);
}

static void reads(void **state) {
  (void)state;
  mr_safetensors *s;
  mr_err err = MR_ERR_INIT;
  put_model(TWO, 32);
  assert_int_equal(mr_safetensors_open(&s, temp_dir, &err), MR_OK);
  assert_int_equal(mr_safetensors_n(s), 2);
  const mr_gguf_tensor *a = mr_safetensors_find(s, "a"), *b = mr_safetensors_find(s, "b.c");
  assert_int_equal(a->dtype, MR_F32);
  assert_int_equal(a->dims[0], 3); /* the contiguous one */
  assert_int_equal(a->dims[1], 2);
  assert_int_equal(b->dtype, MR_BF16);
  assert_int_equal(b->data[0], 25);
  assert_null(mr_safetensors_find(s, "__metadata__"));
  mr_safetensors_close(s);
}

/* Dimensions beyond the fourth are one with it. */
static void many_dimensions(void **state) {
  (void)state;
  mr_safetensors *s;
  mr_err err = MR_ERR_INIT;
  put_model("{\"x\":{\"dtype\":\"U8\",\"shape\":[2,3,1,2,5],\"data_offsets\":[0,60]}}", 60);
  assert_int_equal(mr_safetensors_open(&s, temp_dir, &err), MR_OK);
  const mr_gguf_tensor *t = mr_safetensors_at(s, 0);
  assert_int_equal(t->n_dims, 4);
  assert_true(t->dims[0] == 5 && t->dims[1] == 2 && t->dims[2] == 1 && t->dims[3] == 6);
  mr_safetensors_close(s);
}

/* The reader's numbers and widths are those of kernels/dtype. */
static void types(void **state) {
  (void)state;
  static const char *const names[] = {"F32", "F16", "BF16", "F64",    "I8",
                                      "I32", "I64", "U8",   "F8_E4M3"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    for (int width = 1; width <= 8; width++) {
      char header[256];
      mr_safetensors *s;
      mr_err err = MR_ERR_INIT;
      snprintf(header, sizeof header,
               "{\"x\":{\"dtype\":\"%s\",\"shape\":[],\"data_offsets\":[0,%d]}}", names[i], width);
      put_model(header, 8);
      if (mr_safetensors_open(&s, temp_dir, &err))
        continue;
      const mr_dtype_info *info = mr_dtype_get(mr_safetensors_at(s, 0)->dtype);
      assert_string_equal(info->name, names[i]);
      assert_int_equal(info->block_bytes, width);
      mr_safetensors_close(s);
      break;
    }
}

static void one(const char *fields, const char *wanted) {
  char header[256];
  snprintf(header, sizeof header, "{\"x\":{%s}}", fields);
  put_model(header, 32);
  refused(wanted);
}

static void hostile(void **state) {
  (void)state;
  put("model.safetensors", TWO, 1ull << 60, 32);
  refused("header would have");
  put("model.safetensors", TWO, strlen(TWO) + 33, 32);
  refused("header would have");
  put("model.safetensors", TWO, 0, 32);
  refused("header would have");
  put_model("[]", 32);
  refused("must be an object");
  put_model("{\"a\":{}, \"a\":{}}", 32);
  refused("");
  one("\"dtype\":\"F31\",\"shape\":[1],\"data_offsets\":[0,4]", "dtype");
  one("\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,4]", "shape");
  one("\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]", "shape");
  one("\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]", "shape");
  one("\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]", "shape");
  one("\"dtype\":\"F32\",\"shape\":[9],\"data_offsets\":[0,36]", "outside");
  one("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[8,4]", "outside");
  one("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]", "outside");
  one("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]", "outside");
  one("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,8]", "do not fit");
  put_model("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
            "\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}",
            32);
  refused("overlaps");
}

static void shards(void **state) {
  (void)state;
  mr_safetensors *s;
  mr_err err = MR_ERR_INIT;
  const char *more = "{\"d\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[0,4]}}";
  put("1.safetensors", TWO, strlen(TWO), 32);
  put("2.safetensors", more, strlen(more), 4);
  temp_text("model.safetensors.index.json",
            "{\"weight_map\":{\"a\":\"1.safetensors\",\"d\":\"2.safetensors\"}}");
  assert_int_equal(mr_safetensors_open(&s, temp_dir, &err), MR_OK);
  assert_int_equal(mr_safetensors_n_files(s), 2);
  assert_int_equal(mr_safetensors_find(s, "d")->file, 1);
  mr_safetensors_close(s);
  temp_text("model.safetensors.index.json", "{\"weight_map\":{\"z\":\"1.safetensors\"}}");
  refused("tensor z is in no shard");
  temp_text("model.safetensors.index.json", "{\"weight_map\":{\"a\":\"../x.safetensors\"}}");
  refused("outside the directory");
  temp_text("model.safetensors.index.json", "{\"weight_map\":3}");
  refused("weight_map is missing");
  put("2.safetensors", TWO, strlen(TWO), 32);
  temp_text("model.safetensors.index.json",
            "{\"weight_map\":{\"a\":\"1.safetensors\",\"d\":\"2.safetensors\"}}");
  refused("another file has");
  unlink(temp_path("model.safetensors.index.json"));
}

/* Any damaged byte of the header is refused or read, never worse. */
static void damaged(void **state) {
  (void)state;
  char header[] = TWO;
  static const char other[] = {0, '"', '9', '}', ',', '-', 'x', (char)0xff};
  for (size_t i = 0; i + 1 < sizeof header; i++)
    for (size_t k = 0; k < sizeof other; k++) {
      mr_safetensors *s;
      mr_err err = MR_ERR_INIT;
      char old = header[i];
      header[i] = other[k];
      size_t n = sizeof header - 1;
      uint8_t all[8 + sizeof header + 32] = {(uint8_t)n, (uint8_t)(n >> 8)};
      memcpy(all + 8, header, n);
      temp_write("model.safetensors", all, 8 + n + 32);
      if (mr_safetensors_open(&s, temp_dir, &err) == MR_OK)
        mr_safetensors_close(s);
      else
        assert_true(err.text[0] != 0);
      header[i] = old;
    }
}

static void missing(void **state) {
  (void)state;
  mr_safetensors *s;
  mr_err err = MR_ERR_INIT;
  unlink(temp_path("model.safetensors"));
  assert_int_equal(mr_safetensors_open(&s, temp_dir, &err), MR_E_NOINPUT);
}

static void every_allocation_may_fail(void **state) {
  (void)state;
  int64_t live = mr_mem_live();
  put_model(TWO, 32);
  for (int n = 0;; n++) {
    mr_safetensors *s;
    mr_err err = MR_ERR_INIT;
    mr_mem_fail_after(n);
    mr_code rc = mr_safetensors_open(&s, temp_dir, &err);
    mr_mem_fail_after(-1);
    if (rc == MR_OK) {
      mr_safetensors_close(s);
      break;
    }
    assert_null(s);
    assert_int_equal(mr_mem_live(), live);
  }
  assert_int_equal(mr_mem_live(), live);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(reads),           cmocka_unit_test(types),
      cmocka_unit_test(many_dimensions), cmocka_unit_test(hostile),
      cmocka_unit_test(shards),          cmocka_unit_test(damaged),
      cmocka_unit_test(missing),         cmocka_unit_test(every_allocation_may_fail),
  };
  return cmocka_run_group_tests(tests, temp_begin, temp_end);
}
