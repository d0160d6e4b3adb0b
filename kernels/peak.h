/* peak.h: what the int8 and bfloat16 multipliers of this CPU give when nothing but registers is in
 * their way: the yardstick of the GEMM (bench kernels).
 */
#ifndef MR_KERNELS_PEAK_H
#define MR_KERNELS_PEAK_H

#include "kernels/kernels.h"

/* Runs `loops` rounds of independent int8 multiply-adds with the instructions of this table (VNNI;
 * on AVX2 maddubs, madd, add); returns the operations done, a multiply-add as two. 0: the table has
 * none. The caller takes the time. Matrix tiles (AMX) are not counted: a GEMM on them may pass it.
 */
double mr_peak_int8(const mr_kernels *k, long loops);

/* The same of bfloat16 multiply-adds; 0 where the table has no such instruction. */
double mr_peak_bf16(const mr_kernels *k, long loops);

#endif
