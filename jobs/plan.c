#include "jobs/plan.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "io/durable.h"
#include "io/hash.h"
#include "io/mem.h"
#include "io/slurp.h"
#include "io/sys.h"

#define HEAD_MAGIC "MRPLAN\0\2"
#define BUFFER_BYTES (1u << 20)
#define MAX_FILES (1u << 24)
#define HEAD_MAX ((size_t)4 << 30)

_Static_assert(sizeof(mr_plan_entry) == 56, "plan.index has 56 bytes a row");

/* plan.head: this, then for each file a uint32_t length and the name, then a uint64_t xxh3-64 of
 * all before it. */
typedef struct head {
  char magic[8];
  uint64_t rows, bad_rows, prompt_tokens, output_tokens;
  uint64_t data_bytes;
  char index_digest[MR_HASH_HEX], digest[MR_HASH_HEX]; /* of plan.index; of what the plan was made
                                                          from */
  char pad[2];
  uint32_t n_files;
} head;

/* The beginning of a record in plan.data; then the JSON, the prompt, the lengths and ids of
 * continuations. */
typedef struct record_head {
  uint32_t json_len, n_prompt, n_cont, n_cont_ids;
} record_head;

static char *join(const char *dir, const char *name) {
  mr_text t = {0};
  mr_text_addf(&t, "%s/%s", dir, name);
  if (!t.failed)
    return t.data;
  mr_text_free(&t);
  return NULL;
}

static mr_code no_memory(mr_err *err) {
  return mr_err_set(err, MR_E_NOMEM, "out of memory for the plan");
}

/* ------------------------------------------------------------------ records and entries */

static mr_code damaged(const char *path, const char *what, mr_err *err) {
  return mr_err_at(err, MR_E_DATA, path, 0, -1, "the plan is damaged: %s", what);
}

/* n entries from `row` on. */
static mr_code read_entries(int fd, const char *path, uint64_t row, mr_plan_entry *to, uint64_t n,
                            mr_err *err) {
  size_t bytes = (size_t)n * sizeof *to;
  ssize_t got = mr_sys_pread_full(fd, to, bytes, (off_t)(row * sizeof *to));
  if (got < 0)
    return mr_err_errno(err, MR_E_IO, path, "cannot read");
  return (size_t)got == bytes ? MR_OK : damaged(path, "plan.index is cut off", err);
}

/* The sizes in the record's head against its entry and its length. */
static bool fits(const record_head *h, const mr_plan_entry *e) {
  uint64_t want = sizeof *h + (uint64_t)h->json_len + 4 * (uint64_t)h->n_prompt +
                  4 * (uint64_t)h->n_cont + 4 * (uint64_t)h->n_cont_ids;
  return want == e->bytes && e->n_prompt >= 0 && h->n_prompt == (uint32_t)e->n_prompt &&
         h->n_cont <= INT_MAX && h->n_cont_ids <= INT_MAX && e->kind <= MR_ROW_BAD;
}

/* Takes the parts out of the record's bytes; they may lie unaligned there, so they are copied. */
static mr_code decode(mr_plan_record *rec, const char *bytes, const record_head *h, mr_err *err) {
  const char *at = bytes + sizeof *h;
  rec->json_len = h->json_len;
  rec->n_cont = (int)h->n_cont;
  rec->json = mr_mem_copy(at, h->json_len);
  at += h->json_len;
  rec->prompt = (int32_t *)(void *)mr_mem_copy(at, 4 * (size_t)h->n_prompt);
  at += 4 * (size_t)h->n_prompt;
  if (h->n_cont) {
    rec->cont_len = (int *)(void *)mr_mem_copy(at, 4 * (size_t)h->n_cont);
    at += 4 * (size_t)h->n_cont;
    rec->cont = (int32_t *)(void *)mr_mem_copy(at, 4 * (size_t)h->n_cont_ids);
  }
  if (!rec->json || !rec->prompt || (h->n_cont && (!rec->cont_len || !rec->cont)))
    return no_memory(err);
  uint64_t sum = 0;
  for (int i = 0; i < rec->n_cont; i++) {
    if (rec->cont_len[i] < 1)
      return mr_err_set(err, MR_E_DATA, "a continuation without tokens");
    sum += (uint64_t)rec->cont_len[i];
  }
  return sum == h->n_cont_ids ? MR_OK
                              : mr_err_set(err, MR_E_DATA, "continuations of other lengths");
}

/* The record of rec->e, from plan.data of `size` bytes. */
static mr_code read_record(int fd, const char *path, uint64_t size, mr_plan_record *rec,
                           mr_err *err) {
  const mr_plan_entry *e = &rec->e;
  record_head h;
  if (e->bytes < sizeof h || e->offset > size || e->bytes > size - e->offset)
    return damaged(path, "a record lies outside of the file", err);
  char *bytes = mr_mem_alloc(e->bytes, 1);
  if (!bytes)
    return no_memory(err);
  mr_code rc = MR_OK;
  ssize_t n = mr_sys_pread_full(fd, bytes, e->bytes, (off_t)e->offset);
  memcpy(&h, bytes, sizeof h);
  if (n < 0)
    rc = mr_err_errno(err, MR_E_IO, path, "cannot read");
  else if ((uint32_t)n != e->bytes || mr_hash_64(bytes, e->bytes) != e->check || !fits(&h, e))
    rc = damaged(path, "a record has a wrong checksum", err);
  else
    rc = decode(rec, bytes, &h, err);
  mr_mem_free(bytes);
  if (rc != MR_OK)
    mr_plan_record_free(rec);
  return rc;
}

void mr_plan_record_free(mr_plan_record *rec) {
  mr_mem_free(rec->json);
  mr_mem_free(rec->prompt);
  mr_mem_free(rec->cont);
  mr_mem_free(rec->cont_len);
  rec->json = NULL;
  rec->prompt = rec->cont = NULL;
  rec->cont_len = NULL;
  rec->n_cont = 0;
}

/* ------------------------------------------------------------------ writing */

typedef struct out_file { /* appends through a buffer */
  char *path;
  int fd;
  char *buf;
  size_t n;
} out_file;

struct mr_plan_writer {
  char *dir;
  out_file data, index;
  mr_hasher *index_hash; /* of the entries so far; of no use once one was replaced */
  bool replaced;
  head h;
  mr_text names; /* of the files, as in plan.head */
  mr_text record;
};

static mr_code open_out(out_file *f, const char *dir, const char *name, mr_err *err) {
  f->fd = -1;
  f->path = join(dir, name);
  f->buf = mr_mem_alloc(BUFFER_BYTES, 1);
  if (!f->path || !f->buf)
    return no_memory(err);
  f->fd = mr_sys_now->open(f->path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  return f->fd < 0 ? mr_err_errno(err, MR_E_CANTCREATE, f->path, "cannot create") : MR_OK;
}

static mr_code drain(out_file *f, mr_err *err) {
  if (f->n && mr_sys_write_full(f->fd, f->buf, f->n) < 0)
    return mr_err_errno(err, MR_E_IO, f->path, "cannot write");
  f->n = 0;
  return MR_OK;
}

static mr_code append(out_file *f, const void *bytes, size_t len, mr_err *err) {
  if (f->n + len > BUFFER_BYTES) {
    mr_code rc = drain(f, err);
    if (rc != MR_OK)
      return rc;
  }
  if (len > BUFFER_BYTES)
    return mr_sys_write_full(f->fd, bytes, len) < 0
               ? mr_err_errno(err, MR_E_IO, f->path, "cannot write")
               : MR_OK;
  memcpy(f->buf + f->n, bytes, len);
  f->n += len;
  return MR_OK;
}

static void close_out(out_file *f) {
  if (f->fd >= 0)
    mr_sys_now->close(f->fd);
  mr_mem_free(f->path);
  mr_mem_free(f->buf);
}

static void free_writer(mr_plan_writer *w) {
  close_out(&w->data);
  close_out(&w->index);
  mr_hasher_free(w->index_hash);
  mr_text_free(&w->names);
  mr_text_free(&w->record);
  mr_mem_free(w->dir);
  mr_mem_free(w);
}

void mr_plan_abandon(mr_plan_writer *w) {
  if (!w)
    return;
  if (w->data.path && w->data.fd >= 0)
    mr_sys_now->unlink(w->data.path);
  if (w->index.path && w->index.fd >= 0)
    mr_sys_now->unlink(w->index.path);
  free_writer(w);
}

/* An old head goes first: it must never stand beside a new plan's halves. */
static mr_code remove_head(const char *dir, mr_err *err) {
  char *path = join(dir, "plan.head");
  if (!path)
    return no_memory(err);
  mr_code rc = MR_OK;
  if (mr_sys_now->unlink(path) == 0)
    rc = mr_durable_sync_dir(dir, err);
  else if (errno != ENOENT)
    rc = mr_err_errno(err, MR_E_IO, path, "cannot remove");
  mr_mem_free(path);
  return rc;
}

mr_code mr_plan_create(mr_plan_writer **out, const char *dir, mr_err *err) {
  mr_plan_writer *w = mr_mem_alloc(1, sizeof *w);
  if (!w)
    return no_memory(err);
  w->data.fd = w->index.fd = -1;
  w->dir = mr_mem_copy(dir, strlen(dir));
  w->index_hash = mr_hasher_new();
  memcpy(w->h.magic, HEAD_MAGIC, sizeof w->h.magic);
  mr_code rc = w->dir && w->index_hash ? remove_head(dir, err) : no_memory(err);
  if (rc == MR_OK)
    rc = open_out(&w->data, dir, "plan.data", err);
  if (rc == MR_OK)
    rc = open_out(&w->index, dir, "plan.index", err);
  if (rc != MR_OK) {
    mr_plan_abandon(w);
    return rc;
  }
  *out = w;
  return MR_OK;
}

mr_code mr_plan_add_file(mr_plan_writer *w, const char *name, mr_err *err) {
  size_t n = strlen(name);
  if (w->h.n_files == MAX_FILES || n > UINT32_MAX)
    return mr_err_set(err, MR_E_DATA, "more than %u input files", MAX_FILES);
  uint32_t len = (uint32_t)n;
  mr_text_add(&w->names, &len, sizeof len);
  mr_text_add(&w->names, name, n);
  w->h.n_files++;
  return w->names.failed ? no_memory(err) : MR_OK;
}

const char *mr_plan_writer_dir(const mr_plan_writer *w) {
  return w->dir;
}

void mr_plan_set_digest(mr_plan_writer *w, const char *digest) {
  snprintf(w->h.digest, sizeof w->h.digest, "%s", digest);
}

/* The bytes of a record into w->record. */
static mr_code encode(mr_plan_writer *w, const mr_plan_record *rec, mr_err *err) {
  uint64_t n_ids = 0;
  for (int i = 0; i < rec->n_cont; i++)
    n_ids += (uint64_t)rec->cont_len[i];
  const record_head h = {(uint32_t)rec->json_len, (uint32_t)rec->e.n_prompt, (uint32_t)rec->n_cont,
                         (uint32_t)n_ids};
  mr_text *t = &w->record;
  mr_text_clear(t);
  mr_text_add(t, &h, sizeof h);
  mr_text_add(t, rec->json, rec->json_len);
  mr_text_add(t, rec->prompt, (size_t)h.n_prompt * sizeof *rec->prompt);
  mr_text_add(t, rec->cont_len, (size_t)h.n_cont * sizeof *rec->cont_len);
  mr_text_add(t, rec->cont, n_ids * sizeof *rec->cont);
  if (t->failed)
    return no_memory(err);
  if (t->len > UINT32_MAX || rec->json_len > INT_MAX || n_ids > INT_MAX)
    return mr_err_set(err, MR_E_DATA, "a row takes %zu bytes in the plan; the limit is 4 GiB",
                      t->len);
  return MR_OK;
}

/* Appends the record's bytes to plan.data, and fills in its entry. */
static mr_code put_record(mr_plan_writer *w, const mr_plan_record *rec, mr_plan_entry *e,
                          mr_err *err) {
  mr_code rc = encode(w, rec, err);
  if (rc != MR_OK)
    return rc;
  *e = rec->e;
  e->offset = w->h.data_bytes;
  e->bytes = (uint32_t)w->record.len;
  e->check = mr_hash_64(w->record.data, w->record.len);
  e->prefix = e->kind == MR_ROW_BAD ? 0 : mr_plan_prefix(rec->prompt, e->n_prompt, e->adapter);
  w->h.data_bytes += e->bytes;
  return append(&w->data, w->record.data, w->record.len, err);
}

static void count(mr_plan_writer *w, const mr_plan_entry *e) {
  w->h.bad_rows += e->kind == MR_ROW_BAD;
  w->h.prompt_tokens += e->kind == MR_ROW_BAD ? 0 : (uint64_t)e->n_prompt;
  w->h.output_tokens += e->kind == MR_ROW_BAD ? 0 : (uint64_t)e->n_out;
}

static void uncount(mr_plan_writer *w, const mr_plan_entry *e) {
  w->h.bad_rows -= e->kind == MR_ROW_BAD;
  w->h.prompt_tokens -= e->kind == MR_ROW_BAD ? 0 : (uint64_t)e->n_prompt;
  w->h.output_tokens -= e->kind == MR_ROW_BAD ? 0 : (uint64_t)e->n_out;
}

mr_code mr_plan_append(mr_plan_writer *w, const mr_plan_record *rec, mr_err *err) {
  mr_plan_entry e;
  if (w->h.rows == UINT32_MAX)
    return mr_err_set(err, MR_E_DATA, "more than %" PRIu32 " rows", UINT32_MAX);
  mr_code rc = put_record(w, rec, &e, err);
  if (rc == MR_OK)
    rc = append(&w->index, &e, sizeof e, err);
  if (rc != MR_OK)
    return rc;
  mr_hasher_add(w->index_hash, &e, sizeof e);
  count(w, &e);
  w->h.rows++;
  return MR_OK;
}

mr_code mr_plan_reread(mr_plan_writer *w, uint64_t row, mr_plan_record *rec, mr_err *err) {
  *rec = (mr_plan_record){.row = row};
  mr_code rc = drain(&w->data, err);
  if (rc == MR_OK)
    rc = drain(&w->index, err);
  if (rc == MR_OK)
    rc = read_entries(w->index.fd, w->index.path, row, &rec->e, 1, err);
  return rc == MR_OK ? read_record(w->data.fd, w->data.path, w->h.data_bytes, rec, err) : rc;
}

mr_code mr_plan_replace(mr_plan_writer *w, const mr_plan_entry *old, const mr_plan_record *rec,
                        mr_err *err) {
  mr_plan_entry e;
  mr_code rc = put_record(w, rec, &e, err);
  if (rc == MR_OK)
    rc = drain(&w->index, err);
  if (rc != MR_OK)
    return rc;
  w->replaced = true;
  if (mr_sys_pwrite_full(w->index.fd, &e, sizeof e, (off_t)(rec->row * sizeof e)))
    return mr_err_errno(err, MR_E_IO, w->index.path, "cannot write");
  uncount(w, old);
  count(w, &e);
  return MR_OK;
}

const char *mr_plan_file_name(const mr_plan_writer *w, uint32_t file, size_t *len) {
  const char *at = w->names.data;
  uint32_t n = 0;
  for (uint32_t i = 0; i <= file; i++, at += n) {
    memcpy(&n, at, sizeof n);
    at += sizeof n;
    if (i == file)
      break;
  }
  *len = n;
  return at;
}

uint64_t mr_plan_prefix(const int32_t *ids, int n, uint32_t adapter) {
  static const int depth[] = {32, 64, 128, 512};
  uint64_t key = 0;
  for (size_t i = 0; i < sizeof depth / sizeof *depth; i++) {
    size_t take = (size_t)(n < depth[i] ? n : depth[i]);
    key = key << 16 | mr_hash_64(ids, take * sizeof *ids) >> 48;
  }
  return adapter ? key ^ mr_hash_64(&adapter, sizeof adapter) : key;
}

static mr_code finish_file(out_file *f, mr_err *err) {
  mr_code rc = drain(f, err);
  return rc == MR_OK ? mr_durable_sync_data(f->fd, f->path, err) : rc;
}

/* The digest of plan.index as it is in the file. */
static mr_code hash_again(mr_plan_writer *w, mr_err *err) {
  mr_hasher *h = mr_hasher_new();
  mr_plan_entry window[MR_PLAN_WINDOW];
  mr_code rc = h ? MR_OK : no_memory(err);
  for (uint64_t row = 0, n; rc == MR_OK && row < w->h.rows; row += n) {
    n = w->h.rows - row < MR_PLAN_WINDOW ? w->h.rows - row : MR_PLAN_WINDOW;
    rc = read_entries(w->index.fd, w->index.path, row, window, n, err);
    mr_hasher_add(h, window, n * sizeof *window);
  }
  mr_hasher_free(w->index_hash);
  w->index_hash = h;
  return rc;
}

static mr_code write_head(mr_plan_writer *w, mr_err *err) {
  mr_code rc = w->replaced ? hash_again(w, err) : MR_OK;
  if (rc != MR_OK)
    return rc;
  mr_hasher_hex(w->index_hash, w->h.index_digest);
  mr_text t = {0};
  mr_text_add(&t, &w->h, sizeof w->h);
  mr_text_add(&t, w->names.data, w->names.len);
  uint64_t check = t.failed ? 0 : mr_hash_64(t.data, t.len);
  mr_text_add(&t, &check, sizeof check);
  char *path = join(w->dir, "plan.head");
  rc = t.failed || !path ? no_memory(err) : mr_durable_write(path, t.data, t.len, err);
  mr_mem_free(path);
  mr_text_free(&t);
  return rc;
}

mr_code mr_plan_finish(mr_plan_writer *w, mr_err *err) {
  mr_code rc = finish_file(&w->data, err);
  if (rc == MR_OK)
    rc = finish_file(&w->index, err);
  if (rc == MR_OK)
    rc = write_head(w, err); /* syncs the directory, and so all three names */
  free_writer(w);
  return rc;
}

/* ------------------------------------------------------------------ reading */

struct mr_plan {
  head h;
  char *head_bytes; /* the whole of plan.head */
  const char **names;
  char *data_path, *index_path;
  int fd, index_fd;
};

/* Cuts the names out of the head; each ends where the next length begins, so NULs are put behind
 * copies. */
static mr_code read_names(mr_plan *p, const char *at, size_t left, const char *path, mr_err *err) {
  if (p->h.n_files > MAX_FILES || p->h.n_files > left / sizeof(uint32_t))
    return damaged(path, "too many files", err);
  p->names = mr_mem_alloc(p->h.n_files, sizeof *p->names);
  p->head_bytes = mr_mem_alloc(left + 1, 1); /* lengths make room for the NULs */
  if (!p->names || !p->head_bytes)
    return no_memory(err);
  char *to = p->head_bytes;
  for (uint32_t i = 0; i < p->h.n_files; i++) {
    uint32_t n;
    if (left < sizeof n)
      return damaged(path, "a file's name is cut off", err);
    memcpy(&n, at, sizeof n);
    at += sizeof n;
    left -= sizeof n;
    if (n > left)
      return damaged(path, "a file's name is cut off", err);
    memcpy(to, at, n);
    p->names[i] = to;
    to += n + 1;
    at += n;
    left -= n;
  }
  return left ? damaged(path, "bytes are left over", err) : MR_OK;
}

static mr_code read_head(mr_plan *p, const char *path, mr_err *err) {
  mr_text t = {0};
  mr_code rc = mr_slurp_file(path, HEAD_MAX, &t, err);
  uint64_t check = 0;
  size_t n = t.len >= sizeof check ? t.len - sizeof check : 0;
  if (rc == MR_OK && n < sizeof p->h)
    rc = damaged(path, "plan.head is cut off", err);
  if (rc == MR_OK) {
    memcpy(&check, t.data + n, sizeof check);
    memcpy(&p->h, t.data, sizeof p->h);
    if (memcmp(p->h.magic, HEAD_MAGIC, sizeof p->h.magic) || check != mr_hash_64(t.data, n))
      rc = damaged(path, "plan.head has a wrong checksum", err);
  }
  p->h.digest[MR_HASH_HEX - 1] = p->h.index_digest[MR_HASH_HEX - 1] = '\0';
  if (rc == MR_OK)
    rc = read_names(p, t.data + sizeof p->h, n - sizeof p->h, path, err);
  mr_text_free(&t);
  return rc;
}

static mr_code check_index(const mr_plan *p, mr_err *err) {
  char hex[MR_HASH_HEX];
  mr_hasher *h = mr_hasher_new();
  if (!h)
    return no_memory(err);
  mr_plan_scan s;
  bool good = true;
  mr_plan_scan_start(&s, p, err);
  while (mr_plan_scan_next(&s)) {
    const mr_plan_entry *e = s.e;
    mr_hasher_add(h, e, sizeof *e);
    good = good && e->kind <= MR_ROW_BAD && e->n_prompt >= 0 && e->n_out >= 0 &&
           e->file < p->h.n_files;
  }
  mr_hasher_hex(h, hex);
  mr_hasher_free(h);
  if (s.rc == MR_OK && strcmp(hex, p->h.index_digest))
    return damaged(p->index_path, "plan.index has a wrong checksum", err);
  if (s.rc == MR_OK && !good)
    return damaged(p->index_path, "plan.index has an entry that no row has", err);
  return s.rc;
}

/* Opens a file of the plan; its size must be as the head says. */
static mr_code open_part(int *fd, const char *path, uint64_t bytes, mr_err *err) {
  struct stat st;
  *fd = mr_sys_now->open(path, O_RDONLY | O_CLOEXEC, 0);
  if (*fd < 0 || mr_sys_now->fstat(*fd, &st) < 0)
    return mr_err_errno(err, MR_E_DATA, path, "cannot open");
  if (st.st_size < 0 || (uint64_t)st.st_size != bytes)
    return damaged(path, "it has another size than plan.head says", err);
  return MR_OK;
}

static mr_code open_files(mr_plan *p, mr_err *err) {
  if (p->h.rows > UINT32_MAX)
    return damaged(p->index_path, "plan.head has too many rows", err);
  mr_code rc = open_part(&p->index_fd, p->index_path, p->h.rows * sizeof(mr_plan_entry), err);
  if (rc == MR_OK)
    rc = check_index(p, err);
  return rc == MR_OK ? open_part(&p->fd, p->data_path, p->h.data_bytes, err) : rc;
}

mr_code mr_plan_open(mr_plan **out, const char *dir, mr_err *err) {
  mr_plan *p = mr_mem_alloc(1, sizeof *p);
  if (!p)
    return no_memory(err);
  p->fd = p->index_fd = -1;
  char *head_path = join(dir, "plan.head");
  p->index_path = join(dir, "plan.index");
  p->data_path = join(dir, "plan.data");
  mr_code rc =
      head_path && p->index_path && p->data_path ? read_head(p, head_path, err) : no_memory(err);
  if (rc == MR_OK)
    rc = open_files(p, err);
  mr_mem_free(head_path);
  if (rc != MR_OK) {
    mr_plan_close(p);
    return rc;
  }
  *out = p;
  return MR_OK;
}

void mr_plan_close(mr_plan *p) {
  if (!p)
    return;
  if (p->index_fd >= 0)
    mr_sys_now->close(p->index_fd);
  if (p->fd >= 0)
    mr_sys_now->close(p->fd);
  mr_mem_free(p->head_bytes);
  mr_mem_free((void *)p->names);
  mr_mem_free(p->data_path);
  mr_mem_free(p->index_path);
  mr_mem_free(p);
}

uint64_t mr_plan_rows(const mr_plan *p) {
  return p->h.rows;
}

uint64_t mr_plan_bad_rows(const mr_plan *p) {
  return p->h.bad_rows;
}

uint64_t mr_plan_prompt_tokens(const mr_plan *p) {
  return p->h.prompt_tokens;
}

uint64_t mr_plan_output_tokens_max(const mr_plan *p) {
  return p->h.output_tokens;
}

const char *mr_plan_digest(const mr_plan *p) {
  return p->h.digest;
}

uint32_t mr_plan_n_files(const mr_plan *p) {
  return p->h.n_files;
}

const char *const *mr_plan_files(const mr_plan *p) {
  return p->names;
}

mr_code mr_plan_entry_read(const mr_plan *p, uint64_t row, mr_plan_entry *e, mr_err *err) {
  if (row >= p->h.rows)
    return mr_err_set(err, MR_E_INTERNAL, "row %" PRIu64 " of a plan with %" PRIu64, row,
                      p->h.rows);
  return read_entries(p->index_fd, p->index_path, row, e, 1, err);
}

mr_code mr_plan_read(const mr_plan *p, uint64_t row, mr_plan_record *rec, mr_err *err) {
  *rec = (mr_plan_record){.row = row};
  mr_code rc = mr_plan_entry_read(p, row, &rec->e, err);
  return rc == MR_OK ? read_record(p->fd, p->data_path, p->h.data_bytes, rec, err) : rc;
}

void mr_plan_scan_start(mr_plan_scan *s, const mr_plan *p, mr_err *err) {
  s->p = p;
  s->err = err;
  s->rc = MR_OK;
  s->e = NULL;
  s->next = s->first = s->n = 0;
}

bool mr_plan_scan_next(mr_plan_scan *s) {
  const mr_plan *p = s->p;
  if (s->rc != MR_OK || s->next >= p->h.rows)
    return false;
  if (s->next == s->first + s->n) {
    s->first = s->next;
    s->n = p->h.rows - s->next < MR_PLAN_WINDOW ? p->h.rows - s->next : MR_PLAN_WINDOW;
    s->rc = read_entries(p->index_fd, p->index_path, s->first, s->window, s->n, s->err);
    if (s->rc != MR_OK)
      return false;
  }
  s->e = &s->window[s->next - s->first];
  s->row = s->next++;
  return true;
}
