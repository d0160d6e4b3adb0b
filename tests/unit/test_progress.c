#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

#include "io/mem.h"
#include "io/sys.h"
#include "jobs/progress.h"

static int64_t clock_now; /* nanoseconds */
static mr_sys sim;
static char err_path[] = "/tmp/mr_test_progress_XXXXXX";
static int err_fd, real_stderr;

static int64_t sim_clock(void) {
  return clock_now;
}

static void pass(double seconds) {
  clock_now += (int64_t)(seconds * 1e9);
}

/* Standard error goes to a file from here; back, and what came. */
static void catch_stderr(void) {
  fflush(stderr);
  assert_int_equal(ftruncate(err_fd, 0), 0);
  lseek(err_fd, 0, SEEK_SET);
  real_stderr = dup(STDERR_FILENO);
  dup2(err_fd, STDERR_FILENO);
}

static const char *caught(void) {
  static char buf[65536];
  fflush(stderr);
  dup2(real_stderr, STDERR_FILENO);
  close(real_stderr);
  ssize_t n = pread(err_fd, buf, sizeof buf - 1, 0);
  buf[n > 0 ? n : 0] = '\0';
  return buf;
}

static int count(const char *s, char c) {
  int n = 0;
  for (; *s; s++)
    n += *s == c;
  return n;
}

static mr_progress *open_kind(mr_progress_kind kind, const char *metrics) {
  mr_progress *p;
  mr_err e = MR_ERR_INIT;
  assert_int_equal(mr_progress_open(&p, kind, metrics, &e), MR_OK);
  return p;
}

/* Runs for 100 s, updating each tenth of a second, at 50 tokens/s and a row a second. */
static void run_for_100_s(mr_progress *p) {
  mr_progress_now now = {.phase = "preflight", .rows_done = 1000};
  mr_progress_update(p, &now, false);
  now = (mr_progress_now){.phase = "run", .rows = 200, .work = 200};
  for (int i = 0; i < 1000; i++) {
    mr_progress_update(p, &now, false);
    pass(0.1);
    now.output_tokens += 5;
    now.rows_done = (uint64_t)i / 10;
    now.work_done = i / 10.0;
  }
  now.phase = "done";
  mr_progress_update(p, &now, false);
}

static void durations_and_counts(void **state) {
  (void)state;
  char b[32];
  assert_string_equal(mr_progress_duration(0.4, b, sizeof b), "0s");
  assert_string_equal(mr_progress_duration(59.6, b, sizeof b), "1m00s");
  assert_string_equal(mr_progress_duration(3725, b, sizeof b), "1h02m");
  assert_string_equal(mr_progress_duration(90000, b, sizeof b), "1d01h");
  assert_string_equal(mr_progress_duration(-5, b, sizeof b), "0s");
  assert_string_equal(mr_progress_count(0, b, sizeof b), "0");
  assert_string_equal(mr_progress_count(999, b, sizeof b), "999");
  assert_string_equal(mr_progress_count(1234567, b, sizeof b), "1,234,567");
  assert_string_equal(mr_progress_count(UINT64_MAX, b, sizeof b), "18,446,744,073,709,551,615");
}

/* A line each 30 s and at a change of phase, without carriage returns. */
static void lines(void **state) {
  (void)state;
  mr_progress *p = open_kind(MR_PROGRESS_AUTO, NULL); /* standard error is no terminal here */
  catch_stderr();
  run_for_100_s(p);
  mr_progress_close(p);
  const char *s = caught();
  assert_int_equal(count(s, '\r'), 0);
  assert_int_equal(count(s, '\n'), 5); /* preflight; run at 0, 30, 60, 90 s */
  assert_non_null(strstr(s, "/200 rows"));
  assert_non_null(strstr(s, "50 tok/s now, 50 mean"));
  assert_non_null(strstr(s, "ETA 1m5")); /* at 90 s of about 200 */
}

static void none_is_silent_but_answers(void **state) {
  (void)state;
  mr_progress *p = open_kind(MR_PROGRESS_NONE, NULL);
  mr_progress_now now = {.phase = "run", .rows = 5, .rows_done = 2};
  catch_stderr();
  mr_progress_update(p, &now, false);
  mr_progress_update(p, &now, true); /* SIGUSR1 */
  pass(100);
  mr_progress_update(p, &now, false);
  mr_progress_close(p);
  assert_string_equal(caught(), "millrace: run  2/5 rows  0 tok/s now, 0 mean\n");
}

static void bar_redraws_one_line(void **state) {
  (void)state;
  setenv("NO_COLOR", "1", 1);
  mr_progress *p = open_kind(MR_PROGRESS_BAR, NULL);
  catch_stderr();
  run_for_100_s(p);
  mr_progress_close(p);
  const char *s = caught();
  assert_int_equal(count(s, '\n'), 1);
  assert_in_range(count(s, '\r'), 300, 520); /* at most five times a second */
  assert_null(strstr(s, "\033[36m"));
}

static void json_lines(void **state) {
  (void)state;
  mr_progress *p = open_kind(MR_PROGRESS_JSON, NULL);
  catch_stderr();
  run_for_100_s(p);
  mr_progress_close(p);
  int n = 0;
  for (const char *l = caught(); *l; l = strchr(l, '\n') + 1, n++) {
    json_t *o = json_loadb(l, strcspn(l, "\n"), 0, NULL);
    assert_true(json_is_object(o));
    assert_non_null(json_object_get(o, "phase"));
    assert_non_null(json_object_get(o, "tokens_per_s"));
    json_decref(o);
  }
  assert_in_range(n, 21, 24); /* each 5 s, and the phases */
}

static void metrics_file(void **state) {
  (void)state;
  char path[] = "/tmp/mr_test_metrics_XXXXXX", buf[8192];
  close(mkstemp(path));
  mr_progress *p = open_kind(MR_PROGRESS_NONE, path);
  run_for_100_s(p);
  mr_progress_close(p);
  int fd = open(path, O_RDONLY);
  ssize_t n = read(fd, buf, sizeof buf - 1);
  close(fd);
  unlink(path);
  assert_true(n > 0);
  buf[n] = '\0';
  assert_non_null(strstr(buf, "\nmillrace_rows 200\n"));
  assert_non_null(strstr(buf, "\nmillrace_output_tokens_total 5000\n"));
  assert_non_null(strstr(buf, "# TYPE millrace_rows_failed gauge\n"));
  assert_non_null(strstr(buf, "millrace_phase{phase=\"done\"} 1\n"));
}

/* A metrics file that cannot be written is said once, and stops nothing. */
static void metrics_cannot_be_written(void **state) {
  (void)state;
  mr_progress *p = open_kind(MR_PROGRESS_NONE, "/nonexistent-dir/metrics.prom");
  catch_stderr();
  run_for_100_s(p);
  mr_progress_close(p);
  assert_int_equal(count(caught(), '\n'), 1);
}

static int begin(void **state) {
  (void)state;
  sim = mr_sys_os;
  sim.clock_ns = sim_clock;
  clock_now = 1000000000;
  mr_sys_now = &sim;
  err_fd = mkstemp(err_path);
  return err_fd < 0;
}

static int end(void **state) {
  (void)state;
  close(err_fd);
  return unlink(err_path) || mr_mem_live() != 0;
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(durations_and_counts),
      cmocka_unit_test(lines),
      cmocka_unit_test(none_is_silent_but_answers),
      cmocka_unit_test(bar_redraws_one_line),
      cmocka_unit_test(json_lines),
      cmocka_unit_test(metrics_file),
      cmocka_unit_test(metrics_cannot_be_written),
  };
  return cmocka_run_group_tests(tests, begin, end);
}
