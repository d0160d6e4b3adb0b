/* cachedir.h: a directory of cache files that other runs use at the same time.
 *
 *     mr_cachedir_write(path, parts, n, &err)     whole or not at all: path.<pid>.tmp, renamed
 *     mr_cachedir_touch(fd)                        it was used now
 *     mr_cachedir_trim(dir, ".page", max, &removed)  the least recently used go until `max` is kept
 *
 * Nothing is synced: after a crash a file may be cut, so its bytes need a digest. Only files that
 * end with the suffix, in `dir` and in its folders, and old unfinished ones are ever removed.
 */
#ifndef MR_IO_CACHEDIR_H
#define MR_IO_CACHEDIR_H

#include <stddef.h>
#include <stdint.h>

#include "io/err.h"

typedef struct mr_bytes {
  const void *data;
  size_t len;
} mr_bytes;

/* MR_E_CANTCREATE, MR_E_IO, MR_E_NOMEM. */
mr_code mr_cachedir_write(const char *path, const mr_bytes *parts, int n, mr_err *err);
void mr_cachedir_touch(int fd);
/* *removed (may be NULL): bytes. MR_E_NOMEM, MR_E_IO. */
mr_code mr_cachedir_trim(const char *dir, const char *suffix, uint64_t max_bytes, uint64_t *removed,
                         mr_err *err);

#endif
