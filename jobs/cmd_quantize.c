/* cmd_quantize.c: `millrace quantize IN OUT --type T`. */
#include <getopt.h>
#include <stdio.h>

#include "io/sys.h"
#include "io/text.h"
#include "jobs/cmd.h"
#include "src/quantize.h"

static const char usage[] =
    "usage: millrace quantize IN OUT --type TYPE [OPTIONS]\n"
    "\n"
    "Writes the model IN (a GGUF file, the first part of a split one, or a Hugging Face directory) "
    "as the GGUF\n"
    "file OUT with matrices of TYPE. OUT appears when it is whole.\n"
    "\n"
    "  -t, --type TYPE   f32 f16 bf16 q8_0 q6_k q5_k q5_1 q5_0 q4_k q4_1 q4_0 iq4_nl iq4_xs mxfp4\n"
    "                    q3_k q2_k\n"
    "      --head-type T of the output head, and of the embedding where it is the head (default: "
    "q6_k where\n"
    "                    TYPE has fewer bits, else TYPE)\n"
    "      --no-vocab    leave the tokenizer of a directory out\n"
    "      --threads N   default: all that this process may use\n"
    "  -f, --force       replace OUT where it exists\n"
    "  -q, --quiet       print nothing\n"
    "  -h, --help        print this page\n"
    "\n"
    "Exit status: 0 done, 64 usage, 65 IN is no usable model, 66 no such input, 69 IN cannot be "
    "said in GGUF,\n"
    "73 OUT exists or cannot be created, 74 read or write failed.\n";

typedef struct args {
  mr_quantize_opts o;
  bool force, quiet, help;
  int threads;
} args;

static mr_code type_of(const char *option, const char *name, int *dtype, mr_err *err) {
  *dtype = mr_quantize_type(name);
  return *dtype >= 0 ? MR_OK
                     : mr_err_set(err, MR_E_USAGE,
                                  "quantize: %s %s is no type that can be written; there are %s",
                                  option, name, mr_quantize_types());
}

static mr_code one_option(args *a, int c, const char *word, mr_err *err) {
  int64_t n;
  switch (c) {
  case 't':
    return type_of("--type", optarg, &a->o.dtype, err);
  case 'H':
    return type_of("--head-type", optarg, &a->o.head_dtype, err);
  case 'V':
    a->o.no_vocab = true;
    return MR_OK;
  case 'T':
    if (!mr_parse_int(optarg, &n) || n < 1 || n > 1024)
      return mr_err_set(err, MR_E_USAGE, "quantize: --threads must be a number from 1 to 1024");
    a->threads = (int)n;
    return MR_OK;
  case 'f':
    a->force = true;
    return MR_OK;
  case 'q':
    a->quiet = true;
    return MR_OK;
  case 'h':
    a->help = true;
    return MR_OK;
  default:
    return mr_err_set(err, MR_E_USAGE, "quantize: %s %s (try --help)",
                      c == ':' ? "no value for" : "unknown option", word);
  }
}

static mr_code read_args(args *a, int argc, char **argv, mr_err *err) {
  static const struct option options[] = {
      {"type", required_argument, NULL, 't'}, {"head-type", required_argument, NULL, 'H'},
      {"no-vocab", no_argument, NULL, 'V'},   {"threads", required_argument, NULL, 'T'},
      {"force", no_argument, NULL, 'f'},      {"quiet", no_argument, NULL, 'q'},
      {"help", no_argument, NULL, 'h'},       {NULL, 0, NULL, 0}};
  *a = (args){.o = {.dtype = -1, .head_dtype = -1}};
  optind = 0;
  opterr = 0;
  for (int c; (c = getopt_long(argc, argv, ":t:fqh", options, NULL)) != -1;)
    if (one_option(a, c, argv[optind - 1], err))
      return err->code;
  if (a->help)
    return MR_OK;
  if (argc - optind != 2)
    return mr_err_set(err, MR_E_USAGE, "quantize: give a model and the file to write (try --help)");
  if (a->o.dtype < 0)
    return mr_err_set(err, MR_E_USAGE, "quantize: give --type: %s", mr_quantize_types());
  a->o.in = argv[optind];
  a->o.out = argv[optind + 1];
  return MR_OK;
}

/* OUT must not be there, or be replaced on purpose, and never be (a part of) IN. */
static mr_code check_out(const args *a, mr_err *err) {
  struct stat in, out;
  if (mr_sys_now->stat(a->o.out, &out))
    return MR_OK;
  if (mr_sys_now->stat(a->o.in, &in) == 0 && in.st_dev == out.st_dev && in.st_ino == out.st_ino)
    return mr_err_at(err, MR_E_CANTCREATE, a->o.out, 0, -1, "is the model that is read");
  if (!S_ISREG(out.st_mode))
    return mr_err_at(err, MR_E_CANTCREATE, a->o.out, 0, -1, "is there and is no file");
  return a->force ? MR_OK
                  : mr_err_at(err, MR_E_CANTCREATE, a->o.out, 0, -1, "exists; --force replaces it");
}

static void say(const args *a, const mr_quantize_report *r, double seconds) {
  printf("%s: %.1f MB of %.1f MB, %.2f bits a weight in matrices, %d tensors (%d %s), %.1f s\n",
         a->o.out, (double)r->bytes_out / 1e6, (double)r->bytes_in / 1e6, r->weighted_bits,
         r->n_tensors, r->n_typed, mr_dtype_get(a->o.dtype)->name, seconds);
  if (r->n_other)
    printf("%d matrices are of another type, since their rows are no whole blocks: the first is %s "
           "(%s)\n",
           r->n_other, r->first_other, mr_dtype_get(r->first_other_dtype)->name);
}

static mr_code run(args *a, mr_err *err) {
  mr_quantize_report r;
  mr_code rc = check_out(a, err);
  if (rc)
    return rc;
  a->o.pool = mr_pool_new(a->threads > 0 ? a->threads : mr_pool_cpus(), 0);
  if (!a->o.pool)
    return mr_err_set(err, MR_E_UNAVAILABLE, "the threads could not be had");
  double start = mr_sys_seconds();
  rc = mr_quantize(&a->o, &r, err);
  mr_pool_free(a->o.pool);
  if (!rc && !a->quiet)
    say(a, &r, mr_sys_seconds() - start);
  if (!rc && fflush(stdout) == EOF)
    rc = mr_err_errno(err, MR_E_IO, NULL, "cannot write to standard output");
  return rc;
}

int mr_cmd_quantize(int argc, char **argv) {
  mr_err err = MR_ERR_INIT;
  args a;
  mr_code rc = read_args(&a, argc, argv, &err);
  if (!rc && a.help)
    return fputs(usage, stdout) == EOF ? MR_E_IO : 0;
  if (!rc)
    rc = run(&a, &err);
  if (rc)
    mr_err_print(&err, stderr);
  return mr_err_exit(rc);
}
