#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "gguf_builder.h"
#include "src/config.h"

static mr_code read_config(build *b, mr_config *c, mr_err *e) {
  mr_gguf *g = NULL;
  const char *path = build_file(b);
  mr_code rc = mr_gguf_open(&g, path, e);
  build_remove(path);
  if (rc == MR_OK)
    rc = mr_config_from_gguf(c, g, e);
  mr_gguf_close(g);
  return rc;
}

static mr_config accepted(build *b) {
  mr_config c;
  mr_err e = MR_ERR_INIT;
  if (read_config(b, &c, &e))
    fail_msg("%s", e.text);
  return c;
}

static void refused(build *b, const char *words) {
  mr_config c;
  mr_err e = MR_ERR_INIT;
  mr_code rc = read_config(b, &c, &e);
  if (rc != MR_E_DATA || !strstr(e.text, words))
    fail_msg("code %d \"%s\", wanted \"%s\"", rc, e.text, words);
}

static void embedding(build *b) {
  build_tensor(b, "token_embd.weight", MR_F32, 32, 8, NULL);
}

/* The keys of build_llama_keys under another architecture, one left out (may be NULL). */
static void keys_of(build *b, const char *arch, const char *leave_out) {
  static const struct {
    const char *name;
    uint32_t value;
  } all[] = {{"block_count", 12},         {"context_length", 64},
             {"embedding_length", 32},    {"feed_forward_length", 64},
             {"attention.head_count", 4}, {"attention.head_count_kv", 2}};
  char key[96];
  build_str(b, "general.architecture", arch);
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    if (!leave_out || strcmp(leave_out, all[i].name)) {
      snprintf(key, sizeof key, "%s.%s", arch, all[i].name);
      build_u32(b, key, all[i].value);
    }
  bool layer_norm = mr_arch_find(arch) && mr_arch_find(arch)->norm == MR_NORM_LAYER;
  snprintf(key, sizeof key, "%s.attention.layer_norm%s_epsilon", arch, layer_norm ? "" : "_rms");
  if (!leave_out || strcmp(leave_out, "eps"))
    build_f32(b, key, 1e-6f);
  embedding(b);
}

static void llama_defaults(void **state) {
  (void)state;
  build b = {0};
  build_llama_keys(&b);
  build_str(&b, "general.name", "a n\xc3\xa4me");
  embedding(&b);
  mr_config c = accepted(&b);
  assert_string_equal(c.arch.name, "llama");
  assert_string_equal(c.name, "a n\xc3\xa4me");
  assert_int_equal(c.n_layers, 1);
  assert_int_equal(c.n_vocab, 8);
  assert_int_equal(c.head_dim, 16);
  assert_int_equal(c.rope_dims, 16);
  assert_int_equal(c.context, 16);
  assert_false(c.context_assumed);
  assert_int_equal(c.arch.rope, MR_ROPE_INTERLEAVED);
  assert_int_equal(c.rope_scaling, MR_SCALING_NONE);
  assert_true(c.attn_scale == 0.25f && c.rope_base == 1e4f && c.embed_scale == 1);
  assert_int_equal(c.window, 0);
  assert_int_equal(c.windowed[0], 0);
}

static void gemma3_layers(void **state) {
  (void)state;
  build b = {0};
  keys_of(&b, "gemma3", NULL);
  build_u32(&b, "gemma3.attention.sliding_window", 24);
  build_u32(&b, "gemma3.attention.key_length", 64);
  build_u32(&b, "gemma3.attention.value_length", 64);
  build_f32(&b, "gemma3.rope.scaling.factor", 8);
  mr_config c = accepted(&b);
  for (int i = 0; i < 12; i++)
    assert_int_equal(c.windowed[i], i % 6 != 5);
  assert_int_equal(c.head_dim, 64);
  assert_true(c.attn_scale == 0.125f && c.embed_scale == sqrtf(32));
  assert_true(c.rope_base == 1e6f && c.rope_base_local == 1e4f);
  assert_int_equal(c.rope_scaling, MR_SCALING_LINEAR);
  assert_true(c.rope_factor == 8);
  assert_true(c.arch.qk_norm && c.arch.post_norms && c.arch.act == MR_ACT_GELU_TANH);
  keys_of(&b, "gemma3", NULL);
  refused(&b, "gemma3.attention.sliding_window is missing");
}

static void gemma2_defaults(void **state) {
  (void)state;
  build b = {0};
  keys_of(&b, "gemma2", NULL);
  mr_config c = accepted(&b);
  assert_true(c.attn_softcap == 50 && c.final_softcap == 30);
  assert_int_equal(c.window, 4096);
  assert_int_equal(c.windowed[0], 1);
  assert_int_equal(c.windowed[1], 0);
  keys_of(&b, "gemma2", "block_count"); /* 27B: 1 / sqrt(d_model / n_heads) */
  build_u32(&b, "gemma2.block_count", 46);
  build_u32(&b, "gemma2.attention.key_length", 64);
  c = accepted(&b);
  assert_true(fabsf(c.attn_scale - 1 / sqrtf(8)) < 1e-6f);
}

static void mistral_window(void **state) {
  (void)state;
  build b = {0};
  keys_of(&b, "llama", NULL);
  build_u32(&b, "llama.attention.sliding_window", 32);
  mr_config c = accepted(&b);
  assert_int_equal(c.window, 32);
  assert_int_equal(c.windowed[11], 1);
  keys_of(&b, "qwen2", NULL);
  build_u32(&b, "qwen2.attention.sliding_window", 32);
  refused(&b, "window of 32");
  keys_of(&b, "qwen2", NULL);
  build_u32(&b, "qwen2.attention.sliding_window", 64);
  assert_int_equal(accepted(&b).window, 0);
}

static void scales(void **state) {
  (void)state;
  build b = {0};
  keys_of(&b, "granite", NULL);
  build_f32(&b, "granite.logit_scale", 8);
  build_f32(&b, "granite.embedding_scale", 12);
  build_f32(&b, "granite.residual_scale", 0.25f);
  build_f32(&b, "granite.attention.scale", 0.5f);
  mr_config c = accepted(&b);
  assert_true(c.logit_scale == 0.125f && c.embed_scale == 12 && c.residual_scale == 0.25f);
  assert_true(c.attn_scale == 0.5f);
  keys_of(&b, "command-r", NULL);
  build_f32(&b, "command-r.logit_scale", 0.0625f);
  c = accepted(&b);
  assert_true(c.logit_scale == 0.0625f && c.arch.parallel);
}

static void yarn(void **state) {
  (void)state;
  build b = {0};
  keys_of(&b, "qwen3", NULL);
  build_str(&b, "qwen3.rope.scaling.type", "yarn");
  build_f32(&b, "qwen3.rope.scaling.factor", 4);
  build_u32(&b, "qwen3.rope.scaling.original_context_length", 16);
  mr_config c = accepted(&b);
  assert_int_equal(c.rope_scaling, MR_SCALING_YARN);
  assert_int_equal(c.rope_original_context, 16);
  assert_true(c.yarn_ext == 1 && c.yarn_attn == 1 && c.yarn_beta_fast == 32);
  keys_of(&b, "qwen3", NULL);
  build_str(&b, "qwen3.rope.scaling.type", "ntk");
  refused(&b, "ntk");
}

static void missing_keys(void **state) {
  (void)state;
  build b = {0};
  static const char *const needed[] = {"block_count", "embedding_length", "feed_forward_length",
                                       "attention.head_count"};
  for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
    keys_of(&b, "qwen2", needed[i]);
    refused(&b, needed[i]);
  }
  keys_of(&b, "qwen2", "eps");
  refused(&b, "layer_norm_rms_epsilon is missing");
  keys_of(&b, "phi2", "eps");
  refused(&b, "layer_norm_epsilon is missing");
  keys_of(&b, "qwen2", "attention.head_count_kv");
  assert_int_equal(accepted(&b).n_kv_heads, 4);
  keys_of(&b, "qwen2", "context_length");
  mr_config c = accepted(&b);
  assert_true(c.context_assumed && c.context == MR_DEFAULT_CONTEXT);
  build_llama_keys(&b);
  refused(&b, "token_embd.weight is missing");
}

static void impossible_numbers(void **state) {
  (void)state;
  static const struct {
    const char *key;
    uint32_t value;
    const char *words;
  } whole[] = {{"block_count", 0, "1 to 512"},
               {"block_count", 513, "1 to 512"},
               {"embedding_length", 0, "embedding_length is 0"},
               {"embedding_length", UINT32_MAX, "embedding_length"},
               {"feed_forward_length", 0, "feed_forward_length"},
               {"attention.head_count", 0, "head_count is 0"},
               {"attention.head_count", 3, "3 attention heads"},
               {"attention.head_count", 6, "6 heads"},
               {"attention.head_count_kv", 3, "3 key heads"},
               {"attention.head_count_kv", 0, "head_count_kv is 0"},
               {"context_length", UINT32_MAX, "context_length"}};
  build b = {0};
  char key[96];
  for (size_t i = 0; i < sizeof whole / sizeof *whole; i++) {
    keys_of(&b, "llama", whole[i].key);
    snprintf(key, sizeof key, "llama.%s", whole[i].key);
    build_u32(&b, key, whole[i].value);
    refused(&b, whole[i].words);
  }
  static const float bad[] = {-1, NAN, INFINITY};
  for (int i = 0; i < 3; i++) {
    keys_of(&b, "llama", "eps");
    build_f32(&b, "llama.attention.layer_norm_rms_epsilon", bad[i]);
    refused(&b, "epsilon");
    keys_of(&b, "llama", NULL);
    build_f32(&b, "llama.rope.freq_base", bad[i]);
    refused(&b, "rope.freq_base");
  }
  keys_of(&b, "llama", NULL);
  build_f32(&b, "llama.rope.freq_base", 0);
  refused(&b, "rope.freq_base");
  keys_of(&b, "llama", NULL);
  build_u32(&b, "llama.rope.dimension_count", 10); /* above head_dim 8 */
  refused(&b, "rotated values");
  keys_of(&b, "llama", NULL);
  build_u32(&b, "llama.attention.value_length", 4);
  refused(&b, "must be equal");
  keys_of(&b, "llama", "embedding_length");
  build_str(&b, "llama.embedding_length", "32");
  refused(&b, "embedding_length is a string");
}

static void unsupported(void **state) {
  (void)state;
  build b = {0};
  uint8_t no = 0;
  keys_of(&b, "llama", NULL);
  build_u32(&b, "llama.expert_count", 8);
  refused(&b, "llama.expert_used_count is missing");
  keys_of(&b, "qwen2", NULL);
  build_raw(&b, "qwen2.attention.causal", MR_GGUF_BOOL, &no, 1);
  refused(&b, "not causal");
  keys_of(&b, "mpt", NULL);
  build_f32(&b, "mpt.attention.clamp_kqv", 6);
  refused(&b, "clamp_kqv");
  build_str(&b, "general.architecture", "qwen4");
  embedding(&b);
  refused(&b, "\"qwen4\" is not supported; the nearest known one is qwen");
  build_str(&b, "general.architecture", "%s%n\033[31m");
  refused(&b, "\"%s%n\\x1b[31m\"");
  build_u32(&b, "general.architecture", 1);
  refused(&b, "general.architecture is a 32-bit number");
  embedding(&b);
  refused(&b, "general.architecture is missing");
}

static void parallel_from_the_file(void **state) {
  (void)state;
  build b = {0};
  uint8_t no = 0;
  keys_of(&b, "gptneox", NULL);
  assert_true(accepted(&b).arch.parallel);
  keys_of(&b, "gptneox", NULL);
  build_raw(&b, "gptneox.use_parallel_residual", MR_GGUF_BOOL, &no, 1);
  assert_false(accepted(&b).arch.parallel);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(llama_defaults),  cmocka_unit_test(gemma3_layers),
      cmocka_unit_test(gemma2_defaults), cmocka_unit_test(mistral_window),
      cmocka_unit_test(scales),          cmocka_unit_test(yarn),
      cmocka_unit_test(missing_keys),    cmocka_unit_test(impossible_numbers),
      cmocka_unit_test(unsupported),     cmocka_unit_test(parallel_from_the_file),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
