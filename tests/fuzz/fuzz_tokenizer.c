/* Text to ids and back. The first byte chooses vocabulary and flags, the second what is plain. */
#include "../unit/vocab_builder.h"
#include "fuzz.h"
#include "src/tokenizer.h"

static mr_vocab *open_vocab(const vocab_parts *p) {
  mr_vocab *v = NULL;
  mr_err e = MR_ERR_INIT;
  fuzz_check(open_parts(p, &v, &e) == MR_OK);
  return v;
}

/* Every byte has a token, so nothing may be lost (bytes that are no UTF-8 become U+FFFD). */
static void check_bytes(const mr_vocab *v, const mr_ids *ids, const char *text, size_t len) {
  mr_text out = {0};
  for (size_t i = 0; i < ids->n; i++)
    mr_detok_bytes(v, ids->ids[i], &out);
  fuzz_check(out.len == len && (len == 0 || !memcmp(out.data, text, len)));
  mr_text_free(&out);
}

static void check_text(const mr_vocab *v, const mr_ids *ids, bool control) {
  mr_text out = {0};
  mr_detok d;
  mr_detok_init(&d, v, true, control);
  for (size_t i = 0; i < ids->n; i++) {
    mr_detok_push(&d, ids->ids[i], &out);
    fuzz_check(!out.data || mr_utf8_valid(out.data, out.len) < 0);
  }
  mr_detok_finish(&d, &out);
  fuzz_check(!out.data || mr_utf8_valid(out.data, out.len) < 0);
  mr_text_free(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static mr_vocab *bpe, *spm;
  mr_ids ids = {0};
  mr_err e = MR_ERR_INIT;
  if (!bpe) {
    const vocab_parts b = bpe_parts(), s = spm_parts();
    bpe = open_vocab(&b);
    spm = open_vocab(&s);
  }
  if (size < 2)
    return 0;
  const mr_vocab *v = data[0] & 1 ? spm : bpe;
  int flags = data[0] >> 1 & 7;
  const char *text = (const char *)data + 2;
  uint8_t *plain = data[0] & 16 ? malloc(size) : NULL;
  for (size_t i = 0; plain && i < size - 2; i++)
    plain[i] = data[1] >> (i & 7) & 1;
  mr_code rc = mr_tokenizer_encode(v, text, size - 2, plain, flags, &ids, &e);
  fuzz_check_error(rc, &e);
  for (size_t i = 0; i < ids.n; i++)
    fuzz_check(ids.ids[i] >= 0 && ids.ids[i] < mr_vocab_size(v));
  if (rc == MR_OK && v == bpe && flags == 0 && mr_utf8_valid(text, size - 2) < 0)
    check_bytes(v, &ids, text, size - 2);
  check_text(v, &ids, data[0] & 32);
  mr_ids_free(&ids);
  free(plain);
  return 0;
}
