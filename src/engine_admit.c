/* Requests come and go: checks, copies, reservations; results. */
#include <string.h>

#include "io/mem.h"
#include "io/sys.h"
#include "src/engine_int.h"

#define LEARN_FROM 32       /* choices, before their lengths are relied on */
#define MAX_SEQUENCES 65536 /* of one request: keeps every count below far from overflow */

int mr_engine_pages(const mr_engine *e, int64_t tokens) {
  return mr_kv_pages_for(e->kv, tokens);
}

/* ---------------------------------------------------------------- checks */

static mr_code check_ids(const mr_engine *e, const int32_t *ids, int64_t n, const char *what,
                         mr_err *err) {
  for (int64_t i = 0; i < n; i++)
    if (ids[i] < 0 || ids[i] >= e->info.n_vocab)
      return mr_err_set(err, MR_E_DATA,
                        "%s: token id %d at index %lld is not in the vocabulary (0 to %d)", what,
                        ids[i], (long long)i, e->info.n_vocab - 1);
  return MR_OK;
}

static mr_code check_generate(const mr_engine *e, const mr_request *r, mr_err *err) {
  const mr_sampling *p = &r->sampling;
  if (p->n < 1 || p->n > MAX_SEQUENCES)
    return mr_err_set(err, MR_E_DATA, "n is %d, it must be 1 to %d", p->n, MAX_SEQUENCES);
  if (p->n_stop > 0 && !e->vocab)
    return mr_err_set(err, MR_E_DATA,
                      "stop strings need a model with a vocabulary; use stop_token_ids");
  if (p->max_tokens > e->info.context - r->n_prompt)
    return mr_err_set(err, MR_E_DATA,
                      "prompt (%d tokens) and max_tokens (%d) pass the context of %d tokens by %d",
                      r->n_prompt, p->max_tokens, e->info.context,
                      r->n_prompt + p->max_tokens - e->info.context);
  return MR_OK;
}

static mr_code check_score(const mr_engine *e, const mr_request *r, mr_err *err) {
  int64_t total = 0;
  if (r->n_cont < 1 || r->n_cont > MAX_SEQUENCES)
    return mr_err_set(err, MR_E_DATA, "%d continuations, there must be 1 to %d", r->n_cont,
                      MAX_SEQUENCES);
  for (int i = 0; i < r->n_cont; i++) {
    if (r->cont_len[i] < 1)
      return mr_err_set(err, MR_E_DATA, "continuation %d has no tokens", i);
    if (r->cont_len[i] > e->info.context - r->n_prompt)
      return mr_err_set(err, MR_E_DATA,
                        "prompt (%d tokens) and continuation %d (%d) pass the context of %d tokens",
                        r->n_prompt, i, r->cont_len[i], e->info.context);
    total += r->cont_len[i];
  }
  return check_ids(e, r->cont, total, "continuations", err);
}

static mr_code check(const mr_engine *e, const mr_request *r, mr_err *err) {
  const mr_sampling *p = &r->sampling;
  if (r->n_prompt < 1)
    return mr_err_set(err, MR_E_DATA, "the prompt has no tokens");
  if (r->n_prompt > e->info.context)
    return mr_err_set(err, MR_E_DATA, "the prompt has %d tokens, %d more than the context of %d",
                      r->n_prompt, r->n_prompt - e->info.context, e->info.context);
  if (r->adapter < 0 || r->adapter > (e->lora ? e->lora->n : 0))
    return mr_err_set(err, MR_E_INTERNAL, "a request names adapter %d of %d", r->adapter,
                      e->lora ? e->lora->n : 0);
  if (p->n_bias < 0 || p->n_stop_ids < 0 || p->n_stop < 0)
    return mr_err_set(err, MR_E_INTERNAL, "a request with a negative count");
  if (p->logprobs > MR_TOP_LOGPROBS_MAX || p->prompt_logprobs > MR_TOP_LOGPROBS_MAX)
    return mr_err_set(err, MR_E_DATA, "logprobs: at most %d", MR_TOP_LOGPROBS_MAX);
  mr_code rc = check_ids(e, r->prompt, r->n_prompt, "prompt", err);
  if (rc)
    return rc;
  return r->task == MR_TASK_SCORE ? check_score(e, r, err) : check_generate(e, r, err);
}

/* ---------------------------------------------------------------- a flight is made and freed */

/* A copy of n items; sets *failed. NULL where n is 0. */
static void *copied(const void *src, int64_t n, size_t size, bool *failed) {
  if (n <= 0)
    return NULL;
  void *p = mr_mem_copy(src, (size_t)n * size);
  *failed = *failed || !p;
  return p;
}

static void copy_sampling(mr_sampling *p, bool *failed) {
  char **stop = p->stop;
  p->bias = copied(p->bias, p->n_bias, sizeof *p->bias, failed);
  p->stop_ids = copied(p->stop_ids, p->n_stop_ids, sizeof *p->stop_ids, failed);
  p->stop = p->n_stop > 0 ? mr_mem_alloc((size_t)p->n_stop, sizeof *p->stop) : NULL;
  *failed = *failed || (p->n_stop > 0 && !p->stop);
  for (int i = 0; p->stop && i < p->n_stop; i++)
    p->stop[i] = copied(stop[i], (int64_t)strlen(stop[i]) + 1, 1, failed);
}

static void free_request(mr_request *r) {
  mr_mem_free((void *)r->prompt);
  mr_mem_free((void *)r->cont);
  mr_mem_free((void *)r->cont_len);
  mr_mem_free(r->sampling.bias);
  mr_mem_free(r->sampling.stop_ids);
  for (int i = 0; r->sampling.stop && i < r->sampling.n_stop; i++)
    mr_mem_free(r->sampling.stop[i]);
  mr_mem_free(r->sampling.stop);
}

void mr_flight_free(mr_engine *e, mr_flight *f) {
  if (!f)
    return;
  mr_flight_forget(e, f);
  for (int i = 0; f->seqs && i < f->n_seqs; i++)
    mr_sequence_free(&f->seqs[i], e->kv);
  mr_mem_free(f->seqs);
  mr_mem_free(f->chain);
  mr_mem_free(f->cont);
  mr_mem_free(f->ends);
  mr_result_free(f->result);
  free_request(&f->r);
  mr_mem_free(f);
}

void mr_result_free(mr_result *r) {
  if (!r)
    return;
  for (int i = 0; r->choices && i < r->n_choices; i++)
    mr_choice_free(&r->choices[i]);
  mr_mem_free(r->choices);
  mr_mem_free(r->prompt_logprobs);
  mr_mem_free(r);
}

static void copy_request(mr_flight *f, const mr_request *r, bool *failed) {
  int64_t total = 0;
  int n_cont = r->task == MR_TASK_SCORE ? r->n_cont : 0;
  f->r = *r;
  f->r.prompt = copied(r->prompt, r->n_prompt, sizeof *r->prompt, failed);
  for (int i = 0; i < n_cont; i++)
    total += r->cont_len[i];
  f->r.cont = copied(r->cont, total, sizeof *r->cont, failed);
  f->r.cont_len = copied(r->cont_len, n_cont, sizeof *r->cont_len, failed);
  f->r.n_cont = n_cont;
  copy_sampling(&f->r.sampling, failed);
}

static void set_ends(const mr_engine *e, mr_flight *f, bool *failed) {
  const mr_sampling *p = &f->r.sampling;
  int model = p->ignore_eos ? 0 : (int)e->n_ends;
  f->ends = mr_mem_alloc((size_t)model + (size_t)p->n_stop_ids, sizeof *f->ends);
  if (!f->ends) {
    *failed = true;
    return;
  }
  if (model)
    memcpy(f->ends, e->ends, (size_t)model * sizeof *f->ends);
  if (p->n_stop_ids > 0 && p->stop_ids)
    memcpy(f->ends + model, p->stop_ids, (size_t)p->n_stop_ids * sizeof *f->ends);
  f->n_ends = model + p->n_stop_ids;
}

/* Who wants the logits of all prompt tokens computes them all. */
static bool shares(const mr_engine *e, const mr_request *r) {
  return e->prefix && r->sampling.prompt_logprobs < 0;
}

static int chain_blocks(const mr_engine *e, const mr_request *r) {
  return shares(e, r) ? (r->n_prompt - 1) / MR_KV_BLOCK : 0;
}

/* MR_KV_AUTO admits by what choices had so far of what they could have had: half as much again, for
 * the long ones among them; with a disk half of that, as rows are half way on average and parking
 * one costs little. */
static int expected_new(const mr_engine *e, int most) {
  if (e->policy != MR_KV_AUTO)
    return most;
  double share = e->share_n < LEARN_FROM ? 1 : 1.5 * e->share_sum / (double)e->share_n;
  share = (share < 1 ? share : 1) * (mr_kvtier_has_disk(e->tier) ? 0.5 : 1);
  return share < 1 ? (int)(share * most) + 1 : most;
}

/* Pages of so many blocks, one after the other, of a sequence that goes on through them. */
static int pages_of(const mr_engine *e, int blocks) {
  int seen = blocks < e->window_blocks ? blocks : e->window_blocks;
  return e->groups.n_full * blocks + (e->groups.n - e->groups.n_full) * seen;
}

/* Pages of sequence i beyond the prompt's full blocks; the last new token is never fed, so it takes
 * no place. */
static int own_pages(const mr_engine *e, const mr_request *r, int i, bool expected) {
  int left = e->info.context - r->n_prompt;
  int more = r->sampling.max_tokens >= 0 ? r->sampling.max_tokens : left;
  if (r->task == MR_TASK_SCORE)
    more = r->cont_len[i];
  else if (expected)
    more = expected_new(e, more);
  int64_t tokens = (int64_t)r->n_prompt + (more > 0 ? more - 1 : 0);
  int blocks = (int)((tokens + MR_KV_BLOCK - 1) / MR_KV_BLOCK) - r->n_prompt / MR_KV_BLOCK;
  return pages_of(e, blocks) + e->info.kv_own_pages;
}

/* Groups whose pages the tree may give up alone. */
static int loose_groups(const mr_engine *e) {
  return e->groups.n_full ? e->groups.n - e->groups.n_full : 0;
}

/* Pages of the prompt's full blocks beside those that its nodes hold. */
static int prompt_pages(const mr_engine *e, const mr_request *r, bool wide) {
  int chain = chain_blocks(e, r), seen = chain < e->window_blocks ? chain : e->window_blocks;
  return pages_of(e, r->n_prompt / MR_KV_BLOCK - chain) + (wide ? 0 : loose_groups(e) * seen);
}

static int node_pages(const mr_engine *e, bool wide) {
  return e->groups.n - (wide ? 0 : loose_groups(e));
}

/* Pages that the request may hold at once. */
static int64_t pages_needed(const mr_engine *e, const mr_request *r, bool wide) {
  int64_t sum = (int64_t)chain_blocks(e, r) * node_pages(e, wide) + prompt_pages(e, r, wide);
  int n = r->task == MR_TASK_SCORE ? r->n_cont : r->sampling.n;
  for (int i = 0; i < n; i++)
    sum += own_pages(e, r, i, false);
  return sum;
}

/* Whether it holds its nodes wide: as long as no more of them are new than it would reserve. */
static bool is_wide(const mr_engine *e, const mr_request *r) {
  int n = chain_blocks(e, r);
  return n && loose_groups(e) &&
         mr_prefix_unwide(e->prefix, r->adapter, r->prompt, n) <= e->window_blocks &&
         pages_needed(e, r, true) <= mr_kv_most_pages(e->kv);
}

/* Tokens after the prompt that sequence i may have. */
static int new_tokens(const mr_flight *f, int i) {
  return f->r.task == MR_TASK_SCORE ? f->r.cont_len[i] : f->max_new;
}

/* Block tables and page counts; the last new token is never fed, so it takes no place. */
static void make_sequences(const mr_engine *e, mr_flight *f, bool *failed) {
  const int32_t *cont = f->r.cont;
  bool score = f->r.task == MR_TASK_SCORE;
  for (int i = 0; i < f->n_seqs && !*failed; i++) {
    int more = new_tokens(f, i);
    int len = f->r.n_prompt + (more > 0 ? more - 1 : 0);
    mr_sequence *s = &f->seqs[i];
    *failed =
        mr_sequence_init(s, &f->r.sampling, score ? NULL : e->vocab, e->kv, len, NULL) != MR_OK;
    s->own_pages = own_pages(e, &f->r, i, true);
    if (!score || *failed)
      continue;
    f->cont[i] = cont;
    cont += more;
    s->out.n_ids = more;
    s->out.ids = copied(f->cont[i], more, sizeof *cont, failed);
    s->out.logprobs = mr_mem_alloc((size_t)more, sizeof *s->out.logprobs);
    *failed = *failed || !s->out.logprobs;
  }
}

static mr_code make_flight(const mr_engine *e, const mr_request *r, mr_flight **out, mr_err *err) {
  bool failed = false, score = r->task == MR_TASK_SCORE;
  mr_flight *f = mr_mem_alloc(1, sizeof *f);
  *out = f;
  if (!f)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for a request");
  copy_request(f, r, &failed);
  set_ends(e, f, &failed);
  f->max_new = r->sampling.max_tokens >= 0 ? r->sampling.max_tokens : e->info.context - r->n_prompt;
  f->shares = shares(e, r);
  f->n_chain = chain_blocks(e, r);
  f->wide = is_wide(e, r);
  f->shared_pages = prompt_pages(e, r, f->wide);
  f->partial_at = -1;
  int n = score ? r->n_cont : r->sampling.n;
  f->seqs = mr_mem_alloc((size_t)n, sizeof *f->seqs);
  f->cont = score ? mr_mem_alloc((size_t)n, sizeof *f->cont) : NULL;
  f->result = mr_mem_alloc(1, sizeof *f->result);
  if (!f->seqs || !f->result || (score && !f->cont))
    failed = true;
  f->n_seqs = f->n_live = n;
  if (!failed) {
    f->result->tag = r->tag;
    f->result->n_prompt = r->n_prompt;
    f->result->n_choices = n;
    f->result->choices = mr_mem_alloc((size_t)n, sizeof *f->result->choices);
    if (r->sampling.prompt_logprobs >= 0)
      f->result->prompt_logprobs =
          mr_mem_alloc((size_t)r->n_prompt, sizeof *f->result->prompt_logprobs);
    failed =
        !f->result->choices || (r->sampling.prompt_logprobs >= 0 && !f->result->prompt_logprobs);
    make_sequences(e, f, &failed);
  }
  return failed
             ? mr_err_set(err, MR_E_NOMEM, "out of memory for a request of %d tokens", r->n_prompt)
             : MR_OK;
}

/* ---------------------------------------------------------------- admission */

/* Pages that it is expected to add to those that are reserved and held. */
static int64_t pages_added(const mr_engine *e, const mr_request *r) {
  bool wide = is_wide(e, r);
  int n = chain_blocks(e, r);
  int64_t sum = prompt_pages(e, r, wide);
  if (n)
    sum += (int64_t)node_pages(e, false) * mr_prefix_unheld(e->prefix, r->adapter, r->prompt, n);
  if (wide)
    sum += (int64_t)loose_groups(e) * mr_prefix_unwide(e->prefix, r->adapter, r->prompt, n);
  n = r->task == MR_TASK_SCORE ? r->n_cont : r->sampling.n;
  for (int i = 0; i < n; i++)
    sum += own_pages(e, r, i, true);
  return sum;
}

static mr_code has_room(const mr_engine *e, const mr_request *r, int n_seqs, mr_err *err) {
  int64_t need = pages_needed(e, r, false), total = mr_kv_most_pages(e->kv);
  if (need > total) {
    uint64_t page = e->info.kv_page_bytes;
    return mr_err_set(err, MR_E_DATA,
                      "the request needs %llu bytes of keys and values (%d prompt tokens, %d "
                      "sequences), the budget is %llu; lower max_tokens or n, or raise --kv-memory",
                      (unsigned long long)((uint64_t)need * page), r->n_prompt, n_seqs,
                      (unsigned long long)((uint64_t)total * page));
  }
  bool gated = e->policy == MR_KV_FEWER || e->policy == MR_KV_AUTO;
  if (e->n_parked > 0)
    return MR_E_AGAIN;
  int held = e->prefix ? mr_prefix_held(e->prefix) : 0;
  if (gated && e->pages_reserved + held + pages_added(e, r) > mr_kv_total_pages(e->kv))
    return MR_E_AGAIN;
  return e->n_live > 0 && e->n_live + n_seqs > e->info.max_batch ? MR_E_AGAIN : MR_OK;
}

mr_code mr_engine_admit(mr_engine *e, const mr_request *r, mr_err *err) {
  mr_code rc = check(e, r, err);
  if (rc)
    return rc;
  int n = r->task == MR_TASK_SCORE ? r->n_cont : r->sampling.n;
  rc = has_room(e, r, n, err);
  if (rc == MR_E_AGAIN && !e->n_active && mr_engine_needs_all(e))
    rc = has_room(e, r, n, err);
  if (rc)
    return rc;
  size_t jobs = (size_t)e->max_logits + (size_t)e->n_sequences + (size_t)n;
  if (!mr_mem_grow((void **)&e->jobs, &e->cap_jobs, jobs, sizeof *e->jobs))
    return mr_err_set(err, MR_E_NOMEM, "out of memory for a request");
  mr_flight *f;
  rc = make_flight(e, r, &f, err);
  if (!rc)
    rc = mr_flight_join(e, f, err);
  if (rc) {
    mr_flight_free(e, f);
    return rc;
  }
  e->pages_reserved += mr_flight_reserved(f);
  e->n_sequences += n;
  e->n_live += n;
  e->n_active++;
  f->result->admitted_s = mr_sys_seconds();
  *e->flights_end = f;
  e->flights_end = &f->next;
  return e->saved ? mr_flight_resume(e, f, err) : MR_OK;
}

int mr_engine_active(const mr_engine *e) {
  return e->n_active;
}

/* ---------------------------------------------------------------- the end of a request */

void mr_flight_retire(mr_engine *e, mr_flight *f, mr_sequence *s) {
  s->done = true;
  mr_kv_seq_release(e->kv, &s->kv);
  e->pages_reserved -= s->own_pages;
  s->own_pages = 0;
  f->n_live--;
  e->n_live--;
}

void mr_flight_fail(mr_engine *e, mr_flight *f, const char *words) {
  mr_err_set(&f->result->err, MR_E_DATA, "%s", words);
  for (int i = 0; i < f->n_seqs; i++) {
    mr_sequence *s = &f->seqs[i];
    bool retired = s->done;
    mr_sequence_end(s, MR_FINISH_ERROR, -1, NULL);
    s->out.finish = MR_FINISH_ERROR;
    if (!retired)
      mr_flight_retire(e, f, s);
  }
}

static void learn(mr_engine *e, const mr_flight *f) {
  for (int i = 0; f->r.task == MR_TASK_GENERATE && f->max_new > 0 && i < f->n_seqs; i++) {
    e->share_sum += (double)f->seqs[i].out.n_sampled / f->max_new;
    e->share_n++;
  }
}

static void finish(mr_engine *e, mr_flight *f) {
  learn(e, f);
  for (int i = 0; i < f->n_seqs; i++)
    mr_sequence_take(&f->seqs[i], &f->result->choices[i]);
  f->result->done_s = mr_sys_seconds();
  mr_flight_leave(e, f);
  e->pages_reserved -= f->shared_pages;
  e->n_sequences -= f->n_seqs;
  f->next = NULL;
  *e->finished_end = f;
  e->finished_end = &f->next;
}

void mr_engine_sweep(mr_engine *e) {
  mr_flight **link = &e->flights;
  while (*link) {
    mr_flight *f = *link;
    if (f->n_live > 0) {
      link = &f->next;
      continue;
    }
    *link = f->next;
    finish(e, f);
  }
  e->flights_end = link;
}

mr_result *mr_engine_collect(mr_engine *e) {
  mr_flight *f = e->finished;
  if (!f)
    return NULL;
  mr_result *r = f->result;
  f->result = NULL;
  e->finished = f->next;
  if (!e->finished)
    e->finished_end = &e->finished;
  e->n_active--;
  mr_flight_free(e, f);
  return r;
}
