/* special.h: finds control and user-defined tokens written in a text.
 *
 * Order as upstream: the longest token anywhere in the text is taken first (of equal length the
 * leftmost), then the longest in what remains. White space after a token that strips it belongs to
 * the token.
 */
#ifndef MR_SRC_SPECIAL_H
#define MR_SRC_SPECIAL_H

#include "src/vocab.h"

typedef struct mr_span { /* bytes of the text: a token, or plain text (id -1) */
  size_t at, len;
  int32_t id;
} mr_span;

typedef struct mr_spans {
  mr_span *s; /* owned */
  size_t n, cap;
} mr_spans;

/* Appends the spans of text in order. parse: control tokens count, unless a byte of theirs is
 * marked in `plain` (may be NULL); user-defined ones always do. 0: out of memory. len fits an
 * int32_t. */
int mr_special_split(const mr_vocab *v, const char *text, size_t len, const uint8_t *plain,
                     bool parse, mr_spans *out);
void mr_spans_free(mr_spans *s);

#endif
