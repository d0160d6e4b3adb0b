/* dtype_k.c: the types with super-blocks of 256 values and small scales inside, and the 4-bit types
 * whose nibbles index a table. Layouts: ggml-common.h.
 */
#include "kernels/dtype_rows.h"

#include <string.h>

#define SUPER 256

/* Q2_K: 16 bytes of (scale, minimum) nibbles, one a group of 16; 64 bytes of 2-bit values; f16 d,
 * f16 dmin. w = d * scale * q - dmin * minimum. Each 32 bytes hold 128 values: bit pair j of byte l
 * is value 32j + l. */
void mr_k_q2_k_to_f32(float *restrict dst, const void *restrict src, int64_t n) {
  const uint8_t *p = src;
  for (int64_t b = 0; b < n / SUPER; b++, p += 84, dst += SUPER) {
    float d = mr_k_load_f16(p + 80), dmin = mr_k_load_f16(p + 82);
    for (int g = 0; g < 16; g++) {
      const uint8_t *q = p + 16 + (g >> 3) * 32 + (g & 1) * 16;
      int shift = (g >> 1 & 3) * 2;
      float s = d * (float)(p[g] & 15), m = dmin * (float)(p[g] >> 4);
      for (int l = 0; l < 16; l++)
        dst[g * 16 + l] = s * (float)(q[l] >> shift & 3) - m;
    }
  }
}

/* Q3_K: 32 bytes of third bits (bit 4h + j of byte l: value 128h + 32j + l), 64 bytes of 2-bit
 * values as in Q2_K, 12 bytes of 16 six-bit scales (low nibbles in the first 8, high pairs in the
 * last 4), f16 d. w = d * (scale - 32) * (q - 4) */
void mr_k_q3_k_to_f32(float *restrict dst, const void *restrict src, int64_t n) {
  const uint8_t *p = src;
  for (int64_t b = 0; b < n / SUPER; b++, p += 110, dst += SUPER) {
    const uint8_t *sc = p + 96;
    float d = mr_k_load_f16(p + 108);
    for (int g = 0; g < 16; g++) {
      const uint8_t *q = p + 32 + (g >> 3) * 32 + (g & 1) * 16, *h = p + (g & 1) * 16;
      int low = g < 8 ? sc[g] & 15 : sc[g - 8] >> 4, high = sc[8 + (g & 3)] >> (g >> 2) * 2 & 3;
      int shift = (g >> 1 & 3) * 2, bit = g >> 1;
      float s = d * (float)((low | high << 4) - 32);
      for (int l = 0; l < 16; l++)
        dst[g * 16 + l] = s * (float)((q[l] >> shift & 3) + (h[l] >> bit & 1) * 4 - 4);
    }
  }
}

/* Scale and minimum i (0..7) of the 12 bytes that Q4_K and Q5_K pack them into, six bits each. */
static void scale_min(const uint8_t *s, int i, int *scale, int *min) {
  if (i < 4) {
    *scale = s[i] & 63;
    *min = s[i + 4] & 63;
  } else {
    *scale = (s[i + 4] & 15) | (s[i - 4] >> 6) << 4;
    *min = (s[i + 4] >> 4) | (s[i] >> 6) << 4;
  }
}

/* Q4_K: f16 d, f16 dmin, 12 bytes of scales, 128 bytes: each 32 hold 64 values, low nibbles first.
 * w = d * scale * q - dmin * minimum, by groups of 32 */
void mr_k_q4_k_to_f32(float *restrict dst, const void *restrict src, int64_t n) {
  const uint8_t *p = src;
  for (int64_t b = 0; b < n / SUPER; b++, p += 144, dst += SUPER) {
    float d = mr_k_load_f16(p), dmin = mr_k_load_f16(p + 2);
    for (int g = 0; g < 8; g++) {
      const uint8_t *q = p + 16 + (g >> 1) * 32;
      int scale, min, shift = (g & 1) * 4;
      scale_min(p + 4, g, &scale, &min);
      float s = d * (float)scale, m = dmin * (float)min;
      for (int l = 0; l < 32; l++)
        dst[g * 32 + l] = s * (float)(q[l] >> shift & 15) - m;
    }
  }
}

/* Q5_K: as Q4_K, with 32 bytes of fifth bits (bit g of byte l: value 32g + l) before the nibbles.
 */
void mr_k_q5_k_to_f32(float *restrict dst, const void *restrict src, int64_t n) {
  const uint8_t *p = src;
  for (int64_t b = 0; b < n / SUPER; b++, p += 176, dst += SUPER) {
    float d = mr_k_load_f16(p), dmin = mr_k_load_f16(p + 2);
    const uint8_t *h = p + 16;
    for (int g = 0; g < 8; g++) {
      const uint8_t *q = p + 48 + (g >> 1) * 32;
      int scale, min, shift = (g & 1) * 4;
      scale_min(p + 4, g, &scale, &min);
      float s = d * (float)scale, m = dmin * (float)min;
      for (int l = 0; l < 32; l++)
        dst[g * 32 + l] = s * (float)((q[l] >> shift & 15) + (h[l] >> g & 1) * 16) - m;
    }
  }
}

/* Q6_K: 128 bytes of low nibbles, 64 bytes of high pairs, 16 int8 scales (one a group of 16), f16
 * d. Each half holds 128 values: row r of 32 has nibble r / 2 of bytes 32 (r & 1).. and pair r. w =
 * d * scale * (q - 32) */
void mr_k_q6_k_to_f32(float *restrict dst, const void *restrict src, int64_t n) {
  const uint8_t *p = src;
  for (int64_t b = 0; b < n / SUPER; b++, p += 210, dst += SUPER) {
    float d = mr_k_load_f16(p + 208);
    for (int g = 0; g < 16; g++) {
      int half = g >> 3, r = g >> 1 & 3, at = (g & 1) * 16;
      const uint8_t *lo = p + half * 64 + (r & 1) * 32 + at, *hi = p + 128 + half * 32 + at;
      int nibble = (r >> 1) * 4, pair = r * 2;
      float s = d * (float)(int8_t)p[192 + g];
      for (int l = 0; l < 16; l++)
        dst[g * 16 + l] = s * (float)(((lo[l] >> nibble & 15) | (hi[l] >> pair & 3) << 4) - 32);
    }
  }
}

/* Q8_K: f32 d, 256 int8, 16 int16 sums that only dot products use. */
void mr_k_q8_k_to_f32(float *restrict dst, const void *restrict src, int64_t n) {
  const uint8_t *p = src;
  for (int64_t b = 0; b < n / SUPER; b++, p += 292, dst += SUPER) {
    float d;
    memcpy(&d, p, sizeof d);
    for (int l = 0; l < SUPER; l++)
      dst[l] = (float)(int8_t)p[4 + l] * d;
  }
}

static const float iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                     1,    13,   25,  38,  53,  69,  89,  113};
static const float e2m1_values[16] = {0,    .5f,  1,  1.5f,  2,  3,  4,  6,
                                      -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};

/* 2 * half values at dst: the low nibbles of q, then the high ones, through a table. */
static void lookup(float *restrict dst, const uint8_t *restrict q, int half, const float *table,
                   float d) {
  for (int j = 0; j < half; j++) {
    dst[j] = d * table[q[j] & 15];
    dst[j + half] = d * table[q[j] >> 4];
  }
}

/* IQ4_NL: f16 d, 16 bytes. w = d * table[q] */
void mr_k_iq4_nl_to_f32(float *restrict dst, const void *restrict src, int64_t n) {
  const uint8_t *p = src;
  for (int64_t b = 0; b < n / 32; b++, p += 18, dst += 32)
    lookup(dst, p + 2, 16, iq4_values, mr_k_load_f16(p));
}

/* IQ4_XS: f16 d, 16 bits of high pairs and 4 bytes of low nibbles of 8 scales, 128 bytes in groups
 * of 16. w = d * (scale - 32) * table[q], by groups of 32 */
void mr_k_iq4_xs_to_f32(float *restrict dst, const void *restrict src, int64_t n) {
  const uint8_t *p = src;
  for (int64_t b = 0; b < n / SUPER; b++, p += 136, dst += SUPER) {
    float d = mr_k_load_f16(p);
    int high = mr_k_load_u16(p + 2);
    for (int g = 0; g < 8; g++) {
      int scale = (p[4 + g / 2] >> (g & 1) * 4 & 15) | (high >> 2 * g & 3) << 4;
      lookup(dst + g * 32, p + 8 + g * 16, 16, iq4_values, d * (float)(scale - 32));
    }
  }
}

static float pow2_bits(uint32_t bits) {
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

/* MXFP4 (OCP MX): a byte e, scale 2^(e - 127), and 16 bytes of E2M1 values. */
void mr_k_mxfp4_to_f32(float *restrict dst, const void *restrict src, int64_t n) {
  const uint8_t *p = src;
  for (int64_t b = 0; b < n / 32; b++, p += 17, dst += 32) {
    /* half the scale times twice the value, so that e = 255 stays finite; below 2 it is subnormal
     */
    float half =
        p[0] < 2 ? pow2_bits((uint32_t)0x200000 << p[0]) : pow2_bits((uint32_t)(p[0] - 1) << 23);
    for (int j = 0; j < 16; j++) {
      dst[j] = half * (2 * e2m1_values[p[1 + j] & 15]);
      dst[j + 16] = half * (2 * e2m1_values[p[1 + j] >> 4]);
    }
  }
}

/* An unsigned E4M3 byte: bias 7, no infinity, the sign bit ignored; 0x7f (a NaN in the format) is
 * 0. */
static float ue4m3(uint8_t b) {
  int e = b >> 3 & 15, m = b & 7;
  if (b == 0x7f)
    return 0;
  return e ? (float)(8 + m) * pow2_bits((uint32_t)(e + 117) << 23) : (float)m * 0x1p-9f;
}

/* NVFP4: 4 bytes of E4M3 scales, one a group of 16; 32 bytes of E2M1 values, 8 a group, low nibbles
 * first. */
void mr_k_nvfp4_to_f32(float *restrict dst, const void *restrict src, int64_t n) {
  const uint8_t *p = src;
  for (int64_t b = 0; b < n / 64; b++, p += 36, dst += 64)
    for (int g = 0; g < 4; g++)
      lookup(dst + g * 16, p + 4 + g * 8, 8, e2m1_values, ue4m3(p[g]));
}

/* `count` bytes of base-3 digits, the first digit the most significant: digit i of all bytes, then
 * digit i + 1. A byte holds ceil(256 * number / 243), so multiplying by 3 moves the next digit
 * above the byte. */
static void ternary(float *restrict dst, const uint8_t *restrict q, int count, int digits,
                    float d) {
  static const uint8_t pow3[5] = {1, 3, 9, 27, 81};
  for (int i = 0; i < digits; i++)
    for (int l = 0; l < count; l++) {
      uint8_t r = (uint8_t)(q[l] * pow3[i]);
      dst[i * count + l] = (float)((r * 3 >> 8) - 1) * d;
    }
}

/* TQ1_0: 48 bytes of five base-3 digits, 4 bytes of four, f16 d. w = d * (digit - 1) */
void mr_k_tq1_0_to_f32(float *restrict dst, const void *restrict src, int64_t n) {
  const uint8_t *p = src;
  for (int64_t b = 0; b < n / SUPER; b++, p += 54, dst += SUPER) {
    float d = mr_k_load_f16(p + 52);
    ternary(dst, p, 32, 5, d);
    ternary(dst + 160, p + 32, 16, 5, d);
    ternary(dst + 240, p + 48, 4, 4, d);
  }
}

/* TQ2_0: 64 bytes of 2-bit values as in Q2_K, f16 d. w = d * (q - 1) */
void mr_k_tq2_0_to_f32(float *restrict dst, const void *restrict src, int64_t n) {
  const uint8_t *p = src;
  for (int64_t b = 0; b < n / SUPER; b++, p += 66, dst += SUPER) {
    float d = mr_k_load_f16(p + 64);
    for (int g = 0; g < 8; g++)
      for (int l = 0; l < 32; l++)
        dst[g * 32 + l] = (float)((p[(g >> 2) * 32 + l] >> (g & 3) * 2 & 3) - 1) * d;
  }
}
