/* ref_attn.c: storing keys and values, and attention, in plain C. K and V parts are [32][head_dim].
 * See kernels.h.
 *
 * One query row at a time: blocks of 32 keys in order, with a running maximum and sum (online
 * softmax, Milakov and Gimelshein 2018).
 */
#include <math.h>
#include <string.h>

#include "kernels/dtype.h"
#include "kernels/kvq.h"
#include "kernels/ref/ref.h"

#define BLOCK MR_KV_BLOCK

static void store(uint8_t *part, const float *x, int dim, int slot, mr_kv_type type) {
  for (int d = 0; d < dim; d++) {
    size_t at = (size_t)slot * (size_t)dim + (size_t)d;
    if (type == MR_KV_F32)
      ((float *)(void *)part)[at] = x[d];
    if (type == MR_KV_F16)
      ((uint16_t *)(void *)part)[at] = mr_f32_to_f16(x[d]);
    if (type == MR_KV_BF16)
      ((uint16_t *)(void *)part)[at] = mr_f32_to_bf16(x[d]);
  }
}

/* Returns 0 if a value is not finite. */
static int store_8bit(uint8_t *part, const float *x, int dim, int slot, mr_kv_type type) {
  float max = 0.0f, inverse;
  int finite = 1;
  for (int d = 0; d < dim; d++) {
    finite = finite && isfinite(x[d]);
    max = fabsf(x[d]) > max ? fabsf(x[d]) : max;
  }
  mr_kvq_scale(&mr_kvq_scales(part, dim)[slot], &inverse, finite ? max : 0.0f, type);
  for (int d = 0; d < dim; d++) {
    float y = inverse != 0.0f ? x[d] * inverse : 0.0f;
    part[(size_t)slot * (size_t)dim + (size_t)d] =
        type == MR_KV_INT8 ? (uint8_t)(int8_t)rintf(y) : mr_kvq_fp8(mr_f32_to_f16(y));
  }
  return finite;
}

/* Value d of token `slot` of a K or a V part. */
static float load_q4(const uint8_t *part, int slot, int d, int dim, int is_v) {
  mr_kvq_q4 p = mr_kvq_q4_of(part, dim);
  int g = is_v ? slot * (mr_kvq_width(dim) / 32) + d / 32 : d, i = is_v ? d % 32 : slot;
  int code = p.codes[g * 16 + i % 16] >> (i / 16 * 4) & 15;
  return (float)code * mr_f16_to_f32(p.step[g]) + mr_f16_to_f32(p.least[g]);
}

static float load(const uint8_t *part, int slot, int d, int dim, mr_kv_type type, int is_v) {
  size_t at = (size_t)slot * (size_t)dim + (size_t)d;
  switch (type) {
  case MR_KV_Q4:
    return load_q4(part, slot, d, dim, is_v);
  case MR_KV_F16:
    return mr_f16_to_f32(((const uint16_t *)(const void *)part)[at]);
  case MR_KV_BF16:
    return mr_bf16_to_f32(((const uint16_t *)(const void *)part)[at]);
  case MR_KV_INT8:
    return (float)(int8_t)part[at] * mr_kvq_scales_of(part, dim)[slot];
  case MR_KV_FP8:
    return mr_f16_to_f32((uint16_t)((part[at] & 0x7f) << 7 | (part[at] & 0x80) << 8)) *
           mr_kvq_scales_of(part, dim)[slot];
  default:
    return ((const float *)(const void *)part)[at];
  }
}

static void kv_store(uint8_t *k_part, uint8_t *v_part, const float *k, const float *v, int head_dim,
                     int slot, mr_kv_type type) {
  if (mr_kvq_is_8bit(type)) {
    int k_ok = store_8bit(k_part, k, head_dim, slot, type);
    int v_ok = store_8bit(v_part, v, head_dim, slot, type);
    if (!k_ok || !v_ok)
      mr_kvq_scales(k_part, head_dim)[slot] = NAN;
    return;
  }
  store(k_part, k, head_dim, slot, type);
  store(v_part, v, head_dim, slot, type);
}

static void kv_pack(uint8_t *k_part, uint8_t *v_part, const uint8_t *own, int head_dim,
                    mr_kv_type type) {
  (void)type;
  const uint8_t *own_v = own + mr_kv_part_bytes(MR_KV_OWN_TYPE, head_dim);
  mr_kvq_q4 k = mr_kvq_q4_of(k_part, head_dim), v = mr_kvq_q4_of(v_part, head_dim);
  int groups = mr_kvq_width(head_dim) / 32;
  float x[32];
  for (int d = 0; d < head_dim; d++) {
    for (int t = 0; t < 32; t++)
      x[t] = load(own, t, d, head_dim, MR_KV_OWN_TYPE, 0);
    mr_kvq_q4_pack(&k, d, x);
  }
  for (int g = 0; g < 32 * groups; g++) {
    int t = g / groups, d0 = g % groups * 32;
    for (int i = 0; i < 32; i++)
      x[i] = d0 + i < head_dim ? load(own_v, t, d0 + i, head_dim, MR_KV_OWN_TYPE, 1) : x[0];
    mr_kvq_q4_pack(&v, g, x);
  }
}

static void rotate(float *x, int n) {
  int block = mr_rotate_block(n);
  float scale = 1.0f / sqrtf((float)block);
  for (int h = 1; h < block; h *= 2)
    for (int i = 0; i < n; i++)
      if ((i & h) == 0) {
        float a = x[i], b = x[i + h];
        x[i] = a + b;
        x[i + h] = a - b;
      }
  for (int i = 0; i < n; i++)
    x[i] *= scale;
}

static float score(const mr_attn *a, int head, const float *q, const uint8_t *k_part, int slot,
                   int distance, mr_kv_type type) {
  float dot = 0.0f;
  for (int d = 0; d < a->head_dim; d++)
    dot += q[d] * load(k_part, slot, d, a->head_dim, type, 0);
  float s = dot * a->scale;
  if (a->softcap > 0.0f)
    s = a->softcap * tanhf(s / a->softcap);
  if (a->slopes != NULL)
    s -= a->slopes[head] * (float)distance;
  return s;
}

typedef struct softmax {
  float max, sum;
} softmax;

/* Adds keys k0..k1-1 of the block at k_part to one row. */
static void add_block(const mr_attn *a, int head, int pos, const float *q, float *out,
                      const uint8_t *k_part, int k0, int k1, softmax *row, mr_kv_type type) {
  const uint8_t *v_part = k_part + mr_kv_part_bytes(type, a->head_dim);
  float s[BLOCK], max = row->max;
  int base = k0 / BLOCK * BLOCK;
  for (int j = k0; j < k1; j++) {
    s[j - base] = score(a, head, q, k_part, j - base, pos - j, type);
    if (s[j - base] > max)
      max = s[j - base];
  }
  float shrink = expf(row->max - max);
  row->sum *= shrink;
  row->max = max;
  for (int d = 0; d < a->head_dim; d++)
    out[d] *= shrink;
  for (int j = k0; j < k1; j++) {
    float p = expf(s[j - base] - max);
    row->sum += p;
    for (int d = 0; d < a->head_dim; d++)
      out[d] += p * load(v_part, j - base, d, a->head_dim, type, 1);
  }
}

static void attend(const mr_attn *a, int kv_head, int head, int t) {
  int pos = a->pos0 + t, first = mr_attn_first(a, pos);
  size_t at = (size_t)head * (size_t)a->head_dim;
  size_t part = mr_kv_part_bytes(a->type, a->head_dim);
  const float *q = a->q + (size_t)t * a->q_ld + at;
  float *out = a->out + (size_t)t * a->out_ld + at;
  softmax row = {-INFINITY, 0.0f};
  if (a->sinks != NULL)
    row = (softmax){a->sinks[head], 1.0f};
  memset(out, 0, (size_t)a->head_dim * sizeof(float));
  for (int b = first / BLOCK; b <= pos / BLOCK; b++) {
    int k0 = b * BLOCK < first ? first : b * BLOCK;
    int k1 = (b + 1) * BLOCK > pos + 1 ? pos + 1 : (b + 1) * BLOCK;
    int own = a->own != NULL && b == pos / BLOCK;
    const uint8_t *k = own ? a->own : a->pages[b] + a->layer_offset + 2 * (size_t)kv_head * part;
    add_block(a, head, pos, q, out, k, k0, k1, &row, own ? MR_KV_OWN_TYPE : a->type);
  }
  for (int d = 0; d < a->head_dim; d++)
    out[d] /= row.sum;
}

static void attention(const mr_attn *a, int kv_head, int q0, int q1, void *scratch) {
  (void)scratch;
  int group = a->n_heads / a->n_kv_heads;
  for (int t = q0; t < q1; t++)
    for (int h = kv_head * group; h < (kv_head + 1) * group; h++)
      attend(a, kv_head, h, t);
}

static mr_kv_type kv_type(int head_dim) {
  (void)head_dim;
  return MR_KV_F16;
}

void mr_k_fill_ref_attn(mr_kernels *k) {
  k->kv_type = kv_type;
  k->rotate = rotate;
  k->kv_store = kv_store;
  k->kv_pack = kv_pack;
  k->attention = attention;
}
