#include "src/backend_cpu.h"
#include "src/backend_cpu_experts.h"
#include "src/backend_cpu_lora.h"

#include <string.h>

#include "io/mem.h"
#include "io/sys.h"

static mr_cpu *cpu(mr_backend *b) {
  return (mr_cpu *)b;
}

/* ------------------------------------------------------------------ buffers */

/* Rows a multiple of 4 KiB apart would all fall into the same cache sets. */
static size_t padded(size_t cols) {
  size_t ld = (cols + 15) & ~(size_t)15;
  return ld % 1024 == 0 ? ld + 16 : ld;
}

static mr_buf *buf_new(mr_backend *b, int rows, int cols) {
  (void)b;
  mr_buf *buf = mr_mem_alloc(1, sizeof *buf);
  size_t floats, bytes;
  if (!buf)
    return NULL;
  *buf = (mr_buf){.ld = padded((size_t)cols), .rows = rows, .cols = cols};
  if (mr_mem_mul((size_t)rows, buf->ld, &floats) && mr_mem_mul(floats, sizeof(float), &bytes))
    buf->p = mr_mem_pages(bytes);
  if (buf->p)
    return buf;
  mr_mem_free(buf);
  return NULL;
}

static void buf_free(mr_backend *b, mr_buf *buf) {
  (void)b;
  if (!buf)
    return;
  mr_mem_free(buf->p);
  mr_mem_free(buf);
}

static float *row(mr_backend *b, const mr_buf *buf, int i) {
  (void)b;
  return mr_cpu_row(buf, i);
}

/* ------------------------------------------------------------------ the step */

static mr_code begin(mr_backend *b, const mr_batch *batch, mr_err *err) {
  mr_cpu *c = cpu(b);
  if (batch->n_tokens > c->max_tokens)
    return mr_err_set(err, MR_E_INTERNAL, "a step of %d tokens is over the backend's %d",
                      batch->n_tokens, c->max_tokens);
  b->stats = (mr_step_stats){.seconds = -mr_sys_seconds()};
  c->batch = *batch;
  int at = 0;
  for (int r = 0; r < batch->n_runs; r++) {
    const mr_run *run = &batch->runs[r];
    for (int i = 0; i < run->n; i++, at++) {
      c->token[at] = run->tokens[i];
      c->pos[at] = run->seq->len + i;
      mr_rope_fill(&c->rope[0], c->pos[at]);
      mr_rope_fill(&c->rope[1], c->pos[at]);
      mr_rope_fill(&c->rope[2], c->pos[at]);
    }
  }
  mr_cpu_lora_begin(c->lora, batch);
  mr_cpu_tile(c);
  return MR_OK;
}

static mr_code end(mr_backend *b, mr_err *err) {
  (void)err;
  b->stats.seconds += mr_sys_seconds();
  b->stats.other_s = b->stats.seconds - b->stats.gemm_s - b->stats.attn_s;
  return MR_OK;
}

/* ------------------------------------------------------------------ passes over rows */

void mr_cpu_norm(const mr_cpu *c, float *y, const float *x, int n, const mr_norm_spec *norm) {
  if (norm->kind == MR_NORM_RMS)
    c->k->rmsnorm(y, x, norm->w, n, norm->eps);
  else if (norm->kind == MR_NORM_LAYER)
    c->k->layernorm(y, x, norm->w, norm->b, n, norm->eps);
  else if (y != x)
    memcpy(y, x, (size_t)n * sizeof *y);
}

/* Some items for each worker, so that uneven ones balance; few enough that counting them costs
 * nothing. */
int mr_cpu_chunk(const mr_cpu *c, int rows) {
  int chunk = rows / (c->workers * 4);
  return chunk < 1 ? 1 : chunk > 16 ? 16 : chunk;
}

typedef struct pass { /* one pass over rows */
  mr_cpu *c;
  mr_buf *x;
  const mr_buf *t;
  const mr_norm_spec *norm;
  float scale, cap;
  int rows, chunk;
} pass;

static void run_pass(pass *p, mr_pool_fn fn) {
  p->chunk = mr_cpu_chunk(p->c, p->rows);
  mr_pool_run(p->c->pool, fn, p, (p->rows + p->chunk - 1) / p->chunk);
}

static int pass_end(const pass *p, int item) {
  int stop = (item + 1) * p->chunk;
  return stop < p->rows ? stop : p->rows;
}

static void embed_rows(void *ctx, int item, int worker) {
  const pass *p = ctx;
  const mr_model *m = p->c->m;
  int d = m->c.d_model;
  float *room = p->c->line + (size_t)worker * p->c->line_ld;
  for (int i = item * p->chunk; i < pass_end(p, item); i++) {
    float *x = mr_cpu_row(p->x, i);
    mr_matrix_rows(&m->embed, p->c->token[i], 1, x, room);
    mr_cpu_lora_embed(p->c, x, i, p->c->token[i]);
    if (m->c.embed_scale != 1)
      p->c->k->scale(x, m->c.embed_scale, d);
    if (m->position_embd)
      p->c->k->axpy(x, m->position_embd + (size_t)p->c->pos[i] * (size_t)d, 1, d);
  }
}

static void embed(mr_backend *b, mr_buf *x) {
  run_pass(&(pass){.c = cpu(b), .x = x, .rows = cpu(b)->batch.n_tokens}, embed_rows);
}

static void add_rows(void *ctx, int item, int worker) {
  const pass *p = ctx;
  float *line = p->c->line + (size_t)worker * p->c->line_ld;
  for (int i = item * p->chunk; i < pass_end(p, item); i++) {
    const float *t = mr_cpu_row(p->t, i);
    if (p->norm->kind != MR_NORM_NONE) {
      mr_cpu_norm(p->c, line, t, p->x->cols, p->norm);
      t = line;
    }
    p->c->k->axpy(mr_cpu_row(p->x, i), t, p->scale, p->x->cols);
  }
}

static void add(mr_backend *b, mr_buf *x, const mr_buf *t, const mr_norm_spec *norm, float scale) {
  run_pass(&(pass){.c = cpu(b),
                   .x = x,
                   .t = t,
                   .norm = norm,
                   .scale = scale,
                   .rows = cpu(b)->batch.n_tokens},
           add_rows);
}

static void norm_rows(void *ctx, int item, int worker) {
  const pass *p = ctx;
  (void)worker;
  for (int i = item * p->chunk; i < pass_end(p, item); i++)
    mr_cpu_norm(p->c, mr_cpu_row(p->x, i), mr_cpu_row(p->x, i), p->x->cols, p->norm);
}

static void norm_pass(mr_backend *b, mr_buf *x, const mr_norm_spec *norm) {
  run_pass(&(pass){.c = cpu(b), .x = x, .norm = norm, .rows = cpu(b)->batch.n_tokens}, norm_rows);
}

static void finish_rows(void *ctx, int item, int worker) {
  const pass *p = ctx;
  (void)worker;
  for (int i = item * p->chunk; i < pass_end(p, item); i++) {
    if (p->scale != 1)
      p->c->k->scale(mr_cpu_row(p->x, i), p->scale, p->x->cols);
    if (p->cap > 0)
      p->c->k->softcap(mr_cpu_row(p->x, i), p->cap, p->x->cols);
  }
}

static void finish(mr_backend *b, mr_buf *logits, float scale, float cap) {
  if (scale != 1 || cap > 0)
    run_pass(
        &(pass){
            .c = cpu(b), .x = logits, .scale = scale, .cap = cap, .rows = cpu(b)->batch.n_wanted},
        finish_rows);
}

/* ------------------------------------------------------------------ open and close */

static void cpu_close(mr_backend *b) {
  mr_cpu *c = cpu(b);
  mr_rope_close_all(c->rope);
  mr_cpu_experts_close(c->experts);
  mr_cpu_lora_close(c->lora);
  mr_mem_free(c->packed);
  mr_mem_free(c->line);
  mr_mem_free(c->attn);
  mr_mem_free(c->own);
  mr_mem_free(c->token);
  mr_mem_free(c->pos);
  mr_mem_free(c->tiles);
  mr_mem_free(c->sorted);
  mr_mem_free(c->groups);
  mr_mem_free(c->ordered);
  mr_mem_free(c->cuts);
  mr_mem_free(c->states);
  mr_mem_free(c);
}

static const mr_backend_ops cpu_ops = {.name = "cpu",
                                       .close = cpu_close,
                                       .buf_new = buf_new,
                                       .buf_free = buf_free,
                                       .row = row,
                                       .begin = begin,
                                       .embed = embed,
                                       .linear = mr_cpu_linear,
                                       .attend = mr_cpu_attend,
                                       .experts = mr_cpu_run_experts,
                                       .norm = norm_pass,
                                       .add = add,
                                       .finish = finish,
                                       .end = end};

static void widen(const mr_cpu *c, const mr_matrix *w, size_t *row_bytes, int *cols) {
  if (!w->packed)
    return;
  size_t bytes = c->k->gemm[w->scheme].row_bytes(w->k);
  *row_bytes = bytes > *row_bytes ? bytes : *row_bytes;
  *cols = w->k > *cols ? w->k : *cols;
}

/* The widest packed row and the widest row that any matrix reads. */
static void measure(const mr_cpu *c, size_t *row_bytes, int *cols) {
  const mr_model *m = c->m;
  widen(c, &m->head, row_bytes, cols);
  for (int i = 0; i < m->c.n_layers; i++)
    for (int j = 0; j < mr_layer_matrices(m, &m->layers[i]); j++)
      widen(c, mr_layer_matrix(&m->layers[i], j), row_bytes, cols);
}

static bool take_memory(mr_cpu *c) {
  size_t row_bytes = 64, n = (size_t)c->max_tokens, workers = (size_t)c->workers, bytes;
  size_t room = mr_matrix_room(&c->m->embed, 1);
  int cols = c->m->c.d_model;
  measure(c, &row_bytes, &cols);
  c->line_ld = padded((size_t)cols > room ? (size_t)cols : room);
  c->attn_bytes =
      (mr_attn_scratch(c->m->c.n_heads, c->m->c.n_kv_heads, c->m->c.head_dim) + 63) & ~(size_t)63;
  if (!mr_mem_mul(n, row_bytes, &bytes))
    return false;
  c->packed = mr_mem_pages(bytes);
  c->line = mr_mem_pages(workers * c->line_ld * sizeof *c->line);
  c->attn = mr_mem_pages(workers * c->attn_bytes);
  if (mr_kv_packs(mr_kv_type_of(c->kv)))
    c->own_bytes = 2 * mr_kv_part_bytes(MR_KV_OWN_TYPE, c->m->c.head_dim);
  c->own = mr_mem_pages(workers * c->own_bytes);
  c->token = mr_mem_alloc(n, sizeof *c->token);
  c->pos = mr_mem_alloc(n, sizeof *c->pos);
  c->tiles = mr_mem_alloc(n, sizeof *c->tiles);
  c->sorted = mr_mem_alloc(n, sizeof *c->sorted);
  c->groups = mr_mem_alloc(n, sizeof *c->groups);
  c->ordered = mr_mem_alloc(n, sizeof *c->ordered);
  c->cuts = mr_mem_alloc(n * (size_t)c->m->c.n_kv_heads + 1, sizeof *c->cuts);
  c->state_floats = mr_attn_state(c->m->c.n_heads, c->m->c.n_kv_heads, c->m->c.head_dim);
  int pages = mr_kv_most_pages(c->kv);
  c->most_splits = pages / MR_ATTN_SPLIT + 1;
  if (c->k->attention_split)
    c->states = mr_mem_pages(MR_CPU_SPLIT_UNITS * workers * (size_t)c->most_splits *
                             c->state_floats * sizeof *c->states);
  return (!c->k->attention_split || c->states) && mr_cpu_experts_open(&c->experts, c) &&
         mr_cpu_lora_open(&c->lora, c) && c->packed && c->line && c->attn && c->own && c->token &&
         c->pos && c->tiles && c->sorted && c->groups && c->ordered && c->cuts;
}

mr_code mr_backend_cpu_open(mr_backend **out, const mr_model *m, const mr_kernels *k, mr_pool *pool,
                            mr_kv *kv, int max_tokens, int max_logits, mr_err *err) {
  if (max_tokens < 1 || max_logits < 1)
    return mr_err_set(err, MR_E_INTERNAL, "a step of %d tokens and %d logit rows is impossible",
                      max_tokens, max_logits);
  mr_cpu *c = mr_mem_alloc(1, sizeof *c);
  if (!c)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for the step");
  c->base.ops = &cpu_ops;
  c->m = m;
  c->k = k;
  c->pool = pool;
  c->kv = kv;
  c->max_tokens = max_tokens;
  c->workers = mr_pool_threads(pool);
  mr_code rc = take_memory(c) ? MR_OK
                              : mr_err_set(err, MR_E_NOMEM, "out of memory for a step of %d tokens",
                                           max_tokens);
  if (!rc)
    rc = mr_rope_open_all(c->rope, &m->c, m->rope_freqs, err);
  if (rc) {
    cpu_close(&c->base);
    return rc;
  }
  *out = &c->base;
  return MR_OK;
}
