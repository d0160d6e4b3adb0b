#include "io/slurp.h"

#include <fcntl.h>

#include "io/sys.h"

static mr_code too_large(const char *name, size_t limit, mr_err *err) {
  if (limit >> 20 << 20 == limit)
    return mr_err_at(err, MR_E_DATA, name, 0, -1, "is larger than %zu MiB", limit >> 20);
  return mr_err_at(err, MR_E_DATA, name, 0, -1, "is larger than %zu bytes", limit);
}

mr_code mr_slurp(int fd, const char *name, size_t limit, mr_text *out, mr_err *err) {
  char buf[16384];
  size_t left = limit;
  for (;;) {
    ssize_t n = mr_sys_read_full(fd, buf, sizeof buf);
    if (n < 0)
      return mr_err_errno(err, MR_E_IO, name, "cannot read");
    if ((size_t)n > left)
      return too_large(name, limit, err);
    left -= (size_t)n;
    mr_text_add(out, buf, (size_t)n);
    if (out->failed)
      return mr_err_at(err, MR_E_NOMEM, name, 0, -1, "out of memory while reading");
    if ((size_t)n < sizeof buf)
      return MR_OK;
  }
}

mr_code mr_slurp_file(const char *path, size_t limit, mr_text *out, mr_err *err) {
  int fd = mr_sys_now->open(path, O_RDONLY | O_CLOEXEC, 0);
  if (fd < 0)
    return mr_err_errno(err, MR_E_NOINPUT, path, "cannot open");
  mr_code rc = mr_slurp(fd, path, limit, out, err);
  mr_sys_now->close(fd);
  return rc;
}
