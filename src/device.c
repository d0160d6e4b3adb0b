#include "src/device.h"

#include <stdlib.h>
#include <string.h>

#include "io/mem.h"
#include "src/device_gemm.h"
#include "src/machine.h"

#define ALIGN ((size_t)256)

bool mr_device_is_gpu(const char *name) {
  return name && strcmp(name, "auto") && strcmp(name, "cpu");
}

/* ------------------------------------------------------------------ by name */

mr_sim_opts mr_sim_defaults;

/* Tests of whole runs: MILLRACE_SIM_FAULT=lose=N, copy=N or alloc=N (device.h, mr_sim_opts). */
static void take_fault(mr_sim_opts *o) {
  const char *fault = getenv("MILLRACE_SIM_FAULT");
  struct {
    const char *name;
    int *at;
  } all[] = {{"lose=", &o->lose_at}, {"copy=", &o->fail_copy}, {"alloc=", &o->fail_alloc}};
  for (size_t i = 0; fault && i < sizeof all / sizeof *all; i++)
    if (!strncmp(fault, all[i].name, strlen(all[i].name)))
      *all[i].at = (int)strtol(fault + strlen(all[i].name), NULL, 10);
}

static mr_code open_sim(mr_device **out, const char *which, mr_err *err) {
  static const char *const machines[] = {"", ":warp32", ":wave64", ":wmma"};
  static const int number[] = {0, 0, 1, 2};
  uint64_t half = mr_machine_memory().available / 2;
  mr_sim_opts o = mr_sim_defaults;
  o.memory = half ? half : (size_t)4 << 30;
  take_fault(&o);
  for (size_t i = 0; i < sizeof machines / sizeof *machines; i++)
    if (!strcmp(which, machines[i])) {
      o.machine = number[i];
      return mr_device_sim(out, &o, err);
    }
  return mr_err_set(err, MR_E_UNAVAILABLE,
                    "--device sim%s is unknown: there are sim, sim:wave64 and sim:wmma", which);
}

/* Whether name is `kind` or kind:N. */
static bool is_kind(const char *name, const char *kind, int *number) {
  size_t n = strlen(kind);
  char *end;
  *number = 0;
  if (strncmp(name, kind, n) || !name[n])
    return !strcmp(name, kind);
  if (name[n] != ':' || name[n + 1] < '0' || name[n + 1] > '9')
    return false;
  long at = strtol(name + n + 1, &end, 10);
  *number = at < 1000 ? (int)at : 1000;
  return !*end;
}

static mr_code open_one(mr_device **out, const char *name, mr_err *err) {
  int number;
  if (is_kind(name, "cuda", &number))
    return mr_device_driver(out, true, number, err);
  if (is_kind(name, "hip", &number))
    return mr_device_driver(out, false, number, err);
  if (!strncmp(name, "sim", 3) && (!name[3] || name[3] == ':'))
    return open_sim(out, name + 3, err);
  return mr_err_set(err, MR_E_UNAVAILABLE,
                    "--device %s is unknown: there are auto, cpu, cuda[:N], hip[:N] and sim", name);
}

/* All that will be used at once: so out of memory has one place. */
mr_code mr_device_start(mr_device *d, uint64_t bytes, mr_err *err) {
  size_t want = d->free_bytes / 10 * 9;
  if (bytes)
    want = bytes < d->free_bytes ? (size_t)bytes : d->free_bytes;
  want &= ~(ALIGN - 1);
  void *p = NULL;
  mr_code rc = want ? d->ops->alloc(d, want, &p) : MR_E_NOMEM;
  if (rc)
    return mr_err_set(err, MR_E_UNAVAILABLE,
                      "device %s has no %zu bytes of memory to give (%zu are free): %s; use a "
                      "smaller --device-memory",
                      d->name, want, d->free_bytes, d->why);
  d->base = p;
  d->cap = want;
  return MR_OK;
}

mr_code mr_device_open(mr_device **out, const char *name, uint64_t bytes, mr_err *err) {
  mr_device *d;
  mr_code rc = open_one(&d, name, err);
  if (rc)
    return rc;
  rc = mr_device_start(d, bytes, err);
  if (rc)
    mr_device_close(d);
  else
    *out = d;
  return rc;
}

void mr_device_close(mr_device *d) {
  if (!d)
    return;
  mr_device_gemm_close(d->gemm);
  if (d->base)
    d->ops->release(d, d->base);
  d->ops->close(d);
}

/* ------------------------------------------------------------------ the arena */

void *mr_device_take(mr_device *d, size_t bytes) {
  size_t size = (bytes + ALIGN - 1) & ~(ALIGN - 1);
  if (size < bytes || size > d->cap - d->used)
    return NULL;
  void *p = d->base + d->used;
  d->used += size;
  return p;
}

size_t mr_device_left(const mr_device *d) {
  return d->cap - d->used;
}

mr_code mr_device_put(mr_device *d, mr_stream *s, void *dst, const void *src, size_t bytes) {
  mr_code rc = d->ops->copy(d, s, MR_TO_DEVICE, dst, src, bytes);
  return rc ? rc : d->ops->sync(d, s);
}

mr_code mr_device_fail(const mr_device *d, mr_code rc, mr_err *err) {
  if (!rc)
    return MR_OK;
  if (rc == MR_E_UNAVAILABLE)
    return mr_err_set(err, rc,
                      "device %s: %s; what is done stays: go on with the same command, or "
                      "elsewhere with --other-numerics",
                      d->name, d->why);
  return mr_err_set(err, rc, "device %s: %s", d->name, d->why);
}

int mr_device_list(mr_device_found *found, int cap) {
  int n = mr_driver_list(found, cap, true);
  n += mr_driver_list(found + n, cap - n, false);
  if (n < cap)
    found[n++] = (mr_device_found){.name = "sim",
                                   .model = "an emulated GPU, for tests: slow",
                                   .arch = "also sim:wave64, sim:wmma"};
  return n;
}
