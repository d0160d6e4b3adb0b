/* fuzz.h: what the fuzz targets share. A target is one file with
 *
 *     int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
 *
 * linked with libFuzzer (make fuzz) or with replay.c, which runs files and folders (the corpus).
 * A broken promise of the code under test ends the program: fuzz_check.
 */
#ifndef MR_TESTS_FUZZ_H
#define MR_TESTS_FUZZ_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io/err.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define fuzz_check(holds)                                                                          \
  do {                                                                                             \
    if (!(holds)) {                                                                                \
      fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #holds);                   \
      abort();                                                                                     \
    }                                                                                              \
  } while (0)

static char fuzz_folder[64];

/* Where the target's files go: $MR_FUZZ_DIR, or a new folder that stays. */
static inline const char *fuzz_dir(void) {
  const char *given = getenv("MR_FUZZ_DIR");
  if (given)
    return given;
  if (!fuzz_folder[0]) {
    snprintf(fuzz_folder, sizeof fuzz_folder, "/tmp/millrace-fuzz-XXXXXX");
    fuzz_check(mkdtemp(fuzz_folder));
  }
  return fuzz_folder;
}

/* The path of a name in it; borrowed until the fourth next call. */
static inline const char *fuzz_path(const char *name) {
  static char paths[4][128];
  static unsigned at;
  char *path = paths[at++ % 4];
  snprintf(path, sizeof paths[0], "%s/%s", fuzz_dir(), name);
  return path;
}

static inline const char *fuzz_write(const char *name, const void *bytes, size_t n) {
  const char *path = fuzz_path(name);
  FILE *f = fopen(path, "wb");
  fuzz_check(f && fwrite(bytes, 1, n, f) == n);
  fclose(f);
  return path;
}

/* An error is a code with words. */
static inline void fuzz_check_error(mr_code rc, const mr_err *e) {
  fuzz_check(rc != MR_E_INTERNAL);
  fuzz_check(rc == MR_OK || (e->code == rc && e->text[0]));
}

#endif
