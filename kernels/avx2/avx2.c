/* avx2.c: the AVX2 table; see kernels.h. */
#include "kernels/kernels.h"

void mr_k_fill_avx2(mr_kernels *k) { k->name = "avx2"; }
