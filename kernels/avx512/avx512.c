/* avx512.c: the AVX-512 table (F, BW, DQ, VL, VNNI): the shared vector kernels on 16 lanes, and its
 * own int8 GEMM. See kernels.h. */
#include "kernels/avx512/avx512.h"
#include "kernels/avx512/avx512_amx.h"

#include "kernels/simd/vec512.h"

#include "kernels/simd/attn.h"
#include "kernels/simd/elem.h"
#include "kernels/simd/gemmf.h"

void mr_k_fill_avx512(mr_kernels *k) {
  k->name = "avx512";
  simd_fill_elem(k);
  simd_fill_attn(k);
  simd_fill_gemmf(k);
  int amx = mr_amx_usable();
  mr_k_fill_avx512_i8(k, amx);
  if (!amx && mr_avx512_bf16_usable())
    mr_k_fill_avx512_bf16(k);
  if (amx) {
    mr_k_fill_avx512_amx_attn(k);
    k->attention_shared = NULL;
    k->attention_split = NULL;
  }
}
