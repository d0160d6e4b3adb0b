#include "jobs/schedule.h"

#include "io/mem.h"

/* Lengths fall into buckets of 1/16 octave: equal enough to be admitted in input order. */
#define BUCKETS (64 * 16)

struct mr_schedule {
  uint32_t *rows; /* n, in the order of admission; 4 bytes a row is all that a job's size costs */
  uint64_t n, at;
};

/* Rows that need no engine are first, then long ones before short ones. */
static unsigned bucket_of(const mr_plan_entry *e) {
  if (e->kind == MR_ROW_BAD)
    return 0;
  uint64_t v = (uint64_t)e->n_prompt + (uint64_t)e->n_out + 16;
  unsigned top = 63u - (unsigned)__builtin_clzll(v);
  unsigned key = top * 16 + (unsigned)(v >> (top - 4) & 15);
  return BUCKETS - 1 - key;
}

static bool wanted(bool (*skip)(void *ctx, uint64_t row), void *ctx, uint64_t row) {
  return !skip || !skip(ctx, row);
}

mr_code mr_schedule_open(mr_schedule **out, const mr_plan *p, bool (*skip)(void *ctx, uint64_t row),
                         void *ctx, mr_err *err) {
  uint64_t start[BUCKETS + 1] = {0}, rows = mr_plan_rows(p);
  for (uint64_t i = 0; i < rows; i++)
    if (wanted(skip, ctx, i))
      start[bucket_of(mr_plan_entry_at(p, i)) + 1]++;
  for (int b = 0; b < BUCKETS; b++)
    start[b + 1] += start[b];
  mr_schedule *s = mr_mem_alloc(1, sizeof *s);
  uint32_t *order = mr_mem_alloc(start[BUCKETS], sizeof *order);
  if (!s || !order) {
    mr_mem_free(s);
    mr_mem_free(order);
    return mr_err_set(err, MR_E_NOMEM, "out of memory for the order of %llu rows",
                      (unsigned long long)rows);
  }
  s->n = start[BUCKETS];
  s->rows = order;
  for (uint64_t i = 0; i < rows; i++)
    if (wanted(skip, ctx, i))
      order[start[bucket_of(mr_plan_entry_at(p, i))]++] = (uint32_t)i;
  *out = s;
  return MR_OK;
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
