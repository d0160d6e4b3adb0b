/* vec512.h: vectors of 16 floats for the shared vector kernels (elem.h, attn.h, gemmf.h) of this
 * folder.
 *
 * vec256.h gives the same names for 8 floats; an instruction set includes one of them, then the
 * kernels. `_n`: the first n lanes only (0 <= n <= VL): others load as zero and are not stored.
 * vmax, vmin: the second operand where one is NaN.
 */
#ifndef MR_KERNELS_SIMD_VEC_H
#define MR_KERNELS_SIMD_VEC_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#define VL 16
#define V_DOT /* dot products of four bytes: attn_dot.h */
#define V_INLINE static inline __attribute__((always_inline))

typedef __m512 vf;

V_INLINE __mmask16 v_first(int n) {
  return (__mmask16)((1u << n) - 1);
}

V_INLINE vf vload(const float *p) {
  return _mm512_loadu_ps(p);
}
V_INLINE vf vload_n(const float *p, int n) {
  return _mm512_maskz_loadu_ps(v_first(n), p);
}
V_INLINE void vstore(float *p, vf v) {
  _mm512_storeu_ps(p, v);
}
V_INLINE void vstore_n(float *p, vf v, int n) {
  _mm512_mask_storeu_ps(p, v_first(n), v);
}
V_INLINE vf vset1(float x) {
  return _mm512_set1_ps(x);
}
V_INLINE vf vzero(void) {
  return _mm512_setzero_ps();
}
V_INLINE vf viota(void) {
  return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

V_INLINE vf vadd(vf a, vf b) {
  return _mm512_add_ps(a, b);
}
V_INLINE vf vsub(vf a, vf b) {
  return _mm512_sub_ps(a, b);
}
V_INLINE vf vmul(vf a, vf b) {
  return _mm512_mul_ps(a, b);
}
V_INLINE vf vdiv(vf a, vf b) {
  return _mm512_div_ps(a, b);
}
V_INLINE vf vmax(vf a, vf b) {
  return _mm512_max_ps(a, b);
}
V_INLINE vf vmin(vf a, vf b) {
  return _mm512_min_ps(a, b);
}
V_INLINE vf vfma(vf a, vf b, vf c) {
  return _mm512_fmadd_ps(a, b, c);
} /* a*b + c */
V_INLINE vf vfnma(vf a, vf b, vf c) {
  return _mm512_fnmadd_ps(a, b, c);
} /* c - a*b */
/* 1/a to about a unit in the last place, for normal a below 2^126 */
V_INLINE vf vrecip(vf a) {
  vf r = _mm512_rcp14_ps(a); /* 14 bits; one step of Newton's doubles them */
  return vmul(r, vfnma(a, r, vset1(2.0f)));
}
V_INLINE vf vabs(vf a) {
  return _mm512_abs_ps(a);
}
V_INLINE vf vround(vf a) {
  return _mm512_roundscale_ps(a, 8);
}
V_INLINE vf vscale2(vf a, vf n) {
  return _mm512_scalef_ps(a, n);
} /* a * 2^n, n whole */
V_INLINE vf vfraction(vf a) {
  return _mm512_reduce_ps(a, 9);
} /* a - floor(a) */
/* x < least ? 0 : a * 2^floor(x), which is a normal number */
V_INLINE vf vscale2_floor(vf a, vf x, vf least) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), a, x);
}
V_INLINE vf vcopysign(vf a, vf sign) {
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_set1_epi32((int)0x80000000u),
                                                       _mm512_castps_si512(sign),
                                                       _mm512_castps_si512(a), 0xca));
}
/* x < y ? a : b; false where one is NaN */
V_INLINE vf vselect_lt(vf x, vf y, vf a, vf b) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), b, a);
}
V_INLINE float vreduce_add(vf a) {
  return _mm512_reduce_add_ps(a);
}
V_INLINE float vreduce_max(vf a) {
  return _mm512_reduce_max_ps(a);
}
/* bit i: lane i is NaN or +infinity */
V_INLINE uint32_t vbad(vf a) {
  return _mm512_fpclass_ps_mask(a, 0x01 | 0x08 | 0x80);
}
V_INLINE uint32_t veq(vf a, vf b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ);
}

V_INLINE vf vload_f16(const uint16_t *p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
}
V_INLINE vf vload_f16_n(const uint16_t *p, int n) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(v_first(n), p));
}
V_INLINE void vstore_f16(uint16_t *p, vf v) {
  _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
V_INLINE vf v_bf16_to_f32(__m256i h) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
V_INLINE vf vload_bf16(const uint16_t *p) {
  return v_bf16_to_f32(_mm256_loadu_si256((const __m256i *)(const void *)p));
}
V_INLINE vf vload_bf16_n(const uint16_t *p, int n) {
  return v_bf16_to_f32(_mm256_maskz_loadu_epi16(v_first(n), p));
}
/* rounds to the nearest bfloat16, ties to even; NaN stays NaN; kept as float32 */
V_INLINE vf vround_bf16(vf a) {
  __m512i u = _mm512_castps_si512(a);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  vf rounded = _mm512_castsi512_ps(_mm512_and_si512(r, _mm512_set1_epi32((int)0xffff0000u)));
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), rounded,
                              vset1(__builtin_nanf("")));
}
V_INLINE void vstore_bf16(uint16_t *p, vf v) {
  __m512i u = _mm512_srli_epi32(_mm512_castps_si512(vround_bf16(v)), 16);
  _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtepi32_epi16(u));
}

/* as int8, rounded; |lane| <= 127 */
V_INLINE void vstore_i8(uint8_t *p, vf v) {
  _mm_storeu_si128((__m128i *)(void *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
}
V_INLINE vf vload_i8(const uint8_t *p) {
  __m128i b = _mm_loadu_si128((const __m128i *)(const void *)p);
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(b));
}
/* 32 values of 4 bits in two vectors, those of the low halves first */
V_INLINE void vload_u4(vf *to, const uint8_t *p) {
  __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
  to[0] = _mm512_cvtepi32_ps(_mm512_and_si512(b, _mm512_set1_epi32(15)));
  to[1] = _mm512_cvtepi32_ps(_mm512_srli_epi32(b, 4));
}
/* s eeee mmm to the float16 with these bits on top: 2^-8 of E4M3's value */
V_INLINE vf vload_fp8(const uint8_t *p) {
  __m256i h = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(const void *)p));
  __m256i low = _mm256_and_si256(_mm256_slli_epi16(h, 7), _mm256_set1_epi16(0x3f80));
  __m256i sign = _mm256_and_si256(_mm256_slli_epi16(h, 8), _mm256_set1_epi16((int16_t)0x8000));
  return _mm512_cvtph_ps(_mm256_or_si256(low, sign));
}

/* sum as two halves in double, added to acc[2] */
V_INLINE void vaccumulate_f64(__m512d acc[2], vf v) {
  acc[0] = _mm512_add_pd(acc[0], _mm512_cvtps_pd(_mm512_castps512_ps256(v)));
  acc[1] = _mm512_add_pd(acc[1], _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)));
}
typedef __m512d vd;
V_INLINE vd vzero_f64(void) {
  return _mm512_setzero_pd();
}
V_INLINE double vreduce_f64(const vd acc[2]) {
  return _mm512_reduce_add_pd(_mm512_add_pd(acc[0], acc[1]));
}

/* (a0 b0 a1 b1 ...) to (a0 a1 ...), (b0 b1 ...) and back, over two vectors */
V_INLINE void vunzip(vf lo, vf hi, vf *a, vf *b) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  *a = _mm512_permutex2var_ps(lo, even, hi);
  *b = _mm512_permutex2var_ps(lo, _mm512_add_epi32(even, _mm512_set1_epi32(1)), hi);
}
V_INLINE void vzip(vf a, vf b, vf *lo, vf *hi) {
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  *lo = _mm512_permutex2var_ps(a, first, b);
  *hi = _mm512_permutex2var_ps(a, _mm512_add_epi32(first, _mm512_set1_epi32(8)), b);
}

#endif
