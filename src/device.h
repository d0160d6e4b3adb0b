/* device.h: a GPU, or what stands in for one: memory, streams, events, copies and kernels.
 *
 *     mr_device *d;
 *     mr_device_open(&d, "sim", 0, &err);           a name of --device; bytes to take, 0: chosen
 *     void *x = mr_device_take(d, bytes);           from the one allocation made by open
 *     d->ops->copy(d, stream, MR_TO_DEVICE, x, host, bytes);
 *     d->ops->launch(d, stream, MR_GPU_norm, &grid, &args);
 *     mr_code rc = d->ops->sync(d, stream);         waits; the first error since the last one
 *     mr_device_close(d);
 *
 * Work put on a stream is done in order, later, beside other streams; the host's memory that a copy
 * reads must stay until then. copy, launch and the event calls report what is wrong at once, or
 * sync does. An error is MR_E_NOMEM, MR_E_INTERNAL (a defect of ours), or MR_E_UNAVAILABLE: the
 * device is lost, and nothing on it can be used any more; words are in d->why.
 *
 * Three makers: sim (device_sim.c: the emulator of kernels/gpu, with a virtual clock), cuda and hip
 * (device_driver.c: the drivers, by dlopen). One thread calls.
 */
#ifndef MR_SRC_DEVICE_H
#define MR_SRC_DEVICE_H

#include <stdbool.h>

#include "io/err.h"
#include "kernels/gpu/blobs.h"
#include "kernels/gpu/shape.h"

typedef struct mr_device mr_device;
typedef struct mr_stream mr_stream;
typedef struct mr_event mr_event;

typedef enum mr_direction { MR_TO_DEVICE, MR_TO_HOST, MR_ON_DEVICE } mr_direction;

typedef struct mr_grid {
  uint32_t blocks[3], warps;
  size_t shared; /* bytes */
} mr_grid;

typedef struct mr_device_ops {
  void (*close)(mr_device *d);
  mr_code (*alloc)(mr_device *d, size_t bytes, void **out);
  void (*release)(mr_device *d, void *p);
  mr_code (*host_alloc)(mr_device *d, size_t bytes, void **out); /* pinned where that is a thing */
  void (*host_release)(mr_device *d, void *p);
  mr_code (*stream_new)(mr_device *d, mr_stream **out);
  void (*stream_free)(mr_device *d, mr_stream *s); /* NULL is fine, here and below */
  mr_code (*sync)(mr_device *d, mr_stream *s);
  mr_code (*event_new)(mr_device *d, mr_event **out);
  void (*event_free)(mr_device *d, mr_event *e);
  mr_code (*record)(mr_device *d, mr_event *e, mr_stream *s);
  mr_code (*wait)(mr_device *d, mr_stream *s, mr_event *e); /* s goes on after e's last record */
  mr_code (*copy)(mr_device *d, mr_stream *s, mr_direction dir, void *dst, const void *src,
                  size_t bytes);
  /* args: mr_gpu_kernel_args[k] bytes, copied */
  mr_code (*launch)(mr_device *d, mr_stream *s, mr_gpu_kernel k, const mr_grid *grid,
                    const void *args);
} mr_device_ops;

struct mr_device { /* an implementation's first member */
  const mr_device_ops *ops;
  char name[24];       /* as in --device: "sim:wave64", "cuda:0" */
  char model[96];      /* what the maker calls it */
  char arch[32];       /* "sm_90", "gfx942" */
  int warp, units;     /* lanes a warp; multiprocessors */
  size_t shared_bytes; /* a block may have */
  size_t memory_bytes, free_bytes;
  char why[256]; /* of the last error */
  /* the arena */
  uint8_t *base;
  size_t cap, used;
};

/* name: "sim", "sim:wave64", "sim:wmma", "cuda[:N]", "hip[:N]". bytes: how much memory to take; 0:
 * nine tenths of what is free. MR_E_UNAVAILABLE: there is no such device, and why. */
mr_code mr_device_open(mr_device **out, const char *name, uint64_t bytes, mr_err *err);
void mr_device_close(mr_device *d); /* NULL is fine */
/* For a device of one of the makers below: takes the memory that mr_device_take gives out. */
mr_code mr_device_start(mr_device *d, uint64_t bytes, mr_err *err);

bool mr_device_is_gpu(const char *name); /* false: NULL, "auto" and "cpu" */

/* bytes of device memory, 256-aligned, until close; NULL: the arena is full. */
void *mr_device_take(mr_device *d, size_t bytes);
size_t mr_device_left(const mr_device *d);

/* The same copy, waited for. */
mr_code mr_device_put(mr_device *d, mr_stream *s, void *dst, const void *src, size_t bytes);

/* Sets err to what a call's code means. */
mr_code mr_device_fail(const mr_device *d, mr_code rc, mr_err *err);

/* What `millrace devices` lists. Fills found[] with names and why[] with the reason where one is
 * not usable (empty: usable); returns how many, at most cap. */
typedef struct mr_device_found {
  char name[24], model[96], arch[32], why[256];
  size_t memory_bytes, free_bytes;
} mr_device_found;
int mr_device_list(mr_device_found *found, int cap);

/* ------------------------------------------------------------------ the makers */

typedef struct mr_sim_opts {
  int machine;   /* 0: warp 32, mma.sync; 1: wave 64, MFMA; 2: warp 32, WMMA */
  size_t memory; /* bytes it has */
  mr_emu_opts emu;
  bool guard; /* allocations end at a page that nobody may touch, and start as NaN */
  /* the virtual clock: copies take latency + bytes / rate on an engine for each direction, kernels
   * a fixed time on a third; 0: no time */
  double copy_bytes_per_s, copy_latency_s, kernel_s;
  double own_bytes_per_s; /* of copies on the device, without latency; 0: as the others */
  /* tests: the n-th call, from 1, fails; 0: none */
  int fail_alloc, fail_copy, lose_at, flip_copy; /* flip_copy: a bit of it changes */
} mr_sim_opts;

/* NVIDIA's (cuda) or AMD's device of this number. MR_E_UNAVAILABLE: and why. */
mr_code mr_device_driver(mr_device **out, bool cuda, int number, mr_err *err);
int mr_driver_list(mr_device_found *found, int cap, bool cuda); /* at least one, with its reason */
/* Opens a driver's library; the kernels for it. Tests put others in their place. */
extern void *(*mr_driver_library)(const char *name);
extern const mr_gpu_blob *(*mr_driver_blobs)(void);

mr_code mr_device_sim(mr_device **out, const mr_sim_opts *opts, mr_err *err);
double mr_sim_seconds(const mr_device *d);  /* of the virtual clock */
double mr_sim_busy(const mr_device *d);     /* the same, had each copy and kernel waited its turn */
uint64_t mr_sim_loaded(const mr_device *d); /* bytes of kernels' asynchronous copies */
extern mr_sim_opts mr_sim_defaults;         /* of --device sim; tests set its clock */

#endif
