/* The post-processors and the decoders of a tokenizer.json. */
#include <string.h>

#include "io/mem.h"
#include "src/hf_tokenizer.h"

/* ---- post-processors: what stands before and after a text ---- */

enum { SEQUENCE, TEMPLATE, BYTE_LEVEL, BERT, ROBERTA };

static const char *const post_names[] = {"Sequence",       "TemplateProcessing", "ByteLevel",
                                         "BertProcessing", "RobertaProcessing",  NULL};

static mr_code push(mr_ids *list, const json_t *id, int32_t n, mr_err *err) {
  json_int_t i = json_is_integer(id) ? json_integer_value(id) : -1;
  if (i < 0 || i >= n)
    return mr_err_set(err, MR_E_DATA, "post-processor: %lld is no token id (there are %d)",
                      (long long)i, n);
  return mr_ids_push(list, (int32_t)i) ? MR_OK : mr_hf_no_memory(err);
}

/* The ids of a special token that a template names. */
static mr_code push_named(const json_t *o, const json_t *part, int32_t n, mr_ids *list,
                          mr_err *err) {
  const char *name = json_string_value(json_object_get(part, "id"));
  json_t *all = json_object_get(o, "special_tokens"), *id;
  json_t *token = name ? json_object_get(all, name) : NULL, *ids = json_object_get(token, "ids");
  mr_code c = json_is_array(ids) ? MR_OK
                                 : mr_err_set(err, MR_E_DATA,
                                              "TemplateProcessing: no ids for the special token %s",
                                              name ? name : "");
  size_t i;
  json_array_foreach(ids, i, id) {
    if (!c)
      c = push(list, id, n, err);
  }
  return c;
}

static mr_code read_template(const mr_vocab *v, const json_t *o, mr_ids *before, mr_ids *after,
                             mr_err *err) {
  json_t *list = json_object_get(o, "single"), *item;
  mr_ids *to = before;
  mr_code c = MR_OK;
  size_t i;
  json_array_foreach(list, i, item) {
    json_t *special = json_object_get(item, "SpecialToken");
    json_t *text = json_object_get(item, "Sequence");
    if (c)
      break;
    if (special)
      c = push_named(o, special, v->n, to, err);
    else if (text && to == before)
      to = after;
    else
      c = mr_err_set(err, MR_E_DATA, "TemplateProcessing: \"single\" must name the text once");
  }
  if (!c && to == before)
    c = mr_err_set(err, MR_E_DATA, "TemplateProcessing: \"single\" does not name the text");
  return c;
}

/* more before list (front) or after it. */
static mr_code join(mr_ids *list, const mr_ids *more, bool front, mr_err *err) {
  mr_ids all = {0};
  const mr_ids *a = front ? more : list, *b = front ? list : more;
  int ok = 1;
  for (size_t i = 0; ok && i < a->n; i++)
    ok = mr_ids_push(&all, a->ids[i]);
  for (size_t i = 0; ok && i < b->n; i++)
    ok = mr_ids_push(&all, b->ids[i]);
  mr_ids_free(ok ? list : &all);
  if (ok)
    *list = all;
  return ok ? MR_OK : mr_hf_no_memory(err);
}

static mr_code read_sequence(mr_vocab *v, const json_t *o, int depth, mr_err *err) {
  json_t *list = json_object_get(o, "processors"), *item;
  size_t i;
  mr_code c = json_is_array(list)
                  ? MR_OK
                  : mr_err_set(err, MR_E_DATA, "post-processor Sequence has no list of processors");
  json_array_foreach(list, i, item) {
    if (!c)
      c = mr_hf_read_post(v, item, depth + 1, err);
  }
  return c;
}

mr_code mr_hf_read_post(mr_vocab *v, const json_t *o, int depth, mr_err *err) {
  if (!o || json_is_null(o))
    return MR_OK;
  int kind = mr_hf_kind(mr_hf_type(o), post_names, "post-processor", err);
  if (kind < 0 || depth > MR_HF_MAX_NESTING)
    return mr_err_set(err, MR_E_DATA, "post-processors are nested too deeply");
  if (kind == SEQUENCE)
    return read_sequence(v, o, depth, err);
  if (kind == BYTE_LEVEL)
    return MR_OK;
  mr_ids before = {0}, after = {0};
  mr_code c;
  if (kind == TEMPLATE) {
    c = read_template(v, o, &before, &after, err);
  } else {
    c = push(&before, json_array_get(json_object_get(o, "cls"), 1), v->n, err);
    c = c ? c : push(&after, json_array_get(json_object_get(o, "sep"), 1), v->n, err);
  }
  c = c ? c : join(&v->hf->prefix, &before, true, err);
  c = c ? c : join(&v->hf->suffix, &after, false, err);
  mr_ids_free(&before);
  mr_ids_free(&after);
  return c;
}

/* ---- decoders ---- */

enum { D_SEQUENCE, D_BYTE_LEVEL, D_METASPACE, D_BYTES, D_FUSE, D_REPLACE, D_STRIP, D_WORDPIECE };

static const char *const dec_names[] = {"Sequence",     "ByteLevel", "Metaspace",
                                        "ByteFallback", "Fuse",      "Replace",
                                        "Strip",        "WordPiece", NULL};

enum { KEEPS_FIRST = 1, CLEANUP = 2, WHOLE = 4 }; /* WHOLE: after Fuse, of the text as one */

static mr_code read_steps(mr_hf *h, const json_t *o, int depth, mr_err *err) {
  json_t *list = json_object_get(o, "decoders"), *item;
  size_t i;
  mr_code c = json_is_array(list)
                  ? MR_OK
                  : mr_err_set(err, MR_E_DATA, "decoder Sequence has no list of decoders");
  json_array_foreach(list, i, item) {
    if (!c)
      c = mr_hf_read_dec(h, item, depth + 1, err);
  }
  return c;
}

static bool fused(const mr_hf *h) {
  for (size_t i = 0; i < h->dec.n; i++)
    if (h->dec.s[i].kind == D_FUSE)
      return true;
  return false;
}

/* Strip's counts lie in the lengths. */
static mr_code read_strip(const mr_hf *h, const json_t *o, mr_hf_step *s, mr_err *err) {
  json_int_t start = json_integer_value(json_object_get(o, "start"));
  json_int_t stop = json_integer_value(json_object_get(o, "stop"));
  bool whole = fused(h);
  if (start < 0 || stop < 0 || start > 1000 || stop > 1000 || (whole && (start > 1 || stop)))
    return mr_err_set(err, MR_E_DATA, "decoder Strip: start %lld, stop %lld is not supported%s",
                      (long long)start, (long long)stop, whole ? " after Fuse" : "");
  mr_code c = mr_hf_string(o, "content", NULL, &s->a, &s->a_len, err);
  size_t n = s->a_len;
  if (!c && (!n || mr_utf8_whole(s->a, n) != n))
    c = mr_err_set(err, MR_E_DATA, "decoder Strip: content is no character");
  s->b_len = (size_t)(start | stop << 16);
  s->flags = whole ? WHOLE : 0;
  return c;
}

static mr_code read_replace(const json_t *o, mr_hf_step *s, mr_err *err) {
  mr_code c = mr_hf_pattern(json_object_get(o, "pattern"), s, err);
  if (!c && s->re)
    c = mr_err_set(err, MR_E_DATA, "decoder Replace: a regular expression is not supported");
  return c ? c : mr_hf_string(o, "content", NULL, &s->b, &s->b_len, err);
}

mr_code mr_hf_read_dec(mr_hf *h, const json_t *o, int depth, mr_err *err) {
  if (!o || json_is_null(o))
    return MR_OK;
  int kind = mr_hf_kind(mr_hf_type(o), dec_names, "decoder", err);
  if (kind < 0 || depth > MR_HF_MAX_NESTING)
    return mr_err_set(err, MR_E_DATA, "decoders are nested too deeply");
  if (kind == D_SEQUENCE)
    return read_steps(h, o, depth, err);
  mr_hf_step *s = mr_hf_step_add(&h->dec, kind, err);
  if (!s)
    return err->code;
  const char *scheme;
  switch (kind) {
  case D_METASPACE:
    scheme = json_string_value(json_object_get(o, "prepend_scheme"));
    if (scheme ? !strcmp(scheme, "never") : !mr_hf_flag(o, "add_prefix_space", true))
      s->flags = KEEPS_FIRST;
    return mr_hf_string(o, "replacement", MR_SPACE_MARK, &s->a, &s->a_len, err);
  case D_REPLACE:
    return read_replace(o, s, err);
  case D_STRIP:
    return read_strip(h, o, s, err);
  case D_WORDPIECE:
    s->flags = mr_hf_flag(o, "cleanup", true) ? CLEANUP : 0;
    return mr_hf_string(o, "prefix", "##", &s->a, &s->a_len, err);
  default:
    return MR_OK;
  }
}

#define MAX_TOKEN_TEXT ((size_t)1 << 20) /* bytes: decoders that make more of it are cut short */

/* Changes every `from` in out since `at`. */
static void swap(mr_text *out, size_t at, const char *from, size_t n, const char *to, size_t m) {
  if (!n || out->failed || !memmem(out->data + at, out->len - at, from, n))
    return;
  mr_text t = {0};
  const char *s = out->data + at, *end = out->data + out->len;
  for (const char *p; t.len < MAX_TOKEN_TEXT && (p = memmem(s, (size_t)(end - s), from, n));
       s = p + n) {
    mr_text_add(&t, s, (size_t)(p - s));
    mr_text_add(&t, to, m);
  }
  mr_text_add(&t, s, (size_t)(end - s));
  out->len = at;
  out->data[at] = 0;
  if (t.len)
    mr_text_add(out, t.data, t.len);
  out->failed = out->failed || t.failed;
  mr_text_free(&t);
}

/* Takes n bytes away at `at`. */
static void drop(mr_text *out, size_t at, size_t n) {
  memmove(out->data + at, out->data + at + n, out->len - at - n + 1);
  out->len -= n;
}

static int hex(char c) {
  return c >= '0' && c <= '9'   ? c - '0'
         : c >= 'A' && c <= 'F' ? c - 'A' + 10
         : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                : -1;
}

static void one_byte(mr_text *out, size_t at) {
  const char *s = out->data + at;
  if (out->len - at != 6 || memcmp(s, "<0x", 3) || s[5] != '>' || hex(s[3]) < 0 || hex(s[4]) < 0)
    return;
  out->data[at] = (char)(hex(s[3]) << 4 | hex(s[4]));
  out->len = at + 1;
  out->data[out->len] = 0;
}

static void strip(const mr_hf_step *s, mr_text *out, size_t at, bool first) {
  size_t start = s->b_len & 0xffff, stop = s->b_len >> 16, n = s->a_len;
  if (s->flags & WHOLE && !first)
    return;
  for (; start && out->len - at >= n && !memcmp(out->data + at, s->a, n); start--)
    drop(out, at, n);
  for (; stop && out->len - at >= n && !memcmp(out->data + out->len - n, s->a, n); stop--)
    out->data[out->len -= n] = 0;
}

static void wordpiece(const mr_hf_step *s, mr_text *out, size_t at, bool first) {
  static const char *const tidy[][2] = {{" .", "."},     {" ?", "?"},           {" !", "!"},
                                        {" ,", ","},     {" ' ", "'"},          {" n't", "n't"},
                                        {" 'm", "'m"},   {" do not", " don't"}, {" 's", "'s"},
                                        {" 've", "'ve"}, {" 're", "'re"}};
  size_t n = s->a_len, len = out->len - at;
  if (!first && len >= n && !memcmp(out->data + at, s->a, n)) {
    drop(out, at, n);
  } else if (!first) {
    mr_text_addc(out, ' ');
    if (!out->failed) {
      memmove(out->data + at + 1, out->data + at, len);
      out->data[at] = ' ';
    }
  }
  for (size_t i = 0; s->flags & CLEANUP && i < sizeof tidy / sizeof tidy[0]; i++)
    swap(out, at, tidy[i][0], strlen(tidy[i][0]), tidy[i][1], strlen(tidy[i][1]));
}

/* The token's text is in out since `at`. */
static void run(const mr_hf_step *s, mr_text *out, size_t at, bool first) {
  int64_t n;
  switch (s->kind) {
  case D_BYTE_LEVEL:
    n = mr_vocab_decode_bytes((mr_str){out->data + at, out->len - at}, out->data + at);
    if (n >= 0)
      out->data[out->len = at + (size_t)n] = 0;
    break;
  case D_METASPACE:
    swap(out, at, s->a, s->a_len, " ", first && !(s->flags & KEEPS_FIRST) ? 0 : 1);
    break;
  case D_BYTES:
    one_byte(out, at);
    break;
  case D_REPLACE:
    swap(out, at, s->a, s->a_len, s->b, s->b_len);
    break;
  case D_STRIP:
    strip(s, out, at, first);
    break;
  case D_WORDPIECE:
    wordpiece(s, out, at, first);
    break;
  default: /* Fuse: texts are joined anyway */
    break;
  }
}

void mr_hf_decode(const mr_vocab *v, int32_t id, bool first, mr_text *out) {
  mr_str t;
  size_t at = out->len;
  if (!mr_vocab_piece(v, id, &t) || !t.len)
    return;
  if (!v->hf->dec.n && !first)
    mr_text_addc(out, ' ');
  mr_text_add(out, t.s, t.len);
  for (size_t i = 0; i < v->hf->dec.n && !out->failed && out->len - at < MAX_TOKEN_TEXT; i++)
    run(&v->hf->dec.s[i], out, at, first);
}
