/* kvq.h: what all tables share of the packed types of keys and values (kernels.h): codes and
 * scales.
 */
#ifndef MR_KERNELS_KVQ_H
#define MR_KERNELS_KVQ_H

#include <stdint.h>
#include <string.h>

#include "kernels/kernels.h"

#define MR_KVQ_MAX_DIM 1024
#define MR_KVQ_TINY 1e-30f   /* a row below that is zero: the inverse of its scale would overflow */
#define MR_KVQ_FP8_TOP 1.75f /* E4M3's largest number, 448, times 2^-8: see mr_kvq_fp8 */

/* The code of the float16 h, |h| <= 1.75: E4M3 has its exponents, if 2^8 times as much is meant,
 * and three bits of its ten. Below the least normal number: to that or to zero. */
static inline uint8_t mr_kvq_fp8(uint16_t h) {
  unsigned low = h & 0x7fffu;
  low = (low + 0x3fu + (low >> 7 & 1)) >> 7;
  if (low < 8)
    low = low < 4 ? 0 : 8;
  return (uint8_t)(low | (h >> 8 & 0x80u));
}

/* Scales of the 32 tokens, behind their codes. */
static inline float *mr_kvq_scales(uint8_t *part, int head_dim) {
  return (float *)(void *)(part + (size_t)head_dim * MR_KV_BLOCK);
}
static inline const float *mr_kvq_scales_of(const uint8_t *part, int head_dim) {
  return (const float *)(const void *)(part + (size_t)head_dim * MR_KV_BLOCK);
}

static inline int mr_kvq_is_8bit(mr_kv_type type) {
  return type == MR_KV_INT8 || type == MR_KV_FP8;
}

static inline float mr_kvq_top(mr_kv_type type) {
  return type == MR_KV_INT8 ? 127.0f : MR_KVQ_FP8_TOP;
}

/* The scales of a token whose largest values are k_max and v_max; *_inverse multiply its values. A
 * token that is not finite gets a key that no sum survives, so that who sees it knows, and nobody
 * else: a masked key is multiplied by nothing. */
static inline void mr_kvq_scale(float *scale, float *inverse, float max, mr_kv_type type) {
  float top = mr_kvq_top(type);
  int zero = !(max > MR_KVQ_TINY && max <= 3.4e38f);
  *scale = zero ? 0.0f : max / top;
  *inverse = zero ? 0.0f : top / max;
}

#endif
