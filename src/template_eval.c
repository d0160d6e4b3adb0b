#include <string.h>

#include "src/template_int.h"

/* ---- names ---- */

tv *mr_tr_lookup(tr *r, int sym) {
  for (const tv_scope *s = r->scope; s->up; s = s->up)
    for (int i = 0; i < s->n; i++)
      if (s->vars[i].sym == sym)
        return s->vars[i].val;
  if (r->globals[sym])
    return r->globals[sym];
  const tv_sym *name = &r->t->syms[sym];
  bool no_clock = r->now < 0 && mr_tv_is_str(name->val, "strftime_now");
  return name->builtin && !no_clock ? name->builtin : mr_tv_undef(r, NULL, name->val);
}

/* ---- calls ---- */

tv *mr_tr_keyword(const tv_call *c, const char *name, size_t len) {
  for (int i = 0; i < c->n_kw; i++)
    if (c->kw[i].key->str.len == len && memcmp(c->kw[i].key->str.s, name, len) == 0)
      return c->kw[i].val;
  return NULL;
}

/* Puts the arguments in the places of f->params. */
static bool bind(tr *r, const tv_func *f, tv_call *c) {
  int i = 0, taken = 0;
  for (const char *s = f->params; *s; i++) {
    size_t len = strcspn(s, ",?");
    bool optional = s[len] == '?';
    tv *named = mr_tr_keyword(c, s, len);
    taken += named != NULL;
    if (named && i < c->n_pos)
      return mr_tr_fail(r, "%s() got multiple values for argument '%.*s'", f->name, (int)len, s);
    c->p[i] = i < c->n_pos ? c->pos[i] : named;
    if (!c->p[i] && !optional)
      return mr_tr_fail(r, "%s() missing required argument: '%.*s'", f->name, (int)len, s);
    s += len + optional;
    s += *s == ',';
  }
  if (c->n_pos > i)
    return mr_tr_fail(r, "%s() takes %d arguments but %d were given", f->name, i, c->n_pos);
  if (taken < c->n_kw)
    return mr_tr_fail(r, "%s() got an unexpected keyword argument", f->name);
  return true;
}

tv *mr_tr_call_func(tr *r, const tv_func *f, tv *self, tv_call *c) {
  if (!mr_tr_charge(r, 1) || (f->params && !bind(r, f, c)) || !mr_tr_enter(r))
    return NULL;
  tv *v = f->fn(r, self, c);
  mr_tr_leave(r);
  return v;
}

static tv *call_joiner(tv *j) {
  bool used = j->joiner.used;
  j->joiner.used = true;
  return used ? j->joiner.sep : &mr_tv_empty;
}

tv *mr_tr_call(tr *r, tv *f, tv_call *c) {
  switch (f->kind) {
  case TV_FUNC:
    return mr_tr_call_func(r, f->call.func, NULL, c);
  case TV_BOUND:
    return mr_tr_call_func(r, f->call.func, f->call.self, c);
  case TV_MACRO:
    return mr_tr_call_macro(r, f, c);
  case TV_BLOCK:
    if (c->n_pos || c->n_kw)
      return mr_tr_fail(r, "a block takes no arguments");
    return mr_tr_call_block(r, f->macro.node);
  case TV_LOOP:
    if (c->n_pos != 1)
      return mr_tr_fail(r, "loop() takes one argument");
    return mr_tr_call_loop(r, f, c->pos[0]);
  case TV_JOINER:
    return call_joiner(f);
  case TV_UNDEF:
    return mr_tv_fail_undef(r, f);
  default:
    return mr_tr_fail(r, "'%s' object is not callable", mr_tv_type(f));
  }
}

/* *args after the others. */
static bool add_star(tr *r, const tn *n, tv_call *c) {
  tv **items, *v = mr_tr_eval(r, n);
  size_t k;
  if (!v || !mr_tv_iter(r, v, &items, &k))
    return false;
  tv **all = mr_tr_alloc(r, (size_t)c->n_pos + k, sizeof *all);
  if (!all || k > 1 << 20)
    return all ? mr_tr_fail(r, "too many arguments") : NULL;
  if (c->n_pos)
    memcpy(all, c->pos, (size_t)c->n_pos * sizeof *all);
  if (k)
    memcpy(all + c->n_pos, items, k * sizeof *all);
  c->pos = all;
  c->n_pos += (int)k;
  return true;
}

static bool add_star_star(tr *r, const tn *n, tv_call *c) {
  tv *v = mr_tr_eval(r, n);
  if (!v)
    return false;
  if (v->kind != TV_DICT || v->dict.n > 1 << 20)
    return mr_tr_fail(r, "argument after ** must be a mapping, not %s", mr_tv_type(v));
  tv_pair *all = mr_tr_alloc(r, (size_t)c->n_kw + v->dict.n, sizeof *all);
  if (!all)
    return false;
  if (c->n_kw)
    memcpy(all, c->kw, (size_t)c->n_kw * sizeof *all);
  for (size_t i = 0; i < v->dict.n; i++) {
    tv_pair p = v->dict.pairs[i];
    if (p.key->kind != TV_STR)
      return mr_tr_fail(r, "keywords must be strings");
    if (mr_tr_keyword(c, p.key->str.s, p.key->str.len))
      return mr_tr_fail(r, "got multiple values for keyword argument '%.*s'", (int)p.key->str.len,
                        p.key->str.s);
    all[(size_t)c->n_kw + i] = p;
  }
  c->kw = all;
  c->n_kw += (int)v->dict.n;
  return true;
}

bool mr_tr_args(tr *r, const tn_args *a, tv_call *c) {
  memset(c, 0, sizeof *c);
  if (!a)
    return true;
  c->pos = a->n_pos ? mr_tr_alloc(r, (size_t)a->n_pos, sizeof *c->pos) : NULL;
  c->kw = a->n_kw ? mr_tr_alloc(r, (size_t)a->n_kw, sizeof *c->kw) : NULL;
  if ((a->n_pos && !c->pos) || (a->n_kw && !c->kw))
    return false;
  for (; c->n_pos < a->n_pos; c->n_pos++)
    if (!(c->pos[c->n_pos] = mr_tr_eval(r, a->pos[c->n_pos])))
      return false;
  for (; c->n_kw < a->n_kw; c->n_kw++) {
    c->kw[c->n_kw].key = a->names[c->n_kw];
    if (!(c->kw[c->n_kw].val = mr_tr_eval(r, a->kw[c->n_kw])))
      return false;
  }
  return (!a->star || add_star(r, a->star, c)) &&
         (!a->star_star || add_star_star(r, a->star_star, c));
}

static tv *eval_call(tr *r, const tn *n) {
  tv_call c;
  tv *f = mr_tr_eval(r, n->a);
  if (!f || !mr_tr_args(r, n->args, &c))
    return NULL;
  r->line = n->line;
  return mr_tr_call(r, f, &c);
}

tv *mr_tr_filter(tr *r, const tn *n, tv *input) {
  tv_call c;
  if (!n->func)
    return mr_tr_fail(r, "No filter named '%.*s' found.", (int)n->val->str.len, n->val->str.s);
  tv *v = !input ? mr_tr_eval(r, n->a) : n->a ? mr_tr_filter(r, n->a, input) : input;
  if (!v || !mr_tr_args(r, n->args, &c))
    return NULL;
  r->line = n->line;
  return mr_tr_call_func(r, n->func, v, &c);
}

static tv *eval_test(tr *r, const tn *n) {
  tv_call c;
  if (!n->func)
    return mr_tr_fail(r, "No test named '%.*s' found.", (int)n->val->str.len, n->val->str.s);
  tv *v = mr_tr_eval(r, n->a);
  if (!v || !mr_tr_args(r, n->args, &c))
    return NULL;
  r->line = n->line;
  return mr_tr_call_func(r, n->func, v, &c);
}

/* ---- displays ---- */

static tv *eval_seq(tr *r, const tn *n) {
  tv *v = mr_tv_seq(r, n->kind == N_LIST ? TV_LIST : TV_TUPLE, (size_t)n->n);
  for (int i = 0; v && i < n->n; i++)
    if (!(v->seq.items[i] = mr_tr_eval(r, n->list[i])))
      return NULL;
  return v;
}

static tv *eval_dict(tr *r, const tn *n) {
  tv *d = mr_tv_dict(r, TV_DICT, (size_t)n->n / 2);
  for (int i = 0; d && i < n->n; i += 2) {
    tv *k = mr_tr_eval(r, n->list[i]), *v = k ? mr_tr_eval(r, n->list[i + 1]) : NULL;
    if (!v || !mr_tv_hashable(r, k) || !mr_tv_dict_put(r, d, k, v))
      return NULL;
  }
  return d;
}

static tv *eval_concat(tr *r, const tn *n) {
  tv **items = mr_tr_alloc(r, (size_t)n->n, sizeof *items);
  for (int i = 0; items && i < n->n; i++)
    if (!(items[i] = mr_tr_eval(r, n->list[i])))
      return NULL;
  return items ? mr_op_concat(r, items, n->n) : NULL;
}

/* ---- operators ---- */

static tv *eval_compare(tr *r, const tn *n) {
  tv *left = mr_tr_eval(r, n->a);
  for (int i = 0; left && i < n->n; i++) {
    tv *right = mr_tr_eval(r, n->list[i]);
    if (!right)
      return NULL;
    r->line = n->line;
    int e = mr_op_compare(r, (tn_op)n->ops[i], left, right);
    if (e < 0)
      return NULL;
    if (!e)
      return &mr_tv_false;
    left = right;
  }
  return left ? &mr_tv_true : NULL;
}

static tv *eval_logic(tr *r, const tn *n) {
  tv *v = mr_tr_eval(r, n->a);
  if (!v || n->kind == N_NOT)
    return v ? mr_tv_bool(!mr_tv_truth(v)) : NULL;
  return mr_tv_truth(v) == (n->kind == N_OR) ? v : mr_tr_eval(r, n->b);
}

static tv *eval_cond(tr *r, const tn *n) {
  tv *v = mr_tr_eval(r, n->a);
  if (!v)
    return NULL;
  if (mr_tv_truth(v))
    return mr_tr_eval(r, n->b);
  return n->c ? mr_tr_eval(r, n->c)
              : mr_tv_undef_hint(
                    r,
                    "the inline if-expression evaluated to false and no else section was defined.");
}

static tv *eval_item(tr *r, const tn *n) {
  tv *of = mr_tr_eval(r, n->a);
  if (!of)
    return NULL;
  if (n->b->kind != N_SLICE) {
    tv *key = mr_tr_eval(r, n->b);
    r->line = n->line;
    return key ? mr_op_item(r, of, key) : NULL;
  }
  tv *part[3] = {NULL, NULL, NULL};
  const tn *from[3] = {n->b->a, n->b->b, n->b->c};
  for (int i = 0; i < 3; i++)
    if (from[i] && !(part[i] = mr_tr_eval(r, from[i])))
      return NULL;
  r->line = n->line;
  return mr_op_slice(r, of, part[0], part[1], part[2]);
}

static tv *eval_binary(tr *r, const tn *n) {
  tv *a = mr_tr_eval(r, n->a), *b = a ? mr_tr_eval(r, n->b) : NULL;
  r->line = n->line;
  return b ? mr_op_binary(r, (tn_op)n->op, a, b) : NULL;
}

static tv *eval_attr(tr *r, const tn *n) {
  tv *of = mr_tr_eval(r, n->a);
  r->line = n->line;
  return of ? mr_op_attr(r, of, n->val, &n->look) : NULL;
}

static tv *eval_sign(tr *r, const tn *n) {
  tv *v = mr_tr_eval(r, n->a);
  return v ? mr_op_negate(r, v, n->kind == N_NEG) : NULL;
}

static tv *eval(tr *r, const tn *n) {
  switch (n->kind) {
  case N_CONST:
    return n->val;
  case N_NAME:
    return mr_tr_lookup(r, n->sym);
  case N_LIST:
  case N_TUPLE:
    return eval_seq(r, n);
  case N_DICT:
    return eval_dict(r, n);
  case N_COND:
    return eval_cond(r, n);
  case N_OR:
  case N_AND:
  case N_NOT:
    return eval_logic(r, n);
  case N_COMPARE:
    return eval_compare(r, n);
  case N_BINARY:
    return eval_binary(r, n);
  case N_CONCAT:
    return eval_concat(r, n);
  case N_NEG:
  case N_POS:
    return eval_sign(r, n);
  case N_ATTR:
    return eval_attr(r, n);
  case N_ITEM:
    return eval_item(r, n);
  case N_CALL:
    return eval_call(r, n);
  case N_FILTER:
    return mr_tr_filter(r, n, NULL);
  case N_TEST:
    return eval_test(r, n);
  default:
    return mr_tr_fail(r, "this expression has no value");
  }
}

tv *mr_tr_eval(tr *r, const tn *n) {
  if (!mr_tr_charge(r, 1) || !mr_tr_enter(r))
    return NULL;
  r->line = n->line;
  tv *v = eval(r, n);
  mr_tr_leave(r);
  return v;
}
