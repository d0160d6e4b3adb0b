#include "jobs/refs.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "io/hash.h"
#include "io/json.h"
#include "io/lines.h"
#include "io/mem.h"
#include "io/sys.h"
#include "jobs/rundir.h"

#define WRITE_BYTES ((size_t)256 << 10)
#define NEAR_BYTES ((size_t)64 << 10) /* read at once where records are taken in order */
#define FAR_BYTES ((size_t)4 << 10)
#define ASKED ((uint64_t)1 << 63)
#define NO_GROUP UINT32_MAX

const char *const mr_refs_fields[] = {"answer",     "answers",  "target", "label", "reference",
                                      "references", "expected", "gold",   NULL};

typedef struct entry {
  uint64_t hash; /* of the id */
  uint64_t at;   /* of the record in the file; and ASKED */
} entry;

typedef struct header { /* of a record; id, group and answers follow */
  uint32_t id_bytes, group_bytes, answer_bytes;
  uint32_t text; /* which of the names it came from */
  uint64_t line;
} header;

struct mr_refs {
  entry *entries; /* sorted by hash, then by place */
  size_t n, cap;
  uint64_t blank; /* lines without an answer */
  int fd;
  uint64_t end; /* bytes in the file */
  mr_text out;  /* not yet written */
  char **names; /* of the texts that were read */
  size_t n_names, cap_names;
  char *window; /* bytes of the file from window_at */
  size_t window_len, window_cap;
  uint64_t window_at;
  json_t *answers; /* of the last reference given */
};

/* ------------------------------------------------------------------ values */

const json_t *mr_refs_member(const json_t *object, const char *path) {
  const json_t *v = json_object_get(object, path);
  for (const char *dot = path; !v && (dot = strchr(dot, '.')) != NULL; dot++) {
    const json_t *inner = json_object_getn(object, path, (size_t)(dot - path));
    if (json_is_object(inner))
      v = mr_refs_member(inner, dot + 1);
  }
  return v;
}

static bool is_answer(const json_t *v) {
  return json_is_string(v) || json_is_number(v) || json_is_boolean(v);
}

json_t *mr_refs_answers(const json_t *value) {
  json_t *v = (json_t *)(uintptr_t)value; /* jansson counts references in it */
  bool list = json_is_array(v) && json_array_size(v) > 0;
  for (size_t i = 0; list && i < json_array_size(v); i++)
    list = is_answer(json_array_get(v, i));
  if (list)
    return json_incref(v);
  if (!is_answer(v))
    return NULL;
  json_t *one = json_array();
  if (one && json_array_append(one, v)) {
    json_decref(one);
    one = NULL;
  }
  return one;
}

void mr_refs_text(const json_t *value, mr_text *out) {
  if (json_is_string(value))
    mr_text_add(out, json_string_value(value), json_string_length(value));
  else
    mr_json_add(out, value);
}

/* ------------------------------------------------------------------ the file */

static mr_code no_memory(mr_err *err) {
  return mr_err_set(err, MR_E_NOMEM, "out of memory for references");
}

static mr_code create_file(mr_refs *r, mr_err *err) {
  mr_text path = {0};
  mr_text_addf(&path, "%s/millrace-refs-%ld-%llx", mr_path_temporary(), (long)getpid(),
               (unsigned long long)mr_sys_now->clock_ns());
  if (path.failed)
    return no_memory(err);
  r->fd = mr_sys_now->open(path.data, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  mr_code rc = MR_OK;
  if (r->fd < 0)
    rc = mr_err_errno(err, MR_E_CANTCREATE, path.data, "cannot create a file for references");
  else
    mr_sys_now->unlink(path.data);
  mr_text_free(&path);
  return rc;
}

static mr_code write_out(mr_refs *r, mr_err *err) {
  if (r->out.len && mr_sys_write_full(r->fd, r->out.data, r->out.len))
    return mr_err_errno(err, MR_E_IO, "$TMPDIR", "cannot write references");
  r->end += r->out.len;
  mr_text_clear(&r->out);
  return MR_OK;
}

/* Makes [at, at + n) of the file the beginning of *bytes. */
static mr_code look(mr_refs *r, uint64_t at, size_t n, const char **bytes, mr_err *err) {
  uint64_t window_end = r->window_at + r->window_len;
  if (at > r->end || n > r->end - at)
    return mr_err_set(err, MR_E_INTERNAL, "a reference lies behind the end of its file");
  if (at < r->window_at || at + n > window_end) {
    bool in_order = at >= r->window_at && at <= window_end;
    size_t want = in_order ? NEAR_BYTES : FAR_BYTES;
    want = want < n ? n : want;
    want = want > r->end - at ? (size_t)(r->end - at) : want;
    r->window_len = 0;
    if (want > r->window_cap) {
      char *grown = mr_mem_resize(r->window, want, 1);
      if (!grown)
        return no_memory(err);
      r->window = grown;
      r->window_cap = want;
    }
    ssize_t got = mr_sys_pread_full(r->fd, r->window, want, (off_t)at);
    if (got < 0)
      return mr_err_errno(err, MR_E_IO, "$TMPDIR", "cannot read references back");
    if (got != (ssize_t)want)
      return mr_err_at(err, MR_E_IO, "$TMPDIR", 0, (int64_t)at, "references were cut short");
    r->window_at = at;
    r->window_len = want;
  }
  *bytes = r->window + (at - r->window_at);
  return MR_OK;
}

/* The header at `at` and, behind it, the bytes that it names. */
static mr_code read_record(mr_refs *r, uint64_t at, header *h, const char **bytes, mr_err *err) {
  mr_code rc = look(r, at, sizeof *h, bytes, err);
  if (rc)
    return rc;
  memcpy(h, *bytes, sizeof *h);
  size_t group = h->group_bytes == NO_GROUP ? 0 : h->group_bytes;
  rc = look(r, at, sizeof *h + h->id_bytes + group + h->answer_bytes, bytes, err);
  *bytes += sizeof *h;
  return rc;
}

/* ------------------------------------------------------------------ reading */

typedef struct reader {
  mr_refs *r;
  const mr_refs_opts *o;
  const char *name; /* of the text */
  uint32_t text;
  mr_text id, group, answers; /* of the line */
  bool has_group, blank;
  uint64_t blank_line; /* the first one without an answer */
  mr_err *err;
} reader;

/* The id of a line, or the one that its row would have. */
static mr_code take_id(reader *rd, const json_t *o, uint64_t line) {
  const json_t *v = json_object_get(o, "custom_id");
  v = v ? v : json_object_get(o, "id");
  mr_text_clear(&rd->id);
  if (json_is_string(v) || json_is_integer(v))
    mr_refs_text(v, &rd->id);
  else if (v && !json_is_null(v))
    return mr_err_at(rd->err, MR_E_DATA, rd->name, (int64_t)line, -1,
                     "the id must be a text or a whole number");
  else if (rd->text == 0)
    mr_text_addf(&rd->id, "row-%" PRIu64, line);
  else
    mr_text_addf(&rd->id, "file-%" PRIu32 "-row-%" PRIu64, rd->text + 1, line);
  return rd->id.failed ? no_memory(rd->err) : MR_OK;
}

static const json_t *answer_of(const json_t *o, const char *field) {
  if (field)
    return mr_refs_member(o, field);
  const json_t *v = NULL;
  for (size_t i = 0; !v && mr_refs_fields[i]; i++)
    v = json_object_get(o, mr_refs_fields[i]);
  return v;
}

static mr_code take_answers(reader *rd, const json_t *o, uint64_t line) {
  const json_t *v = answer_of(o, rd->o->field);
  rd->blank = !v || json_is_null(v);
  if (rd->blank) {
    if (!rd->r->blank++)
      rd->blank_line = line;
    return MR_OK;
  }
  json_t *list = mr_refs_answers(v);
  mr_text_clear(&rd->answers);
  if (!list && mr_json_ran_out())
    return no_memory(rd->err);
  if (!list)
    return mr_err_at(rd->err, MR_E_DATA, rd->name, (int64_t)line, -1,
                     "the answer must be a text, a number, true or false, or a list of these that "
                     "is not empty (a path such as answers.text names a field inside of another)");
  mr_json_add(&rd->answers, list);
  json_decref(list);
  return rd->answers.failed ? no_memory(rd->err) : MR_OK;
}

static mr_code take_group(reader *rd, const json_t *o) {
  const json_t *v = rd->o->by ? mr_refs_member(o, rd->o->by) : NULL;
  mr_text_clear(&rd->group);
  rd->has_group = v != NULL;
  if (v)
    mr_refs_text(v, &rd->group);
  return rd->group.failed ? no_memory(rd->err) : MR_OK;
}

static mr_code store(reader *rd, uint64_t line) {
  mr_refs *r = rd->r;
  uint64_t at = r->end + r->out.len;
  header h = {.id_bytes = (uint32_t)rd->id.len,
              .group_bytes = rd->has_group ? (uint32_t)rd->group.len : NO_GROUP,
              .answer_bytes = (uint32_t)rd->answers.len,
              .text = rd->text,
              .line = line};
  if (!mr_mem_grow((void **)&r->entries, &r->cap, r->n + 1, sizeof *r->entries))
    return no_memory(rd->err);
  r->entries[r->n++] = (entry){mr_hash_64(rd->id.len ? rd->id.data : "", rd->id.len), at};
  mr_text_add(&r->out, &h, sizeof h);
  mr_text_add(&r->out, rd->id.data, rd->id.len);
  mr_text_add(&r->out, rd->group.data, rd->group.len);
  mr_text_add(&r->out, rd->answers.data, rd->answers.len);
  if (r->out.failed)
    return no_memory(rd->err);
  return r->out.len >= WRITE_BYTES ? write_out(r, rd->err) : MR_OK;
}

static mr_code read_line(reader *rd, const mr_line *line) {
  int64_t number = (int64_t)line->number;
  if (line->too_long)
    return mr_err_at(rd->err, MR_E_DATA, rd->name, number, -1,
                     "a line of %zu bytes; references have at most %zu", line->len,
                     MR_REFS_LINE_MAX);
  mr_err why = MR_ERR_INIT;
  mr_json_ran_out();
  json_t *o = mr_json_parse(line->s, line->len, NULL, &why);
  if (!o)
    return mr_err_at(rd->err, why.code, rd->name, number, -1, "%s", why.text);
  mr_code rc = json_is_object(o) ? MR_OK
                                 : mr_err_at(rd->err, MR_E_DATA, rd->name, number, -1,
                                             "is not a JSON object with an id and an answer");
  if (!rc)
    rc = take_id(rd, o, line->number);
  if (!rc)
    rc = take_answers(rd, o, line->number);
  if (!rc)
    rc = take_group(rd, o);
  json_decref(o);
  return rc || rd->blank ? rc : store(rd, line->number);
}

static mr_code add_name(reader *rd) {
  mr_refs *r = rd->r;
  char *copy = mr_mem_copy(rd->name, strlen(rd->name));
  if (!copy || !mr_mem_grow((void **)&r->names, &r->cap_names, r->n_names + 1, sizeof *r->names)) {
    mr_mem_free(copy);
    return no_memory(rd->err);
  }
  rd->text = (uint32_t)r->n_names;
  r->names[r->n_names++] = copy;
  return MR_OK;
}

static mr_code read_texts(reader *rd, mr_source *s, mr_lines *l) {
  for (;;) {
    bool more;
    mr_line line;
    mr_code rc = mr_source_next(s, &more, rd->err);
    if (rc || !more)
      return rc;
    rd->name = mr_source_name(s);
    rc = add_name(rd);
    mr_lines_start(l);
    while (!rc && (rc = mr_lines_next(l, &line, rd->err)) == MR_OK && line.s)
      rc = read_line(rd, &line);
    if (rc)
      return rc;
  }
}

/* One line may lack its answer; all of them have another name for it. */
static mr_code refuse_blanks(const reader *rd) {
  const mr_refs *r = rd->r;
  if (r->n || !r->blank)
    return MR_OK;
  if (rd->o->field)
    return mr_err_at(rd->err, MR_E_DATA, r->names[0], (int64_t)rd->blank_line, -1,
                     "no line has the field %.100s", rd->o->field);
  return mr_err_at(rd->err, MR_E_DATA, r->names[0], (int64_t)rd->blank_line, -1,
                   "no line has one of the fields answer, answers, target, label, reference, "
                   "references, expected, gold; --ref-field names another");
}

static mr_code read_all(mr_refs *r, const mr_refs_opts *o, mr_err *err) {
  reader rd = {.r = r, .o = o, .err = err};
  mr_source *s;
  mr_lines l;
  mr_code rc = mr_source_open(&s, o->files, o->n, err);
  if (rc)
    return rc;
  mr_lines_init(&l, s, MR_REFS_LINE_MAX, NULL);
  rc = read_texts(&rd, s, &l);
  if (!rc)
    rc = refuse_blanks(&rd);
  mr_lines_free(&l);
  mr_source_close(s);
  mr_text_free(&rd.id);
  mr_text_free(&rd.group);
  mr_text_free(&rd.answers);
  return rc ? rc : write_out(r, err);
}

/* ------------------------------------------------------------------ the table */

static int by_hash(const void *a, const void *b) {
  const entry *x = a, *y = b;
  if (x->hash != y->hash)
    return x->hash < y->hash ? -1 : 1;
  return x->at < y->at ? -1 : x->at > y->at;
}

static mr_code same_id(mr_refs *r, const entry *a, const entry *b, mr_err *err) {
  header h;
  const char *bytes;
  mr_text id = {0};
  mr_code rc = read_record(r, a->at, &h, &bytes, err);
  if (rc)
    return rc;
  uint32_t text = h.text;
  uint64_t line = h.line;
  mr_text_add(&id, bytes, h.id_bytes);
  rc = id.failed ? no_memory(err) : read_record(r, b->at, &h, &bytes, err);
  if (!rc && h.id_bytes == id.len && (!id.len || !memcmp(bytes, id.data, id.len)))
    rc = mr_err_at(err, MR_E_DATA, r->names[h.text], (int64_t)h.line, -1,
                   "the id %.200s stands in line %" PRIu64 "%s%.200s too; a row has one reference",
                   id.len ? id.data : "", line, text == h.text ? "" : " of ",
                   text == h.text ? "" : r->names[text]);
  mr_text_free(&id);
  return rc;
}

/* Two of one id would leave it open which of them counts. */
static mr_code refuse_doubles(mr_refs *r, mr_err *err) {
  mr_code rc = MR_OK;
  for (size_t i = 1; !rc && i < r->n; i++)
    for (size_t k = i; !rc && k > 0 && r->entries[k - 1].hash == r->entries[i].hash; k--)
      rc = same_id(r, &r->entries[k - 1], &r->entries[i], err);
  return rc;
}

mr_code mr_refs_open(mr_refs **out, const mr_refs_opts *o, mr_err *err) {
  mr_refs *r = mr_mem_alloc(1, sizeof *r);
  *out = NULL;
  if (!r)
    return no_memory(err);
  r->fd = -1;
  mr_code rc = create_file(r, err);
  if (!rc)
    rc = read_all(r, o, err);
  if (!rc && r->n)
    qsort(r->entries, r->n, sizeof *r->entries, by_hash);
  if (!rc)
    rc = refuse_doubles(r, err);
  if (rc)
    mr_refs_close(r);
  else
    *out = r;
  return rc;
}

uint64_t mr_refs_count(const mr_refs *r) {
  return r->n;
}

/* The first entry whose hash is not less. */
static size_t lower_bound(const mr_refs *r, uint64_t hash) {
  size_t from = 0, to = r->n;
  while (from < to) {
    size_t middle = from + (to - from) / 2;
    if (r->entries[middle].hash < hash)
      from = middle + 1;
    else
      to = middle;
  }
  return from;
}

static mr_code give(mr_refs *r, entry *e, const header *h, const char *bytes, mr_ref *ref,
                    mr_err *err) {
  bool has_group = h->group_bytes != NO_GROUP;
  size_t group = has_group ? h->group_bytes : 0;
  json_decref(r->answers);
  r->answers = mr_json_load(bytes + h->id_bytes + group, h->answer_bytes);
  if (!r->answers)
    return no_memory(err);
  *ref = (mr_ref){.id = {bytes, h->id_bytes},
                  .group = {has_group ? bytes + h->id_bytes : NULL, group},
                  .answers = r->answers,
                  .asked = e->at & ASKED};
  return MR_OK;
}

uint64_t mr_refs_blank(const mr_refs *r) {
  return r->blank;
}

mr_code mr_refs_find(mr_refs *r, mr_str id, mr_ref *ref, bool *found, mr_err *err) {
  uint64_t hash = mr_hash_64(id.s, id.len);
  *found = false;
  for (size_t i = lower_bound(r, hash); i < r->n && r->entries[i].hash == hash; i++) {
    entry *e = &r->entries[i];
    header h;
    const char *bytes;
    mr_code rc = read_record(r, e->at & ~ASKED, &h, &bytes, err);
    if (rc)
      return rc;
    if (h.id_bytes != id.len || memcmp(bytes, id.s, id.len) != 0)
      continue;
    *found = true;
    rc = give(r, e, &h, bytes, ref, err);
    e->at |= ASKED;
    return rc;
  }
  return MR_OK;
}

static entry *entry_at(const mr_refs *r, uint64_t hash, uint64_t at) {
  size_t i = lower_bound(r, hash);
  while (i < r->n && (r->entries[i].at & ~ASKED) != at)
    i++;
  return &r->entries[i];
}

mr_code mr_refs_rest(mr_refs *r, uint64_t *at, mr_ref *ref, bool *more, mr_err *err) {
  *more = false;
  while (*at < r->end) {
    header h;
    const char *bytes;
    mr_code rc = read_record(r, *at, &h, &bytes, err);
    if (rc)
      return rc;
    entry *e = entry_at(r, mr_hash_64(bytes, h.id_bytes), *at);
    size_t group = h.group_bytes == NO_GROUP ? 0 : h.group_bytes;
    *at += sizeof h + h.id_bytes + group + h.answer_bytes;
    if (e->at & ASKED)
      continue;
    *more = true;
    return give(r, e, &h, bytes, ref, err);
  }
  return MR_OK;
}

void mr_refs_close(mr_refs *r) {
  if (!r)
    return;
  if (r->fd >= 0)
    mr_sys_now->close(r->fd);
  for (size_t i = 0; i < r->n_names; i++)
    mr_mem_free(r->names[i]);
  mr_mem_free(r->names);
  mr_mem_free(r->entries);
  mr_mem_free(r->window);
  mr_text_free(&r->out);
  json_decref(r->answers);
  mr_mem_free(r);
}
