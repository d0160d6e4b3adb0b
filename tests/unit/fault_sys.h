/* fault_sys.h: the operating system and the heap, of which the n-th call fails: for tests that run
 * commands of the program in process.
 *
 *     fault_sys_begin(&table);  fault_job_begin(&table);   (fault_job.h)
 *     no_fault(); fault.ops = ~0u; fault.left = n; fault.error = EIO; ... a command ...
 *     look_with_faults(&(looking){...}, most);             a command, with each fault in turn
 */
#ifndef MR_TESTS_FAULT_SYS_H
#define MR_TESTS_FAULT_SYS_H

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

static void fault_sys_begin(void) {
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

/* ---- commands, one fault at a time */

typedef struct looking {
  const char *name;
  int (*command)(int, char **);
  int finding; /* status when a file cannot be read and that is what the command is to find out */
  const char *until;               /* what it says counts up to here; NULL: all of it */
  void (*before)(void);            /* each time, without faults; may be NULL */
  void (*after)(const char *what); /* the same: what must hold whatever failed */
  const char *args[14];
} looking;

static int look(const looking *l) {
  char *argv[16] = {(char *)(uintptr_t)l->name};
  int argc = 1;
  for (; l->args[argc - 1]; argc++)
    argv[argc] = (char *)(uintptr_t)l->args[argc - 1];
  fault_clock_ns = 1000000000;
  return fault_command(l->command, argc, argv);
}

static void said_by(const looking *l, mr_text *t) {
  assert_true(fault_slurp(fault_log, t));
  char *end = l->until && t->data ? strstr(t->data, l->until) : NULL;
  if (end)
    t->len = (size_t)(end - t->data);
}

/* It says the same as undisturbed, or fails with a status that is in `may`. */
static void expect_look(const looking *l, int rc, int want, const mr_text *said, const int may[2],
                        const char *what) {
  mr_text now = {0};
  said_by(l, &now);
  if (rc == want ? now.len != said->len || memcmp(now.data, said->data, now.len) != 0
                 : rc != may[0] && rc != may[1])
    fault_problem("%s", what);
  mr_text_free(&now);
}

static void undisturbed(void (*hook)(void)) {
  no_fault();
  if (hook)
    hook();
}

static int64_t count_look_allocations(const looking *l) {
  const int64_t many = 1 << 20;
  int64_t n = 0;
  undisturbed(l->before);
  mr_mem_fail_after(many);
  look(l);
  for (void *p; (p = mr_mem_alloc(1, 1)) != NULL; n++)
    mr_mem_free(p);
  mr_mem_fail_after(-1);
  return many - n;
}

/* `most`: so many allocations, and as many calls, at about equal distances. */
static void look_with_faults(const looking *l, int64_t most) {
  mr_text said = {0};
  char what[100];
  undisturbed(l->before);
  look(l); /* what is made once and stays is made */
  undisturbed(l->before);
  fault.ops = ~0u;
  int want = look(l), fds = fault_open_fds();
  int64_t calls = fault.calls;
  said_by(l, &said);
  int64_t allocations = count_look_allocations(l), live = mr_mem_live();
  for (int64_t i = 0; i < allocations; i += 1 + allocations / most) {
    undisturbed(l->before);
    mr_mem_fail_after(i);
    int rc = look(l);
    mr_mem_fail_after(-1);
    snprintf(what, sizeof what, "%s, allocation %lld, exit %d", l->name, (long long)i, rc);
    expect_look(l, rc, want, &said, (const int[]){MR_E_UNAVAILABLE, MR_E_UNAVAILABLE}, what);
    expect_no_leak(fds, live, what);
    if (l->after)
      l->after(what);
  }
  for (int64_t i = 0; i < calls; i += 1 + calls / most) {
    undisturbed(l->before);
    fault.ops = ~0u;
    fault.left = i;
    fault.error = EIO;
    int rc = look(l);
    snprintf(what, sizeof what, "%s, call %lld (%s), exit %d", l->name, (long long)i,
             op_names[fault.hit < 0 ? 0 : fault.hit], rc);
    no_fault();
    expect_look(l, rc, want, &said, (const int[]){MR_E_IO, l->finding}, what);
    expect_no_leak(fds, live, what);
    if (l->after)
      l->after(what);
  }
  print_message("%s: exit %d, %lld calls, %lld allocations\n", l->name, want, (long long)calls,
                (long long)allocations);
  mr_text_free(&said);
}

#endif
