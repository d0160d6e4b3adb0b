#include "jobs/estimate.h"

#include <string.h>

#include "io/mem.h"
#include "io/sys.h"
#include "kernels/kernels.h"
#include "kernels/pool.h"

#define K 2048 /* the measured GEMM: [M, K] times [PANELS * nr, K], split by panels */
#define M 64
#define PANELS 64
#define GEMM_S 0.2 /* length of the measurement */
#define READ_BYTES (64u << 20)
#define READ_PIECES 64
#define READ_ROUNDS 4

typedef struct probe {
  const mr_gemm_ops *ops;
  uint8_t *x, *w;
  float *values; /* nr * K */
  float *y;
  const uint8_t *bytes;
  uint64_t sums[READ_PIECES];
} probe;

static void one_panel(void *ctx, int item, int worker) {
  (void)worker;
  const probe *p = ctx;
  int n = PANELS * p->ops->nr;
  p->ops->gemm(p->y, (size_t)n, p->x, M, p->w, item, item + 1, n, K, NULL, 0);
}

static void one_piece(void *ctx, int item, int worker) {
  (void)worker;
  probe *p = ctx;
  const size_t n = READ_BYTES / READ_PIECES;
  const uint8_t *at = p->bytes + (size_t)item * n;
  uint64_t sum[4] = {0};
  for (size_t i = 0; i < n; i += 32)
    for (int k = 0; k < 4; k++) {
      uint64_t v;
      memcpy(&v, at + i + 8 * k, 8);
      sum[k] += v;
    }
  p->sums[item] += sum[0] + sum[1] + sum[2] + sum[3];
}

static void pack_one(void *ctx, int item, int worker) {
  (void)worker;
  const probe *p = ctx;
  p->ops->pack_panel(p->w + p->ops->panel_bytes(K) * (size_t)item, p->values, K, p->ops->nr, K);
}

/* Room for rows and panels, and some ordinary numbers to fill them with. False: out of memory. */
static bool prepare(probe *p) {
  size_t panel = p->ops->panel_bytes(K), row = p->ops->row_bytes(K);
  int nr = p->ops->nr;
  float *values = p->values = mr_mem_alloc((size_t)nr * K, sizeof *values);
  p->x = mr_mem_pages(row * M);
  p->w = mr_mem_pages(panel * PANELS);
  p->y = mr_mem_pages(sizeof(float) * M * PANELS * (size_t)nr);
  bool ok = values && p->x && p->w && p->y;
  for (int i = 0; ok && i < nr * K; i++)
    values[i] = (float)(i % 251 - 125) / 64;
  for (int i = 0; ok && i < M; i++)
    p->ops->pack_row(p->x + row * (size_t)i, values, K);
  return ok;
}

static double pack_rate(probe *p, mr_pool *pool) {
  mr_pool_run(pool, pack_one, p, PANELS); /* touches the pages */
  double began = mr_sys_seconds();
  mr_pool_run(pool, pack_one, p, PANELS);
  return (double)p->ops->panel_bytes(K) * PANELS / (mr_sys_seconds() - began);
}

static double gemm_rate(probe *p, mr_pool *pool) {
  double flops = 0, began, now;
  mr_pool_run(pool, one_panel, p, PANELS); /* warm */
  began = now = mr_sys_seconds();
  while (now - began < GEMM_S) {
    mr_pool_run(pool, one_panel, p, PANELS);
    flops += 2.0 * M * K * PANELS * p->ops->nr;
    now = mr_sys_seconds();
  }
  return flops / (now - began);
}

static double read_rate(probe *p, mr_pool *pool) {
  mr_pool_run(pool, one_piece, p, READ_PIECES);
  double began = mr_sys_seconds();
  for (int i = 0; i < READ_ROUNDS; i++)
    mr_pool_run(pool, one_piece, p, READ_PIECES);
  return (double)READ_BYTES * READ_ROUNDS / (mr_sys_seconds() - began);
}

static mr_code measure(const mr_engine_opts *o, int threads, mr_estimate *out, mr_err *err) {
  const mr_kernels *k = mr_kernels_best();
  if (!k)
    return mr_err_set(err, MR_E_UNAVAILABLE, "no kernels for this CPU (is MILLRACE_ISA right?)");
  probe p = {.ops = &k->gemm[o->compute == MR_COMPUTE_EXACT ? MR_SCHEME_F32 : MR_SCHEME_I8]};
  uint8_t *bytes = mr_mem_pages(READ_BYTES);
  mr_pool *pool = mr_pool_new(threads, o->pin);
  mr_code rc = MR_OK;
  if (!bytes || !pool || !prepare(&p)) {
    rc = mr_err_set(err, MR_E_NOMEM, "out of memory for the measurement");
  } else {
    memset(bytes, 1, READ_BYTES); /* pages that were never written are all one page */
    p.bytes = bytes;
    out->pack_bytes_per_s = pack_rate(&p, pool); /* fills the panels for the GEMM */
    out->gemm_flops_per_s = gemm_rate(&p, pool);
    out->memory_bytes_per_s = read_rate(&p, pool);
  }
  if (pool)
    mr_pool_free(pool);
  mr_mem_free(p.values);
  mr_mem_free(p.x);
  mr_mem_free(p.w);
  mr_mem_free(p.y);
  mr_mem_free(bytes);
  return rc;
}

/* Rows in flight: the most that the limits allow, and which limit that is. */
static void choose_batch(const mr_engine_info *info, const mr_workload *w, mr_estimate *e) {
  double rows = w->rows > 0 ? (double)w->rows : 1;
  double whole = ((double)w->prompt_tokens + (double)w->output_tokens) / rows + 1;
  double by_kv = (double)info->kv_tokens / whole;
  e->batch = info->max_batch;
  e->bound_by = "memory-bandwidth";
  if (by_kv < e->batch) {
    e->batch = by_kv < 1 ? 1 : by_kv;
    e->bound_by = "kv-memory";
  }
  if (rows < e->batch) {
    e->batch = rows;
    e->bound_by = "rows";
  }
}

static void predict(const mr_engine_info *info, const mr_workload *w, mr_estimate *e) {
  double rows = w->rows > 0 ? (double)w->rows : 1, out = (double)w->output_tokens;
  double length = (double)w->prompt_tokens / rows + out / rows / 2; /* mean while a row decodes */
  choose_batch(info, w, e);
  double compute = e->batch * info->flops_per_output_token / e->gemm_flops_per_s;
  double weights = (double)info->packed_bytes / e->memory_bytes_per_s;
  double kv = e->batch * length * (double)info->kv_bytes_per_token / e->memory_bytes_per_s;
  e->load_s = (double)info->packed_bytes / e->pack_bytes_per_s;
  e->prefill_s = (double)w->prompt_tokens * info->flops_per_prompt_token / e->gemm_flops_per_s;
  e->decode_s = out / e->batch * ((compute > weights ? compute : weights) + kv);
  e->seconds = e->load_s + e->prefill_s + e->decode_s;
  if (e->prefill_s > e->decode_s || (compute >= weights && compute >= kv))
    e->bound_by = "compute";
}

mr_code mr_estimate_run(const mr_engine_info *info, const mr_engine_opts *opts,
                        const mr_workload *w, mr_estimate *out, mr_err *err) {
  *out = (mr_estimate){0};
  mr_code rc = measure(opts, info->threads, out, err);
  if (rc == MR_OK)
    predict(info, w, out);
  return rc;
}
