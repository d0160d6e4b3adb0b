#include "io/source.h"

#include <archive.h>
#include <archive_entry.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <inttypes.h>
#include <string.h>
#include <zstd.h>

#include "io/gunzip.h"
#include "io/mem.h"
#include "io/sys.h"
#include "io/text.h"

#define RAW_BYTES (64 << 10)
#define BLOCK_BYTES (256 << 10)

typedef enum form { FORM_PLAIN, FORM_GZIP, FORM_FILTER, FORM_TAR, FORM_ZIP } form;

struct mr_source {
  char **paths;
  size_t n_paths, cap_paths, next_path;
  /* the open file */
  const char *path;
  int fd; /* -1: none */
  bool own_fd;
  mr_gunzip *gz;    /* NULL: the file's bytes are taken as they are */
  const char *head; /* bytes read to look at them and not handed on yet */
  size_t n_head;
  struct archive *a; /* NULL: plain text */
  bool packed;       /* a unpacks zstd, xz or bzip2 */
  bool members;      /* a is a tar or zip, not one compressed text */
  uint64_t fed;      /* bytes that a was given */
  size_t n_members, n_rows_members;
  bool open; /* a text is open for reading */
  mr_err io; /* what went wrong below libarchive */
  mr_text name;
  uint64_t file_bytes;
  char *raw;   /* RAW_BYTES from the file */
  char *block; /* BLOCK_BYTES out of gunzip */
  char *text;  /* BLOCK_BYTES out of libarchive */
};

/* ------------------------------------------------------------------ the list of files */

static bool ends_with(const char *s, const char *end) {
  size_t n = strlen(s), m = strlen(end);
  return n >= m && !strcmp(s + n - m, end);
}

/* The length of `name` without an ending of compression; *packed says whether there was one. */
static size_t strip_packing(const char *name, bool *packed) {
  static const char *const ends[] = {".gz", ".zst", ".xz", ".bz2"};
  for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
    if (ends_with(name, ends[i])) {
      *packed = true;
      return strlen(name) - strlen(ends[i]);
    }
  *packed = false;
  return strlen(name);
}

static bool stem_ends(const char *name, size_t len, const char *end) {
  size_t m = strlen(end);
  return len >= m && !memcmp(name + len - m, end, m);
}

static bool is_rows_name(const char *name) {
  bool packed;
  size_t n = strip_packing(name, &packed);
  return stem_ends(name, n, ".jsonl") || stem_ends(name, n, ".ndjson");
}

static bool is_archive_name(const char *name) {
  bool packed;
  size_t n = strip_packing(name, &packed);
  return stem_ends(name, n, ".tar") || ends_with(name, ".tgz") || ends_with(name, ".zip");
}

static mr_code add_path(mr_source *s, const char *path, mr_err *err) {
  char *copy = mr_mem_copy(path, strlen(path));
  if (!copy || !mr_mem_grow((void **)&s->paths, &s->cap_paths, s->n_paths + 1, sizeof *s->paths)) {
    mr_mem_free(copy);
    return mr_err_set(err, MR_E_NOMEM, "out of memory for the list of inputs");
  }
  s->paths[s->n_paths++] = copy;
  return MR_OK;
}

/* Adds what `pattern` matches; from a directory only files of rows and archives. */
static mr_code add_matches(mr_source *s, const char *pattern, const char *input, bool directory,
                           mr_err *err) {
  glob_t g;
  int r = glob(pattern, GLOB_ERR, NULL, &g);
  if (r == GLOB_NOSPACE)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for the list of inputs");
  if (r == GLOB_ABORTED)
    return mr_err_at(err, MR_E_NOINPUT, input, 0, -1, "cannot read the directory");
  mr_code rc = MR_OK;
  size_t before = s->n_paths;
  for (size_t i = 0; r == 0 && i < g.gl_pathc && rc == MR_OK; i++) {
    const char *p = g.gl_pathv[i];
    struct stat st;
    if (mr_sys_now->stat(p, &st) == 0 && S_ISDIR(st.st_mode))
      continue;
    if (!directory || is_rows_name(p) || is_archive_name(p))
      rc = add_path(s, p, err);
  }
  globfree(&g);
  if (rc != MR_OK || s->n_paths > before)
    return rc;
  return mr_err_at(err, MR_E_NOINPUT, input, 0, -1,
                   directory ? "the directory holds no .jsonl file" : "no such input");
}

/* The files of a directory: a pattern for glob(3), which sorts them, with the directory's own name
 * quoted. */
static mr_code add_directory(mr_source *s, const char *dir, mr_err *err) {
  mr_text t = {0};
  for (const char *p = dir; *p; p++) {
    if (strchr("*?[]\\", *p))
      mr_text_addc(&t, '\\');
    mr_text_addc(&t, *p);
  }
  mr_text_adds(&t, "/*");
  mr_code rc = t.failed ? mr_err_set(err, MR_E_NOMEM, "out of memory for the list of inputs")
                        : add_matches(s, t.data, dir, true, err);
  mr_text_free(&t);
  return rc;
}

static mr_code add_input(mr_source *s, const char *input, mr_err *err) {
  if (!strcmp(input, "-"))
    return add_path(s, input, err);
  struct stat st;
  if (mr_sys_now->stat(input, &st) == 0)
    return S_ISDIR(st.st_mode) ? add_directory(s, input, err) : add_path(s, input, err);
  if (strpbrk(input, "*?["))
    return add_matches(s, input, input, false, err);
  return mr_err_errno(err, MR_E_NOINPUT, input, "cannot open the input");
}

mr_code mr_source_open(mr_source **out, const char *const *inputs, int n, mr_err *err) {
  mr_source *s = mr_mem_alloc(1, sizeof *s);
  if (!s)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for the inputs");
  s->fd = -1;
  s->raw = mr_mem_alloc(RAW_BYTES, 1);
  s->block = mr_mem_alloc(BLOCK_BYTES, 1);
  s->text = mr_mem_alloc(BLOCK_BYTES, 1);
  mr_code rc = MR_OK;
  if (!s->raw || !s->block || !s->text)
    rc = mr_err_set(err, MR_E_NOMEM, "out of memory for the inputs");
  for (int i = 0; i < n && rc == MR_OK; i++)
    rc = add_input(s, inputs[i], err);
  if (rc != MR_OK) {
    mr_source_close(s);
    return rc;
  }
  *out = s;
  return MR_OK;
}

size_t mr_source_n_paths(const mr_source *s) {
  return s->n_paths;
}

const char *mr_source_path(const mr_source *s, size_t i) {
  return s->paths[i];
}

const char *mr_source_name(const mr_source *s) {
  return s->name.data ? s->name.data : "";
}

uint64_t mr_source_file_bytes(const mr_source *s) {
  return s->file_bytes;
}

/* ------------------------------------------------------------------ bytes of one file */

static const char *shown(const mr_source *s) {
  return strcmp(s->path, "-") ? s->path : "standard input";
}

/* A whole block, or what there is before the end. A pipe may have nothing for hours: the wait can
 * be ended (io/sys.h). */
static mr_code raw_read(mr_source *s, const char **data, size_t *len, mr_err *err) {
  size_t n = 0;
  while (n < RAW_BYTES) {
    if (mr_sys_now->await(s->fd) < 0)
      return errno == EINTR
                 ? mr_err_at(err, MR_E_STOPPED, shown(s), 0, -1, "stopped while it was read")
                 : mr_err_errno(err, MR_E_IO, shown(s), "cannot wait for it");
    ssize_t k = mr_sys_now->read(s->fd, s->raw + n, RAW_BYTES - n);
    if (k < 0 && errno != EINTR && errno != EAGAIN)
      return mr_err_errno(err, MR_E_IO, shown(s), "cannot read");
    if (k == 0)
      break;
    n += k > 0 ? (size_t)k : 0;
  }
  s->file_bytes += (uint64_t)n;
  *data = s->raw;
  *len = n;
  return MR_OK;
}

static mr_code gz_read(mr_source *s, const char **data, size_t *len, mr_err *err) {
  *data = s->block;
  for (;;) {
    mr_code rc = mr_gunzip_read(s->gz, s->block, BLOCK_BYTES, len, err);
    if (rc != MR_OK || *len)
      return rc;
    const char *in = NULL;
    size_t n = 0;
    if ((rc = raw_read(s, &in, &n, err)) != MR_OK)
      return rc;
    if (!n)
      return mr_gunzip_end(s->gz, err);
    mr_gunzip_feed(s->gz, in, n);
  }
}

/* The file's bytes, unzipped where it is gzip: what the layers above are made of. */
static mr_code lower_read(mr_source *s, const char **data, size_t *len, mr_err *err) {
  if (s->n_head) {
    *data = s->head;
    *len = s->n_head;
    s->n_head = 0;
    return MR_OK;
  }
  mr_code rc = s->gz ? gz_read(s, data, len, err) : raw_read(s, data, len, err);
  mr_err_place(err, shown(s), 0, -1);
  return rc;
}

static la_ssize_t on_read(struct archive *a, void *ctx, const void **buffer) {
  mr_source *s = ctx;
  const char *data = NULL;
  size_t n = 0;
  if (lower_read(s, &data, &n, &s->io) != MR_OK) {
    archive_set_error(a, EIO, "cannot read");
    return ARCHIVE_FATAL;
  }
  *buffer = data;
  s->fed += n;
  return (la_ssize_t)n;
}

/* ------------------------------------------------------------------ what a file is */

/* The checksum of a tar header: the sum of its bytes with the checksum's own field as blanks. */
static bool is_tar(const char *p, size_t n) {
  if (n < 512)
    return false;
  unsigned sum = 0, told = 0;
  for (int i = 0; i < 512; i++)
    sum += i >= 148 && i < 156 ? ' ' : (unsigned char)p[i];
  int i = 148;
  while (i < 156 && p[i] == ' ')
    i++;
  for (; i < 156 && p[i] >= '0' && p[i] <= '7'; i++)
    told = told * 8 + (unsigned)(p[i] - '0');
  return told && told == sum;
}

static form form_of(const char *p, size_t n) {
  static const struct {
    const char *magic;
    size_t len;
    form f;
  } magics[] = {{"\x1f\x8b", 2, FORM_GZIP},
                {"\x28\xb5\x2f\xfd", 4, FORM_FILTER},
                {"\xfd"
                 "7zXZ\0",
                 6, FORM_FILTER},
                {"BZh", 3, FORM_FILTER},
                {"PK\3\4", 4, FORM_ZIP},
                {"PK\5\6", 4, FORM_ZIP}};
  for (size_t i = 0; i < sizeof magics / sizeof *magics; i++)
    if (n >= magics[i].len && !memcmp(p, magics[i].magic, magics[i].len))
      return magics[i].f;
  if (n >= 4 && ((unsigned char)p[0] & 0xf0) == 0x50 && !memcmp(p + 1, "\x2a\x4d\x18", 3))
    return FORM_FILTER; /* zstd that begins with a skippable frame */
  return is_tar(p, n) ? FORM_TAR : FORM_PLAIN;
}

/* A zstd frame that needs a dictionary: libarchive would only say that one does not match. */
static mr_code check_dictionary(const mr_source *s, mr_err *err) {
  unsigned id = ZSTD_getDictID_fromFrame(s->head, s->n_head);
  if (!id)
    return MR_OK;
  return mr_err_at(err, MR_E_DATA, shown(s), 0, -1,
                   "needs zstd dictionary %u, and inputs with dictionaries are not read", id);
}

static mr_code peek(mr_source *s, mr_err *err) {
  const char *p;
  size_t n;
  mr_code rc = lower_read(s, &p, &n, err);
  s->head = p;
  s->n_head = rc == MR_OK ? n : 0;
  return rc;
}

/* ------------------------------------------------------------------ archives */

static mr_code archive_failed(mr_source *s, const char *name, mr_err *err) {
  if (s->io.code != MR_OK) {
    if (err && err->code == MR_OK)
      *err = s->io;
    return s->io.code;
  }
  if (archive_errno(s->a) == ENOMEM)
    return mr_err_at(err, MR_E_NOMEM, name, 0, -1, "out of memory for unpacking it");
  const char *why = archive_error_string(s->a);
  return mr_err_at(err, MR_E_DATA, name, 0, -1, "the compressed data or archive is broken: %s",
                   why ? why : "no reason given");
}

static mr_code archive_start(mr_source *s, mr_err *err) {
  s->a = archive_read_new();
  if (!s->a)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for an archive");
  mr_err_clear(&s->io);
  archive_read_support_filter_zstd(s->a);
  archive_read_support_filter_xz(s->a);
  archive_read_support_filter_bzip2(s->a);
  archive_read_support_format_tar(s->a);
  archive_read_support_format_zip_streamable(s->a);
  archive_read_support_format_raw(s->a);
  archive_read_support_format_empty(s->a);
  if (archive_read_open(s->a, s, NULL, on_read, NULL) != ARCHIVE_OK || s->io.code != MR_OK)
    return archive_failed(s, shown(s), err);
  return MR_OK;
}

/* True if a path leads out of the place where it lies. */
static bool is_unsafe_path(const char *p) {
  if (*p == '/' || *p == '\\' || strchr(p, '\\') || (p[0] && p[1] == ':'))
    return true;
  while (*p) {
    size_t n = strcspn(p, "/");
    if (n == 2 && p[0] == '.' && p[1] == '.')
      return true;
    p += n + (p[n] == '/');
  }
  return false;
}

static mr_code refuse(const mr_source *s, const char *member, const char *why, mr_err *err) {
  return mr_err_at(err, MR_E_DATA, shown(s), 0, -1, "member \"%s\" is refused: %s", member, why);
}

static mr_code check_member(const mr_source *s, struct archive_entry *e, const char *path,
                            mr_err *err) {
  if (!path)
    return mr_err_at(err, MR_E_DATA, shown(s), 0, -1, "member %zu has no readable name",
                     s->n_members);
  if (is_unsafe_path(path))
    return refuse(s, path, "its path leads out of the archive", err);
  if (archive_entry_hardlink(e))
    return refuse(s, path, "it is a hard link", err);
  if (archive_entry_filetype(e) == AE_IFLNK)
    return refuse(s, path, "it is a symbolic link", err);
  if (archive_entry_filetype(e) != AE_IFREG && archive_entry_filetype(e) != AE_IFDIR)
    return refuse(s, path, "it is not a regular file", err);
  if (archive_entry_sparse_count(e) > 0)
    return refuse(s, path, "it is a sparse file", err);
  if (archive_entry_is_encrypted(e))
    return refuse(s, path, "it is encrypted", err);
  return MR_OK;
}

static mr_code set_name(mr_source *s, const char *member, mr_err *err) {
  mr_text_clear(&s->name);
  mr_text_adds(&s->name, shown(s));
  if (member) {
    mr_text_addc(&s->name, ':');
    mr_text_adds(&s->name, member);
  }
  return s->name.failed ? mr_err_set(err, MR_E_NOMEM, "out of memory for the name of an input")
                        : MR_OK;
}

/* A member of rows that is compressed itself is not unpacked a second time. */
static mr_code check_rows_member(const mr_source *s, const char *path, mr_err *err) {
  bool packed;
  strip_packing(path, &packed);
  return packed ? refuse(s, path,
                         "it is compressed inside the archive; compress the archive instead", err)
                : MR_OK;
}

/* libarchive passes bytes on as they are where the head of a stream is cut off or damaged ... */
static mr_code check_begin(const mr_source *s, mr_err *err) {
  if (!s->packed || archive_filter_code(s->a, 0) != ARCHIVE_FILTER_NONE)
    return MR_OK;
  return mr_err_at(err, MR_E_DATA, shown(s), 0, -1,
                   "the compressed data is broken: its head is damaged or cut off");
}

/* ... and with bzip2, of which many programs write one stream after another, ends before it. */
static mr_code check_end(mr_source *s, mr_err *err) {
  const char *data;
  size_t n = 0;
  if (!s->packed || s->members)
    return MR_OK;
  mr_code rc = lower_read(s, &data, &n, err);
  if (rc != MR_OK || (!n && (uint64_t)archive_filter_bytes(s->a, -1) == s->fed))
    return rc;
  return mr_err_at(err, MR_E_DATA, shown(s), 0, -1,
                   "behind the compressed data is something else, or a part of it whose head is "
                   "damaged or cut off");
}

/* Goes to the next member with rows; *more false: no further one. */
static mr_code next_member(mr_source *s, bool *more, mr_err *err) {
  *more = false;
  for (;;) {
    struct archive_entry *e;
    int r = archive_read_next_header(s->a, &e);
    bool read = s->io.code == MR_OK; /* else libarchive may take it for the end of an empty file */
    if (r == ARCHIVE_EOF && read)
      break;
    if (!read || (r != ARCHIVE_OK && r != ARCHIVE_WARN))
      return archive_failed(s, shown(s), err);
    mr_code rc = check_begin(s, err);
    if (rc != MR_OK)
      return rc;
    int f = archive_format(s->a) & ARCHIVE_FORMAT_BASE_MASK;
    s->members = f == ARCHIVE_FORMAT_TAR || f == ARCHIVE_FORMAT_ZIP;
    *more = true;
    if (!s->members)
      return set_name(s, NULL, err);
    s->n_members++;
    const char *path = archive_entry_pathname(e);
    if (!path)
      path = archive_entry_pathname_utf8(e);
    rc = check_member(s, e, path, err);
    if (rc != MR_OK)
      return rc;
    if (archive_entry_filetype(e) == AE_IFREG && is_rows_name(path)) {
      s->n_rows_members++;
      rc = check_rows_member(s, path, err);
      return rc != MR_OK ? rc : set_name(s, path, err);
    }
    *more = false;
  }
  if (s->members && !s->n_rows_members)
    return mr_err_at(err, MR_E_DATA, shown(s), 0, -1, "the archive holds no .jsonl file");
  return MR_OK;
}

/* ------------------------------------------------------------------ opening and reading */

static void close_file(mr_source *s) {
  if (s->a)
    archive_read_free(s->a);
  mr_gunzip_close(s->gz);
  if (s->fd >= 0 && s->own_fd)
    mr_sys_now->close(s->fd);
  s->a = NULL;
  s->gz = NULL;
  s->fd = -1;
  s->n_head = 0;
  s->open = s->packed = s->members = false;
  s->fed = 0;
  s->n_members = s->n_rows_members = 0;
}

static mr_code open_fd(mr_source *s, mr_err *err) {
  s->own_fd = strcmp(s->path, "-") != 0;
  /* O_NONBLOCK: opening a FIFO does not wait for its writer; reading does (raw_read). */
  s->fd = s->own_fd ? mr_sys_now->open(s->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0) : 0;
  if (s->fd < 0)
    return mr_err_errno(err, MR_E_NOINPUT, s->path, "cannot open the input");
  return MR_OK;
}

static mr_code unpack_gzip(mr_source *s, form *f, mr_err *err) {
  mr_code rc = mr_gunzip_open(&s->gz, err);
  if (rc != MR_OK)
    return rc;
  mr_gunzip_feed(s->gz, s->head, s->n_head);
  s->n_head = 0;
  if ((rc = peek(s, err)) != MR_OK)
    return rc;
  *f = form_of(s->head, s->n_head);
  if (*f == FORM_GZIP || *f == FORM_FILTER)
    return mr_err_at(err, MR_E_DATA, shown(s), 0, -1,
                     "is compressed twice; decompress it once first");
  return MR_OK;
}

static mr_code open_file(mr_source *s, mr_err *err) {
  s->path = s->paths[s->next_path++];
  mr_code rc = open_fd(s, err);
  if (rc != MR_OK || (rc = peek(s, err)) != MR_OK)
    return rc;
  form f = form_of(s->head, s->n_head);
  bool packed;
  strip_packing(s->path, &packed);
  if (f == FORM_PLAIN && s->own_fd && (packed || is_archive_name(s->path)))
    return mr_err_at(err, MR_E_DATA, s->path, 0, -1, "%sis not in the format that its name says",
                     s->n_head ? "" : "is empty, and so ");
  if (f == FORM_GZIP && (rc = unpack_gzip(s, &f, err)) != MR_OK)
    return rc;
  s->packed = f == FORM_FILTER;
  if (s->packed && (rc = check_dictionary(s, err)) != MR_OK)
    return rc;
  return f == FORM_PLAIN ? set_name(s, NULL, err) : archive_start(s, err);
}

mr_code mr_source_next(mr_source *s, bool *more, mr_err *err) {
  *more = false;
  for (;;) {
    mr_code rc = MR_OK;
    if (s->a) {
      rc = next_member(s, more, err);
      if (rc != MR_OK || *more) {
        s->open = rc == MR_OK;
        return rc;
      }
    }
    close_file(s);
    if (s->next_path == s->n_paths)
      return MR_OK;
    if ((rc = open_file(s, err)) != MR_OK)
      return rc;
    if (!s->a) {
      *more = s->open = true;
      return MR_OK;
    }
  }
}

mr_code mr_source_read(mr_source *s, const char **data, size_t *len, mr_err *err) {
  *data = "";
  *len = 0;
  if (!s->open)
    return MR_OK;
  mr_code rc = MR_OK;
  if (!s->a) {
    rc = lower_read(s, data, len, err);
  } else {
    la_ssize_t n = archive_read_data(s->a, s->text, BLOCK_BYTES);
    if (n < 0 || s->io.code != MR_OK)
      rc = archive_failed(s, mr_source_name(s), err);
    else if (n == 0)
      rc = check_end(s, err);
    *data = s->text;
    *len = rc != MR_OK ? 0 : (size_t)n;
  }
  if (rc != MR_OK || !*len)
    s->open = false;
  return rc;
}

void mr_source_close(mr_source *s) {
  if (!s)
    return;
  close_file(s);
  for (size_t i = 0; i < s->n_paths; i++)
    mr_mem_free(s->paths[i]);
  mr_mem_free(s->paths);
  mr_mem_free(s->raw);
  mr_mem_free(s->block);
  mr_mem_free(s->text);
  mr_text_free(&s->name);
  mr_mem_free(s);
}
