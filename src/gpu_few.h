/* gpu_few.h: weights of few bits as the GPU's kernels read them (kernels/gpu/args.h, mr_gpu_hold).
 *
 * A row has a unit, a power of two; each MR_GPU_GROUP of its values a scale (INT8), or a scale and
 * a least value (INT4), in float16 times the unit. A group whose values lie on up to 16 even steps
 * (files of 4 bits) is held as it is, but for what float16 leaves of steps: 2^-11, where rounding
 * to bfloat16 leaves 2^-9. Other groups are cut into even steps from least to largest (INT4), or
 * round(x * 127 / max|x|).
 */
#ifndef MR_SRC_GPU_FEW_H
#define MR_SRC_GPU_FEW_H

#include <stdbool.h>

#include "kernels/gpu/args.h"
#include "src/model.h"

/* Of a row of k values, a multiple of MR_GPU_GROUP. */
size_t mr_gpu_few_bytes(mr_gpu_hold hold, size_t k);
size_t mr_gpu_few_scale_bytes(mr_gpu_hold hold, size_t k);

/* n values of a row into w and scales of k; values from n on become zeros. */
void mr_gpu_few_row(mr_gpu_hold hold, const float *row, int n, int k, uint8_t *w, uint16_t *scales,
                    float *unit);

/* Bits of a weight in the file. */
double mr_gpu_file_bits(const mr_matrix *w);
/* Whether INT4 holds them as they are: a few rows are looked at. room: w->k floats. */
bool mr_gpu_fits_int4(const mr_matrix *w, float *room);

#endif
