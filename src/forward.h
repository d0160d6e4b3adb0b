/* forward.h: one step of the model over a ragged batch.
 *
 * A step is a list of runs; a run is consecutive new tokens of one sequence (a prefill chunk, one
 * decode token, or drafts to verify). Tokens are packed without padding into [T, d]; logits are
 * computed only for the rows asked for. A row's bits depend on that row's own sequence alone (batch
 * invariance).
 */
#ifndef MR_SRC_FORWARD_H
#define MR_SRC_FORWARD_H

#include "src/backend.h" /* mr_run, mr_step_stats */
#include "src/backend_gpu.h"

/* Activations and scratch for steps of up to max_tokens. */
typedef struct mr_forward mr_forward;

mr_code mr_forward_open(mr_forward **out, const mr_model *m, const mr_kernels *k, mr_pool *pool,
                        mr_kv *kv, int max_tokens, int max_logits, mr_err *err);
/* The same on a GPU; the matrices need not be packed. Columns: of its buffers of max_tokens rows,
 * in floats. */
mr_code mr_forward_open_gpu(mr_forward **out, const mr_model *m, mr_device *dev, mr_kv *kv,
                            mr_gpu_scheme scheme, int streamed, int max_tokens, int max_logits,
                            mr_err *err);
size_t mr_forward_columns(const mr_model *m);
void mr_forward_close(mr_forward *f);
/* From now on; NULL: nobody. tap->rows has room for max_tokens rows. */
void mr_forward_tap(mr_forward *f, const mr_tap *tap);

/* Runs the step. Logits of the wanted tokens, in run and token order, are at
 * mr_forward_logits(f, i), i counting from 0, valid until the next step; softcap and logit scale
 * already applied. stats may be NULL. */
mr_code mr_forward_step(mr_forward *f, const mr_run *runs, int n_runs, mr_step_stats *stats,
                        mr_err *err);
float *mr_forward_logits(const mr_forward *f, int i); /* [n_vocab] */

/* A device that chooses by itself: with asks (one a row of logits; borrowed, for the next step) the
 * rows stay there, but for those that are fetched. */
bool mr_forward_can_ask(const mr_forward *f);
void mr_forward_ask(mr_forward *f, const mr_gpu_ask *asks);
const mr_gpu_best *mr_forward_best(const mr_forward *f, int i);
mr_code mr_forward_fetch(mr_forward *f, const int32_t *rows, int n, mr_err *err); /* ascending */

#endif
