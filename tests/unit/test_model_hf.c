/* Directories of safetensors against reference values, both forms of config.json, one test for each
 * directory. Exact mode. Skipped without the data ($MR_DATA, see conformance.h). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/unit/directories.h"
#include "tests/unit/oracle.h"

static void check_dir(const char *dir, const char *name) {
  mr_err err = MR_ERR_INIT;
  engine e;
  if (engine_open(&e, dir, mr_kernels_best()->name, &err)) {
    mr_model_close(e.m);
    mr_pool_free(e.pool);
    fail_msg("%s: %s", name, err.text);
  }
  reset();
  check_cases(&e, dir, MAX_SEQS, MAX_STEPS, name);
  engine_close(&e);
  report(name);
}

/* The directory as it is, and once more with the other config.json. */
static void one_dir(void **state) {
  char dir[PATH_MAX]; /* absolute: links are made to it */
  char from[PATH_MAX + 300], to[PATH_MAX + 300], temp[] = "/tmp/millrace-hf-XXXXXX";
  struct dirent *entry;
  assert_non_null(realpath(*state, dir));
  check_dir(dir, strrchr(dir, '/') + 1);
  snprintf(from, sizeof from, "%s/config.v5.json", dir);
  if (access(from, R_OK))
    return;
  assert_non_null(mkdtemp(temp));
  DIR *d = opendir(dir);
  assert_non_null(d);
  while ((entry = readdir(d))) {
    if (*entry->d_name == '.' || !strcmp(entry->d_name, "config.json"))
      continue;
    bool v5 = strcmp(entry->d_name, "config.v5.json") == 0;
    snprintf(from, sizeof from, "%s/%s", dir, entry->d_name);
    snprintf(to, sizeof to, "%s/%s", temp, v5 ? "config.json" : entry->d_name);
    assert_int_equal(symlink(from, to), 0);
  }
  check_dir(temp, strrchr(dir, '/') + 1);
  rewinddir(d);
  while ((entry = readdir(d))) {
    snprintf(to, sizeof to, "%s/%s", temp, entry->d_name);
    unlink(to);
  }
  closedir(d);
  rmdir(temp);
}

int main(void) {
  static struct CMUnitTest tests[MAX_DIRS];
  size_t n = find_directories(tests, 0, "tiny/hf", one_dir, NULL, NULL);
  n = find_directories(tests, n, "tiny/quant", one_dir, NULL, NULL);
  return run_directories(tests, n);
}
