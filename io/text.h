/* text.h: a growable byte string, and the small parsers and checks that every layer needs.
 *
 *     mr_text t = {0};
 *     mr_text_add(&t, "abc", 3); mr_text_addf(&t, "%d", 5);
 *     if (t.failed) ...            (an allocation failed; later calls do nothing)
 *     mr_text_free(&t);
 *
 * `data` is NULL while nothing was added, else NUL-terminated (the NUL is not counted in len).
 */
#ifndef MR_IO_TEXT_H
#define MR_IO_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct mr_str { /* borrowed bytes, not terminated */
  const char *s;
  size_t len;
} mr_str;

typedef struct mr_text {
  char *data;
  size_t len, cap;
  bool failed;
} mr_text;

void mr_text_add(mr_text *t, const void *bytes, size_t len);
void mr_text_adds(mr_text *t, const char *s);
void mr_text_addc(mr_text *t, char c);
void mr_text_addf(mr_text *t, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void mr_text_add_code(mr_text *t, uint32_t code_point); /* as UTF-8 */
void mr_text_clear(mr_text *t);                         /* len = 0, memory kept */
void mr_text_free(mr_text *t);

/* UTF-8. mr_utf8_valid returns the offset of the first invalid byte, or -1. mr_utf8_next decodes
 * one code point at s (len > 0) and returns its length; an invalid byte gives U+FFFD, length 1.
 * mr_utf8_whole returns how many of the len bytes end on a character boundary (a valid but
 * unfinished last sequence is left out). */
int64_t mr_utf8_valid(const char *s, size_t len);
int mr_utf8_next(const char *s, size_t len, uint32_t *code_point);
size_t mr_utf8_whole(const char *s, size_t len);

/* base64 (RFC 4648, padding required) of s appended to t; false if s is not base64, or no memory
 * was left (then t->failed). */
bool mr_base64_decode(const char *s, size_t len, mr_text *t);

/* "512", "8KiB", "1.5GiB" → bytes; "90", "90s", "15m", "2h", "1d" → seconds; "HH:MM" → minutes of
 * the day. False if the text is anything else or out of range. */
bool mr_parse_size(const char *s, uint64_t *bytes);
bool mr_parse_duration(const char *s, double *seconds);
bool mr_parse_clock(const char *s, int *minutes);
bool mr_parse_int(const char *s, int64_t *value);
bool mr_parse_real(const char *s, double *value);

/* The nearest of `n` names to `word` by edit distance, or NULL if none is near (more than a third
 * of it differs). */
const char *mr_nearest(const char *word, const char *const *names, size_t n);

#endif
