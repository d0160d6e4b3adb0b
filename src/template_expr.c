/* template_expr.c: expressions. From loosest to tightest: if-else, or, and, not, comparisons, + -,
 * ~, * / // %, **, unary, and then attributes, calls, filters and tests, which bind to what stands
 * before them. */
#include <stdarg.h>
#include <string.h>

#include "src/template_int.h"

#define MAX_NESTING 150

static tn *parse_or(tp *p);
static tn *parse_unary(tp *p, bool filters);

/* ---- tools of the parser ---- */

void *mr_tp_fail(tp *p, int line, const char *fmt, ...) {
  char text[512];
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(text, sizeof text, fmt, ap);
  va_end(ap);
  p->r->line = line;
  return mr_tr_fail(p->r, "%s", text);
}

void *mr_tp_unexpected(tp *p) {
  const tk *t = p->at;
  if (t->kind == TK_EOF)
    return mr_tp_fail(p, t->line, "unexpected end of template");
  if (t->kind == TK_PRINT_END || t->kind == TK_BLOCK_END)
    return mr_tp_fail(p, t->line, "unexpected 'end of %s'",
                      t->kind == TK_PRINT_END ? "print statement" : "statement block");
  return mr_tp_fail(p, t->line, "unexpected '%.*s'", (int)(t->len < 60 ? t->len : 60), t->s);
}

tn *mr_tp_node(tp *p, tn_kind kind, int line) {
  tn *n = mr_tr_alloc(p->r, 1, sizeof *n);
  if (!n)
    return NULL;
  memset(n, 0, sizeof *n);
  n->kind = (uint8_t)kind;
  n->line = line;
  return n;
}

bool mr_tp_is_op(const tp *p, uint16_t op) {
  return p->at->kind == TK_OP && p->at->op == op;
}

bool mr_tp_is_name(const tk *t, const char *name) {
  size_t n = strlen(name);
  return t->kind == TK_NAME && t->len == n && memcmp(t->s, name, n) == 0;
}

bool mr_tp_skip_name(tp *p, const char *name) {
  bool hit = mr_tp_is_name(p->at, name);
  p->at += hit;
  return hit;
}

static bool skip_op(tp *p, uint16_t op) {
  bool hit = mr_tp_is_op(p, op);
  p->at += hit;
  return hit;
}

bool mr_tp_expect_op(tp *p, uint16_t op) {
  return skip_op(p, op) || mr_tp_unexpected(p);
}

bool mr_tp_push(tp *p, tn ***list, int *n, int *cap, tn *item) {
  if (!item)
    return false;
  if (*n == *cap) {
    int grown = *cap ? *cap * 2 : 4;
    tn **items = mr_tr_alloc(p->r, (size_t)grown, sizeof *items);
    if (!items)
      return false;
    if (*n)
      memcpy(items, *list, (size_t)*n * sizeof *items);
    *list = items;
    *cap = grown;
  }
  (*list)[(*n)++] = item;
  return true;
}

static bool deeper(tp *p) {
  if (++p->depth <= MAX_NESTING)
    return true;
  return mr_tp_fail(p, p->at->line, "is nested deeper than %d levels", MAX_NESTING);
}

static tn *binary(tp *p, tn_kind kind, int op, tn *a, tn *b, int line) {
  tn *n = a && b ? mr_tp_node(p, kind, line) : NULL;
  if (!n)
    return NULL;
  n->op = (uint8_t)op;
  n->a = a;
  n->b = b;
  return n;
}

static tn *constant(tp *p, tv *v, int line) {
  tn *n = v ? mr_tp_node(p, N_CONST, line) : NULL;
  if (n)
    n->val = v;
  return n;
}

static tv *name_value(tp *p, const tk *t) {
  tv *v = mr_tv_text(p->r, t->s, t->len, TAINT_NONE);
  if (v)
    mr_tv_chars(v);
  return v;
}

/* ---- primary expressions ---- */

static tn *parse_name(tp *p, int how) {
  const tk *t = p->at++;
  if (mr_tp_is_name(t, "true") || mr_tp_is_name(t, "True"))
    return constant(p, &mr_tv_true, t->line);
  if (mr_tp_is_name(t, "false") || mr_tp_is_name(t, "False"))
    return constant(p, &mr_tv_false, t->line);
  if (mr_tp_is_name(t, "none") || mr_tp_is_name(t, "None"))
    return constant(p, &mr_tv_none, t->line);
  bool ref = (how & TUPLE_NSREF) && mr_tp_is_op(p, '.');
  tn *n = mr_tp_node(p, ref ? N_NSREF : N_NAME, t->line);
  if (!n || (n->sym = mr_tp_sym(p, t->s, t->len)) < 0)
    return NULL;
  if (ref) {
    p->at++;
    if (p->at->kind != TK_NAME)
      return mr_tp_unexpected(p);
    n->val = name_value(p, p->at++);
    return n->val ? n : NULL;
  }
  p->uses |= mr_tp_is_name(t, "caller")    ? MACRO_CALLER
             : mr_tp_is_name(t, "kwargs")  ? MACRO_KWARGS
             : mr_tp_is_name(t, "varargs") ? MACRO_VARARGS
                                           : 0;
  return n;
}

static tn *parse_string(tp *p) {
  const tk *t = p->at++;
  if (p->at->kind != TK_STRING)
    return constant(p, t->val, t->line);
  tsb b; /* texts side by side are one */
  mr_tsb_init(&b, p->r);
  mr_tsb_val(&b, t->val);
  while (p->at->kind == TK_STRING)
    mr_tsb_val(&b, (p->at++)->val);
  tv *v = mr_tsb_done(&b);
  if (v)
    mr_tv_chars(v);
  return constant(p, v, t->line);
}

static tn *parse_list(tp *p) {
  tn *n = mr_tp_node(p, N_LIST, p->at->line);
  int cap = 0;
  p->at++;
  while (n && !mr_tp_is_op(p, ']')) {
    if (n->n && !mr_tp_expect_op(p, ','))
      return NULL;
    if (mr_tp_is_op(p, ']'))
      break;
    if (!mr_tp_push(p, &n->list, &n->n, &cap, mr_tp_expr(p)))
      return NULL;
  }
  p->at++;
  return n;
}

static tn *parse_dict(tp *p) {
  tn *n = mr_tp_node(p, N_DICT, p->at->line);
  int cap = 0;
  p->at++;
  while (n && !mr_tp_is_op(p, '}')) {
    if (n->n && !mr_tp_expect_op(p, ','))
      return NULL;
    if (mr_tp_is_op(p, '}'))
      break;
    if (!mr_tp_push(p, &n->list, &n->n, &cap, mr_tp_expr(p)) || !mr_tp_expect_op(p, ':') ||
        !mr_tp_push(p, &n->list, &n->n, &cap, mr_tp_expr(p)))
      return NULL;
  }
  p->at++;
  return n;
}

static tn *parse_primary(tp *p, int how) {
  const tk *t = p->at;
  switch (t->kind) {
  case TK_NAME:
    return parse_name(p, how);
  case TK_STRING:
    return parse_string(p);
  case TK_INT:
  case TK_FLOAT:
    p->at++;
    return constant(p, t->val, t->line);
  default:
    break;
  }
  if (mr_tp_is_op(p, '[') || mr_tp_is_op(p, '{'))
    return t->op == '[' ? parse_list(p) : parse_dict(p);
  if (!skip_op(p, '('))
    return mr_tp_unexpected(p);
  tn *n = mr_tp_tuple(p, TUPLE_PARENS, NULL);
  return n && mr_tp_expect_op(p, ')') ? n : NULL;
}

tn *mr_tp_tuple(tp *p, int how, const char *end_name) {
  tn *n = mr_tp_node(p, N_TUPLE, p->at->line);
  int cap = 0;
  bool comma = false;
  while (n) {
    if (n->n && !mr_tp_expect_op(p, ','))
      return NULL;
    if (p->at->kind == TK_PRINT_END || p->at->kind == TK_BLOCK_END || mr_tp_is_op(p, ')') ||
        (end_name && mr_tp_is_name(p->at, end_name)))
      break;
    tn *item = how & TUPLE_PRIMARY ? parse_primary(p, how)
               : how & TUPLE_NO_IF ? parse_or(p)
                                   : mr_tp_expr(p);
    if (!mr_tp_push(p, &n->list, &n->n, &cap, item))
      return NULL;
    if (!mr_tp_is_op(p, ','))
      break;
    comma = true;
  }
  if (!n || comma)
    return n;
  if (n->n)
    return n->list[0];
  return how & TUPLE_PARENS ? n : mr_tp_unexpected(p);
}

/* ---- what follows a primary ---- */

static tn *parse_dot(tp *p, tn *of) {
  const tk *t = p->at++;
  tn *n;
  if (t->kind == TK_INT)
    return binary(p, N_ITEM, 0, of, constant(p, t->val, t->line), t->line);
  if (t->kind != TK_NAME)
    return mr_tp_fail(p, t->line, "expected name or number");
  n = mr_tp_node(p, N_ATTR, t->line);
  if (!n)
    return NULL;
  n->a = of;
  n->val = name_value(p, t);
  n->look = mr_tpl_methods(t->s, t->len);
  return n->val ? n : NULL;
}

/* An index, or from:to:step. */
static tn *parse_subscribed(tp *p) {
  tn *n, *first = NULL;
  int line = p->at->line;
  if (!mr_tp_is_op(p, ':')) {
    first = mr_tp_expr(p);
    if (!first || !mr_tp_is_op(p, ':'))
      return first;
  }
  p->at++;
  n = mr_tp_node(p, N_SLICE, line);
  if (!n)
    return NULL;
  n->a = first;
  if (!mr_tp_is_op(p, ':') && !mr_tp_is_op(p, ']') && !mr_tp_is_op(p, ',') &&
      !(n->b = mr_tp_expr(p)))
    return NULL;
  if (skip_op(p, ':') && !mr_tp_is_op(p, ']') && !mr_tp_is_op(p, ',') && !(n->c = mr_tp_expr(p)))
    return NULL;
  return n;
}

static tn *parse_index(tp *p, tn *of) {
  tn *key = mr_tp_node(p, N_TUPLE, p->at->line);
  int cap = 0;
  while (key && !mr_tp_is_op(p, ']')) {
    if (key->n && !mr_tp_expect_op(p, ','))
      return NULL;
    if (!mr_tp_push(p, &key->list, &key->n, &cap, parse_subscribed(p)))
      return NULL;
  }
  p->at++;
  if (!key)
    return NULL;
  for (int i = 0; i < key->n && key->n > 1; i++)
    if (key->list[i]->kind == N_SLICE)
      return mr_tp_fail(p, key->line, "a slice cannot stand beside other indices");
  return binary(p, N_ITEM, 0, of, key->n == 1 ? key->list[0] : key, key->line);
}

static bool parse_keyword(tp *p, tn_args *a, int *cap) {
  tv *name = name_value(p, p->at);
  p->at += 2;
  for (int i = 0; name && i < a->n_kw; i++)
    if (a->names[i]->str.len == name->str.len &&
        memcmp(a->names[i]->str.s, name->str.s, name->str.len) == 0)
      return mr_tp_fail(p, p->at->line, "keyword argument repeated: %.*s", (int)name->str.len,
                        name->str.s);
  int old = *cap;
  tn *value = mr_tp_expr(p);
  if (!name || !mr_tp_push(p, &a->kw, &a->n_kw, cap, value))
    return false;
  if (*cap != old) {
    tv **names = mr_tr_alloc(p->r, (size_t)*cap, sizeof *names);
    if (!names)
      return false;
    if (a->n_kw > 1)
      memcpy(names, a->names, (size_t)(a->n_kw - 1) * sizeof *names);
    a->names = names;
  }
  a->names[a->n_kw - 1] = name;
  return true;
}

static bool parse_arg(tp *p, tn_args *a, int *cap_pos, int *cap_kw) {
  bool keyword = p->at->kind == TK_NAME && p->at[1].kind == TK_OP && p->at[1].op == '=';
  bool star = mr_tp_is_op(p, '*'), star_star = mr_tp_is_op(p, OP2('*', '*'));
  if (a->star_star || (a->star && star) ||
      (!keyword && !star && !star_star && (a->star || a->n_kw)))
    return mr_tp_fail(p, p->at->line, "invalid syntax for function call expression");
  p->at += star || star_star;
  if (star)
    return (a->star = mr_tp_expr(p)) != NULL;
  if (star_star)
    return (a->star_star = mr_tp_expr(p)) != NULL;
  return keyword ? parse_keyword(p, a, cap_kw)
                 : mr_tp_push(p, &a->pos, &a->n_pos, cap_pos, mr_tp_expr(p));
}

/* After the "(". */
static tn_args *parse_args(tp *p) {
  tn_args *a = mr_tr_alloc(p->r, 1, sizeof *a);
  int cap_pos = 0, cap_kw = 0;
  bool any = false;
  if (!a)
    return NULL;
  memset(a, 0, sizeof *a);
  while (!mr_tp_is_op(p, ')')) {
    if (any && !mr_tp_expect_op(p, ','))
      return NULL;
    if (mr_tp_is_op(p, ')'))
      break;
    if (!parse_arg(p, a, &cap_pos, &cap_kw))
      return NULL;
    any = true;
  }
  p->at++;
  return a;
}

static tn *parse_call(tp *p, tn *of) {
  tn *n = mr_tp_node(p, N_CALL, p->at->line);
  p->at++;
  if (!n || !(n->args = parse_args(p)))
    return NULL;
  n->a = of;
  return n;
}

static tn *parse_postfix(tp *p, tn *n) {
  while (n) {
    if (skip_op(p, '.'))
      n = parse_dot(p, n);
    else if (skip_op(p, '['))
      n = parse_index(p, n);
    else if (mr_tp_is_op(p, '('))
      n = parse_call(p, n);
    else
      break;
  }
  return n;
}

/* A name with dots, as filters and tests may have; none of ours has. */
static tv *dotted(tp *p) {
  const tk *t = p->at;
  if (t->kind != TK_NAME)
    return mr_tp_unexpected(p);
  p->at++;
  size_t len = t->len;
  while (mr_tp_is_op(p, '.') && p->at[1].kind == TK_NAME) {
    p->at += 2;
    len = (size_t)(p->at[-1].s + p->at[-1].len - t->s);
  }
  tv *v = mr_tv_text(p->r, t->s, len, TAINT_NONE);
  if (v)
    mr_tv_chars(v);
  return v;
}

static tn *named(tp *p, tn *n) {
  n->val = dotted(p);
  if (!n->val)
    return NULL;
  bool filter = n->kind == N_FILTER;
  n->func = filter ? mr_tpl_filter(n->val->str.s, n->val->str.len)
                   : mr_tpl_test(n->val->str.s, n->val->str.len);
  if (!n->func && !p->soft && !p->unknown)
    p->unknown = n;
  return n;
}

tn *mr_tp_filters(tp *p, tn *input, bool inline_first) {
  for (; inline_first || mr_tp_is_op(p, '|'); inline_first = false) {
    p->at += !inline_first;
    tn *n = mr_tp_node(p, N_FILTER, p->at->line);
    if (!n || !named(p, n) || (skip_op(p, '(') && !(n->args = parse_args(p))))
      return NULL;
    n->a = input;
    input = n;
  }
  return input;
}

static bool starts_argument(const tp *p) {
  const tk *t = p->at;
  if (t->kind == TK_NAME)
    return !mr_tp_is_name(t, "else") && !mr_tp_is_name(t, "or") && !mr_tp_is_name(t, "and");
  return t->kind == TK_STRING || t->kind == TK_INT || t->kind == TK_FLOAT ||
         (t->kind == TK_OP && (t->op == '[' || t->op == '{'));
}

static tn *parse_test(tp *p, tn *of) {
  int line = p->at->line, cap = 0;
  p->at++;
  bool negated = mr_tp_skip_name(p, "not");
  tn *n = mr_tp_node(p, N_TEST, line);
  if (!n || !named(p, n))
    return NULL;
  n->a = of;
  if (skip_op(p, '(')) {
    n->args = parse_args(p);
  } else if (starts_argument(p)) {
    if (mr_tp_is_name(p->at, "is"))
      return mr_tp_fail(p, line, "You cannot chain multiple tests with is");
    n->args = mr_tr_alloc(p->r, 1, sizeof *n->args);
    if (!n->args)
      return NULL;
    memset(n->args, 0, sizeof *n->args);
    tn *arg = parse_primary(p, 0);
    if (!mr_tp_push(p, &n->args->pos, &n->args->n_pos, &cap, arg ? parse_postfix(p, arg) : NULL))
      return NULL;
  }
  if (p->r->failed)
    return NULL;
  if (!negated)
    return n;
  tn *not = mr_tp_node(p, N_NOT, line);
  if (not )
    not ->a = n;
  return not ;
}

static tn *parse_filters_and_tests(tp *p, tn *n) {
  while (n) {
    if (mr_tp_is_op(p, '|'))
      n = mr_tp_filters(p, n, false);
    else if (mr_tp_is_name(p->at, "is"))
      n = parse_test(p, n);
    else if (mr_tp_is_op(p, '('))
      n = parse_call(p, n);
    else
      break;
  }
  return n;
}

/* ---- operators ---- */

static tn *parse_unary(tp *p, bool filters) {
  tn *n;
  int line = p->at->line;
  bool minus = mr_tp_is_op(p, '-');
  if (!deeper(p))
    return NULL;
  if (minus || mr_tp_is_op(p, '+')) {
    p->at++;
    n = mr_tp_node(p, minus ? N_NEG : N_POS, line);
    if (n && !(n->a = parse_unary(p, false)))
      return NULL;
  } else {
    n = parse_primary(p, 0);
  }
  n = n ? parse_postfix(p, n) : NULL;
  if (n && filters)
    n = parse_filters_and_tests(p, n);
  p->depth--;
  return n;
}

static tn *parse_pow(tp *p) {
  tn *left = parse_unary(p, true);
  while (left && mr_tp_is_op(p, OP2('*', '*'))) {
    int line = (p->at++)->line;
    left = binary(p, N_BINARY, OP_POW, left, parse_unary(p, true), line);
  }
  return left;
}

static tn *parse_product(tp *p) {
  tn *left = parse_pow(p);
  while (left && p->at->kind == TK_OP) {
    uint16_t op = p->at->op;
    if (op != '*' && op != '/' && op != OP2('/', '/') && op != '%')
      break;
    int line = (p->at++)->line;
    tn_op what = op == '*' ? OP_MUL : op == '/' ? OP_DIV : op == '%' ? OP_MOD : OP_FLOORDIV;
    left = binary(p, N_BINARY, what, left, parse_pow(p), line);
  }
  return left;
}

static tn *parse_concat(tp *p) {
  tn *first = parse_product(p), *n;
  int cap = 0;
  if (!first || !mr_tp_is_op(p, '~'))
    return first;
  n = mr_tp_node(p, N_CONCAT, p->at->line);
  if (!n || !mr_tp_push(p, &n->list, &n->n, &cap, first))
    return NULL;
  while (skip_op(p, '~'))
    if (!mr_tp_push(p, &n->list, &n->n, &cap, parse_product(p)))
      return NULL;
  return n;
}

static tn *parse_sum(tp *p) {
  tn *left = parse_concat(p);
  while (left && (mr_tp_is_op(p, '+') || mr_tp_is_op(p, '-'))) {
    tn_op op = p->at->op == '+' ? OP_ADD : OP_SUB;
    int line = (p->at++)->line;
    left = binary(p, N_BINARY, op, left, parse_concat(p), line);
  }
  return left;
}

/* The comparison at the current token, which is skipped; -1: none. */
static int comparison(tp *p) {
  static const uint16_t signs[] = {OP2('=', '='), OP2('!', '='), '<',
                                   OP2('<', '='), '>',           OP2('>', '=')};
  if (mr_tp_skip_name(p, "in"))
    return OP_IN;
  if (mr_tp_is_name(p->at, "not") && mr_tp_is_name(p->at + 1, "in")) {
    p->at += 2;
    return OP_NOT_IN;
  }
  for (int i = 0; i < 6; i++)
    if (skip_op(p, signs[i]))
      return OP_EQ + i;
  return -1;
}

static tn *parse_compare(tp *p) {
  int line = p->at->line, cap = 0, op;
  tn *left = parse_sum(p), *n = NULL;
  while (left && (op = comparison(p)) >= 0) {
    if (!n && !(n = mr_tp_node(p, N_COMPARE, line)))
      return NULL;
    int old = cap;
    n->a = left;
    if (!mr_tp_push(p, &n->list, &n->n, &cap, parse_sum(p)))
      return NULL;
    if (cap != old) {
      uint8_t *ops = mr_tr_alloc(p->r, (size_t)cap, 1);
      if (!ops)
        return NULL;
      if (n->n > 1)
        memcpy(ops, n->ops, (size_t)n->n - 1);
      n->ops = ops;
    }
    n->ops[n->n - 1] = (uint8_t)op;
  }
  return n && left ? n : left;
}

static tn *parse_not(tp *p) {
  int line = p->at->line;
  if (!mr_tp_skip_name(p, "not"))
    return parse_compare(p);
  tn *n = deeper(p) ? mr_tp_node(p, N_NOT, line) : NULL;
  if (n && !(n->a = parse_not(p)))
    return NULL;
  p->depth--;
  return n;
}

static tn *parse_and(tp *p) {
  tn *left = parse_not(p);
  while (left && mr_tp_skip_name(p, "and"))
    left = binary(p, N_AND, 0, left, parse_not(p), left->line);
  return left;
}

static tn *parse_or(tp *p) {
  tn *left = parse_and(p);
  while (left && mr_tp_skip_name(p, "or"))
    left = binary(p, N_OR, 0, left, parse_and(p), left->line);
  return left;
}

tn *mr_tp_expr(tp *p) {
  if (!deeper(p))
    return NULL;
  const tn *unknown = p->unknown;
  tn *n = parse_or(p);
  while (n && mr_tp_skip_name(p, "if")) {
    tn *cond = mr_tp_node(p, N_COND, n->line);
    if (!cond || !(cond->a = parse_or(p)) ||
        (mr_tp_skip_name(p, "else") && !(cond->c = mr_tp_expr(p))))
      return NULL;
    cond->b = n;
    n = cond;
    p->unknown = unknown; /* what a condition guards may name filters that do not exist */
  }
  p->depth--;
  return n;
}
