/* Memory ran out: flights are parked, and come back. */
#include <limits.h>

#include "src/engine_int.h"

/* ---------------------------------------------------------------- away */

static bool is_whole(const mr_flight *f, int fed) {
  return fed == f->r.n_prompt;
}

/* Places of the full blocks that its sequences have in common, or all where there is only the
 * prompt. */
static int prompt_places(const mr_engine *e, const mr_flight *f) {
  return is_whole(f, f->fed) ? f->fed / MR_KV_BLOCK * e->groups.n : mr_engine_pages(e, f->fed);
}

mr_sequence *mr_flight_holder(mr_flight *f) {
  mr_sequence *best = NULL;
  if (!is_whole(f, f->fed))
    return &f->seqs[0];
  for (int i = 0; i < f->n_seqs; i++)
    if (!f->seqs[i].done && (!best || f->seqs[i].kv.first < best->kv.first))
      best = &f->seqs[i];
  return best;
}

static int count_pages(const mr_engine *e, const mr_kv_seq *kv, int from, int end) {
  int all = mr_kv_seq_places(e->kv, kv);
  return mr_kv_seq_count(e->kv, kv, from, end < all ? end : all);
}

static int held_pages(const mr_engine *e, mr_flight *f) {
  int own = prompt_places(e, f), n = count_pages(e, &mr_flight_holder(f)->kv, 0, own);
  for (int i = 0; is_whole(f, f->fed) && i < f->n_seqs; i++)
    if (!f->seqs[i].done)
      n += count_pages(e, &f->seqs[i].kv, own, INT_MAX);
  return n;
}

int mr_flight_parked_len(const mr_flight *f) {
  int len = f->parked.len;
  if (is_whole(f, f->parked_fed))
    len = INT_MAX;
  for (int i = 0; is_whole(f, f->parked_fed) && i < f->n_seqs; i++)
    if (!f->seqs[i].done && f->seqs[i].parked.len < len)
      len = f->seqs[i].parked.len;
  return len;
}

static int64_t computed_tokens(const mr_flight *f) {
  int64_t n = f->fed;
  for (int i = 0; i < f->n_seqs; i++)
    n += f->seqs[i].done ? 0 : f->seqs[i].fed;
  return n;
}

void mr_flight_forget(mr_engine *e, mr_flight *f) {
  mr_kvtier_forget(e->tier, &f->parked);
  for (int i = 0; f->seqs && i < f->n_seqs; i++)
    mr_kvtier_forget(e->tier, &f->seqs[i].parked);
  f->spilled = f->lost = false;
}

/* Pages have the places that they will have when so many tokens come back. */
static bool in_place(const mr_engine *e, const mr_kv_seq *kv, int len) {
  return !mr_kv_packs(mr_kv_type_of(e->kv)) ||
         mr_kv_seq_places(e->kv, kv) == mr_engine_pages(e, len);
}

/* What other flights hold in the tree will be there again, or is computed for all of them. */
static bool to_disk(mr_engine *e, mr_flight *f) {
  int own = prompt_places(e, f), common = 0;
  const mr_kv_seq *kv = &mr_flight_holder(f)->kv;
  double token_s =
      e->stats.batch_tokens_sum ? e->stats.step_s / (double)e->stats.batch_tokens_sum : 0;
  if (f->n_chain) {
    int n = f->fed / MR_KV_BLOCK < f->n_chain ? f->fed / MR_KV_BLOCK : f->n_chain;
    common = mr_prefix_common(e->prefix, f->chain, n);
  }
  int there = count_pages(e, kv, 0, common * e->groups.n);
  if (!in_place(e, kv, kv->len) ||
      !mr_kvtier_spills(e->tier, held_pages(e, f) - there,
                        computed_tokens(f) - common * MR_KV_BLOCK, token_s))
    return false;
  f->fetch_at = common * MR_KV_BLOCK;
  int len = is_whole(f, f->fed) ? f->fed / MR_KV_BLOCK * MR_KV_BLOCK : f->fed;
  bool ok = mr_kvtier_park(e->tier, kv, common * e->groups.n, own, len, &f->parked);
  for (int i = 0; ok && is_whole(f, f->fed) && i < f->n_seqs; i++) {
    mr_sequence *s = &f->seqs[i];
    if (!s->done)
      ok = in_place(e, &s->kv, s->kv.len) &&
           mr_kvtier_park(e->tier, &s->kv, own, mr_kv_seq_places(e->kv, &s->kv), s->kv.len,
                          &s->parked);
  }
  if (!ok)
    mr_flight_forget(e, f);
  return ok;
}

/* It will compute everything again. What it has chosen stays; scores are summed anew. */
static void start_over(mr_engine *e, mr_flight *f) {
  e->stats.recomputed_tokens += (uint64_t)computed_tokens(f);
  f->fed = 0;
  for (int i = 0; i < f->n_seqs; i++) {
    mr_sequence *s = &f->seqs[i];
    mr_kv_seq_release(e->kv, &s->kv);
    if (s->done)
      continue;
    s->fed = 0;
    s->out.sum_logprob = 0;
    s->out.greedy = true;
  }
}

int mr_flight_reserved(const mr_flight *f) {
  int n = f->shared_pages;
  for (int i = 0; i < f->n_seqs; i++)
    n += f->seqs[i].done ? 0 : f->seqs[i].own_pages;
  return n;
}

void mr_flight_park(mr_engine *e, mr_flight *f) {
  e->stats.preemptions += f->fed > 0;
  if (!f->spilled) { /* else it has not got back yet what is on disk */
    f->parked_pages = held_pages(e, f);
    f->parked_fed = f->fed;
    f->spilled = f->fed > 0 && to_disk(e, f);
  }
  if (!f->spilled)
    start_over(e, f);
  for (int i = 0; i < f->n_seqs; i++)
    mr_kv_seq_release(e->kv, &f->seqs[i].kv);
  if (f->n_chain) { /* it comes back before any that is new */
    mr_prefix_expect(e->prefix, f->r.adapter, f->r.prompt, f->n_chain, e->came);
    mr_prefix_release(e->prefix, f->chain, f->n_chain, f->wide, f->age);
  }
  e->pages_reserved -= mr_flight_reserved(f);
  f->fed = 0;
  f->partial_at = -1;
  f->state = MR_FLIGHT_PARKED;
  e->n_parked++;
}

/* ---------------------------------------------------------------- and back */

static void activate(mr_engine *e, mr_flight *f) {
  if (f->n_chain) {
    mr_prefix_acquire(e->prefix, f->r.adapter, f->r.prompt, f->n_chain, f->wide, f->chain);
    mr_prefix_came(e->prefix, f->r.adapter, f->r.prompt, f->n_chain, e->came + 1);
  }
  e->pages_reserved += mr_flight_reserved(f);
  f->state = MR_FLIGHT_ACTIVE;
  e->n_parked--;
}

/* Room for it and a block for each sequence that goes on; or it is alone. */
static bool may_return(const mr_engine *e, const mr_flight *f) {
  int growing = f->n_live;
  bool alone = true;
  for (const mr_flight *o = e->flights; o; o = o->next) {
    bool there = o->state == MR_FLIGHT_FETCHING || (o->state == MR_FLIGHT_ACTIVE && o->fed > 0);
    alone = alone && !there;
    growing += there ? o->n_live : 0;
  }
  int cached = e->prefix ? mr_prefix_cached(e->prefix) : 0;
  return alone || f->parked_pages + growing * e->groups.n <= mr_kv_free_pages(e->kv) + cached;
}

static int wants(const mr_engine *e, const mr_kv_seq *kv, int len) {
  return len > kv->len ? mr_kv_seq_wants(e->kv, kv, len - kv->len) : 0;
}

/* A live sequence's own pages, after the prompt's, which seqs[0] holds. */
static mr_code fetch_own(mr_engine *e, mr_flight *f, mr_sequence *s) {
  int common = f->parked.len, len = s->parked.len;
  if (s != &f->seqs[0])
    mr_kv_seq_share(e->kv, &s->kv, &f->seqs[0].kv, common);
  mr_kv_seq_drop(e->kv, &s->kv, mr_kv_first(e->kv, len));
  mr_code rc = mr_kv_seq_reserve(e->kv, &s->kv, len - common);
  if (rc)
    return rc;
  s->kv.len = len;
  mr_kvtier_fetch(e->tier, &s->parked, &s->kv, common / MR_KV_BLOCK * e->groups.n);
  return MR_OK;
}

static bool still_reading(mr_engine *e, mr_flight *f, mr_parked *p) {
  mr_code rc = mr_kvtier_fetched(e->tier, p);
  f->lost = f->lost || rc == MR_E_IO;
  return rc == MR_E_AGAIN;
}

static void fetched(mr_engine *e, mr_flight *f) {
  bool reading = still_reading(e, f, &f->parked);
  for (int i = 0; i < f->n_seqs; i++)
    reading = still_reading(e, f, &f->seqs[i].parked) || reading;
  if (reading)
    return;
  f->state = MR_FLIGHT_ACTIVE;
  e->moved = true;
  int from = f->fed;
  if (f->fed < f->parked_fed) /* others may have computed more of the prompt meanwhile */
    f->fed = f->parked_fed;
  f->spilled = false;
  if (f->lost)
    start_over(e, f);
  else if (f->n_seqs == 1)
    mr_flight_publish(e, f, from);
  f->lost = false;
}

void mr_flight_fetch(mr_engine *e, mr_flight *f) {
  mr_kv_seq *kv = &f->seqs[0].kv;
  bool whole = is_whole(f, f->parked_fed);
  int common = f->parked.len;
  mr_kv_seq_drop(e->kv, kv, mr_kv_first(e->kv, mr_flight_parked_len(f)));
  int want = wants(e, kv, common);
  for (int i = 0; whole && i < f->n_seqs; i++) {
    int len = f->seqs[i].parked.len;
    if (!f->seqs[i].done)
      want += mr_kv_pages_from(e->kv, len, common / MR_KV_BLOCK, mr_kv_first(e->kv, len));
  }
  if (!mr_flight_make_room(e, f, want))
    return;
  int from = kv->len / MR_KV_BLOCK * e->groups.n;
  mr_code rc = common > kv->len ? mr_kv_seq_reserve(e->kv, kv, common - kv->len) : MR_OK;
  if (!rc && kv->len < common)
    kv->len = common;
  if (!rc)
    mr_kvtier_fetch(e->tier, &f->parked, kv, from);
  for (int i = f->n_seqs - 1; whole && !rc && i >= 0; i--)
    if (!f->seqs[i].done)
      rc = fetch_own(e, f, &f->seqs[i]);
  if (whole && f->seqs[0].done)
    mr_kv_seq_release(e->kv, kv);
  f->lost = rc != MR_OK;
  f->state = MR_FLIGHT_FETCHING;
  fetched(e, f); /* what a run before had saved is there already */
}

void mr_flight_settle(mr_engine *e, mr_flight *f) {
  while (f->state == MR_FLIGHT_FETCHING) {
    mr_kvtier_wait(e->tier);
    fetched(e, f);
  }
}

void mr_engine_revive(mr_engine *e) {
  e->blocked = 0;
  for (mr_flight *f = e->flights; f; f = f->next) {
    if (f->state == MR_FLIGHT_FETCHING)
      fetched(e, f);
    if (f->state != MR_FLIGHT_PARKED || e->blocked)
      continue;
    if (may_return(e, f))
      activate(e, f);
    else
      e->blocked = f->age;
  }
}
