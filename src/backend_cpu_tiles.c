/* How a step's attention is cut. A tile is the new tokens of one run that lie in one KV page. A
 * group is one tile, or single tokens (decoding) whose sequences begin with the same pages: these
 * are met by all of them together. A unit is a group and a kv head; a work item is some units one
 * after the other: within it the next unit's keys are asked for while one is in work.
 *
 * Where a step has few units, single tokens that see many keys, the keys are split (kernels.h,
 * attention_split): a worker would else wait for another that has a long one. */
#include "src/backend_cpu.h"

#define SHARE 4         /* a work item is what is left over the workers times this */
#define LEAST_MEMBERS 8 /* of a group that is made smaller so that each worker has one */
#define SPAN_TOKENS (MR_ATTN_SPAN * MR_KV_BLOCK)

double mr_cpu_tile_keys(const mr_tile *t, int window) {
  double keys = t->pos + (t->n + 1) / 2.0;
  return t->n * (window > 0 && keys > window ? window : keys);
}

/* Keys that the tiles of a group read, summed, those of shared blocks at half price. */
static double group_keys(const mr_cpu *c, const mr_group *g) {
  double keys = 0;
  for (int i = 0; i < g->n; i++)
    keys += mr_cpu_tile_keys(&c->sorted[g->first + i], 0);
  return keys - 0.5 * g->n * g->blocks * MR_KV_BLOCK;
}

/* ------------------------------------------------------------------ shared beginnings */
static const mr_kv_seq *seq_of(const mr_cpu *c, const mr_tile *t) {
  return c->batch.runs[t->run].seq;
}

/* A token may share whole spans of blocks before its own. Types that pack: one that begins a block
 * has its keys beside, one such place for each worker. */
static bool may_share(const mr_cpu *c, const mr_tile *t) {
  return c->k->attention_shared && t->n == 1 && t->pos >= SPAN_TOKENS &&
         !(mr_kv_packs(mr_kv_type_of(c->kv)) && t->pos % MR_KV_BLOCK == 0);
}

/* Blocks, in whole spans, that both sequences begin with. */
static int common_blocks(const mr_cpu *c, const mr_tile *x, const mr_tile *y) {
  const int32_t *p = seq_of(c, x)->pages, *q = seq_of(c, y)->pages;
  int most = (x->pos < y->pos ? x->pos : y->pos) / MR_KV_BLOCK, n = 0;
  while (n < most && p[n] >= 0 && p[n] == q[n])
    n++;
  return n / MR_ATTN_SPAN * MR_ATTN_SPAN;
}

/* An order in which tiles with common beginnings are neighbours. */
static bool comes_before(const mr_cpu *c, const mr_tile *x, const mr_tile *y) {
  const int32_t *p = seq_of(c, x)->pages, *q = seq_of(c, y)->pages;
  int most = (x->pos < y->pos ? x->pos : y->pos) / MR_KV_BLOCK;
  for (int i = 0; i < most; i++)
    if (p[i] != q[i])
      return p[i] < q[i];
  return x->pos < y->pos;
}

/* sorted[root] down to where it belongs in the heap of n tiles, the last in order on top. */
static void sift(mr_cpu *c, int root, int n) {
  mr_tile *t = c->sorted, x = t[root];
  for (int child; (child = 2 * root + 1) < n; root = child) {
    if (child + 1 < n && comes_before(c, &t[child], &t[child + 1]))
      child++;
    if (!comes_before(c, &x, &t[child]))
      break;
    t[root] = t[child];
  }
  t[root] = x;
}

static void sort_by_pages(mr_cpu *c, int n) {
  for (int i = n / 2 - 1; i >= 0; i--)
    sift(c, i, n);
  for (int i = n - 1; i > 0; i--) {
    mr_tile last = c->sorted[i];
    c->sorted[i] = c->sorted[0];
    c->sorted[0] = last;
    sift(c, 0, i);
  }
}

/* So that as many groups as possible are full and all workers have the same number of them. */
static int most_members(const mr_cpu *c, int n) {
  int groups = (n + MR_ATTN_TILE - 1) / MR_ATTN_TILE,
      limit = (n + LEAST_MEMBERS - 1) / LEAST_MEMBERS;
  groups = (groups + c->workers - 1) / c->workers * c->workers;
  groups = groups < limit ? groups : limit;
  return groups > 0 ? (n + groups - 1) / groups : 1;
}

/* Groups of the n sorted tiles that may share: a group takes its neighbour as long as that costs it
 * less than half of its common blocks. */
static void group_shared(mr_cpu *c, int n) {
  int most = most_members(c, n);
  for (int i = 0; i < n;) {
    mr_group g = {.first = i, .n = 1};
    for (; i + g.n < n && g.n < most; g.n++) {
      int blocks = common_blocks(c, &c->sorted[i], &c->sorted[i + g.n]);
      if (blocks == 0 || (g.n > 1 && 2 * blocks < g.blocks))
        break;
      g.blocks = g.n == 1 || blocks < g.blocks ? blocks : g.blocks;
    }
    c->groups[c->n_groups++] = g;
    i += g.n;
  }
}

/* Tiles that may share come first in `sorted`. */
static void make_groups(mr_cpu *c) {
  int n = 0, at;
  c->n_groups = 0;
  for (int i = 0; i < c->n_tiles; i++)
    if (may_share(c, &c->tiles[i]))
      c->sorted[n++] = c->tiles[i];
  sort_by_pages(c, n);
  group_shared(c, n);
  at = n;
  for (int i = 0; i < c->n_tiles; i++)
    if (!may_share(c, &c->tiles[i])) {
      c->groups[c->n_groups++] = (mr_group){.first = at, .n = 1};
      c->sorted[at++] = c->tiles[i];
    }
}

/* ------------------------------------------------------------------ order and work items */
static int log2_floor(double x) {
  int n = 0;
  for (; x >= 2 && n < 63; x /= 2)
    n++;
  return n;
}

/* Longest first, to a factor of two: a counting sort by the logarithm of the work. */
static void order_groups(mr_cpu *c) {
  int count[64] = {0};
  for (int i = 0; i < c->n_groups; i++)
    count[log2_floor(group_keys(c, &c->groups[i]))]++;
  for (int b = 63, at = 0; b >= 0; b--) {
    int n = count[b];
    count[b] = at;
    at += n;
  }
  for (int i = 0; i < c->n_groups; i++)
    c->ordered[count[log2_floor(group_keys(c, &c->groups[i]))]++] = c->groups[i];
}

/* Large items first, ever smaller ones to the end (guided self-scheduling, Polychronopoulos and
 * Kuck 1987). */
static void cut_units(mr_cpu *c) {
  int heads = c->m->c.n_kv_heads;
  double left = 0, part = 0, most = 0;
  for (int i = 0; i < c->n_groups; i++)
    left += heads * group_keys(c, &c->ordered[i]);
  c->n_cuts = 0;
  for (int i = 0; i < c->n_groups; i++) {
    double work = group_keys(c, &c->ordered[i]);
    for (int h = 0; h < heads; h++, part += work)
      if (c->n_cuts == 0 || part + work > most) {
        left -= part;
        most = left / (c->workers * SHARE);
        c->cuts[c->n_cuts++] = i * heads + h;
        part = 0;
      }
  }
  c->cuts[c->n_cuts] = c->n_groups * heads;
}

/* Whether units are few, and each is a token alone, one of them with more than a split. */
static bool wants_splits(const mr_cpu *c) {
  int units = c->n_groups * c->m->c.n_kv_heads, most = 0;
  if (!c->k->attention_split || c->workers < 2 || units >= MR_CPU_SPLIT_UNITS * c->workers)
    return false;
  for (int i = 0; i < c->n_groups; i++) {
    const mr_tile *t = &c->sorted[c->groups[i].first];
    if (c->groups[i].n > 1 || t->n > 1)
      return false;
    most = t->pos > most ? t->pos : most;
  }
  return most >= MR_ATTN_SPLIT * MR_KV_BLOCK;
}

void mr_cpu_tile(mr_cpu *c) {
  int row = 0;
  c->n_tiles = 0;
  for (int r = 0; r < c->batch.n_runs; r++) {
    int pos = c->batch.runs[r].seq->len, left = c->batch.runs[r].n;
    while (left > 0) {
      int n = MR_KV_BLOCK - pos % MR_KV_BLOCK;
      n = n < left ? n : left;
      c->tiles[c->n_tiles++] = (mr_tile){.run = r, .row = row, .n = n, .pos = pos};
      row += n;
      pos += n;
      left -= n;
    }
  }
  make_groups(c);
  order_groups(c);
  cut_units(c);
  c->splits = wants_splits(c);
}
