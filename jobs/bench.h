/* bench.h: the larger parts of `millrace bench`. */
#ifndef MR_JOBS_BENCH_H
#define MR_JOBS_BENCH_H

#include <stdbool.h>

#include "io/err.h"
#include "src/engine.h"

/* Measures the int8 GEMM on the matrix shapes of two small models, and attention, with all threads
 * of this process, beside the register-only int8 peak; prints a table, or JSON. 0: done. */
int mr_bench_kernels(bool json);

/* A way to compute (by default fast mode) against exact on the text of n files: the divergence (KL,
 * in nats) of the next token's distribution, its 99th percentile, how often both have the same
 * first choice, and what it adds to perplexity. Prints a line a file and one for all. threads 0:
 * all; kv_type -1: the default. */
mr_code mr_bench_accuracy(const char *model, int threads, mr_compute compute, int kv_type,
                          char **files, int n, bool json, mr_err *err);

/* A GPU's copies and matrix instructions, and its kernels on the shapes of an 8B model beside them
 * (an emulated one: on tiny shapes, once, and the figures mean nothing). Prints a table, or JSON.
 */
mr_code mr_bench_device(const char *name, bool json, mr_err *err);

#endif
