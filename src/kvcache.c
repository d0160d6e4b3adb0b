#include "src/kvcache.h"

#include <string.h>

#include "io/mem.h"

/* Invariants
 * 1. refs[p] is how often block tables and other holders (mr_kv_page_hold) have page p; a page is
 * on the free stack iff that is 0.
 * 2. A page with refs > 1 is never written: reserve replaces it first.
 * 3. Of the groups with a window, pages of blocks below mr_kv_seq_dropped are -1 and their
 * addresses NULL, and nothing else below n_blocks is.
 * 4. A page is lone iff loose[p] and refs[p] == 1. */
struct mr_kv {
  const mr_kv_memory *memory; /* NULL: the host's */
  uint8_t *pool;              /* [n_pages, page_bytes] */
  size_t page_bytes, layer_bytes;
  mr_kv_type type;
  mr_kv_groups groups;
  uint16_t group[MR_MAX_LAYERS], at[MR_MAX_LAYERS]; /* of a layer: its group, its number there */
  int own_pages;                                    /* of a sequence; 0: blocks are not packed */
  size_t unit_bytes; /* in own pages, the parts of a layer and head */
  int units;         /* a page */
  int n_kv_heads;
  int n_pages, n_free;
  int untouched; /* the lowest entries of the stack that were never on top: pages nobody has had */
  int held;      /* of these, the ones that are held back */
  int32_t *free; /* stack of free pages: the lowest numbers are on top at first */
  int32_t *refs; /* [n_pages] */
  uint8_t *loose;
  int n_lone;
};

static size_t layer_bytes(const mr_config *c, mr_kv_type type) {
  return (size_t)2 * (size_t)c->n_kv_heads * mr_kv_part_bytes(type, c->head_dim);
}

static size_t unit_bytes(const mr_config *c) {
  return 2 * mr_kv_part_bytes(MR_KV_OWN_TYPE, c->head_dim);
}

static int gcd(int a, int b) {
  return b ? gcd(b, a % b) : a;
}

/* An own page holds one layer and head at least. */
static size_t group_bytes(const mr_config *c, mr_kv_type type, int layers) {
  size_t bytes = (size_t)layers * layer_bytes(c, type);
  return mr_kv_packs(type) && bytes && bytes < unit_bytes(c) ? unit_bytes(c) : bytes;
}

/* Layers of both kinds in equal groups. Where small pages would be padded for own parts by more
 * than a twelfth, there is one group. */
mr_kv_groups mr_kv_groups_of(const mr_config *c, mr_kv_type type) {
  int windowed = 0;
  bool any = c->window > 0 && c->window < c->context;
  for (int i = 0; i < c->n_layers && any; i++)
    windowed += c->windowed[i] != 0;
  mr_kv_groups one = {1, windowed < c->n_layers, c->n_layers, 0};
  if (windowed == c->n_layers)
    one.window = c->window;
  if (windowed == 0 || windowed == c->n_layers)
    return one;
  int layers = gcd(windowed, c->n_layers - windowed), n = c->n_layers / layers;
  if ((size_t)n * group_bytes(c, type, layers) > group_bytes(c, type, c->n_layers) / 12 * 13)
    return one;
  return (mr_kv_groups){n, (c->n_layers - windowed) / layers, layers, c->window};
}

size_t mr_kv_page_bytes(const mr_config *c, mr_kv_type type) {
  return group_bytes(c, type, mr_kv_groups_of(c, type).layers);
}

int mr_kv_own_pages(const mr_config *c, mr_kv_type type) {
  if (!mr_kv_packs(type))
    return 0;
  size_t units = mr_kv_page_bytes(c, type) / unit_bytes(c);
  return (int)(((size_t)c->n_layers * (size_t)c->n_kv_heads + units - 1) / units);
}

size_t mr_kv_token_bytes(const mr_config *c, mr_kv_type type) {
  return (size_t)mr_kv_groups_of(c, type).n * mr_kv_page_bytes(c, type) / MR_KV_BLOCK;
}

static int blocks_for(int64_t tokens) {
  return (int)((tokens + MR_KV_BLOCK - 1) / MR_KV_BLOCK);
}

/* Layers of each kind fill their groups in order. */
static void place_layers(mr_kv *kv, const mr_config *c) {
  int next[2] = {0, kv->groups.n_full * kv->groups.layers};
  for (int i = 0; i < c->n_layers; i++) {
    bool window = kv->groups.n > 1 && c->windowed[i];
    int at = next[window]++;
    kv->group[i] = (uint16_t)(at / kv->groups.layers);
    kv->at[i] = (uint16_t)(at % kv->groups.layers);
  }
}

mr_code mr_kv_open(mr_kv **out, const mr_config *c, mr_kv_type type, int n_pages, mr_err *err) {
  return mr_kv_open_on(out, c, type, n_pages, NULL, err);
}

mr_code mr_kv_open_on(mr_kv **out, const mr_config *c, mr_kv_type type, int n_pages,
                      const mr_kv_memory *memory, mr_err *err) {
  size_t bytes;
  size_t page = mr_kv_page_bytes(c, type);
  if (n_pages < 1 || page == 0 || !mr_mem_mul((size_t)n_pages, page, &bytes))
    return mr_err_set(err, MR_E_INTERNAL, "a KV cache of %d pages of %zu bytes is impossible",
                      n_pages, page);
  mr_kv *kv = mr_mem_alloc(1, sizeof *kv);
  if (!kv)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for the KV cache");
  kv->memory = memory;
  kv->pool = memory ? memory->take(memory->ctx, bytes) : mr_mem_pages(bytes);
  kv->free = mr_mem_alloc((size_t)n_pages, sizeof *kv->free);
  kv->refs = mr_mem_alloc((size_t)n_pages, sizeof *kv->refs);
  kv->loose = mr_mem_alloc((size_t)n_pages, 1);
  if (!kv->pool || !kv->free || !kv->refs || !kv->loose) {
    mr_kv_close(kv);
    return mr_err_set(err, MR_E_NOMEM,
                      "out of memory for a KV cache of %zu bytes; use a smaller --kv-memory",
                      bytes);
  }
  kv->page_bytes = page;
  kv->layer_bytes = layer_bytes(c, type);
  kv->type = type;
  kv->groups = mr_kv_groups_of(c, type);
  place_layers(kv, c);
  kv->own_pages = mr_kv_own_pages(c, type);
  kv->unit_bytes = unit_bytes(c);
  kv->units = (int)(page / kv->unit_bytes);
  kv->n_kv_heads = c->n_kv_heads;
  kv->n_pages = kv->n_free = kv->untouched = n_pages;
  for (int i = 0; i < n_pages; i++)
    kv->free[i] = n_pages - 1 - i;
  *out = kv;
  return MR_OK;
}

void mr_kv_touch(mr_kv *kv) {
  if (!kv->memory)
    memset(kv->pool, 0, (size_t)kv->n_pages * kv->page_bytes);
}

void mr_kv_close(mr_kv *kv) {
  if (!kv)
    return;
  if (!kv->memory)
    mr_mem_free(kv->pool);
  mr_mem_free(kv->free);
  mr_mem_free(kv->refs);
  mr_mem_free(kv->loose);
  mr_mem_free(kv);
}

int mr_kv_free_pages(const mr_kv *kv) {
  return kv->n_free - kv->held;
}
int mr_kv_total_pages(const mr_kv *kv) {
  return kv->n_pages - kv->held;
}
int mr_kv_most_pages(const mr_kv *kv) {
  return kv->n_pages;
}
void mr_kv_hold_back(mr_kv *kv, bool yes) {
  kv->held = yes ? kv->untouched : 0;
}
mr_kv_type mr_kv_type_of(const mr_kv *kv) {
  return kv->type;
}
size_t mr_kv_layer_bytes(const mr_kv *kv) {
  return kv->layer_bytes;
}
size_t mr_kv_size_of_page(const mr_kv *kv) {
  return kv->page_bytes;
}

uint8_t *mr_kv_page(const mr_kv *kv, int32_t page) {
  return page < 0 ? NULL : kv->pool + (size_t)page * kv->page_bytes;
}

bool mr_kv_on_device(const mr_kv *kv) {
  return kv->memory != NULL;
}

const mr_kv_memory *mr_kv_memory_of(const mr_kv *kv) {
  return kv->memory;
}

const void *mr_kv_view(const mr_kv *kv, int32_t page, void *room) {
  const uint8_t *at = mr_kv_page(kv, page);
  if (!kv->memory)
    return at;
  return kv->memory->to_host(kv->memory->ctx, room, at, kv->page_bytes) ? NULL : room;
}

mr_code mr_kv_write(const mr_kv *kv, int32_t page, const void *from) {
  if (kv->memory)
    return kv->memory->from_host(kv->memory->ctx, mr_kv_page(kv, page), from, kv->page_bytes);
  memcpy(mr_kv_page(kv, page), from, kv->page_bytes);
  return MR_OK;
}

/* A device that cannot copy is lost, and the next step says so. */
static void copy_page(const mr_kv *kv, int32_t to, int32_t from) {
  if (kv->memory)
    kv->memory->copy(kv->memory->ctx, mr_kv_page(kv, to), mr_kv_page(kv, from), kv->page_bytes);
  else
    memcpy(mr_kv_page(kv, to), mr_kv_page(kv, from), kv->page_bytes);
}

/* ---------------------------------------------------------------- groups */

mr_kv_groups mr_kv_groups_in(const mr_kv *kv) {
  return kv->groups;
}
int mr_kv_group(const mr_kv *kv, int layer) {
  return kv->group[layer];
}
size_t mr_kv_layer_offset(const mr_kv *kv, int layer) {
  return (size_t)kv->at[layer] * kv->layer_bytes;
}

int mr_kv_first(const mr_kv *kv, int pos) {
  return kv->groups.window && pos >= kv->groups.window ? pos - kv->groups.window + 1 : 0;
}

/* Pages of blocks from .. end - 1, where layers with a window have none of those that end at or
 * before `first`. */
static int pages_of(const mr_kv *kv, int from, int end, int first) {
  int seen = first / MR_KV_BLOCK > from ? first / MR_KV_BLOCK : from;
  return (end > from ? end - from : 0) * kv->groups.n_full +
         (end > seen ? end - seen : 0) * (kv->groups.n - kv->groups.n_full);
}

int mr_kv_pages_for(const mr_kv *kv, int64_t tokens) {
  return mr_kv_pages_from(kv, tokens, 0, 0);
}

int mr_kv_pages_from(const mr_kv *kv, int64_t tokens, int block, int first) {
  return tokens > 0 ? pages_of(kv, block, blocks_for(tokens), first) + kv->own_pages : 0;
}

uint8_t *mr_kv_own_parts(const mr_kv *kv, const mr_kv_seq *s, int layer, int head) {
  if (!s->n_own)
    return NULL;
  int unit = layer * kv->n_kv_heads + head;
  return mr_kv_page(kv, s->own[unit / kv->units]) + (size_t)(unit % kv->units) * kv->unit_bytes;
}

/* ---------------------------------------------------------------- pages */

static int32_t take(mr_kv *kv) {
  int32_t p = kv->free[--kv->n_free];
  kv->untouched = kv->n_free < kv->untouched ? kv->n_free : kv->untouched;
  kv->refs[p] = 1;
  return p;
}

static void give(mr_kv *kv, int32_t p) {
  kv->n_lone -= mr_kv_page_lone(kv, p);
  if (--kv->refs[p] == 0) {
    kv->loose[p] = 0;
    kv->free[kv->n_free++] = p;
  }
  kv->n_lone += mr_kv_page_lone(kv, p);
}

void mr_kv_page_hold(mr_kv *kv, int32_t page) {
  kv->n_lone -= mr_kv_page_lone(kv, page);
  kv->refs[page]++;
}

void mr_kv_page_drop(mr_kv *kv, int32_t page) {
  give(kv, page);
}

void mr_kv_page_loosen(mr_kv *kv, int32_t page, bool loose) {
  kv->n_lone -= mr_kv_page_lone(kv, page);
  kv->loose[page] = loose;
  kv->n_lone += mr_kv_page_lone(kv, page);
}

bool mr_kv_page_lone(const mr_kv *kv, int32_t page) {
  return kv->loose[page] && kv->refs[page] == 1;
}

int mr_kv_lone_pages(const mr_kv *kv) {
  return kv->n_lone;
}

/* ---------------------------------------------------------------- block tables */

static int32_t *entry(const mr_kv_seq *s, int group, int block) {
  return &s->pages[(size_t)group * (size_t)s->cap_blocks + (size_t)block];
}

static void set(const mr_kv *kv, mr_kv_seq *s, int group, int block, int32_t page) {
  *entry(s, group, block) = page;
  s->at[(size_t)group * (size_t)s->cap_blocks + (size_t)block] = mr_kv_page(kv, page);
}

mr_code mr_kv_seq_init(const mr_kv *kv, mr_kv_seq *s, int max_len, mr_err *err) {
  *s = (mr_kv_seq){0};
  int cap = blocks_for(max_len > 0 ? max_len : 0);
  size_t n = (size_t)kv->groups.n * (size_t)cap;
  s->pages = mr_mem_alloc(n + (size_t)kv->own_pages + 1, sizeof *s->pages);
  s->at = mr_mem_alloc(n + 1, sizeof *s->at);
  if (!s->pages || !s->at) {
    mr_mem_free(s->pages);
    mr_mem_free(s->at);
    *s = (mr_kv_seq){0};
    return mr_err_set(err, MR_E_NOMEM, "out of memory for the block table of %d tokens", max_len);
  }
  s->own = s->pages + n;
  s->cap_blocks = cap;
  return MR_OK;
}

int mr_kv_seq_places(const mr_kv *kv, const mr_kv_seq *s) {
  return s->n_blocks * kv->groups.n + s->n_own;
}

int32_t mr_kv_seq_place(const mr_kv *kv, const mr_kv_seq *s, int place) {
  int block = place / kv->groups.n;
  return block < s->n_blocks ? *entry(s, place % kv->groups.n, block)
                             : s->own[place - s->n_blocks * kv->groups.n];
}

int mr_kv_seq_count(const mr_kv *kv, const mr_kv_seq *s, int from, int end) {
  int n = 0;
  for (int i = from; i < end; i++)
    n += mr_kv_seq_place(kv, s, i) >= 0;
  return n;
}

static bool is_shared(const mr_kv *kv, int32_t page) {
  return page >= 0 && kv->refs[page] > 1;
}

/* Pages that the next writes touch and that others hold too: from the block with position len on,
 * and own ones. */
static int count_shared(const mr_kv *kv, const mr_kv_seq *s, int end) {
  int n = 0;
  for (int i = s->len / MR_KV_BLOCK; i < s->n_blocks && i < end; i++)
    for (int g = 0; g < kv->groups.n; g++)
      n += is_shared(kv, *entry(s, g, i));
  for (int i = 0; i < s->n_own; i++)
    n += is_shared(kv, s->own[i]);
  return n;
}

/* A page of its own in place of one that others hold too. */
static int32_t own(mr_kv *kv, int32_t old, bool copy) {
  if (!is_shared(kv, old))
    return old;
  int32_t fresh = take(kv);
  if (copy)
    copy_page(kv, fresh, old);
  give(kv, old);
  return fresh;
}

static bool is_dropped(const mr_kv *kv, const mr_kv_seq *s, int group, int block) {
  return group >= kv->groups.n_full && block < s->first / MR_KV_BLOCK;
}

int mr_kv_seq_wants(const mr_kv *kv, const mr_kv_seq *s, int more) {
  int end = blocks_for((int64_t)s->len + more);
  if (more <= 0)
    return 0;
  return pages_of(kv, s->n_blocks, end, s->first) + kv->own_pages - s->n_own +
         count_shared(kv, s, end);
}

mr_code mr_kv_seq_reserve(mr_kv *kv, mr_kv_seq *s, int more) {
  if (more <= 0)
    return more == 0 ? MR_OK : MR_E_INTERNAL;
  int64_t tokens = (int64_t)s->len + more;
  if (tokens > (int64_t)s->cap_blocks * MR_KV_BLOCK)
    return MR_E_INTERNAL;
  int end = blocks_for(tokens);
  if (mr_kv_seq_wants(kv, s, more) > mr_kv_free_pages(kv))
    return MR_E_AGAIN;
  for (int i = s->len / MR_KV_BLOCK; i < s->n_blocks && i < end; i++)
    for (int g = 0; g < kv->groups.n; g++)
      set(kv, s, g, i, own(kv, *entry(s, g, i), i * MR_KV_BLOCK < s->len));
  for (int i = 0; i < s->n_own; i++)
    s->own[i] = own(kv, s->own[i], true);
  for (; s->n_blocks < end; s->n_blocks++)
    for (int g = 0; g < kv->groups.n; g++)
      set(kv, s, g, s->n_blocks, is_dropped(kv, s, g, s->n_blocks) ? -1 : take(kv));
  while (s->n_own < kv->own_pages)
    s->own[s->n_own++] = take(kv);
  return MR_OK;
}

/* Tokens of src, up to len, that can be shared; the others are packed in a block with later ones,
 * or dropped. */
static int sharable(const mr_kv *kv, const mr_kv_seq *src, int len) {
  len = len < src->len ? len : src->len;
  if (kv->own_pages && len / MR_KV_BLOCK != src->len / MR_KV_BLOCK)
    len -= len % MR_KV_BLOCK;
  return len < mr_kv_seq_dropped(src) * MR_KV_BLOCK ? 0 : len;
}

/* Takes a block by reference; pages: in steps of `ld`. */
static void add_block(mr_kv *kv, mr_kv_seq *s, const int32_t *pages, size_t ld) {
  for (int g = 0; g < kv->groups.n; g++) {
    int32_t page = is_dropped(kv, s, g, s->n_blocks) ? -1 : pages[(size_t)g * ld];
    if (page >= 0)
      mr_kv_page_hold(kv, page);
    set(kv, s, g, s->n_blocks, page);
  }
  s->n_blocks++;
}

void mr_kv_seq_share(mr_kv *kv, mr_kv_seq *dst, const mr_kv_seq *src, int len) {
  len = sharable(kv, src, len);
  if (len > dst->cap_blocks * MR_KV_BLOCK)
    len = dst->cap_blocks * MR_KV_BLOCK;
  dst->first = len ? src->first : 0;
  for (int i = 0; i < blocks_for(len); i++)
    add_block(kv, dst, entry(src, 0, i), (size_t)src->cap_blocks);
  dst->n_own = len % MR_KV_BLOCK ? src->n_own : 0;
  for (int i = 0; i < dst->n_own; i++) {
    dst->own[i] = src->own[i];
    mr_kv_page_hold(kv, dst->own[i]);
  }
  dst->len = len;
}

void mr_kv_seq_append(mr_kv *kv, mr_kv_seq *s, const int32_t *pages, int n) {
  add_block(kv, s, pages, 1);
  s->len += n;
}

void mr_kv_seq_block(const mr_kv *kv, const mr_kv_seq *s, int i, int32_t *pages) {
  for (int g = 0; g < kv->groups.n; g++)
    pages[g] = *entry(s, g, i);
}

void mr_kv_seq_replace(mr_kv *kv, mr_kv_seq *s, int i, const int32_t *pages) {
  for (int g = 0; g < kv->groups.n; g++) {
    int32_t old = *entry(s, g, i);
    if (old < 0 || pages[g] < 0 || old == pages[g])
      continue;
    mr_kv_page_hold(kv, pages[g]);
    give(kv, old);
    set(kv, s, g, i, pages[g]);
  }
}

void mr_kv_seq_drop(mr_kv *kv, mr_kv_seq *s, int first) {
  int had = mr_kv_seq_dropped(s);
  if (!kv->groups.window || first <= s->first)
    return;
  s->first = first;
  for (int i = had; i < mr_kv_seq_dropped(s); i++)
    for (int g = kv->groups.n_full; g < kv->groups.n; g++) {
      give(kv, *entry(s, g, i));
      set(kv, s, g, i, -1);
    }
}

void mr_kv_seq_release(mr_kv *kv, mr_kv_seq *s) {
  for (int i = 0; i < mr_kv_seq_places(kv, s); i++)
    if (mr_kv_seq_place(kv, s, i) >= 0)
      give(kv, mr_kv_seq_place(kv, s, i));
  s->n_blocks = s->n_own = s->first = s->len = 0;
}

void mr_kv_seq_free(mr_kv *kv, mr_kv_seq *s) {
  mr_kv_seq_release(kv, s);
  mr_mem_free(s->pages);
  mr_mem_free(s->at);
  *s = (mr_kv_seq){0};
}
