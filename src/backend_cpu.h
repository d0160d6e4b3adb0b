/* backend_cpu.h: what the files of the CPU backend share (backend_cpu.c: buffers, the step, passes
 * over rows; backend_cpu_linear.c: packing and GEMM; backend_cpu_tiles.c: how attention is cut;
 * backend_cpu_attend.c: rope, KV store, attention). */
#ifndef MR_SRC_BACKEND_CPU_H
#define MR_SRC_BACKEND_CPU_H

#include "src/backend.h"
#include "src/rope.h"

struct mr_buf {
  float *p; /* [rows, ld]; owned */
  size_t ld;
  int rows, cols;
};

typedef struct mr_tile { /* new tokens of one run inside one KV page */
  int run, row, n, pos;  /* row: of the first in the step; pos: its position */
} mr_tile;

typedef struct mr_group { /* tiles that attend together (backend_cpu_tiles.c) */
  int first, n;           /* of `sorted` */
  int blocks;             /* the same pages in all of them, whole spans; 0: one tile, or none */
} mr_group;

typedef struct mr_cpu {
  mr_backend base;
  const mr_model *m;
  const mr_kernels *k;
  mr_pool *pool;
  mr_kv *kv;
  int max_tokens, workers;
  mr_rope_table rope[3]; /* global, local, global for long prompts (longrope) */
  uint8_t *packed;       /* [max_tokens] packed rows of the widest matrix; owned */
  float *line;           /* [workers, line_ld]: one row of each worker; owned */
  size_t line_ld;
  uint8_t *attn; /* [workers, attn_bytes]; owned */
  size_t attn_bytes;
  uint8_t *own; /* [workers, own_bytes] K and V parts of a block, for types that pack; owned */
  size_t own_bytes;
  struct mr_cpu_experts *experts; /* or NULL; owned */
  struct mr_cpu_lora *lora;       /* or NULL; owned */
  /* of the step */
  mr_batch batch;
  int32_t *token, *pos;    /* [max_tokens]; owned */
  mr_tile *tiles, *sorted; /* [max_tokens]; sorted: those of a group are neighbours; owned */
  int n_tiles;
  mr_group *groups, *ordered; /* [max_tokens]; ordered: the longest work first; owned */
  int n_groups;
  int *cuts; /* [max_tokens * n_kv_heads + 1] work items of attention: their first units; owned */
  int n_cuts;
  bool splits;   /* few tokens with many keys: workers meet splits of their keys */
  float *states; /* [MR_CPU_SPLIT_UNITS * workers, most_splits, state_floats]; owned */
  int most_splits;
  size_t state_floats;
} mr_cpu;

/* Splits are for steps of fewer units (backend_cpu_tiles.c) than so many for each worker. */
#define MR_CPU_SPLIT_UNITS 2

static inline float *mr_cpu_row(const mr_buf *b, int row) {
  return b->p + (size_t)row * b->ld;
}

/* y[n] = norm(x[n]); y may be x. */
void mr_cpu_norm(const mr_cpu *c, float *y, const float *x, int n, const mr_norm_spec *norm);

/* y[n] = act(gate) * up as op says, before its norm; up may be NULL. */
void mr_cpu_gate(const mr_cpu *c, float *y, const float *gate, const float *up, int n,
                 const mr_linear *op);

/* Calls fn(ctx, item, worker) for ceil(rows / chunk) items; chunk: how many rows an item should
 * have. */
int mr_cpu_chunk(const mr_cpu *c, int rows);

void mr_cpu_linear(mr_backend *b, const mr_linear *op);
void mr_cpu_attend(mr_backend *b, const mr_attend *op);

/* Cuts the step's runs into tiles, groups and work items of attention. */
void mr_cpu_tile(mr_cpu *c);

/* Keys that the tile's queries read, summed. */
double mr_cpu_tile_keys(const mr_tile *t, int window);

#endif
