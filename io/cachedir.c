#include "io/cachedir.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "io/mem.h"
#include "io/sys.h"
#include "io/text.h"

#define STALE_S 3600 /* an unfinished file of a run that must be gone */

mr_code mr_cachedir_write(const char *path, const mr_bytes *parts, int n, mr_err *err) {
  mr_text tmp = {0};
  mr_text_addf(&tmp, "%s.%ld.tmp", path, (long)getpid());
  if (tmp.failed)
    return mr_err_set(err, MR_E_NOMEM, "out of memory");
  mr_code rc = MR_OK;
  int fd = mr_sys_now->open(tmp.data, O_WRONLY | O_CREAT | O_TRUNC, 0666);
  if (fd < 0)
    rc = mr_err_errno(err, MR_E_CANTCREATE, tmp.data, "cannot create");
  for (int i = 0; !rc && i < n; i++)
    if (mr_sys_write_full(fd, parts[i].data, parts[i].len))
      rc = mr_err_errno(err, MR_E_IO, tmp.data, "cannot write");
  if (fd >= 0 && mr_sys_now->close(fd) && !rc)
    rc = mr_err_errno(err, MR_E_IO, tmp.data, "cannot close");
  if (!rc && mr_sys_now->rename(tmp.data, path))
    rc = mr_err_errno(err, MR_E_CANTCREATE, path, "cannot rename to this name");
  if (rc && fd >= 0)
    mr_sys_now->unlink(tmp.data);
  mr_text_free(&tmp);
  return rc;
}

void mr_cachedir_touch(int fd) {
  futimens(fd, NULL); /* a file of somebody else's keeps its time */
}

/* ---------------------------------------------------------------- trimming */

typedef struct entry {
  int64_t used_ns;
  uint64_t bytes;
  char *path;
} entry;

typedef struct list {
  entry *v;
  size_t n, cap;
  uint64_t bytes;
  const char *suffix;
} list;

static bool ends_with(const char *s, const char *suffix) {
  size_t n = strlen(s), k = strlen(suffix);
  return n > k && !strcmp(s + n - k, suffix);
}

static mr_code add_file(list *l, mr_text *path, const struct stat *st, mr_err *err) {
  if (ends_with(path->data, ".tmp") && mr_sys_now->wall_s() - st->st_mtim.tv_sec > STALE_S)
    mr_sys_now->unlink(path->data);
  if (!ends_with(path->data, l->suffix))
    return MR_OK;
  char *copy = mr_mem_copy(path->data, path->len);
  if (!copy || !mr_mem_grow((void **)&l->v, &l->cap, l->n + 1, sizeof *l->v)) {
    mr_mem_free(copy);
    return mr_err_set(err, MR_E_NOMEM, "out of memory");
  }
  l->v[l->n++] = (entry){(int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec,
                         (uint64_t)st->st_size, copy};
  l->bytes += (uint64_t)st->st_size;
  return MR_OK;
}

static mr_code list_dir(list *l, const char *dir, int depth, mr_err *err) {
  DIR *d = opendir(dir);
  if (!d) /* another run may have removed it */
    return errno == ENOENT ? MR_OK : mr_err_errno(err, MR_E_IO, dir, "cannot open the directory");
  mr_code rc = MR_OK;
  mr_text path = {0};
  for (struct dirent *e; !rc && (e = readdir(d)) != NULL;) {
    struct stat st;
    if (e->d_name[0] == '.')
      continue;
    mr_text_clear(&path);
    mr_text_addf(&path, "%s/%s", dir, e->d_name);
    if (path.failed)
      rc = mr_err_set(err, MR_E_NOMEM, "out of memory");
    else if (mr_sys_now->stat(path.data, &st))
      continue;
    else if (S_ISDIR(st.st_mode))
      rc = depth > 0 ? list_dir(l, path.data, depth - 1, err) : MR_OK;
    else if (S_ISREG(st.st_mode))
      rc = add_file(l, &path, &st, err);
  }
  mr_text_free(&path);
  closedir(d);
  return rc;
}

static int by_use(const void *a, const void *b) {
  const entry *x = a, *y = b;
  if (x->used_ns != y->used_ns)
    return x->used_ns < y->used_ns ? -1 : 1;
  return strcmp(x->path, y->path);
}

mr_code mr_cachedir_trim(const char *dir, const char *suffix, uint64_t max_bytes, uint64_t *removed,
                         mr_err *err) {
  list l = {.suffix = suffix};
  uint64_t gone = 0;
  mr_code rc = list_dir(&l, dir, 1, err);
  if (!rc && l.n)
    qsort(l.v, l.n, sizeof *l.v, by_use);
  for (size_t i = 0; i < l.n; i++) {
    if (!rc && l.bytes - gone > max_bytes) {
      mr_sys_now->unlink(l.v[i].path);
      gone += l.v[i].bytes;
    }
    mr_mem_free(l.v[i].path);
  }
  mr_mem_free(l.v);
  if (removed)
    *removed = gone;
  return rc;
}
