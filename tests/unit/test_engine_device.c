/* The engine on an emulated GPU: the CPU's tokens, and its own bits whatever the batch, the step
 * and the memory; pages that go to the disk and come back, pages that are copied before they are
 * written; what is refused, and why. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "src/engine_int.h"
#include "tests/unit/engine_rig.h"

enum { ROWS = 5, PROMPT = 110, NEW = 12 };

static int32_t prompts[ROWS][PROMPT];

static int setup(void **state) {
  uint32_t seed = 1;
  for (int i = 0; i < ROWS; i++)
    for (int t = 0; t < PROMPT; t++) {
      seed = seed * 1664525u + 1013904223u;
      /* rows 1 and 2 begin alike, to the middle of a page */
      prompts[i][t] = i == 2 && t < 50 ? prompts[1][t] : (int32_t)(seed >> 24);
    }
  return tiny_begin(state, -1);
}

static mr_engine_opts options(const char *device) {
  return tiny_options(device, 96, 2 << 20);
}

static mr_request request(int i, int n_choices) {
  mr_request r = generate(prompts[i], PROMPT - 7 * i, NEW);
  r.tag = (uint64_t)i;
  r.sampling.temperature = n_choices > 1 ? 1 : 0;
  r.sampling.n = n_choices;
  r.sampling.seed = 5;
  r.sampling.ignore_eos = true;
  r.sampling.logprobs = 2;
  return r;
}

static double clock_s, busy_s; /* of sim's virtual clock in the last run */

static void run_requests(const mr_engine_opts *o, const mr_request *reqs, int n,
                         mr_result **results, mr_engine_stats *st) {
  mr_engine *e = open_engine(o, tiny);
  run_all(e, reqs, n, false, results);
  mr_engine_stats_get(e, st);
  if (!strncmp(o->device, "sim", 3)) {
    clock_s = mr_sim_seconds(e->device.dev);
    busy_s = mr_sim_busy(e->device.dev);
  }
  mr_engine_close(e);
}

static void run(const mr_engine_opts *o, mr_result **results, mr_engine_stats *st) {
  mr_request reqs[ROWS];
  for (int i = 0; i < ROWS; i++)
    reqs[i] = request(i, i == 3 ? 2 : 1);
  run_requests(o, reqs, ROWS, results, st);
}

/* Ids equal; logprobs too, where bits must be. */
static void same(mr_result **a, mr_result **b, bool bits) {
  for (int i = 0; i < ROWS; i++) {
    assert_int_equal(a[i]->n_choices, b[i]->n_choices);
    for (int c = 0; c < a[i]->n_choices; c++) {
      const mr_choice *x = &a[i]->choices[c], *y = &b[i]->choices[c];
      assert_int_equal(x->n_ids, NEW);
      assert_int_equal(y->n_ids, NEW);
      assert_memory_equal(x->ids, y->ids, NEW * sizeof *x->ids);
      for (int t = 0; t < NEW && bits; t++)
        assert_true(x->logprobs[t].logprob == y->logprobs[t].logprob);
    }
  }
}

static void as_on_the_cpu(void **state) {
  (void)state;
  static const char *const devices[] = {"sim", "sim:wave64", "sim:wmma"};
  mr_result *cpu[ROWS] = {0}, *gpu[ROWS] = {0};
  mr_engine_stats st;
  mr_engine_opts o = options("cpu");
  run(&o, cpu, &st);
  for (int i = 0; i < 3; i++) {
    o = options(devices[i]);
    run(&o, gpu, &st);
    same(cpu, gpu, false);
    /* only the second choice's first token needs a row: its first one asked for another draw */
    assert_true(st.rows_fetched <= 1 && st.logit_rows >= ROWS * NEW);
    free_results(gpu, ROWS);
  }
  free_results(cpu, ROWS);
}

/* Tokens that are alike until two ways part, whose logprobs must be within `off`. */
static int alike(mr_result **a, mr_result **b, double off) {
  int n = 0;
  for (int i = 0; i < ROWS; i++)
    for (int c = 0; c < a[i]->n_choices; c++) {
      const mr_choice *x = &a[i]->choices[c], *y = &b[i]->choices[c];
      for (int t = 0; t < NEW && x->ids[t] == y->ids[t]; t++, n++)
        assert_true(fabs((double)x->logprobs[t].logprob - (double)y->logprobs[t].logprob) < off);
    }
  return n;
}

/* Keys and values of every type that both have. A last bit may move a value by a step of its type,
 * so it is the logprobs that must be near. */
static void types_near_the_cpu(void **state) {
  (void)state;
  static const struct {
    int kv;
    const char *device;
    double off;
  } all[] = {{MR_KV_F16, "sim", 0.004},
             {MR_KV_BF16, "sim:wave64", 0.01},
             {MR_KV_INT8, "sim", 0.03},
             {MR_KV_FP8, "sim:wmma", 0.2}};
  mr_result *cpu[ROWS] = {0}, *gpu[ROWS] = {0};
  mr_engine_stats st;
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    mr_engine_opts o = options("cpu");
    o.kv_type = all[i].kv;
    run(&o, cpu, &st);
    o.device = all[i].device;
    run(&o, gpu, &st);
    assert_true(alike(cpu, gpu, all[i].off) > (ROWS + 1) * NEW / 2);
    free_results(gpu, ROWS);
    free_results(cpu, ROWS);
  }
}

/* Weights of few bits: what the option says, and the same bits whether a matrix is widened in the
 * tiles or as a whole. */
static void weights_of_few_bits(void **state) {
  (void)state;
  static const char *const schemes[] = {"bf16", "bf16", "int8", "int4"};
  mr_result *narrow[ROWS] = {0}, *wide[ROWS] = {0};
  mr_engine_stats st;
  mr_engine_info info;
  mr_err err = MR_ERR_INIT;
  uint64_t before = UINT64_MAX;
  for (int w = 0; w < 4; w++) {
    mr_engine_opts o = options("sim");
    o.compute = MR_COMPUTE_FAST;
    o.device_weights = w;
    assert_int_equal(mr_engine_estimate(&o, &info, &err), MR_OK);
    assert_string_equal(info.scheme, schemes[w]);
    assert_true(w < 2 || info.packed_bytes < before);
    before = info.packed_bytes;
    if (w < 2)
      continue;
    run(&o, narrow, &st);
    o.max_step_tokens = 480;
    run(&o, wide, &st);
    same(narrow, wide, true);
    free_results(narrow, ROWS);
    free_results(wide, ROWS);
  }
}

static void bits_do_not_depend_on_memory(void **state) {
  (void)state;
  static const mr_compute modes[] = {MR_COMPUTE_EXACT, MR_COMPUTE_FAST};
  mr_result *base[ROWS] = {0}, *res[ROWS] = {0};
  mr_engine_stats st;
  for (int m = 0; m < 2; m++) {
    mr_engine_opts o = options("sim");
    o.compute = modes[m];
    run(&o, base, &st);
    assert_true(st.prompt_tokens_shared > 0);
    o.kv_memory = 8 << (m ? 13 : 14); /* eight pages */
    o.kv_disk = 4 << 20;
    o.spill_dir = "/tmp";
    o.no_prefix_sharing = true;
    o.kv_policy = MR_KV_SPILL;
    run(&o, res, &st);
    same(base, res, true);
    assert_true(st.kv_spill_bytes > 0 && st.kv_fetch_bytes > 0 && st.kv_failures == 0);
    free_results(res, ROWS);
    o.kv_policy = MR_KV_RECOMPUTE;
    o.max_step_tokens = 37;
    run(&o, res, &st);
    same(base, res, true);
    assert_true(st.recomputed_tokens > 0);
    free_results(res, ROWS);
    free_results(base, ROWS);
  }
}

enum { CROWD = 10, LONG = 80 };

/* Many long rows at once; tokens of all in ids [CROWD, LONG]. */
static void run_crowd(const mr_engine_opts *o, int32_t *ids, mr_engine_stats *st) {
  mr_request reqs[CROWD];
  mr_result *r[CROWD] = {0};
  for (int i = 0; i < CROWD; i++) {
    reqs[i] = request(i % ROWS, 1);
    reqs[i].tag = (uint64_t)i;
    reqs[i].n_prompt = 20 + i;
    reqs[i].sampling.max_tokens = LONG;
  }
  run_requests(o, reqs, CROWD, r, st);
  for (int i = 0; i < CROWD; i++) {
    assert_int_equal(r[i]->choices[0].n_ids, LONG);
    memcpy(ids + i * LONG, r[i]->choices[0].ids, LONG * sizeof *ids);
  }
  free_results(r, CROWD);
}

/* Pages go to the disk and come back beside the steps, on engines of their own. */
static void copies_run_beside_steps(void **state) {
  (void)state;
  static int32_t base[CROWD * LONG], ids[CROWD * LONG];
  mr_engine_stats st;
  mr_engine_opts o = options("sim");
  o.compute = MR_COMPUTE_FAST;
  run_crowd(&o, base, &st);
  assert_int_equal(st.kv_spill_bytes, 0);
  o.kv_memory = 12 << 13; /* 12 pages; all rows together have 35 */
  o.kv_disk = 4 << 20;
  o.spill_dir = "/tmp";
  o.no_prefix_sharing = true;
  o.kv_policy = MR_KV_SPILL;
  const double rate = 7e8;
  mr_sim_defaults = (mr_sim_opts){
      .copy_bytes_per_s = rate, .copy_latency_s = 1e-6, .own_bytes_per_s = 1e12, .kernel_s = 2e-6};
  run_crowd(&o, ids, &st);
  mr_sim_defaults = (mr_sim_opts){0};
  assert_memory_equal(base, ids, sizeof ids);
  assert_true(st.kv_spill_bytes > 0 && st.kv_fetch_bytes > 0 && st.kv_failures == 0);
  double copies = (double)(st.kv_spill_bytes + st.kv_fetch_bytes) / rate;
  print_message("of %.2f ms of copies %.2f ms are hidden behind steps\n", copies * 1e3,
                (busy_s - clock_s) * 1e3);
  assert_true(busy_s - clock_s > copies / 2);
}

/* A step becomes smaller, then there are fewer pages, then it is told what is missing. */
static void memory_is_planned(void **state) {
  (void)state;
  mr_engine_info big, small;
  mr_err err = MR_ERR_INIT;
  mr_engine_opts o = options("sim");
  o.max_step_tokens = 0;
  o.kv_memory = 0;
  assert_int_equal(mr_engine_estimate(&o, &big, &err), MR_OK);
  assert_string_equal(big.device, "sim");
  o.device_memory = 2 << 20;
  assert_int_equal(mr_engine_estimate(&o, &small, &err), MR_OK);
  assert_true(small.max_step_tokens < big.max_step_tokens);
  assert_true(small.kv_memory + small.packed_bytes < o.device_memory);
  o.compute = MR_COMPUTE_FAST;
  o.device_memory = 0;
  assert_int_equal(mr_engine_estimate(&o, &big, &err), MR_OK);
  assert_string_equal(big.scheme, "bf16");
  o.device_memory = big.packed_bytes / 100 * 108;
  o.max_step_tokens = 12;
  if (mr_engine_estimate(&o, &small, &err))
    fail_msg("%s", err.text);
  assert_string_equal(small.scheme, "int8");
  mr_engine *e = open_engine(&o, tiny);
  mr_request q = request(0, 1);
  mr_result *r = NULL;
  q.n_prompt = 10;
  run_all(e, &q, 1, false, &r);
  assert_int_equal(r->choices[0].n_ids, NEW);
  mr_result_free(r);
  mr_engine_close(e);
  mr_err_clear(&err);
  o.device_memory = 64 << 10;
  assert_int_equal(mr_engine_estimate(&o, &small, &err), MR_E_UNAVAILABLE);
  assert_non_null(strstr(err.text, "--device-memory"));
}

static void refusals(void **state) {
  (void)state;
  mr_engine_info info;
  mr_err err[3] = {MR_ERR_INIT, MR_ERR_INIT, MR_ERR_INIT};
  mr_engine_opts o = options("cpu");
  o.device_memory = 1 << 20;
  assert_int_equal(mr_engine_estimate(&o, &info, &err[0]), MR_E_USAGE);
  o = options("sim");
  o.kv_type = MR_KV_Q4;
  assert_int_equal(mr_engine_estimate(&o, &info, &err[1]), MR_E_UNAVAILABLE);
  assert_non_null(strstr(err[1].text, "q4"));
  o = options("sim"); /* exact */
  o.device_weights = 3;
  mr_err_clear(&err[1]);
  assert_int_equal(mr_engine_estimate(&o, &info, &err[1]), MR_E_USAGE);
  o = options("cpu");
  o.device_gemm = 1;
  mr_err_clear(&err[1]);
  assert_int_equal(mr_engine_estimate(&o, &info, &err[1]), MR_E_USAGE);
  assert_non_null(strstr(err[1].text, "--device-gemm"));
  o.device = "sim"; /* exact */
  mr_err_clear(&err[1]);
  assert_int_equal(mr_engine_estimate(&o, &info, &err[1]), MR_E_USAGE);
  o.compute = MR_COMPUTE_FAST;
  mr_err_clear(&err[1]);
  assert_int_equal(mr_engine_estimate(&o, &info, &err[1]), MR_E_UNAVAILABLE);
  assert_non_null(strstr(err[1].text, "no GEMM library"));
  o = options("sim:warp7");
  assert_int_equal(mr_engine_estimate(&o, &info, &err[2]), MR_E_UNAVAILABLE);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(as_on_the_cpu),
      cmocka_unit_test(types_near_the_cpu),
      cmocka_unit_test(weights_of_few_bits),
      cmocka_unit_test(bits_do_not_depend_on_memory),
      cmocka_unit_test(copies_run_beside_steps),
      cmocka_unit_test(memory_is_planned),
      cmocka_unit_test(refusals),
  };
  int failed = cmocka_run_group_tests(tests, setup, tiny_end);
  tiny_mixed = true; /* a window in one of two layers */
  tiny_window = 40;
  return failed + cmocka_run_group_tests_name("windows", tests, setup, tiny_end);
}
