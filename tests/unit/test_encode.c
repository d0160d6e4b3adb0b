/* Encoders: bytes of the format's own tools where they define them, error bounds, encoding again.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/dtype.h"
#include "kernels/encode.h"
#include "tests/unit/conformance.h"

#define N 4096

static const struct {
  int dtype;
  double error; /* root mean square, in units of that of gaussian values: at most */
  bool again;   /* encoding what was decoded gives the same values */
} types[] = {
    {MR_F32, 0, true},       {MR_F16, 3e-4, true},   {MR_BF16, 2e-3, true},
    {MR_Q8_0, 6.5e-3, true}, {MR_Q4_0, 0.1, true},   {MR_Q4_1, 0.085, true},
    {MR_Q5_0, 0.05, true},   {MR_Q5_1, 0.042, true}, {MR_MXFP4, 0.13, true},
    {MR_Q2_K, 0.29, true},   {MR_Q3_K, 0.16, true},  {MR_Q4_K, 0.08, true},
    {MR_Q5_K, 0.038, false}, {MR_Q6_K, 0.019, true}, {MR_IQ4_NL, 0.08, true},
    {MR_IQ4_XS, 0.08, true},
};
#define N_TYPES (sizeof types / sizeof *types)

static uint64_t state = 88172645463325252u;

static double uniform(void) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return ((double)(state >> 11) + 0.5) / 9007199254740992.0;
}

static void gaussians(float *x, int n, double spread) {
  for (int i = 0; i < n; i++)
    x[i] = (float)(spread * sqrt(-2 * log(uniform())) * cos(6.283185307179586 * uniform()));
}

static double rms(const float *a, const float *b, int n) {
  double sum = 0;
  for (int i = 0; i < n; i++) {
    double e = a[i] - (b ? b[i] : 0);
    sum += e * e;
  }
  return sqrt(sum / n);
}

static void *encode(int dtype, const float *x, const float *importance, int n, float *back) {
  size_t bytes = (size_t)mr_dtype_bytes(dtype, (uint64_t)n);
  uint8_t *p = malloc(bytes + 1);
  assert_non_null(p);
  p[bytes] = 0xa5;
  mr_encoder_get(dtype)(p, x, importance, n);
  assert_int_equal(p[bytes], 0xa5);
  mr_dtype_get(dtype)->to_f32(back, p, n);
  return p;
}

static void errors_are_small(void **unused) {
  float x[N], y[N];
  (void)unused;
  for (size_t t = 0; t < N_TYPES; t++)
    for (double spread = 1e-3; spread < 100; spread *= 31) {
      gaussians(x, N, spread);
      free(encode(types[t].dtype, x, NULL, N, y));
      double e = rms(x, y, N) / rms(x, NULL, N);
      if (spread == 1e-3)
        print_message("%-7s relative error %.5f\n", mr_dtype_get(types[t].dtype)->name, e);
      if (!(e <= types[t].error))
        fail_msg("%s: relative error %g, at most %g", mr_dtype_get(types[t].dtype)->name, e,
                 types[t].error);
    }
}

/* Encoding what was decoded: the same values, or at most a small share of the first error more. */
static void encoding_again(void **unused) {
  float x[N], y[N], z[N];
  (void)unused;
  for (size_t t = 0; t < N_TYPES; t++) {
    gaussians(x, N, 0.02);
    free(encode(types[t].dtype, x, NULL, N, y));
    free(encode(types[t].dtype, y, NULL, N, z));
    double share = rms(y, z, N) / (rms(x, y, N) + 1e-30);
    if (share > (types[t].again ? 0 : 0.1))
      fail_msg("%s: encoding again adds %g of the error", mr_dtype_get(types[t].dtype)->name,
               share);
  }
}

/* Zeros, one value among zeros, equal values, steep blocks: finite and near. */
static void odd_blocks(void **unused) {
  float x[256], y[256];
  (void)unused;
  for (size_t t = 0; t < N_TYPES; t++)
    for (int kind = 0; kind < 6; kind++) {
      double most = 0, step = types[t].dtype == MR_MXFP4 ? 0.34 : 0.26;
      for (int i = 0; i < 256; i++) {
        x[i] = kind == 0   ? 0
               : kind == 1 ? (i == 37 ? -3.0f : 0)
               : kind == 2 ? 0.5f
               : kind == 3 ? -0.5f
               : kind == 4 ? (float)i / 64
                           : (float)ldexp(i % 2 ? 1 : -1, -i / 4);
        most = fmax(most, fabsf(x[i]));
      }
      free(encode(types[t].dtype, x, NULL, 256, y));
      for (int i = 0; i < 256; i++)
        if (!isfinite(y[i]) || fabs(x[i] - y[i]) > step * most + 1e-7)
          fail_msg("%s, kind %d, value %d: %g for %g", mr_dtype_get(types[t].dtype)->name, kind, i,
                   (double)y[i], (double)x[i]);
    }
}

/* Errors move to the columns that count less. */
static void importance_counts(void **unused) {
  static const int searched[] = {MR_Q4_0, MR_Q4_1, MR_Q5_0, MR_Q5_1,   MR_Q2_K,
                                 MR_Q3_K, MR_Q4_K, MR_Q5_K, MR_IQ4_NL, MR_IQ4_XS};
  float x[N], plain[N], weighted[N], importance[N];
  (void)unused;
  for (size_t t = 0; t < sizeof searched / sizeof *searched; t++) {
    double before = 0, after = 0;
    gaussians(x, N, 1);
    for (int i = 0; i < N; i++)
      importance[i] = i % 8 ? 0.01f : 1;
    free(encode(searched[t], x, NULL, N, plain));
    free(encode(searched[t], x, importance, N, weighted));
    for (int i = 0; i < N; i++) {
      before += (double)importance[i] * (x[i] - plain[i]) * (x[i] - plain[i]);
      after += (double)importance[i] * (x[i] - weighted[i]) * (x[i] - weighted[i]);
    }
    if (!(after < 0.9 * before))
      fail_msg("%s: weighted error %g after, %g before", mr_dtype_get(searched[t])->name, after,
               before);
  }
}

static void halves_that_are_exact(void **unused) {
  float x[N], y[N];
  uint8_t half[2 * N];
  (void)unused;
  gaussians(x, N, 1);
  mr_encoder_get(MR_F16)(half, x, NULL, N);
  mr_dtype_get(MR_F16)->to_f32(x, half, N);
  free(encode(MR_F32, x, NULL, N, y));
  assert_memory_equal(x, y, sizeof x);
}

static void not_written(void **unused) {
  (void)unused;
  assert_null(mr_encoder_get(MR_IQ2_XS));
  assert_null(mr_encoder_get(MR_Q8_1));
  assert_null(mr_encoder_get(MR_I32));
  assert_null(mr_encoder_get(-1));
}

/* Blocks that the format's own tools made of given values. */
static void same_bytes(const char *name, int dtype) {
  char path[256];
  size_t len = 0, src_len = 0;
  snprintf(path, sizeof path, "conformance/quants/%s.q.src.f32", name);
  const char *at = data_path(path);
  if (!at)
    skip();
  char *src = read_whole(at, &src_len);
  snprintf(path, sizeof path, "conformance/quants/%s.q.bin", name);
  char *want = read_whole(data_path(path), &len);
  assert_non_null(src);
  assert_non_null(want);
  int64_t n = (int64_t)(src_len / sizeof(float));
  n -= n % mr_dtype_get(dtype)->block;
  assert_int_equal(mr_dtype_bytes(dtype, (uint64_t)n), len);
  uint8_t *have = malloc(len);
  mr_encoder_get(dtype)(have, (const float *)(const void *)src, NULL, n);
  for (size_t i = 0; i < len; i++)
    if (have[i] != (uint8_t)want[i])
      fail_msg("%s: byte %zu (block %zu) is %02x, not %02x", name, i,
               i / (size_t)mr_dtype_get(dtype)->block_bytes, have[i], (uint8_t)want[i]);
  free(have);
  free(src);
  free(want);
}

static void conformance(void **unused) {
  (void)unused;
  same_bytes("F16", MR_F16);
  same_bytes("BF16", MR_BF16);
  same_bytes("Q8_0", MR_Q8_0);
  same_bytes("Q4_0", MR_Q4_0);
  same_bytes("Q4_1", MR_Q4_1);
  same_bytes("Q5_0", MR_Q5_0);
  same_bytes("Q5_1", MR_Q5_1);
  same_bytes("MXFP4", MR_MXFP4);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(errors_are_small),
      cmocka_unit_test(encoding_again),
      cmocka_unit_test(odd_blocks),
      cmocka_unit_test(importance_counts),
      cmocka_unit_test(halves_that_are_exact),
      cmocka_unit_test(not_written),
      cmocka_unit_test(conformance),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
