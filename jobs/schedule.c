#include "jobs/schedule.h"

#include "io/hash.h"
#include "io/mem.h"
#include "io/sorter.h"
#include "jobs/dualscan.h"
#include "kernels/kernels.h"
#include "src/lora.h"

#define MEMORY_BYTES ((size_t)2 << 20)

/* Depths, in blocks of the prompt, at which groups are told apart: 1, 2, 4, ... */
#define LEVELS 16

/* A group of rows that begin alike is known by `at`, its first place in the order: no two groups
 * of a level have the same. All fields are of one size, so that no record has holes. */
typedef struct waiting { /* a row whose place within its group is to be found; by row */
  uint32_t row, at;
  uint32_t octave, weight; /* of output tokens; of all tokens */
  uint32_t n_prompt;
  uint32_t part, prefill, decode; /* as in mr_scan_row */
} waiting;

typedef struct member { /* such a row with the hash of its blocks; by (at, key, row) */
  uint32_t high, low;
  waiting w;
} member;

typedef struct group { /* rows of one key, or one row alone; by (at, most output, longest, name) */
  uint32_t at;         /* of the group above */
  uint32_t octave, weight; /* of its rows the most */
  uint32_t size;
  uint32_t number; /* among the groups of more than one row, in the order of members */
  waiting first;   /* its first row, by which it is named */
} group;

typedef struct start { /* by number */
  uint32_t number, at;
} start;

struct mr_schedule {
  mr_dual_scan *rows;
  uint64_t left;
  mr_schedule_info info;
};

typedef struct level { /* one depth, while it is worked on */
  const mr_plan *p;
  const char *dir;
  size_t memory;
  int depth;
  mr_sorter *waiting, *members, *groups, *starts, *next; /* next: waiting for the depth below */
  mr_dual_scan *rows;
  mr_schedule_info info;
  mr_err *err;
} level;

/* ---------------------------------------------------------------- orders */

static int by_row(const void *a, const void *b) {
  return mr_sorter_compare(((const waiting *)a)->row, ((const waiting *)b)->row);
}

static int by_key(const void *a, const void *b) {
  const member *x = a, *y = b;
  int d = mr_sorter_compare(x->w.at, y->w.at);
  d = d ? d : mr_sorter_compare(x->high, y->high);
  d = d ? d : mr_sorter_compare(x->low, y->low);
  return d ? d : mr_sorter_compare(x->w.row, y->w.row);
}

static int by_weight(const void *a, const void *b) {
  const group *x = a, *y = b;
  int d = mr_sorter_compare(x->at, y->at);
  d = d ? d : mr_sorter_compare(y->octave, x->octave);
  d = d ? d : mr_sorter_compare(y->weight, x->weight);
  return d ? d : mr_sorter_compare(x->first.row, y->first.row);
}

static int by_number(const void *a, const void *b) {
  return mr_sorter_compare(((const start *)a)->number, ((const start *)b)->number);
}

/* ---------------------------------------------------------------- lengths and keys */

/* Lengths fall into buckets of 1/16 octave: equal enough to be admitted in input order. */
static uint32_t length_of(const mr_plan_entry *e) {
  uint64_t v = (uint64_t)e->n_prompt + (uint64_t)e->n_out + 16;
  unsigned top = 63u - (unsigned)__builtin_clzll(v);
  return top * 16 + (unsigned)(v >> (top - 4) & 15);
}

static int64_t tokens_at(int depth) {
  return depth < 0 ? 0 : (int64_t)MR_KV_BLOCK << depth;
}

/* A hash of the row's first blocks, which also stands for them. */
static mr_code key_of(const level *l, const waiting *w, member *m) {
  mr_plan_record rec;
  mr_code rc = mr_plan_read(l->p, w->row, &rec, l->err);
  if (rc)
    return rc;
  uint64_t key = mr_hash_64(rec.prompt, (size_t)tokens_at(l->depth) * sizeof *rec.prompt);
  mr_plan_record_free(&rec);
  *m = (member){(uint32_t)(key >> 32), (uint32_t)key, *w};
  return MR_OK;
}

/* ---------------------------------------------------------------- one level */

static mr_code open_sorter(const level *l, mr_sorter **s, size_t bytes, mr_sorter_order order) {
  return mr_sorter_open(s, l->dir, bytes, order, l->memory, l->err);
}

static void close_sorter(mr_sorter **s) {
  mr_sorter_close(*s);
  *s = NULL;
}

static group group_of(const waiting *w, uint32_t number) {
  return (group){w->at, w->octave, w->weight, 1, number, *w};
}

/* Rows that are long enough get their keys; the others are groups by themselves. The last token of
 * a prompt is computed in any case. */
static mr_code take_keys(level *l) {
  waiting w;
  member m;
  bool more;
  mr_code rc = mr_sorter_sort(l->waiting, l->err);
  while (!rc && (rc = mr_sorter_next(l->waiting, &w, &more, l->err)) == MR_OK && more) {
    if (l->depth == LEVELS || w.n_prompt <= tokens_at(l->depth)) {
      group alone = group_of(&w, 0);
      rc = mr_sorter_add(l->groups, &alone, l->err);
      continue;
    }
    rc = key_of(l, &w, &m);
    if (!rc)
      rc = mr_sorter_add(l->members, &m, l->err);
  }
  close_sorter(&l->waiting);
  return rc ? rc : mr_sorter_sort(l->members, l->err);
}

static bool same_group(const member *a, const member *b) {
  return a->w.at == b->w.at && a->high == b->high && a->low == b->low;
}

static mr_code add_group(level *l, const group *g) {
  mr_schedule_info *i = &l->info;
  if (l->depth == 0 && g->size > 1) {
    i->groups++;
    i->grouped_rows += g->size;
    i->largest_group = g->size > i->largest_group ? g->size : i->largest_group;
  }
  return g->size ? mr_sorter_add(l->groups, g, l->err) : MR_OK;
}

/* Each run of equal keys becomes a group. */
static mr_code make_groups(level *l) {
  member first = {0}, m;
  group g = {0};
  bool more;
  mr_code rc;
  while ((rc = mr_sorter_next(l->members, &m, &more, l->err)) == MR_OK && more) {
    if (g.size && same_group(&first, &m)) {
      g.size++;
      g.octave = m.w.octave > g.octave ? m.w.octave : g.octave;
      g.weight = m.w.weight > g.weight ? m.w.weight : g.weight;
      continue;
    }
    if ((rc = add_group(l, &g)) != MR_OK)
      return rc;
    first = m;
    g = group_of(&m.w, g.number + (g.size > 1));
  }
  if (!rc)
    rc = add_group(l, &g);
  return rc ? rc : mr_sorter_sort(l->groups, l->err);
}

static mr_code give_place(level *l, const waiting *w, uint32_t at) {
  return mr_dual_scan_add(
      l->rows, &(mr_scan_row){at, w->row, w->part, w->octave, w->prefill, w->decode}, l->err);
}

/* The groups one after the other, from the place of the group above on: a row alone has its place,
 * a group its start. */
static mr_code give_places(level *l) {
  group g;
  uint32_t above = 0, at = 0;
  bool more, any = false;
  mr_code rc;
  while ((rc = mr_sorter_next(l->groups, &g, &more, l->err)) == MR_OK && more) {
    at = any && g.at == above ? at : g.at;
    above = g.at;
    any = true;
    rc = g.size == 1 ? give_place(l, &g.first, at)
                     : mr_sorter_add(l->starts, &(start){g.number, at}, l->err);
    if (rc)
      return rc;
    at += g.size;
  }
  close_sorter(&l->groups);
  return rc ? rc : mr_sorter_sort(l->starts, l->err);
}

/* What this depth adds to the common beginning is computed for the first of the group. */
static mr_code wait_again(level *l, const member *m, uint32_t at, bool first) {
  waiting w = m->w;
  w.at = at;
  if (!first)
    w.prefill -= (uint32_t)(tokens_at(l->depth) - tokens_at(l->depth - 1));
  return mr_sorter_add(l->next, &w, l->err);
}

/* The members of groups go on to the next depth. */
static mr_code go_on(level *l) {
  member before = {0}, m;
  start s = {0};
  bool more, any = false, inside = false; /* inside: `before` has gone on already */
  mr_code rc = mr_sorter_rewind(l->members, l->err);
  while (!rc && (rc = mr_sorter_next(l->members, &m, &more, l->err)) == MR_OK && more) {
    bool same = any && same_group(&before, &m);
    if (same && !inside) {
      rc = mr_sorter_next(l->starts, &s, &more, l->err);
      if (!rc)
        rc = wait_again(l, &before, s.at, true);
    }
    if (same && !rc)
      rc = wait_again(l, &m, s.at, false);
    inside = same;
    any = true;
    before = m;
  }
  return rc;
}

static void close_level(level *l) {
  close_sorter(&l->waiting);
  close_sorter(&l->members);
  close_sorter(&l->groups);
  close_sorter(&l->starts);
}

/* Gives rows their places, or leaves those of one group of this depth in l->waiting. */
static mr_code one_level(level *l) {
  mr_code rc = open_sorter(l, &l->members, sizeof(member), by_key);
  if (!rc)
    rc = open_sorter(l, &l->groups, sizeof(group), by_weight);
  if (!rc)
    rc = open_sorter(l, &l->starts, sizeof(start), by_number);
  if (!rc)
    rc = open_sorter(l, &l->next, sizeof(waiting), by_row);
  if (!rc)
    rc = take_keys(l);
  if (!rc)
    rc = make_groups(l);
  if (!rc)
    rc = give_places(l);
  if (!rc)
    rc = go_on(l);
  close_level(l);
  l->waiting = l->next;
  l->next = NULL;
  l->depth++;
  return rc;
}

/* ---------------------------------------------------------------- open */

/* Rows of one adapter follow each other: a step then multiplies with few adapters. Those that the
 * longest row belongs to come first. */
typedef struct adapters {
  uint32_t rows[MR_LORA_MAX + 1], longest[MR_LORA_MAX + 1], at[MR_LORA_MAX + 1];
} adapters;

static uint32_t adapter_of(const mr_plan_entry *e) {
  return e->adapter <= MR_LORA_MAX ? e->adapter : 0;
}

static void count_adapter(adapters *a, const mr_plan_entry *e) {
  uint32_t i = adapter_of(e), length = length_of(e);
  a->rows[i]++;
  a->longest[i] = length > a->longest[i] ? length : a->longest[i];
}

static void place_adapters(adapters *a, uint32_t first) {
  for (;;) {
    uint32_t best = 0;
    for (uint32_t i = 0; i <= MR_LORA_MAX; i++)
      if (a->rows[i] && (!a->rows[best] || a->longest[i] > a->longest[best]))
        best = i;
    if (!a->rows[best])
      return;
    a->at[best] = first;
    first += a->rows[best];
    a->rows[best] = 0;
  }
}

/* Continuations that are scored are read like a prompt. */
static mr_code wait_first(level *l, const mr_plan_scan *s, uint32_t at) {
  const mr_plan_entry *e = s->e;
  uint32_t n_prompt = (uint32_t)e->n_prompt, n_out = (uint32_t)e->n_out;
  bool score = e->kind == MR_ROW_SCORE;
  waiting w = {.row = (uint32_t)s->row,
               .at = at,
               .octave = mr_scan_octave(score ? 0 : n_out),
               .weight = length_of(e),
               .n_prompt = n_prompt,
               .part = at,
               .prefill = n_prompt + (score ? n_out : 0),
               .decode = score ? 0 : n_out};
  return mr_sorter_add(l->waiting, &w, l->err);
}

/* Rows that need no engine get the first places, the others wait. */
static mr_code collect(level *l, bool (*skip)(void *ctx, uint64_t row), void *ctx) {
  mr_plan_scan s;
  uint32_t n_bad = 0;
  adapters a = {{0}, {0}, {0}};
  mr_code rc = open_sorter(l, &l->waiting, sizeof(waiting), by_row);
  for (int bad = 1; bad >= 0; bad--) {
    mr_plan_scan_start(&s, l->p, l->err);
    while (!rc && mr_plan_scan_next(&s)) {
      uint32_t row = (uint32_t)s.row;
      bool is_bad = s.e->kind == MR_ROW_BAD;
      if (skip && skip(ctx, s.row))
        continue;
      if (bad && is_bad)
        rc = mr_dual_scan_add(l->rows, &(mr_scan_row){.at = n_bad++, .row = row}, l->err);
      else if (bad)
        count_adapter(&a, s.e);
      else if (!is_bad)
        rc = wait_first(l, &s, a.at[adapter_of(s.e)]);
    }
    place_adapters(&a, n_bad);
    rc = rc ? rc : s.rc;
  }
  return rc;
}

static mr_code order_rows(level *l, bool (*skip)(void *ctx, uint64_t row), void *ctx) {
  mr_code rc = mr_dual_scan_open(&l->rows, l->dir, l->memory, l->err);
  if (!rc)
    rc = collect(l, skip, ctx);
  while (!rc && mr_sorter_count(l->waiting))
    rc = one_level(l);
  close_level(l);
  return rc ? rc : mr_dual_scan_sort(l->rows, l->err);
}

mr_code mr_schedule_open(mr_schedule **out, const mr_plan *p, const char *dir, size_t memory_bytes,
                         bool (*skip)(void *ctx, uint64_t row), void *ctx, mr_err *err) {
  level l = {.p = p, .dir = dir, .memory = memory_bytes ? memory_bytes : MEMORY_BYTES, .err = err};
  mr_schedule *s = mr_mem_alloc(1, sizeof *s);
  mr_code rc = s ? order_rows(&l, skip, ctx)
                 : mr_err_set(err, MR_E_NOMEM, "out of memory for the order of the rows");
  if (rc) {
    mr_dual_scan_close(l.rows);
    mr_mem_free(s);
    return rc;
  }
  *s = (mr_schedule){.rows = l.rows, .left = mr_dual_scan_count(l.rows), .info = l.info};
  s->info.blended = mr_dual_scan_blends(l.rows);
  *out = s;
  return MR_OK;
}

mr_code mr_schedule_next(mr_schedule *s, uint64_t *row, bool *more, mr_err *err) {
  mr_code rc = mr_dual_scan_next(s->rows, row, more, err);
  s->left -= !rc && *more;
  return rc;
}

mr_code mr_schedule_rewind(mr_schedule *s, mr_err *err) {
  s->left = mr_dual_scan_count(s->rows);
  return mr_dual_scan_rewind(s->rows, err);
}

uint64_t mr_schedule_left(const mr_schedule *s) {
  return s->left;
}

mr_schedule_info mr_schedule_info_of(const mr_schedule *s) {
  return s->info;
}

void mr_schedule_close(mr_schedule *s) {
  if (!s)
    return;
  mr_dual_scan_close(s->rows);
  mr_mem_free(s);
}
