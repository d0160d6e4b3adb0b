/* check.h: whether a finished output is whole: what `millrace check` finds.
 *
 * Every byte of every file that the manifest lists goes into its digest; then the lines are read:
 * how many, JSON or not, ids that come twice among the results, token sums. Problems are
 * collected, not only the first. Nothing of the job is written; the ids of a large job are sorted
 * in a file without a name under $TMPDIR.
 */
#ifndef MR_JOBS_CHECK_H
#define MR_JOBS_CHECK_H

#include "jobs/manifest.h"
#include "jobs/rundir.h"

typedef struct mr_check {
  uint64_t rows, rows_ok, rows_failed, prompt_tokens, output_tokens; /* as counted */
  uint64_t files, bytes;
  uint64_t problems;
  mr_text words; /* a line for each problem, at most 20 */
} mr_check;

/* MR_OK also when there are problems; an error only when a check could not be made (no memory, no
 * such job). */
mr_code mr_check_finished(mr_check *c, const mr_paths *p, const mr_manifest *m, mr_err *err);
/* The state of an unfinished job: journal and frames. */
mr_code mr_check_state(mr_check *c, const mr_paths *p, mr_err *err);
void mr_check_free(mr_check *c);

#endif
