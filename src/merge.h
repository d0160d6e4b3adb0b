/* merge.h: merging neighbours in order of rank: the core of byte-level BPE and of SentencePiece's
 * BPE.
 *
 * The symbols of a text form a list; of all neighbours that may merge, the pair of the lowest rank
 * (the leftmost of equal ones) becomes one symbol, until no pair may merge. A heap of candidates
 * makes it O(n log n); candidates that a merge has outdated are dropped when they come up.
 *
 *     mr_merger m = {0};
 *     m.n = 0;  mr_merger_add(&m, id, at, len); ...      symbols in order
 *     mr_merger_run(&m, v, text, rule);
 *     for (int32_t i = 0; m.n && i >= 0; i = m.sym[i].next) ...
 *     mr_merger_free(&m);                                 or set n = 0 and use it again
 */
#ifndef MR_SRC_MERGE_H
#define MR_SRC_MERGE_H

#include "src/vocab.h"

typedef struct mr_symbol {
  int32_t prev, next; /* -1: none */
  int32_t id;         /* token, -1: none */
  uint32_t at, len;   /* bytes of the text; len 0: merged away */
} mr_symbol;

typedef struct mr_candidate {
  int32_t rank, left, right, id;
  uint32_t len; /* of both together: tells an outdated candidate */
} mr_candidate;

typedef struct mr_heap { /* lowest rank first, then lowest left */
  mr_candidate *c;       /* owned */
  size_t n, cap;
} mr_heap;

int mr_heap_push(mr_heap *h, mr_candidate c); /* 0: out of memory */
mr_candidate mr_heap_pop(mr_heap *h);         /* h->n > 0 */
void mr_heap_free(mr_heap *h);

typedef struct mr_merger {
  mr_symbol *sym; /* owned */
  size_t n, cap;
  mr_heap heap;
} mr_merger;

/* Whether a and its right neighbour b merge: rank and id of the result. */
typedef bool (*mr_merge_fn)(const mr_vocab *v, const char *text, const mr_symbol *a,
                            const mr_symbol *b, int32_t *rank, int32_t *id);

int mr_merger_add(mr_merger *m, int32_t id, uint32_t at, uint32_t len); /* 0: out of memory */
int mr_merger_run(mr_merger *m, const mr_vocab *v, const char *text, mr_merge_fn rule); /* 0: out of
                                                                                           memory */
void mr_merger_free(mr_merger *m);

#endif
