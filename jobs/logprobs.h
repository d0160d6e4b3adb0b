/* logprobs.h: log-probabilities of tokens in the shapes of the two APIs, as JSON.
 *
 * A token's text is what its bytes are, U+FFFD where they are not whole characters (chat: `bytes`
 * has them exactly; completions: such a token is "bytes:\xE2\x82", so that two of them do not look
 * alike). Without a vocabulary a token is "token_id:7". Values that are not finite are null.
 */
#ifndef MR_JOBS_LOGPROBS_H
#define MR_JOBS_LOGPROBS_H

#include "io/text.h"
#include "src/sampler.h"
#include "src/tokenizer.h"

/* {"content": [{"token", "logprob", "bytes", "top_logprobs"}], "refusal": null} of n tokens. */
void mr_logprobs_chat(mr_text *t, const mr_vocab *v, const mr_sampled *list, int n);

typedef struct mr_logprobs_list { /* of a completion; borrowed */
  const int32_t *prompt_ids;      /* n_prompt, listed in front (echo); n_prompt 0: none */
  const mr_sampled *prompt;       /* n_prompt; the first has no value */
  int n_prompt;
  size_t prompt_chars;    /* characters of the prompt's text */
  const mr_sampled *list; /* n */
  const int *offsets;     /* n byte offsets into text, or NULL */
  const char *text;       /* text_len bytes, or NULL */
  size_t text_len;
  int n;
} mr_logprobs_list;

/* {"tokens", "token_logprobs", "top_logprobs", "text_offset"}; offsets count characters. */
void mr_logprobs_completion(mr_text *t, const mr_vocab *v, const mr_logprobs_list *l);

/* [null, -1.5, ...]: one number a prompt token. */
void mr_logprobs_numbers(mr_text *t, const mr_sampled *list, int n, bool first_is_null);
/* [null, {"text": -1.5, ...}, ...]: the best tokens at each place of the prompt. */
void mr_logprobs_tops(mr_text *t, const mr_vocab *v, const mr_sampled *list, int n);
/* [null, {"7": {"logprob", "decoded_token", "rank"}}, ...]: vLLM's prompt_logprobs. */
void mr_logprobs_by_id(mr_text *t, const mr_vocab *v, const mr_sampled *list, int n);

/* Characters in len bytes of UTF-8. */
size_t mr_logprobs_chars(const char *s, size_t len);

#endif
