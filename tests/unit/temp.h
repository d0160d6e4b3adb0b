/* temp.h: files for tests: a directory of their own, gone afterwards. */
#ifndef MR_TESTS_TEMP_H
#define MR_TESTS_TEMP_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "io/durable.h"

static char temp_dir[64];

static inline int temp_begin(void **state) {
  (void)state;
  snprintf(temp_dir, sizeof temp_dir, "/tmp/millrace-test-XXXXXX");
  return mkdtemp(temp_dir) ? 0 : -1;
}

static inline int temp_end(void **state) {
  (void)state;
  mr_err e = MR_ERR_INIT;
  return mr_durable_remove_tree(temp_dir, &e) == MR_OK ? 0 : -1;
}

/* The path of a name in the directory; four may be in use at once. */
static inline const char *temp_path(const char *name) {
  static char paths[4][256];
  static int at;
  at = (at + 1) % 4;
  snprintf(paths[at], sizeof paths[at], "%s/%s", temp_dir, name);
  return paths[at];
}

static inline const char *temp_write(const char *name, const void *bytes, size_t len) {
  const char *path = temp_path(name);
  FILE *f = fopen(path, "wb");
  if (!f || fwrite(bytes, 1, len, f) != len || fclose(f) != 0)
    abort();
  return path;
}

static inline const char *temp_text(const char *name, const char *text) {
  return temp_write(name, text, strlen(text));
}

#endif
