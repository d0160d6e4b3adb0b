/* quantize_plan.h: private to src/quantize*.c: what a written file is made of. */
#ifndef MR_SRC_QUANTIZE_PLAN_H
#define MR_SRC_QUANTIZE_PLAN_H

#include "io/gguf_write.h"
#include "src/quantize.h"

typedef enum mr_out_kind {
  MR_OUT_MATRIX, /* gets the type asked for */
  MR_OUT_HEAD,   /* ... the head's */
  MR_OUT_PLAIN,  /* stays as it is: F32, or the type in a GGUF file */
  MR_OUT_NONE    /* is not written: of a directory's fused experts, each has tensors of its own */
} mr_out_kind;

typedef struct mr_out_tensor {
  char name[MR_GGUF_NAME]; /* of a directory: its beginning */
  mr_str full;             /* of a directory: all of it; borrowed, or owned by the plan */
  int layer;               /* -1: of none */
  char stem[32];           /* the name without "blk.N." and ending: "attn_q" */
  mr_out_kind kind;
  int dtype; /* as it will be written */
  int n_dims;
  int64_t dims[4], rows; /* rows of dims[0] values */
  /* the source: one of these */
  const mr_gguf_tensor *raw; /* rows one after the other; borrowed */
  bool columns;              /* ... or columns: it is stored transposed */
  int first, n_parts;        /* of the plan's parts: rows of one matrix after the other */
  const float *values;       /* borrowed from the model or owned by the plan */
  int heads_of, rotated;  /* rows of a head and how many of them are put from halves into pairs (the
                             order of rope in GGUF files); 0: rows stay where they are */
  const float *col, *row; /* factors of columns and rows, or NULL; borrowed or owned by the plan */
} mr_out_tensor;

typedef struct mr_out_plan {
  const mr_model *m; /* borrowed */
  bool less_one;     /* norms are stored less by one */
  mr_out_tensor *t;  /* owned */
  size_t n, cap;
  const mr_matrix **parts; /* owned list of borrowed matrices */
  size_t n_parts, cap_parts;
  float **own; /* owned */
  size_t n_own, cap_own;
} mr_out_plan;

/* The tensors of the file, without types. MR_E_UNAVAILABLE: a directory whose architecture has no
 * names in GGUF. */
mr_code mr_out_plan_make(mr_out_plan *p, const mr_model *m, mr_err *err);
/* The tensors of a directory under their own names, then those of experts that lay in one tensor.
 * Matrices that a recipe may round are MR_OUT_MATRIX, all else is PLAIN or NONE. */
mr_code mr_out_plan_dir(mr_out_plan *p, const mr_model *m, mr_err *err);
void mr_out_plan_free(mr_out_plan *p);
/* One row as float32. */
void mr_out_row(const mr_out_plan *p, const mr_out_tensor *t, int64_t row, float *dst);

/* n floats that the plan owns; NULL: out of memory. */
float *mr_out_floats(mr_out_plan *p, size_t n);

/* Keys of a directory's configuration, and of its tokenizer. */
void mr_out_config(mr_gguf_writer *w, const mr_model *m);
mr_code mr_out_vocab(mr_gguf_writer *w, const char *dir, int n_rows, mr_err *err);
/* Whether a file reads back as the same configuration; MR_E_UNAVAILABLE names what differs. */
mr_code mr_out_check(const mr_model *m, const char *path, mr_err *err);
mr_code mr_out_check_vocab(const char *dir, const char *path, mr_err *err);

#endif
