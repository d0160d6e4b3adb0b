/* model.h: the weights of one model: mapped tensors checked against the configuration, then packed
 * for the GEMM.
 *
 *     mr_model *m;
 *     mr_model_open(&m, path, &err);      a GGUF file or a directory of safetensors: maps and
 *                                         validates every tensor's name, shape and type
 *     mr_model_pack(m, kernels, MR_SCHEME_I8, pool, &err);     packs matrices into panels
 *     mr_model_close(m);                                       the map stays until here
 *
 * `model info` calls only open. Shapes are [rows, cols] = [N, K] as in the file (dims[1], dims[0]).
 * A fused tensor (attn_qkv, gate and up in one) is cut into views of its rows. Biases that the file
 * has are read whether the architecture asks for them or not. A tensor of a layer that nobody reads
 * would change the result, so it is refused; other unknown tensors are counted. NaN and infinity in
 * weights are let through: they show in the logits.
 */
#ifndef MR_SRC_MODEL_H
#define MR_SRC_MODEL_H

#include "io/weights.h"
#include "kernels/dtype.h"
#include "kernels/kernels.h"
#include "kernels/pool.h"
#include "src/config.h"

typedef struct mr_lora mr_lora;           /* lora.h: the adapters of a job */
typedef struct mr_lora_link mr_lora_link; /* ... what one adds to one matrix */
typedef struct mr_quant mr_quant;         /* matrix.h: how a quantized checkpoint holds a matrix */
typedef struct mr_tuning mr_tuning;       /* tune.h: how products are best cut here */
typedef struct mr_product mr_product;     /* product.h: a matrix whose rows are computed */

typedef struct mr_matrix { /* y = W x (+ b) */
  int n, k;
  int dtype;           /* as stored; -1: absent (n is then 0) */
  const uint8_t *data; /* mapped rows, row_bytes apart; borrowed */
  uint64_t row_bytes;
  /* row r is the stored row first + r, or first + r / group * stride + r % group */
  int first, group, stride;
  bool mapped;           /* data lies in the file */
  bool columns;          /* stored transposed: row r is a column, row_bytes between its values */
  const mr_quant *quant; /* or NULL; owned by the model */
  const mr_product *product; /* or NULL; owned by the model; data is then NULL */
  const float *bias;         /* n floats, or NULL; owned by the model */
  const mr_lora_link *lora;  /* for each adapter what it adds to y; NULL: none adds; lora.h */
  mr_scheme scheme;          /* of packed */
  uint8_t *packed;           /* ceil(n / nr) panels; NULL until packed; owned by the model */
} mr_matrix;

typedef struct mr_expert {
  mr_matrix gate, up, down; /* [d_expert, d_model] twice, [d_model, d_expert] */
} mr_expert;

typedef struct mr_layer {
  const float *attn_norm, *attn_norm_b; /* [d_model] */
  mr_matrix q, k, v, o; /* q [n_heads*head_dim, d_model], k, v [n_kv_heads*head_dim, d_model] */
  const float *q_norm, *k_norm;       /* [head_dim], or [n*head_dim] for qk_norm_full */
  const float *q_norm_b, *k_norm_b;   /* the same, of layer norms; or NULL */
  const float *attn_post_norm;        /* [d_model] */
  const float *ffn_norm, *ffn_norm_b; /* [d_model] */
  mr_matrix gate, up, down; /* gate (absent if not gated), up [d_ff, d_model], down [d_model, d_ff]
                             */
  const float *ffn_post_norm;                /* [d_model] */
  const float *attn_sub_norm, *ffn_sub_norm; /* [n_heads*head_dim], [d_ff], or NULL */
  const float *sinks;                        /* [n_heads], or NULL */
  float xielu[3], xielu_eps;                 /* of arch.xielu: slopes above and below 0, beta */
  mr_matrix q_a;            /* MLA: [q_lora, d_model]; q then reads its normed output */
  const float *q_a_norm;    /* [q_lora] */
  const float *kv_a_norm;   /* MLA: [kv_lora], of the first values of k */
  mr_matrix router;         /* [n_experts, d_model]; n 0: a dense layer. Always packed exactly */
  const float *route_bias;  /* [n_experts] added to scores for the choice only, or NULL */
  const float *shared_gate; /* [d_model], or NULL */
  mr_expert *experts; /* n_experts, and the shared one where there is one; owned by the model */
} mr_layer;

typedef struct mr_model {
  mr_config c;
  mr_weights *weights; /* owned */
  const mr_gguf *gguf; /* of weights; NULL: a directory */
  mr_matrix embed;     /* [n_vocab, d_model]; rows are dequantized as they are needed */
  mr_matrix head;      /* [n_vocab, d_model]; the embedding again where tied */
  const float *out_norm, *out_norm_b;
  const float *embed_norm, *embed_norm_b; /* [d_model], or NULL */
  const float *rope_freqs;                /* [rope_dims/2] factors, or NULL */
  const float *position_embd;             /* [context, d_model], or NULL */
  mr_layer *layers;                       /* n_layers */
  uint64_t n_params; /* weights in matrices and norms; a tied head counts once */
  int n_unused;      /* tensors that this program does not know and did not read */
  mr_str unused;     /* the name of the first of them; borrowed from gguf */
  uint64_t packed_bytes;
  const mr_lora *lora;     /* or NULL; borrowed */
  const mr_tuning *tuning; /* or NULL; borrowed */
  /* every float vector above points into this */
  float **vectors;
  size_t n_vectors, cap_vectors;
} mr_model;

/* Matrices of a layer, present (n > 0) or not: i from 0 to mr_layer_matrices - 1. */
int mr_layer_matrices(const mr_model *m, const mr_layer *y);
mr_matrix *mr_layer_matrix(mr_layer *y, int i);
/* Experts of a layer that has them, the shared one counted. */
int mr_layer_experts(const mr_model *m);
/* The most columns of any matrix, head and embedding too. */
int mr_model_widest(const mr_model *m);

mr_code mr_model_open(mr_model **out, const char *path, mr_err *err);
/* The scheme for mr_model_pack: float32 in exact mode; else k->floats if the file holds all
 * matrices of the layers as floats of 16 or 32 bits, so that both sides lose no more than in the
 * reference implementations; else int8. */
mr_scheme mr_model_scheme(const mr_model *m, const mr_kernels *k, bool exact);
/* The type of keys and values that is no less accurate than that scheme's products. */
mr_kv_type mr_model_kv_type(const mr_model *m, const mr_kernels *k, mr_scheme scheme);
/* pool may be NULL: one thread. Packing again replaces what was packed. */
mr_code mr_model_pack(mr_model *m, const mr_kernels *k, mr_scheme scheme, mr_pool *pool,
                      mr_err *err);
void mr_model_close(mr_model *m);

/* One row of a mapped matrix as float32 (matrix.c); not of a product. */
void mr_matrix_row(const mr_matrix *w, int64_t row, float *dst);
/* Rows first .. first + n - 1 of any matrix into dst [n, w->k]. room: mr_matrix_room(w, n) floats,
 * which are none but for products. */
void mr_matrix_rows(const mr_matrix *w, int64_t first, int n, float *dst, float *room);
size_t mr_matrix_room(const mr_matrix *w, int n);
/* Whether the head is the embedding. */
bool mr_model_tied(const mr_model *m);
/* The row of the stored tensor that row `row` of the matrix is. */
int64_t mr_matrix_source(const mr_matrix *w, int64_t row);
/* Rows first .. first + n - 1. */
mr_matrix mr_matrix_part(const mr_matrix *w, int first, int n);

/* Which rows of a fused tensor are queries (0), keys (1), values (2): sets w->n, first, group and
 * stride. */
void mr_qkv_rows(const mr_config *c, mr_qkv layout, int which, mr_matrix *w);

/* Multiply-adds*2 of the weights for one token: the layers, and the output head (only where logits
 * are computed). */
double mr_model_layer_flops(const mr_model *m);
double mr_model_head_flops(const mr_model *m);

#endif
