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

#include "tests/unit/oracle.h"

/* ------------------------------------------------------------------ tiny models */

static char *read_beside(const char *path, size_t keep, const char *ending, size_t *len) {
  char other[4200];
  snprintf(other, sizeof other, "%.*s%s", (int)keep, path, ending);
  return read_whole(other, len);
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
    fail_msg("%s: %s", path, err.text);
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
  tiny_folder("llama_k", 15);
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

static void tiny_mixtral(void **state) {
  (void)state;
  tiny_folder("mixtral", 1);
  tiny_folder("mixtral_k", 1);
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
      cmocka_unit_test(tiny_gemma3), cmocka_unit_test(tiny_mixtral), cmocka_unit_test(baseline),
      cmocka_unit_test(smollm2),     cmocka_unit_test(gemma3),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
