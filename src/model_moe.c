/* Experts and latent attention: what more there is to load in such layers. */
#include "src/model_load.h"

#include "io/mem.h"
#include "src/product.h"

#define FAIL MR_LOAD_FAIL

int mr_layer_experts(const mr_model *m) {
  return m->c.n_experts + (m->c.d_shared > 0);
}

/* A tensor [n_experts, rows, cols] that holds a matrix of each expert; with `flat` as
 * [n_experts * rows, cols]. */
static const mr_gguf_tensor *fused_as(mr_loader *l, const char *stem, int rows, int cols,
                                      bool flat) {
  char name[MR_NAME];
  int64_t experts = l->m->c.n_experts;
  const mr_gguf_tensor *t = mr_load_find(l, stem, "", name);
  if (!t)
    t = mr_load_find(l, stem, ".weight", name);
  if (!t || l->rc)
    return NULL;
  if (t->dims[0] != cols || t->dims[1] != (flat ? experts * rows : rows) ||
      t->dims[2] != (flat ? 1 : experts) || t->dims[3] != 1 || !mr_dtype_get(t->dtype)->to_f32) {
    FAIL(l, MR_E_DATA, "tensor %s must be [%d, %d, %d] of a type that is supported", name,
         l->m->c.n_experts, rows, cols);
    return NULL;
  }
  mr_load_use(l, t, (uint64_t)rows * (uint64_t)cols * (uint64_t)l->m->c.n_experts);
  return t;
}

static const mr_gguf_tensor *fused(mr_loader *l, const char *stem, int rows, int cols) {
  return fused_as(l, stem, rows, cols, false);
}

/* Expert e of such a tensor as [n, k]. */
static mr_matrix expert_of(const mr_gguf_tensor *t, int e, int n, int k, bool columns) {
  uint64_t row_bytes = mr_dtype_bytes(t->dtype, (uint64_t)t->dims[0]);
  int64_t rows = t->dims[2] > 1 ? t->dims[1] : columns ? k : n;
  return (mr_matrix){.n = n,
                     .k = k,
                     .dtype = t->dtype,
                     .data = t->data + (uint64_t)e * (uint64_t)rows * row_bytes,
                     .row_bytes = row_bytes,
                     .mapped = true,
                     .columns = columns};
}

enum { GATE_UP, GATE, UP, DOWN };

/* Biases of all experts [n_experts, n]. */
static void expert_bias(mr_loader *l, mr_layer *y, const char *stem, int n, int part) {
  const float *all = NULL;
  int experts = l->m->c.n_experts, f = l->m->c.d_expert;
  mr_load_vector(l, &all, stem, l->m->weights->st ? "_bias" : ".bias", experts, n, false);
  for (int e = 0; all && !l->rc && e < experts; e++) {
    const float *b = all + (size_t)e * (size_t)n;
    mr_expert *x = &y->experts[e];
    if (part == GATE)
      x->gate.bias = b;
    else if (part == UP)
      x->up.bias = b;
    else if (part == DOWN)
      x->down.bias = b;
    else {
      bool turns = l->m->c.arch.experts_alternate;
      float *own = mr_load_floats(l, (size_t)n);
      for (int i = 0; own && i < n; i++)
        own[turns ? i % 2 * f + i / 2 : i] = b[i];
      x->gate.bias = own;
      x->up.bias = own ? own + f : NULL;
    }
  }
}

static bool fused_directory(mr_loader *l, mr_layer *y) {
  const mr_config *c = &l->m->c;
  bool columns = c->arch.experts_columns, turns = c->arch.experts_alternate;
  int d = c->d_model, f = c->d_expert;
  const mr_gguf_tensor *up =
      columns ? fused(l, "ffn_gate_up_exps", d, 2 * f) : fused(l, "ffn_gate_up_exps", 2 * f, d);
  const mr_gguf_tensor *down =
      columns ? fused(l, "ffn_down_exps", f, d) : fused(l, "ffn_down_exps", d, f);
  if (!up || !down)
    return false;
  for (int e = 0; e < c->n_experts; e++) {
    mr_expert *x = &y->experts[e];
    x->gate = x->up = expert_of(up, e, f, d, columns);
    x->up.first = turns ? 1 : f;
    x->gate.group = x->up.group = turns;
    x->gate.stride = x->up.stride = turns ? 2 : 0;
    x->down = expert_of(down, e, d, f, columns);
  }
  expert_bias(l, y, "ffn_gate_up_exps", 2 * f, GATE_UP);
  expert_bias(l, y, "ffn_down_exps", d, DOWN);
  return true;
}

static bool fused_gguf(mr_loader *l, mr_layer *y) {
  const mr_config *c = &l->m->c;
  int d = c->d_model, f = c->d_expert;
  const mr_gguf_tensor *gate = fused(l, "ffn_gate_exps", f, d), *up = fused(l, "ffn_up_exps", f, d),
                       *down = fused(l, "ffn_down_exps", d, f);
  if (!gate || !up || !down)
    return false;
  for (int e = 0; e < c->n_experts; e++)
    y->experts[e] = (mr_expert){.gate = expert_of(gate, e, f, d, false),
                                .up = expert_of(up, e, f, d, false),
                                .down = expert_of(down, e, d, f, false)};
  expert_bias(l, y, "ffn_gate_exps", f, GATE);
  expert_bias(l, y, "ffn_up_exps", f, UP);
  expert_bias(l, y, "ffn_down_exps", d, DOWN);
  return true;
}

/* dbrx: matrices [experts * f, d], of which the last one is multiplied from the left. */
static bool stacked(mr_loader *l, mr_layer *y) {
  const mr_config *c = &l->m->c;
  int d = c->d_model, f = c->d_expert;
  const mr_gguf_tensor *gate = fused_as(l, "ffn_gate_rows", f, d, true),
                       *up = fused_as(l, "ffn_up_rows", f, d, true),
                       *down = fused_as(l, "ffn_down_rows", f, d, true);
  if (!gate || !up || !down)
    return false;
  for (int e = 0; e < c->n_experts; e++)
    y->experts[e] = (mr_expert){.gate = expert_of(gate, e, f, d, false),
                                .up = expert_of(up, e, f, d, false),
                                .down = expert_of(down, e, d, f, true)};
  return true;
}

void mr_load_shared(mr_loader *l, mr_matrix *gate, mr_matrix *up, mr_matrix *down, int f) {
  int d = l->m->c.d_model;
  if (mr_load_has(l, "ffn_gate_shexp")) {
    mr_load_matrix(l, gate, "ffn_gate_shexp", f, d, false);
    mr_load_matrix(l, up, "ffn_up_shexp", f, d, false);
  } else {
    mr_matrix both = {0};
    mr_load_matrix(l, &both, "ffn_up_shexp", 2 * f, d, false);
    *gate = mr_matrix_part(&both, 0, f);
    *up = mr_matrix_part(&both, f, f);
  }
  mr_load_matrix(l, down, "ffn_down_shexp", d, f, false);
}

void mr_load_experts(mr_loader *l, mr_layer *y) {
  const mr_config *c = &l->m->c;
  int d = c->d_model, f = c->d_expert;
  bool dir = l->m->weights->st != NULL;
  y->up.dtype = y->down.dtype = -1;
  mr_load_matrix(l, &y->router, "ffn_gate_inp", c->n_experts, d, false);
  mr_load_vector(l, &y->route_bias, "exp_probs_b", dir ? "_bias" : ".bias", 1, c->n_experts, false);
  y->experts = mr_mem_alloc((size_t)mr_layer_experts(l->m), sizeof *y->experts);
  if (!y->experts)
    FAIL(l, MR_E_NOMEM, "no memory for %d experts", c->n_experts);
  if (l->rc)
    return;
  if (!(dir ? fused_directory(l, y) || stacked(l, y) : fused_gguf(l, y)))
    for (int e = 0; e < c->n_experts && !l->rc; e++) {
      l->item = e;
      mr_load_matrix(l, &y->experts[e].gate, "ffn_gate_exp", f, d, false);
      mr_load_matrix(l, &y->experts[e].up, "ffn_up_exp", f, d, false);
      mr_load_matrix(l, &y->experts[e].down, "ffn_down_exp", d, f, false);
    }
  if (c->d_shared > 0) {
    mr_expert *x = &y->experts[c->n_experts];
    mr_load_shared(l, &x->gate, &x->up, &x->down, c->d_shared);
    mr_load_vector(l, &y->shared_gate, "ffn_gate_inp_shexp", ".weight", 1, d, false);
  }
}

/* ------------------------------------------------------------------ latent attention */

/* W of the query or the output, joined with its half of kv_b. */
static void joined(mr_loader *l, mr_matrix *out, mr_product_kind kind, const mr_matrix *w,
                   const mr_matrix *kv_b) {
  const mr_config *c = &l->m->c;
  int width = c->n_heads * c->head_dim;
  mr_product *p = mr_load_product(l);
  if (p && (kv_b->bias || (kind == MR_PRODUCT_QUERY && w->bias)))
    FAIL(l, MR_E_DATA, "layer %d: biases of queries and of kv_b are not supported", l->layer);
  if (l->rc)
    return;
  *p = (mr_product){.kind = kind, .w = *w, .kv_b = *kv_b};
  p->nope = c->nope_dims;
  p->rope = c->rope_dims;
  p->v = c->v_dims;
  p->latent = c->kv_lora;
  *out = kind == MR_PRODUCT_QUERY ? mr_product_matrix(p, width, w->k)
                                  : mr_product_matrix(p, w->n, width);
  out->bias = w->bias;
}

void mr_load_latent(mr_loader *l, mr_layer *y) {
  const mr_config *c = &l->m->c;
  int d = c->d_model, h = c->n_heads, in = c->q_lora ? c->q_lora : d;
  mr_matrix q = {0}, o = {0}, kv_b = {0};
  y->v.dtype = -1;
  if (c->q_lora) {
    mr_load_matrix(l, &y->q_a, "attn_q_a", c->q_lora, d, false);
    mr_load_vector(l, &y->q_a_norm, "attn_q_a_norm", ".weight", 1, c->q_lora, true);
  }
  mr_load_matrix(l, &q, c->q_lora ? "attn_q_b" : "attn_q", h * (c->nope_dims + c->rope_dims), in,
                 false);
  mr_load_matrix(l, &y->k, "attn_kv_a_mqa", c->head_dim, d, false);
  mr_load_vector(l, &y->kv_a_norm, "attn_kv_a_norm", ".weight", 1, c->kv_lora, true);
  mr_load_matrix(l, &kv_b, "attn_kv_b", h * (c->nope_dims + c->v_dims), c->kv_lora, false);
  mr_load_matrix(l, &o, "attn_output", d, h * c->v_dims, false);
  joined(l, &y->q, MR_PRODUCT_QUERY, &q, &kv_b);
  joined(l, &y->o, MR_PRODUCT_OUTPUT, &o, &kv_b);
}
