/* BPE of SentencePiece (Kudo and Richardson 2018): the pair whose piece scores highest merges
 * first. */
#include "src/spm.h"

#include <string.h>

/* A number that grows as the score falls, in the order of floats. */
static int32_t rank_of(float score) {
  int32_t bits;
  memcpy(&bits, &score, sizeof bits);
  return bits < 0 ? bits & 0x7fffffff : -bits;
}

static bool rule(const mr_vocab *v, const char *text, const mr_symbol *a, const mr_symbol *b,
                 int32_t *rank, int32_t *id) {
  uint32_t len = a->len + b->len;
  if (len > v->longest)
    return false;
  *id = mr_vocab_lookup(v, &v->words, text + a->at, len);
  if (*id < 0)
    return false;
  *rank = rank_of(v->score[*id]);
  return true;
}

static void escape(mr_text *t, const char *text, size_t len, bool prefix) {
  mr_text_clear(t);
  if (prefix)
    mr_text_adds(t, MR_SPACE_MARK);
  for (size_t i = 0; i < len;) {
    const char *space = memchr(text + i, ' ', len - i);
    size_t n = space ? (size_t)(space - text) - i : len - i;
    mr_text_add(t, text + i, n);
    if (space)
      mr_text_adds(t, MR_SPACE_MARK);
    i += n + (space != NULL);
  }
}

/* Bytes of the character that starts with this one; the text need not be UTF-8. */
static size_t width(uint8_t first) {
  return first < 0xc0 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
}

static mr_code emit(const mr_vocab *v, const char *text, const mr_symbol *s, mr_ids *out,
                    mr_err *err) {
  if (s->id >= 0)
    return mr_ids_push(out, s->id) ? MR_OK : mr_err_set(err, MR_E_NOMEM, "out of memory");
  for (uint32_t i = 0; i < s->len; i++) {
    int32_t id = v->byte_id[(uint8_t)text[s->at + i]];
    if (id < 0)
      return mr_err_set(err, MR_E_DATA,
                        "the vocabulary has no token for the byte 0x%02X: this text "
                        "cannot be encoded with this model",
                        (uint8_t)text[s->at + i]);
    if (!mr_ids_push(out, id))
      return mr_err_set(err, MR_E_NOMEM, "out of memory");
  }
  return MR_OK;
}

/* Whether no merge can reach across the place just before t[at]. */
static bool may_cut(const mr_vocab *v, const char *t, size_t at, size_t n) {
  return n == 3 && !memcmp(t + at, MR_SPACE_MARK, 3) && !v->joins[(uint8_t)t[at - 1]];
}

/* Merges and emits the symbols gathered so far. */
static mr_code flush(const mr_vocab *v, mr_merger *m, const char *t, mr_ids *out, mr_err *err) {
  if (!mr_merger_run(m, v, t, rule))
    return mr_err_set(err, MR_E_NOMEM, "out of memory");
  mr_code c = MR_OK;
  for (int32_t i = m->n ? 0 : -1; !c && i >= 0; i = m->sym[i].next)
    c = emit(v, t, &m->sym[i], out, err);
  m->n = 0;
  return c;
}

mr_code mr_spm_encode(const mr_vocab *v, mr_spm *s, const char *text, size_t len, bool prefix,
                      mr_ids *out, mr_err *err) {
  escape(&s->escaped, text, len, prefix);
  if (s->escaped.failed)
    return mr_err_set(err, MR_E_NOMEM, "out of memory");
  const char *t = s->escaped.data;
  mr_merger *m = &s->merger;
  mr_code c = MR_OK;
  m->n = 0;
  for (size_t at = 0, n; !c && at < s->escaped.len; at += n) {
    n = width((uint8_t)t[at]);
    n = n < s->escaped.len - at ? n : s->escaped.len - at;
    if (at && may_cut(v, t, at, n))
      c = flush(v, m, t, out, err);
    int32_t id = mr_vocab_lookup(v, &v->words, t + at, n);
    if (!c && !mr_merger_add(m, id, (uint32_t)at, (uint32_t)n))
      c = mr_err_set(err, MR_E_NOMEM, "out of memory");
  }
  return c ? c : flush(v, m, t, out, err);
}

void mr_spm_free(mr_spm *s) {
  mr_merger_free(&s->merger);
  mr_text_free(&s->escaped);
}
