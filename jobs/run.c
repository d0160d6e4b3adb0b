#include "jobs/run.h"

#include <string.h>

#include "io/mem.h"
#include "io/sys.h"
#include "jobs/cmd.h"
#include "jobs/signals.h"

static int say_finished(mr_run *r) {
  const mr_manifest *m = mr_commit_finished(r->commit);
  int status = mr_job_status(&r->job, m->id.rows, m->rows_failed);
  if (status || r->job.progress != MR_PROGRESS_NONE)
    fprintf(stderr,
            "millrace: nothing left to do: %s is finished, %llu rows, %llu of them failed\n",
            r->job.output, (unsigned long long)m->id.rows, (unsigned long long)m->rows_failed);
  mr_run_score_finished(r);
  return r->score_failed ? 1 : status;
}

static mr_code say_stopped(mr_run *r, mr_err *err) {
  json_t *o = json_pack("{s:f, s:I, s:I, s:s}", "seconds", mr_sys_seconds() - r->start_s, "rows",
                        (json_int_t)r->report.rows_this_run, "output_tokens",
                        (json_int_t)r->report.stats.output_tokens, "stopped", r->stopped);
  mr_code rc =
      o ? mr_commit_note_run(r->commit, o, err) : mr_err_set(err, MR_E_NOMEM, "out of memory");
  json_decref(o);
  if (rc)
    return rc;
  mr_run_tick(r, "stopped");
  if (r->job.format == MR_OUT_STDOUT)
    return mr_err_set(err, MR_E_STOPPED,
                      "stopped by %s; nothing was written: with -o - a job cannot be resumed",
                      r->stopped);
  char begun[128] = "";
  const mr_engine_stats *s = &r->report.stats;
  if (s->saved_rows)
    snprintf(begun, sizeof begun, " and goes on with the %llu rows in flight %s",
             (unsigned long long)s->saved_rows,
             s->saved_bytes ? "where they are"
                            : "(with --kv-disk their keys and values would be kept, too)");
  return mr_err_set(err, MR_E_STOPPED,
                    "stopped by %s after %llu of %llu rows; the same command resumes the job%s",
                    r->stopped, (unsigned long long)mr_commit_done_rows(r->commit),
                    (unsigned long long)r->id.rows, begun);
}

static void say_figures(const mr_run *r) {
  char rows[32], failed[32], prompt[32], output[32], took[32];
  const mr_report *p = &r->report;
  double s = p->run_s + p->commit_s;
  fprintf(stderr,
          "millrace: %s rows done, %s failed, in %s: %s prompt + %s output tokens, %.0f output "
          "tok/s; %s%s\n",
          mr_progress_count(p->rows, rows, sizeof rows),
          mr_progress_count(p->rows_failed, failed, sizeof failed),
          mr_progress_duration(mr_sys_seconds() - r->start_s, took, sizeof took),
          mr_progress_count(p->prompt_tokens, prompt, sizeof prompt),
          mr_progress_count(p->output_tokens, output, sizeof output),
          s > 0 ? (double)p->stats.output_tokens / s : 0,
          r->job.format == MR_OUT_STDOUT ? "results on " : "results in ",
          r->job.format == MR_OUT_STDOUT ? "standard output" : r->job.output);
}

/* --progress none: what went well needs no mail from cron. */
static int say_done(mr_run *r) {
  int status = mr_job_status(&r->job, r->report.rows, r->report.rows_failed);
  mr_run_tick(r, "done");
  mr_progress_close(r->progress);
  r->progress = NULL;
  if (status || r->job.progress != MR_PROGRESS_NONE)
    say_figures(r);
  mr_run_score_say(r);
  return r->score_failed ? 1 : status;
}

static mr_code run(mr_run *r, int *status, mr_err *err) {
  mr_code rc = mr_progress_open(&r->progress, r->job.progress, r->job.metrics_file, err);
  if (!rc)
    rc = mr_run_prepare(r, err);
  if (rc)
    return rc;
  if (r->finished) {
    *status = say_finished(r);
    return MR_OK;
  }
  const mr_commit_totals *t = mr_commit_totals_get(r->commit);
  if (t->lost_rows)
    fprintf(stderr,
            "millrace: %s: a frame is damaged; its rows and later ones are computed again\n",
            r->paths.run);
  rc = mr_run_rows(r, err);
  if (!rc && r->stopped)
    rc = say_stopped(r, err);
  if (!rc)
    rc = mr_run_finish(r, err);
  if (!rc)
    *status = say_done(r);
  return rc;
}

static void free_run(mr_run *r) {
  mr_err ignored = MR_ERR_INIT;
  mr_progress_close(r->progress);
  mr_shard_close(r->shard);
  mr_saved_close(r->saved);
  mr_mem_free(r->profile);
  mr_plan_close(r->plan);
  if (r->paths.temporary && r->commit) /* nobody could resume it */
    mr_commit_discard(r->commit, &ignored);
  mr_commit_close(r->commit);
  mr_prompter_close(r->prompter);
  mr_report_free(&r->report);
  mr_score_close(r->score);
  mr_identity_free(&r->id);
  json_decref(r->inputs);
  mr_paths_free(&r->paths);
  mr_job_free(&r->job);
  mr_mem_free(r);
}

int mr_cmd_run(int argc, char **argv) {
  mr_err err = MR_ERR_INIT;
  int status = 0;
  mr_signals_install();
  mr_run *r = mr_mem_alloc(1, sizeof *r);
  if (!r) {
    fputs("millrace: out of memory\n", stderr);
    return mr_err_exit(MR_E_NOMEM);
  }
  r->start_s = mr_sys_seconds();
  r->now.phase = "preflight";
  mr_report_init(&r->report);
  mr_job_init(&r->job);
  mr_code rc = mr_job_parse(&r->job, MR_CMD_RUN, argc, argv, &err);
  if (!rc && r->job.help)
    mr_job_help(MR_CMD_RUN);
  else if (!rc)
    rc = run(r, &status, &err);
  free_run(r);
  if (rc) {
    mr_err_print(&err, stderr);
    return mr_err_exit(rc);
  }
  return status;
}
