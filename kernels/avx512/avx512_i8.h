/* avx512_i8.h: int8 by groups of 64 along K: what the VNNI and the AMX micro-kernels share.
 *
 * A panel is, for each group: weights + 128 as uint8 [16 steps of 4 along K][NR columns][4], then float scales[NR].
 * A row is: int8 [groups][64], float scales[groups], int32 start[groups].
 *
 * Integer sums become floats without a conversion: a sum starts at start[g] = MAGIC - 128 * sum(a), where MAGIC is
 * the bits of 1.5 * 2^23 as float32, so its bits are always the float 1.5 * 2^23 + sum(a w). Then, with the weight
 * scale sw of 22 significant bits (so that 1.5 * 2^23 * sw is exact),
 *     t = fma(sum_bits, sw, -1.5 * 2^23 * sw)       is the sum times sw, rounded once,
 *     y = fma(t, sa, y)                             in order of the groups, from y = 0.
 * Every micro-kernel does just this for each element, so all give the same bits.
 */
#ifndef MR_KERNELS_AVX512_AVX512_I8_H
#define MR_KERNELS_AVX512_AVX512_I8_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#define GROUP 64
#define NR 32
#define GROUP_BYTES (NR * GROUP + NR * 4) /* of one group in a panel */
#define MAGIC_BITS 0x4b400000
#define MAGIC 12582912.0f
#define UNROLL _Pragma("GCC unroll 16")

typedef struct i8_gemm { /* one call: rows times one panel */
  float *y;              /* [m, NR], ldy floats apart */
  size_t ldy;
  const int8_t *x;       /* m rows, row_bytes apart */
  size_t row_bytes;
  const uint8_t *panel;
  int groups;
  int cols;              /* 1..NR columns that y has */
  const float *bias;     /* of this panel's columns, or NULL */
  int accumulate;
} i8_gemm;

static inline const float *i8_scales(const int8_t *row, int groups) {
  return (const float *)(const void *)(row + (size_t)groups * GROUP);
}

static inline const int32_t *i8_starts(const int8_t *row, int groups) {
  return (const int32_t *)(const void *)(row + (size_t)groups * (GROUP + 4));
}

static inline __mmask16 i8_mask(int cols, int j) {
  int n = cols - 16 * j;
  return n >= 16 ? 0xffff : n <= 0 ? 0 : (__mmask16)((1u << n) - 1);
}

/* 16 columns of one row */
static inline __attribute__((always_inline)) void i8_finish(const i8_gemm *g, int row, int j, __m512 v) {
  __mmask16 mask = i8_mask(g->cols, j);
  float *y = g->y + (size_t)row * g->ldy + 16 * j;
  if (g->bias != NULL) v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(mask, g->bias + 16 * j));
  if (g->accumulate) v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(mask, y));
  _mm512_mask_storeu_ps(y, mask, v);
}

#endif
