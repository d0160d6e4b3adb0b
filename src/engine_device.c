#include "src/engine_device.h"

#include <stdio.h>
#include <string.h>

#define LEAST_STEP 16 /* tokens: a step is not planned smaller than a tile */

/* ---------------------------------------------------------------- pages on the device */

static void *take_pages(void *ctx, size_t bytes) {
  return mr_device_take(((mr_engine_device *)ctx)->dev, bytes);
}

static mr_code copy(void *ctx, mr_direction dir, void *dst, const void *src, size_t bytes) {
  mr_engine_device *d = ctx;
  mr_code rc = d->dev->ops->copy(d->dev, d->stream, dir, dst, src, bytes);
  mr_code waited = d->dev->ops->sync(d->dev, d->stream);
  return rc ? rc : waited;
}

static mr_code copy_on(void *ctx, void *dst, const void *src, size_t bytes) {
  return copy(ctx, MR_ON_DEVICE, dst, src, bytes);
}

static mr_code to_host(void *ctx, void *dst, const void *src, size_t bytes) {
  return copy(ctx, MR_TO_HOST, dst, src, bytes);
}

static mr_code from_host(void *ctx, void *dst, const void *src, size_t bytes) {
  return copy(ctx, MR_TO_DEVICE, dst, src, bytes);
}

const mr_kv_memory *mr_engine_device_pages(const mr_engine_device *d) {
  return d->dev ? &d->pages : NULL;
}

/* ---------------------------------------------------------------- open and close */

mr_code mr_engine_device_open(mr_engine_device *d, const mr_engine_opts *o, mr_err *err) {
  *d = (mr_engine_device){.scheme = o->compute == MR_COMPUTE_EXACT ? MR_GPU_EXACT : MR_GPU_FAST};
  if (!mr_device_is_gpu(o->device)) {
    if (o->device_memory)
      return mr_err_set(err, MR_E_USAGE, "--device-memory is for GPUs: name one with --device");
    return MR_OK;
  }
  if (o->n_adapters > 0)
    return mr_err_set(err, MR_E_UNAVAILABLE,
                      "--lora is not supported on device %s yet; use --device cpu", o->device);
  mr_code rc = mr_device_open(&d->dev, o->device, o->device_memory, err);
  if (!rc)
    rc = mr_device_fail(d->dev, d->dev->ops->stream_new(d->dev, &d->stream), err);
  d->pages = (mr_kv_memory){
      .ctx = d, .take = take_pages, .copy = copy_on, .to_host = to_host, .from_host = from_host};
  return rc;
}

void mr_engine_device_close(mr_engine_device *d) {
  if (d->dev && d->stream)
    d->dev->ops->stream_free(d->dev, d->stream);
  mr_device_close(d->dev);
  *d = (mr_engine_device){0};
}

/* ---------------------------------------------------------------- the plan */

/* A copy of a name for as long as the program runs: what an engine says of itself outlives it. */
static const char *kept(const char *name) {
  static char all[16][sizeof((mr_device *)0)->arch];
  size_t i = 0;
  while (i + 1 < sizeof all / sizeof *all && all[i][0] && strcmp(all[i], name))
    i++;
  snprintf(all[i], sizeof all[i], "%s", name);
  return all[i];
}

static size_t step_bytes(const mr_engine_device *d, const mr_model *m, const mr_engine_info *i) {
  return mr_gpu_step_bytes(m, d->dev, i->max_step_tokens, mr_engine_logit_rows(i),
                           mr_forward_columns(m));
}

static mr_code too_small(const mr_engine_device *d, size_t weights, size_t step, size_t page,
                         mr_err *err) {
  return mr_err_set(
      err, MR_E_UNAVAILABLE,
      "device %s: of its memory %zu bytes are taken, but the weights need %zu, a step "
      "%zu and a page of keys and values %zu; use a larger --device-memory, or "
      "--device cpu",
      d->dev->name, d->dev->cap, weights, step, page);
}

mr_code mr_engine_device_plan(mr_engine_device *d, const mr_engine_opts *o, const mr_model *m,
                              mr_engine_info *info, int *pages, mr_err *err) {
  static const char *const schemes[] = {"bf16", "bf16 pairs", "int8 by 32"};
  size_t page = (size_t)info->kv_bytes_per_token * MR_KV_BLOCK;
  if (o->kv_type >= 0 && o->kv_type != MR_KV_F32 && o->kv_type != MR_KV_BF16)
    return mr_err_set(err, MR_E_UNAVAILABLE,
                      "keys and values of type %s are not supported on device %s; use f32 or bf16",
                      info->kv_type, d->dev->name);
  size_t weights = mr_gpu_weight_bytes(m, d->scheme);
  if (d->scheme == MR_GPU_FAST && weights > d->dev->cap / 10 * 9) {
    d->scheme = MR_GPU_SMALL;
    weights = mr_gpu_weight_bytes(m, d->scheme);
  }
  while (!o->max_step_tokens && info->max_step_tokens > LEAST_STEP &&
         weights + step_bytes(d, m, info) + page > d->dev->cap / 10 * 9)
    info->max_step_tokens /= 2;
  size_t step = step_bytes(d, m, info);
  if (weights + step + page > d->dev->cap)
    return too_small(d, weights, step, page, err);
  size_t most = (d->dev->cap - weights - step) / page;
  if ((size_t)*pages > most)
    *pages = (int)most;
  if (info->max_batch > *pages)
    info->max_batch = *pages;
  info->device = kept(d->dev->name);
  info->isa = kept(d->dev->arch);
  info->scheme = schemes[d->scheme];
  info->packed_bytes = weights;
  info->kv_memory = (uint64_t)*pages * page;
  info->kv_tokens = (uint64_t)*pages * MR_KV_BLOCK;
  return MR_OK;
}
