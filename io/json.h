/* json.h: strict JSON over jansson, and writers of values that are always valid JSON.
 *
 *     json_t *v = mr_json_parse(line, len, NULL, &err);     NULL: err has the byte offset
 *     mr_json_add_string(&text, s, n);  mr_json_add_real(&text, x);  mr_json_add(&text, v);
 *
 * Strict: RFC 8259 on valid UTF-8; no NaN, no leading zeros, no duplicate names, no numbers beyond
 * 64-bit integers or doubles, no lone surrogates, no raw control characters, nothing after the
 * value. Nesting is limited to MR_JSON_DEPTH. A string may hold an escaped NUL: use
 * json_string_length.
 */
#ifndef MR_IO_JSON_H
#define MR_IO_JSON_H

#include <jansson.h>
#include <stdbool.h>

#include "io/err.h"
#include "io/text.h"

#define MR_JSON_DEPTH 512

/* jansson's json_dumps; freed with mr_mem_free. All of jansson's memory comes from io/mem.h, so
 * that its failures are tested too. */
char *mr_json_dumps(const json_t *v, size_t flags);
/* An object or array without the strictness of mr_json_parse: for texts that are our own. NULL: it
 * is none, or memory ran out. */
json_t *mr_json_load(const char *s, size_t len);
/* Whether an allocation of jansson failed in this thread since the last call. */
bool mr_json_ran_out(void);
/* Any value; new reference, or NULL with the error. *too_big (may be NULL) is set when a number
 * does not fit. */
json_t *mr_json_parse(const char *s, size_t len, bool *too_big, mr_err *err);
/* The same, but an integer beyond 64 bits becomes a real: only to find out which value was wrong.
 */
json_t *mr_json_parse_lossy(const char *s, size_t len);
/* Bytes of a byte order mark that the text begins with: 3, or 0. */
size_t mr_json_bom(const char *s, size_t len);
/* A whole file (at most `limit` bytes): MR_E_NOINPUT, MR_E_DATA with file and line. */
json_t *mr_json_read(const char *path, size_t limit, mr_err *err);

/* s quoted and escaped; bytes that are not UTF-8 become U+FFFD. */
void mr_json_add_string(mr_text *t, const char *s, size_t len);
void mr_json_add_int(mr_text *t, int64_t v);
/* A text that reads back as the same number (15 to 17 digits); null when it is not finite. */
void mr_json_add_real(mr_text *t, double v);
void mr_json_add_float(mr_text *t, float v); /* 6 to 9 digits */
/* A value in compact form, members in their order. */
void mr_json_add(mr_text *t, const json_t *v);

#endif
