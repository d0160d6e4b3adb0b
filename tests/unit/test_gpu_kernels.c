/* Kernels of kernels/gpu but attention, on every emulated machine and in every order of threads,
 * against plain C in double. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "tests/unit/gpu_rig.h"

static mr_grid rig_rows(int rows) {
  return (mr_grid){
      .blocks = {(uint32_t)rows, 1, 1}, .warps = MR_GPU_WARPS, .shared = MR_GPU_REDUCE_SHARED};
}

static int padded(int k) {
  return (k + MR_GPU_K - 1) / MR_GPU_K * MR_GPU_K;
}

/* ------------------------------------------------------------------ products */

enum { BF16, PAIR, Q8 };

typedef struct problem {
  int m, n, k, kind;
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

static void hold_int8(rig *r, problem *p) {
  int groups = padded(p->k) / MR_GPU_Q8_GROUP, k = padded(p->k);
  int8_t *q = mr_mem_alloc((size_t)p->n * (size_t)k, 1);
  float *s = random_floats((size_t)p->n * (size_t)groups, 0.01f);
  assert_non_null(q);
  for (int i = 0; i < p->n; i++)
    for (int j = 0; j < p->k; j++) {
      q[i * k + j] = (int8_t)(uniform() * 127);
      float x = (float)q[i * k + j] * s[i * groups + j / MR_GPU_Q8_GROUP];
      p->w[i * p->k + j] = mr_bf16_to_f32(mr_f32_to_bf16(x));
    }
  p->args.w8 = rig_put(r, q, (size_t)p->n * (size_t)k);
  p->args.scales = rig_put(r, s, (size_t)p->n * (size_t)groups * sizeof *s);
  mr_mem_free(q);
  mr_mem_free(s);
}

static void problem_new(rig *r, problem *p, int m, int n, int k, int kind) {
  *p = (problem){.m = m, .n = n, .k = k, .kind = kind};
  p->a = mr_mem_alloc((size_t)(m * k), sizeof *p->a);
  p->w = mr_mem_alloc((size_t)(n * k), sizeof *p->w);
  p->bias = random_floats((size_t)n, 1);
  p->y0 = random_floats((size_t)(m * n), 1);
  assert_non_null(p->a);
  assert_non_null(p->w);
  p->args = (mr_gpu_gemm){.ld = (size_t)n, .m = m, .n = n, .k = padded(k)};
  p->args.a = hold_matrix(r, p->a, m, k, kind == PAIR, &p->args.a_plane);
  if (kind == Q8)
    hold_int8(r, p);
  else
    p->args.w = hold_matrix(r, p->w, n, k, kind == PAIR, &p->args.w_plane);
  p->args.bias = rig_put(r, p->bias, (size_t)n * sizeof(float));
}

static void problem_free(problem *p) {
  mr_mem_free(p->a);
  mr_mem_free(p->w);
  mr_mem_free(p->bias);
  mr_mem_free(p->y0);
}

static float *multiply(rig *r, const problem *p, int rows, int accumulate) {
  static const mr_gpu_kernel kernels[3][2] = {{MR_GPU_gemm16_bf16, MR_GPU_gemm64_bf16},
                                              {MR_GPU_gemm16_pair, MR_GPU_gemm64_pair},
                                              {MR_GPU_gemm16_q8, MR_GPU_gemm64_q8}};
  size_t bytes = (size_t)(p->m * p->n) * sizeof(float);
  mr_gpu_gemm a = p->args;
  a.y = rig_put(r, p->y0, bytes);
  a.accumulate = accumulate;
  mr_grid grid = {.blocks = {(uint32_t)((p->n + 63) / 64), (uint32_t)((p->m + rows - 1) / rows), 1},
                  .warps = MR_GPU_WARPS,
                  .shared =
                      MR_GPU_GEMM_SHARED((size_t)rows, p->kind == PAIR ? 2 : 1, p->kind == Q8)};
  rig_run(r, kernels[p->kind][rows == 64], grid, &a);
  float *y = mr_mem_alloc((size_t)(p->m * p->n), sizeof *y);
  assert_non_null(y);
  rig_get(r, y, a.y, bytes);
  return y;
}

static void check_product(rig *r, int m, int n, int k, int kind) {
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
  mr_mem_free(flat);
  mr_mem_free(tall);
  mr_mem_free(more);
  problem_free(&p);
  rig_free_all(r);
}

static void products(rig *r) {
  static const int shapes[][3] = {{1, 1, 1}, {5, 70, 130}, {17, 64, 64}, {66, 20, 200}};
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
    for (int kind = 0; kind < 3; kind++)
      check_product(r, shapes[i][0], shapes[i][1], shapes[i][2], kind);
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

static void check_embed(rig *r) {
  enum { VOCAB = 5, K = 192 };
  static mr_gpu_bf16 w[2 * VOCAB * K];
  static float x[ROWS * COLS];
  static const int32_t token[ROWS] = {4, 0, 2}, pos[ROWS] = {1, 0, 2};
  float *position = random_floats(ROWS * COLS, 1);
  double held[VOCAB * K];
  for (int i = 0; i < VOCAB * K; i++)
    held[i] = hold(uniform(), w + i, VOCAB * K);
  mr_gpu_embed a = {.x = rig_new(r, sizeof x),
                    .ld = COLS,
                    .w = rig_put(r, w, sizeof w),
                    .plane = VOCAB * K,
                    .token = rig_put(r, token, sizeof token),
                    .pos = rig_put(r, pos, sizeof pos),
                    .position = rig_put(r, position, ROWS * COLS * sizeof *position),
                    .scale = 3,
                    .cols = COLS,
                    .k = K};
  rig_run(r, MR_GPU_embed, rig_rows(ROWS), &a);
  rig_get(r, x, a.x, sizeof x);
  for (int i = 0; i < ROWS; i++)
    for (int c = 0; c < COLS; c++)
      close_to(r, "an embedding", x[i * COLS + c],
               3 * held[token[i] * K + c] + position[pos[i] * COLS + c], 1e-5);
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
  check_embed(r);
  lines_free(r, &l);
}

static void rows_are_right(void **state) {
  (void)state;
  on_every_machine(rows);
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
      cmocka_unit_test(products_are_right),
      cmocka_unit_test(packing_is_right),
      cmocka_unit_test(rows_are_right),
      cmocka_unit_test(emulator_finds_faults),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
