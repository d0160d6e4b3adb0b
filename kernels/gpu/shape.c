#include "kernels/gpu/shape.h"

#define NAME(name, arg) "mr_k_" #name,
const char *const mr_gpu_kernel_names[MR_GPU_N_KERNELS] = {MR_GPU_KERNELS(NAME)};
#undef NAME

#define SIZE(name, arg) sizeof(arg),
const size_t mr_gpu_kernel_args[MR_GPU_N_KERNELS] = {MR_GPU_KERNELS(SIZE)};
#undef SIZE

static int32_t padded(int32_t n) {
  return (n + 15) / 16 * 16;
}

static uint32_t place(uint32_t *at, size_t bytes) {
  uint32_t here = *at;
  *at += (uint32_t)((bytes + 15) & ~(size_t)15);
  return here;
}

/* Bytes of a page's keys or values that are converted in shared memory; 0: they come there as they
 * are needed. */
static uint32_t raw_bytes(const mr_gpu_attn *a, bool wide) {
  uint32_t n = (uint32_t)MR_GPU_PAGE * (uint32_t)a->head_dim;
  if (a->kv == MR_GPU_KV_F32 || (a->kv == MR_GPU_KV_BF16 && !wide && a->head_dim % 8 == 0))
    return 0;
  return a->kv < MR_GPU_KV_INT8 ? 2 * n : n + MR_GPU_PAGE * (uint32_t)sizeof(float);
}

static bool lay_out(mr_gpu_attn *a, bool wide, size_t most) {
  size_t planes = wide ? 2 : 1, rows = 16 * (size_t)a->warps, stages = (size_t)a->stages;
  size_t ready = a->at.raw_part ? 1 : stages;
  uint32_t end = 0;
  a->at.q = place(&end, planes * rows * (size_t)a->at.q_ld * 2);
  a->at.k = place(&end, ready * planes * MR_GPU_PAGE * (size_t)a->at.q_ld * 2);
  a->at.v = place(&end, ready * planes * MR_GPU_PAGE * (size_t)a->at.v_ld * 2);
  a->at.raw = place(&end, 2 * stages * a->at.raw_part);
  a->at.s = place(&end, rows * MR_GPU_S_LD * sizeof(float));
  a->at.p = place(&end, planes * rows * MR_GPU_P_LD * 2);
  a->at.stat = place(&end, rows * MR_GPU_STAT * sizeof(float));
  a->at.bytes = end;
  return end <= most;
}

bool mr_gpu_attn_fit(mr_gpu_attn *a, bool wide, size_t most) {
  int32_t dim = padded(a->head_dim);
  a->chunks = (dim + MR_GPU_VALUES - 1) / MR_GPU_VALUES;
  a->at.values = dim < MR_GPU_VALUES ? dim : MR_GPU_VALUES;
  a->at.q_ld = dim + 8; /* 16 bytes on: rows begin in different banks */
  a->at.v_ld = a->at.values + 8;
  a->at.raw_part = raw_bytes(a, wide);
  for (a->stages = 2; a->stages > 0; a->stages--)
    if (lay_out(a, wide, most))
      return true;
  return false;
}
