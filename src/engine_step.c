/* One ragged batch: decode tokens first, then continuations and prefill chunks, in order of
 * admission; then all rows of logits at once, over the threads; then what follows from them, in
 * order. */
#include <stdio.h>
#include <string.h>

#include "io/sys.h"
#include "src/engine_int.h"

/* ---------------------------------------------------------------- building */

static int tokens_left(const mr_engine *e) {
  return e->info.max_step_tokens - e->n_tokens;
}

static int logits_left(const mr_engine *e) {
  return e->max_logits - e->n_logits;
}

/* The first job of a row asks the device; others of the same row see what that gives them. */
static void ask_for(mr_engine *e, const mr_logit_job *j) {
  const mr_flight *f = j->f;
  if (!e->asks || (e->n_jobs > 1 && e->jobs[e->n_jobs - 2].row == j->row))
    return;
  if (j->kind == MR_JOB_PICK)
    e->asks[j->row] =
        mr_sampler_ask(j->s->sampling, f->r.row_key, (int)(j->s - f->seqs), j->s->out.n_ids);
  else
    e->asks[j->row] =
        mr_sampler_ask_for(j->kind == MR_JOB_PROMPT ? f->r.prompt[j->pos] : j->s->out.ids[j->pos]);
}

static void add_job(mr_engine *e, mr_job_kind kind, mr_flight *f, mr_sequence *s, int row, int pos,
                    bool shared) {
  e->jobs[e->n_jobs++] = (mr_logit_job){kind, f, s, row, pos, shared, MR_OK, 0};
  ask_for(e, &e->jobs[e->n_jobs - 1]);
}

typedef enum wanted { WANT_NONE, WANT_LAST, WANT_ALL } wanted;

/* s NULL: the prompt of f, held by sequence 0. */
static mr_code add_run(mr_engine *e, mr_flight *f, mr_sequence *s, const int32_t *tokens, int n,
                       wanted want, mr_err *err) {
  mr_kv_seq *kv = s ? &s->kv : &f->seqs[0].kv;
  if (mr_kv_seq_reserve(e->kv, kv, n))
    return mr_err_set(err, MR_E_INTERNAL, "no KV pages for %d tokens that were promised (%d free)",
                      n, mr_kv_free_pages(e->kv));
  f->step = e->step;
  kv->long_rope = f->r.n_prompt > e->model->c.rope_original_context;
  e->runs[e->n_runs] = (mr_run){.seq = kv,
                                .tokens = tokens,
                                .n = n,
                                .adapter = f->r.adapter,
                                .want = want == WANT_ALL ? e->ones : NULL,
                                .no_logits = want == WANT_NONE};
  e->owners[e->n_runs].f = f;
  e->owners[e->n_runs++].s = s;
  e->n_tokens += n;
  e->n_logits += want == WANT_ALL ? n : want == WANT_LAST;
  return MR_OK;
}

/* The tokens that were chosen and not fed yet: one, or after a recomputation all. Only the last
 * one's logits are new. */
static mr_code add_chosen(mr_engine *e, mr_flight *f, mr_sequence *s, mr_err *err) {
  int left = s->out.n_ids - s->fed, n = left < tokens_left(e) ? left : tokens_left(e);
  if (!mr_flight_make_room(e, f, mr_kv_seq_wants(e->kv, &s->kv, n)))
    return MR_OK; /* it waits */
  if (n == left)
    add_job(e, MR_JOB_PICK, f, s, e->n_logits, 0, false);
  return add_run(e, f, s, s->out.ids + s->fed, n, n == left ? WANT_LAST : WANT_NONE, err);
}

static mr_code add_decode(mr_engine *e, mr_err *err) {
  int room = e->info.max_batch;
  for (mr_flight *f = e->flights; f; f = f->next) {
    if (f->fed < f->r.n_prompt || f->r.task != MR_TASK_GENERATE || f->state != MR_FLIGHT_ACTIVE ||
        f->held)
      continue;
    for (int i = 0; i < f->n_seqs; i++) {
      mr_sequence *s = &f->seqs[i];
      if (s->done)
        continue;
      if (room-- <= 0 || !tokens_left(e) || !logits_left(e))
        return MR_OK; /* more choices than a batch holds: the first ones go first */
      mr_code rc = add_chosen(e, f, s, err);
      if (rc)
        return rc;
    }
  }
  return MR_OK;
}

/* Each continuation's tokens but the last: the logits after one score the next. */
static mr_code add_continuations(mr_engine *e, mr_flight *f, mr_err *err) {
  for (int i = 0; i < f->n_seqs; i++) {
    mr_sequence *s = &f->seqs[i];
    int n = f->r.cont_len[i] - 1 - s->fed;
    n = n < tokens_left(e) ? n : tokens_left(e);
    n = n < logits_left(e) ? n : logits_left(e);
    if (s->done || n <= 0 || !mr_flight_make_room(e, f, mr_kv_seq_wants(e->kv, &s->kv, n)))
      continue;
    for (int t = 0; t < n; t++)
      add_job(e, MR_JOB_CONT, f, s, e->n_logits + t, s->fed + t + 1, false);
    mr_code rc = add_run(e, f, s, f->cont[i] + s->fed, n, WANT_ALL, err);
    if (rc)
      return rc;
  }
  return MR_OK;
}

/* What the last prompt token's logits are for. After a recomputation first tokens are there. */
static void add_first_jobs(mr_engine *e, mr_flight *f, int row) {
  bool score = f->r.task == MR_TASK_SCORE;
  for (int i = 0; i < f->n_seqs && (score || f->max_new > 0); i++)
    if (!f->seqs[i].done && (score || !f->seqs[i].out.n_ids))
      add_job(e, score ? MR_JOB_CONT : MR_JOB_PICK, f, &f->seqs[i], row, 0, f->n_seqs > 1);
}

/* Of n prompt tokens those that there are pages for: all, or up to the end of a page. */
static int fit_pages(mr_engine *e, mr_flight *f, int n) {
  mr_kv_seq *kv = &f->seqs[0].kv;
  if (n > 0 && !mr_flight_make_room(e, f, mr_kv_seq_wants(e->kv, kv, n)))
    while (n > 0 && mr_kv_seq_wants(e->kv, kv, n) > mr_kv_free_pages(e->kv))
      n = (kv->len + n - 1) / MR_KV_BLOCK * MR_KV_BLOCK - kv->len;
  return n;
}

static mr_code add_prompt(mr_engine *e, mr_flight *f, mr_err *err) {
  bool all = f->result->prompt_logprobs;
  if (!mr_flight_share(e, f))
    return MR_OK;
  if (f->spilled && f->fed >= f->fetch_at) {
    mr_flight_fetch(e, f);
    return MR_OK;
  }
  int left = f->r.n_prompt - f->fed;
  int n = left < tokens_left(e) ? left : tokens_left(e);
  if (all && n > logits_left(e))
    n = logits_left(e);
  else if (n == left && !logits_left(e))
    n--; /* the last token waits for a step with room for its logits */
  if (f->spilled && n > f->fetch_at - f->fed)
    n = f->fetch_at - f->fed;
  n = fit_pages(e, f, mr_flight_claim(e, f, n));
  if (n <= 0)
    return MR_OK;
  int row = e->n_logits;
  for (int t = 0; all && t < n && t < left - 1; t++)
    add_job(e, MR_JOB_PROMPT, f, NULL, row + t, f->fed + t + 1, false);
  if (n == left)
    add_first_jobs(e, f, all ? row + n - 1 : row);
  return add_run(e, f, NULL, f->r.prompt + f->fed, n,
                 all         ? WANT_ALL
                 : n == left ? WANT_LAST
                             : WANT_NONE,
                 err);
}

static bool may_begin(const mr_engine *e, const mr_flight *f) {
  return !e->blocked || f->age < e->blocked || f->fed > 0;
}

static mr_code build(mr_engine *e, mr_err *err) {
  e->step++;
  e->moved = false;
  mr_engine_revive(e);
  e->n_runs = e->n_tokens = e->n_logits = 0;
  e->n_jobs = 0;
  for (int i = 0; e->asks && i < e->max_logits; i++)
    e->asks[i] = mr_sampler_ask_for(-1);
  mr_code rc = add_decode(e, err);
  for (mr_flight *f = e->flights; f && !rc && tokens_left(e); f = f->next) {
    if (f->state != MR_FLIGHT_ACTIVE || f->held || !may_begin(e, f))
      continue;
    if (f->fed < f->r.n_prompt)
      rc = add_prompt(e, f, err);
    else if (f->r.task == MR_TASK_SCORE)
      rc = add_continuations(e, f, err);
  }
  return rc;
}

/* ---------------------------------------------------------------- logits */

static void pick(mr_engine *e, mr_logit_job *j, uint8_t *scratch) {
  float *x = mr_forward_logits(e->forward, j->row);
  mr_sequence *s = j->s;
  if (j->shared) /* picking changes them */
    x = memcpy(scratch, x, (size_t)e->info.n_vocab * sizeof *x);
  mr_sampler_state st = {j->f->r.prompt, j->f->r.n_prompt, s->out.ids, s->out.n_ids};
  j->code = mr_sampler_pick(e->k, s->sampling, x, e->info.n_vocab, &st, j->f->ends, j->f->n_ends,
                            j->f->r.row_key, (int)(s - j->f->seqs), scratch + e->copy_bytes,
                            &s->picked, NULL);
}

static void run_job(void *ctx, int item, int worker) {
  mr_engine *e = ctx;
  mr_logit_job *j = &e->jobs[item];
  const mr_sampling *p = &j->f->r.sampling;
  const float *x = mr_forward_logits(e->forward, j->row);
  if (j->kind == MR_JOB_PICK)
    pick(e, j, e->scratch + (size_t)worker * e->scratch_bytes);
  else if (j->kind == MR_JOB_PROMPT)
    j->code = mr_sampler_score(e->k, x, e->info.n_vocab, j->f->r.prompt[j->pos], p->prompt_logprobs,
                               &j->f->result->prompt_logprobs[j->pos], NULL, NULL);
  else
    j->code = mr_sampler_score(e->k, x, e->info.n_vocab, j->s->out.ids[j->pos], p->logprobs,
                               &j->s->out.logprobs[j->pos], &j->rank, NULL);
}

/* From what the device knows of the row. MR_E_AGAIN: it takes the row. */
static void try_job(mr_engine *e, mr_logit_job *j) {
  const mr_flight *f = j->f;
  const mr_sampling *p = &f->r.sampling;
  const mr_gpu_best *b = mr_forward_best(e->forward, j->row);
  const mr_gpu_ask *ask = &e->asks[j->row];
  mr_sequence *s = j->s;
  if (j->kind == MR_JOB_PICK) {
    mr_sampler_state st = {f->r.prompt, f->r.n_prompt, s->out.ids, s->out.n_ids};
    j->code = mr_sampler_pick_best(s->sampling, b, ask, e->info.n_vocab, &st, f->ends, f->n_ends,
                                   f->r.row_key, (int)(s - f->seqs), &s->picked);
  } else if (j->kind == MR_JOB_PROMPT) {
    j->code = mr_sampler_score_best(b, ask, e->info.n_vocab, f->r.prompt[j->pos],
                                    p->prompt_logprobs, &f->result->prompt_logprobs[j->pos], NULL);
  } else {
    j->code = mr_sampler_score_best(b, ask, e->info.n_vocab, s->out.ids[j->pos], p->logprobs,
                                    &s->out.logprobs[j->pos], &j->rank);
  }
}

static void run_fetched(void *ctx, int item, int worker) {
  mr_engine *e = ctx;
  if (e->jobs[item].code == MR_E_AGAIN)
    run_job(ctx, item, worker);
}

/* Rows of logits come to the host only where the device's answers do not do. */
static mr_code run_jobs(mr_engine *e, mr_err *err) {
  int n = 0;
  if (!e->asks) {
    mr_pool_run(e->pool, run_job, e, (int)e->n_jobs);
    return MR_OK;
  }
  for (size_t i = 0; i < e->n_jobs; i++) {
    try_job(e, &e->jobs[i]);
    if (e->jobs[i].code == MR_E_AGAIN && (n == 0 || e->fetch[n - 1] != e->jobs[i].row))
      e->fetch[n++] = e->jobs[i].row;
  }
  if (n == 0)
    return MR_OK;
  e->stats.rows_fetched += (uint64_t)n;
  mr_code rc = mr_forward_fetch(e->forward, e->fetch, n, err);
  if (!rc)
    mr_pool_run(e->pool, run_fetched, e, (int)e->n_jobs);
  return rc;
}

/* ---------------------------------------------------------------- what follows */

static void prompt_done(mr_engine *e, mr_flight *f) {
  for (int i = 1; i < f->n_seqs; i++)
    if (!f->seqs[i].done)
      mr_kv_seq_share(e->kv, &f->seqs[i].kv, &f->seqs[0].kv, f->r.n_prompt);
  if (f->seqs[0].done) /* it was parked when the first choice was done */
    mr_kv_seq_release(e->kv, &f->seqs[0].kv);
  if (f->r.task == MR_TASK_SCORE || f->max_new > 0)
    return;
  for (int i = 0; i < f->n_seqs; i++) { /* max_tokens 0: only the prompt was wanted */
    mr_sequence_end(&f->seqs[i], MR_FINISH_LENGTH, -1, NULL);
    mr_flight_retire(e, f, &f->seqs[i]);
  }
}

/* The step succeeded: its tokens are in the cache. */
static void advance(mr_engine *e) {
  for (int i = 0; i < e->n_runs; i++) {
    mr_flight *f = e->owners[i].f;
    mr_sequence *s = e->owners[i].s;
    int n = e->runs[i].n;
    if (s)
      s->fed += n;
    else
      f->fed += n;
    if (!s)
      mr_flight_publish(e, f, f->fed - n);
    if (!s || f->r.task == MR_TASK_SCORE)
      e->stats.prompt_tokens_computed += (uint64_t)n;
    if (!s && f->fed == f->r.n_prompt)
      prompt_done(e, f);
    mr_kv_seq_drop(e->kv, e->runs[i].seq, mr_kv_first(e->kv, e->runs[i].seq->len));
  }
}

static mr_code take_pick(mr_engine *e, mr_logit_job *j, mr_err *err) {
  mr_flight *f = j->f;
  if (f->result->first_token_s == 0)
    f->result->first_token_s = mr_sys_seconds();
  e->stats.output_tokens++;
  mr_code rc = mr_sequence_push(j->s, f->ends, f->n_ends, f->max_new, err);
  if (!rc && j->s->done)
    mr_flight_retire(e, f, j->s);
  return rc;
}

static void take_score(mr_engine *e, mr_logit_job *j) {
  mr_choice *c = &j->s->out;
  if (j->f->result->first_token_s == 0)
    j->f->result->first_token_s = mr_sys_seconds();
  c->sum_logprob += c->logprobs[j->pos].logprob;
  c->greedy = c->greedy && j->rank == 1;
  if (j->pos + 1 < c->n_ids)
    return;
  c->finish = MR_FINISH_LENGTH;
  mr_flight_retire(e, j->f, j->s);
}

static void fail(mr_engine *e, const mr_logit_job *j) {
  const mr_flight *f = j->f;
  int at = j->kind == MR_JOB_PROMPT ? j->pos - 1 : f->r.n_prompt - 1;
  if (j->kind == MR_JOB_CONT)
    at += j->pos;
  else if (j->kind == MR_JOB_PICK)
    at += j->s->out.n_ids;
  char words[160];
  snprintf(words, sizeof words,
           "no token can be chosen after position %d: the model's logits are not finite, or "
           "logit_bias and min_tokens exclude every token",
           at);
  mr_flight_fail(e, j->f, words);
}

static mr_code take_jobs(mr_engine *e, mr_err *err) {
  mr_code rc = MR_OK;
  for (size_t i = 0; i < e->n_jobs && !rc; i++) {
    mr_logit_job *j = &e->jobs[i];
    if (j->s && j->s->done)
      continue; /* its request has failed */
    if (j->code)
      fail(e, j);
    else if (j->kind == MR_JOB_PICK)
      rc = take_pick(e, j, err);
    else if (j->kind == MR_JOB_CONT)
      take_score(e, j);
  }
  return rc;
}

static void count(mr_engine *e, const mr_step_stats *st, double sample_s, double seconds) {
  mr_engine_stats *s = &e->stats;
  uint64_t used = (uint64_t)mr_engine_used_pages(e);
  s->steps++;
  s->logit_rows += (uint64_t)e->n_logits;
  s->step_s += seconds;
  s->gemm_s += st->gemm_s;
  s->attn_s += st->attn_s;
  s->sample_s += sample_s;
  s->other_s = s->step_s - s->gemm_s - s->attn_s - s->sample_s;
  s->flops += st->flops;
  s->bytes += st->bytes;
  s->batch_tokens_sum += (uint64_t)e->n_tokens;
  s->max_batch_seen = e->n_runs > s->max_batch_seen ? e->n_runs : s->max_batch_seen;
  s->kv_pages_peak = used > s->kv_pages_peak ? used : s->kv_pages_peak;
}

/* Nobody can go on before something is read. */
static mr_code wait_for_disk(mr_engine *e, mr_err *err) {
  for (const mr_flight *f = e->flights; f; f = f->next)
    if (f->state == MR_FLIGHT_FETCHING) {
      mr_kvtier_wait(e->tier);
      return MR_OK;
    }
  return mr_err_set(err, MR_E_INTERNAL, "no request can go on (%d pages free)",
                    mr_kv_free_pages(e->kv));
}

/* Who and what was held back is needed after all. */
static bool needs_more(mr_engine *e) {
  bool held = mr_engine_needs_all(e);
  while (mr_engine_release(e))
    held = true;
  return held;
}

mr_code mr_engine_step(mr_engine *e, mr_err *err) {
  if (!e->flights)
    return MR_OK;
  double start = mr_sys_seconds();
  mr_step_stats st = {0};
  mr_code rc = build(e, err);
  if (!rc && !e->n_runs && !e->moved && needs_more(e))
    rc = build(e, err);
  if (!rc && !e->n_runs)
    return e->moved ? MR_OK : wait_for_disk(e, err);
  if (!rc && e->asks)
    mr_forward_ask(e->forward, e->asks);
  if (!rc)
    rc = mr_forward_step(e->forward, e->runs, e->n_runs, &st, err);
  if (rc)
    return rc;
  double sampling = mr_sys_seconds();
  rc = run_jobs(e, err);
  if (rc)
    return rc;
  double sampled = mr_sys_seconds();
  advance(e);
  rc = take_jobs(e, err);
  count(e, &st, sampled - sampling, mr_sys_seconds() - start);
  mr_engine_sweep(e);
  return rc;
}
