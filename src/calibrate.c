#include "src/calibrate.h"

#include <math.h>
#include <string.h>

#include "io/mem.h"
#include "src/forward.h"
#include "src/product.h"

#define WINDOW MR_CALIBRATE_WINDOW

struct mr_calibration {
  mr_model *m; /* borrowed */
  const mr_kernels *k;
  mr_pool *pool;
  mr_kv *kv;
  mr_forward *f;
  mr_kv_seq seq;
  mr_tap tap;
  mr_site *sites; /* [n_layers * MR_SITES]; owned */
  bool products;
  int first, n_layers; /* whose products are gathered */
  /* products: columns of a step as rows, packed for a GEMM with themselves; owned */
  float *turned;                /* [widest, WINDOW] */
  uint8_t *packed_x, *packed_w; /* rows and panels */
  float *values;                /* [WINDOW, widest] of latent attention, or NULL; owned */
  mr_site *site;                /* of the operation that is seen, for workers */
  const float *rows;
  int n;
  bool no_memory;
};

int mr_site_of(const char *stem) {
  static const struct {
    const char *stem;
    int site;
  } all[] = {{"attn_q", MR_SITE_QKV},         {"attn_k", MR_SITE_QKV},
             {"attn_v", MR_SITE_QKV},         {"attn_qkv", MR_SITE_QKV},
             {"attn_q_a", MR_SITE_QKV},       {"attn_kv_a_mqa", MR_SITE_QKV},
             {"attn_q_b", MR_SITE_LOW},       {"attn_output", MR_SITE_OUT},
             {"ffn_gate", MR_SITE_MLP},       {"ffn_up", MR_SITE_MLP},
             {"ffn_gate_exps", MR_SITE_MLP},  {"ffn_up_exps", MR_SITE_MLP},
             {"ffn_gate_exp", MR_SITE_MLP},   {"ffn_up_exp", MR_SITE_MLP},
             {"ffn_gate_shexp", MR_SITE_MLP}, {"ffn_up_shexp", MR_SITE_MLP},
             {"ffn_down", MR_SITE_DOWN}};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    if (!strcmp(all[i].stem, stem))
      return all[i].site;
  return -1;
}

/* The site whose first matrix w is; NULL: none (the head). */
static mr_site *find_site(mr_calibration *c, const mr_matrix *w, int *layer) {
  for (int i = 0; i < c->m->c.n_layers; i++) {
    const mr_layer *y = &c->m->layers[i];
    int kind = w == &y->q && y->q_a.n > 0       ? MR_SITE_LOW
               : w == &y->q || w == &y->q_a     ? MR_SITE_QKV
               : w == &y->o                     ? MR_SITE_OUT
               : w == &y->up || w == &y->router ? MR_SITE_MLP
               : w == &y->down                  ? MR_SITE_DOWN
                                                : -1;
    *layer = i;
    if (kind >= 0)
      return &c->sites[i * MR_SITES + kind];
  }
  return NULL;
}

static bool take_site(mr_site *s, int k, bool products) {
  if (!s->k) {
    s->square = mr_mem_alloc((size_t)k, sizeof *s->square);
    s->most = mr_mem_alloc((size_t)k, sizeof *s->most);
    s->mean = mr_mem_alloc((size_t)k, sizeof *s->mean);
    s->k = k;
  }
  if (products && !s->h)
    s->h = mr_mem_alloc((size_t)k * (size_t)k, sizeof *s->h);
  return s->square && s->most && s->mean && (!products || s->h);
}

/* ------------------------------------------------------------------ products of columns */

static void pack_columns(void *ctx, int item, int worker) {
  mr_calibration *c = ctx;
  const mr_gemm_ops *g = &c->k->gemm[MR_SCHEME_F32];
  int k = c->site->k, first = item * g->nr, cols = k - first < g->nr ? k - first : g->nr;
  size_t row_bytes = g->row_bytes(c->n);
  (void)worker;
  for (int i = first; i < first + cols; i++) {
    float *line = c->turned + (size_t)i * WINDOW;
    for (int t = 0; t < c->n; t++)
      line[t] = c->rows[(size_t)t * (size_t)k + (size_t)i];
    g->pack_row(c->packed_x + (size_t)i * row_bytes, line, c->n);
  }
  g->pack_panel(c->packed_w + (size_t)item * g->panel_bytes(c->n),
                c->turned + (size_t)first * WINDOW, WINDOW, cols, c->n);
}

static void multiply_columns(void *ctx, int item, int worker) {
  mr_calibration *c = ctx;
  const mr_gemm_ops *g = &c->k->gemm[MR_SCHEME_F32];
  int k = c->site->k, first = item * g->nr, rows = k - first < g->nr ? k - first : g->nr;
  (void)worker;
  g->gemm(c->site->h + (size_t)first * (size_t)k, (size_t)k,
          c->packed_x + (size_t)first * g->row_bytes(c->n), rows, c->packed_w, 0,
          (k + g->nr - 1) / g->nr, k, c->n, NULL, 1);
}

static void add_products(mr_calibration *c) {
  int items = (c->site->k + c->k->gemm[MR_SCHEME_F32].nr - 1) / c->k->gemm[MR_SCHEME_F32].nr;
  mr_pool_run(c->pool, pack_columns, c, items);
  mr_pool_run(c->pool, multiply_columns, c, items);
}

/* Sums of latents, n rows of k, become sums of values. */
static const float *values_of(mr_calibration *c, const mr_product *p, const float *rows, int n,
                              int k) {
  const mr_gemm_ops *g = &c->k->gemm[MR_SCHEME_F32];
  int size = p->latent + p->rope, width = p->w.k;
  for (int h = 0; h < k / size; h++) {
    for (int t = 0; t < n; t++)
      g->pack_row(c->packed_x + (size_t)t * g->row_bytes(p->latent),
                  rows + (size_t)t * (size_t)k + (size_t)h * (size_t)size, p->latent);
    for (int first = 0; first < p->v; first += g->nr) {
      int cols = p->v - first < g->nr ? p->v - first : g->nr;
      int64_t from = (int64_t)h * (p->nope + p->v) + p->nope + first;
      mr_matrix_rows(&p->kv_b, from, cols, c->turned, NULL);
      g->pack_panel(c->packed_w, c->turned, (size_t)p->latent, cols, p->latent);
      g->gemm(c->values + (size_t)h * (size_t)p->v + (size_t)first, (size_t)width, c->packed_x, n,
              c->packed_w, 0, 1, cols, p->latent, NULL, 0);
    }
  }
  return c->values;
}

static void see(void *ctx, const mr_matrix *w, const float *rows, int n, int k) {
  mr_calibration *c = ctx;
  int layer;
  mr_site *s = find_site(c, w, &layer);
  bool products = c->products && layer >= c->first && layer < c->first + c->n_layers;
  if (!s || c->no_memory || (c->products && !products))
    return;
  if (w->product && w->product->kind == MR_PRODUCT_OUTPUT) {
    rows = values_of(c, w->product, rows, n, k);
    k = w->product->w.k;
  }
  if (!take_site(s, k, products)) {
    c->no_memory = true;
    return;
  }
  s->n += n;
  for (int t = 0; t < n; t++)
    for (int i = 0; i < k; i++) {
      float x = rows[(size_t)t * (size_t)k + (size_t)i], a = fabsf(x);
      s->square[i] += (double)x * x;
      s->mean[i] += a;
      s->most[i] = a > s->most[i] ? a : s->most[i];
    }
  c->site = s;
  c->rows = rows;
  c->n = n;
  if (products)
    add_products(c);
}

/* ------------------------------------------------------------------ running */

static mr_code take_memory(mr_calibration *c, mr_err *err) {
  const mr_gemm_ops *g = &c->k->gemm[MR_SCHEME_F32];
  size_t widest = (size_t)mr_model_widest(c->m),
         panels = (widest + (size_t)g->nr - 1) / (size_t)g->nr;
  c->sites = mr_mem_alloc((size_t)c->m->c.n_layers * MR_SITES, sizeof *c->sites);
  c->tap.rows = mr_mem_alloc(widest, WINDOW * sizeof(float));
  c->turned = mr_mem_alloc(widest, WINDOW * sizeof(float));
  size_t x = widest * g->row_bytes(WINDOW), w = panels * g->panel_bytes(WINDOW);
  bool mla = c->m->c.arch.mla;
  if (mla) {
    size_t of_x = WINDOW * g->row_bytes(c->m->c.kv_lora), of_w = g->panel_bytes(c->m->c.kv_lora);
    x = x > of_x ? x : of_x;
    w = w > of_w ? w : of_w;
    c->values = mr_mem_alloc(widest, WINDOW * sizeof(float));
  }
  c->packed_x = mr_mem_pages(x);
  c->packed_w = mr_mem_pages(w);
  return c->sites && c->tap.rows && c->turned && c->packed_x && c->packed_w && (!mla || c->values)
             ? MR_OK
             : mr_err_set(err, MR_E_NOMEM, "out of memory for calibration");
}

static mr_code prepare(mr_calibration *c, mr_err *err) {
  mr_code rc = take_memory(c, err);
  if (!rc)
    rc = mr_model_pack(c->m, c->k, MR_SCHEME_F32, c->pool, err);
  if (!rc)
    rc = mr_kv_open(&c->kv, &c->m->c, MR_KV_F32,
                    WINDOW / MR_KV_BLOCK * mr_kv_groups_of(&c->m->c, MR_KV_F32).n, err);
  if (!rc)
    rc = mr_forward_open(&c->f, c->m, c->k, c->pool, c->kv, WINDOW, 1, err);
  if (!rc)
    rc = mr_kv_seq_init(c->kv, &c->seq, WINDOW, err);
  return rc;
}

mr_code mr_calibration_open(mr_calibration **out, mr_model *m, mr_pool *pool, mr_err *err) {
  *out = NULL;
  mr_calibration *c = mr_mem_alloc(1, sizeof *c);
  if (!c)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for calibration");
  c->m = m;
  c->k = mr_kernels_best();
  c->pool = pool;
  c->tap.ctx = c;
  c->tap.see = see;
  mr_code rc = prepare(c, err);
  if (rc) {
    mr_calibration_free(c);
    return rc;
  }
  mr_forward_tap(c->f, &c->tap);
  *out = c;
  return MR_OK;
}

static void free_site(mr_site *s) {
  mr_mem_free(s->square);
  mr_mem_free(s->most);
  mr_mem_free(s->mean);
  mr_mem_free(s->h);
  *s = (mr_site){0};
}

void mr_calibration_free(mr_calibration *c) {
  if (!c)
    return;
  for (int i = 0; c->sites && i < c->m->c.n_layers * MR_SITES; i++)
    free_site(&c->sites[i]);
  if (c->kv)
    mr_kv_seq_free(c->kv, &c->seq);
  mr_forward_close(c->f);
  mr_kv_close(c->kv);
  mr_mem_free(c->sites);
  mr_mem_free(c->tap.rows);
  mr_mem_free(c->turned);
  mr_mem_free(c->values);
  mr_mem_free(c->packed_x);
  mr_mem_free(c->packed_w);
  mr_mem_free(c);
}

mr_code mr_calibration_run(mr_calibration *c, const mr_tokens *texts, int n, bool products,
                           int first, int n_layers, mr_err *err) {
  mr_code rc = MR_OK;
  c->products = products;
  c->first = first;
  c->n_layers = n_layers;
  for (int i = 0; i < c->m->c.n_layers * MR_SITES; i++)
    if (products) /* what was gathered before of other layers is not needed any more */
      free_site(&c->sites[i]);
  for (int i = 0; i < n && !rc; i++) {
    mr_run run = {.seq = &c->seq, .tokens = texts[i].ids, .n = texts[i].n, .no_logits = 1};
    mr_kv_seq_release(c->kv, &c->seq);
    if (texts[i].n < 1)
      continue;
    if (mr_kv_seq_reserve(c->kv, &c->seq, texts[i].n))
      return mr_err_set(err, MR_E_INTERNAL, "a text of the calibration has no room");
    rc = mr_forward_step(c->f, &run, 1, NULL, err);
  }
  if (!rc && c->no_memory)
    rc = mr_err_set(err, MR_E_NOMEM, "out of memory for the products of columns");
  return rc;
}

int mr_calibration_layers(const mr_calibration *c, uint64_t bytes) {
  const mr_layer *y = &c->m->layers[0];
  uint64_t q = (uint64_t)y->q.k, o = (uint64_t)(y->o.product ? y->o.product->w.k : y->o.k);
  uint64_t d = (uint64_t)c->m->c.d_model, f = (uint64_t)c->m->c.d_ff;
  uint64_t low = (uint64_t)y->q_a.k, one = 4 * (q * q + o * o + d * d + f * f + low * low);
  int64_t n = one ? (int64_t)(bytes / one) : 1;
  return n < 1 ? 1 : n < c->m->c.n_layers ? (int)n : c->m->c.n_layers;
}

const mr_site *mr_calibration_site(const mr_calibration *c, int layer, mr_site_kind kind) {
  return &c->sites[layer * MR_SITES + (int)kind];
}
