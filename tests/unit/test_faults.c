/* Every call of the operating system that a small job makes fails once, and every allocation: the
 * exit status is right, nothing leaks, and the job resumes to the same bytes. */
#include <errno.h>

#include "tests/unit/fault_job.h"

typedef enum op {
  OP_OPEN,
  OP_CLOSE,
  OP_READ,
  OP_WRITE,
  OP_SYNC,
  OP_FTRUNCATE,
  OP_RENAME,
  OP_UNLINK,
  OP_MKDIR,
  OP_STAT,
  OP_FLOCK,
  OP_MMAP
} op;

static const char *const op_names[] = {"open",   "close",  "read",  "write", "sync",  "ftruncate",
                                       "rename", "unlink", "mkdir", "stat",  "flock", "mmap"};

#define WRITING                                                                                    \
  (1u << OP_WRITE | 1u << OP_SYNC | 1u << OP_FTRUNCATE | 1u << OP_RENAME | 1u << OP_MKDIR |        \
   1u << OP_OPEN)

static struct {
  int64_t left; /* calls until the one that fails; < 0: none */
  unsigned ops; /* which calls are counted and fail */
  int error;
  bool stays;    /* all later ones fail too */
  bool awkward;  /* none fails: reads and writes are interrupted or short */
  int64_t calls; /* counted */
  int hit;       /* op that failed; -1: none */
} fault;

static bool fails(op o) {
  if (!(fault.ops >> o & 1))
    return false;
  fault.calls++;
  if (fault.left < 0 || fault.left-- > 0)
    return false;
  if (fault.stays)
    fault.left = 0;
  fault.hit = (int)o;
  errno = fault.error;
  return true;
}

/* Bytes to move in this call; 0: it is interrupted. */
static size_t some(size_t n) {
  static unsigned turn;
  if (!fault.awkward)
    return n;
  switch (++turn % 3) {
  case 0:
    errno = EINTR;
    return 0;
  case 1:
    return n;
  default:
    return n > 1 ? 1 + n / 3 : n;
  }
}

static bool interrupted(void) {
  return fault.awkward && some(1) == 0;
}

static int f_open(const char *path, int flags, mode_t mode) {
  bool writes = flags & (O_CREAT | O_TRUNC);
  if ((writes || fault.error != ENOSPC) && fails(OP_OPEN))
    return -1;
  return mr_sys_os.open(path, flags, mode);
}

static int f_close(int fd) {
  bool bad = fails(OP_CLOSE);
  int error = errno, rc = mr_sys_os.close(fd);
  errno = bad ? error : errno;
  return bad ? -1 : rc;
}

static ssize_t f_read(int fd, void *b, size_t n) {
  size_t k = some(n);
  return (n && !k) || fails(OP_READ) ? -1 : mr_sys_os.read(fd, b, k);
}

static ssize_t f_pread(int fd, void *b, size_t n, off_t at) {
  size_t k = some(n);
  return (n && !k) || fails(OP_READ) ? -1 : mr_sys_os.pread(fd, b, k, at);
}

static ssize_t f_write(int fd, const void *b, size_t n) {
  size_t k = some(n);
  if (n && !k)
    return -1;
  if (!fails(OP_WRITE))
    return mr_sys_os.write(fd, b, k);
  (void)!mr_sys_os.write(fd, b, k / 2); /* a part may be there */
  errno = fault.error;
  return -1;
}

static ssize_t f_pwrite(int fd, const void *b, size_t n, off_t at) {
  size_t k = some(n);
  return (n && !k) || fails(OP_WRITE) ? -1 : mr_sys_os.pwrite(fd, b, k, at);
}

static int f_fdatasync(int fd) {
  (void)fd;
  return interrupted() || fails(OP_SYNC) ? -1 : 0;
}

static int f_fsync(int fd) {
  return f_fdatasync(fd);
}

static int f_ftruncate(int fd, off_t n) {
  return fails(OP_FTRUNCATE) ? -1 : mr_sys_os.ftruncate(fd, n);
}

static int f_rename(const char *a, const char *b) {
  return fails(OP_RENAME) ? -1 : mr_sys_os.rename(a, b);
}

static int f_unlink(const char *path) {
  return fails(OP_UNLINK) ? -1 : mr_sys_os.unlink(path);
}

static int f_rmdir(const char *path) {
  return fails(OP_UNLINK) ? -1 : mr_sys_os.rmdir(path);
}

static int f_mkdir(const char *path, mode_t mode) {
  return fails(OP_MKDIR) ? -1 : mr_sys_os.mkdir(path, mode);
}

static int f_stat(const char *path, struct stat *st) {
  return fails(OP_STAT) ? -1 : mr_sys_os.stat(path, st);
}

static int f_fstat(int fd, struct stat *st) {
  return fails(OP_STAT) ? -1 : mr_sys_os.fstat(fd, st);
}

static int f_flock(int fd, int what) {
  return fails(OP_FLOCK) ? -1 : mr_sys_os.flock(fd, what);
}

static void *f_mmap(size_t n, int fd, off_t at) {
  return fails(OP_MMAP) ? (void *)-1 : mr_sys_os.mmap(n, fd, at);
}

static mr_sys table;

static int begin(void **state) {
  (void)state;
  table = mr_sys_os;
  table.open = f_open;
  table.close = f_close;
  table.read = f_read;
  table.write = f_write;
  table.pread = f_pread;
  table.pwrite = f_pwrite;
  table.fdatasync = f_fdatasync;
  table.fsync = f_fsync;
  table.ftruncate = f_ftruncate;
  table.rename = f_rename;
  table.unlink = f_unlink;
  table.rmdir = f_rmdir;
  table.mkdir = f_mkdir;
  table.stat = f_stat;
  table.fstat = f_fstat;
  table.flock = f_flock;
  table.mmap = f_mmap;
  fault.left = -1;
  return fault_job_begin(&table);
}

static int end(void **state) {
  (void)state;
  return fault_job_end();
}

static void no_fault(void) {
  memset(&fault, 0, sizeof fault);
  fault.left = -1;
  fault.hit = -1;
}

static void expect_no_leak(int fds, int64_t live, const char *what) {
  if (fault_open_fds() != fds || mr_mem_live() != live)
    fault_problem("%s: %d descriptors and %lld allocations leak", what, fault_open_fds() - fds,
                  (long long)(mr_mem_live() - live));
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
    fault_job_expect_whole(0, what);
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
      fault_job_expect_whole(0, what);
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

typedef struct looking {
  const char *name;
  int (*command)(int, char **);
  int finding; /* status when a file cannot be read and that is what the command is to find out */
  const char *args[4];
} looking;

static int look(const looking *l) {
  char *argv[6] = {(char *)(uintptr_t)l->name};
  int argc = 1;
  for (; l->args[argc - 1]; argc++)
    argv[argc] = (char *)(uintptr_t)l->args[argc - 1];
  fault_clock_ns = 1000000000;
  return fault_command(l->command, argc, argv);
}

/* It says the same as undisturbed, or fails with a status that is in `may`. */
static void expect_look(int rc, int want, const mr_text *said, const int may[2], const char *what) {
  mr_text now = {0};
  fault_slurp(fault_log, &now);
  if (rc == want ? now.len != said->len || memcmp(now.data, said->data, now.len) != 0
                 : rc != may[0] && rc != may[1])
    fault_problem("%s", what);
  mr_text_free(&now);
}

static void look_with_faults(const looking *l) {
  mr_text said = {0};
  char what[100];
  no_fault();
  fault.ops = ~0u;
  int want = look(l), fds = fault_open_fds();
  int64_t calls = fault.calls, many = 1 << 24, n = 0;
  assert_true(fault_slurp(fault_log, &said));
  mr_mem_fail_after(many);
  look(l);
  for (void *p; (p = mr_mem_alloc(1, 1)) != NULL; n++)
    mr_mem_free(p);
  int64_t allocations = many - n, live = mr_mem_live();
  for (int64_t i = 0; i < allocations; i += 1 + allocations / 300) {
    no_fault();
    mr_mem_fail_after(i);
    int rc = look(l);
    mr_mem_fail_after(-1);
    snprintf(what, sizeof what, "%s, allocation %lld, exit %d", l->name, (long long)i, rc);
    expect_look(rc, want, &said, (const int[]){MR_E_UNAVAILABLE, MR_E_UNAVAILABLE}, what);
    expect_no_leak(fds, live, what);
  }
  for (int64_t i = 0; i < calls; i++) {
    no_fault();
    fault.ops = ~0u;
    fault.left = i;
    fault.error = EIO;
    int rc = look(l);
    snprintf(what, sizeof what, "%s, call %lld (%s), exit %d", l->name, (long long)i,
             op_names[fault.hit < 0 ? 0 : fault.hit], rc);
    no_fault();
    expect_look(rc, want, &said, (const int[]){MR_E_IO, l->finding}, what);
    expect_no_leak(fds, live, what);
  }
  print_message("%s: %lld calls, %lld allocations\n", l->name, (long long)calls,
                (long long)allocations);
  mr_text_free(&said);
}

static void commands_that_look(void **state) {
  (void)state;
  char out[160], model[160];
  snprintf(out, sizeof out, "%s", fault_path("out/o"));
  snprintf(model, sizeof model, "%s", fault_path("tiny.gguf"));
  const looking all[] = {{"status", mr_cmd_status, MR_E_IO, {out, "--json"}},
                         {"check", mr_cmd_check, MR_E_DATA, {out, "--json"}},
                         {"info", mr_cmd_model_info, MR_E_IO, {model, "--json"}},
                         {"tokenize", mr_cmd_model_tokenize, MR_E_IO, {model, "some text"}}};
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
      look_with_faults(&all[i]);
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
