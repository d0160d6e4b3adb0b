/* Rows in flight at the end of a run: the files, and an engine that goes on from them. */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "src/engine_int.h"
#include "tests/unit/engine_rig.h"

enum { ROWS = 12, LENGTH = 150 };

static char prefix[300];
static int32_t ids[ROWS][LENGTH];
static mr_request reqs[ROWS];
static mr_result *base[ROWS];

/* Rows 0 to 5 have a head in common; some have choices, logprobs, or are short. */
static void make_rows(void) {
  for (int i = 0; i < ROWS; i++) {
    for (int t = 0; t < LENGTH; t++)
      ids[i][t] = (int32_t)((uint32_t)(t * 37 + (t < 70 && i < 6 ? 1 : i * 101 + 7)) % 250);
    reqs[i] = (mr_request){.tag = (uint64_t)i,
                           .row = 1000 + (uint64_t)i,
                           .row_key = 5 * (uint64_t)i,
                           .prompt = ids[i],
                           .n_prompt = i % 4 == 3 ? 33 : 100 + i * 3,
                           .sampling = mr_sampling_default};
    mr_sampling *s = &reqs[i].sampling;
    s->temperature = i % 2 ? 0.9f : 0;
    s->max_tokens = 20 + i;
    s->n = i % 5 == 4 ? 3 : 1;
    s->logprobs = i % 3 == 1 ? 2 : -1;
    s->ignore_eos = i % 2;
  }
}

static mr_engine_opts options(void) {
  return tiny_options("cpu", 100, 4 << 20);
}

static void admit_all(mr_engine *e, mr_result *const *done) {
  mr_err err = MR_ERR_INIT;
  for (int i = 0; i < ROWS; i++)
    if (!done[i] && mr_engine_admit(e, &reqs[i], &err))
      fail_msg("admit: %s", err.text);
}

/* Up to `steps` of them. */
static void go(mr_engine *e, int steps, mr_result **done) {
  while (mr_engine_active(e) && steps-- > 0)
    step(e, done);
}

static int setup(void **state) {
  if (tiny_begin(state, -1))
    return -1;
  snprintf(prefix, sizeof prefix, "%s/kv", temp_dir);
  make_rows();
  mr_engine_opts o = options();
  mr_engine *e = open_engine(&o, tiny);
  admit_all(e, base);
  go(e, 10000, base);
  mr_engine_close(e);
  return 0;
}

static int teardown(void **state) {
  free_results(base, ROWS);
  return tiny_end(state);
}

/* A run of `steps` steps, and what it saves. */
static mr_engine_stats part(const mr_engine_opts *o, int steps, uint64_t max_bytes,
                            mr_result **done) {
  mr_err err = MR_ERR_INIT;
  mr_engine_stats st;
  mr_engine *e = open_engine(o, tiny);
  admit_all(e, done);
  go(e, steps, done);
  if (mr_engine_active(e) && mr_engine_save(e, prefix, max_bytes, 60, &err))
    fail_msg("save: %s", err.text);
  mr_engine_stats_get(e, &st);
  mr_engine_close(e);
  return st;
}

static void check_and_free(mr_result **done) {
  for (int i = 0; i < ROWS; i++) {
    assert_non_null(done[i]);
    same_result(base[i], done[i]);
  }
  free_results(done, ROWS);
}

static void damage_pages(int how) {
  char path[320];
  for (int g = 0; g < 2; g++) {
    snprintf(path, sizeof path, "%s.pages.%d", prefix, g);
    int fd = open(path, O_RDWR);
    if (fd < 0)
      continue;
    char c = 0x55;
    for (off_t at = 0; how == 1 && at < (1 << 20); at += 40000)
      assert_int_equal(pwrite(fd, &c, 1, at), 1);
    if (how == 2)
      assert_int_equal(ftruncate(fd, 20000), 0);
    close(fd);
  }
}

/* Stopped again and again, after so many steps each: the results are the undisturbed ones. */
static void in_parts(int steps, uint64_t max_bytes, const mr_engine_opts *like, int damage) {
  mr_err err = MR_ERR_INIT;
  mr_result *done[ROWS] = {0};
  uint64_t output = 0;
  bool all = false;
  for (int run = 0; !all; run++) {
    mr_saved *saved = NULL;
    if (run)
      assert_int_equal(mr_saved_open(&saved, prefix, &err), MR_OK);
    mr_engine_opts o = *like;
    o.saved = saved;
    mr_engine_stats st = part(&o, steps + run, max_bytes, done);
    output += st.output_tokens;
    assert_true(!run || (saved && st.resumed_rows > 0));
    if (max_bytes > 1 << 20 && !damage && run > 1 && like->kv_memory > 1 << 20)
      assert_true(st.kv_fetch_bytes > 0 && st.recomputed_tokens == 0);
    mr_saved_close(saved);
    if (damage)
      damage_pages(damage);
    all = true;
    for (int i = 0; i < ROWS; i++)
      all = all && done[i];
    assert_true(run < 60);
  }
  uint64_t want = 0;
  for (int i = 0; i < ROWS; i++)
    for (int c = 0; c < base[i]->n_choices; c++)
      want += (uint64_t)base[i]->choices[c].n_sampled;
  assert_int_equal(output, want); /* no token was chosen twice */
  check_and_free(done);
}

static void stopped_and_gone_on(void **state) {
  (void)state;
  mr_engine_opts o = options();
  in_parts(1, 16 << 20, &o, 0);
  in_parts(9, 16 << 20, &o, 0);
  in_parts(20, 16 << 20, &o, 0);
}

static void without_room_for_pages(void **state) {
  (void)state;
  mr_engine_opts o = options();
  in_parts(7, 0, &o, 0);
  in_parts(12, 10 << 14, &o, 0); /* ten pages */
}

static void damaged_pages(void **state) {
  (void)state;
  mr_engine_opts o = options();
  in_parts(11, 16 << 20, &o, 1);
  in_parts(11, 16 << 20, &o, 2);
}

/* Rows that were parked, on disk or not, are saved too. */
static void with_parked_rows(void **state) {
  (void)state;
  mr_engine_opts o = options();
  o.kv_memory = 16 << 14;
  o.spill_dir = temp_dir;
  o.kv_disk = 8 << 20;
  o.kv_policy = MR_KV_SPILL;
  in_parts(8, 16 << 20, &o, 0);
  o.kv_policy = MR_KV_RECOMPUTE;
  in_parts(8, 16 << 20, &o, 0);
  o.no_prefix_sharing = true;
  o.kv_policy = MR_KV_SPILL;
  in_parts(15, 16 << 20, &o, 0);
}

/* The rows' file cut or changed anywhere is no file; no byte of it is taken at its word. */
static void damaged_rows(void **state) {
  (void)state;
  mr_err err = MR_ERR_INIT;
  mr_result *done[ROWS] = {0};
  mr_engine_opts o = options();
  char path[320];
  static uint8_t bytes[1 << 20];
  mr_saved *s = NULL;
  part(&o, 6, 16 << 20, done);
  free_results(done, ROWS);
  snprintf(path, sizeof path, "%s.rows", prefix);
  int fd = open(path, O_RDWR);
  ssize_t n = read(fd, bytes, sizeof bytes);
  assert_in_range(n, 1000, sizeof bytes - 1);
  for (ssize_t at = 0; at < n; at += 1 + n / 300) {
    bytes[at] ^= 0x41;
    assert_int_equal(pwrite(fd, &bytes[at], 1, at), 1);
    assert_int_equal(mr_saved_open(&s, prefix, &err), MR_OK);
    assert_null(s);
    bytes[at] ^= 0x41;
    assert_int_equal(pwrite(fd, &bytes[at], 1, at), 1);
  }
  assert_int_equal(mr_saved_open(&s, prefix, &err), MR_OK);
  assert_non_null(s);
  assert_true(mr_saved_has(s, 1000) && !mr_saved_has(s, 999));
  mr_saved_close(s);
  for (ssize_t len = n - 1; len >= 0; len -= 1 + n / 100) {
    assert_int_equal(ftruncate(fd, len), 0);
    assert_int_equal(mr_saved_open(&s, prefix, &err), MR_OK);
    assert_null(s);
  }
  close(fd);
}

/* The rows' file as another program might write it, with a right digest: change is called for each
 * row. */
static void write_rows(void (*change)(mr_saved_row *r, mr_saved_seq *seqs)) {
  static mr_saved_page pages[200];
  static uint8_t page[1 << 15];
  mr_err err = MR_ERR_INIT;
  mr_engine_info info;
  mr_engine_opts o = options();
  mr_saved *s;
  mr_saver *w;
  assert_int_equal(mr_engine_estimate(&o, &info, &err), MR_OK);
  assert_in_range(info.kv_page_bytes, 1, sizeof page);
  assert_int_equal(mr_saved_open(&s, prefix, &err), MR_OK);
  assert_true(mr_saved_rows(s) > 0);
  assert_int_equal(
      mr_saver_open(&w, prefix, s, info.kv_page_bytes, mr_engine_layout(&info), 16 << 20, 60, &err),
      MR_OK);
  for (int i = 0; i < mr_saved_rows(s); i++) {
    mr_saved_row r = *mr_saved_at(s, i);
    mr_saved_seq seqs[3];
    assert_in_range(r.n_pages, 0, 200);
    assert_in_range(r.n_seqs, 1, 3);
    memcpy(seqs, r.seqs, (size_t)r.n_seqs * sizeof *seqs);
    for (int k = 0; k < r.n_pages; k++)
      pages[k] = mr_saved_read(s, &r.pages[k], page) ? mr_saver_page(w, page) : r.pages[k];
    r.pages = pages;
    r.seqs = seqs;
    change(&r, seqs);
    mr_saver_row(w, &r);
  }
  mr_saved_close(s);
  assert_int_equal(mr_saver_finish(w, &err), MR_OK);
}

static void as_it_is(mr_saved_row *r, mr_saved_seq *seqs) {
  (void)r, (void)seqs;
}

static void one_page_less(mr_saved_row *r, mr_saved_seq *seqs) {
  (void)seqs;
  r->n_pages -= r->n_pages > 0;
}

/* More tokens than an int counts, of no bytes. */
static void endless_picks(mr_saved_row *r, mr_saved_seq *seqs) {
  for (int i = 0; i < r->n_seqs; i++)
    seqs[i].n_picks = INT32_MAX, seqs[i].pick_bytes = 0;
  r->n_picks_bytes = 0;
}

/* A whole file may lie about its counts: what is behind them is not read. */
static void counts_that_lie(void **state) {
  (void)state;
  for (int less = 0; less < 2; less++) {
    mr_err err = MR_ERR_INIT;
    mr_result *done[ROWS] = {0};
    mr_engine_opts o = options();
    part(&o, 20, 16 << 20, done);
    write_rows(less ? one_page_less : as_it_is);
    assert_int_equal(mr_saved_open(&o.saved, prefix, &err), MR_OK);
    mr_engine_stats st = part(&o, 10000, 0, done);
    assert_true(st.resumed_rows > 0);
    assert_int_equal(st.kv_fetch_bytes > 0, !less);
    mr_saved_close(o.saved);
    check_and_free(done);
  }
  mr_err err = MR_ERR_INIT;
  mr_saved *s;
  write_rows(endless_picks);
  assert_int_equal(mr_saved_open(&s, prefix, &err), MR_OK);
  assert_null(s);
}

static void out_of_memory(void **state) {
  (void)state;
  mr_err err = MR_ERR_INIT;
  mr_result *done[ROWS] = {0};
  mr_engine_opts o = options();
  part(&o, 6, 16 << 20, done);
  mr_saved *s = NULL;
  int64_t n = 0;
  for (mr_code rc = MR_E_NOMEM; rc; n++) {
    mr_mem_fail_after(n);
    rc = mr_saved_open(&s, prefix, &err);
    mr_mem_fail_after(-1);
    assert_true(rc == MR_OK || rc == MR_E_NOMEM);
    assert_true((rc == MR_OK) == (s != NULL));
  }
  o.saved = s;
  free_results(done, ROWS);
  mr_engine *e = open_engine(&o, tiny);
  admit_all(e, done);
  go(e, 1, done);
  for (mr_code rc = MR_E_NOMEM; rc; n++) {
    mr_mem_fail_after(n % 20);
    rc = mr_engine_save(e, prefix, 16 << 20, 60, &err);
    mr_mem_fail_after(-1);
    assert_true(rc == MR_OK || rc == MR_E_NOMEM);
    if (rc && n > 100)
      rc = mr_engine_save(e, prefix, 16 << 20, 60, &err);
  }
  mr_engine_close(e);
  mr_saved_close(s);
  free_results(done, ROWS);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(stopped_and_gone_on), cmocka_unit_test(without_room_for_pages),
      cmocka_unit_test(damaged_pages),       cmocka_unit_test(with_parked_rows),
      cmocka_unit_test(damaged_rows),        cmocka_unit_test(counts_that_lie),
      cmocka_unit_test(out_of_memory),
  };
  int failed = cmocka_run_group_tests(tests, setup, teardown);
  tiny_mixed = true; /* a window in one of two layers */
  tiny_window = 40;
  return failed + cmocka_run_group_tests_name("windows", tests, setup, teardown);
}
