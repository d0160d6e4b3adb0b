/* Memory of adapters, the grouping of their matrices by input, packing. */
#include "src/lora_int.h"

#include <stdio.h>
#include <string.h>

#include "io/hash.h"
#include "io/mem.h"

void *mr_lora_block(mr_lora_blocks *list, size_t count, size_t size) {
  void *p = NULL;
  if (mr_mem_grow((void **)&list->p, &list->cap, list->n + 1, sizeof *list->p))
    p = mr_mem_alloc(count, size);
  if (p)
    list->p[list->n++] = p;
  return p;
}

static void free_blocks(mr_lora_blocks *list) {
  for (size_t i = 0; i < list->n; i++)
    mr_mem_free(list->p[i]);
  mr_mem_free(list->p);
  *list = (mr_lora_blocks){0};
}

mr_code mr_lora_new(mr_lora **out, mr_model *m, int n, const mr_kernels *k, mr_scheme scheme,
                    mr_lora_form form, mr_err *err) {
  mr_lora *l = *out = n <= MR_LORA_MAX ? mr_mem_alloc(1, sizeof *l) : NULL;
  if (n > MR_LORA_MAX)
    return mr_err_set(err, MR_E_USAGE, "%d adapters are too many; a job may have %d", n,
                      MR_LORA_MAX);
  if (l) {
    l->m = m;
    l->n = n;
    l->k = k;
    l->scheme = scheme;
    l->form = form;
    l->embed = mr_lora_block(&l->kept, (size_t)n, sizeof *l->embed);
    l->keys = mr_lora_block(&l->kept, (size_t)n, sizeof *l->keys);
    m->lora = l;
  }
  return l && l->embed && l->keys ? MR_OK
                                  : mr_err_set(err, MR_E_NOMEM, "no memory for %d adapters", n);
}

/* ------------------------------------------------------------------ every matrix */

static bool layer_groups(mr_model *m, int i, mr_lora_visit fn, void *ctx) {
  mr_layer *y = &m->layers[i];
  bool low = m->c.q_lora > 0;
  const mr_lora_group all[] = {{{low ? &y->q_a : &y->q, &y->k, &y->v}, 3, i, -1, false},
                               {{&y->q}, low, i, -1, false},
                               {{&y->o}, 1, i, -1, false},
                               {{&y->up, &y->gate}, 2, i, -1, false},
                               {{&y->down}, 1, i, -1, false},
                               {{&y->router}, 1, i, -1, true}};
  bool ok = true;
  for (size_t g = 0; g < sizeof all / sizeof *all && ok; g++)
    ok = !all[g].n || fn(ctx, &all[g]);
  for (int e = 0; y->experts && e < mr_layer_experts(m) && ok; e++) {
    mr_expert *x = &y->experts[e];
    ok = fn(ctx, &(mr_lora_group){{&x->up, &x->gate}, 2, i, e, false}) &&
         fn(ctx, &(mr_lora_group){{&x->down}, 1, i, e, false});
  }
  return ok;
}

bool mr_lora_each_group(const mr_lora *l, mr_lora_visit fn, void *ctx) {
  mr_model *m = l->m;
  bool ok = fn(ctx, &(mr_lora_group){{&m->head}, 1, -1, -1, false});
  for (int i = 0; m->layers && i < m->c.n_layers && ok; i++)
    ok = layer_groups(m, i, fn, ctx);
  return ok;
}

static bool forget(void *ctx, const mr_lora_group *group) {
  (void)ctx;
  for (int i = 0; i < group->n; i++)
    group->w[i]->lora = NULL;
  return true;
}

void mr_lora_close(mr_lora *l) {
  if (!l)
    return;
  mr_lora_each_group(l, forget, NULL);
  l->m->lora = NULL;
  free_blocks(&l->kept);
  free_blocks(&l->rows);
  free_blocks(&l->raw);
  mr_mem_free(l);
}

void mr_lora_drop_rows(mr_lora *l) {
  if (l)
    free_blocks(&l->rows);
}

mr_lora_link *mr_lora_link_of(mr_lora *l, mr_matrix *w, int adapter) {
  if (!w->lora)
    w->lora = mr_lora_block(&l->kept, (size_t)l->n, sizeof *w->lora);
  return w->lora ? (mr_lora_link *)(uintptr_t)&w->lora[adapter] : NULL;
}

/* ------------------------------------------------------------------ packing */

static bool keep_rows(mr_lora *l, uint8_t **out, const float *w, int n, int k) {
  size_t row = (size_t)k * sizeof *w;
  *out = mr_lora_block(&l->rows, (size_t)n, row);
  if (*out)
    memcpy(*out, w, (size_t)n * row);
  return *out;
}

bool mr_lora_panels(mr_lora *l, uint8_t **out, const float *w, int n, int k, mr_scheme scheme) {
  const mr_gemm_ops *g = &l->k->gemm[scheme];
  int count = (n + g->nr - 1) / g->nr;
  size_t each = g->panel_bytes(k), bytes;
  if (!mr_mem_mul((size_t)count, each, &bytes))
    return false;
  l->bytes += bytes;
  if (l->form != MR_LORA_PANELS)
    return l->form == MR_LORA_COUNT || keep_rows(l, out, w, n, k);
  if (!mr_mem_grow((void **)&l->kept.p, &l->kept.cap, l->kept.n + 1, sizeof *l->kept.p) ||
      !(*out = mr_mem_pages(bytes)))
    return false;
  l->kept.p[l->kept.n++] = *out;
  for (int i = 0; i < count; i++) {
    int first = i * g->nr, cols = n - first < g->nr ? n - first : g->nr;
    g->pack_panel(*out + (size_t)i * each, w + (size_t)first * (size_t)k, (size_t)k, cols, k);
  }
  return true;
}

/* The group's A matrices one below the other; one that several share (a fused module's) once. */
static bool stack(mr_lora *l, mr_lora_link *const *x, int n, int k, mr_scheme scheme) {
  mr_lora_down *d = mr_lora_block(&l->kept, 1, sizeof *d);
  int ranks = 0;
  for (int i = 0; i < n; i++)
    ranks += x[i]->rank;
  float *rows = mr_lora_block(&l->raw, (size_t)ranks, (size_t)k * sizeof *rows);
  if (!d || !rows)
    return false;
  d->k = k;
  d->scheme = scheme;
  for (int i = 0; i < n; i++) {
    x[i]->down = d;
    x[i]->first = d->ranks;
    for (int j = 0; j < i; j++)
      if (x[j]->a == x[i]->a)
        x[i]->first = x[j]->first;
    if (x[i]->first < d->ranks)
      continue;
    memcpy(rows + (size_t)d->ranks * (size_t)k, x[i]->a,
           (size_t)x[i]->rank * (size_t)k * sizeof *rows);
    d->ranks += x[i]->rank;
  }
  l->most_ranks = d->ranks > l->most_ranks ? d->ranks : l->most_ranks;
  l->widest = k > l->widest ? k : l->widest;
  return mr_lora_panels(l, &d->packed, rows, d->ranks, k, scheme);
}

/* Kernels cut columns into panels of one width for both schemes. */
static bool pack_up(mr_lora *l, mr_lora_link *y, int n, bool exact) {
  const mr_gemm_ops *base = &l->k->gemm[l->scheme], *up = &l->k->gemm[MR_LORA_UP];
  bool own = exact || y->up_rank < MR_LORA_LONG || base->nr != up->nr;
  y->up_scheme = own ? MR_LORA_UP : l->scheme;
  return mr_lora_panels(l, &y->up, y->b, n, y->up_rank, y->up_scheme);
}

typedef struct packing {
  mr_lora *l;
  int adapter;
} packing;

static bool pack_group(void *ctx, const mr_lora_group *group) {
  mr_lora *l = ((packing *)ctx)->l;
  mr_matrix *const *w = group->w;
  int adapter = ((packing *)ctx)->adapter, n = group->n, found = 0, k = 0;
  bool exact = group->exact;
  mr_lora_link *x[3];
  for (int i = 0; i < n; i++) {
    mr_lora_link *y = w[i]->lora ? (mr_lora_link *)(uintptr_t)&w[i]->lora[adapter] : NULL;
    if (y && y->b && !pack_up(l, y, w[i]->n, exact))
      return false;
    if (y && y->up_rank > l->most_ranks)
      l->most_ranks = y->up_rank;
    if (y)
      y->b = NULL;
    if (!y || !y->a)
      continue;
    x[found++] = y;
    k = w[i]->k;
  }
  if (found && !stack(l, x, found, k, exact ? MR_SCHEME_F32 : l->scheme))
    return false;
  for (int i = 0; i < found; i++)
    x[i]->a = NULL;
  return true;
}

/* ------------------------------------------------------------------ one adapter */

mr_code mr_lora_add(mr_lora *l, int i, const char *name, const char *dir, mr_err *err) {
  mr_code rc = mr_lora_load(l, i, name, dir, err);
  if (!rc && !mr_lora_each_group(l, pack_group, &(packing){l, i}))
    rc = mr_err_at(err, MR_E_NOMEM, dir, 0, -1, "no memory for adapter %.64s", name);
  char hex[MR_HASH_HEX];
  if (!rc && l->form)
    rc = mr_lora_digest(dir, hex, err);
  if (!rc && l->form)
    l->keys[i] = mr_hash_64(hex, sizeof hex);
  const mr_lora_embed *e = &l->embed[i];
  l->bytes += (uint64_t)e->rank * (uint64_t)(l->m->c.n_vocab + l->m->c.d_model) * sizeof(float);
  free_blocks(&l->raw);
  return rc;
}

static mr_code add_file(mr_hasher *h, const char *dir, const char *name, mr_err *err) {
  char path[4096], hex[MR_HASH_HEX];
  if (snprintf(path, sizeof path, "%s/%s", dir, name) >= (int)sizeof path)
    return mr_err_at(err, MR_E_NOINPUT, dir, 0, -1, "the path is too long");
  mr_code rc = mr_hash_file(path, hex, NULL, err);
  if (!rc)
    mr_hasher_add(h, hex, sizeof hex);
  return rc;
}

mr_code mr_lora_digest(const char *dir, char hex[33], mr_err *err) {
  static const uint32_t version = MR_LORA_NUMERICS;
  mr_hasher *h = mr_hasher_new();
  if (!h)
    return mr_err_at(err, MR_E_NOMEM, dir, 0, -1, "no memory");
  mr_hasher_add(h, &version, sizeof version);
  mr_code rc = add_file(h, dir, "adapter_config.json", err);
  if (!rc)
    rc = add_file(h, dir, "adapter_model.safetensors", err);
  if (!rc)
    mr_hasher_hex(h, hex);
  mr_hasher_free(h);
  return rc;
}
