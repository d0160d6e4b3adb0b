/* pace.h: how long a row will take from its admission to its result, learnt from the steps and from
 * the rows that have finished: when to admit no more before a deadline.
 *
 *     mr_pace p = {0};
 *     mr_pace_step(&p, tokens, seconds);    each step
 *     mr_pace_row(&p, result, n_out);       each result; n_out as in the plan: tokens at most
 *     if (mr_pace_expect_s(&p, prompt_tokens, flying, n_out) > seconds left) ... it would be cut
 */
#ifndef MR_JOBS_PACE_H
#define MR_JOBS_PACE_H

#include "src/engine.h"

typedef struct mr_pace {
  double busy_s;                /* of all steps, until there are enough of them */
  double tokens_per_s;          /* computed, lately: prompts and outputs together */
  uint64_t n;                   /* rows */
  double token_s;               /* between two tokens of a row */
  double share, share_variance; /* of its tokens at most that a row used */
} mr_pace;

void mr_pace_step(mr_pace *p, uint64_t tokens, double seconds);
void mr_pace_row(mr_pace *p, const mr_result *r, int n_out);
/* Longer than most such rows take, once `prompt_tokens` of prompts are computed: those that wait,
 * and its own. By the mean and deviation of the lengths of rows; while none has finished, of its
 * whole length, one token of each row in flight at a time. 0: not even a step is known. */
double mr_pace_expect_s(const mr_pace *p, uint64_t prompt_tokens, uint64_t flying, int n_out);

#endif
