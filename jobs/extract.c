#define PCRE2_CODE_UNIT_WIDTH 8

#include "jobs/extract.h"

#include <pcre2.h>

#include "io/mem.h"
#include "io/text.h"

#define PATTERN_MAX ((size_t)1 << 16)
#define STEPS_MAX 10000000u
#define HEAP_MAX_KIB 65536u

struct mr_extract {
  bool last;
  pcre2_general_context *memory;
  pcre2_match_context *limits;
  pcre2_match_data *match;
  pcre2_code *code;
};

static void *get(PCRE2_SIZE n, void *tag) {
  (void)tag;
  return mr_mem_alloc(n, 1);
}

static void put(void *p, void *tag) {
  (void)tag;
  mr_mem_free(p);
}

static mr_code compile(mr_extract *x, const char *pattern, size_t len, mr_err *err) {
  int code = 0;
  PCRE2_SIZE at = 0;
  PCRE2_UCHAR words[128] = "";
  x->code = pcre2_compile((PCRE2_SPTR)pattern, len, PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C,
                          &code, &at, NULL);
  if (!x->code && code == PCRE2_ERROR_HEAP_FAILED)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for a pattern");
  if (!x->code) {
    pcre2_get_error_message(code, words, sizeof words);
    return mr_err_set(err, MR_E_USAGE, "the pattern %.200s does not compile: %s at character %zu",
                      pattern, words, (size_t)at + 1);
  }
  pcre2_jit_compile(x->code, PCRE2_JIT_COMPLETE); /* without it the same, slower */
  x->match = pcre2_match_data_create_from_pattern(x->code, x->memory);
  return x->match ? MR_OK : mr_err_set(err, MR_E_NOMEM, "out of memory for a pattern");
}

mr_code mr_extract_open(mr_extract **out, const char *pattern, size_t len, bool last, mr_err *err) {
  *out = NULL;
  if (len > PATTERN_MAX)
    return mr_err_set(err, MR_E_USAGE, "the pattern has %zu bytes; at most %zu are allowed", len,
                      PATTERN_MAX);
  mr_extract *x = mr_mem_alloc(1, sizeof *x);
  if (x) {
    x->last = last;
    x->memory = pcre2_general_context_create(get, put, NULL);
    x->limits = x->memory ? pcre2_match_context_create(x->memory) : NULL;
  }
  mr_code rc = x && x->limits ? compile(x, pattern, len, err)
                              : mr_err_set(err, MR_E_NOMEM, "out of memory for a pattern");
  if (rc) {
    mr_extract_close(x);
    return rc;
  }
  pcre2_set_match_limit(x->limits, STEPS_MAX);
  pcre2_set_heap_limit(x->limits, HEAP_MAX_KIB);
  *out = x;
  return MR_OK;
}

/* The match at or behind `at`: PCRE2's result. */
static int match(mr_extract *x, const char *text, size_t len, size_t at, uint32_t flags) {
  flags |= PCRE2_NO_UTF_CHECK;
  int r = pcre2_match(x->code, (PCRE2_SPTR)text, len, at, flags, x->match, x->limits);
  if (r == PCRE2_ERROR_JIT_STACKLIMIT) /* the interpreter keeps its stack on the heap */
    r = pcre2_match(x->code, (PCRE2_SPTR)text, len, at, flags | PCRE2_NO_JIT, x->match, x->limits);
  return r;
}

/* The first group that took part, or all of the match. \K may put a beginning behind an end. */
static void part(const mr_extract *x, int groups, size_t *from, size_t *to) {
  const PCRE2_SIZE *span = pcre2_get_ovector_pointer(x->match);
  int g = 1;
  while (g < groups && span[2 * g] == PCRE2_UNSET)
    g++;
  if (g >= groups)
    g = 0;
  *from = span[2 * g];
  *to = span[2 * g + 1] < *from ? *from : span[2 * g + 1];
}

mr_extracted mr_extract_find(mr_extract *x, const char *text, size_t len, size_t *from,
                             size_t *to) {
  mr_extracted found = MR_EXTRACT_NONE;
  uint32_t flags = 0;
  for (size_t at = 0; at <= len;) {
    int r = match(x, text, len, at, flags);
    if (r == PCRE2_ERROR_NOMATCH && flags) { /* after an empty match: one character further */
      uint32_t c;
      flags = 0;
      at += at < len ? (size_t)mr_utf8_next(text + at, len - at, &c) : 1;
      continue;
    }
    if (r == PCRE2_ERROR_NOMATCH)
      return found;
    if (r < 0)
      return r == PCRE2_ERROR_NOMEMORY ? MR_EXTRACT_NOMEM : MR_EXTRACT_LIMIT;
    part(x, r, from, to);
    found = MR_EXTRACT_FOUND;
    if (!x->last)
      return found;
    const PCRE2_SIZE *span = pcre2_get_ovector_pointer(x->match);
    flags = span[1] <= at ? PCRE2_NOTEMPTY_ATSTART | PCRE2_ANCHORED : 0;
    at = span[1] < at ? at : span[1];
  }
  return found;
}

void mr_extract_close(mr_extract *x) {
  if (!x)
    return;
  pcre2_match_data_free(x->match);
  pcre2_code_free(x->code);
  pcre2_match_context_free(x->limits);
  pcre2_general_context_free(x->memory);
  mr_mem_free(x);
}
