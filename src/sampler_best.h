/* sampler_best.h: a token from what a device knows of a row of logits (mr_gpu_best): its largest
 * values, sums of weights, a value drawn. The choice is the one that mr_sampler_pick makes of the
 * whole row; where that takes more than is known, MR_E_AGAIN asks for the row.
 *
 * Known is: greedy, also under penalties and min_tokens that only lower logits; draws from all by
 * weight, without changes to single logits; draws by top_k, top_p and min_p whose candidates are
 * among the largest; logprobs of what is known. Not: logit_bias, negative penalties.
 */
#ifndef MR_SRC_SAMPLER_BEST_H
#define MR_SRC_SAMPLER_BEST_H

#include "kernels/gpu/args.h"
#include "src/sampler.h"

/* What a pick asks for. */
mr_gpu_ask mr_sampler_ask(const mr_sampling *s, uint64_t row_key, int choice, int position);
/* The same token for a prompt or for scores. */
mr_gpu_ask mr_sampler_ask_for(int32_t id);

/* As mr_sampler_pick and mr_sampler_score (sampler.h); `ask`: what the device was asked. */
mr_code mr_sampler_pick_best(const mr_sampling *s, const mr_gpu_best *b, const mr_gpu_ask *ask,
                             int n_vocab, const mr_sampler_state *st, const int32_t *ends,
                             int n_ends, uint64_t row_key, int choice, mr_sampled *out);
mr_code mr_sampler_score_best(const mr_gpu_best *b, const mr_gpu_ask *ask, int n_vocab, int32_t id,
                              int n_top, mr_sampled *out, int *rank);

#endif
