/* schedule.h: the order in which rows are admitted. Deterministic for a plan; changes no result.
 *
 * Rows whose prompts begin alike are admitted one after the other, depth first (those that begin
 * alike for 1 block of MR_KV_BLOCK tokens, inside these for 2, 4, 8 ... blocks), so that what they
 * share is computed once and its pages are not kept longer than needed. Where rows have different
 * adapters, those of one adapter come one after the other before all that. Between groups, and
 * inside the last ones: long rows first (expected tokens = prompt + output at most; a group counts
 * as its longest row), so that the tail is short.
 *
 * Memory: 16 bytes a row while sorting (and as much for qsort), 4 afterwards. Prompts are read from
 * the plan's files again, once for each level at which a row still has company.
 */
#ifndef MR_JOBS_SCHEDULE_H
#define MR_JOBS_SCHEDULE_H

#include "jobs/plan.h"

typedef struct mr_schedule mr_schedule;

/* `skip(ctx, row)` true: the row is done already (skip may be NULL). Rows of kind MR_ROW_BAD that
 * are not skipped come first, in input order: their error lines need no engine. */
mr_code mr_schedule_open(mr_schedule **out, const mr_plan *p, bool (*skip)(void *ctx, uint64_t row),
                         void *ctx, mr_err *err);
bool mr_schedule_next(mr_schedule *s, uint64_t *row); /* false: no more */
void mr_schedule_back(mr_schedule *s); /* the row just given was not admitted: give it again */
uint64_t mr_schedule_left(const mr_schedule *s);
void mr_schedule_close(mr_schedule *s);

#endif
