/* sim: a device in this process. What is put on a stream waits in a queue and runs when something
 * is waited for, so that a wait that is missing shows as stale data, each time. The clock is
 * virtual: the two copy engines and the compute engine work beside each other as on a GPU. */
#include "src/device.h"

#include <math.h>
#include <string.h>

#include "io/mem.h"

#define ARG_BYTES 384
#define ALIGN 256

typedef enum task_kind { TASK_COPY, TASK_KERNEL, TASK_RECORD, TASK_WAIT } task_kind;

typedef struct task {
  task_kind kind;
  mr_direction dir;
  void *dst;
  const void *src;
  size_t bytes;
  mr_gpu_kernel kernel;
  mr_grid grid;
  mr_event *event;
  uint64_t turn; /* of the event: which record */
  unsigned char args[ARG_BYTES];
} task;

struct mr_stream {
  mr_stream *next;
  task *tasks; /* those from `at` on wait; owned */
  size_t at, n, cap;
  double time; /* when what it did last was done */
};

struct mr_event {
  uint64_t asked, done; /* records */
  double time;
};

typedef struct block { /* an allocation */
  struct block *next;
  uint8_t *memory, *p; /* of the host; what the caller has */
  size_t bytes, mapped;
} block;

typedef struct sim {
  mr_device base;
  mr_sim_opts o;
  const mr_emu_kernel *table;
  void *room; /* the emulator's; owned */
  mr_emu *emu;
  block *blocks;
  mr_stream *streams;
  double now, busy, engine[3];
  int n_allocs, n_copies, n_tasks;
  bool lost;
  mr_code failed; /* of a task, until it is reported */
} sim;

static sim *of(mr_device *d) {
  return (sim *)d;
}

static mr_code say(mr_device *d, mr_code rc, const char *words) {
  snprintf(d->why, sizeof d->why, "%s", words);
  return rc;
}

/* ------------------------------------------------------------------ memory */

static mr_code sim_alloc(mr_device *d, size_t bytes, void **out) {
  sim *s = of(d);
  size_t size = (bytes + ALIGN - 1) & ~(size_t)(ALIGN - 1);
  if (s->lost)
    return say(d, MR_E_UNAVAILABLE, "the device is lost");
  if (++s->n_allocs == s->o.fail_alloc || size > d->free_bytes)
    return say(d, MR_E_NOMEM, "out of device memory");
  block *b = mr_mem_alloc(1, sizeof *b);
  if (!b)
    return say(d, MR_E_NOMEM, "out of memory");
  b->memory = s->o.guard ? mr_mem_guarded(size) : mr_mem_pages(size);
  if (!b->memory) {
    mr_mem_free(b);
    return say(d, MR_E_NOMEM, "out of memory for the simulated device");
  }
  if (s->o.guard)
    memset(b->memory, 0xff, size);
  b->p = b->memory;
  b->bytes = size;
  b->next = s->blocks;
  s->blocks = b;
  d->free_bytes -= size;
  *out = b->p;
  return MR_OK;
}

static void sim_release(mr_device *d, void *p) {
  for (block **b = &of(d)->blocks; *b; b = &(*b)->next)
    if ((*b)->p == p) {
      block *gone = *b;
      *b = gone->next;
      d->free_bytes += gone->bytes;
      mr_mem_free(gone->memory);
      mr_mem_free(gone);
      return;
    }
}

static bool owns(const sim *s, const void *p, size_t bytes) {
  const uint8_t *x = p;
  for (const block *b = s->blocks; b; b = b->next)
    if (x >= b->p && x + bytes <= b->p + b->bytes)
      return true;
  return false;
}

static mr_code sim_host_alloc(mr_device *d, size_t bytes, void **out) {
  *out = mr_mem_pages(bytes);
  return *out ? MR_OK : say(d, MR_E_NOMEM, "out of memory");
}

static void sim_host_release(mr_device *d, void *p) {
  (void)d;
  mr_mem_free(p);
}

/* ------------------------------------------------------------------ running */

static double copy_seconds(const sim *s, const task *t) {
  double rate = s->o.copy_bytes_per_s;
  if (t->dir == MR_ON_DEVICE && s->o.own_bytes_per_s > 0)
    return (double)t->bytes / s->o.own_bytes_per_s;
  return s->o.copy_latency_s + (rate > 0 ? (double)t->bytes / rate : 0);
}

static void run_copy(sim *s, const task *t) {
  if (++s->n_copies == s->o.fail_copy) {
    s->failed = say(&s->base, MR_E_UNAVAILABLE, "a copy failed");
    return;
  }
  memcpy(t->dst, t->src, t->bytes);
  if (s->n_copies == s->o.flip_copy)
    ((uint8_t *)t->dst)[t->bytes / 2] ^= 1;
}

static void run_kernel(sim *s, const task *t) {
  mr_emu_shape shape = {.blocks = {t->grid.blocks[0], t->grid.blocks[1], t->grid.blocks[2]},
                        .threads = t->grid.warps * (uint32_t)s->base.warp,
                        .warp = (uint32_t)s->base.warp,
                        .shared = t->grid.shared};
  if (!mr_emu_launch(s->emu, s->table[t->kernel], &shape, t->args))
    return;
  s->failed = MR_E_INTERNAL;
  snprintf(s->base.why, sizeof s->base.why, "%s: %s", mr_gpu_kernel_names[t->kernel],
           mr_emu_error(s->emu));
}

/* Runs the first task of a stream that can go on. */
static void run_one(sim *s, mr_stream *q) {
  const task *t = &q->tasks[q->at];
  int engine = t->kind == TASK_KERNEL || t->dir == MR_ON_DEVICE ? 2 : (int)t->dir;
  double seconds = t->kind == TASK_KERNEL ? s->o.kernel_s : copy_seconds(s, t);
  if (t->kind == TASK_WAIT) {
    q->time = fmax(q->time, t->event->time);
  } else if (t->kind == TASK_RECORD) {
    t->event->done = t->turn;
    t->event->time = q->time;
  } else {
    if (!s->failed && t->kind == TASK_COPY)
      run_copy(s, t);
    else if (!s->failed)
      run_kernel(s, t);
    q->time = s->engine[engine] = fmax(q->time, s->engine[engine]) + seconds;
    s->busy += seconds;
  }
  if (++q->at == q->n)
    q->at = q->n = 0;
}

static bool can_run(const mr_stream *q) {
  if (q->n == q->at)
    return false;
  const task *t = &q->tasks[q->at];
  return t->kind != TASK_WAIT || t->event->done >= t->turn;
}

/* Of the streams that can go on, the one whose clock is behind goes first. */
static mr_code sim_sync(mr_device *d, mr_stream *want) {
  sim *s = of(d);
  while (want->n > want->at) {
    mr_stream *best = NULL;
    for (mr_stream *q = s->streams; q; q = q->next)
      if (can_run(q) && (!best || q->time < best->time))
        best = q;
    if (!best)
      return say(d, MR_E_INTERNAL, "a stream waits for an event that nobody records");
    run_one(s, best);
  }
  s->now = fmax(s->now, want->time);
  mr_code rc = s->lost ? say(d, MR_E_UNAVAILABLE, "the device is lost") : s->failed;
  s->failed = MR_OK;
  return rc;
}

/* ------------------------------------------------------------------ streams and events */

static mr_code put(mr_device *d, mr_stream *q, const task *t) {
  sim *s = of(d);
  if (s->lost || ++s->n_tasks == s->o.lose_at) {
    s->lost = true;
    return say(d, MR_E_UNAVAILABLE, "the device is lost");
  }
  if (!mr_mem_grow((void **)&q->tasks, &q->cap, q->n + 1, sizeof *q->tasks))
    return say(d, MR_E_NOMEM, "out of memory");
  if (q->n == q->at) /* work begins no earlier than it is asked for */
    q->time = fmax(q->time, s->now);
  q->tasks[q->n++] = *t;
  return MR_OK;
}

static mr_code sim_stream_new(mr_device *d, mr_stream **out) {
  mr_stream *q = mr_mem_alloc(1, sizeof *q);
  if (!q)
    return say(d, MR_E_NOMEM, "out of memory");
  q->next = of(d)->streams;
  of(d)->streams = q;
  *out = q;
  return MR_OK;
}

static void sim_stream_free(mr_device *d, mr_stream *q) {
  for (mr_stream **at = &of(d)->streams; q && *at; at = &(*at)->next)
    if (*at == q) {
      *at = q->next;
      break;
    }
  if (q)
    mr_mem_free(q->tasks);
  mr_mem_free(q);
}

static mr_code sim_event_new(mr_device *d, mr_event **out) {
  *out = mr_mem_alloc(1, sizeof **out);
  return *out ? MR_OK : say(d, MR_E_NOMEM, "out of memory");
}

static void sim_event_free(mr_device *d, mr_event *e) {
  (void)d;
  mr_mem_free(e);
}

static mr_code sim_record(mr_device *d, mr_event *e, mr_stream *q) {
  return put(d, q, &(task){.kind = TASK_RECORD, .event = e, .turn = ++e->asked});
}

static mr_code sim_wait(mr_device *d, mr_stream *q, mr_event *e) {
  return put(d, q, &(task){.kind = TASK_WAIT, .event = e, .turn = e->asked});
}

static mr_code sim_copy(mr_device *d, mr_stream *q, mr_direction dir, void *dst, const void *src,
                        size_t bytes) {
  if ((dir != MR_TO_HOST && !owns(of(d), dst, bytes)) ||
      (dir != MR_TO_DEVICE && !owns(of(d), src, bytes)))
    return say(d, MR_E_INTERNAL, "a copy outside the device's memory");
  return put(d, q, &(task){.kind = TASK_COPY, .dir = dir, .dst = dst, .src = src, .bytes = bytes});
}

static mr_code sim_launch(mr_device *d, mr_stream *q, mr_gpu_kernel k, const mr_grid *grid,
                          const void *args) {
  task t = {.kind = TASK_KERNEL, .kernel = k, .grid = *grid};
  memcpy(t.args, args, mr_gpu_kernel_args[k]);
  return put(d, q, &t);
}

/* ------------------------------------------------------------------ open and close */

static void sim_close(mr_device *d) {
  sim *s = of(d);
  while (s->blocks)
    sim_release(d, s->blocks->p);
  while (s->streams)
    sim_stream_free(d, s->streams);
  mr_mem_free(s->room);
  mr_mem_free(s);
}

static const mr_device_ops sim_ops = {.close = sim_close,
                                      .alloc = sim_alloc,
                                      .release = sim_release,
                                      .host_alloc = sim_host_alloc,
                                      .host_release = sim_host_release,
                                      .stream_new = sim_stream_new,
                                      .stream_free = sim_stream_free,
                                      .sync = sim_sync,
                                      .event_new = sim_event_new,
                                      .event_free = sim_event_free,
                                      .record = sim_record,
                                      .wait = sim_wait,
                                      .copy = sim_copy,
                                      .launch = sim_launch};

mr_code mr_device_sim(mr_device **out, const mr_sim_opts *o, mr_err *err) {
  static const struct {
    const char *name, *arch;
    int warp;
    size_t shared;
    const mr_emu_kernel *table;
  } machines[] = {{"sim", "warp 32, mma.sync", 32, (size_t)227 << 10, mr_emu_sync},
                  {"sim:wave64", "wave 64, MFMA", 64, (size_t)64 << 10, mr_emu_mfma},
                  {"sim:wmma", "warp 32, WMMA", 32, (size_t)64 << 10, mr_emu_wmma}};
  sim *s = mr_mem_alloc(1, sizeof *s);
  if (s)
    s->room = mr_mem_pages(MR_EMU_BYTES);
  if (!s || !s->room) {
    mr_mem_free(s);
    return mr_err_set(err, MR_E_NOMEM, "out of memory for the simulated device");
  }
  for (int k = 0; k < MR_GPU_N_KERNELS; k++)
    if (mr_gpu_kernel_args[k] > ARG_BYTES) {
      sim_close(&s->base);
      return mr_err_set(err, MR_E_INTERNAL, "an argument of %zu bytes is too long for sim",
                        mr_gpu_kernel_args[k]);
    }
  s->o = *o;
  s->emu = mr_emu_init(s->room, &o->emu);
  s->table = machines[o->machine].table;
  s->base.ops = &sim_ops;
  s->base.warp = machines[o->machine].warp;
  s->base.units = 4;
  s->base.shared_bytes = machines[o->machine].shared;
  s->base.memory_bytes = s->base.free_bytes = o->memory;
  snprintf(s->base.name, sizeof s->base.name, "%s", machines[o->machine].name);
  snprintf(s->base.arch, sizeof s->base.arch, "%s", machines[o->machine].arch);
  snprintf(s->base.model, sizeof s->base.model, "an emulated GPU, for tests: slow");
  *out = &s->base;
  return MR_OK;
}

double mr_sim_seconds(const mr_device *d) {
  return ((const sim *)d)->now;
}

double mr_sim_busy(const mr_device *d) {
  return ((const sim *)d)->busy;
}

uint64_t mr_sim_loaded(const mr_device *d) {
  return mr_emu_copied(((const sim *)d)->emu);
}
