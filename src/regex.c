#define PCRE2_CODE_UNIT_WIDTH 8

#include "src/regex.h"

#include <ctype.h>
#include <pcre2.h>
#include <string.h>

#include "io/mem.h"
#include "io/text.h"

#define MATCH_LIMIT 100000000u /* steps of one match: far above any text that is not an attack */
#define HEAP_LIMIT_KIB 262144u

#define WORD                                                                                       \
  "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\x{b2}\\x{b3}\\x{b9}\\x{bc}-\\x{be}" /* as it is there */
#define HEX "0-9A-Fa-f"
#define AT_EDGE "(?:(?<=[" WORD "])(?![" WORD "])|(?<![" WORD "])(?=[" WORD "]))"
#define IN_OR_OUT "(?:(?<=[" WORD "])(?=[" WORD "])|(?<![" WORD "])(?![" WORD "]))"

struct mr_regex {
  pcre2_general_context *memory;
  pcre2_match_context *limits;
  pcre2_code *code;
};

/* ---- from Oniguruma to PCRE2 ---- */

typedef struct translator {
  const char *s;
  size_t len, at;
  int depth; /* of classes; 0: outside */
  mr_text out;
  mr_err *err;
} translator;

static mr_code refuse(translator *t, const char *what) {
  return mr_err_set(t->err, MR_E_DATA, "the pattern uses %s at byte %zu, which is not supported",
                    what, t->at);
}

static bool ahead(const translator *t, const char *what) {
  size_t n = strlen(what);
  return t->len - t->at >= n && !memcmp(t->s + t->at, what, n);
}

static void copy(translator *t, size_t n) {
  mr_text_add(&t->out, t->s + t->at, n);
  t->at += n;
}

/* Long names of categories, which PCRE2 does not know. Others: NULL. */
static const char *category(const char *s, size_t n) {
  static const char *const names[][2] = {{"Letter", "L"},
                                         {"Uppercase_Letter", "Lu"},
                                         {"Lowercase_Letter", "Ll"},
                                         {"Titlecase_Letter", "Lt"},
                                         {"Modifier_Letter", "Lm"},
                                         {"Other_Letter", "Lo"},
                                         {"Mark", "M"},
                                         {"Nonspacing_Mark", "Mn"},
                                         {"Spacing_Mark", "Mc"},
                                         {"Number", "N"},
                                         {"Decimal_Number", "Nd"},
                                         {"Letter_Number", "Nl"},
                                         {"Other_Number", "No"},
                                         {"Punctuation", "P"},
                                         {"Symbol", "S"},
                                         {"Separator", "Z"},
                                         {"Other", "C"},
                                         {"Control", "Cc"},
                                         {"Digit", "Nd"},
                                         {"Space", "White_Space"},
                                         {"Upper", "Uppercase"},
                                         {"Lower", "Lowercase"},
                                         {"Alpha", "Alphabetic"},
                                         {"Math_Symbol", "Sm"},
                                         {"Currency_Symbol", "Sc"},
                                         {"Modifier_Symbol", "Sk"},
                                         {"Other_Symbol", "So"}};
  static const char *const same[] = {"Alphabetic", "White_Space", "Uppercase", "Lowercase",
                                     "Any",        "Emoji",       "Math",      "Ideographic"};
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
    if (strlen(names[i][0]) == n && !strncasecmp(names[i][0], s, n))
      return names[i][1];
  for (size_t i = 0; i < sizeof same / sizeof same[0]; i++)
    if (strlen(same[i]) == n && !strncasecmp(same[i], s, n))
      return same[i];
  return NULL;
}

/* \p{Name}: a category of one or two letters as it is, others by name, else a script. */
static mr_code property(translator *t) {
  const char *open = t->s + t->at + 2, *end = t->s + t->len;
  const char *close = open < end && *open == '{' ? memchr(open, '}', (size_t)(end - open)) : NULL;
  if (!close)
    return refuse(t, "\\p without {}");
  const char *name = open + 1;
  bool not = name < close && *name == '^';
  name += not ;
  size_t n = (size_t)(close - name);
  const char *known = category(name, n);
  mr_text_addf(&t->out, "\\%c{%s", t->s[t->at + 1], not ? "^" : "");
  if (known)
    mr_text_adds(&t->out, known);
  else
    mr_text_addf(&t->out, "%s%.*s", n > 2 && !memchr(name, ':', n) ? "sc:" : "", (int)n, name);
  mr_text_addc(&t->out, '}');
  t->at = (size_t)(close - t->s) + 1;
  return MR_OK;
}

/* Of the four bytes at s: how many there are before the first that is none. */
static int hex_digits(const char *s) {
  int n = 0;
  while (n < 4 && isxdigit((unsigned char)s[n]))
    n++;
  return n;
}

static mr_code escape(translator *t) {
  char c = t->at + 1 < t->len ? t->s[t->at + 1] : 0;
  const char *as = NULL;
  switch (c) {
  case 0:
    return refuse(t, "a lone backslash");
  case 'p':
  case 'P':
    return property(t);
  case 's':
    as = "\\p{White_Space}";
    break;
  case 'S':
    as = "\\P{White_Space}";
    break;
  case 'w':
    as = t->depth ? WORD : "[" WORD "]";
    break;
  case 'h':
    as = t->depth ? HEX : "[" HEX "]";
    break;
  case 'b':
    as = t->depth ? "\\b" : AT_EDGE;
    break;
  case 'B':
    as = t->depth ? "B" : IN_OR_OUT;
    break;
  case 'W':
    as = t->depth ? NULL : "[^" WORD "]";
    break;
  case 'H':
    as = t->depth ? NULL : "[^" HEX "]";
    break;
  case 'u':
    if (t->len - t->at < 6 || hex_digits(t->s + t->at + 2) < 4)
      return refuse(t, "\\u without four digits");
    mr_text_addf(&t->out, "\\x{%.4s}", t->s + t->at + 2);
    t->at += 6;
    return MR_OK;
  default:
    if (strchr("RXNOCKGgkyYQE", c))
      return refuse(t, "an escape of its own kind");
    copy(t, 2);
    return MR_OK;
  }
  if (!as)
    return refuse(t, "\\W or \\H inside of a class");
  mr_text_adds(&t->out, as);
  t->at += 2;
  return MR_OK;
}

/* What may follow "(?" and "(". */
static mr_code group(translator *t) {
  static const char *const fine[] = {"(?:",  "(?=",  "(?!",   "(?>",   "(?<=", "(?<!",
                                     "(?i:", "(?i)", "(?-i:", "(?-i)", "(?x:", "(?x)"};
  if (ahead(t, "(*"))
    return refuse(t, "a verb (*...)");
  if (!ahead(t, "(?")) {
    copy(t, 1);
    return MR_OK;
  }
  for (size_t i = 0; i < sizeof fine / sizeof fine[0]; i++)
    if (ahead(t, fine[i])) {
      copy(t, strlen(fine[i]));
      return MR_OK;
    }
  return refuse(t, "a kind of group");
}

static mr_code in_class(translator *t) {
  char c = t->s[t->at];
  if (ahead(t, "[:")) {
    const char *end = memmem(t->s + t->at, t->len - t->at, ":]", 2);
    if (!end)
      return refuse(t, "[: without :]");
    copy(t, (size_t)(end - t->s) + 2 - t->at);
  } else if (ahead(t, "&&")) {
    return refuse(t, "&& inside of a class");
  } else if (ahead(t, "[^")) {
    return refuse(t, "a negated class inside of a class");
  } else if (c == '[') {
    t->depth++, t->at++; /* its members belong to the outer one */
  } else if (c == ']' && t->depth > 1) {
    t->depth--, t->at++;
  } else {
    t->depth -= c == ']';
    copy(t, 1);
  }
  return MR_OK;
}

/* Quantifiers in braces: {,n} is {0,n}; what looks like x{n}+ means something else to PCRE2. */
static mr_code braces(translator *t) {
  size_t end = t->at + 1;
  while (end < t->len && ((t->s[end] >= '0' && t->s[end] <= '9') || t->s[end] == ','))
    end++;
  if (end >= t->len || t->s[end] != '}' || end == t->at + 1) {
    mr_text_adds(&t->out, "\\{");
    t->at++;
    return MR_OK;
  }
  if (end + 1 < t->len && t->s[end + 1] == '+')
    return refuse(t, "{...}+");
  mr_text_addc(&t->out, '{');
  t->at++;
  if (t->s[t->at] == ',')
    mr_text_addc(&t->out, '0');
  copy(t, end + 1 - t->at);
  return MR_OK;
}

static mr_code translate(translator *t) {
  mr_code c = MR_OK;
  while (!c && t->at < t->len) {
    char ch = t->s[t->at];
    if (ch == '\\') {
      c = escape(t);
    } else if (t->depth) {
      c = in_class(t);
    } else if (ch == '[') {
      t->depth = 1;
      copy(t, ahead(t, "[^]") ? 3 : ahead(t, "[^") || ahead(t, "[]") ? 2 : 1);
    } else if (ch == '(') {
      c = group(t);
    } else if (ch == '{') {
      c = braces(t);
    } else {
      copy(t, 1);
    }
  }
  if (!c && t->depth)
    c = refuse(t, "a class that does not end");
  return !c && t->out.failed ? mr_err_set(t->err, MR_E_NOMEM, "out of memory") : c;
}

/* ---- compiling and matching ---- */

static void *get(PCRE2_SIZE n, void *tag) {
  (void)tag;
  return mr_mem_alloc(n, 1);
}

static void put(void *p, void *tag) {
  (void)tag;
  mr_mem_free(p);
}

static mr_code compile(mr_regex *re, const mr_text *pattern, mr_err *err) {
  int code = 0;
  PCRE2_SIZE at = 0;
  PCRE2_UCHAR words[128] = "";
  pcre2_compile_context *cc = pcre2_compile_context_create(re->memory);
  if (!cc)
    return mr_err_set(err, MR_E_NOMEM, "out of memory");
  pcre2_set_newline(cc, PCRE2_NEWLINE_LF);
  re->code = pcre2_compile((PCRE2_SPTR)(pattern->data ? pattern->data : ""), pattern->len,
                           PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &code,
                           &at, cc);
  pcre2_compile_context_free(cc);
  if (!re->code) {
    pcre2_get_error_message(code, words, sizeof words);
    return mr_err_set(err, code == PCRE2_ERROR_HEAP_FAILED ? MR_E_NOMEM : MR_E_DATA,
                      "the pattern does not compile: %s (PCRE2 error %d at %zu)", words, code,
                      (size_t)at);
  }
  pcre2_jit_compile(re->code, PCRE2_JIT_COMPLETE); /* without it the same, slower */
  return MR_OK;
}

mr_code mr_regex_open(mr_regex **out, const char *pattern, size_t len, mr_err *err) {
  *out = NULL;
  if (len > MR_REGEX_MAX)
    return mr_err_set(err, MR_E_DATA, "the pattern has %zu bytes; at most %zu are taken", len,
                      MR_REGEX_MAX);
  translator t = {.s = pattern, .len = len, .err = err};
  mr_code c = translate(&t);
  mr_regex *re = c ? NULL : mr_mem_alloc(1, sizeof *re);
  if (!c && !re)
    c = mr_err_set(err, MR_E_NOMEM, "out of memory");
  if (!c) {
    re->memory = pcre2_general_context_create(get, put, NULL);
    re->limits = re->memory ? pcre2_match_context_create(re->memory) : NULL;
    c = re->limits ? compile(re, &t.out, err) : mr_err_set(err, MR_E_NOMEM, "out of memory");
  }
  if (!c) {
    pcre2_set_match_limit(re->limits, MATCH_LIMIT);
    pcre2_set_heap_limit(re->limits, HEAP_LIMIT_KIB);
    *out = re;
  } else {
    mr_regex_close(re);
  }
  mr_text_free(&t.out);
  return c;
}

void mr_regex_close(mr_regex *re) {
  if (!re)
    return;
  pcre2_code_free(re->code);
  pcre2_match_context_free(re->limits);
  pcre2_general_context_free(re->memory);
  mr_mem_free(re);
}

static size_t width(const char *s) {
  uint8_t c = (uint8_t)*s;
  return c < 0x80 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
}

int mr_regex_next(const mr_regex *re, mr_regex_scratch *scratch, const char *text, size_t len,
                  mr_match *m, mr_err *err) {
  if (!scratch->match && !(scratch->match = pcre2_match_data_create(1, re->memory)))
    return mr_err_set(err, MR_E_NOMEM, "out of memory"), -1;
  const PCRE2_SIZE *span = pcre2_get_ovector_pointer(scratch->match);
  while (m->next <= len) {
    uint32_t flags = PCRE2_NO_UTF_CHECK;
    int r =
        pcre2_match(re->code, (PCRE2_SPTR)text, len, m->next, flags, scratch->match, re->limits);
    if (r == PCRE2_ERROR_JIT_STACKLIMIT) /* the interpreter keeps its stack on the heap */
      r = pcre2_match(re->code, (PCRE2_SPTR)text, len, m->next, flags | PCRE2_NO_JIT,
                      scratch->match, re->limits);
    if (r == PCRE2_ERROR_NOMATCH)
      return 0;
    if (r < 0)
      return mr_err_set(err, r == PCRE2_ERROR_NOMEMORY ? MR_E_NOMEM : MR_E_DATA,
                        "text cannot be cut into words: PCRE2 error %d (limit %u steps a word)", r,
                        MATCH_LIMIT),
             -1;
    m->from = span[0], m->to = span[1];
    bool empty = m->to <= m->from, again = empty && m->any && m->to == m->end;
    m->next = !empty ? m->to : m->from < len ? m->from + width(text + m->from) : len + 1;
    if (again)
      continue;
    m->any = true, m->end = m->to;
    return 1;
  }
  return 0;
}

void mr_regex_scratch_free(mr_regex_scratch *scratch) {
  pcre2_match_data_free(scratch->match);
  scratch->match = NULL;
}
