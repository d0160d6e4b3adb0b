#include "jobs/assemble.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include "io/mem.h"
#include "io/sys.h"
#include "io/zframe.h"
#include "jobs/journal.h"

#define BUCKET_BYTES ((size_t)64 << 20)
#define SLICES 4096
#define SPILL_BYTES_ALL ((size_t)32 << 20) /* buffers of all buckets together */
#define SPILL_BYTES_MAX ((size_t)1 << 20)
#define SPILL_HEAD 13 /* u64 row, u8 kind, u32 bytes before each line in a bucket */

typedef struct line_ref { /* a line in memory */
  uint64_t row, at;       /* at: offset in the text */
  uint32_t bytes;
  uint32_t kind;
} line_ref;

typedef struct lines {
  mr_text text;
  line_ref *refs;
  size_t n, cap;
} lines;

typedef struct bucket {
  mr_text pending; /* lines not yet in its file */
  bool spilled;    /* its file exists */
} bucket;

typedef struct assembly {
  const mr_paths *p;
  uint64_t rows, emitted;
  bool completion;
  size_t bucket_bytes, spill_bytes;
  mr_assemble_sink sink;
  void *ctx;
  int fd[MR_STREAMS];
  uint64_t *slice_bytes; /* [SLICES] */
  uint32_t *slice_of;    /* [SLICES] bucket of each slice */
  bucket *buckets;
  uint32_t n_buckets;
  lines mem; /* the one bucket, or the one now read */
  mr_zpack *pack;
  mr_text frame, packed;
  mr_code rc; /* of the walk that scatters */
  mr_err *err;
} assembly;

static mr_code nomem(mr_err *err) {
  return mr_err_set(err, MR_E_NOMEM, "out of memory");
}

static size_t slice_at(const assembly *a, uint64_t row) {
  return a->rows <= SLICES ? (size_t)row : (size_t)((unsigned __int128)row * SLICES / a->rows);
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
    a->slice_bytes[slice_at(a, l.row)] += l.bytes;
  return MR_OK;
}

static mr_code make_buckets(assembly *a) {
  mr_code rc = mr_journal_read(a->p->journal, count_bytes, a, NULL, a->err);
  if (rc)
    return rc;
  uint64_t sum = 0;
  uint32_t b = 0;
  for (size_t i = 0; i < SLICES; i++) {
    if (sum > 0 && sum + a->slice_bytes[i] > a->bucket_bytes) {
      b++;
      sum = 0;
    }
    sum += a->slice_bytes[i];
    a->slice_of[i] = b;
  }
  a->n_buckets = b + 1;
  a->spill_bytes = SPILL_BYTES_ALL / a->n_buckets;
  if (a->spill_bytes > SPILL_BYTES_MAX)
    a->spill_bytes = SPILL_BYTES_MAX;
  a->buckets = mr_mem_alloc(a->n_buckets, sizeof *a->buckets);
  return a->buckets ? MR_OK : nomem(a->err);
}

static mr_code bucket_name(const assembly *a, uint32_t b, mr_text *name) {
  mr_text_addf(name, "%s.%u", a->p->spill, b);
  return name->failed ? nomem(a->err) : MR_OK;
}

/* Appends the pending lines to the bucket's file: u32 length, one packed frame. Opened each time,
 * so that the number of buckets is not bounded by the number of open files. */
static mr_code spill(assembly *a, uint32_t b) {
  bucket *k = &a->buckets[b];
  if (k->pending.failed)
    return nomem(a->err);
  if (k->pending.len == 0)
    return MR_OK;
  mr_text name = {0};
  mr_text_clear(&a->packed);
  mr_text_add(&a->packed, "\0\0\0\0", 4);
  mr_code rc = bucket_name(a, b, &name);
  if (!rc)
    rc = mr_zpack_frame(a->pack, k->pending.data, k->pending.len, &a->packed, a->err);
  if (!rc) {
    uint32_t n = (uint32_t)(a->packed.len - 4);
    memcpy(a->packed.data, &n, 4);
    int fd =
        mr_sys_now->open(name.data, O_WRONLY | O_CREAT | (k->spilled ? O_APPEND : O_TRUNC), 0666);
    if (fd < 0)
      rc = mr_err_errno(a->err, MR_E_CANTCREATE, name.data, "cannot create");
    else if (mr_sys_write_full(fd, a->packed.data, a->packed.len))
      rc = mr_err_errno(a->err, MR_E_IO, name.data, "cannot write");
    if (fd >= 0)
      mr_sys_now->close(fd);
    k->spilled = true;
  }
  mr_text_free(&name);
  mr_text_free(&k->pending);
  return rc;
}

static mr_code keep(lines *m, uint64_t row, mr_line_kind kind, const char *text, uint32_t len,
                    mr_err *err) {
  if (!mr_mem_grow((void **)&m->refs, &m->cap, m->n + 1, sizeof *m->refs))
    return nomem(err);
  m->refs[m->n++] = (line_ref){row, m->text.len, len, (uint32_t)kind};
  mr_text_add(&m->text, text, len);
  return m->text.failed ? nomem(err) : MR_OK;
}

static mr_code emit(assembly *a, uint64_t row, mr_line_kind kind, const char *line, size_t len) {
  if (line[len - 1] != '\n')
    return mr_err_at(a->err, MR_E_DATA, a->p->frames[kind], 0, -1,
                     "a line does not end where the journal says");
  a->emitted++;
  return a->sink(a->ctx, row, kind, line, len, a->err);
}

static mr_code place(assembly *a, uint64_t row, mr_line_kind kind, const char *text, uint32_t len) {
  if (a->completion)
    return emit(a, row, kind, text, len);
  if (a->n_buckets == 1)
    return keep(&a->mem, row, kind, text, len, a->err);
  uint32_t b = a->slice_of[slice_at(a, row)];
  mr_text *t = &a->buckets[b].pending;
  uint8_t k = (uint8_t)kind;
  mr_text_add(t, &row, sizeof row);
  mr_text_add(t, &k, 1);
  mr_text_add(t, &len, sizeof len);
  mr_text_add(t, text, len);
  return t->len >= a->spill_bytes || t->failed ? spill(a, b) : MR_OK;
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

static int by_row(const void *x, const void *y) {
  uint64_t a = ((const line_ref *)x)->row, b = ((const line_ref *)y)->row;
  return (a > b) - (a < b);
}

static mr_code emit_sorted(assembly *a) {
  lines *m = &a->mem;
  mr_code rc = MR_OK;
  if (m->n)
    qsort(m->refs, m->n, sizeof *m->refs, by_row);
  for (size_t i = 0; !rc && i < m->n; i++) {
    if (m->refs[i].row != a->emitted)
      return mr_err_at(a->err, MR_E_DATA, a->p->journal, 0, -1, "row %llu is %s in the journal",
                       (unsigned long long)a->emitted,
                       m->refs[i].row < a->emitted ? "twice" : "not");
    rc = emit(a, m->refs[i].row, (mr_line_kind)m->refs[i].kind, m->text.data + m->refs[i].at,
              m->refs[i].bytes);
  }
  mr_text_clear(&m->text);
  m->n = 0;
  return rc;
}

static mr_code take_chunk(assembly *a, const char *name) {
  for (size_t at = 0; at < a->frame.len;) {
    uint64_t row;
    uint32_t len;
    const char *p = a->frame.data + at;
    if (a->frame.len - at < SPILL_HEAD)
      return mr_err_at(a->err, MR_E_DATA, name, 0, -1, "damaged while the job ran");
    memcpy(&row, p, sizeof row);
    memcpy(&len, p + 9, sizeof len);
    uint8_t kind = (uint8_t)p[8];
    if (len == 0 || len > a->frame.len - at - SPILL_HEAD || kind >= MR_STREAMS)
      return mr_err_at(a->err, MR_E_DATA, name, 0, -1, "damaged while the job ran");
    mr_code rc = keep(&a->mem, row, (mr_line_kind)kind, p + SPILL_HEAD, len, a->err);
    if (rc)
      return rc;
    at += SPILL_HEAD + (size_t)len;
  }
  return MR_OK;
}

static mr_code read_bucket(assembly *a, int fd, const char *name) {
  for (;;) {
    uint32_t n;
    ssize_t k = mr_sys_read_full(fd, &n, sizeof n);
    if (k == 0)
      return MR_OK;
    if (k < 0)
      return mr_err_errno(a->err, MR_E_IO, name, "cannot read");
    char *buf = mr_mem_alloc(n, 1);
    if (!buf)
      return nomem(a->err);
    mr_code rc = MR_OK;
    mr_text_clear(&a->frame);
    if (k != (ssize_t)sizeof n || mr_sys_read_full(fd, buf, n) != (ssize_t)n)
      rc = mr_err_at(a->err, MR_E_IO, name, 0, -1, "cut off while the job ran");
    if (!rc)
      rc = mr_zframe_unpack(buf, n, MR_ZFRAME_MAX, name, &a->frame, a->err);
    if (!rc)
      rc = take_chunk(a, name);
    mr_mem_free(buf);
    if (rc)
      return rc;
  }
}

static mr_code emit_bucket(assembly *a, uint32_t b) {
  mr_text name = {0};
  mr_code rc = spill(a, b);
  if (!rc && a->buckets[b].spilled) {
    rc = bucket_name(a, b, &name);
    int fd = rc ? -1 : mr_sys_now->open(name.data, O_RDONLY, 0);
    if (!rc)
      rc = fd < 0 ? mr_err_errno(a->err, MR_E_IO, name.data, "cannot open")
                  : read_bucket(a, fd, name.data);
    if (fd >= 0)
      mr_sys_now->close(fd);
    if (!rc)
      mr_sys_now->unlink(name.data);
  }
  mr_text_free(&name);
  return rc ? rc : emit_sorted(a);
}

static mr_code open_all(assembly *a) {
  for (int i = 0; i < MR_STREAMS; i++) {
    a->fd[i] = mr_sys_now->open(a->p->frames[i], O_RDONLY, 0);
    if (a->fd[i] < 0)
      return mr_err_errno(a->err, MR_E_IO, a->p->frames[i], "cannot open");
  }
  a->slice_bytes = mr_mem_alloc(SLICES, sizeof *a->slice_bytes);
  a->slice_of = mr_mem_alloc(SLICES, sizeof *a->slice_of);
  if (!a->slice_bytes || !a->slice_of)
    return nomem(a->err);
  return mr_zpack_open(&a->pack, 1, a->err);
}

static void close_all(assembly *a) {
  for (int i = 0; i < MR_STREAMS; i++)
    if (a->fd[i] >= 0)
      mr_sys_now->close(a->fd[i]);
  for (uint32_t b = 0; a->buckets && b < a->n_buckets; b++)
    mr_text_free(&a->buckets[b].pending);
  mr_mem_free(a->buckets);
  mr_mem_free(a->slice_bytes);
  mr_mem_free(a->slice_of);
  mr_mem_free(a->mem.refs);
  mr_text_free(&a->mem.text);
  mr_text_free(&a->frame);
  mr_text_free(&a->packed);
  mr_zpack_close(a->pack);
}

mr_code mr_assemble_run(const mr_paths *p, uint64_t rows, bool completion_order,
                        size_t bucket_bytes, mr_assemble_sink sink, void *ctx, mr_err *err) {
  assembly a = {.p = p,
                .rows = rows,
                .completion = completion_order,
                .sink = sink,
                .ctx = ctx,
                .err = err,
                .bucket_bytes = bucket_bytes ? bucket_bytes : BUCKET_BYTES,
                .fd = {-1, -1}};
  mr_code rc = open_all(&a);
  if (!rc && !completion_order)
    rc = make_buckets(&a);
  if (!rc)
    rc = mr_journal_read(p->journal, scatter, &a, NULL, err);
  if (!rc)
    rc = a.rc;
  if (!rc && !completion_order && a.n_buckets == 1)
    rc = emit_sorted(&a);
  for (uint32_t b = 0; !rc && a.n_buckets > 1 && b < a.n_buckets; b++)
    rc = emit_bucket(&a, b);
  if (!rc && a.emitted != rows)
    rc = mr_err_at(err, MR_E_DATA, p->journal, 0, -1, "%llu of %llu rows are in the journal",
                   (unsigned long long)a.emitted, (unsigned long long)rows);
  close_all(&a);
  return rc;
}
