/* params.h: the body parameters of a row: names, types, ranges, and what is not supported.
 *
 * OpenAI's names, and vLLM's where OpenAI has none; the list with every rule is docs/job-file.md. A
 * parameter that is null counts as absent; one that is absent takes the job's default, then the
 * API's.
 *
 *     mr_params p;  mr_row_error why = {0};
 *     if (!mr_params_read(&p, body, defaults, MR_SHAPE_CHAT, n_vocab, &why)) ... why says what
 *     mr_params_write(&p, &text);          JSON that mr_params_read takes again (MR_SHAPE_STORED)
 */
#ifndef MR_JOBS_PARAMS_H
#define MR_JOBS_PARAMS_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "io/text.h"

typedef struct mr_row_error { /* the OpenAI error object */
  char message[512];
  char type[64];   /* "invalid_request_error", "batch_expired", "server_error" */
  char param[128]; /* empty: null */
  char code[64];   /* empty: null */
} mr_row_error;

/* An invalid_request_error; param and code may be NULL. Text is cut at a character's end. Returns
 * false. */
bool mr_row_error_set(mr_row_error *e, const char *param, const char *code, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

typedef enum mr_shape { /* where the parameters stand; some belong to one endpoint only */
                        MR_SHAPE_CHAT,       /* /v1/chat/completions */
                        MR_SHAPE_COMPLETION, /* /v1/completions */
                        MR_SHAPE_PLAIN_CHAT, /* a plain row with messages: either form of logprobs
                                              */
                        MR_SHAPE_PLAIN_TEXT, /* a plain row with a prompt */
                        MR_SHAPE_STORED      /* in a plan record */
} mr_shape;

typedef struct mr_params { /* plain values; JSON values are borrowed from the body or the defaults,
                              NULL: absent */
  int64_t max_tokens;      /* -1: what the context leaves */
  int64_t min_tokens, top_k, n, seed;
  int64_t logprobs, prompt_logprobs; /* -1: none */
  double temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
  bool has_seed, ignore_eos, echo, include_stop, return_token_ids, add_generation_prompt, stream;
  json_t *stop; /* a string or an array of strings */
  json_t *stop_token_ids, *logit_bias;
  json_t *tools, *documents, *chat_template_kwargs, *model;
} mr_params;

/* False with *why set. Looks at parameters only: messages, prompt and what else makes a row are the
 * caller's. Unknown names are not looked at; see mr_params_check_names. */
bool mr_params_read(mr_params *p, const json_t *body, const json_t *defaults, mr_shape shape,
                    int n_vocab, mr_row_error *why);
void mr_params_write(const mr_params *p, mr_text *t);

/* Every name in `body` is known for this shape; else false, naming the nearest known one. */
bool mr_params_check_names(const json_t *body, mr_shape shape, mr_row_error *why);
bool mr_params_is_known(const char *name);
bool mr_params_is_ignored(const char *name); /* known, and changes nothing: plain rows pass it on */
/* Names and values of --defaults (no model is known yet: token ids are not checked). */
bool mr_params_check_defaults(const json_t *defaults, mr_row_error *why);

#endif
