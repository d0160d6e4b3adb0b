#include "src/template.h"

#include <string.h>

#include "io/mem.h"
#include "src/template_int.h"

#define MEMORY_BYTES ((size_t)256 << 20) /* of one render, and of one parsed template */

const mr_template_limits mr_template_default_limits = {
    .steps = 5000000, .depth = 1500, .output = (size_t)64 << 20};

/* A failure of `e` handed to the caller, who may not want its words. */
static mr_code give(mr_err *err, const mr_err *e) {
  mr_code code = e->code == MR_OK ? MR_E_INTERNAL : e->code;
  if (err && err->code == MR_OK)
    *err = *e;
  return code;
}

mr_code mr_template_parse(mr_template **out, const char *src, size_t len, mr_err *err) {
  mr_err e = MR_ERR_INIT;
  mr_template *t = mr_mem_alloc(1, sizeof *t);
  *out = NULL;
  if (!t)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for the chat template");
  t->arena.limit = MEMORY_BYTES;
  tr r = {.t = t, .arena = &t->arena, .limits = mr_template_default_limits, .line = 1, .err = &e};
  r.limits.steps = INT64_MAX / 2;
  tp p = {.r = &r, .t = t};
  p.at = mr_tpl_lex(&r, src, len);
  if (p.at && mr_tp_template(&p)) {
    *out = t;
    return MR_OK;
  }
  mr_template_free(t);
  return give(err, &e);
}

void mr_template_free(mr_template *t) {
  if (t)
    mr_ta_free(&t->arena);
  mr_mem_free(t);
}

/* The variables that the template names. */
static bool load_globals(tr *r, const json_t *vars) {
  static const char *const tainted[] = {"messages", "tools", "documents"};
  r->globals = mr_tr_alloc(r, r->t->n_syms, sizeof *r->globals);
  for (size_t i = 0; r->globals && i < r->t->n_syms; i++) {
    const tv_sym *s = &r->t->syms[i];
    json_t *j = json_object_getn(vars, s->name, s->len);
    tv_taint taint = TAINT_NONE;
    r->globals[i] = NULL;
    for (int k = 0; j && k < 3; k++)
      taint = mr_tv_is_str(s->val, tainted[k]) ? TAINT_ALL : taint;
    if (j && !(r->globals[i] = mr_tv_from_json(r, j, taint)))
      return false;
  }
  return r->globals != NULL;
}

mr_code mr_template_render(const mr_template *t, json_t *vars, const mr_template_limits *limits,
                           double now, mr_rendered *out, bool *raised, mr_err *err) {
  mr_err e = MR_ERR_INIT;
  ta arena = {.limit = MEMORY_BYTES};
  tv_scope top = {.up = NULL};
  tr r = {.t = t,
          .arena = &arena,
          .limits = limits ? *limits : mr_template_default_limits,
          .line = 1,
          .now = now,
          .scope = &top,
          .top = &top,
          .out = out,
          .err = &e};
  mr_text_clear(&out->text);
  mr_text_clear(&out->taint);
  bool good = load_globals(&r, vars) && mr_tr_exec(&r, t->root);
  mr_ta_free(&arena);
  if (raised)
    *raised = r.raised;
  if (good)
    return MR_OK;
  mr_text_clear(&out->text);
  mr_text_clear(&out->taint);
  return give(err, &e);
}

void mr_rendered_free(mr_rendered *r) {
  mr_text_free(&r->text);
  mr_text_free(&r->taint);
}
