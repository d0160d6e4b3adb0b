/* regex.h: regular expressions of tokenizer files: written for Oniguruma, run by PCRE2.
 *
 *     mr_regex *re;  mr_regex_open(&re, pattern, len, &err);       immutable, any thread
 *     mr_regex_scratch m = {0};
 *     for (mr_match s = {0}; mr_regex_next(re, &m, text, len, &s, &err) > 0;) ... s.from, s.to
 *     mr_regex_scratch_free(&m);  mr_regex_close(re);
 *
 * What the two read differently is rewritten: \s is the property White_Space (PCRE2 adds U+180E),
 * \w is letters, marks, digits and connectors (\b goes by it), \h a hexadecimal digit,
 * \uXXXX a character, names of scripts mean the script and not its extensions, ^ and $ match at
 * lines, a class inside of a class adds its members. What cannot be said in PCRE2 is refused by
 * name: && and negated classes inside of a class, \W and \H there, x{n,m}+, (?m), calls, callouts
 * and verbs. One difference is left: caseless matching folds one character at a time. Matching has
 * limits; a text that passes them is an error.
 */
#ifndef MR_SRC_REGEX_H
#define MR_SRC_REGEX_H

#include <stdbool.h>
#include <stddef.h>

#include "io/err.h"

#define MR_REGEX_MAX ((size_t)1 << 16) /* bytes of a pattern */

typedef struct mr_regex mr_regex;

typedef struct mr_regex_scratch { /* of one caller; zero it, reuse it, free it */
  void *match;
} mr_regex_scratch;

typedef struct mr_match { /* bytes of the text */
  size_t from, to;
  size_t next; /* where the search goes on */
  bool any;    /* a match was found before */
  size_t end;  /* of the last match */
} mr_match;

/* MR_E_DATA: the pattern is too long, broken, or uses what is not supported. */
mr_code mr_regex_open(mr_regex **out, const char *pattern, size_t len, mr_err *err);
void mr_regex_close(mr_regex *re);

/* The next match in text (valid UTF-8): 1 and its place, 0 none left, -1 and the error. An empty
 * match just behind the last one does not count. */
int mr_regex_next(const mr_regex *re, mr_regex_scratch *scratch, const char *text, size_t len,
                  mr_match *m, mr_err *err);
void mr_regex_scratch_free(mr_regex_scratch *scratch);

#endif
