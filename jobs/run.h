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
#include "jobs/forecast.h"
#include "jobs/plan.h"
#include "jobs/progress.h"
#include "jobs/render.h"
#include "jobs/report.h"
#include "jobs/score.h"
#include "jobs/shard.h"

typedef struct mr_run {
  mr_job job;
  mr_paths paths;
  mr_prompter *prompter;
  mr_engine_opts engine_opts;
  mr_engine_info estimate;
  mr_tuning tuning; /* engine_opts borrows it */
  json_t *inputs;   /* inputs.h */
  mr_job_identity id;
  mr_commit *commit;
  mr_plan *plan;
  mr_shard *shard;       /* NULL: the whole job */
  mr_saved *saved;       /* rows that the run before had begun, or NULL */
  mr_profile *profile;   /* of this machine, where it has rates; or NULL */
  mr_time_estimate said; /* with it: what the run was said to take */
  mr_forecast forecast;  /* likewise: of which work */
  mr_progress *progress;
  mr_progress_now now;
  mr_report report;
  mr_score *score;     /* NULL: none was asked for */
  bool score_failed;   /* it was told */
  double start_s;      /* monotonic, of this run */
  double deadline_s;   /* monotonic; 0: none */
  bool was_new;        /* the state was made by this run */
  bool finished;       /* the manifest was there already */
  const char *stopped; /* why no more rows are admitted; NULL: all were */
} mr_run;

mr_code mr_run_prepare(mr_run *r, mr_err *err);
mr_code mr_run_rows(mr_run *r, mr_err *err);
/* Whether this run has to compute the row. */
bool mr_run_is_open(const mr_run *r, uint64_t row);
/* Says what the rows of `order`, and those that were begun, will take; rewinds it. MR_E_NOMEM,
 * MR_E_IO. */
mr_code mr_run_predict(mr_run *r, mr_schedule *order, mr_err *err);
mr_code mr_run_finish(mr_run *r, mr_err *err);

/* Reads the references; MR_E_DATA and others before anything is done. */
mr_code mr_run_score_open(mr_run *r, mr_err *err);
/* The scores of the assembled results, or {"error"}, or NULL: none were asked for. */
json_t *mr_run_score(mr_run *r);
/* A finished job whose report lacks the scores that are asked for now. */
void mr_run_score_finished(mr_run *r);
void mr_run_score_say(const mr_run *r);

/* Progress now and then, and what must be done for a waiting signal. */
void mr_run_tick(mr_run *r, const char *phase);

#endif
