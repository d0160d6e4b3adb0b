#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>
#include <jansson.h>

#include "conformance.h"
#include "io/gguf.h"
#include "kernels/dtype.h"

static uint32_t bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}

static void halves_round_trip(void **state) {
  (void)state;
  for (uint32_t h = 0; h < 65536; h++) {
    float f = mr_f16_to_f32((uint16_t)h);
    if ((h & 0x7c00) == 0x7c00 && (h & 0x3ff)) {
      assert_true(isnan(f));
      assert_true(isnan(mr_f16_to_f32(mr_f32_to_f16(f))));
    } else {
      assert_int_equal(mr_f32_to_f16(f), h);
    }
    float b = mr_bf16_to_f32((uint16_t)h);
    if (!isnan(b))
      assert_int_equal(mr_f32_to_bf16(b), h);
  }
}

static void halves_of_known_values(void **state) {
  (void)state;
  assert_true(mr_f16_to_f32(0x3c00) == 1.0f);
  assert_true(mr_f16_to_f32(0x0001) == 0x1p-24f);
  assert_true(mr_f16_to_f32(0x03ff) == 1023 * 0x1p-24f);
  assert_true(mr_f16_to_f32(0x7bff) == 65504.0f);
  assert_true(isinf(mr_f16_to_f32(0xfc00)));
  assert_int_equal(bits(mr_f16_to_f32(0x8000)), 0x80000000);
  assert_int_equal(mr_f32_to_f16(65519.99f), 0x7bff);
  assert_int_equal(mr_f32_to_f16(65520.0f), 0x7c00);
  assert_int_equal(mr_f32_to_f16(-1e30f), 0xfc00);
  assert_int_equal(mr_f32_to_f16(0x1p-25f), 0);   /* half of the smallest: ties to even */
  assert_int_equal(mr_f32_to_f16(0x1.8p-24f), 2); /* 1.5: ties to even */
  assert_int_equal(mr_f32_to_f16(0x1.000002p-25f), 1);
  assert_int_equal(mr_f32_to_f16(1e-30f), 0);
  assert_int_equal(mr_f32_to_bf16(NAN) & 0x7fc0, 0x7fc0);
  assert_int_equal(mr_f32_to_bf16(INFINITY), 0x7f80);
}

/* Every float between two neighbouring halves rounds to the nearer, the middle to the even one. */
static void halves_round_to_nearest_even(void **state) {
  (void)state;
  for (uint32_t h = 0; h < 0x7bff; h++) {
    float a = mr_f16_to_f32((uint16_t)h), b = mr_f16_to_f32((uint16_t)(h + 1));
    float mid = a + (b - a) / 2; /* exact */
    assert_int_equal(mr_f32_to_f16(mid), h & 1 ? h + 1 : h);
    assert_int_equal(mr_f32_to_f16(nextafterf(mid, a)), h);
    assert_int_equal(mr_f32_to_f16(nextafterf(mid, b)), h + 1);
    assert_int_equal(mr_f32_to_f16(-mid), 0x8000 | (h & 1 ? h + 1 : h));
  }
}

static void sizes(void **state) {
  (void)state;
  assert_null(mr_dtype_get(-1)->name);
  assert_null(mr_dtype_get(4)->name);
  assert_null(mr_dtype_get(1000)->name);
  assert_int_equal(mr_dtype_bytes(MR_Q4_0, 64), 36);
  assert_int_equal(mr_dtype_bytes(MR_Q4_0, 63), 0);
  assert_int_equal(mr_dtype_bytes(4, 64), 0);
  assert_int_equal(mr_dtype_bytes(MR_F32, UINT64_MAX / 2), 0);
}

/* The file reader cannot include kernels/, so it has its own table of block sizes. */
static void sizes_agree_with_the_file_reader(void **state) {
  (void)state;
  int known = 0;
  for (int t = -2; t < MR_F8_E4M3; t++) { /* beyond: types that no GGUF file has */
    int elements = 0, bytes = 0;
    bool there = mr_gguf_block(t, &elements, &bytes);
    const mr_dtype_info *info = mr_dtype_get(t);
    assert_int_equal(there, info->name != NULL);
    assert_int_equal(elements, info->block);
    assert_int_equal(bytes, info->block_bytes);
    known += there;
  }
  assert_int_equal(known, 33);
}

static void blocks_made_by_hand(void **state) {
  (void)state;
  float y[256];
  uint8_t q4[18] = {0x00, 0x38}; /* d = 0.5 */
  q4[2] = 0x9f;
  mr_dtype_get(MR_Q4_0)->to_f32(y, q4, 32);
  assert_true(y[0] == 3.5f && y[16] == 0.5f && y[1] == -4.0f);

  uint8_t q8[34] = {0x01, 0x00}; /* d = 2^-24, the smallest half */
  q8[2] = 0x80;
  mr_dtype_get(MR_Q8_0)->to_f32(y, q8, 32);
  assert_true(y[0] == -128 * 0x1p-24f && y[1] == 0);

  uint8_t q81[36] = {0x00, 0x3c, 0x55, 0x55, 7};
  mr_dtype_get(MR_Q8_1)->to_f32(y, q81, 32);
  assert_true(y[0] == 7 && y[31] == 0);

  uint8_t q5[22] = {0x00, 0x3c, 0x01, 0x00, 0x01, 0x00, 0x21}; /* fifth bits of values 0 and 16 */
  mr_dtype_get(MR_Q5_0)->to_f32(y, q5, 32);
  assert_true(y[0] == 1 && y[16] == 2 && y[2] == -16);

  uint8_t q8k[292] = {0};
  float d = 0.25f;
  memcpy(q8k, &d, 4);
  q8k[4 + 255] = 0xff;
  mr_dtype_get(MR_Q8_K)->to_f32(y, q8k, 256);
  assert_true(y[255] == -0.25f && y[0] == 0);

  double v[2] = {1.5, -2};
  mr_dtype_get(MR_F64)->to_f32(y, v, 2);
  assert_true(y[0] == 1.5f && y[1] == -2.0f);
}

/* Blocks may lie anywhere: the same bytes one byte further on give the same values. */
static void any_alignment(void **state) {
  (void)state;
  for (int t = 0; t < 64; t++) {
    const mr_dtype_info *info = mr_dtype_get(t);
    if (!info->name || !info->to_f32 || info->block == 1)
      continue;
    uint8_t raw[304 + 1];
    float a[256], b[256];
    for (int i = 0; i < info->block_bytes; i++)
      raw[i] = (uint8_t)(i * 37 + 11) & 0x3b; /* small exponents */
    info->to_f32(a, raw, info->block);
    memmove(raw + 1, raw, (size_t)info->block_bytes);
    info->to_f32(b, raw + 1, info->block);
    assert_memory_equal(a, b, (size_t)info->block * sizeof *a);
  }
}

static int compare(const json_t *entry, char *root, size_t root_len) {
  int type = (int)json_integer_value(json_object_get(entry, "ggml_type"));
  int64_t blocks = json_integer_value(json_object_get(entry, "n_blocks"));
  const mr_dtype_info *info = mr_dtype_get(type);
  assert_non_null(info->name);
  assert_string_equal(info->name, json_string_value(json_object_get(entry, "type")));
  assert_int_equal(info->block, json_integer_value(json_object_get(entry, "block_elems")));
  assert_int_equal(info->block_bytes, json_integer_value(json_object_get(entry, "block_bytes")));
  if (!info->to_f32)
    return 0;
  char path[4096];
  size_t bytes, n = (size_t)(blocks * info->block);
  snprintf(path, sizeof path, "%.*s/%s", (int)root_len, root,
           json_string_value(json_object_get(entry, "bin")));
  char *bin = read_whole(path, &bytes);
  assert_int_equal(bytes, blocks * info->block_bytes);
  snprintf(path, sizeof path, "%.*s/%s", (int)root_len, root,
           json_string_value(json_object_get(entry, "expected")));
  char *expected = read_whole(path, &bytes);
  assert_int_equal(bytes, n * sizeof(float));
  float *got = malloc(n * sizeof *got);
  info->to_f32(got, bin, (int64_t)n);
  int exact = 1;
  for (size_t i = 0; i < n; i++) {
    float want;
    memcpy(&want, expected + i * sizeof want, sizeof want);
    exact &= bits(want) == bits(got[i]) || (want == 0 && got[i] == 0);
    if (fabsf(got[i] - want) > 1e-6f * fabsf(want))
      fail_msg("%s: value %zu is %.9g, not %.9g", path, i, (double)got[i], (double)want);
  }
  if (!exact)
    print_message("%s: equal but for a rounding\n", info->name);
  free(bin);
  free(expected);
  free(got);
  return 1;
}

static void conformance_blocks(void **state) {
  (void)state;
  const char *index = data_path("conformance/quants/index.json");
  if (!index)
    skip();
  char root[4096];
  snprintf(root, sizeof root, "%s", index);
  json_error_t e;
  json_t *all = json_load_file(root, 0, &e), *entry;
  size_t i;
  int done = 0;
  assert_non_null(all);
  json_t *list = json_is_array(all) ? all : json_object_get(all, "types");
  json_array_foreach(list, i, entry) done +=
      compare(entry, root, strlen(root) - strlen("/index.json"));
  json_decref(all);
  assert_true(done >= 18);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(halves_round_trip),
      cmocka_unit_test(halves_of_known_values),
      cmocka_unit_test(halves_round_to_nearest_even),
      cmocka_unit_test(sizes),
      cmocka_unit_test(sizes_agree_with_the_file_reader),
      cmocka_unit_test(blocks_made_by_hand),
      cmocka_unit_test(any_alignment),
      cmocka_unit_test(conformance_blocks),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
