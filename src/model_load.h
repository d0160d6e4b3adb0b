/* model_load.h: private to src/model*.c: finding, checking and taking over tensors. */
#ifndef MR_SRC_MODEL_LOAD_H
#define MR_SRC_MODEL_LOAD_H

#include "src/matrix.h"
#include "src/names.h"

typedef struct mr_loader { /* the first error ends the work: every step looks at rc */
  mr_model *m;
  mr_names names;
  uint8_t *used; /* a flag for each tensor of the file */
  int layer;     /* -1: tensors of no layer */
  int item;      /* the expert that a stem with %d means */
  mr_code rc;
  mr_err *err;
} mr_loader;

#define MR_LOAD_FAIL(l, code, ...)                                                                 \
  ((l)->rc = mr_err_at((l)->err, code, (l)->m->weights->path, 0, -1, __VA_ARGS__))

/* The tensor, or NULL; `name` gets its full name. */
const mr_gguf_tensor *mr_load_find(mr_loader *l, const char *stem, const char *ext,
                                   char name[MR_NAME]);
bool mr_load_has(mr_loader *l, const char *stem);
/* Marks the tensor as used; rows*cols values of it count as parameters the first time. */
void mr_load_use(mr_loader *l, const mr_gguf_tensor *t, uint64_t values);
/* n floats owned by the model; NULL: l->rc is set. */
float *mr_load_floats(mr_loader *l, size_t n);
/* A vector (or a small table) of rows*n floats; *out stays as it is where the tensor is absent and
 * not needed. */
void mr_load_vector(mr_loader *l, const float **out, const char *stem, const char *ext,
                    int64_t rows, int64_t n, bool needed);
/* W [n, k] and its bias [n]. */
void mr_load_matrix(mr_loader *l, mr_matrix *w, const char *stem, int n, int k, bool bias);
/* A product owned by the model, to be filled; NULL: l->rc is set. */
mr_product *mr_load_product(mr_loader *l);
/* One quantized in its own way, where the checkpoint has one under this name. */
bool mr_load_quant(mr_loader *l, mr_matrix *w, const char *stem, int n, int k);
/* The scales of a matrix of 8-bit values that has been found, where there are some. */
void mr_load_scales(mr_loader *l, mr_matrix *w, const char *stem);

void mr_load_experts(mr_loader *l, mr_layer *y);
/* The expert that every token goes to, f wide. */
void mr_load_shared(mr_loader *l, mr_matrix *gate, mr_matrix *up, mr_matrix *down, int f);
void mr_load_latent(mr_loader *l, mr_layer *y);

mr_code mr_load_model(mr_model *m, mr_err *err);

#endif
