/* texts.h: rows of a JSONL file as windows of token ids: what a calibration reads.
 *
 *     mr_texts t = {0};
 *     mr_texts_read(&t, prompter, "rows.jsonl", window, max_tokens, &err);
 * t.rows[0 .. n_used-1] to calibrate with, t.rows[n_used .. n-1] held back
 *     mr_texts_free(&t);
 *
 * A row is {"text": ...}, or a row as `run` takes it: "prompt" (text or ids), "messages", or those
 * in the "body" of a batch request; text in "continuation", "output" or "answer" follows the
 * prompt. Files may be compressed (io/source.h). Each row is cut into windows. Every fourth window
 * is held back from the calibration; of fewer than four the last.
 */
#ifndef MR_JOBS_TEXTS_H
#define MR_JOBS_TEXTS_H

#include "src/calibrate.h"
#include "src/prompt.h"

typedef struct mr_texts {
  mr_tokens *rows; /* to calibrate with, then those held back; owned */
  size_t n, cap;
  int n_used;    /* rows of the first kind */
  int32_t **own; /* owned */
  size_t n_own, cap_own;
  int64_t tokens;
} mr_texts;

/* MR_E_DATA with the line: a row that is none of these. Reading ends at max_tokens. */
mr_code mr_texts_read(mr_texts *t, const mr_prompter *p, const char *path, int window,
                      int64_t max_tokens, mr_err *err);
void mr_texts_free(mr_texts *t);

#endif
