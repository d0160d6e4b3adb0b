/* sequence.h: one choice of a request in flight, or one continuation: its block table, its tokens,
 * its text, and when it ends.
 *
 *     mr_sequence_init(&s, sampling, vocab, kv, max_len, &err);
 *     mr_sequence_push(&s, &picked, ends, n_ends, max_new, &err);   until s.done
 *     mr_sequence_take(&s, &choice);                                moves the result out
 *     mr_sequence_free(&s, kv);
 *
 * A stop string may span tokens: it is searched in the detokenized stream, and the earliest one
 * cuts the text. Tokens below min_tokens never end a choice, nor does a stop string that lies in
 * their text alone.
 */
#ifndef MR_SRC_SEQUENCE_H
#define MR_SRC_SEQUENCE_H

#include "src/engine.h"
#include "src/kvtier.h"

typedef struct mr_sequence {
  mr_kv_seq kv;                /* prompt and what came after it */
  const mr_sampling *sampling; /* borrowed */
  const mr_vocab *vocab;       /* borrowed; NULL: no text */
  mr_choice out;               /* the result so far; owned until taken */
  size_t cap_ids, cap_logprobs, cap_offsets;
  mr_text text;
  mr_detok detok;
  size_t search_from; /* a stop string begins here or later */
  mr_sampled picked;  /* of this step */
  int fed;            /* tokens after the prompt whose keys and values are stored */
  int own_pages;      /* reserved for it alone */
  mr_parked parked;   /* its own pages, while its request is parked */
  bool done;
} mr_sequence;

mr_code mr_sequence_init(mr_sequence *s, const mr_sampling *sampling, const mr_vocab *vocab,
                         const mr_kv *kv, int max_len, mr_err *err);

/* Takes s->picked as the next token. ends: ids that end a text; max_new: tokens at most.
 * MR_E_NOMEM. */
mr_code mr_sequence_push(mr_sequence *s, const int32_t *ends, int n_ends, int max_new, mr_err *err);

/* Ends it (again is fine): flushes held bytes, cuts offsets to the text. MR_E_NOMEM. */
mr_code mr_sequence_end(mr_sequence *s, mr_finish why, int32_t stop_id, mr_err *err);

/* Moves the result out. */
void mr_sequence_take(mr_sequence *s, mr_choice *out);

/* Gives back pages and memory, and the result where it was not taken. */
void mr_sequence_free(mr_sequence *s, mr_kv *kv);

void mr_choice_free(mr_choice *c); /* what it points to */

#endif
