/* avx2.c: the AVX2 table (AVX2, FMA, F16C): the shared vector kernels on 8 lanes, and its own int8
 * GEMM. See kernels.h. */
#include "kernels/avx2/avx2.h"

#include "kernels/simd/vec256.h"

#include "kernels/simd/attn.h"
#include "kernels/simd/elem.h"
#include "kernels/simd/gemmf.h"

void mr_k_fill_avx2(mr_kernels *k) {
  k->name = "avx2";
  simd_fill_elem(k);
  simd_fill_attn(k);
  simd_fill_gemmf(k);
  mr_k_fill_avx2_i8(k);
}
