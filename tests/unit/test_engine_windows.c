/* A model with windows in two of three layers: what lies behind them is given back, by rows alone
 * and by the tree; whatever memory, disk and policy, the results are the same to the bit. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#define TINY_GGUF_LAYERS 3
#define TINY_GGUF_CONTEXT 1024

#include "io/sys.h"
#include "tests/unit/engine_rig.h"

/* A page holds a layer of a block: three pages a block. At most SEEN blocks of a sequence are read
 * by windows in steps of STEP tokens. */
enum { WINDOW = 40, STEP = 64, SEEN = 5, PAGE = 2 * TINY_KV_HEADS * TINY_HEAD * 32 * 4, ROWS = 20 };

static int32_t ids[ROWS][TINY_CONTEXT];
static mr_request reqs[ROWS];
static mr_result *base[ROWS];

static mr_engine_opts options(int pages) {
  mr_engine_opts o = tiny_options("cpu", STEP, (uint64_t)pages * PAGE);
  o.spill_dir = temp_dir;
  o.kv_policy = MR_KV_FEWER;
  return o;
}

static mr_engine_stats run(const mr_engine_opts *o, const mr_request *r, int n, bool backwards,
                           mr_result **out) {
  mr_engine_stats st;
  mr_engine *e = open_engine(o, tiny);
  run_all(e, r, n, backwards, out);
  mr_engine_keep_prefixes(e, 60);
  mr_engine_stats_get(e, &st);
  mr_engine_close(e);
  return st;
}

static void same(const mr_result *a, const mr_result *b) {
  assert_int_equal(a->err.code, MR_OK);
  same_result(a, b);
}

static void same_as_base(mr_result **r) {
  for (int i = 0; i < ROWS; i++)
    same(base[i], r[i]);
  free_results(r, ROWS);
}

static void fill(int32_t *to, int from, int end, int salt) {
  for (int t = from; t < end; t++)
    to[t] = (int32_t)((uint32_t)(t * 31 + t * t / 7 + salt * 57) % 250);
}

static mr_request ask(const int32_t *prompt, int n, int max_tokens) {
  mr_request r = generate(prompt, n, max_tokens);
  r.sampling.ignore_eos = true;
  r.sampling.logprobs = 1;
  return r;
}

/* Heads of 700, 300 and 130 tokens, tails of 1 to 200; all kinds of requests. */
static void make_rows(void) {
  static const int heads[3] = {700, 300, 130}, tails[7] = {7, 200, 90, 33, 1, 12, 140};
  static const int32_t cont[] = {9, 8, 6, 200, 201, 5, 4, 3, 2, 1};
  static const int cont_len[] = {1, 4, 5};
  for (int i = 0; i < ROWS; i++) {
    int head = heads[i % 3], n = head + tails[i % 7];
    fill(ids[i], 0, head, i % 3);
    fill(ids[i], head, n, i < 14 ? 3 + i : 3 + i - 12); /* some go on alike past the head */
    reqs[i] = ask(ids[i], n, 5 + 4 * i);
    reqs[i].tag = (uint64_t)i;
    reqs[i].row_key = 3000 + (uint64_t)i;
    reqs[i].sampling.temperature = i % 2 ? 0.8f : 0;
    reqs[i].sampling.n = i % 6 == 3 ? 3 : 1;
    if (i % 5 != 4)
      continue;
    reqs[i].task = MR_TASK_SCORE;
    reqs[i].cont = cont;
    reqs[i].cont_len = cont_len;
    reqs[i].n_cont = 3;
  }
}

static int setup(void **state) {
  tiny_mixed = true;
  tiny_window = WINDOW;
  if (tiny_begin(state, -1))
    return -1;
  make_rows();
  mr_engine_opts o = options(2000);
  o.no_prefix_sharing = true;
  run(&o, reqs, ROWS, false, base);
  return 0;
}

static int teardown(void **state) {
  free_results(base, ROWS);
  return tiny_end(state);
}

/* ---------------------------------------------------------------- memory */

/* 21 blocks are 63 pages; a row has 21 and those of the blocks that its windows see. */
static void a_long_row_takes_less(void **state) {
  (void)state;
  mr_result *r[2] = {0}, *one = NULL;
  mr_request q[2];
  static int32_t prompts[2][640];
  for (int i = 0; i < 2; i++) {
    fill(prompts[i], 0, 640, 20 + i);
    q[i] = ask(prompts[i], 640, 33);
    q[i].tag = (uint64_t)i;
  }
  for (int off = 0; off < 2; off++) {
    mr_engine_opts o = options(400);
    o.no_prefix_sharing = off;
    mr_engine_stats st = run(&o, q, 1, false, &one);
    assert_in_range(st.kv_pages_peak, 21 + 2 * 3, 21 + 2 * SEEN);
    o = options(70); /* two at once: 19 + 2 SEEN for the nodes, 3 and 3 for the blocks after */
    o.no_prefix_sharing = off;
    st = run(&o, q, 2, false, r);
    assert_int_equal(st.max_batch_seen, 2);
    assert_int_equal(st.preemptions, 0);
    same(one, r[0]);
    free_results(r, 2);
    o = options(35); /* the least for one */
    o.no_prefix_sharing = off;
    run(&o, q, 1, false, r);
    same(one, r[0]);
    mr_result_free(r[0]);
    mr_result_free(one);
  }
  mr_err err = MR_ERR_INIT;
  mr_engine_opts o = options(34);
  mr_engine *e = open_engine(&o, tiny);
  assert_int_equal(mr_engine_admit(e, &q[0], &err), MR_E_DATA);
  mr_engine_close(e);
}

/* A row of 600 tokens, one of 640 others, and one that goes another way after 400 of the first's.
 * Returns how many tokens the last one took from the first. */
static uint64_t branch_after_pressure(bool known) {
  mr_request q[3];
  mr_result *r[3] = {0}, *alone = NULL;
  static int32_t prompts[3][640];
  fill(prompts[0], 0, 640, 31);
  fill(prompts[1], 0, 640, 32);
  fill(prompts[2], 0, 400, 31);
  fill(prompts[2], 400, 640, 33);
  mr_engine_opts o = options(70);
  mr_engine_stats st;
  mr_engine *e = open_engine(&o, tiny);
  for (int i = 0; i < 3; i++) {
    q[i] = ask(prompts[i], i ? 640 : 600, 20);
    if (i == 1 && known)
      q[2].expected = mr_engine_expect(e, 0, prompts[2], 640);
    uint64_t expected = i == 2 && known ? 1 : 0;
    q[i].expected = expected;
    run_all(e, &q[i], 1, false, &r[i]);
  }
  mr_engine_stats_get(e, &st);
  mr_engine_close(e);
  o.no_prefix_sharing = true;
  run(&o, &q[2], 1, false, &alone);
  same(alone, r[2]);
  mr_result_free(alone);
  free_results(r, 3);
  return st.prompt_tokens_shared;
}

/* The tree gives up what is spent, and not what a row is known to go on from. */
static void known_rows_find_their_windows(void **state) {
  (void)state;
  assert_in_range(branch_after_pressure(true), 384, 400);
  assert_int_equal(branch_after_pressure(false), 0);
}

/* ---------------------------------------------------------------- everything runs out */

static void every_policy(void **state) {
  (void)state;
  static const mr_kv_policy all[] = {MR_KV_FEWER, MR_KV_AUTO, MR_KV_SPILL, MR_KV_RECOMPUTE};
  static const int steps[] = {STEP, 19, 512}, memory[] = {66, 140, 900};
  mr_result *r[ROWS] = {0};
  for (int i = 0; i < 48; i++) {
    mr_engine_opts o = options(memory[i / 4 % 3] + (steps[i / 12 % 3] > STEP ? 32 : 0));
    o.kv_policy = all[i % 4];
    o.max_step_tokens = steps[i / 12 % 3];
    o.no_prefix_sharing = i % 5 == 4;
    o.kv_disk = o.kv_policy == MR_KV_SPILL || i % 8 == 1 ? 64 << 20 : 0;
    o.threads = 1 + i % 2;
    o.max_batch = i % 7 == 6 ? 3 : 0;
    mr_engine_stats st = run(&o, reqs, ROWS, i / 24, r);
    same_as_base(r);
    if (o.kv_policy == MR_KV_FEWER)
      assert_true(st.preemptions == 0 && st.recomputed_tokens == 0);
    if (o.kv_policy == MR_KV_SPILL && i / 4 % 3 == 0)
      assert_true(st.kv_spill_bytes > 0 && st.kv_fetch_bytes > 0);
    assert_int_equal(st.kv_failures, 0);
  }
}

static void other_types(void **state) {
  (void)state;
  static const mr_kv_type types[] = {MR_KV_F16, MR_KV_INT8, MR_KV_Q4};
  for (int i = 0; i < 3; i++) {
    mr_result *ample[ROWS] = {0}, *r[ROWS] = {0};
    mr_engine_opts o = options(4000);
    mr_engine_info info;
    mr_err err = MR_ERR_INIT;
    o.kv_type = (int)types[i];
    assert_int_equal(mr_engine_estimate(&o, &info, &err), MR_OK);
    assert_true(info.kv_groups == 3 && info.kv_window_groups == 2 && info.kv_window == WINDOW);
    run(&o, reqs, ROWS, false, ample);
    for (int way = 0; way < 6; way++) {
      o.kv_memory = (uint64_t)(66 + 4 * info.kv_own_pages) * info.kv_page_bytes;
      o.kv_policy = way % 2 ? MR_KV_SPILL : MR_KV_RECOMPUTE;
      o.kv_disk = way % 2 ? 64 << 20 : 0;
      o.max_step_tokens = way < 4 ? STEP : 30;
      o.no_prefix_sharing = way == 2 || way == 3;
      mr_engine_stats st = run(&o, reqs, ROWS, way == 5, r);
      assert_true(st.preemptions > 0);
      for (int k = 0; k < ROWS; k++)
        same(ample[k], r[k]);
      free_results(r, ROWS);
    }
    free_results(ample, ROWS);
  }
}

static mr_sys bad_disk;
static int calls, fails_at, errors;

static ssize_t bad_pwrite(int fd, const void *buf, size_t n, off_t at) {
  if (++calls % fails_at)
    return mr_sys_os.pwrite(fd, buf, n, at);
  errors++;
  errno = ENOSPC;
  return -1;
}

static ssize_t bad_pread(int fd, void *buf, size_t n, off_t at) {
  ssize_t got = mr_sys_os.pread(fd, buf, n, at);
  if (++calls % fails_at == 0 && got > 100) {
    errors++;
    ((uint8_t *)buf)[100] ^= 1;
  }
  return got;
}

/* A full disk, and one that gives back other bits. */
static void bad_disks(void **state) {
  (void)state;
  mr_result *r[ROWS] = {0};
  int all = 0;
  for (int i = 0; i < 8; i++) {
    mr_engine_opts o = options(66);
    o.kv_policy = MR_KV_SPILL;
    o.kv_disk = i % 4 == 3 ? 40 * PAGE : 64 << 20;
    o.no_prefix_sharing = i % 2;
    bad_disk = mr_sys_os;
    if (i / 4)
      bad_disk.pread = bad_pread;
    else
      bad_disk.pwrite = bad_pwrite;
    calls = errors = 0;
    fails_at = 1 + i % 3;
    mr_sys_now = &bad_disk;
    mr_engine_stats st = run(&o, reqs, ROWS, false, r);
    mr_sys_now = &mr_sys_os;
    same_as_base(r);
    assert_true(!errors || st.recomputed_tokens > 0);
    all += errors;
  }
  assert_true(all > 8);
}

/* What is kept of the heads that rows share is whole again in the next run. */
static void prefixes_on_disk(void **state) {
  (void)state;
  mr_result *r[ROWS] = {0};
  mr_engine_opts o = options(66);
  o.prefix_cache = temp_path("cache");
  o.prefix_cache_bytes = 1 << 30;
  o.model_digest = "m";
  mr_engine_stats st = run(&o, reqs, ROWS, false, r);
  same_as_base(r);
  assert_true(st.cache_written_bytes >= (700 / 32 + 300 / 32 + 130 / 32) * 3 * PAGE);
  st = run(&o, reqs, ROWS, true, r);
  same_as_base(r);
  assert_true(st.prompt_tokens_cached >= (700 / 32 + 300 / 32 + 130 / 32) * 32);
  assert_int_equal(st.cache_bad, 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_long_row_takes_less),
      cmocka_unit_test(known_rows_find_their_windows),
      cmocka_unit_test(every_policy),
      cmocka_unit_test(other_types),
      cmocka_unit_test(bad_disks),
      cmocka_unit_test(prefixes_on_disk),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
