#include "jobs/rundir.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#include "io/durable.h"
#include "io/mem.h"
#include "io/sys.h"

#define LOCK_TRIES 4
#define LOCK_PAUSE_NS 40000000L

static const char *const made_names[MR_FINALS] = {
    "final.output", "final.errors", "final.report.json", "final.report.html", "final.manifest"};
static const char *const suffixes[MR_FINALS] = {"", ".errors.jsonl.zst", ".report.json",
                                                ".report.html", ".manifest.json"};

static char *join(const char *a, const char *b) {
  mr_text t = {0};
  mr_text_adds(&t, a);
  mr_text_adds(&t, b);
  if (!t.failed)
    return t.data;
  mr_text_free(&t);
  return NULL;
}

const char *mr_path_temporary(void) {
  const char *tmp = getenv("TMPDIR");
  return tmp && *tmp ? tmp : "/tmp";
}

static char *temporary_dir(void) {
  mr_text t = {0};
  mr_text_addf(&t, "%s/millrace-%ld-%llx", mr_path_temporary(), (long)getpid(),
               (unsigned long long)mr_sys_now->clock_ns());
  if (!t.failed)
    return t.data;
  mr_text_free(&t);
  return NULL;
}

static bool make_all(mr_paths *p, const char *base, const char *output) {
  p->temporary = base == NULL;
  p->run = base ? join(base, ".run") : temporary_dir();
  if (!p->run)
    return false;
  bool ok = (p->lock = join(p->run, "/lock")) != NULL;
  ok = ok && (p->journal = join(p->run, "/journal")) != NULL;
  ok = ok && (p->plan_inputs = join(p->run, "/plan.inputs")) != NULL;
  ok = ok && (p->frames[MR_LINE_RESULT] = join(p->run, "/results.frames")) != NULL;
  ok = ok && (p->frames[MR_LINE_ERROR] = join(p->run, "/errors.frames")) != NULL;
  ok = ok && (p->spill = join(p->run, "/bucket")) != NULL;
  for (int i = 0; ok && i < MR_FINALS; i++) {
    char *dir = join(p->run, "/");
    p->made[i] = dir ? join(dir, made_names[i]) : NULL;
    mr_mem_free(dir);
    ok = p->made[i] != NULL;
    if (ok && base)
      ok =
          (p->final[i] = i == MR_FINAL_OUTPUT ? join(output, "") : join(base, suffixes[i])) != NULL;
  }
  return ok;
}

char *mr_paths_kv(const mr_paths *p) {
  return join(p->run, "/kv");
}

mr_code mr_paths_make(mr_paths *p, const char *base, const char *output, mr_err *err) {
  memset(p, 0, sizeof *p);
  if (make_all(p, base, output))
    return MR_OK;
  mr_paths_free(p);
  return mr_err_set(err, MR_E_NOMEM, "out of memory");
}

static bool cut_suffix(char *s, const char *suffix) {
  size_t n = strlen(s), k = strlen(suffix);
  if (n <= k || strcmp(s + n - k, suffix) != 0)
    return false;
  s[n - k] = '\0';
  return true;
}

mr_code mr_paths_find(mr_paths *p, const char *typed, mr_err *err) {
  static const char *const known[] = {"/",
                                      ".run",
                                      ".manifest.json",
                                      ".report.json",
                                      ".report.html",
                                      ".errors.jsonl.zst",
                                      ".jsonl.zst",
                                      ".jsonl.gz",
                                      ".jsonl"};
  static const char *const formats[] = {".jsonl.zst", ".jsonl", ".jsonl.gz"};
  char *base = mr_mem_copy(typed, strlen(typed)), *output = NULL;
  if (!base)
    return mr_err_set(err, MR_E_NOMEM, "out of memory");
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (cut_suffix(base, known[i]) && i > 0)
      break;
  mr_code rc = MR_OK;
  bool there = false;
  for (size_t i = 0; !rc && !there && i <= 3; i++) { /* the first one again when none is there */
    mr_mem_free(output);
    output = join(base, formats[i % 3]);
    rc = output ? mr_path_look(output, &there, err) : mr_err_set(err, MR_E_NOMEM, "out of memory");
  }
  if (!rc)
    rc = mr_paths_make(p, base, output, err);
  mr_mem_free(output);
  mr_mem_free(base);
  return rc;
}

void mr_paths_free(mr_paths *p) {
  char *one[] = {p->run, p->lock, p->journal, p->plan_inputs, p->frames[0], p->frames[1], p->spill};
  for (size_t i = 0; i < sizeof one / sizeof *one; i++)
    mr_mem_free(one[i]);
  for (int i = 0; i < MR_FINALS; i++) {
    mr_mem_free(p->made[i]);
    mr_mem_free(p->final[i]);
  }
  memset(p, 0, sizeof *p);
}

bool mr_path_exists(const char *path) {
  struct stat st;
  return mr_sys_now->stat(path, &st) == 0;
}

mr_code mr_path_look(const char *path, bool *there, mr_err *err) {
  struct stat st;
  *there = mr_sys_now->stat(path, &st) == 0;
  if (*there || errno == ENOENT || errno == ENOTDIR)
    return MR_OK;
  return mr_err_errno(err, MR_E_IO, path, "cannot look at it");
}

/* The run that held the lock may have finished and removed the directory between our open and our
 * flock: then we hold a lock on a file without a name, and must begin again. */
static bool still_named(int fd, const char *path) {
  struct stat a, b;
  return mr_sys_now->fstat(fd, &a) == 0 && mr_sys_now->stat(path, &b) == 0 &&
         a.st_ino == b.st_ino && a.st_dev == b.st_dev;
}

static void write_holder(int fd) {
  char pid[32];
  int n = snprintf(pid, sizeof pid, "%ld\n", (long)getpid());
  if (mr_sys_now->ftruncate(fd, 0) == 0)
    (void)!mr_sys_now->pwrite(fd, pid, (size_t)n, 0); /* only words for a message: may fail */
}

static mr_code held_by_other(int fd, const mr_paths *p, mr_err *err) {
  char pid[32] = "";
  ssize_t n = mr_sys_now->pread(fd, pid, sizeof pid - 1, 0);
  pid[n > 0 ? strcspn(pid, "\n") : 0] = '\0';
  return mr_err_at(err, MR_E_STOPPED, p->lock, 0, -1,
                   "another run%s%s holds this job; wait for it or stop it",
                   pid[0] ? ", process " : "", pid);
}

mr_code mr_rundir_lock(const mr_paths *p, int *fd, mr_err *err) {
  for (int i = 0;; i++) {
    mr_code rc = mr_durable_mkdir(p->run, err);
    if (rc)
      return rc;
    *fd = mr_sys_now->open(p->lock, O_RDWR | O_CREAT, 0666);
    if (*fd < 0 && errno == ENOENT && i < LOCK_TRIES)
      continue;
    if (*fd < 0)
      return mr_err_errno(err, MR_E_CANTCREATE, p->lock, "cannot create");
    bool locked = mr_sys_now->flock(*fd, LOCK_EX | LOCK_NB) == 0, last = i >= LOCK_TRIES;
    if (locked && still_named(*fd, p->lock)) {
      write_holder(*fd);
      return MR_OK;
    }
    if (!locked && errno != EWOULDBLOCK)
      rc = mr_err_errno(err, MR_E_CANTCREATE, p->lock, "cannot lock");
    else if (last)
      rc = locked ? mr_err_at(err, MR_E_IO, p->lock, 0, -1,
                              "locked, but the file system does not say that it is still there")
                  : held_by_other(*fd, p, err);
    mr_sys_now->close(*fd);
    *fd = -1;
    if (rc)
      return rc;
    if (!locked) /* `status` holds it for an instant when it looks */
      nanosleep(&(struct timespec){0, LOCK_PAUSE_NS}, NULL);
  }
}

/* The lock goes last: who finds the directory without it may take it, and must find it empty. */
mr_code mr_rundir_remove(const mr_paths *p, mr_err *err) {
  return mr_durable_remove_tree_last(p->run, strrchr(p->lock, '/') + 1, err);
}

bool mr_rundir_is_locked(const mr_paths *p) {
  int fd = mr_sys_now->open(p->lock, O_RDONLY, 0);
  if (fd < 0)
    return false;
  bool held = mr_sys_now->flock(fd, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  mr_sys_now->close(fd);
  return held;
}
