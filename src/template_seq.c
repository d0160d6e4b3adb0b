/* template_seq.c: filters on lists and mappings, and the table of tests. Filters that are
 * generators in the reference give an iterator here too: it can be read once, has no length and is
 * not JSON. */
#include <math.h>
#include <string.h>

#include "src/template_int.h"

static tv *generator(tr *r, size_t room) {
  tv *v = mr_tv_seq(r, TV_GEN, room);
  if (v)
    v->seq.n = 0;
  return v;
}

static tv *lowered(tr *r, tv *v, bool case_sensitive) {
  return v && v->kind == TV_STR && !case_sensitive ? mr_str_case(r, v, CASE_LOWER) : v;
}

static bool flag(const tv *v) {
  return v && mr_tv_truth(v);
}

/* attribute of each item, in lower case unless case_sensitive; `missing` stands in for undefined
 * ones. */
static tv **keys_of(tr *r, tv **items, size_t n, tv *attribute, bool case_sensitive, tv *missing) {
  tv **keys = mr_tr_alloc(r, n, sizeof *keys);
  for (size_t i = 0; keys && i < n; i++) {
    tv *k = mr_op_path(r, items[i], attribute);
    if (k && k->kind == TV_UNDEF && missing)
      k = missing;
    keys[i] = lowered(r, k, case_sensitive);
    if (!keys[i])
      return NULL;
  }
  return keys;
}

static tv *copy_list(tr *r, tv *v) {
  tv **items;
  size_t n;
  if (!mr_tv_iter(r, v, &items, &n))
    return NULL;
  tv *list = mr_tv_seq(r, TV_LIST, n);
  if (list && n)
    memcpy(list->seq.items, items, n * sizeof *items);
  return list;
}

/* ---- first, last, length, list ---- */

static tv *f_first(tr *r, tv *self, tv_call *c) {
  tv **items;
  size_t n;
  (void)c;
  if (self->kind == TV_GEN)
    return self->seq.pos < self->seq.n ? self->seq.items[self->seq.pos++]
                                       : mr_tv_undef_hint(r, "No first item, sequence was empty.");
  if (!mr_tv_iter(r, self, &items, &n))
    return NULL;
  return n ? items[0] : mr_tv_undef_hint(r, "No first item, sequence was empty.");
}

static tv *f_last(tr *r, tv *self, tv_call *c) {
  tv **items;
  size_t n;
  (void)c;
  if (self->kind == TV_GEN)
    return mr_tr_fail(r, "'generator' object is not reversible");
  if (!mr_tv_iter(r, self, &items, &n))
    return NULL;
  return n ? items[n - 1] : mr_tv_undef_hint(r, "No last item, sequence was empty.");
}

/* A text must be the same whenever it is rendered: the choice is always the first item. */
static tv *f_random(tr *r, tv *self, tv_call *c) {
  (void)c;
  tv *v = mr_op_item(r, self, mr_tv_int(r, 0));
  return v && v->kind == TV_UNDEF ? mr_tv_undef_hint(r, "No random item, sequence was empty.") : v;
}

static tv *f_length(tr *r, tv *self, tv_call *c) {
  tv **items;
  size_t n;
  (void)c;
  switch (self->kind) {
  case TV_STR:
    return mr_tv_int(r, (tv_int)mr_tv_chars(self));
  case TV_DICT:
    return mr_tv_int(r, (tv_int)self->dict.n);
  case TV_LOOP:
    return mr_tv_int(r, (tv_int)self->loop->n);
  case TV_UNDEF:
  case TV_LIST:
  case TV_TUPLE:
  case TV_VIEW:
  case TV_RANGE:
    return mr_tv_iter(r, self, &items, &n) ? mr_tv_int(r, (tv_int)n) : NULL;
  default:
    return mr_tr_fail(r, "object of type '%s' has no len()", mr_tv_type(self));
  }
}

static tv *f_list(tr *r, tv *self, tv_call *c) {
  (void)c;
  return copy_list(r, self);
}

static tv *f_items(tr *r, tv *self, tv_call *c) {
  tv view = {.kind = TV_VIEW, .view = {self, VIEW_ITEMS}};
  (void)c;
  if (self->kind == TV_UNDEF)
    return generator(r, 0);
  if (self->kind != TV_DICT)
    return mr_tr_fail(r, "Can only get item pairs from a mapping.");
  tv *list = copy_list(r, &view);
  if (list)
    list->kind = TV_GEN;
  return list;
}

static tv *f_reverse(tr *r, tv *self, tv_call *c) {
  (void)c;
  if (self->kind == TV_STR)
    return mr_op_slice(r, self, NULL, NULL, mr_tv_int(r, -1));
  tv_kind kind = self->kind == TV_GEN ? TV_LIST : TV_GEN;
  tv *list = copy_list(r, self);
  for (size_t i = 0; list && i < list->seq.n / 2; i++) {
    tv *x = list->seq.items[i];
    list->seq.items[i] = list->seq.items[list->seq.n - 1 - i];
    list->seq.items[list->seq.n - 1 - i] = x;
  }
  if (list)
    list->kind = (uint8_t)kind;
  return list;
}

static tv *f_join(tr *r, tv *self, tv_call *c) {
  tv **items, *sep = c->p[0] ? mr_tv_str(r, c->p[0]) : &mr_tv_empty;
  size_t n;
  bool safe = false;
  tsb b;
  if (!sep || !mr_tv_iter(r, self, &items, &n))
    return NULL;
  tv **texts = mr_tr_alloc(r, n, sizeof *texts);
  for (size_t i = 0; texts && i < n; i++) {
    texts[i] = mr_op_path(r, items[i], c->p[1]);
    if (!texts[i] || !(texts[i] = mr_tv_str(r, texts[i])))
      return NULL;
    safe |= r->escape && texts[i]->safe;
  }
  safe |= r->escape && sep->safe;
  if (!texts || (safe && !(sep = mr_tv_escape(r, sep))))
    return NULL;
  mr_tsb_init(&b, r);
  for (size_t i = 0; i < n && !b.failed; i++) {
    tv *s = safe ? mr_tv_escape(r, texts[i]) : texts[i];
    if (!s)
      return NULL;
    if (i)
      mr_tsb_val(&b, sep);
    mr_tsb_val(&b, s);
  }
  tv *v = mr_tsb_done(&b);
  if (v && safe && v != &mr_tv_empty)
    v->safe = 1;
  return v;
}

/* ---- order ---- */

/* "a,b": a list of keys for each item, compared in turn. */
static tv **sort_keys(tr *r, tv **items, size_t n, tv *attribute, bool case_sensitive) {
  const char *s = attribute && attribute->kind == TV_STR ? attribute->str.s : "";
  size_t len = attribute && attribute->kind == TV_STR ? attribute->str.len : 0, parts = 1, from = 0;
  for (size_t i = 0; i < len; i++)
    parts += s[i] == ',';
  if (parts == 1)
    return keys_of(r, items, n, attribute, case_sensitive, NULL);
  tv **keys = mr_tr_alloc(r, n, sizeof *keys);
  for (size_t i = 0; keys && i < n; i++)
    if (!(keys[i] = mr_tv_seq(r, TV_LIST, parts)))
      return NULL;
  for (size_t k = 0; keys && k < parts; k++) {
    size_t to = from;
    while (to < len && s[to] != ',')
      to++;
    tv *part = mr_tv_sub(r, attribute, from, to - from);
    tv **one = part ? keys_of(r, items, n, part, case_sensitive, NULL) : NULL;
    if (!one)
      return NULL;
    for (size_t i = 0; i < n; i++)
      keys[i]->seq.items[k] = one[i];
    from = to + 1;
  }
  return keys;
}

static tv *f_sort(tr *r, tv *self, tv_call *c) {
  tv *list = copy_list(r, self);
  tv **keys = list ? sort_keys(r, list->seq.items, list->seq.n, c->p[2], flag(c->p[1])) : NULL;
  return keys && mr_tv_sort(r, list->seq.items, keys, list->seq.n, flag(c->p[0])) ? list : NULL;
}

static tv *f_dictsort(tr *r, tv *self, tv_call *c) {
  bool by_value = c->p[1] && mr_tv_is_str(c->p[1], "value");
  tv view = {.kind = TV_VIEW, .view = {self, VIEW_ITEMS}};
  if (c->p[1] && !by_value && !mr_tv_is_str(c->p[1], "key"))
    return mr_tr_fail(r, "You can only sort by either \"key\" or \"value\"");
  if (self->kind == TV_UNDEF)
    return mr_tv_fail_undef(r, self);
  if (self->kind != TV_DICT)
    return mr_tr_fail(r, "'%s' object has no attribute 'items'", mr_tv_type(self));
  tv *list = copy_list(r, &view), *at = mr_tv_int(r, by_value);
  tv **keys = list && at ? keys_of(r, list->seq.items, list->seq.n, at, flag(c->p[0]), NULL) : NULL;
  return keys && mr_tv_sort(r, list->seq.items, keys, list->seq.n, flag(c->p[2])) ? list : NULL;
}

static tv *f_unique(tr *r, tv *self, tv_call *c) {
  tv **items, **keys;
  size_t n;
  if (!mr_tv_iter(r, self, &items, &n) ||
      !(keys = keys_of(r, items, n, c->p[1], flag(c->p[0]), NULL)))
    return NULL;
  tv *out = generator(r, n), *seen = mr_tv_dict(r, TV_DICT, 8);
  for (size_t i = 0; out && seen && i < n; i++) {
    bool failed = false;
    if (!mr_tv_hashable(r, keys[i]))
      return NULL;
    if (mr_tv_dict_get(r, seen, keys[i], &failed))
      continue;
    if (failed || !mr_tv_dict_put(r, seen, keys[i], &mr_tv_none))
      return NULL;
    out->seq.items[out->seq.n++] = items[i];
  }
  return seen ? out : NULL;
}

static tv *f_groupby(tr *r, tv *self, tv_call *c) {
  tv *list = copy_list(r, self);
  size_t n = list ? list->seq.n : 0, from = 0;
  tv **keys = list ? keys_of(r, list->seq.items, n, c->p[0], flag(c->p[2]), c->p[1]) : NULL;
  if (!keys || !mr_tv_sort(r, list->seq.items, keys, n, false))
    return NULL;
  tv *out = mr_tv_seq(r, TV_LIST, n);
  if (!out)
    return NULL;
  out->seq.n = 0;
  while (from < n) {
    size_t to = from + 1;
    int same = 1;
    while (to < n && (same = mr_tv_equal(r, keys[to], keys[from])) == 1)
      to++;
    tv **name = keys_of(r, list->seq.items + from, 1, c->p[0], true, c->p[1]);
    tv *members = mr_tv_seq(r, TV_LIST, to - from);
    tv *group = name && members ? mr_tv_pair_of(r, name[0], members) : NULL;
    if (same < 0 || !group)
      return NULL;
    memcpy(members->seq.items, list->seq.items + from, (to - from) * sizeof(tv *));
    group->group = 1;
    out->seq.items[out->seq.n++] = group;
    from = to;
  }
  return out;
}

static tv *extreme(tr *r, tv *self, tv_call *c, bool largest) {
  tv **items, **keys;
  size_t n, best = 0;
  if (!mr_tv_iter(r, self, &items, &n) ||
      !(keys = keys_of(r, items, n, c->p[1], flag(c->p[0]), NULL)))
    return NULL;
  if (n == 0)
    return mr_tv_undef_hint(r, "No aggregated item, sequence was empty.");
  for (size_t i = 1; i < n; i++) {
    int less =
        largest ? mr_tv_less(r, keys[best], keys[i], "<") : mr_tv_less(r, keys[i], keys[best], "<");
    if (less < 0)
      return NULL;
    best = less ? i : best;
  }
  return items[best];
}

static tv *f_min(tr *r, tv *self, tv_call *c) {
  return extreme(r, self, c, false);
}

static tv *f_max(tr *r, tv *self, tv_call *c) {
  return extreme(r, self, c, true);
}

static tv *f_sum(tr *r, tv *self, tv_call *c) {
  tv **items, *sum = c->p[1] ? c->p[1] : mr_tv_int(r, 0);
  size_t n;
  if (sum && sum->kind == TV_STR)
    return mr_tr_fail(r, "sum() can't sum strings [use ''.join(seq) instead]");
  if (!mr_tv_iter(r, self, &items, &n))
    return NULL;
  for (size_t i = 0; sum && i < n; i++) {
    tv *x = mr_op_path(r, items[i], c->p[0]);
    sum = x ? mr_op_binary(r, OP_ADD, sum, x) : NULL;
  }
  return sum;
}

/* ---- pieces ---- */

static tv *f_batch(tr *r, tv *self, tv_call *c) {
  tv **items;
  size_t n;
  int64_t count;
  if (!mr_tv_iter(r, self, &items, &n) || !mr_tpl_arg_int(r, c->p[0], 1, &count))
    return NULL;
  size_t size = count < 1 ? n : (size_t)count;
  tv *fill = c->p[1] && c->p[1]->kind != TV_NONE ? c->p[1] : NULL;
  tv *out = generator(r, size ? n / size + 1 : 1);
  for (size_t from = 0; out && from < n; from += size) {
    size_t have = n - from < size ? n - from : size, room = fill ? size : have;
    tv *row = mr_tv_seq(r, TV_LIST, room);
    if (!row)
      return NULL;
    for (size_t i = 0; i < room; i++)
      row->seq.items[i] = i < have ? items[from + i] : fill;
    out->seq.items[out->seq.n++] = row;
  }
  return out;
}

static tv *f_slice(tr *r, tv *self, tv_call *c) {
  tv **items;
  size_t n, at = 0;
  int64_t slices;
  if (!mr_tv_iter(r, self, &items, &n) || !mr_tpl_arg_int(r, c->p[0], 1, &slices))
    return NULL;
  if (slices == 0)
    return mr_tr_fail(r, "integer division or modulo by zero");
  size_t k = slices < 0 ? 0 : (size_t)slices;
  tv *fill = c->p[1] && c->p[1]->kind != TV_NONE ? c->p[1] : NULL;
  tv *out = generator(r, k);
  for (size_t i = 0; out && i < k; i++) {
    size_t have = n / k + (i < n % k);
    tv *row = mr_tv_seq(r, TV_LIST, have + (fill && i >= n % k));
    if (!row)
      return NULL;
    if (have)
      memcpy(row->seq.items, items + at, have * sizeof *items);
    if (row->seq.n > have)
      row->seq.items[have] = fill;
    at += have;
    out->seq.items[out->seq.n++] = row;
  }
  return out;
}

/* ---- map, select ---- */

static const tv_func *named(tr *r, const tv *name, bool filter) {
  const tv_func *f = NULL;
  if (name->kind == TV_STR)
    f = filter ? mr_tpl_filter(name->str.s, name->str.len)
               : mr_tpl_test(name->str.s, name->str.len);
  if (!f)
    mr_tr_fail(r, "No %s named '%.*s'.", filter ? "filter" : "test",
               name->kind == TV_STR ? (int)name->str.len : 1,
               name->kind == TV_STR ? name->str.s : "?");
  return f;
}

static tv *f_map(tr *r, tv *self, tv_call *c) {
  tv **items, *attribute = c->n_pos ? NULL : mr_tr_keyword(c, "attribute", 9),
              *missing = mr_tr_keyword(c, "default", 7);
  size_t n;
  const tv_func *f = NULL;
  if (!mr_tv_truth(self))
    return generator(r, 0);
  if (!attribute && c->n_pos == 0)
    return mr_tr_fail(r, "map requires a filter argument");
  if (!mr_tv_iter(r, self, &items, &n) || (!attribute && !(f = named(r, c->pos[0], true))))
    return NULL;
  tv *out = generator(r, n);
  for (size_t i = 0; out && i < n; i++) {
    tv_call inner = {.kw = c->kw, .n_kw = c->n_kw};
    if (c->n_pos) { /* what follows the filter's name */
      inner.pos = c->pos + 1;
      inner.n_pos = c->n_pos - 1;
    }
    tv *v =
        attribute ? mr_op_path(r, items[i], attribute) : mr_tr_call_func(r, f, items[i], &inner);
    if (v && attribute && v->kind == TV_UNDEF && missing)
      v = missing;
    if (!v)
      return NULL;
    out->seq.items[out->seq.n++] = v;
  }
  return out;
}

/* select, reject and their ...attr forms: items whose (attribute's) test is `want`; without a test,
 * its truth. */
static tv *pick(tr *r, tv *self, tv_call *c, bool by_attribute, bool want) {
  tv **items;
  size_t n;
  int first = by_attribute;
  const tv_func *f = NULL;
  if (!mr_tv_truth(self))
    return generator(r, 0);
  if (c->n_pos < first)
    return mr_tr_fail(r, "Missing parameter for attribute name");
  if (!mr_tv_iter(r, self, &items, &n) ||
      (c->n_pos > first && !(f = named(r, c->pos[first], false))))
    return NULL;
  tv *out = generator(r, n);
  for (size_t i = 0; out && i < n; i++) {
    tv *v = by_attribute ? mr_op_path(r, items[i], c->pos[0]) : items[i];
    if (v && f) {
      tv_call inner = {
          .pos = c->pos + first + 1, .n_pos = c->n_pos - first - 1, .kw = c->kw, .n_kw = c->n_kw};
      v = mr_tr_call_func(r, f, v, &inner);
    }
    if (!v)
      return NULL;
    if (mr_tv_truth(v) == want)
      out->seq.items[out->seq.n++] = items[i];
  }
  return out;
}

static tv *f_select(tr *r, tv *self, tv_call *c) {
  return pick(r, self, c, false, true);
}

static tv *f_reject(tr *r, tv *self, tv_call *c) {
  return pick(r, self, c, false, false);
}

static tv *f_selectattr(tr *r, tv *self, tv_call *c) {
  return pick(r, self, c, true, true);
}

static tv *f_rejectattr(tr *r, tv *self, tv_call *c) {
  return pick(r, self, c, true, false);
}

#define F(name, params)                                                                            \
  { #name, params, f_##name, NULL }
const tv_func mr_tpl_seq_filters[] = {/* sorted */
                                      F(batch, "linecount,fill_with?"),
                                      {"count", "", f_length, NULL},
                                      F(dictsort, "case_sensitive?,by?,reverse?"),
                                      F(first, ""),
                                      F(groupby, "attribute,default?,case_sensitive?"),
                                      F(items, ""),
                                      F(join, "d?,attribute?"),
                                      F(last, ""),
                                      F(length, ""),
                                      F(list, ""),
                                      F(map, NULL),
                                      F(max, "case_sensitive?,attribute?"),
                                      F(min, "case_sensitive?,attribute?"),
                                      F(random, ""),
                                      F(reject, NULL),
                                      F(rejectattr, NULL),
                                      F(reverse, ""),
                                      F(select, NULL),
                                      F(selectattr, NULL),
                                      F(slice, "slices,fill_with?"),
                                      F(sort, "reverse?,case_sensitive?,attribute?"),
                                      F(sum, "attribute?,start?"),
                                      F(unique, "case_sensitive?,attribute?")};
const size_t mr_tpl_n_seq_filters = sizeof mr_tpl_seq_filters / sizeof *mr_tpl_seq_filters;

const tv_func *mr_tpl_filter(const char *name, size_t len) {
  const tv_func *f = mr_tpl_find(mr_tpl_text_filters, mr_tpl_n_text_filters, name, len);
  return f ? f : mr_tpl_find(mr_tpl_seq_filters, mr_tpl_n_seq_filters, name, len);
}
