/* shard.h: which rows of a plan a run of --shard I/N computes.
 *
 *     mr_shard *s;  mr_shard_open(&s, plan, (mr_shard_part){2, 8}, &err);
 *     if (mr_shard_has(s, row)) local = mr_shard_local(s, row);
 *     mr_shard_close(s);
 *
 * Every shard plans the whole input and cuts it by the same rule, so that nothing has to be sent
 * from one to the other. Rows whose prompts begin alike (mr_plan_prefix) stay together, unless they
 * are more than 1/N of the work: then they are cut where they differ later. Big groups go, the
 * largest first, to the shard with the least work; the rest fills the shards up in the order of
 * prefixes. A bad row belongs to the shard of its index modulo N.
 * Within its run a shard's rows are numbered without gaps, in input order: the local number.
 * NULL stands for a job that is not cut: it has every row, and local numbers are the row's.
 */
#ifndef MR_JOBS_SHARD_H
#define MR_JOBS_SHARD_H

#include <stdbool.h>

#include "jobs/plan.h"

#define MR_SHARDS_MAX 1000

typedef struct mr_shard_part { /* the index-th of `of`, from 1; of 0: not cut */
  int index, of;
} mr_shard_part;

typedef struct mr_shard mr_shard;

/* "I/N"; "slurm": from SLURM_ARRAY_TASK_ID, _MIN, _MAX and _COUNT. False with the reason in why. */
bool mr_shard_parse(const char *s, mr_shard_part *part, const char **why);

/* MR_E_NOMEM, MR_E_IO. Memory: a bit a row, and a few MiB. */
mr_code mr_shard_open(mr_shard **out, const mr_plan *p, mr_shard_part part, mr_err *err);
void mr_shard_close(mr_shard *s); /* NULL is fine */
bool mr_shard_has(const mr_shard *s, uint64_t row);
uint64_t mr_shard_local(const mr_shard *s, uint64_t row); /* of a row that it has */
uint64_t mr_shard_rows(const mr_shard *s);                /* 0 for NULL */
/* Of the whole cut: equal for all shards of a job, or they do not fit together. */
uint64_t mr_shard_cut(const mr_shard *s);

#endif
