/* Weights of few bits for the GPU: what a file of 4 or 8 bits holds stays, what is rounded stays
 * near, and odd rows (zeros, one value, huge, tiny) are finite. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/dtype.h"
#include "kernels/encode.h"
#include "src/gpu_few.h"

enum { K = 320 };

static uint32_t seed = 7;

static float uniform(void) { /* -1 .. 1 */
  seed = seed * 1664525u + 1013904223u;
  return (float)(seed >> 8) / (float)(1 << 23) - 1;
}

/* A row through the format. */
static void there_and_back(mr_gpu_hold hold, const float *row, int n, float *to) {
  static uint8_t w[K];
  static uint16_t scales[2 * K / MR_GPU_GROUP];
  float unit;
  mr_gpu_few_row(hold, row, n, K, w, scales, &unit);
  for (int i = 0; i < K; i++) {
    int g = i / MR_GPU_GROUP;
    to[i] = hold == MR_GPU_INT8
                ? (float)(int8_t)w[i] * (mr_f16_to_f32(scales[g]) * unit)
                : fmaf((float)(w[i / 2] >> (i % 2 * 4) & 15), mr_f16_to_f32(scales[2 * g]) * unit,
                       mr_f16_to_f32(scales[2 * g + 1]) * unit);
  }
}

/* Values that such a file holds come back within what rounding them to bfloat16 would cost. */
static void check_file(mr_dtype type, mr_gpu_hold hold, bool fits, float size) {
  const mr_dtype_info *info = mr_dtype_get(type);
  static uint8_t block[K * 4];
  static float row[K], back[K], room[K];
  for (int i = 0; i < K; i++)
    row[i] = uniform() * size * (float)(1 + i / 32);
  mr_matrix w = {.n = 1, .k = K, .dtype = (int)type, .data = block};
  w.row_bytes = mr_dtype_bytes((int)type, K);
  mr_encoder encode = mr_encoder_get((int)type);
  assert_non_null(encode);
  encode(block, row, NULL, K);
  info->to_f32(row, block, K);
  assert_int_equal(mr_gpu_fits_int4(&w, room), fits);
  there_and_back(hold, row, K, back);
  for (int g = 0; g < K; g += 32) {
    float most = 0;
    for (int i = g; i < g + 32; i++)
      most = fmaxf(most, fabsf(row[i]));
    for (int i = g; i < g + 32; i++)
      if (!(fabsf(back[i] - row[i]) <= most * (fits || type == MR_Q8_0 ? 0x1p-9f : 1 / 250.0f)))
        fail_msg("%s: %g came back as %g (group's largest %g)", info->name, (double)row[i],
                 (double)back[i], (double)most);
  }
}

static void files_keep_their_values(void **state) {
  (void)state;
  static const float sizes[] = {1, 1e-3f, 3e-7f, 2e4f};
  for (size_t i = 0; i < 4; i++) {
    check_file(MR_Q4_0, MR_GPU_INT4, true, i == 2 ? 1e-5f : sizes[i]);
    check_file(MR_Q4_1, MR_GPU_INT4, true, i == 2 ? 1e-5f : sizes[i]);
    check_file(MR_Q8_0, MR_GPU_INT8, false, i == 2 ? 1e-4f : sizes[i]);
    check_file(MR_Q5_0, MR_GPU_INT8, false, i == 2 ? 1e-4f : sizes[i]);
    check_file(MR_BF16, MR_GPU_INT8, false, sizes[i]);
  }
}

static void others_are_rounded(void **state) {
  (void)state;
  static float row[K], back[K];
  for (int i = 0; i < K; i++)
    row[i] = uniform();
  there_and_back(MR_GPU_INT4, row, K, back);
  for (int i = 0; i < K; i++)
    assert_true(fabsf(back[i] - row[i]) <= 2.0f / 30 * 1.01f);
}

static void odd_rows(void **state) {
  (void)state;
  static float row[K], back[K];
  for (int kind = 0; kind < 5; kind++)
    for (int h = MR_GPU_INT8; h <= MR_GPU_INT4; h++) {
      for (int i = 0; i < K; i++)
        row[i] = kind == 0   ? 0
                 : kind == 1 ? -3
                 : kind == 2 ? 1e-42f * (float)i
                 : kind == 3 ? 3e38f * uniform()
                             : (i == 40 ? 1e6f : 1e-6f * uniform());
      there_and_back((mr_gpu_hold)h, row, K - 7, back);
      for (int i = 0; i < K; i++)
        assert_true(isfinite(back[i]));
      if (kind == 0 || kind == 1)
        for (int i = 0; i < K - 7; i++)
          assert_true(fabsf(back[i] - row[i]) <= 0.002f);
      if (kind == 4)
        assert_true(fabsf(back[40] / 1e6f - 1) < 1e-3f);
    }
}

static void bits_of_a_file(void **state) {
  (void)state;
  assert_true(mr_gpu_file_bits(&(mr_matrix){.dtype = MR_Q4_1}) == 5);
  assert_true(mr_gpu_file_bits(&(mr_matrix){.dtype = MR_Q8_0}) == 8.5);
  assert_true(mr_gpu_file_bits(&(mr_matrix){.dtype = MR_BF16}) == 16);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(files_keep_their_values),
      cmocka_unit_test(others_are_rounded),
      cmocka_unit_test(odd_rows),
      cmocka_unit_test(bits_of_a_file),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
