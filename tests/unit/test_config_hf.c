#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "io/json.h"
#include "io/mem.h"
#include "src/model.h"
#include "tests/unit/conformance.h"
#include "tests/unit/temp.h"

static const char small[] =
    "{\"model_type\":\"llama\",\"num_hidden_layers\":2,\"hidden_size\":64,\"vocab_size\":99,"
    "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"intermediate_size\":80}";

static void refused(const char *text, const char *wanted) {
  mr_config c;
  mr_err err = MR_ERR_INIT;
  temp_text("config.json", text);
  assert_int_equal(mr_config_from_dir(&c, temp_dir, &err), MR_E_DATA);
  if (!strstr(err.text, wanted))
    fail_msg("\"%s\" does not say \"%s\"", err.text, wanted);
}

static void defaults(void **state) {
  (void)state;
  mr_config c;
  mr_err err = MR_ERR_INIT;
  temp_text("config.json", small);
  assert_int_equal(mr_config_from_dir(&c, temp_dir, &err), MR_OK);
  assert_string_equal(c.arch.name, "llama");
  assert_int_equal(c.arch.rope, MR_ROPE_NEOX); /* not as in GGUF files */
  assert_int_equal(c.head_dim, 16);
  assert_int_equal(c.context, MR_DEFAULT_CONTEXT);
  assert_true(c.context_assumed);
  assert_int_equal(c.tied, -1);
}

#define REFUSED(type, more, words)                                                                 \
  refused(                                                                                         \
      "{\"num_hidden_layers\":2,\"hidden_size\":64,\"vocab_size\":99,\"num_attention_heads\":4,"   \
      "\"model_type\":\"" type "\"" more "}",                                                      \
      words)

static void refuses(void **state) {
  (void)state;
  refused("{}", "model_type is missing");
  refused("{\"model_type\":\"gemma7\"}",
          "\"gemma7\" is not supported; the nearest known one is gemma");
  REFUSED("llama", ",\"quantization_config\":{\"quant_method\":\"fp8\",\"weight_block_size\":[32]}",
          "weight_block_size must be two");
  REFUSED("dots1",
          ",\"n_routed_experts\":4,\"num_experts_per_tok\":2,\"n_shared_experts\":64,"
          "\"moe_intermediate_size\":16777216",
          "shared experts of 1073741824 values");
  REFUSED("stablelm", ",\"partial_rotary_factor\":1e30", "partial_rotary_factor is 1e+30");
  refused("{\"model_type\":\"llama\"}", "num_hidden_layers n_layer n_layers num_layers is missing");
  refused("[1]", "model_type is missing");
  char text[600];
  snprintf(text, sizeof text, "%.*s,\"hidden_act\":\"sine\"}", (int)sizeof small - 2, small);
  refused(text, "activation \"sine\"");
  snprintf(text, sizeof text, "%.*s,\"rope_scaling\":{\"type\":\"odd\"}}", (int)sizeof small - 2,
           small);
  refused(text, "rope of type \"odd\"");
  snprintf(text, sizeof text, "%.*s,\"quantization_config\":{\"quant_method\":\"odd\"}}",
           (int)sizeof small - 2, small);
  refused(text, "quantization \"odd\"");
}

static mr_config read_as(const char *type, const char *more) {
  char text[1000];
  mr_config c;
  mr_err err = MR_ERR_INIT;
  const char *rest = strchr(small, ','); /* after the model's type */
  snprintf(text, sizeof text, "{\"model_type\":\"%s\"%.*s%s}", type, (int)strlen(rest) - 1, rest,
           more);
  temp_text("config.json", text);
  if (mr_config_from_dir(&c, temp_dir, &err))
    fail_msg("%s: %s", type, err.text);
  return c;
}

/* Values that lie in objects of their own, or are one a layer. */
static void particular_keys(void **state) {
  (void)state;
  mr_config c = read_as("dbrx", ",\"attn_config\":{\"kv_n_heads\":1,\"clip_qkv\":8,"
                                "\"rope_theta\":5e5},\"ffn_config\":{\"ffn_hidden_size\":48,"
                                "\"moe_num_experts\":6,\"moe_top_k\":3}");
  assert_int_equal(c.n_kv_heads, 1);
  assert_true(c.clip_qkv == 8 && c.rope_base == 5e5f && c.arch.renorm);
  assert_true(c.n_experts == 6 && c.n_experts_used == 3 && c.d_expert == 48 && c.d_shared == 0);
  REFUSED("dbrx", ",\"ffn_config\":{\"moe_num_experts\":6}", "ffn_hidden_size is missing");
  REFUSED("dbrx",
          ",\"ffn_config\":{\"ffn_hidden_size\":48,\"moe_num_experts\":6,\"moe_top_k\":2,"
          "\"moe_normalize_expert_weights\":2}",
          "moe_normalize_expert_weights is not 1");
  c = read_as("llava", ",\"tie_word_embeddings\":true,\"text_config\":{\"model_type\":\"llama\","
                       "\"num_hidden_layers\":1,\"hidden_size\":32,\"vocab_size\":9,"
                       "\"num_attention_heads\":4,\"tie_word_embeddings\":false}");
  assert_true(c.tied == 1 && c.d_model == 32); /* the whole model's word counts */
  c = read_as("granite_swa", ",\"sliding_window\":24,\"layer_rope_theta\":[5e4,0]");
  assert_true(!c.windowed[0] && c.windowed[1] && !c.no_rope[0] && c.no_rope[1]);
  assert_true(c.rope_base == 5e4f);
  REFUSED("granite_swa",
          ",\"layer_types\":[\"full_attention\",\"full_attention\"],"
          "\"layer_rope_theta\":[5e4,1e4]",
          "10000 in layer 1, but 50000");
  c = read_as("granitemoehybrid", ",\"num_local_experts\":0,\"shared_intermediate_size\":48");
  assert_true(c.n_experts == 0 && c.d_ff == 48 && c.arch.rope == MR_ROPE_NONE);
  REFUSED("granitemoehybrid", ",\"layer_types\":[\"full_attention\",\"linear_attention\"]",
          "layer 1 is of type \"linear_attention\"");
  c = read_as("cohere2_moe", ",\"sliding_window\":24,\"num_experts\":6,\"num_experts_per_tok\":2,"
                             "\"num_shared_experts\":1,\"expert_selection_fn\":\"sigmoid\","
                             "\"norm_topk_prob\":false,\"rms_norm_eps\":1e-6,"
                             "\"shared_expert_combination_strategy\":\"average\"");
  assert_true(c.arch.norm == MR_NORM_RMS && c.arch.scoring == MR_SCORE_SIGMOID && !c.arch.renorm);
  assert_true(c.route_scale == 0.5f && c.shared_scale == 0.5f);
}

/* Whatever stands for a value, the model is opened or refused with words. */
static void any_value(const char *dir) {
  static const char *const values[] = {"null",  "-1", "0",   "1",  "7",    "4294967297", "1e300",
                                       "\"x\"", "[]", "[1]", "{}", "true", "false"};
  char path[4300], link[4300];
  mr_err err = MR_ERR_INIT;
  snprintf(path, sizeof path, "%.4000s/config.json", dir);
  json_t *config = mr_json_read(path, 1 << 20, &err);
  assert_non_null(config);
  snprintf(path, sizeof path, "%.4000s/model.safetensors", dir);
  snprintf(link, sizeof link, "%s/model.safetensors", temp_dir);
  unlink(link);
  assert_int_equal(symlink(path, link), 0);
  const char *key;
  json_t *v;
  json_object_foreach(config, key, v) {
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
      json_t *other = json_copy(config);
      json_object_set_new(other, key, json_loads(values[i], JSON_DECODE_ANY, NULL));
      char *text = mr_json_dumps(other, 0);
      temp_text("config.json", text);
      mr_model *m;
      mr_err e = MR_ERR_INIT;
      if (mr_model_open(&m, temp_dir, &e) == MR_OK)
        mr_model_close(m);
      else
        assert_true(e.text[0] != 0);
      mr_mem_free(text);
      json_decref(other);
    }
  }
  json_decref(config);
  unlink(link);
}

static void wrong_values(void **state) {
  (void)state;
  static const char *const names[] = {"deepseek_v3",   "gpt_oss",    "gemma3_text",
                                      "phi3_longrope", "falcon_new", "llama4_text"};
  const char *root = data_path("tiny/hf");
  char dir[4200];
  if (!root)
    skip();
  int64_t live = mr_mem_live();
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    snprintf(dir, sizeof dir, "%s/%s", data_path("tiny/hf"), names[i]);
    any_value(dir);
  }
  assert_int_equal(mr_mem_live(), live);
}

static void every_allocation_may_fail(void **state) {
  (void)state;
  static const char *const dirs[] = {"tiny/hf/deepseek_v3", "tiny/hf/opt_post",
                                     "tiny/quant/gptq-4bit-g32-desc_act"};
  if (!data_path(dirs[0]))
    skip();
  for (size_t i = 0; i < sizeof dirs / sizeof *dirs; i++) {
    int64_t live = mr_mem_live();
    mr_code rc = MR_E_NOMEM;
    for (int n = 0; rc != MR_OK; n += 1 + n / 50) {
      mr_model *m;
      mr_err err = MR_ERR_INIT;
      mr_mem_fail_after(n);
      rc = mr_model_open(&m, data_path(dirs[i]), &err);
      mr_mem_fail_after(-1);
      if (rc == MR_OK)
        mr_model_close(m);
      else
        assert_int_equal(rc, MR_E_NOMEM);
      assert_int_equal(mr_mem_live(), live);
    }
  }
}

/* The rope that an architecture has where config.json is silent is not left out for want of memory.
 */
static void own_rope_or_no_memory(void **state) {
  (void)state;
  mr_config whole = read_as("apertus", ""), c;
  mr_code rc = MR_E_NOMEM;
  assert_true(whole.rope_factors);
  for (int n = 0; rc != MR_OK; n++) {
    mr_err err = MR_ERR_INIT;
    mr_mem_fail_after(n);
    rc = mr_config_from_dir(&c, temp_dir, &err);
    mr_mem_fail_after(-1);
    assert_true(rc == MR_OK || rc == MR_E_NOMEM);
  }
  assert_memory_equal(&c, &whole, sizeof c);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(defaults),
      cmocka_unit_test(refuses),
      cmocka_unit_test(particular_keys),
      cmocka_unit_test(wrong_values),
      cmocka_unit_test(every_allocation_may_fail),
      cmocka_unit_test(own_rope_or_no_memory),
  };
  return cmocka_run_group_tests(tests, temp_begin, temp_end);
}
