/* nextuse.h: which blocks of prompts are wanted again, and when: what is known of the future.
 *
 *     mr_nextuse_add(u, hash, when)       a row that comes `when` (numbers grow) will have it
 *     mr_nextuse_remove(u, hash, next)    that row is there; another, if any, comes at `next`
 *     mr_nextuse_of(u, hash)              MR_NEVER: nobody is known who wants it
 *     mr_nextuse_rows(u, hash)            how many rows that are known will have it
 *
 * A block is known by its hash; two of one hash are one. Only hints: when memory for them is
 * missing they are forgotten.
 */
#ifndef MR_SRC_NEXTUSE_H
#define MR_SRC_NEXTUSE_H

#include <stddef.h>
#include <stdint.h>

#define MR_NEVER UINT64_MAX

typedef struct mr_nextuse_slot {
  uint64_t hash, when;
  uint32_t count; /* 0: the slot is free */
} mr_nextuse_slot;

typedef struct mr_nextuse { /* zeroed: empty */
  mr_nextuse_slot *slots;   /* [size], a power of two; owned */
  size_t size, n;
} mr_nextuse;

void mr_nextuse_add(mr_nextuse *u, uint64_t hash, uint64_t when);
void mr_nextuse_remove(mr_nextuse *u, uint64_t hash, uint64_t next);
uint64_t mr_nextuse_of(const mr_nextuse *u, uint64_t hash);
uint32_t mr_nextuse_rows(const mr_nextuse *u, uint64_t hash);
void mr_nextuse_free(mr_nextuse *u);

#endif
