/* Blocks of 256 in groups: each group's scale is fitted, all are rounded to multiples of one f16,
 * then the values are rounded with the scales as they will be read. Layouts: dtype_k.c. */
#include <math.h>
#include <string.h>

#include "kernels/dtype.h"
#include "kernels/encode_fit.h"

#define SUPER 256
#define MAX_GROUPS 16

typedef struct block { /* one block while it is encoded */
  int groups, size;    /* of them, and values in one */
  float w[SUPER];
  uint8_t q[SUPER];
  float d, dmin;
  uint16_t d16, dmin16;
  int scale[MAX_GROUPS], min[MAX_GROUPS];
} block;

static void weigh(block *b, const float *x, const float *importance) {
  mr_k_fit_weights(b->w, x, importance, SUPER, mr_k_mean_square(x, SUPER));
}

/* ------------------------------------------------------------------ scale and minimum */

static float error_min(const float *x, const float *w, int n, float s, float m, int levels) {
  float inv = s > 0 ? 1 / s : 0, sum = 0;
  for (int i = 0; i < n; i++) {
    float e = x[i] - (s * (float)mr_k_clamp_round((x[i] + m) * inv, 0, levels) - m);
    sum += w[i] * e * e;
  }
  return sum;
}

/* The best whole scale and minimum near the rounded ones. */
static void polish_min(block *b, int g, const float *x, int levels, int top) {
  const float *w = b->w + g * b->size;
  float best = INFINITY;
  int s0 = b->scale[g], m0 = b->min[g], at[5][2], n = 0;
  at[n][0] = s0, at[n++][1] = m0;
  for (int s = s0 - 1; s <= s0 + 1; s++)
    for (int m = m0 - 1; m <= m0 + 1; m++)
      /* the groups that d and dmin were made for keep theirs, so that both are found again */
      if ((s != s0) != (m != m0) && s >= 0 && m >= 0 && s <= top && m <= top &&
          (s0 < top || s == s0) && (m0 < top || m == m0))
        at[n][0] = s, at[n++][1] = m;
  for (int i = 0; i < n; i++) {
    float e = error_min(x, w, b->size, b->d * (float)at[i][0], b->dmin * (float)at[i][1], levels);
    if (e < best) {
      best = e;
      b->scale[g] = at[i][0];
      b->min[g] = at[i][1];
    }
  }
}

/* Fills the block for x ~ d * scale * q - dmin * min: q up to `levels`, scales up to `top`. */
static void with_min(block *b, const float *x, const float *importance, int levels, int top) {
  float s[MAX_GROUPS], m[MAX_GROUPS], most_s = 0, most_m = 0;
  weigh(b, x, importance);
  for (int g = 0; g < b->groups; g++) {
    int at = g * b->size;
    s[g] = mr_k_fit_scale_min(x + at, b->w + at, b->size, levels, 0, &m[g]);
    most_s = s[g] > most_s ? s[g] : most_s;
    most_m = m[g] > most_m ? m[g] : most_m;
  }
  b->d16 = mr_k_scale_f16(most_s / (float)top);
  b->dmin16 = mr_k_scale_f16(most_m / (float)top);
  b->d = mr_f16_to_f32(b->d16);
  b->dmin = mr_f16_to_f32(b->dmin16);
  for (int g = 0; g < b->groups; g++) {
    const float *y = x + g * b->size;
    b->scale[g] = b->d > 0 ? mr_k_clamp_round(s[g] / b->d, 0, top) : 0;
    b->min[g] = b->dmin > 0 ? mr_k_clamp_round(m[g] / b->dmin, 0, top) : 0;
    polish_min(b, g, y, levels, top);
    float step = b->d * (float)b->scale[g], low = b->dmin * (float)b->min[g];
    for (int i = 0; i < b->size; i++)
      b->q[g * b->size + i] =
          step > 0 ? (uint8_t)mr_k_clamp_round((y[i] + low) / step, 0, levels) : 0;
  }
}

/* Two bits of each value: bit pair j of byte l of each 32 bytes is value 32j + l. */
static void put_pairs(uint8_t *p, const uint8_t *q) {
  for (int h = 0; h < 2; h++)
    for (int l = 0; l < 32; l++) {
      const uint8_t *v = q + h * 128 + l;
      p[h * 32 + l] =
          (uint8_t)((v[0] & 3) | (v[32] & 3) << 2 | (v[64] & 3) << 4 | (v[96] & 3) << 6);
    }
}

void mr_k_encode_q2_k(void *dst, const float *src, const float *importance, int64_t n) {
  uint8_t *p = dst;
  block b = {.groups = 16, .size = 16};
  for (int64_t at = 0; at < n; at += SUPER, p += 84) {
    with_min(&b, src + at, importance ? importance + at : NULL, 3, 15);
    for (int g = 0; g < 16; g++)
      p[g] = (uint8_t)(b.scale[g] | b.min[g] << 4);
    put_pairs(p + 16, b.q);
    mr_k_store_u16(p + 80, b.d16);
    mr_k_store_u16(p + 82, b.dmin16);
  }
}

/* Eight scales and minima of six bits in 12 bytes. */
static void put_scales(uint8_t *p, const block *b) {
  for (int g = 0; g < 4; g++) {
    int s = b->scale[g + 4], m = b->min[g + 4];
    p[g] = (uint8_t)(b->scale[g] | (s >> 4) << 6);
    p[g + 4] = (uint8_t)(b->min[g] | (m >> 4) << 6);
    p[g + 8] = (uint8_t)((s & 15) | (m & 15) << 4);
  }
}

/* Low nibbles: each 32 bytes hold two groups of 32. */
static void put_nibbles(uint8_t *p, const uint8_t *q) {
  for (int g = 0; g < 4; g++)
    for (int l = 0; l < 32; l++)
      p[g * 32 + l] = (uint8_t)((q[g * 64 + l] & 15) | (q[g * 64 + 32 + l] & 15) << 4);
}

void mr_k_encode_q4_k(void *dst, const float *src, const float *importance, int64_t n) {
  uint8_t *p = dst;
  block b = {.groups = 8, .size = 32};
  for (int64_t at = 0; at < n; at += SUPER, p += 144) {
    with_min(&b, src + at, importance ? importance + at : NULL, 15, 63);
    mr_k_store_u16(p, b.d16);
    mr_k_store_u16(p + 2, b.dmin16);
    put_scales(p + 4, &b);
    put_nibbles(p + 16, b.q);
  }
}

void mr_k_encode_q5_k(void *dst, const float *src, const float *importance, int64_t n) {
  uint8_t *p = dst;
  block b = {.groups = 8, .size = 32};
  for (int64_t at = 0; at < n; at += SUPER, p += 176) {
    with_min(&b, src + at, importance ? importance + at : NULL, 31, 63);
    mr_k_store_u16(p, b.d16);
    mr_k_store_u16(p + 2, b.dmin16);
    put_scales(p + 4, &b);
    memset(p + 16, 0, 32);
    for (int i = 0; i < SUPER; i++)
      p[16 + i % 32] |= (uint8_t)((b.q[i] >> 4) << i / 32);
    put_nibbles(p + 48, b.q);
  }
}

/* ------------------------------------------------------------------ scale alone */

/* Values of a group as they are read with step s: whole numbers, or the table's where hi is 0. */
typedef struct levels {
  int lo, hi;   /* of the values; 0, 0: the table of IQ4 */
  int min, max; /* of the scales */
} levels;

static const float iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                     1,    13,   25,  38,  53,  69,  89,  113};

static int code_of(const levels *l, float v) {
  return l->hi ? mr_k_clamp_round(v, l->lo, l->hi) : mr_k_nearest_iq4(v);
}

static float error_plain(const float *x, const float *w, int n, float s, const levels *l) {
  float inv = s != 0 ? 1 / s : 0, sum = 0;
  for (int i = 0; i < n; i++) {
    int c = code_of(l, x[i] * inv);
    float e = x[i] - s * (l->hi ? (float)c : iq4_values[c]);
    sum += w[i] * e * e;
  }
  return sum;
}

static void polish(block *b, int g, const float *x, const levels *l) {
  const float *w = b->w + g * b->size;
  int s0 = b->scale[g];
  float best = error_plain(x, w, b->size, b->d * (float)s0, l);
  for (int s = s0 - 1; s <= s0 + 1; s += 2) {
    /* the group that d was made for keeps its scale, so that d is found again */
    if (s < l->min || s > l->max || s0 == l->min)
      continue;
    float e = error_plain(x, w, b->size, b->d * (float)s, l);
    if (e < best) {
      best = e;
      b->scale[g] = s;
    }
  }
}

/* Fills the block for x ~ d * scale * q; q holds codes from 0 on. */
static void without_min(block *b, const float *x, const float *importance, const levels *l) {
  float s[MAX_GROUPS], most = 0;
  weigh(b, x, importance);
  for (int g = 0; g < b->groups; g++) {
    const float *y = x + g * b->size, *w = b->w + g * b->size;
    s[g] = l->hi ? mr_k_fit_scale(y, w, b->size, l->lo, l->hi) : mr_k_fit_table(y, w, b->size);
    most = fabsf(s[g]) > fabsf(most) ? s[g] : most;
  }
  b->d16 = mr_k_scale_f16(most / (float)l->min);
  b->d = mr_f16_to_f32(b->d16);
  for (int g = 0; g < b->groups; g++) {
    const float *y = x + g * b->size;
    b->scale[g] = b->d != 0 ? mr_k_clamp_round(s[g] / b->d, l->min, l->max) : 0;
    polish(b, g, y, l);
    float step = b->d * (float)b->scale[g], inv = step != 0 ? 1 / step : 0;
    for (int i = 0; i < b->size; i++)
      b->q[g * b->size + i] = (uint8_t)(code_of(l, y[i] * inv) - l->lo);
  }
}

void mr_k_encode_q3_k(void *dst, const float *src, const float *importance, int64_t n) {
  static const levels l = {-4, 3, -32, 31};
  uint8_t *p = dst;
  block b = {.groups = 16, .size = 16};
  for (int64_t at = 0; at < n; at += SUPER, p += 110) {
    without_min(&b, src + at, importance ? importance + at : NULL, &l);
    memset(p, 0, 32);
    for (int i = 0; i < SUPER; i++)
      p[i % 32] |= (uint8_t)((b.q[i] >> 2) << i / 32);
    put_pairs(p + 32, b.q);
    memset(p + 96, 0, 12);
    for (int g = 0; g < 16; g++) {
      int s = b.scale[g] + 32;
      p[96 + g % 8] |= (uint8_t)((s & 15) << (g < 8 ? 0 : 4));
      p[104 + g % 4] |= (uint8_t)((s >> 4) << g / 4 * 2);
    }
    mr_k_store_u16(p + 108, b.d16);
  }
}

void mr_k_encode_q6_k(void *dst, const float *src, const float *importance, int64_t n) {
  static const levels l = {-32, 31, -128, 127};
  uint8_t *p = dst;
  block b = {.groups = 16, .size = 16};
  for (int64_t at = 0; at < n; at += SUPER, p += 210) {
    without_min(&b, src + at, importance ? importance + at : NULL, &l);
    for (int h = 0; h < 2; h++)
      for (int i = 0; i < 32; i++) {
        const uint8_t *q = b.q + h * 128 + i;
        p[h * 64 + i] = (uint8_t)((q[0] & 15) | (q[64] & 15) << 4);
        p[h * 64 + 32 + i] = (uint8_t)((q[32] & 15) | (q[96] & 15) << 4);
        p[128 + h * 32 + i] =
            (uint8_t)(q[0] >> 4 | (q[32] >> 4) << 2 | (q[64] >> 4) << 4 | (q[96] >> 4) << 6);
      }
    for (int g = 0; g < 16; g++)
      p[192 + g] = (uint8_t)(int8_t)b.scale[g];
    mr_k_store_u16(p + 208, b.d16);
  }
}

/* Values j and j + 16 of a group of 32 share a byte. */
static void put_codes(uint8_t *p, const uint8_t *q) {
  for (int j = 0; j < 16; j++)
    p[j] = (uint8_t)(q[j] | q[j + 16] << 4);
}

void mr_k_encode_iq4_nl(void *dst, const float *src, const float *importance, int64_t n) {
  uint8_t *p = dst, q[32];
  float w[32];
  for (int64_t at = 0; at < n; at += 32, p += 18) {
    const float *x = src + at;
    mr_k_fit_weights(w, x, importance ? importance + at : NULL, 32, mr_k_mean_square(x, 32));
    uint16_t d16 = mr_k_scale_f16(mr_k_fit_table(x, w, 32));
    float d = mr_f16_to_f32(d16), inv = d != 0 ? 1 / d : 0;
    for (int j = 0; j < 32; j++)
      q[j] = (uint8_t)mr_k_nearest_iq4(x[j] * inv);
    mr_k_store_u16(p, d16);
    put_codes(p + 2, q);
  }
}

void mr_k_encode_iq4_xs(void *dst, const float *src, const float *importance, int64_t n) {
  static const levels l = {0, 0, -32, 31};
  uint8_t *p = dst;
  block b = {.groups = 8, .size = 32};
  for (int64_t at = 0; at < n; at += SUPER, p += 136) {
    without_min(&b, src + at, importance ? importance + at : NULL, &l);
    int high = 0;
    memset(p + 4, 0, 4);
    for (int g = 0; g < 8; g++) {
      int s = b.scale[g] + 32;
      p[4 + g / 2] |= (uint8_t)((s & 15) << g % 2 * 4);
      high |= (s >> 4) << 2 * g;
      put_codes(p + 8 + g * 16, b.q + g * 32);
    }
    mr_k_store_u16(p, b.d16);
    mr_k_store_u16(p + 2, (uint16_t)high);
  }
}
