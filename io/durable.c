#include "io/durable.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include "io/mem.h"
#include "io/sys.h"
#include "io/text.h"

#define TREE_DEPTH 16

/* An interrupted sync has not failed: it is asked for again. Any other failure is final. */
static int sync_with(int (*sync)(int), int fd) {
  int r;
  do
    r = sync(fd);
  while (r && errno == EINTR);
  return r;
}

mr_code mr_durable_sync(int fd, const char *path, mr_err *err) {
  return sync_with(mr_sys_now->fsync, fd) ? mr_err_errno(err, MR_E_IO, path, "cannot sync") : MR_OK;
}

mr_code mr_durable_sync_data(int fd, const char *path, mr_err *err) {
  return sync_with(mr_sys_now->fdatasync, fd) ? mr_err_errno(err, MR_E_IO, path, "cannot sync")
                                              : MR_OK;
}

mr_code mr_durable_sync_dir(const char *dir, mr_err *err) {
  int fd = mr_sys_now->open(dir, O_RDONLY | O_DIRECTORY, 0);
  if (fd < 0)
    return mr_err_errno(err, MR_E_IO, dir, "cannot open the directory");
  mr_code rc = MR_OK;
  /* EINVAL: a file system that cannot sync directories (some network and FUSE ones); there is no
   * more to do. */
  if (sync_with(mr_sys_now->fsync, fd) && errno != EINVAL)
    rc = mr_err_errno(err, MR_E_IO, dir, "cannot sync the directory");
  mr_sys_now->close(fd);
  return rc;
}

/* The directory part of `path`, "." if it has none; owned by the caller. */
static char *parent_of(const char *path) {
  const char *slash = strrchr(path, '/');
  if (!slash)
    return mr_mem_copy(".", 1);
  return slash == path ? mr_mem_copy("/", 1) : mr_mem_copy(path, (size_t)(slash - path));
}

mr_code mr_durable_sync_parent(const char *path, mr_err *err) {
  char *dir = parent_of(path);
  if (!dir)
    return mr_err_set(err, MR_E_NOMEM, "out of memory");
  mr_code rc = mr_durable_sync_dir(dir, err);
  mr_mem_free(dir);
  return rc;
}

/* Synced also where it is there: the run that made it may have been killed before it did that. */
mr_code mr_durable_mkdir(const char *path, mr_err *err) {
  if (mr_sys_make_dir(path))
    return mr_err_errno(err, MR_E_CANTCREATE, path, "cannot create the directory");
  return mr_durable_sync_parent(path, err);
}

mr_code mr_durable_rename(const char *from, const char *to, mr_err *err) {
  if (mr_sys_now->rename(from, to))
    return mr_err_errno(err, MR_E_CANTCREATE, to, "cannot rename to this name");
  mr_code rc = mr_durable_sync_parent(to, err);
  char *a = parent_of(from), *b = parent_of(to);
  if (!a || !b)
    rc = rc ? rc : mr_err_set(err, MR_E_NOMEM, "out of memory");
  else if (!rc && strcmp(a, b) != 0)
    rc = mr_durable_sync_dir(a, err);
  mr_mem_free(a);
  mr_mem_free(b);
  return rc;
}

static mr_code write_synced(const char *path, const void *bytes, size_t len, mr_err *err) {
  int fd = mr_sys_now->open(path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
  if (fd < 0)
    return mr_err_errno(err, MR_E_CANTCREATE, path, "cannot create");
  mr_code rc = MR_OK;
  if (mr_sys_write_full(fd, bytes, len))
    rc = mr_err_errno(err, MR_E_IO, path, "cannot write");
  if (!rc)
    rc = mr_durable_sync(fd, path, err);
  if (mr_sys_now->close(fd) && !rc)
    rc = mr_err_errno(err, MR_E_IO, path, "cannot close");
  return rc;
}

mr_code mr_durable_write(const char *path, const void *bytes, size_t len, mr_err *err) {
  mr_text tmp = {0};
  mr_text_addf(&tmp, "%s.tmp", path);
  if (tmp.failed)
    return mr_err_set(err, MR_E_NOMEM, "out of memory");
  mr_code rc = write_synced(tmp.data, bytes, len, err);
  if (!rc)
    rc = mr_durable_rename(tmp.data, path, err);
  else
    mr_sys_now->unlink(tmp.data);
  mr_text_free(&tmp);
  return rc;
}

static mr_code remove_at_depth(const char *path, const char *last, int depth, mr_err *err);

/* Unlink first: a link to a directory is then removed itself and never followed. */
static mr_code remove_entry(const char *path, int depth, mr_err *err) {
  if (mr_sys_now->unlink(path) == 0 || errno == ENOENT)
    return MR_OK;
  if (errno == EISDIR || errno == EPERM)
    return remove_at_depth(path, NULL, depth, err);
  return mr_err_errno(err, MR_E_IO, path, "cannot remove");
}

static mr_code remove_in(const char *dir, const char *name, int depth, mr_err *err) {
  mr_text path = {0};
  mr_text_addf(&path, "%s/%s", dir, name);
  mr_code rc = path.failed ? mr_err_set(err, MR_E_NOMEM, "out of memory")
                           : remove_entry(path.data, depth, err);
  mr_text_free(&path);
  return rc;
}

static mr_code remove_at_depth(const char *path, const char *last, int depth, mr_err *err) {
  if (depth == 0)
    return mr_err_at(err, MR_E_IO, path, 0, -1, "folders are nested deeper than %d; not removed",
                     TREE_DEPTH);
  DIR *d = opendir(path);
  if (!d)
    return errno == ENOENT ? MR_OK : mr_err_errno(err, MR_E_IO, path, "cannot open the directory");
  mr_code rc = MR_OK;
  for (struct dirent *e; rc == MR_OK && (e = readdir(d)) != NULL;)
    if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0 &&
        (!last || strcmp(e->d_name, last) != 0))
      rc = remove_in(path, e->d_name, depth - 1, err);
  closedir(d);
  if (rc == MR_OK && last)
    rc = remove_in(path, last, depth - 1, err);
  if (rc == MR_OK && mr_sys_now->rmdir(path) && errno != ENOENT && !(last && errno == ENOTEMPTY))
    rc = mr_err_errno(err, MR_E_IO, path, "cannot remove the directory");
  return rc;
}

mr_code mr_durable_remove_tree_last(const char *path, const char *last, mr_err *err) {
  mr_code rc = remove_at_depth(path, last, TREE_DEPTH, err);
  return rc ? rc : mr_durable_sync_parent(path, err);
}

mr_code mr_durable_remove_tree(const char *path, mr_err *err) {
  return mr_durable_remove_tree_last(path, NULL, err);
}
