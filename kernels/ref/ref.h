/* ref.h: the plain-C kernels by name, and what every table shares of the int8 scheme. */
#ifndef MR_KERNELS_REF_REF_H
#define MR_KERNELS_REF_REF_H

#include "kernels/kernels.h"

#define MR_I8_GROUP 64
/* Groups whose largest value is below this are stored as zeros: their inverse scale would overflow.
 */
#define MR_I8_TINY 1e-36f

/* Signs of the 64 values of one group along K before the Hadamard transform: bit i set: negate
 * value i. Both sides of a GEMM use the same (splitmix64, Steele, Lea, Flood 2014). */
static inline uint64_t mr_i8_signs(int group) {
  uint64_t z = ((uint64_t)group + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

void mr_k_fill_ref_gemm(mr_kernels *k);
void mr_k_fill_ref_elem(mr_kernels *k);
void mr_k_fill_ref_attn(mr_kernels *k);

#endif
