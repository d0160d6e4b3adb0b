#include "src/quantize_recipe.h"

#include <math.h>
#include <string.h>

#include "io/mem.h"
#include "kernels/encode.h"
#include "src/fold.h"
#include "src/gptq.h"

#define PRODUCTS ((uint64_t)1 << 30) /* bytes of products of columns at once */
#define DAMP 0.01
#define OUTLIER 6 /* an activation from here on makes its column one (Dettmers et al. 2022) */

struct mr_recipe {
  const mr_quantize_opts *o; /* borrowed, as all of these */
  const mr_model *m;
  mr_out_plan *plan;
  mr_calibration *c; /* owned, as all that follows */
  mr_folds folds;
  int first, n_layers; /* whose products are gathered */
  mr_gptq *factor;     /* of one site */
  int factor_layer, factor_kind;
  float *w; /* [rows, k] of a matrix */
  size_t cap_w;
  const mr_grid_spec *spec; /* of a directory's matrices, or NULL; borrowed */
  mr_grid grid;
  float *importance, *rows_room; /* [widest]; [workers, widest] */
  size_t widest;
  int32_t *outliers; /* [widest] */
  float *kept;       /* [rows, n_outliers] of a matrix */
  int count;
};

static bool products_needed(const mr_recipe *r) {
  return r->o->method == MR_METHOD_GPTQ || r->o->sparsify == MR_SPARSE_SPARSEGPT;
}

/* ------------------------------------------------------------------ factors into the plan */

static bool is_bias(const mr_out_tensor *t) {
  mr_str s = t->full.s ? t->full : (mr_str){t->name, strlen(t->name)};
  return s.len > 5 && !memcmp(s.s + s.len - 5, ".bias", 5);
}

/* A vector divided by the factors of what it feeds. */
static bool divide_vector(mr_recipe *r, mr_out_tensor *t, const float *s, int64_t n) {
  float *v = s && t->dims[0] == n ? mr_out_floats(r->plan, (size_t)n) : NULL;
  if (!v)
    return !s;
  mr_out_row(r->plan, t, 0, v);
  float less = r->plan->less_one && !is_bias(t) ? 1 : 0;
  for (int64_t i = 0; i < n; i++)
    v[i] = (v[i] + less) / s[i] - less;
  t->raw = NULL;
  t->values = v;
  t->dtype = MR_F32;
  return true;
}

/* Rows of the values, or of up: one over the factor of the column that they feed. `feeding`: which
 * rows of the tensor these are. */
static bool divide_rows(mr_recipe *r, mr_out_tensor *t, mr_site_kind kind,
                        const mr_matrix *feeding) {
  const float *s = mr_folds_of(&r->folds, t->layer, kind);
  bool bias = t->n_dims == 1;
  int64_t rows = bias ? t->dims[0] : t->rows;
  float *f = s ? mr_out_floats(r->plan, (size_t)rows) : NULL;
  if (!f)
    return !s;
  for (int64_t i = 0; i < rows; i++)
    f[i] = 1;
  for (int i = 0; i < feeding->n; i++)
    f[mr_matrix_source(feeding, i)] =
        kind == MR_SITE_OUT ? 1 / mr_folds_value(&r->folds, &r->m->c, t->layer, i) : 1 / s[i];
  if (bias)
    t->col = f;
  else
    t->row = f;
  return true;
}

static bool fold_tensor(mr_recipe *r, mr_out_tensor *t) {
  const mr_config *c = &r->m->c;
  int site = mr_site_of(t->stem);
  mr_matrix rows = {.n = c->n_kv_heads * c->head_dim};
  if (t->layer < 0)
    return true;
  if (!strcmp(t->stem, "attn_norm"))
    return divide_vector(r, t, mr_folds_of(&r->folds, t->layer, MR_SITE_QKV), c->d_model);
  if (!strcmp(t->stem, "ffn_norm"))
    return divide_vector(r, t, mr_folds_of(&r->folds, t->layer, MR_SITE_MLP), c->d_model);
  if (site >= 0 && !is_bias(t))
    t->col = mr_folds_of(&r->folds, t->layer, (mr_site_kind)site);
  if (!strcmp(t->stem, "attn_v"))
    return divide_rows(r, t, MR_SITE_OUT, &rows);
  if (!strcmp(t->stem, "attn_qkv")) { /* a directory's own tensor may lie otherwise */
    mr_qkv_rows(c, t->raw && r->m->weights->st ? c->arch.hf_qkv : MR_QKV_STACKED, 2, &rows);
    return divide_rows(r, t, MR_SITE_OUT, &rows);
  }
  if (!strcmp(t->stem, "ffn_up")) { /* gate's rows may come first */
    rows =
        (mr_matrix){.n = c->d_ff, .first = (int)(t->n_dims == 1 ? t->dims[0] : t->rows) - c->d_ff};
    return divide_rows(r, t, MR_SITE_DOWN, &rows);
  }
  return true;
}

/* The rounding that AWQ's factors are for: that of the matrices to come. */
static mr_fold_spec rounding(const mr_recipe *r) {
  mr_encode_steps t = mr_encode_steps_of(r->o->dtype);
  mr_fold_spec spec = {MR_FOLD_AWQ, t.group, t.levels, t.centred};
  if (r->o->method == MR_METHOD_SMOOTH)
    spec.method = MR_FOLD_SMOOTH;
  if (r->spec) {
    spec.group = r->spec->group;
    spec.levels = r->spec->levels;
    spec.centred = r->spec->kind == MR_GRID_CENTRED;
  }
  return spec;
}

static mr_code fold(mr_recipe *r, mr_err *err) {
  mr_fold_spec spec = rounding(r);
  mr_code rc = mr_folds_make(&r->folds, r->m, r->c, &spec, r->o->pool, err);
  for (size_t i = 0; i < r->plan->n && !rc; i++)
    if (!fold_tensor(r, &r->plan->t[i]))
      rc = mr_err_set(err, MR_E_NOMEM, "out of memory for factors of rows");
  return rc;
}

/* ------------------------------------------------------------------ open */

static mr_code take_memory(mr_recipe *r, mr_err *err) {
  size_t workers = (size_t)mr_pool_threads(r->o->pool), lines;
  for (size_t i = 0; i < r->plan->n; i++)
    if ((size_t)r->plan->t[i].dims[0] > r->widest)
      r->widest = (size_t)r->plan->t[i].dims[0];
  r->importance = mr_mem_alloc(r->widest, sizeof *r->importance);
  if (mr_mem_mul(workers, r->widest, &lines))
    r->rows_room = mr_mem_alloc(lines, sizeof *r->rows_room);
  r->outliers = mr_mem_alloc(r->widest, sizeof *r->outliers);
  return r->importance && r->rows_room && r->outliers
             ? MR_OK
             : mr_err_set(err, MR_E_NOMEM, "out of memory for calibration");
}

mr_code mr_recipe_open(mr_recipe **out, const mr_quantize_opts *o, mr_model *m, mr_out_plan *plan,
                       const mr_grid_spec *spec, mr_err *err) {
  *out = NULL;
  mr_recipe *r = mr_mem_alloc(1, sizeof *r);
  if (!r)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for calibration");
  r->o = o;
  r->m = m;
  r->plan = plan;
  r->spec = spec;
  r->factor_layer = -1;
  mr_code rc = take_memory(r, err);
  if (!rc)
    rc = mr_calibration_open(&r->c, m, o->pool, err);
  if (!rc && !products_needed(r))
    rc = mr_calibration_run(r->c, o->texts, o->n_texts, false, 0, m->c.n_layers, err);
  if (!rc && (o->method == MR_METHOD_SMOOTH || o->method == MR_METHOD_AWQ))
    rc = fold(r, err);
  if (rc)
    mr_recipe_free(r);
  else
    *out = r;
  return rc;
}

void mr_recipe_free(mr_recipe *r) {
  if (!r)
    return;
  mr_gptq_close(r->factor);
  mr_grid_close(&r->grid);
  mr_folds_free(&r->folds);
  mr_calibration_free(r->c);
  mr_mem_free(r->w);
  mr_mem_free(r->importance);
  mr_mem_free(r->rows_room);
  mr_mem_free(r->outliers);
  mr_mem_free(r->kept);
  mr_mem_free(r);
}

int mr_recipe_count(const mr_recipe *r) {
  return r->count;
}

/* ------------------------------------------------------------------ one matrix */

typedef struct rows_job {
  mr_recipe *r;
  const mr_out_tensor *t;
} rows_job;

static void load_row(void *ctx, int row, int worker) {
  const rows_job *j = ctx;
  (void)worker;
  mr_out_row(j->r->plan, j->t, row, j->r->w + (size_t)row * (size_t)j->t->dims[0]);
}

static mr_code load(mr_recipe *r, const mr_out_tensor *t, mr_err *err) {
  rows_job j = {r, t};
  size_t n;
  if (!mr_mem_mul((size_t)t->rows, (size_t)t->dims[0], &n))
    return mr_err_set(err, MR_E_NOMEM, "out of memory for a matrix");
  if (n > r->cap_w) {
    mr_mem_free(r->w);
    r->cap_w = 0;
    r->w = mr_mem_alloc(n, sizeof *r->w);
    if (!r->w)
      return mr_err_set(err, MR_E_NOMEM, "out of memory for a matrix");
    r->cap_w = n;
  }
  mr_pool_run(r->o->pool, load_row, &j, (int)t->rows);
  return MR_OK;
}

/* Statistics of the tensor's columns; products of its layer where they are needed. */
static mr_code gather(mr_recipe *r, int layer, mr_err *err) {
  if (!products_needed(r) || (layer >= r->first && layer < r->first + r->n_layers))
    return MR_OK;
  uint64_t bytes = r->o->products ? r->o->products : PRODUCTS;
  r->first = layer;
  r->n_layers = mr_calibration_layers(r->c, bytes);
  if (r->first + r->n_layers > r->m->c.n_layers)
    r->first = r->m->c.n_layers - r->n_layers;
  mr_gptq_close(r->factor);
  r->factor = NULL;
  r->factor_layer = -1;
  return mr_calibration_run(r->c, r->o->texts, r->o->n_texts, true, r->first, r->n_layers, err);
}

static mr_code factorize(mr_recipe *r, const mr_site *s, int layer, int kind, mr_err *err) {
  if (r->factor && r->factor_layer == layer && r->factor_kind == kind)
    return MR_OK;
  mr_gptq_close(r->factor);
  r->factor = NULL;
  r->factor_layer = layer;
  r->factor_kind = kind;
  return mr_gptq_open(&r->factor, s->h, s->k, DAMP, r->o->sparsify == MR_SPARSE_SPARSEGPT,
                      r->o->pool, err);
}

static float round_to(void *ctx, int row, int col, float v) {
  const mr_grid *g = ctx;
  return mr_grid_value(g, row, col, mr_grid_code(g, row, col, v));
}

static void fit_row(void *ctx, int row, int worker) {
  const rows_job *j = ctx;
  mr_recipe *r = j->r;
  mr_grid_fit(&r->grid, row, r->w + (size_t)row * (size_t)j->t->dims[0], r->importance,
              r->rows_room + (size_t)worker * r->widest);
}

/* Where the matrix's values may lie: scales fitted to what w holds now. */
static mr_code fit(mr_recipe *r, const mr_out_tensor *t, mr_err *err) {
  int ranged, levels = mr_encode_levels(t->dtype, &ranged);
  mr_grid_spec spec = {.kind = ranged ? MR_GRID_RANGED : MR_GRID_CENTRED,
                       .levels = levels,
                       .group = 32,
                       .half = true};
  rows_job j = {r, t};
  mr_grid_close(&r->grid);
  mr_code rc =
      mr_grid_open(&r->grid, (int)t->rows, (int)t->dims[0], r->spec ? r->spec : &spec, err);
  if (!rc)
    mr_pool_run(r->o->pool, fit_row, &j, (int)t->rows);
  return rc;
}

/* Wanda: of each four columns the two of the smallest |w| * rms(x) go. */
static void mask_row(void *ctx, int row, int worker) {
  const rows_job *j = ctx;
  const float *importance = j->r->importance;
  float *w = j->r->w + (size_t)row * (size_t)j->t->dims[0];
  (void)worker;
  for (int64_t i = 0; i + 4 <= j->t->dims[0]; i += 4) {
    bool gone[4] = {false};
    for (int n = 0; n < 2; n++) {
      int least = -1;
      float loss = INFINITY;
      for (int c = 0; c < 4; c++) {
        float x = w[i + c] * w[i + c] * importance[i + c];
        if (!gone[c] && x < loss) {
          loss = x;
          least = c;
        }
      }
      if (least >= 0) {
        gone[least] = true;
        w[i + least] = 0;
      }
    }
  }
}

static mr_code sparse(mr_recipe *r, const mr_out_tensor *t, mr_err *err) {
  rows_job j = {r, t};
  if (r->o->sparsify == MR_SPARSE_SPARSEGPT)
    return mr_gptq_sparse(r->factor, r->w, (int)t->rows, r->o->pool, err);
  mr_pool_run(r->o->pool, mask_row, &j, (int)t->rows);
  return MR_OK;
}

static void take_importance(mr_recipe *r, const mr_out_tensor *t, const mr_site *s) {
  for (int64_t i = 0; i < t->dims[0]; i++) {
    double x = s && s->n ? s->square[i] / (double)s->n : 1;
    r->importance[i] = (float)(t->col ? x / ((double)t->col[i] * t->col[i]) : x);
  }
}

static const mr_site *site_of(const mr_recipe *r, const mr_out_tensor *t) {
  int kind = mr_site_of(t->stem);
  if (t->kind != MR_OUT_MATRIX || t->layer < 0 || kind < 0)
    return NULL;
  return mr_calibration_site(r->c, t->layer, (mr_site_kind)kind);
}

int mr_recipe_outliers(const mr_recipe *r, const mr_out_tensor *t) {
  const mr_site *s = r->o->form == MR_FORM_INT8_OUTLIERS ? site_of(r, t) : NULL;
  int n = 0;
  for (int i = 0; s && s->k == t->dims[0] && i < s->k; i++)
    n += s->most[i] >= OUTLIER;
  return n;
}

/* Outlier columns go from w to kept. */
static mr_code set_apart(mr_recipe *r, const mr_out_tensor *t, const mr_site *s,
                         mr_recipe_rows *from, mr_err *err) {
  int n = s ? mr_recipe_outliers(r, t) : 0, at = 0;
  mr_mem_free(r->kept);
  r->kept = mr_mem_alloc((size_t)t->rows * (size_t)n, sizeof *r->kept);
  if (!r->kept)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for outlier columns");
  for (int i = 0; n && i < s->k; i++)
    if (s->most[i] >= OUTLIER)
      r->outliers[at++] = i;
  for (int64_t row = 0; n && row < t->rows; row++)
    for (int i = 0; i < n; i++) {
      float *w = &r->w[(size_t)row * (size_t)s->k + (size_t)r->outliers[i]];
      r->kept[(size_t)row * (size_t)n + (size_t)i] = *w;
      *w = 0;
    }
  from->n_outliers = n;
  from->outliers = r->outliers;
  from->kept = r->kept;
  return MR_OK;
}

static mr_code round_matrix(mr_recipe *r, const mr_out_tensor *t, const mr_site *s, int kind,
                            mr_recipe_rows *from, mr_err *err) {
  int ranged;
  bool plain = t->n_dims == 2;
  bool prune = r->o->sparsify != MR_SPARSE_NO && plain && s && s->k % 4 == 0;
  bool grid = plain && (r->spec || mr_encode_levels(t->dtype, &ranged));
  bool gptq = r->o->method == MR_METHOD_GPTQ && grid && !prune && s;
  grid = gptq || (grid && r->spec);
  if (!prune && !grid)
    return MR_OK;
  mr_code rc = load(r, t, err);
  if (!rc && products_needed(r) && s)
    rc = factorize(r, s, t->layer, kind, err);
  if (!rc && prune)
    rc = sparse(r, t, err);
  if (!rc && r->o->form == MR_FORM_INT8_OUTLIERS)
    rc = set_apart(r, t, s, from, err);
  if (!rc && grid)
    rc = fit(r, t, err);
  if (!rc && gptq)
    rc = mr_gptq_rows(r->factor, r->w, (int)t->rows, round_to, &r->grid, r->o->pool, err);
  from->w = r->w;
  from->grid = grid ? &r->grid : NULL;
  return rc;
}

/* A directory's experts have matrices whose inputs are not looked at: those that go down. Neither
 * are those of latent attention's kv_b. They are rounded as if all columns met the same. */
mr_code mr_recipe_tensor(mr_recipe *r, const mr_out_tensor *t, mr_recipe_rows *from, mr_err *err) {
  int kind = mr_site_of(t->stem);
  *from = (mr_recipe_rows){0};
  if (t->kind != MR_OUT_MATRIX || t->layer < 0 || (kind < 0 && !r->spec))
    return MR_OK;
  mr_code rc = kind < 0 ? MR_OK : gather(r, t->layer, err);
  const mr_site *s = kind < 0 ? NULL : mr_calibration_site(r->c, t->layer, (mr_site_kind)kind);
  if (rc || (s && s->k != t->dims[0]))
    return rc;
  take_importance(r, t, s);
  r->count++;
  from->site = s;
  from->importance = r->o->method != MR_METHOD_SMOOTH ? r->importance : NULL;
  return round_matrix(r, t, s, kind, from, err);
}
