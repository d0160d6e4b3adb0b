#include "io/sorter.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "io/mem.h"
#include "io/sys.h"
#include "io/text.h"

typedef struct run { /* a sorted stretch of the file, and where its reading stands */
  uint64_t first, n; /* records */
  uint64_t at;       /* read into its window so far */
  char *window;      /* s->window_room records, in s->buf */
  size_t have, next; /* records in the window, and the next one of them */
} run;

struct mr_sorter {
  char *dir;
  size_t bytes, room; /* of a record; records in the memory */
  mr_sorter_order order;
  char *buf; /* records not yet in a run; later the windows */
  size_t n, cap;
  uint64_t count, read;
  int fd; /* -1: none */
  run *runs;
  size_t n_runs, cap_runs, window_room;
  size_t *heap, n_heap; /* runs that have a record, the one with the least on top */
};

static mr_code no_memory(mr_err *err) {
  return mr_err_set(err, MR_E_NOMEM, "out of memory for sorting");
}

mr_code mr_sorter_open(mr_sorter **out, const char *dir, size_t record_bytes, mr_sorter_order order,
                       size_t memory_bytes, mr_err *err) {
  mr_sorter *s = mr_mem_alloc(1, sizeof *s);
  char *copy = mr_mem_copy(dir, strlen(dir));
  if (!s || !copy) {
    mr_mem_free(s);
    mr_mem_free(copy);
    return no_memory(err);
  }
  size_t room = (memory_bytes ? memory_bytes : MR_SORTER_BYTES) / record_bytes;
  *s = (mr_sorter){.dir = copy, .bytes = record_bytes, .order = order, .fd = -1};
  s->room = room ? room : 1;
  *out = s;
  return MR_OK;
}

static mr_code open_file(mr_sorter *s, mr_err *err) {
  mr_text path = {0};
  for (unsigned i = 0; s->fd < 0; i++) {
    mr_text_clear(&path);
    mr_text_addf(&path, "%s/millrace-sort-%ld-%u", s->dir, (long)getpid(), i);
    if (path.failed)
      break;
    s->fd = mr_sys_now->open(path.data, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (s->fd < 0 && errno != EEXIST)
      break;
  }
  mr_code rc = path.failed ? no_memory(err)
               : s->fd < 0 ? mr_err_errno(err, MR_E_CANTCREATE, path.data, "cannot create")
                           : MR_OK;
  if (!rc)
    mr_sys_now->unlink(path.data);
  mr_text_free(&path);
  return rc;
}

/* What the memory holds becomes a run. */
static mr_code write_run(mr_sorter *s, mr_err *err) {
  qsort(s->buf, s->n, s->bytes, s->order);
  mr_code rc = s->fd < 0 ? open_file(s, err) : MR_OK;
  if (!rc && !mr_mem_grow((void **)&s->runs, &s->cap_runs, s->n_runs + 1, sizeof *s->runs))
    rc = no_memory(err);
  if (!rc && mr_sys_write_full(s->fd, s->buf, s->n * s->bytes))
    rc = mr_err_errno(err, MR_E_IO, s->dir, "cannot write a temporary file");
  if (rc)
    return rc;
  s->runs[s->n_runs++] = (run){.first = s->count - s->n, .n = s->n};
  s->n = 0;
  return MR_OK;
}

/* Room for one more record, up to s->room. */
static bool grow(mr_sorter *s) {
  size_t cap = s->cap * 2 < 256 ? 256 : s->cap * 2;
  cap = cap < s->room ? cap : s->room;
  char *buf = mr_mem_resize(s->buf, cap, s->bytes);
  if (!buf)
    return false;
  s->buf = buf;
  s->cap = cap;
  return true;
}

mr_code mr_sorter_add(mr_sorter *s, const void *record, mr_err *err) {
  if (s->n == s->room) {
    mr_code rc = write_run(s, err);
    if (rc)
      return rc;
  }
  if (s->n == s->cap && !grow(s))
    return no_memory(err);
  memcpy(s->buf + s->n++ * s->bytes, record, s->bytes);
  s->count++;
  return MR_OK;
}

/* ---------------------------------------------------------------- merging */

static const char *head_of(const mr_sorter *s, size_t i) {
  return s->runs[i].window + s->runs[i].next * s->bytes;
}

static void sink(mr_sorter *s, size_t i) {
  for (;;) {
    size_t least = i;
    for (size_t k = 2 * i + 1; k < 2 * i + 3 && k < s->n_heap; k++)
      if (s->order(head_of(s, s->heap[k]), head_of(s, s->heap[least])) < 0)
        least = k;
    if (least == i)
      return;
    size_t t = s->heap[i];
    s->heap[i] = s->heap[least];
    s->heap[least] = t;
    i = least;
  }
}

/* The next records of a run into its window; none: r->have is 0. */
static mr_code refill(mr_sorter *s, run *r, mr_err *err) {
  uint64_t left = r->n - r->at;
  r->next = 0;
  r->have = left < s->window_room ? (size_t)left : s->window_room;
  size_t bytes = r->have * s->bytes;
  ssize_t got = mr_sys_pread_full(s->fd, r->window, bytes, (off_t)((r->first + r->at) * s->bytes));
  r->at += r->have;
  if (got < 0)
    return mr_err_errno(err, MR_E_IO, s->dir, "cannot read a temporary file");
  return (size_t)got == bytes ? MR_OK
                              : mr_err_at(err, MR_E_IO, s->dir, 0, -1,
                                          "a temporary file was cut off while it was in use");
}

mr_code mr_sorter_rewind(mr_sorter *s, mr_err *err) {
  s->read = 0;
  s->n_heap = 0;
  for (size_t i = 0; i < s->n_runs; i++) {
    run *r = &s->runs[i];
    r->at = 0;
    r->window = s->buf + i * s->window_room * s->bytes;
    mr_code rc = refill(s, r, err);
    if (rc)
      return rc;
    s->heap[s->n_heap++] = i;
  }
  for (size_t i = s->n_heap / 2; i-- > 0;)
    sink(s, i);
  return MR_OK;
}

mr_code mr_sorter_sort(mr_sorter *s, mr_err *err) {
  if (s->n_runs == 0) {
    if (s->n)
      qsort(s->buf, s->n, s->bytes, s->order);
    return MR_OK;
  }
  mr_code rc = write_run(s, err);
  if (rc)
    return rc;
  s->window_room = s->room / s->n_runs ? s->room / s->n_runs : 1;
  size_t need = s->window_room * s->n_runs;
  char *buf = need > s->cap ? mr_mem_resize(s->buf, need, s->bytes) : s->buf;
  s->heap = mr_mem_alloc(s->n_runs, sizeof *s->heap);
  s->buf = buf ? buf : s->buf;
  return buf && s->heap ? mr_sorter_rewind(s, err) : no_memory(err);
}

mr_code mr_sorter_next(mr_sorter *s, void *record, bool *more, mr_err *err) {
  *more = s->read < s->count;
  if (!*more)
    return MR_OK;
  if (s->n_runs == 0) {
    memcpy(record, s->buf + s->read++ * s->bytes, s->bytes);
    return MR_OK;
  }
  run *r = &s->runs[s->heap[0]];
  memcpy(record, head_of(s, s->heap[0]), s->bytes);
  s->read++;
  mr_code rc = ++r->next == r->have ? refill(s, r, err) : MR_OK;
  if (!rc && r->have == 0)
    s->heap[0] = s->heap[--s->n_heap];
  sink(s, 0);
  return rc;
}

uint64_t mr_sorter_count(const mr_sorter *s) {
  return s->count;
}

void mr_sorter_close(mr_sorter *s) {
  if (!s)
    return;
  if (s->fd >= 0)
    mr_sys_now->close(s->fd);
  mr_mem_free(s->dir);
  mr_mem_free(s->buf);
  mr_mem_free(s->runs);
  mr_mem_free(s->heap);
  mr_mem_free(s);
}
