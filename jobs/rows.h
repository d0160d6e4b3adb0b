/* rows.h: one input line to a checked row, a plan record to an engine request.
 *
 * The rules for what is good, bad or repaired: docs/job-file.md. A bad row is described, never
 * fatal.
 */
#ifndef MR_JOBS_ROWS_H
#define MR_JOBS_ROWS_H

#include "jobs/options.h"
#include "jobs/params.h" /* mr_row_error */
#include "jobs/plan.h"

typedef struct mr_row_source {
  const char *file; /* name as the user knows it */
  uint32_t file_index;
  uint64_t line;
} mr_row_source;

/* Fills rec (owned by caller) from one line. A bad line gives kind MR_ROW_BAD and the error in its
 * JSON; only running out of memory returns an error code. */
mr_code mr_row_parse(const mr_job *j, const mr_prompter *p, double now, int max_context,
                     const mr_row_source *src, const char *line, size_t len, mr_plan_record *rec,
                     mr_err *err);
/* The record of a line that could not even be read (too long ...). */
mr_code mr_row_bad(const mr_row_source *src, const char *custom_id, const mr_row_error *why,
                   mr_plan_record *rec, mr_err *err);

/* A request whose arrays borrow from *rec and *keep; keep is freed with mr_row_keep_free after
 * admit. */
typedef struct mr_row_keep {
  json_t *json;
  mr_bias *bias;
  int32_t *stop_ids;
  char **stop;
} mr_row_keep;
mr_code mr_row_request(const mr_plan_record *rec, const mr_vocab *v, mr_request *req,
                       mr_row_keep *keep, mr_err *err);
void mr_row_keep_free(mr_row_keep *keep);

/* The id of a row (custom_id, id or row-<line>; NULL for a bad row without one) from its parsed
 * record JSON: borrowed, *len bytes (it may hold NUL). */
const char *mr_row_id(const json_t *record, size_t *len);

#endif
