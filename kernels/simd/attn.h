/* attn.h: paged attention on vectors, after a vec*.h; see kernels.h.
 *
 * A K part is transposed, [head_dim][32], so that lanes are keys; a V part is [32][head_dim]. All
 * query heads of one kv head and all tokens of a tile (its rows: token by token, head by head) meet
 * a block of 32 keys while it is in cache: scores = q K; a running maximum and sum for each row
 * (online softmax, Milakov and Gimelshein 2018); then out = out * shrink + p V. Blocks go up from
 * position 0. A row meets exactly the blocks that hold a key it sees, so what it computes does not
 * depend on the rows beside it: a masked key has p = 0, which changes no sum.
 */
#ifndef MR_KERNELS_SIMD_ATTN_H
#define MR_KERNELS_SIMD_ATTN_H

#include <math.h>
#include <string.h>

#include "kernels/simd/kv.h"
#include "kernels/simd/math.h"

typedef struct attn_work { /* pointers into the caller's scratch; rows = tokens of the tile * heads
                              of the group */
  const mr_attn *a;
  int kv_head, group, q0, rows;
  size_t dim;          /* head_dim rounded up to 16: distance of rows in q and out */
  float *q, *out;      /* [rows, dim] */
  float *s;            /* [rows, 32]: scores, then p */
  float *sum;          /* [rows, 16]: lane sums of p */
  float *max, *shrink; /* [rows] */
  float *kf, *vf;      /* one block as float32: [head_dim][32], [32][head_dim] */
} attn_work;

typedef struct attn_tile { /* c = (shrink ? c * shrink : 0) + a b */
  const float *a;
  size_t lda;
  const void *b;
  size_t ldb;
  float *c;
  size_t ldc;
  const float *shrink;
  int k;
} attn_tile;

V_INLINE void attn_rows(const attn_tile *t, int rows, int nv, mr_kv_type type, int col, int cols) {
  vf acc[8][2];
  float *c = t->c + col;
  UNROLL for (int i = 0; i < rows; i++) {
    acc[i][0] = acc[i][1] = vzero();
    if (t->shrink == NULL)
      continue;
    vf s = vset1(t->shrink[i]);
    acc[i][0] = vmul(vload(c + (size_t)i * t->ldc), s);
    if (nv == 2)
      acc[i][1] = vmul(vload(c + (size_t)i * t->ldc + VL), s);
  }
  const char *b = (const char *)t->b + (size_t)col * (type == MR_KV_F32 ? 4 : 2);
  tile_sum(acc, rows, nv, type, t->a, t->lda, b, t->ldb, t->k, cols);
  UNROLL for (int i = 0; i < rows; i++) {
    vstore(c + (size_t)i * t->ldc, acc[i][0]);
    if (nv == 2)
      vstore(c + (size_t)i * t->ldc + VL, acc[i][1]);
  }
}

#define ATTN_TILE(NAME, TYPE)                                                                      \
  static void NAME(const attn_tile *t, int rows, int n) {                                          \
    int col = 0;                                                                                   \
    for (; col + 2 * VL <= n; col += 2 * VL) {                                                     \
      TILE_SWITCH(rows, TYPE##_WIDE)                                                               \
    }                                                                                              \
    for (; col < n; col += VL) {                                                                   \
      TILE_SWITCH(rows, TYPE##_NARROW)                                                             \
    }                                                                                              \
  }
#define F32_WIDE(R) attn_rows(t, R, 2, MR_KV_F32, col, VL)
#define F16_WIDE(R) attn_rows(t, R, 2, MR_KV_F16, col, VL)
#define BF16_WIDE(R) attn_rows(t, R, 2, MR_KV_BF16, col, VL)
#define F32_NARROW(R) attn_rows(t, R, 1, MR_KV_F32, col, n - col < VL ? n - col : VL)
#define F16_NARROW(R) attn_rows(t, R, 1, MR_KV_F16, col, n - col < VL ? n - col : VL)
#define BF16_NARROW(R) attn_rows(t, R, 1, MR_KV_BF16, col, n - col < VL ? n - col : VL)
ATTN_TILE(attn_tile_f32, F32)
ATTN_TILE(attn_tile_f16, F16)
ATTN_TILE(attn_tile_bf16, BF16)

/* c[rows, n] for rows r0..r1-1 of the arrays in t */
static void attn_product(attn_tile t, int r0, int r1, int n, mr_kv_type type) {
  int tiles = (r1 - r0 + TILE_ROWS - 1) / TILE_ROWS;
  const attn_tile all = t;
  for (int i = 0, r = r0; i < tiles; i++) {
    int next = r0 + (r1 - r0) * (i + 1) / tiles;
    t.a = all.a + (size_t)r * all.lda;
    t.c = all.c + (size_t)r * all.ldc;
    if (all.shrink != NULL)
      t.shrink = all.shrink + r;
    if (type == MR_KV_F16)
      attn_tile_f16(&t, next - r, n);
    else if (type == MR_KV_BF16)
      attn_tile_bf16(&t, next - r, n);
    else
      attn_tile_f32(&t, next - r, n);
    r = next;
  }
}

/* softcap, slope and mask of one row's scores of the block at base; returns their maximum */
V_INLINE float attn_scores(const mr_attn *a, float *s, int pos, int first, int head, int base) {
  vf lo = vset1((float)(first - base)), hi = vset1((float)(pos + 1 - base));
  vf none = vset1(-INFINITY), max = none;
  int all = first <= base && pos + 1 - base >= BLOCK;
  for (int j = 0; j < BLOCK; j += VL) {
    vf v = vload(s + j), lane = vadd(viota(), vset1((float)j));
    if (a->softcap > 0.0f) {
      vf cap = vset1(a->softcap);
      v = vmul(cap, vtanh(vdiv(v, cap)));
    }
    if (a->slopes != NULL)
      v = vfma(vset1(a->slopes[head]), vadd(lane, vset1((float)(base - pos))), v);
    if (!all)
      v = vselect_lt(lane, hi, vselect_lt(lane, lo, none, v), none);
    vstore(s + j, v);
    max = vmax(max, v);
  }
  return vreduce_max(max);
}

/* New maximum of each row; shrink gets the exponent of what its sums so far are worth. */
static void attn_maxima(const attn_work *w, int t0, int t1, int base) {
  const mr_attn *a = w->a;
  for (int t = t0, r = t0 * w->group; t < t1; t++) {
    int pos = a->pos0 + w->q0 + t, first = mr_attn_first(a, pos);
    for (int h = w->kv_head * w->group; h < (w->kv_head + 1) * w->group; h++, r++) {
      float m = attn_scores(a, w->s + (size_t)r * BLOCK, pos, first, h, base), old = w->max[r];
      w->max[r] = m > old ? m : old;
      w->shrink[r] = old - w->max[r];
    }
  }
}

/* Scores of rows r0..r1-1 to p; their sums go on. */
static void attn_softmax(const attn_work *w, int r0, int r1) {
  for (int r = r0; r < r1; r += VL) {
    int n = r1 - r < VL ? r1 - r : VL;
    vstore_n(w->shrink + r, vexp(vload_n(w->shrink + r, n)), n);
  }
  for (int r = r0; r < r1; r++) {
    float *s = w->s + (size_t)r * BLOCK, *sums = w->sum + (size_t)r * 16;
    vf m = vset1(w->max[r]), sum = vmul(vload(sums), vset1(w->shrink[r]));
    UNROLL for (int j = 0; j < BLOCK; j += VL) {
      vf p = vexp(vsub(vload(s + j), m));
      sum = vadd(sum, p);
      vstore(s + j, p);
    }
    vstore(sums, sum);
  }
}

/* Tokens t0..t1-1 of the tile meet the block of keys at base, of which `keys` are stored. */
static void attn_block(const attn_work *w, int t0, int t1, int base, int keys, const uint8_t *k,
                       mr_kv_type type) {
  const mr_attn *a = w->a;
  int dim = a->head_dim, r0 = t0 * w->group, r1 = t1 * w->group;
  const uint8_t *v = k + mr_kv_part_bytes(type, dim);
  const void *kb = k, *vb = v;
  if (type > MR_KV_BF16 || (r1 - r0 > TILE_ROWS && type != MR_KV_F32)) { /* convert once */
    kv_to_f32(w->kf, w->vf, k, v, dim, keys, type);
    type = MR_KV_F32, kb = w->kf, vb = w->vf;
  }
  attn_tile qk = {w->q, w->dim, kb, BLOCK, w->s, BLOCK, NULL, dim};
  attn_product(qk, r0, r1, BLOCK, type);
  attn_maxima(w, t0, t1, base);
  attn_softmax(w, r0, r1);
  attn_tile pv = {w->s, BLOCK, vb, (size_t)dim, w->out, w->dim, w->shrink, keys};
  attn_product(pv, r0, r1, dim, type);
}

static void attn_begin(attn_work *w, const mr_attn *a, int kv_head, int q0, int q1, float *f) {
  int group = a->n_heads / a->n_kv_heads, dim = a->head_dim;
  size_t rows = (size_t)((q1 - q0) * group), wide = ((size_t)dim + 15) / 16 * 16;
  *w = (attn_work){
      .a = a, .kv_head = kv_head, .group = group, .q0 = q0, .rows = (int)rows, .dim = wide};
  w->q = f, f += rows * wide;
  w->out = f, f += rows * wide;
  w->s = f, f += rows * BLOCK;
  w->sum = f, f += rows * 16;
  w->kf = f, f += BLOCK * wide;
  w->vf = f, f += BLOCK * wide;
  w->max = f, f += rows;
  w->shrink = f;
  memset(w->out, 0, rows * wide * sizeof(float));
  memset(w->sum, 0, rows * 16 * sizeof(float));
  for (size_t r = 0; r < rows; r++) {
    int head = kv_head * group + (int)r % group;
    const float *q = a->q + (size_t)(q0 + (int)r / group) * a->q_ld + (size_t)head * (size_t)dim;
    for (int d = 0; d < dim; d += VL) {
      int n = dim - d < VL ? dim - d : VL;
      vstore_n(w->q + r * wide + (size_t)d, vmul(vload_n(q + d, n), vset1(a->scale)), n);
    }
    w->max[r] = a->sinks != NULL ? a->sinks[head] : -INFINITY;
    w->sum[r * 16] = a->sinks != NULL ? 1.0f : 0.0f;
  }
}

static void attn_end(const attn_work *w) {
  const mr_attn *a = w->a;
  for (int r = 0; r < w->rows; r++) {
    size_t head = (size_t)(w->kv_head * w->group + r % w->group);
    float *out = a->out + (size_t)(w->q0 + r / w->group) * a->out_ld + head * (size_t)a->head_dim;
    vf sum = vset1(vreduce_add(vload(w->sum + (size_t)r * 16)));
    for (int d = 0; d < a->head_dim; d += VL) {
      int n = a->head_dim - d < VL ? a->head_dim - d : VL;
      vstore_n(out + d, vdiv(vload_n(w->out + (size_t)r * w->dim + d, n), sum), n);
    }
  }
}

static void attn_prefetch(const uint8_t *page, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64)
    _mm_prefetch((const char *)page + i, _MM_HINT_T0);
}

static void simd_attention(const mr_attn *a, int kv_head, int q0, int q1, void *scratch) {
  attn_work w;
  attn_begin(&w, a, kv_head, q0, q1, scratch);
  size_t part = mr_kv_part_bytes(a->type, a->head_dim);
  size_t at = a->layer_offset + 2 * (size_t)kv_head * part;
  int last = (a->pos0 + q1 - 1) / BLOCK, from = q0; /* from: first token that sees the block or one
                                                       after it */
  for (int b = mr_attn_first(a, a->pos0 + q0) / BLOCK, to = q0; b <= last; b++) {
    int base = b * BLOCK;
    while (from < q1 && a->pos0 + from < base)
      from++;
    while (to < q1 && mr_attn_first(a, a->pos0 + to) < base + BLOCK)
      to++;
    if (from >= to)
      continue;
    int keys = a->pos0 + to - base < BLOCK ? a->pos0 + to - base : BLOCK;
    if (b < last && a->pages[b + 1] != NULL)
      attn_prefetch(a->pages[b + 1] + at, 2 * part);
    if (a->own != NULL && b == last)
      attn_block(&w, from - q0, to - q0, base, keys, a->own, MR_KV_OWN_TYPE);
    else
      attn_block(&w, from - q0, to - q0, base, keys, a->pages[b] + at, a->type);
  }
  attn_end(&w);
}

static void simd_fill_attn(mr_kernels *k) {
  k->rotate = simd_rotate;
  k->kv_store = simd_kv_store;
  k->kv_pack = simd_kv_pack;
  k->attention = simd_attention;
}

#undef BLOCK
#endif
