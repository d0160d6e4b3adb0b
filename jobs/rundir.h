/* rundir.h: the names of a job's files, and the lock of its state directory.
 *
 *     mr_paths p;  mr_paths_make(&p, "out", "out.jsonl.zst", &err);  ...  mr_paths_free(&p);
 *
 * OUT is the output's path without .jsonl, .jsonl.zst or .jsonl.gz. While a job runs or is
 * stopped its state is in OUT.run/; the final names appear at the end, the manifest last. With
 * standard output as the output, OUT is NULL: the state is a new directory under $TMPDIR (or
 * /tmp) that ends with the run, and there are no other files.
 */
#ifndef MR_JOBS_RUNDIR_H
#define MR_JOBS_RUNDIR_H

#include <stdbool.h>

#include "io/err.h"
#include "jobs/framerec.h"

enum {
  MR_FINAL_OUTPUT,
  MR_FINAL_ERRORS,
  MR_FINAL_REPORT_JSON,
  MR_FINAL_REPORT_HTML,
  MR_FINAL_MANIFEST,
  MR_FINALS
};

typedef struct mr_paths {
  char *run, *lock, *journal, *plan_inputs; /* OUT.run, and in it */
  char *frames[MR_STREAMS];                 /* OUT.run/results.frames, errors.frames */
  char *spill;                              /* OUT.run/bucket: prefix of the files of assembly */
  char *made[MR_FINALS];  /* OUT.run/final.*: finished, not yet under its final name */
  char *final[MR_FINALS]; /* the final names; NULL with standard output */
  bool temporary;         /* run is under $TMPDIR */
} mr_paths;

/* `base` NULL: standard output. MR_E_NOMEM. */
mr_code mr_paths_make(mr_paths *p, const char *base, const char *output, mr_err *err);
/* The names behind what a user types for `status` and `check`: OUT, the output itself, OUT.run or
 * the manifest. The output's name comes from the file that exists (.jsonl.zst when none does).
 * MR_E_IO: the disk does not say whether it does. */
mr_code mr_paths_find(mr_paths *p, const char *typed, mr_err *err);
/* Where rows in flight are kept (saved.h); owned by the caller. NULL: out of memory. */
char *mr_paths_kv(const mr_paths *p);
void mr_paths_free(mr_paths *p);

/* Creates the directory if need be and takes the lock: *fd. MR_E_STOPPED: another run holds it. */
mr_code mr_rundir_lock(const mr_paths *p, int *fd, mr_err *err);
/* Removes the directory, while the lock is held. */
mr_code mr_rundir_remove(const mr_paths *p, mr_err *err);
/* Whether a run holds the lock now. Writes nothing. */
bool mr_rundir_is_locked(const mr_paths *p);

const char *mr_path_temporary(void); /* $TMPDIR or /tmp; borrowed */
bool mr_path_exists(const char *path);
/* The same where a wrong "no" would throw work away: a disk that does not answer is MR_E_IO. */
mr_code mr_path_look(const char *path, bool *there, mr_err *err);

#endif
