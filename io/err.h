/* err.h: errors as a code, a place and words for the user.
 *
 * Every function that can fail for a reason outside the program takes an `mr_err *` last and
 * returns an mr_code: MR_OK (0) or the code it stored. The caller owns the mr_err (usually on its
 * stack, zeroed with MR_ERR_INIT). The first error wins: setting an error twice keeps the first
 * text.
 *
 *     mr_err e = MR_ERR_INIT;
 *     if (mr_gguf_open(&g, path, &e)) { mr_err_print(&e, stderr); return mr_err_exit(e.code); }
 *
 * Codes are the program's exit codes (sysexits.h where one fits), so nothing is translated twice.
 * Text that came from a file is escaped when it is stored: an error never carries control
 * characters.
 */
#ifndef MR_IO_ERR_H
#define MR_IO_ERR_H

#include <stdint.h>
#include <stdio.h>

typedef enum mr_code {
  MR_OK = 0,
  MR_E_AGAIN = 2,    /* not a failure: no room now, call again after progress; never an exit code */
  MR_E_USAGE = 64,   /* the command line */
  MR_E_DATA = 65,    /* input, archive, model file unusable as a whole */
  MR_E_NOINPUT = 66, /* no such input */
  MR_E_UNAVAILABLE = 69, /* device or model not usable here */
  MR_E_INTERNAL = 70,    /* a defect of ours */
  MR_E_NOMEM = 71,       /* out of memory; leaves the program as 69 */
  MR_E_CANTCREATE = 73,  /* cannot create output */
  MR_E_IO = 74,          /* read or write failed, disk full */
  MR_E_STOPPED = 75,     /* stopped, resumable */
  MR_E_CONFIG = 78       /* bad JOB.json */
} mr_code;

typedef struct mr_err {
  mr_code code;
  int64_t line;    /* line in `file`, from 1; 0: none */
  int64_t offset;  /* byte offset in `file`; -1: none */
  char file[512];  /* escaped; empty: none */
  char text[1024]; /* what, which limit, what to do; escaped */
} mr_err;

#define MR_ERR_INIT                                                                                \
  { MR_OK, 0, -1, "", "" }

/* Stores code and text unless `e` holds an error already or is NULL. Returns `code`. */
mr_code mr_err_set(mr_err *e, mr_code code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* The same with a place. `file` may be NULL; `line` 0 and `offset` -1 mean none. */
mr_code mr_err_at(mr_err *e, mr_code code, const char *file, int64_t line, int64_t offset,
                  const char *fmt, ...) __attribute__((format(printf, 6, 7)));

/* Adds the place to an error that has none yet. */
void mr_err_place(mr_err *e, const char *file, int64_t line, int64_t offset);

/* Stores `what`: strerror(errno), with the code that fits the errno (ENOENT 66, ENOSPC 74, ENOMEM
 * 71 ...). */
mr_code mr_err_errno(mr_err *e, mr_code fallback, const char *file, const char *what);

void mr_err_clear(mr_err *e);

/* "file:line: text" into buf (always terminated); returns buf. */
const char *mr_err_format(const mr_err *e, char *buf, size_t cap);

/* "millrace: file:line: text\n". */
void mr_err_print(const mr_err *e, FILE *to);

/* The exit status for a code. */
int mr_err_exit(mr_code code);

#endif
