/* What a machine has shown: kept, learnt from, and never trusted. */
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "io/mem.h"
#include "jobs/profile.h"
#include "jobs/tuned.h"
#include "tests/unit/temp.h"

static const mr_engine_info info = {.arch = "llama",
                                    .isa = "ref",
                                    .scheme = "int8",
                                    .kv_type = "f16",
                                    .threads = 3,
                                    .n_params = 5,
                                    .weight_bytes = 77};

static void fill(mr_profile *p) {
  mr_profile_load(p, &info);
  p->measured = true;
  p->rates = (mr_rates){
      .body = {{1, 0.5}, {9, 2}}, .n_body = 2, .head_share = 0.25, .tail_key = 1e-9, .token = 3};
  p->load_s = 4;
  p->peak_ops = 1e11;
  p->factor[MR_PART_ATTENTION] = 1.25;
  p->runs = 7;
}

static void kept(void **state) {
  (void)state;
  mr_profile p, q;
  mr_profile_load(&p, &info);
  assert_true(!p.measured && p.runs == 0 && p.factor[0] == 1);
  fill(&p);
  mr_profile_save(&p);
  mr_profile_load(&q, &info);
  assert_true(q.measured && q.runs == 7 && q.load_s == 4 && q.peak_ops == 1e11);
  assert_true(q.factor[MR_PART_ATTENTION] == 1.25 && q.factor[MR_PART_GEMM] == 1);
  assert_memory_equal(&p.rates, &q.rates, sizeof p.rates);
  mr_engine_info other = info;
  other.threads = 4;
  mr_profile_load(&q, &other);
  assert_false(q.measured);
  assert_int_equal(mr_mem_live(), 0);
}

/* Cut anywhere, or with a byte changed: loaded or not, what is there can be reckoned with. */
static void damaged(void **state) {
  (void)state;
  mr_profile p, q;
  fill(&p);
  mr_profile_save(&p);
  static char bytes[65536];
  int fd = open(p.path, O_RDWR);
  ssize_t n = read(fd, bytes, sizeof bytes);
  assert_in_range(n, 200, sizeof bytes - 1);
  for (ssize_t at = 0; at < n; at++) {
    const char with[] = {'-', '9', '"', 'e', '}'};
    char c = with[at % 5];
    assert_int_equal(pwrite(fd, &c, 1, at), 1);
    mr_profile_load(&q, &info);
    for (int i = 0; i < MR_PARTS; i++)
      assert_true(q.factor[i] >= 0.8 && q.factor[i] <= 1.25);
    if (q.measured)
      assert_true(q.rates.n_body >= 1 && isfinite(q.rates.body[0].s) && q.load_s >= 0);
    assert_int_equal(pwrite(fd, bytes + at, 1, at), 1);
  }
  for (ssize_t len = n - 3; len >= 0; len -= 7) {
    assert_int_equal(ftruncate(fd, len), 0);
    mr_profile_load(&q, &info);
    assert_false(q.measured);
  }
  close(fd);
  unlink(p.path);
}

/* What is measured of products: kept, and nothing that is damaged is taken. */
static void tuning(void **state) {
  (void)state;
  mr_engine_opts o = {.device = "cpu"};
  mr_engine_info i = info;
  mr_tuning t, u;
  mr_tuned_load(&t, &o, &i);
  assert_ptr_equal(o.tuning, &t);
  assert_int_equal(t.step_tokens, 0);
  assert_false(i.step_measured);
  t = (mr_tuning){.step_tokens = 768, .n_shapes = 2, .shapes = {{576, 960, 64}, {64, 9, 1}}};
  mr_tuned_save(&t, &info); /* not measured now */
  mr_tuned_load(&u, &o, &i);
  assert_int_equal(u.step_tokens, 0);
  t.took_s = 0.2;
  mr_tuned_save(&t, &info);
  mr_tuned_load(&u, &o, &i);
  t.took_s = 0;
  assert_memory_equal(&u, &t, sizeof t);
  assert_true(i.step_measured);
  assert_int_equal(i.max_step_tokens, 768);
  o.max_step_tokens = 40;
  mr_tuned_load(&u, &o, &i);
  assert_false(i.step_measured);
  assert_int_equal(i.max_step_tokens, 40);

  char path[4096];
  assert_true(mr_profile_path(path, sizeof path, "tuning", &info));
  static const char *const bad[] = {
      "",
      "[]",
      "{}",
      "{\"step_tokens\": 256}x",
      "{\"step_tokens\": 0, \"shapes\": []}",
      "{\"step_tokens\": 99999999, \"shapes\": []}",
      "{\"step_tokens\": 256, \"shapes\": [{\"k\": 1, \"n\": 2, \"own_rows\": 0}]}",
      "{\"step_tokens\": 256, \"shapes\": [1,2,3]}",
      "{\"step_tokens\": 256, \"shapes\": [1,2,3,4,5,6,7,8,9]}"};
  for (size_t b = 0; b < sizeof bad / sizeof *bad; b++) {
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(bad[b], f);
    fclose(f);
    mr_tuned_load(&u, &o, &i);
    assert_int_equal(u.step_tokens, 0);
    assert_int_equal(u.n_shapes, 0);
  }
  unlink(path);
  mr_engine_opts gpu = {.device = "sim"};
  mr_tuned_load(&u, &gpu, &i);
  assert_null(gpu.tuning);
}

static void learning(void **state) {
  (void)state;
  mr_profile p = {.factor = {1, 1, 1, 1, 1}};
  const double said[MR_PARTS] = {1, 10, 10, 0.001, 1}, took[MR_PARTS] = {1, 12, 100, 5, 0.9};
  assert_true(mr_profile_learn(&p, said, took, 0, 0));
  assert_true(fabs(p.factor[MR_PART_GEMM] - 1.2) < 1e-9); /* the first run says it all */
  assert_true(p.factor[MR_PART_ATTENTION] == 1.25);       /* within bounds */
  assert_true(p.factor[MR_PART_OTHER] == 1);              /* too short to tell */
  for (int i = 0; i < 30; i++)
    assert_true(mr_profile_learn(&p, said, took, 0.75, 0.09)); /* the machine was slower than it had
                                                                  been */
  assert_true(fabs(p.factor[MR_PART_GEMM] - 0.9) < 1e-3);
  mr_profile before = p;
  assert_false(mr_profile_learn(&p, said, took, 1, 0.11)); /* others had the processors */
  assert_memory_equal(&p, &before, sizeof p);
  const double bad[MR_PARTS] = {NAN, INFINITY, -1, 0, 1};
  assert_true(mr_profile_learn(&p, bad, took, NAN, 0));
  assert_true(mr_profile_learn(&p, said, bad, INFINITY, 0));
  for (int i = 0; i < MR_PARTS; i++)
    assert_true(p.factor[i] >= 0.8 && p.factor[i] <= 1.25);
}

static void nowhere_to_keep_it(void **state) {
  (void)state;
  mr_profile p;
  setenv("MILLRACE_CACHE", "", 1);
  mr_profile_load(&p, &info);
  assert_string_equal(p.path, "");
  mr_profile_save(&p);
  setenv("MILLRACE_CACHE", "/proc/no/such", 1);
  mr_profile_load(&p, &info);
  mr_profile_save(&p);
  assert_true(p.factor[0] == 1 && !p.measured);
  setenv("MILLRACE_CACHE", temp_dir, 1);
}

static int setup(void **state) {
  int rc = temp_begin(state);
  setenv("MILLRACE_CACHE", temp_dir, 1);
  return rc;
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(kept),
      cmocka_unit_test(damaged),
      cmocka_unit_test(tuning),
      cmocka_unit_test(learning),
      cmocka_unit_test(nowhere_to_keep_it),
  };
  return cmocka_run_group_tests(tests, setup, temp_end);
}
