/* config.json of a directory. Names of keys differ between architectures, so each value is asked
 * for under all names that it goes by. What is said nowhere is what the architecture's row says. */
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "io/json.h"
#include "src/config.h"

#define MAX_CONFIG (16u << 20) /* bytes */
#define MAX_WIDTH (1 << 20)
#define MAX_FF (1 << 24)
#define MAX_HEADS 4096
#define MAX_HEAD_DIM 1024
#define MAX_CONTEXT (1 << 24)

typedef struct reader { /* the first error wins */
  mr_config *c;
  const json_t *j, *root; /* j: in root where it describes the text part of a larger model */
  const json_t *rope;     /* parameters of rope, of layers without window; NULL: none */
  json_t *own;            /* those of the row, where there are none; owned */
  const char *path;
  mr_err e;
} reader;

#define FAIL(r, ...) mr_err_at(&(r)->e, MR_E_DATA, (r)->path, 0, -1, __VA_ARGS__)

/* The first of the space-separated keys whose value is there and not null. */
static const json_t *get(const json_t *o, const char *keys) {
  char key[64];
  while (*keys) {
    size_t n = strcspn(keys, " ");
    snprintf(key, sizeof key, "%.*s", (int)n, keys);
    const json_t *v = json_object_get(o, key);
    if (v && !json_is_null(v))
      return v;
    keys += n + (keys[n] == ' ');
  }
  return NULL;
}

static bool whole_of(reader *r, const json_t *v, const char *keys, int64_t lo, int64_t hi,
                     int *out) {
  json_int_t n = json_integer_value(v);
  if (!v)
    return false;
  if (!json_is_integer(v) || n < lo || n > hi) {
    FAIL(r, "%s must be a whole number from %lld to %lld", keys, (long long)lo, (long long)hi);
    return false;
  }
  *out = (int)n;
  return true;
}

static bool whole(reader *r, const char *keys, int64_t lo, int64_t hi, int *out) {
  return whole_of(r, get(r->j, keys), keys, lo, hi, out);
}

static void need(reader *r, const char *keys, int64_t hi, int *out) {
  if (!whole(r, keys, 1, hi, out) && !r->e.code)
    FAIL(r, "%s is missing", keys);
}

static bool real_of(reader *r, const json_t *o, const char *keys, float *out) {
  const json_t *v = get(o, keys);
  double x = json_number_value(v);
  if (!v)
    return false;
  if (!json_is_number(v) || !(fabs(x) <= 1e30)) {
    FAIL(r, "%s must be a number", keys);
    return false;
  }
  *out = (float)x;
  return true;
}

static bool real(reader *r, const char *keys, float *out) {
  return real_of(r, r->j, keys, out);
}

static bool flag(const json_t *o, const char *keys, bool otherwise) {
  const json_t *v = get(o, keys);
  return v ? json_is_true(v) : otherwise;
}

static const char *text(const json_t *o, const char *keys) {
  const char *s = json_string_value(get(o, keys));
  return s ? s : "";
}

/* ------------------------------------------------------------------ sizes */

static void read_sizes(reader *r) {
  mr_config *c = r->c;
  need(r, "num_hidden_layers n_layer n_layers num_layers", MR_MAX_LAYERS, &c->n_layers);
  need(r, "hidden_size n_embd d_model", MAX_WIDTH, &c->d_model);
  need(r, "vocab_size", INT32_MAX, &c->n_vocab);
  int ratio = 4;
  whole(r, "expansion_ratio", 1, 64, &ratio);
  c->d_ff = c->d_model * ratio;
  if (whole(r, "intermediate_multiple_size", 1, 64, &ratio))
    c->d_ff = c->d_model * ratio;
  whole(r,
        "prefix_dense_intermediate_size intermediate_size_mlp intermediate_size n_inner "
        "ffn_hidden_size ffn_dim dff",
        1, MAX_FF, &c->d_ff);
  c->eps = 1e-5f;
  real(r, "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_epsilon norm_eps layernorm_epsilon",
       &c->eps);
  if (get(r->j, "rms_norm_eps") && !strcmp(c->arch.name, "cohere2moe"))
    c->arch.norm = MR_NORM_RMS;
  if (c->eps < 0)
    FAIL(r, "the norms' epsilon is below 0");
  whole(r, "max_position_embeddings n_positions max_seq_len n_ctx seq_length", 1, MAX_CONTEXT,
        &c->context);
  c->context_assumed = c->context == 0;
  if (c->context_assumed)
    c->context = MR_DEFAULT_CONTEXT;
  if (whole(r, "word_embed_proj_dim", 1, MAX_WIDTH, &c->d_embed) && c->d_embed == c->d_model)
    c->d_embed = 0;
  const json_t *tied = get(r->root, "tie_word_embeddings");
  tied = tied ? tied : get(r->j, "tie_word_embeddings");
  c->tied = tied ? json_is_true(tied) : -1;
}

static void latent(reader *r) {
  mr_config *c = r->c;
  need(r, "kv_lora_rank", MAX_HEAD_DIM, &c->kv_lora);
  need(r, "qk_nope_head_dim", MAX_HEAD_DIM, &c->nope_dims);
  need(r, "qk_rope_head_dim", MAX_HEAD_DIM, &c->rope_dims);
  need(r, "v_head_dim", MAX_HEAD_DIM, &c->v_dims);
  whole(r, "q_lora_rank", 1, MAX_WIDTH, &c->q_lora);
  c->n_kv_heads = 1;
  c->head_dim = c->kv_lora + c->rope_dims;
  c->rope_first = c->kv_lora;
}

static void read_heads(reader *r) {
  mr_config *c = r->c;
  need(r, "num_attention_heads n_head n_heads num_heads attention_heads", MAX_HEADS, &c->n_heads);
  if (r->e.code)
    return;
  c->n_kv_heads = c->n_heads;
  bool grouped = flag(r->j, "new_decoder_architecture", false);
  if (!grouped && flag(r->j, "multi_query", false))
    c->n_kv_heads = 1;
  else if (grouped || !get(r->j, "new_decoder_architecture multi_query"))
    whole(r, "num_key_value_heads num_kv_heads", 1, MAX_HEADS, &c->n_kv_heads);
  whole_of(r, get(get(r->j, "attn_config"), "kv_n_heads"), "kv_n_heads", 1, MAX_HEADS,
           &c->n_kv_heads);
  if (get(r->j, "new_decoder_architecture multi_query"))
    c->arch.hf_qkv = grouped || c->n_kv_heads > 1 ? MR_QKV_GROUPED : MR_QKV_STACKED;
  c->head_dim = c->d_model / c->n_heads;
  if (c->arch.mla)
    latent(r);
  else if (!whole(r, "head_dim", 1, MAX_HEAD_DIM, &c->head_dim) && c->d_model % c->n_heads)
    FAIL(r, "a width of %d cannot be cut into %d heads", c->d_model, c->n_heads);
  c->head_dim_v = c->head_dim;
  if (c->n_heads % c->n_kv_heads)
    FAIL(r, "%d attention heads cannot share %d key heads: one must divide the other", c->n_heads,
         c->n_kv_heads);
  if (c->head_dim > MAX_HEAD_DIM || (int64_t)c->n_heads * c->head_dim > MAX_WIDTH)
    FAIL(r, "%d heads of %d are too wide", c->n_heads, c->head_dim);
}

/* ------------------------------------------------------------------ rope */

static double mscale(double factor, double m) {
  return factor <= 1 ? 1 : 0.1 * m * log(factor) + 1;
}

static void yarn(reader *r) {
  mr_config *c = r->c;
  float m = 0, all = 0, attention = 0;
  c->rope_scaling = MR_SCALING_YARN;
  real_of(r, r->rope, "beta_fast", &c->yarn_beta_fast);
  real_of(r, r->rope, "beta_slow", &c->yarn_beta_slow);
  real_of(r, r->rope, "mscale", &m);
  real_of(r, r->rope, "mscale_all_dim", &all);
  c->yarn_exact = !flag(r->rope, "truncate", true);
  double want = mscale(c->rope_factor, 1);
  if (real_of(r, r->rope, "attention_factor", &attention) && attention > 0)
    want = attention;
  else if (m != 0 && all != 0)
    want = mscale(c->rope_factor, m) / mscale(c->rope_factor, all);
  c->yarn_attn = (float)(want / mscale(c->rope_factor, 1));
  if (c->arch.mla && all != 0)
    c->attn_scale *= (float)(mscale(c->rope_factor, all) * mscale(c->rope_factor, all));
}

/* Long wavelengths are stretched, short ones kept, those between blended. */
static void llama3(reader *r) {
  mr_config *c = r->c;
  float low = 1, high = 4;
  real_of(r, r->rope, "low_freq_factor", &low);
  real_of(r, r->rope, "high_freq_factor", &high);
  if (!(low > 0) || !(high > low)) {
    FAIL(r, "rope: high_freq_factor must be above low_freq_factor");
    return;
  }
  c->rope_factors = true;
  for (int i = 0; i < c->rope_dims / 2; i++) {
    double freq = pow(c->rope_base, -2.0 * i / c->rope_dims), length = 2 * M_PI / freq;
    double share = (c->rope_original_context / length - low) / (high - low);
    share = share < 0 ? 0 : share > 1 ? 1 : share;
    c->rope_short[i] = (float)(1 / ((1 - share) / c->rope_factor + share));
  }
}

static void factors(reader *r, const char *key, float *out) {
  const json_t *list = get(r->rope, key);
  int n = r->c->rope_dims / 2;
  if (json_array_size(list) != (size_t)n) {
    FAIL(r, "rope: %s must have %d numbers", key, n);
    return;
  }
  for (int i = 0; i < n; i++) {
    out[i] = (float)json_number_value(json_array_get(list, (size_t)i));
    if (!(out[i] > 0) || out[i] > 1e30f)
      FAIL(r, "rope: %s[%d] must be a number above 0", key, i);
  }
}

static void longrope(reader *r) {
  mr_config *c = r->c;
  float attention = 0;
  c->rope_scaling = MR_SCALING_LONGROPE;
  c->rope_factors = true;
  factors(r, "short_factor", c->rope_short);
  factors(r, "long_factor", c->rope_long);
  double factor = (double)c->context / c->rope_original_context;
  c->yarn_attn = factor <= 1 || c->rope_original_context < 2
                     ? 1
                     : (float)sqrt(1 + log(factor) / log(c->rope_original_context));
  if (real_of(r, r->rope, "attention_factor", &attention) && attention > 0)
    c->yarn_attn = attention;
}

static void read_scaling(reader *r) {
  mr_config *c = r->c;
  const char *type = text(r->rope, "rope_type type");
  c->rope_original_context = c->context;
  if (!whole_of(r, get(r->rope, "original_max_position_embeddings"),
                "original_max_position_embeddings", 1, MAX_CONTEXT, &c->rope_original_context))
    whole(r, "original_max_position_embeddings", 1, MAX_CONTEXT, &c->rope_original_context);
  real_of(r, r->rope, "factor", &c->rope_factor);
  if (!(c->rope_factor > 0))
    FAIL(r, "rope: factor must be above 0");
  else if (!strcmp(type, "linear"))
    c->rope_scaling = MR_SCALING_LINEAR;
  else if (!strcmp(type, "yarn"))
    yarn(r);
  else if (!strcmp(type, "llama3"))
    llama3(r);
  else if (!strcmp(type, "longrope") || !strcmp(type, "su"))
    longrope(r);
  else if (*type && strcmp(type, "default") && strcmp(type, "dynamic") && strcmp(type, "mrope"))
    /* mrope: text has one position in all three dimensions */
    /* dynamic: nothing changes up to max_position_embeddings, and the context ends there */
    FAIL(r,
         "rope of type \"%.32s\" is not supported (default, linear, dynamic, yarn, longrope, "
         "llama3)",
         type);
}

/* Parameters of rope: one set, or one for each kind of layer. */
static void find_rope(reader *r) {
  mr_config *c = r->c;
  const json_t *p = get(r->j, "rope_parameters rope_scaling");
  if (!p && c->arch.rope_default) {
    p = r->own = mr_json_load(c->arch.rope_default, strlen(c->arch.rope_default));
    if (!p)
      mr_err_at(&r->e, MR_E_NOMEM, r->path, 0, -1, "no memory");
  }
  const json_t *full = get(p, "full_attention"), *local = get(p, "sliding_attention");
  r->rope = full ? full : p;
  real(r, "rope_theta rotary_emb_base", &c->rope_base);
  real_of(r, get(r->j, "attn_config"), "rope_theta", &c->rope_base);
  real_of(r, r->rope, "rope_theta", &c->rope_base);
  c->rope_local_plain = c->arch.rope_local_plain || local || get(r->j, "rope_local_base_freq");
  real(r, "rope_local_base_freq", &c->rope_base_local);
  real_of(r, local, "rope_theta", &c->rope_base_local);
  if (c->layer_base[0] > 0) {
    c->rope_base = c->layer_base[0];
    c->rope_base_local = c->layer_base[1];
    if (*text(p, "rope_type type") && strcmp(text(p, "rope_type type"), "default") != 0)
      FAIL(r, "rope with scaling beside layer_rope_theta is not supported");
  }
  if (!(c->rope_base > 0) || c->rope_base_local < 0)
    FAIL(r, "rope_theta must be above 0");
}

/* Queries grow with the position beyond the original context (ministral3). */
static void read_growth(reader *r) {
  mr_config *c = r->c;
  if (!real_of(r, r->rope, "llama_4_scaling_beta", &c->temper_scale))
    return;
  c->temper_floor = (float)c->rope_original_context;
  c->temper_all = true;
}

static void read_rope(reader *r) {
  mr_config *c = r->c;
  if (c->arch.rope_by_type && strcmp(text(r->j, "position_embedding_type"), "rope") != 0)
    c->arch.rope = MR_ROPE_NONE;
  if (c->arch.rope == MR_ROPE_NONE)
    return;
  c->arch.hf_interleaved = flag(r->j, "rope_interleave", c->arch.hf_interleaved);
  c->arch.rope = c->arch.hf_interleaved ? MR_ROPE_INTERLEAVED : MR_ROPE_NEOX;
  if (flag(r->j, "alibi", false)) { /* falcon: instead of rope, and scaled as q.k is */
    c->arch.rope = MR_ROPE_NONE;
    c->arch.alibi = true;
    c->alibi_scaled = true;
    return;
  }
  find_rope(r);
  float partial = c->arch.partial > 0 ? c->arch.partial : 1, usual = partial;
  real(r, "partial_rotary_factor rotary_pct rope_pct", &partial);
  real_of(r, r->rope, "partial_rotary_factor", &partial);
  if (partial != usual && c->arch.partial == 0)
    FAIL(r, "partial_rotary_factor is %g, but architecture %s rotates whole heads", (double)partial,
         c->arch.name);
  if (!(partial >= 0) || partial > 1)
    FAIL(r, "partial_rotary_factor is %g; it must be from 0 to 1", (double)partial);
  else if (!c->arch.mla) {
    c->rope_dims = (int)((float)c->head_dim * partial);
    whole(r, "rotary_dim rotary_ndims", 2, MAX_HEAD_DIM, &c->rope_dims);
  }
  if (c->rope_dims < 2 || c->rope_dims > c->head_dim || c->rope_dims % 2)
    FAIL(r, "%d rotated values a head are impossible: the number must be even and at most %d",
         c->rope_dims, c->head_dim);
  else
    read_scaling(r);
  read_growth(r);
}

/* ------------------------------------------------------------------ which layers are what */

static bool is_local(reader *r, int layer, const char *type) {
  static const char *const whole_ones[] = {"full_attention", "attention", "global"};
  static const char *const parts[] = {"sliding_attention", "chunked_attention", "local"};
  for (int i = 0; i < 3; i++)
    if (!strcmp(type, whole_ones[i]) || !strcmp(type, parts[i]))
      return !strcmp(type, parts[i]);
  FAIL(r, "layer %d is of type \"%.32s\", which is not supported", layer, type);
  return false;
}

/* A base for each layer, where there is such a list (granite_swa): 0 means none, and there may be
 * one for layers with a window and one for the others. */
static void bases(reader *r) {
  mr_config *c = r->c;
  const json_t *list = get(r->j, "layer_rope_theta");
  float of[2] = {0, 0};
  for (int i = 0; list && i < c->n_layers && i < MR_MAX_LAYERS; i++) {
    float base = (float)json_number_value(json_array_get(list, (size_t)i));
    float *same = &of[c->windowed[i]];
    c->no_rope[i] = base == 0;
    if (!(base >= 0) || (base > 0 && *same > 0 && base != *same))
      FAIL(r, "layer_rope_theta: %g in layer %d, but %g in one before", (double)base, i,
           (double)*same);
    *same = base > 0 ? base : *same;
  }
  c->layer_base[0] = of[0] > 0 ? of[0] : of[1];
  c->layer_base[1] = of[1] > 0 ? of[1] : of[0];
}

/* Layers without experts have rope in any case (cohere2_moe). */
static void dense_rope(reader *r) {
  const json_t *kinds = get(r->j, "mlp_layer_types");
  int pattern = 0;
  whole(r, "prefix_dense_sliding_window_pattern", 1, MR_MAX_LAYERS, &pattern);
  for (int i = 0; pattern == 1 && i < r->c->n_layers && i < MR_MAX_LAYERS; i++) {
    const char *kind = json_string_value(json_array_get(kinds, (size_t)i));
    if (kind && !strcmp(kind, "dense"))
      r->c->no_rope[i] = 0;
  }
}

static void layer_kinds(reader *r) {
  mr_config *c = r->c;
  const json_t *types = get(r->j, "layer_types attention_layers"),
               *rope = get(r->j, "no_rope_layers");
  int pattern = c->arch.window_pattern, interval = c->arch.nope_interval, from = 0;
  whole(r, "sliding_window_pattern _sliding_window_pattern", 1, MR_MAX_LAYERS, &pattern);
  whole(r, "no_rope_layer_interval", 1, MR_MAX_LAYERS, &interval);
  whole(r, "max_window_layers", 0, INT_MAX, &from);
  if (c->arch.window_pattern == 0 && !types)
    pattern = flag(r->j, "use_sliding_window", false) ? 1 : 0;
  int global = c->arch.window_last ? 0 : pattern - 1;
  bool windows = c->window > 0 || c->chunk > 0;
  for (int i = 0; i < c->n_layers && i < MR_MAX_LAYERS; i++) {
    const char *type = json_string_value(json_array_get(types, (size_t)i));
    bool local = type           ? is_local(r, i, type)
                 : pattern == 1 ? i >= from
                                : pattern > 1 && i % pattern != global;
    c->windowed[i] = windows && local;
    c->no_rope[i] = json_array_size(rope) > 0 ? !json_integer_value(json_array_get(rope, (size_t)i))
                                              : interval > 0 && (i + 1) % interval == 0;
    if (c->arch.nope_global && windows && !c->windowed[i])
      c->no_rope[i] = 1;
  }
  dense_rope(r);
  bases(r);
}

static void read_layers(reader *r) {
  mr_config *c = r->c;
  c->window = 0;
  if (flag(r->j, "use_sliding_window", true))
    whole(r, "sliding_window window_size", 0, INT_MAX, &c->window);
  whole(r, "attention_chunk_size", 1, INT_MAX, &c->chunk);
  if (c->chunk)
    c->window = 0;
  layer_kinds(r);
}

/* ------------------------------------------------------------------ scales, switches */

static void read_scales(reader *r) {
  mr_config *c = r->c;
  float x = 0;
  c->attn_scale = 1 / sqrtf((float)(c->arch.mla ? c->nope_dims + c->rope_dims : c->head_dim));
  if (real(r, "query_pre_attn_scalar", &x) && x > 0)
    c->attn_scale = 1 / sqrtf(x);
  real(r, "attention_multiplier", &c->attn_scale);
  real_of(r, get(r->j, "attn_config"), "softmax_scale", &c->attn_scale);
  if (c->arch.attn_unscaled || !flag(r->j, "scale_attn_weights", true))
    c->attn_scale = 1;
  c->attn_softcap = c->final_softcap = 0;
  real(r, "attn_logit_softcapping", &c->attn_softcap);
  real(r, "final_logit_softcapping", &c->final_softcap);
  if (flag(r->j, "scale_embedding", c->arch.embed_scale))
    c->embed_scale = sqrtf((float)c->d_model);
  real(r, "embedding_multiplier scale_emb", &c->embed_scale);
  real(r, "residual_multiplier", &c->residual_scale);
  if (real(r, "scale_depth", &x))
    c->residual_scale = x / sqrtf((float)c->n_layers);
  real(r, "logit_scale", &c->logit_scale);
  if (real(r, "dim_model_base", &x))
    c->logit_scale = x / (float)c->d_model;
  if (real(r, "logits_scaling", &x) && x != 0)
    c->logit_scale = c->arch.multiplies_logits ? x : 1 / x;
  if (!real(r, "clip_qkv", &c->clip_qkv))
    real_of(r, get(r->j, "attn_config"), "clip_qkv", &c->clip_qkv);
  real_of(r, get(r->j, "attn_config"), "alibi_bias_max", &c->alibi_max_bias);
  if (flag(r->j, "attn_temperature_tuning", c->arch.qk_norm_bare)) {
    c->temper_scale = 0.1f;
    c->temper_floor = 8192;
    real(r, "attn_scale", &c->temper_scale);
    real(r, "floor_scale", &c->temper_floor);
  }
}

static void read_act(reader *r) {
  static const struct {
    const char *name;
    mr_act act;
  } acts[] = {{"silu", MR_ACT_SILU},
              {"swish", MR_ACT_SILU},
              {"gelu", MR_ACT_GELU},
              {"gelu_new", MR_ACT_GELU_TANH},
              {"gelu_fast", MR_ACT_GELU_TANH},
              {"gelu_pytorch_tanh", MR_ACT_GELU_TANH},
              {"relu", MR_ACT_RELU},
              {"relu2", MR_ACT_RELU2},
              {"quick_gelu", MR_ACT_QUICK_GELU}};
  mr_config *c = r->c;
  const char *s = text(r->j, "hidden_activation hidden_act activation_function activation");
  c->act_alpha = 1.702f;
  c->act_limit = 7;
  real(r, "swiglu_alpha", &c->act_alpha);
  real(r, "swiglu_limit", &c->act_limit);
  if (c->arch.act_fixed || !*s ||
      (!strcmp(c->arch.name, "gemma") && !get(r->j, "hidden_activation")))
    return;
  for (size_t i = 0; i < sizeof acts / sizeof *acts; i++)
    if (!strcmp(acts[i].name, s)) {
      c->arch.act = acts[i].act;
      return;
    }
  FAIL(r, "activation \"%.32s\" is not supported", s);
}

/* What mpt's attention may be beside what it is here. */
static void check_mpt(reader *r) {
  const json_t *a = get(r->j, "attn_config");
  const char *type = text(a, "attn_type"), *norm = text(r->j, "norm_type");
  if (strcmp(r->c->arch.name, "mpt") != 0)
    return;
  if (!flag(a, "alibi", true))
    FAIL(r, "attn_config: attention without alibi is not supported");
  if (flag(a, "qk_ln", false) || flag(a, "qk_gn", false) || flag(a, "prefix_lm", false) ||
      flag(a, "rope", false))
    FAIL(r, "attn_config: qk_ln, qk_gn, prefix_lm and rope are not supported");
  if (*type && strcmp(type, "multihead_attention"))
    FAIL(r, "attn_config: attn_type \"%.32s\" is not supported", type);
  if (*norm && strcmp(norm, "low_precision_layernorm") && strcmp(norm, "layernorm"))
    FAIL(r, "norm_type \"%.32s\" is not supported", norm);
}

/* Switches of one architecture each, and what the flags cannot say. */
static void read_switches(reader *r) {
  mr_arch *a = &r->c->arch;
  static const char *const refused[] = {"apply_residual_connection_post_layernorm",
                                        "scale_attn_by_inverse_layer_idx",
                                        "_remove_final_layer_norm",
                                        "add_cross_attention",
                                        "mlp_parallel",
                                        NULL};
  for (int i = 0; refused[i]; i++)
    if (flag(r->j, refused[i], false))
      FAIL(r, "%s is not supported", refused[i]);
  check_mpt(r);
  const char *afn = text(r->j, "afn");
  if (a->act_fixed && *afn && strcmp(afn, "gelu"))
    FAIL(r, "afn \"%.32s\" is not supported", afn);
  a->parallel = flag(r->j, "use_parallel_residual parallel_attn", a->parallel);
  a->qk_norm = flag(r->j, "use_qk_norm", a->qk_norm || a->qk_norm_bare);
  a->qk_norm_bare &= a->qk_norm;
  bool layer_norms = flag(r->j, "qk_layernorm", a->qk_norm && a->qk_norm_layer && !a->qk_norm_each);
  if (get(r->j, "qk_layernorm")) {
    a->qk_norm = a->qk_norm_layer = layer_norms;
    a->qk_norm_each = !strcmp(a->name, "stablelm");
  }
  a->post_norms = flag(r->j, "use_post_norm", a->post_norms);
  a->norm_bare |= !flag(r->j, "layer_norm_elementwise_affine", true);
  if (!flag(r->j, "do_layer_norm_before", true)) {
    a->pre_norms = false;
    a->norm_after = true;
  }
}

/* A whole number, or a list with the same one for each layer. */
static bool whole_all(reader *r, const char *keys, int min, int max, int *out) {
  const json_t *v = get(r->j, keys);
  if (!json_is_array(v))
    return whole(r, keys, min, max, out);
  for (size_t i = 1; i < json_array_size(v); i++)
    if (!json_equal(json_array_get(v, i), json_array_get(v, 0)))
      FAIL(r, "%.32s: layers that differ are not supported", keys);
  return whole_of(r, json_array_get(v, 0), keys, min, max, out);
}

/* How cohere2_moe chooses and mixes. */
static void read_mixing(reader *r) {
  mr_config *c = r->c;
  const char *mix = text(r->j, "shared_expert_combination_strategy");
  bool softmax = !strcmp(text(r->j, "expert_selection_fn"), "softmax");
  if (!strcmp(text(r->j, "expert_selection_fn"), "sigmoid"))
    c->arch.scoring = MR_SCORE_SIGMOID;
  c->arch.renorm |= softmax; /* over the chosen ones */
  if (c->d_shared > 0 && !strcmp(mix, "average"))
    c->route_scale = c->shared_scale = 0.5f;
  else if (*mix && strcmp(mix, "sum") && strcmp(mix, "average"))
    FAIL(r, "shared_expert_combination_strategy \"%.32s\" is not supported", mix);
}

/* What dbrx keeps in an object of its own. */
static void read_ffn(reader *r) {
  mr_config *c = r->c;
  const json_t *o = get(r->j, "ffn_config"),
               *norm = json_object_get(o, "moe_normalize_expert_weights");
  const char *act = text(get(o, "ffn_act_fn"), "name");
  if (!o)
    return;
  c->d_expert = 0;
  whole_of(r, get(o, "moe_num_experts"), "moe_num_experts", 1, 4096, &c->n_experts);
  whole_of(r, get(o, "moe_top_k"), "moe_top_k", 1, MR_MAX_CHOSEN, &c->n_experts_used);
  whole_of(r, get(o, "ffn_hidden_size"), "ffn_hidden_size", 1, MAX_FF, &c->d_expert);
  c->arch.renorm = !norm || !json_is_null(norm);
  if (c->n_experts < 2 || c->n_experts_used < 1 || c->n_experts_used > c->n_experts ||
      c->d_expert < 1)
    FAIL(r, "ffn_config: moe_num_experts, moe_top_k or ffn_hidden_size is missing or impossible");
  if (*act && strcmp(act, "silu"))
    FAIL(r, "ffn_config: activation \"%.32s\" is not supported", act);
  if (json_is_number(norm) && json_number_value(norm) != 1)
    FAIL(r, "ffn_config: moe_normalize_expert_weights is not 1");
}

static void read_experts(reader *r) {
  mr_config *c = r->c;
  int shared = 0;
  read_ffn(r);
  if (!whole(r, "num_local_experts num_experts n_routed_experts moe_num_experts", 0, 4096,
             &c->n_experts) ||
      c->n_experts <= 1) {
    if (c->n_experts == 0) /* the shared one is then all there is */
      whole(r, "shared_intermediate_size", 1, MAX_FF, &c->d_ff);
    return;
  }
  if (!whole_all(r, "num_experts_per_tok moe_topk moe_k", 1, c->n_experts, &c->n_experts_used))
    FAIL(r, "num_experts_per_tok is missing");
  if (c->n_experts_used < 1 || c->n_experts_used > MR_MAX_CHOSEN)
    FAIL(r, "%d experts a token are impossible (1 to %d)", c->n_experts_used, MR_MAX_CHOSEN);
  if (!whole_all(r, "moe_intermediate_size intermediate_size", 1, MAX_FF, &c->d_expert))
    FAIL(r, "moe_intermediate_size is missing");
  if (whole_all(r, "n_shared_experts num_shared_experts num_shared_expert moe_num_shared_experts",
                0, 64, &shared))
    c->d_shared = shared * c->d_expert;
  else if (c->arch.route_input)
    c->d_shared = c->d_expert;
  whole(r, "shared_expert_intermediate_size shared_intermediate_size", 0, MAX_FF, &c->d_shared);
  if (c->d_shared > MAX_FF)
    FAIL(r, "shared experts of %d values together are too wide (at most %d)", c->d_shared, MAX_FF);
  c->arch.renorm = flag(r->j, "norm_topk_prob", c->arch.renorm);
  read_mixing(r);
  real(r, "routed_scaling_factor router_scaling_factor", &c->route_scale);
  c->route_jitter = 0.01f;
  real(r, "router_jitter_noise", &c->route_jitter);
  const char *method = text(r->j, "topk_method"), *score = text(r->j, "scoring_func");
  if (strcmp(method, "greedy")) {
    whole(r, "n_group", 1, c->n_experts, &c->n_group);
    whole(r, "topk_group", 1, c->n_group > 0 ? c->n_group : 1, &c->topk_group);
  }
  c->group_best = !strcmp(method, "group_limited_greedy");
  if (!strcmp(score, "sigmoid"))
    c->arch.scoring = MR_SCORE_SIGMOID;
  if (c->n_group > 1 && c->n_experts % c->n_group)
    FAIL(r, "%d experts cannot be cut into %d groups", c->n_experts, c->n_group);
}

static void read_quantization(reader *r) {
  static const char *const known[] = {"gptq", "awq",           "compressed-tensors",
                                      "fp8",  "int8-outliers", NULL};
  const json_t *q = get(r->j, "quantization_config");
  const json_t *block = get(q, "weight_block_size");
  const char *method = text(q, "quant_method");
  int i = 0;
  while (known[i] && strcmp(known[i], method))
    i++;
  if (q && !known[i])
    FAIL(r, "quantization \"%.32s\" is not supported (gptq, awq, compressed-tensors, fp8)", method);
  r->c->gptq_v2 = !strcmp(text(q, "checkpoint_format"), "gptq_v2");
  if (block && json_array_size(block) != 2)
    FAIL(r, "weight_block_size must be two whole numbers, of rows and of columns");
  for (size_t k = 0; k < 2; k++)
    whole_of(r, json_array_get(block, k), "weight_block_size", 1, 1 << 20, &r->c->quant_block[k]);
}

static const mr_arch *find_arch(reader *r) {
  const char *type = text(r->j, "model_type");
  if (!*type) {
    FAIL(r, "model_type is missing");
    return NULL;
  }
  const json_t *part = get(r->j, "text_config"); /* beside a model of images */
  const mr_arch *a = mr_arch_find_hf(text(part, "model_type"));
  if (a)
    r->j = part;
  else
    a = mr_arch_find_hf(type);
  const char *near = a ? NULL : mr_arch_nearest(type, true);
  if (!a)
    FAIL(r, "architecture \"%.64s\" is not supported%s%s", type,
         near ? "; the nearest known one is " : "", near ? near : "");
  return a;
}

mr_code mr_config_from_dir(mr_config *c, const char *dir, mr_err *err) {
  char path[4096];
  memset(c, 0, sizeof *c);
  if (snprintf(path, sizeof path, "%s/config.json", dir) >= (int)sizeof path)
    return mr_err_at(err, MR_E_NOINPUT, dir, 0, -1, "the path is too long");
  json_t *root = mr_json_read(path, MAX_CONFIG, err);
  if (!root)
    return err && err->code ? err->code : MR_E_DATA;
  reader r = {.c = c, .j = root, .root = root, .path = path, .e = MR_ERR_INIT};
  const mr_arch *a = find_arch(&r);
  if (a) {
    mr_config_init(c, a);
    c->n_heads = c->n_kv_heads = 1;
    read_sizes(&r);
  }
  if (!r.e.code)
    read_heads(&r);
  if (!r.e.code) {
    read_scales(&r);
    read_layers(&r);
    read_rope(&r);
    read_act(&r);
    read_switches(&r);
    read_experts(&r);
    read_quantization(&r);
  }
  json_decref(r.own);
  json_decref(root);
  if (r.e.code && err && !err->code)
    *err = r.e;
  return r.e.code;
}
