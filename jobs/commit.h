/* commit.h: finished lines into frames, frames into the journal, and at the end the final files.
 *
 * See journal.h for the invariants. State lives in OUT.run/: journal, results.frames, errors.frames, plan.*.
 */
#ifndef MR_JOBS_COMMIT_H
#define MR_JOBS_COMMIT_H

#include "jobs/options.h"
#include "jobs/plan.h"

typedef struct mr_commit mr_commit;

typedef struct mr_job_identity { /* what the state is bound to; a mismatch names what differs */
  char job_id[33];
  int64_t created;
  char input_digest[33], model_digest[33], options_digest[33];
  char numerics[64];      /* compute mode, isa, scheme, kv type, version */
  uint64_t rows;
  json_t *options;        /* the result-changing options themselves, to say what differs; owned */
} mr_job_identity;

typedef enum mr_line_kind { MR_LINE_RESULT, MR_LINE_ERROR } mr_line_kind;

/* Opens or creates OUT.run, takes its lock (MR_E_STOPPED when another run holds it), replays the journal. */
mr_code mr_commit_open(mr_commit **out, const mr_job *j, mr_err *err);
/* True when the final manifest is already there and matches: nothing is left to do. */
bool mr_commit_is_complete(const mr_commit *c);
/* Binds a new state to `id`, or checks an old one against it: MR_E_DATA naming what differs. Fills id->job_id and
 * id->created from the state when it is old. */
mr_code mr_commit_bind(mr_commit *c, mr_job_identity *id, mr_err *err);
bool mr_commit_is_done(const mr_commit *c, uint64_t row);
uint64_t mr_commit_done_rows(const mr_commit *c);
/* One finished row. Buffered; a frame is written when it is full or mr_commit_flush is called. */
mr_code mr_commit_add(mr_commit *c, uint64_t row, mr_line_kind kind, const char *line, size_t len, mr_err *err);
mr_code mr_commit_flush(mr_commit *c, mr_err *err);
/* All rows are in: writes the final files in input order, the manifest last, and removes OUT.run. */
mr_code mr_commit_finish(mr_commit *c, mr_err *err);
void mr_commit_close(mr_commit *c);

#endif
