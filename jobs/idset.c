#include "jobs/idset.h"

#include "io/mem.h"

/* The slot that holds `hash`, or the free one where it belongs. */
static uint64_t slot_of(const mr_idset *s, uint64_t hash) {
  uint64_t i = hash & (s->cap - 1);
  while (s->slots[i] && s->slots[i] != hash)
    i = (i + 1) & (s->cap - 1);
  return i;
}

static mr_code grow(mr_idset *s, mr_err *err) {
  mr_idset big = {.cap = s->cap ? s->cap * 2 : 1024};
  big.slots = mr_mem_alloc(big.cap, sizeof *big.slots);
  if (!big.slots)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for %llu ids", (unsigned long long)s->n);
  for (uint64_t i = 0; i < s->cap; i++)
    if (s->slots[i])
      big.slots[slot_of(&big, s->slots[i])] = s->slots[i];
  big.n = s->n;
  mr_mem_free(s->slots);
  *s = big;
  return MR_OK;
}

mr_code mr_idset_add(mr_idset *s, uint64_t hash, bool *known, mr_err *err) {
  hash += !hash; /* 0 marks a free slot */
  if ((s->n + 1) * 4 > s->cap * 3) {
    mr_code rc = grow(s, err);
    if (rc != MR_OK)
      return rc;
  }
  uint64_t i = slot_of(s, hash);
  *known = s->slots[i] != 0;
  if (!*known) {
    s->slots[i] = hash;
    s->n++;
  }
  return MR_OK;
}

bool mr_idset_has(const mr_idset *s, uint64_t hash) {
  hash += !hash;
  return s->cap && s->slots[slot_of(s, hash)] != 0;
}

void mr_idset_free(mr_idset *s) {
  mr_mem_free(s->slots);
  *s = (mr_idset){0};
}
