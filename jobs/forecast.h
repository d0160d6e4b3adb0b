/* forecast.h: what a job will do, row by row in the order of admission: what its prompts share, and
 * how long it takes. For `plan`, and for a run that knows its machine (profile.h).
 *
 *     mr_forecast f;
 *     mr_forecast_run(&f, plan, order, no_sharing, &estimate, &info, &profile, &err);
 *
 * Reads every prompt once more. `order` is at its end afterwards.
 */
#ifndef MR_JOBS_FORECAST_H
#define MR_JOBS_FORECAST_H

#include "jobs/estimate.h"
#include "jobs/plan.h"
#include "jobs/schedule.h"

typedef struct mr_forecast {
  uint64_t rows; /* that need the engine */
  uint64_t prompt_tokens, output_tokens, shared_tokens;
  bool shared_is_least;                         /* more blocks than are remembered at a time */
  uint64_t groups, grouped_rows, largest_group; /* of rows whose first block is alike; two or more
                                                 */
  uint64_t longest_row;                         /* tokens */
} mr_forecast;

/* MR_E_IO, MR_E_NOMEM, MR_E_DATA (damaged plan). */
mr_code mr_forecast_run(mr_forecast *f, const mr_plan *p, mr_schedule *order, bool no_sharing,
                        mr_time_estimate *e, const mr_engine_info *info, const mr_profile *profile,
                        mr_err *err);

#endif
