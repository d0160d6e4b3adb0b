/* template_filters.c: filters on texts and numbers; those on lists are in template_seq.c. */
#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "src/template_int.h"

/* ---- parsing numbers ---- */

static int digit_value(char c) {
  return c >= '0' && c <= '9'   ? c - '0'
         : c >= 'a' && c <= 'z' ? c - 'a' + 10
         : c >= 'A' && c <= 'Z' ? c - 'A' + 10
                                : 99;
}

static void trim_space(const tv *s, size_t *from, size_t *to) {
  uint32_t c;
  *from = 0;
  *to = s->str.len;
  while (*from < *to) {
    size_t n = (size_t)mr_utf8_next(s->str.s + *from, *to - *from, &c);
    if (!mr_ch_space(c))
      break;
    *from += n;
  }
  while (*to > *from && mr_ch_space((unsigned char)s->str.s[*to - 1]) &&
         (unsigned char)s->str.s[*to - 1] < 0x80)
    --*to;
}

/* As Python's int(text, base): a sign, a prefix that fits the base, underscores between digits. */
bool mr_str_parse_int(const tv *s, int base, tv_int *out) {
  size_t at, to;
  bool any = false, under = false, negative = false;
  *out = 0;
  trim_space(s, &at, &to);
  const char *t = s->str.s;
  if (at < to && (t[at] == '+' || t[at] == '-'))
    negative = t[at++] == '-';
  if (to - at > 2 && t[at] == '0') {
    int prefix = tolower((unsigned char)t[at + 1]), b = prefix == 'x'   ? 16
                                                        : prefix == 'o' ? 8
                                                        : prefix == 'b' ? 2
                                                                        : 0;
    if (b && (base == b || base == 0)) {
      base = b;
      at += 2;
      under = t[at] != '_';
      at += t[at] == '_';
    }
  }
  base = base ? base : 10;
  for (; at < to; at++) {
    int d = digit_value(t[at]);
    if (t[at] == '_' && any && under) {
      under = false;
      continue;
    }
    if (d >= base || __builtin_mul_overflow(*out, (tv_int)base, out) ||
        (negative ? __builtin_sub_overflow(*out, (tv_int)d, out)
                  : __builtin_add_overflow(*out, (tv_int)d, out)))
      return false;
    any = under = true;
  }
  return any && under;
}

bool mr_str_parse_real(const tv *s, double *out) {
  size_t at, to, n = 0;
  char text[400], *end;
  trim_space(s, &at, &to);
  if (at == to || to - at >= sizeof text)
    return false;
  for (; at < to; at++) {
    char c = s->str.s[at];
    bool between = at > 0 && at + 1 < to && isdigit((unsigned char)s->str.s[at - 1]) &&
                   isdigit((unsigned char)s->str.s[at + 1]);
    if (c == '_' && between)
      continue;
    if (!isalnum((unsigned char)c) && c != '.' && c != '+' && c != '-')
      return false;
    if (c == 'x' || c == 'X' || c == 'p' || c == 'P')
      return false;
    text[n++] = c;
  }
  text[n] = '\0';
  *out = strtod(text, &end);
  return *end == '\0' && end != text;
}

static tv *int_of_real(tr *r, double f, tv *missing) {
  return fabs(f) < 1e38 ? mr_tv_int(r, (tv_int)f) : missing ? missing : mr_tv_int(r, 0);
}

static tv *f_int(tr *r, tv *self, tv_call *c) {
  int64_t base;
  tv_int i;
  double f;
  if (!mr_tpl_arg_int(r, c->p[1], 10, &base))
    return NULL;
  if (base != 0 && (base < 2 || base > 36))
    return c->p[0] ? c->p[0] : mr_tv_int(r, 0);
  if (mr_tv_as_int(self, &i))
    return mr_tv_int(r, i);
  if (self->kind == TV_FLOAT)
    return int_of_real(r, self->f, c->p[0]);
  if (self->kind == TV_STR && mr_str_parse_int(self, (int)base, &i))
    return mr_tv_int(r, i);
  if (self->kind == TV_STR && mr_str_parse_real(self, &f))
    return int_of_real(r, f, c->p[0]);
  if (self->kind == TV_UNDEF)
    return mr_tv_fail_undef(r, self);
  return c->p[0] ? c->p[0] : mr_tv_int(r, 0);
}

static tv *f_float(tr *r, tv *self, tv_call *c) {
  double f;
  if (mr_tv_is_num(self))
    return mr_tv_float(r, mr_tv_real(self));
  if (self->kind == TV_STR && mr_str_parse_real(self, &f))
    return mr_tv_float(r, f);
  if (self->kind == TV_UNDEF)
    return mr_tv_fail_undef(r, self);
  return c->p[0] ? c->p[0] : mr_tv_float(r, 0);
}

static tv *f_abs(tr *r, tv *self, tv_call *c) {
  tv_int i;
  (void)c;
  if (mr_tv_as_int(self, &i))
    return i < 0 ? mr_op_negate(r, self, true) : mr_tv_int(r, i);
  if (self->kind == TV_FLOAT)
    return mr_tv_float(r, fabs(self->f));
  if (self->kind == TV_UNDEF)
    return mr_tv_fail_undef(r, self);
  return mr_tr_fail(r, "bad operand type for abs(): '%s'", mr_tv_type(self));
}

/* Half to even on the decimal value, as Python's round: the C library prints exactly so. */
static tv *round_real(tr *r, double x, int64_t digits) {
  char text[700];
  if (!isfinite(x) || digits > 300)
    return mr_tv_float(r, x);
  if (digits < 0) {
    double scale = pow(10, (double)-digits);
    return mr_tv_float(r, digits < -308 ? 0 : nearbyint(x / scale) * scale);
  }
  snprintf(text, sizeof text, "%.*f", (int)digits, x);
  return mr_tv_float(r, strtod(text, NULL));
}

static tv *f_round(tr *r, tv *self, tv_call *c) {
  int64_t digits;
  tv_int i;
  const tv *method = c->p[1];
  bool ceiling = method && mr_tv_is_str(method, "ceil"),
       flooring = method && mr_tv_is_str(method, "floor");
  if (method && !ceiling && !flooring && !mr_tv_is_str(method, "common"))
    return mr_tr_fail(r, "method must be common, ceil or floor");
  if (!mr_tpl_arg_int(r, c->p[0], 0, &digits))
    return NULL;
  if (self->kind == TV_UNDEF)
    return mr_tv_fail_undef(r, self);
  if (!mr_tv_is_num(self))
    return mr_tr_fail(r, "type %s doesn't define __round__ method", mr_tv_type(self));
  if (ceiling || flooring) {
    double scale = pow(10, (double)digits), x = mr_tv_real(self) * scale;
    return mr_tv_float(r, (ceiling ? ceil(x) : floor(x)) / scale);
  }
  if (!mr_tv_as_int(self, &i))
    return round_real(r, self->f, digits);
  if (digits >= 0)
    return mr_tv_int(r, i);
  double scale = pow(10, (double)-digits);
  return digits < -37 ? mr_tv_int(r, 0)
                      : mr_tv_int(r, (tv_int)(nearbyint((double)i / scale) * scale));
}

static tv *f_filesizeformat(tr *r, tv *self, tv_call *c) {
  static const char letters[] = "kMGTPEZY";
  bool binary = c->p[0] && mr_tv_truth(c->p[0]);
  double base = binary ? 1024 : 1000, bytes, unit = base;
  char text[64];
  int i = 0;
  if (self->kind == TV_STR ? !mr_str_parse_real(self, &bytes) : !mr_tv_is_num(self))
    return mr_tr_fail(r, "filesizeformat wants a number, not '%s'", mr_tv_type(self));
  if (self->kind != TV_STR)
    bytes = mr_tv_real(self);
  if (bytes == 1) {
    snprintf(text, sizeof text, "1 Byte");
  } else if (bytes < base) {
    snprintf(text, sizeof text, "%lld Bytes", (long long)(fabs(bytes) < 1e18 ? bytes : 0));
  } else {
    for (unit = base * base; i < 7 && bytes >= unit; i++)
      unit *= base;
    snprintf(text, sizeof text, "%.1f %c%s", base * bytes / unit,
             binary && i == 0 ? 'K' : letters[i], binary ? "iB" : "B");
  }
  tsb b;
  mr_tsb_init(&b, r);
  mr_tsb_adds(&b, text, TAINT_NONE);
  return mr_tsb_done(&b);
}

/* ---- simple texts ---- */

static tv *cased(tr *r, tv *self, int how) {
  tv *s = mr_tv_str(r, self);
  return s ? mr_str_case(r, s, how) : NULL;
}

static tv *f_upper(tr *r, tv *self, tv_call *c) {
  (void)c;
  return cased(r, self, CASE_UPPER);
}

static tv *f_lower(tr *r, tv *self, tv_call *c) {
  (void)c;
  return cased(r, self, CASE_LOWER);
}

static tv *f_title(tr *r, tv *self, tv_call *c) {
  (void)c;
  return cased(r, self, CASE_TITLE_FILTER);
}

static tv *f_capitalize(tr *r, tv *self, tv_call *c) {
  (void)c;
  return cased(r, self, CASE_CAPITAL);
}

static tv *f_trim(tr *r, tv *self, tv_call *c) {
  tv *s = mr_tv_str(r, self);
  return s ? mr_str_strip(r, s, c->p[0], 3) : NULL;
}

static tv *f_string(tr *r, tv *self, tv_call *c) {
  (void)c;
  return mr_tv_str(r, self);
}

static tv *marked(tr *r, tv *s, bool safe) {
  if (!s || s->safe == safe)
    return s;
  tv *v = mr_tv_new(r, TV_STR);
  if (!v)
    return NULL;
  *v = *s;
  v->safe = safe;
  return v;
}

static tv *f_safe(tr *r, tv *self, tv_call *c) {
  (void)c;
  return marked(r, mr_tv_str(r, self), true);
}

static tv *f_escape(tr *r, tv *self, tv_call *c) {
  (void)c;
  return mr_tv_escape(r, self);
}

static tv *f_forceescape(tr *r, tv *self, tv_call *c) {
  (void)c;
  tv *s = marked(r, mr_tv_str(r, self), false);
  return s ? mr_tv_escape(r, s) : NULL;
}

static tv *f_replace(tr *r, tv *self, tv_call *c) {
  int64_t count;
  bool none = c->p[2] && c->p[2]->kind == TV_NONE;
  tv *s = mr_tv_str(r, self), *old = mr_tv_str(r, c->p[0]), *with = mr_tv_str(r, c->p[1]);
  if (!s || !old || !with || !mr_tpl_arg_int(r, none ? NULL : c->p[2], -1, &count))
    return NULL;
  if (!r->escape)
    s = marked(r, s, false);
  else if (old->safe || with->safe)
    s = mr_tv_escape(r, s);
  return s ? mr_str_replace(r, s, old, with, count) : NULL;
}

static tv *f_center(tr *r, tv *self, tv_call *c) {
  int64_t width;
  tv *s = mr_tv_str(r, self);
  return s && mr_tpl_arg_int(r, c->p[0], 80, &width) ? mr_str_center(r, s, width, NULL, '^') : NULL;
}

static tv *f_format(tr *r, tv *self, tv_call *c) {
  tv *s = mr_tv_str(r, self), *args;
  if (c->n_pos && c->n_kw)
    return mr_tr_fail(r, "can't handle positional and keyword arguments at the same time");
  args =
      c->n_kw ? mr_tv_dict(r, TV_DICT, (size_t)c->n_kw) : mr_tv_seq(r, TV_TUPLE, (size_t)c->n_pos);
  if (!s || !args)
    return NULL;
  for (int i = 0; i < c->n_kw; i++)
    if (!mr_tv_dict_put(r, args, c->kw[i].key, c->kw[i].val))
      return NULL;
  for (int i = 0; i < c->n_pos; i++)
    args->seq.items[i] = c->pos[i];
  return mr_fmt_percent(r, s, args);
}

static tv *f_default(tr *r, tv *self, tv_call *c) {
  (void)r;
  bool empty = self->kind == TV_UNDEF || (c->p[1] && mr_tv_truth(c->p[1]) && !mr_tv_truth(self));
  return !empty ? self : c->p[0] ? c->p[0] : &mr_tv_empty;
}

static tv *f_attr(tr *r, tv *self, tv_call *c) {
  if (c->p[0]->kind != TV_STR)
    return mr_tr_fail(r, "attribute name must be string, not '%s'", mr_tv_type(c->p[0]));
  tn_lookup look = mr_tpl_methods(c->p[0]->str.s, c->p[0]->str.len);
  tv *v = mr_op_attr(r, self, c->p[0], &look);
  /* Unlike a.b it does not fall back to items. */
  return v && self->kind == TV_DICT && v->kind != TV_BOUND && v->kind != TV_UNDEF
             ? mr_tv_undef(r, self, c->p[0])
             : v;
}

/* ---- longer texts ---- */

/* Filters that call methods of their input take nothing but texts. */
static bool is_text(tr *r, const tv *v) {
  if (v->kind == TV_UNDEF)
    mr_tv_fail_undef(r, v);
  else if (v->kind != TV_STR)
    mr_tr_fail(r, "wants a text, not '%s'", mr_tv_type(v));
  return v->kind == TV_STR;
}

static tv *f_indent(tr *r, tv *self, tv_call *c) {
  int64_t width = 4;
  tv *margin = c->p[0], *lines;
  bool first = c->p[1] && mr_tv_truth(c->p[1]), blank = c->p[2] && mr_tv_truth(c->p[2]);
  tsb b;
  if (!is_text(r, self))
    return NULL;
  if (margin && margin->kind != TV_STR && !mr_tpl_arg_int(r, margin, 4, &width))
    return NULL;
  if (!margin || margin->kind != TV_STR)
    margin = mr_str_center(r, &mr_tv_empty, width, NULL, '<');
  lines = margin ? mr_str_lines(r, self, false) : NULL;
  if (!lines)
    return NULL;
  mr_tsb_init(&b, r);
  size_t n = lines->seq.n;
  uint32_t last = 0; /* a text that ends with a line break has one more line, which is empty */
  for (size_t at = 0; at < self->str.len;)
    at += (size_t)mr_utf8_next(self->str.s + at, self->str.len - at, &last);
  if (!n || mr_ch_break(last))
    n++;
  for (size_t i = 0; i < n; i++) {
    tv *line = i < lines->seq.n ? lines->seq.items[i] : &mr_tv_empty;
    mr_tsb_adds(&b, i ? "\n" : "", TAINT_NONE);
    if (i ? blank || line->str.len : first)
      mr_tsb_val(&b, margin);
    mr_tsb_val(&b, line);
  }
  return marked(r, mr_tsb_done(&b), self->safe);
}

static tv *f_truncate(tr *r, tv *self, tv_call *c) {
  int64_t length, leeway;
  tv *s = self, *end = c->p[2] ? c->p[2] : mr_tv_text(r, "...", 3, TAINT_NONE);
  bool none = c->p[3] && c->p[3]->kind == TV_NONE;
  if (self->kind == TV_UNDEF) /* its length is 0 */
    return self;
  if (!is_text(r, s) || !end || !mr_tpl_arg_int(r, c->p[0], 255, &length) ||
      !mr_tpl_arg_int(r, none ? NULL : c->p[3], 5, &leeway))
    return NULL;
  if (end->kind != TV_STR || length < (int64_t)mr_tv_chars(end) || leeway < 0)
    return mr_tr_fail(r, "expected length >= the length of the end, and leeway >= 0");
  if ((int64_t)mr_tv_chars(s) <= length + leeway)
    return s;
  size_t cut = mr_tv_byte_at(s, (size_t)(length - (int64_t)mr_tv_chars(end))), space = cut;
  if (!c->p[1] || !mr_tv_truth(c->p[1])) {
    while (space > 0 && s->str.s[space - 1] != ' ')
      space--;
    cut = space > 0 ? space - 1 : cut;
  }
  tsb b;
  mr_tsb_init(&b, r);
  mr_tsb_sub(&b, s, 0, cut);
  mr_tsb_val(&b, end);
  return mr_tsb_done(&b);
}

typedef struct wrap { /* one line of text being broken into lines of at most `width` code points */
  tr *r;
  tsb *b;
  tv *line, *newline;
  size_t width;
  bool break_long, on_hyphens;
} wrap;

/* End of the chunk that starts at `at`: a run of spaces, or a word (a hyphen between letters ends
 * one). */
static size_t chunk_end(const wrap *w, size_t at) {
  const char *s = w->line->str.s;
  size_t len = w->line->str.len, to = at;
  bool space = s[at] == ' ' || s[at] == '\t';
  while (to < len && (s[to] == ' ' || s[to] == '\t') == space) {
    to++;
    if (!space && w->on_hyphens && s[to - 1] == '-' && to - at > 1 &&
        isalpha((unsigned char)s[to - 2]) && to < len && isalpha((unsigned char)s[to]))
      break;
  }
  return to;
}

static size_t chars_between(tv *s, size_t from, size_t to) {
  size_t n = 0;
  for (; from < to; from++)
    n += ((unsigned char)s->str.s[from] & 0xc0) != 0x80;
  return n;
}

/* A word wider than the line is cut where the line ends. */
static size_t cut_long(const wrap *w, size_t at, size_t to, size_t room) {
  size_t end = at, n = 0;
  while (end < to && n < room) {
    end++;
    while (end < to && ((unsigned char)w->line->str.s[end] & 0xc0) == 0x80)
      end++;
    n++;
  }
  return end;
}

static void wrap_line(wrap *w) {
  size_t at = 0, len = w->line->str.len;
  for (bool first = true; at < len && !w->b->failed; first = false) {
    size_t used = 0, from = at, keep;
    if (!first && (w->line->str.s[at] == ' ' || w->line->str.s[at] == '\t')) /* no line starts with
                                                                                spaces */
      from = at = chunk_end(w, at);
    if (at == len)
      return;
    for (keep = at; at < len;) {
      size_t to = chunk_end(w, at), n = chars_between(w->line, at, to);
      bool space = w->line->str.s[at] == ' ' || w->line->str.s[at] == '\t';
      if (used + n > w->width && n > w->width && !space) {
        if (w->break_long)
          to = cut_long(w, at, to, w->width > used ? w->width - used : 1);
        else if (used)
          break;
        keep = at = to;
        break;
      }
      if (used + n > w->width)
        break;
      used += n;
      at = to;
      keep = space ? keep : to; /* spaces at the end are dropped */
    }
    if (keep > from && !first)
      mr_tsb_val(w->b, w->newline);
    mr_tsb_sub(w->b, w->line, from, keep - from);
    if (at == from) /* spaces wider than the line */
      at = chunk_end(w, at);
  }
}

static tv *f_wordwrap(tr *r, tv *self, tv_call *c) {
  int64_t width;
  tv *newline = c->p[2] && c->p[2]->kind == TV_STR ? c->p[2] : mr_tv_text(r, "\n", 1, TAINT_NONE);
  tv *lines = is_text(r, self) ? mr_str_lines(r, self, false) : NULL;
  tsb b;
  if (!lines || !newline || !mr_tpl_arg_int(r, c->p[0], 79, &width))
    return NULL;
  if (width <= 0)
    return mr_tr_fail(r, "invalid width %lld (must be > 0)", (long long)width);
  mr_tsb_init(&b, r);
  wrap w = {r,
            &b,
            NULL,
            newline,
            (size_t)width,
            !c->p[1] || mr_tv_truth(c->p[1]),
            !c->p[3] || mr_tv_truth(c->p[3])};
  for (size_t i = 0; i < lines->seq.n; i++) {
    w.line = lines->seq.items[i];
    if (i)
      mr_tsb_val(&b, newline);
    wrap_line(&w);
  }
  return mr_tsb_done(&b);
}

static tv *f_wordcount(tr *r, tv *self, tv_call *c) {
  tv *s = mr_tv_str(r, self);
  tv_int n = 0;
  bool in = false;
  uint32_t code;
  (void)c;
  for (size_t at = 0; s && at < s->str.len;) {
    at += (size_t)mr_utf8_next(s->str.s + at, s->str.len - at, &code);
    bool word = mr_ch_word(code);
    n += word && !in;
    in = word;
  }
  return s ? mr_tv_int(r, n) : NULL;
}

/* Without comments and tags, runs of white space made one space, entities read back. */
static tv *f_striptags(tr *r, tv *self, tv_call *c) {
  static const char *const entities[] = {"&amp;", "&", "&lt;",  "<",  "&gt;",   ">",
                                         "&#39;", "'", "&#34;", "\"", "&quot;", "\""};
  tv *s = mr_tv_str(r, self);
  tsb b;
  (void)c;
  if (!s)
    return NULL;
  mr_tsb_init(&b, r);
  bool space = false, any = false;
  for (size_t at = 0; at < s->str.len && !b.failed;) {
    uint32_t code;
    size_t left = s->str.len - at, n = (size_t)mr_utf8_next(s->str.s + at, left, &code);
    const char *t = s->str.s + at, *close = NULL;
    if (left > 3 && memcmp(t, "<!--", 4) == 0 && (close = memmem(t, left, "-->", 3)))
      n = (size_t)(close - t) + 3;
    else if (*t == '<' && (close = memchr(t, '>', left)))
      n = (size_t)(close - t) + 1;
    if (!close && mr_ch_space(code)) {
      space = true;
    } else if (!close) {
      mr_tsb_adds(&b, space && any ? " " : "", TAINT_NONE);
      space = false;
      any = true;
      size_t k = 0;
      while (k < 12 &&
             (strlen(entities[k]) > left || memcmp(t, entities[k], strlen(entities[k])) != 0))
        k += 2;
      if (k < 12) {
        mr_tsb_adds(&b, entities[k + 1], mr_tv_taint_at(s, at));
        n = strlen(entities[k]);
      } else {
        mr_tsb_sub(&b, s, at, n);
      }
    }
    at += n;
  }
  return mr_tsb_done(&b);
}

static bool add_quoted(tsb *b, tv *v, bool form) {
  tv *s = mr_tv_str(b->r, v);
  char hex[4];
  for (size_t i = 0; s && i < s->str.len && !b->failed; i++) {
    unsigned char ch = (unsigned char)s->str.s[i];
    if (ch < 0x80 && (isalnum(ch) || strchr("_.-~", ch)) && ch)
      mr_tsb_sub(b, s, i, 1);
    else if (ch == '/' && !form)
      mr_tsb_sub(b, s, i, 1);
    else if (ch == ' ' && form)
      mr_tsb_adds(b, "+", mr_tv_taint_at(s, i));
    else {
      snprintf(hex, sizeof hex, "%%%02X", ch);
      mr_tsb_adds(b, hex, mr_tv_taint_at(s, i));
    }
  }
  return s && !b->failed;
}

static tv *f_urlencode(tr *r, tv *self, tv_call *c) {
  tv **items, **two;
  size_t n, n_two;
  tsb b;
  (void)c;
  mr_tsb_init(&b, r);
  bool pairs = self->kind == TV_DICT || self->kind == TV_LIST || self->kind == TV_TUPLE ||
               self->kind == TV_VIEW;
  if (!pairs)
    return add_quoted(&b, self, false) ? mr_tsb_done(&b) : NULL;
  tv view = {.kind = TV_VIEW, .view = {self, VIEW_ITEMS}};
  if (!mr_tv_iter(r, self->kind == TV_DICT ? &view : self, &items, &n))
    return NULL;
  for (size_t i = 0; i < n; i++) {
    if (!mr_tv_iter(r, items[i], &two, &n_two))
      return NULL;
    if (n_two != 2)
      return mr_tr_fail(r, "not enough values to unpack (expected 2, got %zu)", n_two);
    mr_tsb_adds(&b, i ? "&" : "", TAINT_NONE);
    if (!add_quoted(&b, two[0], true))
      return NULL;
    mr_tsb_adds(&b, "=", TAINT_NONE);
    if (!add_quoted(&b, two[1], true))
      return NULL;
  }
  return mr_tsb_done(&b);
}

static tv *f_xmlattr(tr *r, tv *self, tv_call *c) {
  tsb b;
  bool space = !c->p[0] || mr_tv_truth(c->p[0]), any = false;
  if (self->kind != TV_DICT)
    return mr_tr_fail(r, "'%s' object has no attribute 'items'", mr_tv_type(self));
  mr_tsb_init(&b, r);
  for (size_t i = 0; i < self->dict.n; i++) {
    tv_pair p = self->dict.pairs[i];
    if (p.val->kind == TV_NONE || p.val->kind == TV_UNDEF)
      continue;
    if (p.key->kind != TV_STR || strcspn(p.key->str.s, " \t\n\r\f\v/>=") < p.key->str.len)
      return mr_tr_fail(r, "Invalid character in attribute name");
    tv *key = mr_tv_escape(r, p.key), *val = key ? mr_tv_escape(r, p.val) : NULL;
    if (!val)
      return NULL;
    mr_tsb_adds(&b, any || space ? " " : "", TAINT_NONE);
    mr_tsb_val(&b, key);
    mr_tsb_adds(&b, "=\"", TAINT_NONE);
    mr_tsb_val(&b, val);
    mr_tsb_adds(&b, "\"", TAINT_NONE);
    any = true;
  }
  return marked(r, mr_tsb_done(&b), r->escape);
}

/* ---- JSON ---- */

static bool separators(tr *r, tv *v, tv_json *how) {
  tv **items;
  size_t n;
  if (!v || v->kind == TV_NONE)
    return true;
  if (!mr_tv_iter(r, v, &items, &n))
    return false;
  if (n != 2 || items[0]->kind != TV_STR || items[1]->kind != TV_STR)
    return mr_tr_fail(r, "separators wants two texts");
  how->item = items[0];
  how->pair = items[1];
  return true;
}

static tv *f_tojson(tr *r, tv *self, tv_call *c) {
  tv_json how = {c->p[0] && mr_tv_truth(c->p[0]), c->p[3] && mr_tv_truth(c->p[3]), NULL, NULL,
                 NULL};
  tv *indent = c->p[1];
  int64_t width;
  tsb b;
  if (indent && indent->kind == TV_STR) {
    how.indent = indent;
  } else if (indent && indent->kind != TV_NONE) {
    if (!mr_tpl_arg_int(r, indent, 0, &width))
      return NULL;
    how.indent = mr_str_center(r, &mr_tv_empty, width, NULL, '<');
    if (!how.indent)
      return NULL;
  }
  how.item = mr_tv_text(r, ", ", how.indent ? 1 : 2, TAINT_NONE);
  how.pair = mr_tv_text(r, ": ", 2, TAINT_NONE);
  if (!how.item || !how.pair || !separators(r, c->p[2], &how))
    return NULL;
  mr_tsb_init(&b, r);
  return mr_tv_json(&b, self, &how) ? mr_tsb_done(&b) : NULL;
}

/* A copy whose dictionaries are in the order of their keys, as pprint shows them. */
static tv *in_key_order(tr *r, tv *v) {
  bool list = v->kind == TV_LIST || v->kind == TV_TUPLE;
  if (!list && v->kind != TV_DICT)
    return v;
  if (!mr_tr_enter(r))
    return NULL;
  size_t n = list ? v->seq.n : v->dict.n;
  tv *out = list ? mr_tv_seq(r, (tv_kind)v->kind, n) : mr_tv_dict(r, TV_DICT, n);
  tv **keys = mr_tr_alloc(r, n, sizeof *keys), **vals = mr_tr_alloc(r, n, sizeof *vals);
  if (!out || !keys || !vals)
    return NULL;
  for (size_t i = 0; i < n; i++) {
    keys[i] = list ? NULL : v->dict.pairs[i].key;
    vals[i] = in_key_order(r, list ? v->seq.items[i] : v->dict.pairs[i].val);
    if (!vals[i])
      return NULL;
    if (list)
      out->seq.items[i] = vals[i];
  }
  if (!list && !mr_tv_sort(r, vals, keys, n, false))
    return NULL;
  for (size_t i = 0; !list && i < n; i++)
    if (!mr_tv_dict_put(r, out, keys[i], vals[i]))
      return NULL;
  mr_tr_leave(r);
  return out;
}

static tv *f_pprint(tr *r, tv *self, tv_call *c) {
  tsb b;
  (void)c;
  tv *v = in_key_order(r, self);
  if (!v)
    return NULL;
  mr_tsb_init(&b, r);
  mr_tv_repr(&b, v);
  return mr_tsb_done(&b);
}

#define F(name, params)                                                                            \
  { #name, params, f_##name, NULL }
const tv_func mr_tpl_text_filters[] = {/* sorted */
                                       F(abs, ""),
                                       F(attr, "name"),
                                       F(capitalize, ""),
                                       F(center, "width?"),
                                       {"d", "default_value?,boolean?", f_default, NULL},
                                       F(default, "default_value?,boolean?"),
                                       {"e", "", f_escape, NULL},
                                       F(escape, ""),
                                       F(filesizeformat, "binary?"),
                                       F(float, "default?"),
                                       F(forceescape, ""),
                                       F(format, NULL),
                                       F(indent, "width?,first?,blank?"),
                                       F(int, "default?,base?"),
                                       F(lower, ""),
                                       F(pprint, ""),
                                       F(replace, "old,new,count?"),
                                       F(round, "precision?,method?"),
                                       F(safe, ""),
                                       F(string, ""),
                                       F(striptags, ""),
                                       F(title, ""),
                                       F(tojson, "ensure_ascii?,indent?,separators?,sort_keys?"),
                                       F(trim, "chars?"),
                                       F(truncate, "length?,killwords?,end?,leeway?"),
                                       F(upper, ""),
                                       F(urlencode, ""),
                                       F(wordcount, ""),
                                       F(wordwrap,
                                         "width?,break_long_words?,wrapstring?,break_on_hyphens?"),
                                       F(xmlattr, "autospace?")};
const size_t mr_tpl_n_text_filters = sizeof mr_tpl_text_filters / sizeof *mr_tpl_text_filters;
