/* tuned.h: what was measured of a machine and model (src/tune.h) in a file beside the profile.
 *
 *     mr_engine_estimate(&opts, &info, &err);
 *     mr_tuned_load(&t, &opts, &info);         sets opts.tuning, and the step's tokens in info
 *     mr_engine_open(&e, &opts, ...);          measures what is not known
 *     mr_tuned_save(&t, &info);
 *
 * Without a place for the file (MILLRACE_CACHE is empty), and on a GPU, nothing is measured. A file
 * that is damaged or of another machine is as none.
 */
#ifndef MR_JOBS_TUNED_H
#define MR_JOBS_TUNED_H

#include "src/engine.h"

/* opts borrows t. */
void mr_tuned_load(mr_tuning *t, mr_engine_opts *opts, mr_engine_info *info);
/* Where it was measured since. */
void mr_tuned_save(const mr_tuning *t, const mr_engine_info *info);

#endif
