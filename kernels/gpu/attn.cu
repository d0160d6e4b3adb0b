/* attn.cu: attention of new tokens to paged keys and values, prompt and decode alike. A tile is up
 * to 16 query rows a warp; a row is (token, query head of the group), so that the heads that share
 * keys fill the matrix instructions even where there is one new token.
 *
 * A row's sums never depend on its tile: keys are taken in pages from position 0, in splits of
 * MR_GPU_SPLIT, each summed by itself; then splits are merged in order. That is done by one block
 * (prompts), or splits by different blocks and the merge by another kernel (decode): the same
 * operations in the same order (FlashDecoding, Dao et al. 2023). A page that a row may not see adds
 * zeros.
 *
 * Single tokens whose sequences begin with the same pages form groups: a group's tiles do the
 * splits that lie wholly in these pages, for all its rows together, and leave each row's merged
 * sums in `carry`; the row's own tile goes on from there (cascade attention: Hydragen, Juravsky et
 * al. 2024; FlashInfer, Ye et al. 2025).
 *
 * Running form: online softmax (Milakov and Gimelshein 2018). Unified form: all subtract the same
 * phi, so that nothing is rescaled; a row whose maximum is further than `reach` from phi is
 * computed again in the running form (FlashDecoding++, Hong et al. 2023).
 *
 * Keys and values of any type become bfloat16 in shared memory; WIDE: a pair of them, as every
 * operand (gemm.cu), for float32 and in exact mode.
 */
#include "kernels/gpu/gpu.h"

#define PAGE MR_GPU_PAGE
#define TILES (MR_GPU_VALUES / 16)
#define S_LD MR_GPU_S_LD
#define P_LD MR_GPU_P_LD

struct attn_stat { /* of a query row: of the split, the factors, of all splits so far */
  float max, sum, factor, part, total_max, total_sum;
  int pos; /* -1: there is no such row */
};

template <bool WIDE> struct attn_block { /* what a block works on */
  enum { PLANES = WIDE ? 2 : 1 };
  mr_gpu_tile tile;
  int kv_head, v0, y, rows, warp;
  int first_key, last_key;     /* that any row of the tile sees, and the tile does */
  int base, first, last_split; /* splits: the one that parts begin with; those that are done */
  mr_gpu_bf16 *q, *k, *v, *p;
  float *s;
  attn_stat *stat;
};

/* Of a tile's query row: its token's row in the step, and its position. */
MR_FN int row_token(const mr_gpu_attn &a, const mr_gpu_tile &t, int r) {
  int token = t.row + (t.first + r) / a.group;
  return a.members ? a.members[token] : token;
}

MR_FN int row_pos(const mr_gpu_attn &a, const mr_gpu_tile &t, int r) {
  return a.members ? a.pos[row_token(a, t, r)] : t.pos + (t.first + r) / a.group;
}

MR_FN int row_head(const mr_gpu_attn &a, const mr_gpu_tile &t, int kv_head, int r) {
  return kv_head * a.group + (t.first + r) % a.group;
}

MR_FN int first_seen(const mr_gpu_attn &a, int pos) {
  int first = a.window > 0 ? mr_imax(0, pos - a.window + 1) : 0;
  return a.chunk > 0 ? mr_imax(first, pos / a.chunk * a.chunk) : first;
}

/* Whether tiles of runs go on from what groups left. */
MR_FN bool goes_on(const mr_gpu_attn &a) {
  return a.carry && !a.members;
}

template <bool WIDE> MR_FN attn_block<WIDE> open_block(const mr_gpu_attn &a) {
  attn_block<WIDE> b;
  unsigned char *shared = (unsigned char *)mr_shared();
  b.tile = a.tiles[MR_BLOCK(0)];
  b.y = MR_BLOCK(1);
  b.kv_head = b.y / a.chunks;
  b.v0 = b.y % a.chunks * MR_GPU_VALUES;
  b.rows = 16 * a.warps;
  b.warp = MR_THREAD / MR_WARP;
  b.first_key = first_seen(a, a.members ? b.tile.pos : row_pos(a, b.tile, 0));
  b.last_key = a.members ? b.tile.shared * MR_GPU_SPLIT - 1 : row_pos(a, b.tile, b.tile.n - 1);
  b.base = goes_on(a) ? b.tile.shared : 0;
  b.first = mr_imax(b.base, b.first_key / MR_GPU_SPLIT);
  b.last_split = b.last_key / MR_GPU_SPLIT;
  b.q = (mr_gpu_bf16 *)(shared + a.at.q);
  b.k = (mr_gpu_bf16 *)(shared + a.at.k);
  b.v = (mr_gpu_bf16 *)(shared + a.at.v);
  b.p = (mr_gpu_bf16 *)(shared + a.at.p);
  b.s = (float *)(shared + a.at.s);
  b.stat = (attn_stat *)(shared + a.at.stat);
  return b;
}

/* ------------------------------------------------------------------ loads */

template <bool WIDE> MR_FN void load_queries(const mr_gpu_attn &a, const attn_block<WIDE> &b) {
  int dim = a.at.q_ld - 8;
  for (int i = MR_THREAD; i < b.rows * dim; i += a.warps * MR_WARP) {
    int r = i / dim, d = i % dim;
    float x = 0;
    if (r < b.tile.n && d < a.head_dim) {
      size_t token = (size_t)row_token(a, b.tile, r);
      size_t head = (size_t)row_head(a, b.tile, b.kv_head, r) * (size_t)a.head_dim;
      x = a.q[token * a.ld_q + head + (size_t)d];
    }
    mr_gpu_bf16 *to = b.q + r * a.at.q_ld + d;
    *to = mr_narrow(x);
    if (WIDE)
      to[b.rows * a.at.q_ld] = mr_rest(x, *to);
  }
}

/* What code i of a word of stored values is, before its scale. */
template <int KV> MR_FN float stored(uint32_t word, int i) {
  return KV == MR_GPU_KV_F32    ? mr_float(word)
         : KV == MR_GPU_KV_F16  ? mr_half(word >> 16 * i & 0xffffu)
         : KV == MR_GPU_KV_BF16 ? mr_float((word >> 16 * i) << 16)
         : KV == MR_GPU_KV_INT8 ? (float)(int8_t)(word >> 8 * i & 255u)
                                : mr_e4m3(word >> 8 * i & 255u);
}

MR_FN uint32_t word_of(const uint8_t *part, int at, int bytes) { /* one value */
  return bytes == 4   ? ((const uint32_t *)(const void *)part)[at]
         : bytes == 2 ? ((const uint16_t *)(const void *)part)[at]
                      : part[at];
}

/* Where keys or values d0 .. d0 + cols - 1 of PAGE tokens go: [PAGE, ld] in shared memory; zeros
 * where a head has none, and for tokens from `keys` on: nobody has written them. */
struct attn_part {
  mr_gpu_bf16 *to;
  int ld;
  const uint8_t *from;
  int d0, cols, keys;
};

/* PER values of a word at once. Not unrolled: registers are short here. */
template <bool WIDE, int KV, int PER> MR_FN void convert(const mr_gpu_attn &a, attn_part p) {
  enum { BYTES = KV == MR_GPU_KV_F32 ? 4 : KV < MR_GPU_KV_INT8 ? 2 : 1 };
  const float *scales = (const float *)(const void *)(p.from + PAGE * a.head_dim);
  MR_ROLL
  for (int j = MR_THREAD / 16; j < PAGE; j += a.warps * MR_WARP / 16) { /* 16 threads a token */
    bool there = j < p.keys;
    float scale = KV >= MR_GPU_KV_INT8 && there ? scales[j] : 1;
    MR_ROLL
    for (int c = MR_THREAD % 16 * PER; c < p.cols; c += 16 * PER) {
      mr_gpu_bf16 *to = p.to + j * p.ld + c;
      int at = j * a.head_dim + p.d0 + c;
      uint32_t word = 0;
      if (there && p.d0 + c < a.head_dim)
        word = PER > 1 ? ((const uint32_t *)(const void *)p.from)[at / PER]
                       : word_of(p.from, at, BYTES);
      MR_UNROLL
      for (int v = 0; v < PER; v++) {
        float x = stored<KV>(word, v) * scale;
        to[v] = mr_narrow(x);
        if (WIDE)
          to[PAGE * p.ld + v] = mr_rest(x, to[v]);
      }
    }
  }
}

/* Words of whole values where a head ends with a word. */
template <bool WIDE, int KV> MR_FN void convert_type(const mr_gpu_attn &a, attn_part p) {
  enum { PER = KV < MR_GPU_KV_INT8 ? 2 : 4 };
  if (a.head_dim % PER)
    convert<WIDE, KV, 1>(a, p);
  else
    convert<WIDE, KV, PER>(a, p);
}

/* Of stored values that lie in shared memory. */
template <bool WIDE> MR_FN void convert_part(const mr_gpu_attn &a, attn_part p) {
  if (a.kv == MR_GPU_KV_F16)
    convert_type<WIDE, MR_GPU_KV_F16>(a, p);
  else if (a.kv == MR_GPU_KV_BF16)
    convert_type<WIDE, MR_GPU_KV_BF16>(a, p);
  else if (a.kv == MR_GPU_KV_INT8)
    convert_type<WIDE, MR_GPU_KV_INT8>(a, p);
  else
    convert_type<WIDE, MR_GPU_KV_FP8>(a, p);
}

/* bfloat16 as it is stored, or float32 as pairs. */
template <bool WIDE> MR_FN void load_part(const mr_gpu_attn &a, attn_part p) {
  if (WIDE) {
    convert<WIDE, MR_GPU_KV_F32, 1>(a, p);
    return;
  }
  int each = p.cols / 8;
  for (int i = MR_THREAD; i < PAGE * each; i += a.warps * MR_WARP) {
    int j = i / each, c = i % each * 8, d = p.d0 + c;
    mr_gpu_bf16 *at = p.to + j * p.ld + c;
    bool there = j < p.keys && d < a.head_dim;
    if (there)
      mr_async16(at, (const mr_gpu_bf16 *)p.from + (size_t)j * (size_t)a.head_dim + (size_t)d);
    else
      *(mr_u128 *)at = mr_u128{{0, 0, 0, 0}};
  }
}

template <bool WIDE>
MR_FN attn_part part_of(const mr_gpu_attn &a, const attn_block<WIDE> &b, bool value, int stage,
                        const uint8_t *from, int page) {
  int ld = value ? a.at.v_ld : a.at.q_ld, planes = attn_block<WIDE>::PLANES;
  return attn_part{(value ? b.v : b.k) + stage * planes * PAGE * ld,
                   ld,
                   from,
                   value ? b.v0 : 0,
                   value ? a.at.values : a.at.q_ld - 8,
                   b.last_key + 1 - page * PAGE};
}

/* A page of keys and values comes to shared memory: ready, or as it is stored (at.raw_part). */
template <bool WIDE>
MR_FN void load_page(const mr_gpu_attn &a, const attn_block<WIDE> &b, int page, int stage) {
  const uint8_t *k = a.pages + (size_t)a.table[b.tile.table + page] * a.page_bytes +
                     a.layer_offset + (size_t)b.kv_head * 2 * a.part_bytes;
  if (a.at.raw_part) {
    uint8_t *to = (uint8_t *)mr_shared() + a.at.raw + (uint32_t)stage * 2 * a.at.raw_part;
    for (uint32_t i = 16 * (uint32_t)MR_THREAD; i < 2 * a.at.raw_part;
         i += 16 * (uint32_t)(a.warps * MR_WARP))
      mr_async16(to + i, i < a.at.raw_part ? k + i : k + a.part_bytes + (i - a.at.raw_part));
  } else {
    load_part<WIDE>(a, part_of(a, b, false, stage, k, page));
    load_part<WIDE>(a, part_of(a, b, true, stage, k + a.part_bytes, page));
  }
  mr_async_commit();
}

/* What load_page brought as it is stored is made ready. */
template <bool WIDE>
MR_FN void convert_page(const mr_gpu_attn &a, const attn_block<WIDE> &b, int page, int stage) {
  const uint8_t *k = (const uint8_t *)mr_shared() + a.at.raw + (uint32_t)stage * 2 * a.at.raw_part;
  convert_part<WIDE>(a, part_of(a, b, false, 0, k, page));
  convert_part<WIDE>(a, part_of(a, b, true, 0, k + a.at.raw_part, page));
}

/* ------------------------------------------------------------------ a page */

/* s[16 rows, PAGE] = q k^T of a warp. */
template <bool WIDE> MR_FN void scores(const mr_gpu_attn &a, const attn_block<WIDE> &b, int stage) {
  int ld = a.at.q_ld, planes = attn_block<WIDE>::PLANES;
  const mr_gpu_bf16 *q = b.q + 16 * b.warp * ld, *k = b.k + stage * planes * PAGE * ld;
  mr_frag_c c[PAGE / 16];
  MR_UNROLL
  for (int t = 0; t < PAGE / 16; t++)
    mr_zero(c[t]);
  for (int d = 0; d < ld - 8; d += 16) {
    mr_frag_a high, low;
    mr_load_a(high, q + d, ld);
    if (WIDE)
      mr_load_a(low, q + b.rows * ld + d, ld);
    MR_UNROLL
    for (int t = 0; t < PAGE / 16; t++) {
      mr_frag_b x;
      mr_load_b(x, k + 16 * t * ld + d, ld);
      mr_mma(c[t], high, x);
      if (WIDE) {
        mr_mma(c[t], low, x);
        mr_load_b(x, k + (PAGE + 16 * t) * ld + d, ld);
        mr_mma(c[t], high, x);
      }
    }
  }
  MR_UNROLL
  for (int t = 0; t < PAGE / 16; t++)
    MR_UNROLL
  for (int i = 0; i < MR_C; i++)
    b.s[(16 * b.warp + mr_row(i)) * S_LD + 16 * t + mr_col(i)] = c[t].r[i];
}

template <bool WIDE>
MR_FN float seen_score(const mr_gpu_attn &a, const attn_block<WIDE> &b, int r, float s, int key) {
  int pos = b.stat[r].pos;
  if (key > pos || key < first_seen(a, pos))
    return MR_MINUS_INF;
  s *= a.scale;
  if (a.softcap > 0)
    s = a.softcap * mr_tanh(s / a.softcap);
  if (a.slopes)
    s -= a.slopes[row_head(a, b.tile, b.kv_head, r)] * (float)(pos - key);
  return s;
}

/* Scores of a page become weights; the row's maximum and sum go on. Lanes l, l+16, .. have a row.
 */
template <bool WIDE, bool UNI>
MR_FN void weights(const mr_gpu_attn &a, const attn_block<WIDE> &b, int page) {
  enum { PARTS = MR_WARP / 16, KEYS = PAGE / PARTS };
  int r = 16 * b.warp + MR_LANE % 16, j0 = MR_LANE / 16 * KEYS;
  float s[KEYS], top = MR_MINUS_INF, sum = 0;
  MR_UNROLL
  for (int j = 0; j < KEYS; j++) {
    s[j] = seen_score(a, b, r, b.s[r * S_LD + j0 + j], page * PAGE + j0 + j);
    top = mr_max(s[j], top);
  }
  MR_UNROLL
  for (int m = 16; m < MR_WARP; m *= 2)
    top = mr_max(top, mr_warp_xor(top, m));
  float before = b.stat[r].max, max = mr_max(top, before), base = UNI ? a.phi : max;
  float factor = UNI || max == MR_MINUS_INF ? 1 : mr_exp(before - max);
  mr_gpu_bf16 *p = b.p + r * P_LD + j0;
  MR_UNROLL
  for (int j = 0; j < KEYS; j++) {
    float w = s[j] == MR_MINUS_INF ? 0 : mr_exp(s[j] - base);
    sum += w;
    p[j] = mr_narrow(w);
    if (WIDE)
      p[b.rows * P_LD + j] = mr_rest(w, p[j]);
  }
  MR_UNROLL
  for (int m = 16; m < MR_WARP; m *= 2)
    sum += mr_warp_xor(sum, m);
  if (j0 == 0) {
    b.stat[r].max = max;
    b.stat[r].sum = b.stat[r].sum * factor + sum;
    b.stat[r].factor = factor;
  }
}

/* acc[16 rows, values] = acc * factor + p v of a warp. */
template <bool WIDE, bool UNI>
MR_FN void add_values(const mr_gpu_attn &a, const attn_block<WIDE> &b, mr_frag_c *acc, int stage) {
  int ld = a.at.v_ld, planes = attn_block<WIDE>::PLANES;
  const mr_gpu_bf16 *p = b.p + 16 * b.warp * P_LD, *v = b.v + stage * planes * PAGE * ld;
  MR_UNROLL
  for (int t = 0; t < TILES; t++)
    MR_UNROLL
  for (int i = 0; i < MR_C && !UNI; i++)
    acc[t].r[i] *= b.stat[16 * b.warp + mr_row(i)].factor;
  MR_UNROLL
  for (int k = 0; k < PAGE; k += 16) {
    mr_frag_a high, low;
    mr_load_a(high, p + k, P_LD);
    if (WIDE)
      mr_load_a(low, p + b.rows * P_LD + k, P_LD);
    MR_UNROLL
    for (int t = 0; t < TILES; t++) {
      if (16 * t >= a.at.values)
        break;
      mr_frag_b x;
      mr_load_bt(x, v + k * ld + 16 * t, ld);
      mr_mma(acc[t], high, x);
      if (WIDE) {
        mr_mma(acc[t], low, x);
        mr_load_bt(x, v + (PAGE + k) * ld + 16 * t, ld);
        mr_mma(acc[t], high, x);
      }
    }
  }
}

/* ------------------------------------------------------------------ splits */

/* All pages of a split that the tile sees. */
template <bool WIDE, bool UNI>
MR_FN void do_split(const mr_gpu_attn &a, const attn_block<WIDE> &b, mr_frag_c *acc, int split) {
  int begin = mr_imax(split * MR_GPU_SPLIT, b.first_key) / PAGE;
  int end = mr_imin((split + 1) * MR_GPU_SPLIT - 1, b.last_key) / PAGE + 1;
  bool busy = 16 * b.warp < b.tile.n;
  MR_UNROLL
  for (int t = 0; t < TILES; t++)
    mr_zero(acc[t]);
  if (MR_LANE < 16) { /* a warp resets its own rows only: others may still merge theirs */
    b.stat[16 * b.warp + MR_LANE].max = MR_MINUS_INF;
    b.stat[16 * b.warp + MR_LANE].sum = 0;
  }
  load_page(a, b, begin, 0);
  for (int page = begin; page < end; page++) {
    int stage = a.stages == 2 ? (page - begin) % 2 : 0;
    if (a.stages == 2 && page + 1 < end) {
      load_page(a, b, page + 1, 1 - stage);
      mr_async_wait<1>();
    } else {
      mr_async_wait<0>();
    }
    MR_BARRIER();
    int ready = stage;
    if (a.at.raw_part) {
      convert_page(a, b, page, stage);
      MR_BARRIER();
      ready = 0;
    }
    if (busy) {
      scores(a, b, ready);
      MR_WARP_SYNC();
      weights<WIDE, UNI>(a, b, page);
      MR_WARP_SYNC();
      add_values<WIDE, UNI>(a, b, acc, ready);
    }
    MR_BARRIER();
    if (a.stages == 1 && page + 1 < end)
      load_page(a, b, page + 1, 0);
  }
}

/* How the sums so far and a split's go together: factors on both. */
template <bool UNI>
MR_FN void join(float *max, float *sum, float part_max, float part_sum, float *old, float *part) {
  float top = mr_max(*max, part_max);
  *old = UNI ? 1 : *max == MR_MINUS_INF ? 0 : mr_exp(*max - top);
  *part = UNI ? 1 : part_max == MR_MINUS_INF ? 0 : mr_exp(part_max - top);
  *sum = mr_fma(part_sum, *part, *sum * *old);
  *max = top;
}

/* With the sink, the factor on a row's sums at last. */
template <bool UNI>
MR_FN float last_factor(const mr_gpu_attn &a, int head, float *max, float *sum) {
  float old = 1, part = 1;
  if (a.sinks)
    join<UNI>(max, sum, a.sinks[head], UNI ? mr_exp(a.sinks[head] - a.phi) : 1, &old, &part);
  return old;
}

MR_FN bool out_of_reach(const mr_gpu_attn &a, float max) {
  return !(mr_abs(max - a.phi) < a.reach);
}

template <bool WIDE, bool UNI>
MR_FN void merge_split(const attn_block<WIDE> &b, mr_frag_c *total, const mr_frag_c *acc) {
  int r = 16 * b.warp + MR_LANE;
  if (MR_LANE < 16) {
    attn_stat *s = &b.stat[r];
    join<UNI>(&s->total_max, &s->total_sum, s->max, s->sum, &s->factor, &s->part);
  }
  MR_WARP_SYNC();
  MR_UNROLL
  for (int t = 0; t < TILES; t++)
    MR_UNROLL
  for (int i = 0; i < MR_C; i++) {
    const attn_stat *s = &b.stat[16 * b.warp + mr_row(i)];
    total[t].r[i] = mr_fma(acc[t].r[i], s->part, total[t].r[i] * s->factor);
  }
  MR_WARP_SYNC();
}

/* ------------------------------------------------------------------ whole blocks */

MR_FN float *part_row(const mr_gpu_attn &a, int tile, int y, int split, int r) {
  size_t rows = (size_t)(16 * a.warps), at = (size_t)tile;
  at = at * (size_t)a.ys + (size_t)y;
  at = at * (size_t)a.splits + (size_t)split;
  return a.parts + (at * rows + (size_t)r) * (size_t)(a.at.values + 2);
}

/* Of a row of a tile with shared splits. */
MR_FN float *carry_row(const mr_gpu_attn &a, const mr_gpu_tile &t, int y, int r) {
  size_t at = (size_t)(t.carry + t.first + r) * (size_t)a.ys + (size_t)y;
  return a.carry + at * (size_t)(a.at.values + 2);
}

MR_FN int32_t *redo_row(const mr_gpu_attn &a, int tile, int y, int r) {
  return a.redo + (tile * a.ys + y) * 16 * a.warps + r;
}

template <bool WIDE, bool UNI>
MR_FN void one_split(const mr_gpu_attn &a, const attn_block<WIDE> &b, int split) {
  mr_frag_c acc[TILES];
  do_split<WIDE, UNI>(a, b, acc, split);
  if (MR_THREAD < b.tile.n) {
    float *part = part_row(a, MR_BLOCK(0), b.y, split - b.base, MR_THREAD) + a.at.values;
    part[0] = b.stat[MR_THREAD].max;
    part[1] = b.stat[MR_THREAD].sum;
  }
  MR_UNROLL
  for (int t = 0; t < TILES; t++)
    MR_UNROLL
  for (int i = 0; i < MR_C; i++) {
    int r = 16 * b.warp + mr_row(i), d = 16 * t + mr_col(i);
    if (r < b.tile.n && d < a.at.values)
      part_row(a, MR_BLOCK(0), b.y, split - b.base, r)[d] = acc[t].r[i];
  }
}

MR_FN float *out_row(const mr_gpu_attn &a, const mr_gpu_tile &t, int kv_head, int r) {
  size_t token = (size_t)row_token(a, t, r);
  return a.out + token * a.ld_out + (size_t)row_head(a, t, kv_head, r) * (size_t)a.head_dim;
}

/* A warp's rows before their first split: nothing, or what the group left. */
template <bool WIDE>
MR_FN void begin_rows(const mr_gpu_attn &a, const attn_block<WIDE> &b, mr_frag_c *total) {
  MR_UNROLL
  for (int t = 0; t < TILES; t++)
    mr_zero(total[t]);
  int own = 16 * b.warp + MR_LANE;
  bool there = b.base && own < b.tile.n;
  if (MR_LANE < 16) {
    const float *carry = there ? carry_row(a, b.tile, b.y, own) + a.at.values : 0;
    b.stat[own].total_max = there ? carry[0] : MR_MINUS_INF;
    b.stat[own].total_sum = there ? carry[1] : 0;
  }
  if (!b.base)
    return;
  MR_UNROLL
  for (int t = 0; t < TILES; t++)
    MR_UNROLL
  for (int i = 0; i < MR_C; i++) {
    int r = 16 * b.warp + mr_row(i), c = 16 * t + mr_col(i);
    if (r < b.tile.n && c < a.at.values)
      total[t].r[i] = carry_row(a, b.tile, b.y, r)[c];
  }
}

/* A warp's rows after their last split: done, or left for the members' own tiles. */
template <bool WIDE, bool UNI>
MR_FN void end_rows(const mr_gpu_attn &a, const attn_block<WIDE> &b, const mr_frag_c *total) {
  int own = 16 * b.warp + MR_LANE;
  if (MR_LANE < 16) {
    attn_stat *s = &b.stat[own];
    if (a.members && own < b.tile.n) {
      float *carry = carry_row(a, b.tile, b.y, own) + a.at.values;
      carry[0] = s->total_max;
      carry[1] = s->total_sum;
    }
    int head = row_head(a, b.tile, b.kv_head, own < b.tile.n ? own : 0);
    s->factor = last_factor<UNI>(a, head, &s->total_max, &s->total_sum);
    if (UNI && !a.members)
      *redo_row(a, MR_BLOCK(0), b.y, own) = own < b.tile.n && out_of_reach(a, s->total_max);
  }
  MR_WARP_SYNC();
  MR_UNROLL
  for (int t = 0; t < TILES; t++)
    MR_UNROLL
  for (int i = 0; i < MR_C; i++) {
    int r = 16 * b.warp + mr_row(i), c = 16 * t + mr_col(i);
    if (r >= b.tile.n || c >= a.at.values)
      continue;
    if (a.members) {
      carry_row(a, b.tile, b.y, r)[c] = total[t].r[i];
      continue;
    }
    if (b.v0 + c >= a.head_dim || (!UNI && a.redo && !*redo_row(a, MR_BLOCK(0), b.y, r)))
      continue;
    const attn_stat *s = &b.stat[r];
    out_row(a, b.tile, b.kv_head, r)[b.v0 + c] = total[t].r[i] * s->factor / s->total_sum;
  }
}

template <bool WIDE, bool UNI>
MR_FN void all_splits(const mr_gpu_attn &a, const attn_block<WIDE> &b) {
  mr_frag_c acc[TILES], total[TILES];
  begin_rows(a, b, total);
  for (int s = b.first; s <= b.last_split; s++) {
    do_split<WIDE, UNI>(a, b, acc, s);
    merge_split<WIDE, UNI>(b, total, acc);
  }
  end_rows<WIDE, UNI>(a, b, total);
}

MR_FN bool any_redo(const mr_gpu_attn &a, int n) {
  for (int r = 0; r < n; r++)
    if (*redo_row(a, MR_BLOCK(0), MR_BLOCK(1), r))
      return true;
  return false;
}

template <bool WIDE, bool UNI> MR_FN void attend(const mr_gpu_attn &a) {
  attn_block<WIDE> b = open_block<WIDE>(a);
  int split = b.base + MR_BLOCK(2);
  if (a.parts && (split < b.first || split > b.last_split))
    return;
  if (!UNI && !a.parts && a.redo && !any_redo(a, b.tile.n))
    return;
  load_queries(a, b);
  int r = 16 * b.warp + MR_LANE;
  if (MR_LANE < 16) /* a barrier comes before they are read */
    b.stat[r].pos = r < b.tile.n ? row_pos(a, b.tile, r) : -1;
  if (a.parts)
    one_split<WIDE, UNI>(a, b, split);
  else
    all_splits<WIDE, UNI>(a, b);
}

/* What all_splits does after each split, from what one_split left. */
template <bool UNI> MR_FN void merge(const mr_gpu_attn &a) {
  attn_block<false> b = open_block<false>(a);
  for (int i = MR_THREAD; i < b.tile.n * a.at.values; i += MR_THREADS) {
    int r = i / a.at.values, c = i % a.at.values, d = b.v0 + c, stat = a.at.values;
    const float *before = b.base ? carry_row(a, b.tile, b.y, r) : 0;
    float max = before ? before[stat] : MR_MINUS_INF, sum = before ? before[stat + 1] : 0;
    float total = before ? before[c] : 0, old, part;
    for (int s = b.first; s <= b.last_split; s++) {
      const float *from = part_row(a, MR_BLOCK(0), b.y, s - b.base, r);
      join<UNI>(&max, &sum, from[stat], from[stat + 1], &old, &part);
      total = mr_fma(from[c], part, total * old);
    }
    if (a.members) {
      float *carry = carry_row(a, b.tile, b.y, r);
      carry[c] = total;
      if (c == 0) {
        carry[stat] = max;
        carry[stat + 1] = sum;
      }
      continue;
    }
    float factor = last_factor<UNI>(a, row_head(a, b.tile, b.kv_head, r), &max, &sum);
    if (d < a.head_dim)
      out_row(a, b.tile, b.kv_head, r)[d] = total * factor / sum;
    if (UNI && c == 0)
      *redo_row(a, MR_BLOCK(0), b.y, r) = out_of_reach(a, max);
  }
}

#undef PAGE
#undef TILES
#undef S_LD
#undef P_LD

MR_GPU_KERNEL(attn_bf16, mr_gpu_attn, MR_GPU_WARPS) {
  attend<false, false>(a);
}
MR_GPU_KERNEL(attn_wide, mr_gpu_attn, MR_GPU_WARPS) {
  attend<true, false>(a);
}
MR_GPU_KERNEL(attn_uni_bf16, mr_gpu_attn, MR_GPU_WARPS) {
  attend<false, true>(a);
}
MR_GPU_KERNEL(attn_uni_wide, mr_gpu_attn, MR_GPU_WARPS) {
  attend<true, true>(a);
}
MR_GPU_KERNEL(merge, mr_gpu_attn, MR_GPU_WARPS) {
  merge<false>(a);
}
MR_GPU_KERNEL(merge_uni, mr_gpu_attn, MR_GPU_WARPS) {
  merge<true>(a);
}
