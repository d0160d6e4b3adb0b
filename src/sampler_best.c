#include "src/sampler_best.h"

#include <math.h>
#include <string.h>

typedef struct known { /* candidates, after changes to single logits */
  float x[MR_GPU_BEST];
  int32_t id[MR_GPU_BEST];
  int n;
} known;

static bool all_known(const mr_gpu_best *b, int n_vocab) {
  return b->n == n_vocab;
}

mr_gpu_ask mr_sampler_ask(const mr_sampling *s, uint64_t row_key, int choice, int position) {
  mr_gpu_ask a = {.u = -1, .inverse = 1, .probe = -1};
  if (mr_sampler_is_greedy(s))
    return a;
  a.inverse = 1 / s->temperature;
  a.u = mr_sampler_uniform(s, row_key, choice, position);
  return a;
}

mr_gpu_ask mr_sampler_ask_for(int32_t id) {
  return (mr_gpu_ask){.u = -1, .inverse = 1, .probe = id};
}

/* ---------------------------------------------------------------- reports */

/* The logit of a token, if it is known. */
static bool logit_of(const mr_gpu_best *b, const mr_gpu_ask *ask, int32_t id, float *x, int *rank) {
  for (int i = 0; i < b->n; i++)
    if (b->id[i] == id) {
      *x = b->x[i];
      *rank = i + 1;
      return true;
    }
  if (ask->probe == id) {
    *x = b->probe_x;
    *rank = b->rank;
    return true;
  }
  *rank = 0;
  *x = b->drawn_x;
  return b->drawn == id;
}

static mr_code report(const mr_gpu_best *b, const mr_gpu_ask *ask, int n_vocab, int32_t id,
                      int n_top, mr_sampled *out, int *rank) {
  double lse = b->max + log(b->sum);
  float x;
  int place;
  if (!logit_of(b, ask, id, &x, &place) || (rank && !place))
    return MR_E_AGAIN;
  if (rank)
    *rank = place;
  out->id = id;
  out->logprob = (float)(x - lse);
  n_top = n_top < MR_TOP_LOGPROBS_MAX ? n_top : MR_TOP_LOGPROBS_MAX;
  n_top = n_top < n_vocab ? n_top : n_vocab;
  out->n_top = n_top > 0 ? n_top : 0;
  for (int i = 0; i < out->n_top; i++) {
    out->top_id[i] = b->id[i];
    out->top_logprob[i] = (float)(b->x[i] - lse);
  }
  return MR_OK;
}

mr_code mr_sampler_score_best(const mr_gpu_best *b, const mr_gpu_ask *ask, int n_vocab, int32_t id,
                              int n_top, mr_sampled *out, int *rank) {
  memset(out, 0, sizeof *out);
  return b->bad ? MR_E_DATA : report(b, ask, n_vocab, id, n_top, out, rank);
}

/* ---------------------------------------------------------------- changes to single logits */

static bool penalizes(const mr_sampling *s, const mr_sampler_state *st) {
  return s->repetition_penalty != 1 ||
         (st->n_output > 0 && (s->presence_penalty != 0 || s->frequency_penalty != 0));
}

/* No logit grows, so that one that is not known stays below those that are. */
static bool only_lowers(const mr_sampling *s) {
  return s->n_bias == 0 && s->repetition_penalty >= 1 && s->presence_penalty >= 0 &&
         s->frequency_penalty >= 0;
}

static int count(const int32_t *ids, int n, int32_t id) {
  int found = 0;
  for (int i = 0; i < n; i++)
    found += ids[i] == id;
  return found;
}

static float changed(const mr_sampling *s, const mr_sampler_state *st, int32_t id, float x) {
  int n = count(st->output, st->n_output, id);
  bool seen = n > 0 || (s->repetition_penalty != 1 && count(st->prompt, st->n_prompt, id) > 0);
  if (seen)
    x = x > 0 ? x / s->repetition_penalty : x * s->repetition_penalty;
  return n > 0 ? x - (s->presence_penalty + s->frequency_penalty * (float)n) : x;
}

static bool is_better(const known *k, int i, float x, int32_t id) {
  return k->x[i] > x || (k->x[i] == x && k->id[i] < id);
}

/* The largest in order after the changes: those that are above all that is not known. */
static void change(known *k, const mr_gpu_best *b, const mr_sampling *s, const mr_sampler_state *st,
                   const int32_t *ends, int n_ends, int n_vocab) {
  const float least = b->x[b->n - 1];
  bool all = all_known(b, n_vocab);
  k->n = 0;
  for (int i = 0; i < b->n; i++) {
    float x = penalizes(s, st) ? changed(s, st, b->id[i], b->x[i]) : b->x[i];
    if (st->n_output < s->min_tokens && count(ends, n_ends, b->id[i]))
      x = -INFINITY;
    if (!all && !(x > least))
      continue;
    int at = k->n++;
    for (; at > 0 && !is_better(k, at - 1, x, b->id[i]); at--) {
      k->x[at] = k->x[at - 1];
      k->id[at] = k->id[at - 1];
    }
    k->x[at] = x;
    k->id[at] = b->id[i];
  }
}

/* ---------------------------------------------------------------- draws */

static double weight(float x, float max) {
  return exp((double)x - max);
}

/* In order of id, as the sampler's own draw. */
static int32_t draw(known *k, float max, double u) {
  double total = 0, sum = 0;
  for (int i = 1; i < k->n; i++)
    for (int j = i; j > 0 && k->id[j - 1] > k->id[j]; j--) {
      float x = k->x[j];
      int32_t id = k->id[j];
      k->x[j] = k->x[j - 1];
      k->id[j] = k->id[j - 1];
      k->x[j - 1] = x;
      k->id[j - 1] = id;
    }
  for (int i = 0; i < k->n; i++)
    total += weight(k->x[i], max);
  int32_t last = k->id[0];
  for (int i = 0; i < k->n && sum <= u * total; i++) {
    double w = weight(k->x[i], max);
    last = w > 0 ? k->id[i] : last;
    sum += w;
  }
  return last;
}

/* Cuts candidates down to those that filters leave. MR_E_AGAIN: they may leave unknown ones. total:
 * the weights of all; < 0: not known. */
static mr_code filter(known *k, const mr_sampling *s, int n_vocab, bool all, double total) {
  bool top_k = s->top_k > 0 && s->top_k < n_vocab, whole = all;
  float max = k->x[0];
  if (top_k) {
    whole = all || k->n >= s->top_k;
    k->n = s->top_k < k->n ? s->top_k : k->n;
    total = 0;
    for (int i = 0; i < k->n && whole; i++)
      total += weight(k->x[i], max);
  }
  if (top_k && !whole)
    return MR_E_AGAIN;
  if (s->top_p < 1) {
    double sum = 0, goal = s->top_p * total;
    int n = 0;
    while (n < k->n && (n == 0 || sum < goal))
      sum += weight(k->x[n++], max);
    if (total < 0 || (sum < goal && !whole))
      return MR_E_AGAIN;
    k->n = n;
    whole = true;
  }
  if (s->min_p > 0) {
    float floor = max + logf(s->min_p < 1 ? s->min_p : 1);
    int n = 1;
    while (n < k->n && k->x[n] >= floor)
      n++;
    if (n == k->n && !whole)
      return MR_E_AGAIN;
    k->n = n;
    whole = true;
  }
  return whole ? MR_OK : MR_E_AGAIN;
}

static mr_code draw_best(const mr_sampling *s, const mr_gpu_best *b, int n_vocab, bool changes,
                         known *k, double u, int32_t *id) {
  bool filters = (s->top_k > 0 && s->top_k < n_vocab) || s->top_p < 1 || s->min_p > 0;
  if (!filters && !changes && b->drawn >= 0) {
    *id = b->drawn;
    return MR_OK;
  }
  float inverse = s->temperature != 1 ? 1 / s->temperature : 1;
  for (int i = 0; i < k->n; i++)
    k->x[i] *= inverse;
  bool all = all_known(b, n_vocab);
  double total = changes ? -1 : b->total;
  for (int i = 0; i < k->n && all && changes; i++)
    total = (i ? total : 0) + weight(k->x[i], k->x[0]);
  mr_code rc = filter(k, s, n_vocab, all, total);
  if (!rc)
    *id = draw(k, k->x[0], u);
  return rc;
}

mr_code mr_sampler_pick_best(const mr_sampling *s, const mr_gpu_best *b, const mr_gpu_ask *ask,
                             int n_vocab, const mr_sampler_state *st, const int32_t *ends,
                             int n_ends, uint64_t row_key, int choice, mr_sampled *out) {
  bool masks = st->n_output < s->min_tokens && n_ends > 0;
  bool changes = s->n_bias > 0 || penalizes(s, st) || masks;
  mr_gpu_ask mine = mr_sampler_ask(s, row_key, choice, st->n_output);
  if (b->bad)
    return MR_E_DATA;
  if (changes && !only_lowers(s))
    return MR_E_AGAIN;
  if (mine.u != ask->u || mine.inverse != ask->inverse) /* other choices of the same row */
    return MR_E_AGAIN;
  known k;
  change(&k, b, s, st, ends, n_ends, n_vocab);
  if (k.n == 0 || (changes && !isfinite(k.x[0])))
    return all_known(b, n_vocab) ? MR_E_DATA : MR_E_AGAIN;
  memset(out, 0, sizeof *out);
  out->id = k.id[0];
  mr_code rc = MR_OK;
  if (!mr_sampler_is_greedy(s))
    rc = draw_best(s, b, n_vocab, changes, &k, mine.u, &out->id);
  if (!rc && s->logprobs >= 0)
    rc = report(b, ask, n_vocab, out->id, s->logprobs, out, NULL);
  return rc;
}
