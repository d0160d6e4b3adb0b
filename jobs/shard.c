#include "jobs/shard.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "io/hash.h"
#include "io/mem.h"
#include "io/text.h"

#define BINS 65536 /* values of one of the four keys in a prefix */
#define LEVELS 4
#define GRAIN 16         /* pieces of at most 1/16 of a shard's share, where groups allow it */
#define ROWS_PER_SUM 512 /* rows between two entries of `before` */
#define WORDS_PER_SUM (ROWS_PER_SUM / 64)

/* A run of rows in the order (prefix, row): from here to where the next piece begins. */
typedef struct piece {
  uint64_t prefix, row;
  double work;
  bool group; /* one whole group of prompts that begin alike */
  int shard;  /* from 0 */
} piece;

struct mr_shard {
  uint64_t n;       /* rows that it has */
  uint64_t *bits;   /* [rows / 64 + 1] */
  uint64_t *before; /* [rows / 512 + 1] rows that it has before each 512th row */
  uint64_t cut;
};

typedef struct cutter {
  const mr_plan *p;
  uint64_t rows;
  int shards;
  double share; /* of the work, for one shard */
  piece *pieces;
  size_t n, cap;
  bool open;            /* the last piece may still grow */
  double *bins[LEVELS]; /* [BINS] work by the key of one level */
} cutter;

/* ------------------------------------------------------------------ the option */

static bool env_int(const char *name, int64_t *v) {
  const char *s = getenv(name);
  return s && mr_parse_int(s, v);
}

/* Tasks MIN, MIN + step, ..., MAX are the shards 1, 2, ..., COUNT. */
static bool from_slurm(mr_shard_part *part, const char **why) {
  int64_t id, min, max, count;
  if (!env_int("SLURM_ARRAY_TASK_ID", &id) || !env_int("SLURM_ARRAY_TASK_MIN", &min) ||
      !env_int("SLURM_ARRAY_TASK_MAX", &max) || !env_int("SLURM_ARRAY_TASK_COUNT", &count)) {
    *why = "this is no task of a Slurm array: SLURM_ARRAY_TASK_ID, _MIN, _MAX and _COUNT are not "
           "set";
    return false;
  }
  int64_t step = count > 1 ? (max - min) / (count - 1) : 1;
  if (count < 1 || count > MR_SHARDS_MAX || step < 1 || max - min != step * (count - 1) ||
      id < min || id > max || (id - min) % step) {
    *why = "the tasks of the array are not evenly spaced (or more than 1000): give the shard as "
           "I/N";
    return false;
  }
  *part = (mr_shard_part){(int)((id - min) / step) + 1, (int)count};
  return true;
}

bool mr_shard_parse(const char *s, mr_shard_part *part, const char **why) {
  char index[24];
  const char *slash = strchr(s, '/');
  int64_t i, n;
  if (!strcmp(s, "slurm"))
    return from_slurm(part, why);
  *why = "it must be I/N, I from 1 to N and N up to 1000, or slurm";
  if (!slash || (size_t)(slash - s) >= sizeof index)
    return false;
  memcpy(index, s, (size_t)(slash - s));
  index[slash - s] = '\0';
  if (!mr_parse_int(index, &i) || !mr_parse_int(slash + 1, &n) || n < 1 || n > MR_SHARDS_MAX ||
      i < 1 || i > n)
    return false;
  *part = (mr_shard_part){(int)i, (int)n};
  return true;
}

/* ------------------------------------------------------------------ pieces */

static mr_code no_memory(mr_err *err) {
  return mr_err_set(err, MR_E_NOMEM, "out of memory for the shards");
}

/* Tokens, as in the estimate of the time left. */
static double work_of(const mr_plan_entry *e) {
  return e->kind == MR_ROW_BAD ? 0 : 1 + (double)e->n_prompt + (double)e->n_out;
}

/* The first `levels` keys of a prefix, the others 0. */
static uint64_t above(uint64_t prefix, int levels) {
  return levels == 0 ? 0 : prefix >> (16 * (LEVELS - levels)) << (16 * (LEVELS - levels));
}

static mr_code add_piece(cutter *c, const piece *add, mr_err *err) {
  piece *last = c->n ? &c->pieces[c->n - 1] : NULL;
  if (c->open && last && last->work + add->work <= c->share / GRAIN) {
    last->work += add->work;
    last->group = false;
    return MR_OK;
  }
  if (!mr_mem_grow((void **)&c->pieces, &c->cap, c->n + 1, sizeof *c->pieces))
    return no_memory(err);
  c->pieces[c->n++] = *add;
  c->open = true;
  return MR_OK;
}

/* More rows with one prefix than a shard should get: cut by their place in the input. */
static mr_code cut_rows(cutter *c, uint64_t prefix, mr_err *err) {
  mr_code rc = MR_OK;
  mr_plan_scan s;
  mr_plan_scan_start(&s, c->p, err);
  while (!rc && mr_plan_scan_next(&s))
    if (s.e->kind != MR_ROW_BAD && s.e->prefix == prefix)
      rc = add_piece(c, &(piece){prefix, s.row, work_of(s.e), false, 0}, err);
  return rc ? rc : s.rc;
}

static mr_code sum_level(cutter *c, uint64_t prefix, int level, mr_err *err) {
  double *bins = c->bins[level];
  mr_plan_scan s;
  memset(bins, 0, BINS * sizeof *bins);
  mr_plan_scan_start(&s, c->p, err);
  while (mr_plan_scan_next(&s))
    if (s.e->kind != MR_ROW_BAD && above(s.e->prefix, level) == prefix)
      bins[s.e->prefix >> (16 * (LEVELS - 1 - level)) & (BINS - 1)] += work_of(s.e);
  return s.rc;
}

/* The groups below `prefix`, of which the first `level` keys are given. */
static mr_code cut_level(cutter *c, uint64_t prefix, int level, mr_err *err) {
  mr_code rc = sum_level(c, prefix, level, err);
  for (uint64_t bin = 0; !rc && bin < BINS; bin++) {
    double work = c->bins[level][bin];
    uint64_t key = prefix | bin << (16 * (LEVELS - 1 - level));
    if (work <= 0)
      continue;
    if (work <= c->share) {
      rc = add_piece(c, &(piece){key, 0, work, true, 0}, err);
    } else {
      c->open = false;
      rc = level + 1 < LEVELS ? cut_level(c, key, level + 1, err) : cut_rows(c, key, err);
      c->open = false;
    }
  }
  return rc;
}

/* ------------------------------------------------------------------ pieces to shards */

static int by_work(const void *x, const void *y) {
  const piece *a = *(piece *const *)x, *b = *(piece *const *)y;
  if (a->work != b->work)
    return a->work > b->work ? -1 : 1;
  return (a > b) - (a < b);
}

static int least(const double *load, int n) {
  int at = 0;
  for (int i = 1; i < n; i++)
    if (load[i] < load[at])
      at = i;
  return at;
}

static bool is_big(const cutter *c, const piece *p) {
  return p->group && p->work > c->share / GRAIN;
}

/* Big groups first, then the rest in its order: a shard takes on until it has its share. */
static void deal(cutter *c, piece **big, size_t n_big, double *load) {
  qsort(big, n_big, sizeof *big, by_work);
  for (size_t i = 0; i < n_big; i++) {
    big[i]->shard = least(load, c->shards);
    load[big[i]->shard] += big[i]->work;
  }
  int to = least(load, c->shards);
  for (size_t i = 0; i < c->n; i++) {
    piece *p = &c->pieces[i];
    if (is_big(c, p))
      continue;
    if (load[to] + p->work / 2 > c->share)
      to = least(load, c->shards);
    p->shard = to;
    load[to] += p->work;
  }
}

static mr_code assign(cutter *c, mr_err *err) {
  piece **big = mr_mem_alloc(c->n, sizeof *big);
  double *load = mr_mem_alloc((size_t)c->shards, sizeof *load);
  size_t n_big = 0;
  if (big && load) {
    for (size_t i = 0; i < c->n; i++)
      if (is_big(c, &c->pieces[i]))
        big[n_big++] = &c->pieces[i];
    deal(c, big, n_big, load);
  }
  mr_code rc = big && load ? MR_OK : no_memory(err);
  mr_mem_free(big);
  mr_mem_free(load);
  return rc;
}

static int shard_of(const cutter *c, uint64_t row, const mr_plan_entry *e) {
  if (e->kind == MR_ROW_BAD)
    return (int)(row % (uint64_t)c->shards);
  size_t lo = 0, hi = c->n; /* the last piece that does not begin after the row */
  while (hi - lo > 1) {
    size_t mid = lo + (hi - lo) / 2;
    const piece *p = &c->pieces[mid];
    if (p->prefix > e->prefix || (p->prefix == e->prefix && p->row > row))
      hi = mid;
    else
      lo = mid;
  }
  return c->pieces[lo].shard;
}

/* ------------------------------------------------------------------ a shard */

static mr_code cut(cutter *c, mr_err *err) {
  double all = 0;
  mr_plan_scan s;
  mr_plan_scan_start(&s, c->p, err);
  while (mr_plan_scan_next(&s))
    all += work_of(s.e);
  if (s.rc)
    return s.rc;
  c->share = all / c->shards;
  for (int i = 0; i < LEVELS; i++)
    if (!(c->bins[i] = mr_mem_alloc(BINS, sizeof **c->bins)))
      return no_memory(err);
  mr_code rc = cut_level(c, 0, 0, err);
  return rc ? rc : assign(c, err);
}

static mr_code take_rows(mr_shard *s, const cutter *c, int index, mr_err *err) {
  mr_plan_scan r;
  mr_plan_scan_start(&r, c->p, err);
  while (mr_plan_scan_next(&r)) {
    if (r.row % ROWS_PER_SUM == 0)
      s->before[r.row / ROWS_PER_SUM] = s->n;
    if (shard_of(c, r.row, r.e) != index)
      continue;
    s->bits[r.row / 64] |= (uint64_t)1 << r.row % 64;
    s->n++;
  }
  return r.rc;
}

static uint64_t hash_cut(const cutter *c, mr_hasher *h) {
  char hex[MR_HASH_HEX];
  for (size_t i = 0; i < c->n; i++) {
    const piece *p = &c->pieces[i];
    const uint64_t words[] = {p->prefix, p->row, (uint64_t)p->shard};
    mr_hasher_add(h, words, sizeof words);
  }
  mr_hasher_hex(h, hex);
  return mr_hash_64(hex, sizeof hex) & INT64_MAX;
}

static mr_code fill(mr_shard *s, cutter *c, mr_shard_part part, mr_err *err) {
  mr_hasher *h = mr_hasher_new();
  s->bits = mr_mem_alloc((size_t)(c->rows / 64) + 1, sizeof *s->bits);
  s->before = mr_mem_alloc((size_t)(c->rows / ROWS_PER_SUM) + 1, sizeof *s->before);
  mr_code rc = h && s->bits && s->before ? cut(c, err) : no_memory(err);
  if (!rc)
    rc = take_rows(s, c, part.index - 1, err);
  if (!rc)
    s->cut = hash_cut(c, h);
  mr_hasher_free(h);
  return rc;
}

mr_code mr_shard_open(mr_shard **out, const mr_plan *p, mr_shard_part part, mr_err *err) {
  cutter c = {.p = p, .rows = mr_plan_rows(p), .shards = part.of};
  mr_shard *s = mr_mem_alloc(1, sizeof *s);
  mr_code rc = s ? fill(s, &c, part, err) : no_memory(err);
  for (int i = 0; i < LEVELS; i++)
    mr_mem_free(c.bins[i]);
  mr_mem_free(c.pieces);
  if (rc)
    mr_shard_close(s);
  else
    *out = s;
  return rc;
}

void mr_shard_close(mr_shard *s) {
  if (!s)
    return;
  mr_mem_free(s->bits);
  mr_mem_free(s->before);
  mr_mem_free(s);
}

bool mr_shard_has(const mr_shard *s, uint64_t row) {
  return !s || (s->bits[row / 64] >> row % 64 & 1);
}

uint64_t mr_shard_local(const mr_shard *s, uint64_t row) {
  if (!s)
    return row;
  uint64_t n = s->before[row / ROWS_PER_SUM];
  for (uint64_t w = row / ROWS_PER_SUM * WORDS_PER_SUM; w < row / 64; w++)
    n += (uint64_t)__builtin_popcountll(s->bits[w]);
  return n + (uint64_t)__builtin_popcountll(s->bits[row / 64] & (((uint64_t)1 << row % 64) - 1));
}

uint64_t mr_shard_rows(const mr_shard *s) {
  return s ? s->n : 0;
}

uint64_t mr_shard_cut(const mr_shard *s) {
  return s ? s->cut : 0;
}
