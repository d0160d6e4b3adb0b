/* Choices from the best of a row: the token that the sampler picks from the whole row, or a word
 * that the row is needed, and that only where it is. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "io/mem.h"
#include "src/sampler_best.h"

enum { VOCAB = 3000, SMALL = 40, ROUNDS = 60 };

static const mr_kernels *kernels;
static void *scratch;
static uint32_t seed = 11;
static int32_t prompt[20], output[30];
static const int32_t ends[] = {7, 1500};

static float uniform(void) { /* -1 .. 1 */
  seed = seed * 1664525u + 1013904223u;
  return (float)(seed >> 8) / (float)(1 << 23) - 1;
}

static int setup(void **state) {
  (void)state;
  kernels = mr_kernels_best();
  scratch = mr_mem_pages(mr_sampler_scratch(VOCAB));
  return !scratch;
}

static int teardown(void **state) {
  (void)state;
  mr_mem_free(scratch);
  return (int)mr_mem_live();
}

static void put_best(mr_gpu_best *b, const float *x, int n, const mr_gpu_ask *ask) {
  *b = (mr_gpu_best){.max = -INFINITY, .drawn = -1, .rank = 1};
  for (int i = 0; i < n; i++) {
    b->max = fmaxf(b->max, x[i]);
    int at = b->n;
    while (at > 0 && b->x[at - 1] < x[i])
      at--;
    if (at == MR_GPU_BEST)
      continue;
    b->n += b->n < MR_GPU_BEST;
    for (int j = b->n - 1; j > at; j--) {
      b->x[j] = b->x[j - 1];
      b->id[j] = b->id[j - 1];
    }
    b->x[at] = x[i];
    b->id[at] = i;
  }
  for (int i = 0; i < n; i++) {
    b->sum += exp((double)x[i] - b->max);
    b->total += exp(((double)x[i] - b->max) * ask->inverse);
  }
  double sum = 0;
  for (int i = 0; i < n && ask->u >= 0 && sum <= ask->u * b->total; i++) {
    sum += exp(((double)x[i] - b->max) * ask->inverse);
    b->drawn = i;
    b->drawn_x = x[i];
  }
  for (int i = 0; i < n && ask->probe >= 0; i++)
    b->rank += x[i] > x[ask->probe] || (x[i] == x[ask->probe] && i < ask->probe);
  b->probe_x = ask->probe >= 0 ? x[ask->probe] : 0;
}

static void same(const mr_sampled *a, const mr_sampled *b) {
  assert_int_equal(a->id, b->id);
  assert_true(fabsf(a->logprob - b->logprob) < 1e-5f);
  assert_int_equal(a->n_top, b->n_top);
  for (int i = 0; i < a->n_top; i++) {
    assert_int_equal(a->top_id[i], b->top_id[i]);
    assert_true(fabsf(a->top_logprob[i] - b->top_logprob[i]) < 1e-5f);
  }
}

/* How many of ROUNDS rows were needed as a whole. */
static int compare(const mr_sampling *s, int n, float size, int n_output) {
  static float x[VOCAB];
  int again = 0;
  for (int round = 0; round < ROUNDS; round++) {
    mr_sampled a, b;
    mr_gpu_best best;
    for (int i = 0; i < n; i++)
      x[i] = roundf(uniform() * size * 8) / 8; /* some are equal */
    for (int i = 0; i < 20; i++)
      prompt[i] = (int32_t)((uniform() + 1) * 0.499f * (float)n);
    for (int i = 0; i < 30; i++)
      output[i] = i % 3 ? prompt[i % 20] : (int32_t)((uniform() + 1) * 0.499f * (float)n);
    mr_sampler_state st = {prompt, 20, output, n_output};
    mr_gpu_ask ask = mr_sampler_ask(s, (uint64_t)round, 1, n_output);
    put_best(&best, x, n, &ask);
    mr_code rc = mr_sampler_pick_best(s, &best, &ask, n, &st, ends, 2, (uint64_t)round, 1, &a);
    again += rc == MR_E_AGAIN;
    mr_code whole =
        mr_sampler_pick(kernels, s, x, n, &st, ends, 2, (uint64_t)round, 1, scratch, &b, NULL);
    if (rc == MR_E_AGAIN)
      continue;
    assert_int_equal(rc, whole);
    if (!rc)
      same(&a, &b);
  }
  return again;
}

static mr_sampling plain(float temperature) {
  mr_sampling s = mr_sampling_default;
  s.temperature = temperature;
  s.logprobs = 5;
  return s;
}

static void without_the_row(void **state) {
  (void)state;
  mr_sampling s = plain(0);
  assert_int_equal(compare(&s, VOCAB, 9, 4), 0);
  s.min_tokens = 9;
  s.repetition_penalty = 1.3f;
  s.presence_penalty = 0.5f;
  s.frequency_penalty = 0.25f;
  assert_int_equal(compare(&s, VOCAB, 9, 30), 0);
  s = plain(1); /* draws from all: only what is drawn and its logprob */
  assert_int_equal(compare(&s, VOCAB, 9, 4), 0);
  s.temperature = 0.6f;
  assert_int_equal(compare(&s, VOCAB, 9, 4), 0);
  s.top_k = 20;
  assert_int_equal(compare(&s, VOCAB, 9, 4), 0);
  s.top_p = 0.7f;
  s.min_p = 0.05f;
  assert_int_equal(compare(&s, VOCAB, 9, 4), 0);
  s.repetition_penalty = 1.1f;
  s.top_k = 10;
  assert_true(compare(&s, VOCAB, 20, 4) < ROUNDS / 2);
  s = plain(0.3f);
  s.top_p = 0.5f;
  assert_true(compare(&s, VOCAB, 60, 4) < ROUNDS / 2);
  s = plain(0.5f);
  s.min_p = 0.5f;
  assert_true(compare(&s, VOCAB, 60, 4) < ROUNDS / 2);
}

/* All that is filtered, changed and drawn from 40 tokens, all of them known. */
static void small_vocabulary(void **state) {
  (void)state;
  for (int i = 0; i < 64; i++) {
    mr_sampling s = plain(i % 4 ? 0.4f * (float)(i % 4) : 0);
    s.top_k = i / 4 % 2 ? 7 : 0;
    s.top_p = i / 8 % 2 ? 0.8f : 1;
    s.min_p = i / 16 % 2 ? 0.1f : 0;
    s.repetition_penalty = i / 32 ? 1.5f : 1;
    assert_int_equal(compare(&s, SMALL, 4, 12), 0);
  }
}

static void with_the_row(void **state) {
  (void)state;
  mr_bias bias = {5, 3};
  mr_sampling s = plain(0);
  s.bias = &bias;
  s.n_bias = 1;
  assert_int_equal(compare(&s, VOCAB, 9, 4), ROUNDS);
  s = plain(0);
  s.presence_penalty = -1;
  assert_int_equal(compare(&s, VOCAB, 9, 4), ROUNDS);
  s = plain(1);
  s.top_k = 100;
  assert_int_equal(compare(&s, VOCAB, 9, 4), ROUNDS);
  s = plain(1); /* the nucleus of flat logits is wider than what is known */
  s.top_p = 0.99f;
  assert_int_equal(compare(&s, VOCAB, 0.5f, 4), ROUNDS);
  s = plain(1);
  s.repetition_penalty = 1.2f;
  assert_int_equal(compare(&s, VOCAB, 9, 4), ROUNDS);
}

static void scores(void **state) {
  (void)state;
  static float x[VOCAB];
  for (int round = 0; round < ROUNDS; round++) {
    mr_sampled a, b;
    int rank[2];
    for (int i = 0; i < VOCAB; i++)
      x[i] = roundf(uniform() * 40) / 4;
    int32_t id = (int32_t)(seed % VOCAB);
    mr_gpu_ask ask = mr_sampler_ask_for(id);
    mr_gpu_best best;
    put_best(&best, x, VOCAB, &ask);
    assert_int_equal(mr_sampler_score_best(&best, &ask, VOCAB, id, 3, &a, &rank[0]), MR_OK);
    assert_int_equal(mr_sampler_score(kernels, x, VOCAB, id, 3, &b, &rank[1], NULL), MR_OK);
    same(&a, &b);
    assert_int_equal(rank[0], rank[1]);
    int32_t other = best.id[10];
    assert_int_equal(mr_sampler_score_best(&best, &ask, VOCAB, other, 3, &a, &rank[0]), MR_OK);
    assert_int_equal(rank[0], 11);
    ask.probe = best.id[0]; /* not what is wanted now */
    if (rank[1] > MR_GPU_BEST)
      assert_int_equal(mr_sampler_score_best(&best, &ask, VOCAB, id, 3, &a, NULL), MR_E_AGAIN);
  }
}

static void unusable_rows(void **state) {
  (void)state;
  mr_gpu_best b = {.bad = 1};
  mr_sampled out;
  mr_sampling s = plain(0);
  mr_gpu_ask ask = mr_sampler_ask(&s, 0, 0, 0);
  mr_sampler_state st = {0};
  assert_int_equal(mr_sampler_pick_best(&s, &b, &ask, VOCAB, &st, ends, 2, 0, 0, &out), MR_E_DATA);
  assert_int_equal(mr_sampler_score_best(&b, &ask, VOCAB, 3, 0, &out, NULL), MR_E_DATA);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(without_the_row), cmocka_unit_test(small_vocabulary),
      cmocka_unit_test(with_the_row),    cmocka_unit_test(scores),
      cmocka_unit_test(unusable_rows),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
