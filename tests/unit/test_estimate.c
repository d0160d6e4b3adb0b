/* The simulation against sums by hand; the measurement on a tiny model. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "io/mem.h"
#include "jobs/estimate.h"
#include "tests/unit/temp.h"
#include "tests/unit/tiny_gguf.h"

typedef struct list {
  const mr_sim_row *rows;
  int n, at;
} list;

static bool next(void *ctx, mr_sim_row *row) {
  list *l = ctx;
  if (l->at == l->n)
    return false;
  *row = l->rows[l->at++];
  return true;
}

static mr_sim simulated(const mr_rates *r, mr_limits limits, const mr_sim_row *rows, int n) {
  list l = {rows, n, 0};
  mr_sim s;
  mr_err err = MR_ERR_INIT;
  assert_int_equal(mr_simulate(r, &limits, next, &l, &s, &err), MR_OK);
  return s;
}

static const mr_limits wide = {.batch = 8, .step_tokens = 100, .block = 32, .kv_tokens = 1e6};

static void body_is_interpolated(void **state) {
  (void)state;
  mr_rates r = {.body = {{10, 1}, {20, 3}}, .n_body = 2};
  assert_true(mr_rate_body(&r, 0) == 0);
  assert_true(mr_rate_body(&r, 4) == 1);
  assert_true(mr_rate_body(&r, 15) == 2);
  assert_true(mr_rate_body(&r, 40) == 6);
}

/* 150 prompt tokens in two steps of at most 100, then a token a step. */
static void one_row(void **state) {
  (void)state;
  const mr_rates r = {.step = 1};
  const mr_sim_row row = {150, 0, 5, 0, false};
  mr_sim s = simulated(&r, wide, &row, 1);
  assert_true(s.steps == 2 + 4 && s.other_s == 6 && s.batch == 1);
  assert_true(s.prefill_s == 2 && s.decode_s == 4);
  const mr_rates keys = {.prefill_key = 1, .decode_own_key = 1000, .decode_key = 1e6};
  s = simulated(&keys, wide, &row, 1);
  assert_true(fabs(s.prefill_s - 150 * 151 / 2.0) < 1e-6); /* each sees itself and those before */
  assert_true(fabs(s.decode_s - 1000 * (151 + 152 + 153 + 154)) < 1e-6);
}

static void sharing_and_scores(void **state) {
  (void)state;
  const mr_rates r = {.token = 1};
  const mr_sim_row rows[] = {{90, 0, 1, 0, false}, {90, 64, 1, 0, false}, {90, 64, 10, 0, true}};
  assert_true(simulated(&r, wide, rows, 3).other_s == 90 + 26 + 36);
  const mr_rates tails = {.tail_key = 1, .prefill_key = 1000};
  assert_true(fabs(simulated(&tails, wide, rows, 2).attn_s - (1000 * 90 * 91 / 2 + 26 * 77.5)) < 1);
  const mr_rates logits = {.logit = 1};
  assert_true(simulated(&logits, wide, rows, 3).other_s == 1 + 1 + 10);
}

static void limits_hold(void **state) {
  (void)state;
  const mr_rates r = {.step = 1};
  mr_sim_row rows[12];
  for (int i = 0; i < 12; i++)
    rows[i] = (mr_sim_row){10, 0, 21, 0, false};
  mr_sim s = simulated(&r, wide, rows, 12); /* 8 at a time; 12 prefills, 20 steps after each */
  assert_true(s.steps == 42 && s.batch == 6 && s.batch_full_s > 20 && s.kv_full_s == 0);
  mr_limits narrow = wide;
  narrow.kv_tokens = 100; /* three of 32 */
  s = simulated(&r, narrow, rows, 12);
  assert_true(s.steps == 4 * 21 && s.batch == 3 && s.kv_full_s > 60);
  narrow.kv_tokens = 5; /* what fits nowhere still goes alone */
  assert_true(simulated(&r, narrow, rows, 12).steps == 12 * 21);
  assert_true(simulated(&r, wide, rows, 0).steps == 0);
}

static mr_sim full(mr_kv_policy policy, double disk_tokens, double disk_token_s) {
  const mr_rates r = {.token = 1};
  mr_limits l = {.batch = 8,
                 .step_tokens = 100,
                 .block = 10,
                 .kv_tokens = 100,
                 .policy = policy,
                 .disk_tokens = disk_tokens,
                 .disk_token_s = disk_token_s};
  mr_sim_row rows[4];
  for (int i = 0; i < 4; i++)
    rows[i] = (mr_sim_row){10, 0, 40, 0, false}; /* 50 tokens at the end */
  return simulated(&r, l, rows, 4);
}

/* Two rows fit as long as they get, four at first. */
static void memory_runs_out(void **state) {
  (void)state;
  mr_sim s = full(MR_KV_FEWER, 1e6, 0);
  assert_true(s.parked == 0 && s.batch > 1.9 && s.other_s == 4 * 49);
  s = full(MR_KV_AUTO, 0, 0); /* nothing to put rows on: as much is admitted as may fit */
  assert_true(s.parked == 0 && s.batch > 1.9);
  s = full(MR_KV_AUTO, 1e6, 0.5); /* three at first; the disk is cheaper than a token's second */
  assert_true(s.parked > 0 && s.spilled > 0 && s.recomputed == 0 && s.other_s == 4 * 49);
  s = full(MR_KV_AUTO, 1e6, 2);
  assert_true(s.parked > 0 && s.spilled == 0 && s.other_s == 4 * 49 + s.recomputed);
  s = full(MR_KV_SPILL, 1e6, 2);
  assert_true(s.parked > 0 && s.spilled > 0 && s.recomputed == 0);
  s = full(MR_KV_SPILL, 5, 2); /* no room there */
  assert_true(s.parked > 0 && s.spilled == 0 && s.recomputed > 0);
  s = full(MR_KV_RECOMPUTE, 1e6, 0);
  assert_true(s.parked > 0 && s.spilled == 0 && s.other_s == 4 * 49 + s.recomputed);
}

/* Of layers with a window a long row holds the window's tokens only. */
static void windows_make_room(void **state) {
  (void)state;
  const mr_rates r = {.step = 1};
  mr_limits l = {.batch = 8, .step_tokens = 1000, .block = 10, .kv_tokens = 400};
  mr_sim_row rows[8];
  l.policy = MR_KV_FEWER;
  for (int i = 0; i < 8; i++)
    rows[i] = (mr_sim_row){190, 0, 10, 0, false};
  double all = simulated(&r, l, rows, 8).batch; /* two of 200 tokens */
  assert_true(all > 1.5 && all <= 2);
  l.window_share = 0.75;
  l.window_tokens = 40; /* five of 200 / 4 + 40 * 3 / 4 = 80 */
  double some = simulated(&r, l, rows, 8).batch;
  assert_true(some > 3.5 && some <= 5);
  l.window_tokens = 200;
  assert_true(simulated(&r, l, rows, 8).batch == all);
}

/* What comes out of the cache is not computed, but copied. */
static void copies_take_time(void **state) {
  (void)state;
  const mr_rates r = {.token = 1};
  mr_limits l = wide;
  l.copy_token_s = 0.5;
  const mr_sim_row row = {90, 64, 1, 32, false};
  assert_true(simulated(&r, l, &row, 1).other_s == 26 + 16);
}

static void measured_on_a_model(void **state) {
  (void)state;
  const char *path = temp_path("tiny.gguf");
  mr_err err = MR_ERR_INIT;
  mr_time_estimate e;
  mr_engine_info info;
  assert_true(tiny_gguf_write(path, -1));
  mr_engine_opts o = {.model_path = path, .device = "cpu", .threads = 1, .kv_type = -1};
  for (int i = 0; i < 3; i++) {
    o.kv_memory = i == 1 ? 40 << 10 : 0; /* a few pages */
    o.max_batch = i == 2 ? 3 : 0;
    assert_int_equal(mr_estimate_measure(&o, &info, &e, &err), MR_OK);
    assert_true(e.load_s > 0 && e.memory_bytes_per_s > 1e7 && e.gemm_flops_per_s > 1e6);
    assert_true(e.rates.n_body >= 2 && e.rates.prefill_key > 0 && e.rates.decode_key >= 0);
    for (int k = 1; k < e.rates.n_body; k++) {
      assert_true(e.rates.body[k].tokens > e.rates.body[k - 1].tokens);
      assert_true(e.rates.body[k].s >= e.rates.body[k - 1].s);
    }
    const mr_sim_row rows[] = {{90, 0, 8, 0, false}, {90, 64, 8, 0, false}};
    list l = {rows, 2, 0};
    mr_profile p = {.factor = {1, 1, 1, 1, 1}};
    assert_int_equal(mr_estimate_run(&e, &info, &p, next, &l, &err), MR_OK);
    double plain = e.seconds, steps = e.prefill_s + e.decode_s;
    p.factor[MR_PART_GEMM] = 2;
    l.at = 0;
    assert_int_equal(mr_estimate_run(&e, &info, &p, next, &l, &err), MR_OK);
    assert_true(fabs(e.seconds - plain - e.sim.gemm_s) < 1e-9 * plain);
    assert_true(fabs(e.prefill_s + e.decode_s - steps - e.sim.gemm_s) < 1e-6 * plain);
    assert_true(e.seconds > e.load_s && e.sim.steps >= 8 && e.bound_by);
  }
  assert_int_equal(mr_mem_live(), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(body_is_interpolated), cmocka_unit_test(one_row),
      cmocka_unit_test(sharing_and_scores),   cmocka_unit_test(limits_hold),
      cmocka_unit_test(memory_runs_out),      cmocka_unit_test(windows_make_room),
      cmocka_unit_test(copies_take_time),     cmocka_unit_test(measured_on_a_model),
  };
  return cmocka_run_group_tests(tests, temp_begin, temp_end);
}
