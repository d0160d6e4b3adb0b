/* Pages: who takes them, and what requests share. */
#include <stdio.h>
#include <string.h>

#include "io/hash.h"
#include "io/mem.h"
#include "io/sys.h"
#include "src/engine_int.h"

#define PARTIAL_MIN 8 /* tokens worth a copy of their block: a page is copied in far less time */

int mr_engine_used_pages(const mr_engine *e) {
  int cached = e->prefix ? mr_prefix_cached(e->prefix) : 0;
  return mr_kv_total_pages(e->kv) - mr_kv_free_pages(e->kv) - cached;
}

/* ---------------------------------------------------------------- room */

/* Parking it gives pages back: its own, or such as only it keeps in the tree. */
static bool holds_pages(const mr_engine *e, const mr_flight *f) {
  return f->fed > 0 || (f->n_chain && mr_prefix_computed(e->prefix, f->chain[0]));
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

void mr_engine_memory_low(mr_engine *e, bool low) {
  if (mr_kv_on_device(e->kv))
    return;
  mr_kv_hold_back(e->kv, low);
  uint64_t held = (uint64_t)(mr_kv_most_pages(e->kv) - mr_kv_total_pages(e->kv));
  e->stats.kv_pages_held_back =
      held > e->stats.kv_pages_held_back ? held : e->stats.kv_pages_held_back;
}

bool mr_engine_needs_all(mr_engine *e) {
  bool held = mr_kv_total_pages(e->kv) < mr_kv_most_pages(e->kv);
  mr_kv_hold_back(e->kv, false);
  return held;
}

/* ---------------------------------------------------------------- shared prompts */

uint64_t mr_engine_expect(mr_engine *e, int adapter, const int32_t *prompt, int n_prompt) {
  e->expected++;
  if (e->prefix)
    mr_prefix_expect(e->prefix, adapter, prompt, (n_prompt - 1) / MR_KV_BLOCK, e->expected);
  return e->expected;
}

static void expected_came(mr_engine *e, const mr_request *r) {
  e->came = r->expected > e->came ? r->expected : e->came;
  if (e->prefix && r->expected)
    mr_prefix_came(e->prefix, r->adapter, r->prompt, (r->n_prompt - 1) / MR_KV_BLOCK, e->came + 1);
}

mr_code mr_flight_join(mr_engine *e, mr_flight *f, mr_err *err) {
  f->age = ++e->admitted;
  expected_came(e, &f->r);
  if (!f->n_chain)
    return MR_OK;
  f->chain = mr_mem_alloc((size_t)f->n_chain, sizeof *f->chain);
  if (!f->chain)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for a request");
  mr_code rc = mr_prefix_room(e->prefix, f->n_chain, err);
  if (!rc)
    mr_prefix_acquire(e->prefix, f->r.adapter, f->r.prompt, f->n_chain, f->wide, f->chain);
  return rc;
}

void mr_flight_leave(mr_engine *e, mr_flight *f) {
  if (!f->n_chain)
    return;
  mr_prefix_release(e->prefix, f->chain, f->n_chain, f->wide, f->age);
  mr_prefix_unroom(e->prefix, f->n_chain);
  f->n_chain = 0;
}

static void take_shared(mr_engine *e, mr_flight *f, int32_t node, int n) {
  mr_kv_seq_append(e->kv, &f->seqs[0].kv, mr_prefix_pages(e->prefix, node), n);
  f->fed += n;
  e->stats.prompt_tokens_shared += (uint64_t)n;
}

/* The first position that f's windows read once its first `fed` prompt tokens are there: for the
 * next one, or if the rest comes from the disk, for what comes after that. */
static int first_read(const mr_engine *e, const mr_flight *f, int fed) {
  int pos = fed;
  if (f->spilled && fed >= f->fetch_at && mr_flight_parked_len(f) > pos)
    pos = mr_flight_parked_len(f);
  return mr_kv_first(e->kv, pos);
}

/* Blocks from `block` on, up to which f can go on with what the tree has: computed, and whole as
 * far as windows reach back from there. */
static int reaches(const mr_engine *e, const mr_flight *f, int block) {
  int best = block, from = mr_kv_seq_dropped(&f->seqs[0].kv); /* where what is whole begins */
  for (int b = block; b < f->n_chain && mr_prefix_computed(e->prefix, f->chain[b]); b++) {
    if (!mr_prefix_whole(e->prefix, f->chain[b]))
      from = b + 1;
    if (from * MR_KV_BLOCK <= first_read(e, f, (b + 1) * MR_KV_BLOCK))
      best = b + 1;
  }
  return best;
}

static int share_blocks(mr_engine *e, mr_flight *f, int block) {
  int end = reaches(e, f, block);
  if (end > block)
    mr_kv_seq_drop(e->kv, &f->seqs[0].kv, first_read(e, f, end * MR_KV_BLOCK));
  for (; block < end; block++)
    take_shared(e, f, f->chain[block], MR_KV_BLOCK);
  return end;
}

/* A stored block that begins as the next one does: its first tokens are taken, the rest is computed
 * in a copy. */
static void share_partial(mr_engine *e, mr_flight *f, int block) {
  int32_t node = -1, parent = block ? f->chain[block - 1] : -1;
  if (f->partial_at == block || f->spilled || mr_kv_packs(mr_kv_type_of(e->kv)))
    return;
  f->partial_at = block;
  int n = mr_prefix_partial(e->prefix, f->r.adapter, parent, f->r.prompt + f->fed,
                            f->r.n_prompt - 1 - f->fed, &node);
  if (n >= PARTIAL_MIN)
    take_shared(e, f, node, n);
}

/* ---------------------------------------------------------------- prefixes of earlier runs */

/* What pages of an adapter are kept under. */
static uint64_t tree_key(const mr_engine *e, int tree) {
  return tree ? e->lora->keys[tree - 1] : 0;
}

/* A block's pages lie in a file one after the other. */
static uint8_t *stored_part(const mr_engine *e, int group) {
  return e->stored_block + (size_t)group * mr_kv_size_of_page(e->kv);
}

static bool keep(void *ctx, int tree, const int32_t *tokens, int n, const int32_t *pages) {
  mr_engine *e = ctx;
  if (e->keep_until_s > 0 && mr_sys_seconds() > e->keep_until_s)
    return false;
  for (int g = 0; g < e->groups.n; g++) {
    const void *bytes = mr_kv_view(e->kv, pages[g], stored_part(e, g));
    if (!bytes)
      return true;
    if (bytes != stored_part(e, g))
      memcpy(stored_part(e, g), bytes, mr_kv_size_of_page(e->kv));
  }
  mr_prefixstore_put(e->store, tree_key(e, tree), tokens, n, e->stored_block);
  return true;
}

static void store_key(const mr_engine_opts *o, const mr_engine_info *info, char key[MR_HASH_HEX]) {
  char words[128];
  int n = snprintf(words, sizeof words, "%016llx %s", (unsigned long long)mr_engine_layout(info),
                   o->model_digest ? o->model_digest : "");
  mr_hash_hex(words, n > 0 && n < (int)sizeof words ? (size_t)n : sizeof words, key);
}

mr_code mr_engine_open_store(mr_engine *e, const mr_engine_opts *o, mr_err *err) {
  char key[MR_HASH_HEX];
  if (!o->prefix_cache || !e->prefix)
    return MR_OK;
  store_key(o, &e->info, key);
  size_t block = (size_t)e->groups.n * mr_kv_size_of_page(e->kv);
  mr_code rc =
      mr_prefixstore_open(&e->store, o->prefix_cache, key, block, o->prefix_cache_bytes, err);
  e->stored_block = rc ? NULL : mr_mem_alloc(block, 1);
  if (!rc && !e->stored_block)
    rc = mr_err_set(err, MR_E_NOMEM, "out of memory for the prefix cache");
  if (!rc)
    mr_prefix_on_evict(e->prefix, keep, e);
  return rc;
}

mr_code mr_engine_look_store(mr_prefixstore **out, const mr_engine_opts *o,
                             const mr_engine_info *info, mr_err *err) {
  char key[MR_HASH_HEX];
  *out = NULL;
  if (!o->prefix_cache || o->no_prefix_sharing)
    return MR_OK;
  store_key(o, info, key);
  return mr_prefixstore_look(out, o->prefix_cache, key, err);
}

void mr_engine_keep_prefixes(mr_engine *e, double seconds) {
  if (!e->store)
    return;
  e->keep_until_s = mr_sys_seconds() + seconds;
  mr_prefix_keep_all(e->prefix);
}

static mr_code write_block(const mr_engine *e, const mr_kv_seq *kv, int block) {
  int32_t pages[MR_MAX_LAYERS];
  mr_code rc = MR_OK;
  mr_kv_seq_block(e->kv, kv, block, pages);
  for (int g = 0; g < e->groups.n && !rc; g++)
    rc = mr_kv_write(e->kv, pages[g], stored_part(e, g));
  return rc;
}

/* The next block of f's prompt out of the store. False: it is not there, or there is no page. Room
 * is made before it is read, as what goes for it may be on its way to the store. */
static bool take_stored(mr_engine *e, mr_flight *f, int block) {
  mr_kv_seq *kv = &f->seqs[0].kv;
  uint64_t tree = tree_key(e, f->r.adapter);
  int end = (block + 1) * MR_KV_BLOCK;
  if (!e->store || f->spilled || !mr_prefix_first_look(e->prefix, f->chain[block]) ||
      !mr_prefixstore_has(e->store, tree, f->r.prompt, end) ||
      !mr_flight_make_room(e, f, mr_kv_seq_wants(e->kv, kv, MR_KV_BLOCK)) ||
      mr_kv_seq_reserve(e->kv, kv, MR_KV_BLOCK) ||
      !mr_prefixstore_get(e->store, tree, f->r.prompt, end, e->stored_block) ||
      write_block(e, kv, block))
    return false; /* what was reserved is used by the tokens that are computed then */
  kv->len += MR_KV_BLOCK;
  f->fed += MR_KV_BLOCK;
  mr_flight_publish(e, f, f->fed - MR_KV_BLOCK);
  mr_prefix_came_from_store(e->prefix, f->chain[block]);
  mr_kv_seq_drop(e->kv, kv, first_read(e, f, f->fed));
  e->stats.prompt_tokens_cached += MR_KV_BLOCK;
  return true;
}

bool mr_flight_share(mr_engine *e, mr_flight *f) {
  if (!f->shares || f->fed % MR_KV_BLOCK)
    return true;
  int block = f->fed / MR_KV_BLOCK;
  do {
    block = share_blocks(e, f, block);
    if (f->spilled && f->fed >= f->fetch_at)
      return true;
    if (block < f->n_chain && !mr_prefix_claim(e->prefix, f->chain[block], f->age))
      return false;
  } while (block < f->n_chain && take_stored(e, f, block) && ++block);
  if (block <= f->n_chain)
    share_partial(e, f, block);
  return true;
}

/* What is whole after it is taken then. */
int mr_flight_claim(mr_engine *e, mr_flight *f, int n) {
  int end = f->fed + n;
  for (int b = f->fed / MR_KV_BLOCK; b < f->n_chain && b * MR_KV_BLOCK < end; b++)
    if ((b * MR_KV_BLOCK > f->fed && mr_prefix_whole(e->prefix, f->chain[b])) ||
        !mr_prefix_claim(e->prefix, f->chain[b], f->age))
      return b * MR_KV_BLOCK > f->fed ? b * MR_KV_BLOCK - f->fed : n;
  return n;
}

void mr_flight_publish(mr_engine *e, mr_flight *f, int from) {
  mr_kv_seq *kv = &f->seqs[0].kv;
  int32_t pages[MR_MAX_LAYERS];
  for (int b = from / MR_KV_BLOCK; b < f->fed / MR_KV_BLOCK && b < f->n_chain; b++) {
    mr_kv_seq_block(e->kv, kv, b, pages);
    mr_prefix_publish(e->prefix, f->chain[b], pages, f->age);
    mr_kv_seq_replace(e->kv, kv, b, mr_prefix_pages(e->prefix, f->chain[b]));
  }
}
