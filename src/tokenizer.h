/* tokenizer.h: text to token ids and back. (vocab.h: the tables of one vocabulary; pretok.h: how
 * text is cut.)
 *
 *     mr_vocab *v;   mr_vocab_open(&v, gguf, &err);        immutable, may be shared by threads
 *     mr_ids ids = {0};
 *     mr_tokenizer_encode(v, text, len, NULL, MR_TOK_ADD_SPECIAL, &ids, &err);
 *     mr_ids_free(&ids);  mr_vocab_close(v);
 *
 * Kinds of a GGUF file: byte-level BPE (tokenizer.ggml.model "gpt2") with its pre-tokenizer pattern
 * (PCRE2 with a match limit), SentencePiece-style merging by score ("llama"), WordPiece ("bert").
 * Kinds of a tokenizer.json: BPE, Unigram, WordPiece, WordLevel with its own steps (hf_tokenizer.h;
 * opened by hf_dir.h). Text may hold NUL; invalid UTF-8 is encoded as upstream does (byte tokens
 * where the vocabulary has them, else U+FFFD). Text of a GGUF file's BPE is not normalized (MPT's
 * own tokenizer would apply NFC). Time is O(n log n) in the length of the text.
 */
#ifndef MR_SRC_TOKENIZER_H
#define MR_SRC_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "io/err.h"
#include "io/gguf.h"
#include "io/text.h"

typedef struct mr_vocab mr_vocab;

typedef struct mr_ids {
  int32_t *ids; /* owned */
  size_t n, cap;
} mr_ids;

int mr_ids_push(mr_ids *v, int32_t id); /* 0: out of memory */
void mr_ids_free(mr_ids *v);

/* Copies what it needs from g. MR_E_DATA names the key that is missing, broken or not supported. */
mr_code mr_vocab_open(mr_vocab **out, const mr_gguf *g, mr_err *err);
void mr_vocab_close(mr_vocab *v);
/* True if the file holds a vocabulary at all (tokenizer.ggml.tokens). */
bool mr_vocab_present(const mr_gguf *g);

int32_t mr_vocab_size(const mr_vocab *v);
int32_t mr_vocab_bos(const mr_vocab *v); /* -1: none */
int32_t mr_vocab_eos(const mr_vocab *v); /* -1: none */
bool mr_vocab_adds_bos(const mr_vocab *v);
bool mr_vocab_is_end(const mr_vocab *v, int32_t id); /* eos, eot, eom and end-of-generation control
                                                        tokens */
bool mr_vocab_is_control(const mr_vocab *v, int32_t id);
const char *mr_vocab_kind(const mr_vocab *v); /* "bpe", "spm", "unigram", "wordpiece", "wordlevel"
                                               */
const char *mr_vocab_pre(const mr_vocab *v);  /* pre-tokenizer's name, "" for none */
/* Stored text of a token (for printing; a BPE token's bytes are mapped back). False: no such id. */
bool mr_vocab_piece(const mr_vocab *v, int32_t id, mr_str *out);
/* The id whose stored text is exactly s, or -1. */
int32_t mr_vocab_find(const mr_vocab *v, const char *s, size_t len);

enum { MR_TOK_ADD_SPECIAL = 1, MR_TOK_PARSE_SPECIAL = 2, MR_TOK_UPSTREAM = 4 };

/* Appends the ids of text to out, or nothing and an error (MR_E_DATA: more than 1 GiB, or a byte
 * that the vocabulary has no token for). ADD_SPECIAL: BOS/EOS as the vocabulary asks, never a
 * second BOS where the text begins with one that was parsed. UPSTREAM: what upstream's tokenizers
 * answer, for comparisons: a second BOS, and a byte without a token is left out. PARSE_SPECIAL:
 * control tokens written in the text become tokens; without it they are plain text (user-defined
 * tokens match always). `plain` (len bytes, or NULL): where it is non-zero, a byte may not take
 * part in a control token: text of a user inside a rendered template. */
mr_code mr_tokenizer_encode(const mr_vocab *v, const char *text, size_t len, const uint8_t *plain,
                            int flags, mr_ids *out, mr_err *err);

/* Streaming detokenizer: never emits half a character. Feed ids in order; finished text is appended
 * to out. Bytes that are not UTF-8 come out as U+FFFD when it is sure that they are not. */
typedef struct mr_detok {
  const mr_vocab *v; /* borrowed */
  char held[8];      /* an unfinished sequence */
  int n_held;
  bool first; /* nothing emitted yet: SPM's leading space is dropped when strip_space */
  bool strip_space;
  bool control; /* control tokens are written as their text, else skipped */
} mr_detok;

void mr_detok_init(mr_detok *d, const mr_vocab *v, bool strip_space, bool control);
void mr_detok_push(mr_detok *d, int32_t id, mr_text *out);
void mr_detok_finish(mr_detok *d, mr_text *out); /* what is held comes out as U+FFFD */
/* Raw bytes of one token (no UTF-8 repair), appended to out. */
void mr_detok_bytes(const mr_vocab *v, int32_t id, mr_text *out);

#endif
