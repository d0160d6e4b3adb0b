/* A linear operation is two phases: each row is normed (or gated) and packed by the worker that
 * takes it, once for all matrices that read it; then the matrices' panels are multiplied.
 *
 * A GEMM work item is (rows r0..r1-1) x (panels p0..p1-1 of one matrix), numbered block of rows by
 * block. Each worker walks through a part of them of its own, so that what a GEMM fetches past its
 * last panel is what its worker needs next. With few rows all work on one block, and a panel of
 * weights is read once; with many a worker has a block of its own, whose rows it packed itself and
 * whose results it reads next, so that both stay in its L2 cache. How the work is cut changes no
 * bits: a row's sums do not depend on it. */
#include "src/backend_cpu_lora.h"

#include <math.h>
#include <string.h>

#include "io/sys.h"
#include "src/tune.h"

#define ROWS_BYTES (512 << 10) /* of packed rows in a block: half of a small L2 cache */
#define ROWS_STEP 16           /* blocks are multiples of it: of the row tiles of all kernels */
#define ITEMS_PER_WORKER 8     /* at least, where rows must be cut for it */
#define MOST_PER_WORKER 48     /* where panels are there: the last item is what others wait for */

typedef struct job {
  mr_cpu *c;
  const mr_linear *op;
  const mr_gemm_ops *gemm;
  size_t row_bytes;
  int k, rows;
  int chunk;                    /* rows an item of the packing pass */
  int block;                    /* rows an item of the GEMM */
  int panels;                   /* panels an item of the GEMM */
  int items;                    /* of the GEMM */
  int first[MR_LINEAR_MAX + 1]; /* number of items before matrix i in one block of rows */
} job;

/* xIELU (Huang et al. 2024): a parabola above 0, an exponential arc below. */
static void xielu(float *y, const float *x, int n, const float *p) {
  for (int i = 0; i < n; i++)
    y[i] = x[i] > 0 ? p[0] * x[i] * x[i] + p[2] * x[i]
                    : (expm1f(fminf(x[i], p[3])) - x[i]) * p[1] + p[2] * x[i];
}

static void clamped(float *y, const float *gate, const float *up, int n, float alpha, float limit) {
  for (int i = 0; i < n; i++) {
    float g = fminf(gate[i], limit), u = fmaxf(-limit, fminf(up[i], limit));
    y[i] = (u + 1) * g / (1 + expf(-alpha * g));
  }
}

void mr_cpu_gate(const mr_cpu *c, float *y, const float *gate, const float *up, int n,
                 const mr_linear *op) {
  if (op->xielu)
    xielu(y, gate, n, op->xielu);
  else if (op->clamp)
    clamped(y, gate, up, n, op->clamp[0], op->clamp[1]);
  else
    c->k->gate(y, gate, up, n, op->act);
}

static const float *input_row(const job *j, int i, float *line) {
  const mr_linear *op = j->op;
  int at = op->wanted ? j->c->batch.wanted[i] : i;
  const float *x = mr_cpu_row(op->x, at);
  if (op->input == MR_INPUT_NORM && op->norm.kind != MR_NORM_NONE) {
    mr_cpu_norm(j->c, line, x, j->k, &op->norm);
    return line;
  }
  if (op->input == MR_INPUT_GATE) {
    mr_cpu_gate(j->c, line, x, op->up ? mr_cpu_row(op->up, at) : NULL, j->k, op);
    if (op->norm.kind != MR_NORM_NONE)
      mr_cpu_norm(j->c, line, line, j->k, &op->norm);
    return line;
  }
  return x;
}

static void pack_rows(void *ctx, int item, int worker) {
  const job *j = ctx;
  float *line = j->c->line + (size_t)worker * j->c->line_ld;
  int stop = (item + 1) * j->chunk < j->rows ? (item + 1) * j->chunk : j->rows;
  for (int i = item * j->chunk; i < stop; i++) {
    const float *x = input_row(j, i, line);
    j->gemm->pack_row(j->c->packed + (size_t)i * j->row_bytes, x, j->k);
  }
}

static void copy_rows(void *ctx, int item, int worker) {
  const job *j = ctx;
  float *line = j->c->line + (size_t)worker * j->c->line_ld;
  int stop = (item + 1) * j->chunk < j->rows ? (item + 1) * j->chunk : j->rows;
  for (int i = item * j->chunk; i < stop; i++)
    memcpy(j->c->base.tap->rows + (size_t)i * (size_t)j->k, input_row(j, i, line),
           (size_t)j->k * sizeof *line);
}

static void multiply(void *ctx, int item, int worker) {
  const job *j = ctx;
  const mr_linear *op = j->op;
  (void)worker;
  int block = item / j->first[op->n], at = item % j->first[op->n], i = 0;
  while (at >= j->first[i + 1])
    i++;
  const mr_matrix *w = op->w[i];
  int total = (w->n + j->gemm->nr - 1) / j->gemm->nr;
  int p0 = (at - j->first[i]) * j->panels;
  int p1 = p0 + j->panels < total ? p0 + j->panels : total;
  int r0 = block * j->block;
  int n_rows = r0 + j->block < j->rows ? j->block : j->rows - r0;
  j->gemm->gemm(mr_cpu_row(op->y[i], r0), op->y[i]->ld, j->c->packed + (size_t)r0 * j->row_bytes,
                n_rows, w->packed, p0, p1, w->n, w->k, w->bias, op->accumulate);
}

/* Chooses block and panels, and counts the items. */
static void cut(job *j) {
  const mr_linear *op = j->op;
  int total = 0, n = 0, workers = j->c->workers, least = workers * ITEMS_PER_WORKER;
  for (int i = 0; i < op->n; i++) {
    total += (op->w[i]->n + j->gemm->nr - 1) / j->gemm->nr;
    n += op->w[i]->n;
  }
  int fit = (int)(ROWS_BYTES / j->row_bytes), blocks;
  fit = fit < 2 * ROWS_STEP ? 2 * ROWS_STEP : fit;
  blocks = (j->rows + fit - 1) / fit;
  if (j->rows / workers >= mr_tuned_own_rows(j->c->m->tuning, j->k, n, j->gemm->own_rows))
    blocks = (blocks + workers - 1) / workers * workers;
  if (total * blocks < least)
    blocks = (least + total - 1) / total;
  j->block = (j->rows + blocks - 1) / blocks;
  j->block = (j->block + ROWS_STEP - 1) / ROWS_STEP * ROWS_STEP;
  blocks = (j->rows + j->block - 1) / j->block;
  j->panels = total * blocks / (workers * MOST_PER_WORKER);
  j->panels = j->panels < 1 ? 1 : j->panels;
  j->first[0] = 0;
  for (int i = 0; i < op->n; i++) {
    int panels = (op->w[i]->n + j->gemm->nr - 1) / j->gemm->nr;
    j->first[i + 1] = j->first[i] + (panels + j->panels - 1) / j->panels;
  }
  j->items = j->first[op->n] * blocks;
}

static void count(job *j) {
  mr_step_stats *s = &j->c->base.stats;
  for (int i = 0; i < j->op->n; i++) {
    const mr_matrix *w = j->op->w[i];
    double panels = (w->n + j->gemm->nr - 1) / j->gemm->nr;
    s->flops += 2.0 * j->rows * w->n * w->k;
    s->bytes += panels * (double)j->gemm->panel_bytes(w->k);
  }
}

void mr_cpu_linear(mr_backend *b, const mr_linear *op) {
  mr_cpu *c = (mr_cpu *)b;
  job j = {.c = c, .op = op, .gemm = &c->k->gemm[op->w[0]->scheme], .k = op->w[0]->k};
  j.rows = op->wanted ? c->batch.n_wanted : c->batch.n_tokens;
  if (j.rows == 0)
    return;
  j.row_bytes = j.gemm->row_bytes(j.k);
  j.chunk = mr_cpu_chunk(c, j.rows);
  if (b->tap) {
    mr_pool_run(c->pool, copy_rows, &j, (j.rows + j.chunk - 1) / j.chunk);
    b->tap->see(b->tap->ctx, op->w[0], b->tap->rows, j.rows, j.k);
  }
  mr_pool_run_parts(c->pool, pack_rows, &j, (j.rows + j.chunk - 1) / j.chunk);
  double start = mr_sys_seconds();
  cut(&j);
  mr_pool_run_parts(c->pool, multiply, &j, j.items);
  b->stats.gemm_s += mr_sys_seconds() - start;
  count(&j);
  mr_cpu_lora_linear(c, mr_cpu_lora_rows_of(c->lora, op), op);
}
