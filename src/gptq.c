#include "src/gptq.h"

#include <math.h>

#include "io/mem.h"
#include "kernels/kernels.h"

#define BLOCK 32 /* columns that are factored before the rest is brought up to date */
#define STRIP 64 /* columns of the inverse that are solved together */
#define ROWS 16  /* rows of a matrix that are rounded together */

struct mr_gptq {
  int k;
  int *order; /* [k] column of the matrix that comes j-th; owned */
  float *u;   /* [k, k], upper: row j from its diagonal on; owned */
};

typedef struct factor { /* work on A = R R', R upper */
  double *a;            /* [k, k]: A, then R */
  double *u;            /* [k, k]: the inverse of R */
  double *panel;        /* [BLOCK, k]: columns of R as rows */
  int k, from, to;      /* the block of columns */
} factor;

/* ------------------------------------------------------------------ R */

/* Columns from..to-1 of R, from the last to the first; the block's own columns are kept up to
 * date. */
static bool factor_block(factor *f) {
  size_t k = (size_t)f->k;
  for (int j = f->to - 1; j >= f->from; j--) {
    double *col = f->panel + (size_t)(j - f->from) * k;
    double d = f->a[(size_t)j * k + (size_t)j];
    if (!(d > 0) || !isfinite(d))
      return false;
    d = sqrt(d);
    for (int i = 0; i < j; i++)
      col[i] = f->a[(size_t)i * k + (size_t)j] / d;
    col[j] = d;
    for (int i = 0; i <= j; i++)
      f->a[(size_t)i * k + (size_t)j] = col[i];
    for (int i = 0; i < j; i++) {
      double *row = f->a + (size_t)i * k, x = col[i];
      for (int l = f->from > i ? f->from : i; l < j; l++)
        row[l] -= x * col[l];
    }
  }
  return true;
}

/* Rows before the block lose the block's part: a[i, l] -= sum of col[i] * col[l], i <= l. */
static void update_rows(void *ctx, int item, int worker) {
  factor *f = ctx;
  size_t k = (size_t)f->k;
  int stop = (item + 1) * ROWS < f->from ? (item + 1) * ROWS : f->from;
  (void)worker;
  for (int i = item * ROWS; i < stop; i++) {
    double *restrict row = f->a + (size_t)i * k;
    for (int p = f->to - f->from - 1; p >= 0; p--) {
      const double *restrict col = f->panel + (size_t)p * k;
      double x = col[i];
      for (int l = i; l < f->from; l++)
        row[l] -= x * col[l];
    }
  }
}

static void run(mr_pool *pool, mr_pool_fn fn, void *ctx, int items) {
  if (pool)
    mr_pool_run(pool, fn, ctx, items);
  else
    for (int i = 0; i < items; i++)
      fn(ctx, i, 0);
}

static bool factorize(factor *f, mr_pool *pool) {
  for (f->to = f->k; f->to > 0; f->to = f->from) {
    f->from = f->to > BLOCK ? f->to - BLOCK : 0;
    if (!factor_block(f))
      return false;
    run(pool, update_rows, f, (f->from + ROWS - 1) / ROWS);
  }
  return true;
}

/* ------------------------------------------------------------------ its inverse */

/* A strip of columns of U = R^-1, from their last row up. */
static void invert_strip(void *ctx, int item, int worker) {
  factor *f = ctx;
  size_t k = (size_t)f->k;
  int first = item * STRIP, n = f->k - first < STRIP ? f->k - first : STRIP;
  (void)worker;
  for (int j = first + n - 1; j >= 0; j--) {
    double *restrict y = f->u + (size_t)j * k + (size_t)first;
    const double *r = f->a + (size_t)j * k;
    for (int c = 0; c < n; c++)
      y[c] = first + c == j ? 1 : 0;
    for (int p = j + 1; p < first + n; p++) {
      const double *restrict x = f->u + (size_t)p * k + (size_t)first;
      double s = r[p];
      for (int c = 0; c < n; c++)
        y[c] -= s * x[c];
    }
    for (int c = 0; c < n; c++)
      y[c] /= r[j];
  }
}

/* ------------------------------------------------------------------ open */

/* Columns by falling diagonal; of equal ones the first first (a heap sort would do as well: k is
 * thousands, and this is once a site). */
static void sort_columns(int *order, const float *h, int k) {
  size_t step = (size_t)k + 1;
  for (int gap = k / 2; gap > 0; gap /= 2)
    for (int i = gap; i < k; i++) {
      int c = order[i], j = i;
      float d = h[(size_t)c * step];
      for (; j >= gap; j -= gap) {
        int o = order[j - gap];
        float e = h[(size_t)o * step];
        if (e > d || (e == d && o < c))
          break;
        order[j] = o;
      }
      order[j] = c;
    }
}

static void fill(factor *f, const mr_gptq *p, const float *h, double damp) {
  size_t k = (size_t)p->k;
  double mean = 0;
  for (size_t i = 0; i < k; i++)
    mean += h[i * (k + 1)] / (double)k;
  mean = mean > 0 ? mean : 1;
  for (size_t i = 0; i < k; i++)
    for (size_t j = 0; j < k; j++)
      f->a[i * k + j] = h[(size_t)p->order[i] * k + (size_t)p->order[j]];
  for (size_t i = 0; i < k; i++)
    f->a[i * (k + 1)] += damp * mean;
}

static mr_code prepare(mr_gptq *p, const float *h, double damp, mr_pool *pool, mr_err *err) {
  size_t k = (size_t)p->k, all;
  factor f = {.k = p->k};
  mr_code rc = MR_E_NOMEM;
  if (mr_mem_mul(k, k, &all)) {
    f.a = mr_mem_alloc(all, sizeof *f.a);
    f.u = mr_mem_alloc(all, sizeof *f.u);
    f.panel = mr_mem_alloc(k, BLOCK * sizeof *f.panel);
    p->u = mr_mem_alloc(all, sizeof *p->u);
  }
  if (f.a && f.u && f.panel && p->u) {
    fill(&f, p, h, damp);
    rc = factorize(&f, pool) ? MR_OK : MR_E_DATA;
  }
  if (!rc) {
    run(pool, invert_strip, &f, (p->k + STRIP - 1) / STRIP);
    for (size_t i = 0; i < all; i++)
      p->u[i] = (float)f.u[i];
  }
  mr_mem_free(f.a);
  mr_mem_free(f.u);
  mr_mem_free(f.panel);
  if (rc == MR_E_NOMEM)
    return mr_err_set(err, rc, "out of memory for the products of %d columns", p->k);
  return rc ? mr_err_set(err, rc, "the products of columns have no Cholesky factor") : MR_OK;
}

mr_code mr_gptq_open(mr_gptq **out, const float *h, int k, double damp, bool in_order,
                     mr_pool *pool, mr_err *err) {
  *out = NULL;
  mr_gptq *p = mr_mem_alloc(1, sizeof *p);
  if (p)
    p->order = mr_mem_alloc((size_t)k, sizeof *p->order);
  if (!p || !p->order) {
    mr_gptq_close(p);
    return mr_err_set(err, MR_E_NOMEM, "out of memory for the order of columns");
  }
  p->k = k;
  for (int i = 0; i < k; i++)
    p->order[i] = i;
  if (!in_order)
    sort_columns(p->order, h, k);
  mr_code rc = prepare(p, h, damp, pool, err);
  if (rc)
    mr_gptq_close(p);
  else
    *out = p;
  return rc;
}

void mr_gptq_close(mr_gptq *p) {
  if (!p)
    return;
  mr_mem_free(p->order);
  mr_mem_free(p->u);
  mr_mem_free(p);
}

/* ------------------------------------------------------------------ rows */

typedef struct rounds {
  const mr_gptq *p;
  float *w;
  int n;
  mr_gptq_round round; /* NULL: 2:4 */
  void *ctx;
  float *room; /* [workers, ROWS, k] */
  void (*axpy)(float *y, const float *x, float s, int n);
} rounds;

/* Of columns j..j+3 the two whose loss x^2 / U^2 is least. */
static unsigned two_of_four(const mr_gptq *p, const float *x, int j) {
  float loss[4];
  for (int c = 0; c < 4; c++) {
    float v = x[j + c] / p->u[(size_t)(j + c) * (size_t)p->k + (size_t)(j + c)];
    loss[c] = v * v;
  }
  unsigned mask = 0;
  for (int n = 0; n < 2; n++) {
    int least = -1;
    for (int c = 0; c < 4; c++)
      if (!(mask >> c & 1) && (least < 0 || loss[c] < loss[least]))
        least = c;
    mask |= 1u << least;
  }
  return mask;
}

static void round_rows(void *ctx, int item, int worker) {
  const rounds *r = ctx;
  const mr_gptq *p = r->p;
  size_t k = (size_t)p->k;
  int first = item * ROWS, n = r->n - first < ROWS ? r->n - first : ROWS;
  float *room = r->room + (size_t)worker * ROWS * k;
  unsigned mask[ROWS] = {0};
  for (int i = 0; i < n; i++)
    for (size_t j = 0; j < k; j++)
      room[(size_t)i * k + j] = r->w[(size_t)(first + i) * k + (size_t)p->order[j]];
  for (int j = 0; j < p->k; j++) {
    const float *u = p->u + (size_t)j * k;
    for (int i = 0; i < n; i++) {
      float *x = room + (size_t)i * k, v = x[j], q;
      if (!r->round && j % 4 == 0)
        mask[i] = two_of_four(p, x, j);
      q = r->round ? r->round(r->ctx, first + i, p->order[j], v) : mask[i] >> j % 4 & 1 ? 0 : v;
      r->axpy(x + j + 1, u + j + 1, (q - v) / u[j], p->k - j - 1); /* they take their share */
      x[j] = q;
    }
  }
  for (int i = 0; i < n; i++)
    for (size_t j = 0; j < k; j++)
      r->w[(size_t)(first + i) * k + (size_t)p->order[j]] = room[(size_t)i * k + j];
}

mr_code mr_gptq_rows(const mr_gptq *p, float *w, int n, mr_gptq_round round, void *ctx,
                     mr_pool *pool, mr_err *err) {
  rounds r = {.p = p, .w = w, .n = n, .round = round, .ctx = ctx};
  r.axpy = mr_kernels_best()->axpy;
  size_t workers = pool ? (size_t)mr_pool_threads(pool) : 1, room;
  if (mr_mem_mul(workers * ROWS, (size_t)p->k, &room))
    r.room = mr_mem_alloc(room, sizeof *r.room);
  if (!r.room)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for rows to round");
  run(pool, round_rows, &r, (n + ROWS - 1) / ROWS);
  mr_mem_free(r.room);
  return MR_OK;
}

mr_code mr_gptq_sparse(const mr_gptq *p, float *w, int n, mr_pool *pool, mr_err *err) {
  return mr_gptq_rows(p, w, n, NULL, NULL, pool, err);
}
