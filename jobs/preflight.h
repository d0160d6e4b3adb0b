/* preflight.h: reads every row of the inputs, checks it, tokenizes it and spools it to the plan,
 * before any weight is loaded. A bad row becomes an error record and stops nothing.
 */
#ifndef MR_JOBS_PREFLIGHT_H
#define MR_JOBS_PREFLIGHT_H

#include "jobs/options.h"
#include "jobs/plan.h"
#include "src/prompt.h"

typedef struct mr_preflight_stats {
  uint64_t rows, bad_rows, files, input_bytes, text_bytes;
  char input_digest[33]; /* xxh3-128 over the decompressed text of all inputs in order */
  double seconds;
} mr_preflight_stats;

/* Called now and then with rows so far (progress, and whether to stop: return false); may be NULL.
 */
typedef bool (*mr_preflight_tick)(void *ctx, const mr_preflight_stats *so_far);

/* now: the job's start (behind strftime_now). max_context: engine limit in tokens. MR_E_NOINPUT,
 * MR_E_DATA (broken archive or frame, --duplicates refuse), MR_E_IO, MR_E_STOPPED (tick said so).
 */
mr_code mr_preflight_run(const mr_job *j, const mr_prompter *p, double now, int max_context,
                         mr_plan_writer *w, mr_preflight_stats *stats, mr_preflight_tick tick,
                         void *ctx, mr_err *err);

#endif
