/* template_format.c: "%d %s" % args and "{} {name:>8}".format(...), as Python does them. */
#include <math.h>
#include <string.h>

#include "src/template_int.h"

#define MAX_PRECISION 400

typedef struct spec { /* one conversion */
  tv *fill;           /* NULL: a space */
  char align;         /* < > ^ =; 0: by the value's kind */
  char sign;          /* + - or space */
  bool alt, zero;
  char group;    /* , or _; 0: none */
  int64_t width; /* code points */
  int precision; /* -1: none */
  char type;     /* 0: none */
} spec;

static void pad(tsb *b, const spec *s, int64_t n) {
  if (n > 0 && (size_t)n > b->r->limits.output) {
    mr_tr_fail(b->r, "a field is %lld characters wide", (long long)n);
    b->failed = true;
  }
  for (; n > 0 && !b->failed; n--) {
    if (s->fill)
      mr_tsb_val(b, s->fill);
    else
      mr_tsb_adds(b, s->zero ? "0" : " ", TAINT_NONE);
  }
}

static void put_text(tsb *b, const spec *s, tv *text) {
  size_t chars = mr_tv_chars(text);
  if (s->precision >= 0 && (size_t)s->precision < chars) {
    chars = (size_t)s->precision;
    text = mr_tv_sub(b->r, text, 0, mr_tv_byte_at(text, chars));
    if (!text) {
      b->failed = true;
      return;
    }
  }
  int64_t space = s->width - (int64_t)chars;
  int64_t before = s->align == '>' ? space : s->align == '^' ? space / 2 : 0;
  space = space > 0 ? space : 0;
  before = before > 0 ? before : 0;
  pad(b, s, before);
  mr_tsb_val(b, text);
  pad(b, s, space - before);
}

/* `digits` (ASCII, no sign) with separators in its leading run of digits. */
static void group_digits(const char *digits, char sep, int every, char *out, size_t cap) {
  size_t n = 0, k = 0;
  while ((digits[n] >= '0' && digits[n] <= '9') ||
         (every == 4 && strchr("abcdefABCDEF", digits[n]) && digits[n]))
    n++;
  for (size_t i = 0; i < n && k + 2 < cap; i++) {
    if (i && (n - i) % (size_t)every == 0)
      out[k++] = sep;
    out[k++] = digits[i];
  }
  snprintf(out + k, cap - k, "%s", digits + n);
}

static void put_number(tsb *b, const spec *s, bool negative, const char *prefix,
                       const char *digits) {
  char grouped[2048], head[8];
  const char *sign = negative ? "-" : s->sign == '+' ? "+" : s->sign == ' ' ? " " : "";
  if (s->group)
    group_digits(digits, s->group, s->type && strchr("xXob", s->type) ? 4 : 3, grouped,
                 sizeof grouped);
  else
    snprintf(grouped, sizeof grouped, "%s", digits);
  snprintf(head, sizeof head, "%s%s", sign, s->alt ? prefix : "");
  int64_t space = s->width - (int64_t)(strlen(head) + strlen(grouped));
  char align = s->align ? s->align : s->zero ? '=' : '>';
  space = space > 0 ? space : 0;
  int64_t before = align == '>' ? space : align == '^' ? space / 2 : 0;
  pad(b, s, align == '=' ? 0 : before);
  mr_tsb_adds(b, head, TAINT_NONE);
  pad(b, s, align == '=' ? space : 0);
  mr_tsb_adds(b, grouped, TAINT_NONE);
  pad(b, s, align == '=' ? 0 : space - before);
}

static void put_int(tsb *b, const spec *s, tv_int i, char type) {
  char text[160];
  size_t at = sizeof text - 1;
  int base = type == 'x' || type == 'X' ? 16 : type == 'o' ? 8 : type == 'b' ? 2 : 10;
  const char *prefix = type == 'x'   ? "0x"
                       : type == 'X' ? "0X"
                       : type == 'o' ? "0o"
                       : type == 'b' ? "0b"
                                     : "";
  __extension__ unsigned __int128 u = i < 0 ? -(unsigned __int128)i : (unsigned __int128)i;
  text[at] = '\0';
  do {
    text[--at] = (type == 'X' ? "0123456789ABCDEF" : "0123456789abcdef")[(int)(u % (unsigned)base)];
    u /= (unsigned)base;
  } while (u);
  while (s->precision > 0 && (int)(sizeof text - 1 - at) < s->precision && at > 0)
    text[--at] = '0';
  put_number(b, s, i < 0, prefix, text + at);
}

static void put_real(tsb *b, const spec *s, double f, char type) {
  char text[1024], c_format[16], plain[40];
  int precision = s->precision < 0 ? 6 : s->precision;
  bool percent = type == '%';
  if (precision > MAX_PRECISION) {
    mr_tr_fail(b->r, "a precision of %d digits is more than %d", precision, MAX_PRECISION);
    b->failed = true;
    return;
  }
  if (type == 0 && s->precision < 0) {
    mr_tv_real_text(fabs(f), plain);
    snprintf(text, sizeof text, "%s", plain);
  } else {
    snprintf(c_format, sizeof c_format, "%%%s.*%c", s->alt ? "#" : "",
             percent ? 'f'
             : type  ? type
                     : 'g');
    snprintf(text, sizeof text - 2, c_format, precision, fabs(percent ? f * 100 : f));
    if (type == 0 && !strpbrk(text, ".en"))
      memcpy(text + strlen(text), ".0", 3);
  }
  if (percent)
    memcpy(text + strlen(text), "%", 2);
  put_number(b, s, signbit(f) && !isnan(f), "", text);
}

/* ---- % ---- */

typedef struct percent {
  tr *r;
  tsb b;
  tv *format;
  size_t at;
  tv **args; /* positional */
  size_t n, used;
  tv *map; /* the one argument, for %(name)s */
} percent;

static tv *next_arg(percent *p) {
  if (p->used >= p->n)
    return mr_tr_fail(p->r, "not enough arguments for format string");
  return p->args[p->used++];
}

static char peek(const percent *p) {
  return p->at < p->format->str.len ? p->format->str.s[p->at] : '\0';
}

static bool number_of(percent *p, int64_t *out) {
  tv_int i;
  if (peek(p) == '*') {
    p->at++;
    tv *v = next_arg(p);
    if (!v || !mr_tv_as_int(v, &i) || i > 1 << 30 || i < -(1 << 30))
      return v ? mr_tr_fail(p->r, "* wants int") : false;
    *out = (int64_t)i;
    return true;
  }
  for (*out = 0; peek(p) >= '0' && peek(p) <= '9'; p->at++)
    if ((*out = *out * 10 + (peek(p) - '0')) > 1 << 30)
      return mr_tr_fail(p->r, "width too big");
  return true;
}

static bool percent_spec(percent *p, spec *s) {
  int64_t n = 0;
  *s = (spec){.precision = -1, .align = '>'};
  for (; peek(p) && strchr("#0- +", peek(p)); p->at++) {
    s->alt |= peek(p) == '#';
    s->zero |= peek(p) == '0';
    if (peek(p) == '-')
      s->align = '<';
    if (peek(p) == '+' || (peek(p) == ' ' && s->sign != '+'))
      s->sign = peek(p);
  }
  if (!number_of(p, &s->width))
    return false;
  if (s->width < 0) {
    s->width = -s->width;
    s->align = '<';
  }
  if (peek(p) == '.') {
    p->at++;
    if (!number_of(p, &n))
      return false;
    s->precision = n < 0 ? 0 : (int)n;
  }
  while (peek(p) && strchr("hlL", peek(p)))
    p->at++;
  s->type = peek(p);
  p->at++;
  return true;
}

static tv *text_of(tr *r, tv *v, bool repr, bool escape) {
  tsb b;
  if (!repr)
    return escape ? mr_tv_escape(r, v) : mr_tv_str(r, v);
  mr_tsb_init(&b, r);
  mr_tv_repr(&b, v);
  tv *s = mr_tsb_done(&b);
  return s && escape ? mr_tv_escape(r, s) : s;
}

static bool percent_number(percent *p, spec *s, tv *v) {
  tv_int i = 0;
  bool real = strchr("eEfFgG", s->type) != NULL;
  if (!mr_tv_is_num(v) || (!real && strchr("xXo", s->type) && v->kind == TV_FLOAT))
    return mr_tr_fail(p->r, "%%%c format: a %s is required, not %s", s->type,
                      real ? "real number" : "number", mr_tv_type(v));
  if (s->align == '<')
    s->zero = false;
  else
    s->align = s->zero ? '=' : '>';
  if (real) {
    put_real(&p->b, s, mr_tv_real(v), s->type);
    return !p->b.failed;
  }
  if (!mr_tv_as_int(v, &i)) {
    if (!(fabs(v->f) < 1e38))
      return mr_tr_fail(p->r, "cannot convert float to integer");
    i = (tv_int)v->f;
  }
  put_int(&p->b, s, i, s->type);
  return !p->b.failed;
}

static bool percent_char(percent *p, spec *s, tv *v) {
  tsb b;
  tv_int i;
  mr_tsb_init(&b, p->r);
  if (v->kind == TV_STR && mr_tv_chars(v) == 1)
    mr_tsb_val(&b, v);
  else if (mr_tv_as_int(v, &i) && i >= 0 && i < 0x110000 && !(i >= 0xd800 && i < 0xe000))
    mr_tsb_code(&b, (uint32_t)i, TAINT_NONE);
  else
    return mr_tr_fail(p->r, "%%c requires int or char");
  tv *text = mr_tsb_done(&b);
  if (text)
    put_text(&p->b, s, text);
  return text != NULL;
}

static bool percent_one(percent *p) {
  spec s;
  tv *v = NULL;
  if (peek(p) == '(') {
    const char *from = p->format->str.s + p->at + 1, *end = p->format->str.s + p->format->str.len,
               *close = from;
    while (close < end && *close != ')')
      close++;
    if (close == end)
      return mr_tr_fail(p->r, "incomplete format key");
    if (!p->map || p->map->kind != TV_DICT)
      return mr_tr_fail(p->r, "format requires a mapping");
    v = mr_tv_dict_gets(p->map, from, (size_t)(close - from));
    if (!v)
      return mr_tr_fail(p->r, "'%.*s'", (int)(close - from), from);
    p->at = (size_t)(close - p->format->str.s) + 1;
    p->used = p->n;
  }
  if (!percent_spec(p, &s))
    return false;
  if (s.type == '%') {
    mr_tsb_adds(&p->b, "%", TAINT_NONE);
    return true;
  }
  if (s.type == '\0' || !strchr("diuxXoeEfFgGcsra", s.type))
    return mr_tr_fail(p->r, s.type ? "unsupported format character '%c'" : "incomplete format%c",
                      s.type);
  if (!v && !(v = next_arg(p)))
    return false;
  if (s.type == 'c')
    return percent_char(p, &s, v);
  if (!strchr("sra", s.type))
    return percent_number(p, &s, v);
  s.zero = false;
  tv *text = text_of(p->r, v, s.type != 's', p->format->safe);
  if (text)
    put_text(&p->b, &s, text);
  return text != NULL;
}

tv *mr_fmt_percent(tr *r, tv *format, tv *args) {
  percent p = {.r = r, .format = format, .args = &args, .n = 1, .map = args};
  if (args->kind == TV_TUPLE) {
    p.args = args->seq.items;
    p.n = args->seq.n;
  }
  mr_tsb_init(&p.b, r);
  while (p.at < format->str.len) {
    const char *sign = memchr(format->str.s + p.at, '%', format->str.len - p.at);
    size_t to = sign ? (size_t)(sign - format->str.s) : format->str.len;
    mr_tsb_sub(&p.b, format, p.at, to - p.at);
    p.at = to + 1;
    if (sign && (!mr_tr_charge(r, 1) || !percent_one(&p)))
      return NULL;
  }
  if (p.used < p.n && args->kind != TV_DICT)
    return mr_tr_fail(r, "not all arguments converted during string formatting");
  tv *v = mr_tsb_done(&p.b);
  if (v && format->safe && v != &mr_tv_empty)
    v->safe = 1;
  return v;
}

/* ---- str.format ---- */

typedef struct braces {
  tr *r;
  tv *format;
  tv_call *c;
  int next; /* of the automatic numbers; -1: fields are numbered by hand */
} braces;

static bool braces_into(braces *p, tsb *b, size_t at, size_t end, int level);

static tv *first_of_field(braces *p, tv *name) {
  tv_int i;
  if (name->str.len == 0) {
    i = p->next < 0 ? -1 : p->next++;
  } else if (mr_ch_class(name, "isdigit") && mr_str_parse_int(name, 10, &i)) {
    i = p->next > 0 ? -1 : i;
    p->next = -1;
  } else {
    tv *v = mr_tr_keyword(p->c, name->str.s, name->str.len);
    return v ? v : mr_tr_fail(p->r, "'%.*s'", (int)name->str.len, name->str.s);
  }
  if (i < 0)
    return mr_tr_fail(p->r,
                      "cannot mix numbered fields with fields that are numbered automatically");
  if (i >= p->c->n_pos)
    return mr_tr_fail(p->r, "Replacement index %d out of range for positional args tuple",
                      (int)(i < 1 << 30 ? i : 1 << 30));
  return p->c->pos[i];
}

/* name(.attribute | [item])* in [at, end) of the format. */
static tv *field_value(braces *p, size_t at, size_t end) {
  const char *s = p->format->str.s;
  size_t to = at;
  while (to < end && s[to] != '.' && s[to] != '[')
    to++;
  tv *part = mr_tv_sub(p->r, p->format, at, to - at);
  tv *v = part ? first_of_field(p, part) : NULL;
  while (v && to < end) {
    bool item = s[to] == '[';
    at = ++to;
    while (to < end && (item ? s[to] != ']' : s[to] != '.' && s[to] != '['))
      to++;
    part = mr_tv_sub(p->r, p->format, at, to - at);
    if (!part || to == at || (item && to == end))
      return part ? mr_tr_fail(p->r, "Empty attribute in format string") : NULL;
    tv_int i;
    if (item && mr_ch_class(part, "isdigit") && mr_str_parse_int(part, 10, &i))
      part = mr_tv_int(p->r, i);
    tn_lookup look = part && !item ? mr_tpl_methods(part->str.s, part->str.len) : (tn_lookup){0};
    v = !part ? NULL : item ? mr_op_item(p->r, v, part) : mr_op_attr(p->r, v, part, &look);
    to += item;
  }
  return v;
}

static bool is_align(char c) {
  return c == '<' || c == '>' || c == '^' || c == '=';
}

static bool parse_spec(tr *r, tv *text, spec *s) {
  const char *t = text->str.s;
  size_t n = text->str.len, at = 0;
  uint32_t code;
  *s = (spec){.precision = -1};
  size_t fill = n ? (size_t)mr_utf8_next(t, n, &code) : 0;
  if (fill && fill < n && is_align(t[fill])) {
    s->fill = mr_tv_sub(r, text, 0, fill);
    s->align = t[fill];
    at = fill + 1;
  } else if (n && is_align(t[0])) {
    s->align = t[at++];
  }
  if (at < n && (t[at] == '+' || t[at] == '-' || t[at] == ' '))
    s->sign = t[at++];
  if (at < n && t[at] == '#')
    s->alt = ++at;
  if (at < n && t[at] == '0')
    s->zero = ++at;
  for (; at < n && t[at] >= '0' && t[at] <= '9'; at++)
    if ((s->width = s->width * 10 + (t[at] - '0')) > 1 << 30)
      return mr_tr_fail(r, "Too many decimal digits in format string");
  if (at < n && (t[at] == ',' || t[at] == '_'))
    s->group = t[at++];
  if (at < n && t[at] == '.') {
    int digits = 0;
    for (at++, s->precision = 0; at < n && t[at] >= '0' && t[at] <= '9' && digits < 9;
         at++, digits++)
      s->precision = s->precision * 10 + (t[at] - '0');
    if (!digits)
      return mr_tr_fail(r, "Format specifier missing precision");
  }
  if (at < n)
    s->type = t[at++];
  if (at < n)
    mr_tr_fail(r, "Invalid format specifier '%.*s'", (int)(n < 200 ? n : 200), t);
  return at == n;
}

static bool put_value(braces *p, tsb *b, tv *v, tv *how, char conversion) {
  spec s;
  tv_int i;
  tr *r = p->r;
  if (!parse_spec(r, how, &s))
    return false;
  if (conversion || (v->kind != TV_STR && how->str.len == 0))
    v = text_of(r, v, conversion == 'r' || conversion == 'a', p->format->safe);
  if (!v)
    return false;
  bool number = mr_tv_is_num(v), real = s.type && strchr("eEfFgG%", s.type);
  if (number && (v->kind == TV_FLOAT || real) && (!s.type || real || s.type == 'n')) {
    put_real(b, &s, mr_tv_real(v), s.type == 'n' ? 'g' : s.type);
  } else if (mr_tv_as_int(v, &i) && (!s.type || strchr("dbBoxXn", s.type)) && s.precision < 0) {
    put_int(b, &s, i, s.type);
  } else if (v->kind == TV_STR && (!s.type || s.type == 's') && s.align != '=' && !s.sign &&
             !s.group) {
    v = p->format->safe ? mr_tv_escape(r, v) : v;
    if (v)
      put_text(b, &s, v);
  } else if (v->kind == TV_UNDEF && how->str.len == 0) {
    return true;
  } else {
    return mr_tr_fail(r, "Unknown format code '%c' for object of type '%s'", s.type ? s.type : ' ',
                      mr_tv_type(v));
  }
  return v && !b->failed;
}

/* One {field} whose text is [at, end). */
static bool braces_field(braces *p, tsb *b, size_t at, size_t end, int level) {
  const char *s = p->format->str.s;
  size_t name_end = at, square = 0;
  while (name_end < end && (square || (s[name_end] != '!' && s[name_end] != ':'))) {
    square = s[name_end] == '[' ? 1 : s[name_end] == ']' ? 0 : square;
    name_end++;
  }
  tv *v = field_value(p, at, name_end);
  char conversion = 0;
  if (!v)
    return false;
  if (name_end < end && s[name_end] == '!') {
    if (name_end + 1 >= end || !strchr("rsa", s[name_end + 1]))
      return mr_tr_fail(p->r, "Unknown conversion specifier");
    conversion = s[name_end + 1];
    name_end += 2;
  }
  tsb spec_text;
  mr_tsb_init(&spec_text, p->r);
  if (name_end < end && s[name_end] != ':')
    return mr_tr_fail(p->r, "expected ':' after conversion specifier");
  if (name_end < end && !braces_into(p, &spec_text, name_end + 1, end, level + 1))
    return false;
  tv *how = mr_tsb_done(&spec_text);
  return how && put_value(p, b, v, how, conversion);
}

static bool braces_into(braces *p, tsb *b, size_t at, size_t end, int level) {
  const char *s = p->format->str.s;
  if (level > 2)
    return mr_tr_fail(p->r, "Max string recursion exceeded");
  while (at < end) {
    size_t run = at;
    while (run < end && s[run] != '{' && s[run] != '}')
      run++;
    mr_tsb_sub(b, p->format, at, run - at);
    if (run == end)
      break;
    if (run + 1 < end && s[run + 1] == s[run]) {
      mr_tsb_sub(b, p->format, run, 1);
      at = run + 2;
      continue;
    }
    if (s[run] == '}')
      return mr_tr_fail(p->r, "Single '}' encountered in format string");
    size_t close = run + 1;
    for (int open = 1; close < end; close++) {
      open += s[close] == '{' ? 1 : s[close] == '}' ? -1 : 0;
      if (open == 0)
        break;
    }
    if (close == end)
      return mr_tr_fail(p->r, run + 1 == end ? "Single '{' encountered in format string"
                                             : "expected '}' before end of string");
    if (!mr_tr_charge(p->r, 1) || !braces_field(p, b, run + 1, close, level))
      return false;
    at = close + 1;
  }
  return !b->failed;
}

tv *mr_fmt_braces(tr *r, tv *format, tv_call *c) {
  braces p = {r, format, c, 0};
  tsb b;
  mr_tsb_init(&b, r);
  if (!braces_into(&p, &b, 0, format->str.len, 0))
    return NULL;
  tv *v = mr_tsb_done(&b);
  if (v && format->safe && v != &mr_tv_empty)
    v->safe = 1;
  return v;
}
