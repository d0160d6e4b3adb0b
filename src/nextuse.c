#include "src/nextuse.h"

#include <stdbool.h>

#include "io/mem.h"

/* Open addressing with linear probing, half full at most; removal moves later ones up (Knuth, The
 * Art of Computer Programming 3, 6.4, algorithm R). */

static mr_nextuse_slot *find(const mr_nextuse *u, uint64_t hash) {
  size_t at = (size_t)hash & (u->size - 1);
  while (u->slots[at].count && u->slots[at].hash != hash)
    at = (at + 1) & (u->size - 1);
  return &u->slots[at];
}

static bool grow(mr_nextuse *u) {
  mr_nextuse old = *u;
  if (2 * (u->n + 1) <= u->size)
    return true;
  u->size = old.size ? 2 * old.size : 256;
  u->slots = mr_mem_alloc(u->size, sizeof *u->slots);
  if (!u->slots) {
    *u = old;
    return false;
  }
  for (size_t i = 0; i < old.size; i++)
    if (old.slots[i].count)
      *find(u, old.slots[i].hash) = old.slots[i];
  mr_mem_free(old.slots);
  return true;
}

void mr_nextuse_add(mr_nextuse *u, uint64_t hash, uint64_t when) {
  if (!grow(u))
    return;
  mr_nextuse_slot *s = find(u, hash);
  if (s->count == 0) {
    *s = (mr_nextuse_slot){.hash = hash, .when = when};
    u->n++;
  }
  s->when = when < s->when ? when : s->when;
  s->count++;
}

static void close_gap(mr_nextuse *u, size_t gap) {
  size_t mask = u->size - 1;
  for (size_t at = (gap + 1) & mask; u->slots[at].count; at = (at + 1) & mask) {
    size_t home = (size_t)u->slots[at].hash & mask;
    if (((at - home) & mask) < ((at - gap) & mask))
      continue; /* it would lie before its home */
    u->slots[gap] = u->slots[at];
    u->slots[at].count = 0;
    gap = at;
  }
}

void mr_nextuse_remove(mr_nextuse *u, uint64_t hash, uint64_t next) {
  mr_nextuse_slot *s = u->size ? find(u, hash) : NULL;
  if (!s || s->count == 0)
    return;
  s->when = next > s->when ? next : s->when;
  if (--s->count)
    return;
  u->n--;
  close_gap(u, (size_t)(s - u->slots));
}

uint64_t mr_nextuse_of(const mr_nextuse *u, uint64_t hash) {
  const mr_nextuse_slot *s = u->size ? find(u, hash) : NULL;
  return s && s->count ? s->when : MR_NEVER;
}

uint32_t mr_nextuse_rows(const mr_nextuse *u, uint64_t hash) {
  return u->size ? find(u, hash)->count : 0;
}

void mr_nextuse_free(mr_nextuse *u) {
  mr_mem_free(u->slots);
  *u = (mr_nextuse){0};
}
