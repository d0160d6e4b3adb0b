/* kvq.h: what all tables share of the packed types of keys and values (kernels.h): codes and
 * scales.
 */
#ifndef MR_KERNELS_KVQ_H
#define MR_KERNELS_KVQ_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels/dtype.h"
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

/* ------------------------------------------------------------------ q4 */
/* 32 values are 16 bytes: value i in the low half of byte i, value i + 16 in its high half. A K
 * part has the bytes of each channel, a V part those of each token and each 32 channels; behind
 * them are float16 steps, then as many float16 least values. */

static inline int mr_kvq_width(int head_dim) { /* rounded up to 32 */
  return (head_dim + 31) & ~31;
}

typedef struct mr_kvq_q4 { /* parts by name; [n] groups of 32 values, n = width */
  uint8_t *codes;          /* [n][16] */
  uint16_t *step, *least;  /* [n] */
} mr_kvq_q4;

static inline mr_kvq_q4 mr_kvq_q4_of(const uint8_t *part, int head_dim) {
  size_t n = (size_t)mr_kvq_width(head_dim);
  uint8_t *p = (uint8_t *)(uintptr_t)part;
  return (mr_kvq_q4){p, (uint16_t *)(void *)(p + 16 * n), (uint16_t *)(void *)(p + 18 * n)};
}

/* Group g of x[32], all finite as float16; else its step is NaN. */
static inline void mr_kvq_q4_pack(const mr_kvq_q4 *to, int g, const float *x) {
  float least = x[0], most = x[0], sum = 0.0f;
  for (int i = 0; i < 32; i++) {
    least = x[i] < least ? x[i] : least;
    most = x[i] > most ? x[i] : most;
    sum += x[i] - x[i];
  }
  to->least[g] = mr_f32_to_f16(least);
  to->step[g] = mr_f32_to_f16(sum == 0.0f ? (most - least) / 15.0f : sum);
  float step = mr_f16_to_f32(to->step[g]), from = mr_f16_to_f32(to->least[g]);
  uint8_t code[32];
  for (int i = 0; i < 32; i++) {
    float c = step > 0.0f ? rintf((x[i] - from) / step) : 0.0f;
    code[i] = (uint8_t)(c > 0.0f ? c < 15.0f ? c : 15.0f : 0.0f);
  }
  for (int i = 0; i < 16; i++)
    to->codes[g * 16 + i] = (uint8_t)(code[i] | code[i + 16] << 4);
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
