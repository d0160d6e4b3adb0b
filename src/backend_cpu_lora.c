/* The rows of a step that have an adapter are sorted by it and cut into chunks. Two phases follow
 * the base's GEMM: A times each chunk's rows as they lie packed for the base, for all matrices of
 * the operation at once; then B times that, chunk by chunk and matrix by matrix, added to y.
 * Neither the sorting nor the cutting changes bits: a row's sums are its own.
 *
 * What all heads of latent attention share (mr_lora_heads) is multiplied head by head: before B
 * with each head's part of the input, or in a third phase, added to each head's queries. */
#include "src/backend_cpu_lora.h"

#include <string.h>

#include "io/mem.h"
#include "io/sys.h"

#define CHUNK 48 /* rows: a multiple of the row tiles of all kernels */
#define SMALL 24 /* ... where there are few */
#define PANELS 8 /* an item of the second phase */
#define ROWS 8   /* ... at once */

typedef struct chunk { /* slots of one adapter */
  int adapter, slot, n;
} chunk;

struct mr_cpu_lora_rows {
  int n;         /* rows with an adapter */
  int32_t *row;  /* [n] which rows these are, sorted by adapter; owned, as the others */
  int32_t *slot; /* [max_tokens] the place of a row among them, or -1 */
  chunk *chunks;
  int n_chunks;
};

struct mr_cpu_lora {
  const mr_lora *l;
  const mr_gemm_ops *gemm; /* of MR_LORA_UP */
  int workers;
  int32_t *adapter; /* [max_tokens] of each token, from 1; 0: none; owned, as the others */
  int32_t *first;   /* [adapters + 1] of a counting sort */
  mr_cpu_lora_rows all, wanted;
  float *t; /* [max_tokens, t_ld]: A x */
  size_t t_ld;
  uint8_t *mid; /* [MR_LINEAR_MAX, max_tokens] packed rows of it, for each matrix */
  size_t mid_bytes, mid_plane;
  float *out;       /* [workers, CHUNK * out_ld] */
  uint8_t *own_x;   /* [workers, CHUNK * x_bytes]: packed rows that lay apart */
  float *own_t;     /* [workers, CHUNK * t_ld] */
  uint8_t *own_mid; /* [workers, CHUNK * mid_bytes] */
  size_t out_ld, x_bytes;
};

/* ------------------------------------------------------------------ open and close */

static bool take_rows(mr_cpu_lora_rows *r, size_t n) {
  r->row = mr_mem_alloc(n, sizeof *r->row);
  r->slot = mr_mem_alloc(n, sizeof *r->slot);
  r->chunks = mr_mem_alloc(n, sizeof *r->chunks);
  return r->row && r->slot && r->chunks;
}

static void free_rows(mr_cpu_lora_rows *r) {
  mr_mem_free(r->row);
  mr_mem_free(r->slot);
  mr_mem_free(r->chunks);
}

bool mr_cpu_lora_open(mr_cpu_lora **out, const mr_cpu *c) {
  const mr_lora *l = c->m->lora;
  size_t n = (size_t)c->max_tokens, exact, fast;
  if (!l)
    return true;
  mr_cpu_lora *x = *out = mr_mem_alloc(1, sizeof *x);
  if (!x)
    return false;
  x->l = l;
  x->gemm = &c->k->gemm[MR_LORA_UP];
  x->workers = c->workers;
  int ranks = l->most_ranks > 0 ? l->most_ranks : 1;
  x->t_ld = ((size_t)ranks + 15) & ~(size_t)15;
  exact = x->gemm->row_bytes(ranks);
  fast = c->k->gemm[l->scheme].row_bytes(ranks);
  x->mid_bytes = exact > fast ? exact : fast;
  if (l->most_heads > 0)
    x->mid_bytes += (size_t)l->most_heads * x->gemm->row_bytes(l->head_rank);
  x->mid_plane = n * x->mid_bytes;
  x->out_ld = (size_t)PANELS * (size_t)x->gemm->nr;
  x->adapter = mr_mem_alloc(n, sizeof *x->adapter);
  x->first = mr_mem_alloc((size_t)l->n + 1, sizeof *x->first);
  x->t = mr_mem_pages(n * x->t_ld * sizeof *x->t);
  x->mid = mr_mem_pages(MR_LINEAR_MAX * x->mid_plane);
  x->out = mr_mem_pages((size_t)c->workers * CHUNK * x->out_ld * sizeof *x->out);
  x->own_t = mr_mem_pages((size_t)c->workers * CHUNK * x->t_ld * sizeof *x->own_t);
  x->own_mid = mr_mem_pages((size_t)c->workers * CHUNK * x->mid_bytes);
  exact = c->k->gemm[MR_SCHEME_F32].row_bytes(l->widest > 0 ? l->widest : 1); /* a router's */
  fast = c->k->gemm[l->scheme].row_bytes(l->widest > 0 ? l->widest : 1);
  x->x_bytes = exact > fast ? exact : fast;
  x->own_x = mr_mem_pages((size_t)c->workers * CHUNK * x->x_bytes);
  return take_rows(&x->all, n) && take_rows(&x->wanted, n) && x->adapter && x->first && x->own_x &&
         x->t && x->mid && x->out && x->own_t && x->own_mid;
}

void mr_cpu_lora_close(mr_cpu_lora *x) {
  if (!x)
    return;
  free_rows(&x->all);
  free_rows(&x->wanted);
  mr_mem_free(x->adapter);
  mr_mem_free(x->first);
  mr_mem_free(x->own_x);
  mr_mem_free(x->t);
  mr_mem_free(x->mid);
  mr_mem_free(x->out);
  mr_mem_free(x->own_t);
  mr_mem_free(x->own_mid);
  mr_mem_free(x);
}

/* ------------------------------------------------------------------ the rows of a step */

/* Rows 0..n-1, of which row i is token at[i] (NULL: i), sorted by adapter. */
static void sort_rows(mr_cpu_lora *x, mr_cpu_lora_rows *r, int n, const int32_t *at) {
  int32_t *first = x->first;
  memset(first, 0, ((size_t)x->l->n + 1) * sizeof *first);
  for (int i = 0; i < n; i++)
    first[x->adapter[at ? at[i] : i]]++;
  int32_t sum = 0, none = first[0];
  for (int a = 1; a <= x->l->n; a++) {
    int32_t count = first[a];
    first[a] = sum;
    sum += count;
  }
  r->n = n - none;
  for (int i = 0; i < n; i++) {
    int32_t a = x->adapter[at ? at[i] : i];
    r->slot[i] = a ? first[a]++ : -1;
    if (a)
      r->row[r->slot[i]] = i;
  }
  int most = r->n < 2 * CHUNK * x->workers ? SMALL : CHUNK;
  r->n_chunks = 0;
  for (int a = 1, s = 0; a <= x->l->n; a++) /* first[a] is now the end of a's rows */
    for (; s < first[a]; s += r->chunks[r->n_chunks++].n)
      r->chunks[r->n_chunks] = (chunk){a - 1, s, first[a] - s < most ? first[a] - s : most};
}

void mr_cpu_lora_begin(mr_cpu_lora *x, const mr_batch *batch) {
  if (!x)
    return;
  int at = 0;
  for (int r = 0; r < batch->n_runs; r++)
    for (int i = 0; i < batch->runs[r].n; i++)
      x->adapter[at++] = batch->runs[r].adapter;
  sort_rows(x, &x->all, batch->n_tokens, NULL);
  sort_rows(x, &x->wanted, batch->n_wanted, batch->wanted);
}

const mr_cpu_lora_rows *mr_cpu_lora_rows_of(const mr_cpu_lora *x, const mr_linear *op) {
  const mr_cpu_lora_rows *r = !x ? NULL : op->wanted ? &x->wanted : &x->all;
  bool any = false;
  for (int i = 0; i < op->n; i++)
    any = any || op->w[i]->lora;
  return r && r->n > 0 && any ? r : NULL;
}

int mr_cpu_lora_of(const mr_cpu_lora *x, int token) {
  return x ? x->adapter[token] - 1 : -1;
}

void mr_cpu_lora_embed(const mr_cpu *c, float *y, int token, int32_t id) {
  int a = mr_cpu_lora_of(c->lora, token), d = c->m->c.d_model;
  if (a < 0)
    return;
  const mr_lora_embed *e = &c->m->lora->embed[a];
  for (int r = 0; r < e->rank; r++)
    c->k->axpy(y, e->b + (size_t)r * (size_t)d, e->a[(size_t)id * (size_t)e->rank + (size_t)r], d);
}

/* ------------------------------------------------------------------ the two phases */

typedef struct job {
  mr_cpu *c;
  mr_cpu_lora *x;
  const mr_cpu_lora_rows *rows;
  const mr_linear *op;
  int k;
  int first[MR_LINEAR_MAX + 1]; /* items of the second phase before matrix i, in one chunk */
} job;

static const mr_lora_link *link_of(const job *j, int i, int adapter) {
  const mr_lora_link *all = j->op->w[i]->lora;
  return all ? &all[adapter] : NULL;
}

static int panels_of(const mr_gemm_ops *g, int n) {
  return (n + g->nr - 1) / g->nr;
}

/* The chunk's rows as the base has packed them, one after the other. */
static const uint8_t *packed_rows(const job *j, const chunk *h, const mr_gemm_ops *g, int worker) {
  const int32_t *row = j->rows->row + h->slot;
  size_t bytes = g->row_bytes(j->k);
  if (row[h->n - 1] - row[0] == h->n - 1)
    return j->c->packed + (size_t)row[0] * bytes;
  uint8_t *own = j->x->own_x + (size_t)worker * CHUNK * j->x->x_bytes;
  for (int r = 0; r < h->n; r++)
    memcpy(own + (size_t)r * bytes, j->c->packed + (size_t)row[r] * bytes, bytes);
  return own;
}

/* A times what the input has of each head: to t, head by head. */
static void meet_heads(const job *j, const chunk *h, const mr_lora_heads *a, float *t, int worker) {
  const mr_cpu_lora *x = j->x;
  const mr_gemm_ops *g = x->gemm;
  const int32_t *row = j->rows->row + h->slot;
  uint8_t *own = x->own_x + (size_t)worker * CHUNK * x->x_bytes;
  for (int head = 0; head < a->n; head++) {
    for (int r = 0; r < h->n; r++)
      g->pack_row(own + (size_t)r * g->row_bytes(a->latent),
                  mr_cpu_row(j->op->x, row[r]) + (size_t)head * (size_t)a->size, a->latent);
    g->gemm(t + (size_t)head * (size_t)a->rank, x->t_ld, own, h->n, a->panels, 0,
            panels_of(g, a->rank), a->rank, a->latent, NULL, 0);
  }
}

static const mr_gemm_ops *up_of(const mr_cpu *c, const mr_lora_link *y) {
  return &c->k->gemm[y->up_scheme];
}

static bool follows(const mr_lora_link *y) {
  return y && y->heads && !y->heads->output;
}

/* Packed rows that meet the transpose of A in a head of the chunk. */
static uint8_t *mid_of(const job *j, const chunk *h, int i, const mr_lora_link *y, int head) {
  const mr_cpu_lora *x = j->x;
  size_t rows = (size_t)h->n, up = y->up ? up_of(j->c, y)->row_bytes(y->up_rank) : 0;
  return x->mid + (size_t)i * x->mid_plane + (size_t)h->slot * x->mid_bytes + rows * up +
         (size_t)head * rows * x->gemm->row_bytes(y->heads->rank);
}

/* n values of each row of t, packed one row after the other. */
static void pack_mid(const job *j, const chunk *h, const mr_gemm_ops *g, uint8_t *to,
                     const float *t, int n) {
  for (int r = 0; r < h->n; r++)
    g->pack_row(to + (size_t)r * g->row_bytes(n), t + (size_t)r * j->x->t_ld, n);
}

static void go_down(void *ctx, int item, int worker) {
  const job *j = ctx;
  mr_cpu_lora *x = j->x;
  const chunk *h = &j->rows->chunks[item];
  const mr_lora_down *last = NULL;
  float *t = x->t + (size_t)h->slot * x->t_ld;
  for (int i = 0; i < j->op->n; i++) {
    const mr_lora_link *y = link_of(j, i, h->adapter);
    if (!y)
      continue;
    if (y->down && y->down != last) {
      const mr_gemm_ops *g = &j->c->k->gemm[y->down->scheme];
      last = y->down;
      g->gemm(t, x->t_ld, packed_rows(j, h, g, worker), h->n, last->packed, 0,
              panels_of(g, last->ranks), last->ranks, j->k, NULL, 0);
    }
    if (y->heads && y->heads->output)
      meet_heads(j, h, y->heads, t + y->first + y->rank, worker);
    if (y->up)
      pack_mid(j, h, up_of(j->c, y),
               x->mid + (size_t)i * x->mid_plane + (size_t)h->slot * x->mid_bytes, t + y->first,
               y->up_rank);
    for (int head = 0; follows(y) && head < y->heads->n; head++)
      pack_mid(j, h, x->gemm, mid_of(j, h, i, y, head),
               t + y->first + y->up_rank + (size_t)head * (size_t)y->heads->rank, y->heads->rank);
  }
}

/* y of the chunk's rows, columns of panels p0..p1-1, += B t + bias. Rows that lie apart take a way
 * round that gives the same bits. */
static void add_up(const job *j, const chunk *h, int i, int p0, int p1, int worker) {
  const mr_cpu_lora *x = j->x;
  const mr_lora_link *y = link_of(j, i, h->adapter);
  const mr_gemm_ops *g = up_of(j->c, y);
  const int32_t *row = j->rows->row + h->slot;
  int n = j->op->w[i]->n, col = p0 * g->nr, cols = (p1 * g->nr < n ? p1 * g->nr : n) - col;
  const uint8_t *mid = x->mid + (size_t)i * x->mid_plane + (size_t)h->slot * x->mid_bytes;
  mr_buf *to = j->op->y[i];
  if (!y->up) {
    for (int r = 0; y->bias && r < h->n; r++)
      j->c->k->axpy(mr_cpu_row(to, row[r]) + col, y->bias + col, 1, cols);
  } else if (row[h->n - 1] - row[0] == h->n - 1) {
    for (int r = 0; r < h->n; r += ROWS) /* few rows at a time: y is gone through in order */
      g->gemm(mr_cpu_row(to, row[r]), to->ld, mid + (size_t)r * g->row_bytes(y->up_rank),
              h->n - r < ROWS ? h->n - r : ROWS, y->up, p0, p1, n, y->up_rank, y->bias, 1);
  } else {
    float *out = x->out + (size_t)worker * CHUNK * x->out_ld;
    g->gemm(out, x->out_ld, mid, h->n, y->up + (size_t)p0 * g->panel_bytes(y->up_rank), 0, p1 - p0,
            cols, y->up_rank, y->bias ? y->bias + col : NULL, 0);
    for (int r = 0; r < h->n; r++)
      j->c->k->axpy(mr_cpu_row(to, row[r]) + col, out + (size_t)r * x->out_ld, 1, cols);
  }
}

static void go_up(void *ctx, int item, int worker) {
  const job *j = ctx;
  const chunk *h = &j->rows->chunks[item / j->first[j->op->n]];
  int at = item % j->first[j->op->n], i = 0;
  while (at >= j->first[i + 1])
    i++;
  const mr_lora_link *y = link_of(j, i, h->adapter);
  int total = panels_of(j->x->gemm, j->op->w[i]->n), p0 = (at - j->first[i]) * PANELS;
  if (y && (y->up || y->bias))
    add_up(j, h, i, p0, p0 + PANELS < total ? p0 + PANELS : total, worker);
}

/* The queries of one head, which are the operation's first matrix, of one chunk. */
static void go_heads(void *ctx, int item, int worker) {
  const job *j = ctx;
  const mr_gemm_ops *g = j->x->gemm;
  int heads = j->c->m->c.n_heads, head = item % heads;
  const chunk *h = &j->rows->chunks[item / heads];
  const mr_lora_link *y = link_of(j, 0, h->adapter);
  const int32_t *row = j->rows->row + h->slot;
  mr_buf *to = j->op->y[0];
  (void)worker;
  if (!follows(y))
    return;
  const mr_lora_heads *a = y->heads;
  const uint8_t *mid = mid_of(j, h, 0, y, head);
  for (int r = 0, n; r < h->n; r += n) { /* rows that lie one after the other */
    for (n = 1; r + n < h->n && row[r + n] == row[r] + n;)
      n++;
    g->gemm(mr_cpu_row(to, row[r]) + (size_t)head * (size_t)a->size, to->ld,
            mid + (size_t)r * g->row_bytes(a->rank), n, a->panels, 0, panels_of(g, a->latent),
            a->latent, a->rank, NULL, 1);
  }
}

static void count(job *j) {
  for (int h = 0; h < j->rows->n_chunks; h++)
    for (int i = 0; i < j->op->n; i++) {
      const mr_lora_link *y = link_of(j, i, j->rows->chunks[h].adapter);
      const mr_lora_heads *a = y ? y->heads : NULL;
      double heads = a ? (double)a->n * a->rank * a->latent : 0;
      if (y)
        j->c->base.stats.flops +=
            2.0 * j->rows->chunks[h].n *
            (heads + (double)y->rank * j->k + (double)y->up_rank * j->op->w[i]->n);
    }
}

void mr_cpu_lora_linear(mr_cpu *c, const mr_cpu_lora_rows *rows, const mr_linear *op) {
  if (!rows)
    return;
  job j = {.c = c, .x = c->lora, .rows = rows, .op = op, .k = op->w[0]->k};
  double start = mr_sys_seconds();
  for (int i = 0; i < op->n; i++)
    j.first[i + 1] = j.first[i] + (panels_of(j.x->gemm, op->w[i]->n) + PANELS - 1) / PANELS;
  mr_pool_run(c->pool, go_down, &j, rows->n_chunks);
  mr_pool_run(c->pool, go_up, &j, rows->n_chunks * j.first[op->n]);
  bool heads = false;
  for (int h = 0; h < rows->n_chunks; h++)
    heads |= follows(link_of(&j, 0, rows->chunks[h].adapter));
  if (heads)
    mr_pool_run(c->pool, go_heads, &j, rows->n_chunks * c->m->c.n_heads);
  c->base.stats.gemm_s += mr_sys_seconds() - start;
  count(&j);
}

/* ------------------------------------------------------------------ slots of experts */

static void add_slots(mr_cpu *c, const mr_cpu_lora_slots *s, int from, int n, int worker) {
  const mr_cpu_lora *x = c->lora;
  const mr_lora_down *last = NULL;
  float *t = x->own_t + (size_t)worker * CHUNK * x->t_ld;
  uint8_t *mid = x->own_mid + (size_t)worker * CHUNK * x->mid_bytes;
  for (int i = 0; i < s->n; i++) {
    const mr_lora_link *y = s->link[i];
    float *to = s->y[i] + (size_t)from * s->ld;
    int cols = s->w[i]->n;
    if (!y || !y->down) {
      for (int r = 0; y && y->bias && r < n; r++)
        c->k->axpy(to + (size_t)r * s->ld, y->bias, 1, cols);
      continue;
    }
    if (y->down != last) {
      const mr_gemm_ops *d = &c->k->gemm[y->down->scheme];
      d->gemm(t, x->t_ld, s->x + (size_t)from * d->row_bytes(s->k), n, y->down->packed, 0,
              panels_of(d, y->down->ranks), y->down->ranks, s->k, NULL, 0);
    }
    last = y->down;
    const mr_gemm_ops *g = up_of(c, y);
    for (int r = 0; r < n; r++)
      g->pack_row(mid + (size_t)r * g->row_bytes(y->rank), t + (size_t)r * x->t_ld + y->first,
                  y->rank);
    g->gemm(to, s->ld, mid, n, y->up, 0, panels_of(g, cols), cols, y->rank, y->bias, 1);
  }
}

void mr_cpu_lora_slots_add(mr_cpu *c, const mr_cpu_lora_slots *s, int worker) {
  for (int at = 0; at < s->rows; at += CHUNK)
    add_slots(c, s, at, s->rows - at < CHUNK ? s->rows - at : CHUNK, worker);
}
