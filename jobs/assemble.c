#include "jobs/assemble.h"

#include <fcntl.h>

#include "io/mem.h"
#include "io/sys.h"
#include "io/zframe.h"
#include "jobs/journal.h"

typedef struct assembly {
  const mr_paths *p;
  uint64_t rows, emitted;
  mr_line_sink sink; /* of lines in order of completion */
  void *ctx;
  mr_linesort *sort; /* NULL: order of completion */
  int fd[MR_STREAMS];
  mr_text frame;
  mr_code rc; /* of the walk that scatters */
  mr_err *err;
} assembly;

static mr_code nomem(mr_err *err) {
  return mr_err_set(err, MR_E_NOMEM, "out of memory");
}

static mr_code count_bytes(void *ctx, uint32_t type, const unsigned char *payload, size_t len) {
  assembly *a = ctx;
  mr_frame_rec rec;
  if (type != MR_RECORD_FRAME)
    return MR_OK;
  if (!mr_framerec_decode(&rec, payload, len, a->rows))
    return MR_E_DATA;
  mr_frame_line l = {0};
  const unsigned char *p = rec.lines;
  while (mr_framerec_next(&rec, &p, &l))
    mr_linesort_expect(a->sort, l.row, l.bytes);
  return MR_OK;
}

static mr_code place(assembly *a, uint64_t row, mr_line_kind kind, const char *line, uint32_t len) {
  if (line[len - 1] != '\n')
    return mr_err_at(a->err, MR_E_DATA, a->p->frames[kind], 0, -1,
                     "a line does not end where the journal says");
  if (a->sort)
    return mr_linesort_add(a->sort, row, kind, line, len, a->err);
  a->emitted++;
  return a->sink(a->ctx, row, kind, line, len, a->err);
}

/* Reads and unpacks a frame into a->frame. */
static mr_code load_frame(assembly *a, const mr_frame_rec *rec) {
  const char *name = a->p->frames[rec->stream];
  if (rec->bytes > MR_ZFRAME_MAX || rec->text_bytes > MR_ZFRAME_MAX)
    return mr_err_at(a->err, MR_E_DATA, name, 0, -1, "a frame of more than %zu MiB",
                     MR_ZFRAME_MAX >> 20);
  char *buf = mr_mem_alloc((size_t)rec->bytes, 1);
  if (!buf)
    return nomem(a->err);
  mr_code rc = MR_OK;
  mr_text_clear(&a->frame);
  ssize_t k = mr_sys_pread_full(a->fd[rec->stream], buf, (size_t)rec->bytes, (off_t)rec->offset);
  if (k < 0)
    rc = mr_err_errno(a->err, MR_E_IO, name, "cannot read");
  else if ((uint64_t)k != rec->bytes)
    rc = mr_err_at(a->err, MR_E_DATA, name, 0, (int64_t)rec->offset, "a frame is cut off");
  else
    rc =
        mr_zframe_unpack(buf, (size_t)rec->bytes, (size_t)rec->text_bytes, name, &a->frame, a->err);
  if (!rc && a->frame.len != rec->text_bytes)
    rc = mr_err_at(a->err, MR_E_DATA, name, 0, (int64_t)rec->offset,
                   "a frame has not the size in the journal");
  mr_mem_free(buf);
  return rc;
}

static mr_code scatter(void *ctx, uint32_t type, const unsigned char *payload, size_t len) {
  assembly *a = ctx;
  mr_frame_rec rec;
  if (type != MR_RECORD_FRAME)
    return MR_OK;
  if (!mr_framerec_decode(&rec, payload, len, a->rows))
    return MR_E_DATA;
  a->rc = load_frame(a, &rec);
  mr_frame_line l = {0};
  const unsigned char *p = rec.lines;
  for (size_t at = 0; a->rc == MR_OK && mr_framerec_next(&rec, &p, &l); at += l.bytes)
    a->rc = place(a, l.row, rec.stream, a->frame.data + at, l.bytes);
  return a->rc ? MR_E_DATA : MR_OK; /* a->err says why */
}

static mr_code open_all(assembly *a, size_t bucket_bytes, bool completion_order) {
  for (int i = 0; i < MR_STREAMS; i++) {
    a->fd[i] = mr_sys_now->open(a->p->frames[i], O_RDONLY, 0);
    if (a->fd[i] < 0)
      return mr_err_errno(a->err, MR_E_IO, a->p->frames[i], "cannot open");
  }
  if (completion_order)
    return MR_OK;
  mr_code rc = mr_linesort_open(&a->sort, a->p->spill, a->rows, bucket_bytes, a->err);
  if (!rc)
    rc = mr_journal_read(a->p->journal, count_bytes, a, NULL, a->err);
  return rc ? rc : mr_linesort_begin(a->sort, a->err);
}

static void close_all(assembly *a) {
  for (int i = 0; i < MR_STREAMS; i++)
    if (a->fd[i] >= 0)
      mr_sys_now->close(a->fd[i]);
  mr_linesort_close(a->sort);
  mr_text_free(&a->frame);
}

mr_code mr_assemble_run(const mr_paths *p, uint64_t rows, bool completion_order,
                        size_t bucket_bytes, mr_line_sink sink, void *ctx, mr_err *err) {
  assembly a = {.p = p, .rows = rows, .sink = sink, .ctx = ctx, .err = err, .fd = {-1, -1}};
  mr_code rc = open_all(&a, bucket_bytes, completion_order);
  if (!rc)
    rc = mr_journal_read(p->journal, scatter, &a, NULL, err);
  if (!rc)
    rc = a.rc;
  if (!rc && a.sort)
    rc = mr_linesort_emit(a.sort, p->journal, sink, ctx, err);
  else if (!rc && a.emitted != rows)
    rc = mr_err_at(err, MR_E_DATA, p->journal, 0, -1, "%llu of %llu rows are there",
                   (unsigned long long)a.emitted, (unsigned long long)rows);
  close_all(&a);
  return rc;
}
