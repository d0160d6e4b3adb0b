#include "jobs/inputs.h"

#include <string.h>

#include "io/durable.h"
#include "io/json.h"
#include "io/mem.h"
#include "io/slurp.h"
#include "io/source.h"
#include "io/sys.h"

#define PLAN_INPUTS_MAX ((size_t)1 << 30)

static mr_code nomem(mr_err *err) {
  return mr_err_set(err, MR_E_NOMEM, "out of memory");
}

/* JSON holds only UTF-8, a path any bytes: others are written as %XX, and % as %25. */
static json_t *path_text(const char *path) {
  mr_text t = {0};
  bool plain = mr_utf8_valid(path, strlen(path)) < 0;
  for (const unsigned char *p = (const unsigned char *)path; *p; p++) {
    if (*p == '%' || (!plain && *p >= 0x80))
      mr_text_addf(&t, "%%%02X", *p);
    else
      mr_text_addc(&t, (char)*p);
  }
  json_t *o = t.failed ? NULL : json_string(t.data ? t.data : "");
  mr_text_free(&t);
  return o;
}

static mr_code add_file(json_t *list, const char *path, mr_err *err) {
  struct stat st;
  json_int_t size = -1, mtime_ns = 0;
  if (strcmp(path, "-") != 0) {
    if (mr_sys_now->stat(path, &st))
      return mr_err_errno(err, MR_E_IO, path, "cannot read");
    size = st.st_size;
    mtime_ns = (json_int_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec;
  }
  json_t *o =
      json_pack("{s:o, s:I, s:I}", "path", path_text(path), "size", size, "mtime_ns", mtime_ns);
  return json_array_append_new(list, o) ? nomem(err) : MR_OK;
}

mr_code mr_inputs_list(const mr_job *j, json_t **list, mr_err *err) {
  mr_source *s;
  mr_code rc = mr_source_open(&s, (const char *const *)j->inputs, j->n_inputs, err);
  if (rc)
    return rc;
  *list = json_array();
  rc = *list ? MR_OK : nomem(err);
  for (size_t i = 0; !rc && i < mr_source_n_paths(s); i++)
    rc = add_file(*list, mr_source_path(s, i), err);
  mr_source_close(s);
  if (rc) {
    json_decref(*list);
    *list = NULL;
  }
  return rc;
}

bool mr_inputs_equal(const json_t *a, const json_t *b) {
  size_t i;
  json_t *o;
  if (!a || !b || !json_equal(a, b))
    return false;
  json_array_foreach((json_t *)(uintptr_t)a, i,
                     o) if (json_integer_value(json_object_get(o, "size")) < 0) return false;
  return true;
}

uint64_t mr_inputs_bytes(const json_t *list) {
  uint64_t sum = 0;
  size_t i;
  json_t *o;
  json_array_foreach((json_t *)(uintptr_t)list, i, o) {
    json_int_t n = json_integer_value(json_object_get(o, "size"));
    sum += n > 0 ? (uint64_t)n : 0;
  }
  return sum;
}

static json_t *all_of(const json_t *list, const mr_job_identity *id) {
  return json_pack("{s:s, s:s, s:s, s:s, s:I, s:O}", "version", MR_VERSION, "options_digest",
                   id->options_digest, "model_digest", id->model_digest, "numerics", id->numerics,
                   "created", (json_int_t)id->created, "inputs", (json_t *)(uintptr_t)list);
}

mr_code mr_inputs_save(const char *path, const json_t *list, const mr_job_identity *id,
                       mr_err *err) {
  json_t *o = all_of(list, id);
  char *text = o ? mr_json_dumps(o, JSON_COMPACT | JSON_SORT_KEYS) : NULL;
  mr_code rc = text ? mr_durable_write(path, text, strlen(text), err) : nomem(err);
  mr_mem_free(text);
  json_decref(o);
  return rc;
}

/* NULL for anything but a whole JSON text. */
static json_t *load(const char *path) {
  mr_text t = {0};
  json_t *o = NULL;
  if (mr_slurp_file(path, PLAN_INPUTS_MAX - 1, &t, NULL) == MR_OK && t.len)
    o = mr_json_load(t.data, t.len);
  mr_text_free(&t);
  return o;
}

bool mr_inputs_match(const char *path, const json_t *list, const mr_job_identity *id) {
  json_t *old = load(path), *now = all_of(list, id);
  bool same =
      old && now && json_equal(old, now) && mr_inputs_equal(json_object_get(old, "inputs"), list);
  json_decref(old);
  json_decref(now);
  return same;
}
