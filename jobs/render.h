/* render.h: a finished row as its line of JSON, in the shape of the row's kind
 * (docs/result-format.md).
 *
 * Ids derive from the job and the row, `created` is the job's first start: a resumed job writes the
 * same bytes.
 */
#ifndef MR_JOBS_RENDER_H
#define MR_JOBS_RENDER_H

#include "jobs/rows.h"

typedef struct mr_render {
  char job_id[33];       /* hex */
  int64_t created;       /* seconds since 1970: first start of the job */
  const char *model;     /* name in the bodies of rows that name none */
  const mr_vocab *vocab; /* NULL: no text */
  bool keep_prompt;
  const char *const *files; /* names of the inputs, by mr_plan_entry.file */
} mr_render;

/* Appends one line with its newline to `line`. *is_error: it belongs into the errors file. */
mr_code mr_render_result(const mr_render *r, const mr_plan_record *rec, const mr_result *res,
                         mr_text *line, bool *is_error, mr_err *err);
/* The line of a row that preflight refused. */
mr_code mr_render_bad(const mr_render *r, const mr_plan_record *rec, mr_text *line, mr_err *err);
/* The line of a row that failed for `why` without a result (expired, over the KV budget). */
mr_code mr_render_failed(const mr_render *r, const mr_plan_record *rec, const mr_row_error *why,
                         mr_text *line, mr_err *err);

#endif
