#include "io/err.h"

#include <errno.h>
#include <stdarg.h>
#include <string.h>

/* Copies `src` to `dst`, writing control bytes and DEL as \xNN. Never splits an escape; cuts at
 * cap. */
static void escape(char *dst, size_t cap, const char *src) {
  size_t n = 0;
  for (const unsigned char *p = (const unsigned char *)src; *p; p++) {
    if (*p < 0x20 || *p == 0x7f) {
      if (n + 5 > cap)
        break;
      n += (size_t)snprintf(dst + n, cap - n, "\\x%02x", *p);
    } else {
      if (n + 2 > cap)
        break;
      dst[n++] = (char)*p;
    }
  }
  dst[n] = '\0';
}

static mr_code store(mr_err *e, mr_code code, const char *file, int64_t line, int64_t offset,
                     const char *fmt, va_list ap) {
  if (!e || e->code != MR_OK)
    return code;
  char raw[sizeof e->text];
  vsnprintf(raw, sizeof raw, fmt, ap);
  e->code = code;
  e->line = line;
  e->offset = offset;
  escape(e->file, sizeof e->file, file ? file : "");
  escape(e->text, sizeof e->text, raw);
  return code;
}

mr_code mr_err_set(mr_err *e, mr_code code, const char *fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  store(e, code, NULL, 0, -1, fmt, ap);
  va_end(ap);
  return code;
}

mr_code mr_err_at(mr_err *e, mr_code code, const char *file, int64_t line, int64_t offset,
                  const char *fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  store(e, code, file, line, offset, fmt, ap);
  va_end(ap);
  return code;
}

void mr_err_place(mr_err *e, const char *file, int64_t line, int64_t offset) {
  if (!e || e->code == MR_OK || e->file[0])
    return;
  escape(e->file, sizeof e->file, file ? file : "");
  e->line = line;
  e->offset = offset;
}

static mr_code code_of_errno(int no, mr_code fallback) {
  switch (no) {
  case ENOENT:
  case ENOTDIR:
    return fallback == MR_E_CANTCREATE ? MR_E_CANTCREATE : MR_E_NOINPUT;
  case ENOMEM:
    return MR_E_NOMEM;
  case ENOSPC:
  case EDQUOT:
  case EFBIG:
  case EIO:
    return MR_E_IO;
  default:
    return fallback;
  }
}

mr_code mr_err_errno(mr_err *e, mr_code fallback, const char *file, const char *what) {
  int no = errno;
  return mr_err_at(e, code_of_errno(no, fallback), file, 0, -1, "%s: %s", what, strerror(no));
}

void mr_err_clear(mr_err *e) {
  *e = (mr_err)MR_ERR_INIT;
}

const char *mr_err_format(const mr_err *e, char *buf, size_t cap) {
  if (!e->file[0])
    snprintf(buf, cap, "%s", e->text);
  else if (e->line > 0)
    snprintf(buf, cap, "%s:%lld: %s", e->file, (long long)e->line, e->text);
  else if (e->offset >= 0)
    snprintf(buf, cap, "%s: byte %lld: %s", e->file, (long long)e->offset, e->text);
  else
    snprintf(buf, cap, "%s: %s", e->file, e->text);
  return buf;
}

void mr_err_print(const mr_err *e, FILE *to) {
  char buf[sizeof e->file + sizeof e->text + 64];
  fprintf(to, "millrace: %s\n", mr_err_format(e, buf, sizeof buf));
}

int mr_err_exit(mr_code code) {
  return code == MR_E_NOMEM ? MR_E_UNAVAILABLE : (int)code;
}
