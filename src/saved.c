#include "src/saved.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include "io/durable.h"
#include "io/hash.h"
#include "io/mem.h"
#include "io/sys.h"
#include "io/text.h"

#define MAGIC 0x3256534b524d0a89ull /* "\x89\nMRKSV2" */
#define ROWS_BYTES_MAX ((int64_t)1 << 32)
#define PICK_BYTES_MAX 4096

typedef struct header { /* little-endian, as all of the file */
  uint64_t magic, page_bytes, layout;
  uint32_t generation, n_rows; /* the file of pages: kv.pages.<generation> */
} header;

typedef struct row_head {
  uint64_t row, check;
  int32_t fed, n_pages, n_seqs, n_picks_bytes;
} row_head;

typedef struct place {
  uint64_t row;
  uint32_t at; /* in rows */
} place;

struct mr_saved {
  header h;
  uint8_t *bytes; /* the file of rows; rows point into it: all parts are multiples of 8 bytes */
  mr_saved_row *rows;
  place *places; /* [n_rows] by row */
  int fd;        /* of the pages; -1: they are gone */
};

struct mr_saver {
  header h;
  mr_text rows;
  mr_text pages_name, rows_name;
  int fd;
  uint64_t n_pages, max_pages;
  double until_s;
};

static bool name_pages(mr_text *t, const char *prefix, uint32_t generation) {
  mr_text_addf(t, "%s.pages.%u", prefix, generation & 1);
  return !t->failed;
}

static size_t padded(size_t n) {
  return (n + 7) & ~(size_t)7;
}

/* ---------------------------------------------------------------- reading */

static mr_code read_rows(mr_saved *s, const char *path, size_t *len, mr_err *err) {
  struct stat st;
  int fd = mr_sys_now->open(path, O_RDONLY, 0);
  *len = 0;
  if (fd < 0)
    return MR_OK;
  mr_code rc = MR_OK;
  if (mr_sys_now->fstat(fd, &st) == 0 && st.st_size > (off_t)sizeof(header) &&
      st.st_size < ROWS_BYTES_MAX) {
    s->bytes = mr_mem_alloc((size_t)st.st_size, 1);
    if (!s->bytes)
      rc = mr_err_set(err, MR_E_NOMEM, "out of memory for the rows of the run before");
    else if (mr_sys_read_full(fd, s->bytes, (size_t)st.st_size) == st.st_size)
      *len = (size_t)st.st_size;
  }
  mr_sys_now->close(fd);
  return rc;
}

/* Takes `bytes` of what is left. NULL: there is less. */
static const void *part(const uint8_t **at, size_t *left, size_t bytes) {
  const uint8_t *p = *at;
  size_t n = padded(bytes);
  if (n < bytes || n > *left)
    return NULL;
  *at += n;
  *left -= n;
  return p;
}

/* The counts of its sequences add up to the pages and bytes that it has. */
static bool adds_up(const mr_saved_row *r) {
  int64_t pages = 0, picks = 0;
  for (int i = 0; i < r->n_seqs; i++) {
    const mr_saved_seq *q = &r->seqs[i];
    if (q->n_picks < 0 || q->n_pages < 0 || q->fed < 0 || q->fed > q->n_picks ||
        q->pick_bytes < 1 || q->pick_bytes > PICK_BYTES_MAX)
      return false;
    pages += q->n_pages;
    picks += (int64_t)q->n_picks * q->pick_bytes;
  }
  return pages <= r->n_pages && picks == r->n_picks_bytes;
}

static bool take_row(mr_saved_row *r, const uint8_t **at, size_t *left) {
  const row_head *h = part(at, left, sizeof *h);
  if (!h || h->fed < 0 || h->n_pages < 0 || h->n_seqs < 1 || h->n_picks_bytes < 0)
    return false;
  *r = (mr_saved_row){.row = h->row,
                      .check = h->check,
                      .fed = h->fed,
                      .n_pages = h->n_pages,
                      .n_seqs = h->n_seqs,
                      .n_picks_bytes = h->n_picks_bytes};
  r->pages = part(at, left, (size_t)h->n_pages * sizeof *r->pages);
  r->seqs = part(at, left, (size_t)h->n_seqs * sizeof *r->seqs);
  r->picks = part(at, left, (size_t)h->n_picks_bytes);
  return r->pages && r->seqs && r->picks && adds_up(r);
}

static int by_row(const void *a, const void *b) {
  const place *x = a, *y = b;
  return x->row < y->row ? -1 : x->row > y->row;
}

/* False: the file is not whole. */
static bool take_rows(mr_saved *s, size_t len, bool *no_memory) {
  uint64_t check;
  const uint8_t *at = s->bytes + sizeof s->h;
  size_t left = len - sizeof s->h - sizeof check;
  if (len < sizeof s->h + sizeof check)
    return false;
  memcpy(&check, s->bytes + len - sizeof check, sizeof check);
  memcpy(&s->h, s->bytes, sizeof s->h);
  if (s->h.magic != MAGIC || s->h.page_bytes == 0 ||
      check != mr_hash_64(s->bytes, len - sizeof check) || s->h.n_rows > left / sizeof(row_head))
    return false;
  s->rows = mr_mem_alloc(s->h.n_rows, sizeof *s->rows);
  s->places = mr_mem_alloc(s->h.n_rows, sizeof *s->places);
  *no_memory = !s->rows || !s->places;
  for (uint32_t i = 0; !*no_memory && i < s->h.n_rows; i++) {
    if (!take_row(&s->rows[i], &at, &left))
      return false;
    s->places[i] = (place){s->rows[i].row, i};
  }
  if (*no_memory || left)
    return false;
  qsort(s->places, s->h.n_rows, sizeof *s->places, by_row);
  return true;
}

mr_code mr_saved_open(mr_saved **out, const char *prefix, mr_err *err) {
  mr_text rows = {0}, pages = {0};
  mr_saved *s = mr_mem_alloc(1, sizeof *s);
  size_t len = 0;
  bool no_memory = false;
  *out = NULL;
  mr_text_addf(&rows, "%s.rows", prefix);
  mr_code rc = MR_OK;
  if (!s || rows.failed)
    rc = mr_err_set(err, MR_E_NOMEM, "out of memory");
  if (s)
    s->fd = -1;
  if (!rc)
    rc = read_rows(s, rows.data, &len, err);
  if (!rc && len && take_rows(s, len, &no_memory) && name_pages(&pages, prefix, s->h.generation)) {
    s->fd = mr_sys_now->open(pages.data, O_RDONLY, 0);
    *out = s;
  } else {
    mr_saved_close(s);
    no_memory = no_memory || pages.failed;
  }
  mr_text_free(&rows);
  mr_text_free(&pages);
  return !rc && no_memory ? mr_err_set(err, MR_E_NOMEM, "out of memory") : rc;
}

void mr_saved_close(mr_saved *s) {
  if (!s)
    return;
  if (s->fd >= 0)
    mr_sys_now->close(s->fd);
  mr_mem_free(s->bytes);
  mr_mem_free(s->rows);
  mr_mem_free(s->places);
  mr_mem_free(s);
}

int mr_saved_rows(const mr_saved *s) {
  return s ? (int)s->h.n_rows : 0;
}

const mr_saved_row *mr_saved_at(const mr_saved *s, int i) {
  return &s->rows[i];
}

static mr_saved_row *find(const mr_saved *s, uint64_t row) {
  place key = {row, 0};
  const place *p = s ? bsearch(&key, s->places, s->h.n_rows, sizeof *s->places, by_row) : NULL;
  return p ? &s->rows[p->at] : NULL;
}

bool mr_saved_has(const mr_saved *s, uint64_t row) {
  return find(s, row) != NULL;
}

int mr_saved_picks(const mr_saved_row *r) {
  int n = 0;
  for (int i = 0; i < r->n_seqs; i++)
    n += r->seqs[i].n_picks;
  return n;
}

const mr_saved_row *mr_saved_take(mr_saved *s, uint64_t row) {
  mr_saved_row *r = find(s, row);
  if (r)
    r->taken = true;
  return r;
}

bool mr_saved_fits(const mr_saved *s, size_t page_bytes, uint64_t layout) {
  return s->h.page_bytes == page_bytes && s->h.layout == layout;
}

bool mr_saved_read(const mr_saved *s, const mr_saved_page *p, void *to) {
  size_t n = (size_t)s->h.page_bytes;
  if (s->fd < 0 || p->at < 0 || (uint64_t)p->at > (uint64_t)INT64_MAX / n - 1)
    return false;
  return mr_sys_pread_full(s->fd, to, n, (off_t)((uint64_t)p->at * n)) == (ssize_t)n &&
         mr_hash_64(to, n) == p->check;
}

/* ---------------------------------------------------------------- writing */

static void add(mr_saver *w, const void *bytes, size_t n) {
  static const uint8_t zeros[8];
  mr_text_add(&w->rows, bytes, n);
  mr_text_add(&w->rows, zeros, padded(n) - n);
}

mr_code mr_saver_open(mr_saver **out, const char *prefix, const mr_saved *old, size_t page_bytes,
                      uint64_t layout, uint64_t max_bytes, double seconds, mr_err *err) {
  mr_saver *w = mr_mem_alloc(1, sizeof *w);
  if (!w)
    return mr_err_set(err, MR_E_NOMEM, "out of memory");
  w->fd = -1;
  w->h = (header){.magic = MAGIC, .page_bytes = page_bytes, .layout = layout};
  w->h.generation = old ? !old->h.generation : 0;
  w->max_pages = max_bytes / page_bytes;
  w->until_s = mr_sys_seconds() + seconds;
  mr_text_addf(&w->rows_name, "%s.rows", prefix);
  mr_text_add(&w->rows, &w->h, sizeof w->h);
  if (!name_pages(&w->pages_name, prefix, w->h.generation) || w->rows_name.failed ||
      w->rows.failed) {
    mr_saver_abandon(w);
    return mr_err_set(err, MR_E_NOMEM, "out of memory");
  }
  w->fd = mr_sys_now->open(w->pages_name.data, O_WRONLY | O_CREAT | O_TRUNC, 0666);
  if (w->fd < 0) {
    mr_code rc = mr_err_errno(err, MR_E_CANTCREATE, w->pages_name.data, "cannot create");
    mr_saver_abandon(w);
    return rc;
  }
  *out = w;
  return MR_OK;
}

bool mr_saver_has_room(const mr_saver *w) {
  return w->n_pages < w->max_pages && mr_sys_seconds() < w->until_s;
}

mr_saved_page mr_saver_page(mr_saver *w, const void *bytes) {
  size_t n = (size_t)w->h.page_bytes;
  mr_saved_page p = {-1, 0};
  if (!mr_saver_has_room(w) || w->n_pages > (uint64_t)INT64_MAX / n - 1)
    return p;
  if (mr_sys_pwrite_full(w->fd, bytes, n, (off_t)(w->n_pages * n))) {
    w->max_pages = 0; /* a full disk: what it holds is kept */
    return p;
  }
  p = (mr_saved_page){(int64_t)w->n_pages++, mr_hash_64(bytes, n)};
  return p;
}

uint64_t mr_saver_bytes(const mr_saver *w) {
  return w->n_pages * w->h.page_bytes;
}

void mr_saver_row(mr_saver *w, const mr_saved_row *r) {
  row_head h = {r->row, r->check, r->fed, r->n_pages, r->n_seqs, r->n_picks_bytes};
  add(w, &h, sizeof h);
  add(w, r->pages, (size_t)r->n_pages * sizeof *r->pages);
  add(w, r->seqs, (size_t)r->n_seqs * sizeof *r->seqs);
  add(w, r->picks, (size_t)r->n_picks_bytes);
  w->h.n_rows++;
}

mr_code mr_saver_finish(mr_saver *w, mr_err *err) {
  mr_code rc = MR_OK;
  if (!w->rows.failed) {
    memcpy(w->rows.data, &w->h, sizeof w->h);
    uint64_t check = mr_hash_64(w->rows.data, w->rows.len);
    mr_text_add(&w->rows, &check, sizeof check);
  }
  if (w->rows.failed)
    rc = mr_err_set(err, MR_E_NOMEM, "out of memory for the rows in flight");
  else
    rc = mr_durable_write(w->rows_name.data, w->rows.data, w->rows.len, err);
  if (rc) {
    mr_saver_abandon(w);
    return rc;
  }
  char *last = &w->pages_name.data[w->pages_name.len - 1]; /* the other file is needed no more */
  *last = *last == '0' ? '1' : '0';
  mr_sys_now->unlink(w->pages_name.data);
  mr_sys_now->close(w->fd);
  w->fd = -1;
  mr_saver_abandon(w);
  return MR_OK;
}

void mr_saver_abandon(mr_saver *w) {
  if (w->fd >= 0) {
    mr_sys_now->close(w->fd);
    mr_sys_now->unlink(w->pages_name.data);
  }
  mr_text_free(&w->rows);
  mr_text_free(&w->rows_name);
  mr_text_free(&w->pages_name);
  mr_mem_free(w);
}
