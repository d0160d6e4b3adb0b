/* template_tests.c: the tests behind "is". */
#include <string.h>

#include "src/template_int.h"

#define TEST(name, expression)                                                                     \
  static tv *t_##name(tr *r, tv *v, tv_call *c) {                                                  \
    (void)r, (void)c;                                                                              \
    return mr_tv_bool(expression);                                                                 \
  }

static bool is_callable(const tv *v) {
  return v->kind == TV_MACRO || v->kind == TV_FUNC || v->kind == TV_BOUND || v->kind == TV_JOINER ||
         v->kind == TV_BLOCK || v->kind == TV_LOOP || v->kind == TV_UNDEF;
}

static bool is_iterable(const tv *v) {
  return v->kind == TV_UNDEF || v->kind == TV_LOOP || (v->kind >= TV_STR && v->kind <= TV_GEN);
}

static bool is_sequence(const tv *v) {
  return is_iterable(v) && v->kind != TV_VIEW && v->kind != TV_GEN && v->kind != TV_LOOP;
}

TEST(boolean, v->kind == TV_BOOL)
TEST(callable, is_callable(v))
TEST(defined, v->kind != TV_UNDEF)
TEST(escaped, v->kind == TV_STR && v->safe)
TEST(false, v->kind == TV_BOOL && !v->b)
TEST(float, v->kind == TV_FLOAT)
TEST(integer, v->kind == TV_INT)
TEST(iterable, is_iterable(v))
TEST(mapping, v->kind == TV_DICT)
TEST(none, v->kind == TV_NONE)
TEST(number, mr_tv_is_num(v))
TEST(sequence, is_sequence(v))
TEST(string, v->kind == TV_STR)
TEST(true, v->kind == TV_BOOL && v->b)
TEST(undefined, v->kind == TV_UNDEF)
TEST(filter, v->kind == TV_STR && mr_tpl_filter(v->str.s, v->str.len) != NULL)
TEST(test, v->kind == TV_STR && mr_tpl_test(v->str.s, v->str.len) != NULL)
TEST(sameas, v == c->p[0] || (v->kind == c->p[0]->kind &&
                              (v->kind == TV_NONE || (v->kind == TV_BOOL && v->b == c->p[0]->b) ||
                               (v->kind == TV_INT && v->i == c->p[0]->i))))

static tv *compared(tr *r, tn_op op, tv *v, tv_call *c) {
  int e = mr_op_compare(r, op, v, c->p[0]);
  return e < 0 ? NULL : mr_tv_bool(e);
}

#define COMPARED(name, op)                                                                         \
  static tv *t_##name(tr *r, tv *v, tv_call *c) {                                                  \
    return compared(r, op, v, c);                                                                  \
  }
COMPARED(eq, OP_EQ)
COMPARED(ne, OP_NE)
COMPARED(lt, OP_LT)
COMPARED(le, OP_LE)
COMPARED(gt, OP_GT)
COMPARED(ge, OP_GE)
COMPARED(in, OP_IN)

static tv *remainder_is(tr *r, tv *v, tv *by, int want) {
  tv *x = by ? mr_op_binary(r, OP_MOD, v, by) : NULL, *y = x ? mr_tv_int(r, want) : NULL;
  int e = y ? mr_tv_equal(r, x, y) : -1;
  return e < 0 ? NULL : mr_tv_bool(e);
}

static tv *t_divisibleby(tr *r, tv *v, tv_call *c) {
  return remainder_is(r, v, c->p[0], 0);
}

static tv *t_even(tr *r, tv *v, tv_call *c) {
  (void)c;
  return remainder_is(r, v, mr_tv_int(r, 2), 0);
}

static tv *t_odd(tr *r, tv *v, tv_call *c) {
  (void)c;
  return remainder_is(r, v, mr_tv_int(r, 2), 1);
}

static tv *letter_case(tr *r, tv *v, const char *which) {
  tv *s = mr_tv_str(r, v);
  return s ? mr_tv_bool(mr_ch_class(s, which)) : NULL;
}

static tv *t_lower(tr *r, tv *v, tv_call *c) {
  (void)c;
  return letter_case(r, v, "islower");
}

static tv *t_upper(tr *r, tv *v, tv_call *c) {
  (void)c;
  return letter_case(r, v, "isupper");
}

#define T(name, params)                                                                            \
  { #name, params, t_##name, NULL }
static const tv_func tests[] = {/* sorted */
                                {"!=", "other", t_ne, NULL},
                                {"<", "other", t_lt, NULL},
                                {"<=", "other", t_le, NULL},
                                {"==", "other", t_eq, NULL},
                                {">", "other", t_gt, NULL},
                                {">=", "other", t_ge, NULL},
                                T(boolean, ""),
                                T(callable, ""),
                                T(defined, ""),
                                T(divisibleby, "num"),
                                T(eq, "other"),
                                {"equalto", "other", t_eq, NULL},
                                T(escaped, ""),
                                T(even, ""),
                                T(false, ""),
                                T(filter, ""),
                                T(float, ""),
                                T(ge, "other"),
                                {"greaterthan", "other", t_gt, NULL},
                                T(gt, "other"),
                                T(in, "seq"),
                                T(integer, ""),
                                T(iterable, ""),
                                T(le, "other"),
                                {"lessthan", "other", t_lt, NULL},
                                T(lower, ""),
                                T(lt, "other"),
                                T(mapping, ""),
                                T(ne, "other"),
                                T(none, ""),
                                T(number, ""),
                                T(odd, ""),
                                T(sameas, "other"),
                                T(sequence, ""),
                                T(string, ""),
                                T(test, ""),
                                T(true, ""),
                                T(undefined, ""),
                                T(upper, "")};

const tv_func *mr_tpl_test(const char *name, size_t len) {
  return mr_tpl_find(tests, sizeof tests / sizeof *tests, name, len);
}
