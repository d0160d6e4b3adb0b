#include "src/matrix.h"

#include "src/product.h"

static uint32_t word(const uint8_t *p, int64_t i) {
  const uint8_t *w = p + 4 * i;
  return (uint32_t)w[0] | (uint32_t)w[1] << 8 | (uint32_t)w[2] << 16 | (uint32_t)w[3] << 24;
}

/* Value `at` of a word of values of so many bits, the lowest first. */
static int field(uint32_t w, int at, int bits) {
  return (int)(w >> (at * bits) & ((1u << bits) - 1));
}

static int group_of(const mr_quant *q, int i) {
  return q->g_idx ? (int)word(q->g_idx, i) : i / q->group;
}

static void gptq_row(const mr_quant *q, int64_t r, float *dst) {
  int words = q->n / q->per;
  for (int i = 0; i < q->k; i++) {
    int g = group_of(q, i);
    int v = field(word(q->words, (int64_t)(i / q->per) * q->n + r), i % q->per, q->bits);
    int zero = 1 << (q->bits - 1);
    if (q->zeros)
      zero = field(word(q->zeros, (int64_t)g * words + r / q->per), (int)(r % q->per), q->bits) +
             q->zero_add;
    dst[i] = q->scales[(int64_t)g * q->n + r] * (float)(v - zero);
  }
}

/* Column c of a group of eight lies in nibble order[c]. */
static void awq_row(const mr_quant *q, int64_t r, float *dst) {
  static const int order[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  int words = q->n / q->per, at = order[r % q->per];
  for (int i = 0; i < q->k; i++) {
    int g = i / q->group;
    int v = field(word(q->words, (int64_t)i * words + r / q->per), at, q->bits);
    int zero = 1 << (q->bits - 1);
    if (q->zeros)
      zero = field(word(q->zeros, (int64_t)g * words + r / q->per), at, q->bits);
    dst[i] = q->scales[(int64_t)g * q->n + r] * (float)(v - zero);
  }
}

static void packed_row(const mr_quant *q, int64_t r, float *dst) {
  int words = (q->k + q->per - 1) / q->per;
  for (int i = 0; i < q->k; i++) {
    int v = field(word(q->words, r * words + i / q->per), i % q->per, q->bits);
    dst[i] = q->scales[r * q->cols + group_of(q, i)] * (float)(v - (1 << (q->bits - 1)));
  }
}

static void scaled_row(const mr_quant *q, int64_t r, float *dst) {
  const float *s = q->scales + r / q->block_n * q->cols;
  for (int i = 0; i < q->k; i++)
    dst[i] *= s[i / q->block_k];
  for (int i = 0; i < q->n_outliers; i++)
    dst[word(q->outlier_columns, i)] = q->outliers[r * q->n_outliers + i];
}

void mr_quant_row(const mr_quant *q, int64_t r, float *dst) {
  switch (q->kind) {
  case MR_QUANT_GPTQ:
    gptq_row(q, r, dst);
    break;
  case MR_QUANT_AWQ:
    awq_row(q, r, dst);
    break;
  case MR_QUANT_PACKED:
    packed_row(q, r, dst);
    break;
  case MR_QUANT_SCALED:
    scaled_row(q, r, dst);
    break;
  }
}

int64_t mr_matrix_source(const mr_matrix *w, int64_t row) {
  return w->first + (w->group ? row / w->group * w->stride + row % w->group : row);
}

void mr_matrix_row(const mr_matrix *w, int64_t row, float *dst) {
  const mr_dtype_info *type = mr_dtype_get(w->dtype);
  int64_t r = mr_matrix_source(w, row);
  if (w->columns)
    for (int i = 0; i < w->k; i++)
      type->to_f32(dst + i,
                   w->data + (uint64_t)i * w->row_bytes + (uint64_t)(r * type->block_bytes), 1);
  else if (!w->quant || w->quant->kind == MR_QUANT_SCALED)
    type->to_f32(dst, w->data + (uint64_t)r * w->row_bytes, w->k);
  if (w->quant)
    mr_quant_row(w->quant, r, dst);
}

void mr_matrix_rows(const mr_matrix *w, int64_t first, int n, float *dst, float *room) {
  if (w->product)
    mr_product_rows(w, first, n, dst, room);
  else
    for (int r = 0; r < n; r++)
      mr_matrix_row(w, first + r, dst + (size_t)r * (size_t)w->k);
}

size_t mr_matrix_room(const mr_matrix *w, int n) {
  return w->product ? mr_product_room(w->product, n) : 0;
}

mr_matrix mr_matrix_part(const mr_matrix *w, int first, int n) {
  mr_matrix part = *w;
  part.n = n;
  part.first += first;
  if (part.bias)
    part.bias += first;
  return part;
}
