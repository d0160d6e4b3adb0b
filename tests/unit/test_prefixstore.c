/* Prefixes that outlast a run: the files, and an engine that starts warm. */
#include <dirent.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

#include "io/cachedir.h"
#include "io/mem.h"
#include "src/engine.h"
#include "src/prefixstore.h"
#include "temp.h"
#include "tests/unit/tiny_gguf.h"

enum { BLOCK = MR_KV_BLOCK, PAGE = 5000, ROWS = 8, LENGTH = 170, HEAD = 140 };

static char cache[300], model[300];
static int32_t tokens[4 * BLOCK];
static uint8_t page[PAGE], got[PAGE];

static mr_prefixstore *open_store(const char *key, uint64_t max) {
  mr_prefixstore *s = NULL;
  mr_err err = MR_ERR_INIT;
  if (mr_prefixstore_open(&s, cache, key, PAGE, max, &err))
    fail_msg("%s", err.text);
  return s;
}

/* Calls fn for each file of the cache, with its number; returns how many there are. */
static int each_file(void (*fn)(const char *path, int i)) {
  char dir[600], path[900];
  int n = 0;
  DIR *d = opendir(cache);
  for (struct dirent *e; d && (e = readdir(d));) {
    if (e->d_name[0] == '.')
      continue;
    snprintf(dir, sizeof dir, "%s/%s", cache, e->d_name);
    DIR *k = opendir(dir);
    for (struct dirent *f; k && (f = readdir(k));) {
      if (f->d_name[0] == '.')
        continue;
      snprintf(path, sizeof path, "%s/%s", dir, f->d_name);
      if (fn)
        fn(path, n);
      n++;
    }
    if (k)
      closedir(k);
  }
  if (d)
    closedir(d);
  return n;
}

static void remove_file(const char *path, int i) {
  (void)i;
  unlink(path);
}

static void what_was_put_comes_back(void **state) {
  (void)state;
  mr_prefixstore *s = open_store("a", 1 << 30);
  for (int i = 0; i < 4 * BLOCK; i++)
    tokens[i] = i;
  memset(page, 7, sizeof page);
  assert_false(mr_prefixstore_get(s, 0, tokens, BLOCK, got));
  mr_prefixstore_put(s, 0, tokens, BLOCK, page);
  assert_true(mr_prefixstore_get(s, 0, tokens, BLOCK, got));
  assert_memory_equal(page, got, PAGE);
  assert_false(mr_prefixstore_get(s, 0, tokens + 1, BLOCK, got));
  assert_false(mr_prefixstore_get(s, 7, tokens, BLOCK, got));
  assert_false(mr_prefixstore_get(s, 0, tokens, 2 * BLOCK, got));
  mr_prefixstore_close(s);
  s = open_store("b", 1 << 30); /* another model */
  assert_false(mr_prefixstore_get(s, 0, tokens, BLOCK, got));
  mr_prefixstore_close(s);
  assert_int_equal(each_file(remove_file), 1);
}

static void flip(const char *path, int i) {
  struct stat st;
  int fd = open(path, O_RDWR);
  char c;
  fstat(fd, &st);
  off_t at = i % 3 == 0 ? st.st_size - 1 : i % 3 == 1 ? 50 : 0;
  assert_int_equal(pread(fd, &c, 1, at), 1);
  c ^= 1;
  assert_int_equal(pwrite(fd, &c, 1, at), 1);
  if (i % 4 == 3)
    assert_int_equal(ftruncate(fd, st.st_size / 2), 0);
  close(fd);
}

static void damaged_files_are_written_anew(void **state) {
  (void)state;
  mr_prefixstore_stats st;
  mr_prefixstore *s = open_store("a", 1 << 30);
  for (int i = 0; i < 4; i++) {
    tokens[0] = i;
    mr_prefixstore_put(s, 0, tokens, BLOCK, page);
  }
  assert_int_equal(each_file(flip), 4);
  for (int i = 0; i < 4; i++) {
    tokens[0] = i;
    assert_false(mr_prefixstore_get(s, 0, tokens, BLOCK, got));
    mr_prefixstore_put(s, 0, tokens, BLOCK, page);
    assert_true(mr_prefixstore_get(s, 0, tokens, BLOCK, got));
  }
  mr_prefixstore_stats_get(s, &st);
  assert_int_equal(st.bad, 4);
  mr_prefixstore_close(s);
  assert_int_equal(each_file(remove_file), 4);
}

static void age(const char *path, int i) {
  struct timespec t[2] = {{1000 + i, 0}, {1000 + i, 0}};
  assert_int_equal(utimensat(AT_FDCWD, path, t, 0), 0);
}

/* The one that was used last stays, and what is not ours. */
static void the_directory_is_kept_small(void **state) {
  (void)state;
  char other[600];
  mr_prefixstore *s = open_store("a", 3 * (PAGE + 400));
  for (int i = 0; i < 6; i++) {
    tokens[0] = i;
    mr_prefixstore_put(s, 0, tokens, BLOCK, page);
  }
  each_file(age);
  tokens[0] = 3;
  assert_true(mr_prefixstore_get(s, 0, tokens, BLOCK, got));
  snprintf(other, sizeof other, "%s/a/letter.txt", cache);
  int fd = open(other, O_CREAT | O_WRONLY, 0666);
  assert_int_equal(ftruncate(fd, 100000), 0);
  close(fd);
  mr_prefixstore_close(s);
  assert_int_equal(each_file(NULL), 4);
  s = open_store("a", 1 << 20);
  assert_true(mr_prefixstore_get(s, 0, tokens, BLOCK, got));
  mr_prefixstore_close(s);
  each_file(remove_file);
}

static void a_directory_that_cannot_be(void **state) {
  (void)state;
  mr_prefixstore *s = NULL;
  mr_err err = MR_ERR_INIT;
  assert_int_equal(mr_prefixstore_open(&s, "/no/such/place", "a", PAGE, 1, &err), MR_E_CANTCREATE);
  for (int64_t n = 0; n < 3; n++) {
    mr_mem_fail_after(n);
    mr_code rc = mr_prefixstore_open(&s, cache, "a", PAGE, 1, &err);
    mr_mem_fail_after(-1);
    assert_int_equal(rc, MR_E_NOMEM);
  }
}

/* ---------------------------------------------------------------- an engine */

static int32_t ids[ROWS][LENGTH];

static void run_rows(const char *digest, bool with_cache, mr_result **res, mr_engine_stats *st) {
  mr_err err = MR_ERR_INIT;
  mr_engine *e;
  mr_engine_opts o = {.model_path = model,
                      .device = "cpu",
                      .compute = MR_COMPUTE_EXACT,
                      .threads = 1,
                      .max_step_tokens = 64,
                      .max_batch = 3,
                      .kv_memory = 24 << 14,
                      .kv_type = -1,
                      .prefix_cache = with_cache ? cache : NULL,
                      .prefix_cache_bytes = 1 << 30,
                      .model_digest = digest};
  assert_int_equal(mr_engine_open(&e, &o, NULL, &err), MR_OK);
  for (int i = 0; i < ROWS || mr_engine_active(e);) {
    mr_request r = {.tag = (uint64_t)i, .row_key = (uint64_t)i, .n_prompt = LENGTH};
    mr_code rc = MR_E_AGAIN;
    r.prompt = ids[i < ROWS ? i : 0];
    r.sampling = mr_sampling_default;
    r.sampling.max_tokens = 6;
    if (i < ROWS)
      rc = mr_engine_admit(e, &r, &err);
    i += rc == MR_OK;
    if (rc)
      assert_int_equal(mr_engine_step(e, &err), MR_OK);
    for (mr_result *x; (x = mr_engine_collect(e));)
      res[x->tag] = x;
  }
  mr_engine_keep_prefixes(e, 60);
  mr_engine_stats_get(e, st);
  mr_engine_close(e);
}

static void same_and_free(mr_result **a, mr_result **b) {
  for (int i = 0; i < ROWS; i++) {
    assert_int_equal(a[i]->choices[0].n_ids, b[i]->choices[0].n_ids);
    assert_memory_equal(a[i]->choices[0].ids, b[i]->choices[0].ids,
                        (size_t)a[i]->choices[0].n_ids * sizeof(int32_t));
    mr_result_free(b[i]);
  }
}

static void the_next_run_starts_warm(void **state) {
  (void)state;
  mr_result *base[ROWS] = {0}, *res[ROWS] = {0};
  mr_engine_stats cold, st;
  for (int i = 0; i < ROWS; i++)
    for (int t = 0; t < LENGTH; t++)
      ids[i][t] = (t * 31 + (t < HEAD ? i / 4 * 3 : i * 11)) % 250;
  run_rows("m", false, base, &cold);
  assert_int_equal(cold.prompt_tokens_cached + cold.cache_written_bytes, 0);
  run_rows("m", true, res, &st);
  same_and_free(base, res);
  assert_int_equal(st.prompt_tokens_cached, 0);
  int blocks = 2 * (HEAD / BLOCK);
  assert_int_equal(each_file(NULL), blocks); /* only what rows shared */
  run_rows("m", true, res, &st);
  same_and_free(base, res);
  assert_int_equal(st.prompt_tokens_cached, blocks * BLOCK);
  assert_int_equal(st.prompt_tokens_computed + st.prompt_tokens_shared + st.prompt_tokens_cached,
                   cold.prompt_tokens_computed + cold.prompt_tokens_shared);
  assert_int_equal(st.cache_written_bytes, 0);
  run_rows("other", true, res, &st); /* another model's are not taken */
  same_and_free(base, res);
  assert_int_equal(st.prompt_tokens_cached, 0);
  each_file(flip);
  run_rows("m", true, res, &st);
  same_and_free(base, res);
  assert_true(st.cache_bad > 0 && st.prompt_tokens_cached == 0);
  run_rows("m", true, res, &st);
  same_and_free(base, res);
  assert_int_equal(st.prompt_tokens_cached, blocks * BLOCK);
  for (int i = 0; i < ROWS; i++)
    mr_result_free(base[i]);
}

static int setup(void **state) {
  if (temp_begin(state))
    return -1;
  snprintf(model, sizeof model, "%s/tiny.gguf", temp_dir);
  snprintf(cache, sizeof cache, "%s/cache", temp_dir);
  return tiny_gguf_write(model, -1) ? 0 : -1;
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(what_was_put_comes_back),
      cmocka_unit_test(damaged_files_are_written_anew),
      cmocka_unit_test(the_directory_is_kept_small),
      cmocka_unit_test(a_directory_that_cannot_be),
      cmocka_unit_test(the_next_run_starts_warm),
  };
  int failed = cmocka_run_group_tests(tests, setup, temp_end);
  tiny_mixed = true; /* a window in one of two layers */
  tiny_window = 40;
  return failed + cmocka_run_group_tests_name("windows", tests, setup, temp_end);
}
