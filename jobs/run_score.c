/* The scores of a run. References are read before any work is done; what goes wrong at the end is
 * told, and costs only the scores: the results are published all the same. */
#include "io/json.h"
#include "io/sys.h"
#include "jobs/run.h"

#define REPORT_MAX ((size_t)64 << 20) /* bytes of a report that is read back */

mr_code mr_run_score_open(mr_run *r, mr_err *err) {
  if (!mr_job_has_score(&r->job))
    return MR_OK;
  mr_code rc = mr_score_open(&r->score, &r->job.score, err);
  if (!rc && r->job.shard.of)
    mr_score_is_part(r->score);
  return rc;
}

/* The text of an error that is told, and then no longer in the way. */
static json_t *tell(mr_run *r, const mr_err *e) {
  char buf[sizeof e->file + sizeof e->text + 64];
  mr_err_format(e, buf, sizeof buf);
  r->score_failed = true;
  fprintf(stderr, "millrace: no score: %s; the results are whole, and millrace score scores them\n",
          buf);
  return json_pack("{s:s}", "error", buf);
}

static json_t *score_files(mr_run *r, char *const files[MR_FINALS]) {
  mr_err e = MR_ERR_INIT;
  const char *paths[] = {files[MR_FINAL_OUTPUT], files[MR_FINAL_ERRORS]};
  double start_s = mr_sys_seconds();
  mr_code rc = mr_score_read(r->score, paths, mr_path_exists(paths[1]) ? 2 : 1, &e);
  if (!rc)
    rc = mr_score_finish(r->score, &e);
  json_t *o = rc ? NULL : mr_score_to_json(r->score);
  if (!rc && (!o || json_object_set_new(o, "seconds", json_real(mr_sys_seconds() - start_s)))) {
    json_decref(o);
    o = NULL;
    rc = mr_err_set(&e, MR_E_NOMEM, "out of memory for scores");
  }
  return rc ? tell(r, &e) : o;
}

json_t *mr_run_score(mr_run *r) {
  return r->score ? score_files(r, r->paths.made) : NULL;
}

/* Whether the report of the finished job has what was asked for. */
static bool is_scored(const mr_run *r) {
  mr_err ignored = MR_ERR_INIT;
  json_t *o = mr_json_read(r->paths.final[MR_FINAL_REPORT_JSON], REPORT_MAX, &ignored);
  const json_t *score = json_object_get(o, "score");
  bool is = json_is_object(score) && !json_object_get(score, "error");
  json_decref(o);
  return is;
}

void mr_run_score_finished(mr_run *r) {
  mr_err e = MR_ERR_INIT;
  if (!mr_job_has_score(&r->job) || r->job.format == MR_OUT_STDOUT || is_scored(r))
    return;
  json_decref(mr_run_score_open(r, &e) ? tell(r, &e) : score_files(r, r->paths.final));
  mr_run_score_say(r);
}

void mr_run_score_say(const mr_run *r) {
  mr_text t = {0};
  if (!r->score || r->score_failed || r->job.progress == MR_PROGRESS_NONE)
    return;
  mr_score_brief(r->score, &t);
  if (!t.failed && t.data)
    fprintf(stderr, "millrace: score: %s\n", t.data);
  mr_text_free(&t);
}
