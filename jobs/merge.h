/* merge.h: the outputs of all shards of a job, joined in input order.
 *
 *     mr_merge *m;  mr_merge_open(&m, names, n, &err);     reads and checks all of them
 *     mr_merge_whole(m, &manifest, &err);                  identity and sums of the whole job
 *     mr_merge_write(m, "OUT.run/bucket", 0, sink, ctx, &err);    every line of every row
 *     mr_merge_close(m);
 *
 * A shard counts when its manifest is good, its files have the digests in it, it is of the same job
 * as the others (identity.h, all but the shard), and all shards together have each row once. The
 * row lists in the manifests say which row a line belongs to; lines are put in order by linesort.h,
 * so that one file of a shard is open at a time, however many shards there are, and memory is
 * bounded. Results in order of completion are joined shard after shard. Nothing of a shard is
 * written.
 */
#ifndef MR_JOBS_MERGE_H
#define MR_JOBS_MERGE_H

#include "jobs/linesort.h"
#include "jobs/manifest.h"
#include "jobs/rundir.h"

typedef struct mr_merge mr_merge;

/* names: as for `check` (OUT, the output, OUT.run or the manifest); one that is named twice counts
 * once. MR_E_NOINPUT, MR_E_STOPPED (a shard is not finished), MR_E_DATA, MR_E_IO, MR_E_NOMEM. */
mr_code mr_merge_open(mr_merge **out, char *const *names, int n, mr_err *err);
/* Fills an empty manifest, all but its files. */
mr_code mr_merge_whole(const mr_merge *m, mr_manifest *whole, mr_err *err);
/* All lines; `spill` and bucket_bytes: linesort.h. Reads each shard's files twice. */
mr_code mr_merge_write(mr_merge *m, const char *spill, size_t bucket_bytes, mr_line_sink sink,
                       void *ctx, mr_err *err);
int mr_merge_shards(const mr_merge *m);
/* By the number of the shard, from 0. Borrowed. */
const mr_paths *mr_merge_paths(const mr_merge *m, int i);
const mr_manifest *mr_merge_manifest(const mr_merge *m, int i);
void mr_merge_close(mr_merge *m); /* NULL is fine */

#endif
