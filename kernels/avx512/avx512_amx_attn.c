/* avx512_amx_attn.c: attention on AMX tiles for keys and values stored as bfloat16 or in 8 bits;
 * see kernels.h.
 *
 * Parts are stored as the tiles read them, 1 KiB each, [16 pairs][16 columns][2]: of K by 32 of
 * head_dim and 16 keys, pairs along head_dim; of V by 16 of head_dim, pairs along the 32 keys.
 * Codes of 8 bits lie in the order of the bfloat16 that they become, exactly, in the scratch when a
 * block is met. Their scales, one a key, go to the scores and to p.
 *
 * Up to 16 rows (a token and a head each) are a tile; queries and p are rounded to bfloat16, sums
 * are float32. A tile meets a span of keys at once, up to SPAN blocks: all scores, then one
 * maximum, then all products with V in registers, so that tiles and vectors wait for each other
 * once a span. Spans begin at fixed positions, at multiples of SPAN blocks.
 *
 * A row's sums run over the tile's columns and pairs alone: rows beside it change nothing. A masked
 * key has p = 0 exactly; V of keys not stored yet is zero (slot 0 clears the part), so that they
 * add nothing. exp is 2^x in units of log2: scores are scaled by log2(e) beforehand.
 */
#include "kernels/avx512/avx512.h"
#include "kernels/avx512/avx512_amx.h"
#include "kernels/simd/vec512.h"

#include <math.h>
#include <string.h>

#include "kernels/simd/kvcode.h"
#include "kernels/simd/math.h"

#define TILE_BYTES 1024
#define ROWS AMX_ROWS
#define SPAN 4 /* blocks */
#define KEYS (SPAN * BLOCK)
#define UNROLL _Pragma("GCC unroll 16")
#define LOG2E 1.44269504f
#define LEAST -1e30f /* the maximum of no scores: finite, so that differences are never NaN */

typedef struct span {                         /* the blocks that a tile meets at once */
  int first, n;                               /* numbers of blocks */
  int whole;                                  /* every row sees every key */
  const uint8_t *k[SPAN], *v[SPAN];           /* parts as they are stored */
  const float *k_scale[SPAN], *v_scale[SPAN]; /* of codes of 8 bits */
} span;

typedef struct work {
  const mr_attn *a;
  int kv_head, group, q0, rows; /* rows = tokens * heads of the group */
  int tiles, each;              /* tiles of `each` rows, ROWS apart in the arrays below */
  int dim, pos1, last;          /* of the last row: its position and block */
  int plain;                    /* neither softcap nor slopes */
  size_t at, part;              /* in a page; bytes */
  mr_kv_type type;
  /* in the caller's scratch */
  uint16_t *q;         /* [tiles * ROWS, dim] bfloat16 */
  float *out;          /* [tiles * ROWS, dim] */
  float *sum;          /* [tiles * ROWS, 16] lane sums of p */
  float *max, *shrink; /* [tiles * ROWS] */
  float *s[2];         /* [ROWS, KEYS] scores, of what is in work and of what follows */
  uint16_t *p;         /* [ROWS, KEYS] bfloat16 */
  uint8_t *k, *v;      /* codes of 8 bits as bfloat16: of a span; k of a block where tiles is 1 */
} work;

/* lo and hi as 32 bfloat16, rounded to nearest even */
V_INLINE __m512i to_bf16(vf lo, vf hi) {
  __m512i r;
  __asm__("vcvtne2ps2bf16 %2, %1, %0" : "=v"(r) : "v"(hi), "v"(lo));
  return r;
}

/* 2^x for x <= 0: 1 exactly at 0, else to 7e-06; 0 for -infinity, where the reduced argument is 0.
 * (2^f - 1) / f is interpolated at Chebyshev nodes. */
V_INLINE vf exp2_of(vf x) {
  vf f = _mm512_reduce_ps(x, 0x09); /* x - floor(x) */
  vf p = vfma(vset1(0.0127631139f), f, vset1(0.0534410293f));
  p = vfma(p, f, vset1(0.240647048f));
  p = vfma(p, f, vset1(0.693133993f));
  p = vfma(p, f, vset1(1.0f));
  return vscale2(p, x); /* times 2^floor(x) */
}

/* ------------------------------------------------------------------ codes of 8 bits */
/* n codes, a multiple of 32 */
V_INLINE void expand_as(uint8_t *to, const uint8_t *code, size_t n, mr_kv_type type) {
  const __m512i zero = _mm512_setzero_si512();
  for (size_t i = 0; i < n; i += 32) {
    __m512i h;
    if (type == MR_KV_INT8) {
      h = to_bf16(vload_i8(code + i), vload_i8(code + i + 16));
    } else { /* float16's exponents to bfloat16's: 15 to 127 */
      __m512i c =
          _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(const void *)(code + i)));
      __m512i low = _mm512_slli_epi16(_mm512_and_si512(c, _mm512_set1_epi16(0x7f)), 4);
      __mmask32 some = _mm512_cmpneq_epi16_mask(low, zero);
      low = _mm512_mask_add_epi16(low, some, low, _mm512_set1_epi16(112 << 7));
      h = _mm512_or_si512(low, _mm512_slli_epi16(_mm512_srli_epi16(c, 7), 15));
    }
    _mm512_store_si512(to + 2 * i, h);
  }
}

/* A part as bfloat16: as it lies, or in block i of `to`; made once, for the first tile. */
static const uint8_t *expand(const work *w, const uint8_t *part, uint8_t *to, int i, int tile) {
  size_t n = (size_t)w->dim * BLOCK;
  if (w->type == MR_KV_BF16)
    return part;
  to += (size_t)i * 2 * n;
  if (tile == 0 && w->type == MR_KV_INT8)
    expand_as(to, part, n, MR_KV_INT8);
  else if (tile == 0)
    expand_as(to, part, n, MR_KV_FP8);
  return to;
}

static void fetch(const uint8_t *p, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64)
    _mm_prefetch((const char *)p + i, _MM_HINT_T1);
}

/* Brings in the block that is two spans on. */
static void fetch_ahead(const work *w, int block) {
  int b = block + 2 * SPAN;
  if (b <= w->last)
    fetch(w->a->pages[b] + w->at, 2 * w->part);
}

static void open_span(const work *w, span *sp, int first) {
  int end = (first / SPAN + 1) * SPAN, pos0 = w->a->pos0 + w->q0;
  end = end <= w->last ? end : w->last + 1;
  sp->first = first;
  sp->n = end - first;
  sp->whole = end * BLOCK <= pos0 + 1 && mr_attn_first(w->a, w->pos1) <= first * BLOCK;
  for (int i = 0; i < sp->n; i++) {
    sp->k[i] = w->a->pages[first + i] + w->at;
    sp->v[i] = sp->k[i] + w->part;
    sp->k_scale[i] = mr_kvq_scales_of(sp->k[i], w->dim);
    sp->v_scale[i] = mr_kvq_scales_of(sp->v[i], w->dim);
  }
}

/* ------------------------------------------------------------------ a block and a tile */
/* Tiles: 0 and 1 sums, 2 and 3 K or V, 4 q or 4 to 7 p. */
static void scores(const work *w, const uint8_t *k, int tile, float *s) {
  const uint16_t *q = w->q + (size_t)tile * ROWS * (size_t)w->dim;
  TILE_ZERO(0);
  TILE_ZERO(1);
  for (int d = 0; d < w->dim; d += 32, k += 2 * TILE_BYTES) {
    TILE_LOAD(4, q + d, 2 * w->dim);
    TILE_LOAD(2, k, 64);
    TILE_DOT_BF16(0, 4, 2);
    TILE_LOAD(3, k + TILE_BYTES, 64);
    TILE_DOT_BF16(1, 4, 3);
  }
  TILE_STORE(0, s, 4 * KEYS);
  TILE_STORE(1, s + 16, 4 * KEYS);
}

V_INLINE uint32_t bits_below(int n) {
  return n >= 32 ? 0xffffffffu : n <= 0 ? 0 : (1u << n) - 1;
}

/* Softcap, slopes and mask of one row of scores of the block at base. */
static void shape_row(const work *w, float *s, int row, int base) {
  const mr_attn *a = w->a;
  int pos = a->pos0 + w->q0 + row / w->group, head = w->kv_head * w->group + row % w->group;
  uint32_t seen = bits_below(pos + 1 - base) & ~bits_below(mr_attn_first(a, pos) - base);
  for (int j = 0; j < BLOCK; j += VL) {
    vf v = vload(s + j);
    if (a->softcap > 0.0f)
      v = vmul(vset1(a->softcap * LOG2E), vtanh(vdiv(v, vset1(a->softcap))));
    if (a->slopes != NULL)
      v = vfma(vset1(a->slopes[head] * LOG2E), vadd(viota(), vset1((float)(base + j - pos))), v);
    vstore(s + j, _mm512_mask_blend_ps((__mmask16)(seen >> j), vset1(-INFINITY), v));
  }
}

/* Lane r of the result: the largest of m[r]. Pairs of rows, then fours, then 128-bit lanes. */
V_INLINE vf row_maxima(vf m[ROWS]) {
  UNROLL for (int i = 0; i < 8; i++) m[i] =
      vmax(_mm512_unpacklo_ps(m[2 * i], m[2 * i + 1]), _mm512_unpackhi_ps(m[2 * i], m[2 * i + 1]));
  UNROLL for (int i = 0; i < 4; i++) {
    __m512d a = _mm512_castps_pd(m[2 * i]), b = _mm512_castps_pd(m[2 * i + 1]);
    m[i] = vmax(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  UNROLL for (int i = 0; i < 2; i++) m[i] =
      vmax(_mm512_shuffle_f32x4(m[2 * i], m[2 * i + 1], 0x88),
           _mm512_shuffle_f32x4(m[2 * i], m[2 * i + 1], 0xdd));
  return vmax(_mm512_shuffle_f32x4(m[0], m[1], 0x88), _mm512_shuffle_f32x4(m[0], m[1], 0xdd));
}

/* Scales of the keys on the scores of a tile; softcap, slopes and mask. */
static void shape(const work *w, const span *sp, int tile, float *s) {
  for (int i = 0; i < sp->n && w->type != MR_KV_BF16; i++) {
    vf k0 = vload(sp->k_scale[i]), k1 = vload(sp->k_scale[i] + VL);
    for (int r = 0; r < w->each; r++) {
      float *at = s + r * KEYS + i * BLOCK;
      vstore(at, vmul(vload(at), k0));
      vstore(at + VL, vmul(vload(at + VL), k1));
    }
  }
  if (sp->whole && w->plain)
    return;
  for (int r = 0; r < w->each && tile * w->each + r < w->rows; r++)
    for (int i = 0; i < sp->n; i++)
      shape_row(w, s + r * KEYS + i * BLOCK, tile * w->each + r, (sp->first + i) * BLOCK);
}

/* Scores of a tile to p; sums and maxima go on. n: rows, rounded up to a constant. Returns 1 if a
 * maximum grew. */
V_INLINE int softmax(const work *w, const span *sp, int tile, const float *s, int n) {
  float *max = w->max + tile * ROWS, *shrink = w->shrink + tile * ROWS;
  float *sums = w->sum + (size_t)tile * ROWS * 16;
  vf m[ROWS], old = vload(max);
  UNROLL for (int r = 0; r < ROWS; r++) m[r] =
      r < n ? vmax(vload(s + r * KEYS), vload(s + r * KEYS + VL)) : vzero();
  for (int i = 1; i < sp->n; i++)
    UNROLL for (int r = 0; r < n; r++) {
      const float *at = s + r * KEYS + i * BLOCK;
      m[r] = vmax(m[r], vmax(vload(at), vload(at + VL)));
    }
  vf now = vmax(old, row_maxima(m));
  __mmask16 grown = _mm512_cmp_ps_mask(now, old, _CMP_NEQ_UQ) & (__mmask16)((1u << w->each) - 1);
  vstore(max, now);
  vstore(shrink, exp2_of(vsub(old, now)));
  UNROLL for (int r = 0; r < n; r++) m[r] = vzero();
  for (int i = 0; i < sp->n; i++) {
    vf v0 = vset1(1.0f), v1 = v0;
    if (w->type != MR_KV_BF16)
      v0 = vload(sp->v_scale[i]), v1 = vload(sp->v_scale[i] + VL);
    UNROLL for (int r = 0; r < n; r++) {
      const float *at = s + r * KEYS + i * BLOCK;
      vf p0 = exp2_of(vsub(vload(at), vset1(max[r])));
      vf p1 = exp2_of(vsub(vload(at + VL), vset1(max[r])));
      m[r] = vadd(m[r], vadd(p0, p1));
      _mm512_store_si512(w->p + r * KEYS + i * BLOCK, to_bf16(vmul(p0, v0), vmul(p1, v1)));
    }
  }
  UNROLL for (int r = 0; r < n; r++)
      vstore(sums + r * 16, vfma(vload(sums + r * 16), vset1(shrink[r]), m[r]));
  return grown != 0;
}

static int any_softmax(const work *w, const span *sp, int tile, const float *s) {
  if (w->each <= 4)
    return softmax(w, sp, tile, s, 4);
  return w->each <= 8 ? softmax(w, sp, tile, s, 8) : softmax(w, sp, tile, s, ROWS);
}

static void shrink_rows(const work *w, float *out, const float *shrink) {
  for (int r = 0; r < w->each; r++)
    for (int d = 0; d < w->dim; d += VL) {
      float *o = out + r * w->dim + d;
      vstore(o, vmul(vload(o), vset1(shrink[r])));
    }
}

#define ADD_VALUES(i, P)                                                                           \
  if (n > i) {                                                                                     \
    TILE_LOAD(2, v[i] + at, 64);                                                                   \
    TILE_DOT_BF16(0, P, 2);                                                                        \
    TILE_LOAD(3, v[i] + at + TILE_BYTES, 64);                                                      \
    TILE_DOT_BF16(1, P, 3);                                                                        \
  }

/* out = out * shrink + p V */
static void values(const work *w, const span *sp, int tile, int begun, int grown) {
  float *out = w->out + (size_t)tile * ROWS * (size_t)w->dim;
  const uint8_t *v[SPAN];
  int n = sp->n;
  for (int i = 0; i < n; i++)
    v[i] = expand(w, sp->v[i], w->v, i, tile);
  if (begun && grown)
    shrink_rows(w, out, w->shrink + tile * ROWS);
  TILE_LOAD(4, w->p, 2 * KEYS);
  if (n > 1)
    TILE_LOAD(5, w->p + BLOCK, 2 * KEYS);
  if (n > 2)
    TILE_LOAD(6, w->p + 2 * BLOCK, 2 * KEYS);
  if (n > 3)
    TILE_LOAD(7, w->p + 3 * BLOCK, 2 * KEYS);
  for (int d = 0; d < w->dim; d += 32) {
    size_t at = (size_t)d / 32 * 2 * TILE_BYTES;
    if (begun) {
      TILE_LOAD(0, out + d, 4 * w->dim);
      TILE_LOAD(1, out + d + 16, 4 * w->dim);
    } else {
      TILE_ZERO(0);
      TILE_ZERO(1);
    }
    ADD_VALUES(0, 4)
    ADD_VALUES(1, 5)
    ADD_VALUES(2, 6)
    ADD_VALUES(3, 7)
    TILE_STORE(0, out + d, 4 * w->dim);
    TILE_STORE(1, out + d + 16, 4 * w->dim);
  }
}

static void all_scores(const work *w, const span *sp, int tile, float *s) {
  for (int i = 0; i < sp->n; i++) {
    if (tile == 0)
      fetch_ahead(w, sp->first + i);
    scores(w, expand(w, sp->k[i], w->k, w->tiles > 1 ? i : 0, tile), tile, s + i * BLOCK);
  }
}

static void meet(const work *w, const span *sp, int tile, float *s, int begun) {
  shape(w, sp, tile, s);
  values(w, sp, tile, begun, any_softmax(w, sp, tile, s));
}

/* ------------------------------------------------------------------ a call */
/* Slots past the last row repeat it. */
static void begin_row(const work *w, int slot, int row) {
  const mr_attn *a = w->a;
  int head = w->kv_head * w->group + row % w->group, dim = w->dim;
  uint16_t *to = w->q + (size_t)slot * (size_t)dim;
  const float *q = a->q + (size_t)(w->q0 + row / w->group) * a->q_ld + (size_t)head * (size_t)dim;
  vf scale = vset1(a->softcap > 0.0f ? a->scale : a->scale * LOG2E);
  for (int d = 0; d < dim; d += 32)
    _mm512_store_si512(to + d, to_bf16(vmul(vload(q + d), scale), vmul(vload(q + d + 16), scale)));
  memset(w->sum + slot * 16, 0, 64);
  if (a->sinks != NULL) {
    w->max[slot] = a->sinks[head] * LOG2E;
    w->sum[slot * 16] = 1.0f;
  }
}

static void begin(work *w, const mr_attn *a, int kv_head, int q0, int q1, uint8_t *at) {
  int group = a->n_heads / a->n_kv_heads, rows = (q1 - q0) * group;
  size_t slots = (size_t)((rows + ROWS - 1) / ROWS * ROWS), dim = (size_t)a->head_dim;
  *w = (work){.a = a, .kv_head = kv_head, .group = group, .q0 = q0, .rows = rows, .dim = (int)dim};
  w->type = a->type;
  w->part = mr_kv_part_bytes(a->type, a->head_dim);
  w->at = a->layer_offset + 2 * (size_t)kv_head * w->part;
  w->pos1 = a->pos0 + q1 - 1;
  w->last = w->pos1 / BLOCK;
  w->tiles = (int)slots / ROWS;
  w->each = (rows + w->tiles - 1) / w->tiles;
  w->plain = a->softcap <= 0.0f && a->slopes == NULL;
  w->out = (float *)(void *)at, at += slots * dim * 4;
  w->q = (uint16_t *)(void *)at, at += slots * dim * 2;
  w->sum = (float *)(void *)at, at += slots * 64;
  for (int i = 0; i < 2; i++)
    w->s[i] = (float *)(void *)at, at += ROWS * KEYS * 4;
  w->p = (uint16_t *)(void *)at, at += ROWS * KEYS * 2;
  w->k = at, at += dim * KEYS * 2;
  w->v = at, at += dim * KEYS * 2;
  w->max = (float *)(void *)at, at += slots * 4;
  w->shrink = (float *)(void *)at;
  for (size_t i = 0; i < slots; i++)
    w->max[i] = LEAST;
  for (int row = 0; row < w->tiles * w->each; row++)
    begin_row(w, row / w->each * ROWS + row % w->each, row < rows ? row : rows - 1);
}

static void end_call(const work *w) {
  const mr_attn *a = w->a;
  for (int row = 0; row < w->rows; row++) {
    size_t slot = (size_t)(row / w->each * ROWS + row % w->each);
    size_t head = (size_t)(w->kv_head * w->group + row % w->group);
    float *out = a->out + (size_t)(w->q0 + row / w->group) * a->out_ld + head * (size_t)w->dim;
    vf sum = vset1(vreduce_add(vload(w->sum + slot * 16)));
    for (int d = 0; d < w->dim; d += VL)
      vstore(out + d, vdiv(vload(w->out + slot * (size_t)w->dim + d), sum));
  }
}

static mr_kernels simd; /* what serves all else */

static int is_mine(mr_kv_type type, int head_dim) {
  return (type == MR_KV_BF16 || mr_kvq_is_8bit(type)) && head_dim % 32 == 0;
}

static void attention(const mr_attn *a, int kv_head, int q0, int q1, void *scratch) {
  if (!is_mine(a->type, a->head_dim)) {
    simd.attention(a, kv_head, q0, q1, scratch);
    return;
  }
  work w;
  begin(&w, a, kv_head, q0, q1, scratch);
  int first = mr_attn_first(a, a->pos0 + q0) / BLOCK, turn = 0;
  span sp[2];
  tile_configure(w.each, 1u << 2 | 1u << 3);
  open_span(&w, &sp[0], first);
  all_scores(&w, &sp[0], 0, w.s[0]);
  for (int n = 0, more = 1; more; n ^= 1) {
    int next = sp[n].first + sp[n].n;
    more = next <= w.last;
    for (int i = 0; i < w.tiles; i++, turn ^= 1) {
      if (i + 1 < w.tiles) {
        all_scores(&w, &sp[n], i + 1, w.s[turn ^ 1]);
      } else if (more) {
        open_span(&w, &sp[n ^ 1], next);
        all_scores(&w, &sp[n ^ 1], 0, w.s[turn ^ 1]);
      }
      meet(&w, &sp[n], i, w.s[turn], sp[n].first > first);
    }
  }
  TILE_RELEASE();
  end_call(&w);
}

/* A token's codes, where its bfloat16 would be. */
static void store_8bit(uint8_t *k_part, uint8_t *v_part, const float *k, const float *v, int dim,
                       int slot, mr_kv_type type) {
  kv_row r;
  kv_encode_row(&r, k_part, v_part, k, v, dim, slot, type);
  k_part += slot / 16 * (TILE_BYTES / 2) + slot % 16 * 2;
  v_part += slot / 2 * 32 + slot % 2;
  for (int d = 0; d < dim; d += 32, k_part += TILE_BYTES, v_part += TILE_BYTES) {
    for (int i = 0; i < 16; i++)
      memcpy(k_part + i * 32, r.k + d + 2 * i, 2);
    for (int i = 0; i < 32; i++)
      v_part[i / 16 * (TILE_BYTES / 2) + i % 16 * 2] = r.v[d + i];
  }
}

static void kv_store(uint8_t *k_part, uint8_t *v_part, const float *k, const float *v, int head_dim,
                     int slot, mr_kv_type type) {
  if (!is_mine(type, head_dim)) {
    simd.kv_store(k_part, v_part, k, v, head_dim, slot, type);
    return;
  }
  if (mr_kvq_is_8bit(type)) {
    store_8bit(k_part, v_part, k, v, head_dim, slot, type);
    return;
  }
  if (slot == 0)
    memset(v_part, 0, mr_kv_part_bytes(type, head_dim));
  k_part += slot / 16 * TILE_BYTES + slot % 16 * 4;
  v_part += slot / 2 * 64;
  __mmask32 odd = slot % 2 ? 0xaaaaaaaa : 0x55555555;
  for (int d = 0; d < head_dim; d += 32, k_part += 2 * TILE_BYTES, v_part += 2 * TILE_BYTES) {
    uint32_t pairs[16];
    _mm512_storeu_si512(pairs, to_bf16(vload(k + d), vload(k + d + 16)));
    for (int i = 0; i < 16; i++)
      memcpy(k_part + i * 64, &pairs[i], 4);
    __m512i h = to_bf16(vload(v + d), vload(v + d + 16));
    for (int j = 0; j < 2; j++) {
      __m512i x =
          _mm512_cvtepu16_epi32(j ? _mm512_extracti64x4_epi64(h, 1) : _mm512_castsi512_si256(h));
      x = _mm512_or_si512(x, _mm512_slli_epi32(x, 16));
      _mm512_mask_storeu_epi16(v_part + j * TILE_BYTES, odd, x);
    }
  }
}

static mr_kv_type kv_type(int head_dim) {
  (void)head_dim;
  return MR_KV_BF16;
}

void mr_k_fill_avx512_amx_attn(mr_kernels *k) {
  simd = *k;
  k->attention = attention;
  k->kv_store = kv_store;
  k->kv_type = kv_type;
}
