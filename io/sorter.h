/* sorter.h: sorts records of one size in bounded memory, however many there are.
 *
 *     mr_sorter *s;
 *     mr_sorter_open(&s, dir, sizeof(item), by_key, 0, &err);    no file yet
 *     mr_sorter_add(s, &item, &err); ...
 *     mr_sorter_sort(s, &err);                                   no more are added
 *     while (mr_sorter_next(s, &item, &more, &err) == MR_OK && more) ...       in order
 *     mr_sorter_rewind(s);                                       to read them once more
 *     mr_sorter_close(s);
 *
 * What fits into the memory is sorted there. More is written to a file in `dir` as sorted runs,
 * which are merged while they are read (Knuth, The Art of Computer Programming 3, 5.4). The file
 * has no name once it is open, so a kill leaves nothing behind. Order among records that compare
 * equal is not defined: a comparison that tells all records apart makes it so.
 */
#ifndef MR_IO_SORTER_H
#define MR_IO_SORTER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "io/err.h"

#define MR_SORTER_BYTES ((size_t)4 << 20)

typedef struct mr_sorter mr_sorter;
typedef int (*mr_sorter_order)(const void *a, const void *b); /* as for qsort */

/* What an order answers of two keys. */
static inline int mr_sorter_compare(uint64_t a, uint64_t b) {
  return (a > b) - (a < b);
}

/* `dir` is copied. memory_bytes 0: MR_SORTER_BYTES; qsort may take as much again. MR_E_NOMEM. */
mr_code mr_sorter_open(mr_sorter **out, const char *dir, size_t record_bytes, mr_sorter_order order,
                       size_t memory_bytes, mr_err *err);
/* MR_E_NOMEM, MR_E_CANTCREATE (no file in dir), MR_E_IO (disk full). */
mr_code mr_sorter_add(mr_sorter *s, const void *record, mr_err *err);
mr_code mr_sorter_sort(mr_sorter *s, mr_err *err);
/* Copies the next record to *record; *more false: there is none. MR_E_IO. */
mr_code mr_sorter_next(mr_sorter *s, void *record, bool *more, mr_err *err);
mr_code mr_sorter_rewind(mr_sorter *s, mr_err *err);
uint64_t mr_sorter_count(const mr_sorter *s);
void mr_sorter_close(mr_sorter *s); /* NULL is fine */

#endif
