/* `millrace check OUT`: 0 whole; 65 not whole; 75 not finished, and whole so far; 66 nothing there.
 */
#include <string.h>

#include "io/json.h"
#include "io/mem.h"
#include "jobs/check.h"
#include "jobs/cmd.h"
#include "jobs/options.h"
#include "jobs/progress.h"

static void print_words(const mr_check *c, const char *name, bool finished) {
  char a[32], b[32], d[32], e[32];
  if (c->words.data)
    fputs(c->words.data, stderr);
  printf("%s: %s: %s results and %s errors for %s rows, %s output tokens\n", name,
         c->problems ? "NOT WHOLE"
         : finished  ? "whole"
                     : "not finished, whole so far",
         mr_progress_count(c->rows_ok, a, sizeof a), mr_progress_count(c->rows_failed, b, sizeof b),
         mr_progress_count(c->rows, d, sizeof d), mr_progress_count(c->output_tokens, e, sizeof e));
}

static mr_code print_json(const mr_check *c, bool finished, mr_err *err) {
  json_t *list = json_array();
  for (const char *s = c->words.data; s && *s;) {
    size_t n = strcspn(s, "\n");
    json_array_append_new(list, json_stringn(s, n));
    s += n + (s[n] == '\n');
  }
  json_t *o = json_pack(
      "{s:b, s:b, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o}", "whole", finished && !c->problems,
      "finished", finished, "rows", (json_int_t)c->rows, "rows_ok", (json_int_t)c->rows_ok,
      "rows_failed", (json_int_t)c->rows_failed, "prompt_tokens", (json_int_t)c->prompt_tokens,
      "output_tokens", (json_int_t)c->output_tokens, "files", (json_int_t)c->files, "bytes",
      (json_int_t)c->bytes, "problems", (json_int_t)c->problems, "words", list);
  char *text = o ? mr_json_dumps(o, JSON_PRESERVE_ORDER) : NULL;
  if (text)
    puts(text);
  mr_mem_free(text);
  json_decref(o);
  return text ? MR_OK : mr_err_set(err, MR_E_NOMEM, "out of memory");
}

static mr_code look(mr_check *c, const mr_paths *p, bool *finished, mr_err *err) {
  mr_manifest m;
  mr_err e = MR_ERR_INIT;
  mr_code rc = mr_manifest_load(&m, p->final[MR_FINAL_MANIFEST], &e);
  *finished = rc != MR_E_NOINPUT;
  if (!rc) {
    rc = mr_check_finished(c, p, &m, err);
    mr_manifest_free(&m);
    return rc;
  }
  if (*finished) {
    *err = e;
    return rc;
  }
  bool journal = false, state = false;
  rc = mr_path_look(p->journal, &journal, err);
  if (!rc)
    rc = mr_path_look(p->run, &state, err);
  if (rc)
    return rc;
  if (journal)
    return mr_check_state(c, p, err);
  if (state)
    return MR_OK; /* before the first record */
  return mr_err_at(err, MR_E_NOINPUT, p->final[MR_FINAL_OUTPUT], 0, -1,
                   "no job: neither %s nor %s is there", p->final[MR_FINAL_MANIFEST], p->run);
}

static mr_code run(const mr_job *j, int *status, mr_err *err) {
  mr_paths p;
  mr_check c;
  bool finished = false;
  memset(&c, 0, sizeof c);
  mr_code rc = mr_paths_find(&p, j->base, err);
  if (rc)
    return rc;
  rc = look(&c, &p, &finished, err);
  if (!rc && j->json)
    rc = print_json(&c, finished, err);
  else if (!rc)
    print_words(&c, p.final[MR_FINAL_OUTPUT], finished);
  *status = c.problems ? MR_E_DATA : finished ? 0 : MR_E_STOPPED;
  mr_check_free(&c);
  mr_paths_free(&p);
  return rc;
}

int mr_cmd_check(int argc, char **argv) {
  mr_job j;
  mr_err err = MR_ERR_INIT;
  int status = 0;
  mr_job_init(&j);
  mr_code rc = mr_job_parse(&j, MR_CMD_CHECK, argc, argv, &err);
  if (!rc && j.help)
    mr_job_help(MR_CMD_CHECK);
  else if (!rc && !j.base)
    rc = mr_err_set(&err, MR_E_USAGE, "standard output cannot be checked");
  else if (!rc)
    rc = run(&j, &status, &err);
  mr_job_free(&j);
  if (rc)
    mr_err_print(&err, stderr);
  return rc ? mr_err_exit(rc) : status;
}
