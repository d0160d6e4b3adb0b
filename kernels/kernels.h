/* kernels.h: the contract of the CPU arithmetic: a table of operations.
 *
 *     const mr_kernels *k = mr_kernels_best();     by cpuid, or what MILLRACE_ISA names: ref,
 *                                                  avx2, avxvnni, avx512
 *
 * The table starts as the plain-C reference in every slot (kernels/ref); an instruction set is a
 * folder with one fill function that replaces the slots it does better, and its block sizes.
 * Nothing here allocates, opens files or blocks. Pointers are 4-byte aligned unless said otherwise;
 * lengths need no multiple (tails are handled); outputs do not alias inputs unless said.
 *
 * Batch invariance (docs/architecture.md): what a kernel computes for one row depends on that row
 * alone: the order of its reductions is the same for every M, tile, thread and neighbour. All tile
 * shapes of one GEMM share one K order; attention walks keys in blocks of MR_KV_BLOCK from position
 * 0 and combines them in that order. Results may differ between instruction sets, never within one.
 */
#ifndef MR_KERNELS_KERNELS_H
#define MR_KERNELS_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* ------------------------------------------------------------------ GEMM */
/* y[m, n] = sum_k x[m, k] * w[n, k]   (+ bias[n]); w is stored [N, K] as in model files.
 * A scheme is a way to store both sides. Weights are packed once into panels of `nr` output
 * columns, each panel contiguous; activations are packed (quantized) once a row and shared by all
 * matrices that read the row. Packed bytes are a table's own: pack and multiply with the same one.
 */
typedef enum mr_scheme {
  MR_SCHEME_F32,  /* exact: float32 both sides */
  MR_SCHEME_BF16, /* both sides rounded to bfloat16, float32 sums */
  MR_SCHEME_I8,   /* int8 by groups of 64 along K, both sides, after signs and FWHT-64 */
  MR_SCHEMES
} mr_scheme;

const char *mr_scheme_name(mr_scheme scheme); /* "f32", "bf16", "int8" */

typedef struct mr_gemm_ops {
  int nr;       /* columns a panel; N is padded to it with zero columns */
  int own_rows; /* so many rows for each worker, and blocks of rows of their own serve them best */
  size_t (*panel_bytes)(int k); /* one panel of weights, a multiple of 64 */
  size_t (*row_bytes)(int k);   /* one packed activation row, a multiple of 64 */
  /* panel of `cols` (1..nr) columns: w holds cols rows of k floats, ld floats apart; dst is
   * 64-aligned and fully written */
  void (*pack_panel)(void *dst, const float *w, size_t ld, int cols, int k);
  /* one activation row of k floats; dst 64-aligned; scratch-free */
  void (*pack_row)(void *dst, const float *x, int k);
  /* m rows (packed, row_bytes apart) times panels p0..p1-1 of a packed matrix with n columns in
   * all. y[i*ldy + col] for the columns of those panels below n; bias may be NULL (n floats);
   * accumulate != 0 adds to y (y is then read: y = (sum + bias) + y). A row that held a value which
   * is not finite gives NaN or infinities, and only that row. */
  void (*gemm)(float *y, size_t ldy, const void *x, int m, const void *w, int p0, int p1, int n,
               int k, const float *bias, int accumulate);
} mr_gemm_ops;

/* ------------------------------------------------------------------ attention over paged KV */
/* A KV page holds MR_KV_BLOCK consecutive tokens of one sequence for some layers. Inside a page
 * each of them has, for each kv head, one K part then one V part; the layout inside a part belongs
 * to the table (kv_store writes it, attention reads it), its size does not.
 *
 * Types of 8 bits have one float32 scale for each token, head and side (K, V): int8 is
 * round(x * 127 / max|x|); fp8 is E4M3 without its subnormal numbers, max|x| on its largest number,
 * 448. Both sides of q.k are best rotated first (rotate), so that no channel sticks out.
 *
 * q4 has 16 steps from least to largest, both float16, for each channel of K over a block's 32
 * tokens, and for each 32 channels of a token of V. So a block is packed as a whole, when its last
 * token is there (kv_pack); until then its tokens are stored beside, as MR_KV_OWN_TYPE. A token
 * sees its own block like that, even the last one, and the blocks before as they are packed: what
 * it sees depends on its position alone.
 */
#define MR_KV_BLOCK 32
#define MR_ATTN_SPAN 4   /* blocks that rows meet at once, from fixed positions */
#define MR_ATTN_SPLIT 32 /* blocks of a split: see attention_split */

typedef enum mr_kv_type {
  MR_KV_F32,
  MR_KV_F16,
  MR_KV_BF16,
  MR_KV_INT8,
  MR_KV_Q4,
  MR_KV_FP8,
  MR_KV_TYPES
} mr_kv_type;

const char *mr_kv_type_name(mr_kv_type type); /* "f32", "f16" ... */

#define MR_KV_OWN_TYPE MR_KV_F16
static inline int mr_kv_packs(mr_kv_type type) { /* in blocks */
  return type == MR_KV_Q4;
}

/* bytes of the K or the V part of one head and layer in one page (scales included), a multiple of
 * 64 */
size_t mr_kv_part_bytes(mr_kv_type type, int head_dim);

typedef struct mr_attn_next { /* blocks first .. end-1 of a block table, of one kv head */
  const uint8_t *const *pages;
  int kv_head, first, end;
} mr_attn_next;

typedef struct mr_attn {
  const float *q; /* [n_q, n_heads, head_dim], q_ld floats between tokens; rope already applied */
  size_t q_ld;
  float *out; /* [n_q, n_heads, head_dim], out_ld floats between tokens */
  size_t out_ld;
  int n_q;  /* consecutive new tokens of one sequence */
  int pos0; /* position of the first of them; their own K and V are already stored */
  int n_heads, n_kv_heads, head_dim;
  mr_kv_type type;
  const uint8_t *const *pages; /* block table: page i holds positions 32i .. 32i+31; NULL where a
                                  window lets none read */
  size_t layer_offset; /* of this layer inside a page; head h has K at layer_offset + 2*h*part, V
                          one part on */
  float scale;         /* on q·k */
  float softcap;       /* 0: none; else cap*tanh(s/cap) after scale */
  int window;          /* 0: all; else a key is seen when 0 <= pos_q - pos_k < window */
  int chunk;           /* 0: none; else keys of the same chunk (pos / chunk) only */
  const float *slopes; /* ALiBi slope for each head, or NULL; adds slope * (pos_k - pos_q) */
  const float *sinks;  /* one extra logit for each head, or NULL */
  const uint8_t *own;  /* types that pack: K part, then V part of the block that all tokens of the
                          call lie in, of this kv head, as MR_KV_OWN_TYPE */
  mr_attn_next next;   /* what the call after this one reads, so that it is asked for in time; a
                          hint; pages NULL: not known */
} mr_attn;

/* First key that the token at pos sees. */
static inline int mr_attn_first(const mr_attn *a, int pos) {
  int first = 0;
  if (a->window > 0 && pos - a->window + 1 > first)
    first = pos - a->window + 1;
  if (a->chunk > 0 && pos - pos % a->chunk > first)
    first = pos - pos % a->chunk;
  return first;
}

/* ------------------------------------------------------------------ the table */
typedef enum mr_act {
  MR_ACT_SILU,
  MR_ACT_GELU,
  MR_ACT_GELU_TANH,
  MR_ACT_RELU,
  MR_ACT_RELU2,
  MR_ACT_QUICK_GELU
} mr_act;

typedef struct mr_kernels {
  const char *name; /* "ref", "avx2", "avxvnni", "avx512" */
  /* for keys and values of that head_dim: the type that attention reads fastest, of those whose
   * accuracy fast mode may pay (docs/performance.md) */
  mr_kv_type (*kv_type)(int head_dim);

  mr_gemm_ops gemm[MR_SCHEMES];
  /* fast mode's scheme for matrices that are stored as floats: bf16 where the CPU multiplies
   * bfloat16 itself, half as fast as int8 and as accurate as such a file; else int8 */
  mr_scheme floats;

  /* y[n] = x[n] / rms(x) * w[n]; w may be NULL (ones). y may be x. Sum of squares in float32, fixed
   * order. */
  void (*rmsnorm)(float *y, const float *x, const float *w, int n, float eps);
  /* y[n] = (x - mean) / sqrt(var + eps) * w + b; w, b may be NULL. y may be x. */
  void (*layernorm)(float *y, const float *x, const float *w, const float *b, int n, float eps);
  /* rotates pairs of one head: n_rot values (even) of x in place; cos_sin holds n_rot/2 cosines
   * then n_rot/2 sines. interleaved: pairs (2i, 2i+1); else (i, i + n_rot/2). */
  void (*rope)(float *x, const float *cos_sin, int n_rot, int interleaved);
  /* y[n] = act(gate[n]) * up[n]; up NULL: act(gate). y may be gate or up. */
  void (*gate)(float *y, const float *gate, const float *up, int n, mr_act act);
  /* y[n] += x[n] * s */
  void (*axpy)(float *y, const float *x, float s, int n);
  /* x[n] *= s */
  void (*scale)(float *x, float s, int n);
  /* x[n] = cap * tanh(x / cap) */
  void (*softcap)(float *x, float cap, int n);

  /* Hadamard transform (orthonormal, its own inverse) in place, over blocks of mr_rotate_block(n)
   */
  void (*rotate)(float *x, int n);
  /* writes K and V of one token and head (head_dim floats each) to slot (0..31) of its parts; the
   * slots of a page are written in order */
  void (*kv_store)(uint8_t *k_part, uint8_t *v_part, const float *k, const float *v, int head_dim,
                   int slot, mr_kv_type type);
  /* packs a full block: parts of MR_KV_OWN_TYPE at own, K then V, to those of a type that packs */
  void (*kv_pack)(uint8_t *k_part, uint8_t *v_part, const uint8_t *own, int head_dim,
                  mr_kv_type type);
  /* attention for query heads of kv head `kv_head`, tokens q0..q1-1 of a: reads keys and values up
   * to position pos0 + q1 - 1. scratch: mr_attn_scratch(...) bytes, 64-aligned */
  void (*attention)(const mr_attn *a, int kv_head, int q0, int q1, void *scratch);
  /* The same bits for n <= MR_ATTN_TILE single tokens (n_q 1) of as many sequences whose first
   * `blocks` pages are the same, a multiple of MR_ATTN_SPAN, and whose tokens see all of their keys
   * and come after them: these are read once. NULL: none. */
  void (*attention_shared)(const mr_attn *a, int n, int blocks, int kv_head, void *scratch);
  /* The same bits for a single token (n_q 1), whose keys several workers meet: a split is the keys
   * of MR_ATTN_SPLIT blocks, from position 0; attention, too, begins anew with each, and joins them
   * in their order (FlashDecoding, Dao et al. 2023). What the token makes of split `split`, of
   * which it sees a key, goes to `state`, mr_attn_state floats; attention_join makes a->out of n
   * states in order, and uses up the first. NULL: none. */
  void (*attention_split)(const mr_attn *a, int kv_head, int split, float *state, void *scratch);
  void (*attention_join)(const mr_attn *a, int kv_head, float *states, int n);

  /* index of the largest value, the lowest on ties; *bad = 1 if a value is NaN or +infinity (the
   * index is then in range, no more) */
  int (*argmax)(const float *x, int n, int *bad);
  /* max and ln(sum(exp(x - max))) + max: returns logsumexp; fixed order */
  double (*logsumexp)(const float *x, int n);
} mr_kernels;

/* The largest power of two that divides n, at most 64. */
int mr_rotate_block(int n);

/* Scratch of one attention call with q1 - q0 <= MR_ATTN_TILE tokens. */
#define MR_ATTN_TILE 32
size_t mr_attn_scratch(int n_heads, int n_kv_heads, int head_dim);
size_t mr_attn_state(int n_heads, int n_kv_heads, int head_dim); /* floats, a multiple of 16 */

const mr_kernels *mr_kernels_ref(void);
const mr_kernels *mr_kernels_get(const char *name); /* NULL: unknown, or this CPU cannot run it */
/* The best table that this CPU runs, or the one that MILLRACE_ISA names; NULL if that one cannot
 * run. */
const mr_kernels *mr_kernels_best(void);
/* Names of the tables this CPU runs, best last, NULL at the end. */
const char *const *mr_kernels_names(void);

/* The fill functions of the instruction sets (kernels/avx2, kernels/avx512). */
void mr_k_fill_avx2(mr_kernels *k);
void mr_k_fill_avxvnni(mr_kernels *k); /* AVX2 with AVX-VNNI's int8 GEMM: the same bits */
void mr_k_fill_avx512(mr_kernels *k);

/* Says how fast results are made (packing, grouping, order); changes whenever their bits may. */
#define MR_NUMERICS_VERSION 6

#endif
