#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "io/durable.h"
#include "io/mem.h"
#include "io/sys.h"

static char dir[] = "/tmp/mr_test_durable_XXXXXX";
static char log_of_calls[512]; /* one letter a call: w rite, s ync, d irectory sync, r ename */
static char name_of_fd[64];
static int syncs_failing;

static void note(char c) {
  size_t n = strlen(log_of_calls);
  if (n + 1 < sizeof log_of_calls)
    log_of_calls[n] = c, log_of_calls[n + 1] = '\0';
}

static int spy_open(const char *path, int flags, mode_t mode) {
  int fd = mr_sys_os.open(path, flags, mode);
  if (fd >= 0 && fd < (int)sizeof name_of_fd)
    name_of_fd[fd] = flags & O_DIRECTORY ? 'd' : 's';
  return fd;
}

static ssize_t spy_write(int fd, const void *b, size_t n) {
  note('w');
  return mr_sys_os.write(fd, b, n);
}

static int spy_fsync(int fd) {
  note(name_of_fd[fd]);
  if (syncs_failing) {
    errno = EIO;
    return -1;
  }
  return mr_sys_os.fsync(fd);
}

static int spy_rename(const char *a, const char *b) {
  note('r');
  return mr_sys_os.rename(a, b);
}

static mr_sys spy;

static void name(char *buf, size_t cap, const char *file) {
  snprintf(buf, cap, "%s/%s", dir, file);
}

static void write_is_sync_rename_sync(void **state) {
  (void)state;
  char p[128], got[16] = "";
  mr_err e = MR_ERR_INIT;
  name(p, sizeof p, "a");
  log_of_calls[0] = '\0';
  mr_sys_now = &spy;
  assert_int_equal(mr_durable_write(p, "hello", 5, &e), MR_OK);
  mr_sys_now = &mr_sys_os;
  assert_string_equal(log_of_calls, "wsrd");
  FILE *f = fopen(p, "r");
  assert_non_null(fgets(got, sizeof got, f));
  fclose(f);
  assert_string_equal(got, "hello");
}

/* The old file stays, no name changes, and the sync is not tried again. */
static void failed_sync_is_final(void **state) {
  (void)state;
  char p[128], tmp[160], got[16] = "";
  mr_err e = MR_ERR_INIT;
  name(p, sizeof p, "b");
  snprintf(tmp, sizeof tmp, "%s.tmp", p);
  assert_int_equal(mr_durable_write(p, "old", 3, &e), MR_OK);
  log_of_calls[0] = '\0';
  syncs_failing = 1;
  mr_sys_now = &spy;
  assert_int_equal(mr_durable_write(p, "new", 3, &e), MR_E_IO);
  mr_sys_now = &mr_sys_os;
  syncs_failing = 0;
  assert_string_equal(log_of_calls, "ws");
  assert_int_not_equal(access(tmp, F_OK), 0);
  FILE *f = fopen(p, "r");
  assert_non_null(fgets(got, sizeof got, f));
  fclose(f);
  assert_string_equal(got, "old");
}

static void rename_syncs_both_directories(void **state) {
  (void)state;
  char a[128], sub[128], b[160];
  mr_err e = MR_ERR_INIT;
  name(a, sizeof a, "c");
  name(sub, sizeof sub, "sub");
  snprintf(b, sizeof b, "%s/c", sub);
  assert_int_equal(mr_durable_mkdir(sub, &e), MR_OK);
  assert_int_equal(mr_durable_mkdir(sub, &e), MR_OK);
  assert_int_equal(mr_durable_write(a, "x", 1, &e), MR_OK);
  log_of_calls[0] = '\0';
  mr_sys_now = &spy;
  assert_int_equal(mr_durable_rename(a, b, &e), MR_OK);
  mr_sys_now = &mr_sys_os;
  assert_string_equal(log_of_calls, "rdd");
  assert_int_equal(mr_durable_mkdir(b, &e), MR_E_CANTCREATE);
}

static void remove_tree_follows_no_link(void **state) {
  (void)state;
  char keep[128], tree[128], inner[160], file[200], link[200];
  mr_err e = MR_ERR_INIT;
  name(keep, sizeof keep, "keep");
  name(tree, sizeof tree, "tree");
  snprintf(inner, sizeof inner, "%s/inner", tree);
  snprintf(file, sizeof file, "%s/file", inner);
  snprintf(link, sizeof link, "%s/link", inner);
  assert_int_equal(mr_durable_mkdir(keep, &e), MR_OK);
  assert_int_equal(mr_durable_mkdir(tree, &e), MR_OK);
  assert_int_equal(mr_durable_mkdir(inner, &e), MR_OK);
  assert_int_equal(mr_durable_write(file, "x", 1, &e), MR_OK);
  assert_int_equal(symlink(keep, link), 0);
  assert_int_equal(mr_durable_remove_tree(tree, &e), MR_OK);
  assert_int_not_equal(access(tree, F_OK), 0);
  assert_int_equal(access(keep, F_OK), 0);
  assert_int_equal(mr_durable_remove_tree(tree, &e), MR_OK);
  assert_int_equal(mr_mem_live(), 0);
}

static char seized[200]; /* the directory whose last file is removed */

/* Another run takes the directory once its lock is gone; nothing else may be there then. */
static int seizing_unlink(const char *path) {
  char other[256];
  const char *slash = strrchr(path, '/');
  int r = mr_sys_os.unlink(path);
  if (strcmp(slash, "/b-lock") != 0)
    return r;
  assert_int_equal(rmdir(seized), 0);
  assert_int_equal(mkdir(seized, 0777), 0);
  snprintf(other, sizeof other, "%s/b-lock", seized);
  close(open(other, O_CREAT | O_WRONLY, 0600));
  return r;
}

static void the_last_file_goes_last(void **state) {
  (void)state;
  mr_err e = MR_ERR_INIT;
  mr_sys seizing = mr_sys_os;
  char file[256];
  name(seized, sizeof seized, "seized");
  assert_int_equal(mr_durable_mkdir(seized, &e), MR_OK);
  for (const char *const *f = (const char *const[]){"c", "b-lock", "a", NULL}; *f; f++) {
    snprintf(file, sizeof file, "%s/%s", seized, *f);
    assert_int_equal(mr_durable_write(file, "x", 1, &e), MR_OK);
  }
  seizing.unlink = seizing_unlink;
  mr_sys_now = &seizing;
  mr_code rc = mr_durable_remove_tree_last(seized, "b-lock", &e);
  mr_sys_now = &mr_sys_os;
  assert_int_equal(rc, MR_OK);
  snprintf(file, sizeof file, "%s/b-lock", seized);
  assert_int_equal(access(file, F_OK), 0);
  assert_int_equal(mr_durable_remove_tree_last(seized, "b-lock", &e), MR_OK);
  assert_int_not_equal(access(seized, F_OK), 0);
}

static void errors_name_the_path(void **state) {
  (void)state;
  mr_err e = MR_ERR_INIT;
  assert_int_equal(mr_durable_write("/nonexistent-dir/x", "y", 1, &e), MR_E_CANTCREATE);
  assert_non_null(strstr(e.file, "/nonexistent-dir/x"));
}

static int begin(void **state) {
  (void)state;
  spy = mr_sys_os;
  spy.open = spy_open;
  spy.write = spy_write;
  spy.fsync = spy_fsync;
  spy.rename = spy_rename;
  return mkdtemp(dir) ? 0 : -1;
}

static int end(void **state) {
  (void)state;
  mr_err e = MR_ERR_INIT;
  return mr_durable_remove_tree(dir, &e);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(write_is_sync_rename_sync),
      cmocka_unit_test(failed_sync_is_final),
      cmocka_unit_test(rename_syncs_both_directories),
      cmocka_unit_test(remove_tree_follows_no_link),
      cmocka_unit_test(the_last_file_goes_last),
      cmocka_unit_test(errors_name_the_path),
  };
  return cmocka_run_group_tests(tests, begin, end);
}
