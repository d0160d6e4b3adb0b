/* adapter_model.safetensors: which tensor changes which matrix, and how its rows are ordered there.
 */
#include "src/lora_int.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "io/mem.h"
#include "io/safetensors.h"
#include "src/names.h"
#include "src/product.h"

#define MAX_NAME 512
#define MAX_PARTS 3

typedef struct loader {
  mr_lora *l;
  int adapter;
  const char *name, *path; /* of the adapter, of its tensors' file */
  mr_lora_config config;
  mr_safetensors *st;
  mr_names names;
  mr_lora_latent *latent; /* [n_layers] of a model with latent attention */
  mr_err *err;
  mr_code rc;
} loader;

#define FAIL(d, ...)                                                                               \
  ((d)->rc = (d)->rc ? (d)->rc : mr_err_at((d)->err, MR_E_DATA, (d)->path, 0, -1, __VA_ARGS__))

static void no_memory(loader *d) {
  if (!d->rc)
    d->rc = mr_err_at(d->err, MR_E_NOMEM, d->path, 0, -1, "no memory for adapter %.64s", d->name);
}

/* What a module of the adapter changes. */
typedef struct target {
  char key[MAX_NAME + 16];    /* the module's name, or a parameter's (target_parameters) */
  char module[MAX_NAME + 16]; /* ... without ".weight" */
  const char *stem;
  bool parameter, fused; /* fused: w are those of the first expert */
  int layer, item;
  int n; /* matrices; 0: the embedding */
  mr_matrix *w[MAX_PARTS];
  mr_matrix rows[MAX_PARTS]; /* which rows of B each one has (n, first, group, stride) */
  int rows_all, cols_all;    /* of B; of A */
  mr_lora_pair *latent;      /* latent attention: a factor of products; or NULL */
} target;

/* ------------------------------------------------------------------ modules */

static void whole(target *t, mr_matrix *w) {
  t->n = 1;
  t->w[0] = w;
  t->rows[0] = (mr_matrix){.n = w->n};
  t->rows_all = w->n;
  t->cols_all = w->k;
}

static void qkv(loader *d, target *t, mr_layer *y) {
  const mr_config *c = &d->l->m->c;
  mr_matrix *const w[3] = {&y->q, &y->k, &y->v};
  t->n = 3;
  t->rows_all = (c->n_heads + 2 * c->n_kv_heads) * c->head_dim;
  t->cols_all = y->q.k;
  for (int i = 0; i < 3; i++) {
    t->w[i] = w[i];
    mr_qkv_rows(c, c->arch.hf_qkv, i, &t->rows[i]);
  }
}

/* Gate over up in one module, or up alone: B tells. */
static void up(target *t, mr_matrix *gate, mr_matrix *w, int64_t rows) {
  whole(t, w);
  if (gate->n != w->n || rows != 2 * (int64_t)w->n)
    return;
  t->n = 2;
  t->rows_all = 2 * w->n;
  t->w[0] = gate;
  t->w[1] = w;
  t->rows[1] = (mr_matrix){.n = w->n, .first = w->n};
}

static bool expert(const loader *d, target *t, mr_layer *y, int64_t rows) {
  const char *s = t->stem;
  bool shared = strstr(s, "_shexp") != NULL, alone = shared && !y->experts;
  if (!alone && (!y->experts || (!shared && t->item >= d->l->m->c.n_experts) ||
                 (shared && d->l->m->c.d_shared == 0)))
    return false;
  d->l->experts |= !alone;
  mr_expert *x = alone ? NULL : &y->experts[shared ? d->l->m->c.n_experts : t->item];
  mr_matrix *gate = alone ? &y->gate : &x->gate, *w = alone ? &y->up : &x->up;
  if (!strncmp(s, "ffn_gate_", 9))
    whole(t, gate);
  else if (!strncmp(s, "ffn_up_", 7))
    up(t, gate, w, rows);
  else
    whole(t, alone ? &y->down : &x->down);
  return true;
}

/* A parameter that has the matrices of all experts. Those of gate and up lie one over the other, or
 * by turns. */
static bool fused(loader *d, target *t, mr_layer *y) {
  const mr_config *c = &d->l->m->c;
  bool gates = !strcmp(t->stem, "ffn_gate_up_exps"), turns = gates && c->arch.experts_alternate;
  if (!y->experts || !t->parameter)
    return false;
  d->l->experts = t->fused = true;
  whole(t, gates ? &y->experts->gate : &y->experts->down);
  if (!gates)
    return true;
  t->n = 2;
  t->w[1] = &y->experts->up;
  t->rows_all = 2 * c->d_expert;
  t->rows[1] = (mr_matrix){.n = c->d_expert, .first = turns ? 1 : c->d_expert};
  t->rows[0].group = t->rows[1].group = turns;
  t->rows[0].stride = t->rows[1].stride = turns ? 2 : 0;
  return true;
}

/* kv_b and the matrices that it was multiplied with: what is added to the products depends on all
 * three, so that the pairs are only noted here. */
static bool latent(loader *d, target *t, mr_layer *y) {
  mr_lora_latent *all = &d->latent[t->layer];
  bool query = !strcmp(t->stem, "attn_q_b") || (!strcmp(t->stem, "attn_q") && y->q_a.n == 0);
  bool kv_b = !strcmp(t->stem, "attn_kv_b");
  if (!query && !kv_b && strcmp(t->stem, "attn_output") != 0)
    return false;
  whole(t, query ? &y->q : &y->o);
  const mr_product *of = t->w[0]->product;
  t->latent = query ? &all->q : kv_b ? &all->kv_b : &all->o;
  t->rows_all = kv_b ? of->kv_b.n : of->w.n;
  t->cols_all = kv_b ? of->kv_b.k : of->w.k;
  return true;
}

/* The matrices of layer t->layer; false: this model has none such. */
static bool of_layer(loader *d, target *t, int64_t rows) {
  mr_model *m = d->l->m;
  mr_layer *y = &m->layers[t->layer];
  const struct {
    const char *stem;
    mr_matrix *w;
  } plain[] = {{"attn_q", &y->q},       {"attn_k", &y->k},
               {"attn_v", &y->v},       {"attn_output", &y->o},
               {"ffn_gate", &y->gate},  {"ffn_down", &y->down},
               {"attn_q_a", &y->q_a},   {"ffn_gate_inp", &y->router},
               {"attn_kv_a_mqa", &y->k}};
  if (m->c.arch.mla && latent(d, t, y))
    return true;
  if (!strcmp(t->stem, "attn_qkv"))
    qkv(d, t, y);
  else if (!strcmp(t->stem, "ffn_up"))
    up(t, &y->gate, &y->up, rows);
  else if (!strcmp(t->stem, "ffn_gate_up_exps") || !strcmp(t->stem, "ffn_down_exps"))
    return fused(d, t, y);
  else if (strstr(t->stem, "_exp") || strstr(t->stem, "_shexp"))
    return strcmp(t->stem, "ffn_gate_inp_shexp") != 0 && expert(d, t, y, rows);
  for (size_t i = 0; i < sizeof plain / sizeof *plain; i++)
    if (!strcmp(t->stem, plain[i].stem))
      whole(t, plain[i].w);
  return t->n > 0 && t->w[0]->n > 0 && t->w[0]->dtype >= 0;
}

static bool ends(const char *s, const char *with, size_t *at) {
  size_t n = strlen(s), m = strlen(with);
  *at = n - m;
  return n > m && !strcmp(s + *at, with);
}

/* What `module` has an adapter of: itself, or one of its parameters. PEFT wraps a module once for
 * each of these in the order of the module: the last one's tensors go by the module's name, those
 * of one before it by that of the "base_layer" within, and so on. Sets key, module, stem. */
static void name_target(const loader *d, target *t, const char *module) {
  static const char *const order[] = {"gate_up_proj", "down_proj", "weight"};
  size_t depth = 0, at, n;
  snprintf(t->module, sizeof t->module, "%s", module);
  for (; ends(t->module, ".base_layer", &at); depth++)
    t->module[at] = 0;
  n = strlen(t->module);
  for (size_t i = sizeof order / sizeof *order; i-- > 0;) {
    snprintf(t->key, sizeof t->key, "%.*s.%s", (int)n, module, order[i]);
    snprintf(t->module, sizeof t->module, "%s", t->key);
    if (ends(t->module, ".weight", &at))
      t->module[at] = 0;
    t->stem = mr_names_module(t->module, &t->layer, &t->item);
    t->parameter = t->stem && mr_lora_config_parameter(&d->config, t->key);
    if (t->parameter && depth-- == 0)
      return;
  }
  t->parameter = false;
  snprintf(t->key, sizeof t->key, "%s", module);
  snprintf(t->module, sizeof t->module, "%s", module);
  t->stem = mr_names_module(module, &t->layer, &t->item);
}

/* False: the configuration's expressions could not be tried. */
static bool searched(loader *d) {
  const mr_err *e = &d->config.failed;
  if (!d->rc && e->code)
    d->rc = mr_err_at(d->err, e->code, d->path, 0, -1, "%s", e->text);
  return !d->rc;
}

/* rows: of B; 0: not known. */
static bool find_target(loader *d, target *t, const char *module, int64_t rows) {
  mr_model *m = d->l->m;
  *t = (target){0};
  name_target(d, t, module);
  bool found = t->stem && t->layer < m->c.n_layers;
  if (found && t->layer >= 0)
    found = of_layer(d, t, rows);
  else if (found && !strcmp(t->stem, "output"))
    whole(t, &m->head);
  if (found && t->layer < 0 && m->c.d_embed)
    found = false; /* the model's matrix is a product */
  if (!found)
    FAIL(d, "module %.200s is not a linear layer of this model (%s) that an adapter can change",
         module, m->c.arch.name);
  else if (t->layer < 0 && d->config.tied)
    FAIL(d, "ensure_weight_tying is set, which is not supported where %.200s is changed", module);
  else if (t->parameter && !t->fused && m->c.arch.hf_columns && t->layer >= 0)
    FAIL(d, "%.200s in target_parameters is stored transposed, which is not supported", t->key);
  else if (!t->parameter && !mr_lora_config_targets(&d->config, module, t->layer) && searched(d))
    FAIL(d, "module %.200s has weights, but target_modules or layers_to_transform do not name it",
         module);
  return !d->rc;
}

/* Rank and factor of a module. False: they could not be found. */
static bool measures(loader *d, const char *key, int *rank, float *scale) {
  mr_lora_config_module(&d->config, key, rank, scale);
  return searched(d);
}

/* ------------------------------------------------------------------ values */

/* Floats of a tensor [rows, cols], checked, as memory of the adapter or (own) of the caller. */
static float *values(loader *d, const mr_gguf_tensor *t, int64_t rows, int64_t cols, bool own) {
  char name[MR_NAME];
  const mr_dtype_info *type = mr_dtype_get(t->dtype);
  bool fits = t->dims[0] == cols && t->dims[1] == rows && t->dims[2] * t->dims[3] == 1;
  mr_gguf_show(t->name, name, sizeof name);
  if (!fits)
    FAIL(d, "tensor %s is [%lld, %lld]; this model and adapter_config.json ask for [%lld, %lld]",
         name, (long long)t->dims[1], (long long)t->dims[0], (long long)rows, (long long)cols);
  else if (t->dtype != MR_F32 && t->dtype != MR_F16 && t->dtype != MR_BF16)
    FAIL(d, "tensor %s has type %s; F32, F16 and BF16 are supported", name, type->name);
  if (d->rc)
    return NULL;
  size_t n = (size_t)rows * (size_t)cols;
  float *v = own ? mr_mem_alloc(n, sizeof *v) : mr_lora_block(&d->l->raw, n, sizeof *v);
  if (!v) {
    no_memory(d);
    return NULL;
  }
  type->to_f32(v, t->data, rows * cols);
  for (size_t i = 0; i < n; i++)
    if (!isfinite(v[i])) {
      FAIL(d, "tensor %s: value %zu is not finite", name, i);
      break;
    }
  if (!d->rc)
    return v;
  if (own)
    mr_mem_free(v);
  return NULL;
}

/* Where row r of the matrix is in the tensor as Hugging Face has it: files of llama-like
 * architectures hold the halves of each head of q and k by turns. */
static int source(const mr_model *m, const target *t, int part, int r) {
  int dim = m->c.head_dim, at = r % dim;
  const mr_matrix *w = t->w[part];
  bool turned = m->gguf && t->layer >= 0 && !m->c.arch.mla && !m->c.arch.hf_interleaved &&
                m->c.arch.rope == MR_ROPE_INTERLEAVED &&
                (w == &m->layers[t->layer].q || w == &m->layers[t->layer].k);
  if (turned)
    r += at / 2 + at % 2 * (dim / 2) - at;
  return (int)mr_matrix_source(&t->rows[part], r);
}

/* The adapter's link of a matrix; made where there is none. */
static mr_lora_link *link_of(loader *d, mr_matrix *w) {
  mr_lora_link *x = mr_lora_link_of(d->l, w, d->adapter);
  if (!x)
    no_memory(d);
  return x;
}

/* *to += scale * x. Values are finite, but what they are scaled to may not be. */
static void add_scaled(loader *d, const target *t, float *to, float scale, float x) {
  *to += scale * x;
  if (!isfinite(*to))
    FAIL(d, "module %.200s: %g, scaled by %g (lora_alpha), is beyond float32", t->module, x, scale);
}

/* Rows of B, or of a bias, in the matrix's order: dst [n, cols] += scale * src. */
static void take_rows(loader *d, const target *t, int part, float *dst, const float *src, int cols,
                      float scale) {
  for (int r = 0; r < t->w[part]->n && !d->rc; r++) {
    const float *from = src + (size_t)source(d->l->m, t, part, r) * (size_t)cols;
    for (int i = 0; i < cols; i++)
      add_scaled(d, t, &dst[(size_t)r * (size_t)cols + (size_t)i], scale, from[i]);
  }
}

/* ... of the queries of latent attention. */
static void note_bias(loader *d, const target *t, const float *bias, float scale) {
  mr_lora_pair *p = t->latent;
  if (p == &d->latent[t->layer].kv_b)
    FAIL(d, "module %.200s: a bias of kv_b of latent attention is not supported", t->module);
  if (!d->rc && !p->bias &&
      !(p->bias = mr_lora_block(&d->l->raw, (size_t)t->rows_all, sizeof(float))))
    no_memory(d);
  for (int r = 0; r < t->rows_all && !d->rc; r++)
    add_scaled(d, t, &p->bias[r], scale, bias[r]);
}

static void add_bias(loader *d, const target *t, const float *bias, float scale) {
  if (t->latent && t->latent != &d->latent[t->layer].o) {
    note_bias(d, t, bias, scale);
    return;
  }
  for (int i = 0; i < t->n && !d->rc; i++) {
    mr_lora_link *x = link_of(d, t->w[i]);
    if (x && !x->bias && !(x->bias = mr_lora_block(&d->l->kept, (size_t)t->w[i]->n, sizeof(float))))
      no_memory(d);
    if (x && x->bias)
      take_rows(d, t, i, x->bias, bias, 1, scale);
  }
}

static void note_pair(loader *d, const target *t, float *a, const float *b, int rank, float scale) {
  size_t n = (size_t)t->rows_all * (size_t)rank;
  mr_lora_pair *p = t->latent;
  if (p->a)
    FAIL(d, "module %.200s comes twice", t->module);
  else if (!(p->b = mr_lora_block(&d->l->raw, n, sizeof *b)))
    no_memory(d);
  if (d->rc)
    return;
  memcpy(p->b, b, n * sizeof *b);
  p->a = a;
  p->rank = rank;
  p->scale = scale;
}

/* a of the adapter's memory, b read now. */
static void add_factors(loader *d, const target *t, float *a, const float *b, int rank,
                        float scale) {
  for (int i = 0; i < t->n && !d->rc; i++) {
    mr_lora_link *x = link_of(d, t->w[i]);
    if (x && x->a)
      FAIL(d, "module %.200s: its matrix is changed by another module of the adapter, too",
           t->module);
    if (d->rc)
      break;
    x->a = a;
    x->rank = x->up_rank = rank;
    x->b = mr_lora_block(&d->l->raw, (size_t)t->w[i]->n * (size_t)rank, sizeof(float));
    if (x->b)
      take_rows(d, t, i, x->b, b, rank, scale);
    else
      no_memory(d);
  }
}

static void add_pair(loader *d, const target *t, const mr_gguf_tensor *ta, const mr_gguf_tensor *tb,
                     int rank, float scale) {
  float *a = values(d, ta, rank, t->cols_all, false);
  float *b = a ? values(d, tb, t->rows_all, rank, true) : NULL;
  if (b && t->latent)
    note_pair(d, t, a, b, rank, scale);
  else if (b)
    add_factors(d, t, a, b, rank, scale);
  mr_mem_free(b);
}

/* Value j of the rank of row (A) or column (B) i of expert e, as PEFT stacks them: A is
 * [experts * rank, i], B [i, rank * experts]. */
static float of_a(const float *a, int e, int j, int i, int rank, int width) {
  return a[((size_t)e * (size_t)rank + (size_t)j) * (size_t)width + (size_t)i];
}

static float of_b(const float *b, int e, int j, int i, int rank, int experts) {
  return b[((size_t)i * (size_t)rank + (size_t)j) * (size_t)experts + (size_t)e];
}

/* All experts' factors. Where PEFT takes what a parameter is stored as for the other order of rows
 * and columns, A meets the outputs (then `crossed`); a square one's A meets the inputs. */
static void add_experts(loader *d, target *t, const mr_gguf_tensor *ta, const mr_gguf_tensor *tb,
                        int rank, float scale) {
  int experts = d->l->m->c.n_experts, n = t->rows_all, k = t->cols_all, ranks = experts * rank;
  bool crossed = n != k && ta->dims[0] == n;
  float *a = values(d, ta, ranks, crossed ? n : k, true);
  float *b = a ? values(d, tb, crossed ? k : n, ranks, true) : NULL;
  float *one_b = b ? mr_mem_alloc((size_t)n * (size_t)rank, sizeof *one_b) : NULL;
  for (int e = 0; b && !d->rc && e < experts; e++) {
    mr_expert *x = &d->l->m->layers[t->layer].experts[e];
    float *one_a = mr_lora_block(&d->l->raw, (size_t)rank, (size_t)k * sizeof *one_a);
    if (!one_a || !one_b) {
      no_memory(d);
      break;
    }
    for (int j = 0; j < rank; j++) {
      for (int i = 0; i < k; i++)
        one_a[(size_t)j * (size_t)k + (size_t)i] =
            crossed ? of_b(b, e, j, i, rank, experts) : of_a(a, e, j, i, rank, k);
      for (int i = 0; i < n; i++)
        one_b[(size_t)i * (size_t)rank + (size_t)j] =
            crossed ? of_a(a, e, j, i, rank, n) : of_b(b, e, j, i, rank, experts);
    }
    t->w[0] = t->n > 1 ? &x->gate : &x->down;
    t->w[1] = &x->up;
    add_factors(d, t, one_a, one_b, rank, scale);
  }
  mr_mem_free(one_b);
  mr_mem_free(b);
  mr_mem_free(a);
}

/* ------------------------------------------------------------------ tensors */

typedef struct tensor {
  const mr_gguf_tensor *t;
  char module[MAX_NAME];
  const char *part; /* after the module: "lora_A.weight" ... */
} tensor;

static bool split(loader *d, const mr_gguf_tensor *t, tensor *out) {
  static const char before[] = "base_model.model.";
  static const char *const parts[] = {
      ".lora_A.weight",         ".lora_B.weight",        ".lora_B.bias",       ".lora_embedding_A",
      ".lora_embedding_B",      ".base_layer.bias",      ".base_layer.weight", ".bias",
      ".lora_A.default.weight", ".lora_B.default.weight"};
  char shown[MR_NAME];
  mr_str s = t->name;
  size_t at;
  if (s.len > strlen(before) && !memcmp(s.s, before, strlen(before)))
    s = (mr_str){s.s + strlen(before), s.len - strlen(before)};
  out->t = t;
  if (s.len < MAX_NAME && !memchr(s.s, 0, s.len)) {
    memcpy(out->module, s.s, s.len);
    out->module[s.len] = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
      if (ends(out->module, parts[i], &at)) {
        out->module[at] = 0;
        out->part = parts[i];
        return true;
      }
  }
  FAIL(d,
       "tensor %s is none of an adapter that is supported (lora_A, lora_B, lora_embedding_A, "
       "lora_embedding_B, and biases of linear layers)",
       mr_gguf_show(t->name, shown, sizeof shown));
  return false;
}

/* The other tensor of a pair. */
static const mr_gguf_tensor *mate(loader *d, const mr_gguf_tensor *t, const char *from,
                                  const char *to) {
  char name[MAX_NAME + 32];
  size_t n = t->name.len - strlen(from);
  snprintf(name, sizeof name, "%.*s%s", (int)n, t->name.s, to);
  const mr_gguf_tensor *other = mr_safetensors_find(d->st, name);
  if (!other)
    FAIL(d, "tensor %.300s is missing", name);
  return other;
}

static void take_pair(loader *d, const tensor *x, const char *to) {
  target t;
  int rank;
  float scale;
  const mr_gguf_tensor *b = mate(d, x->t, x->part, to);
  if (!b || !find_target(d, &t, x->module, b->dims[1]))
    return;
  if (t.n == 0) {
    FAIL(d, "module %.200s is the embedding, which has lora_embedding_A and _B", x->module);
    return;
  }
  if (!measures(d, t.key, &rank, &scale))
    return;
  if (t.fused)
    add_experts(d, &t, x->t, b, rank, scale);
  else
    add_pair(d, &t, x->t, b, rank, scale);
}

static void take_embedding(loader *d, const tensor *x) {
  target t;
  int rank, vocab = d->l->m->c.n_vocab, dims = d->l->m->c.d_model;
  float scale;
  const mr_gguf_tensor *tb = mate(d, x->t, x->part, ".lora_embedding_B");
  if (!tb || !find_target(d, &t, x->module, 0))
    return;
  if (t.n != 0) {
    FAIL(d, "module %.200s is not the embedding", x->module);
    return;
  }
  if (!measures(d, x->module, &rank, &scale))
    return;
  mr_lora_embed *e = &d->l->embed[d->adapter];
  float *a = values(d, x->t, rank, vocab, true), *b = a ? values(d, tb, dims, rank, true) : NULL;
  if (b) {
    e->a = mr_lora_block(&d->l->kept, (size_t)vocab * (size_t)rank, sizeof *e->a);
    e->b = mr_lora_block(&d->l->kept, (size_t)dims * (size_t)rank, sizeof *e->b);
  }
  if (b && (!e->a || !e->b))
    no_memory(d);
  for (int r = 0; b && !d->rc && r < rank; r++) {
    for (int i = 0; i < vocab; i++)
      e->a[(size_t)i * (size_t)rank + (size_t)r] = a[(size_t)r * (size_t)vocab + (size_t)i];
    for (int i = 0; i < dims; i++)
      e->b[(size_t)r * (size_t)dims + (size_t)i] = scale * b[(size_t)i * (size_t)rank + (size_t)r];
  }
  e->rank = d->rc ? 0 : rank;
  mr_mem_free(a);
  mr_mem_free(b);
}

/* A bias of the base that was trained along takes the base's place: the difference is added. */
static void take_bias(loader *d, const tensor *x) {
  target t;
  if (!find_target(d, &t, x->module, x->t->dims[0]))
    return;
  if (t.n == 0 || t.fused) {
    FAIL(d, "module %.200s has no bias", x->module);
    return;
  }
  float *b = values(d, x->t, 1, t.rows_all, true);
  if (b)
    add_bias(d, &t, b, 1);
  for (int i = 0; i < t.n && !d->rc; i++) {
    const float *base = t.w[i]->bias;
    mr_lora_link *to = link_of(d, t.w[i]);
    for (int r = 0; to && base && r < t.w[i]->n; r++)
      add_scaled(d, &t, &to->bias[r], -1, base[r]);
  }
  mr_mem_free(b);
}

static void take_lora_bias(loader *d, const tensor *x) {
  target t;
  int rank;
  float scale;
  if (!find_target(d, &t, x->module, x->t->dims[0]))
    return;
  if (t.n == 0 || t.fused) {
    FAIL(d, "module %.200s has no bias", x->module);
    return;
  }
  if (!measures(d, t.key, &rank, &scale))
    return;
  float *b = values(d, x->t, 1, t.rows_all, true);
  if (b)
    add_bias(d, &t, b, scale);
  mr_mem_free(b);
}

/* PEFT stores the embedding itself with an adapter that changes it; it was not trained. */
static void check_base(loader *d, const tensor *x) {
  int layer, item;
  const char *stem = mr_names_module(x->module, &layer, &item);
  const mr_model *m = d->l->m;
  if (!stem || layer >= 0 || x->t->dims[0] != m->embed.k || x->t->dims[1] != m->c.n_vocab)
    FAIL(d, "module %.200s comes with its own weights, which is not supported", x->module);
}

static void take(loader *d, const tensor *x) {
  if (!strcmp(x->part, ".lora_A.weight"))
    take_pair(d, x, ".lora_B.weight");
  else if (!strcmp(x->part, ".lora_A.default.weight"))
    take_pair(d, x, ".lora_B.default.weight");
  else if (!strcmp(x->part, ".lora_embedding_A"))
    take_embedding(d, x);
  else if (!strcmp(x->part, ".lora_B.weight"))
    mate(d, x->t, x->part, ".lora_A.weight");
  else if (!strcmp(x->part, ".lora_B.default.weight"))
    mate(d, x->t, x->part, ".lora_A.default.weight");
  else if (!strcmp(x->part, ".lora_embedding_B"))
    mate(d, x->t, x->part, ".lora_embedding_A");
  else if (!strcmp(x->part, ".lora_B.bias"))
    take_lora_bias(d, x);
  else if (!strcmp(x->part, ".base_layer.weight"))
    check_base(d, x);
  else
    take_bias(d, x);
}

mr_code mr_lora_load(mr_lora *l, int i, const char *name, const char *dir, mr_err *err) {
  char config[4096], path[4096];
  loader d = {.l = l, .adapter = i, .name = name, .path = path, .err = err};
  if (snprintf(config, sizeof config, "%s/adapter_config.json", dir) >= (int)sizeof config ||
      snprintf(path, sizeof path, "%s/adapter_model.safetensors", dir) >= (int)sizeof path)
    return mr_err_at(err, MR_E_NOINPUT, dir, 0, -1, "the path is too long");
  d.rc = mr_lora_config_read(&d.config, config, err);
  if (!d.rc)
    d.rc = mr_safetensors_open_file(&d.st, path, err);
  if (!d.rc && l->m->c.arch.mla &&
      !(d.latent = mr_lora_block(&l->raw, (size_t)l->m->c.n_layers, sizeof *d.latent)))
    no_memory(&d);
  size_t n = d.rc ? 0 : mr_safetensors_n(d.st);
  for (size_t t = 0; t < n && !d.rc; t++) {
    tensor x;
    if (split(&d, mr_safetensors_at(d.st, t), &x))
      take(&d, &x);
  }
  if (!d.rc && n == 0)
    FAIL(&d, "there are no tensors in it");
  for (int y = 0; d.latent && y < l->m->c.n_layers && !d.rc; y++)
    d.rc = mr_lora_add_latent(l, i, y, &d.latent[y], path, err);
  mr_safetensors_close(d.st);
  mr_lora_config_free(&d.config);
  return d.rc;
}
