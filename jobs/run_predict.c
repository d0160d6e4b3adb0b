/* What a run will take, said before its first step. */
#include "io/mem.h"
#include "jobs/run.h"

#define PREDICTED_ROWS_MAX 1000000
#define SHOWN_ROWS 32 /* done, before their lengths are relied on */

static bool is_done(void *ctx, uint64_t row) {
  return !mr_run_is_open(ctx, row);
}

/* Of the tokens that rows may have, what those that are done have used; 0: they are too few. */
static double shown_share(const mr_run *r) {
  mr_plan_scan s;
  mr_err ignored = MR_ERR_INIT;
  double most = 0, rows = 0;
  const mr_commit_totals *done = mr_commit_totals_get(r->commit);
  if (done->rows_ok + done->rows_failed < SHOWN_ROWS)
    return 0;
  mr_plan_scan_start(&s, r->plan, &ignored);
  while (mr_plan_scan_next(&s))
    if (s.e->kind != MR_ROW_BAD && mr_shard_has(r->shard, s.row) && !mr_run_is_open(r, s.row)) {
      most += s.e->n_out;
      rows++;
    }
  return rows < SHOWN_ROWS ? 0 : (double)done->output_tokens / most;
}

static mr_code forecast(mr_run *r, mr_schedule *order) {
  mr_err ignored = MR_ERR_INIT;
  mr_forecast_in in = {.plan = r->plan,
                       .order = order,
                       .no_sharing = r->job.no_prefix_sharing,
                       .saved = r->saved,
                       .done = is_done,
                       .ctx = r,
                       .share = shown_share(r),
                       .info = &r->estimate,
                       .profile = r->profile};
  mr_code rc = mr_engine_look_store(&in.cache, &r->engine_opts, &r->estimate, &ignored);
  if (!rc)
    rc = mr_forecast_run(&r->forecast, &in, &r->said, &ignored);
  mr_prefixstore_close(in.cache);
  return rc;
}

/* What the rows that are left will take, where `plan` has measured this machine. The run needs it
 * for its report only, so a failure is none of the job. */
mr_code mr_run_predict(mr_run *r, mr_schedule *order, mr_err *err) {
  if (mr_schedule_left(order) > PREDICTED_ROWS_MAX ||
      (!mr_schedule_left(order) && !mr_saved_rows(r->saved)))
    return MR_OK;
  r->profile = mr_mem_alloc(1, sizeof *r->profile);
  if (!r->profile)
    return mr_err_set(err, MR_E_NOMEM, "out of memory");
  mr_profile_load(r->profile, &r->estimate);
  bool known = r->profile->measured;
  if (known) {
    mr_estimate_known(&r->said, &r->estimate, r->profile);
    r->said.start_s += r->report.preflight_s;
    known = forecast(r, order) == MR_OK;
  }
  if (!known) {
    mr_mem_free(r->profile);
    r->profile = NULL;
  }
  return mr_schedule_rewind(order, err);
}
