#include "jobs/identity.h"

#include <string.h>

#include "io/json.h"
#include "io/mem.h"

#define ROWS_MAX ((json_int_t)1 << 40)
#define DUMP (JSON_COMPACT | JSON_SORT_KEYS | JSON_ENCODE_ANY)

static mr_code nomem(mr_err *err) {
  return mr_err_set(err, MR_E_NOMEM, "out of memory");
}

mr_code mr_identity_set_options(mr_job_identity *id, json_t *options, mr_err *err) {
  char *text = options ? mr_json_dumps(options, DUMP) : NULL;
  if (!text) {
    json_decref(options);
    return nomem(err);
  }
  mr_hash_hex(text, strlen(text), id->options_digest);
  mr_mem_free(text);
  json_decref(id->options);
  id->options = options;
  return MR_OK;
}

void mr_identity_make_id(mr_job_identity *id) {
  char all[512];
  int n = snprintf(all, sizeof all, "%s %s %s %s", id->input_digest, id->model_digest,
                   id->options_digest, id->numerics);
  mr_hash_hex(all, (size_t)n, id->job_id);
}

/* jansson's unpack says the same when memory runs out. */
static mr_code damaged(const char *what, mr_err *err) {
  return mr_json_ran_out() ? nomem(err) : mr_err_set(err, MR_E_DATA, "%s", what);
}

static json_t *part_to_json(const mr_identity_part *p) {
  return json_pack("{s:i, s:i, s:I, s:I}", "index", p->index, "of", p->of, "job_rows",
                   (json_int_t)p->job_rows, "cut", (json_int_t)p->cut);
}

json_t *mr_identity_to_json(const mr_job_identity *id) {
  json_t *o = json_pack("{s:s, s:I, s:s, s:s, s:s, s:s, s:I, s:O}", "job_id", id->job_id, "created",
                        (json_int_t)id->created, "input_digest", id->input_digest, "model_digest",
                        id->model_digest, "options_digest", id->options_digest, "numerics",
                        id->numerics, "rows", (json_int_t)id->rows, "options", id->options);
  if (o && id->part.of && json_object_set_new(o, "shard", part_to_json(&id->part))) {
    json_decref(o);
    return NULL;
  }
  return o;
}

static bool take_hex(char to[MR_HASH_HEX], const char *hex) {
  if (strlen(hex) != MR_HASH_HEX - 1 || strspn(hex, "0123456789abcdef") != MR_HASH_HEX - 1)
    return false;
  memcpy(to, hex, MR_HASH_HEX);
  return true;
}

/* Absent: the whole job. */
static bool take_part(mr_job_identity *id, json_t *o) {
  json_int_t job_rows, cut;
  mr_identity_part *p = &id->part;
  if (!o)
    return true;
  if (json_unpack(o, "{s:i, s:i, s:I, s:I}", "index", &p->index, "of", &p->of, "job_rows",
                  &job_rows, "cut", &cut) ||
      p->of < 1 || p->index < 1 || p->index > p->of || job_rows < 0 || job_rows > ROWS_MAX ||
      cut < 0 || id->rows > (uint64_t)job_rows)
    return false;
  p->job_rows = (uint64_t)job_rows;
  p->cut = (uint64_t)cut;
  return true;
}

mr_code mr_identity_from_json(mr_job_identity *id, const json_t *o, mr_err *err) {
  const char *job, *input, *model, *options, *numerics;
  json_int_t created, rows;
  json_t *opts, *root = (json_t *)(uintptr_t)o; /* jansson's unpack only reads */
  memset(id, 0, sizeof *id);
  if (json_unpack(root, "{s:s, s:I, s:s, s:s, s:s, s:s, s:I, s:o}", "job_id", &job, "created",
                  &created, "input_digest", &input, "model_digest", &model, "options_digest",
                  &options, "numerics", &numerics, "rows", &rows, "options", &opts) ||
      !take_hex(id->job_id, job) || !take_hex(id->input_digest, input) ||
      !take_hex(id->model_digest, model) || !take_hex(id->options_digest, options) ||
      strlen(numerics) >= sizeof id->numerics || rows < 0 || !json_is_object(opts))
    return damaged("the identity of the job in it is damaged or of another version", err);
  id->rows = (uint64_t)rows;
  if (!take_part(id, json_object_get(o, "shard")))
    return damaged("the shard in the identity of the job is damaged", err);
  memcpy(id->numerics, numerics, strlen(numerics) + 1);
  id->created = created;
  id->options = json_incref(opts);
  return MR_OK;
}

mr_code mr_identity_parse(mr_job_identity *id, const void *text, size_t len) {
  mr_err e = MR_ERR_INIT;
  mr_json_ran_out(); /* before this */
  json_t *o = mr_json_load(text, len);
  mr_code rc = mr_identity_from_json(id, o, &e);
  json_decref(o);
  if (!mr_json_ran_out())
    return rc;
  mr_identity_free(id);
  return MR_E_NOMEM;
}

static void add_words(mr_text *t, const char *words) {
  mr_text_addf(t, "%s%s", t->len ? "; " : "", words);
}

static void add_value(mr_text *t, const json_t *v) {
  char *s = v ? mr_json_dumps(v, DUMP) : NULL;
  if (s && strlen(s) > 60)
    mr_text_adds(t, "a long value");
  else
    mr_text_adds(t, s ? s : "not set");
  mr_mem_free(s);
}

static void differ_options(const json_t *old, const json_t *now, mr_text *words) {
  const char *key;
  json_t *v, *both = json_object();
  if (!both || json_object_update(both, (json_t *)(uintptr_t)old) ||
      json_object_update(both, (json_t *)(uintptr_t)now)) {
    json_decref(both);
    add_words(words, "an option");
    return;
  }
  json_object_foreach(both, key, v) {
    const json_t *a = json_object_get(old, key), *b = json_object_get(now, key);
    if (a && b && json_equal(a, b))
      continue;
    mr_text_addf(words, "%soption %s (", words->len ? "; " : "", key);
    add_value(words, b);
    mr_text_adds(words, ", was ");
    add_value(words, a);
    mr_text_addc(words, ')');
  }
  json_decref(both);
}

static void add_part(mr_text *words, const mr_identity_part *p) {
  if (p->of)
    mr_text_addf(words, "%d/%d", p->index, p->of);
  else
    mr_text_adds(words, "the whole job");
}

static void differ_part(const mr_identity_part *old, const mr_identity_part *now, mr_text *words) {
  add_words(words, "the shard (");
  add_part(words, now);
  mr_text_adds(words, ", was ");
  add_part(words, old);
  mr_text_addc(words, ')');
}

void mr_identity_differ(const mr_job_identity *old, const mr_job_identity *now, mr_text *words) {
  bool same_part = old->part.index == now->part.index && old->part.of == now->part.of;
  if (strcmp(old->input_digest, now->input_digest) != 0)
    add_words(words, "the text of the inputs");
  else if (same_part && old->rows != now->rows)
    mr_text_addf(words, "%sthe number of rows (%llu, was %llu)", words->len ? "; " : "",
                 (unsigned long long)now->rows, (unsigned long long)old->rows);
  if (!same_part)
    differ_part(&old->part, &now->part, words);
  if (strcmp(old->model_digest, now->model_digest) != 0)
    add_words(words, "the model file");
  if (strcmp(old->options_digest, now->options_digest) != 0)
    differ_options(old->options, now->options, words);
  if (strcmp(old->numerics, now->numerics) != 0)
    mr_text_addf(words, "%sthe numerics (%s, was %s; --other-numerics lets them be)",
                 words->len ? "; " : "", now->numerics, old->numerics);
}

mr_code mr_identity_copy(mr_job_identity *to, const mr_job_identity *from, mr_err *err) {
  json_t *options = json_deep_copy(from->options);
  if (!options)
    return nomem(err);
  mr_identity_free(to);
  *to = *from;
  to->options = options;
  return MR_OK;
}

void mr_identity_free(mr_job_identity *id) {
  json_decref(id->options);
  memset(id, 0, sizeof *id);
}
