/* backend_gpu_lora.h: what adapters add to the linear operations of a step on a device: private to
 * backend_gpu*.c.
 *
 *     mr_gpu_lora_load(g, &err)             factors to the device; nothing where the model has none
 *     mr_gpu_lora_begin(g)                  which rows of the step have adapters
 *     mr_gpu_lora_linear(g, op, plane)      y += B (A x), after the base, whose packed rows are
 *                                           still there
 *
 * Factors are held as bfloat16, or in exact mode (and those of routers) as pairs of it, and stay on
 * the device. */
#ifndef MR_SRC_BACKEND_GPU_LORA_H
#define MR_SRC_BACKEND_GPU_LORA_H

#include "src/backend_gpu.h"

/* Device bytes of the factors; of what a step needs; of a step's tables (mr_gpu_side). */
size_t mr_gpu_lora_bytes(const mr_model *m, mr_gpu_scheme scheme);
size_t mr_gpu_lora_step_bytes(const mr_model *m, int max_tokens);
size_t mr_gpu_lora_side_bytes(const mr_model *m, int max_tokens);

/* MR_E_UNAVAILABLE: no room on the device. close: what is open. */
mr_code mr_gpu_lora_load(mr_gpu *g, mr_err *err);
void mr_gpu_lora_close(mr_gpu *g);

mr_code mr_gpu_lora_begin(mr_gpu *g); /* MR_E_INTERNAL: no room in g->side */
/* plane: of the packed rows. */
void mr_gpu_lora_linear(mr_gpu *g, const mr_linear *op, size_t plane);

/* The same for the experts of a layer, whose slots' rows lie packed expert by expert. */
typedef struct mr_gpu_lora_experts {
  const mr_layer *layer;
  const mr_gpu_bf16 *a;
  size_t plane;   /* of a */
  size_t a_first; /* rows of expert e begin at a_first * first[e], each padded by itself */
  const int32_t *first, *from; /* on the device: mr_gpu_lora_slots */
  int rows;                    /* of an expert, on average: its blocks are that many */
  float *y[2];                 /* [slots, ld]: gate and up, or down and NULL */
  size_t ld;
} mr_gpu_lora_experts;
bool mr_gpu_lora_has_experts(const mr_gpu *g); /* in this step */
void mr_gpu_lora_run_experts(mr_gpu *g, const mr_gpu_lora_experts *op);
void mr_gpu_lora_embed_rows(mr_gpu *g, mr_buf *x);

#endif
