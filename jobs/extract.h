/* extract.h: the part of an answer that a pattern names.
 *
 *     mr_extract *x;  mr_extract_open(&x, "#### (-?[0-9.,]+)", len, false, &err);
 *     if (mr_extract_find(x, text, len, &from, &to) == MR_EXTRACT_FOUND) ... text[from, to)
 *     mr_extract_close(x);
 *
 * Patterns are those of PCRE2 with Unicode classes ((?i), (?s) and (?m) as in Python). The part is
 * the first group that took part in the match, or the match itself where the pattern has no
 * groups. Matching has limits (10 million steps, 64 MiB): a text that passes them is told, and
 * costs no more.
 */
#ifndef MR_JOBS_EXTRACT_H
#define MR_JOBS_EXTRACT_H

#include <stdbool.h>
#include <stddef.h>

#include "io/err.h"

typedef struct mr_extract mr_extract;

typedef enum mr_extracted {
  MR_EXTRACT_FOUND,
  MR_EXTRACT_NONE,
  MR_EXTRACT_LIMIT, /* the limits were reached */
  MR_EXTRACT_NOMEM
} mr_extracted;

/* `last`: of several matches the last one counts, else the first. MR_E_USAGE: the pattern does not
 * compile, or has more than 64 KiB. */
mr_code mr_extract_open(mr_extract **out, const char *pattern, size_t len, bool last, mr_err *err);
/* text is valid UTF-8. */
mr_extracted mr_extract_find(mr_extract *x, const char *text, size_t len, size_t *from, size_t *to);
void mr_extract_close(mr_extract *x); /* NULL is fine */

#endif
