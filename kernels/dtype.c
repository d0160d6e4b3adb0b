#include "kernels/dtype.h"

#include <math.h>
#include <string.h>

#include "kernels/dtype_rows.h"

static uint32_t bits_of(float f) {
  uint32_t u;
  memcpy(&u, &f, sizeof u);
  return u;
}

static float float_of(uint32_t u) {
  float f;
  memcpy(&f, &u, sizeof f);
  return f;
}

/* Subnormal halves are whole multiples of 2^-24, so the conversion of their mantissa is exact. */
float mr_f16_to_f32(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, exp = (h >> 10) & 31, man = h & 0x3ff;
  uint32_t normal = ((exp == 31 ? 255 : exp + 112) << 23) | man << 13;
  uint32_t small = bits_of((float)(int32_t)man * 0x1p-24f);
  return float_of(sign | (exp ? normal : small));
}

/* Round to nearest, ties to even: the bits cut off are compared with half of the last one kept. */
uint16_t mr_f32_to_f16(float f) {
  uint32_t u = bits_of(f), sign = (u >> 16) & 0x8000, mag = u & 0x7fffffff;
  if (mag > 0x7f800000)
    return (uint16_t)(sign | 0x7e00 | ((mag >> 13) & 0x1ff));
  if (mag >= 0x477ff000) /* 65520 and more round to infinity */
    return (uint16_t)(sign | 0x7c00);
  uint32_t man = mag, cut = 13, bias = (uint32_t)112 << 10;
  if (mag < 0x38800000) { /* below the smallest normal half: count in units of 2^-24 */
    uint32_t shift = 126 - (mag >> 23);
    if (shift > 25)
      return (uint16_t)sign;
    man = (mag & 0x7fffff) | 0x800000;
    cut = shift;
    bias = 0;
  }
  uint32_t kept = man >> cut, rest = man & (((uint32_t)1 << cut) - 1),
           half = (uint32_t)1 << (cut - 1);
  kept += rest > half || (rest == half && (kept & 1));
  return (uint16_t)(sign | (kept - bias));
}

float mr_bf16_to_f32(uint16_t h) {
  return float_of((uint32_t)h << 16);
}

uint16_t mr_f32_to_bf16(float f) {
  uint32_t u = bits_of(f);
  if ((u & 0x7fffffff) > 0x7f800000)
    return (uint16_t)((u >> 16) | 0x40);
  return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

uint16_t mr_k_load_u16(const uint8_t *p) {
  return (uint16_t)(p[0] | p[1] << 8);
}

float mr_k_load_f16(const uint8_t *p) {
  return mr_f16_to_f32(mr_k_load_u16(p));
}

/* `restrict` below is what lets the compiler vectorize: bytes may alias anything else. */
static void f32_rows(float *restrict dst, const void *restrict src, int64_t n) {
  memcpy(dst, src, (size_t)n * sizeof *dst);
}

static void f64_rows(float *restrict dst, const void *restrict src, int64_t n) {
  const uint8_t *p = src;
  for (int64_t i = 0; i < n; i++) {
    double d;
    memcpy(&d, p + 8 * i, sizeof d);
    dst[i] = (float)d;
  }
}

static void f16_rows(float *restrict dst, const void *restrict src, int64_t n) {
  const uint8_t *p = src;
  for (int64_t i = 0; i < n; i++)
    dst[i] = mr_k_load_f16(p + 2 * i);
}

static void bf16_rows(float *restrict dst, const void *restrict src, int64_t n) {
  const uint8_t *p = src;
  for (int64_t i = 0; i < n; i++)
    dst[i] = mr_bf16_to_f32(mr_k_load_u16(p + 2 * i));
}

/* Q4_0: f16 d, 16 bytes; the low nibbles are values 0..15 of the block, the high ones 16..31. w = d
 * * (q - 8) */
static void q4_0_rows(float *restrict dst, const void *restrict src, int64_t n) {
  const uint8_t *p = src;
  for (int64_t b = 0; b < n / 32; b++, p += 18, dst += 32) {
    float d = mr_k_load_f16(p);
    for (int j = 0; j < 16; j++) {
      dst[j] = (float)((p[2 + j] & 15) - 8) * d;
      dst[j + 16] = (float)((p[2 + j] >> 4) - 8) * d;
    }
  }
}

/* Q4_1: f16 d, f16 m, 16 bytes. w = d * q + m */
static void q4_1_rows(float *restrict dst, const void *restrict src, int64_t n) {
  const uint8_t *p = src;
  for (int64_t b = 0; b < n / 32; b++, p += 20, dst += 32) {
    float d = mr_k_load_f16(p), m = mr_k_load_f16(p + 2);
    for (int j = 0; j < 16; j++) {
      dst[j] = (float)(p[4 + j] & 15) * d + m;
      dst[j + 16] = (float)(p[4 + j] >> 4) * d + m;
    }
  }
}

/* The 32 five-bit values of a block: low four bits as in Q4_0, the fifth in bit j of a 32-bit word.
 */
static void five_bits(int *q, const uint8_t *high, const uint8_t *low) {
  uint32_t h;
  memcpy(&h, high, sizeof h);
  for (int j = 0; j < 16; j++) {
    q[j] = (low[j] & 15) | (int)((h >> j & 1) << 4);
    q[j + 16] = (low[j] >> 4) | (int)((h >> (j + 16) & 1) << 4);
  }
}

/* Q5_0: f16 d, 4 bytes of fifth bits, 16 bytes. w = d * (q - 16) */
static void q5_0_rows(float *restrict dst, const void *restrict src, int64_t n) {
  const uint8_t *p = src;
  int q[32];
  for (int64_t b = 0; b < n / 32; b++, p += 22, dst += 32) {
    float d = mr_k_load_f16(p);
    five_bits(q, p + 2, p + 6);
    for (int j = 0; j < 32; j++)
      dst[j] = (float)(q[j] - 16) * d;
  }
}

/* Q5_1: f16 d, f16 m, 4 bytes of fifth bits, 16 bytes. w = d * q + m */
static void q5_1_rows(float *restrict dst, const void *restrict src, int64_t n) {
  const uint8_t *p = src;
  int q[32];
  for (int64_t b = 0; b < n / 32; b++, p += 24, dst += 32) {
    float d = mr_k_load_f16(p), m = mr_k_load_f16(p + 2);
    five_bits(q, p + 4, p + 8);
    for (int j = 0; j < 32; j++)
      dst[j] = (float)q[j] * d + m;
  }
}

/* Q8_0: f16 d, 32 int8. Q8_1 has the f16 sum of the block after d, which only dot products use. */
static void q8_rows(float *restrict dst, const uint8_t *restrict p, int64_t n, int head) {
  for (int64_t b = 0; b < n / 32; b++, p += head + 32, dst += 32) {
    float d = mr_k_load_f16(p);
    for (int j = 0; j < 32; j++)
      dst[j] = (float)(int8_t)p[head + j] * d;
  }
}

static void q8_0_rows(float *restrict dst, const void *restrict src, int64_t n) {
  q8_rows(dst, src, n, 2);
}

static void q8_1_rows(float *restrict dst, const void *restrict src, int64_t n) {
  q8_rows(dst, src, n, 4);
}

/* FP8 E4M3 without infinities (OCP 8-bit floating point): bias 7, 0x7f is NaN. */
static void f8_e4m3_rows(float *restrict dst, const void *restrict src, int64_t n) {
  const uint8_t *p = src;
  for (int64_t i = 0; i < n; i++) {
    int e = p[i] >> 3 & 15, m = p[i] & 7;
    float v = e ? ldexpf((float)(8 + m), e - 10) : ldexpf((float)m, -9);
    if ((p[i] & 0x7f) == 0x7f)
      v = NAN;
    dst[i] = p[i] & 0x80 ? -v : v;
  }
}

static void i8_rows(float *restrict dst, const void *restrict src, int64_t n) {
  const int8_t *p = src;
  for (int64_t i = 0; i < n; i++)
    dst[i] = p[i];
}

static const mr_dtype_info types[] = {
    [MR_F32] = {"F32", 1, 4, f32_rows},
    [MR_F16] = {"F16", 1, 2, f16_rows},
    [MR_Q4_0] = {"Q4_0", 32, 18, q4_0_rows},
    [MR_Q4_1] = {"Q4_1", 32, 20, q4_1_rows},
    [MR_Q5_0] = {"Q5_0", 32, 22, q5_0_rows},
    [MR_Q5_1] = {"Q5_1", 32, 24, q5_1_rows},
    [MR_Q8_0] = {"Q8_0", 32, 34, q8_0_rows},
    [MR_Q8_1] = {"Q8_1", 32, 36, q8_1_rows},
    [MR_Q2_K] = {"Q2_K", 256, 84, mr_k_q2_k_to_f32},
    [MR_Q3_K] = {"Q3_K", 256, 110, mr_k_q3_k_to_f32},
    [MR_Q4_K] = {"Q4_K", 256, 144, mr_k_q4_k_to_f32},
    [MR_Q5_K] = {"Q5_K", 256, 176, mr_k_q5_k_to_f32},
    [MR_Q6_K] = {"Q6_K", 256, 210, mr_k_q6_k_to_f32},
    [MR_Q8_K] = {"Q8_K", 256, 292, mr_k_q8_k_to_f32},
    [MR_IQ2_XXS] = {"IQ2_XXS", 256, 66, mr_k_iq2_xxs_to_f32},
    [MR_IQ2_XS] = {"IQ2_XS", 256, 74, mr_k_iq2_xs_to_f32},
    [MR_IQ3_XXS] = {"IQ3_XXS", 256, 98, mr_k_iq3_xxs_to_f32},
    [MR_IQ1_S] = {"IQ1_S", 256, 50, mr_k_iq1_s_to_f32},
    [MR_IQ4_NL] = {"IQ4_NL", 32, 18, mr_k_iq4_nl_to_f32},
    [MR_IQ3_S] = {"IQ3_S", 256, 110, mr_k_iq3_s_to_f32},
    [MR_IQ2_S] = {"IQ2_S", 256, 82, mr_k_iq2_s_to_f32},
    [MR_IQ4_XS] = {"IQ4_XS", 256, 136, mr_k_iq4_xs_to_f32},
    [MR_I8] = {"I8", 1, 1, i8_rows},
    [MR_I16] = {"I16", 1, 2, NULL},
    [MR_I32] = {"I32", 1, 4, NULL},
    [MR_I64] = {"I64", 1, 8, NULL},
    [MR_F64] = {"F64", 1, 8, f64_rows},
    [MR_IQ1_M] = {"IQ1_M", 256, 56, mr_k_iq1_m_to_f32},
    [MR_BF16] = {"BF16", 1, 2, bf16_rows},
    [MR_TQ1_0] = {"TQ1_0", 256, 54, mr_k_tq1_0_to_f32},
    [MR_TQ2_0] = {"TQ2_0", 256, 66, mr_k_tq2_0_to_f32},
    [MR_MXFP4] = {"MXFP4", 32, 17, mr_k_mxfp4_to_f32},
    [MR_NVFP4] = {"NVFP4", 64, 36, mr_k_nvfp4_to_f32},
    [MR_F8_E4M3] = {"F8_E4M3", 1, 1, f8_e4m3_rows},
    [MR_U8] = {"U8", 1, 1, NULL},
};

const mr_dtype_info *mr_dtype_get(int dtype) {
  static const mr_dtype_info none = {NULL, 0, 0, NULL};
  return dtype >= 0 && dtype < (int)(sizeof types / sizeof *types) ? &types[dtype] : &none;
}

uint64_t mr_dtype_bytes(int dtype, uint64_t n) {
  const mr_dtype_info *t = mr_dtype_get(dtype);
  if (!t->name || n % (uint64_t)t->block)
    return 0;
  uint64_t blocks = n / (uint64_t)t->block;
  return blocks > UINT64_MAX / (uint64_t)t->block_bytes ? 0 : blocks * (uint64_t)t->block_bytes;
}
