/* Which tensors a model has, under which names, and how layers are made of them. */
#include "src/model_load.h"

#include <math.h>
#include <string.h>

#include "io/mem.h"
#include "src/product.h"

#define FAIL MR_LOAD_FAIL
#define MAX_SINUSOIDS (1 << 28) /* values of a table that no tensor of the file bounds */

const mr_gguf_tensor *mr_load_find(mr_loader *l, const char *stem, const char *ext,
                                   char name[MR_NAME]) {
  return mr_names_find(&l->names, l->layer, stem, ext, l->item, name);
}

bool mr_load_has(mr_loader *l, const char *stem) {
  char name[MR_NAME];
  return mr_load_find(l, stem, ".weight", name) || mr_load_find(l, stem, ".qweight", name) ||
         mr_load_find(l, stem, ".weight_packed", name);
}

void mr_load_use(mr_loader *l, const mr_gguf_tensor *t, uint64_t values) {
  uint8_t *used = &l->used[t - mr_weights_at(l->m->weights, 0)];
  if (!*used)
    l->m->n_params += values;
  *used = 1;
}

/* Shape [rows, cols] and a type that can be read; marks the tensor as used. A vector may be stored
 * in any shape of as many values. */
static bool check(mr_loader *l, const mr_gguf_tensor *t, const char *name, int64_t rows,
                  int64_t cols, bool any_shape) {
  const mr_dtype_info *type = mr_dtype_get(t->dtype);
  bool fits = t->dims[0] == cols && t->dims[1] == rows && t->dims[2] == 1 && t->dims[3] == 1;
  if (any_shape && !fits)
    fits = t->dims[0] * t->dims[1] == rows * cols && t->dims[2] * t->dims[3] == 1;
  if (!fits) {
    FAIL(l, MR_E_DATA, "tensor %s is [%lld, %lld%s]; the metadata asks for [%lld, %lld]", name,
         (long long)t->dims[1], (long long)t->dims[0], t->dims[2] * t->dims[3] > 1 ? ", ..." : "",
         (long long)rows, (long long)cols);
    return false;
  }
  if (!type->to_f32) {
    FAIL(l, MR_E_DATA, "tensor %s has type %s, which is not supported yet", name, type->name);
    return false;
  }
  mr_load_use(l, t, (uint64_t)(rows * cols));
  return true;
}

float *mr_load_floats(mr_loader *l, size_t n) {
  mr_model *m = l->m;
  float *v = mr_mem_alloc(n, sizeof *v);
  if (v &&
      mr_mem_grow((void **)&m->vectors, &m->cap_vectors, m->n_vectors + 1, sizeof *m->vectors)) {
    m->vectors[m->n_vectors++] = v;
    return v;
  }
  mr_mem_free(v);
  FAIL(l, MR_E_NOMEM, "no memory for a tensor of %zu values", n);
  return NULL;
}

void mr_load_vector(mr_loader *l, const float **out, const char *stem, const char *ext,
                    int64_t rows, int64_t n, bool needed) {
  char name[MR_NAME];
  if (l->rc)
    return;
  const mr_gguf_tensor *t = mr_load_find(l, stem, ext, name);
  if (!t) {
    if (needed)
      FAIL(l, MR_E_DATA, "tensor %s of %lld values is missing", name, (long long)(rows * n));
    return;
  }
  if (!check(l, t, name, rows, n, l->m->weights->st != NULL))
    return;
  float *v = mr_load_floats(l, (size_t)rows * (size_t)n);
  if (!v)
    return;
  mr_dtype_get(t->dtype)->to_f32(v, t->data, rows * n);
  *out = v;
}

mr_product *mr_load_product(mr_loader *l) {
  size_t floats = (sizeof(mr_product) + sizeof(float) - 1) / sizeof(float);
  return l->rc ? NULL : (mr_product *)(void *)mr_load_floats(l, floats);
}

/* gpt2's layers are stored as they are multiplied from the left: [k, n]. */
static bool by_columns(const mr_loader *l) {
  return l->layer >= 0 && l->m->weights->st && l->m->c.arch.hf_columns;
}

void mr_load_matrix(mr_loader *l, mr_matrix *w, const char *stem, int n, int k, bool bias) {
  char name[MR_NAME];
  if (l->rc)
    return;
  bias = bias && !l->m->weights->st; /* directories differ from model to model */
  const mr_gguf_tensor *t = mr_load_find(l, stem, ".weight", name);
  if (!t && mr_load_quant(l, w, stem, n, k)) {
    mr_load_vector(l, &w->bias, stem, ".bias", 1, n, false);
    return;
  }
  if (!t) {
    FAIL(l, MR_E_DATA, "tensor %s [%d, %d] is missing", name, n, k);
    return;
  }
  bool columns = by_columns(l);
  if (!check(l, t, name, columns ? k : n, columns ? n : k, false))
    return;
  *w = (mr_matrix){.n = n, .k = k, .dtype = t->dtype, .data = t->data, .columns = columns};
  w->mapped = true;
  w->row_bytes = mr_dtype_bytes(t->dtype, (uint64_t)(columns ? n : k));
  mr_load_vector(l, &w->bias, stem, ".bias", 1, n, bias);
  if (t->dtype == MR_F8_E4M3 || t->dtype == MR_I8)
    mr_load_scales(l, w, stem);
}

/* Directories of some architectures hold weights less by one. */
static void plus_one(mr_loader *l, const float *w, int n) {
  if (!w || l->rc || !l->m->c.arch.hf_plus1 || !l->m->weights->st)
    return;
  for (size_t i = 0; i < l->m->n_vectors; i++)
    if (l->m->vectors[i] == w)
      for (int j = 0; j < n; j++)
        l->m->vectors[i][j] += 1;
}

/* A norm's weight, and its bias where such a norm has one. */
static void norm(mr_loader *l, const float **w, const float **b, const char *stem) {
  const mr_config *c = &l->m->c;
  if (c->arch.norm_bare)
    return;
  mr_load_vector(l, w, stem, ".weight", 1, c->d_model, true);
  plus_one(l, *w, c->d_model);
  if (b && c->arch.norm == MR_NORM_LAYER)
    mr_load_vector(l, b, stem, ".bias", 1, c->d_model, c->arch.norm_bias && !l->m->weights->st);
}

void mr_qkv_rows(const mr_config *c, mr_qkv layout, int which, mr_matrix *w) {
  int q = c->n_heads * c->head_dim, kv = c->n_kv_heads * c->head_dim, dim = c->head_dim;
  int share = c->n_heads / c->n_kv_heads * dim, part = q / 4;
  const int stacked[3] = {0, q, q + kv}, grouped[3] = {0, share, share + dim};
  const int parts[3] = {0, 2 * part, part};
  w->n = which ? kv : q;
  w->group = w->stride = 0;
  w->first = stacked[which];
  if (layout == MR_QKV_STACKED)
    return;
  bool by_head = layout == MR_QKV_GROUPED;
  w->first = by_head ? grouped[which] : parts[which];
  w->group = !by_head ? part : which ? dim : share;
  w->stride = by_head ? share + 2 * dim : 3 * part;
}

/* Its part of the whole tensor's bias, gathered: a bias is not mapped as its matrix is. */
static void own_bias(mr_loader *l, mr_matrix *w) {
  float *b = w->bias && !l->rc ? mr_load_floats(l, (size_t)w->n) : NULL;
  if (!b)
    return;
  for (int r = 0; r < w->n; r++)
    b[r] = w->bias[mr_matrix_source(w, r)];
  w->bias = b;
}

static void cut_qkv(mr_loader *l, mr_layer *y, const mr_matrix *all, int q, int kv) {
  const mr_config *c = &l->m->c;
  mr_qkv layout = l->m->weights->st ? c->arch.hf_qkv : MR_QKV_STACKED;
  if (layout == MR_QKV_PARTS && (q % 4 || q != kv))
    FAIL(l, MR_E_DATA, "queries, keys and values cannot be cut into four parts");
  if (l->rc)
    return;
  mr_matrix *const parts[3] = {&y->q, &y->k, &y->v};
  for (int i = 0; i < 3; i++) {
    *parts[i] = *all;
    mr_qkv_rows(c, layout, i, parts[i]);
    own_bias(l, parts[i]);
  }
}

/* A norm for each head, one tensor each (stablelm), one after the other. */
static void norms_of_heads(mr_loader *l, const float **out, const char *stem, int heads) {
  int dim = l->m->c.head_dim;
  float *all = l->rc ? NULL : mr_load_floats(l, (size_t)heads * (size_t)dim);
  for (int h = 0; all && h < heads; h++) {
    const float *one = NULL;
    l->item = h;
    mr_load_vector(l, &one, stem, ".weight", 1, dim, true);
    if (one)
      memcpy(all + (size_t)h * (size_t)dim, one, (size_t)dim * sizeof *all);
  }
  *out = all;
}

static void qk_norms(mr_loader *l, mr_layer *y, int q, int kv) {
  const mr_arch *a = &l->m->c.arch;
  bool all = a->qk_norm_full || a->qk_norm_each;
  if (!a->qk_norm || a->qk_norm_bare)
    return;
  l->item = 0;
  if (mr_load_has(l, "attn_q_norm_head")) {
    norms_of_heads(l, &y->q_norm, "attn_q_norm_head", l->m->c.n_heads);
    norms_of_heads(l, &y->k_norm, "attn_k_norm_head", l->m->c.n_kv_heads);
    return;
  }
  if (a->qk_norm_layer) {
    mr_load_vector(l, &y->q_norm_b, "attn_q_norm", ".bias", 1, all ? q : l->m->c.head_dim, false);
    mr_load_vector(l, &y->k_norm_b, "attn_k_norm", ".bias", 1, all ? kv : l->m->c.head_dim, false);
  }
  mr_load_vector(l, &y->q_norm, "attn_q_norm", ".weight", 1, all ? q : l->m->c.head_dim,
                 !l->m->weights->st);
  mr_load_vector(l, &y->k_norm, "attn_k_norm", ".weight", 1, all ? kv : l->m->c.head_dim,
                 y->q_norm != NULL);
  plus_one(l, y->q_norm, all ? q : l->m->c.head_dim);
  plus_one(l, y->k_norm, all ? kv : l->m->c.head_dim);
}

static void attention(mr_loader *l, mr_layer *y) {
  const mr_config *c = &l->m->c;
  int d = c->d_model, q = c->n_heads * c->head_dim, kv = c->n_kv_heads * c->head_dim;
  if (c->arch.mla) {
    mr_load_latent(l, y);
    return;
  }
  if (c->arch.fused_qkv && !mr_load_has(l, "attn_q")) {
    mr_matrix all = {0};
    mr_load_matrix(l, &all, "attn_qkv", q + 2 * kv, d, c->arch.qkv_bias);
    cut_qkv(l, y, &all, q, kv);
  } else {
    mr_load_matrix(l, &y->q, "attn_q", q, d, c->arch.qkv_bias);
    mr_load_matrix(l, &y->k, "attn_k", kv, d, c->arch.qkv_bias);
    mr_load_matrix(l, &y->v, "attn_v", kv, d, c->arch.qkv_bias);
  }
  mr_load_matrix(l, &y->o, "attn_output", d, q, c->arch.out_bias);
  if (!y->o.bias)
    mr_load_vector(l, &y->o.bias, "attn_output", "_bias", 1, d, false);
  qk_norms(l, y, q, kv);
  if (c->arch.sinks)
    mr_load_vector(l, &y->sinks, "attn_sinks", l->m->weights->st ? "" : ".weight", 1, c->n_heads,
                   true);
  if (c->arch.sub_norms)
    mr_load_vector(l, &y->attn_sub_norm, "attn_sub_norm", ".weight", 1, q, true);
}

static void xielu(mr_loader *l, mr_layer *y) {
  static const char *const ext[] = {".alpha_p", ".alpha_n", ".beta", ".eps"};
  float v[4] = {0};
  for (int i = 0; i < 4; i++) {
    const float *p = NULL;
    mr_load_vector(l, &p, "xielu", ext[i], 1, 1, true);
    v[i] = p ? *p : 0;
  }
  /* stored before softplus; the lower slope is beta more */
  y->xielu[0] = v[0] > 20 ? v[0] : log1pf(expf(v[0]));
  y->xielu[1] = v[2] + (v[1] > 20 ? v[1] : log1pf(expf(v[1])));
  y->xielu[2] = v[2];
  y->xielu_eps = v[3];
}

static void mlp(mr_loader *l, mr_layer *y) {
  const mr_config *c = &l->m->c;
  int d = c->d_model, f = c->d_ff;
  y->gate.dtype = -1;
  if (c->n_experts > 0 && mr_load_has(l, "ffn_gate_inp")) {
    mr_load_experts(l, y);
    return;
  }
  if (c->n_experts == 0 && mr_load_has(l, "ffn_up_shexp")) { /* alone: no expert is chosen beside it
                                                              */
    mr_load_shared(l, &y->gate, &y->up, &y->down, f);
  } else if (c->arch.gated && c->arch.fused_gate_up && !mr_load_has(l, "ffn_gate")) {
    mr_matrix both = {0};
    mr_load_matrix(l, &both, "ffn_up", 2 * f, d, c->arch.mlp_bias);
    y->gate = mr_matrix_part(&both, 0, f);
    y->up = mr_matrix_part(&both, f, f);
  } else {
    if (c->arch.gated)
      mr_load_matrix(l, &y->gate, "ffn_gate", f, d, c->arch.mlp_bias);
    mr_load_matrix(l, &y->up, "ffn_up", f, d, c->arch.mlp_bias);
  }
  if (!y->down.n)
    mr_load_matrix(l, &y->down, "ffn_down", d, f, c->arch.mlp_bias);
  if (c->arch.sub_norms)
    mr_load_vector(l, &y->ffn_sub_norm, "ffn_sub_norm", ".weight", 1, f, true);
  if (c->arch.xielu)
    xielu(l, y);
}

/* Parallel layers have one norm for both branches, or attention's in attn_norm_2 (falcon), or two
 * as others. */
static void layer_norms(mr_loader *l, mr_layer *y) {
  const mr_arch *a = &l->m->c.arch;
  bool second = a->parallel && mr_load_has(l, "attn_norm_2");
  if (a->pre_norms || a->norm_after) {
    norm(l, &y->attn_norm, &y->attn_norm_b, second ? "attn_norm_2" : "attn_norm");
    if (second || !a->parallel || mr_load_has(l, "ffn_norm"))
      norm(l, &y->ffn_norm, &y->ffn_norm_b, second ? "attn_norm" : "ffn_norm");
  }
  if (a->post_norms) {
    norm(l, &y->attn_post_norm, NULL, "post_attention_norm");
    norm(l, &y->ffn_post_norm, NULL, "post_ffw_norm");
  }
}

/* Two sets of factors, for prompts within the original context and beyond it (phi3). */
static void long_factors(mr_loader *l) {
  mr_config *c = &l->m->c;
  const float *small = NULL, *large = NULL;
  int n = c->rope_dims / 2;
  mr_load_vector(l, &small, "rope_factors_short", ".weight", 1, n, true);
  mr_load_vector(l, &large, "rope_factors_long", ".weight", 1, n, true);
  if (c->rope_scaling != MR_SCALING_NONE && c->rope_scaling != MR_SCALING_LONGROPE)
    FAIL(l, MR_E_DATA, "two sets of rope factors beside another scaling are not supported");
  for (int i = 0; i < n && !l->rc; i++) {
    c->rope_short[i] = small[i];
    c->rope_long[i] = large[i];
    if (!isfinite(large[i]) || large[i] <= 0)
      FAIL(l, MR_E_DATA, "tensor rope_factors_long.weight: factor %d is %g; it must be above 0", i,
           (double)large[i]);
  }
  c->rope_scaling = MR_SCALING_LONGROPE;
  c->rope_factors = true;
}

static void rope_freqs(mr_loader *l) {
  mr_model *m = l->m;
  if (m->c.arch.rope == MR_ROPE_NONE)
    return;
  if (m->gguf && (mr_load_has(l, "rope_factors_long") || m->c.rope_scaling == MR_SCALING_LONGROPE))
    long_factors(l);
  if (m->c.rope_factors)
    m->rope_freqs = m->c.rope_short;
  else if (m->gguf)
    mr_load_vector(l, &m->rope_freqs, "rope_freqs", ".weight", 1, m->c.rope_dims / 2, false);
  for (int i = 0; !l->rc && m->rope_freqs && i < m->c.rope_dims / 2; i++)
    if (!isfinite(m->rope_freqs[i]) || m->rope_freqs[i] <= 0)
      FAIL(l, MR_E_DATA, "tensor rope_freqs.weight: factor %d is %g; it must be finite and above 0",
           i, (double)m->rope_freqs[i]);
}

/* W times P given as [d, in], or with `turned` as [in, d]: an embedding in the model's width. */
static void projected(mr_loader *l, mr_matrix *w, const mr_matrix *p, bool turned) {
  int in = w->k, d = turned ? p->k : p->n;
  mr_product *product = mr_load_product(l);
  float *own = product ? mr_load_floats(l, (size_t)in * (size_t)d) : NULL;
  float *row = own ? mr_mem_alloc((size_t)p->k, sizeof *row) : NULL;
  if (!row) {
    if (!l->rc)
      FAIL(l, MR_E_NOMEM, "no memory for the embedding");
    return;
  }
  for (int o = 0; o < p->n; o++) {
    mr_matrix_row(p, o, row);
    for (int i = 0; i < p->k; i++)
      own[turned ? (size_t)o * (size_t)d + (size_t)i : (size_t)i * (size_t)d + (size_t)o] = row[i];
  }
  mr_mem_free(row);
  *product = (mr_product){.kind = MR_PRODUCT_RIGHT, .w = *w, .right = own};
  *w = mr_product_matrix(product, w->n, d);
}

static void embedding(mr_loader *l) {
  mr_model *m = l->m;
  const mr_config *c = &m->c;
  int width = c->d_embed ? c->d_embed : c->d_model;
  mr_load_matrix(l, &m->embed, "token_embd", c->n_vocab, width, false);
  if (c->arch.embed_norm)
    norm(l, &m->embed_norm, &m->embed_norm_b, "token_embd_norm");
  if (mr_load_has(l, "output") && c->tied != 1)
    mr_load_matrix(l, &m->head, "output", c->n_vocab, width, false);
  else if (c->tied == 0)
    FAIL(l, MR_E_DATA, "the output head is missing, and tie_word_embeddings is false");
  else
    m->head = m->embed;
  if (!m->head.bias)
    mr_load_vector(l, &m->head.bias, "output", ".bias", 1, c->n_vocab, false);
  if (c->d_embed) {
    mr_matrix in = {0}, out = {0};
    mr_load_matrix(l, &in, "project_in", c->d_model, c->d_embed, false);
    mr_load_matrix(l, &out, "project_out", c->d_embed, c->d_model, false);
    if (l->rc)
      return;
    projected(l, &m->embed, &in, false);
    projected(l, &m->head, &out, true);
  }
}

/* [sines, cosines] of each position from `skip` on. */
static void sinusoids(mr_loader *l, int skip) {
  mr_model *m = l->m;
  int d = m->c.d_model, half = d / 2;
  int waves = m->c.arch.sinusoids == MR_SINUSOIDS_ENDS ? half - 1 : half;
  if ((int64_t)m->c.context * d > MAX_SINUSOIDS) {
    FAIL(l, MR_E_DATA, "a table of %d positions of %d values is too large", m->c.context, d);
    return;
  }
  float *table = mr_load_floats(l, (size_t)m->c.context * (size_t)d);
  for (int p = 0; table && p < m->c.context; p++)
    for (int i = 0; i < half; i++) {
      double at = (p + skip) * exp(-log(10000) * i / (waves > 0 ? waves : 1));
      table[(size_t)p * (size_t)d + (size_t)i] = (float)sin(at);
      table[(size_t)p * (size_t)d + (size_t)(half + i)] = (float)cos(at);
    }
  m->position_embd = table;
}

static void positions(mr_loader *l) {
  mr_model *m = l->m;
  const mr_config *c = &m->c;
  int skip = m->gguf ? 0 : c->arch.position_offset;
  if (c->arch.sinusoids) {
    sinusoids(l, skip);
    return;
  }
  mr_load_vector(l, &m->position_embd, "position_embd", ".weight", c->context + skip, c->d_model,
                 true);
  if (!l->rc)
    m->position_embd += (size_t)skip * (size_t)c->d_model;
}

static void whole_model(mr_loader *l) {
  mr_model *m = l->m;
  const mr_config *c = &m->c;
  l->layer = -1;
  embedding(l);
  if (!c->arch.norm_after)
    norm(l, &m->out_norm, &m->out_norm_b, "output_norm");
  if (c->arch.learned_positions || c->arch.sinusoids)
    positions(l);
  rope_freqs(l);
  for (int i = 0; i < c->n_layers && !l->rc; i++) {
    l->layer = i;
    attention(l, &m->layers[i]);
    mlp(l, &m->layers[i]);
    layer_norms(l, &m->layers[i]);
  }
}

static bool holds(mr_str s, const char *what) {
  size_t n = strlen(what);
  for (size_t i = 0; i + n <= s.len; i++)
    if (memcmp(s.s + i, what, n) == 0)
      return true;
  return false;
}

/* A tensor that the forward pass would have to use. Tables of inverse frequencies and of masks are
 * computed, not read; a tied head may be stored all the same. */
static bool matters(const mr_loader *l, mr_str name) {
  static const char *const known[] = {"token_embd_norm.", "position_embd.", "rope_factors_",
                                      "token_types."};
  static const char *const tables[] = {".attn_rot_embd",   "rotary_emb.",     ".attn.bias",
                                       ".masked_bias",     ".attention.bias", "input_scale",
                                       ".attn.causal_mask"};
  mr_str rest;
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (name.len >= strlen(known[i]) && memcmp(name.s, known[i], strlen(known[i])) == 0)
      return true;
  int layer = mr_names_layer(&l->names, name, &rest);
  if (layer < 0 || layer >= l->m->c.n_layers)
    return false;
  for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
    if (holds(rest, tables[i]))
      return false;
  return true;
}

static void unused(mr_loader *l) {
  mr_model *m = l->m;
  char name[MR_NAME];
  for (size_t i = 0; i < mr_weights_n(m->weights) && !l->rc; i++) {
    if (l->used[i])
      continue;
    mr_str s = mr_weights_at(m->weights, i)->name;
    if (matters(l, s))
      FAIL(l, MR_E_DATA,
           "tensor %s is not known for architecture %s; leaving it out would give wrong results",
           mr_gguf_show(s, name, sizeof name), m->c.arch.name);
    else if (m->n_unused++ == 0)
      m->unused = s;
  }
}

static void vocabulary(mr_loader *l) {
  const mr_gguf_kv *tokens = l->m->gguf ? mr_gguf_find(l->m->gguf, "tokenizer.ggml.tokens") : NULL;
  if (tokens && tokens->type == MR_GGUF_ARRAY && tokens->count > (uint64_t)l->m->c.n_vocab)
    FAIL(l, MR_E_DATA, "the vocabulary has %llu tokens, but token_embd.weight only %d rows",
         (unsigned long long)tokens->count, l->m->c.n_vocab);
}

mr_code mr_load_model(mr_model *m, mr_err *err) {
  mr_loader l = {.m = m, .err = err};
  mr_names_open(&l.names, m->weights);
  l.used = mr_mem_alloc(mr_weights_n(m->weights), 1);
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
