/* score_opts.h: what `score` is told; options.h fills it from the command line and JOB.json.
 *
 * Under `run` each option has "score-" in front: --score-metric, or {"score": {"metric": ...}}.
 */
#ifndef MR_JOBS_SCORE_OPTS_H
#define MR_JOBS_SCORE_OPTS_H

#include "jobs/list.h"

/* In the order of the names below; a set of them is 1u << metric. */
typedef enum mr_metric {
  MR_METRIC_EXACT_MATCH,
  MR_METRIC_CONTAINS,
  MR_METRIC_REGEX,
  MR_METRIC_NUMBER,
  MR_METRIC_F1,
  MR_METRIC_ROUGE_L,
  MR_METRIC_CHOICE,
  MR_METRIC_CHOICE_NORMALIZED,
  MR_METRIC_PERPLEXITY,
  MR_METRIC_BITS_PER_BYTE,
  MR_METRIC_JSON_VALID,
  MR_METRICS
} mr_metric;
#define MR_METRIC_NAMES                                                                            \
  "exact_match|contains|regex|number|f1|rouge_l|choice|choice_normalized|perplexity|"              \
  "bits_per_byte|json_valid"

/* What comparisons of texts pass over; a set of them. */
enum {
  MR_IGNORE_NOTHING = 1,
  MR_IGNORE_SPACE = 2, /* around the text; runs of it count as one space */
  MR_IGNORE_CASE = 4,
  MR_IGNORE_PUNCTUATION = 8, /* of ASCII */
  MR_IGNORE_ARTICLES = 16,   /* a, an, the */
  MR_IGNORE_NUMBERS = 32     /* digits */
};
#define MR_IGNORE_NAMES "nothing|space|case|punctuation|articles|numbers"

typedef enum mr_outputs { MR_OUTPUTS_MEAN, MR_OUTPUTS_BEST, MR_OUTPUTS_FIRST } mr_outputs;

typedef struct mr_score_opts {
  mr_list refs;       /* files; none: references are fields of the results */
  char *ref_field;    /* NULL: the first of the usual names */
  unsigned metrics;   /* 1u << mr_metric; 0: by what the rows are */
  char *extract;      /* pattern, or NULL */
  int extract_last;   /* 1: the last match */
  unsigned ignore;    /* MR_IGNORE_*; 0: space */
  char *by;           /* field, or NULL */
  int skip_missing;   /* 1: missing predictions do not count as wrong */
  mr_outputs outputs; /* of a row with several */
} mr_score_opts;

#endif
