/* The engine: results against references, batch invariance, choices, stops, scoring, budgets,
 * failures. */
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "io/sys.h"
#include "kernels/kernels.h"
#include "tests/unit/engine_rig.h"

#define NAN_ID 7
#define MAX_RESULTS 32

static int setup(void **state) {
  return tiny_begin(state, NAN_ID);
}

static mr_engine_opts exact(void) {
  return tiny_options("cpu", 128, 2 << 20);
}

static mr_result *run_one(mr_engine *e, mr_request r) {
  mr_result *res = NULL;
  r.tag = 0;
  run_all(e, &r, 1, false, &res);
  return res;
}

/* ---------------------------------------------------------------- against references */

static json_t *load_cases(const char *name) {
  const char *root = getenv("MR_DATA");
  char path[512];
  snprintf(path, sizeof path, "%s/tiny/gguf/%s.cases.jsonl", root ? root : "../shared/data", name);
  FILE *f = fopen(path, "r");
  if (!f)
    return NULL;
  json_t *all = json_array(), *one;
  while ((one = json_loadf(f, JSON_DISABLE_EOF_CHECK, NULL)))
    json_array_append_new(all, one);
  fclose(f);
  return all;
}

static void check_case(const json_t *c, const mr_result *r) {
  json_t *greedy = json_object_get(c, "greedy"), *gap = json_object_get(c, "greedy_gap");
  json_t *logprobs = json_object_get(c, "prompt_logprobs");
  for (size_t t = 1; t < json_array_size(logprobs); t++)
    assert_float_equal(r->prompt_logprobs[t].logprob,
                       json_number_value(json_array_get(logprobs, t)), 2e-3);
  for (size_t t = 0; t < json_array_size(greedy); t++) {
    if (json_number_value(json_array_get(gap, t)) < 1e-3)
      return;
    assert_int_equal(r->choices[0].ids[t], json_integer_value(json_array_get(greedy, t)));
  }
}

static void check_model(const char *name, const json_t *cases) {
  const char *root = getenv("MR_DATA");
  char path[512];
  snprintf(path, sizeof path, "%s/tiny/gguf/%s.gguf", root ? root : "../shared/data", name);
  mr_prompter *p;
  mr_err err = MR_ERR_INIT;
  assert_int_equal(mr_prompter_open(&p, path, &err), MR_OK);
  mr_engine_opts o = exact();
  o.model_path = path;
  o.threads = 2;
  mr_engine *e = open_engine(&o, p);
  int32_t ids[MAX_RESULTS][256];
  mr_request reqs[MAX_RESULTS];
  mr_result *res[MAX_RESULTS] = {0};
  int n = (int)json_array_size(cases);
  assert_in_range(n, 1, MAX_RESULTS);
  for (int i = 0; i < n; i++) {
    json_t *in = json_object_get(json_array_get(cases, (size_t)i), "input_ids");
    for (size_t t = 0; t < json_array_size(in) && t < 256; t++)
      ids[i][t] = (int32_t)json_integer_value(json_array_get(in, t));
    reqs[i] = generate(ids[i], (int)json_array_size(in), 16);
    reqs[i].sampling.ignore_eos = true;
    reqs[i].sampling.prompt_logprobs = 0;
    reqs[i].tag = (uint64_t)i;
  }
  run_all(e, reqs, n, false, res);
  for (int i = 0; i < n; i++) {
    check_case(json_array_get(cases, (size_t)i), res[i]);
    mr_result_free(res[i]);
  }
  mr_engine_close(e);
  mr_prompter_close(p);
}

static void references(void **state) {
  (void)state;
  static const char *const names[] = {"qwen2/qwen2-F32", "llama_gqa/llama_gqa-F32"};
  for (size_t i = 0; i < 2; i++) {
    json_t *cases = load_cases(names[i]);
    if (!cases)
      skip();
    check_model(names[i], cases);
    json_decref(cases);
  }
}

/* ---------------------------------------------------------------- batch invariance */

enum { MIXED = 14 };
static int32_t mixed_ids[MIXED][200];
static const int32_t mixed_cont[] = {9, 8, 6, 200, 201, 5, 4, 3, 2, 1};
static const int mixed_len[] = {1, 4, 5};

static void random_ids(int32_t *ids, int n, uint32_t salt) {
  for (int i = 0; i < n; i++) {
    uint32_t w[4], counter[4] = {(uint32_t)i, salt, 0, 0}, key[2] = {5, 5};
    mr_philox(w, counter, key);
    ids[i] = (int32_t)(w[0] % 256);
    ids[i] += ids[i] == NAN_ID;
  }
}

/* Prompts of many lengths, all kinds of requests. None may come upon the token that spoils it. */
static mr_bias never = {NAN_ID, -1000};
static void mixed_requests(mr_request *reqs) {
  static const int lengths[MIXED] = {1, 2, 31, 32, 33, 64, 65, 96, 100, 5, 17, 130, 180, 40};
  for (int i = 0; i < MIXED; i++) {
    random_ids(mixed_ids[i], lengths[i], (uint32_t)i);
    reqs[i] = generate(mixed_ids[i], lengths[i], 8 + i);
    mr_sampling *s = &reqs[i].sampling;
    reqs[i].tag = (uint64_t)i;
    reqs[i].row_key = 1000 + (uint64_t)i;
    s->bias = &never;
    s->n_bias = 1;
    s->temperature = i % 3 ? 0.8f : 0;
    s->n = i % 5 == 4 ? 3 : 1;
    s->top_p = i % 4 == 1 ? 0.9f : 1;
    s->top_k = i % 4 == 2 ? 20 : 0;
    s->repetition_penalty = i % 4 == 3 ? 1.3f : 1;
    s->logprobs = i % 3 == 1 ? 4 : -1;
    s->prompt_logprobs = i % 5 == 2 ? 2 : -1;
    s->max_tokens = i == 6 ? 0 : s->max_tokens;
    if (i % 6 != 5)
      continue;
    reqs[i].task = MR_TASK_SCORE;
    reqs[i].cont = mixed_cont;
    reqs[i].cont_len = mixed_len;
    reqs[i].n_cont = 3;
  }
  mixed_ids[8][50] = NAN_ID; /* it fails, the others do not */
}

static void invariance(mr_compute compute) {
  static const struct {
    int batch, tokens, threads;
    bool reverse;
  } ways[] = {{64, 512, 1, false}, {1, 7, 2, true}, {3, 33, 2, false}, {5, 64, 1, true}};
  mr_request reqs[MIXED];
  mr_result *res[4][MIXED] = {{0}};
  mixed_requests(reqs);
  for (int w = 0; w < 4; w++) {
    mr_engine_opts o = exact();
    o.compute = compute;
    o.max_batch = ways[w].batch;
    o.max_step_tokens = ways[w].tokens;
    o.threads = ways[w].threads;
    mr_engine *e = open_engine(&o, tiny);
    run_all(e, reqs, MIXED, ways[w].reverse, res[w]);
    mr_engine_close(e);
  }
  for (int i = 0; i < MIXED; i++) {
    assert_int_equal(res[0][i]->err.code, i == 8 ? MR_E_DATA : MR_OK);
    for (int w = 1; w < 4; w++)
      same_result(res[0][i], res[w][i]);
    for (int w = 0; w < 4; w++)
      mr_result_free(res[w][i]);
  }
}

static void invariance_exact(void **state) {
  (void)state;
  invariance(MR_COMPUTE_EXACT);
}

static void invariance_fast(void **state) {
  (void)state;
  invariance(MR_COMPUTE_FAST);
}

/* ---------------------------------------------------------------- shared prefixes */

enum { FAMILY = 18 };
static int32_t family_ids[FAMILY][200];

/* Three heads of 100, 64 and 40 tokens, six rows each; two rows are alike, some go on alike past
 * the head, and all kinds of requests are there. */
static void family_requests(mr_request *reqs) {
  static const int heads[3] = {100, 64, 40}, tails[6] = {7, 60, 60, 33, 1, 12};
  for (int i = 0; i < FAMILY; i++) {
    int head = heads[i % 3], k = i / 3, n = head + tails[k];
    random_ids(family_ids[i], head, 70 + (uint32_t)(i % 3));
    random_ids(family_ids[i] + head, tails[k], 80 + (uint32_t)i);
    if (k == 2)
      memcpy(family_ids[i], family_ids[i - 3], (size_t)n * sizeof(int32_t));
    if (k == 5)
      memcpy(family_ids[i], family_ids[i - 6], (size_t)(head + 9) * sizeof(int32_t));
    reqs[i] = generate(family_ids[i], n, 6 + i);
    reqs[i].tag = (uint64_t)i;
    reqs[i].row_key = 2000 + (uint64_t)i;
    mr_sampling *s = &reqs[i].sampling;
    s->bias = &never;
    s->n_bias = 1;
    s->temperature = i % 2 ? 0.8f : 0;
    s->n = i % 7 == 3 ? 3 : 1;
    s->prompt_logprobs = i == 4 ? 2 : -1;
    if (i % 5 != 4)
      continue;
    reqs[i].task = MR_TASK_SCORE;
    reqs[i].cont = mixed_cont;
    reqs[i].cont_len = mixed_len;
    reqs[i].n_cont = 3;
  }
}

static mr_engine_stats family_run_on(const mr_engine_opts *o, const mr_prompter *p, bool reverse,
                                     mr_result **res) {
  mr_request reqs[FAMILY];
  mr_engine_stats st;
  family_requests(reqs);
  mr_engine *e = open_engine(o, p);
  run_all(e, reqs, FAMILY, reverse, res);
  mr_engine_stats_get(e, &st);
  mr_engine_close(e);
  return st;
}

static mr_engine_stats family_run(const mr_engine_opts *o, bool reverse, mr_result **res) {
  return family_run_on(o, tiny, reverse, res);
}

static void same_family(mr_result **a, mr_result **b) {
  for (int i = 0; i < FAMILY; i++) {
    assert_int_equal(a[i]->err.code, MR_OK);
    same_result(a[i], b[i]);
    mr_result_free(b[i]);
  }
}

static void shared_prefixes(void **state) {
  (void)state;
  mr_engine_opts o = exact();
  mr_result *base[FAMILY] = {0}, *res[FAMILY] = {0};
  o.no_prefix_sharing = true;
  mr_engine_stats alone = family_run(&o, false, base), st;
  assert_int_equal(alone.prompt_tokens_shared, 0);
  o.no_prefix_sharing = false;
  for (int way = 0; way < 6; way++) {
    o.max_step_tokens = way % 3 == 0 ? 512 : way % 3 == 1 ? 128 : 19;
    o.max_batch = way % 2 ? 4 : 64;
    o.threads = 1 + way % 2;
    o.kv_memory = way < 3 ? 2 << 20 : 160 << 10; /* 20 pages: the tree has to give some back */
    st = family_run(&o, way > 3, res);
    same_family(base, res);
    assert_int_equal(st.prompt_tokens_computed + st.prompt_tokens_shared,
                     alone.prompt_tokens_computed);
    assert_true(st.kv_pages_peak <= st.kv_pages_total);
    if (way < 3) /* 5 * (96 + 64 + 32) in whole blocks but for the row whose logits are all wanted
                  */
      assert_true(st.prompt_tokens_shared >= 5 * (96 + 64 + 32) - 64);
  }
  free_results(base, FAMILY);
}

/* Rows that are admitted while another computes their head wait for it; what they have in common
 * with a stored block is copied. */
static void siblings(void **state) {
  (void)state;
  mr_engine_opts o = exact();
  int32_t ids[3][150];
  mr_engine_stats st;
  mr_result *res[3] = {0};
  mr_request reqs[3];
  for (int i = 0; i < 3; i++) {
    random_ids(ids[i], 110, 90);
    random_ids(ids[i] + 110, 40, 91 + (uint32_t)i);
    reqs[i] = generate(ids[i], 150, 4);
    reqs[i].tag = (uint64_t)i;
  }
  mr_engine *e = open_engine(&o, tiny);
  run_all(e, reqs, 3, false, res);
  mr_engine_stats_get(e, &st);
  assert_int_equal(st.prompt_tokens_computed, 150 + 40 + 40); /* 96 by reference, 14 in a copy */
  assert_int_equal(st.prompt_tokens_shared, 2 * 110);
  free_results(res, 3);
  mr_engine_close(e);
}

/* ---------------------------------------------------------------- memory runs out */

static mr_sys bad_disk;
static int disk_calls, disk_fails_at; /* a call of pwrite or pread; 0: none */
static int disk_errors;
static bool disk_flips;

static ssize_t bad_pwrite(int fd, const void *buf, size_t n, off_t at) {
  if (!disk_flips && disk_fails_at && ++disk_calls >= disk_fails_at) {
    disk_errors++;
    errno = ENOSPC;
    return -1;
  }
  return mr_sys_os.pwrite(fd, buf, n, at);
}

static ssize_t bad_pread(int fd, void *buf, size_t n, off_t at) {
  ssize_t got = mr_sys_os.pread(fd, buf, n, at);
  if (disk_flips && ++disk_calls % disk_fails_at == 0 && got > 100) {
    disk_errors++;
    ((uint8_t *)buf)[100] ^= 1;
  }
  return got;
}

static void policies_of(mr_kv_type type, uint64_t kv_memory, int n) {
  static const mr_kv_policy all[] = {MR_KV_FEWER, MR_KV_AUTO, MR_KV_SPILL, MR_KV_RECOMPUTE};
  mr_engine_opts o = exact();
  mr_result *base[FAMILY] = {0}, *res[FAMILY] = {0};
  o.kv_type = (int)type;
  family_run(&o, false, base);
  o.kv_memory = kv_memory;
  o.spill_dir = "/tmp";
  for (int i = 0; i < n; i++) {
    o.kv_policy = all[i % 4];
    o.no_prefix_sharing = i / 4 % 2;
    o.kv_disk = o.kv_policy == MR_KV_SPILL || i / 8 % 2 ? 8 << 20 : 0;
    o.max_step_tokens = i / 16 ? 40 : 200;
    o.threads = 1 + i % 2;
    mr_engine_stats st = family_run(&o, i / 4 == 3, res);
    same_family(base, res);
    bool spill = o.kv_policy == MR_KV_SPILL;
    if (o.kv_policy == MR_KV_FEWER)
      assert_true(st.preemptions == 0 && st.recomputed_tokens == 0);
    if (spill || o.kv_policy == MR_KV_RECOMPUTE)
      assert_true(st.preemptions > 0);
    assert_true(!spill || st.kv_spill_bytes > 0);
    assert_true(!spill || !o.no_prefix_sharing || st.kv_fetch_bytes > 0);
    assert_int_equal(st.kv_failures, 0);
  }
  free_results(base, FAMILY);
}

/* All policies, with and without the tree, in 12 pages of memory: the same results to the bit. With
 * a type that packs blocks, each sequence holds some pages more. */
static void policies(void **state) {
  (void)state;
  mr_engine_info info;
  mr_err err = MR_ERR_INIT;
  mr_engine_opts o = exact();
  policies_of(MR_KV_F32, 12 << 14, 32);
  o.kv_type = MR_KV_Q4;
  assert_int_equal(mr_engine_estimate(&o, &info, &err), MR_OK);
  assert_true(info.kv_own_pages > 0);
  uint64_t page = info.kv_bytes_per_token * MR_KV_BLOCK;
  policies_of(MR_KV_Q4, (uint64_t)(6 + 5 * info.kv_own_pages) * page, 16);
}

/* A disk that is full, or gives back other bits: computed again, the same results. */
static void bad_disks(void **state) {
  (void)state;
  mr_engine_opts o = exact();
  mr_result *base[FAMILY] = {0}, *res[FAMILY] = {0};
  family_run(&o, false, base);
  o.kv_memory = 12 << 14;
  o.spill_dir = "/tmp";
  o.kv_policy = MR_KV_SPILL;
  int all_errors = 0; /* how often the disk is asked depends on how fast it is */
  bad_disk = mr_sys_os;
  bad_disk.pwrite = bad_pwrite;
  bad_disk.pread = bad_pread;
  for (int i = 0; i < 12; i++) {
    o.kv_disk = i % 4 == 3 ? 5 << 14 : 8 << 20; /* room for five pages */
    o.no_prefix_sharing = i % 2;
    disk_flips = i >= 6;
    disk_calls = disk_errors = 0;
    disk_fails_at = disk_flips ? 1 + i % 2 : 1 + i % 3;
    mr_sys_now = &bad_disk;
    mr_engine_stats st = family_run(&o, false, res);
    mr_sys_now = &mr_sys_os;
    same_family(base, res);
    assert_int_equal(st.kv_failures, disk_errors);
    assert_true(!disk_errors || st.recomputed_tokens > 0);
    all_errors += disk_errors;
  }
  assert_true(all_errors > 12);
  free_results(base, FAMILY);
}

/* Whatever runs out, with and without the tree: the same results. */
static void family_in_little_memory(mr_engine_opts o, const mr_prompter *p) {
  mr_result *base[FAMILY] = {0}, *res[FAMILY] = {0};
  o.no_prefix_sharing = true;
  family_run_on(&o, p, false, base);
  for (int i = 0; i < 16; i++) {
    o.no_prefix_sharing = i / 4 % 2;
    o.kv_policy = (mr_kv_policy)(i % 4);
    o.max_step_tokens = i < 8 ? 48 : 11;
    o.kv_memory = 12 << 14;
    o.kv_disk = 8 << 20;
    family_run_on(&o, p, i % 2, res);
    same_family(base, res);
  }
  free_results(base, FAMILY);
}

/* Pages behind a window are given back while a row runs; what it says is what a prompt of the same
 * tokens, computed at once, gives. */
static void check_windows(const char *path, const mr_prompter *p, uint64_t least, uint64_t most) {
  mr_engine_opts o = exact();
  o.model_path = path;
  o.no_prefix_sharing = true;
  int32_t ids[TINY_CONTEXT];
  random_ids(ids, 100, 5);
  mr_request r = generate(ids, 100, 120);
  r.sampling.ignore_eos = true;
  r.sampling.logprobs = 3;
  r.sampling.bias = &never;
  r.sampling.n_bias = 1;
  mr_engine *e = open_engine(&o, p);
  mr_engine_stats st;
  mr_result *a = run_one(e, r);
  mr_engine_stats_get(e, &st);
  assert_in_range(st.kv_pages_peak, least, most);
  memcpy(ids + 100, a->choices[0].ids, 119 * sizeof *ids);
  mr_request whole = generate(ids, 219, 0);
  whole.sampling.prompt_logprobs = 3;
  o.max_step_tokens = 256;
  mr_engine *f = open_engine(&o, p);
  mr_result *b = run_one(f, whole);
  for (int i = 1; i < 119; i++)
    assert_true(a->choices[0].logprobs[i].top_id[0] == b->prompt_logprobs[100 + i].top_id[0] ||
                a->choices[0].logprobs[i].top_id[0] == NAN_ID);
  mr_result_free(a);
  mr_result_free(b);
  mr_engine_close(e);
  mr_engine_close(f);
  family_in_little_memory(o, p);
}

/* In all layers; and in one of two, where a block has a page of each. */
static void windows(void **state) {
  (void)state;
  char path[sizeof tiny_path + 8];
  mr_prompter *p = NULL;
  mr_err err = MR_ERR_INIT;
  snprintf(path, sizeof path, "%s.window", tiny_path);
  tiny_window = 40;
  for (int i = 0; i < 2; i++) {
    tiny_mixed = i;
    assert_true(tiny_gguf_write(path, NAN_ID));
    assert_int_equal(mr_prompter_open(&p, path, &err), MR_OK);
    if (i)
      check_windows(path, p, 7 + 2, 7 + 5);
    else
      check_windows(path, p, 2, 5); /* of the seven that it is long */
    mr_prompter_close(p);
  }
  tiny_window = tiny_mixed = 0;
  unlink(path);
}

static void policy_refused(void **state) {
  (void)state;
  mr_engine_opts o = exact();
  mr_engine *e;
  mr_err err = MR_ERR_INIT;
  o.kv_policy = MR_KV_SPILL;
  assert_int_equal(mr_engine_open(&e, &o, tiny, &err), MR_E_USAGE);
  assert_non_null(strstr(err.text, "--kv-disk"));
  mr_err_clear(&err);
  o.kv_disk = 1 << 20;
  o.spill_dir = "/nowhere/at/all";
  assert_true(mr_engine_open(&e, &o, tiny, &err) != MR_OK);
  assert_non_null(strstr(err.file, "/nowhere"));
}

/* ---------------------------------------------------------------- one engine for the rest */

static mr_engine *open_tiny(void) {
  mr_engine_opts o = exact();
  o.max_step_tokens = 24;
  return open_engine(&o, tiny);
}

static const int32_t hello[] = {'H', 'e', 'l', 'l', 'o'};

static void choices(void **state) {
  (void)state;
  mr_engine *e = open_tiny();
  mr_request r = generate(hello, 5, 20);
  r.sampling.temperature = 1;
  r.sampling.ignore_eos = true;
  r.sampling.seed = 9;
  r.sampling.has_seed = true;
  mr_result *one = run_one(e, r);
  r.sampling.n = 3;
  mr_result *three = run_one(e, r);
  assert_int_equal(three->n_choices, 3);
  const mr_choice *c = three->choices;
  assert_memory_equal(c[0].ids, one->choices[0].ids, 20 * sizeof(int32_t));
  for (int i = 0; i < 3; i++)
    assert_int_equal(c[i].n_ids, 20);
  assert_memory_not_equal(c[0].ids, c[1].ids, 20 * sizeof(int32_t));
  assert_memory_not_equal(c[1].ids, c[2].ids, 20 * sizeof(int32_t));
  r.sampling.temperature = 0; /* greedy ones are alike */
  mr_result *alike = run_one(e, r);
  assert_memory_equal(alike->choices[0].ids, alike->choices[2].ids, 20 * sizeof(int32_t));
  mr_engine_stats st;
  mr_engine_stats_get(e, &st);
  assert_int_equal(st.prompt_tokens_computed, 15); /* each prompt once */
  assert_int_equal(st.prompt_tokens_shared, 0);    /* less than a block */
  mr_result_free(one);
  mr_result_free(three);
  mr_result_free(alike);
  mr_engine_close(e);
}

/* A greedy text with W-tokens preferred, so that it is ASCII and tokens hold two characters. */
static mr_request wordy(mr_bias *bias) {
  for (int i = 0; i < 26; i++)
    bias[i] = (mr_bias){257 + i, 60};
  mr_request r = generate(hello, 5, 24);
  r.sampling.temperature = 1;
  r.sampling.bias = bias;
  r.sampling.n_bias = 26;
  r.sampling.logprobs = 0;
  return r;
}

static void stop_strings(void **state) {
  (void)state;
  mr_engine *e = open_tiny();
  mr_bias bias[26];
  mr_request r = wordy(bias);
  mr_result *base = run_one(e, r);
  const mr_choice *c = &base->choices[0];
  assert_int_equal(c->text_len, 48);
  assert_int_equal(c->finish, MR_FINISH_LENGTH);
  assert_int_equal(c->offsets[5], 10);
  char stop[4], *stops[] = {"nowhere", stop};
  memcpy(stop, c->text + 11, 3); /* the end of one token and the next one */
  stop[3] = 0;
  size_t first = (size_t)(strstr(c->text, stop) - c->text);
  r.sampling.stop = stops;
  r.sampling.n_stop = 2;
  mr_result *cut = run_one(e, r);
  const mr_choice *d = &cut->choices[0];
  assert_int_equal(d->finish, MR_FINISH_STOP);
  assert_int_equal(d->text_len, first);
  assert_memory_equal(d->text, c->text, first);
  assert_int_equal(d->n_ids, (first + 3 + 1) / 2); /* the token that completed it is counted */
  assert_true((size_t)d->offsets[d->n_ids - 1] <= d->text_len);
  r.sampling.include_stop = true;
  mr_result *with = run_one(e, r);
  assert_int_equal(with->choices[0].text_len, first + 3);
  r.sampling.min_tokens = 20; /* what came before does not count */
  mr_result *later = run_one(e, r);
  assert_true(later->choices[0].n_ids >= 20);
  assert_memory_equal(later->choices[0].ids, c->ids, 20 * sizeof(int32_t));
  mr_result_free(base);
  mr_result_free(cut);
  mr_result_free(with);
  mr_result_free(later);
  mr_engine_close(e);
}

static void end_tokens(void **state) {
  (void)state;
  mr_engine *e = open_tiny();
  mr_bias eos = {TINY_EOS, 1000};
  mr_request r = generate(hello, 5, 6);
  r.sampling.bias = &eos;
  r.sampling.n_bias = 1;
  mr_result *a = run_one(e, r);
  assert_int_equal(a->choices[0].n_ids, 0);
  assert_int_equal(a->choices[0].n_sampled, 1);
  assert_int_equal(a->choices[0].finish, MR_FINISH_STOP);
  assert_int_equal(a->choices[0].stop_id, TINY_EOS);
  assert_string_equal(a->choices[0].text, "");
  r.sampling.min_tokens = 3;
  mr_result *b = run_one(e, r);
  assert_int_equal(b->choices[0].n_ids, 3);
  assert_int_equal(b->choices[0].finish, MR_FINISH_STOP);
  r.sampling.min_tokens = 0;
  r.sampling.ignore_eos = true;
  mr_result *c = run_one(e, r);
  assert_int_equal(c->choices[0].n_ids, 6);
  assert_int_equal(c->choices[0].ids[5], TINY_EOS);
  assert_int_equal(c->choices[0].finish, MR_FINISH_LENGTH);
  assert_string_equal(c->choices[0].text, ""); /* control tokens are no text */
  int32_t stop = TINY_EOS;
  r.sampling.stop_ids = &stop;
  r.sampling.n_stop_ids = 1;
  mr_result *d = run_one(e, r);
  assert_int_equal(d->choices[0].finish, MR_FINISH_STOP);
  assert_int_equal(d->choices[0].stop_id, TINY_EOS);
  mr_result_free(a);
  mr_result_free(b);
  mr_result_free(c);
  mr_result_free(d);
  mr_engine_close(e);
}

/* Half a character at the end comes out as U+FFFD; a whole one in three tokens comes out once. */
static void characters(void **state) {
  (void)state;
  mr_engine *e = open_tiny();
  mr_bias half = {0xE2, 1000};
  mr_request r = generate(hello, 5, 1);
  r.sampling.bias = &half;
  r.sampling.n_bias = 1;
  mr_result *a = run_one(e, r);
  assert_string_equal(a->choices[0].text, "\xEF\xBF\xBD");
  assert_int_equal(a->choices[0].n_ids, 1);
  mr_result_free(a);
  mr_engine_close(e);
}

static void scoring(void **state) {
  (void)state;
  mr_engine *e = open_tiny();
  int32_t ids[90];
  random_ids(ids, 90, 50);
  mr_request whole = generate(ids, 90, 0);
  whole.sampling.prompt_logprobs = 3;
  mr_result *w = run_one(e, whole);
  assert_int_equal(w->choices[0].n_ids, 0);
  assert_int_equal(w->choices[0].finish, MR_FINISH_LENGTH);
  mr_request score = {.task = MR_TASK_SCORE, .prompt = ids, .n_prompt = 40};
  int len[2] = {50, 1};
  int32_t cont[51];
  memcpy(cont, ids + 40, 50 * sizeof *cont);
  score.sampling = mr_sampling_default;
  score.sampling.temperature = 0;
  score.sampling.logprobs = 3;
  score.cont = cont;
  score.cont_len = len;
  score.n_cont = 2;
  mr_result *next = run_one(e, generate(ids, 40, 1));
  cont[50] = next->choices[0].ids[0]; /* the greedy token */
  mr_result *s = run_one(e, score);
  double sum = 0;
  for (int i = 0; i < 50; i++) {
    assert_memory_equal(&s->choices[0].logprobs[i], &w->prompt_logprobs[40 + i],
                        sizeof(mr_sampled));
    assert_int_equal(s->choices[0].ids[i], ids[40 + i]);
    sum += w->prompt_logprobs[40 + i].logprob;
  }
  assert_int_equal(s->choices[0].n_ids, 50);
  assert_true(s->choices[0].sum_logprob == sum && !s->choices[0].greedy);
  assert_true(s->choices[1].greedy && s->choices[1].logprobs[0].top_id[0] == cont[50]);
  mr_result_free(w);
  mr_result_free(next);
  mr_result_free(s);
  mr_engine_close(e);
}

static void budgets(void **state) {
  (void)state;
  mr_engine_opts o = exact();
  mr_engine_info info;
  mr_err err = MR_ERR_INIT;
  assert_int_equal(mr_engine_estimate(&o, &info, &err), MR_OK);
  uint64_t page = info.kv_bytes_per_token * MR_KV_BLOCK;
  o.kv_memory = 4 * page + 5;
  mr_engine *e = open_engine(&o, tiny);
  assert_int_equal(mr_engine_describe(e)->kv_memory, 4 * page);
  mr_request r = generate(hello, 5, 60); /* 64 tokens are fed: two pages */
  r.sampling.ignore_eos = true;
  assert_int_equal(mr_engine_admit(e, &r, &err), MR_OK);
  assert_int_equal(mr_engine_admit(e, &r, &err), MR_OK);
  assert_int_equal(mr_engine_admit(e, &r, &err), MR_E_AGAIN);
  assert_int_equal(err.code, MR_OK);
  r.sampling.max_tokens = 125; /* 129 tokens: five pages */
  assert_int_equal(mr_engine_admit(e, &r, &err), MR_E_DATA);
  assert_non_null(strstr(err.text, "kv-memory"));
  mr_err_clear(&err);
  mr_result *res;
  for (int done = 0; done < 2;) {
    assert_int_equal(mr_engine_step(e, &err), MR_OK);
    while ((res = mr_engine_collect(e))) {
      assert_int_equal(res->choices[0].n_ids, 60);
      mr_result_free(res);
      done++;
    }
  }
  r.sampling.max_tokens = 124; /* just fits */
  res = run_one(e, r);
  assert_int_equal(res->choices[0].n_ids, 124);
  mr_result_free(res);
  r.sampling.max_tokens = 28; /* a prompt's page and three copies of it: all of the budget */
  r.sampling.n = 4;
  res = run_one(e, r);
  assert_int_equal(res->choices[3].n_ids, 28);
  mr_result_free(res);
  mr_engine_close(e);
  o.kv_memory = page - 1;
  assert_int_equal(mr_engine_open(&e, &o, tiny, &err), MR_E_DATA);
}

static void refused(void **state) {
  (void)state;
  mr_engine *e = open_tiny();
  int32_t bad[] = {1, TINY_VOCAB}, ids[TINY_CONTEXT + 1] = {0};
  int zero = 0;
  mr_request reqs[] = {generate(bad, 2, 4),
                       generate(hello, 0, 4),
                       generate(ids, TINY_CONTEXT + 1, 0),
                       generate(hello, 5, TINY_CONTEXT - 4),
                       generate(hello, 5, 1),
                       generate(hello, 5, 1),
                       generate(hello, 5, 1)};
  reqs[4].sampling.n = 0;
  reqs[5].sampling.logprobs = 21;
  reqs[6].task = MR_TASK_SCORE;
  reqs[6].cont = hello;
  reqs[6].cont_len = &zero;
  reqs[6].n_cont = 1;
  for (size_t i = 0; i < sizeof reqs / sizeof *reqs; i++) {
    mr_err err = MR_ERR_INIT;
    assert_int_equal(mr_engine_admit(e, &reqs[i], &err), MR_E_DATA);
    assert_true(strlen(err.text) > 10);
  }
  assert_int_equal(mr_engine_active(e), 0);
  assert_int_equal(mr_engine_step(e, NULL), MR_OK); /* nothing to do */
  mr_engine_close(e);
}

static void without_vocabulary(void **state) {
  (void)state;
  mr_engine_opts o = exact();
  mr_engine *e = open_engine(&o, NULL);
  mr_err err = MR_ERR_INIT;
  char *stop = "x";
  mr_request r = generate(hello, 5, 4);
  r.sampling.logprobs = 1;
  mr_result *res = run_one(e, r);
  assert_int_equal(res->choices[0].n_ids, 4);
  assert_null(res->choices[0].text);
  assert_null(res->choices[0].offsets);
  mr_result_free(res);
  r.sampling.stop = &stop;
  r.sampling.n_stop = 1;
  assert_int_equal(mr_engine_admit(e, &r, &err), MR_E_DATA);
  mr_engine_close(e);
}

static void devices_and_estimate(void **state) {
  (void)state;
  mr_engine_opts o = exact();
  o.kv_memory = 0;
  o.max_step_tokens = 0;
  mr_engine_info a;
  mr_err err = MR_ERR_INIT;
  assert_int_equal(mr_engine_estimate(&o, &a, &err), MR_OK);
  mr_engine *e = open_engine(&o, tiny);
  const mr_engine_info *b = mr_engine_describe(e);
  assert_int_equal(a.max_batch, b->max_batch);
  assert_int_equal(a.max_step_tokens, b->max_step_tokens);
  assert_int_equal(a.kv_tokens, b->kv_tokens);
  assert_int_equal(a.packed_bytes, b->packed_bytes);
  assert_string_equal(a.arch, "llama");
  assert_string_equal(b->kv_type, "f32");
  assert_int_equal(b->context, TINY_CONTEXT);
  assert_true(b->flops_per_output_token > b->flops_per_prompt_token && b->load_s > 0);
  mr_engine_close(e);
  o.device = "cuda";
  assert_int_equal(mr_engine_open(&e, &o, tiny, &err), MR_E_UNAVAILABLE);
  assert_non_null(strstr(err.text, "cuda"));
  mr_err_clear(&err);
  o.device = "cpu";
  o.model_path = "/nowhere.gguf";
  assert_int_equal(mr_engine_open(&e, &o, tiny, &err), MR_E_NOINPUT);
}

/* Closed with requests waiting, in flight and finished: nothing leaks. */
static void closed_midway(void **state) {
  (void)state;
  mr_request reqs[MIXED];
  mr_err err = MR_ERR_INIT;
  mixed_requests(reqs);
  for (int steps = 0; steps < 40; steps += 3) {
    int64_t before = mr_mem_live();
    mr_engine *e = open_tiny();
    for (int i = 0; i < MIXED; i++)
      assert_int_equal(mr_engine_admit(e, &reqs[i], &err), MR_OK);
    for (int i = 0; i < steps; i++)
      assert_int_equal(mr_engine_step(e, &err), MR_OK);
    mr_engine_close(e);
    assert_int_equal(mr_mem_live(), before);
  }
}

/* Closed while requests are parked or come back from the disk. */
static void closed_parked(void **state) {
  (void)state;
  mr_request reqs[FAMILY];
  mr_err err = MR_ERR_INIT;
  mr_engine_opts o = exact();
  family_requests(reqs);
  o.kv_memory = 12 << 14;
  o.kv_disk = 8 << 20;
  o.spill_dir = "/tmp";
  o.kv_policy = MR_KV_SPILL;
  o.no_prefix_sharing = true;
  int parked = 0;
  for (int steps = 1; steps < 40; steps += 2) {
    int64_t before = mr_mem_live();
    mr_engine_stats st;
    mr_engine *e = open_engine(&o, tiny);
    for (int i = 0; i < FAMILY && mr_engine_admit(e, &reqs[i], &err) == MR_OK; i++)
      ;
    for (int i = 0; i < steps; i++)
      assert_int_equal(mr_engine_step(e, &err), MR_OK);
    mr_engine_stats_get(e, &st);
    parked += st.preemptions > 0;
    mr_engine_close(e);
    assert_int_equal(mr_mem_live(), before);
  }
  assert_true(parked > 5);
}

/* The n-th allocation fails: open, admit and step say so, and nothing leaks. */
static void out_of_memory(void **state) {
  (void)state;
  mr_engine_opts o = exact();
  mr_request reqs[MIXED];
  mixed_requests(reqs);
  int64_t before = mr_mem_live();
  bool done = false;
  for (int64_t n = 0; !done; n++) {
    mr_err err = MR_ERR_INIT;
    mr_engine *e = NULL;
    mr_mem_fail_after(n);
    mr_code rc = mr_engine_open(&e, &o, tiny, &err);
    for (int i = 0; i < MIXED && !rc; i++)
      rc = mr_engine_admit(e, &reqs[i], &err);
    for (int i = 0; i < 4 && !rc; i++)
      rc = mr_engine_step(e, &err);
    mr_mem_fail_after(-1);
    done = rc == MR_OK;
    if (!done)
      assert_int_equal(rc, MR_E_NOMEM);
    mr_engine_close(e);
    assert_int_equal(mr_mem_live(), before);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(references),
      cmocka_unit_test(invariance_exact),
      cmocka_unit_test(invariance_fast),
      cmocka_unit_test(shared_prefixes),
      cmocka_unit_test(siblings),
      cmocka_unit_test(policies),
      cmocka_unit_test(bad_disks),
      cmocka_unit_test(windows),
      cmocka_unit_test(policy_refused),
      cmocka_unit_test(choices),
      cmocka_unit_test(stop_strings),
      cmocka_unit_test(end_tokens),
      cmocka_unit_test(characters),
      cmocka_unit_test(scoring),
      cmocka_unit_test(budgets),
      cmocka_unit_test(refused),
      cmocka_unit_test(without_vocabulary),
      cmocka_unit_test(devices_and_estimate),
      cmocka_unit_test(closed_midway),
      cmocka_unit_test(closed_parked),
      cmocka_unit_test(out_of_memory),
  };
  return cmocka_run_group_tests(tests, setup, tiny_end);
}
