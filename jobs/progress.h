/* progress.h: where a run is, on standard error and in a metrics file.
 *
 *     mr_progress *p;  mr_progress_open(&p, MR_PROGRESS_AUTO, metrics_path, &err);
 *     now.phase = "preflight"; ... mr_progress_update(p, &now, false);     as often as you like
 *     mr_progress_close(p);
 *
 * bar: one line redrawn at most five times a second; line: a line each 30 s and at a change of
 * phase; json: an object a line each 5 s and at a change of phase. auto is bar on a terminal,
 * else line. Failing writes are ignored. The metrics file (Prometheus text format) is replaced
 * atomically each 15 s and at the end.
 */
#ifndef MR_JOBS_PROGRESS_H
#define MR_JOBS_PROGRESS_H

#include "io/text.h"
#include "jobs/options.h"

typedef struct mr_progress mr_progress;

typedef struct mr_progress_now {
  const char *phase; /* "preflight", "load", "run", "assemble", "done", "stopped" */
  uint64_t rows, rows_done, rows_failed; /* rows 0: not yet known; done counts failed rows too */
  uint64_t prompt_tokens, output_tokens; /* computed by this run */
  double work, work_done; /* weighted tokens in all, and finished: the base of the ETA */
  int batch;              /* sequences in flight */
  uint64_t memory_bytes;  /* peak resident */
} mr_progress_now;

mr_code mr_progress_open(mr_progress **out, mr_progress_kind kind, const char *metrics_file,
                         mr_err *err);
/* `force`: now, whatever was printed when (SIGUSR1). */
void mr_progress_update(mr_progress *p, const mr_progress_now *now, bool force);
void mr_progress_close(mr_progress *p); /* ends the bar's line; NULL is fine */

/* The texts, for `now` at `seconds` since the run began. */
void mr_progress_words(const mr_progress *p, const mr_progress_now *now, mr_text *out);
void mr_progress_json(const mr_progress *p, const mr_progress_now *now, mr_text *out);
void mr_progress_metrics(const mr_progress *p, const mr_progress_now *now, mr_text *out);

/* "1h02m", "3m20s", "12s". Returns buf. */
const char *mr_progress_duration(double seconds, char *buf, size_t cap);
/* "1,234,567". Returns buf. */
const char *mr_progress_count(uint64_t n, char *buf, size_t cap);

#endif
