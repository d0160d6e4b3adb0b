#include "src/template_int.h"

#include <stdarg.h>
#include <string.h>

#include "io/mem.h"

#define CHUNK_BYTES ((size_t)16 << 10)

/* ---- arena ---- */

enum { TA_OK, TA_LIMIT, TA_NOMEM };

struct ta_chunk {
  ta_chunk *next;
  size_t bytes;
};

static bool add_chunk(ta *a, size_t need, int *why) {
  size_t bytes = a->total < CHUNK_BYTES ? CHUNK_BYTES : a->total; /* doubles */
  if (bytes > (size_t)4 << 20)
    bytes = (size_t)4 << 20;
  if (bytes < need + sizeof(ta_chunk) + 16)
    bytes = need + sizeof(ta_chunk) + 16;
  *why = TA_LIMIT;
  if (bytes > a->limit - a->total)
    return false;
  *why = TA_NOMEM;
  ta_chunk *c = mr_mem_resize(NULL, bytes, 1);
  if (!c)
    return false;
  c->next = a->head;
  c->bytes = bytes;
  a->head = c;
  a->total += bytes;
  a->at = (char *)c + ((sizeof *c + 15) & ~(size_t)15);
  a->end = (char *)c + bytes;
  return true;
}

/* Aligned to 16, not zeroed; NULL and why. */
static void *take(ta *a, size_t bytes, int *why) {
  *why = TA_LIMIT;
  if (bytes > a->limit)
    return NULL;
  bytes = bytes ? (bytes + 15) & ~(size_t)15 : 16;
  if ((size_t)(a->end - a->at) < bytes && !add_chunk(a, bytes, why))
    return NULL;
  void *p = a->at;
  a->at += bytes;
  return p;
}

void mr_ta_free(ta *a) {
  while (a->head) {
    ta_chunk *next = a->head->next;
    mr_mem_free(a->head);
    a->head = next;
  }
  a->at = a->end = NULL;
  a->total = 0;
}

/* ---- errors and limits of a render ---- */

void *mr_tr_fail(tr *r, const char *fmt, ...) {
  if (r->failed)
    return NULL;
  char text[1024];
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(text, sizeof text, fmt, ap);
  va_end(ap);
  r->failed = true;
  mr_err_at(r->err, MR_E_DATA, "chat template", r->line, -1, "%s", text);
  return NULL;
}

void *mr_tr_alloc(tr *r, size_t count, size_t size) {
  size_t bytes;
  int why = TA_LIMIT;
  void *p = mr_mem_mul(count, size, &bytes) ? take(r->arena, bytes, &why) : NULL;
  if (p)
    return p;
  if (why == TA_LIMIT)
    return mr_tr_fail(r, "needs more than %zu MiB of memory", r->arena->limit >> 20);
  if (!r->failed)
    mr_err_set(r->err, MR_E_NOMEM, "out of memory for the chat template");
  r->failed = true;
  return NULL;
}

bool mr_tr_charge(tr *r, size_t work) {
  r->steps += (int64_t)(work < (size_t)1 << 40 ? work : (size_t)1 << 40);
  if (r->steps <= r->limits.steps)
    return true;
  mr_tr_fail(r, "takes more than %lld steps", (long long)r->limits.steps);
  return false;
}

bool mr_tr_enter(tr *r) {
  if (++r->depth <= r->limits.depth)
    return true;
  mr_tr_fail(r, "is nested deeper than %d levels", r->limits.depth);
  return false;
}

void mr_tr_leave(tr *r) {
  r->depth--;
}

/* ---- making values ---- */

tv mr_tv_none = {.kind = TV_NONE};
tv mr_tv_true = {.kind = TV_BOOL, .b = true};
tv mr_tv_false = {.kind = TV_BOOL, .b = false};
tv mr_tv_empty = {.kind = TV_STR, .str = {.s = ""}};

tv *mr_tv_new(tr *r, tv_kind kind) {
  tv *v = mr_tr_alloc(r, 1, sizeof *v);
  if (!v)
    return NULL;
  memset(v, 0, sizeof *v);
  v->kind = (uint8_t)kind;
  return v;
}

tv *mr_tv_bool(bool b) {
  return b ? &mr_tv_true : &mr_tv_false;
}

tv *mr_tv_int(tr *r, tv_int i) {
  tv *v = mr_tv_new(r, TV_INT);
  if (v)
    v->i = i;
  return v;
}

tv *mr_tv_float(tr *r, double f) {
  tv *v = mr_tv_new(r, TV_FLOAT);
  if (v)
    v->f = f;
  return v;
}

tv *mr_tv_text(tr *r, const char *s, size_t len, tv_taint taint) {
  if (len == 0)
    return &mr_tv_empty;
  tv *v = mr_tv_new(r, TV_STR);
  if (!v)
    return NULL;
  v->taint = (uint8_t)taint;
  v->str.s = s;
  v->str.len = len;
  v->str.chars = -1;
  return v;
}

tv *mr_tv_sub(tr *r, const tv *s, size_t from, size_t len) {
  if (len == 0 && !s->safe)
    return &mr_tv_empty;
  tv *v = mr_tv_new(r, TV_STR);
  if (!v)
    return NULL;
  v->safe = s->safe;
  v->taint = s->taint;
  v->str.s = s->str.s + from;
  v->str.len = len;
  v->str.marks = s->str.marks ? s->str.marks + from : NULL;
  v->str.chars = s->str.chars == (int64_t)s->str.len ? (int64_t)len : -1;
  return v;
}

tv *mr_tv_seq(tr *r, tv_kind kind, size_t n) {
  tv *v = mr_tr_charge(r, n / 4) ? mr_tv_new(r, kind) : NULL;
  if (!v)
    return NULL;
  v->seq.items = mr_tr_alloc(r, n, sizeof *v->seq.items);
  v->seq.n = n;
  return v->seq.items ? v : NULL;
}

tv *mr_tv_pair_of(tr *r, tv *a, tv *b) {
  tv *v = mr_tv_seq(r, TV_TUPLE, 2);
  if (!v)
    return NULL;
  v->seq.items[0] = a;
  v->seq.items[1] = b;
  return v;
}

tv *mr_tv_undef(tr *r, tv *of, tv *name) {
  tv *v = mr_tv_new(r, TV_UNDEF);
  if (!v)
    return NULL;
  v->undef.of = of;
  v->undef.name = name;
  return v;
}

tv *mr_tv_undef_hint(tr *r, const char *hint) {
  tv *v = mr_tv_new(r, TV_UNDEF);
  if (v)
    v->undef.hint = hint;
  return v;
}

/* ---- from JSON ---- */

/* A string that begins with the byte FF, which no JSON text can hold, is an integer beyond 64 bits
 * (see mr_template_render). */
static tv *string_from_json(tr *r, json_t *j, tv_taint taint) {
  const char *s = json_string_value(j);
  size_t len = json_string_length(j);
  tv *v = mr_tv_text(r, s, len, taint);
  tv_int i;
  if (!v || len < 2 || (unsigned char)s[0] != 0xff)
    return v;
  tv digits = {.kind = TV_STR, .str = {.s = s + 1, .len = len - 1, .chars = -1}};
  if (!mr_str_parse_int(&digits, 10, &i))
    return mr_tr_fail(r, "an integer of the variables is too large");
  return mr_tv_int(r, i);
}

static tv *array_from_json(tr *r, json_t *j, tv_taint taint) {
  size_t n = json_array_size(j);
  tv *v = mr_tv_seq(r, TV_LIST, n);
  for (size_t i = 0; v && i < n; i++) {
    v->seq.items[i] = mr_tv_from_json(r, json_array_get(j, i), taint);
    if (!v->seq.items[i])
      return NULL;
  }
  return v;
}

static tv *object_from_json(tr *r, json_t *j, tv_taint taint) {
  tv *v = mr_tv_dict(r, TV_DICT, json_object_size(j));
  const char *key;
  size_t len;
  json_t *item;
  if (!v)
    return NULL;
  json_object_keylen_foreach(j, key, len, item) {
    tv *k = mr_tv_text(r, key, len, taint);
    tv *x = k ? mr_tv_from_json(r, item, taint) : NULL;
    if (!x || !mr_tv_dict_put(r, v, k, x))
      return NULL;
  }
  return v;
}

tv *mr_tv_from_json(tr *r, json_t *j, tv_taint taint) {
  tv *v = NULL;
  if (!mr_tr_enter(r))
    return NULL;
  switch (json_typeof(j)) {
  case JSON_OBJECT:
    v = object_from_json(r, j, taint);
    break;
  case JSON_ARRAY:
    v = array_from_json(r, j, taint);
    break;
  case JSON_STRING:
    v = string_from_json(r, j, taint);
    break;
  case JSON_INTEGER:
    v = mr_tv_int(r, json_integer_value(j));
    break;
  case JSON_REAL:
    v = mr_tv_float(r, json_real_value(j));
    break;
  case JSON_TRUE:
  case JSON_FALSE:
    v = mr_tv_bool(json_is_true(j));
    break;
  case JSON_NULL:
    v = &mr_tv_none;
    break;
  }
  mr_tr_leave(r);
  return v;
}

/* ---- strings ---- */

size_t mr_tv_chars(tv *s) {
  if (s->str.chars >= 0)
    return (size_t)s->str.chars;
  size_t n = 0;
  for (size_t i = 0; i < s->str.len; i++)
    n += ((unsigned char)s->str.s[i] & 0xc0) != 0x80;
  s->str.chars = (int64_t)n;
  return n;
}

size_t mr_tv_byte_at(tv *s, size_t ch) {
  if (mr_tv_chars(s) == s->str.len)
    return ch;
  size_t i = 0;
  while (i < s->str.len) {
    if (((unsigned char)s->str.s[i] & 0xc0) != 0x80 && ch-- == 0)
      break;
    i++;
  }
  return i;
}

tv_taint mr_tv_taint_at(const tv *s, size_t byte) {
  if (s->taint != TAINT_SOME)
    return (tv_taint)s->taint;
  return s->str.marks[byte] ? TAINT_ALL : TAINT_NONE;
}

bool mr_tv_is_str(const tv *v, const char *s) {
  size_t len = strlen(s);
  return v->kind == TV_STR && v->str.len == len && memcmp(v->str.s, s, len) == 0;
}

void mr_tsb_init(tsb *b, tr *r) {
  *b = (tsb){.r = r, .all = true};
}

/* Room for `more` bytes; a builder that is the newest thing in its arena grows in place. */
static bool room(tsb *b, size_t more) {
  tr *r = b->r;
  if (b->failed || more > r->limits.output - b->len) {
    if (!b->failed)
      mr_tr_fail(r, "makes a text longer than %zu bytes", r->limits.output);
    b->failed = true;
    return false;
  }
  if (b->len + more <= b->cap)
    return true;
  size_t cap = b->cap * 2 > b->len + more ? b->cap * 2 : b->len + more + 32;
  char *s = mr_tr_charge(r, cap / 64) ? mr_tr_alloc(r, cap, 1) : NULL;
  uint8_t *marks = s && b->marks ? mr_tr_alloc(r, cap, 1) : NULL;
  if (!s || (b->marks && !marks)) {
    b->failed = true;
    return false;
  }
  if (b->len)
    memcpy(s, b->s, b->len);
  if (b->marks)
    memcpy(marks, b->marks, b->len);
  b->s = s;
  b->marks = marks;
  b->cap = cap;
  return true;
}

/* Marks are kept only once clean and tainted bytes meet. */
static bool need_marks(tsb *b) {
  if (b->marks)
    return true;
  b->marks = mr_tr_alloc(b->r, b->cap, 1);
  if (!b->marks) {
    b->failed = true;
    return false;
  }
  memset(b->marks, b->some, b->len);
  return true;
}

void mr_tsb_add(tsb *b, const char *s, size_t len, tv_taint taint) {
  if (!len || !room(b, len))
    return;
  bool dirty = taint != TAINT_NONE;
  if (b->len && !b->marks && b->some != dirty && !need_marks(b))
    return;
  memcpy(b->s + b->len, s, len);
  if (b->marks)
    memset(b->marks + b->len, dirty, len);
  b->len += len;
  b->some |= dirty;
  b->all &= dirty;
}

void mr_tsb_adds(tsb *b, const char *s, tv_taint taint) {
  mr_tsb_add(b, s, strlen(s), taint);
}

void mr_tsb_sub(tsb *b, const tv *s, size_t from, size_t len) {
  if (s->taint != TAINT_SOME) {
    mr_tsb_add(b, s->str.s + from, len, (tv_taint)s->taint);
    return;
  }
  for (size_t i = from; i < from + len;) { /* runs of equal marks */
    size_t end = i;
    while (end < from + len && s->str.marks[end] == s->str.marks[i])
      end++;
    mr_tsb_add(b, s->str.s + i, end - i, s->str.marks[i] ? TAINT_ALL : TAINT_NONE);
    i = end;
  }
}

void mr_tsb_val(tsb *b, const tv *s) {
  mr_tsb_sub(b, s, 0, s->str.len);
}

void mr_tsb_code(tsb *b, uint32_t c, tv_taint taint) {
  char u[4];
  size_t n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
  if (n == 1) {
    u[0] = (char)c;
  } else {
    static const unsigned char lead[] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (size_t i = n - 1; i > 0; i--, c >>= 6)
      u[i] = (char)(0x80 | (c & 0x3f));
    u[0] = (char)(lead[n] | c);
  }
  mr_tsb_add(b, u, n, taint);
}

tv *mr_tsb_done(tsb *b) {
  if (b->failed)
    return NULL;
  tv_taint taint = !b->some ? TAINT_NONE : b->all ? TAINT_ALL : TAINT_SOME;
  tv *v = mr_tv_text(b->r, b->s, b->len, taint);
  if (v && taint == TAINT_SOME)
    v->str.marks = b->marks;
  return v;
}
