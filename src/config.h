/* config.h: an architecture is a row of flags over one forward program, not a file of its own.
 *
 *     mr_config c;
 *     mr_config_from_gguf(&c, g, &err);      reads and checks the metadata
 *
 * The table in config.c has a row for each architecture: its name, its flags, its defaults. Adding
 * one is a row, as long as the flags can say it (docs/adding-a-model.md).
 */
#ifndef MR_SRC_CONFIG_H
#define MR_SRC_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

#include "io/err.h"
#include "io/gguf.h"
#include "kernels/kernels.h"

#define MR_MAX_LAYERS 512
#define MR_DEFAULT_CONTEXT 2048 /* tokens */

typedef enum mr_norm { MR_NORM_RMS, MR_NORM_LAYER, MR_NORM_NONE } mr_norm;
typedef enum mr_rope { MR_ROPE_NONE, MR_ROPE_INTERLEAVED, MR_ROPE_NEOX } mr_rope;
typedef enum mr_rope_scaling {
  MR_SCALING_NONE,
  MR_SCALING_LINEAR,
  MR_SCALING_YARN,
  MR_SCALING_LONGROPE
} mr_rope_scaling;

typedef struct mr_arch { /* one row of the table */
  const char *name;
  mr_norm norm;
  bool norm_bias;
  mr_rope rope;
  mr_act act;
  bool gated; /* MLP: act(gate) * up; else act(up) */
  bool qkv_bias, out_bias, mlp_bias;
  bool qk_norm;       /* RMS norm of each head of q and k before rope */
  bool qk_norm_full;  /* ... over all heads at once */
  bool post_norms;    /* norms after attention and after the MLP, before the residual add */
  bool pre_norms;     /* norms before attention and MLP (most); false: only post_norms (olmo2) */
  bool parallel;      /* attention and MLP both read the layer's input and add to it */
  bool fused_qkv;     /* one tensor attn_qkv: q rows, then k, then v */
  bool fused_gate_up; /* ffn_up holds gate rows, then up rows */
  bool embed_scale;   /* embeddings times sqrt(d_model) */
  bool learned_positions; /* position_embd.weight added to the embeddings */
  bool alibi;
  int window_pattern;    /* 1: all layers windowed; n: every n-th is global; 0: none windowed */
  float rope_base;       /* default where the file says none */
  float rope_base_local; /* base of windowed layers; 0: the same */
  /* defaults of gemma2 where the file says none, and what the format has no key for */
  int window;
  float attn_softcap, final_softcap;
  int wide_scale_layers; /* the variant with this many layers scales q.k by sqrt(n_heads/d_model) */
  bool divides_logits;   /* the file's logit_scale divides */
} mr_arch;

typedef struct mr_config {
  mr_arch arch;  /* a copy of the row; flags may be refined by what tensors the file has */
  char name[64]; /* general.name, cut */
  int n_layers, d_model, n_heads, n_kv_heads, head_dim, head_dim_v, d_ff;
  int n_vocab;          /* rows of token_embd */
  int context;          /* trained context length, tokens */
  bool context_assumed; /* the file says none; context is MR_DEFAULT_CONTEXT */
  float eps;
  float attn_scale;                  /* on q·k; default 1/sqrt(head_dim) */
  float attn_softcap, final_softcap; /* 0: none */
  int window;                        /* 0: none */
  int rope_dims;                     /* rotated values a head */
  float rope_base;
  float rope_base_local; /* windowed layers, without scaling; 0: as the others */
  mr_rope_scaling rope_scaling;
  float rope_factor; /* linear, yarn */
  int rope_original_context;
  float yarn_ext, yarn_beta_fast, yarn_beta_slow;
  float yarn_attn; /* times 1 + 0.1 ln(factor) */
  float alibi_max_bias;
  float embed_scale;                       /* factor on embeddings; 1: none */
  float residual_scale, logit_scale;       /* granite and others; 1: none */
  int n_experts, n_experts_used, d_expert; /* 0: dense */
  uint8_t windowed[MR_MAX_LAYERS];         /* 1: this layer sees only its window */
} mr_config;

const mr_arch *mr_arch_find(const char *name); /* NULL: unknown */
/* MR_E_DATA: missing, impossible or unsupported metadata; an unknown architecture too, with the
 * nearest known name. Mixtures of experts and longrope scaling are refused for now. */
mr_code mr_config_from_gguf(mr_config *c, const mr_gguf *g, mr_err *err);

#endif
