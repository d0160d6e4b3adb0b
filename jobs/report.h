/* report.h: the figures of a run: OUT.report.json, OUT.report.html, and the line at the end.
 *
 *     mr_report r;  mr_report_init(&r);
 *     mr_report_row(&r, result) for each finished row; mr_report_sample(&r, ...) after each step;
 *     fill the rest; json = mr_report_to_json(&r); mr_report_html(json, &text, &err);
 *     mr_report_free(&r);
 *
 * Memory is bounded: latencies go into a histogram (bins 2 % wide), the timeline is merged to at
 * most 600 points. Keys of the JSON: docs/journal.md, "The report".
 */
#ifndef MR_JOBS_REPORT_H
#define MR_JOBS_REPORT_H

#include <jansson.h>

#include "io/text.h"
#include "jobs/identity.h"
#include "jobs/profile.h"
#include "src/engine.h"

#define MR_HISTOGRAM_BINS 1280 /* 1 us to a day and more */
#define MR_TIMELINE_POINTS 600

typedef struct mr_histogram {
  uint64_t n, bin[MR_HISTOGRAM_BINS];
  double sum_s, max_s;
} mr_histogram;

void mr_histogram_add(mr_histogram *h, double seconds);
double mr_histogram_quantile(const mr_histogram *h, double q); /* seconds; 0 when empty; within 1 %
                                                                */

typedef struct mr_timeline_point {
  double seconds;       /* length */
  double tokens, batch; /* output tokens; sequences in flight times seconds */
} mr_timeline_point;

typedef struct mr_timeline {
  double step_s; /* length of a point; doubles when the points are used up */
  int n;
  mr_timeline_point point[MR_TIMELINE_POINTS];
} mr_timeline;

typedef struct mr_report {
  /* borrowed */
  const mr_job_identity *id;
  const char *model_path, *model_name, *output;
  const json_t *inputs; /* or NULL */
  /* counted by the caller */
  uint64_t rows, rows_ok, rows_failed, rows_this_run, prompt_tokens, output_tokens;
  uint64_t lost_rows, earlier_runs, results_bytes, input_bytes;
  double preflight_s, load_s, run_s, commit_s, assemble_s, total_s, earlier_s;
  uint64_t peak_memory_bytes;
  json_t *errors; /* object: kind → count; owned; or NULL */
  mr_engine_info info;
  mr_engine_stats stats;
  bool has_engine;             /* info and stats are set; false when no row had to be computed */
  double peak_ops, peak_bytes; /* of this machine, a second; 0: not known */
  char peak_basis[128];        /* how they are known */
  bool predicted;              /* the next ones are set */
  int predicted_runs;          /* earlier ones that the prediction has learnt from */
  double waited_share;         /* of the steps' time in which others had the processors */
  double predicted_share;      /* tokens computed over those that were said; rows may end early */
  double said_s[MR_PARTS], took_s[MR_PARTS];
  /* filled by the calls below */
  mr_histogram ttft, tpot;
  mr_timeline timeline;
} mr_report;

void mr_report_init(mr_report *r);
void mr_report_free(mr_report *r);
void mr_report_row(mr_report *r, const mr_result *res); /* its latencies */
/* A step of `seconds` that gave `tokens` with `batch` sequences in flight. */
void mr_report_sample(mr_report *r, double seconds, double tokens, int batch);

json_t *mr_report_to_json(const mr_report *r); /* owned by the caller; NULL: out of memory */
/* A page by itself, without scripts, from the object of mr_report_to_json. */
mr_code mr_report_html(const json_t *report, mr_text *out, mr_err *err);

#endif
