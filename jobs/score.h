/* score.h: metrics over results: docs/score.md says what they mean.
 *
 *     mr_score *s;
 *     mr_score_open(&s, opts, &err);                  the pattern is compiled, references are read
 *     mr_score_rows_to(s, file);                      optional: a line for each row
 *     mr_score_read(s, paths, n, &err);               results and errors, in any of their forms
 *     mr_score_finish(s, &err);                       rows without a result
 *     json = mr_score_to_json(s);  mr_score_table(s, &text);  mr_score_brief(s, &text);
 *     mr_score_close(s);
 *
 * A row that has no result (it failed, or is not in the files) counts as wrong, unless the options
 * say otherwise; results without a reference, results that come twice and answers in which the
 * pattern is not found are counted and told. Memory does not grow with the results, only with the
 * references (refs.h), without these with the ids (idset.h), and with the groups.
 */
#ifndef MR_JOBS_SCORE_H
#define MR_JOBS_SCORE_H

#include <jansson.h>

#include "io/err.h"
#include "io/text.h"
#include "jobs/outfile.h"
#include "jobs/score_opts.h"
#include "jobs/score_stats.h"

#define MR_SCORE_GROUPS_MAX 10000
#define MR_SCORE_LINE_MAX ((size_t)1 << 28) /* bytes of a line of results */

typedef struct mr_score mr_score;

typedef struct mr_score_counts {
  uint64_t results;      /* rows with a result, each once */
  uint64_t scored;       /* those of them that have a metric at least */
  uint64_t missing;      /* rows without a result that count */
  uint64_t failed;       /* lines of errors */
  uint64_t unreferenced; /* results without a reference */
  uint64_t repeated;     /* lines of ids that were there: passed over */
  uint64_t unextracted;  /* rows with an answer in which the pattern is not found */
  uint64_t limited;      /* rows whose answer passed the limits of matching */
  uint64_t elsewhere;    /* references of other shards */
  uint64_t blank;        /* lines of references without an answer */
} mr_score_counts;

/* Borrows opts until close. MR_E_USAGE: a pattern that does not compile, regex without one. Else
 * as mr_refs_open. */
mr_code mr_score_open(mr_score **out, const mr_score_opts *opts, mr_err *err);
/* The results are those of one shard: references without a result belong to others. */
void mr_score_is_part(mr_score *s);
void mr_score_rows_to(mr_score *s, mr_outfile *rows); /* borrowed until finish */
/* May be called again for more. MR_E_DATA: a line that is not a JSON object, or too many groups. */
mr_code mr_score_read(mr_score *s, const char *const *paths, int n, mr_err *err);
/* MR_E_DATA: there are results, and not one of them could be scored. */
mr_code mr_score_finish(mr_score *s, mr_err *err);
void mr_score_close(mr_score *s); /* NULL is fine */

const mr_score_counts *mr_score_counts_get(const mr_score *s);
/* A metric of all rows; n 0 where it was not asked for, or no row has it. */
mr_mean mr_score_estimate(const mr_score *s, mr_metric m);
/* Whether rows are missing on either side: predictions that count, references. */
uint64_t mr_score_incomplete(const mr_score *s);

/* {"results", "missing", ..., "metrics": {name: {"value", "stderr", "low", "high", "rows"}},
 * "by", "groups": {name: {"results", "missing", "metrics"}}}; owned by the caller; NULL: out of
 * memory. */
json_t *mr_score_to_json(const mr_score *s);
void mr_score_table(const mr_score *s, mr_text *out);
void mr_score_brief(const mr_score *s, mr_text *out); /* one line, without its end */

#endif
