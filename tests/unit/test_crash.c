/* The machine crashes at every sync of a small job, and each write and name that was not synced
 * lands, vanishes or is torn (crash_fs.h). Whatever is left, the job resumes to the bytes of an
 * undisturbed one, and no row that was ever acknowledged is computed again. MR_CRASH_SEEDS says how
 * many outcomes are tried at each point. */
#include <sys/wait.h>

#include "tests/unit/fault_job.h"
#include "tests/unit/crash_fs.h"

#include "jobs/commit.h"
#include "jobs/journal.h"

static mr_sys plain, crashing;

static uint64_t seeds(void) {
  const char *s = getenv("MR_CRASH_SEEDS");
  uint64_t n = s ? strtoull(s, NULL, 10) : 0;
  return n ? n : 4;
}

static int begin(void **state) {
  (void)state;
  plain = mr_sys_os;
  return fault_job_begin(&plain);
}

static int end(void **state) {
  (void)state;
  return fault_job_end();
}

/* ---- what was acknowledged */

static mr_code count_rows(void *ctx, uint32_t type, const unsigned char *payload, size_t len) {
  mr_frame_rec rec;
  if (type == MR_RECORD_FRAME && mr_framerec_decode(&rec, payload, len, UINT32_MAX))
    *(uint64_t *)ctx += rec.n_lines;
  return MR_OK;
}

static bool after_kill;

/* What the program counts as done when it comes to a sync goes where the parent can count its rows:
 * all of the journal, but for the record that this sync is to make durable. A run that finds a
 * journal syncs it with its second sync, and relies on all of it from then on. */
static void save_acknowledged(int fd) {
  const crash_name *name = crash_find(crash_fs.live, fault_path("out/o.run/journal"));
  FILE *f = fopen(fault_path("acknowledged"), "wb");
  if (!f)
    _exit(9);
  if (name) {
    crash_node *j = &crash_fs.nodes[name->node];
    bool pending = crash_node_of(fd) == name->node || (after_kill && crash_fs.syncs < 2);
    size_t n = j->n;
    char *bytes = pending ? NULL : crash_content(j, &n);
    fwrite(pending ? j->bytes : bytes, 1, n, f);
  }
  fclose(f);
}

static uint64_t acknowledged(void) {
  mr_err e = MR_ERR_INIT;
  uint64_t rows = 0;
  return mr_journal_read(fault_path("acknowledged"), count_rows, &rows, NULL, &e) ? 0 : rows;
}

/* Rows that a resumed job finds done. */
static uint64_t still_done(void) {
  mr_err e = MR_ERR_INIT;
  mr_paths p;
  mr_commit *c = NULL;
  uint64_t rows = UINT64_MAX;
  if (mr_paths_make(&p, fault_path("out/o"), fault_path("out/o.jsonl"), &e) ||
      mr_commit_open(&c, &p, &e))
    fault_problem("the state cannot be opened: %s", e.text);
  if (c && !mr_commit_finished(c))
    rows = mr_commit_done_rows(c);
  mr_commit_close(c);
  mr_paths_free(&p);
  return rows;
}

/* ---- one crash */

typedef enum outcome { CRASHED, TOO_FEW_SYNCS = 3, TOO_FEW_CALLS } outcome;

static void child(int64_t sync, int64_t kill, uint64_t seed) {
  int log = open(fault_log, O_WRONLY | O_CREAT | O_TRUNC, 0666);
  dup2(log, STDOUT_FILENO);
  dup2(log, STDERR_FILENO);
  close(log);
  crashing = plain;
  crash_fs_begin(&crashing, fault_out_dir);
  crash_fs.before_crash = save_acknowledged;
  mr_sys_now = &crashing;
  if (kill >= 0) {
    crash_fs.kill_at_call = kill;
    if (setjmp(crash_fs.killed) == 0) {
      fault_job_run();
      _exit(TOO_FEW_CALLS);
    }
    crash_close_all();
    after_kill = true;
    crash_fs.kill_at_call = -1;
    crash_fs.syncs = 0;
  }
  crash_fs.die_at_sync = sync;
  crash_fs.seed = seed;
  fault_job_run();
  _exit(TOO_FEW_SYNCS);
}

static outcome crash_once(int64_t sync, int64_t kill, uint64_t seed) {
  int status = 0;
  char what[100];
  snprintf(what, sizeof what, "killed at %lld, crashed at sync %lld, seed %llu", (long long)kill,
           (long long)sync, (unsigned long long)seed);
  fault_job_wipe();
  fflush(stdout);
  pid_t pid = fork();
  assert_true(pid >= 0);
  if (pid == 0)
    child(sync, kill, seed);
  assert_int_equal(waitpid(pid, &status, 0), pid);
  if (!WIFEXITED(status) || WEXITSTATUS(status) > TOO_FEW_CALLS)
    fault_problem("%s: the child ends with %d", what, status);
  else if (WEXITSTATUS(status) != CRASHED)
    return (outcome)WEXITSTATUS(status);
  bool bound = fault_job_is_bound();
  uint64_t rows = acknowledged(), done = bound ? still_done() : 0;
  if (done < rows)
    fault_problem("%s: %llu rows were acknowledged, %llu are there", what, (unsigned long long)rows,
                  (unsigned long long)done);
  fault_job_expect_resumed(bound ? 0 : 1, what);
  return CRASHED;
}

static void crash_at_every_sync(void **state) {
  (void)state;
  uint64_t n = 0;
  int64_t sync = 0;
  for (bool more = true; more; sync += more)
    for (uint64_t seed = 0; more && seed < seeds(); seed++, n += more)
      more = crash_once(sync, -1, seed + 2 * (seed > 1) * (uint64_t)sync) == CRASHED;
  print_message("%lld syncs, %llu crashes\n", (long long)sync, (unsigned long long)n);
  assert_true(sync > 10);
  fault_assert_no_problems();
}

/* Names and bytes that a killed run left unsynced count as done for the next one: they must not be
 * lost in a crash of the machine while that one runs. */
static void kill_then_crash(void **state) {
  (void)state;
  uint64_t n = 0;
  outcome o = CRASHED;
  for (int64_t kill = 0; o != TOO_FEW_CALLS; kill++) {
    o = CRASHED;
    bool few = seeds() < 20;
    for (int64_t sync = few ? kill % 6 : 0; o == CRASHED; sync += few ? 6 : 1) {
      o = crash_once(sync, kill, few || sync % 2 ? 0 : (uint64_t)(kill * 100 + sync));
      n += o == CRASHED;
    }
  }
  print_message("%llu kills with a crash after each\n", (unsigned long long)n);
  fault_assert_no_problems();
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(crash_at_every_sync),
      cmocka_unit_test(kill_then_crash),
  };
  return cmocka_run_group_tests(tests, begin, end);
}
