/* Weights on the device: rows come out of the file as float32 and are rounded here, a piece of a
 * matrix at a time. */
#include "src/backend_gpu_lora.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "io/mem.h"
#include "kernels/dtype.h"

#define PIECE ((size_t)8 << 20) /* bytes of the host's memory that go over at once */
#define ROWS 16                 /* that are read at once */

/* ------------------------------------------------------------------ sizes */

/* How a matrix is held. room: its k floats. */
static mr_gpu_hold hold_of(const mr_model *m, const mr_matrix *w, mr_gpu_scheme scheme,
                           float *room) {
  for (int i = 0; i < m->c.n_layers; i++)
    if (w == &m->layers[i].router)
      return MR_GPU_PAIR;
  if (scheme == MR_GPU_EXACT || scheme == MR_GPU_ALL_BF16)
    return scheme == MR_GPU_EXACT ? MR_GPU_PAIR : MR_GPU_BF16;
  if (mr_gpu_fits_int4(w, room))
    return MR_GPU_INT4;
  if (scheme == MR_GPU_ALL_INT4)
    return w == &m->head || w == &m->embed ? MR_GPU_INT8 : MR_GPU_INT4;
  return scheme == MR_GPU_BY_FILE && mr_gpu_file_bits(w) > 9 ? MR_GPU_BF16 : MR_GPU_INT8;
}

static size_t round_up(size_t n) {
  return (n + 255) & ~(size_t)255;
}

static size_t matrix_bytes(const mr_matrix *w, mr_gpu_hold hold) {
  size_t n = (size_t)w->n, k = (size_t)mr_gpu_padded(w->k);
  size_t bias = w->bias ? round_up(n * sizeof(float)) : 0;
  if (hold < MR_GPU_INT8)
    return round_up(n * k * 2 * (hold == MR_GPU_PAIR ? 2 : 1)) + bias;
  return round_up(n * mr_gpu_few_bytes(hold, k)) + round_up(n * mr_gpu_few_scale_bytes(hold, k)) +
         round_up(n * sizeof(float)) + bias;
}

/* The head may be the embedding itself. */
static bool is_shared(const mr_model *m) {
  return mr_model_tied(m) && m->head.n == m->embed.n && m->head.k == m->embed.k &&
         m->head.first == m->embed.first && m->head.columns == m->embed.columns &&
         m->head.group == m->embed.group;
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

/* What a scheme makes of a model. */
typedef struct sums {
  size_t bytes, wide; /* all weights; values of the largest matrix of few bits in a layer */
  bool few;           /* any has few bits */
} sums;

static void add_up(sums *s, const mr_model *m, const mr_matrix *w, mr_gpu_scheme scheme,
                   float *room, bool inside) {
  mr_gpu_hold hold = hold_of(m, w, scheme, room);
  size_t values = (size_t)w->n * (size_t)mr_gpu_padded(w->k);
  s->bytes += matrix_bytes(w, hold);
  s->few |= hold >= MR_GPU_INT8;
  if (inside && hold >= MR_GPU_INT8 && values > s->wide)
    s->wide = values;
}

/* Floats of ROWS rows of any matrix, with the room of products. */
static size_t most_floats(const mr_model *m) {
  size_t most = 0;
  for (int i = -2; i < m->c.n_layers; i++)
    for (int j = 0; j < (i < 0 ? 1 : mr_layer_matrices(m, &m->layers[i])); j++) {
      const mr_matrix *w = i == -2   ? &m->head
                           : i == -1 ? &m->embed
                                     : mr_layer_matrix(&m->layers[i], j);
      size_t floats = w->n ? (size_t)ROWS * (size_t)w->k + mr_matrix_room(w, ROWS) : 0;
      most = floats > most ? floats : most;
    }
  return most;
}

/* False: out of the host's memory. */
static bool sum_up(sums *s, const mr_model *m, mr_gpu_scheme scheme) {
  float *room = mr_mem_alloc(mr_gpu_widest(m), sizeof *room);
  *s = (sums){.bytes = vector_bytes(m) + mr_gpu_lora_bytes(m, scheme)};
  if (!room)
    return false;
  add_up(s, m, &m->head, scheme, room, false);
  if (!is_shared(m))
    add_up(s, m, &m->embed, scheme, room, false);
  for (int i = 0; i < m->c.n_layers; i++)
    for (int j = 0; j < mr_layer_matrices(m, &m->layers[i]); j++) {
      const mr_matrix *w = mr_layer_matrix(&m->layers[i], j);
      if (w->n)
        add_up(s, m, w, scheme, room, true);
    }
  mr_mem_free(room);
  s->bytes += round_up(s->wide * sizeof(mr_gpu_bf16));
  return true;
}

size_t mr_gpu_weight_bytes(const mr_model *m, mr_gpu_scheme scheme) {
  sums s;
  return sum_up(&s, m, scheme) ? s.bytes : SIZE_MAX / 2;
}

/* Bytes of a layer's matrices; of few bits or not. */
static size_t layer_bytes(const mr_model *m, int layer, mr_gpu_scheme scheme, float *room) {
  sums s = {0};
  for (int j = 0; j < mr_layer_matrices(m, &m->layers[layer]); j++) {
    const mr_matrix *w = mr_layer_matrix(&m->layers[layer], j);
    if (w->n)
      add_up(&s, m, w, scheme, room, true);
  }
  return s.bytes;
}

int mr_gpu_streamed_for(const mr_model *m, mr_gpu_scheme scheme, size_t room, size_t *bytes) {
  float *row = mr_mem_alloc(mr_gpu_widest(m), sizeof *row);
  size_t left = mr_gpu_weight_bytes(m, scheme), most = 0;
  int n = 0;
  while (row && n < m->c.n_layers && (n < 3 || left + 2 * most > room)) {
    size_t layer = layer_bytes(m, m->c.n_layers - ++n, scheme, row);
    left -= layer;
    most = layer > most ? layer : most;
  }
  mr_mem_free(row);
  *bytes = left + 2 * most;
  return n >= 3 && *bytes <= room ? n : 0;
}

mr_gpu_scheme mr_gpu_scheme_of(const mr_model *m, mr_gpu_scheme scheme) {
  sums s;
  return scheme == MR_GPU_BY_FILE && sum_up(&s, m, scheme) && !s.few ? MR_GPU_ALL_BF16 : scheme;
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

typedef struct loader {
  mr_gpu *g;
  float *rows; /* ROWS of them, and room for those of products */
  float *units;
  uint8_t *piece[2]; /* pinned; of the two planes, or of values and scales */
  /* of a layer that comes over in each step; else -1 */
  int streamed;
  size_t used; /* of its block */
} loader;

/* Memory of the device, or in the place of the layer. */
static void *take_bytes(loader *l, size_t bytes) {
  const mr_gpu_streaming *s = &l->g->streaming;
  if (l->streamed < 0)
    return mr_device_take(l->g->dev, bytes);
  size_t at = l->used;
  l->used += round_up(bytes);
  return l->used <= s->bytes[l->streamed] ? s->place[l->streamed % 2] + at : NULL;
}

/* To the device, or to where it will come from. */
static mr_code put(loader *l, void *to, const void *from, size_t bytes) {
  const mr_gpu_streaming *s = &l->g->streaming;
  if (l->streamed < 0)
    return mr_device_put(l->g->dev, l->g->stream, to, from, bytes);
  memcpy(s->host[l->streamed] + ((uint8_t *)to - s->place[l->streamed % 2]), from, bytes);
  return MR_OK;
}

/* Row r, which is read with those after it where it is the first of ROWS from r0 on. */
static void round_row(const loader *l, const mr_gpu_matrix *w, int r0, int r, uint8_t *a,
                      uint8_t *b) {
  int at = (r - r0) % ROWS, k = w->of->k;
  const float *row = l->rows + (size_t)at * (size_t)k;
  if (at == 0)
    mr_matrix_rows(w->of, r, ROWS < w->of->n - r ? ROWS : w->of->n - r, l->rows,
                   l->rows + (size_t)ROWS * (size_t)k);
  if (w->hold >= MR_GPU_INT8)
    mr_gpu_few_row(w->hold, row, k, w->k, a, (uint16_t *)(void *)b, &l->units[r]);
  else
    round_pairs(w, row, a, w->plane ? b : NULL);
}

/* A matrix, piece by piece of its rows. */
static mr_code fill(loader *l, const mr_gpu_matrix *w) {
  bool few = w->hold >= MR_GPU_INT8;
  size_t k = (size_t)w->k, bytes = few ? mr_gpu_few_bytes(w->hold, k) : 2 * k;
  size_t second = few ? mr_gpu_few_scale_bytes(w->hold, k) : w->plane ? 2 * k : 0;
  int most = (int)(PIECE / (bytes > second ? bytes : second));
  int rows = most > 0 ? most : 1; /* one fits, however wide */
  uint8_t *to[2] = {few ? (uint8_t *)(uintptr_t)w->few.w : (uint8_t *)w->w,
                    few ? (uint8_t *)(uintptr_t)w->few.scales : (uint8_t *)(w->w + w->plane)};
  for (int r0 = 0; r0 < w->of->n; r0 += rows) {
    int n = rows < w->of->n - r0 ? rows : w->of->n - r0;
    for (int r = 0; r < n; r++)
      round_row(l, w, r0, r0 + r, l->piece[0] + (size_t)r * bytes,
                l->piece[1] + (size_t)r * second);
    mr_code rc = put(l, to[0] + (size_t)r0 * bytes, l->piece[0], (size_t)n * bytes);
    if (!rc && second)
      rc = put(l, to[1] + (size_t)r0 * second, l->piece[1], (size_t)n * second);
    if (rc)
      return rc;
  }
  if (!few)
    return MR_OK;
  return put(l, (float *)(uintptr_t)w->few.units, l->units, (size_t)w->of->n * sizeof *l->units);
}

static bool take(loader *l, mr_gpu_matrix *w) {
  size_t n = (size_t)w->of->n, k = (size_t)w->k, values = n * k;
  bool ok;
  if (w->hold >= MR_GPU_INT8) {
    w->few.w = take_bytes(l, n * mr_gpu_few_bytes(w->hold, k));
    w->few.scales = take_bytes(l, n * mr_gpu_few_scale_bytes(w->hold, k));
    w->few.units = take_bytes(l, n * sizeof(float));
    ok = w->few.w && w->few.scales && w->few.units;
  } else {
    w->plane = w->hold == MR_GPU_PAIR ? values : 0;
    w->w = take_bytes(l, (values + w->plane) * sizeof *w->w);
    ok = w->w;
  }
  if (ok && w->of->bias)
    ok = (w->bias = take_bytes(l, n * sizeof(float))) != NULL;
  return ok;
}

static mr_code no_room(const mr_device *d, mr_err *err) {
  return mr_err_set(err, MR_E_UNAVAILABLE,
                    "the weights do not fit into the %zu bytes taken of device %s; use a larger "
                    "--device-memory, --device-weights int8 or int4, or --device cpu",
                    d->cap, d->name);
}

static bool is_expert(const mr_model *m, const mr_matrix *w) {
  for (int i = 0; i < m->c.n_layers; i++) {
    const mr_expert *e = m->layers[i].experts;
    uintptr_t at = (uintptr_t)w, first = (uintptr_t)e;
    if (e && at >= first && at < (uintptr_t)(e + mr_layer_experts(m)))
      return true;
  }
  return false;
}

/* Where the maker's library is asked for, products of bfloat16 without a bias are its own, but for
 * those of experts: of a shape, never of the memory or the step. */
static mr_code plan_product(mr_gpu *g, mr_gpu_matrix *w, mr_err *err) {
  if (!g->dev->gemm || w->hold != MR_GPU_BF16 || w->of->bias || w->of == &g->m->embed ||
      is_expert(g->m, w->of))
    return MR_OK;
  return mr_device_gemm_plan(g->dev->gemm, w->of->n, w->k, &w->plan, err);
}

static mr_code load(loader *l, const mr_matrix *of, mr_err *err) {
  mr_gpu *g = l->g;
  if (!mr_mem_grow((void **)&g->matrices, &g->cap_matrices, g->n_matrices + 1, sizeof *g->matrices))
    return mr_err_set(err, MR_E_NOMEM, "out of memory for the weights");
  mr_gpu_matrix w = {.of = of,
                     .hold = hold_of(g->m, of, g->scheme, l->rows),
                     .k = mr_gpu_padded(of->k),
                     .streamed = l->streamed};
  mr_code rc = plan_product(g, &w, err);
  if (rc)
    return rc;
  if (!take(l, &w))
    return no_room(g->dev, err);
  g->matrices[g->n_matrices++] = w;
  rc = fill(l, &w);
  if (!rc && of->bias)
    rc = put(l, w.bias, of->bias, (size_t)of->n * sizeof(float));
  return mr_device_fail(g->dev, rc, err);
}

/* ------------------------------------------------------------------ all of them */

static int by_address(const void *a, const void *b) {
  const mr_gpu_matrix *x = a, *y = b;
  return x->of < y->of ? -1 : x->of > y->of;
}

static mr_code load_layers(loader *l, mr_err *err) {
  const mr_model *m = l->g->m;
  mr_code rc = MR_OK;
  for (int i = 0; i < m->c.n_layers; i++) {
    int streamed = i - (m->c.n_layers - l->g->streaming.n);
    l->streamed = streamed < 0 ? -1 : streamed;
    l->used = 0;
    for (int j = 0; !rc && j < mr_layer_matrices(m, &m->layers[i]); j++) {
      const mr_matrix *w = mr_layer_matrix(&m->layers[i], j);
      if (w->n)
        rc = load(l, w, err);
    }
  }
  l->streamed = -1;
  return rc;
}

static mr_code open_streaming(loader *l, mr_err *err) {
  mr_gpu *g = l->g;
  int n = g->streaming.n, first = g->m->c.n_layers - n;
  size_t *bytes = mr_mem_alloc((size_t)n + 1, sizeof *bytes);
  for (int i = 0; i < n && bytes; i++)
    bytes[i] = layer_bytes(g->m, first + i, g->scheme, l->rows);
  mr_code rc = bytes ? mr_gpu_stream_open(g, bytes) : MR_E_NOMEM;
  mr_mem_free(bytes);
  return rc == MR_E_UNAVAILABLE ? no_room(g->dev, err)
         : rc                   ? mr_err_set(err, rc, "out of memory for the weights")
                                : MR_OK;
}

static mr_code load_all(loader *l, mr_err *err) {
  mr_gpu *g = l->g;
  const mr_model *m = g->m;
  mr_code rc = open_streaming(l, err);
  if (!rc)
    rc = load(l, &m->head, err);
  if (!rc && !is_shared(m))
    rc = load(l, &m->embed, err);
  if (!rc)
    rc = load_layers(l, err);
  sums s;
  if (!rc && !sum_up(&s, m, g->scheme))
    rc = mr_err_set(err, MR_E_NOMEM, "out of memory for the weights");
  if (rc || !s.wide)
    return rc;
  g->wide_values = s.wide;
  g->wide = mr_device_take(g->dev, s.wide * sizeof *g->wide);
  return g->wide ? MR_OK : no_room(g->dev, err);
}

/* Rows of the matrix that has most. */
static size_t most_rows(const mr_model *m) {
  int n = m->head.n > m->embed.n ? m->head.n : m->embed.n;
  for (int i = 0; i < m->c.n_layers; i++)
    for (int j = 0; j < mr_layer_matrices(m, &m->layers[i]); j++) {
      const mr_matrix *w = mr_layer_matrix(&m->layers[i], j);
      n = w->n > n ? w->n : n;
    }
  return (size_t)n;
}

mr_code mr_gpu_load_weights(mr_gpu *g, mr_err *err) {
  loader l = {.g = g,
              .streamed = -1,
              .rows = mr_mem_alloc(most_floats(g->m), sizeof(float)),
              .units = mr_mem_alloc(most_rows(g->m), sizeof(float))};
  size_t piece = PIECE + 4 * mr_gpu_widest(g->m);
  mr_code rc = l.rows && l.units ? MR_OK : MR_E_NOMEM;
  for (int i = 0; i < 2 && !rc; i++)
    rc = g->dev->ops->host_alloc(g->dev, piece, (void **)&l.piece[i]);
  rc = rc ? mr_err_set(err, MR_E_NOMEM, "out of memory for the weights") : load_all(&l, err);
  for (int i = 0; i < 2; i++)
    if (l.piece[i])
      g->dev->ops->host_release(g->dev, l.piece[i]);
  mr_mem_free(l.rows);
  mr_mem_free(l.units);
  if (rc)
    return rc;
  qsort(g->matrices, g->n_matrices, sizeof *g->matrices, by_address);
  g->embed = mr_gpu_find(g, is_shared(g->m) ? &g->m->head : &g->m->embed);
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
