/* What a job will do, row by row: shared, cached and begun rows, lengths as they were seen. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "io/mem.h"
#include "jobs/forecast.h"
#include "kernels/kernels.h"
#include "temp.h"

enum { ROWS = 6, PROMPT = 100, OUT = 40, BLOCK = MR_KV_BLOCK };

static int32_t ids[ROWS][PROMPT];

/* Rows 0 to 3 begin with the same 70 tokens. */
static mr_plan *make_plan(void) {
  mr_err e = MR_ERR_INIT;
  mr_plan_writer *w;
  mr_plan *p = NULL;
  assert_int_equal(mr_plan_create(&w, temp_dir, &e), MR_OK);
  assert_int_equal(mr_plan_add_file(w, "rows.jsonl", &e), MR_OK);
  for (int i = 0; i < ROWS; i++) {
    for (int t = 0; t < PROMPT; t++)
      ids[i][t] = i < 4 && t < 70 ? t : 1000 * (i + 1) + t;
    mr_plan_record rec = {.e = {.n_prompt = PROMPT, .n_out = OUT, .kind = MR_ROW_PLAIN},
                          .json = "{}",
                          .json_len = 2,
                          .prompt = ids[i]};
    assert_int_equal(mr_plan_append(w, &rec, &e), MR_OK);
  }
  assert_int_equal(mr_plan_finish(w, &e), MR_OK);
  assert_int_equal(mr_plan_open(&p, temp_dir, &e), MR_OK);
  return p;
}

static const mr_engine_info info = {.max_batch = 4,
                                    .max_step_tokens = 64,
                                    .kv_tokens = 100000,
                                    .kv_bytes_per_token = 10,
                                    .kv_memory = 1000000};

/* A second a token. */
static mr_forecast forecast(mr_forecast_in in, double *seconds) {
  const mr_profile profile = {.factor = {1, 1, 1, 1, 1}};
  mr_err e = MR_ERR_INIT;
  mr_time_estimate est = {.rates = {.token = 1}};
  mr_forecast f;
  mr_schedule *order = NULL;
  mr_plan *p = make_plan();
  assert_int_equal(mr_schedule_open(&order, p, temp_dir, 0, NULL, NULL, &e), MR_OK);
  in.plan = p;
  in.order = order;
  in.info = &info;
  in.profile = &profile;
  if (mr_forecast_run(&f, &in, &est, &e))
    fail_msg("%s", e.text);
  mr_schedule_close(order);
  mr_plan_close(p);
  *seconds = est.sim.prefill_s + est.sim.decode_s;
  return f;
}

static void shared(void **state) {
  (void)state;
  double s;
  mr_forecast f = forecast((mr_forecast_in){0}, &s);
  assert_int_equal(f.rows, ROWS);
  assert_int_equal(f.shared_tokens, 3 * 2 * BLOCK);
  assert_int_equal(f.order.groups, 1);
  assert_int_equal(f.order.grouped_rows, 4);
  assert_true(s == ROWS * (PROMPT + OUT - 1) - 3 * 2 * BLOCK);
  f = forecast((mr_forecast_in){.no_sharing = true}, &s);
  assert_int_equal(f.shared_tokens, 3 * 2 * BLOCK);
  assert_true(s == ROWS * (PROMPT + OUT - 1));
}

/* The first row's first block and the fifth one's first two are there, and what nobody has. */
static void cached(void **state) {
  (void)state;
  double s;
  mr_prefixstore *store = NULL;
  mr_err e = MR_ERR_INIT;
  const char *dir = temp_path("cache");
  static const char page[BLOCK * 10];
  mr_plan_close(make_plan());
  assert_int_equal(mr_prefixstore_look(&store, dir, "key", &e), MR_OK);
  assert_null(store); /* and none was made */
  assert_int_equal(mr_prefixstore_open(&store, dir, "key", sizeof page, 1 << 20, &e), MR_OK);
  mr_prefixstore_put(store, 0, ids[0], BLOCK, page);
  mr_prefixstore_put(store, 0, ids[4], BLOCK, page);
  mr_prefixstore_put(store, 0, ids[4], 2 * BLOCK, page);
  mr_prefixstore_put(store, 0, ids[5], 2 * BLOCK, page); /* nothing leads to it */
  mr_prefixstore_close(store);
  assert_int_equal(mr_prefixstore_look(&store, dir, "other", &e), MR_OK);
  assert_null(store);
  assert_int_equal(mr_prefixstore_look(&store, dir, "key", &e), MR_OK);
  mr_forecast f = forecast((mr_forecast_in){.cache = store}, &s);
  assert_int_equal(f.shared_tokens, 3 * 2 * BLOCK);
  assert_int_equal(f.cached_tokens, 3 * BLOCK);
  double copied_s = 3 * BLOCK * 10 / 1e9;
  assert_true(s > ROWS * (PROMPT + OUT - 1) - 9 * BLOCK);
  assert_true(s < ROWS * (PROMPT + OUT - 1) - 9 * BLOCK + 2 * copied_s);
  f = forecast((mr_forecast_in){.cache = store, .no_sharing = true}, &s);
  assert_int_equal(f.cached_tokens, 0);
  assert_true(s == ROWS * (PROMPT + OUT - 1));
  mr_prefixstore_close(store);
}

static void lengths_as_seen(void **state) {
  (void)state;
  double all, half;
  forecast((mr_forecast_in){.share = 1}, &all);
  mr_forecast f = forecast((mr_forecast_in){.share = 0.5}, &half);
  assert_int_equal(f.output_tokens, ROWS * 20);
  assert_true(all - half == ROWS * 20);
}

static bool is_done(void *ctx, uint64_t row) {
  (void)ctx;
  return row == 3;
}

/* Row 9 is none of the job, row 3 is done, row 4 has its pages, row 5 has not. */
static void begun(void **state) {
  (void)state;
  mr_saver *w = NULL;
  mr_saved *saved = NULL;
  mr_err e = MR_ERR_INIT;
  double s, none;
  const char *prefix = temp_path("kv");
  static const char bytes[64];
  assert_int_equal(mr_saver_open(&w, prefix, NULL, sizeof bytes, 7, 1 << 20, 10, &e), MR_OK);
  const mr_saved_page page = mr_saver_page(w, bytes);
  const int32_t picks[10] = {0};
  const mr_saved_seq seq = {.n_picks = 10, .pick_bytes = 4};
  for (int i = 0; i < 4; i++) {
    const mr_saved_row r = {.row = (uint64_t[]){9, 3, 4, 5}[i],
                            .n_pages = i == 2,
                            .n_seqs = 1,
                            .n_picks_bytes = sizeof picks,
                            .pages = &page,
                            .seqs = &seq,
                            .picks = (const uint8_t *)picks};
    mr_saver_row(w, &r);
  }
  assert_int_equal(mr_saver_finish(w, &e), MR_OK);
  assert_int_equal(mr_saved_open(&saved, prefix, &e), MR_OK);
  assert_int_equal(mr_saved_rows(saved), 4);
  forecast((mr_forecast_in){0}, &none);
  mr_forecast f = forecast((mr_forecast_in){.saved = saved, .done = is_done}, &s);
  assert_int_equal(f.rows, ROWS + 2); /* the order of this test has all rows once more */
  assert_true(s - none == (1 + OUT - 10 - 1) + (PROMPT + 10 + OUT - 10 - 1));
  mr_saved_close(saved);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(shared), cmocka_unit_test(cached),
                                     cmocka_unit_test(lengths_as_seen), cmocka_unit_test(begun)};
  return cmocka_run_group_tests(tests, temp_begin, temp_end);
}
