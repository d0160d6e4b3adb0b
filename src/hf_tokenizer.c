#include "src/hf_tokenizer.h"

#include <string.h>
#include <utf8proc.h>

#include "io/json.h"
#include "io/mem.h"
#include "src/unigram.h"
#include "src/wordpiece.h"

static const char *const models[] = {"BPE", "Unigram", "WordPiece", "WordLevel", NULL};
static const char *const kinds[] = {"bpe", "unigram", "wordpiece", "wordlevel"};

/* ---- helpers of the parts ---- */

mr_code mr_hf_no_memory(mr_err *err) {
  return mr_err_set(err, MR_E_NOMEM, "out of memory");
}

mr_code mr_hf_grown(mr_err *err) {
  return mr_err_set(err, MR_E_DATA,
                    "the tokenizer's steps make a text more than 64 times as long: they cannot be "
                    "meant");
}

mr_hf_step *mr_hf_step_add(mr_hf_steps *list, int kind, mr_err *err) {
  if (list->n >= MR_HF_MAX_STEPS) {
    mr_err_set(err, MR_E_DATA, "more than %d steps of one kind", MR_HF_MAX_STEPS);
    return NULL;
  }
  if (list->n == list->cap &&
      !mr_mem_grow((void **)&list->s, &list->cap, list->n + 1, sizeof *list->s)) {
    mr_hf_no_memory(err);
    return NULL;
  }
  list->s[list->n] = (mr_hf_step){.kind = kind};
  return &list->s[list->n++];
}

mr_code mr_hf_string(const json_t *o, const char *key, const char *fallback, char **out,
                     size_t *len, mr_err *err) {
  const json_t *v = json_object_get(o, key);
  bool given = v && !json_is_null(v);
  if (given ? !json_is_string(v) : !fallback)
    return mr_err_set(err, MR_E_DATA, "%s is not a string", key);
  const char *s = given ? json_string_value(v) : fallback;
  size_t n = given ? json_string_length(v) : strlen(fallback);
  *out = mr_mem_copy(s, n);
  if (len)
    *len = n;
  return *out ? MR_OK : mr_hf_no_memory(err);
}

bool mr_hf_flag(const json_t *o, const char *key, bool fallback) {
  const json_t *v = json_object_get(o, key);
  return json_is_boolean(v) ? json_is_true(v) : fallback;
}

mr_code mr_hf_pattern(const json_t *p, mr_hf_step *step, mr_err *err) {
  const json_t *re = json_object_get(p, "Regex"), *s = json_object_get(p, "String");
  if (json_is_string(re))
    return mr_regex_open(&step->re, json_string_value(re), json_string_length(re), err);
  s = json_is_string(p) ? p : s;
  if (!json_is_string(s))
    return mr_err_set(err, MR_E_DATA, "a pattern is neither a String nor a Regex");
  step->a_len = json_string_length(s);
  step->a = mr_mem_copy(json_string_value(s), step->a_len);
  return step->a ? MR_OK : mr_hf_no_memory(err);
}

const char *mr_hf_type(const json_t *o) {
  const char *s = json_string_value(json_object_get(o, "type"));
  return s ? s : "";
}

int mr_hf_kind(const char *name, const char *const *names, const char *what, mr_err *err) {
  for (int i = 0; names[i]; i++)
    if (!strcmp(names[i], name))
      return i;
  mr_err_set(err, MR_E_DATA, "%s \"%.60s\" is not supported", what, name);
  return -1;
}

bool mr_hf_is_space(uint32_t c) {
  return c == ' ' || (c >= 9 && c <= 0xd) || c == 0x85 || c == 0xa0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f ||
         c == 0x3000;
}

bool mr_hf_is_punct(uint32_t c) {
  if (c < 0x80)
    return (c >= '!' && c <= '/') || (c >= ':' && c <= '@') || (c >= '[' && c <= '`') ||
           (c >= '{' && c <= '~');
  utf8proc_category_t k = utf8proc_category((utf8proc_int32_t)c);
  return k >= UTF8PROC_CATEGORY_PC && k <= UTF8PROC_CATEGORY_PO;
}

void mr_hf_add_byte_char(mr_text *t, uint8_t b) {
  uint32_t c = b <= 0x20                ? 0x100u + b
               : b >= 0x7f && b <= 0xa0 ? 0x100u + b - 0x7f + 0x21
               : b == 0xad              ? 0x143u
                                        : b;
  if (c < 0x80)
    mr_text_addc(t, (char)c);
  else
    mr_text_add_code(t, c);
}

/* ---- reading: tables ---- */

typedef struct entry { /* of one id, while the tables are made */
  const json_t *token; /* the added token, or NULL */
  const char *s;       /* borrowed from the file's value; NULL: no such id */
  size_t len;
  bool word; /* the model has it */
} entry;

typedef struct loader {
  mr_vocab *v;
  const json_t *model, *added, *more;
  entry *e; /* [cap] */
  size_t cap, bytes;
  mr_err *err;
} loader;

static mr_code put(loader *l, json_int_t id, const char *s, size_t len, const json_t *token) {
  if (id < 0 || id > MR_HF_MAX_ID)
    return mr_err_set(l->err, MR_E_DATA, "token id %lld is out of range (0 to %d)", (long long)id,
                      MR_HF_MAX_ID);
  if ((size_t)id >= l->cap && !mr_mem_grow((void **)&l->e, &l->cap, (size_t)id + 1, sizeof *l->e))
    return mr_hf_no_memory(l->err);
  for (; l->v->n <= (int32_t)id; l->v->n++)
    l->e[l->v->n] = (entry){0};
  entry *e = &l->e[id];
  if (e->s && (e->len != len || memcmp(e->s, s, len)))
    return mr_err_set(l->err, MR_E_DATA, "two tokens have the id %lld: \"%.40s\" and \"%.40s\"",
                      (long long)id, e->s, s);
  if (!e->s)
    l->bytes += len;
  e->s = s, e->len = len;
  e->token = token ? token : e->token;
  e->word = e->word || !token;
  return MR_OK;
}

static mr_code put_words(loader *l) {
  json_t *vocab = json_object_get(l->model, "vocab"), *item;
  mr_code c = MR_OK;
  const char *key;
  size_t i, len;
  if (l->v->hf->model == MR_HF_UNIGRAM) {
    json_array_foreach(vocab, i, item) {
      const json_t *s = json_array_get(item, 0);
      if (!json_is_string(s))
        return mr_err_set(l->err, MR_E_DATA, "Unigram: token %zu has no text", i);
      if (!c)
        c = put(l, (json_int_t)i, json_string_value(s), json_string_length(s), NULL);
    }
  } else {
    json_object_keylen_foreach(vocab, key, len, item) {
      if (!c)
        c = put(l, json_is_integer(item) ? json_integer_value(item) : -1, key, len, NULL);
    }
  }
  if (!c && !l->v->n)
    c = mr_err_set(l->err, MR_E_DATA, "the model has no vocabulary");
  return c;
}

/* An added token whose text the model has is that token, whatever id it says. */
static mr_code put_added(loader *l, const json_t *token, json_int_t id, json_t *known) {
  const json_t *s = json_object_get(token, "content");
  if (!json_is_string(s) || json_object_get(known, json_string_value(s)))
    return json_is_string(s) ? MR_OK
                             : mr_err_set(l->err, MR_E_DATA, "an added token has no content");
  const json_t *vocab = json_object_get(l->model, "vocab");
  const json_t *in_model = json_object_get(vocab, json_string_value(s));
  if (json_is_integer(in_model))
    id = json_integer_value(in_model);
  if (json_object_set_new(known, json_string_value(s), json_true()))
    return mr_hf_no_memory(l->err);
  return put(l, id, json_string_value(s), json_string_length(s), token);
}

static mr_code put_all_added(loader *l) {
  json_t *known = json_object(), *token;
  mr_code c = known ? MR_OK : mr_hf_no_memory(l->err);
  const char *key;
  size_t i;
  int64_t id;
  json_array_foreach(l->added, i, token) {
    json_t *n = json_object_get(token, "id");
    if (!c)
      c = put_added(l, token, json_is_integer(n) ? json_integer_value(n) : -1, known);
  }
  json_object_foreach((json_t *)(uintptr_t)l->more, key, token) {
    if (!c)
      c = put_added(l, token, mr_parse_int(key, &id) ? id : -1, known);
  }
  json_decref(known);
  return c;
}

static mr_code make_tables(loader *l) {
  mr_vocab *v = l->v;
  size_t n = (size_t)v->n;
  v->at = mr_mem_alloc(n + 1, sizeof *v->at);
  v->type = mr_mem_alloc(n, 1);
  v->mark = mr_mem_alloc(n, 1);
  v->blob = l->bytes > UINT32_MAX ? NULL : mr_mem_alloc(l->bytes + 1, 1);
  if (!v->at || !v->type || !v->mark || !v->blob || !mr_vocab_index_init(&v->all, n) ||
      !mr_vocab_index_init(&v->words, n))
    return mr_hf_no_memory(l->err);
  for (int32_t i = 0; i < v->n; i++) {
    const entry *e = &l->e[i];
    v->at[i + 1] = v->at[i] + (uint32_t)e->len;
    if (e->len)
      memcpy(v->blob + v->at[i], e->s, e->len);
    v->type[i] = !e->s ? MR_TOKEN_UNUSED
                 : !e->token
                     ? MR_TOKEN_NORMAL
                     : (mr_hf_flag(e->token, "special", false) ? MR_TOKEN_CONTROL : MR_TOKEN_USER);
    if (!e->len)
      continue;
    mr_vocab_index_add(v, &v->all, i, false);
    if (e->word)
      mr_vocab_index_add(v, &v->words, i, true);
  }
  for (int b = 0; b < 256; b++) {
    char name[8];
    snprintf(name, sizeof name, "<0x%02X>", b);
    v->byte_id[b] = mr_vocab_lookup(v, &v->words, name, 6);
  }
  return MR_OK;
}

/* ---- reading: the rest ---- */

static int model_kind(const json_t *model, mr_err *err) {
  const char *type = mr_hf_type(model);
  if (*type)
    return mr_hf_kind(type, models, "model", err);
  if (json_object_get(model, "merges")) /* older files do not say */
    return MR_HF_BPE;
  if (json_is_array(json_object_get(model, "vocab")))
    return MR_HF_UNIGRAM;
  if (json_object_get(model, "max_input_chars_per_word"))
    return MR_HF_WORDPIECE;
  if (json_object_get(model, "vocab"))
    return MR_HF_WORDLEVEL;
  mr_err_set(err, MR_E_DATA, "there is no model");
  return -1;
}

static mr_code read_unk(mr_vocab *v, const json_t *model, mr_err *err) {
  const json_t *s = json_object_get(model, "unk_token");
  if (!json_is_string(s))
    return MR_OK;
  v->hf->unk = mr_vocab_lookup(v, &v->words, json_string_value(s), json_string_length(s));
  if (v->hf->unk < 0 && v->hf->model != MR_HF_BPE)
    return mr_err_set(err, MR_E_DATA, "unk_token \"%.40s\" is no token", json_string_value(s));
  return MR_OK;
}

static unsigned flags_of(const json_t *token) {
  bool special = mr_hf_flag(token, "special", false);
  return (special ? MR_HF_SPECIAL : 0) | (mr_hf_flag(token, "lstrip", false) ? MR_HF_LSTRIP : 0) |
         (mr_hf_flag(token, "rstrip", false) ? MR_HF_RSTRIP : 0) |
         (mr_hf_flag(token, "single_word", false) ? MR_HF_WORD : 0) |
         (mr_hf_flag(token, "normalized", !special) ? MR_HF_NORMAL : 0);
}

void mr_hf_work_free(mr_hf_work *w) {
  mr_text_free(&w->text.s);
  mr_text_free(&w->text.plain);
  mr_text_free(&w->spare.s);
  mr_text_free(&w->spare.plain);
  mr_text_free(&w->cur.s);
  mr_text_free(&w->next.s);
  mr_mem_free(w->cur.p);
  mr_mem_free(w->next.p);
  mr_regex_scratch_free(&w->match);
  mr_merger_free(&w->merger);
  mr_text_free(&w->key);
  mr_ids_free(&w->ids);
  mr_mem_free(w->path);
}

/* Lists the added tokens, each as it will look where it is searched. */
static mr_code list_added(loader *l) {
  mr_hf *h = l->v->hf;
  mr_hf_work w = {0};
  mr_code c = MR_OK;
  for (int32_t i = 0; !c && i < l->v->n; i++) {
    const entry *e = &l->e[i];
    unsigned flags = e->token ? flags_of(e->token) : 0;
    if (!e->token)
      continue;
    if (!(flags & MR_HF_NORMAL)) {
      c = mr_hf_list_add(&h->raw, i, flags, e->s, e->len, l->err);
      continue;
    }
    mr_text_clear(&w.text.s);
    mr_text_add(&w.text.s, e->s, e->len);
    c = mr_hf_normalize(h, &w, l->err);
    c = c ? c : mr_hf_list_add(&h->normalized, i, flags, w.text.s.data, w.text.s.len, l->err);
  }
  mr_hf_work_free(&w);
  mr_hf_list_sort(&h->raw);
  mr_hf_list_sort(&h->normalized);
  return c;
}

static mr_code read_model(loader *l) {
  mr_vocab *v = l->v;
  mr_code c = read_unk(v, l->model, l->err);
  if (c)
    return c;
  switch (v->hf->model) {
  case MR_HF_BPE:
    return mr_hf_read_bpe(v, l->model, l->err);
  case MR_HF_UNIGRAM:
    return mr_unigram_read(v, l->model, l->err);
  case MR_HF_WORDPIECE:
    c = mr_hf_string(NULL, "", "", &v->hf->first, NULL, l->err);
    return c ? c : mr_wordpiece_read(v, l->model, l->err);
  default:
    return MR_OK;
  }
}

static mr_code load(loader *l, const json_t *root) {
  mr_hf *h = l->v->hf;
  int kind = model_kind(l->model, l->err);
  if (kind < 0)
    return MR_E_DATA;
  h->model = (mr_hf_model)kind;
  l->v->kind = kinds[kind];
  mr_code c = put_words(l);
  c = c ? c : put_all_added(l);
  c = c ? c : make_tables(l);
  c = c ? c : read_model(l);
  c = c ? c : mr_hf_read_norm(h, json_object_get(root, "normalizer"), 0, l->err);
  c = c ? c : mr_hf_read_pre(h, json_object_get(root, "pre_tokenizer"), 0, l->err);
  c = c ? c : mr_hf_read_post(l->v, json_object_get(root, "post_processor"), 0, l->err);
  c = c ? c : mr_hf_read_dec(h, json_object_get(root, "decoder"), 0, l->err);
  return c ? c : list_added(l);
}

mr_hf *mr_hf_new(mr_hf_model model) {
  mr_hf *h = mr_mem_alloc(1, sizeof *h);
  if (h)
    *h = (mr_hf){.model = model, .unk = -1};
  return h;
}

mr_code mr_hf_open(mr_vocab **out, const json_t *root, const json_t *more, mr_err *err) {
  mr_err own = MR_ERR_INIT;
  *out = NULL;
  mr_vocab *v = mr_mem_alloc(1, sizeof *v);
  loader l = {.v = v,
              .model = json_object_get(root, "model"),
              .added = json_object_get(root, "added_tokens"),
              .more = more,
              .err = &own};
  if (!v)
    return mr_hf_no_memory(err);
  v->bos = v->eos = -1;
  v->add_space_prefix = true;
  v->hf = mr_hf_new(MR_HF_BPE);
  mr_code c = v->hf ? MR_OK : mr_hf_no_memory(&own);
  if (!c) {
    load(&l, root);
    c = own.code; /* the first error counts */
  }
  mr_mem_free(l.e);
  if (!c) {
    *out = v;
    return MR_OK;
  }
  mr_vocab_close(v);
  return mr_err_set(err, c, "%s", own.text);
}

/* ---- BERT's, from a GGUF file ---- */

static bool is_cased(const mr_vocab *v) {
  for (int32_t i = 0; i < v->n; i++) {
    mr_str t = mr_vocab_text(v, i);
    if (v->type[i] == MR_TOKEN_NORMAL && t.len > 3 && !memcmp(t.s, MR_SPACE_MARK, 3) &&
        t.s[3] >= 'A' && t.s[3] <= 'Z')
      return true;
  }
  return false;
}

static mr_code add_bert_steps(mr_vocab *v, const json_t *steps, mr_err *err) {
  mr_hf *h = v->hf;
  mr_code c = steps ? MR_OK : mr_hf_no_memory(err);
  c = c ? c : mr_hf_read_norm(h, json_object_get(steps, "norm"), 0, err);
  c = c ? c : mr_hf_read_pre(h, json_object_get(steps, "pre"), 0, err);
  c = c ? c : mr_hf_read_dec(h, json_object_get(steps, "dec"), 0, err);
  c = c ? c : mr_hf_string(NULL, "", MR_SPACE_MARK, &h->first, NULL, err);
  c = c ? c : mr_hf_string(NULL, "", "", &h->cont, NULL, err);
  return c;
}

mr_code mr_hf_open_bert(mr_vocab *v, int32_t unk, mr_err *err) {
  mr_hf *h = v->hf;
  json_t *steps =
      json_pack("{s:{s:s s:b}, s:{s:s}, s:{s:s}}", "norm", "type", "BertNormalizer", "lowercase",
                !is_cased(v), "pre", "type", "BertPreTokenizer", "dec", "type", "Metaspace");
  mr_code c = add_bert_steps(v, steps, err);
  json_decref(steps);
  h->unk = unk;
  h->max_chars = 100;
  for (int32_t i = 0; !c && i < v->n_special; i++) {
    int32_t id = v->special[i];
    mr_str t = mr_vocab_text(v, id);
    c = mr_hf_list_add(&h->raw, id, v->type[id] == MR_TOKEN_USER ? 0 : MR_HF_SPECIAL, t.s, t.len,
                       err);
  }
  mr_hf_list_sort(&h->raw);
  if (!c && ((v->bos >= 0 && !mr_ids_push(&h->prefix, v->bos)) ||
             (v->eos >= 0 && !mr_ids_push(&h->suffix, v->eos))))
    c = mr_hf_no_memory(err);
  return c;
}

static void free_steps(mr_hf_steps *list) {
  for (size_t i = 0; i < list->n; i++) {
    mr_regex_close(list->s[i].re);
    mr_mem_free(list->s[i].a);
    mr_mem_free(list->s[i].b);
  }
  mr_mem_free(list->s);
}

void mr_hf_close(mr_hf *h) {
  if (!h)
    return;
  free_steps(&h->norm);
  free_steps(&h->pre);
  free_steps(&h->dec);
  mr_hf_list_free(&h->raw);
  mr_hf_list_free(&h->normalized);
  mr_ids_free(&h->prefix);
  mr_ids_free(&h->suffix);
  mr_mem_free(h->first);
  mr_mem_free(h->cont);
  mr_mem_free(h->end);
  mr_mem_free(h->score);
  mr_mem_free(h->sorted);
  mr_mem_free(h->pairs);
  mr_mem_free(h);
}

/* ---- encoding ---- */

static mr_code word_level(const mr_vocab *v, const mr_hf_work *w, int32_t id, mr_ids *out,
                          mr_err *err) {
  id = id >= 0 ? id : v->hf->unk;
  if (id < 0 && !w->lossy)
    return mr_err_set(err, MR_E_DATA, "a word has no token and there is no unknown token");
  return id < 0 || mr_ids_push(out, id) ? MR_OK : mr_hf_no_memory(err);
}

static mr_code word(const mr_vocab *v, mr_hf_work *w, const char *s, size_t len, mr_ids *out,
                    mr_err *err) {
  const mr_hf *h = v->hf;
  if (h->model == MR_HF_UNIGRAM)
    return mr_unigram_word(v, w, s, len, out, err);
  if (h->model == MR_HF_WORDPIECE)
    return mr_wordpiece_word(v, w, s, len, out, err);
  int32_t id = mr_vocab_lookup(v, &v->words, s, len);
  if (h->model == MR_HF_WORDLEVEL)
    return word_level(v, w, id, out, err);
  if (id >= 0 && (h->whole_words || v->mark[id] & MR_MARK_WHOLE))
    return mr_ids_push(out, id) ? MR_OK : mr_hf_no_memory(err);
  return mr_hf_bpe_word(v, w, s, len, out, err);
}

typedef struct call { /* of one encoding */
  const mr_vocab *v;
  const char *text;
  const uint8_t *plain; /* or NULL */
  bool parse;
  mr_hf_work w;
  mr_hf_spots inner;
  mr_ids *out;
  mr_err *err;
} call;

static mr_code encode_piece(call *c, const char *s, size_t len, bool first) {
  mr_code code = mr_hf_cut(c->v->hf, &c->w, s, len, first, c->err);
  for (size_t i = 0; !code && i < c->w.cur.n; i++)
    code = word(c->v, &c->w, c->w.cur.s.data + c->w.cur.p[i].at, c->w.cur.p[i].len, c->out, c->err);
  return code;
}

/* The part of the text between two tokens that were looked for before normalizing. */
static mr_code encode_span(call *c, size_t at, size_t len) {
  mr_hf_work *w = &c->w;
  mr_text_clear(&w->text.s);
  mr_text_clear(&w->text.plain);
  w->text.marked = c->plain != NULL;
  mr_text_add(&w->text.s, c->text + at, len);
  for (size_t i = 0; c->plain && i < len; i++)
    mr_text_addc(&w->text.plain, c->plain[at + i] != 0);
  mr_code code = w->text.s.failed || w->text.plain.failed ? mr_hf_no_memory(c->err) : MR_OK;
  code = code ? code : mr_hf_normalize(c->v->hf, w, c->err);
  if (code || !w->text.s.len)
    return code;
  c->inner.n = 0;
  code = mr_hf_find_added(&c->v->hf->normalized, w->text.s.data, w->text.s.len,
                          c->plain ? (const uint8_t *)w->text.plain.data : NULL, c->parse,
                          &c->inner, c->err);
  for (size_t i = 0; !code && i < c->inner.n; i++) {
    const mr_hf_spot *s = &c->inner.s[i];
    if (s->id < 0)
      code = encode_piece(c, w->text.s.data + s->at, s->len, !at && !s->at);
    else if (!mr_ids_push(c->out, s->id))
      code = mr_hf_no_memory(c->err);
  }
  return code;
}

static mr_code push_all(const mr_ids *list, int32_t but, mr_ids *out, mr_err *err) {
  for (size_t i = 0; i < list->n; i++)
    if (list->ids[i] != but && !mr_ids_push(out, list->ids[i]))
      return mr_hf_no_memory(err);
  return MR_OK;
}

static mr_code encode_valid(call *c, size_t len, int flags) {
  const mr_hf *h = c->v->hf;
  mr_hf_spots spots = {0};
  mr_code code = mr_hf_find_added(&h->raw, c->text, len, c->plain, c->parse, &spots, c->err);
  bool add = flags & MR_TOK_ADD_SPECIAL;
  bool begun = spots.n && spots.s[0].id >= 0 && spots.s[0].id == c->v->bos;
  if (!code && add)
    code =
        push_all(&h->prefix, begun && !(flags & MR_TOK_UPSTREAM) ? c->v->bos : -1, c->out, c->err);
  for (size_t i = 0; !code && i < spots.n; i++) {
    const mr_hf_spot *s = &spots.s[i];
    if (s->id < 0)
      code = encode_span(c, s->at, s->len);
    else if (!mr_ids_push(c->out, s->id))
      code = mr_hf_no_memory(c->err);
  }
  if (!code && add)
    code = push_all(&h->suffix, -1, c->out, c->err);
  mr_mem_free(spots.s);
  mr_mem_free(c->inner.s);
  mr_hf_work_free(&c->w);
  return code;
}

/* Bytes that are no UTF-8 become U+FFFD, marks with them. */
static void repair(const char *text, size_t len, const uint8_t *plain, mr_text *fixed,
                   mr_text *marks) {
  for (size_t i = 0, n; i < len; i += n) {
    uint32_t code;
    n = (size_t)mr_utf8_next(text + i, len - i, &code);
    mr_text_add_code(fixed, code);
    while (plain && !fixed->failed && !marks->failed && marks->len < fixed->len)
      mr_text_addc(marks, plain[i] != 0);
  }
}

mr_code mr_hf_encode(const mr_vocab *v, const char *text, size_t len, const uint8_t *plain,
                     int flags, mr_ids *out, mr_err *err) {
  mr_text fixed = {0}, marks = {0};
  size_t before = out->n;
  call c = {.v = v,
            .text = text,
            .plain = plain,
            .parse = flags & MR_TOK_PARSE_SPECIAL,
            .w = {.lossy = flags & MR_TOK_UPSTREAM},
            .out = out,
            .err = err};
  if (mr_utf8_valid(text, len) >= 0) {
    repair(text, len, plain, &fixed, &marks);
    c.text = fixed.data, c.plain = plain ? (const uint8_t *)marks.data : NULL, len = fixed.len;
  }
  mr_code code = fixed.failed || marks.failed ? mr_hf_no_memory(err) : encode_valid(&c, len, flags);
  mr_text_free(&fixed);
  mr_text_free(&marks);
  if (code)
    out->n = before;
  return code;
}
