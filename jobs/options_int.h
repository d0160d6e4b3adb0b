/* options_int.h: the table of options, shared by options.c (sets them) and options_help.c. */
#ifndef MR_JOBS_OPTIONS_INT_H
#define MR_JOBS_OPTIONS_INT_H

#include "jobs/options.h"

typedef enum kind {
  K_TEXT,     /* char *, owned */
  K_INT,      /* int, from min to INT_MAX */
  K_LEVEL,    /* int, from min to zstd's 19 */
  K_SIZE,     /* uint64_t bytes */
  K_SIZE0,    /* 0 too */
  K_DURATION, /* double seconds */
  K_CLOCK,    /* int minutes of the day */
  K_SECONDS,  /* int64_t since 1970 */
  K_SHARD,    /* mr_shard_part */
  K_FLAG,     /* bool */
  K_CHOICE,   /* an int-sized enum: index into choices */
  K_CHOICE01, /* bool: the second of two choices */
  K_TOLERATE,
  K_DEFAULTS, /* a JSON object, in place or in a file */
  K_ADAPTER,  /* NAME=DIR, any number of them */
  K_PARAM,    /* a body parameter for rows that are silent */
  K_LIST,     /* mr_list; each use adds one */
  K_NAMES     /* unsigned: a set of the choices, 1 << index; each use adds some */
} kind;

typedef struct option {
  const char *name; /* long, and in JOB.json */
  char letter;      /* or 0 */
  kind kind;
  size_t at; /* in mr_job */
  int min;
  const char *arg; /* for the help page; choices and names as "a|b" */
  unsigned commands;
  const char *help;
} option;

extern const option mr_options[];
extern const size_t mr_n_options;

/* What an option is called: `score` drops the beginning that its options have under `run`. */
const char *mr_option_name(const option *o, mr_command cmd);

#endif
