#include "jobs/dualscan.h"

#include "io/mem.h"
#include "io/sorter.h"

#define LEAD 0.25 /* of the output tokens, by which they may be ahead of the prompts */
#define APART 2   /* octaves */

typedef struct part {
  uint32_t at, rows;      /* its first place */
  uint32_t least, most;   /* octaves */
  double prefill, decode; /* of all its rows */
} part;

typedef struct side { /* one scan */
  mr_sorter *rows;
  mr_scan_row head;
  bool there;    /* head is the next row */
  uint32_t read; /* rows of this part */
} side;

struct mr_dual_scan {
  side front, back;
  bool blends; /* else the front alone does, and the back has no rows */
  part *parts;
  size_t n_parts, cap_parts;
  size_t part;    /* the one that is being walked through, ... */
  uint32_t taken; /* ... and what was taken of it */
  double prefill, decode;
};

uint32_t mr_scan_octave(int64_t n_out) {
  return n_out > 1 ? 63u - (uint32_t)__builtin_clzll((unsigned long long)n_out) : 0;
}

static int from_front(const void *a, const void *b) {
  return mr_sorter_compare(((const mr_scan_row *)a)->at, ((const mr_scan_row *)b)->at);
}

static int from_back(const void *a, const void *b) {
  const mr_scan_row *x = a, *y = b;
  int d = mr_sorter_compare(x->part, y->part);
  return d ? d : mr_sorter_compare(y->at, x->at);
}

/* ---------------------------------------------------------------- open */

static mr_code no_memory(mr_err *err) {
  return mr_err_set(err, MR_E_NOMEM, "out of memory for the order of the rows");
}

mr_code mr_dual_scan_open(mr_dual_scan **out, const char *dir, size_t memory_bytes, mr_err *err) {
  mr_dual_scan *d = mr_mem_alloc(1, sizeof *d);
  if (!d)
    return no_memory(err);
  mr_code rc =
      mr_sorter_open(&d->front.rows, dir, sizeof(mr_scan_row), from_front, memory_bytes, err);
  if (!rc)
    rc = mr_sorter_open(&d->back.rows, dir, sizeof(mr_scan_row), from_back, memory_bytes, err);
  if (rc) {
    mr_dual_scan_close(d);
    return rc;
  }
  *out = d;
  return MR_OK;
}

mr_code mr_dual_scan_add(mr_dual_scan *d, const mr_scan_row *row, mr_err *err) {
  return mr_sorter_add(d->front.rows, row, err);
}

static mr_code count_parts(mr_dual_scan *d, mr_err *err) {
  mr_scan_row r;
  part *p = NULL;
  bool more;
  mr_code rc;
  while ((rc = mr_sorter_next(d->front.rows, &r, &more, err)) == MR_OK && more) {
    if (!p || r.part != p->at) {
      if (!mr_mem_grow((void **)&d->parts, &d->cap_parts, d->n_parts + 1, sizeof *d->parts))
        return no_memory(err);
      p = &d->parts[d->n_parts++];
      *p = (part){.at = r.part, .least = r.octave, .most = r.octave};
    }
    p->rows++;
    p->prefill += r.prefill;
    p->decode += r.decode;
    p->least = r.octave < p->least ? r.octave : p->least;
    p->most = r.octave > p->most ? r.octave : p->most;
    d->blends = d->blends || p->most >= p->least + APART;
  }
  return rc ? rc : mr_sorter_rewind(d->front.rows, err);
}

/* All rows go to the scan from the back, too. */
static mr_code add_back(mr_dual_scan *d, mr_err *err) {
  mr_scan_row r;
  bool more;
  mr_code rc = MR_OK;
  while (!rc && (rc = mr_sorter_next(d->front.rows, &r, &more, err)) == MR_OK && more)
    rc = mr_sorter_add(d->back.rows, &r, err);
  if (!rc)
    rc = mr_sorter_sort(d->back.rows, err);
  return rc ? rc : mr_sorter_rewind(d->front.rows, err);
}

mr_code mr_dual_scan_sort(mr_dual_scan *d, mr_err *err) {
  mr_code rc = mr_sorter_sort(d->front.rows, err);
  if (!rc)
    rc = count_parts(d, err);
  return rc || !d->blends ? rc : add_back(d, err);
}

/* ---------------------------------------------------------------- both scans */

static mr_code look(side *s, mr_err *err) {
  return s->there ? MR_OK : mr_sorter_next(s->rows, &s->head, &s->there, err);
}

/* Rows of the part that the other side took are passed over. */
static mr_code leave_part(side *s, uint32_t rows, mr_err *err) {
  mr_code rc = MR_OK;
  bool more;
  for (; !rc && s->read < rows; s->read++) {
    if (!s->there)
      rc = mr_sorter_next(s->rows, &s->head, &more, err);
    s->there = false;
  }
  s->read = 0;
  return rc;
}

static mr_code next_part(mr_dual_scan *d, mr_err *err) {
  mr_code rc = leave_part(&d->front, d->parts[d->part].rows, err);
  if (!rc)
    rc = leave_part(&d->back, d->parts[d->part].rows, err);
  d->part++;
  d->taken = 0;
  d->prefill = d->decode = 0;
  return rc;
}

/* Whether the next row is the front's. Shares are compared without a division. */
static bool is_fronts_turn(const mr_dual_scan *d) {
  const part *p = &d->parts[d->part];
  return d->front.head.octave < d->back.head.octave + APART ||
         d->decode * p->prefill <= (d->prefill + LEAD * p->prefill) * p->decode;
}

mr_code mr_dual_scan_next(mr_dual_scan *d, uint64_t *row, bool *more, mr_err *err) {
  mr_scan_row alone;
  mr_code rc = MR_OK;
  *more = false;
  if (!d->blends) {
    rc = mr_sorter_next(d->front.rows, &alone, more, err);
    *row = !rc && *more ? alone.row : 0;
    return rc;
  }
  if (d->part < d->n_parts && d->taken == d->parts[d->part].rows)
    rc = next_part(d, err);
  if (rc || d->part == d->n_parts)
    return rc;
  rc = look(&d->front, err);
  if (!rc)
    rc = look(&d->back, err);
  if (rc)
    return rc;
  side *s = is_fronts_turn(d) ? &d->front : &d->back;
  s->there = false;
  s->read++;
  d->taken++;
  d->prefill += s->head.prefill;
  d->decode += s->head.decode;
  *row = s->head.row;
  *more = true;
  return MR_OK;
}

mr_code mr_dual_scan_rewind(mr_dual_scan *d, mr_err *err) {
  d->front.there = d->back.there = false;
  d->front.read = d->back.read = d->taken = 0;
  d->part = 0;
  d->prefill = d->decode = 0;
  mr_code rc = mr_sorter_rewind(d->front.rows, err);
  return rc || !d->blends ? rc : mr_sorter_rewind(d->back.rows, err);
}

uint64_t mr_dual_scan_count(const mr_dual_scan *d) {
  return mr_sorter_count(d->front.rows);
}

bool mr_dual_scan_blends(const mr_dual_scan *d) {
  return d->blends;
}

void mr_dual_scan_close(mr_dual_scan *d) {
  if (!d)
    return;
  mr_sorter_close(d->front.rows);
  mr_sorter_close(d->back.rows);
  mr_mem_free(d->parts);
  mr_mem_free(d);
}
