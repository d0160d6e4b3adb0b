/* peak.c: see peak.h. */
#include "kernels/peak.h"

#include <string.h>

#if defined(__x86_64__)
#define TWELVE(OP) OP(0) OP(1) OP(2) OP(3) OP(4) OP(5) OP(6) OP(7) OP(8) OP(9) OP(10) OP(11)
#define CLOBBERS                                                                                   \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",         \
      "xmm11", "xmm12", "xmm13", "xmm14", "xmm15"

/* twelve sums: more than latency times width; zeros first, so that no sum overflows slowly */
static double vnni(long loops) {
#define DOT(n) "vpdpbusd %%zmm14, %%zmm15, %%zmm" #n "\n\t"
  for (long i = 0; i < loops; i++)
    __asm__ volatile("vpxor %%xmm14, %%xmm14, %%xmm14\n\t" TWELVE(DOT)::: CLOBBERS);
  return (double)loops * 12 * 128;
}

static double dot_bf16(long loops) {
#define DOT_BF16(n) "vdpbf16ps %%zmm14, %%zmm15, %%zmm" #n "\n\t"
  for (long i = 0; i < loops; i++)
    __asm__ volatile("vpxor %%xmm14, %%xmm14, %%xmm14\n\t" TWELVE(DOT_BF16)::: CLOBBERS);
  return (double)loops * 12 * 64;
}

static double maddubs(long loops) {
#define MADD(n)                                                                                    \
  "vpmaddubsw %%ymm14, %%ymm15, %%ymm13\n\tvpmaddwd %%ymm13, %%ymm15, %%ymm12\n\t"                 \
  "vpaddd %%ymm12, %%ymm" #n ", %%ymm" #n "\n\t"
  for (long i = 0; i < loops; i++)
    __asm__ volatile("vpxor %%xmm14, %%xmm14, %%xmm14\n\t" TWELVE(MADD)::: CLOBBERS);
  return (double)loops * 12 * 64;
}

static double avx_vnni(long loops) {
#define DOT_Y(n) "%{vex%} vpdpbusd %%ymm14, %%ymm15, %%ymm" #n "\n\t"
  for (long i = 0; i < loops; i++)
    __asm__ volatile("vpxor %%xmm14, %%xmm14, %%xmm14\n\t" TWELVE(DOT_Y)::: CLOBBERS);
  return (double)loops * 12 * 64;
}
#endif

double mr_peak_int8(const mr_kernels *k, long loops) {
#if defined(__x86_64__)
  if (strcmp(k->name, "avx512") == 0)
    return vnni(loops);
  if (strcmp(k->name, "avxvnni") == 0)
    return avx_vnni(loops);
  if (strcmp(k->name, "avx2") == 0)
    return maddubs(loops);
#endif
  (void)k, (void)loops;
  return 0.0;
}

double mr_peak_bf16(const mr_kernels *k, long loops) {
#if defined(__x86_64__)
  if (k->floats == MR_SCHEME_BF16)
    return dot_bf16(loops);
#endif
  (void)k, (void)loops;
  return 0.0;
}
