#include "src/sampler.h"

#include <math.h>
#include <string.h>

#define GREEDY_BELOW 1e-5f /* dividing by less would only overflow */
#define DEFAULT_SEED 0x6d696c6c72616365ull
#define STRIDE 64 /* values that one test skips together */
#define BLOCK 256 /* values whose probability is summed together */

const mr_sampling mr_sampling_default = {.temperature = 1,
                                         .top_p = 1,
                                         .repetition_penalty = 1,
                                         .max_tokens = -1,
                                         .logprobs = -1,
                                         .prompt_logprobs = -1,
                                         .n = 1};

typedef struct cand {
  float x; /* logit */
  int32_t id;
} cand;

/* ---------------------------------------------------------------- random numbers */

void mr_philox(uint32_t out[4], const uint32_t counter[4], const uint32_t key[2]) {
  uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
  uint32_t k0 = key[0], k1 = key[1];
  for (int round = 0; round < 10; round++) {
    uint64_t a = (uint64_t)0xD2511F53u * c0, b = (uint64_t)0xCD9E8D57u * c2;
    c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
    c1 = (uint32_t)b;
    c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
    c3 = (uint32_t)a;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  out[0] = c0;
  out[1] = c1;
  out[2] = c2;
  out[3] = c3;
}

bool mr_sampler_is_greedy(const mr_sampling *s) {
  return s->temperature < GREEDY_BELOW;
}

double mr_sampler_uniform(const mr_sampling *s, uint64_t row_key, int choice, int position) {
  uint64_t seed = s->has_seed ? s->seed : DEFAULT_SEED, row = s->has_seed ? 0 : row_key;
  uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
  uint32_t counter[4] = {(uint32_t)position, (uint32_t)choice, (uint32_t)row,
                         (uint32_t)(row >> 32)};
  uint32_t w[4];
  mr_philox(w, counter, key);
  uint64_t bits = ((uint64_t)(w[0] >> 5) << 26) | (w[1] >> 6);
  return (double)bits * 0x1p-53;
}

/* ---------------------------------------------------------------- candidates
 * Their order is total (larger logit, then lower id), so what is kept depends on no algorithm. */

static bool better(cand a, cand b) {
  return a.x > b.x || (a.x == b.x && a.id < b.id);
}

/* Heap of c[0..n): the best on top, or the worst. */
static void sift_down(cand *c, int n, int i, bool best_on_top) {
  for (;;) {
    int child = 2 * i + 1;
    if (child >= n)
      return;
    if (child + 1 < n && better(c[child + 1], c[child]) == best_on_top)
      child++;
    if (better(c[child], c[i]) != best_on_top)
      return;
    cand t = c[i];
    c[i] = c[child];
    c[child] = t;
    i = child;
  }
}

static void heapify(cand *c, int n, bool best_on_top) {
  for (int i = n / 2 - 1; i >= 0; i--)
    sift_down(c, n, i, best_on_top);
}

static bool any_from(const float *x, float floor) {
  int hit = 0;
  for (int i = 0; i < STRIDE; i++)
    hit |= x[i] >= floor;
  return hit;
}

/* The k largest, 1 <= k <= n, in no useful order (a heap with the worst on top). */
static void gather_top(const float *x, int n, int k, cand *out) {
  for (int i = 0; i < k; i++)
    out[i] = (cand){x[i], i};
  heapify(out, k, false);
  for (int i = k; i < n;) {
    if (n - i >= STRIDE && !any_from(x + i, out[0].x)) {
      i += STRIDE;
      continue;
    }
    int end = n - i < STRIDE ? n : i + STRIDE;
    for (; i < end; i++) {
      if (x[i] <= out[0].x) /* an equal one with a higher id is worse */
        continue;
      out[0] = (cand){x[i], i};
      sift_down(out, k, 0, false);
    }
  }
}

/* ---------------------------------------------------------------- sets of candidates
 * x and id side by side, so that the vector kernel sums their weights e^(x - max). */

typedef struct cands {
  float *x;
  int32_t *id; /* NULL: the index */
  int n;
} cands;

static double weight(float x, float max) {
  return exp((double)x - max);
}

static double mass_of(const mr_kernels *k, const float *x, int n, float max) {
  double lse = n ? k->logsumexp(x, n) : -INFINITY;
  return lse > -INFINITY ? exp(lse - max) : 0; /* NaN where all are masked */
}

static double block_masses(const mr_kernels *k, const cands *c, float max, double *mass) {
  double total = 0;
  for (int i = 0, b = 0; i < c->n; i += BLOCK, b++) {
    mass[b] = mass_of(k, c->x + i, c->n - i < BLOCK ? c->n - i : BLOCK, max);
    total += mass[b];
  }
  return total;
}

/* All values >= floor, in order of id. */
static void gather_from(const float *x, int n, float floor, cands *out) {
  int m = 0;
  for (int i = 0; i < n; i += STRIDE) {
    int end = n - i < STRIDE ? n : i + STRIDE;
    if (end == i + STRIDE && !any_from(x + i, floor))
      continue;
    for (int j = i; j < end; j++) { /* without a branch: what is not wanted is written over */
      out->x[m] = x[j];
      out->id[m] = j;
      m += x[j] >= floor;
    }
  }
  out->n = m;
}

static void keep_from(cands *c, float floor) {
  int m = 0;
  for (int i = 0; i < c->n; i++) {
    c->x[m] = c->x[i];
    c->id[m] = c->id[i];
    m += c->x[i] >= floor;
  }
  c->n = m;
}

static cand at(const cands *c, int i) {
  return (cand){c->x[i], c->id[i]};
}

static void put(cands *c, int i, cand v) {
  c->x[i] = v.x;
  c->id[i] = v.id;
}

/* Parts from..to-1 around a pivot: better ones, the pivot at the place returned, worse ones. */
static int split(cands *c, int from, int to) {
  cand lo = at(c, from), mid = at(c, from + (to - from) / 2), hi = at(c, to - 1);
  int place = better(lo, mid) == better(mid, hi)  ? from + (to - from) / 2
              : better(mid, lo) == better(lo, hi) ? from
                                                  : to - 1;
  cand pivot = at(c, place);
  put(c, place, hi);
  int m = from;
  for (int i = from; i < to - 1; i++) {
    cand v = at(c, i);
    put(c, i, at(c, m));
    put(c, m, v);
    m += better(v, pivot);
  }
  put(c, to - 1, at(c, m));
  put(c, m, pivot);
  return m;
}

/* Keeps the smallest set of best candidates whose weights reach goal (or all): a quickselect by
 * mass. */
static void nucleus(const mr_kernels *k, cands *c, float max, double goal) {
  int from = 0, to = c->n; /* those before `from` are kept and do not reach it; `to` suffices */
  double sum = 0;
  while (to - from > 1) {
    int p = split(c, from, to);
    double better_ones = mass_of(k, c->x + from, p - from, max);
    if (sum + better_ones >= goal && p > from) {
      to = p;
      continue;
    }
    sum += better_ones + weight(c->x[p], max);
    from = p + 1;
    if (sum >= goal)
      to = from;
  }
  c->n = to;
}

/* mass: of the blocks, total their sum. */
static int32_t draw(const cands *c, float max, const double *mass, double total, double u) {
  int blocks = (c->n + BLOCK - 1) / BLOCK, b = 0, last = 0;
  double left = u * total, inside = 0, sum = 0;
  for (int i = 0; i < blocks; i++) {
    if (mass[i] <= 0)
      continue;
    b = i;
    if (left < mass[i])
      break;
    left -= mass[i];
  }
  int from = b * BLOCK, to = c->n - from < BLOCK ? c->n : from + BLOCK;
  for (int i = from; i < to; i++)
    inside += weight(c->x[i], max);
  left *= inside / mass[b]; /* the kernel's sum and this one differ in the last digits */
  for (int i = from; i < to && sum <= left; i++) {
    double w = weight(c->x[i], max);
    last = w > 0 ? i : last;
    sum += w;
  }
  return c->id ? c->id[last] : last;
}

/* ---------------------------------------------------------------- the draw */

typedef struct room { /* parts of the scratch */
  cand *heap;         /* n_vocab */
  cands set;          /* n_vocab */
  float *copy;        /* n_vocab */
  double *mass;       /* blocks */
} room;

static size_t padded(int n_vocab) {
  return ((size_t)n_vocab + 15) & ~(size_t)15;
}

size_t mr_sampler_scratch(int n_vocab) {
  size_t n = padded(n_vocab), blocks = (n + BLOCK - 1) / BLOCK;
  size_t bytes = n * (2 * sizeof(cand) + sizeof(float)) + blocks * sizeof(double);
  return (bytes + 63) & ~(size_t)63;
}

static room divide(void *scratch, int n_vocab) {
  size_t n = padded(n_vocab);
  room r = {.heap = scratch};
  r.set.x = (float *)(r.heap + n);
  r.set.id = (int32_t *)(r.set.x + n);
  r.copy = (float *)(r.set.id + n);
  r.mass = (double *)(r.copy + n);
  return r;
}

static void keep_top(const float *x, int n, int top_k, room *r) {
  gather_top(x, n, top_k, r->heap);
  for (int i = 0; i < top_k; i++)
    put(&r->set, i, r->heap[i]);
  r->set.n = top_k;
}

/* Filters keep the best of a total order, so what is left is all that is no worse than its worst:
 * brings it into the order of ids, in which it is drawn from whatever found it. */
static void by_id(const float *x, int n, cands *set) {
  cand worst = at(set, 0);
  for (int i = 1; i < set->n; i++)
    worst = better(worst, at(set, i)) ? at(set, i) : worst;
  gather_from(x, n, worst.x, set);
  int m = 0;
  for (int i = 0; i < set->n; i++) {
    cand c = at(set, i);
    put(set, m, c);
    m += !better(worst, c);
  }
  set->n = m;
}

/* logits are divided by the temperature here; max is their largest before. */
static int32_t draw_token(const mr_kernels *k, const mr_sampling *s, float *x, int n, float max,
                          double u, room *r) {
  if (s->temperature != 1) {
    k->scale(x, 1 / s->temperature, n);
    max *= 1 / s->temperature;
  }
  cands all = {x, NULL, n}, *set = &all;
  bool top_k = s->top_k > 0 && s->top_k < n, top_p = s->top_p<1, min_p = s->min_p> 0;
  float floor = min_p ? max + logf(s->min_p < 1 ? s->min_p : 1) : -INFINITY;
  if (top_k || top_p || min_p)
    set = &r->set;
  if (top_k)
    keep_top(x, n, s->top_k, r);
  double total = top_p || !min_p ? block_masses(k, top_k ? set : &all, max, r->mass) : 0;
  if (!top_k && set != &all) {
    /* All values below (1 - top_p) / n of the mass hold less than 1 - top_p together: the nucleus
     * needs none. The small margin is for rounding. */
    float rare = top_p ? (float)(max + log(total * (1 - (double)s->top_p) / n) - 1e-3) : floor;
    gather_from(x, n, rare < max ? rare : max, set);
  }
  if (top_p)
    nucleus(k, set, max, s->top_p * total);
  if (min_p)
    keep_from(set, floor);
  if (top_k || top_p)
    by_id(x, n, set);
  if (set != &all)
    total = block_masses(k, set, max, r->mass);
  return draw(set, max, r->mass, total, u);
}

/* ---------------------------------------------------------------- changes to single logits */

static bool penalizes(const mr_sampling *s, const mr_sampler_state *st) {
  bool output = st->n_output > 0 && (s->presence_penalty != 0 || s->frequency_penalty != 0);
  return output || s->repetition_penalty != 1;
}

static void penalize_one(const mr_sampling *s, float *x, int32_t *count) {
  if (*count < 0)
    return; /* done */
  *x = *x > 0 ? *x / s->repetition_penalty : *x * s->repetition_penalty;
  if (*count > 0)
    *x -= s->presence_penalty + s->frequency_penalty * (float)*count;
  *count = -1;
}

static void penalize(const mr_sampling *s, float *x, const mr_sampler_state *st, int32_t *count) {
  int n_prompt = s->repetition_penalty != 1 ? st->n_prompt : 0;
  for (int i = 0; i < n_prompt; i++)
    count[st->prompt[i]] = 0;
  for (int i = 0; i < st->n_output; i++)
    count[st->output[i]] = 0;
  for (int i = 0; i < st->n_output; i++)
    count[st->output[i]]++;
  for (int i = 0; i < n_prompt; i++)
    penalize_one(s, x + st->prompt[i], count + st->prompt[i]);
  for (int i = 0; i < st->n_output; i++)
    penalize_one(s, x + st->output[i], count + st->output[i]);
}

static void adjust(const mr_sampling *s, float *x, int n, const mr_sampler_state *st,
                   const int32_t *ends, int n_ends, int32_t *count) {
  for (int i = 0; i < s->n_bias; i++)
    if (s->bias[i].id >= 0 && s->bias[i].id < n)
      x[s->bias[i].id] += s->bias[i].value;
  if (penalizes(s, st))
    penalize(s, x, st, count);
  for (int i = 0; st->n_output < s->min_tokens && i < n_ends; i++)
    if (ends[i] >= 0 && ends[i] < n)
      x[ends[i]] = -INFINITY;
}

/* ---------------------------------------------------------------- reports */

static void report_top(const float *x, int n, int n_top, double lse, mr_sampled *out) {
  cand top[MR_TOP_LOGPROBS_MAX];
  if (n_top > MR_TOP_LOGPROBS_MAX)
    n_top = MR_TOP_LOGPROBS_MAX;
  if (n_top > n)
    n_top = n;
  out->n_top = n_top > 0 ? n_top : 0;
  if (!out->n_top)
    return;
  gather_top(x, n, n_top, top);
  for (int left = n_top; left > 0; left--) { /* the worst comes off first */
    out->top_id[left - 1] = top[0].id;
    out->top_logprob[left - 1] = (float)(top[0].x - lse);
    top[0] = top[left - 1];
    sift_down(top, left - 1, 0, false);
  }
}

static void report(const mr_kernels *k, const float *x, int n, int32_t id, int n_top,
                   mr_sampled *out) {
  double lse = k->logsumexp(x, n);
  out->id = id;
  out->logprob = (float)(x[id] - lse);
  report_top(x, n, n_top, lse, out);
}

/* The greedy choice, or -1 where the logits are unusable. */
static int checked_argmax(const mr_kernels *k, const float *x, int n) {
  int bad = 0, best = k->argmax(x, n, &bad);
  return bad || !isfinite(x[best]) ? -1 : best;
}

mr_code mr_sampler_pick(const mr_kernels *k, const mr_sampling *s, float *logits, int n_vocab,
                        const mr_sampler_state *st, const int32_t *ends, int n_ends,
                        uint64_t row_key, int choice, void *scratch, mr_sampled *out, mr_err *err) {
  room r = divide(scratch, n_vocab);
  float *raw = logits;
  bool greedy = mr_sampler_is_greedy(s);
  bool adjusts = s->n_bias > 0 || penalizes(s, st) || (st->n_output < s->min_tokens && n_ends > 0);
  int best = checked_argmax(k, logits, n_vocab);
  if (best < 0)
    return mr_err_set(err, MR_E_DATA, "the model's logits are not finite");
  if (s->logprobs >= 0 && (adjusts || (!greedy && s->temperature != 1)))
    raw = memcpy(r.copy, logits, (size_t)n_vocab * sizeof *raw);
  if (adjusts) {
    adjust(s, logits, n_vocab, st, ends, n_ends, scratch);
    best = checked_argmax(k, logits, n_vocab);
  }
  if (best < 0)
    return mr_err_set(err, MR_E_DATA,
                      "logit_bias, penalties and min_tokens leave no token to choose");
  memset(out, 0, sizeof *out);
  double u = greedy ? 0 : mr_sampler_uniform(s, row_key, choice, st->n_output);
  out->id = greedy ? best : draw_token(k, s, logits, n_vocab, logits[best], u, &r);
  if (s->logprobs >= 0)
    report(k, raw, n_vocab, out->id, s->logprobs, out);
  return MR_OK;
}

mr_code mr_sampler_score(const mr_kernels *k, const float *logits, int n_vocab, int32_t id,
                         int n_top, mr_sampled *out, int *rank, mr_err *err) {
  if (checked_argmax(k, logits, n_vocab) < 0)
    return mr_err_set(err, MR_E_DATA, "the model's logits are not finite");
  memset(out, 0, sizeof *out);
  report(k, logits, n_vocab, id, n_top, out);
  if (!rank)
    return MR_OK;
  *rank = 1;
  for (int i = 0; i < n_vocab; i++)
    *rank += logits[i] > logits[id] || (logits[i] == logits[id] && i < id);
  return MR_OK;
}
