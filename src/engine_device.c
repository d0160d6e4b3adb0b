#include "src/engine_device.h"

#include <stdio.h>
#include <string.h>

#define MOST_STAGED 32 /* blocks on their way out */
#define LEAST_STEP 16  /* tokens: a step is not planned smaller than a tile */

/* ---------------------------------------------------------------- pages on the device */

/* And the places through which pages leave; without them each page is waited for. */
static void *take_pages(void *ctx, size_t bytes) {
  mr_engine_device *d = ctx;
  void *pages = mr_device_take(d->dev, bytes);
  size_t stage = (size_t)d->n_stage * d->page_bytes;
  if (pages && stage && (d->stage = mr_device_take(d->dev, stage)) &&
      !d->dev->ops->host_alloc(d->dev, stage, (void **)&d->stage_host))
    d->pages.staged = d->n_stage;
  return pages;
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

/* ---------------------------------------------------------------- pages beside a step */

static mr_code stage(void *ctx, int place, const void *src, size_t bytes) {
  mr_engine_device *d = ctx;
  return d->dev->ops->copy(d->dev, d->stream, MR_ON_DEVICE, d->stage + (size_t)place * bytes, src,
                           bytes);
}

/* The copies on the device are short and are waited for: then the pages may be written again. */
static mr_code depart(void *ctx, int from, int end, size_t bytes) {
  mr_engine_device *d = ctx;
  size_t at = (size_t)from * bytes;
  mr_code rc = d->dev->ops->sync(d->dev, d->stream);
  return rc ? rc
            : d->dev->ops->copy(d->dev, d->out, MR_TO_HOST, d->stage_host + at, d->stage + at,
                                (size_t)(end - from) * bytes);
}

static mr_code arrive_out(void *ctx) {
  mr_engine_device *d = ctx;
  return d->dev->ops->sync(d->dev, d->out);
}

static const void *staged_at(void *ctx, int place, size_t bytes) {
  return ((mr_engine_device *)ctx)->stage_host + (size_t)place * bytes;
}

static void *room(void *ctx, size_t bytes) {
  mr_engine_device *d = ctx;
  void *p;
  return d->dev->ops->host_alloc(d->dev, bytes, &p) ? NULL : p;
}

static void room_free(void *ctx, void *p) {
  mr_engine_device *d = ctx;
  d->dev->ops->host_release(d->dev, p);
}

static mr_code send(void *ctx, void *dst, const void *src, size_t bytes) {
  mr_engine_device *d = ctx;
  return d->dev->ops->copy(d->dev, d->in, MR_TO_DEVICE, dst, src, bytes);
}

static mr_code arrive_in(void *ctx) {
  mr_engine_device *d = ctx;
  return d->dev->ops->sync(d->dev, d->in);
}

const mr_kv_memory *mr_engine_device_pages(const mr_engine_device *d) {
  return d->dev ? &d->pages : NULL;
}

/* ---------------------------------------------------------------- open and close */

mr_code mr_engine_device_open(mr_engine_device *d, const mr_engine_opts *o, mr_err *err) {
  static const mr_gpu_scheme schemes[] = {MR_GPU_BY_FILE, MR_GPU_ALL_BF16, MR_GPU_ALL_INT8,
                                          MR_GPU_ALL_INT4};
  bool exact = o->compute == MR_COMPUTE_EXACT;
  *d = (mr_engine_device){.scheme = exact ? MR_GPU_EXACT : schemes[o->device_weights]};
  if (!mr_device_is_gpu(o->device)) {
    if (o->device_memory || o->device_weights || o->device_gemm)
      return mr_err_set(err, MR_E_USAGE, "--device-%s is for GPUs: name one with --device",
                        o->device_memory    ? "memory"
                        : o->device_weights ? "weights"
                                            : "gemm");
    return MR_OK;
  }
  if (exact && o->device_weights)
    return mr_err_set(err, MR_E_USAGE,
                      "--compute exact holds all weights in 16 bits: leave out --device-weights");
  if (exact && o->device_gemm)
    return mr_err_set(err, MR_E_USAGE,
                      "--compute exact multiplies pairs of bfloat16, for which there is no "
                      "library: leave out --device-gemm");
  mr_code rc = mr_device_open(&d->dev, o->device, o->device_memory, err);
  if (!rc && o->device_gemm)
    rc = mr_device_gemm_open(&d->dev->gemm, d->dev, err);
  mr_stream **streams[] = {&d->stream, &d->out, &d->in};
  for (int i = 0; i < 3 && !rc; i++)
    rc = mr_device_fail(d->dev, d->dev->ops->stream_new(d->dev, streams[i]), err);
  d->pages = (mr_kv_memory){.ctx = d,
                            .take = take_pages,
                            .copy = copy_on,
                            .to_host = to_host,
                            .from_host = from_host,
                            .stage = stage,
                            .depart = depart,
                            .arrive_out = arrive_out,
                            .staged_at = staged_at,
                            .room = room,
                            .room_free = room_free,
                            .send = send,
                            .arrive_in = arrive_in};
  return rc;
}

void mr_engine_device_close(mr_engine_device *d) {
  mr_stream *streams[] = {d->stream, d->out, d->in};
  if (d->dev && d->stage_host)
    d->dev->ops->host_release(d->dev, d->stage_host);
  for (int i = 0; i < 3 && d->dev; i++)
    d->dev->ops->stream_free(d->dev, streams[i]);
  mr_device_close(d->dev);
  *d = (mr_engine_device){0};
}

/* ---------------------------------------------------------------- the plan */

/* A copy of a name for as long as the program runs: what an engine says of itself outlives it. */
static const char *kept(const char *name) {
  static char all[16][512];
  size_t i = 0;
  while (i + 1 < sizeof all / sizeof *all && all[i][0] && strcmp(all[i], name))
    i++;
  snprintf(all[i], sizeof all[i], "%s", name);
  return all[i];
}

const char *mr_engine_device_gemm(const mr_engine_device *d) {
  return d->dev && d->dev->gemm ? kept(mr_device_gemm_words(d->dev->gemm)) : NULL;
}

/* With whose products: they are part of a job's numerics. */
static const char *scheme_name(const mr_engine_device *d) {
  static const char *const schemes[] = {"by file", "bf16 pairs", "bf16", "int8", "int4"};
  char words[96];
  if (!d->dev->gemm)
    return schemes[d->scheme];
  snprintf(words, sizeof words, "%s, %s", schemes[d->scheme], mr_device_gemm_name(d->dev->gemm));
  return kept(words);
}

static size_t step_bytes(const mr_engine_device *d, const mr_model *m, const mr_engine_info *i) {
  return mr_gpu_step_bytes(m, d->dev, i->max_step_tokens, mr_engine_logit_rows(i),
                           mr_forward_columns(m));
}

static mr_code too_small(const mr_engine_device *d, size_t weights, size_t step, size_t block,
                         mr_err *err) {
  return mr_err_set(err, MR_E_UNAVAILABLE,
                    "device %s: of its memory %zu bytes are taken, but the weights need %zu, a "
                    "step %zu and a block of keys and values %zu; use a larger --device-memory, "
                    "--device-weights int4, or --device cpu",
                    d->dev->name, d->dev->cap, weights, step, block);
}

/* Where pages may go to the disk some of the room is for those on their way. */
static void plan_stage(mr_engine_device *d, const mr_engine_opts *o, const mr_engine_info *info,
                       int pages, size_t *most) {
  size_t all = (size_t)pages < *most ? (size_t)pages : *most, block = (size_t)info->kv_groups;
  size_t n = all / 4 < all - block ? all / 4 : all - block;
  d->page_bytes = (size_t)info->kv_page_bytes;
  d->n_stage = 0;
  if (!o->kv_disk || o->kv_policy == MR_KV_FEWER || o->kv_policy == MR_KV_RECOMPUTE)
    return;
  d->n_stage = (int)(n < MOST_STAGED * block ? n : MOST_STAGED * block);
  if (all + (size_t)d->n_stage > *most)
    *most -= (size_t)d->n_stage;
}

/* Bytes of the weights on the device. Where they do not fit with 8 bits either, layers come over in
 * each step, so many that steps and pages have half of the memory, or less. */
static size_t plan_weights(mr_engine_device *d, const mr_engine_opts *o, const mr_model *m) {
  size_t cap = d->dev->cap;
  d->scheme = mr_gpu_scheme_of(m, d->scheme);
  size_t weights = mr_gpu_weight_bytes(m, d->scheme), fewer;
  if (!o->device_weights && d->scheme != MR_GPU_EXACT && weights > cap / 10 * 9) {
    d->scheme = MR_GPU_ALL_INT8;
    weights = mr_gpu_weight_bytes(m, d->scheme);
  }
  for (size_t room = cap / 2; weights > cap / 10 * 9 && !d->streamed && room < cap;
       room += cap / 8) {
    d->streamed = mr_gpu_streamed_for(m, d->scheme, room, &fewer);
    if (d->streamed)
      return fewer;
  }
  return weights;
}

mr_code mr_engine_device_plan(mr_engine_device *d, const mr_engine_opts *o, const mr_model *m,
                              mr_engine_info *info, int *pages, mr_err *err) {
  size_t page = (size_t)info->kv_page_bytes, block = page * (size_t)info->kv_groups;
  if (o->kv_type == MR_KV_Q4)
    return mr_err_set(err, MR_E_UNAVAILABLE,
                      "keys and values of type q4 are not supported on device %s; use int8 or fp8",
                      d->dev->name);
  size_t weights = plan_weights(d, o, m);
  while (!o->max_step_tokens && info->max_step_tokens > LEAST_STEP &&
         weights + step_bytes(d, m, info) + block > d->dev->cap / 10 * 9)
    info->max_step_tokens /= 2;
  size_t step = step_bytes(d, m, info);
  if (weights + step + block > d->dev->cap)
    return too_small(d, weights, step, block, err);
  size_t most = (d->dev->cap - weights - step) / page;
  plan_stage(d, o, info, *pages, &most);
  if ((size_t)*pages > most)
    *pages = (int)most;
  if (info->max_batch > *pages / info->kv_groups)
    info->max_batch = *pages / info->kv_groups;
  info->device = kept(d->dev->name);
  info->isa = kept(d->dev->arch);
  info->scheme = scheme_name(d);
  info->packed_bytes = weights;
  info->kv_memory = (uint64_t)*pages * page;
  info->kv_tokens = (uint64_t)(*pages / info->kv_groups) * MR_KV_BLOCK;
  return MR_OK;
}
