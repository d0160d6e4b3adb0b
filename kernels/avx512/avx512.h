/* avx512.h: the parts of the AVX-512 table. */
#ifndef MR_KERNELS_AVX512_AVX512_H
#define MR_KERNELS_AVX512_AVX512_H

#include "kernels/kernels.h"

void mr_k_fill_avx512_i8(mr_kernels *k, int use_amx);

/* For CPUs with AVX512-BF16: */
void mr_k_fill_avx512_bf16(mr_kernels *k);
int mr_avx512_bf16_usable(void);

/* After all else is filled; for CPUs with AMX. */
void mr_k_fill_avx512_amx_attn(mr_kernels *k);

#endif
