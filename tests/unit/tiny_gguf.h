/* tiny_gguf.h: writes a small llama model with random weights, for tests of the engine that need no
 * data.
 *
 *     tiny_gguf_write(path, nan_id);
 *
 * Ids 0..255 are the bytes, TINY_EOS is a control token that ends a text, those above are "Wa",
 * "Wb", ... The template writes "role:content\n" for each message and "A:" for the answer. The
 * embedding of nan_id (-1: none) is NaN: whoever meets that token has logits that are not finite.
 */
#ifndef MR_TESTS_TINY_GGUF_H
#define MR_TESTS_TINY_GGUF_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#ifndef TINY_GGUF_LAYERS
#define TINY_GGUF_LAYERS 2
#endif
#ifndef TINY_GGUF_CONTEXT
#define TINY_GGUF_CONTEXT 256
#endif

enum {
  TINY_EOS = 256,
  TINY_VOCAB = 300,
  TINY_DIM = 64,
  TINY_FF = 96,
  TINY_LAYERS = TINY_GGUF_LAYERS,
  TINY_HEADS = 4,
  TINY_KV_HEADS = 2,
  TINY_HEAD = 16,
  TINY_CONTEXT = TINY_GGUF_CONTEXT
};

typedef struct tiny_tensor {
  char name[64];
  int rows, cols; /* rows 0: a vector */
  float scale;    /* 0: ones */
} tiny_tensor;

static void tiny_u32(FILE *f, uint32_t v) {
  fwrite(&v, 4, 1, f);
}

static void tiny_u64(FILE *f, uint64_t v) {
  fwrite(&v, 8, 1, f);
}

static void tiny_str(FILE *f, const char *s) {
  tiny_u64(f, strlen(s));
  fwrite(s, 1, strlen(s), f);
}

static void tiny_kv_u32(FILE *f, const char *key, uint32_t v) {
  tiny_str(f, key);
  tiny_u32(f, 4);
  tiny_u32(f, v);
}

static void tiny_kv_f32(FILE *f, const char *key, float v) {
  tiny_str(f, key);
  tiny_u32(f, 6);
  fwrite(&v, 4, 1, f);
}

static void tiny_kv_str(FILE *f, const char *key, const char *v) {
  tiny_str(f, key);
  tiny_u32(f, 8);
  tiny_str(f, v);
}

static void tiny_kv_array(FILE *f, const char *key, uint32_t type, uint64_t n) {
  tiny_str(f, key);
  tiny_u32(f, 9);
  tiny_u32(f, type);
  tiny_u64(f, n);
}

/* The character that stands for a byte in GPT-2's vocabularies, as UTF-8. */
static void tiny_byte_token(int byte, char out[8]) {
  int code = byte, other = 0;
  for (int b = 0; b <= byte; b++) {
    int printable = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
    code = printable ? b : 256 + other++;
  }
  if (code < 128)
    snprintf(out, 8, "%c", code);
  else
    snprintf(out, 8, "%c%c", 0xC0 | code >> 6, 0x80 | (code & 63));
}

static void tiny_tokens(FILE *f) {
  char s[8];
  tiny_kv_array(f, "tokenizer.ggml.tokens", 8, TINY_VOCAB);
  for (int i = 0; i < TINY_VOCAB; i++) {
    if (i < 256)
      tiny_byte_token(i, s);
    else if (i == TINY_EOS)
      snprintf(s, sizeof s, "<eos>");
    else
      snprintf(s, sizeof s, "W%c", 'A' + i - 257);
    tiny_str(f, s);
  }
  tiny_kv_array(f, "tokenizer.ggml.token_type", 5, TINY_VOCAB);
  for (int i = 0; i < TINY_VOCAB; i++)
    tiny_u32(f, i == TINY_EOS ? 3 : 1);
  tiny_kv_array(f, "tokenizer.ggml.merges", 8, 1);
  tiny_str(f, "W A");
}

static uint32_t tiny_window; /* of attention in all layers; 0: none */
static bool tiny_mixed;      /* gemma2 in place of llama: a window in every other layer */

static void tiny_u32_of_arch(FILE *f, const char *key, uint32_t v) {
  char name[64];
  snprintf(name, sizeof name, "%s.%s", tiny_mixed ? "gemma2" : "llama", key);
  tiny_kv_u32(f, name, v);
}

static void tiny_f32_of_arch(FILE *f, const char *key, float v) {
  char name[64];
  snprintf(name, sizeof name, "%s.%s", tiny_mixed ? "gemma2" : "llama", key);
  tiny_kv_f32(f, name, v);
}

static void tiny_metadata(FILE *f) {
  tiny_kv_str(f, "general.architecture", tiny_mixed ? "gemma2" : "llama");
  tiny_kv_str(f, "general.name", "tiny");
  tiny_u32_of_arch(f, "context_length", TINY_CONTEXT);
  tiny_u32_of_arch(f, "embedding_length", TINY_DIM);
  tiny_u32_of_arch(f, "block_count", TINY_LAYERS);
  tiny_u32_of_arch(f, "feed_forward_length", TINY_FF);
  tiny_u32_of_arch(f, "attention.head_count", TINY_HEADS);
  tiny_u32_of_arch(f, "attention.head_count_kv", TINY_KV_HEADS);
  tiny_u32_of_arch(f, "rope.dimension_count", TINY_HEAD);
  tiny_u32_of_arch(f, "attention.sliding_window", tiny_window);
  tiny_f32_of_arch(f, "rope.freq_base", 10000);
  tiny_f32_of_arch(f, "attention.layer_norm_rms_epsilon", 1e-5f);
  tiny_kv_str(f, "tokenizer.ggml.model", "gpt2");
  tiny_kv_str(f, "tokenizer.ggml.pre", "gpt-2");
  tiny_kv_u32(f, "tokenizer.ggml.eos_token_id", TINY_EOS);
  tiny_kv_str(f, "tokenizer.chat_template",
              "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
              "{% if add_generation_prompt %}A:{% endif %}");
  tiny_tokens(f);
}
enum { TINY_KV = 19 };

static int tiny_list(tiny_tensor *t) {
  static const struct {
    const char *name;
    int rows, cols;
  } layer[] = {{"attn_norm", 0, TINY_DIM},
               {"attn_q", TINY_HEADS * TINY_HEAD, TINY_DIM},
               {"attn_k", TINY_KV_HEADS * TINY_HEAD, TINY_DIM},
               {"attn_v", TINY_KV_HEADS * TINY_HEAD, TINY_DIM},
               {"attn_output", TINY_DIM, TINY_HEADS * TINY_HEAD},
               {"ffn_norm", 0, TINY_DIM},
               {"ffn_gate", TINY_FF, TINY_DIM},
               {"ffn_up", TINY_FF, TINY_DIM},
               {"ffn_down", TINY_DIM, TINY_FF},
               {"post_attention_norm", 0, TINY_DIM},
               {"post_ffw_norm", 0, TINY_DIM}};
  size_t per_layer = sizeof layer / sizeof *layer - (tiny_mixed ? 0 : 2);
  int n = 0;
  t[n++] = (tiny_tensor){"token_embd.weight", TINY_VOCAB, TINY_DIM, 1};
  t[n++] = (tiny_tensor){"output.weight", TINY_VOCAB, TINY_DIM, 0.4f};
  t[n++] = (tiny_tensor){"output_norm.weight", 0, TINY_DIM, 0};
  for (int l = 0; l < TINY_LAYERS; l++) {
    for (size_t i = 0; i < per_layer; i++) {
      t[n] = (tiny_tensor){"", layer[i].rows, layer[i].cols, 0};
      if (layer[i].rows)
        t[n].scale = 1.5f / sqrtf((float)layer[i].cols);
      snprintf(t[n].name, sizeof t[n].name, "blk.%d.%s.weight", l, layer[i].name);
      n++;
    }
  }
  return n;
}

static uint64_t tiny_floats(const tiny_tensor *t) {
  return (uint64_t)(t->rows ? t->rows : 1) * (uint64_t)t->cols;
}

/* Roughly normal, reproducible. */
static float tiny_random(uint64_t *state) {
  float sum = 0;
  for (int i = 0; i < 4; i++) {
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    sum += (float)(*state >> 40) / 16777216.0f - 0.5f;
  }
  return sum * 1.73f;
}

/* Returns 0 on failure. */
static int tiny_gguf_write(const char *path, int nan_id) {
  tiny_tensor t[3 + 11 * TINY_LAYERS];
  int n = tiny_list(t);
  uint64_t at = 0, state = 20251129;
  FILE *f = fopen(path, "wb");
  if (!f)
    return 0;
  fwrite("GGUF", 1, 4, f);
  tiny_u32(f, 3);
  tiny_u64(f, (uint64_t)n);
  tiny_u64(f, TINY_KV);
  tiny_metadata(f);
  for (int i = 0; i < n; i++) {
    tiny_str(f, t[i].name);
    tiny_u32(f, t[i].rows ? 2 : 1);
    tiny_u64(f, (uint64_t)t[i].cols);
    if (t[i].rows)
      tiny_u64(f, (uint64_t)t[i].rows);
    tiny_u32(f, 0); /* F32 */
    tiny_u64(f, at);
    at += tiny_floats(&t[i]) * 4; /* all multiples of 32 */
  }
  while (ftell(f) % 32)
    fputc(0, f);
  for (int i = 0; i < n; i++)
    for (uint64_t j = 0; j < tiny_floats(&t[i]); j++) {
      float v = t[i].scale == 0 ? 1 : tiny_random(&state) * t[i].scale;
      if (i == 0 && (int)(j / TINY_DIM) == nan_id)
        v = NAN;
      fwrite(&v, 4, 1, f);
    }
  return fclose(f) == 0;
}

#endif
