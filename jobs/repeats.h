/* repeats.h: which rows have an id that an earlier row has, in bounded memory.
 *
 *     mr_repeats *r;  mr_repeats_open(&r, dir, 0, &err);
 *     mr_repeats_add(r, id_hash, row, &err); ...          every row that has an id
 *     mr_repeats_find(r, plan_writer, found, ctx, &err);  found: once for each repetition
 *     mr_repeats_close(r);
 *
 * Pairs of hash and row are sorted out of core (io/sorter.h). Where hashes are equal the ids
 * themselves are read back from the plan and compared, so that no row is called a repetition that
 * is none.
 */
#ifndef MR_JOBS_REPEATS_H
#define MR_JOBS_REPEATS_H

#include "jobs/plan.h"

typedef struct mr_repeats mr_repeats;

/* rec: the row's record, with its entry; id is NUL-terminated and may hold NUL; all are borrowed
 * for the call. Repetitions of one id come in input order, ids in no order. */
typedef mr_code (*mr_repeats_found)(void *ctx, const mr_plan_record *rec, const char *id,
                                    mr_err *err);

/* For the sorter's file `dir`; memory_bytes 0: the sorter's own measure. */
mr_code mr_repeats_open(mr_repeats **out, const char *dir, size_t memory_bytes, mr_err *err);
mr_code mr_repeats_add(mr_repeats *r, uint64_t id_hash, uint64_t row, mr_err *err);
mr_code mr_repeats_find(mr_repeats *r, mr_plan_writer *w, mr_repeats_found found, void *ctx,
                        mr_err *err);
void mr_repeats_close(mr_repeats *r); /* NULL is fine */

#endif
