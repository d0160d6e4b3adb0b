/* shape.h: how kernels are launched: blocks, threads and shared memory; and the emulator's tables
 * of kernels. */
#ifndef MR_KERNELS_GPU_SHAPE_H
#define MR_KERNELS_GPU_SHAPE_H

#include <stdbool.h>

#include "kernels/gpu/args.h"
#include "kernels/gpu/emu.h"

extern const char *const mr_gpu_kernel_names[MR_GPU_N_KERNELS]; /* symbols */
extern const size_t mr_gpu_kernel_args[MR_GPU_N_KERNELS];       /* bytes of the argument */

/* Fills a->at, chunks and stages for a->warps and a->head_dim in `most` bytes of shared memory.
 * False: it does not fit. */
bool mr_gpu_attn_fit(mr_gpu_attn *a, bool wide, size_t most);

/* Tables of the emulated machines, indexed by mr_gpu_kernel: warp 32 with mma.sync, wave 64 with
 * MFMA, warp 32 with WMMA. */
extern const mr_emu_kernel mr_emu_sync[MR_GPU_N_KERNELS];
extern const mr_emu_kernel mr_emu_mfma[MR_GPU_N_KERNELS];
extern const mr_emu_kernel mr_emu_wmma[MR_GPU_N_KERNELS];

#endif
