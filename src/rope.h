/* rope.h: cosines and sines of rotary positions (RoFormer, Su et al. 2021), with the scalings that
 * models use: linear, YaRN (Peng et al. 2023), frequency factors of the file (llama3, LongRoPE).
 *
 *     mr_rope_table t;  mr_rope_open(&t, &config, factors, local, &err);
 *     mr_rope_fill(&t, pos);  row = mr_rope_row(&t, pos);
 *     mr_rope_close(&t);
 *
 * A row is n_rot/2 cosines, then n_rot/2 sines, as kernels' rope() takes them; computed in double
 * once a position and kept, so a position's bits never change. One thread fills; after that any
 * thread reads.
 */
#ifndef MR_SRC_ROPE_H
#define MR_SRC_ROPE_H

#include "src/config.h"

typedef struct mr_rope_table {
  int n_rot, n_pos; /* n_rot 0: no rotary positions; rows are NULL */
  float *rows;      /* [n_pos, n_rot]; owned */
  uint8_t *filled;  /* [n_pos]; owned */
  double *freq;     /* [n_rot/2] radians a position; owned */
  double magnitude; /* factor on cosines and sines */
} mr_rope_table;

/* factors: [rope_dims/2] divisors of the frequencies, or NULL. local: the table of windowed layers,
 * which has its own base and, where that differs from the global one, no scaling (gemma3). Room for
 * c->context positions; memory is touched as positions come into use. */
mr_code mr_rope_open(mr_rope_table *t, const mr_config *c, const float *factors, bool local,
                     mr_err *err);
void mr_rope_close(mr_rope_table *t);

/* The tables of a model: global, local, global for long prompts (longrope; else empty). factors as
 * above. After an error they are to be closed too. */
mr_code mr_rope_open_all(mr_rope_table t[3], const mr_config *c, const float *factors, mr_err *err);
void mr_rope_close_all(mr_rope_table t[3]);

/* 0 <= pos < n_pos. */
void mr_rope_fill(mr_rope_table *t, int pos);

static inline const float *mr_rope_row(const mr_rope_table *t, int pos) {
  return t->rows + (size_t)pos * (size_t)t->n_rot;
}

#endif
