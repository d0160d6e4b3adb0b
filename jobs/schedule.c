#include "jobs/schedule.h"

#include <stdlib.h>
#include <string.h>

#include "io/hash.h"
#include "io/mem.h"
#include "kernels/kernels.h"

/* Lengths fall into buckets of 1/16 octave: equal enough to be admitted in input order. */
#define BUCKETS (64 * 16)

/* Depths, in blocks of the prompt, at which groups are told apart: 1, 2, 4, ... */
#define LEVELS 16

typedef struct item {
  uint64_t key;
  uint32_t row;
  uint32_t weight; /* of its group at the level that is being sorted: longest first */
} item;

struct mr_schedule {
  uint32_t *rows; /* n, in the order of admission; 4 bytes a row is all that a job's size costs */
  uint64_t n, at;
};

/* ---------------------------------------------------------------- lengths and keys */

static unsigned length_of(const mr_plan_entry *e) {
  uint64_t v = (uint64_t)e->n_prompt + (uint64_t)e->n_out + 16;
  unsigned top = 63u - (unsigned)__builtin_clzll(v);
  return top * 16 + (unsigned)(v >> (top - 4) & 15);
}

/* At level -1 the adapter. Else a hash of the first 2^level blocks, which also stands for them; a
 * row with fewer is a group by itself. The last token of a prompt is computed in any case. */
static mr_code key_of(const mr_plan *p, uint32_t row, int level, uint64_t *key, mr_err *err) {
  mr_plan_record rec;
  int64_t tokens = level < 0 ? 0 : ((int64_t)1 << level) * MR_KV_BLOCK;
  if (level < 0) {
    *key = mr_plan_entry_at(p, row)->adapter;
    return MR_OK;
  }
  *key = mr_hash_64(&row, sizeof row);
  if (mr_plan_entry_at(p, row)->n_prompt <= tokens)
    return MR_OK;
  mr_code rc = mr_plan_read(p, row, &rec, err);
  if (rc)
    return rc;
  *key = mr_hash_64(rec.prompt, (size_t)tokens * sizeof *rec.prompt);
  mr_plan_record_free(&rec);
  return MR_OK;
}

/* ---------------------------------------------------------------- sorting */

static int by_key(const void *a, const void *b) {
  const item *x = a, *y = b;
  if (x->key != y->key)
    return x->key < y->key ? -1 : 1;
  return x->row < y->row ? -1 : x->row > y->row;
}

static int by_weight(const void *a, const void *b) {
  const item *x = a, *y = b;
  if (x->weight != y->weight)
    return x->weight > y->weight ? -1 : 1;
  return by_key(a, b);
}

static uint64_t run_end(const item *v, uint64_t at, uint64_t n) {
  uint64_t end = at + 1;
  while (end < n && v[end].key == v[at].key)
    end++;
  return end;
}

/* Each run of equal keys becomes a group: named by its first row, weighed by its longest one. */
static void make_groups(item *v, uint64_t n, const mr_plan *p) {
  for (uint64_t at = 0, end; at < n; at = end) {
    uint32_t most = 0;
    end = run_end(v, at, n);
    for (uint64_t i = at; i < end; i++) {
      uint32_t length = length_of(mr_plan_entry_at(p, v[i].row));
      most = length > most ? length : most;
    }
    uint64_t name = v[at].row;
    for (uint64_t i = at; i < end; i++) {
      v[i].weight = most;
      v[i].key = name;
    }
  }
}

/* v[0..n), whose rows begin alike in the blocks of all levels above: groups of this level in order
 * of their longest row, and so on inside each. */
static mr_code order_rows(item *v, uint64_t n, int level, const mr_plan *p, mr_err *err) {
  for (uint64_t i = 0; i < n; i++) {
    mr_code rc = MR_OK;
    v[i].key = v[i].row;
    if (level < LEVELS && n > 1)
      rc = key_of(p, v[i].row, level, &v[i].key, err);
    if (rc)
      return rc;
  }
  qsort(v, n, sizeof *v, by_key);
  make_groups(v, n, p);
  qsort(v, n, sizeof *v, by_weight);
  for (uint64_t at = 0, end; at < n && level < LEVELS; at = end) {
    end = run_end(v, at, n);
    mr_code rc = end - at > 1 ? order_rows(v + at, end - at, level + 1, p, err) : MR_OK;
    if (rc)
      return rc;
  }
  return MR_OK;
}

/* ---------------------------------------------------------------- open */

static bool wanted(bool (*skip)(void *ctx, uint64_t row), void *ctx, uint64_t row) {
  return !skip || !skip(ctx, row);
}

/* Rows of one adapter follow each other: a step then multiplies with few of them. */
static int first_level(const mr_plan *p, const item *v, uint64_t n) {
  for (uint64_t i = 1; i < n; i++)
    if (mr_plan_entry_at(p, v[i].row)->adapter != mr_plan_entry_at(p, v[0].row)->adapter)
      return -1;
  return 0;
}

/* Rows that need no engine go to s->rows, the others to v. */
static uint64_t collect(mr_schedule *s, item *v, const mr_plan *p,
                        bool (*skip)(void *ctx, uint64_t row), void *ctx) {
  uint64_t n = 0;
  for (uint64_t i = 0; i < mr_plan_rows(p); i++) {
    if (!wanted(skip, ctx, i))
      continue;
    if (mr_plan_entry_at(p, i)->kind == MR_ROW_BAD)
      s->rows[s->n++] = (uint32_t)i;
    else
      v[n++] = (item){.row = (uint32_t)i};
  }
  return n;
}

mr_code mr_schedule_open(mr_schedule **out, const mr_plan *p, bool (*skip)(void *ctx, uint64_t row),
                         void *ctx, mr_err *err) {
  uint64_t left = 0;
  for (uint64_t i = 0; i < mr_plan_rows(p); i++)
    left += wanted(skip, ctx, i);
  mr_schedule *s = mr_mem_alloc(1, sizeof *s);
  item *v = mr_mem_alloc(left, sizeof *v);
  if (s)
    s->rows = mr_mem_alloc(left, sizeof *s->rows);
  mr_code rc = MR_OK;
  if (!s || !v || !s->rows) {
    rc = mr_err_set(err, MR_E_NOMEM, "out of memory for the order of %llu rows",
                    (unsigned long long)left);
  } else {
    uint64_t n = collect(s, v, p, skip, ctx);
    rc = order_rows(v, n, first_level(p, v, n), p, err);
    for (uint64_t i = 0; i < n; i++)
      s->rows[s->n++] = v[i].row;
  }
  mr_mem_free(v);
  if (rc)
    mr_schedule_close(s);
  else
    *out = s;
  return rc;
}

bool mr_schedule_next(mr_schedule *s, uint64_t *row) {
  if (s->at == s->n)
    return false;
  *row = s->rows[s->at++];
  return true;
}

void mr_schedule_back(mr_schedule *s) {
  if (s->at)
    s->at--;
}

uint64_t mr_schedule_left(const mr_schedule *s) {
  return s->n - s->at;
}

void mr_schedule_close(mr_schedule *s) {
  if (!s)
    return;
  mr_mem_free(s->rows);
  mr_mem_free(s);
}
