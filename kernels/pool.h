/* pool.h: a team of threads that runs one function over a range of work items, over and over.
 *
 *     mr_pool *p = mr_pool_new(threads, pin, &failed);
 *     mr_pool_run(p, fn, ctx, n_items);      calls fn(ctx, item, worker) for each item in 0..n-1,
 * then returns
 *
 * The caller is worker 0 and takes part. Items are handed out in order by an atomic counter, so
 * uneven items balance. Workers wait by spinning for some microseconds and then on a futex: no
 * cycles are burnt between steps. Results must not depend on which worker ran an item. Not
 * reentrant; one caller at a time.
 */
#ifndef MR_KERNELS_POOL_H
#define MR_KERNELS_POOL_H

#include <stddef.h>

typedef struct mr_pool mr_pool;
typedef void (*mr_pool_fn)(void *ctx, int item, int worker);

mr_pool *mr_pool_new(int threads, int pin); /* NULL: threads could not be had. pin: bind worker i to
                                               CPU i */
void mr_pool_free(mr_pool *p);
int mr_pool_threads(const mr_pool *p);
void mr_pool_run(mr_pool *p, mr_pool_fn fn, void *ctx, int n_items);
/* The same, but each worker walks in order through a part of the items of its own, and then helps
 * the others with theirs: for items whose neighbours share what lies in a worker's caches. Runs of
 * as many items give each worker the same part. */
void mr_pool_run_parts(mr_pool *p, mr_pool_fn fn, void *ctx, int n_items);

/* CPUs this process may use (affinity and cgroup quota). */
int mr_pool_cpus(void);

#endif
