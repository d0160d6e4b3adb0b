/* The help page of a command, from the table of options. */
#include <stdio.h>
#include <string.h>

#include "jobs/options_int.h"

static const char *usage_of(mr_command cmd) {
  switch (cmd) {
  case MR_CMD_RUN:
    return "usage: millrace run [JOB.json] [INPUT...] -m MODEL -o OUT [options]\n\n"
           "Runs a job. The same command again resumes it, or says that nothing is left to do.\n";
  case MR_CMD_PLAN:
    return "usage: millrace plan [JOB.json] [INPUT...] -m MODEL [options]\n\n"
           "Checks every row and estimates the run, without running it.\n";
  case MR_CMD_STATUS:
    return "usage: millrace status OUT [--json]\n\n"
           "Prints the progress of a running, stopped or finished job.\n";
  case MR_CMD_MERGE:
    return "usage: millrace merge -o OUT SHARD... [options]\n\n"
           "Joins the finished outputs of all shards of a job (run --shard I/N) in input order.\n";
  case MR_CMD_SCORE:
    return "usage: millrace score RESULTS... [--ref FILE] [options]\n\n"
           "Computes metrics over results: the output of a job, or lines of the OpenAI batch "
           "output.\nWithout --ref the answers are fields of the results themselves "
           "(docs/score.md).\n";
  default:
    return "usage: millrace check OUT [--json]\n\n"
           "Checks a finished output: frames, digests, one line for each input row.\n";
  }
}

static void help_line(const option *o, mr_command cmd) {
  char left[80];
  const char *name = mr_option_name(o, cmd), *arg = o->kind == K_NAMES ? "NAME,..." : o->arg;
  int n = o->letter ? snprintf(left, sizeof left, "-%c, --%s", o->letter, name)
                    : snprintf(left, sizeof left, "    --%s", name);
  if (arg && n > 0 && n < (int)sizeof left)
    snprintf(left + n, sizeof left - (size_t)n, " %s", arg);
  if (strlen(left) > 28)
    printf("  %s\n  %-28s %s\n", left, "", o->help);
  else
    printf("  %-28s %s\n", left, o->help);
  if (o->kind == K_NAMES)
    printf("  %-28s %s\n", "", o->arg);
}

void mr_job_help(mr_command cmd) {
  printf("%s\n", usage_of(cmd));
  if (cmd == MR_CMD_RUN || cmd == MR_CMD_PLAN)
    printf("INPUT is a JSONL file (plain, zstd, gzip, xz, bzip2), a tar or zip of them, a glob, a "
           "directory,\n"
           "or - for standard input. A first argument that ends in .json is a job file: an object "
           "with the\n"
           "options below by the same names, and \"inputs\".\n\n");
  printf("options:\n");
  for (size_t i = 0; i < mr_n_options; i++)
    if (mr_options[i].commands & 1u << cmd)
      help_line(&mr_options[i], cmd);
  if (cmd == MR_CMD_RUN)
    printf("\nexit status: 0 every row done; 1 some rows failed; 64 usage; 65 input unusable; 66 "
           "no such input;\n"
           "69 device or model unusable; 73 cannot create output; 74 I/O error; 75 stopped, "
           "resumable;\n"
           "78 bad job file.\n");
}
