/* An adapter beside a tiny model: adapter_config.json, the header of adapter_model.safetensors and
 * the first of its tensors' bytes (zeros follow), with a NUL between them. */
#include <math.h>

#include "fuzz.h"
#include "io/mem.h"
#include "src/lora.h"
#include "tests/unit/tiny_gguf.h"

enum { HEADER = 20000, DATA = 65536 };

static void write_tensors(const char *header, size_t n, const char *values, size_t n_values) {
  static uint8_t file[8 + HEADER + DATA];
  n = n < HEADER ? n : HEADER;
  n_values = n_values < DATA ? n_values : DATA;
  memset(file, 0, sizeof file);
  for (int i = 0; i < 8; i++)
    file[i] = (uint8_t)((uint64_t)n >> (8 * i));
  memcpy(file + 8, header, n);
  memcpy(file + 8 + n, values, n_values);
  fuzz_write("adapter_model.safetensors", file, 8 + n + DATA);
}

static void check_matrix(const mr_lora *l, const mr_matrix *w) {
  const mr_lora_link *y = w->lora;
  if (!y || (!y->down && !y->bias))
    return;
  fuzz_check(!y->a && !y->b);
  for (int i = 0; y->bias && i < w->n; i++)
    fuzz_check(isfinite(y->bias[i]));
  if (!y->down)
    return;
  fuzz_check(y->rank >= 1 && y->rank <= MR_LORA_RANK_MAX && y->up && y->down->packed);
  fuzz_check(y->first >= 0 && y->first + y->rank <= y->down->ranks);
  fuzz_check(y->down->ranks <= l->most_ranks && y->down->k == w->k && w->k <= l->widest);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static mr_model *m;
  mr_err e = MR_ERR_INIT;
  const char *config = (const char *)data;
  const char *end = size ? memchr(config, 0, size) : NULL;
  size_t n_config = end ? (size_t)(end - config) : size;
  size_t left = end ? size - n_config - 1 : 0;
  const char *header = end ? end + 1 : "";
  const char *stop = left ? memchr(header, 0, left) : NULL;
  size_t n_header = stop ? (size_t)(stop - header) : left;
  size_t n_values = stop ? left - n_header - 1 : 0;
  if (!m) {
    fuzz_check(tiny_gguf_write(fuzz_path("tiny.gguf"), -1));
    fuzz_check(mr_model_open(&m, fuzz_path("tiny.gguf"), &e) == MR_OK);
  }
  fuzz_write("adapter_config.json", config, n_config);
  write_tensors(header, n_header, n_values ? stop + 1 : "", n_values);
  int64_t live = mr_mem_live();
  mr_lora *l;
  mr_code rc = mr_lora_new(&l, m, 1, mr_kernels_ref(), MR_SCHEME_F32, true, &e);
  if (!rc)
    rc = mr_lora_add(l, 0, "fuzzed", fuzz_dir(), &e);
  fuzz_check_error(rc, &e);
  for (int i = 0; !rc && i < m->c.n_layers; i++)
    for (int j = 0; j < mr_layer_matrices(m, &m->layers[i]); j++)
      check_matrix(l, mr_layer_matrix(&m->layers[i], j));
  if (!rc)
    check_matrix(l, &m->head);
  mr_lora_close(l);
  fuzz_check(mr_mem_live() == live && !m->lora && !m->head.lora && !m->layers[0].q.lora);
  return 0;
}
