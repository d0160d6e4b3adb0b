/* Quantized checkpoints: which tensors stand for a matrix. */
#include "src/model_load.h"

#include "io/mem.h"

#define FAIL MR_LOAD_FAIL

/* A tensor under this name with its first two dims, marked as used. NULL: there is none. */
static const mr_gguf_tensor *part(mr_loader *l, const char *stem, const char *ext, int dtype) {
  char name[MR_NAME];
  const mr_gguf_tensor *t = mr_load_find(l, stem, ext, name);
  if (!t || l->rc)
    return NULL;
  if (t->dims[2] * t->dims[3] != 1 || (dtype >= 0 && t->dtype != dtype)) {
    FAIL(l, MR_E_DATA, "tensor %s has a shape or type that its scheme has not", name);
    return NULL;
  }
  mr_load_use(l, t, 0);
  return t;
}

static const mr_gguf_tensor *sized(mr_loader *l, const char *stem, const char *ext, int dtype,
                                   int64_t rows, int64_t cols) {
  const mr_gguf_tensor *t = part(l, stem, ext, dtype);
  if (t && (t->dims[1] != rows || t->dims[0] != cols)) {
    FAIL(l, MR_E_DATA, "%s%s of layer %d is [%lld, %lld]; its matrix asks for [%lld, %lld]", stem,
         ext, l->layer, (long long)t->dims[1], (long long)t->dims[0], (long long)rows,
         (long long)cols);
    return NULL;
  }
  return t;
}

static mr_quant *new_quant(mr_loader *l, mr_quant_kind kind, int n, int k) {
  size_t floats = (sizeof(mr_quant) + sizeof(float) - 1) / sizeof(float);
  mr_quant *q = l->rc ? NULL : (mr_quant *)(void *)mr_load_floats(l, floats);
  if (q)
    *q = (mr_quant){.kind = kind, .n = n, .k = k, .group = k, .block_n = 1, .block_k = k};
  return q;
}

/* Scales as floats; q->rows and q->cols from their shape. */
static bool take_scales(mr_loader *l, mr_quant *q, const char *stem, const char *ext) {
  const mr_gguf_tensor *t = part(l, stem, ext, -1);
  if (!t || !mr_dtype_get(t->dtype)->to_f32) {
    if (!l->rc)
      FAIL(l, MR_E_DATA, "%s%s of layer %d is missing or of a wrong type", stem, ext, l->layer);
    return false;
  }
  int64_t most = (int64_t)q->k + q->n;
  if (t->dims[0] > most || t->dims[1] > most)
    FAIL(l, MR_E_DATA, "%s%s of layer %d is larger than its matrix", stem, ext, l->layer);
  if (l->rc)
    return false;
  float *s = mr_load_floats(l, (size_t)(t->dims[0] * t->dims[1]));
  if (!s)
    return false;
  mr_dtype_get(t->dtype)->to_f32(s, t->data, t->dims[0] * t->dims[1]);
  q->scales = s;
  q->rows = (int)t->dims[1];
  q->cols = (int)t->dims[0];
  return true;
}

/* Which group each value of k belongs to, where the checkpoint says so. */
static void take_groups(mr_loader *l, mr_quant *q, const char *stem, const char *ext, int groups) {
  const mr_gguf_tensor *t = sized(l, stem, ext, MR_I32, 1, q->k);
  if (groups < 1 || q->k % groups)
    FAIL(l, MR_E_DATA, "%s of layer %d: %d values cannot be cut into %d groups", stem, l->layer,
         q->k, groups);
  if (l->rc)
    return;
  q->group = q->k / groups;
  for (int i = 0; t && i < q->k; i++) {
    const uint8_t *p = t->data + 4 * (size_t)i;
    uint32_t g = (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
    if (g >= (uint32_t)groups) {
      FAIL(l, MR_E_DATA, "%s%s of layer %d: group %u of %d", stem, ext, l->layer, g, groups);
      return;
    }
  }
  q->g_idx = t ? t->data : NULL;
}

/* GPTQ and AWQ: the same names, told apart by the shape. */
static void by_words(mr_loader *l, mr_quant *q, const char *stem, const mr_gguf_tensor *t) {
  int n = q->n, k = q->k;
  bool awq = t->dims[1] == k;
  int64_t packed = awq ? t->dims[0] : t->dims[1], whole = awq ? n : k;
  q->kind = awq ? MR_QUANT_AWQ : MR_QUANT_GPTQ;
  q->per = (int)(whole / packed);
  q->bits = q->per == 8 ? 4 : q->per == 4 && !awq ? 8 : 0;
  if (!q->bits || whole % q->per || n % q->per || packed * q->per != whole ||
      (!awq && t->dims[0] != n)) {
    FAIL(l, MR_E_DATA, "%s.qweight of layer %d: this packing is not supported", stem, l->layer);
    return;
  }
  q->words = t->data;
  q->zero_add = l->m->c.gptq_v2 ? 0 : 1;
  if (!take_scales(l, q, stem, ".scales"))
    return;
  if (q->cols != n)
    FAIL(l, MR_E_DATA, "%s.scales of layer %d: %d columns for %d", stem, l->layer, q->cols, n);
  const mr_gguf_tensor *zeros = sized(l, stem, ".qzeros", MR_I32, q->rows, n / q->per);
  q->zeros = zeros ? zeros->data : NULL;
  take_groups(l, q, stem, ".g_idx", q->rows);
}

static void packed(mr_loader *l, mr_quant *q, const char *stem, const mr_gguf_tensor *t) {
  int per = t->dims[0] > 0 ? (int)((q->k + t->dims[0] - 1) / t->dims[0]) : 0;
  q->per = per;
  q->bits = per == 8 ? 4 : per == 4 ? 8 : 0;
  part(l, stem, ".weight_shape", MR_I64);
  if (!q->bits || t->dims[1] != q->n || t->dims[0] != (q->k + per - 1) / per) {
    FAIL(l, MR_E_DATA, "%s.weight_packed of layer %d: this packing is not supported", stem,
         l->layer);
    return;
  }
  q->words = t->data;
  if (!take_scales(l, q, stem, ".weight_scale"))
    return;
  if (q->rows != q->n)
    FAIL(l, MR_E_DATA, "%s.weight_scale of layer %d: %d rows for %d", stem, l->layer, q->rows,
         q->n);
  take_groups(l, q, stem, ".weight_g_idx", q->cols);
}

bool mr_load_quant(mr_loader *l, mr_matrix *w, const char *stem, int n, int k) {
  char name[MR_NAME];
  if (!l->m->weights->st || l->rc)
    return false;
  const mr_gguf_tensor *words = mr_load_find(l, stem, ".qweight", name);
  bool own = !words;
  if (own)
    words = mr_load_find(l, stem, ".weight_packed", name);
  if (!words)
    return false;
  part(l, stem, own ? ".weight_packed" : ".qweight", MR_I32);
  mr_quant *q = new_quant(l, MR_QUANT_PACKED, n, k);
  if (!q)
    return true;
  *w = (mr_matrix){.n = n, .k = k, .dtype = MR_I32, .quant = q};
  l->m->n_params += (uint64_t)n * (uint64_t)k;
  if (own)
    packed(l, q, stem, words);
  else
    by_words(l, q, stem, words);
  return true;
}

/* Columns that were kept out of the 8-bit ones (quantize --type int8-outliers). */
static void take_outliers(mr_loader *l, mr_quant *q, const char *stem) {
  const mr_gguf_tensor *values = part(l, stem, ".weight_outliers", -1);
  if (!values)
    return;
  int64_t n = values->dims[0];
  const mr_gguf_tensor *columns = sized(l, stem, ".outlier_columns", MR_I32, 1, n);
  if (!l->rc &&
      (!columns || values->dims[1] != q->n || n > q->k || !mr_dtype_get(values->dtype)->to_f32))
    FAIL(l, MR_E_DATA, "%s.weight_outliers of layer %d does not fit its matrix", stem, l->layer);
  for (int64_t i = 0; !l->rc && i < n; i++) {
    const uint8_t *p = columns->data + 4 * i;
    uint32_t c = (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
    if (c >= (uint32_t)q->k)
      FAIL(l, MR_E_DATA, "%s.outlier_columns of layer %d: column %u of %d", stem, l->layer, c,
           q->k);
  }
  float *v = l->rc ? NULL : mr_load_floats(l, (size_t)(n * q->n));
  if (!v)
    return;
  mr_dtype_get(values->dtype)->to_f32(v, values->data, n * q->n);
  q->n_outliers = (int)n;
  q->outlier_columns = columns->data;
  q->outliers = v;
}

void mr_load_scales(mr_loader *l, mr_matrix *w, const char *stem) {
  char name[MR_NAME];
  bool inverse = mr_load_find(l, stem, ".weight_scale_inv", name) != NULL;
  const char *ext = inverse ? ".weight_scale_inv" : ".weight_scale";
  if (l->rc || !mr_load_find(l, stem, ext, name))
    return;
  mr_quant *q = new_quant(l, MR_QUANT_SCALED, w->n, w->k);
  if (!q || !take_scales(l, q, stem, ext))
    return;
  const int *block = l->m->c.quant_block;
  bool one = q->rows == 1 && q->cols == 1;
  bool blocks = block[0] > 0 && !one && (q->cols > 1 || inverse);
  q->block_n = blocks ? block[0] : q->rows == 1 ? w->n : 1;
  q->block_k = blocks ? block[1] : (w->k + q->cols - 1) / q->cols;
  if (inverse && !blocks && !one)
    q->block_n = (w->n + q->rows - 1) / q->rows;
  if (q->rows != (w->n + q->block_n - 1) / q->block_n ||
      q->cols != (w->k + q->block_k - 1) / q->block_k)
    FAIL(l, MR_E_DATA, "tensor %s: scales [%d, %d] do not fit a matrix [%d, %d]", name, q->rows,
         q->cols, w->n, w->k);
  if (!l->rc)
    take_outliers(l, q, stem);
  w->quant = q;
}
