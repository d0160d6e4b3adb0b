#include "src/backend_gpu.h"

#include <math.h>
#include <string.h>

#include "io/mem.h"
#include "io/sys.h"
#include "src/backend_gpu_lora.h"

_Static_assert((int)MR_GPU_QUICK_GELU == (int)MR_ACT_QUICK_GELU && MR_GPU_PAGE == MR_KV_BLOCK,
               "kernels/gpu/args.h and kernels/kernels.h count alike");

#define WIDEN_ROWS 256 /* of a product: else each weight would be widened four times or more */

static mr_gpu *gpu(mr_backend *b) {
  return (mr_gpu *)b;
}

/* ------------------------------------------------------------------ buffers */

/* A library writes whole tiles of rows. */
static int room_of(const mr_device *d, int rows) {
  return d->gemm ? mr_gemm_padded(rows) : rows;
}

static mr_buf *buf_new(mr_backend *b, int rows, int cols) {
  mr_buf *buf = mr_mem_alloc(1, sizeof *buf);
  if (!buf)
    return NULL;
  *buf = (mr_buf){.ld = mr_gpu_ld((size_t)cols), .rows = rows, .cols = cols};
  buf->p =
      mr_device_take(gpu(b)->dev, (size_t)room_of(gpu(b)->dev, rows) * buf->ld * sizeof(float));
  if (buf->p)
    return buf;
  mr_mem_free(buf);
  return NULL;
}

/* Its memory is the arena's. */
static void buf_free(mr_backend *b, mr_buf *buf) {
  (void)b;
  mr_mem_free(buf);
}

static float *row(mr_backend *b, const mr_buf *buf, int i) {
  return gpu(b)->logits_host + (size_t)i * buf->ld;
}

/* ------------------------------------------------------------------ host's side */

static mr_code side_open(mr_gpu *g, size_t bytes) {
  mr_gpu_side *side = &g->side;
  side->cap = bytes;
  side->device = mr_device_take(g->dev, bytes);
  if (!side->device)
    return MR_E_NOMEM;
  return g->dev->ops->host_alloc(g->dev, bytes, (void **)&side->host);
}

void *mr_gpu_side_take(mr_gpu *g, size_t bytes, const void **device) {
  mr_gpu_side *side = &g->side;
  size_t size = (bytes + 63) & ~(size_t)63;
  if (size > side->cap - side->used)
    return NULL;
  *device = side->device + side->used;
  void *host = side->host + side->used;
  side->used += size;
  return host;
}

void mr_gpu_launch(mr_gpu *g, mr_gpu_kernel k, mr_grid grid, const void *args) {
  if (g->rc || !grid.blocks[0] || !grid.blocks[1] || !grid.blocks[2])
    return;
  g->rc = g->dev->ops->launch(g->dev, g->stream, k, &grid, args);
}

/* ------------------------------------------------------------------ the step */

static mr_rope_table *rope_for(mr_gpu *g, const mr_kv_seq *seq) {
  return seq->long_rope && g->rope[2].n_rot ? &g->rope[2] : &g->rope[0];
}

static void put_rope(mr_rope_table *t, int pos, float *to) {
  if (!t->n_rot)
    return;
  mr_rope_fill(t, pos);
  memcpy(to, mr_rope_row(t, pos), (size_t)t->n_rot * sizeof *to);
}

/* Queries of layers without rope grow with the position (llama4), or those of all (ministral3). */
static float temper(const mr_config *c, int pos) {
  double at = pos + (c->temper_all ? 0.0 : 1.0);
  double steps = c->temper_scale != 0 ? floor(at / c->temper_floor) : 0;
  return (float)(log1p(steps) * c->temper_scale + 1);
}

typedef struct step_rows { /* the host's side of what follows tokens */
  int32_t *token, *pos, *page;
  float *temper, *rope[2];
} step_rows;

static bool take_rows(mr_gpu *g, step_rows *r) {
  size_t n = (size_t)g->batch.n_tokens, rot = (size_t)g->rope[0].n_rot;
  g->side.used = 0;
  r->token = mr_gpu_side_take(g, n * sizeof *r->token, (const void **)&g->token);
  r->pos = mr_gpu_side_take(g, n * sizeof *r->pos, (const void **)&g->pos);
  r->page = mr_gpu_side_take(g, n * (size_t)mr_kv_groups_in(g->kv).n * sizeof *r->page,
                             (const void **)&g->page);
  r->temper = mr_gpu_side_take(g, n * sizeof *r->temper, (const void **)&g->temper);
  for (int i = 0; i < 2; i++)
    r->rope[i] = mr_gpu_side_take(g, n * rot * sizeof(float), (const void **)&g->rope_at[i]);
  return r->token && r->pos && r->page && r->temper && r->rope[0] && r->rope[1];
}

static void fill_rows(mr_gpu *g, const step_rows *r) {
  size_t at = 0, rot = (size_t)g->rope[0].n_rot;
  for (int i = 0; i < g->batch.n_runs; i++) {
    const mr_run *run = &g->batch.runs[i];
    for (int t = 0; t < run->n; t++, at++) {
      int pos = run->seq->len + t;
      r->token[at] = run->tokens[t];
      r->pos[at] = pos;
      for (int of = 0; of < mr_kv_groups_in(g->kv).n; of++)
        r->page[(size_t)of * (size_t)g->batch.n_tokens + at] =
            run->seq->pages[of * run->seq->cap_blocks + pos / MR_KV_BLOCK];
      r->temper[at] = temper(&g->m->c, pos);
      put_rope(rope_for(g, run->seq), pos, r->rope[0] + at * rot);
      put_rope(rope_for(g, run->seq) == &g->rope[2] ? &g->rope[2] : &g->rope[1], pos,
               r->rope[1] + at * rot);
    }
  }
}

static bool take_wanted(mr_gpu *g, const mr_batch *batch) {
  size_t n = (size_t)batch->n_wanted;
  int32_t *wanted = mr_gpu_side_take(g, n * sizeof *wanted, (const void **)&g->wanted);
  mr_gpu_ask *asks = mr_gpu_side_take(g, n * sizeof *asks, (const void **)&g->asks);
  if (!wanted || !asks)
    return false;
  memcpy(wanted, batch->wanted, n * sizeof *wanted);
  if (batch->asks)
    memcpy(asks, batch->asks, n * sizeof *asks);
  else
    g->asks = NULL;
  return true;
}

static mr_code begin(mr_backend *b, const mr_batch *batch, mr_err *err) {
  mr_gpu *g = gpu(b);
  if (batch->n_tokens > g->max_tokens || batch->n_wanted > g->max_logits)
    return mr_err_set(err, MR_E_INTERNAL, "a step of %d tokens is over the backend's %d",
                      batch->n_tokens, g->max_tokens);
  b->stats = (mr_step_stats){.seconds = -mr_sys_seconds()};
  g->batch = *batch;
  g->logits = NULL;
  g->rc = MR_OK;
  step_rows r;
  bool ok = take_rows(g, &r);
  if (ok)
    fill_rows(g, &r);
  if (!ok || !take_wanted(g, batch) || mr_gpu_tile_runs(g) || mr_gpu_lora_begin(g))
    return mr_err_set(err, MR_E_INTERNAL,
                      "a step needs more than the %zu bytes that are kept for its tables",
                      g->side.cap);
  mr_code rc = g->dev->ops->copy(g->dev, g->stream, MR_TO_DEVICE, g->side.device, g->side.host,
                                 g->side.used);
  return mr_device_fail(g->dev, rc, err);
}

/* What the rows of logits are asked for, or the rows. */
static mr_code take_logits(mr_gpu *g) {
  size_t n = (size_t)g->batch.n_wanted;
  if (!g->asks)
    return g->dev->ops->copy(g->dev, g->stream, MR_TO_HOST, g->logits_host, g->logits->p,
                             n * g->logits->ld * sizeof(float));
  mr_gpu_top a = {.x = g->logits->p,
                  .ld = g->logits->ld,
                  .ask = g->asks,
                  .out = g->best,
                  .cols = g->logits->cols};
  mr_gpu_launch(g, MR_GPU_top,
                (mr_grid){.blocks = {(uint32_t)n, 1, 1},
                          .warps = MR_GPU_TOP_WARPS,
                          .shared = MR_GPU_TOP_SHARED(a.cols)},
                &a);
  return g->rc ? g->rc
               : g->dev->ops->copy(g->dev, g->stream, MR_TO_HOST, g->best_host, g->best,
                                   n * sizeof *g->best);
}

static mr_code end(mr_backend *b, mr_err *err) {
  mr_gpu *g = gpu(b);
  mr_code rc = g->rc;
  if (!rc && g->logits && g->batch.n_wanted)
    rc = take_logits(g);
  mr_code waited = g->dev->ops->sync(g->dev, g->stream);
  rc = rc ? rc : waited;
  b->stats.seconds += mr_sys_seconds();
  b->stats.other_s = b->stats.seconds;
  return mr_device_fail(g->dev, rc, err);
}

static const mr_gpu_best *best(mr_backend *b, int i) {
  return &gpu(b)->best_host[i];
}

/* Rows that lie together go together. */
static mr_code fetch(mr_backend *b, const mr_buf *logits, const int32_t *rows, int n, mr_err *err) {
  mr_gpu *g = gpu(b);
  mr_code rc = MR_OK;
  for (int i = 0, end = 0; i < n && !rc; i = end) {
    for (end = i + 1; end < n && rows[end] == rows[end - 1] + 1;)
      end++;
    size_t at = (size_t)rows[i] * logits->ld;
    rc = g->dev->ops->copy(g->dev, g->stream, MR_TO_HOST, g->logits_host + at, logits->p + at,
                           (size_t)(end - i) * logits->ld * sizeof(float));
  }
  mr_code waited = g->dev->ops->sync(g->dev, g->stream);
  return mr_device_fail(g->dev, rc ? rc : waited, err);
}

/* ------------------------------------------------------------------ passes over rows */

static void embed(mr_backend *b, mr_buf *x) {
  mr_gpu *g = gpu(b);
  const mr_config *c = &g->m->c;
  mr_gpu_embed a = {
      .x = x->p,
      .ld = x->ld,
      .w = g->embed->w,
      .plane = g->embed->plane,
      .few = g->embed->few,
      .hold = (int32_t)g->embed->hold,
      .token = g->token,
      .pos = g->pos,
      .position = mr_gpu_vector_of(g, g->m->position_embd, (size_t)c->context * (size_t)c->d_model),
      .scale = c->embed_scale,
      .cols = c->d_model,
      .k = g->embed->k};
  mr_gpu_launch(g, MR_GPU_embed, mr_gpu_by_rows(g->batch.n_tokens), &a);
  mr_gpu_lora_embed_rows(g, x);
}

static void norm_pass(mr_backend *b, mr_buf *x, const mr_norm_spec *norm) {
  mr_gpu *g = gpu(b);
  mr_gpu_rows a = {
      .x = x->p, .ld = x->ld, .norm = mr_gpu_norm_of(g, norm, x->cols), .cols = x->cols};
  if (a.norm.kind != MR_GPU_NORM_NONE)
    mr_gpu_launch(g, MR_GPU_norm, mr_gpu_by_rows(g->batch.n_tokens), &a);
}

static void add(mr_backend *b, mr_buf *x, const mr_buf *t, const mr_norm_spec *norm, float scale) {
  mr_gpu *g = gpu(b);
  mr_gpu_rows a = {.x = x->p,
                   .t = t->p,
                   .ld = x->ld,
                   .ld_t = t->ld,
                   .norm = mr_gpu_norm_of(g, norm, x->cols),
                   .scale = scale,
                   .cols = x->cols};
  mr_gpu_launch(g, MR_GPU_add, mr_gpu_by_rows(g->batch.n_tokens), &a);
}

static void finish(mr_backend *b, mr_buf *logits, float scale, float cap) {
  mr_gpu *g = gpu(b);
  g->logits = logits;
  if (scale == 1 && cap <= 0)
    return;
  mr_gpu_finish a = {
      .x = logits->p, .ld = logits->ld, .scale = scale, .cap = cap, .cols = logits->cols};
  mr_grid grid = {
      .blocks = {(uint32_t)mr_gpu_up(logits->cols, 1024), (uint32_t)g->batch.n_wanted, 1},
      .warps = MR_GPU_WARPS};
  mr_gpu_launch(g, MR_GPU_finish, grid, &a);
}

/* ------------------------------------------------------------------ products */

void mr_gpu_pack_rows(mr_gpu *g, mr_gpu_pack *p, int rows) {
  p->k = mr_gpu_padded(p->cols);
  mr_gpu_launch(g, MR_GPU_pack, mr_gpu_by_rows(rows), p);
}

/* 64 rows a tile where there are as many and shared memory holds them. No bits depend on it. */
static mr_gpu_kernel gemm_kernel(const mr_gpu *g, mr_gpu_hold hold, int m, int *rows,
                                 size_t *shared) {
  static const mr_gpu_kernel kernels[4][2] = {{MR_GPU_gemm16_bf16, MR_GPU_gemm64_bf16},
                                              {MR_GPU_gemm16_pair, MR_GPU_gemm64_pair},
                                              {MR_GPU_gemm16_int8, MR_GPU_gemm64_int8},
                                              {MR_GPU_gemm16_int4, MR_GPU_gemm64_int4}};
  bool tall = m > 32 && MR_GPU_GEMM_SHARED(64, hold) <= g->dev->shared_bytes;
  *rows = tall ? 64 : 16;
  *shared = MR_GPU_GEMM_SHARED(*rows, hold);
  return kernels[hold][tall];
}

/* A product of many rows: weights of few bits are widened once, not in each tile. The same bits. */
static mr_gpu_hold widen_all(mr_gpu *g, const mr_gpu_matrix *w, int m) {
  if (w->hold < MR_GPU_INT8 || m < WIDEN_ROWS || (size_t)w->of->n * (size_t)w->k > g->wide_values)
    return w->hold;
  mr_gpu_widen a = {.few = w->few, .out = g->wide, .k = w->k};
  mr_gpu_launch(g, w->hold == MR_GPU_INT8 ? MR_GPU_widen_int8 : MR_GPU_widen_int4,
                (mr_grid){.blocks = {(uint32_t)w->of->n, 1, 1}, .warps = MR_GPU_WARPS}, &a);
  return MR_GPU_BF16;
}

double mr_gpu_held_bytes(const mr_gpu_matrix *w) {
  static const double each[] = {2, 4, 1 + 2.0 / MR_GPU_GROUP, 0.5 + 4.0 / MR_GPU_GROUP};
  return (double)w->of->n * w->k * each[w->hold];
}

void mr_gpu_multiply(mr_gpu *g, const mr_gpu_matrix *w, const mr_gpu_bf16 *a, size_t a_plane, int m,
                     float *y, size_t ld, bool accumulate) {
  int rows;
  size_t shared;
  mr_gpu_hold hold = widen_all(g, w, m);
  mr_gpu_kernel kernel = gemm_kernel(g, hold, m, &rows, &shared);
  mr_gpu_gemm args = {.a = a,
                      .w = hold == w->hold ? w->w : g->wide,
                      .a_plane = a_plane,
                      .w_plane = w->plane,
                      .few = w->few,
                      .bias = w->bias,
                      .y = y,
                      .ld = ld,
                      .m = m,
                      .n = w->of->n,
                      .k = w->k,
                      .accumulate = accumulate};
  mr_grid grid = {
      .blocks = {(uint32_t)mr_gpu_up(w->of->n, MR_GPU_GEMM_COLS), (uint32_t)mr_gpu_up(m, rows), 1},
      .warps = MR_GPU_WARPS,
      .shared = shared};
  g->base.stats.flops += 2.0 * m * w->of->n * w->of->k;
  g->base.stats.bytes += mr_gpu_held_bytes(w);
  mr_gpu_launch(g, kernel, grid, &args);
}

/* The same of all rows of an operation, which lie at g->packed, by the library where it serves: a
 * matrix is always the one's or always the other's. */
static void multiply_all(mr_gpu *g, const mr_gpu_matrix *w, size_t plane, int m, mr_buf *y,
                         bool accumulate) {
  if (!w->plan) {
    mr_gpu_multiply(g, w, g->packed, plane, m, y->p, y->ld, accumulate);
    return;
  }
  g->base.stats.flops += 2.0 * m * w->of->n * w->of->k;
  g->base.stats.bytes += mr_gpu_held_bytes(w);
  if (!g->rc)
    g->rc = mr_device_gemm_run(g->dev->gemm, g->stream, w->plan, g->packed, w->w, m, y->p, y->ld,
                               accumulate);
}

static void set_act(mr_gpu_pack *p, const mr_linear *op) {
  p->gate = op->input == MR_INPUT_GATE;
  p->act = (int32_t)op->act;
  if (op->xielu) {
    p->act = MR_GPU_XIELU;
    memcpy(p->act_p, op->xielu, 4 * sizeof(float));
  } else if (op->clamp) {
    p->act = MR_GPU_CLAMPED;
    memcpy(p->act_p, op->clamp, 2 * sizeof(float));
  }
}

static void linear(mr_backend *b, const mr_linear *op) {
  mr_gpu *g = gpu(b);
  int rows = op->wanted ? g->batch.n_wanted : g->batch.n_tokens, cols = op->w[0]->k;
  if (!rows)
    return;
  mr_gpu_pack p = {.x = op->x->p,
                   .ld = op->x->ld,
                   .up = op->up ? op->up->p : NULL,
                   .ld_up = op->up ? op->up->ld : 0,
                   .out = g->packed,
                   .plane = 0,
                   .from = op->wanted ? g->wanted : NULL,
                   .norm = {.kind = MR_GPU_NORM_NONE},
                   .cols = cols};
  if (op->input != MR_INPUT_PLAIN)
    p.norm = mr_gpu_norm_of(g, &op->norm, cols);
  set_act(&p, op);
  for (int i = 0; i < op->n; i++)
    if (mr_gpu_find(g, op->w[i])->hold == MR_GPU_PAIR)
      p.plane = g->packed_plane;
  mr_gpu_pack_rows(g, &p, rows);
  for (int i = 0; i < op->n; i++)
    multiply_all(g, mr_gpu_use(g, op->w[i]), p.plane, rows, op->y[i], op->accumulate);
  mr_gpu_lora_linear(g, op, p.plane);
}

/* ------------------------------------------------------------------ open and close */

/* Tables of a step: rows, tiles, and the pages of its sequences. */
static size_t side_bytes(const mr_model *m, int max_tokens) {
  const mr_config *c = &m->c;
  size_t t = (size_t)max_tokens, group = (size_t)mr_gpu_queries(c);
  size_t groups = (size_t)mr_kv_groups_of(c, MR_KV_F32).n;
  size_t rows = t * ((4 + groups) * sizeof(int32_t) + sizeof(mr_gpu_ask) +
                     2 * (size_t)c->rope_dims * sizeof(float) + 8);
  size_t tiles = (2 * (t * group / MR_GPU_ROWS) + 3 * t) * sizeof(mr_gpu_tile);
  size_t blocks = ((size_t)c->context + MR_KV_BLOCK - 1) / MR_KV_BLOCK;
  size_t pages = t * groups * blocks * sizeof(int32_t);
  return rows + tiles + pages + mr_gpu_lora_side_bytes(m, max_tokens) + 17 * 64;
}

size_t mr_gpu_step_bytes(const mr_model *m, const mr_device *dev, int max_tokens, int max_logits,
                         size_t columns) {
  size_t t = (size_t)room_of(dev, max_tokens);
  size_t logits = (size_t)room_of(dev, max_logits) * mr_gpu_ld((size_t)m->c.n_vocab);
  return 2 * 2 * t * mr_gpu_widest(m) + side_bytes(m, max_tokens) + t * columns * sizeof(float) +
         logits * sizeof(float) + (size_t)max_logits * sizeof(mr_gpu_best) +
         mr_gpu_attend_bytes(m, dev, max_tokens) + mr_gpu_moe_bytes(m, max_tokens) +
         mr_gpu_lora_step_bytes(m, max_tokens) + 32 * 256;
}

static void gpu_close(mr_backend *b) {
  mr_gpu *g = gpu(b);
  mr_rope_close_all(g->rope);
  mr_gpu_moe_close(g);
  mr_gpu_groups_close(g);
  mr_gpu_lora_close(g);
  mr_gpu_stream_close(g);
  if (g->side.host)
    g->dev->ops->host_release(g->dev, g->side.host);
  if (g->logits_host)
    g->dev->ops->host_release(g->dev, g->logits_host);
  if (g->best_host)
    g->dev->ops->host_release(g->dev, g->best_host);
  g->dev->ops->stream_free(g->dev, g->stream);
  mr_mem_free(g->matrices);
  mr_mem_free(g->vectors);
  mr_mem_free(g);
}

static const mr_backend_ops gpu_ops = {.name = "gpu",
                                       .close = gpu_close,
                                       .buf_new = buf_new,
                                       .buf_free = buf_free,
                                       .row = row,
                                       .best = best,
                                       .fetch = fetch,
                                       .begin = begin,
                                       .embed = embed,
                                       .linear = linear,
                                       .attend = mr_gpu_run_attend,
                                       .experts = mr_gpu_run_experts,
                                       .norm = norm_pass,
                                       .add = add,
                                       .finish = finish,
                                       .end = end};

static mr_code take_memory(mr_gpu *g, mr_err *err) {
  size_t logits = (size_t)g->max_logits * mr_gpu_ld((size_t)g->m->c.n_vocab) * sizeof(float);
  g->packed_plane = (size_t)room_of(g->dev, g->max_tokens) * mr_gpu_widest(g->m);
  g->packed = mr_device_take(g->dev, 2 * g->packed_plane * sizeof *g->packed);
  mr_code rc = g->packed ? side_open(g, side_bytes(g->m, g->max_tokens)) : MR_E_NOMEM;
  if (!rc)
    rc = g->dev->ops->host_alloc(g->dev, logits, (void **)&g->logits_host);
  size_t best_bytes = (size_t)g->max_logits * sizeof *g->best;
  if (!rc)
    rc = g->dev->ops->host_alloc(g->dev, best_bytes, (void **)&g->best_host);
  if (!rc && !(g->best = mr_device_take(g->dev, best_bytes)))
    rc = MR_E_NOMEM;
  if (!rc)
    rc = mr_gpu_attend_open(g, err);
  if (!rc)
    rc = mr_gpu_moe_open(g, err);
  if (rc)
    return mr_err_set(err, rc,
                      "out of memory of device %s for steps of %d tokens; use a smaller "
                      "--max-step-tokens or a larger --device-memory",
                      g->dev->name, g->max_tokens);
  return MR_OK;
}

mr_code mr_backend_gpu_open(mr_backend **out, const mr_model *m, mr_device *dev, mr_kv *kv,
                            mr_gpu_scheme scheme, int streamed, int max_tokens, int max_logits,
                            mr_err *err) {
  mr_gpu *g = mr_mem_alloc(1, sizeof *g);
  if (!g)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for the step");
  g->base.ops = &gpu_ops;
  g->m = m;
  g->dev = dev;
  g->kv = kv;
  g->scheme = scheme;
  g->streaming.n = streamed;
  g->max_tokens = max_tokens;
  g->max_logits = max_logits;
  mr_code rc = mr_device_fail(dev, dev->ops->stream_new(dev, &g->stream), err);
  if (!rc)
    rc = mr_rope_open_all(g->rope, &m->c, m->rope_freqs, err);
  if (!rc)
    rc = mr_gpu_load_weights(g, err);
  if (!rc)
    rc = mr_gpu_lora_load(g, err);
  if (!rc)
    rc = take_memory(g, err);
  if (rc) {
    gpu_close(&g->base);
    return rc;
  }
  *out = &g->base;
  return MR_OK;
}
