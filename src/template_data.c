/* template_data.c: truth, equality, order, iteration, dictionaries. */
#include <math.h>
#include <string.h>

#include "src/template_int.h"

#define INDEX_FROM 9 /* dictionaries this large get a hash index */

const char *mr_tv_type(const tv *v) {
  static const char *const names[] = {[TV_UNDEF] = "Undefined",
                                      [TV_NONE] = "NoneType",
                                      [TV_BOOL] = "bool",
                                      [TV_INT] = "int",
                                      [TV_FLOAT] = "float",
                                      [TV_STR] = "str",
                                      [TV_LIST] = "list",
                                      [TV_TUPLE] = "tuple",
                                      [TV_DICT] = "dict",
                                      [TV_VIEW] = "dict_view",
                                      [TV_RANGE] = "range",
                                      [TV_GEN] = "generator",
                                      [TV_NS] = "Namespace",
                                      [TV_LOOP] = "LoopContext",
                                      [TV_MACRO] = "Macro",
                                      [TV_FUNC] = "function",
                                      [TV_BOUND] = "builtin_function_or_method",
                                      [TV_CYCLER] = "Cycler",
                                      [TV_JOINER] = "Joiner",
                                      [TV_SELF] = "TemplateReference",
                                      [TV_BLOCK] = "BlockReference"};
  if (v->kind == TV_STR && v->safe)
    return "Markup";
  if (v->kind == TV_VIEW)
    return v->view.what == VIEW_KEYS     ? "dict_keys"
           : v->view.what == VIEW_VALUES ? "dict_values"
                                         : "dict_items";
  return names[v->kind];
}

void *mr_tv_fail_undef(tr *r, const tv *u) {
  tsb b;
  if (u->undef.hint)
    return mr_tr_fail(r, "%s", u->undef.hint);
  mr_tsb_init(&b, r);
  if (!u->undef.of) {
    mr_tv_repr(&b, u->undef.name);
    mr_tsb_adds(&b, " is undefined", TAINT_NONE);
  } else {
    bool none = u->undef.of->kind == TV_NONE, text = u->undef.name->kind == TV_STR;
    if (text)
      mr_tsb_adds(&b, "'", TAINT_NONE);
    mr_tsb_adds(&b, none ? "None" : mr_tv_type(u->undef.of), TAINT_NONE);
    mr_tsb_adds(&b, none ? "" : " object", TAINT_NONE);
    mr_tsb_adds(&b, text ? "' has no attribute " : " has no element ", TAINT_NONE);
    mr_tv_repr(&b, u->undef.name);
  }
  tv *s = mr_tsb_done(&b);
  return s ? mr_tr_fail(r, "%.*s", (int)(s->str.len < 900 ? s->str.len : 900), s->str.s) : NULL;
}

bool mr_tv_truth(const tv *v) {
  switch (v->kind) {
  case TV_UNDEF:
  case TV_NONE:
    return false;
  case TV_BOOL:
    return v->b;
  case TV_INT:
    return v->i != 0;
  case TV_FLOAT:
    return v->f != 0;
  case TV_STR:
    return v->str.len > 0;
  case TV_LIST:
  case TV_TUPLE:
    return v->seq.n > 0;
  case TV_DICT:
    return v->dict.n > 0;
  case TV_VIEW:
    return v->view.of->dict.n > 0;
  case TV_RANGE:
    return v->range.step > 0 ? v->range.start < v->range.stop : v->range.start > v->range.stop;
  default:
    return true;
  }
}

/* ---- numbers ---- */

bool mr_tv_is_num(const tv *v) {
  return v->kind == TV_BOOL || v->kind == TV_INT || v->kind == TV_FLOAT;
}

double mr_tv_real(const tv *v) {
  return v->kind == TV_BOOL ? (double)v->b : v->kind == TV_INT ? (double)v->i : v->f;
}

bool mr_tv_as_int(const tv *v, tv_int *i) {
  if (v->kind != TV_INT && v->kind != TV_BOOL)
    return false;
  *i = v->kind == TV_INT ? v->i : (tv_int)v->b;
  return true;
}

/* -1, 0, 1; 2 where a NaN makes them incomparable. An int against a float is compared exactly. */
static int num_cmp(const tv *a, const tv *b) {
  tv_int x, y;
  if (mr_tv_as_int(a, &x) && mr_tv_as_int(b, &y))
    return x < y ? -1 : x > y;
  double f = mr_tv_real(a), g = mr_tv_real(b);
  if (isnan(f) || isnan(g))
    return 2;
  if (f != g || a->kind == b->kind || fabs(f) > 1e37)
    return f < g ? -1 : f > g;
  if (!mr_tv_as_int(a, &x))
    x = (tv_int)f;
  if (!mr_tv_as_int(b, &y))
    y = (tv_int)g;
  return x < y ? -1 : x > y;
}

/* ---- equality and order ---- */

static int seq_equal(tr *r, const tv *a, const tv *b) {
  if (a->seq.n != b->seq.n)
    return 0;
  for (size_t i = 0; i < a->seq.n; i++) {
    int e = mr_tv_equal(r, a->seq.items[i], b->seq.items[i]);
    if (e != 1)
      return e;
  }
  return 1;
}

static int dict_equal(tr *r, const tv *a, const tv *b) {
  if (a->dict.n != b->dict.n)
    return 0;
  for (size_t i = 0; i < a->dict.n; i++) {
    bool failed = false;
    tv *x = mr_tv_dict_get(r, b, a->dict.pairs[i].key, &failed);
    int e = failed ? -1 : x ? mr_tv_equal(r, a->dict.pairs[i].val, x) : 0;
    if (e != 1)
      return e;
  }
  return 1;
}

static int equal(tr *r, const tv *a, const tv *b) {
  if (mr_tv_is_num(a) && mr_tv_is_num(b))
    return num_cmp(a, b) == 0;
  if (a->kind != b->kind)
    return 0;
  switch (a->kind) {
  case TV_UNDEF:
  case TV_NONE:
    return 1;
  case TV_STR:
    return a->str.len == b->str.len &&
           (a->str.s == b->str.s || memcmp(a->str.s, b->str.s, a->str.len) == 0);
  case TV_LIST:
  case TV_TUPLE:
    return seq_equal(r, a, b);
  case TV_DICT:
    return dict_equal(r, a, b);
  case TV_RANGE:
    return a->range.start == b->range.start && a->range.stop == b->range.stop &&
           a->range.step == b->range.step;
  default:
    return a == b;
  }
}

int mr_tv_equal(tr *r, const tv *a, const tv *b) {
  if (!mr_tr_enter(r) || !mr_tr_charge(r, 1))
    return -1;
  int e = equal(r, a, b);
  mr_tr_leave(r);
  return e;
}

static int str_cmp(const tv *a, const tv *b) { /* UTF-8 sorts as its code points do */
  size_t n = a->str.len < b->str.len ? a->str.len : b->str.len;
  int c = memcmp(a->str.s, b->str.s, n);
  return c ? c : a->str.len < b->str.len ? -1 : a->str.len > b->str.len;
}

static int seq_less(tr *r, const tv *a, const tv *b, const char *op) {
  bool or_equal = op[1] == '=';
  for (size_t i = 0; i < a->seq.n && i < b->seq.n; i++) {
    int e = mr_tv_equal(r, a->seq.items[i], b->seq.items[i]);
    if (e < 0)
      return -1;
    if (!e)
      return mr_tv_less(r, a->seq.items[i], b->seq.items[i], op);
  }
  return or_equal ? a->seq.n <= b->seq.n : a->seq.n < b->seq.n;
}

/* op is "<" or "<=" here, and ">" or ">=" only for the message: the caller has swapped a and b
 * then. */
int mr_tv_less(tr *r, const tv *a, const tv *b, const char *op) {
  bool or_equal = op[1] == '=', swapped = op[0] == '>';
  const tv *x = swapped ? b : a, *y = swapped ? a : b;
  if (!mr_tr_charge(r, 1))
    return -1;
  if (mr_tv_is_num(a) && mr_tv_is_num(b)) {
    int c = num_cmp(a, b);
    return c == -1 || (or_equal && c == 0);
  }
  if (a->kind == TV_STR && b->kind == TV_STR) {
    int c = str_cmp(a, b);
    return c < 0 || (or_equal && c == 0);
  }
  if ((a->kind == TV_LIST || a->kind == TV_TUPLE) && a->kind == b->kind) {
    int c = mr_tr_enter(r) ? seq_less(r, a, b, op) : -1;
    mr_tr_leave(r);
    return c;
  }
  if (x->kind == TV_UNDEF || y->kind == TV_UNDEF)
    mr_tv_fail_undef(r, x->kind == TV_UNDEF ? x : y);
  else
    mr_tr_fail(r, "'%s' not supported between instances of '%s' and '%s'", op, mr_tv_type(x),
               mr_tv_type(y));
  return -1;
}

typedef struct sorting {
  tr *r;
  tv **items, **keys, **items2, **keys2;
  bool reverse;
} sorting;

/* Merge sort of [from, to): stable, and it may fail on any comparison. */
static bool merge_sort(sorting *s, size_t from, size_t to) {
  if (to - from < 2)
    return true;
  size_t mid = from + (to - from) / 2, i = from, j = mid, k = from;
  if (!merge_sort(s, from, mid) || !merge_sort(s, mid, to))
    return false;
  while (i < mid && j < to) {
    int right = s->reverse ? mr_tv_less(s->r, s->keys[i], s->keys[j], "<")
                           : mr_tv_less(s->r, s->keys[j], s->keys[i], "<");
    if (right < 0)
      return false;
    size_t from_one = right ? j++ : i++;
    s->items2[k] = s->items[from_one];
    s->keys2[k++] = s->keys[from_one];
  }
  for (; i < mid; i++, k++)
    s->items2[k] = s->items[i], s->keys2[k] = s->keys[i];
  for (; j < to; j++, k++)
    s->items2[k] = s->items[j], s->keys2[k] = s->keys[j];
  memcpy(s->items + from, s->items2 + from, (to - from) * sizeof *s->items);
  memcpy(s->keys + from, s->keys2 + from, (to - from) * sizeof *s->keys);
  return true;
}

bool mr_tv_sort(tr *r, tv **items, tv **keys, size_t n, bool reverse) {
  tv **room = mr_tr_alloc(r, n, 2 * sizeof *room);
  if (!room)
    return false;
  sorting s = {r, items, keys, room, room + n, reverse};
  return merge_sort(&s, 0, n);
}

/* ---- iteration ---- */

static bool fill(tr *r, size_t n, tv ***items) {
  *items = mr_tr_charge(r, n / 4) ? mr_tr_alloc(r, n, sizeof **items) : NULL;
  return *items != NULL;
}

static bool iter_str(tr *r, tv *v, tv **items) {
  size_t at = 0;
  for (size_t i = 0; at < v->str.len; i++) {
    size_t len = 1;
    while (at + len < v->str.len && ((unsigned char)v->str.s[at + len] & 0xc0) == 0x80)
      len++;
    items[i] = mr_tv_sub(r, v, at, len);
    if (!items[i])
      return false;
    at += len;
  }
  return true;
}

static bool iter_dict(tr *r, const tv *d, tv_view what, tv **items) {
  for (size_t i = 0; i < d->dict.n; i++) {
    const tv_pair *p = &d->dict.pairs[i];
    items[i] = what == VIEW_KEYS     ? p->key
               : what == VIEW_VALUES ? p->val
                                     : mr_tv_pair_of(r, p->key, p->val);
    if (!items[i])
      return false;
  }
  return true;
}

static size_t range_len(const tv *v) {
  int64_t start = v->range.start, stop = v->range.stop, step = v->range.step;
  if (step > 0)
    return start < stop ? ((uint64_t)stop - (uint64_t)start - 1) / (uint64_t)step + 1 : 0;
  return start > stop ? ((uint64_t)start - (uint64_t)stop - 1) / (uint64_t)-step + 1 : 0;
}

static bool iter_range(tr *r, const tv *v, size_t n, tv **items) {
  for (size_t i = 0; i < n; i++) {
    items[i] = mr_tv_int(r, v->range.start + (int64_t)i * v->range.step);
    if (!items[i])
      return false;
  }
  return true;
}

bool mr_tv_iter(tr *r, tv *v, tv ***items, size_t *n) {
  switch (v->kind) {
  case TV_UNDEF:
    *n = 0;
    return fill(r, 0, items);
  case TV_LIST:
  case TV_TUPLE:
    *n = v->seq.n;
    *items = v->seq.items;
    return true;
  case TV_GEN: /* what it gave once it does not give again */
    *n = v->seq.n - v->seq.pos;
    *items = v->seq.items + v->seq.pos;
    v->seq.pos = v->seq.n;
    return true;
  case TV_STR:
    *n = mr_tv_chars(v);
    return fill(r, *n, items) && iter_str(r, v, *items);
  case TV_DICT:
    *n = v->dict.n;
    return fill(r, *n, items) && iter_dict(r, v, VIEW_KEYS, *items);
  case TV_VIEW:
    *n = v->view.of->dict.n;
    return fill(r, *n, items) && iter_dict(r, v->view.of, v->view.what, *items);
  case TV_RANGE:
    *n = range_len(v);
    return fill(r, *n, items) && iter_range(r, v, *n, *items);
  default:
    mr_tr_fail(r, "'%s' object is not iterable", mr_tv_type(v));
    return false;
  }
}

/* ---- dictionaries ---- */

static uint64_t hash_bytes(const char *s, size_t n) { /* FNV-1a */
  uint64_t h = 1469598103934665603u;
  for (size_t i = 0; i < n; i++)
    h = (h ^ (unsigned char)s[i]) * 1099511628211u;
  return h ^ h >> 29;
}

/* Equal keys have equal hashes: 1, 1.0 and True too. */
static uint64_t hash(const tv *v) {
  tv_int i;
  if (v->kind == TV_STR)
    return hash_bytes(v->str.s, v->str.len);
  if (mr_tv_as_int(v, &i))
    return hash_bytes((const char *)&i, sizeof i);
  if (v->kind == TV_FLOAT) {
    if (fabs(v->f) < 1e37 && v->f == floor(v->f)) {
      i = (tv_int)v->f;
      return hash_bytes((const char *)&i, sizeof i);
    }
    return hash_bytes((const char *)&v->f, sizeof v->f);
  }
  uint64_t h = v->kind;
  if (v->kind == TV_TUPLE)
    for (size_t k = 0; k < v->seq.n; k++)
      h = (h ^ hash(v->seq.items[k])) * 1099511628211u;
  return h;
}

static bool hashable(tr *r, const tv *v) {
  if (v->kind == TV_LIST || v->kind == TV_DICT || v->kind == TV_VIEW) {
    mr_tr_fail(r, "unhashable type: '%s'", mr_tv_type(v));
    return false;
  }
  bool good = true;
  if (v->kind == TV_TUPLE)
    for (size_t i = 0; good && i < v->seq.n; i++)
      good = mr_tv_hashable(r, v->seq.items[i]);
  return good;
}

bool mr_tv_hashable(tr *r, const tv *v) {
  bool good = mr_tr_enter(r) && hashable(r, v);
  mr_tr_leave(r);
  return good;
}

tv *mr_tv_dict(tr *r, tv_kind kind, size_t want) {
  tv *v = mr_tr_charge(r, want / 4) ? mr_tv_new(r, kind) : NULL;
  if (!v)
    return NULL;
  v->dict.cap = want;
  v->dict.pairs = mr_tr_alloc(r, want, sizeof *v->dict.pairs);
  return v->dict.pairs ? v : NULL;
}

static void index_pair(tv *d, size_t i) {
  size_t mask = d->dict.n_index - 1, at = hash(d->dict.pairs[i].key) & mask;
  while (d->dict.index[at])
    at = (at + 1) & mask;
  d->dict.index[at] = (uint32_t)(i + 1);
}

/* An index of twice the room, filled anew. */
static bool reindex(tr *r, tv *d) {
  size_t n = 16;
  while (n < d->dict.cap * 2)
    n *= 2;
  if (d->dict.cap > UINT32_MAX / 2)
    return mr_tr_fail(r, "a dictionary is too large");
  d->dict.index = mr_tr_alloc(r, n, sizeof *d->dict.index);
  if (!d->dict.index)
    return false;
  memset(d->dict.index, 0, n * sizeof *d->dict.index);
  d->dict.n_index = n;
  for (size_t i = 0; i < d->dict.n; i++)
    index_pair(d, i);
  return true;
}

/* The pair with this key, or NULL. */
static tv_pair *find_pair(tr *r, const tv *d, const tv *key, bool *failed) {
  size_t mask = d->dict.n_index - 1, at = d->dict.index ? hash(key) & mask : 0;
  for (size_t k = 0; k < d->dict.n || d->dict.index; k++) {
    if (d->dict.index && !d->dict.index[at])
      return NULL;
    tv_pair *p = &d->dict.pairs[d->dict.index ? d->dict.index[at] - 1 : k];
    int e = mr_tv_equal(r, p->key, key);
    if (e < 0)
      *failed = true;
    if (e)
      return e > 0 ? p : NULL;
    at = (at + 1) & mask;
  }
  return NULL;
}

tv *mr_tv_dict_get(tr *r, const tv *d, const tv *key, bool *failed) {
  tv_pair *p = find_pair(r, d, key, failed);
  return p ? p->val : NULL;
}

tv *mr_tv_dict_gets(const tv *d, const char *key, size_t len) {
  size_t mask = d->dict.n_index - 1, at = d->dict.index ? hash_bytes(key, len) & mask : 0;
  for (size_t k = 0; k < d->dict.n || d->dict.index; k++) {
    if (d->dict.index && !d->dict.index[at])
      return NULL;
    const tv_pair *p = &d->dict.pairs[d->dict.index ? d->dict.index[at] - 1 : k];
    if (p->key->kind == TV_STR && p->key->str.len == len && memcmp(p->key->str.s, key, len) == 0)
      return p->val;
    at = (at + 1) & mask;
  }
  return NULL;
}

bool mr_tv_dict_put(tr *r, tv *d, tv *key, tv *val) {
  bool failed = false;
  tv_pair *p = find_pair(r, d, key, &failed);
  if (failed)
    return false;
  if (p) {
    p->val = val;
    return true;
  }
  if (d->dict.n == d->dict.cap) {
    size_t cap = d->dict.cap ? d->dict.cap * 2 : 4;
    tv_pair *pairs = mr_tr_charge(r, cap / 4) ? mr_tr_alloc(r, cap, sizeof *pairs) : NULL;
    if (!pairs)
      return false;
    if (d->dict.n)
      memcpy(pairs, d->dict.pairs, d->dict.n * sizeof *pairs);
    d->dict.pairs = pairs;
    d->dict.cap = cap;
    d->dict.index = NULL;
  }
  d->dict.pairs[d->dict.n++] = (tv_pair){key, val};
  if (d->dict.index)
    index_pair(d, d->dict.n - 1);
  else if (d->dict.n >= INDEX_FROM)
    return reindex(r, d);
  return true;
}
