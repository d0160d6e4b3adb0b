/* fault_job.h: one small job, run in process as the command line runs it, for tests of what goes
 * wrong.
 *
 *     fault_job_begin(); ... fault_job_wipe(); rc = fault_job_run(); fault_job_expect_whole(0) ...
 * fault_job_end()
 *
 * The model is tiny_gguf.h's, the thirteen rows are of every kind and three are bad, so a finished
 * job returns 1. Clocks are simulated: each look at the monotonic one takes it on by 20 ms, so that
 * a job flushes several frames, and `created` is whatever the test says. Files lie in memory where
 * there is such a place.
 */
#ifndef MR_TESTS_FAULT_JOB_H
#define MR_TESTS_FAULT_JOB_H

#include <dirent.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "io/durable.h"
#include "io/mem.h"
#include "io/sys.h"
#include "io/text.h"
#include "jobs/cmd.h"
#include "tests/unit/tiny_gguf.h"

enum { FAULT_JOB_DONE = 1 }; /* exit status: done, some rows failed */
enum { FAULT_JOB_TIMES = 2 };

static const char *const fault_job_ends[] = {".jsonl", ".errors.jsonl.zst"};
enum { FAULT_JOB_FILES = 2 };

static char fault_dir[64], fault_out_dir[80], fault_log[80];
static int64_t fault_clock_ns, fault_wall_s;
static mr_text fault_want[FAULT_JOB_TIMES][FAULT_JOB_FILES]; /* of undisturbed jobs */

static int64_t fault_clock(void) {
  return fault_clock_ns += 20000000;
}

static int64_t fault_wall(void) {
  return fault_wall_s;
}

static const char fault_rows[] =
    "{\"custom_id\":\"c0\",\"method\":\"POST\",\"url\":\"/v1/completions\",\"body\":"
    "{\"prompt\":\"Hello\",\"max_tokens\":5,\"seed\":1}}\n"
    "{\"id\":\"p1\",\"prompt\":\"row one \",\"max_tokens\":4,\"topic\":[1,{\"a\":null}]}\n"
    "{\"id\":\"p2\",\"prompt\":[72,105,33],\"max_tokens\":3,\"return_token_ids\":true}\n"
    "{\"id\":\"bad\",\"prompt\":5}\n"
    "{\"custom_id\":\"c4\",\"method\":\"POST\",\"url\":\"/v1/chat/completions\",\"body\":"
    "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"x\"}]}],"
    "\"n\":2,\"max_tokens\":4,\"logprobs\":true,\"top_logprobs\":1}}\n"
    "{\"prompt\":\"no id \",\"max_tokens\":4,\"temperature\":0}\n"
    "{\"id\":\"s6\",\"prompt\":\"abc\",\"choices\":[\"d\",\"ef\"]}\n"
    "{\"id\":\"p7\",\"prompt\":\"stop at \",\"max_tokens\":6,\"stop\":[\"W\",\"zz\"]}\n"
    "not json\n"
    "{\"id\":\"s9\",\"prompt\":\"abc\",\"continuation\":\"def\"}\n"
    "{\"id\":\"m10\",\"messages\":[{\"role\":\"user\",\"content\":\"top\"}],\"top_p\":0.9,\"top_"
    "k\":5,"
    "\"max_tokens\":4}\n"
    "{\"id\":\"p1\",\"prompt\":\"twice\",\"max_tokens\":4}\n"
    "{\"id\":\"p12\",\"prompt\":\"last "
    "\",\"max_tokens\":300,\"stop_token_ids\":[65,66,67,68,69,70,71],"
    "\"logit_bias\":{\"65\":20}}\n";

static const char *fault_path(const char *name) {
  static char paths[4][160];
  static int at;
  at = (at + 1) % 4;
  snprintf(paths[at], sizeof paths[at], "%s/%s", fault_dir, name);
  return paths[at];
}

/* Runs a command of the program with what it says in the log. */
static int fault_command(int (*command)(int, char **), int argc, char **argv) {
  fflush(stderr);
  fflush(stdout);
  int out = dup(STDOUT_FILENO), err = dup(STDERR_FILENO);
  int log = open(fault_log, O_WRONLY | O_CREAT | O_TRUNC, 0666);
  dup2(log, STDOUT_FILENO);
  dup2(log, STDERR_FILENO);
  close(log);
  int rc = command(argc, argv);
  fflush(stderr);
  fflush(stdout);
  dup2(out, STDOUT_FILENO);
  dup2(err, STDERR_FILENO);
  close(out);
  close(err);
  return rc;
}

/* The job, or its resumption; the exit status. */
static int fault_job_run(void) {
  char *args[] = {"run",         (char *)(uintptr_t)fault_path("rows.jsonl"),
                  "-m",          (char *)(uintptr_t)fault_path("tiny.gguf"),
                  "-o",          (char *)(uintptr_t)fault_path("out/o.jsonl"),
                  "--threads",   "1",
                  "--max-batch", "2",
                  "--kv-memory", "1MiB",
                  "--progress",  "none",
                  NULL};
  fault_clock_ns = 1000000000;
  return fault_command(mr_cmd_run, (int)(sizeof args / sizeof *args) - 1, args);
}

static int fault_job_check(void) {
  char *args[] = {"check", (char *)(uintptr_t)fault_path("out/o.jsonl"), NULL};
  return fault_command(mr_cmd_check, 2, args);
}

/* What the last command said, for a message. */
static const char *fault_said(void) {
  static char buf[600];
  FILE *f = fopen(fault_log, "rb");
  size_t n = f ? fread(buf, 1, sizeof buf - 1, f) : 0;
  if (f)
    fclose(f);
  buf[n] = '\0';
  return buf;
}

static bool fault_slurp(const char *path, mr_text *t) {
  char buf[4096];
  mr_text_clear(t);
  FILE *f = fopen(path, "rb");
  if (!f)
    return false;
  for (size_t n; (n = fread(buf, 1, sizeof buf, f)) > 0;)
    mr_text_add(t, buf, n);
  fclose(f);
  return true;
}

/* No output and no state. */
static void fault_job_wipe(void) {
  mr_err e = MR_ERR_INIT;
  const mr_sys *was = mr_sys_now;
  mr_sys_now = &mr_sys_os;
  assert_int_equal(mr_durable_remove_tree(fault_out_dir, &e), MR_OK);
  assert_int_equal(mkdir(fault_out_dir, 0777), 0);
  mr_sys_now = was;
}

/* Prints what is wrong and counts it: a test goes on to find everything, and fails at its end. */
static int fault_problems;

__attribute__((format(printf, 1, 2))) static void fault_problem(const char *fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  if (fault_problems++ < 30) {
    vprintf(fmt, ap);
    printf("; it said: %s\n", fault_said());
  }
  va_end(ap);
}

static void fault_assert_no_problems(void) {
  int n = fault_problems;
  fault_problems = 0;
  assert_int_equal(n, 0);
}

/* The final files are those of an undisturbed job that was first started at `time`, and nothing
 * else is left. */
static void fault_job_expect_whole(int time, const char *what) {
  mr_text got = {0};
  char path[160];
  for (int i = 0; i < FAULT_JOB_FILES; i++) {
    snprintf(path, sizeof path, "%s/o%s", fault_out_dir, fault_job_ends[i]);
    const mr_text *want = &fault_want[time][i];
    if (!fault_slurp(path, &got))
      fault_problem("%s: o%s is not there", what, fault_job_ends[i]);
    else if (got.len != want->len || memcmp(got.data, want->data, got.len) != 0)
      fault_problem("%s: o%s is not that of an undisturbed job", what, fault_job_ends[i]);
  }
  if (access(fault_path("out/o.run"), F_OK) == 0)
    fault_problem("%s: the state is still there", what);
  mr_text_free(&got);
}

/* Whether the job is bound to its first start: from the header of its journal on. */
static inline bool fault_job_is_bound(void) {
  return access(fault_path("out/o.run/journal"), F_OK) == 0 ||
         access(fault_path("out/o.manifest.json"), F_OK) == 0;
}

/* Resumes the job at a later time, in which it must end well. */
static inline void fault_job_expect_resumed(int time, const char *what) {
  fault_wall_s = 2000;
  int rc = fault_job_run();
  fault_wall_s = 1000;
  if (rc != FAULT_JOB_DONE)
    fault_problem("%s: the resumed job ends with %d", what, rc);
  else
    fault_job_expect_whole(time, what);
}

static inline int fault_open_fds(void) {
  int n = 0;
  DIR *d = opendir("/proc/self/fd");
  while (d && readdir(d))
    n++;
  closedir(d);
  return n;
}

/* Removes nothing by itself: fault_job_end does. `table` supplies all but the clocks. */
static int fault_job_begin(mr_sys *table) {
  char shm[] = "/dev/shm/mr_test_faults_XXXXXX", tmp[] = "/tmp/mr_test_faults_XXXXXX";
  const char *dir = mkdtemp(shm) ? shm : mkdtemp(tmp);
  if (!dir)
    return -1;
  snprintf(fault_dir, sizeof fault_dir, "%s", dir);
  snprintf(fault_out_dir, sizeof fault_out_dir, "%s/out", dir);
  snprintf(fault_log, sizeof fault_log, "%s/log", dir);
  FILE *f = fopen(fault_path("rows.jsonl"), "wb");
  if (!f || fwrite(fault_rows, 1, sizeof fault_rows - 1, f) != sizeof fault_rows - 1 ||
      fclose(f) != 0 || !tiny_gguf_write(fault_path("tiny.gguf"), -1) || mkdir(fault_out_dir, 0777))
    return -1;
  /* The measurement of the machine's limits, which costs far more than the job, is left out. */
  mr_mem_fail_above((size_t)32 << 20);
  table->clock_ns = fault_clock;
  table->wall_s = fault_wall;
  mr_sys_now = table;
  for (int t = 0; t < FAULT_JOB_TIMES; t++) {
    char path[160];
    fault_wall_s = 1000 + 1000 * t;
    fault_job_wipe();
    if (fault_job_run() != FAULT_JOB_DONE || fault_job_check() != 0) {
      fprintf(stderr, "the undisturbed job fails: %s\n", fault_said());
      return -1;
    }
    for (int i = 0; i < FAULT_JOB_FILES; i++) {
      snprintf(path, sizeof path, "%s/o%s", fault_out_dir, fault_job_ends[i]);
      if (!fault_slurp(path, &fault_want[t][i]))
        return -1;
    }
  }
  fault_wall_s = 1000;
  return 0;
}

static int fault_job_end(void) {
  mr_err e = MR_ERR_INIT;
  mr_sys_now = &mr_sys_os;
  mr_mem_fail_above(0);
  for (int t = 0; t < FAULT_JOB_TIMES; t++)
    for (int i = 0; i < FAULT_JOB_FILES; i++)
      mr_text_free(&fault_want[t][i]);
  return mr_durable_remove_tree(fault_dir, &e) == MR_OK ? 0 : -1;
}

#endif
