#include "src/unigram.h"

#include <math.h>
#include <string.h>

#include "io/mem.h"

#define UNKNOWN_PENALTY 10.0 /* below the least likely token */

typedef struct step { /* the best path to a place */
  double score;
  uint32_t from; /* where its last token starts */
  int32_t id;    /* -1: no path yet */
} step;

/* ---- reading ---- */

/* Where the texts that start with these two bytes begin in `sorted`; one-byte texts come first. */
static int index_pairs(mr_vocab *v) {
  mr_hf *h = v->hf;
  h->pairs = mr_mem_alloc(65536 + 1, sizeof *h->pairs);
  if (!h->pairs)
    return 0;
  for (int32_t i = 0; i < h->n_sorted; i++) {
    mr_str t = mr_vocab_text(v, h->sorted[i]);
    if (t.len > 1)
      h->pairs[((uint8_t)t.s[0] << 8 | (uint8_t)t.s[1]) + 1]++;
  }
  for (int k = 0; k < 65536; k++)
    h->pairs[k + 1] += h->pairs[k];
  return 1;
}

/* Sorts the tokens of two bytes and more by text. */
static int sort_tokens(mr_vocab *v, size_t n) {
  mr_hf *h = v->hf;
  h->sorted = mr_mem_alloc(n, sizeof *h->sorted);
  if (!h->sorted)
    return 0;
  for (int32_t i = 0; i < (int32_t)n; i++) {
    mr_str t = mr_vocab_text(v, i);
    if (t.len > 1 && mr_vocab_lookup(v, &v->words, t.s, t.len) == i)
      h->sorted[h->n_sorted++] = i;
  }
  mr_vocab_sort(v, h->sorted, h->n_sorted);
  return index_pairs(v);
}

mr_code mr_unigram_read(mr_vocab *v, const json_t *model, mr_err *err) {
  mr_hf *h = v->hf;
  const json_t *list = json_object_get(model, "vocab"), *unk = json_object_get(model, "unk_id");
  const json_t *item;
  size_t i, n = json_array_size(list);
  double least = INFINITY;
  h->score = mr_mem_alloc((size_t)v->n, sizeof *h->score);
  if (!h->score)
    return mr_hf_no_memory(err);
  json_array_foreach(list, i, item) {
    const json_t *score = json_array_get(item, 1);
    h->score[i] = json_number_value(score);
    if (!json_is_number(score) || !isfinite(h->score[i]))
      return mr_err_set(err, MR_E_DATA, "Unigram: the score of token %zu is not a number", i);
    least = h->score[i] < least ? h->score[i] : least;
  }
  h->unk_score = least - UNKNOWN_PENALTY;
  if (unk && !json_is_null(unk)) {
    json_int_t id = json_is_integer(unk) ? json_integer_value(unk) : -1;
    if (id < 0 || (size_t)id >= n)
      return mr_err_set(err, MR_E_DATA, "Unigram: unk_id %lld is no token", (long long)id);
    h->unk = (int32_t)id;
  }
  h->byte_fallback = mr_hf_flag(model, "byte_fallback", false);
  return sort_tokens(v, n) ? MR_OK : mr_hf_no_memory(err);
}

/* ---- encoding ---- */

static void offer(step *to, double score, size_t from, int32_t id) {
  if (to->id < 0 || score > to->score)
    *to = (step){score, (uint32_t)from, id};
}

/* Offers every token that starts at `at`; true when one of them is the character of n bytes. */
static bool offer_tokens(const mr_vocab *v, step *path, const char *s, size_t len, size_t at,
                         size_t n) {
  const mr_hf *h = v->hf;
  double so_far = path[at].score;
  int32_t one = mr_vocab_lookup(v, &v->words, s + at, 1);
  bool whole = one >= 0 && n == 1;
  if (one >= 0)
    offer(&path[at + 1], so_far + h->score[one], at, one);
  if (len - at < 2)
    return whole;
  uint32_t pair = (uint32_t)(uint8_t)s[at] << 8 | (uint8_t)s[at + 1];
  int32_t lo = h->pairs[pair], hi = h->pairs[pair + 1];
  for (uint32_t depth = 1; lo < hi && depth < len - at; depth++) {
    if (depth > 1) {
      int c = (uint8_t)s[at + depth];
      lo = mr_vocab_bound(v, h->sorted, lo, hi, depth, c);
      hi = mr_vocab_bound(v, h->sorted, lo, hi, depth, c + 1);
    }
    if (lo < hi && mr_vocab_text(v, h->sorted[lo]).len == depth + 1) {
      int32_t id = h->sorted[lo++];
      offer(&path[at + depth + 1], so_far + h->score[id], at, id);
      whole = whole || depth + 1 == n;
    }
  }
  return whole;
}

static mr_code no_token(const char *s, size_t n, mr_err *err) {
  return mr_err_set(err, MR_E_DATA,
                    "the vocabulary has no token for \"%.*s\" and no unknown token: this text "
                    "cannot be encoded with this model",
                    (int)(n > 32 ? 32 : n), s);
}

/* Unknown characters that follow one another are one text: a token after all, bytes, or unknown. */
static mr_code add_unknown(const mr_vocab *v, const char *s, size_t n, mr_ids *out, mr_err *err) {
  int32_t id = mr_vocab_lookup(v, &v->words, s, n);
  bool bytes = id < 0 && v->hf->byte_fallback;
  for (size_t i = 0; bytes && i < n; i++)
    bytes = v->byte_id[(uint8_t)s[i]] >= 0;
  int ok = 1;
  for (size_t i = 0; bytes && ok && i < n; i++)
    ok = mr_ids_push(out, v->byte_id[(uint8_t)s[i]]);
  if (!bytes)
    ok = mr_ids_push(out, id >= 0 ? id : v->hf->unk);
  return ok ? MR_OK : mr_hf_no_memory(err);
}

/* Writes the tokens of the best path, found from its end, in order. */
static mr_code emit(const mr_vocab *v, mr_hf_work *w, const step *path, const char *s, size_t len,
                    mr_ids *out, mr_err *err) {
  mr_code c = MR_OK;
  w->ids.n = 0;
  for (size_t end = len; end > 0; end = path[end].from)
    if (!mr_ids_push(&w->ids, (int32_t)end))
      return mr_hf_no_memory(err);
  for (size_t i = w->ids.n, from = 0; !c && i > 0;) {
    size_t end = (size_t)w->ids.ids[--i];
    int32_t id = path[end].id;
    bool unknown = id == v->hf->unk;
    while (unknown && i > 0 && path[w->ids.ids[i - 1]].id == id)
      end = (size_t)w->ids.ids[--i];
    if (unknown)
      c = add_unknown(v, s + from, end - from, out, err);
    else if (!mr_ids_push(out, id))
      c = mr_hf_no_memory(err);
    from = end;
  }
  return c;
}

mr_code mr_unigram_word(const mr_vocab *v, mr_hf_work *w, const char *s, size_t len, mr_ids *out,
                        mr_err *err) {
  if (len >= INT32_MAX)
    return mr_err_set(err, MR_E_DATA, "a piece of text has %zu bytes: too many", len);
  if (w->path_cap < len + 1 && !mr_mem_grow(&w->path, &w->path_cap, len + 1, sizeof(step)))
    return mr_hf_no_memory(err);
  step *path = w->path;
  for (size_t i = 0; i <= len; i++)
    path[i] = (step){0, 0, -1};
  for (size_t at = 0, n; at < len; at += n) {
    uint32_t code;
    n = (size_t)mr_utf8_next(s + at, len - at, &code);
    if (offer_tokens(v, path, s, len, at, n))
      continue;
    if (v->hf->unk < 0)
      return no_token(s + at, n, err);
    offer(&path[at + n], path[at].score + v->hf->unk_score, at, v->hf->unk);
  }
  return emit(v, w, path, s, len, out, err);
}
