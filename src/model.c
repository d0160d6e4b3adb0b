#include "src/model_load.h"

#include "io/mem.h"
#include "io/sys.h"
#include "src/product.h"

static mr_code load(mr_model *m, const char *path, mr_err *err) {
  mr_code rc = mr_weights_open(&m->weights, path, err);
  if (rc)
    return rc;
  m->gguf = m->weights->gguf;
  rc = m->gguf ? mr_config_from_gguf(&m->c, m->gguf, err) : mr_config_from_dir(&m->c, path, err);
  return rc ? rc : mr_load_model(m, err);
}

mr_code mr_model_open(mr_model **out, const char *path, mr_err *err) {
  *out = NULL;
  mr_model *m = mr_mem_alloc(1, sizeof *m);
  if (!m)
    return mr_err_at(err, MR_E_NOMEM, path, 0, -1, "no memory");
  mr_code rc = load(m, path, err);
  if (rc)
    mr_model_close(m);
  else
    *out = m;
  return rc;
}

enum { OWN = 9 }; /* matrices of a layer beside its experts */

int mr_layer_matrices(const mr_model *m, const mr_layer *y) {
  return OWN + (y->experts ? 3 * mr_layer_experts(m) : 0);
}

mr_matrix *mr_layer_matrix(mr_layer *y, int i) {
  mr_matrix *const own[OWN] = {&y->q,  &y->k,    &y->v,   &y->o,     &y->gate,
                               &y->up, &y->down, &y->q_a, &y->router};
  if (i < OWN)
    return own[i];
  mr_expert *x = &y->experts[(i - OWN) / 3];
  return (i - OWN) % 3 == 0 ? &x->gate : (i - OWN) % 3 == 1 ? &x->up : &x->down;
}

int mr_model_widest(const mr_model *m) {
  int k = m->head.k > m->embed.k ? m->head.k : m->embed.k;
  for (int i = 0; i < m->c.n_layers; i++)
    for (int j = 0; j < mr_layer_matrices(m, &m->layers[i]); j++) {
      const mr_matrix *w = mr_layer_matrix(&m->layers[i], j);
      k = w->n > 0 && w->k > k ? w->k : k;
    }
  return k;
}

typedef mr_code (*visit)(void *ctx, mr_matrix *w, bool exact);

/* Every matrix that is there; the head last. A router's scores decide which experts run, so it is
 * always exact. Stops at an error. */
static mr_code each_matrix(mr_model *m, visit fn, void *ctx) {
  mr_code rc = MR_OK;
  for (int i = 0; m->layers && i < m->c.n_layers; i++)
    for (int j = 0; j < mr_layer_matrices(m, &m->layers[i]) && !rc; j++) {
      mr_matrix *w = mr_layer_matrix(&m->layers[i], j);
      if (w->n > 0 && w->dtype >= 0)
        rc = fn(ctx, w, w == &m->layers[i].router);
    }
  return rc ? rc : fn(ctx, &m->head, false);
}

static mr_code unpack_one(void *ctx, mr_matrix *w, bool exact) {
  (void)ctx;
  (void)exact;
  mr_mem_free(w->packed);
  w->packed = NULL;
  return MR_OK;
}

static bool stored_as_floats(const mr_matrix *w) {
  if (w->product)
    return stored_as_floats(&w->product->w) && stored_as_floats(&w->product->kv_b);
  return !w->quant && (w->dtype == MR_F32 || w->dtype == MR_F16 || w->dtype == MR_BF16);
}

mr_scheme mr_model_scheme(const mr_model *m, const mr_kernels *k, bool exact) {
  if (exact)
    return MR_SCHEME_F32;
  for (int i = 0; i < m->c.n_layers; i++)
    for (int j = 0; j < mr_layer_matrices(m, &m->layers[i]); j++) {
      const mr_matrix *w = mr_layer_matrix(&m->layers[i], j);
      if (w->n > 0 && w->dtype >= 0 && !stored_as_floats(w))
        return MR_SCHEME_I8;
    }
  return k->floats;
}

mr_kv_type mr_model_kv_type(const mr_model *m, const mr_kernels *k, mr_scheme scheme) {
  return scheme == MR_SCHEME_F32    ? MR_KV_F32
         : scheme == MR_SCHEME_BF16 ? MR_KV_F16
                                    : k->kv_type(m->c.head_dim);
}

static void unpack(mr_model *m) {
  each_matrix(m, unpack_one, NULL);
  m->packed_bytes = 0;
}

void mr_model_close(mr_model *m) {
  if (!m)
    return;
  unpack(m);
  for (size_t i = 0; i < m->n_vectors; i++)
    mr_mem_free(m->vectors[i]);
  mr_mem_free(m->vectors);
  for (int i = 0; m->layers && i < m->c.n_layers; i++)
    mr_mem_free(m->layers[i].experts);
  mr_mem_free(m->layers);
  mr_weights_close(m->weights);
  mr_mem_free(m);
}

typedef struct pack_job {
  mr_model *m;
  const mr_kernels *k;
  const mr_gemm_ops *ops;
  mr_scheme scheme;
  mr_pool *pool;
  mr_matrix *w;
  float *rows;        /* nr rows for each worker, and room for products */
  size_t rows_floats; /* of one worker */
  size_t most, most_room;
  mr_err *err;
} pack_job;

static void pack_one(void *ctx, int panel, int worker) {
  const pack_job *j = ctx;
  const mr_matrix *w = j->w;
  int64_t first = (int64_t)panel * j->ops->nr;
  int cols = w->n - first < j->ops->nr ? (int)(w->n - first) : j->ops->nr;
  float *rows = j->rows + (size_t)worker * j->rows_floats;
  mr_matrix_rows(w, first, cols, rows, rows + j->most);
  j->ops->pack_panel(w->packed + (size_t)panel * j->ops->panel_bytes(w->k), rows, (size_t)w->k,
                     cols, w->k);
}

/* A packed matrix is not read again: its part of the file need not stay in memory. Views of one
 * tensor may drop each other's pages, which are then read again. */
static void unload(const mr_matrix *w) {
  if (w->product) {
    unload(&w->product->w);
    unload(&w->product->kv_b);
  }
  if (!w->mapped || w->quant)
    return;
  int64_t first = mr_matrix_source(w, 0), last = mr_matrix_source(w, w->n - 1);
  uint64_t from = w->columns ? 0 : (uint64_t)first * w->row_bytes;
  uint64_t to = (w->columns ? (uint64_t)w->k : (uint64_t)last + 1) * w->row_bytes;
  mr_sys_now->unload(w->data + from, (size_t)(to - from));
}

static mr_code pack_matrix(void *ctx, mr_matrix *w, bool exact) {
  pack_job *j = ctx;
  w->scheme = exact ? MR_SCHEME_F32 : j->scheme;
  j->w = w;
  j->ops = &j->k->gemm[w->scheme];
  int64_t panels = ((int64_t)w->n + j->ops->nr - 1) / j->ops->nr;
  size_t bytes;
  if (!mr_mem_mul((size_t)panels, j->ops->panel_bytes(w->k), &bytes) ||
      !(w->packed = mr_mem_pages(bytes)))
    return mr_err_at(j->err, MR_E_NOMEM, j->m->weights->path, 0, -1,
                     "no memory for the weights (a matrix [%d, %d] beside %llu bytes)", w->n, w->k,
                     (unsigned long long)j->m->packed_bytes);
  j->m->packed_bytes += bytes;
  if (j->pool)
    mr_pool_run(j->pool, pack_one, j, (int)panels);
  else
    for (int p = 0; p < (int)panels; p++)
      pack_one(j, p, 0);
  unload(w);
  return MR_OK;
}

static mr_code measure(void *ctx, mr_matrix *w, bool exact) {
  pack_job *j = ctx;
  size_t nr = (size_t)j->k->gemm[exact ? MR_SCHEME_F32 : j->scheme].nr;
  size_t floats = nr * (size_t)w->k, room = mr_matrix_room(w, (int)nr);
  j->most = floats > j->most ? floats : j->most;
  j->most_room = room > j->most_room ? room : j->most_room;
  return MR_OK;
}

mr_code mr_model_pack(mr_model *m, const mr_kernels *k, mr_scheme scheme, mr_pool *pool,
                      mr_err *err) {
  pack_job j = {.m = m, .k = k, .scheme = scheme, .pool = pool, .err = err};
  size_t workers = pool ? (size_t)mr_pool_threads(pool) : 1, floats;
  unpack(m);
  each_matrix(m, measure, &j);
  j.rows_floats = j.most + j.most_room;
  if (!mr_mem_mul(workers, j.rows_floats, &floats) ||
      !(j.rows = mr_mem_alloc(floats, sizeof *j.rows)))
    return mr_err_at(err, MR_E_NOMEM, m->weights->path, 0, -1, "no memory to pack the weights");
  mr_code rc = each_matrix(m, pack_matrix, &j);
  mr_mem_free(j.rows);
  if (rc)
    unpack(m);
  return rc;
}

static double flops(const mr_matrix *w) {
  return 2.0 * w->n * w->k;
}

double mr_model_layer_flops(const mr_model *m) {
  double n = 0;
  for (int i = 0; i < m->c.n_layers; i++) {
    mr_layer *y = &m->layers[i];
    int all = m->c.n_experts, shared = m->c.d_shared > 0;
    for (int j = 0; j < OWN; j++)
      n += flops(mr_layer_matrix(y, j));
    for (int j = OWN; j < mr_layer_matrices(m, y); j++)
      n += flops(mr_layer_matrix(y, j)) *
           (j < OWN + 3 * all ? (double)m->c.n_experts_used / all : shared);
  }
  return n;
}

bool mr_model_tied(const mr_model *m) {
  const mr_matrix *a = &m->head, *b = &m->embed;
  return a->data == b->data && a->quant == b->quant && a->product == b->product;
}

double mr_model_head_flops(const mr_model *m) {
  return flops(&m->head);
}
