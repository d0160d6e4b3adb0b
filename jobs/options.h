/* options.h: what a job is told: one table of options behind the command line, JOB.json and the
 * help page.
 *
 *     mr_job j;  mr_job_init(&j);
 *     mr_job_parse(&j, MR_CMD_RUN, argc, argv, &err);      command line over JOB.json over defaults
 *     mr_job_free(&j);
 *
 * Every option of `run` has the same name in a JOB.json: "max-tokens": 64 for --max-tokens 64, and
 * nested objects join with a dash: {"kv": {"memory": "2GiB"}} is --kv-memory 2GiB. An unknown name
 * is refused with the nearest known one (64 on the command line, 78 in a file).
 *
 * RUN and PLAN take JOB.json (a first argument that ends in .json) and inputs; RUN needs a model,
 * an output and an input, PLAN a model and an input. STATUS and CHECK take one argument: the output
 * (or its OUT), kept in j->output. MERGE needs an output; its inputs are outputs of shards. SCORE
 * needs inputs, which are results; the options score-NAME of RUN are its --NAME. With -h only
 * `help` is set and nothing else is checked.
 */
#ifndef MR_JOBS_OPTIONS_H
#define MR_JOBS_OPTIONS_H

#include <jansson.h>
#include <stdbool.h>

#include "jobs/score_opts.h"
#include "jobs/shard.h"
#include "src/engine.h"

typedef enum mr_output_format {
  MR_OUT_ZST,
  MR_OUT_GZ,
  MR_OUT_PLAIN,
  MR_OUT_STDOUT
} mr_output_format;
typedef enum mr_long_prompt { MR_LONG_ERROR, MR_LONG_TRUNCATE_LEFT } mr_long_prompt;
typedef enum mr_duplicates { MR_DUP_ERROR_ROW, MR_DUP_REFUSE } mr_duplicates;
typedef enum mr_progress_kind {
  MR_PROGRESS_AUTO,
  MR_PROGRESS_NONE,
  MR_PROGRESS_LINE,
  MR_PROGRESS_BAR,
  MR_PROGRESS_JSON
} mr_progress_kind;

typedef struct mr_job {
  char *job_file; /* JOB.json, or NULL */
  char **inputs;  /* as given: files, globs, directories, "-" */
  int n_inputs;
  char *model, *output;
  mr_adapter *adapters; /* n_adapters, in the order of their names; owned, with the strings */
  int n_adapters;
  mr_output_format format;
  char *base; /* output without .jsonl[.zst|.gz]: OUT of the contract; NULL for standard output */
  mr_compute compute;
  char *device;
  uint64_t device_memory; /* bytes; 0: chosen */
  int device_weights;     /* of mr_engine_opts */
  int device_gemm;        /* 1: the library's */
  bool other_numerics;    /* a job may go on where its last bits would be others */
  int threads, max_batch, max_step_tokens, context;
  bool pin;
  uint64_t kv_memory; /* bytes; 0: chosen */
  uint64_t kv_disk;   /* bytes; 0: none */
  char *spill_dir;    /* or NULL */
  mr_kv_policy kv_policy;
  char *prefix_cache;          /* or NULL */
  uint64_t prefix_cache_bytes; /* kept there */
  int kv_type;                 /* mr_kv_type; -1: by the compute mode */
  bool no_prefix_sharing;
  int until_min;       /* minutes of the day; -1: none */
  double time_limit_s; /* 0: none */
  mr_shard_part shard; /* of 0: the whole job */
  int64_t created;     /* the job's time, seconds since 1970; -1: now */
  uint64_t max_line;   /* bytes */
  double tolerate;     /* rows, or a share when tolerate_percent */
  bool tolerate_percent;
  mr_duplicates duplicates;
  mr_long_prompt long_prompt;
  bool expire, keep_prompt, completion_order;
  json_t *defaults; /* body parameters of rows that are silent; owned; NULL: none */
  mr_progress_kind progress;
  char *metrics_file; /* or NULL */
  int zstd_level;
  bool json; /* plan, status, check, score: machine-readable */
  mr_score_opts score;
  bool help;
} mr_job;

typedef enum mr_command {
  MR_CMD_RUN,
  MR_CMD_PLAN,
  MR_CMD_STATUS,
  MR_CMD_CHECK,
  MR_CMD_MERGE,
  MR_CMD_SCORE
} mr_command;

/* Where a value came from: the code of its errors, and how its option is written. */
typedef struct mr_option_origin {
  mr_code code;
  const char *prefix; /* "--" or "" */
  const char *file;   /* JOB.json, or NULL */
  mr_command cmd;
} mr_option_origin;

void mr_job_init(mr_job *j);
void mr_job_free(mr_job *j);
/* argv[0] is the command's name and is skipped. MR_E_USAGE, MR_E_CONFIG (JOB.json), MR_E_NOINPUT
 * (no JOB.json). */
mr_code mr_job_parse(mr_job *j, mr_command cmd, int argc, char **argv, mr_err *err);
void mr_job_help(mr_command cmd);       /* to standard output */
bool mr_job_has_score(const mr_job *j); /* RUN is to score its results */

/* The exit status of a job that is done: 0, or 1 when more rows failed than --tolerate allows. */
int mr_job_status(const mr_job *j, uint64_t rows, uint64_t failed);

/* adapters.c: the adapter that rows of this model name use: 1 ..., or 0: none. */
int mr_job_adapter(const mr_job *j, const char *name);

/* The engine's share of the options; strings are borrowed from j. */
void mr_job_engine_opts(const mr_job *j, mr_engine_opts *opts);

/* Refuses (MR_E_USAGE) an output that is one of the inputs, or that lies in a directory given as
 * input. */
mr_code mr_job_check_output(const mr_job *j, mr_err *err);

/* The options that change results, as one JSON object with sorted keys: part of the state's
 * identity. Owned by caller. */
json_t *mr_job_result_options(const mr_job *j);

#endif
