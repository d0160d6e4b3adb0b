#include "io/json.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

#include "io/mem.h"
#include "io/slurp.h"

/* jansson allocates through io/mem.h. Its reader goes wrong when an allocation fails (its lexer
 * drops a byte, and then may look for a closing quote behind its buffer), so a failed allocation
 * leaves the reader at once, and what it has allocated until then is found in a list and freed. */
typedef struct block { /* in front of each allocation of jansson */
  struct block *next, *prev;
} block;

static _Thread_local jmp_buf *leave;   /* set while jansson reads */
static _Thread_local block *of_reader; /* its blocks */
static _Thread_local bool ran_out;

static void *allocate(size_t n) {
  block *b = n < SIZE_MAX - sizeof *b ? mr_mem_alloc(sizeof *b + n, 1) : NULL;
  if (!b) {
    ran_out = true;
    if (leave)
      longjmp(*leave, 1);
    return NULL;
  }
  if (leave) {
    b->next = of_reader;
    if (b->next)
      b->next->prev = b;
    of_reader = b;
  }
  return b + 1;
}

static void release(void *p) {
  if (!p)
    return;
  block *b = (block *)p - 1;
  if (b->next)
    b->next->prev = b->prev;
  if (b->prev)
    b->prev->next = b->next;
  else if (of_reader == b)
    of_reader = b->next;
  mr_mem_free(b);
}

/* Before main: jansson must not free with one allocator what it took from another. */
__attribute__((constructor)) static void route_jansson(void) {
  json_set_alloc_funcs(allocate, release);
}

/* The value lives on: its blocks leave the list. Without a value they are freed. */
static void end_reading(bool keep) {
  while (of_reader) {
    block *b = of_reader;
    of_reader = b->next;
    b->next = b->prev = NULL;
    if (!keep)
      mr_mem_free(b);
  }
  leave = NULL;
}

static json_t *load(const char *s, size_t len, size_t flags, json_error_t *error) {
  jmp_buf here;
  if (setjmp(here)) {
    end_reading(false);
    return NULL;
  }
  leave = &here;
  json_t *v = json_loadb(s, len, flags, error);
  end_reading(true);
  return v;
}

json_t *mr_json_load(const char *s, size_t len) {
  return load(s, len, JSON_ALLOW_NUL, NULL);
}

bool mr_json_ran_out(void) {
  bool was = ran_out;
  ran_out = false;
  return was;
}

static int add_dumped(const char *bytes, size_t n, void *text) {
  mr_text_add(text, bytes, n);
  return 0;
}

char *mr_json_dumps(const json_t *v, size_t flags) {
  mr_text t = {0};
  if (json_dump_callback(v, add_dumped, &t, flags) == 0 && !t.failed && t.data)
    return t.data;
  mr_text_free(&t);
  return NULL;
}

/* Offset of the first bracket that nests deeper than MR_JSON_DEPTH, or -1. jansson has a limit of
 * its own, but its recursion there is for a main thread's stack. Text that is not JSON may be
 * counted wrongly; it fails later. */
static int64_t too_deep(const char *s, size_t len) {
  int depth = 0;
  bool quoted = false;
  for (size_t i = 0; i < len; i++) {
    char c = s[i];
    if (quoted) {
      if (c == '\\')
        i++;
      else if (c == '"')
        quoted = false;
    } else if (c == '"') {
      quoted = true;
    } else if (c == '[' || c == '{') {
      if (++depth > MR_JSON_DEPTH)
        return (int64_t)i;
    } else if (c == ']' || c == '}') {
      depth--;
    }
  }
  return -1;
}

static const size_t strict = JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL | JSON_DECODE_ANY;

json_t *mr_json_parse(const char *s, size_t len, bool *too_big, mr_err *err) {
  if (too_big)
    *too_big = false;
  int64_t at = mr_utf8_valid(s, len);
  if (at >= 0) {
    mr_err_at(err, MR_E_DATA, NULL, 0, at, "invalid UTF-8 at byte %" PRId64, at + 1);
    return NULL;
  }
  if ((at = too_deep(s, len)) >= 0) {
    mr_err_at(err, MR_E_DATA, NULL, 0, at, "JSON nested deeper than %d levels at byte %" PRId64,
              MR_JSON_DEPTH, at + 1);
    return NULL;
  }
  bool before = ran_out;
  ran_out = false;
  json_error_t e;
  json_t *v = load(s, len, strict, &e);
  bool no_memory = ran_out;
  ran_out |= before;
  if (v)
    return v;
  if (no_memory) {
    mr_err_set(err, MR_E_NOMEM, "out of memory while reading JSON");
    return NULL;
  }
  if (too_big)
    *too_big = json_error_code(&e) == json_error_numeric_overflow;
  mr_err_at(err, MR_E_DATA, NULL, e.line, e.position, "not valid JSON: %s at byte %d", e.text,
            e.position);
  return NULL;
}

json_t *mr_json_parse_lossy(const char *s, size_t len) {
  if (mr_utf8_valid(s, len) >= 0 || too_deep(s, len) >= 0)
    return NULL;
  return load(s, len, strict | JSON_DECODE_INT_AS_REAL, NULL);
}

size_t mr_json_bom(const char *s, size_t len) {
  return len >= 3 && !memcmp(s, "\xEF\xBB\xBF", 3) ? 3 : 0;
}

json_t *mr_json_read(const char *path, size_t limit, mr_err *err) {
  mr_text t = {0};
  json_t *v = NULL;
  if (mr_slurp_file(path, limit, &t, err) == MR_OK) {
    size_t bom = mr_json_bom(t.data, t.len);
    v = mr_json_parse(t.len ? t.data + bom : "", t.len - bom, NULL, err);
    if (!v && err && !err->file[0])
      mr_err_place(err, path, err->line, err->offset);
  }
  mr_text_free(&t);
  return v;
}

/* Bytes at s that need no escape: printable ASCII without quote and backslash. */
static size_t plain_run(const char *s, size_t len) {
  size_t n = 0;
  while (n < len) {
    unsigned char c = (unsigned char)s[n];
    if (c < 0x20 || c >= 0x7f || c == '"' || c == '\\')
      break;
    n++;
  }
  return n;
}

static void add_control(mr_text *t, unsigned char c) {
  static const char names[] = "btn.fr"; /* 8, 9, 10, -, 12, 13 */
  if (c >= 8 && c <= 13 && c != 11)
    mr_text_addf(t, "\\%c", names[c - 8]);
  else
    mr_text_addf(t, "\\u%04x", c);
}

void mr_json_add_string(mr_text *t, const char *s, size_t len) {
  mr_text_addc(t, '"');
  for (size_t i = 0; i < len;) {
    size_t run = plain_run(s + i, len - i);
    if (run) {
      mr_text_add(t, s + i, run);
      i += run;
      continue;
    }
    unsigned char c = (unsigned char)s[i];
    if (c == '"' || c == '\\') {
      mr_text_addc(t, '\\');
      mr_text_addc(t, (char)c);
      i++;
    } else if (c < 0x20 || c == 0x7f) {
      add_control(t, c);
      i++;
    } else {
      uint32_t code;
      i += (size_t)mr_utf8_next(s + i, len - i, &code);
      mr_text_add_code(t, code);
    }
  }
  mr_text_addc(t, '"');
}

void mr_json_add_int(mr_text *t, int64_t v) {
  mr_text_addf(t, "%" PRId64, v);
}

/* A real keeps its kind when it is read back: "1" becomes "1.0". */
static void add_number(mr_text *t, const char *s) {
  mr_text_adds(t, s);
  if (!strpbrk(s, ".eE"))
    mr_text_adds(t, ".0");
}

void mr_json_add_real(mr_text *t, double v) {
  if (!isfinite(v)) {
    mr_text_adds(t, "null");
    return;
  }
  char s[40];
  for (int digits = 15; digits <= 17; digits++) {
    snprintf(s, sizeof s, "%.*g", digits, v);
    if (strtod(s, NULL) == v)
      break;
  }
  add_number(t, s);
}

void mr_json_add_float(mr_text *t, float v) {
  if (!isfinite(v)) {
    mr_text_adds(t, "null");
    return;
  }
  char s[40];
  for (int digits = 6; digits <= 9; digits++) {
    snprintf(s, sizeof s, "%.*g", digits, (double)v);
    if (strtof(s, NULL) == v)
      break;
  }
  add_number(t, s);
}

static void add_object(mr_text *t, const json_t *v) {
  const char *sep = "";
  mr_text_addc(t, '{');
  /* jansson's iterators want a pointer that is not const; they change nothing */
  json_t *o = (json_t *)(uintptr_t)v;
  for (void *it = json_object_iter(o); it; it = json_object_iter_next(o, it)) {
    mr_text_adds(t, sep);
    mr_json_add_string(t, json_object_iter_key(it), json_object_iter_key_len(it));
    mr_text_addc(t, ':');
    mr_json_add(t, json_object_iter_value(it));
    sep = ",";
  }
  mr_text_addc(t, '}');
}

void mr_json_add(mr_text *t, const json_t *v) {
  switch (json_typeof(v)) {
  case JSON_OBJECT:
    add_object(t, v);
    break;
  case JSON_ARRAY:
    mr_text_addc(t, '[');
    for (size_t i = 0; i < json_array_size(v); i++) {
      if (i)
        mr_text_addc(t, ',');
      mr_json_add(t, json_array_get(v, i));
    }
    mr_text_addc(t, ']');
    break;
  case JSON_STRING:
    mr_json_add_string(t, json_string_value(v), json_string_length(v));
    break;
  case JSON_INTEGER:
    mr_json_add_int(t, json_integer_value(v));
    break;
  case JSON_REAL:
    mr_json_add_real(t, json_real_value(v));
    break;
  default:
    mr_text_adds(t, json_is_true(v) ? "true" : json_is_false(v) ? "false" : "null");
  }
}
