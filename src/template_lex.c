/* template_lex.c: template source to tokens.
 *
 * White space as the reference is set up for chat templates: the first newline after a block tag or
 * a comment is dropped, and so are the spaces between the start of a line and a block tag or
 * comment; "-" at a tag strips all white space on its side, "+" turns stripping off; one newline at
 * the end of the source is dropped.
 */
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "io/mem.h"
#include "src/template_int.h"

#define MAX_SOURCE ((size_t)16 << 20)
#define MAX_OPEN 200 /* brackets within brackets */

typedef struct lexer {
  tr *r;
  const char *s; /* newlines made \n */
  size_t len, at;
  size_t counted; /* bytes whose newlines are in `line` */
  int line;
  bool line_start; /* what came before ended with a newline */
  tk *tokens;
  size_t n, cap;
  char open[MAX_OPEN];
  int n_open;
} lexer;

static bool fail(lexer *l, const char *fmt, const char *text, size_t len) {
  l->r->line = l->line;
  mr_tr_fail(l->r, fmt, (int)(len < 60 ? len : 60), text);
  return false;
}

static void count_lines(lexer *l, size_t to) {
  for (; l->counted < to; l->counted++)
    l->line += l->s[l->counted] == '\n';
}

static tk *push(lexer *l, tk_kind kind, size_t from, size_t len) {
  if (l->n == l->cap) {
    size_t cap = l->cap ? l->cap * 2 : 256;
    tk *grown = mr_tr_alloc(l->r, cap, sizeof *grown);
    if (!grown)
      return NULL;
    if (l->n)
      memcpy(grown, l->tokens, l->n * sizeof *grown);
    l->tokens = grown;
    l->cap = cap;
  }
  count_lines(l, from);
  l->tokens[l->n] = (tk){.kind = (uint8_t)kind, .line = l->line, .s = l->s + from, .len = len};
  return &l->tokens[l->n++];
}

static bool starts(const lexer *l, size_t at, const char *what) {
  size_t n = strlen(what);
  return l->len - at >= n && memcmp(l->s + at, what, n) == 0;
}

static size_t skip_space(const lexer *l, size_t at) {
  uint32_t c;
  while (at < l->len) {
    size_t n = (size_t)mr_utf8_next(l->s + at, l->len - at, &c);
    if (!mr_ch_space(c))
      break;
    at += n;
  }
  return at;
}

static size_t strip_end(const lexer *l, size_t from, size_t to) {
  while (to > from) {
    size_t at = to - 1;
    uint32_t c;
    while (at > from && ((unsigned char)l->s[at] & 0xc0) == 0x80)
      at--;
    mr_utf8_next(l->s + at, to - at, &c);
    if (!mr_ch_space(c))
      break;
    to = at;
  }
  return to;
}

/* ---- text between tags ---- */

static bool push_text(lexer *l, size_t from, size_t to) {
  if (to <= from)
    return true;
  tk *t = push(l, TK_DATA, from, to - from);
  if (!t || !(t->val = mr_tv_text(l->r, l->s + from, to - from, TAINT_NONE)))
    return false;
  mr_tv_chars(t->val); /* constants are counted now: renders share them */
  return true;
}

/* The end of the text [from, to) before a tag with this sign. */
static size_t text_end(const lexer *l, size_t from, size_t to, char sign, bool print) {
  if (sign == '-')
    return strip_end(l, from, to);
  if (sign == '+' || print)
    return to;
  size_t line = to;
  while (line > from && l->s[line - 1] != '\n')
    line--;
  if (line == from && !l->line_start)
    return to;
  return strip_end(l, line, to) == line ? line : to;
}

/* Past "%}" and the like at `at`: sign as given, one newline dropped after a block. 0: no end here.
 */
static size_t tag_end(const lexer *l, size_t at, const char *end, bool block) {
  if (at < l->len && l->s[at] == '-' && starts(l, at + 1, end))
    return skip_space(l, at + 3);
  if (block && at < l->len && l->s[at] == '+' && starts(l, at + 1, end))
    return at + 3;
  if (!starts(l, at, end))
    return 0;
  return at + 2 + (block && at + 2 < l->len && l->s[at + 2] == '\n');
}

static char sign_at(const lexer *l, size_t at) {
  return at < l->len && (l->s[at] == '-' || l->s[at] == '+') ? l->s[at] : '\0';
}

static void moved(lexer *l, size_t to) {
  l->line_start = to > 0 && l->s[to - 1] == '\n';
  l->at = to;
}

/* Past {% raw %} at `at`, or 0. */
static size_t raw_begin(const lexer *l, size_t at) {
  size_t p = skip_space(l, at + 2 + (sign_at(l, at + 2) != 0));
  if (!starts(l, p, "raw"))
    return 0;
  p = skip_space(l, p + 3);
  if (starts(l, p, "-%}"))
    return skip_space(l, p + 3);
  return starts(l, p, "%}") ? p + 2 : 0;
}

static bool raw_block(lexer *l) {
  size_t from = l->at;
  if (from == l->len)
    return true;
  for (size_t p = from; p + 1 < l->len; p++) {
    if (!starts(l, p, "{%"))
      continue;
    char sign = sign_at(l, p + 2);
    size_t name = skip_space(l, p + 2 + (sign != 0));
    size_t end = starts(l, name, "endraw") ? tag_end(l, skip_space(l, name + 6), "%}", true) : 0;
    if (!end)
      continue;
    if (!push_text(l, from, text_end(l, from, p, sign, false)))
      return false;
    moved(l, end);
    return true;
  }
  return fail(l, "Missing end of raw directive%.*s", "", 0);
}

static bool comment(lexer *l) {
  for (size_t p = l->at; p + 1 < l->len; p++) {
    size_t end = tag_end(l, p, "#}", true);
    if (end) {
      moved(l, end);
      return true;
    }
  }
  return l->at == l->len || fail(l, "Missing end of comment tag%.*s", "", 0);
}

/* ---- inside tags ---- */

static int hex_of(const char *s, size_t n, uint32_t *out) {
  *out = 0;
  for (size_t i = 0; i < n; i++) {
    int d = isdigit((unsigned char)s[i])    ? s[i] - '0'
            : isxdigit((unsigned char)s[i]) ? (tolower((unsigned char)s[i]) - 'a') + 10
                                            : -1;
    if (d < 0)
      return 0;
    *out = *out * 16 + (uint32_t)d;
  }
  return 1;
}

/* \xhh, \uhhhh (pairs of surrogates are joined), \Uhhhhhhhh at s after the backslash; returns its
 * length, 0: wrong. */
static size_t hex_escape(const char *s, size_t n, uint32_t *code) {
  size_t digits = s[0] == 'x' ? 2 : s[0] == 'u' ? 4 : 8;
  uint32_t low;
  if (n < 1 + digits || !hex_of(s + 1, digits, code) || *code > 0x10ffff)
    return 0;
  if (*code >= 0xd800 && *code < 0xdc00 && n >= 11 && s[5] == '\\' && s[6] == 'u' &&
      hex_of(s + 7, 4, &low) && low >= 0xdc00 && low < 0xe000) {
    *code = 0x10000 + ((*code - 0xd800) << 10) + (low - 0xdc00);
    return 11;
  }
  if (*code >= 0xd800 && *code < 0xe000)
    *code = 0xfffd;
  return 1 + digits;
}

/* One escape at s (after the backslash); returns its length, 0: wrong. */
static size_t escape(tsb *b, const char *s, size_t n) {
  static const char names[] = "\\'\"abfnrtv", values[] = "\\'\"\a\b\f\n\r\t\v";
  const char *p = *s ? strchr(names, *s) : NULL;
  uint32_t code = 0;
  size_t k = 0;
  if (p) {
    mr_tsb_add(b, values + (p - names), 1, TAINT_NONE);
    return 1;
  }
  if (*s == '\n')
    return 1;
  if (*s == 'x' || *s == 'u' || *s == 'U') {
    k = hex_escape(s, n, &code);
  } else if (*s >= '0' && *s <= '7') {
    for (; k < 3 && k < n && s[k] >= '0' && s[k] <= '7'; k++)
      code = code * 8 + (uint32_t)(s[k] - '0');
  } else if (*s != 'N') {
    mr_tsb_adds(b, "\\", TAINT_NONE); /* an unknown escape stays as it is */
    mr_tsb_add(b, s, 1, TAINT_NONE);
    return 1;
  }
  if (k)
    mr_tsb_code(b, code, TAINT_NONE);
  return k;
}

static bool string(lexer *l) {
  char quote = l->s[l->at];
  size_t from = l->at + 1, p = from;
  while (p < l->len && l->s[p] != quote)
    p += l->s[p] == '\\' ? 2 : 1;
  if (p >= l->len)
    return fail(l, "unexpected char: a text that starts with %.*s has no end", &quote, 1);
  tk *t = push(l, TK_STRING, l->at, p + 1 - l->at);
  if (!t)
    return false;
  tsb b;
  mr_tsb_init(&b, l->r);
  for (size_t i = from; i < p;) {
    size_t run = i;
    while (run < p && l->s[run] != '\\')
      run++;
    mr_tsb_add(&b, l->s + i, run - i, TAINT_NONE);
    i = run;
    if (i == p)
      break;
    size_t n = escape(&b, l->s + i + 1, p - i - 1);
    if (!n)
      return fail(l, "wrong escape in the text %.*s", l->s + l->at, p + 1 - l->at);
    i += 1 + n;
    while (i < p && ((unsigned char)l->s[i] & 0xc0) == 0x80) /* the rest of a character after an
                                                                unknown escape */
      mr_tsb_add(&b, l->s + i++, 1, TAINT_NONE);
  }
  t->val = mr_tsb_done(&b);
  if (!t->val)
    return false;
  mr_tv_chars(t->val);
  l->at = p + 1;
  return true;
}

static size_t digits(const lexer *l, size_t p) { /* (\d+_)*\d+ */
  size_t from = p;
  while (p < l->len &&
         (isdigit((unsigned char)l->s[p]) ||
          (l->s[p] == '_' && p > from && p + 1 < l->len && isdigit((unsigned char)l->s[p - 1]) &&
           isdigit((unsigned char)l->s[p + 1]))))
    p++;
  return p;
}

/* End of a float at `at`, or `at` when there is none. */
static size_t float_end(const lexer *l, size_t at) {
  size_t p = digits(l, at), q;
  if (at > 0 && l->s[at - 1] == '.')
    return at;
  bool fraction = p + 1 < l->len && l->s[p] == '.' && isdigit((unsigned char)l->s[p + 1]);
  if (fraction)
    p = digits(l, p + 1);
  q = p;
  if (q < l->len && (l->s[q] == 'e' || l->s[q] == 'E')) {
    q++;
    q += q < l->len && (l->s[q] == '+' || l->s[q] == '-');
    if (q < l->len && isdigit((unsigned char)l->s[q]))
      return digits(l, q);
  }
  return fraction ? p : at;
}

static size_t int_end(const lexer *l, size_t at) {
  size_t p = at + 1;
  if (l->s[at] != '0')
    return digits(l, at);
  int base = p < l->len ? tolower((unsigned char)l->s[p]) : 0;
  base = base == 'x' ? 16 : base == 'o' ? 8 : base == 'b' ? 2 : 0;
  for (size_t q = p + 1; base && q < l->len; q++) {
    int c = tolower((unsigned char)l->s[q]), d = isdigit(c)             ? c - '0'
                                                 : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                                                        : 99;
    if (d < base)
      p = q + 1;
    else if (c != '_' || l->s[q - 1] == '_')
      break;
  }
  while (p == at + 1 && p < l->len && l->s[p] == '0')
    at = p++;
  return p;
}

static bool number(lexer *l) {
  size_t end = float_end(l, l->at);
  bool real = end > l->at;
  if (!real)
    end = int_end(l, l->at);
  tk *t = push(l, real ? TK_FLOAT : TK_INT, l->at, end - l->at);
  if (!t)
    return false;
  tv text = {.kind = TV_STR, .str = {.s = t->s, .len = t->len, .chars = -1}};
  double f = 0;
  tv_int i = 0;
  if (real ? !mr_str_parse_real(&text, &f) : !mr_str_parse_int(&text, 0, &i))
    return fail(l, "the number %.*s is out of range", t->s, t->len);
  t->val = real ? mr_tv_float(l->r, f) : mr_tv_int(l->r, i);
  l->at = end;
  return t->val != NULL;
}

static bool name(lexer *l) {
  size_t p = l->at;
  uint32_t c;
  while (p < l->len) {
    size_t n = (size_t)mr_utf8_next(l->s + p, l->len - p, &c);
    if (!mr_ch_word(c))
      break;
    p += n;
  }
  bool good = push(l, TK_NAME, l->at, p - l->at) != NULL;
  l->at = p;
  return good;
}

static bool bracket(lexer *l, char c) {
  if (c == '(' || c == '[' || c == '{') {
    if (l->n_open == MAX_OPEN)
      return fail(l, "brackets are nested too deep%.*s", "", 0);
    l->open[l->n_open++] = c == '(' ? ')' : c == '[' ? ']' : '}';
    return true;
  }
  if (l->n_open == 0)
    return fail(l, "unexpected '%.*s'", &c, 1);
  if (l->open[--l->n_open] != c)
    return fail(l, "unexpected '%.*s', another bracket is open", &c, 1);
  return true;
}

static bool operator_token(lexer *l) {
  static const char *const twos[] = {"//", "**", "==", "!=", ">=", "<="};
  char c = l->s[l->at];
  uint16_t op = 0;
  for (size_t i = 0; i < sizeof twos / sizeof *twos; i++)
    if (starts(l, l->at, twos[i]))
      op = OP2(twos[i][0], twos[i][1]);
  if (!op && c && strchr("+-/*%~[](){}><=.:|,;", c))
    op = (unsigned char)c;
  if (!op)
    return fail(l, "unexpected char '%.*s'", &c, 1);
  if (strchr("()[]{}", c) && !bracket(l, c))
    return false;
  tk *t = push(l, TK_OP, l->at, op > 0xff ? 2 : 1);
  if (!t)
    return false;
  t->op = op;
  l->at += t->len;
  return true;
}

/* Tokens up to the end of a {{ or {% tag. */
static bool tag(lexer *l, bool block) {
  const char *end = block ? "%}" : "}}";
  while (l->at < l->len) {
    size_t past = l->n_open ? 0 : tag_end(l, l->at, end, block);
    if (past) {
      bool good = push(l, block ? TK_BLOCK_END : TK_PRINT_END, l->at, 2) != NULL;
      moved(l, past);
      return good;
    }
    size_t p = skip_space(l, l->at);
    unsigned char c = (unsigned char)l->s[p];
    if (p > l->at) {
      l->at = p;
      continue;
    }
    count_lines(l, p);
    uint32_t code;
    mr_utf8_next(l->s + p, l->len - p, &code);
    bool good = isdigit(c)              ? number(l)
                : mr_ch_word(code)      ? name(l)
                : c == '\'' || c == '"' ? string(l)
                                        : operator_token(l);
    if (!good)
      return false;
  }
  return true;
}

/* Text up to the next tag, and that tag. */
static bool step(lexer *l) {
  size_t from = l->at, p = from;
  while (p + 1 < l->len &&
         !(l->s[p] == '{' && (l->s[p + 1] == '{' || l->s[p + 1] == '%' || l->s[p + 1] == '#')))
    p++;
  if (p + 1 >= l->len) {
    l->at = l->len;
    return push_text(l, from, l->len);
  }
  char kind = l->s[p + 1], sign = sign_at(l, p + 2);
  if (!push_text(l, from, text_end(l, from, p, sign, kind == '{')))
    return false;
  count_lines(l, p);
  size_t raw = kind == '%' ? raw_begin(l, p) : 0;
  moved(l, raw ? raw : p + 2 + (sign != 0));
  if (raw)
    return raw_block(l);
  if (kind == '#')
    return comment(l);
  return push(l, kind == '%' ? TK_BLOCK_BEGIN : TK_PRINT_BEGIN, p, 2) && tag(l, kind == '%');
}

/* The source with \r\n and \r made \n, less one newline at its end. */
static bool normalize(lexer *l, const char *src, size_t len) {
  char *s = mr_tr_alloc(l->r, len + 1, 1);
  size_t n = 0;
  if (!s)
    return false;
  for (size_t i = 0; i < len; i++) {
    bool cr = src[i] == '\r';
    s[n++] = cr ? '\n' : src[i];
    i += cr && i + 1 < len && src[i + 1] == '\n';
  }
  n -= n && s[n - 1] == '\n';
  s[n] = '\0';
  l->s = s;
  l->len = n;
  return true;
}

tk *mr_tpl_lex(tr *r, const char *src, size_t len) {
  lexer l = {.r = r, .line = 1, .line_start = true};
  int64_t bad = mr_utf8_valid(src, len);
  if (len > MAX_SOURCE)
    return mr_tr_fail(r, "is %zu bytes long; at most %zu are read", len, MAX_SOURCE);
  if (bad >= 0)
    return mr_tr_fail(r, "is not UTF-8: byte %lld", (long long)bad);
  if (!normalize(&l, src, len))
    return NULL;
  while (l.at < l.len)
    if (!step(&l))
      return NULL;
  return push(&l, TK_EOF, l.len, 0) ? l.tokens : NULL;
}
