#include "jobs/repeats.h"

#include <string.h>

#include "io/json.h"
#include "io/mem.h"
#include "io/sorter.h"
#include "jobs/rows.h"

typedef struct item {
  uint32_t high, low; /* of the hash */
  uint32_t row;
} item;

struct mr_repeats {
  mr_sorter *sorter;
};

typedef struct group { /* rows of one hash */
  json_t **records;    /* of the first row of each id: nearly always one */
  size_t n, cap;
} group;

static mr_code no_memory(mr_err *err) {
  return mr_err_set(err, MR_E_NOMEM, "out of memory for the rows' ids");
}

static int by_hash(const void *a, const void *b) {
  const item *x = a, *y = b;
  if (x->high != y->high)
    return x->high < y->high ? -1 : 1;
  if (x->low != y->low)
    return x->low < y->low ? -1 : 1;
  return (x->row > y->row) - (x->row < y->row);
}

mr_code mr_repeats_open(mr_repeats **out, const char *dir, size_t memory_bytes, mr_err *err) {
  mr_repeats *r = mr_mem_alloc(1, sizeof *r);
  mr_code rc = r ? mr_sorter_open(&r->sorter, dir, sizeof(item), by_hash, memory_bytes, err)
                 : no_memory(err);
  if (rc)
    mr_mem_free(r);
  else
    *out = r;
  return rc;
}

mr_code mr_repeats_add(mr_repeats *r, uint64_t id_hash, uint64_t row, mr_err *err) {
  const item i = {(uint32_t)(id_hash >> 32), (uint32_t)id_hash, (uint32_t)row};
  return mr_sorter_add(r->sorter, &i, err);
}

static bool same_id(const json_t *a, const json_t *b) {
  size_t n, m;
  const char *x = mr_row_id(a, &n), *y = mr_row_id(b, &m);
  return x && y && n == m && !memcmp(x, y, n);
}

/* A row of the group: the first one of its id, or a repetition. */
static mr_code take_row(group *g, mr_plan_writer *w, uint32_t row, mr_repeats_found found,
                        void *ctx, mr_err *err) {
  mr_plan_record rec;
  mr_code rc = mr_plan_reread(w, row, &rec, err);
  if (rc)
    return rc;
  json_t *o = mr_json_load(rec.json, rec.json_len); /* it is ours: it cannot be wrong */
  bool known = false;
  size_t len;
  for (size_t i = 0; o && i < g->n && !known; i++)
    known = same_id(o, g->records[i]);
  if (!o)
    rc = no_memory(err);
  else if (known)
    rc = found(ctx, &rec, mr_row_id(o, &len), err);
  else if (!mr_mem_grow((void **)&g->records, &g->cap, g->n + 1, sizeof *g->records))
    rc = no_memory(err);
  else
    g->records[g->n++] = json_incref(o);
  json_decref(o);
  mr_plan_record_free(&rec);
  return rc;
}

static void forget(group *g) {
  while (g->n)
    json_decref(g->records[--g->n]);
}

mr_code mr_repeats_find(mr_repeats *r, mr_plan_writer *w, mr_repeats_found found, void *ctx,
                        mr_err *err) {
  group g = {NULL, 0, 0};
  item last = {0, 0, 0}, now;
  bool more = false, any = false, grouped = false; /* grouped: `last` is in g */
  mr_code rc = mr_sorter_sort(r->sorter, err);
  while (!rc && (rc = mr_sorter_next(r->sorter, &now, &more, err)) == MR_OK && more) {
    bool same = any && now.high == last.high && now.low == last.low;
    if (!same)
      forget(&g);
    if (same && !grouped)
      rc = take_row(&g, w, last.row, found, ctx, err);
    if (same && !rc)
      rc = take_row(&g, w, now.row, found, ctx, err);
    grouped = same;
    any = true;
    last = now;
  }
  forget(&g);
  mr_mem_free(g.records);
  return rc;
}

void mr_repeats_close(mr_repeats *r) {
  if (!r)
    return;
  mr_sorter_close(r->sorter);
  mr_mem_free(r);
}
