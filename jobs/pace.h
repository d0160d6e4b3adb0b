/* pace.h: how long work will take from now on, learnt from the steps and from the rows that have
 * finished: when to admit no more before a deadline.
 *
 *     mr_pace p = {0};
 *     mr_pace_step(&p, prompt_tokens, output_tokens, seconds);    each step
 *     mr_pace_row(&p, result, n_out);       each result; n_out as in the plan: tokens at most
 *     if (mr_pace_expect_s(&p, &work) > seconds left) ... some of it would be cut
 *
 * Steps of output tokens alone are what comes before a deadline: so much a step and so much a
 * token. From the other steps, what a token of a prompt costs beside these. Rows are taken to use
 * that share of the tokens that they may have which rows used so far.
 */
#ifndef MR_JOBS_PACE_H
#define MR_JOBS_PACE_H

#include "src/engine.h"

typedef struct mr_pace_sums { /* of steps; what is older counts less */
  double n, s, in, out;       /* steps, seconds, tokens of prompts and of outputs */
  double out_out, out_s;      /* products */
} mr_pace_sums;

typedef struct mr_pace {
  mr_pace_sums plain, mixed;    /* steps without tokens of prompts, and with them */
  uint64_t n;                   /* rows */
  double share, share_variance; /* of its tokens at most that a row used */
} mr_pace;

typedef struct mr_pace_work {
  double prompt_tokens; /* to compute */
  double output_tokens; /* at most, of all rows together */
  double longest;       /* ... of the row that has most: so many steps */
} mr_pace_work;

void mr_pace_step(mr_pace *p, double prompt_tokens, double output_tokens, double seconds);
void mr_pace_row(mr_pace *p, const mr_result *r, int n_out);
/* Until all of it is done; the longest row is taken for longer than most such rows. 0: no step is
 * known. */
double mr_pace_expect_s(const mr_pace *p, const mr_pace_work *w);
bool mr_pace_known(const mr_pace *p); /* a step is */

#endif
