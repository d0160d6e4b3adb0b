/* The forward pass over small random models held in memory: against a plain float64 pass written
 * here without batches, pages or caches, for every flag of a configuration; and, bit for bit,
 * against itself under every way of cutting the same tokens into steps. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "io/mem.h"
#include "src/forward.h"
#include "src/tune.h"

#define LAYERS 3
#define VOCAB 90
#define CONTEXT 160
#define MAX_T 192
#define N 100 /* tokens of the main sequence */
#define D_MAX 512
#define PAGES 64

/* ------------------------------------------------------------------ random models */

static uint64_t rng;

static double uniform(void) {
  rng = rng * 6364136223846793005u + 1442695040888963407u;
  return (double)(int64_t)(rng >> 11) / (double)(1ll << 52) - 1;
}

static float *floats(size_t n, double scale, double offset) {
  float *p = mr_mem_alloc(n, sizeof *p);
  assert_non_null(p);
  for (size_t i = 0; i < n; i++)
    p[i] = (float)(offset + scale * uniform());
  return p;
}

static mr_matrix matrix(int n, int k, bool bias) {
  mr_matrix w = {.n = n, .k = k, .dtype = MR_F32, .row_bytes = (uint64_t)k * 4};
  w.data = (const uint8_t *)floats((size_t)n * (size_t)k, 1.7 / sqrt(k), 0);
  w.bias = bias ? floats((size_t)n, 0.3, 0) : NULL;
  return w;
}

static void free_const(const void *p) {
  mr_mem_free((void *)(uintptr_t)p);
}

static void free_matrix(mr_matrix *w) {
  free_const(w->data);
  free_const(w->bias);
  mr_mem_free(w->packed);
}

static void make_layer(mr_layer *l, const mr_config *c) {
  const mr_arch *a = &c->arch;
  size_t d = (size_t)c->d_model, hd = (size_t)c->head_dim;
  int q = c->n_heads * c->head_dim, kv = c->n_kv_heads * c->head_dim;
  l->attn_norm = floats(d, 0.3, 1);
  l->attn_norm_b = a->norm_bias ? floats(d, 0.3, 0) : NULL;
  l->q = matrix(q, c->d_model, a->qkv_bias);
  l->k = matrix(kv, c->d_model, a->qkv_bias);
  l->v = matrix(kv, c->d_model, a->qkv_bias);
  l->o = matrix(c->d_model, q, a->out_bias);
  if (a->qk_norm || a->qk_norm_full) {
    l->q_norm = floats(a->qk_norm_full ? (size_t)q : hd, 0.3, 1);
    l->k_norm = floats(a->qk_norm_full ? (size_t)kv : hd, 0.3, 1);
  }
  l->attn_post_norm = a->post_norms ? floats(d, 0.3, 1) : NULL;
  l->ffn_norm = a->parallel ? NULL : floats(d, 0.3, 1);
  l->ffn_norm_b = a->norm_bias && !a->parallel ? floats(d, 0.3, 0) : NULL;
  l->gate = a->gated ? matrix(c->d_ff, c->d_model, a->mlp_bias) : (mr_matrix){.dtype = -1};
  l->up = matrix(c->d_ff, c->d_model, a->mlp_bias);
  l->down = matrix(c->d_model, c->d_ff, a->mlp_bias);
  l->ffn_post_norm = a->post_norms ? floats(d, 0.3, 1) : NULL;
}

static void make_model(mr_model *m, const mr_config *c) {
  rng = 12345;
  *m = (mr_model){.c = *c};
  m->embed = matrix(c->n_vocab, c->d_model, false);
  m->head = matrix(c->n_vocab, c->d_model, false);
  m->out_norm = floats((size_t)c->d_model, 0.3, 1);
  m->out_norm_b = c->arch.norm_bias ? floats((size_t)c->d_model, 0.3, 0) : NULL;
  if (c->arch.learned_positions)
    m->position_embd = floats((size_t)c->context * (size_t)c->d_model, 0.5, 0);
  m->layers = mr_mem_alloc(LAYERS, sizeof *m->layers);
  assert_non_null(m->layers);
  for (int i = 0; i < LAYERS; i++)
    make_layer(&m->layers[i], c);
}

static void free_model(mr_model *m) {
  free_matrix(&m->embed);
  free_matrix(&m->head);
  free_const(m->out_norm);
  free_const(m->out_norm_b);
  free_const(m->rope_freqs);
  free_const(m->position_embd);
  for (int i = 0; i < LAYERS; i++) {
    mr_layer *l = &m->layers[i];
    mr_matrix *w[] = {&l->q, &l->k, &l->v, &l->o, &l->gate, &l->up, &l->down};
    const float *v[] = {l->attn_norm,      l->attn_norm_b, l->q_norm,     l->k_norm,
                        l->attn_post_norm, l->ffn_norm,    l->ffn_norm_b, l->ffn_post_norm};
    for (size_t j = 0; j < sizeof w / sizeof *w; j++)
      free_matrix(w[j]);
    for (size_t j = 0; j < sizeof v / sizeof *v; j++)
      free_const(v[j]);
  }
  mr_mem_free(m->layers);
}

static void pack_matrix(mr_matrix *w, const mr_kernels *k, mr_scheme scheme) {
  const mr_gemm_ops *g = &k->gemm[scheme];
  if (w->dtype < 0)
    return;
  mr_mem_free(w->packed);
  int panels = (w->n + g->nr - 1) / g->nr;
  size_t bytes = g->panel_bytes(w->k);
  w->scheme = scheme;
  w->packed = mr_mem_pages((size_t)panels * bytes);
  assert_non_null(w->packed);
  for (int p = 0; p < panels; p++) {
    int cols = w->n - p * g->nr < g->nr ? w->n - p * g->nr : g->nr;
    g->pack_panel(w->packed + (size_t)p * bytes,
                  (const float *)(const void *)w->data + (size_t)p * (size_t)g->nr * (size_t)w->k,
                  (size_t)w->k, cols, w->k);
  }
}

static void pack_model(mr_model *m, const mr_kernels *k, mr_scheme scheme) {
  pack_matrix(&m->head, k, scheme);
  for (int i = 0; i < LAYERS; i++) {
    mr_layer *l = &m->layers[i];
    mr_matrix *w[] = {&l->q, &l->k, &l->v, &l->o, &l->gate, &l->up, &l->down};
    for (size_t j = 0; j < sizeof w / sizeof *w; j++)
      pack_matrix(w[j], k, scheme);
  }
}

static mr_config llama(void) {
  return (mr_config){.arch = {.norm = MR_NORM_RMS,
                              .rope = MR_ROPE_INTERLEAVED,
                              .act = MR_ACT_SILU,
                              .gated = true,
                              .pre_norms = true},
                     .n_layers = LAYERS,
                     .d_model = 96,
                     .n_heads = 6,
                     .n_kv_heads = 2,
                     .head_dim = 16,
                     .head_dim_v = 16,
                     .d_ff = 200,
                     .n_vocab = VOCAB,
                     .context = CONTEXT,
                     .eps = 1e-5f,
                     .attn_scale = 0.25f,
                     .rope_dims = 16,
                     .rope_base = 1000,
                     .rope_factor = 1,
                     .embed_scale = 1,
                     .residual_scale = 1,
                     .logit_scale = 1};
}

/* With heads of 32, and a window in layer 1. */
static mr_config windowed_llama(void) {
  mr_config c = llama();
  c.window = 40;
  c.windowed[1] = 1;
  c.d_model = 192;
  c.head_dim = c.head_dim_v = c.rope_dims = 32;
  return c;
}

/* ------------------------------------------------------------------ the plain pass, float64 */

static void plain_norm(double *y, const double *x, const float *w, const float *b, int n,
                       mr_norm kind, double eps) {
  double mean = 0, sq = 0;
  for (int i = 0; i < n && kind == MR_NORM_LAYER; i++)
    mean += x[i] / n;
  for (int i = 0; i < n; i++)
    sq += (x[i] - mean) * (x[i] - mean);
  for (int i = 0; i < n; i++)
    y[i] = (x[i] - mean) / sqrt(sq / n + eps) * (w ? w[i] : 1) + (b ? b[i] : 0);
}

static void plain_linear(double *y, const mr_matrix *w, const double *x) {
  const float *row = (const float *)(const void *)w->data;
  for (int n = 0; n < w->n; n++, row += w->k) {
    y[n] = w->bias ? w->bias[n] : 0;
    for (int k = 0; k < w->k; k++)
      y[n] += row[k] * x[k];
  }
}

static double plain_act(double x, mr_act act) {
  switch (act) {
  case MR_ACT_SILU:
    return x / (1 + exp(-x));
  case MR_ACT_GELU:
    return 0.5 * x * (1 + erf(x / sqrt(2)));
  case MR_ACT_GELU_TANH:
    return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
  case MR_ACT_RELU:
    return x > 0 ? x : 0;
  case MR_ACT_RELU2:
    return x > 0 ? x * x : 0;
  default:
    return x / (1 + exp(-1.702 * x));
  }
}

static void plain_rope(double *x, const mr_config *c, const float *factors, bool local, int pos) {
  if (c->arch.rope == MR_ROPE_NONE)
    return;
  bool own = local && c->rope_base_local > 0;
  double base = own ? c->rope_base_local : c->rope_base;
  for (int i = 0; i < c->rope_dims / 2; i++) {
    double angle = pos * pow(base, -2.0 * i / c->rope_dims);
    if (!own && c->rope_scaling == MR_SCALING_LINEAR)
      angle /= c->rope_factor;
    if (!own && factors)
      angle /= factors[i];
    bool pairs = c->arch.rope == MR_ROPE_INTERLEAVED;
    double *a = &x[pairs ? 2 * i : i], *b = &x[pairs ? 2 * i + 1 : i + c->rope_dims / 2];
    double re = *a * cos(angle) - *b * sin(angle), im = *a * sin(angle) + *b * cos(angle);
    *a = re;
    *b = im;
  }
}

static double plain_slope(const mr_config *c, int h) { /* 6 heads: 4 of the series of 4, 2 of that
                                                          of 8 */
  static const double exponent[] = {1, 2, 3, 4, 0.5, 1.5};
  return pow(2, -c->alibi_max_bias * exponent[h] / 4);
}

typedef struct plain { /* K and V of one layer over all positions */
  double k[N][D_MAX], v[N][D_MAX];
} plain;

static void plain_attend(double *out, const double *q, const plain *p, const mr_config *c,
                         bool local, int pos) {
  int hd = c->head_dim;
  for (int h = 0; h < c->n_heads; h++) {
    int kv = h / (c->n_heads / c->n_kv_heads) * hd;
    double e[N], sum = 0, *o = out + h * hd;
    for (int j = 0; j <= pos; j++) {
      double s = 0;
      for (int i = 0; i < hd; i++)
        s += q[h * hd + i] * p->k[j][kv + i];
      s *= c->attn_scale;
      if (c->attn_softcap > 0)
        s = c->attn_softcap * tanh(s / c->attn_softcap);
      if (c->arch.alibi)
        s += plain_slope(c, h) * (j - pos);
      e[j] = local && pos - j >= c->window ? 0 : exp(s);
      sum += e[j];
    }
    for (int i = 0; i < hd; i++) {
      o[i] = 0;
      for (int j = 0; j <= pos; j++)
        o[i] += e[j] / sum * p->v[j][kv + i];
    }
  }
}

static void plain_join(double *x, double *t, const float *post_norm, const mr_config *c) {
  if (c->arch.post_norms)
    plain_norm(t, t, post_norm, NULL, c->d_model, c->arch.norm, c->eps);
  for (int i = 0; i < c->d_model; i++)
    x[i] += c->residual_scale * t[i];
}

static void plain_pre(double *y, const double *x, const float *w, const float *b,
                      const mr_config *c) {
  if (c->arch.pre_norms)
    plain_norm(y, x, w, b, c->d_model, c->arch.norm, c->eps);
  else
    memcpy(y, x, (size_t)c->d_model * sizeof *y);
}

static void plain_heads(double *x, const float *norm, int heads, const mr_model *m, bool local,
                        int pos) {
  const mr_config *c = &m->c;
  if (norm && c->arch.qk_norm_full)
    plain_norm(x, x, norm, NULL, heads * c->head_dim, MR_NORM_RMS, c->eps);
  for (int h = 0; h < heads; h++) {
    if (norm && !c->arch.qk_norm_full)
      plain_norm(x + h * c->head_dim, x + h * c->head_dim, norm, NULL, c->head_dim, MR_NORM_RMS,
                 c->eps);
    plain_rope(x + h * c->head_dim, c, m->rope_freqs, local, pos);
  }
}

static void plain_mlp(double *t, const mr_layer *l, const double *h, const mr_config *c) {
  double gate[D_MAX], up[D_MAX];
  plain_linear(up, &l->up, h);
  if (c->arch.gated)
    plain_linear(gate, &l->gate, h);
  for (int i = 0; i < c->d_ff; i++)
    up[i] = c->arch.gated ? plain_act(gate[i], c->arch.act) * up[i] : plain_act(up[i], c->arch.act);
  plain_linear(t, &l->down, up);
}

static void plain_layer(double *x, const mr_model *m, int at, plain *p, int pos) {
  const mr_config *c = &m->c;
  const mr_layer *l = &m->layers[at];
  bool local = c->window > 0 && c->windowed[at];
  double h[D_MAX], q[D_MAX], a[D_MAX], t[D_MAX], mlp[D_MAX];
  plain_pre(h, x, l->attn_norm, l->attn_norm_b, c);
  if (c->arch.parallel)
    plain_mlp(mlp, l, h, c);
  plain_linear(q, &l->q, h);
  plain_linear(p->k[pos], &l->k, h);
  plain_linear(p->v[pos], &l->v, h);
  plain_heads(q, l->q_norm, c->n_heads, m, local, pos);
  plain_heads(p->k[pos], l->k_norm, c->n_kv_heads, m, local, pos);
  plain_attend(a, q, p, c, local, pos);
  plain_linear(t, &l->o, a);
  plain_join(x, t, l->attn_post_norm, c);
  if (!c->arch.parallel) {
    plain_pre(h, x, l->ffn_norm, l->ffn_norm_b, c);
    plain_mlp(mlp, l, h, c);
  }
  plain_join(x, mlp, l->ffn_post_norm, c);
}

static void plain_forward(const mr_model *m, const int32_t *tokens, int n,
                          double *logits /* [n, VOCAB] */) {
  const mr_config *c = &m->c;
  static plain cache[LAYERS];
  for (int pos = 0; pos < n; pos++) {
    double x[D_MAX], *out = logits + (size_t)pos * VOCAB;
    const float *e =
        (const float *)(const void *)(m->embed.data + (uint64_t)tokens[pos] * m->embed.row_bytes);
    for (int i = 0; i < c->d_model; i++)
      x[i] =
          e[i] * c->embed_scale + (m->position_embd ? m->position_embd[pos * c->d_model + i] : 0);
    for (int l = 0; l < LAYERS; l++)
      plain_layer(x, m, l, &cache[l], pos);
    plain_norm(x, x, m->out_norm, m->out_norm_b, c->d_model, c->arch.norm, c->eps);
    plain_linear(out, &m->head, x);
    for (int i = 0; i < VOCAB; i++) {
      out[i] *= c->logit_scale;
      if (c->final_softcap > 0)
        out[i] = c->final_softcap * tanh(out[i] / c->final_softcap);
    }
  }
}

/* ------------------------------------------------------------------ running the real one */

typedef struct rig {
  mr_pool *pool;
  mr_kv *kv;
  mr_forward *f;
} rig;

static rig rig_open(const mr_model *m, const mr_kernels *k, mr_kv_type type, int threads) {
  mr_err err = MR_ERR_INIT;
  rig r = {.pool = mr_pool_new(threads, 0)};
  int pages = PAGES * mr_kv_groups_of(&m->c, type).n;
  assert_non_null(r.pool);
  assert_int_equal(mr_kv_open(&r.kv, &m->c, type, pages, &err), MR_OK);
  /* stale numbers in a page must not matter, not even NaN */
  memset(mr_kv_page(r.kv, 0), 0xff, (size_t)pages * mr_kv_page_bytes(&m->c, type));
  assert_int_equal(mr_forward_open(&r.f, m, k, r.pool, r.kv, MAX_T, MAX_T, &err), MR_OK);
  return r;
}

static void rig_close(rig *r) {
  mr_forward_close(r->f);
  mr_kv_close(r->kv);
  mr_pool_free(r->pool);
}

static const uint8_t all_wanted[MAX_T] = {[0 ... MAX_T - 1] = 1};

static void make_tokens(int32_t *tokens, int n, int seed) {
  for (int i = 0; i < n; i++)
    tokens[i] = (i * 37 + i / 7 * 11 + seed * 13) % VOCAB;
}

typedef struct stream { /* a sequence on its way through the model */
  mr_kv_seq seq;
  int32_t tokens[N];
  int n, chunk, done;
} stream;

static void stream_open(const rig *r, stream *s, int n, int chunk, int seed) {
  mr_err err = MR_ERR_INIT;
  *s = (stream){.n = n, .chunk = chunk};
  assert_int_equal(mr_kv_seq_init(r->kv, &s->seq, CONTEXT, &err), MR_OK);
  make_tokens(s->tokens, n, seed);
}

/* One chunk of each stream that has tokens left; logits of the first stream go to out [N, VOCAB].
 */
static bool one_step(rig *r, stream *s, int n, float *out) {
  mr_err err = MR_ERR_INIT;
  mr_run runs[8];
  int n_runs = 0, row = -1, first = s[0].done, count = 0, rows = 0;
  for (int i = n - 1; i >= 0; i--) {
    int len = s[i].n - s[i].done < s[i].chunk ? s[i].n - s[i].done : s[i].chunk;
    if (len == 0)
      continue;
    assert_int_equal(mr_kv_seq_reserve(r->kv, &s[i].seq, len), MR_OK);
    runs[n_runs++] = (mr_run){.seq = &s[i].seq,
                              .tokens = s[i].tokens + s[i].done,
                              .n = len,
                              .want = i == 0 ? all_wanted : NULL,
                              .no_logits = i == 2};
    if (i == 0) {
      row = rows;
      count = len;
    }
    rows += i != 2;
    s[i].done += len;
  }
  if (n_runs == 0)
    return false;
  assert_int_equal(mr_forward_step(r->f, runs, n_runs, NULL, &err), MR_OK);
  for (int i = 0; i < count; i++)
    memcpy(out + (size_t)(first + i) * VOCAB, mr_forward_logits(r->f, row + i),
           VOCAB * sizeof(float));
  return true;
}

static void run_streams(rig *r, stream *s, int n, float *out) {
  while (one_step(r, s, n, out))
    continue;
  for (int i = 0; i < n; i++) {
    assert_int_equal(s[i].seq.len, s[i].n);
    mr_kv_seq_free(r->kv, &s[i].seq);
  }
}

static void run_chunks(rig *r, int chunk, float *out) {
  stream s;
  stream_open(r, &s, N, chunk, 0);
  run_streams(r, &s, 1, out);
}

/* ------------------------------------------------------------------ tests */

static float got[N * VOCAB], want[N * VOCAB];
static double exact[N * VOCAB];

static double spread(const double *x, int n) {
  double mean = 0, sq = 0;
  for (int i = 0; i < n; i++)
    mean += x[i] / n;
  for (int i = 0; i < n; i++)
    sq += (x[i] - mean) * (x[i] - mean) / n;
  return sqrt(sq);
}

/* Largest difference over the spread of the logits. */
static double distance(void) {
  double worst = 0;
  for (int i = 0; i < N * VOCAB; i++)
    worst = fmax(worst, isfinite(got[i]) ? fabs(got[i] - exact[i]) : INFINITY);
  return worst / spread(exact, N * VOCAB);
}

static void check_config(const mr_config *c, const float *factors, const char *what) {
  mr_model m;
  int32_t tokens[N];
  make_model(&m, c);
  if (factors) {
    m.rope_freqs = floats((size_t)c->rope_dims / 2, 0, 0);
    memcpy((float *)(uintptr_t)m.rope_freqs, factors, (size_t)c->rope_dims / 2 * sizeof *factors);
  }
  make_tokens(tokens, N, 0);
  plain_forward(&m, tokens, N, exact);
  for (const char *const *name = mr_kernels_names(); *name; name++) {
    const mr_kernels *k = mr_kernels_get(*name);
    pack_model(&m, k, MR_SCHEME_F32);
    rig r = rig_open(&m, k, MR_KV_F32, 2);
    run_chunks(&r, 23, got);
    if (distance() > 2e-5)
      fail_msg("%s with %s kernels: off by %g of the spread", what, *name, distance());
    rig_close(&r);
  }
  free_model(&m);
}

static void plain_llama(void **state) {
  (void)state;
  mr_config c = llama();
  check_config(&c, NULL, "llama");
  c.arch.qkv_bias = c.arch.out_bias = c.arch.mlp_bias = true;
  c.arch.rope = MR_ROPE_NEOX;
  c.rope_dims = 8; /* partial */
  c.rope_scaling = MR_SCALING_LINEAR;
  c.rope_factor = 4;
  check_config(&c, NULL, "biases, partial and linearly scaled rope");
  const float factors[] = {1, 2, 3.5f, 8};
  c.rope_scaling = MR_SCALING_NONE;
  check_config(&c, factors, "rope factors");
}

static void gemma_like(void **state) {
  (void)state;
  mr_config c = llama();
  c.arch.rope = MR_ROPE_NEOX;
  c.arch.act = MR_ACT_GELU_TANH;
  c.arch.qk_norm = c.arch.post_norms = true;
  c.embed_scale = 9.8f;
  c.window = 20;
  c.windowed[0] = c.windowed[2] = 1;
  c.rope_base_local = 50;
  c.rope_scaling = MR_SCALING_LINEAR; /* of the global layers only */
  c.rope_factor = 8;
  c.attn_softcap = 3;
  c.final_softcap = 5;
  check_config(&c, NULL, "windows, softcaps, post norms");
}

static void other_blocks(void **state) {
  (void)state;
  mr_config c = llama();
  c.arch.norm = MR_NORM_LAYER;
  c.arch.norm_bias = c.arch.parallel = c.arch.learned_positions = true;
  c.arch.gated = false;
  c.arch.act = MR_ACT_GELU;
  c.arch.rope = MR_ROPE_NONE;
  check_config(&c, NULL, "parallel, layer norm, plain MLP, learned positions");
  c.arch.parallel = c.arch.learned_positions = false;
  c.arch.alibi = true;
  c.alibi_max_bias = 8;
  c.arch.act = MR_ACT_RELU2;
  c.n_kv_heads = 6;
  check_config(&c, NULL, "ALiBi");
  c = llama();
  c.arch.pre_norms = false;
  c.arch.post_norms = c.arch.qk_norm_full = true;
  c.n_kv_heads = 1;
  check_config(&c, NULL, "only post norms, norm over all heads, MQA");
  c = llama();
  c.residual_scale = 0.4f;
  c.logit_scale = 0.125f;
  check_config(&c, NULL, "residual and logit scale");
}

static void must_equal(const char *what, const mr_kernels *k, mr_scheme scheme, mr_kv_type type) {
  for (int i = 0; i < N; i++)
    if (memcmp(got + (size_t)i * VOCAB, want + (size_t)i * VOCAB, VOCAB * sizeof *got))
      fail_msg("%s kernels, scheme %d, kv type %d: token %d has other bits with %s", k->name,
               (int)scheme, (int)type, i, what);
}

static void check_invariance(const mr_model *m, const mr_kernels *k, mr_scheme scheme,
                             mr_kv_type type) {
  static const int chunks[] = {1, 7, 32, 33};
  rig one = rig_open(m, k, type, 1), two = rig_open(m, k, type, 2);
  memset(got, 0, sizeof got);
  run_chunks(&one, N, want);
  run_chunks(&two, N, got);
  must_equal("two threads", k, scheme, type);
  for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) {
    run_chunks(i % 2 ? &one : &two, chunks[i], got);
    must_equal("other chunks", k, scheme, type);
  }
  static stream s[4];
  for (int i = 0; i < 4; i++)
    stream_open(&two, &s[i], i == 0 ? N : 30 * i + 1, 11 + 8 * i % 17, i);
  run_streams(&two, s, 4, got);
  must_equal("neighbours", k, scheme, type);
  rig_close(&one);
  rig_close(&two);
}

static void a_row_depends_on_its_sequence_alone(void **state) {
  (void)state;
  static const mr_scheme schemes[] = {MR_SCHEME_F32, MR_SCHEME_I8, MR_SCHEME_BF16};
  static const mr_kv_type types[] = {MR_KV_F32,  MR_KV_F16, MR_KV_BF16,
                                     MR_KV_INT8, MR_KV_Q4,  MR_KV_FP8};
  mr_config c = windowed_llama();
  mr_model m;
  make_model(&m, &c);
  for (const char *const *name = mr_kernels_names(); *name; name++)
    for (int s = 0; s < 3; s++) {
      const mr_kernels *k = mr_kernels_get(*name);
      pack_model(&m, k, schemes[s]);
      for (int t = 0; t < (s == 0 ? MR_KV_TYPES : 2); t++)
        check_invariance(&m, k, schemes[s], types[t]);
    }
  free_model(&m);
}

static void fast_is_near(void **state) {
  (void)state;
  mr_config c = llama();
  c.d_model = 192;
  c.head_dim = c.head_dim_v = c.rope_dims = 32;
  mr_model m;
  int32_t tokens[N];
  make_model(&m, &c);
  make_tokens(tokens, N, 0);
  plain_forward(&m, tokens, N, exact);
  for (const char *const *name = mr_kernels_names(); *name; name++) {
    const mr_kernels *k = mr_kernels_get(*name);
    for (int s = MR_SCHEME_BF16; s <= MR_SCHEME_I8; s++) {
      pack_model(&m, k, (mr_scheme)s);
      rig r = rig_open(&m, k, MR_KV_F16, 2);
      run_chunks(&r, 50, got);
      if (distance() > (s == MR_SCHEME_I8 ? 0.15 : 0.05) || distance() < 1e-6)
        fail_msg("scheme %d with %s kernels: off by %g of the spread", s, *name, distance());
      rig_close(&r);
    }
  }
  free_model(&m);
}

/* Whatever is measured of this machine: the same bits. */
static void cut_in_either_way(void **state) {
  (void)state;
  mr_err err = MR_ERR_INIT;
  mr_config c = llama();
  mr_model m;
  make_model(&m, &c);
  const mr_kernels *k = mr_kernels_best();
  pack_model(&m, k, MR_SCHEME_I8);
  rig r = rig_open(&m, k, MR_KV_F16, 2);
  run_chunks(&r, N, want);
  mr_tuning t;
  assert_int_equal(mr_tune(&t, &m, k, r.pool, r.kv, &err), MR_OK);
  assert_true(t.took_s > 0);
  if (t.step_tokens) {
    assert_in_range(t.step_tokens, 256, 4096);
    assert_int_equal(t.step_tokens & (t.step_tokens - 1), 0);
  }
  if (t.step_tokens == 0) /* other work had the processors */
    t.n_shapes = 1, t.shapes[0] = (mr_tuned){m.layers[0].o.k, m.layers[0].o.n, 1};
  assert_in_range(t.n_shapes, 1, 4);
  assert_null(m.tuning);
  for (int own = 0; own < 2; own++) {
    for (int i = 0; i < t.n_shapes; i++) {
      assert_true(t.shapes[i].own_rows >= 1);
      t.shapes[i].own_rows = own ? 1 : MR_TUNE_NEVER;
    }
    const mr_matrix *o = &m.layers[0].o;
    assert_int_equal(mr_tuned_own_rows(&t, o->k, o->n, 7), t.shapes[0].own_rows);
    assert_int_equal(mr_tuned_own_rows(&t, o->k, o->n + 1, 7), 7);
    m.tuning = &t;
    memset(got, 0, sizeof got);
    run_chunks(&r, N, got);
    must_equal("cut in another way", k, MR_SCHEME_I8, MR_KV_F16);
  }
  rig_close(&r);
  free_model(&m);
}

/* Shared pages, a branch after the prompt, and refused drafts give what a fresh sequence gives. */
static void branches(void **state) {
  (void)state;
  mr_err err = MR_ERR_INIT;
  mr_config c = llama();
  mr_model m;
  make_model(&m, &c);
  const mr_kernels *k = mr_kernels_best();
  pack_model(&m, k, MR_SCHEME_I8);
  rig r = rig_open(&m, k, MR_KV_F16, 2);
  run_chunks(&r, N, want);
  stream s;
  mr_kv_seq b;
  stream_open(&r, &s, N, N, 0);
  assert_int_equal(mr_kv_seq_init(r.kv, &b, CONTEXT, &err), MR_OK);
  one_step(&r, &s, 1, got);
  mr_kv_seq_share(r.kv, &b, &s.seq, 50);
  int32_t wrong[] = {1, 2, 3};
  assert_int_equal(mr_kv_seq_reserve(r.kv, &b, 3), MR_OK);
  assert_int_equal(
      mr_forward_step(r.f, &(mr_run){.seq = &b, .tokens = wrong, .n = 3}, 1, NULL, &err), MR_OK);
  b.len = 50;
  assert_int_equal(mr_kv_seq_reserve(r.kv, &b, N - 50), MR_OK);
  mr_run run = {.seq = &b, .tokens = s.tokens + 50, .n = N - 50, .want = all_wanted};
  assert_int_equal(mr_forward_step(r.f, &run, 1, NULL, &err), MR_OK);
  for (int i = 50; i < N; i++)
    assert_memory_equal(mr_forward_logits(r.f, i - 50), want + (size_t)i * VOCAB,
                        VOCAB * sizeof(float));
  mr_kv_seq_free(r.kv, &s.seq);
  mr_kv_seq_free(r.kv, &b);
  assert_int_equal(mr_kv_free_pages(r.kv), mr_kv_total_pages(r.kv));
  rig_close(&r);
  free_model(&m);
}

enum { MEMBERS = 5, COMMON = 4 * 32 };

/* Sequences of COMMON tokens, then i + 1 of their own, then three more in steps of one token each;
 * logits of the last to out [MEMBERS, VOCAB]. With `share` they hold the first one's pages. Returns
 * the bytes that attention read in the last step. */
static double run_members(rig *r, bool share, float *out) {
  mr_err err = MR_ERR_INIT;
  mr_kv_seq s[MEMBERS];
  int32_t tokens[COMMON + 32], own[MEMBERS][4];
  mr_step_stats stats = {0};
  make_tokens(tokens, COMMON + 32, 3);
  for (int i = 0; i < MEMBERS; i++) {
    assert_int_equal(mr_kv_seq_init(r->kv, &s[i], CONTEXT, &err), MR_OK);
    if (share && i > 0)
      mr_kv_seq_share(r->kv, &s[i], &s[0], COMMON);
    mr_run run = {.seq = &s[i], .tokens = tokens + s[i].len, .n = COMMON + i + 1 - s[i].len};
    tokens[COMMON + i] = 7 * i + 1;
    assert_int_equal(mr_kv_seq_reserve(r->kv, &s[i], run.n), MR_OK);
    assert_int_equal(mr_forward_step(r->f, &run, 1, NULL, &err), MR_OK);
  }
  for (int step = 0; step < 3; step++) {
    mr_run runs[MEMBERS];
    for (int i = 0; i < MEMBERS; i++) { /* the batch's order is not that of the pages */
      int m = (i * 3 + 1) % MEMBERS;
      own[m][step] = 5 * m + step;
      assert_int_equal(mr_kv_seq_reserve(r->kv, &s[m], 1), MR_OK);
      runs[i] = (mr_run){.seq = &s[m], .tokens = &own[m][step], .n = 1, .want = all_wanted};
    }
    assert_int_equal(mr_forward_step(r->f, runs, MEMBERS, &stats, &err), MR_OK);
  }
  for (int i = 0; i < MEMBERS; i++)
    memcpy(out + (size_t)((i * 3 + 1) % MEMBERS) * VOCAB, mr_forward_logits(r->f, i),
           VOCAB * sizeof(float));
  for (int i = 0; i < MEMBERS; i++)
    mr_kv_seq_free(r->kv, &s[i]);
  return stats.bytes;
}

/* Attention over pages that several sequences hold is computed for all of them together, where a
 * table can: the same bits, fewer bytes. */
static void shared_pages_are_read_once(void **state) {
  (void)state;
  mr_config c = windowed_llama();
  mr_model m;
  make_model(&m, &c);
  for (const char *const *name = mr_kernels_names(); *name; name++) {
    const mr_kernels *k = mr_kernels_get(*name);
    pack_model(&m, k, MR_SCHEME_F32);
    for (mr_kv_type type = MR_KV_F32; type < MR_KV_TYPES; type++) {
      rig r = rig_open(&m, k, type, 2);
      double once = run_members(&r, true, got), each = run_members(&r, false, want);
      if (memcmp(got, want, MEMBERS * VOCAB * sizeof *got) != 0)
        fail_msg("%s kernels, kv type %d: other bits with shared pages", k->name, (int)type);
      double pages = (MEMBERS - 1) * 2 * 4 * (double)mr_kv_layer_bytes(r.kv);
      assert_true(fabs(each - once - (k->attention_shared ? pages : 0)) < 1);
      rig_close(&r);
    }
  }
  free_model(&m);
}

enum { LONG = 1500, ALONE = 3 };

/* A long sequence, its last tokens one by one. */
static void run_long(const mr_model *m, const mr_kernels *k, mr_kv_type type, int threads,
                     float *out) {
  mr_err err = MR_ERR_INIT;
  int32_t tokens[LONG];
  rig r = rig_open(m, k, type, threads);
  mr_kv_seq s;
  make_tokens(tokens, LONG, 5);
  assert_int_equal(mr_kv_seq_init(r.kv, &s, m->c.context, &err), MR_OK);
  while (s.len < LONG) {
    int left = LONG - ALONE - s.len, n = left > MAX_T ? MAX_T : left > 0 ? left : 1;
    mr_run run = {.seq = &s, .tokens = tokens + s.len, .n = n};
    assert_int_equal(mr_kv_seq_reserve(r.kv, &s, n), MR_OK);
    assert_int_equal(mr_forward_step(r.f, &run, 1, NULL, &err), MR_OK);
    if (left <= 0)
      memcpy(out + (size_t)-left * VOCAB, mr_forward_logits(r.f, 0), VOCAB * sizeof *out);
  }
  mr_kv_seq_free(r.kv, &s);
  rig_close(&r);
}

/* The keys of a token that is alone are split over three threads: the same bits as on one. */
static void split_keys(void **state) {
  (void)state;
  mr_config c = windowed_llama();
  mr_model m;
  c.context = 2000;
  make_model(&m, &c);
  for (const char *const *name = mr_kernels_names(); *name; name++) {
    const mr_kernels *k = mr_kernels_get(*name);
    pack_model(&m, k, MR_SCHEME_F32);
    for (mr_kv_type type = MR_KV_F32; type < MR_KV_TYPES && k->attention_split; type++) {
      run_long(&m, k, type, 1, want);
      run_long(&m, k, type, 3, got);
      if (memcmp(got, want, ALONE * VOCAB * sizeof *got) != 0)
        fail_msg("%s kernels, kv type %d: other bits with split keys", k->name, (int)type);
    }
  }
  free_model(&m);
}

static mr_code try_step(rig *r, mr_run run, mr_code code) {
  mr_err err = MR_ERR_INIT;
  int len = run.seq->len;
  mr_code rc = mr_forward_step(r->f, &run, 1, NULL, &err);
  assert_int_equal(rc, code);
  assert_int_equal(err.code, code);
  assert_int_equal(run.seq->len, rc ? len : len + run.n);
  return rc;
}

static void bad_steps_are_refused(void **state) {
  (void)state;
  mr_err err = MR_ERR_INIT;
  mr_config c = llama();
  mr_model m;
  make_model(&m, &c);
  const mr_kernels *k = mr_kernels_best();
  pack_model(&m, k, MR_SCHEME_F32);
  rig r = rig_open(&m, k, MR_KV_F32, 1);
  mr_kv_seq s;
  assert_int_equal(mr_kv_seq_init(r.kv, &s, 400, &err), MR_OK);
  static int32_t tokens[400];
  try_step(&r, (mr_run){.seq = &s, .tokens = tokens, .n = 1}, MR_E_INTERNAL); /* no room */
  assert_int_equal(mr_kv_seq_reserve(r.kv, &s, 300), MR_OK);
  try_step(&r, (mr_run){.seq = &s, .tokens = tokens, .n = 0}, MR_E_INTERNAL);
  try_step(&r, (mr_run){.seq = &s, .tokens = tokens, .n = CONTEXT + 1}, MR_E_INTERNAL);
  tokens[5] = VOCAB;
  try_step(&r, (mr_run){.seq = &s, .tokens = tokens, .n = 9}, MR_E_DATA);
  tokens[5] = -1;
  try_step(&r, (mr_run){.seq = &s, .tokens = tokens, .n = 9}, MR_E_DATA);
  tokens[5] = VOCAB - 1;
  int64_t live = mr_mem_live();
  mr_mem_fail_after(0); /* a step allocates nothing */
  try_step(&r, (mr_run){.seq = &s, .tokens = tokens, .n = 100}, MR_OK);
  mr_mem_fail_after(-1);
  assert_int_equal(mr_mem_live(), live);
  try_step(&r, (mr_run){.seq = &s, .tokens = tokens, .n = 61}, MR_E_INTERNAL);
  assert_int_equal(mr_forward_step(r.f, NULL, 0, NULL, &err), MR_E_INTERNAL);
  mr_kv_seq_free(r.kv, &s);
  mr_forward_close(r.f);
  assert_int_equal(mr_forward_open(&r.f, &m, k, r.pool, r.kv, 20, 4, &err), MR_OK);
  assert_int_equal(mr_kv_seq_init(r.kv, &s, 100, &err), MR_OK);
  assert_int_equal(mr_kv_seq_reserve(r.kv, &s, 40), MR_OK);
  try_step(&r, (mr_run){.seq = &s, .tokens = tokens, .n = 21}, MR_E_INTERNAL);
  try_step(&r, (mr_run){.seq = &s, .tokens = tokens, .n = 5, .want = all_wanted}, MR_E_INTERNAL);
  try_step(&r, (mr_run){.seq = &s, .tokens = tokens, .n = 20}, MR_OK);
  mr_kv_seq_free(r.kv, &s);
  rig_close(&r);
  free_model(&m);
}

static void every_allocation_may_fail(void **state) {
  (void)state;
  mr_config c = llama();
  c.arch.alibi = c.arch.post_norms = true;
  mr_model m;
  make_model(&m, &c);
  const mr_kernels *k = mr_kernels_best();
  pack_model(&m, k, MR_SCHEME_F32);
  rig r = rig_open(&m, k, MR_KV_F32, 1);
  int64_t live = mr_mem_live();
  mr_code rc = MR_E_NOMEM;
  for (int n = 0; rc != MR_OK; n++) {
    mr_err err = MR_ERR_INIT;
    mr_forward *f = NULL;
    mr_mem_fail_after(n);
    rc = mr_forward_open(&f, &m, k, r.pool, r.kv, 8, 2, &err);
    mr_mem_fail_after(-1);
    assert_true(rc == MR_OK || rc == MR_E_NOMEM);
    assert_true(n < 100);
    mr_forward_close(f);
    assert_int_equal(mr_mem_live(), live);
  }
  rig_close(&r);
  free_model(&m);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(plain_llama),
      cmocka_unit_test(gemma_like),
      cmocka_unit_test(other_blocks),
      cmocka_unit_test(a_row_depends_on_its_sequence_alone),
      cmocka_unit_test(fast_is_near),
      cmocka_unit_test(cut_in_either_way),
      cmocka_unit_test(branches),
      cmocka_unit_test(shared_pages_are_read_once),
      cmocka_unit_test(split_keys),
      cmocka_unit_test(bad_steps_are_refused),
      cmocka_unit_test(every_allocation_may_fail),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
