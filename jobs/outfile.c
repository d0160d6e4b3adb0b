#include "jobs/outfile.h"

#include <archive.h>
#include <archive_entry.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "io/durable.h"
#include "io/mem.h"
#include "io/sys.h"
#include "io/zframe.h"

#define FRAME_LINES 256
#define FRAME_BYTES ((size_t)1 << 20)

struct mr_outfile {
  int fd;
  char *path;
  mr_output_format format;
  mr_hasher *hash;
  mr_zpack *pack;      /* MR_OUT_ZST */
  struct archive *gz;  /* MR_OUT_GZ */
  mr_text text, frame; /* lines not yet written; the packed frame */
  int text_lines;
  uint64_t bytes, lines;
  int write_errno; /* of a write inside libarchive's callback */
};

static mr_code nomem(mr_err *err) {
  return mr_err_set(err, MR_E_NOMEM, "out of memory");
}

static mr_code put(mr_outfile *o, const void *bytes, size_t len, mr_err *err) {
  if (mr_sys_write_full(o->fd, bytes, len))
    return mr_err_errno(err, MR_E_IO, o->path, "cannot write");
  mr_hasher_add(o->hash, bytes, len);
  o->bytes += len;
  return MR_OK;
}

static la_ssize_t gz_write(struct archive *a, void *ctx, const void *bytes, size_t len) {
  mr_outfile *o = ctx;
  (void)a;
  if (mr_sys_write_full(o->fd, bytes, len)) {
    o->write_errno = errno;
    return -1;
  }
  mr_hasher_add(o->hash, bytes, len);
  o->bytes += len;
  return (la_ssize_t)len;
}

static mr_code gz_failed(mr_outfile *o, mr_err *err) {
  if (o->write_errno) {
    errno = o->write_errno;
    return mr_err_errno(err, MR_E_IO, o->path, "cannot write");
  }
  if (archive_errno(o->gz) == ENOMEM)
    return nomem(err);
  const char *why = archive_error_string(o->gz);
  return mr_err_at(err, MR_E_IO, o->path, 0, -1, "gzip: %s", why ? why : "unknown error");
}

static mr_code gz_open(mr_outfile *o, mr_err *err) {
  o->gz = archive_write_new();
  struct archive_entry *e = archive_entry_new();
  mr_code rc = o->gz && e ? MR_OK : nomem(err);
  if (!rc) {
    archive_entry_set_filetype(e, AE_IFREG);
    if (archive_write_set_format_raw(o->gz) || archive_write_add_filter_gzip(o->gz) ||
        archive_write_set_filter_option(o->gz, "gzip", "timestamp", NULL) ||
        archive_write_set_bytes_in_last_block(o->gz, 1) ||
        archive_write_open(o->gz, o, NULL, gz_write, NULL) || archive_write_header(o->gz, e))
      rc = gz_failed(o, err);
  }
  archive_entry_free(e);
  return rc;
}

mr_code mr_outfile_open(mr_outfile **out, const char *path, mr_output_format format, int zstd_level,
                        mr_err *err) {
  mr_outfile *o = mr_mem_alloc(1, sizeof *o);
  if (!o)
    return nomem(err);
  o->format = format;
  if (format == MR_OUT_STDOUT) {
    path = "standard output";
    o->fd = STDOUT_FILENO;
  } else {
    o->fd = mr_sys_now->open(path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
  }
  mr_code rc = o->fd < 0 ? mr_err_errno(err, MR_E_CANTCREATE, path, "cannot create") : MR_OK;
  o->path = mr_mem_copy(path, strlen(path));
  o->hash = mr_hasher_new();
  if (!rc && (!o->path || !o->hash))
    rc = nomem(err);
  if (!rc && format == MR_OUT_ZST)
    rc = mr_zpack_open(&o->pack, zstd_level, err);
  if (!rc && format == MR_OUT_GZ)
    rc = gz_open(o, err);
  if (rc)
    mr_outfile_close(o);
  else
    *out = o;
  return rc;
}

/* Writes the buffered lines: as one frame, through gzip, or as they are. */
static mr_code drain(mr_outfile *o, mr_err *err) {
  mr_code rc = MR_OK;
  if (o->text.failed)
    return nomem(err);
  if (o->text.len == 0)
    return MR_OK;
  if (o->format == MR_OUT_ZST) {
    mr_text_clear(&o->frame);
    rc = mr_zpack_frame(o->pack, o->text.data, o->text.len, &o->frame, err);
    if (!rc)
      rc = put(o, o->frame.data, o->frame.len, err);
  } else if (o->format == MR_OUT_GZ) {
    la_ssize_t k = archive_write_data(o->gz, o->text.data, o->text.len);
    rc = k == (la_ssize_t)o->text.len ? MR_OK : gz_failed(o, err);
  } else {
    rc = put(o, o->text.data, o->text.len, err);
  }
  mr_text_clear(&o->text);
  o->text_lines = 0;
  return rc;
}

mr_code mr_outfile_line(mr_outfile *o, const char *line, size_t len, mr_err *err) {
  mr_text_add(&o->text, line, len);
  o->lines++;
  if (++o->text_lines >= FRAME_LINES || o->text.len >= FRAME_BYTES || o->text.failed)
    return drain(o, err);
  return MR_OK;
}

mr_code mr_outfile_finish(mr_outfile *o, mr_outfile_info *info, mr_err *err) {
  mr_code rc = drain(o, err);
  if (!rc && o->format == MR_OUT_ZST) {
    mr_text_clear(&o->frame);
    rc = mr_zpack_table(o->pack, &o->frame, err);
    if (!rc)
      rc = put(o, o->frame.data, o->frame.len, err);
  }
  if (!rc && o->format == MR_OUT_GZ && archive_write_close(o->gz))
    rc = gz_failed(o, err);
  if (!rc && o->format != MR_OUT_STDOUT)
    rc = mr_durable_sync(o->fd, o->path, err);
  if (rc)
    return rc;
  info->bytes = o->bytes;
  info->lines = o->lines;
  mr_hasher_hex(o->hash, info->digest);
  return MR_OK;
}

void mr_outfile_close(mr_outfile *o) {
  if (!o)
    return;
  if (o->gz)
    archive_write_free(o->gz);
  if (o->fd >= 0 && o->format != MR_OUT_STDOUT)
    mr_sys_now->close(o->fd);
  mr_zpack_close(o->pack);
  mr_hasher_free(o->hash);
  mr_text_free(&o->text);
  mr_text_free(&o->frame);
  mr_mem_free(o->path);
  mr_mem_free(o);
}
