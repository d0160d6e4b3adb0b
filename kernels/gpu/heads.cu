/* heads.cu: queries and keys of a token made ready, keys and values stored. A warp has one head in
 * shared memory: clip, norm, rope (RoFormer, Su et al. 2021), or norm after rope. */
#include "kernels/gpu/gpu.h"

MR_FN void norm_head(const mr_gpu_heads &a, float *x, const float *w, int head, int n) {
  if (a.norm == MR_GPU_NORM_NONE || (!w && !a.bare))
    return;
  if (w && a.each)
    w += (size_t)head * (size_t)n;
  float mean = 0, sum = 0;
  if (a.norm == MR_GPU_NORM_LAYER) {
    for (int i = MR_LANE; i < n; i += MR_WARP)
      sum += x[i];
    mean = mr_warp_sum(sum) / (float)n;
    sum = 0;
  }
  for (int i = MR_LANE; i < n; i += MR_WARP)
    sum += (x[i] - mean) * (x[i] - mean);
  float inverse = 1 / mr_sqrt(mr_warp_sum(sum) / (float)n + a.eps);
  for (int i = MR_LANE; i < n; i += MR_WARP)
    x[i] = (x[i] - mean) * inverse * (w ? w[i] : 1);
  MR_WARP_SYNC();
}

MR_FN void rotate_head(const mr_gpu_heads &a, float *x, int row) {
  int half = a.n_rot / 2;
  const float *rope = a.rope + (size_t)row * (size_t)a.n_rot;
  x += a.rope_first;
  for (int i = MR_LANE; i < half; i += MR_WARP) {
    float *p = a.interleaved ? x + 2 * i : x + i, *q = a.interleaved ? p + 1 : p + half;
    float u = *p, v = *q;
    *p = u * rope[i] - v * rope[half + i];
    *q = u * rope[half + i] + v * rope[i];
  }
  MR_WARP_SYNC();
}

MR_FN float clipped(float x, float limit) {
  return limit > 0 ? mr_max(-limit, mr_min(x, limit)) : x;
}

MR_FN void prepare(const mr_gpu_heads &a, float *x, const float *w, int head, int n, int row) {
  if (!a.late)
    norm_head(a, x, w, head, n);
  if (a.n_rot)
    rotate_head(a, x, row);
  if (a.late)
    norm_head(a, x, w, head, n);
}

MR_FN void store(const mr_gpu_heads &a, uint8_t *part, int slot, int i, float x) {
  size_t at = (size_t)slot * (size_t)a.head_dim + (size_t)i;
  if (a.wide)
    ((float *)part)[at] = x;
  else
    ((mr_gpu_bf16 *)part)[at] = mr_narrow(x);
}

MR_GPU_KERNEL(heads, mr_gpu_heads, MR_GPU_WARPS) {
  int row = MR_BLOCK(0), at = MR_BLOCK(1) * MR_GPU_WARPS + MR_THREAD / MR_WARP;
  if (at >= a.n_heads + a.n_kv_heads)
    return; /* the whole warp */
  bool query = at < a.n_heads;
  int head = query ? at : at - a.n_heads, dim = a.head_dim;
  size_t from = (size_t)head * (size_t)dim;
  float *x = query ? a.q + (size_t)row * a.ld_q + from : a.k + (size_t)row * a.ld_k + from;
  float *line = (float *)mr_shared() + MR_THREAD / MR_WARP * dim;
  for (int i = MR_LANE; i < dim; i += MR_WARP)
    line[i] = clipped(x[i], a.clip);
  MR_WARP_SYNC();
  prepare(a, line, query ? a.q_norm : a.k_norm, head, query ? dim : a.k_dims, row);
  if (query) {
    float factor = a.temper ? a.temper[row] : 1;
    for (int i = MR_LANE; i < dim; i += MR_WARP)
      x[i] = line[i] * factor;
    return;
  }
  uint8_t *k = a.pages + (size_t)a.page[row] * a.page_bytes + a.layer_offset +
               (size_t)head * 2 * a.part_bytes;
  const float *v = a.v ? a.v + (size_t)row * a.ld_v + from : line;
  for (int i = MR_LANE; i < dim; i += MR_WARP) {
    store(a, k, a.pos[row] % MR_GPU_PAGE, i, line[i]);
    store(a, k + a.part_bytes, a.pos[row] % MR_GPU_PAGE, i, clipped(v[i], a.clip));
  }
}
