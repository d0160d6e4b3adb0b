#include "jobs/commit.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>

#include "io/durable.h"
#include "io/json.h"
#include "io/mem.h"
#include "io/sys.h"
#include "io/zframe.h"
#include "jobs/assemble.h"
#include "jobs/journal.h"
#include "jobs/outfile.h"

#define FRAME_LINES 256
#define FRAME_BYTES ((size_t)256 << 10)
#define FLUSH_S 2.0
#define FRAME_LEVEL 1 /* the working frames live until assembly: speed counts */
#define ROWS_MAX ((uint64_t)1 << 40)

typedef struct stream {
  int fd;
  const char *path;
  uint64_t end; /* C3: where the last named frame ends */
  mr_text text; /* buffered lines */
  mr_frame_line *lines;
  size_t n, cap;
  uint64_t prompt_tokens, output_tokens;
} stream;

struct mr_commit {
  const mr_paths *paths;
  int lock_fd;
  mr_journal *journal;
  mr_job_identity id; /* options NULL: none yet */
  mr_manifest manifest;
  bool finished;
  stream s[MR_STREAMS];
  unsigned char *done;   /* [(rows + 7) / 8] bits: durable or buffered */
  unsigned char *failed; /* [(rows + 7) / 8] bits: their lines are errors; after assembly */
  uint64_t n_done;
  mr_commit_totals t;
  mr_zpack *pack;
  mr_text frame, record;
  double oldest_s; /* when the oldest buffered line came; 0: nothing buffered */
  bool broken;     /* C5 */
};

static mr_code nomem(mr_err *err) {
  return mr_err_set(err, MR_E_NOMEM, "out of memory");
}

/* ---- replay */

static mr_code take_header(mr_commit *c, const unsigned char *payload, size_t len) {
  mr_code rc = mr_identity_parse(&c->id, payload, len);
  if (rc || c->id.rows > ROWS_MAX)
    return rc ? rc : MR_E_DATA;
  c->done = mr_mem_alloc((size_t)(c->id.rows + 7) / 8, 1);
  return c->done ? MR_OK : MR_E_NOMEM;
}

/* C4: is the frame there, and is it the one that was named? */
static mr_code check_frame(const stream *s, const mr_frame_rec *rec) {
  if (rec->offset != s->end || rec->bytes == 0 || rec->bytes > MR_ZFRAME_MAX)
    return MR_E_DATA;
  void *buf = mr_mem_alloc((size_t)rec->bytes, 1);
  if (!buf)
    return MR_E_NOMEM;
  ssize_t n = mr_sys_pread_full(s->fd, buf, (size_t)rec->bytes, (off_t)rec->offset);
  bool whole = n == (ssize_t)rec->bytes && mr_hash_64(buf, (size_t)rec->bytes) == rec->check;
  mr_mem_free(buf);
  return n < 0 ? MR_E_IO : whole ? MR_OK : MR_E_DATA;
}

static bool set_done(mr_commit *c, uint64_t row) {
  unsigned char bit = (unsigned char)(1u << (row & 7));
  if (c->done[row >> 3] & bit)
    return false;
  c->done[row >> 3] |= bit;
  c->n_done++;
  return true;
}

/* C1: all of a record's rows are new, or none is taken. */
static bool rows_are_new(mr_commit *c, const mr_frame_rec *rec) {
  mr_frame_line l = {0};
  const unsigned char *p = rec->lines;
  while (mr_framerec_next(rec, &p, &l)) {
    if (set_done(c, l.row))
      continue;
    mr_frame_line u = {0};
    const unsigned char *stop = p, *q = rec->lines;
    while (mr_framerec_next(rec, &q, &u) && q < stop)
      c->done[u.row >> 3] &= (unsigned char)~(1u << (u.row & 7)), c->n_done--;
    return false;
  }
  return true;
}

static void count_frame(mr_commit *c, const mr_frame_rec *rec) {
  c->s[rec->stream].end += rec->bytes;
  *(rec->stream == MR_LINE_ERROR ? &c->t.rows_failed : &c->t.rows_ok) += rec->n_lines;
  c->t.prompt_tokens += rec->prompt_tokens;
  c->t.output_tokens += rec->output_tokens;
  c->t.frames++;
  c->t.frame_bytes += rec->bytes;
  c->t.text_bytes += rec->text_bytes;
}

static void take_run(mr_commit *c, const unsigned char *payload, size_t len) {
  json_t *o = mr_json_load((const char *)payload, len);
  c->t.earlier_runs++;
  c->t.earlier_s += json_number_value(json_object_get(o, "seconds"));
  json_decref(o);
}

static mr_code replay(void *ctx, uint32_t type, const unsigned char *payload, size_t len) {
  mr_commit *c = ctx;
  mr_frame_rec rec;
  mr_code rc;
  switch (type) {
  case MR_RECORD_HEADER:
    return take_header(c, payload, len);
  case MR_RECORD_RUN:
    take_run(c, payload, len);
    return MR_OK;
  case MR_RECORD_FRAME:
    if (!mr_framerec_decode(&rec, payload, len, c->id.rows))
      return MR_E_DATA;
    rc = check_frame(&c->s[rec.stream], &rec);
    if (!rc && !rows_are_new(c, &rec))
      rc = MR_E_DATA;
    if (rc == MR_E_DATA)
      c->t.lost_rows += rec.n_lines;
    if (!rc)
      count_frame(c, &rec);
    return rc;
  default:
    return MR_E_DATA;
  }
}

static mr_code open_streams(mr_commit *c, mr_err *err) {
  for (int i = 0; i < MR_STREAMS; i++) {
    stream *s = &c->s[i];
    s->path = c->paths->frames[i];
    s->fd = mr_sys_now->open(s->path, O_RDWR | O_CREAT | O_APPEND, 0666);
    if (s->fd < 0)
      return mr_err_errno(err, MR_E_CANTCREATE, s->path, "cannot create");
  }
  return MR_OK;
}

/* C3: what follows the last named frame goes. */
static mr_code cut_tails(mr_commit *c, mr_err *err) {
  for (int i = 0; i < MR_STREAMS; i++) {
    struct stat st;
    stream *s = &c->s[i];
    if (mr_sys_now->fstat(s->fd, &st))
      return mr_err_errno(err, MR_E_IO, s->path, "cannot stat");
    if ((uint64_t)st.st_size == s->end)
      continue;
    if (mr_sys_now->ftruncate(s->fd, (off_t)s->end))
      return mr_err_errno(err, MR_E_IO, s->path, "cannot cut the torn end");
    mr_code rc = mr_durable_sync(s->fd, s->path, err);
    if (rc)
      return rc;
  }
  return MR_OK;
}

static mr_code open_state(mr_commit *c, mr_err *err) {
  bool there = false;
  mr_code rc = open_streams(c, err);
  if (!rc)
    rc = mr_path_look(c->paths->journal, &there, err);
  if (!rc && there) {
    rc = mr_journal_open(&c->journal, c->paths->journal, replay, c, err);
    if (rc == MR_E_DATA) /* nothing in it can be used, and only the user may throw work away */
      rc = mr_err_set(err, MR_E_DATA, "remove %s to begin anew", c->paths->run);
  }
  return rc ? rc : cut_tails(c, err);
}

/* A manifest counts when it is good and the files it lists are there in their sizes; `check` reads
 * every byte. */
static mr_code load_manifest(mr_commit *c, mr_err *err) {
  const char *path = c->paths->final[MR_FINAL_MANIFEST];
  bool there = false;
  mr_code rc = path ? mr_path_look(path, &there, err) : MR_OK;
  if (rc || !there)
    return rc;
  rc = mr_manifest_load(&c->manifest, path, err);
  if (rc)
    return rc;
  for (int i = 0; i < MR_FINAL_REPORT_JSON; i++) {
    struct stat st;
    const mr_manifest_file *f = mr_manifest_find(&c->manifest, c->paths->final[i]);
    there = mr_sys_now->stat(c->paths->final[i], &st) == 0;
    if (!there && errno != ENOENT)
      return mr_err_errno(err, MR_E_IO, c->paths->final[i], "cannot look at it");
    if (f ? !there || (uint64_t)st.st_size != f->bytes : i == MR_FINAL_OUTPUT)
      return mr_err_at(err, MR_E_DATA, c->paths->final[i], 0, -1,
                       "the manifest says that this job is finished, but this file is not there or "
                       "has another size; "
                       "remove %s to run the job again",
                       path);
  }
  c->finished = true;
  return MR_OK;
}

mr_code mr_commit_open(mr_commit **out, const mr_paths *p, mr_err *err) {
  mr_commit *c = mr_mem_alloc(1, sizeof *c);
  if (!c)
    return nomem(err);
  c->paths = p;
  c->lock_fd = c->s[0].fd = c->s[1].fd = -1;
  bool was_there = true;
  mr_code rc = mr_path_look(p->run, &was_there, err);
  /* The lock syncs the folder of the output: also the name of a manifest, should the run that gave
   * it have been killed before it did. */
  if (!rc)
    rc = mr_rundir_lock(p, &c->lock_fd, err);
  if (!rc)
    rc = load_manifest(c, err);
  if (!rc && !c->finished) /* C7: beside a good manifest the state is litter */
    rc = open_state(c, err);
  if (rc && c->lock_fd >= 0 && !was_there) {
    mr_err ignored = MR_ERR_INIT;
    mr_rundir_remove(p, &ignored);
  }
  if (rc)
    mr_commit_close(c);
  else
    *out = c;
  return rc;
}

const mr_job_identity *mr_commit_identity(const mr_commit *c) {
  if (c->finished)
    return &c->manifest.id;
  return c->journal ? &c->id : NULL;
}

const mr_manifest *mr_commit_finished(const mr_commit *c) {
  return c->finished ? &c->manifest : NULL;
}

/* ---- binding */

static mr_code refuse_existing(const mr_commit *c, mr_err *err) {
  for (int i = 0; i < MR_FINAL_REPORT_JSON; i++) {
    const char *path = c->paths->final[i];
    bool there = false;
    mr_code rc = path ? mr_path_look(path, &there, err) : MR_OK;
    if (rc)
      return rc;
    if (there) /* C8 */
      return mr_err_at(
          err, MR_E_CANTCREATE, path, 0, -1,
          "exists already and is not the output of this job; choose another -o or remove it");
  }
  return MR_OK;
}

static mr_code bind_new(mr_commit *c, mr_job_identity *id, mr_err *err) {
  mr_code rc = refuse_existing(c, err);
  if (rc)
    return rc;
  mr_identity_make_id(id);
  rc = mr_identity_copy(&c->id, id, err);
  if (rc)
    return rc;
  json_t *o = mr_identity_to_json(id);
  char *text = o ? mr_json_dumps(o, JSON_COMPACT | JSON_SORT_KEYS) : NULL;
  c->done = mr_mem_alloc((size_t)(id->rows + 7) / 8, 1);
  if (!text || !c->done)
    rc = nomem(err);
  if (!rc)
    rc = mr_durable_sync_dir(c->paths->run, err); /* the names of the frame files, before a record
                                                     needs them */
  if (!rc)
    rc = mr_journal_create(&c->journal, c->paths->journal, text, strlen(text), err);
  mr_mem_free(text);
  json_decref(o);
  return rc;
}

mr_code mr_commit_bind(mr_commit *c, mr_job_identity *id, mr_err *err) {
  const mr_job_identity *old = mr_commit_identity(c);
  if (!old)
    return bind_new(c, id, err);
  mr_text words = {0};
  mr_identity_differ(old, id, &words);
  mr_code rc = words.failed ? nomem(err) : MR_OK;
  if (words.len)
    rc = mr_err_at(
        err, MR_E_DATA, c->finished ? c->paths->final[MR_FINAL_MANIFEST] : c->paths->run, 0, -1,
        "belongs to another job: %s; choose another -o, or remove it to begin anew", words.data);
  mr_text_free(&words);
  if (rc)
    return rc;
  memcpy(id->job_id, old->job_id, sizeof id->job_id);
  id->created = old->created;
  id->part = old->part;
  return MR_OK;
}

bool mr_commit_is_done(const mr_commit *c, uint64_t row) {
  return c->done && row < c->id.rows && (c->done[row >> 3] >> (row & 7) & 1);
}

bool mr_commit_has_failed(const mr_commit *c, uint64_t row) {
  return c->failed && row < c->id.rows && (c->failed[row >> 3] >> (row & 7) & 1);
}

uint64_t mr_commit_done_rows(const mr_commit *c) {
  return c->n_done;
}

const mr_commit_totals *mr_commit_totals_get(const mr_commit *c) {
  return &c->t;
}

/* ---- adding and flushing */

static void drop_buffer(stream *s) {
  mr_text_clear(&s->text);
  s->n = 0;
  s->prompt_tokens = s->output_tokens = 0;
}

/* C2: the frame, its sync, then the record, with its sync. */
static mr_code write_frame(mr_commit *c, int i, mr_err *err) {
  stream *s = &c->s[i];
  mr_text_clear(&c->frame);
  mr_text_clear(&c->record);
  mr_code rc = mr_zpack_frame(c->pack, s->text.data, s->text.len, &c->frame, err);
  if (rc)
    return rc;
  mr_frame_rec rec = {.stream = (mr_line_kind)i,
                      .offset = s->end,
                      .bytes = c->frame.len,
                      .text_bytes = s->text.len,
                      .prompt_tokens = s->prompt_tokens,
                      .output_tokens = s->output_tokens,
                      .check = mr_hash_64(c->frame.data, c->frame.len),
                      .n_lines = s->n};
  mr_framerec_encode(&rec, s->lines, &c->record);
  if (c->record.failed)
    return nomem(err);
  if (mr_sys_write_full(s->fd, c->frame.data, c->frame.len))
    return mr_err_errno(err, MR_E_IO, s->path, "cannot write");
  rc = mr_durable_sync_data(s->fd, s->path, err);
  if (!rc)
    rc = mr_journal_append(c->journal, MR_RECORD_FRAME, c->record.data, c->record.len, err);
  if (!rc) {
    count_frame(c, &rec);
    drop_buffer(s);
  }
  return rc;
}

static mr_code broken(const mr_commit *c, mr_err *err) {
  return mr_err_at(err, MR_E_IO, c->paths->run, 0, -1,
                   "an earlier write failed; run the job again to resume it");
}

static mr_code flush_stream(mr_commit *c, int i, mr_err *err) {
  if (c->broken)
    return broken(c, err);
  if (c->s[i].n == 0)
    return MR_OK;
  mr_code rc = c->pack ? MR_OK : mr_zpack_open(&c->pack, FRAME_LEVEL, err);
  if (!rc)
    rc = write_frame(c, i, err);
  c->broken = rc != MR_OK; /* C5 */
  if (c->s[0].n == 0 && c->s[1].n == 0)
    c->oldest_s = 0;
  return rc;
}

mr_code mr_commit_flush(mr_commit *c, mr_err *err) {
  mr_code rc = flush_stream(c, MR_LINE_RESULT, err);
  return rc ? rc : flush_stream(c, MR_LINE_ERROR, err);
}

mr_code mr_commit_tick(mr_commit *c, mr_err *err) {
  if (c->oldest_s > 0 && mr_sys_seconds() - c->oldest_s >= FLUSH_S)
    return mr_commit_flush(c, err);
  return MR_OK;
}

mr_code mr_commit_add(mr_commit *c, const mr_line_info *line, const char *text, size_t len,
                      mr_err *err) {
  stream *s = &c->s[line->kind];
  if (c->broken)
    return broken(c, err);
  if (line->row >= c->id.rows || len == 0 || text[len - 1] != '\n')
    return mr_err_set(err, MR_E_INTERNAL, "row %llu: not a line of this job",
                      (unsigned long long)line->row);
  if (len > MR_ZFRAME_MAX / 2)
    return mr_err_set(err, MR_E_DATA, "row %llu: its result has %zu bytes; the limit is %zu",
                      (unsigned long long)line->row, len, MR_ZFRAME_MAX / 2);
  if (!set_done(c, line->row))
    return mr_err_set(err, MR_E_INTERNAL, "row %llu was finished twice",
                      (unsigned long long)line->row);
  mr_text_add(&s->text, text, len);
  if (!mr_mem_grow((void **)&s->lines, &s->cap, s->n + 1, sizeof *s->lines) || s->text.failed) {
    c->broken = true;
    return nomem(err);
  }
  s->lines[s->n++] = (mr_frame_line){line->row, (uint32_t)len};
  s->prompt_tokens += line->prompt_tokens;
  s->output_tokens += line->output_tokens;
  if (c->oldest_s == 0)
    c->oldest_s = mr_sys_seconds();
  return s->n >= FRAME_LINES || s->text.len >= FRAME_BYTES ? flush_stream(c, line->kind, err)
                                                           : mr_commit_tick(c, err);
}

mr_code mr_commit_note_run(mr_commit *c, const json_t *figures, mr_err *err) {
  if (c->broken || !c->journal)
    return c->broken ? broken(c, err) : MR_OK;
  char *text = mr_json_dumps(figures, JSON_COMPACT | JSON_SORT_KEYS);
  if (!text)
    return nomem(err);
  mr_code rc = mr_journal_append(c->journal, MR_RECORD_RUN, text, strlen(text), err);
  c->broken = rc == MR_E_IO;
  mr_mem_free(text);
  return rc;
}

/* ---- the end */

typedef struct finals {
  mr_outfile *file[MR_STREAMS]; /* the same twice with standard output */
  unsigned char *failed;
} finals;

static mr_code to_final(void *ctx, uint64_t row, mr_line_kind kind, const char *line, size_t len,
                        mr_err *err) {
  finals *f = ctx;
  if (kind == MR_LINE_ERROR)
    f->failed[row >> 3] |= (unsigned char)(1u << (row & 7));
  return mr_outfile_line(f->file[kind], line, len, err);
}

static mr_code open_finals(mr_commit *c, finals *f, mr_output_format format, int level,
                           mr_err *err) {
  mr_code rc = mr_outfile_open(&f->file[0], c->paths->made[MR_FINAL_OUTPUT], format, level, err);
  if (format == MR_OUT_STDOUT)
    f->file[1] = f->file[0];
  else if (!rc && c->t.rows_failed)
    rc = mr_outfile_open(&f->file[1], c->paths->made[MR_FINAL_ERRORS], MR_OUT_ZST, level, err);
  return rc;
}

static mr_code end_final(mr_commit *c, mr_outfile *o, int final, mr_manifest *m, mr_err *err) {
  mr_outfile_info info;
  mr_code rc = mr_outfile_finish(o, &info, err);
  const char *name = c->paths->final[final];
  return rc || !name ? rc : mr_manifest_add_file(m, name, info.digest, info.bytes, info.lines, err);
}

mr_code mr_commit_assemble(mr_commit *c, mr_output_format format, int zstd_level,
                           bool completion_order, mr_manifest *m, mr_err *err) {
  finals f = {{NULL, NULL}, NULL};
  mr_code rc = mr_commit_flush(c, err);
  mr_mem_free(c->failed);
  f.failed = c->failed = mr_mem_alloc((size_t)(c->id.rows + 7) / 8, 1);
  if (!rc && !c->failed)
    rc = nomem(err);
  if (!rc)
    rc = mr_identity_copy(&m->id, &c->id, err);
  m->rows_ok = c->t.rows_ok;
  m->rows_failed = c->t.rows_failed;
  m->prompt_tokens = c->t.prompt_tokens;
  m->output_tokens = c->t.output_tokens;
  m->completion_order = completion_order;
  if (!rc)
    rc = open_finals(c, &f, format, zstd_level, err);
  if (!rc)
    rc = mr_assemble_run(c->paths, c->id.rows, completion_order, 0, to_final, &f, err);
  if (!rc)
    rc = end_final(c, f.file[0], MR_FINAL_OUTPUT, m, err);
  if (!rc && f.file[1] && f.file[1] != f.file[0])
    rc = end_final(c, f.file[1], MR_FINAL_ERRORS, m, err);
  if (f.file[1] != f.file[0])
    mr_outfile_close(f.file[1]);
  mr_outfile_close(f.file[0]);
  return rc;
}

mr_code mr_commit_put(mr_commit *c, int final, const void *bytes, size_t len, mr_manifest *m,
                      mr_err *err) {
  char hex[MR_HASH_HEX];
  mr_hash_hex(bytes, len, hex);
  mr_code rc = mr_durable_write(c->paths->made[final], bytes, len, err);
  return rc ? rc : mr_manifest_add_file(m, c->paths->final[final], hex, len, 0, err);
}

/* The names in their order; one that the manifest does not list is not made. */
static mr_code name_finals(mr_commit *c, const mr_manifest *m, mr_err *err) {
  for (int i = 0; i < MR_FINAL_MANIFEST; i++) {
    if (!mr_manifest_find(m, c->paths->final[i]))
      continue;
    mr_code rc = mr_durable_rename(c->paths->made[i], c->paths->final[i], err);
    if (rc)
      return rc;
  }
  return MR_OK;
}

mr_code mr_commit_publish(mr_commit *c, const mr_manifest *m, mr_err *err) {
  mr_text t = {0};
  mr_code rc = mr_manifest_dump(m, &t, err);
  if (!rc)
    rc = mr_durable_sync_dir(c->paths->run, err);
  if (!rc)
    rc = mr_durable_write(c->paths->made[MR_FINAL_MANIFEST], t.data, t.len, err);
  if (!rc)
    rc = name_finals(c, m, err);
  if (!rc)
    rc = mr_durable_rename(c->paths->made[MR_FINAL_MANIFEST], c->paths->final[MR_FINAL_MANIFEST],
                           err);
  mr_text_free(&t);
  if (!rc) { /* C7: the job is finished whether or not the litter goes; the next run tries again */
    mr_err ignored = MR_ERR_INIT;
    mr_commit_discard(c, &ignored);
  }
  return rc;
}

static void close_files(mr_commit *c) {
  mr_journal_close(c->journal);
  c->journal = NULL;
  for (int i = 0; i < MR_STREAMS; i++) {
    if (c->s[i].fd >= 0)
      mr_sys_now->close(c->s[i].fd);
    c->s[i].fd = -1;
  }
}

/* Closed first: what is open keeps a name of its own on NFS, and its folder with it. */
mr_code mr_commit_discard(mr_commit *c, mr_err *err) {
  close_files(c);
  return mr_rundir_remove(c->paths, err);
}

void mr_commit_close(mr_commit *c) {
  if (!c)
    return;
  close_files(c);
  for (int i = 0; i < MR_STREAMS; i++) {
    mr_text_free(&c->s[i].text);
    mr_mem_free(c->s[i].lines);
  }
  mr_zpack_close(c->pack);
  mr_text_free(&c->frame);
  mr_text_free(&c->record);
  mr_mem_free(c->done);
  mr_mem_free(c->failed);
  mr_identity_free(&c->id);
  mr_manifest_free(&c->manifest);
  if (c->lock_fd >= 0)
    mr_sys_now->close(c->lock_fd); /* releases the lock */
  mr_mem_free(c);
}
