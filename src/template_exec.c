#include <string.h>

#include "src/template_int.h"

/* ---- output ---- */

static void add_taint(mr_text *t, size_t len, bool dirty) {
  static const char ones[] = "\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1",
                    zeros[32];
  for (size_t n; len; len -= n) {
    n = len < 32 ? len : 32;
    mr_text_add(t, dirty ? ones : zeros, n);
  }
}

static bool emit(tr *r, tv *s) {
  mr_rendered *o = r->out;
  if (!s->str.len)
    return true;
  if (s->str.len > r->limits.output - o->text.len)
    return mr_tr_fail(r, "makes more than %zu bytes of output", r->limits.output);
  if (!mr_tr_charge(r, s->str.len / 256))
    return false;
  mr_text_add(&o->text, s->str.s, s->str.len);
  if (s->taint == TAINT_SOME)
    mr_text_add(&o->taint, s->str.marks, s->str.len);
  else
    add_taint(&o->taint, s->str.len, s->taint == TAINT_ALL);
  if (!o->text.failed && !o->taint.failed)
    return true;
  mr_err_set(r->err, MR_E_NOMEM, "out of memory for a rendered text of %zu bytes", o->text.len);
  r->failed = true;
  return false;
}

/* The output since `from`, taken back as a string. */
static tv *take_output(tr *r, size_t from) {
  mr_rendered *o = r->out;
  size_t len = o->text.len - from;
  if (!len)
    return &mr_tv_empty;
  const char *marks = o->taint.data + from;
  bool some = memchr(marks, 1, len) != NULL, all = !memchr(marks, 0, len);
  char *copy = mr_tr_alloc(r, len, 1);
  tv *v = copy ? mr_tv_text(r, copy, len, !some ? TAINT_NONE : all ? TAINT_ALL : TAINT_SOME) : NULL;
  if (!v)
    return NULL;
  memcpy(copy, o->text.data + from, len);
  if (some && !all) {
    uint8_t *copied = mr_tr_alloc(r, len, 1);
    if (!copied)
      return NULL;
    memcpy(copied, marks, len);
    v->str.marks = copied;
  }
  if (r->escape)
    v->safe = 1;
  o->text.len = o->taint.len = from;
  o->text.data[from] = o->taint.data[from] = '\0';
  return v;
}

static tv *capture(tr *r, const tn *body) {
  size_t from = r->out->text.len;
  return mr_tr_exec(r, body) ? take_output(r, from) : NULL;
}

/* ---- scopes ---- */

static tv_scope *open_scope(tr *r, tv_scope *up) {
  tv_scope *s = mr_tr_alloc(r, 1, sizeof *s);
  if (s)
    *s = (tv_scope){.up = up};
  return s;
}

static bool set_var(tr *r, int sym, tv *v) {
  tv_scope *s = r->scope;
  if (!s->up) {
    r->globals[sym] = v;
    return true;
  }
  for (int i = 0; i < s->n; i++)
    if (s->vars[i].sym == sym) {
      s->vars[i].val = v;
      return true;
    }
  if (s->n == s->cap) {
    int cap = s->cap ? s->cap * 2 : 4;
    tv_var *vars = mr_tr_alloc(r, (size_t)cap, sizeof *vars);
    if (!vars)
      return false;
    if (s->n)
      memcpy(vars, s->vars, (size_t)s->n * sizeof *vars);
    s->vars = vars;
    s->cap = cap;
  }
  s->vars[s->n++] = (tv_var){sym, v};
  return true;
}

static bool assign(tr *r, const tn *target, tv *v) {
  tv **items;
  size_t n;
  if (target->kind == N_NAME)
    return set_var(r, target->sym, v);
  if (target->kind == N_NSREF) {
    tv *ns = mr_tr_lookup(r, target->sym);
    if (!ns)
      return false;
    if (ns->kind != TV_NS)
      return mr_tr_fail(r, "cannot assign attribute on non-namespace object");
    return mr_tv_dict_put(r, ns, target->val, v);
  }
  if (v->kind == TV_UNDEF || !mr_tv_iter(r, v, &items, &n))
    return mr_tr_fail(r, "cannot unpack an undefined value");
  if (n > (size_t)target->n)
    return mr_tr_fail(r, "too many values to unpack (expected %d)", target->n);
  if (n < (size_t)target->n)
    return mr_tr_fail(r, "not enough values to unpack (expected %d, got %zu)", target->n, n);
  for (size_t i = 0; i < n; i++)
    if (!assign(r, target->list[i], items[i]))
      return false;
  return true;
}

static bool exec_in(tr *r, tv_scope *scope, const tn *body) {
  tv_scope *outer = r->scope;
  if (!scope)
    return false;
  r->scope = scope;
  bool good = mr_tr_exec(r, body);
  r->scope = outer;
  return good;
}

static tv *capture_in(tr *r, tv_scope *scope, const tn *body) {
  tv_scope *outer = r->scope;
  if (!scope)
    return NULL;
  r->scope = scope;
  tv *v = capture(r, body);
  r->scope = outer;
  return v;
}

/* ---- loops ---- */

/* The items for which the loop's condition holds. */
static bool keep_items(tr *r, const tn *n, tv ***items, size_t *count) {
  tv **kept = mr_tr_alloc(r, *count, sizeof *kept);
  size_t k = 0;
  if (!kept)
    return false;
  for (size_t i = 0; i < *count; i++) {
    r->scope->n = 0;
    if (!assign(r, n->a, (*items)[i]))
      return false;
    tv *v = mr_tr_eval(r, n->c);
    if (!v)
      return false;
    if (mr_tv_truth(v))
      kept[k++] = (*items)[i];
  }
  *items = kept;
  *count = k;
  return true;
}

/* The iterations. *done: one ran to its end (an else-part runs when none did). */
static bool iterate(tr *r, const tn *n, tv *var, bool *done) {
  tv_loop *l = var->loop;
  for (l->at = 0; l->at < l->n; l->at++) {
    r->scope->n = 0; /* what an iteration sets is gone in the next */
    if (!assign(r, n->a, l->items[l->at]) || !set_var(r, n->sym, var) || !mr_tr_exec(r, n->d))
      return false;
    int flow = r->flow;
    r->flow = FLOW_ON;
    if (flow == FLOW_BREAK)
      break;
    *done |= flow == FLOW_ON;
  }
  return true;
}

static bool run_loop(tr *r, const tn *n, tv *over, tv_scope *outer, int depth) {
  tv_scope *caller = r->scope;
  tv *var = mr_tv_new(r, TV_LOOP);
  bool done = false;
  tv_scope *inner = open_scope(r, outer);
  if (!var || !inner || !(var->loop = mr_tr_alloc(r, 1, sizeof *var->loop)))
    return false;
  *var->loop = (tv_loop){.depth = depth, .node = n, .outer = outer};
  if (!mr_tv_iter(r, over, &var->loop->items, &var->loop->n))
    return false;
  r->scope = inner;
  bool good =
      (!n->c || keep_items(r, n, &var->loop->items, &var->loop->n)) && iterate(r, n, var, &done);
  r->scope = caller;
  if (good && !done && n->n)
    good = exec_in(r, open_scope(r, outer), n->list[0]);
  return good;
}

static bool exec_for(tr *r, const tn *n) {
  tv *over = mr_tr_eval(r, n->b);
  r->line = n->line;
  return over && run_loop(r, n, over, r->scope, 0);
}

tv *mr_tr_call_loop(tr *r, tv *loop, tv *items) {
  const tv_loop *l = loop->loop;
  size_t from = r->out->text.len;
  if (!l->node->flags)
    return mr_tr_fail(r, "The loop must have the 'recursive' marker to be called recursively.");
  if (!mr_tr_enter(r) || !run_loop(r, l->node, items, l->outer, l->depth + 1))
    return NULL;
  mr_tr_leave(r);
  return take_output(r, from);
}

/* ---- macros ---- */

static bool is_param(const tr *r, const tn *n, const tv *name) {
  for (int i = 0; i < n->n_params; i++) {
    const tv *p = r->t->syms[n->params[i]].val;
    if (p->str.len == name->str.len && memcmp(p->str.s, name->str.s, name->str.len) == 0)
      return true;
  }
  return false;
}

static bool set_named(tr *r, const char *name, tv *v) {
  for (size_t i = 0; v && i < r->t->n_syms; i++)
    if (mr_tv_is_str(r->t->syms[i].val, name))
      return set_var(r, (int)i, v);
  return v != NULL;
}

/* kwargs, varargs and caller, where the body uses them; what is left over is an error. */
static bool set_special(tr *r, const tn *n, const tv_call *c) {
  int extra = c->n_pos > n->n_params ? c->n_pos - n->n_params : 0;
  tv *caller = NULL,
     *rest = n->flags & MACRO_KWARGS ? mr_tv_dict(r, TV_DICT, (size_t)c->n_kw) : NULL;
  for (int i = 0; i < c->n_kw; i++) {
    tv_pair p = c->kw[i];
    if (is_param(r, n, p.key))
      continue;
    if ((n->flags & MACRO_CALLER) && mr_tv_is_str(p.key, "caller"))
      caller = p.val;
    else if (!(n->flags & MACRO_KWARGS))
      return mr_tr_fail(r, "macro '%.*s' takes no keyword argument '%.*s'",
                        n->val ? (int)n->val->str.len : 6, n->val ? n->val->str.s : "caller",
                        (int)p.key->str.len, p.key->str.s);
    else if (!rest || !mr_tv_dict_put(r, rest, p.key, p.val))
      return false;
  }
  if (extra && !(n->flags & MACRO_VARARGS))
    return mr_tr_fail(r, "macro takes not more than %d argument(s)", n->n_params);
  if ((n->flags & MACRO_KWARGS) && !set_named(r, "kwargs", rest))
    return false;
  if (n->flags & MACRO_VARARGS) {
    tv *more = mr_tv_seq(r, TV_TUPLE, (size_t)extra);
    if (more && extra)
      memcpy(more->seq.items, c->pos + n->n_params, (size_t)extra * sizeof *c->pos);
    if (!set_named(r, "varargs", more))
      return false;
  }
  if (!(n->flags & MACRO_CALLER) || is_param(r, n, mr_tv_text(r, "caller", 6, TAINT_NONE)))
    return !r->failed;
  return set_named(r, "caller", caller ? caller : mr_tv_undef_hint(r, "No caller defined"));
}

static bool set_params(tr *r, const tn *n, const tv_call *c) {
  for (int i = 0; i < n->n_params; i++) {
    const tv_sym *name = &r->t->syms[n->params[i]];
    tv *v = mr_tr_keyword(c, name->name, name->len);
    int k = i - (n->n_params - n->n); /* index of its default */
    if (i < c->n_pos && v)
      return mr_tr_fail(r, "macro takes no keyword argument '%.*s': it is given already",
                        (int)name->len, name->name);
    if (i < c->n_pos)
      v = c->pos[i];
    if (!v)
      v = k >= 0 ? mr_tr_eval(r, n->list[k])
                 : mr_tv_undef_hint(r, "parameter of a macro was not provided");
    if (!v || !set_var(r, n->params[i], v))
      return false;
  }
  return true;
}

tv *mr_tr_call_macro(tr *r, tv *m, tv_call *c) {
  const tn *n = m->macro.node;
  tv_scope *caller = r->scope, *scope = open_scope(r, m->macro.scope);
  int line = r->line;
  if (!scope || !mr_tr_enter(r))
    return NULL;
  r->scope = scope;
  tv *v = set_params(r, n, c) && set_special(r, n, c) ? capture(r, n->d) : NULL;
  r->scope = caller;
  if (v)
    r->line = line;
  mr_tr_leave(r);
  return v;
}

tv *mr_tr_call_block(tr *r, const tn *block) {
  return capture_in(r, open_scope(r, r->top), block->d);
}

static tv *make_macro(tr *r, const tn *n) {
  tv *m = mr_tv_new(r, TV_MACRO);
  if (m) {
    m->macro.node = n;
    m->macro.scope = r->scope;
  }
  return m;
}

static bool exec_call_block(tr *r, const tn *n) {
  tv_call c;
  tv *caller = make_macro(r, n), *f = caller ? mr_tr_eval(r, n->a->a) : NULL;
  if (!f || !mr_tr_args(r, n->a->args, &c))
    return false;
  tv_pair *kw = mr_tr_alloc(r, (size_t)c.n_kw + 1, sizeof *kw);
  tv *name = mr_tv_text(r, "caller", 6, TAINT_NONE);
  if (!kw || !name)
    return false;
  if (c.n_kw)
    memcpy(kw, c.kw, (size_t)c.n_kw * sizeof *kw);
  kw[c.n_kw++] = (tv_pair){name, caller};
  c.kw = kw;
  tv *v = mr_tr_call(r, f, &c), *s = v ? mr_tv_str(r, v) : NULL;
  return s && emit(r, s);
}

/* ---- statements ---- */

static bool exec_print(tr *r, const tn *n) {
  tv *v = mr_tr_eval(r, n->a);
  if (!v)
    return false;
  tv *s = r->escape ? mr_tv_escape(r, v) : mr_tv_str(r, v);
  return s && emit(r, s);
}

static bool exec_if(tr *r, const tn *n) {
  for (int i = 0; i < n->n; i += 2) {
    tv *v = mr_tr_eval(r, n->list[i]);
    if (!v)
      return false;
    if (mr_tv_truth(v))
      return mr_tr_exec(r, n->list[i + 1]);
  }
  return !n->a || mr_tr_exec(r, n->a);
}

static bool exec_set(tr *r, const tn *n) {
  tv *v = mr_tr_eval(r, n->b);
  return v && assign(r, n->a, v);
}

static bool exec_set_block(tr *r, const tn *n) {
  tv *v = capture_in(r, open_scope(r, r->scope), n->d);
  if (v && n->b)
    v = mr_tr_filter(r, n->b, v);
  return v && assign(r, n->a, v);
}

static bool exec_filter_block(tr *r, const tn *n) {
  tv *v = capture_in(r, open_scope(r, r->scope), n->d);
  v = v ? mr_tr_filter(r, n->a, v) : NULL;
  tv *s = v ? mr_tv_str(r, v) : NULL;
  return s && emit(r, s);
}

static bool exec_with(tr *r, const tn *n) {
  tv_scope *outer = r->scope, *inner = open_scope(r, outer);
  bool good = inner != NULL;
  for (int i = 0; good && i < n->n; i += 2) {
    tv *v = mr_tr_eval(r, n->list[i + 1]);
    r->scope = inner;
    good = v && assign(r, n->list[i], v);
    r->scope = outer;
  }
  return good && exec_in(r, inner, n->d);
}

static bool exec_autoescape(tr *r, const tn *n) {
  tv *v = mr_tr_eval(r, n->a);
  bool old = r->escape;
  if (!v)
    return false;
  r->escape = mr_tv_truth(v);
  bool good = exec_in(r, open_scope(r, r->scope), n->d);
  r->escape = old;
  return good;
}

static bool exec_body(tr *r, const tn *n) {
  for (int i = 0; i < n->n && r->flow == FLOW_ON; i++)
    if (!mr_tr_exec(r, n->list[i]))
      return false;
  return true;
}

static bool exec(tr *r, const tn *n) {
  tv *v;
  switch (n->kind) {
  case N_BODY:
    return exec_body(r, n);
  case N_DATA:
    return emit(r, n->val);
  case N_PRINT:
    return exec_print(r, n);
  case N_IF:
    return exec_if(r, n);
  case N_FOR:
    return exec_for(r, n);
  case N_SET:
    return exec_set(r, n);
  case N_SET_BLOCK:
    return exec_set_block(r, n);
  case N_MACRO:
    v = make_macro(r, n);
    return v && set_var(r, n->sym, v);
  case N_CALL_BLOCK:
    return exec_call_block(r, n);
  case N_FILTER_BLOCK:
    return exec_filter_block(r, n);
  case N_WITH:
    return exec_with(r, n);
  case N_BLOCK:
    return exec_in(r, open_scope(r, n->flags ? r->scope : r->top), n->d);
  case N_AUTOESCAPE:
    return exec_autoescape(r, n);
  case N_SCOPE:
    return exec_in(r, open_scope(r, r->scope), n->d);
  case N_BREAK:
  case N_CONTINUE:
    r->flow = n->kind == N_BREAK ? FLOW_BREAK : FLOW_CONTINUE;
    return true;
  default:
    return mr_tr_fail(r, "a chat template can load no other template");
  }
}

bool mr_tr_exec(tr *r, const tn *n) {
  if (!mr_tr_charge(r, 1) || !mr_tr_enter(r))
    return false;
  r->line = n->line;
  bool good = exec(r, n);
  mr_tr_leave(r);
  return good;
}
