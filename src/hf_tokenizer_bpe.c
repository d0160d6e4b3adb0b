/* The BPE model of a tokenizer.json: characters as symbols, merged by rank (Sennrich et al. 2016).
 */
#include <string.h>

#include "io/mem.h"
#include "src/hf_tokenizer.h"

#define MAX_MERGES (1 << 24)

/* ---- reading ---- */

static int32_t id_of(const mr_vocab *v, const char *s, size_t n) {
  return mr_vocab_lookup(v, &v->words, s, n);
}

/* The two texts of a merge: "a b" or ["a", "b"]. */
static bool halves(const json_t *m, mr_str *a, mr_str *b) {
  if (json_is_array(m) && json_array_size(m) == 2) {
    const json_t *x = json_array_get(m, 0), *y = json_array_get(m, 1);
    *a = (mr_str){json_string_value(x), json_string_length(x)};
    *b = (mr_str){json_string_value(y), json_string_length(y)};
    return a->s && b->s;
  }
  const char *s = json_string_value(m);
  size_t n = json_string_length(m);
  const char *space = s ? memchr(s, ' ', n) : NULL;
  if (!space || memchr(space + 1, ' ', n - (size_t)(space + 1 - s)))
    return false;
  *a = (mr_str){s, (size_t)(space - s)};
  *b = (mr_str){space + 1, n - a->len - 1};
  return true;
}

static mr_code read_merge(mr_vocab *v, const json_t *m, int32_t rank, mr_text *key, mr_err *err) {
  mr_str a, b;
  if (!halves(m, &a, &b))
    return mr_err_set(err, MR_E_DATA, "merge %d is not two texts", rank);
  size_t cut = strlen(v->hf->cont);
  int32_t left = id_of(v, a.s, a.len), right = id_of(v, b.s, b.len);
  mr_text_clear(key);
  mr_text_add(key, a.s, a.len);
  if (b.len >= cut)
    mr_text_add(key, b.s + cut, b.len - cut);
  if (key->failed)
    return mr_hf_no_memory(err);
  int32_t id = key->data ? id_of(v, key->data, key->len) : -1;
  if (left < 0 || right < 0 || id < 0)
    return mr_err_set(err, MR_E_DATA, "merge %d: \"%.40s\", \"%.40s\" or both together is no token",
                      rank, a.s, b.s);
  mr_vocab_rule_put(v, left, right, rank, id);
  return MR_OK;
}

/* Words that are a token, and stay one when they are merged, need no merging later. */
static mr_code mark_whole(mr_vocab *v, mr_err *err) {
  mr_hf_work w = {.lossy = true};
  mr_ids ids = {0};
  mr_code c = MR_OK;
  for (int32_t i = 0; i < v->n && !c; i++) {
    mr_str t = mr_vocab_text(v, i);
    if (!t.len || id_of(v, t.s, t.len) != i)
      continue;
    ids.n = 0;
    c = mr_hf_bpe_word(v, &w, t.s, t.len, &ids, err);
    if (!c && ids.n == 1 && ids.ids[0] == i)
      v->mark[i] |= MR_MARK_WHOLE;
  }
  mr_merger_free(&w.merger);
  mr_text_free(&w.key);
  mr_ids_free(&ids);
  return c;
}

mr_code mr_hf_read_bpe(mr_vocab *v, const json_t *model, mr_err *err) {
  mr_hf *h = v->hf;
  const json_t *merges = json_object_get(model, "merges"), *m;
  if (json_real_value(json_object_get(model, "dropout")) > 0 ||
      json_integer_value(json_object_get(model, "dropout")) > 0)
    return mr_err_set(err, MR_E_DATA, "BPE with dropout is not supported: its ids are random");
  if (!json_is_array(merges) || json_array_size(merges) > MAX_MERGES)
    return mr_err_set(err, MR_E_DATA, "the BPE model's merges are missing or more than %d",
                      MAX_MERGES);
  mr_code c = mr_hf_string(model, "continuing_subword_prefix", "", &h->cont, NULL, err);
  c = c ? c : mr_hf_string(model, "end_of_word_suffix", "", &h->end, NULL, err);
  if (c)
    return c;
  h->byte_fallback = mr_hf_flag(model, "byte_fallback", false);
  h->fuse_unk = mr_hf_flag(model, "fuse_unk", false);
  h->whole_words = mr_hf_flag(model, "ignore_merges", false);
  if (!mr_vocab_rules_init(v, json_array_size(merges)))
    return mr_hf_no_memory(err);
  mr_text key = {0};
  size_t i;
  json_array_foreach(merges, i, m) {
    if (!c)
      c = read_merge(v, m, (int32_t)i, &key, err);
  }
  mr_text_free(&key);
  return c || h->whole_words ? c : mark_whole(v, err);
}

/* ---- encoding ---- */

typedef struct unknown { /* characters without a token, not yet added */
  uint32_t at, len;      /* len 0: none */
} unknown;

static bool flush(const mr_hf *h, mr_merger *m, unknown *u) {
  bool ok = !u->len || mr_merger_add(m, h->unk, u->at, u->len);
  u->len = 0;
  return ok;
}

/* A character as bytes: false when one of them has no token. */
static bool has_bytes(const mr_vocab *v, const char *s, size_t n) {
  for (size_t i = 0; i < n; i++)
    if (v->byte_id[(uint8_t)s[i]] < 0)
      return false;
  return true;
}

static bool rule(const mr_vocab *v, const char *text, const mr_symbol *a, const mr_symbol *b,
                 int32_t *rank, int32_t *id) {
  (void)text;
  return mr_vocab_rule(v, a->id, b->id, rank, id);
}

/* The character s[at, at + n) of a word of len bytes. */
static mr_code add_char(const mr_vocab *v, mr_hf_work *w, const char *s, size_t len, size_t at,
                        size_t n, unknown *u, mr_err *err) {
  const mr_hf *h = v->hf;
  const char *key = s + at;
  size_t key_len = n;
  bool ok = true, last = at + n == len;
  if ((at && *h->cont) || (last && *h->end)) {
    mr_text_clear(&w->key);
    mr_text_adds(&w->key, at ? h->cont : "");
    mr_text_add(&w->key, s + at, n);
    mr_text_adds(&w->key, last ? h->end : "");
    if (w->key.failed)
      return mr_hf_no_memory(err);
    key = w->key.data, key_len = w->key.len;
  }
  int32_t id = id_of(v, key, key_len);
  if (id >= 0) {
    ok = flush(h, &w->merger, u) && mr_merger_add(&w->merger, id, (uint32_t)at, (uint32_t)n);
  } else if (h->byte_fallback && has_bytes(v, key, key_len)) {
    for (size_t i = 0; ok && i < n; i++)
      ok = mr_merger_add(&w->merger, v->byte_id[(uint8_t)s[at + i]], (uint32_t)(at + i), 1);
  } else if (h->unk >= 0) {
    if (!h->fuse_unk)
      ok = flush(h, &w->merger, u);
    u->at = u->len ? u->at : (uint32_t)at;
    u->len += (uint32_t)n;
  } else if (!w->lossy) {
    return mr_err_set(err, MR_E_DATA,
                      "the vocabulary has no token for the character \"%.*s\": this text cannot "
                      "be encoded with this model",
                      (int)n, s + at);
  }
  return ok ? MR_OK : mr_hf_no_memory(err);
}

mr_code mr_hf_bpe_word(const mr_vocab *v, mr_hf_work *w, const char *s, size_t len, mr_ids *out,
                       mr_err *err) {
  unknown u = {0, 0};
  mr_code c = MR_OK;
  w->merger.n = 0;
  for (size_t at = 0, n; !c && at < len; at += n) {
    uint32_t code;
    n = (size_t)mr_utf8_next(s + at, len - at, &code);
    c = add_char(v, w, s, len, at, n, &u, err);
  }
  if (c)
    return c;
  bool ok = flush(v->hf, &w->merger, &u) && mr_merger_run(&w->merger, v, s, rule);
  for (int32_t i = w->merger.n ? 0 : -1; ok && i >= 0; i = w->merger.sym[i].next)
    ok = mr_ids_push(out, w->merger.sym[i].id);
  return ok ? MR_OK : mr_hf_no_memory(err);
}
