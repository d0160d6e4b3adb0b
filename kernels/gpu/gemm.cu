/* gemm.cu: y = x w^T through matrix instructions. A block makes ROWS x 64 of y; K is streamed
 * through two buffers of shared memory, so that one is filled while the other is used
 * (FlashDecoding++, Hong et al. 2023: flat GEMM, 16 rows for few tokens). Whatever the tile, an
 * element's products are added along K in one order.
 *
 * PAIR: both sides have a second plane with what rounding left; three products then give 16 bits
 * (the fourth is below them). INT8, INT4: weights of few bits (few.h), rounded to bfloat16 in the
 * tile; or all of a matrix before, for a product of many rows (widen). The same numbers either way.
 * Grouped: the rows of all experts in one launch.
 */
#include "kernels/gpu/few.h"

#define LD MR_GPU_GEMM_LD
#define COLS MR_GPU_GEMM_COLS
#define STAGES MR_GPU_GEMM_STAGES

template <int ROWS, int KIND> struct gemm_shared {
  enum { PLANES = KIND == MR_GPU_PAIR ? 2 : 1 };
  mr_gpu_bf16 a[STAGES][PLANES][ROWS][LD], w[STAGES][PLANES][COLS][LD];
};

template <int KIND> struct gemm_raw { /* behind it, for few bits */
  enum { BYTES = KIND == MR_GPU_INT4 ? MR_GPU_K / 2 : MR_GPU_K };
  uint8_t w[COLS][BYTES + 16];
};

MR_FN constexpr bool is_few(int kind) {
  return kind == MR_GPU_INT8 || kind == MR_GPU_INT4;
}

/* Rows past the end repeat the last one: their sums are not stored. */
template <int N>
MR_FN void stage_rows(mr_gpu_bf16 (*to)[LD], const mr_gpu_bf16 *from, int first, int rows, int k,
                      int k0) {
  for (int i = MR_THREAD; i < N * (MR_GPU_K / 8); i += MR_THREADS) {
    int r = i / (MR_GPU_K / 8), c = i % (MR_GPU_K / 8) * 8;
    int row = mr_imin(first + r, rows - 1);
    mr_async16(&to[r][c], from + (size_t)row * (size_t)k + (size_t)(k0 + c));
  }
}

template <int KIND> MR_FN void stage_raw(gemm_raw<KIND> *to, const mr_gpu_gemm &a, int n0, int k0) {
  enum { BYTES = gemm_raw<KIND>::BYTES };
  size_t row_bytes = (size_t)a.k / MR_GPU_K * BYTES, at = (size_t)k0 / MR_GPU_K * BYTES;
  for (int i = MR_THREAD; i < COLS * (BYTES / 16); i += MR_THREADS) {
    int r = i / (BYTES / 16), c = i % (BYTES / 16) * 16;
    size_t row = (size_t)mr_imin(n0 + r, a.n - 1);
    mr_async16(&to->w[r][c], a.few.w + row * row_bytes + at + (size_t)c);
  }
}

template <int ROWS, int KIND>
MR_FN void stage(gemm_shared<ROWS, KIND> *s, gemm_raw<KIND> *raw, int to, const mr_gpu_gemm &a,
                 int m0, int n0, int k0) {
  MR_UNROLL
  for (int p = 0; p < gemm_shared<ROWS, KIND>::PLANES; p++) {
    stage_rows<ROWS>(s->a[to][p], a.a + (size_t)p * a.a_plane, m0, a.m, a.k, k0);
    if (!is_few(KIND))
      stage_rows<COLS>(s->w[to][p], a.w + (size_t)p * a.w_plane, n0, a.n, a.k, k0);
  }
  if (is_few(KIND))
    stage_raw(raw + to, a, n0, k0);
  mr_async_commit();
}

template <int KIND>
MR_FN void widen_tile(mr_gpu_bf16 (*w)[LD], const gemm_raw<KIND> *raw, const mr_gpu_gemm &a, int n0,
                      int k0) {
  for (int i = MR_THREAD; i < COLS * (MR_GPU_K / 8); i += MR_THREADS) {
    int r = i / (MR_GPU_K / 8), c = i % (MR_GPU_K / 8) * 8;
    size_t row = (size_t)mr_imin(n0 + r, a.n - 1);
    few_scale scale = few_scale_of<KIND>(a.few, row, a.k, k0 + c);
    *(mr_u128 *)&w[r][c] = few_round8<KIND>(raw->w[r] + few_bytes<KIND>(c), scale);
  }
}

/* One warp's 16 rows times COLUMNS/16 tiles of columns, over one stage. */
template <int ROWS, int KIND, int TILES>
MR_FN void multiply(mr_frag_c *c, const gemm_shared<ROWS, KIND> *s, int at, int row, int col) {
  MR_UNROLL
  for (int k = 0; k < MR_GPU_K; k += 16) {
    mr_frag_a high, low;
    mr_load_a(high, &s->a[at][0][row][k], LD);
    if (KIND == MR_GPU_PAIR)
      mr_load_a(low, &s->a[at][gemm_shared<ROWS, KIND>::PLANES - 1][row][k], LD);
    MR_UNROLL
    for (int t = 0; t < TILES; t++) {
      mr_frag_b w;
      mr_load_b(w, &s->w[at][0][col + 16 * t][k], LD);
      mr_mma(c[t], high, w);
      if (KIND == MR_GPU_PAIR) {
        mr_mma(c[t], low, w);
        mr_load_b(w, &s->w[at][gemm_shared<ROWS, KIND>::PLANES - 1][col + 16 * t][k], LD);
        mr_mma(c[t], high, w);
      }
    }
  }
}

MR_FN void put(const mr_gpu_gemm &a, const mr_frag_c &c, int m0, int n0) {
  MR_UNROLL
  for (int i = 0; i < MR_C; i++) {
    int m = m0 + mr_row(i), n = n0 + mr_col(i);
    if (m >= a.m || n >= a.n)
      continue;
    float *y = a.y + (size_t)m * a.ld + (size_t)n;
    float sum = a.bias ? c.r[i] + a.bias[n] : c.r[i];
    *y = a.accumulate ? sum + *y : sum;
  }
}

template <int ROWS, int KIND> MR_FN void gemm(const mr_gpu_gemm &a, int m0) {
  /* 16 rows: the warps share the columns; 64: the rows */
  enum { TILES = ROWS == 16 ? 1 : COLS / 16 };
  gemm_shared<ROWS, KIND> *s = (gemm_shared<ROWS, KIND> *)mr_shared();
  gemm_raw<KIND> *raw = (gemm_raw<KIND> *)(s + 1);
  int n0 = MR_BLOCK(0) * COLS, steps = a.k / MR_GPU_K;
  int warp = MR_THREAD / MR_WARP, row = ROWS == 16 ? 0 : 16 * warp,
      col = ROWS == 16 ? 16 * warp : 0;
  mr_frag_c c[TILES];
  MR_UNROLL
  for (int t = 0; t < TILES; t++)
    mr_zero(c[t]);
  stage(s, raw, 0, a, m0, n0, 0);
  for (int i = 0; i < steps; i++) {
    if (i + 1 < steps) {
      stage(s, raw, (i + 1) % STAGES, a, m0, n0, (i + 1) * MR_GPU_K);
      mr_async_wait<1>();
    } else {
      mr_async_wait<0>();
    }
    MR_BARRIER();
    if (is_few(KIND)) {
      widen_tile(s->w[i % STAGES][0], raw + i % STAGES, a, n0, i * MR_GPU_K);
      MR_BARRIER();
    }
    if (m0 + row < a.m)
      multiply<ROWS, KIND, TILES>(c, s, i % STAGES, row, col);
    MR_BARRIER();
  }
  MR_UNROLL
  for (int t = 0; t < TILES; t++)
    put(a, c[t], m0 + row, n0 + col + 16 * t);
}

/* Rows of one expert: what is to do was written on the device (route.cu). */
template <int ROWS, int KIND> MR_FN void grouped(const mr_gpu_grouped &a) {
  int at = MR_BLOCK(1);
  if (at >= *a.n_items)
    return;
  mr_gpu_item item = a.items[at];
  mr_gpu_expert e = a.experts[item.expert];
  if (e.hold != KIND)
    return;
  size_t first = (size_t)item.first;
  gemm<ROWS, KIND>(mr_gpu_gemm{a.a + first * (size_t)a.k, e.w, a.a_plane, e.plane, e.few, e.bias,
                               a.y + first * a.ld, a.ld, item.n, a.n, a.k, 0},
                   0);
}

#undef LD
#undef COLS
#undef STAGES

MR_GPU_KERNEL(gemm16_bf16, mr_gpu_gemm, MR_GPU_WARPS) {
  gemm<16, MR_GPU_BF16>(a, MR_BLOCK(1) * 16);
}
MR_GPU_KERNEL(gemm64_bf16, mr_gpu_gemm, MR_GPU_WARPS) {
  gemm<64, MR_GPU_BF16>(a, MR_BLOCK(1) * 64);
}
MR_GPU_KERNEL(gemm16_pair, mr_gpu_gemm, MR_GPU_WARPS) {
  gemm<16, MR_GPU_PAIR>(a, MR_BLOCK(1) * 16);
}
MR_GPU_KERNEL(gemm64_pair, mr_gpu_gemm, MR_GPU_WARPS) {
  gemm<64, MR_GPU_PAIR>(a, MR_BLOCK(1) * 64);
}
MR_GPU_KERNEL(gemm16_int8, mr_gpu_gemm, MR_GPU_WARPS) {
  gemm<16, MR_GPU_INT8>(a, MR_BLOCK(1) * 16);
}
MR_GPU_KERNEL(gemm64_int8, mr_gpu_gemm, MR_GPU_WARPS) {
  gemm<64, MR_GPU_INT8>(a, MR_BLOCK(1) * 64);
}
MR_GPU_KERNEL(gemm16_int4, mr_gpu_gemm, MR_GPU_WARPS) {
  gemm<16, MR_GPU_INT4>(a, MR_BLOCK(1) * 16);
}
MR_GPU_KERNEL(gemm64_int4, mr_gpu_gemm, MR_GPU_WARPS) {
  gemm<64, MR_GPU_INT4>(a, MR_BLOCK(1) * 64);
}

MR_GPU_KERNEL(grouped16_bf16, mr_gpu_grouped, MR_GPU_WARPS) {
  grouped<16, MR_GPU_BF16>(a);
}
MR_GPU_KERNEL(grouped64_bf16, mr_gpu_grouped, MR_GPU_WARPS) {
  grouped<64, MR_GPU_BF16>(a);
}
MR_GPU_KERNEL(grouped16_pair, mr_gpu_grouped, MR_GPU_WARPS) {
  grouped<16, MR_GPU_PAIR>(a);
}
MR_GPU_KERNEL(grouped64_pair, mr_gpu_grouped, MR_GPU_WARPS) {
  grouped<64, MR_GPU_PAIR>(a);
}
MR_GPU_KERNEL(grouped16_int8, mr_gpu_grouped, MR_GPU_WARPS) {
  grouped<16, MR_GPU_INT8>(a);
}
MR_GPU_KERNEL(grouped64_int8, mr_gpu_grouped, MR_GPU_WARPS) {
  grouped<64, MR_GPU_INT8>(a);
}
MR_GPU_KERNEL(grouped16_int4, mr_gpu_grouped, MR_GPU_WARPS) {
  grouped<16, MR_GPU_INT4>(a);
}
MR_GPU_KERNEL(grouped64_int4, mr_gpu_grouped, MR_GPU_WARPS) {
  grouped<64, MR_GPU_INT4>(a);
}

template <int KIND> MR_FN void widen(const mr_gpu_widen &a) {
  size_t row = (size_t)MR_BLOCK(0), k = (size_t)a.k;
  const uint8_t *from = a.few.w + row * few_bytes<KIND>(k);
  for (int c = 8 * MR_THREAD; c < a.k; c += 8 * MR_THREADS)
    *(mr_u128 *)(a.out + row * k + (size_t)c) =
        few_round8<KIND>(from + few_bytes<KIND>((size_t)c), few_scale_of<KIND>(a.few, row, a.k, c));
}

MR_GPU_KERNEL(widen_int8, mr_gpu_widen, MR_GPU_WARPS) {
  widen<MR_GPU_INT8>(a);
}
MR_GPU_KERNEL(widen_int4, mr_gpu_widen, MR_GPU_WARPS) {
  widen<MR_GPU_INT4>(a);
}
