/* avx512_i8.h: int8 by groups of 64 along K: what the VNNI and the AMX micro-kernels share.
 *
 * A panel is two halves of 16 columns; a half is, for each group: weights + 128 as uint8
 * [16 steps of 4 along K][16 columns][4], then float scales[16]. A row is int8 [groups][64], then
 * float scales[groups], then int32 start[groups].
 *
 * Integer sums become floats without a conversion: a sum begins at start[g] = MAGIC_BITS - 128 *
 * sum(a), where MAGIC_BITS are those of the float 1.5 * 2^23, so that at its end it holds the bits
 * of the float 1.5 * 2^23 + sum(a w). Weight scales have 22 significant bits, so 1.5 * 2^23 * sw is
 * exact, and
 *     t = fma(float of the bits, sw, -1.5 * 2^23 * sw)    is the sum times sw, rounded once,
 *     y = fma(t, sa, y)                                   in the order of the groups, from y = 0.
 * Every micro-kernel does just this for each element, so all give the same bits.
 */
#ifndef MR_KERNELS_AVX512_AVX512_I8_H
#define MR_KERNELS_AVX512_AVX512_I8_H

#include "kernels/avx512/avx512_gemm.h"

#define GROUP 64
#define GROUP_BYTES (HALF * GROUP + HALF * 4) /* of one group in a half panel */
#define MAGIC_BITS 0x4b400000
#define MAGIC 12582912.0f

INLINE const float *i8_scales(const int8_t *row, int groups) {
  return (const float *)(const void *)(row + (size_t)groups * GROUP);
}

INLINE const int32_t *i8_starts(const int8_t *row, int groups) {
  return (const int32_t *)(const void *)(row + (size_t)groups * (GROUP + 4));
}

/* Half panel h (half 0 of panel p is 2p). */
INLINE const uint8_t *i8_half(const gemm_call *g, int h) {
  return g->w + (size_t)h * (size_t)g->groups * GROUP_BYTES;
}

INLINE const float *i8_weight_scales(const uint8_t *group) {
  return (const float *)(const void *)(group + HALF * GROUP);
}

/* avx512_amx.c: the whole call; groups <= I8_AMX_GROUPS. */
#define I8_AMX_GROUPS 256
void mr_i8_amx_gemm(const gemm_call *g);

#endif
