/* cmd_bench_kernels.c: see bench.h. Rates are the best of several short runs: other programs on the
 * machine only ever take away. */
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "io/mem.h"
#include "io/sys.h"
#include "jobs/bench.h"
#include "kernels/kernels.h"
#include "kernels/peak.h"
#include "kernels/pool.h"

#define RUN_SECONDS 0.1 /* for each figure */
#define LEAST_RUNS 3
#define COLD_BYTES (96 << 20) /* weights are walked through this much memory, as in a model */
#define MAX_M 512
#define MAX_M_HEAD 128 /* of the output head: more logits at once would not be asked for */
#define HEAD_N 16384

typedef struct bench {
  const mr_kernels *k;
  mr_pool *pool;
  int threads;
  double peak[MR_SCHEMES]; /* Gop/s of registers alone, int8 and bf16 */
  json_t *out;             /* NULL: print */
} bench;

/* Best rate of fn over runs that last RUN_SECONDS together, in 1e9 of `work` a second; *run (or
 * NULL) is the number of the run. */
static double best_rate(bench *b, mr_pool_fn fn, void *ctx, int items, double work, int *run) {
  double best = 0.0, begin = mr_sys_seconds(), t0 = begin;
  int runs = 0;
  do {
    if (run != NULL)
      ++*run;
    mr_pool_run(b->pool, fn, ctx, items);
    double t1 = mr_sys_seconds();
    if (t1 > t0 && work / (t1 - t0) > best)
      best = work / (t1 - t0);
    t0 = t1;
  } while (++runs < LEAST_RUNS || t0 - begin < RUN_SECONDS);
  return best / 1e9;
}

/* ------------------------------------------------------------------ peak */
typedef struct peak_job {
  double (*peak)(const mr_kernels *k, long loops);
  const mr_kernels *k;
  long loops;
} peak_job;

static void peak_item(void *ctx, int item, int worker) {
  (void)item, (void)worker;
  const peak_job *p = ctx;
  (void)p->peak(p->k, p->loops);
}

static double measure_peak(bench *b, double (*peak)(const mr_kernels *k, long loops)) {
  peak_job p = {peak, b->k, 200000};
  double work = peak(b->k, 1) * (double)p.loops * b->threads;
  double first = best_rate(b, peak_item, &p, b->threads, work, NULL);
  double again = best_rate(b, peak_item, &p, b->threads, work, NULL);
  return again > first ? again : first;
}

/* ------------------------------------------------------------------ GEMM */
typedef struct gemm_job {
  const mr_gemm_ops *o;
  float *y;
  size_t ldy; /* as in a step: no multiple of 4 KiB, or all rows would fall into a few cache sets */
  char *x, *w;
  size_t matrix_bytes;
  int m, n, k, panels, items, copies;
  int run; /* walks from matrix to matrix, so that weights are as cold as in a model */
} gemm_job;

static void gemm_item(void *ctx, int item, int worker) {
  (void)worker;
  const gemm_job *g = ctx;
  const char *w = g->w + (size_t)(g->run % g->copies) * g->matrix_bytes;
  int p0 = (int)((int64_t)g->panels * item / g->items);
  int p1 = (int)((int64_t)g->panels * (item + 1) / g->items);
  g->o->gemm(g->y, g->ldy, g->x, g->m, w, p0, p1, g->n, g->k, NULL, 0);
}

static int gemm_open(gemm_job *g, bench *b, mr_scheme scheme, int k, int n) {
  const mr_gemm_ops *o = &b->k->gemm[scheme];
  *g = (gemm_job){.o = o, .n = n, .k = k, .panels = (n + o->nr - 1) / o->nr};
  g->ldy = (size_t)n % 1024 == 0 ? (size_t)n + 16 : (size_t)n;
  g->matrix_bytes = (size_t)g->panels * o->panel_bytes(k);
  g->copies = (int)(COLD_BYTES / g->matrix_bytes) + 1;
  g->items = 4 * b->threads < g->panels ? 4 * b->threads : g->panels;
  g->w = mr_mem_pages((size_t)g->copies * g->matrix_bytes);
  g->x = mr_mem_pages(o->row_bytes(k) * MAX_M);
  size_t rows_y = n > HEAD_N ? MAX_M_HEAD : MAX_M;
  g->y = mr_mem_pages(rows_y * g->ldy * sizeof *g->y);
  float *rows = mr_mem_alloc((size_t)o->nr * (size_t)k, sizeof *rows);
  if (g->y != NULL) /* memory that is touched for the first time is slow */
    memset(g->y, 0, rows_y * g->ldy * sizeof *g->y);
  if (g->w == NULL || g->x == NULL || g->y == NULL || rows == NULL) {
    mr_mem_free(rows);
    return -1;
  }
  for (int i = 0; i < o->nr * k; i++)
    rows[i] = (float)(i * 37 % 1001 - 500) * 1e-3f;
  for (int i = 0; i < MAX_M; i++)
    o->pack_row(g->x + (size_t)i * o->row_bytes(k), rows + i % o->nr * k, k);
  o->pack_panel(g->w, rows, (size_t)k, o->nr, k);
  for (int i = 1; i < g->copies * g->panels; i++)
    memcpy(g->w + (size_t)i * o->panel_bytes(k), g->w, o->panel_bytes(k));
  mr_mem_free(rows);
  return 0;
}

static void gemm_close(gemm_job *g) {
  mr_mem_free(g->w);
  mr_mem_free(g->x);
  mr_mem_free(g->y);
}

static int bench_gemm(bench *b, mr_scheme scheme, const char *model, int k, int n) {
  static const int ms[] = {1, 8, 64, 128, 512};
  gemm_job g;
  int rc = gemm_open(&g, b, scheme, k, n);
  if (rc == 0 && b->out == NULL)
    printf("%-12s %5d -> %-7d", model, k, n);
  for (size_t i = 0; rc == 0 && i < sizeof ms / sizeof *ms; i++) {
    if (n > HEAD_N && ms[i] > MAX_M_HEAD)
      continue;
    g.m = ms[i];
    double rate = best_rate(b, gemm_item, &g, g.items, 2.0 * g.m * n * k, &g.run);
    if (b->out == NULL)
      printf(" %6.0f (%3.0f %%)", rate,
             b->peak[scheme] > 0.0 ? 100.0 * rate / b->peak[scheme] : 0.0);
    else
      rc =
          json_array_append_new(b->out, json_pack("{s:s, s:s, s:s, s:i, s:i, s:i, s:f}", "kernel",
                                                  "gemm", "scheme", mr_scheme_name(scheme), "model",
                                                  model, "k", k, "n", n, "m", ms[i], "gops", rate));
  }
  if (rc == 0 && b->out == NULL)
    printf("\n");
  gemm_close(&g);
  return rc;
}

/* ------------------------------------------------------------------ attention */
typedef struct attn_job {
  const mr_kernels *k;
  mr_attn a;
  int tokens;        /* of a run; 1: decode */
  size_t seq_floats; /* of q and out */
  uint8_t *scratch;  /* one part for each worker */
  size_t scratch_bytes;
} attn_job;

enum { ATTN_SEQUENCES = 32, ATTN_CONTEXT = 512, ATTN_PAGES = ATTN_CONTEXT / MR_KV_BLOCK };

/* item: sequence, tile of its run, kv head */
static void attn_item(void *ctx, int item, int worker) {
  const attn_job *j = ctx;
  mr_attn a = j->a;
  int heads = a.n_kv_heads, tiles = (j->tokens + MR_ATTN_TILE - 1) / MR_ATTN_TILE;
  int seq = item / heads / tiles, q0 = item / heads % tiles * MR_ATTN_TILE;
  int q1 = q0 + MR_ATTN_TILE < j->tokens ? q0 + MR_ATTN_TILE : j->tokens;
  a.q += (size_t)seq * j->seq_floats;
  a.out += (size_t)seq * j->seq_floats;
  a.pages += (size_t)seq * ATTN_PAGES;
  j->k->attention(&a, item % heads, q0, q1, j->scratch + (size_t)worker * j->scratch_bytes);
}

static int report_attention(bench *b, const char *model, const char *what, double rate) {
  if (b->out == NULL)
    return printf("%-12s attention, %-8s %6.0f Gop/s\n", model, what, rate) < 0 ? -1 : 0;
  return json_array_append_new(b->out, json_pack("{s:s, s:s, s:s, s:f}", "kernel", "attention",
                                                 "model", model, "phase", what, "gops", rate));
}

static int run_attention(bench *b, attn_job *j, const char *model) {
  mr_attn *a = &j->a;
  double pair = 4.0 * a->head_dim * a->n_heads; /* operations for one query and key */
  j->tokens = 1;
  a->n_q = 1, a->pos0 = ATTN_CONTEXT - 1;
  double rate = best_rate(b, attn_item, j, ATTN_SEQUENCES * a->n_kv_heads,
                          pair * ATTN_CONTEXT * ATTN_SEQUENCES, NULL);
  if (report_attention(b, model, "decode", rate) != 0)
    return -1;
  j->tokens = ATTN_CONTEXT;
  a->n_q = ATTN_CONTEXT, a->pos0 = 0;
  rate = best_rate(b, attn_item, j, ATTN_CONTEXT / MR_ATTN_TILE * a->n_kv_heads,
                   pair * ATTN_CONTEXT * (ATTN_CONTEXT + 1) / 2.0, NULL);
  return report_attention(b, model, "prefill", rate);
}

static int bench_attention(bench *b, const char *model, int heads, int kv_heads, int dim) {
  attn_job j = {.k = b->k};
  size_t part = mr_kv_part_bytes(MR_KV_F16, dim), page = 2 * part * (size_t)kv_heads;
  j.seq_floats = (size_t)heads * (size_t)dim;
  j.scratch_bytes = mr_attn_scratch(heads, kv_heads, dim);
  size_t floats = j.seq_floats * ATTN_CONTEXT;
  uint8_t *memory = mr_mem_pages(page * ATTN_PAGES * ATTN_SEQUENCES);
  float *q = mr_mem_pages(2 * floats * sizeof *q);
  const uint8_t **pages = mr_mem_alloc(ATTN_PAGES * ATTN_SEQUENCES, sizeof *pages);
  j.scratch = mr_mem_pages(j.scratch_bytes * (size_t)b->threads);
  int rc = memory != NULL && q != NULL && pages != NULL && j.scratch != NULL ? 0 : -1;
  if (rc == 0) {
    for (size_t i = 0; i < ATTN_PAGES * ATTN_SEQUENCES; i++)
      pages[i] = memory + i * page;
    for (size_t i = 0; i < floats; i++)
      q[i] = (float)(i * 37 % 1001) * 1e-3f;
    j.a = (mr_attn){.q = q,
                    .q_ld = j.seq_floats,
                    .out = q + floats,
                    .out_ld = j.seq_floats,
                    .n_heads = heads,
                    .n_kv_heads = kv_heads,
                    .head_dim = dim,
                    .type = MR_KV_F16,
                    .pages = pages,
                    .scale = 0.1f};
    rc = run_attention(b, &j, model);
  }
  mr_mem_free(memory);
  mr_mem_free(q);
  mr_mem_free(pages);
  mr_mem_free(j.scratch);
  return rc;
}

/* ------------------------------------------------------------------ all of it */
static int bench_gemms(bench *b, mr_scheme scheme) {
  static const struct {
    const char *model;
    int k, n;
  } shapes[] = {{"SmolLM2-135M", 576, 576},   {"SmolLM2-135M", 576, 192},
                {"SmolLM2-135M", 576, 1536},  {"SmolLM2-135M", 1536, 576},
                {"SmolLM2-135M", 576, 49152}, {"Gemma3-270M", 640, 1024},
                {"Gemma3-270M", 640, 256},    {"Gemma3-270M", 640, 2048},
                {"Gemma3-270M", 2048, 640},   {"Gemma3-270M", 640, 262144}};
  int rc = 0;
  if (b->out == NULL)
    printf("%s, %d threads: %s peak of registers %.0f Gop/s; GEMM in Gop/s at M = 1, 8, 64, 128, "
           "512\n",
           b->k->name, b->threads, mr_scheme_name(scheme), b->peak[scheme]);
  for (size_t i = 0; rc == 0 && i < sizeof shapes / sizeof *shapes; i++)
    rc = bench_gemm(b, scheme, shapes[i].model, shapes[i].k, shapes[i].n);
  return rc;
}

static int bench_all(bench *b) {
  int rc = bench_gemms(b, MR_SCHEME_I8);
  if (rc == 0 && b->k->floats == MR_SCHEME_BF16)
    rc = bench_gemms(b, MR_SCHEME_BF16);
  if (rc == 0)
    rc = bench_attention(b, "SmolLM2-135M", 9, 3, 64);
  if (rc == 0)
    rc = bench_attention(b, "Gemma3-270M", 4, 1, 256);
  return rc;
}

int mr_bench_kernels(bool json) {
  bench b = {.k = mr_kernels_best(), .threads = mr_pool_cpus()};
  if (b.k == NULL || (b.pool = mr_pool_new(b.threads, 0)) == NULL)
    return -1;
  if (json && (b.out = json_array()) == NULL) {
    mr_pool_free(b.pool);
    return -1;
  }
  b.peak[MR_SCHEME_I8] = measure_peak(&b, mr_peak_int8);
  b.peak[MR_SCHEME_BF16] = measure_peak(&b, mr_peak_bf16);
  int rc = bench_all(&b);
  if (rc == 0 && json) {
    json_t *all = json_pack("{s:s, s:i, s:f, s:f, s:O}", "isa", b.k->name, "threads", b.threads,
                            "int8_peak_gops", b.peak[MR_SCHEME_I8], "bf16_peak_gops",
                            b.peak[MR_SCHEME_BF16], "kernels", b.out);
    rc = all != NULL && json_dumpf(all, stdout, JSON_INDENT(1)) == 0 && putchar('\n') != EOF ? 0
                                                                                             : -1;
    json_decref(all);
  }
  json_decref(b.out);
  mr_pool_free(b.pool);
  return rc;
}
