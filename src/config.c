#include "src/config.h"

#include <limits.h>
#include <math.h>
#include <string.h>

#include "io/text.h"

#define MAX_WIDTH (1 << 20) /* d_model, and all heads of a layer together */
#define MAX_FF (1 << 24)
#define MAX_HEADS 4096
#define MAX_HEAD_DIM 1024
#define MAX_CONTEXT (1 << 24) /* tokens */

typedef struct reader { /* the first error wins, so phases read on and the caller looks once */
  const mr_gguf *g;
  const char *arch;
  mr_err e;
  char key[128];
} reader;

#define FAIL(r, ...) mr_err_at(&(r)->e, MR_E_DATA, mr_gguf_path((r)->g), 0, -1, __VA_ARGS__)

static const char *key_of(reader *r, const char *name) {
  snprintf(r->key, sizeof r->key, "%s.%s", r->arch, name);
  return r->key;
}

/* A whole number lo..hi at ARCH.name. False when the key is absent (or wrong: r->e); *out is then
 * untouched. */
static bool whole(reader *r, const char *name, int64_t lo, int64_t hi, int *out) {
  uint32_t v;
  if (!mr_gguf_u32(r->g, key_of(r, name), &v, &r->e))
    return false;
  if (v < lo || v > hi) {
    FAIL(r, "key %s is %u; %lld to %lld is allowed", r->key, v, (long long)lo, (long long)hi);
    return false;
  }
  *out = (int)v;
  return true;
}

static void need_whole(reader *r, const char *name, int64_t hi, int *out) {
  if (!whole(r, name, 1, hi, out) && !r->e.code)
    FAIL(r, "key %s is missing", r->key);
}

/* A finite number from lo on; above lo where `above`. */
static bool real(reader *r, const char *name, float lo, bool above, float *out) {
  float v;
  if (!mr_gguf_f32(r->g, key_of(r, name), &v, &r->e))
    return false;
  if (!isfinite(v) || v < lo || (above && v == lo)) {
    FAIL(r, "key %s is %g; it must be a finite number %s %g", r->key, (double)v,
         above ? "above" : "of at least", (double)lo);
    return false;
  }
  *out = v;
  return true;
}

static void read_sizes(mr_config *c, reader *r) {
  need_whole(r, "block_count", MR_MAX_LAYERS, &c->n_layers);
  need_whole(r, "embedding_length", MAX_WIDTH, &c->d_model);
  need_whole(r, "feed_forward_length", MAX_FF, &c->d_ff);
  const char *eps = c->arch.norm == MR_NORM_RMS ? "attention.layer_norm_rms_epsilon"
                                                : "attention.layer_norm_epsilon";
  if (!real(r, eps, 0, false, &c->eps) && !r->e.code)
    FAIL(r, "key %s is missing", r->key);
  whole(r, "context_length", 0, MAX_CONTEXT, &c->context);
  c->context_assumed = c->context == 0;
  if (c->context_assumed)
    c->context = MR_DEFAULT_CONTEXT;
  const mr_gguf_tensor *embed = mr_gguf_find_tensor(r->g, "token_embd.weight");
  if (!embed)
    FAIL(r, "tensor token_embd.weight is missing: there is no model in this file");
  else if (embed->dims[1] > INT32_MAX)
    FAIL(r, "tensor token_embd.weight has %lld rows, too many", (long long)embed->dims[1]);
  else
    c->n_vocab = (int)embed->dims[1];
}

static void read_heads(mr_config *c, reader *r) {
  need_whole(r, "attention.head_count", MAX_HEADS, &c->n_heads);
  if (r->e.code)
    return;
  c->n_kv_heads = c->n_heads;
  whole(r, "attention.head_count_kv", 1, MAX_HEADS, &c->n_kv_heads);
  if (c->n_heads % c->n_kv_heads)
    FAIL(r, "%d attention heads cannot share %d key heads: one must divide the other", c->n_heads,
         c->n_kv_heads);
  if (!whole(r, "attention.key_length", 1, MAX_HEAD_DIM, &c->head_dim)) {
    c->head_dim = c->d_model / c->n_heads;
    if (c->d_model % c->n_heads || c->head_dim > MAX_HEAD_DIM)
      FAIL(r, "an embedding of %d cannot be cut into %d heads of at most %d", c->d_model,
           c->n_heads, MAX_HEAD_DIM);
  }
  c->head_dim_v = c->head_dim;
  whole(r, "attention.value_length", 1, MAX_HEAD_DIM, &c->head_dim_v);
  if (c->head_dim_v != c->head_dim)
    FAIL(r, "keys of %d and values of %d a head are not supported: they must be equal", c->head_dim,
         c->head_dim_v);
  if ((int64_t)c->n_heads * c->head_dim > MAX_WIDTH)
    FAIL(r, "%d heads of %d are too wide (at most %d together)", c->n_heads, c->head_dim,
         MAX_WIDTH);
}

static void read_scaling(mr_config *c, reader *r) {
  mr_str type = {"linear", 6};
  char shown[64];
  bool factor = real(r, "rope.scaling.factor", 0, true, &c->rope_factor);
  mr_gguf_str(r->g, key_of(r, "rope.scaling.type"), &type, &r->e);
  mr_gguf_show(type, shown, sizeof shown);
  c->rope_original_context = c->context;
  whole(r, "rope.scaling.original_context_length", 1, MAX_CONTEXT, &c->rope_original_context);
  real(r, "rope.scaling.yarn_ext_factor", 0, false, &c->yarn_ext);
  real(r, "rope.scaling.attn_factor", 0, true, &c->yarn_attn);
  real(r, "rope.scaling.yarn_attn_factor", 0, true, &c->yarn_attn);
  real(r, "rope.scaling.yarn_beta_fast", 0, true, &c->yarn_beta_fast);
  real(r, "rope.scaling.yarn_beta_slow", 0, true, &c->yarn_beta_slow);
  if (strcmp(shown, "linear") == 0)
    c->rope_scaling = factor ? MR_SCALING_LINEAR : MR_SCALING_NONE;
  else if (strcmp(shown, "yarn") == 0)
    c->rope_scaling = MR_SCALING_YARN;
  else if (strcmp(shown, "longrope") == 0)
    c->rope_scaling = MR_SCALING_LONGROPE; /* its factors are tensors */
  else if (strcmp(shown, "none"))
    FAIL(
        r,
        "key %s.rope.scaling.type is \"%s\", which is not supported (none, linear, yarn, longrope)",
        r->arch, shown);
}

static void read_rope(mr_config *c, reader *r) {
  if (c->arch.rope == MR_ROPE_NONE)
    return;
  c->rope_dims = c->head_dim;
  whole(r, "rope.dimension_count", 2, MAX_HEAD_DIM, &c->rope_dims);
  if (c->rope_dims > c->head_dim || c->rope_dims % 2)
    FAIL(r, "%d rotated values a head are impossible: the number must be even and at most %d",
         c->rope_dims, c->head_dim);
  real(r, "rope.freq_base", 0, true, &c->rope_base);
  real(r, "rope.freq_base_swa", 0, true, &c->rope_base_local);
  read_scaling(c, r);
}

/* Which layers see only their window. A window that the architecture gives no pattern for would be
 * ignored silently, so it is refused, unless it is no shorter than the context. */
static void read_window(mr_config *c, reader *r) {
  int pattern = c->arch.window_pattern;
  whole(r, "attention.sliding_window", 0, INT_MAX, &c->window);
  if (pattern > 1 && c->window == 0)
    FAIL(r, "key %s.attention.sliding_window is missing", r->arch);
  if (pattern == 0 && c->window > 0 && c->window < c->context)
    FAIL(r, "an attention window of %d tokens is not supported for %s", c->window, r->arch);
  if (pattern == 0)
    c->window = 0;
  for (int i = 0; i < c->n_layers && i < MR_MAX_LAYERS; i++)
    c->windowed[i] = c->window > 0 && (pattern == 1 || i % pattern != pattern - 1);
}

static void read_scales(mr_config *c, reader *r) {
  bool wide = c->arch.wide_scale_layers && c->n_layers == c->arch.wide_scale_layers;
  if (!real(r, "attention.scale", 0, false, &c->attn_scale) || c->attn_scale == 0)
    c->attn_scale = 1 / sqrtf(wide ? (float)c->d_model / (float)c->n_heads : (float)c->head_dim);
  real(r, "attn_logit_softcapping", 0, false, &c->attn_softcap);
  real(r, "final_logit_softcapping", 0, false, &c->final_softcap);
  real(r, "attention.max_alibi_bias", 0, true, &c->alibi_max_bias);
  if (c->arch.embed_scale)
    c->embed_scale = sqrtf((float)c->d_model);
  real(r, "embedding_scale", 0, true, &c->embed_scale);
  real(r, "residual_scale", 0, true, &c->residual_scale);
  real(r, "logit_scale", 0, true, &c->logit_scale);
  if (c->arch.divides_logits)
    c->logit_scale = 1 / c->logit_scale;
}

static void read_experts(mr_config *c, reader *r) {
  int shared = 0;
  if (!whole(r, "expert_count", 0, 4096, &c->n_experts) || c->n_experts == 0)
    return;
  need_whole(r, "expert_used_count", c->n_experts < MR_MAX_CHOSEN ? c->n_experts : MR_MAX_CHOSEN,
             &c->n_experts_used);
  c->d_expert = c->d_ff;
  whole(r, "expert_feed_forward_length", 1, MAX_FF, &c->d_expert);
  if (whole(r, "expert_shared_count", 0, 64, &shared))
    c->d_shared = shared * c->d_expert;
  whole(r, "expert_shared_feed_forward_length", 0, MAX_FF, &c->d_shared);
  if (c->d_shared > MAX_FF)
    FAIL(r, "shared experts of %d values together are too wide (at most %d)", c->d_shared, MAX_FF);
  real(r, "expert_weights_scale", 0, true, &c->route_scale);
  mr_gguf_bool(r->g, key_of(r, "expert_weights_norm"), &c->arch.renorm, &r->e);
}

/* Keys that change the arithmetic in ways which the flags cannot say. */
static void read_others(mr_config *c, reader *r) {
  float clamp = 0;
  bool causal = true;
  read_experts(c, r);
  if (real(r, "attention.clamp_kqv", 0, false, &clamp) && clamp > 0)
    FAIL(r, "clamped keys, queries and values (%s) are not supported", r->key);
  if (mr_gguf_bool(r->g, key_of(r, "attention.causal"), &causal, &r->e) && !causal)
    FAIL(r, "attention is not causal: this model embeds text, it does not generate");
  mr_gguf_bool(r->g, key_of(r, "use_parallel_residual"), &c->arch.parallel, &r->e);
}

static void read_name(mr_config *c, const mr_gguf *g) {
  mr_str s;
  if (!mr_gguf_str(g, "general.name", &s, NULL))
    return;
  bool plain = mr_utf8_valid(s.s, s.len) < 0;
  for (size_t i = 0; i < s.len; i++)
    plain &= (unsigned char)s.s[i] >= 0x20 && s.s[i] != 0x7f;
  if (plain) {
    size_t n = mr_utf8_whole(s.s, s.len < sizeof c->name ? s.len : sizeof c->name - 1);
    memcpy(c->name, s.s, n);
  } else {
    mr_gguf_show(s, c->name, sizeof c->name);
  }
}

static const mr_arch *find_arch(reader *r) {
  mr_str s;
  char name[64];
  if (!mr_gguf_str(r->g, "general.architecture", &s, &r->e)) {
    FAIL(r, "key general.architecture is missing");
    return NULL;
  }
  mr_gguf_show(s, name, sizeof name);
  const mr_arch *a = mr_arch_find(name);
  if (a)
    return a;
  const char *near = mr_arch_nearest(name, false);
  FAIL(r, "architecture \"%s\" is not supported%s%s", name,
       near ? "; the nearest known one is " : "", near ? near : "");
  return NULL;
}

mr_code mr_config_from_gguf(mr_config *c, const mr_gguf *g, mr_err *err) {
  reader r = {.g = g, .e = MR_ERR_INIT};
  memset(c, 0, sizeof *c);
  const mr_arch *a = find_arch(&r);
  if (a) {
    r.arch = a->name;
    mr_config_init(c, a);
    read_name(c, g);
    read_sizes(c, &r);
    read_heads(c, &r);
  }
  if (!r.e.code) {
    read_rope(c, &r);
    read_window(c, &r);
    read_scales(c, &r);
    read_others(c, &r);
  }
  if (r.e.code && err && !err->code)
    *err = r.e;
  return r.e.code;
}
