/* run.h: the parts of `millrace run`, in the order in which they are called.
 *
 *     mr_run_prepare   inputs, model, state directory, plan; r->finished: nothing is left to do
 *     mr_run_rows      rows through the engine into the commit, until all are done or a stop
 *     mr_run_finish    final files, reports, manifest
 *
 * One thread does everything: rendering and commits happen between two steps. A flush costs two
 * syncs, at most about every two seconds; the report shows them as "commit".
 */
#ifndef MR_JOBS_RUN_H
#define MR_JOBS_RUN_H

#include "jobs/commit.h"
#include "jobs/plan.h"
#include "jobs/progress.h"
#include "jobs/render.h"
#include "jobs/report.h"
#include "jobs/shard.h"

typedef struct mr_run {
  mr_job job;
  mr_paths paths;
  mr_prompter *prompter;
  mr_engine_opts engine_opts;
  mr_engine_info estimate;
  json_t *inputs; /* inputs.h */
  mr_job_identity id;
  mr_commit *commit;
  mr_plan *plan;
  mr_shard *shard; /* NULL: the whole job */
  mr_saved *saved; /* rows that the run before had begun, or NULL */
  mr_progress *progress;
  mr_progress_now now;
  mr_report report;
  double start_s;      /* monotonic, of this run */
  double deadline_s;   /* monotonic; 0: none */
  bool was_new;        /* the state was made by this run */
  bool finished;       /* the manifest was there already */
  const char *stopped; /* why no more rows are admitted; NULL: all were */
} mr_run;

mr_code mr_run_prepare(mr_run *r, mr_err *err);
mr_code mr_run_rows(mr_run *r, mr_err *err);
mr_code mr_run_finish(mr_run *r, mr_err *err);

/* Progress now and then, and what must be done for a waiting signal. */
void mr_run_tick(mr_run *r, const char *phase);

#endif
