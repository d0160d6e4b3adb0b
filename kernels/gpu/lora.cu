/* lora.cu: what adapters add to products: y += B (A x). Rows are sorted by adapter, and a block has
 * up to 16 rows of one (segmented gather products: Chen et al. 2023, Punica; Sheng et al. 2023,
 * S-LoRA); rows of experts are sorted by these, and a block takes the adapters of its 16 rows one
 * after the other. lora_down makes A x, with 16 ranks a block, whose warps share K; lora_up adds B
 * times that, with 64 columns a block. An element's sum goes along K in one order, whatever the
 * rows beside it.
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

/* ------------------------------------------------------------------ a block's work */

struct lora_block { /* its rows; one adapter's at a time */
  int first, m, expert, adapter;
};

/* The least adapter of the tile's rows that is above `last`; 0: none. */
MR_FN int lora_next(const mr_gpu_lora &a, const lora_block &b, int last) {
  int next = 0;
  for (int r = 0; r < b.m; r++) {
    int of = a.slots.adapter[a.slots.from[b.first + r]];
    if (of > last && (!next || of < next))
      next = of;
  }
  return next;
}

/* m <= 0: the expert has no such tile. */
MR_FN lora_block lora_begin(const mr_gpu_lora &a, int tile) {
  if (!a.slots.first) {
    const mr_gpu_lora_tile &t = a.tiles[tile];
    return lora_block{t.first, t.m, 0, t.link + 1};
  }
  int e = MR_BLOCK(2), first = a.slots.first[e] + tile * ROWS;
  lora_block b = {first, mr_imin(ROWS, a.slots.first[e + 1] - first), e, 0};
  b.adapter = lora_next(a, b, 0);
  return b;
}

MR_FN int lora_after(const mr_gpu_lora &a, const lora_block &b) {
  return a.slots.first ? lora_next(a, b, b.adapter) : 0;
}

/* Whether row r of the tile is of the adapter at hand. */
MR_FN bool lora_mine(const mr_gpu_lora &a, const lora_block &b, int r) {
  return r < b.m && (!a.slots.first || a.slots.adapter[a.slots.from[b.first + r]] == b.adapter);
}

template <int KIND>
MR_FN void lora_down(const mr_gpu_lora &a, const lora_block &b, const mr_gpu_lora_link &l, int head,
                     int n0) {
  enum { COLS = MR_GPU_LORA_DOWN_COLS };
  lora_shared<COLS, KIND> *s = (lora_shared<COLS, KIND> *)mr_shared();
  float(*sums)[ROWS][COLS] = (float(*)[ROWS][COLS])(s + 1);
  lora_part p = {a.a + l.in + head * l.in_step, a.a_plane, a.a_ld, a.row, b.first, b.m, n0};
  if (a.slots.first) {
    size_t first = (size_t)a.slots.first[b.expert];
    p.a_ld = (size_t)((l.k + MR_GPU_K - 1) / MR_GPU_K * MR_GPU_K);
    p.a += first * a.slots.a_first - first * p.a_ld;
  }
  mr_frag_c c;
  lora_product<COLS, KIND>(c, s, p, l);
  MR_UNROLL
  for (int i = 0; i < MR_C; i++)
    sums[MR_THREAD / MR_WARP][mr_row(i)][mr_col(i)] = c.r[i];
  MR_BARRIER();
  for (int i = MR_THREAD; i < ROWS * COLS; i += MR_THREADS) {
    int row = i / COLS, col = i % COLS;
    if (n0 + col >= l.n || !lora_mine(a, b, row))
      continue;
    float sum = 0;
    MR_UNROLL
    for (int w = 0; w < MR_GPU_WARPS; w++)
      sum += sums[w][row][col];
    mr_gpu_bf16 *to =
        a.mid + (size_t)(b.first + row) * a.mid_ld + (size_t)(l.out + head * l.out_step + n0 + col);
    *to = mr_narrow(sum);
    if (KIND == MR_GPU_PAIR)
      to[a.mid_plane] = mr_rest(sum, *to);
  }
}

template <int KIND>
MR_FN void lora_up(const mr_gpu_lora &a, const lora_block &b, const mr_gpu_lora_link &l, int head,
                   int n0) {
  enum { COLS = MR_GPU_LORA_UP_COLS };
  lora_shared<COLS, KIND> *s = (lora_shared<COLS, KIND> *)mr_shared();
  lora_part p = {a.mid + l.in + head * l.in_step, a.mid_plane, a.mid_ld, 0, b.first, b.m, n0};
  mr_frag_c c;
  lora_product<COLS, KIND>(c, s, p, l);
  MR_UNROLL
  for (int i = 0; i < MR_C; i++) {
    int row = mr_row(i), n = n0 + 16 * (MR_THREAD / MR_WARP) + mr_col(i), place = b.first + row;
    if (n >= l.n || !lora_mine(a, b, row))
      continue;
    float *y = a.y + (size_t)(a.row ? a.row[place] : place) * a.ld +
               (size_t)(l.out + head * l.out_step + n);
    *y += l.bias ? c.r[i] + l.bias[n] : c.r[i];
  }
}

/* Barriers are the same for all: what is asked here is the block's. */
template <int COLS, int KIND>
MR_FN void lora_tile(const mr_gpu_lora &a, lora_block b, int n0, int head) {
  for (; b.adapter; b.adapter = lora_after(a, b)) {
    const mr_gpu_lora_link &l = a.links[b.expert * a.slots.adapters + b.adapter - 1];
    if (n0 >= l.n || head >= l.heads)
      continue;
    if (COLS == MR_GPU_LORA_DOWN_COLS)
      lora_down<KIND>(a, b, l, head, n0);
    else
      lora_up<KIND>(a, b, l, head, n0);
  }
}

template <int COLS, int KIND> MR_FN void lora(const mr_gpu_lora &a) {
  int n0 = MR_BLOCK(0) * COLS, head = a.slots.first ? 0 : MR_BLOCK(2);
  for (int tile = MR_BLOCK(1);; tile += a.slots.step) {
    lora_block b = lora_begin(a, tile);
    lora_tile<COLS, KIND>(a, b, n0, head);
    if (!a.slots.first || b.m <= 0)
      return;
  }
}

#undef LD
#undef ROWS

MR_GPU_KERNEL(lora_down_bf16, mr_gpu_lora, MR_GPU_WARPS) {
  lora<MR_GPU_LORA_DOWN_COLS, MR_GPU_BF16>(a);
}
MR_GPU_KERNEL(lora_down_pair, mr_gpu_lora, MR_GPU_WARPS) {
  lora<MR_GPU_LORA_DOWN_COLS, MR_GPU_PAIR>(a);
}
MR_GPU_KERNEL(lora_up_bf16, mr_gpu_lora, MR_GPU_WARPS) {
  lora<MR_GPU_LORA_UP_COLS, MR_GPU_BF16>(a);
}
MR_GPU_KERNEL(lora_up_pair, mr_gpu_lora, MR_GPU_WARPS) {
  lora<MR_GPU_LORA_UP_COLS, MR_GPU_PAIR>(a);
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
