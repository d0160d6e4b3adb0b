/* `millrace status OUT`: what the journal or the manifest says. Writes nothing. */
#include <string.h>

#include "io/json.h"
#include "io/mem.h"
#include "io/sys.h"
#include "jobs/cmd.h"
#include "jobs/journal.h"
#include "jobs/manifest.h"
#include "jobs/options.h"
#include "jobs/progress.h"
#include "jobs/rundir.h"

typedef struct status {
  const char *state; /* "running", "stopped", "finished", "starting" */
  mr_job_identity id;
  uint64_t rows, ok, failed, prompt_tokens, output_tokens, torn_bytes, runs;
  char stopped_by[64];
} status;

static mr_code take(void *ctx, uint32_t type, const unsigned char *payload, size_t len) {
  status *s = ctx;
  mr_frame_rec rec;
  if (type == MR_RECORD_FRAME) {
    if (!mr_framerec_decode(&rec, payload, len, s->rows))
      return MR_E_DATA;
    *(rec.stream == MR_LINE_ERROR ? &s->failed : &s->ok) += rec.n_lines;
    s->prompt_tokens += rec.prompt_tokens;
    s->output_tokens += rec.output_tokens;
    return MR_OK;
  }
  if (type == MR_RECORD_HEADER) {
    mr_code rc = mr_identity_parse(&s->id, payload, len);
    s->rows = s->id.rows;
    return rc;
  }
  if (type != MR_RECORD_RUN)
    return MR_E_DATA;
  mr_json_ran_out(); /* before this */
  json_t *o = mr_json_load((const char *)payload, len);
  const char *why = json_string_value(json_object_get(o, "stopped"));
  s->runs++;
  snprintf(s->stopped_by, sizeof s->stopped_by, "%s", why ? why : "");
  json_decref(o);
  return mr_json_ran_out() ? MR_E_NOMEM : MR_OK;
}

static mr_code from_manifest(status *s, const char *path, mr_err *err) {
  mr_manifest m;
  mr_code rc = mr_manifest_load(&m, path, err);
  if (rc)
    return rc;
  s->state = "finished";
  s->rows = m.id.rows;
  s->ok = m.rows_ok;
  s->failed = m.rows_failed;
  s->prompt_tokens = m.prompt_tokens;
  s->output_tokens = m.output_tokens;
  rc = mr_identity_copy(&s->id, &m.id, err);
  mr_manifest_free(&m);
  return rc;
}

static mr_code look(status *s, const mr_paths *p, mr_err *err) {
  bool running = mr_rundir_is_locked(p);
  bool manifest = false, journal = false, state = false;
  mr_code rc = mr_path_look(p->final[MR_FINAL_MANIFEST], &manifest, err);
  if (!rc)
    rc = mr_path_look(p->journal, &journal, err);
  if (!rc)
    rc = mr_path_look(p->run, &state, err);
  if (rc)
    return rc;
  if (!running && manifest)
    return from_manifest(s, p->final[MR_FINAL_MANIFEST], err);
  if (journal) {
    s->state = running ? "running" : "stopped";
    return mr_journal_read(p->journal, take, s, &s->torn_bytes, err);
  }
  if (state) {
    s->state = running ? "starting" : "stopped";
    return MR_OK;
  }
  return mr_err_at(err, MR_E_NOINPUT, p->final[MR_FINAL_OUTPUT], 0, -1,
                   "no job: neither %s nor %s is there", p->final[MR_FINAL_MANIFEST], p->run);
}

static void print_words(const status *s, const char *name) {
  char a[32], b[32];
  printf("%s: %s", name, s->state);
  if (s->rows)
    printf(", %s of %s rows done (%.1f %%)", mr_progress_count(s->ok + s->failed, a, sizeof a),
           mr_progress_count(s->rows, b, sizeof b),
           100.0 * (double)(s->ok + s->failed) / (double)s->rows);
  printf(", %s failed\n", mr_progress_count(s->failed, a, sizeof a));
  printf("  %s prompt tokens, %s output tokens\n", mr_progress_count(s->prompt_tokens, a, sizeof a),
         mr_progress_count(s->output_tokens, b, sizeof b));
  if (!strcmp(s->state, "stopped") && s->stopped_by[0])
    printf("  last stopped by %s; the same command resumes the job\n", s->stopped_by);
  if (s->id.options)
    printf("  job %s, %s\n", s->id.job_id, s->id.numerics);
  if (s->id.part.of)
    printf("  shard %d/%d of %s rows\n", s->id.part.index, s->id.part.of,
           mr_progress_count(s->id.part.job_rows, a, sizeof a));
}

static mr_code print_json(const status *s, mr_err *err) {
  json_t *o = json_pack(
      "{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:I, s:s, s:s}", "state", s->state, "rows",
      (json_int_t)s->rows, "rows_done", (json_int_t)(s->ok + s->failed), "rows_ok",
      (json_int_t)s->ok, "rows_failed", (json_int_t)s->failed, "rows_left",
      (json_int_t)(s->rows - s->ok - s->failed), "prompt_tokens", (json_int_t)s->prompt_tokens,
      "output_tokens", (json_int_t)s->output_tokens, "job_id", s->id.job_id, "created",
      (json_int_t)s->id.created, "numerics", s->id.numerics, "stopped_by", s->stopped_by);
  const mr_identity_part *p = &s->id.part;
  if (o && p->of)
    json_object_set_new(o, "shard",
                        json_pack("{s:i, s:i, s:I}", "index", p->index, "of", p->of, "job_rows",
                                  (json_int_t)p->job_rows));
  char *text = o ? mr_json_dumps(o, JSON_PRESERVE_ORDER) : NULL;
  if (text)
    puts(text);
  mr_mem_free(text);
  json_decref(o);
  return text ? MR_OK : mr_err_set(err, MR_E_NOMEM, "out of memory");
}

static mr_code run(const mr_job *j, mr_err *err) {
  mr_paths p;
  status s = {.state = "stopped"};
  mr_code rc = mr_paths_find(&p, j->base, err);
  if (rc)
    return rc;
  rc = look(&s, &p, err);
  if (!rc && j->json)
    rc = print_json(&s, err);
  else if (!rc)
    print_words(&s, p.final[MR_FINAL_OUTPUT]);
  mr_identity_free(&s.id);
  mr_paths_free(&p);
  return rc;
}

int mr_cmd_status(int argc, char **argv) {
  mr_job j;
  mr_err err = MR_ERR_INIT;
  mr_job_init(&j);
  mr_code rc = mr_job_parse(&j, MR_CMD_STATUS, argc, argv, &err);
  if (!rc && j.help)
    mr_job_help(MR_CMD_STATUS);
  else if (!rc && !j.base)
    rc = mr_err_set(&err, MR_E_USAGE, "standard output has no state to look at");
  else if (!rc)
    rc = run(&j, &err);
  mr_job_free(&j);
  if (rc)
    mr_err_print(&err, stderr);
  return mr_err_exit(rc);
}
