/* inputs.h: which files a plan was made from, so that a resumed run need not read them again.
 *
 * A list of {path, size, mtime_ns} in order. A plan whose list, options, model and version are
 * those of now is used as it is (make and rsync trust the same figures); otherwise preflight runs
 * again, and the digest of the text decides. Standard input is in the list with size -1 and
 * equals nothing: it is always read.
 */
#ifndef MR_JOBS_INPUTS_H
#define MR_JOBS_INPUTS_H

#include "jobs/identity.h"
#include "jobs/options.h"

/* The list for the job's inputs, after globs and directories; owned by the caller. MR_E_NOINPUT,
 * MR_E_IO. */
mr_code mr_inputs_list(const mr_job *j, json_t **list, mr_err *err);
/* Equal, and without standard input. */
bool mr_inputs_equal(const json_t *a, const json_t *b);
uint64_t mr_inputs_bytes(const json_t *list);

/* plan.inputs: written when a plan is whole; id gives options, model and numerics. */
mr_code mr_inputs_save(const char *path, const json_t *list, const mr_job_identity *id,
                       mr_err *err);
/* Whether the plan beside `path` was made from exactly this. Any doubt is false. */
bool mr_inputs_match(const char *path, const json_t *list, const mr_job_identity *id);

#endif
