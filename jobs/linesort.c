#include "jobs/linesort.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include "io/mem.h"
#include "io/sys.h"
#include "io/zframe.h"

#define BUCKET_BYTES_MIN ((uint64_t)16 << 20)
#define BUCKET_BYTES_MAX ((uint64_t)64 << 20)
#define BUCKETS 64 /* so many, if their size allows it */
#define SLICES 4096
#define SPILL_BYTES_ALL ((size_t)16 << 20) /* buffers of all buckets together */
#define SPILL_BYTES_MAX ((size_t)256 << 10)
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

struct mr_linesort {
  const char *prefix;
  uint64_t rows, emitted;
  uint64_t bucket_bytes; /* 0: yet to be chosen */
  size_t spill_bytes;
  uint64_t slice_bytes[SLICES];
  uint32_t slice_of[SLICES]; /* bucket of each slice */
  bucket *buckets;
  uint32_t n_buckets;
  lines mem; /* the one bucket, or the one now read */
  mr_zpack *pack;
  mr_text frame, packed;
};

static mr_code nomem(mr_err *err) {
  return mr_err_set(err, MR_E_NOMEM, "out of memory");
}

mr_code mr_linesort_open(mr_linesort **out, const char *prefix, uint64_t rows, size_t bucket_bytes,
                         mr_err *err) {
  mr_linesort *s = mr_mem_alloc(1, sizeof *s);
  if (!s)
    return nomem(err);
  s->prefix = prefix;
  s->rows = rows;
  s->bucket_bytes = bucket_bytes;
  mr_code rc = mr_zpack_open(&s->pack, 1, err);
  if (rc)
    mr_linesort_close(s);
  else
    *out = s;
  return rc;
}

static size_t slice_at(const mr_linesort *s, uint64_t row) {
  return s->rows <= SLICES ? (size_t)row : (size_t)((unsigned __int128)row * SLICES / s->rows);
}

void mr_linesort_expect(mr_linesort *s, uint64_t row, uint64_t bytes) {
  s->slice_bytes[slice_at(s, row)] += bytes + 2 * sizeof(line_ref); /* qsort takes one too */
}

static void choose_size(mr_linesort *s) {
  uint64_t all = 0;
  for (size_t i = 0; i < SLICES; i++)
    all += s->slice_bytes[i];
  s->bucket_bytes = all / BUCKETS;
  if (s->bucket_bytes < BUCKET_BYTES_MIN)
    s->bucket_bytes = BUCKET_BYTES_MIN;
  if (s->bucket_bytes > BUCKET_BYTES_MAX)
    s->bucket_bytes = BUCKET_BYTES_MAX;
}

mr_code mr_linesort_begin(mr_linesort *s, mr_err *err) {
  if (!s->bucket_bytes)
    choose_size(s);
  uint64_t sum = 0;
  uint32_t b = 0;
  for (size_t i = 0; i < SLICES; i++) {
    if (sum > 0 && sum + s->slice_bytes[i] > s->bucket_bytes) {
      b++;
      sum = 0;
    }
    sum += s->slice_bytes[i];
    s->slice_of[i] = b;
  }
  s->n_buckets = b + 1;
  s->spill_bytes = SPILL_BYTES_ALL / s->n_buckets;
  if (s->spill_bytes > SPILL_BYTES_MAX)
    s->spill_bytes = SPILL_BYTES_MAX;
  s->buckets = mr_mem_alloc(s->n_buckets, sizeof *s->buckets);
  return s->buckets ? MR_OK : nomem(err);
}

static mr_code bucket_name(const mr_linesort *s, uint32_t b, mr_text *name, mr_err *err) {
  mr_text_addf(name, "%s.%u", s->prefix, b);
  return name->failed ? nomem(err) : MR_OK;
}

/* Appends the pending lines to the bucket's file: u32 length, one packed frame. Opened each time,
 * so that the number of buckets is not bounded by the number of open files. */
static mr_code spill(mr_linesort *s, uint32_t b, mr_err *err) {
  bucket *k = &s->buckets[b];
  if (k->pending.failed)
    return nomem(err);
  if (k->pending.len == 0)
    return MR_OK;
  mr_text name = {0};
  mr_text_clear(&s->packed);
  mr_text_add(&s->packed, "\0\0\0\0", 4);
  mr_code rc = bucket_name(s, b, &name, err);
  if (!rc)
    rc = mr_zpack_frame(s->pack, k->pending.data, k->pending.len, &s->packed, err);
  if (!rc) {
    uint32_t n = (uint32_t)(s->packed.len - 4);
    memcpy(s->packed.data, &n, 4);
    int fd =
        mr_sys_now->open(name.data, O_WRONLY | O_CREAT | (k->spilled ? O_APPEND : O_TRUNC), 0666);
    if (fd < 0)
      rc = mr_err_errno(err, MR_E_CANTCREATE, name.data, "cannot create");
    else if (mr_sys_write_full(fd, s->packed.data, s->packed.len))
      rc = mr_err_errno(err, MR_E_IO, name.data, "cannot write");
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

mr_code mr_linesort_add(mr_linesort *s, uint64_t row, mr_line_kind kind, const char *text,
                        uint32_t len, mr_err *err) {
  if (s->n_buckets == 1)
    return keep(&s->mem, row, kind, text, len, err);
  uint32_t b = s->slice_of[slice_at(s, row)];
  mr_text *t = &s->buckets[b].pending;
  uint8_t k = (uint8_t)kind;
  mr_text_add(t, &row, sizeof row);
  mr_text_add(t, &k, 1);
  mr_text_add(t, &len, sizeof len);
  mr_text_add(t, text, len);
  return t->len >= s->spill_bytes || t->failed ? spill(s, b, err) : MR_OK;
}

static int by_row(const void *x, const void *y) {
  uint64_t a = ((const line_ref *)x)->row, b = ((const line_ref *)y)->row;
  return (a > b) - (a < b);
}

static mr_code emit_sorted(mr_linesort *s, const char *name, mr_line_sink sink, void *ctx,
                           mr_err *err) {
  lines *m = &s->mem;
  mr_code rc = MR_OK;
  if (m->n)
    qsort(m->refs, m->n, sizeof *m->refs, by_row);
  for (size_t i = 0; !rc && i < m->n; i++) {
    const line_ref *r = &m->refs[i];
    if (r->row != s->emitted)
      return mr_err_at(err, MR_E_DATA, name, 0, -1, "row %llu is there %s",
                       (unsigned long long)(r->row < s->emitted ? r->row : s->emitted),
                       r->row < s->emitted ? "twice" : "not at all");
    s->emitted++;
    rc = sink(ctx, r->row, (mr_line_kind)r->kind, m->text.data + r->at, r->bytes, err);
  }
  mr_text_clear(&m->text);
  m->n = 0;
  return rc;
}

static mr_code take_chunk(mr_linesort *s, const char *name, mr_err *err) {
  for (size_t at = 0; at < s->frame.len;) {
    uint64_t row;
    uint32_t len;
    const char *p = s->frame.data + at;
    if (s->frame.len - at < SPILL_HEAD)
      return mr_err_at(err, MR_E_DATA, name, 0, -1, "damaged while the job ran");
    memcpy(&row, p, sizeof row);
    memcpy(&len, p + 9, sizeof len);
    uint8_t kind = (uint8_t)p[8];
    if (len == 0 || len > s->frame.len - at - SPILL_HEAD || kind >= MR_STREAMS)
      return mr_err_at(err, MR_E_DATA, name, 0, -1, "damaged while the job ran");
    mr_code rc = keep(&s->mem, row, (mr_line_kind)kind, p + SPILL_HEAD, len, err);
    if (rc)
      return rc;
    at += SPILL_HEAD + (size_t)len;
  }
  return MR_OK;
}

static mr_code read_bucket(mr_linesort *s, int fd, const char *name, mr_err *err) {
  for (;;) {
    uint32_t n;
    ssize_t k = mr_sys_read_full(fd, &n, sizeof n);
    if (k == 0)
      return MR_OK;
    if (k < 0)
      return mr_err_errno(err, MR_E_IO, name, "cannot read");
    char *buf = mr_mem_alloc(n, 1);
    if (!buf)
      return nomem(err);
    mr_code rc = MR_OK;
    mr_text_clear(&s->frame);
    if (k != (ssize_t)sizeof n || mr_sys_read_full(fd, buf, n) != (ssize_t)n)
      rc = mr_err_at(err, MR_E_IO, name, 0, -1, "cut off while the job ran");
    if (!rc)
      rc = mr_zframe_unpack(buf, n, MR_ZFRAME_MAX, name, &s->frame, err);
    if (!rc)
      rc = take_chunk(s, name, err);
    mr_mem_free(buf);
    if (rc)
      return rc;
  }
}

/* Brings the bucket's lines back into memory. */
static mr_code load_bucket(mr_linesort *s, uint32_t b, mr_err *err) {
  mr_text name = {0};
  mr_code rc = spill(s, b, err);
  if (!rc && s->buckets[b].spilled) {
    rc = bucket_name(s, b, &name, err);
    int fd = rc ? -1 : mr_sys_now->open(name.data, O_RDONLY, 0);
    if (!rc)
      rc = fd < 0 ? mr_err_errno(err, MR_E_IO, name.data, "cannot open")
                  : read_bucket(s, fd, name.data, err);
    if (fd >= 0)
      mr_sys_now->close(fd);
    if (!rc)
      mr_sys_now->unlink(name.data);
  }
  mr_text_free(&name);
  return rc;
}

mr_code mr_linesort_emit(mr_linesort *s, const char *name, mr_line_sink sink, void *ctx,
                         mr_err *err) {
  mr_code rc = MR_OK;
  for (uint32_t b = 0; !rc && b < s->n_buckets; b++) {
    rc = s->n_buckets > 1 ? load_bucket(s, b, err) : MR_OK;
    if (!rc)
      rc = emit_sorted(s, name, sink, ctx, err);
  }
  if (!rc && s->emitted != s->rows)
    rc = mr_err_at(err, MR_E_DATA, name, 0, -1, "%llu of %llu rows are there",
                   (unsigned long long)s->emitted, (unsigned long long)s->rows);
  return rc;
}

void mr_linesort_close(mr_linesort *s) {
  if (!s)
    return;
  for (uint32_t b = 0; s->buckets && b < s->n_buckets; b++)
    mr_text_free(&s->buckets[b].pending);
  mr_mem_free(s->buckets);
  mr_mem_free(s->mem.refs);
  mr_text_free(&s->mem.text);
  mr_text_free(&s->frame);
  mr_text_free(&s->packed);
  mr_zpack_close(s->pack);
  mr_mem_free(s);
}
