#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "conformance.h"
#include "gguf_builder.h"
#include "io/mem.h"
#include "io/safetensors_write.h"
#include "io/sys.h"
#include "src/model.h"
#include "temp.h"

static mr_model *opened(build *b) {
  mr_err e = MR_ERR_INIT;
  mr_model *m = NULL;
  const char *path = build_file(b);
  if (mr_model_open(&m, path, &e))
    fail_msg("%s", e.text);
  build_remove(path);
  return m;
}

static void refused(build *b, const char *words) {
  mr_err e = MR_ERR_INIT;
  mr_model *m = NULL;
  const char *path = build_file(b);
  int64_t live = mr_mem_live();
  mr_code rc = mr_model_open(&m, path, &e);
  build_remove(path);
  if (rc != MR_E_DATA || m || !strstr(e.text, words))
    fail_msg("code %d \"%s\", wanted \"%s\"", rc, e.text, words);
  assert_int_equal(mr_mem_live(), live);
}

static void opens_a_llama(void **state) {
  (void)state;
  build b = {0};
  build_llama_keys(&b);
  build_llama_tensors(&b, MR_Q8_0, NULL);
  build_tensor(&b, "rope_freqs.weight", MR_F32, 8, 0, (float[8]){1, 1, 1, 1, 2, 4, 8, 8});
  mr_model *m = opened(&b);
  const mr_layer *y = &m->layers[0];
  assert_int_equal(y->q.n, 32);
  assert_int_equal(y->k.n, 16);
  assert_int_equal(y->down.k, 64);
  assert_int_equal(y->gate.dtype, MR_Q8_0);
  assert_int_equal(y->q.row_bytes, 34);
  assert_non_null(y->attn_norm);
  assert_null(y->q.bias);
  assert_null(y->q_norm);
  assert_ptr_equal(m->head.data, m->embed.data); /* tied */
  assert_true(m->rope_freqs[5] == 4);
  assert_int_equal(m->n_unused, 0);
  uint64_t matrices = 8 * 32 + 2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32;
  assert_int_equal(m->n_params, matrices + 3 * 32 + 8);
  assert_true(mr_model_head_flops(m) == 2.0 * 8 * 32);
  assert_true(mr_model_layer_flops(m) == 2.0 * (double)(matrices - 8 * 32));
  mr_model_close(m);
}

static void reads_what_is_optional(void **state) {
  (void)state;
  build b = {0};
  float bias[16], half[32];
  for (int i = 0; i < 16; i++)
    bias[i] = (float)i;
  build_llama_keys(&b);
  build_llama_tensors(&b, MR_F16, "blk.0.ffn_norm.weight");
  build_tensor(&b, "blk.0.attn_k.bias", MR_F32, 16, 0, bias);
  build_tensor(&b, "output.weight", MR_Q4_1, 32, 8, NULL);
  build_tensor(&b, "something.else", MR_IQ1_S, 256, 0, NULL);
  build_tensor(&b, "blk.7.attn_q.weight", MR_F32, 8, 0, NULL); /* of a layer that there is not */
  uint16_t w[32];
  for (int i = 0; i < 32; i++) {
    half[i] = (float)i / 4;
    w[i] = mr_f32_to_f16(half[i]);
  }
  build_tensor(&b, "blk.0.ffn_norm.weight", MR_F16, 32, 0, w); /* a norm in F16 */
  mr_model *m = opened(&b);
  assert_memory_equal(m->layers[0].k.bias, bias, sizeof bias);
  assert_memory_equal(m->layers[0].ffn_norm, half, sizeof half);
  assert_int_equal(m->head.dtype, MR_Q4_1);
  assert_int_equal(m->n_unused, 2);
  assert_memory_equal(m->unused.s, "something.else", 14);
  mr_model_close(m);
}

static void names_what_is_missing(void **state) {
  (void)state;
  static const char *const names[] = {
      "token_embd.weight",        "output_norm.weight",    "blk.0.attn_norm.weight",
      "blk.0.attn_q.weight",      "blk.0.attn_k.weight",   "blk.0.attn_v.weight",
      "blk.0.attn_output.weight", "blk.0.ffn_norm.weight", "blk.0.ffn_gate.weight",
      "blk.0.ffn_up.weight",      "blk.0.ffn_down.weight"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    build b = {0};
    build_llama_keys(&b);
    build_llama_tensors(&b, MR_F32, names[i]);
    refused(&b, names[i]);
  }
}

static void wrong(const char *name, int type, uint64_t cols, uint64_t rows, const char *words) {
  build b = {0};
  build_llama_keys(&b);
  build_llama_tensors(&b, MR_F32, name);
  build_tensor(&b, name, type, cols, rows, NULL);
  refused(&b, words);
}

static void refuses_shapes_and_types(void **state) {
  (void)state;
  wrong("blk.0.attn_q.weight", MR_F32, 1024, 0, "blk.0.attn_q.weight is [1, 1024]");
  wrong("blk.0.attn_q.weight", MR_F32, 32, 31, "is [31, 32]; the metadata asks for [32, 32]");
  wrong("blk.0.ffn_down.weight", MR_F32, 32, 64, "asks for [32, 64]");
  wrong("blk.0.attn_norm.weight", MR_F32, 31, 0, "blk.0.attn_norm.weight");
  wrong("token_embd.weight", MR_F32, 64, 8, "token_embd.weight");
  wrong("blk.0.ffn_up.weight", MR_I32, 32, 64, "has type I32, which is not supported yet");
  wrong("rope_freqs.weight", MR_F32, 7, 0, "rope_freqs.weight");
  wrong("output.weight", MR_F32, 32, 9, "output.weight");
  wrong("blk.0.attn_q.bias", MR_F32, 31, 0, "blk.0.attn_q.bias");
  build b = {0};
  float zero[8] = {0};
  build_llama_keys(&b);
  build_llama_tensors(&b, MR_F32, NULL);
  build_tensor(&b, "rope_freqs.weight", MR_F32, 8, 0, zero);
  refused(&b, "factor 0 is 0");
}

/* Leaving these out would change the results without a word. */
static void refuses_unknown_parts_of_layers(void **state) {
  (void)state;
  wrong("blk.0.attn_sinks.weight", MR_F32, 8, 0, "not known for architecture llama");
  wrong("blk.0.attn_q_norm.weight", MR_F32, 16, 0, "blk.0.attn_q_norm.weight");
  wrong("rope_factors_long.weight", MR_F32, 8, 0, "rope_factors_short.weight");
  wrong("position_embd.weight", MR_F32, 32, 16, "position_embd.weight");
}

static void refuses_more_tokens_than_rows(void **state) {
  (void)state;
  build b = {0};
  mr_text t = {0};
  for (int i = 0; i < 9; i++)
    put_str(&t, "x", 1);
  build_llama_keys(&b);
  build_array(&b, "tokenizer.ggml.tokens", MR_GGUF_STRING, 9, t.data, t.len);
  build_llama_tensors(&b, MR_F32, NULL);
  refused(&b, "9 tokens");
  mr_text_free(&t);
}

/* phi3: q, k and v in one tensor, gate and up in another. */
static void cuts_fused_tensors(void **state) {
  (void)state;
  build b = {0};
  build_str(&b, "general.architecture", "phi3");
  build_u32(&b, "phi3.block_count", 1);
  build_u32(&b, "phi3.context_length", 16);
  build_u32(&b, "phi3.embedding_length", 32);
  build_u32(&b, "phi3.feed_forward_length", 64);
  build_u32(&b, "phi3.attention.head_count", 2);
  build_u32(&b, "phi3.attention.head_count_kv", 1);
  build_f32(&b, "phi3.attention.layer_norm_rms_epsilon", 1e-5f);
  build_tensor(&b, "token_embd.weight", MR_Q4_0, 32, 8, NULL);
  build_tensor(&b, "output_norm.weight", MR_F32, 32, 0, NULL);
  build_tensor(&b, "blk.0.attn_norm.weight", MR_F32, 32, 0, NULL);
  build_tensor(&b, "blk.0.attn_qkv.weight", MR_Q4_0, 32, 64, NULL);
  build_tensor(&b, "blk.0.attn_output.weight", MR_Q4_0, 32, 32, NULL);
  build_tensor(&b, "blk.0.ffn_norm.weight", MR_F32, 32, 0, NULL);
  build_tensor(&b, "blk.0.ffn_up.weight", MR_Q4_0, 32, 128, NULL);
  build_tensor(&b, "blk.0.ffn_down.weight", MR_Q4_0, 64, 32, NULL);
  mr_model *m = opened(&b);
  const mr_layer *y = &m->layers[0];
  assert_int_equal(y->q.n, 32);
  assert_int_equal(y->v.n, 16);
  assert_int_equal(y->k.first, 32);
  assert_int_equal(y->v.first, 48);
  assert_int_equal(y->up.first, 64);
  mr_model_close(m);
}

/* y = W x through packed panels, against the rows of the file. Float32 on both sides: only the
 * order differs. */
static void check_packed(const mr_matrix *w, const mr_gemm_ops *ops) {
  float x[64], y[64], row[64];
  uint8_t *packed = mr_mem_pages(ops->row_bytes(w->k));
  for (int i = 0; i < w->k; i++)
    x[i] = (float)((i * 7) % 11) - 5;
  ops->pack_row(packed, x, w->k);
  ops->gemm(y, 64, packed, 1, w->packed, 0, (w->n + ops->nr - 1) / ops->nr, w->n, w->k, NULL, 0);
  for (int r = 0; r < w->n; r++) {
    double want = 0, size = 1e-6;
    mr_matrix_row(w, r, row);
    for (int i = 0; i < w->k; i++) {
      want += (double)row[i] * (double)x[i];
      size += fabs((double)row[i] * (double)x[i]);
    }
    assert_true(fabs(want - (double)y[r]) <= 1e-5 * size);
  }
  mr_mem_free(packed);
}

static void packs(void **state) {
  (void)state;
  build b = {0};
  build_llama_keys(&b);
  build_llama_tensors(&b, MR_Q5_1, NULL);
  mr_model *m = opened(&b);
  const mr_kernels *k = mr_kernels_ref();
  const mr_gemm_ops *ops = &k->gemm[MR_SCHEME_F32];
  assert_int_equal(mr_model_pack(m, k, MR_SCHEME_F32, NULL, NULL), MR_OK);
  check_packed(&m->head, ops);
  check_packed(&m->layers[0].q, ops);
  check_packed(&m->layers[0].down, ops);
  assert_null(m->embed.packed); /* rows are read from the file */
  uint64_t bytes = m->packed_bytes;
  size_t one = ops->panel_bytes(64) * (size_t)((32 + ops->nr - 1) / ops->nr);
  uint8_t *alone = mr_mem_pages(one);
  memcpy(alone, m->layers[0].down.packed, one);

  mr_pool *pool = mr_pool_new(3, 0); /* any worker packs the same bytes; packing again is fine */
  assert_non_null(pool);
  assert_int_equal(mr_model_pack(m, k, MR_SCHEME_F32, pool, NULL), MR_OK);
  assert_int_equal(m->packed_bytes, bytes);
  assert_memory_equal(alone, m->layers[0].down.packed, one);
  mr_pool_free(pool);
  mr_mem_free(alone);
  mr_model_close(m);
}

static void every_allocation_may_fail(void **state) {
  (void)state;
  build b = {0};
  build_llama_keys(&b);
  build_llama_tensors(&b, MR_F32, NULL);
  const char *path = build_file(&b);
  int64_t live = mr_mem_live();
  int n = 0;
  for (mr_code rc = MR_E_NOMEM; rc != MR_OK; n++) {
    mr_model *m = NULL;
    mr_err e = MR_ERR_INIT;
    mr_mem_fail_after(n);
    rc = mr_model_open(&m, path, &e);
    if (rc == MR_OK)
      rc = mr_model_pack(m, mr_kernels_ref(), MR_SCHEME_F32, NULL, &e);
    mr_mem_fail_after(-1);
    assert_true(rc == MR_OK || rc == MR_E_NOMEM);
    mr_model_close(m);
    assert_int_equal(mr_mem_live(), live);
    assert_true(n < 200);
  }
  assert_true(n > 20);
  build_remove(path);
}

static void conformance_models(void **state) {
  (void)state;
  static const char *const names[] = {"gemma3/gemma3-F32",
                                      "gemma3/gemma3-BF16",
                                      "gemma3/gemma3-Q4_0",
                                      "gemma3/gemma3-Q8_0",
                                      "llama_gqa/llama_gqa-F32",
                                      "llama_gqa/llama_gqa-IQ4_NL",
                                      "llama_gqa/llama_gqa-MXFP4",
                                      "llama_gqa/llama_gqa-Q4_0-align64",
                                      "llama_gqa/llama_gqa-Q8_0-split-00001-of-00003",
                                      "llama_k/llama_k-IQ4_XS",
                                      "llama_k/llama_k-Q2_K",
                                      "llama_k/llama_k-Q3_K",
                                      "llama_k/llama_k-Q4_K",
                                      "llama_k/llama_k-Q5_K",
                                      "llama_k/llama_k-Q6_K",
                                      "llama_k/llama_k-TQ1_0",
                                      "llama_k/llama_k-TQ2_0",
                                      "qwen2/qwen2-F16",
                                      "qwen2/qwen2-Q5_0",
                                      "qwen2_k/qwen2_k-Q4_K_M"};
  if (!data_path("tiny/gguf"))
    skip();
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    char rest[128];
    mr_err e = MR_ERR_INIT;
    mr_model *m = NULL;
    snprintf(rest, sizeof rest, "tiny/gguf/%s.gguf", names[i]);
    const char *path = data_path(rest);
    assert_non_null(path);
    if (mr_model_open(&m, path, &e))
      fail_msg("%s: %s", names[i], e.text);
    assert_int_equal(m->c.n_vocab, 320);
    assert_int_equal(m->n_unused, 0);
    assert_int_equal(m->layers[0].q.bias != NULL, m->c.arch.qkv_bias);
    assert_int_equal(m->layers[0].q_norm != NULL, m->c.arch.qk_norm);
    mr_model_close(m);
  }
}

/* ------------------------------------------------------------------ memory while loading */

static long base_kib, peak_kib;
static mr_sys hooked;

static long anonymous_kib(void) {
  char line[256];
  long kib = 0;
  FILE *f = fopen("/proc/self/status", "r");
  while (f && fgets(line, sizeof line, f))
    if (sscanf(line, "RssAnon: %ld", &kib) == 1)
      break;
  if (f)
    fclose(f);
  return kib;
}

/* Called when a matrix has just been packed. */
static void sample(const void *p, size_t len) {
  long now = anonymous_kib();
  peak_kib = now > peak_kib ? now : peak_kib;
  mr_sys_os.unload(p, len);
}

/* At most 1.1 times the packed weights and one tensor; what is mapped does not count, and a packed
 * tensor's pages leave memory. */
static void check_memory(const char *path, double tensor) {
  mr_err e = MR_ERR_INIT;
  mr_model *m;
  hooked = mr_sys_os;
  hooked.unload = sample;
  base_kib = peak_kib = anonymous_kib();
  mr_sys_now = &hooked;
  assert_int_equal(mr_model_open(&m, path, &e), MR_OK);
  assert_int_equal(mr_model_pack(m, mr_kernels_best(), MR_SCHEME_I8, NULL, &e), MR_OK);
  mr_sys_now = &mr_sys_os;
  double packed = (double)m->packed_bytes, peak = 1024.0 * (double)(peak_kib - base_kib);
  print_message("packed %.1f MB, peak of anonymous memory %.1f MB\n", packed / 1e6, peak / 1e6);
  if (peak > 1.1 * packed + tensor)
    fail_msg("%.0f bytes of anonymous memory for %.0f packed ones", peak, packed);
  mr_model_close(m);
}

static void memory_of_loading(void **state) {
  (void)state;
  const char *path = "models/SmolLM2-135M-Instruct.Q4_1.gguf";
  if (access(path, R_OK) || !anonymous_kib())
    skip();
  check_memory(path, 49152.0 * 576 * 5 / 8);
}

/* A directory of F16 tensors that are all zero. */
static const char *zeros_dir(const char *config, const char *const *names, const int64_t (*dims)[2],
                             int n) {
  mr_err e = MR_ERR_INIT;
  mr_st_writer *w;
  static const uint8_t zeros[1 << 16];
  temp_text("config.json", config);
  assert_int_equal(mr_st_write_open(&w, temp_path("model.safetensors"), &e), MR_OK);
  for (int i = 0; i < n; i++)
    mr_st_write_tensor(w, names[i], MR_F16, dims[i][1] ? 2 : 1, dims[i]);
  assert_int_equal(mr_st_write_begin(w, &e), MR_OK);
  for (int i = 0; i < n; i++)
    for (int64_t left = dims[i][0] * (dims[i][1] ? dims[i][1] : 1) * 2; left > 0;) {
      size_t part = left < (int64_t)sizeof zeros ? (size_t)left : sizeof zeros;
      assert_int_equal(mr_st_write_data(w, zeros, part, &e), MR_OK);
      left -= (int64_t)part;
    }
  assert_int_equal(mr_st_write_finish(w, &e), MR_OK);
  mr_st_write_free(w);
  return temp_dir;
}

/* The head of a model of text and images stands outside the text's layers. One that is nowhere is
 * not taken for the embedding where config.json says that it is not. */
static void head_beside_the_text(void **state) {
  (void)state;
#define TEXT "language_model.model."
#define LAYER TEXT "layers.0."
  static const char *const names[] = {"language_model.lm_head.weight",
                                      TEXT "embed_tokens.weight",
                                      TEXT "norm.weight",
                                      LAYER "input_layernorm.weight",
                                      LAYER "post_attention_layernorm.weight",
                                      LAYER "self_attn.q_proj.weight",
                                      LAYER "self_attn.k_proj.weight",
                                      LAYER "self_attn.v_proj.weight",
                                      LAYER "self_attn.o_proj.weight",
                                      LAYER "mlp.gate_proj.weight",
                                      LAYER "mlp.up_proj.weight",
                                      LAYER "mlp.down_proj.weight"};
  static const int64_t dims[][2] = {{32, 64}, {32, 64}, {32, 0},  {32, 0},  {32, 0},  {32, 32},
                                    {32, 32}, {32, 32}, {32, 32}, {32, 48}, {32, 48}, {48, 32}};
  static const char config[] =
      "{\"model_type\": \"llava\", \"tie_word_embeddings\": false, \"text_config\": {"
      "\"model_type\": \"llama\", \"num_hidden_layers\": 1, \"hidden_size\": 32,"
      "\"vocab_size\": 64, \"intermediate_size\": 48, \"num_attention_heads\": 2}}";
  mr_err e = MR_ERR_INIT;
  mr_model *m;
  assert_int_equal(mr_model_open(&m, zeros_dir(config, names, dims, 12), &e), MR_OK);
  assert_false(mr_model_tied(m));
  assert_int_equal(m->n_unused, 0);
  mr_model_close(m);
  assert_int_equal(mr_model_open(&m, zeros_dir(config, names + 1, dims + 1, 11), &e), MR_E_DATA);
  assert_non_null(strstr(e.text, "the output head is missing"));
}

/* The products of latent attention exist as panels only. */
static void memory_of_latent_attention(void **state) {
  (void)state;
  static const struct {
    const char *stem;
    int64_t dims[2]; /* cols, rows */
  } layer[] = {{"input_layernorm", {512, 0}},
               {"post_attention_layernorm", {512, 0}},
               {"self_attn.q_proj", {512, 8 * 96}},
               {"self_attn.kv_a_proj_with_mqa", {512, 288}},
               {"self_attn.kv_a_layernorm", {256, 0}},
               {"self_attn.kv_b_proj", {256, 8 * 128}},
               {"self_attn.o_proj", {512, 512}},
               {"mlp.gate_proj", {512, 256}},
               {"mlp.up_proj", {512, 256}},
               {"mlp.down_proj", {256, 512}}};
  enum { LAYERS = 4, EACH = sizeof layer / sizeof *layer, ALL = LAYERS * EACH + 3 };
  static char text[ALL][80];
  const char *names[ALL] = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"};
  int64_t dims[ALL][2] = {{512, 64}, {512, 0}, {512, 64}};
  for (int i = 3; i < ALL; i++) {
    int at = (i - 3) % EACH;
    snprintf(text[i], sizeof text[i], "model.layers.%d.%s.weight", (i - 3) / EACH, layer[at].stem);
    names[i] = text[i];
    memcpy(dims[i], layer[at].dims, sizeof dims[i]);
  }
  if (!anonymous_kib())
    skip();
  check_memory(zeros_dir("{\"model_type\": \"deepseek_v2\", \"num_hidden_layers\": 4,"
                         " \"hidden_size\": 512, \"vocab_size\": 64, \"intermediate_size\": 256,"
                         " \"num_attention_heads\": 8, \"kv_lora_rank\": 256,"
                         " \"qk_nope_head_dim\": 64, \"qk_rope_head_dim\": 32,"
                         " \"v_head_dim\": 64, \"max_position_embeddings\": 64}",
                         names, (const int64_t(*)[2])dims, ALL),
               1024.0 * 256 * 4);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(opens_a_llama),
      cmocka_unit_test(reads_what_is_optional),
      cmocka_unit_test(names_what_is_missing),
      cmocka_unit_test(refuses_shapes_and_types),
      cmocka_unit_test(refuses_unknown_parts_of_layers),
      cmocka_unit_test(refuses_more_tokens_than_rows),
      cmocka_unit_test(cuts_fused_tensors),
      cmocka_unit_test(packs),
      cmocka_unit_test(every_allocation_may_fail),
      cmocka_unit_test(conformance_models),
      cmocka_unit_test(memory_of_loading),
      cmocka_unit_test_setup_teardown(head_beside_the_text, temp_begin, temp_end),
      cmocka_unit_test_setup_teardown(memory_of_latent_attention, temp_begin, temp_end),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
