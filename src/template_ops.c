#include <math.h>
#include <string.h>

#include "src/template_int.h"

/* ---- arithmetic ---- */

static tv *unsupported(tr *r, const char *op, const tv *a, const tv *b) {
  return mr_tr_fail(r, "unsupported operand type(s) for %s: '%s' and '%s'", op, mr_tv_type(a),
                    mr_tv_type(b));
}

static tv *overflow(tr *r) {
  return mr_tr_fail(r, "integer overflow: the result needs more than 128 bits");
}

/* floor(a / b) and its remainder, which has the sign of b. */
static void int_divmod(tv_int a, tv_int b, tv_int *q, tv_int *m) {
  *q = a / b;
  *m = a % b;
  if (*m && (*m < 0) != (b < 0)) {
    *m += b;
    --*q;
  }
}

static void real_divmod(double a, double b, double *q, double *m) {
  *m = fmod(a, b);
  double d = (a - *m) / b;
  if (*m != 0) {
    if ((b < 0) != (*m < 0)) {
      *m += b;
      d -= 1;
    }
  } else {
    *m = copysign(0.0, b);
  }
  *q = d != 0 ? floor(d) : copysign(0.0, a / b);
  if (d - *q > 0.5)
    *q += 1;
}

static tv *int_pow(tr *r, tv_int base, tv_int e) {
  if (e < 0)
    return base == 0 ? mr_tr_fail(r, "0.0 cannot be raised to a negative power")
                     : mr_tv_float(r, pow((double)base, (double)e));
  tv_int x = 1;
  if (base == 0 || base == 1 || base == -1)
    return mr_tv_int(r, base == -1 && e % 2 == 0 ? 1 : e == 0 ? 1 : base);
  for (tv_int i = 0; i < e; i++)
    if (__builtin_mul_overflow(x, base, &x))
      return overflow(r);
  return mr_tv_int(r, x);
}

static tv *int_op(tr *r, tn_op op, tv_int a, tv_int b) {
  tv_int x = 0, m;
  bool over = false;
  if ((op == OP_DIV || op == OP_FLOORDIV || op == OP_MOD) && b == 0)
    return mr_tr_fail(r, op == OP_DIV   ? "division by zero"
                         : op == OP_MOD ? "integer modulo by zero"
                                        : "integer division or modulo by zero");
  switch (op) {
  case OP_ADD:
    over = __builtin_add_overflow(a, b, &x);
    break;
  case OP_SUB:
    over = __builtin_sub_overflow(a, b, &x);
    break;
  case OP_MUL:
    over = __builtin_mul_overflow(a, b, &x);
    break;
  case OP_DIV:
    return mr_tv_float(r, (double)a / (double)b);
  case OP_POW:
    return int_pow(r, a, b);
  default:
    if (b == -1)
      over = op == OP_FLOORDIV && __builtin_sub_overflow((tv_int)0, a, &x);
    else if (op == OP_FLOORDIV)
      int_divmod(a, b, &x, &m);
    else
      int_divmod(a, b, &m, &x);
  }
  return over ? overflow(r) : mr_tv_int(r, x);
}

static tv *real_op(tr *r, tn_op op, double a, double b) {
  double q, m;
  if ((op == OP_DIV || op == OP_FLOORDIV || op == OP_MOD) && b == 0)
    return mr_tr_fail(r, op == OP_DIV   ? "float division by zero"
                         : op == OP_MOD ? "float modulo"
                                        : "float floor division by zero");
  switch (op) {
  case OP_ADD:
    return mr_tv_float(r, a + b);
  case OP_SUB:
    return mr_tv_float(r, a - b);
  case OP_MUL:
    return mr_tv_float(r, a * b);
  case OP_DIV:
    return mr_tv_float(r, a / b);
  case OP_POW:
    if (a == 0 && b < 0)
      return mr_tr_fail(r, "0.0 cannot be raised to a negative power");
    q = pow(a, b);
    if (isnan(q) || isinf(q))
      return mr_tr_fail(r, "the power is not a finite number");
    return mr_tv_float(r, q);
  default:
    real_divmod(a, b, &q, &m);
    return mr_tv_float(r, op == OP_MOD ? m : q);
  }
}

/* ---- strings and lists ---- */

static tv *with_safe(tv *v, bool safe) {
  if (v && safe && v != &mr_tv_empty)
    v->safe = 1;
  return v;
}

static tv *add_str(tr *r, tv *a, tv *b) {
  bool safe = a->safe || b->safe;
  tsb t;
  if (safe) { /* text beside Markup is escaped */
    a = mr_tv_escape(r, a);
    b = a ? mr_tv_escape(r, b) : NULL;
    if (!b)
      return NULL;
  }
  mr_tsb_init(&t, r);
  mr_tsb_val(&t, a);
  mr_tsb_val(&t, b);
  return with_safe(mr_tsb_done(&t), safe);
}

static tv *add_seq(tr *r, const tv *a, const tv *b) {
  tv *v = mr_tv_seq(r, (tv_kind)a->kind, a->seq.n + b->seq.n);
  if (!v)
    return NULL;
  if (a->seq.n)
    memcpy(v->seq.items, a->seq.items, a->seq.n * sizeof *v->seq.items);
  if (b->seq.n)
    memcpy(v->seq.items + a->seq.n, b->seq.items, b->seq.n * sizeof *v->seq.items);
  return v;
}

static bool is_seq(const tv *v) {
  return v->kind == TV_STR || v->kind == TV_LIST || v->kind == TV_TUPLE;
}

static tv *repeat(tr *r, tv *v, tv_int times) {
  size_t n = times <= 0 ? 0 : times > (tv_int)1 << 40 ? (size_t)1 << 40 : (size_t)times;
  if (v->kind == TV_STR) {
    tsb b;
    mr_tsb_init(&b, r);
    for (size_t i = 0; i < n && v->str.len && !b.failed; i++)
      mr_tsb_val(&b, v);
    return with_safe(mr_tsb_done(&b), v->safe);
  }
  size_t all;
  if (__builtin_mul_overflow(v->seq.n, n, &all))
    return mr_tr_fail(r, "a list is too large");
  tv *list = mr_tv_seq(r, (tv_kind)v->kind, all);
  for (size_t i = 0; list && i < all; i++)
    list->seq.items[i] = v->seq.items[i % v->seq.n];
  return list;
}

static tv *add(tr *r, tv *a, tv *b) {
  if (a->kind == TV_STR && b->kind == TV_STR)
    return add_str(r, a, b);
  if (is_seq(a) && a->kind == b->kind)
    return add_seq(r, a, b);
  if (is_seq(a))
    return mr_tr_fail(r, "can only concatenate %s (not \"%s\") to %s", mr_tv_type(a), mr_tv_type(b),
                      mr_tv_type(a));
  return unsupported(r, "+", a, b);
}

tv *mr_op_binary(tr *r, tn_op op, tv *a, tv *b) {
  static const char *const signs[] = {"+", "-", "*", "/", "//", "%", "** or pow()"};
  tv_int x, y;
  if (a->kind == TV_UNDEF || b->kind == TV_UNDEF) {
    if (op == OP_MOD && a->kind == TV_STR)
      return mr_fmt_percent(r, a, b);
    return mr_tv_fail_undef(r, a->kind == TV_UNDEF ? a : b);
  }
  if (mr_tv_as_int(a, &x) && mr_tv_as_int(b, &y))
    return int_op(r, op, x, y);
  if (mr_tv_is_num(a) && mr_tv_is_num(b))
    return real_op(r, op, mr_tv_real(a), mr_tv_real(b));
  if (op == OP_ADD)
    return add(r, a, b);
  if (op == OP_MOD && a->kind == TV_STR)
    return mr_fmt_percent(r, a, b);
  if (op == OP_MUL && is_seq(a) && mr_tv_as_int(b, &y))
    return repeat(r, a, y);
  if (op == OP_MUL && is_seq(b) && mr_tv_as_int(a, &x))
    return repeat(r, b, x);
  if (op == OP_MUL && (is_seq(a) || is_seq(b)))
    return mr_tr_fail(r, "can't multiply sequence by non-int of type '%s'",
                      mr_tv_type(is_seq(a) ? b : a));
  return unsupported(r, signs[op], a, b);
}

tv *mr_op_negate(tr *r, tv *v, bool minus) {
  tv_int i;
  if (mr_tv_as_int(v, &i)) {
    if (minus && __builtin_sub_overflow((tv_int)0, i, &i))
      return overflow(r);
    return mr_tv_int(r, i);
  }
  if (v->kind == TV_FLOAT)
    return mr_tv_float(r, minus ? -v->f : v->f);
  if (v->kind == TV_UNDEF)
    return mr_tv_fail_undef(r, v);
  return mr_tr_fail(r, "bad operand type for unary %s: '%s'", minus ? "-" : "+", mr_tv_type(v));
}

tv *mr_op_concat(tr *r, tv **items, int n) {
  bool safe = false;
  tsb b;
  for (int i = 0; i < n && r->escape; i++)
    safe |= items[i]->kind == TV_STR && items[i]->safe;
  mr_tsb_init(&b, r);
  for (int i = 0; i < n; i++) {
    tv *s = safe ? mr_tv_escape(r, items[i]) : mr_tv_str(r, items[i]);
    if (!s)
      return NULL;
    mr_tsb_val(&b, s);
  }
  return with_safe(mr_tsb_done(&b), safe);
}

/* ---- comparisons ---- */

static int in_seq(tr *r, tv *box, const tv *item) {
  tv **items;
  size_t n;
  bool iterator = box->kind == TV_GEN; /* what comes after the item found can still be read */
  if (!mr_tv_iter(r, box, &items, &n))
    return -1;
  for (size_t i = 0; i < n; i++) {
    int e = mr_tv_equal(r, items[i], item);
    if (iterator && e)
      box->seq.pos -= n - i - 1;
    if (e)
      return e;
  }
  return 0;
}

static int contains(tr *r, tv *box, tv *item) {
  bool failed = false;
  switch (box->kind) {
  case TV_UNDEF:
    return 0;
  case TV_STR:
    if (item->kind != TV_STR) {
      mr_tr_fail(r, "'in <string>' requires string as left operand, not %s", mr_tv_type(item));
      return -1;
    }
    return mr_tr_charge(r, box->str.len / 256) ? mr_str_find(box, item, 0, box->str.len, false) >= 0
                                               : -1;
  case TV_DICT:
    if (!mr_tv_hashable(r, item))
      return -1;
    bool found = mr_tv_dict_get(r, box, item, &failed) != NULL;
    return failed ? -1 : found;
  case TV_LIST:
  case TV_TUPLE:
  case TV_VIEW:
  case TV_RANGE:
  case TV_GEN:
    return in_seq(r, box, item);
  default:
    mr_tr_fail(r, "argument of type '%s' is not iterable", mr_tv_type(box));
    return -1;
  }
}

int mr_op_compare(tr *r, tn_op op, tv *a, tv *b) {
  int e;
  switch (op) {
  case OP_EQ:
    return mr_tv_equal(r, a, b);
  case OP_NE:
    e = mr_tv_equal(r, a, b);
    return e < 0 ? e : !e;
  case OP_LT:
    return mr_tv_less(r, a, b, "<");
  case OP_LE:
    return mr_tv_less(r, a, b, "<=");
  case OP_GT:
    return mr_tv_less(r, b, a, ">");
  case OP_GE:
    return mr_tv_less(r, b, a, ">=");
  case OP_IN:
    return contains(r, b, a);
  default:
    e = contains(r, b, a);
    return e < 0 ? e : !e;
  }
}

/* ---- items and attributes ---- */

static tv *bound(tr *r, tv *self, const tv_func *f) {
  tv *v = mr_tv_new(r, TV_BOUND);
  if (v) {
    v->call.self = self;
    v->call.func = f;
  }
  return v;
}

/* Printing it gives nothing, as for any undefined value; using it is the error. */
static tv *refused(tr *r, const tv *of, const tv *name) {
  size_t cap = name->str.len + 96;
  char *hint = mr_tr_alloc(r, cap, 1);
  if (!hint)
    return NULL;
  snprintf(hint, cap, "access to attribute '%.*s' of '%s' object is unsafe.", (int)name->str.len,
           name->str.s, mr_tv_type(of));
  return mr_tv_undef_hint(r, hint);
}

static tv *loop_attr(tr *r, tv *v, const tv *name) {
  const tv_loop *l = v->loop;
  if (mr_tv_is_str(name, "index"))
    return mr_tv_int(r, (tv_int)l->at + 1);
  if (mr_tv_is_str(name, "index0"))
    return mr_tv_int(r, (tv_int)l->at);
  if (mr_tv_is_str(name, "revindex"))
    return mr_tv_int(r, (tv_int)(l->n - l->at));
  if (mr_tv_is_str(name, "revindex0"))
    return mr_tv_int(r, (tv_int)(l->n - l->at) - 1);
  if (mr_tv_is_str(name, "first"))
    return mr_tv_bool(l->at == 0);
  if (mr_tv_is_str(name, "last"))
    return mr_tv_bool(l->at + 1 == l->n);
  if (mr_tv_is_str(name, "length"))
    return mr_tv_int(r, (tv_int)l->n);
  if (mr_tv_is_str(name, "depth"))
    return mr_tv_int(r, l->depth + 1);
  if (mr_tv_is_str(name, "depth0"))
    return mr_tv_int(r, l->depth);
  if (mr_tv_is_str(name, "previtem"))
    return l->at > 0 ? l->items[l->at - 1] : mr_tv_undef_hint(r, "there is no previous item");
  if (mr_tv_is_str(name, "nextitem"))
    return l->at + 1 < l->n ? l->items[l->at + 1] : mr_tv_undef_hint(r, "there is no next item");
  if (mr_tv_is_str(name, "cycle"))
    return bound(r, v, mr_tpl_func("loop.cycle", 10));
  return mr_tv_is_str(name, "changed") ? bound(r, v, mr_tpl_func("loop.changed", 12)) : NULL;
}

static tv *macro_attr(tr *r, const tv *v, const tv *name) {
  const tn *n = v->macro.node;
  if (mr_tv_is_str(name, "name"))
    return n->kind == N_MACRO ? n->val : &mr_tv_none;
  if (mr_tv_is_str(name, "caller"))
    return mr_tv_bool(n->flags & MACRO_CALLER);
  if (mr_tv_is_str(name, "catch_kwargs"))
    return mr_tv_bool(n->flags & MACRO_KWARGS);
  if (mr_tv_is_str(name, "catch_varargs"))
    return mr_tv_bool(n->flags & MACRO_VARARGS);
  if (!mr_tv_is_str(name, "arguments"))
    return NULL;
  tv *list = mr_tv_seq(r, TV_TUPLE, (size_t)n->n_params);
  for (int i = 0; list && i < n->n_params; i++)
    list->seq.items[i] = r->t->syms[n->params[i]].val;
  return list;
}

static tv *block_attr(tr *r, const tv *name) {
  for (size_t i = 0; i < r->t->n_blocks; i++) {
    const tn *b = r->t->blocks[i];
    if (mr_tv_equal(r, r->t->syms[b->sym].val, name) != 1)
      continue;
    tv *v = mr_tv_new(r, TV_BLOCK);
    if (v)
      v->macro.node = b;
    return v;
  }
  return NULL;
}

/* What Python's getattr finds; NULL without an error set: nothing. */
static tv *get_attr(tr *r, tv *of, tv *name, const tn_lookup *look) {
  const tv_func *f = NULL;
  if (of->kind == TV_STR)
    f = look->str;
  else if (of->kind == TV_DICT)
    f = look->dict;
  else if (of->kind == TV_LIST || (of->kind == TV_TUPLE && look->list && look->list->fn))
    f = look->list;
  if (f)
    return f->fn ? bound(r, of, f) : refused(r, of, name);
  switch (of->kind) {
  case TV_NS:
    return mr_tv_dict_gets(of, name->str.s, name->str.len);
  case TV_LOOP:
    return loop_attr(r, of, name);
  case TV_MACRO:
    return macro_attr(r, of, name);
  case TV_SELF:
    return block_attr(r, name);
  case TV_TUPLE:
    if (of->group && (mr_tv_is_str(name, "grouper") || mr_tv_is_str(name, "list")))
      return of->seq.items[mr_tv_is_str(name, "list")];
    return NULL;
  case TV_CYCLER:
    if (mr_tv_is_str(name, "current"))
      return of->seq.items[of->seq.pos];
    if (mr_tv_is_str(name, "next"))
      return bound(r, of, mr_tpl_func("cycler.next", 11));
    return mr_tv_is_str(name, "reset") ? bound(r, of, mr_tpl_func("cycler.reset", 12)) : NULL;
  default:
    return NULL;
  }
}

static bool dunder(const tv *name) {
  return name->str.len > 4 && memcmp(name->str.s, "__", 2) == 0 &&
         memcmp(name->str.s + name->str.len - 2, "__", 2) == 0;
}

tv *mr_op_attr(tr *r, tv *of, tv *name, const tn_lookup *look) {
  if (of->kind == TV_UNDEF)
    return mr_tv_is_str(name, "__class__") ? refused(r, of, name) : mr_tv_fail_undef(r, of);
  tv *v = get_attr(r, of, name, look);
  if (v || r->failed)
    return v;
  if (of->kind == TV_DICT && (v = mr_tv_dict_gets(of, name->str.s, name->str.len)))
    return v;
  return dunder(name) ? refused(r, of, name) : mr_tv_undef(r, of, name);
}

static tv *index_item(tr *r, tv *of, tv_int i) {
  tv **items;
  size_t n;
  if (of->kind == TV_STR) {
    tv_int len = (tv_int)mr_tv_chars(of);
    i += i < 0 ? len : 0;
    if (i < 0 || i >= len)
      return NULL;
    if (len != (tv_int)of->str.len && !mr_tr_charge(r, of->str.len / 64))
      return NULL;
    size_t from = mr_tv_byte_at(of, (size_t)i), to = from + 1;
    while (to < of->str.len && ((unsigned char)of->str.s[to] & 0xc0) == 0x80)
      to++;
    return mr_tv_sub(r, of, from, to - from);
  }
  if (!mr_tv_iter(r, of, &items, &n))
    return NULL;
  i += i < 0 ? (tv_int)n : 0;
  return i < 0 || i >= (tv_int)n ? NULL : items[i];
}

tv *mr_op_item(tr *r, tv *of, tv *key) {
  tv *v = NULL;
  tv_int i;
  bool failed = false;
  if (of->kind == TV_UNDEF)
    return mr_tv_fail_undef(r, of);
  if (of->kind == TV_DICT && key->kind != TV_LIST && key->kind != TV_DICT) {
    if (!mr_tv_hashable(r, key))
      return NULL;
    v = mr_tv_dict_get(r, of, key, &failed);
  } else if ((is_seq(of) || of->kind == TV_RANGE) && mr_tv_as_int(key, &i)) {
    v = index_item(r, of, i);
  }
  if (v || r->failed)
    return v;
  if (key->kind == TV_STR) {
    tn_lookup look = mr_tpl_methods(key->str.s, key->str.len);
    v = get_attr(r, of, key, &look);
    if (v || r->failed)
      return v;
    if (dunder(key))
      return refused(r, of, key);
  }
  return mr_tv_undef(r, of, key);
}

/* ---- slices ---- */

/* One bound, clamped as Python does; false: not an index. */
static bool slice_bound(const tv *v, int64_t n, int64_t missing, int64_t low, int64_t high,
                        int64_t *out) {
  tv_int i;
  *out = missing;
  if (!v || v->kind == TV_NONE)
    return true;
  if (!mr_tv_as_int(v, &i))
    return false;
  i += i < 0 ? n : 0;
  *out = i < low ? low : i > high ? high : (int64_t)i;
  return true;
}

static tv *slice_str(tr *r, tv *s, int64_t from, int64_t step, size_t n) {
  size_t bytes = s->str.len, at = mr_tv_byte_at(s, (size_t)(n ? from : 0));
  if (n == 0)
    return mr_tv_sub(r, s, 0, 0);
  if (!mr_tr_charge(r, bytes / 64))
    return NULL;
  if (step == 1)
    return mr_tv_sub(r, s, at, mr_tv_byte_at(s, (size_t)from + n) - at);
  tv **chars;
  size_t n_chars;
  tsb b;
  if (!mr_tv_iter(r, s, &chars, &n_chars))
    return NULL;
  mr_tsb_init(&b, r);
  for (size_t i = 0; i < n; i++, from += step)
    mr_tsb_val(&b, chars[from]);
  return with_safe(mr_tsb_done(&b), s->safe);
}

static tv *slice_seq(tr *r, tv *of, int64_t from, int64_t step, size_t n) {
  tv **items;
  size_t all;
  if (of->kind == TV_RANGE) {
    tv *v = mr_tv_new(r, TV_RANGE);
    if (!v)
      return NULL;
    v->range.start = of->range.start + from * of->range.step;
    v->range.step = of->range.step * step;
    v->range.stop = v->range.start + (int64_t)n * v->range.step;
    return v;
  }
  if (!mr_tv_iter(r, of, &items, &all))
    return NULL;
  tv *v = mr_tv_seq(r, (tv_kind)of->kind, n);
  for (size_t i = 0; v && i < n; i++, from += step)
    v->seq.items[i] = items[from];
  return v;
}

tv *mr_op_slice(tr *r, tv *of, tv *from, tv *to, tv *step) {
  tv **items;
  size_t len = 0;
  tv_int by = 1;
  int64_t a, b;
  if (of->kind == TV_UNDEF)
    return mr_tv_fail_undef(r, of);
  bool good = (is_seq(of) || of->kind == TV_RANGE) &&
              (!step || step->kind == TV_NONE || mr_tv_as_int(step, &by));
  if (good && by == 0)
    return mr_tr_fail(r, "slice step cannot be zero");
  if (good && of->kind == TV_STR)
    len = mr_tv_chars(of);
  else if (good && !mr_tv_iter(r, of, &items, &len))
    return NULL;
  int64_t n = (int64_t)len;
  by = by > n + 1 ? n + 1 : by < -n - 1 ? -n - 1 : by;
  good = good && slice_bound(from, n, by > 0 ? 0 : n - 1, by > 0 ? 0 : -1, by > 0 ? n : n - 1, &a);
  good = good && slice_bound(to, n, by > 0 ? n : -1, by > 0 ? 0 : -1, by > 0 ? n : n - 1, &b);
  if (!good)
    return mr_tr_fail(r, "'%s' object cannot be sliced so", mr_tv_type(of));
  int64_t s = (int64_t)by, count = s > 0 ? (b - a + s - 1) / s : (a - b - s - 1) / -s;
  if (count < 0 || (s > 0 ? a >= b : a <= b))
    count = 0;
  return of->kind == TV_STR ? slice_str(r, of, a, s, (size_t)count)
                            : slice_seq(r, of, a, s, (size_t)count);
}

/* ---- attribute paths of filters ---- */

tv *mr_op_path(tr *r, tv *of, tv *attribute) {
  if (!attribute || attribute->kind == TV_NONE)
    return of;
  if (attribute->kind != TV_STR)
    return mr_op_item(r, of, attribute);
  for (size_t at = 0; of && at <= attribute->str.len;) {
    const char *dot = memchr(attribute->str.s + at, '.', attribute->str.len - at);
    size_t len = dot ? (size_t)(dot - attribute->str.s) - at : attribute->str.len - at;
    tv *part = mr_tv_sub(r, attribute, at, len);
    tv_int i;
    if (part && len && mr_ch_class(part, "isdigit") && mr_str_parse_int(part, 10, &i))
      part = mr_tv_int(r, i);
    of = part ? mr_op_item(r, of, part) : NULL;
    at += len + 1;
  }
  return of;
}
