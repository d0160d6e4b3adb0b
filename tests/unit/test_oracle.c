/* The engine's numbers against independent programs: the tiny models' reference values, and, where
 * the real models are present, float64 passes over them. Exact mode. Skipped without the data
 * ($MR_DATA, see conformance.h). */
#include <dirent.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <archive.h>
#include <cmocka.h>
#include <jansson.h>

#include "src/forward.h"
#include "tests/unit/conformance.h"

#define MAX_SEQS 16
#define MAX_PROMPT 160
#define MAX_STEPS 64
#define MAX_TOKENS 192

typedef struct probe { /* one line of expected values, and the sequence that must meet them */
  char id[64];
  int32_t ids[MAX_PROMPT + MAX_STEPS];
  int n, steps;
  double logprob[MAX_PROMPT]; /* of ids[i] after those before it; [0] unused */
  int32_t greedy[MAX_STEPS];
  double gap[MAX_STEPS];
  const float *last; /* logits after the prompt, or NULL */
  double std;        /* their spread */
  mr_kv_seq seq;
  double worst_logprob, worst_logit;
} probe;

typedef struct engine {
  mr_model *m;
  const mr_kernels *k;
  mr_pool *pool;
  mr_kv *kv;
  mr_forward *f;
} engine;

static double worst_logprob, worst_logit;
static int n_probes, n_greedy;

/* ------------------------------------------------------------------ expected values */

static void copy_ids(int32_t *to, const json_t *from, int n) {
  for (int i = 0; i < n; i++)
    to[i] = (int32_t)json_integer_value(json_array_get(from, (size_t)i));
}

static void copy_reals(double *to, const json_t *from, int n) {
  for (int i = 0; i < n; i++)
    to[i] = json_number_value(json_array_get(from, (size_t)i));
}

/* Names differ between the three kinds of files. */
static const json_t *either(const json_t *row, const char *a, const char *b, const char *c) {
  const json_t *v = json_object_get(row, a);
  v = v ? v : json_object_get(row, b);
  return v ? v : json_object_get(row, c);
}

static int at_most(const json_t *array, int limit) {
  int n = (int)json_array_size(array);
  return n < limit ? n : limit;
}

static void read_probe(probe *p, const json_t *row, int steps) {
  const json_t *ids = either(row, "input_ids", "prompt_ids", "ids");
  const json_t *greedy = either(row, "greedy", "greedy_ids", "");
  *p = (probe){.n = at_most(ids, MAX_PROMPT), .steps = at_most(greedy, steps)};
  const char *id = json_string_value(either(row, "id", "text", ""));
  snprintf(p->id, sizeof p->id, "%s", id ? id : "?");
  copy_ids(p->ids, ids, p->n);
  copy_ids(p->greedy, greedy, p->steps);
  copy_reals(p->logprob, json_object_get(row, "prompt_logprobs"), p->n);
  copy_reals(p->gap, either(row, "greedy_gap", "greedy_margin", ""), p->steps);
  p->std = json_number_value(json_object_get(row, "logit_std"));
}

/* Lines of `text` whose prompts are at most max_len, max_rows of them. */
static int read_probes(probe *p, const char *text, int max_rows, int max_len, int steps) {
  int n = 0;
  for (const char *line = text; line && *line && n < max_rows;) {
    const char *end = strchr(line, '\n');
    json_t *row = json_loadb(line, end ? (size_t)(end - line) : strlen(line), 0, NULL);
    assert_non_null(row);
    read_probe(&p[n], row, steps);
    n += p[n].n <= max_len;
    json_decref(row);
    line = end ? end + 1 : NULL;
  }
  return n;
}

/* ------------------------------------------------------------------ the engine */

static mr_code engine_open(engine *e, const char *path, const char *isa, mr_err *err) {
  *e = (engine){.k = mr_kernels_get(isa), .pool = mr_pool_new(mr_pool_cpus(), 0)};
  assert_non_null(e->pool);
  mr_code rc = mr_model_open(&e->m, path, err);
  if (rc)
    return rc;
  assert_int_equal(mr_model_pack(e->m, e->k, MR_SCHEME_F32, e->pool, err), MR_OK);
  assert_int_equal(mr_kv_open(&e->kv, &e->m->c, MR_KV_F32, 100, err), MR_OK);
  assert_int_equal(mr_forward_open(&e->f, e->m, e->k, e->pool, e->kv, MAX_TOKENS, MAX_TOKENS, err),
                   MR_OK);
  return MR_OK;
}

static void engine_close(engine *e) {
  mr_forward_close(e->f);
  mr_kv_close(e->kv);
  mr_model_close(e->m);
  mr_pool_free(e->pool);
}

static int best_of(const engine *e, const float *logits) {
  int bad = 0, best = e->k->argmax(logits, e->m->c.n_vocab, &bad);
  assert_false(bad);
  return best;
}

static void check_prompt_row(const engine *e, probe *p, int at, const float *logits) {
  if (at + 1 < p->n) {
    double got = logits[p->ids[at + 1]] - e->k->logsumexp(logits, e->m->c.n_vocab);
    p->worst_logprob = fmax(p->worst_logprob, fabs(got - p->logprob[at + 1]));
    return;
  }
  for (int i = 0; p->last && i < e->m->c.n_vocab; i++)
    p->worst_logit = fmax(p->worst_logit, fabs(logits[i] - p->last[i]) / p->std);
}

/* The prompt of one probe in chunks; returns the greedy token after it. */
static int prefill(engine *e, probe *p, int chunk) {
  static const uint8_t all[MAX_TOKENS] = {[0 ... MAX_TOKENS - 1] = 1};
  mr_err err = MR_ERR_INIT;
  int best = -1;
  assert_int_equal(mr_kv_seq_init(&p->seq, p->n + p->steps, &err), MR_OK);
  for (int at = 0; at < p->n; at += chunk) {
    int n = p->n - at < chunk ? p->n - at : chunk;
    mr_run run = {.seq = &p->seq, .tokens = p->ids + at, .n = n, .want = all};
    assert_int_equal(mr_kv_seq_reserve(e->kv, &p->seq, n), MR_OK);
    assert_int_equal(mr_forward_step(e->f, &run, 1, NULL, &err), MR_OK);
    for (int i = 0; i < n; i++)
      check_prompt_row(e, p, at + i, mr_forward_logits(e->f, i));
    best = best_of(e, mr_forward_logits(e->f, n - 1));
  }
  return best;
}

/* All probes decode together; one drops out after its first near-tie. */
static void decode(engine *e, probe *p, int n, int *best) {
  mr_err err = MR_ERR_INIT;
  for (int step = 0; step < MAX_STEPS; step++) {
    mr_run runs[MAX_SEQS];
    int who[MAX_SEQS], n_runs = 0;
    for (int i = 0; i < n; i++) {
      if (step >= p[i].steps || p[i].gap[step] < 1e-3) {
        p[i].steps = step < p[i].steps ? step : p[i].steps;
        continue;
      }
      if (best[i] != p[i].greedy[step])
        fail_msg("%s: greedy token %d is %d, not %d", p[i].id, step, best[i], p[i].greedy[step]);
      n_greedy++;
      if (step + 1 == p[i].steps)
        continue;
      assert_int_equal(mr_kv_seq_reserve(e->kv, &p[i].seq, 1), MR_OK);
      who[n_runs] = i;
      runs[n_runs++] = (mr_run){.seq = &p[i].seq, .tokens = &p[i].greedy[step], .n = 1};
    }
    if (n_runs == 0)
      return;
    assert_int_equal(mr_forward_step(e->f, runs, n_runs, NULL, &err), MR_OK);
    for (int i = 0; i < n_runs; i++)
      best[who[i]] = best_of(e, mr_forward_logits(e->f, i));
  }
}

static void check_probes(engine *e, probe *p, int n, const char *name) {
  int best[MAX_SEQS];
  for (int i = 0; i < n; i++) {
    best[i] = prefill(e, &p[i], 48);
    if (p[i].worst_logprob > 2e-3 || p[i].worst_logit > 1e-3 || isnan(p[i].worst_logit))
      fail_msg("%s, %s kernels, %s: prompt logprobs off by %g, last logits by %g of their spread",
               name, e->k->name, p[i].id, p[i].worst_logprob, p[i].worst_logit);
    worst_logprob = fmax(worst_logprob, p[i].worst_logprob);
    worst_logit = fmax(worst_logit, p[i].worst_logit);
  }
  decode(e, p, n, best);
  for (int i = 0; i < n; i++)
    mr_kv_seq_free(e->kv, &p[i].seq);
  n_probes += n;
}

static void reset(void) {
  worst_logprob = worst_logit = 0;
  n_probes = n_greedy = 0;
}

static void report(const char *what) {
  print_message("%s: %d prompts, %d greedy tokens; prompt logprobs within %.2g, last logits within "
                "%.2g of their spread\n",
                what, n_probes, n_greedy, worst_logprob, worst_logit);
}

/* ------------------------------------------------------------------ tiny models */

static char *read_beside(const char *path, size_t keep, const char *ending, size_t *len) {
  char other[4200];
  snprintf(other, sizeof other, "%.*s%s", (int)keep, path, ending);
  return read_whole(other, len);
}

/* Types that are known by name only may be refused. */
static bool may_be_refused(const char *path) {
  return strstr(path, "IQ") || strstr(path, "TQ") || strstr(path, "MXFP4");
}

static bool tiny_model(const char *path, const char *isa) {
  static probe p[MAX_SEQS];
  mr_err err = MR_ERR_INIT;
  engine e;
  size_t len = 0, keep = strlen(path) - strlen(".gguf");
  const char *split = strstr(path, "-00001-of-");
  keep = split ? (size_t)(split - path) : keep;
  if (engine_open(&e, path, isa, &err)) {
    mr_pool_free(e.pool);
    if (!may_be_refused(path))
      fail_msg("%s: %s", path, err.text);
    return false;
  }
  char *cases = read_beside(path, keep, ".cases.jsonl", &len);
  char *logits = read_beside(path, keep, ".logits.f32", &len);
  assert_non_null(cases);
  assert_non_null(logits);
  int n = read_probes(p, cases, MAX_SEQS, MAX_PROMPT, MAX_STEPS);
  for (int i = 0; i < n; i++) {
    size_t bytes = (size_t)e.m->c.n_vocab * sizeof(float);
    assert_true(((size_t)i + 1) * bytes <= len);
    p[i].last = (const float *)(const void *)(logits + (size_t)i * bytes);
  }
  check_probes(&e, p, n, path);
  engine_close(&e);
  free(cases);
  free(logits);
  return true;
}

static bool is_model(const char *name) {
  size_t n = strlen(name);
  const char *split = strstr(name, "-of-");
  return n > 5 && strcmp(name + n - 5, ".gguf") == 0 && (!split || strstr(name, "-00001-of-"));
}

/* Every model of the folder with the best kernels; those of float32 with all kernels. */
static void tiny_folder(const char *name, int at_least) {
  char folder[4200], path[4500];
  struct dirent *entry;
  int n = 0;
  const char *root = data_path("tiny/gguf");
  if (!root)
    skip();
  snprintf(folder, sizeof folder, "%s/%s", root, name);
  DIR *dir = opendir(folder);
  assert_non_null(dir);
  reset();
  while ((entry = readdir(dir))) {
    if (!is_model(entry->d_name))
      continue;
    snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
    bool all = strstr(entry->d_name, "F32") != NULL;
    for (const char *const *isa = mr_kernels_names(); *isa; isa++)
      if (all || !isa[1])
        n += tiny_model(path, *isa);
  }
  closedir(dir);
  assert_true(n >= at_least);
  report(name);
}

static void tiny_llama(void **state) {
  (void)state;
  tiny_folder("llama_gqa", 10);
}

static void tiny_llama_k(void **state) {
  (void)state;
  tiny_folder("llama_k", 5);
}

static void tiny_qwen2(void **state) {
  (void)state;
  tiny_folder("qwen2", 8);
  tiny_folder("qwen2_k", 1);
}

static void tiny_gemma3(void **state) {
  (void)state;
  tiny_folder("gemma3", 8);
}

static void baseline(void **state) {
  (void)state;
  static probe p[MAX_SEQS];
  mr_err err = MR_ERR_INIT;
  engine e;
  size_t len;
  if (!data_path("conformance/malformed/valid_tiny.jsonl"))
    skip();
  reset();
  char *text = read_whole(data_path("conformance/malformed/valid_tiny.jsonl"), &len);
  assert_non_null(text);
  int n = read_probes(p, text, MAX_SEQS, MAX_PROMPT, MAX_STEPS);
  const char *path = data_path("conformance/malformed/gguf/00-valid-baseline.gguf");
  assert_non_null(path);
  assert_int_equal(engine_open(&e, path, mr_kernels_best()->name, &err), MR_OK);
  check_probes(&e, p, n, "valid baseline");
  engine_close(&e);
  free(text);
  report("valid baseline");
}

/* ------------------------------------------------------------------ real models */

/* The text of a .gz, for the caller to free(). */
static char *read_gz(const char *path, size_t cap) {
  struct archive *a = archive_read_new();
  struct archive_entry *entry;
  char *text = calloc(cap + 1, 1);
  assert_non_null(a);
  assert_non_null(text);
  archive_read_support_filter_gzip(a);
  archive_read_support_format_raw(a);
  assert_int_equal(archive_read_open_filename(a, path, 1 << 16), ARCHIVE_OK);
  assert_int_equal(archive_read_next_header(a, &entry), ARCHIVE_OK);
  size_t n = 0;
  for (la_ssize_t got; (got = archive_read_data(a, text + n, cap - n)) > 0;)
    n += (size_t)got;
  archive_read_free(a);
  assert_true(n > 0 && n < cap);
  return text;
}

static void real_model(const char *path, const char *cases) {
  static probe p[MAX_SEQS];
  mr_err err = MR_ERR_INIT;
  engine e;
  struct stat st;
  if (stat(path, &st) != 0 || !data_path(cases))
    skip();
  reset();
  char *text = read_gz(data_path(cases), (size_t)8 << 20);
  int n = read_probes(p, text, 4, 32, 6);
  assert_int_equal(engine_open(&e, path, mr_kernels_best()->name, &err), MR_OK);
  check_probes(&e, p, n, path);
  engine_close(&e);
  free(text);
  report(path);
}

static void smollm2(void **state) {
  (void)state;
  real_model("models/SmolLM2-135M-Instruct.Q4_1.gguf", "conformance/models/smollm2.jsonl.gz");
}

static void gemma3(void **state) {
  (void)state;
  real_model("models/gemma-3-270m-q4_k_m.gguf", "conformance/models/gemma3.jsonl.gz");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(tiny_llama),  cmocka_unit_test(tiny_llama_k), cmocka_unit_test(tiny_qwen2),
      cmocka_unit_test(tiny_gemma3), cmocka_unit_test(baseline),     cmocka_unit_test(smollm2),
      cmocka_unit_test(gemma3),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
