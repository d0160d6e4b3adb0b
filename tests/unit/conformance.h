/* conformance.h: where the conformance data lies, for the tests that use it; they skip what is
 * absent.
 *
 * $MR_DATA, else ../shared/data beside the source tree.
 */
#ifndef MR_TESTS_CONFORMANCE_H
#define MR_TESTS_CONFORMANCE_H

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

/* The path of `rest` inside the data folder, in one static buffer; NULL when it is not there. */
static inline const char *data_path(const char *rest) {
  static char path[4096];
  struct stat st;
  const char *root = getenv("MR_DATA");
  snprintf(path, sizeof path, "%s/%s", root && *root ? root : "../shared/data", rest);
  return stat(path, &st) == 0 ? path : NULL;
}

/* All bytes of a file, NUL-terminated, for the caller to free(); NULL if it cannot be read. */
static inline char *read_whole(const char *path, size_t *len) {
  FILE *f = fopen(path, "rb");
  struct stat st;
  if (!f)
    return NULL;
  char *p = fstat(fileno(f), &st) == 0 ? malloc((size_t)st.st_size + 1) : NULL;
  if (p) {
    *len = fread(p, 1, (size_t)st.st_size, f);
    p[*len] = '\0';
  }
  fclose(f);
  return p;
}

#endif
