/* avx512_i8.c: the int8 GEMM with VNNI: packing and the register tiles. Layouts and arithmetic:
 * avx512_i8.h. */
#include "kernels/avx512/avx512_i8.h"

#include <math.h>
#include <string.h>

#include "kernels/avx512/avx512.h"
#include "kernels/ref/ref.h"

#define STEPS (GROUP / 4)
#define AMX_MIN_ROWS 5

static int groups_of(int k) {
  return (k + GROUP - 1) / GROUP;
}

static size_t panel_bytes(int k) {
  return (size_t)groups_of(k) * 2 * GROUP_BYTES;
}

static size_t row_bytes(int k) {
  return ((size_t)groups_of(k) * (GROUP + 8) + 63) / 64 * 64;
}

/* ------------------------------------------------------------------ packing */
/* partner + v, or partner - v in the lanes where plus holds -1: a product with 1 is exact */
#define BUTTERFLY(v, partner, plus) _mm512_fmadd_ps(v, plus, partner)

/* 1, and -1 in the lanes of mask */
INLINE __m512 ones_but(__mmask16 mask) {
  return _mm512_mask_blend_ps(mask, _mm512_set1_ps(1.0f), _mm512_set1_ps(-1.0f));
}

/* Group g of a row: signs, zeros past k, Hadamard transform over 64 values. `whole` (a constant):
 * it lies before k. */
INLINE void rotate(__m512 v[4], const float *x, int k, int g, int whole) {
  uint64_t signs = mr_i8_signs(g);
  const __m512 minus = _mm512_set1_ps(-0.0f);
  const __m512 odd1 = ones_but(0xaaaa), odd2 = ones_but(0xcccc);
  const __m512 odd4 = ones_but(0xf0f0), odd8 = ones_but(0xff00);
  UNROLL for (int j = 0; j < 4; j++) {
    int left = whole ? 16 : k - g * GROUP - j * 16;
    __mmask16 in = left >= 16 ? 0xffff : left <= 0 ? 0 : (__mmask16)((1u << left) - 1);
    __m512 a = _mm512_maskz_loadu_ps(in, x + g * GROUP + j * 16);
    a = _mm512_mask_xor_ps(a, (__mmask16)(signs >> (16 * j)), a, minus);
    a = BUTTERFLY(a, _mm512_permute_ps(a, 0xb1), odd1);
    a = BUTTERFLY(a, _mm512_permute_ps(a, 0x4e), odd2);
    a = BUTTERFLY(a, _mm512_shuffle_f32x4(a, a, 0xb1), odd4);
    v[j] = BUTTERFLY(a, _mm512_shuffle_f32x4(a, a, 0x4e), odd8);
  }
  __m512 a = _mm512_add_ps(v[0], v[1]), b = _mm512_sub_ps(v[0], v[1]);
  __m512 c = _mm512_add_ps(v[2], v[3]), d = _mm512_sub_ps(v[2], v[3]);
  v[0] = _mm512_add_ps(a, c), v[1] = _mm512_add_ps(b, d);
  v[2] = _mm512_sub_ps(a, c), v[3] = _mm512_sub_ps(b, d);
}

/* Largest magnitude in each lane as bits: as integers, so that a NaN is the largest of all. */
INLINE __m512i largest_in(const __m512 v[4]) {
  const __m512i abs = _mm512_set1_epi32(0x7fffffff);
  __m512i m = _mm512_setzero_si512();
  UNROLL for (int j = 0; j < 4; j++) m =
      _mm512_max_epu32(m, _mm512_and_si512(_mm512_castps_si512(v[j]), abs));
  return m;
}

/* Written as asm with its operand in and out: intrinsics make gcc 12 spill whole tiles. */
INLINE __m512i dot4(__m512i sum, __m512i w, __m512i a) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(a));
  return sum;
}

/* 64 values to int8 at q; returns sums of them. */
INLINE __m512i quantize(int8_t *q, const float v[GROUP], float inverse) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512 s = _mm512_set1_ps(inverse);
  __m512i i[4];
  UNROLL for (int j = 0; j < 4; j++) {
    i[j] = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(v + 16 * j), s));
  }
  __m512i b = _mm512_packs_epi16(_mm512_packs_epi32(i[0], i[1]), _mm512_packs_epi32(i[2], i[3]));
  b = _mm512_permutexvar_epi32(order, b); /* the packs worked in 128-bit lanes */
  _mm512_storeu_si512(q, b);
  return dot4(_mm512_setzero_si512(), _mm512_set1_epi8(1), b);
}

/* Four reductions at once: lane i is OP over the lanes of v[i]. */
#define REDUCE_FOUR(OP, v)                                                                         \
  __m512i lo = OP(_mm512_shuffle_i32x4(v[0], v[1], 0x44), _mm512_shuffle_i32x4(v[0], v[1], 0xee)); \
  __m512i hi = OP(_mm512_shuffle_i32x4(v[2], v[3], 0x44), _mm512_shuffle_i32x4(v[2], v[3], 0xee)); \
  __m512i all = OP(_mm512_shuffle_i32x4(lo, hi, 0x88), _mm512_shuffle_i32x4(lo, hi, 0xdd));        \
  all = OP(all, _mm512_shuffle_epi32(all, 0x4e));                                                  \
  all = OP(all, _mm512_shuffle_epi32(all, 0xb1));                                                  \
  return _mm512_castsi512_si128(_mm512_permutexvar_epi32(_mm512_set4_epi32(12, 8, 4, 0), all))

INLINE __m128i max_of_four(const __m512i v[4]) {
  REDUCE_FOUR(_mm512_max_epu32, v);
}

INLINE __m128i sum_of_four(const __m512i v[4]) {
  REDUCE_FOUR(_mm512_add_epi32, v);
}

#define CHUNK 16 /* groups packed at once: a multiple of 4 */

typedef struct chunk {
  _Alignas(64) float v[CHUNK][GROUP]; /* rotated */
  __m512i lanes[CHUNK];               /* of each group: to be reduced */
  float scale[CHUNK], inverse[CHUNK]; /* 0 for zeros; NaN and 0 where not finite */
  int32_t sum[CHUNK];
} chunk;

/* Three passes over n groups, so that no group waits for the reductions and divisions of the one
 * before it. */
static void quantize_chunk(chunk *c, int8_t *q, const float *x, int k, int g, int n) {
  for (int i = 0; i < n; i++) {
    __m512 v[4];
    if ((g + i + 1) * GROUP <= k)
      rotate(v, x, k, g + i, 1);
    else
      rotate(v, x, k, g + i, 0);
    UNROLL for (int j = 0; j < 4; j++) _mm512_store_ps(c->v[i] + 16 * j, v[j]);
    c->lanes[i] = largest_in(v);
  }
  for (int i = n; i % 4 != 0; i++)
    c->lanes[i] = _mm512_setzero_si512();
  for (int i = 0; i < n; i += 4) {
    __m128i bits = max_of_four(c->lanes + i);
    __m128 amax = _mm_castsi128_ps(bits), most = _mm_set1_ps(127.0f);
    __mmask8 bad = _mm_cmpge_epu32_mask(bits, _mm_set1_epi32(0x7f800000));
    __mmask8 on = _mm_mask_cmp_ps_mask((__mmask8)~bad, amax, _mm_set1_ps(MR_I8_TINY), _CMP_NLT_UQ);
    __m128 scale = _mm_maskz_div_ps(on, amax, most);
    _mm_storeu_ps(c->scale + i, _mm_mask_blend_ps(bad, scale, _mm_set1_ps(NAN)));
    _mm_storeu_ps(c->inverse + i, _mm_maskz_div_ps(on, most, amax));
    for (int j = 0; bad != 0 && j < 4; j++)
      if (bad >> j & 1)
        memset(c->v[i + j], 0, sizeof c->v[i + j]);
  }
  for (int i = 0; i < n; i++)
    c->lanes[i] = quantize(q + (size_t)i * GROUP, c->v[i], c->inverse[i]);
  for (int i = 0; i < n; i += 4)
    _mm_storeu_si128((__m128i *)(void *)(c->sum + i), sum_of_four(c->lanes + i));
}

static void pack_row(void *dst, const float *x, int k) {
  chunk c; /* not zeroed: it is large */
  int groups = groups_of(k);
  int8_t *q = dst;
  float *scales = (float *)(void *)(q + (size_t)groups * GROUP);
  int32_t *starts = (int32_t *)(void *)(scales + groups);
  for (int g = 0; g < groups; g += CHUNK) {
    int n = groups - g < CHUNK ? groups - g : CHUNK;
    quantize_chunk(&c, q + (size_t)g * GROUP, x, k, g, n);
    for (int i = 0; i < n; i++) {
      scales[g + i] = c.scale[i];
      starts[g + i] = MAGIC_BITS - 128 * c.sum[i];
    }
  }
}

/* Down to 22 significant bits, so that MAGIC times it is exact; 1/64: both rotations grow sums
 * by 64. */
static float weight_scale(float s) {
  uint32_t bits;
  memcpy(&bits, &s, sizeof bits);
  bits &= 0xfffffffcu;
  memcpy(&s, &bits, sizeof s);
  return s / 64.0f;
}

static void pack_column(uint8_t *panel, int c, const float *w, int k) {
  chunk t; /* not zeroed */
  int8_t q[CHUNK * GROUP];
  for (int g = 0; g < groups_of(k); g += CHUNK) {
    int n = groups_of(k) - g < CHUNK ? groups_of(k) - g : CHUNK;
    quantize_chunk(&t, q, w, k, g, n);
    for (int i = 0; i < n; i++, panel += GROUP_BYTES) {
      ((float *)(void *)(panel + HALF * GROUP))[c] = weight_scale(t.scale[i]);
      for (int s = 0; s < GROUP; s += 4) {
        uint32_t four;
        memcpy(&four, q + i * GROUP + s, sizeof four);
        four ^= 0x80808080u; /* + 128 */
        memcpy(panel + s * HALF + c * 4, &four, sizeof four);
      }
    }
  }
}

static void pack_panel(void *dst, const float *w, size_t ld, int cols, int k) {
  const size_t half_bytes = panel_bytes(k) / 2;
  for (int h = 0; h < 2; h++) {
    uint8_t *half = (uint8_t *)dst + (size_t)h * half_bytes;
    for (size_t at = 0; h * HALF + HALF > cols && at < half_bytes; at += GROUP_BYTES) {
      memset(half + at, 128, HALF * GROUP);
      memset(half + at + HALF * GROUP, 0, HALF * 4);
    }
    for (int c = 0; c < HALF && h * HALF + c < cols; c++)
      pack_column(half, c, w + (size_t)(h * HALF + c) * ld, k);
  }
}

/* ------------------------------------------------------------------ register tiles */
/* rows x panel p of y; `rows` and `lines` are constants */
INLINE void tile(const gemm_call *g, int i0, int p, ahead next, int rows, int lines) {
  const size_t row_bytes = g->row_bytes, step = row_bytes / 4;
  const int8_t *x = g->x + (size_t)i0 * row_bytes, *x3 = x + 3 * row_bytes,
               *x6 = x3 + 3 * row_bytes;
  const float *sa = i8_scales(x, g->groups);
  const int32_t *start = i8_starts(x, g->groups);
  const uint8_t *w[2] = {i8_half(g, 2 * p), i8_half(g, 2 * p + 1)};
  __m512 y[TILE_ROWS][2];
  UNROLL for (int i = 0; i < rows; i++) y[i][0] = y[i][1] = _mm512_setzero_ps();
  for (int q = 0; q < g->groups;
       q++, w[0] += GROUP_BYTES, w[1] += GROUP_BYTES, x += GROUP, x3 += GROUP, x6 += GROUP) {
    __m512i sum[TILE_ROWS][2];
    if (q < rows)
      gemm_ask(g, i0 + q, p);
    UNROLL for (int i = 0; i < rows; i++) sum[i][0] = sum[i][1] =
        _mm512_set1_epi32(start[(size_t)i * step + (size_t)q]);
    UNROLL for (int s = 0; s < STEPS; s++) {
      __m512i w0 = _mm512_load_si512(w[0] + s * 64), w1 = _mm512_load_si512(w[1] + s * 64);
      UNROLL for (int l = 0; l < lines; l++, next.at += next.stride)
          _mm_prefetch((const char *)next.at, _MM_HINT_T0);
      UNROLL for (int i = 0; i < rows; i++) {
        __m512i a = gemm_broadcast((i < 3   ? x
                                    : i < 6 ? x3
                                            : x6) +
                                   (size_t)(i % 3) * row_bytes + s * 4);
        sum[i][0] = dot4(sum[i][0], w0, a);
        sum[i][1] = dot4(sum[i][1], w1, a);
      }
    }
    UNROLL for (int j = 0; j < 2; j++) {
      __m512 sw = _mm512_load_ps(i8_weight_scales(w[j]));
      __m512 back = _mm512_mul_ps(sw, _mm512_set1_ps(-MAGIC));
      UNROLL for (int i = 0; i < rows; i++) {
        __m512 t = _mm512_fmadd_ps(_mm512_castsi512_ps(sum[i][j]), sw, back);
        y[i][j] = _mm512_fmadd_ps(t, _mm512_set1_ps(sa[(size_t)i * step + (size_t)q]), y[i][j]);
      }
    }
  }
  gemm_finish_tile(g, i0, p, y, rows);
}

GEMM_ANY_TILE

/* The tiles of a panel ask for the next panel meanwhile, each for its part. The last panel asks
 * past p1: for what the worker does next, if the caller so orders its calls. */
static void vnni_gemm(const gemm_call *g) {
  const int tiles = (g->m + TILE_ROWS - 1) / TILE_ROWS, lines = tiles == 1 ? 2 : 1;
  const int each = 2 * GROUP_BYTES / STEPS, asks = g->groups * STEPS * lines;
  const size_t stride = (size_t)((each + tiles * lines - 1) / (tiles * lines));
  for (int p = g->p0; p < g->p1; p++)
    for (int t = 0; t < tiles; t++) {
      int i0 = (int)((int64_t)g->m * t / tiles), i1 = (int)((int64_t)g->m * (t + 1) / tiles);
      ahead next = {i8_half(g, 2 * p + 2) + (size_t)t * (size_t)asks * stride, stride};
      any_tile(g, i0, p, next, i1 - i0, lines);
    }
}

static int amx; /* set once, with the table */

static void gemm(float *y, size_t ldy, const void *x, int m, const void *w, int p0, int p1, int n,
                 int k, const float *bias, int accumulate) {
  const gemm_call g = {y, ldy, x, row_bytes(k), m, groups_of(k), w, p0, p1, n, bias, accumulate};
  if (amx && m >= AMX_MIN_ROWS && g.groups <= I8_AMX_GROUPS)
    mr_i8_amx_gemm(&g);
  else
    vnni_gemm(&g);
}

void mr_k_fill_avx512_i8(mr_kernels *k, int use_amx) {
  amx = use_amx;
  k->gemm[MR_SCHEME_I8] =
      (mr_gemm_ops){NR, use_amx ? 128 : 64, panel_bytes, row_bytes, pack_panel, pack_row, gemm};
}
