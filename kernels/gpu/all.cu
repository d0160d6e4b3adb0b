/* all.cu: all kernels in one unit: a fat binary of CUDA, a code object of HIP, or a table for the
 * emulator. */
#include "kernels/gpu/rows.cu"
#include "kernels/gpu/heads.cu"
#include "kernels/gpu/gemm.cu"
#include "kernels/gpu/lora.cu"
#include "kernels/gpu/attn.cu"
#include "kernels/gpu/route.cu"
#include "kernels/gpu/top.cu"
#include "kernels/gpu/peak.cu"

#if defined(MR_EMU)
extern "C" const mr_emu_kernel MR_EMU_TABLE[MR_GPU_N_KERNELS] = {
#define MR_GPU_ENTRY(name, arg) mr_k_##name,
    MR_GPU_KERNELS(MR_GPU_ENTRY)
#undef MR_GPU_ENTRY
};
#endif
