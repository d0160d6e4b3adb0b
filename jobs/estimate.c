#include "jobs/estimate.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "io/mem.h"
#include "io/spill.h"
#include "io/sys.h"
#include "jobs/roofline.h"
#include "kernels/kernels.h"
#include "kernels/pool.h"

#define PREFILL_S 15 /* no new measurement begins later than this */
#define ROUNDS 3     /* of each prompt */
#define FEW 8
#define TAILS 8      /* rows that go on from a shared prompt, and */
#define TAIL 44      /* their tokens: no whole number of blocks */
#define LONG_STEPS 4 /* of the long one that are looked at */
#define START_S 0.3  /* the rest of a run, as seen in reports on a small machine */
#define READ_BYTES (64u << 20)
#define READ_PIECES 64
#define READ_ROUNDS 4
#define COPY_BYTES_PER_S 1e9 /* a page out of the prefix cache or away: copied and checked */

/* ---------------------------------------------------------------- reading memory */

typedef struct probe {
  const uint8_t *bytes;
  uint64_t sums[READ_PIECES];
} probe;

static void one_piece(void *ctx, int item, int worker) {
  (void)worker;
  probe *p = ctx;
  const size_t n = READ_BYTES / READ_PIECES;
  const uint8_t *at = p->bytes + (size_t)item * n;
  uint64_t sum[4] = {0};
  for (size_t i = 0; i < n; i += 32)
    for (int k = 0; k < 4; k++) {
      uint64_t v;
      memcpy(&v, at + i + 8 * k, 8);
      sum[k] += v;
    }
  p->sums[item] += sum[0] + sum[1] + sum[2] + sum[3];
}

static mr_code read_rate(int threads, double *rate, mr_err *err) {
  uint8_t *bytes = mr_mem_pages(READ_BYTES);
  mr_pool *pool = mr_pool_new(threads, false);
  mr_code rc = MR_OK;
  if (!bytes || !pool) {
    rc = mr_err_set(err, MR_E_NOMEM, "out of memory for the measurement");
  } else {
    probe p = {.bytes = bytes};
    memset(bytes, 1, READ_BYTES); /* pages that were never written are all one page */
    mr_pool_run(pool, one_piece, &p, READ_PIECES);
    double began = mr_sys_seconds();
    for (int i = 0; i < READ_ROUNDS; i++)
      mr_pool_run(pool, one_piece, &p, READ_PIECES);
    *rate = (double)READ_BYTES * READ_ROUNDS / (mr_sys_seconds() - began);
  }
  if (pool)
    mr_pool_free(pool);
  mr_mem_free(bytes);
  return rc;
}

/* ---------------------------------------------------------------- timed steps */

typedef struct sample { /* one step */
  double tokens, logits, keys, gemm_s, attn_s, sample_s, other_s;
} sample;

typedef struct bench {
  mr_engine *e;
  const mr_engine_info *info;
  int32_t *ids; /* [long_tokens] a prompt */
  int long_tokens;
  double began_s;
  sample last;
} bench;

static sample minus(const mr_engine_stats *b, const mr_engine_stats *a) {
  return (sample){.tokens = (double)(b->batch_tokens_sum - a->batch_tokens_sum),
                  .logits = (double)(b->logit_rows - a->logit_rows),
                  .gemm_s = b->gemm_s - a->gemm_s,
                  .attn_s = b->attn_s - a->attn_s,
                  .sample_s = b->sample_s - a->sample_s,
                  .other_s = b->other_s - a->other_s};
}

static mr_code step(bench *b, sample *s, mr_err *err) {
  mr_engine_stats before, after;
  mr_engine_stats_get(b->e, &before);
  mr_code rc = mr_engine_step(b->e, err);
  mr_engine_stats_get(b->e, &after);
  *s = minus(&after, &before);
  for (mr_result *r; (r = mr_engine_collect(b->e));)
    mr_result_free(r);
  return rc;
}

static mr_code admit(bench *b, const int32_t *ids, int n_prompt, int n, int max_tokens,
                     mr_err *err) {
  mr_request r = {.task = MR_TASK_GENERATE,
                  .prompt = ids,
                  .n_prompt = n_prompt,
                  .sampling = mr_sampling_default};
  r.sampling.temperature = 0;
  r.sampling.ignore_eos = true;
  r.sampling.max_tokens = max_tokens;
  r.sampling.n = n;
  mr_code rc = mr_engine_admit(b->e, &r, err);
  return rc == MR_E_AGAIN ? mr_err_set(err, MR_E_INTERNAL, "the measurement has no room") : rc;
}

static bool late(const bench *b) {
  return mr_sys_seconds() - b->began_s > PREFILL_S;
}

static void fresh(bench *b, int n, uint32_t salt) {
  for (int i = 0; i < n; i++)
    b->ids[i] = (int32_t)(((uint32_t)i * 2654435761u + salt * 40503u) >> 8) % b->info->n_vocab;
}

static void add_point(mr_rates *r, double tokens, double s) {
  int at = r->n_body;
  if (r->n_body == MR_RATE_POINTS)
    return;
  while (at > 0 && r->body[at - 1].tokens >= tokens)
    at--;
  if (at < r->n_body && r->body[at].tokens == tokens) {
    r->body[at].s = s < r->body[at].s ? s : r->body[at].s;
    return;
  }
  memmove(&r->body[at + 1], &r->body[at], (size_t)(r->n_body - at) * sizeof *r->body);
  r->body[at] = (mr_rate_point){tokens, s};
  r->n_body++;
}

/* A line through two measurements of attention: seconds a token and seconds a key. */
static void line(const sample *a, const sample *b, double *token, double *key) {
  double ka = a->keys / a->tokens, kb = b->keys / b->tokens; /* keys a token */
  double sa = a->attn_s / a->tokens, sb = b->attn_s / b->tokens;
  *key = kb > ka ? (sb - sa) / (kb - ka) : 0;
  if (*key <= 0) /* too near to each other, or disturbed */
    *key = ka > 0 ? sa / ka : 0;
  *token = sa - *key * ka > 0 ? sa - *key * ka : 0;
}

/* A few timings of one kind of step. The middle ones are what a run will meet; the least would be
 * the machine's at its quietest. */
typedef struct few {
  sample s[FEW];
  int n;
} few;

static void keep(few *f, const sample *s) {
  if (f->n < FEW && (f->n == 0 || f->s[0].tokens == s->tokens))
    f->s[f->n++] = *s;
}

static int by_size(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double middle_of(const few *f, size_t field) {
  double v[FEW];
  for (int i = 0; i < f->n; i++)
    memcpy(&v[i], (const char *)&f->s[i] + field, sizeof v[i]);
  qsort(v, (size_t)f->n, sizeof *v, by_size);
  return f->n == 0 ? 0 : f->n % 2 ? v[f->n / 2] : (v[f->n / 2 - 1] + v[f->n / 2]) / 2;
}

static sample middle(const few *f) {
  return (sample){.tokens = middle_of(f, offsetof(sample, tokens)),
                  .logits = middle_of(f, offsetof(sample, logits)),
                  .keys = middle_of(f, offsetof(sample, keys)),
                  .gemm_s = middle_of(f, offsetof(sample, gemm_s)),
                  .attn_s = middle_of(f, offsetof(sample, attn_s)),
                  .sample_s = middle_of(f, offsetof(sample, sample_s)),
                  .other_s = middle_of(f, offsetof(sample, other_s))};
}

/* One long prompt; steps[i] for its i-th step. It stays in the tree, so that batches can go on from
 * it. */
static mr_code prefill_once(bench *b, few *steps, mr_err *err) {
  mr_code rc = admit(b, b->ids, b->long_tokens, 1, 0, err);
  double pos = 0;
  for (int i = 0; !rc && mr_engine_active(b->e); i++) {
    sample s;
    rc = step(b, &s, err);
    s.keys = s.tokens * (pos + (s.tokens + 1) / 2);
    pos += s.tokens;
    if (!rc && i < LONG_STEPS)
      keep(&steps[i], &s);
  }
  return rc;
}

static mr_code prefill_long(bench *b, mr_rates *r, mr_err *err) {
  few all[LONG_STEPS] = {{.n = 0}};
  sample steps[LONG_STEPS];
  mr_code rc = MR_OK;
  int last = 0;
  for (int i = 0; i < ROUNDS && !rc && (i == 0 || !late(b)); i++) {
    fresh(b, b->long_tokens, (uint32_t)i + 1);
    rc = prefill_once(b, all, err);
  }
  for (int i = 0; i < LONG_STEPS; i++)
    steps[i] = middle(&all[i]);
  for (int i = 0; i < LONG_STEPS && !rc && steps[i].tokens > 0; i++) {
    double head = 1 + (steps[i].logits > 0 ? r->head_share / steps[i].tokens : 0);
    add_point(r, steps[i].tokens, steps[i].gemm_s / head);
    last = i;
  }
  if (rc || steps[0].tokens < 1)
    return rc;
  line(&steps[0], &steps[last], &r->prefill_token, &r->prefill_key);
  r->token = steps[0].other_s / steps[0].tokens;
  return MR_OK;
}

static mr_code prefill_short(bench *b, mr_rates *r, int tokens, mr_err *err) {
  mr_code rc = MR_OK;
  few all = {.n = 0};
  for (int i = 0; i < ROUNDS && !rc && !late(b) && tokens > 1; i++) {
    int32_t ids0 = b->ids[0];
    sample s;
    b->ids[0] = (ids0 + 1 + i + tokens) % b->info->n_vocab; /* shares nothing */
    rc = admit(b, b->ids, tokens, 1, 0, err);
    if (!rc)
      rc = step(b, &s, err);
    b->ids[0] = ids0;
    if (!rc)
      keep(&all, &s);
  }
  /* the head's one row reads its weights once: as a batch of one does */
  sample s = middle(&all);
  if (all.n)
    add_point(r, s.tokens, s.gemm_s - r->head_share * mr_rate_body(r, s.logits));
  return rc;
}

/* Steps in which n choices of a prompt decode. */
static mr_code decode(bench *b, int n_prompt, int n, sample *best, mr_err *err) {
  few all = {.n = 0};
  mr_code rc = admit(b, b->ids, n_prompt, n, 5, err);
  double keys = n_prompt;
  while (!rc && mr_engine_active(b->e)) {
    sample s;
    rc = step(b, &s, err);
    if (rc || s.tokens != n || s.logits != n)
      continue; /* still the prompt */
    s.keys = n * ++keys;
    keep(&all, &s);
  }
  *best = middle(&all);
  return rc;
}

/* Choices that a prompt of n_prompt tokens has pages for. */
static int fitting(const bench *b, int n_prompt, int n) {
  int64_t pages = (int64_t)(b->info->kv_tokens / MR_KV_BLOCK) - n_prompt / MR_KV_BLOCK - 1;
  n = n < b->info->max_batch ? n : b->info->max_batch;
  n = n < b->info->max_step_tokens ? n : b->info->max_step_tokens;
  return pages < n ? (pages < 1 ? 1 : (int)pages) : n;
}

static mr_code decode_all(bench *b, mr_time_estimate *e, mr_err *err) {
  mr_rates *r = &e->rates;
  int most = b->info->max_batch, near = b->long_tokens / 4, far = b->long_tokens - 8;
  const int sizes[] = {1, most / 32, most / 8, most / 2, most};
  sample s = {0}, wide = {0};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    int n = fitting(b, near, sizes[i]);
    if (n < 1 || n == (int)s.tokens || (late(b) && i > 0))
      continue;
    mr_code rc = decode(b, near, n, &s, err);
    if (rc)
      return rc;
    if (s.tokens < 1)
      continue;
    add_point(r, s.tokens, s.gemm_s / (1 + r->head_share));
    r->logit = s.sample_s / s.logits;
    if (i == 0)
      r->step = s.other_s;
    wide = n <= most / 8 || wide.tokens == 0 ? s : wide;
  }
  mr_code rc =
      decode(b, far, (int)wide.tokens > 0 ? fitting(b, far, (int)wide.tokens) : 1, &s, err);
  if (!rc && s.tokens > 0 && wide.tokens > 0)
    line(&wide, &s, &r->decode_token, &r->decode_key);
  return rc;
}

/* Rows that go on from the long prompt: few tokens each, that see many keys. */
static mr_code prefill_tails(bench *b, mr_rates *r, mr_err *err) {
  int n = b->info->max_step_tokens / TAIL < TAILS ? b->info->max_step_tokens / TAIL : TAILS;
  few all = {.n = 0};
  n = fitting(b, b->long_tokens, 2 * n) / 2;
  mr_code rc = MR_OK;
  r->tail_key = r->prefill_key;
  for (int i = 0; i < ROUNDS && n > 0 && b->long_tokens >= 4 * TAIL && !rc && !late(b); i++) {
    sample s = {0};
    for (int k = 0; k < n && !rc; k++) {
      for (int t = b->long_tokens - TAIL; t < b->long_tokens; t++)
        b->ids[t] =
            (int32_t)((uint32_t)(t + 1) * 977u + (uint32_t)(i * n + k) * 7919u) % b->info->n_vocab;
      rc = admit(b, b->ids, b->long_tokens, 1, 0, err);
    }
    while (!rc && mr_engine_active(b->e)) {
      sample part;
      rc = step(b, &part, err);
      s.tokens += part.tokens;
      s.attn_s += part.attn_s;
    }
    s.keys = s.tokens * (b->long_tokens - TAIL / 2);
    if (!rc && s.tokens < 2 * TAIL * n)
      keep(&all, &s);
  }
  sample best = middle(&all);
  if (!rc && best.tokens > 0 && best.attn_s > r->prefill_token * best.tokens)
    r->tail_key = (best.attn_s - r->prefill_token * best.tokens) / best.keys;
  return rc;
}

static mr_code measure_steps(bench *b, mr_time_estimate *e, mr_err *err) {
  int step_tokens = b->info->max_step_tokens;
  int64_t most = (int64_t)(b->info->kv_tokens / 2);
  most = most < b->info->context / 2 ? most : b->info->context / 2;
  b->long_tokens = most < 2 * step_tokens ? (int)most : 2 * step_tokens;
  b->long_tokens = b->long_tokens < 16 ? 16 : b->long_tokens;
  b->ids = mr_mem_alloc((size_t)b->long_tokens, sizeof *b->ids);
  if (!b->ids)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for the measurement");
  b->began_s = mr_sys_seconds();
  mr_code rc = prefill_long(b, &e->rates, err);
  if (!rc)
    rc = decode_all(b, e, err);
  if (!rc)
    rc = prefill_tails(b, &e->rates, err);
  for (int part = 4; part <= 16 && !rc; part *= 4)
    rc = prefill_short(b, &e->rates, b->long_tokens / part, err);
  mr_mem_free(b->ids);
  return rc;
}

/* More tokens never take less time: what was disturbed is set right. */
static void smooth(mr_rates *r) {
  for (int i = r->n_body - 2; i >= 0; i--)
    if (r->body[i].s > r->body[i + 1].s)
      r->body[i].s = r->body[i + 1].s;
}

static double gemm_rate(const mr_time_estimate *e, const mr_engine_info *info) {
  double full = info->max_step_tokens, body = mr_rate_body(&e->rates, full);
  return body > 0 ? full * info->flops_per_prompt_token / body : 0;
}

void mr_estimate_known(mr_time_estimate *e, const mr_engine_info *info, const mr_profile *p) {
  *e = (mr_time_estimate){.rates = p->rates,
                          .load_s = p->load_s,
                          .memory_bytes_per_s = p->memory_bytes_per_s,
                          .peak_ops = p->peak_ops,
                          .start_s = START_S,
                          .bound_by = "rows"};
  e->gemm_flops_per_s = gemm_rate(e, info);
}

void mr_estimate_remember(const mr_time_estimate *e, mr_profile *p) {
  p->measured = true;
  p->rates = e->rates;
  p->load_s = e->load_s;
  p->memory_bytes_per_s = e->memory_bytes_per_s;
  p->peak_ops = e->peak_ops;
}

mr_code mr_estimate_measure(const mr_engine_opts *opts, mr_engine_info *info, mr_time_estimate *out,
                            mr_err *err) {
  mr_engine_opts o = *opts;
  bench b = {.info = info};
  *out = (mr_time_estimate){.start_s = START_S, .bound_by = "rows"};
  o.kv_disk = 0;
  o.kv_policy = MR_KV_FEWER;
  o.no_prefix_sharing = false;
  o.prefix_cache = NULL; /* made-up prompts have no place there */
  double t = mr_sys_seconds();
  mr_code rc = mr_engine_open(&b.e, &o, NULL, err);
  if (rc)
    return rc;
  out->load_s = mr_sys_seconds() - t - (o.tuning ? o.tuning->took_s : 0);
  *info = *mr_engine_describe(b.e);
  info->policy = opts->kv_policy;
  info->kv_disk = opts->kv_disk;
  out->rates.head_share = info->flops_per_output_token / info->flops_per_prompt_token - 1;
  rc = measure_steps(&b, out, err);
  mr_engine_close(b.e);
  if (!rc)
    rc = read_rate(info->threads, &out->memory_bytes_per_s, err);
  if (rc)
    return rc;
  smooth(&out->rates);
  out->peak_ops = mr_roofline_ops(info->products, info->threads);
  out->gemm_flops_per_s = gemm_rate(out, info);
  double key_s = (double)info->kv_bytes_per_token / out->memory_bytes_per_s;
  double key = out->rates.decode_key;
  out->rates.decode_own_key = key > key_s ? key : key_s;
  return MR_OK;
}

/* ---------------------------------------------------------------- the job */

/* What would have to be better for the job to be faster. */
static const char *bound_by(const mr_time_estimate *e, const mr_engine_info *info) {
  const mr_sim *s = &e->sim;
  double steps_s = s->prefill_s + s->decode_s;
  double knee = 0.5 * info->max_step_tokens; /* tokens with which the products are near their rate
                                              */
  bool small = s->decode_s > s->prefill_s && s->batch < knee && s->batch < info->max_batch / 2.0;
  if (s->attn_s > s->gemm_s)
    return "attention";
  if (small && s->kv_full_s > 0.5 * steps_s)
    return "kv-memory";
  if (small)
    return "rows";
  return s->decode_s > s->prefill_s && s->batch < knee ? "memory-bandwidth" : "compute";
}

mr_code mr_estimate_run(mr_time_estimate *e, const mr_engine_info *info, const mr_profile *p,
                        mr_sim_next next, void *ctx, mr_err *err) {
  double token = (double)info->kv_bytes_per_token;
  bool windows = info->kv_window_groups > 0 && info->kv_window_groups < info->kv_groups;
  const mr_limits limits = {
      .batch = info->max_batch,
      .step_tokens = info->max_step_tokens,
      .block = MR_KV_BLOCK,
      .kv_tokens = (double)info->kv_tokens,
      .disk_tokens = (double)info->kv_disk / token,
      .window_share = windows ? (double)info->kv_window_groups / info->kv_groups : 0,
      .window_tokens = windows ? (double)mr_engine_window_blocks(info) * MR_KV_BLOCK : 0,
      .policy = info->policy,
      .disk_token_s = 2 * token / MR_SPILL_BYTES_PER_S,
      .copy_token_s = token / COPY_BYTES_PER_S};
  mr_code rc = mr_simulate(&e->rates, &limits, next, ctx, &e->sim, err);
  const double said[MR_PARTS] = {e->load_s, e->sim.gemm_s, e->sim.attn_s, e->sim.other_s,
                                 e->start_s};
  e->seconds = 0;
  for (int i = 0; i < MR_PARTS; i++) {
    e->said[i] = said[i];
    e->parts[i] = said[i] * p->factor[i];
    e->seconds += e->parts[i];
  }
  double steps = e->sim.prefill_s + e->sim.decode_s;
  double now = e->parts[MR_PART_GEMM] + e->parts[MR_PART_ATTENTION] + e->parts[MR_PART_OTHER];
  e->prefill_s = steps > 0 ? e->sim.prefill_s * now / steps : 0;
  e->decode_s = steps > 0 ? e->sim.decode_s * now / steps : 0;
  e->bound_by = bound_by(e, info);
  return rc;
}
