/* rowlist.h: row numbers in ascending order as a short text.
 *
 *     mr_rowlist l = {0};
 *     mr_rowlist_add(&l, 3); mr_rowlist_add(&l, 4); mr_rowlist_add(&l, 9);
 *     mr_rowlist_end(&l);        l.text.data is "3 2 4 1": three passed over, two taken, four ...
 *     mr_text_free(&l.text);
 *
 * Read back it is hostile input: mr_rowlist_next says when it is not whole.
 */
#ifndef MR_JOBS_ROWLIST_H
#define MR_JOBS_ROWLIST_H

#include "io/text.h"

typedef struct mr_rowlist {
  mr_text text;
  uint64_t from, to; /* the run that is not yet written: [from, to) */
  uint64_t end;      /* of the run before it */
} mr_rowlist;

void mr_rowlist_add(mr_rowlist *l, uint64_t row); /* above all before it */
void mr_rowlist_end(mr_rowlist *l);               /* text.failed: out of memory */

typedef struct mr_rowlist_at { /* begins as {.s = text} */
  const char *s;
  uint64_t row, left; /* the next row of the present run, and how many it has yet */
} mr_rowlist_at;

/* 1 and *row; 0 at the end; -1: damaged, or a row that is not below `rows`. */
int mr_rowlist_next(mr_rowlist_at *at, uint64_t rows, uint64_t *row);

#endif
