/* gemmf.h: the float GEMMs on vectors, after a vec*.h; see kernels.h.
 *
 * Panels are [k][TILE_COLS], float32 or bfloat16; rows are float32, rounded to bfloat16 in that
 * scheme.
 */
#ifndef MR_KERNELS_SIMD_GEMMF_H
#define MR_KERNELS_SIMD_GEMMF_H

#include <string.h>

#include "kernels/simd/tile.h"

#define NR TILE_COLS

typedef struct fgemm { /* one panel */
  float *y;            /* [rows, NR], ldy apart */
  size_t ldy;
  const float *x; /* [rows, k], ldx apart */
  size_t ldx;
  const void *panel;
  int k, cols;       /* cols: 1..NR that y has */
  const float *bias; /* of this panel's columns, or NULL */
  int accumulate;
} fgemm;

V_INLINE int lanes(int cols, int j) {
  int n = cols - j * VL;
  return n < 0 ? 0 : n > VL ? VL : n;
}

V_INLINE void fgemm_rows(const fgemm *g, int i0, int rows, mr_kv_type type) {
  vf acc[8][2];
  UNROLL for (int i = 0; i < rows; i++) acc[i][0] = acc[i][1] = vzero();
  tile_sum(acc, rows, 2, type, g->x + (size_t)i0 * g->ldx, g->ldx, g->panel, NR, g->k, VL);
  UNROLL for (int j = 0; j < 2; j++) {
    int n = lanes(g->cols, j);
    vf bias = g->bias != NULL ? vload_n(g->bias + j * VL, n) : vzero();
    UNROLL for (int i = 0; i < rows; i++) {
      float *y = g->y + (size_t)(i0 + i) * g->ldy + j * VL;
      vf v = g->bias != NULL ? vadd(acc[i][j], bias) : acc[i][j];
      vstore_n(y, g->accumulate ? vadd(v, vload_n(y, n)) : v, n);
    }
  }
}

#define FGEMM(NAME, TYPE)                                                                          \
  static void NAME##_tile(const fgemm *g, int i0, int rows) {                                      \
    TILE_SWITCH(rows, NAME##_CALL)                                                                 \
  }
#define f32_CALL(R) fgemm_rows(g, i0, R, MR_KV_F32)
#define bf16_CALL(R) fgemm_rows(g, i0, R, MR_KV_BF16)
FGEMM(f32, MR_KV_F32)
FGEMM(bf16, MR_KV_BF16)

static size_t simd_row_bytes(int k) {
  return ((size_t)k * sizeof(float) + 63) / 64 * 64;
}

V_INLINE void fgemm_any(float *y, size_t ldy, const void *x, int m, const char *w, size_t bytes,
                        int p0, int p1, int n, int k, const float *bias, int accumulate,
                        void (*tile)(const fgemm *, int, int)) {
  int tiles = (m + TILE_ROWS - 1) / TILE_ROWS;
  for (int p = p0; p < p1; p++) {
    int col = p * NR;
    fgemm g = {y + col,
               ldy,
               x,
               simd_row_bytes(k) / sizeof(float),
               w + (size_t)p * bytes,
               k,
               n - col < NR ? n - col : NR,
               bias != NULL ? bias + col : NULL,
               accumulate};
    for (int t = 0; t < tiles; t++) {
      int i0 = (int)((int64_t)m * t / tiles), i1 = (int)((int64_t)m * (t + 1) / tiles);
      tile(&g, i0, i1 - i0);
    }
  }
}

/* ------------------------------------------------------------------ float32 */
static size_t f32_panel_bytes(int k) {
  return (size_t)k * NR * sizeof(float);
}

static void f32_pack_panel(void *dst, const float *w, size_t ld, int cols, int k) {
  float *d = dst;
  memset(dst, 0, f32_panel_bytes(k));
  for (int i = 0; i < k; i++)
    for (int c = 0; c < cols; c++)
      d[i * NR + c] = w[(size_t)c * ld + (size_t)i];
}

static void f32_pack_row(void *dst, const float *x, int k) {
  memcpy(dst, x, (size_t)k * sizeof(float));
}

static void f32_gemm(float *y, size_t ldy, const void *x, int m, const void *w, int p0, int p1,
                     int n, int k, const float *bias, int accumulate) {
  fgemm_any(y, ldy, x, m, w, f32_panel_bytes(k), p0, p1, n, k, bias, accumulate, f32_tile);
}

/* ------------------------------------------------------------------ bfloat16 */
static size_t bf16_panel_bytes(int k) {
  return ((size_t)k * NR * 2 + 63) / 64 * 64;
}

static void bf16_pack_panel(void *dst, const float *w, size_t ld, int cols, int k) {
  uint16_t *d = dst;
  memset(dst, 0, bf16_panel_bytes(k));
  for (int i = 0; i < k; i++) {
    float row[NR] = {0};
    for (int c = 0; c < cols; c++)
      row[c] = w[(size_t)c * ld + (size_t)i];
    vstore_bf16(d + i * NR, vload(row));
    vstore_bf16(d + i * NR + VL, vload(row + VL));
  }
}

static void bf16_pack_row(void *dst, const float *x, int k) {
  float *d = dst;
  for (int i = 0; i < k; i += VL) {
    int n = k - i < VL ? k - i : VL;
    vstore_n(d + i, vround_bf16(vload_n(x + i, n)), n);
  }
}

static void bf16_gemm(float *y, size_t ldy, const void *x, int m, const void *w, int p0, int p1,
                      int n, int k, const float *bias, int accumulate) {
  fgemm_any(y, ldy, x, m, w, bf16_panel_bytes(k), p0, p1, n, k, bias, accumulate, bf16_tile);
}

static void simd_fill_gemmf(mr_kernels *k) {
  k->gemm[MR_SCHEME_F32] = (mr_gemm_ops){
      NR, 128, f32_panel_bytes, simd_row_bytes, f32_pack_panel, f32_pack_row, f32_gemm};
  k->gemm[MR_SCHEME_BF16] = (mr_gemm_ops){
      NR, 128, bf16_panel_bytes, simd_row_bytes, bf16_pack_panel, bf16_pack_row, bf16_gemm};
}

#undef NR
#endif
