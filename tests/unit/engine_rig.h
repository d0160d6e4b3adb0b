/* engine_rig.h: engines on the model of tiny_gguf.h, which lies in a directory of its own (temp.h).
 * For tests that include it after cmocka; TINY_GGUF_LAYERS and the like come before. */
#ifndef MR_TESTS_ENGINE_RIG_H
#define MR_TESTS_ENGINE_RIG_H

#include "io/mem.h"
#include "src/engine.h"
#include "tests/unit/temp.h"
#include "tests/unit/tiny_gguf.h"

static char tiny_path[96];
static mr_prompter *tiny;

/* For the set-up of a group of tests; nan_id: as in tiny_gguf.h. */
static inline int tiny_begin(void **state, int nan_id) {
  mr_err err = MR_ERR_INIT;
  if (temp_begin(state))
    return -1;
  snprintf(tiny_path, sizeof tiny_path, "%s/tiny.gguf", temp_dir);
  if (tiny_gguf_write(tiny_path, nan_id) && !mr_prompter_open(&tiny, tiny_path, &err))
    return 0;
  mr_err_print(&err, stderr);
  return -1;
}

static inline int tiny_end(void **state) {
  mr_prompter_close(tiny);
  return temp_end(state) + (int)mr_mem_live();
}

static inline mr_engine_opts tiny_options(const char *device, int step_tokens, uint64_t kv_memory) {
  return (mr_engine_opts){.model_path = tiny_path,
                          .device = device,
                          .compute = MR_COMPUTE_EXACT,
                          .threads = 1,
                          .max_step_tokens = step_tokens,
                          .kv_memory = kv_memory,
                          .kv_type = -1};
}

static inline mr_engine *open_engine(const mr_engine_opts *o, const mr_prompter *p) {
  mr_engine *e = NULL;
  mr_err err = MR_ERR_INIT;
  if (mr_engine_open(&e, o, p, &err))
    fail_msg("open: %s", err.text);
  return e;
}

/* results[tag] of what is done after it. */
static inline void step(mr_engine *e, mr_result **results) {
  mr_err err = MR_ERR_INIT;
  mr_result *r;
  if (mr_engine_step(e, &err))
    fail_msg("step: %s", err.text);
  while ((r = mr_engine_collect(e)))
    results[r->tag] = r;
}

/* All requests, the last one first if backwards. */
static inline void run_all(mr_engine *e, const mr_request *reqs, int n, bool backwards,
                           mr_result **results) {
  mr_err err = MR_ERR_INIT;
  int next = 0;
  do {
    mr_code rc = MR_OK;
    while (next < n && !(rc = mr_engine_admit(e, &reqs[backwards ? n - 1 - next : next], &err)))
      next++;
    if (rc && rc != MR_E_AGAIN)
      fail_msg("admit: %s", err.text);
    step(e, results);
  } while (next < n || mr_engine_active(e));
  mr_engine_stats st;
  mr_engine_stats_get(e, &st);
  assert_int_equal(st.kv_pages_used, 0);
}

static inline mr_request generate(const int32_t *prompt, int n, int max_tokens) {
  mr_request r = {.task = MR_TASK_GENERATE, .prompt = prompt, .n_prompt = n};
  r.sampling = mr_sampling_default;
  r.sampling.temperature = 0;
  r.sampling.max_tokens = max_tokens;
  return r;
}

static inline void same_choice(const mr_choice *x, const mr_choice *y) {
  assert_int_equal(x->n_ids, y->n_ids);
  assert_int_equal(x->n_sampled, y->n_sampled);
  assert_int_equal(x->finish, y->finish);
  assert_int_equal(x->stop_id, y->stop_id);
  assert_true(x->sum_logprob == y->sum_logprob && x->greedy == y->greedy);
  if (x->n_ids)
    assert_memory_equal(x->ids, y->ids, (size_t)x->n_ids * sizeof *x->ids);
  assert_int_equal(x->text_len, y->text_len);
  if (x->text)
    assert_string_equal(x->text, y->text);
  for (int t = 0; x->logprobs && t < x->n_ids; t++) {
    assert_memory_equal(&x->logprobs[t], &y->logprobs[t], sizeof *x->logprobs);
    if (x->offsets)
      assert_int_equal(x->offsets[t], y->offsets[t]);
  }
}

/* To the bit. */
static inline void same_result(const mr_result *a, const mr_result *b) {
  assert_int_equal(a->n_choices, b->n_choices);
  assert_int_equal(a->err.code, b->err.code);
  assert_string_equal(a->err.text, b->err.text);
  for (int i = 0; i < a->n_choices; i++)
    same_choice(&a->choices[i], &b->choices[i]);
  for (int t = 1; a->prompt_logprobs && t < a->n_prompt; t++)
    assert_memory_equal(&a->prompt_logprobs[t], &b->prompt_logprobs[t], sizeof *a->prompt_logprobs);
}

static inline void free_results(mr_result **r, int n) {
  for (int i = 0; i < n; i++) {
    mr_result_free(r[i]);
    r[i] = NULL;
  }
}

#endif
