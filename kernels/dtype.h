/* dtype.h: numeric types of stored tensors. This file and the GEMM packers are the only places that
 * know them.
 *
 * Numbers are GGML's type numbers (ggml.h, enum ggml_type; block layouts: ggml-common.h,
 * ggml-quants.c).
 */
#ifndef MR_KERNELS_DTYPE_H
#define MR_KERNELS_DTYPE_H

#include <stddef.h>
#include <stdint.h>

typedef enum mr_dtype {
  MR_F32 = 0,
  MR_F16 = 1,
  MR_Q4_0 = 2,
  MR_Q4_1 = 3,
  MR_Q5_0 = 6,
  MR_Q5_1 = 7,
  MR_Q8_0 = 8,
  MR_Q8_1 = 9,
  MR_Q2_K = 10,
  MR_Q3_K = 11,
  MR_Q4_K = 12,
  MR_Q5_K = 13,
  MR_Q6_K = 14,
  MR_Q8_K = 15,
  MR_IQ2_XXS = 16,
  MR_IQ2_XS = 17,
  MR_IQ3_XXS = 18,
  MR_IQ1_S = 19,
  MR_IQ4_NL = 20,
  MR_IQ3_S = 21,
  MR_IQ2_S = 22,
  MR_IQ4_XS = 23,
  MR_I8 = 24,
  MR_I16 = 25,
  MR_I32 = 26,
  MR_I64 = 27,
  MR_F64 = 28,
  MR_IQ1_M = 29,
  MR_BF16 = 30,
  MR_TQ1_0 = 34,
  MR_TQ2_0 = 35,
  MR_MXFP4 = 39,
  MR_NVFP4 = 40,
  /* not GGML's: of safetensors */
  MR_F8_E4M3 = 64,
  MR_U8 = 65
} mr_dtype;

typedef struct mr_dtype_info {
  const char *name; /* "Q4_1"; NULL: no such type */
  int block;        /* elements a block */
  int block_bytes;
  /* n elements (a multiple of block) at src (any alignment) to float32, not overlapping; NULL:
   * known by name only */
  void (*to_f32)(float *dst, const void *src, int64_t n);
} mr_dtype_info;

/* Never NULL; name is NULL for a number that is no type (removed ones too). */
const mr_dtype_info *mr_dtype_get(int dtype);

/* Bytes of n elements; 0 if n is no multiple of the block, the type unknown, or the product
 * overflows. */
uint64_t mr_dtype_bytes(int dtype, uint64_t n);

float mr_f16_to_f32(uint16_t h);
uint16_t mr_f32_to_f16(float f); /* round to nearest even */
float mr_bf16_to_f32(uint16_t h);
uint16_t mr_f32_to_bf16(float f); /* round to nearest even; NaN stays NaN */

#endif
