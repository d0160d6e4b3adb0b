/* schedule.h: the order in which rows are admitted. Deterministic for a plan; changes no result.
 *
 * Now: long rows first (expected tokens = prompt + output at most), so that the tail is short; the
 * planner's prefix groups and blending replace this behind the same calls.
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
