/* The rows of a step that have an adapter are sorted by it and cut into tiles of one adapter each.
 * Two launches follow the base's product: A times the rows as they lie packed for the base, for all
 * matrices of the operation that read the same A; then B times that, matrix by matrix, added to y.
 * Neither the sorting nor the cutting changes bits: a row's sums are its own.
 *
 * What all heads of latent attention share (mr_lora_heads) is multiplied head by head: `meet`
 * before B with each head's part of the input, or `follow` after it, to each head's queries. */
#include "src/backend_gpu_lora.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "io/mem.h"
#include "kernels/dtype.h"
#include "src/lora.h"

#define PIECE ((size_t)1 << 20) /* bytes that go over at once */

typedef struct part {            /* one product's links on the device: [adapters] */
  const mr_gpu_lora_link *links; /* NULL: no adapter has any */
  int cols, heads;               /* the most of any */
} part;

enum { DOWN, MEET, UP, FOLLOW, PARTS };

typedef struct entry { /* a matrix */
  const mr_matrix *of;
  bool pair;
  part part[PARTS]; /* DOWN: of its group */
} entry;

enum { IN, GATE, UP_OF, BACK, OUT, ROLES }; /* of experts: A of gate and up, B of both; of down */

typedef struct layer { /* its experts' links: [experts, adapters] */
  part part[ROLES];
} layer;

typedef struct rows { /* of a step, sorted by adapter: the device's */
  const int32_t *row;
  const mr_gpu_lora_tile *tiles;
  int n_tiles, n;
} rows;

struct mr_gpu_adapters {
  const mr_lora *l;
  entry *entries; /* [n_entries] by address; owned, as all of the host's */
  size_t n_entries, cap_entries;
  layer *layers;                 /* [n_layers], where adapters change experts; else NULL */
  const mr_gpu_lora_rows *embed; /* [adapters]; NULL: none changes the embedding */
  mr_gpu_bf16 *mid;              /* [max_tokens, mid_ld], two planes */
  size_t mid_plane, mid_ld;
  int32_t *first; /* [adapters + 1] of a counting sort */
  int32_t *of;    /* [max_tokens] adapter of each token, from 1; 0: none: in the step's side */
  const int32_t *of_at;
  rows all, wanted;
};

/* ------------------------------------------------------------------ factors to the device */

typedef struct builder { /* g NULL: only counts bytes */
  mr_gpu *g;
  const mr_lora *l;
  bool exact;
  uint8_t *piece;                   /* pinned */
  mr_gpu_lora_link *links;          /* [adapters] */
  mr_gpu_lora_link *experts[ROLES]; /* [experts, adapters]; NULL: no adapter changes experts */
  size_t bytes;
  mr_code rc;
} builder;

static size_t round_up(size_t n, size_t by) {
  return (n + by - 1) / by * by;
}

/* Room on the device, filled from `from` unless that is NULL. */
static void *take(builder *b, const void *from, size_t bytes) {
  b->bytes += round_up(bytes, 256);
  if (!b->g || b->rc)
    return NULL;
  void *at = mr_device_take(b->g->dev, bytes);
  if (!at)
    b->rc = MR_E_UNAVAILABLE;
  else if (from)
    b->rc = mr_device_put(b->g->dev, b->g->stream, at, from, bytes);
  return at;
}

/* Row `from` of k values, rounded; or what rounding left. */
static void round_row(mr_gpu_bf16 *to, const float *from, int k, bool rest) {
  for (int i = 0; i < k; i++) {
    to[i] = mr_f32_to_bf16(from[i]);
    if (rest)
      to[i] = mr_f32_to_bf16(from[i] - mr_bf16_to_f32(to[i]));
  }
}

/* The rows' matrix, [n, k] float32, which only counting does without. */
static void put_matrix(builder *b, mr_gpu_lora_link *to, const uint8_t *from, bool pair) {
  to->ld = (int32_t)round_up((size_t)to->k, MR_GPU_ROWS);
  size_t row = (size_t)to->ld * sizeof(mr_gpu_bf16), values = (size_t)to->n * (size_t)to->ld;
  to->plane = pair ? values : 0;
  uint8_t *at = take(b, NULL, (values + to->plane) * sizeof(mr_gpu_bf16));
  to->w = (const mr_gpu_bf16 *)(void *)at;
  int most = row < PIECE ? (int)(PIECE / row) : 1;
  for (int plane = 0; at && plane <= pair; plane++)
    for (int r0 = 0; r0 < to->n && !b->rc; r0 += most) {
      int n = most < to->n - r0 ? most : to->n - r0;
      memset(b->piece, 0, (size_t)n * row);
      for (int r = 0; r < n; r++)
        round_row((mr_gpu_bf16 *)(void *)(b->piece + (size_t)r * row),
                  (const float *)(const void *)from + (size_t)(r0 + r) * (size_t)to->k, to->k,
                  plane);
      b->rc = mr_device_put(b->g->dev, b->g->stream,
                            at + (size_t)plane * values * sizeof(mr_gpu_bf16) + (size_t)r0 * row,
                            b->piece, (size_t)n * row);
    }
}

/* n links, if any adds something; then they are empty again. */
static part put_links(builder *b, mr_gpu_lora_link *links, size_t n) {
  part p = {0};
  for (size_t i = 0; i < n; i++) {
    p.cols = links[i].n > p.cols ? links[i].n : p.cols;
    p.heads = links[i].heads > p.heads ? links[i].heads : p.heads;
  }
  if (p.cols)
    p.links = take(b, links, n * sizeof *links);
  memset(links, 0, n * sizeof *links);
  return p;
}

/* A of a group: a link for each adapter. */
static void make_down(builder *b, mr_gpu_lora_link *links, mr_matrix *const *w, int n, bool pair) {
  for (int a = 0; a < b->l->n; a++) {
    const mr_lora_down *d = NULL;
    for (int i = 0; i < n && !d; i++)
      d = w[i]->lora ? w[i]->lora[a].down : NULL;
    if (!d)
      continue;
    links[a] = (mr_gpu_lora_link){.n = d->ranks, .k = d->k, .heads = 1};
    put_matrix(b, &links[a], d->packed, pair);
  }
}

/* B of a matrix. */
static void make_up(builder *b, mr_gpu_lora_link *links, const mr_matrix *w, bool pair) {
  for (int a = 0; a < b->l->n && w->lora; a++) {
    const mr_lora_link *y = &w->lora[a];
    if (!y->up_rank && !y->bias)
      continue;
    links[a] = (mr_gpu_lora_link){.n = w->n, .k = y->up_rank, .in = y->first, .heads = 1};
    if (y->up_rank)
      put_matrix(b, &links[a], y->up, pair);
    if (y->bias)
      links[a].bias = take(b, y->bias, (size_t)w->n * sizeof(float));
  }
}

/* What heads share. */
static void make_heads(builder *b, const mr_matrix *w, bool pair, bool meet) {
  for (int a = 0; a < b->l->n; a++) {
    const mr_lora_link *y = &w->lora[a];
    const mr_lora_heads *h = y->heads;
    if (!h || h->output != meet)
      continue;
    int ranks = y->first + (meet ? y->rank : y->up_rank); /* those of the heads follow */
    b->links[a] = meet ? (mr_gpu_lora_link){.n = h->rank,
                                            .k = h->latent,
                                            .in_step = h->size,
                                            .out = ranks,
                                            .out_step = h->rank,
                                            .heads = h->n}
                       : (mr_gpu_lora_link){.n = h->latent,
                                            .k = h->rank,
                                            .in = ranks,
                                            .in_step = h->rank,
                                            .out_step = h->size,
                                            .heads = h->n};
    put_matrix(b, &b->links[a], h->panels, pair);
  }
}

/* Links of expert e, until those of the layer's last one are there. */
static bool put_expert(builder *b, const mr_lora_group *group) {
  struct mr_gpu_adapters *x = b->g ? b->g->adapters : NULL;
  size_t n = (size_t)mr_layer_experts(b->l->m), adapters = (size_t)b->l->n;
  size_t at = (size_t)group->expert * adapters;
  if (!b->experts[IN])
    return true;
  if (group->n == 2) {
    make_down(b, b->experts[IN] + at, group->w, 2, b->exact);
    make_up(b, b->experts[UP_OF] + at, group->w[0], b->exact);
    make_up(b, b->experts[GATE] + at, group->w[1], b->exact);
    return !b->rc;
  }
  make_down(b, b->experts[BACK] + at, group->w, 1, b->exact);
  make_up(b, b->experts[OUT] + at, group->w[0], b->exact);
  for (int r = 0; group->expert == (int)n - 1 && r < ROLES; r++) {
    part p = put_links(b, b->experts[r], n * adapters);
    if (x)
      x->layers[group->layer].part[r] = p;
  }
  return !b->rc;
}

static bool put_group(void *ctx, const mr_lora_group *group) {
  builder *b = ctx;
  struct mr_gpu_adapters *x = b->g ? b->g->adapters : NULL;
  size_t adapters = (size_t)b->l->n;
  bool pair = group->exact || b->exact;
  if (group->expert >= 0)
    return put_expert(b, group);
  make_down(b, b->links, group->w, group->n, pair);
  part down = put_links(b, b->links, adapters);
  for (int i = 0; i < group->n && !b->rc; i++) {
    const mr_matrix *w = group->w[i];
    if (!w->lora)
      continue;
    entry e = {.of = w, .pair = pair};
    e.part[DOWN] = down;
    make_heads(b, w, pair, true);
    e.part[MEET] = put_links(b, b->links, adapters);
    make_up(b, b->links, w, pair);
    e.part[UP] = put_links(b, b->links, adapters);
    make_heads(b, w, pair, false);
    e.part[FOLLOW] = put_links(b, b->links, adapters);
    if (x && !mr_mem_grow((void **)&x->entries, &x->cap_entries, x->n_entries + 1, sizeof e))
      b->rc = MR_E_NOMEM;
    else if (x)
      x->entries[x->n_entries++] = e;
  }
  return !b->rc;
}

static void put_embedding(builder *b) {
  const mr_config *c = &b->l->m->c;
  mr_gpu_lora_rows *all = mr_mem_alloc((size_t)b->l->n, sizeof *all);
  bool any = false;
  for (int a = 0; all && a < b->l->n; a++) {
    const mr_lora_embed *e = &b->l->embed[a];
    size_t rank = (size_t)e->rank * sizeof(float);
    if (!rank)
      continue;
    any = true;
    all[a].rank = e->rank;
    all[a].a = take(b, e->a, (size_t)c->n_vocab * rank);
    all[a].b = take(b, e->b, (size_t)c->d_model * rank);
  }
  const void *at = any ? take(b, all, (size_t)b->l->n * sizeof *all) : NULL;
  b->rc = b->rc ? b->rc : all ? MR_OK : MR_E_NOMEM;
  mr_mem_free(all);
  if (b->g)
    b->g->adapters->embed = at;
}

/* All that adapters have on the device, or how much it is. */
static void build(builder *b) {
  size_t n = (size_t)b->l->n, experts = (size_t)mr_layer_experts(b->l->m);
  b->links = mr_mem_alloc(n, sizeof *b->links);
  b->rc = b->links ? MR_OK : MR_E_NOMEM;
  for (int r = 0; r < ROLES && b->l->experts && !b->rc; r++)
    if (!(b->experts[r] = mr_mem_alloc(n * experts, sizeof *b->links)))
      b->rc = MR_E_NOMEM;
  if (!b->rc)
    put_embedding(b);
  if (!b->rc)
    mr_lora_each_group(b->l, put_group, b);
  mr_mem_free(b->links);
  for (int r = 0; r < ROLES; r++)
    mr_mem_free(b->experts[r]);
}

size_t mr_gpu_lora_bytes(const mr_model *m, mr_gpu_scheme scheme) {
  if (!m->lora)
    return 0;
  builder b = {.l = m->lora, .exact = scheme == MR_GPU_EXACT};
  build(&b);
  return b.rc ? SIZE_MAX / 4 : b.bytes;
}

/* A row of any factor fits, however wide. */
static size_t piece_bytes(const mr_lora *l) {
  size_t k = (size_t)(l->widest > l->most_ranks ? l->widest : l->most_ranks);
  size_t row = round_up(k, MR_GPU_ROWS) * sizeof(mr_gpu_bf16);
  return row > PIECE ? row : PIECE;
}

static size_t mid_ld(const mr_lora *l) {
  return round_up((size_t)l->most_ranks, MR_GPU_ROWS);
}

/* Rows, or slots of experts. */
static size_t places(const mr_lora *l, int max_tokens) {
  const mr_config *c = &l->m->c;
  return (size_t)max_tokens *
         (l->experts ? (size_t)(c->n_experts_used + (c->d_shared > 0)) : (size_t)1);
}

size_t mr_gpu_lora_step_bytes(const mr_model *m, int max_tokens) {
  const mr_lora *l = m->lora;
  return l ? 2 * places(l, max_tokens) * mid_ld(l) * sizeof(mr_gpu_bf16) + 256 : 0;
}

size_t mr_gpu_lora_side_bytes(const mr_model *m, int max_tokens) {
  size_t each = sizeof(int32_t) + 2 * (sizeof(int32_t) + sizeof(mr_gpu_lora_tile));
  return m->lora ? (size_t)max_tokens * each + 5 * 64 : 0;
}

static int by_address(const void *a, const void *b) {
  const entry *x = a, *y = b;
  return x->of < y->of ? -1 : x->of > y->of;
}

mr_code mr_gpu_lora_load(mr_gpu *g, mr_err *err) {
  const mr_lora *l = g->m->lora;
  if (!l)
    return MR_OK;
  struct mr_gpu_adapters *x = g->adapters = mr_mem_alloc(1, sizeof *x);
  builder b = {.g = g, .l = l, .exact = g->scheme == MR_GPU_EXACT};
  if (!x)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for the adapters");
  x->l = l;
  x->first = mr_mem_alloc((size_t)l->n + 1, sizeof *x->first);
  x->layers = mr_mem_alloc(l->experts ? (size_t)g->m->c.n_layers : 0, sizeof *x->layers);
  x->mid_ld = mid_ld(l);
  x->mid_plane = places(l, g->max_tokens) * x->mid_ld;
  mr_code rc = x->first && x->layers ? MR_OK : MR_E_NOMEM;
  if (!rc)
    rc = g->dev->ops->host_alloc(g->dev, piece_bytes(l), (void **)&b.piece);
  if (!rc) {
    build(&b);
    rc = b.rc;
  }
  if (!rc && !(x->mid = mr_device_take(g->dev, 2 * x->mid_plane * sizeof *x->mid)))
    rc = MR_E_UNAVAILABLE;
  if (b.piece)
    g->dev->ops->host_release(g->dev, b.piece);
  if (rc == MR_E_UNAVAILABLE && !g->dev->why[0])
    return mr_err_set(err, rc,
                      "the adapters do not fit into the %zu bytes taken of device %s; use a larger "
                      "--device-memory, fewer adapters, or --device cpu",
                      g->dev->cap, g->dev->name);
  if (rc == MR_E_NOMEM)
    return mr_err_set(err, rc, "out of memory for the adapters");
  if (rc)
    return mr_device_fail(g->dev, rc, err);
  qsort(x->entries, x->n_entries, sizeof *x->entries, by_address);
  return MR_OK;
}

void mr_gpu_lora_close(mr_gpu *g) {
  struct mr_gpu_adapters *x = g->adapters;
  if (!x)
    return;
  mr_mem_free(x->entries);
  mr_mem_free(x->first);
  mr_mem_free(x->layers);
  mr_mem_free(x);
}

/* ------------------------------------------------------------------ the rows of a step */

/* Rows 0..n-1, of which row i is token at[i] (NULL: i), sorted by adapter and cut into tiles. */
static bool sort_rows(mr_gpu *g, rows *r, int n, const int32_t *at) {
  struct mr_gpu_adapters *x = g->adapters;
  int32_t *first = x->first, sum = 0, end;
  size_t places = (size_t)n;
  int32_t *row = mr_gpu_side_take(g, places * sizeof *row, (const void **)&r->row);
  mr_gpu_lora_tile *tiles = mr_gpu_side_take(g, places * sizeof *tiles, (const void **)&r->tiles);
  r->n_tiles = r->n = 0;
  if (!row || !tiles)
    return false;
  memset(first, 0, ((size_t)x->l->n + 1) * sizeof *first);
  for (int i = 0; i < n; i++)
    first[x->of[at ? at[i] : i]]++;
  first[0] = 0;
  for (int a = 1; a <= x->l->n; a++) {
    for (int32_t i = sum, all = sum + first[a]; i < all; i = end) {
      end = i + MR_GPU_ROWS < all ? i + MR_GPU_ROWS : all;
      tiles[r->n_tiles++] = (mr_gpu_lora_tile){.link = a - 1, .first = i, .m = end - i};
    }
    int32_t count = first[a];
    first[a] = sum;
    sum += count;
  }
  for (int i = 0; i < n; i++) {
    int32_t a = x->of[at ? at[i] : i];
    if (a)
      row[first[a]++] = i;
  }
  r->n = sum;
  return true;
}

mr_code mr_gpu_lora_begin(mr_gpu *g) {
  struct mr_gpu_adapters *x = g->adapters;
  const mr_batch *b = &g->batch;
  if (!x)
    return MR_OK;
  x->of = mr_gpu_side_take(g, (size_t)b->n_tokens * sizeof *x->of, (const void **)&x->of_at);
  if (!x->of)
    return MR_E_INTERNAL;
  for (int r = 0, at = 0; r < b->n_runs; r++)
    for (int t = 0; t < b->runs[r].n; t++)
      x->of[at++] = b->runs[r].adapter;
  return sort_rows(g, &x->all, b->n_tokens, NULL) &&
                 sort_rows(g, &x->wanted, b->n_wanted, b->wanted)
             ? MR_OK
             : MR_E_INTERNAL;
}

/* ------------------------------------------------------------------ products */

/* One product of `tiles` tiles of rows. */
static void launch(mr_gpu *g, const part *p, bool down, bool pair, int tiles, int deep,
                   mr_gpu_lora *a) {
  int cols = down ? MR_GPU_LORA_DOWN_COLS : MR_GPU_LORA_UP_COLS;
  mr_gpu_kernel kernel = down ? (pair ? MR_GPU_lora_down_pair : MR_GPU_lora_down_bf16)
                              : (pair ? MR_GPU_lora_up_pair : MR_GPU_lora_up_bf16);
  if (!p->links)
    return;
  a->links = p->links;
  mr_gpu_launch(
      g, kernel,
      (mr_grid){.blocks = {(uint32_t)mr_gpu_up(p->cols, cols), (uint32_t)tiles, (uint32_t)deep},
                .warps = MR_GPU_WARPS,
                .shared = down ? MR_GPU_LORA_SHARED(MR_GPU_LORA_DOWN_COLS, pair)
                               : MR_GPU_LORA_SHARED(MR_GPU_LORA_UP_COLS, pair)},
      a);
}

void mr_gpu_lora_linear(mr_gpu *g, const mr_linear *op, size_t plane) {
  struct mr_gpu_adapters *x = g->adapters;
  const rows *r = !x ? NULL : op->wanted ? &x->wanted : &x->all;
  const mr_gpu_lora_link *last = NULL;
  if (!r || !r->n)
    return;
  for (int i = 0; i < op->n; i++) {
    entry key = {.of = op->w[i]};
    const entry *e = bsearch(&key, x->entries, x->n_entries, sizeof *x->entries, by_address);
    if (!e)
      continue;
    mr_gpu_lora a = {.a = g->packed,
                     .a_plane = plane,
                     .a_ld = (size_t)mr_gpu_padded(op->w[i]->k),
                     .mid = x->mid,
                     .mid_plane = x->mid_plane,
                     .mid_ld = x->mid_ld,
                     .y = op->y[i]->p,
                     .ld = op->y[i]->ld,
                     .row = r->row,
                     .tiles = r->tiles};
    for (int which = e->part[DOWN].links == last ? MEET : DOWN; which < PARTS; which++)
      launch(g, &e->part[which], which < UP, e->pair, r->n_tiles, e->part[which].heads, &a);
    last = e->part[DOWN].links;
  }
}

bool mr_gpu_lora_has_experts(const mr_gpu *g) {
  return g->adapters && g->adapters->l->experts && g->adapters->all.n;
}

void mr_gpu_lora_run_experts(mr_gpu *g, const mr_gpu_lora_experts *op) {
  struct mr_gpu_adapters *x = g->adapters;
  const layer *y = &x->layers[op->layer - g->m->layers];
  bool pair = g->scheme == MR_GPU_EXACT, inner = op->y[1];
  int tiles = op->rows / MR_GPU_ROWS + 1, experts = mr_layer_experts(g->m);
  mr_gpu_lora a = {.a = op->a,
                   .a_plane = op->plane,
                   .mid = x->mid,
                   .mid_plane = x->mid_plane,
                   .mid_ld = x->mid_ld,
                   .ld = op->ld,
                   .slots = {.first = op->first,
                             .from = op->from,
                             .adapter = x->of_at,
                             .adapters = x->l->n,
                             .step = tiles,
                             .a_first = op->a_first}};
  launch(g, &y->part[inner ? IN : BACK], true, pair, tiles, experts, &a);
  for (int i = 0; i < 1 + inner; i++) {
    a.y = op->y[i];
    launch(g, &y->part[inner ? GATE + i : OUT], false, pair, tiles, experts, &a);
  }
}

void mr_gpu_lora_embed_rows(mr_gpu *g, mr_buf *x) {
  struct mr_gpu_adapters *ad = g->adapters;
  if (!ad || !ad->embed || !ad->all.n)
    return;
  mr_gpu_lora_embed a = {.x = x->p,
                         .ld = x->ld,
                         .token = g->token,
                         .adapter = ad->of_at,
                         .all = ad->embed,
                         .scale = g->m->c.embed_scale,
                         .cols = g->m->c.d_model};
  mr_gpu_launch(g, MR_GPU_lora_embed,
                (mr_grid){.blocks = {(uint32_t)g->batch.n_tokens, 1, 1}, .warps = MR_GPU_WARPS},
                &a);
}
