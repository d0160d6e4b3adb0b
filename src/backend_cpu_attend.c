/* Attention of a step. A tile is the new tokens of one run that lie in one KV page (at most
 * MR_KV_BLOCK, which is MR_ATTN_TILE); a work item is (tile, kv head): its query heads, its K and
 * V. Two workers never write into the same part of a page. Where every run is one tile, a tile's
 * keys are all there once it has stored its own, so store and attention are one pass; else all
 * tiles are stored first.
 *
 * Types that pack a block once it is full (kernels/kernels.h): a tile's tokens meet their own block
 * in 16 bits. It is in the sequence's own pages if it was begun in an earlier step; else it is made
 * for the tile, and put there after all tiles are through if it is not full. */
#include "src/backend_cpu.h"

#include <math.h>
#include <string.h>

#include "io/sys.h"

#define ITEMS_A_WORKER 16

typedef struct job {
  mr_cpu *c;
  const mr_attend *op;
  size_t part;  /* bytes of a K or V part */
  bool rotates; /* q and k, before k is cut to a few bits */
  mr_attn attn; /* what all tiles have in common */
} job;

/* Keys that the tile's queries read, summed. */
static double tile_keys(const mr_tile *t, int window) {
  double keys = t->pos + (t->n + 1) / 2.0;
  return t->n * (window > 0 && keys > window ? window : keys);
}

static int log2_floor(double x) {
  int n = 0;
  for (; x >= 2 && n < 63; x /= 2)
    n++;
  return n;
}

/* Longest first, to a factor of two: a counting sort by the logarithm of the work. */
static void sort_tiles(mr_cpu *c) {
  int count[64] = {0};
  for (int i = 0; i < c->n_tiles; i++)
    count[log2_floor(tile_keys(&c->tiles[i], 0))]++;
  for (int b = 63, at = 0; b >= 0; b--) {
    int n = count[b];
    count[b] = at;
    at += n;
  }
  for (int i = 0; i < c->n_tiles; i++)
    c->sorted[count[log2_floor(tile_keys(&c->tiles[i], 0))]++] = c->tiles[i];
}

/* Cuts the units (tile, kv head), in order, into work items: enough for each worker to balance, and
 * no more, as within an item the next unit's keys are asked for while one is in work. */
static void cut_units(mr_cpu *c) {
  int heads = c->m->c.n_kv_heads, units = c->n_tiles * heads;
  double all = 0, part = 0;
  for (int i = 0; i < c->n_tiles; i++)
    all += heads * tile_keys(&c->sorted[i], 0);
  double most = all / (c->workers * ITEMS_A_WORKER);
  c->n_cuts = 0;
  for (int u = 0; u < units; u++) {
    double work = tile_keys(&c->sorted[u / heads], 0);
    if (u == 0 || part + work > most) {
      c->cuts[c->n_cuts++] = u;
      part = 0;
    }
    part += work;
  }
  c->cuts[c->n_cuts] = units;
}

void mr_cpu_tile(mr_cpu *c) {
  int row = 0;
  c->n_tiles = 0;
  for (int r = 0; r < c->batch.n_runs; r++) {
    int pos = c->batch.runs[r].seq->len, left = c->batch.runs[r].n;
    while (left > 0) {
      int n = MR_KV_BLOCK - pos % MR_KV_BLOCK;
      n = n < left ? n : left;
      c->tiles[c->n_tiles++] = (mr_tile){.run = r, .row = row, .n = n, .pos = pos};
      row += n;
      pos += n;
      left -= n;
    }
  }
  sort_tiles(c);
  cut_units(c);
}

static void clip(float *x, float limit, int n) {
  for (int i = 0; i < n; i++)
    x[i] = fmaxf(-limit, fminf(x[i], limit));
}

/* One head, number `head` of q or of k; n: how many values of it are normed. */
static void norm_head(const job *j, float *x, const float *norm, const float *bias, int head,
                      int n) {
  const mr_config *cfg = &j->c->m->c;
  if ((!norm && !j->op->norm_bare) || j->op->norm_full)
    return;
  size_t at = j->op->norm_each ? (size_t)head * (size_t)n : 0;
  const float *w = norm ? norm + at : NULL;
  if (j->op->norm_layer)
    j->c->k->layernorm(x, x, w, bias ? bias + at : NULL, n, cfg->eps);
  else
    j->c->k->rmsnorm(x, x, w, n, cfg->eps);
}

static void norm_rope(const job *j, float *x, const float *norm, const float *bias, int head, int n,
                      int pos, const mr_rope_table *rope) {
  const mr_config *cfg = &j->c->m->c;
  if (cfg->clip_qkv > 0)
    clip(x, cfg->clip_qkv, cfg->head_dim);
  if (!j->op->norm_late)
    norm_head(j, x, norm, bias, head, n);
  if (rope->n_rot && !j->op->no_rope)
    j->c->k->rope(x + cfg->rope_first, mr_rope_row(rope, pos), rope->n_rot,
                  cfg->arch.rope == MR_ROPE_INTERLEAVED);
  if (j->op->norm_late)
    norm_head(j, x, norm, bias, head, n);
  if (j->rotates)
    j->c->k->rotate(x, cfg->head_dim);
}

/* Queries of layers without rope grow with the position (llama4), or those of all (ministral3). */
static void temper(const job *j, float *q, int pos) {
  const mr_config *cfg = &j->c->m->c;
  if (cfg->temper_scale == 0 || (!j->op->no_rope && !cfg->temper_all))
    return;
  double steps = floor((pos + (cfg->temper_all ? 0.0 : 1.0)) / cfg->temper_floor);
  j->c->k->scale(q, (float)(log1p(steps) * cfg->temper_scale + 1), cfg->head_dim);
}

static const mr_rope_table *rope_of(const job *j, const mr_kv_seq *seq) {
  const mr_rope_table *all = j->c->rope;
  return seq->long_rope && all[2].n_rot ? &all[2] : &all[j->op->local];
}

static float *key(const job *j, const mr_tile *t, int head, int i) {
  return mr_cpu_row(j->op->k, t->row + i) + (size_t)head * (size_t)j->attn.head_dim;
}

static float *value(const job *j, const mr_tile *t, int head, int i) {
  return mr_cpu_row(j->op->v, t->row + i) + (size_t)head * (size_t)j->attn.head_dim;
}

/* Queries, keys and values as attention wants them. */
static void prepare(const job *j, const mr_tile *t, int head) {
  const mr_attend *op = j->op;
  size_t dim = (size_t)j->attn.head_dim;
  int group = j->attn.n_heads / j->attn.n_kv_heads;
  int k_dims = op->k_norm_dims ? op->k_norm_dims : (int)dim;
  const mr_rope_table *rope = rope_of(j, j->c->batch.runs[t->run].seq);
  for (int i = 0; i < t->n; i++) {
    float *q = mr_cpu_row(op->q, t->row + i) + (size_t)head * (size_t)group * dim;
    for (int g = 0; g < group; g++) {
      float *one = q + (size_t)g * dim;
      norm_rope(j, one, op->q_norm, op->q_norm_b, head * group + g, (int)dim, t->pos + i, rope);
      temper(j, one, t->pos + i);
    }
    norm_rope(j, key(j, t, head, i), op->k_norm, op->k_norm_b, head, k_dims, t->pos + i, rope);
    if (j->c->m->c.clip_qkv > 0)
      clip(value(j, t, head, i), j->c->m->c.clip_qkv, (int)dim);
  }
}

/* ------------------------------------------------------------------ where a block lies */
static uint8_t *parts_of(const job *j, const mr_tile *t, int head) {
  const mr_kv_seq *seq = j->c->batch.runs[t->run].seq;
  return mr_kv_page(j->c->kv, seq->pages[t->pos / MR_KV_BLOCK]) + j->attn.layer_offset +
         (size_t)head * 2 * j->part;
}

static uint8_t *own_parts(const job *j, const mr_tile *t, int head) {
  return mr_kv_own_parts(j->c->kv, j->c->batch.runs[t->run].seq, j->op->layer, head);
}

static uint8_t *scratch_parts(const job *j, int worker) {
  return j->c->own + (size_t)worker * j->c->own_bytes;
}

static bool goes_on(const mr_tile *t) { /* with a block of an earlier step */
  return t->pos % MR_KV_BLOCK != 0;
}

static bool fills(const mr_tile *t) { /* its block */
  return (t->pos + t->n) % MR_KV_BLOCK == 0;
}

static void put(const job *j, const mr_tile *t, int head, uint8_t *parts, mr_kv_type type) {
  size_t part = mr_kv_part_bytes(type, j->attn.head_dim);
  for (int i = 0; i < t->n; i++)
    j->c->k->kv_store(parts, parts + part, key(j, t, head, i), value(j, t, head, i),
                      j->attn.head_dim, (t->pos + i) % MR_KV_BLOCK, type);
}

static void pack(const job *j, const mr_tile *t, int head, const uint8_t *own) {
  uint8_t *parts = parts_of(j, t, head);
  if (fills(t))
    j->c->k->kv_pack(parts, parts + j->part, own, j->attn.head_dim, j->attn.type);
}

/* ------------------------------------------------------------------ units and work items */
typedef struct unit { /* a tile and a kv head */
  const mr_tile *t;
  int head;
} unit;

static unit unit_of(const job *j, int u) {
  return (unit){&j->c->sorted[u / j->attn.n_kv_heads], u % j->attn.n_kv_heads};
}

/* What the attention of unit u will read. */
static mr_attn_next keys_of(const job *j, int u) {
  unit x = unit_of(j, u);
  return (mr_attn_next){.pages = j->c->batch.runs[x.t->run].seq->at,
                        .kv_head = x.head,
                        .first = mr_attn_first(&j->attn, x.t->pos) / MR_KV_BLOCK,
                        .end = (x.t->pos + x.t->n - 1) / MR_KV_BLOCK + 1};
}

/* u: the unit; end: where its item ends */
static void attend(const job *j, int u, int end, const uint8_t *own, int worker) {
  unit x = unit_of(j, u);
  mr_attn a = j->attn;
  a.q = mr_cpu_row(j->op->q, x.t->row);
  a.out = mr_cpu_row(j->op->out, x.t->row);
  a.n_q = x.t->n;
  a.pos0 = x.t->pos;
  a.pages = j->c->batch.runs[x.t->run].seq->at;
  a.own = own;
  if (u + 1 < end)
    a.next = keys_of(j, u + 1);
  j->c->k->attention(&a, x.head, 0, x.t->n, j->c->attn + (size_t)worker * j->c->attn_bytes);
}

static void store_unit(const job *j, int u, int worker) {
  unit x = unit_of(j, u);
  prepare(j, x.t, x.head);
  if (!mr_kv_packs(j->attn.type)) {
    put(j, x.t, x.head, parts_of(j, x.t, x.head), j->attn.type);
    return;
  }
  if (!goes_on(x.t) && !fills(x.t))
    return;
  uint8_t *own = goes_on(x.t) ? own_parts(j, x.t, x.head) : scratch_parts(j, worker);
  put(j, x.t, x.head, own, MR_KV_OWN_TYPE);
  pack(j, x.t, x.head, own);
}

static void attend_unit(const job *j, int u, int end, int worker) {
  unit x = unit_of(j, u);
  uint8_t *own = NULL;
  if (mr_kv_packs(j->attn.type))
    own = goes_on(x.t) ? own_parts(j, x.t, x.head) : scratch_parts(j, worker);
  if (own && !goes_on(x.t))
    put(j, x.t, x.head, own, MR_KV_OWN_TYPE);
  attend(j, u, end, own, worker);
}

static void store_item(void *ctx, int item, int worker) {
  const job *j = ctx;
  for (int u = j->c->cuts[item]; u < j->c->cuts[item + 1]; u++)
    store_unit(j, u, worker);
}

static void attend_item(void *ctx, int item, int worker) {
  const job *j = ctx;
  int end = j->c->cuts[item + 1];
  for (int u = j->c->cuts[item]; u < end; u++)
    attend_unit(j, u, end, worker);
}

/* The first tokens of a block, for the steps to come. */
static void keep_item(void *ctx, int item, int worker) {
  const job *j = ctx;
  (void)worker;
  for (int u = j->c->cuts[item]; u < j->c->cuts[item + 1]; u++) {
    unit x = unit_of(j, u);
    if (!goes_on(x.t) && !fills(x.t))
      put(j, x.t, x.head, own_parts(j, x.t, x.head), MR_KV_OWN_TYPE);
  }
}

/* Where the tokens of a run that is one tile are stored first. */
static uint8_t *new_parts(const job *j, int u) {
  unit x = unit_of(j, u);
  return mr_kv_packs(j->attn.type) ? own_parts(j, x.t, x.head) : parts_of(j, x.t, x.head);
}

/* A token's key touches all lines of its part. */
static void ask(const job *j, int u) {
  const uint8_t *k = new_parts(j, u);
  for (size_t i = 0; i < j->part; i += 64)
    __builtin_prefetch(k + i);
}

static void both_item(void *ctx, int item, int worker) {
  const job *j = ctx;
  int first = j->c->cuts[item], end = j->c->cuts[item + 1];
  mr_kv_type type = mr_kv_packs(j->attn.type) ? MR_KV_OWN_TYPE : j->attn.type;
  for (int u = first; u < end; u++) {
    unit x = unit_of(j, u);
    if (u + 1 < end)
      ask(j, u + 1);
    prepare(j, x.t, x.head);
    put(j, x.t, x.head, new_parts(j, u), type);
  }
  for (int u = first; u < end; u++) {
    unit x = unit_of(j, u);
    uint8_t *own = mr_kv_packs(j->attn.type) ? own_parts(j, x.t, x.head) : NULL;
    attend(j, u, end, own, worker);
    if (own)
      pack(j, x.t, x.head, own);
  }
}

/* Norms over all heads of a token at once cannot be cut by heads. */
static void full_norm_row(void *ctx, int item, int worker) {
  const job *j = ctx;
  const mr_config *cfg = &j->c->m->c;
  (void)worker;
  float *q = mr_cpu_row(j->op->q, item), *k = mr_cpu_row(j->op->k, item);
  if (j->op->q_norm)
    j->c->k->rmsnorm(q, q, j->op->q_norm, j->op->q->cols, cfg->eps);
  if (j->op->k_norm)
    j->c->k->rmsnorm(k, k, j->op->k_norm, j->op->k->cols, cfg->eps);
}

static void describe(job *j) {
  const mr_config *cfg = &j->c->m->c;
  const mr_kv *kv = j->c->kv;
  j->part = mr_kv_part_bytes(mr_kv_type_of(kv), cfg->head_dim);
  j->rotates = mr_kv_type_of(kv) > MR_KV_BF16;
  j->attn = (mr_attn){.q_ld = j->op->q->ld,
                      .out_ld = j->op->out->ld,
                      .n_heads = cfg->n_heads,
                      .n_kv_heads = cfg->n_kv_heads,
                      .head_dim = cfg->head_dim,
                      .type = mr_kv_type_of(kv),
                      .layer_offset = (size_t)j->op->layer * mr_kv_layer_bytes(kv),
                      .scale = cfg->attn_scale,
                      .softcap = cfg->attn_softcap,
                      .window = j->op->window,
                      .chunk = j->op->chunk,
                      .slopes = j->op->slopes,
                      .sinks = j->op->sinks};
}

static void count(const job *j) {
  mr_step_stats *s = &j->c->base.stats;
  for (int i = 0; i < j->c->n_tiles; i++) {
    double keys = tile_keys(&j->c->tiles[i], j->op->window);
    s->flops += 4.0 * keys * j->attn.n_heads * j->attn.head_dim;
    s->bytes += keys / j->c->tiles[i].n * 2 * (double)j->part * j->attn.n_kv_heads / MR_KV_BLOCK;
  }
}

void mr_cpu_attend(mr_backend *b, const mr_attend *op) {
  mr_cpu *c = (mr_cpu *)b;
  job j = {.c = c, .op = op};
  describe(&j);
  double start = mr_sys_seconds();
  if (op->norm_full && (op->q_norm || op->k_norm))
    mr_pool_run(c->pool, full_norm_row, &j, c->batch.n_tokens);
  int items = c->n_cuts;
  if (c->n_tiles == c->batch.n_runs) {
    mr_pool_run(c->pool, both_item, &j, items);
  } else {
    mr_pool_run(c->pool, store_item, &j, items);
    mr_pool_run(c->pool, attend_item, &j, items);
    if (mr_kv_packs(j.attn.type))
      mr_pool_run(c->pool, keep_item, &j, items);
  }
  b->stats.attn_s += mr_sys_seconds() - start;
  count(&j);
}
