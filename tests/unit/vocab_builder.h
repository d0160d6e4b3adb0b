/* vocab_builder.h: small vocabularies as GGUF files, good ones and broken ones.
 *
 *     vocab_parts p = bpe_parts();        or spm_parts(); change what the test is about
 *     mr_vocab *v = NULL;
 *     mr_code c = open_parts(&p, &v, &err);
 */
#ifndef MR_TESTS_VOCAB_BUILDER_H
#define MR_TESTS_VOCAB_BUILDER_H

#include "gguf_builder.h"
#include "src/vocab.h"

enum { MAX_PARTS = 400 };

typedef struct vocab_parts {
  const char *model, *pre, *name; /* NULL: the key is left out */
  char text[MAX_PARTS][24];
  int32_t type[MAX_PARTS];
  float score[MAX_PARTS];
  uint64_t n, n_types, n_scores; /* n_...: entries of that array; 0: the key is left out */
  const char *merges[32];
  uint64_t n_merges;
  int32_t bos, eos, eot;              /* -1: the key is left out */
  int add_bos, add_eos, space_prefix; /* -1: the key is left out */
  bool tokens_as_numbers, merges_as_numbers;
} vocab_parts;

static inline int32_t add_token(vocab_parts *p, const char *text, int32_t type, float score) {
  int32_t id = (int32_t)p->n++;
  snprintf(p->text[id], sizeof p->text[id], "%s", text);
  p->type[id] = type;
  p->score[id] = score;
  if (p->n_types)
    p->n_types = p->n;
  if (p->n_scores)
    p->n_scores = p->n;
  return id;
}

/* The printable character that stands for a byte in byte-level vocabularies. */
static inline const char *byte_char(int byte) {
  static char out[4];
  mr_text t = {0};
  int unprintable = 0;
  for (int b = 0; b < byte; b++)
    unprintable += !((b > 0x20 && b < 0x7f) || (b > 0xa0 && b != 0xad));
  bool shown = (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte != 0xad);
  mr_text_add_code(&t, (uint32_t)(shown ? byte : 0x100 + unprintable));
  snprintf(out, sizeof out, "%s", t.data);
  mr_text_free(&t);
  return out;
}

/* 0-255: the bytes; 256 "he", 257 "ll", 258 "hell", 259 "hello", 260 " w", 261 "or", 262 " wor",
 * 263 "é"; 264 <|s|> (BOS), 265 <|im_end|>, 266 <|s|><|, control; 267 <u>, user-defined. */
static inline vocab_parts bpe_parts(void) {
  vocab_parts p = {.model = "gpt2",
                   .pre = "gpt-2",
                   .n_types = 1,
                   .bos = 264,
                   .eos = -1,
                   .eot = -1,
                   .add_bos = 1,
                   .add_eos = -1,
                   .space_prefix = -1};
  static const char *const merges[] = {"h e",        "l l", "he ll",        "hell o",
                                       "\xc4\xa0 w", "o r", "\xc4\xa0w or", "\xc3\x83 \xc2\xa9"};
  static const char *const words[] = {"he",        "ll", "hell",        "hello",
                                      "\xc4\xa0w", "or", "\xc4\xa0wor", "\xc3\x83\xc2\xa9"};
  for (int b = 0; b < 256; b++)
    add_token(&p, byte_char(b), MR_TOKEN_NORMAL, 0);
  for (p.n_merges = 0; p.n_merges < sizeof merges / sizeof *merges; p.n_merges++) {
    p.merges[p.n_merges] = merges[p.n_merges];
    add_token(&p, words[p.n_merges], MR_TOKEN_NORMAL, 0);
  }
  add_token(&p, "<|s|>", MR_TOKEN_CONTROL, 0);
  add_token(&p, "<|im_end|>", MR_TOKEN_CONTROL, 0);
  add_token(&p, "<|s|><|", MR_TOKEN_CONTROL, 0);
  add_token(&p, "<u>", MR_TOKEN_USER, 0);
  return p;
}

/* 0 <unk>, 1 <s>, 2 </s>, 3-258 bytes, 259 "▁", 260 "a", 261 "b", 262 "▁a", 263 "ab", 264 "▁ab",
 * 265 "é", 266 "▁▁"; 267 <x>, control; 268 "<u>", user-defined. */
static inline vocab_parts spm_parts(void) {
  vocab_parts p = {.model = "llama",
                   .n_types = 1,
                   .n_scores = 1,
                   .bos = 1,
                   .eos = 2,
                   .eot = -1,
                   .add_bos = -1,
                   .add_eos = -1,
                   .space_prefix = -1};
  static const struct {
    const char *text;
    float score;
  } words[] = {{"\xe2\x96\x81", -9},
               {"a", -5},
               {"b", -6},
               {"\xe2\x96\x81"
                "a",
                -3},
               {"ab", -1},
               {"\xe2\x96\x81"
                "ab",
                -2},
               {"\xc3\xa9", -7},
               {"\xe2\x96\x81\xe2\x96\x81", -4}};
  add_token(&p, "<unk>", MR_TOKEN_UNKNOWN, 0);
  add_token(&p, "<s>", MR_TOKEN_CONTROL, 0);
  add_token(&p, "</s>", MR_TOKEN_CONTROL, 0);
  for (int b = 0; b < 256; b++) {
    char name[8];
    snprintf(name, sizeof name, "<0x%02X>", b);
    add_token(&p, name, MR_TOKEN_BYTE, 0);
  }
  for (size_t i = 0; i < sizeof words / sizeof *words; i++)
    add_token(&p, words[i].text, MR_TOKEN_NORMAL, words[i].score);
  add_token(&p, "<x>", MR_TOKEN_CONTROL, 0);
  add_token(&p, "<u>", MR_TOKEN_USER, 0);
  return p;
}

static inline void build_bool(build *b, const char *key, int v) {
  uint8_t byte = (uint8_t)v;
  if (v >= 0)
    build_raw(b, key, MR_GGUF_BOOL, &byte, 1);
}

static inline void build_id(build *b, const char *key, int32_t id) {
  if (id >= 0)
    build_u32(b, key, (uint32_t)id);
}

static inline void build_strings(build *b, const char *key, uint64_t n,
                                 const char *(*at)(const vocab_parts *, uint64_t),
                                 const vocab_parts *p) {
  mr_text t = {0};
  for (uint64_t i = 0; i < n; i++)
    put_str(&t, at(p, i), strlen(at(p, i)));
  build_array(b, key, MR_GGUF_STRING, n, t.data ? t.data : "", t.len);
  mr_text_free(&t);
}

static inline const char *token_at(const vocab_parts *p, uint64_t i) {
  return p->text[i];
}

static inline const char *merge_at(const vocab_parts *p, uint64_t i) {
  return p->merges[i];
}

static inline void build_parts(build *b, const vocab_parts *p) {
  build_str(b, "general.architecture", "llama");
  if (p->name)
    build_str(b, "general.name", p->name);
  if (p->model)
    build_str(b, "tokenizer.ggml.model", p->model);
  if (p->pre)
    build_str(b, "tokenizer.ggml.pre", p->pre);
  if (p->tokens_as_numbers)
    build_array(b, "tokenizer.ggml.tokens", MR_GGUF_I32, p->n, p->type, p->n * 4);
  else
    build_strings(b, "tokenizer.ggml.tokens", p->n, token_at, p);
  if (p->n_types)
    build_array(b, "tokenizer.ggml.token_type", MR_GGUF_I32, p->n_types, p->type, p->n_types * 4);
  if (p->n_scores)
    build_array(b, "tokenizer.ggml.scores", MR_GGUF_F32, p->n_scores, p->score, p->n_scores * 4);
  if (p->merges_as_numbers)
    build_array(b, "tokenizer.ggml.merges", MR_GGUF_I32, p->n_merges, p->type, p->n_merges * 4);
  else if (p->n_merges)
    build_strings(b, "tokenizer.ggml.merges", p->n_merges, merge_at, p);
  build_id(b, "tokenizer.ggml.bos_token_id", p->bos);
  build_id(b, "tokenizer.ggml.eos_token_id", p->eos);
  build_id(b, "tokenizer.ggml.eot_token_id", p->eot);
  build_bool(b, "tokenizer.ggml.add_bos_token", p->add_bos);
  build_bool(b, "tokenizer.ggml.add_eos_token", p->add_eos);
  build_bool(b, "tokenizer.ggml.add_space_prefix", p->space_prefix);
}

static inline mr_code open_parts(const vocab_parts *p, mr_vocab **v, mr_err *err) {
  build b = {0};
  build_parts(&b, p);
  const char *path = build_file(&b);
  mr_gguf *g = NULL;
  mr_code c = mr_gguf_open(&g, path, err);
  if (!c)
    c = mr_vocab_open(v, g, err);
  mr_gguf_close(g);
  build_remove(path);
  return c;
}

#endif
