#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "src/template_int.h"

/* ---- numbers ---- */

static size_t int_text(tv_int i, char out[48]) {
  char digits[48];
  size_t n = 0, k = 0;
  __extension__ unsigned __int128 u = i < 0 ? -(unsigned __int128)i : (unsigned __int128)i;
  do {
    digits[n++] = (char)('0' + (int)(u % 10));
    u /= 10;
  } while (u);
  if (i < 0)
    out[k++] = '-';
  while (n)
    out[k++] = digits[--n];
  out[k] = '\0';
  return k;
}

/* The shortest digits that read back as f, laid out as Python does: an exponent below 1e-4 and from
 * 1e16. */
void mr_tv_real_text(double f, char out[40]) {
  if (isnan(f) || isinf(f)) {
    snprintf(out, 40, "%s", isnan(f) ? "nan" : f < 0 ? "-inf" : "inf");
    return;
  }
  char e[40];
  int precision = 0;
  do
    snprintf(e, sizeof e, "%.*e", precision, f);
  while (strtod(e, NULL) != f && ++precision < 17);
  int exponent = (int)strtol(strchr(e, 'e') + 1, NULL, 10);
  if (exponent < -4 || exponent >= 16) {
    snprintf(out, 40, "%.*s", 39, e);
    return;
  }
  int decimals = precision - exponent;
  snprintf(out, 40, "%.*f", decimals > 0 ? decimals : 1, f);
}

/* ---- repr ---- */

static void repr_code(tsb *b, uint32_t c, char quote, const tv *s, size_t at, size_t len) {
  tv_taint taint = mr_tv_taint_at(s, at);
  char hex[16];
  if (c == (uint32_t)quote || c == '\\') {
    mr_tsb_add(b, "\\", 1, taint);
    mr_tsb_sub(b, s, at, len);
  } else if (c == '\n' || c == '\r' || c == '\t') {
    mr_tsb_adds(b, c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t", taint);
  } else if (mr_ch_printable(c)) {
    mr_tsb_sub(b, s, at, len);
  } else {
    snprintf(hex, sizeof hex, c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x", c);
    mr_tsb_adds(b, hex, taint);
  }
}

static void repr_str(tsb *b, const tv *s) {
  bool single = memchr(s->str.s, '\'', s->str.len) != NULL;
  bool twofold = memchr(s->str.s, '"', s->str.len) != NULL;
  char quote = single && !twofold ? '"' : '\'';
  mr_tsb_adds(b, s->safe ? "Markup(" : "", TAINT_NONE);
  mr_tsb_add(b, &quote, 1, TAINT_NONE);
  for (size_t at = 0; at < s->str.len && !b->failed;) {
    size_t run = at; /* plain ASCII in one piece */
    while (run < s->str.len && s->str.s[run] >= ' ' && s->str.s[run] < 0x7f &&
           s->str.s[run] != quote && s->str.s[run] != '\\')
      run++;
    mr_tsb_sub(b, s, at, run - at);
    at = run;
    if (at == s->str.len)
      break;
    uint32_t c;
    int len = mr_utf8_next(s->str.s + at, s->str.len - at, &c);
    repr_code(b, c, quote, s, at, (size_t)len);
    at += (size_t)len;
  }
  mr_tsb_add(b, &quote, 1, TAINT_NONE);
  mr_tsb_adds(b, s->safe ? ")" : "", TAINT_NONE);
}

static void repr_seq(tsb *b, const tv *v) {
  bool tuple = v->kind == TV_TUPLE;
  mr_tsb_adds(b, tuple ? "(" : "[", TAINT_NONE);
  for (size_t i = 0; i < v->seq.n && !b->failed; i++) {
    mr_tsb_adds(b, i ? ", " : "", TAINT_NONE);
    mr_tv_repr(b, v->seq.items[i]);
  }
  mr_tsb_adds(b, tuple ? v->seq.n == 1 ? ",)" : ")" : "]", TAINT_NONE);
}

static void repr_pairs(tsb *b, const tv *v) {
  mr_tsb_adds(b, "{", TAINT_NONE);
  for (size_t i = 0; i < v->dict.n && !b->failed; i++) {
    mr_tsb_adds(b, i ? ", " : "", TAINT_NONE);
    mr_tv_repr(b, v->dict.pairs[i].key);
    mr_tsb_adds(b, ": ", TAINT_NONE);
    mr_tv_repr(b, v->dict.pairs[i].val);
  }
  mr_tsb_adds(b, "}", TAINT_NONE);
}

static void repr_view(tsb *b, tv *v) {
  tv **items;
  size_t n;
  if (!mr_tv_iter(b->r, v, &items, &n)) {
    b->failed = true;
    return;
  }
  tv list = {.kind = TV_LIST, .seq = {.items = items, .n = n}};
  mr_tsb_adds(b, mr_tv_type(v), TAINT_NONE);
  mr_tsb_adds(b, "(", TAINT_NONE);
  mr_tv_repr(b, &list);
  mr_tsb_adds(b, ")", TAINT_NONE);
}

/* Objects that only have a name; where Python prints an address there is none. */
static void repr_object(tsb *b, const tv *v) {
  char text[128];
  if (v->kind == TV_FUNC && v->call.func->repr)
    snprintf(text, sizeof text, "%s", v->call.func->repr);
  else if (v->kind == TV_FUNC)
    snprintf(text, sizeof text, "<function %s>", v->call.func->name);
  else if (v->kind == TV_BOUND)
    snprintf(text, sizeof text, "<built-in method %s of %s object>", v->call.func->name,
             mr_tv_type(v->call.self));
  else if (v->kind == TV_SELF)
    snprintf(text, sizeof text, "<TemplateReference None>");
  else if (v->kind == TV_LOOP)
    snprintf(text, sizeof text, "<LoopContext %zu/%zu>", v->loop->at + 1, v->loop->n);
  else
    snprintf(text, sizeof text, "<%s object>", mr_tv_type(v));
  mr_tsb_adds(b, text, TAINT_NONE);
}

static void repr_macro(tsb *b, const tv *v) {
  const tn *n = v->macro.node;
  if (n->kind != N_MACRO) {
    mr_tsb_adds(b, "<Macro anonymous>", TAINT_NONE);
    return;
  }
  mr_tsb_adds(b, "<Macro ", TAINT_NONE);
  mr_tv_repr(b, n->val);
  mr_tsb_adds(b, ">", TAINT_NONE);
}

static void repr_range(tsb *b, const tv *v) {
  char text[96];
  int n = snprintf(text, sizeof text, "range(%lld, %lld", (long long)v->range.start,
                   (long long)v->range.stop);
  if (v->range.step != 1)
    n += snprintf(text + n, sizeof text - (size_t)n, ", %lld", (long long)v->range.step);
  snprintf(text + n, sizeof text - (size_t)n, ")");
  mr_tsb_adds(b, text, TAINT_NONE);
}

static void repr_scalar(tsb *b, const tv *v) {
  char text[48];
  if (v->kind == TV_INT)
    int_text(v->i, text);
  else if (v->kind == TV_FLOAT)
    mr_tv_real_text(v->f, text);
  else
    snprintf(text, sizeof text, "%s",
             v->kind == TV_NONE    ? "None"
             : v->kind == TV_UNDEF ? "Undefined"
             : v->b                ? "True"
                                   : "False");
  mr_tsb_adds(b, text, TAINT_NONE);
}

static void repr(tsb *b, const tv *v) {
  switch (v->kind) {
  case TV_UNDEF:
  case TV_NONE:
  case TV_BOOL:
  case TV_INT:
  case TV_FLOAT:
    repr_scalar(b, v);
    break;
  case TV_STR:
    repr_str(b, v);
    break;
  case TV_LIST:
  case TV_TUPLE:
    repr_seq(b, v);
    break;
  case TV_NS:
    mr_tsb_adds(b, "<Namespace ", TAINT_NONE);
    repr_pairs(b, v);
    mr_tsb_adds(b, ">", TAINT_NONE);
    break;
  case TV_DICT:
    repr_pairs(b, v);
    break;
  case TV_VIEW:
    repr_view(b, (tv *)(uintptr_t)v);
    break;
  case TV_RANGE:
    repr_range(b, v);
    break;
  case TV_MACRO:
    repr_macro(b, v);
    break;
  default:
    repr_object(b, v);
  }
}

void mr_tv_repr(tsb *b, const tv *v) {
  if (b->failed)
    return;
  if (!mr_tr_charge(b->r, 1) || !mr_tr_enter(b->r))
    b->failed = true;
  else
    repr(b, v);
  mr_tr_leave(b->r);
}

tv *mr_tv_str(tr *r, tv *v) {
  if (v->kind == TV_STR)
    return v;
  if (v->kind == TV_UNDEF)
    return &mr_tv_empty;
  tsb b;
  mr_tsb_init(&b, r);
  mr_tv_repr(&b, v);
  return mr_tsb_done(&b);
}

/* ---- HTML ---- */

tv *mr_tv_escape(tr *r, tv *v) {
  static const char specials[] = "&<>'\"";
  static const char *const entities[] = {"&amp;", "&lt;", "&gt;", "&#39;", "&#34;"};
  tv *s = mr_tv_str(r, v);
  tsb b;
  if (!s || s->safe)
    return s;
  mr_tsb_init(&b, r);
  for (size_t i = 0, run; i < s->str.len; i = run + 1) {
    const char *which = NULL;
    for (run = i; run < s->str.len; run++)
      if (s->str.s[run] && (which = strchr(specials, s->str.s[run])))
        break;
    mr_tsb_sub(&b, s, i, run - i);
    if (which)
      mr_tsb_adds(&b, entities[which - specials], mr_tv_taint_at(s, run));
  }
  tv *done = mr_tsb_done(&b);
  if (!done)
    return NULL;
  tv *safe = mr_tv_new(r, TV_STR);
  if (!safe)
    return NULL;
  *safe = *done;
  safe->safe = 1;
  return safe;
}

/* ---- JSON ---- */

static void json_code(tsb *b, uint32_t c, const tv *s, size_t at, size_t len, bool ascii) {
  static const char plain[] = "\"\\\n\r\t\b\f", letter[] = "\"\\nrtbf";
  tv_taint taint = mr_tv_taint_at(s, at);
  const char *p = c && c < 0x80 ? strchr(plain, (int)c) : NULL;
  char hex[16];
  if (p) {
    char pair[2] = {'\\', letter[p - plain]};
    mr_tsb_add(b, pair, 2, taint);
  } else if (c < 0x20 || (ascii && c >= 0x7f && c < 0x10000)) {
    snprintf(hex, sizeof hex, "\\u%04x", c);
    mr_tsb_adds(b, hex, taint);
  } else if (ascii && c >= 0x10000) {
    snprintf(hex, sizeof hex, "\\u%04x\\u%04x", 0xd800 + ((c - 0x10000) >> 10),
             0xdc00 + ((c - 0x10000) & 0x3ff));
    mr_tsb_adds(b, hex, taint);
  } else {
    mr_tsb_sub(b, s, at, len);
  }
}

static void json_str(tsb *b, const tv *s, bool ascii) {
  mr_tsb_adds(b, "\"", TAINT_NONE);
  for (size_t at = 0; at < s->str.len && !b->failed;) {
    size_t run = at;
    while (run < s->str.len && s->str.s[run] != '"' && s->str.s[run] != '\\' &&
           (unsigned char)s->str.s[run] >= 0x20 && !(ascii && (unsigned char)s->str.s[run] >= 0x7f))
      run++;
    mr_tsb_sub(b, s, at, run - at);
    at = run;
    if (at == s->str.len)
      break;
    uint32_t c;
    size_t len = (size_t)mr_utf8_next(s->str.s + at, s->str.len - at, &c);
    json_code(b, c, s, at, len, ascii);
    at += len;
  }
  mr_tsb_adds(b, "\"", TAINT_NONE);
}

static void json_scalar(tsb *b, const tv *v) {
  char text[48];
  if (v->kind == TV_INT)
    int_text(v->i, text);
  else if (v->kind == TV_FLOAT && !isfinite(v->f))
    snprintf(text, sizeof text, "%s", isnan(v->f) ? "NaN" : v->f < 0 ? "-Infinity" : "Infinity");
  else if (v->kind == TV_FLOAT)
    mr_tv_real_text(v->f, text);
  else
    snprintf(text, sizeof text, "%s", v->kind == TV_NONE ? "null" : v->b ? "true" : "false");
  mr_tsb_adds(b, text, TAINT_NONE);
}

typedef struct json_out {
  tsb *b;
  const tv_json *how;
  int level;
} json_out;

static bool json_value(json_out *o, const tv *v);

static void json_newline(json_out *o) {
  mr_tsb_adds(o->b, "\n", TAINT_NONE);
  for (int i = 0; i < o->level && !o->b->failed; i++)
    mr_tsb_val(o->b, o->how->indent);
}

static void json_between(json_out *o, bool first) {
  if (!first)
    mr_tsb_val(o->b, o->how->item);
  if (o->how->indent)
    json_newline(o);
}

static bool json_list(json_out *o, const tv *v) {
  mr_tsb_adds(o->b, "[", TAINT_NONE);
  o->level++;
  for (size_t i = 0; i < v->seq.n; i++) {
    json_between(o, i == 0);
    if (!json_value(o, v->seq.items[i]))
      return false;
  }
  o->level--;
  if (v->seq.n && o->how->indent)
    json_newline(o);
  mr_tsb_adds(o->b, "]", TAINT_NONE);
  return true;
}

static bool json_key(json_out *o, const tv *k) {
  if (k->kind == TV_STR) {
    json_str(o->b, k, o->how->ascii);
  } else if (k->kind == TV_NONE || mr_tv_is_num(k)) {
    mr_tsb_adds(o->b, "\"", TAINT_NONE);
    json_scalar(o->b, k);
    mr_tsb_adds(o->b, "\"", TAINT_NONE);
  } else {
    return mr_tr_fail(o->b->r, "keys must be str, int, float, bool or None, not %s", mr_tv_type(k));
  }
  return true;
}

static tv_pair *sorted_pairs(tr *r, const tv *v) {
  size_t n = v->dict.n;
  tv **vals = mr_tr_alloc(r, n, sizeof *vals), **keys = mr_tr_alloc(r, n, sizeof *keys);
  tv_pair *pairs = mr_tr_alloc(r, n, sizeof *pairs);
  if (!vals || !keys || !pairs)
    return NULL;
  for (size_t i = 0; i < n; i++) {
    vals[i] = v->dict.pairs[i].val;
    keys[i] = v->dict.pairs[i].key;
  }
  if (!mr_tv_sort(r, vals, keys, n, false))
    return NULL;
  for (size_t i = 0; i < n; i++)
    pairs[i] = (tv_pair){keys[i], vals[i]};
  return pairs;
}

static bool json_dict(json_out *o, const tv *v) {
  const tv_pair *pairs = o->how->sort ? sorted_pairs(o->b->r, v) : v->dict.pairs;
  if (!pairs)
    return false;
  mr_tsb_adds(o->b, "{", TAINT_NONE);
  o->level++;
  for (size_t i = 0; i < v->dict.n; i++) {
    json_between(o, i == 0);
    if (!json_key(o, pairs[i].key))
      return false;
    mr_tsb_val(o->b, o->how->pair);
    if (!json_value(o, pairs[i].val))
      return false;
  }
  o->level--;
  if (v->dict.n && o->how->indent)
    json_newline(o);
  mr_tsb_adds(o->b, "}", TAINT_NONE);
  return true;
}

static bool json_value(json_out *o, const tv *v) {
  tr *r = o->b->r;
  if (o->b->failed || !mr_tr_charge(r, 1) || !mr_tr_enter(r))
    return false;
  bool good = true;
  switch (v->kind) {
  case TV_NONE:
  case TV_BOOL:
  case TV_INT:
  case TV_FLOAT:
    json_scalar(o->b, v);
    break;
  case TV_STR:
    json_str(o->b, v, o->how->ascii);
    break;
  case TV_LIST:
  case TV_TUPLE:
    good = json_list(o, v);
    break;
  case TV_DICT:
    good = json_dict(o, v);
    break;
  default:
    good = mr_tr_fail(r, "Object of type %s is not JSON serializable", mr_tv_type(v));
  }
  mr_tr_leave(r);
  return good && !o->b->failed;
}

bool mr_tv_json(tsb *b, const tv *v, const tv_json *how) {
  json_out o = {b, how, 0};
  return json_value(&o, v);
}
