/* gptq.h: rounding a matrix column by column so that later columns make up for the error of earlier
 * ones (Frantar et al. 2022, GPTQ; with a mask, Frantar and Alistarh 2023, SparseGPT).
 *
 *     mr_gptq *p;
 *     mr_gptq_open(&p, h, k, 0.01, pool, &err);         h: sums of products of columns [k, k]
 *     mr_gptq_rows(p, w, n, round, ctx, pool);          w [n, k] in place
 *     mr_gptq_close(p);
 *
 * The square error of the layer's output is (w - v) H (w - v)'. Columns go in the order of falling
 * diagonal. After column j is rounded, the columns that follow take -err/U[j,j] * U[j,.] with U the
 * upper Cholesky factor of H's inverse. H is damped by a share of its mean diagonal; all in double
 * but the rows themselves. Rows do not depend on each other nor on threads.
 */
#ifndef MR_SRC_GPTQ_H
#define MR_SRC_GPTQ_H

#include <stdbool.h>

#include "io/err.h"
#include "kernels/pool.h"

typedef struct mr_gptq mr_gptq;

/* What v of column `col` becomes in row `row`; called by any thread. */
typedef float (*mr_gptq_round)(void *ctx, int row, int col, float v);

/* in_order: columns go from the first to the last. MR_E_NOMEM; MR_E_DATA: h is no such sum. */
mr_code mr_gptq_open(mr_gptq **out, const float *h, int k, double damp, bool in_order,
                     mr_pool *pool, mr_err *err);
void mr_gptq_close(mr_gptq *p); /* NULL is fine */

mr_code mr_gptq_rows(const mr_gptq *p, float *w, int n, mr_gptq_round round, void *ctx,
                     mr_pool *pool, mr_err *err);

/* As mr_gptq_rows, and two of each four columns become 0: those whose loss is least, chosen where
 * their group of four begins. For a p that was opened in_order; k is a multiple of 4. */
mr_code mr_gptq_sparse(const mr_gptq *p, float *w, int n, mr_pool *pool, mr_err *err);

#endif
