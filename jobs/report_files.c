#include "jobs/report_files.h"

#include <string.h>

#include "io/json.h"
#include "io/mem.h"
#include "io/zframe.h"

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

mr_code mr_report_count_errors(mr_report *r, const char *path, mr_err *err) {
  r->errors = json_object();
  if (!r->errors)
    return mr_err_set(err, MR_E_NOMEM, "out of memory");
  if (r->rows_failed == 0)
    return MR_OK;
  mr_zfile *f;
  mr_text t = {0};
  mr_json_ran_out(); /* before this */
  mr_code rc = mr_zfile_open(&f, path, err);
  if (rc)
    return rc;
  for (uint32_t i = 0; !rc && i < mr_zfile_frames(f); i++) {
    rc = mr_zfile_read(f, i, &t, err);
    if (!rc)
      count_lines(r->errors, &t);
  }
  mr_text_free(&t);
  mr_zfile_close(f);
  if (!rc && mr_json_ran_out())
    rc = mr_err_set(err, MR_E_NOMEM, "out of memory for the report");
  return rc;
}

mr_code mr_report_put(const json_t *report, mr_commit *c, mr_manifest *m, mr_err *err) {
  mr_text html = {0};
  size_t form = JSON_INDENT(1) | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(9);
  char *text = report ? mr_json_dumps(report, form) : NULL;
  mr_code rc = text ? MR_OK : mr_err_set(err, MR_E_NOMEM, "out of memory for the report");
  if (!rc)
    rc = mr_commit_put(c, MR_FINAL_REPORT_JSON, text, strlen(text), m, err);
  if (!rc)
    rc = mr_report_html(report, &html, err);
  if (!rc)
    rc = mr_commit_put(c, MR_FINAL_REPORT_HTML, html.data, html.len, m, err);
  mr_text_free(&html);
  mr_mem_free(text);
  return rc;
}
