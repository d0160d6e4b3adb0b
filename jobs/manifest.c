#include "jobs/manifest.h"

#include <fcntl.h>
#include <string.h>

#include "io/json.h"
#include "io/mem.h"
#include "io/slurp.h"
#include "io/sys.h"
#include "jobs/rowlist.h"

#define MANIFEST_MAX ((size_t)1 << 30) /* bytes: a hundred million rows scattered over shards */
#define DUMP (JSON_COMPACT | JSON_SORT_KEYS)

static const char *const list_names[MR_STREAMS] = {"result_rows", "error_rows"};

static mr_code nomem(mr_err *err) {
  return mr_err_set(err, MR_E_NOMEM, "out of memory");
}

/* jansson's unpack says the same when memory runs out. */
static mr_code damaged(const char *what, mr_err *err) {
  return mr_json_ran_out() ? nomem(err) : mr_err_set(err, MR_E_DATA, "%s", what);
}

static const char *last_part(const char *path) {
  const char *slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

mr_code mr_manifest_add_file(mr_manifest *m, const char *path, const char digest[MR_HASH_HEX],
                             uint64_t bytes, uint64_t lines, mr_err *err) {
  if (m->n_files == MR_MANIFEST_FILES)
    return mr_err_set(err, MR_E_INTERNAL, "more than %d files in a manifest", MR_MANIFEST_FILES);
  mr_manifest_file *f = &m->files[m->n_files];
  const char *name = last_part(path);
  f->name = mr_mem_copy(name, strlen(name));
  if (!f->name)
    return nomem(err);
  memcpy(f->digest, digest, MR_HASH_HEX);
  f->bytes = bytes;
  f->lines = lines;
  m->n_files++;
  return MR_OK;
}

static json_t *files_to_json(const mr_manifest *m) {
  json_t *a = json_array();
  for (int i = 0; i < m->n_files; i++) {
    const mr_manifest_file *f = &m->files[i];
    json_array_append_new(a,
                          json_pack("{s:s, s:s, s:I, s:I}", "name", f->name, "xxh3_128", f->digest,
                                    "bytes", (json_int_t)f->bytes, "lines", (json_int_t)f->lines));
  }
  if (json_array_size(a) == (size_t)m->n_files)
    return a;
  json_decref(a);
  return NULL;
}

static json_t *to_json(const mr_manifest *m) {
  json_t *o =
      json_pack("{s:i, s:s, s:o, s:I, s:I, s:I, s:I, s:I, s:b, s:o, s:o}", "manifest", 1, "version",
                MR_VERSION, "identity", mr_identity_to_json(&m->id), "rows", (json_int_t)m->id.rows,
                "rows_ok", (json_int_t)m->rows_ok, "rows_failed", (json_int_t)m->rows_failed,
                "prompt_tokens", (json_int_t)m->prompt_tokens, "output_tokens",
                (json_int_t)m->output_tokens, "completion_order", m->completion_order, "inputs",
                m->inputs ? json_incref(m->inputs) : json_null(), "files", files_to_json(m));
  for (int i = 0; o && i < MR_STREAMS; i++)
    if (m->row_list[i] && json_object_set_new(o, list_names[i], json_string(m->row_list[i]))) {
      json_decref(o);
      return NULL;
    }
  return o;
}

/* Adds the digest of the object to it and dumps it. `o` has no "digest" yet. */
static mr_code dump_signed(json_t *o, mr_text *out, mr_err *err) {
  char hex[MR_HASH_HEX];
  char *text = o ? mr_json_dumps(o, DUMP) : NULL;
  if (!text)
    return nomem(err);
  mr_hash_hex(text, strlen(text), hex);
  mr_mem_free(text);
  if (json_object_set_new(o, "digest", json_string(hex)) || !(text = mr_json_dumps(o, DUMP)))
    return nomem(err);
  mr_text_adds(out, text);
  mr_text_addc(out, '\n');
  mr_mem_free(text);
  return out->failed ? nomem(err) : MR_OK;
}

mr_code mr_manifest_dump(const mr_manifest *m, mr_text *out, mr_err *err) {
  json_t *o = to_json(m);
  mr_code rc = dump_signed(o, out, err);
  json_decref(o);
  return rc;
}

static mr_code take_file(mr_manifest *m, json_t *o, mr_err *err) {
  const char *name, *hex;
  json_int_t bytes, lines;
  if (json_unpack(o, "{s:s, s:s, s:I, s:I}", "name", &name, "xxh3_128", &hex, "bytes", &bytes,
                  "lines", &lines) ||
      strlen(hex) != MR_HASH_HEX - 1 || bytes < 0 || lines < 0 || !*name || strchr(name, '/'))
    return damaged("the manifest's list of files is damaged", err);
  return mr_manifest_add_file(m, name, hex, (uint64_t)bytes, (uint64_t)lines, err);
}

/* A list names as many rows of the job as there are lines. */
static bool list_is_good(const char *text, uint64_t rows, uint64_t lines) {
  mr_rowlist_at at = {.s = text};
  uint64_t row, n = 0;
  int got;
  while ((got = mr_rowlist_next(&at, rows, &row)) == 1)
    n++;
  return got == 0 && n == lines;
}

static mr_code take_lists(mr_manifest *m, const json_t *o, mr_err *err) {
  const uint64_t lines[MR_STREAMS] = {m->rows_ok, m->rows_failed};
  for (int i = 0; i < MR_STREAMS && m->id.part.of; i++) {
    const json_t *s = json_object_get(o, list_names[i]);
    if (!json_is_string(s) || !list_is_good(json_string_value(s), m->id.part.job_rows, lines[i]))
      return damaged("the manifest's list of the shard's rows is damaged", err);
    m->row_list[i] = mr_mem_copy(json_string_value(s), json_string_length(s));
    if (!m->row_list[i])
      return nomem(err);
  }
  return MR_OK;
}

static mr_code from_json(mr_manifest *m, json_t *o, mr_err *err) {
  json_int_t format, ok, failed, prompt, output;
  int completion;
  json_t *id, *inputs, *files, *f;
  size_t i;
  if (json_unpack(o, "{s:I, s:o, s:I, s:I, s:I, s:I, s:b, s:o, s:o}", "manifest", &format,
                  "identity", &id, "rows_ok", &ok, "rows_failed", &failed, "prompt_tokens", &prompt,
                  "output_tokens", &output, "completion_order", &completion, "inputs", &inputs,
                  "files", &files) ||
      format != 1 || !json_is_array(files))
    return damaged("not a manifest of this version of millrace", err);
  mr_code rc = mr_identity_from_json(&m->id, id, err);
  m->rows_ok = (uint64_t)ok;
  m->rows_failed = (uint64_t)failed;
  m->prompt_tokens = (uint64_t)prompt;
  m->output_tokens = (uint64_t)output;
  m->completion_order = completion;
  m->inputs = json_is_null(inputs) ? NULL : json_incref(inputs);
  json_array_foreach(files, i, f) rc = rc ? rc : take_file(m, f, err);
  return rc ? rc : take_lists(m, o, err);
}

/* The bytes must be what the object, signed again, would be written as. */
static mr_code load_bytes(mr_manifest *m, const char *bytes, size_t len, mr_err *err) {
  mr_text again = {0};
  mr_json_ran_out();
  json_t *o = mr_json_load(bytes, len);
  mr_code rc = MR_OK;
  if (mr_json_ran_out())
    rc = nomem(err);
  else if (!json_is_object(o))
    rc = mr_err_set(err, MR_E_DATA, "the manifest is damaged: not a JSON object");
  if (!rc) {
    json_object_del(o, "digest");
    rc = dump_signed(o, &again, err);
  }
  if (!rc && (again.len != len || memcmp(again.data, bytes, len) != 0))
    rc = mr_err_set(err, MR_E_DATA,
                    "the manifest is damaged: its digest does not match its content");
  if (!rc)
    rc = from_json(m, o, err);
  json_decref(o);
  mr_text_free(&again);
  return rc;
}

mr_code mr_manifest_load(mr_manifest *m, const char *path, mr_err *err) {
  mr_text t = {0};
  memset(m, 0, sizeof *m);
  int fd = mr_sys_now->open(path, O_RDONLY, 0);
  if (fd < 0)
    return mr_err_errno(err, MR_E_IO, path, "cannot open"); /* 66 would mean: it is not there */
  mr_code rc = mr_slurp(fd, path, MANIFEST_MAX, &t, err);
  mr_sys_now->close(fd);
  if (!rc)
    rc = load_bytes(m, t.data ? t.data : "", t.len, err);
  mr_err_place(err, path, 0, -1);
  mr_text_free(&t);
  if (rc)
    mr_manifest_free(m);
  return rc;
}

const mr_manifest_file *mr_manifest_find(const mr_manifest *m, const char *path) {
  for (int i = 0; i < m->n_files; i++)
    if (!strcmp(m->files[i].name, last_part(path)))
      return &m->files[i];
  return NULL;
}

void mr_manifest_free(mr_manifest *m) {
  for (int i = 0; i < m->n_files; i++)
    mr_mem_free(m->files[i].name);
  for (int i = 0; i < MR_STREAMS; i++)
    mr_mem_free(m->row_list[i]);
  json_decref(m->inputs);
  mr_identity_free(&m->id);
  memset(m, 0, sizeof *m);
}
