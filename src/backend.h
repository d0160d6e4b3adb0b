/* backend.h: a device: buffers and the operations of one step over a ragged batch.
 *
 *     mr_backend *b;
 *     mr_backend_cpu_open(&b, model, kernels, pool, kv, max_tokens, max_logits, &err);
 *     mr_buf *x = b->ops->buf_new(b, max_tokens, d_model);
 *     b->ops->begin(b, &batch, &err);       the step's tokens, positions and block tables
 *     b->ops->embed(b, x);                  operations are queued in this order
 *     b->ops->linear(b, &op); ...
 *     b->ops->end(b, &err);                 waits; the first error of the step
 *     b->ops->row(b, logits, 0);            on the host
 *
 * src/forward.c is one program over these operations; a device is another table of them. A buffer
 * is float32 [rows, cols]; where it lies and how its rows are padded is the device's own.
 * Operations work on the rows of the step (all n_tokens, or the n_wanted whose logits are asked
 * for) and cannot fail one by one. Whatever an operation computes for a row depends on that row and
 * its sequence alone (batch invariance).
 */
#ifndef MR_SRC_BACKEND_H
#define MR_SRC_BACKEND_H

#include <stdbool.h>

#include "kernels/gpu/args.h"
#include "src/kvcache.h"
#include "src/model.h"

typedef struct mr_backend mr_backend;
typedef struct mr_buf mr_buf;

/* Consecutive new tokens of one sequence; a sequence has at most one run a step. */
typedef struct mr_run {
  mr_kv_seq *seq;        /* room reserved for n tokens; len grows by n when the step succeeds */
  const int32_t *tokens; /* n ids, each below n_vocab */
  int n;
  const uint8_t *want; /* n flags: 1 = logits after this token; NULL: only after the last */
  int no_logits;       /* 1: want nothing */
  int adapter;         /* 0: the base alone; i + 1: adapter i of the model's (lora.h) */
} mr_run;

typedef struct mr_batch { /* a checked step; borrowed from begin to end */
  const mr_run *runs;     /* packed in this order without padding */
  int n_runs, n_tokens;
  const int32_t *wanted; /* [n_wanted] rows, ascending */
  int n_wanted;
  const mr_gpu_ask *asks; /* [n_wanted]: only the best of rows are needed; NULL: rows are */
} mr_batch;

typedef struct mr_step_stats {
  double seconds, gemm_s, attn_s, other_s; /* wall time of the phases */
  double flops;                            /* of the GEMMs and of attention */
  double bytes;                            /* weights and KV read, at least */
} mr_step_stats;

typedef struct mr_norm_spec {
  mr_norm kind;       /* MR_NORM_NONE: none */
  const float *w, *b; /* [cols], or NULL */
  float eps;
} mr_norm_spec;

typedef enum mr_input { MR_INPUT_PLAIN, MR_INPUT_NORM, MR_INPUT_GATE } mr_input;

#define MR_LINEAR_MAX 3

/* y[i] = W[i] f(x) (+ bias); f runs once a row for all matrices. Rows that have an adapter get
 * B (A f(x)) of it on top (w[i]->lora): the base is computed for all rows at once. */
typedef struct mr_linear {
  mr_input input;       /* f: x; norm(x); norm(act(x) * up) */
  const mr_buf *x, *up; /* [rows, k]; up only for GATE, may be NULL: act(x) */
  mr_norm_spec norm;
  mr_act act;
  const float *xielu; /* slope above 0, slope below, beta, eps: in place of act; or NULL */
  const float *clamp; /* alpha, limit: clamped swiglu in place of act; or NULL */
  bool wanted;        /* only the wanted rows of x, packed in y */
  bool accumulate;    /* y += */
  int n;
  const mr_matrix *w[MR_LINEAR_MAX]; /* [n, k], the same k */
  mr_buf *y[MR_LINEAR_MAX];          /* [rows, n] */
} mr_linear;

typedef struct mr_attend { /* of one layer */
  int layer;
  mr_buf *q;                        /* [rows, n_heads*head_dim]; normed and rotated in place */
  mr_buf *k, *v;                    /* [rows, n_kv_heads*head_dim]; k as q */
  mr_buf *out;                      /* [rows, n_heads*head_dim], not q */
  const float *q_norm, *k_norm;     /* [head_dim], RMS norm of each head before rope, or NULL */
  const float *q_norm_b, *k_norm_b; /* ... of layer norms; or NULL */
  bool norm_full;                   /* ... [cols], of all heads at once */
  bool norm_each;                   /* ... [cols], but each head is normed by itself */
  bool norm_layer;                  /* ... layer norm */
  bool norm_late;                   /* ... after rope */
  bool norm_bare;                   /* ... without weights */
  int k_norm_dims;                  /* only so many first values of k are normed; 0: all */
  bool no_rope;
  bool local;          /* the rope of windowed layers */
  int window;          /* 0: none */
  int chunk;           /* 0: none */
  const float *slopes; /* [n_heads] ALiBi, or NULL */
  const float *sinks;  /* [n_heads], or NULL */
} mr_attend;

typedef struct mr_tap { /* sees the rows that linear operations multiply: for calibration */
  void *ctx;
  float *rows; /* [max_tokens, the widest matrix]: room; borrowed */
  /* f(x) of an operation whose first matrix is w: n rows of k values; on the caller's thread */
  void (*see)(void *ctx, const mr_matrix *w, const float *rows, int n, int k);
} mr_tap;

typedef struct mr_experts { /* out = sum of the chosen experts' weight * MLP(norm(x)) */
  const mr_layer *layer;
  const mr_buf *x;      /* [rows, d_model] */
  const mr_buf *scores; /* [rows, n_experts] of the router */
  mr_norm_spec norm;
  mr_buf *out; /* [rows, d_model], not x */
} mr_experts;

typedef struct mr_backend_ops {
  const char *name;
  /* Buffers must be freed before. */
  void (*close)(mr_backend *b);
  /* Owned by the caller; NULL: out of memory. Freeing NULL is fine. */
  mr_buf *(*buf_new)(mr_backend *b, int rows, int cols);
  void (*buf_free)(mr_backend *b, mr_buf *buf);
  /* One row on the host, after end; valid until the next begin. */
  float *(*row)(mr_backend *b, const mr_buf *buf, int row);
  /* Steps with asks: what is known of a row, after end; and brings rows of logits, ascending, to
   * the host, where `row` finds them. NULL: this device knows no asks. */
  const mr_gpu_best *(*best)(mr_backend *b, int row);
  mr_code (*fetch)(mr_backend *b, const mr_buf *logits, const int32_t *rows, int n, mr_err *err);

  mr_code (*begin)(mr_backend *b, const mr_batch *batch, mr_err *err);
  /* x = rows of the embedding, scaled, plus learned positions. */
  void (*embed)(mr_backend *b, mr_buf *x);
  void (*linear)(mr_backend *b, const mr_linear *op);
  void (*experts)(mr_backend *b, const mr_experts *op);
  /* x = norm(x). */
  void (*norm)(mr_backend *b, mr_buf *x, const mr_norm_spec *norm);
  /* Norms and rotates q and k, stores k and v in the sequences' pages, attends. */
  void (*attend)(mr_backend *b, const mr_attend *op);
  /* x += scale * norm(t). */
  void (*add)(mr_backend *b, mr_buf *x, const mr_buf *t, const mr_norm_spec *norm, float scale);
  /* Wanted rows of logits: times scale, then softcap at cap (0: none). */
  void (*finish)(mr_backend *b, mr_buf *logits, float scale, float cap);
  mr_code (*end)(mr_backend *b, mr_err *err);
} mr_backend_ops;

struct mr_backend { /* an implementation's first member */
  const mr_backend_ops *ops;
  mr_step_stats stats; /* of the step: begin clears it, each operation adds */
  const mr_tap *tap;   /* or NULL; borrowed. Experts' own matrices are not seen */
};

/* The host's CPUs. Everything is borrowed; all memory is taken here and in buf_new. */
mr_code mr_backend_cpu_open(mr_backend **out, const mr_model *m, const mr_kernels *k, mr_pool *pool,
                            mr_kv *kv, int max_tokens, int max_logits, mr_err *err);

#endif
