/* tile.h: the register tile of the float kernels (gemmf.h, attn.h), after a vec*.h.
 *
 * acc[i][j] += a[i][l] * b[l][lanes of vector j] for l = 0 .. k-1 in that order: one chain of fused
 * multiply-adds for each element, so its bits do not depend on the tile's shape.
 */
#ifndef MR_KERNELS_SIMD_TILE_H
#define MR_KERNELS_SIMD_TILE_H

#include "kernels/kernels.h"

#define TILE_ROWS (VL == 16 ? 8 : 6) /* rows by two vectors, as many as stay in registers */
#define TILE_COLS (2 * VL)
#define UNROLL _Pragma("GCC unroll 8")

/* n lanes at element i of b */
V_INLINE vf tile_load(const void *b, size_t i, mr_kv_type type, int n) {
  const uint16_t *h = (const uint16_t *)b + i;
  if (type == MR_KV_F16)
    return n == VL ? vload_f16(h) : vload_f16_n(h, n);
  if (type == MR_KV_BF16)
    return n == VL ? vload_bf16(h) : vload_bf16_n(h, n);
  return n == VL ? vload((const float *)b + i) : vload_n((const float *)b + i, n);
}

/* rows, nv and type are constants where this is inlined; cols: lanes of the only vector when nv is
 * 1 */
V_INLINE void tile_sum(vf acc[][2], int rows, int nv, mr_kv_type type, const float *a, size_t lda,
                       const void *b, size_t ldb, int k, int cols) {
  for (int l = 0; l < k; l++) {
    vf b0 = tile_load(b, (size_t)l * ldb, type, nv == 2 ? VL : cols), b1 = vzero();
    if (nv == 2)
      b1 = tile_load(b, (size_t)l * ldb + VL, type, VL);
    UNROLL for (int i = 0; i < rows; i++) {
      vf x = vset1(a[(size_t)i * lda + (size_t)l]);
      acc[i][0] = vfma(x, b0, acc[i][0]);
      if (nv == 2)
        acc[i][1] = vfma(x, b1, acc[i][1]);
    }
  }
}

#define TILE_CASE(n, CALL)                                                                         \
  case n:                                                                                          \
    CALL(n);                                                                                       \
    break;

/* CALL(rows) with the constant that equals n, up to 8 */
#define TILE_SWITCH(n, CALL)                                                                       \
  switch (n) {                                                                                     \
    TILE_CASE(1, CALL)                                                                             \
    TILE_CASE(2, CALL)                                                                             \
    TILE_CASE(3, CALL)                                                                             \
    TILE_CASE(4, CALL)                                                                             \
    TILE_CASE(5, CALL)                                                                             \
    TILE_CASE(6, CALL)                                                                             \
    TILE_CASE(7, CALL)                                                                             \
  default:                                                                                         \
    CALL(8);                                                                                       \
    break;                                                                                         \
  }

/* ... up to 4 */
#define TILE_SWITCH_4(n, CALL)                                                                     \
  switch (n) {                                                                                     \
    TILE_CASE(1, CALL)                                                                             \
    TILE_CASE(2, CALL)                                                                             \
    TILE_CASE(3, CALL)                                                                             \
  default:                                                                                         \
    CALL(4);                                                                                       \
    break;                                                                                         \
  }

#endif
