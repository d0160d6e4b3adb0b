/* backend_gpu.h: the operations of src/backend.h over a device (device.h), and what its files
 * share: backend_gpu.c (buffers, the step, rows, products), backend_gpu_weights.c (weights on the
 * device), backend_gpu_attend.c, backend_gpu_groups.c (shared pages), backend_gpu_experts.c,
 * backend_gpu_lora.c (adapters).
 *
 * Numbers: activations are float32 between operations. A matrix is held as mr_gpu_hold says
 * (gpu_few.h), by the scheme and by its type in the file; products take bfloat16 on both sides, or
 * pairs of it (MR_GPU_EXACT). A router's products are always exact, so that no expert is chosen by
 * rounding.
 */
#ifndef MR_SRC_BACKEND_GPU_H
#define MR_SRC_BACKEND_GPU_H

#include "src/backend.h"
#include "src/device_gemm.h"
#include "src/gpu_few.h"
#include "src/rope.h"

typedef enum mr_gpu_scheme {
  MR_GPU_BY_FILE, /* int4 where it holds the file's values, int8 from up to 9 bits, else bfloat16 */
  MR_GPU_EXACT,
  MR_GPU_ALL_BF16,
  MR_GPU_ALL_INT8, /* at most: int4 where it holds the file's values */
  MR_GPU_ALL_INT4  /* but for the embedding and the head: int8 */
} mr_gpu_scheme;

struct mr_buf {
  float *p; /* [rows, ld], on the device */
  size_t ld;
  int rows, cols;
};

typedef struct mr_gpu_matrix { /* weights on the device */
  const mr_matrix *of;
  mr_gpu_hold hold;
  mr_gpu_bf16 *w;
  size_t plane;
  mr_gpu_few few; /* in place of w */
  float *bias;
  int k;                    /* padded */
  const mr_gemm_plan *plan; /* of the maker's library; NULL: products are our own */
  int streamed;             /* of which layer that comes over in each step; -1: it stays */
} mr_gpu_matrix;

typedef struct mr_gpu_streaming { /* the last n layers come over in each step */
  int n;
  uint8_t *place[2]; /* on the device; layer i of them has place i % 2 */
  uint8_t **host;    /* [n] blocks as they go over; pinned; owned, as all that follow */
  size_t *bytes;     /* [n] */
  mr_stream *copy;
  mr_event *came[2], *free[2];
  int in[2]; /* which layer is in a place, or on its way there; -1 */
  int now;   /* which one is computed */
} mr_gpu_streaming;

typedef struct mr_gpu_vector {
  const float *of;
  float *at;
} mr_gpu_vector;

typedef struct mr_gpu_side { /* a block of the host's memory and its copy on the device */
  uint8_t *host, *device;    /* host: pinned */
  size_t cap, used;
} mr_gpu_side;

typedef struct mr_gpu_run { /* of a step's run */
  int32_t row, table;       /* its first token's row; where its pages begin in the step's table */
  int32_t shared;           /* splits of keys that its group does; 0: it is in none */
  int32_t carry;            /* where what they leave of it begins */
} mr_gpu_run;

typedef struct mr_gpu_group { /* runs of one token that begin with the same pages */
  int first, n;               /* sorted[first] .. */
  int splits;                 /* of keys, wholly in these pages */
  int least;                  /* position of a member */
  int head;                   /* that member's run: its window has dropped least of the pages */
} mr_gpu_group;

typedef struct mr_gpu_groups { /* of a step */
  mr_gpu_run *runs;            /* [n_runs]; owned, as all arrays of the host, for max_tokens */
  int32_t *sorted;             /* runs of one token, by their pages */
  mr_gpu_group *all;           /* [n] */
  int n, splits;               /* splits: most of a group */
  float *carry;                /* the device's, as what follows */
  int carry_rows, used_rows;
  const mr_gpu_tile *tiles;
  const int32_t *members;
  int n_tiles, warps;
} mr_gpu_groups;

struct mr_gpu_moe;
struct mr_gpu_adapters;

typedef struct mr_gpu {
  mr_backend base;
  const mr_model *m;
  mr_kv *kv;
  mr_device *dev;
  mr_stream *stream;
  mr_gpu_scheme scheme;
  int max_tokens, max_logits;
  mr_gpu_matrix *matrices; /* [n_matrices] by address; owned */
  size_t n_matrices, cap_matrices;
  mr_gpu_vector *vectors; /* owned */
  size_t n_vectors, cap_vectors;
  const mr_gpu_matrix *embed;
  mr_gpu_bf16 *wide; /* room for one matrix of few bits; NULL: none of the layers' is */
  size_t wide_values;
  mr_gpu_streaming streaming;
  mr_rope_table rope[3]; /* as in backend_cpu.h */
  mr_gpu_bf16 *packed;   /* [max_tokens] rows of the widest matrix, two planes */
  size_t packed_plane;
  float *parts; /* of attention; NULL: no context is longer than a split */
  size_t parts_bytes;
  int32_t *redo;
  float *logits_host;               /* pinned */
  mr_gpu_best *best, *best_host;    /* [max_logits]; on the host: pinned */
  struct mr_gpu_moe *moe;           /* or NULL */
  struct mr_gpu_adapters *adapters; /* or NULL */
  mr_gpu_groups groups;
  mr_gpu_side side; /* what a step needs from the host */
  /* of the step: on the device */
  mr_batch batch;
  const int32_t *token, *pos, *page, *wanted;
  const float *temper, *rope_at[2];
  const int32_t *table;
  const mr_gpu_ask *asks;      /* NULL: rows of logits go to the host */
  const mr_gpu_tile *tiles[2]; /* of one warp; of MR_GPU_WARPS */
  int n_tiles[2];
  size_t table_pages; /* of a group of layers: `table` and `page` go through all of them in turn */
  int splits, own_splits; /* most of a run: all, and those that no group does */
  const mr_buf *logits;   /* what finish was called with */
  mr_code rc;             /* the first error of the step */
} mr_gpu;

/* Everything is borrowed. streamed: so many layers come over in each step. MR_E_UNAVAILABLE: the
 * device's memory is too small, or the model has what the device cannot do. */
mr_code mr_backend_gpu_open(mr_backend **out, const mr_model *m, mr_device *dev, mr_kv *kv,
                            mr_gpu_scheme scheme, int streamed, int max_tokens, int max_logits,
                            mr_err *err);

/* Device bytes of the weights. */
size_t mr_gpu_weight_bytes(const mr_model *m, mr_gpu_scheme scheme);
/* How many layers must come over in each step, that weights take no more than room; *bytes: what
 * they take then. 0: not even that helps. */
int mr_gpu_streamed_for(const mr_model *m, mr_gpu_scheme scheme, size_t room, size_t *bytes);
/* MR_GPU_ALL_BF16 in place of MR_GPU_BY_FILE where all matrices are. */
mr_gpu_scheme mr_gpu_scheme_of(const mr_model *m, mr_gpu_scheme scheme);
/* Device bytes of all that steps need besides, `columns` being those of the forward pass's buffers
 * (forward.h). */
size_t mr_gpu_step_bytes(const mr_model *m, const mr_device *dev, int max_tokens, int max_logits,
                         size_t columns);

/* ------------------------------------------------------------------ between its files */

/* n / by, rounded up. */
static inline int mr_gpu_up(int n, int by) {
  return (n + by - 1) / by;
}

/* Columns of packed rows; the most of any matrix. */
static inline int mr_gpu_padded(int k) {
  return mr_gpu_up(k, MR_GPU_K) * MR_GPU_K;
}

static inline size_t mr_gpu_widest(const mr_model *m) {
  return (size_t)mr_gpu_padded(mr_model_widest(m));
}

/* Floats from row to row of a buffer. */
static inline size_t mr_gpu_ld(size_t cols) {
  return (cols + 15) & ~(size_t)15;
}

/* Query heads of a key head. */
static inline int mr_gpu_queries(const mr_config *c) {
  return c->n_heads / c->n_kv_heads;
}

/* A block for each row. */
static inline mr_grid mr_gpu_by_rows(int rows) {
  return (mr_grid){
      .blocks = {(uint32_t)rows, 1, 1}, .warps = MR_GPU_WARPS, .shared = MR_GPU_REDUCE_SHARED};
}

mr_code mr_gpu_load_weights(mr_gpu *g, mr_err *err);
const mr_gpu_matrix *mr_gpu_find(const mr_gpu *g, const mr_matrix *w);
/* The same for what is launched next: weights that come over are there by then. */
const mr_gpu_matrix *mr_gpu_use(mr_gpu *g, const mr_matrix *w);
/* bytes: [streaming.n] of the layers that come over. close: what is open. */
mr_code mr_gpu_stream_open(mr_gpu *g, const size_t *bytes);
void mr_gpu_stream_close(mr_gpu *g);
/* n floats of the model on the device; NULL gives NULL. */
const float *mr_gpu_vector_of(mr_gpu *g, const float *host, size_t n);
mr_gpu_norm mr_gpu_norm_of(mr_gpu *g, const mr_norm_spec *norm, int cols);

/* Room in g->side, the same for the host and the device; NULL: full. */
void *mr_gpu_side_take(mr_gpu *g, size_t bytes, const void **device);

void mr_gpu_launch(mr_gpu *g, mr_gpu_kernel k, mr_grid grid, const void *args);
/* rows x f(x) into `out`, [rows, padded cols]. */
void mr_gpu_pack_rows(mr_gpu *g, mr_gpu_pack *p, int rows);
double mr_gpu_held_bytes(const mr_gpu_matrix *w);
/* y[m, n] of rows that lie packed at a. */
void mr_gpu_multiply(mr_gpu *g, const mr_gpu_matrix *w, const mr_gpu_bf16 *a, size_t a_plane, int m,
                     float *y, size_t ld, bool accumulate);

mr_code mr_gpu_attend_open(mr_gpu *g, mr_err *err);
mr_code mr_gpu_tile_runs(mr_gpu *g);
void mr_gpu_run_attend(mr_backend *b, const mr_attend *op);
size_t mr_gpu_attend_bytes(const mr_model *m, const mr_device *dev, int max_tokens);

/* find: from the step's batch. tile: their tables into the side. */
mr_code mr_gpu_groups_open(mr_gpu *g);
void mr_gpu_groups_close(mr_gpu *g);
void mr_gpu_find_groups(mr_gpu *g);
mr_code mr_gpu_tile_groups(mr_gpu *g, bool tall);
/* Whether any shared split is seen in the layer; how many keys are read less for the groups. */
bool mr_gpu_groups_seen(const mr_gpu *g, const mr_attend *op);
double mr_gpu_groups_keys(const mr_gpu *g, const mr_attend *op);
size_t mr_gpu_groups_bytes(const mr_config *c, const mr_device *dev, int max_tokens);

mr_code mr_gpu_moe_open(mr_gpu *g, mr_err *err);
void mr_gpu_moe_close(mr_gpu *g);
void mr_gpu_run_experts(mr_backend *b, const mr_experts *op);
size_t mr_gpu_moe_bytes(const mr_model *m, int max_tokens);

#endif
