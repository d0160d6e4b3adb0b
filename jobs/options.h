/* options.h: what a job is told: one table of options behind the command line, JOB.json and the help page.
 *
 *     mr_job j;  mr_job_init(&j);
 *     mr_job_parse(&j, MR_CMD_RUN, argc, argv, &err);      command line over JOB.json over defaults
 *     mr_job_free(&j);
 *
 * Every option of `run` has the same name in a JOB.json: "max-tokens": 64 for --max-tokens 64, and nested objects
 * join with a dash: {"kv": {"memory": "2GiB"}} is --kv-memory 2GiB. An unknown name is refused with the nearest
 * known one (64 on the command line, 78 in a file).
 */
#ifndef MR_JOBS_OPTIONS_H
#define MR_JOBS_OPTIONS_H

#include <jansson.h>
#include <stdbool.h>

#include "src/engine.h"

typedef enum mr_output_format { MR_OUT_ZST, MR_OUT_GZ, MR_OUT_PLAIN, MR_OUT_STDOUT } mr_output_format;
typedef enum mr_long_prompt { MR_LONG_ERROR, MR_LONG_TRUNCATE_LEFT } mr_long_prompt;
typedef enum mr_duplicates { MR_DUP_ERROR_ROW, MR_DUP_REFUSE } mr_duplicates;
typedef enum mr_progress_kind { MR_PROGRESS_AUTO, MR_PROGRESS_NONE, MR_PROGRESS_LINE, MR_PROGRESS_BAR, MR_PROGRESS_JSON } mr_progress_kind;

typedef struct mr_job {
  char *job_file;           /* JOB.json, or NULL */
  char **inputs;            /* as given: files, globs, directories, "-" */
  int n_inputs;
  char *model, *output;
  mr_output_format format;
  char *base;               /* output without .jsonl[.zst|.gz]: OUT of the contract */
  mr_compute compute;
  char *device;
  int threads, max_batch, max_step_tokens, context;
  bool pin;
  uint64_t kv_memory, kv_disk, device_memory;
  char *kv_type, *kv_policy, *spill_dir;
  bool prefix_sharing;
  int shard, shards;        /* 1-based I of N; 0, 0: whole */
  int until_min;            /* minutes of the day; -1: none */
  double time_limit_s;      /* 0: none */
  uint64_t max_line;        /* bytes */
  double tolerate;          /* rows, or a share when tolerate_percent */
  bool tolerate_percent;
  mr_duplicates duplicates;
  mr_long_prompt long_prompt;
  bool expire, keep_prompt, completion_order;
  json_t *defaults;         /* body parameters of rows that are silent; owned; NULL: none */
  mr_progress_kind progress;
  char *metrics_file;
  int zstd_level;
  bool json;                /* plan, status: machine-readable */
  bool help;
} mr_job;

typedef enum mr_command { MR_CMD_RUN, MR_CMD_PLAN, MR_CMD_STATUS, MR_CMD_CHECK, MR_CMD_MERGE } mr_command;

void mr_job_init(mr_job *j);
void mr_job_free(mr_job *j);
mr_code mr_job_parse(mr_job *j, mr_command cmd, int argc, char **argv, mr_err *err);
void mr_job_help(mr_command cmd); /* to standard output */

/* The options that change results, as one JSON object with sorted keys: part of the state's identity. Owned by caller. */
json_t *mr_job_result_options(const mr_job *j);

#endif
