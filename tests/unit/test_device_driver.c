/* The code for NVIDIA's and AMD's drivers, on drivers of our own that stand over the emulator: the
 * calls' order, errors and names, and a model's tokens. The program is its own library: it exports
 * the drivers' calls (linked with -rdynamic). */
#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/unit/oracle.h"

/* ------------------------------------------------------------------ a driver over sim */

enum { BAD = 1, NOMEM = 2, NO_INIT = 3, NO_DEVICE = 101, NO_CONTEXT = 201, BAD_IMAGE = 209 };
enum { LOST = 719 };

static struct {
  bool inited, current, amd;
  int modules, streams, events, pinned; /* that are open */
  int devices, warp64;
  mr_device *sim;
  mr_sim_opts opts;
} fake;

static int error_of(mr_code rc) {
  return rc == MR_E_NOMEM ? NOMEM : rc == MR_E_UNAVAILABLE ? LOST : rc ? BAD : 0;
}

#define NEEDS_CONTEXT                                                                              \
  do {                                                                                             \
    if (!fake.inited)                                                                              \
      return NO_INIT;                                                                              \
    if (!fake.current)                                                                             \
      return NO_CONTEXT;                                                                           \
  } while (0)

/* Each call under both names. */
#define CALL(cu, hi, params, pass)                                                                 \
  int cu params;                                                                                   \
  int hi params;                                                                                   \
  int hi params {                                                                                  \
    return cu pass;                                                                                \
  }                                                                                                \
  int cu params

CALL(cuInit, hipInit, (unsigned flags), (flags)) {
  fake.inited = true;
  return flags ? BAD : 0;
}
CALL(cuDeviceGetCount, hipGetDeviceCount, (int *n), (n)) {
  *n = fake.devices;
  return fake.inited ? 0 : NO_INIT;
}
CALL(cuDeviceGet, hipDeviceGet, (int *dev, int number), (dev, number)) {
  *dev = number;
  return number < fake.devices ? 0 : NO_DEVICE;
}
CALL(cuDeviceGetName, hipDeviceGetName, (char *to, int cap, int dev), (to, cap, dev)) {
  snprintf(to, (size_t)cap, "fake %d", dev);
  return 0;
}
CALL(cuDeviceTotalMem_v2, hipDeviceTotalMem, (size_t * bytes, int dev), (bytes, dev)) {
  *bytes = fake.opts.memory;
  return dev < fake.devices ? 0 : NO_DEVICE;
}
static int open_sim_device(void) {
  mr_err err = MR_ERR_INIT;
  fake.current = true;
  return fake.sim || !mr_device_sim(&fake.sim, &fake.opts, &err) ? 0 : NOMEM;
}
int cuDevicePrimaryCtxRetain(void **context, int dev);
int cuDevicePrimaryCtxRetain(void **context, int dev) {
  *context = &fake;
  return dev < fake.devices ? 0 : NO_DEVICE;
}
int cuDevicePrimaryCtxRelease_v2(int dev);
int cuDevicePrimaryCtxRelease_v2(int dev) {
  fake.current = false;
  return dev < fake.devices ? 0 : NO_DEVICE;
}
int cuCtxSetCurrent(void *context);
int cuCtxSetCurrent(void *context) {
  return context == &fake ? open_sim_device() : BAD;
}
int hipSetDevice(int number);
int hipSetDevice(int number) {
  return number < fake.devices ? open_sim_device() : NO_DEVICE;
}
int cuDeviceGetAttribute(int *value, int which, int dev);
int cuDeviceGetAttribute(int *value, int which, int dev) {
  *value = which == 75 ? 9 : which == 16 ? 4 : which == 97 ? 227 << 10 : 0;
  return dev < fake.devices ? 0 : NO_DEVICE;
}
CALL(cuModuleLoadData, hipModuleLoadData, (void **module, const void *image), (module, image)) {
  NEEDS_CONTEXT;
  if (fake.amd && !strstr(image, fake.warp64 ? "wave64" : "wave32"))
    return BAD_IMAGE;
  fake.modules++;
  *module = &fake;
  return 0;
}
CALL(cuModuleUnload, hipModuleUnload, (void *module), (module)) {
  fake.modules -= module == &fake;
  return module == &fake ? 0 : BAD;
}
CALL(cuModuleGetFunction, hipModuleGetFunction, (void **fn, void *module, const char *name),
     (fn, module, name)) {
  for (size_t i = 0; module == &fake && i < MR_GPU_N_KERNELS; i++)
    if (!strcmp(name, mr_gpu_kernel_names[i])) {
      *fn = (char *)&fake + i;
      return 0;
    }
  return 500;
}
int cuFuncSetAttribute(void *fn, int which, int value);
int cuFuncSetAttribute(void *fn, int which, int value) {
  return fn && which == 8 && value <= 227 << 10 ? 0 : BAD;
}
CALL(cuMemAlloc_v2, hipMalloc, (void **out, size_t bytes), (out, bytes)) {
  NEEDS_CONTEXT;
  return error_of(fake.sim->ops->alloc(fake.sim, bytes, out));
}
CALL(cuMemFree_v2, hipFree, (void *p), (p)) {
  NEEDS_CONTEXT;
  fake.sim->ops->release(fake.sim, p);
  return 0;
}
CALL(cuMemGetInfo_v2, hipMemGetInfo, (size_t * free, size_t *total), (free, total)) {
  NEEDS_CONTEXT;
  *free = fake.sim->free_bytes;
  *total = fake.sim->memory_bytes;
  return 0;
}
CALL(cuMemHostAlloc, hipHostMalloc, (void **out, size_t bytes, unsigned flags),
     (out, bytes, flags)) {
  NEEDS_CONTEXT;
  fake.pinned++;
  return flags != 1 ? BAD : error_of(fake.sim->ops->host_alloc(fake.sim, bytes, out));
}
CALL(cuMemFreeHost, hipHostFree, (void *p), (p)) {
  NEEDS_CONTEXT;
  fake.pinned--;
  fake.sim->ops->host_release(fake.sim, p);
  return 0;
}
CALL(cuStreamCreate, hipStreamCreateWithFlags, (void **out, unsigned flags), (out, flags)) {
  NEEDS_CONTEXT;
  fake.streams++;
  return flags != 1 ? BAD : error_of(fake.sim->ops->stream_new(fake.sim, (mr_stream **)out));
}
CALL(cuStreamDestroy_v2, hipStreamDestroy, (void *stream), (stream)) {
  NEEDS_CONTEXT;
  fake.streams--;
  fake.sim->ops->stream_free(fake.sim, stream);
  return 0;
}
CALL(cuStreamSynchronize, hipStreamSynchronize, (void *stream), (stream)) {
  NEEDS_CONTEXT;
  return error_of(fake.sim->ops->sync(fake.sim, stream));
}
CALL(cuStreamWaitEvent, hipStreamWaitEvent, (void *stream, void *event, unsigned flags),
     (stream, event, flags)) {
  NEEDS_CONTEXT;
  return flags ? BAD : error_of(fake.sim->ops->wait(fake.sim, stream, event));
}
CALL(cuEventCreate, hipEventCreateWithFlags, (void **out, unsigned flags), (out, flags)) {
  NEEDS_CONTEXT;
  fake.events++;
  return flags != 2 ? BAD : error_of(fake.sim->ops->event_new(fake.sim, (mr_event **)out));
}
CALL(cuEventDestroy_v2, hipEventDestroy, (void *event), (event)) {
  NEEDS_CONTEXT;
  fake.events--;
  fake.sim->ops->event_free(fake.sim, event);
  return 0;
}
CALL(cuEventRecord, hipEventRecord, (void *event, void *stream), (event, stream)) {
  NEEDS_CONTEXT;
  return error_of(fake.sim->ops->record(fake.sim, event, stream));
}
static int copy(mr_direction dir, void *dst, const void *src, size_t bytes, void *stream) {
  NEEDS_CONTEXT;
  return error_of(fake.sim->ops->copy(fake.sim, stream, dir, dst, src, bytes));
}
CALL(cuMemcpyHtoDAsync_v2, hipMemcpyHtoDAsync, (void *d, const void *s, size_t n, void *q),
     (d, s, n, q)) {
  return copy(MR_TO_DEVICE, d, s, n, q);
}
CALL(cuMemcpyDtoHAsync_v2, hipMemcpyDtoHAsync, (void *d, const void *s, size_t n, void *q),
     (d, s, n, q)) {
  return copy(MR_TO_HOST, d, s, n, q);
}
CALL(cuMemcpyDtoDAsync_v2, hipMemcpyDtoDAsync, (void *d, const void *s, size_t n, void *q),
     (d, s, n, q)) {
  return copy(MR_ON_DEVICE, d, s, n, q);
}
CALL(cuLaunchKernel, hipModuleLaunchKernel,
     (void *fn, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
      unsigned shared, void *stream, void **args, void **extra),
     (fn, x, y, z, threads, ty, tz, shared, stream, args, extra)) {
  NEEDS_CONTEXT;
  mr_grid g = {.blocks = {x, y, z}, .warps = threads / (unsigned)fake.sim->warp, .shared = shared};
  if (ty != 1 || tz != 1 || extra || threads % (unsigned)fake.sim->warp)
    return BAD;
  mr_gpu_kernel k = (mr_gpu_kernel)((char *)fn - (char *)&fake);
  return error_of(fake.sim->ops->launch(fake.sim, stream, k, &g, args[0]));
}

/* ------------------------------------------------------------------ tests */

static const char *wanted_library;

static void *own_library(const char *name) {
  wanted_library = name;
  return dlopen(NULL, RTLD_NOW);
}

static void *no_library(const char *name) {
  wanted_library = name;
  return NULL;
}

static mr_gpu_blob blobs[3]; /* stands for what `make gpu` embeds */
static const mr_gpu_blob *some_blobs(void) {
  return blobs;
}

static void start(bool amd, bool wave64) {
  mr_device *old = fake.sim;
  if (old)
    mr_device_close(old);
  memset(&fake, 0, sizeof fake);
  fake.amd = amd;
  fake.devices = 2;
  fake.warp64 = wave64;
  fake.opts = (mr_sim_opts){.machine = !amd     ? 0
                                       : wave64 ? 1
                                                : 2,
                            .memory = (size_t)64 << 20,
                            .guard = true};
  mr_driver_library = own_library;
  mr_driver_blobs = some_blobs;
  blobs[0] = (mr_gpu_blob){amd ? "gfx1100" : "cuda", (const unsigned char *)"wave32", 7};
  blobs[1] = (mr_gpu_blob){amd ? "gfx942" : NULL, (const unsigned char *)"wave64", 7};
}

static void no_driver(void **state) {
  (void)state;
  mr_device *d;
  mr_device_found found[8];
  start(false, false);
  mr_driver_library = no_library;
  for (int cuda = 0; cuda < 2; cuda++) {
    mr_err err = MR_ERR_INIT;
    assert_int_equal(mr_device_driver(&d, cuda, 0, &err), MR_E_UNAVAILABLE);
    assert_string_equal(wanted_library, cuda ? "libcuda.so.1" : "libamdhip64.so");
    assert_non_null(strstr(err.text, wanted_library));
    assert_int_equal(mr_driver_list(found, 8, cuda), 1);
    assert_string_equal(found[0].name, cuda ? "cuda" : "hip");
    assert_non_null(strstr(found[0].why, "no "));
  }
}

static void devices_are_listed(void **state) {
  (void)state;
  mr_device_found found[8];
  start(false, false);
  assert_int_equal(mr_driver_list(found, 8, true), 2);
  assert_string_equal(found[1].name, "cuda:1");
  assert_string_equal(found[1].model, "fake 1");
  assert_string_equal(found[1].arch, "sm_90");
  assert_int_equal(found[1].memory_bytes, (size_t)64 << 20);
  assert_string_equal(found[1].why, "");
  assert_non_null(strstr(found[1].gemm, "has no cublasLtCreate")); /* this library is none */
  assert_int_equal(fake.modules, 0); /* closed again */
  blobs[0].arch = NULL;
  assert_int_equal(mr_driver_list(found, 8, true), 2);
  assert_non_null(strstr(found[0].why, "make gpu"));
  fake.devices = 0;
  assert_int_equal(mr_driver_list(found, 8, true), 1);
  assert_non_null(strstr(found[0].why, "no device"));
}

static void the_number_counts(void **state) {
  (void)state;
  mr_device *d;
  mr_err err = MR_ERR_INIT;
  start(false, false);
  assert_int_equal(mr_device_open(&d, "cuda:2", 0, &err), MR_E_UNAVAILABLE);
  assert_non_null(strstr(err.text, "2 devices"));
}

static void code_fits_the_device(void **state) {
  (void)state;
  mr_device *d;
  mr_err err = MR_ERR_INIT;
  for (int wave64 = 0; wave64 < 2; wave64++) {
    start(true, wave64);
    assert_int_equal(mr_device_open(&d, "hip", 0, &err), MR_OK);
    assert_string_equal(d->arch, wave64 ? "gfx942" : "gfx1100");
    assert_int_equal(d->warp, wave64 ? 64 : 32);
    mr_device_close(d);
  }
  start(true, true);
  blobs[1].bytes = blobs[0].bytes;
  assert_int_equal(mr_device_open(&d, "hip", 0, &err), MR_E_UNAVAILABLE);
  assert_non_null(strstr(err.text, "architecture"));
}

static void errors_have_words(void **state) {
  (void)state;
  mr_device *d;
  mr_err err = MR_ERR_INIT, err2 = MR_ERR_INIT;
  mr_stream *s;
  float x[64] = {0};
  start(false, false);
  assert_int_equal(mr_device_open(&d, "cuda", (size_t)1 << 40, &err), MR_OK); /* all there is */
  assert_int_equal(d->ops->stream_new(d, &s), MR_OK);
  void *p;
  assert_int_equal(d->ops->alloc(d, (size_t)1 << 40, &p), MR_E_NOMEM);
  assert_non_null(strstr(d->why, "out of memory"));
  assert_int_equal(d->ops->copy(d, s, MR_TO_DEVICE, d->base + d->cap, x, sizeof x), MR_E_INTERNAL);
  ((mr_sim_opts *)&fake.opts)->lose_at = 1;
  mr_device_close(fake.sim);
  fake.sim = NULL;
  assert_int_equal(open_sim_device(), 0);
  d->base = NULL; /* it went with the old one */
  assert_int_equal(d->ops->stream_new(d, &s), MR_OK);
  mr_gpu_finish a = {.x = x, .ld = 64, .scale = 1, .cols = 64};
  mr_grid g = {.blocks = {1, 1, 1}, .warps = MR_GPU_WARPS};
  mr_code rc = d->ops->launch(d, s, MR_GPU_finish, &g, &a);
  assert_int_equal(rc, MR_E_UNAVAILABLE);
  assert_int_equal(mr_device_fail(d, rc, &err2), MR_E_UNAVAILABLE);
  assert_non_null(strstr(err2.text, "719"));
  assert_int_equal(mr_err_exit(rc), 69);
  mr_device_close(d);
}

/* The whole engine through the driver's calls. */
static void a_model_runs(void **state) {
  (void)state;
  static probe p[MAX_SEQS];
  const char *path = data_path("conformance/malformed/valid_tiny.jsonl");
  if (!path)
    skip();
  reset();
  for (int kind = 0; kind < 3; kind++) {
    mr_err err = MR_ERR_INIT;
    engine e;
    size_t len;
    start(kind > 0, kind == 1);
    on_device = kind ? "hip" : "cuda";
    char *text = read_whole(data_path("conformance/malformed/valid_tiny.jsonl"), &len);
    int n = read_probes(p, text, 4, MAX_PROMPT, 6);
    const char *model = data_path("conformance/malformed/gguf/00-valid-baseline.gguf");
    assert_int_equal(engine_open(&e, model, mr_kernels_best()->name, &err), MR_OK);
    check_probes(&e, p, n, on_device);
    engine_close(&e);
    free(text);
    assert_int_equal(fake.modules + fake.streams + fake.events + fake.pinned, 0);
  }
  report("drivers");
}

/* Lost in the middle of a step: the step says so, with the code that a run ends with. */
static void a_lost_device(void **state) {
  (void)state;
  const char *model = data_path("conformance/malformed/gguf/00-valid-baseline.gguf");
  if (!model)
    skip();
  char path[4200];
  snprintf(path, sizeof path, "%s", model);
  mr_err err = MR_ERR_INIT;
  engine e;
  mr_kv_seq seq;
  static const int32_t token = 5;
  start(false, false);
  fake.opts.lose_at = 150;
  on_device = "cuda";
  assert_int_equal(engine_open(&e, path, mr_kernels_best()->name, &err), MR_OK);
  assert_int_equal(mr_kv_seq_init(e.kv, &seq, 64, &err), MR_OK);
  mr_code rc = MR_OK;
  for (int i = 0; i < 32 && !rc; i++) {
    mr_run one = {.seq = &seq, .tokens = &token, .n = 1};
    assert_int_equal(mr_kv_seq_reserve(e.kv, &seq, 1), MR_OK);
    rc = mr_forward_step(e.f, &one, 1, NULL, &err);
  }
  assert_int_equal(rc, MR_E_UNAVAILABLE);
  assert_true(seq.len > 0);
  assert_non_null(strstr(err.text, "go on with the same command"));
  mr_kv_seq_free(e.kv, &seq);
  engine_close(&e);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(no_driver),         cmocka_unit_test(devices_are_listed),
      cmocka_unit_test(the_number_counts), cmocka_unit_test(code_fits_the_device),
      cmocka_unit_test(errors_have_words), cmocka_unit_test(a_model_runs),
      cmocka_unit_test(a_lost_device),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
