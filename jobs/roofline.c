#include "jobs/roofline.h"

#include <stdbool.h>

#include "io/mem.h"
#include "io/sys.h"
#include "kernels/peak.h"
#include "kernels/pool.h"

#define TRIAD_FLOATS ((size_t)8 << 20)
#define TRIAD_CHUNKS 64
#define GEMM_M 64 /* activations and weights of one thread stay in its second-level cache */
#define GEMM_N 256
#define GEMM_K 1024
#define ROUNDS 3
#define PEAK_LOOPS 200000L
#define MOMENT_S 0.02

typedef struct triad {
  float *a;
  const float *b, *c;
} triad;

static void triad_chunk(void *ctx, int item, int worker) {
  const triad *t = ctx;
  (void)worker;
  size_t n = TRIAD_FLOATS / TRIAD_CHUNKS, from = (size_t)item * n;
  for (size_t i = from; i < from + n; i += 16)
    for (size_t j = i; j < i + 16; j++)
      t->a[j] = t->b[j] + 3 * t->c[j];
}

static mr_code measure_bytes(mr_pool *pool, double seconds, double *rate, mr_err *err) {
  float *mem = mr_mem_pages(3 * TRIAD_FLOATS * sizeof *mem);
  if (!mem)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for the bandwidth measurement");
  triad t = {mem, mem + TRIAD_FLOATS, mem + 2 * TRIAD_FLOATS};
  double until = mr_sys_seconds() + seconds, now = 0;
  for (int round = 0; round < ROUNDS || now < until; round++) {
    double start = mr_sys_seconds();
    mr_pool_run(pool, triad_chunk, &t, TRIAD_CHUNKS);
    now = mr_sys_seconds();
    double r = 3.0 * TRIAD_FLOATS * sizeof *mem / (now - start);
    *rate = r > *rate ? r : *rate;
  }
  mr_mem_free(mem);
  return MR_OK;
}

typedef struct gemm_load {
  const mr_gemm_ops *g;
  const uint8_t *x, *w; /* packed; shared by all */
  float *y;             /* [threads, GEMM_M, GEMM_N] */
  int repeats;
} gemm_load;

static void gemm_item(void *ctx, int item, int worker) {
  const gemm_load *l = ctx;
  int panels = (GEMM_N + l->g->nr - 1) / l->g->nr;
  (void)worker;
  for (int i = 0; i < l->repeats; i++)
    l->g->gemm(l->y + (size_t)item * GEMM_M * GEMM_N, GEMM_N, l->x, GEMM_M, l->w, 0, panels, GEMM_N,
               GEMM_K, NULL, 0);
}

static void time_gemm(mr_pool *pool, gemm_load *l, double seconds, double *rate) {
  int threads = mr_pool_threads(pool);
  double ops = 2.0 * GEMM_M * GEMM_N * GEMM_K * threads, until = mr_sys_seconds() + seconds;
  double now = 0;
  for (int round = 0; round < ROUNDS || now < until; round++) {
    double start = mr_sys_seconds();
    mr_pool_run(pool, gemm_item, l, threads);
    now = mr_sys_seconds();
    double r = ops * l->repeats / (now - start);
    *rate = r > *rate ? r : *rate;
    if (now - start < 1e-3)
      l->repeats *= 2; /* long enough for the clock and for waking the team */
  }
}

static mr_code measure_ops(mr_pool *pool, const mr_gemm_ops *g, double seconds, double *rate,
                           mr_err *err) {
  size_t panels = (GEMM_N + (size_t)g->nr - 1) / (size_t)g->nr;
  size_t out = (size_t)mr_pool_threads(pool) * GEMM_M * GEMM_N;
  uint8_t *x = mr_mem_pages(GEMM_M * g->row_bytes(GEMM_K));
  uint8_t *w = mr_mem_pages(panels * g->panel_bytes(GEMM_K));
  float *y = mr_mem_pages(out * sizeof *y);
  float *src = mr_mem_alloc((size_t)g->nr * GEMM_K, sizeof *src);
  mr_code rc = x && w && y && src ? MR_OK : MR_E_NOMEM;
  if (rc)
    mr_err_set(err, rc, "out of memory for the GEMM measurement");
  for (size_t i = 0; !rc && i < (size_t)g->nr * GEMM_K; i++)
    src[i] = (float)(i * 37 % 201) / 100 - 1;
  for (size_t p = 0; !rc && p < panels; p++)
    g->pack_panel(w + p * g->panel_bytes(GEMM_K), src, GEMM_K, g->nr, GEMM_K);
  for (size_t m = 0; !rc && m < GEMM_M; m++)
    g->pack_row(x + m * g->row_bytes(GEMM_K), src + m % (size_t)g->nr * GEMM_K, GEMM_K);
  gemm_load load = {g, x, w, y, 1};
  if (!rc)
    time_gemm(pool, &load, seconds, rate);
  mr_mem_free(x);
  mr_mem_free(w);
  mr_mem_free(y);
  mr_mem_free(src);
  return rc;
}

mr_code mr_roofline_measure(const mr_kernels *k, int threads, unsigned schemes, double seconds,
                            mr_roofline *out, mr_err *err) {
  *out = (mr_roofline){.threads = threads > 0 ? threads : mr_pool_cpus()};
  mr_pool *pool = mr_pool_new(out->threads, 0);
  if (!pool)
    return mr_err_set(err, MR_E_UNAVAILABLE, "%d threads could not be had", out->threads);
  mr_code rc = measure_bytes(pool, seconds, &out->bytes_per_s, err);
  for (int s = 0; s < MR_SCHEMES && !rc; s++)
    if (schemes >> s & 1 && k->gemm[s].gemm)
      rc = measure_ops(pool, &k->gemm[s], seconds, &out->ops_per_s[s], err);
  mr_pool_free(pool);
  return rc;
}

double mr_roofline_ops(mr_scheme scheme, int threads) {
  mr_roofline r;
  mr_err ignored = MR_ERR_INIT;
  const mr_kernels *k = mr_kernels_best();
  if (!k || mr_roofline_measure(k, threads, 1u << scheme, MOMENT_S, &r, &ignored))
    return 0;
  return r.ops_per_s[scheme];
}

typedef struct peak_load {
  const mr_kernels *k;
  long loops;
} peak_load;

static void peak_item(void *ctx, int item, int worker) {
  const peak_load *l = ctx;
  (void)item, (void)worker;
  (void)mr_peak_int8(l->k, l->loops);
}

mr_code mr_roofline_int8_peak(const mr_kernels *k, int threads, double seconds, double *ops_per_s,
                              mr_err *err) {
  int n = threads > 0 ? threads : mr_pool_cpus();
  mr_pool *pool = mr_pool_new(n, 0);
  *ops_per_s = 0;
  if (!pool)
    return mr_err_set(err, MR_E_UNAVAILABLE, "%d threads could not be had", n);
  peak_load l = {k, PEAK_LOOPS};
  double work = mr_peak_int8(k, 1) * (double)l.loops * n, until = mr_sys_seconds() + seconds;
  for (double now = 0; work > 0 && now < until;) {
    double start = mr_sys_seconds();
    mr_pool_run(pool, peak_item, &l, n);
    now = mr_sys_seconds();
    double r = work / (now - start);
    *ops_per_s = r > *ops_per_s ? r : *ops_per_s;
  }
  mr_pool_free(pool);
  return MR_OK;
}

double mr_roofline_balance(double ops_per_s, double bytes_per_s, double weight_bytes,
                           double flops_per_token) {
  bool known = ops_per_s > 0 && bytes_per_s > 0 && weight_bytes > 0 && flops_per_token > 0;
  return known ? weight_bytes / bytes_per_s * ops_per_s / flops_per_token : 0;
}
