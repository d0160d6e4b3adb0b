#include "src/tokenizer.h"

#include <string.h>

#include "io/mem.h"
#include "src/bpe.h"
#include "src/hf_tokenizer.h"
#include "src/special.h"
#include "src/spm.h"

#define MAX_TEXT ((size_t)1 << 30)
int mr_ids_push(mr_ids *v, int32_t id) {
  if (v->n == v->cap && !mr_mem_grow((void **)&v->ids, &v->cap, v->n + 1, sizeof *v->ids))
    return 0;
  v->ids[v->n++] = id;
  return 1;
}

void mr_ids_free(mr_ids *v) {
  mr_mem_free(v->ids);
  *v = (mr_ids){0};
}

/* ---- text to ids ---- */

static mr_code encode_spans(const mr_vocab *v, const mr_spans *spans, const char *text, bool lossy,
                            mr_ids *out, mr_err *err) {
  mr_bpe bpe = {.lossy = lossy};
  mr_spm spm = {0};
  mr_code c = MR_OK;
  bool after_token = true; /* a SentencePiece text gets its space at the start and after each
                              special token */
  for (size_t i = 0; !c && i < spans->n; i++) {
    const mr_span *s = &spans->s[i];
    if (s->id >= 0)
      c = mr_ids_push(out, s->id) ? MR_OK : mr_err_set(err, MR_E_NOMEM, "out of memory");
    else if (v->spm)
      c = mr_spm_encode(v, &spm, text + s->at, s->len, v->add_space_prefix && after_token, out,
                        err);
    else
      c = mr_bpe_encode(v, &bpe, text + s->at, s->len, out, err);
    after_token = s->id >= 0;
  }
  mr_bpe_free(&bpe);
  mr_spm_free(&spm);
  return c;
}

mr_code mr_tokenizer_encode(const mr_vocab *v, const char *text, size_t len, const uint8_t *plain,
                            int flags, mr_ids *out, mr_err *err) {
  if (len > MAX_TEXT)
    return mr_err_set(err, MR_E_DATA,
                      "the text has %zu bytes; at most %zu can be tokenized at once", len,
                      MAX_TEXT);
  if (v->hf)
    return mr_hf_encode(v, text, len, plain, flags, out, err);
  size_t before = out->n;
  mr_spans spans = {0};
  int ok = mr_special_split(v, text, len, plain, flags & MR_TOK_PARSE_SPECIAL, &spans);
  bool begun =
      spans.n && spans.s[0].id >= 0 && spans.s[0].id == v->bos && !(flags & MR_TOK_UPSTREAM);
  bool add = flags & MR_TOK_ADD_SPECIAL;
  if (ok && add && v->add_bos && !begun)
    ok = mr_ids_push(out, v->bos);
  mr_code c = ok ? encode_spans(v, &spans, text, flags & MR_TOK_UPSTREAM, out, err)
                 : mr_err_set(err, MR_E_NOMEM, "out of memory");
  if (!c && add && v->add_eos && !mr_ids_push(out, v->eos))
    c = mr_err_set(err, MR_E_NOMEM, "out of memory");
  mr_spans_free(&spans);
  if (c)
    out->n = before;
  return c;
}

/* ---- ids to text ---- */

static int hex(char c) {
  return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* NN of "<0xNN>", or -1. */
static int named_byte(mr_str t) {
  if (t.len != 6 || memcmp(t.s, "<0x", 3) || t.s[5] != '>' || hex(t.s[3]) < 0 || hex(t.s[4]) < 0)
    return -1;
  return hex(t.s[3]) << 4 | hex(t.s[4]);
}

void mr_detok_bytes(const mr_vocab *v, int32_t id, mr_text *out) {
  mr_str t;
  if (!mr_vocab_piece(v, id, &t))
    return;
  if (v->hf) {
    mr_hf_decode(v, id, false, out);
    return;
  }
  uint8_t type = v->type[id];
  int byte = type == MR_TOKEN_BYTE ? named_byte(t) : -1;
  if (byte >= 0) {
    mr_text_addc(out, (char)byte);
  } else if (v->spm && (type == MR_TOKEN_NORMAL || type == MR_TOKEN_UNUSED)) {
    const char *s = t.s, *end = t.s + t.len;
    for (const char *p; (p = memmem(s, (size_t)(end - s), MR_SPACE_MARK, 3)); s = p + 3) {
      mr_text_add(out, s, (size_t)(p - s));
      mr_text_addc(out, ' ');
    }
    mr_text_add(out, s, (size_t)(end - s));
  } else {
    mr_text_add(out, t.s, t.len);
  }
}

void mr_detok_init(mr_detok *d, const mr_vocab *v, bool strip_space, bool control) {
  *d = (mr_detok){
      .v = v, .first = true, .strip_space = strip_space && v->add_space_prefix, .control = control};
}

/* What the n bytes are: 1 a whole character, 0 the start of one, -1 neither (Unicode, table 3-7).
 */
static int judge(const uint8_t *s, int n) {
  int want = s[0] < 0x80   ? 1
             : s[0] < 0xc2 ? 0
             : s[0] < 0xe0 ? 2
             : s[0] < 0xf0 ? 3
             : s[0] < 0xf5 ? 4
                           : 0;
  if (!want)
    return -1;
  if (n > 1) {
    uint8_t low = s[0] == 0xe0 ? 0xa0 : s[0] == 0xf0 ? 0x90 : 0x80;
    uint8_t high = s[0] == 0xed ? 0x9f : s[0] == 0xf4 ? 0x8f : 0xbf;
    if (s[1] < low || s[1] > high)
      return -1;
  }
  for (int i = 2; i < n; i++)
    if ((s[i] & 0xc0) != 0x80)
      return -1;
  return n == want;
}

/* Adds one byte to what is held and lets out what is sure. */
static void step(mr_detok *d, char byte, mr_text *out) {
  d->held[d->n_held++] = byte;
  int is = judge((const uint8_t *)d->held, d->n_held);
  if (is < 0 && d->n_held > 1) { /* the sequence broke off before this byte */
    mr_text_add_code(out, 0xfffd);
    d->held[0] = byte, d->n_held = 1;
    is = judge((const uint8_t *)d->held, 1);
  }
  if (is < 0)
    mr_text_add_code(out, 0xfffd);
  else if (is > 0)
    mr_text_add(out, d->held, (size_t)d->n_held);
  if (is)
    d->n_held = 0;
}

void mr_detok_push(mr_detok *d, int32_t id, mr_text *out) {
  if (!d->control && mr_vocab_is_control(d->v, id))
    return;
  size_t at = out->len;
  size_t skip = 0;
  if (d->v->hf) { /* its steps know what goes at the start */
    mr_hf_decode(d->v, id, d->first && d->strip_space, out);
    d->first = false;
  } else {
    mr_detok_bytes(d->v, id, out);
    skip = d->first && d->strip_space && out->len > at && out->data[at] == ' ';
  }
  if (out->failed || out->len == at)
    return;
  size_t n = out->len - at - skip;
  d->first = false;
  if (!skip && !d->n_held && mr_utf8_valid(out->data + at, n) < 0)
    return;
  char *bytes = mr_mem_copy(out->data + at + skip, n); /* not whole characters: one by one */
  out->len = at;
  out->data[at] = 0;
  out->failed = !bytes;
  for (size_t i = 0; bytes && i < n; i++)
    step(d, bytes[i], out);
  mr_mem_free(bytes);
}

void mr_detok_finish(mr_detok *d, mr_text *out) {
  if (d->n_held)
    mr_text_add_code(out, 0xfffd);
  d->n_held = 0;
}
