#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "io/mem.h"
#include "jobs/shard.h"
#include "temp.h"

typedef struct row {
  int group;  /* prompts of a group share their first `shared` ids */
  int shared; /* ids */
  int own;    /* ids of the row alone */
  int n_out;
  bool bad;
} row;

static uint32_t random_at(uint64_t *state) {
  *state = *state * 6364136223846793005ull + 1442695040888963407ull;
  return (uint32_t)(*state >> 33);
}

static mr_plan *plan_of(const row *rows, size_t n) {
  mr_err e = MR_ERR_INIT;
  mr_plan_writer *w;
  mr_plan *p;
  int32_t ids[2048];
  assert_int_equal(mr_plan_create(&w, temp_dir, &e), MR_OK);
  assert_int_equal(mr_plan_add_file(w, "in", &e), MR_OK);
  for (size_t i = 0; i < n; i++) {
    const row *r = &rows[i];
    int n_ids = r->shared + r->own;
    for (int k = 0; k < n_ids; k++)
      ids[k] = k < r->shared ? r->group * 100 + k % 7 : (int32_t)(100000 + i * 10 + (size_t)k % 10);
    const mr_plan_record rec = {.e = {.line = i + 1,
                                      .n_prompt = n_ids,
                                      .n_out = r->n_out,
                                      .kind = r->bad ? MR_ROW_BAD : MR_ROW_PLAIN},
                                .json = (char[]){"{}"},
                                .json_len = 2,
                                .prompt = ids};
    assert_int_equal(mr_plan_append(w, &rec, &e), MR_OK);
  }
  assert_int_equal(mr_plan_finish(w, &e), MR_OK);
  assert_int_equal(mr_plan_open(&p, temp_dir, &e), MR_OK);
  return p;
}

/* Opens all shards; shard_of[i] of each row. Each row has exactly one; local numbers have no gaps.
 */
static void cut(const row *rows, size_t n, int of, int *shard_of, double *load) {
  mr_err e = MR_ERR_INIT;
  mr_plan *p = plan_of(rows, n);
  uint64_t first_cut = 0, sum = 0;
  for (size_t i = 0; i < n; i++)
    shard_of[i] = -1;
  for (int k = 0; k < of; k++) {
    mr_shard *s;
    uint64_t local = 0;
    load[k] = 0;
    assert_int_equal(mr_shard_open(&s, p, (mr_shard_part){k + 1, of}, &e), MR_OK);
    for (size_t i = 0; i < n; i++) {
      if (!mr_shard_has(s, i))
        continue;
      assert_int_equal(shard_of[i], -1);
      assert_int_equal(mr_shard_local(s, i), local++);
      shard_of[i] = k;
      if (!rows[i].bad)
        load[k] += rows[i].shared + rows[i].own + rows[i].n_out;
      else
        assert_int_equal(i % (size_t)of, k);
    }
    assert_int_equal(mr_shard_rows(s), local);
    sum += local;
    if (k == 0)
      first_cut = mr_shard_cut(s);
    assert_true(mr_shard_cut(s) == first_cut);
    mr_shard_close(s);
  }
  assert_int_equal(sum, n);
  mr_plan_close(p);
}

static double most(const double *load, int n) {
  double m = 0;
  for (int i = 0; i < n; i++)
    m = load[i] > m ? load[i] : m;
  return m;
}

static double mean(const double *load, int n) {
  double m = 0;
  for (int i = 0; i < n; i++)
    m += load[i] / n;
  return m;
}

/* Groups that fit a shard are whole, and the shards have about equal work. */
static void groups_stay_whole(void **state) {
  (void)state;
  enum { GROUPS = 60, ROWS = 3000 };
  static row rows[ROWS];
  static int at[ROWS];
  double load[8];
  uint64_t seed = 1;
  for (int i = 0; i < ROWS; i++)
    rows[i] = (row){.group = (int)(random_at(&seed) % GROUPS),
                    .shared = 40,
                    .own = (int)(random_at(&seed) % 30),
                    .n_out = (int)(random_at(&seed) % 60),
                    .bad = random_at(&seed) % 20 == 0};
  for (int of = 1; of <= 8; of++) {
    int home[GROUPS];
    memset(home, -1, sizeof home);
    cut(rows, ROWS, of, at, load);
    for (int i = 0; i < ROWS; i++) {
      if (rows[i].bad)
        continue;
      int *h = &home[rows[i].group];
      assert_true(*h < 0 || *h == at[i]);
      *h = at[i];
    }
    assert_true(most(load, of) < 1.15 * mean(load, of));
  }
}

/* One group that is all of the work is cut where its rows differ later: inner groups stay whole. */
static void a_large_group_is_cut_further_down(void **state) {
  (void)state;
  enum { ROWS = 800, INNER = 40 };
  static row rows[ROWS];
  static int at[ROWS];
  double load[4];
  uint64_t seed = 2;
  mr_err e = MR_ERR_INIT;
  mr_plan_writer *w;
  mr_plan *p;
  int32_t ids[200];
  assert_int_equal(mr_plan_create(&w, temp_dir, &e), MR_OK);
  assert_int_equal(mr_plan_add_file(w, "in", &e), MR_OK);
  for (int i = 0; i < ROWS; i++) {
    rows[i].group = (int)(random_at(&seed) % INNER);
    for (int k = 0; k < 200; k++) /* 32 ids of all, to 128 of the inner group, then the row's */
      ids[k] = k < 32 ? 7 : k < 128 ? rows[i].group : 1000 + i;
    const mr_plan_record rec = {.e = {.line = 1, .n_prompt = 200, .n_out = 8, .kind = MR_ROW_PLAIN},
                                .json = (char[]){"{}"},
                                .json_len = 2,
                                .prompt = ids};
    assert_int_equal(mr_plan_append(w, &rec, &e), MR_OK);
  }
  assert_int_equal(mr_plan_finish(w, &e), MR_OK);
  assert_int_equal(mr_plan_open(&p, temp_dir, &e), MR_OK);
  for (int k = 0; k < 4; k++) {
    mr_shard *s;
    load[k] = 0;
    assert_int_equal(mr_shard_open(&s, p, (mr_shard_part){k + 1, 4}, &e), MR_OK);
    for (int i = 0; i < ROWS; i++)
      if (mr_shard_has(s, (uint64_t)i)) {
        at[i] = k;
        load[k]++;
      }
    mr_shard_close(s);
  }
  mr_plan_close(p);
  assert_true(most(load, 4) < 1.2 * mean(load, 4));
  for (int i = 0; i < ROWS; i++)
    for (int k = 0; k < i; k++)
      if (rows[i].group == rows[k].group)
        assert_int_equal(at[i], at[k]);
}

/* Equal prompts are cut by their place, more shards than rows leave some empty, bad rows alone go
 * round. */
static void odd_jobs(void **state) {
  (void)state;
  static row rows[700];
  static int at[700];
  static double load[MR_SHARDS_MAX];
  for (int i = 0; i < 700; i++)
    rows[i] = (row){.group = 3, .shared = 50, .n_out = 10};
  cut(rows, 700, 7, at, load);
  assert_true(most(load, 7) < 1.1 * mean(load, 7));
  cut(rows, 3, MR_SHARDS_MAX, at, load);
  cut(rows, 1, 2, at, load);
  cut(rows, 0, 2, at, load);
  for (int i = 0; i < 700; i++)
    rows[i].bad = true;
  cut(rows, 700, 7, at, load);
  for (int i = 0; i < 700; i++) /* one row is more than half of the work */
    rows[i] = (row){.group = i, .shared = 8, .n_out = i == 350 ? 100000 : 10};
  cut(rows, 700, 3, at, load);
  for (int i = 0; i < 700; i++)
    assert_true(i == 350 || at[i] != at[350]);
}

static void no_shard_is_the_whole(void **state) {
  (void)state;
  assert_true(mr_shard_has(NULL, 5));
  assert_int_equal(mr_shard_local(NULL, 5), 5);
  mr_shard_close(NULL);
}

static void out_of_memory(void **state) {
  (void)state;
  row rows[40];
  for (int i = 0; i < 40; i++)
    rows[i] = (row){.group = i % 5, .shared = 40, .own = i, .n_out = 3};
  mr_plan *p = plan_of(rows, 40);
  int64_t live = mr_mem_live();
  mr_code rc = MR_E_NOMEM;
  for (int n = 0; rc != MR_OK; n++) {
    mr_shard *s;
    mr_err e = MR_ERR_INIT;
    mr_mem_fail_after(n);
    rc = mr_shard_open(&s, p, (mr_shard_part){1, 2}, &e);
    mr_mem_fail_after(-1);
    if (rc == MR_OK)
      mr_shard_close(s);
    else
      assert_int_equal(rc, MR_E_NOMEM);
    assert_int_equal(mr_mem_live(), live);
    assert_true(n < 100);
  }
  mr_plan_close(p);
}

static void option_texts(void **state) {
  (void)state;
  static const char *const wrong[] = {"",    "1",     "0/3", "4/3",  "1/0",    "1/1001", "a/3",
                                      "1/b", "1/3/4", "/3",  "-1/3", "slurmx", "1 /3"};
  mr_shard_part p = {0, 0};
  const char *why;
  assert_true(mr_shard_parse("2/3", &p, &why));
  assert_int_equal(p.index, 2);
  assert_int_equal(p.of, 3);
  assert_true(mr_shard_parse("1000/1000", &p, &why));
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    why = NULL;
    assert_false(mr_shard_parse(wrong[i], &p, &why));
    assert_non_null(why);
  }
}

static bool slurm(const char *id, const char *min, const char *max, const char *count,
                  mr_shard_part *p) {
  const char *why;
  setenv("SLURM_ARRAY_TASK_ID", id, 1);
  setenv("SLURM_ARRAY_TASK_MIN", min, 1);
  setenv("SLURM_ARRAY_TASK_MAX", max, 1);
  setenv("SLURM_ARRAY_TASK_COUNT", count, 1);
  return mr_shard_parse("slurm", p, &why);
}

static void slurm_arrays(void **state) {
  (void)state;
  mr_shard_part p;
  const char *why;
  unsetenv("SLURM_ARRAY_TASK_ID");
  assert_false(mr_shard_parse("slurm", &p, &why));
  assert_true(slurm("1", "1", "8", "8", &p));
  assert_int_equal(p.index, 1);
  assert_int_equal(p.of, 8);
  assert_true(slurm("7", "0", "7", "8", &p)); /* --array=0-7 */
  assert_int_equal(p.index, 8);
  assert_true(slurm("13", "1", "13", "4", &p)); /* --array=1-15:4 */
  assert_int_equal(p.index, 4);
  assert_true(slurm("5", "5", "5", "1", &p));
  assert_int_equal(p.of, 1);
  assert_false(slurm("3", "1", "7", "3", &p)); /* --array=1,3,7 */
  assert_false(slurm("9", "1", "8", "8", &p));
  assert_false(slurm("2", "1", "13", "4", &p));
  assert_false(slurm("x", "1", "8", "8", &p));
  assert_false(slurm("1", "1", "2000", "2000", &p));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(groups_stay_whole), cmocka_unit_test(a_large_group_is_cut_further_down),
      cmocka_unit_test(odd_jobs),          cmocka_unit_test(no_shard_is_the_whole),
      cmocka_unit_test(out_of_memory),     cmocka_unit_test(option_texts),
      cmocka_unit_test(slurm_arrays),
  };
  return cmocka_run_group_tests(tests, temp_begin, temp_end);
}
