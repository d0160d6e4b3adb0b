/* vocab.h: the tables of one vocabulary, shared by the files of the tokenizer and by nobody else.
 *
 * Filled by mr_vocab_open, never changed afterwards. Texts lie end to end in one blob. A byte-level
 * token's text is kept as the bytes it stands for; control and user-defined tokens, and all of
 * SentencePiece, as stored.
 */
#ifndef MR_SRC_VOCAB_H
#define MR_SRC_VOCAB_H

#include "src/pretok.h"
#include "src/tokenizer.h"

/* tokenizer.ggml.token_type */
enum {
  MR_TOKEN_NORMAL = 1,
  MR_TOKEN_UNKNOWN,
  MR_TOKEN_CONTROL,
  MR_TOKEN_USER,
  MR_TOKEN_UNUSED,
  MR_TOKEN_BYTE
};

#define MR_SPACE_MARK "\xe2\x96\x81" /* U+2581 stands for a space in SentencePiece texts */

enum {
  MR_MARK_END = 1,   /* ends a generation */
  MR_MARK_WHOLE = 2, /* byte-level: merging this token's bytes gives this token again */
  MR_MARK_RSTRIP = 4 /* white space after the token belongs to it */
};

typedef struct mr_index { /* open addressing over texts; slots hold ids, -1 free */
  int32_t *slot;
  uint32_t mask;
} mr_index;

typedef struct mr_merge_rule {
  uint64_t pair; /* left id << 32 | right id; UINT64_MAX: free */
  int32_t rank, id;
} mr_merge_rule;

struct mr_vocab {
  bool spm;
  int32_t n;
  char *blob;
  uint32_t *at;         /* [n + 1]: where each text starts in blob */
  uint8_t *type;        /* [n] */
  uint8_t *mark;        /* [n] MR_MARK_* */
  float *score;         /* [n], SentencePiece */
  mr_index all;         /* every text; of equal ones the lowest id */
  mr_index words;       /* only what merging may give */
  int32_t byte_id[256]; /* the token of one byte, -1: none */
  mr_merge_rule *rules; /* byte-level; open addressing */
  uint32_t rules_mask;
  int32_t *special; /* [n_special] control, unknown and user-defined ids, by text */
  int32_t n_special;
  int32_t special_from[257]; /* where the texts with this first byte start in `special` */
  bool first_user[256];      /* a user-defined token starts with this byte */
  uint32_t longest;          /* bytes of the longest text in `words` */
  bool joins[256];           /* SentencePiece: some word has this byte just before a space mark */
  int32_t bos, eos;          /* -1: none */
  bool add_bos, add_eos, add_space_prefix;
  mr_pretok *pretok; /* byte-level */
  char *pre;
  struct mr_hf *hf; /* the steps of a tokenizer.json (hf_tokenizer.h); NULL: none of the above */
  const char *kind; /* its name; NULL: spm or bpe */
};

static inline mr_str mr_vocab_text(const mr_vocab *v, int32_t id) {
  return (mr_str){v->blob + v->at[id], v->at[id + 1] - v->at[id]};
}

/* Id of the text in one of the indexes, or -1. */
int32_t mr_vocab_lookup(const mr_vocab *v, const mr_index *index, const char *s, size_t len);

/* First of ids[lo, hi), ids by text and all longer than `depth`, whose byte there is at least c. */
int32_t mr_vocab_bound(const mr_vocab *v, const int32_t *ids, int32_t lo, int32_t hi,
                       uint32_t depth, int c);

/* Makes an index for n texts. 0: out of memory. */
int mr_vocab_index_init(mr_index *index, size_t n);
/* Of equal texts the first one stays, or the last with `replace`. */
void mr_vocab_index_add(const mr_vocab *v, mr_index *index, int32_t id, bool replace);

/* Makes the table of n rules (0: out of memory); adds one, or replaces that of its pair. */
int mr_vocab_rules_init(mr_vocab *v, size_t n);
void mr_vocab_rule_put(mr_vocab *v, int32_t left, int32_t right, int32_t rank, int32_t id);

/* Writes the bytes that s stands for in byte-level spelling (out may be s.s) and returns how many,
 * or -1 if s is not made of such characters. */
int64_t mr_vocab_decode_bytes(mr_str s, char *out);

/* Sorts ids by text. */
void mr_vocab_sort(const mr_vocab *v, int32_t *ids, int32_t n);
/* Marks the control tokens that are known to end a turn. */
void mr_vocab_mark_ends(mr_vocab *v);

/* Rank and result of merging two tokens; false: they do not merge. */
bool mr_vocab_rule(const mr_vocab *v, int32_t left, int32_t right, int32_t *rank, int32_t *id);

#endif
