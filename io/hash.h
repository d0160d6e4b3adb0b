/* hash.h: content digests (xxh3) and the journal's checksum (CRC32C).
 *
 *     mr_hasher *h = mr_hasher_new();          NULL: out of memory
 *     mr_hasher_add(h, bytes, len); ...
 *     char hex[MR_HASH_HEX];  mr_hasher_hex(h, hex);   (more may be added afterwards)
 *     mr_hasher_free(h);
 *
 * Digests find accidents, not attackers: xxh3 is not a cryptographic hash. The hex form is the
 * canonical (big-endian) one that `xxhsum -H2` prints.
 */
#ifndef MR_IO_HASH_H
#define MR_IO_HASH_H

#include <stddef.h>
#include <stdint.h>

#include "io/err.h"

#define MR_HASH_HEX 33 /* 32 hex digits of xxh3-128 and a NUL */

typedef struct mr_hasher mr_hasher;

mr_hasher *mr_hasher_new(void);
void mr_hasher_add(mr_hasher *h, const void *bytes, size_t len);
void mr_hasher_hex(const mr_hasher *h, char hex[MR_HASH_HEX]);
void mr_hasher_free(mr_hasher *h); /* NULL is fine */

uint64_t mr_hash_64(const void *bytes, size_t len);                     /* xxh3-64, seed 0 */
void mr_hash_128(const void *bytes, size_t len, uint64_t out[2]);       /* xxh3-128 */
void mr_hash_hex(const void *bytes, size_t len, char hex[MR_HASH_HEX]); /* xxh3-128 */

/* xxh3-128 of a file's bytes; *size (may be NULL) gets how many. MR_E_NOINPUT, MR_E_IO, MR_E_NOMEM.
 */
mr_code mr_hash_file(const char *path, char hex[MR_HASH_HEX], uint64_t *size, mr_err *err);

/* CRC32C (Castagnoli, reflected, RFC 3720). Start with 0; feed the last result to go on:
 * mr_crc32c(mr_crc32c(0, a, n), b, m) is the CRC of a followed by b. */
uint32_t mr_crc32c(uint32_t crc, const void *bytes, size_t len);

#endif
