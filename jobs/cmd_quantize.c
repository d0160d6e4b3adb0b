/* cmd_quantize.c: `millrace quantize IN OUT --type T`. */
#include <getopt.h>
#include <stdio.h>

#include <string.h>
#include <unistd.h>

#include "io/sys.h"
#include "io/text.h"
#include "jobs/accuracy.h"
#include "jobs/cmd.h"
#include "jobs/texts.h"
#include "kernels/encode.h"
#include "src/quantize.h"

#define TOKENS 16384      /* of a calibration */
#define HELD_TOKENS 16384 /* that are measured at most */

static const char usage[] =
    "usage: millrace quantize IN OUT --type TYPE [OPTIONS]\n"
    "\n"
    "Writes the model IN (a GGUF file, the first part of a split one, or a Hugging Face directory) "
    "as the GGUF\n"
    "file OUT with matrices of TYPE, or as a directory OUT of a calibrated checkpoint. OUT appears "
    "when it is\n"
    "whole.\n"
    "\n"
    "  -t, --type TYPE   f32 f16 bf16 q8_0 q6_k q5_k q5_1 q5_0 q4_k q4_1 q4_0 iq4_nl iq4_xs mxfp4\n"
    "                    q3_k q2_k; or, of a directory to a directory, with --calibrate:\n"
    "                    gptq           4-bit groups, GPTQ's packing\n"
    "                    awq            4-bit groups with zeros after AWQ's factors, AWQ's "
    "packing\n"
    "                    int8           after SmoothQuant's factors, compressed-tensors INT8\n"
    "                    int8-outliers  INT8 beside columns in F16 that meet large activations\n"
    "      --head-type T of the output head, and of the embedding where it is the head (default: "
    "q6_k where\n"
    "                    TYPE has fewer bits, else TYPE)\n"
    "      --no-vocab    leave the tokenizer of a directory out\n"
    "      --threads N   default: all that this process may use\n"
    "      --calibrate F the texts of rows F say what matters: JSONL of {\"text\"}, or of rows as "
    "run "
    "takes them;\n"
    "                    a quarter of them is held back, and how far OUT is from IN on it is "
    "printed\n"
    "      --method M    plain: q4_0, q4_1, q5_0, q5_1 are rounded as the format's own tools do, "
    "bit "
    "by bit,\n"
    "                    not with a search for the best scale; or what the texts are used for:\n"
    "                    importance   errors count by what meets a column (default)\n"
    "                    awq          columns that matter are made larger first (exact elsewhere)\n"
    "                    smoothquant  outliers of activations go into the weights (exact)\n"
    "                    gptq         later columns make up for errors of earlier ones "
    "(q4_0 .. q8_0)\n"
    "      --sparsify S  wanda or sparsegpt: two of each four columns become 0\n"
    "      --calibrate-tokens N   read at most so many (default: 16384)\n"
    "      --measure F   print how far OUT is from IN on the texts of F\n"
    "  -f, --force       replace OUT where it exists\n"
    "  -q, --quiet       print nothing\n"
    "  -h, --help        print this page\n"
    "\n"
    "Exit status: 0 done, 64 usage, 65 IN is no usable model, 66 no such input, 69 IN cannot be "
    "said in GGUF,\n"
    "73 OUT exists or cannot be created, 74 read or write failed.\n";

typedef struct args {
  mr_quantize_opts o;
  bool force, quiet, help, method;
  int threads;
  mr_quantize_method form_method;  /* of a directory's form */
  const char *calibrate, *measure; /* files of rows, or NULL */
  int64_t tokens;
  mr_texts texts;
} args;

/* Index of the word in a list that ends with NULL, or -1 with the error. */
static int choice(const char *option, const char *word, const char *const *names, mr_err *err) {
  mr_text all = {0};
  for (int i = 0; names[i]; i++) {
    if (!strcmp(names[i], word))
      return i;
    mr_text_addf(&all, "%s%s", i ? ", " : "", names[i]);
  }
  mr_err_set(err, MR_E_USAGE, "quantize: %s %s is none of %s", option, word,
             all.data ? all.data : "");
  mr_text_free(&all);
  return -1;
}

static mr_code method_of(args *a, mr_err *err) {
  static const char *const names[] = {"plain", "importance", "smoothquant", "awq", "gptq", NULL};
  int i = choice("--method", optarg, names, err);
  a->o.method = i < 0 ? MR_METHOD_NONE : (mr_quantize_method)i;
  a->o.plain = i == 0;
  a->method = i > 0;
  return i < 0 ? err->code : MR_OK;
}

static mr_code sparsify_of(args *a, mr_err *err) {
  static const char *const names[] = {"no", "wanda", "sparsegpt", NULL};
  int i = choice("--sparsify", optarg, names, err);
  a->o.sparsify = i < 0 ? MR_SPARSE_NO : (mr_sparsify)i;
  return i < 0 ? err->code : MR_OK;
}

static mr_code type_of(const char *option, const char *name, int *dtype, mr_err *err) {
  *dtype = mr_quantize_type(name);
  return *dtype >= 0 ? MR_OK
                     : mr_err_set(err, MR_E_USAGE,
                                  "quantize: %s %s is no type that can be written; there are %s",
                                  option, name, mr_quantize_types());
}

/* A type of a GGUF file, or one of the forms of directories with the method that is its own. */
static mr_code type_or_form(args *a, mr_err *err) {
  static const struct {
    const char *name;
    mr_quantize_form form;
    mr_quantize_method method;
  } forms[] = {{"gptq", MR_FORM_GPTQ, MR_METHOD_GPTQ},
               {"awq", MR_FORM_AWQ, MR_METHOD_AWQ},
               {"int8", MR_FORM_INT8, MR_METHOD_SMOOTH},
               {"int8-outliers", MR_FORM_INT8_OUTLIERS, MR_METHOD_IMPORTANCE}};
  for (size_t i = 0; i < sizeof forms / sizeof *forms; i++)
    if (!strcmp(forms[i].name, optarg)) {
      a->o.form = forms[i].form;
      a->form_method = forms[i].method;
      a->o.dtype = MR_F32;
      return MR_OK;
    }
  a->o.form = MR_FORM_GGUF;
  return type_of("--type", optarg, &a->o.dtype, err);
}

static mr_code one_option(args *a, int c, const char *word, mr_err *err) {
  int64_t n;
  switch (c) {
  case 't':
    return type_or_form(a, err);
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
  case 'C':
    a->calibrate = optarg;
    return MR_OK;
  case 'M':
    return method_of(a, err);
  case 'S':
    return sparsify_of(a, err);
  case 'E':
    a->measure = optarg;
    return MR_OK;
  case 'N':
    if (!mr_parse_int(optarg, &a->tokens) || a->tokens < 2 || a->tokens > 1 << 28)
      return mr_err_set(err, MR_E_USAGE, "quantize: --calibrate-tokens must be a number from 2");
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

/* Options that need each other. */
static mr_code check_together(args *a, mr_err *err) {
  static const int exact_zero[] = {MR_F32,  MR_F16,  MR_BF16, MR_Q8_0, MR_Q6_K,
                                   MR_Q5_0, MR_Q4_0, MR_Q3_K, MR_MXFP4};
  bool zero = false, sparse = a->o.sparsify != MR_SPARSE_NO;
  int ranged;
  if (a->o.form != MR_FORM_GGUF) {
    if (!a->calibrate || a->method || sparse)
      return mr_err_set(err, MR_E_USAGE,
                        "quantize: a directory of this type needs --calibrate ROWS.jsonl and takes "
                        "neither --method nor --sparsify");
    a->o.method = a->form_method;
    return MR_OK;
  }
  for (size_t i = 0; i < sizeof exact_zero / sizeof *exact_zero; i++)
    zero |= exact_zero[i] == a->o.dtype;
  if (!a->calibrate && (a->o.method != MR_METHOD_NONE || sparse))
    return mr_err_set(err, MR_E_USAGE, "quantize: %s needs texts: give --calibrate ROWS.jsonl",
                      sparse ? "--sparsify" : "--method");
  if (a->calibrate && !a->method)
    a->o.method = MR_METHOD_IMPORTANCE;
  if (sparse && !zero)
    return mr_err_set(err, MR_E_USAGE,
                      "quantize: --sparsify needs a type that holds 0 exactly (f32 f16 bf16 q8_0 "
                      "q6_k q5_0 q4_0 q3_k mxfp4)");
  if (a->o.method == MR_METHOD_GPTQ && !mr_encode_levels(a->o.dtype, &ranged))
    return mr_err_set(err, MR_E_USAGE,
                      "quantize: --method gptq is for q4_0, q4_1, q5_0, q5_1 and q8_0");
  return MR_OK;
}

static mr_code read_args(args *a, int argc, char **argv, mr_err *err) {
  static const struct option options[] = {{"type", required_argument, NULL, 't'},
                                          {"head-type", required_argument, NULL, 'H'},
                                          {"no-vocab", no_argument, NULL, 'V'},
                                          {"threads", required_argument, NULL, 'T'},
                                          {"force", no_argument, NULL, 'f'},
                                          {"quiet", no_argument, NULL, 'q'},
                                          {"help", no_argument, NULL, 'h'},
                                          {"calibrate", required_argument, NULL, 'C'},
                                          {"method", required_argument, NULL, 'M'},
                                          {"sparsify", required_argument, NULL, 'S'},
                                          {"measure", required_argument, NULL, 'E'},
                                          {"calibrate-tokens", required_argument, NULL, 'N'},
                                          {NULL, 0, NULL, 0}};
  *a = (args){.o = {.dtype = -1, .head_dtype = -1}, .tokens = TOKENS};
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
  return check_together(a, err);
}

/* OUT must not be there, or be replaced on purpose, and never be (a part of) IN. */
static mr_code check_out(const args *a, mr_err *err) {
  struct stat in, out;
  if (mr_sys_now->stat(a->o.out, &out))
    return MR_OK;
  if (mr_sys_now->stat(a->o.in, &in) == 0 && in.st_dev == out.st_dev && in.st_ino == out.st_ino)
    return mr_err_at(err, MR_E_CANTCREATE, a->o.out, 0, -1, "is the model that is read");
  if (a->o.form != MR_FORM_GGUF)
    return mr_err_at(err, MR_E_CANTCREATE, a->o.out, 0, -1, "exists");
  if (!S_ISREG(out.st_mode))
    return mr_err_at(err, MR_E_CANTCREATE, a->o.out, 0, -1, "is there and is no file");
  return a->force ? MR_OK
                  : mr_err_at(err, MR_E_CANTCREATE, a->o.out, 0, -1, "exists; --force replaces it");
}

static void say(const args *a, const mr_quantize_report *r, double seconds) {
  if (a->o.form != MR_FORM_GGUF) {
    printf("%s: %.1f MB of %.1f MB, %d tensors (%d matrices rounded), %.1f s\n", a->o.out,
           (double)r->bytes_out / 1e6, (double)r->bytes_in / 1e6, r->n_tensors, r->n_typed,
           seconds);
    return;
  }
  printf("%s: %.1f MB of %.1f MB, %.2f bits a weight in matrices, %d tensors (%d %s), %.1f s\n",
         a->o.out, (double)r->bytes_out / 1e6, (double)r->bytes_in / 1e6, r->weighted_bits,
         r->n_tensors, r->n_typed, mr_dtype_get(a->o.dtype)->name, seconds);
  if (r->n_other)
    printf("%d matrices are of another type, since their rows are no whole blocks: the first is %s "
           "(%s)\n",
           r->n_other, r->first_other, mr_dtype_get(r->first_other_dtype)->name);
}

/* Texts of a file of rows, with the model's own tokenizer and template. */
static mr_code read_texts(args *a, const char *path, int64_t tokens, mr_texts *t, mr_err *err) {
  mr_prompter *p = NULL;
  mr_code rc = mr_prompter_open(&p, a->o.in, err);
  if (rc)
    return rc;
  int window = mr_prompter_context(p);
  window = window < MR_CALIBRATE_WINDOW ? window : MR_CALIBRATE_WINDOW;
  rc = mr_texts_read(t, p, path, window, tokens, err);
  mr_prompter_close(p);
  return rc;
}

/* OUT against IN, both in float32, on the windows from `first` on. */
static mr_code measure(const args *a, const mr_texts *t, size_t first, mr_err *err) {
  mr_accuracy_way in = {a->o.in, true, -1}, out = {a->o.out, true, -1};
  mr_accuracy *x = NULL;
  mr_tally tally = {0};
  mr_code rc = mr_accuracy_open(&x, &in, &out, a->o.pool, err);
  for (size_t i = first; i < t->n && !rc && tally.n < HELD_TOKENS; i++)
    rc = mr_accuracy_add(x, &tally, t->rows[i].ids, t->rows[i].n, err);
  mr_accuracy_sum s = mr_tally_sum(&tally);
  if (!rc)
    printf("on %lld tokens: KL %.5f (p99 %.4f), same first choice %.1f %%, perplexity %.3f for "
           "%.3f (%+.2f %%)\n",
           (long long)s.tokens, s.kl, s.kl_p99, s.same_percent, s.perplexity[1], s.perplexity[0],
           s.perplexity_percent);
  mr_tally_free(&tally);
  mr_accuracy_close(x);
  return rc;
}

/* On a terminal: how much is written, each percent. */
static void show_progress(void *ctx, uint64_t done, uint64_t all) {
  int *shown = ctx, percent = all ? (int)(100 * (double)done / (double)all) : 100;
  if (percent == *shown)
    return;
  *shown = percent;
  fprintf(stderr, "\rquantize: %d %%%s", percent, percent < 100 ? "" : "\r\033[K");
}

static mr_code write_file(args *a, mr_err *err) {
  mr_quantize_report r;
  int shown = -1;
  mr_code rc = MR_OK;
  if (a->calibrate)
    rc = read_texts(a, a->calibrate, a->tokens, &a->texts, err);
  a->o.texts = a->texts.rows;
  a->o.n_texts = a->texts.n_used;
  if (!a->quiet && isatty(STDERR_FILENO))
    a->o.progress = show_progress;
  a->o.ctx = &shown;
  double start = mr_sys_seconds();
  if (!rc)
    rc = a->o.form == MR_FORM_GGUF ? mr_quantize(&a->o, &r, err) : mr_quantize_dir(&a->o, &r, err);
  if (!rc && !a->quiet)
    say(a, &r, mr_sys_seconds() - start);
  return rc;
}

static mr_code run(args *a, mr_err *err) {
  mr_texts other = {0};
  mr_code rc = check_out(a, err);
  if (rc)
    return rc;
  a->o.pool = mr_pool_new(a->threads > 0 ? a->threads : mr_pool_cpus(), 0);
  if (!a->o.pool)
    return mr_err_set(err, MR_E_UNAVAILABLE, "the threads could not be had");
  if (a->measure)
    rc = read_texts(a, a->measure, HELD_TOKENS, &other, err);
  if (!rc)
    rc = write_file(a, err);
  if (!rc && a->measure)
    rc = measure(a, &other, 0, err);
  else if (!rc && a->calibrate && !a->quiet)
    rc = measure(a, &a->texts, (size_t)a->texts.n_used < a->texts.n ? (size_t)a->texts.n_used : 0,
                 err);
  mr_texts_free(&other);
  mr_texts_free(&a->texts);
  mr_pool_free(a->o.pool);
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
