/* Single tokens of a step (decoding) whose sequences begin with the same pages form groups. The
 * splits of keys that lie wholly in these pages are done for all of a group together, and each row
 * goes on alone from what that leaves (attn.cu): a row's operations and their order stay the same,
 * so no bit depends on groups. On the CPU: backend_cpu_tiles.c. */
#include "src/backend_gpu.h"

#include "io/mem.h"

#define SPLIT_PAGES (MR_GPU_SPLIT / MR_GPU_PAGE)
#define CARRY_BYTES ((size_t)32 << 20) /* of what groups leave, at most */

/* Floats that a query row leaves, of all key heads. */
static size_t row_floats(const mr_config *c) {
  int dim = mr_gpu_up(c->head_dim, 16) * 16, values = dim < MR_GPU_VALUES ? dim : MR_GPU_VALUES;
  return (size_t)(c->n_kv_heads * mr_gpu_up(dim, MR_GPU_VALUES)) * (size_t)(values + 2);
}

/* None where no sequence has a whole split before its last token. */
size_t mr_gpu_groups_bytes(const mr_config *c, const mr_device *dev, int max_tokens) {
  if (c->context <= MR_GPU_SPLIT)
    return 0;
  size_t most = (size_t)max_tokens * (size_t)mr_gpu_queries(c) * row_floats(c);
  size_t share = dev->cap / 32 < CARRY_BYTES ? dev->cap / 32 : CARRY_BYTES;
  return most * sizeof(float) < share ? most * sizeof(float) : share;
}

mr_code mr_gpu_groups_open(mr_gpu *g) {
  mr_gpu_groups *x = &g->groups;
  size_t n = (size_t)g->max_tokens, bytes = mr_gpu_groups_bytes(&g->m->c, g->dev, g->max_tokens);
  x->runs = mr_mem_alloc(n, sizeof *x->runs);
  x->sorted = mr_mem_alloc(n, sizeof *x->sorted);
  x->all = mr_mem_alloc(n, sizeof *x->all);
  if (!x->runs || !x->sorted || !x->all)
    return MR_E_NOMEM;
  x->carry_rows = (int)(bytes / (row_floats(&g->m->c) * sizeof(float)));
  if (bytes)
    x->carry = mr_device_take(g->dev, bytes);
  return x->carry || !bytes ? MR_OK : MR_E_NOMEM;
}

void mr_gpu_groups_close(mr_gpu *g) {
  mr_mem_free(g->groups.runs);
  mr_mem_free(g->groups.sorted);
  mr_mem_free(g->groups.all);
}

/* ------------------------------------------------------------------ order */

static const mr_kv_seq *seq_of(const mr_gpu *g, int run) {
  return g->batch.runs[run].seq;
}

/* Pages before the new token of two runs. */
static int pages_of_both(const mr_kv_seq *x, const mr_kv_seq *y) {
  return (x->len < y->len ? x->len : y->len) / MR_GPU_PAGE;
}

/* Splits that two sequences begin with. */
static int common_splits(const mr_kv_seq *x, const mr_kv_seq *y) {
  int most = pages_of_both(x, y), n = 0;
  while (n < most && x->pages[n] >= 0 && x->pages[n] == y->pages[n])
    n++;
  return n / SPLIT_PAGES;
}

/* An order in which runs with common beginnings are neighbours. */
static bool comes_before(const mr_kv_seq *x, const mr_kv_seq *y) {
  int most = pages_of_both(x, y);
  for (int i = 0; i < most; i++)
    if (x->pages[i] != y->pages[i])
      return x->pages[i] < y->pages[i];
  return x->len < y->len;
}

/* sorted[root] down to where it belongs in the heap of n runs, the last in order on top. */
static void sift(mr_gpu *g, int root, int n) {
  int32_t *t = g->groups.sorted, x = t[root];
  for (int child; (child = 2 * root + 1) < n; root = child) {
    if (child + 1 < n && comes_before(seq_of(g, t[child]), seq_of(g, t[child + 1])))
      child++;
    if (!comes_before(seq_of(g, x), seq_of(g, t[child])))
      break;
    t[root] = t[child];
  }
  t[root] = x;
}

static void sort_by_pages(mr_gpu *g, int n) {
  int32_t *t = g->groups.sorted;
  for (int i = n / 2 - 1; i >= 0; i--)
    sift(g, i, n);
  for (int i = n - 1; i > 0; i--) {
    int32_t last = t[i];
    t[i] = t[0];
    t[0] = last;
    sift(g, 0, i);
  }
}

/* ------------------------------------------------------------------ groups */

/* The group that begins with sorted[first] of n: it takes its neighbour as long as that costs it
 * less than half of its common splits. */
static mr_gpu_group group_at(const mr_gpu *g, int first, int n, int most) {
  const int32_t *sorted = g->groups.sorted;
  const mr_kv_seq *head = seq_of(g, sorted[first]);
  mr_gpu_group x = {.first = first, .n = 1, .least = head->len, .head = sorted[first]};
  for (; first + x.n < n && x.n < most; x.n++) {
    const mr_kv_seq *next = seq_of(g, sorted[first + x.n]);
    int splits = common_splits(head, next);
    if (splits == 0 || (x.n > 1 && 2 * splits < x.splits))
      break;
    x.splits = x.n == 1 || splits < x.splits ? splits : x.splits;
    x.head = next->len < x.least ? sorted[first + x.n] : x.head;
    x.least = next->len < x.least ? next->len : x.least;
  }
  return x;
}

static void add_group(mr_gpu *g, const mr_gpu_group *x) {
  mr_gpu_groups *all = &g->groups;
  for (int i = 0; i < x->n; i++) {
    mr_gpu_run *run = &all->runs[all->sorted[x->first + i]];
    run->shared = x->splits;
    run->carry = all->used_rows + i * mr_gpu_queries(&g->m->c);
  }
  all->used_rows += x->n * mr_gpu_queries(&g->m->c);
  all->splits = x->splits > all->splits ? x->splits : all->splits;
  all->all[all->n++] = *x;
}

void mr_gpu_find_groups(mr_gpu *g) {
  mr_gpu_groups *x = &g->groups;
  int row = 0, table = 0, n = 0;
  x->n = x->splits = x->used_rows = 0;
  for (int i = 0; i < g->batch.n_runs; i++) {
    const mr_run *run = &g->batch.runs[i];
    x->runs[i] = (mr_gpu_run){.row = row, .table = table};
    row += run->n;
    table += mr_gpu_up(run->seq->len + run->n, MR_GPU_PAGE);
    if (run->n == 1 && run->seq->len >= MR_GPU_SPLIT)
      x->sorted[n++] = i;
  }
  sort_by_pages(g, n);
  for (int i = 0; i < n;) {
    mr_gpu_group found =
        group_at(g, i, n, (x->carry_rows - x->used_rows) / mr_gpu_queries(&g->m->c));
    if (found.n > 1)
      add_group(g, &found);
    i += found.n;
  }
}

mr_code mr_gpu_tile_groups(mr_gpu *g, bool tall) {
  mr_gpu_groups *x = &g->groups;
  int heads = mr_gpu_queries(&g->m->c), n_members = 0, at = 0;
  x->warps = 1;
  x->n_tiles = 0;
  for (int i = 0; i < x->n; i++)
    x->warps = tall && x->all[i].n * heads > MR_GPU_ROWS ? MR_GPU_WARPS : x->warps;
  int each = x->warps * MR_GPU_ROWS;
  for (int i = 0; i < x->n; i++) {
    n_members += x->all[i].n;
    x->n_tiles += mr_gpu_up(x->all[i].n * heads, each);
  }
  size_t bytes = (size_t)n_members * sizeof(int32_t);
  int32_t *member = mr_gpu_side_take(g, bytes, (const void **)&x->members);
  mr_gpu_tile *tile =
      mr_gpu_side_take(g, (size_t)x->n_tiles * sizeof *tile, (const void **)&x->tiles);
  if (!member || !tile)
    return MR_E_NOMEM;
  for (int i = 0; i < x->n; i++) {
    const mr_gpu_group *group = &x->all[i];
    const mr_gpu_run *head = &x->runs[x->sorted[group->first]], *reach = &x->runs[group->head];
    int rows = group->n * heads;
    for (int first = 0; first < rows; first += each)
      *tile++ = (mr_gpu_tile){.row = at,
                              .pos = group->least,
                              .first = first,
                              .n = rows - first < each ? rows - first : each,
                              .table = reach->table,
                              .shared = group->splits,
                              .carry = head->carry};
    for (int m = 0; m < group->n; m++)
      member[at++] = x->runs[x->sorted[group->first + m]].row;
  }
  return MR_OK;
}

/* ------------------------------------------------------------------ of a layer */

static bool is_seen(const mr_gpu_group *x, const mr_attend *op) {
  int end = x->splits * MR_GPU_SPLIT;
  return (op->window <= 0 || x->least - op->window + 1 < end) &&
         (op->chunk <= 0 || x->least / op->chunk * op->chunk < end);
}

bool mr_gpu_groups_seen(const mr_gpu *g, const mr_attend *op) {
  for (int i = 0; i < g->groups.n; i++)
    if (is_seen(&g->groups.all[i], op))
      return true;
  return false;
}

double mr_gpu_groups_keys(const mr_gpu *g, const mr_attend *op) {
  double keys = 0;
  for (int i = 0; i < g->groups.n && op->window <= 0 && op->chunk <= 0; i++) {
    const mr_gpu_group *x = &g->groups.all[i];
    keys += (double)(x->n - 1) * x->splits * MR_GPU_SPLIT;
  }
  return keys;
}
