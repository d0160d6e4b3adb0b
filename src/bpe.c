/* Byte-level BPE (Sennrich et al. 2016; bytes as symbols: Radford et al. 2019). */
#include "src/bpe.h"

#include <string.h>

static bool rule(const mr_vocab *v, const char *text, const mr_symbol *a, const mr_symbol *b,
                 int32_t *rank, int32_t *id) {
  (void)text;
  return mr_vocab_rule(v, a->id, b->id, rank, id);
}

mr_code mr_bpe_word(const mr_vocab *v, mr_bpe *b, const char *word, size_t len, mr_ids *out,
                    mr_err *err) {
  mr_merger *m = &b->merger;
  int ok = 1;
  m->n = 0;
  for (size_t i = 0; ok && i < len; i++)
    ok = mr_merger_add(m, v->byte_id[(uint8_t)word[i]], (uint32_t)i, 1);
  ok = ok && mr_merger_run(m, v, word, rule);
  for (int32_t i = len ? 0 : -1; ok && i >= 0; i = m->sym[i].next) {
    const mr_symbol *s = &m->sym[i];
    if (s->id < 0 && !b->lossy)
      return mr_err_set(err, MR_E_DATA,
                        "the vocabulary has no token for the byte 0x%02X: this text "
                        "cannot be encoded with this model",
                        (uint8_t)word[s->at]);
    ok = s->id < 0 || mr_ids_push(out, s->id);
  }
  return ok ? MR_OK : mr_err_set(err, MR_E_NOMEM, "out of memory");
}

/* Decodes as upstream does: overlong forms and surrogates pass as the number they spell, other
 * bytes that are no UTF-8 become U+FFFD one by one. Returns the length read. */
static size_t decode(const uint8_t *s, size_t len, uint32_t *code) {
  int more = s[0] < 0x80   ? 0
             : s[0] < 0xc0 ? -1
             : s[0] < 0xe0 ? 1
             : s[0] < 0xf0 ? 2
             : s[0] < 0xf8 ? 3
                           : -1;
  uint32_t c = more <= 0 ? s[0] : s[0] & (0x3fu >> more);
  bool good = more >= 0 && (size_t)more < len;
  for (int i = 1; good && i <= more; i++) {
    good = (s[i] & 0xc0) == 0x80;
    c = c << 6 | (s[i] & 0x3f);
  }
  good = good && c <= 0x10ffff;
  *code = good ? c : 0xfffd;
  return good ? (size_t)more + 1 : 1;
}

/* Surrogates have no valid UTF-8: they are kept as three bytes, and shown to the patterns as
 * U+FFFF, which has the same length and, like them, no class. */
static void repair(mr_bpe *b, const char *text, size_t len) {
  mr_text_clear(&b->fixed);
  mr_text_clear(&b->shown);
  for (size_t i = 0; i < len;) {
    uint32_t c;
    i += decode((const uint8_t *)text + i, len - i, &c);
    bool surrogate = c >= 0xd800 && c <= 0xdfff;
    char raw[3] = {(char)(0xe0 | c >> 12), (char)(0x80 | (c >> 6 & 0x3f)),
                   (char)(0x80 | (c & 0x3f))};
    if (surrogate)
      mr_text_add(&b->fixed, raw, 3);
    else
      mr_text_add_code(&b->fixed, c);
    mr_text_add_code(&b->shown, surrogate ? 0xffff : c);
  }
}

mr_code mr_bpe_encode(const mr_vocab *v, mr_bpe *b, const char *text, size_t len, mr_ids *out,
                      mr_err *err) {
  const char *shown = text;
  if (mr_utf8_valid(text, len) >= 0) {
    repair(b, text, len);
    if (b->fixed.failed || b->shown.failed)
      return mr_err_set(err, MR_E_NOMEM, "out of memory");
    text = b->fixed.data, shown = b->shown.data, len = b->fixed.len;
  }
  mr_code c = mr_pretok_cut(v->pretok, shown, len, &b->cuts, err);
  bool whole = mr_pretok_whole_words(v->pretok);
  for (size_t i = 0, from = 0; !c && i < b->cuts.n; from = b->cuts.end[i++]) {
    size_t n = b->cuts.end[i] - from;
    int32_t id = mr_vocab_lookup(v, &v->words, text + from, n);
    if (id < 0 || !(whole || v->mark[id] & MR_MARK_WHOLE))
      c = mr_bpe_word(v, b, text + from, n, out, err);
    else if (!mr_ids_push(out, id))
      c = mr_err_set(err, MR_E_NOMEM, "out of memory");
  }
  return c;
}

void mr_bpe_free(mr_bpe *b) {
  mr_cuts_free(&b->cuts);
  mr_merger_free(&b->merger);
  mr_text_free(&b->fixed);
  mr_text_free(&b->shown);
}
