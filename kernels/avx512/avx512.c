/* avx512.c: the AVX-512 table (F, BW, DQ, VL, VNNI); see kernels.h. */
#include "kernels/kernels.h"

void mr_k_fill_avx512(mr_kernels *k) { k->name = "avx512"; }
