/* encode.h: stored types from float32: the other direction of dtype.h.
 *
 *     mr_encoder to = mr_encoder_get(MR_Q4_K);        NULL: this type is not written
 *     to(dst, row, importance, n);
 *
 * n is a multiple of the type's block; dst gets mr_dtype_bytes(type, n) bytes at any alignment. src
 * must be finite. `importance` (n floats of at least 0, or NULL) says how much the square of an
 * error counts in each column: the mean square of the activation that meets it.
 *
 * F16, BF16, Q8_0, MXFP4, and without importance Q4_0, Q4_1, Q5_0, Q5_1 are rounded as the format's
 * own tools do (ggml-quants.c, quantize_row_*_ref), bit by bit. The others minimize the weighted
 * square error: each group's scale (and minimum) is the best least-squares fit over a range of
 * first guesses; scales are then rounded to their few bits, each to the neighbour that errs least.
 * Encoding what was decoded gives the same again for the former; for the latter nearly always, and
 * else moves values by a small share of the first error (tests/unit/test_encode.c).
 *
 * Not written: IQ1, IQ2, IQ3 (code books that are searched under importance), Q8_1 and Q8_K (only
 * intermediate), NVFP4, TQ1 and TQ2 (for models that were trained ternary).
 */
#ifndef MR_KERNELS_ENCODE_H
#define MR_KERNELS_ENCODE_H

#include <stdint.h>

typedef void (*mr_encoder)(void *dst, const float *src, const float *importance, int64_t n);

mr_encoder mr_encoder_get(int dtype);

/* Blocks of Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 whose codes (0 .. 15, 31 or 255, one a byte) and scales
 * were found elsewhere: value = scale * code + base, one of each for 32 values. base of the types
 * that store none is -8, -16 or -128 scales. Returns 0 for other types. */
int mr_encode_codes(int dtype, void *dst, const float *scale, const float *base,
                    const uint8_t *codes, int64_t n);
/* How a type cuts a group of values, nearly: into equal steps, around 0 or from the smallest value
 * to the largest. Types without groups: 32 columns, 15 steps. */
typedef struct mr_encode_steps {
  int group, levels, centred;
} mr_encode_steps;
mr_encode_steps mr_encode_steps_of(int dtype);
/* The largest code of such a type, 0 for others; *ranged: it stores a base. */
int mr_encode_levels(int dtype, int *ranged);

#endif
