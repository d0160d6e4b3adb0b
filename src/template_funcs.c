/* template_funcs.c: global functions of templates, and the methods of loop and cycler. */
#include <math.h>
#include <string.h>
#include <time.h>

#include "src/template_int.h"

#define MAX_RANGE 100000 /* items, as the reference sandbox allows */

static tv *g_range(tr *r, tv *self, tv_call *c) {
  int64_t a, b, step;
  (void)self;
  if (!mr_tpl_arg_int(r, c->p[0], 0, &a) || !mr_tpl_arg_int(r, c->p[1], 0, &b) ||
      !mr_tpl_arg_int(r, c->p[2], 1, &step))
    return NULL;
  if (step == 0)
    return mr_tr_fail(r, "range() arg 3 must not be zero");
  tv *v = mr_tv_new(r, TV_RANGE);
  if (!v)
    return NULL;
  v->range.start = c->p[1] ? a : 0;
  v->range.stop = c->p[1] ? b : a;
  v->range.step = step;
  double n = ((double)v->range.stop - (double)v->range.start) / (double)step;
  if (n > MAX_RANGE)
    return mr_tr_fail(r, "Range too big. The sandbox blocks ranges larger than MAX_RANGE (%d).",
                      MAX_RANGE);
  return v;
}

/* Pairs of a mapping or of an iterable of pairs. */
static bool put_all(tr *r, tv *d, tv *from) {
  tv **items, **two;
  size_t n, n_two;
  if (from->kind == TV_UNDEF)
    return mr_tv_fail_undef(r, from);
  if (from->kind == TV_DICT) {
    for (size_t i = 0; i < from->dict.n; i++)
      if (!mr_tv_dict_put(r, d, from->dict.pairs[i].key, from->dict.pairs[i].val))
        return false;
    return true;
  }
  if (!mr_tv_iter(r, from, &items, &n))
    return false;
  for (size_t i = 0; i < n; i++) {
    if (!mr_tv_iter(r, items[i], &two, &n_two))
      return false;
    if (n_two != 2)
      return mr_tr_fail(r, "dictionary update sequence element #%zu has length %zu; 2 is required",
                        i, n_two);
    if (!mr_tv_hashable(r, two[0]) || !mr_tv_dict_put(r, d, two[0], two[1]))
      return false;
  }
  return true;
}

static tv *make_dict(tr *r, tv_call *c, tv_kind kind) {
  tv *d = mr_tv_dict(r, kind, (size_t)c->n_kw + 2);
  if (c->n_pos > 1)
    return mr_tr_fail(r, "dict expected at most 1 argument, got %d", c->n_pos);
  if (!d || (c->n_pos == 1 && !put_all(r, d, c->pos[0])))
    return NULL;
  for (int i = 0; i < c->n_kw; i++)
    if (!mr_tv_dict_put(r, d, c->kw[i].key, c->kw[i].val))
      return NULL;
  return d;
}

static tv *g_dict(tr *r, tv *self, tv_call *c) {
  (void)self;
  return make_dict(r, c, TV_DICT);
}

static tv *g_namespace(tr *r, tv *self, tv_call *c) {
  (void)self;
  return make_dict(r, c, TV_NS);
}

static tv *g_cycler(tr *r, tv *self, tv_call *c) {
  (void)self;
  if (c->n_pos == 0)
    return mr_tr_fail(r, "at least one item has to be provided");
  tv *v = mr_tv_seq(r, TV_CYCLER, (size_t)c->n_pos);
  if (v)
    memcpy(v->seq.items, c->pos, (size_t)c->n_pos * sizeof *c->pos);
  return v;
}

static tv *g_cycler_next(tr *r, tv *self, tv_call *c) {
  (void)r, (void)c;
  tv *v = self->seq.items[self->seq.pos];
  self->seq.pos = (self->seq.pos + 1) % self->seq.n;
  return v;
}

static tv *g_cycler_reset(tr *r, tv *self, tv_call *c) {
  (void)r, (void)c;
  self->seq.pos = 0;
  return &mr_tv_none;
}

static tv *g_joiner(tr *r, tv *self, tv_call *c) {
  (void)self;
  tv *v = mr_tv_new(r, TV_JOINER);
  if (!v)
    return NULL;
  v->joiner.sep = c->p[0] ? c->p[0] : mr_tv_text(r, ", ", 2, TAINT_NONE);
  return v->joiner.sep ? v : NULL;
}

static tv *g_loop_cycle(tr *r, tv *self, tv_call *c) {
  if (c->n_pos == 0)
    return mr_tr_fail(r, "no items for cycling given");
  return c->pos[self->loop->at % (size_t)c->n_pos];
}

static tv *g_loop_changed(tr *r, tv *self, tv_call *c) {
  tv *now = mr_tv_seq(r, TV_TUPLE, (size_t)c->n_pos);
  if (!now)
    return NULL;
  if (c->n_pos)
    memcpy(now->seq.items, c->pos, (size_t)c->n_pos * sizeof *c->pos);
  int same = self->loop->changed ? mr_tv_equal(r, self->loop->changed, now) : 0;
  self->loop->changed = now;
  return same < 0 ? NULL : mr_tv_bool(!same);
}

static tv *g_lipsum(tr *r, tv *self, tv_call *c) {
  (void)self, (void)c;
  return mr_tr_fail(
      r, "lipsum() makes random text and is not offered: a row must always give the same prompt");
}

static tv *g_raise_exception(tr *r, tv *self, tv_call *c) {
  (void)self;
  tv *s = mr_tv_str(r, c->p[0]);
  if (!s || r->failed)
    return NULL;
  r->failed = r->raised = true;
  if (s->str.len == 0 || s->str.s[0] == '\0')
    mr_err_set(r->err, MR_E_DATA, "the template refuses these variables without a message");
  else
    mr_err_set(r->err, MR_E_DATA, "%.*s", (int)(s->str.len < 1000 ? s->str.len : 1000), s->str.s);
  return NULL;
}

/* One directive of a strftime format at s (after its %); returns its length. */
static size_t clock_directive(tr *r, const char *s, size_t n, const struct tm *t, tsb *b,
                              tv_taint taint) {
  char one[4] = {'%', 0}, out[128];
  size_t k = 0;
  if (k < n && s[k] && strchr("-_0^#", s[k]))
    one[1] = s[k++];
  if (k == n) {
    mr_tsb_add(b, one, 1 + k, taint);
    return k;
  }
  one[1 + k] = s[k];
  if (s[k] == 'f') {
    snprintf(out, sizeof out, "%06d", (int)((r->now - floor(r->now)) * 1e6));
    mr_tsb_adds(b, out, taint);
  } else if (strchr("aAbBcCdDeFgGhHIjklmMnpPrRsSStTuUVwWxXyY%", s[k])) {
    mr_tsb_add(b, out, strftime(out, sizeof out, one, t), taint);
  } else if (s[k] != 'z' && s[k] != 'Z') { /* no zone: they print nothing */
    mr_tsb_add(b, one, 1 + k, taint);
    return k;
  }
  return k + 1;
}

static tv *g_strftime_now(tr *r, tv *self, tv_call *c) {
  const tv *f = c->p[0];
  struct tm t;
  time_t seconds = (time_t)floor(r->now);
  tsb b;
  (void)self;
  if (f->kind != TV_STR)
    return mr_tr_fail(r, "strftime() argument 1 must be str, not %s", mr_tv_type(f));
  if (!gmtime_r(&seconds, &t))
    return mr_tr_fail(r, "the time given for strftime_now is out of range");
  mr_tsb_init(&b, r);
  for (size_t at = 0; at < f->str.len && !b.failed;) {
    const char *sign = memchr(f->str.s + at, '%', f->str.len - at);
    size_t to = sign ? (size_t)(sign - f->str.s) : f->str.len;
    mr_tsb_sub(&b, f, at, to - at);
    at = to;
    if (sign)
      at += 1 + clock_directive(r, sign + 1, f->str.len - to - 1, &t, &b, mr_tv_taint_at(f, to));
  }
  return mr_tsb_done(&b);
}

/* Sorted by name. Where the reference prints a class, so does repr. */
static const tv_func functions[] = {{"cycler", NULL, g_cycler, "<class 'jinja2.utils.Cycler'>"},
                                    {"cycler.next", "", g_cycler_next, NULL},
                                    {"cycler.reset", "", g_cycler_reset, NULL},
                                    {"dict", NULL, g_dict, "<class 'dict'>"},
                                    {"joiner", "sep?", g_joiner, "<class 'jinja2.utils.Joiner'>"},
                                    {"lipsum", NULL, g_lipsum, NULL},
                                    {"loop.changed", NULL, g_loop_changed, NULL},
                                    {"loop.cycle", NULL, g_loop_cycle, NULL},
                                    {"namespace", NULL, g_namespace,
                                     "<class "
                                     "'transformers.utils.chat_template_utils._cached_compile_"
                                     "jinja_template.<locals>.TemplateNamespace'>"},
                                    {"raise_exception", "message", g_raise_exception, NULL},
                                    {"range", "start,stop?,step?", g_range, NULL},
                                    {"strftime_now", "format", g_strftime_now, NULL}};

const tv_func *mr_tpl_func(const char *name, size_t len) {
  return mr_tpl_find(functions, sizeof functions / sizeof *functions, name, len);
}
