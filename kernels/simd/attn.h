/* attn.h: paged attention on vectors, after a vec*.h; see kernels.h.
 *
 * A K part is transposed, [head_dim][32], so that lanes are keys; a V part is [32][head_dim]. Rows
 * are the query heads of one kv head, for each token of the call. They meet keys a span at a time:
 * SPAN blocks, from fixed positions: all scores = q K; a running maximum and sum for each row
 * (online softmax, Milakov and Gimelshein 2018); then out = out * shrink + p V, all in tiles of
 * rows that stay in registers. Few rows (decoding) read the parts as they are stored, each once,
 * and ask for parts to come meanwhile, as memory is what they wait for; for more rows K and V are
 * made float32 once a span, in the cache.
 *
 * A score is one chain of fused multiply-adds along head_dim, an output one along the keys. A row
 * meets the spans that hold a key it sees, from position 0 up, and a masked key has p = 0, which
 * changes no sum. With each split of keys it begins anew; splits are joined in their order, so that
 * several workers may have some each. So what a row computes does not depend on the rows beside it.
 * exp is 2^x: scores are scaled by log2(e) beforehand. int8 parts are met in integers where there
 * are instructions for that: attn_dot.h.
 */
#ifndef MR_KERNELS_SIMD_ATTN_H
#define MR_KERNELS_SIMD_ATTN_H

#include <math.h>
#include <string.h>

#include "kernels/simd/kv.h"
#include "kernels/simd/math.h"

#define SPAN MR_ATTN_SPAN
#define KEYS (SPAN * BLOCK)
#define LOG2E 1.44269504f

typedef struct attn_work { /* rows: token by token, head by head */
  const mr_attn *a;        /* what all tokens have in common */
  int kv_head, group, dim;
  size_t ld; /* dim rounded up to 16: distance of rows in q and out */
  int pos[MR_ATTN_TILE];
  /* in the caller's scratch */
  float *q, *out;                     /* [rows, ld] */
  float *s;                           /* [rows, KEYS]: scores, then p */
  float *sum;                         /* [rows, 16]: lane sums of p */
  float *max, *shrink;                /* [rows] */
  float *all_out, *all_sum, *all_max; /* of the splits before; -infinity: none */
  int dot;                            /* codes meet codes: attn_dot.h; [rows] of what that needs */
  float *dot_scale;
  int32_t *dot_start;
  float *k, *v; /* [dim][32], [KEYS][dim]: a block and a span as float32 */
} attn_work;

typedef struct attn_span { /* the blocks that rows meet at once */
  int base, n;             /* first position; blocks */
  const uint8_t *k[SPAN], *v[SPAN], *k_ahead[SPAN], *v_ahead[SPAN];
  mr_kv_type type[SPAN];
} attn_span;

typedef struct attn_tile { /* rows r0..r1-1, and the keys of the span that one of them sees */
  int r0, r1, t0, t1;      /* tokens t0..t1-1 */
  int from, to;            /* blocks */
  int keys;                /* up to here, from the span's base */
  int clear, unclear;      /* blocks between them are seen whole by all rows */
} attn_tile;

/* ------------------------------------------------------------------ products of a tile */
/* Types whose parts a tile reads as they are. */
static int attn_direct(mr_kv_type type) {
  return type <= MR_KV_INT8;
}

/* Vector at element i of values or codes. */
V_INLINE vf attn_load(const uint8_t *b, size_t i, mr_kv_type type) {
  return type == MR_KV_INT8 ? vload_i8(b + i) : tile_load(b, i, type, VL);
}

V_INLINE size_t attn_bytes(size_t n, mr_kv_type type) {
  return n * (type == MR_KV_F32 ? 4 : type == MR_KV_INT8 ? 1 : 2);
}

/* Asks for what lies at the same place of a part that comes later. */
V_INLINE void attn_ask(const uint8_t *ahead, size_t at, int n, mr_kv_type type) {
  if (type == MR_KV_F32)
    return;
  for (size_t i = 0; i < attn_bytes((size_t)n, type); i += 64)
    _mm_prefetch((const char *)ahead + attn_bytes(at, type) + i, _MM_HINT_T1);
}

typedef struct attn_product {
  const attn_work *w;
  const attn_tile *t;
  const uint8_t *k, *k_ahead, *const *v, *const *v_ahead;
  int block, first; /* of the span's tiles */
} attn_product;

/* s[rows][VL * 2 keys] = q[rows][dim] k[dim][keys] */
V_INLINE void attn_qk_tile(const attn_product *x, int rows, int col, mr_kv_type type) {
  vf acc[8][2];
  const attn_work *w = x->w;
  size_t ld = w->ld;
  const float *q = w->q + (size_t)x->t->r0 * ld;
  float *s = w->s + (size_t)x->t->r0 * KEYS + x->block * BLOCK + col;
  const uint8_t *k = x->k, *ahead = x->k_ahead;
  UNROLL for (int i = 0; i < rows; i++) acc[i][0] = acc[i][1] = vzero();
  for (int d = 0, dim = w->dim; d < dim; d++) {
    size_t at = (size_t)d * BLOCK + (size_t)col;
    vf k0 = attn_load(k, at, type), k1 = attn_load(k, at + VL, type);
    attn_ask(ahead, at, 2 * VL, type);
    UNROLL for (int i = 0; i < rows; i++) {
      vf y = vset1(q[(size_t)i * ld + (size_t)d]);
      acc[i][0] = vfma(y, k0, acc[i][0]);
      acc[i][1] = vfma(y, k1, acc[i][1]);
    }
  }
  UNROLL for (int i = 0; i < rows; i++) {
    vstore(s + i * KEYS, acc[i][0]);
    vstore(s + i * KEYS + VL, acc[i][1]);
  }
}

/* nv vectors of out from column col on, `cols` lanes of the last */
V_INLINE void attn_pv_tile(const attn_product *x, int rows, int nv, int col, int cols,
                           mr_kv_type type) {
  vf acc[8][4], b[4];
  const attn_work *w = x->w;
  const attn_tile *t = x->t;
  size_t ld = w->ld, dim = (size_t)w->dim;
  float *out = w->out + (size_t)t->r0 * ld + col;
  UNROLL for (int i = 0; i < rows; i++) {
    vf shrink = vset1(w->shrink[t->r0 + i]);
    UNROLL for (int j = 0; j < nv; j++) acc[i][j] =
        vmul(vload(out + (size_t)i * ld + j * VL), shrink);
  }
  for (int n = t->from; n < t->to; n++) {
    const uint8_t *v = x->v[n], *ahead = x->v_ahead[n];
    const float *p = w->s + (size_t)t->r0 * KEYS + n * BLOCK;
    int keys = t->keys - n * BLOCK < BLOCK ? t->keys - n * BLOCK : BLOCK;
    size_t at = (size_t)col;
    for (int l = 0; l < keys; l++, at += dim) {
      UNROLL for (int j = 0; j < nv; j++) b[j] =
          cols == VL ? attn_load(v, at + j * VL, type)
                     : vload_n((const float *)(const void *)v + at, cols);
      attn_ask(ahead, at, nv * VL, type);
      UNROLL for (int i = 0; i < rows; i++) {
        vf y = vset1(p[i * KEYS + l]);
        UNROLL for (int j = 0; j < nv; j++) acc[i][j] = vfma(y, b[j], acc[i][j]);
      }
    }
    for (int l = keys; l < BLOCK; l++, at += dim)
      attn_ask(ahead, at, nv * VL, type);
  }
  UNROLL for (int i = 0; i < rows; i++) UNROLL for (int j = 0; j < nv; j++)
      vstore(out + (size_t)i * ld + j * VL, acc[i][j]);
}

#define ATTN_PRODUCTS(NAME, TYPE)                                                                  \
  static void attn_qk_##NAME(const attn_product *x) {                                              \
    for (int col = 0; col < BLOCK; col += 2 * VL) {                                                \
      TILE_SWITCH(x->t->r1 - x->t->r0, TYPE##_QK)                                                  \
    }                                                                                              \
  }                                                                                                \
  static int attn_pv_##NAME(const attn_product *x) {                                               \
    int col = 0, dim = x->w->dim;                                                                  \
    for (; x->t->r1 - x->t->r0 <= TILE_ROWS / 2 && col + 4 * VL <= dim; col += 4 * VL) {           \
      TILE_SWITCH_4(x->t->r1 - x->t->r0, TYPE##_PV4)                                               \
    }                                                                                              \
    for (; col + 2 * VL <= dim; col += 2 * VL) {                                                   \
      TILE_SWITCH(x->t->r1 - x->t->r0, TYPE##_PV2)                                                 \
    }                                                                                              \
    return col;                                                                                    \
  }
#define F32_QK(R) attn_qk_tile(x, R, col, MR_KV_F32)
#define F16_QK(R) attn_qk_tile(x, R, col, MR_KV_F16)
#define BF16_QK(R) attn_qk_tile(x, R, col, MR_KV_BF16)
#define I8_QK(R) attn_qk_tile(x, R, col, MR_KV_INT8)
#define F32_PV4(R) attn_pv_tile(x, R, 4, col, VL, MR_KV_F32)
#define F16_PV4(R) attn_pv_tile(x, R, 4, col, VL, MR_KV_F16)
#define BF16_PV4(R) attn_pv_tile(x, R, 4, col, VL, MR_KV_BF16)
#define I8_PV4(R) attn_pv_tile(x, R, 4, col, VL, MR_KV_INT8)
#define F32_PV2(R) attn_pv_tile(x, R, 2, col, VL, MR_KV_F32)
#define F16_PV2(R) attn_pv_tile(x, R, 2, col, VL, MR_KV_F16)
#define BF16_PV2(R) attn_pv_tile(x, R, 2, col, VL, MR_KV_BF16)
#define I8_PV2(R) attn_pv_tile(x, R, 2, col, VL, MR_KV_INT8)
ATTN_PRODUCTS(f32, F32)
ATTN_PRODUCTS(f16, F16)
ATTN_PRODUCTS(bf16, BF16)
ATTN_PRODUCTS(i8, I8)

static void attn_qk(const attn_product *x, mr_kv_type type) {
  if (type == MR_KV_F16)
    attn_qk_f16(x);
  else if (type == MR_KV_BF16)
    attn_qk_bf16(x);
  else if (type == MR_KV_INT8)
    attn_qk_i8(x);
  else
    attn_qk_f32(x);
}

static void attn_pv(const attn_product *x, mr_kv_type type) {
  int col, dim = x->w->dim;
  if (type == MR_KV_F16)
    col = attn_pv_f16(x);
  else if (type == MR_KV_BF16)
    col = attn_pv_bf16(x);
  else if (type == MR_KV_INT8)
    col = attn_pv_i8(x);
  else
    col = attn_pv_f32(x);
#define PV(R) attn_pv_tile(x, R, 1, col, dim - col < VL ? dim - col : VL, MR_KV_F32)
  for (; col < dim; col += VL) {
    TILE_SWITCH(x->t->r1 - x->t->r0, PV)
  }
#undef PV
}

/* ------------------------------------------------------------------ softmax */
static int attn_is_shaped(const mr_attn *a) {
  return a->softcap > 0.0f || a->slopes != NULL;
}

/* Scales, softcap, slopes and mask of one row's scores of block i of the span. */
V_INLINE void attn_shape(const attn_work *w, const attn_span *sp, int i, int row) {
  const mr_attn *a = w->a;
  int pos = w->pos[row / w->group], head = w->kv_head * w->group + row % w->group;
  int base = sp->base + i * BLOCK;
  float *s = w->s + (size_t)row * KEYS + i * BLOCK;
  vf lo = vset1((float)(mr_attn_first(a, pos) - base)), hi = vset1((float)(pos + 1 - base));
  vf none = vset1(-INFINITY);
  for (int j = 0; j < BLOCK; j += VL) {
    vf v = vload(s + j), lane = vadd(viota(), vset1((float)j));
    if (mr_kvq_is_8bit(sp->type[i]) && !w->dot)
      v = vmul(v, vload(mr_kvq_scales_of(sp->k[i], w->dim) + j));
    if (a->softcap > 0.0f)
      v = vmul(vset1(a->softcap * LOG2E), vtanh(vdiv(v, vset1(a->softcap))));
    if (a->slopes != NULL)
      v = vfma(vset1(a->slopes[head] * LOG2E), vadd(lane, vset1((float)(base - pos))), v);
    if (w->dot && attn_is_shaped(a))
      v = vadd(v, vload(mr_kvq_scales_of(sp->v[i], w->dim) + j));
    vstore(s + j, vselect_lt(lane, hi, vselect_lt(lane, lo, none, v), none));
  }
}

/* New maxima of a tile's rows, and what their sums so far are worth. */
static void attn_maxima(const attn_work *w, const attn_tile *t) {
  for (int r = t->r0; r < t->r1; r++) {
    const float *s = w->s + (size_t)r * KEYS;
    vf max = vload(s + t->from * BLOCK);
    for (int j = t->from * BLOCK + VL; j < t->to * BLOCK; j += VL)
      max = vmax(max, vload(s + j));
    float old = w->max[r], m = vreduce_max(max);
    w->max[r] = m > old ? m : old;
    w->shrink[r] = old - w->max[r];
  }
  for (int r = t->r0; r < t->r1; r += VL) {
    int n = t->r1 - r < VL ? t->r1 - r : VL;
    vstore_n(w->shrink + r, vexp2(vload_n(w->shrink + r, n)), n);
  }
}

/* Scores of a row in n blocks to p; its sum goes on. */
V_INLINE void attn_exp_row(const attn_work *w, const attn_tile *t, int row, int n) {
  float *s = w->s + (size_t)row * KEYS + t->from * BLOCK, *sums = w->sum + (size_t)row * 16;
  vf max = vset1(w->max[row]), sum = vmul(vload(sums), vset1(w->shrink[row]));
  UNROLL for (int j = 0; j < n * BLOCK; j += VL) {
    vf p = vexp2(vsub(vload(s + j), max));
    sum = vadd(sum, p);
    vstore(s + j, p);
  }
  vstore(sums, sum);
}

/* Codes of V have a scale each key. */
static void attn_scale_p(const attn_work *w, const attn_span *sp, const attn_tile *t) {
  for (int j = t->from * BLOCK; j < t->to * BLOCK; j += VL) {
    vf scale = vload(mr_kvq_scales_of(sp->v[j / BLOCK], w->dim) + j % BLOCK);
    for (int r = t->r0; r < t->r1; r++) {
      float *s = w->s + (size_t)r * KEYS + j;
      vstore(s, vmul(vload(s), scale));
    }
  }
}

/* Of all rows and blocks, or of those where something is masked. */
static void attn_shape_tile(const attn_work *w, const attn_span *sp, const attn_tile *t, int all) {
  for (int i = t->from; i < t->to; i++)
    for (int r = t->r0; r < t->r1 && (all || i < t->clear || i >= t->unclear); r++)
      attn_shape(w, sp, i, r);
}

/* All maxima before the first exponent, so that rows do not wait for each other. */
static void attn_softmax(const attn_work *w, const attn_span *sp, const attn_tile *t) {
  int codes = mr_kvq_is_8bit(sp->type[0]);
  attn_shape_tile(w, sp, t, codes || attn_is_shaped(w->a));
  attn_maxima(w, t);
#define EXP(n)                                                                                     \
  for (int r = t->r0; r < t->r1; r++)                                                              \
  attn_exp_row(w, t, r, n)
  TILE_SWITCH_4(t->to - t->from, EXP)
#undef EXP
  if (codes)
    attn_scale_p(w, sp, t);
}

/* ------------------------------------------------------------------ spans */
static attn_tile attn_cut(const attn_work *w, const attn_span *sp, int r0, int r1) {
  attn_tile t = {.r0 = r0, .r1 = r1, .t0 = r0 / w->group, .t1 = (r1 - 1) / w->group + 1};
  int first = mr_attn_first(w->a, w->pos[t.t0]) - sp->base;
  int high = w->pos[t.t1 - 1] + 1 - sp->base;
  t.keys = high < sp->n * BLOCK ? high : sp->n * BLOCK;
  t.from = first > 0 ? first / BLOCK : 0;
  t.to = (t.keys + BLOCK - 1) / BLOCK;
  int clear = mr_attn_first(w->a, w->pos[t.t1 - 1]) - sp->base;
  t.clear = clear > 0 ? (clear + BLOCK - 1) / BLOCK : 0;
  t.unclear = (w->pos[t.t0] + 1 - sp->base) / BLOCK;
  return t;
}

/* Block b of a span as float32. */
static const uint8_t *attn_widen(const attn_work *w, const attn_span *sp, int b, int is_v,
                                 int keys) {
  const uint8_t *from = is_v ? sp->v[b] : sp->k[b];
  float *to = is_v ? w->v + (size_t)b * BLOCK * (size_t)w->dim : w->k;
  if (is_v)
    kv_v_to_f32(to, from, w->dim, keys < BLOCK ? keys : BLOCK, sp->type[b]);
  else
    kv_k_to_f32(to, from, w->dim, sp->type[b]);
  return (const uint8_t *)to;
}

static void attn_ask_part(const attn_work *w, const uint8_t *part, mr_kv_type type) {
  for (size_t i = 0; i < mr_kv_part_bytes(type, w->dim); i += 64)
    _mm_prefetch((const char *)part + i, _MM_HINT_T1);
}

/* Tokens t0..t1-1 meet a span. */
static void attn_meet(const attn_work *w, const attn_span *sp, int t0, int t1) {
  int r0 = t0 * w->group, rows = t1 * w->group - r0;
  int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  int keys = w->pos[t1 - 1] + 1 - sp->base;
  int direct =
      tiles == 1 && attn_direct(sp->type[0]) && w->dim % (2 * VL) == 0 && w->a->type != MR_KV_Q4;
  mr_kv_type type = direct ? sp->type[0] : MR_KV_F32;
  const uint8_t *v[SPAN];
  attn_product x = {.w = w, .v = direct ? sp->v : v, .v_ahead = sp->v_ahead};
  for (int b = 0; b < sp->n; b++) {
    x.k = direct ? sp->k[b] : attn_widen(w, sp, b, 0, BLOCK);
    x.k_ahead = sp->k_ahead[b];
    x.block = b;
    for (int i = 0; i < tiles; i++) {
      attn_tile t = attn_cut(w, sp, r0 + rows * i / tiles, r0 + rows * (i + 1) / tiles);
      x.t = &t;
      if (b >= t.from && b < t.to)
        attn_qk(&x, type);
    }
  }
  for (int b = 0; b < sp->n && !direct && tiles == 1; b++) {
    attn_ask_part(w, sp->k_ahead[b], sp->type[b]);
    attn_ask_part(w, sp->v_ahead[b], sp->type[b]);
  }
  for (int b = 0; b < sp->n && !direct; b++)
    v[b] = attn_widen(w, sp, b, 1, keys - b * BLOCK);
  for (int i = 0; i < tiles; i++) {
    attn_tile t = attn_cut(w, sp, r0 + rows * i / tiles, r0 + rows * (i + 1) / tiles);
    x.t = &t;
    attn_softmax(w, sp, &t);
    attn_pv(&x, type);
  }
}

#ifdef V_DOT
#include "kernels/simd/attn_dot.h"
#else
#define dot_serves(type, dim) 0
#define dot_query(w, row) (void)0
#define dot_meet(w, sp, t0, t1) (void)0
#endif

/* ------------------------------------------------------------------ what comes next */
#define AHEAD 6 /* parts */

typedef struct attn_stream { /* parts in the order in which they are read: of a span all K, all V */
  const uint8_t *const *pages;
  size_t at, part;
  int from, to, end; /* blocks of the span; of all */
  int block, is_v;
  const mr_attn *then; /* whose next follows, or NULL */
} attn_stream;

static void attn_stream_span(attn_stream *st, int first) {
  int to = first / SPAN * SPAN + SPAN;
  st->from = st->block = first;
  st->to = to < st->end ? to : st->end;
  st->is_v = 0;
}

static const uint8_t *attn_stream_part(attn_stream *st) {
  const uint8_t *p = st->pages[st->block] + st->at + (st->is_v ? st->part : 0);
  if (++st->block < st->to)
    return p;
  st->block = st->from;
  st->is_v = !st->is_v;
  if (st->is_v)
    return p;
  if (st->to < st->end) {
    attn_stream_span(st, st->to);
  } else if (st->then != NULL && st->then->next.pages != NULL) {
    const mr_attn_next *n = &st->then->next;
    st->pages = n->pages;
    st->at = st->then->layer_offset + 2 * (size_t)n->kv_head * st->part;
    st->end = n->end;
    st->then = NULL;
    attn_stream_span(st, n->first);
  } else { /* the last one over and over */
    st->block = st->to - 1;
    st->is_v = 1;
  }
  return p;
}

/* ------------------------------------------------------------------ splits of keys */
typedef struct attn_state { /* of a row */
  float *out, *sum, *max;   /* [ld], [16], [1] */
} attn_state;

static attn_state attn_row(const attn_work *w, size_t row) {
  return (attn_state){w->out + row * w->ld, w->sum + row * 16, w->max + row};
}

static attn_state attn_row_before(const attn_work *w, size_t row) {
  return (attn_state){w->all_out + row * w->ld, w->all_sum + row * 16, w->all_max + row};
}

/* to = to * a + x * b */
V_INLINE void attn_mix(float *to, const float *x, size_t n, float a, float b) {
  for (size_t i = 0; i < n; i += VL)
    vstore(to + i, vfma(vload(x + i), vset1(b), vmul(vload(to + i), vset1(a))));
}

/* Joins what a row made of a split to what it made of those before. */
static void attn_join_row(attn_state to, attn_state x, size_t ld) {
  if (*x.max == -INFINITY)
    return;
  if (*to.max == -INFINITY) {
    memcpy(to.out, x.out, ld * sizeof(float));
    memcpy(to.sum, x.sum, 16 * sizeof(float));
    *to.max = *x.max;
    return;
  }
  float max = *x.max > *to.max ? *x.max : *to.max;
  float a = exp2f(*to.max - max), b = exp2f(*x.max - max);
  attn_mix(to.out, x.out, ld, a, b);
  attn_mix(to.sum, x.sum, 16, a, b);
  *to.max = max;
}

/* Rows of tokens t0..t1-1 have met a split. */
static void attn_close_split(const attn_work *w, int t0, int t1) {
  for (size_t row = (size_t)(t0 * w->group); row < (size_t)(t1 * w->group); row++) {
    attn_state x = attn_row(w, row);
    attn_join_row(attn_row_before(w, row), x, w->ld);
    memset(x.out, 0, w->ld * sizeof(float));
    memset(x.sum, 0, 16 * sizeof(float));
    *x.max = -INFINITY;
  }
}

/* Tokens t0..t1-1 meet blocks b0..b1-1 of a. */
static void attn_walk(const attn_work *w, const mr_attn *a, int t0, int t1, int b0, int b1) {
  size_t part = mr_kv_part_bytes(a->type, a->head_dim);
  size_t at = a->layer_offset + 2 * (size_t)w->kv_head * part;
  int from = t0, to = t0; /* that see the span */
  attn_stream st = {.pages = a->pages, .at = at, .part = part, .end = b1, .then = a};
  attn_stream_span(&st, b0);
  for (int i = 0; i < AHEAD; i++)
    (void)attn_stream_part(&st);
  for (int b = b0, end; b < b1; b = end) {
    attn_span sp = {.base = b * BLOCK};
    if (b > 0 && b % MR_ATTN_SPLIT == 0)
      attn_close_split(w, t0, t1);
    end = b / SPAN * SPAN + SPAN < b1 ? b / SPAN * SPAN + SPAN : b1;
    while (from < t1 && w->pos[from] < b * BLOCK)
      from++;
    while (to < t1 && mr_attn_first(a, w->pos[to]) < end * BLOCK)
      to++;
    for (int i = b; i < end; i++, sp.n++) {
      int own = a->own != NULL && i == w->pos[t0] / BLOCK;
      sp.k[sp.n] = own ? a->own : a->pages[i] + at;
      sp.type[sp.n] = own ? MR_KV_OWN_TYPE : a->type;
      sp.v[sp.n] = sp.k[sp.n] + mr_kv_part_bytes(sp.type[sp.n], a->head_dim);
    }
    for (int i = 0; i < sp.n; i++)
      sp.k_ahead[i] = attn_stream_part(&st);
    for (int i = 0; i < sp.n; i++)
      sp.v_ahead[i] = attn_stream_part(&st);
    if (from < to && w->dot)
      dot_meet(w, &sp, from, to);
    else if (from < to)
      attn_meet(w, &sp, from, to);
  }
}

/* ------------------------------------------------------------------ a call */
static void attn_begin(attn_work *w, const mr_attn *a, int kv_head, int tokens, float *f) {
  int group = a->n_heads / a->n_kv_heads, dim = a->head_dim;
  size_t rows = (size_t)(tokens * group), ld = ((size_t)dim + 15) / 16 * 16;
  *w = (attn_work){.a = a, .kv_head = kv_head, .group = group, .dim = dim, .ld = ld};
  w->q = f, f += rows * ld;
  w->out = f, f += rows * ld;
  w->s = f, f += rows * KEYS;
  w->sum = f, f += rows * 16;
  w->k = f, f += BLOCK * ld;
  w->v = f, f += KEYS * ld;
  w->max = f, f += rows;
  w->shrink = f, f += rows;
  w->dot = dot_serves(a->type, dim);
  w->dot_scale = f, f += rows;
  w->dot_start = (int32_t *)(void *)f, f += rows;
  w->all_out = f, f += rows * ld;
  w->all_sum = f, f += rows * 16;
  w->all_max = f;
  memset(w->out, 0, rows * ld * sizeof(float));
  memset(w->sum, 0, rows * 16 * sizeof(float));
}

/* Token t of the call. */
static void attn_token(attn_work *w, int t, const float *q, int pos) {
  const mr_attn *a = w->a;
  vf scale = vset1(a->softcap > 0.0f ? a->scale : a->scale * LOG2E);
  w->pos[t] = pos;
  for (int h = 0; h < w->group; h++) {
    int row = t * w->group + h, head = w->kv_head * w->group + h;
    const float *x = q + (size_t)head * (size_t)w->dim;
    for (int d = 0; d < w->dim; d += VL) {
      int n = w->dim - d < VL ? w->dim - d : VL;
      vstore_n(w->q + (size_t)row * w->ld + (size_t)d, vmul(vload_n(x + d, n), scale), n);
    }
    if (w->dot)
      dot_query(w, row);
    w->max[row] = w->all_max[row] = -INFINITY;
  }
}

/* What a row's sink adds to its sum. It comes last: beside the scores of small values it would
 * leave p few codes. */
static float attn_sink(const mr_attn *a, int head, float max) {
  return a->sinks == NULL ? 0.0f : exp2f(a->sinks[head] * LOG2E - max);
}

static void attn_finish(const mr_attn *a, attn_state x, int head, float *out) {
  float *to = out + (size_t)head * (size_t)a->head_dim;
  vf inverse = vset1(1.0f / (vreduce_add(vload(x.sum)) + attn_sink(a, head, *x.max)));
  for (int d = 0; d < a->head_dim; d += VL) {
    int n = a->head_dim - d < VL ? a->head_dim - d : VL;
    vstore_n(to + d, vmul(vload_n(x.out + d, n), inverse), n);
  }
}

static void attn_end(const attn_work *w, int t, float *out) {
  for (int h = 0; h < w->group; h++) {
    size_t row = (size_t)(t * w->group + h);
    attn_state x = attn_row(w, row), all = attn_row_before(w, row);
    if (*all.max != -INFINITY) {
      attn_join_row(all, x, w->ld);
      x = all;
    }
    attn_finish(w->a, x, w->kv_head * w->group + h, out);
  }
}

static void simd_attention(const mr_attn *a, int kv_head, int q0, int q1, void *scratch) {
  attn_work w;
  int n = q1 - q0, pos = a->pos0 + q0;
  attn_begin(&w, a, kv_head, n, scratch);
  for (int t = 0; t < n; t++)
    attn_token(&w, t, a->q + (size_t)(q0 + t) * a->q_ld, pos + t);
  attn_walk(&w, a, 0, n, mr_attn_first(a, pos) / BLOCK, (pos + n - 1) / BLOCK + 1);
  for (int t = 0; t < n; t++)
    attn_end(&w, t, a->out + (size_t)(q0 + t) * a->out_ld);
}

/* What is shared is met by all rows together, the rest by each token's own. */
static void simd_attention_shared(const mr_attn *a, int n, int blocks, int kv_head, void *scratch) {
  attn_work w;
  attn_begin(&w, a, kv_head, n, scratch);
  for (int t = 0; t < n; t++)
    attn_token(&w, t, a[t].q, a[t].pos0);
  attn_walk(&w, a, 0, n, 0, blocks);
  for (int t = 0; t < n; t++) {
    attn_walk(&w, &a[t], t, t + 1, blocks, a[t].pos0 / BLOCK + 1);
    attn_end(&w, t, a[t].out);
  }
}

static attn_state attn_row_of(float *state, int h, size_t ld) {
  float *at = state + (size_t)h * (ld + 2 * 16);
  return (attn_state){at, at + ld, at + ld + 16};
}

static void simd_attention_split(const mr_attn *a, int kv_head, int split, float *state,
                                 void *scratch) {
  attn_work w;
  int first = mr_attn_first(a, a->pos0) / BLOCK, b0 = split * MR_ATTN_SPLIT;
  int end = a->pos0 / BLOCK + 1, b1 = b0 + MR_ATTN_SPLIT;
  attn_begin(&w, a, kv_head, 1, scratch);
  attn_token(&w, 0, a->q, a->pos0);
  attn_walk(&w, a, 0, 1, b0 > first ? b0 : first, b1 < end ? b1 : end);
  for (int h = 0; h < w.group; h++) {
    attn_state to = attn_row_of(state, h, w.ld);
    *to.max = -INFINITY;
    attn_join_row(to, attn_row(&w, (size_t)h), w.ld);
  }
}

static void simd_attention_join(const mr_attn *a, int kv_head, float *states, int n) {
  int group = a->n_heads / a->n_kv_heads;
  size_t ld = ((size_t)a->head_dim + 15) / 16 * 16;
  size_t floats = mr_attn_state(a->n_heads, a->n_kv_heads, a->head_dim);
  for (int h = 0; h < group; h++) {
    attn_state all = attn_row_of(states, h, ld);
    for (int i = 1; i < n; i++)
      attn_join_row(all, attn_row_of(states + (size_t)i * floats, h, ld), ld);
    attn_finish(a, all, kv_head * group + h, a->out);
  }
}

#ifdef V_DOT
static void attn_store(uint8_t *k_part, uint8_t *v_part, const float *k, const float *v,
                       int head_dim, int slot, mr_kv_type type) {
  if (dot_serves(type, head_dim))
    dot_store(k_part, v_part, k, v, head_dim, slot);
  else
    simd_kv_store(k_part, v_part, k, v, head_dim, slot, type);
}

static mr_kv_type attn_type(int head_dim) {
  return dot_serves(MR_KV_INT8, head_dim) ? MR_KV_INT8 : MR_KV_F16;
}
#endif

static void simd_fill_attn(mr_kernels *k) {
  k->rotate = simd_rotate;
  k->kv_store = simd_kv_store;
#ifdef V_DOT
  k->kv_store = attn_store;
  k->kv_type = attn_type;
#endif
  k->kv_pack = simd_kv_pack;
  k->attention = simd_attention;
  k->attention_shared = simd_attention_shared;
  k->attention_split = simd_attention_split;
  k->attention_join = simd_attention_join;
}

#undef SPAN
#undef KEYS
#undef LOG2E
#undef AHEAD
#undef BLOCK
#endif
