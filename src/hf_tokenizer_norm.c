/* The normalizers of a tokenizer.json. */
#include <string.h>
#include <utf8proc.h>

#include "io/mem.h"
#include "src/charsmap.h"
#include "src/hf_tokenizer.h"

enum {
  SEQUENCE,
  NFC,
  NFD,
  NFKC,
  NFKD,
  LOWERCASE,
  STRIP,
  STRIP_ACCENTS,
  REPLACE,
  PREPEND,
  BERT,
  PRECOMPILED,
  BYTE_LEVEL,
  NMT
};

static const char *const names[] = {
    "Sequence",       "NFC",         "NFD",          "NFKC",    "NFKD",
    "Lowercase",      "Strip",       "StripAccents", "Replace", "Prepend",
    "BertNormalizer", "Precompiled", "ByteLevel",    "Nmt",     NULL};

enum { LEFT = 1, RIGHT = 2 };                            /* Strip */
enum { CLEAN = 1, CHINESE = 2, ACCENTS = 4, LOWER = 8 }; /* BertNormalizer */

/* ---- reading ---- */

static mr_code read_sequence(mr_hf *h, const json_t *o, int depth, mr_err *err) {
  json_t *list = json_object_get(o, "normalizers"), *item;
  size_t i;
  mr_code c = json_is_array(list)
                  ? MR_OK
                  : mr_err_set(err, MR_E_DATA, "normalizer Sequence has no list of normalizers");
  json_array_foreach(list, i, item) {
    if (!c)
      c = mr_hf_read_norm(h, item, depth + 1, err);
  }
  return c;
}

static mr_code read_bert(const json_t *o, mr_hf_step *s) {
  bool lower = mr_hf_flag(o, "lowercase", true);
  bool accents = mr_hf_flag(o, "strip_accents", lower);
  s->flags = (mr_hf_flag(o, "clean_text", true) ? CLEAN : 0) |
             (mr_hf_flag(o, "handle_chinese_chars", true) ? CHINESE : 0) | (accents ? ACCENTS : 0) |
             (lower ? LOWER : 0);
  return MR_OK;
}

static mr_code read_charsmap(const json_t *o, mr_hf_step *s, mr_err *err) {
  const json_t *map = json_object_get(o, "precompiled_charsmap");
  mr_text raw = {0};
  mr_code c = MR_OK;
  if (!json_is_string(map) ||
      !mr_base64_decode(json_string_value(map), json_string_length(map), &raw))
    c = raw.failed ? mr_hf_no_memory(err)
                   : mr_err_set(err, MR_E_DATA,
                                "normalizer Precompiled: precompiled_charsmap is not base64");
  if (!c)
    c = mr_charsmap_check(raw.data ? raw.data : "", raw.len, err);
  if (c) {
    mr_text_free(&raw);
    return c;
  }
  s->a = raw.data, s->a_len = raw.len;
  return MR_OK;
}

mr_code mr_hf_read_norm(mr_hf *h, const json_t *o, int depth, mr_err *err) {
  if (!o || json_is_null(o))
    return MR_OK;
  int kind = mr_hf_kind(mr_hf_type(o), names, "normalizer", err);
  if (kind < 0 || depth > MR_HF_MAX_NESTING)
    return mr_err_set(err, MR_E_DATA, "normalizers are nested too deeply");
  if (kind == SEQUENCE)
    return read_sequence(h, o, depth, err);
  mr_hf_step *s = mr_hf_step_add(&h->norm, kind, err);
  if (!s)
    return err->code;
  switch (kind) {
  case STRIP:
    s->flags = (mr_hf_flag(o, "strip_left", true) ? LEFT : 0) |
               (mr_hf_flag(o, "strip_right", true) ? RIGHT : 0);
    return MR_OK;
  case REPLACE: {
    mr_code c = mr_hf_pattern(json_object_get(o, "pattern"), s, err);
    return c ? c : mr_hf_string(o, "content", NULL, &s->b, &s->b_len, err);
  }
  case PREPEND:
    return mr_hf_string(o, "prepend", NULL, &s->a, &s->a_len, err);
  case BERT:
    return read_bert(o, s);
  case PRECOMPILED:
    return read_charsmap(o, s, err);
  default:
    return MR_OK;
  }
}

/* ---- running ---- */

typedef struct runner {
  const mr_hf_text *in;
  mr_hf_text *out;
  size_t limit; /* bytes of out */
} runner;

/* Whether any byte of in[from, to) is marked. */
static bool marked(const mr_hf_text *t, size_t from, size_t to) {
  return t->marked && memchr(t->plain.data + from, 1, to - from) != NULL;
}

/* Marks what was added to out since `at` as the text it came from. */
static void follow(const runner *r, size_t from, size_t to) {
  mr_hf_text *o = r->out;
  if (!o->marked || o->s.failed)
    return;
  char mark = marked(r->in, from, to);
  while (o->plain.len < o->s.len && !o->plain.failed)
    mr_text_addc(&o->plain, mark);
}

static void keep(const runner *r, size_t from, size_t to) {
  mr_text_add(&r->out->s, r->in->s.data + from, to - from);
  if (r->out->marked)
    mr_text_add(&r->out->plain, r->in->plain.data + from, to - from);
}

/* Decomposes and, as the options say, composes in[from, to). */
static void map(const runner *r, size_t from, size_t to, utf8proc_option_t options) {
  const utf8proc_uint8_t *s = (const utf8proc_uint8_t *)r->in->s.data + from;
  utf8proc_ssize_t len = (utf8proc_ssize_t)(to - from);
  utf8proc_ssize_t n = utf8proc_decompose(s, len, NULL, 0, options);
  utf8proc_int32_t *codes = n < 0 ? NULL : mr_mem_alloc((size_t)n + 1, sizeof *codes);
  if (!codes) {
    r->out->s.failed = true;
    return;
  }
  n = utf8proc_decompose(s, len, codes, n, options);
  n = n < 0 ? n : utf8proc_reencode(codes, n, options);
  if (n < 0)
    r->out->s.failed = true;
  else
    mr_text_add(&r->out->s, codes, (size_t)n);
  mr_mem_free(codes);
  follow(r, from, to);
}

/* The four normal forms. ASCII stays as it is but for the last character before another: a mark
 * may join it. */
static void to_form(const runner *r, utf8proc_option_t options) {
  const char *s = r->in->s.data;
  size_t len = r->in->s.len;
  for (size_t at = 0, end; at < len; at = end) {
    for (end = at; end < len && (uint8_t)s[end] < 0x80; end++)
      ;
    end -= end < len && end > at;
    if (end > at) {
      keep(r, at, end);
      continue;
    }
    for (end = at + 1; end < len && (uint8_t)s[end] >= 0x80; end++)
      ;
    map(r, at, end, options);
  }
}

static bool is_mark(uint32_t c, bool only_nonspacing) {
  int k = utf8proc_category((utf8proc_int32_t)c);
  return k == UTF8PROC_CATEGORY_MN ||
         (!only_nonspacing && (k == UTF8PROC_CATEGORY_MC || k == UTF8PROC_CATEGORY_ME));
}

/* What becomes of one character: a few characters in code[], how many is returned. */
typedef int (*change_fn)(uint32_t c, const mr_hf_step *s, uint32_t code[4]);

static void each(const runner *r, const mr_hf_step *step, change_fn change) {
  const char *s = r->in->s.data;
  for (size_t at = 0, n; at < r->in->s.len; at += n) {
    uint32_t c, code[4];
    n = (size_t)mr_utf8_next(s + at, r->in->s.len - at, &c);
    int k = change(c, step, code);
    if (k == 1 && code[0] == c) {
      keep(r, at, at + n);
      continue;
    }
    for (int i = 0; i < k; i++)
      mr_text_add_code(&r->out->s, code[i]);
    follow(r, at, at + n);
  }
}

static int lower(uint32_t c, const mr_hf_step *s, uint32_t code[4]) {
  (void)s;
  if (c == 0x130) /* the only one that becomes two */
    return code[0] = 'i', code[1] = 0x307, 2;
  code[0] = (uint32_t)utf8proc_tolower((utf8proc_int32_t)c);
  return 1;
}

static int no_accent(uint32_t c, const mr_hf_step *s, uint32_t code[4]) {
  code[0] = c;
  return !is_mark(c, s->kind == BERT);
}

static bool is_chinese(uint32_t c) {
  return (c >= 0x4e00 && c <= 0x9fff) || (c >= 0x3400 && c <= 0x4dbf) ||
         (c >= 0x20000 && c <= 0x2a6df) || (c >= 0x2a700 && c <= 0x2b73f) ||
         (c >= 0x2b740 && c <= 0x2b81f) || (c >= 0x2b920 && c <= 0x2ceaf) ||
         (c >= 0xf900 && c <= 0xfaff) || (c >= 0x2f800 && c <= 0x2fa1f);
}

static bool is_control(uint32_t c) {
  switch (utf8proc_category((utf8proc_int32_t)c)) {
  case UTF8PROC_CATEGORY_CC:
  case UTF8PROC_CATEGORY_CF:
  case UTF8PROC_CATEGORY_CO:
    return c != '\t' && c != '\n' && c != '\r';
  default:
    return false;
  }
}

static int clean(uint32_t c, const mr_hf_step *s, uint32_t code[4]) {
  (void)s;
  code[0] = mr_hf_is_space(c) ? ' ' : c;
  return c && c != 0xfffd && !is_control(c);
}

static int space_chinese(uint32_t c, const mr_hf_step *s, uint32_t code[4]) {
  (void)s;
  bool chinese = is_chinese(c);
  code[0] = chinese ? ' ' : c;
  code[1] = c, code[2] = ' ';
  return chinese ? 3 : 1;
}

/* Characters that SentencePiece's older rule takes out or makes a space. */
static int nmt(uint32_t c, const mr_hf_step *s, uint32_t code[4]) {
  (void)s;
  bool out = (c >= 1 && c <= 8) || c == 0xb || (c >= 0xe && c <= 0x1f) || c == 0x7f || c == 0x8f ||
             c == 0x9f;
  bool space = c == 9 || c == 0xa || c == 0xc || c == 0xd || c == 0x1680 ||
               (c >= 0x200b && c <= 0x200f) || c == 0x2028 || c == 0x2029 || c == 0x2581 ||
               c == 0xfeff || c == 0xfffd;
  code[0] = space ? ' ' : c;
  return !out;
}

static void strip(const runner *r, unsigned flags) {
  const char *s = r->in->s.data;
  size_t from = 0, to = r->in->s.len, at = 0, last = 0;
  bool any = false;
  for (size_t n; at < to; at += n) {
    uint32_t c;
    n = (size_t)mr_utf8_next(s + at, to - at, &c);
    if (mr_hf_is_space(c))
      continue;
    if (!any)
      from = at;
    any = true, last = at + n;
  }
  if (!any)
    return;
  keep(r, flags & LEFT ? from : 0, flags & RIGHT ? last : to);
}

static bool put(const runner *r, const mr_hf_step *step, size_t from, size_t to) {
  mr_text_add(&r->out->s, step->b, step->b_len);
  follow(r, from, to);
  return r->out->s.len <= r->limit;
}

static mr_code replace(const runner *r, const mr_hf_step *step, mr_regex_scratch *scratch,
                       mr_err *err) {
  const char *s = r->in->s.data;
  size_t len = r->in->s.len, done = 0;
  if (!step->re) {
    for (const char *p; step->a_len && (p = memmem(s + done, len - done, step->a, step->a_len));) {
      size_t at = (size_t)(p - s);
      keep(r, done, at);
      if (!put(r, step, at, done = at + step->a_len))
        return mr_hf_grown(err);
    }
    keep(r, done, len);
    return MR_OK;
  }
  int found;
  for (mr_match m = {0}; (found = mr_regex_next(step->re, scratch, s, len, &m, err)) > 0;) {
    keep(r, done, m.from);
    if (!put(r, step, m.from, done = m.to))
      return mr_hf_grown(err);
  }
  keep(r, done, len);
  return found < 0 ? (err && err->code ? err->code : MR_E_DATA) : MR_OK;
}

static void bytes(const runner *r) {
  for (size_t i = 0; i < r->in->s.len; i++) {
    mr_hf_add_byte_char(&r->out->s, (uint8_t)r->in->s.data[i]);
    follow(r, i, i + 1);
  }
}

/* A grapheme of up to five bytes is looked up whole, else its characters one by one: so does the
 * library. */
static void charsmap(const runner *r, const mr_hf_step *step) {
  const char *s = r->in->s.data;
  size_t len = r->in->s.len;
  for (size_t at = 0, end; at < len; at = end) {
    utf8proc_int32_t state = 0;
    uint32_t c, d;
    end = at + (size_t)mr_utf8_next(s + at, len - at, &c);
    for (; end < len; c = d) {
      size_t n = (size_t)mr_utf8_next(s + end, len - end, &d);
      if (utf8proc_grapheme_break_stateful((utf8proc_int32_t)c, (utf8proc_int32_t)d, &state))
        break;
      end += n;
    }
    mr_str to;
    bool whole = end - at < 6 && mr_charsmap_find(step->a, step->a_len, s + at, end - at, &to);
    if (whole)
      mr_text_add(&r->out->s, to.s, to.len);
    for (size_t i = at, n; !whole && i < end; i += n) {
      n = (size_t)mr_utf8_next(s + i, end - i, &c);
      if (mr_charsmap_find(step->a, step->a_len, s + i, n, &to))
        mr_text_add(&r->out->s, to.s, to.len);
      else
        mr_text_add(&r->out->s, s + i, n);
    }
    follow(r, at, end);
  }
}

static void clear(mr_hf_text *t, bool is_marked) {
  mr_text_clear(&t->s);
  mr_text_clear(&t->plain);
  t->marked = is_marked;
}

/* The result becomes the input of what follows. */
static void turn(mr_hf_work *w) {
  mr_hf_text t = w->text;
  w->text = w->spare;
  w->spare = t;
  clear(&w->spare, w->text.marked);
}

/* Memory ran out while it was written: its marks may end before it does. */
static bool lost(const mr_hf_text *t) {
  return t->s.failed || t->plain.failed;
}

static void bert(mr_hf_work *w, const mr_hf_step *step) {
  runner r = {&w->text, &w->spare, SIZE_MAX};
  if (step->flags & CLEAN)
    each(&r, step, clean), turn(w);
  if (step->flags & CHINESE && !lost(&w->text))
    each(&r, step, space_chinese), turn(w);
  if (step->flags & ACCENTS && !lost(&w->text))
    to_form(&r, UTF8PROC_STABLE | UTF8PROC_DECOMPOSE), turn(w);
  if (step->flags & ACCENTS && !lost(&w->text))
    each(&r, step, no_accent), turn(w);
  if (step->flags & LOWER && !lost(&w->text))
    each(&r, step, lower), turn(w);
}

static mr_code run(const mr_hf_step *s, mr_hf_work *w, size_t limit, mr_err *err) {
  runner r = {&w->text, &w->spare, limit};
  mr_code c = MR_OK;
  switch (s->kind) {
  case NFC:
    to_form(&r, UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    break;
  case NFD:
    to_form(&r, UTF8PROC_STABLE | UTF8PROC_DECOMPOSE);
    break;
  case NFKC:
    to_form(&r, UTF8PROC_STABLE | UTF8PROC_COMPOSE | UTF8PROC_COMPAT);
    break;
  case NFKD:
    to_form(&r, UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT);
    break;
  case LOWERCASE:
    each(&r, s, lower);
    break;
  case STRIP:
    strip(&r, s->flags);
    break;
  case STRIP_ACCENTS:
    each(&r, s, no_accent);
    break;
  case REPLACE:
    c = replace(&r, s, &w->match, err);
    break;
  case PREPEND:
    mr_text_add(&r.out->s, s->a, s->a_len);
    follow(&r, 0, 1);
    keep(&r, 0, r.in->s.len);
    break;
  case BERT:
    bert(w, s);
    return MR_OK;
  case PRECOMPILED:
    charsmap(&r, s);
    break;
  case BYTE_LEVEL:
    bytes(&r);
    break;
  default:
    each(&r, s, nmt);
  }
  turn(w);
  return c;
}

mr_code mr_hf_normalize(const mr_hf *h, mr_hf_work *w, mr_err *err) {
  clear(&w->spare, w->text.marked);
  size_t limit = MR_HF_MAX_GROWN(w->text.s.len);
  mr_code c = MR_OK;
  for (size_t i = 0; !c && i < h->norm.n && w->text.s.len; i++) {
    c = run(&h->norm.s[i], w, limit, err);
    if (lost(&w->text))
      break;
    if (!c && w->text.s.len > limit)
      c = mr_hf_grown(err);
  }
  if (!c && lost(&w->text))
    c = mr_hf_no_memory(err);
  return c;
}
