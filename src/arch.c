#include <stdio.h>
#include <string.h>

#include "io/text.h"
#include "src/config.h"

/* The architectures that the flags describe wholly. What a row does not say is 0, false, RMS norm,
 * no rope, SILU. Adding one: docs/adding-a-model.md. Facts: the model cards and reference
 * implementations, and how converters store them (llama-like files have q and k in the order for
 * interleaved rope, the others for halves). */
/* clang-format off */
static const mr_arch archs[] = {
    {.name = "llama", .hf = "llama mistral mixtral ministral minicpm seed_oss cwm internlm3 "
           "iquestcoder",
     .rope = MR_ROPE_INTERLEAVED, .gated = true, .pre_norms = true,
     .window_pattern = 1, .rope_base = 1e4f, .renorm = true},
    {.name = "qwen2", .hf = "qwen2 qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text",
     .rope = MR_ROPE_NEOX, .gated = true, .qkv_bias = true, .pre_norms = true,
     .rope_base = 1e4f},
    {.name = "qwen3", .hf = "qwen3 qwen3_vl_text",
     .rope = MR_ROPE_NEOX, .gated = true, .qk_norm = true, .pre_norms = true,
     .rope_base = 1e6f},
    {.name = "gemma", .hf = "gemma", .hf_plus1 = true,
     .rope = MR_ROPE_NEOX, .act = MR_ACT_GELU_TANH, .gated = true,
     .pre_norms = true, .embed_scale = true, .rope_base = 1e4f},
    {.name = "gemma2", .hf = "gemma2", .hf_plus1 = true,
     .rope = MR_ROPE_NEOX, .act = MR_ACT_GELU_TANH, .gated = true,
     .pre_norms = true, .post_norms = true, .embed_scale = true, .window_pattern = 2,
     .window = 4096, .rope_base = 1e4f, .attn_softcap = 50, .final_softcap = 30,
     .wide_scale_layers = 46},
    {.name = "gemma3", .hf = "gemma3_text", .hf_plus1 = true,
     .rope = MR_ROPE_NEOX, .act = MR_ACT_GELU_TANH, .gated = true,
     .pre_norms = true, .post_norms = true, .qk_norm = true, .embed_scale = true,
     .window_pattern = 6, .rope_base = 1e6f, .rope_base_local = 1e4f, .wide_scale_layers = 62},
    {.name = "phi2", .hf = "phi", .partial = 0.5f,
     .norm = MR_NORM_LAYER, .norm_bias = true, .rope = MR_ROPE_NEOX,
     .act = MR_ACT_GELU_TANH, .qkv_bias = true, .out_bias = true, .mlp_bias = true,
     .pre_norms = true, .parallel = true, .fused_qkv = true, .rope_base = 1e4f},
    {.name = "phi3", .hf = "phi3", .partial = 1,
     .rope = MR_ROPE_NEOX, .gated = true, .pre_norms = true, .fused_qkv = true,
     .fused_gate_up = true, .window_pattern = 1, .rope_base = 1e4f},
    {.name = "falcon", .hf = "falcon",
     .norm = MR_NORM_LAYER, .norm_bias = true, .rope = MR_ROPE_NEOX,
     .act = MR_ACT_GELU, .pre_norms = true, .parallel = true, .fused_qkv = true,
     .rope_base = 1e4f},
    {.name = "gptneox", .hf = "gpt_neox", .hf_qkv = MR_QKV_GROUPED, .partial = 0.25f,
     .norm = MR_NORM_LAYER, .norm_bias = true, .rope = MR_ROPE_NEOX,
     .act = MR_ACT_GELU, .qkv_bias = true, .out_bias = true, .mlp_bias = true, .pre_norms = true,
     .parallel = true, .fused_qkv = true, .rope_base = 1e4f},
    {.name = "mpt", .hf = "mpt",
     .norm = MR_NORM_LAYER, .act = MR_ACT_GELU, .pre_norms = true,
     .fused_qkv = true, .alibi = true},
    {.name = "gpt2", .hf = "gpt2", .hf_columns = true,
     .norm = MR_NORM_LAYER, .norm_bias = true, .act = MR_ACT_GELU_TANH,
     .qkv_bias = true, .out_bias = true, .mlp_bias = true, .pre_norms = true, .fused_qkv = true,
     .learned_positions = true},
    {.name = "starcoder", .hf = "gpt_bigcode",
     .norm = MR_NORM_LAYER, .norm_bias = true, .act = MR_ACT_GELU_TANH,
     .qkv_bias = true, .out_bias = true, .mlp_bias = true, .pre_norms = true, .fused_qkv = true,
     .learned_positions = true},
    {.name = "starcoder2", .hf = "starcoder2",
     .norm = MR_NORM_LAYER, .norm_bias = true, .rope = MR_ROPE_NEOX,
     .act = MR_ACT_GELU_TANH, .qkv_bias = true, .out_bias = true, .mlp_bias = true,
     .pre_norms = true, .window_pattern = 1, .rope_base = 1e4f},
    {.name = "stablelm", .hf = "stablelm", .partial = 0.25f,
     .norm = MR_NORM_LAYER, .norm_bias = true, .rope = MR_ROPE_NEOX,
     .gated = true, .pre_norms = true, .rope_base = 1e4f},
    {.name = "olmo2", .hf = "olmo2",
     .rope = MR_ROPE_NEOX, .gated = true, .qk_norm = true, .qk_norm_full = true,
     .post_norms = true, .rope_base = 1e4f},
    {.name = "granite", .hf = "granite",
     .rope = MR_ROPE_INTERLEAVED, .gated = true, .pre_norms = true,
     .divides_logits = true, .rope_base = 1e4f},
    {.name = "command-r", .hf = "cohere", .hf_interleaved = true, .qk_norm_layer = true,
     .qk_norm_each = true,
     .norm = MR_NORM_LAYER, .rope = MR_ROPE_INTERLEAVED, .gated = true,
     .pre_norms = true, .parallel = true, .rope_base = 1e4f},
    {.name = "nemotron", .hf = "nemotron", .hf_plus1 = true, .partial = 0.5f,
     .norm = MR_NORM_LAYER, .norm_bias = true, .rope = MR_ROPE_NEOX,
     .act = MR_ACT_RELU2, .pre_norms = true, .rope_base = 1e4f},
    {.name = "arcee", .hf = "arcee",
     .rope = MR_ROPE_INTERLEAVED, .act = MR_ACT_RELU2, .pre_norms = true,
     .rope_base = 1e4f},
    {.name = "internlm2", .rope = MR_ROPE_INTERLEAVED, .gated = true, .pre_norms = true,
     .rope_base = 1e4f},
    {.name = "ministral3", .hf = "ministral3", .hf_only = true, .rope = MR_ROPE_NEOX,
     .gated = true, .pre_norms = true, .window_pattern = 1, .rope_base = 1e6f},
    {.name = "xverse", .rope = MR_ROPE_INTERLEAVED, .gated = true, .pre_norms = true,
     .rope_base = 1e4f},
    {.name = "ernie4_5", .hf = "ernie4_5", .hf_interleaved = true,
     .rope = MR_ROPE_INTERLEAVED, .gated = true, .pre_norms = true,
     .rope_base = 1e4f},
    {.name = "exaone", .hf = "exaone", .rope = MR_ROPE_NEOX, .gated = true, .pre_norms = true,
     .rope_base = 1e4f},
    /* mixtures of experts */
    {.name = "qwen2moe", .hf = "qwen2_moe", .rope = MR_ROPE_NEOX, .gated = true, .qkv_bias = true,
     .pre_norms = true, .rope_base = 1e4f},
    {.name = "qwen3moe", .hf = "qwen3_moe mellum", .rope = MR_ROPE_NEOX, .gated = true,
     .qk_norm = true,
     .pre_norms = true, .rope_base = 1e6f, .renorm = true},
    {.name = "olmoe", .hf = "olmoe", .rope = MR_ROPE_NEOX, .gated = true, .qk_norm = true,
     .qk_norm_full = true, .pre_norms = true, .rope_base = 1e4f},
    {.name = "granitemoe", .hf = "granitemoe granitemoeshared", .rope = MR_ROPE_INTERLEAVED,
     .gated = true, .pre_norms = true, .divides_logits = true, .rope_base = 1e4f, .renorm = true},
    {.name = "phimoe", .hf = "phimoe", .norm = MR_NORM_LAYER, .norm_bias = true,
     .rope = MR_ROPE_NEOX, .gated = true, .qkv_bias = true, .out_bias = true, .pre_norms = true,
     .window_pattern = 1, .rope_base = 1e4f, .scoring = MR_SCORE_SPARSEMIXER, .hf_only = true},
    {.name = "gpt-oss", .hf = "gpt_oss", .rope = MR_ROPE_NEOX, .act_fixed = true,
     .swiglu_clamp = true, .sinks = true, .gated = true, .qkv_bias = true, .out_bias = true,
     .pre_norms = true,
     .window_pattern = 2, .rope_base = 1.5e5f, .renorm = true, .experts_columns = true,
     .experts_alternate = true, .hf_only = true},
    {.name = "llama4", .hf = "llama4_text", .hf_only = true, .rope = MR_ROPE_INTERLEAVED,
     .hf_interleaved = true, .gated = true, .pre_norms = true, .qk_norm_late = true,
     .qk_norm_bare = true, .nope_interval = 4, .rope_base = 5e5f, .scoring = MR_SCORE_SIGMOID,
     .route_input = true, .experts_columns = true},
    {.name = "deepseek2", .hf = "deepseek_v2", .hf_only = true, .rope = MR_ROPE_INTERLEAVED,
     .hf_interleaved = true, .gated = true, .pre_norms = true, .rope_base = 1e4f, .mla = true},
    {.name = "deepseek3", .hf = "deepseek_v3 glm4_moe_lite sarvam_mla youtu", .hf_only = true,
     .rope = MR_ROPE_INTERLEAVED,
     .hf_interleaved = true, .gated = true, .pre_norms = true, .rope_base = 1e4f, .mla = true,
     .scoring = MR_SCORE_SIGMOID, .renorm = true},
    {.name = "minimax-m2", .hf = "minimax_m2", .hf_only = true, .partial = 1, .rope = MR_ROPE_NEOX,
     .gated = true, .qk_norm = true, .qk_norm_full = true, .pre_norms = true, .rope_base = 1e6f,
     .scoring = MR_SCORE_SIGMOID, .renorm = true},
    {.name = "glm4moe", .hf = "glm4_moe", .hf_only = true, .rope = MR_ROPE_NEOX, .gated = true,
     .qk_norm = true, .pre_norms = true, .partial = 0.5f, .rope_base = 1e4f,
     .scoring = MR_SCORE_SIGMOID, .renorm = true},
    {.name = "solar-open", .hf = "solar_open", .hf_only = true, .partial = 1, .rope = MR_ROPE_NEOX,
     .gated = true, .pre_norms = true, .rope_base = 1e6f, .scoring = MR_SCORE_SIGMOID,
     .renorm = true},
    {.name = "sarvam-moe", .hf = "sarvam_moe", .hf_only = true, .partial = 1, .rope = MR_ROPE_NEOX,
     .gated = true, .qk_norm = true, .pre_norms = true, .fused_qkv = true, .rope_base = 8e6f,
     .scoring = MR_SCORE_SIGMOID, .renorm = true},
    {.name = "hy-v3", .hf = "hy_v3", .hf_only = true, .rope = MR_ROPE_NEOX, .gated = true,
     .qk_norm = true, .pre_norms = true, .rope_base = 1e4f, .scoring = MR_SCORE_SIGMOID,
     .renorm = true},
    {.name = "exaone-moe", .hf = "exaone_moe", .hf_only = true, .rope = MR_ROPE_NEOX,
     .gated = true, .qk_norm = true, .pre_norms = true, .window_pattern = 4, .nope_global = true,
     .rope_base = 1e6f, .scoring = MR_SCORE_SIGMOID, .renorm = true},
    {.name = "flint", .hf = "flint", .hf_only = true, .rope = MR_ROPE_NEOX, .gated = true,
     .qk_norm = true, .pre_norms = true, .sinks = true, .window_pattern = 4, .nope_global = true,
     .rope_base = 1e4f, .scoring = MR_SCORE_SIGMOID, .renorm = true},
    {.name = "dots1", .hf = "dots1", .hf_only = true, .rope = MR_ROPE_NEOX, .gated = true,
     .qk_norm = true, .pre_norms = true, .rope_base = 1e4f, .scoring = MR_SCORE_SIGMOID,
     .renorm = true},
    {.name = "ernie4_5-moe", .hf = "ernie4_5_moe", .hf_only = true, .rope = MR_ROPE_INTERLEAVED,
     .hf_interleaved = true, .gated = true, .pre_norms = true, .rope_base = 5e5f, .renorm = true},
    {.name = "hunyuan-moe", .hf = "hunyuan_v1_moe", .hf_only = true, .rope = MR_ROPE_NEOX,
     .gated = true, .qk_norm = true, .qk_norm_late = true, .pre_norms = true, .rope_base = 1e4f,
     .renorm = true},
    {.name = "dbrx", .hf = "dbrx", .hf_only = true, .norm = MR_NORM_LAYER, .rope = MR_ROPE_NEOX,
     .gated = true, .pre_norms = true, .fused_qkv = true, .rope_base = 1e4f},
    {.name = "aria", .hf = "aria_text", .hf_only = true, .rope = MR_ROPE_NEOX, .gated = true,
     .pre_norms = true, .rope_base = 1e4f, .renorm = true, .experts_columns = true},
    {.name = "cohere2moe", .hf = "cohere2_moe", .hf_only = true, .norm = MR_NORM_LAYER,
     .rope = MR_ROPE_INTERLEAVED, .hf_interleaved = true, .gated = true, .pre_norms = true,
     .parallel = true, .window_pattern = 4, .nope_global = true, .rope_base = 1e4f,
     .renorm = true},
    {.name = "kolibri", .hf = "kolibri1", .hf_only = true, .rope = MR_ROPE_NEOX, .gated = true,
     .qk_norm = true, .pre_norms = true, .post_norms = true, .window_pattern = 5,
     .nope_global = true, .rope_base = 1e4f, .scoring = MR_SCORE_SIGMOID, .choose_raw = true,
     .renorm = true},
    {.name = "granite-swa", .hf = "granite_swa granitemoe_swa", .hf_only = true,
     .rope = MR_ROPE_NEOX, .gated = true, .pre_norms = true, .sinks = true, .window_pattern = 4,
     .window_last = true, .divides_logits = true, .rope_base = 1e4f, .renorm = true},
    {.name = "granitehybrid", .hf = "granitemoehybrid", .hf_only = true, .rope = MR_ROPE_NEOX,
     .gated = true, .pre_norms = true, .rope_by_type = true, .divides_logits = true,
     .rope_base = 1e4f, .renorm = true},
    /* directories only */
    {.name = "apertus", .hf = "apertus apertus1p5_text", .hf_only = true, .rope = MR_ROPE_NEOX,
     .xielu = true,
     .act_fixed = true, .qk_norm = true, .pre_norms = true, .rope_base = 1.2e7f,
     .rope_default = "{\"rope_type\": \"llama3\", \"rope_theta\": 12000000, \"factor\": 8,"
                     " \"original_max_position_embeddings\": 8192}"},
    {.name = "bitnet", .hf = "bitnet", .hf_only = true, .rope = MR_ROPE_NEOX, .act = MR_ACT_RELU2,
     .gated = true, .pre_norms = true, .sub_norms = true, .rope_base = 5e5f},
    {.name = "bloom", .hf = "bloom", .hf_only = true, .norm = MR_NORM_LAYER, .norm_bias = true,
     .act = MR_ACT_GELU_TANH, .qkv_bias = true, .out_bias = true, .mlp_bias = true,
     .pre_norms = true, .embed_norm = true, .fused_qkv = true, .hf_qkv = MR_QKV_GROUPED,
     .alibi = true},
    {.name = "codegen", .hf = "codegen", .hf_only = true, .norm = MR_NORM_LAYER,
     .norm_bias = true, .rope = MR_ROPE_INTERLEAVED, .hf_interleaved = true,
     .act = MR_ACT_GELU_TANH, .mlp_bias = true, .pre_norms = true, .parallel = true,
     .fused_qkv = true, .hf_qkv = MR_QKV_PARTS, .rope_base = 1e4f},
    {.name = "gptj", .hf = "gptj", .hf_only = true, .norm = MR_NORM_LAYER, .norm_bias = true,
     .rope = MR_ROPE_INTERLEAVED, .hf_interleaved = true, .act = MR_ACT_GELU_TANH,
     .mlp_bias = true, .pre_norms = true, .parallel = true, .rope_base = 1e4f},
    {.name = "gptneo", .hf = "gpt_neo", .hf_only = true, .norm = MR_NORM_LAYER, .norm_bias = true,
     .act = MR_ACT_GELU_TANH, .out_bias = true, .mlp_bias = true, .pre_norms = true,
     .learned_positions = true, .attn_unscaled = true, .window_pattern = 2},
    {.name = "opt", .hf = "opt", .hf_only = true, .norm = MR_NORM_LAYER, .norm_bias = true,
     .act = MR_ACT_RELU, .qkv_bias = true, .out_bias = true, .mlp_bias = true, .pre_norms = true,
     .learned_positions = true, .position_offset = 2},
    {.name = "cohere2", .hf = "cohere2", .hf_only = true, .norm = MR_NORM_LAYER,
     .rope = MR_ROPE_INTERLEAVED, .hf_interleaved = true, .gated = true, .pre_norms = true,
     .parallel = true, .window_pattern = 4, .nope_global = true, .rope_base = 1e4f},
    {.name = "exaone4", .hf = "exaone4", .hf_only = true, .rope = MR_ROPE_NEOX, .gated = true,
     .qk_norm = true, .post_norms = true, .window_pattern = 4, .nope_global = true,
     .rope_base = 1e6f},
    {.name = "glm", .hf = "glm", .hf_only = true, .rope = MR_ROPE_INTERLEAVED,
     .hf_interleaved = true, .gated = true, .qkv_bias = true, .pre_norms = true,
     .fused_gate_up = true, .partial = 0.5f, .rope_base = 1e4f},
    {.name = "glm4", .hf = "glm4", .hf_only = true, .rope = MR_ROPE_INTERLEAVED,
     .hf_interleaved = true, .gated = true, .qkv_bias = true, .pre_norms = true,
     .post_norms = true, .fused_gate_up = true, .partial = 0.5f, .rope_base = 1e4f},
    {.name = "hunyuan-dense", .hf = "hunyuan_v1_dense", .hf_only = true, .rope = MR_ROPE_NEOX,
     .gated = true, .qk_norm = true, .qk_norm_late = true, .pre_norms = true, .rope_base = 1e4f},
    {.name = "jais2", .hf = "jais2", .hf_only = true, .norm = MR_NORM_LAYER, .norm_bias = true,
     .rope = MR_ROPE_NEOX, .act = MR_ACT_RELU2, .pre_norms = true, .rope_base = 1e4f},
    {.name = "persimmon", .hf = "persimmon", .hf_only = true, .norm = MR_NORM_LAYER,
     .norm_bias = true, .rope = MR_ROPE_NEOX, .act = MR_ACT_RELU2, .qk_norm = true,
     .qk_norm_layer = true, .pre_norms = true, .fused_qkv = true, .hf_qkv = MR_QKV_GROUPED,
     .partial = 0.5f, .rope_base = 25000},
    {.name = "hyperclovax", .hf = "hyperclovax", .hf_only = true, .multiplies_logits = true,
     .rope = MR_ROPE_NEOX,
     .gated = true, .pre_norms = true, .rope_base = 1e4f},
    {.name = "minicpm3", .hf = "minicpm3", .hf_only = true, .rope = MR_ROPE_NEOX, .gated = true,
     .pre_norms = true, .rope_base = 1e4f, .mla = true},
    {.name = "olmo", .hf = "olmo", .hf_only = true, .norm = MR_NORM_LAYER, .norm_bare = true,
     .rope = MR_ROPE_NEOX, .gated = true, .pre_norms = true, .rope_base = 1e4f},
    {.name = "smollm3", .hf = "smollm3", .hf_only = true, .rope = MR_ROPE_NEOX, .gated = true,
     .pre_norms = true, .nope_interval = 4, .rope_base = 2e6f},
    {.name = "olmo3", .hf = "olmo3", .hf_only = true, .rope = MR_ROPE_NEOX, .gated = true,
     .qk_norm = true, .qk_norm_full = true, .post_norms = true, .window_pattern = 4,
     .rope_local_plain = true, .rope_base = 1e4f},
    {.name = "flexolmo", .hf = "flex_olmo", .hf_only = true, .rope = MR_ROPE_NEOX, .gated = true,
     .qk_norm = true, .qk_norm_full = true, .post_norms = true, .rope_base = 5e5f},
    {.name = "biogpt", .hf = "biogpt", .hf_only = true, .norm = MR_NORM_LAYER, .norm_bias = true,
     .act = MR_ACT_GELU, .qkv_bias = true, .out_bias = true, .mlp_bias = true, .pre_norms = true,
     .learned_positions = true, .position_offset = 2, .embed_scale = true},
    {.name = "openai-gpt", .hf = "openai-gpt", .hf_only = true, .norm = MR_NORM_LAYER,
     .norm_bias = true, .act = MR_ACT_GELU_TANH, .act_fixed = true, .qkv_bias = true,
     .out_bias = true, .mlp_bias = true, .norm_after = true, .fused_qkv = true,
     .hf_columns = true, .learned_positions = true},
    {.name = "helium", .hf = "helium", .hf_only = true, .rope = MR_ROPE_INTERLEAVED,
     .hf_interleaved = true, .gated = true, .pre_norms = true, .rope_base = 1e5f},
    {.name = "nanochat", .hf = "nanochat", .hf_only = true, .norm_bare = true, .embed_norm = true,
     .rope = MR_ROPE_NEOX, .rope_backward = true, .act = MR_ACT_RELU2, .qk_norm_late = true,
     .qk_norm_bare = true, .pre_norms = true, .rope_base = 1e4f},
    {.name = "gptneox-japanese", .hf = "gpt_neox_japanese", .hf_only = true,
     .hf_qkv = MR_QKV_GROUPED, .partial = 1, .norm = MR_NORM_LAYER, .norm_bias = true,
     .rope = MR_ROPE_NEOX, .act = MR_ACT_GELU, .pre_norms = true, .fused_qkv = true,
     .rope_base = 1e4f},
    {.name = "xglm", .hf = "xglm", .hf_only = true, .norm = MR_NORM_LAYER, .norm_bias = true,
     .act = MR_ACT_GELU, .qkv_bias = true, .out_bias = true, .mlp_bias = true, .pre_norms = true,
     .sinusoids = MR_SINUSOIDS_ENDS, .position_offset = 2, .embed_scale = true},
    {.name = "ctrl", .hf = "ctrl", .hf_only = true, .norm = MR_NORM_LAYER, .norm_bias = true,
     .act = MR_ACT_RELU, .act_fixed = true, .qkv_bias = true, .out_bias = true, .mlp_bias = true,
     .pre_norms = true, .sinusoids = MR_SINUSOIDS, .embed_scale = true},
    {.name = "vaultgemma", .hf = "vaultgemma", .hf_only = true, .hf_plus1 = true,
     .rope = MR_ROPE_NEOX, .act = MR_ACT_GELU_TANH, .gated = true, .pre_norms = true,
     .embed_scale = true, .window_pattern = 2, .rope_base = 1e4f},
};
/* clang-format on */

#define N_ARCHS (sizeof archs / sizeof *archs)

const mr_arch *mr_arch_find(const char *name) {
  for (size_t i = 0; i < N_ARCHS; i++)
    if (!archs[i].hf_only && strcmp(archs[i].name, name) == 0)
      return &archs[i];
  return NULL;
}

/* Whether one of the words of `words` is `name`. */
static bool has_word(const char *words, const char *name) {
  size_t n = strlen(name);
  for (const char *at = words; at; at = strchr(at, ' ')) {
    at += *at == ' ';
    if (n && strncmp(at, name, n) == 0 && (at[n] == ' ' || at[n] == 0))
      return true;
  }
  return false;
}

const mr_arch *mr_arch_find_hf(const char *model_type) {
  for (size_t i = 0; i < N_ARCHS; i++)
    if (has_word(archs[i].hf, model_type))
      return &archs[i];
  return NULL;
}

/* The names of directories are written out one by one; the nearest is then a word of the table. */
static const char *nearest_hf(const char *name) {
  char words[3 * N_ARCHS][32];
  const char *names[3 * N_ARCHS];
  size_t n = 0;
  for (size_t i = 0; i < N_ARCHS; i++)
    for (const char *at = archs[i].hf; at && *at && n < 3 * N_ARCHS;) {
      size_t len = strcspn(at, " ");
      snprintf(words[n], sizeof words[n], "%.*s", (int)len, at);
      names[n] = words[n];
      n++;
      at += len + (at[len] == ' ');
    }
  const char *near = mr_nearest(name, names, n);
  const mr_arch *a = near ? mr_arch_find_hf(near) : NULL;
  if (!a || !strchr(a->hf, ' '))
    return a ? a->hf : NULL;
  return a->name;
}

const char *mr_arch_nearest(const char *name, bool hf) {
  const char *names[N_ARCHS];
  size_t n = 0;
  if (hf)
    return nearest_hf(name);
  for (size_t i = 0; i < N_ARCHS; i++)
    if (!archs[i].hf_only)
      names[n++] = archs[i].name;
  return mr_nearest(name, names, n);
}

void mr_config_init(mr_config *c, const mr_arch *a) {
  memset(c, 0, sizeof *c);
  c->arch = *a;
  c->window = a->window;
  c->attn_softcap = a->attn_softcap;
  c->final_softcap = a->final_softcap;
  c->rope_base = a->rope_base;
  c->rope_base_local = a->rope_base_local;
  c->rope_factor = 1;
  c->yarn_ext = 1;
  c->yarn_attn = 1;
  c->yarn_beta_fast = 32;
  c->yarn_beta_slow = 1;
  c->alibi_max_bias = 8;
  c->embed_scale = 1;
  c->residual_scale = 1;
  c->logit_scale = 1;
  c->route_scale = 1;
  c->shared_scale = 1;
  c->tied = -1;
}
