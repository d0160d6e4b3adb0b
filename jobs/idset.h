/* idset.h: which 64-bit hashes have been seen: 8 bytes each at a load of at most 3/4. */
#ifndef MR_JOBS_IDSET_H
#define MR_JOBS_IDSET_H

#include <stdbool.h>
#include <stdint.h>

#include "io/err.h"

typedef struct mr_idset { /* open addressing; zero bytes are an empty set */
  uint64_t *slots;        /* 0: free */
  uint64_t n, cap;        /* cap is 0 or a power of two */
} mr_idset;

/* *known: it was there already. */
mr_code mr_idset_add(mr_idset *s, uint64_t hash, bool *known, mr_err *err);
bool mr_idset_has(const mr_idset *s, uint64_t hash);
void mr_idset_free(mr_idset *s);

#endif
