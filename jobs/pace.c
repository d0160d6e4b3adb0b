#include "jobs/pace.h"

#include <math.h>

/* What is older fades, so that a machine that gets slower or faster is followed. */
#define MEMORY_ROWS 64
#define MEMORY_S 20.0
#define OUTPUT_COST 2.0 /* of a token of an output, to one of a prompt: guessed at the start */
#define FEW_PROMPT 8    /* an output token or more for each eighth of a prompt's: all but plain */
#define ALIKE 0.1       /* batches that differ by less tell little of what a step costs by itself */

static void add(mr_pace_sums *m, double in, double out, double seconds) {
  m->n++;
  m->s += seconds;
  m->in += in;
  m->out += out;
  m->out_out += out * out;
  m->out_s += out * seconds;
}

static void fade(mr_pace_sums *m, double by) {
  double *const all[] = {&m->n, &m->s, &m->in, &m->out, &m->out_out, &m->out_s};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    *all[i] *= by;
}

void mr_pace_step(mr_pace *p, double prompt_tokens, double output_tokens, double seconds) {
  if (seconds <= 0 || prompt_tokens + output_tokens <= 0)
    return;
  double by = exp(-seconds / MEMORY_S);
  fade(&p->plain, by);
  fade(&p->mixed, by);
  bool plain = prompt_tokens * FEW_PROMPT <= output_tokens;
  add(plain ? &p->plain : &p->mixed, prompt_tokens, output_tokens, seconds);
}

typedef struct cost { /* in seconds, of a step, of a token of a prompt, of one of an output */
  double step, in, out;
} cost;

/* A line through the plain steps, drawn towards one through 0 where batches were alike. */
static void plain_cost(const mr_pace_sums *m, cost *c) {
  double mean = m->out / m->n, mean_s = m->s / m->n;
  double pull = ALIKE * ALIKE * mean * mean, spread = m->out_out / m->n - mean * mean;
  double joint = m->out_s / m->n - mean * mean_s;
  c->out = (joint + pull * mean_s / mean) / (spread + pull);
  c->out = c->out < 0 ? 0 : c->out > mean_s / mean ? mean_s / mean : c->out;
  c->step = mean_s - c->out * mean;
}

static cost cost_of(const mr_pace *p) {
  const mr_pace_sums *m = &p->mixed;
  cost c = {0, m->n > 0 ? m->s / (m->in + OUTPUT_COST * m->out) : 0, 0};
  if (p->plain.n > 0)
    plain_cost(&p->plain, &c);
  else
    c.out = OUTPUT_COST * c.in;
  if (p->plain.n > 0 && m->n > 0) { /* what their output tokens leave, but not too little */
    double left = (m->s - c.step * m->n - c.out * m->out) / m->in, least = c.in / 2;
    c.in = left > least ? left : least;
  } else if (m->n <= 0) {
    c.in = c.out;
  }
  return c;
}

void mr_pace_row(mr_pace *p, const mr_result *r, int n_out) {
  double weight = 1.0 / (double)(p->n < MEMORY_ROWS ? p->n + 1 : MEMORY_ROWS), tokens = 0;
  for (int i = 0; i < r->n_choices; i++)
    tokens += r->choices[i].n_sampled;
  if (tokens <= 0 || n_out <= 0)
    return;
  double share = tokens / n_out, off = share - p->share;
  p->n++;
  p->share += off * weight;
  p->share_variance += (off * (share - p->share) - p->share_variance) * weight;
}

double mr_pace_expect_s(const mr_pace *p, const mr_pace_work *w) {
  double mean = p->n ? p->share : 1;
  double most = mean + sqrt(p->share_variance > 0 ? p->share_variance : 0);
  cost c = cost_of(p);
  return c.step * w->longest * (most < 1 ? most : 1) + c.in * w->prompt_tokens +
         c.out * w->output_tokens * (mean < 1 ? mean : 1);
}

bool mr_pace_known(const mr_pace *p) {
  return p->plain.n + p->mixed.n > 0;
}
