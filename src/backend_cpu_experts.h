/* backend_cpu_experts.h: the experts of a layer as one ragged GEMM: private to backend_cpu*.c. */
#ifndef MR_SRC_BACKEND_CPU_EXPERTS_H
#define MR_SRC_BACKEND_CPU_EXPERTS_H

#include "src/backend_cpu.h"

typedef struct mr_cpu_experts mr_cpu_experts;

/* Room for steps of max_tokens; *out stays NULL where the model has no experts. False: out of
 * memory. */
bool mr_cpu_experts_open(mr_cpu_experts **out, const mr_cpu *c);
void mr_cpu_experts_close(mr_cpu_experts *x); /* NULL is fine */
void mr_cpu_run_experts(mr_backend *b, const mr_experts *op);

#endif
