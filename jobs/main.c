/* millrace: the command line. Finds the command and hands it its arguments. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "io/err.h"
#include "io/sys.h"
#include "io/text.h"
#include "jobs/cmd.h"

typedef struct command {
  const char *name, *sub; /* sub: second word, or NULL */
  int (*run)(int argc, char **argv);
  const char *help;
} command;

static const command commands[] = {
    {"run", NULL, mr_cmd_run, "run a job; the same command again resumes it"},
    {"plan", NULL, mr_cmd_plan, "check every row and estimate the run, without running it"},
    {"status", NULL, mr_cmd_status, "progress of a running, stopped or finished job"},
    {"check", NULL, mr_cmd_check, "whether an output is whole"},
    {"merge", NULL, mr_cmd_merge, "join the outputs of --shard runs"},
    {"score", NULL, mr_cmd_score, "metrics over results"},
    {"model", "info", mr_cmd_model_info, "what a model file is"},
    {"model", "tokenize", mr_cmd_model_tokenize, "token ids of a text"},
    {"model", "detokenize", mr_cmd_model_detokenize, "text of token ids"},
    {"model", "template", mr_cmd_model_template, "a rendered conversation"},
    {"quantize", NULL, mr_cmd_quantize, "write a model in another type"},
    {"bench", NULL, mr_cmd_bench, "kernels, machine, a GPU, throughput or accuracy"},
    {"devices", NULL, mr_cmd_devices, "devices, and why one is not usable"},
};
#define N_COMMANDS (sizeof commands / sizeof *commands)

static void print_help(void) {
  puts("usage: millrace COMMAND [ARGUMENTS]\n\n"
       "An offline batch runner for language models: JSONL rows in, JSONL results out, resumable "
       "at any moment.\n\n"
       "commands:");
  for (size_t i = 0; i < N_COMMANDS; i++) {
    char name[64];
    snprintf(name, sizeof name, "%s%s%s", commands[i].name, commands[i].sub ? " " : "",
             commands[i].sub ? commands[i].sub : "");
    printf("  %-18s %s\n", name, commands[i].help);
  }
  puts("\nmillrace COMMAND --help prints the page of a command; millrace --version the version.\n"
       "example: millrace run rows.jsonl -m model.gguf -o results.jsonl.zst");
}

/* The second words of `model`, or the first words of all commands. */
static int unknown(const char *word, const char *of) {
  const char *names[N_COMMANDS];
  size_t n = 0;
  for (size_t i = 0; i < N_COMMANDS; i++) {
    const char *name = of ? commands[i].sub : commands[i].name;
    if (name && (!of || !strcmp(commands[i].name, of)))
      names[n++] = name;
  }
  const char *near = mr_nearest(word, names, n);
  fprintf(stderr, "millrace: unknown command %s%s%s%s%s%s; see millrace --help\n", of ? of : "",
          of ? " " : "", word, near ? " (did you mean " : "", near ? near : "", near ? "?)" : "");
  return MR_E_USAGE;
}

static int dispatch(int argc, char **argv) {
  bool has_sub = false;
  for (size_t i = 0; i < N_COMMANDS; i++) {
    const command *c = &commands[i];
    if (strcmp(argv[1], c->name) != 0)
      continue;
    if (!c->sub)
      return c->run(argc - 1, argv + 1);
    has_sub = true;
    if (argc > 2 && !strcmp(argv[2], c->sub))
      return c->run(argc - 2, argv + 2);
  }
  if (!has_sub)
    return unknown(argv[1], NULL);
  if (argc > 2 && strcmp(argv[2], "-h") != 0 && strcmp(argv[2], "--help") != 0)
    return unknown(argv[2], argv[1]);
  print_help();
  return argc > 2 ? 0 : MR_E_USAGE;
}

static int run(int argc, char **argv) {
  if (argc < 2) {
    print_help();
    return MR_E_USAGE;
  }
  if (!strcmp(argv[1], "--version") || !strcmp(argv[1], "-V")) {
    puts("millrace " MR_VERSION);
    return 0;
  }
  if (!strcmp(argv[1], "-h") || !strcmp(argv[1], "--help") || !strcmp(argv[1], "help")) {
    print_help();
    return 0;
  }
  return dispatch(argc, argv);
}

/* What was printed may still lie in the stream's buffer: a full disk shows only now. */
static int end(int status) {
  mr_err err = MR_ERR_INIT;
  errno = 0;
  if ((!fflush(stdout) && !ferror(stdout)) || status > 1)
    return status;
  errno = errno ? errno : EIO;
  mr_code rc = mr_err_errno(&err, MR_E_IO, NULL, "cannot write to standard output");
  mr_err_print(&err, stderr);
  return mr_err_exit(rc);
}

int main(int argc, char **argv) {
  mr_sys_hold_standard_files();
  return end(run(argc, argv));
}
