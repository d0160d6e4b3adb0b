/* The sampler: generator, filters, penalties, logprobs, bad logits. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "io/mem.h"
#include "src/sampler.h"

#define V 4096

static const mr_kernels *k;
static void *scratch;
static float logits[V], x[V];

static int setup(void **state) {
  (void)state;
  k = mr_kernels_best();
  scratch = mr_mem_pages(mr_sampler_scratch(V));
  return k && scratch ? 0 : -1;
}

static int teardown(void **state) {
  (void)state;
  mr_mem_free(scratch);
  return (int)mr_mem_live();
}

/* Reproducible values, roughly normal. */
static void fill(int n, uint32_t salt) {
  for (int i = 0; i < n; i++) {
    uint32_t w[4], counter[4] = {(uint32_t)i, 0, 0, 0}, key[2] = {salt, 1};
    mr_philox(w, counter, key);
    double sum = 0;
    for (int j = 0; j < 4; j++)
      sum += w[j] / 4294967296.0 - 0.5;
    logits[i] = (float)(sum * 6);
  }
}

static int32_t pick_at(const mr_sampling *s, int n, int choice, const mr_sampler_state *st,
                       mr_sampled *out) {
  mr_err e = MR_ERR_INIT;
  memcpy(x, logits, (size_t)n * sizeof *x);
  assert_int_equal(mr_sampler_pick(k, s, x, n, st, NULL, 0, 77, choice, scratch, out, &e), MR_OK);
  return out->id;
}

static int32_t pick(const mr_sampling *s, int n, int choice) {
  mr_sampler_state st = {0};
  mr_sampled out;
  return pick_at(s, n, choice, &st, &out);
}

/* Known answers of Random123 (kat_vectors, philox4x32 with 10 rounds). */
static void philox_vectors(void **state) {
  (void)state;
  static const uint32_t cases[3][10] = {
      {0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
      {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
      {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0xd16cfe09,
       0x94fdcceb, 0x5001e420, 0x24126ea1}};
  for (int i = 0; i < 3; i++) {
    uint32_t out[4];
    mr_philox(out, cases[i], cases[i] + 4);
    assert_memory_equal(out, cases[i] + 6, sizeof out);
  }
}

static void greedy(void **state) {
  (void)state;
  mr_sampling s = mr_sampling_default;
  s.temperature = 0;
  fill(V, 1);
  logits[1500] = logits[900] = logits[4000] = 50;
  assert_int_equal(pick(&s, V, 0), 900); /* the lowest id on ties */
  s.temperature = 1e-6f;                 /* as good as greedy */
  assert_int_equal(pick(&s, V, 5), 900);
  s.temperature = 1;
  s.top_k = 1;
  for (int c = 0; c < 20; c++)
    assert_int_equal(pick(&s, V, c), 900);
}

/* The draw does not depend on anything but seed, row, choice and position. */
static void draws_repeat(void **state) {
  (void)state;
  mr_sampling s = mr_sampling_default;
  mr_err e = MR_ERR_INIT;
  mr_sampler_state st = {0};
  mr_sampled a, b;
  fill(V, 2);
  int differ = 0;
  for (int c = 0; c < 32; c++) {
    assert_int_equal(pick(&s, V, c), pick(&s, V, c));
    memcpy(x, logits, sizeof x);
    assert_int_equal(mr_sampler_pick(k, &s, x, V, &st, NULL, 0, 1, c, scratch, &a, &e), MR_OK);
    memcpy(x, logits, sizeof x);
    assert_int_equal(mr_sampler_pick(k, &s, x, V, &st, NULL, 0, 2, c, scratch, &b, &e), MR_OK);
    differ += a.id != b.id;
  }
  assert_true(differ > 16); /* another row draws otherwise */
  s.has_seed = true;
  s.seed = 42;
  memcpy(x, logits, sizeof x);
  mr_sampler_pick(k, &s, x, V, &st, NULL, 0, 1, 0, scratch, &a, &e);
  memcpy(x, logits, sizeof x);
  mr_sampler_pick(k, &s, x, V, &st, NULL, 0, 2, 0, scratch, &b, &e);
  assert_int_equal(a.id, b.id); /* unless both name the same seed */
}

/* Counts 20,000 draws over n ids against p, by chi-square; ids with p = 0 must never come. */
static void check_distribution(const mr_sampling *s, int n, const double *p) {
  enum { DRAWS = 20000 };
  int seen[V] = {0}, cells = 0;
  double chi = 0;
  for (int c = 0; c < DRAWS; c++)
    seen[pick(s, n, c)]++;
  for (int i = 0; i < n; i++) {
    if (p[i] <= 0) {
      assert_int_equal(seen[i], 0);
      continue;
    }
    double want = p[i] * DRAWS, d = seen[i] - want;
    chi += d * d / want;
    cells++;
  }
  double free_cells = cells - 1; /* mean and, near enough, variance / 2 */
  assert_true(chi < free_cells + 4 * sqrt(2 * free_cells) + 4);
}

static int order(int n, int *by) { /* ids by falling logit */
  for (int i = 0; i < n; i++) {
    int j = i;
    for (; j > 0 && logits[by[j - 1]] < logits[i]; j--)
      by[j] = by[j - 1];
    by[j] = i;
  }
  return n;
}

/* What the filters leave, by the definition. */
static void expected(const mr_sampling *s, int n, double *p) {
  int by[V];
  double sum = 0, kept = 0, cum = 0;
  order(n, by);
  int m = s->top_k > 0 && s->top_k < n ? s->top_k : n;
  memset(p, 0, (size_t)n * sizeof *p);
  for (int i = 0; i < m; i++)
    sum += p[by[i]] = exp((logits[by[i]] - logits[by[0]]) / s->temperature);
  double best = p[by[0]];
  for (int i = 0; i < m; i++) {
    bool out = (s->top_p < 1 && i > 0 && cum >= s->top_p * sum) || p[by[i]] < s->min_p * best;
    cum += p[by[i]];
    p[by[i]] = out ? 0 : p[by[i]];
    kept += p[by[i]];
  }
  for (int i = 0; i < n; i++)
    p[i] /= kept;
}

static void distributions(void **state) {
  (void)state;
  static const struct {
    float t, top_p, min_p;
    int top_k;
  } cases[] = {{1, 1, 0, 0}, {0.7f, 1, 0, 0},      {1.5f, 1, 0, -1},   {1, 1, 0, 7},
               {1, 0.6f, 0, 0}, {0.8f, 0.9f, 0, 0},   {1, 1, 0.2f, 0},    {0.9f, 0.8f, 0.1f, 20},
               {1, 0.5f, 0, 9}, {2, 0.99f, 0.02f, 0}, {1, 0.0001f, 0, 0}, {1, 1, 1, 0}};
  double p[V];
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    mr_sampling s = mr_sampling_default;
    int n = i % 2 ? 37 : 150;
    fill(n, (uint32_t)(i + 10));
    s.temperature = cases[i].t;
    s.top_p = cases[i].top_p;
    s.min_p = cases[i].min_p;
    s.top_k = cases[i].top_k;
    expected(&s, n, p);
    check_distribution(&s, n, p);
  }
}

/* A vocabulary of several blocks, where the draw goes by blocks first. */
static void wide_distribution(void **state) {
  (void)state;
  mr_sampling s = mr_sampling_default;
  double p[V];
  fill(V, 3);
  for (int i = 0; i < V; i++)
    logits[i] = i % 97 == 5 || i == V - 1 ? logits[i] : -INFINITY;
  for (int i = 1024; i < 2048; i++)
    logits[i] = -INFINITY; /* a block without any */
  expected(&s, V, p);
  check_distribution(&s, V, p);
  fill(V, 4);
  s.top_p = 0.05f;
  expected(&s, V, p);
  check_distribution(&s, V, p);
}

static void filters_at_their_limits(void **state) {
  (void)state;
  mr_sampling s = mr_sampling_default;
  for (int i = 0; i < 8; i++)
    logits[i] = 1; /* all equal: ties go to the lowest ids */
  s.top_k = 3;
  for (int c = 0; c < 200; c++)
    assert_true(pick(&s, 8, c) < 3);
  s.top_k = 100; /* more than there are */
  assert_true(pick(&s, 8, 0) < 8);
  s.top_k = 0;
  s.top_p = 0.5f; /* four of eight reach it */
  for (int c = 0; c < 200; c++)
    assert_true(pick(&s, 8, c) < 4);
  s.top_p = 0;
  assert_int_equal(pick(&s, 8, 3), 0);
  s.top_p = 1;
  s.min_p = 1;
  assert_true(pick(&s, 8, 3) < 8);
  assert_int_equal(pick(&s, 1, 3), 0); /* a vocabulary of one */
}

static void penalties(void **state) {
  (void)state;
  mr_sampling s = mr_sampling_default;
  int32_t prompt[] = {1, 1, 2}, output[] = {3, 3, 3, 1};
  mr_sampler_state st = {prompt, 3, output, 4};
  mr_sampled out;
  s.temperature = 0;
  memcpy(logits, (float[]){1, 4, -1, 4.5f, 1.9f}, 5 * sizeof *logits);
  s.frequency_penalty = 1; /* 3: 4.5 - 3, 1: 4 - 1 */
  assert_int_equal(pick_at(&s, 5, 0, &st, &out), 1);
  s.presence_penalty = 1.2f; /* 3: 0.3, 1: 1.8, 4: 1.9 */
  assert_int_equal(pick_at(&s, 5, 0, &st, &out), 4);
  s.frequency_penalty = s.presence_penalty = 0;
  s.repetition_penalty = 2; /* 1: 2, 3: 2.25, once each however often they came */
  assert_int_equal(pick_at(&s, 5, 0, &st, &out), 3);
  s.repetition_penalty = 2.5f; /* 1: 1.6, 3: 1.8, 4: 1.9 */
  assert_int_equal(pick_at(&s, 5, 0, &st, &out), 4);
  memcpy(logits, (float[]){-3, -2, -1, -9, -9}, 5 * sizeof *logits);
  assert_int_equal(pick_at(&s, 5, 0, &st, &out), 2); /* negative ones are multiplied: 1: -5, 2: -2.5
                                                      */
  s.repetition_penalty = 4;
  assert_int_equal(pick_at(&s, 5, 0, &st, &out), 0);
}

static void bias_and_min_tokens(void **state) {
  (void)state;
  mr_sampling s = mr_sampling_default;
  mr_bias bias[] = {{2, 100}, {4, -100}, {9, 5}, {-1, 5}}; /* ids outside are ignored */
  int32_t ends[] = {2, 77}, output[] = {0};
  mr_sampler_state st = {NULL, 0, output, 0};
  mr_sampled out;
  mr_err e = MR_ERR_INIT;
  memcpy(logits, (float[]){1, 2, 0, 0, 8}, 5 * sizeof *logits);
  s.temperature = 0;
  s.bias = bias;
  s.n_bias = 4;
  s.logprobs = 1;
  assert_int_equal(pick_at(&s, 5, 0, &st, &out), 2);
  assert_float_equal(out.logprob, 0 - 8.0037f, 1e-3f); /* of the raw logits */
  assert_int_equal(out.top_id[0], 4);
  s.min_tokens = 1;
  memcpy(x, logits, 5 * sizeof *x);
  assert_int_equal(mr_sampler_pick(k, &s, x, 5, &st, ends, 2, 0, 0, scratch, &out, &e), MR_OK);
  assert_int_equal(out.id, 1);
  st.n_output = 1;
  memcpy(x, logits, 5 * sizeof *x);
  assert_int_equal(mr_sampler_pick(k, &s, x, 5, &st, ends, 2, 0, 0, scratch, &out, &e), MR_OK);
  assert_int_equal(out.id, 2);
}

static void logprobs(void **state) {
  (void)state;
  mr_sampling s = mr_sampling_default;
  mr_sampled out, again;
  mr_sampler_state st = {0};
  mr_err e = MR_ERR_INIT;
  int by[V], rank;
  double sum = 0;
  fill(V, 8);
  logits[17] = logits[3000] = 4; /* a tie in the list */
  order(V, by);
  for (int i = 0; i < V; i++)
    sum += exp(logits[i]);
  s.temperature = 0.5f; /* changes the draw, not what is reported */
  s.logprobs = MR_TOP_LOGPROBS_MAX;
  for (int c = 0; c < 50; c++) {
    pick_at(&s, V, c, &st, &out);
    assert_float_equal(out.logprob, (float)(logits[out.id] - log(sum)), 1e-4f);
    assert_int_equal(out.n_top, MR_TOP_LOGPROBS_MAX);
    for (int i = 0; i < out.n_top; i++) {
      assert_int_equal(out.top_id[i], by[i]);
      assert_float_equal(out.top_logprob[i], (float)(logits[by[i]] - log(sum)), 1e-4f);
    }
    assert_int_equal(mr_sampler_score(k, logits, V, out.id, 5, &again, &rank, &e), MR_OK);
    assert_true(again.logprob == out.logprob && again.n_top == 5);
    assert_int_equal(by[rank - 1], out.id);
  }
  assert_int_equal(mr_sampler_score(k, logits, 3, 1, 20, &again, NULL, &e), MR_OK);
  assert_int_equal(again.n_top, 3); /* no more than there are */
}

static void bad_logits(void **state) {
  (void)state;
  static const float bad[] = {NAN, INFINITY};
  mr_sampling s = mr_sampling_default;
  mr_sampler_state st = {0};
  mr_sampled out;
  for (int i = 0; i < 4; i++) {
    mr_err e = MR_ERR_INIT;
    fill(V, 9);
    logits[i < 2 ? 0 : V - 1] = bad[i % 2];
    s.temperature = i % 2 ? 0 : 1;
    assert_int_equal(mr_sampler_pick(k, &s, logits, V, &st, NULL, 0, 0, 0, scratch, &out, &e),
                     MR_E_DATA);
    assert_true(strlen(e.text) > 10);
    assert_int_equal(mr_sampler_score(k, logits, V, 3, 0, &out, NULL, NULL), MR_E_DATA);
  }
  for (int i = 0; i < V; i++)
    logits[i] = -INFINITY;
  assert_int_equal(mr_sampler_pick(k, &s, logits, V, &st, NULL, 0, 0, 0, scratch, &out, NULL),
                   MR_E_DATA);
  logits[7] = 1; /* the only one, and it may not be taken */
  s.min_tokens = 1;
  assert_int_equal(
      mr_sampler_pick(k, &s, logits, V, &st, (int32_t[]){7}, 1, 0, 0, scratch, &out, NULL),
      MR_E_DATA);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(philox_vectors),    cmocka_unit_test(greedy),
      cmocka_unit_test(draws_repeat),      cmocka_unit_test(distributions),
      cmocka_unit_test(wide_distribution), cmocka_unit_test(filters_at_their_limits),
      cmocka_unit_test(penalties),         cmocka_unit_test(bias_and_min_tokens),
      cmocka_unit_test(logprobs),          cmocka_unit_test(bad_logits),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
