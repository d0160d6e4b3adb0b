/* bench.h: `millrace bench kernels`: each kernel against its limit.
 */
#ifndef MR_JOBS_BENCH_H
#define MR_JOBS_BENCH_H

#include <stdbool.h>

/* Measures the int8 GEMM on the matrix shapes of two small models, and attention, with all threads
 * of this process, beside the register-only int8 peak; prints a table, or JSON. 0: done. */
int mr_bench_kernels(bool json);

#endif
