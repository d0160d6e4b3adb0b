/* template_methods.c: methods of strings, dictionaries and lists. What changes an object is
 * refused. */
#include <stdlib.h>
#include <string.h>

#include "src/template_int.h"

/* ---- helpers ---- */

bool mr_tpl_arg_int(tr *r, const tv *v, int64_t missing, int64_t *out) {
  tv_int i;
  *out = missing;
  if (!v)
    return true;
  if (!mr_tv_as_int(v, &i))
    return mr_tr_fail(r, "'%s' object cannot be interpreted as an integer", mr_tv_type(v));
  *out = i > INT64_MAX / 4 ? INT64_MAX / 4 : i < INT64_MIN / 4 ? INT64_MIN / 4 : (int64_t)i;
  return true;
}

static bool need_str(tr *r, const tv *v, const char *what) {
  if (v->kind != TV_STR)
    mr_tr_fail(r, "%s must be str, not %s", what, mr_tv_type(v));
  return v->kind == TV_STR;
}

static size_t char_len(const tv *s, size_t at) {
  size_t n = 1;
  while (at + n < s->str.len && ((unsigned char)s->str.s[at + n] & 0xc0) == 0x80)
    n++;
  return n;
}

int64_t mr_str_find(const tv *s, const tv *what, size_t from, size_t to, bool last) {
  size_t n = what->str.len;
  if (to < from || to - from < n)
    return -1;
  if (!last) {
    const char *p = n ? memmem(s->str.s + from, to - from, what->str.s, n) : s->str.s + from;
    return p ? p - s->str.s : -1;
  }
  for (size_t at = to - n + 1; at-- > from;)
    if (memcmp(s->str.s + at, what->str.s, n) == 0)
      return (int64_t)at;
  return -1;
}

/* Searching from the end compares at each place. */
static bool charge_search(tr *r, const tv *s, const tv *what, bool last) {
  return mr_tr_charge(r, (s->str.len / 64) * (last ? what->str.len / 64 + 1 : 1));
}

/* ---- strip, split, join ---- */

static bool in_set(const tv *set, const char *s, size_t n) {
  uint32_t c;
  if (!set) {
    mr_utf8_next(s, n, &c);
    return mr_ch_space(c);
  }
  return memmem(set->str.s, set->str.len, s, n) != NULL;
}

tv *mr_str_strip(tr *r, tv *s, tv *chars, int ends) {
  size_t from = 0, to = s->str.len;
  if (chars && chars->kind == TV_NONE)
    chars = NULL;
  if (chars && !need_str(r, chars, "strip arg"))
    return NULL;
  if (!mr_tr_charge(r, chars ? (s->str.len / 64) * (chars->str.len / 64 + 1) : s->str.len / 256))
    return NULL;
  while ((ends & 1) && from < to) {
    size_t n = char_len(s, from);
    if (!in_set(chars, s->str.s + from, n))
      break;
    from += n;
  }
  while ((ends & 2) && from < to) {
    size_t at = to - 1;
    while (at > from && ((unsigned char)s->str.s[at] & 0xc0) == 0x80)
      at--;
    if (!in_set(chars, s->str.s + at, to - at))
      break;
    to = at;
  }
  return from == 0 && to == s->str.len ? s : mr_tv_sub(r, s, from, to - from);
}

static tv *m_strip(tr *r, tv *self, tv_call *c) {
  return mr_str_strip(r, self, c->p[0], 3);
}

static tv *m_lstrip(tr *r, tv *self, tv_call *c) {
  return mr_str_strip(r, self, c->p[0], 1);
}

static tv *m_rstrip(tr *r, tv *self, tv_call *c) {
  return mr_str_strip(r, self, c->p[0], 2);
}

typedef struct parts { /* pieces of one string as they are found */
  tr *r;
  tv *of;
  tv **items;
  size_t n, cap;
} parts;

static bool add_part(parts *p, size_t from, size_t to) {
  if (p->n == p->cap) {
    size_t cap = p->cap ? p->cap * 2 : 8;
    tv **items = mr_tr_charge(p->r, cap / 4) ? mr_tr_alloc(p->r, cap, sizeof *items) : NULL;
    if (!items)
      return false;
    if (p->n)
      memcpy(items, p->items, p->n * sizeof *items);
    p->items = items;
    p->cap = cap;
  }
  p->items[p->n] = mr_tv_sub(p->r, p->of, from, to - from);
  return p->items[p->n++] != NULL;
}

static tv *parts_list(parts *p, bool reversed) {
  tv *v = mr_tv_new(p->r, TV_LIST);
  if (!v)
    return NULL;
  for (size_t i = 0; reversed && i < p->n / 2; i++) {
    tv *x = p->items[i];
    p->items[i] = p->items[p->n - 1 - i];
    p->items[p->n - 1 - i] = x;
  }
  v->seq.items = p->items;
  v->seq.n = p->n;
  return v;
}

/* Words between runs of white space, at most `max` cuts. */
static tv *split_space(tr *r, tv *s, int64_t max) {
  parts p = {.r = r, .of = s};
  size_t at = 0, len = s->str.len;
  for (;;) {
    while (at < len && in_set(NULL, s->str.s + at, char_len(s, at)))
      at += char_len(s, at);
    if (at == len)
      return parts_list(&p, false);
    size_t from = at;
    if (max >= 0 && (int64_t)p.n == max) {
      tv *rest = mr_str_strip(r, mr_tv_sub(r, s, from, len - from), NULL, 2);
      return rest && add_part(&p, from, from + rest->str.len) ? parts_list(&p, false) : NULL;
    }
    while (at < len && !in_set(NULL, s->str.s + at, char_len(s, at)))
      at += char_len(s, at);
    if (!add_part(&p, from, at))
      return NULL;
  }
}

static tv *rsplit_space(tr *r, tv *s, int64_t max) {
  tv *all = split_space(r, s, -1);
  if (!all || max < 0 || (int64_t)all->seq.n <= max + 1)
    return all;
  size_t keep = (size_t)max, cut = all->seq.n - keep; /* the first `cut` words stay together */
  tv *v = mr_tv_seq(r, TV_LIST, keep + 1), *left = mr_str_strip(r, s, NULL, 1),
     *end = all->seq.items[cut - 1];
  if (!v || !left)
    return NULL;
  v->seq.items[0] = mr_tv_sub(r, left, 0, (size_t)(end->str.s + end->str.len - left->str.s));
  if (!v->seq.items[0])
    return NULL;
  memcpy(v->seq.items + 1, all->seq.items + cut, keep * sizeof *v->seq.items);
  return v;
}

static tv *split(tr *r, tv *s, tv_call *c, bool right) {
  int64_t max;
  tv *sep = c->p[0];
  if (!mr_tpl_arg_int(r, c->p[1], -1, &max) || !mr_tr_charge(r, s->str.len / 64))
    return NULL;
  if (!sep || sep->kind == TV_NONE)
    return right ? rsplit_space(r, s, max) : split_space(r, s, max);
  if (!need_str(r, sep, "separator") || !charge_search(r, s, sep, right))
    return NULL;
  if (sep->str.len == 0)
    return mr_tr_fail(r, "empty separator");
  parts p = {.r = r, .of = s};
  size_t from = 0, to = s->str.len;
  while (max < 0 || (int64_t)p.n < max) {
    int64_t hit = mr_str_find(s, sep, from, to, right);
    if (hit < 0)
      break;
    size_t after = (size_t)hit + sep->str.len;
    if (!(right ? add_part(&p, after, to) : add_part(&p, from, (size_t)hit)))
      return NULL;
    from = right ? from : after;
    to = right ? (size_t)hit : to;
  }
  return add_part(&p, from, to) ? parts_list(&p, right) : NULL;
}

static tv *m_split(tr *r, tv *self, tv_call *c) {
  return split(r, self, c, false);
}

static tv *m_rsplit(tr *r, tv *self, tv_call *c) {
  return split(r, self, c, true);
}

tv *mr_str_lines(tr *r, tv *s, bool keep) {
  parts p = {.r = r, .of = s};
  size_t from = 0, at = 0;
  uint32_t code;
  if (!mr_tr_charge(r, s->str.len / 64))
    return NULL;
  while (at < s->str.len) {
    size_t n = (size_t)mr_utf8_next(s->str.s + at, s->str.len - at, &code);
    if (!mr_ch_break(code)) {
      at += n;
      continue;
    }
    if (code == '\r' && at + 1 < s->str.len && s->str.s[at + 1] == '\n')
      n = 2;
    if (!add_part(&p, from, keep ? at + n : at))
      return NULL;
    from = at += n;
  }
  if (from < at && !add_part(&p, from, at))
    return NULL;
  return parts_list(&p, false);
}

static tv *m_splitlines(tr *r, tv *self, tv_call *c) {
  return mr_str_lines(r, self, c->p[0] && mr_tv_truth(c->p[0]));
}

static tv *partition(tr *r, tv *s, tv *sep, bool last) {
  if (!need_str(r, sep, "separator") || !charge_search(r, s, sep, last))
    return NULL;
  if (sep->str.len == 0)
    return mr_tr_fail(r, "empty separator");
  int64_t hit = mr_str_find(s, sep, 0, s->str.len, last);
  size_t cut = hit >= 0 ? (size_t)hit
               : last   ? 0
                        : s->str.len,
         after = hit >= 0 ? cut + sep->str.len : cut;
  tv *v = mr_tv_seq(r, TV_TUPLE, 3);
  if (!v)
    return NULL;
  v->seq.items[0] = mr_tv_sub(r, s, 0, cut);
  v->seq.items[1] = mr_tv_sub(r, s, cut, after - cut);
  v->seq.items[2] = mr_tv_sub(r, s, after, s->str.len - after);
  return v->seq.items[0] && v->seq.items[1] && v->seq.items[2] ? v : NULL;
}

static tv *m_partition(tr *r, tv *self, tv_call *c) {
  return partition(r, self, c->p[0], false);
}

static tv *m_rpartition(tr *r, tv *self, tv_call *c) {
  return partition(r, self, c->p[0], true);
}

static tv *join(tr *r, tv *sep, tv **items, size_t n) {
  tsb b;
  mr_tsb_init(&b, r);
  for (size_t i = 0; i < n && !b.failed; i++) {
    tv *s = items[i];
    if (s->kind != TV_STR)
      return mr_tr_fail(r, "sequence item %zu: expected str instance, %s found", i, mr_tv_type(s));
    if (sep->safe && !(s = mr_tv_escape(r, s)))
      return NULL;
    if (i)
      mr_tsb_val(&b, sep);
    mr_tsb_val(&b, s);
  }
  tv *v = mr_tsb_done(&b);
  if (v && sep->safe && v != &mr_tv_empty)
    v->safe = 1;
  return v;
}

static tv *m_join(tr *r, tv *self, tv_call *c) {
  tv **items;
  size_t n;
  return mr_tv_iter(r, c->p[0], &items, &n) ? join(r, self, items, n) : NULL;
}

/* ---- search ---- */

/* The bytes that start and end (in code points, as slices) select. False: they select nothing
 * (start past the end). */
static bool window(tr *r, tv *s, tv *start, tv *end, size_t *from, size_t *to) {
  int64_t n = (int64_t)mr_tv_chars(s), a, b;
  if (!mr_tpl_arg_int(r, start && start->kind != TV_NONE ? start : NULL, 0, &a) ||
      !mr_tpl_arg_int(r, end && end->kind != TV_NONE ? end : NULL, n, &b))
    return false;
  a = a < 0 ? a + n < 0 ? 0 : a + n : a;
  b = b < 0 ? b + n < 0 ? 0 : b + n : b > n ? n : b;
  if (a > n || a > b)
    return false;
  *from = mr_tv_byte_at(s, (size_t)a);
  *to = mr_tv_byte_at(s, (size_t)b);
  return true;
}

/* Index in code points; -1 absent; -2 failed. */
static int64_t find(tr *r, tv *s, tv_call *c, bool last) {
  size_t from, to;
  if (!need_str(r, c->p[0], "argument") || !charge_search(r, s, c->p[0], last))
    return -2;
  if (!window(r, s, c->p[1], c->p[2], &from, &to))
    return r->failed ? -2 : -1;
  int64_t hit = mr_str_find(s, c->p[0], from, to, last);
  if (hit <= 0)
    return hit;
  tv before = {.kind = TV_STR, .str = {.s = s->str.s, .len = (size_t)hit, .chars = -1}};
  return (int64_t)mr_tv_chars(&before);
}

static tv *found(tr *r, int64_t at, bool must) {
  if (at == -1 && must)
    return mr_tr_fail(r, "substring not found");
  return at < -1 ? NULL : mr_tv_int(r, at);
}

static tv *m_find(tr *r, tv *self, tv_call *c) {
  return found(r, find(r, self, c, false), false);
}

static tv *m_rfind(tr *r, tv *self, tv_call *c) {
  return found(r, find(r, self, c, true), false);
}

static tv *m_index(tr *r, tv *self, tv_call *c) {
  return found(r, find(r, self, c, false), true);
}

static tv *m_rindex(tr *r, tv *self, tv_call *c) {
  return found(r, find(r, self, c, true), true);
}

static tv *m_count(tr *r, tv *self, tv_call *c) {
  size_t from, to;
  tv_int n = 0;
  if (!need_str(r, c->p[0], "argument") || !charge_search(r, self, c->p[0], false))
    return NULL;
  if (!window(r, self, c->p[1], c->p[2], &from, &to))
    return r->failed ? NULL : mr_tv_int(r, 0);
  if (c->p[0]->str.len == 0)
    return mr_tv_int(r, (tv_int)mr_tv_chars(self) + 1);
  for (int64_t hit; (hit = mr_str_find(self, c->p[0], from, to, false)) >= 0; n++)
    from = (size_t)hit + c->p[0]->str.len;
  return mr_tv_int(r, n);
}

static bool affix_matches(const tv *s, size_t from, size_t to, const tv *affix, bool end) {
  size_t n = affix->str.len;
  return to - from >= n && memcmp(s->str.s + (end ? to - n : from), affix->str.s, n) == 0;
}

static tv *affix(tr *r, tv *self, tv_call *c, bool end) {
  size_t from, to, n = 1;
  tv **options = &c->p[0];
  if (c->p[0]->kind == TV_TUPLE) {
    options = c->p[0]->seq.items;
    n = c->p[0]->seq.n;
  }
  if (!window(r, self, c->p[1], c->p[2], &from, &to))
    return r->failed ? NULL : &mr_tv_false;
  for (size_t i = 0; i < n; i++) {
    if (options[i]->kind != TV_STR)
      return mr_tr_fail(r, "%s first arg must be str or a tuple of str, not %s",
                        end ? "endswith" : "startswith", mr_tv_type(options[i]));
    if (affix_matches(self, from, to, options[i], end))
      return &mr_tv_true;
  }
  return &mr_tv_false;
}

static tv *m_startswith(tr *r, tv *self, tv_call *c) {
  return affix(r, self, c, false);
}

static tv *m_endswith(tr *r, tv *self, tv_call *c) {
  return affix(r, self, c, true);
}

/* ---- changed copies ---- */

tv *mr_str_replace(tr *r, tv *s, tv *old, tv *with, int64_t count) {
  tsb b;
  size_t from = 0, n = old->str.len;
  bool safe = s->safe;
  if (safe && (!(old = mr_tv_escape(r, old)) || !(with = mr_tv_escape(r, with))))
    return NULL;
  n = old->str.len;
  mr_tsb_init(&b, r);
  while (count != 0 && !b.failed) {
    int64_t hit = mr_str_find(s, old, from, s->str.len, false);
    if (hit < 0 || !mr_tr_charge(r, 1))
      break;
    mr_tsb_sub(&b, s, from, (size_t)hit - from);
    mr_tsb_val(&b, with);
    count--;
    from = (size_t)hit + n;
    if (n)
      continue;
    if (from >= s->str.len) /* an empty `old` stands between all characters */
      break;
    mr_tsb_sub(&b, s, from, char_len(s, from));
    from += char_len(s, from);
  }
  if (r->failed)
    return NULL;
  if (from < s->str.len)
    mr_tsb_sub(&b, s, from, s->str.len - from);
  tv *v = mr_tsb_done(&b);
  if (v && safe && v != &mr_tv_empty)
    v->safe = 1;
  return v;
}

static tv *m_replace(tr *r, tv *self, tv_call *c) {
  int64_t count;
  if (!need_str(r, c->p[0], "replace() argument 1") ||
      !need_str(r, c->p[1], "replace() argument 2") || !mr_tpl_arg_int(r, c->p[2], -1, &count))
    return NULL;
  return mr_str_replace(r, self, c->p[0], c->p[1], count);
}

static tv *m_upper(tr *r, tv *self, tv_call *c) {
  (void)c;
  return mr_str_case(r, self, CASE_UPPER);
}

static tv *m_lower(tr *r, tv *self, tv_call *c) {
  (void)c;
  return mr_str_case(r, self, CASE_LOWER);
}

static tv *m_title(tr *r, tv *self, tv_call *c) {
  (void)c;
  return mr_str_case(r, self, CASE_TITLE);
}

static tv *m_capitalize(tr *r, tv *self, tv_call *c) {
  (void)c;
  return mr_str_case(r, self, CASE_CAPITAL);
}

static tv *m_swapcase(tr *r, tv *self, tv_call *c) {
  (void)c;
  return mr_str_case(r, self, CASE_SWAP);
}

static tv *m_casefold(tr *r, tv *self, tv_call *c) {
  (void)c;
  return mr_str_case(r, self, CASE_FOLD);
}

static tv *m_removeprefix(tr *r, tv *self, tv_call *c) {
  if (!need_str(r, c->p[0], "removeprefix() argument"))
    return NULL;
  size_t n = c->p[0]->str.len;
  bool hit = affix_matches(self, 0, self->str.len, c->p[0], false);
  return hit ? mr_tv_sub(r, self, n, self->str.len - n) : self;
}

static tv *m_removesuffix(tr *r, tv *self, tv_call *c) {
  if (!need_str(r, c->p[0], "removesuffix() argument"))
    return NULL;
  bool hit = affix_matches(self, 0, self->str.len, c->p[0], true);
  return hit ? mr_tv_sub(r, self, 0, self->str.len - c->p[0]->str.len) : self;
}

/* where: '<' text left, '>' right, '^' in the middle. */
tv *mr_str_center(tr *r, tv *s, int64_t width, tv *fill, int where) {
  int64_t n = (int64_t)mr_tv_chars(s), space = width > n ? width - n : 0;
  int64_t before = where == '>' ? space : where == '^' ? space / 2 + (space & width & 1) : 0;
  tsb b;
  if (fill && (fill->kind != TV_STR || mr_tv_chars(fill) != 1))
    return mr_tr_fail(r, "The fill character must be exactly one character long");
  if ((size_t)space > r->limits.output)
    return mr_tr_fail(r, "a text %lld characters wide is too long", (long long)width);
  if (space == 0)
    return s;
  mr_tsb_init(&b, r);
  for (int64_t i = 0; i < space + 1 && !b.failed; i++) {
    if (i == before)
      mr_tsb_val(&b, s);
    if (i < space && fill)
      mr_tsb_val(&b, fill);
    else if (i < space)
      mr_tsb_adds(&b, " ", TAINT_NONE);
  }
  tv *v = mr_tsb_done(&b);
  if (v)
    v->safe = s->safe;
  return v;
}

static tv *justify(tr *r, tv *self, tv_call *c, int where) {
  int64_t width;
  return mr_tpl_arg_int(r, c->p[0], 0, &width) ? mr_str_center(r, self, width, c->p[1], where)
                                               : NULL;
}

static tv *m_center(tr *r, tv *self, tv_call *c) {
  return justify(r, self, c, '^');
}

static tv *m_ljust(tr *r, tv *self, tv_call *c) {
  return justify(r, self, c, '<');
}

static tv *m_rjust(tr *r, tv *self, tv_call *c) {
  return justify(r, self, c, '>');
}

static tv *m_zfill(tr *r, tv *self, tv_call *c) {
  int64_t width, n = (int64_t)mr_tv_chars(self);
  if (!mr_tpl_arg_int(r, c->p[0], 0, &width))
    return NULL;
  bool sign = self->str.len && (self->str.s[0] == '-' || self->str.s[0] == '+');
  if (width > n && (size_t)width > r->limits.output)
    return mr_tr_fail(r, "a text %lld characters wide is too long", (long long)width);
  tsb b;
  mr_tsb_init(&b, r);
  mr_tsb_sub(&b, self, 0, sign);
  for (; n < width && !b.failed; n++)
    mr_tsb_adds(&b, "0", TAINT_NONE);
  mr_tsb_sub(&b, self, sign, self->str.len - sign);
  return mr_tsb_done(&b);
}

static tv *m_expandtabs(tr *r, tv *self, tv_call *c) {
  int64_t size, column = 0;
  tsb b;
  if (!mr_tpl_arg_int(r, c->p[0], 8, &size))
    return NULL;
  if (size > (int64_t)r->limits.output)
    return mr_tr_fail(r, "a tab of %lld columns is too wide", (long long)size);
  mr_tsb_init(&b, r);
  for (size_t at = 0; at < self->str.len && !b.failed; at += char_len(self, at)) {
    char ch = self->str.s[at];
    if (ch != '\t') {
      mr_tsb_sub(&b, self, at, char_len(self, at));
      column = ch == '\n' || ch == '\r' ? 0 : column + 1;
      continue;
    }
    for (int64_t n = size > 0 ? size - column % size : 0; n > 0 && !b.failed; n--, column++)
      mr_tsb_adds(&b, " ", mr_tv_taint_at(self, at));
  }
  return mr_tsb_done(&b);
}

static tv *m_format(tr *r, tv *self, tv_call *c) {
  return mr_fmt_braces(r, self, c);
}

/* ---- classes: one function, told apart by the method's name ---- */

#define CLASS_METHOD(name)                                                                         \
  static tv *m_##name(tr *r, tv *self, tv_call *c) {                                               \
    (void)r, (void)c;                                                                              \
    return mr_tv_bool(mr_ch_class(self, #name));                                                   \
  }
CLASS_METHOD(isalnum)
CLASS_METHOD(isalpha)
CLASS_METHOD(isascii)
CLASS_METHOD(isdecimal)
CLASS_METHOD(isdigit)
CLASS_METHOD(islower)
CLASS_METHOD(isnumeric)
CLASS_METHOD(isprintable)
CLASS_METHOD(isspace)
CLASS_METHOD(istitle)
CLASS_METHOD(isupper)

/* ---- dictionaries ---- */

static tv *view(tr *r, tv *self, tv_view what) {
  tv *v = mr_tv_new(r, TV_VIEW);
  if (v) {
    v->view.of = self;
    v->view.what = what;
  }
  return v;
}

static tv *m_items(tr *r, tv *self, tv_call *c) {
  (void)c;
  return view(r, self, VIEW_ITEMS);
}

static tv *m_keys(tr *r, tv *self, tv_call *c) {
  (void)c;
  return view(r, self, VIEW_KEYS);
}

static tv *m_values(tr *r, tv *self, tv_call *c) {
  (void)c;
  return view(r, self, VIEW_VALUES);
}

static tv *m_get(tr *r, tv *self, tv_call *c) {
  bool failed = false;
  if (!mr_tv_hashable(r, c->p[0]))
    return NULL;
  tv *v = mr_tv_dict_get(r, self, c->p[0], &failed);
  return failed ? NULL : v ? v : c->p[1] ? c->p[1] : &mr_tv_none;
}

/* Nothing changes an object, so that it is its own copy. */
static tv *m_copy(tr *r, tv *self, tv_call *c) {
  (void)r, (void)c;
  return self;
}

/* ---- lists and tuples ---- */

static tv *m_list_index(tr *r, tv *self, tv_call *c) {
  for (size_t i = 0; i < self->seq.n; i++) {
    int e = mr_tv_equal(r, self->seq.items[i], c->p[0]);
    if (e)
      return e < 0 ? NULL : mr_tv_int(r, (tv_int)i);
  }
  return mr_tr_fail(r, "the item is not in the list");
}

static tv *m_list_count(tr *r, tv *self, tv_call *c) {
  tv_int n = 0;
  for (size_t i = 0; i < self->seq.n; i++) {
    int e = mr_tv_equal(r, self->seq.items[i], c->p[0]);
    if (e < 0)
      return NULL;
    n += e;
  }
  return mr_tv_int(r, n);
}

/* ---- tables, sorted by name ---- */

#define M(name, params)                                                                            \
  { #name, params, m_##name, NULL }
static const tv_func str_methods[] = {M(capitalize, ""),
                                      M(casefold, ""),
                                      M(center, "width,fillchar?"),
                                      M(count, "sub,start?,end?"),
                                      M(endswith, "suffix,start?,end?"),
                                      M(expandtabs, "tabsize?"),
                                      M(find, "sub,start?,end?"),
                                      M(format, NULL),
                                      M(index, "sub,start?,end?"),
                                      M(isalnum, ""),
                                      M(isalpha, ""),
                                      M(isascii, ""),
                                      M(isdecimal, ""),
                                      M(isdigit, ""),
                                      M(islower, ""),
                                      M(isnumeric, ""),
                                      M(isprintable, ""),
                                      M(isspace, ""),
                                      M(istitle, ""),
                                      M(isupper, ""),
                                      M(join, "iterable"),
                                      M(ljust, "width,fillchar?"),
                                      M(lower, ""),
                                      M(lstrip, "chars?"),
                                      M(partition, "sep"),
                                      M(removeprefix, "prefix"),
                                      M(removesuffix, "suffix"),
                                      M(replace, "old,new,count?"),
                                      M(rfind, "sub,start?,end?"),
                                      M(rindex, "sub,start?,end?"),
                                      M(rjust, "width,fillchar?"),
                                      M(rpartition, "sep"),
                                      M(rsplit, "sep?,maxsplit?"),
                                      M(rstrip, "chars?"),
                                      M(split, "sep?,maxsplit?"),
                                      M(splitlines, "keepends?"),
                                      M(startswith, "prefix,start?,end?"),
                                      M(strip, "chars?"),
                                      M(swapcase, ""),
                                      M(title, ""),
                                      M(upper, ""),
                                      M(zfill, "width")};
#define REFUSED(name)                                                                              \
  { #name, NULL, NULL, NULL }
static const tv_func dict_methods[] = {
    REFUSED(clear), M(copy, ""),      M(get, "key,default?"), M(items, ""),    M(keys, ""),
    REFUSED(pop),   REFUSED(popitem), REFUSED(setdefault),    REFUSED(update), M(values, "")};
static const tv_func list_methods[] = {REFUSED(append), REFUSED(clear),
                                       M(copy, ""),     {"count", "value", m_list_count, NULL},
                                       REFUSED(extend), {"index", "value", m_list_index, NULL},
                                       REFUSED(insert), REFUSED(pop),
                                       REFUSED(remove), REFUSED(reverse),
                                       REFUSED(sort)};

#define LEN(a) (sizeof(a) / sizeof *(a))

const tv_func *mr_tpl_find(const tv_func *table, size_t n, const char *name, size_t len) {
  for (size_t lo = 0, hi = n; lo < hi;) {
    size_t mid = lo + (hi - lo) / 2, k = strlen(table[mid].name);
    int c = memcmp(table[mid].name, name, k < len ? k : len);
    if (c == 0 && k == len)
      return &table[mid];
    if (c < 0 || (c == 0 && k < len))
      lo = mid + 1;
    else
      hi = mid;
  }
  return NULL;
}

tn_lookup mr_tpl_methods(const char *name, size_t len) {
  return (tn_lookup){mr_tpl_find(str_methods, LEN(str_methods), name, len),
                     mr_tpl_find(dict_methods, LEN(dict_methods), name, len),
                     mr_tpl_find(list_methods, LEN(list_methods), name, len)};
}
