/* estimate.h: how long a job will take, from a short measurement of this machine and the model's
 * arithmetic.
 *
 * Measured (about half a second): the rate of the GEMM kernel that the engine will use, on all its
 * threads, and the rate at which they read memory. Predicted, with every row running to its limit
 * of output tokens:
 *     prefill = prompt tokens * flops of a prompt token / GEMM rate
 *     decode  = steps * max(batch * flops of an output token / GEMM rate, bytes / memory rate)
 * where steps = output tokens / batch, and a step reads the packed weights and the keys and values
 * of its rows. Attention's own arithmetic, sampling and output are not counted. The batch is the
 * largest that the limits allow; what limits it, or the rate, is named.
 */
#ifndef MR_JOBS_ESTIMATE_H
#define MR_JOBS_ESTIMATE_H

#include <stdint.h>

#include "src/engine.h"

typedef struct mr_workload {
  uint64_t rows;                         /* good ones */
  uint64_t prompt_tokens, output_tokens; /* output: at most */
} mr_workload;

typedef struct mr_estimate {
  double gemm_flops_per_s, memory_bytes_per_s; /* measured */
  double batch;                                /* rows in flight, a mean */
  double prefill_s, decode_s, seconds;
  const char *bound_by; /* "rows", "kv-memory": the batch; "compute", "memory-bandwidth" */
} mr_estimate;

/* MR_E_NOMEM, MR_E_UNAVAILABLE. */
mr_code mr_estimate_run(const mr_engine_info *info, const mr_engine_opts *opts,
                        const mr_workload *w, mr_estimate *out, mr_err *err);

#endif
