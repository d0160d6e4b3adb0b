/* directories.h: a test for each directory of a folder of the test data, named by it. Included
 * after cmocka. */
#ifndef TESTS_UNIT_DIRECTORIES_H
#define TESTS_UNIT_DIRECTORIES_H

#include <dirent.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/conformance.h"

#define MAX_DIRS 128

static inline int by_name(const void *a, const void *b) {
  const struct CMUnitTest *x = a, *y = b;
  return strcmp(x->name, y->name);
}

/* Into tests[n] .., by name. Returns how many tests there are then. */
static inline size_t find_directories(struct CMUnitTest *tests, size_t n, const char *folder,
                                      CMUnitTestFunction test, CMFixtureFunction begin,
                                      CMFixtureFunction end) {
  static char paths[MAX_DIRS][PATH_MAX + 300];
  const char *root = data_path(folder);
  DIR *d = root ? opendir(root) : NULL;
  struct dirent *e;
  size_t first = n;
  while (d && n < MAX_DIRS && (e = readdir(d))) {
    if (*e->d_name == '.')
      continue;
    snprintf(paths[n], sizeof paths[n], "%s/%s", root, e->d_name);
    tests[n] = (struct CMUnitTest){strrchr(paths[n], '/') + 1, test, begin, end, paths[n]};
    n++;
  }
  if (d)
    closedir(d);
  qsort(tests + first, n - first, sizeof *tests, by_name);
  return n;
}

static inline void no_data(void **state) {
  (void)state;
  skip();
}

/* n 0: a test that is skipped. */
static inline int run_directories(struct CMUnitTest *tests, size_t n) {
  if (n == 0)
    tests[n++] = (struct CMUnitTest){"no data", no_data, NULL, NULL, NULL};
  return _cmocka_run_group_tests("directories", tests, n, NULL, NULL);
}

#endif
