#include "kernels/gpu/emu.h"

#include <string.h>

#define MAX_WARPS (MR_EMU_MAX_THREADS / 32)
#define MAX_COPIES 256 /* of one thread, not waited for */
#define FENCE 0xa5     /* what lies behind shared memory */
#define FENCE_BYTES 256

enum { READY, AT_WARP, AT_BARRIER, DONE };

typedef struct copy {
  void *dst;
  const void *src;
  int bytes, group;
} copy;

typedef struct warp {
  int arrived, live, line;
  mr_emu_op op;
} warp;

struct mr_emu {
  mr_emu_opts opts;
  const char *error;
  mr_emu_kernel kernel;
  const void *args;
  void *scheduler; /* its stack pointer */
  uint32_t random;
  int threads, warps, width, live;
  size_t shared_bytes;
  uint64_t copied; /* bytes, asynchronously */
  warp warp[MAX_WARPS];
  mr_emu_fiber fiber[MR_EMU_MAX_THREADS];
  copy copies[MR_EMU_MAX_THREADS][MAX_COPIES];
};

_Static_assert(sizeof(struct mr_emu) < ((size_t)8 << 20) - 4096, "room for the emulator's state");

mr_emu_now mr_emu_here;
static mr_emu *emu; /* the one whose kernel runs */

/* ------------------------------------------------------------------ fibers */

void mr_emu_swap(void **save, void *to);

#if defined(__x86_64__)
/* Saves what a call must keep, then goes on where `to` was saved. */
__asm__(".text\n"
        ".globl mr_emu_swap\n"
        ".type mr_emu_swap,@function\n"
        "mr_emu_swap:\n"
        "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
        "  movq %rsp,(%rdi)\n"
        "  movq %rsi,%rsp\n"
        "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
        "  popq %rcx\n"
        "  jmp *%rcx\n"
        ".size mr_emu_swap,.-mr_emu_swap\n");

#define SAVED 6

/* A stack that looks as if mr_emu_swap had been called at the first instruction of entry. */
static void *fresh_stack(unsigned char *top, void (*entry)(void)) {
  void **s = (void **)(void *)((uintptr_t)top & ~(uintptr_t)15);
  *--s = NULL; /* entry's return address: it never returns */
  memcpy(--s, &entry, sizeof entry);
  for (int i = 0; i < SAVED; i++)
    *--s = NULL;
  return s;
}
#else
#error "the emulator's switch of stacks is written for x86-64"
#endif

static void fail(const char *words) {
  if (!emu->error)
    emu->error = words;
}

/* Leaves the running fiber: for the next lane of its warp if that can go on, else for the
 * scheduler. */
static void leave(void) {
  mr_emu_fiber *f = mr_emu_here.fiber, *next = f + 1;
  if (emu->opts.order == MR_EMU_UP && f->lane + 1 < emu->width && next->state == READY) {
    mr_emu_here.fiber = next;
    mr_emu_swap(&f->sp, next->sp);
  } else {
    mr_emu_swap(&f->sp, emu->scheduler);
  }
}

/* ------------------------------------------------------------------ barriers, warps, copies */

static void fire(warp *w, int at) {
  mr_emu_fiber *lanes = &emu->fiber[at * emu->width];
  void *slots[64] = {NULL};
  for (int i = 0; i < emu->width; i++)
    slots[i] = lanes[i].slot;
  if (w->op)
    w->op(slots);
  for (int i = 0; i < emu->width; i++)
    if (lanes[i].state == AT_WARP)
      lanes[i].state = READY;
  w->arrived = 0;
}

void mr_emu_warp(mr_emu_op op, void *slot, int line) {
  mr_emu_fiber *f = mr_emu_here.fiber;
  warp *w = &emu->warp[f->warp];
  if (w->arrived && (w->line != line || w->op != op))
    fail("lanes of one warp meet at different warp operations");
  if (w->live < emu->width)
    fail("a warp operation after a lane has left");
  if (emu->error) {
    f->state = DONE;
    for (;;)
      mr_emu_swap(&f->sp, emu->scheduler);
  }
  w->op = op;
  w->line = line;
  f->slot = slot;
  f->state = AT_WARP;
  if (++w->arrived < emu->width)
    leave();
  else
    fire(w, f->warp);
}

void mr_emu_barrier(int line) {
  mr_emu_here.fiber->state = AT_BARRIER;
  mr_emu_here.fiber->site = line;
  leave();
}

void mr_emu_copy(void *dst, const void *src, int bytes) {
  mr_emu_fiber *f = mr_emu_here.fiber;
  emu->copied += (uint64_t)bytes;
  if (!emu->opts.lazy) {
    memcpy(dst, src, (size_t)bytes);
    return;
  }
  if (f->n_copies == MAX_COPIES) {
    fail("a thread has too many asynchronous copies that it has not waited for");
    return;
  }
  memset(dst, 0xff, (size_t)bytes);
  emu->copies[f->thread][f->n_copies++] = (copy){dst, src, bytes, f->group};
}

void mr_emu_copy_commit(void) {
  mr_emu_here.fiber->group++;
}

void mr_emu_copy_wait(int groups_left) {
  mr_emu_fiber *f = mr_emu_here.fiber;
  copy *all = emu->copies[f->thread];
  int kept = 0;
  for (int i = 0; i < f->n_copies; i++) {
    if (all[i].group < f->group - groups_left)
      memcpy(all[i].dst, all[i].src, (size_t)all[i].bytes);
    else
      all[kept++] = all[i];
  }
  f->n_copies = kept;
}

/* ------------------------------------------------------------------ a block */

static void entry(void) {
  emu->kernel(emu->args);
  mr_emu_fiber *f = mr_emu_here.fiber;
  if (f->n_copies)
    fail("a thread ends with asynchronous copies that it has not waited for");
  warp *w = &emu->warp[f->warp];
  if (w->arrived)
    fail("a lane leaves while others are at a warp operation");
  f->state = DONE;
  w->live--;
  emu->live--;
  for (;;)
    leave();
}

static void start_block(mr_emu *e) {
  unsigned char *stacks = (unsigned char *)e - MR_EMU_MAX_THREADS * MR_EMU_STACK;
  e->live = e->threads;
  for (int i = 0; i < e->threads; i++) {
    /* tops differ in their low bits, or all stacks would share cache sets */
    unsigned char *top = stacks + (size_t)(i + 1) * MR_EMU_STACK - 64 * (size_t)(i % 16);
    e->fiber[i] = (mr_emu_fiber){.sp = fresh_stack(top, entry),
                                 .thread = i,
                                 .lane = i % e->width,
                                 .warp = i / e->width,
                                 .state = READY};
  }
  for (int i = 0; i < e->warps; i++)
    e->warp[i] = (warp){.live = e->width};
  if (e->opts.poison)
    memset(mr_emu_here.shared, 0xff, e->shared_bytes);
  memset(mr_emu_here.shared + e->shared_bytes, FENCE, FENCE_BYTES);
}

static void check_fence(const mr_emu *e) {
  const unsigned char *fence = mr_emu_here.shared + e->shared_bytes;
  for (int i = 0; i < FENCE_BYTES; i++)
    if (fence[i] != FENCE)
      fail("a block writes past its shared memory");
}

/* The i-th of n (a power of two where shuffled) in the order asked for. */
static int pick(const mr_emu *e, int i, int n, uint32_t salt) {
  if (e->opts.order == MR_EMU_DOWN)
    return n - 1 - i;
  if (e->opts.order == MR_EMU_SHUFFLED)
    return (int)(((uint32_t)i * (2 * (salt % 16) + 1) + salt / 16) & (uint32_t)(n - 1));
  return i;
}

/* Runs the lanes of a warp until none can go on. */
static void run_warp(mr_emu *e, int w, uint32_t salt) {
  for (int ran = 1; ran && !e->error;) {
    ran = 0;
    for (int i = 0; i < e->width && !e->error; i++) {
      mr_emu_fiber *f = &e->fiber[w * e->width + pick(e, i, e->width, salt)];
      if (f->state != READY)
        continue;
      ran = 1;
      mr_emu_here.fiber = f;
      mr_emu_swap(&e->scheduler, f->sp);
    }
  }
}

/* All fibers are done or wait: at one barrier, or something is wrong. */
static void open_barrier(mr_emu *e) {
  int waiting = 0, site = -1;
  for (int i = 0; i < e->threads; i++) {
    mr_emu_fiber *f = &e->fiber[i];
    if (f->state != AT_BARRIER)
      continue;
    if (waiting++ && f->site != site)
      fail("threads of one block meet at different barriers");
    site = f->site;
    f->state = READY;
  }
  if (waiting < e->live)
    fail("some threads wait at a barrier, others for a warp operation");
  else if (waiting < e->threads)
    fail("a barrier after a thread has left");
}

static void run_block(mr_emu *e) {
  int slots = 1;
  while (slots < e->warps)
    slots *= 2;
  start_block(e);
  while (e->live && !e->error) {
    e->random = e->random * 1664525u + 1013904223u;
    for (int i = 0; i < slots; i++) {
      int w = pick(e, i, slots, e->random >> 20);
      if (w < e->warps)
        run_warp(e, w, e->random >> 12);
    }
    if (e->live && !e->error)
      open_barrier(e);
  }
  check_fence(e);
}

/* ------------------------------------------------------------------ launches */

mr_emu *mr_emu_init(void *room, const mr_emu_opts *opts) {
  mr_emu *e = (mr_emu *)(void *)((unsigned char *)room + MR_EMU_MAX_THREADS * MR_EMU_STACK);
  e->opts = *opts;
  return e;
}

const char *mr_emu_error(const mr_emu *e) {
  return e->error;
}

uint64_t mr_emu_copied(const mr_emu *e) {
  return e->copied;
}

int mr_emu_launch(mr_emu *e, mr_emu_kernel kernel, const mr_emu_shape *s, const void *args) {
  emu = e;
  e->error = NULL;
  if (s->threads < 1 || s->threads > MR_EMU_MAX_THREADS || (s->warp != 32 && s->warp != 64) ||
      s->threads % s->warp || s->shared > MR_EMU_SHARED || !s->blocks[0] || !s->blocks[1] ||
      !s->blocks[2]) {
    fail("a launch of an impossible shape");
    return -1;
  }
  e->kernel = kernel;
  e->args = args;
  e->width = (int)s->warp;
  e->threads = (int)s->threads;
  e->warps = e->threads / e->width;
  e->shared_bytes = s->shared;
  e->random = e->opts.seed * 2654435761u + 1;
  uintptr_t end = (uintptr_t)(e + 1);
  mr_emu_here = (mr_emu_now){.threads = e->threads,
                             .shared = (unsigned char *)((end + 255) & ~(uintptr_t)255)};
  for (uint32_t z = 0; z < s->blocks[2] && !e->error; z++)
    for (uint32_t y = 0; y < s->blocks[1] && !e->error; y++)
      for (uint32_t x = 0; x < s->blocks[0] && !e->error; x++) {
        mr_emu_here.block[0] = (int)x;
        mr_emu_here.block[1] = (int)y;
        mr_emu_here.block[2] = (int)z;
        run_block(e);
      }
  return e->error ? -1 : 0;
}
