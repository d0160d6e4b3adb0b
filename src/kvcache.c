#include "src/kvcache.h"

#include <string.h>

#include "io/mem.h"

/* Invariants
 * 1. refs[p] is the number of block tables that hold page p; a page is on the free stack iff
 * refs[p] == 0.
 * 2. A page with refs > 1 is never written: reserve replaces it first.
 * 3. pages[i] == -1 and at[i] == NULL for i < n_dropped, and nowhere else below n_pages;
 *    n_dropped * MR_KV_BLOCK <= len, so what is written next is never in a dropped page.
 * 4. n_own is 0 or the type's number, and all before the own pages are blocks. */
struct mr_kv {
  const mr_kv_memory *memory; /* NULL: the host's */
  uint8_t *pool;              /* [n_pages, page_bytes] */
  size_t page_bytes, layer_bytes;
  mr_kv_type type;
  int own_pages;     /* of a sequence; 0: blocks are not packed */
  size_t unit_bytes; /* in own pages, the parts of a layer and head */
  int units;         /* a page */
  int n_kv_heads;
  int n_pages, n_free;
  int untouched; /* the lowest entries of the stack that were never on top: pages nobody has had */
  int held;      /* of these, the ones that are held back */
  int32_t *free; /* stack of free pages: the lowest numbers are on top at first */
  int32_t *refs; /* [n_pages] */
};

static size_t layer_bytes(const mr_config *c, mr_kv_type type) {
  return (size_t)2 * (size_t)c->n_kv_heads * mr_kv_part_bytes(type, c->head_dim);
}

static size_t unit_bytes(const mr_config *c) {
  return 2 * mr_kv_part_bytes(MR_KV_OWN_TYPE, c->head_dim);
}

/* An own page holds one layer and head at least. */
size_t mr_kv_page_bytes(const mr_config *c, mr_kv_type type) {
  size_t bytes = (size_t)c->n_layers * layer_bytes(c, type);
  return mr_kv_packs(type) && bytes && bytes < unit_bytes(c) ? unit_bytes(c) : bytes;
}

/* A page of MR_KV_Q4 holds its own parts' 5/16 at least, so they are MR_KV_MAX_OWN pages at most.
 */
int mr_kv_own_pages(const mr_config *c, mr_kv_type type) {
  if (!mr_kv_packs(type))
    return 0;
  size_t units = mr_kv_page_bytes(c, type) / unit_bytes(c);
  return (int)(((size_t)c->n_layers * (size_t)c->n_kv_heads + units - 1) / units);
}

size_t mr_kv_token_bytes(const mr_config *c, mr_kv_type type) {
  return mr_kv_page_bytes(c, type) / MR_KV_BLOCK;
}

static int blocks_for(int64_t tokens) {
  return (int)((tokens + MR_KV_BLOCK - 1) / MR_KV_BLOCK);
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
  if (!kv->pool || !kv->free || !kv->refs) {
    mr_kv_close(kv);
    return mr_err_set(err, MR_E_NOMEM,
                      "out of memory for a KV cache of %zu bytes; use a smaller --kv-memory",
                      bytes);
  }
  kv->page_bytes = page;
  kv->layer_bytes = layer_bytes(c, type);
  kv->type = type;
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

int mr_kv_pages_for(const mr_kv *kv, int64_t tokens) {
  return tokens > 0 ? blocks_for(tokens) + kv->own_pages : 0;
}

uint8_t *mr_kv_own_parts(const mr_kv *kv, const mr_kv_seq *s, int layer, int head) {
  if (!s->n_own)
    return NULL;
  int unit = layer * kv->n_kv_heads + head;
  int32_t page = s->pages[s->n_pages - s->n_own + unit / kv->units];
  return mr_kv_page(kv, page) + (size_t)(unit % kv->units) * kv->unit_bytes;
}

static int32_t take(mr_kv *kv) {
  int32_t p = kv->free[--kv->n_free];
  kv->untouched = kv->n_free < kv->untouched ? kv->n_free : kv->untouched;
  kv->refs[p] = 1;
  return p;
}

static void give(mr_kv *kv, int32_t p) {
  if (--kv->refs[p] == 0)
    kv->free[kv->n_free++] = p;
}

void mr_kv_page_hold(mr_kv *kv, int32_t page) {
  kv->refs[page]++;
}

void mr_kv_page_drop(mr_kv *kv, int32_t page) {
  give(kv, page);
}

static void set(const mr_kv *kv, mr_kv_seq *s, int i, int32_t page) {
  s->pages[i] = page;
  s->at[i] = mr_kv_page(kv, page);
}

mr_code mr_kv_seq_init(mr_kv_seq *s, int max_len, mr_err *err) {
  *s = (mr_kv_seq){0};
  int cap = blocks_for(max_len > 0 ? max_len : 0) + MR_KV_MAX_OWN;
  s->pages = mr_mem_alloc((size_t)cap, sizeof *s->pages);
  s->at = mr_mem_alloc((size_t)cap, sizeof *s->at);
  if (!s->pages || !s->at) {
    mr_mem_free(s->pages);
    mr_mem_free(s->at);
    *s = (mr_kv_seq){0};
    return mr_err_set(err, MR_E_NOMEM, "out of memory for the block table of %d tokens", max_len);
  }
  s->cap_pages = cap;
  return MR_OK;
}

static int n_blocks(const mr_kv_seq *s) {
  return s->n_pages - s->n_own;
}

/* Pages that the next writes touch and that others hold too: from the one with position len on, and
 * own ones. */
static int count_shared(const mr_kv *kv, const mr_kv_seq *s, int end) {
  int n = 0;
  for (int i = s->len / MR_KV_BLOCK; i < n_blocks(s) && i < end; i++)
    n += kv->refs[s->pages[i]] > 1;
  for (int i = n_blocks(s); i < s->n_pages; i++)
    n += kv->refs[s->pages[i]] > 1;
  return n;
}

static void own(mr_kv *kv, mr_kv_seq *s, int i) {
  int32_t old = s->pages[i];
  if (kv->refs[old] == 1)
    return;
  int32_t fresh = take(kv);
  if (i * MR_KV_BLOCK < s->len || i >= n_blocks(s))
    copy_page(kv, fresh, old);
  give(kv, old);
  set(kv, s, i, fresh);
}

/* A block after the last one, before the own pages. */
static void add_block(const mr_kv *kv, mr_kv_seq *s, int32_t page) {
  for (int i = s->n_pages; i > n_blocks(s); i--)
    set(kv, s, i, s->pages[i - 1]);
  set(kv, s, n_blocks(s), page);
  s->n_pages++;
}

int mr_kv_seq_wants(const mr_kv *kv, const mr_kv_seq *s, int more) {
  int end = blocks_for((int64_t)s->len + more);
  if (more <= 0)
    return 0;
  return (end > n_blocks(s) ? end - n_blocks(s) : 0) + kv->own_pages - s->n_own +
         count_shared(kv, s, end);
}

mr_code mr_kv_seq_reserve(mr_kv *kv, mr_kv_seq *s, int more) {
  if (more <= 0)
    return more == 0 ? MR_OK : MR_E_INTERNAL;
  int64_t tokens = (int64_t)s->len + more;
  if (tokens > (int64_t)(s->cap_pages - MR_KV_MAX_OWN) * MR_KV_BLOCK)
    return MR_E_INTERNAL;
  int end = blocks_for(tokens);
  if (mr_kv_seq_wants(kv, s, more) > mr_kv_free_pages(kv))
    return MR_E_AGAIN;
  for (int i = s->len / MR_KV_BLOCK; i < n_blocks(s) && i < end; i++)
    own(kv, s, i);
  for (int i = n_blocks(s); i < s->n_pages; i++)
    own(kv, s, i);
  while (n_blocks(s) < end)
    add_block(kv, s, take(kv));
  for (; s->n_own < kv->own_pages; s->n_own++)
    set(kv, s, s->n_pages++, take(kv));
  return MR_OK;
}

/* Tokens of src, up to len, that can be shared; the others are packed in a block with later ones,
 * or dropped. */
static int sharable(const mr_kv *kv, const mr_kv_seq *src, int len) {
  len = len < src->len ? len : src->len;
  if (kv->own_pages && len / MR_KV_BLOCK != src->len / MR_KV_BLOCK)
    len -= len % MR_KV_BLOCK;
  return len < src->n_dropped * MR_KV_BLOCK ? 0 : len;
}

void mr_kv_seq_share(mr_kv *kv, mr_kv_seq *dst, const mr_kv_seq *src, int len) {
  len = sharable(kv, src, len);
  int n = blocks_for(len);
  if (n > dst->cap_pages - MR_KV_MAX_OWN) {
    n = dst->cap_pages - MR_KV_MAX_OWN;
    len = n * MR_KV_BLOCK;
  }
  int own_ones = len % MR_KV_BLOCK ? src->n_own : 0;
  for (int i = 0; i < n + own_ones; i++) {
    int32_t page = src->pages[i < n ? i : i - n + n_blocks(src)];
    if (page >= 0)
      kv->refs[page]++;
    set(kv, dst, i, page);
  }
  dst->n_pages = n + own_ones;
  dst->n_own = own_ones;
  dst->n_dropped = src->n_dropped < n ? src->n_dropped : n;
  dst->len = len;
}

void mr_kv_seq_append(mr_kv *kv, mr_kv_seq *s, int32_t page, int n) {
  mr_kv_page_hold(kv, page);
  add_block(kv, s, page);
  s->len += n;
}

void mr_kv_seq_replace(mr_kv *kv, mr_kv_seq *s, int i, int32_t page) {
  if (s->pages[i] == page)
    return;
  mr_kv_page_hold(kv, page);
  give(kv, s->pages[i]);
  set(kv, s, i, page);
}

void mr_kv_seq_drop(mr_kv *kv, mr_kv_seq *s, int first) {
  if (first > s->len)
    first = s->len;
  while (s->n_dropped < n_blocks(s) && (s->n_dropped + 1) * MR_KV_BLOCK <= first) {
    give(kv, s->pages[s->n_dropped]);
    set(kv, s, s->n_dropped, -1);
    s->n_dropped++;
  }
}

void mr_kv_seq_release(mr_kv *kv, mr_kv_seq *s) {
  for (int i = s->n_dropped; i < s->n_pages; i++)
    give(kv, s->pages[i]);
  s->n_pages = s->n_own = s->n_dropped = s->len = 0;
}

void mr_kv_seq_free(mr_kv *kv, mr_kv_seq *s) {
  mr_kv_seq_release(kv, s);
  mr_mem_free(s->pages);
  mr_mem_free(s->at);
  *s = (mr_kv_seq){0};
}
