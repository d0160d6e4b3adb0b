/* avx512_bf16.c: the bfloat16 GEMM with vdpbf16ps, for CPUs that have it (Intel SDM volume 2,
 * "VDPBF16PS": two multiply-adds into each float32 lane, the odd value of the pair first, denormals
 * as zero).
 *
 * A panel is, for each pair of values along K, [2 halves][16 columns][2] bfloat16; a row is
 * bfloat16, padded with zeros to 32 values. Each sum of an element goes through its pairs in their
 * order, whatever the tile.
 */
#include <cpuid.h>
#include <string.h>

#include "kernels/avx512/avx512.h"
#include "kernels/avx512/avx512_gemm.h"

#define PAIR_BYTES (NR * 2 * sizeof(uint16_t)) /* of a panel */
#define PAIR_LINES (PAIR_BYTES / 64)

int mr_avx512_bf16_usable(void) {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1) != 0;
}

static int pairs_of(int k) {
  return (k + 1) / 2;
}

static size_t panel_bytes(int k) {
  return (size_t)pairs_of(k) * PAIR_BYTES;
}

static size_t row_bytes(int k) {
  return ((size_t)k + 31) / 32 * 64;
}

/* ------------------------------------------------------------------ packing */
/* 32 values from x, those past n zero, as bfloat16 rounded to nearest even. */
INLINE __m512i round_32(const float *x, int n) {
  __mmask16 lo = n >= 16 ? 0xffff : (__mmask16)((1u << n) - 1);
  __mmask16 hi = n >= 32 ? 0xffff : n <= 16 ? 0 : (__mmask16)((1u << (n - 16)) - 1);
  __m512 a = _mm512_maskz_loadu_ps(lo, x), b = _mm512_maskz_loadu_ps(hi, x + 16);
  __m512i r;
  __asm__("vcvtne2ps2bf16 %2, %1, %0" : "=v"(r) : "v"(b), "v"(a));
  return r;
}

static void pack_row(void *dst, const float *x, int k) {
  uint8_t *d = dst;
  for (int i = 0; i < k; i += 32)
    _mm512_storeu_si512(d + (size_t)i * 2, round_32(x + i, k - i));
}

static void pack_panel(void *dst, const float *w, size_t ld, int cols, int k) {
  uint8_t *d = dst;
  memset(d, 0, panel_bytes(k));
  for (int c = 0; c < cols; c++)
    for (int i = 0; i < k; i += 32) {
      uint32_t pair[16];
      _mm512_storeu_si512(pair, round_32(w + (size_t)c * ld + i, k - i));
      for (int j = 0; j < 16 && i + 2 * j < k; j++)
        memcpy(d + (size_t)(i / 2 + j) * PAIR_BYTES + c * 4, &pair[j], 4);
    }
}

/* ------------------------------------------------------------------ register tiles */
/* As asm: intrinsics need the whole file compiled for such CPUs. */
INLINE __m512 dot2(__m512 sum, __m512i w, __m512i x) {
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
  return sum;
}

/* rows x panel p of y; `rows` and `lines` are constants */
INLINE void tile(const gemm_call *g, int i0, int p, ahead next, int rows, int lines) {
  const size_t row_bytes = g->row_bytes;
  const int8_t *x = g->x + (size_t)i0 * row_bytes, *x3 = x + 3 * row_bytes,
               *x6 = x3 + 3 * row_bytes;
  const uint8_t *w = g->w + (size_t)p * (size_t)g->groups * PAIR_BYTES;
  __m512 y[TILE_ROWS][2];
  UNROLL for (int i = 0; i < rows; i++) {
    y[i][0] = y[i][1] = _mm512_setzero_ps();
    gemm_ask(g, i0 + i, p);
  }
  for (int q = 0; q < g->groups; q++, w += PAIR_BYTES, x += 4, x3 += 4, x6 += 4) {
    __m512i w0 = _mm512_load_si512(w), w1 = _mm512_load_si512(w + 64);
    UNROLL for (int l = 0; l < lines; l++, next.at += next.stride)
        _mm_prefetch((const char *)next.at, _MM_HINT_T0);
    UNROLL for (int i = 0; i < rows; i++) {
      __m512i a = gemm_broadcast((i < 3 ? x : i < 6 ? x3 : x6) + (size_t)(i % 3) * row_bytes);
      y[i][0] = dot2(y[i][0], w0, a);
      y[i][1] = dot2(y[i][1], w1, a);
    }
  }
  gemm_finish_tile(g, i0, p, y, rows);
}

GEMM_ANY_TILE

/* The tiles of a panel ask for the next one meanwhile, each for its part; see avx512_i8.c. */
static void gemm(float *y, size_t ldy, const void *x, int m, const void *w, int p0, int p1, int n,
                 int k, const float *bias, int accumulate) {
  const gemm_call g = {y, ldy, x, row_bytes(k), m, pairs_of(k), w, p0, p1, n, bias, accumulate};
  const int tiles = (m + TILE_ROWS - 1) / TILE_ROWS, lines = tiles == 1 ? (int)PAIR_LINES : 1;
  const size_t panel = panel_bytes(k), part = panel / (size_t)tiles;
  const size_t stride = PAIR_BYTES / (size_t)(tiles * lines);
  for (int p = p0; p < p1; p++)
    for (int t = 0; t < tiles; t++) {
      int i0 = (int)((int64_t)m * t / tiles), i1 = (int)((int64_t)m * (t + 1) / tiles);
      ahead next = {g.w + (size_t)(p + 1) * panel + (size_t)t * part, stride};
      any_tile(&g, i0, p, next, i1 - i0, lines);
    }
}

void mr_k_fill_avx512_bf16(mr_kernels *k) {
  k->gemm[MR_SCHEME_BF16] =
      (mr_gemm_ops){NR, 64, panel_bytes, row_bytes, pack_panel, pack_row, gemm};
  k->floats = MR_SCHEME_BF16;
}
