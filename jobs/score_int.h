/* score_int.h: shared by score.c (reads) and score_out.c (prints). */
#ifndef MR_JOBS_SCORE_INT_H
#define MR_JOBS_SCORE_INT_H

#include "jobs/idset.h"
#include "jobs/refs.h"
#include "jobs/score.h"
#include "jobs/score_row.h"

typedef struct score_group {
  char *name; /* owned; NULL: all rows */
  uint64_t rows, missing;
  mr_stats stats[MR_METRICS];
} score_group;

struct mr_score {
  const mr_score_opts *opts;
  mr_score_rules rules;
  mr_refs *refs; /* or NULL: references are fields of the results */
  mr_idset seen; /* without refs: ids of results */
  bool part;
  mr_outfile *rows;
  mr_score_counts counts;
  score_group *groups; /* [0]: all rows; the rest by name after finish */
  size_t n_groups, cap_groups;
  json_t *by_name; /* name → index in groups */
  mr_score_values values;
  mr_text name, line; /* scratch */
  json_t *own;        /* answers of the last row that brings its own */
};

/* The name of a metric. */
const char *score_metric_name(mr_metric m);
/* As users read it: of perplexity the exponential. */
mr_mean score_estimate(const score_group *g, mr_metric m);

#endif
