/* avx2_i8.c: the int8 GEMM on AVX2: int8 by groups of 64 along K; see kernels.h.
 *
 * A panel is, for each group: int8 [steps along K][NR columns][values of a step], then float
 * scales[NR]. A row is the values of all groups, then float scales[groups].
 *
 * AVX2 has no product of bytes with both signs that does not saturate: a step is two values, which
 * are widened to 16 bits (a row's when it is packed, a panel's in the tile, once for all rows), and
 * multiplied by pmaddwd. CPUs with AVX-VNNI have vpdpbusd: a step is four bytes, and as one side
 * must be unsigned it is |w| times a with the sign of w. The int32 sums of a group are exact either
 * way. A group then adds fma(float(sum) * sw, sa, y), in the order of the groups: the same bits for
 * every tile and both ways.
 */
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels/avx2/avx2.h"
#include "kernels/ref/ref.h"
#include "kernels/simd/vec256.h"

#define GROUP 64
#define NR 16
#define GROUP_BYTES (NR * GROUP + NR * 4)
#define PAIR_ROWS 6 /* of a register tile: 12 sums, and what is multiplied */
#define VNNI_ROWS 3
#define BLOCK_ROWS 96 /* about, that meet all panels while they are in the second-level cache */
#define PREFETCH_AHEAD (4 * GROUP_BYTES)
#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))

static int groups_of(int k) {
  return (k + GROUP - 1) / GROUP;
}

static size_t panel_bytes(int k) {
  return (size_t)groups_of(k) * GROUP_BYTES;
}

/* Bytes of a row's group; vnni is a constant, here and below. */
INLINE size_t row_group(int vnni) {
  return vnni ? GROUP : 2 * GROUP;
}

INLINE size_t row_bytes(int k, int vnni) {
  return ((size_t)groups_of(k) * (row_group(vnni) + 4) + 63) / 64 * 64;
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

INLINE void pack_row(void *dst, const float *x, int k, int vnni) {
  int groups = groups_of(k);
  int8_t *to = dst, q[GROUP];
  float *scales = (float *)(void *)(to + (size_t)groups * row_group(vnni));
  for (int g = 0; g < groups; g++, to += row_group(vnni)) {
    __m256 v[8];
    rotate(v, x, k, g);
    scales[g] = quantize(vnni ? to : q, v);
    for (int i = 0; !vnni && i < GROUP; i += 16) /* widened */
      _mm256_storeu_si256((__m256i *)(void *)(to + 2 * i),
                          _mm256_cvtepi8_epi16(_mm_loadu_si128((__m128i *)(void *)(q + i))));
  }
}

/* Values of a column that lie together. */
INLINE int step_of(int vnni) {
  return vnni ? 4 : 2;
}

INLINE void pack_panel(void *dst, const float *w, size_t ld, int cols, int k, int vnni) {
  int8_t *group = dst, q[GROUP];
  const int step = step_of(vnni);
  for (int g = 0; g < groups_of(k); g++, group += GROUP_BYTES) {
    float *scales = (float *)(void *)(group + NR * GROUP);
    memset(group, 0, GROUP_BYTES);
    for (int c = 0; c < cols; c++) {
      __m256 v[8];
      rotate(v, w + (size_t)c * ld, k, g);
      scales[c] = quantize(q, v) / 64.0f; /* both rotations grow sums by 64 */
      for (int i = 0; i < GROUP; i += step)
        memcpy(group + i * NR + c * step, q + i, (size_t)step);
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

INLINE void finish(const i8_gemm *g, int row, int j, __m256 v) {
  int n = g->cols - VL * j;
  float *y = g->y + (size_t)row * g->ldy + VL * j;
  if (g->bias != NULL)
    v = vadd(v, vload_n(g->bias + VL * j, n));
  if (g->accumulate)
    v = vadd(v, vload_n(y, n));
  vstore_n(y, v, n);
}

/* Four bytes of a row in each lane. */
INLINE __m256i broadcast4(const int8_t *p) {
  int32_t v;
  memcpy(&v, p, sizeof v);
  return _mm256_set1_epi32(v);
}

/* sum += w a, by lanes of int32. The instructions are asm so that all twelve sums of a tile stay in
 * registers, and as this file must not need a CPU that has vpdpbusd. */
INLINE __m256i dot2(__m256i sum, __m256i w, __m256i a) {
  __m256i t;
  __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(t) : "x"(w), "x"(a));
  return sum;
}

INLINE __m256i dot4(__m256i sum, __m256i abs_w, __m256i w, __m256i a) {
  a = _mm256_sign_epi8(a, w);
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(abs_w), "x"(a));
  return sum;
}

/* One step of a group. */
INLINE void pair_step(__m256i sum[][2], const int8_t *x, size_t stride, const int8_t *w, int rows) {
  const __m128i *half = (const __m128i *)(const void *)w;
  __m256i w0 = _mm256_cvtepi8_epi16(_mm_load_si128(half));
  __m256i w1 = _mm256_cvtepi8_epi16(_mm_load_si128(half + 1));
  UNROLL for (int i = 0; i < rows; i++) {
    __m256i a = broadcast4(x + (size_t)i * stride);
    sum[i][0] = dot2(sum[i][0], w0, a);
    sum[i][1] = dot2(sum[i][1], w1, a);
  }
}

INLINE void vnni_step(__m256i sum[][2], const int8_t *x, size_t stride, const int8_t *w, int rows) {
  UNROLL for (int j = 0; j < 2; j++) {
    __m256i b = _mm256_load_si256((const __m256i *)(const void *)(w + j * 32));
    __m256i u = _mm256_abs_epi8(b);
    UNROLL for (int i = 0; i < rows; i++) sum[i][j] =
        dot4(sum[i][j], u, b, broadcast4(x + (size_t)i * stride));
  }
}

/* The exact sums of one group, rows x NR. */
INLINE void group_sums(__m256i sum[][2], const int8_t *x, size_t stride, const int8_t *w, int rows,
                       int cold, int vnni) {
  const int step = step_of(vnni);
  UNROLL for (int i = 0; i < rows; i++) sum[i][0] = sum[i][1] = _mm256_setzero_si256();
  _Pragma("GCC unroll 4") for (int s = 0; s < GROUP / step; s++, x += 4, w += NR * step) {
    if (cold)
      _mm_prefetch((const char *)w + PREFETCH_AHEAD, _MM_HINT_T0);
    if (vnni)
      vnni_step(sum, x, stride, w, rows);
    else
      pair_step(sum, x, stride, w, rows);
  }
}

INLINE void tile(const i8_gemm *g, int i0, int rows, int cold, int vnni) {
  const size_t group = row_group(vnni);
  const int8_t *x = g->x + (size_t)i0 * g->row_bytes, *w = g->panel;
  const float *sa = (const float *)(const void *)(x + (size_t)g->groups * group);
  __m256 y[PAIR_ROWS][2];
  UNROLL for (int i = 0; i < rows; i++) y[i][0] = y[i][1] = _mm256_setzero_ps();
  for (int q = 0; q < g->groups; q++, w += GROUP_BYTES) {
    __m256i sum[PAIR_ROWS][2];
    group_sums(sum, x + (size_t)q * group, g->row_bytes, w, rows, cold, vnni);
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

#define TILE_CASE(R, COLD)                                                                         \
  case 2 * (R) + (COLD):                                                                           \
    if (!vnni || (R) <= VNNI_ROWS)                                                                 \
      tile(g, i0, R, COLD, vnni);                                                                  \
    break;
#define TILE_CASES(R) TILE_CASE(R, 0) TILE_CASE(R, 1)

INLINE void any_tile(const i8_gemm *g, int i0, int rows, int cold, int vnni) {
  switch (rows * 2 + cold) {
    TILE_CASES(1)
    TILE_CASES(2)
    TILE_CASES(3)
    TILE_CASES(4)
    TILE_CASES(5)
    TILE_CASES(6)
  }
}

INLINE void any_gemm(float *y, size_t ldy, const void *x, int m, const void *w, int p0, int p1,
                     int n, int k, const float *bias, int accumulate, int vnni) {
  int most = vnni ? VNNI_ROWS : PAIR_ROWS, tiles = (m + most - 1) / most;
  int blocks = (m + BLOCK_ROWS - 1) / BLOCK_ROWS;
  for (int b = 0; b < blocks; b++) {
    int t0 = (int)((int64_t)tiles * b / blocks), t1 = (int)((int64_t)tiles * (b + 1) / blocks);
    for (int p = p0; p < p1; p++) {
      int col = p * NR;
      const i8_gemm g = {y + col,
                         ldy,
                         x,
                         row_bytes(k, vnni),
                         (const int8_t *)w + (size_t)p * panel_bytes(k),
                         groups_of(k),
                         n - col < NR ? n - col : NR,
                         bias != NULL ? bias + col : NULL,
                         accumulate};
      for (int t = t0; t < t1; t++) {
        int i0 = (int)((int64_t)m * t / tiles), i1 = (int)((int64_t)m * (t + 1) / tiles);
        any_tile(&g, i0, i1 - i0, t == t0, vnni);
      }
    }
  }
}

#define WAYS(NAME, VNNI)                                                                           \
  static size_t row_bytes_##NAME(int k) {                                                          \
    return row_bytes(k, VNNI);                                                                     \
  }                                                                                                \
  static void pack_row_##NAME(void *dst, const float *x, int k) {                                  \
    pack_row(dst, x, k, VNNI);                                                                     \
  }                                                                                                \
  static void pack_panel_##NAME(void *dst, const float *w, size_t ld, int cols, int k) {           \
    pack_panel(dst, w, ld, cols, k, VNNI);                                                         \
  }                                                                                                \
  static void gemm_##NAME(float *y, size_t ldy, const void *x, int m, const void *w, int p0,       \
                          int p1, int n, int k, const float *bias, int accumulate) {               \
    any_gemm(y, ldy, x, m, w, p0, p1, n, k, bias, accumulate, VNNI);                               \
  }                                                                                                \
  static const mr_gemm_ops NAME = {                                                                \
      NR, 128, panel_bytes, row_bytes_##NAME, pack_panel_##NAME, pack_row_##NAME, gemm_##NAME};

WAYS(pairs, 0)
WAYS(vnni, 1)

void mr_k_fill_avx2_i8(mr_kernels *k) {
  k->gemm[MR_SCHEME_I8] = pairs;
}

void mr_k_fill_avxvnni(mr_kernels *k) {
  mr_k_fill_avx2(k);
  k->name = "avxvnni";
  k->gemm[MR_SCHEME_I8] = vnni;
}
