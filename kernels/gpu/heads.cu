/* heads.cu: queries and keys of a token made ready, keys and values stored. A warp has one head in
 * shared memory: clip, norm, rope (RoFormer, Su et al. 2021), or norm after rope. */
#include "kernels/gpu/gpu.h"

MR_FN void norm_head(const mr_gpu_heads &a, float *x, const float *w, const float *b, int head,
                     int n) {
  if (a.norm == MR_GPU_NORM_NONE || (!w && !a.bare))
    return;
  size_t own = a.each ? (size_t)head * (size_t)n : 0;
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
    x[i] = (x[i] - mean) * inverse * (w ? w[own + (size_t)i] : 1) + (b ? b[own + (size_t)i] : 0);
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

MR_FN void prepare(const mr_gpu_heads &a, float *x, const float *w, const float *b, int head, int n,
                   int row) {
  if (!a.late)
    norm_head(a, x, w, b, head, n);
  if (a.n_rot)
    rotate_head(a, x, row);
  if (a.late)
    norm_head(a, x, w, b, head, n);
}

/* Hadamard transform of each block of a.rotate values, orthonormal: no channel sticks out, so fewer
 * bits hold more (QuaRot, Ashkboos et al. 2024). */
MR_FN void spread_head(const mr_gpu_heads &a, float *x) {
  for (int far = 1; far < a.rotate; far *= 2) {
    for (int i = MR_LANE; i < a.head_dim / 2; i += MR_WARP) {
      float *p = x + i / far * 2 * far + i % far, *q = p + far, u = *p, v = *q;
      *p = u + v;
      *q = u - v;
    }
    MR_WARP_SYNC();
  }
  float factor = 1 / mr_sqrt((float)a.rotate);
  for (int i = MR_LANE; i < a.head_dim; i += MR_WARP)
    x[i] *= factor;
  MR_WARP_SYNC();
}

/* 1 / the scale of a head's values that have 8 bits each, and the scale at its place. A token that
 * is not finite gets a key that no sum survives: who sees it knows, and nobody else. */
MR_FN float store_scale(const mr_gpu_heads &a, uint8_t *part, int slot, const float *x, bool key,
                        float limit) {
  float most = 0, rest = 0, top = a.kv == MR_GPU_KV_INT8 ? 127.0f : 448.0f;
  for (int i = MR_LANE; i < a.head_dim; i += MR_WARP) {
    float y = clipped(x[i], limit);
    most = mr_max(most, mr_abs(y));
    rest += y - y;
  }
  most = mr_warp_max(most);
  rest = mr_warp_sum(rest);
  bool zero = !(most > 1e-30f) || rest != 0;
  if (MR_LANE == 0)
    ((float *)(part + (size_t)MR_GPU_PAGE * (size_t)a.head_dim))[slot] = rest != 0 && key ? rest
                                                                         : zero           ? 0
                                                                                : most / top;
  return zero ? 0 : top / most;
}

/* To nearest, ties to even: |x| < 2^22. */
MR_FN int8_t to_int8(float x) {
  const float big = 12582912; /* 1.5 * 2^23: its steps are 1 */
  return (int8_t)(int)((x + big) - big);
}

/* A head of a token into its slot of a part. */
MR_FN void store(const mr_gpu_heads &a, uint8_t *part, int slot, const float *x, bool key) {
  uint8_t *codes = part + (size_t)slot * (size_t)a.head_dim;
  float inverse = 1, limit = key ? 0 : a.clip; /* a key was clipped before its norm */
  if (a.kv >= MR_GPU_KV_INT8)
    inverse = store_scale(a, part, slot, x, key, limit);
  for (int i = MR_LANE; i < a.head_dim; i += MR_WARP) {
    size_t at = (size_t)slot * (size_t)a.head_dim + (size_t)i;
    float y = clipped(x[i], limit);
    if (a.kv == MR_GPU_KV_F32)
      ((float *)part)[at] = y;
    else if (a.kv == MR_GPU_KV_F16)
      ((uint16_t *)part)[at] = mr_to_half(y);
    else if (a.kv == MR_GPU_KV_BF16)
      ((mr_gpu_bf16 *)part)[at] = mr_narrow(y);
    else if (a.kv == MR_GPU_KV_INT8)
      codes[i] = inverse > 0 ? (uint8_t)to_int8(y * inverse) : (uint8_t)0;
    else
      codes[i] = inverse > 0 ? (uint8_t)mr_to_e4m3(y * inverse) : (uint8_t)0;
  }
}

MR_GPU_KERNEL(heads, mr_gpu_heads, MR_GPU_WARPS) {
  int row = MR_BLOCK(0), at = MR_BLOCK(1) * MR_GPU_WARPS + MR_THREAD / MR_WARP;
  if (at >= a.n_heads + a.n_kv_heads)
    return; /* the whole warp */
  bool query = at < a.n_heads;
  int head = query ? at : at - a.n_heads, dim = a.head_dim, slot = a.pos[row] % MR_GPU_PAGE;
  size_t from = (size_t)head * (size_t)dim;
  float *x = query ? a.q + (size_t)row * a.ld_q + from : a.k + (size_t)row * a.ld_k + from;
  float *line = (float *)mr_shared() + MR_THREAD / MR_WARP * dim;
  for (int i = MR_LANE; i < dim; i += MR_WARP)
    line[i] = clipped(x[i], a.clip);
  MR_WARP_SYNC();
  prepare(a, line, query ? a.q_norm : a.k_norm, query ? a.q_norm_b : a.k_norm_b, head,
          query ? dim : a.k_dims, row);
  uint8_t *k = a.pages + (size_t)a.page[row] * a.page_bytes + a.layer_offset +
               (size_t)head * 2 * a.part_bytes;
  if (!query)
    store(a, k + a.part_bytes, slot, a.v ? a.v + (size_t)row * a.ld_v + from : line, false);
  MR_WARP_SYNC(); /* values may be this line */
  if (a.rotate)
    spread_head(a, line);
  if (!query) {
    store(a, k, slot, line, true);
    return;
  }
  float factor = a.temper ? a.temper[row] : 1;
  for (int i = MR_LANE; i < dim; i += MR_WARP)
    x[i] = line[i] * factor;
}
