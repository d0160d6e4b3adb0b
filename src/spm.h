/* spm.h: SentencePiece-style BPE: merging by score, bytes where no piece fits. */
#ifndef MR_SRC_SPM_H
#define MR_SRC_SPM_H

#include "src/merge.h"

typedef struct mr_spm { /* scratch of one caller; zero it, reuse it, free it */
  mr_merger merger;
  mr_text escaped;
} mr_spm;

/* Appends the ids of a text without special tokens; `prefix`: a space is put before it. MR_E_DATA:
 * the vocabulary has no token for a byte. */
mr_code mr_spm_encode(const mr_vocab *v, mr_spm *s, const char *text, size_t len, bool prefix,
                      mr_ids *out, mr_err *err);
void mr_spm_free(mr_spm *s);

#endif
