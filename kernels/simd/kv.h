/* kv.h: storing keys and values, after a vec*.h; see kernels.h. A K part is transposed,
 * [head_dim][32], so that lanes are keys; a V part is [32][head_dim].
 */
#ifndef MR_KERNELS_SIMD_KV_H
#define MR_KERNELS_SIMD_KV_H

#include <math.h>
#include <string.h>

#include "kernels/simd/kvcode.h"
#include "kernels/simd/tile.h"

/* n values into column `slot` of [n][32] */
static void kv_column_f32(float *part, const float *x, int n, int slot) {
  for (int i = 0; i < n; i++)
    part[(size_t)i * BLOCK + (size_t)slot] = x[i];
}

static void kv_column_16(uint16_t *part, const uint16_t *x, int n, int slot) {
  for (int i = 0; i < n; i++)
    part[(size_t)i * BLOCK + (size_t)slot] = x[i];
}

V_INLINE void kv_to_16(uint16_t *dst, const float *x, int n, mr_kv_type type) {
  if (type == MR_KV_F16)
    vstore_f16(dst, vload_n(x, n));
  else
    vstore_bf16(dst, vload_n(x, n));
}

static void kv_column_8(uint8_t *part, const uint8_t *x, int n, int slot) {
  for (int i = 0; i < n; i++)
    part[(size_t)i * BLOCK + (size_t)slot] = x[i];
}

static void kv_store_8bit(uint8_t *k_part, uint8_t *v_part, const float *k, const float *v, int dim,
                          int slot, mr_kv_type type) {
  kv_row r;
  kv_encode_row(&r, k_part, v_part, k, v, dim, slot, type);
  kv_column_8(k_part, r.k, dim, slot);
  memcpy(v_part + (size_t)slot * (size_t)dim, r.v, (size_t)dim);
}

static void simd_kv_store(uint8_t *k_part, uint8_t *v_part, const float *k, const float *v,
                          int head_dim, int slot, mr_kv_type type) {
  if (mr_kvq_is_8bit(type)) {
    kv_store_8bit(k_part, v_part, k, v, head_dim, slot, type);
    return;
  }
  size_t row = (size_t)slot * (size_t)head_dim;
  if (type == MR_KV_F32) {
    kv_column_f32((float *)(void *)k_part, k, head_dim, slot);
    memcpy((float *)(void *)v_part + row, v, (size_t)head_dim * sizeof(float));
    return;
  }
  uint16_t *ks = (uint16_t *)(void *)k_part, *vs = (uint16_t *)(void *)v_part + row;
  for (int d = 0; d < head_dim; d += VL) {
    int n = head_dim - d < VL ? head_dim - d : VL;
    uint16_t h[VL];
    kv_to_16(h, k + d, n, type);
    kv_column_16(ks + (size_t)d * BLOCK, h, n, slot);
    kv_to_16(h, v + d, n, type);
    memcpy(vs + d, h, (size_t)n * sizeof *h);
  }
}

/* ------------------------------------------------------------------ back to float32 */
static void kv_16_to_f32(float *dst, const void *src, int n, mr_kv_type type) {
  int i = 0;
  for (; i + VL <= n; i += VL)
    vstore(dst + i, tile_load(src, (size_t)i, type, VL));
  if (i < n)
    vstore_n(dst + i, tile_load(src, (size_t)i, type, n - i), n - i);
}

/* VL lanes; what lies behind a row's end is read too */
V_INLINE vf kv_decode(const uint8_t *p, mr_kv_type type) {
  return type == MR_KV_INT8 ? vload_i8(p) : vload_fp8(p);
}

/* Values, or codes of 8 bits without their scales. Reads and writes up to VL - 1 more than n. */
V_INLINE void kv_widen(float *to, const uint8_t *from, int n, mr_kv_type type) {
  for (int i = 0; i < n; i += VL) {
    if (mr_kvq_is_8bit(type))
      vstore(to + i, kv_decode(from + i, type));
    else
      vstore(to + i, tile_load(from, (size_t)i, type, VL));
  }
}

/* 32 codes to values */
V_INLINE void kv_decode_q4(vf x[32 / VL], const uint8_t *codes, float step, float least) {
  vload_u4(x, codes);
  UNROLL for (int i = 0; i < 32 / VL; i++) x[i] = vfma(x[i], vset1(step), vset1(least));
}

static void kv_q4_k_to_f32(float *to, const uint8_t *part, int dim) {
  mr_kvq_q4 k = mr_kvq_q4_of(part, dim);
  float step[MR_KVQ_MAX_DIM], least[MR_KVQ_MAX_DIM];
  vf x[32 / VL];
  kv_16_to_f32(step, k.step, mr_kvq_width(dim), MR_KV_F16);
  kv_16_to_f32(least, k.least, mr_kvq_width(dim), MR_KV_F16);
  for (int d = 0; d < dim; d++) {
    kv_decode_q4(x, k.codes + (size_t)d * 16, step[d], least[d]);
    UNROLL for (int i = 0; i < 32 / VL; i++) vstore(to + d * BLOCK + i * VL, x[i]);
  }
}

static void kv_q4_v_to_f32(float *to, const uint8_t *part, int dim, int keys) {
  mr_kvq_q4 v = mr_kvq_q4_of(part, dim);
  int width = mr_kvq_width(dim), groups = width / 32;
  float step[MR_KVQ_MAX_DIM], least[MR_KVQ_MAX_DIM];
  vf x[32 / VL];
  kv_16_to_f32(step, v.step, width, MR_KV_F16);
  kv_16_to_f32(least, v.least, width, MR_KV_F16);
  for (int g = 0; g < keys * groups; g++) {
    int d = g % groups * 32;
    kv_decode_q4(x, v.codes + (size_t)g * 16, step[g], least[g]);
    for (int i = 0; i < 32 / VL && d < dim; i++, d += VL)
      vstore_n(to + g / groups * dim + d, x[i], dim - d < VL ? dim - d : VL);
  }
}

/* A K part to [head_dim][32], or the first `keys` tokens of a V part to [keys][head_dim], as
 * float32; see kv_widen. */
static void kv_flat_to_f32(float *to, const uint8_t *part, int n, mr_kv_type type) {
  switch (type) {
  case MR_KV_F16:
    kv_widen(to, part, n, MR_KV_F16);
    break;
  case MR_KV_BF16:
    kv_widen(to, part, n, MR_KV_BF16);
    break;
  case MR_KV_INT8:
    kv_widen(to, part, n, MR_KV_INT8);
    break;
  case MR_KV_FP8:
    kv_widen(to, part, n, MR_KV_FP8);
    break;
  default:
    kv_widen(to, part, n, MR_KV_F32);
    break;
  }
}

static void kv_k_to_f32(float *to, const uint8_t *part, int dim, mr_kv_type type) {
  if (type == MR_KV_Q4)
    kv_q4_k_to_f32(to, part, dim);
  else
    kv_flat_to_f32(to, part, dim * BLOCK, type);
}

static void kv_v_to_f32(float *to, const uint8_t *part, int dim, int keys, mr_kv_type type) {
  if (type == MR_KV_Q4)
    kv_q4_v_to_f32(to, part, dim, keys);
  else
    kv_flat_to_f32(to, part, dim * keys, type);
}

static void simd_kv_pack(uint8_t *k_part, uint8_t *v_part, const uint8_t *own, int head_dim,
                         mr_kv_type type) {
  const uint16_t *own_k = (const uint16_t *)(const void *)own;
  const uint16_t *own_v = own_k + (size_t)head_dim * BLOCK;
  mr_kvq_q4 k = mr_kvq_q4_of(k_part, head_dim), v = mr_kvq_q4_of(v_part, head_dim);
  int groups = mr_kvq_width(head_dim) / 32;
  float x[32];
  (void)type;
  for (int d = 0; d < head_dim; d++) {
    kv_16_to_f32(x, own_k + (size_t)d * BLOCK, BLOCK, MR_KV_OWN_TYPE);
    mr_kvq_q4_pack(&k, d, x);
  }
  for (int g = 0; g < BLOCK * groups; g++) {
    int d = g % groups * 32, n = head_dim - d < 32 ? head_dim - d : 32;
    kv_16_to_f32(x, own_v + (size_t)(g / groups) * (size_t)head_dim + (size_t)d, n, MR_KV_OWN_TYPE);
    for (int i = n; i < 32; i++)
      x[i] = x[0];
    mr_kvq_q4_pack(&v, g, x);
  }
}

/* ------------------------------------------------------------------ rotation */
/* One block of `nv` vectors: as many equal stages as it has bits, each of sums in the first half
 * and differences in the second of neighbours (constant geometry, Pease 1968). */
V_INLINE void kv_rotate_block(float *x, int nv, int stages) {
  vf t[8], u[8], a, b;
  UNROLL for (int i = 0; i < nv; i++) t[i] = vload(x + i * VL);
  for (int s = 0; s < stages; s++) {
    UNROLL for (int i = 0; i < nv / 2; i++) {
      vunzip(t[2 * i], t[2 * i + 1], &a, &b);
      u[i] = vadd(a, b);
      u[i + nv / 2] = vsub(a, b);
    }
    UNROLL for (int i = 0; i < nv; i++) t[i] = u[i];
  }
  vf scale = vset1(1.0f / sqrtf((float)(nv * VL)));
  UNROLL for (int i = 0; i < nv; i++) vstore(x + i * VL, vmul(t[i], scale));
}

static void kv_rotate_small(float *x, int block) {
  for (int h = 1; h < block; h *= 2)
    for (int i = 0; i < block; i++)
      if ((i & h) == 0) {
        float a = x[i], b = x[i + h];
        x[i] = a + b;
        x[i + h] = a - b;
      }
  float scale = 1.0f / sqrtf((float)block);
  for (int i = 0; i < block; i++)
    x[i] *= scale;
}

static void simd_rotate(float *x, int n) {
  int block = mr_rotate_block(n);
  for (int i = 0; i < n; i += block) {
    if (block == 64)
      kv_rotate_block(x + i, 64 / VL, 6);
    else if (block == 32)
      kv_rotate_block(x + i, 32 / VL, 5);
    else
      kv_rotate_small(x + i, block);
  }
}

#endif
