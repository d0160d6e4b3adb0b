#include "src/merge.h"

#include "io/mem.h"

int mr_merger_add(mr_merger *m, int32_t id, uint32_t at, uint32_t len) {
  if (m->n == m->cap && !mr_mem_grow((void **)&m->sym, &m->cap, m->n + 1, sizeof *m->sym))
    return 0;
  int32_t i = (int32_t)m->n++;
  m->sym[i] = (mr_symbol){i - 1, -1, id, at, len};
  if (i > 0)
    m->sym[i - 1].next = i;
  return 1;
}

static bool before(const mr_candidate *a, const mr_candidate *b) {
  return a->rank != b->rank ? a->rank < b->rank : a->left < b->left;
}

int mr_heap_push(mr_heap *h, mr_candidate c) {
  if (h->n == h->cap && !mr_mem_grow((void **)&h->c, &h->cap, h->n + 1, sizeof *h->c))
    return 0;
  size_t i = h->n++;
  for (; i > 0 && before(&c, &h->c[(i - 1) / 2]); i = (i - 1) / 2)
    h->c[i] = h->c[(i - 1) / 2];
  h->c[i] = c;
  return 1;
}

mr_candidate mr_heap_pop(mr_heap *h) {
  mr_candidate top = h->c[0], last = h->c[--h->n];
  size_t i = 0;
  for (size_t k; (k = 2 * i + 1) < h->n; i = k) {
    if (k + 1 < h->n && before(&h->c[k + 1], &h->c[k]))
      k++;
    if (!before(&h->c[k], &last))
      break;
    h->c[i] = h->c[k];
  }
  h->c[i] = last;
  return top;
}

void mr_heap_free(mr_heap *h) {
  mr_mem_free(h->c);
  *h = (mr_heap){0};
}

static int consider(mr_merger *m, const mr_vocab *v, const char *text, mr_merge_fn rule,
                    int32_t left) {
  if (left < 0 || m->sym[left].next < 0)
    return 1;
  const mr_symbol *a = &m->sym[left], *b = &m->sym[a->next];
  mr_candidate c = {.left = left, .right = a->next, .len = a->len + b->len};
  return !rule(v, text, a, b, &c.rank, &c.id) || mr_heap_push(&m->heap, c);
}

int mr_merger_run(mr_merger *m, const mr_vocab *v, const char *text, mr_merge_fn rule) {
  m->heap.n = 0;
  for (size_t i = 0; i + 1 < m->n; i++)
    if (!consider(m, v, text, rule, (int32_t)i))
      return 0;
  while (m->heap.n) {
    mr_candidate c = mr_heap_pop(&m->heap);
    mr_symbol *a = &m->sym[c.left], *b = &m->sym[c.right];
    if (!a->len || !b->len || a->len + b->len != c.len)
      continue;
    a->len = c.len, a->id = c.id, a->next = b->next;
    b->len = 0;
    if (a->next >= 0)
      m->sym[a->next].prev = c.left;
    if (!consider(m, v, text, rule, a->prev) || !consider(m, v, text, rule, c.left))
      return 0;
  }
  return 1;
}

void mr_merger_free(mr_merger *m) {
  mr_mem_free(m->sym);
  mr_heap_free(&m->heap);
  *m = (mr_merger){0};
}
