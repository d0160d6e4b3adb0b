/* template_parse.c: statements, and the names of a template. */
#include <string.h>

#include "io/mem.h"
#include "src/template_int.h"

static const char *const end_for[] = {"endfor", "else", NULL};
static const char *const end_only_for[] = {"endfor", NULL};
static const char *const end_if[] = {"elif", "else", "endif", NULL};
static const char *const end_only_if[] = {"endif", NULL};

/* ---- names ---- */

/* The global function of this name as a value that all renders share. */
static bool add_builtin(tp *p, tv_sym *s) {
  const tv_func *f = mr_tpl_func(s->name, s->len);
  if (!f && !(s->len == 4 && memcmp(s->name, "self", 4) == 0))
    return true;
  s->builtin = mr_tv_new(p->r, f ? TV_FUNC : TV_SELF);
  if (s->builtin)
    s->builtin->call.func = f;
  return s->builtin != NULL;
}

int mr_tp_sym(tp *p, const char *name, size_t len) {
  mr_template *t = p->t;
  for (size_t i = 0; i < t->n_syms; i++)
    if (t->syms[i].len == len && memcmp(t->syms[i].name, name, len) == 0)
      return (int)i;
  if (t->n_syms >= 65536) {
    mr_tp_fail(p, p->at->line, "has more than 65536 names");
    return -1;
  }
  if (t->n_syms == t->cap_syms) {
    size_t cap = t->cap_syms ? t->cap_syms * 2 : 32;
    tv_sym *syms = mr_tr_alloc(p->r, cap, sizeof *syms);
    if (!syms)
      return -1;
    if (t->n_syms)
      memcpy(syms, t->syms, t->n_syms * sizeof *syms);
    t->syms = syms;
    t->cap_syms = cap;
  }
  tv_sym *s = &t->syms[t->n_syms];
  *s = (tv_sym){.name = name, .len = len, .val = mr_tv_text(p->r, name, len, TAINT_NONE)};
  if (!s->val || !add_builtin(p, s))
    return -1;
  mr_tv_chars(s->val);
  return (int)t->n_syms++;
}

/* ---- targets ---- */

static bool check_target(tp *p, const tn *n) {
  if (n->kind == N_NAME || n->kind == N_NSREF)
    return true;
  if (n->kind != N_TUPLE)
    return mr_tp_fail(p, n->line, "can't assign to this expression");
  for (int i = 0; i < n->n; i++)
    if (!check_target(p, n->list[i]))
      return false;
  return true;
}

static tn *parse_target(tp *p, bool nsref, const char *end_name) {
  int uses = p->uses;
  tn *n = mr_tp_tuple(p, TUPLE_PRIMARY | (nsref ? TUPLE_NSREF : 0), end_name);
  p->uses = uses; /* a name that is assigned is not one that is used */
  return n && check_target(p, n) ? n : NULL;
}

static int parse_new_name(tp *p) {
  const tk *t = p->at;
  if (t->kind != TK_NAME) {
    mr_tp_unexpected(p);
    return -1;
  }
  p->at++;
  return mr_tp_sym(p, t->s, t->len);
}

/* ---- bodies ---- */

static tn *parse_statement(tp *p);

static bool is_end(const tp *p, const char *const *ends) {
  for (; ends && *ends; ends++)
    if (mr_tp_is_name(p->at, *ends))
      return true;
  return false;
}

static bool fail_eof(tp *p, const char *const *ends) {
  while (strncmp(*ends, "end", 3) != 0)
    ends++;
  return mr_tp_fail(p, p->at->line, "Unexpected end of template. '%s' is missing.", ends[0]);
}

/* Data, prints and statements until a tag whose name is in `ends` (current then), or the end of the
 * template. */
static tn *parse_nodes(tp *p, const char *const *ends) {
  tn *body = mr_tp_node(p, N_BODY, p->at->line);
  int cap = 0;
  while (body && p->at->kind != TK_EOF) {
    const tk *t = p->at++;
    tn *n = NULL;
    if (t->kind == TK_DATA) {
      n = mr_tp_node(p, N_DATA, t->line);
      if (n)
        n->val = t->val;
    } else if (t->kind == TK_PRINT_BEGIN) {
      n = mr_tp_node(p, N_PRINT, t->line);
      if (n && !(n->a = mr_tp_tuple(p, 0, NULL)))
        return NULL;
      if (p->at->kind != TK_PRINT_END)
        return mr_tp_unexpected(p);
      p->at++;
    } else {
      if (is_end(p, ends))
        return body;
      n = parse_statement(p);
      if (n && p->at->kind != TK_BLOCK_END)
        return mr_tp_unexpected(p);
      p->at++;
    }
    if (!mr_tp_push(p, &body->list, &body->n, &cap, n))
      return NULL;
  }
  return body && ends && !fail_eof(p, ends) ? NULL : body;
}

static tn *parse_body(tp *p, const char *const *ends) {
  if (mr_tp_is_op(p, ':'))
    p->at++;
  if (p->at->kind != TK_BLOCK_END)
    return mr_tp_unexpected(p);
  p->at++;
  if (++p->depth > 120)
    return mr_tp_fail(p, p->at->line, "has too many blocks within blocks");
  tn *body = parse_nodes(p, ends);
  p->depth--;
  return body;
}

/* A body in a scope of its own, up to {% end %}, which is skipped. */
static tn *parse_inner(tp *p, const char *end) {
  const char *const ends[] = {end, NULL};
  bool soft = p->soft;
  p->soft = false;
  tn *body = parse_body(p, ends);
  p->soft = soft;
  p->at += body != NULL;
  return body;
}

/* ---- statements ---- */

static tn *parse_if(tp *p, tn *n) {
  int cap = 0;
  bool soft = p->soft;
  p->soft = true;
  do {
    p->at++; /* if, elif */
    if (!mr_tp_push(p, &n->list, &n->n, &cap, mr_tp_tuple(p, TUPLE_NO_IF, NULL)) ||
        !mr_tp_push(p, &n->list, &n->n, &cap, parse_body(p, end_if)))
      return NULL;
  } while (mr_tp_is_name(p->at, "elif"));
  if (mr_tp_skip_name(p, "else") && !(n->a = parse_body(p, end_only_if)))
    return NULL;
  p->at++;
  p->soft = soft;
  return n;
}

static tn *parse_for(tp *p, tn *n) {
  bool soft = p->soft;
  int cap = 0;
  p->at++;
  n->a = parse_target(p, false, "in");
  if (!n->a)
    return NULL;
  if (n->a->kind == N_NAME && mr_tp_sym(p, "loop", 4) == n->a->sym)
    return mr_tp_fail(p, n->line, "Can't assign to special loop variable in for-loop target");
  if (!mr_tp_skip_name(p, "in"))
    return mr_tp_unexpected(p);
  n->b = mr_tp_tuple(p, TUPLE_NO_IF, "recursive");
  if (!n->b || (mr_tp_skip_name(p, "if") && !(n->c = mr_tp_expr(p))))
    return NULL;
  n->flags = mr_tp_skip_name(p, "recursive");
  p->soft = false;
  p->loops++;
  n->d = parse_body(p, end_for);
  p->loops--;
  if (n->d && mr_tp_skip_name(p, "else") &&
      !mr_tp_push(p, &n->list, &n->n, &cap, parse_body(p, end_only_for)))
    return NULL;
  p->soft = soft;
  p->at++;
  n->sym = mr_tp_sym(p, "loop", 4);
  return n->d && n->sym >= 0 ? n : NULL;
}

static tn *parse_set(tp *p, tn *n) {
  p->at++;
  n->a = parse_target(p, true, NULL);
  if (!n->a)
    return NULL;
  if (mr_tp_is_op(p, '=')) {
    p->at++;
    n->b = mr_tp_tuple(p, 0, NULL);
    return n->b ? n : NULL;
  }
  n->kind = N_SET_BLOCK;
  n->b = mr_tp_filters(p, NULL, false);
  n->d = p->r->failed ? NULL : parse_inner(p, "endset");
  return n->d ? n : NULL;
}

/* (a, b=1) */
static bool parse_signature(tp *p, tn *n) {
  int cap = 0, cap_defaults = 0;
  if (!mr_tp_expect_op(p, '('))
    return false;
  while (!mr_tp_is_op(p, ')')) {
    if (n->n_params && !mr_tp_expect_op(p, ','))
      return false;
    if (n->n_params == cap) {
      int grown = cap ? cap * 2 : 8;
      int *params = mr_tr_alloc(p->r, (size_t)grown, sizeof *params);
      if (!params)
        return false;
      if (cap)
        memcpy(params, n->params, (size_t)cap * sizeof *params);
      n->params = params;
      cap = grown;
    }
    int sym = parse_new_name(p);
    if (sym < 0)
      return false;
    n->params[n->n_params++] = sym;
    if (mr_tp_is_op(p, '=')) {
      p->at++;
      if (!mr_tp_push(p, &n->list, &n->n, &cap_defaults, mr_tp_expr(p)))
        return false;
    } else if (n->n) {
      return mr_tp_fail(p, p->at->line, "non-default argument follows default argument");
    }
  }
  p->at++;
  return true;
}

/* The body of a macro, and which special names it uses. */
static tn *parse_macro_body(tp *p, tn *n, const char *end) {
  int uses = p->uses, loops = p->loops;
  p->uses = p->loops = 0;
  n->d = parse_inner(p, end);
  n->flags = (uint8_t)p->uses;
  p->uses |= uses;
  p->loops = loops;
  return n->d ? n : NULL;
}

static tn *parse_macro(tp *p, tn *n) {
  p->at++;
  n->sym = parse_new_name(p);
  if (n->sym < 0 || !parse_signature(p, n))
    return NULL;
  n->val = p->t->syms[n->sym].val;
  return parse_macro_body(p, n, "endmacro");
}

static tn *parse_call_block(tp *p, tn *n) {
  p->at++;
  if (mr_tp_is_op(p, '(') && !parse_signature(p, n))
    return NULL;
  n->a = mr_tp_expr(p);
  if (n->a && n->a->kind != N_CALL)
    return mr_tp_fail(p, n->line, "expected call");
  return n->a ? parse_macro_body(p, n, "endcall") : NULL;
}

static tn *parse_filter_block(tp *p, tn *n) {
  p->at++;
  n->a = mr_tp_filters(p, NULL, true);
  n->d = n->a ? parse_inner(p, "endfilter") : NULL;
  return n->d ? n : NULL;
}

static tn *parse_with(tp *p, tn *n) {
  int cap = 0;
  p->at++;
  while (p->at->kind != TK_BLOCK_END) {
    if (n->n && !mr_tp_expect_op(p, ','))
      return NULL;
    tn *target = mr_tp_node(p, N_NAME, p->at->line);
    if (!target || (target->sym = parse_new_name(p)) < 0 || !mr_tp_expect_op(p, '='))
      return NULL;
    if (!mr_tp_push(p, &n->list, &n->n, &cap, target) ||
        !mr_tp_push(p, &n->list, &n->n, &cap, mr_tp_expr(p)))
      return NULL;
  }
  n->d = parse_inner(p, "endwith");
  return n->d ? n : NULL;
}

static tn *parse_block(tp *p, tn *n) {
  p->at++;
  const tk *name = p->at;
  int cap = (int)p->t->cap_blocks, count = (int)p->t->n_blocks, loops = p->loops;
  n->sym = parse_new_name(p);
  if (n->sym < 0)
    return NULL;
  for (int i = 0; i < count; i++)
    if (p->t->blocks[i]->sym == n->sym)
      return mr_tp_fail(p, n->line, "block '%.*s' defined twice", (int)name->len, name->s);
  n->flags = mr_tp_skip_name(p, "scoped");
  mr_tp_skip_name(p, "required");
  if (!mr_tp_push(p, &p->t->blocks, &count, &cap, n))
    return NULL;
  p->t->n_blocks = (size_t)count;
  p->t->cap_blocks = (size_t)cap;
  p->loops = 0;
  n->d = parse_inner(p, "endblock");
  p->loops = loops;
  if (p->at->kind == TK_NAME && p->at->len == name->len &&
      memcmp(p->at->s, name->s, name->len) == 0)
    p->at++;
  return n->d ? n : NULL;
}

static tn *parse_autoescape(tp *p, tn *n) {
  p->at++;
  n->a = mr_tp_expr(p);
  n->d = n->a ? parse_inner(p, "endautoescape") : NULL;
  return n->d ? n : NULL;
}

static tn *parse_generation(tp *p, tn *n) {
  p->at++;
  int loops = p->loops;
  p->loops = 0;
  n->d = parse_inner(p, "endgeneration");
  p->loops = loops;
  return n->d ? n : NULL;
}

static tn *parse_leave(tp *p, tn *n) {
  if (p->loops == 0)
    return mr_tp_fail(p, n->line, "'%.*s' outside loop", (int)p->at->len, p->at->s);
  p->at++;
  return n;
}

/* {% print a, b %} */
static tn *parse_print(tp *p, tn *n) {
  int cap = 0;
  p->at++;
  while (p->at->kind != TK_BLOCK_END) {
    tn *one = mr_tp_node(p, N_PRINT, p->at->line);
    if (n->n && !mr_tp_expect_op(p, ','))
      return NULL;
    if (!one || !(one->a = mr_tp_expr(p)) || !mr_tp_push(p, &n->list, &n->n, &cap, one))
      return NULL;
  }
  return n;
}

/* extends, include, import, from: they parse, and fail when they are reached, since there is
 * nothing to load from. */
static tn *parse_no_loader(tp *p, tn *n) {
  p->at++;
  const char *const next[] = {"import", "as", "ignore", "with", "without"};
  bool good = mr_tp_expr(p) != NULL;
  if (!good || p->at->kind == TK_BLOCK_END)
    return good ? n : NULL;
  for (size_t i = 0; i < sizeof next / sizeof *next; i++)
    if (mr_tp_is_name(p->at, next[i])) {
      while (p->at->kind == TK_NAME || mr_tp_is_op(p, ','))
        p->at++;
      return n;
    }
  return mr_tp_unexpected(p);
}

typedef struct statement {
  const char *name;
  tn_kind kind;
  tn *(*parse)(tp *p, tn *n);
} statement;

static const statement statements[] = {{"if", N_IF, parse_if},
                                       {"for", N_FOR, parse_for},
                                       {"set", N_SET, parse_set},
                                       {"macro", N_MACRO, parse_macro},
                                       {"call", N_CALL_BLOCK, parse_call_block},
                                       {"filter", N_FILTER_BLOCK, parse_filter_block},
                                       {"with", N_WITH, parse_with},
                                       {"block", N_BLOCK, parse_block},
                                       {"autoescape", N_AUTOESCAPE, parse_autoescape},
                                       {"generation", N_SCOPE, parse_generation},
                                       {"break", N_BREAK, parse_leave},
                                       {"continue", N_CONTINUE, parse_leave},
                                       {"print", N_BODY, parse_print},
                                       {"extends", N_NO_LOADER, parse_no_loader},
                                       {"include", N_NO_LOADER, parse_no_loader},
                                       {"import", N_NO_LOADER, parse_no_loader},
                                       {"from", N_NO_LOADER, parse_no_loader}};

static tn *parse_statement(tp *p) {
  const tk *t = p->at;
  if (t->kind != TK_NAME)
    return mr_tp_fail(p, t->line, "tag name expected");
  for (size_t i = 0; i < sizeof statements / sizeof *statements; i++) {
    if (!mr_tp_is_name(t, statements[i].name))
      continue;
    tn *n = mr_tp_node(p, statements[i].kind, t->line);
    return n ? statements[i].parse(p, n) : NULL;
  }
  return mr_tp_fail(p, t->line, "Encountered unknown tag '%.*s'.", (int)(t->len < 60 ? t->len : 60),
                    t->s);
}

bool mr_tp_template(tp *p) {
  p->t->root = parse_nodes(p, NULL);
  if (p->t->root && p->unknown)
    mr_tp_fail(p, p->unknown->line, "No %s named '%.*s'.",
               p->unknown->kind == N_FILTER ? "filter" : "test", (int)p->unknown->val->str.len,
               p->unknown->val->str.s);
  return p->t->root && !p->r->failed;
}
