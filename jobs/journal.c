#include "jobs/journal.h"

#include <fcntl.h>
#include <stdbool.h>
#include <string.h>

#include "io/durable.h"
#include "io/hash.h"
#include "io/mem.h"
#include "io/sys.h"
#include "io/text.h"

#define MAGIC "MRJRNL1\n"
#define MAGIC_BYTES 8
#define HEAD_BYTES 8
#define TAIL_BYTES 4
#define PAYLOAD_MAX ((uint32_t)1 << 26) /* a frame record of 256 rows has some KiB */

struct mr_journal {
  int fd;
  char *path;
  uint32_t crc;
  bool broken; /* J4 */
};

typedef struct cursor {
  int fd;
  const char *path;
  uint64_t at, size;
  uint32_t crc;
  unsigned char *buf;
  size_t cap;
} cursor;

static mr_code nomem(mr_err *err) {
  return mr_err_set(err, MR_E_NOMEM, "out of memory");
}

static void put_le32(unsigned char *p, uint32_t v) {
  for (int i = 0; i < 4; i++)
    p[i] = (unsigned char)(v >> (8 * i));
}

static uint32_t le32(const unsigned char *p) {
  return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* Reads the record at c->at. *good false: the good prefix ends here (J1). */
static mr_code next(cursor *c, uint32_t *type, size_t *len, bool *good, mr_err *err) {
  unsigned char head[HEAD_BYTES];
  *good = false;
  if (c->size - c->at < HEAD_BYTES + TAIL_BYTES)
    return MR_OK;
  if (mr_sys_pread_all(c->fd, head, sizeof head, (off_t)c->at))
    return mr_err_errno(err, MR_E_IO, c->path, "cannot read");
  uint32_t n = le32(head);
  if (n > PAYLOAD_MAX || n > c->size - c->at - HEAD_BYTES - TAIL_BYTES)
    return MR_OK;
  if (!mr_mem_grow((void **)&c->buf, &c->cap, (size_t)n + TAIL_BYTES, 1))
    return nomem(err);
  if (mr_sys_pread_all(c->fd, c->buf, n + TAIL_BYTES, (off_t)(c->at + HEAD_BYTES)))
    return mr_err_errno(err, MR_E_IO, c->path, "cannot read");
  uint32_t crc = mr_crc32c(mr_crc32c(c->crc, head, sizeof head), c->buf, n);
  if (crc != le32(c->buf + n))
    return MR_OK;
  c->crc = crc;
  *type = le32(head + 4);
  *len = n;
  *good = true;
  return MR_OK;
}

/* Leaves the cursor at the end of the good prefix, with its CRC. */
static mr_code replay(cursor *c, mr_journal_visit visit, void *ctx, mr_err *err) {
  char magic[MAGIC_BYTES];
  uint64_t records = 0;
  ssize_t n = mr_sys_pread_full(c->fd, magic, MAGIC_BYTES, 0);
  if (n < 0)
    return mr_err_errno(err, MR_E_IO, c->path, "cannot read");
  if (n != MAGIC_BYTES || memcmp(magic, MAGIC, MAGIC_BYTES) != 0)
    return mr_err_at(err, MR_E_DATA, c->path, 0, -1, "not a journal of this version of millrace");
  c->at = MAGIC_BYTES;
  c->crc = mr_crc32c(0, magic, MAGIC_BYTES);
  for (;;) {
    uint32_t type, before = c->crc;
    size_t len;
    bool good;
    mr_code rc = next(c, &type, &len, &good, err);
    if (rc)
      return rc;
    good = good && (records == 0) == (type == MR_RECORD_HEADER);
    rc = good ? visit(ctx, type, c->buf, len) : MR_E_DATA;
    if (rc == MR_E_DATA) {
      c->crc = before;
      break;
    }
    if (rc)
      return mr_err_at(err, rc, c->path, 0, (int64_t)c->at,
                       rc == MR_E_NOMEM ? "out of memory" : "cannot go on here");
    c->at += HEAD_BYTES + len + TAIL_BYTES;
    records++;
  }
  if (records == 0)
    return mr_err_at(err, MR_E_DATA, c->path, 0, -1, "the journal's header is damaged");
  return MR_OK;
}

static mr_code scan(int fd, const char *path, mr_journal_visit visit, void *ctx, cursor *c,
                    mr_err *err) {
  struct stat st;
  memset(c, 0, sizeof *c);
  c->fd = fd;
  c->path = path;
  if (mr_sys_now->fstat(fd, &st))
    return mr_err_errno(err, MR_E_IO, path, "cannot stat");
  c->size = (uint64_t)st.st_size;
  mr_code rc = replay(c, visit, ctx, err);
  mr_mem_free(c->buf);
  c->buf = NULL;
  return rc;
}

static mr_code wrap(mr_journal **out, int fd, const char *path, uint32_t crc, mr_err *err) {
  mr_journal *j = mr_mem_alloc(1, sizeof *j);
  char *name = mr_mem_copy(path, strlen(path));
  if (!j || !name) {
    mr_mem_free(j);
    mr_mem_free(name);
    return nomem(err);
  }
  *j = (mr_journal){.fd = fd, .path = name, .crc = crc};
  *out = j;
  return MR_OK;
}

/* head, payload and tail as one write: a crash tears it, but never interleaves it. */
static mr_code encode(mr_text *t, uint32_t *crc, uint32_t type, const void *payload, size_t len,
                      mr_err *err) {
  unsigned char head[HEAD_BYTES], tail[TAIL_BYTES];
  if (len > PAYLOAD_MAX)
    return mr_err_set(err, MR_E_INTERNAL, "a journal record of %zu bytes; the limit is %u", len,
                      PAYLOAD_MAX);
  put_le32(head, (uint32_t)len);
  put_le32(head + 4, type);
  *crc = mr_crc32c(mr_crc32c(*crc, head, sizeof head), payload, len);
  put_le32(tail, *crc);
  mr_text_add(t, head, sizeof head);
  mr_text_add(t, payload, len);
  mr_text_add(t, tail, sizeof tail);
  return t->failed ? nomem(err) : MR_OK;
}

mr_code mr_journal_create(mr_journal **out, const char *path, const void *header, size_t len,
                          mr_err *err) {
  mr_text t = {0};
  uint32_t crc = mr_crc32c(0, MAGIC, MAGIC_BYTES);
  mr_text_add(&t, MAGIC, MAGIC_BYTES);
  mr_code rc = encode(&t, &crc, MR_RECORD_HEADER, header, len, err);
  if (!rc)
    rc = mr_durable_write(path, t.data, t.len, err); /* J3 */
  mr_text_free(&t);
  if (rc)
    return rc;
  int fd = mr_sys_now->open(path, O_WRONLY | O_APPEND, 0);
  if (fd < 0)
    return mr_err_errno(err, MR_E_CANTCREATE, path, "cannot open for writing");
  rc = wrap(out, fd, path, crc, err);
  if (rc)
    mr_sys_now->close(fd);
  return rc;
}

mr_code mr_journal_open(mr_journal **out, const char *path, mr_journal_visit visit, void *ctx,
                        mr_err *err) {
  cursor c;
  int fd = mr_sys_now->open(path, O_RDWR | O_APPEND, 0);
  if (fd < 0)
    return mr_err_errno(err, MR_E_IO, path, "cannot open");
  mr_code rc = scan(fd, path, visit, ctx, &c, err);
  if (!rc && c.at < c.size) { /* J2 */
    if (mr_sys_now->ftruncate(fd, (off_t)c.at))
      rc = mr_err_errno(err, MR_E_IO, path, "cannot cut the torn end");
  }
  /* A run may have been killed before it synced the last record, or the name of the journal. */
  if (!rc)
    rc = mr_durable_sync(fd, path, err);
  if (!rc)
    rc = mr_durable_sync_parent(path, err);
  if (!rc)
    rc = wrap(out, fd, path, c.crc, err);
  if (rc)
    mr_sys_now->close(fd);
  return rc;
}

mr_code mr_journal_read(const char *path, mr_journal_visit visit, void *ctx, uint64_t *torn,
                        mr_err *err) {
  cursor c;
  int fd = mr_sys_now->open(path, O_RDONLY, 0);
  if (fd < 0)
    return mr_err_errno(err, MR_E_IO, path, "cannot open");
  mr_code rc = scan(fd, path, visit, ctx, &c, err);
  if (!rc && torn)
    *torn = c.size - c.at;
  mr_sys_now->close(fd);
  return rc;
}

mr_code mr_journal_append(mr_journal *j, uint32_t type, const void *payload, size_t len,
                          mr_err *err) {
  if (j->broken)
    return mr_err_at(err, MR_E_IO, j->path, 0, -1,
                     "an earlier write failed; run the job again to resume it");
  mr_text t = {0};
  uint32_t crc = j->crc;
  mr_code rc = encode(&t, &crc, type, payload, len, err);
  if (!rc) {
    if (mr_sys_write_full(j->fd, t.data, t.len))
      rc = mr_err_errno(err, MR_E_IO, j->path, "cannot write");
    else
      rc = mr_durable_sync_data(j->fd, j->path, err);
    j->broken = rc != MR_OK; /* J4 */
  }
  mr_text_free(&t);
  if (!rc)
    j->crc = crc;
  return rc;
}

void mr_journal_close(mr_journal *j) {
  if (!j)
    return;
  mr_sys_now->close(j->fd);
  mr_mem_free(j->path);
  mr_mem_free(j);
}
