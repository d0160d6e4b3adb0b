#include "io/zframe.h"

#include <fcntl.h>
#include <string.h>
#include <zstd.h>
#include <zstd_errors.h>

#include "io/mem.h"
#include "io/sys.h"

#define SKIP_MAGIC 0x184D2A5Eu
#define SEEK_MAGIC 0x8F92EAB1u
#define HAS_CHECKSUMS 0x80
#define ENTRY_BYTES 12
#define FOOTER_BYTES 9
#define SKIP_HEAD_BYTES 8
#define FRAMES_MAX 0x8000000u /* of the format's specification */

typedef struct entry {
  uint32_t packed, content, check; /* bytes, bytes, checksum */
} entry;

struct mr_zpack {
  ZSTD_CCtx *ctx;
  entry *entries;
  size_t n, cap;
};

struct mr_zfile {
  int fd;
  char *path;
  entry *entries;
  uint64_t *at; /* [n] offset of each frame */
  uint32_t n;
  uint64_t text_bytes;
};

static void put_le32(mr_text *t, uint32_t v) {
  unsigned char b[4] = {(unsigned char)v, (unsigned char)(v >> 8), (unsigned char)(v >> 16),
                        (unsigned char)(v >> 24)};
  mr_text_add(t, b, 4);
}

static uint32_t le32(const unsigned char *p) {
  return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static mr_code nomem(mr_err *err) {
  return mr_err_set(err, MR_E_NOMEM, "out of memory");
}

/* Memory that runs out inside of zstd is neither a damaged frame nor a defect. */
static mr_code zstd_failed(mr_err *err, mr_code code, const char *name, size_t n) {
  if (ZSTD_getErrorCode(n) == ZSTD_error_memory_allocation)
    return nomem(err);
  return mr_err_at(err, code, name, 0, -1, "%s: %s",
                   code == MR_E_DATA ? "a zstd frame is damaged" : "zstd", ZSTD_getErrorName(n));
}

mr_code mr_zpack_open(mr_zpack **out, int level, mr_err *err) {
  mr_zpack *z = mr_mem_alloc(1, sizeof *z);
  if (!z)
    return nomem(err);
  z->ctx = ZSTD_createCCtx();
  if (!z->ctx) {
    mr_mem_free(z);
    return nomem(err);
  }
  ZSTD_CCtx_setParameter(z->ctx, ZSTD_c_compressionLevel, level);
  ZSTD_CCtx_setParameter(z->ctx, ZSTD_c_checksumFlag, 1);
  ZSTD_CCtx_setParameter(z->ctx, ZSTD_c_contentSizeFlag, 1);
  *out = z;
  return MR_OK;
}

void mr_zpack_close(mr_zpack *z) {
  if (!z)
    return;
  ZSTD_freeCCtx(z->ctx);
  mr_mem_free(z->entries);
  mr_mem_free(z);
}

mr_code mr_zpack_frame(mr_zpack *z, const void *text, size_t len, mr_text *out, mr_err *err) {
  if (len > MR_ZFRAME_MAX || z->n >= FRAMES_MAX)
    return mr_err_set(err, MR_E_IO,
                      "a frame of %zu bytes after %zu frames is beyond the limits of the format",
                      len, z->n);
  size_t bound = ZSTD_compressBound(len);
  char *buf = mr_mem_alloc(bound, 1);
  if (!buf || !mr_mem_grow((void **)&z->entries, &z->cap, z->n + 1, sizeof *z->entries)) {
    mr_mem_free(buf);
    return nomem(err);
  }
  size_t n = ZSTD_compress2(z->ctx, buf, bound, len ? text : "", len);
  mr_code rc = MR_OK;
  if (ZSTD_isError(n)) {
    rc = zstd_failed(err, MR_E_INTERNAL, NULL, n);
  } else {
    /* The frame ends with the low 32 bits of XXH64 of its content: what the seek table wants too.
     */
    z->entries[z->n++] = (entry){(uint32_t)n, (uint32_t)len, le32((unsigned char *)buf + n - 4)};
    mr_text_add(out, buf, n);
    rc = out->failed ? nomem(err) : MR_OK;
  }
  mr_mem_free(buf);
  return rc;
}

mr_code mr_zpack_table(mr_zpack *z, mr_text *out, mr_err *err) {
  put_le32(out, SKIP_MAGIC);
  put_le32(out, (uint32_t)(z->n * ENTRY_BYTES + FOOTER_BYTES));
  for (size_t i = 0; i < z->n; i++) {
    put_le32(out, z->entries[i].packed);
    put_le32(out, z->entries[i].content);
    put_le32(out, z->entries[i].check);
  }
  put_le32(out, (uint32_t)z->n);
  mr_text_addc(out, (char)HAS_CHECKSUMS);
  put_le32(out, SEEK_MAGIC);
  return out->failed ? nomem(err) : MR_OK;
}

mr_code mr_zframe_unpack(const void *frame, size_t len, size_t max, const char *name, mr_text *out,
                         mr_err *err) {
  unsigned long long content = ZSTD_getFrameContentSize(frame, len);
  if (content == ZSTD_CONTENTSIZE_ERROR || content == ZSTD_CONTENTSIZE_UNKNOWN)
    return mr_err_at(err, MR_E_DATA, name, 0, -1, "not a zstd frame that states its size");
  if (content > max)
    return mr_err_at(err, MR_E_DATA, name, 0, -1, "a frame of %llu bytes; the limit is %zu",
                     content, max);
  if (ZSTD_findFrameCompressedSize(frame, len) != len)
    return mr_err_at(err, MR_E_DATA, name, 0, -1, "a zstd frame does not end where it should");
  char *buf = mr_mem_alloc((size_t)content, 1);
  if (!buf)
    return nomem(err);
  size_t n = ZSTD_decompress(buf, (size_t)content, frame, len);
  mr_code rc = MR_OK;
  if (ZSTD_isError(n))
    rc = zstd_failed(err, MR_E_DATA, name, n);
  else if (n != content)
    rc = mr_err_at(err, MR_E_DATA, name, 0, -1, "a zstd frame is damaged: wrong size");
  else
    mr_text_add(out, buf, n);
  mr_mem_free(buf);
  return out->failed ? nomem(err) : rc;
}

static mr_code bad_table(const char *path, const char *why, mr_err *err) {
  return mr_err_at(err, MR_E_DATA, path, 0, -1, "not a whole file of millrace: %s", why);
}

/* Fills entries and offsets from the raw table; the frames must fill the file up to the table
 * exactly. */
static mr_code take_entries(mr_zfile *f, const unsigned char *raw, uint64_t table_at, mr_err *err) {
  uint64_t at = 0;
  for (uint32_t i = 0; i < f->n; i++, raw += ENTRY_BYTES) {
    f->entries[i] = (entry){le32(raw), le32(raw + 4), le32(raw + 8)};
    f->at[i] = at;
    at += f->entries[i].packed;
    f->text_bytes += f->entries[i].content;
    if (f->entries[i].content > MR_ZFRAME_MAX)
      return bad_table(f->path, "a frame in the seek table is too large", err);
  }
  return at == table_at
             ? MR_OK
             : bad_table(f->path, "the seek table does not match the file's length", err);
}

static mr_code read_table(mr_zfile *f, mr_err *err) {
  struct stat st;
  unsigned char foot[FOOTER_BYTES], head[SKIP_HEAD_BYTES];
  if (mr_sys_now->fstat(f->fd, &st))
    return mr_err_errno(err, MR_E_IO, f->path, "cannot stat");
  uint64_t size = (uint64_t)st.st_size;
  if (size < SKIP_HEAD_BYTES + FOOTER_BYTES)
    return bad_table(f->path, "it is too short for a seek table", err);
  if (mr_sys_pread_all(f->fd, foot, FOOTER_BYTES, (off_t)(size - FOOTER_BYTES)))
    return mr_err_errno(err, MR_E_IO, f->path, "cannot read");
  f->n = le32(foot);
  if (le32(foot + 5) != SEEK_MAGIC || foot[4] != HAS_CHECKSUMS)
    return bad_table(f->path, "it does not end with a seek table", err);
  uint64_t body = (uint64_t)f->n * ENTRY_BYTES + FOOTER_BYTES, table = body + SKIP_HEAD_BYTES;
  if (f->n > FRAMES_MAX || table > size)
    return bad_table(f->path, "the seek table is longer than the file", err);
  if (mr_sys_pread_all(f->fd, head, SKIP_HEAD_BYTES, (off_t)(size - table)))
    return mr_err_errno(err, MR_E_IO, f->path, "cannot read");
  if (le32(head) != SKIP_MAGIC || le32(head + 4) != body)
    return bad_table(f->path, "the seek table's head is damaged", err);
  size_t raw_bytes = (size_t)f->n * ENTRY_BYTES;
  unsigned char *raw = mr_mem_alloc(raw_bytes, 1);
  f->entries = mr_mem_alloc(f->n, sizeof *f->entries);
  f->at = mr_mem_alloc(f->n, sizeof *f->at);
  mr_code rc = raw && f->entries && f->at ? MR_OK : nomem(err);
  if (!rc && mr_sys_pread_all(f->fd, raw, raw_bytes, (off_t)(size - table + SKIP_HEAD_BYTES)))
    rc = mr_err_errno(err, MR_E_IO, f->path, "cannot read");
  if (!rc)
    rc = take_entries(f, raw, size - table, err);
  mr_mem_free(raw);
  return rc;
}

mr_code mr_zfile_open(mr_zfile **out, const char *path, mr_err *err) {
  mr_zfile *f = mr_mem_alloc(1, sizeof *f);
  if (!f)
    return nomem(err);
  f->fd = mr_sys_now->open(path, O_RDONLY, 0);
  f->path = mr_mem_copy(path, strlen(path));
  mr_code rc = MR_OK;
  if (f->fd < 0)
    rc = mr_err_errno(err, MR_E_IO, path, "cannot open");
  else
    rc = f->path ? read_table(f, err) : nomem(err);
  if (rc) {
    mr_zfile_close(f);
    return rc;
  }
  *out = f;
  return MR_OK;
}

uint32_t mr_zfile_frames(const mr_zfile *f) {
  return f->n;
}

uint64_t mr_zfile_text_bytes(const mr_zfile *f) {
  return f->text_bytes;
}

mr_code mr_zfile_read(mr_zfile *f, uint32_t i, mr_text *out, mr_err *err) {
  const entry *e = &f->entries[i];
  unsigned char *buf = mr_mem_alloc(e->packed, 1);
  if (!buf)
    return nomem(err);
  mr_code rc = MR_OK;
  mr_text_clear(out);
  if (mr_sys_pread_all(f->fd, buf, e->packed, (off_t)f->at[i]))
    rc = mr_err_errno(err, MR_E_IO, f->path, "cannot read");
  if (!rc && (e->packed < 4 || le32(buf + e->packed - 4) != e->check))
    rc = bad_table(f->path, "a frame's checksum differs from the seek table", err);
  if (!rc)
    rc = mr_zframe_unpack(buf, e->packed, MR_ZFRAME_MAX, f->path, out, err);
  if (!rc && out->len != e->content)
    rc = bad_table(f->path, "a frame's size differs from the seek table", err);
  mr_mem_free(buf);
  return rc;
}

void mr_zfile_close(mr_zfile *f) {
  if (!f)
    return;
  if (f->fd >= 0)
    mr_sys_now->close(f->fd);
  mr_mem_free(f->path);
  mr_mem_free(f->entries);
  mr_mem_free(f->at);
  mr_mem_free(f);
}
