/* gpu_rig.h: an emulated GPU for tests of kernels: memory that ends at a guard page and starts as
 * NaN, lazy copies, poisoned shared memory; or the GPU that MR_TEST_DEVICE names. For tests that
 * include it after cmocka. */
#ifndef TESTS_UNIT_GPU_RIG_H
#define TESTS_UNIT_GPU_RIG_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "io/mem.h"
#include "kernels/dtype.h"
#include "kernels/kernels.h"
#include "src/device.h"

#define RIG_MEMORY ((size_t)256 << 20)
#define MAX_BLOCKS 128

typedef struct rig {
  mr_device *dev;
  mr_stream *stream;
  void *blocks[MAX_BLOCKS];
  int n_blocks;
} rig;

static void rig_open(rig *r, int machine, int order) {
  mr_err err = MR_ERR_INIT;
  mr_sim_opts o = {
      .machine = machine,
      .memory = RIG_MEMORY,
      .guard = true,
      .emu = {.order = (mr_emu_order)order, .seed = (uint32_t)order, .lazy = 1, .poison = 1}};
  *r = (rig){0};
  assert_int_equal(mr_device_sim(&r->dev, &o, &err), MR_OK);
  assert_int_equal(r->dev->ops->stream_new(r->dev, &r->stream), MR_OK);
}

static void *rig_new(rig *r, size_t bytes) {
  void *p = NULL;
  assert_true(r->n_blocks < MAX_BLOCKS);
  assert_int_equal(r->dev->ops->alloc(r->dev, bytes ? bytes : 1, &p), MR_OK);
  return r->blocks[r->n_blocks++] = p;
}

static void rig_free_all(rig *r) {
  while (r->n_blocks)
    r->dev->ops->release(r->dev, r->blocks[--r->n_blocks]);
}

static void rig_close(rig *r) {
  rig_free_all(r);
  mr_device_close(r->dev);
}

/* A copy on the device. */
static void *rig_put(rig *r, const void *host, size_t bytes) {
  void *p = rig_new(r, bytes);
  assert_int_equal(mr_device_put(r->dev, r->stream, p, host, bytes), MR_OK);
  return p;
}

static void rig_get(rig *r, void *host, const void *from, size_t bytes) {
  assert_int_equal(r->dev->ops->copy(r->dev, r->stream, MR_TO_HOST, host, from, bytes), MR_OK);
  if (r->dev->ops->sync(r->dev, r->stream))
    fail_msg("%s: %s", r->dev->name, r->dev->why);
}

static void rig_run(rig *r, mr_gpu_kernel k, mr_grid grid, const void *args) {
  if (r->dev->ops->launch(r->dev, r->stream, k, &grid, args) ||
      r->dev->ops->sync(r->dev, r->stream))
    fail_msg("%s: %s", r->dev->name, r->dev->why);
}

static void on_device_named(const char *name, void (*test)(rig *r)) {
  mr_err err = MR_ERR_INIT;
  rig r = {0};
  if (mr_device_open(&r.dev, name, 4096, &err))
    fail_msg("%s", err.text);
  assert_int_equal(r.dev->ops->stream_new(r.dev, &r.stream), MR_OK);
  test(&r);
  rig_free_all(&r);
  r.dev->ops->stream_free(r.dev, r.stream);
  mr_device_close(r.dev);
}

/* On every machine, in every order of threads. */
static void on_every_machine(void (*test)(rig *r)) {
  const char *name = getenv("MR_TEST_DEVICE");
  if (name && *name) {
    on_device_named(name, test);
    return;
  }
  for (int machine = 0; machine < 3; machine++)
    for (int order = 0; order < 3; order++) {
      rig r;
      rig_open(&r, machine, order);
      test(&r);
      rig_close(&r);
    }
}

/* ------------------------------------------------------------------ numbers */

static uint64_t rig_seed = 1;

static float uniform(void) { /* -1 .. 1 */
  rig_seed = rig_seed * 6364136223846793005u + 1442695040888963407u;
  return (float)((double)(rig_seed >> 11) / (double)(1ull << 52) - 1);
}

static float *random_floats(size_t n, float size) {
  float *p = mr_mem_alloc(n, sizeof *p);
  assert_non_null(p);
  for (size_t i = 0; i < n; i++)
    p[i] = uniform() * size;
  return p;
}

static void close_to(const rig *r, const char *what, double got, double want, double tolerance) {
  if (!(fabs(got - want) <= tolerance))
    fail_msg("%s: %s is %.9g, not %.9g (within %g)", r->dev->arch, what, got, want, tolerance);
}

#endif
