/* Which tensors a written file has, and where each row of them comes from. */
#include "src/quantize_plan.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "io/mem.h"
#include "src/names.h"

static mr_code no_memory(mr_err *err) {
  return mr_err_set(err, MR_E_NOMEM, "out of memory for the list of tensors");
}

typedef struct maker {
  mr_out_plan *p;
  int layer;    /* -1: tensors of no layer */
  bool failed;  /* out of memory */
  bool reorder; /* queries and keys go from halves into pairs */
} maker;

static mr_out_tensor *add(maker *k, mr_out_kind kind, const char *stem, const char *ext) {
  mr_out_plan *p = k->p;
  if (k->failed || !mr_mem_grow((void **)&p->t, &p->cap, p->n + 1, sizeof *p->t)) {
    k->failed = true;
    return NULL;
  }
  mr_out_tensor *t = &p->t[p->n++];
  *t = (mr_out_tensor){.kind = kind, .dtype = MR_F32, .n_dims = 1, .dims = {1, 1, 1, 1}};
  t->rows = 1;
  if (k->layer >= 0)
    snprintf(t->name, sizeof t->name, "blk.%d.%s%s", k->layer, stem, ext);
  else
    snprintf(t->name, sizeof t->name, "%s%s", stem, ext);
  t->layer = k->layer;
  snprintf(t->stem, sizeof t->stem, "%s", stem);
  return t;
}

/* Layer and stem of a tensor of a GGUF file. Layers that the model has not are of none: a file may
 * hold more of them than it says (those that guess tokens ahead). */
static void name_parts(mr_out_tensor *t, int n_layers) {
  int layer = 0, at = 0;
  bool layered = sscanf(t->name, "blk.%5d.%n", &layer, &at) == 1 && at > 0;
  const char *stem = layered ? t->name + at : t->name;
  t->layer = layered && layer >= 0 && layer < n_layers ? layer : -1;
  snprintf(t->stem, sizeof t->stem, "%.*s", (int)strcspn(stem, "."), stem);
}

static void vector(maker *k, const char *stem, const char *ext, const float *v, int64_t n) {
  mr_out_tensor *t = v ? add(k, MR_OUT_PLAIN, stem, ext) : NULL;
  if (!t)
    return;
  t->dims[0] = n;
  t->values = v;
}

static void part(maker *k, const mr_matrix *w) {
  mr_out_plan *p = k->p;
  if (k->failed ||
      !mr_mem_grow((void **)&p->parts, &p->cap_parts, p->n_parts + 1, sizeof *p->parts))
    k->failed = true;
  else
    p->parts[p->n_parts++] = w;
}

float *mr_out_floats(mr_out_plan *p, size_t n) {
  float *v = mr_mem_alloc(n, sizeof *v);
  if (!v || !mr_mem_grow((void **)&p->own, &p->cap_own, p->n_own + 1, sizeof *p->own)) {
    mr_mem_free(v);
    return NULL;
  }
  return p->own[p->n_own++] = v;
}

static float *own(maker *k, size_t n) {
  float *v = k->failed ? NULL : mr_out_floats(k->p, n);
  k->failed |= !v;
  return v;
}

/* The row of the source that row r of the file is: of the first `rotated` rows of a head, pairs
 * (2i, 2i+1) were (i, i + rotated/2). */
static int64_t source_row(int heads_of, int rotated, int64_t r) {
  int at = heads_of ? (int)(r % heads_of) : 0;
  return heads_of && at < rotated ? r - at + at / 2 + at % 2 * (rotated / 2) : r;
}

/* A matrix of one or more matrices' rows, and its bias where one of them has one. */
static void matrices(maker *k, const char *stem, const mr_matrix *const *w, int n, bool pairs) {
  const mr_config *c = &k->p->m->c;
  int64_t rows = 0;
  bool bias = false;
  for (int i = 0; i < n; i++) {
    rows += w[i]->n;
    bias |= w[i]->bias != NULL;
  }
  mr_out_tensor *t = add(k, MR_OUT_MATRIX, stem, ".weight");
  if (!t)
    return;
  t->n_dims = 2;
  t->dims[0] = w[0]->k;
  t->dims[1] = t->rows = rows;
  t->first = (int)k->p->n_parts;
  t->n_parts = n;
  if (pairs && k->reorder) {
    t->heads_of = c->head_dim;
    t->rotated = c->rope_dims;
  }
  int heads_of = t->heads_of, rotated = t->rotated;
  for (int i = 0; i < n; i++)
    part(k, w[i]);
  float *b = bias ? own(k, (size_t)rows) : NULL;
  int64_t at = 0;
  for (int i = 0; b && i < n; at += w[i++]->n)
    for (int r = 0; w[i]->bias && r < w[i]->n; r++)
      b[at + r] = w[i]->bias[source_row(heads_of, rotated, r)];
  vector(k, stem, ".bias", b, rows);
}

static void matrix(maker *k, const char *stem, const mr_matrix *w, bool pairs) {
  if (w->n > 0 && w->dtype >= 0)
    matrices(k, stem, &w, 1, pairs);
}

/* One of the three matrices of all experts, as [experts, rows, cols]. */
static void expert_matrices(maker *k, const char *stem, const mr_layer *y, size_t member) {
  int n = k->p->m->c.n_experts;
  const mr_matrix *first = (const mr_matrix *)(const void *)((const char *)y->experts + member);
  mr_out_tensor *t = add(k, MR_OUT_MATRIX, stem, ".weight");
  if (!t)
    return;
  t->n_dims = 3;
  t->dims[0] = first->k;
  t->dims[1] = first->n;
  t->dims[2] = n;
  t->rows = (int64_t)first->n * n;
  t->first = (int)k->p->n_parts;
  t->n_parts = n;
  for (int e = 0; e < n; e++)
    part(k, (const mr_matrix *)(const void *)((const char *)(y->experts + e) + member));
}

static void experts(maker *k, const mr_layer *y) {
  const mr_config *c = &k->p->m->c;
  matrix(k, "ffn_gate_inp", &y->router, false);
  if (!k->failed)
    k->p->t[k->p->n - 1].kind = MR_OUT_PLAIN;
  vector(k, "exp_probs_b", ".bias", y->route_bias, c->n_experts);
  expert_matrices(k, "ffn_gate_exps", y, offsetof(mr_expert, gate));
  expert_matrices(k, "ffn_up_exps", y, offsetof(mr_expert, up));
  expert_matrices(k, "ffn_down_exps", y, offsetof(mr_expert, down));
  if (!c->d_shared)
    return;
  const mr_expert *x = &y->experts[c->n_experts];
  matrix(k, "ffn_gate_shexp", &x->gate, false);
  matrix(k, "ffn_up_shexp", &x->up, false);
  matrix(k, "ffn_down_shexp", &x->down, false);
  vector(k, "ffn_gate_inp_shexp", ".weight", y->shared_gate, c->d_model);
}

static void attention(maker *k, const mr_layer *y) {
  const mr_config *c = &k->p->m->c;
  bool all = c->arch.qk_norm_full || c->arch.qk_norm_each;
  if (c->arch.fused_qkv) {
    const mr_matrix *const parts[] = {&y->q, &y->k, &y->v};
    matrices(k, "attn_qkv", parts, 3, false);
  } else {
    matrix(k, "attn_q", &y->q, true);
    matrix(k, "attn_k", &y->k, true);
    matrix(k, "attn_v", &y->v, false);
  }
  matrix(k, "attn_output", &y->o, false);
  vector(k, "attn_q_norm", ".weight", y->q_norm, c->head_dim * (all ? c->n_heads : 1));
  vector(k, "attn_k_norm", ".weight", y->k_norm, c->head_dim * (all ? c->n_kv_heads : 1));
}

static void mlp(maker *k, const mr_layer *y) {
  if (y->experts) {
    experts(k, y);
  } else if (k->p->m->c.arch.fused_gate_up) {
    const mr_matrix *const parts[] = {&y->gate, &y->up};
    matrices(k, "ffn_up", parts, 2, false);
    matrix(k, "ffn_down", &y->down, false);
  } else {
    matrix(k, "ffn_gate", &y->gate, false);
    matrix(k, "ffn_up", &y->up, false);
    matrix(k, "ffn_down", &y->down, false);
  }
}

/* falcon's second norm has a name of its own, and it is attention's. */
static void norms(maker *k, const mr_layer *y) {
  const mr_config *c = &k->p->m->c;
  bool second = c->arch.parallel && y->ffn_norm && !strcmp(c->arch.name, "falcon");
  const char *attn = second ? "attn_norm_2" : "attn_norm";
  const char *ffn = second ? "attn_norm" : "ffn_norm";
  vector(k, attn, ".weight", y->attn_norm, c->d_model);
  vector(k, attn, ".bias", y->attn_norm_b, c->d_model);
  vector(k, ffn, ".weight", y->ffn_norm, c->d_model);
  vector(k, ffn, ".bias", y->ffn_norm_b, c->d_model);
  vector(k, "post_attention_norm", ".weight", y->attn_post_norm, c->d_model);
  vector(k, "post_ffw_norm", ".weight", y->ffn_post_norm, c->d_model);
}

static void positions(maker *k) {
  const mr_model *m = k->p->m;
  mr_out_tensor *t = m->position_embd ? add(k, MR_OUT_PLAIN, "position_embd", ".weight") : NULL;
  if (!t)
    return;
  t->n_dims = 2;
  t->dims[0] = m->c.d_model;
  t->dims[1] = t->rows = m->c.context;
  t->values = m->position_embd;
}

/* A directory: the tensors of the loaded model under GGUF's names. */
static void from_model(maker *k) {
  const mr_model *m = k->p->m;
  bool tied = m->head.data == m->embed.data;
  k->layer = -1;
  matrix(k, "token_embd", &m->embed, false);
  if (tied && !k->failed)
    k->p->t[k->p->n - 1].kind = MR_OUT_HEAD;
  vector(k, "output_norm", ".weight", m->out_norm, m->c.d_model);
  vector(k, "output_norm", ".bias", m->out_norm_b, m->c.d_model);
  if (!tied) {
    size_t at = k->p->n;
    matrix(k, "output", &m->head, false);
    if (!k->failed)
      k->p->t[at].kind = MR_OUT_HEAD;
  }
  positions(k);
  vector(k, "rope_freqs", ".weight", m->rope_freqs, m->c.rope_dims / 2);
  for (int i = 0; i < m->c.n_layers && !k->failed; i++) {
    const mr_layer *y = &m->layers[i];
    k->layer = i;
    norms(k, y);
    attention(k, y);
    mlp(k, y);
  }
}

/* ------------------------------------------------------------------ GGUF files */

static bool ends_with(const char *s, const char *end) {
  size_t n = strlen(s), m = strlen(end);
  return n >= m && !strcmp(s + n - m, end);
}

/* Small and sensitive tensors stay as they are. */
static mr_out_kind kind_of(const mr_model *m, const mr_out_tensor *t) {
  static const char *const plain[] = {"norm", "ffn_gate_inp", "position_embd", "rope_"};
  if (t->n_dims < 2 || !ends_with(t->name, ".weight"))
    return MR_OUT_PLAIN;
  for (size_t i = 0; i < sizeof plain / sizeof *plain; i++)
    if (strstr(t->name, plain[i]))
      return MR_OUT_PLAIN;
  bool tied = m->head.data == m->embed.data;
  return !strcmp(t->name, tied ? "token_embd.weight" : "output.weight") ? MR_OUT_HEAD
                                                                        : MR_OUT_MATRIX;
}

static void from_gguf(maker *k) {
  const mr_model *m = k->p->m;
  k->layer = -1;
  for (size_t i = 0; i < mr_gguf_n_tensors(m->gguf); i++) {
    const mr_gguf_tensor *raw = mr_gguf_tensor_at(m->gguf, i);
    mr_out_tensor *t = add(k, MR_OUT_PLAIN, "", "");
    if (!t)
      return;
    size_t n = raw->name.len < sizeof t->name ? raw->name.len : sizeof t->name - 1;
    memcpy(t->name, raw->name.s, n);
    t->name[n] = 0;
    name_parts(t, m->c.n_layers);
    t->raw = raw;
    t->dtype = raw->dtype;
    t->n_dims = raw->n_dims;
    memcpy(t->dims, raw->dims, sizeof t->dims);
    t->rows = t->dims[1] * t->dims[2] * t->dims[3];
    t->kind = mr_dtype_get(raw->dtype)->to_f32 ? kind_of(m, t) : MR_OUT_PLAIN;
  }
}

/* ------------------------------------------------------------------ the plan */

mr_code mr_out_plan_make(mr_out_plan *p, const mr_model *m, mr_err *err) {
  maker k = {.p = p};
  const mr_arch *a = mr_arch_find(m->c.arch.name);
  *p = (mr_out_plan){.m = m};
  if (m->gguf) {
    from_gguf(&k);
  } else if (!a) {
    return mr_err_at(err, MR_E_UNAVAILABLE, m->weights->path, 0, -1,
                     "architecture %s has no form in GGUF that this program knows", m->c.arch.name);
  } else {
    k.reorder = a->rope == MR_ROPE_INTERLEAVED && m->c.arch.rope == MR_ROPE_NEOX;
    from_model(&k);
  }
  return k.failed ? no_memory(err) : MR_OK;
}

/* ------------------------------------------------------------------ directories as they are */

/* The tensor of the plan that the stem of a layer names: what it is, is noted. */
static bool mark(mr_out_plan *p, const mr_names *names, int layer, const char *stem, int item,
                 const char *ext) {
  char name[MR_NAME];
  const mr_gguf_tensor *raw = mr_names_find(names, layer, stem, ext, item, name);
  if (!raw)
    return false;
  mr_out_tensor *t = &p->t[raw - mr_weights_at(p->m->weights, 0)];
  if (t->layer >= 0) /* two stems may share a name: the first is meant */
    return true;
  t->layer = layer;
  snprintf(t->stem, sizeof t->stem, "%s", stem);
  bool matrix =
      mr_site_of(stem) >= 0 || !strncmp(stem, "ffn_down_", 9) || !strcmp(stem, "attn_kv_b");
  if (raw->n_dims != 2 || !matrix || strcmp(ext, ".weight") != 0)
    return true;
  t->kind = MR_OUT_MATRIX;
  t->columns = p->m->c.arch.hf_columns;
  if (t->columns) {
    t->dims[0] = raw->dims[1];
    t->dims[1] = t->rows = raw->dims[0];
  }
  return true;
}

/* A matrix of the loaded model, or its bias, under a name of its own. */
static void add_own(maker *k, const char *stem, const char *name, const mr_matrix *w, bool bias) {
  size_t len = strlen(name);
  float *room = own(k, len / sizeof(float) + 1); /* of text, which the plan keeps */
  mr_out_tensor *t = room ? add(k, bias ? MR_OUT_PLAIN : MR_OUT_MATRIX, stem, "") : NULL;
  if (!t)
    return;
  memcpy(room, name, len);
  t->full = (mr_str){(const char *)room, len};
  snprintf(t->name, sizeof t->name, "%s", name);
  t->dims[0] = bias ? w->n : w->k;
  if (bias) {
    t->values = w->bias;
    return;
  }
  t->n_dims = 2;
  t->dims[1] = t->rows = w->n;
  t->first = (int)k->p->n_parts;
  t->n_parts = 1;
  part(k, w);
}

/* A fused tensor's matrices go by the names that single experts have. False: there is none. */
static bool take_apart(maker *k, const mr_names *names, const char *fused, size_t n,
                       const char *const *stems, const size_t *members) {
  static const char *const ext[] = {"", ".weight", "_bias"};
  const mr_layer *y = &k->p->m->layers[k->layer];
  const mr_gguf_tensor *like = NULL;
  char name[MR_NAME];
  for (size_t i = 0; i < sizeof ext / sizeof *ext; i++) {
    const mr_gguf_tensor *raw = mr_names_find(names, k->layer, fused, ext[i], 0, name);
    if (!raw || (!like && raw->n_dims != 3))
      continue;
    like = like ? like : raw;
    k->p->t[raw - mr_weights_at(k->p->m->weights, 0)].kind = MR_OUT_NONE;
  }
  for (int e = 0; like && e < k->p->m->c.n_experts; e++)
    for (size_t i = 0; i < n; i++) {
      const char *x = (const char *)(y->experts + e) + members[i];
      const mr_matrix *w = (const mr_matrix *)(const void *)x;
      mr_names_beside(names, k->layer, stems[i], ".weight", e, like->name, name);
      add_own(k, stems[i], name, w, false);
      mr_names_beside(names, k->layer, stems[i], ".bias", e, like->name, name);
      if (w->bias)
        add_own(k, stems[i], name, w, true);
    }
  return like != NULL;
}

/* The matrices of a layer's experts that lie in two tensors; false: they do not. */
static bool take_experts(maker *k, const mr_names *names) {
  static const char *const stems[] = {"ffn_gate_exp", "ffn_up_exp", "ffn_down_exp"};
  static const size_t members[] = {offsetof(mr_expert, gate), offsetof(mr_expert, up),
                                   offsetof(mr_expert, down)};
  return take_apart(k, names, "ffn_gate_up_exps", 2, stems, members) &&
         take_apart(k, names, "ffn_down_exps", 1, stems + 2, members + 2);
}

/* The matrices of a layer's experts; false: there are experts, but not one by one. */
static bool mark_experts(mr_out_plan *p, const mr_names *names, int layer) {
  static const char *const each[] = {"ffn_gate_exp", "ffn_up_exp", "ffn_down_exp"};
  static const char *const shared[] = {"ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"};
  bool found = true;
  for (int s = 0; s < 3; s++) {
    mark(p, names, layer, shared[s], 0, ".weight");
    for (int e = 0; p->m->layers[layer].experts && e < p->m->c.n_experts; e++)
      found &= mark(p, names, layer, each[s], e, ".weight");
  }
  return found;
}

/* False: experts that lie in a tensor of another kind. */
static bool from_directory(maker *k) {
  static const char *const stems[] = {
      "attn_q",   "attn_k",    "attn_v",   "attn_qkv", "attn_output", "ffn_gate",      "ffn_up",
      "ffn_down", "attn_norm", "ffn_norm", "attn_q_a", "attn_q_b",    "attn_kv_a_mqa", "attn_kv_b"};
  const mr_model *m = k->p->m;
  mr_names names;
  mr_names_open(&names, m->weights);
  k->layer = -1;
  for (size_t i = 0; i < mr_weights_n(m->weights) && !k->failed; i++) {
    const mr_gguf_tensor *raw = mr_weights_at(m->weights, i);
    mr_out_tensor *t = add(k, MR_OUT_PLAIN, "", "");
    if (!t)
      return true;
    snprintf(t->name, sizeof t->name, "%.*s", (int)(raw->name.len < 63 ? raw->name.len : 63),
             raw->name.s);
    t->full = raw->name;
    t->raw = raw;
    t->dtype = raw->dtype;
    t->n_dims = raw->n_dims;
    memcpy(t->dims, raw->dims, sizeof t->dims);
    t->rows = t->dims[1] * t->dims[2] * t->dims[3];
  }
  bool found = true;
  for (int i = 0; i < m->c.n_layers && !k->failed; i++) {
    for (size_t s = 0; s < sizeof stems / sizeof *stems; s++) {
      mark(k->p, &names, i, stems[s], 0, ".weight");
      mark(k->p, &names, i, stems[s], 0, ".bias");
    }
    k->layer = i;
    found &= mark_experts(k->p, &names, i) || take_experts(k, &names);
  }
  return found;
}

static mr_code check_directory(const mr_model *m, mr_err *err) {
  const char *why = m->weights->st ? NULL : "the model is no directory";
  for (size_t i = 0; !why && i < mr_weights_n(m->weights); i++) {
    int type = mr_weights_at(m->weights, i)->dtype;
    if (mr_weights_at(m->weights, i)->dims[3] > 1)
      why = "a tensor has four dimensions or more: the model is not of text alone";
    if (type != MR_F32 && type != MR_F16 && type != MR_BF16 && mr_dtype_get(type)->to_f32)
      why = "its weights are quantized already";
    if (type == MR_I32)
      why = "its weights are quantized already";
  }
  return why ? mr_err_at(err, MR_E_UNAVAILABLE, m->weights->path, 0, -1,
                         "cannot be written as a quantized directory: %s", why)
             : MR_OK;
}

mr_code mr_out_plan_dir(mr_out_plan *p, const mr_model *m, mr_err *err) {
  maker k = {.p = p};
  mr_code rc = check_directory(m, err);
  *p = (mr_out_plan){.m = m, .less_one = m->c.arch.hf_plus1};
  if (!rc && !from_directory(&k))
    rc = mr_err_at(
        err, MR_E_UNAVAILABLE, m->weights->path, 0, -1,
        "cannot be written as a quantized directory: its experts lie one below the other");
  return rc ? rc : k.failed ? no_memory(err) : MR_OK;
}

void mr_out_plan_free(mr_out_plan *p) {
  for (size_t i = 0; i < p->n_own; i++)
    mr_mem_free(p->own[i]);
  mr_mem_free(p->own);
  mr_mem_free(p->parts);
  mr_mem_free(p->t);
  *p = (mr_out_plan){0};
}

static void plain_row(const mr_out_plan *p, const mr_out_tensor *t, int64_t r, float *dst) {
  int64_t n = t->dims[0];
  const mr_dtype_info *type = t->raw ? mr_dtype_get(t->raw->dtype) : NULL;
  if (t->columns) {
    for (int64_t i = 0; i < n; i++)
      type->to_f32(dst + i, t->raw->data + (uint64_t)(i * t->rows + r) * type->block_bytes, 1);
    return;
  }
  if (t->raw) {
    type->to_f32(dst, t->raw->data + (uint64_t)r * mr_dtype_bytes(t->raw->dtype, (uint64_t)n), n);
    return;
  }
  if (t->values) {
    memcpy(dst, t->values + r * n, (size_t)n * sizeof *dst);
    return;
  }
  const mr_matrix *const *w = p->parts + t->first;
  for (; r >= (*w)->n; w++)
    r -= (*w)->n;
  mr_matrix_row(*w, r, dst);
}

void mr_out_row(const mr_out_plan *p, const mr_out_tensor *t, int64_t row, float *dst) {
  plain_row(p, t, source_row(t->heads_of, t->rotated, row), dst);
  for (int64_t i = 0; t->col && i < t->dims[0]; i++)
    dst[i] *= t->col[i];
  for (int64_t i = 0; t->row && i < t->dims[0]; i++)
    dst[i] *= t->row[row];
}
