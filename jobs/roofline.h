/* roofline.h: this machine's limits, measured: memory bandwidth, and what the GEMM of a kernel
 * table does on data in the cache.
 *
 *     mr_roofline r;
 *     mr_roofline_measure(mr_kernels_best(), threads, MR_ROOFLINE_ALL, 0.1, &r, &err);
 *
 * takes 0.1 seconds for each limit.
 *
 * Bandwidth is a triad a = b + s*c over arrays of 32 MiB each, with the bytes read and written
 * counted (McCalpin, STREAM). Rates count a multiply-add as two operations. The best of some rounds
 * counts: other programs only take away.
 */
#ifndef MR_JOBS_ROOFLINE_H
#define MR_JOBS_ROOFLINE_H

#include "io/err.h"
#include "kernels/kernels.h"

typedef struct mr_roofline {
  double bytes_per_s;
  double ops_per_s[MR_SCHEMES]; /* 0: the table has no such GEMM */
  int threads;
} mr_roofline;

/* threads 0: as many as the process may use. schemes: bit s set: measure the GEMM of scheme s (the
 * others stay 0). */
mr_code mr_roofline_measure(const mr_kernels *k, int threads, unsigned schemes, double seconds,
                            mr_roofline *out, mr_err *err);

/* Operations a second of that scheme's matrix product, measured for a moment; 0: not known. */
double mr_roofline_ops(mr_scheme scheme, int threads);

/* The int8 multiply-adds of registers alone with all threads, in operations a second: the yardstick
 * of everything that is int8. 0: the table's instruction set has no such measurement. */
mr_code mr_roofline_int8_peak(const mr_kernels *k, int threads, double seconds, double *ops_per_s,
                              mr_err *err);

/* The tokens a step from which on the arithmetic of weights takes longer than reading them:
 * weight_bytes are read once a step, flops_per_token done for each token. 0: not known. */
double mr_roofline_balance(double ops_per_s, double bytes_per_s, double weight_bytes,
                           double flops_per_token);

#define MR_ROOFLINE_ALL ((1u << MR_SCHEMES) - 1)

#endif
