/* encode_fit.h: scales of one group of values by weighted least squares, for encoders and for grids
 * of other formats (src/grid.h). */
#ifndef MR_KERNELS_ENCODE_FIT_H
#define MR_KERNELS_ENCODE_FIT_H

#include <stdint.h>

/* Weights of a group's square errors: importance times what a relative error costs. mean_square: of
 * the block that the group is part of. */
void mr_k_fit_weights(float *w, const float *x, const float *importance, int n, float mean_square);
float mr_k_mean_square(const float *x, int n);

/* s so that x ~ s * q with whole q from lo to hi (lo < 0 < hi); 0 for a group of zeros. */
float mr_k_fit_scale(const float *x, const float *w, int n, int lo, int hi);

/* s >= 0 and *min so that x ~ s * q - *min with whole q from 0 to levels. The minimum is at least 0
 * unless `any`. */
float mr_k_fit_scale_min(const float *x, const float *w, int n, int levels, int any, float *min);

/* s so that x ~ s * table[i]; table: the 16 values of IQ4. */
float mr_k_fit_table(const float *x, const float *w, int n);
/* The index of the nearest value of the table. */
int mr_k_nearest_iq4(float v);

/* Whole numbers from lo to hi: round(v). */
static inline int mr_k_clamp_round(float v, int lo, int hi) {
  v = v < (float)lo ? (float)lo : v > (float)hi ? (float)hi : v;
  return (int)__builtin_rintf(v);
}

/* f16 bits of a scale: rounded, no further than the largest finite one. */
uint16_t mr_k_scale_f16(float d);
void mr_k_store_u16(uint8_t *p, uint16_t v);

/* The encoders of blocks of 256, and of the 4-bit tables (encode_k.c). */
void mr_k_encode_q2_k(void *dst, const float *src, const float *importance, int64_t n);
void mr_k_encode_q3_k(void *dst, const float *src, const float *importance, int64_t n);
void mr_k_encode_q4_k(void *dst, const float *src, const float *importance, int64_t n);
void mr_k_encode_q5_k(void *dst, const float *src, const float *importance, int64_t n);
void mr_k_encode_q6_k(void *dst, const float *src, const float *importance, int64_t n);
void mr_k_encode_iq4_nl(void *dst, const float *src, const float *importance, int64_t n);
void mr_k_encode_iq4_xs(void *dst, const float *src, const float *importance, int64_t n);

#endif
