/* avx2.h: the parts of the AVX2 table. */
#ifndef MR_KERNELS_AVX2_AVX2_H
#define MR_KERNELS_AVX2_AVX2_H

#include "kernels/kernels.h"

void mr_k_fill_avx2_i8(mr_kernels *k);

#endif
