/* device_gemm.h: the maker's GEMM library (cublasLt, hipBLASLt) for products of bfloat16, opened at
 * run time, and held to batch invariance.
 *
 *     mr_device_gemm *g;
 *     mr_device_gemm_open(&g, device, &err);          MR_E_UNAVAILABLE: and why
 *     mr_device_gemm_plan(g, n, k, &p, &err);         p NULL: not for this shape
 *     mr_device_gemm_run(g, stream, p, a, w, m, y, ld, false);  y[m, n] = a[m, k] w[n, k]^T
 *     mr_device_gemm_close(g);                        before the device
 *
 * What a library makes of a row may depend on the rows beside it: it chooses its algorithm by their
 * number, and may split K. So each shape (n, k) has one algorithm, without split K where that can
 * be asked for, and is only ever called with 64, 256 or 1024 rows; the last rows of a product are
 * padded. And before it serves, the algorithm is tried: rows that are repeated at other places,
 * beside others, in all three sizes, written and added, must have the same bits, and be right. The
 * first that passes is taken. Where none does, the shape is not for the library;
 * mr_device_gemm_words says so.
 *
 * The bits are the library's own: they differ from those of kernels/gpu/gemm.cu in the last places,
 * and may differ from version to version. mr_device_gemm_name is part of what a job's numerics are.
 */
#ifndef MR_SRC_DEVICE_GEMM_H
#define MR_SRC_DEVICE_GEMM_H

#include "src/device.h"

#define MR_GEMM_ROWS 64 /* a product is padded to a multiple of it */

typedef struct mr_device_gemm mr_device_gemm;
typedef struct mr_gemm_plan mr_gemm_plan;

/* Takes memory of the device beside what mr_device_take gives out. MR_E_NOMEM, MR_E_UNAVAILABLE. */
mr_code mr_device_gemm_open(mr_device_gemm **out, mr_device *d, mr_err *err);
void mr_device_gemm_close(mr_device_gemm *g);             /* NULL is fine */
const char *mr_device_gemm_name(const mr_device_gemm *g); /* "cublasLt 130002"; borrowed */

/* k: a multiple of MR_GPU_K. Waits for the device the first time for each shape. Owned by g; NULL:
 * the shape is not for the library. An error is the device's, or no memory for the trial: which
 * shapes are whose must not depend on memory. */
mr_code mr_device_gemm_plan(mr_device_gemm *g, int n, int k, const mr_gemm_plan **out, mr_err *err);

/* a and y have room for m rows padded to MR_GEMM_ROWS, which are read and written; ld: floats, a
 * multiple of 16. accumulate: y +=. The device's codes (device.h). */
mr_code mr_device_gemm_run(mr_device_gemm *g, mr_stream *s, const mr_gemm_plan *p,
                           const mr_gpu_bf16 *a, const mr_gpu_bf16 *w, int m, float *y, size_t ld,
                           bool accumulate);

/* Which shapes it serves, and why not the others; until close. */
const char *mr_device_gemm_words(const mr_device_gemm *g);

static inline int mr_gemm_padded(int rows) {
  return (rows + MR_GEMM_ROWS - 1) / MR_GEMM_ROWS * MR_GEMM_ROWS;
}

#endif
