#include "jobs/forecast.h"

#include <string.h>

#include "io/hash.h"
#include "jobs/idset.h"
#include "kernels/kernels.h"

#define BLOCKS_MAX (1u << 20) /* remembered at a time */

typedef struct walk {
  mr_forecast *f;
  const mr_forecast_in *in;
  mr_idset seen;
  int begun; /* rows of in->saved so far */
  mr_code rc;
  mr_err *err;
} walk;

/* Adapters' blocks have other names: they are taken for not there. */
static bool in_cache(const walk *w, const mr_plan_record *rec, int n) {
  return w->in->cache && rec->e.adapter == 0 && mr_prefixstore_has(w->in->cache, 0, rec->prompt, n);
}

/* Tokens in blocks that an earlier prompt began with too, and in those that follow them in the
 * prefix cache. Each block's hash covers all before it, so equal hashes are equal beginnings. The
 * last token is always computed: its logits are needed. */
static mr_code count_prompt(walk *w, const mr_plan_record *rec, int *shared, int *cached) {
  const int32_t *ids = rec->prompt;
  int n = rec->e.n_prompt;
  struct {
    uint64_t before;
    int32_t ids[MR_KV_BLOCK];
  } block = {rec->e.adapter, {0}};
  *shared = *cached = 0;
  for (int at = 0; at + MR_KV_BLOCK < n; at += MR_KV_BLOCK) {
    memcpy(block.ids, ids + at, sizeof block.ids);
    block.before = mr_hash_64(&block, sizeof block);
    bool known = mr_idset_has(&w->seen, block.before);
    *shared += known ? MR_KV_BLOCK : 0;
    if (known)
      continue;
    if (*shared + *cached == at && in_cache(w, rec, at + MR_KV_BLOCK))
      *cached += MR_KV_BLOCK;
    if (w->seen.n >= BLOCKS_MAX) { /* those that begin alike come together: begin anew */
      mr_idset_free(&w->seen);
      w->f->shared_is_least = true;
    }
    mr_code rc = mr_idset_add(&w->seen, block.before, &known, w->err);
    if (rc != MR_OK)
      return rc;
  }
  return MR_OK;
}

/* Of the tokens that a row may choose, those that it is expected to. */
static int expected_out(const walk *w, const mr_plan_entry *e) {
  double share = w->in->share;
  if (share <= 0 || share >= 1 || e->kind == MR_ROW_SCORE || e->n_out < 1)
    return e->n_out;
  return 1 + (int)(share * (e->n_out - 1));
}

static mr_code read_row(walk *w, uint64_t row, const mr_plan_entry *e, mr_sim_row *out) {
  int shared = 0, cached = 0;
  mr_forecast *f = w->f;
  if (e->n_prompt > MR_KV_BLOCK) {
    mr_plan_record rec;
    mr_code rc = mr_plan_read(w->in->plan, row, &rec, w->err);
    if (rc != MR_OK)
      return rc;
    rc = count_prompt(w, &rec, &shared, &cached);
    mr_plan_record_free(&rec);
    if (rc != MR_OK)
      return rc;
  }
  uint64_t length = (uint64_t)e->n_prompt + (uint64_t)e->n_out;
  int n_out = expected_out(w, e);
  bool alone = w->in->no_sharing;
  f->rows++;
  f->prompt_tokens += (uint64_t)e->n_prompt;
  f->output_tokens += (uint64_t)n_out;
  f->shared_tokens += (uint64_t)shared;
  f->cached_tokens += alone ? 0 : (uint64_t)cached;
  f->longest_row = length > f->longest_row ? length : f->longest_row;
  *out = (mr_sim_row){.n_prompt = e->n_prompt,
                      .n_shared = alone ? 0 : shared + cached,
                      .n_cached = alone ? 0 : cached,
                      .n_out = n_out,
                      .score = e->kind == MR_ROW_SCORE};
  return MR_OK;
}

/* What is left of a row that was begun: its prompt with what it has chosen, which is there or is
 * computed again, and the tokens to come. */
static void begun_row(walk *w, const mr_saved_row *r, const mr_plan_entry *e, mr_sim_row *out) {
  int chosen = mr_saved_picks(r), out_left = expected_out(w, e);
  int prompt = e->n_prompt + chosen;
  out_left = out_left - chosen > 1 ? out_left - chosen : 1;
  *out =
      (mr_sim_row){.n_prompt = prompt, .n_shared = r->n_pages ? prompt - 1 : 0, .n_out = out_left};
  w->f->rows++;
  w->f->prompt_tokens += (uint64_t)(prompt - out->n_shared);
  w->f->output_tokens += (uint64_t)out_left;
}

/* *more false: there is none any more. */
static mr_code next_begun(walk *w, mr_sim_row *out, bool *more) {
  const mr_forecast_in *in = w->in;
  *more = false;
  while (!*more && w->begun < mr_saved_rows(in->saved)) {
    mr_plan_entry e;
    const mr_saved_row *r = mr_saved_at(in->saved, w->begun++);
    if (r->row >= mr_plan_rows(in->plan) || (in->done && in->done(in->ctx, r->row)))
      continue;
    mr_code rc = mr_plan_entry_read(in->plan, r->row, &e, w->err);
    if (rc != MR_OK)
      return rc;
    *more = e.kind != MR_ROW_BAD;
    if (*more)
      begun_row(w, r, &e, out);
  }
  return MR_OK;
}

static bool next_row(void *ctx, mr_sim_row *out) {
  walk *w = ctx;
  uint64_t row;
  bool more = true, begun = false;
  mr_plan_entry e = {.kind = MR_ROW_BAD};
  if (w->rc == MR_OK)
    w->rc = next_begun(w, out, &begun);
  if (begun)
    return true;
  while (w->rc == MR_OK && more && e.kind == MR_ROW_BAD) {
    w->rc = mr_schedule_next(w->in->order, &row, &more, w->err);
    if (w->rc == MR_OK && more)
      w->rc = mr_plan_entry_read(w->in->plan, row, &e, w->err);
  }
  if (w->rc == MR_OK && more)
    w->rc = read_row(w, row, &e, out);
  return w->rc == MR_OK && more;
}

mr_code mr_forecast_run(mr_forecast *f, const mr_forecast_in *in, mr_time_estimate *e,
                        mr_err *err) {
  walk w = {.f = f, .in = in, .err = err};
  *f = (mr_forecast){.order = mr_schedule_info_of(in->order)};
  mr_code rc = mr_estimate_run(e, in->info, in->profile, next_row, &w, err);
  mr_idset_free(&w.seen);
  return rc == MR_OK ? w.rc : rc;
}
