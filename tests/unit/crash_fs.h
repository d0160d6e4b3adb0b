/* crash_fs.h: a layer over the files of one folder that knows what a crash of the machine may do to
 * them.
 *
 *     crash_fs_begin(&table, folder);   what lies in the folder now counts as durable
 *     crash_fs.die_at_sync = k;         at the k-th sync from here the machine "crashes":
 * crash_fs_crash, _exit crash_fs.kill_at_call = n;        at the n-th call that changes or syncs
 * something the process "is killed": longjmp crash_fs_crash(seed);             puts the folder into
 * a state that the crash may leave
 *
 * The rules, stricter than any common file system:
 *   - Bytes written to a file, and truncations, are durable once fsync or fdatasync of that file
 * has returned. Each one that is not lands, vanishes, or is torn: a part of it lands, behind which
 * nothing, zeros or noise may lie.
 *   - A name (of a new file or folder, a rename, a removal) is durable once fsync of its folder has
 * returned, a rename's once its new folder is synced. Each one that is not lands or vanishes by
 * itself, in no order.
 *   - A kill changes nothing in the files, and makes nothing durable.
 * The seed decides: 0 loses all, 1 keeps all, others throw coins.
 */
#ifndef MR_TESTS_CRASH_FS_H
#define MR_TESTS_CRASH_FS_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io/durable.h"
#include "io/sys.h"

enum { CRASH_PATH = 160, CRASH_NODES = 512, CRASH_OPS = 2048, CRASH_FDS = 1024 };

typedef struct crash_write { /* bytes NULL: a truncation to `at` */
  struct crash_write *next;
  off_t at;
  size_t n;
  char *bytes;
} crash_write;

typedef struct crash_node { /* a file, whatever its names */
  int fd;                   /* keeps it alive, and reads it */
  char *bytes;              /* durable content */
  size_t n;
  crash_write *first, **last; /* since then */
} crash_node;

typedef enum crash_kind {
  CRASH_CREATE,
  CRASH_RENAME,
  CRASH_UNLINK,
  CRASH_MKDIR,
  CRASH_RMDIR
} crash_kind;

typedef struct crash_op {
  crash_kind kind;
  char a[CRASH_PATH], b[CRASH_PATH]; /* b: new name of a rename */
  int node;
  bool synced;
} crash_op;

typedef struct crash_name {
  char path[CRASH_PATH]; /* empty: free */
  int node;              /* -1: a folder */
} crash_name;

static struct {
  char folder[CRASH_PATH];
  crash_node nodes[CRASH_NODES];
  int n_nodes;
  crash_op ops[CRASH_OPS];
  int n_ops;
  crash_name live[CRASH_NODES], durable[CRASH_NODES]; /* durable: at the beginning */
  struct {
    bool open;
    int node; /* -1: none */
    char folder[CRASH_PATH];
  } fds[CRASH_FDS];
  int64_t syncs, calls;
  int64_t die_at_sync, kill_at_call; /* < 0: never */
  uint64_t seed;
  jmp_buf killed;
  void (*before_crash)(int fd); /* may be NULL; fd: what was to be synced */
} crash_fs;

static void crash_fail(const char *why) {
  fprintf(stderr, "crash_fs: %s: %s\n", why, strerror(errno));
  abort();
}

static bool crash_in_folder(const char *path) {
  size_t n = strlen(crash_fs.folder);
  return !strncmp(path, crash_fs.folder, n) && (path[n] == '/' || !path[n]) &&
         strlen(path) < CRASH_PATH;
}

static crash_name *crash_find(crash_name *names, const char *path) {
  for (int i = 0; i < CRASH_NODES; i++)
    if (!strcmp(names[i].path, path))
      return &names[i];
  return NULL;
}

static void crash_set(crash_name *names, const char *path, int node) {
  crash_name *at = crash_find(names, path);
  if (!at && !(at = crash_find(names, "")))
    crash_fail("too many names");
  snprintf(at->path, sizeof at->path, "%s", path);
  at->node = node;
}

static void crash_drop(crash_name *names, const char *path) {
  crash_name *at = crash_find(names, path);
  if (at)
    at->path[0] = '\0';
}

/* The content of a node now. */
static char *crash_content(const crash_node *f, size_t *n) {
  struct stat st;
  if (fstat(f->fd, &st))
    crash_fail("fstat");
  char *bytes = malloc((size_t)st.st_size + 1);
  if (!bytes || pread(f->fd, bytes, (size_t)st.st_size, 0) != (ssize_t)st.st_size)
    crash_fail("read");
  *n = (size_t)st.st_size;
  return bytes;
}

static void crash_forget(crash_node *f) {
  while (f->first) {
    crash_write *w = f->first;
    f->first = w->next;
    free(w->bytes);
    free(w);
  }
  f->last = &f->first;
}

static void crash_make_durable(crash_node *f) {
  free(f->bytes);
  f->bytes = crash_content(f, &f->n);
  crash_forget(f);
}

static int crash_new_node(const char *path) {
  if (crash_fs.n_nodes == CRASH_NODES)
    crash_fail("too many files");
  crash_node *f = &crash_fs.nodes[crash_fs.n_nodes];
  *f = (crash_node){.fd = open(path, O_RDONLY | O_CLOEXEC), .last = &f->first};
  if (f->fd < 0)
    crash_fail(path);
  return crash_fs.n_nodes++;
}

static void crash_log(int node, off_t at, const char *bytes, size_t n) {
  crash_node *f = &crash_fs.nodes[node];
  crash_write *w = calloc(1, sizeof *w);
  if (!w || (bytes && !(w->bytes = malloc(n + 1))))
    crash_fail("memory");
  w->at = at;
  w->n = n;
  if (bytes)
    memcpy(w->bytes, bytes, n);
  *f->last = w;
  f->last = &w->next;
}

static void crash_add_op(crash_kind kind, const char *a, const char *b, int node) {
  if (crash_fs.n_ops == CRASH_OPS)
    crash_fail("too many operations");
  crash_op *op = &crash_fs.ops[crash_fs.n_ops++];
  *op = (crash_op){.kind = kind, .node = node};
  snprintf(op->a, sizeof op->a, "%s", a);
  snprintf(op->b, sizeof op->b, "%s", b ? b : "");
}

/* ---- the crash */

static uint64_t crash_random(void) {
  crash_fs.seed = crash_fs.seed * 6364136223846793005ull + 1442695040888963407ull;
  uint64_t x = crash_fs.seed;
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  return x ^ x >> 33;
}

static bool crash_coin(uint64_t seed) {
  return seed < 2 ? seed == 1 : crash_random() % 2;
}

static void crash_put(char **bytes, size_t *n, off_t at, const char *from, size_t len) {
  size_t end = (size_t)at + len;
  if (end > *n) {
    *bytes = realloc(*bytes, end + 1);
    if (!*bytes)
      crash_fail("memory");
    memset(*bytes + *n, 0, end - *n);
    *n = end;
  }
  if (from)
    memcpy(*bytes + at, from, len);
}

static void crash_apply_write(const crash_write *w, uint64_t seed, char **bytes, size_t *n) {
  if (!w->bytes) {
    if (crash_coin(seed) && (size_t)w->at < *n)
      *n = (size_t)w->at;
    return;
  }
  if (seed >= 2 && crash_random() % 3 == 0) { /* torn */
    size_t part = w->n ? crash_random() % w->n : 0;
    crash_put(bytes, n, w->at, w->bytes, part);
    uint64_t rest = crash_random() % 3; /* nothing, zeros, noise */
    if (rest)
      crash_put(bytes, n, w->at + (off_t)part, NULL, w->n - part);
    for (size_t i = part; rest == 2 && i < w->n; i++)
      (*bytes)[(size_t)w->at + i] = (char)crash_random();
  } else if (crash_coin(seed)) {
    crash_put(bytes, n, w->at, w->bytes, w->n);
  }
}

static void crash_apply_op(crash_name *names, const crash_op *op) {
  switch (op->kind) {
  case CRASH_CREATE:
    crash_set(names, op->a, op->node);
    break;
  case CRASH_RENAME:
    if (crash_find(names, op->a) && crash_find(names, op->a)->node == op->node)
      crash_drop(names, op->a);
    crash_set(names, op->b, op->node);
    break;
  case CRASH_MKDIR:
    crash_set(names, op->a, -1);
    break;
  default:
    crash_drop(names, op->a);
  }
}

static void crash_parent(const char *path, char parent[CRASH_PATH]) {
  snprintf(parent, CRASH_PATH, "%.*s", CRASH_PATH - 1, path);
  char *slash = strrchr(parent, '/');
  if (slash)
    *slash = '\0';
}

static void crash_write_file(const char *path, const crash_node *f, uint64_t seed) {
  size_t n = f->n;
  char *bytes = malloc(n + 1);
  if (!bytes)
    crash_fail("memory");
  if (n)
    memcpy(bytes, f->bytes, n);
  for (const crash_write *w = f->first; w; w = w->next)
    crash_apply_write(w, seed, &bytes, &n);
  FILE *out = fopen(path, "wb");
  if (!out || fwrite(bytes, 1, n, out) != n || fclose(out))
    crash_fail(path);
  free(bytes);
}

static void crash_fs_crash(uint64_t seed) {
  static crash_name names[CRASH_NODES];
  mr_err e = MR_ERR_INIT;
  crash_fs.seed = seed * 0x9e3779b97f4a7c15ull + 1;
  memcpy(names, crash_fs.durable, sizeof names);
  for (int i = 0; i < crash_fs.n_ops; i++)
    if (crash_fs.ops[i].synced || crash_coin(seed))
      crash_apply_op(names, &crash_fs.ops[i]);
  mr_sys_now = &mr_sys_os;
  if (mr_durable_remove_tree(crash_fs.folder, &e) || mkdir(crash_fs.folder, 0777))
    crash_fail("empty the folder");
  for (int i = 0; i < CRASH_NODES; i++)
    if (names[i].path[0] && names[i].node < 0)
      mkdir(names[i].path, 0777);
  for (int i = 0; i < CRASH_NODES; i++) {
    char parent[CRASH_PATH];
    crash_parent(names[i].path, parent);
    if (names[i].path[0] && names[i].node >= 0 && access(parent, F_OK) == 0)
      crash_write_file(names[i].path, &crash_fs.nodes[names[i].node], seed);
  }
}

/* ---- the calls */

static void crash_changing_call(void) {
  if (crash_fs.kill_at_call >= 0 && crash_fs.calls++ >= crash_fs.kill_at_call)
    longjmp(crash_fs.killed, 1);
}

/* What the kernel does when a process is gone. */
static void crash_close_all(void) {
  for (int fd = 0; fd < CRASH_FDS; fd++)
    if (crash_fs.fds[fd].open) {
      crash_fs.fds[fd].open = false;
      close(fd);
    }
}

static int crash_open(const char *path, int flags, mode_t mode) {
  bool ours = crash_in_folder(path);
  if (ours && flags & (O_CREAT | O_TRUNC))
    crash_changing_call();
  bool was = access(path, F_OK) == 0;
  int fd = mr_sys_os.open(path, flags, mode);
  if (fd < 0 || fd >= CRASH_FDS)
    return fd;
  crash_fs.fds[fd].open = true;
  crash_fs.fds[fd].node = -1;
  snprintf(crash_fs.fds[fd].folder, CRASH_PATH, "%s", ours && flags & O_DIRECTORY ? path : "");
  if (!ours || flags & O_DIRECTORY)
    return fd;
  if (!was) {
    int node = crash_new_node(path);
    crash_set(crash_fs.live, path, node);
    crash_add_op(CRASH_CREATE, path, NULL, node);
  }
  crash_name *name = crash_find(crash_fs.live, path);
  if (!name)
    crash_fail("a file that nobody made");
  crash_fs.fds[fd].node = name->node;
  if (was && flags & O_TRUNC)
    crash_log(name->node, 0, NULL, 0);
  return fd;
}

static int crash_close(int fd) {
  if (fd >= 0 && fd < CRASH_FDS)
    crash_fs.fds[fd].open = false;
  return mr_sys_os.close(fd);
}

static int crash_node_of(int fd) {
  return fd >= 0 && fd < CRASH_FDS && crash_fs.fds[fd].open ? crash_fs.fds[fd].node : -1;
}

static ssize_t crash_write_call(int fd, const void *b, size_t n) {
  int node = crash_node_of(fd);
  if (node < 0)
    return mr_sys_os.write(fd, b, n);
  crash_changing_call();
  struct stat st;
  off_t at =
      fcntl(fd, F_GETFL) & O_APPEND && fstat(fd, &st) == 0 ? st.st_size : lseek(fd, 0, SEEK_CUR);
  ssize_t k = mr_sys_os.write(fd, b, n);
  if (k > 0)
    crash_log(node, at, b, (size_t)k);
  return k;
}

static ssize_t crash_pwrite(int fd, const void *b, size_t n, off_t at) {
  int node = crash_node_of(fd);
  crash_changing_call();
  ssize_t k = mr_sys_os.pwrite(fd, b, n, at);
  if (k > 0 && node >= 0)
    crash_log(node, at, b, (size_t)k);
  return k;
}

static int crash_ftruncate(int fd, off_t size) {
  int node = crash_node_of(fd);
  crash_changing_call();
  int rc = mr_sys_os.ftruncate(fd, size);
  if (rc == 0 && node >= 0)
    crash_log(node, size, NULL, 0);
  return rc;
}

static int crash_sync(int fd) {
  crash_changing_call();
  if (crash_fs.die_at_sync >= 0 && crash_fs.syncs == crash_fs.die_at_sync) {
    if (crash_fs.before_crash)
      crash_fs.before_crash(fd);
    crash_fs_crash(crash_fs.seed);
    _exit(0);
  }
  crash_fs.syncs++;
  if (crash_node_of(fd) >= 0) {
    crash_make_durable(&crash_fs.nodes[crash_node_of(fd)]);
    return 0;
  }
  for (int i = 0; fd < CRASH_FDS && i < crash_fs.n_ops; i++) {
    char parent[CRASH_PATH];
    crash_op *op = &crash_fs.ops[i];
    crash_parent(op->kind == CRASH_RENAME ? op->b : op->a, parent);
    op->synced = op->synced || !strcmp(parent, crash_fs.fds[fd].folder);
  }
  return 0;
}

static int crash_rename(const char *a, const char *b) {
  crash_changing_call();
  int rc = mr_sys_os.rename(a, b);
  crash_name *name = crash_find(crash_fs.live, a);
  if (rc || !name)
    return rc;
  int node = name->node;
  crash_drop(crash_fs.live, a);
  crash_set(crash_fs.live, b, node);
  crash_add_op(CRASH_RENAME, a, b, node);
  return 0;
}

static int crash_unlink(const char *path) {
  crash_changing_call();
  int rc = mr_sys_os.unlink(path);
  if (rc == 0) {
    crash_drop(crash_fs.live, path);
    crash_add_op(CRASH_UNLINK, path, NULL, -1);
  }
  return rc;
}

static int crash_rmdir(const char *path) {
  crash_changing_call();
  int rc = mr_sys_os.rmdir(path);
  if (rc == 0)
    crash_add_op(CRASH_RMDIR, path, NULL, -1);
  return rc;
}

static int crash_mkdir(const char *path, mode_t mode) {
  crash_changing_call();
  int rc = mr_sys_os.mkdir(path, mode);
  if (rc == 0)
    crash_add_op(CRASH_MKDIR, path, NULL, -1);
  return rc;
}

/* Everything under the folder as it is now. */
static void crash_scan(const char *folder) {
  DIR *d = opendir(folder);
  if (!d)
    crash_fail(folder);
  for (struct dirent *e; (e = readdir(d)) != NULL;) {
    char path[CRASH_PATH + 256];
    struct stat st;
    if (e->d_name[0] == '.')
      continue;
    snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
    if (strlen(path) >= CRASH_PATH || stat(path, &st))
      crash_fail(path);
    int node = S_ISDIR(st.st_mode) ? -1 : crash_new_node(path);
    crash_set(crash_fs.durable, path, node);
    if (node < 0) {
      crash_scan(path);
    } else {
      crash_set(crash_fs.live, path, node);
      crash_make_durable(&crash_fs.nodes[node]);
    }
  }
  closedir(d);
}

static void crash_fs_begin(mr_sys *table, const char *folder) {
  memset(&crash_fs, 0, sizeof crash_fs);
  crash_fs.die_at_sync = crash_fs.kill_at_call = -1;
  snprintf(crash_fs.folder, sizeof crash_fs.folder, "%s", folder);
  crash_scan(folder);
  table->open = crash_open;
  table->close = crash_close;
  table->write = crash_write_call;
  table->pwrite = crash_pwrite;
  table->ftruncate = crash_ftruncate;
  table->fdatasync = crash_sync;
  table->fsync = crash_sync;
  table->rename = crash_rename;
  table->unlink = crash_unlink;
  table->rmdir = crash_rmdir;
  table->mkdir = crash_mkdir;
}

#endif
