/* lines.h: the lines of a text, numbered, with a limit on their length that holds before a line is
 * stored.
 *
 *     mr_lines l;
 *     mr_lines_init(&l, source, max_bytes, hasher);  the hasher gets every byte of text; or NULL
 *     while (mr_source_next(source, &more, &err) == MR_OK && more) {
 *       mr_lines_start(&l);                          numbers begin at 1 again
 *       while (mr_lines_next(&l, &line, &err) == MR_OK && line.s) ...
 *     }
 *     mr_lines_free(&l);
 *
 * A line ends with LF or CRLF or where the text ends. Blank lines (spaces, tabs, CR) count but are
 * not given. A BOM at the start of a text is skipped. A line longer than max_bytes is passed over
 * in bounded memory and given once with too_long set and no text.
 */
#ifndef MR_IO_LINES_H
#define MR_IO_LINES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "io/err.h"
#include "io/hash.h"
#include "io/source.h"
#include "io/text.h"

typedef struct mr_line {
  const char *s; /* without its end; borrowed until the next call; NULL: no more lines */
  size_t len;
  uint64_t number; /* from 1 */
  bool too_long;   /* s is "", and len the bytes it had */
} mr_line;

typedef struct mr_lines {
  mr_source *source; /* borrowed */
  mr_hasher *hasher; /* borrowed, or NULL */
  size_t max_bytes;
  const char *at, *end; /* what is left of the source's block */
  mr_text carry;        /* the beginning of a line that crosses blocks */
  uint64_t skipped;     /* > 0: bytes of a too long line so far */
  uint64_t number;      /* of the line that `at` is in */
  bool over;            /* the source's text has ended */
  uint64_t text_bytes;  /* of all texts so far */
} mr_lines;

void mr_lines_init(mr_lines *l, mr_source *source, size_t max_bytes, mr_hasher *hasher);
void mr_lines_start(mr_lines *l);
mr_code mr_lines_next(mr_lines *l, mr_line *out, mr_err *err);
void mr_lines_free(mr_lines *l);

#endif
