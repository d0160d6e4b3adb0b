/* bpe.h: byte-level BPE: words of a text to token ids. */
#ifndef MR_SRC_BPE_H
#define MR_SRC_BPE_H

#include "src/merge.h"

typedef struct mr_bpe { /* scratch of one caller; zero it, reuse it, free it */
  mr_cuts cuts;
  mr_merger merger;
  mr_text fixed, shown; /* text made valid, and as the patterns see it */
  bool lossy;           /* set by the caller: bytes without a token are left out, else an error */
} mr_bpe;

/* Appends the ids of a text without special tokens. */
mr_code mr_bpe_encode(const mr_vocab *v, mr_bpe *b, const char *text, size_t len, mr_ids *out,
                      mr_err *err);
/* The ids of one word (bytes), without looking at MR_MARK_WHOLE. MR_E_DATA: the vocabulary has no
 * token for a byte. */
mr_code mr_bpe_word(const mr_vocab *v, mr_bpe *b, const char *word, size_t len, mr_ids *out,
                    mr_err *err);
void mr_bpe_free(mr_bpe *b);

#endif
