/* dtype_rows.h: private to kernels/dtype*.c: the converters of the types with blocks of 256, and of
 * the 4-bit tables.
 *
 * Each takes n elements (a multiple of the type's block) at src, any alignment.
 */
#ifndef MR_KERNELS_DTYPE_ROWS_H
#define MR_KERNELS_DTYPE_ROWS_H

#include <stdint.h>

void mr_k_q2_k_to_f32(float *dst, const void *src, int64_t n);
void mr_k_q3_k_to_f32(float *dst, const void *src, int64_t n);
void mr_k_q4_k_to_f32(float *dst, const void *src, int64_t n);
void mr_k_q5_k_to_f32(float *dst, const void *src, int64_t n);
void mr_k_q6_k_to_f32(float *dst, const void *src, int64_t n);
void mr_k_q8_k_to_f32(float *dst, const void *src, int64_t n);
void mr_k_iq4_nl_to_f32(float *dst, const void *src, int64_t n);
void mr_k_iq4_xs_to_f32(float *dst, const void *src, int64_t n);
void mr_k_mxfp4_to_f32(float *dst, const void *src, int64_t n);
void mr_k_nvfp4_to_f32(float *dst, const void *src, int64_t n);
void mr_k_tq1_0_to_f32(float *dst, const void *src, int64_t n);
void mr_k_tq2_0_to_f32(float *dst, const void *src, int64_t n);
void mr_k_iq1_s_to_f32(float *dst, const void *src, int64_t n);
void mr_k_iq1_m_to_f32(float *dst, const void *src, int64_t n);
void mr_k_iq2_xxs_to_f32(float *dst, const void *src, int64_t n);
void mr_k_iq2_xs_to_f32(float *dst, const void *src, int64_t n);
void mr_k_iq2_s_to_f32(float *dst, const void *src, int64_t n);
void mr_k_iq3_xxs_to_f32(float *dst, const void *src, int64_t n);
void mr_k_iq3_s_to_f32(float *dst, const void *src, int64_t n);

/* Code books (dtype_iq_grid.c). */
extern const uint16_t mr_k_iq2_xxs_grid[256], mr_k_iq2_xs_grid[512], mr_k_iq2_s_grid[1024];
extern const uint16_t mr_k_iq3_xxs_grid[256], mr_k_iq3_s_grid[512], mr_k_iq1_grid[2048];

/* Unaligned little-endian loads. */
uint16_t mr_k_load_u16(const uint8_t *p);
float mr_k_load_f16(const uint8_t *p);

#endif
