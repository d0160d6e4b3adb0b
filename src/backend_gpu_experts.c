/* Experts on the device. A kernel routes the rows as src/route.c does (route.cu), another makes
 * lists of rows by expert, in order of slots, and the products take their rows and matrices from
 * these lists: nothing of a layer is waited for. Grids are as large as they may have to be. The
 * shared expert sees all rows, like any other matrix: its rows come after those of the others. */
#include "src/backend_gpu_lora.h"

#include <math.h>

#include "io/mem.h"

_Static_assert((int)MR_GPU_SCORE_SOFTMAX == (int)MR_SCORE_SOFTMAX &&
                   (int)MR_GPU_SCORE_SIGMOID == (int)MR_SCORE_SIGMOID &&
                   (int)MR_GPU_SCORE_SPARSEMIXER == (int)MR_SCORE_SPARSEMIXER,
               "kernels/gpu/args.h and src/config.h count alike");

enum { GATE, UP, DOWN, ROLES };

struct mr_gpu_moe {       /* the device's, but for holds */
  int n, each, width;     /* experts without the shared one; slots of a token; inner columns */
  mr_gpu_expert *experts; /* [layers, ROLES, n] */
  uint8_t *holds;         /* [layers, ROLES]: bits of mr_gpu_hold; the host's; owned */
  mr_gpu_bf16 *packed;    /* [slots] packed rows, two planes */
  size_t plane;
  float *inner[2], *y; /* [slots, width] gate and up; [slots, d_model] */
  float *gate;         /* [max_tokens] of the shared expert */
  /* mr_gpu_route and mr_gpu_sort */
  float *weight, *factor;
  int32_t *chosen, *slot, *from, *first, *n_items;
  mr_gpu_item *items;
};

/* ------------------------------------------------------------------ memory */

#define PIECES 14

typedef struct piece {
  void *at; /* of a pointer */
  size_t bytes;
} piece;

static size_t most_items(const mr_config *c, size_t tokens) {
  return tokens * (size_t)c->n_experts_used / MR_GPU_ROWS + (size_t)c->n_experts;
}

static void set_sizes(const mr_config *c, struct mr_gpu_moe *x, size_t tokens) {
  x->n = c->n_experts;
  x->each = c->n_experts_used + (c->d_shared > 0);
  x->width = c->d_expert > c->d_shared ? c->d_expert : c->d_shared;
  int a = mr_gpu_padded(c->d_model), b = mr_gpu_padded(x->width);
  x->plane = tokens * (size_t)x->each * (size_t)(a > b ? a : b);
}

static void list_pieces(const mr_config *c, struct mr_gpu_moe *x, size_t tokens, piece *all) {
  size_t slots = tokens * (size_t)x->each, inner = slots * mr_gpu_ld((size_t)x->width);
  const piece list[PIECES] = {
      {&x->experts, (size_t)c->n_layers * ROLES * (size_t)x->n * sizeof *x->experts},
      {&x->packed, 2 * x->plane * sizeof *x->packed},
      {&x->inner[0], inner * sizeof(float)},
      {&x->inner[1], inner * sizeof(float)},
      {&x->y, slots * mr_gpu_ld((size_t)c->d_model) * sizeof(float)},
      {&x->gate, tokens * sizeof(float)},
      {&x->weight, slots * sizeof(float)},
      {&x->factor, slots * sizeof(float)},
      {&x->chosen, slots * sizeof(int32_t)},
      {&x->slot, slots * sizeof(int32_t)},
      {&x->from, slots * sizeof(int32_t)},
      {&x->first, ((size_t)x->n + 2) * sizeof(int32_t)},
      {&x->n_items, sizeof(int32_t)},
      {&x->items, most_items(c, tokens) * sizeof *x->items}};
  for (int i = 0; i < PIECES; i++)
    all[i] = list[i];
}

size_t mr_gpu_moe_bytes(const mr_model *m, int max_tokens) {
  struct mr_gpu_moe x;
  piece all[PIECES];
  size_t sum = 0;
  if (m->c.n_experts < 1)
    return 0;
  set_sizes(&m->c, &x, (size_t)max_tokens);
  list_pieces(&m->c, &x, (size_t)max_tokens, all);
  for (int i = 0; i < PIECES; i++)
    sum += (all[i].bytes + 255) & ~(size_t)255;
  return sum;
}

/* ------------------------------------------------------------------ the experts' matrices */

static const mr_matrix *matrix_of(const mr_expert *x, int role) {
  return role == GATE ? &x->gate : role == UP ? &x->up : &x->down;
}

/* Where the device finds the matrices of a layer. room: [n]. */
static mr_code put_layer(mr_gpu *g, int layer, mr_gpu_expert *room) {
  struct mr_gpu_moe *x = g->moe;
  mr_code rc = MR_OK;
  for (int role = 0; role < ROLES && !rc; role++) {
    size_t at = (size_t)layer * ROLES + (size_t)role;
    for (int e = 0; e < x->n; e++) {
      const mr_gpu_matrix *w = mr_gpu_find(g, matrix_of(&g->m->layers[layer].experts[e], role));
      room[e] = (mr_gpu_expert){
          .w = w->w, .plane = w->plane, .few = w->few, .bias = w->bias, .hold = (int32_t)w->hold};
      x->holds[at] |= (uint8_t)(1 << w->hold);
    }
    rc = mr_device_put(g->dev, g->stream, x->experts + at * (size_t)x->n, room,
                       (size_t)x->n * sizeof *room);
  }
  return rc;
}

static mr_code put_experts(mr_gpu *g) {
  struct mr_gpu_moe *x = g->moe;
  mr_gpu_expert *room = mr_mem_alloc((size_t)x->n, sizeof *room);
  x->holds = mr_mem_alloc((size_t)g->m->c.n_layers, ROLES);
  mr_code rc = room && x->holds ? MR_OK : MR_E_NOMEM;
  for (int i = 0; i < g->m->c.n_layers && !rc; i++)
    if (g->m->layers[i].experts)
      rc = put_layer(g, i, room);
  mr_mem_free(room);
  return rc;
}

mr_code mr_gpu_moe_open(mr_gpu *g, mr_err *err) {
  const mr_config *c = &g->m->c;
  piece all[PIECES];
  if (c->n_experts < 1)
    return MR_OK;
  if (MR_GPU_ROUTE_SHARED(c->n_experts) > g->dev->shared_bytes)
    return mr_err_set(err, MR_E_UNAVAILABLE,
                      "%d experts do not fit into the shared memory of device %s (%zu bytes a "
                      "block); use --device cpu",
                      c->n_experts, g->dev->name, g->dev->shared_bytes);
  struct mr_gpu_moe *x = g->moe = mr_mem_alloc(1, sizeof *x);
  if (!x)
    return MR_E_NOMEM;
  set_sizes(c, x, (size_t)g->max_tokens);
  list_pieces(c, x, (size_t)g->max_tokens, all);
  for (int i = 0; i < PIECES; i++)
    if (!(*(void **)all[i].at = mr_device_take(g->dev, all[i].bytes)))
      return MR_E_NOMEM;
  return put_experts(g);
}

void mr_gpu_moe_close(mr_gpu *g) {
  if (g->moe)
    mr_mem_free(g->moe->holds);
  mr_mem_free(g->moe);
}

/* ------------------------------------------------------------------ routing */

static void open_gate(mr_gpu *g, const mr_experts *op) {
  mr_gpu_dot a = {.x = op->x->p,
                  .w = mr_gpu_vector_of(g, op->layer->shared_gate, (size_t)op->x->cols),
                  .out = g->moe->gate,
                  .ld = op->x->ld,
                  .norm = mr_gpu_norm_of(g, &op->norm, op->x->cols),
                  .cols = op->x->cols};
  mr_gpu_launch(g, MR_GPU_dot, mr_gpu_by_rows(g->batch.n_tokens), &a);
}

static void route(mr_gpu *g, const mr_experts *op) {
  const mr_config *c = &g->m->c;
  struct mr_gpu_moe *x = g->moe;
  mr_gpu_route a = {.scores = op->scores->p,
                    .ld = op->scores->ld,
                    .bias = mr_gpu_vector_of(g, op->layer->route_bias, (size_t)x->n),
                    .gate = op->layer->shared_gate ? x->gate : NULL,
                    .chosen = x->chosen,
                    .weight = x->weight,
                    .slot = x->slot,
                    .from = x->from,
                    .tokens = g->batch.n_tokens,
                    .n = x->n,
                    .used = c->n_experts_used,
                    .each = x->each,
                    .scoring = (int32_t)c->arch.scoring,
                    .choose_raw = c->arch.choose_raw,
                    .renorm = c->arch.renorm,
                    .groups = c->n_group,
                    .best_groups = c->topk_group,
                    .group_best = c->group_best,
                    .scale = c->route_scale,
                    .shared_scale = c->shared_scale,
                    .jitter = c->route_jitter};
  uint32_t blocks = (uint32_t)mr_gpu_up(a.tokens, MR_GPU_WARPS);
  mr_gpu_launch(g, MR_GPU_route,
                (mr_grid){.blocks = {blocks, 1, 1},
                          .warps = MR_GPU_WARPS,
                          .shared = MR_GPU_ROUTE_SHARED(x->n)},
                &a);
}

/* tile: rows of an item. */
static void sort(mr_gpu *g, int tile) {
  const mr_config *c = &g->m->c;
  struct mr_gpu_moe *x = g->moe;
  mr_gpu_sort a = {.chosen = x->chosen,
                   .weight = x->weight,
                   .slot = x->slot,
                   .from = x->from,
                   .first = x->first,
                   .factor = c->arch.route_input ? x->factor : NULL,
                   .items = x->items,
                   .n_items = x->n_items,
                   .tokens = g->batch.n_tokens,
                   .n = x->n,
                   .used = c->n_experts_used,
                   .each = x->each,
                   .tile = tile};
  mr_gpu_launch(g, MR_GPU_sort,
                (mr_grid){.blocks = {(uint32_t)x->n, 1, 1},
                          .warps = MR_GPU_WARPS,
                          .shared = MR_GPU_SORT_SHARED(x->n)},
                &a);
}

/* ------------------------------------------------------------------ products */

/* Rows of the chosen experts come first, then those of the shared one. */
static size_t chosen_rows(const mr_gpu *g) {
  return (size_t)g->batch.n_tokens * (size_t)g->m->c.n_experts_used;
}

static size_t plane_of(const mr_gpu *g) {
  return g->scheme == MR_GPU_EXACT ? g->moe->plane : 0;
}

/* 64 rows where an expert has as many on average and shared memory holds them for all that the
 * layer has. No bits depend on it. */
static int tile_rows(const mr_gpu *g, const uint8_t *holds) {
  int rows = (int)chosen_rows(g) / g->moe->n;
  for (int hold = MR_GPU_BF16; hold <= MR_GPU_INT4; hold++)
    for (int role = 0; role < ROLES; role++)
      if (holds[role] >> hold & 1 && MR_GPU_GEMM_SHARED(64, hold) > g->dev->shared_bytes)
        return 16;
  return rows > 32 ? 64 : 16;
}

/* y[rows of all experts] = packed w^T; a launch for each way that weights are held. */
static void multiply(mr_gpu *g, int layer, int role, int tile, float *y, int n, int k) {
  static const mr_gpu_kernel kernels[4][2] = {{MR_GPU_grouped16_bf16, MR_GPU_grouped64_bf16},
                                              {MR_GPU_grouped16_pair, MR_GPU_grouped64_pair},
                                              {MR_GPU_grouped16_int8, MR_GPU_grouped64_int8},
                                              {MR_GPU_grouped16_int4, MR_GPU_grouped64_int4}};
  struct mr_gpu_moe *x = g->moe;
  size_t at = (size_t)layer * ROLES + (size_t)role;
  int rows = (int)chosen_rows(g);
  mr_gpu_grouped a = {.experts = x->experts + at * (size_t)x->n,
                      .items = x->items,
                      .n_items = x->n_items,
                      .a = x->packed,
                      .a_plane = plane_of(g),
                      .y = y,
                      .ld = mr_gpu_ld((size_t)(role == DOWN ? n : x->width)),
                      .n = n,
                      .k = mr_gpu_padded(k)};
  int items = rows / tile + (x->n < rows ? x->n : rows); /* at most */
  for (int hold = MR_GPU_BF16; hold <= MR_GPU_INT4; hold++) {
    mr_grid grid = {.blocks = {(uint32_t)mr_gpu_up(n, MR_GPU_GEMM_COLS), (uint32_t)items, 1},
                    .warps = MR_GPU_WARPS,
                    .shared = MR_GPU_GEMM_SHARED(tile, hold)};
    if (x->holds[at] >> hold & 1)
      mr_gpu_launch(g, kernels[hold][tile == 64], grid, &a);
  }
  /* which experts are met is known to the device alone: so many if all are as likely */
  double met = x->n * (1 - pow(1 - (double)g->m->c.n_experts_used / x->n, g->batch.n_tokens));
  const mr_expert *first = &g->m->layers[layer].experts[0];
  g->base.stats.flops += 2.0 * rows * n * k;
  g->base.stats.bytes += met * mr_gpu_held_bytes(mr_gpu_find(g, matrix_of(first, role)));
}

static void pack_input(mr_gpu *g, const mr_experts *op, bool shared) {
  struct mr_gpu_moe *x = g->moe;
  size_t first = shared ? chosen_rows(g) : 0;
  mr_gpu_pack p = {.x = op->x->p,
                   .ld = op->x->ld,
                   .out = x->packed + first * (size_t)mr_gpu_padded(op->x->cols),
                   .plane = plane_of(g),
                   .from = shared ? NULL : x->from,
                   .factor = !shared && g->m->c.arch.route_input ? x->factor : NULL,
                   .norm = mr_gpu_norm_of(g, &op->norm, op->x->cols),
                   .cols = op->x->cols};
  mr_gpu_pack_rows(g, &p, shared ? g->batch.n_tokens : (int)chosen_rows(g));
}

static void pack_inner(mr_gpu *g, bool shared) {
  struct mr_gpu_moe *x = g->moe;
  const mr_config *c = &g->m->c;
  size_t first = shared ? chosen_rows(g) : 0, ld = mr_gpu_ld((size_t)x->width);
  mr_gpu_pack p = {.x = x->inner[0] + first * ld,
                   .up = x->inner[1] + first * ld,
                   .ld = ld,
                   .ld_up = ld,
                   .out = x->packed + first * (size_t)mr_gpu_padded(c->d_expert),
                   .plane = plane_of(g),
                   .norm = {.kind = MR_GPU_NORM_NONE},
                   .gate = 1,
                   .act = c->arch.swiglu_clamp ? MR_GPU_CLAMPED : (int32_t)c->arch.act,
                   .act_p = {c->act_alpha, c->act_limit},
                   .cols = shared ? c->d_shared : c->d_expert};
  mr_gpu_pack_rows(g, &p, shared ? g->batch.n_tokens : (int)chosen_rows(g));
}

/* y = a row of the shared expert; k: padded columns of the chosen ones' packed rows, before. */
static void multiply_shared(mr_gpu *g, const mr_matrix *w, int k, float *y, size_t ld) {
  size_t first = chosen_rows(g);
  mr_gpu_multiply(g, mr_gpu_use(g, w), g->moe->packed + first * (size_t)k, plane_of(g),
                  g->batch.n_tokens, y + first * ld, ld, false);
}

/* What adapters add to gate and up, or to down. */
static void adapt(mr_gpu *g, const mr_experts *op, bool down) {
  struct mr_gpu_moe *x = g->moe;
  const mr_config *c = &g->m->c;
  mr_gpu_lora_experts a = {.layer = op->layer,
                           .a = x->packed,
                           .plane = plane_of(g),
                           .a_first = (size_t)mr_gpu_padded(down ? c->d_expert : c->d_model),
                           .first = x->first,
                           .from = x->from,
                           .rows = (int)chosen_rows(g) / x->n,
                           .y = {down ? x->y : x->inner[0], down ? NULL : x->inner[1]},
                           .ld = mr_gpu_ld((size_t)(down ? c->d_model : x->width))};
  if (mr_gpu_lora_has_experts(g))
    mr_gpu_lora_run_experts(g, &a);
}

static void multiply_all(mr_gpu *g, const mr_experts *op, int layer, int tile) {
  struct mr_gpu_moe *x = g->moe;
  const mr_config *c = &g->m->c;
  const mr_expert *last = c->d_shared > 0 ? &op->layer->experts[x->n] : NULL;
  size_t ld = mr_gpu_ld((size_t)x->width);
  int k = mr_gpu_padded(c->d_model), inner = mr_gpu_padded(c->d_expert);
  pack_input(g, op, false);
  multiply(g, layer, GATE, tile, x->inner[0], c->d_expert, c->d_model);
  multiply(g, layer, UP, tile, x->inner[1], c->d_expert, c->d_model);
  if (last) {
    pack_input(g, op, true);
    multiply_shared(g, &last->gate, k, x->inner[0], ld);
    multiply_shared(g, &last->up, k, x->inner[1], ld);
  }
  adapt(g, op, false);
  pack_inner(g, false);
  multiply(g, layer, DOWN, tile, x->y, c->d_model, c->d_expert);
  if (last) {
    pack_inner(g, true);
    multiply_shared(g, &last->down, inner, x->y, mr_gpu_ld((size_t)c->d_model));
  }
  adapt(g, op, true);
}

void mr_gpu_run_experts(mr_backend *b, const mr_experts *op) {
  mr_gpu *g = (mr_gpu *)b;
  struct mr_gpu_moe *x = g->moe;
  int layer = (int)(op->layer - g->m->layers);
  int tile = tile_rows(g, x->holds + (size_t)layer * ROLES);
  if (op->layer->shared_gate)
    open_gate(g, op);
  route(g, op);
  sort(g, tile);
  mr_gpu_use(g, &op->layer->experts[0].gate); /* a layer that comes over comes as a whole */
  multiply_all(g, op, layer, tile);
  mr_gpu_mix a = {.out = op->out->p,
                  .y = x->y,
                  .ld_out = op->out->ld,
                  .ld_y = mr_gpu_ld((size_t)g->m->c.d_model),
                  .weight = x->weight,
                  .slot = x->slot,
                  .each = x->each,
                  .cols = op->out->cols};
  mr_gpu_launch(g, MR_GPU_mix,
                (mr_grid){.blocks = {(uint32_t)g->batch.n_tokens, 1, 1}, .warps = MR_GPU_WARPS},
                &a);
}
