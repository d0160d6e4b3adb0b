/* device_gemm_api.h: what device_gemm.c uses of cublasLt (NVIDIA, cuBLAS 12 and 13) and of
 * hipBLASLt (AMD, ROCm 6): names, numbers and the one structure whose layout matters, as their
 * documentation gives them. No header of theirs is needed to build, and the libraries are opened at
 * run time.
 *
 * hipBLASLt follows cublasLt call by call; only numbers differ. Every call returns 0 or an error
 * number. Matrices are column-major there. */
#ifndef MR_SRC_DEVICE_GEMM_API_H
#define MR_SRC_DEVICE_GEMM_API_H

#include <stddef.h>
#include <stdint.h>

/* X(ours, name after "cublasLt" or "hipblasLt", arguments) */
#define MR_GEMM_CALLS(X)                                                                           \
  X(create, Create, (void **handle))                                                               \
  X(destroy, Destroy, (void *handle))                                                              \
  X(desc_new, MatmulDescCreate, (void **desc, int compute, int scale))                             \
  X(desc_set, MatmulDescSetAttribute, (void *desc, int which, const void *value, size_t bytes))    \
  X(desc_free, MatmulDescDestroy, (void *desc))                                                    \
  X(layout_new, MatrixLayoutCreate,                                                                \
    (void **layout, int type, uint64_t rows, uint64_t cols, int64_t ld))                           \
  X(layout_set, MatrixLayoutSetAttribute,                                                          \
    (void *layout, int which, const void *value, size_t bytes))                                    \
  X(layout_free, MatrixLayoutDestroy, (void *layout))                                              \
  X(wish_new, MatmulPreferenceCreate, (void **wish))                                               \
  X(wish_set, MatmulPreferenceSetAttribute,                                                        \
    (void *wish, int which, const void *value, size_t bytes))                                      \
  X(wish_free, MatmulPreferenceDestroy, (void *wish))                                              \
  X(choose, MatmulAlgoGetHeuristic,                                                                \
    (void *handle, void *desc, void *a, void *b, void *c, void *d, void *wish, int most,           \
     void *results, int *n))                                                                       \
  X(multiply, Matmul,                                                                              \
    (void *handle, void *desc, const void *alpha, const void *a, void *a_layout, const void *b,    \
     void *b_layout, const void *beta, const void *c, void *c_layout, void *d, void *d_layout,     \
     const void *algo, void *workspace, size_t workspace_bytes, void *stream))

enum {
  MR_GEMM_F32 = 0,   /* types of both */
  MR_GEMM_BF16 = 14, /* ... */
  MR_GEMM_WISH_WORKSPACE = 1,
  MR_GEMM_WISH_REDUCTION = 3 /* cublasLt: which ways to sum over split K; 0: none */
};

typedef struct mr_gemm_numbers { /* that differ */
  int compute, transposed, set_transposed, set_ld;
} mr_gemm_numbers;
#define MR_GEMM_CUDA ((mr_gemm_numbers){68, 1, 3, 4})
#define MR_GEMM_HIP ((mr_gemm_numbers){2, 112, 0, 6})

typedef struct mr_gemm_cuda_choice {
  uint64_t algo[8];
  size_t workspace;
  int state; /* 0: usable */
  float waves;
  int reserved[4];
} mr_gemm_cuda_choice;

typedef struct mr_gemm_hip_choice {
  uint64_t algo[3];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
} mr_gemm_hip_choice;

#endif
