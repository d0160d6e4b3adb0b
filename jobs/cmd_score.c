/* `millrace score RESULTS...`: 0; 1 when rows are missing on either side, more than --tolerate
 * allows; 65 when nothing could be scored.
 */
#include <string.h>

#include "io/durable.h"
#include "io/json.h"
#include "io/mem.h"
#include "io/sys.h"
#include "jobs/cmd.h"
#include "jobs/options.h"
#include "jobs/rundir.h"
#include "jobs/score.h"

typedef struct scoring {
  mr_job job;
  mr_list paths; /* what is read: the inputs, and errors beside them */
  mr_score *score;
  mr_outfile *rows;
  char *made; /* where the rows are written until they are whole */
} scoring;

static mr_code no_memory(mr_err *err) {
  return mr_err_set(err, MR_E_NOMEM, "out of memory");
}

/* ------------------------------------------------------------------ what is read */

static bool has_path(const mr_list *l, const char *path) {
  for (int i = 0; i < l->n; i++)
    if (!strcmp(l->s[i], path))
      return true;
  return false;
}

/* The output of a job stands for its errors too, and OUT for the output. Others: as they are. */
static mr_code find_input(scoring *g, const char *typed, mr_list *errors, mr_err *err) {
  mr_paths p;
  if (!strcmp(typed, "-"))
    return mr_list_add(&g->paths, typed, err);
  mr_code rc = mr_paths_find(&p, typed, err);
  if (rc)
    return rc;
  bool there = mr_path_exists(typed);
  const char *output = p.final[MR_FINAL_OUTPUT], *bad = p.final[MR_FINAL_ERRORS];
  if (!there && mr_path_exists(output))
    typed = output;
  rc = mr_list_add(&g->paths, typed, err);
  bool is_output = !strcmp(typed, output) && mr_path_exists(p.final[MR_FINAL_MANIFEST]);
  if (!rc && is_output && mr_path_exists(bad))
    rc = mr_list_add(errors, bad, err);
  mr_paths_free(&p);
  return rc;
}

static mr_code find_inputs(scoring *g, mr_err *err) {
  mr_list errors = {0};
  mr_code rc = MR_OK;
  for (int i = 0; !rc && i < g->job.n_inputs; i++)
    rc = find_input(g, g->job.inputs[i], &errors, err);
  for (int i = 0; !rc && i < errors.n; i++)
    if (!has_path(&g->paths, errors.s[i]))
      rc = mr_list_add(&g->paths, errors.s[i], err);
  mr_list_free(&errors);
  return rc;
}

/* ------------------------------------------------------------------ scores of rows */

static mr_code refuse_itself(const scoring *g, mr_err *err) {
  struct stat a, b;
  const mr_list *lists[] = {&g->paths, &g->job.score.refs};
  if (mr_sys_now->stat(g->job.output, &a))
    return MR_OK;
  for (size_t k = 0; k < 2; k++)
    for (int i = 0; i < lists[k]->n; i++)
      if (!mr_sys_now->stat(lists[k]->s[i], &b) && a.st_dev == b.st_dev && a.st_ino == b.st_ino)
        return mr_err_set(err, MR_E_USAGE, "the output %s is the input %s; name another output",
                          g->job.output, lists[k]->s[i]);
  return MR_OK;
}

static mr_code open_rows(scoring *g, mr_err *err) {
  mr_text made = {0};
  mr_code rc = refuse_itself(g, err);
  if (rc)
    return rc;
  mr_text_addf(&made, "%s.tmp", g->job.output);
  if (made.failed)
    return no_memory(err);
  g->made = made.data; /* the scoring's now */
  rc = mr_outfile_open(&g->rows, g->made, g->job.format, g->job.zstd_level, err);
  if (!rc)
    mr_score_rows_to(g->score, g->rows);
  return rc;
}

static mr_code publish_rows(scoring *g, mr_err *err) {
  mr_outfile_info info;
  mr_code rc = mr_outfile_finish(g->rows, &info, err);
  return rc ? rc : mr_durable_rename(g->made, g->job.output, err);
}

static void close_rows(scoring *g, bool whole) {
  bool was_open = g->rows != NULL;
  mr_outfile_close(g->rows);
  if (was_open && !whole)
    mr_sys_now->unlink(g->made);
  mr_mem_free(g->made);
}

/* ------------------------------------------------------------------ */

static mr_code print(const scoring *g, mr_err *err) {
  mr_text table = {0};
  if (g->job.json) {
    json_t *o = mr_score_to_json(g->score);
    char *text = o ? mr_json_dumps(o, JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(9)) : NULL;
    json_decref(o);
    mr_text_adds(&table, text ? text : "");
    mr_text_addc(&table, '\n');
    table.failed |= !text;
    mr_mem_free(text);
  } else {
    mr_score_table(g->score, &table);
  }
  mr_code rc = table.failed ? no_memory(err) : MR_OK;
  if (!rc && (fwrite(table.data, 1, table.len, stdout) != table.len || fflush(stdout)))
    rc = mr_err_errno(err, MR_E_IO, "standard output", "cannot write");
  mr_text_free(&table);
  return rc;
}

static mr_code score(scoring *g, int *status, mr_err *err) {
  mr_code rc = find_inputs(g, err);
  if (!rc)
    rc = mr_score_open(&g->score, &g->job.score, err);
  if (!rc && g->job.output)
    rc = open_rows(g, err);
  if (!rc)
    rc = mr_score_read(g->score, (const char *const *)g->paths.s, g->paths.n, err);
  if (!rc)
    rc = mr_score_finish(g->score, err);
  if (!rc && g->rows)
    rc = publish_rows(g, err);
  close_rows(g, !rc);
  if (!rc)
    rc = print(g, err);
  if (rc)
    return rc;
  const mr_score_counts *c = mr_score_counts_get(g->score);
  *status = mr_job_status(&g->job, c->results + c->missing, mr_score_incomplete(g->score));
  return MR_OK;
}

int mr_cmd_score(int argc, char **argv) {
  mr_err err = MR_ERR_INIT;
  scoring g = {.score = NULL};
  int status = 0;
  mr_job_init(&g.job);
  mr_code rc = mr_job_parse(&g.job, MR_CMD_SCORE, argc, argv, &err);
  if (!rc && g.job.help)
    mr_job_help(MR_CMD_SCORE);
  else if (!rc)
    rc = score(&g, &status, &err);
  if (rc)
    mr_err_print(&err, stderr);
  mr_score_close(g.score);
  mr_list_free(&g.paths);
  mr_job_free(&g.job);
  return rc ? mr_err_exit(rc) : status;
}
