#include "src/forward.h"

#include <math.h>
#include <string.h>

#include "io/mem.h"
#include "src/lora.h"

struct mr_forward {
  const mr_model *m;
  mr_backend *dev;
  int max_tokens, max_logits;
  mr_buf *x; /* [T, d_model] residual stream */
  mr_buf *t; /* [T, d_model] a branch that is normed or scaled before it joins x; or NULL */
  mr_buf *q, *k, *v, *a;  /* [T, heads*head_dim]; a: attention's output */
  mr_buf *gate, *up;      /* [T, d_ff]; gate NULL where the MLP has none */
  mr_buf *low;            /* [T, q_lora] queries before their second matrix, or NULL */
  mr_buf *scores;         /* [T, n_experts] of the router, or NULL */
  mr_buf *logits;         /* [max_logits, n_vocab] */
  int32_t *wanted;        /* [max_logits] rows of the step */
  float *slopes;          /* [n_heads], or NULL */
  const mr_gpu_ask *asks; /* of the next step, or NULL; borrowed */
};

/* ------------------------------------------------------------------ open and close */

static bool fits(const mr_matrix *w, int n, int k) {
  return w->n == n && w->k == k && w->dtype >= 0;
}

static bool all_packed(const mr_model *m) {
  for (int i = 0; i < m->c.n_layers; i++)
    for (int j = 0; j < mr_layer_matrices(m, &m->layers[i]); j++) {
      const mr_matrix *w = mr_layer_matrix(&m->layers[i], j);
      if (w->n > 0 && !w->packed)
        return false;
    }
  return m->head.packed;
}

static bool experts_fit(const mr_model *m, const mr_layer *l) {
  int d = m->c.d_model;
  bool ok = fits(&l->router, m->c.n_experts, d);
  for (int e = 0; ok && e < mr_layer_experts(m); e++) {
    int f = e < m->c.n_experts ? m->c.d_expert : m->c.d_shared;
    const mr_expert *x = &l->experts[e];
    ok = fits(&x->gate, f, d) && fits(&x->up, f, d) && fits(&x->down, d, f);
  }
  return ok;
}

static bool layer_fits(const mr_model *m, const mr_layer *l) {
  const mr_config *c = &m->c;
  int q = c->n_heads * c->head_dim, kv = c->n_kv_heads * c->head_dim, d = c->d_model;
  bool attn = fits(&l->q, q, c->q_lora ? c->q_lora : d) && fits(&l->k, kv, d) &&
              (c->arch.mla || fits(&l->v, kv, d)) && fits(&l->o, d, q) &&
              (!c->q_lora || fits(&l->q_a, c->q_lora, d));
  if (!attn || l->experts)
    return attn && experts_fit(m, l);
  return (!c->arch.gated || fits(&l->gate, c->d_ff, d)) && fits(&l->up, c->d_ff, d) &&
         fits(&l->down, d, c->d_ff);
}

static mr_code check_model(const mr_model *m, mr_err *err) {
  const mr_config *c = &m->c;
  if (c->head_dim_v && c->head_dim_v != c->head_dim)
    return mr_err_set(err, MR_E_UNAVAILABLE,
                      "keys of %d and values of %d a head cannot be run: they must be equal",
                      c->head_dim, c->head_dim_v);
  if (c->arch.parallel && c->n_experts > 0 && (c->arch.post_norms || c->residual_scale != 1))
    return mr_err_set(err, MR_E_UNAVAILABLE, /* both branches would need the room of one */
                      "experts beside attention cannot be run with norms or factors after them");
  bool ok = c->n_kv_heads > 0 && c->n_heads % c->n_kv_heads == 0 &&
            fits(&m->head, c->n_vocab, c->d_model);
  for (int i = 0; ok && i < c->n_layers; i++)
    ok = layer_fits(m, &m->layers[i]);
  return ok ? MR_OK : mr_err_set(err, MR_E_INTERNAL, "the model's matrices do not fit together");
}

/* ALiBi (Press et al. 2022): a geometric series over the heads; those beyond a power of two take
 * odd steps of the series for twice as many. */
static bool make_slopes(mr_forward *f) {
  const mr_config *c = &f->m->c;
  if (!c->arch.alibi)
    return true;
  f->slopes = mr_mem_alloc((size_t)c->n_heads, sizeof *f->slopes);
  if (!f->slopes)
    return false;
  int pow2 = 1;
  while (pow2 * 2 <= c->n_heads)
    pow2 *= 2;
  for (int h = 0; h < c->n_heads; h++) {
    double step = h < pow2 ? h + 1 : h - pow2 + 0.5;
    f->slopes[h] = (float)pow(2, -(double)c->alibi_max_bias * step / pow2);
    if (c->alibi_scaled)
      f->slopes[h] *= c->attn_scale;
  }
  return true;
}

#define BUFFERS 10 /* of max_tokens rows */

typedef struct want {
  mr_buf **buf;
  bool needed;
  int cols;
} want;

static void list_buffers(mr_forward *f, const mr_model *m, want *all) {
  const mr_config *c = &m->c;
  int q = c->n_heads * c->head_dim, kv = c->n_kv_heads * c->head_dim;
  bool branch = c->arch.post_norms || c->residual_scale != 1 || c->n_experts > 0;
  const want list[BUFFERS] = {{&f->x, true, c->d_model},
                              {&f->t, branch, c->d_model},
                              {&f->q, true, q},
                              {&f->k, true, kv},
                              {&f->v, !c->arch.mla, kv},
                              {&f->low, c->q_lora > 0, c->q_lora},
                              {&f->scores, c->n_experts > 0, c->n_experts},
                              {&f->a, true, q},
                              {&f->gate, c->arch.gated, c->d_ff},
                              {&f->up, true, c->d_ff}};
  memcpy(all, list, sizeof list);
}

size_t mr_forward_columns(const mr_model *m) {
  mr_forward f;
  want all[BUFFERS];
  size_t n = 0;
  list_buffers(&f, m, all);
  for (int i = 0; i < BUFFERS; i++)
    if (all[i].needed)
      n += ((size_t)all[i].cols + 15) & ~(size_t)15;
  return n;
}

static bool take_buffers(mr_forward *f) {
  want all[BUFFERS];
  list_buffers(f, f->m, all);
  for (int i = 0; i < BUFFERS; i++)
    if (all[i].needed && !(*all[i].buf = f->dev->ops->buf_new(f->dev, f->max_tokens, all[i].cols)))
      return false;
  f->logits = f->dev->ops->buf_new(f->dev, f->max_logits, f->m->c.n_vocab);
  f->wanted = mr_mem_alloc((size_t)f->max_logits, sizeof *f->wanted);
  return f->logits && f->wanted && make_slopes(f);
}

static mr_code new_forward(mr_forward **out, const mr_model *m, int max_tokens, int max_logits,
                           mr_err *err) {
  mr_code rc = check_model(m, err);
  if (rc)
    return rc;
  mr_forward *f = mr_mem_alloc(1, sizeof *f);
  if (!f)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for the forward pass");
  f->m = m;
  f->max_tokens = max_tokens;
  f->max_logits = max_logits;
  *out = f;
  return MR_OK;
}

/* rc: of opening f->dev. */
static mr_code finish_open(mr_forward **out, mr_forward *f, mr_code rc, mr_err *err) {
  if (!rc && !take_buffers(f))
    rc = mr_err_set(err, MR_E_NOMEM, "out of memory for steps of %d tokens and %d rows of logits",
                    f->max_tokens, f->max_logits);
  if (rc) {
    mr_forward_close(f);
    return rc;
  }
  *out = f;
  return MR_OK;
}

mr_code mr_forward_open(mr_forward **out, const mr_model *m, const mr_kernels *k, mr_pool *pool,
                        mr_kv *kv, int max_tokens, int max_logits, mr_err *err) {
  mr_forward *f;
  if (!all_packed(m))
    return mr_err_set(err, MR_E_INTERNAL, "the model's matrices are not packed");
  mr_code rc = new_forward(&f, m, max_tokens, max_logits, err);
  if (rc)
    return rc;
  rc = mr_backend_cpu_open(&f->dev, m, k, pool, kv, max_tokens, max_logits, err);
  return finish_open(out, f, rc, err);
}

mr_code mr_forward_open_gpu(mr_forward **out, const mr_model *m, mr_device *dev, mr_kv *kv,
                            mr_gpu_scheme scheme, int streamed, int max_tokens, int max_logits,
                            mr_err *err) {
  mr_forward *f;
  mr_code rc = new_forward(&f, m, max_tokens, max_logits, err);
  if (rc)
    return rc;
  rc = mr_backend_gpu_open(&f->dev, m, dev, kv, scheme, streamed, max_tokens, max_logits, err);
  return finish_open(out, f, rc, err);
}

void mr_forward_close(mr_forward *f) {
  if (!f)
    return;
  mr_buf *all[] = {f->x,    f->t,  f->q,   f->k,      f->v,     f->a,
                   f->gate, f->up, f->low, f->scores, f->logits};
  for (size_t i = 0; f->dev && i < sizeof all / sizeof *all; i++)
    f->dev->ops->buf_free(f->dev, all[i]);
  if (f->dev)
    f->dev->ops->close(f->dev);
  mr_mem_free(f->wanted);
  mr_mem_free(f->slopes);
  mr_mem_free(f);
}

void mr_forward_tap(mr_forward *f, const mr_tap *tap) {
  f->dev->tap = tap;
}

/* ------------------------------------------------------------------ checks of a step */

/* Nothing that a device indexes with may lie outside: positions, pages, token ids. */
static mr_code check_run(const mr_forward *f, const mr_run *r, int at, mr_err *err) {
  if (r->n < 1 || !r->seq || !r->tokens)
    return mr_err_set(err, MR_E_INTERNAL, "run %d of the step is empty", at);
  if (r->seq->len < 0 || r->n > f->m->c.context - r->seq->len)
    return mr_err_set(
        err, MR_E_INTERNAL,
        "run %d of the step goes from position %d over %d tokens, past the context of %d", at,
        r->seq->len, r->n, f->m->c.context);
  if ((int64_t)r->seq->len + r->n > (int64_t)r->seq->n_blocks * MR_KV_BLOCK ||
      r->seq->first > r->seq->len)
    return mr_err_set(err, MR_E_INTERNAL, "run %d of the step has no room reserved for %d tokens",
                      at, r->n);
  if (r->adapter < 0 || r->adapter > (f->m->lora ? f->m->lora->n : 0))
    return mr_err_set(err, MR_E_INTERNAL, "run %d of the step names adapter %d of %d", at,
                      r->adapter, f->m->lora ? f->m->lora->n : 0);
  for (int i = 0; i < r->n; i++)
    if (r->tokens[i] < 0 || r->tokens[i] >= f->m->c.n_vocab)
      return mr_err_set(err, MR_E_DATA, "token id %d is outside the vocabulary of %d",
                        (int)r->tokens[i], f->m->c.n_vocab);
  return MR_OK;
}

static bool wants(const mr_run *r, int i) {
  return !r->no_logits && (r->want ? r->want[i] != 0 : i == r->n - 1);
}

static mr_code make_batch(mr_forward *f, const mr_run *runs, int n_runs, mr_batch *b, mr_err *err) {
  *b = (mr_batch){.runs = runs, .n_runs = n_runs, .wanted = f->wanted, .asks = f->asks};
  f->asks = NULL;
  for (int r = 0; r < n_runs; r++) {
    mr_code rc = check_run(f, &runs[r], r, err);
    if (rc)
      return rc;
    if (runs[r].n > f->max_tokens - b->n_tokens)
      return mr_err_set(err, MR_E_INTERNAL, "the step has more than %d tokens", f->max_tokens);
    for (int i = 0; i < runs[r].n; i++) {
      if (!wants(&runs[r], i))
        continue;
      if (b->n_wanted == f->max_logits)
        return mr_err_set(err, MR_E_INTERNAL, "the step wants more than %d rows of logits",
                          f->max_logits);
      f->wanted[b->n_wanted++] = b->n_tokens + i;
    }
    b->n_tokens += runs[r].n;
  }
  return b->n_tokens ? MR_OK : mr_err_set(err, MR_E_INTERNAL, "the step is empty");
}

/* ------------------------------------------------------------------ the layers */

static mr_norm_spec norm_of(const mr_config *c, const float *w, const float *b) {
  return (mr_norm_spec){.kind = c->arch.norm, .w = w, .b = b, .eps = c->eps};
}

/* The norm before a branch. A parallel block may have one norm for both branches. */
static mr_norm_spec pre_norm(const mr_config *c, const float *w, const float *b) {
  return c->arch.pre_norms ? norm_of(c, w, b) : (mr_norm_spec){.kind = MR_NORM_NONE};
}

/* x += scale * post_norm(t). */
static void join_branch(mr_forward *f, const float *post_norm) {
  const mr_config *c = &f->m->c;
  mr_norm_spec norm =
      c->arch.post_norms ? norm_of(c, post_norm, NULL) : (mr_norm_spec){.kind = MR_NORM_NONE};
  f->dev->ops->add(f->dev, f->x, f->t, &norm, c->residual_scale);
}

/* x += scale * post_norm(W f(in)): fused where there is neither norm nor scale. */
static void join(mr_forward *f, mr_linear *op, const float *post_norm) {
  const mr_config *c = &f->m->c;
  bool plain = !c->arch.post_norms && c->residual_scale == 1;
  op->y[0] = plain ? f->x : f->t;
  op->accumulate = plain;
  f->dev->ops->linear(f->dev, op);
  if (!plain)
    join_branch(f, post_norm);
}

/* Norms the residual stream itself after a branch has joined it (opt). */
static void norm_stream(mr_forward *f, const float *w, const float *b) {
  mr_norm_spec norm = norm_of(&f->m->c, w, b);
  if (f->m->c.arch.norm_after)
    f->dev->ops->norm(f->dev, f->x, &norm);
}

static void qkv(mr_forward *f, const mr_layer *l) {
  mr_linear op = {.input = MR_INPUT_NORM,
                  .x = f->x,
                  .norm = pre_norm(&f->m->c, l->attn_norm, l->attn_norm_b),
                  .n = 3,
                  .w = {&l->q, &l->k, &l->v},
                  .y = {f->q, f->k, f->v}};
  if (f->m->c.arch.mla) {
    op.n = 2;
    op.w[0] = f->low ? &l->q_a : &l->q;
    op.y[0] = f->low ? f->low : f->q;
  }
  f->dev->ops->linear(f->dev, &op);
  if (!f->low)
    return;
  mr_linear second = {.input = MR_INPUT_NORM,
                      .x = f->low,
                      .norm = norm_of(&f->m->c, l->q_a_norm, NULL),
                      .n = 1,
                      .w = {&l->q},
                      .y = {f->q}};
  f->dev->ops->linear(f->dev, &second);
}

static void attend(mr_forward *f, const mr_layer *l, int layer) {
  const mr_config *c = &f->m->c;
  const mr_arch *a = &c->arch;
  bool local = c->windowed[layer];
  mr_attend op = {.layer = layer,
                  .q = f->q,
                  .k = f->k,
                  .v = a->mla ? f->k : f->v, /* latents are both keys and values */
                  .out = f->a,
                  .q_norm = l->q_norm,
                  .k_norm = a->mla ? l->kv_a_norm : l->k_norm,
                  .q_norm_b = l->q_norm_b,
                  .k_norm_b = l->k_norm_b,
                  .norm_full = a->qk_norm_full,
                  .norm_each = a->qk_norm_each,
                  .norm_layer = a->qk_norm_layer,
                  .norm_late = a->qk_norm_late,
                  .norm_bare = a->qk_norm_bare && !c->no_rope[layer],
                  .k_norm_dims = c->kv_lora,
                  .no_rope = c->no_rope[layer],
                  .local = local,
                  .window = local ? c->window : 0,
                  .chunk = local ? c->chunk : 0,
                  .slopes = f->slopes,
                  .sinks = l->sinks};
  f->dev->ops->attend(f->dev, &op);
}

static void project(mr_forward *f, const mr_layer *l) {
  mr_linear op = {.x = f->a, .n = 1, .w = {&l->o}};
  if (l->attn_sub_norm) {
    op.input = MR_INPUT_NORM;
    op.norm = norm_of(&f->m->c, l->attn_sub_norm, NULL);
  }
  join(f, &op, l->attn_post_norm);
  norm_stream(f, l->attn_norm, l->attn_norm_b);
}

static mr_norm_spec mlp_norm(const mr_forward *f, const mr_layer *l) {
  const mr_config *c = &f->m->c;
  if (c->arch.parallel && !l->ffn_norm) /* one norm for both branches */
    return pre_norm(c, l->attn_norm, l->attn_norm_b);
  return pre_norm(c, l->ffn_norm, l->ffn_norm_b);
}

static void mlp_in(mr_forward *f, const mr_layer *l) {
  mr_linear op = {.input = MR_INPUT_NORM,
                  .x = f->x,
                  .norm = mlp_norm(f, l),
                  .n = 1,
                  .w = {&l->up},
                  .y = {f->up}};
  if (l->experts) {
    op.w[0] = &l->router;
    op.y[0] = f->scores;
  } else if (f->m->c.arch.gated) {
    op.n = 2;
    op.w[1] = &l->gate;
    op.y[1] = f->gate;
  }
  f->dev->ops->linear(f->dev, &op);
}

static void mlp_out(mr_forward *f, const mr_layer *l) {
  const mr_config *c = &f->m->c;
  mr_linear op = {.input = MR_INPUT_GATE,
                  .x = c->arch.gated ? f->gate : f->up,
                  .up = c->arch.gated ? f->up : NULL,
                  .act = c->arch.act,
                  .n = 1,
                  .w = {&l->down}};
  float slopes[] = {l->xielu[0], l->xielu[1], l->xielu[2], l->xielu_eps};
  if (c->arch.xielu)
    op.xielu = slopes;
  if (l->ffn_sub_norm)
    op.norm = norm_of(c, l->ffn_sub_norm, NULL);
  else
    op.norm.kind = MR_NORM_NONE;
  join(f, &op, l->ffn_post_norm);
  norm_stream(f, l->ffn_norm, l->ffn_norm_b);
}

/* What the router or the MLP's first matrices make of x, and all that experts do: into t. */
static void enter_mlp(mr_forward *f, const mr_layer *l) {
  mr_experts op = {.layer = l, .x = f->x, .scores = f->scores, .norm = mlp_norm(f, l), .out = f->t};
  mlp_in(f, l);
  if (l->experts)
    f->dev->ops->experts(f->dev, &op);
}

static void layer(mr_forward *f, int i) {
  const mr_layer *l = &f->m->layers[i];
  qkv(f, l);
  if (f->m->c.arch.parallel) /* reads x before attention joins it */
    enter_mlp(f, l);
  attend(f, l, i);
  project(f, l);
  if (!f->m->c.arch.parallel)
    enter_mlp(f, l);
  if (l->experts)
    join_branch(f, l->ffn_post_norm);
  else
    mlp_out(f, l);
}

static void head(mr_forward *f) {
  const mr_config *c = &f->m->c;
  mr_linear op = {.input = MR_INPUT_NORM,
                  .x = f->x,
                  .norm = norm_of(c, f->m->out_norm, f->m->out_norm_b),
                  .wanted = true,
                  .n = 1,
                  .w = {&f->m->head},
                  .y = {f->logits}};
  if (c->arch.norm_after) /* the stream is normed already */
    op.norm.kind = MR_NORM_NONE;
  f->dev->ops->linear(f->dev, &op);
  f->dev->ops->finish(f->dev, f->logits, c->logit_scale, c->final_softcap);
}

mr_code mr_forward_step(mr_forward *f, const mr_run *runs, int n_runs, mr_step_stats *stats,
                        mr_err *err) {
  mr_batch batch;
  mr_code rc = make_batch(f, runs, n_runs, &batch, err);
  if (!rc)
    rc = f->dev->ops->begin(f->dev, &batch, err);
  if (rc)
    return rc;
  f->dev->ops->embed(f->dev, f->x);
  if (f->m->c.arch.embed_norm) {
    mr_norm_spec norm = norm_of(&f->m->c, f->m->embed_norm, f->m->embed_norm_b);
    f->dev->ops->norm(f->dev, f->x, &norm);
  }
  for (int i = 0; i < f->m->c.n_layers; i++)
    layer(f, i);
  head(f);
  rc = f->dev->ops->end(f->dev, err);
  if (rc)
    return rc;
  for (int r = 0; r < n_runs; r++)
    runs[r].seq->len += runs[r].n;
  if (stats)
    *stats = f->dev->stats;
  return MR_OK;
}

float *mr_forward_logits(const mr_forward *f, int i) {
  return f->dev->ops->row(f->dev, f->logits, i);
}

bool mr_forward_can_ask(const mr_forward *f) {
  return f->dev->ops->best;
}

void mr_forward_ask(mr_forward *f, const mr_gpu_ask *asks) {
  f->asks = asks;
}

const mr_gpu_best *mr_forward_best(const mr_forward *f, int i) {
  return f->dev->ops->best(f->dev, i);
}

mr_code mr_forward_fetch(mr_forward *f, const int32_t *rows, int n, mr_err *err) {
  return f->dev->ops->fetch(f->dev, f->logits, rows, n, err);
}
