/* explain.h: why a plan is as it is, in sentences. */
#ifndef MR_JOBS_EXPLAIN_H
#define MR_JOBS_EXPLAIN_H

#include "jobs/forecast.h"
#include "jobs/options.h"

typedef struct mr_explain_in { /* all borrowed */
  const mr_job *job;
  const mr_engine_info *info;
  const mr_forecast *forecast;
  const mr_time_estimate *estimate;
  int learnt_from;     /* runs */
  double waited_share; /* of the measurement's time in which others had the processors */
} mr_explain_in;

/* Calls say(sentence, to) for each. */
void mr_explain(const mr_explain_in *in, void (*say)(const char *sentence, void *to), void *to);

#endif
