/* The pre-tokenizers of a tokenizer.json: a text becomes pieces, each is cut further by the next
 * step. */
#include <string.h>
#include <utf8proc.h>

#include "io/mem.h"
#include "src/hf_tokenizer.h"

enum {
  SEQUENCE,
  BYTE_LEVEL,
  SPLIT,
  METASPACE,
  WHITESPACE,
  WHITESPACE_SPLIT,
  DIGITS,
  PUNCTUATION,
  BERT,
  DELIMITER
};

static const char *const names[] = {
    "Sequence",         "ByteLevel",          "Split",  "Metaspace",
    "Whitespace",       "WhitespaceSplit",    "Digits", "Punctuation",
    "BertPreTokenizer", "CharDelimiterSplit", NULL};

enum { REMOVED, ISOLATED, WITH_PREVIOUS, WITH_NEXT, CONTIGUOUS };

static const char *const behaviors[] = {"Removed",        "Isolated",   "MergedWithPrevious",
                                        "MergedWithNext", "Contiguous", NULL};

/* flags: the low bits are a behaviour */
enum { BEHAVIOR = 7, INVERT = 8, PREFIX_SPACE = 16, FIRST_ONLY = 32, CUT = 64 };

#define WORD_CHARS "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\x{200c}\\x{200d}"
#define WORD_PATTERN "[" WORD_CHARS "]+|[^" WORD_CHARS "\\s]+"
#define GPT2_PATTERN                                                                               \
  "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

/* ---- reading ---- */

static mr_code read_sequence(mr_hf *h, const json_t *o, int depth, mr_err *err) {
  json_t *list = json_object_get(o, "pretokenizers"), *item;
  size_t i;
  mr_code c =
      json_is_array(list)
          ? MR_OK
          : mr_err_set(err, MR_E_DATA, "pre-tokenizer Sequence has no list of pretokenizers");
  json_array_foreach(list, i, item) {
    if (!c)
      c = mr_hf_read_pre(h, item, depth + 1, err);
  }
  return c;
}

static mr_code read_behavior(const json_t *o, int fallback, mr_hf_step *s, mr_err *err) {
  const char *name = json_string_value(json_object_get(o, "behavior"));
  int k = name ? mr_hf_kind(name, behaviors, "behavior", err) : fallback;
  if (k < 0)
    return MR_E_DATA;
  s->flags |= (unsigned)k;
  return MR_OK;
}

static mr_code read_metaspace(const json_t *o, mr_hf_step *s, mr_err *err) {
  const char *scheme = json_string_value(json_object_get(o, "prepend_scheme"));
  bool prefix = mr_hf_flag(o, "add_prefix_space", true); /* how it was said before */
  if (scheme && strcmp(scheme, "always") && strcmp(scheme, "first") && strcmp(scheme, "never"))
    return mr_err_set(err, MR_E_DATA, "Metaspace: prepend_scheme \"%s\" is not supported", scheme);
  if (scheme ? strcmp(scheme, "never") != 0 : prefix)
    s->flags |= PREFIX_SPACE | (scheme && !strcmp(scheme, "first") ? FIRST_ONLY : 0);
  s->flags |= mr_hf_flag(o, "split", true) ? CUT | WITH_NEXT : 0;
  mr_code c = mr_hf_string(o, "replacement", MR_SPACE_MARK, &s->a, &s->a_len, err);
  if (!c && s->a_len > 4)
    c = mr_err_set(err, MR_E_DATA, "Metaspace: replacement is more than one character");
  return c;
}

static mr_code compile(mr_hf_step *s, const char *pattern, mr_err *err) {
  return mr_regex_open(&s->re, pattern, strlen(pattern), err);
}

static mr_code read_step(const json_t *o, mr_hf_step *s, mr_err *err) {
  mr_code c;
  switch (s->kind) {
  case BYTE_LEVEL:
    s->flags = ISOLATED | (mr_hf_flag(o, "add_prefix_space", true) ? PREFIX_SPACE : 0);
    return mr_hf_flag(o, "use_regex", true) ? compile(s, GPT2_PATTERN, err) : MR_OK;
  case SPLIT:
    s->flags = mr_hf_flag(o, "invert", false) ? INVERT : 0;
    c = mr_hf_pattern(json_object_get(o, "pattern"), s, err);
    return c ? c : read_behavior(o, ISOLATED, s, err);
  case METASPACE:
    return read_metaspace(o, s, err);
  case WHITESPACE:
    s->flags = REMOVED | INVERT;
    return compile(s, WORD_PATTERN, err);
  case DIGITS:
    s->flags = mr_hf_flag(o, "individual_digits", false) ? ISOLATED : CONTIGUOUS;
    return MR_OK;
  case PUNCTUATION:
    return read_behavior(o, ISOLATED, s, err);
  case DELIMITER:
    return mr_hf_string(o, "delimiter", NULL, &s->a, &s->a_len, err);
  default:
    return MR_OK; /* white space is removed */
  }
}

mr_code mr_hf_read_pre(mr_hf *h, const json_t *o, int depth, mr_err *err) {
  if (!o || json_is_null(o))
    return MR_OK;
  int kind = mr_hf_kind(mr_hf_type(o), names, "pre-tokenizer", err);
  if (kind < 0 || depth > MR_HF_MAX_NESTING)
    return mr_err_set(err, MR_E_DATA, "pre-tokenizers are nested too deeply");
  if (kind == SEQUENCE)
    return read_sequence(h, o, depth, err);
  mr_hf_step *s = mr_hf_step_add(&h->pre, kind, err);
  if (!s)
    return err->code;
  return read_step(o, s, err);
}

/* ---- cutting ---- */

/* Gathers the pieces of one piece, as a behaviour says. */
typedef struct cutter {
  mr_hf_work *w;
  const mr_hf_piece *piece;
  unsigned behavior;
  size_t at, from; /* seen so far; where the open piece starts */
  bool open, last; /* a piece is open; the last part was a match */
} cutter;

static bool add(mr_hf_pieces *p, mr_hf_piece piece) {
  if (!piece.len)
    return true;
  if (p->n == p->cap && !mr_mem_grow((void **)&p->p, &p->cap, p->n + 1, sizeof *p->p))
    return false;
  p->p[p->n++] = piece;
  return true;
}

/* Ends the open piece at `to`. */
static bool shut(cutter *c, size_t to) {
  bool was = c->open;
  c->open = false;
  return !was || add(&c->w->next, (mr_hf_piece){c->piece->at + c->from, to - c->from,
                                                c->piece->first && !c->from});
}

static bool begin(cutter *c, size_t from) {
  bool ok = shut(c, from);
  c->from = from;
  c->open = true;
  return ok;
}

/* The next part of the piece, up to `to`. */
static bool part(cutter *c, size_t to, bool match) {
  size_t from = c->at;
  bool joins, ok = true;
  switch (c->behavior) {
  case REMOVED:
    ok = match ? shut(c, from) : begin(c, from);
    break;
  case WITH_PREVIOUS:
    joins = match && !c->last && c->open;
    ok = joins || begin(c, from);
    break;
  case WITH_NEXT: /* a match opens a piece that the following part joins */
    joins = !match && c->last && c->open;
    ok = joins || begin(c, from);
    break;
  case CONTIGUOUS:
    joins = match == c->last && c->open;
    ok = joins || begin(c, from);
    break;
  default:
    ok = begin(c, from);
  }
  c->last = match;
  c->at = to;
  return ok;
}

/* A match at [from, to), after what lies before it. */
static bool match_at(cutter *c, size_t from, size_t to, bool invert) {
  return (c->at >= from || part(c, from, invert)) && part(c, to, !invert);
}

static bool finish(cutter *c, bool invert) {
  return (c->at >= c->piece->len || part(c, c->piece->len, invert)) && shut(c, c->piece->len);
}

static mr_code cut_regex(cutter *c, const mr_hf_step *step, mr_err *err) {
  const char *s = c->w->cur.s.data + c->piece->at;
  bool ok = true, invert = step->flags & INVERT;
  int found = 0;
  for (mr_match m = {0};
       ok && (found = mr_regex_next(step->re, &c->w->match, s, c->piece->len, &m, err)) > 0;)
    ok = match_at(c, m.from, m.to, invert);
  if (found < 0)
    return err && err->code ? err->code : MR_E_DATA;
  return ok && finish(c, invert) ? MR_OK : mr_hf_no_memory(err);
}

static mr_code cut_text(cutter *c, const mr_hf_step *step, mr_err *err) {
  const char *s = c->w->cur.s.data + c->piece->at;
  bool ok = true, invert = step->flags & INVERT;
  size_t len = c->piece->len, done = 0;
  for (const char *p;
       ok && step->a_len && (p = memmem(s + done, len - done, step->a, step->a_len));)
    ok = match_at(c, (size_t)(p - s), done = (size_t)(p - s) + step->a_len, invert);
  return ok && finish(c, invert) ? MR_OK : mr_hf_no_memory(err);
}

static bool is_numeric(uint32_t c) {
  utf8proc_category_t k = utf8proc_category((utf8proc_int32_t)c);
  return k == UTF8PROC_CATEGORY_ND || k == UTF8PROC_CATEGORY_NL || k == UTF8PROC_CATEGORY_NO;
}

static mr_code cut_class(cutter *c, bool (*is)(uint32_t), mr_err *err) {
  const char *s = c->w->cur.s.data + c->piece->at;
  bool ok = true;
  for (size_t at = 0, n; ok && at < c->piece->len; at += n) {
    uint32_t code;
    n = (size_t)mr_utf8_next(s + at, c->piece->len - at, &code);
    if (is(code))
      ok = match_at(c, at, at + n, false);
  }
  return ok && finish(c, false) ? MR_OK : mr_hf_no_memory(err);
}

/* What was written becomes what is read; texts too when they were written anew. */
static void turn(mr_hf_work *w, bool texts) {
  mr_hf_pieces t = w->cur;
  if (texts) {
    w->cur = w->next, w->next = t;
    mr_text_clear(&w->next.s);
  } else {
    w->cur.p = w->next.p, w->cur.n = w->next.n, w->cur.cap = w->next.cap;
    w->next.p = t.p, w->next.cap = t.cap;
  }
  w->next.n = 0;
}

static mr_code cut_all(const mr_hf_step *s, unsigned behavior, bool (*is)(uint32_t), mr_hf_work *w,
                       mr_err *err) {
  mr_code code = MR_OK;
  for (size_t i = 0; !code && i < w->cur.n; i++) {
    cutter c = {.w = w, .piece = &w->cur.p[i], .behavior = behavior};
    code = is ? cut_class(&c, is, err) : s->re ? cut_regex(&c, s, err) : cut_text(&c, s, err);
  }
  turn(w, false);
  return code;
}

/* Writes a piece anew: its text was added to next.s since `at`. */
static bool rewritten(mr_hf_work *w, size_t at, bool first) {
  return !w->next.s.failed && add(&w->next, (mr_hf_piece){at, w->next.s.len - at, first});
}

static mr_code prefix_space(const mr_hf_step *step, mr_hf_work *w, mr_err *err) {
  if (!(step->flags & PREFIX_SPACE))
    return MR_OK;
  bool ok = true;
  for (size_t i = 0; ok && i < w->cur.n; i++) {
    const mr_hf_piece *p = &w->cur.p[i];
    size_t at = w->next.s.len;
    if (w->cur.s.data[p->at] != ' ')
      mr_text_addc(&w->next.s, ' ');
    mr_text_add(&w->next.s, w->cur.s.data + p->at, p->len);
    ok = rewritten(w, at, p->first);
  }
  turn(w, true);
  return ok ? MR_OK : mr_hf_no_memory(err);
}

static mr_code byte_level(const mr_hf_step *step, mr_hf_work *w, mr_err *err) {
  mr_code c = prefix_space(step, w, err);
  if (!c && step->re)
    c = cut_all(step, ISOLATED, NULL, w, err);
  bool ok = !c;
  for (size_t i = 0; ok && i < w->cur.n; i++) {
    const mr_hf_piece *p = &w->cur.p[i];
    size_t at = w->next.s.len;
    for (size_t k = 0; k < p->len; k++)
      mr_hf_add_byte_char(&w->next.s, (uint8_t)w->cur.s.data[p->at + k]);
    ok = rewritten(w, at, p->first);
  }
  turn(w, true);
  return ok ? MR_OK : c ? c : mr_hf_no_memory(err);
}

static mr_code metaspace(const mr_hf_step *step, mr_hf_work *w, mr_err *err) {
  bool ok = true;
  for (size_t i = 0; ok && i < w->cur.n; i++) {
    const mr_hf_piece *p = &w->cur.p[i];
    const char *s = w->cur.s.data + p->at;
    size_t at = w->next.s.len, n = step->a_len;
    bool has = *s == ' ' || (p->len >= n && !memcmp(s, step->a, n));
    if (step->flags & PREFIX_SPACE && !has && (p->first || !(step->flags & FIRST_ONLY)))
      mr_text_add(&w->next.s, step->a, n);
    for (size_t k = 0; k < p->len; k++)
      if (s[k] == ' ')
        mr_text_add(&w->next.s, step->a, n);
      else
        mr_text_addc(&w->next.s, s[k]);
    ok = rewritten(w, at, p->first);
  }
  turn(w, true);
  if (!ok)
    return mr_hf_no_memory(err);
  return step->flags & CUT ? cut_all(step, WITH_NEXT, NULL, w, err) : MR_OK;
}

static mr_code run(const mr_hf_step *s, mr_hf_work *w, mr_err *err) {
  mr_code c;
  switch (s->kind) {
  case BYTE_LEVEL:
    return byte_level(s, w, err);
  case METASPACE:
    return metaspace(s, w, err);
  case WHITESPACE_SPLIT:
    return cut_all(s, REMOVED, mr_hf_is_space, w, err);
  case DIGITS:
    return cut_all(s, s->flags & BEHAVIOR, is_numeric, w, err);
  case PUNCTUATION:
    return cut_all(s, s->flags & BEHAVIOR, mr_hf_is_punct, w, err);
  case BERT:
    c = cut_all(s, REMOVED, mr_hf_is_space, w, err);
    return c ? c : cut_all(s, ISOLATED, mr_hf_is_punct, w, err);
  default:
    return cut_all(s, s->flags & BEHAVIOR, NULL, w, err);
  }
}

mr_code mr_hf_cut(const mr_hf *h, mr_hf_work *w, const char *s, size_t len, bool first,
                  mr_err *err) {
  mr_text_clear(&w->cur.s);
  mr_text_clear(&w->next.s);
  w->cur.n = w->next.n = 0;
  mr_text_add(&w->cur.s, s, len);
  mr_code c =
      !w->cur.s.failed && add(&w->cur, (mr_hf_piece){0, len, first}) ? MR_OK : mr_hf_no_memory(err);
  for (size_t i = 0; !c && i < h->pre.n; i++) {
    c = run(&h->pre.s[i], w, err);
    if (!c && w->cur.s.len > MR_HF_MAX_GROWN(len))
      c = mr_hf_grown(err);
  }
  return c;
}
