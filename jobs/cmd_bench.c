/* cmd_bench.c: `millrace bench kernels|machine|device|throughput|accuracy`. */
#include <getopt.h>
#include <jansson.h>
#include <string.h>
#include <time.h>

#include "io/mem.h"
#include "io/sys.h"
#include "io/text.h"
#include "jobs/bench.h"
#include "jobs/cmd.h"
#include "jobs/roofline.h"
#include "jobs/tuned.h"
#include "kernels/pool.h"
#include "src/engine.h"

#define MEASURE_S 0.2
#define MAX_TOKENS (1 << 24) /* of one bench: far above use, far below overflow */

static const char usage[] =
    "usage: millrace bench kernels [--json]\n"
    "       millrace bench machine [--threads N] [--json]\n"
    "       millrace bench device NAME [--json]\n"
    "       millrace bench throughput -m MODEL [--prompt N] [--gen N] [--batch N] [--threads N]\n"
    "                                 [--compute fast|exact] [--kv-type TYPE] [--json]\n"
    "       millrace bench accuracy -m MODEL [--threads N] [--compute fast|exact]\n"
    "                                 [--kv-type TYPE] [--json] FILE...\n"
    "\n"
    "kernels     each kernel against its limit\n"
    "machine     the limits of this machine: memory bandwidth, int8 peak, GEMM rates in the cache\n"
    "device      a GPU's copies and matrix instructions, and its kernels beside them\n"
    "throughput  tokens per second of the engine: separate random prompts, greedy, no end\n"
    "accuracy    fast mode against exact on the text of files: divergence, first choices, "
    "perplexity\n"
    "\n"
    "  -m, --model FILE      model file\n"
    "      --prompt N        tokens of each prompt (128)\n"
    "      --gen N           tokens to generate for each; 0: prefill only (32)\n"
    "      --batch N         sequences at once (64)\n"
    "      --threads N       threads (all)\n"
    "      --compute MODE    fast (default) or exact\n"
    "      --kv-type TYPE    of keys and values: f32, f16, bf16, int8, q4, fp8 (as `run` chooses)\n"
    "      --json            print one JSON object\n"
    "  -h, --help            print this page\n"
    "\n"
    "Decoding is timed with the whole batch in flight. Before the clock starts memory is touched\n"
    "and the prompts run once, so that caches and clock rates are those of a long job.\n"
    "mfu and mbu are shares of what this machine does at best: of the GEMM rate in the cache, and\n"
    "of the memory bandwidth.\n";

typedef struct bench_opts {
  const char *model;
  int prompt, gen, batch, threads;
  mr_compute compute;
  int kv_type; /* -1: by the compute mode */
  bool json;
} bench_opts;

typedef struct phase { /* a measured part */
  double seconds, tokens, flops, bytes;
  double cpu_s; /* of all threads: what other programs on the machine take does not count */
  double gemm_s, attn_s, sample_s;
} phase;

/* ---------------------------------------------------------------- throughput */

/* Ids that repeat for nobody: (salt, i) through the counter-based generator. */
static void random_prompts(int32_t *ids, int64_t n, int n_vocab, uint32_t salt) {
  for (int64_t i = 0; i < n; i++) {
    uint32_t w[4], counter[4] = {(uint32_t)i, (uint32_t)(i >> 32), salt, 0}, key[2] = {1, 2};
    mr_philox(w, counter, key);
    ids[i] = (int32_t)(w[0] % (uint32_t)n_vocab);
  }
}

static mr_code admit_all(mr_engine *e, const bench_opts *o, int n, int max_tokens, int32_t *ids,
                         uint32_t salt, mr_err *err) {
  mr_code rc = MR_OK;
  random_prompts(ids, (int64_t)n * o->prompt, mr_engine_describe(e)->n_vocab, salt);
  for (int i = 0; i < n && !rc; i++) {
    mr_request r = {.tag = (uint64_t)i,
                    .task = MR_TASK_GENERATE,
                    .prompt = ids + (int64_t)i * o->prompt,
                    .n_prompt = o->prompt,
                    .sampling = mr_sampling_default};
    r.sampling.temperature = 0;
    r.sampling.ignore_eos = true;
    r.sampling.max_tokens = max_tokens;
    rc = mr_engine_admit(e, &r, err);
  }
  return rc == MR_E_AGAIN ? mr_err_set(err, MR_E_INTERNAL, "bench: the batch has no room") : rc;
}

static double cpu_seconds(void) {
  return (double)clock() / CLOCKS_PER_SEC;
}

static mr_code step(mr_engine *e, phase *p, mr_err *err) {
  mr_engine_stats a, b;
  mr_engine_stats_get(e, &a);
  double start = mr_sys_seconds(), cpu = cpu_seconds();
  mr_code rc = mr_engine_step(e, err);
  p->seconds += mr_sys_seconds() - start;
  p->cpu_s += cpu_seconds() - cpu;
  mr_engine_stats_get(e, &b);
  p->flops += b.flops - a.flops;
  p->bytes += b.bytes - a.bytes;
  p->gemm_s += b.gemm_s - a.gemm_s;
  p->attn_s += b.attn_s - a.attn_s;
  p->sample_s += b.sample_s - a.sample_s;
  for (mr_result *r; (r = mr_engine_collect(e));)
    mr_result_free(r);
  return rc;
}

/* All prompts to their first token. */
static mr_code run_prefill(mr_engine *e, const bench_opts *o, int n, int32_t *ids, uint32_t salt,
                           phase *p, mr_err *err) {
  mr_code rc = admit_all(e, o, n, 1, ids, salt, err);
  while (!rc && mr_engine_active(e))
    rc = step(e, p, err);
  p->tokens = (double)n * o->prompt;
  return rc;
}

/* Steps that the prompts of a batch may take while those in front decode already. */
static int prefill_steps(const bench_opts *o, int step_tokens) {
  int64_t room = step_tokens > o->batch ? step_tokens - o->batch : 1;
  return (int)(((int64_t)o->batch * o->prompt + room - 1) / room) + 1;
}

static int decode_tokens(const bench_opts *o, int step_tokens) {
  return o->gen > 0 ? prefill_steps(o, step_tokens) + o->gen + 1 : 1;
}

static mr_code run_decode(mr_engine *e, const bench_opts *o, int32_t *ids, phase *p, mr_err *err) {
  mr_engine_stats before, now;
  phase prompts = {0};
  uint64_t all = (uint64_t)o->batch * (uint64_t)o->prompt;
  mr_engine_stats_get(e, &before);
  mr_code rc = admit_all(e, o, o->batch, decode_tokens(o, mr_engine_describe(e)->max_step_tokens),
                         ids, 3, err);
  do {
    if (!rc)
      rc = step(e, &prompts, err);
    mr_engine_stats_get(e, &now);
  } while (!rc && now.prompt_tokens_computed - before.prompt_tokens_computed < all);
  for (int i = 0; i < o->gen && !rc; i++)
    rc = step(e, p, err);
  p->tokens = (double)o->batch * o->gen;
  return rc;
}

static mr_code open_engine(const bench_opts *o, const mr_prompter *p, mr_tuning *tuning,
                           mr_engine **e, mr_err *err) {
  mr_engine_info info;
  mr_engine_opts eo = {.model_path = o->model,
                       .compute = o->compute,
                       .threads = o->threads,
                       .max_batch = o->batch,
                       .no_prefix_sharing = true,
                       .kv_type = o->kv_type};
  mr_code rc = mr_engine_estimate(&eo, &info, err);
  if (rc)
    return rc;
  mr_tuned_load(tuning, &eo, &info);
  int64_t each = (int64_t)o->prompt + decode_tokens(o, info.max_step_tokens);
  eo.max_step_tokens = info.max_step_tokens; /* memory is for it */
  if (each > info.context)
    return mr_err_set(err, MR_E_USAGE, "bench: %lld tokens a sequence pass the context of %d",
                      (long long)each, info.context);
  int64_t blocks = (each + MR_KV_BLOCK - 1) / MR_KV_BLOCK;
  int64_t pages = (blocks * info.kv_groups + info.kv_own_pages) * o->batch;
  eo.kv_memory = (uint64_t)pages * info.kv_page_bytes;
  rc = mr_engine_open(e, &eo, p, err);
  if (!rc)
    mr_tuned_save(tuning, &info);
  return rc;
}

static mr_code measure(const bench_opts *o, phase *prefill, phase *decode, mr_engine_info *info,
                       mr_err *err) {
  mr_prompter *p = NULL;
  mr_engine *e = NULL;
  mr_tuning tuning;
  phase warm = {0};
  int32_t *ids = mr_mem_alloc((size_t)o->batch * (size_t)o->prompt, sizeof *ids);
  mr_code rc = ids ? MR_OK : mr_err_set(err, MR_E_NOMEM, "out of memory for the prompts");
  if (!rc)
    rc = mr_prompter_open(&p, o->model, err);
  if (!rc)
    rc = open_engine(o, p, &tuning, &e, err);
  if (!rc)
    *info = *mr_engine_describe(e);
  if (!rc) {
    mr_engine_touch(e);
    rc = run_prefill(e, o, o->batch, ids, 1, &warm, err);
  }
  if (!rc)
    rc = run_prefill(e, o, o->batch, ids, 2, prefill, err);
  if (!rc && o->gen > 0)
    rc = run_decode(e, o, ids, decode, err);
  mr_engine_close(e);
  mr_prompter_close(p);
  mr_mem_free(ids);
  return rc;
}

static double per(double a, double b) {
  return b > 0 ? a / b : 0;
}

typedef struct throughputs { /* both phases, and what to hold them against */
  phase prefill, decode;
  mr_engine_info info;
  mr_roofline roof;
  double peak;      /* GEMM operations a second */
  double int8_peak; /* of the registers, mean of before and after; 0: not known */
  double mfu, mbu;
} throughputs;

/* Of the weights' arithmetic alone, as shares of the int8 peak. */
static double prefill_share(const throughputs *t) {
  double rate = per(t->prefill.tokens, t->prefill.seconds);
  return per(rate * t->info.flops_per_prompt_token, t->int8_peak);
}

static double decode_share(const throughputs *t) {
  double rate = per(t->decode.tokens, t->decode.seconds);
  return per(rate * t->info.flops_per_output_token, t->int8_peak);
}

static void print_phase(const char *key, const phase *p, double peak, double share) {
  printf("%-20s %.1f  (%.1f a second of each CPU's time; %.2f of the GEMM rate", key,
         per(p->tokens, p->seconds), per(p->tokens, p->cpu_s),
         per(per(p->flops, p->seconds), peak));
  if (share > 0)
    printf("; weights %.2f of the int8 peak", share);
  printf("; time: GEMM %.0f %%, attention %.0f %%, sampling %.0f %%)\n",
         100 * per(p->gemm_s, p->seconds), 100 * per(p->attn_s, p->seconds),
         100 * per(p->sample_s, p->seconds));
}

static void print_throughput(const bench_opts *o, const throughputs *t, const char *isa) {
  printf("%d prompts of %d tokens, %d generated for each; %s, %d threads\n", o->batch, o->prompt,
         o->gen, isa, t->roof.threads);
  print_phase("prefill_tokens_per_s", &t->prefill, t->peak, prefill_share(t));
  print_phase("decode_tokens_per_s", &t->decode, t->peak, decode_share(t));
  printf("%-20s %.3f  (of %.0f Gop/s)\n", "mfu", t->mfu, t->peak / 1e9);
  printf("%-20s %.3f  (of %.1f GB/s)\n", "mbu", t->mbu, t->roof.bytes_per_s / 1e9);
}

static mr_code print_throughput_json(const bench_opts *o, const throughputs *t, const char *isa,
                                     mr_err *err) {
  mr_code rc = MR_OK;
  json_t *out = json_pack(
      "{s:f, s:f, s:f, s:f, s:s, s:i, s:i, s:i, s:i, s:f, s:f, s:f, s:f, s:f}",
      "prefill_tokens_per_s", per(t->prefill.tokens, t->prefill.seconds), "decode_tokens_per_s",
      per(t->decode.tokens, t->decode.seconds), "mfu", t->mfu, "mbu", t->mbu, "isa", isa, "threads",
      t->roof.threads, "prompt", o->prompt, "gen", o->gen, "batch", o->batch, "peak_ops_per_s",
      t->peak, "peak_bytes_per_s", t->roof.bytes_per_s, "int8_peak_ops_per_s", t->int8_peak,
      "prefill_of_int8_peak", prefill_share(t), "decode_of_int8_peak", decode_share(t));
  if (!out || json_dumpf(out, stdout, 0) || fputc('\n', stdout) == EOF)
    rc = mr_err_set(err, MR_E_IO, "cannot write to standard output");
  json_decref(out);
  return rc;
}

static mr_code throughput(const bench_opts *o, mr_err *err) {
  throughputs t = {.int8_peak = 0};
  const mr_kernels *k = mr_kernels_best();
  double before = 0, after = 0;
  mr_code rc = mr_roofline_int8_peak(k, o->threads, MEASURE_S, &before, err);
  if (!rc)
    rc = measure(o, &t.prefill, &t.decode, &t.info, err);
  if (!rc)
    rc = mr_roofline_int8_peak(k, o->threads, MEASURE_S, &after, err);
  mr_scheme scheme = t.info.products;
  if (!rc)
    rc = mr_roofline_measure(k, o->threads, 1u << scheme, MEASURE_S, &t.roof, err);
  if (rc)
    return rc;
  double seconds = t.prefill.seconds + t.decode.seconds;
  t.int8_peak = (before + after) / 2;
  t.peak = t.roof.ops_per_s[scheme];
  t.mfu = per(per(t.prefill.flops + t.decode.flops, seconds), t.peak);
  t.mbu = per(per(t.prefill.bytes + t.decode.bytes, seconds), t.roof.bytes_per_s);
  if (o->json)
    return print_throughput_json(o, &t, k->name, err);
  print_throughput(o, &t, k->name);
  return MR_OK;
}

/* ---------------------------------------------------------------- machine */

static mr_code machine(const bench_opts *o, mr_err *err) {
  const mr_kernels *k = mr_kernels_best();
  mr_roofline r;
  double int8_peak;
  mr_code rc = mr_roofline_measure(k, o->threads, MR_ROOFLINE_ALL, 2 * MEASURE_S, &r, err);
  if (!rc)
    rc = mr_roofline_int8_peak(k, o->threads, 2 * MEASURE_S, &int8_peak, err);
  if (rc)
    return rc;
  if (!o->json) {
    printf("isa       %s, %d threads\n", k->name, r.threads);
    printf("memory    %.1f GB/s (triad)\n", r.bytes_per_s / 1e9);
    if (int8_peak > 0)
      printf("int8 peak %.1f Gop/s (multiply-adds of registers)\n", int8_peak / 1e9);
    for (int s = 0; s < MR_SCHEMES; s++)
      if (r.ops_per_s[s] > 0)
        printf("gemm %-4s %.1f Gop/s (in the cache)\n", mr_scheme_name((mr_scheme)s),
               r.ops_per_s[s] / 1e9);
    return MR_OK;
  }
  json_t *gemm = json_object();
  for (int s = 0; s < MR_SCHEMES; s++)
    if (r.ops_per_s[s] > 0)
      json_object_set_new(gemm, mr_scheme_name((mr_scheme)s), json_real(r.ops_per_s[s]));
  json_t *out =
      json_pack("{s:s, s:i, s:f, s:f, s:o}", "isa", k->name, "threads", r.threads, "bytes_per_s",
                r.bytes_per_s, "int8_peak_ops_per_s", int8_peak, "gemm_ops_per_s", gemm);
  if (!out || json_dumpf(out, stdout, 0) || fputc('\n', stdout) == EOF)
    rc = mr_err_set(err, MR_E_IO, "cannot write to standard output");
  json_decref(out);
  return rc;
}

/* ---------------------------------------------------------------- the command line */

static mr_code parse_number(const char *name, int from, int *value, mr_err *err) {
  int64_t v;
  if (!mr_parse_int(optarg, &v) || v < from || v > MAX_TOKENS)
    return mr_err_set(err, MR_E_USAGE, "bench: --%s takes a number from %d to %d, not %s", name,
                      from, MAX_TOKENS, optarg);
  *value = (int)v;
  return MR_OK;
}

static mr_code parse_kv_type(bench_opts *o, mr_err *err) {
  for (int t = 0; t < MR_KV_TYPES; t++)
    if (!strcmp(optarg, mr_kv_type_name((mr_kv_type)t))) {
      o->kv_type = t;
      return MR_OK;
    }
  return mr_err_set(err, MR_E_USAGE, "bench: --kv-type is f32, f16, bf16, int8, q4 or fp8, not %s",
                    optarg);
}

static mr_code parse_option(bench_opts *o, int c, mr_err *err) {
  switch (c) {
  case 'm':
    o->model = optarg;
    return MR_OK;
  case 'p':
    return parse_number("prompt", 1, &o->prompt, err);
  case 'g':
    return parse_number("gen", 0, &o->gen, err);
  case 'b':
    return parse_number("batch", 1, &o->batch, err);
  case 't':
    return parse_number("threads", 1, &o->threads, err);
  case 'c':
    if (strcmp(optarg, "fast") && strcmp(optarg, "exact"))
      return mr_err_set(err, MR_E_USAGE, "bench: --compute is fast or exact, not %s", optarg);
    o->compute = strcmp(optarg, "exact") ? MR_COMPUTE_FAST : MR_COMPUTE_EXACT;
    return MR_OK;
  case 'k':
    return parse_kv_type(o, err);
  default:
    o->json = true;
    return MR_OK;
  }
}

static mr_code parse(bench_opts *o, int argc, char **argv, bool *help, mr_err *err) {
  static const struct option options[] = {
      {"model", required_argument, NULL, 'm'},   {"prompt", required_argument, NULL, 'p'},
      {"gen", required_argument, NULL, 'g'},     {"batch", required_argument, NULL, 'b'},
      {"threads", required_argument, NULL, 't'}, {"compute", required_argument, NULL, 'c'},
      {"kv-type", required_argument, NULL, 'k'}, {"json", no_argument, NULL, 'j'},
      {"help", no_argument, NULL, 'h'},          {NULL, 0, NULL, 0}};
  mr_code rc = MR_OK;
  optind = 0;
  opterr = 0;
  for (int c; !rc && (c = getopt_long(argc, argv, ":hm:", options, NULL)) != -1;) {
    if (c == 'h')
      *help = true;
    else if (c == '?' || c == ':')
      rc = mr_err_set(err, MR_E_USAGE, "bench: %s %s (try --help)",
                      c == '?' ? "unknown option" : "a value is missing after", argv[optind - 1]);
    else
      rc = parse_option(o, c, err);
  }
  bool files =
      argc > optind && (!strcmp(argv[optind], "accuracy") || !strcmp(argv[optind], "device"));
  if (!rc && !*help && argc - optind != 1 && !(files && argc - optind > 1))
    rc = mr_err_set(err, MR_E_USAGE,
                    "bench: name one of kernels, machine, device (with its name), throughput, "
                    "accuracy (with files)");
  if (!rc && (int64_t)o->batch * o->prompt > MAX_TOKENS)
    rc = mr_err_set(err, MR_E_USAGE, "bench: more than %d prompt tokens", MAX_TOKENS);
  return rc;
}

static mr_code dispatch(const bench_opts *o, char **args, int n, mr_err *err) {
  const char *what = args[0];
  if (!mr_kernels_best())
    return mr_err_set(err, MR_E_UNAVAILABLE,
                      "MILLRACE_ISA names an instruction set that this CPU cannot run");
  if (!strcmp(what, "kernels"))
    return mr_bench_kernels(o->json) ? mr_err_set(err, MR_E_INTERNAL, "bench kernels failed")
                                     : MR_OK;
  if (!strcmp(what, "machine"))
    return machine(o, err);
  if (!strcmp(what, "device"))
    return n == 2 ? mr_bench_device(args[1], o->json, err)
                  : mr_err_set(err, MR_E_USAGE, "bench device: name one device");
  bool accuracy = !strcmp(what, "accuracy");
  if (!accuracy && strcmp(what, "throughput"))
    return mr_err_set(err, MR_E_USAGE,
                      "bench: %s is none of kernels, machine, device, throughput, accuracy", what);
  if (!o->model)
    return mr_err_set(err, MR_E_USAGE, "bench %s: give a model with -m", what);
  if (accuracy && n < 2)
    return mr_err_set(err, MR_E_USAGE, "bench accuracy: name files of text");
  return accuracy ? mr_bench_accuracy(o->model, o->threads, o->compute, o->kv_type, args + 1, n - 1,
                                      o->json, err)
                  : throughput(o, err);
}

int mr_cmd_bench(int argc, char **argv) {
  bench_opts o = {.prompt = 128, .gen = 32, .batch = 64, .kv_type = -1};
  mr_err err = MR_ERR_INIT;
  bool help = false;
  mr_code rc = parse(&o, argc, argv, &help, &err);
  if (!rc && help)
    return fputs(usage, stdout) == EOF ? MR_E_IO : 0;
  if (!rc)
    rc = dispatch(&o, argv + optind, argc - optind, &err);
  if (!rc && fflush(stdout))
    rc = mr_err_errno(&err, MR_E_IO, NULL, "cannot write to standard output");
  if (rc)
    mr_err_print(&err, stderr);
  return mr_err_exit(rc);
}
