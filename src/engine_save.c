/* A run stops before its end, and the next one goes on: rows in flight to files and back. */
#include <stdio.h>
#include <string.h>

#include "io/hash.h"
#include "io/mem.h"
#include "src/engine_int.h"

uint64_t mr_engine_layout(const mr_engine_info *i) {
  char words[160];
  int n = snprintf(words, sizeof words, "%s, numerics %d, %s, %s, kv %s, %d, %llu, %d groups",
                   MR_VERSION, MR_NUMERICS_VERSION, i->isa, i->scheme, i->kv_type, MR_KV_BLOCK,
                   (unsigned long long)i->kv_bytes_per_token, i->kv_groups);
  return mr_hash_64(words, n > 0 && n < (int)sizeof words ? (size_t)n : sizeof words);
}

/* What its tokens depend on, as far as it could differ under one row number. */
static uint64_t digest_of(const mr_request *r) {
  struct {
    uint64_t prompt, row_key, seed;
    int32_t n_prompt, max_tokens, n, logprobs, adapter, none;
  } key = {mr_hash_64(r->prompt, (size_t)r->n_prompt * sizeof *r->prompt),
           r->row_key,
           r->sampling.seed,
           r->n_prompt,
           r->sampling.max_tokens,
           r->sampling.n,
           r->sampling.logprobs,
           r->adapter,
           0};
  return mr_hash_64(&key, sizeof key);
}

static int pick_bytes(const mr_sampling *p) {
  return p->logprobs >= 0 ? (int)sizeof(mr_sampled) : (int)sizeof(int32_t);
}

/* ---------------------------------------------------------------- from files */

/* The tokens that it had chosen, one after the other as they came. */
static mr_code replay(mr_engine *e, mr_flight *f, const mr_saved_row *r, mr_err *err) {
  const uint8_t *at = r->picks;
  mr_code rc = MR_OK;
  for (int i = 0; i < f->n_seqs && !rc; i++) {
    mr_sequence *s = &f->seqs[i];
    for (int t = 0; t < r->seqs[i].n_picks && !rc; t++, at += r->seqs[i].pick_bytes) {
      s->picked = (mr_sampled){0};
      memcpy(&s->picked, at, (size_t)r->seqs[i].pick_bytes);
      if (s->done || s->picked.id < 0 || s->picked.id >= e->info.n_vocab)
        break;
      rc = mr_sequence_push(s, f->ends, f->n_ends, f->max_new, err);
    }
    e->stats.resumed_tokens += (uint64_t)s->out.n_sampled;
    if (s->done)
      mr_flight_retire(e, f, s);
  }
  return rc;
}

/* Their keys and values are on disk, as those of a flight that was parked. */
static void take_pages(mr_engine *e, mr_flight *f, const mr_saved_row *r) {
  bool whole = r->fed == f->r.n_prompt;
  int at = whole ? r->fed / MR_KV_BLOCK * e->groups.n : mr_engine_pages(e, r->fed);
  int64_t end = at; /* of the pages that are named below */
  if (r->fed < 1 || r->fed > f->r.n_prompt || at > r->n_pages ||
      !mr_saved_fits(e->saved, mr_kv_size_of_page(e->kv), mr_engine_layout(&e->info)))
    return;
  for (int i = 0; whole && i < f->n_seqs; i++) {
    const mr_saved_seq *q = &r->seqs[i];
    int64_t len = (int64_t)r->fed + q->fed;
    end += q->n_pages;
    if (!f->seqs[i].done &&
        (q->fed > f->seqs[i].out.n_ids || q->n_pages != mr_engine_pages(e, len) - at))
      return;
  }
  if (end > r->n_pages)
    return;
  f->parked = (mr_parked){.saved = e->saved,
                          .pages = r->pages,
                          .n = at,
                          .len = whole ? r->fed / MR_KV_BLOCK * MR_KV_BLOCK : r->fed};
  for (int i = 0, from = at; whole && i < f->n_seqs; from += r->seqs[i++].n_pages) {
    mr_sequence *s = &f->seqs[i];
    if (s->done)
      continue;
    s->fed = r->seqs[i].fed;
    s->parked = (mr_parked){.saved = e->saved,
                            .pages = r->pages + from,
                            .first = at,
                            .n = r->seqs[i].n_pages,
                            .len = r->fed + s->fed};
  }
  f->spilled = true;
  f->fetch_at = 0;
  f->parked_fed = r->fed;
}

mr_code mr_flight_resume(mr_engine *e, mr_flight *f, mr_err *err) {
  const mr_saved_row *r = mr_saved_take(e->saved, f->r.row);
  if (!r || f->r.task != MR_TASK_GENERATE || r->n_seqs != f->n_seqs ||
      r->check != digest_of(&f->r) || f->result->prompt_logprobs)
    return MR_OK;
  for (int i = 0; i < f->n_seqs; i++)
    if (r->seqs[i].pick_bytes != pick_bytes(&f->r.sampling))
      return MR_OK;
  e->stats.resumed_rows++;
  mr_code rc = replay(e, f, r, err);
  if (!rc && f->n_live > 0)
    take_pages(e, f, r);
  return rc;
}

/* ---------------------------------------------------------------- to files */

typedef struct save {
  mr_engine *e;
  mr_saver *w;
  mr_saved_page *known; /* [pages in all] those that are written already; at 0: not, at i + 1 */
  uint8_t *buf;         /* a page */
  mr_saved_page *pages; /* of the row; grown */
  size_t n_pages, cap_pages;
  bool failed; /* no memory */
} save;

static bool add_page(save *v, mr_saved_page p) {
  if (!mr_mem_grow((void **)&v->pages, &v->cap_pages, v->n_pages + 1, sizeof *v->pages)) {
    v->failed = true;
    return false;
  }
  v->pages[v->n_pages++] = p;
  return p.at != -1;
}

/* -1: one that was dropped. */
static bool save_page(save *v, int32_t page) {
  if (page < 0)
    return add_page(v, (mr_saved_page){MR_SAVED_DROPPED, 0});
  mr_saved_page *k = &v->known[page];
  if (k->at == 0) {
    const void *bytes = mr_kv_view(v->e->kv, page, v->buf);
    if (!bytes)
      return false;
    *k = mr_saver_page(v->w, bytes);
    k->at++; /* one that found no room is tried again */
  }
  return add_page(v, (mr_saved_page){k->at - 1, k->check});
}

static bool save_parked(save *v, const mr_parked *p) {
  bool ok = true;
  for (int i = 0; i < p->n && ok; i++)
    ok = mr_kvtier_has(p, i)
             ? mr_saver_has_room(v->w) && mr_kvtier_read(v->e->tier, p, i, v->buf) &&
                   add_page(v, mr_saver_page(v->w, v->buf))
             : save_page(v, -1);
  return ok;
}

/* A node's pages; those of layers with a window may be missing before position `first`. */
static bool save_node(save *v, int32_t node, int block, int first) {
  const mr_prefix *p = v->e->prefix;
  bool whole = mr_prefix_whole(p, node), ok = true;
  if (!mr_prefix_computed(p, node) || (!whole && block >= first / MR_KV_BLOCK))
    return false;
  for (int g = 0; g < v->e->groups.n && ok; g++)
    ok = save_page(v, mr_prefix_pages(p, node)[g]);
  return ok;
}

/* The first pages of a parked flight's prompt are the tree's, if they are there still. */
static bool save_common(save *v, mr_flight *f) {
  int n = f->fetch_at / MR_KV_BLOCK, first = mr_kv_first(v->e->kv, mr_flight_parked_len(f));
  bool ok = n <= f->n_chain;
  if (n == 0 || !ok)
    return ok;
  mr_prefix_acquire(v->e->prefix, f->r.adapter, f->r.prompt, f->n_chain, f->wide, f->chain);
  for (int i = 0; i < n && ok; i++)
    ok = save_node(v, f->chain[i], i, first);
  mr_prefix_release(v->e->prefix, f->chain, f->n_chain, f->wide, f->age);
  return ok;
}

/* A sequence's places after those of the prompt's full blocks. */
static int count_pages(const mr_engine *e, const mr_flight *f, const mr_sequence *s, bool whole) {
  if (s->done || !whole)
    return 0;
  return mr_engine_pages(e, (int64_t)f->r.n_prompt + s->fed) -
         f->r.n_prompt / MR_KV_BLOCK * e->groups.n;
}

static bool save_places(save *v, const mr_kv_seq *kv, int from, int end) {
  bool ok = end <= mr_kv_seq_places(v->e->kv, kv);
  for (int i = from; ok && i < end; i++)
    ok = save_page(v, mr_kv_seq_place(v->e->kv, kv, i));
  return ok;
}

/* False: not all of it could be saved. */
static bool save_pages(save *v, mr_flight *f) {
  bool whole = (f->spilled ? f->parked_fed : f->fed) == f->r.n_prompt, ok = true;
  if (f->spilled) {
    ok = save_common(v, f) && save_parked(v, &f->parked);
    for (int i = 0; ok && whole && i < f->n_seqs; i++)
      ok = f->seqs[i].done || (f->seqs[i].parked.n == count_pages(v->e, f, &f->seqs[i], whole) &&
                               save_parked(v, &f->seqs[i].parked));
    return ok;
  }
  int own = whole ? f->fed / MR_KV_BLOCK * v->e->groups.n : mr_engine_pages(v->e, f->fed);
  ok = save_places(v, &mr_flight_holder(f)->kv, 0, own);
  for (int k = 0; ok && whole && k < f->n_seqs; k++) {
    int n = count_pages(v->e, f, &f->seqs[k], whole);
    ok = n == 0 || save_places(v, &f->seqs[k].kv, own, own + n);
  }
  return ok;
}

static void save_picks(const mr_flight *f, const mr_sequence *s, mr_text *picks) {
  size_t n = (size_t)pick_bytes(&f->r.sampling);
  for (int t = 0; t < s->out.n_ids; t++)
    mr_text_add(picks, s->out.logprobs ? (void *)&s->out.logprobs[t] : (void *)&s->out.ids[t], n);
  mr_sampled last = {.id = s->out.stop_id};
  if (s->out.n_sampled > s->out.n_ids)
    mr_text_add(picks, &last, n);
}

static void save_flight(save *v, mr_flight *f) {
  mr_text picks = {0};
  int fed = f->spilled ? f->parked_fed : f->fed;
  mr_saved_seq *seqs = mr_mem_alloc((size_t)f->n_seqs, sizeof *seqs);
  v->n_pages = 0;
  bool kept = fed > 0 && save_pages(v, f), whole = fed == f->r.n_prompt;
  for (int i = 0; seqs && i < f->n_seqs; i++) {
    const mr_sequence *s = &f->seqs[i];
    seqs[i] = (mr_saved_seq){.n_picks = s->out.n_sampled, .pick_bytes = pick_bytes(&f->r.sampling)};
    seqs[i].fed = kept && whole && !s->done ? s->fed : 0;
    seqs[i].n_pages = kept ? count_pages(v->e, f, s, whole) : 0;
    save_picks(f, s, &picks);
  }
  v->failed = v->failed || !seqs || picks.failed;
  mr_saved_row r = {.row = f->r.row,
                    .check = digest_of(&f->r),
                    .fed = kept ? fed : 0,
                    .n_pages = kept ? (int32_t)v->n_pages : 0,
                    .n_seqs = f->n_seqs,
                    .n_picks_bytes = (int32_t)picks.len,
                    .pages = v->pages,
                    .seqs = seqs,
                    .picks = (const uint8_t *)picks.data};
  if (!v->failed && (kept || picks.len) && picks.len <= INT32_MAX) {
    mr_saver_row(v->w, &r);
    v->e->stats.saved_rows++;
  }
  mr_text_free(&picks);
  mr_mem_free(seqs);
}

/* A row of the run before that this one did not come to. */
static void save_again(save *v, const mr_saved_row *old) {
  mr_saved_row r = *old;
  mr_saved_seq *seqs = (void *)mr_mem_copy(old->seqs, (size_t)old->n_seqs * sizeof *seqs);
  bool kept =
      mr_saved_fits(v->e->saved, mr_kv_size_of_page(v->e->kv), mr_engine_layout(&v->e->info));
  v->n_pages = 0;
  for (int i = 0; i < old->n_pages && kept; i++)
    kept = old->pages[i].at == MR_SAVED_DROPPED
               ? save_page(v, -1)
               : mr_saver_has_room(v->w) && mr_saved_read(v->e->saved, &old->pages[i], v->buf) &&
                     add_page(v, mr_saver_page(v->w, v->buf));
  r.n_pages = kept ? (int32_t)v->n_pages : 0;
  r.fed = kept ? old->fed : 0;
  for (int i = 0; seqs && !kept && i < old->n_seqs; i++)
    seqs[i].fed = seqs[i].n_pages = 0;
  r.pages = v->pages;
  r.seqs = seqs;
  v->failed = v->failed || !seqs;
  if (!v->failed)
    mr_saver_row(v->w, &r);
  mr_mem_free(seqs);
}

static bool is_saved(const mr_flight *f) {
  return f->r.task == MR_TASK_GENERATE && !f->result->prompt_logprobs && f->n_live > 0;
}

static void save_all(save *v) {
  mr_engine *e = v->e;
  for (mr_flight *f = e->flights; f && !v->failed; f = f->next) {
    mr_flight_settle(e, f);
    if (is_saved(f))
      save_flight(v, f);
  }
  for (int i = 0; i < mr_saved_rows(e->saved) && !v->failed; i++)
    if (!mr_saved_at(e->saved, i)->taken)
      save_again(v, mr_saved_at(e->saved, i));
}

mr_code mr_engine_save(mr_engine *e, const char *prefix, uint64_t max_bytes, double seconds,
                       mr_err *err) {
  size_t page = mr_kv_size_of_page(e->kv);
  save v = {.e = e};
  mr_code rc = mr_saver_open(&v.w, prefix, e->saved, page, mr_engine_layout(&e->info), max_bytes,
                             seconds, err);
  if (rc)
    return rc;
  v.known = mr_mem_alloc((size_t)mr_kv_most_pages(e->kv), sizeof *v.known);
  v.buf = mr_mem_alloc(page, 1);
  v.failed = !v.known || !v.buf;
  if (!v.failed)
    save_all(&v);
  if (v.failed) {
    mr_saver_abandon(v.w);
    rc = mr_err_set(err, MR_E_NOMEM, "out of memory for saving the rows in flight");
  } else {
    e->stats.saved_bytes = mr_saver_bytes(v.w);
    rc = mr_saver_finish(v.w, err);
  }
  mr_mem_free(v.known);
  mr_mem_free(v.buf);
  mr_mem_free(v.pages);
  return rc;
}
