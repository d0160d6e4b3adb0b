/* A token's row goes to its experts as so many slots. Slots are sorted by expert (and among those
 * of one by adapter, where adapters change experts); each expert's slots are then consecutive rows,
 * and its matrices are multiplied with them in one GEMM. What a token gets is summed over its slots
 * in the order of its choice, so that neither the sorting nor the neighbours change bits. The
 * shared expert is one more that every token goes to. */
#include "src/backend_cpu_experts.h"

#include <math.h>
#include <string.h>

#include "io/mem.h"
#include "io/sys.h"
#include "src/backend_cpu_lora.h"
#include "src/route.h"

#define ITEMS_PER_WORKER 8
#define READ_ROWS 16 /* a panel is read in about the time that it is multiplied with as many rows  \
                      */

struct mr_cpu_experts {
  int n, each;      /* experts with the shared one; slots of a token */
  int width;        /* of inner rows */
  int32_t *chosen;  /* [max_tokens * each] experts; owned, as all that follow */
  float *weight;    /* the same */
  int32_t *slot_of; /* the same: where it was sorted to */
  int32_t *origin;  /* [slots] which (token, choice) lies in a slot */
  int32_t *first;   /* [n + 1] slots of expert e: first[e] .. first[e + 1] - 1 */
  int kinds;        /* adapters and none, where they change experts; else 1 */
  int32_t *bucket;  /* [n * kinds + 1] the same for slots of expert e and adapter a */
  int32_t *item;    /* [n + 1] work items before expert e */
  int32_t *cut;     /* [n] panels of each of them */
  float *room;      /* [workers, 2n] */
  uint8_t *packed;  /* [slots] packed rows */
  float *inner[2];  /* [slots, width] gate and up */
  float *y;         /* [slots, d_model] */
};

typedef struct job {
  mr_cpu *c;
  const mr_experts *op;
  mr_cpu_experts *x;
  const mr_gemm_ops *gemm;
  size_t row_bytes;
  int slots, chunk, tokens;
  bool down; /* which of an expert's matrices */
} job;

bool mr_cpu_experts_open(mr_cpu_experts **out, const mr_cpu *c) {
  const mr_config *g = &c->m->c;
  if (g->n_experts < 1)
    return true;
  mr_cpu_experts *x = *out = mr_mem_alloc(1, sizeof *x);
  if (!x)
    return false;
  x->n = mr_layer_experts(c->m);
  x->each = g->n_experts_used + (g->d_shared > 0);
  x->width = g->d_expert > g->d_shared ? g->d_expert : g->d_shared;
  size_t slots = (size_t)c->max_tokens * (size_t)x->each, widest = 64, bytes;
  for (int s = 0; s < MR_SCHEMES; s++) {
    size_t a = c->k->gemm[s].row_bytes(g->d_model), b = c->k->gemm[s].row_bytes(x->width);
    widest = a > widest ? a : widest;
    widest = b > widest ? b : widest;
  }
  const mr_lora *l = c->m->lora && c->m->lora->experts ? c->m->lora : NULL;
  x->kinds = l ? l->n + 1 : 1;
  x->bucket = mr_mem_alloc((size_t)x->n * (size_t)x->kinds + 1, sizeof *x->bucket);
  x->chosen = mr_mem_alloc(slots, sizeof *x->chosen);
  x->weight = mr_mem_alloc(slots, sizeof *x->weight);
  x->slot_of = mr_mem_alloc(slots, sizeof *x->slot_of);
  x->origin = mr_mem_alloc(slots, sizeof *x->origin);
  x->first = mr_mem_alloc((size_t)x->n + 1, sizeof *x->first);
  x->item = mr_mem_alloc((size_t)x->n + 1, sizeof *x->item);
  x->cut = mr_mem_alloc((size_t)x->n, sizeof *x->cut);
  x->room = mr_mem_alloc((size_t)c->workers * 2 * (size_t)x->n, sizeof *x->room);
  x->packed = mr_mem_mul(slots, widest, &bytes) ? mr_mem_pages(bytes) : NULL;
  x->inner[0] = mr_mem_alloc(slots, (size_t)x->width * sizeof(float));
  x->inner[1] = mr_mem_alloc(slots, (size_t)x->width * sizeof(float));
  x->y = mr_mem_alloc(slots, (size_t)g->d_model * sizeof(float));
  return x->chosen && x->weight && x->slot_of && x->origin && x->first && x->bucket && x->item &&
         x->cut && x->room && x->packed && x->inner[0] && x->inner[1] && x->y;
}

void mr_cpu_experts_close(mr_cpu_experts *x) {
  if (!x)
    return;
  void *all[] = {x->chosen, x->weight, x->slot_of,  x->origin,   x->first, x->item,   x->cut,
                 x->room,   x->packed, x->inner[0], x->inner[1], x->y,     x->bucket, x};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    mr_mem_free(all[i]);
}

static void each_chunk(job *j, int n, mr_pool_fn fn) {
  j->chunk = mr_cpu_chunk(j->c, n);
  mr_pool_run(j->c->pool, fn, j, (n + j->chunk - 1) / j->chunk);
}

static int stop(const job *j, int item, int n) {
  return (item + 1) * j->chunk < n ? (item + 1) * j->chunk : n;
}

static float *line_of(const job *j, int worker) {
  return j->c->line + (size_t)worker * j->c->line_ld;
}

/* ------------------------------------------------------------------ routing */

static void route_rows(void *ctx, int item, int worker) {
  const job *j = ctx;
  mr_cpu_experts *x = j->x;
  const mr_config *g = &j->c->m->c;
  const mr_layer *l = j->op->layer;
  for (int t = item * j->chunk; t < stop(j, item, j->tokens); t++) {
    int32_t *chosen = x->chosen + (size_t)t * (size_t)x->each;
    float *weight = x->weight + (size_t)t * (size_t)x->each;
    mr_route(g, mr_cpu_row(j->op->scores, t), l->route_bias,
             x->room + (size_t)worker * 2 * (size_t)x->n, chosen, weight);
    if (g->d_shared == 0)
      continue;
    chosen[g->n_experts_used] = g->n_experts;
    weight[g->n_experts_used] = g->shared_scale;
    if (l->shared_gate) {
      float *line = line_of(j, worker), sum = 0;
      mr_cpu_norm(j->c, line, mr_cpu_row(j->op->x, t), g->d_model, &j->op->norm);
      for (int i = 0; i < g->d_model; i++)
        sum += line[i] * l->shared_gate[i];
      weight[g->n_experts_used] *= 1 / (1 + expf(-sum));
    }
  }
}

/* Expert and adapter of slot i before it is sorted. */
static int bucket_of(const job *j, int i) {
  const mr_cpu_experts *x = j->x;
  int adapter = x->kinds > 1 ? mr_cpu_lora_of(j->c->lora, i / x->each) + 1 : 0;
  return x->chosen[i] * x->kinds + adapter;
}

/* A counting sort of slots by bucket. */
static void sort_slots(job *j) {
  mr_cpu_experts *x = j->x;
  int n = x->n * x->kinds;
  for (int b = 0; b <= n; b++)
    x->bucket[b] = 0;
  for (int i = 0; i < j->slots; i++)
    x->bucket[bucket_of(j, i) + 1]++;
  for (int b = 0; b < n; b++)
    x->bucket[b + 1] += x->bucket[b];
  for (int i = 0; i < j->slots; i++) {
    int32_t at = x->bucket[bucket_of(j, i)]++;
    x->slot_of[i] = at;
    x->origin[at] = i;
  }
  for (int b = n; b > 0; b--)
    x->bucket[b] = x->bucket[b - 1];
  x->bucket[0] = 0;
  for (int e = 0; e <= x->n; e++)
    x->first[e] = x->bucket[e * x->kinds];
}

/* ------------------------------------------------------------------ the two GEMMs */

/* A token's row is normed and packed once and copied to its slots, but where its weights scale the
 * input. */
static void pack_inputs(void *ctx, int item, int worker) {
  const job *j = ctx;
  const mr_cpu_experts *x = j->x;
  const mr_config *g = &j->c->m->c;
  float *line = line_of(j, worker);
  for (int t = item * j->chunk; t < stop(j, item, j->tokens); t++) {
    const uint8_t *plain = NULL;
    for (int i = t * x->each; i < (t + 1) * x->each; i++) {
      uint8_t *to = x->packed + (size_t)x->slot_of[i] * j->row_bytes;
      bool scaled = g->arch.route_input && x->chosen[i] < g->n_experts;
      if (plain && !scaled) {
        memcpy(to, plain, j->row_bytes);
        continue;
      }
      mr_cpu_norm(j->c, line, mr_cpu_row(j->op->x, t), g->d_model, &j->op->norm);
      if (scaled)
        j->c->k->scale(line, x->weight[i], g->d_model);
      j->gemm->pack_row(to, line, g->d_model);
      plain = scaled ? plain : to;
    }
  }
}

/* Where the inner row of slot s lies packed; experts differ in width, so their rows do in bytes. */
static uint8_t *inner_row(const job *j, int s) {
  const mr_cpu_experts *x = j->x;
  const mr_config *g = &j->c->m->c;
  int e = x->chosen[x->origin[s]], f = e < g->n_experts ? g->d_expert : g->d_shared;
  size_t begin = (size_t)x->first[e];
  return x->packed + begin * j->row_bytes + ((size_t)s - begin) * j->gemm->row_bytes(f);
}

static void pack_inner(void *ctx, int item, int worker) {
  const job *j = ctx;
  const mr_cpu_experts *x = j->x;
  const mr_config *g = &j->c->m->c;
  float *line = line_of(j, worker), clamp[2] = {g->act_alpha, g->act_limit};
  for (int s = item * j->chunk; s < stop(j, item, j->slots); s++) {
    size_t at = (size_t)s * (size_t)x->width;
    int f = x->chosen[x->origin[s]] < g->n_experts ? g->d_expert : g->d_shared;
    mr_linear op = {.act = g->arch.act, .clamp = g->arch.swiglu_clamp ? clamp : NULL};
    mr_cpu_gate(j->c, line, x->inner[0] + at, x->inner[1] + at, f, &op);
    j->gemm->pack_row(inner_row(j, s), line, f);
  }
}

static void multiply(const job *j, int e, const mr_matrix *w, float *y, size_t ld, int p0) {
  const mr_cpu_experts *x = j->x;
  int total = (w->n + j->gemm->nr - 1) / j->gemm->nr;
  int p1 = p0 + x->cut[e] < total ? p0 + x->cut[e] : total;
  size_t from = (size_t)x->first[e];
  j->gemm->gemm(y + from * ld, ld, x->packed + from * j->row_bytes, x->first[e + 1] - x->first[e],
                w->packed, p0, p1, w->n, w->k, w->bias, 0);
}

static void multiply_item(void *ctx, int item, int worker) {
  const job *j = ctx;
  const mr_cpu_experts *x = j->x;
  int lo = 0, hi = x->n, per = j->down ? 1 : 2;
  (void)worker;
  while (hi - lo > 1) { /* the last expert whose items begin at or before this one */
    int mid = (lo + hi) / 2;
    *(x->item[mid] <= item ? &lo : &hi) = mid;
  }
  const mr_expert *w = &j->op->layer->experts[lo];
  int at = item - x->item[lo], p0 = at / per * x->cut[lo];
  if (j->down)
    multiply(j, lo, &w->down, x->y, (size_t)j->c->m->c.d_model, p0);
  else
    multiply(j, lo, at % 2 ? &w->up : &w->gate, x->inner[at % 2], (size_t)x->width, p0);
}

/* Cuts each expert's panels so that all items take about as long: one with many rows (the shared
 * one has them all) gets more of them. */
static void cut_items(job *j, const mr_expert *w, int per) {
  mr_cpu_experts *x = j->x;
  double cost = 0;
  int nr = j->gemm->nr;
  for (int e = 0; e < x->n; e++) {
    int rows = x->first[e + 1] - x->first[e], n = j->down ? w[e].down.n : w[e].up.n;
    cost += rows ? (double)per * ((n + nr - 1) / nr) * (rows + READ_ROWS) : 0;
  }
  cost /= j->c->workers * ITEMS_PER_WORKER;
  x->item[0] = 0;
  for (int e = 0; e < x->n; e++) {
    int rows = x->first[e + 1] - x->first[e], n = j->down ? w[e].down.n : w[e].up.n;
    int panels = (n + nr - 1) / nr, cut = (int)(cost / (rows + READ_ROWS));
    x->cut[e] = cut < 1 ? 1 : cut < panels ? cut : panels;
    x->item[e + 1] = x->item[e] + (rows ? per * ((panels + x->cut[e] - 1) / x->cut[e]) : 0);
  }
}

/* One ragged GEMM over all experts that have slots. */
static void run_gemm(job *j, bool down) {
  mr_cpu_experts *x = j->x;
  mr_step_stats *s = &j->c->base.stats;
  const mr_expert *w = j->op->layer->experts;
  int per = down ? 1 : 2, nr = j->gemm->nr;
  double start = mr_sys_seconds();
  j->down = down;
  cut_items(j, w, per);
  for (int e = 0; e < x->n; e++) {
    const mr_matrix *m = down ? &w[e].down : &w[e].up;
    int rows = x->first[e + 1] - x->first[e], panels = (m->n + nr - 1) / nr;
    s->flops += 2.0 * per * rows * m->n * m->k;
    s->bytes += rows ? (double)per * panels * (double)j->gemm->panel_bytes(m->k) : 0;
  }
  mr_pool_run(j->c->pool, multiply_item, j, x->item[x->n]);
  s->gemm_s += mr_sys_seconds() - start;
}

/* What the adapter adds to the slots of one expert and adapter. */
static void adapt_item(void *ctx, int item, int worker) {
  const job *j = ctx;
  const mr_cpu_experts *x = j->x;
  int e = item / x->kinds, a = item % x->kinds, from = x->bucket[item];
  mr_cpu_lora_slots s = {.rows = x->bucket[item + 1] - from, .n = j->down ? 1 : 2};
  const mr_expert *w = &j->op->layer->experts[e];
  if (a == 0 || s.rows == 0)
    return;
  s.ld = j->down ? (size_t)j->c->m->c.d_model : (size_t)x->width;
  s.w[0] = j->down ? &w->down : &w->gate;
  s.w[1] = &w->up;
  s.y[0] = (j->down ? x->y : x->inner[0]) + (size_t)from * s.ld;
  s.y[1] = x->inner[1] + (size_t)from * s.ld;
  s.k = s.w[0]->k;
  s.x = j->down ? inner_row(j, from) : x->packed + (size_t)from * j->row_bytes;
  for (int i = 0; i < s.n; i++)
    s.link[i] = s.w[i]->lora ? &s.w[i]->lora[a - 1] : NULL;
  mr_cpu_lora_slots_add(j->c, &s, worker);
}

static void adapt(job *j, bool down) {
  double start = mr_sys_seconds();
  j->down = down;
  if (j->x->kinds > 1)
    mr_pool_run(j->c->pool, adapt_item, j, j->x->n * j->x->kinds);
  j->c->base.stats.gemm_s += mr_sys_seconds() - start;
}

static void combine_rows(void *ctx, int item, int worker) {
  const job *j = ctx;
  const mr_cpu_experts *x = j->x;
  const mr_config *g = &j->c->m->c;
  int d = g->d_model;
  (void)worker;
  for (int t = item * j->chunk; t < stop(j, item, j->tokens); t++) {
    float *out = mr_cpu_row(j->op->out, t);
    for (int i = 0; i < d; i++)
      out[i] = 0;
    for (int k = 0; k < x->each; k++) {
      int i = t * x->each + k;
      bool weighed = g->arch.route_input && x->chosen[i] < g->n_experts;
      j->c->k->axpy(out, x->y + (size_t)x->slot_of[i] * (size_t)d, weighed ? 1 : x->weight[i], d);
    }
  }
}

void mr_cpu_run_experts(mr_backend *b, const mr_experts *op) {
  mr_cpu *c = (mr_cpu *)b;
  job j = {.c = c, .op = op, .x = c->experts, .tokens = c->batch.n_tokens};
  const mr_matrix *up = &op->layer->experts[0].up;
  j.gemm = &c->k->gemm[up->scheme];
  j.slots = j.tokens * j.x->each;
  each_chunk(&j, j.tokens, route_rows);
  sort_slots(&j);
  j.row_bytes = j.gemm->row_bytes(c->m->c.d_model);
  each_chunk(&j, j.tokens, pack_inputs);
  run_gemm(&j, false);
  adapt(&j, false);
  j.row_bytes = j.gemm->row_bytes(j.x->width);
  each_chunk(&j, j.slots, pack_inner);
  run_gemm(&j, true);
  adapt(&j, true);
  each_chunk(&j, j.tokens, combine_rows);
}
