/* wordpiece.h: the longest token first, from the left (Schuster and Nakajima 2012, as in BERT). */
#ifndef MR_SRC_WORDPIECE_H
#define MR_SRC_WORDPIECE_H

#include "src/hf_tokenizer.h"

/* Reads unk_token, continuing_subword_prefix and max_input_chars_per_word. */
mr_code mr_wordpiece_read(mr_vocab *v, const json_t *model, mr_err *err);
/* Appends the ids of a word: the unknown token where a part has none, or where it is too long. */
mr_code mr_wordpiece_word(const mr_vocab *v, mr_hf_work *w, const char *s, size_t len, mr_ids *out,
                          mr_err *err);

#endif
