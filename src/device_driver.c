/* cuda and hip: the drivers of NVIDIA and AMD, opened at run time. Their calls are so alike that
 * one table of names serves for both (CUDA Driver API; HIP module API); where they differ is said
 * below. No header of theirs is used, and no structure of theirs whose layout has changed. */
#include "src/device.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "io/mem.h"
#include "src/device_gemm.h"

/* X(ours, cuda, hip, arguments): each returns 0 or an error number. Device pointers are 64 bits. */
#define CALLS(X)                                                                                   \
  X(init, cuInit, hipInit, (unsigned flags))                                                       \
  X(count, cuDeviceGetCount, hipGetDeviceCount, (int *n))                                          \
  X(get, cuDeviceGet, hipDeviceGet, (int *dev, int number))                                        \
  X(title, cuDeviceGetName, hipDeviceGetName, (char *to, int cap, int dev))                        \
  X(total, cuDeviceTotalMem_v2, hipDeviceTotalMem, (size_t * bytes, int dev))                      \
  X(load, cuModuleLoadData, hipModuleLoadData, (void **module, const void *image))                 \
  X(unload, cuModuleUnload, hipModuleUnload, (void *module))                                       \
  X(function, cuModuleGetFunction, hipModuleGetFunction,                                           \
    (void **fn, void *module, const char *symbol))                                                 \
  X(mem_alloc, cuMemAlloc_v2, hipMalloc, (void **out, size_t bytes))                               \
  X(mem_free, cuMemFree_v2, hipFree, (void *p))                                                    \
  X(mem_info, cuMemGetInfo_v2, hipMemGetInfo, (size_t * free, size_t * total))                     \
  X(pin_alloc, cuMemHostAlloc, hipHostMalloc, (void **out, size_t bytes, unsigned flags))          \
  X(pin_free, cuMemFreeHost, hipHostFree, (void *p))                                               \
  X(stream_new, cuStreamCreate, hipStreamCreateWithFlags, (void **out, unsigned flags))            \
  X(stream_free, cuStreamDestroy_v2, hipStreamDestroy, (void *stream))                             \
  X(stream_sync, cuStreamSynchronize, hipStreamSynchronize, (void *stream))                        \
  X(stream_wait, cuStreamWaitEvent, hipStreamWaitEvent,                                            \
    (void *stream, void *event, unsigned flags))                                                   \
  X(event_new, cuEventCreate, hipEventCreateWithFlags, (void **out, unsigned flags))               \
  X(event_free, cuEventDestroy_v2, hipEventDestroy, (void *event))                                 \
  X(event_record, cuEventRecord, hipEventRecord, (void *event, void *stream))                      \
  X(to_device, cuMemcpyHtoDAsync_v2, hipMemcpyHtoDAsync,                                           \
    (void *dst, const void *src, size_t bytes, void *stream))                                      \
  X(to_host, cuMemcpyDtoHAsync_v2, hipMemcpyDtoHAsync,                                             \
    (void *dst, const void *src, size_t bytes, void *stream))                                      \
  X(on_device, cuMemcpyDtoDAsync_v2, hipMemcpyDtoDAsync,                                           \
    (void *dst, const void *src, size_t bytes, void *stream))                                      \
  X(run, cuLaunchKernel, hipModuleLaunchKernel,                                                    \
    (void *fn, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,     \
     unsigned shared, void *stream, void **args, void **extra))

/* Only CUDA has, and needs, these. */
#define CUDA_CALLS(X)                                                                              \
  X(attribute, cuDeviceGetAttribute, (int *value, int which, int dev))                             \
  X(retain, cuDevicePrimaryCtxRetain, (void **context, int dev))                                   \
  X(release, cuDevicePrimaryCtxRelease_v2, (int dev))                                              \
  X(make_current, cuCtxSetCurrent, (void *context))                                                \
  X(fn_attribute, cuFuncSetAttribute, (void *fn, int which, int value))

/* Numbers of the drivers' interfaces. */
enum {
  NOT_BLOCKING = 1, /* streams: beside the default one */
  NO_TIMING = 2,    /* events */
  PORTABLE = 1,     /* pinned memory */
  CU_UNITS = 16,    /* CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT */
  CU_MAJOR = 75,    /* ..._COMPUTE_CAPABILITY_MAJOR */
  CU_MINOR = 76,
  CU_SHARED = 97,   /* ..._MAX_SHARED_MEMORY_PER_BLOCK_OPTIN */
  CU_FN_SHARED = 8, /* CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES */
  BAD_VALUE = 1,
  OUT_OF_MEMORY = 2
};

#define PLAIN_SHARED ((size_t)48 << 10) /* what CUDA grants without being asked */
#define AMD_SHARED ((size_t)64 << 10)   /* of all that code is made for */
#define AMD_UNITS 64                    /* about: it only decides how finely work is cut */

typedef struct driver {
  mr_device base;
  bool cuda;
  void *library, *context, *module;
  int dev;
  void *fn[MR_GPU_N_KERNELS];
  size_t granted[MR_GPU_N_KERNELS]; /* bytes of shared memory that were asked for */
#define FIELD(ours, cu, hi, args) int(*ours) args;
  CALLS(FIELD)
#undef FIELD
#define FIELD(ours, cu, args) int(*ours) args;
  CUDA_CALLS(FIELD)
#undef FIELD
} driver;

static driver *of(mr_device *d) {
  return (driver *)d;
}

/* ------------------------------------------------------------------ errors */

static mr_code check(mr_device *d, const char *what, int error) {
  if (!error)
    return MR_OK;
  snprintf(d->why, sizeof d->why, "%s: error %d of the %s driver%s", what, error,
           of(d)->cuda ? "CUDA" : "HIP",
           error == OUT_OF_MEMORY ? " (out of memory)"
           : error == BAD_VALUE   ? " (bad value)"
                                  : "");
  return error == OUT_OF_MEMORY ? MR_E_NOMEM
         : error == BAD_VALUE   ? MR_E_INTERNAL
                                : MR_E_UNAVAILABLE;
}

/* ------------------------------------------------------------------ operations */

static mr_code drv_alloc(mr_device *d, size_t bytes, void **out) {
  return check(d, "allocation", of(d)->mem_alloc(out, bytes));
}

static void drv_release(mr_device *d, void *p) {
  of(d)->mem_free(p);
}

static mr_code drv_host_alloc(mr_device *d, size_t bytes, void **out) {
  return check(d, "pinned memory", of(d)->pin_alloc(out, bytes ? bytes : 1, PORTABLE));
}

static void drv_host_release(mr_device *d, void *p) {
  of(d)->pin_free(p);
}

static mr_code drv_stream_new(mr_device *d, mr_stream **out) {
  return check(d, "stream", of(d)->stream_new((void **)out, NOT_BLOCKING));
}

static void drv_stream_free(mr_device *d, mr_stream *s) {
  if (s)
    of(d)->stream_free(s);
}

static mr_code drv_sync(mr_device *d, mr_stream *s) {
  return check(d, "waiting for the device", of(d)->stream_sync(s));
}

static mr_code drv_event_new(mr_device *d, mr_event **out) {
  return check(d, "event", of(d)->event_new((void **)out, NO_TIMING));
}

static void drv_event_free(mr_device *d, mr_event *e) {
  if (e)
    of(d)->event_free(e);
}

static mr_code drv_record(mr_device *d, mr_event *e, mr_stream *s) {
  return check(d, "event", of(d)->event_record(e, s));
}

static mr_code drv_wait(mr_device *d, mr_stream *s, mr_event *e) {
  return check(d, "event", of(d)->stream_wait(s, e, 0));
}

static mr_code drv_copy(mr_device *d, mr_stream *s, mr_direction dir, void *dst, const void *src,
                        size_t bytes) {
  driver *v = of(d);
  int error = dir == MR_TO_DEVICE ? v->to_device(dst, src, bytes, s)
              : dir == MR_TO_HOST ? v->to_host(dst, src, bytes, s)
                                  : v->on_device(dst, src, bytes, s);
  return check(d, "copy", error);
}

static mr_code drv_launch(mr_device *d, mr_stream *s, mr_gpu_kernel k, const mr_grid *g,
                          const void *args) {
  driver *v = of(d);
  void *list[1];
  memcpy(list, &args, sizeof args); /* the driver's array is not const */
  if (v->cuda && g->shared > PLAIN_SHARED && g->shared > v->granted[k]) {
    mr_code rc = check(d, "shared memory", v->fn_attribute(v->fn[k], CU_FN_SHARED, (int)g->shared));
    if (rc)
      return rc;
    v->granted[k] = g->shared;
  }
  return check(d, mr_gpu_kernel_names[k],
               v->run(v->fn[k], g->blocks[0], g->blocks[1], g->blocks[2],
                      g->warps * (unsigned)d->warp, 1, 1, (unsigned)g->shared, s, list, NULL));
}

static void drv_close(mr_device *d) {
  driver *v = of(d);
  if (v->module)
    v->unload(v->module);
  if (v->context)
    v->release(v->dev);
  if (v->library)
    dlclose(v->library);
  mr_mem_free(v);
}

static const mr_device_ops driver_ops = {.close = drv_close,
                                         .alloc = drv_alloc,
                                         .release = drv_release,
                                         .host_alloc = drv_host_alloc,
                                         .host_release = drv_host_release,
                                         .stream_new = drv_stream_new,
                                         .stream_free = drv_stream_free,
                                         .sync = drv_sync,
                                         .event_new = drv_event_new,
                                         .event_free = drv_event_free,
                                         .record = drv_record,
                                         .wait = drv_wait,
                                         .copy = drv_copy,
                                         .launch = drv_launch};

/* ------------------------------------------------------------------ open */

static void *open_library(const char *name) {
  return dlopen(name, RTLD_NOW | RTLD_LOCAL);
}

void *(*mr_driver_library)(const char *name) = open_library;
const mr_gpu_blob *(*mr_driver_blobs)(void) = mr_gpu_blobs;

/* The name of a call that the library does not have, or NULL. */
static const char *bind(driver *v) {
  void *p;
#define FIND(ours, symbol)                                                                         \
  p = dlsym(v->library, symbol);                                                                   \
  if (!p)                                                                                          \
    return symbol;                                                                                 \
  memcpy(&v->ours, &p, sizeof p);
#define FIND_EITHER(ours, cu, hi, args) FIND(ours, (v->cuda ? #cu : #hi))
#define FIND_CUDA(ours, cu, args) FIND(ours, #cu)
  CALLS(FIND_EITHER)
  if (v->cuda) {
    CUDA_CALLS(FIND_CUDA)
  }
#undef FIND_CUDA
#undef FIND_EITHER
#undef FIND
  return NULL;
}

/* HIP has no contexts: the device is the thread's. */
static int make_current(driver *v, int number) {
  int (*set_device)(int) = NULL;
  if (v->cuda) {
    int error = v->retain(&v->context, v->dev);
    return error ? error : v->make_current(v->context);
  }
  void *p = dlsym(v->library, "hipSetDevice");
  memcpy(&set_device, &p, sizeof p);
  return set_device ? set_device(number) : BAD_VALUE;
}

/* The first image that the driver takes. A code object of another architecture is refused by it. */
static bool load(driver *v) {
  for (const mr_gpu_blob *b = mr_driver_blobs(); b->arch; b++) {
    bool fat = !strcmp(b->arch, "cuda");
    if (fat != v->cuda || v->load(&v->module, b->bytes))
      continue;
    if (!fat) {
      snprintf(v->base.arch, sizeof v->base.arch, "%s", b->arch);
      v->base.warp = strncmp(b->arch, "gfx9", 4) ? 32 : 64;
    }
    return true;
  }
  v->module = NULL;
  return false;
}

static bool any_blob(bool cuda) {
  const mr_gpu_blob *b = mr_driver_blobs();
  while (b->arch && !strcmp(b->arch, "cuda") != cuda)
    b++;
  return b->arch;
}

static void describe(driver *v) {
  int major = 0, minor = 0, shared = 0;
  v->base.units = AMD_UNITS;
  v->base.shared_bytes = AMD_SHARED;
  v->title(v->base.model, sizeof v->base.model, v->dev);
  v->base.model[sizeof v->base.model - 1] = 0;
  v->mem_info(&v->base.free_bytes, &v->base.memory_bytes);
  if (!v->cuda)
    return;
  v->attribute(&major, CU_MAJOR, v->dev);
  v->attribute(&minor, CU_MINOR, v->dev);
  v->attribute(&shared, CU_SHARED, v->dev);
  v->attribute(&v->base.units, CU_UNITS, v->dev);
  v->base.shared_bytes = shared > 0 ? (size_t)shared : PLAIN_SHARED;
  v->base.warp = 32;
  snprintf(v->base.arch, sizeof v->base.arch, "sm_%d%d", major, minor);
}

/* NULL, or why it cannot be used. */
static const char *start(driver *v, int number) {
  static char words[160];
  const char *library = v->cuda ? "libcuda.so.1" : "libamdhip64.so", *missing;
  int n = 0;
  v->library = mr_driver_library(library);
  if (!v->library) {
    snprintf(words, sizeof words, "no %s driver: %s is not there", v->cuda ? "CUDA" : "HIP",
             library);
    return words;
  }
  if ((missing = bind(v))) {
    snprintf(words, sizeof words, "the driver is too old: %s has no %s", library, missing);
    return words;
  }
  if (v->init(0) || v->count(&n) || n < 1)
    return "the driver finds no device";
  if (number >= n) {
    snprintf(words, sizeof words, "there are %d devices, from 0", n);
    return words;
  }
  if (v->get(&v->dev, number) || make_current(v, number))
    return "the driver refuses the device";
  describe(v);
  if (!any_blob(v->cuda))
    return v->cuda ? "this build has no CUDA code (make gpu)"
                   : "this build has no HIP code (make gpu)";
  if (!load(v)) {
    snprintf(words, sizeof words, "this build has no code for its architecture (%s)", v->base.arch);
    return words;
  }
  for (int k = 0; k < MR_GPU_N_KERNELS; k++)
    if (v->function(&v->fn[k], v->module, mr_gpu_kernel_names[k]))
      return "the kernels in this build are not whole";
  return NULL;
}

static driver *new_driver(bool cuda, int number) {
  driver *v = mr_mem_alloc(1, sizeof *v);
  if (!v)
    return NULL;
  v->base.ops = &driver_ops;
  v->cuda = cuda;
  snprintf(v->base.name, sizeof v->base.name, "%s:%d", cuda ? "cuda" : "hip", number);
  return v;
}

mr_code mr_device_driver(mr_device **out, bool cuda, int number, mr_err *err) {
  driver *v = new_driver(cuda, number);
  if (!v)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for a device");
  const char *why = start(v, number);
  if (!why) {
    *out = &v->base;
    return MR_OK;
  }
  mr_code rc = mr_err_set(err, MR_E_UNAVAILABLE, "device %s is not usable: %s", v->base.name, why);
  drv_close(&v->base);
  return rc;
}

static void describe_gemm(mr_device_found *f, mr_device *d) {
  mr_device_gemm *g;
  mr_err err = MR_ERR_INIT;
  bool there = !mr_device_gemm_open(&g, d, &err);
  snprintf(f->gemm, sizeof f->gemm, "%.159s", there ? mr_device_gemm_name(g) : err.text);
  if (there)
    mr_device_gemm_close(g);
}

int mr_driver_list(mr_device_found *found, int cap, bool cuda) {
  int n = 0;
  for (bool more = true; more && n < cap; n++) {
    driver *v = new_driver(cuda, n);
    if (!v)
      return n;
    mr_device_found *f = &found[n];
    *f = (mr_device_found){0};
    const char *why = start(v, n);
    memcpy(f->name, v->base.name, sizeof f->name);
    memcpy(f->model, v->base.model, sizeof f->model);
    memcpy(f->arch, v->base.arch, sizeof f->arch);
    f->memory_bytes = v->base.memory_bytes;
    f->free_bytes = v->base.free_bytes;
    snprintf(f->why, sizeof f->why, "%s", why ? why : "");
    if (!why)
      describe_gemm(f, &v->base);
    if (!v->base.memory_bytes) /* not a device, but why there is none */
      snprintf(f->name, sizeof f->name, "%s", cuda ? "cuda" : "hip");
    int count = 0;
    more = v->base.memory_bytes && !v->count(&count) && n + 1 < count;
    drv_close(&v->base);
  }
  return n;
}
