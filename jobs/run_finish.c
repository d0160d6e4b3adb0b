#include <string.h>

#include "io/json.h"
#include "io/mem.h"
#include "io/sys.h"
#include "io/zframe.h"
#include "jobs/roofline.h"
#include "jobs/run.h"

#define ROOFLINE_S 0.05 /* for each limit */

/* The code of an error line, else its type: {"error": {...}} or {"response": {"body": {"error":
 * {...}}}}. */
static const char *kind_of_error(const json_t *line) {
  const json_t *e = json_object_get(line, "error");
  if (!json_is_object(e))
    e = json_object_get(json_object_get(json_object_get(line, "response"), "body"), "error");
  const char *code = json_string_value(json_object_get(e, "code"));
  const char *type = json_string_value(json_object_get(e, "type"));
  return code && *code ? code : type && *type ? type : "unknown";
}

static void count_lines(json_t *counts, const mr_text *text) {
  for (size_t at = 0; at < text->len;) {
    const char *line = text->data + at, *nl = memchr(line, '\n', text->len - at);
    size_t len = nl ? (size_t)(nl - line) : text->len - at;
    json_t *o = mr_json_load(line, len);
    const char *kind = kind_of_error(o);
    json_int_t n = json_integer_value(json_object_get(counts, kind));
    json_object_set_new(counts, kind, json_integer(n + 1));
    json_decref(o);
    at += len + 1;
  }
}

/* Errors by kind, from the file itself: rows of earlier runs count too. */
static mr_code count_errors(mr_run *r, mr_err *err) {
  r->report.errors = json_object();
  if (!r->report.errors)
    return mr_err_set(err, MR_E_NOMEM, "out of memory");
  if (r->report.rows_failed == 0)
    return MR_OK;
  mr_zfile *f;
  mr_text t = {0};
  mr_json_ran_out(); /* before this */
  mr_code rc = mr_zfile_open(&f, r->paths.made[MR_FINAL_ERRORS], err);
  if (rc)
    return rc;
  for (uint32_t i = 0; !rc && i < mr_zfile_frames(f); i++) {
    rc = mr_zfile_read(f, i, &t, err);
    if (!rc)
      count_lines(r->report.errors, &t);
  }
  mr_text_free(&t);
  mr_zfile_close(f);
  if (!rc && mr_json_ran_out())
    rc = mr_err_set(err, MR_E_NOMEM, "out of memory for the report");
  return rc;
}

/* The limits of this machine now, for MFU and MBU; without them the report has none. */
static void measure_peaks(mr_run *r) {
  mr_roofline limits;
  mr_report *p = &r->report;
  mr_err ignored = MR_ERR_INIT;
  mr_scheme scheme = r->job.compute == MR_COMPUTE_EXACT ? MR_SCHEME_F32 : MR_SCHEME_I8;
  if (!p->has_engine ||
      mr_roofline_measure(mr_kernels_best(), p->info.threads, ROOFLINE_S, &limits, &ignored))
    return;
  p->peak_ops = limits.ops_per_s[scheme];
  p->peak_bytes = limits.bytes_per_s;
  snprintf(
      p->peak_basis, sizeof p->peak_basis,
      "measured after the run on %d threads: %s matrix product on data in the cache, memory triad",
      limits.threads, p->info.scheme);
}

static void fill_report(mr_run *r, const mr_manifest *m) {
  const mr_commit_totals *t = mr_commit_totals_get(r->commit);
  mr_report *p = &r->report;
  p->id = &r->id;
  p->model_path = r->job.model;
  p->model_name = mr_prompter_name(r->prompter);
  p->output = r->job.output;
  p->inputs = r->inputs;
  p->rows = r->id.rows;
  p->rows_ok = t->rows_ok;
  p->rows_failed = t->rows_failed;
  p->prompt_tokens = t->prompt_tokens;
  p->output_tokens = t->output_tokens;
  p->lost_rows = t->lost_rows;
  p->earlier_runs = t->earlier_runs;
  p->earlier_s = t->earlier_s;
  p->peak_memory_bytes = r->now.memory_bytes;
  p->results_bytes = m->n_files ? m->files[0].bytes : 0;
  measure_peaks(r);
  p->total_s = mr_sys_seconds() - r->start_s;
}

static mr_code put_reports(mr_run *r, mr_manifest *m, mr_err *err) {
  mr_text html = {0};
  json_t *o = mr_report_to_json(&r->report);
  size_t form = JSON_INDENT(1) | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(9);
  char *text = o ? mr_json_dumps(o, form) : NULL;
  mr_code rc = text ? MR_OK : mr_err_set(err, MR_E_NOMEM, "out of memory for the report");
  if (!rc)
    rc = mr_commit_put(r->commit, MR_FINAL_REPORT_JSON, text, strlen(text), m, err);
  if (!rc)
    rc = mr_report_html(o, &html, err);
  if (!rc)
    rc = mr_commit_put(r->commit, MR_FINAL_REPORT_HTML, html.data, html.len, m, err);
  mr_text_free(&html);
  mr_mem_free(text);
  json_decref(o);
  return rc;
}

static mr_code finish(mr_run *r, mr_manifest *m, mr_err *err) {
  double t = mr_sys_seconds();
  bool to_stdout = r->job.format == MR_OUT_STDOUT;
  mr_code rc = mr_commit_assemble(r->commit, r->job.format, r->job.zstd_level,
                                  r->job.completion_order, m, err);
  r->report.rows_failed = mr_commit_totals_get(r->commit)->rows_failed;
  if (!rc && !to_stdout)
    rc = count_errors(r, err);
  r->report.assemble_s = mr_sys_seconds() - t;
  if (rc)
    return rc;
  fill_report(r, m);
  if (to_stdout)
    return MR_OK;
  m->inputs = json_incref(r->inputs);
  rc = put_reports(r, m, err);
  return rc ? rc : mr_commit_publish(r->commit, m, err);
}

mr_code mr_run_finish(mr_run *r, mr_err *err) {
  mr_manifest m;
  memset(&m, 0, sizeof m);
  mr_run_tick(r, "assemble");
  mr_code rc = finish(r, &m, err);
  mr_manifest_free(&m);
  return rc;
}
