/* charsmap.h: SentencePiece's compiled table of character normalizations, as bytes of a file.
 *
 * Layout: u32 bytes of the trie, the trie (a double array of u32 units), then the replacements,
 * each ended by a NUL. All little-endian. Every step of a lookup is checked against the sizes.
 */
#ifndef MR_SRC_CHARSMAP_H
#define MR_SRC_CHARSMAP_H

#include <stdbool.h>
#include <stddef.h>

#include "io/err.h"
#include "io/gguf.h"

mr_code mr_charsmap_check(const char *map, size_t len, mr_err *err);
/* The replacement of the shortest entry that s starts with; false: none. Borrowed from map. */
bool mr_charsmap_find(const char *map, size_t map_len, const char *s, size_t len, mr_str *out);

#endif
