/* avx512_gemm.h: what the GEMMs with panels of two halves of 16 columns share: the call, and how
 * their tiles end. */
#ifndef MR_KERNELS_AVX512_AVX512_GEMM_H
#define MR_KERNELS_AVX512_AVX512_GEMM_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define HALF 16
#define NR (2 * HALF)
#define TILE_ROWS 8 /* of the register tiles on vectors */
#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))

typedef struct gemm_call { /* see mr_gemm_ops.gemm */
  float *y;
  size_t ldy;
  const int8_t *x; /* packed rows, row_bytes apart */
  size_t row_bytes;
  int m, groups; /* groups: of values along K, as the scheme has them */
  const uint8_t *w;
  int p0, p1, n;
  const float *bias;
  int accumulate;
} gemm_call;

/* Four bytes of a row in each lane. */
INLINE __m512i gemm_broadcast(const int8_t *p) {
  int32_t v;
  memcpy(&v, p, sizeof v);
  return _mm512_set1_epi32(v);
}

/* Fetches what one row of panel p will be written to: a store that misses holds up those behind. */
INLINE void gemm_ask(const gemm_call *g, int row, int p) {
  const float *y = g->y + (size_t)row * g->ldy + p * NR;
  _mm_prefetch((const char *)y, _MM_HINT_ET0);
  _mm_prefetch((const char *)(y + HALF), _MM_HINT_ET0);
}

/* One row of half panel h into y. */
INLINE void gemm_finish(const gemm_call *g, int row, int h, __m512 v) {
  int col = h * HALF, left = g->n - col;
  __mmask16 mask = left >= 16 ? 0xffff : left <= 0 ? 0 : (__mmask16)((1u << left) - 1);
  float *y = g->y + (size_t)row * g->ldy + col;
  if (g->bias != NULL)
    v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(mask, g->bias + col));
  if (g->accumulate)
    v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(mask, y));
  _mm512_mask_storeu_ps(y, mask, v);
}

/* What a tile asks memory for while it works: in each of a group's steps `lines` (0 to 2, a
 * constant) addresses, `stride` bytes apart. */
typedef struct ahead {
  const uint8_t *at;
  size_t stride;
} ahead;

/* Sums of rows x panel p into y: straight where no bias and no missing column is in the way. */
INLINE void gemm_finish_tile(const gemm_call *g, int i0, int p, __m512 y[][2], int rows) {
  if (g->bias != NULL || (p + 1) * NR > g->n) {
    UNROLL for (int i = 0; i < rows; i++) UNROLL for (int j = 0; j < 2; j++)
        gemm_finish(g, i0 + i, 2 * p + j, y[i][j]);
    return;
  }
  float *out = g->y + (size_t)i0 * g->ldy + p * NR;
  if (g->accumulate) {
    UNROLL for (int i = 0; i < rows; i++) UNROLL for (int j = 0; j < 2; j++) y[i][j] =
        _mm512_add_ps(y[i][j], _mm512_loadu_ps(out + (size_t)i * g->ldy + j * HALF));
  }
  UNROLL for (int i = 0; i < rows; i++) UNROLL for (int j = 0; j < 2; j++)
      _mm512_storeu_ps(out + (size_t)i * g->ldy + j * HALF, y[i][j]);
}

/* Calls `tile` of the file with constants. Of several tiles each has four rows or more. */
#define GEMM_CASE(R, L)                                                                            \
  case (R)*4 + (L):                                                                                \
    tile(g, i0, p, next, R, L);                                                                    \
    break
#define GEMM_ANY_TILE                                                                              \
  static void any_tile(const gemm_call *g, int i0, int p, ahead next, int rows, int lines) {       \
    switch (rows * 4 + lines) {                                                                    \
      GEMM_CASE(1, 2);                                                                             \
      GEMM_CASE(2, 2);                                                                             \
      GEMM_CASE(3, 2);                                                                             \
      GEMM_CASE(4, 2);                                                                             \
      GEMM_CASE(5, 2);                                                                             \
      GEMM_CASE(6, 2);                                                                             \
      GEMM_CASE(7, 2);                                                                             \
      GEMM_CASE(8, 2);                                                                             \
      GEMM_CASE(4, 1);                                                                             \
      GEMM_CASE(5, 1);                                                                             \
      GEMM_CASE(6, 1);                                                                             \
      GEMM_CASE(7, 1);                                                                             \
    default:                                                                                       \
      tile(g, i0, p, next, 8, 1);                                                                  \
      break;                                                                                       \
    }                                                                                              \
  }

#endif
