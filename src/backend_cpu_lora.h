/* backend_cpu_lora.h: what adapters add to the linear operations of a step: private to
 * backend_cpu*.c.
 *
 *     mr_cpu_lora_open(&x, c)               room; NULL where the model has no adapters
 *     mr_cpu_lora_begin(x, batch)           which rows of the step have adapters
 *     rows = mr_cpu_lora_rows_of(x, op)     those of an operation; NULL: nothing to add
 *     mr_cpu_lora_linear(c, rows, op)       y += B (A x), after the base, whose packed rows are
 *                                           still there
 */
#ifndef MR_SRC_BACKEND_CPU_LORA_H
#define MR_SRC_BACKEND_CPU_LORA_H

#include "src/backend_cpu.h"
#include "src/lora.h"

typedef struct mr_cpu_lora mr_cpu_lora;
typedef struct mr_cpu_lora_rows mr_cpu_lora_rows;

/* False: out of memory. */
bool mr_cpu_lora_open(mr_cpu_lora **out, const mr_cpu *c);
void mr_cpu_lora_close(mr_cpu_lora *x); /* NULL is fine; so it is in what follows */
void mr_cpu_lora_begin(mr_cpu_lora *x, const mr_batch *batch);

const mr_cpu_lora_rows *mr_cpu_lora_rows_of(const mr_cpu_lora *x, const mr_linear *op);
void mr_cpu_lora_linear(mr_cpu *c, const mr_cpu_lora_rows *rows, const mr_linear *op);

/* The same for the experts' slots: `rows` consecutive ones of one adapter, whose k inputs lie
 * packed for the base in x. y[i] += what link[i] adds; links with NULL add nothing. */
typedef struct mr_cpu_lora_slots {
  const uint8_t *x;
  int rows, k, n;
  const mr_lora_link *link[2];
  const mr_matrix *w[2];
  float *y[2];
  size_t ld;
} mr_cpu_lora_slots;
void mr_cpu_lora_slots_add(mr_cpu *c, const mr_cpu_lora_slots *s, int worker);

/* The adapter of a token of the step, from 0; -1: none. */
int mr_cpu_lora_of(const mr_cpu_lora *x, int token);
/* Row `token` of the embedding's output += what its adapter adds. */
void mr_cpu_lora_embed(const mr_cpu *c, float *y, int token, int32_t id);

#endif
