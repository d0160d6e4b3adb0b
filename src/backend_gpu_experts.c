/* Experts on the device. Rows are routed by the host (src/route.h) from the scores, which are
 * waited for; slots are sorted by expert as on the CPU (backend_cpu_experts.c), and each expert's
 * rows, then consecutive, are multiplied with its matrices. */
#include "src/backend_gpu_lora.h"

#include <string.h>

#include "io/mem.h"
#include "src/route.h"

struct mr_gpu_moe {
  int n, each, width;  /* experts with the shared one; slots of a token; of inner rows */
  int k[2];            /* padded columns of a packed input and inner row */
  mr_gpu_bf16 *packed; /* [slots] packed rows, two planes; the device's, as all that follow */
  size_t plane;
  float *inner[2], *y; /* [slots, width] gate and up; [slots, d_model] */
  float *gate;         /* [max_tokens] of the shared expert, or NULL */
  mr_gpu_side side;
  /* the host's */
  float *scores;   /* [max_tokens, ld] pinned; owned, as all that follow */
  float *shared;   /* [max_tokens] pinned */
  int32_t *chosen; /* [slots] */
  int32_t *first;  /* [n + 1] slots of expert e: first[e] .. first[e + 1] - 1 */
  float *room;     /* [2 n] */
};

typedef struct slots { /* of a step: the host's and the device's */
  int32_t *from, *slot_of, *first;
  float *weight, *factor;
  const int32_t *from_at, *slot_of_at, *first_at;
  const float *weight_at, *factor_at;
} slots;

static size_t padded(size_t cols) {
  return (cols + 15) & ~(size_t)15;
}

static int each_of(const mr_config *c) {
  return c->n_experts_used + (c->d_shared > 0);
}

static int width_of(const mr_config *c) {
  return c->d_expert > c->d_shared ? c->d_expert : c->d_shared;
}

static size_t plane_of(const mr_config *c, size_t n) {
  int a = mr_gpu_padded(c->d_model), b = mr_gpu_padded(width_of(c));
  return n * (size_t)(a > b ? a : b);
}

static size_t side_bytes(size_t n, int experts) {
  return 4 * (n * sizeof(int32_t) + 64) + ((size_t)experts + 1) * sizeof(int32_t) + 64;
}

size_t mr_gpu_moe_bytes(const mr_model *m, int max_tokens) {
  const mr_config *c = &m->c;
  if (c->n_experts < 1)
    return 0;
  size_t n = (size_t)max_tokens * (size_t)each_of(c);
  return 4 * plane_of(c, n) +
         n * (2 * padded((size_t)width_of(c)) + padded((size_t)c->d_model)) * sizeof(float) +
         side_bytes(n, mr_layer_experts(m)) + (size_t)max_tokens * sizeof(float) + 8 * 256;
}

static mr_code take_host(mr_gpu *g, struct mr_gpu_moe *x, size_t n) {
  size_t t = (size_t)g->max_tokens, ld = padded((size_t)g->m->c.n_experts);
  x->chosen = mr_mem_alloc(n, sizeof *x->chosen);
  x->first = mr_mem_alloc((size_t)x->n + 2, sizeof *x->first);
  x->room = mr_mem_alloc(2 * (size_t)x->n, sizeof *x->room);
  mr_code rc = g->dev->ops->host_alloc(g->dev, t * ld * sizeof(float), (void **)&x->scores);
  if (!rc)
    rc = g->dev->ops->host_alloc(g->dev, t * sizeof(float), (void **)&x->shared);
  return rc ? rc : x->chosen && x->first && x->room ? MR_OK : MR_E_NOMEM;
}

mr_code mr_gpu_moe_open(mr_gpu *g, mr_err *err) {
  const mr_config *c = &g->m->c;
  (void)err;
  if (c->n_experts < 1)
    return MR_OK;
  struct mr_gpu_moe *x = g->moe = mr_mem_alloc(1, sizeof *x);
  if (!x)
    return MR_E_NOMEM;
  size_t n = (size_t)g->max_tokens * (size_t)each_of(c);
  x->n = mr_layer_experts(g->m);
  x->each = each_of(c);
  x->width = width_of(c);
  x->plane = plane_of(c, n);
  x->packed = mr_device_take(g->dev, 2 * x->plane * sizeof *x->packed);
  for (int i = 0; i < 2; i++)
    x->inner[i] = mr_device_take(g->dev, n * padded((size_t)x->width) * sizeof(float));
  x->y = mr_device_take(g->dev, n * padded((size_t)c->d_model) * sizeof(float));
  x->gate = mr_device_take(g->dev, (size_t)g->max_tokens * sizeof(float));
  if (!x->packed || !x->inner[0] || !x->inner[1] || !x->y || !x->gate)
    return MR_E_NOMEM;
  mr_code rc = mr_gpu_side_open(g, &x->side, side_bytes(n, x->n));
  return rc ? rc : take_host(g, x, n);
}

void mr_gpu_moe_close(mr_gpu *g) {
  struct mr_gpu_moe *x = g->moe;
  if (!x)
    return;
  void *pinned[] = {x->side.host, x->scores, x->shared};
  for (size_t i = 0; i < sizeof pinned / sizeof *pinned; i++)
    if (pinned[i])
      g->dev->ops->host_release(g->dev, pinned[i]);
  mr_mem_free(x->chosen);
  mr_mem_free(x->first);
  mr_mem_free(x->room);
  mr_mem_free(x);
}

/* ------------------------------------------------------------------ routing */

/* The router's scores and the shared expert's gate, on the host. */
static void fetch_scores(mr_gpu *g, const mr_experts *op) {
  struct mr_gpu_moe *x = g->moe;
  size_t t = (size_t)g->batch.n_tokens;
  if (op->layer->shared_gate) {
    mr_gpu_dot a = {.x = op->x->p,
                    .w = mr_gpu_vector_of(g, op->layer->shared_gate, (size_t)op->x->cols),
                    .out = x->gate,
                    .ld = op->x->ld,
                    .norm = mr_gpu_norm_of(g, &op->norm, op->x->cols),
                    .cols = op->x->cols};
    mr_gpu_launch(g, MR_GPU_dot,
                  (mr_grid){.blocks = {(uint32_t)t, 1, 1},
                            .warps = MR_GPU_WARPS,
                            .shared = MR_GPU_REDUCE_SHARED},
                  &a);
  }
  if (!g->rc && op->layer->shared_gate)
    g->rc =
        g->dev->ops->copy(g->dev, g->stream, MR_TO_HOST, x->shared, x->gate, t * sizeof *x->shared);
  if (!g->rc)
    g->rc = g->dev->ops->copy(g->dev, g->stream, MR_TO_HOST, x->scores, op->scores->p,
                              t * op->scores->ld * sizeof(float));
  if (!g->rc)
    g->rc = g->dev->ops->sync(g->dev, g->stream);
}

static void route(mr_gpu *g, const mr_experts *op, float *weight) {
  struct mr_gpu_moe *x = g->moe;
  const mr_config *c = &g->m->c;
  for (int t = 0; t < g->batch.n_tokens; t++) {
    int32_t *chosen = x->chosen + (size_t)t * (size_t)x->each;
    float *w = weight + (size_t)t * (size_t)x->each;
    mr_route(c, x->scores + (size_t)t * op->scores->ld, op->layer->route_bias, x->room, chosen, w);
    if (c->d_shared == 0)
      continue;
    chosen[c->n_experts_used] = c->n_experts;
    w[c->n_experts_used] = (op->layer->shared_gate ? x->shared[t] : 1) * c->shared_scale;
  }
}

/* A counting sort of slots by expert. Weights that scale the input do not scale the output. */
static void sort_slots(mr_gpu *g, slots *s) {
  struct mr_gpu_moe *x = g->moe;
  const mr_config *c = &g->m->c;
  int n = g->batch.n_tokens * x->each;
  memset(x->first, 0, ((size_t)x->n + 2) * sizeof *x->first);
  for (int i = 0; i < n; i++)
    x->first[x->chosen[i] + 2]++;
  for (int e = 0; e < x->n; e++)
    x->first[e + 2] += x->first[e + 1];
  for (int i = 0; i < n; i++) {
    int32_t at = x->first[x->chosen[i] + 1]++;
    bool input = c->arch.route_input && x->chosen[i] < c->n_experts;
    s->slot_of[i] = at;
    s->from[at] = i / x->each;
    s->factor[at] = input ? s->weight[i] : 1;
    if (input)
      s->weight[i] = 1;
  }
  memcpy(s->first, x->first, ((size_t)x->n + 1) * sizeof *s->first);
}

static bool take_slots(mr_gpu *g, slots *s) {
  struct mr_gpu_moe *x = g->moe;
  size_t bytes = (size_t)g->batch.n_tokens * (size_t)x->each * sizeof(int32_t);
  x->side.used = 0;
  s->from = mr_gpu_side_take(&x->side, bytes, (const void **)&s->from_at);
  s->slot_of = mr_gpu_side_take(&x->side, bytes, (const void **)&s->slot_of_at);
  s->weight = mr_gpu_side_take(&x->side, bytes, (const void **)&s->weight_at);
  s->factor = mr_gpu_side_take(&x->side, bytes, (const void **)&s->factor_at);
  bytes = ((size_t)x->n + 1) * sizeof *s->first;
  s->first = mr_gpu_side_take(&x->side, bytes, (const void **)&s->first_at);
  return s->from && s->slot_of && s->weight && s->factor && s->first;
}

/* ------------------------------------------------------------------ products */

/* y[slots of e] = packed w_e^T. */
static void multiply(mr_gpu *g, int e, const mr_matrix *w, size_t plane, float *y, int cols) {
  struct mr_gpu_moe *x = g->moe;
  const mr_gpu_matrix *at = mr_gpu_use(g, w);
  size_t first = (size_t)x->first[e], ld = padded((size_t)cols);
  int m = x->first[e + 1] - x->first[e];
  /* inner rows of the shared expert, the last one, may be wider or narrower than the others: each
   * expert's rows are packed from its first slot on, in the row length of the widest */
  const mr_gpu_bf16 *a = x->packed + first * (plane_of(&g->m->c, 1));
  if (m)
    mr_gpu_multiply(g, at, a, plane, m, y + first * ld, ld, false);
}

static void pack_input(mr_gpu *g, const mr_experts *op, const slots *s, int e, size_t plane) {
  struct mr_gpu_moe *x = g->moe;
  size_t first = (size_t)x->first[e];
  mr_gpu_pack p = {.x = op->x->p,
                   .ld = op->x->ld,
                   .out = x->packed + first * plane_of(&g->m->c, 1),
                   .plane = plane,
                   .from = s->from_at + first,
                   .factor = s->factor_at + first,
                   .norm = mr_gpu_norm_of(g, &op->norm, op->x->cols),
                   .cols = op->x->cols};
  mr_gpu_pack_rows(g, &p, x->first[e + 1] - x->first[e]);
}

static void pack_inner(mr_gpu *g, int e, int cols, size_t plane) {
  struct mr_gpu_moe *x = g->moe;
  const mr_config *c = &g->m->c;
  size_t first = (size_t)x->first[e], ld = padded((size_t)x->width);
  mr_gpu_pack p = {.x = x->inner[0] + first * ld,
                   .up = x->inner[1] + first * ld,
                   .ld = ld,
                   .ld_up = ld,
                   .out = x->packed + first * plane_of(c, 1),
                   .plane = plane,
                   .norm = {.kind = MR_GPU_NORM_NONE},
                   .gate = 1,
                   .act = c->arch.swiglu_clamp ? MR_GPU_CLAMPED : (int32_t)c->arch.act,
                   .act_p = {c->act_alpha, c->act_limit},
                   .cols = cols};
  mr_gpu_pack_rows(g, &p, x->first[e + 1] - x->first[e]);
}

static int rows_of(const struct mr_gpu_moe *x, int e) {
  return x->first[e + 1] - x->first[e];
}

/* What adapters add to gate and up, or to down. */
static void adapt(mr_gpu *g, const mr_experts *op, const slots *s, size_t plane, bool down) {
  struct mr_gpu_moe *x = g->moe;
  mr_gpu_lora_experts a = {.layer = op->layer,
                           .a = x->packed,
                           .plane = plane,
                           .a_first = plane_of(&g->m->c, 1),
                           .first = s->first_at,
                           .from = s->from_at,
                           .y = {down ? x->y : x->inner[0], down ? NULL : x->inner[1]},
                           .ld = padded((size_t)(down ? g->m->c.d_model : x->width))};
  if (!mr_gpu_lora_has_experts(g))
    return;
  for (int e = 0; e < x->n; e++)
    a.most = rows_of(x, e) > a.most ? rows_of(x, e) : a.most;
  mr_gpu_lora_run_experts(g, &a);
}

static void multiply_all(mr_gpu *g, const mr_experts *op, const slots *s) {
  struct mr_gpu_moe *x = g->moe;
  const mr_config *c = &g->m->c;
  size_t plane = g->scheme == MR_GPU_EXACT ? x->plane : 0;
  for (int e = 0; e < x->n; e++) {
    const mr_expert *w = &op->layer->experts[e];
    if (!rows_of(x, e))
      continue;
    pack_input(g, op, s, e, plane);
    multiply(g, e, &w->gate, plane, x->inner[0], x->width);
    multiply(g, e, &w->up, plane, x->inner[1], x->width);
  }
  adapt(g, op, s, plane, false);
  for (int e = 0; e < x->n; e++) {
    if (!rows_of(x, e))
      continue;
    pack_inner(g, e, e < c->n_experts ? c->d_expert : c->d_shared, plane);
    multiply(g, e, &op->layer->experts[e].down, plane, x->y, c->d_model);
  }
  adapt(g, op, s, plane, true);
}

void mr_gpu_run_experts(mr_backend *b, const mr_experts *op) {
  mr_gpu *g = (mr_gpu *)b;
  struct mr_gpu_moe *x = g->moe;
  slots s;
  fetch_scores(g, op);
  if (g->rc)
    return;
  if (!take_slots(g, &s)) {
    g->rc = MR_E_INTERNAL;
    return;
  }
  route(g, op, s.weight);
  sort_slots(g, &s);
  g->rc = g->dev->ops->copy(g->dev, g->stream, MR_TO_DEVICE, x->side.device, x->side.host,
                            x->side.used);
  multiply_all(g, op, &s);
  mr_gpu_mix a = {.out = op->out->p,
                  .y = x->y,
                  .ld_out = op->out->ld,
                  .ld_y = padded((size_t)g->m->c.d_model),
                  .weight = s.weight_at,
                  .slot = s.slot_of_at,
                  .each = x->each,
                  .cols = op->out->cols};
  mr_gpu_launch(g, MR_GPU_mix,
                (mr_grid){.blocks = {(uint32_t)g->batch.n_tokens, 1, 1}, .warps = MR_GPU_WARPS},
                &a);
}
