/* estimate.h: how long a job will take, from a short measurement of this machine and the model's
 * arithmetic.
 *
 * Measured (about half a second): the rate of the GEMM kernel that the engine will use, on all its
 * threads, and the rates at which they read memory and pack weights. Predicted, with every row
 * running to its limit of output tokens:
 *     load    = packed weights / packing rate
 *     prefill = prompt tokens * flops of a prompt token / GEMM rate
 *     decode  = steps * (max(batch * flops of an output token / GEMM rate, weights / memory rate)
 *                        + keys and values of the batch / memory rate)
 * where steps = output tokens / batch. Attention in prefill, sampling and output are not counted.
 * The batch is the largest that the limits allow; what limits it, or the rate, is named.
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
  double gemm_flops_per_s, memory_bytes_per_s, pack_bytes_per_s; /* measured */
  double batch;                                /* rows in flight, a mean */
  double load_s, prefill_s, decode_s, seconds;
  const char *bound_by; /* "rows", "kv-memory": the batch; "compute", "memory-bandwidth" */
} mr_estimate;

/* MR_E_NOMEM, MR_E_UNAVAILABLE. */
mr_code mr_estimate_run(const mr_engine_info *info, const mr_engine_opts *opts,
                        const mr_workload *w, mr_estimate *out, mr_err *err);

#endif
