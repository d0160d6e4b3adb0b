/* score_line.h: what a line of results says, whichever of their forms it has.
 *
 * An OpenAI batch line ({"custom_id", "response": {"body": ...}, "error"}), a flat line with
 * `output`, one with `logprob` or `best`, or the line of a row that failed. Values of a wrong type
 * are as absent: a foreign file is no reason to stop.
 */
#ifndef MR_JOBS_SCORE_LINE_H
#define MR_JOBS_SCORE_LINE_H

#include <jansson.h>
#include <stdbool.h>

#include "jobs/score_text.h"

#define MR_SCORE_OUTPUTS_MAX 1024

typedef struct mr_score_line { /* borrows from the object that it was read from */
  const json_t *object;
  const json_t *body; /* response.body, or the object itself */
  const json_t *id;   /* text or integer, or NULL */
  bool failed;        /* an error line */
  int n_outputs;      /* texts; 0: the row has none */
} mr_score_line;

/* False: not an object. */
bool mr_score_line_read(mr_score_line *l, const json_t *object);
mr_str mr_score_line_output(const mr_score_line *l, int i); /* 0 <= i < n_outputs */
/* Index of the best choice (by bytes: best_normalized), or -1. */
int mr_score_line_best(const mr_score_line *l, bool by_bytes);
/* Adds up the log-probabilities of the tokens of the outputs, of the continuation, or of the prompt
 * (prompt_token_logprobs), the first of these that is there; a value that is not there (the
 * first token's) is passed over. Bytes: of the text that the tokens are, 0 where the line does not
 * hold it. False: none, or one of the tokens had no probability. */
bool mr_score_line_logprobs(const mr_score_line *l, double *sum, double *tokens, double *bytes);

#endif
