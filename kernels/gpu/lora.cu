/* lora.cu: what adapters add to products: y += B (A x). Rows are sorted by adapter, and a block has
 * up to 16 rows of one (segmented gather products: Chen et al. 2023, Punica; Sheng et al. 2023,
 * S-LoRA). lora_down makes A x, with 16 ranks a block, whose warps share K; lora_up adds B times
 * that, with 64 columns a block. An element's sum goes along K in one order, whatever the rows
 * beside it.
 *
 * Parts of rows may begin anywhere and have any length (ranks are what they are): what is not 16
 * bytes at such an address is copied one by one, and what lies behind is zero. */
#include "kernels/gpu/gpu.h"

#define LD MR_GPU_GEMM_LD
#define ROWS MR_GPU_ROWS

template <int COLS, int KIND> struct lora_shared {
  enum { PLANES = KIND == MR_GPU_PAIR ? 2 : 1 };
  mr_gpu_bf16 a[MR_GPU_GEMM_STAGES][PLANES][ROWS][LD], w[MR_GPU_GEMM_STAGES][PLANES][COLS][LD];
};

struct lora_part { /* of a block */
  const mr_gpu_bf16 *a;
  size_t a_plane, a_ld;
  const int32_t *row; /* NULL: its own number */
  int first, m, n0;
};

/* Eight values, of which `count` are there. */
MR_FN void lora_copy8(mr_gpu_bf16 *to, const mr_gpu_bf16 *from, int count) {
  if (count >= 8 && ((size_t)from & 15) == 0) {
    mr_async16(to, from);
    return;
  }
  for (int i = 0; i < 8; i++)
    to[i] = i < count ? from[i] : (mr_gpu_bf16)0;
}

template <int COLS, int KIND>
MR_FN void lora_stage(lora_shared<COLS, KIND> *s, int to, const lora_part &p,
                      const mr_gpu_lora_link &l, int k0) {
  int chunks = mr_imin(MR_GPU_K, l.ld - k0) / 8;
  for (int i = MR_THREAD; i < (ROWS + COLS) * (MR_GPU_K / 8); i += MR_THREADS) {
    int r = i / (MR_GPU_K / 8), c = i % (MR_GPU_K / 8);
    if (c >= chunks)
      continue;
    int place = p.first + mr_imin(r, p.m - 1);
    size_t row = (size_t)(r >= ROWS ? mr_imin(p.n0 + r - ROWS, l.n - 1)
                          : p.row   ? p.row[place]
                                    : place);
    MR_UNROLL
    for (int plane = 0; plane < lora_shared<COLS, KIND>::PLANES; plane++)
      if (r < ROWS)
        lora_copy8(&s->a[to][plane][r][8 * c],
                   p.a + (size_t)plane * p.a_plane + row * p.a_ld + (size_t)(k0 + 8 * c),
                   l.k - k0 - 8 * c);
      else
        mr_async16(&s->w[to][plane][r - ROWS][8 * c],
                   l.w + (size_t)plane * l.plane + row * (size_t)l.ld + (size_t)(k0 + 8 * c));
  }
  mr_async_commit();
}

template <int COLS, int KIND>
MR_FN void lora_multiply(mr_frag_c &c, const lora_shared<COLS, KIND> *s, int at, int col, int k) {
  enum { LAST = lora_shared<COLS, KIND>::PLANES - 1 };
  mr_frag_a a;
  mr_frag_b w;
  mr_load_a(a, &s->a[at][0][0][k], LD);
  mr_load_b(w, &s->w[at][0][col][k], LD);
  mr_mma(c, a, w);
  if (KIND == MR_GPU_PAIR) {
    mr_frag_a low;
    mr_load_a(low, &s->a[at][LAST][0][k], LD);
    mr_mma(c, low, w);
    mr_load_b(w, &s->w[at][LAST][col][k], LD);
    mr_mma(c, a, w);
  }
}

/* One warp's 16x16 of the product: of its columns over all k, or of all columns over its k. */
template <int COLS, int KIND>
MR_FN void lora_product(mr_frag_c &c, lora_shared<COLS, KIND> *s, const lora_part &p,
                        const mr_gpu_lora_link &l) {
  enum { SHARE = COLS == MR_GPU_LORA_DOWN_COLS };
  int warp = MR_THREAD / MR_WARP, col = SHARE ? 0 : 16 * warp;
  mr_zero(c);
  if (l.ld)
    lora_stage<COLS, KIND>(s, 0, p, l, 0);
  for (int k0 = 0, i = 0; k0 < l.ld; k0 += MR_GPU_K, i++) {
    int end = mr_imin(MR_GPU_K, l.ld - k0);
    if (k0 + MR_GPU_K < l.ld) {
      lora_stage<COLS, KIND>(s, (i + 1) % MR_GPU_GEMM_STAGES, p, l, k0 + MR_GPU_K);
      mr_async_wait<1>();
    } else {
      mr_async_wait<0>();
    }
    MR_BARRIER();
    for (int k = SHARE ? 16 * warp : 0; k < end; k += SHARE ? MR_GPU_K : 16)
      lora_multiply<COLS, KIND>(c, s, i % MR_GPU_GEMM_STAGES, col, k);
    MR_BARRIER();
  }
}

template <int KIND> MR_FN void lora_down(const mr_gpu_lora &a) {
  enum { COLS = MR_GPU_LORA_DOWN_COLS };
  lora_shared<COLS, KIND> *s = (lora_shared<COLS, KIND> *)mr_shared();
  float(*sums)[ROWS][COLS] = (float(*)[ROWS][COLS])(s + 1);
  const mr_gpu_lora_tile tile = a.tiles[MR_BLOCK(1)];
  const mr_gpu_lora_link &l = a.links[tile.link];
  int head = MR_BLOCK(2), n0 = MR_BLOCK(0) * COLS;
  if (n0 >= l.n || head >= l.heads)
    return;
  lora_part p = {a.a + l.in + head * l.in_step, a.a_plane, a.a_ld, a.row, tile.first, tile.m, n0};
  mr_frag_c c;
  lora_product<COLS, KIND>(c, s, p, l);
  MR_UNROLL
  for (int i = 0; i < MR_C; i++)
    sums[MR_THREAD / MR_WARP][mr_row(i)][mr_col(i)] = c.r[i];
  MR_BARRIER();
  for (int i = MR_THREAD; i < ROWS * COLS; i += MR_THREADS) {
    int row = i / COLS, col = i % COLS;
    if (row >= tile.m || n0 + col >= l.n)
      continue;
    float sum = 0;
    MR_UNROLL
    for (int w = 0; w < MR_GPU_WARPS; w++)
      sum += sums[w][row][col];
    mr_gpu_bf16 *to = a.mid + (size_t)(tile.first + row) * a.mid_ld +
                      (size_t)(l.out + head * l.out_step + n0 + col);
    *to = mr_narrow(sum);
    if (KIND == MR_GPU_PAIR)
      to[a.mid_plane] = mr_rest(sum, *to);
  }
}

template <int KIND> MR_FN void lora_up(const mr_gpu_lora &a) {
  enum { COLS = MR_GPU_LORA_UP_COLS };
  lora_shared<COLS, KIND> *s = (lora_shared<COLS, KIND> *)mr_shared();
  const mr_gpu_lora_tile tile = a.tiles[MR_BLOCK(1)];
  const mr_gpu_lora_link &l = a.links[tile.link];
  int head = MR_BLOCK(2), n0 = MR_BLOCK(0) * COLS;
  if (n0 >= l.n || head >= l.heads)
    return;
  lora_part p = {a.mid + l.in + head * l.in_step, a.mid_plane, a.mid_ld, 0, tile.first, tile.m, n0};
  mr_frag_c c;
  lora_product<COLS, KIND>(c, s, p, l);
  MR_UNROLL
  for (int i = 0; i < MR_C; i++) {
    int place = mr_row(i), n = n0 + 16 * (MR_THREAD / MR_WARP) + mr_col(i);
    if (place >= tile.m || n >= l.n)
      continue;
    place += tile.first;
    float *y = a.y + (size_t)(a.row ? a.row[place] : place) * a.ld +
               (size_t)(l.out + head * l.out_step + n);
    *y += l.bias ? c.r[i] + l.bias[n] : c.r[i];
  }
}

#undef LD
#undef ROWS

MR_GPU_KERNEL(lora_down_bf16, mr_gpu_lora, MR_GPU_WARPS) {
  lora_down<MR_GPU_BF16>(a);
}
MR_GPU_KERNEL(lora_down_pair, mr_gpu_lora, MR_GPU_WARPS) {
  lora_down<MR_GPU_PAIR>(a);
}
MR_GPU_KERNEL(lora_up_bf16, mr_gpu_lora, MR_GPU_WARPS) {
  lora_up<MR_GPU_BF16>(a);
}
MR_GPU_KERNEL(lora_up_pair, mr_gpu_lora, MR_GPU_WARPS) {
  lora_up<MR_GPU_PAIR>(a);
}

MR_GPU_KERNEL(lora_embed, mr_gpu_lora_embed, MR_GPU_WARPS) {
  int row = MR_BLOCK(0);
  if (!a.adapter[row])
    return;
  const mr_gpu_lora_rows e = a.all[a.adapter[row] - 1];
  const float *of = e.a + (size_t)a.token[row] * (size_t)e.rank;
  float *x = a.x + (size_t)row * a.ld;
  for (int i = MR_THREAD; i < a.cols; i += MR_THREADS) {
    float sum = 0;
    for (int r = 0; r < e.rank; r++)
      sum = mr_fma(of[r], e.b[(size_t)r * (size_t)a.cols + (size_t)i], sum);
    x[i] = mr_fma(sum, a.scale, x[i]);
  }
}
