#include "src/model.h"

#include <math.h>
#include <string.h>

#include "io/mem.h"

#define NAME 96     /* bytes of a tensor's name here; ours are shorter */
#define PER_LAYER 7 /* matrices */

typedef struct loader { /* the first error ends the work: every step looks at rc */
  mr_model *m;
  const mr_gguf *g;
  uint8_t *used; /* a flag for each tensor of the file */
  int layer;     /* -1: tensors of no layer */
  mr_code rc;
  mr_err *err;
} loader;

#define FAIL(l, code, ...)                                                                         \
  ((l)->rc = mr_err_at((l)->err, code, mr_gguf_path((l)->g), 0, -1, __VA_ARGS__))

/* Writes the full name to `name` and returns the tensor, or NULL. */
static const mr_gguf_tensor *find(loader *l, const char *stem, const char *ext, char name[NAME]) {
  if (l->layer < 0)
    snprintf(name, NAME, "%s.%s", stem, ext);
  else
    snprintf(name, NAME, "blk.%d.%s.%s", l->layer, stem, ext);
  return mr_gguf_find_tensor(l->g, name);
}

static bool has(loader *l, const char *stem) {
  char name[NAME];
  return find(l, stem, "weight", name) != NULL;
}

/* Shape [rows, cols] and a type that can be read; marks the tensor as used. */
static bool check(loader *l, const mr_gguf_tensor *t, const char *name, int64_t rows,
                  int64_t cols) {
  const mr_dtype_info *type = mr_dtype_get(t->dtype);
  if (t->dims[0] != cols || t->dims[1] != rows || t->dims[2] != 1 || t->dims[3] != 1) {
    FAIL(l, MR_E_DATA, "tensor %s is [%lld, %lld%s]; the metadata asks for [%lld, %lld]", name,
         (long long)t->dims[1], (long long)t->dims[0], t->dims[2] * t->dims[3] > 1 ? ", ..." : "",
         (long long)rows, (long long)cols);
    return false;
  }
  if (!type->to_f32) {
    FAIL(l, MR_E_DATA, "tensor %s has type %s, which is not supported yet", name, type->name);
    return false;
  }
  uint8_t *used = &l->used[t - mr_gguf_tensor_at(l->g, 0)];
  if (!*used)
    l->m->n_params += (uint64_t)(rows * cols);
  *used = 1;
  return true;
}

/* A vector (or a small table) of n floats, converted; *out is NULL where it is absent and not
 * needed. */
static void vector(loader *l, const float **out, const char *stem, const char *ext, int64_t rows,
                   int64_t n, bool needed) {
  char name[NAME];
  mr_model *m = l->m;
  if (l->rc)
    return;
  const mr_gguf_tensor *t = find(l, stem, ext, name);
  if (!t) {
    if (needed)
      FAIL(l, MR_E_DATA, "tensor %s of %lld values is missing", name, (long long)(rows * n));
    return;
  }
  if (!check(l, t, name, rows, n))
    return;
  float *v = mr_mem_alloc((size_t)rows * (size_t)n, sizeof *v);
  if (!v ||
      !mr_mem_grow((void **)&m->vectors, &m->cap_vectors, m->n_vectors + 1, sizeof *m->vectors)) {
    mr_mem_free(v);
    FAIL(l, MR_E_NOMEM, "no memory for tensor %s", name);
    return;
  }
  m->vectors[m->n_vectors++] = v;
  mr_dtype_get(t->dtype)->to_f32(v, t->data, rows * n);
  *out = v;
}

/* W [n, k] and its bias [n]. */
static void matrix(loader *l, mr_matrix *w, const char *stem, int n, int k, bool bias) {
  char name[NAME];
  if (l->rc)
    return;
  const mr_gguf_tensor *t = find(l, stem, "weight", name);
  if (!t) {
    FAIL(l, MR_E_DATA, "tensor %s [%d, %d] is missing", name, n, k);
    return;
  }
  if (!check(l, t, name, n, k))
    return;
  *w = (mr_matrix){.n = n, .k = k, .dtype = t->dtype, .data = t->data};
  w->row_bytes = mr_dtype_bytes(t->dtype, (uint64_t)k);
  vector(l, &w->bias, stem, "bias", 1, n, bias);
}

/* Rows first .. first + n - 1 of a fused matrix. */
static mr_matrix rows_of(const mr_matrix *w, int first, int n) {
  mr_matrix part = *w;
  part.n = n;
  part.data += (uint64_t)first * w->row_bytes;
  if (part.bias)
    part.bias += first;
  return part;
}

/* A norm's weight, and its bias where such a norm has one. */
static void norm(loader *l, const float **w, const float **b, const char *stem) {
  const mr_config *c = &l->m->c;
  vector(l, w, stem, "weight", 1, c->d_model, true);
  if (b && c->arch.norm == MR_NORM_LAYER)
    vector(l, b, stem, "bias", 1, c->d_model, c->arch.norm_bias);
}

static void attention(loader *l, mr_layer *y) {
  const mr_config *c = &l->m->c;
  int d = c->d_model, q = c->n_heads * c->head_dim, kv = c->n_kv_heads * c->head_dim;
  if (c->arch.fused_qkv && !has(l, "attn_q")) {
    mr_matrix all = {0};
    matrix(l, &all, "attn_qkv", q + 2 * kv, d, c->arch.qkv_bias);
    y->q = rows_of(&all, 0, q);
    y->k = rows_of(&all, q, kv);
    y->v = rows_of(&all, q + kv, kv);
  } else {
    matrix(l, &y->q, "attn_q", q, d, c->arch.qkv_bias);
    matrix(l, &y->k, "attn_k", kv, d, c->arch.qkv_bias);
    matrix(l, &y->v, "attn_v", kv, d, c->arch.qkv_bias);
  }
  matrix(l, &y->o, "attn_output", d, q, c->arch.out_bias);
  if (c->arch.qk_norm) {
    vector(l, &y->q_norm, "attn_q_norm", "weight", 1, c->arch.qk_norm_full ? q : c->head_dim, true);
    vector(l, &y->k_norm, "attn_k_norm", "weight", 1, c->arch.qk_norm_full ? kv : c->head_dim,
           true);
  }
}

static void mlp(loader *l, mr_layer *y) {
  const mr_config *c = &l->m->c;
  int d = c->d_model, f = c->d_ff;
  y->gate.dtype = -1;
  if (c->arch.gated && c->arch.fused_gate_up && !has(l, "ffn_gate")) {
    mr_matrix both = {0};
    matrix(l, &both, "ffn_up", 2 * f, d, c->arch.mlp_bias);
    y->gate = rows_of(&both, 0, f);
    y->up = rows_of(&both, f, f);
  } else {
    if (c->arch.gated)
      matrix(l, &y->gate, "ffn_gate", f, d, c->arch.mlp_bias);
    matrix(l, &y->up, "ffn_up", f, d, c->arch.mlp_bias);
  }
  matrix(l, &y->down, "ffn_down", d, f, c->arch.mlp_bias);
}

/* Parallel layers have one norm for both branches, or attention's in attn_norm_2 (falcon), or two
 * as others. */
static void layer_norms(loader *l, mr_layer *y) {
  const mr_arch *a = &l->m->c.arch;
  bool second = a->parallel && has(l, "attn_norm_2");
  if (a->pre_norms) {
    norm(l, &y->attn_norm, &y->attn_norm_b, second ? "attn_norm_2" : "attn_norm");
    if (second || !a->parallel || has(l, "ffn_norm"))
      norm(l, &y->ffn_norm, &y->ffn_norm_b, second ? "attn_norm" : "ffn_norm");
  }
  if (a->post_norms) {
    norm(l, &y->attn_post_norm, NULL, "post_attention_norm");
    norm(l, &y->ffn_post_norm, NULL, "post_ffw_norm");
  }
}

static void rope_freqs(loader *l) {
  mr_model *m = l->m;
  if (m->c.arch.rope == MR_ROPE_NONE)
    return;
  vector(l, &m->rope_freqs, "rope_freqs", "weight", 1, m->c.rope_dims / 2, false);
  for (int i = 0; !l->rc && m->rope_freqs && i < m->c.rope_dims / 2; i++)
    if (!isfinite(m->rope_freqs[i]) || m->rope_freqs[i] <= 0)
      FAIL(l, MR_E_DATA, "tensor rope_freqs.weight: factor %d is %g; it must be finite and above 0",
           i, (double)m->rope_freqs[i]);
}

static void whole_model(loader *l) {
  mr_model *m = l->m;
  const mr_config *c = &m->c;
  l->layer = -1;
  matrix(l, &m->embed, "token_embd", c->n_vocab, c->d_model, false);
  norm(l, &m->out_norm, &m->out_norm_b, "output_norm");
  if (has(l, "output"))
    matrix(l, &m->head, "output", c->n_vocab, c->d_model, false);
  else
    m->head = m->embed;
  if (c->arch.learned_positions)
    vector(l, &m->position_embd, "position_embd", "weight", c->context, c->d_model, true);
  rope_freqs(l);
  for (int i = 0; i < c->n_layers && !l->rc; i++) {
    l->layer = i;
    attention(l, &m->layers[i]);
    mlp(l, &m->layers[i]);
    layer_norms(l, &m->layers[i]);
  }
}

static bool begins(mr_str s, const char *with) {
  size_t n = strlen(with);
  return s.len >= n && memcmp(s.s, with, n) == 0;
}

/* A tensor that the forward pass would have to use. Tables of inverse frequencies are computed, not
 * read. */
static bool matters(mr_str name, int n_layers) {
  static const char *const known[] = {"token_embd_norm.", "position_embd.", "rope_factors_",
                                      "token_types."};
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (begins(name, known[i]))
      return true;
  if (!begins(name, "blk."))
    return false;
  int layer = 0;
  size_t i = 4;
  for (; i < name.len && name.s[i] >= '0' && name.s[i] <= '9' && layer < n_layers; i++)
    layer = layer * 10 + (name.s[i] - '0');
  mr_str rest = {name.s + i, name.len - i};
  return i > 4 && layer < n_layers && begins(rest, ".") && !begins(rest, ".attn_rot_embd");
}

static void unused(loader *l) {
  mr_model *m = l->m;
  char name[NAME];
  for (size_t i = 0; i < mr_gguf_n_tensors(l->g) && !l->rc; i++) {
    if (l->used[i])
      continue;
    mr_str s = mr_gguf_tensor_at(l->g, i)->name;
    if (matters(s, m->c.n_layers))
      FAIL(l, MR_E_DATA,
           "tensor %s is not known for architecture %s; leaving it out would give wrong results",
           mr_gguf_show(s, name, sizeof name), m->c.arch.name);
    else if (m->n_unused++ == 0)
      m->unused = s;
  }
}

static void vocabulary(loader *l) {
  const mr_gguf_kv *tokens = mr_gguf_find(l->g, "tokenizer.ggml.tokens");
  if (tokens && tokens->type == MR_GGUF_ARRAY && tokens->count > (uint64_t)l->m->c.n_vocab)
    FAIL(l, MR_E_DATA, "the vocabulary has %llu tokens, but token_embd.weight only %d rows",
         (unsigned long long)tokens->count, l->m->c.n_vocab);
}

static mr_code load(mr_model *m, const char *path, mr_err *err) {
  mr_code rc = mr_gguf_open(&m->gguf, path, err);
  if (rc == MR_OK)
    rc = mr_config_from_gguf(&m->c, m->gguf, err);
  if (rc)
    return rc;
  loader l = {.m = m, .g = m->gguf, .err = err};
  l.used = mr_mem_alloc(mr_gguf_n_tensors(m->gguf), 1);
  m->layers = mr_mem_alloc((size_t)m->c.n_layers, sizeof *m->layers);
  if (!l.used || !m->layers)
    FAIL(&l, MR_E_NOMEM, "no memory for %d layers", m->c.n_layers);
  if (!l.rc)
    whole_model(&l);
  if (!l.rc)
    unused(&l);
  if (!l.rc)
    vocabulary(&l);
  mr_mem_free(l.used);
  return l.rc;
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

/* The i-th matrix of the layers; the head is the last, i = n_layers * PER_LAYER. */
static mr_matrix *matrix_at(mr_model *m, int i) {
  if (i == m->c.n_layers * PER_LAYER)
    return &m->head;
  mr_layer *y = &m->layers[i / PER_LAYER];
  mr_matrix *const all[PER_LAYER] = {&y->q, &y->k, &y->v, &y->o, &y->gate, &y->up, &y->down};
  return all[i % PER_LAYER];
}

static int n_matrices(const mr_model *m) {
  return m->layers ? m->c.n_layers * PER_LAYER + 1 : 0;
}

static void unpack(mr_model *m) {
  for (int i = 0; i < n_matrices(m); i++) {
    mr_mem_free(matrix_at(m, i)->packed);
    matrix_at(m, i)->packed = NULL;
  }
  m->packed_bytes = 0;
}

void mr_model_close(mr_model *m) {
  if (!m)
    return;
  unpack(m);
  for (size_t i = 0; i < m->n_vectors; i++)
    mr_mem_free(m->vectors[i]);
  mr_mem_free(m->vectors);
  mr_mem_free(m->layers);
  mr_gguf_close(m->gguf);
  mr_mem_free(m);
}

void mr_matrix_row(const mr_matrix *w, int64_t row, float *dst) {
  mr_dtype_get(w->dtype)->to_f32(dst, w->data + (uint64_t)row * w->row_bytes, w->k);
}

typedef struct pack_job {
  const mr_gemm_ops *ops;
  mr_matrix *w;
  float *rows;        /* nr rows for each worker */
  size_t rows_floats; /* of one worker */
} pack_job;

static void pack_one(void *ctx, int panel, int worker) {
  const pack_job *j = ctx;
  const mr_matrix *w = j->w;
  int64_t first = (int64_t)panel * j->ops->nr;
  int cols = w->n - first < j->ops->nr ? (int)(w->n - first) : j->ops->nr;
  float *rows = j->rows + (size_t)worker * j->rows_floats;
  mr_dtype_get(w->dtype)->to_f32(rows, w->data + (uint64_t)first * w->row_bytes,
                                 (int64_t)cols * w->k);
  j->ops->pack_panel(w->packed + (size_t)panel * j->ops->panel_bytes(w->k), rows, (size_t)w->k,
                     cols, w->k);
}

static mr_code pack_matrix(mr_model *m, pack_job *j, mr_scheme scheme, mr_pool *pool, mr_err *err) {
  mr_matrix *w = j->w;
  int64_t panels = ((int64_t)w->n + j->ops->nr - 1) / j->ops->nr;
  size_t bytes;
  if (!mr_mem_mul((size_t)panels, j->ops->panel_bytes(w->k), &bytes) ||
      !(w->packed = mr_mem_pages(bytes)))
    return mr_err_at(err, MR_E_NOMEM, mr_gguf_path(m->gguf), 0, -1,
                     "no memory for the weights (a matrix [%d, %d] beside %llu bytes)", w->n, w->k,
                     (unsigned long long)m->packed_bytes);
  w->scheme = scheme;
  m->packed_bytes += bytes;
  if (pool)
    mr_pool_run(pool, pack_one, j, (int)panels);
  else
    for (int p = 0; p < (int)panels; p++)
      pack_one(j, p, 0);
  return MR_OK;
}

mr_code mr_model_pack(mr_model *m, const mr_kernels *k, mr_scheme scheme, mr_pool *pool,
                      mr_err *err) {
  pack_job j = {.ops = &k->gemm[scheme]};
  size_t workers = pool ? (size_t)mr_pool_threads(pool) : 1, floats;
  int widest = 0;
  unpack(m);
  for (int i = 0; i < n_matrices(m); i++)
    widest = matrix_at(m, i)->k > widest ? matrix_at(m, i)->k : widest;
  j.rows_floats = (size_t)widest * (size_t)j.ops->nr;
  if (!mr_mem_mul(workers, j.rows_floats, &floats) ||
      !(j.rows = mr_mem_alloc(floats, sizeof *j.rows)))
    return mr_err_at(err, MR_E_NOMEM, mr_gguf_path(m->gguf), 0, -1,
                     "no memory to pack the weights");
  mr_code rc = MR_OK;
  for (int i = 0; i < n_matrices(m) && rc == MR_OK; i++) {
    j.w = matrix_at(m, i);
    if (j.w->dtype >= 0)
      rc = pack_matrix(m, &j, scheme, pool, err);
  }
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
    const mr_layer *y = &m->layers[i];
    n += flops(&y->q) + flops(&y->k) + flops(&y->v) + flops(&y->o) + flops(&y->gate) +
         flops(&y->up) + flops(&y->down);
  }
  return n;
}

double mr_model_head_flops(const mr_model *m) {
  return flops(&m->head);
}
