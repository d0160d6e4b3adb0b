/* peak.cu: how fast matrix instructions are with nothing to wait for: the ceiling that products are
 * held against (bench device). */
#include "kernels/gpu/gpu.h"

MR_GPU_KERNEL(peak, mr_gpu_peak, MR_GPU_WARPS) {
  enum { CHAINS = MR_GPU_PEAK_CHAINS };
  mr_gpu_bf16 *s = (mr_gpu_bf16 *)mr_shared();
  for (int i = MR_THREAD; i < 16 * 16; i += MR_THREADS)
    s[i] = mr_narrow((float)(i % 7) * 0.125f);
  MR_BARRIER();
  mr_frag_a x;
  mr_frag_b y;
  mr_frag_c c[CHAINS];
  mr_load_a(x, s, 16);
  mr_load_b(y, s, 16);
  MR_UNROLL
  for (int t = 0; t < CHAINS; t++)
    mr_zero(c[t]);
  for (int i = 0; i < a.rounds; i++) {
    MR_UNROLL
    for (int t = 0; t < CHAINS; t++)
      mr_mma(c[t], x, y);
  }
  float sum = 0;
  MR_UNROLL
  for (int t = 0; t < CHAINS; t++)
    sum += c[t].r[0];
  a.out[MR_BLOCK(0) * MR_THREADS + MR_THREAD] = sum;
}
