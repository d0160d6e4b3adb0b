/* rows.cu: passes over rows: embedding, norms, activations, packing for the matrix products. A
 * block works on a row; sums go over its threads in one order, so a row's bits are its own. */
#include "kernels/gpu/few.h"

/* ------------------------------------------------------------------ norms */

/* Mean and 1 / deviation of n values get(i), by kind: RMS norm has mean 0. */
template <class Get>
MR_FN void row_stats(Get get, int n, int kind, float eps, float *mean, float *inverse) {
  float *room = (float *)mr_shared(), sum = 0;
  *mean = 0;
  if (kind == MR_GPU_NORM_LAYER) {
    for (int i = MR_THREAD; i < n; i += MR_THREADS)
      sum += get(i);
    *mean = mr_block_sum(sum, room) / (float)n;
    room += MR_GPU_WARPS;
    sum = 0;
  }
  for (int i = MR_THREAD; i < n; i += MR_THREADS) {
    float x = get(i) - *mean;
    sum += x * x;
  }
  *inverse = 1 / mr_sqrt(mr_block_sum(sum, room) / (float)n + eps);
}

MR_FN float normed(const mr_gpu_norm &norm, float x, float mean, float inverse, int i) {
  float y = (x - mean) * inverse;
  if (norm.w)
    y *= norm.w[i];
  return norm.b ? y + norm.b[i] : y;
}

MR_GPU_KERNEL(norm, mr_gpu_rows, MR_GPU_WARPS) {
  float *x = a.x + (size_t)MR_BLOCK(0) * a.ld, mean, inverse;
  row_stats([&](int i) { return x[i]; }, a.cols, a.norm.kind, a.norm.eps, &mean, &inverse);
  for (int i = MR_THREAD; i < a.cols; i += MR_THREADS)
    x[i] = normed(a.norm, x[i], mean, inverse, i);
}

MR_GPU_KERNEL(add, mr_gpu_rows, MR_GPU_WARPS) {
  float *x = a.x + (size_t)MR_BLOCK(0) * a.ld, mean = 0, inverse = 1;
  const float *t = a.t + (size_t)MR_BLOCK(0) * a.ld_t;
  if (a.norm.kind != MR_GPU_NORM_NONE)
    row_stats([&](int i) { return t[i]; }, a.cols, a.norm.kind, a.norm.eps, &mean, &inverse);
  for (int i = MR_THREAD; i < a.cols; i += MR_THREADS) {
    float y = a.norm.kind != MR_GPU_NORM_NONE ? normed(a.norm, t[i], mean, inverse, i) : t[i];
    x[i] = mr_fma(y, a.scale, x[i]);
  }
}

/* ------------------------------------------------------------------ activations */

MR_FN float activate(int act, const float *p, float x) {
  switch (act) {
  case MR_GPU_SILU:
    return x * mr_sigmoid(x);
  case MR_GPU_GELU:
    return 0.5f * x * (1 + mr_erf(x * 0.70710678f));
  case MR_GPU_GELU_TANH:
    return 0.5f * x * (1 + mr_tanh(0.79788456f * x * (1 + 0.044715f * x * x)));
  case MR_GPU_RELU:
    return x > 0 ? x : 0 * x;
  case MR_GPU_RELU2:
    return x > 0 ? x * x : 0 * x;
  case MR_GPU_QUICK_GELU:
    return x * mr_sigmoid(1.702f * x);
  default: /* xIELU (Huang et al. 2024) */
    return x > 0 ? p[0] * x * x + p[2] * x : (mr_expm1(mr_min(x, p[3])) - x) * p[1] + p[2] * x;
  }
}

MR_FN float gated(int act, const float *p, float x, const float *up) {
  if (act == MR_GPU_CLAMPED) {
    float g = mr_min(x, p[1]), u = mr_max(-p[1], mr_min(*up, p[1]));
    return (u + 1) * g * mr_sigmoid(p[0] * g);
  }
  float y = activate(act, p, x);
  return up ? y * *up : y;
}

/* ------------------------------------------------------------------ packing */

MR_FN float pack_value(const mr_gpu_pack &a, const float *x, const float *up, int i) {
  return a.gate ? gated(a.act, a.act_p, x[i], up ? up + i : 0) : x[i];
}

MR_GPU_KERNEL(pack, mr_gpu_pack, MR_GPU_WARPS) {
  int row = MR_BLOCK(0), from = a.from ? a.from[row] : row;
  const float *x = a.x + (size_t)from * a.ld, *up = a.up ? a.up + (size_t)from * a.ld_up : 0;
  mr_gpu_bf16 *out = a.out + (size_t)row * (size_t)a.k;
  float mean = 0, inverse = 1, factor = a.factor ? a.factor[row] : 1;
  if (a.norm.kind != MR_GPU_NORM_NONE)
    row_stats([&](int i) { return pack_value(a, x, up, i); }, a.cols, a.norm.kind, a.norm.eps,
              &mean, &inverse);
  for (int i = MR_THREAD; i < a.k; i += MR_THREADS) {
    float y = i < a.cols ? pack_value(a, x, up, i) : 0;
    if (i < a.cols && a.norm.kind != MR_GPU_NORM_NONE)
      y = normed(a.norm, y, mean, inverse, i);
    y *= factor;
    out[i] = mr_narrow(y);
    if (a.plane)
      out[a.plane + (size_t)i] = mr_rest(y, mr_narrow(y));
  }
}

/* ------------------------------------------------------------------ the rest */

MR_FN float embedding(const mr_gpu_embed &a, size_t row, int i) {
  size_t at = row * (size_t)a.k + (size_t)i;
  if (a.hold == MR_GPU_INT8)
    return few_one<MR_GPU_INT8>(a.few, row, a.k, i);
  if (a.hold == MR_GPU_INT4)
    return few_one<MR_GPU_INT4>(a.few, row, a.k, i);
  return a.plane ? mr_wide(a.w[at]) + mr_wide(a.w[a.plane + at]) : mr_wide(a.w[at]);
}

MR_GPU_KERNEL(embed, mr_gpu_embed, MR_GPU_WARPS) {
  int row = MR_BLOCK(0);
  float *x = a.x + (size_t)row * a.ld;
  const float *position = a.position ? a.position + (size_t)a.pos[row] * (size_t)a.cols : 0;
  for (int i = MR_THREAD; i < a.cols; i += MR_THREADS) {
    float y = embedding(a, (size_t)a.token[row], i) * a.scale;
    x[i] = position ? y + position[i] : y;
  }
}

MR_GPU_KERNEL(finish, mr_gpu_finish, MR_GPU_WARPS) {
  float *x = a.x + (size_t)MR_BLOCK(1) * a.ld;
  int end = mr_imin((MR_BLOCK(0) + 1) * 1024, a.cols);
  for (int i = MR_BLOCK(0) * 1024 + MR_THREAD; i < end; i += MR_THREADS) {
    float y = x[i] * a.scale;
    x[i] = a.cap > 0 ? a.cap * mr_tanh(y / a.cap) : y;
  }
}

MR_GPU_KERNEL(mix, mr_gpu_mix, MR_GPU_WARPS) {
  int t = MR_BLOCK(0);
  float *out = a.out + (size_t)t * a.ld_out;
  const float *weight = a.weight + t * a.each;
  const int32_t *slot = a.slot + t * a.each;
  for (int i = MR_THREAD; i < a.cols; i += MR_THREADS) {
    float sum = 0;
    for (int e = 0; e < a.each; e++)
      sum = mr_fma(weight[e], a.y[(size_t)slot[e] * a.ld_y + (size_t)i], sum);
    out[i] = sum;
  }
}

MR_GPU_KERNEL(dot, mr_gpu_dot, MR_GPU_WARPS) {
  const float *x = a.x + (size_t)MR_BLOCK(0) * a.ld;
  float mean = 0, inverse = 1, sum = 0;
  if (a.norm.kind != MR_GPU_NORM_NONE) {
    row_stats([&](int i) { return x[i]; }, a.cols, a.norm.kind, a.norm.eps, &mean, &inverse);
    MR_BARRIER();
  }
  for (int i = MR_THREAD; i < a.cols; i += MR_THREADS)
    sum +=
        (a.norm.kind != MR_GPU_NORM_NONE ? normed(a.norm, x[i], mean, inverse, i) : x[i]) * a.w[i];
  sum = mr_block_sum(sum, (float *)mr_shared());
  if (MR_THREAD == 0)
    a.out[MR_BLOCK(0)] = mr_sigmoid(sum);
}
