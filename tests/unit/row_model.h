/* row_model.h: a model file for tests of rows: its vocabulary is the 256 bytes (one token each) and
 * an end token, its template writes "role:content\n" for each message and "A:" for the answer, its
 * context is 200 tokens. No weights.
 */
#ifndef MR_TESTS_ROW_MODEL_H
#define MR_TESTS_ROW_MODEL_H

#include "gguf_builder.h"

enum { ROW_MODEL_EOS = 256, ROW_MODEL_VOCAB = 257, ROW_MODEL_CONTEXT = 200 };

static inline void row_model_token(mr_text *t, int byte) {
  mr_text c = {0};
  int other = 0;
  bool shown = false;
  for (int b = 0; b <= byte; b++) {
    shown = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
    other += !shown;
  }
  mr_text_add_code(&c, (uint32_t)(shown ? byte : 256 + other - 1));
  put_str(t, c.data, c.len);
  mr_text_free(&c);
}

static inline void row_model_vocab(build *b) {
  mr_text tokens = {0}, types = {0}, merges = {0};
  for (int i = 0; i < 256; i++) {
    row_model_token(&tokens, i);
    put_u32(&types, 1);
  }
  put_str(&tokens, "<eos>", 5);
  put_u32(&types, 3);
  put_str(&merges, "\x01 \x02", 3);
  build_str(b, "tokenizer.ggml.model", "gpt2");
  build_str(b, "tokenizer.ggml.pre", "gpt-2");
  build_array(b, "tokenizer.ggml.tokens", MR_GGUF_STRING, ROW_MODEL_VOCAB, tokens.data, tokens.len);
  build_array(b, "tokenizer.ggml.token_type", MR_GGUF_I32, ROW_MODEL_VOCAB, types.data, types.len);
  build_array(b, "tokenizer.ggml.merges", MR_GGUF_STRING, 0, "", 0);
  build_u32(b, "tokenizer.ggml.eos_token_id", ROW_MODEL_EOS);
  mr_text_free(&tokens);
  mr_text_free(&types);
  mr_text_free(&merges);
}

/* The path of the file; build_remove removes it. */
static inline const char *row_model_write(void) {
  static const float zeros[ROW_MODEL_VOCAB * 32];
  build b = {0};
  build_str(&b, "general.architecture", "llama");
  build_str(&b, "general.name", "rows");
  build_u32(&b, "llama.context_length", ROW_MODEL_CONTEXT);
  build_u32(&b, "llama.embedding_length", 32);
  build_u32(&b, "llama.block_count", 1);
  build_u32(&b, "llama.feed_forward_length", 32);
  build_u32(&b, "llama.attention.head_count", 2);
  build_u32(&b, "llama.attention.head_count_kv", 2);
  build_u32(&b, "llama.rope.dimension_count", 16);
  build_f32(&b, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
  row_model_vocab(&b);
  build_str(&b, "tokenizer.chat_template",
            "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}A:{% endif %}");
  build_tensor(&b, "token_embd.weight", MR_F32, 32, ROW_MODEL_VOCAB, zeros);
  return build_file(&b);
}

#endif
