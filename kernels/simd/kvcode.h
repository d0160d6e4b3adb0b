/* kvcode.h: a token's keys and values as codes of 8 bits, after a vec*.h; see kernels/kvq.h. */
#ifndef MR_KERNELS_SIMD_KVCODE_H
#define MR_KERNELS_SIMD_KVCODE_H

#include <math.h>
#include <string.h>

#include "kernels/kvq.h"

#define BLOCK MR_KV_BLOCK

/* max|x|; -1 if a value is not finite */
V_INLINE float kv_max(const float *x, int n) {
  vf max = vzero();
  uint32_t bad = 0;
  for (int d = 0; d < n; d += VL) {
    vf v = vabs(vload_n(x + d, n - d < VL ? n - d : VL));
    bad |= vbad(v);
    max = vmax(max, v);
  }
  return bad ? -1.0f : vreduce_max(max);
}

/* Codes of n values, and up to VL - 1 zeros; returns their scale. */
V_INLINE float kv_encode(uint8_t *to, const float *x, int n, float max, mr_kv_type type) {
  float scale, inverse;
  mr_kvq_scale(&scale, &inverse, max, type);
  if (inverse == 0.0f) {
    memset(to, 0, (size_t)n);
    return scale;
  }
  for (int d = 0; d < n; d += VL) {
    vf y = vmul(vload_n(x + d, n - d < VL ? n - d : VL), vset1(inverse));
    uint16_t h[VL];
    if (type == MR_KV_INT8) {
      vstore_i8(to + d, y);
      continue;
    }
    vstore_f16(h, y);
    for (int i = 0; i < VL; i++)
      to[d + i] = mr_kvq_fp8(h[i]);
  }
  return scale;
}

typedef struct kv_row { /* a token of one head, encoded */
  uint8_t k[MR_KVQ_MAX_DIM + VL], v[MR_KVQ_MAX_DIM + VL];
} kv_row;

/* Slot 0 clears the scales: slots not stored yet are read, and must not be NaN. */
V_INLINE void kv_encode_row(kv_row *r, uint8_t *k_part, uint8_t *v_part, const float *k,
                            const float *v, int dim, int slot, mr_kv_type type) {
  float *k_scale = mr_kvq_scales(k_part, dim), *v_scale = mr_kvq_scales(v_part, dim);
  float k_max = kv_max(k, dim), v_max = kv_max(v, dim);
  if (slot == 0) {
    memset(k_scale, 0, BLOCK * sizeof *k_scale);
    memset(v_scale, 0, BLOCK * sizeof *v_scale);
  }
  k_scale[slot] = kv_encode(r->k, k, dim, k_max, type);
  v_scale[slot] = kv_encode(r->v, v, dim, v_max, type);
  if (k_max < 0 || v_max < 0)
    k_scale[slot] = NAN;
}

#endif
