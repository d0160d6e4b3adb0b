#include "jobs/forecast.h"

#include <string.h>

#include "io/hash.h"
#include "jobs/idset.h"
#include "kernels/kernels.h"

#define BLOCKS_MAX (1u << 20) /* remembered at a time */

typedef struct walk {
  mr_forecast *f;
  const mr_plan *p;
  mr_schedule *order;
  bool no_sharing;
  mr_idset seen;
  uint64_t group; /* rows so far of the one that is being walked through */
  mr_code rc;
  mr_err *err;
} walk;

/* Tokens in blocks that an earlier prompt began with too. Each block's hash covers all before it,
 * so equal hashes are equal beginnings. The last token is always computed: its logits are needed.
 */
static mr_code count_prompt(walk *w, const mr_plan_record *rec, int *shared) {
  const int32_t *ids = rec->prompt;
  int n = rec->e.n_prompt;
  struct {
    uint64_t before;
    int32_t ids[MR_KV_BLOCK];
  } block = {rec->e.adapter, {0}};
  *shared = 0;
  for (int at = 0; at + MR_KV_BLOCK < n; at += MR_KV_BLOCK) {
    memcpy(block.ids, ids + at, sizeof block.ids);
    block.before = mr_hash_64(&block, sizeof block);
    bool known = mr_idset_has(&w->seen, block.before);
    *shared += known ? MR_KV_BLOCK : 0;
    if (known)
      continue;
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

static void count_group(walk *w, bool goes_on) {
  mr_forecast *f = w->f;
  w->group = goes_on ? w->group + 1 : 1;
  f->groups += w->group == 2;
  f->grouped_rows += w->group == 2 ? 2 : w->group > 2;
  f->largest_group = w->group > f->largest_group ? w->group : f->largest_group;
}

static mr_code read_row(walk *w, uint64_t row, const mr_plan_entry *e, mr_sim_row *out) {
  int shared = 0;
  mr_forecast *f = w->f;
  if (e->n_prompt > MR_KV_BLOCK) {
    mr_plan_record rec;
    mr_code rc = mr_plan_read(w->p, row, &rec, w->err);
    if (rc != MR_OK)
      return rc;
    rc = count_prompt(w, &rec, &shared);
    mr_plan_record_free(&rec);
    if (rc != MR_OK)
      return rc;
  }
  uint64_t length = (uint64_t)e->n_prompt + (uint64_t)e->n_out;
  count_group(w, shared > 0);
  f->rows++;
  f->prompt_tokens += (uint64_t)e->n_prompt;
  f->output_tokens += (uint64_t)e->n_out;
  f->shared_tokens += (uint64_t)shared;
  f->longest_row = length > f->longest_row ? length : f->longest_row;
  *out = (mr_sim_row){.n_prompt = e->n_prompt,
                      .n_shared = w->no_sharing ? 0 : shared,
                      .n_out = e->n_out,
                      .score = e->kind == MR_ROW_SCORE};
  return MR_OK;
}

static bool next_row(void *ctx, mr_sim_row *out) {
  walk *w = ctx;
  uint64_t row;
  bool more = true;
  mr_plan_entry e = {.kind = MR_ROW_BAD};
  while (w->rc == MR_OK && more && e.kind == MR_ROW_BAD) {
    w->rc = mr_schedule_next(w->order, &row, &more, w->err);
    if (w->rc == MR_OK && more)
      w->rc = mr_plan_entry_read(w->p, row, &e, w->err);
  }
  if (w->rc == MR_OK && more)
    w->rc = read_row(w, row, &e, out);
  return w->rc == MR_OK && more;
}

mr_code mr_forecast_run(mr_forecast *f, const mr_plan *p, mr_schedule *order, bool no_sharing,
                        mr_time_estimate *e, const mr_engine_info *info, const mr_profile *profile,
                        mr_err *err) {
  walk w = {.f = f, .p = p, .order = order, .no_sharing = no_sharing, .err = err};
  *f = (mr_forecast){.rows = 0};
  mr_code rc = mr_estimate_run(e, info, profile, next_row, &w, err);
  mr_idset_free(&w.seen);
  return rc == MR_OK ? w.rc : rc;
}
