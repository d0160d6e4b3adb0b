#include "jobs/check.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "io/json.h"
#include "io/lines.h"
#include "io/mem.h"
#include "io/sorter.h"
#include "io/sys.h"
#include "io/zframe.h"
#include "jobs/journal.h"

#define PROBLEMS_SHOWN 20
#define LINE_MAX_BYTES ((size_t)1 << 31)

/* An id, by its hash; two different ones of 10 million share one with probability 1e-25. */
typedef struct seen_id {
  uint64_t hash[2], line;
} seen_id;

typedef struct repeat { /* a line with the id of an earlier one */
  uint64_t line, first;
} repeat;

typedef struct reader {
  mr_check *c;
  const char *name;
  bool results; /* not the errors file */
  uint64_t line;
  mr_sorter *ids;
  mr_err *err;
} reader;

__attribute__((format(printf, 2, 3))) static void problem(mr_check *c, const char *fmt, ...) {
  char buf[1024];
  va_list ap;
  if (++c->problems > PROBLEMS_SHOWN)
    return;
  va_start(ap, fmt);
  vsnprintf(buf, sizeof buf, fmt, ap);
  va_end(ap);
  mr_text_addf(&c->words, "%s\n", buf);
}

/* An error of a lower layer about a file is a finding here, unless it says nothing about the file.
 */
static mr_code finding(mr_check *c, mr_code rc, mr_err *e, mr_err *err) {
  char buf[sizeof e->file + sizeof e->text + 64];
  if (rc == MR_OK)
    return MR_OK;
  if (rc == MR_E_NOMEM)
    return mr_err_set(err, rc, "out of memory");
  problem(c, "%s", mr_err_format(e, buf, sizeof buf));
  return MR_OK;
}

/* ---- lines */

/* A flat line has the usage itself; a field of the input that is named as those of a batch's line
 * (custom_id, response) may stand beside it. */
static const json_t *flat_usage(const json_t *line) {
  return json_object_get(line, "usage");
}

static void add_usage(reader *r, const json_t *line) {
  const json_t *usage = flat_usage(line);
  if (!usage)
    usage = json_object_get(json_object_get(json_object_get(line, "response"), "body"), "usage");
  json_int_t prompt = json_integer_value(json_object_get(usage, "prompt_tokens"));
  json_int_t output = json_integer_value(json_object_get(usage, "completion_tokens"));
  r->c->prompt_tokens += prompt > 0 ? (uint64_t)prompt : 0;
  r->c->output_tokens += output > 0 ? (uint64_t)output : 0;
}

static int by_id(const void *a, const void *b) {
  const seen_id *x = a, *y = b;
  int d = mr_sorter_compare(x->hash[0], y->hash[0]);
  d = d ? d : mr_sorter_compare(x->hash[1], y->hash[1]);
  return d ? d : mr_sorter_compare(x->line, y->line);
}

static int by_line(const void *a, const void *b) {
  return mr_sorter_compare(((const repeat *)a)->line, ((const repeat *)b)->line);
}

static mr_code check_id(reader *r, const json_t *line) {
  const json_t *id = json_object_get(line, flat_usage(line) ? "id" : "custom_id");
  seen_id s = {.line = r->line};
  char number[32]; /* 7 and "7" are one id */
  if (json_is_string(id)) {
    mr_hash_128(json_string_value(id), json_string_length(id), s.hash);
  } else if (json_is_integer(id)) {
    int n = snprintf(number, sizeof number, "%" JSON_INTEGER_FORMAT, json_integer_value(id));
    mr_hash_128(number, (size_t)n, s.hash);
  } else {
    problem(r->c, "%s:%" PRIu64 ": a result without an id", r->name, r->line);
    return MR_OK;
  }
  mr_code rc =
      r->ids ? MR_OK : mr_sorter_open(&r->ids, mr_path_temporary(), sizeof s, by_id, 0, r->err);
  return rc ? rc : mr_sorter_add(r->ids, &s, r->err);
}

/* Goes through the ids in the order of their hashes. */
static mr_code find_repeats(reader *r, mr_sorter *repeats) {
  seen_id first = {{0, 0}, 0}, s;
  bool more;
  mr_code rc = mr_sorter_sort(r->ids, r->err);
  while (!rc && (rc = mr_sorter_next(r->ids, &s, &more, r->err)) == MR_OK && more) {
    if (!first.line || memcmp(first.hash, s.hash, sizeof s.hash) != 0)
      first = s;
    else
      rc = mr_sorter_add(repeats, &(repeat){s.line, first.line}, r->err);
  }
  return rc ? rc : mr_sorter_sort(repeats, r->err);
}

static mr_code check_repeats(reader *r) {
  mr_sorter *repeats;
  repeat t;
  bool more;
  if (!r->ids)
    return MR_OK;
  mr_code rc = mr_sorter_open(&repeats, mr_path_temporary(), sizeof t, by_line, 0, r->err);
  if (rc)
    return rc;
  rc = find_repeats(r, repeats);
  while (!rc && (rc = mr_sorter_next(repeats, &t, &more, r->err)) == MR_OK && more)
    problem(r->c, "%s:%" PRIu64 ": its id is that of line %" PRIu64, r->name, t.line, t.first);
  mr_sorter_close(repeats);
  return rc;
}

static mr_code check_line(reader *r, const char *s, size_t len) {
  mr_json_ran_out();
  json_t *o = mr_json_load(s, len);
  mr_code rc = MR_OK;
  if (mr_json_ran_out())
    return mr_err_set(r->err, MR_E_NOMEM, "out of memory for a line");
  r->line++;
  r->results ? r->c->rows_ok++ : r->c->rows_failed++;
  if (!json_is_object(o)) {
    problem(r->c, "%s:%" PRIu64 ": not a JSON object", r->name, r->line);
  } else if (r->results) {
    add_usage(r, o);
    rc = check_id(r, o);
  }
  json_decref(o);
  return rc;
}

static mr_code check_text(reader *r, const mr_text *t) {
  for (size_t at = 0; at < t->len;) {
    const char *s = t->data + at, *nl = memchr(s, '\n', t->len - at);
    if (!nl) {
      problem(r->c, "%s: a frame does not end with a line", r->name);
      return MR_OK;
    }
    mr_code rc = check_line(r, s, (size_t)(nl - s));
    if (rc)
      return rc;
    at += (size_t)(nl - s) + 1;
  }
  return MR_OK;
}

static mr_code read_frames(reader *r, const char *path) {
  mr_zfile *f;
  mr_err e = MR_ERR_INIT;
  mr_text t = {0};
  mr_code rc = mr_zfile_open(&f, path, &e);
  if (rc)
    return finding(r->c, rc, &e, r->err);
  for (uint32_t i = 0; !rc && i < mr_zfile_frames(f); i++) {
    rc = mr_zfile_read(f, i, &t, &e);
    if (rc) {
      rc = finding(r->c, rc, &e, r->err);
      break;
    }
    rc = check_text(r, &t);
  }
  mr_text_free(&t);
  mr_zfile_close(f);
  return rc;
}

static mr_code read_source(reader *r, mr_source *s, mr_err *e) {
  mr_lines l;
  mr_line line;
  bool more;
  mr_code rc = mr_source_next(s, &more, e);
  if (rc || !more)
    return rc;
  mr_lines_init(&l, s, LINE_MAX_BYTES, NULL);
  mr_lines_start(&l);
  while ((rc = mr_lines_next(&l, &line, e)) == MR_OK && line.s)
    if ((rc = check_line(r, line.s, line.len)) != MR_OK)
      break;
  mr_lines_free(&l);
  return rc;
}

static mr_code read_lines(reader *r, const char *path) {
  mr_source *s;
  mr_err e = MR_ERR_INIT;
  mr_code rc = mr_source_open(&s, &path, 1, &e);
  if (rc)
    return finding(r->c, rc, &e, r->err);
  rc = read_source(r, s, &e);
  mr_source_close(s);
  return r->err->code ? r->err->code : finding(r->c, rc, &e, r->err);
}

static bool ends_with(const char *s, const char *end) {
  size_t n = strlen(s), k = strlen(end);
  return n >= k && !strcmp(s + n - k, end);
}

static mr_code check_rows(mr_check *c, const char *path, bool results, const mr_manifest_file *f,
                          mr_err *err) {
  reader r = {.c = c, .name = path, .results = results, .err = err};
  mr_code rc = ends_with(path, ".zst") ? read_frames(&r, path)
               : f->bytes              ? read_lines(&r, path)
                                       : MR_OK;
  if (!rc)
    rc = check_repeats(&r);
  mr_sorter_close(r.ids);
  if (!rc && r.line != f->lines)
    problem(c, "%s: %" PRIu64 " lines, and the manifest says %" PRIu64, path, r.line, f->lines);
  return rc;
}

/* ---- files */

static mr_code check_file(mr_check *c, const char *path, const mr_manifest_file *f, mr_err *err) {
  char hex[MR_HASH_HEX];
  uint64_t size = 0;
  mr_err e = MR_ERR_INIT;
  mr_code rc = mr_hash_file(path, hex, &size, &e);
  if (rc)
    return finding(c, rc, &e, err);
  c->files++;
  c->bytes += size;
  if (size != f->bytes)
    problem(c, "%s: %" PRIu64 " bytes, and the manifest says %" PRIu64, path, size, f->bytes);
  else if (strcmp(hex, f->digest) != 0)
    problem(c, "%s: its digest is %s, and the manifest says %s", path, hex, f->digest);
  return MR_OK;
}

/* The path of a file that lies beside the manifest. */
static mr_code beside(const mr_paths *p, const char *name, mr_text *path, mr_err *err) {
  const char *manifest = p->final[MR_FINAL_MANIFEST], *slash = strrchr(manifest, '/');
  mr_text_clear(path);
  mr_text_add(path, manifest, slash ? (size_t)(slash - manifest) + 1 : 0);
  mr_text_adds(path, name);
  return path->failed ? mr_err_set(err, MR_E_NOMEM, "out of memory") : MR_OK;
}

static void compare_sums(mr_check *c, const mr_manifest *m) {
  if (c->rows_ok != m->rows_ok || c->rows_failed != m->rows_failed ||
      c->rows_ok + c->rows_failed != m->id.rows)
    problem(c,
            "%" PRIu64 " results and %" PRIu64 " errors, and the manifest says %" PRIu64
            " and %" PRIu64 " of %" PRIu64 " rows",
            c->rows_ok, c->rows_failed, m->rows_ok, m->rows_failed, m->id.rows);
  if (c->prompt_tokens != m->prompt_tokens || c->output_tokens != m->output_tokens)
    problem(c,
            "%" PRIu64 " prompt and %" PRIu64 " output tokens, and the manifest says %" PRIu64
            " and %" PRIu64,
            c->prompt_tokens, c->output_tokens, m->prompt_tokens, m->output_tokens);
}

mr_code mr_check_finished(mr_check *c, const mr_paths *p, const mr_manifest *m, mr_err *err) {
  mr_text path = {0};
  mr_code rc = MR_OK;
  bool has_results = false;
  c->rows = m->id.rows;
  for (int i = 0; !rc && i < m->n_files; i++) {
    const mr_manifest_file *f = &m->files[i];
    bool errors = ends_with(f->name, ".errors.jsonl.zst"),
         report = strstr(f->name, ".report.") != NULL;
    rc = beside(p, f->name, &path, err);
    if (!rc)
      rc = check_file(c, path.data, f, err);
    if (!rc && (errors || !report))
      rc = check_rows(c, path.data, !errors, f, err);
    has_results |= !errors && !report;
  }
  if (!has_results)
    problem(c, "the manifest lists no results");
  if (!rc)
    compare_sums(c, m);
  mr_text_free(&path);
  return rc;
}

/* ---- an unfinished job */

typedef struct state {
  mr_check *c;
  const mr_paths *p;
  int fd[MR_STREAMS];
  uint64_t end[MR_STREAMS];
} state;

/* MR_E_DATA: the frame cannot be read, or is not the one that was named. */
static mr_code check_frame(const state *s, const mr_frame_rec *rec) {
  mr_text t = {0};
  mr_err e = MR_ERR_INIT;
  if (rec->bytes == 0 || rec->bytes > MR_ZFRAME_MAX || rec->text_bytes > MR_ZFRAME_MAX)
    return MR_E_DATA;
  size_t n = (size_t)rec->bytes;
  char *buf = mr_mem_alloc(n, 1);
  if (!buf)
    return MR_E_NOMEM;
  mr_code rc = MR_E_DATA;
  if (rec->offset == s->end[rec->stream] &&
      mr_sys_pread_full(s->fd[rec->stream], buf, n, (off_t)rec->offset) == (ssize_t)n &&
      mr_hash_64(buf, n) == rec->check)
    rc = mr_zframe_unpack(buf, n, (size_t)rec->text_bytes, "", &t, &e);
  mr_mem_free(buf);
  mr_text_free(&t);
  return rc;
}

static mr_code check_record(void *ctx, uint32_t type, const unsigned char *payload, size_t len) {
  state *s = ctx;
  mr_frame_rec rec;
  if (type == MR_RECORD_HEADER) {
    mr_job_identity id;
    mr_code rc = mr_identity_parse(&id, payload, len);
    s->c->rows = id.rows;
    mr_identity_free(&id);
    return rc;
  }
  if (type != MR_RECORD_FRAME)
    return type == MR_RECORD_RUN ? MR_OK : MR_E_DATA;
  if (!mr_framerec_decode(&rec, payload, len, s->c->rows))
    return MR_E_DATA;
  mr_code rc = check_frame(s, &rec);
  if (rc == MR_E_NOMEM)
    return rc;
  if (rc)
    problem(s->c, "%s: the frame at byte %" PRIu64 " is damaged; its rows will be computed again",
            s->p->frames[rec.stream], rec.offset);
  s->end[rec.stream] += rec.bytes;
  *(rec.stream == MR_LINE_ERROR ? &s->c->rows_failed : &s->c->rows_ok) += rec.n_lines;
  s->c->prompt_tokens += rec.prompt_tokens;
  s->c->output_tokens += rec.output_tokens;
  return MR_OK;
}

mr_code mr_check_state(mr_check *c, const mr_paths *p, mr_err *err) {
  state s = {.c = c, .p = p};
  mr_err e = MR_ERR_INIT;
  uint64_t torn = 0;
  for (int i = 0; i < MR_STREAMS; i++)
    s.fd[i] = mr_sys_now->open(p->frames[i], O_RDONLY, 0);
  mr_code rc = mr_journal_read(p->journal, check_record, &s, &torn, &e);
  for (int i = 0; i < MR_STREAMS; i++)
    if (s.fd[i] >= 0)
      mr_sys_now->close(s.fd[i]);
  if (!rc && torn)
    problem(c, "%s: %" PRIu64 " bytes at the end are not whole records; the next run cuts them off",
            p->journal, torn);
  return finding(c, rc, &e, err);
}

void mr_check_free(mr_check *c) {
  mr_text_free(&c->words);
}
