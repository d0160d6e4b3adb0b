/* Attention on the device: heads are made ready and stored (heads.cu), then tiles of query rows are
 * attended (attn.cu). Runs whose rows fill one warp's tile (decode) have tiles of one warp, with
 * splits of keys in blocks of their own where there is room for their sums; others have tiles of
 * MR_GPU_WARPS. Where sequences share their first pages, tiles of groups go first
 * (backend_gpu_groups.c). No bits depend on that. */
#include "src/backend_gpu.h"

_Static_assert((int)MR_GPU_KV_F16 == (int)MR_KV_F16 && (int)MR_GPU_KV_BF16 == (int)MR_KV_BF16 &&
                   (int)MR_GPU_KV_INT8 == (int)MR_KV_INT8 && (int)MR_GPU_KV_FP8 == (int)MR_KV_FP8,
               "kernels/gpu/args.h and kernels/kernels.h count alike");

#define PARTS_BYTES ((size_t)64 << 20) /* of splits' sums, at most */

/* Most tiles of a step, were all of one warp. */
static size_t most_tiles(const mr_config *c, int max_tokens) {
  return (size_t)max_tokens * (size_t)mr_gpu_queries(c) / MR_GPU_ROWS + (size_t)max_tokens + 1;
}

static int values_chunks(const mr_config *c) {
  return mr_gpu_up(mr_gpu_up(c->head_dim, 16) * 16, MR_GPU_VALUES);
}

static size_t redo_bytes(const mr_config *c, int max_tokens) {
  return most_tiles(c, max_tokens) * (size_t)(c->n_kv_heads * values_chunks(c)) * MR_GPU_ROWS *
         MR_GPU_WARPS * sizeof(int32_t);
}

/* Sums of the splits: none where no sequence has two. */
static size_t parts_bytes(const mr_config *c, const mr_device *dev) {
  if (c->context <= MR_GPU_SPLIT)
    return 0;
  size_t share = dev->cap / 16;
  return share < PARTS_BYTES ? share : PARTS_BYTES;
}

size_t mr_gpu_attend_bytes(const mr_model *m, const mr_device *dev, int max_tokens) {
  return parts_bytes(&m->c, dev) + redo_bytes(&m->c, max_tokens) +
         mr_gpu_groups_bytes(&m->c, dev, max_tokens) + 768;
}

static bool is_wide(const mr_gpu *g) {
  return g->scheme == MR_GPU_EXACT || mr_kv_type_of(g->kv) == MR_KV_F32;
}

static bool fits(const mr_gpu *g, int warps) {
  mr_gpu_attn a = {
      .warps = warps, .head_dim = g->m->c.head_dim, .kv = (int32_t)mr_kv_type_of(g->kv)};
  return mr_gpu_attn_fit(&a, is_wide(g), g->dev->shared_bytes);
}

mr_code mr_gpu_attend_open(mr_gpu *g, mr_err *err) {
  const mr_config *c = &g->m->c;
  if (!fits(g, 1))
    return mr_err_set(err, MR_E_UNAVAILABLE,
                      "heads of %d values do not fit into the shared memory of device %s (%zu "
                      "bytes a block); use --device cpu",
                      c->head_dim, g->dev->name, g->dev->shared_bytes);
  g->redo = mr_device_take(g->dev, redo_bytes(c, g->max_tokens));
  g->parts_bytes = parts_bytes(c, g->dev);
  if (g->parts_bytes)
    g->parts = mr_device_take(g->dev, g->parts_bytes);
  return g->redo && (g->parts || !g->parts_bytes) ? mr_gpu_groups_open(g) : MR_E_NOMEM;
}

/* ------------------------------------------------------------------ tiles */

/* 0: one warp a tile, 1: MR_GPU_WARPS. */
static int kind_of(const mr_gpu *g, const mr_run *run, bool tall) {
  return tall && run->n * mr_gpu_queries(&g->m->c) > MR_GPU_ROWS;
}

static int tile_rows(int kind) {
  return kind ? MR_GPU_ROWS * MR_GPU_WARPS : MR_GPU_ROWS;
}

static void fill_tiles(mr_gpu *g, mr_gpu_tile *tiles, int kind, bool tall) {
  for (int i = 0, n = 0; i < g->batch.n_runs; i++) {
    const mr_run *run = &g->batch.runs[i];
    const mr_gpu_run *at = &g->groups.runs[i];
    int rows = run->n * mr_gpu_queries(&g->m->c);
    if (kind_of(g, run, tall) == kind)
      for (int first = 0; first < rows; first += tile_rows(kind), n++)
        tiles[n] =
            (mr_gpu_tile){.row = at->row,
                          .pos = run->seq->len,
                          .first = first,
                          .n = rows - first < tile_rows(kind) ? rows - first : tile_rows(kind),
                          .table = at->table,
                          .shared = at->shared,
                          .carry = at->carry};
  }
}

mr_code mr_gpu_tile_runs(mr_gpu *g) {
  bool tall = fits(g, MR_GPU_WARPS);
  size_t pages = 0, tiles[2] = {0, 0};
  int groups = mr_kv_groups_in(g->kv).n;
  mr_gpu_find_groups(g);
  g->splits = g->own_splits = 0;
  for (int i = 0; i < g->batch.n_runs; i++) {
    const mr_run *run = &g->batch.runs[i];
    int splits = mr_gpu_up(run->seq->len + run->n, MR_GPU_SPLIT), kind = kind_of(g, run, tall);
    int own = splits - g->groups.runs[i].shared;
    pages += (size_t)mr_gpu_up(run->seq->len + run->n, MR_KV_BLOCK);
    tiles[kind] += (size_t)mr_gpu_up(run->n * mr_gpu_queries(&g->m->c), tile_rows(kind));
    g->splits = splits > g->splits ? splits : g->splits;
    g->own_splits = own > g->own_splits ? own : g->own_splits;
  }
  g->table_pages = pages;
  int32_t *table =
      mr_gpu_side_take(g, (size_t)groups * pages * sizeof *table, (const void **)&g->table);
  if (!table)
    return MR_E_NOMEM;
  for (int of = 0; of < groups; of++)
    for (int i = 0; i < g->batch.n_runs; i++) {
      const mr_kv_seq *seq = g->batch.runs[i].seq;
      for (int p = 0; p < mr_gpu_up(seq->len + g->batch.runs[i].n, MR_KV_BLOCK); p++)
        *table++ = seq->pages[(size_t)of * (size_t)seq->cap_blocks + (size_t)p];
    }
  for (int kind = 0; kind < 2; kind++) {
    mr_gpu_tile *t = mr_gpu_side_take(g, tiles[kind] * sizeof *t, (const void **)&g->tiles[kind]);
    if (!t)
      return MR_E_NOMEM;
    g->n_tiles[kind] = (int)tiles[kind];
    fill_tiles(g, t, kind, tall);
  }
  return mr_gpu_tile_groups(g, tall);
}

/* ------------------------------------------------------------------ heads */

/* Norms over all heads of a token at once. */
static void norm_full(mr_gpu *g, mr_buf *x, const float *w) {
  if (!w)
    return;
  mr_gpu_rows a = {.x = x->p,
                   .ld = x->ld,
                   .norm = {.kind = MR_GPU_NORM_RMS,
                            .w = mr_gpu_vector_of(g, w, (size_t)x->cols),
                            .eps = g->m->c.eps},
                   .cols = x->cols};
  mr_gpu_launch(g, MR_GPU_norm, mr_gpu_by_rows(g->batch.n_tokens), &a);
}

static const float *head_norm(mr_gpu *g, const mr_attend *op, const float *w, int heads, int dims) {
  if (op->norm_full)
    return NULL;
  return mr_gpu_vector_of(g, w, (size_t)dims * (size_t)(op->norm_each ? heads : 1));
}

static void ready_heads(mr_gpu *g, const mr_attend *op) {
  const mr_config *c = &g->m->c;
  int k_dims = op->k_norm_dims ? op->k_norm_dims : c->head_dim;
  int group = mr_kv_group(g->kv, op->layer);
  mr_gpu_heads a = {.q = op->q->p,
                    .k = op->k->p,
                    .v = op->v == op->k ? NULL : op->v->p,
                    .ld_q = op->q->ld,
                    .ld_k = op->k->ld,
                    .ld_v = op->v->ld,
                    .q_norm = head_norm(g, op, op->q_norm, c->n_heads, c->head_dim),
                    .k_norm = head_norm(g, op, op->k_norm, c->n_kv_heads, k_dims),
                    .q_norm_b = head_norm(g, op, op->q_norm_b, c->n_heads, c->head_dim),
                    .k_norm_b = head_norm(g, op, op->k_norm_b, c->n_kv_heads, k_dims),
                    .rope = g->rope_at[op->local],
                    .temper =
                        (op->no_rope || c->temper_all) && c->temper_scale != 0 ? g->temper : NULL,
                    .pos = g->pos,
                    .page = g->page + (size_t)group * (size_t)g->batch.n_tokens,
                    .pages = mr_kv_page(g->kv, 0),
                    .page_bytes = mr_kv_size_of_page(g->kv),
                    .layer_offset = mr_kv_layer_offset(g->kv, op->layer),
                    .part_bytes = mr_kv_part_bytes(mr_kv_type_of(g->kv), c->head_dim),
                    .eps = c->eps,
                    .clip = c->clip_qkv,
                    .n_heads = c->n_heads,
                    .n_kv_heads = c->n_kv_heads,
                    .head_dim = c->head_dim,
                    .k_dims = k_dims,
                    .norm = op->norm_full    ? MR_GPU_NORM_NONE
                            : op->norm_layer ? MR_GPU_NORM_LAYER
                                             : MR_GPU_NORM_RMS,
                    .bare = op->norm_bare,
                    .each = op->norm_each,
                    .late = op->norm_late,
                    .n_rot = op->no_rope ? 0 : g->rope[0].n_rot,
                    .rope_first = c->rope_first,
                    .interleaved = c->arch.rope == MR_ROPE_INTERLEAVED,
                    .kv = (int32_t)mr_kv_type_of(g->kv),
                    .rotate = mr_kv_type_of(g->kv) > MR_KV_BF16 ? mr_rotate_block(c->head_dim) : 0};
  mr_grid grid = {.blocks = {(uint32_t)g->batch.n_tokens,
                             (uint32_t)mr_gpu_up(c->n_heads + c->n_kv_heads, MR_GPU_WARPS), 1},
                  .warps = MR_GPU_WARPS,
                  .shared = (size_t)MR_GPU_WARPS * (size_t)c->head_dim * sizeof(float)};
  mr_gpu_launch(g, MR_GPU_heads, grid, &a);
}

/* ------------------------------------------------------------------ attention */

static void describe(mr_gpu *g, const mr_attend *op, mr_gpu_attn *a) {
  const mr_config *c = &g->m->c;
  *a = (mr_gpu_attn){.q = op->q->p,
                     .out = op->out->p,
                     .ld_q = op->q->ld,
                     .ld_out = op->out->ld,
                     .pages = mr_kv_page(g->kv, 0),
                     .page_bytes = mr_kv_size_of_page(g->kv),
                     .layer_offset = mr_kv_layer_offset(g->kv, op->layer),
                     .part_bytes = mr_kv_part_bytes(mr_kv_type_of(g->kv), c->head_dim),
                     .table = g->table + (size_t)mr_kv_group(g->kv, op->layer) * g->table_pages,
                     .slopes = mr_gpu_vector_of(g, op->slopes, (size_t)c->n_heads),
                     .sinks = mr_gpu_vector_of(g, op->sinks, (size_t)c->n_heads),
                     .scale = c->attn_scale,
                     .softcap = c->attn_softcap,
                     .phi = 0,
                     .reach = 60, /* e^60 and its inverse are far inside float32 */
                     .group = mr_gpu_queries(c),
                     .head_dim = c->head_dim,
                     .kv = (int32_t)mr_kv_type_of(g->kv),
                     .window = op->window,
                     .chunk = op->chunk};
}

/* Whether splits have blocks of their own: where tiles alone would not fill the device. */
static bool cut_keys(const mr_gpu *g, const mr_gpu_attn *a, int tiles) {
  size_t bytes = (size_t)tiles * (size_t)a->ys * (size_t)a->splits * MR_GPU_ROWS *
                 (size_t)a->warps * (size_t)(a->at.values + 2) * sizeof(float);
  return a->splits > 1 && tiles * a->ys < 4 * g->dev->units && bytes <= g->parts_bytes;
}

/* The sums of all tiles, by blocks for each split or not. */
static mr_grid sum_tiles(mr_gpu *g, mr_gpu_attn *a, int tiles, int splits) {
  static const mr_gpu_kernel kernels[2][2] = {{MR_GPU_attn_bf16, MR_GPU_attn_wide},
                                              {MR_GPU_attn_uni_bf16, MR_GPU_attn_uni_wide}};
  bool wide = is_wide(g), uni = g->scheme != MR_GPU_EXACT;
  mr_gpu_attn_fit(a, wide, g->dev->shared_bytes);
  a->ys = g->m->c.n_kv_heads * a->chunks;
  a->splits = splits;
  bool cut = cut_keys(g, a, tiles);
  a->parts = cut ? g->parts : NULL;
  mr_grid grid = {.blocks = {(uint32_t)tiles, (uint32_t)a->ys, cut ? (uint32_t)splits : 1},
                  .warps = (uint32_t)a->warps,
                  .shared = a->at.bytes};
  mr_gpu_launch(g, kernels[uni][wide], grid, a);
  grid.blocks[2] = 1;
  if (cut)
    mr_gpu_launch(g, uni ? MR_GPU_merge_uni : MR_GPU_merge,
                  (mr_grid){.blocks = {grid.blocks[0], grid.blocks[1], 1}, .warps = MR_GPU_WARPS},
                  a);
  a->parts = NULL;
  return grid;
}

/* The splits that groups share; tiles of runs then go on from a->carry. */
static void attend_groups(mr_gpu *g, mr_gpu_attn *a) {
  mr_gpu_attn x = *a;
  x.carry = a->carry = g->groups.carry;
  x.members = g->groups.members;
  x.pos = g->pos;
  x.tiles = g->groups.tiles;
  x.warps = g->groups.warps;
  sum_tiles(g, &x, g->groups.n_tiles, g->groups.splits);
}

/* The unified form first, then the running form, with all splits, for rows that left its range; in
 * exact mode the running form alone. */
static void attend_tiles(mr_gpu *g, mr_gpu_attn a, int kind) {
  bool uni = g->scheme != MR_GPU_EXACT;
  a.warps = kind ? MR_GPU_WARPS : 1;
  a.tiles = g->tiles[kind];
  a.redo = uni ? g->redo : NULL;
  mr_grid grid = sum_tiles(g, &a, g->n_tiles[kind], a.carry ? g->own_splits : g->splits);
  a.carry = NULL;
  if (uni)
    mr_gpu_launch(g, is_wide(g) ? MR_GPU_attn_wide : MR_GPU_attn_bf16, grid, &a);
}

static void count(mr_gpu *g, const mr_attend *op) {
  const mr_config *c = &g->m->c;
  for (int i = 0; i < g->batch.n_runs; i++) {
    const mr_run *run = &g->batch.runs[i];
    double keys = run->seq->len + (run->n + 1) / 2.0;
    keys = op->window > 0 && keys > op->window ? op->window : keys;
    g->base.stats.flops += 4.0 * keys * run->n * c->n_heads * c->head_dim;
    g->base.stats.bytes += keys * (double)mr_kv_layer_bytes(g->kv) / MR_KV_BLOCK;
  }
  g->base.stats.bytes -= mr_gpu_groups_keys(g, op) * (double)mr_kv_layer_bytes(g->kv) / MR_KV_BLOCK;
}

void mr_gpu_run_attend(mr_backend *b, const mr_attend *op) {
  mr_gpu *g = (mr_gpu *)b;
  if (op->norm_full) {
    norm_full(g, op->q, op->q_norm);
    norm_full(g, op->k, op->k_norm);
  }
  ready_heads(g, op);
  mr_gpu_attn a;
  describe(g, op, &a);
  if (mr_gpu_groups_seen(g, op))
    attend_groups(g, &a);
  for (int kind = 0; kind < 2; kind++)
    if (g->n_tiles[kind])
      attend_tiles(g, a, kind);
  count(g, op);
}
