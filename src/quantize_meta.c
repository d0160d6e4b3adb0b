/* A directory's configuration as keys of a GGUF file, and the proof that they say the same. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "src/quantize_plan.h"

typedef struct keys {
  mr_gguf_writer *w;
  const char *arch;
  char name[128];
} keys;

static const char *of(keys *k, const char *name) {
  snprintf(k->name, sizeof k->name, "%s.%s", k->arch, name);
  return k->name;
}

static void whole(keys *k, const char *name, int64_t v) {
  mr_gguf_write_u32(k->w, of(k, name), (uint32_t)v);
}

static void real(keys *k, const char *name, float v) {
  mr_gguf_write_f32(k->w, of(k, name), v);
}

static void real_unless(keys *k, const char *name, float v, float usual) {
  if (fabsf(v - usual) > 1e-6f * fabsf(usual))
    real(k, name, v);
}

static void scaling(keys *k, const mr_config *c) {
  bool yarn = c->rope_scaling == MR_SCALING_YARN;
  if (!yarn && c->rope_scaling != MR_SCALING_LINEAR)
    return;
  mr_gguf_write_str(k->w, of(k, "rope.scaling.type"), yarn ? "yarn" : "linear", yarn ? 4 : 6);
  real(k, "rope.scaling.factor", c->rope_factor);
  if (!yarn)
    return;
  whole(k, "rope.scaling.original_context_length", c->rope_original_context);
  real_unless(k, "rope.scaling.attn_factor", c->yarn_attn, 1);
  real_unless(k, "rope.scaling.yarn_beta_fast", c->yarn_beta_fast, 32);
  real_unless(k, "rope.scaling.yarn_beta_slow", c->yarn_beta_slow, 1);
}

static void experts(keys *k, const mr_config *c) {
  if (!c->n_experts)
    return;
  whole(k, "expert_count", c->n_experts);
  whole(k, "expert_used_count", c->n_experts_used);
  whole(k, "expert_feed_forward_length", c->d_expert);
  if (c->d_shared)
    whole(k, "expert_shared_feed_forward_length", c->d_shared);
  real_unless(k, "expert_weights_scale", c->route_scale, 1);
  mr_gguf_write_bool(k->w, of(k, "expert_weights_norm"), c->arch.renorm);
}

static void scales(keys *k, const mr_config *c) {
  mr_config plain;
  mr_config_init(&plain, &c->arch);
  float embed = c->arch.embed_scale ? sqrtf((float)c->d_model) : 1;
  real_unless(k, "attention.scale", c->attn_scale, 1 / sqrtf((float)c->head_dim));
  real_unless(k, "attn_logit_softcapping", c->attn_softcap, plain.attn_softcap);
  real_unless(k, "final_logit_softcapping", c->final_softcap, plain.final_softcap);
  real_unless(k, "embedding_scale", c->embed_scale, embed);
  real_unless(k, "residual_scale", c->residual_scale, 1);
  float logits = c->arch.divides_logits ? 1 / c->logit_scale : c->logit_scale;
  real_unless(k, "logit_scale", logits, 1);
}

void mr_out_config(mr_gguf_writer *w, const mr_model *m) {
  const mr_config *c = &m->c;
  keys k = {.w = w, .arch = c->arch.name};
  mr_gguf_write_str(w, "general.architecture", k.arch, strlen(k.arch));
  mr_gguf_write_str(w, "general.type", "model", 5);
  if (c->name[0])
    mr_gguf_write_str(w, "general.name", c->name, strlen(c->name));
  whole(&k, "block_count", c->n_layers);
  if (!c->context_assumed)
    whole(&k, "context_length", c->context);
  whole(&k, "embedding_length", c->d_model);
  whole(&k, "feed_forward_length", c->d_ff);
  whole(&k, "vocab_size", c->n_vocab);
  whole(&k, "attention.head_count", c->n_heads);
  whole(&k, "attention.head_count_kv", c->n_kv_heads);
  whole(&k, "attention.key_length", c->head_dim);
  whole(&k, "attention.value_length", c->head_dim_v);
  real(&k,
       c->arch.norm == MR_NORM_RMS ? "attention.layer_norm_rms_epsilon"
                                   : "attention.layer_norm_epsilon",
       c->eps);
  if (c->rope_dims) {
    whole(&k, "rope.dimension_count", c->rope_dims);
    real(&k, "rope.freq_base", c->rope_base);
    if (c->rope_base_local > 0)
      real(&k, "rope.freq_base_swa", c->rope_base_local);
  }
  scaling(&k, c);
  if (c->window > 0)
    whole(&k, "attention.sliding_window", c->window);
  if (c->arch.alibi)
    real(&k, "attention.max_alibi_bias", c->alibi_max_bias);
  scales(&k, c);
  experts(&k, c);
  if (!strcmp(k.arch, "gptneox"))
    mr_gguf_write_bool(w, of(&k, "use_parallel_residual"), c->arch.parallel);
}

/* ------------------------------------------------------------------ reading back */

static bool near(float a, float b) {
  return fabsf(a - b) <= 1e-5f * fmaxf(fabsf(a), fabsf(b));
}

static bool same_layers(const mr_config *a, const mr_config *b) {
  bool local = false;
  for (int i = 0; i < a->n_layers; i++) {
    if (a->windowed[i] != b->windowed[i] || a->no_rope[i] != b->no_rope[i])
      return false;
    local |= a->windowed[i] != 0;
  }
  return !local || (a->window == b->window && a->chunk == b->chunk &&
                    near(a->rope_base_local, b->rope_base_local));
}

static bool same_rope(const mr_config *a, const mr_config *b) {
  if (a->arch.rope == MR_ROPE_NONE || b->arch.rope == MR_ROPE_NONE)
    return a->arch.rope == b->arch.rope;
  bool scaled = a->rope_scaling != MR_SCALING_NONE;
  return a->rope_dims == b->rope_dims && near(a->rope_base, b->rope_base) &&
         a->rope_scaling == b->rope_scaling && a->rope_scaling != MR_SCALING_LONGROPE &&
         (!scaled || near(a->rope_factor, b->rope_factor)) &&
         (a->rope_scaling != MR_SCALING_YARN ||
          (near(a->yarn_attn, b->yarn_attn) && near(a->yarn_beta_fast, b->yarn_beta_fast) &&
           near(a->yarn_beta_slow, b->yarn_beta_slow) && !a->yarn_exact &&
           a->rope_original_context == b->rope_original_context));
}

static bool same_experts(const mr_config *a, const mr_config *b) {
  const mr_arch *x = &a->arch, *y = &b->arch;
  return a->n_experts == b->n_experts && a->n_experts_used == b->n_experts_used &&
         (!a->n_experts || (a->d_expert == b->d_expert && a->d_shared == b->d_shared &&
                            near(a->route_scale, b->route_scale) && x->renorm == y->renorm &&
                            x->scoring == y->scoring && a->n_group <= 1));
}

static bool same_scales(const mr_config *a, const mr_config *b) {
  return near(a->attn_scale, b->attn_scale) && near(a->attn_softcap, b->attn_softcap) &&
         near(a->final_softcap, b->final_softcap) && near(a->embed_scale, b->embed_scale) &&
         near(a->residual_scale, b->residual_scale) && near(a->logit_scale, b->logit_scale) &&
         a->clip_qkv == b->clip_qkv;
}

static bool same_sizes(const mr_config *a, const mr_config *b) {
  return a->n_layers == b->n_layers && a->d_model == b->d_model && a->n_heads == b->n_heads &&
         a->n_kv_heads == b->n_kv_heads && a->head_dim == b->head_dim && a->d_ff == b->d_ff &&
         a->n_vocab == b->n_vocab && a->context == b->context && near(a->eps, b->eps);
}

static bool same_switches(const mr_arch *x, const mr_arch *y) {
  return x->act == y->act && x->alibi == y->alibi && x->parallel == y->parallel &&
         x->qk_norm == y->qk_norm && x->pre_norms == y->pre_norms &&
         x->norm_after == y->norm_after && !x->xielu && !x->swiglu_clamp;
}

mr_code mr_out_check(const mr_model *m, const char *path, mr_err *err) {
  mr_gguf *g = NULL;
  mr_config back;
  mr_code rc = mr_gguf_open(&g, path, err);
  if (!rc)
    rc = mr_config_from_gguf(&back, g, err);
  mr_gguf_close(g);
  if (rc || m->gguf)
    return rc;
  const mr_config *c = &m->c;
  const char *what = !same_sizes(c, &back)                  ? "sizes"
                     : !same_layers(c, &back)               ? "windows and layers"
                     : !same_rope(c, &back)                 ? "rotary embedding"
                     : !same_experts(c, &back)              ? "experts"
                     : !same_scales(c, &back)               ? "scales"
                     : !same_switches(&c->arch, &back.arch) ? "activation or norms"
                                                            : NULL;
  return what ? mr_err_at(err, MR_E_UNAVAILABLE, m->weights->path, 0, -1,
                          "a GGUF file of architecture %s cannot say this model's %s", c->arch.name,
                          what)
              : MR_OK;
}
