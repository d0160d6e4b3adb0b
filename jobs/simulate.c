#include "jobs/simulate.h"

#include "io/mem.h"

typedef struct flight {
  int shared, pos, prefill, out; /* tokens of others; stored; left to compute; left to choose */
  double kv_tokens;              /* reserved */
  bool score;
} flight;

typedef struct sim {
  const mr_rates *rates;
  const mr_limits *limits;
  flight *flights; /* [batch], in order of admission */
  int n;
  double kv_tokens; /* reserved */
  mr_sim_row next;
  bool pending; /* next waits */
  bool ended;
  bool kv_full;
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

static double reserve_of(const sim *s, const mr_sim_row *row) {
  int own = row->n_prompt - row->n_shared + row->n_out, block = s->limits->block;
  return (double)((own + block - 1) / block) * block;
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
    s->kv_full = s->n > 0 && s->kv_tokens + need > s->limits->kv_tokens;
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
    s->pending = false;
  }
}

typedef struct step {
  double prefill, decode, prefill_keys, tail_keys, decode_keys, own_keys, logits;
} step;

/* A token of each row that decodes. */
static void decode(sim *s, step *t) {
  for (int i = 0; i < s->n && t->decode < s->limits->step_tokens; i++) {
    flight *f = &s->flights[i];
    if (f->prefill || f->score)
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
    if (n <= 0)
      continue;
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

static void count(const sim *s, const step *t, int batch, mr_sim *out) {
  const mr_rates *r = s->rates;
  double tokens = t->prefill + t->decode;
  double gemm = mr_rate_body(r, tokens) + r->head_share * mr_rate_body(r, t->logits);
  double attn_p =
      r->prefill_token * t->prefill + r->prefill_key * t->prefill_keys + r->tail_key * t->tail_keys;
  double attn_d = r->decode_token * t->decode + r->decode_key * t->decode_keys +
                  r->decode_own_key * t->own_keys;
  double other = r->logit * t->logits + r->step + r->token * tokens;
  double share = tokens > 0 ? t->prefill / tokens : 0;
  double seconds = gemm + attn_p + attn_d + other;
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
  sim s = {.rates = rates, .limits = limits};
  *out = (mr_sim){0};
  s.flights = mr_mem_alloc((size_t)limits->batch, sizeof *s.flights);
  if (!s.flights)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for the estimate");
  for (;;) {
    step t = {0};
    admit(&s, next, ctx);
    if (s.n == 0)
      break;
    int batch = s.n;
    decode(&s, &t);
    prefill(&s, &t);
    count(&s, &t, batch, out);
    retire(&s);
  }
  out->batch = out->steps > 0 ? out->batch / out->steps : 0;
  mr_mem_free(s.flights);
  return MR_OK;
}
