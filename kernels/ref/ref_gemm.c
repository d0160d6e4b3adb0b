/* ref_gemm.c: the GEMM in plain C: what every other table is measured against. See kernels.h.
 *
 * Layouts: F32 and BF16 panels are [k][NR]; I8 panels are, for each group of 64 along K, int8
 * [NR][64], then the scales float [NR]. An I8 row is int8 [K padded], then the scales float
 * [groups].
 */
#include <math.h>
#include <string.h>

#include "kernels/dtype.h"
#include "kernels/ref/ref.h"

#define NR 8
#define GROUP MR_I8_GROUP

static size_t round64(size_t n) {
  return (n + 63) / 64 * 64;
}

static int groups_of(int k) {
  return (k + GROUP - 1) / GROUP;
}

static void finish(float *y, float sum, const float *bias, int col, int accumulate) {
  if (bias != NULL)
    sum += bias[col];
  *y = accumulate ? sum + *y : sum;
}

/* ------------------------------------------------------------------ float32 */
static size_t f32_panel_bytes(int k) {
  return round64((size_t)k * NR * sizeof(float));
}

static size_t f32_row_bytes(int k) {
  return round64((size_t)k * sizeof(float));
}

static void f32_pack_panel(void *dst, const float *w, size_t ld, int cols, int k) {
  float *d = dst;
  memset(dst, 0, f32_panel_bytes(k));
  for (int i = 0; i < k; i++)
    for (int c = 0; c < cols; c++)
      d[i * NR + c] = w[(size_t)c * ld + (size_t)i];
}

static void f32_pack_row(void *dst, const float *x, int k) {
  memset(dst, 0, f32_row_bytes(k));
  memcpy(dst, x, (size_t)k * sizeof(float));
}

static void f32_gemm(float *y, size_t ldy, const void *x, int m, const void *w, int p0, int p1,
                     int n, int k, const float *bias, int accumulate) {
  for (int p = p0; p < p1; p++) {
    const float *b = (const float *)((const char *)w + (size_t)p * f32_panel_bytes(k));
    for (int i = 0; i < m; i++) {
      const float *a = (const float *)((const char *)x + (size_t)i * f32_row_bytes(k));
      float sum[NR] = {0};
      for (int j = 0; j < k; j++)
        for (int c = 0; c < NR; c++)
          sum[c] += a[j] * b[(size_t)j * NR + (size_t)c];
      for (int c = 0; c < NR && p * NR + c < n; c++)
        finish(&y[(size_t)i * ldy + (size_t)(p * NR + c)], sum[c], bias, p * NR + c, accumulate);
    }
  }
}

/* ------------------------------------------------------------------ bfloat16 */
static size_t bf16_panel_bytes(int k) {
  return round64((size_t)k * NR * sizeof(uint16_t));
}

static size_t bf16_row_bytes(int k) {
  return round64((size_t)k * sizeof(uint16_t));
}

static void bf16_pack_panel(void *dst, const float *w, size_t ld, int cols, int k) {
  uint16_t *d = dst;
  memset(dst, 0, bf16_panel_bytes(k));
  for (int i = 0; i < k; i++)
    for (int c = 0; c < cols; c++)
      d[i * NR + c] = mr_f32_to_bf16(w[(size_t)c * ld + (size_t)i]);
}

static void bf16_pack_row(void *dst, const float *x, int k) {
  uint16_t *d = dst;
  memset(dst, 0, bf16_row_bytes(k));
  for (int i = 0; i < k; i++)
    d[i] = mr_f32_to_bf16(x[i]);
}

static void bf16_gemm(float *y, size_t ldy, const void *x, int m, const void *w, int p0, int p1,
                      int n, int k, const float *bias, int accumulate) {
  for (int p = p0; p < p1; p++) {
    const uint16_t *b = (const uint16_t *)((const char *)w + (size_t)p * bf16_panel_bytes(k));
    for (int i = 0; i < m; i++) {
      const uint16_t *a = (const uint16_t *)((const char *)x + (size_t)i * bf16_row_bytes(k));
      float sum[NR] = {0};
      for (int j = 0; j < k; j++)
        for (int c = 0; c < NR; c++)
          sum[c] += mr_bf16_to_f32(a[j]) * mr_bf16_to_f32(b[(size_t)j * NR + (size_t)c]);
      for (int c = 0; c < NR && p * NR + c < n; c++)
        finish(&y[(size_t)i * ldy + (size_t)(p * NR + c)], sum[c], bias, p * NR + c, accumulate);
    }
  }
}

/* ------------------------------------------------------------------ int8 by 64 with a Hadamard
 * transform */
static size_t i8_panel_bytes(int k) {
  return round64((size_t)groups_of(k) * NR * (GROUP + sizeof(float)));
}

static size_t i8_row_bytes(int k) {
  return round64((size_t)groups_of(k) * (GROUP + sizeof(float)));
}

/* Group g of x (k values in all): signs, padding with zeros, Hadamard transform (norm grows by 8).
 */
static void rotate(float v[GROUP], const float *x, int k, int g) {
  uint64_t signs = mr_i8_signs(g);
  for (int i = 0; i < GROUP; i++) {
    float s = g * GROUP + i < k ? x[g * GROUP + i] : 0.0f;
    v[i] = signs >> i & 1 ? -s : s;
  }
  for (int h = 1; h < GROUP; h *= 2)
    for (int i = 0; i < GROUP; i++)
      if ((i & h) == 0) {
        float a = v[i], b = v[i + h];
        v[i] = a + b;
        v[i + h] = a - b;
      }
}

/* Quantizes one rotated group; returns its scale, NaN when a value is not finite. */
static float quantize(int8_t *q, const float v[GROUP]) {
  float amax = 0.0f;
  int bad = 0;
  for (int i = 0; i < GROUP; i++) {
    amax = fmaxf(amax, fabsf(v[i]));
    bad |= !isfinite(v[i]);
  }
  if (bad || amax < MR_I8_TINY) {
    memset(q, 0, GROUP);
    return bad ? NAN : 0.0f;
  }
  float inv = 127.0f / amax;
  for (int i = 0; i < GROUP; i++)
    q[i] = (int8_t)lrintf(v[i] * inv);
  return amax / 127.0f;
}

static void i8_pack_panel(void *dst, const float *w, size_t ld, int cols, int k) {
  float v[GROUP];
  memset(dst, 0, i8_panel_bytes(k));
  for (int g = 0; g < groups_of(k); g++) {
    int8_t *q = (int8_t *)dst + (size_t)g * NR * (GROUP + sizeof(float));
    float *scales = (float *)(void *)(q + NR * GROUP);
    for (int c = 0; c < cols; c++) {
      rotate(v, w + (size_t)c * ld, k, g);
      scales[c] = quantize(q + c * GROUP, v) / 64.0f; /* both rotations together grow sums by 64 */
    }
  }
}

static void i8_pack_row(void *dst, const float *x, int k) {
  int groups = groups_of(k);
  int8_t *q = dst;
  float *scales = (float *)(void *)(q + groups * GROUP), v[GROUP];
  memset(dst, 0, i8_row_bytes(k));
  for (int g = 0; g < groups; g++) {
    rotate(v, x, k, g);
    scales[g] = quantize(q + g * GROUP, v);
  }
}

static float i8_dot(const int8_t *a, const int8_t *panel, int c, int groups) {
  const float *sa = (const float *)(const void *)(a + groups * GROUP);
  float sum = 0.0f;
  for (int g = 0; g < groups; g++) {
    const int8_t *b = panel + (size_t)g * NR * (GROUP + sizeof(float));
    float sw = ((const float *)(const void *)(b + NR * GROUP))[c];
    int32_t dot = 0;
    for (int i = 0; i < GROUP; i++)
      dot += a[g * GROUP + i] * b[c * GROUP + i];
    sum += (float)dot * sw * sa[g];
  }
  return sum;
}

static void i8_gemm(float *y, size_t ldy, const void *x, int m, const void *w, int p0, int p1,
                    int n, int k, const float *bias, int accumulate) {
  for (int p = p0; p < p1; p++) {
    const int8_t *panel = (const int8_t *)w + (size_t)p * i8_panel_bytes(k);
    for (int i = 0; i < m; i++) {
      const int8_t *a = (const int8_t *)x + (size_t)i * i8_row_bytes(k);
      for (int c = 0; c < NR && p * NR + c < n; c++)
        finish(&y[(size_t)i * ldy + (size_t)(p * NR + c)], i8_dot(a, panel, c, groups_of(k)), bias,
               p * NR + c, accumulate);
    }
  }
}

void mr_k_fill_ref_gemm(mr_kernels *k) {
  k->floats = MR_SCHEME_I8;
  k->gemm[MR_SCHEME_F32] = (mr_gemm_ops){
      NR, 128, f32_panel_bytes, f32_row_bytes, f32_pack_panel, f32_pack_row, f32_gemm};
  k->gemm[MR_SCHEME_BF16] = (mr_gemm_ops){
      NR, 128, bf16_panel_bytes, bf16_row_bytes, bf16_pack_panel, bf16_pack_row, bf16_gemm};
  k->gemm[MR_SCHEME_I8] =
      (mr_gemm_ops){NR, 128, i8_panel_bytes, i8_row_bytes, i8_pack_panel, i8_pack_row, i8_gemm};
}
