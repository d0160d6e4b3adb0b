#include <string.h>
#include <utf8proc.h>

#include "src/template_int.h"

static utf8proc_category_t category(uint32_t c) {
  return utf8proc_category((utf8proc_int32_t)c);
}

bool mr_ch_space(uint32_t c) {
  if (c < 0x80)
    return (c >= 9 && c <= 13) || (c >= 28 && c <= 32);
  return c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 ||
         c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

bool mr_ch_break(uint32_t c) {
  return (c >= 10 && c <= 13) || (c >= 28 && c <= 30) || c == 0x85 || c == 0x2028 || c == 0x2029;
}

static bool letter(uint32_t c) {
  utf8proc_category_t k = category(c);
  return k >= UTF8PROC_CATEGORY_LU && k <= UTF8PROC_CATEGORY_LO;
}

bool mr_ch_word(uint32_t c) {
  if (c < 0x80)
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '_';
  utf8proc_category_t k = category(c);
  return letter(c) || (k >= UTF8PROC_CATEGORY_ND && k <= UTF8PROC_CATEGORY_NO);
}

bool mr_ch_printable(uint32_t c) {
  if (c < 0x80)
    return c >= 0x20 && c < 0x7f;
  switch (category(c)) {
  case UTF8PROC_CATEGORY_CN:
  case UTF8PROC_CATEGORY_CC:
  case UTF8PROC_CATEGORY_CF:
  case UTF8PROC_CATEGORY_CS:
  case UTF8PROC_CATEGORY_CO:
  case UTF8PROC_CATEGORY_ZL:
  case UTF8PROC_CATEGORY_ZP:
  case UTF8PROC_CATEGORY_ZS:
    return false;
  default:
    return true;
  }
}

/* ---- mapping ---- */

/* Full case folding of one code point. */
static int fold(uint32_t c, utf8proc_int32_t out[8]) {
  int boundary = 0;
  utf8proc_ssize_t n =
      utf8proc_decompose_char((utf8proc_int32_t)c, out, 8, UTF8PROC_CASEFOLD, &boundary);
  return n < 1 || n > 8 ? 0 : (int)n;
}

/* Full upper case: where a letter becomes several ("ß" to "SS"), they are the upper case of its
 * folding. */
static void add_upper(tsb *b, uint32_t c, tv_taint taint, bool title) {
  if (c < 0x80) {
    char u = (char)(c >= 'a' && c <= 'z' ? c - 32 : c);
    mr_tsb_add(b, &u, 1, taint);
    return;
  }
  utf8proc_int32_t f[8];
  utf8proc_category_t k = category(c);
  bool small = k == UTF8PROC_CATEGORY_LL || (k == UTF8PROC_CATEGORY_LT && !title);
  bool one =
      title && category((uint32_t)utf8proc_totitle((utf8proc_int32_t)c)) == UTF8PROC_CATEGORY_LT;
  int n = small && !one ? fold(c, f) : 0;
  if (n < 2) {
    utf8proc_int32_t u =
        title ? utf8proc_totitle((utf8proc_int32_t)c) : utf8proc_toupper((utf8proc_int32_t)c);
    mr_tsb_code(b, (uint32_t)u, taint);
    return;
  }
  for (int i = 0; i < n; i++)
    mr_tsb_code(b, (uint32_t)(title && i ? f[i] : utf8proc_toupper(f[i])), taint);
}

static bool cased(uint32_t c) {
  utf8proc_category_t k = category(c);
  return k == UTF8PROC_CATEGORY_LU || k == UTF8PROC_CATEGORY_LL || k == UTF8PROC_CATEGORY_LT;
}

static bool case_ignorable(uint32_t c) {
  utf8proc_category_t k = category(c);
  return c == '\'' || c == '.' || c == ':' || c == 0xb7 || c == 0x2019 ||
         k == UTF8PROC_CATEGORY_MN || k == UTF8PROC_CATEGORY_ME || k == UTF8PROC_CATEGORY_CF ||
         k == UTF8PROC_CATEGORY_LM || k == UTF8PROC_CATEGORY_SK;
}

/* A capital sigma that ends a word becomes the final one: a letter before it and none after. */
static bool final_sigma(const tv *s, size_t at) {
  bool before = false;
  uint32_t c;
  for (size_t i = 0; i < at;) {
    i += (size_t)mr_utf8_next(s->str.s + i, s->str.len - i, &c);
    before = case_ignorable(c) ? before : cased(c);
  }
  for (size_t i = at + 2; before && i < s->str.len;) {
    i += (size_t)mr_utf8_next(s->str.s + i, s->str.len - i, &c);
    if (!case_ignorable(c))
      return !cased(c);
  }
  return before;
}

static void add_lower(tsb *b, uint32_t c, const tv *s, size_t at) {
  tv_taint taint = mr_tv_taint_at(s, at);
  if (c < 0x80) {
    char l = (char)(c >= 'A' && c <= 'Z' ? c + 32 : c);
    mr_tsb_add(b, &l, 1, taint);
  } else if (c == 0x130) {
    mr_tsb_adds(b, "i\xcc\x87", taint);
  } else if (c == 0x3a3) {
    if (mr_tr_charge(b->r, s->str.len / 16))
      mr_tsb_code(b, final_sigma(s, at) ? 0x3c2 : 0x3c3, taint);
    else
      b->failed = true;
  } else {
    mr_tsb_code(b, (uint32_t)utf8proc_tolower((utf8proc_int32_t)c), taint);
  }
}

static void add_folded(tsb *b, uint32_t c, tv_taint taint) {
  utf8proc_int32_t f[8];
  int n = fold(c, f);
  for (int i = 0; i < n; i++)
    mr_tsb_code(b, (uint32_t)f[i], taint);
}

/* The filter `title` starts words after these; str.title starts them after anything that is not a
 * letter. */
static bool starts_word(uint32_t before, int how) {
  if (how == CASE_TITLE_FILTER)
    return before == '-' || before == '(' || before == '{' || before == '[' || before == '<' ||
           mr_ch_space(before);
  return !cased(before);
}

static void add_case(tsb *b, uint32_t c, const tv *s, size_t at, int how, uint32_t before) {
  tv_taint taint = mr_tv_taint_at(s, at);
  bool first =
      at == 0 || ((how == CASE_TITLE || how == CASE_TITLE_FILTER) && starts_word(before, how));
  if (how == CASE_FOLD)
    add_folded(b, c, taint);
  else if (how == CASE_UPPER || (how == CASE_TITLE_FILTER && first))
    add_upper(b, c, taint, false);
  else if (how == CASE_SWAP && category(c) == UTF8PROC_CATEGORY_LT)
    mr_tsb_code(b, c, taint);
  else if (how == CASE_SWAP && category(c) != UTF8PROC_CATEGORY_LU)
    add_upper(b, c, taint, false);
  else if ((how == CASE_TITLE || how == CASE_CAPITAL) && first)
    add_upper(b, c, taint, true);
  else
    add_lower(b, c, s, at);
}

tv *mr_str_case(tr *r, tv *s, int how) {
  tsb b;
  uint32_t c, before = ' ';
  if (!mr_tr_charge(r, s->str.len / 16))
    return NULL;
  mr_tsb_init(&b, r);
  for (size_t at = 0; at < s->str.len && !b.failed;) {
    size_t len = (size_t)mr_utf8_next(s->str.s + at, s->str.len - at, &c);
    add_case(&b, c, s, at, how, before);
    before = c;
    at += len;
  }
  tv *v = mr_tsb_done(&b);
  if (v && s->safe && v != &mr_tv_empty)
    v->safe = 1;
  return v;
}

/* ---- classes ---- */

static bool digit(uint32_t c, bool decimal_only) {
  if (c < 0x80)
    return c >= '0' && c <= '9';
  bool super = c == 0xb2 || c == 0xb3 || c == 0xb9 || c == 0x2070 || (c >= 0x2074 && c <= 0x2079) ||
               (c >= 0x2080 && c <= 0x2089);
  return category(c) == UTF8PROC_CATEGORY_ND || (!decimal_only && super);
}

static bool numeric(uint32_t c) {
  utf8proc_category_t k = category(c);
  return k >= UTF8PROC_CATEGORY_ND && k <= UTF8PROC_CATEGORY_NO;
}

static bool in_class(uint32_t c, const char *which) {
  if (strcmp(which, "isdigit") == 0)
    return digit(c, false);
  if (strcmp(which, "isdecimal") == 0)
    return digit(c, true);
  if (strcmp(which, "isnumeric") == 0)
    return numeric(c);
  if (strcmp(which, "isalpha") == 0)
    return letter(c);
  if (strcmp(which, "isalnum") == 0)
    return letter(c) || numeric(c);
  if (strcmp(which, "isspace") == 0)
    return mr_ch_space(c);
  if (strcmp(which, "isascii") == 0)
    return c < 0x80;
  return mr_ch_printable(c);
}

/* isupper, islower, istitle: some cased letter, and no letter of the wrong case. */
static int case_class(const tv *s, const char *which) {
  bool upper = strcmp(which, "isupper") == 0, title = strcmp(which, "istitle") == 0, any = false,
       before = false;
  uint32_t c;
  for (size_t at = 0; at < s->str.len;) {
    at += (size_t)mr_utf8_next(s->str.s + at, s->str.len - at, &c);
    bool is_cased = cased(c), high = is_cased && category(c) != UTF8PROC_CATEGORY_LL;
    if (is_cased &&
        (high != (title ? !before : upper) || (!title && category(c) == UTF8PROC_CATEGORY_LT)))
      return 0;
    any |= is_cased;
    before = is_cased;
  }
  return any;
}

int mr_ch_class(const tv *s, const char *which) {
  uint32_t c;
  if (strcmp(which, "isupper") == 0 || strcmp(which, "islower") == 0 ||
      strcmp(which, "istitle") == 0)
    return case_class(s, which);
  for (size_t at = 0; at < s->str.len;) {
    at += (size_t)mr_utf8_next(s->str.s + at, s->str.len - at, &c);
    if (!in_class(c, which))
      return 0;
  }
  return s->str.len > 0 || strcmp(which, "isascii") == 0 || strcmp(which, "isprintable") == 0;
}
