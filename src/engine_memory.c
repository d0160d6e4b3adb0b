/* Pages: who takes them, and what requests share. */
#include "src/engine_int.h"

#include "io/mem.h"

#define PARTIAL_MIN                                                                                \
  8 /* tokens of a block worth a copy of it: a page is copied in far less time                     \
     */

int mr_engine_used_pages(const mr_engine *e) {
  int cached = e->prefix ? mr_prefix_cached(e->prefix) : 0;
  return mr_kv_total_pages(e->kv) - mr_kv_free_pages(e->kv) - cached;
}

/* ---------------------------------------------------------------- room */

/* Parking it gives pages back: its own, or such as only it keeps in the tree. */
static bool holds_pages(const mr_engine *e, const mr_flight *f) {
  return f->fed > 0 || (f->n_chain && mr_prefix_page(e->prefix, f->chain[0]) >= 0);
}

static mr_flight *youngest(const mr_engine *e, const mr_flight *than) {
  mr_flight *last = NULL;
  for (mr_flight *f = e->flights; f; f = f->next)
    if (f->age > than->age && f->state == MR_FLIGHT_ACTIVE && f->step != e->step &&
        holds_pages(e, f))
      last = f;
  return last;
}

bool mr_flight_make_room(mr_engine *e, const mr_flight *f, int want) {
  for (;;) {
    int missing = want - mr_kv_free_pages(e->kv);
    if (missing <= 0)
      return true;
    if (e->prefix && mr_prefix_evict(e->prefix, missing))
      continue;
    mr_flight *victim = youngest(e, f);
    if (!victim)
      return false;
    mr_flight_park(e, victim);
  }
}

/* ---------------------------------------------------------------- shared prompts */

mr_code mr_flight_join(mr_engine *e, mr_flight *f, mr_err *err) {
  f->age = ++e->admitted;
  if (!f->n_chain)
    return MR_OK;
  f->chain = mr_mem_alloc((size_t)f->n_chain, sizeof *f->chain);
  if (!f->chain)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for a request");
  mr_code rc = mr_prefix_room(e->prefix, f->n_chain, err);
  if (!rc)
    mr_prefix_acquire(e->prefix, f->r.adapter, f->r.prompt, f->n_chain, f->chain);
  return rc;
}

void mr_flight_leave(mr_engine *e, mr_flight *f) {
  if (!f->n_chain)
    return;
  mr_prefix_release(e->prefix, f->chain, f->n_chain, f->age);
  mr_prefix_unroom(e->prefix, f->n_chain);
  f->n_chain = 0;
}

static void take_shared(mr_engine *e, mr_flight *f, int32_t page, int n) {
  mr_kv_seq_append(e->kv, &f->seqs[0].kv, page, n);
  f->fed += n;
  e->stats.prompt_tokens_shared += (uint64_t)n;
}

/* A stored block that begins as the next one does: its first tokens are taken, the rest is computed
 * in a copy. */
static void share_partial(mr_engine *e, mr_flight *f, int block) {
  int32_t page = -1, parent = block ? f->chain[block - 1] : -1;
  if (f->partial_at == block || f->spilled)
    return;
  f->partial_at = block;
  int n = mr_prefix_partial(e->prefix, f->r.adapter, parent, f->r.prompt + f->fed,
                            f->r.n_prompt - 1 - f->fed, &page);
  if (n >= PARTIAL_MIN)
    take_shared(e, f, page, n);
}

bool mr_flight_share(mr_engine *e, mr_flight *f) {
  int32_t page;
  if (!f->shares || f->fed % MR_KV_BLOCK)
    return true;
  int block = f->fed / MR_KV_BLOCK;
  for (; block < f->n_chain && (page = mr_prefix_page(e->prefix, f->chain[block])) >= 0; block++)
    take_shared(e, f, page, MR_KV_BLOCK);
  if (f->spilled && f->fed >= f->fetch_at)
    return true;
  if (block < f->n_chain && !mr_prefix_claim(e->prefix, f->chain[block], f->age))
    return false;
  if (block <= f->n_chain)
    share_partial(e, f, block);
  return true;
}

int mr_flight_claim(mr_engine *e, mr_flight *f, int n) {
  int end = f->fed + n;
  for (int b = f->fed / MR_KV_BLOCK; b < f->n_chain && b * MR_KV_BLOCK < end; b++)
    if (!mr_prefix_claim(e->prefix, f->chain[b], f->age))
      return b * MR_KV_BLOCK > f->fed ? b * MR_KV_BLOCK - f->fed : n;
  return n;
}

void mr_flight_publish(mr_engine *e, mr_flight *f, int from) {
  mr_kv_seq *kv = &f->seqs[0].kv;
  for (int b = from / MR_KV_BLOCK; b < f->fed / MR_KV_BLOCK && b < f->n_chain; b++)
    mr_kv_seq_replace(e->kv, kv, b,
                      mr_prefix_publish(e->prefix, f->chain[b], kv->pages[b], f->age));
}
