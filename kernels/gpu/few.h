/* few.h: weights of few bits (args.h, mr_gpu_hold), for gemm.cu and rows.cu. */
#ifndef MR_KERNELS_GPU_FEW_H
#define MR_KERNELS_GPU_FEW_H

#include "kernels/gpu/gpu.h"

/* Bytes of n weights, n even. */
template <int KIND> MR_FN size_t few_bytes(size_t n) {
  return KIND == MR_GPU_INT4 ? n / 2 : n;
}

struct few_scale {
  float step, least;
};

/* Of value c of a row of k. */
template <int KIND> MR_FN few_scale few_scale_of(const mr_gpu_few &few, size_t row, int k, int c) {
  size_t at = row * (size_t)(k / MR_GPU_GROUP) + (size_t)(c / MR_GPU_GROUP);
  float unit = few.units[row];
  if (KIND != MR_GPU_INT4)
    return few_scale{mr_half(few.scales[at]) * unit, 0};
  uint32_t both = ((const uint32_t *)(const void *)few.scales)[at];
  return few_scale{mr_half(both & 0xffffu) * unit, mr_half(both >> 16) * unit};
}

/* Weights of a word. */
template <int KIND> MR_FN constexpr int few_per_word() {
  return KIND == MR_GPU_INT4 ? 8 : 4;
}

/* Weight i of a word. */
template <int KIND> MR_FN float few_value(uint32_t word, int i, few_scale s) {
  if (KIND == MR_GPU_INT4)
    return mr_fma((float)(word >> 4 * i & 15u), s.step, s.least);
  return (float)(int8_t)(word >> 8 * i & 255u) * s.step;
}

/* The eight weights at p, rounded. */
template <int KIND> MR_FN mr_u128 few_round8(const uint8_t *p, few_scale s) {
  enum { PER = few_per_word<KIND>() };
  const uint32_t *word = (const uint32_t *)(const void *)p;
  mr_u128 out;
  MR_UNROLL
  for (int i = 0; i < 8; i += 2)
    out.v[i / 2] = mr_pair(mr_narrow(few_value<KIND>(word[i / PER], i % PER, s)),
                           mr_narrow(few_value<KIND>(word[i / PER], i % PER + 1, s)));
  return out;
}

/* Weight c of a row of k, not rounded. */
template <int KIND> MR_FN float few_one(const mr_gpu_few &few, size_t row, int k, int c) {
  enum { PER = few_per_word<KIND>() };
  const uint32_t *word = (const uint32_t *)(const void *)few.w;
  return few_value<KIND>(word[row * (size_t)(k / PER) + (size_t)(c / PER)], c % PER,
                         few_scale_of<KIND>(few, row, k, c));
}

#endif
