/* matrix.h: how quantized checkpoints hold a matrix [n, k]; rows come out as float32.
 *
 * Layouts: GPTQ (AutoGPTQ's packing), AWQ (AutoAWQ's gemm packing), compressed-tensors'
 * pack-quantized, and 8-bit values with scales for the tensor, each row or each block.
 */
#ifndef MR_SRC_MATRIX_H
#define MR_SRC_MATRIX_H

#include "src/model.h"

typedef enum mr_quant_kind {
  MR_QUANT_SCALED, /* data [n, k] times scales */
  MR_QUANT_GPTQ,   /* words of values along k, [k/per, n] */
  MR_QUANT_AWQ,    /* words of values along n, [k, n/per], shuffled */
  MR_QUANT_PACKED  /* words of values along k, [n, k/per], offset by half the range */
} mr_quant_kind;

struct mr_quant {
  mr_quant_kind kind;
  int n, k;             /* of the whole tensor */
  int bits, per;        /* 4: 8 in a word; 8: 4 (SCALED: 0) */
  int group;            /* values of k a group */
  int zero_add;         /* GPTQ: what is added to a stored zero */
  const uint8_t *words; /* mapped, little-endian */
  const uint8_t *zeros; /* [groups, n/per] words, or NULL (half the range) */
  const uint8_t *g_idx; /* [k] I32, or NULL: i / group */
  const float *scales;  /* GPTQ, AWQ [groups, n]; PACKED [n, groups]; SCALED [rows, cols] */
  int rows, cols;       /* of the scales */
  int block_n, block_k; /* SCALED: rows and values of a scale */
  /* SCALED: columns that stand beside the 8-bit ones, as they are; n_outliers 0: none */
  int n_outliers;
  const uint8_t *outlier_columns; /* [n_outliers] I32 */
  const float *outliers;          /* [n, n_outliers] */
};

/* Row r (0..n-1) of the quantized tensor; for SCALED dst holds the row of values already. */
void mr_quant_row(const mr_quant *q, int64_t r, float *dst);

#endif
