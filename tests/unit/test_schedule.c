#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include <errno.h>

#include "io/mem.h"
#include "io/sys.h"
#include "jobs/schedule.h"
#include "temp.h"

static const uint32_t *row_adapters; /* of each row, from 1; NULL: none */
static const int *row_outputs;       /* tokens of each row; NULL: one */

/* A plan of rows with these lengths; -1: a bad row. A row's prompt begins with as many tokens of
 * its head as `head` says, and goes on with its own number; NULL: they are all alike. */
typedef struct start {
  int head, tokens;
} start;

static mr_plan *plan_with(const int *lengths, const start *starts, int n) {
  mr_err e = MR_ERR_INIT;
  mr_plan_writer *w;
  mr_plan *p = NULL;
  assert_int_equal(mr_plan_create(&w, temp_dir, &e), MR_OK);
  assert_int_equal(mr_plan_add_file(w, "rows.jsonl", &e), MR_OK);
  int32_t *ids = mr_mem_alloc(4096, sizeof *ids);
  for (int i = 0; i < n; i++) {
    bool bad = lengths[i] < 0;
    mr_plan_record rec = {.e = {.n_prompt = bad ? 0 : lengths[i],
                                .n_out = bad           ? 0
                                         : row_outputs ? row_outputs[i]
                                                       : 1,
                                .adapter = row_adapters ? row_adapters[i] : 0,
                                .kind = bad ? MR_ROW_BAD : MR_ROW_PLAIN},
                          .json = "{}",
                          .json_len = 2,
                          .prompt = ids};
    for (int t = 0; starts && t < rec.e.n_prompt; t++)
      ids[t] = t < starts[i].tokens ? 100000 + starts[i].head : i;
    assert_int_equal(mr_plan_append(w, &rec, &e), MR_OK);
  }
  mr_mem_free(ids);
  assert_int_equal(mr_plan_finish(w, &e), MR_OK);
  assert_int_equal(mr_plan_open(&p, temp_dir, &e), MR_OK);
  return p;
}

static mr_plan *plan_of(const int *lengths, int n) {
  return plan_with(lengths, NULL, n);
}

/* memory 0: all in memory; else so little that everything goes through files. */
static mr_schedule *open_with(const mr_plan *p, size_t memory, bool (*skip)(void *, uint64_t)) {
  mr_err e = MR_ERR_INIT;
  mr_schedule *s = NULL;
  assert_int_equal(mr_schedule_open(&s, p, temp_dir, memory, skip, NULL, &e), MR_OK);
  return s;
}

static bool next(mr_schedule *s, uint64_t *row) {
  mr_err e = MR_ERR_INIT;
  bool more;
  assert_int_equal(mr_schedule_next(s, row, &more, &e), MR_OK);
  return more;
}

static void order_is(const mr_plan *p, bool (*skip)(void *, uint64_t), const int *want, int n) {
  uint64_t row;
  for (size_t memory = 0; memory <= 100; memory += 100) {
    mr_schedule *s = open_with(p, memory, skip);
    for (int i = 0; i < n; i++) {
      assert_int_equal(mr_schedule_left(s), n - i);
      assert_true(next(s, &row));
      assert_int_equal(row, want[i]);
    }
    assert_false(next(s, &row));
    mr_schedule_close(s);
  }
}

static bool skip_odd(void *ctx, uint64_t row) {
  (void)ctx;
  return row % 2 == 1;
}

static void bad_ones_first_then_long_before_short(void **state) {
  (void)state;
  const int lengths[] = {10, 4000, -1, 500, 10, -1, 1000, 2000};
  const int all[] = {2, 5, 1, 7, 6, 3, 0, 4}, even[] = {2, 6, 0, 4};
  mr_plan *p = plan_of(lengths, 8);
  order_is(p, NULL, all, 8);
  order_is(p, skip_odd, even, 4);
  mr_plan_close(p);
}

/* Each row once, and lengths fall but for the width of a bucket. */
static void every_row_comes_once(void **state) {
  (void)state;
  enum { N = 3000 };
  static int lengths[N];
  static unsigned char seen[N];
  for (int i = 0; i < N; i++)
    lengths[i] = i * 7919 % 4001;
  mr_plan *p = plan_of(lengths, N);
  mr_schedule *s = open_with(p, 0, NULL);
  uint64_t row;
  int last = 4001;
  while (next(s, &row)) {
    assert_true(row < N && !seen[row]++);
    assert_true(lengths[row] <= last * 1.07 + 2);
    last = lengths[row] < last ? lengths[row] : last;
  }
  for (int i = 0; i < N; i++)
    assert_int_equal(seen[i], 1);
  mr_schedule_close(s);
  mr_plan_close(p);
}

/* Groups hang together, in order of their longest row; a shorter head alone is no group. */
static void rows_that_begin_alike_come_together(void **state) {
  (void)state;
  const int lengths[] = {300, 900, 400, 500, 310, 2000, 420, 100, 700};
  const start starts[] = {{1, 96}, {0, 0},   {2, 200}, {1, 96}, {1, 96},
                          {0, 0},  {2, 200}, {3, 20},  {3, 20}};
  const int want[] = {5, 1, 8, 3, 4, 0, 6, 2, 7};
  mr_plan *p = plan_with(lengths, starts, 9);
  order_is(p, NULL, want, 9);
  mr_plan_close(p);
}

/* A head of 64 tokens, and inside it two of 256: those come one after the other. */
static void groups_inside_groups(void **state) {
  (void)state;
  enum { N = 24 };
  int lengths[N];
  start starts[N];
  uint64_t row, last = 0;
  int changes = 0;
  for (int i = 0; i < N; i++) {
    lengths[i] = 300 + i;
    starts[i] = (start){i % 3, 256};
  }
  mr_plan *p = plan_with(lengths, starts, N);
  mr_schedule *s = open_with(p, 0, NULL);
  for (int i = 0; i < N; i++) {
    assert_true(next(s, &row));
    changes += i && row % 3 != last % 3;
    last = row;
  }
  assert_int_equal(changes, 2);
  mr_schedule_close(s);
  mr_plan_close(p);
}

/* Rows of one adapter hang together whatever else they share or how long they are; those of the one
 * with the longest row first; inside, long before short. */
static void rows_of_an_adapter_come_together(void **state) {
  (void)state;
  static const uint32_t adapter[] = {0, 2, 1, 2, 0, 1, 2, 0, 0};
  const int lengths[] = {310, 2000, 400, 300, 900, 500, 300, -1, 300};
  const start starts[] = {{1, 96}, {0, 0},  {1, 96}, {1, 96}, {0, 0},
                          {1, 96}, {1, 96}, {0, 0},  {1, 96}};
  const int want[] = {7, 1, 3, 6, 4, 0, 8, 5, 2};
  row_adapters = adapter;
  mr_plan *p = plan_with(lengths, starts, 9);
  row_adapters = NULL;
  order_is(p, NULL, want, 9);
  mr_plan_close(p);
}

/* Rows that are mostly prompt come between those that are mostly output, which lead by a quarter;
 * each kind in its own order, a group of either kind whole, and what a group shares counts once. */
static void kinds_of_rows_take_turns(void **state) {
  (void)state;
  enum { LONG = 20, PROMPTS = 40, N = LONG + PROMPTS };
  static int lengths[N], outputs[N];
  static start starts[N];
  int seen[2] = {0, 0}, last_long = -1, n = 0;
  double prefill = 0, decode = 0, all_prefill = 0;
  uint64_t row;
  for (int i = 0; i < N; i++) {
    bool is_long = i < LONG;
    lengths[i] = is_long ? 20 : 400;
    outputs[i] = is_long ? 300 : 2;
    starts[i] = is_long ? (start){0, 0} : (start){1 + i % 2, 256}; /* two groups */
    all_prefill += lengths[i] - (i >= LONG + 2 ? 256 : 0);
  }
  row_outputs = outputs;
  mr_plan *p = plan_with(lengths, starts, N);
  row_outputs = NULL;
  mr_schedule *s = open_with(p, 0, NULL);
  assert_true(mr_schedule_info_of(s).blended);
  assert_int_equal(mr_schedule_info_of(s).groups, 2);
  bool begun[2] = {false, false};
  int changes = 0, last_group = -1;
  for (; next(s, &row); n++) {
    bool is_long = row < LONG;
    if (is_long) {
      assert_true((int)row > last_long); /* equal ones in input order */
      last_long = (int)row;
    } else {
      int g = (int)row % 2;
      changes += g != last_group;
      last_group = g;
      prefill += begun[g] ? 400 - 256 : 400;
      begun[g] = true;
    }
    seen[is_long]++;
    prefill += is_long ? 20 : 0;
    decode += outputs[row];
    if (seen[1] < LONG && seen[0] < PROMPTS) { /* neither scan is at its end */
      double ahead = decode / (LONG * 300 + PROMPTS * 2) - prefill / all_prefill;
      assert_true(ahead > 0.25 - 0.08 || seen[1] + seen[0] < 8);
      assert_true(ahead < 0.25 + 0.08);
    }
  }
  assert_int_equal(n, N);
  assert_int_equal(changes, 2);
  assert_int_equal(seen[1], LONG);
  mr_schedule_close(s);
  mr_plan_close(p);
}

/* Where there are fewer octaves between them the scan from the front is alone: most output first.
 */
static void neighbours_do_not_take_turns(void **state) {
  (void)state;
  const int lengths[] = {100, 100, 900, 100, -1, 100}, outputs[] = {4, 15, 7, 8, 0, 5};
  const int want[] = {4, 1, 3, 2, 0, 5};
  row_outputs = outputs;
  mr_plan *p = plan_of(lengths, 6);
  row_outputs = NULL;
  order_is(p, NULL, want, 6);
  mr_schedule *s = open_with(p, 0, NULL);
  assert_false(mr_schedule_info_of(s).blended); /* a bad row is no kind */
  mr_schedule_close(s);
  mr_plan_close(p);
}

/* The order is the same whether it was found in memory or through files. */
static void files_change_nothing(void **state) {
  (void)state;
  enum { N = 700 };
  static int lengths[N], outputs[N];
  static uint32_t adapters[N];
  static start starts[N];
  for (int i = 0; i < N; i++) {
    outputs[i] = 1 << i * 13 % 9;
    adapters[i] = (uint32_t)(i * 7 % 3);
    lengths[i] = i % 41 == 7 ? -1 : 3 + i * 7919 % 900;
    starts[i] = (start){i * 31 % 11, i % 2 ? 40 : i % 5 * 150};
  }
  row_outputs = outputs;
  row_adapters = adapters;
  mr_plan *p = plan_with(lengths, starts, N);
  row_outputs = NULL;
  row_adapters = NULL;
  mr_schedule *a = open_with(p, 0, NULL), *b = open_with(p, 500, NULL);
  mr_err e = MR_ERR_INIT;
  uint64_t x, y;
  for (int again = 0; again < 2; again++) { /* the second time after a rewind in the middle */
    static unsigned char seen[N];
    int n = again ? N : N / 3;
    memset(seen, 0, sizeof seen);
    for (int i = 0; i < n; i++) {
      assert_true(next(a, &x) && next(b, &y));
      assert_int_equal(x, y);
      assert_true(x < N && !seen[x]++);
    }
    assert_true(!again || !next(a, &x));
    assert_int_equal(mr_schedule_rewind(a, &e), MR_OK);
    assert_int_equal(mr_schedule_rewind(b, &e), MR_OK);
  }
  mr_schedule_close(a);
  mr_schedule_close(b);
  mr_plan_close(p);
}

/* A disk that is full is an error, not another order. */
static ssize_t full(int fd, const void *bytes, size_t n) {
  (void)fd, (void)bytes, (void)n;
  errno = ENOSPC;
  return -1;
}

static void a_full_disk_is_told(void **state) {
  (void)state;
  enum { N = 50 };
  int lengths[N];
  mr_err e = MR_ERR_INIT;
  mr_schedule *s = NULL;
  for (int i = 0; i < N; i++)
    lengths[i] = 10 + i;
  mr_plan *p = plan_of(lengths, N);
  mr_sys table = mr_sys_os;
  table.write = full;
  mr_sys_now = &table;
  assert_int_equal(mr_schedule_open(&s, p, temp_dir, 100, NULL, NULL, &e), MR_E_IO);
  mr_sys_now = &mr_sys_os;
  mr_plan_close(p);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(bad_ones_first_then_long_before_short),
      cmocka_unit_test(every_row_comes_once),
      cmocka_unit_test(rows_that_begin_alike_come_together),
      cmocka_unit_test(groups_inside_groups),
      cmocka_unit_test(rows_of_an_adapter_come_together),
      cmocka_unit_test(kinds_of_rows_take_turns),
      cmocka_unit_test(neighbours_do_not_take_turns),
      cmocka_unit_test(files_change_nothing),
      cmocka_unit_test(a_full_disk_is_told),
  };
  return cmocka_run_group_tests(tests, temp_begin, temp_end);
}
