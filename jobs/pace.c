#include "jobs/pace.h"

#include <math.h>

/* What is older fades, so that a batch that grows or shrinks is followed. */
#define MEMORY_ROWS 64
#define MEMORY_S 10.0
#define DECODE_COST 2.0 /* of a token of a row's output, to one of a prompt: guessed at the start  \
                         */

static void follow(double *mean, double x, double weight) {
  *mean += (x - *mean) * weight;
}

void mr_pace_step(mr_pace *p, uint64_t tokens, double seconds) {
  if (seconds <= 0)
    return;
  p->busy_s += seconds;
  double memory_s = p->busy_s < MEMORY_S ? p->busy_s : MEMORY_S;
  follow(&p->tokens_per_s, (double)tokens / seconds, seconds < memory_s ? seconds / memory_s : 1);
}

/* Tokens of its longest choice. */
static int length_of(const mr_result *r) {
  int most = 0;
  for (int i = 0; i < r->n_choices; i++)
    if (r->choices[i].n_sampled > most)
      most = r->choices[i].n_sampled;
  return most;
}

void mr_pace_row(mr_pace *p, const mr_result *r, int n_out) {
  int tokens = length_of(r);
  double weight = 1.0 / (double)(p->n < MEMORY_ROWS ? p->n + 1 : MEMORY_ROWS);
  p->n++;
  if (tokens > 1)
    follow(&p->token_s, (r->done_s - r->first_token_s) / (tokens - 1), p->token_s > 0 ? weight : 1);
  if (tokens > 0 && n_out > 0) {
    double share = (double)tokens / n_out, off = share - p->share;
    follow(&p->share, share, weight);
    follow(&p->share_variance, off * (share - p->share), weight);
  }
}

double mr_pace_expect_s(const mr_pace *p, uint64_t prompt_tokens, uint64_t flying, int n_out) {
  if (p->tokens_per_s <= 0)
    return 0;
  double wait_s = (double)prompt_tokens / p->tokens_per_s;
  if (p->n == 0)
    return wait_s + DECODE_COST * n_out * (double)(flying + 1) / p->tokens_per_s;
  double share = p->share + sqrt(p->share_variance > 0 ? p->share_variance : 0);
  return wait_s + (share < 1 ? share : 1) * n_out * p->token_s;
}
