/* Attention of a step, cut as backend_cpu_tiles.c says. Two workers never write into the same part
 * of a page. Where every run is one tile, a tile's keys are all there once it has stored its own,
 * so store and attention are one pass; else all tiles are stored first.
 *
 * Types that pack a block once it is full (kernels/kernels.h): a tile's tokens meet their own block
 * in 16 bits. It is in the sequence's own pages if it was begun in an earlier step; else it is made
 * for the tile, and put there after all tiles are through if it is not full. */
#include "src/backend_cpu.h"

#include <math.h>
#include <string.h>

#include "io/sys.h"

typedef struct job {
  mr_cpu *c;
  const mr_attend *op;
  size_t part;  /* bytes of a K or V part */
  bool rotates; /* q and k, before k is cut to a few bits */
  mr_attn attn; /* what all tiles have in common */
  int group;    /* of layers: whose pages these are */
} job;

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
  const int32_t *pages = seq->pages + (size_t)j->group * (size_t)seq->cap_blocks;
  return mr_kv_page(j->c->kv, pages[t->pos / MR_KV_BLOCK]) + j->attn.layer_offset +
         (size_t)head * 2 * j->part;
}

static const uint8_t *const *pages_of(const job *j, const mr_tile *t) {
  const mr_kv_seq *seq = j->c->batch.runs[t->run].seq;
  return seq->at + (size_t)j->group * (size_t)seq->cap_blocks;
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

/* ------------------------------------------------------------------ units */
typedef struct unit { /* n tiles of a group, and a kv head */
  const mr_tile *t;
  int n, blocks, head;
} unit;

static unit unit_of(const job *j, int u) {
  const mr_group *g = &j->c->ordered[u / j->attn.n_kv_heads];
  return (unit){&j->c->sorted[g->first], g->n, g->blocks, u % j->attn.n_kv_heads};
}

static void store(const job *j, const mr_tile *t, int head, int worker) {
  prepare(j, t, head);
  if (!mr_kv_packs(j->attn.type)) {
    put(j, t, head, parts_of(j, t, head), j->attn.type);
    return;
  }
  if (!goes_on(t) && !fills(t))
    return;
  uint8_t *own = goes_on(t) ? own_parts(j, t, head) : scratch_parts(j, worker);
  put(j, t, head, own, MR_KV_OWN_TYPE);
  pack(j, t, head, own);
}

/* What a tile's attention reads, if it begins at block `first` or, -1, where its window does. */
static mr_attn_next keys_of(const job *j, const mr_tile *t, int head, int first) {
  first = first >= 0 ? first : mr_attn_first(&j->attn, t->pos) / MR_KV_BLOCK;
  return (mr_attn_next){.pages = pages_of(j, t),
                        .kv_head = head,
                        .first = first,
                        .end = (t->pos + t->n - 1) / MR_KV_BLOCK + 1};
}

static mr_attn attn_of(const job *j, const mr_tile *t, const uint8_t *own) {
  mr_attn a = j->attn;
  a.q = mr_cpu_row(j->op->q, t->row);
  a.out = mr_cpu_row(j->op->out, t->row);
  a.n_q = t->n;
  a.pos0 = t->pos;
  a.pages = pages_of(j, t);
  a.own = own;
  return a;
}

/* Where the keys of the block in work are, for types that pack: a tile that begins a block alone.
 */
static const uint8_t *block_in_work(const job *j, const mr_tile *t, int head, int worker,
                                    bool both) {
  if (!mr_kv_packs(j->attn.type))
    return NULL;
  if (both || goes_on(t))
    return own_parts(j, t, head);
  put(j, t, head, scratch_parts(j, worker), MR_KV_OWN_TYPE);
  return scratch_parts(j, worker);
}

/* A unit's tokens whose windows let all see what they share. */
static bool sees_shared(const job *j, const unit *x) {
  for (int i = 0; i < x->n; i++)
    if (mr_attn_first(&j->attn, x->t[i].pos) > 0)
      return false;
  return x->blocks > 0;
}

/* u: the unit; end: where its item ends; both: its tokens were stored in this pass */
static void attend(const job *j, int u, int end, int worker, bool both) {
  unit x = unit_of(j, u), y = unit_of(j, u + 1 < end ? u + 1 : u);
  bool shared = sees_shared(j, &x);
  mr_attn a[MR_ATTN_TILE];
  void *scratch = j->c->attn + (size_t)worker * j->c->attn_bytes;
  for (int i = 0; i < x.n; i++) {
    a[i] = attn_of(j, &x.t[i], block_in_work(j, &x.t[i], x.head, worker, both));
    if (i + 1 < x.n)
      a[i].next = keys_of(j, &x.t[i + 1], x.head, shared ? x.blocks : -1);
    else if (u + 1 < end)
      a[i].next = keys_of(j, y.t, y.head, -1);
    if (!shared)
      j->c->k->attention(&a[i], x.head, 0, a[i].n_q, scratch);
  }
  if (shared)
    j->c->k->attention_shared(a, x.n, x.blocks, x.head, scratch);
}

/* ------------------------------------------------------------------ work items */
static void store_item(void *ctx, int item, int worker) {
  const job *j = ctx;
  for (int u = j->c->cuts[item]; u < j->c->cuts[item + 1]; u++) {
    unit x = unit_of(j, u);
    for (int i = 0; i < x.n; i++)
      store(j, &x.t[i], x.head, worker);
  }
}

static void attend_item(void *ctx, int item, int worker) {
  const job *j = ctx;
  int end = j->c->cuts[item + 1];
  for (int u = j->c->cuts[item]; u < end; u++)
    attend(j, u, end, worker, false);
}

/* ------------------------------------------------------------------ splits of keys */
static int first_split(const job *j, const mr_tile *t) {
  return mr_attn_first(&j->attn, t->pos) / (MR_ATTN_SPLIT * MR_KV_BLOCK);
}

static int n_splits(const job *j, const mr_tile *t) {
  return t->pos / (MR_ATTN_SPLIT * MR_KV_BLOCK) + 1 - first_split(j, t);
}

static float *state_of(const job *j, int u, int i) {
  size_t at = (size_t)u * (size_t)j->c->most_splits + (size_t)i;
  return j->c->states + at * j->c->state_floats;
}

/* item: split i of unit u, counted over all units */
static void split_item(void *ctx, int item, int worker) {
  const job *j = ctx;
  int u = 0, n;
  unit x = unit_of(j, 0);
  for (; item >= (n = n_splits(j, x.t)); item -= n)
    x = unit_of(j, ++u);
  mr_attn a = attn_of(j, x.t, block_in_work(j, x.t, x.head, worker, false));
  j->c->k->attention_split(&a, x.head, first_split(j, x.t) + item, state_of(j, u, item),
                           j->c->attn + (size_t)worker * j->c->attn_bytes);
}

/* A window of a split at most is not worth the waiting. */
static bool has_splits(const job *j) {
  int sees = j->op->chunk ? j->op->chunk : j->op->window;
  return j->c->splits && (sees == 0 || sees > MR_ATTN_SPLIT * MR_KV_BLOCK);
}

static void attend_splits(job *j) {
  int units = j->c->n_groups * j->attn.n_kv_heads, items = 0;
  for (int u = 0; u < units; u++)
    items += n_splits(j, unit_of(j, u).t);
  mr_pool_run(j->c->pool, split_item, j, items);
  for (int u = 0; u < units; u++) {
    unit x = unit_of(j, u);
    mr_attn a = attn_of(j, x.t, NULL);
    j->c->k->attention_join(&a, x.head, state_of(j, u, 0), n_splits(j, x.t));
  }
}

/* The first tokens of a block, for the steps to come. */
static void keep_item(void *ctx, int item, int worker) {
  const job *j = ctx;
  (void)worker;
  for (int u = j->c->cuts[item]; u < j->c->cuts[item + 1]; u++) {
    unit x = unit_of(j, u);
    for (int i = 0; i < x.n; i++)
      if (!goes_on(&x.t[i]) && !fills(&x.t[i]))
        put(j, &x.t[i], x.head, own_parts(j, &x.t[i], x.head), MR_KV_OWN_TYPE);
  }
}

/* Where the tokens of a run that is one tile are stored first. */
static uint8_t *new_parts(const job *j, const mr_tile *t, int head) {
  return mr_kv_packs(j->attn.type) ? own_parts(j, t, head) : parts_of(j, t, head);
}

/* A token's key touches all lines of its part. */
static void ask(const uint8_t *part, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64)
    __builtin_prefetch(part + i);
}

static void both_item(void *ctx, int item, int worker) {
  const job *j = ctx;
  int first = j->c->cuts[item], end = j->c->cuts[item + 1];
  mr_kv_type type = mr_kv_packs(j->attn.type) ? MR_KV_OWN_TYPE : j->attn.type;
  for (int u = first; u < end; u++) {
    unit x = unit_of(j, u), y = unit_of(j, u + 1 < end ? u + 1 : u);
    for (int i = 0; i < x.n; i++) {
      if (i + 1 < x.n)
        ask(new_parts(j, &x.t[i + 1], x.head), j->part);
      else
        ask(new_parts(j, y.t, y.head), j->part);
      prepare(j, &x.t[i], x.head);
      put(j, &x.t[i], x.head, new_parts(j, &x.t[i], x.head), type);
    }
  }
  for (int u = first; u < end; u++) {
    unit x = unit_of(j, u);
    attend(j, u, end, worker, true);
    for (int i = 0; i < x.n && mr_kv_packs(j->attn.type); i++)
      pack(j, &x.t[i], x.head, own_parts(j, &x.t[i], x.head));
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
  j->group = mr_kv_group(kv, j->op->layer);
  j->attn = (mr_attn){.q_ld = j->op->q->ld,
                      .out_ld = j->op->out->ld,
                      .n_heads = cfg->n_heads,
                      .n_kv_heads = cfg->n_kv_heads,
                      .head_dim = cfg->head_dim,
                      .type = mr_kv_type_of(kv),
                      .layer_offset = mr_kv_layer_offset(kv, j->op->layer),
                      .scale = cfg->attn_scale,
                      .softcap = cfg->attn_softcap,
                      .window = j->op->window,
                      .chunk = j->op->chunk,
                      .slopes = j->op->slopes,
                      .sinks = j->op->sinks};
}

static void count(const job *j) {
  const mr_cpu *c = j->c;
  mr_step_stats *s = &j->c->base.stats;
  double block = 2 * (double)j->part * j->attn.n_kv_heads;
  for (int i = 0; i < c->n_tiles; i++) {
    double keys = mr_cpu_tile_keys(&c->tiles[i], j->op->window);
    s->flops += 4.0 * keys * j->attn.n_heads * j->attn.head_dim;
    s->bytes += keys / c->tiles[i].n * block / MR_KV_BLOCK;
  }
  for (int u = 0; u < c->n_groups * j->attn.n_kv_heads; u += j->attn.n_kv_heads) {
    unit x = unit_of(j, u);
    if (sees_shared(j, &x)) /* once */
      s->bytes -= (x.n - 1) * x.blocks * block;
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
  bool splits = has_splits(&j);
  if (c->n_tiles == c->batch.n_runs && !splits) {
    mr_pool_run(c->pool, both_item, &j, items);
  } else {
    mr_pool_run(c->pool, store_item, &j, items);
    if (splits)
      attend_splits(&j);
    else
      mr_pool_run(c->pool, attend_item, &j, items);
    if (mr_kv_packs(j.attn.type))
      mr_pool_run(c->pool, keep_item, &j, items);
  }
  b->stats.attn_s += mr_sys_seconds() - start;
  count(&j);
}
