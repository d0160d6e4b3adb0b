/* Adapters beside the base must give what the base gives with the adapters merged into it: a GGUF
 * model whose q and k lie in another order, and (where the data is, conformance.h) every directory
 * of tiny Hugging Face models, with all their linear layers adapted. A row's bits do not depend on
 * the adapters of its neighbours. And what is refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "tests/unit/conformance.h"
#include "tests/unit/directories.h"
#include "tests/unit/lora_rig.h"
#include "tests/unit/tiny_gguf.h"

/* ------------------------------------------------------------------ GGUF */

/* Rows of q and k of llama-like files: the halves of a head by turns. */
static int in_hf(int r, bool turned) {
  int at = r % TINY_HEAD;
  return turned ? r - at + at / 2 + at % 2 * (TINY_HEAD / 2) : r;
}

static float *merged_values[100]; /* of models that are open */
static int n_merged;

static void free_merged(void) {
  while (n_merged)
    free(merged_values[--n_merged]);
}

static void merge_matrix(mr_matrix *w, const float *delta, bool turned) {
  float *v = calloc((size_t)w->n * (size_t)w->k, sizeof *v);
  assert_true(n_merged < 100);
  merged_values[n_merged++] = v;
  for (int r = 0; r < w->n; r++) {
    mr_matrix_row(w, r, v + (size_t)r * (size_t)w->k);
    for (int i = 0; i < w->k; i++)
      v[(size_t)r * (size_t)w->k + (size_t)i] +=
          delta[(size_t)in_hf(r, turned) * (size_t)w->k + (size_t)i];
  }
  w->data = (const uint8_t *)v;
  w->dtype = MR_F32;
  w->mapped = false;
  w->row_bytes = (uint64_t)w->k * 4;
}

static void adapt_gguf(mr_model *m) {
  for (int l = 0; l < TINY_LAYERS; l++) {
    mr_layer *y = &m->layers[l];
    const struct {
      const char *name;
      mr_matrix *w;
      bool turned;
    } all[] = {{"self_attn.q_proj", &y->q, true},  {"self_attn.k_proj", &y->k, true},
               {"self_attn.v_proj", &y->v, false}, {"self_attn.o_proj", &y->o, false},
               {"mlp.gate_proj", &y->gate, false}, {"mlp.up_proj", &y->up, false},
               {"mlp.down_proj", &y->down, false}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
      char module[100];
      float *delta = calloc((size_t)all[i].w->n * (size_t)all[i].w->k, sizeof *delta);
      snprintf(module, sizeof module, "model.layers.%d.%s", l, all[i].name);
      make_pair(module, all[i].w->n, all[i].w->k, delta);
      merge_matrix(all[i].w, delta, all[i].turned);
      free(delta);
    }
  }
  float *delta = calloc(TINY_VOCAB * TINY_DIM, sizeof *delta);
  make_pair("lm_head", TINY_VOCAB, TINY_DIM, delta);
  merge_matrix(&m->head, delta, false);
  make_embedding("model.embed_tokens", TINY_VOCAB, TINY_DIM, delta);
  merge_matrix(&m->embed, delta, false);
  free(delta);
}

static const char *tiny_model(void) {
  const char *path = temp_path("tiny.gguf");
  assert_true(tiny_gguf_write(path, -1));
  return path;
}

static void test_gguf(void **unused) {
  (void)unused;
  mr_err err = MR_ERR_INIT;
  engine base, with;
  mr_lora *l, *none;
  char path[300];
  snprintf(path, sizeof path, "%s", tiny_model());
  assert_int_equal(open_with(&with, &none, path, NULL, 0, &err), MR_OK);
  seed = 7;
  clear(&adapter);
  adapt_gguf(with.m);
  const char *dirs[2] = {write_adapter("one", plain_config()), NULL};
  engine spare;
  assert_int_equal(open_with(&spare, &none, path, NULL, 0, &err), MR_OK);
  clear(&adapter);
  adapt_gguf(spare.m); /* another one */
  close_all(&spare, none);
  dirs[1] = write_adapter("two", plain_config());
  assert_int_equal(open_with(&base, &l, path, dirs, 2, &err), MR_OK);
  open_rest(&base);
  open_rest(&with);
  compare(&base, &with, "tiny.gguf");
  close_all(&base, l);
  close_all(&with, NULL);
  free_merged();
}

/* Logits of the tiny model with an adapter merged into it (no dirs), or beside it. */
static float *answers(mr_scheme of, const char *path, const char *const *dirs, bool neighbours) {
  mr_err err = MR_ERR_INIT;
  engine e;
  mr_lora *l;
  scheme = of;
  assert_int_equal(open_with(&e, &l, path, dirs, dirs ? 2 : 0, &err), MR_OK);
  seed = 7;
  clear(&adapter);
  if (!dirs)
    adapt_gguf(e.m);
  open_rest(&e);
  float *out = alone(&e, 1, dirs ? 1 : 0);
  if (neighbours)
    check_neighbours(&e, out);
  close_all(&e, l);
  free_merged();
  scheme = MR_SCHEME_F32;
  return out;
}

/* Beside an int8 base A is int8, too, and B of a long rank: hardly further from float32 than an
 * int8 base into which the adapter was merged. */
static void check_fast_gguf(const char *path) {
  size_t n = (size_t)TOKENS * TINY_VOCAB;
  float *exact = answers(MR_SCHEME_F32, path, NULL, false);
  const char *dirs[2] = {write_adapter("one", plain_config()), NULL};
  dirs[1] = dirs[0];
  float *joined = answers(MR_SCHEME_I8, path, NULL, false);
  float *beside = answers(MR_SCHEME_I8, path, dirs, true);
  double a = rms(joined, exact, n), b = rms(beside, exact, n);
  print_message("rank %d: off by %.4f merged, %.4f beside\n", lora_rank, a, b);
  assert_true(a > 0 && b > 0 && b < 1.3 * a);
  free(exact);
  free(joined);
  free(beside);
}

static void test_fast(void **unused) {
  (void)unused;
  char path[300];
  snprintf(path, sizeof path, "%s", tiny_model());
  check_fast_gguf(path);
  lora_rank = 40;
  check_fast_gguf(path);
  lora_rank = 3;
}

/* A trained bias takes the place of the base's (none here); lora_bias is scaled. */
static void test_biases(void **unused) {
  (void)unused;
  mr_err err = MR_ERR_INIT;
  engine base;
  mr_lora *l;
  char path[300];
  snprintf(path, sizeof path, "%s", tiny_model());
  clear(&adapter);
  float *a = put(&adapter, "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight", lora_rank,
                 TINY_DIM);
  put(&adapter, "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight", TINY_FF, lora_rank);
  float *b = put(&adapter, "base_model.model.model.layers.1.mlp.up_proj.lora_B.bias", 1, TINY_FF);
  float *q = put(&adapter, "base_model.model.model.layers.1.self_attn.q_proj.base_layer.bias", 1,
                 TINY_HEADS * TINY_HEAD);
  a[0] = 1;
  for (int i = 0; i < TINY_FF; i++)
    b[i] = (float)i;
  for (int i = 0; i < TINY_HEADS * TINY_HEAD; i++)
    q[i] = (float)i;
  const char *dir = write_adapter("bias", plain_config());
  assert_int_equal(open_with(&base, &l, path, &dir, 1, &err), MR_OK);
  const mr_lora_link *up = base.m->layers[1].up.lora, *query = base.m->layers[1].q.lora;
  assert_non_null(up->bias);
  assert_true(fabs(up->bias[5] - 5 * ALPHA / sqrt(lora_rank)) < 1e-5);
  assert_int_equal(query->rank, 0);
  for (int i = 0; i < TINY_HEADS * TINY_HEAD; i++)
    assert_true(query->bias[i] == (float)in_hf(i, true));
  assert_null(base.m->layers[0].up.lora);
  close_all(&base, l);
}

/* ------------------------------------------------------------------ refusals */

typedef struct refusal {
  const char *config, *tensor, *words;
  int rows, cols;
} refusal;

#define Q "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
#define PLAIN "{\"peft_type\":\"LORA\",\"r\":3,\"target_modules\":[\"q_proj\"]"

static void test_refused(void **unused) {
  (void)unused;
  static const refusal all[] = {
      {PLAIN "}", NULL, NULL, 0, 0},
      {"{\"peft_type\":\"IA3\",\"r\":3}", NULL, "\"IA3\"", 0, 0},
      {"{\"r\":3}", NULL, "peft_type is missing", 0, 0},
      {"[1]", NULL, "must hold an object", 0, 0},
      {"{", NULL, "", 0, 0},
      {PLAIN ",\"use_dora\":true}", NULL, "use_dora", 0, 0},
      {PLAIN ",\"modules_to_save\":[\"lm_head\"]}", NULL, "modules_to_save", 0, 0},
      {PLAIN ",\"init_lora_weights\":\"pissa_niter_4\"}", NULL, "pissa_niter_4", 0, 0},
      {PLAIN ",\"layer_replication\":[[0,1]]}", NULL, "layer_replication", 0, 0},
      {PLAIN ",\"bias\":\"some\"}", NULL, "bias is \"some\"", 0, 0},
      {PLAIN ",\"rank_pattern\":{\"q_proj\":0}}", NULL, "rank_pattern", 0, 0},
      {PLAIN ",\"rank_pattern\":{\"q_(proj\":2}}", NULL, "expression", 0, 0},
      {PLAIN ",\"rank_pattern\":{\"q_proj\":2}}", NULL, "[3, 64]", 0, 0},
      {PLAIN ",\"layers_to_transform\":[1]}", NULL, "do not name it", 0, 0},
      {"{\"peft_type\":\"LORA\",\"r\":3,\"target_modules\":[\"k_proj\"]}", NULL, "do not name it",
       0, 0},
      {"{\"peft_type\":\"LORA\",\"r\":3,\"target_modules\":\".*\\\\.k_proj\"}", NULL,
       "do not name it", 0, 0},
      {"{\"peft_type\":\"LORA\",\"r\":3,\"target_modules\":\"model.*q_proj\"}", NULL, NULL, 0, 0},
      {"{\"peft_type\":\"LORA\",\"r\":4}", NULL, "[3, 64]; this model", 0, 0},
      {"{\"peft_type\":\"LORA\",\"r\":0}", NULL, "r must be", 0, 0},
      {"{\"peft_type\":\"LORA\",\"r\":100000}", NULL, "r must be", 0, 0},
      {"{\"peft_type\":\"LORA\",\"r\":3}", "base_model.model.model.layers.0.mlp.odd.lora_A.weight",
       "lora_B.weight is missing", 3, 64},
      {"{\"peft_type\":\"LORA\",\"r\":3}", "base_model.model.score.weight", "none of an adapter", 3,
       64},
      {"{\"peft_type\":\"LORA\",\"r\":3}",
       "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", "none of an", 1,
       64},
      {"{\"peft_type\":\"LORA\",\"r\":3}", "base_model.model.model.layers.9.self_attn.q_proj.bias",
       "not a linear layer of this model", 1, 64},
      {"{\"peft_type\":\"LORA\",\"r\":3}", "base_model.model.model.norm.bias", "not a linear", 1,
       64},
  };
  char path[300];
  snprintf(path, sizeof path, "%s", tiny_model());
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    mr_err err = MR_ERR_INIT;
    engine e;
    mr_lora *l;
    clear(&adapter);
    put(&adapter, Q, 3, TINY_DIM);
    put(&adapter, "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight",
        TINY_HEADS * TINY_HEAD, 3);
    if (all[i].tensor)
      put(&adapter, all[i].tensor, all[i].rows, all[i].cols);
    const char *dir = write_adapter("refused", all[i].config);
    mr_code rc = open_with(&e, &l, path, &dir, 1, &err);
    if (all[i].words ? rc != MR_E_DATA || !strstr(err.text, all[i].words) : rc != MR_OK)
      fail_msg("%s %s: %d, %s", all[i].config, all[i].tensor ? all[i].tensor : "", (int)rc,
               err.text);
    close_all(&e, l);
  }
}

static void test_not_finite_or_absent(void **unused) {
  (void)unused;
  mr_err err = MR_ERR_INIT;
  engine e;
  mr_lora *l;
  char path[300];
  snprintf(path, sizeof path, "%s", tiny_model());
  clear(&adapter);
  put(&adapter, Q, 3, TINY_DIM)[70] = NAN;
  put(&adapter, "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight",
      TINY_HEADS * TINY_HEAD, 3);
  const char *dir = write_adapter("nan", PLAIN "}");
  assert_int_equal(open_with(&e, &l, path, &dir, 1, &err), MR_E_DATA);
  assert_non_null(strstr(err.text, "value 70 is not finite"));
  close_all(&e, l);
  mr_err_clear(&err);
  dir = "/nowhere/at/all";
  assert_int_equal(open_with(&e, &l, path, &dir, 1, &err), MR_E_NOINPUT);
  close_all(&e, l);
}

static void test_no_memory(void **unused) {
  (void)unused;
  char path[300];
  snprintf(path, sizeof path, "%s", tiny_model());
  clear(&adapter);
  float *delta = calloc(TINY_DIM * TINY_FF, sizeof *delta);
  make_pair("model.layers.0.mlp.up_proj", TINY_FF, TINY_DIM, delta);
  free(delta);
  starve(path, write_adapter("memory", plain_config()));
  starve(path, write_adapter("expression", "{\"peft_type\":\"LORA\",\"r\":3,\"target_modules\":"
                                           "\"model.*up_proj\"}"));
}

/* ------------------------------------------------------------------ fused experts */

enum { EXPERTS = 4, EXPERT_FF = 20 };

/* One of the kind of qwen3_moe, whose experts have matrices of their own; adapters name them as one
 * parameter all the same. */
static const char *expert_model(void) {
  static char names[3 * EXPERTS][40];
  part layer[8 + 3 * EXPERTS] = {{"input_layernorm", TINY_HF_WIDE, 0},
                                 {"post_attention_layernorm", TINY_HF_WIDE, 0},
                                 {"self_attn.q_proj", TINY_HF_WIDE, TINY_HF_WIDE},
                                 {"self_attn.k_proj", TINY_HF_WIDE, TINY_HF_WIDE},
                                 {"self_attn.v_proj", TINY_HF_WIDE, TINY_HF_WIDE},
                                 {"self_attn.o_proj", TINY_HF_WIDE, TINY_HF_WIDE},
                                 {"mlp.gate", EXPERTS, TINY_HF_WIDE}};
  static const char *const each[] = {"gate", "up", "down"};
  size_t n = 7;
  for (int e = 0; e < EXPERTS; e++)
    for (int i = 0; i < 3; i++, n++) {
      snprintf(names[n - 7], sizeof *names, "mlp.experts.%d.%s_proj", e, each[i]);
      layer[n] =
          (part){names[n - 7], i < 2 ? EXPERT_FF : TINY_HF_WIDE, i < 2 ? TINY_HF_WIDE : EXPERT_FF};
    }
  return write_model(&merged, layer, n,
                     "\"model_type\":\"qwen3_moe\",\"intermediate_size\":64,"
                     "\"num_attention_heads\":4,\"num_key_value_heads\":4,\"head_dim\":12,"
                     "\"num_experts\":4,\"num_experts_per_tok\":2,\"moe_intermediate_size\":20,"
                     "\"norm_topk_prob\":true");
}

/* What make_fused has made for the experts, into their own matrices. */
static void merge_fused(int l, const char *param, const float *delta, int n, int k) {
  char name[100];
  bool down = !strcmp(param, "down_proj");
  for (int e = 0; e < EXPERTS; e++)
    for (int i = 0; i < (down ? 1 : 2); i++) {
      const char *which = down ? "down" : i ? "up" : "gate";
      int rows = down ? n : n / 2;
      snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.%s_proj.weight", l, e, which);
      float *w = tensor_of(name);
      const float *from = delta + ((size_t)e * (size_t)n + (size_t)(i * rows)) * (size_t)k;
      for (int j = 0; j < rows * k; j++)
        w[j] += from[j];
    }
}

static void adapt_experts(bool gates, bool crossed) {
  static float delta[EXPERTS * 2 * EXPERT_FF * TINY_HF_WIDE];
  clear(&adapter);
  for (int l = 0; l < 2; l++) {
    char module[100];
    snprintf(module, sizeof module, "model.layers.%d.mlp.experts", l);
    make_fused(module, EXPERTS, TINY_HF_WIDE, EXPERT_FF, crossed, delta);
    merge_fused(l, "down_proj", delta, TINY_HF_WIDE, EXPERT_FF);
    snprintf(module, sizeof module, "model.layers.%d.mlp.experts.base_layer", l);
    if (gates) {
      make_fused(module, EXPERTS, 2 * EXPERT_FF, TINY_HF_WIDE, crossed, delta);
      merge_fused(l, "gate_up_proj", delta, 2 * EXPERT_FF, TINY_HF_WIDE);
    }
  }
}

/* One parameter or two, with A at the inputs or at the outputs. */
static void test_fused(void **unused) {
  (void)unused;
  for (int i = 0; i < 4; i++) {
    mr_err err = MR_ERR_INIT;
    engine base, with;
    mr_lora *l, *none;
    char dir[300], to[400], config[300];
    snprintf(dir, sizeof dir, "%s", expert_model());
    adapt_experts(i % 2, i / 2);
    snprintf(config, sizeof config,
             "{\"peft_type\":\"LORA\",\"r\":3,\"lora_alpha\":6,\"use_rslora\":true,"
             "\"target_modules\":[],\"target_parameters\":[%s\"mlp.experts.down_proj\"]}",
             i % 2 ? "\"experts.gate_up_proj\"," : "");
    const char *dirs[2] = {write_adapter("first", config), NULL};
    dirs[1] = dirs[0];
    assert_int_equal(open_with(&base, &l, dir, dirs, 2, &err), MR_OK);
    open_rest(&base);
    snprintf(to, sizeof to, "%s/model.safetensors", dir);
    unlink(to); /* the base has it mapped */
    write_file(&merged, to);
    assert_int_equal(open_with(&with, &none, dir, NULL, 0, &err), MR_OK);
    open_rest(&with);
    compare(&base, &with, "fused experts");
    close_all(&base, l);
    close_all(&with, NULL);
  }
}

static void test_experts_fast(void **unused) {
  (void)unused;
  check_fast(expert_model());
}

static void test_fused_mangled(void **unused) {
  (void)unused;
  char dir[300];
  snprintf(dir, sizeof dir, "%s", expert_model());
  adapt_experts(true, false);
  check_mangled(dir, write_adapter("mangled", plain_config()), 300);
}

static void test_fused_refused(void **unused) {
  (void)unused;
  static const struct {
    const char *parameters, *words;
  } all[] = {{"\"experts.gate_up_proj\",\"experts.down_proj\"", NULL},
             {"\"experts.down_proj\"", "experts.base_layer is not"},
             {"\"experts.gate_up_proj\"", "ask for [12, 48]"},
             {"\"experts.down_proj\",\"experts.gate_up_proj_bias\"", "target_parameters[1]"},
             {"1", "target_parameters[0]"}};
  char dir[300], config[300];
  snprintf(dir, sizeof dir, "%s", expert_model());
  adapt_experts(true, false);
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    mr_err err = MR_ERR_INIT;
    engine e;
    mr_lora *l;
    snprintf(config, sizeof config,
             "{\"peft_type\":\"LORA\",\"r\":3,\"target_modules\":[],\"target_parameters\":[%s]}",
             all[i].parameters);
    const char *with = write_adapter("refused", config);
    mr_code rc = open_with(&e, &l, dir, &with, 1, &err);
    if (all[i].words ? rc != MR_E_DATA || !strstr(err.text, all[i].words) : rc != MR_OK)
      fail_msg("%s: %d, %s", all[i].parameters, (int)rc, err.text);
    close_all(&e, l);
  }
}

/* ------------------------------------------------------------------ directories */

int main(void) {
  static struct CMUnitTest tests[MAX_DIRS] = {
      cmocka_unit_test_setup_teardown(test_gguf, temp_begin, temp_end),
      cmocka_unit_test_setup_teardown(test_fast, temp_begin, temp_end),
      cmocka_unit_test_setup_teardown(test_biases, temp_begin, temp_end),
      cmocka_unit_test_setup_teardown(test_refused, temp_begin, temp_end),
      cmocka_unit_test_setup_teardown(test_not_finite_or_absent, temp_begin, temp_end),
      cmocka_unit_test_setup_teardown(test_no_memory, temp_begin, temp_end),
      cmocka_unit_test_setup_teardown(test_fused, temp_begin, temp_end),
      cmocka_unit_test_setup_teardown(test_experts_fast, temp_begin, temp_end),
      cmocka_unit_test_setup_teardown(test_fused_mangled, temp_begin, temp_end),
      cmocka_unit_test_setup_teardown(test_fused_refused, temp_begin, temp_end),
  };
  size_t n = find_directories(tests, 10, "tiny/hf", one_directory, temp_begin, temp_end);
  return _cmocka_run_group_tests("lora", tests, n, NULL, NULL);
}
