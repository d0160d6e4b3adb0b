#include "kernels/encode.h"

#include <math.h>
#include <string.h>

#include "kernels/dtype.h"
#include "kernels/encode_fit.h"

static void to_f32(void *dst, const float *src, const float *importance, int64_t n) {
  (void)importance;
  memcpy(dst, src, (size_t)n * sizeof *src);
}

static void to_f16(void *dst, const float *src, const float *importance, int64_t n) {
  uint8_t *p = dst;
  (void)importance;
  for (int64_t i = 0; i < n; i++)
    mr_k_store_u16(p + 2 * i, mr_f32_to_f16(src[i]));
}

static void to_bf16(void *dst, const float *src, const float *importance, int64_t n) {
  uint8_t *p = dst;
  (void)importance;
  for (int64_t i = 0; i < n; i++)
    mr_k_store_u16(p + 2 * i, mr_f32_to_bf16(src[i]));
}

static float inverse(float d) {
  return d != 0 ? 1 / d : 0;
}

static void to_q8_0(void *dst, const float *src, const float *importance, int64_t n) {
  uint8_t *p = dst;
  (void)importance;
  for (int64_t b = 0; b < n / 32; b++, p += 34, src += 32) {
    float most = 0;
    for (int j = 0; j < 32; j++)
      most = fabsf(src[j]) > most ? fabsf(src[j]) : most;
    float d = most / 127, inv = inverse(d);
    mr_k_store_u16(p, mr_k_scale_f16(d));
    for (int j = 0; j < 32; j++)
      p[2 + j] = (uint8_t)(int8_t)roundf(src[j] * inv);
  }
}

/* Nibbles of a block as Q4 and Q5 keep them: value j low, value j + 16 high. */
static void put_nibbles(uint8_t *p, const int *q) {
  for (int j = 0; j < 16; j++)
    p[j] = (uint8_t)((q[j] & 15) | (q[j + 16] & 15) << 4);
}

static void put_fifth(uint8_t *p, const int *q) {
  memset(p, 0, 4);
  for (int j = 0; j < 32; j++)
    p[j / 8] |= (uint8_t)((q[j] >> 4 & 1) << j % 8);
}

/* The scale of Q4_0 and Q5_0: the value furthest from 0 becomes -half. */
static float plain_scale(const float *x, int half) {
  float most = 0;
  for (int j = 0; j < 32; j++)
    most = fabsf(x[j]) > fabsf(most) ? x[j] : most;
  return most / (float)-half;
}

static float fitted(const float *x, const float *importance, int half) {
  float w[32];
  mr_k_fit_weights(w, x, importance, 32, mr_k_mean_square(x, 32));
  return mr_k_fit_scale(x, w, 32, -half, half - 1);
}

/* q of x ~ d * (q - half). */
static void centred(int *q, const float *x, const float *importance, int half, uint8_t *p) {
  float d = importance ? fitted(x, importance, half) : plain_scale(x, half);
  mr_k_store_u16(p, mr_k_scale_f16(d));
  float inv = importance ? inverse(mr_f16_to_f32(mr_k_scale_f16(d))) : inverse(d);
  for (int j = 0; j < 32; j++) {
    float v = x[j] * inv + (float)half + 0.5f;
    q[j] = v <= 0 ? 0 : v >= (float)(2 * half) ? 2 * half - 1 : (int)v;
  }
}

/* q of x ~ d * q + m. */
static void ranged(int *q, const float *x, const float *importance, int levels, uint8_t *p) {
  float lo = x[0], hi = x[0], d;
  for (int j = 1; j < 32; j++) {
    lo = x[j] < lo ? x[j] : lo;
    hi = x[j] > hi ? x[j] : hi;
  }
  if (importance) {
    float w[32], min;
    mr_k_fit_weights(w, x, importance, 32, mr_k_mean_square(x, 32));
    d = mr_f16_to_f32(mr_k_scale_f16(mr_k_fit_scale_min(x, w, 32, levels, 1, &min)));
    lo = mr_f16_to_f32(mr_k_scale_f16(-min));
  } else {
    d = (hi - lo) / (float)levels;
  }
  float inv = inverse(d);
  mr_k_store_u16(p, mr_k_scale_f16(d));
  mr_k_store_u16(p + 2, mr_k_scale_f16(lo));
  for (int j = 0; j < 32; j++) {
    float v = (x[j] - lo) * inv + 0.5f;
    q[j] = v <= 0 ? 0 : v >= (float)(levels + 1) ? levels : (int)v;
  }
}

/* Codes of a block, the fifth bits of Q5 first. Returns where they end. */
static uint8_t *put_codes(uint8_t *p, const int *q, int levels) {
  if (levels == 31) {
    put_fifth(p, q);
    p += 4;
  }
  put_nibbles(p, q);
  return p + 16;
}

static void to_few(int dtype, uint8_t *p, const float *src, const float *importance, int64_t n) {
  int q[32], based, levels = mr_encode_levels(dtype, &based);
  for (int64_t b = 0; b < n / 32; b++, src += 32) {
    const float *weights = importance ? importance + b * 32 : NULL;
    if (based)
      ranged(q, src, weights, levels, p);
    else
      centred(q, src, weights, (levels + 1) / 2, p);
    p = put_codes(p + (based ? 4 : 2), q, levels);
  }
}

static void to_q4_0(void *dst, const float *src, const float *importance, int64_t n) {
  to_few(MR_Q4_0, dst, src, importance, n);
}

static void to_q4_1(void *dst, const float *src, const float *importance, int64_t n) {
  to_few(MR_Q4_1, dst, src, importance, n);
}

static void to_q5_0(void *dst, const float *src, const float *importance, int64_t n) {
  to_few(MR_Q5_0, dst, src, importance, n);
}

static void to_q5_1(void *dst, const float *src, const float *importance, int64_t n) {
  to_few(MR_Q5_1, dst, src, importance, n);
}

/* The E2M1 code of v: the nearest of 0 .5 1 1.5 2 3 4 6 and their negatives, of two equally near
 * the smaller; -0 is not written. */
static int nearest_e2m1(float v) {
  static const float between[7] = {.25f, .75f, 1.25f, 1.75f, 2.5f, 3.5f, 5};
  float a = fabsf(v);
  int i = 0;
  while (i < 7 && a > between[i])
    i++;
  return i && v < 0 ? i + 8 : i;
}

/* The scale is the power of two that brings the largest value to 4 .. 8 (OCP MX, 6.3). */
static void to_mxfp4(void *dst, const float *src, const float *importance, int64_t n) {
  uint8_t *p = dst;
  int q[32];
  (void)importance;
  for (int64_t b = 0; b < n / 32; b++, p += 17, src += 32) {
    float most = 0;
    for (int j = 0; j < 32; j++)
      most = fabsf(src[j]) > most ? fabsf(src[j]) : most;
    int e = most > 0 ? ilogbf(most) - 2 + 127 : 0;
    e = e < 0 ? 0 : e > 254 ? 254 : e;
    for (int j = 0; j < 32; j++)
      q[j] = nearest_e2m1(ldexpf(src[j], 127 - e));
    p[0] = (uint8_t)e;
    put_nibbles(p + 1, q);
  }
}

static const struct type {
  int dtype;
  mr_encoder to;
  mr_encode_steps steps;
} types[] = {{MR_F32, to_f32, {32, 15, 0}},
             {MR_F16, to_f16, {32, 15, 0}},
             {MR_BF16, to_bf16, {32, 15, 0}},
             {MR_Q8_0, to_q8_0, {32, 255, 1}},
             {MR_Q4_0, to_q4_0, {32, 15, 1}},
             {MR_Q4_1, to_q4_1, {32, 15, 0}},
             {MR_Q5_0, to_q5_0, {32, 31, 1}},
             {MR_Q5_1, to_q5_1, {32, 31, 0}},
             {MR_Q2_K, mr_k_encode_q2_k, {16, 3, 0}},
             {MR_Q3_K, mr_k_encode_q3_k, {16, 7, 1}},
             {MR_Q4_K, mr_k_encode_q4_k, {32, 15, 0}},
             {MR_Q5_K, mr_k_encode_q5_k, {32, 31, 0}},
             {MR_Q6_K, mr_k_encode_q6_k, {16, 63, 1}},
             {MR_IQ4_NL, mr_k_encode_iq4_nl, {32, 15, 1}},
             {MR_IQ4_XS, mr_k_encode_iq4_xs, {32, 15, 1}},
             {MR_MXFP4, to_mxfp4, {32, 15, 1}}};

static const struct type *find(int dtype) {
  for (size_t i = 0; i < sizeof types / sizeof *types; i++)
    if (types[i].dtype == dtype)
      return &types[i];
  return NULL;
}

mr_encoder mr_encoder_get(int dtype) {
  const struct type *t = find(dtype);
  return t ? t->to : NULL;
}

mr_encode_steps mr_encode_steps_of(int dtype) {
  const struct type *t = find(dtype);
  return t ? t->steps : (mr_encode_steps){32, 15, 0};
}

int mr_encode_levels(int dtype, int *ranged) {
  *ranged = dtype == MR_Q4_1 || dtype == MR_Q5_1;
  switch (dtype) {
  case MR_Q4_0:
  case MR_Q4_1:
    return 15;
  case MR_Q5_0:
  case MR_Q5_1:
    return 31;
  case MR_Q8_0:
    return 255;
  default:
    return 0;
  }
}

int mr_encode_codes(int dtype, void *dst, const float *scale, const float *base,
                    const uint8_t *codes, int64_t n) {
  int ranged, levels = mr_encode_levels(dtype, &ranged), q[32];
  uint8_t *p = dst;
  for (int64_t b = 0; levels && b < n / 32; b++, codes += 32) {
    mr_k_store_u16(p, mr_k_scale_f16(scale[b]));
    if (ranged)
      mr_k_store_u16(p + 2, mr_k_scale_f16(base[b]));
    p += ranged ? 4 : 2;
    for (int j = 0; j < 32; j++)
      q[j] = codes[j];
    if (levels == 255) {
      for (int j = 0; j < 32; j++)
        p[j] = (uint8_t)(q[j] - 128);
      p += 32;
      continue;
    }
    p = put_codes(p, q, levels);
  }
  return levels != 0;
}
