/* tune.h: what is measured once for each machine and model: how the work of a matrix product is
 * cut, and how many tokens a step should have. Only speed depends on it: all ways give the same
 * bits.
 *
 * FlashDecoding++ (Hong et al. 2023, section 5) chooses a kernel by M for each [K, N] from a table
 * that is measured beforehand. Here register tiles follow from M alone, and what may be better or
 * worse by shape and machine is the dataflow: all workers take panels of one block of rows, so that
 * weights are read once, or each has a block of rows of its own, which it packed itself and whose
 * results it reads next (src/backend_cpu_linear.c).
 *
 *     mr_tuning t = {0};           or as an earlier run left it
 *     opts.tuning = &t;            mr_engine_open measures where t.step_tokens is 0
 */
#ifndef MR_SRC_TUNE_H
#define MR_SRC_TUNE_H

#include <limits.h>

#include "src/kvcache.h"
#include "src/model.h"

#define MR_TUNE_SHAPES 8
#define MR_TUNE_NEVER INT_MAX

typedef struct mr_tuned { /* products that read the same rows */
  int k, n;               /* n: of all matrices together */
  int own_rows;           /* so many rows for each worker and more: blocks of their own */
} mr_tuned;

struct mr_tuning {
  int step_tokens; /* with which a token costs next to the least; 0: not measured */
  int n_shapes;
  mr_tuned shapes[MR_TUNE_SHAPES];
  double took_s; /* the measurement; 0: it was not made by this process */
};

/* Of products of that shape; `otherwise` where nothing is known. */
int mr_tuned_own_rows(const mr_tuning *t, int k, int n, int otherwise);

/* Measures with the model's packed matrices, for about a second at most (backend_cpu_tune.c); where
 * other work has the processors meanwhile, nothing is concluded. kv: any of the model. */
mr_code mr_tune(mr_tuning *out, mr_model *m, const mr_kernels *k, mr_pool *pool, mr_kv *kv,
                mr_err *err);

#endif
