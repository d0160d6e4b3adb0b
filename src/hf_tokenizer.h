/* hf_tokenizer.h: the pipeline of a Hugging Face tokenizer.json, behind mr_vocab.
 *
 * Text goes through added tokens, normalizers, pre-tokenizers, a model and the post-processor, as
 * in the `tokenizers` library (facts of its formats and order of steps; tests compare the ids with
 * it). Token texts lie in the tables of vocab.h, as the file spells them; what a step is made of
 * lies in a list of mr_hf_step. A component that is not known is refused by its name.
 *
 * Text is valid UTF-8 from the first step on (other bytes become U+FFFD). Where a caller marks
 * bytes as `plain`, the marks follow the text through the normalizers, so that no user's text
 * becomes a control token, not even one that is matched after normalizing.
 *
 * Files: hf_tokenizer.c reads the file and drives a text through; _added finds added tokens; _norm,
 * _pre and _post hold the steps; _bpe, unigram.c and wordpiece.c are the models.
 */
#ifndef MR_SRC_HF_TOKENIZER_H
#define MR_SRC_HF_TOKENIZER_H

#include <jansson.h>

#include "src/merge.h"
#include "src/regex.h"
#include "src/vocab.h"

#define MR_HF_MAX_ID ((1 << 22) - 1)
#define MR_HF_MAX_STEPS 64 /* of one kind, nested ones counted */
#define MR_HF_MAX_NESTING 8
/* How long n bytes of text may become: more is no normalizing but an attack by the file. */
#define MR_HF_MAX_GROWN(n) (64 * (n) + 65536)

typedef struct mr_hf_step {
  int kind;       /* an enum of the file that runs it */
  unsigned flags; /* likewise */
  mr_regex *re;   /* owned; NULL: none */
  char *a, *b;    /* owned texts; NULL: none */
  size_t a_len, b_len;
} mr_hf_step;

typedef struct mr_hf_steps {
  mr_hf_step *s; /* owned */
  size_t n, cap;
} mr_hf_steps;

/* Text with marks: plain has a byte for each of s, or is empty when nothing is marked. */
typedef struct mr_hf_text {
  mr_text s, plain;
  bool marked;
} mr_hf_text;

typedef struct mr_hf_piece {
  size_t at, len;
  bool first; /* the text of the caller starts here */
} mr_hf_piece;

typedef struct mr_hf_pieces {
  mr_text s;
  mr_hf_piece *p; /* owned */
  size_t n, cap;
} mr_hf_pieces;

typedef struct mr_hf_added { /* an added token */
  int32_t id;
  unsigned flags; /* MR_HF_* */
  char *text;     /* owned; normalized where the token is */
  size_t len;
} mr_hf_added;

enum { MR_HF_SPECIAL = 1, MR_HF_LSTRIP = 2, MR_HF_RSTRIP = 4, MR_HF_WORD = 8, MR_HF_NORMAL = 16 };

typedef struct mr_hf_list { /* of added tokens, sorted by text */
  mr_hf_added *t;           /* owned */
  size_t n, cap;
  bool starts[256]; /* bytes that a token starts with */
} mr_hf_list;

typedef enum mr_hf_model { MR_HF_BPE, MR_HF_UNIGRAM, MR_HF_WORDPIECE, MR_HF_WORDLEVEL } mr_hf_model;

typedef struct mr_hf {
  mr_hf_steps norm, pre, dec;
  mr_hf_list raw, normalized; /* added tokens, by when they are looked for */
  mr_ids prefix, suffix;      /* what the post-processor puts around a text */
  mr_hf_model model;
  int32_t unk; /* -1: none */
  bool byte_fallback, fuse_unk, whole_words;
  char *first, *cont, *end; /* owned: put before the first and following parts of a word, and at
                               its end, to look them up; "" for none */
  int32_t max_chars;        /* WordPiece: longer words are unknown */
  double *score;            /* Unigram [vocab] */
  double unk_score;
  int32_t *sorted; /* Unigram: ids by text */
  int32_t n_sorted;
  int32_t *pairs; /* [65536 + 1] where the texts with these first two bytes start in `sorted` */
} mr_hf;

typedef struct mr_hf_work { /* of one call */
  mr_hf_text text, spare;
  mr_hf_pieces cur, next;
  mr_regex_scratch match;
  mr_merger merger;
  mr_text key;
  mr_ids ids;
  void *path; /* Unigram's table */
  size_t path_cap;
  bool lossy; /* what has no token is left out, else an error */
} mr_hf_work;

void mr_hf_work_free(mr_hf_work *w);

/* ---- the whole ---- */

/* Reads tokenizer.json's value into a vocabulary without bos, eos and ends. `more` (may be NULL) is
 * an object of added tokens by id, as tokenizer_config.json has them. */
mr_code mr_hf_open(mr_vocab **out, const json_t *root, const json_t *more, mr_err *err);
mr_hf *mr_hf_new(mr_hf_model model); /* without any step; NULL: out of memory */
/* The pipeline of a BERT vocabulary whose tables, bos and eos are read already (GGUF): tokens that
 * start a word begin with U+2581. One with capital letters in it is not lower-cased. */
mr_code mr_hf_open_bert(mr_vocab *v, int32_t unk, mr_err *err);
void mr_hf_close(mr_hf *h);
mr_code mr_hf_encode(const mr_vocab *v, const char *text, size_t len, const uint8_t *plain,
                     int flags, mr_ids *out, mr_err *err);
/* Bytes of one token, appended to out. first: nothing came before it, and leading space goes. */
void mr_hf_decode(const mr_vocab *v, int32_t id, bool first, mr_text *out);
/* ---- parts ---- */

mr_code mr_hf_no_memory(mr_err *err);
mr_hf_step *mr_hf_step_add(mr_hf_steps *list, int kind, mr_err *err); /* NULL: the error */
/* Copies a string member (NULL: the error; `fallback` where it is absent or null, NULL: must be).
 */
mr_code mr_hf_string(const json_t *o, const char *key, const char *fallback, char **out,
                     size_t *len, mr_err *err);
/* A boolean member; anything but true and false is `fallback`. */
bool mr_hf_flag(const json_t *o, const char *key, bool fallback);
/* {"String": "x"} or {"Regex": "x"} or "x" into step->a or step->re. */
mr_code mr_hf_pattern(const json_t *p, mr_hf_step *step, mr_err *err);
const char *mr_hf_type(const json_t *o); /* its "type", "" for none */
/* Index of name in names (ending with NULL), or -1 with the error "<what> <name> is not supported".
 */
int mr_hf_kind(const char *name, const char *const *names, const char *what, mr_err *err);

mr_code mr_hf_read_norm(mr_hf *h, const json_t *o, int depth, mr_err *err);
mr_code mr_hf_normalize(const mr_hf *h, mr_hf_work *w, mr_err *err); /* w->text, in place */
mr_code mr_hf_read_pre(mr_hf *h, const json_t *o, int depth, mr_err *err);
/* Cuts one piece of text into w->cur. */
mr_code mr_hf_cut(const mr_hf *h, mr_hf_work *w, const char *s, size_t len, bool first,
                  mr_err *err);
mr_code mr_hf_read_post(mr_vocab *v, const json_t *o, int depth, mr_err *err);
mr_code mr_hf_read_dec(mr_hf *h, const json_t *o, int depth, mr_err *err);

typedef struct mr_hf_spot { /* of the text: a token, or what lies between (id -1) */
  size_t at, len;
  int32_t id;
} mr_hf_spot;

typedef struct mr_hf_spots {
  mr_hf_spot *s; /* owned */
  size_t n, cap;
} mr_hf_spots;

mr_code mr_hf_list_add(mr_hf_list *l, int32_t id, unsigned flags, const char *text, size_t len,
                       mr_err *err);
void mr_hf_list_sort(mr_hf_list *l);
void mr_hf_list_free(mr_hf_list *l);
/* Spots of the text, in order; parse: special tokens count where no byte of theirs is plain (may be
 * NULL). */
mr_code mr_hf_find_added(const mr_hf_list *l, const char *text, size_t len, const uint8_t *plain,
                         bool parse, mr_hf_spots *out, mr_err *err);

mr_code mr_hf_read_bpe(mr_vocab *v, const json_t *model, mr_err *err);
mr_code mr_hf_bpe_word(const mr_vocab *v, mr_hf_work *w, const char *s, size_t len, mr_ids *out,
                       mr_err *err);

/* Unicode, as the library's steps see it. */
mr_code mr_hf_grown(mr_err *err);   /* the error for a text that passes MR_HF_MAX_GROWN */
bool mr_hf_is_space(uint32_t code); /* White_Space */
bool mr_hf_is_punct(uint32_t code); /* ASCII punctuation and P* */
void mr_hf_add_byte_char(mr_text *t, uint8_t byte);

#endif
