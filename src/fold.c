#include "src/fold.h"

#include <math.h>
#include <string.h>

#include "io/mem.h"
#include "src/product.h"

#define MAX_PARTS 3
#define SAMPLE 256 /* rows of a matrix whose error is tried out */
#define TRIES 20   /* exponents 0, 0.05 ... */

typedef struct maker {
  mr_folds *f;
  const mr_model *m;
  const mr_calibration *c;
  mr_fold_spec spec;
  _Atomic bool failed; /* out of memory; set by any worker */
} maker;

/* ------------------------------------------------------------------ where factors can go */

static bool foldable(const maker *k, const mr_layer *y, mr_site_kind kind) {
  const mr_config *c = &k->m->c;
  const mr_arch *a = &c->arch;
  bool norms = a->pre_norms && !a->norm_after && !a->norm_bare;
  bool own_norms = !a->parallel || (y->ffn_norm && strcmp(a->name, "falcon") != 0);
  switch (kind) {
  case MR_SITE_QKV:
    return norms && own_norms && y->attn_norm;
  case MR_SITE_MLP:
    return norms && own_norms && y->ffn_norm && !y->experts;
  case MR_SITE_OUT:
    return k->spec.method == MR_FOLD_AWQ && !a->mla && c->clip_qkv == 0 && !y->attn_sub_norm;
  case MR_SITE_LOW:
    return false;
  default:
    return k->spec.method == MR_FOLD_AWQ && a->gated && !a->xielu && !a->swiglu_clamp &&
           !y->ffn_sub_norm && !y->experts;
  }
}

static int parts_of(const mr_layer *y, mr_site_kind kind, const mr_matrix *w[MAX_PARTS]) {
  int n = 0;
  if (kind == MR_SITE_QKV && y->q.product) { /* latent attention */
    w[n++] = y->q_a.n > 0 ? &y->q_a : &y->q.product->w;
    w[n++] = &y->k;
  } else if (kind == MR_SITE_QKV) {
    w[n++] = &y->q;
    w[n++] = &y->k;
    w[n++] = &y->v;
  } else if (kind == MR_SITE_OUT) {
    w[n++] = &y->o;
  } else if (kind == MR_SITE_DOWN) {
    w[n++] = &y->down;
  } else {
    w[n++] = &y->up;
    if (y->gate.n > 0 && y->gate.dtype >= 0)
      w[n++] = &y->gate;
  }
  return n;
}

/* Heads that share a key head get the same values: the mean of theirs. */
static void share_heads(const mr_config *c, float *x) {
  int share = c->n_heads / c->n_kv_heads, d = c->head_dim;
  for (int h = 0; h < c->n_kv_heads && share > 1; h++)
    for (int i = 0; i < d; i++) {
      float sum = 0;
      for (int j = 0; j < share; j++)
        sum += x[(h * share + j) * d + i];
      for (int j = 0; j < share; j++)
        x[(h * share + j) * d + i] = sum / (float)share;
    }
}

/* ------------------------------------------------------------------ the two methods */

static void smooth(const mr_site *s, const mr_matrix *const *w, int n, float *scale, float *row) {
  for (int i = 0; i < s->k; i++)
    scale[i] = 0;
  for (int p = 0; p < n; p++)
    for (int r = 0; r < w[p]->n; r++) {
      mr_matrix_row(w[p], r, row);
      for (int i = 0; i < s->k; i++)
        scale[i] = fabsf(row[i]) > scale[i] ? fabsf(row[i]) : scale[i];
    }
  for (int i = 0; i < s->k; i++) {
    float x = s->most[i], v = scale[i];
    scale[i] = x > 1e-5f && v > 1e-5f ? sqrtf(v / x) : 1;
  }
}

/* Square error of one row whose groups are cut into equal steps. */
static double group_error(const float *row, const float *scale, const mr_site *s,
                          const mr_fold_spec *spec) {
  double sum = 0;
  for (int at = 0; at < s->k; at += spec->group) {
    int n = s->k - at < spec->group ? s->k - at : spec->group;
    float lo = 0, hi = 0;
    for (int i = at; i < at + n; i++) {
      float v = row[i] * scale[i];
      lo = v < lo ? v : lo;
      hi = v > hi ? v : hi;
    }
    if (spec->centred) {
      hi = -lo > hi ? -lo : hi;
      lo = -hi; /* a step on either side, so that 0 is one */
    }
    float step = (hi - lo) / (float)(spec->levels + spec->centred), inv = step > 0 ? 1 / step : 0;
    for (int i = at; i < at + n; i++) {
      float v = row[i] * scale[i], e = (v - lo) * inv;
      e = (e - rintf(e)) * step / scale[i];
      sum += (double)(e * e) * s->square[i];
    }
  }
  return sum;
}

static double site_error(const mr_site *s, const mr_matrix *const *w, int n, const float *scale,
                         float *row, const mr_fold_spec *spec) {
  double sum = 0;
  for (int p = 0; p < n; p++) {
    int step = w[p]->n > SAMPLE ? w[p]->n / SAMPLE : 1;
    for (int r = 0; r < w[p]->n; r += step) {
      mr_matrix_row(w[p], r, row);
      sum += group_error(row, scale, s, spec) * step;
    }
  }
  return sum;
}

/* Factors of an exponent, around 1. */
static void powers(const float *mean, int k, float exponent, float *scale) {
  float lo = INFINITY, hi = 0;
  for (int i = 0; i < k; i++) {
    float x = mean[i] > 1e-6f ? mean[i] : 1e-6f;
    scale[i] = powf(x, exponent);
    lo = scale[i] < lo ? scale[i] : lo;
    hi = scale[i] > hi ? scale[i] : hi;
  }
  float middle = sqrtf(lo * hi);
  for (int i = 0; i < k; i++)
    scale[i] = middle > 0 ? scale[i] / middle : 1;
}

static void awq(const maker *k, const mr_site *s, mr_site_kind kind, const mr_matrix *const *w,
                int n, float *scale, float *room) {
  float *mean = room, *row = room + s->k, best = 0;
  double least = INFINITY;
  for (int i = 0; i < s->k; i++)
    mean[i] = s->n > 0 ? s->mean[i] / (float)s->n : 1;
  if (kind == MR_SITE_OUT)
    share_heads(&k->m->c, mean);
  for (int t = 0; t < TRIES; t++) {
    powers(mean, s->k, (float)t / TRIES, scale);
    double e = site_error(s, w, n, scale, row, &k->spec);
    if (e < least) {
      least = e;
      best = (float)t / TRIES;
    }
  }
  powers(mean, s->k, best, scale);
}

static void one_site(void *ctx, int item, int worker) {
  maker *k = ctx;
  mr_site_kind kind = (mr_site_kind)(item % MR_SITES);
  const mr_layer *y = &k->m->layers[item / MR_SITES];
  const mr_site *s = mr_calibration_site(k->c, item / MR_SITES, kind);
  const mr_matrix *w[MAX_PARTS];
  (void)worker;
  if (!s->k || !foldable(k, y, kind))
    return;
  int n = parts_of(y, kind, w);
  float *scale = mr_mem_alloc((size_t)s->k, sizeof *scale);
  float *room = mr_mem_alloc((size_t)s->k, 2 * sizeof *room);
  if (!scale || !room)
    k->failed = true;
  else if (k->spec.method == MR_FOLD_SMOOTH)
    smooth(s, w, n, scale, room);
  else
    awq(k, s, kind, w, n, scale, room);
  k->f->scale[item] = scale;
  mr_mem_free(room);
}

mr_code mr_folds_make(mr_folds *f, const mr_model *m, const mr_calibration *c,
                      const mr_fold_spec *spec, mr_pool *pool, mr_err *err) {
  maker k = {.f = f, .m = m, .c = c, .spec = *spec};
  k.spec.group = spec->group > 0 ? spec->group : 128;
  k.spec.levels = spec->levels > 0 ? spec->levels : 15;
  *f = (mr_folds){.n_layers = m->c.n_layers};
  f->scale = mr_mem_alloc((size_t)m->c.n_layers * MR_SITES, sizeof *f->scale);
  if (f->scale)
    mr_pool_run(pool, one_site, &k, m->c.n_layers * MR_SITES);
  if (!f->scale || k.failed)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for factors of columns");
  return MR_OK;
}

void mr_folds_free(mr_folds *f) {
  for (int i = 0; f->scale && i < f->n_layers * MR_SITES; i++)
    mr_mem_free(f->scale[i]);
  mr_mem_free(f->scale);
  *f = (mr_folds){0};
}

const float *mr_folds_of(const mr_folds *f, int layer, mr_site_kind kind) {
  return f->scale && layer >= 0 && layer < f->n_layers ? f->scale[layer * MR_SITES + (int)kind]
                                                       : NULL;
}

float mr_folds_value(const mr_folds *f, const mr_config *c, int layer, int row) {
  const float *s = mr_folds_of(f, layer, MR_SITE_OUT);
  int share = c->n_heads / c->n_kv_heads;
  return s ? s[row / c->head_dim * share * c->head_dim + row % c->head_dim] : 1;
}
