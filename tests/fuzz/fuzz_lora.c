/* An adapter beside two tiny models: adapter_config.json, the header of adapter_model.safetensors
 * and the first of its tensors' bytes (zeros follow), with a NUL between them. */
#include <math.h>

#include "fuzz.h"
#include "io/mem.h"
#include "src/lora.h"
#include "tests/unit/tiny_gguf.h"

#define assert_true fuzz_check
#define assert_non_null fuzz_check
#define assert_int_equal(a, b) fuzz_check((a) == (b))
#include "tests/unit/tiny_hf.h"

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
  if (!y)
    return;
  fuzz_check(!y->a && !y->b && (y->rank > 0) == (y->down != NULL));
  fuzz_check((y->up_rank > 0) == (y->up != NULL) && y->up_rank <= l->most_ranks);
  for (int i = 0; y->bias && i < w->n; i++)
    fuzz_check(isfinite(y->bias[i]));
  if (y->heads)
    fuzz_check(y->heads->panels && y->heads->n * y->heads->rank <= MR_LORA_HEADS_MAX &&
               y->heads->n * y->heads->size == (y->heads->output ? w->k : w->n));
  if (!y->down)
    return;
  fuzz_check(y->rank <= (y->heads ? MR_LORA_HEADS_MAX : 0) + MR_LORA_RANK_MAX && y->down->packed);
  fuzz_check(y->first >= 0 && y->first + y->rank <= y->down->ranks);
  fuzz_check(y->down->ranks <= l->most_ranks && y->down->k == w->k && w->k <= l->widest);
}

/* Latent attention and experts: what an adapter adds is made of several tensors, or one is cut. */
static const char *write_directory(void) {
  static out_file f;
  static const part layer[] = {{"input_layernorm", TINY_HF_WIDE, 0},
                               {"post_attention_layernorm", TINY_HF_WIDE, 0},
                               {"self_attn.q_proj", 2 * 12, TINY_HF_WIDE},
                               {"self_attn.kv_a_layernorm", 16, 0},
                               {"self_attn.kv_a_proj_with_mqa", 16 + 4, TINY_HF_WIDE},
                               {"self_attn.kv_b_proj", 2 * 14, 16},
                               {"self_attn.o_proj", TINY_HF_WIDE, 2 * 6},
                               {"mlp.gate", 2, TINY_HF_WIDE},
                               {"mlp.experts.0.gate_proj", 32, TINY_HF_WIDE},
                               {"mlp.experts.0.up_proj", 32, TINY_HF_WIDE},
                               {"mlp.experts.0.down_proj", TINY_HF_WIDE, 32},
                               {"mlp.experts.1.gate_proj", 32, TINY_HF_WIDE},
                               {"mlp.experts.1.up_proj", 32, TINY_HF_WIDE},
                               {"mlp.experts.1.down_proj", TINY_HF_WIDE, 32}};
  snprintf(temp_dir, sizeof temp_dir, "%s", fuzz_dir());
  return write_model(&f, layer, sizeof layer / sizeof *layer,
                     "\"model_type\":\"deepseek_v2\",\"intermediate_size\":96,"
                     "\"num_attention_heads\":2,\"kv_lora_rank\":16,\"qk_nope_head_dim\":8,"
                     "\"qk_rope_head_dim\":4,\"v_head_dim\":6,\"q_lora_rank\":null,"
                     "\"n_routed_experts\":2,\"num_experts_per_tok\":1,"
                     "\"moe_intermediate_size\":32,\"first_k_dense_replace\":0");
}

static void try_on(mr_model *m) {
  mr_err e = MR_ERR_INIT;
  int64_t live = mr_mem_live();
  mr_lora *l;
  mr_code rc = mr_lora_new(&l, m, 1, mr_kernels_ref(), MR_SCHEME_F32, MR_LORA_PANELS, &e);
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
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static mr_model *file, *directory;
  mr_err e = MR_ERR_INIT;
  const char *config = (const char *)data;
  const char *end = size ? memchr(config, 0, size) : NULL;
  size_t n_config = end ? (size_t)(end - config) : size;
  size_t left = end ? size - n_config - 1 : 0;
  const char *header = end ? end + 1 : "";
  const char *stop = left ? memchr(header, 0, left) : NULL;
  size_t n_header = stop ? (size_t)(stop - header) : left;
  size_t n_values = stop ? left - n_header - 1 : 0;
  if (!file) {
    fuzz_check(tiny_gguf_write(fuzz_path("tiny.gguf"), -1));
    fuzz_check(mr_model_open(&file, fuzz_path("tiny.gguf"), &e) == MR_OK);
    fuzz_check(mr_model_open(&directory, write_directory(), &e) == MR_OK);
  }
  fuzz_write("adapter_config.json", config, n_config);
  write_tensors(header, n_header, n_values ? stop + 1 : "", n_values);
  try_on(file);
  try_on(directory);
  return 0;
}
