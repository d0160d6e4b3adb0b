/* A model file: metadata, vocabulary, template, configuration, tensors. */
#include "fuzz.h"
#include "io/gguf.h"
#include "src/model.h"
#include "src/prompt.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  const char *path = fuzz_write("model.gguf", data, size);
  mr_err e = MR_ERR_INIT;
  mr_gguf *g;
  mr_code rc = mr_gguf_open(&g, path, &e);
  fuzz_check_error(rc, &e);
  if (rc)
    return 0;
  for (size_t i = 0; i < mr_gguf_n_tensors(g); i++) { /* every byte of it is there */
    const mr_gguf_tensor *t = mr_gguf_tensor_at(g, i);
    volatile uint8_t last = t->bytes ? t->data[t->bytes - 1] : 0;
    (void)last;
  }
  mr_gguf_close(g);
  mr_prompter *p;
  rc = mr_prompter_open(&p, path, &e);
  fuzz_check_error(rc, &e);
  if (!rc) {
    mr_ids ids = {0};
    mr_prompter_text(p, "One, two, \xc3\xa9 3!", 15, &ids, &e);
    mr_ids_free(&ids);
    mr_prompter_close(p);
  }
  mr_model *m;
  mr_err_clear(&e);
  rc = mr_model_open(&m, path, &e);
  fuzz_check_error(rc, &e);
  if (!rc)
    mr_model_close(m);
  return 0;
}
