/* `millrace merge -o OUT SHARD...`: 0, or 1 when more rows of the job failed than --tolerate
 * allows.
 */
#include <string.h>

#include "io/json.h"
#include "io/mem.h"
#include "io/sys.h"
#include "jobs/cmd.h"
#include "jobs/commit.h"
#include "jobs/merge.h"
#include "jobs/outfile.h"
#include "jobs/progress.h"
#include "jobs/report_files.h"
#include "jobs/signals.h"

#define REPORT_MAX ((size_t)16 << 20) /* bytes of a shard's report */

typedef struct merger {
  mr_job job;
  mr_paths paths;
  mr_merge *merge;
  mr_manifest whole;
  mr_commit *commit;
  mr_report report;
  bool naming; /* final names may exist: only the state can say whose they are */
  double start_s;
} merger;

static mr_code refuse_itself(const merger *g, mr_err *err) {
  for (int i = 0; i < mr_merge_shards(g->merge); i++)
    if (!strcmp(mr_merge_paths(g->merge, i)->run, g->paths.run))
      return mr_err_set(err, MR_E_USAGE, "the output %s is one of the shards; name another output",
                        g->job.output);
  return MR_OK;
}

static mr_code to_file(void *ctx, uint64_t row, mr_line_kind kind, const char *line, size_t len,
                       mr_err *err) {
  mr_outfile **files = ctx;
  (void)row;
  if (mr_signals_stop())
    return mr_err_set(err, MR_E_STOPPED,
                      "stopped by a signal; the same command merges the shards from the beginning");
  return mr_outfile_line(files[kind], line, len, err);
}

static mr_code end_file(merger *g, mr_outfile *o, int final, mr_err *err) {
  mr_outfile_info info;
  mr_code rc = o ? mr_outfile_finish(o, &info, err) : MR_OK;
  return rc || !o ? rc
                  : mr_manifest_add_file(&g->whole, g->paths.final[final], info.digest, info.bytes,
                                         info.lines, err);
}

/* The lines of all shards into OUT.run. */
static mr_code write_lines(merger *g, mr_err *err) {
  mr_outfile *files[MR_STREAMS] = {NULL, NULL};
  const int level = g->job.zstd_level;
  mr_code rc = mr_outfile_open(&files[MR_LINE_RESULT], g->paths.made[MR_FINAL_OUTPUT],
                               g->job.format, level, err);
  if (!rc && g->whole.rows_failed)
    rc = mr_outfile_open(&files[MR_LINE_ERROR], g->paths.made[MR_FINAL_ERRORS], MR_OUT_ZST, level,
                         err);
  if (!rc)
    rc = mr_merge_write(g->merge, g->paths.spill, 0, to_file, files, err);
  if (!rc)
    rc = end_file(g, files[MR_LINE_RESULT], MR_FINAL_OUTPUT, err);
  if (!rc)
    rc = end_file(g, files[MR_LINE_ERROR], MR_FINAL_ERRORS, err);
  for (int i = 0; i < MR_STREAMS; i++)
    mr_outfile_close(files[i]);
  return rc;
}

/* A shard in the report, with what its own report says. */
static json_t *shard_json(const merger *g, int i) {
  const mr_manifest *m = mr_merge_manifest(g->merge, i);
  mr_err ignored = MR_ERR_INIT;
  json_t *own =
      mr_json_read(mr_merge_paths(g->merge, i)->final[MR_FINAL_REPORT_JSON], REPORT_MAX, &ignored);
  json_t *seconds = json_object_get(own, "seconds"), *rate = json_object_get(own, "throughput");
  json_t *o =
      json_pack("{s:i, s:I, s:I, s:I, s:I, s:I, s:O?, s:O?}", "index", i + 1, "rows",
                (json_int_t)m->id.rows, "rows_failed", (json_int_t)m->rows_failed, "prompt_tokens",
                (json_int_t)m->prompt_tokens, "output_tokens", (json_int_t)m->output_tokens,
                "created", (json_int_t)m->id.created, "seconds", seconds, "throughput", rate);
  json_decref(own);
  return o;
}

static mr_code put_report(merger *g, mr_err *err) {
  mr_report *p = &g->report;
  const mr_manifest *w = &g->whole;
  p->id = &w->id;
  p->output = g->job.output;
  p->inputs = w->inputs;
  p->rows = w->id.rows;
  p->rows_ok = w->rows_ok;
  p->rows_failed = w->rows_failed;
  p->prompt_tokens = w->prompt_tokens;
  p->output_tokens = w->output_tokens;
  p->results_bytes = w->files[0].bytes;
  mr_code rc = mr_report_count_errors(p, g->paths.made[MR_FINAL_ERRORS], err);
  if (rc)
    return rc;
  p->assemble_s = p->total_s = mr_sys_seconds() - g->start_s;
  json_t *o = mr_report_to_json(p), *shards = json_array();
  bool ok = o && shards;
  for (int i = 0; ok && i < mr_merge_shards(g->merge); i++)
    ok = !json_array_append_new(shards, shard_json(g, i));
  ok = ok && !json_object_set(o, "shards", shards);
  rc = ok ? mr_report_put(o, g->commit, &g->whole, err)
          : mr_err_set(err, MR_E_NOMEM, "out of memory for the report");
  json_decref(shards);
  json_decref(o);
  return rc;
}

static mr_code write_all(merger *g, mr_err *err) {
  mr_code rc = write_lines(g, err);
  if (!rc)
    rc = put_report(g, err);
  g->naming = rc == MR_OK;
  return rc ? rc : mr_commit_publish(g->commit, &g->whole, err);
}

static void say(const merger *g) {
  char rows[32], failed[32], took[32];
  printf("%s: %s rows of %d shards, %s failed, in %s\n", g->job.output,
         mr_progress_count(g->whole.id.rows, rows, sizeof rows), mr_merge_shards(g->merge),
         mr_progress_count(g->whole.rows_failed, failed, sizeof failed),
         mr_progress_duration(mr_sys_seconds() - g->start_s, took, sizeof took));
}

static mr_code run(merger *g, mr_err *err) {
  if (g->job.format == MR_OUT_STDOUT)
    return mr_err_set(err, MR_E_USAGE, "merge writes files: name an output with -o");
  mr_code rc = mr_paths_make(&g->paths, g->job.base, g->job.output, err);
  if (!rc)
    rc = mr_merge_open(&g->merge, g->job.inputs, g->job.n_inputs, err);
  if (!rc)
    rc = refuse_itself(g, err);
  if (!rc)
    rc = mr_merge_whole(g->merge, &g->whole, err);
  if (!rc)
    rc = mr_commit_open(&g->commit, &g->paths, err);
  if (rc)
    return rc;
  bool was_new = mr_commit_identity(g->commit) == NULL;
  rc = mr_commit_bind(g->commit, &g->whole.id, err);
  if (!rc && !mr_commit_finished(g->commit))
    rc = write_all(g, err);
  if (mr_commit_finished(g->commit) || (rc && was_new && !g->naming)) {
    mr_err ignored = MR_ERR_INIT;
    mr_commit_discard(g->commit, &ignored);
  }
  if (!rc)
    say(g);
  return rc;
}

int mr_cmd_merge(int argc, char **argv) {
  mr_err err = MR_ERR_INIT;
  merger g = {.start_s = mr_sys_seconds()};
  mr_signals_install();
  mr_job_init(&g.job);
  mr_report_init(&g.report);
  mr_code rc = mr_job_parse(&g.job, MR_CMD_MERGE, argc, argv, &err);
  if (!rc && g.job.help)
    mr_job_help(MR_CMD_MERGE);
  else if (!rc)
    rc = run(&g, &err);
  int status = rc ? mr_err_exit(rc) : mr_job_status(&g.job, g.whole.id.rows, g.whole.rows_failed);
  if (rc)
    mr_err_print(&err, stderr);
  mr_report_free(&g.report);
  mr_commit_close(g.commit);
  mr_manifest_free(&g.whole);
  mr_merge_close(g.merge);
  mr_paths_free(&g.paths);
  mr_job_free(&g.job);
  return status;
}
