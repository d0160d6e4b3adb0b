/* report_files.h: the report of a run or a merge from and to the files of its job. */
#ifndef MR_JOBS_REPORT_FILES_H
#define MR_JOBS_REPORT_FILES_H

#include "jobs/commit.h"
#include "jobs/report.h"

/* Fills r->errors, errors by kind, from the errors file (not read when r->rows_failed is 0): rows
 * of earlier runs count too. */
mr_code mr_report_count_errors(mr_report *r, const char *path, mr_err *err);
/* OUT.report.json and .html from the object of mr_report_to_json; NULL: MR_E_NOMEM. */
mr_code mr_report_put(const json_t *report, mr_commit *c, mr_manifest *m, mr_err *err);

#endif
