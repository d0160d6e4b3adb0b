#include "src/wordpiece.h"

#include <string.h>

mr_code mr_wordpiece_read(mr_vocab *v, const json_t *model, mr_err *err) {
  const json_t *max = json_object_get(model, "max_input_chars_per_word");
  json_int_t n = json_is_integer(max) ? json_integer_value(max) : 100;
  if (n < 0 || n > 1000000)
    return mr_err_set(err, MR_E_DATA, "WordPiece: max_input_chars_per_word is %lld", (long long)n);
  v->hf->max_chars = (int32_t)n;
  return mr_hf_string(model, "continuing_subword_prefix", "##", &v->hf->cont, NULL, err);
}

static mr_code unknown(const mr_hf *h, const mr_hf_work *w, mr_ids *out, mr_err *err) {
  if (h->unk < 0 && w->lossy)
    return MR_OK;
  if (h->unk < 0)
    return mr_err_set(err, MR_E_DATA,
                      "a word has no token and the vocabulary no unknown token: this text cannot "
                      "be encoded with this model");
  return mr_ids_push(out, h->unk) ? MR_OK : mr_hf_no_memory(err);
}

static size_t count_chars(const char *s, size_t len) {
  size_t n = 0;
  for (size_t i = 0; i < len; i++)
    n += ((uint8_t)s[i] & 0xc0) != 0x80;
  return n;
}

/* The longest token of the word's part from `at` on: its id and length, or -1. */
static int32_t longest(const mr_vocab *v, mr_hf_work *w, const char *s, size_t len, size_t at,
                       size_t *length) {
  const char *lead = at ? v->hf->cont : v->hf->first;
  size_t skip = strlen(lead);
  mr_text_clear(&w->key);
  mr_text_add(&w->key, lead, skip);
  mr_text_add(&w->key, s + at, len - at);
  if (w->key.failed)
    return -1;
  for (size_t n = w->key.len; n > skip; n--) {
    if (n < w->key.len && ((uint8_t)w->key.data[n] & 0xc0) == 0x80)
      continue; /* inside of a character */
    int32_t id = mr_vocab_lookup(v, &v->words, w->key.data, n);
    if (id >= 0)
      return *length = n - skip, id;
  }
  return -1;
}

mr_code mr_wordpiece_word(const mr_vocab *v, mr_hf_work *w, const char *s, size_t len, mr_ids *out,
                          mr_err *err) {
  size_t before = out->n;
  if (count_chars(s, len) > (size_t)v->hf->max_chars)
    return unknown(v->hf, w, out, err);
  for (size_t at = 0, n = 0; at < len; at += n) {
    int32_t id = longest(v, w, s, len, at, &n);
    if (w->key.failed || (id >= 0 && !mr_ids_push(out, id)))
      return mr_hf_no_memory(err);
    if (id < 0) {
      out->n = before;
      return unknown(v->hf, w, out, err);
    }
  }
  return MR_OK;
}
