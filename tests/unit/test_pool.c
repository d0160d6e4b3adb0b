/* test_pool.c: every item of a run is run once, by a worker that exists, and the run waits for all
 * of them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>

#include "kernels/pool.h"

#define ITEMS 1000

typedef struct tally {
  _Atomic int runs[ITEMS];
  int by_worker[64][16]; /* a cache line each: plain on purpose, a worker runs one item at a time */
  int threads;
  _Atomic int bad_worker;
} tally;

static void count(void *ctx, int item, int worker) {
  tally *t = ctx;
  if (worker < 0 || worker >= t->threads) {
    atomic_store(&t->bad_worker, 1);
    return;
  }
  atomic_fetch_add(&t->runs[item], 1);
  t->by_worker[worker][0]++;
}

static void check_runs(int threads, int items, int runs) {
  static tally t;
  memset(&t, 0, sizeof t);
  t.threads = threads;
  mr_pool *p = mr_pool_new(threads, 0);
  assert_non_null(p);
  assert_int_equal(mr_pool_threads(p), threads);
  for (int r = 1; r <= runs; r++) {
    (r % 2 ? mr_pool_run : mr_pool_run_parts)(p, count, &t, items);
    for (int i = 0; i < items; i++)
      assert_int_equal(atomic_load(&t.runs[i]), r);
  }
  int sum = 0;
  for (int w = 0; w < threads; w++)
    sum += t.by_worker[w][0];
  assert_int_equal(sum, items * runs);
  assert_int_equal(atomic_load(&t.bad_worker), 0);
  mr_pool_free(p);
}

static void every_item_once(void **state) {
  (void)state;
  static const int threads[] = {1, 2, 3, 8};
  static const int items[] = {0, 1, 2, 3, 7, 64, ITEMS};
  for (size_t i = 0; i < sizeof threads / sizeof *threads; i++)
    for (size_t j = 0; j < sizeof items / sizeof *items; j++)
      check_runs(threads[i], items[j], 20);
}

static void many_short_runs(void **state) {
  (void)state;
  check_runs(2, 2, 20000);
  check_runs(5, 9, 2000);
}

typedef struct firsts {
  _Atomic int begun;
  int first[2];
  _Atomic int seen[2];
} firsts;

/* A worker's first item waits for the other worker. */
static void take_first(void *ctx, int item, int worker) {
  firsts *f = ctx;
  if (atomic_exchange(&f->seen[worker], 1))
    return;
  f->first[worker] = item;
  atomic_fetch_add(&f->begun, 1);
  while (atomic_load(&f->begun) < 2)
    sched_yield();
}

static void parts_are_the_workers_own(void **state) {
  (void)state;
  mr_pool *p = mr_pool_new(2, 0);
  assert_non_null(p);
  for (int items = 2; items < 50; items++) {
    firsts f = {0};
    mr_pool_run_parts(p, take_first, &f, items);
    assert_int_equal(f.first[0], 0);
    assert_int_equal(f.first[1], items / 2);
  }
  mr_pool_free(p);
}

static void uneven(void *ctx, int item, int worker) {
  (void)worker;
  _Atomic uint64_t *sum = ctx;
  uint64_t x = 1;
  for (int i = 0; i < (item % 7 == 0 ? 200000 : 10); i++)
    x = x * 6364136223846793005u + 1;
  atomic_fetch_add(sum, (x | 1) - x + (x & 1) + (uint64_t)item); /* item + 1 */
}

static void uneven_items(void **state) {
  (void)state;
  mr_pool *p = mr_pool_new(4, 0);
  assert_non_null(p);
  for (int r = 0; r < 20; r++) {
    _Atomic uint64_t sum = 0;
    mr_pool_run(p, uneven, &sum, 100);
    assert_int_equal(atomic_load(&sum), 100 * 99 / 2 + 100);
  }
  mr_pool_free(p);
}

static void plain_write(void *ctx, int item, int worker) {
  (void)worker;
  ((int *)ctx)[item] += item;
}

/* What items wrote without atomics is seen by the caller, and by the next run. */
static void results_are_visible(void **state) {
  (void)state;
  static int values[64];
  mr_pool *p = mr_pool_new(3, 1);
  assert_non_null(p);
  for (int r = 1; r <= 500; r++) {
    mr_pool_run(p, plain_write, values, 64);
    for (int i = 0; i < 64; i++)
      assert_int_equal(values[i], i * r);
  }
  mr_pool_free(p);
}

static void odd_counts(void **state) {
  (void)state;
  assert_null(mr_pool_new(0, 0));
  assert_null(mr_pool_new(-3, 0));
  assert_true(mr_pool_cpus() >= 1);
  mr_pool_free(NULL);
  for (int i = 0; i < 50; i++)
    mr_pool_free(mr_pool_new(1 + i % 6, i & 1)); /* stop without a run */
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_item_once),           cmocka_unit_test(many_short_runs),
      cmocka_unit_test(parts_are_the_workers_own), cmocka_unit_test(uneven_items),
      cmocka_unit_test(results_are_visible),       cmocka_unit_test(odd_counts),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
