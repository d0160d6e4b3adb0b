/* forecast.h: what a job will do, row by row in the order of admission: what its prompts share, and
 * how long it takes. For `plan`, and for a run that knows its machine (profile.h).
 *
 *     mr_forecast f;
 *     const mr_forecast_in in = {.plan = plan, .order = order, .info = &info, .profile = &profile};
 *     mr_forecast_run(&f, &in, &estimate, &err);
 *
 * Reads every prompt once more. `order` is at its end afterwards. Rows that a run before had begun
 * (saved.h) come first, with what is left of them.
 */
#ifndef MR_JOBS_FORECAST_H
#define MR_JOBS_FORECAST_H

#include "jobs/estimate.h"
#include "jobs/plan.h"
#include "jobs/schedule.h"

typedef struct mr_forecast_in { /* all borrowed */
  const mr_plan *plan;
  mr_schedule *order;
  bool no_sharing;
  mr_prefixstore *cache;                 /* NULL: no prefix cache */
  const mr_saved *saved;                 /* NULL: no rows that were begun; those of it that ... */
  bool (*done)(void *ctx, uint64_t row); /* ... are not done; NULL: none is */
  void *ctx;
  double share; /* of its output tokens at most that a row will use; 0: all */
  const mr_engine_info *info;
  const mr_profile *profile;
} mr_forecast_in;

typedef struct mr_forecast {
  uint64_t rows; /* that need the engine */
  uint64_t prompt_tokens, output_tokens, shared_tokens;
  uint64_t cached_tokens; /* beside the shared ones: they are in the prefix cache */
  bool shared_is_least;   /* more blocks than are remembered at a time */
  uint64_t longest_row;   /* tokens */
  mr_schedule_info order;
} mr_forecast;

/* MR_E_IO, MR_E_NOMEM, MR_E_DATA (damaged plan). */
mr_code mr_forecast_run(mr_forecast *f, const mr_forecast_in *in, mr_time_estimate *e, mr_err *err);

#endif
