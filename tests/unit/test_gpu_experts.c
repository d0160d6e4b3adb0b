/* Experts on the device, on every emulated machine and in every order of threads: which ones a
 * token goes to, as on the CPU; rows by expert; their products, the bits of one at a time; and that
 * a step waits for nothing but its end. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "src/forward.h"
#include "src/route.h"
#include "tests/unit/conformance.h"
#include "tests/unit/gpu_rig.h"

enum { TOKENS = 23, MOST = 70, USED = 4 };

/* ------------------------------------------------------------------ choice */

typedef struct kind {
  int n, used, scoring, groups, best_groups;
  bool raw, renorm, bias, group_best, shared;
} kind;

static mr_config config_of(const kind *x) {
  mr_config c = {.n_experts = x->n,
                 .n_experts_used = x->used,
                 .n_group = x->groups,
                 .topk_group = x->best_groups,
                 .group_best = x->group_best,
                 .route_scale = 2.5f,
                 .route_jitter = 0.2f};
  c.arch.scoring = (mr_scoring)x->scoring;
  c.arch.choose_raw = x->raw;
  c.arch.renorm = x->renorm;
  return c;
}

static void check_token(const rig *r, const kind *x, const float *logits, const float *bias,
                        const int32_t *chosen, const float *weight) {
  mr_config c = config_of(x);
  float room[2 * MOST], want[USED];
  int32_t who[USED];
  mr_route(&c, logits, x->bias ? bias : NULL, room, who, want);
  for (int k = 0; k < x->used; k++) {
    if (chosen[k] != who[k])
      fail_msg("%s: choice %d of %d experts is %d, not %d", r->dev->arch, k, x->n, chosen[k],
               who[k]);
    if (isnan(want[k]))
      assert_true(isnan(weight[k]));
    else
      close_to(r, "an expert's weight", weight[k], want[k], 1e-5);
  }
}

static void check_route(rig *r, const kind *x) {
  enum { LD = MOST + 2 };
  int each = x->used + x->shared;
  float *logits = random_floats(TOKENS * LD, 3), *bias = random_floats(MOST, 1);
  float gate[TOKENS], weight[TOKENS * (USED + 1)];
  int32_t chosen[TOKENS * USED], slot[TOKENS * (USED + 1)], from[TOKENS * (USED + 1)];
  for (int t = 0; t < TOKENS; t++) {
    gate[t] = uniform();
    for (int i = 0; i < x->n && t % 3 == 0; i += 2) /* some are alike */
      logits[t * LD + i] = logits[t * LD + x->n / 2];
    for (int i = 0; i < x->n && t == 5; i++) /* and one token has none */
      logits[t * LD + i] = NAN;
  }
  mr_gpu_route a = {.scores = rig_put(r, logits, TOKENS * LD * sizeof *logits),
                    .ld = LD,
                    .bias = x->bias ? rig_put(r, bias, MOST * sizeof *bias) : NULL,
                    .gate = rig_put(r, gate, sizeof gate),
                    .chosen = rig_new(r, sizeof chosen),
                    .weight = rig_new(r, sizeof weight),
                    .slot = rig_new(r, sizeof slot),
                    .from = rig_new(r, sizeof from),
                    .tokens = TOKENS,
                    .n = x->n,
                    .used = x->used,
                    .each = each,
                    .scoring = x->scoring,
                    .choose_raw = x->raw,
                    .renorm = x->renorm,
                    .groups = x->groups,
                    .best_groups = x->best_groups,
                    .group_best = x->group_best,
                    .scale = 2.5f,
                    .shared_scale = 0.5f,
                    .jitter = 0.2f};
  rig_run(r, MR_GPU_route,
          (mr_grid){.blocks = {(TOKENS + MR_GPU_WARPS - 1) / MR_GPU_WARPS, 1, 1},
                    .warps = MR_GPU_WARPS,
                    .shared = MR_GPU_ROUTE_SHARED(x->n)},
          &a);
  rig_get(r, chosen, a.chosen, sizeof chosen);
  rig_get(r, weight, a.weight, sizeof weight);
  rig_get(r, slot, a.slot, sizeof slot);
  rig_get(r, from, a.from, sizeof from);
  for (int t = 0; t < TOKENS; t++) {
    check_token(r, x, logits + t * LD, bias, chosen + t * x->used, weight + t * each);
    if (!x->shared)
      continue;
    assert_true(weight[t * each + x->used] == gate[t] * 0.5f);
    assert_int_equal(slot[t * each + x->used], TOKENS * x->used + t);
    assert_int_equal(from[TOKENS * x->used + t], t);
  }
  mr_mem_free(logits);
  mr_mem_free(bias);
  rig_free_all(r);
}

static void routes(rig *r) {
  static const kind all[] = {
      {.n = 8, .used = 2, .renorm = true},
      {.n = MOST, .used = 4, .raw = true, .bias = true},
      {.n = 5, .used = 1, .scoring = MR_SCORE_SIGMOID, .shared = true},
      {.n = 64,
       .used = 4,
       .scoring = MR_SCORE_SIGMOID,
       .bias = true,
       .groups = 8,
       .best_groups = 3,
       .renorm = true,
       .shared = true},
      {.n = 12, .used = 3, .groups = 4, .best_groups = 2, .group_best = true},
      {.n = 4, .used = 2, .groups = 4, .best_groups = 2},
      {.n = 16, .used = 2, .scoring = MR_SCORE_SPARSEMIXER},
  };
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    check_route(r, &all[i]);
}

static void choices_are_those_of_the_cpu(void **state) {
  (void)state;
  on_every_machine(routes);
}

/* ------------------------------------------------------------------ rows by expert */

typedef struct lists { /* as the device has them, on the host */
  float weight[MOST * (USED + 1)], factor[MOST * USED];
  int32_t slot[MOST * (USED + 1)], from[MOST * (USED + 1)], first[MOST + 2], n_items;
  mr_gpu_item items[MOST * USED + MOST];
} lists;

static void check_lists(const lists *l, const int32_t *chosen, int n, int tile, bool factor) {
  int at = 0, item = 0;
  for (int e = 0; e < n; e++) {
    int begin = at;
    assert_int_equal(l->first[e], at);
    for (int i = 0; i < MOST * USED; i++) {
      int slot = i / USED * (USED + 1) + i % USED;
      if (chosen[i] != e)
        continue;
      assert_int_equal(l->slot[slot], at);
      assert_int_equal(l->from[at], i / USED);
      assert_true(l->weight[slot] == (factor ? 1 : (float)slot));
      assert_true(!factor || l->factor[at] == (float)slot);
      at++;
    }
    for (; begin < at; begin += tile, item++) {
      const mr_gpu_item *x = &l->items[item];
      assert_true(x->expert == e && x->first == begin);
      assert_int_equal(x->n, at - begin < tile ? at - begin : tile);
    }
  }
  assert_int_equal(l->first[n], MOST * USED);
  assert_int_equal(l->first[n + 1], MOST * (USED + 1));
  assert_int_equal(l->n_items, item);
}

static void check_sort(rig *r, int n, int tile, bool factor) {
  static lists l;
  int32_t chosen[MOST * USED];
  for (int i = 0; i < MOST * USED; i++) /* the first expert has many, the second none */
    chosen[i] = i % 3 ? 0 : (int32_t)((uniform() + 1) / 2 * (float)(n - 2)) % (n - 2) + 2;
  for (int i = 0; i < MOST * (USED + 1); i++)
    l.weight[i] = (float)i;
  mr_gpu_sort a = {.chosen = rig_put(r, chosen, sizeof chosen),
                   .weight = rig_put(r, l.weight, sizeof l.weight),
                   .slot = rig_new(r, sizeof l.slot),
                   .from = rig_new(r, sizeof l.from),
                   .first = rig_new(r, sizeof l.first),
                   .factor = factor ? rig_new(r, sizeof l.factor) : NULL,
                   .items = rig_new(r, sizeof l.items),
                   .n_items = rig_new(r, sizeof l.n_items),
                   .tokens = MOST,
                   .n = n,
                   .used = USED,
                   .each = USED + 1,
                   .tile = tile};
  rig_run(r, MR_GPU_sort,
          (mr_grid){.blocks = {(uint32_t)n, 1, 1},
                    .warps = MR_GPU_WARPS,
                    .shared = MR_GPU_SORT_SHARED(n)},
          &a);
  rig_get(r, l.weight, a.weight, sizeof l.weight);
  rig_get(r, l.slot, a.slot, sizeof l.slot);
  rig_get(r, l.from, a.from, sizeof l.from);
  rig_get(r, l.first, a.first, sizeof l.first);
  if (factor)
    rig_get(r, l.factor, a.factor, sizeof l.factor);
  rig_get(r, l.items, a.items, sizeof l.items);
  rig_get(r, &l.n_items, a.n_items, sizeof l.n_items);
  check_lists(&l, chosen, n, tile, factor);
  rig_free_all(r);
}

static void sorts(rig *r) {
  check_sort(r, 3, 16, false);
  check_sort(r, MOST, 16, true);
  check_sort(r, 9, 64, false);
}

static void rows_lie_by_expert(void **state) {
  (void)state;
  on_every_machine(sorts);
}

/* ------------------------------------------------------------------ products */

enum { EXPERTS = 5, N = 80, K = 128 };

static const int rows_of[EXPERTS] = {70, 0, 1, 16, 33};
static const mr_gpu_hold holds[EXPERTS] = {MR_GPU_BF16, MR_GPU_BF16, MR_GPU_PAIR, MR_GPU_INT8,
                                           MR_GPU_INT4};
enum { ROWS = 70 + 1 + 16 + 33 };

static void *random_bf16(rig *r, size_t n) {
  mr_gpu_bf16 *x = mr_mem_alloc(n, sizeof *x);
  assert_non_null(x);
  for (size_t i = 0; i < n; i++)
    x[i] = mr_f32_to_bf16(uniform());
  void *at = rig_put(r, x, n * sizeof *x);
  mr_mem_free(x);
  return at;
}

static mr_gpu_expert random_expert(rig *r, mr_gpu_hold hold) {
  uint8_t codes[N * K];
  uint16_t scales[N * K / MR_GPU_GROUP * 2];
  float units[N], *bias = random_floats(N, 1);
  for (int i = 0; i < N * K; i++)
    codes[i] = (uint8_t)(int8_t)(uniform() * 127);
  for (int i = 0; i < N * K / MR_GPU_GROUP * 2; i++)
    scales[i] = mr_f32_to_f16(uniform());
  for (int i = 0; i < N; i++)
    units[i] = 0.01f;
  mr_gpu_expert e = {.w = random_bf16(r, 2 * N * K),
                     .plane = hold == MR_GPU_PAIR ? N * K : 0,
                     .few = {.w = rig_put(r, codes, sizeof codes),
                             .scales = rig_put(r, scales, sizeof scales),
                             .units = rig_put(r, units, sizeof units)},
                     .bias = rig_put(r, bias, N * sizeof *bias),
                     .hold = (int32_t)hold};
  mr_mem_free(bias);
  return e;
}

static mr_grid grid_of(int rows, int blocks, mr_gpu_hold hold) {
  return (mr_grid){.blocks = {(N + MR_GPU_GEMM_COLS - 1) / MR_GPU_GEMM_COLS, (uint32_t)blocks, 1},
                   .warps = MR_GPU_WARPS,
                   .shared = MR_GPU_GEMM_SHARED(rows, hold)};
}

/* One expert after the other, by the kernels of all products. */
static void one_by_one(rig *r, const mr_gpu_grouped *g, const mr_gpu_expert *e) {
  static const mr_gpu_kernel kernels[4] = {MR_GPU_gemm16_bf16, MR_GPU_gemm16_pair,
                                           MR_GPU_gemm16_int8, MR_GPU_gemm16_int4};
  for (int i = 0, first = 0; i < EXPERTS; first += rows_of[i++]) {
    mr_gpu_gemm a = {.a = g->a + (size_t)first * K,
                     .w = e[i].w,
                     .a_plane = g->a_plane,
                     .w_plane = e[i].plane,
                     .few = e[i].few,
                     .bias = e[i].bias,
                     .y = g->y + (size_t)first * g->ld,
                     .ld = g->ld,
                     .m = rows_of[i],
                     .n = N,
                     .k = K};
    if (a.m)
      rig_run(r, kernels[holds[i]], grid_of(16, (a.m + 15) / 16, holds[i]), &a);
  }
}

static void all_at_once(rig *r, const mr_gpu_grouped *g, int tile, int items) {
  static const mr_gpu_kernel kernels[4][2] = {{MR_GPU_grouped16_bf16, MR_GPU_grouped64_bf16},
                                              {MR_GPU_grouped16_pair, MR_GPU_grouped64_pair},
                                              {MR_GPU_grouped16_int8, MR_GPU_grouped64_int8},
                                              {MR_GPU_grouped16_int4, MR_GPU_grouped64_int4}};
  for (int hold = MR_GPU_BF16; hold <= MR_GPU_INT4; hold++)
    rig_run(r, kernels[hold][tile == 64], grid_of(tile, items + 3, (mr_gpu_hold)hold), g);
}

static void grouped(rig *r) {
  static float want[ROWS * N], got[ROWS * N];
  mr_gpu_expert e[EXPERTS];
  for (int tile = 16; tile <= 64; tile += 48) {
    mr_gpu_item items[EXPERTS * 8];
    int32_t n_items = 0;
    if (MR_GPU_GEMM_SHARED(tile, MR_GPU_PAIR) > r->dev->shared_bytes)
      continue;
    for (int i = 0, first = 0; i < EXPERTS; first += rows_of[i++])
      for (int at = 0; at < rows_of[i]; at += tile)
        items[n_items++] =
            (mr_gpu_item){i, first + at, rows_of[i] - at < tile ? rows_of[i] - at : tile};
    for (int i = 0; i < EXPERTS; i++)
      e[i] = random_expert(r, holds[i]);
    mr_gpu_grouped g = {.experts = rig_put(r, e, sizeof e),
                        .items = rig_put(r, items, (size_t)n_items * sizeof *items),
                        .n_items = rig_put(r, &n_items, sizeof n_items),
                        .a = random_bf16(r, 2 * ROWS * K),
                        .a_plane = ROWS * K,
                        .y = rig_new(r, sizeof want),
                        .ld = N,
                        .n = N,
                        .k = K};
    one_by_one(r, &g, e);
    rig_get(r, want, g.y, sizeof want);
    g.y = rig_new(r, sizeof got);
    all_at_once(r, &g, tile, n_items);
    rig_get(r, got, g.y, sizeof got);
    if (memcmp(got, want, sizeof got))
      fail_msg("%s: other bits in items of %d rows", r->dev->arch, tile);
    rig_free_all(r);
  }
}

static void products_have_the_bits_of_each(void **state) {
  (void)state;
  on_every_machine(grouped);
}

/* ------------------------------------------------------------------ whole models */

static mr_device_ops counting;
static mr_code (*real_sync)(mr_device *d, mr_stream *s);
static int waits;

static mr_code count_sync(mr_device *d, mr_stream *s) {
  waits++;
  return real_sync(d, s);
}

static void *take(void *ctx, size_t bytes) {
  return mr_device_take(ctx, bytes);
}

/* Logits after a few tokens to out, in two steps; the second one waits for nothing but its end. */
static int run_model(const char *dir, int machine, int streamed, mr_gpu_scheme scheme, float *out) {
  enum { N_TOKENS = 20 };
  mr_err err = MR_ERR_INIT;
  mr_sim_opts o = {.machine = machine, .memory = (size_t)64 << 20, .emu = {.lazy = 1, .poison = 1}};
  mr_device *d;
  mr_model *m;
  mr_kv *kv;
  mr_kv_seq seq;
  mr_forward *f;
  int32_t tokens[N_TOKENS];
  assert_int_equal(mr_model_open(&m, dir, &err), MR_OK);
  assert_int_equal(mr_device_sim(&d, &o, &err), MR_OK);
  assert_int_equal(mr_device_start(d, o.memory, &err), MR_OK);
  real_sync = d->ops->sync;
  counting = *d->ops;
  counting.sync = count_sync;
  d->ops = &counting;
  mr_kv_memory memory = {.ctx = d, .take = take};
  assert_int_equal(mr_kv_open_on(&kv, &m->c, MR_KV_F32, 8, &memory, &err), MR_OK);
  if (mr_forward_open_gpu(&f, m, d, kv, scheme, streamed, N_TOKENS, 1, &err))
    fail_msg("%s", err.text);
  assert_int_equal(mr_kv_seq_init(kv, &seq, 2 * N_TOKENS, &err), MR_OK);
  for (int i = 0; i < N_TOKENS; i++)
    tokens[i] = 7 + 3 * i;
  for (int step = 0; step < 2; step++) {
    waits = 0;
    assert_int_equal(mr_kv_seq_reserve(kv, &seq, N_TOKENS), MR_OK);
    assert_int_equal(
        mr_forward_step(f, &(mr_run){.seq = &seq, .tokens = tokens, .n = N_TOKENS}, 1, NULL, &err),
        MR_OK);
  }
  assert_int_equal(waits, 1);
  int n = m->c.n_vocab;
  memcpy(out, mr_forward_logits(f, 0), (size_t)n * sizeof *out);
  mr_kv_seq_free(kv, &seq);
  mr_forward_close(f);
  mr_kv_close(kv);
  mr_device_close(d);
  mr_model_close(m);
  return n;
}

/* Layers whose weights come over in each step, too. */
static void a_layer_waits_for_nothing(void **state) {
  (void)state;
  static float here[1 << 16], over[1 << 16];
  static const char *const models[] = {"tiny/hf/deepseek_v3", "tiny/hf/mixtral", "tiny/hf/gpt_oss"};
  for (int i = 0; i < 3; i++) {
    mr_gpu_scheme scheme = i == 1 ? MR_GPU_ALL_INT8 : MR_GPU_EXACT;
    char dir[4096];
    const char *path = data_path(models[i]);
    if (!path)
      skip();
    snprintf(dir, sizeof dir, "%s", path);
    int n = run_model(dir, i, 0, scheme, here);
    run_model(dir, i, 2, scheme, over);
    assert_memory_equal(here, over, (size_t)n * sizeof *here);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(choices_are_those_of_the_cpu),
      cmocka_unit_test(rows_lie_by_expert),
      cmocka_unit_test(products_have_the_bits_of_each),
      cmocka_unit_test(a_layer_waits_for_nothing),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
