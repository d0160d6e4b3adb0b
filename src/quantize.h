/* quantize.h: writes a model as a GGUF file of another type, tensor by tensor.
 *
 *     mr_quantize_opts o = {.in = "dir", .out = "m.gguf", .dtype = MR_Q4_K, .head_dtype = -1};
 *     mr_quantize_report r;
 *     mr_quantize(&o, &r, &err);
 *
 * A GGUF file keeps its keys, names and small tensors. A directory is read as the program reads it
 * for running (quantized checkpoints too) and written under GGUF's names: architectures that GGUF
 * files of this program's kind exist for, others are refused by name; so is a configuration that
 * the file's keys cannot say, which is found by reading them back, before any weight is encoded.
 *
 * Matrices get the type asked for; the output head, and the embedding where it is the head too, a
 * better one (mr_quantize_head_type). Norms, biases, routers and tables stay F32, or as they are in
 * a GGUF file. Rows that are no multiple of the type's block get the nearest type with blocks of
 * 32, else F16 (counted in the report). A tensor of a GGUF file that has the type already is copied
 * byte by byte. Memory: one slab of rows at a time, whatever the model's size.
 *
 * With texts (quantize_recipe.h) matrices of the layers are rounded by what they meet: a matrix and
 * its products of columns are then in memory too. Experts' own matrices are rounded by importance
 * at most.
 *
 * The file appears whole or not at all (io/gguf_write.h). The same input gives the same bytes
 * whatever the number of threads.
 */
#ifndef MR_SRC_QUANTIZE_H
#define MR_SRC_QUANTIZE_H

#include "io/gguf_write.h"
#include "src/calibrate.h"

typedef enum mr_quantize_method {                 /* what the texts of a calibration are used for */
                                  MR_METHOD_NONE, /* nothing: there are none */
                                  MR_METHOD_IMPORTANCE, /* errors count by the mean square of what
                                                           meets a column */
                                  MR_METHOD_SMOOTH,     /* SmoothQuant's factors (fold.h) */
                                  MR_METHOD_AWQ,        /* AWQ's factors, then as IMPORTANCE */
                                  MR_METHOD_GPTQ /* later columns make up for errors of earlier ones
                                                    (gptq.h); types of 32 values: q4_0 q4_1 q5_0
                                                    q5_1 q8_0 */
} mr_quantize_method;

typedef enum mr_sparsify { /* two of each four columns of the layers' matrices become 0 */
                           MR_SPARSE_NO,
                           MR_SPARSE_WANDA, /* those of the smallest |w| * rms(x) (Sun et al. 2023)
                                             */
                           MR_SPARSE_SPARSEGPT /* chosen and made up for by the products of columns
                                                  (gptq.h) */
} mr_sparsify;

typedef enum mr_quantize_form { /* what is written */
                                MR_FORM_GGUF,
                                /* directories (from directories with weights in F32, F16 or BF16);
                                 * what other tools and this program read as quantized checkpoints
                                 */
                                MR_FORM_GPTQ, /* 4 bits, symmetric groups, AutoGPTQ's packing */
                                MR_FORM_AWQ, /* 4 bits, groups with zeros, AutoAWQ's gemm packing */
                                MR_FORM_INT8, /* compressed-tensors: int8 with a scale a row */
                                MR_FORM_INT8_OUTLIERS /* ... and columns that stay F16, after
                                                         LLM.int8 (Dettmers et al. 2022): this
                                                         program's own form */
} mr_quantize_form;

typedef struct mr_quantize_opts {
  const char *in, *out;
  mr_quantize_form form;
  int dtype;      /* of a GGUF file: mr_encoder_get knows it */
  int head_dtype; /* -1: mr_quantize_head_type(dtype) */
  bool plain;     /* q4_0 q4_1 q5_0 q5_1 are rounded as the format's own tools do, bit by bit, not
                     with a search for the best scale */
  bool no_vocab;  /* leave the tokenizer of a directory out */
  mr_quantize_method method;
  mr_sparsify sparsify;
  const mr_tokens *texts; /* [n_texts] for method and sparsify; borrowed */
  int n_texts;
  int group;         /* columns of a 4-bit group in a directory; 0: the largest of 128, 64, 32 */
  uint64_t products; /* bytes for products of columns; 0: 1 GiB */
  mr_pool *pool;     /* NULL: one thread (needed with texts); borrowed */
  void (*progress)(void *ctx, uint64_t done, uint64_t all); /* bytes written; or NULL */
  void *ctx;
} mr_quantize_opts;

typedef struct mr_quantize_report {
  uint64_t bytes_in, bytes_out;
  int n_tensors, n_typed;         /* all; of the type that was asked for */
  int n_copied;                   /* were of their type already */
  int n_other;                    /* matrices of another type than was asked for: their width */
  char first_other[MR_GGUF_NAME]; /* ... the first of them */
  int first_other_dtype;
  double weighted_bits; /* bits a weight, of the matrices */
  int n_calibrated;     /* matrices that the texts said something of */
} mr_quantize_report;

mr_code mr_quantize(const mr_quantize_opts *o, mr_quantize_report *r, mr_err *err);
/* ... a directory. OUT must not be there; it is written under OUT.tmp and renamed. */
mr_code mr_quantize_dir(const mr_quantize_opts *o, mr_quantize_report *r, mr_err *err);

/* The type with this name in any case ("q4_k"), -1: none that is written. */
int mr_quantize_type(const char *name);
/* Names of the types that are written, for messages: "f32, f16, ...". */
const char *mr_quantize_types(void);
/* What the head is written as beside matrices of this type. */
int mr_quantize_head_type(int dtype);
/* The type, or the nearest one whose block divides cols. */
int mr_quantize_fit(int dtype, int64_t cols);

#endif
