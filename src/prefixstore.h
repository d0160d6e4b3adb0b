/* prefixstore.h: shared prefixes that outlast a run: blocks of the prefix tree as files.
 *
 *     mr_prefixstore_open(&s, dir, key, page_bytes, max_bytes, &err);
 *     mr_prefixstore_get(s, tree, tokens, n, page)   true: the keys and values of the last block of
 *     mr_prefixstore_put(s, tree, tokens, n, page)   these n tokens, a multiple of MR_KV_BLOCK
 *     mr_prefixstore_close(s);                       trims the directory to max_bytes
 *
 * `key` is a digest of all that the bytes depend on beside tree and tokens: model, numerics,
 * instruction set, type and layout of keys and values. A file is DIR/<key>/<hash of tokens>.page:
 * its tokens, a digest and the page. tree: 0, or a digest of the adapter. What is foreign, cut or
 * changed is not taken (and is written anew); any number of runs may use a directory at once, as
 * files appear whole and are never changed. Errors of the disk are counted, nothing more:
 * everything can be computed.
 */
#ifndef MR_SRC_PREFIXSTORE_H
#define MR_SRC_PREFIXSTORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "io/err.h"

typedef struct mr_prefixstore mr_prefixstore;

typedef struct mr_prefixstore_stats {
  uint64_t read_bytes, written_bytes, removed_bytes, bad; /* bad: files that were not taken */
} mr_prefixstore_stats;

/* Creates the directory (not its parents). MR_E_CANTCREATE, MR_E_NOMEM. */
mr_code mr_prefixstore_open(mr_prefixstore **out, const char *dir, const char *key,
                            size_t page_bytes, uint64_t max_bytes, mr_err *err);
/* Only for mr_prefixstore_has: nothing is created. *out NULL: there is no such directory. */
mr_code mr_prefixstore_look(mr_prefixstore **out, const char *dir, const char *key, mr_err *err);
void mr_prefixstore_close(mr_prefixstore *s); /* NULL is fine */
/* Whether there is a file for them; what is in it is not looked at. */
bool mr_prefixstore_has(mr_prefixstore *s, uint64_t tree, const int32_t *tokens, int n);
bool mr_prefixstore_get(mr_prefixstore *s, uint64_t tree, const int32_t *tokens, int n, void *page);
void mr_prefixstore_put(mr_prefixstore *s, uint64_t tree, const int32_t *tokens, int n,
                        const void *page);
void mr_prefixstore_stats_get(const mr_prefixstore *s, mr_prefixstore_stats *out);

#endif
