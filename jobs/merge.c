#include "jobs/merge.h"

#include <inttypes.h>
#include <string.h>

#include "io/hash.h"
#include "io/lines.h"
#include "io/mem.h"
#include "jobs/rowlist.h"

#define LINE_MAX_BYTES ((size_t)1 << 31)

typedef struct shard {
  mr_paths paths;
  mr_manifest manifest;
} shard;

/* One shard's lines of one kind while they are read. */
typedef struct feed {
  const char *path;
  mr_text name; /* holds path */
  mr_source *source;
  mr_lines lines;
  mr_text line;
} feed;

struct mr_merge {
  shard *shards; /* in the order of their index */
  int n;
  uint64_t job_rows;
};

static mr_code nomem(mr_err *err) {
  return mr_err_set(err, MR_E_NOMEM, "out of memory");
}

/* ------------------------------------------------------------------ what belongs together */

static const char *name_of(const shard *s) {
  return s->paths.final[MR_FINAL_OUTPUT];
}

static mr_code load(shard *s, mr_err *err) {
  const char *path = s->paths.final[MR_FINAL_MANIFEST];
  mr_err e = MR_ERR_INIT;
  mr_code rc = mr_manifest_load(&s->manifest, path, &e);
  if (rc == MR_E_NOINPUT && mr_path_exists(s->paths.run))
    return mr_err_at(err, MR_E_STOPPED, name_of(s), 0, -1,
                     "this shard is not finished: run its command again, then merge");
  if (rc == MR_E_NOINPUT)
    return mr_err_at(err, rc, name_of(s), 0, -1, "no such output: %s is not there", path);
  if (rc) {
    *err = e;
    return rc;
  }
  if (s->manifest.id.part.of == 0)
    return mr_err_at(err, MR_E_DATA, name_of(s), 0, -1,
                     "this is the output of a whole job, not of a shard");
  return MR_OK;
}

/* Adds the shard behind a name; one that is there already is passed over. */
static mr_code add_shard(mr_merge *m, size_t *cap, const char *typed, mr_err *err) {
  mr_paths p;
  mr_code rc = mr_paths_find(&p, typed, err);
  if (rc)
    return rc;
  for (int i = 0; i < m->n; i++)
    if (!strcmp(m->shards[i].paths.run, p.run)) {
      mr_paths_free(&p);
      return MR_OK;
    }
  if (!mr_mem_grow((void **)&m->shards, cap, (size_t)m->n + 1, sizeof *m->shards)) {
    mr_paths_free(&p);
    return nomem(err);
  }
  shard *s = &m->shards[m->n++];
  memset(s, 0, sizeof *s);
  s->paths = p;
  return load(s, err);
}

static mr_code same_job(const shard *a, const shard *b, mr_err *err) {
  const mr_job_identity *x = &a->manifest.id, *y = &b->manifest.id;
  mr_job_identity same_part = *y; /* borrows */
  mr_text words = {0};
  same_part.part = x->part;
  same_part.rows = x->rows;
  mr_identity_differ(x, &same_part, &words);
  mr_code rc = words.failed ? nomem(err) : MR_OK;
  if (words.len)
    rc = mr_err_at(err, MR_E_DATA, name_of(b), 0, -1, "this shard is not of the job of %s: %s",
                   name_of(a), words.data);
  else if (x->part.of != y->part.of)
    rc = mr_err_at(err, MR_E_DATA, name_of(b), 0, -1, "this is shard %d/%d, and %s is %d/%d",
                   y->part.index, y->part.of, name_of(a), x->part.index, x->part.of);
  else if (x->part.cut != y->part.cut || x->part.job_rows != y->part.job_rows)
    rc = mr_err_at(err, MR_E_DATA, name_of(b), 0, -1,
                   "this shard has cut the job otherwise than %s; a chat template that prints the "
                   "date sees different days: run the shards with the same --created",
                   name_of(a));
  else if (a->manifest.completion_order != b->manifest.completion_order)
    rc = mr_err_at(err, MR_E_DATA, name_of(b), 0, -1, "--order is not that of %s", name_of(a));
  mr_text_free(&words);
  return rc;
}

/* Every shard once, each at its place. */
static mr_code sort_shards(mr_merge *m, mr_err *err) {
  int of = m->shards[0].manifest.id.part.of;
  shard *sorted = mr_mem_alloc((size_t)of, sizeof *sorted);
  mr_code rc = sorted ? MR_OK : nomem(err);
  for (int i = 0; !rc && i < m->n; i++) {
    shard *to = &sorted[m->shards[i].manifest.id.part.index - 1];
    if (to->paths.run)
      rc = mr_err_at(err, MR_E_DATA, name_of(&m->shards[i]), 0, -1,
                     "%s is shard %d/%d too; give each shard once", name_of(to),
                     to->manifest.id.part.index, of);
    else
      *to = m->shards[i];
  }
  for (int i = 0; !rc && i < of; i++)
    if (!sorted[i].paths.run)
      rc = mr_err_set(err, MR_E_DATA, "shard %d/%d is missing (%d of %d given)", i + 1, of, m->n,
                      of);
  if (rc) {
    mr_mem_free(sorted); /* what it holds is in m->shards too */
    return rc;
  }
  mr_mem_free(m->shards);
  m->shards = sorted;
  return MR_OK;
}

/* Whether the lists name each row of the job once. */
static mr_code check_rows(const mr_merge *m, mr_err *err) {
  uint64_t n = 0, row;
  unsigned char *seen = mr_mem_alloc((size_t)(m->job_rows + 7) / 8, 1);
  mr_code rc = seen ? MR_OK : nomem(err);
  for (int i = 0; !rc && i < m->n * MR_STREAMS; i++) {
    const shard *s = &m->shards[i / MR_STREAMS];
    mr_rowlist_at at = {.s = s->manifest.row_list[i % MR_STREAMS]};
    while (!rc && mr_rowlist_next(&at, m->job_rows, &row) == 1) {
      if (seen[row / 8] >> (row & 7) & 1)
        rc = mr_err_at(err, MR_E_DATA, name_of(s), 0, -1, "row %" PRIu64 " is in two shards", row);
      seen[row / 8] |= (unsigned char)(1u << (row & 7));
      n++;
    }
  }
  if (!rc && n != m->job_rows)
    rc = mr_err_set(err, MR_E_DATA, "the shards have %" PRIu64 " of the %" PRIu64 " rows", n,
                    m->job_rows);
  mr_mem_free(seen);
  return rc;
}

/* The path of a file that the manifest lists. */
static mr_code beside(const shard *s, const char *name, mr_text *path, mr_err *err) {
  const char *manifest = s->paths.final[MR_FINAL_MANIFEST], *slash = strrchr(manifest, '/');
  mr_text_add(path, manifest, slash ? (size_t)(slash - manifest) + 1 : 0);
  mr_text_adds(path, name);
  return path->failed ? nomem(err) : MR_OK;
}

static mr_code check_files(const shard *s, mr_err *err) {
  mr_code rc = MR_OK;
  for (int i = 0; !rc && i < s->manifest.n_files; i++) {
    const mr_manifest_file *f = &s->manifest.files[i];
    char hex[MR_HASH_HEX];
    uint64_t bytes;
    mr_text path = {0};
    rc = beside(s, f->name, &path, err);
    if (!rc)
      rc = mr_hash_file(path.data, hex, &bytes, err);
    if (!rc && (bytes != f->bytes || strcmp(hex, f->digest) != 0))
      rc = mr_err_at(err, MR_E_DATA, path.data, 0, -1,
                     "damaged: its digest is not that in the manifest (millrace check says more)");
    mr_text_free(&path);
  }
  return rc;
}

static mr_code take_all(mr_merge *m, char *const *names, int n, mr_err *err) {
  size_t cap = 0;
  mr_code rc = MR_OK;
  for (int i = 0; !rc && i < n; i++)
    rc = add_shard(m, &cap, names[i], err);
  for (int i = 1; !rc && i < m->n; i++)
    rc = same_job(&m->shards[0], &m->shards[i], err);
  if (!rc)
    rc = sort_shards(m, err);
  if (rc)
    return rc;
  m->job_rows = m->shards[0].manifest.id.part.job_rows;
  rc = check_rows(m, err);
  for (int i = 0; !rc && i < m->n; i++)
    rc = check_files(&m->shards[i], err);
  return rc;
}

mr_code mr_merge_open(mr_merge **out, char *const *names, int n, mr_err *err) {
  mr_merge *m = mr_mem_alloc(1, sizeof *m);
  mr_code rc = m ? take_all(m, names, n, err) : nomem(err);
  if (rc)
    mr_merge_close(m);
  else
    *out = m;
  return rc;
}

mr_code mr_merge_whole(const mr_merge *m, mr_manifest *whole, mr_err *err) {
  const mr_manifest *first = &m->shards[0].manifest;
  mr_code rc = mr_identity_copy(&whole->id, &first->id, err);
  whole->id.part = (mr_identity_part){0};
  whole->id.rows = m->job_rows;
  whole->completion_order = first->completion_order;
  whole->inputs = first->inputs ? json_incref(first->inputs) : NULL;
  for (int i = 0; i < m->n; i++) {
    const mr_manifest *s = &m->shards[i].manifest;
    whole->rows_ok += s->rows_ok;
    whole->rows_failed += s->rows_failed;
    whole->prompt_tokens += s->prompt_tokens;
    whole->output_tokens += s->output_tokens;
    if (s->id.created < whole->id.created)
      whole->id.created = s->id.created;
  }
  return rc;
}

/* ------------------------------------------------------------------ lines */

/* A file of the shard that holds lines of this kind; NULL: it has none. */
static const mr_manifest_file *file_of(const shard *s, mr_line_kind kind) {
  const mr_manifest_file *f = mr_manifest_find(
      &s->manifest, s->paths.final[kind == MR_LINE_ERROR ? MR_FINAL_ERRORS : MR_FINAL_OUTPUT]);
  return f && f->lines ? f : NULL;
}

static mr_code open_feed(feed *f, const shard *s, const mr_manifest_file *file, mr_err *err) {
  bool more;
  mr_code rc = beside(s, file->name, &f->name, err);
  f->path = f->name.data;
  if (!rc)
    rc = mr_source_open(&f->source, &f->path, 1, err);
  if (!rc)
    rc = mr_source_next(f->source, &more, err);
  if (rc)
    return rc;
  mr_lines_init(&f->lines, f->source, LINE_MAX_BYTES, NULL);
  mr_lines_start(&f->lines);
  return MR_OK;
}

static void close_feed(feed *f) {
  if (f->source)
    mr_lines_free(&f->lines);
  mr_source_close(f->source);
  mr_text_free(&f->name);
  mr_text_free(&f->line);
}

/* The next line with its newline in f->line. */
static mr_code next_line(feed *f, mr_err *err) {
  mr_line l;
  mr_code rc = mr_lines_next(&f->lines, &l, err);
  if (rc)
    return rc;
  if (!l.s || l.too_long)
    return mr_err_at(err, MR_E_DATA, f->path, 0, -1, "it has not the lines that its manifest says");
  mr_text_clear(&f->line);
  mr_text_add(&f->line, l.s, l.len);
  mr_text_addc(&f->line, '\n');
  return f->line.failed ? nomem(err) : MR_OK;
}

/* Goes through the lines of one shard and kind in their order. */
static mr_code each_line(const mr_merge *m, const shard *s, mr_line_kind kind, mr_line_sink fn,
                         void *ctx, mr_err *err) {
  const mr_manifest_file *file = file_of(s, kind);
  uint64_t lines = kind == MR_LINE_ERROR ? s->manifest.rows_failed : s->manifest.rows_ok;
  uint64_t n = 0, row;
  mr_rowlist_at at = {.s = s->manifest.row_list[kind]};
  feed f = {.path = NULL};
  if (lines != (file ? file->lines : 0))
    return mr_err_at(err, MR_E_DATA, s->paths.final[MR_FINAL_MANIFEST], 0, -1,
                     "it lists no file with the shard's %" PRIu64 " lines", lines);
  if (!file)
    return MR_OK;
  mr_code rc = open_feed(&f, s, file, err);
  while (!rc && mr_rowlist_next(&at, m->job_rows, &row) == 1) {
    rc = next_line(&f, err);
    n++;
    if (!rc)
      rc = fn(ctx, row, kind, f.line.data, f.line.len, err);
  }
  if (!rc && n != lines)
    rc = mr_err_at(err, MR_E_DATA, s->paths.final[MR_FINAL_MANIFEST], 0, -1,
                   "it names %" PRIu64 " rows for %" PRIu64 " lines", n, lines);
  close_feed(&f);
  return rc;
}

/* All lines of all shards, one file open at a time. */
static mr_code all_lines(const mr_merge *m, mr_line_sink fn, void *ctx, mr_err *err) {
  mr_code rc = MR_OK;
  for (int i = 0; !rc && i < m->n * MR_STREAMS; i++)
    rc = each_line(m, &m->shards[i / MR_STREAMS], (mr_line_kind)(i % MR_STREAMS), fn, ctx, err);
  return rc;
}

static mr_code expect_line(void *ctx, uint64_t row, mr_line_kind kind, const char *line, size_t len,
                           mr_err *err) {
  (void)kind, (void)line, (void)err;
  mr_linesort_expect(ctx, row, len);
  return MR_OK;
}

static mr_code add_line(void *ctx, uint64_t row, mr_line_kind kind, const char *line, size_t len,
                        mr_err *err) {
  return mr_linesort_add(ctx, row, kind, line, (uint32_t)len, err);
}

mr_code mr_merge_write(mr_merge *m, const char *spill, size_t bucket_bytes, mr_line_sink sink,
                       void *ctx, mr_err *err) {
  if (m->shards[0].manifest.completion_order) /* there is nothing to put in order */
    return all_lines(m, sink, ctx, err);
  mr_linesort *s;
  mr_code rc = mr_linesort_open(&s, spill, m->job_rows, bucket_bytes, err);
  if (rc)
    return rc;
  rc = all_lines(m, expect_line, s, err);
  if (!rc)
    rc = mr_linesort_begin(s, err);
  if (!rc)
    rc = all_lines(m, add_line, s, err);
  if (!rc)
    rc = mr_linesort_emit(s, name_of(&m->shards[0]), sink, ctx, err);
  mr_linesort_close(s);
  return rc;
}

/* ------------------------------------------------------------------ what it knows */

int mr_merge_shards(const mr_merge *m) {
  return m->n;
}

const mr_paths *mr_merge_paths(const mr_merge *m, int i) {
  return &m->shards[i].paths;
}

const mr_manifest *mr_merge_manifest(const mr_merge *m, int i) {
  return &m->shards[i].manifest;
}

void mr_merge_close(mr_merge *m) {
  if (!m)
    return;
  for (int i = 0; i < m->n; i++) {
    mr_manifest_free(&m->shards[i].manifest);
    mr_paths_free(&m->shards[i].paths);
  }
  mr_mem_free(m->shards);
  mr_mem_free(m);
}
