/* Weights on the device: rows come out of the file as float32 and are rounded here, a piece of a
 * matrix at a time. */
#include "src/backend_gpu.h"

#include <math.h>
#include <stdlib.h>

#include "io/mem.h"
#include "kernels/dtype.h"

#define PIECE ((size_t)8 << 20) /* bytes of the host's memory that go over at once */
#define ROWS 16                 /* that are read at once */

/* ------------------------------------------------------------------ sizes */

static mr_gpu_scheme scheme_for(const mr_model *m, const mr_matrix *w, mr_gpu_scheme scheme) {
  for (int i = 0; i < m->c.n_layers; i++)
    if (w == &m->layers[i].router)
      return MR_GPU_EXACT;
  return scheme;
}

static size_t round_up(size_t n) {
  return (n + 255) & ~(size_t)255;
}

static size_t matrix_bytes(const mr_matrix *w, mr_gpu_scheme scheme) {
  size_t values = (size_t)w->n * (size_t)mr_gpu_padded(w->k);
  size_t bias = w->bias ? round_up((size_t)w->n * sizeof(float)) : 0;
  if (scheme == MR_GPU_SMALL)
    return round_up(values) + round_up(values / MR_GPU_Q8_GROUP * sizeof(float)) + bias;
  return round_up(values * 2 * (scheme == MR_GPU_EXACT ? 2 : 1)) + bias;
}

/* The head may be the embedding itself. */
static bool is_shared(const mr_model *m, mr_gpu_scheme scheme) {
  return scheme != MR_GPU_SMALL && m->head.data == m->embed.data && m->head.n == m->embed.n &&
         m->head.k == m->embed.k && m->head.first == m->embed.first &&
         m->head.columns == m->embed.columns && m->head.quant == m->embed.quant &&
         m->head.product == m->embed.product && m->head.group == m->embed.group;
}

static mr_gpu_scheme embed_scheme(mr_gpu_scheme scheme) {
  return scheme == MR_GPU_EXACT ? MR_GPU_EXACT : MR_GPU_FAST;
}

/* Norms and the like, at most: each takes up to 255 bytes more than it has. */
static size_t vector_bytes(const mr_model *m) {
  const mr_config *c = &m->c;
  size_t d = (size_t)c->d_model, q = (size_t)c->n_heads * (size_t)c->head_dim;
  size_t layer = 7 * d + 3 * q + (size_t)(c->d_ff + c->q_lora + c->kv_lora + c->n_heads);
  size_t position = m->position_embd ? (size_t)c->context * d : 0;
  return (size_t)c->n_layers * (layer * sizeof(float) + 16 * 256) +
         (position + 4 * d + q) * sizeof(float) + 8 * 256;
}

size_t mr_gpu_weight_bytes(const mr_model *m, mr_gpu_scheme scheme) {
  size_t sum = matrix_bytes(&m->head, scheme) + vector_bytes(m);
  if (!is_shared(m, scheme))
    sum += matrix_bytes(&m->embed, embed_scheme(scheme));
  for (int i = 0; i < m->c.n_layers; i++)
    for (int j = 0; j < mr_layer_matrices(m, &m->layers[i]); j++) {
      const mr_matrix *w = mr_layer_matrix(&m->layers[i], j);
      if (w->n)
        sum += matrix_bytes(w, scheme_for(m, w, scheme));
    }
  return sum;
}

/* ------------------------------------------------------------------ rounding */

static void round_pairs(const mr_gpu_matrix *w, const float *row, uint8_t *to, uint8_t *rest) {
  mr_gpu_bf16 *high = (mr_gpu_bf16 *)(void *)to, *low = (mr_gpu_bf16 *)(void *)rest;
  for (int i = 0; i < w->k; i++) {
    float x = i < w->of->k ? row[i] : 0;
    high[i] = mr_f32_to_bf16(x);
    if (low)
      low[i] = isfinite(x) ? mr_f32_to_bf16(x - mr_bf16_to_f32(high[i])) : 0;
  }
}

static void round_int8(const mr_gpu_matrix *w, const float *row, uint8_t *to, uint8_t *scales) {
  int8_t *q = (int8_t *)to;
  float *scale = (float *)(void *)scales;
  for (int g = 0; g < w->k / MR_GPU_Q8_GROUP; g++) {
    float most = 0;
    int i0 = g * MR_GPU_Q8_GROUP;
    for (int i = i0; i < i0 + MR_GPU_Q8_GROUP && i < w->of->k; i++)
      most = fmaxf(most, fabsf(row[i]));
    scale[g] = most / 127;
    for (int i = i0; i < i0 + MR_GPU_Q8_GROUP; i++)
      q[i] = i < w->of->k && most > 0 ? (int8_t)lrintf(row[i] / most * 127) : 0;
  }
}

typedef struct loader {
  mr_gpu *g;
  float *rows;       /* ROWS, and room for products */
  uint8_t *piece[2]; /* pinned; of the two planes, or of values and scales */
} loader;

/* A matrix, piece by piece of its rows. */
static mr_code fill(loader *l, const mr_gpu_matrix *w) {
  bool small = w->scheme == MR_GPU_SMALL;
  size_t k = (size_t)w->k, bytes = small ? k : 2 * k;
  size_t second = small ? k / MR_GPU_Q8_GROUP * sizeof(float) : w->plane ? 2 * k : 0;
  int rows = (int)(PIECE / bytes);
  uint8_t *to[2] = {small ? (uint8_t *)w->w8 : (uint8_t *)w->w,
                    small ? (uint8_t *)w->scales : (uint8_t *)(w->w + w->plane)};
  for (int r0 = 0; r0 < w->of->n; r0 += rows) {
    int n = rows < w->of->n - r0 ? rows : w->of->n - r0;
    for (int r = 0; r < n; r++) {
      uint8_t *a = l->piece[0] + (size_t)r * bytes, *b = l->piece[1] + (size_t)r * second;
      int at = r % ROWS, several = ROWS < n - r ? ROWS : n - r;
      const float *row = l->rows + (size_t)at * (size_t)w->of->k;
      if (at == 0)
        mr_matrix_rows(w->of, r0 + r, several, l->rows, l->rows + ROWS * (size_t)w->of->k);
      if (small)
        round_int8(w, row, a, b);
      else
        round_pairs(w, row, a, second ? b : NULL);
    }
    mr_device *d = l->g->dev;
    mr_code rc =
        mr_device_put(d, l->g->stream, to[0] + (size_t)r0 * bytes, l->piece[0], (size_t)n * bytes);
    if (!rc && second)
      rc = mr_device_put(d, l->g->stream, to[1] + (size_t)r0 * second, l->piece[1],
                         (size_t)n * second);
    if (rc)
      return rc;
  }
  return MR_OK;
}

static mr_code load(loader *l, const mr_matrix *of, mr_gpu_scheme scheme, mr_err *err) {
  mr_gpu *g = l->g;
  if (!mr_mem_grow((void **)&g->matrices, &g->cap_matrices, g->n_matrices + 1, sizeof *g->matrices))
    return mr_err_set(err, MR_E_NOMEM, "out of memory for the weights");
  mr_gpu_matrix w = {.of = of, .scheme = scheme, .k = mr_gpu_padded(of->k)};
  size_t values = (size_t)of->n * (size_t)w.k;
  bool ok;
  if (scheme == MR_GPU_SMALL) {
    w.w8 = mr_device_take(g->dev, values);
    w.scales = mr_device_take(g->dev, values / MR_GPU_Q8_GROUP * sizeof(float));
    ok = w.w8 && w.scales;
  } else {
    w.plane = scheme == MR_GPU_EXACT ? values : 0;
    w.w = mr_device_take(g->dev, (values + w.plane) * sizeof *w.w);
    ok = w.w;
  }
  if (ok && of->bias)
    ok = (w.bias = mr_device_take(g->dev, (size_t)of->n * sizeof(float))) != NULL;
  if (!ok)
    return mr_err_set(err, MR_E_UNAVAILABLE,
                      "the weights do not fit into the %zu bytes taken of device %s; use a larger "
                      "--device-memory, or --device cpu",
                      g->dev->cap, g->dev->name);
  g->matrices[g->n_matrices++] = w;
  mr_code rc = fill(l, &w);
  if (!rc && of->bias)
    rc = mr_device_put(g->dev, g->stream, w.bias, of->bias, (size_t)of->n * sizeof(float));
  return mr_device_fail(g->dev, rc, err);
}

/* ------------------------------------------------------------------ all of them */

static int by_address(const void *a, const void *b) {
  const mr_gpu_matrix *x = a, *y = b;
  return x->of < y->of ? -1 : x->of > y->of;
}

static mr_code load_all(loader *l, mr_err *err) {
  const mr_model *m = l->g->m;
  mr_code rc = load(l, &m->head, l->g->scheme, err);
  if (!rc && !is_shared(m, l->g->scheme))
    rc = load(l, &m->embed, embed_scheme(l->g->scheme), err);
  for (int i = 0; i < m->c.n_layers; i++)
    for (int j = 0; !rc && j < mr_layer_matrices(m, &m->layers[i]); j++) {
      const mr_matrix *w = mr_layer_matrix(&m->layers[i], j);
      if (w->n)
        rc = load(l, w, scheme_for(m, w, l->g->scheme), err);
    }
  return rc;
}

/* Floats of ROWS rows of the largest matrix, with their room. */
static size_t most_floats(const mr_model *m) {
  size_t most = 0;
  for (int i = -2; i < m->c.n_layers; i++)
    for (int j = 0; j < (i < 0 ? 1 : mr_layer_matrices(m, &m->layers[i])); j++) {
      const mr_matrix *w = i == -2   ? &m->head
                           : i == -1 ? &m->embed
                                     : mr_layer_matrix(&m->layers[i], j);
      size_t floats = w->n ? ROWS * (size_t)w->k + mr_matrix_room(w, ROWS) : 0;
      most = floats > most ? floats : most;
    }
  return most;
}

static int widest_row(const mr_model *m) {
  int k = m->head.k > m->embed.k ? m->head.k : m->embed.k;
  for (int i = 0; i < m->c.n_layers; i++)
    for (int j = 0; j < mr_layer_matrices(m, &m->layers[i]); j++) {
      const mr_matrix *w = mr_layer_matrix(&m->layers[i], j);
      k = w->n && w->k > k ? w->k : k;
    }
  return mr_gpu_padded(k);
}

mr_code mr_gpu_load_weights(mr_gpu *g, mr_err *err) {
  loader l = {.g = g, .rows = mr_mem_alloc(most_floats(g->m), sizeof(float))};
  size_t piece = PIECE + 4 * (size_t)widest_row(g->m);
  mr_code rc = l.rows ? MR_OK : MR_E_NOMEM;
  for (int i = 0; i < 2 && !rc; i++)
    rc = g->dev->ops->host_alloc(g->dev, piece, (void **)&l.piece[i]);
  rc = rc ? mr_err_set(err, MR_E_NOMEM, "out of memory for the weights") : load_all(&l, err);
  for (int i = 0; i < 2; i++)
    if (l.piece[i])
      g->dev->ops->host_release(g->dev, l.piece[i]);
  mr_mem_free(l.rows);
  if (rc)
    return rc;
  qsort(g->matrices, g->n_matrices, sizeof *g->matrices, by_address);
  g->embed = mr_gpu_find(g, is_shared(g->m, g->scheme) ? &g->m->head : &g->m->embed);
  return MR_OK;
}

const mr_gpu_matrix *mr_gpu_find(const mr_gpu *g, const mr_matrix *w) {
  mr_gpu_matrix key = {.of = w};
  return bsearch(&key, g->matrices, g->n_matrices, sizeof *g->matrices, by_address);
}

/* ------------------------------------------------------------------ vectors */

const float *mr_gpu_vector_of(mr_gpu *g, const float *host, size_t n) {
  if (!host)
    return NULL;
  for (size_t i = 0; i < g->n_vectors; i++)
    if (g->vectors[i].of == host)
      return g->vectors[i].at;
  /* the first time: it stays */
  mr_gpu_vector v = {.of = host, .at = mr_device_take(g->dev, n * sizeof *host)};
  if (!v.at || !mr_mem_grow((void **)&g->vectors, &g->cap_vectors, g->n_vectors + 1, sizeof v)) {
    g->rc = g->rc ? g->rc : MR_E_NOMEM;
    return NULL;
  }
  mr_code rc = mr_device_put(g->dev, g->stream, v.at, host, n * sizeof *host);
  g->rc = g->rc ? g->rc : rc;
  g->vectors[g->n_vectors++] = v;
  return v.at;
}

mr_gpu_norm mr_gpu_norm_of(mr_gpu *g, const mr_norm_spec *norm, int cols) {
  int kind = norm->kind == MR_NORM_RMS     ? MR_GPU_NORM_RMS
             : norm->kind == MR_NORM_LAYER ? MR_GPU_NORM_LAYER
                                           : MR_GPU_NORM_NONE;
  if (kind == MR_GPU_NORM_NONE)
    return (mr_gpu_norm){.kind = kind};
  return (mr_gpu_norm){.kind = kind,
                       .w = mr_gpu_vector_of(g, norm->w, (size_t)cols),
                       .b = mr_gpu_vector_of(g, norm->b, (size_t)cols),
                       .eps = norm->eps};
}
