/* See tune.h. Both ways of cutting are timed in turn over the matrices of some layers, so that
 * weights are as cold as in a step; the best of a few rounds counts, as other work only takes away.
 */
#include "src/tune.h"

#include "io/sys.h"
#include "src/backend_cpu.h"
#include "src/machine.h"

#define LEAST_WORKER_ROWS 32
#define LEAST_STEP 256
#define STEP_WORKER_ROWS 256 /* more rows a worker change nothing */
#define MOST_STEP 4096
#define SIZES 8
#define ROUNDS 3
#define MEMORY_SHARE 16
#define COLD_BYTES (8 << 20) /* of weights, walked through */
#define LATE_S 0.7           /* no larger size is begun later */
#define CLEARLY 0.97         /* of the time: better, and not by chance */
#define NEARLY 0.98          /* of the time: no worse that matters */
#define STEP_S 0.5           /* of matrix products that a step may take to have more tokens */

enum { QKV, O, UP, DOWN, KINDS };

typedef struct tuner {
  mr_model *m;
  mr_backend *b;
  mr_cpu *c;
  mr_buf *x, *y[MR_LINEAR_MAX];
  int layers[KINDS]; /* so many are walked through */
  mr_tuning way;     /* in force while it is timed */
  int sizes, rows[SIZES];
  int most;                  /* rows that there is memory for */
  double s[SIZES][KINDS][2]; /* shared, own */
} tuner;

/* The matrices of a kind that a layer has; false: none. */
static bool op_of(const tuner *t, const mr_layer *y, int kind, mr_linear *op) {
  const mr_matrix *all[KINDS][MR_LINEAR_MAX] = {
      {&y->q, &y->k, &y->v}, {&y->o}, {&y->gate, &y->up}, {&y->down}};
  *op = (mr_linear){.x = t->x};
  for (int i = 0; i < MR_LINEAR_MAX && all[kind][i]; i++) {
    const mr_matrix *w = all[kind][i];
    if (!w->packed || (op->n > 0 && w->k != op->w[0]->k))
      continue;
    op->y[op->n] = t->y[op->n];
    op->w[op->n++] = w;
  }
  return op->n > 0;
}

static int columns(const mr_linear *op) {
  int n = 0;
  for (int i = 0; i < op->n; i++)
    n += op->w[i]->n;
  return n;
}

/* Of a kind's shape: so many rows for each worker and more have blocks of their own. */
static void force(tuner *t, const mr_linear *op, int own_rows) {
  t->way.n_shapes = 1;
  t->way.shapes[0] = (mr_tuned){op->w[0]->k, columns(op), own_rows};
}

static double time_kind(tuner *t, int kind, int own_rows) {
  double start = mr_sys_seconds();
  mr_linear op;
  for (int i = 0; i < t->layers[kind]; i++)
    if (op_of(t, &t->m->layers[i], kind, &op)) {
      force(t, &op, own_rows);
      t->b->ops->linear(t->b, &op);
    }
  return mr_sys_seconds() - start;
}

static void time_size(tuner *t, int size) {
  t->c->batch = (mr_batch){.n_tokens = t->rows[size]};
  for (int round = 0; round < ROUNDS; round++)
    for (int kind = 0; kind < KINDS; kind++)
      for (int own = 0; own < 2; own++) {
        double s = time_kind(t, kind, own ? 1 : MR_TUNE_NEVER), *best = &t->s[size][kind][own];
        *best = round == 0 || s < *best ? s : *best;
      }
}

/* ---------------------------------------------------------------- what follows from it */

/* The other way than the table's must be clearly better. */
static bool owns(const tuner *t, int size, int kind, int otherwise) {
  bool own = t->rows[size] / t->c->workers >= otherwise;
  const double *s = t->s[size][kind];
  return s[!own] < CLEARLY * s[own] ? !own : own;
}

static int own_rows(const tuner *t, int kind, int otherwise) {
  int from = t->sizes;
  while (from > 0 && owns(t, from - 1, kind, otherwise))
    from--;
  return from == t->sizes ? MR_TUNE_NEVER : t->rows[from] / t->c->workers;
}

static double token_s(const tuner *t, int size, const int own[KINDS]) {
  double sum = 0;
  for (int kind = 0; kind < KINDS; kind++)
    if (t->layers[kind])
      sum += t->s[size][kind][t->rows[size] / t->c->workers >= own[kind]] / t->layers[kind];
  return sum / t->rows[size];
}

/* The most tokens with which one costs next to the least, as far as a step is not long: then more
 * rows are in flight at a time, and what is late is stopped soon. Beyond the largest size that was
 * timed a token costs what it costs there. Without two sizes to compare, as many as are enough on
 * all machines known. */
static int step_tokens(const tuner *t, const int own[KINDS]) {
  int first = 0, last = t->sizes - 1, fewest = 2 * LEAST_STEP;
  double least = 0, layers = t->m->c.n_layers;
  while (first < t->sizes && t->rows[first] < LEAST_STEP)
    first++;
  if (first >= last)
    return fewest;
  for (int i = first; i <= last; i++) {
    double s = token_s(t, i, own);
    least = i == first || s < least ? s : least;
  }
  int step = 0;
  for (int i = last; i >= first; i--)
    if (token_s(t, i, own) * NEARLY <= least) {
      fewest = t->rows[i];
      if (!step && fewest * token_s(t, i, own) * layers <= STEP_S)
        step = fewest;
    }
  while (step >= t->rows[last] && 2 * step <= t->most &&
         2 * step * token_s(t, last, own) * layers <= STEP_S)
    step *= 2;
  return step ? step : fewest;
}

static void conclude(const tuner *t, int otherwise, mr_tuning *out) {
  int own[KINDS];
  mr_linear op;
  for (int kind = 0; kind < KINDS; kind++) {
    own[kind] = own_rows(t, kind, otherwise);
    if (op_of(t, &t->m->layers[0], kind, &op))
      out->shapes[out->n_shapes++] = (mr_tuned){op.w[0]->k, columns(&op), own[kind]};
  }
  out->step_tokens = step_tokens(t, own);
}

/* ---------------------------------------------------------------- set-up */

static void set_sizes(tuner *t, int workers) {
  int most = STEP_WORKER_ROWS * workers;
  most = most < 2 * LEAST_STEP ? 2 * LEAST_STEP : most > MOST_STEP ? MOST_STEP : most;
  int rows = most;
  while (rows / 2 >= LEAST_WORKER_ROWS * workers && t->sizes < SIZES - 1) {
    rows /= 2;
    t->sizes++;
  }
  for (int i = 0; i <= t->sizes; i++, rows *= 2)
    t->rows[i] = rows;
  t->sizes++;
}

/* How many layers are walked through, and the widest rows on both sides. */
static void measure(tuner *t, int *wide_x, int *wide_y) {
  for (int kind = 0; kind < KINDS; kind++) {
    double bytes = 0;
    mr_linear op;
    for (int i = 0; i < t->m->c.n_layers && bytes < COLD_BYTES; i++, t->layers[kind]++) {
      if (!op_of(t, &t->m->layers[i], kind, &op))
        continue;
      bytes += (double)op.w[0]->k * columns(&op);
      *wide_x = op.w[0]->k > *wide_x ? op.w[0]->k : *wide_x;
      for (int j = 0; j < op.n; j++)
        *wide_y = op.w[j]->n > *wide_y ? op.w[j]->n : *wide_y;
    }
    if (!op_of(t, &t->m->layers[0], kind, &op))
      t->layers[kind] = 0;
  }
}

/* Steps whose rows would take much of what memory is left are not tried, and not had. */
static void fit_memory(tuner *t, int wide) {
  double room = (double)mr_machine_memory().available / MEMORY_SHARE;
  double row = (1.0 + MR_LINEAR_MAX) * wide * sizeof(float);
  for (t->most = MOST_STEP; room > 0 && row * t->most > room && t->most > LEAST_STEP;)
    t->most /= 2;
  while (t->sizes > 1 && t->rows[t->sizes - 1] > t->most)
    t->sizes--;
}

static mr_code prepare(tuner *t, const mr_kernels *k, mr_pool *pool, mr_kv *kv, mr_err *err) {
  int wide_x = 1, wide_y = 1;
  const mr_lora *lora = t->m->lora;
  measure(t, &wide_x, &wide_y);
  fit_memory(t, wide_x > wide_y ? wide_x : wide_y);
  int most = t->rows[t->sizes - 1];
  t->m->lora = NULL; /* the base alone is timed */
  mr_code rc = mr_backend_cpu_open(&t->b, t->m, k, pool, kv, most, 1, err);
  t->m->lora = lora;
  if (rc)
    return rc;
  t->c = (mr_cpu *)t->b;
  bool room = (t->x = t->b->ops->buf_new(t->b, most, wide_x)) != NULL;
  for (int i = 0; i < MR_LINEAR_MAX; i++)
    room &= (t->y[i] = t->b->ops->buf_new(t->b, most, wide_y)) != NULL;
  if (!room)
    return mr_err_set(err, MR_E_NOMEM, "out of memory to measure steps of %d tokens", most);
  for (int i = 0; i < most; i++)
    for (int j = 0; j < wide_x; j++)
      mr_cpu_row(t->x, i)[j] = (float)((i * 7 + j * 13) % 31 - 15);
  return MR_OK;
}

static void take_down(tuner *t) {
  if (!t->b)
    return;
  t->b->ops->buf_free(t->b, t->x);
  for (int i = 0; i < MR_LINEAR_MAX; i++)
    t->b->ops->buf_free(t->b, t->y[i]);
  t->b->ops->close(t->b);
}

mr_code mr_tune(mr_tuning *out, mr_model *m, const mr_kernels *k, mr_pool *pool, mr_kv *kv,
                mr_err *err) {
  mr_watch watch = mr_machine_watch();
  const mr_tuning *before = m->tuning;
  tuner t = {.m = m};
  *out = (mr_tuning){.step_tokens = 0};
  set_sizes(&t, mr_pool_threads(pool));
  mr_code rc = prepare(&t, k, pool, kv, err);
  if (!rc) {
    int all = t.sizes;
    m->tuning = &t.way;
    for (t.sizes = 0; t.sizes < all && (t.sizes < 1 || mr_sys_seconds() - watch.began_s < LATE_S);
         t.sizes++)
      time_size(&t, t.sizes);
    m->tuning = before;
    if (mr_machine_waited_share(&watch) <= MR_MACHINE_WAITED)
      conclude(&t, k->gemm[m->layers[0].o.scheme].own_rows, out);
  }
  take_down(&t);
  out->took_s = mr_sys_seconds() - watch.began_s;
  return rc;
}

int mr_tuned_own_rows(const mr_tuning *t, int k, int n, int otherwise) {
  for (int i = 0; t && i < t->n_shapes; i++)
    if (t->shapes[i].k == k && t->shapes[i].n == n)
      return t->shapes[i].own_rows;
  return otherwise;
}
