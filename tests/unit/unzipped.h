/* unzipped.h: the text of a .gz file, for tests that read the conformance data. */
#ifndef MR_TESTS_UNZIPPED_H
#define MR_TESTS_UNZIPPED_H

#include "conformance.h"
#include "io/gunzip.h"
#include "io/text.h"

/* Empty when it cannot be read; mr_text_free releases it. */
static inline mr_text read_unzipped(const char *path) {
  mr_text t = {0};
  mr_gunzip *z = NULL;
  size_t len = 0, got = 1;
  static char block[1 << 16];
  char *raw = read_whole(path, &len);
  if (raw && mr_gunzip_open(&z, NULL) == MR_OK) {
    mr_gunzip_feed(z, raw, len);
    while (got && mr_gunzip_read(z, block, sizeof block, &got, NULL) == MR_OK)
      mr_text_add(&t, block, got);
  }
  mr_gunzip_close(z);
  free(raw);
  return t;
}

#endif
