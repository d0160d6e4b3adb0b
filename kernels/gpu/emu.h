/* emu.h: a GPU's threads on one thread of the host, so that the kernels of this folder run where
 * there is no GPU.
 *
 *     mr_emu *e = mr_emu_init(room, &opts);      room: MR_EMU_BYTES, zeroed, 64-aligned, borrowed
 *     int rc = mr_emu_launch(e, kernel, &shape, args);
 *     if (rc) puts(mr_emu_error(e));
 *
 * Each thread of a block is a fiber with its own stack; blocks run one after another. A fiber runs
 * until it meets a barrier or an operation of its whole warp, which the last lane to arrive does
 * for all. So what differs from a GPU is timing only, and the options make the worst of it:
 *   order     lanes and warps run upwards, downwards or shuffled: a missing barrier shows;
 *   lazy      asynchronous copies land when they are waited for, and until then their target is
 *             NaN: a missing wait shows;
 *   poison    shared memory starts as NaN.
 * Threads that meet at different barriers, or lanes at different warp operations, end the launch
 * with an error. Not seen: bank conflicts, registers, speed, races between blocks.
 *
 * Kernels are C++ (gpu.h) and see the part at the end of this file. One launch at a time in the
 * whole process.
 */
#ifndef MR_KERNELS_GPU_EMU_H
#define MR_KERNELS_GPU_EMU_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MR_EMU_MAX_THREADS 512
#define MR_EMU_STACK ((size_t)48 << 10)
#define MR_EMU_SHARED ((size_t)227 << 10) /* bytes a block may have, as on H100 */
/* fibers' stacks, shared memory, and the emulator's own state */
#define MR_EMU_BYTES (MR_EMU_MAX_THREADS * MR_EMU_STACK + MR_EMU_SHARED + ((size_t)8 << 20))

typedef struct mr_emu mr_emu;
typedef void (*mr_emu_kernel)(const void *args);

typedef enum mr_emu_order { MR_EMU_UP, MR_EMU_DOWN, MR_EMU_SHUFFLED } mr_emu_order;

typedef struct mr_emu_opts {
  mr_emu_order order;
  uint32_t seed;
  int lazy, poison;
} mr_emu_opts;

typedef struct mr_emu_shape {
  uint32_t blocks[3], threads; /* threads: a multiple of warp */
  uint32_t warp;               /* lanes: 32 or 64 */
  size_t shared;               /* bytes of shared memory */
} mr_emu_shape;

mr_emu *mr_emu_init(void *room, const mr_emu_opts *opts);
/* 0, or -1 with mr_emu_error set. The kernel's writes up to there stay. */
int mr_emu_launch(mr_emu *e, mr_emu_kernel kernel, const mr_emu_shape *shape, const void *args);
const char *mr_emu_error(const mr_emu *e); /* of the last launch; NULL: none */
uint64_t mr_emu_copied(const mr_emu *e);   /* bytes of asynchronous copies in all launches */

/* ------------------------------------------------------------------ for kernels */

typedef struct mr_emu_fiber {
  void *sp; /* saved stack pointer */
  int thread, lane, warp;
  int state;
  int site;   /* line of the barrier or warp operation that it waits at */
  void *slot; /* its operands for a warp operation */
  int n_copies, group;
} mr_emu_fiber;

typedef struct mr_emu_now { /* what a running kernel sees */
  mr_emu_fiber *fiber;
  int block[3], threads;
  unsigned char *shared;
} mr_emu_now;

extern mr_emu_now mr_emu_here;

void mr_emu_barrier(int line);
/* All lanes of the warp call it; the last one runs op over all lanes' slots, [warp]. */
typedef void (*mr_emu_op)(void **slots);
void mr_emu_warp(mr_emu_op op, void *slot, int line);
void mr_emu_copy(void *dst, const void *src, int bytes); /* asynchronous, 16 bytes at most */
void mr_emu_copy_commit(void);
void mr_emu_copy_wait(int groups_left);

#ifdef __cplusplus
}
#endif

#endif
