/* Every call of the operating system that a small job makes fails once, and every allocation: the
 * exit status is right, nothing leaks, and the job resumes to the same bytes. */
#include "tests/unit/fault_sys.h"

static int begin(void **state) {
  (void)state;
  fault_sys_begin();
  return fault_job_begin(&table);
}

static int end(void **state) {
  (void)state;
  return fault_job_end();
}

/* The job is finished. A state that could not be removed is no failure: the next run removes it. */
static void expect_whole(const char *what) {
  if (access(fault_path("out/o.run"), F_OK) == 0 && fault_job_run() != FAULT_JOB_DONE)
    fault_problem("%s: the next run fails", what);
  fault_job_expect_whole(0, what);
}

/* One job with the fault that is set, and its resumption without. False: the job does not make so
 * many calls. */
static bool fail_and_resume(const char *name, int64_t n) {
  char what[80];
  int fds = fault_open_fds();
  int64_t live = mr_mem_live();
  bool bound = fault_job_is_bound();
  int rc = fault_job_run(), hit = fault.hit;
  no_fault();
  if (hit < 0) {
    assert_int_equal(rc, FAULT_JOB_DONE);
    return false;
  }
  snprintf(what, sizeof what, "%s, call %lld (%s), exit %d", name, (long long)n, op_names[hit], rc);
  if (rc == FAULT_JOB_DONE)
    expect_whole(what);
  else if (rc != MR_E_IO && rc != MR_E_CANTCREATE)
    fault_problem("%s: not an exit status for this", what);
  else if (!*fault_said())
    fault_problem("%s: not a word", what);
  expect_no_leak(fds, live, what);
  fault_job_expect_resumed(bound || fault_job_is_bound() ? 0 : 1, what);
  return true;
}

static void each_call(const char *name, unsigned ops, int error, bool stays) {
  int64_t n = 0;
  for (;; n++) {
    no_fault();
    fault.left = n;
    fault.ops = ops;
    fault.error = error;
    fault.stays = stays;
    fault_job_wipe();
    if (!fail_and_resume(name, n))
      break;
    assert_true(n < 5000);
  }
  print_message("%s: %lld calls\n", name, (long long)n);
  assert_true(n > 10);
  fault_assert_no_problems();
}

static void each_call_fails_with_eio(void **state) {
  (void)state;
  each_call("EIO", ~0u, EIO, false);
}

static void each_writing_call_finds_the_disk_full(void **state) {
  (void)state;
  each_call("ENOSPC", WRITING, ENOSPC, false);
}

static void the_disk_stays_full(void **state) {
  (void)state;
  each_call("ENOSPC from then on", WRITING, ENOSPC, true);
}

static void each_name_is_refused(void **state) {
  (void)state;
  each_call("EACCES", 1u << OP_RENAME | 1u << OP_MKDIR | 1u << OP_UNLINK, EACCES, false);
}

static void interruptions_and_short_counts_do_not_show(void **state) {
  (void)state;
  no_fault();
  fault.awkward = true;
  fault_job_wipe();
  assert_int_equal(fault_job_run(), FAULT_JOB_DONE);
  fault_job_expect_whole(0, "short counts");
  assert_int_equal(fault_job_check(), 0);
  no_fault();
  fault_assert_no_problems();
}

/* A job that stopped half way fails again at each call of its resumption. */
static void each_call_of_a_resumed_job_fails(void **state) {
  (void)state;
  int64_t step = getenv("MR_CRASH_SEEDS") ? 1 : 5, n = 0;
  for (;; n += step) {
    no_fault();
    fault_job_wipe();
    fault.left = 11; /* in the second frame */
    fault.ops = 1u << OP_SYNC;
    fault.error = EIO;
    fault.stays = true;
    assert_int_equal(fault_job_run(), MR_E_IO);
    assert_true(fault_job_is_bound());
    no_fault();
    fault.left = n;
    fault.ops = ~0u;
    fault.error = EIO;
    fault_wall_s = 2000;
    bool more = fail_and_resume("EIO when resumed", n);
    fault_wall_s = 1000;
    if (!more)
      break;
  }
  print_message("EIO when resumed: %lld calls\n", (long long)n);
  fault_assert_no_problems();
}

/* ---- memory */

/* Allocations that one undisturbed job makes. */
static int64_t count_allocations(void) {
  int64_t many = 1 << 24, n = 0;
  no_fault();
  fault_job_wipe();
  mr_mem_fail_after(many);
  assert_int_equal(fault_job_run(), FAULT_JOB_DONE);
  for (void *p; (p = mr_mem_alloc(1, 1)) != NULL; n++)
    mr_mem_free(p);
  mr_mem_fail_after(-1);
  return many - n;
}

static void each_allocation_fails(void **state) {
  (void)state;
  int64_t n = count_allocations(), step = getenv("MR_CRASH_SEEDS") ? 1 : n / 400 + 1, harmless = 0;
  for (int64_t i = 0; i < n; i += step) {
    char what[80];
    int fds = fault_open_fds();
    int64_t live = mr_mem_live();
    fault_job_wipe();
    mr_mem_fail_after(i);
    int rc = fault_job_run();
    mr_mem_fail_after(-1);
    snprintf(what, sizeof what, "allocation %lld, exit %d", (long long)i, rc);
    if (rc == FAULT_JOB_DONE)
      expect_whole(what);
    else if (rc != MR_E_UNAVAILABLE)
      fault_problem("%s: not an exit status for this", what);
    harmless += rc == FAULT_JOB_DONE;
    expect_no_leak(fds, live, what);
    fault_job_expect_resumed(fault_job_is_bound() ? 0 : 1, what);
  }
  print_message("allocations: %lld, every %lld-th failed; the job went on after %lld of them\n",
                (long long)n, (long long)step, (long long)harmless);
  fault_assert_no_problems();
}

/* ---- the commands that only look */

static void commands_that_look(void **state) {
  (void)state;
  char out[160], model[160];
  snprintf(out, sizeof out, "%s", fault_path("out/o"));
  snprintf(model, sizeof model, "%s", fault_path("tiny.gguf"));
  const looking all[] = {
      {.name = "status", .command = mr_cmd_status, .finding = MR_E_IO, .args = {out, "--json"}},
      {.name = "check", .command = mr_cmd_check, .finding = MR_E_DATA, .args = {out, "--json"}},
      {.name = "info", .command = mr_cmd_model_info, .finding = MR_E_IO, .args = {model, "--json"}},
      {.name = "tokenize",
       .command = mr_cmd_model_tokenize,
       .finding = MR_E_IO,
       .args = {model, "some text"}}};
  for (int finished = 0; finished < 2; finished++) {
    no_fault();
    fault_job_wipe();
    if (!finished) {
      fault.left = 11;
      fault.ops = 1u << OP_SYNC;
      fault.error = EIO;
      fault.stays = true;
    }
    assert_int_equal(fault_job_run(), finished ? FAULT_JOB_DONE : MR_E_IO);
    for (size_t i = 0; i < (finished ? sizeof all / sizeof *all : 2); i++)
      look_with_faults(&all[i], 300);
  }
  fault_assert_no_problems();
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(each_call_fails_with_eio),
      cmocka_unit_test(each_writing_call_finds_the_disk_full),
      cmocka_unit_test(the_disk_stays_full),
      cmocka_unit_test(each_name_is_refused),
      cmocka_unit_test(interruptions_and_short_counts_do_not_show),
      cmocka_unit_test(each_call_of_a_resumed_job_fails),
      cmocka_unit_test(each_allocation_fails),
      cmocka_unit_test(commands_that_look),
  };
  return cmocka_run_group_tests(tests, begin, end);
}
