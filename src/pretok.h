/* pretok.h: how byte-level BPE vocabularies cut text into words before merging.
 *
 *     mr_pretok *p;  mr_pretok_open(&p, "llama-bpe", 9, &err);    compiles the patterns; immutable,
 * any thread mr_cuts c = {0}; mr_pretok_cut(p, text, len, &c, &err); c.end[0..n): where each word
 * ends mr_cuts_free(&c);  mr_pretok_close(p);
 *
 * A pre-tokenizer is a list of patterns. The first cuts the text into its matches and what lies
 * between them; each following one cuts every piece of the former on its own (look-around sees only
 * the piece). Names are those of tokenizer.ggml.pre; patterns are those of the models' own
 * tokenizer files. White space is the Unicode property White_Space, not PCRE's \s, which adds
 * U+180E.
 */
#ifndef MR_SRC_PRETOK_H
#define MR_SRC_PRETOK_H

#include <stdbool.h>
#include <stddef.h>

#include "io/err.h"

typedef struct mr_pretok mr_pretok;

/* Ends of words, bytes from the start of the text; reused from call to call. `next` is scratch. */
typedef struct mr_cuts {
  size_t *end, *next; /* owned */
  size_t n, cap, n_next, cap_next;
} mr_cuts;

/* An empty name means "default". An unknown one is refused by name (MR_E_DATA). */
mr_code mr_pretok_open(mr_pretok **out, const char *name, size_t len, mr_err *err);
void mr_pretok_close(mr_pretok *p);

/* A word that is a token as a whole is not merged (llama3 and those that follow it). */
bool mr_pretok_whole_words(const mr_pretok *p);
/* Such vocabularies begin with BOS unless the file says otherwise. */
bool mr_pretok_adds_bos(const mr_pretok *p);

/* Cuts text (valid UTF-8, may hold NUL). MR_E_DATA when a pattern passes its match limit. */
mr_code mr_pretok_cut(const mr_pretok *p, const char *text, size_t len, mr_cuts *cuts, mr_err *err);
void mr_cuts_free(mr_cuts *c);

#endif
