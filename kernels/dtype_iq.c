/* IQ1, IQ2, IQ3: groups of values are entries of a code book, with signs and scales beside.
 * Layouts: ggml-common.h, block_iq*; all blocks have 256 values. */
#include "kernels/dtype.h"
#include "kernels/dtype_rows.h"

#include <stdbool.h>

#define SUPER 256

static uint32_t load_u32(const uint8_t *p) {
  return (uint32_t)mr_k_load_u16(p) | (uint32_t)mr_k_load_u16(p + 2) << 16;
}

/* Signs come in seven bits; the eighth makes their number even. */
static int even(int seven) {
  int odd = seven ^ seven >> 4;
  odd ^= odd >> 2;
  odd ^= odd >> 1;
  return seven | (odd & 1) << 7;
}

static void put(float *dst, const uint8_t *values, int entry, int bits, int n, int signs,
                float scale) {
  for (int i = 0; i < n; i++) {
    float v = scale * (float)values[entry >> bits * i & ((1 << bits) - 1)];
    dst[i] = signs >> i & 1 ? -v : v;
  }
}

/* Eight values of IQ2: digits 0, 1, 2. */
static void put2(float *dst, int entry, int signs, float scale) {
  static const uint8_t values[4] = {8, 25, 43, 0};
  put(dst, values, entry, 2, 8, signs, scale);
}

static const uint8_t iq3_xxs_values[8] = {4, 12, 20, 28, 36, 44, 52, 62};
static const uint8_t iq3_s_values[8] = {1, 3, 5, 7, 9, 11, 13, 15};

/* IQ2_XXS: f16 d; 8 groups of four entries (a byte each), then signs of four times 7 bits and a
 * scale of 4. */
void mr_k_iq2_xxs_to_f32(float *restrict dst, const void *restrict src, int64_t n) {
  const uint8_t *p = src;
  for (int64_t b = 0; b < n / SUPER; b++, p += 66)
    for (int g = 0; g < 8; g++) {
      const uint8_t *q = p + 2 + 8 * g;
      uint32_t rest = load_u32(q + 4);
      float scale = mr_k_load_f16(p) * (0.5f + (float)(rest >> 28)) * 0.25f;
      for (int i = 0; i < 4; i++, dst += 8)
        put2(dst, mr_k_iq2_xxs_grid[q[i]], even((int)(rest >> 7 * i & 127)), scale);
    }
}

/* IQ2_XS: f16 d; 32 words of an entry's 9 bits and 7 signs; a scale of 4 bits for each two. */
void mr_k_iq2_xs_to_f32(float *restrict dst, const void *restrict src, int64_t n) {
  const uint8_t *p = src;
  for (int64_t b = 0; b < n / SUPER; b++, p += 74)
    for (int i = 0; i < 32; i++, dst += 8) {
      int word = mr_k_load_u16(p + 2 + 2 * i), s = p[66 + i / 4] >> (i / 2 & 1) * 4 & 15;
      float scale = mr_k_load_f16(p) * (0.5f + (float)s) * 0.25f;
      put2(dst, mr_k_iq2_xs_grid[word & 511], even(word >> 9), scale);
    }
}

/* IQ2_S: f16 d; 32 low bytes of entries, 32 bytes of signs, 8 of the entries' high pairs, 8 of
 * scales. */
void mr_k_iq2_s_to_f32(float *restrict dst, const void *restrict src, int64_t n) {
  const uint8_t *p = src;
  for (int64_t b = 0; b < n / SUPER; b++, p += 82)
    for (int i = 0; i < 32; i++, dst += 8) {
      int entry = p[2 + i] | (p[66 + i / 4] >> 2 * (i % 4) & 3) << 8;
      int s = p[74 + i / 4] >> (i / 2 & 1) * 4 & 15;
      float scale = mr_k_load_f16(p) * (0.5f + (float)s) * 0.25f;
      put2(dst, mr_k_iq2_s_grid[entry], p[34 + i], scale);
    }
}

/* IQ3_XXS: f16 d; 64 entries of four values; 8 words of signs and a scale as in IQ2_XXS. */
void mr_k_iq3_xxs_to_f32(float *restrict dst, const void *restrict src, int64_t n) {
  const uint8_t *p = src;
  for (int64_t b = 0; b < n / SUPER; b++, p += 98)
    for (int g = 0; g < 8; g++) {
      uint32_t rest = load_u32(p + 66 + 4 * g);
      float scale = mr_k_load_f16(p) * (0.5f + (float)(rest >> 28)) * 0.5f;
      for (int i = 0; i < 8; i++, dst += 4)
        put(dst, iq3_xxs_values, mr_k_iq3_xxs_grid[p[2 + 8 * g + i]], 3, 4,
            even((int)(rest >> 7 * (i / 2) & 127)) >> 4 * (i & 1), scale);
    }
}

/* IQ3_S: f16 d; 64 low bytes of entries, 8 bytes of their ninth bits, 32 of signs, 4 of scales. */
void mr_k_iq3_s_to_f32(float *restrict dst, const void *restrict src, int64_t n) {
  const uint8_t *p = src;
  for (int64_t b = 0; b < n / SUPER; b++, p += 110)
    for (int i = 0; i < 64; i++, dst += 4) {
      int entry = p[2 + i] | (p[66 + i / 8] >> i % 8 & 1) << 8;
      int s = p[106 + i / 16] >> (i / 8 & 1) * 4 & 15;
      put(dst, iq3_s_values, mr_k_iq3_s_grid[entry], 3, 4, p[74 + i / 2] >> 4 * (i & 1),
          mr_k_load_f16(p) * (float)(1 + 2 * s));
    }
}

/* Eight values of IQ1: -1, 0, 1, all moved by an eighth. */
static void put1(float *dst, int entry, bool down, float scale) {
  for (int i = 0; i < 8; i++)
    dst[i] = scale * ((float)((entry >> 2 * i & 3) - 1) + (down ? -0.125f : 0.125f));
}

/* IQ1_S: f16 d; 32 low bytes of entries; 8 words of four times 3 high bits, a scale of 3, and
 * which way the values move. */
void mr_k_iq1_s_to_f32(float *restrict dst, const void *restrict src, int64_t n) {
  const uint8_t *p = src;
  for (int64_t b = 0; b < n / SUPER; b++, p += 50)
    for (int i = 0; i < 32; i++, dst += 8) {
      int high = mr_k_load_u16(p + 34 + i / 4 * 2);
      int entry = p[2 + i] | (high >> 3 * (i % 4) & 7) << 8;
      put1(dst, mr_k_iq1_grid[entry], high >> 15,
           mr_k_load_f16(p) * (float)(2 * (high >> 12 & 7) + 1));
    }
}

/* IQ1_M: 32 low bytes of entries; 16 bytes of two times 3 high bits and the way; 4 words of four
 * scales of 3 bits, whose highest nibbles together are d. */
void mr_k_iq1_m_to_f32(float *restrict dst, const void *restrict src, int64_t n) {
  const uint8_t *p = src;
  for (int64_t b = 0; b < n / SUPER; b++, p += 56) {
    uint16_t bits = 0;
    for (int i = 0; i < 4; i++)
      bits |= (uint16_t)((mr_k_load_u16(p + 48 + 2 * i) >> 12) << 4 * i);
    for (int i = 0; i < 32; i++, dst += 8) {
      int high = p[32 + i / 2] >> (i & 1) * 4;
      int s = mr_k_load_u16(p + 48 + i / 8 * 2) >> 3 * (i / 2 % 4) & 7;
      put1(dst, mr_k_iq1_grid[p[i] | (high & 7) << 8], high & 8,
           mr_f16_to_f32(bits) * (float)(2 * s + 1));
    }
  }
}
