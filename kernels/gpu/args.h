/* args.h: what the host and the GPU's kernels share: each kernel's argument, and the list of
 * kernels. C11 and C++. Pointers are the device's. A kernel takes one struct by value.
 *
 * A matrix of weights or of packed rows is bfloat16 [n, k padded to MR_GPU_K]; in exact mode a
 * second plane of the same shape, `plane` elements on, holds what rounding left (so a number has 16
 * bits); plane 0: there is none. Other buffers are float32 [rows, ld].
 */
#ifndef MR_KERNELS_GPU_ARGS_H
#define MR_KERNELS_GPU_ARGS_H

#include <stddef.h>
#include <stdint.h>

typedef uint16_t mr_gpu_bf16;

#define MR_GPU_K 64       /* columns of a packed row are a multiple of it */
#define MR_GPU_PAGE 32    /* tokens a page of keys and values: MR_KV_BLOCK */
#define MR_GPU_SPLIT 256  /* keys whose sums are made apart and then merged, from position 0 */
#define MR_GPU_VALUES 128 /* value columns of a head that one block computes at most */
#define MR_GPU_WARPS 4    /* of the blocks of all kernels but attention, which may have fewer */
#define MR_GPU_ROWS 16    /* of a warp in matrix products */
#define MR_GPU_GROUP 32   /* weights of few bits that share a scale */
/* of attention's shared memory: floats of a row of scores, bfloat16 of a row of weights, floats of
 * a row's state */
#define MR_GPU_S_LD 36
#define MR_GPU_P_LD 40
#define MR_GPU_STAT 7

/* How weights are held. INT8: int8 times a scale; INT4: 0 .. 15, two a byte, the first in the low
 * half, times a scale, plus a least value. Scales and least values are float16 times their row's
 * unit, for each MR_GPU_GROUP values of a row. */
typedef enum mr_gpu_hold { MR_GPU_BF16, MR_GPU_PAIR, MR_GPU_INT8, MR_GPU_INT4 } mr_gpu_hold;

/* Types of stored keys and values: mr_kv_type of kernels.h. INT8 and FP8: [PAGE, dim] codes, then
 * [PAGE] float32 scales, for each part. */
enum mr_gpu_kv { MR_GPU_KV_F32, MR_GPU_KV_F16, MR_GPU_KV_BF16, MR_GPU_KV_INT8, MR_GPU_KV_FP8 = 5 };

enum mr_gpu_norm_kind { MR_GPU_NORM_NONE, MR_GPU_NORM_RMS, MR_GPU_NORM_LAYER };
/* as mr_act of kernels.h, and two with parameters */
enum mr_gpu_act {
  MR_GPU_SILU,
  MR_GPU_GELU,
  MR_GPU_GELU_TANH,
  MR_GPU_RELU,
  MR_GPU_RELU2,
  MR_GPU_QUICK_GELU,
  MR_GPU_XIELU,  /* act_p: slope above 0, slope below, beta, eps */
  MR_GPU_CLAMPED /* act_p: alpha, limit */
};

typedef struct mr_gpu_few { /* weights of few bits; the layout is the hold's */
  const uint8_t *w;         /* [n, k] or [n, k / 2] */
  const uint16_t *scales;   /* [n, k / MR_GPU_GROUP], INT4: pairs of scale and least value */
  const float *units;       /* [n] */
} mr_gpu_few;

typedef struct mr_gpu_norm {
  const float *w, *b; /* [cols], or NULL */
  float eps;
  int32_t kind;
} mr_gpu_norm;

/* x[row] = embedding of token[row] * scale (+ position[pos[row]]); a block a row. */
typedef struct mr_gpu_embed {
  float *x;
  size_t ld;
  const mr_gpu_bf16 *w; /* [n_vocab, k] */
  size_t plane;
  mr_gpu_few few; /* in place of w */
  int32_t hold;
  const int32_t *token, *pos; /* [rows] */
  const float *position;      /* [context, cols], or NULL */
  float scale;
  int32_t cols, k;
} mr_gpu_embed;

/* out[row] = f(x[from[row]]) rounded: f is x; norm(x); norm(act(x) * up). A block a row. */
typedef struct mr_gpu_pack {
  const float *x, *up; /* up may be NULL */
  size_t ld, ld_up;
  mr_gpu_bf16 *out; /* [rows, k] */
  size_t plane;
  const int32_t *from; /* [rows], or NULL: its own number */
  const float *factor; /* [rows] on the result, or NULL */
  mr_gpu_norm norm;
  float act_p[4];
  int32_t gate; /* 1: act(x) * up, else x */
  int32_t act;
  int32_t cols, k;
} mr_gpu_pack;

/* y[m, n] = a[m, k] w[n, k]^T + bias (+ y). Blocks: (ceil(n / 64), ceil(m / tile rows)). */
typedef struct mr_gpu_gemm {
  const mr_gpu_bf16 *a, *w;
  size_t a_plane, w_plane;
  mr_gpu_few few;    /* in place of w */
  const float *bias; /* [n], or NULL */
  float *y;
  size_t ld;
  int32_t m, n, k;
  int32_t accumulate;
} mr_gpu_gemm;

/* A matrix of an expert, and consecutive rows that are multiplied with it. */
typedef struct mr_gpu_expert {
  const mr_gpu_bf16 *w;
  size_t plane;
  mr_gpu_few few; /* in place of w */
  const float *bias;
  int32_t hold;
} mr_gpu_expert;
typedef struct mr_gpu_item {
  int32_t expert, first, n;
} mr_gpu_item;

/* y[rows of item i] = a[the same rows] w[its expert]^T + bias, where that is held as the kernel
 * takes it. Blocks: (ceil(n / 64), most items that there can be); an item has the tile's rows at
 * most. */
typedef struct mr_gpu_grouped {
  const mr_gpu_expert *experts;
  const mr_gpu_item *items;
  const int32_t *n_items;
  const mr_gpu_bf16 *a; /* [rows, k] */
  size_t a_plane;
  float *y; /* [rows, ld] */
  size_t ld;
  int32_t n, k;
} mr_gpu_grouped;

/* out[n, k] = weights of few bits, each rounded as in the tiles of the products. Blocks: n. */
typedef struct mr_gpu_widen {
  mr_gpu_few few;
  mr_gpu_bf16 *out;
  int32_t k;
} mr_gpu_widen;

/* What an adapter adds in one product (lora.h): out = w in, head by head where there are several.
 */
typedef struct mr_gpu_lora_link {
  const mr_gpu_bf16 *w; /* [n, ld] */
  size_t plane;
  const float *bias;         /* [n], or NULL */
  int32_t n, k, ld;          /* n 0: adds nothing; ld: k padded to MR_GPU_ROWS */
  int32_t in, out;           /* columns where both begin */
  int32_t heads;             /* the same w for each */
  int32_t in_step, out_step; /* columns from one to the next */
} mr_gpu_lora_link;

typedef struct mr_gpu_lora_tile { /* up to MR_GPU_ROWS rows of one adapter */
  int32_t link;                   /* which of `links` */
  int32_t first, m;               /* places in the list of rows */
} mr_gpu_lora_tile;

/* Slots of experts in place of tiles: rows of one expert lie one after the other, of several
 * adapters. */
typedef struct mr_gpu_lora_slots {
  const int32_t *first; /* [experts + 1] slots of expert e: first[e] .. first[e + 1] - 1; or NULL */
  const int32_t *from;  /* [slots] token */
  const int32_t *adapter; /* [tokens] from 1; 0: none */
  int32_t adapters;       /* links: [experts, adapters] */
  int32_t step;           /* blocks that share the tiles of an expert */
  size_t a_first;         /* expert e's rows of a begin at a_first * first[e] */
} mr_gpu_lora_slots;

/* lora_down: mid[place] = w a[row[place]], rounded as packed rows are. Blocks: (ceil(n /
 * MR_GPU_ROWS), tiles, heads). lora_up: y[row[place]] += w mid[place] + bias. Blocks: (ceil(n /
 * 64), tiles, heads); n and heads are the
 * largest of all links. With slots the blocks are (.., slots.step, experts), each with every so
 * many tiles of an expert, a place is a slot, and a_ld is k padded to MR_GPU_K. */
typedef struct mr_gpu_lora {
  const mr_gpu_bf16 *a; /* [rows, a_ld] */
  size_t a_plane, a_ld;
  mr_gpu_bf16 *mid; /* [places, mid_ld] */
  size_t mid_plane, mid_ld;
  float *y; /* [rows, ld] */
  size_t ld;
  const int32_t *row; /* [places], or NULL: its own number */
  const mr_gpu_lora_tile *tiles;
  const mr_gpu_lora_link *links;
  mr_gpu_lora_slots slots;
} mr_gpu_lora;

typedef struct mr_gpu_lora_rows { /* an adapter of the embedding */
  const float *a, *b;             /* [n_vocab, rank], [rank, cols] */
  int32_t rank;                   /* 0: none */
} mr_gpu_lora_rows;

/* x[row] += scale * (b a[token[row]]) of its adapter. A block a row. */
typedef struct mr_gpu_lora_embed {
  float *x;
  size_t ld;
  const int32_t *token, *adapter; /* [rows]; from 1, 0: none */
  const mr_gpu_lora_rows *all;
  float scale;
  int32_t cols;
} mr_gpu_lora_embed;

/* x[row] = norm(x[row]), over cols; or with t: x[row] += norm(t[row]) * scale. A block a row. */
typedef struct mr_gpu_rows {
  float *x;
  const float *t;
  size_t ld, ld_t;
  mr_gpu_norm norm;
  float scale;
  int32_t cols;
} mr_gpu_rows;

/* x[row, cols] times scale, then cap * tanh(x / cap) where cap > 0. Blocks: (ceil(cols / 1024),
 * rows). */
typedef struct mr_gpu_finish {
  float *x;
  size_t ld;
  float scale, cap;
  int32_t cols;
} mr_gpu_finish;

/* Norms and rotates q and k in place, stores k and v in their pages. A warp a head: blocks (rows,
 * ceil((n_heads + n_kv_heads) / MR_GPU_WARPS)); shared: MR_GPU_WARPS * head_dim floats. */
typedef struct mr_gpu_heads {
  float *q, *k;
  const float *v; /* NULL: k itself, once it is ready (latents) */
  size_t ld_q, ld_k, ld_v;
  const float *q_norm, *k_norm;     /* [dims], or [heads, dims] where each; or NULL */
  const float *q_norm_b, *k_norm_b; /* the same, added by layer norms; or NULL */
  const float *rope;                /* [rows, n_rot]: cosines, then sines */
  const float *temper;              /* [rows] on q, or NULL */
  const int32_t *pos, *page;        /* [rows]: position, and the page that holds it */
  uint8_t *pages;
  size_t page_bytes, layer_offset, part_bytes;
  float eps, clip; /* clip 0: none */
  int32_t n_heads, n_kv_heads, head_dim;
  int32_t k_dims;                         /* of k are normed */
  int32_t norm;                           /* MR_GPU_NORM_NONE: neither */
  int32_t bare;                           /* norms where there are no weights, too */
  int32_t each, late;                     /* late: after rope */
  int32_t n_rot, rope_first, interleaved; /* n_rot 0: none */
  int32_t kv;                             /* mr_gpu_kv */
  int32_t rotate; /* keys and queries are rotated in blocks of so many (Hadamard); 0: not */
} mr_gpu_heads;

/* Query rows of one run, or of the single tokens of several that begin with the same pages (a
 * group): (token, head of the key head's group), token by token. */
typedef struct mr_gpu_tile {
  int32_t row;    /* of the run's first token in the step; of a group: its first one in `members` */
  int32_t pos;    /* of that token; of a group: the least of its members' */
  int32_t first;  /* of the run's or the group's query rows */
  int32_t n;      /* query rows */
  int32_t table;  /* where the pages begin in `table` */
  int32_t shared; /* splits of keys, from position 0, that a group does for its members */
  int32_t carry;  /* where the query rows of this run or group begin in `carry` */
} mr_gpu_tile;

/* Where things lie in the shared memory of attention, and how long rows are (shape.h). */
typedef struct mr_gpu_attn_shared {
  int32_t values;               /* value columns of a block, a multiple of 16 */
  int32_t q_ld, v_ld;           /* elements of a row of q and k, of v */
  uint32_t q, k, v, s, p, stat; /* byte offsets */
  uint32_t raw, raw_part; /* keys, then values of a page as they are stored; 0: not that way */
  uint32_t bytes;
} mr_gpu_attn_shared;

/* Attention of the query heads of one key head to its keys. Blocks: (tiles, n_kv_heads * chunks of
 * values, splits of keys or 1); warps * 16 rows a tile. */
typedef struct mr_gpu_attn {
  const float *q; /* [rows, n_heads * head_dim] */
  float *out;
  size_t ld_q, ld_out;
  const uint8_t *pages;
  size_t page_bytes, layer_offset, part_bytes;
  const mr_gpu_tile *tiles;
  const int32_t *table;
  /* tiles of groups: their tokens' rows in the step, and [rows] positions; NULL: tiles of runs */
  const int32_t *members, *pos;
  /* [query rows of groups, n_kv_heads * chunks, values + 2]: sums, maximum and weight of all shared
   * splits: what groups leave, and runs with shared splits go on from. NULL: no split is shared */
  float *carry;
  /* [tiles, n_kv_heads * chunks, splits, warps * 16, values + 2]: sums, maximum and weight of a
   * split, to be merged, from the first on that the tile does; NULL: the block does all splits and
   * merges */
  float *parts;
  /* [tiles, n_kv_heads * chunks, warps * 16]: 1: a row whose scores left the unified form's range.
   * merge_uni writes it; the running form computes only these rows, if it is not NULL */
  int32_t *redo;
  const float *slopes, *sinks; /* [n_heads], or NULL */
  float scale, softcap;
  float phi, reach; /* unified form: what is subtracted; how far a row's maximum may be from it */
  int32_t group, head_dim, ys, chunks, splits; /* ys: n_kv_heads * chunks */
  int32_t window, chunk;
  int32_t warps, stages; /* stages: 2 where a page can be read ahead, else 1 */
  int32_t kv;            /* mr_gpu_kv */
  mr_gpu_attn_shared at;
} mr_gpu_attn;

enum mr_gpu_scoring { /* mr_scoring of src/config.h */
                      MR_GPU_SCORE_SOFTMAX,
                      MR_GPU_SCORE_SIGMOID,
                      MR_GPU_SCORE_SPARSEMIXER
};

/* The experts of each token, the best first, and their weights (src/route.h). A token has `each`
 * slots: `used` experts', and where each is more the last is the shared expert's. Blocks:
 * ceil(tokens / MR_GPU_WARPS), a warp a token; shared: MR_GPU_WARPS * 3 * n floats. */
typedef struct mr_gpu_route {
  const float *scores; /* [tokens, ld] of the router */
  size_t ld;
  const float *bias; /* [n] on the choice, or NULL */
  const float *gate; /* [tokens] on the shared expert's weight, or NULL */
  int32_t *chosen;   /* [tokens, used] */
  float *weight;     /* [tokens, each] */
  /* of the shared expert, whose rows come after tokens * used others: [tokens, each] rows of slots,
   * [tokens * each] tokens of rows */
  int32_t *slot, *from;
  int32_t tokens, n, used, each;
  int32_t scoring, choose_raw, renorm;
  int32_t groups, best_groups, group_best; /* groups 0: none */
  float scale, shared_scale, jitter;
} mr_gpu_route;

/* Rows by expert, those of one in order of slots; each expert's rows in items of `tile` rows.
 * Blocks: n; shared: MR_GPU_SORT_SHARED. tokens * used < 2^31. */
typedef struct mr_gpu_sort {
  const int32_t *chosen; /* [tokens, used] */
  float *weight;         /* [tokens, each] */
  int32_t *slot;         /* [tokens, each]: rows of the slots */
  int32_t *from;         /* [tokens * each]: the token of a row */
  int32_t *first;     /* [n + 2]: where each expert's rows begin, the shared one's, and all end */
  float *factor;      /* [tokens * used]: the row's weight, which then is 1; or NULL */
  mr_gpu_item *items; /* [tokens * used / tile + n] */
  int32_t *n_items;
  int32_t tokens, n, used, each, tile;
} mr_gpu_sort;

/* out[t] = sum over its slots i of weight[i] * y[slot[i]], in order. A block a token. */
typedef struct mr_gpu_mix {
  float *out;
  const float *y;
  size_t ld_out, ld_y;
  const float *weight; /* [tokens, each] */
  const int32_t *slot; /* [tokens, each] */
  int32_t each, cols;
} mr_gpu_mix;

/* out[row] = sigmoid(norm(x[row]) . w). A block a row. */
typedef struct mr_gpu_dot {
  const float *x, *w;
  float *out;
  size_t ld;
  mr_gpu_norm norm;
  int32_t cols;
} mr_gpu_dot;

#define MR_GPU_BEST 64  /* largest values of a row that are known */
#define MR_GPU_MASS 256 /* columns whose weights are summed together */
#define MR_GPU_TOP_WARPS 8

typedef struct mr_gpu_ask { /* of a row of logits x, whose largest value is max */
  double u;                 /* 0 .. 1: which value is drawn by e^((x - max) * inverse); < 0: none */
  float inverse;            /* of the temperature */
  int32_t probe;            /* a column that is asked for; -1: none */
} mr_gpu_ask;

typedef struct mr_gpu_best {
  double sum, total; /* of e^(x - max); of e^((x - max) * inverse) */
  float max;
  int32_t bad;         /* NaN, +infinity or nothing finite: the rest means nothing */
  int32_t drawn, rank; /* -1: none; of the probe, from 1 */
  float drawn_x, probe_x;
  int32_t n, none; /* of those that follow, the largest first, ties to the lowest id */
  float x[MR_GPU_BEST];
  int32_t id[MR_GPU_BEST];
} mr_gpu_best;

/* A block a row. */
typedef struct mr_gpu_top {
  const float *x;
  size_t ld;
  const mr_gpu_ask *ask; /* [rows] */
  mr_gpu_best *out;      /* [rows] */
  int32_t cols;
} mr_gpu_top;

/* Each warp: rounds times MR_GPU_PEAK_CHAINS products of 16x16x16. A block of MR_GPU_WARPS. */
#define MR_GPU_PEAK_CHAINS 4
#define MR_GPU_PEAK_SHARED (16 * 16 * 2)
typedef struct mr_gpu_peak {
  float *out; /* [blocks, threads] */
  int32_t rounds;
} mr_gpu_peak;

/* X(name, argument): all kernels. gemm: rows a tile, then how numbers are held. */
#define MR_GPU_KERNELS(X)                                                                          \
  X(embed, mr_gpu_embed)                                                                           \
  X(pack, mr_gpu_pack)                                                                             \
  X(gemm16_bf16, mr_gpu_gemm)                                                                      \
  X(gemm64_bf16, mr_gpu_gemm)                                                                      \
  X(gemm16_pair, mr_gpu_gemm)                                                                      \
  X(gemm64_pair, mr_gpu_gemm)                                                                      \
  X(gemm16_int8, mr_gpu_gemm)                                                                      \
  X(gemm64_int8, mr_gpu_gemm)                                                                      \
  X(gemm16_int4, mr_gpu_gemm)                                                                      \
  X(gemm64_int4, mr_gpu_gemm)                                                                      \
  X(grouped16_bf16, mr_gpu_grouped)                                                                \
  X(grouped64_bf16, mr_gpu_grouped)                                                                \
  X(grouped16_pair, mr_gpu_grouped)                                                                \
  X(grouped64_pair, mr_gpu_grouped)                                                                \
  X(grouped16_int8, mr_gpu_grouped)                                                                \
  X(grouped64_int8, mr_gpu_grouped)                                                                \
  X(grouped16_int4, mr_gpu_grouped)                                                                \
  X(grouped64_int4, mr_gpu_grouped)                                                                \
  X(widen_int8, mr_gpu_widen)                                                                      \
  X(widen_int4, mr_gpu_widen)                                                                      \
  X(lora_down_bf16, mr_gpu_lora)                                                                   \
  X(lora_down_pair, mr_gpu_lora)                                                                   \
  X(lora_up_bf16, mr_gpu_lora)                                                                     \
  X(lora_up_pair, mr_gpu_lora)                                                                     \
  X(lora_embed, mr_gpu_lora_embed)                                                                 \
  X(norm, mr_gpu_rows)                                                                             \
  X(add, mr_gpu_rows)                                                                              \
  X(finish, mr_gpu_finish)                                                                         \
  X(heads, mr_gpu_heads)                                                                           \
  X(attn_bf16, mr_gpu_attn)                                                                        \
  X(attn_wide, mr_gpu_attn)                                                                        \
  X(attn_uni_bf16, mr_gpu_attn)                                                                    \
  X(attn_uni_wide, mr_gpu_attn)                                                                    \
  X(merge, mr_gpu_attn)                                                                            \
  X(merge_uni, mr_gpu_attn)                                                                        \
  X(route, mr_gpu_route)                                                                           \
  X(sort, mr_gpu_sort)                                                                             \
  X(mix, mr_gpu_mix)                                                                               \
  X(dot, mr_gpu_dot)                                                                               \
  X(top, mr_gpu_top)                                                                               \
  X(peak, mr_gpu_peak)

typedef enum mr_gpu_kernel {
#define MR_GPU_ID(name, args) MR_GPU_##name,
  MR_GPU_KERNELS(MR_GPU_ID)
#undef MR_GPU_ID
      MR_GPU_N_KERNELS
} mr_gpu_kernel;

/* ------------------------------------------------------------------ shared memory, bytes */

#define MR_GPU_GEMM_LD (MR_GPU_K + 8) /* a padded row: its 16-byte parts fall into all banks */
#define MR_GPU_GEMM_COLS 64
#define MR_GPU_GEMM_STAGES 2

/* bytes of a row of raw weights in a tile */
#define MR_GPU_RAW(hold)                                                                           \
  ((hold) == MR_GPU_INT8 ? MR_GPU_K : (hold) == MR_GPU_INT4 ? MR_GPU_K / 2 : 0)
/* rows of a tile; how weights are held: in exact mode two planes, with few bits the raw tiles */
#define MR_GPU_GEMM_SHARED(rows, hold)                                                             \
  ((size_t)MR_GPU_GEMM_STAGES *                                                                    \
   (((size_t)(rows) + MR_GPU_GEMM_COLS) * MR_GPU_GEMM_LD * 2 * ((hold) == MR_GPU_PAIR ? 2 : 1) +   \
    ((hold) >= MR_GPU_INT8 ? (size_t)MR_GPU_GEMM_COLS * (MR_GPU_RAW(hold) + 16) : 0)))

/* columns of a tile; adapters are bfloat16 or pairs of it. Behind it, of lora_down: the warps' sums
 */
#define MR_GPU_LORA_DOWN_COLS 16
#define MR_GPU_LORA_UP_COLS 64
#define MR_GPU_LORA_SHARED(cols, pair)                                                             \
  ((size_t)MR_GPU_GEMM_STAGES * ((pair) ? 2 : 1) * (MR_GPU_ROWS + (size_t)(cols)) *                \
       MR_GPU_GEMM_LD * 2 +                                                                        \
   ((cols) == MR_GPU_LORA_DOWN_COLS ? MR_GPU_WARPS * MR_GPU_ROWS * MR_GPU_ROWS * 4 : 0))

#define MR_GPU_TOP_SHARED(cols)                                                                    \
  (256 * 4 + MR_GPU_TOP_WARPS * 4 + 7 * 4 + MR_GPU_BEST * 8 +                                      \
   2 * sizeof(float) * (((size_t)(cols) + MR_GPU_MASS - 1) / MR_GPU_MASS))

#define MR_GPU_ROUTE_SHARED(n) ((size_t)MR_GPU_WARPS * 3 * (size_t)(n) * sizeof(float))
#define MR_GPU_SORT_SHARED(n) ((size_t)(2 + MR_GPU_WARPS + (n)) * sizeof(int32_t))
#define MR_GPU_REDUCE_SHARED (2 * MR_GPU_WARPS * sizeof(float)) /* of kernels with a norm */

#endif
