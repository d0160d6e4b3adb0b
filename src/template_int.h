/* template_int.h: what the parts of the template engine share; nobody else includes it.
 *
 * template_lex.c      source to tokens              template_parse.c    statements to a tree
 * template_expr.c     expressions to a tree         template_exec.c     statements, scopes, macros
 * template_eval.c     expressions                   template_ops.c      operators, attributes,
 * slices template_value.c    arena, making values          template_data.c     equality, order,
 * dictionaries template_print.c    str(), repr, HTML, JSON       template_format.c   "%" and
 * str.format template_methods.c  methods of strings, dicts     template_filters.c  filters on
 * texts, numbers template_seq.c      filters on lists              template_tests.c    tests ("is")
 * template_funcs.c    global functions              template_case.c     letter case and classes
 *
 * Values are Python's, immutable but for namespaces and iterators, and live in the arena of a
 * render (constants: in the arena of the template). A function that can fail returns NULL, false or
 * -1 after it has set the error of the render. Every byte of a string knows whether it came from a
 * tainted variable.
 */
#ifndef MR_SRC_TEMPLATE_INT_H
#define MR_SRC_TEMPLATE_INT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "src/template.h"

/* Python's integers are unbounded; these hold 128 bits and refuse what is larger. */
__extension__ typedef __int128 tv_int;

/* ---- arena ---- */

typedef struct ta_chunk ta_chunk;
typedef struct ta { /* memory given back all at once */
  ta_chunk *head;
  char *at, *end;
  size_t total, limit; /* bytes */
} ta;

void mr_ta_free(ta *a);

/* ---- values ---- */

typedef enum tv_kind {
  TV_UNDEF,
  TV_NONE,
  TV_BOOL,
  TV_INT,
  TV_FLOAT,
  TV_STR,
  TV_LIST,
  TV_TUPLE,
  TV_DICT,
  TV_VIEW,
  TV_RANGE,
  TV_GEN,
  TV_NS,
  TV_LOOP,
  TV_MACRO,
  TV_FUNC,
  TV_BOUND,
  TV_CYCLER,
  TV_JOINER,
  TV_SELF,
  TV_BLOCK
} tv_kind;

typedef enum tv_taint { TAINT_NONE, TAINT_ALL, TAINT_SOME /* `marks` says which bytes */ } tv_taint;
typedef enum tv_view { VIEW_KEYS, VIEW_VALUES, VIEW_ITEMS } tv_view;

typedef struct tv tv;
typedef struct tn tn;
typedef struct tr tr;
typedef struct tv_call tv_call;
typedef struct tv_scope tv_scope;

typedef struct tv_pair {
  tv *key, *val;
} tv_pair;

typedef struct tv_func { /* a filter, test, method or global function */
  const char *name;
  const char *params; /* "a,b?": b may be absent; NULL: takes all in c->pos and c->kw itself */
  tv *(*fn)(tr *r, tv *self, tv_call *c); /* NULL: a method that the sandbox refuses */
  const char *repr;                       /* how Python prints it; NULL: by its name */
} tv_func;

#define TV_MAX_PARAMS 6
struct tv_call { /* arguments of a call */
  tv **pos;
  int n_pos;
  tv_pair *kw; /* keys are strings */
  int n_kw;
  tv *p[TV_MAX_PARAMS]; /* by parameter; NULL: absent */
};

typedef struct tv_loop { /* the variable `loop` */
  tv **items;
  size_t n, at;
  int depth;
  tv *changed;    /* arguments of the last changed(), a tuple; NULL: none yet */
  const tn *node; /* recursive loops: what loop(...) runs */
  tv_scope *outer;
} tv_loop;

struct tv {
  uint8_t kind;  /* tv_kind */
  uint8_t safe;  /* STR: Markup: not escaped again */
  uint8_t taint; /* STR: tv_taint */
  uint8_t group; /* TUPLE: made by groupby, with names grouper and list */
  union {
    bool b;
    tv_int i;
    double f;
    struct {
      const char *s;
      size_t len;
      const uint8_t *marks; /* [len] 1: tainted; only with TAINT_SOME */
      int64_t chars;        /* code points; -1: not counted yet (never in a template's constants) */
    } str;
    struct {
      tv **items;
      size_t n, pos; /* pos: GEN: items already taken */
    } seq;           /* LIST, TUPLE, GEN, CYCLER */
    struct {
      tv_pair *pairs; /* in order of insertion */
      size_t n, cap;
      uint32_t *index; /* open addressing over pairs, [n_index]; NULL while small */
      size_t n_index;
    } dict; /* DICT, NS */
    struct {
      tv *of;
      tv_view what;
    } view;
    struct {
      int64_t start, stop, step;
    } range;
    struct {
      tv *of, *name;    /* attribute `name` of `of`; of NULL: a variable */
      const char *hint; /* the whole message; NULL: made from the above */
    } undef;
    struct {
      tv *self;
      const tv_func *func;
    } call; /* BOUND; FUNC has no self */
    struct {
      const tn *node;
      tv_scope *scope;
    } macro; /* MACRO, BLOCK */
    struct {
      tv *sep;
      bool used;
    } joiner;
    tv_loop *loop;
  };
};

/* ---- the tree ---- */

typedef enum tn_kind {
  N_CONST,
  N_NAME,
  N_LIST,
  N_TUPLE,
  N_DICT,
  N_COND,
  N_OR,
  N_AND,
  N_NOT,
  N_COMPARE,
  N_BINARY,
  N_CONCAT,
  N_NEG,
  N_POS,
  N_ATTR,
  N_ITEM,
  N_SLICE,
  N_CALL,
  N_FILTER,
  N_TEST,
  N_NSREF,
  N_BODY,
  N_DATA,
  N_PRINT,
  N_IF,
  N_FOR,
  N_SET,
  N_SET_BLOCK,
  N_MACRO,
  N_CALL_BLOCK,
  N_FILTER_BLOCK,
  N_WITH,
  N_BLOCK,
  N_AUTOESCAPE,
  N_SCOPE,
  N_BREAK,
  N_CONTINUE,
  N_NO_LOADER
} tn_kind;

typedef enum tn_op {
  OP_ADD,
  OP_SUB,
  OP_MUL,
  OP_DIV,
  OP_FLOORDIV,
  OP_MOD,
  OP_POW,
  OP_EQ,
  OP_NE,
  OP_LT,
  OP_LE,
  OP_GT,
  OP_GE,
  OP_IN,
  OP_NOT_IN
} tn_op;

typedef struct tn_args {
  tn **pos;
  int n_pos;
  tv **names; /* of the keyword arguments */
  tn **kw;
  int n_kw;
  tn *star, *star_star;
} tn_args;

typedef struct tn_lookup { /* methods that an attribute's name may mean, by kind of object */
  const tv_func *str, *dict, *list;
} tn_lookup;

enum {
  MACRO_CALLER = 1,
  MACRO_KWARGS = 2,
  MACRO_VARARGS = 4
}; /* special names that a macro's body uses */

struct tn {
  uint8_t kind, op, flags; /* flags: MACRO_*; FOR: recursive; FILTER, TEST: see template_expr.c */
  int line;
  int sym; /* NAME, MACRO, BLOCK, NSREF */
  tn *a, *b, *c, *d;
  tn **list; /* items; IF: condition, body, condition, body ...; WITH: target, value ... */
  int n;
  uint8_t *ops; /* COMPARE: tn_op of list[i] */
  int *params;  /* MACRO, CALL_BLOCK: symbols [n_params]; defaults in list, the last n of them */
  int n_params;
  tv *val;             /* CONST, DATA; ATTR, FILTER, TEST, NSREF: the name */
  const tv_func *func; /* FILTER, TEST; NULL: unknown, an error when it is reached */
  tn_args *args;
  tn_lookup look; /* ATTR */
};

typedef struct tv_sym {
  const char *name;
  size_t len;
  tv *val;     /* the name as a string */
  tv *builtin; /* the global function of this name, or NULL */
} tv_sym;

struct mr_template {
  ta arena;
  tn *root; /* BODY */
  tv_sym *syms;
  size_t n_syms, cap_syms;
  tn **blocks;
  size_t n_blocks, cap_blocks;
};

/* ---- a render ---- */

typedef struct tv_var {
  int sym;
  tv *val;
} tv_var;

struct tv_scope {
  tv_scope *up; /* NULL: the template's top level, whose variables are tr.globals */
  tv_var *vars;
  int n, cap;
};

enum { FLOW_ON, FLOW_BREAK, FLOW_CONTINUE };

struct tr {
  const mr_template *t;
  ta *arena;
  mr_template_limits limits;
  int64_t steps;
  int depth;
  int line;    /* of the node being run */
  double now;  /* negative: no clock */
  bool escape; /* inside {% autoescape true %} */
  bool raised, failed;
  tv **globals; /* [n_syms]; NULL: not set */
  tv_scope *scope, *top;
  int flow; /* FLOW_*: what a loop must do next */
  mr_rendered *out;
  mr_err *err;
};

/* Sets the error unless there is one; returns NULL. */
void *mr_tr_fail(tr *r, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void *mr_tr_alloc(tr *r, size_t count, size_t size); /* from the arena, not zeroed; NULL: error set
                                                      */
bool mr_tr_charge(tr *r, size_t work); /* counts bulk work as steps; false: over the limit */
bool mr_tr_enter(tr *r);               /* one level of nesting deeper; false: too deep */
void mr_tr_leave(tr *r);

/* template_exec.c */
bool mr_tr_exec(tr *r, const tn *n);
tv *mr_tr_call_macro(tr *r, tv *m, tv_call *c);
tv *mr_tr_call_block(tr *r, const tn *block);
tv *mr_tr_call_loop(tr *r, tv *loop, tv *items);
/* template_eval.c */
tv *mr_tr_eval(tr *r, const tn *n);
tv *mr_tr_lookup(tr *r, int sym);
tv *mr_tr_call(tr *r, tv *f, tv_call *c);
tv *mr_tr_call_func(tr *r, const tv_func *f, tv *self, tv_call *c);
bool mr_tr_args(tr *r, const tn_args *a, tv_call *c);
tv *mr_tr_keyword(const tv_call *c, const char *name, size_t len); /* NULL: not given */
tv *mr_tr_filter(tr *r, const tn *n, tv *input); /* n: FILTER; its own input is replaced when input
                                                    is given */

/* template_value.c */
extern tv mr_tv_none, mr_tv_true, mr_tv_false, mr_tv_empty;
tv *mr_tv_new(tr *r, tv_kind kind);
tv *mr_tv_bool(bool b);
tv *mr_tv_int(tr *r, tv_int i);
tv *mr_tv_float(tr *r, double f);
tv *mr_tv_text(tr *r, const char *s, size_t len, tv_taint taint); /* borrows s */
tv *mr_tv_sub(tr *r, const tv *s, size_t from, size_t len);       /* bytes of a string, shared */
tv *mr_tv_seq(tr *r, tv_kind kind, size_t n); /* n items, to be filled by the caller */
tv *mr_tv_pair_of(tr *r, tv *a, tv *b);       /* a tuple of two */
tv *mr_tv_undef(tr *r, tv *of, tv *name);
tv *mr_tv_undef_hint(tr *r, const char *hint);
tv *mr_tv_dict(tr *r, tv_kind kind, size_t room);
bool mr_tv_dict_put(tr *r, tv *d, tv *key, tv *val);
tv *mr_tv_dict_get(tr *r, const tv *d, const tv *key, bool *failed); /* NULL: absent or failed */
tv *mr_tv_dict_gets(const tv *d, const char *key, size_t len);       /* by text; NULL: absent */
tv *mr_tv_from_json(tr *r, json_t *j, tv_taint taint);
size_t mr_tv_chars(tv *s);              /* code points of a string */
size_t mr_tv_byte_at(tv *s, size_t ch); /* byte offset of a code point's index (<= chars) */
bool mr_tv_truth(const tv *v);
const char *mr_tv_type(const tv *v);        /* Python's name of the type */
void *mr_tv_fail_undef(tr *r, const tv *u); /* the error of using an undefined value */
bool mr_tv_is_str(const tv *v, const char *s);
bool mr_tv_is_num(const tv *v);                                  /* bool, int, float */
double mr_tv_real(const tv *v);                                  /* of a number */
bool mr_tv_as_int(const tv *v, tv_int *i);                       /* of an int or bool */
int mr_tv_equal(tr *r, const tv *a, const tv *b);                /* 1, 0; -1: failed */
int mr_tv_less(tr *r, const tv *a, const tv *b, const char *op); /* a < b; op: for the message */
bool mr_tv_iter(tr *r, tv *v, tv ***items, size_t *n); /* all items; takes them from an iterator */
bool mr_tv_hashable(tr *r, const tv *v);
bool mr_tv_sort(tr *r, tv **items, tv **keys, size_t n, bool reverse); /* stable, by keys */

/* A string under construction. Errors stick; done gives NULL then. */
typedef struct tsb {
  tr *r;
  char *s;
  uint8_t *marks;
  size_t len, cap;
  bool some, all; /* some: a tainted byte is in; all: no clean byte is in; both: no marks needed */
  bool failed;
} tsb;

void mr_tsb_init(tsb *b, tr *r);
void mr_tsb_add(tsb *b, const char *s, size_t len, tv_taint taint);
void mr_tsb_adds(tsb *b, const char *s, tv_taint taint);
void mr_tsb_sub(tsb *b, const tv *s, size_t from, size_t len); /* bytes of a string with their taint
                                                                */
void mr_tsb_val(tsb *b, const tv *s);
void mr_tsb_code(tsb *b, uint32_t code, tv_taint taint); /* a code point */
tv *mr_tsb_done(tsb *b);
tv_taint mr_tv_taint_at(const tv *s, size_t byte);

/* template_print.c */
tv *mr_tv_str(tr *r, tv *v); /* str(v); a string is returned as it is */
void mr_tv_repr(tsb *b, const tv *v);
void mr_tv_real_text(double f, char out[40]); /* as Python's repr */
tv *mr_tv_escape(tr *r, tv *v);               /* HTML; what is safe stays */
typedef struct tv_json {
  bool ascii, sort;
  tv *indent;      /* string; NULL: one line */
  tv *item, *pair; /* separators */
} tv_json;
bool mr_tv_json(tsb *b, const tv *v, const tv_json *how);

/* template_ops.c */
tv *mr_op_binary(tr *r, tn_op op, tv *a, tv *b);
int mr_op_compare(tr *r, tn_op op, tv *a, tv *b);
tv *mr_op_negate(tr *r, tv *v, bool minus);
tv *mr_op_attr(tr *r, tv *of, tv *name, const tn_lookup *look);
tv *mr_op_item(tr *r, tv *of, tv *key);
tv *mr_op_slice(tr *r, tv *of, tv *from, tv *to, tv *step);
tv *mr_op_concat(tr *r, tv **items, int n);
tv *mr_op_path(tr *r, tv *of, tv *attribute); /* an attribute as filters name it: "a.b.0", 3 */

/* template_format.c */
tv *mr_fmt_percent(tr *r, tv *format, tv *args);
tv *mr_fmt_braces(tr *r, tv *format, tv_call *c);

/* tables; find gives NULL for an unknown name */
tn_lookup mr_tpl_methods(const char *name, size_t len);
const tv_func *mr_tpl_filter(const char *name, size_t len);
const tv_func *mr_tpl_test(const char *name, size_t len);
const tv_func *mr_tpl_func(const char *name, size_t len);
const tv_func *mr_tpl_find(const tv_func *table, size_t n, const char *name, size_t len);
extern const tv_func mr_tpl_text_filters[], mr_tpl_seq_filters[];
extern const size_t mr_tpl_n_text_filters, mr_tpl_n_seq_filters;
bool mr_tpl_arg_int(tr *r, const tv *v, int64_t missing, int64_t *out); /* v NULL: missing */
tv *mr_str_strip(tr *r, tv *s, tv *chars, int ends);                    /* ends: 1 left, 2 right */
tv *mr_str_replace(tr *r, tv *s, tv *old, tv *with, int64_t count);
tv *mr_str_case(tr *r, tv *s, int how);
tv *mr_str_lines(tr *r, tv *s, bool keep);
tv *mr_str_center(tr *r, tv *s, int64_t width, tv *fill, int where);
bool mr_str_parse_int(const tv *s, int base, tv_int *out);
bool mr_str_parse_real(const tv *s, double *out);
int64_t mr_str_find(const tv *s, const tv *what, size_t from, size_t to, bool last); /* byte offset,
                                                                                        -1 */

/* template_case.c */
enum { CASE_UPPER, CASE_LOWER, CASE_TITLE, CASE_CAPITAL, CASE_SWAP, CASE_FOLD, CASE_TITLE_FILTER };
bool mr_ch_space(uint32_t c);
bool mr_ch_word(uint32_t c);
bool mr_ch_printable(uint32_t c);
bool mr_ch_break(uint32_t c);                    /* ends a line for splitlines */
int mr_ch_class(const tv *s, const char *which); /* str.isalpha and friends by name: 1, 0 */

/* template_lex.c */
typedef enum tk_kind {
  TK_DATA,
  TK_PRINT_BEGIN,
  TK_PRINT_END,
  TK_BLOCK_BEGIN,
  TK_BLOCK_END,
  TK_NAME,
  TK_STRING,
  TK_INT,
  TK_FLOAT,
  TK_OP,
  TK_EOF
} tk_kind;

typedef struct tk {
  uint8_t kind;
  uint16_t op; /* OP: its character, or two of them as c1 << 8 | c2 */
  int line;
  const char *s; /* DATA, NAME, OP: the text */
  size_t len;
  tv *val; /* DATA, STRING, INT, FLOAT */
} tk;

/* Tokens, the last is EOF; in the arena of r. NULL: syntax error in r->err. */
tk *mr_tpl_lex(tr *r, const char *src, size_t len);

/* template_parse.c, template_expr.c */
typedef struct tp {
  tr *r; /* arena and error */
  mr_template *t;
  const tk *at;
  int depth;
  int uses;          /* MACRO_* names seen */
  bool soft;         /* inside an if: an unknown filter fails only when it is reached */
  int loops;         /* around this place, in the same macro */
  const tn *unknown; /* the first unknown filter or test that is not guarded by a condition */
} tp;

void *mr_tp_fail(tp *p, int line, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
void *mr_tp_unexpected(tp *p);
tn *mr_tp_node(tp *p, tn_kind kind, int line);
int mr_tp_sym(tp *p, const char *name, size_t len); /* -1: failed */
bool mr_tp_is_op(const tp *p, uint16_t op);
bool mr_tp_is_name(const tk *t, const char *name);
bool mr_tp_skip_name(tp *p, const char *name);
bool mr_tp_expect_op(tp *p, uint16_t op);
bool mr_tp_push(tp *p, tn ***list, int *n, int *cap, tn *item);
tn *mr_tp_expr(tp *p); /* one expression */
enum { TUPLE_NO_IF = 1, TUPLE_PARENS = 2, TUPLE_PRIMARY = 4, TUPLE_NSREF = 8 };
tn *mr_tp_tuple(tp *p, int how, const char *end_name);  /* expressions with commas between make a
                                                           tuple */
tn *mr_tp_filters(tp *p, tn *input, bool inline_first); /* | filter | filter */
bool mr_tp_template(tp *p);

#define OP2(a, b) ((uint16_t)((a) << 8 | (b)))

#endif
