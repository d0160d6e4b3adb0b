/* pool.c: see pool.h.
 *
 * The work that is left is one 64-bit word: the number of the run above, the items not yet taken
 * below. Taking an item is a compare-and-swap on it, so a worker that wakes late can never take an
 * item of a run that is over, and nobody waits for workers that had no item: a run ends when its
 * last item has.
 *   1. fn, ctx, n_items and the parts change only while no item is pending.
 *   2. They are read only by a worker that holds an item (so, by 1, they are stable).
 */
#include "kernels/pool.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SPINS 300 /* of the pause instruction: some microseconds */

struct worker {
  pthread_t thread;
  struct mr_pool *pool;
  int index;
};

struct part { /* of the items; parts only shrink */
  _Alignas(64) _Atomic int next;
  int end;
};

struct mr_pool {
  _Alignas(64) _Atomic uint64_t work;    /* run << 32 | items not yet taken */
  _Alignas(64) _Atomic uint32_t pending; /* items not yet finished */
  _Atomic uint32_t caller_sleeps;
  _Alignas(64) _Atomic uint32_t runs; /* what workers sleep on */
  _Atomic uint32_t sleepers;
  _Atomic int quit;
  mr_pool_fn fn;
  void *ctx;
  int n_items;
  int in_parts;
  struct part *parts; /* [threads] */
  int threads, spins;
  int pinned;             /* the caller's thread was bound to a CPU: */
  cpu_set_t before;       /* what it might use before */
  struct worker *workers; /* [threads - 1] */
};

static void futex_wait(_Atomic uint32_t *word, uint32_t value) {
  (void)syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, int n) {
  (void)syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, n, NULL, NULL, 0);
}

static inline void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

/* The next item of the worker's part, or of another's. One is left for each worker that may take
 * one, and never in a part that was found empty. */
static int item_of_part(mr_pool *p, int worker) {
  for (;; worker = worker + 1 < p->threads ? worker + 1 : 0) {
    struct part *part = &p->parts[worker];
    int item = atomic_fetch_add(&part->next, 1);
    if (item < part->end)
      return item;
  }
}

/* Takes and runs items until none is left to take. */
static void drain(mr_pool *p, int worker) {
  uint64_t w = atomic_load(&p->work);
  while ((uint32_t)w != 0) {
    if (!atomic_compare_exchange_weak(&p->work, &w, w - 1))
      continue;
    int item = p->in_parts ? item_of_part(p, worker) : p->n_items - (int)(uint32_t)w;
    p->fn(p->ctx, item, worker);
    if (atomic_fetch_sub(&p->pending, 1) == 1 && atomic_load(&p->caller_sleeps))
      futex_wake(&p->pending, 1);
    w = atomic_load(&p->work);
  }
}

static void wait_for_run(mr_pool *p, uint32_t seen) {
  for (int i = 0; i < p->spins; i++) {
    if (atomic_load(&p->runs) != seen)
      return;
    relax();
  }
  atomic_fetch_add(&p->sleepers, 1);
  while (atomic_load(&p->runs) == seen)
    futex_wait(&p->runs, seen);
  atomic_fetch_sub(&p->sleepers, 1);
}

static void *worker_main(void *arg) {
  struct worker *w = arg;
  mr_pool *p = w->pool;
  for (uint32_t seen = 0; !atomic_load(&p->quit);) {
    wait_for_run(p, seen);
    seen = atomic_load(&p->runs);
    drain(p, w->index);
  }
  return NULL;
}

static void wait_for_end(mr_pool *p) {
  for (int i = 0; i < p->spins; i++) {
    if (atomic_load(&p->pending) == 0)
      return;
    relax();
  }
  atomic_store(&p->caller_sleeps, 1);
  for (uint32_t left; (left = atomic_load(&p->pending)) != 0;)
    futex_wait(&p->pending, left);
  atomic_store(&p->caller_sleeps, 0);
}

static void wake_workers(mr_pool *p, int n) {
  atomic_fetch_add(&p->runs, 1);
  if (atomic_load(&p->sleepers))
    futex_wake(&p->runs, n);
}

static void run_items(mr_pool *p, mr_pool_fn fn, void *ctx, int n_items, int in_parts) {
  if (n_items <= 0)
    return;
  if (p->threads == 1 || n_items == 1) {
    for (int i = 0; i < n_items; i++)
      fn(ctx, i, 0);
    return;
  }
  p->fn = fn;
  p->ctx = ctx;
  p->n_items = n_items;
  p->in_parts = in_parts;
  for (int i = 0; in_parts && i < p->threads; i++) {
    atomic_store_explicit(&p->parts[i].next, (int)((int64_t)n_items * i / p->threads),
                          memory_order_relaxed);
    p->parts[i].end = (int)((int64_t)n_items * (i + 1) / p->threads);
  }
  atomic_store(&p->pending, (uint32_t)n_items);
  uint64_t run = (atomic_load(&p->work) >> 32) + 1;
  atomic_store(&p->work, run << 32 | (uint32_t)n_items);
  wake_workers(p, n_items - 1);
  drain(p, 0);
  wait_for_end(p);
}

void mr_pool_run(mr_pool *p, mr_pool_fn fn, void *ctx, int n_items) {
  run_items(p, fn, ctx, n_items, 0);
}

void mr_pool_run_parts(mr_pool *p, mr_pool_fn fn, void *ctx, int n_items) {
  run_items(p, fn, ctx, n_items, 1);
}

/* The i-th CPU that this process may use, counted around. */
static void pin_thread(pthread_t thread, const cpu_set_t *allowed, int i) {
  int n = CPU_COUNT(allowed), skip = n > 0 ? i % n : 0;
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
    if (!CPU_ISSET(cpu, allowed) || skip-- > 0)
      continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    (void)pthread_setaffinity_np(thread, sizeof one, &one); /* a hint: without it all still works */
    return;
  }
}

static void stop_workers(mr_pool *p, int n) {
  atomic_store(&p->quit, 1);
  wake_workers(p, INT_MAX);
  for (int i = 0; i < n; i++)
    pthread_join(p->workers[i].thread, NULL);
  if (p->pinned)
    (void)pthread_setaffinity_np(pthread_self(), sizeof p->before, &p->before);
}

/* Starts the workers; returns how many run. */
static int start_workers(mr_pool *p, int pin) {
  if (sched_getaffinity(0, sizeof p->before, &p->before) != 0)
    pin = 0;
  int n = 0;
  for (; n < p->threads - 1; n++) {
    struct worker *w = &p->workers[n];
    w->pool = p;
    w->index = n + 1;
    if (pthread_create(&w->thread, NULL, worker_main, w) != 0)
      break;
    if (pin)
      pin_thread(w->thread, &p->before, n + 1);
  }
  if (pin)
    pin_thread(pthread_self(), &p->before, 0);
  p->pinned = pin;
  return n;
}

mr_pool *mr_pool_new(int threads, int pin) {
  if (threads < 1 || threads > 4096)
    return NULL;
  mr_pool *p = aligned_alloc(64, (sizeof *p + 63) / 64 * 64);
  if (p == NULL)
    return NULL;
  *p = (mr_pool){.threads = threads, .spins = threads <= mr_pool_cpus() ? SPINS : 0};
  p->workers = calloc((size_t)threads, sizeof *p->workers);
  p->parts = aligned_alloc(64, (size_t)threads * sizeof *p->parts);
  int started = p->workers != NULL && p->parts != NULL ? start_workers(p, pin) : -1;
  if (started == threads - 1)
    return p;
  if (started >= 0)
    stop_workers(p, started);
  free(p->workers);
  free(p->parts);
  free(p);
  return NULL;
}

void mr_pool_free(mr_pool *p) {
  if (p == NULL)
    return;
  stop_workers(p, p->threads - 1);
  free(p->workers);
  free(p->parts);
  free(p);
}

int mr_pool_threads(const mr_pool *p) {
  return p->threads;
}

/* CPUs that the control group's quota allows, rounded up; 0: no quota known. */
static int quota_cpus(void) {
  FILE *f = fopen("/sys/fs/cgroup/cpu.max", "r");
  if (f == NULL)
    return 0;
  long long quota = 0, period = 0;
  int got = fscanf(f, "%lld %lld", &quota, &period);
  (void)fclose(f);
  if (got != 2 || quota <= 0 || period <= 0)
    return 0;
  long long cpus = (quota - 1) / period + 1;
  return cpus > INT_MAX ? INT_MAX : (int)cpus;
}

int mr_pool_cpus(void) {
  cpu_set_t set;
  int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set)
                                                      : (int)sysconf(_SC_NPROCESSORS_ONLN);
  int quota = quota_cpus();
  if (quota > 0 && quota < n)
    n = quota;
  return n > 0 ? n : 1;
}
