/* Kernels of kernels/gpu but attention, on every emulated machine and in every order of threads,
 * against plain C in double. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "src/gpu_few.h"
#include "tests/unit/gpu_rig.h"

static mr_grid rig_rows(int rows) {
  return (mr_grid){
      .blocks = {(uint32_t)rows, 1, 1}, .warps = MR_GPU_WARPS, .shared = MR_GPU_REDUCE_SHARED};
}

static int padded(int k) {
  return (k + MR_GPU_K - 1) / MR_GPU_K * MR_GPU_K;
}

/* ------------------------------------------------------------------ products */

typedef struct problem {
  int m, n, k;
  mr_gpu_hold kind;
  double *a, *w; /* [m, k], [n, k]: the numbers as they are held */
  float *bias, *y0;
  mr_gpu_gemm args;
} problem;

/* x rounded to one bfloat16 or two, into the planes. */
static double hold(float x, mr_gpu_bf16 *at, size_t plane) {
  at[0] = mr_f32_to_bf16(x);
  double held = mr_bf16_to_f32(at[0]);
  if (plane) {
    at[plane] = mr_f32_to_bf16(x - (float)held);
    held += mr_bf16_to_f32(at[plane]);
  }
  return held;
}

static void *hold_matrix(rig *r, double *to, int rows, int k, bool pair, size_t *plane) {
  size_t size = (size_t)rows * (size_t)padded(k);
  mr_gpu_bf16 *x = mr_mem_alloc(2 * size, sizeof *x);
  assert_non_null(x);
  *plane = pair ? size : 0;
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < k; j++)
      to[i * k + j] = hold(uniform(), x + (size_t)i * (size_t)padded(k) + (size_t)j, *plane);
  void *at = rig_put(r, x, (pair ? 2 : 1) * size * sizeof *x);
  mr_mem_free(x);
  return at;
}

/* What the kernel makes of value j of a row, before it is rounded. */
static float few_value(mr_gpu_hold hold, const uint8_t *w, const uint16_t *scales, float unit,
                       int j) {
  int g = j / MR_GPU_GROUP;
  if (hold == MR_GPU_INT8)
    return (float)(int8_t)w[j] * (mr_f16_to_f32(scales[g]) * unit);
  return fmaf((float)(w[j / 2] >> (j % 2 * 4) & 15), mr_f16_to_f32(scales[2 * g]) * unit,
              mr_f16_to_f32(scales[2 * g + 1]) * unit);
}

typedef struct few_host {
  uint8_t *w;
  uint16_t *scales;
  float *units;
  size_t row, scale_row; /* bytes */
} few_host;

static few_host few_new(mr_gpu_hold hold, int n, int k) {
  few_host f = {.row = mr_gpu_few_bytes(hold, (size_t)k),
                .scale_row = mr_gpu_few_scale_bytes(hold, (size_t)k)};
  f.w = mr_mem_alloc((size_t)n, f.row);
  f.scales = mr_mem_alloc((size_t)n, f.scale_row);
  f.units = mr_mem_alloc((size_t)n, sizeof *f.units);
  assert_true(f.w && f.scales && f.units);
  return f;
}

static mr_gpu_few few_put(rig *r, const few_host *f, int n) {
  return (mr_gpu_few){.w = rig_put(r, f->w, (size_t)n * f->row),
                      .scales = rig_put(r, f->scales, (size_t)n * f->scale_row),
                      .units = rig_put(r, f->units, (size_t)n * sizeof *f->units)};
}

static void few_free(few_host *f) {
  mr_mem_free(f->w);
  mr_mem_free(f->scales);
  mr_mem_free(f->units);
}

/* Random rows, held in few bits; to: what they are held as, rounded or not. */
static mr_gpu_few hold_few(rig *r, mr_gpu_hold hold, double *to, int n, int k, bool round) {
  few_host f = few_new(hold, n, padded(k));
  float *row = random_floats((size_t)k, 0);
  for (int i = 0; i < n; i++) {
    uint16_t *scales = f.scales + (size_t)i * f.scale_row / 2;
    for (int j = 0; j < k; j++)
      row[j] = uniform() * ldexpf(1, i % 7 - 9);
    mr_gpu_few_row(hold, row, k, padded(k), f.w + (size_t)i * f.row, scales, f.units + i);
    for (int j = 0; j < k; j++) {
      float x = few_value(hold, f.w + (size_t)i * f.row, scales, f.units[i], j);
      to[i * k + j] = round ? (double)mr_bf16_to_f32(mr_f32_to_bf16(x)) : (double)x;
      close_to(r, "a weight of few bits", x, row[j], hold == MR_GPU_INT4 ? 0.017 : 0.001);
    }
  }
  mr_gpu_few at = few_put(r, &f, n);
  mr_mem_free(row);
  few_free(&f);
  return at;
}

static void problem_new(rig *r, problem *p, int m, int n, int k, mr_gpu_hold kind) {
  *p = (problem){.m = m, .n = n, .k = k, .kind = kind};
  p->a = mr_mem_alloc((size_t)(m * k), sizeof *p->a);
  p->w = mr_mem_alloc((size_t)(n * k), sizeof *p->w);
  p->bias = random_floats((size_t)n, 1);
  p->y0 = random_floats((size_t)(m * n), 1);
  assert_non_null(p->a);
  assert_non_null(p->w);
  p->args = (mr_gpu_gemm){.ld = (size_t)n, .m = m, .n = n, .k = padded(k)};
  p->args.a = hold_matrix(r, p->a, m, k, kind == MR_GPU_PAIR, &p->args.a_plane);
  if (kind >= MR_GPU_INT8)
    p->args.few = hold_few(r, kind, p->w, n, k, true);
  else
    p->args.w = hold_matrix(r, p->w, n, k, kind == MR_GPU_PAIR, &p->args.w_plane);
  p->args.bias = rig_put(r, p->bias, (size_t)n * sizeof(float));
}

static void problem_free(problem *p) {
  mr_mem_free(p->a);
  mr_mem_free(p->w);
  mr_mem_free(p->bias);
  mr_mem_free(p->y0);
}

static float *multiply(rig *r, const problem *p, int rows, int accumulate) {
  static const mr_gpu_kernel kernels[4][2] = {{MR_GPU_gemm16_bf16, MR_GPU_gemm64_bf16},
                                              {MR_GPU_gemm16_pair, MR_GPU_gemm64_pair},
                                              {MR_GPU_gemm16_int8, MR_GPU_gemm64_int8},
                                              {MR_GPU_gemm16_int4, MR_GPU_gemm64_int4}};
  size_t bytes = (size_t)(p->m * p->n) * sizeof(float);
  mr_gpu_gemm a = p->args;
  a.y = rig_put(r, p->y0, bytes);
  a.accumulate = accumulate;
  mr_grid grid = {.blocks = {(uint32_t)((p->n + 63) / 64), (uint32_t)((p->m + rows - 1) / rows), 1},
                  .warps = MR_GPU_WARPS,
                  .shared = MR_GPU_GEMM_SHARED(rows, p->kind)};
  rig_run(r, kernels[p->kind][rows == 64], grid, &a);
  float *y = mr_mem_alloc((size_t)(p->m * p->n), sizeof *y);
  assert_non_null(y);
  rig_get(r, y, a.y, bytes);
  return y;
}

/* Widened as a whole first: not a bit more or less. */
static void check_widened(rig *r, problem *p, const float *like) {
  mr_gpu_widen a = {.few = p->args.few,
                    .out = rig_new(r, (size_t)(p->n * p->args.k) * sizeof *a.out),
                    .k = p->args.k};
  rig_run(r, p->kind == MR_GPU_INT8 ? MR_GPU_widen_int8 : MR_GPU_widen_int4, rig_rows(p->n), &a);
  p->args.w = a.out;
  p->kind = MR_GPU_BF16;
  float *y = multiply(r, p, 64, 0);
  assert_memory_equal(y, like, (size_t)(p->m * p->n) * sizeof *y);
  mr_mem_free(y);
}

static void check_product(rig *r, int m, int n, int k, mr_gpu_hold kind) {
  problem p;
  problem_new(r, &p, m, n, k, kind);
  float *flat = multiply(r, &p, 16, 0), *tall = multiply(r, &p, 64, 0),
        *more = multiply(r, &p, 16, 1);
  assert_memory_equal(flat, tall, (size_t)(m * n) * sizeof *flat); /* no bit depends on the tile */
  for (int i = 0; i < m; i++)
    for (int j = 0; j < n; j++) {
      double sum = p.bias[j];
      for (int l = 0; l < k; l++)
        sum += p.a[i * k + l] * p.w[j * k + l];
      close_to(r, "a product", flat[i * n + j], sum, 1e-5 * k);
      close_to(r, "a sum", more[i * n + j], sum + (double)p.y0[i * n + j], 1e-5 * k);
    }
  if (kind >= MR_GPU_INT8)
    check_widened(r, &p, flat);
  mr_mem_free(flat);
  mr_mem_free(tall);
  mr_mem_free(more);
  problem_free(&p);
  rig_free_all(r);
}

static void products(rig *r) {
  static const int shapes[][3] = {{1, 1, 1}, {5, 70, 130}, {17, 64, 64}, {66, 20, 200}};
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
    for (int kind = MR_GPU_BF16; kind <= MR_GPU_INT4; kind++)
      check_product(r, shapes[i][0], shapes[i][1], shapes[i][2], (mr_gpu_hold)kind);
}

static void products_are_right(void **state) {
  (void)state;
  on_every_machine(products);
}

/* ------------------------------------------------------------------ rows */

#define ROWS 3
#define COLS 150

static double plain_act(int act, double x, const float *p) {
  switch (act) {
  case MR_GPU_SILU:
    return x / (1 + exp(-x));
  case MR_GPU_GELU:
    return 0.5 * x * (1 + erf(x / sqrt(2)));
  case MR_GPU_GELU_TANH:
    return 0.5 * x * (1 + tanh(0.7978845608 * x * (1 + 0.044715 * x * x)));
  case MR_GPU_RELU:
    return x > 0 ? x : 0;
  case MR_GPU_RELU2:
    return x > 0 ? x * x : 0;
  case MR_GPU_QUICK_GELU:
    return x / (1 + exp(-1.702 * x));
  default:
    return x > 0 ? p[0] * x * x + p[2] * x : (expm1(fmin(x, p[3])) - x) * p[1] + p[2] * x;
  }
}

static double plain_gate(int act, double x, double up, const float *p) {
  if (act != MR_GPU_CLAMPED)
    return plain_act(act, x, p) * up;
  double g = fmin(x, p[1]), u = fmax(-p[1], fmin(up, p[1]));
  return (u + 1) * g / (1 + exp(-p[0] * g));
}

static void plain_norm(double *y, const double *x, int n, int kind, const float *w, const float *b,
                       double eps) {
  double mean = 0, var = 0;
  for (int i = 0; i < n && kind == MR_GPU_NORM_LAYER; i++)
    mean += x[i] / n;
  for (int i = 0; i < n; i++)
    var += (x[i] - mean) * (x[i] - mean) / n;
  for (int i = 0; i < n; i++)
    y[i] = (x[i] - mean) / sqrt(var + eps) * (w ? w[i] : 1) + (b ? b[i] : 0);
}

typedef struct lines { /* of all tests of rows */
  float *x, *up, *w, *b;
  const float *x_at, *up_at, *w_at, *b_at;
} lines;

static void lines_new(rig *r, lines *l) {
  size_t n = ROWS * COLS;
  l->x = random_floats(n, 4);
  l->up = random_floats(n, 2);
  l->w = random_floats(COLS, 1);
  l->b = random_floats(COLS, 1);
  l->x_at = rig_put(r, l->x, n * sizeof(float));
  l->up_at = rig_put(r, l->up, n * sizeof(float));
  l->w_at = rig_put(r, l->w, COLS * sizeof(float));
  l->b_at = rig_put(r, l->b, COLS * sizeof(float));
}

static void lines_free(rig *r, lines *l) {
  mr_mem_free(l->x);
  mr_mem_free(l->up);
  mr_mem_free(l->w);
  mr_mem_free(l->b);
  rig_free_all(r);
}

/* Rows 2, 0, 1 through one activation and one norm. */
static void check_pack(rig *r, const lines *l, int act, int norm) {
  static const int32_t from[ROWS] = {2, 0, 1};
  static const float factor[ROWS] = {1, 0.5f, 2};
  enum { K = 192 };
  static mr_gpu_bf16 out[2 * ROWS * K];
  mr_gpu_pack a = {.x = l->x_at,
                   .up = l->up_at,
                   .ld = COLS,
                   .ld_up = COLS,
                   .out = rig_new(r, sizeof out),
                   .plane = ROWS * K,
                   .from = rig_put(r, from, sizeof from),
                   .factor = rig_put(r, factor, sizeof factor),
                   .norm = {.w = l->w_at, .b = l->b_at, .eps = 1e-5f, .kind = norm},
                   .act_p = {0.8f, 1.5f, 0.5f, -1e-6f},
                   .gate = act >= 0,
                   .act = act,
                   .cols = COLS,
                   .k = K};
  rig_run(r, MR_GPU_pack, rig_rows(ROWS), &a);
  rig_get(r, out, a.out, sizeof out);
  for (int i = 0; i < ROWS; i++) {
    double y[COLS];
    for (int c = 0; c < COLS; c++) {
      int at = from[i] * COLS + c;
      y[c] = act < 0 ? (double)l->x[at] : plain_gate(act, l->x[at], l->up[at], a.act_p);
    }
    if (norm)
      plain_norm(y, y, COLS, norm, l->w, l->b, 1e-5);
    for (int c = 0; c < K; c++) {
      double got = mr_bf16_to_f32(out[i * K + c]);
      double rest = mr_bf16_to_f32(out[ROWS * K + i * K + c]);
      double want = c < COLS ? y[c] * factor[i] : 0;
      close_to(r, "a packed value", got + rest, want, 3e-5 * (1 + fabs(want)));
    }
  }
}

static void packing(rig *r) {
  lines l;
  for (int act = -1; act <= MR_GPU_CLAMPED; act++) {
    lines_new(r, &l);
    check_pack(r, &l, act, act < 0 ? MR_GPU_NORM_LAYER : MR_GPU_NORM_NONE);
    check_pack(r, &l, act, MR_GPU_NORM_RMS);
    lines_free(r, &l);
  }
}

static void packing_is_right(void **state) {
  (void)state;
  on_every_machine(packing);
}

static void check_norm_and_add(rig *r, const lines *l, int norm) {
  size_t bytes = ROWS * COLS * sizeof(float);
  static float y[ROWS * COLS], z[ROWS * COLS];
  mr_gpu_rows a = {.x = rig_put(r, l->x, bytes),
                   .t = l->up_at,
                   .ld = COLS,
                   .ld_t = COLS,
                   .norm = {.w = l->w_at, .b = l->b_at, .eps = 1e-5f, .kind = norm},
                   .scale = 0.5f,
                   .cols = COLS};
  rig_run(r, MR_GPU_add, rig_rows(ROWS), &a);
  rig_get(r, y, a.x, bytes);
  a.x = rig_put(r, l->x, bytes);
  if (norm)
    rig_run(r, MR_GPU_norm, rig_rows(ROWS), &a);
  rig_get(r, z, a.x, bytes);
  for (int i = 0; i < ROWS; i++) {
    double t[COLS], x[COLS];
    for (int c = 0; c < COLS; c++) {
      t[c] = l->up[i * COLS + c];
      x[c] = l->x[i * COLS + c];
    }
    if (norm) {
      plain_norm(t, t, COLS, norm, l->w, l->b, 1e-5);
      plain_norm(x, x, COLS, norm, l->w, l->b, 1e-5);
    }
    for (int c = 0; c < COLS; c++) {
      close_to(r, "a branch joined", y[i * COLS + c], (double)l->x[i * COLS + c] + 0.5 * t[c],
               1e-5);
      close_to(r, "a norm", z[i * COLS + c], x[c], 1e-5);
    }
  }
}

static void check_rest(rig *r, const lines *l) {
  static float y[ROWS * COLS], gate[ROWS], mixed[2 * COLS];
  static const float weight[4] = {0.5f, 2, -1, 0.25f};
  static const int32_t slot[4] = {2, 0, 1, 2};
  mr_gpu_finish f = {
      .x = rig_put(r, l->x, sizeof y), .ld = COLS, .scale = 2, .cap = 3, .cols = COLS};
  rig_run(r, MR_GPU_finish, (mr_grid){.blocks = {1, ROWS, 1}, .warps = MR_GPU_WARPS}, &f);
  rig_get(r, y, f.x, sizeof y);
  for (int i = 0; i < ROWS * COLS; i++)
    close_to(r, "a softcap", y[i], 3 * tanh(2 * (double)l->x[i] / 3), 1e-5);
  mr_gpu_dot d = {.x = l->x_at,
                  .w = l->b_at,
                  .out = rig_new(r, sizeof gate),
                  .ld = COLS,
                  .norm = {.w = l->w_at, .eps = 1e-5f, .kind = MR_GPU_NORM_RMS},
                  .cols = COLS};
  rig_run(r, MR_GPU_dot, rig_rows(ROWS), &d);
  rig_get(r, gate, d.out, sizeof gate);
  for (int i = 0; i < ROWS; i++) {
    double x[COLS], sum = 0;
    for (int c = 0; c < COLS; c++)
      x[c] = l->x[i * COLS + c];
    plain_norm(x, x, COLS, MR_GPU_NORM_RMS, l->w, NULL, 1e-5);
    for (int c = 0; c < COLS; c++)
      sum += x[c] * l->b[c];
    close_to(r, "a gate", gate[i], 1 / (1 + exp(-sum)), 1e-5);
  }
  mr_gpu_mix m = {.out = rig_new(r, sizeof mixed),
                  .y = l->x_at,
                  .ld_out = COLS,
                  .ld_y = COLS,
                  .weight = rig_put(r, weight, sizeof weight),
                  .slot = rig_put(r, slot, sizeof slot),
                  .each = 2,
                  .cols = COLS};
  rig_run(r, MR_GPU_mix, rig_rows(2), &m);
  rig_get(r, mixed, m.out, sizeof mixed);
  for (int i = 0; i < 2 * COLS; i++) {
    const int32_t *s = slot + i / COLS * 2;
    const float *w = weight + i / COLS * 2, *x = l->x + i % COLS;
    close_to(r, "a mix", mixed[i], (double)w[0] * x[s[0] * COLS] + (double)w[1] * x[s[1] * COLS],
             1e-5);
  }
}

static void check_embed(rig *r, mr_gpu_hold hold_as) {
  enum { VOCAB = 5, K = 192 };
  static mr_gpu_bf16 w[2 * VOCAB * K];
  static float x[ROWS * COLS];
  static double held[VOCAB * COLS];
  static const int32_t token[ROWS] = {4, 0, 2}, pos[ROWS] = {1, 0, 2};
  float *position = random_floats(ROWS * COLS, 1);
  mr_gpu_embed a = {.x = rig_new(r, sizeof x),
                    .ld = COLS,
                    .hold = (int32_t)hold_as,
                    .token = rig_put(r, token, sizeof token),
                    .pos = rig_put(r, pos, sizeof pos),
                    .position = rig_put(r, position, ROWS * COLS * sizeof *position),
                    .scale = 3,
                    .cols = COLS,
                    .k = K};
  if (hold_as >= MR_GPU_INT8) {
    a.few = hold_few(r, hold_as, held, VOCAB, COLS, false);
  } else {
    a.plane = hold_as == MR_GPU_PAIR ? VOCAB * K : 0;
    for (int i = 0; i < VOCAB * COLS; i++)
      held[i] = hold(uniform(), w + i / COLS * K + i % COLS, a.plane);
    a.w = rig_put(r, w, sizeof w);
  }
  rig_run(r, MR_GPU_embed, rig_rows(ROWS), &a);
  rig_get(r, x, a.x, sizeof x);
  for (int i = 0; i < ROWS; i++)
    for (int c = 0; c < COLS; c++)
      close_to(r, "an embedding", x[i * COLS + c],
               3 * held[token[i] * COLS + c] + position[pos[i] * COLS + c], 1e-5);
  mr_mem_free(position);
}

static void rows(rig *r) {
  lines l;
  lines_new(r, &l);
  for (int norm = 0; norm < 3; norm++)
    check_norm_and_add(r, &l, norm);
  lines_free(r, &l);
  lines_new(r, &l);
  check_rest(r, &l);
  lines_free(r, &l);
  for (int hold_as = MR_GPU_BF16; hold_as <= MR_GPU_INT4; hold_as++) {
    check_embed(r, (mr_gpu_hold)hold_as);
    rig_free_all(r);
  }
}

static void rows_are_right(void **state) {
  (void)state;
  on_every_machine(rows);
}

/* ------------------------------------------------------------------ the best of a row */

enum { VOCAB = 700, LD = 704 };

static bool better(const float *x, int i, int j) {
  return x[i] > x[j] || (x[i] == x[j] && i < j);
}

static void check_sums(const rig *r, const float *x, int cols, const mr_gpu_ask *ask,
                       const mr_gpu_best *b) {
  double sum = 0, total = 0, below = 0, weight = 0;
  int rank = 1;
  for (int i = 0; i < cols; i++) {
    double w = exp(((double)x[i] - b->max) * ask->inverse);
    sum += exp((double)x[i] - b->max);
    total += w;
    below += i < b->drawn ? w : 0;
    weight = i == b->drawn ? w : weight;
    rank += ask->probe >= 0 && better(x, i, ask->probe);
  }
  close_to(r, "a sum of weights", b->sum, sum, 1e-5 * sum);
  close_to(r, "a sum at a temperature", b->total, total, 1e-5 * total);
  if (ask->u >= 0) {
    assert_true(b->drawn >= 0 && b->drawn < cols && b->drawn_x == x[b->drawn] && weight > 0);
    assert_true(ask->u * total >= below - 1e-5 * total);
    assert_true(ask->u * total <= below + weight + 1e-5 * total);
  } else {
    assert_int_equal(b->drawn, -1);
  }
  if (ask->probe >= 0) {
    assert_true(b->probe_x == x[ask->probe]);
    assert_int_equal(b->rank, rank);
  }
}

/* Kinds: random; many ties; two values only; hardly anything allowed; unusable rows. */
static float logit(int kind, int i) {
  float x = uniform() * 9;
  switch (kind) {
  case 1:
    return floorf(x);
  case 2:
    return i % 3 ? 0.0f : -0.0f;
  case 3:
    return i % 100 == 7 ? x : -INFINITY;
  case 4:
    return i == 600 ? NAN : x;
  case 5:
    return i == 3 ? INFINITY : x;
  case 6:
    return -INFINITY;
  default:
    return x;
  }
}

static void check_best(rig *r, int cols) {
  enum { KINDS = 7 };
  static float x[KINDS * LD];
  static mr_gpu_best got[KINDS];
  mr_gpu_ask ask[KINDS];
  for (int k = 0; k < KINDS; k++) {
    for (int i = 0; i < cols; i++)
      x[k * LD + i] = logit(k, i);
    ask[k] = (mr_gpu_ask){.u = k == 1   ? -1
                               : k == 2 ? 0.9999
                                        : 0.25 * (uniform() + 1),
                          .inverse = k == 0 ? 1 : 0.7f,
                          .probe = k == 3 ? -1 : (cols - 1) / (k + 1)};
  }
  mr_gpu_top a = {.x = rig_put(r, x, sizeof x),
                  .ld = LD,
                  .ask = rig_put(r, ask, sizeof ask),
                  .out = rig_new(r, sizeof got),
                  .cols = cols};
  rig_run(r, MR_GPU_top,
          (mr_grid){.blocks = {KINDS, 1, 1},
                    .warps = MR_GPU_TOP_WARPS,
                    .shared = MR_GPU_TOP_SHARED(cols)},
          &a);
  rig_get(r, got, a.out, sizeof got);
  for (int k = 0; k < KINDS; k++) {
    const mr_gpu_best *b = &got[k];
    const float *row = x + k * LD;
    bool usable = k < 4 && (k != 3 || cols > 7);
    assert_int_equal(b->bad, !usable && (k != 4 || cols > 600) && (k != 5 || cols > 3));
    if (b->bad)
      continue;
    assert_int_equal(b->n, cols < MR_GPU_BEST ? cols : MR_GPU_BEST);
    for (int i = 0; i < b->n; i++) {
      int above = 0;
      for (int j = 0; j < cols; j++)
        above += better(row, j, b->id[i]);
      assert_int_equal(above, i);
      assert_true(b->x[i] == row[b->id[i]]);
    }
    check_sums(r, row, cols, &ask[k], b);
  }
  rig_free_all(r);
}

static void best(rig *r) {
  static const int cols[] = {VOCAB, 512, 70, 64, 5, 1};
  for (size_t i = 0; i < sizeof cols / sizeof *cols; i++)
    check_best(r, cols[i]);
}

static void the_best_are_right(void **state) {
  (void)state;
  on_every_machine(best);
}

/* ------------------------------------------------------------------ adapters */

enum { LORA_ROWS = 24, LORA_K = 84, LORA_MID = 72, LORA_N = 70, LORA_LINKS = 3 };

typedef struct lora_test {
  bool pair;
  double *a, *down[LORA_LINKS], *up[LORA_LINKS]; /* as they are held */
  mr_gpu_lora_link link[2][LORA_LINKS];          /* down, up */
  float *bias, *y0;
  int32_t row[LORA_ROWS], of[LORA_ROWS]; /* of a place: its row, its link; -1: none */
  int places;
  mr_gpu_lora args;
} lora_test;

/* An odd rank that begins anywhere; two heads; nothing but a bias. */
static void make_links(rig *r, lora_test *t) {
  static const mr_gpu_lora_link down[LORA_LINKS] = {
      {.n = 3, .k = LORA_K, .out = 5, .heads = 1},
      {.n = 20, .k = 24, .in = 1, .in_step = 30, .out_step = 20, .heads = 2}};
  static const mr_gpu_lora_link up[LORA_LINKS] = {
      {.n = LORA_N, .k = 3, .in = 5, .heads = 1},
      {.n = 30, .k = 20, .in_step = 20, .out = 2, .out_step = 35, .heads = 2},
      {.n = LORA_N, .heads = 1}};
  memcpy(t->link[0], down, sizeof down);
  memcpy(t->link[1], up, sizeof up);
  for (int way = 0; way < 2; way++)
    for (int i = 0; i < LORA_LINKS; i++) {
      mr_gpu_lora_link *l = &t->link[way][i];
      double **w = way ? &t->up[i] : &t->down[i];
      *w = mr_mem_alloc((size_t)(l->n * l->k), sizeof **w);
      l->ld = l->k ? padded(l->k) : 0;
      l->w = hold_matrix(r, *w, l->n, l->k, t->pair, &l->plane);
      l->bias = way && i != 1 ? t->args.y + LORA_ROWS * LORA_N : NULL;
    }
}

static void lora_new(rig *r, lora_test *t, bool pair) {
  *t = (lora_test){.pair = pair, .y0 = random_floats((LORA_ROWS + 1) * LORA_N, 1)};
  t->bias = t->y0 + LORA_ROWS * LORA_N;
  t->a = mr_mem_alloc(LORA_ROWS * LORA_K, sizeof *t->a);
  t->args = (mr_gpu_lora){.a_ld = (size_t)padded(LORA_K),
                          .mid = rig_new(r, 2 * LORA_ROWS * LORA_MID * 2),
                          .mid_plane = LORA_ROWS * LORA_MID,
                          .mid_ld = LORA_MID,
                          .y = rig_put(r, t->y0, (LORA_ROWS + 1) * LORA_N * sizeof(float)),
                          .ld = LORA_N};
  t->args.a = hold_matrix(r, t->a, LORA_ROWS, LORA_K, pair, &t->args.a_plane);
  make_links(r, t);
}

static void lora_free(rig *r, lora_test *t) {
  for (int i = 0; i < LORA_LINKS; i++) {
    mr_mem_free(t->down[i]);
    mr_mem_free(t->up[i]);
  }
  mr_mem_free(t->a);
  mr_mem_free(t->y0);
  rig_free_all(r);
}

static double held(const mr_gpu_bf16 *at, bool pair) {
  double x = mr_bf16_to_f32(*at);
  return pair ? x + (double)mr_bf16_to_f32(at[LORA_ROWS * LORA_MID]) : x;
}

/* What a place has in the middle is what down makes of its row; y is what up makes of that. */
static void check_place(const rig *r, const lora_test *t, int p, const mr_gpu_bf16 *mid,
                        const float *y) {
  const mr_gpu_lora_link *d = &t->link[0][t->of[p]], *u = &t->link[1][t->of[p]];
  const mr_gpu_bf16 *m = mid + (size_t)p * LORA_MID;
  for (int h = 0; h < d->heads; h++)
    for (int n = 0; n < d->n; n++) {
      double sum = 0;
      for (int k = 0; k < d->k; k++)
        sum +=
            t->a[t->row[p] * LORA_K + d->in + h * d->in_step + k] * t->down[t->of[p]][n * d->k + k];
      close_to(r, "a rank", held(m + d->out + h * d->out_step + n, t->pair), sum,
               (t->pair ? 1e-4 : 5e-3) * (1 + fabs(sum)));
    }
  for (int h = 0; h < u->heads; h++)
    for (int n = 0; n < u->n; n++) {
      int at = t->row[p] * LORA_N + u->out + h * u->out_step + n;
      double sum = (double)t->y0[at] + (u->bias ? (double)t->bias[n] : 0);
      for (int k = 0; k < u->k; k++)
        sum += held(m + u->in + h * u->in_step + k, t->pair) * t->up[t->of[p]][n * u->k + k];
      close_to(r, "an adapted value", y[at], sum, 2e-4);
    }
}

static void run_lora(rig *r, lora_test *t, uint32_t tiles, uint32_t deep) {
  static mr_gpu_bf16 mid[2 * LORA_ROWS * LORA_MID];
  static float y[LORA_ROWS * LORA_N];
  mr_grid grid = {.blocks = {2, tiles, deep}, .warps = MR_GPU_WARPS};
  grid.shared = MR_GPU_LORA_SHARED(MR_GPU_LORA_DOWN_COLS, t->pair);
  rig_run(r, t->pair ? MR_GPU_lora_down_pair : MR_GPU_lora_down_bf16, grid, &t->args);
  t->args.links += t->args.slots.first ? 2 * LORA_LINKS : LORA_LINKS;
  grid.shared = MR_GPU_LORA_SHARED(MR_GPU_LORA_UP_COLS, t->pair);
  rig_run(r, t->pair ? MR_GPU_lora_up_pair : MR_GPU_lora_up_bf16, grid, &t->args);
  rig_get(r, mid, t->args.mid, sizeof mid);
  rig_get(r, y, t->args.y, sizeof y);
  for (int p = 0; p < t->places; p++)
    if (t->of[p] >= 0)
      check_place(r, t, p, mid, y);
    else
      assert_memory_equal(y + t->row[p] * LORA_N, t->y0 + t->row[p] * LORA_N, LORA_N * sizeof *y);
}

/* Rows of a step by adapter: 17 of one, which are two tiles, three of another, one of the third. */
static void check_lora_rows(rig *r, bool pair) {
  static const mr_gpu_lora_tile tiles[] = {{0, 0, 16}, {0, 16, 1}, {1, 17, 3}, {2, 20, 1}};
  lora_test t;
  lora_new(r, &t, pair);
  t.places = 21;
  for (int p = 0; p < t.places; p++) {
    t.row[p] = (5 * p + 2) % LORA_ROWS;
    t.of[p] = p < 17 ? 0 : p < 20 ? 1 : 2;
  }
  t.args.row = rig_put(r, t.row, sizeof t.row);
  t.args.tiles = rig_put(r, tiles, sizeof tiles);
  t.args.links = rig_put(r, t.link, sizeof t.link);
  run_lora(r, &t, 4, 2);
  lora_free(r, &t);
}

/* Slots of two experts, the second without any rank; adapters are mixed, and some rows have none.
 */
static void check_lora_slots(rig *r, bool pair) {
  static const int32_t first[3] = {0, 19, 22};
  int32_t from[LORA_ROWS], adapter[LORA_ROWS];
  mr_gpu_lora_link links[2][2][LORA_LINKS] = {0};
  lora_test t;
  lora_new(r, &t, pair);
  t.places = 22;
  for (int p = 0; p < t.places; p++) {
    from[p] = (7 * p + 3) % LORA_ROWS;
    t.row[p] = p;
    t.of[p] = p >= 19 ? -1 : p % 3 == 1 ? 0 : p % 3 == 2 ? 2 : -1;
    adapter[from[p]] = p >= 19 ? 1 : t.of[p] + 1;
  }
  memcpy(links[0][0], t.link[0], sizeof t.link[0]);
  memcpy(links[1][0], t.link[1], sizeof t.link[1]);
  t.args.links = rig_put(r, links, sizeof links);
  t.args.slots = (mr_gpu_lora_slots){.first = rig_put(r, first, sizeof first),
                                     .from = rig_put(r, from, sizeof from),
                                     .adapter = rig_put(r, adapter, sizeof adapter),
                                     .adapters = LORA_LINKS,
                                     .step = 1,
                                     .a_first = t.args.a_ld};
  run_lora(r, &t, 1, 2);
  lora_free(r, &t);
}

static void adapters(rig *r) {
  for (int pair = 0; pair < 2; pair++) {
    check_lora_rows(r, pair);
    check_lora_slots(r, pair);
  }
}

static void adapters_are_right(void **state) {
  (void)state;
  on_every_machine(adapters);
}

/* ------------------------------------------------------------------ the emulator itself */

static void barrier_twice(const void *p) {
  (void)p;
  if (mr_emu_here.fiber->thread < 7)
    mr_emu_barrier(1);
  else
    mr_emu_barrier(2);
}

static void barrier_or_warp(const void *p) {
  (void)p;
  if (mr_emu_here.fiber->thread < 32)
    mr_emu_barrier(1);
  else if (mr_emu_here.fiber->lane < 5)
    mr_emu_warp(NULL, NULL, 2);
}

static void past_the_end(const void *p) {
  (void)p;
  mr_emu_here.shared[64] = 1;
}

static void no_wait(const void *p) {
  mr_emu_copy(mr_emu_here.shared + 16 * mr_emu_here.fiber->thread, p, 16);
  mr_emu_copy_commit();
}

static void early_leave(const void *p) {
  (void)p;
  if (mr_emu_here.fiber->thread > 40)
    mr_emu_barrier(1);
}

static void emulator_finds_faults(void **state) {
  (void)state;
  static const struct {
    mr_emu_kernel kernel;
    size_t shared;
    const char *words;
  } faults[] = {{barrier_twice, 0, "different barriers"},
                {barrier_or_warp, 0, "lane"},
                {past_the_end, 64, "past its shared memory"},
                {no_wait, 1024, "not waited for"},
                {early_leave, 0, "after a thread has left"}};
  static const unsigned char source[16];
  void *room = mr_mem_pages(MR_EMU_BYTES);
  assert_non_null(room);
  for (int order = 0; order < 3; order++) {
    mr_emu *e = mr_emu_init(room, &(mr_emu_opts){.order = (mr_emu_order)order, .lazy = 1});
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
      mr_emu_shape s = {.blocks = {1, 1, 1}, .threads = 64, .warp = 32, .shared = faults[i].shared};
      assert_int_equal(mr_emu_launch(e, faults[i].kernel, &s, source), -1);
      assert_non_null(mr_emu_error(e));
      if (!strstr(mr_emu_error(e), faults[i].words))
        fail_msg("fault %zu is told as: %s", i, mr_emu_error(e));
    }
  }
  mr_mem_free(room);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(products_are_right), cmocka_unit_test(packing_is_right),
      cmocka_unit_test(rows_are_right),     cmocka_unit_test(the_best_are_right),
      cmocka_unit_test(adapters_are_right), cmocka_unit_test(emulator_finds_faults),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
