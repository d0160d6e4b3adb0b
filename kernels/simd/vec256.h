/* vec256.h: vectors of 8 floats (AVX2, FMA, F16C) under the names of vec512.h, which says what they
 * do. */
#ifndef MR_KERNELS_SIMD_VEC_H
#define MR_KERNELS_SIMD_VEC_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define VL 8
#define V_INLINE static inline __attribute__((always_inline))

typedef __m256 vf;
typedef __m256d vd;

V_INLINE __m256i v_first(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

V_INLINE vf vload(const float *p) {
  return _mm256_loadu_ps(p);
}
V_INLINE vf vload_n(const float *p, int n) {
  return _mm256_maskload_ps(p, v_first(n));
}
V_INLINE void vstore(float *p, vf v) {
  _mm256_storeu_ps(p, v);
}
V_INLINE void vstore_n(float *p, vf v, int n) {
  if (n >= VL) /* masked stores are slow on AMD's CPUs */
    vstore(p, v);
  else
    _mm256_maskstore_ps(p, v_first(n), v);
}
V_INLINE vf vset1(float x) {
  return _mm256_set1_ps(x);
}
V_INLINE vf vzero(void) {
  return _mm256_setzero_ps();
}
V_INLINE vf viota(void) {
  return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7);
}

V_INLINE vf vadd(vf a, vf b) {
  return _mm256_add_ps(a, b);
}
V_INLINE vf vsub(vf a, vf b) {
  return _mm256_sub_ps(a, b);
}
V_INLINE vf vmul(vf a, vf b) {
  return _mm256_mul_ps(a, b);
}
V_INLINE vf vdiv(vf a, vf b) {
  return _mm256_div_ps(a, b);
}
V_INLINE vf vmax(vf a, vf b) {
  return _mm256_max_ps(a, b);
}
V_INLINE vf vmin(vf a, vf b) {
  return _mm256_min_ps(a, b);
}
V_INLINE vf vfma(vf a, vf b, vf c) {
  return _mm256_fmadd_ps(a, b, c);
}
V_INLINE vf vfnma(vf a, vf b, vf c) {
  return _mm256_fnmadd_ps(a, b, c);
}
V_INLINE vf vrecip(vf a) {
  return vdiv(vset1(1.0f), a);
}
V_INLINE vf vabs(vf a) {
  return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a);
}
V_INLINE vf vround(vf a) {
  return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
/* in two steps, as 2^n alone may be no normal number: |n| <= 252 */
V_INLINE vf vscale2(vf a, vf n) {
  __m256i i = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(i, 1), one = _mm256_set1_epi32(127);
  __m256i rest = _mm256_sub_epi32(i, half);
  vf p = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, one), 23));
  vf q = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, one), 23));
  return vmul(vmul(a, p), q);
}
V_INLINE vf vfraction(vf a) {
  return _mm256_sub_ps(a, _mm256_floor_ps(a));
}
V_INLINE vf vscale2_floor(vf a, vf x, vf least) {
  __m256i n = _mm256_cvtps_epi32(_mm256_floor_ps(x));
  vf p = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
  return _mm256_andnot_ps(_mm256_cmp_ps(x, least, _CMP_LT_OQ), vmul(a, p));
}
V_INLINE vf vcopysign(vf a, vf sign) {
  vf bit = _mm256_set1_ps(-0.0f);
  return _mm256_or_ps(_mm256_and_ps(bit, sign), _mm256_andnot_ps(bit, a));
}
V_INLINE vf vselect_lt(vf x, vf y, vf a, vf b) {
  return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, y, _CMP_LT_OQ));
}
V_INLINE float vreduce_add(vf a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
V_INLINE float vreduce_max(vf a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}
V_INLINE uint32_t vbad(vf a) {
  return (uint32_t)_mm256_movemask_ps(
      _mm256_cmp_ps(a, _mm256_set1_ps(__builtin_inff()), _CMP_NLT_UQ));
}
V_INLINE uint32_t veq(vf a, vf b) {
  return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ));
}

V_INLINE __m128i v_load_halves(const uint16_t *p, int n) {
  uint16_t h[8] = {0};
  memcpy(h, p, (size_t)n * sizeof *h);
  return _mm_loadu_si128((const __m128i *)(const void *)h);
}
V_INLINE vf vload_f16(const uint16_t *p) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
}
V_INLINE vf vload_f16_n(const uint16_t *p, int n) {
  return _mm256_cvtph_ps(v_load_halves(p, n));
}
V_INLINE void vstore_f16(uint16_t *p, vf v) {
  _mm_storeu_si128((__m128i *)(void *)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
V_INLINE vf v_bf16_to_f32(__m128i h) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
V_INLINE vf vload_bf16(const uint16_t *p) {
  return v_bf16_to_f32(_mm_loadu_si128((const __m128i *)(const void *)p));
}
V_INLINE vf vload_bf16_n(const uint16_t *p, int n) {
  return v_bf16_to_f32(v_load_halves(p, n));
}
V_INLINE vf vround_bf16(vf a) {
  __m256i u = _mm256_castps_si256(a);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  vf rounded = _mm256_castsi256_ps(_mm256_and_si256(r, _mm256_set1_epi32((int)0xffff0000u)));
  return _mm256_blendv_ps(rounded, vset1(__builtin_nanf("")), _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
V_INLINE void vstore_bf16(uint16_t *p, vf v) {
  __m256i u = _mm256_srli_epi32(_mm256_castps_si256(vround_bf16(v)), 16);
  __m128i h = _mm_packus_epi32(_mm256_castsi256_si128(u), _mm256_extracti128_si256(u, 1));
  _mm_storeu_si128((__m128i *)(void *)p, h);
}

V_INLINE void vstore_i8(uint8_t *p, vf v) {
  __m256i i = _mm256_cvtps_epi32(v);
  __m128i w = _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
  _mm_storel_epi64((__m128i *)(void *)p, _mm_packs_epi16(w, w));
}
V_INLINE vf vload_i8(const uint8_t *p) {
  __m128i b = _mm_loadl_epi64((const __m128i *)(const void *)p);
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b));
}
V_INLINE void vload_u4(vf *to, const uint8_t *p) {
  for (int i = 0; i < 2; i++) {
    __m256i b = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(p + 8 * i)));
    to[i] = _mm256_cvtepi32_ps(_mm256_and_si256(b, _mm256_set1_epi32(15)));
    to[i + 2] = _mm256_cvtepi32_ps(_mm256_srli_epi32(b, 4));
  }
}
V_INLINE vf vload_fp8(const uint8_t *p) {
  __m128i h = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)(const void *)p));
  __m128i low = _mm_and_si128(_mm_slli_epi16(h, 7), _mm_set1_epi16(0x3f80));
  __m128i sign = _mm_and_si128(_mm_slli_epi16(h, 8), _mm_set1_epi16((int16_t)0x8000));
  return _mm256_cvtph_ps(_mm_or_si128(low, sign));
}

V_INLINE vd vzero_f64(void) {
  return _mm256_setzero_pd();
}
V_INLINE void vaccumulate_f64(vd acc[2], vf v) {
  acc[0] = _mm256_add_pd(acc[0], _mm256_cvtps_pd(_mm256_castps256_ps128(v)));
  acc[1] = _mm256_add_pd(acc[1], _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)));
}
V_INLINE double vreduce_f64(const vd acc[2]) {
  vd s = _mm256_add_pd(acc[0], acc[1]);
  __m128d t = _mm_add_pd(_mm256_castpd256_pd128(s), _mm256_extractf128_pd(s, 1));
  return _mm_cvtsd_f64(_mm_add_sd(t, _mm_unpackhi_pd(t, t)));
}

V_INLINE void vunzip(vf lo, vf hi, vf *a, vf *b) {
  __m256d even = _mm256_castps_pd(_mm256_shuffle_ps(lo, hi, 0x88)); /* by 128-bit lanes */
  __m256d odd = _mm256_castps_pd(_mm256_shuffle_ps(lo, hi, 0xdd));
  *a = _mm256_castpd_ps(_mm256_permute4x64_pd(even, 0xd8));
  *b = _mm256_castpd_ps(_mm256_permute4x64_pd(odd, 0xd8));
}
V_INLINE void vzip(vf a, vf b, vf *lo, vf *hi) {
  vf l = _mm256_unpacklo_ps(a, b), h = _mm256_unpackhi_ps(a, b);
  *lo = _mm256_permute2f128_ps(l, h, 0x20);
  *hi = _mm256_permute2f128_ps(l, h, 0x31);
}

#endif
