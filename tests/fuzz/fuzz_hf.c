/* A Hugging Face directory: config.json, tokenizer.json, tokenizer_config.json, the header of
 * model.safetensors and a text, with a NUL between them. */
#include "fuzz.h"
#include "src/model.h"
#include "src/prompt.h"

enum { PARTS = 5, DATA = 8192 };

static void write_tensors(const char *header, size_t n) {
  static uint8_t file[8 + 20000 + DATA];
  if (n > 20000)
    n = 20000;
  memset(file, 0, sizeof file);
  for (int i = 0; i < 8; i++)
    file[i] = (uint8_t)((uint64_t)n >> (8 * i));
  memcpy(file + 8, header, n);
  fuzz_write("model.safetensors", file, 8 + n + DATA);
}

static void use_text(const mr_prompter *p, const char *text, size_t len) {
  mr_err e = MR_ERR_INIT;
  mr_ids ids = {0};
  mr_text out = {0};
  mr_code rc = mr_prompter_text(p, text, len, &ids, &e);
  fuzz_check_error(rc, &e);
  if (!rc && mr_prompter_vocab(p)) {
    mr_detok d;
    mr_detok_init(&d, mr_prompter_vocab(p), true, true);
    for (size_t i = 0; i < ids.n; i++) {
      fuzz_check(ids.ids[i] >= 0 && ids.ids[i] < mr_vocab_size(mr_prompter_vocab(p)));
      mr_detok_push(&d, ids.ids[i], &out);
    }
    mr_detok_finish(&d, &out);
    fuzz_check(!out.data || mr_utf8_valid(out.data, out.len) < 0);
  }
  mr_text_free(&out);
  mr_ids_free(&ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const char *const names[] = {"config.json", "tokenizer.json", "tokenizer_config.json"};
  const char *part[PARTS] = {"", "", "", "", ""}, *at = (const char *)data;
  size_t len[PARTS] = {0};
  mr_err e = MR_ERR_INIT;
  for (size_t i = 0, left = size; i < PARTS && left; i++) {
    const char *end = i + 1 < PARTS ? memchr(at, 0, left) : NULL;
    part[i] = at;
    len[i] = end ? (size_t)(end - at) : left;
    left -= len[i] + (end != NULL);
    at += len[i] + 1;
  }
  for (int i = 0; i < 3; i++) {
    if (len[i])
      fuzz_write(names[i], part[i], len[i]);
    else
      unlink(fuzz_path(names[i]));
  }
  write_tensors(part[3], len[3]);
  mr_prompter *p;
  mr_code rc = mr_prompter_open(&p, fuzz_dir(), &e);
  fuzz_check_error(rc, &e);
  if (!rc) {
    use_text(p, part[4], len[4]);
    mr_prompter_close(p);
  }
  mr_model *m;
  mr_err_clear(&e);
  rc = mr_model_open(&m, fuzz_dir(), &e);
  fuzz_check_error(rc, &e);
  if (!rc)
    mr_model_close(m);
  return 0;
}
