/* sampler.h: from logits to a token, by the OpenAI and vLLM parameters.
 *
 * Order: logit_bias, penalties, min_tokens mask, (greedy stops here), temperature, top_k, top_p,
 * min_p, draw: in order of id from what the filters leave. The draw is counter-based: Philox4x32-10
 * (Salmon et al. 2011) keyed by the seed, counted by (choice, position, row key): no state, so a
 * restart, a shard or another batch draws the same. Row key: xxh3-64 of the row's id. A row that
 * names a seed leaves its row key out: the same request with the same seed gives the same text, as
 * in the API. A temperature below 1e-5 is greedy. Ties go to the lowest id everywhere.
 */
#ifndef MR_SRC_SAMPLER_H
#define MR_SRC_SAMPLER_H

#include <stdbool.h>
#include <stdint.h>

#include "io/err.h"
#include "kernels/kernels.h"

#define MR_TOP_LOGPROBS_MAX 20
#define MR_STOPS_MAX 16

typedef struct mr_bias {
  int32_t id;
  float value;
} mr_bias;

typedef struct mr_sampling { /* plain values; pointers are owned by whoever made it */
  float temperature;         /* 0: greedy */
  int top_k;                 /* 0 or -1: all */
  float top_p, min_p;        /* 1, 0: off */
  float repetition_penalty;  /* 1: off; over prompt and output (CTRL, as vLLM) */
  float presence_penalty, frequency_penalty; /* over output */
  uint64_t seed;                             /* has_seed false: a fixed default, so runs repeat */
  bool has_seed;
  int max_tokens, min_tokens;
  bool ignore_eos;
  int logprobs;        /* -1: none; 0..20: the chosen token's and that many best */
  int prompt_logprobs; /* -1: none; 0..20 */
  bool echo;
  int n; /* choices */
  mr_bias *bias;
  int n_bias;
  int32_t *stop_ids;
  int n_stop_ids;
  char **stop; /* stop strings, NUL-terminated UTF-8 */
  int n_stop;
  bool include_stop; /* include_stop_str_in_output */
} mr_sampling;

extern const mr_sampling mr_sampling_default; /* temperature 1, top_p 1, n 1, max_tokens -1 (the
                                                 context) ... */

typedef struct mr_sampled {
  int32_t id;
  float logprob; /* of the raw logits (before bias, penalties, temperature), as the APIs report */
  int n_top;
  int32_t top_id[MR_TOP_LOGPROBS_MAX];
  float top_logprob[MR_TOP_LOGPROBS_MAX];
} mr_sampled;

typedef struct mr_sampler_state { /* token counts of one choice, for penalties; see sampler.c */
  const int32_t *prompt;
  int n_prompt;
  const int32_t *output;
  int n_output;
} mr_sampler_state;

bool mr_sampler_is_greedy(const mr_sampling *s);
/* What a draw takes: uniform in [0, 1) with 53 bits. position: tokens that were chosen before. */
double mr_sampler_uniform(const mr_sampling *s, uint64_t row_key, int choice, int position);

/* Bytes of scratch of one worker (64-aligned, need not be cleared): n_vocab candidates and a copy
 * of the logits. */
size_t mr_sampler_scratch(int n_vocab);

/* Picks a token. logits [n_vocab] may be changed. out->logprob and the top list are filled when
 * s->logprobs >= 0. `ends`: ids that end a text (masked while below min_tokens). Returns MR_E_DATA
 * when the logits hold NaN or no finite value. */
mr_code mr_sampler_pick(const mr_kernels *k, const mr_sampling *s, float *logits, int n_vocab,
                        const mr_sampler_state *st, const int32_t *ends, int n_ends,
                        uint64_t row_key, int choice, void *scratch, mr_sampled *out, mr_err *err);

/* logprob of `id` and the n_top best (<= MR_TOP_LOGPROBS_MAX), of raw logits: for prompts and
 * scoring. rank NULL or gets the token's rank (1: the greedy choice). MR_E_DATA as above. */
mr_code mr_sampler_score(const mr_kernels *k, const float *logits, int n_vocab, int32_t id,
                         int n_top, mr_sampled *out, int *rank, mr_err *err);

/* 4 random words. */
void mr_philox(uint32_t out[4], const uint32_t counter[4], const uint32_t key[2]);

#endif
