/* schedule.h: the order in which rows are admitted. Deterministic for a plan; changes no result.
 *
 * Rows whose prompts begin alike are admitted one after the other, depth first (those that begin
 * alike for 1 block of MR_KV_BLOCK tokens, inside these for 2, 4, 8 ... blocks), so that what they
 * share is computed once and its pages are not kept longer than needed. Where rows have different
 * adapters, those of one adapter come one after the other before all that. Between groups, and
 * inside the last ones: rows with many output tokens first, by octaves of their limit, then long
 * ones (prompt and output), so that the tail is short; a group counts as the most that one of its
 * rows has. Where limits are octaves apart two scans from both ends of that order take turns
 * (dualscan.h).
 *
 * Memory does not grow with the rows: they are sorted out of core (io/sorter.h), one level of
 * blocks after the other, and the order is read from a file without a name. Prompts are read from
 * the plan's files again, once for each level at which a row still has company.
 */
#ifndef MR_JOBS_SCHEDULE_H
#define MR_JOBS_SCHEDULE_H

#include "jobs/plan.h"

typedef struct mr_schedule mr_schedule;

typedef struct mr_schedule_info {
  uint64_t groups, grouped_rows, largest_group; /* of two rows and more whose first block is alike
                                                 */
  bool blended;                                 /* two scans take turns */
} mr_schedule_info;

/* `skip(ctx, row)` true: the row is done already (skip may be NULL). Rows of kind MR_ROW_BAD that
 * are not skipped come first, in input order: their error lines need no engine. Temporary files go
 * to `dir`; memory_bytes 0: 2 MiB for each of seven sorters. MR_E_IO, MR_E_CANTCREATE, MR_E_NOMEM,
 * MR_E_DATA (damaged plan). */
mr_code mr_schedule_open(mr_schedule **out, const mr_plan *p, const char *dir, size_t memory_bytes,
                         bool (*skip)(void *ctx, uint64_t row), void *ctx, mr_err *err);
/* *more false: there is none. */
mr_code mr_schedule_next(mr_schedule *s, uint64_t *row, bool *more, mr_err *err);
mr_code mr_schedule_rewind(mr_schedule *s, mr_err *err); /* to the first row; MR_E_IO */
uint64_t mr_schedule_left(const mr_schedule *s);
mr_schedule_info mr_schedule_info_of(const mr_schedule *s);
void mr_schedule_close(mr_schedule *s);

#endif
