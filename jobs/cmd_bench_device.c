/* cmd_bench_device.c: see bench.h. A figure is the best of a few runs of several launches each; its
 * limit is what the device itself was seen to do: copies on it, and matrix instructions that wait
 * for nothing. */
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "io/mem.h"
#include "io/sys.h"
#include "jobs/bench.h"
#include "src/device_gemm.h"

#define RUN_SECONDS 0.05 /* of launches, for each figure */
#define RUNS 3

typedef struct sizes { /* of an 8B model, or of a toy for an emulated device */
  int k, n, dim, heads, kv_heads, vocab, seqs, keys, prompt, rows, peak_blocks, peak_rounds;
  size_t copy;
} sizes;

static const sizes real = {.k = 4096,
                           .n = 14336,
                           .dim = 128,
                           .heads = 32,
                           .kv_heads = 8,
                           .vocab = 128256,
                           .seqs = 64,
                           .keys = 1024,
                           .prompt = 4096,
                           .rows = 256,
                           .peak_blocks = 2048,
                           .peak_rounds = 4096,
                           .copy = (size_t)256 << 20};
static const sizes toy = {.k = 128,
                          .n = 192,
                          .dim = 32,
                          .heads = 4,
                          .kv_heads = 2,
                          .vocab = 600,
                          .seqs = 2,
                          .keys = 96,
                          .prompt = 40,
                          .rows = 2,
                          .peak_blocks = 2,
                          .peak_rounds = 4,
                          .copy = 1 << 16};

typedef struct bench {
  mr_device *d;
  mr_stream *s;
  sizes z;
  bool once; /* an emulated device: figures mean nothing */
  uint8_t *host;
  uint8_t *room; /* the device's */
  size_t room_bytes;
  double copy_rate, peak; /* bytes and operations a second */
  json_t *list;
  mr_code rc;
} bench;

/* ---------------------------------------------------------------- timing */

typedef struct work {
  mr_gpu_kernel kernel;     /* MR_GPU_N_KERNELS: a copy */
  const mr_gemm_plan *plan; /* not NULL: a product by the maker's library */
  const mr_gpu_gemm *product;
  mr_grid grid;
  const void *args;
  mr_direction dir;
  void *dst;
  const void *src;
  size_t bytes;
} work;

static void put_work(bench *b, const work *w) {
  const mr_gpu_gemm *p = w->product;
  if (b->rc)
    return;
  b->rc = w->plan ? mr_device_gemm_run(b->d->gemm, b->s, w->plan, p->a, p->w, p->m, p->y, p->ld,
                                       p->accumulate)
          : w->kernel == MR_GPU_N_KERNELS
              ? b->d->ops->copy(b->d, b->s, w->dir, w->dst, w->src, w->bytes)
              : b->d->ops->launch(b->d, b->s, w->kernel, &w->grid, w->args);
}

static double time_of(bench *b, const work *w, int times) {
  double start = mr_sys_seconds();
  for (int i = 0; i < times; i++)
    put_work(b, w);
  mr_code waited = b->d->ops->sync(b->d, b->s);
  b->rc = b->rc ? b->rc : waited;
  return (mr_sys_seconds() - start) / times;
}

/* Seconds that one takes at best. */
static double best_time(bench *b, const work *w) {
  double first = time_of(b, w, 1), best = first;
  if (b->once || b->rc)
    return first;
  first = time_of(b, w, 1);
  int times = first > 0 ? (int)(RUN_SECONDS / first) + 1 : 1000;
  times = times < 1000 ? times : 1000;
  for (int i = 0; i < RUNS && !b->rc; i++) {
    double t = time_of(b, w, times);
    best = t < best ? t : best;
  }
  return best;
}

/* ops and bytes: what it has to do at least. */
static void figure(bench *b, const char *name, const char *shape, const work *w, double ops,
                   double bytes) {
  double t = best_time(b, w), floor = bytes / b->copy_rate, by_ops = ops / b->peak;
  if (b->rc)
    return;
  bool arithmetic = by_ops > floor;
  floor = arithmetic ? by_ops : floor;
  json_t *o = json_pack("{s:s, s:s, s:f, s:f, s:f, s:s, s:f}", "kernel", name, "shape", shape, "us",
                        t * 1e6, "gbytes_per_s", bytes / t / 1e9, "tflops", ops / t / 1e12, "limit",
                        arithmetic ? "matrix instructions" : "memory", "share", floor / t);
  if (!o || json_array_append_new(b->list, o))
    b->rc = MR_E_NOMEM;
}

/* Room beside what was taken before in this figure; its bytes are what fill left there. */
static void *room(bench *b, size_t *used, size_t bytes) {
  size_t at = *used;
  *used += (bytes + 255) & ~(size_t)255;
  if (*used <= b->room_bytes)
    return b->room + at;
  b->rc = b->rc ? b->rc : MR_E_NOMEM;
  return b->room;
}

static void upload(bench *b, void *to, const void *from, size_t bytes) {
  if (!b->rc)
    b->rc = mr_device_put(b->d, b->s, to, from, bytes);
}

/* ---------------------------------------------------------------- ceilings */

static double copy_rate(bench *b, mr_direction dir) {
  uint8_t *half = b->room + b->z.copy;
  work w = {.kernel = MR_GPU_N_KERNELS,
            .dir = dir,
            .dst = dir == MR_TO_HOST ? (void *)b->host : half,
            .src = dir == MR_TO_DEVICE ? (void *)b->host : b->room,
            .bytes = b->z.copy};
  return (double)b->z.copy / best_time(b, &w);
}

static double peak_rate(bench *b) {
  size_t used = 0, threads = (size_t)MR_GPU_WARPS * (size_t)b->d->warp;
  mr_gpu_peak a = {.rounds = b->z.peak_rounds};
  a.out = room(b, &used, (size_t)b->z.peak_blocks * threads * sizeof *a.out);
  work w = {.kernel = MR_GPU_peak,
            .grid = {.blocks = {(uint32_t)b->z.peak_blocks, 1, 1},
                     .warps = MR_GPU_WARPS,
                     .shared = MR_GPU_PEAK_SHARED},
            .args = &a};
  double ops = 2.0 * 16 * 16 * 16 * MR_GPU_PEAK_CHAINS * MR_GPU_WARPS;
  return ops * a.rounds * b->z.peak_blocks / best_time(b, &w);
}

/* Small numbers of all kinds, so that sums stay finite and power is drawn. */
static void fill(bench *b) {
  uint16_t *h = (uint16_t *)(void *)b->host;
  uint32_t seed = 1;
  for (size_t i = 0; i < b->z.copy / 2; i++) {
    seed = seed * 1664525u + 1013904223u;
    h[i] = (uint16_t)((seed >> 16 & 0x807fu) | 0x3c00u); /* bfloat16 of size 2^-7 */
  }
  for (size_t at = 0; at < b->room_bytes; at += b->z.copy) {
    size_t n = b->room_bytes - at < b->z.copy ? b->room_bytes - at : b->z.copy;
    upload(b, b->room + at, b->host, n);
  }
}

/* ---------------------------------------------------------------- products */

/* The same by the maker's library. */
static void library_product(bench *b, const mr_gpu_gemm *a, const char *shape, double ops,
                            double bytes) {
  mr_err err = MR_ERR_INIT;
  work w = {.product = a};
  if (!b->rc && b->d->gemm && !mr_device_gemm_plan(b->d->gemm, a->n, a->k, &w.plan, &err) && w.plan)
    figure(b, "gemm library", shape, &w, ops, bytes);
}

static void product(bench *b, mr_gpu_hold hold, int m) {
  static const mr_gpu_kernel kernels[4][2] = {{MR_GPU_gemm16_bf16, MR_GPU_gemm64_bf16},
                                              {MR_GPU_gemm16_pair, MR_GPU_gemm64_pair},
                                              {MR_GPU_gemm16_int8, MR_GPU_gemm64_int8},
                                              {MR_GPU_gemm16_int4, MR_GPU_gemm64_int4}};
  static const double bytes[] = {2, 4, 1 + 2.0 / MR_GPU_GROUP, 0.5 + 4.0 / MR_GPU_GROUP};
  bool tall = m > 32 && MR_GPU_GEMM_SHARED(64, hold) <= b->d->shared_bytes;
  size_t used = 0, k = (size_t)b->z.k, n = (size_t)b->z.n, rows = tall ? 64 : 16;
  size_t padded = (size_t)mr_gemm_padded(m);
  mr_gpu_gemm a = {.m = m, .n = b->z.n, .k = b->z.k, .ld = n};
  a.a_plane = a.w_plane = 0;
  a.a = room(b, &used, 2 * padded * k * sizeof *a.a);
  a.w = room(b, &used, 2 * n * k * sizeof *a.w);
  if (hold == MR_GPU_PAIR) {
    a.a_plane = (size_t)m * k;
    a.w_plane = n * k;
  }
  a.few = (mr_gpu_few){.w = (const uint8_t *)a.w};
  a.few.scales = room(b, &used, n * k / MR_GPU_GROUP * 2 * sizeof(uint16_t));
  a.few.units = room(b, &used, n * sizeof(float));
  a.y = room(b, &used, padded * n * sizeof *a.y);
  work w = {.kernel = kernels[hold][tall],
            .grid = {.blocks = {(uint32_t)((n + MR_GPU_GEMM_COLS - 1) / MR_GPU_GEMM_COLS),
                                (uint32_t)(((size_t)m + rows - 1) / rows), 1},
                     .warps = MR_GPU_WARPS,
                     .shared = MR_GPU_GEMM_SHARED(rows, hold)},
            .args = &a};
  char shape[80];
  snprintf(shape, sizeof shape, "%d rows, weights %d x %d", m, b->z.n, b->z.k);
  double mm = (double)m, each = 2.0 * mm * (double)n * (double)k;
  double moved = (double)n * (double)k * bytes[hold] + mm * (double)k * 2 + mm * (double)n * 4;
  figure(b, mr_gpu_kernel_names[w.kernel] + 5, shape, &w, hold == MR_GPU_PAIR ? 3 * each : each,
         moved);
  if (hold == MR_GPU_BF16)
    library_product(b, &a, shape, each, moved);
}

/* ---------------------------------------------------------------- attention */

typedef struct case_of { /* seqs sequences of n new tokens after `before` */
  const char *name;
  int seqs, n, before, kv;
} case_of;

/* Tables: pages of the sequences one after another; tiles of their query rows. */
static int lay_tables(bench *b, const case_of *c, mr_gpu_attn *a, size_t *used) {
  int pages = (c->before + c->n + MR_GPU_PAGE - 1) / MR_GPU_PAGE, rows = c->n * a->group;
  int each = MR_GPU_ROWS * a->warps, tiles = (rows + each - 1) / each, at = 0;
  int32_t *table = mr_mem_alloc((size_t)(c->seqs * pages), sizeof *table);
  mr_gpu_tile *t = mr_mem_alloc((size_t)(c->seqs * tiles), sizeof *t);
  void *table_at = room(b, used, (size_t)(c->seqs * pages) * sizeof *table);
  void *tiles_at = room(b, used, (size_t)(c->seqs * tiles) * sizeof *t);
  if (!table || !t)
    b->rc = MR_E_NOMEM;
  for (int i = 0; i < c->seqs * pages && table; i++)
    table[i] = i;
  for (int s = 0; s < c->seqs && t; s++)
    for (int first = 0; first < rows; first += each)
      t[at++] = (mr_gpu_tile){.row = s * c->n,
                              .pos = c->before,
                              .first = first,
                              .n = rows - first < each ? rows - first : each,
                              .table = s * pages};
  if (table && t) {
    upload(b, table_at, table, (size_t)(c->seqs * pages) * sizeof *table);
    upload(b, tiles_at, t, (size_t)at * sizeof *t);
  }
  mr_mem_free(table);
  mr_mem_free(t);
  a->table = table_at;
  a->tiles = tiles_at;
  a->splits = (pages * MR_GPU_PAGE + MR_GPU_SPLIT - 1) / MR_GPU_SPLIT;
  return at;
}

static void attention(bench *b, const case_of *c) {
  size_t used = 0, part = mr_kv_part_bytes((mr_kv_type)c->kv, b->z.dim);
  size_t ld = (size_t)(b->z.heads * b->z.dim), tokens = (size_t)(c->seqs * c->n);
  int pages = c->seqs * ((c->before + c->n + MR_GPU_PAGE - 1) / MR_GPU_PAGE);
  mr_gpu_attn a = {.ld_q = ld,
                   .ld_out = ld,
                   .page_bytes = 2 * (size_t)b->z.kv_heads * part,
                   .part_bytes = part,
                   .scale = 0.1f,
                   .reach = 60,
                   .group = b->z.heads / b->z.kv_heads,
                   .head_dim = b->z.dim,
                   .kv = c->kv};
  a.warps = c->n * a.group > MR_GPU_ROWS ? MR_GPU_WARPS : 1;
  a.q = room(b, &used, tokens * ld * sizeof(float));
  a.out = room(b, &used, tokens * ld * sizeof(float));
  a.pages = room(b, &used, (size_t)pages * a.page_bytes);
  int tiles = lay_tables(b, c, &a, &used);
  mr_gpu_attn_fit(&a, false, b->d->shared_bytes);
  a.ys = b->z.kv_heads * a.chunks;
  a.redo = room(b, &used, (size_t)(tiles * a.ys * MR_GPU_ROWS * a.warps) * sizeof *a.redo);
  work w = {.kernel = MR_GPU_attn_uni_bf16,
            .grid = {.blocks = {(uint32_t)tiles, (uint32_t)a.ys, 1},
                     .warps = (uint32_t)a.warps,
                     .shared = a.at.bytes},
            .args = &a};
  char shape[120];
  snprintf(shape, sizeof shape, "%s: %d sequences, %d new tokens after %d, kv %s", c->name, c->seqs,
           c->n, c->before, mr_kv_type_name((mr_kv_type)c->kv));
  double keys = c->before + (c->n + 1) / 2.0;
  figure(b, "attn_uni_bf16", shape, &w, 4.0 * keys * (double)tokens * b->z.heads * b->z.dim,
         (double)pages * (double)a.page_bytes + 2.0 * (double)(tokens * ld) * 4);
}

/* ---------------------------------------------------------------- passes over rows */

static void passes(bench *b) {
  size_t used = 0, k = (size_t)b->z.k, m = (size_t)b->z.rows;
  char shape[80];
  mr_gpu_pack p = {
      .ld = k, .cols = b->z.k, .k = b->z.k, .norm = {.kind = MR_GPU_NORM_RMS, .eps = 1e-5f}};
  p.x = room(b, &used, m * k * sizeof(float));
  p.out = room(b, &used, m * k * sizeof *p.out);
  snprintf(shape, sizeof shape, "%d rows of %d", b->z.rows, b->z.k);
  work w = {.kernel = MR_GPU_pack,
            .grid = {.blocks = {(uint32_t)m, 1, 1},
                     .warps = MR_GPU_WARPS,
                     .shared = MR_GPU_REDUCE_SHARED},
            .args = &p};
  figure(b, "pack", shape, &w, 0, (double)(m * k) * 6);
  mr_gpu_rows r = {.t = p.x, .ld = k, .ld_t = k, .scale = 0.001f, .cols = b->z.k};
  r.x = room(b, &used, m * k * sizeof(float));
  w.kernel = MR_GPU_add;
  w.args = &r;
  figure(b, "add", shape, &w, 0, (double)(m * k) * 12);
  used = 0;
  size_t vocab = (size_t)b->z.vocab;
  mr_gpu_top t = {.ld = vocab, .cols = b->z.vocab};
  mr_gpu_ask *asks = mr_mem_alloc(m, sizeof *asks);
  for (size_t i = 0; i < m && asks; i++)
    asks[i] = (mr_gpu_ask){.u = 0.5, .inverse = 1, .probe = -1};
  t.x = room(b, &used, m * vocab * sizeof(float));
  t.out = room(b, &used, m * sizeof *t.out);
  void *asks_at = room(b, &used, m * sizeof *asks);
  t.ask = asks_at;
  if (asks)
    upload(b, asks_at, asks, m * sizeof *asks);
  mr_mem_free(asks);
  snprintf(shape, sizeof shape, "%d rows of %d logits", b->z.rows, b->z.vocab);
  w = (work){.kernel = MR_GPU_top,
             .grid = {.blocks = {(uint32_t)m, 1, 1},
                      .warps = MR_GPU_TOP_WARPS,
                      .shared = MR_GPU_TOP_SHARED(b->z.vocab)},
             .args = &t};
  figure(b, "top", shape, &w, 0, (double)(m * vocab) * 4);
}

/* ---------------------------------------------------------------- all of it */

static size_t most_room(const sizes *z) {
  size_t k = (size_t)z->k, n = (size_t)z->n, m = (size_t)mr_gemm_padded(4 * z->rows);
  size_t product_bytes = 4 * m * k + 5 * n * k + 4 * m * n;
  size_t tokens = (size_t)(z->seqs > z->prompt ? z->seqs : z->prompt);
  size_t keys = (size_t)(z->seqs * (z->keys + 64) + z->prompt + 64);
  size_t attention_bytes = tokens * (size_t)(z->heads * z->dim) * 16 +
                           keys * (size_t)(z->kv_heads * z->dim) * 5 + ((size_t)16 << 20);
  size_t logits = (size_t)z->rows * (size_t)z->vocab * 4;
  size_t most = product_bytes > attention_bytes ? product_bytes : attention_bytes;
  most = most > logits ? most : logits;
  return (most > 2 * z->copy ? most : 2 * z->copy) + ((size_t)1 << 20);
}

static void measure(bench *b, json_t *out) {
  fill(b);
  double up = copy_rate(b, MR_TO_DEVICE), down = copy_rate(b, MR_TO_HOST);
  b->copy_rate = 2 * copy_rate(b, MR_ON_DEVICE); /* it reads and it writes */
  fill(b);
  b->peak = peak_rate(b);
  fill(b);
  if (b->rc)
    return;
  json_object_set_new(out, "to_device_gbytes_per_s", json_real(up / 1e9));
  json_object_set_new(out, "to_host_gbytes_per_s", json_real(down / 1e9));
  json_object_set_new(out, "memory_gbytes_per_s", json_real(b->copy_rate / 1e9));
  json_object_set_new(out, "matrix_tflops", json_real(b->peak / 1e12));
  for (int hold = MR_GPU_BF16; hold <= MR_GPU_INT4; hold++)
    for (int m = 1; m <= 4 * b->z.rows; m *= m < 16 ? 16 : 4)
      product(b, (mr_gpu_hold)hold, m);
  static const int kv[] = {MR_KV_BF16, MR_KV_F16, MR_KV_INT8, MR_KV_FP8};
  for (size_t i = 0; i < sizeof kv / sizeof *kv; i++) {
    attention(b, &(case_of){"decode", b->z.seqs, 1, b->z.keys, kv[i]});
    attention(b, &(case_of){"prompt", 1, b->z.prompt, 0, kv[i]});
  }
  passes(b);
  if (b->d->gemm)
    json_object_set_new(out, "gemm_library", json_string(mr_device_gemm_words(b->d->gemm)));
}

/* A library that is not there is not an error. */
static void open_library(bench *b, json_t *out) {
  mr_err why = MR_ERR_INIT;
  if (mr_device_gemm_open(&b->d->gemm, b->d, &why))
    json_object_set_new(out, "gemm_library", json_string(why.text));
}

static json_t *describe(const mr_device *d) {
  return json_pack("{s:s, s:s, s:s, s:i, s:i, s:I, s:I, s:I, s:b}", "device", d->name, "model",
                   d->model, "arch", d->arch, "warp", d->warp, "units", d->units, "shared_bytes",
                   (json_int_t)d->shared_bytes, "memory_bytes", (json_int_t)d->memory_bytes,
                   "free_bytes", (json_int_t)d->free_bytes, "emulated",
                   !strncmp(d->name, "sim", 3));
}

static void print_page(const json_t *o) {
  size_t i;
  json_t *row;
  printf("%s: %s (%s)\n", json_string_value(json_object_get(o, "device")),
         json_string_value(json_object_get(o, "model")),
         json_string_value(json_object_get(o, "arch")));
  printf("copies to the device %.1f GB/s, to the host %.1f, on it %.1f; matrix instructions %.1f "
         "TFLOP/s\n",
         json_real_value(json_object_get(o, "to_device_gbytes_per_s")),
         json_real_value(json_object_get(o, "to_host_gbytes_per_s")),
         json_real_value(json_object_get(o, "memory_gbytes_per_s")),
         json_real_value(json_object_get(o, "matrix_tflops")));
  printf("GEMM library: %s\n", json_string_value(json_object_get(o, "gemm_library")));
  json_array_foreach(json_object_get(o, "kernels"), i, row) printf(
      "%-14s %-70s %10.1f us %8.1f GB/s %8.2f TFLOP/s %4.0f %% of %s\n",
      json_string_value(json_object_get(row, "kernel")),
      json_string_value(json_object_get(row, "shape")), json_real_value(json_object_get(row, "us")),
      json_real_value(json_object_get(row, "gbytes_per_s")),
      json_real_value(json_object_get(row, "tflops")),
      100 * json_real_value(json_object_get(row, "share")),
      json_string_value(json_object_get(row, "limit")));
}

mr_code mr_bench_device(const char *name, bool json, mr_err *err) {
  bench b = {.once = !strncmp(name, "sim", 3)};
  if (!mr_device_is_gpu(name))
    return mr_err_set(err, MR_E_USAGE, "bench device: name a GPU, not %s", name);
  b.z = b.once ? toy : real;
  b.room_bytes = most_room(&b.z);
  mr_code rc = mr_device_open(&b.d, name, b.room_bytes, err);
  if (rc)
    return rc;
  b.room = mr_device_take(b.d, b.room_bytes);
  b.rc = b.room ? b.d->ops->stream_new(b.d, &b.s) : MR_E_NOMEM;
  if (!b.rc)
    b.rc = b.d->ops->host_alloc(b.d, b.z.copy, (void **)&b.host);
  json_t *o = describe(b.d);
  b.list = json_array();
  if (!b.rc && o && b.list) {
    open_library(&b, o);
    measure(&b, o);
  }
  rc = mr_device_fail(b.d, b.rc, err);
  if (!rc && json_object_set(o, "kernels", b.list))
    rc = mr_err_set(err, MR_E_NOMEM, "out of memory");
  if (!rc && !json)
    print_page(o);
  else if (!rc && (json_dumpf(o, stdout, JSON_INDENT(2)) || fputc('\n', stdout) == EOF))
    rc = mr_err_errno(err, MR_E_IO, NULL, "cannot write to standard output");
  json_decref(b.list);
  json_decref(o);
  if (b.host)
    b.d->ops->host_release(b.d, b.host);
  b.d->ops->stream_free(b.d, b.s);
  mr_device_close(b.d);
  return rc;
}
