/* avx2_i8.c: the int8 GEMM on AVX2: int8 by groups of 64 along K; see kernels.h.
 *
 * A panel is, for each group: int8 [16 steps of 4 along K][NR columns][4], then float scales[NR]. A
 * row is int8 [groups][64], then float scales[groups].
 *
 * maddubs wants one unsigned side: |w| times a with the sign of w. Pairs stay below 2 * 127 * 127 =
 * 32258, so their 16-bit sums are exact, as is the int32 sum of a group. A group then adds
 * fma(float(sum) * sw, sa, y), in the order of the groups: the same for every tile.
 *
 * CPUs with AVX-VNNI do the same in one vpdpbusd, which does not saturate: the same sums.
 */
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels/avx2/avx2.h"
#include "kernels/ref/ref.h"

#define GROUP 64
#define NR 16
#define GROUP_BYTES (NR * GROUP + NR * 4)
#define TILE_ROWS 3
#define PREFETCH_AHEAD (4 * GROUP_BYTES)
#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))

static int groups_of(int k) {
  return (k + GROUP - 1) / GROUP;
}

static size_t panel_bytes(int k) {
  return (size_t)groups_of(k) * GROUP_BYTES;
}

static size_t row_bytes(int k) {
  return ((size_t)groups_of(k) * (GROUP + 4) + 63) / 64 * 64;
}

/* ------------------------------------------------------------------ packing */
/* Group g of a row: signs, zeros past k, Hadamard transform over 64 values: first across the eight
 * vectors (distances 8, 16, 32), then inside each (1, 2, 4). */
INLINE void rotate(__m256 v[8], const float *x, int k, int g) {
  uint64_t signs = mr_i8_signs(g);
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256 minus = _mm256_set1_ps(-0.0f);
  const __m256 odd1 = _mm256_setr_ps(0, -0.0f, 0, -0.0f, 0, -0.0f, 0, -0.0f);
  const __m256 odd2 = _mm256_setr_ps(0, 0, -0.0f, -0.0f, 0, 0, -0.0f, -0.0f);
  const __m256 odd4 = _mm256_setr_ps(0, 0, 0, 0, -0.0f, -0.0f, -0.0f, -0.0f);
  for (int j = 0; j < 8; j++) {
    __m256i left = _mm256_set1_epi32(k - g * GROUP - j * 8);
    __m256i in = _mm256_cmpgt_epi32(left, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    __m256i s = _mm256_and_si256(_mm256_set1_epi32((int)(signs >> (8 * j) & 255)), bit);
    __m256 flip = _mm256_and_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(s, bit)), minus);
    v[j] = _mm256_xor_ps(_mm256_maskload_ps(x + g * GROUP + j * 8, in), flip);
  }
  UNROLL for (int h = 1; h < 8; h *= 2) UNROLL for (int j = 0; j < 8; j++) {
    if (j & h)
      continue;
    __m256 a = v[j], b = v[j + h];
    v[j] = _mm256_add_ps(a, b);
    v[j + h] = _mm256_sub_ps(a, b);
  }
  UNROLL for (int j = 0; j < 8; j++) {
    __m256 a = v[j];
    a = _mm256_add_ps(_mm256_permute_ps(a, 0xb1), _mm256_xor_ps(a, odd1));
    a = _mm256_add_ps(_mm256_permute_ps(a, 0x4e), _mm256_xor_ps(a, odd2));
    v[j] = _mm256_add_ps(_mm256_permute2f128_ps(a, a, 1), _mm256_xor_ps(a, odd4));
  }
}

/* Largest magnitude as bits: as integers, so that a NaN is the largest of all. */
static uint32_t largest(const __m256 v[8]) {
  __m256i m = _mm256_setzero_si256();
  uint32_t lanes[8], most = 0;
  UNROLL for (int j = 0; j < 8; j++) m = _mm256_max_epu32(
      m, _mm256_and_si256(_mm256_castps_si256(v[j]), _mm256_set1_epi32(0x7fffffff)));
  _mm256_storeu_si256((__m256i *)(void *)lanes, m);
  for (int j = 0; j < 8; j++)
    most = lanes[j] > most ? lanes[j] : most;
  return most;
}

/* 64 values of a rotated group to int8; returns their scale: 0 for zeros, NaN where not finite. */
static float quantize(int8_t *q, const __m256 v[8]) {
  uint32_t bits = largest(v);
  float amax;
  memcpy(&amax, &bits, sizeof amax);
  if (bits >= 0x7f800000u || amax < MR_I8_TINY) {
    memset(q, 0, GROUP);
    return bits >= 0x7f800000u ? NAN : 0.0f;
  }
  __m256 s = _mm256_set1_ps(127.0f / amax);
  for (int j = 0; j < 8; j += 4) {
    __m256i i[4];
    UNROLL for (int l = 0; l < 4; l++) i[l] = _mm256_cvtps_epi32(_mm256_mul_ps(v[j + l], s));
    __m256i b = _mm256_packs_epi16(_mm256_packs_epi32(i[0], i[1]), _mm256_packs_epi32(i[2], i[3]));
    b = _mm256_permutevar8x32_epi32(b, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i *)(void *)(q + 8 * j), b);
  }
  return amax / 127.0f;
}

static void pack_row(void *dst, const float *x, int k) {
  int groups = groups_of(k);
  int8_t *q = dst;
  float *scales = (float *)(void *)(q + (size_t)groups * GROUP);
  for (int g = 0; g < groups; g++) {
    __m256 v[8];
    rotate(v, x, k, g);
    scales[g] = quantize(q + (size_t)g * GROUP, v);
  }
}

static void pack_panel(void *dst, const float *w, size_t ld, int cols, int k) {
  int8_t *group = dst, q[GROUP];
  for (int g = 0; g < groups_of(k); g++, group += GROUP_BYTES) {
    float *scales = (float *)(void *)(group + NR * GROUP);
    memset(group, 0, GROUP_BYTES);
    for (int c = 0; c < cols; c++) {
      __m256 v[8];
      rotate(v, w + (size_t)c * ld, k, g);
      scales[c] = quantize(q, v) / 64.0f; /* both rotations grow sums by 64 */
      for (int i = 0; i < GROUP; i += 4)
        memcpy(group + i * NR + c * 4, q + i, 4);
    }
  }
}

/* ------------------------------------------------------------------ register tiles */
typedef struct i8_gemm { /* one panel */
  float *y;              /* [m, NR], ldy apart */
  size_t ldy;
  const int8_t *x;
  size_t row_bytes;
  const int8_t *panel;
  int groups, cols;
  const float *bias;
  int accumulate;
} i8_gemm;

static void finish(const i8_gemm *g, int row, int j, __m256 v) {
  __m256i in = _mm256_cmpgt_epi32(_mm256_set1_epi32(g->cols - 8 * j),
                                  _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  float *y = g->y + (size_t)row * g->ldy + 8 * j;
  if (g->bias != NULL)
    v = _mm256_add_ps(v, _mm256_maskload_ps(g->bias + 8 * j, in));
  if (g->accumulate)
    v = _mm256_add_ps(v, _mm256_maskload_ps(y, in));
  _mm256_maskstore_ps(y, in, v);
}

/* sum[4 * column of int32] += w a; vnni is a constant, here and below */
INLINE __m256i dot4(__m256i sum, __m256i abs_w, __m256i w, __m256i a, int vnni) {
  a = _mm256_sign_epi8(a, w);
  if (vnni) { /* as asm: this file must not need a CPU that has it */
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(abs_w), "x"(a));
    return sum;
  }
  __m256i pairs = _mm256_maddubs_epi16(abs_w, a);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

INLINE __m256i broadcast4(const int8_t *p) {
  int32_t v;
  memcpy(&v, p, sizeof v);
  return _mm256_set1_epi32(v);
}

/* The exact sums of one group, rows x NR. */
INLINE void group_sums(__m256i sum[][2], const int8_t *x, size_t stride, const int8_t *w, int rows,
                       int cold, int vnni) {
  UNROLL for (int i = 0; i < rows; i++) sum[i][0] = sum[i][1] = _mm256_setzero_si256();
  for (int s = 0; s < GROUP / 4; s++) {
    if (cold)
      _mm_prefetch((const char *)w + s * NR * 4 + PREFETCH_AHEAD, _MM_HINT_T0);
    UNROLL for (int j = 0; j < 2; j++) {
      __m256i b = _mm256_load_si256((const __m256i *)(const void *)(w + s * NR * 4 + j * 32));
      __m256i u = _mm256_abs_epi8(b);
      UNROLL for (int i = 0; i < rows; i++) sum[i][j] =
          dot4(sum[i][j], u, b, broadcast4(x + (size_t)i * stride + s * 4), vnni);
    }
  }
}

INLINE void tile(const i8_gemm *g, int i0, int rows, int cold, int vnni) {
  const int8_t *x = g->x + (size_t)i0 * g->row_bytes, *w = g->panel;
  const float *sa = (const float *)(const void *)(x + (size_t)g->groups * GROUP);
  __m256 y[TILE_ROWS][2];
  UNROLL for (int i = 0; i < rows; i++) y[i][0] = y[i][1] = _mm256_setzero_ps();
  for (int q = 0; q < g->groups; q++, w += GROUP_BYTES) {
    __m256i sum[TILE_ROWS][2];
    group_sums(sum, x + (size_t)q * GROUP, g->row_bytes, w, rows, cold, vnni);
    const float *sw = (const float *)(const void *)(w + NR * GROUP);
    UNROLL for (int i = 0; i < rows; i++) UNROLL for (int j = 0; j < 2; j++) {
      __m256 a = _mm256_set1_ps(sa[(size_t)i * g->row_bytes / 4 + (size_t)q]);
      __m256 t = _mm256_mul_ps(_mm256_cvtepi32_ps(sum[i][j]), _mm256_load_ps(sw + 8 * j));
      y[i][j] = _mm256_fmadd_ps(t, a, y[i][j]);
    }
  }
  UNROLL for (int i = 0; i < rows; i++) UNROLL for (int j = 0; j < 2; j++)
      finish(g, i0 + i, j, y[i][j]);
}

INLINE void any_tile(const i8_gemm *g, int i0, int rows, int cold, int vnni) {
  switch (rows * 2 + cold) {
  case 2:
    tile(g, i0, 1, 0, vnni);
    break;
  case 3:
    tile(g, i0, 1, 1, vnni);
    break;
  case 4:
    tile(g, i0, 2, 0, vnni);
    break;
  case 5:
    tile(g, i0, 2, 1, vnni);
    break;
  case 6:
    tile(g, i0, 3, 0, vnni);
    break;
  default:
    tile(g, i0, 3, 1, vnni);
    break;
  }
}

INLINE void any_gemm(float *y, size_t ldy, const void *x, int m, const void *w, int p0, int p1,
                     int n, int k, const float *bias, int accumulate, int vnni) {
  int tiles = (m + TILE_ROWS - 1) / TILE_ROWS;
  for (int p = p0; p < p1; p++) {
    int col = p * NR;
    const i8_gemm g = {y + col,
                       ldy,
                       x,
                       row_bytes(k),
                       (const int8_t *)w + (size_t)p * panel_bytes(k),
                       groups_of(k),
                       n - col < NR ? n - col : NR,
                       bias != NULL ? bias + col : NULL,
                       accumulate};
    for (int t = 0; t < tiles; t++) {
      int i0 = (int)((int64_t)m * t / tiles), i1 = (int)((int64_t)m * (t + 1) / tiles);
      any_tile(&g, i0, i1 - i0, t == 0, vnni);
    }
  }
}

static void gemm(float *y, size_t ldy, const void *x, int m, const void *w, int p0, int p1, int n,
                 int k, const float *bias, int accumulate) {
  any_gemm(y, ldy, x, m, w, p0, p1, n, k, bias, accumulate, 0);
}

static void gemm_vnni(float *y, size_t ldy, const void *x, int m, const void *w, int p0, int p1,
                      int n, int k, const float *bias, int accumulate) {
  any_gemm(y, ldy, x, m, w, p0, p1, n, k, bias, accumulate, 1);
}

void mr_k_fill_avx2_i8(mr_kernels *k) {
  k->gemm[MR_SCHEME_I8] =
      (mr_gemm_ops){NR, 128, panel_bytes, row_bytes, pack_panel, pack_row, gemm};
}

void mr_k_fill_avxvnni(mr_kernels *k) {
  mr_k_fill_avx2(k);
  k->name = "avxvnni";
  k->gemm[MR_SCHEME_I8].gemm = gemm_vnni;
}
