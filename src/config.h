/* config.h: an architecture is a row of flags over one forward program, not a file of its own.
 *
 *     mr_config c;
 *     mr_config_from_gguf(&c, g, &err);      reads and checks the metadata
 *     mr_config_from_dir(&c, dir, &err);     ... config.json of a directory
 *
 * The table in arch.c has a row for each architecture: its names, its flags, its defaults. Adding
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
#define MR_MAX_CHOSEN 32        /* experts of a token */
#define MR_MAX_ROPE 512         /* rotated pairs of a head */
#define MR_DEFAULT_CONTEXT 2048 /* tokens */

typedef enum mr_norm { MR_NORM_RMS, MR_NORM_LAYER, MR_NORM_NONE } mr_norm;
typedef enum mr_rope { MR_ROPE_NONE, MR_ROPE_INTERLEAVED, MR_ROPE_NEOX } mr_rope;
typedef enum mr_rope_scaling {
  MR_SCALING_NONE,
  MR_SCALING_LINEAR,
  MR_SCALING_YARN,
  MR_SCALING_LONGROPE
} mr_rope_scaling;

/* How a fused tensor of queries, keys and values is laid out in rows. */
typedef enum mr_qkv {
  MR_QKV_STACKED, /* all of q, then k, then v */
  MR_QKV_GROUPED, /* for each key head: its queries, its key, its value */
  MR_QKV_PARTS    /* four parts of q, v, k (codegen) */
} mr_qkv;

/* Positions that are computed: half the width sines, half cosines, of wavelengths from 2 pi to ...
 */
typedef enum mr_sinusoids {
  MR_SINUSOIDS_NONE,
  MR_SINUSOIDS,     /* ... nearly 2 pi 10000 (ctrl) */
  MR_SINUSOIDS_ENDS /* ... 2 pi 10000 (xglm) */
} mr_sinusoids;

typedef enum mr_scoring { /* of experts */
                          MR_SCORE_SOFTMAX,
                          MR_SCORE_SIGMOID,
                          MR_SCORE_SPARSEMIXER /* phimoe: softmax over the experts near the best,
                                                  twice */
} mr_scoring;

typedef struct mr_arch { /* one row of the table */
  const char *name;      /* general.architecture of GGUF files */
  const char *hf;        /* model_type of config.json, several with spaces; NULL: GGUF only */
  bool hf_only;          /* no GGUF file of this name is known */
  mr_norm norm;
  bool norm_bias;
  bool norm_bare; /* no weights */
  bool hf_plus1;  /* the directory's norm weights are less by one */
  mr_rope rope;
  bool hf_interleaved; /* directories: pairs (2i, 2i+1); GGUF files may have reordered rows */
  mr_act act;
  bool act_fixed;    /* config.json does not choose it */
  bool xielu;        /* act with learned slopes, in place of act (apertus) */
  bool swiglu_clamp; /* (up + 1) * gate * sigmoid(alpha * gate), both clamped (gpt_oss) */
  bool gated;        /* MLP: act(gate) * up; else act(up) */
  bool qkv_bias, out_bias, mlp_bias;
  bool qk_norm;       /* RMS norm of each head of q and k before rope */
  bool qk_norm_full;  /* ... over all heads at once */
  bool qk_norm_layer; /* ... layer norm */
  bool qk_norm_each;  /* ... weights for each head */
  bool qk_norm_late;  /* ... after rope */
  bool qk_norm_bare;  /* ... no weights; only on layers with rope */
  bool post_norms;    /* norms after attention and after the MLP, before the residual add */
  bool pre_norms;     /* norms before attention and MLP (most); false: only post_norms (olmo2) */
  bool norm_after;    /* the residual stream is normed after each branch has joined it (opt) */
  bool sub_norms;     /* norms of attention's output and of the MLP's inner values (bitnet) */
  bool embed_norm;    /* norm of the embeddings (bloom) */
  bool parallel;      /* attention and MLP both read the layer's input and add to it */
  bool fused_qkv;     /* one tensor attn_qkv: q rows, then k, then v */
  mr_qkv hf_qkv;      /* ... in directories */
  bool hf_columns;    /* directories hold the layers' matrices transposed (gpt2) */
  bool fused_gate_up; /* ffn_up holds gate rows, then up rows */
  bool embed_scale;   /* embeddings times sqrt(d_model) */
  bool learned_positions; /* position_embd.weight added to the embeddings */
  mr_sinusoids sinusoids; /* ... or a table that is computed */
  int position_offset;    /* rows of it that come before position 0, in directories */
  bool alibi;
  bool sinks;            /* attention may leave tokens to a sink for each head (gpt_oss) */
  bool attn_unscaled;    /* q.k as it is */
  int window_pattern;    /* 1: all layers windowed; n: every n-th is global; 0: none windowed */
  bool window_last;      /* ... of n layers the first is global, not the last */
  bool nope_global;      /* no rope in layers without window, where there are windows */
  int nope_interval;     /* every n-th layer has no rope, unless config.json says otherwise */
  float partial;         /* share of a head that is rotated where config.json says none; 0: all */
  float rope_base;       /* default where the file says none */
  bool rope_local_plain; /* windowed layers: rope without scaling */
  bool rope_backward;    /* turned the other way */
  bool rope_by_type;     /* only where config.json's position_embedding_type says so */
  const char *rope_default; /* JSON: taken where config.json has no parameters of rope at all */
  float rope_base_local;    /* base of windowed layers; 0: the same */
  mr_scoring scoring;
  bool choose_raw;        /* chosen by the router's own numbers, not by the scores */
  bool renorm;            /* weights of the chosen experts are made to sum to one */
  bool route_input;       /* ... and scale the experts' input, not their output (llama4) */
  bool experts_columns;   /* fused experts are stored transposed, in directories */
  bool experts_alternate; /* ... gate and up by turns */
  bool mla;               /* latent attention (deepseek) */
  /* defaults of gemma2 where the file says none, and what the format has no key for */
  int window;
  float attn_softcap, final_softcap;
  int wide_scale_layers; /* the variant with this many layers scales q.k by sqrt(n_heads/d_model) */
  bool divides_logits;   /* the file's logit_scale divides */
  bool multiplies_logits; /* directories: logits_scaling multiplies */
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
  float layer_base[2];   /* config.json's list of bases: of global and of windowed layers; or 0 */
  mr_rope_scaling rope_scaling;
  float rope_factor; /* linear, yarn */
  int rope_original_context;
  float yarn_ext, yarn_beta_fast, yarn_beta_slow;
  float yarn_attn; /* times 1 + 0.1 ln(factor) */
  float alibi_max_bias;
  float embed_scale;                       /* factor on embeddings; 1: none */
  float residual_scale, logit_scale;       /* granite and others; 1: none */
  int n_experts, n_experts_used, d_expert; /* 0: dense */
  int d_shared;                            /* the expert that sees every token; 0: none */
  int n_group, topk_group; /* experts are chosen from the best groups; 0: from all */
  bool group_best;         /* a group is as good as its best expert; else the best two together */
  float route_scale;       /* on the chosen experts' weights */
  float shared_scale;      /* on the shared expert's */
  float route_jitter;      /* sparsemixer: experts further from the best are left out */
  int d_embed;             /* width of the embedding where it is projected (opt); 0: d_model */
  bool alibi_scaled;       /* ALiBi is scaled as q.k is (falcon) */
  float clip_qkv;          /* q, k and v are cut to +-clip; 0: not */
  int chunk;               /* windowed layers see their chunk of so many positions; 0: none */
  float temper_scale, temper_floor; /* llama4: q of layers without rope grows with position */
  bool temper_all;                  /* ... and of all layers, from one position later on */
  float act_alpha, act_limit;       /* swiglu_clamp */
  int q_lora, kv_lora, nope_dims;   /* MLA; q_lora 0: q is not low-rank */
  int v_dims;                       /* MLA: values of a head in the file */
  int rope_first;                   /* first rotated value of a head */
  bool rope_local_plain;            /* windowed layers: no scaling */
  bool yarn_exact;                  /* bounds are not rounded to whole pairs */
  bool rope_factors;                /* rope_short holds divisors of the frequencies */
  float rope_short[MR_MAX_ROPE];    /* [rope_dims/2]; longrope: up to the original context */
  float rope_long[MR_MAX_ROPE];     /* longrope: for prompts beyond it */
  bool gptq_v2;                     /* stored zeros are the true ones */
  int quant_block[2];               /* 8-bit checkpoints: rows and values of a scale; 0: unsaid */
  int tied;                         /* config.json: 1 the head is the embedding, 0 not, -1 unsaid */
  uint8_t windowed[MR_MAX_LAYERS];  /* 1: this layer sees only its window (or chunk) */
  uint8_t no_rope[MR_MAX_LAYERS];   /* 1: this layer has no rope */
} mr_config;

const mr_arch *mr_arch_find(const char *name); /* GGUF's name; NULL: unknown */
const mr_arch *mr_arch_find_hf(const char *model_type);
/* The nearest known name, for messages; NULL: none is near. */
const char *mr_arch_nearest(const char *name, bool hf);
/* What a configuration is before anything is read: the row and neutral values. */
void mr_config_init(mr_config *c, const mr_arch *a);
/* MR_E_DATA: missing, impossible or unsupported metadata; an unknown architecture too, with the
 * nearest known name. */
mr_code mr_config_from_gguf(mr_config *c, const mr_gguf *g, mr_err *err);
/* config.json of a directory, in the form of the hub's files or of transformers 5. */
mr_code mr_config_from_dir(mr_config *c, const char *dir, mr_err *err);

#endif
