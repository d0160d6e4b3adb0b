/* gpu.h: what the kernels of this folder are written in: the same source is CUDA (nvcc), HIP (bare
 * clang, without ROCm's headers or libraries) and C++ for the emulator (emu.h). The only place
 * that asks for which.
 *
 *     MR_GPU_KERNEL(norm, mr_gpu_rows, MR_GPU_WARPS) { ... a.x ... }     a: the argument
 *     MR_THREAD, MR_LANE, MR_BLOCK(0..2), MR_THREADS; MR_WARP lanes a warp: 32, or 64 on CDNA
 *     T *s = (T *)mr_shared();          all shared memory of the block is dynamic
 *     MR_BARRIER(), MR_WARP_SYNC()      of the block, of a warp
 *     mr_warp_xor, mr_warp_sum, mr_warp_max, mr_warp_ballot
 *     mr_async16, mr_async_commit, mr_async_wait<N>    global to shared; AMD: an ordinary copy
 *     mr_frag_a, _b, _c and mr_mma      a warp's 16x16x16 product of bfloat16, float32 sums
 *
 * Every lane of a warp takes part in every warp operation. Nothing here is contracted to fused
 * multiply-adds unless mr_fma says so: bits must not depend on the kernel that an expression is
 * inlined in.
 */
#ifndef MR_KERNELS_GPU_GPU_H
#define MR_KERNELS_GPU_GPU_H

#include "kernels/gpu/args.h"

#define MR_MMA_SYNC                                                                                \
  0                   /* NVIDIA, mma.sync.m16n8k16 (PTX ISA, "Matrix fragments for mma.m16n8k16")  \
                       */
#define MR_MMA_MFMA 1 /* CDNA, v_mfma_f32_16x16x16_bf16 (CDNA3 ISA, "Matrix arithmetic") */
#define MR_MMA_WMMA 2 /* RDNA3, v_wmma_f32_16x16x16_bf16 (RDNA3 ISA, "WMMA") */

#if defined(__CUDACC__)
#define MR_CUDA 1
#define MR_WARP 32
#define MR_MMA MR_MMA_SYNC
#elif defined(__HIP__)
#define MR_HIP 1
#if defined(__gfx90a__) || defined(__gfx942__)
#define MR_WARP 64
#define MR_MMA MR_MMA_MFMA
#elif defined(__gfx1100__) || defined(__gfx1101__) || defined(__gfx1102__)
#define MR_WARP 32
#define MR_MMA MR_MMA_WMMA
#else
#error "no matrix product is written for this architecture"
#endif
#else
#define MR_EMU 1
#ifndef MR_MMA
#define MR_MMA MR_MMA_SYNC
#endif
#define MR_WARP (MR_MMA == MR_MMA_MFMA ? 64 : 32)
#include "kernels/gpu/emu.h"
#include <math.h>
#include <string.h>
#endif

#define MR_UNROLL _Pragma("unroll")
#define MR_ROLL _Pragma("unroll 1")
#define MR_THREADS (MR_GPU_WARPS * MR_WARP)

/* ------------------------------------------------------------------ kernels, threads, barriers */

#if defined(MR_EMU)
#define MR_FN static inline __attribute__((always_inline, unused))
#define MR_GPU_KERNEL(name, arg, warps)                                                            \
  static void name##_body(const arg &a);                                                           \
  static void mr_k_##name(const void *p) {                                                         \
    name##_body(*(const arg *)p);                                                                  \
  }                                                                                                \
  static void name##_body(const arg &a)
#undef MR_UNROLL
#define MR_UNROLL
#undef MR_ROLL
#define MR_ROLL
#define MR_THREAD (mr_emu_here.fiber->thread)
#define MR_LANE (mr_emu_here.fiber->lane)
#define MR_BLOCK(i) (mr_emu_here.block[i])
#define MR_BARRIER() mr_emu_barrier(__LINE__)
#define MR_WARP_SYNC() mr_emu_warp(0, 0, __LINE__)
MR_FN void *mr_shared() {
  return mr_emu_here.shared;
}
#elif defined(MR_CUDA)
#define MR_FN __device__ static __forceinline__
#define MR_GPU_KERNEL(name, arg, warps)                                                            \
  extern "C" __global__ void __launch_bounds__((warps)*MR_WARP, 2) mr_k_##name(const arg a)
#define MR_THREAD ((int)threadIdx.x)
#define MR_LANE ((int)(threadIdx.x % MR_WARP))
#define MR_BLOCK(i) ((int)((i) == 0 ? blockIdx.x : (i) == 1 ? blockIdx.y : blockIdx.z))
#define MR_BARRIER() __syncthreads()
#define MR_WARP_SYNC() __syncwarp()
MR_FN void *mr_shared() {
  extern __shared__ __align__(16) unsigned char mr_shared_bytes[];
  return mr_shared_bytes;
}
#else
#define MR_FN __attribute__((device)) static inline __attribute__((always_inline))
#define MR_GPU_KERNEL(name, arg, warps)                                                            \
  extern "C" __attribute__((global, amdgpu_flat_work_group_size(                                   \
                                        MR_WARP, (warps)*MR_WARP))) void mr_k_##name(const arg a)
#define MR_THREAD ((int)__builtin_amdgcn_workitem_id_x())
#define MR_LANE ((int)(__builtin_amdgcn_workitem_id_x() % MR_WARP))
#define MR_BLOCK(i)                                                                                \
  ((int)((i) == 0   ? __builtin_amdgcn_workgroup_id_x()                                            \
         : (i) == 1 ? __builtin_amdgcn_workgroup_id_y()                                            \
                    : __builtin_amdgcn_workgroup_id_z()))
MR_FN void mr_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
/* Lanes of a wave run in step; the compiler must keep the order of memory. */
MR_FN void mr_wave_sync() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
#define MR_BARRIER() mr_barrier()
#define MR_WARP_SYNC() mr_wave_sync()
extern __attribute__((shared, aligned(16))) unsigned char mr_shared_bytes[];
MR_FN void *mr_shared() {
  return (void *)mr_shared_bytes;
}
#endif

/* ------------------------------------------------------------------ numbers */

#if defined(MR_EMU)
MR_FN float mr_float(uint32_t bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
MR_FN uint32_t mr_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}
MR_FN float mr_exp(float x) {
  return expf(x);
}
#define mr_sqrt sqrtf
#define mr_fma fmaf
#elif defined(MR_CUDA)
MR_FN float mr_float(uint32_t bits) {
  return __uint_as_float(bits);
}
MR_FN uint32_t mr_bits(float f) {
  return __float_as_uint(f);
}
MR_FN float mr_exp(float x) {
  return expf(x);
}
#define mr_sqrt sqrtf
#define mr_fma fmaf
#else
MR_FN float mr_float(uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}
MR_FN uint32_t mr_bits(float f) {
  return __builtin_bit_cast(uint32_t, f);
}
MR_FN float mr_exp(float x) {
  return __builtin_amdgcn_exp2f(x * 1.44269504f);
}
#define mr_sqrt __builtin_sqrtf
#define mr_fma __builtin_fmaf
#endif

#define MR_MINUS_INF mr_float(0xff800000u)

MR_FN float mr_abs(float x) {
  return mr_float(mr_bits(x) & 0x7fffffffu);
}
MR_FN float mr_max(float a, float b) {
  return a > b ? a : b;
}
MR_FN float mr_min(float a, float b) {
  return a < b ? a : b;
}
MR_FN int mr_imin(int a, int b) {
  return a < b ? a : b;
}
MR_FN int mr_imax(int a, int b) {
  return a > b ? a : b;
}

MR_FN float mr_wide(mr_gpu_bf16 h) {
  return mr_float((uint32_t)h << 16);
}
/* To nearest, ties to even. */
MR_FN mr_gpu_bf16 mr_narrow(float f) {
  uint32_t u = mr_bits(f);
  if ((u & 0x7fffffffu) > 0x7f800000u)
    return (mr_gpu_bf16)((u >> 16) | 0x40);
  return (mr_gpu_bf16)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}
/* What rounding left. An infinity leaves nothing. */
MR_FN mr_gpu_bf16 mr_rest(float f, mr_gpu_bf16 rounded) {
  float rest = f - mr_wide(rounded);
  return mr_abs(f) < 3e38f ? mr_narrow(rest) : (mr_gpu_bf16)0;
}

/* float16; an infinity and NaN stay what they are. */
MR_FN float mr_half(uint32_t h) {
  float x = mr_float((h & 0x7fffu) << 13) * 0x1p112f;
  uint32_t u = (h & 0x7c00u) == 0x7c00u ? 0x7f800000u | (h & 0x3ffu) << 13 : mr_bits(x);
  return mr_float(u | (h & 0x8000u) << 16);
}
/* To nearest, ties to even; past the largest one: infinity. */
MR_FN uint16_t mr_to_half(float f) {
  uint32_t u = mr_bits(f), sign = u >> 16 & 0x8000u, low = u & 0x7fffffffu;
  if (low > 0x7f800000u)
    return (uint16_t)(sign | 0x7e00u);
  if (low >= 0x477ff000u)
    return (uint16_t)(sign | 0x7c00u);
  if (low < 0x38800000u) /* steps of 2^-24: those of a float32 in 0.5 .. 1 */
    return (uint16_t)(sign | (mr_bits(mr_float(low) + 0.5f) - 0x3f000000u));
  return (uint16_t)(sign | (low - 0x38000000u + 0xfffu + (low >> 13 & 1)) >> 13);
}

/* E4M3 without its subnormal numbers: codes of |x| <= 448. */
MR_FN float mr_e4m3(uint32_t code) {
  uint32_t low = code & 0x7fu;
  return low < 8 ? 0 : mr_float(((low << 20) + (120u << 23)) | (code & 0x80u) << 24);
}
MR_FN uint32_t mr_to_e4m3(float f) {
  uint32_t u = mr_bits(f), low = u & 0x7fffffffu;
  if (low < 0x3c800000u) /* 2^-6, the least: to it or to zero */
    low = low <= 0x3c000000u ? 0 : 8;
  else
    low = (low + 0x7ffffu + (low >> 20 & 1) - (120u << 23)) >> 20;
  return low | (u >> 24 & 0x80u);
}

MR_FN float mr_tanh(float x) {
  float u = mr_abs(x), x2 = x * x;
  if (u < 0.1f)
    return x * (1 + x2 * (-1.0f / 3 + x2 * (2.0f / 15 - x2 * (17.0f / 315))));
  float e = mr_exp(-2 * u), t = (1 - e) / (1 + e);
  return x < 0 ? -t : t;
}
/* Abramowitz and Stegun 7.1.26: within 1.5e-7. */
MR_FN float mr_erf(float x) {
  float u = mr_abs(x), t = 1 / (1 + 0.3275911f * u);
  float p = 1.061405429f;
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  float y = 1 - p * t * mr_exp(-u * u);
  return x < 0 ? -y : y;
}
MR_FN float mr_expm1(float x) {
  if (mr_abs(x) > 0.1f)
    return mr_exp(x) - 1;
  return x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5))));
}
MR_FN float mr_sigmoid(float x) {
  return 1 / (1 + mr_exp(-x));
}

/* ------------------------------------------------------------------ a warp's lanes together */

#if defined(MR_EMU)
typedef struct mr_emu_swap_slot {
  float in, out;
  int mask;
} mr_emu_swap_slot;
static void mr_emu_xor(void **slots) {
  for (int i = 0; i < MR_WARP; i++) {
    mr_emu_swap_slot *s = (mr_emu_swap_slot *)slots[i];
    s->out = ((mr_emu_swap_slot *)slots[i ^ s->mask])->in;
  }
}
MR_FN float mr_warp_xor(float x, int mask) {
  mr_emu_swap_slot s = {x, 0, mask};
  mr_emu_warp(mr_emu_xor, &s, __LINE__);
  return s.out;
}
#elif defined(MR_CUDA)
MR_FN float mr_warp_xor(float x, int mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}
#else
MR_FN float mr_warp_xor(float x, int mask) {
  int from = (MR_LANE ^ mask) << 2;
  return __builtin_bit_cast(float, __builtin_amdgcn_ds_bpermute(from, __builtin_bit_cast(int, x)));
}
#endif

MR_FN float mr_warp_sum(float x) {
  MR_UNROLL
  for (int m = MR_WARP / 2; m; m /= 2)
    x += mr_warp_xor(x, m);
  return x;
}

MR_FN float mr_warp_max(float x) {
  MR_UNROLL
  for (int m = MR_WARP / 2; m; m /= 2)
    x = mr_max(x, mr_warp_xor(x, m));
  return x;
}

/* Which lanes say yes, a bit each, lane 0 the lowest; how many bits are set. */
#if defined(MR_EMU)
typedef struct mr_emu_vote {
  bool yes;
  uint64_t all;
} mr_emu_vote;
static void mr_emu_ballot(void **slots) {
  uint64_t all = 0;
  for (int i = 0; i < MR_WARP; i++)
    all |= (uint64_t)((mr_emu_vote *)slots[i])->yes << i;
  for (int i = 0; i < MR_WARP; i++)
    ((mr_emu_vote *)slots[i])->all = all;
}
MR_FN uint64_t mr_warp_ballot(bool yes) {
  mr_emu_vote v = {yes, 0};
  mr_emu_warp(mr_emu_ballot, &v, __LINE__);
  return v.all;
}
MR_FN int mr_bits_set(uint64_t x) {
  return __builtin_popcountll(x);
}
#elif defined(MR_CUDA)
MR_FN uint64_t mr_warp_ballot(bool yes) {
  return __ballot_sync(0xffffffffu, yes);
}
MR_FN int mr_bits_set(uint64_t x) {
  return __popcll(x);
}
#else
MR_FN uint64_t mr_warp_ballot(bool yes) {
#if MR_WARP == 64
  return __builtin_amdgcn_ballot_w64(yes);
#else
  return __builtin_amdgcn_ballot_w32(yes);
#endif
}
MR_FN int mr_bits_set(uint64_t x) {
  return __builtin_popcountll(x);
}
#endif

/* Sum over the block of MR_GPU_WARPS warps, the same in all threads. room: [MR_GPU_WARPS] shared,
 * free again after the next barrier. */
MR_FN float mr_block_sum(float x, float *room) {
  x = mr_warp_sum(x);
  if (MR_LANE == 0)
    room[MR_THREAD / MR_WARP] = x;
  MR_BARRIER();
  x = 0;
  MR_UNROLL
  for (int i = 0; i < MR_GPU_WARPS; i++)
    x += room[i];
  return x;
}

/* One more in a counter of shared memory; what it was. */
#if defined(MR_EMU)
MR_FN int mr_count(int32_t *p) {
  return (*p)++;
}
#elif defined(MR_CUDA)
MR_FN int mr_count(int32_t *p) {
  return atomicAdd(p, 1);
}
#else
MR_FN int mr_count(int32_t *p) {
  return __hip_atomic_fetch_add(p, 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
#endif

/* ------------------------------------------------------------------ copies to shared memory */

struct mr_u128 {
  uint32_t v[4];
} __attribute__((aligned(16), may_alias));

#if defined(MR_EMU)
MR_FN void mr_async16(void *shared, const void *global) {
  mr_emu_copy(shared, global, 16);
}
MR_FN void mr_async_commit() {
  mr_emu_copy_commit();
}
template <int N> MR_FN void mr_async_wait() {
  mr_emu_copy_wait(N);
}
#elif defined(MR_CUDA)
MR_FN void mr_async16(void *shared, const void *global) {
  unsigned to = (unsigned)__cvta_generic_to_shared(shared);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}
MR_FN void mr_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N> MR_FN void mr_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
#else
MR_FN void mr_async16(void *shared, const void *global) {
  *(mr_u128 *)shared = *(const mr_u128 *)global;
}
MR_FN void mr_async_commit() {
}
template <int N> MR_FN void mr_async_wait() {
}
#endif

#include "kernels/gpu/mma.h"

#endif
