/* oracle.h: runs a model in exact mode beside the expected values of a reference: logprobs of the
 * prompts, the last logits, greedy tokens. For tests that include it after cmocka. */
#ifndef TESTS_UNIT_ORACLE_H
#define TESTS_UNIT_ORACLE_H

#include <math.h>
#include <string.h>

#include <jansson.h>

#include "src/forward.h"
#include "tests/unit/conformance.h"

#define MAX_SEQS 16
#define MAX_PROMPT 256
#define MAX_STEPS 64
#define MAX_TOKENS 256

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
  mr_device *dev; /* NULL: the CPU */
  mr_kv_memory pages;
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

static const mr_sim_opts *on_sim; /* not NULL: engines are opened on this emulated GPU */
static const char *on_device;     /* ... or on this device */

static void *take_pages(void *ctx, size_t bytes) {
  return mr_device_take(ctx, bytes);
}

static mr_code open_gpu(engine *e, mr_err *err) {
  if (on_device) {
    assert_int_equal(mr_device_open(&e->dev, on_device, 0, err), MR_OK);
  } else {
    assert_int_equal(mr_device_sim(&e->dev, on_sim, err), MR_OK);
    assert_int_equal(mr_device_start(e->dev, on_sim->memory, err), MR_OK);
  }
  e->pages = (mr_kv_memory){.ctx = e->dev, .take = take_pages};
  assert_int_equal(mr_kv_open_on(&e->kv, &e->m->c, MR_KV_F32,
                                 100 * mr_kv_groups_of(&e->m->c, MR_KV_F32).n, &e->pages, err),
                   MR_OK);
  return mr_forward_open_gpu(&e->f, e->m, e->dev, e->kv, MR_GPU_EXACT, 0, MAX_TOKENS, MAX_TOKENS,
                             err);
}

static mr_code engine_open(engine *e, const char *path, const char *isa, mr_err *err) {
  *e = (engine){.k = mr_kernels_get(isa), .pool = mr_pool_new(mr_pool_cpus(), 0)};
  assert_non_null(e->pool);
  mr_code rc = mr_model_open(&e->m, path, err);
  if (rc)
    return rc;
  if (on_sim || on_device)
    return open_gpu(e, err);
  assert_int_equal(mr_model_pack(e->m, e->k, MR_SCHEME_F32, e->pool, err), MR_OK);
  assert_int_equal(
      mr_kv_open(&e->kv, &e->m->c, MR_KV_F32, 100 * mr_kv_groups_of(&e->m->c, MR_KV_F32).n, err),
      MR_OK);
  assert_int_equal(mr_forward_open(&e->f, e->m, e->k, e->pool, e->kv, MAX_TOKENS, MAX_TOKENS, err),
                   MR_OK);
  return MR_OK;
}

static void engine_close(engine *e) {
  mr_forward_close(e->f);
  mr_kv_close(e->kv);
  mr_device_close(e->dev);
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
  assert_int_equal(mr_kv_seq_init(e->kv, &p->seq, p->n + p->steps, &err), MR_OK);
  p->seq.long_rope = p->n > e->m->c.rope_original_context;
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

/* The first rows of a directory's cases.jsonl, with their last logits from logits.f32. */
static inline void check_cases(engine *e, const char *dir, int rows, int steps, const char *name) {
  static probe p[MAX_SEQS];
  char path[4600];
  size_t len = 0;
  snprintf(path, sizeof path, "%s/cases.jsonl", dir);
  char *cases = read_whole(path, &len);
  snprintf(path, sizeof path, "%s/logits.f32", dir);
  char *logits = read_whole(path, &len);
  assert_non_null(cases);
  assert_non_null(logits);
  int n = read_probes(p, cases, rows, MAX_PROMPT, steps);
  for (int i = 0; i < n; i++)
    p[i].last = (const float *)(const void *)(logits + (size_t)i * (size_t)e->m->c.n_vocab * 4);
  check_probes(e, p, n, name);
  free(cases);
  free(logits);
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

#endif
