/* score_row.h: the metrics of one row: its answers against what is acceptable.
 *
 * Of several acceptable answers the one that fits best counts, for each metric. A row with several
 * outputs counts once: by their mean, the best of them, or the first.
 */
#ifndef MR_JOBS_SCORE_ROW_H
#define MR_JOBS_SCORE_ROW_H

#include "io/err.h"
#include "jobs/extract.h"
#include "jobs/score_line.h"
#include "jobs/score_opts.h"

typedef struct mr_score_rules {
  unsigned metrics; /* 1u << mr_metric */
  bool by_kind;     /* none was asked for: what fits the kind of the row */
  unsigned ignore;  /* MR_IGNORE_* */
  mr_outputs outputs;
  mr_extract *extract; /* or NULL; borrowed */
} mr_score_rules;

/* Metrics that need a reference, those for which a row without answer is wrong, and those of texts.
 */
extern const unsigned mr_metrics_referenced, mr_metrics_of_missing, mr_metrics_of_text;

typedef struct mr_score_values { /* zero it once, reuse it, free it */
  unsigned has;                  /* which metrics the row has */
  double value[MR_METRICS], weight[MR_METRICS];
  bool unextracted, limited; /* an output without a match; one that passed the limits */
  mr_text answer;            /* the first output, or the part that was extracted */
  bool has_answer;
  mr_text ref, norm, norm_ref; /* scratch */
} mr_score_values;

/* answers: array of texts, numbers and booleans; NULL: the row has no reference. MR_E_NOMEM. */
mr_code mr_score_row(const mr_score_rules *rules, const mr_score_line *line, const json_t *answers,
                     mr_score_values *out, mr_err *err);
void mr_score_values_free(mr_score_values *v);

#endif
