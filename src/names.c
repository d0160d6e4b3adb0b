#include "src/names.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

static const struct {
  const char *base, *blocks;
} places[] = {{"model.", "layers."},
              {"transformer.", "h."},
              {"gpt_neox.", "layers."},
              {"gpt_neox_japanese.", "layers."},
              {"biogpt.", "layers."},
              {"transformer.", "blocks."},
              {"model.decoder.", "layers."},
              {"model.language_model.", "layers."},
              {"language_model.model.", "layers."},
              {"decoder.", "layers."},
              {"", "layers."},
              {"", "h."}};

/* Where two architectures call different things alike, the order decides: norms are looked for
 * under their most particular names first. */
static const struct {
  const char *stem, *names;
} map[] = {
    /* of the model */
    {"token_embd", "embed_tokens wte word_embeddings embed_in tokens_embed w"},
    {"token_embd_norm", "word_embeddings_layernorm"},
    {"position_embd", "wpe embed_positions positions_embed"},
    {"project_in", "project_in"},
    {"project_out", "project_out"},
    {"output_norm", "norm ln_f final_layer_norm norm_f final_layernorm layer_norm "
                    "layernorm"},
    {"output", "lm_head embed_out output_projection"},
    /* norms */
    {"attn_norm", "input_layernorm ln_1 norm_1 attention_layernorm self_attn_layer_norm ln_attn "
                  "norm_attn_norm.norm_1 layernorm1"},
    {"ffn_norm", "pre_feedforward_layernorm post_attention_layernorm ln_2 norm_2 "
                 "feedforward_layernorm final_layer_norm ln_mlp norm_attn_norm.norm_2 layernorm2"},
    {"post_attention_norm", "post_self_attn_layernorm post_norm1 post_attn_norm "
                            "post_attention_layernorm"},
    {"post_ffw_norm", "post_mlp_layernorm post_feedforward_layernorm post_norm2 "
                      "post_ffn_norm"},
    /* attention */
    {"attn_q", "self_attn.q_proj attn.q_proj attn.attention.q_proj multi_head_attention.Wq"},
    {"attn_k", "self_attn.k_proj attn.k_proj attn.attention.k_proj multi_head_attention.Wk"},
    {"attn_v", "self_attn.v_proj attn.v_proj attn.attention.v_proj multi_head_attention.Wv"},
    {"attn_qkv", "self_attn.qkv_proj attn.c_attn self_attention.query_key_value "
                 "attention.query_key_value attn.qkv_proj attn.Wqkv self_attn.query_key_value "
                 "norm_attn_norm.attn.Wqkv"},
    {"attn_output", "self_attn.o_proj self_attn.out_proj attn.c_proj attn.out_proj "
                    "attn.attention.out_proj self_attention.dense attention.dense self_attn.dense "
                    "norm_attn_norm.attn.out_proj multi_head_attention.dense"},
    {"attn_q_norm", "self_attn.q_norm self_attn.query_layernorm self_attn.q_layernorm "
                    "attention.query_layernorm"},
    {"attn_k_norm", "self_attn.k_norm self_attn.key_layernorm self_attn.k_layernorm "
                    "attention.key_layernorm"},
    {"attn_q_norm_head", "self_attn.q_layernorm.norms.%d"},
    {"attn_k_norm_head", "self_attn.k_layernorm.norms.%d"},
    {"attn_sub_norm", "self_attn.attn_sub_norm"},
    {"attn_sinks", "self_attn.sinks self_attn.softmax_offset"},
    {"attn_q_a", "self_attn.q_a_proj"},
    {"attn_q_a_norm", "self_attn.q_a_layernorm"},
    {"attn_q_b", "self_attn.q_b_proj"},
    {"attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"},
    {"attn_kv_a_norm", "self_attn.kv_a_layernorm"},
    {"attn_kv_b", "self_attn.kv_b_proj"},
    /* MLP */
    {"ffn_gate", "mlp.gate_proj feed_forward.gate_proj mlp.c_fc_0"},
    {"ffn_up",
     "mlp.up_proj mlp.gate_up_proj mlp.c_fc mlp.fc_in mlp.dense_h_to_4h ffn.up_proj mlp.c_fc_1 fc1 "
     "mlp.fc1 feed_forward.up_proj ffn.0"},
    {"ffn_down", "mlp.down_proj mlp.c_proj mlp.fc_out mlp.dense_4h_to_h ffn.down_proj fc2 mlp.fc2 "
                 "feed_forward.down_proj ffn.2"},
    {"ffn_sub_norm", "mlp.ffn_sub_norm"},
    {"xielu", "mlp.act_fn"},
    /* experts */
    {"ffn_gate_inp", "mlp.gate block_sparse_moe.gate block_sparse_moe.router.layer mlp.router "
                     "feed_forward.router mlp.gate.wg mlp.router.gate ffn.router.layer "
                     "block_sparse_moe.router"},
    {"exp_probs_b", "mlp.gate.e_score_correction block_sparse_moe.e_score_correction "
                    "mlp.moe_statics.e_score_correction mlp.e_score_correction "
                    "mlp.gate.expert mlp.expert moe.router.expert"},
    {"ffn_gate_exp", "mlp.experts.%d.gate_proj block_sparse_moe.experts.%d.w1 "
                     "feed_forward.experts.%d.gate_proj"},
    {"ffn_up_exp", "mlp.experts.%d.up_proj block_sparse_moe.experts.%d.w3 "
                   "feed_forward.experts.%d.up_proj"},
    {"ffn_down_exp", "mlp.experts.%d.down_proj block_sparse_moe.experts.%d.w2 "
                     "feed_forward.experts.%d.down_proj"},
    {"ffn_gate_rows", "ffn.experts.mlp.w1"},
    {"ffn_up_rows", "ffn.experts.mlp.v1"},
    {"ffn_down_rows", "ffn.experts.mlp.w2"},
    {"ffn_gate_up_exps", "mlp.experts.gate_up_proj feed_forward.experts.gate_up_proj "
                         "block_sparse_moe.input_linear mlp.experts.fc1 "
                         "block_sparse_moe.experts.gate_up_proj"},
    {"ffn_down_exps", "mlp.experts.down_proj feed_forward.experts.down_proj "
                      "block_sparse_moe.output_linear mlp.experts.fc2 "
                      "block_sparse_moe.experts.down_proj"},
    {"ffn_gate_inp_shexp", "mlp.shared_expert_gate"},
    {"ffn_gate_shexp", "mlp.shared_experts.gate_proj mlp.shared_expert.gate_proj "
                       "feed_forward.shared_expert.gate_proj mlp.shared_mlp.gate_proj"},
    {"ffn_up_shexp", "mlp.shared_experts.up_proj mlp.shared_expert.up_proj "
                     "feed_forward.shared_expert.up_proj mlp.shared_mlp.up_proj "
                     "shared_mlp.input_linear"},
    {"ffn_down_shexp", "mlp.shared_experts.down_proj mlp.shared_expert.down_proj "
                       "feed_forward.shared_expert.down_proj mlp.shared_mlp.down_proj "
                       "shared_mlp.output_linear"},
};

static bool begins(mr_str s, const char *a, const char *b) {
  size_t n = strlen(a), m = strlen(b);
  return s.len >= n + m && memcmp(s.s, a, n) == 0 && memcmp(s.s + n, b, m) == 0;
}

void mr_names_open(mr_names *n, const mr_weights *w) {
  *n = (mr_names){.w = w, .base = "", .blocks = w->st ? "layers." : "blk."};
  for (size_t i = 0; w->st && i < sizeof places / sizeof *places; i++)
    for (size_t j = 0; j < mr_weights_n(w); j++)
      if (begins(mr_weights_at(w, j)->name, places[i].base, places[i].blocks)) {
        n->base = places[i].base;
        n->blocks = places[i].blocks;
        return;
      }
}

/* One of the names of a list, written out in full. */
static const mr_gguf_tensor *try_name(const mr_names *n, int layer, const char *at, size_t len,
                                      const char *ext, int item, char name[MR_NAME]) {
  char own[80], digits[16] = "";
  const char *d = memchr(at, '%', len);
  size_t head = d ? (size_t)(d - at) : len, tail = d ? len - head - 2 : 0;
  if (d)
    snprintf(digits, sizeof digits, "%d", item);
  snprintf(own, sizeof own, "%.*s%s%.*s%s", (int)head, at, digits, (int)tail, d ? d + 2 : "", ext);
  if (layer >= 0)
    snprintf(name, MR_NAME, "%s%s%d.%s", n->base, n->blocks, layer, own);
  else
    snprintf(name, MR_NAME, "%s%s", n->base, own);
  const mr_gguf_tensor *t = mr_weights_find(n->w, name);
  if (t || layer >= 0)
    return t;
  /* the head stands outside: beside "model." in "language_model.model.", or beside all of it */
  const char *last = n->base + strlen(n->base);
  for (int dots = 0; last > n->base && (dots += last[-1] == '.') < 2;)
    last--;
  snprintf(name, MR_NAME, "%.*s%s", (int)(last - n->base), n->base, own);
  t = mr_weights_find(n->w, name);
  if (t || last == n->base)
    return t;
  snprintf(name, MR_NAME, "%s", own);
  return mr_weights_find(n->w, name);
}

/* The list of a stem's names. */
static const char *names_of(const mr_names *n, const char *stem) {
  for (size_t i = 0; n->w->st && i < sizeof map / sizeof *map; i++)
    if (strcmp(map[i].stem, stem) == 0)
      return map[i].names;
  return stem;
}

const mr_gguf_tensor *mr_names_find(const mr_names *n, int layer, const char *stem, const char *ext,
                                    int item, char name[MR_NAME]) {
  const char *names = names_of(n, stem);
  for (const char *at = names; *at;) {
    size_t len = strcspn(at, " ");
    const mr_gguf_tensor *t = try_name(n, layer, at, len, ext, item, name);
    if (t)
      return t;
    at += len + (at[len] == ' ');
  }
  try_name(n, layer, names, strcspn(names, " "), ext, item, name);
  return NULL;
}

void mr_names_beside(const mr_names *n, int layer, const char *stem, const char *ext, int item,
                     mr_str like, char name[MR_NAME]) {
  const char *names = names_of(n, stem), *best = names;
  mr_str rest = {0};
  mr_names_layer(n, like, &rest);
  for (const char *at = names; *at;) {
    size_t part = strcspn(at, ".") + 1, len = strcspn(at, " ");
    if (rest.len > part && memcmp(rest.s + 1, at, part) == 0) { /* rest begins with a dot */
      best = at;
      break;
    }
    at += len + (at[len] == ' ');
  }
  try_name(n, layer, best, strcspn(best, " "), ext, item, name);
}

/* A number at *at, which is moved behind it; -1: none. */
static int number(const char **at) {
  int n = 0;
  const char *p = *at;
  for (; *p >= '0' && *p <= '9' && n < INT_MAX / 10 - 1; p++)
    n = n * 10 + (*p - '0');
  if (p == *at)
    return -1;
  *at = p;
  return n;
}

/* Whether `s` is the pattern of `len` bytes; "%d" takes a number. */
static bool is_name(const char *s, const char *pattern, size_t len, int *item) {
  const char *end = pattern + len;
  while (pattern < end && *s) {
    if (*pattern == '%') {
      if ((*item = number(&s)) < 0)
        return false;
      pattern += 2;
    } else if (*pattern++ != *s++) {
      return false;
    }
  }
  return pattern == end && !*s;
}

static const char *stem_of(const char *rest, bool layered, int *item) {
  for (size_t i = 0; i < sizeof map / sizeof *map; i++) {
    bool of_model = !strcmp(map[i].stem, "token_embd") || !strcmp(map[i].stem, "output");
    for (const char *at = map[i].names; *at && of_model != layered;) {
      size_t len = strcspn(at, " ");
      if (is_name(rest, at, len, item))
        return map[i].stem;
      at += len + (at[len] == ' ');
    }
  }
  return NULL;
}

const char *mr_names_module(const char *module, int *layer, int *item) {
  *item = 0;
  for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
    size_t base = strlen(places[i].base), blocks = strlen(places[i].blocks);
    if (strncmp(module, places[i].base, base) != 0)
      continue;
    const char *at = module + base, *stem = NULL;
    *layer = -1;
    if (strncmp(at, places[i].blocks, blocks) == 0) {
      at += blocks;
      *layer = number(&at);
      if (*layer >= 0 && *at == '.')
        stem = stem_of(at + 1, true, item);
    } else {
      stem = stem_of(at, false, item);
    }
    if (stem)
      return stem;
  }
  return NULL;
}

int mr_names_layer(const mr_names *n, mr_str name, mr_str *rest) {
  size_t i = strlen(n->base) + strlen(n->blocks), from = i;
  int layer = 0;
  if (!begins(name, n->base, n->blocks))
    return -1;
  for (; i < name.len && name.s[i] >= '0' && name.s[i] <= '9' && layer < INT_MAX / 10 - 1; i++)
    layer = layer * 10 + (name.s[i] - '0');
  *rest = (mr_str){name.s + i, name.len - i};
  return i > from && i < name.len && name.s[i] == '.' ? layer : -1;
}
