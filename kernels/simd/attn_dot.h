/* attn_dot.h: attention in integers, for attn.h: int8 keys and values by dot products of four bytes
 * (VNNI), which read the codes as they lie.
 *
 * Parts are stored for them: K + 128 as uint8 [head_dim / 4][32 keys][4], V as int8
 * [32 keys / 4][head_dim][4], with the logarithms of its scales. A query is cut to 16 bits of its
 * largest value. The logarithm of a key's V scale is added to its score: so p, of at most 1, is
 * what V's codes are multiplied with, is cut to 16 bits as it is, and is divided by that scale
 * where p is summed. Both are a high and a low byte, and two products of bytes give the exact sum
 * of codes in 32 bits: 256 high + low.
 */
#ifndef MR_KERNELS_SIMD_ATTN_DOT_H
#define MR_KERNELS_SIMD_ATTN_DOT_H

#define DOT_DIM 256        /* sums of 32 bits hold that */
#define DOT_ROWS 4         /* by two vectors by high and low, as many as stay in registers */
#define DOT_QUERY 32639.0f /* 127 * 256 + 127 */
#define DOT_P 65535.0f     /* 128 keys of it and 127 are in 32 bits, too */

/* Whether int8 parts of that head_dim are stored like this. */
static int dot_serves(mr_kv_type type, int dim) {
  return type == MR_KV_INT8 && dim % 32 == 0 && dim <= DOT_DIM;
}

/* ------------------------------------------------------------------ storing */
static void dot_store(uint8_t *k_part, uint8_t *v_part, const float *k, const float *v, int dim,
                      int slot) {
  kv_row r;
  kv_encode_row(&r, k_part, v_part, k, v, dim, slot, MR_KV_INT8);
  float *v_scale = mr_kvq_scales(v_part, dim) + slot;
  *v_scale = *v_scale > 0.0f ? log2f(*v_scale) : 0.0f; /* 0: so are the codes */
  uint8_t *k_at = k_part + slot * 4;
  uint8_t *v_at = v_part + (size_t)(slot / 4) * 4 * (size_t)dim;
  for (int d = 0; d < dim; d += 4, k_at += 4 * BLOCK) {
    uint32_t quad;
    memcpy(&quad, r.k + d, 4);
    quad ^= 0x80808080u;
    memcpy(k_at, &quad, 4);
  }
  for (int d = 0; d < dim; d += 16) {
    __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(r.v + d)));
    x = _mm512_slli_epi32(x, (unsigned)(slot % 4) * 8);
    _mm512_mask_storeu_epi8(v_at + 4 * d, 0x1111111111111111u << slot % 4, x);
  }
}

/* ------------------------------------------------------------------ queries and scores */
/* The row's query to codes, in place: high bytes, then low ones. One that is not finite has no
 * codes, and scores that are not numbers. */
static void dot_query(const attn_work *w, int row) {
  float *q = w->q + (size_t)row * w->ld;
  int8_t code[2 * DOT_DIM];
  __m512i sum = _mm512_setzero_si512();
  float most = kv_max(q, w->dim), inverse = most > MR_KVQ_TINY ? DOT_QUERY / most : 0.0f;
  for (int d = 0; d < w->dim; d += VL) {
    vf x = most < 0.0f ? vzero() : vmul(vload(q + d), vset1(inverse));
    __m512i c = _mm512_cvtps_epi32(x);
    __m512i high = _mm512_srai_epi32(_mm512_add_epi32(c, _mm512_set1_epi32(128)), 8);
    sum = _mm512_add_epi32(sum, c);
    _mm_storeu_si128((__m128i *)(void *)(code + d), _mm512_cvtepi32_epi8(high));
    _mm_storeu_si128((__m128i *)(void *)(code + w->dim + d), _mm512_cvtepi32_epi8(c));
  }
  memcpy(q, code, 2 * (size_t)w->dim);
  w->dot_start[row] = -128 * _mm512_reduce_add_epi32(sum);
  w->dot_scale[row] = most < 0.0f ? NAN : most / DOT_QUERY;
}

V_INLINE __m512i dot_quad(const int8_t *p) { /* four bytes in each lane */
  int32_t x;
  memcpy(&x, p, 4);
  return _mm512_set1_epi32(x);
}

V_INLINE vf dot_sum(__m512i high, __m512i low) {
  return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
}

/* Scores of rows r0 .. r0 + rows - 1 and the block's 32 keys; what shapes them comes before V's
 * scales. */
V_INLINE void dot_qk_tile(const attn_product *x, int r0, int rows) {
  const attn_work *w = x->w;
  const int8_t *q = (const int8_t *)(const void *)(w->q + (size_t)r0 * w->ld);
  __m512i high[DOT_ROWS][2], low[DOT_ROWS][2];
  UNROLL for (int i = 0; i < rows; i++) UNROLL for (int j = 0; j < 2; j++) {
    high[i][j] = _mm512_setzero_si512();
    low[i][j] = _mm512_set1_epi32(w->dot_start[r0 + i]);
  }
  for (int d = 0; d < w->dim; d += 4) {
    const uint8_t *at = x->k + (size_t)d * BLOCK;
    __m512i k0 = _mm512_loadu_si512(at), k1 = _mm512_loadu_si512(at + 64);
    if (x->first && r0 == x->t->r0)
      attn_ask(x->k_ahead, (size_t)d * BLOCK, 4 * BLOCK, MR_KV_INT8);
    UNROLL for (int i = 0; i < rows; i++) {
      const int8_t *to = q + (size_t)i * 4 * w->ld + d;
      __m512i h = dot_quad(to), l = dot_quad(to + w->dim);
      high[i][0] = _mm512_dpbusd_epi32(high[i][0], k0, h);
      high[i][1] = _mm512_dpbusd_epi32(high[i][1], k1, h);
      low[i][0] = _mm512_dpbusd_epi32(low[i][0], k0, l);
      low[i][1] = _mm512_dpbusd_epi32(low[i][1], k1, l);
    }
  }
  const float *scale = mr_kvq_scales_of(x->k, w->dim),
              *v = mr_kvq_scales_of(x->v[x->block], w->dim);
  float *s = w->s + (size_t)r0 * KEYS + x->block * BLOCK;
  UNROLL for (int j = 0; j < 2; j++) {
    vf add = attn_is_shaped(w->a) ? vzero() : vload(v + j * VL);
    UNROLL for (int i = 0; i < rows; i++) vstore(
        s + i * KEYS + j * VL, vfma(vmul(dot_sum(high[i][j], low[i][j]), vload(scale + j * VL)),
                                    vset1(w->dot_scale[r0 + i]), add));
  }
}

/* ------------------------------------------------------------------ p and sums of values */
/* Scores of a row in n blocks to p, in codes: high bytes, KEYS low ones behind them, in place.
 * weight: one over the scale of each key's V. */
V_INLINE void dot_exp_row(const attn_work *w, const attn_tile *t, const float *weight, int row,
                          int n) {
  float *s = w->s + (size_t)row * KEYS, *sums = w->sum + (size_t)row * 16;
  vf max = vset1(w->max[row]), sum = vmul(vload(sums), vset1(w->shrink[row]));
  __m512i c[KEYS / VL];
  UNROLL for (int j = 0; j < n * 2; j++) {
    int at = t->from * BLOCK + j * VL;
    vf p = vexp2(vsub(vload(s + at), max));
    sum = vfma(p, vload(weight + at), sum);
    c[j] = _mm512_cvtps_epi32(vmul(p, vset1(DOT_P)));
  }
  vstore(sums, sum);
  uint8_t *to = (uint8_t *)(void *)s + t->from * BLOCK;
  UNROLL for (int j = 0; j < n * 2; j++) {
    _mm_storeu_si128((__m128i *)(void *)(to + j * VL),
                     _mm512_cvtepi32_epi8(_mm512_srli_epi32(c[j], 8)));
    _mm_storeu_si128((__m128i *)(void *)(to + KEYS + j * VL), _mm512_cvtepi32_epi8(c[j]));
  }
}

/* out = out * shrink + p V of 32 columns from col on */
V_INLINE void dot_pv_tile(const attn_product *x, int r0, int rows, int col) {
  const attn_work *w = x->w;
  const attn_tile *t = x->t;
  __m512i high[DOT_ROWS][2], low[DOT_ROWS][2];
  UNROLL for (int i = 0; i < rows; i++) UNROLL for (int j = 0; j < 2; j++) high[i][j] = low[i][j] =
      _mm512_setzero_si512();
  for (int n = t->from; n < t->to; n++) {
    const int8_t *p = (const int8_t *)(const void *)(w->s + (size_t)r0 * KEYS) + n * BLOCK;
    int keys = t->keys - n * BLOCK < BLOCK ? t->keys - n * BLOCK : BLOCK;
    size_t at = (size_t)col * 4;
    for (int l = 0; l < BLOCK; l += 4, at += 4 * (size_t)w->dim) {
      if (x->first && r0 == t->r0)
        attn_ask(x->v_ahead[n], at, 128, MR_KV_INT8);
      if (l >= keys)
        continue;
      __m512i v0 = _mm512_loadu_si512(x->v[n] + at), v1 = _mm512_loadu_si512(x->v[n] + at + 64);
      UNROLL for (int i = 0; i < rows; i++) {
        const int8_t *from = p + (size_t)i * 4 * KEYS + l;
        __m512i h = dot_quad(from), b = dot_quad(from + KEYS);
        high[i][0] = _mm512_dpbusd_epi32(high[i][0], h, v0);
        high[i][1] = _mm512_dpbusd_epi32(high[i][1], h, v1);
        low[i][0] = _mm512_dpbusd_epi32(low[i][0], b, v0);
        low[i][1] = _mm512_dpbusd_epi32(low[i][1], b, v1);
      }
    }
  }
  UNROLL for (int i = 0; i < rows; i++) UNROLL for (int j = 0; j < 2; j++) {
    float *out = w->out + (size_t)(r0 + i) * w->ld + col + j * VL;
    vf old = vmul(vload(out), vset1(w->shrink[r0 + i]));
    vstore(out, vfma(dot_sum(high[i][j], low[i][j]), vset1(1.0f / DOT_P), old));
  }
}

/* Tokens t0..t1-1 meet a span, as in attn_meet. */
static void dot_meet(const attn_work *w, const attn_span *sp, int t0, int t1) {
  int r0 = t0 * w->group, rows = t1 * w->group - r0;
  int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  float weight[KEYS];
  for (int i = 0; i < sp->n; i++)
    for (int j = 0; j < BLOCK; j += VL)
      vstore(weight + i * BLOCK + j,
             vexp2(vsub(vzero(), vload(mr_kvq_scales_of(sp->v[i], w->dim) + j))));
  attn_product x = {.w = w, .v = sp->v, .v_ahead = sp->v_ahead};
  for (int i = 0; i < sp->n; i++) { /* scales that come later; codes are asked for by the tiles */
    attn_ask(sp->k_ahead[i], (size_t)w->dim * BLOCK, 4 * BLOCK, MR_KV_INT8);
    attn_ask(sp->v_ahead[i], (size_t)w->dim * BLOCK, 4 * BLOCK, MR_KV_INT8);
  }
  for (int i = 0; i < tiles; i++) {
    attn_tile t = attn_cut(w, sp, r0 + rows * i / tiles, r0 + rows * (i + 1) / tiles);
    x.t = &t;
    x.first = i == 0;
    for (int b = t.from; b < t.to; b++) {
      x.k = sp->k[b];
      x.k_ahead = sp->k_ahead[b];
      x.block = b;
#define QK(n) dot_qk_tile(&x, r, n)
      for (int r = t.r0; r < t.r1; r += DOT_ROWS)
        TILE_SWITCH_4(t.r1 - r, QK)
#undef QK
    }
    attn_shape_tile(w, sp, &t, attn_is_shaped(w->a));
    attn_maxima(w, &t);
#define EXP(n) dot_exp_row(w, &t, weight, r, n)
    for (int r = t.r0; r < t.r1; r++)
      TILE_SWITCH_4(t.to - t.from, EXP)
#undef EXP
#define PV(n) dot_pv_tile(&x, r, n, col)
    for (int col = 0; col < w->dim; col += 2 * VL)
      for (int r = t.r0; r < t.r1; r += DOT_ROWS)
        TILE_SWITCH_4(t.r1 - r, PV)
#undef PV
  }
}

#endif
