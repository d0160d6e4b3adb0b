/* The commit protocol under crashes. The table of system calls below lets the process "die" at the
 * n-th call that changes something: from then on every such call fails. What was written but not
 * synced may then have landed, have vanished, or be rotten. */
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
#include "jobs/assemble.h"
#include "jobs/commit.h"

#define ROWS 40
#define FILES 64

/* In memory where there is such a place: the tests make and drop some ten thousand files. */
static char shm[] = "/dev/shm/mr_test_commit_XXXXXX", tmp[] = "/tmp/mr_test_commit_XXXXXX";
static const char *dir;
static char base[64], output[80];

/* ---- a disk that can lose what was not synced */

typedef struct tracked {
  char path[160];
  off_t synced;
} tracked;

static tracked files[FILES];
static int n_files, fd_file[256];
static int calls_left; /* -1: never dies */
static int calls;      /* that change something */
static int syncs;

static bool dead(void) {
  calls++;
  if (calls_left < 0)
    return false;
  if (calls_left == 0) {
    errno = EIO;
    return true;
  }
  calls_left--;
  return false;
}

static int file_of(const char *path) {
  for (int i = 0; i < n_files; i++)
    if (!strcmp(files[i].path, path))
      return i;
  assert_true(n_files < FILES);
  snprintf(files[n_files].path, sizeof files[n_files].path, "%s", path);
  files[n_files].synced = 0;
  return n_files++;
}

static int sim_open(const char *path, int flags, mode_t mode) {
  if ((flags & (O_CREAT | O_TRUNC)) && dead())
    return -1;
  int fd = mr_sys_os.open(path, flags, mode);
  if (fd >= 0 && fd < 256 && !(flags & O_DIRECTORY)) {
    fd_file[fd] = file_of(path);
    if (flags & O_TRUNC)
      files[fd_file[fd]].synced = 0;
  }
  return fd;
}

static ssize_t sim_write(int fd, const void *b, size_t n) {
  if (dead()) { /* the call in which it dies may have written a part */
    (void)!mr_sys_os.write(fd, b, n / 2);
    errno = EIO;
    return -1;
  }
  return mr_sys_os.write(fd, b, n);
}

static int sim_sync(int fd) {
  struct stat st;
  syncs++;
  if (dead())
    return -1;
  if (mr_sys_os.fstat(fd, &st) == 0 && S_ISREG(st.st_mode))
    files[fd_file[fd]].synced = st.st_size;
  return 0;
}

static int sim_ftruncate(int fd, off_t size) {
  if (dead())
    return -1;
  if (files[fd_file[fd]].synced > size)
    files[fd_file[fd]].synced = size;
  return mr_sys_os.ftruncate(fd, size);
}

static int sim_rename(const char *a, const char *b) {
  if (dead())
    return -1;
  int i = file_of(a);
  files[file_of(b)].synced = files[i].synced;
  return mr_sys_os.rename(a, b);
}

static int sim_unlink(const char *path) {
  return dead() ? -1 : mr_sys_os.unlink(path);
}

static int sim_rmdir(const char *path) {
  return dead() ? -1 : mr_sys_os.rmdir(path);
}

static int sim_mkdir(const char *path, mode_t mode) {
  return dead() ? -1 : mr_sys_os.mkdir(path, mode);
}

static mr_sys sim;

enum { LANDED, VANISHED, ROTTEN, FATES };

static void crash(int fate) {
  for (int i = 0; i < n_files; i++) {
    struct stat st;
    if (stat(files[i].path, &st) || st.st_size <= files[i].synced || fate == LANDED)
      continue;
    int fd = open(files[i].path, O_RDWR);
    assert_true(fd >= 0);
    if (fate == VANISHED)
      assert_int_equal(ftruncate(fd, files[i].synced), 0);
    else
      assert_int_equal(pwrite(fd, "\x5a", 1, files[i].synced + (st.st_size - files[i].synced) / 2),
                       1);
    close(fd);
  }
}

/* ---- a small job */

static void line_of(uint64_t row, mr_text *t) {
  mr_text_clear(t);
  mr_text_addf(t, "{\"id\":\"r%llu\",\"x\":\"", (unsigned long long)row);
  for (uint64_t i = 0; i < row * 7 % 50; i++)
    mr_text_addc(t, (char)('a' + (row + i) % 26));
  mr_text_adds(t, "\"}\n");
}

static bool is_error_row(uint64_t row) {
  return row % 9 == 4;
}

static void identity(mr_job_identity *id, int64_t created, const char *model) {
  mr_err e = MR_ERR_INIT;
  memset(id, 0, sizeof *id);
  id->created = created;
  id->rows = ROWS;
  mr_hash_hex("inputs", 6, id->input_digest);
  mr_hash_hex(model, strlen(model), id->model_digest);
  snprintf(id->numerics, sizeof id->numerics, "test");
  assert_int_equal(mr_identity_set_options(id, json_pack("{s:i}", "max-tokens", 5), &e), MR_OK);
}

static void wipe(void) {
  mr_err e = MR_ERR_INIT;
  char cmd[128];
  const char *ends[] = {".jsonl.zst",        ".jsonl",       ".jsonl.gz",
                        ".errors.jsonl.zst", ".report.json", ".manifest.json"};
  snprintf(cmd, sizeof cmd, "%s.run", base);
  mr_durable_remove_tree(cmd, &e);
  for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
    snprintf(cmd, sizeof cmd, "%s%s", base, ends[i]);
    unlink(cmd);
  }
  n_files = 0;
}

/* A step through the rows in an order that depends on `order`, 40 and the steps being coprime. */
static uint64_t row_at(uint64_t i, int order) {
  static const uint64_t step[] = {1, 7, 39, 13};
  return i * step[order % 4] % ROWS;
}

static mr_code add_rows(mr_commit *c, int order, uint64_t from, uint64_t to, int flush_each,
                        mr_err *e) {
  mr_text t = {0};
  mr_code rc = MR_OK;
  for (uint64_t i = from; !rc && i < to; i++) {
    uint64_t row = row_at(i, order);
    if (mr_commit_is_done(c, row))
      continue;
    bool bad = is_error_row(row);
    mr_line_info info = {row, bad ? MR_LINE_ERROR : MR_LINE_RESULT, bad ? 0 : row, bad ? 0 : 2};
    line_of(row, &t);
    rc = t.failed ? MR_E_NOMEM : mr_commit_add(c, &info, t.data, t.len, e);
    if (!rc && flush_each && i % (uint64_t)flush_each == 0)
      rc = mr_commit_flush(c, e);
  }
  mr_text_free(&t);
  return rc;
}

static mr_code finish(mr_commit *c, mr_output_format format, bool completion, mr_err *e) {
  mr_manifest m;
  memset(&m, 0, sizeof m);
  mr_code rc = mr_commit_assemble(c, format, 3, completion, &m, e);
  if (!rc)
    rc = mr_commit_put(c, MR_FINAL_REPORT_JSON, "{}", 2, &m, e);
  if (!rc)
    rc = mr_commit_publish(c, &m, e);
  mr_manifest_free(&m);
  return rc;
}

/* The whole of a run, as the program does it; a finished job is left alone. */
static mr_code whole_run(int order, int flush_each, mr_err *e) {
  mr_paths p;
  mr_commit *c = NULL;
  mr_job_identity id;
  identity(&id, 1000, "model");
  assert_int_equal(mr_paths_make(&p, base, output, e), MR_OK);
  mr_code rc = mr_commit_open(&c, &p, e);
  if (!rc)
    rc = mr_commit_bind(c, &id, e);
  if (!rc && mr_commit_finished(c)) {
    rc = mr_commit_discard(c, e);
  } else if (!rc) {
    rc = add_rows(c, order, 0, ROWS, flush_each, e);
    if (!rc)
      rc = finish(c, MR_OUT_ZST, false, e);
  }
  mr_commit_close(c);
  mr_identity_free(&id);
  mr_paths_free(&p);
  return rc;
}

static void slurp(const char *suffix, mr_text *t) {
  char path[128], buf[4096];
  snprintf(path, sizeof path, "%s%s", base, suffix);
  mr_text_clear(t);
  int fd = open(path, O_RDONLY);
  if (fd < 0)
    fail_msg("%s is not there", path);
  for (ssize_t k; (k = read(fd, buf, sizeof buf)) > 0;)
    mr_text_add(t, buf, (size_t)k);
  close(fd);
}

static mr_text want[3]; /* results, errors, manifest of an undisturbed run */
static const char *const ends[3] = {".jsonl.zst", ".errors.jsonl.zst", ".manifest.json"};

static void assert_as_undisturbed(void) {
  mr_text got = {0};
  char run[80];
  for (int i = 0; i < 3; i++) {
    slurp(ends[i], &got);
    assert_int_equal(got.len, want[i].len);
    assert_memory_equal(got.data, want[i].data, got.len);
  }
  snprintf(run, sizeof run, "%s.run", base);
  assert_int_not_equal(access(run, F_OK), 0);
  mr_text_free(&got);
}

/* ---- tests */

/* C9: the order of completion and the flushes do not show in the bytes. */
static void bytes_do_not_depend_on_order(void **state) {
  (void)state;
  for (int order = 0; order < 4; order++)
    for (int flush = 0; flush < 12; flush += 5) {
      mr_err e = MR_ERR_INIT;
      wipe();
      assert_int_equal(whole_run(order, flush, &e), MR_OK);
      assert_as_undisturbed();
    }
}

/* C1, C2, C3, C6, C7: die at each call that changes something, lose or garble what was not synced,
 * run again. */
static void die_at_every_call(void **state) {
  (void)state;
  for (int fate = 0; fate < FATES; fate++) {
    mr_code rc = MR_E_IO;
    for (int n = 0; rc != MR_OK; n++) {
      mr_err e = MR_ERR_INIT;
      wipe();
      calls_left = n;
      rc = whole_run(1, 6, &e);
      calls_left = -1;
      crash(fate);
      e = (mr_err)MR_ERR_INIT;
      mr_code again = whole_run(2, 9, &e);
      if (again)
        fail_msg("fate %d, call %d: %s %s", fate, n, e.file, e.text);
      assert_as_undisturbed();
      assert_true(n < 500);
    }
  }
  assert_int_equal(mr_mem_live(),
                   0 + (want[0].data != NULL) + (want[1].data != NULL) + (want[2].data != NULL));
}

/* The same with a second death while resuming. */
static void die_twice(void **state) {
  (void)state;
  for (int n = 10; n < 90; n += 7)
    for (int m = 1; m < 60; m += 5) {
      mr_err e = MR_ERR_INIT;
      wipe();
      calls_left = n;
      whole_run(3, 4, &e);
      crash((n + m) % FATES);
      calls_left = m;
      whole_run(1, 5, &e);
      calls_left = -1;
      crash(m % FATES);
      e = (mr_err)MR_ERR_INIT;
      assert_int_equal(whole_run(0, 0, &e), MR_OK);
      assert_as_undisturbed();
    }
}

static mr_commit *begin_job(mr_paths *p, mr_job_identity *id, mr_err *e) {
  mr_commit *c = NULL;
  identity(id, 1000, "model");
  assert_int_equal(mr_paths_make(p, base, output, e), MR_OK);
  assert_int_equal(mr_commit_open(&c, p, e), MR_OK);
  assert_int_equal(mr_commit_bind(c, id, e), MR_OK);
  return c;
}

static void end_job(mr_commit *c, mr_paths *p, mr_job_identity *id) {
  mr_commit_close(c);
  mr_identity_free(id);
  mr_paths_free(p);
}

static void lock_is_exclusive(void **state) {
  (void)state;
  mr_err e = MR_ERR_INIT;
  mr_paths p;
  mr_job_identity id;
  mr_commit *other = NULL;
  wipe();
  mr_commit *c = begin_job(&p, &id, &e);
  assert_true(mr_rundir_is_locked(&p));
  assert_int_equal(mr_commit_open(&other, &p, &e), MR_E_STOPPED);
  assert_non_null(strstr(e.text, "another run"));
  assert_int_equal(access(p.run, F_OK), 0); /* the refused run removed nothing */
  mr_commit_close(c);
  assert_false(mr_rundir_is_locked(&p));
  mr_err_clear(&e);
  assert_int_equal(mr_commit_open(&other, &p, &e), MR_OK);
  end_job(other, &p, &id);
}

static void another_job_is_refused(void **state) {
  (void)state;
  mr_err e = MR_ERR_INIT;
  mr_paths p;
  mr_job_identity id, old;
  wipe();
  mr_commit *c = begin_job(&p, &id, &e);
  mr_commit_close(c);
  old = id;
  identity(&id, 2000, "another model");
  assert_int_equal(mr_identity_set_options(&id, json_pack("{s:i}", "max-tokens", 6), &e), MR_OK);
  assert_int_equal(mr_commit_open(&c, &p, &e), MR_OK);
  assert_int_equal(mr_commit_bind(c, &id, &e), MR_E_DATA);
  assert_non_null(strstr(e.text, "the model file"));
  assert_non_null(strstr(e.text, "option max-tokens (6, was 5)"));
  assert_null(strstr(e.text, "inputs;"));
  mr_identity_free(&id);
  mr_err_clear(&e);
  identity(&id, 3000, "model"); /* the same job, started later: it keeps its id and its first start
                                 */
  assert_int_equal(mr_commit_bind(c, &id, &e), MR_OK);
  assert_int_equal(id.created, 1000);
  assert_string_equal(id.job_id, old.job_id);
  mr_identity_free(&old);
  end_job(c, &p, &id);
}

/* C8 */
static void existing_output_is_refused(void **state) {
  (void)state;
  mr_err e = MR_ERR_INIT;
  mr_paths p;
  mr_job_identity id;
  mr_commit *c;
  wipe();
  assert_int_equal(mr_durable_write(output, "mine", 4, &e), MR_OK);
  identity(&id, 1, "model");
  assert_int_equal(mr_paths_make(&p, base, output, &e), MR_OK);
  assert_int_equal(mr_commit_open(&c, &p, &e), MR_OK);
  assert_int_equal(mr_commit_bind(c, &id, &e), MR_E_CANTCREATE);
  end_job(c, &p, &id);
}

/* C4: a frame that rotted after it was synced costs its rows and later ones, not the job. */
static void rotten_frame_is_computed_again(void **state) {
  (void)state;
  for (int at = 0; at < 3; at++) {
    mr_err e = MR_ERR_INIT;
    mr_paths p;
    mr_job_identity id;
    wipe();
    mr_commit *c = begin_job(&p, &id, &e);
    assert_int_equal(add_rows(c, 1, 0, 30, 5, &e), MR_OK);
    assert_int_equal(mr_commit_flush(c, &e), MR_OK);
    assert_int_equal(mr_commit_done_rows(c), 30);
    uint64_t size = mr_commit_totals_get(c)->frame_bytes;
    mr_commit_close(c);
    int fd = open(p.frames[0], O_RDWR);
    assert_int_equal(pwrite(fd, "!", 1, (off_t)(size * (uint64_t)at / 4)), 1);
    close(fd);
    assert_int_equal(mr_commit_open(&c, &p, &e), MR_OK);
    assert_true(mr_commit_done_rows(c) < 30);
    assert_true(mr_commit_totals_get(c)->lost_rows > 0);
    end_job(c, &p, &id);
    assert_int_equal(whole_run(0, 0, &e), MR_OK);
    assert_as_undisturbed();
  }
}

static int bad_sync(int fd) {
  (void)fd;
  syncs++;
  errno = EIO;
  return -1;
}

static ssize_t no_write(int fd, const void *b, size_t n) {
  (void)fd, (void)b, (void)n;
  fail_msg("written after a failed sync");
  return -1;
}

/* C5 */
static void failed_sync_is_final(void **state) {
  (void)state;
  mr_err e = MR_ERR_INIT;
  mr_paths p;
  mr_job_identity id;
  mr_sys bad = sim;
  wipe();
  mr_commit *c = begin_job(&p, &id, &e);
  bad.fdatasync = bad_sync;
  mr_sys_now = &bad;
  assert_int_equal(add_rows(c, 0, 0, 5, 0, &e), MR_OK);
  syncs = 0;
  assert_int_equal(mr_commit_flush(c, &e), MR_E_IO);
  assert_int_equal(syncs, 1);
  bad = sim;
  bad.write = no_write;
  mr_err_clear(&e);
  assert_int_equal(mr_commit_flush(c, &e), MR_E_IO);
  assert_int_equal(add_rows(c, 0, 5, 6, 0, &e), MR_E_IO);
  mr_sys_now = &sim;
  end_job(c, &p, &id);
  mr_err_clear(&e);
  assert_int_equal(whole_run(0, 0, &e), MR_OK);
  assert_as_undisturbed();
}

static void a_row_twice_is_refused(void **state) {
  (void)state;
  mr_err e = MR_ERR_INIT;
  mr_paths p;
  mr_job_identity id;
  mr_line_info info = {.row = 3};
  wipe();
  mr_commit *c = begin_job(&p, &id, &e);
  assert_int_equal(mr_commit_add(c, &info, "{}\n", 3, &e), MR_OK);
  assert_int_equal(mr_commit_add(c, &info, "{}\n", 3, &e), MR_E_INTERNAL);
  mr_err_clear(&e);
  info.row = ROWS;
  assert_int_equal(mr_commit_add(c, &info, "{}\n", 3, &e), MR_E_INTERNAL);
  end_job(c, &p, &id);
}

/* Missing rows: no final file appears. */
static void unfinished_is_not_published(void **state) {
  (void)state;
  mr_err e = MR_ERR_INIT;
  mr_paths p;
  mr_job_identity id;
  wipe();
  mr_commit *c = begin_job(&p, &id, &e);
  assert_int_equal(add_rows(c, 0, 0, ROWS - 1, 0, &e), MR_OK);
  assert_int_equal(finish(c, MR_OUT_ZST, false, &e), MR_E_DATA);
  assert_int_not_equal(access(output, F_OK), 0);
  end_job(c, &p, &id);
}

typedef struct gathered {
  mr_text text[2];
} gathered;

static mr_code gather(void *ctx, uint64_t row, mr_line_kind kind, const char *line, size_t len,
                      mr_err *err) {
  gathered *g = ctx;
  (void)err;
  assert_int_equal(kind, is_error_row(row) ? MR_LINE_ERROR : MR_LINE_RESULT);
  mr_text_add(&g->text[kind], line, len);
  return MR_OK;
}

/* Many small buckets give the lines of one large one; completion order gives them as they came. */
static void buckets_and_orders(void **state) {
  (void)state;
  mr_err e = MR_ERR_INIT;
  mr_paths p;
  mr_job_identity id;
  mr_text t = {0}, in_order = {0}, as_done = {0};
  wipe();
  mr_commit *c = begin_job(&p, &id, &e);
  assert_int_equal(add_rows(c, 1, 0, ROWS, 4, &e), MR_OK);
  assert_int_equal(mr_commit_flush(c, &e), MR_OK);
  for (uint64_t i = 0; i < ROWS; i++) {
    line_of(i, &t);
    if (!is_error_row(i))
      mr_text_add(&in_order, t.data, t.len);
    line_of(row_at(i, 1), &t);
    if (!is_error_row(row_at(i, 1)))
      mr_text_add(&as_done, t.data, t.len);
  }
  for (size_t bytes = 0; bytes < 2000; bytes = bytes * 3 + 1) {
    gathered g = {{{0}, {0}}};
    assert_int_equal(mr_assemble_run(&p, ROWS, false, bytes, gather, &g, &e), MR_OK);
    assert_string_equal(g.text[0].data, in_order.data);
    assert_non_null(strstr(g.text[1].data, "\"r4\""));
    mr_text_free(&g.text[0]);
    mr_text_free(&g.text[1]);
  }
  gathered g = {{{0}, {0}}};
  assert_int_equal(mr_assemble_run(&p, ROWS, true, 0, gather, &g, &e), MR_OK);
  assert_string_equal(g.text[0].data, as_done.data);
  mr_text_free(&g.text[0]);
  mr_text_free(&g.text[1]);
  end_job(c, &p, &id);
  mr_text_free(&t);
  mr_text_free(&in_order);
  mr_text_free(&as_done);
}

static void manifest_finds_every_flipped_bit(void **state) {
  (void)state;
  mr_err e = MR_ERR_INIT;
  char path[80];
  snprintf(path, sizeof path, "%s.manifest.json", base);
  wipe();
  assert_int_equal(whole_run(0, 0, &e), MR_OK);
  int fd = open(path, O_RDWR);
  assert_true(fd >= 0);
  for (size_t bit = 0; bit < want[2].len * 8; bit++) {
    mr_manifest m;
    const char *byte = want[2].data + bit / 8, flipped = (char)(*byte ^ 1 << bit % 8);
    assert_int_equal(pwrite(fd, &flipped, 1, (off_t)(bit / 8)), 1);
    mr_err_clear(&e);
    if (mr_manifest_load(&m, path, &e) == MR_OK)
      fail_msg("bit %zu of byte %zu passed", bit % 8, bit / 8);
    assert_int_equal(pwrite(fd, byte, 1, (off_t)(bit / 8)), 1);
  }
  close(fd);
}

/* The n-th allocation fails, for every n: an error or success, no leak. */
static void allocations_fail(void **state) {
  (void)state;
  mr_code rc = MR_E_NOMEM;
  for (int64_t n = 0; rc != MR_OK; n++) {
    mr_err e = MR_ERR_INIT;
    mr_paths p;
    mr_commit *c = NULL;
    mr_job_identity id;
    wipe();
    int64_t before = mr_mem_live();
    identity(&id, 1000, "model");
    assert_int_equal(mr_paths_make(&p, base, output, &e), MR_OK);
    mr_mem_fail_after(n);
    rc = mr_commit_open(&c, &p, &e);
    if (!rc)
      rc = mr_commit_bind(c, &id, &e);
    if (!rc)
      rc = add_rows(c, 1, 0, ROWS, 7, &e);
    if (!rc)
      rc = finish(c, MR_OUT_ZST, false, &e);
    bool reached = n > 2000;
    mr_mem_fail_after(-1);
    end_job(c, &p, &id);
    assert_int_equal(mr_mem_live(), before);
    if (rc != MR_OK && rc != MR_E_NOMEM)
      fail_msg("allocation %lld: %d %s: %s", (long long)n, (int)rc, e.file, e.text);
    assert_false(reached);
  }
}

static int rmdir_busy(const char *path) {
  (void)path;
  errno = EBUSY;
  return -1;
}

static int stat_fails(const char *path, struct stat *st) {
  if (strstr(path, "/lock")) {
    errno = EACCES;
    return -1;
  }
  return mr_sys_os.stat(path, st);
}

/* C7: a state that cannot be removed is no failure of the job. */
static void litter_that_stays_is_no_failure(void **state) {
  (void)state;
  mr_err e = MR_ERR_INIT;
  mr_sys busy = mr_sys_os;
  busy.rmdir = rmdir_busy;
  wipe();
  mr_sys_now = &busy;
  mr_code rc = whole_run(0, 0, &e);
  mr_sys_now = &sim;
  assert_int_equal(rc, MR_OK);
  assert_int_equal(whole_run(0, 0, &e), MR_OK); /* the next run removes it */
  assert_as_undisturbed();
}

/* A lock that is held, and of which the file system does not say that it has its name, ends in an
 * error, not in trying for ever. */
static void a_lock_that_cannot_be_looked_at(void **state) {
  (void)state;
  mr_err e = MR_ERR_INIT;
  mr_paths p;
  int fd = -1;
  mr_sys blind = mr_sys_os;
  blind.stat = stat_fails;
  wipe();
  assert_int_equal(mr_paths_make(&p, base, output, &e), MR_OK);
  mr_sys_now = &blind;
  mr_code rc = mr_rundir_lock(&p, &fd, &e);
  mr_sys_now = &sim;
  assert_int_equal(rc, MR_E_IO);
  assert_int_equal(fd, -1);
  assert_non_null(strstr(e.file, "/lock"));
  mr_paths_free(&p);
}

static int begin(void **state) {
  (void)state;
  mr_err e = MR_ERR_INIT;
  sim = mr_sys_os;
  sim.open = sim_open;
  sim.write = sim_write;
  sim.fsync = sim.fdatasync = sim_sync;
  sim.ftruncate = sim_ftruncate;
  sim.rename = sim_rename;
  sim.unlink = sim_unlink;
  sim.rmdir = sim_rmdir;
  sim.mkdir = sim_mkdir;
  calls_left = -1;
  mr_sys_now = &sim;
  dir = mkdtemp(shm);
  if (!dir)
    dir = mkdtemp(tmp);
  if (!dir)
    return -1;
  snprintf(base, sizeof base, "%s/out", dir);
  snprintf(output, sizeof output, "%s.jsonl.zst", base);
  if (whole_run(0, 0, &e))
    return -1;
  for (int i = 0; i < 3; i++)
    slurp(ends[i], &want[i]);
  return 0;
}

static int end(void **state) {
  (void)state;
  mr_err e = MR_ERR_INIT;
  for (int i = 0; i < 3; i++)
    mr_text_free(&want[i]);
  return mr_durable_remove_tree(dir, &e);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(bytes_do_not_depend_on_order),
      cmocka_unit_test(die_at_every_call),
      cmocka_unit_test(die_twice),
      cmocka_unit_test(lock_is_exclusive),
      cmocka_unit_test(another_job_is_refused),
      cmocka_unit_test(existing_output_is_refused),
      cmocka_unit_test(rotten_frame_is_computed_again),
      cmocka_unit_test(failed_sync_is_final),
      cmocka_unit_test(a_row_twice_is_refused),
      cmocka_unit_test(unfinished_is_not_published),
      cmocka_unit_test(litter_that_stays_is_no_failure),
      cmocka_unit_test(a_lock_that_cannot_be_looked_at),
      cmocka_unit_test(buckets_and_orders),
      cmocka_unit_test(manifest_finds_every_flipped_bit),
      cmocka_unit_test(allocations_fail),
  };
  return cmocka_run_group_tests(tests, begin, end);
}
