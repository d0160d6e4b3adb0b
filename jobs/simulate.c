#include "jobs/simulate.h"

#include "io/mem.h"

typedef struct flight {
  int shared, pos, prefill, out; /* tokens of others; stored; left to compute; left to choose */
  double kv_tokens;              /* reserved */
  bool score, parked;
} flight;

typedef struct sim {
  const mr_rates *rates;
  const mr_limits *limits;
  flight *flights; /* [batch], in order of admission */
  int n, n_parked;
  double kv_tokens; /* reserved */
  double on_disk;   /* tokens */
  double copied_s;  /* since the last step */
  double tokens, seconds;
  double free; /* tokens that memory has room for beyond what the step's rows hold */
  mr_sim_row next;
  bool pending; /* next waits */
  bool ended;
  bool kv_full;
  mr_sim *out;
} sim;

double mr_rate_body(const mr_rates *r, double tokens) {
  double t0 = 0, s0 = 0;
  if (tokens <= 0 || r->n_body == 0)
    return 0;
  if (tokens <= r->body[0].tokens)
    return r->body[0].s;
  for (int i = 0; i < r->n_body; i++) {
    double t1 = r->body[i].tokens, s1 = r->body[i].s;
    if (tokens <= t1)
      return s0 + (s1 - s0) * (tokens - t0) / (t1 - t0);
    t0 = t1;
    s0 = s1;
  }
  return s0 * tokens / t0;
}

/* What lies behind the windows is not held. */
static double seen(const sim *s, double tokens) {
  double behind = tokens - s->limits->window_tokens;
  return behind > 0 ? tokens - s->limits->window_share * behind : tokens;
}

static double blocks(const sim *s, double tokens) {
  int block = s->limits->block;
  return seen(s, ((int)tokens + block - 1) / block * (double)block);
}

/* What the row is expected to hold, as in engine_admit. */
static double reserve_of(const sim *s, const mr_sim_row *row) {
  const mr_limits *l = s->limits;
  double half = l->policy == MR_KV_AUTO && l->disk_tokens > 0 && !row->score ? 0.5 : 1;
  return blocks(s, row->n_prompt - row->n_shared + half * row->n_out);
}

static bool has_room(const sim *s, double need) {
  const mr_limits *l = s->limits;
  bool gated = l->policy == MR_KV_AUTO || l->policy == MR_KV_FEWER;
  return s->n == 0 || (!s->n_parked && (!gated || s->kv_tokens + need <= l->kv_tokens));
}

static void admit(sim *s, mr_sim_next next, void *ctx) {
  s->kv_full = false;
  while (!s->ended && s->n < s->limits->batch) {
    if (!s->pending && !next(ctx, &s->next)) {
      s->ended = true;
      return;
    }
    s->pending = true;
    double need = reserve_of(s, &s->next);
    s->kv_full = !has_room(s, need);
    if (s->kv_full)
      return;
    const mr_sim_row *r = &s->next;
    s->flights[s->n++] = (flight){.shared = r->n_shared,
                                  .pos = r->n_shared,
                                  .prefill = r->n_prompt - r->n_shared + (r->score ? r->n_out : 0),
                                  .out = r->n_out,
                                  .kv_tokens = need,
                                  .score = r->score};
    s->kv_tokens += need;
    s->copied_s += r->n_cached * s->limits->copy_token_s;
    s->pending = false;
  }
}

/* ---------------------------------------------------------------- when memory runs out */

/* With the tokens of the next step. */
static double holds(const sim *s, const flight *f) {
  return f->pos > f->shared || !f->prefill ? blocks(s, f->pos - f->shared + 1) : 0;
}

static bool spills(const sim *s, double tokens) {
  const mr_limits *l = s->limits;
  double token_s = s->tokens > 0 ? s->seconds / s->tokens : 0;
  if (s->on_disk + tokens > l->disk_tokens || l->policy == MR_KV_RECOMPUTE)
    return false;
  return l->policy == MR_KV_SPILL || l->disk_token_s < token_s;
}

static void park(sim *s, flight *f) {
  int tokens = f->pos - f->shared;
  f->parked = true;
  s->n_parked++;
  s->kv_tokens -= f->kv_tokens;
  s->out->parked++;
  if (spills(s, seen(s, tokens))) {
    s->on_disk += seen(s, tokens);
    s->copied_s += 2 * seen(s, tokens) * s->limits->copy_token_s;
    s->out->spilled += tokens;
  } else {
    f->prefill += tokens + (f->prefill ? 0 : 1); /* and the token that was to be fed next */
    f->pos = f->shared;
    s->out->recomputed += tokens;
  }
}

static void come_back(sim *s, flight *f) {
  f->parked = false;
  s->n_parked--;
  s->kv_tokens += f->kv_tokens;
  s->on_disk -= seen(s, f->pos - f->shared);
}

/* The oldest come back as far as there is room and, where there is none, the youngest go. */
static void share_memory(sim *s) {
  double held = 0;
  int first = 0, active = 0;
  for (int i = 0; i < s->n; i++) {
    held += s->flights[i].parked ? 0 : holds(s, &s->flights[i]);
    active += !s->flights[i].parked;
  }
  for (; s->n_parked && first < s->n; first++) {
    flight *f = &s->flights[first];
    double need = blocks(s, f->pos + f->prefill - f->shared + 1);
    if (!f->parked)
      continue;
    if (active && held + need + s->limits->block * active > s->limits->kv_tokens)
      break;
    come_back(s, f);
    held += need;
    active++;
  }
  for (int i = s->n - 1; i > 0 && held > s->limits->kv_tokens; i--) {
    flight *f = &s->flights[i];
    if (f->parked || holds(s, f) <= 0)
      continue;
    held -= holds(s, f);
    park(s, f);
  }
  s->free = s->limits->kv_tokens - held;
  s->kv_full = s->kv_full || s->n_parked > 0;
}

/* ---------------------------------------------------------------- steps */

typedef struct step {
  double prefill, decode, prefill_keys, tail_keys, decode_keys, own_keys, logits;
} step;

/* A token of each row that decodes. */
static void decode(sim *s, step *t) {
  for (int i = 0; i < s->n && t->decode < s->limits->step_tokens; i++) {
    flight *f = &s->flights[i];
    if (f->prefill || f->score || f->parked)
      continue;
    t->decode++;
    t->decode_keys += f->shared;
    t->own_keys += ++f->pos - f->shared;
    t->logits++;
    f->out--;
  }
}

static void prefill(sim *s, step *t) {
  for (int i = 0; i < s->n; i++) {
    flight *f = &s->flights[i];
    int room = s->limits->step_tokens - (int)(t->decode + t->prefill);
    int n = f->prefill < room ? f->prefill : room;
    if (i > 0 && n > s->free) /* the first goes on in any case */
      n = s->free > 0 ? (int)s->free : 0;
    if (n <= 0 || f->parked)
      continue;
    s->free -= n;
    t->prefill += n;
    *(f->shared ? &t->tail_keys : &t->prefill_keys) += n * (f->pos + (n + 1) / 2.0);
    f->pos += n;
    f->prefill -= n;
    if (f->prefill)
      continue;
    t->logits += f->score ? f->out : 1;
    f->out = f->score ? 0 : f->out - 1;
  }
}

static void retire(sim *s) {
  int kept = 0;
  for (int i = 0; i < s->n; i++) {
    if (!s->flights[i].prefill && s->flights[i].out <= 0)
      s->kv_tokens -= s->flights[i].kv_tokens;
    else
      s->flights[kept++] = s->flights[i];
  }
  s->n = kept;
}

static void count(sim *s, const step *t, int batch) {
  mr_sim *out = s->out;
  const mr_rates *r = s->rates;
  double tokens = t->prefill + t->decode;
  double gemm = mr_rate_body(r, tokens) + r->head_share * mr_rate_body(r, t->logits);
  double attn_p =
      r->prefill_token * t->prefill + r->prefill_key * t->prefill_keys + r->tail_key * t->tail_keys;
  double attn_d = r->decode_token * t->decode + r->decode_key * t->decode_keys +
                  r->decode_own_key * t->own_keys;
  double other = r->logit * t->logits + r->step + r->token * tokens + s->copied_s;
  double share = tokens > 0 ? t->prefill / tokens : 0;
  double seconds = gemm + attn_p + attn_d + other;
  s->copied_s = 0;
  s->tokens += tokens;
  s->seconds += seconds;
  out->gemm_s += gemm;
  out->attn_s += attn_p + attn_d;
  out->other_s += other;
  out->prefill_s += attn_p + share * (gemm + other);
  out->decode_s += attn_d + (1 - share) * (gemm + other);
  out->steps++;
  out->batch += batch;
  out->kv_full_s += s->kv_full ? seconds : 0;
  out->batch_full_s += !s->ended && !s->kv_full ? seconds : 0;
}

mr_code mr_simulate(const mr_rates *rates, const mr_limits *limits, mr_sim_next next, void *ctx,
                    mr_sim *out, mr_err *err) {
  sim s = {.rates = rates, .limits = limits, .out = out};
  *out = (mr_sim){0};
  s.flights = mr_mem_alloc((size_t)limits->batch, sizeof *s.flights);
  if (!s.flights)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for the estimate");
  for (;;) {
    step t = {0};
    admit(&s, next, ctx);
    if (s.n == 0)
      break;
    share_memory(&s);
    int batch = s.n - s.n_parked;
    decode(&s, &t);
    prefill(&s, &t);
    count(&s, &t, batch);
    retire(&s);
  }
  out->batch = out->steps > 0 ? out->batch / out->steps : 0;
  mr_mem_free(s.flights);
  return MR_OK;
}
