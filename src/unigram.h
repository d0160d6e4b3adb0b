/* unigram.h: the likeliest way to cut a text into tokens, each with its log probability (Kudo
 * 2018).
 */
#ifndef MR_SRC_UNIGRAM_H
#define MR_SRC_UNIGRAM_H

#include "src/hf_tokenizer.h"

/* Reads scores, unk_id and byte_fallback; the tokens' texts are in the tables already. */
mr_code mr_unigram_read(mr_vocab *v, const json_t *model, mr_err *err);
/* Appends the ids of a piece. Time is linear in its length, times the longest token. */
mr_code mr_unigram_word(const mr_vocab *v, mr_hf_work *w, const char *s, size_t len, mr_ids *out,
                        mr_err *err);

#endif
