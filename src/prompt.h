/* prompt.h: what the runner needs to turn a row into token ids before any weight is loaded: vocabulary, chat
 * template, context length, generation defaults of one model file.
 *
 *     mr_prompter *p;  mr_prompter_open(&p, path, &err);       reads metadata only; immutable afterwards
 *     mr_prompter_chat(p, &req, &ids, &err);   mr_prompter_text(p, text, len, &ids, &err);
 */
#ifndef MR_SRC_PROMPT_H
#define MR_SRC_PROMPT_H

#include <jansson.h>

#include "src/template.h"
#include "src/tokenizer.h"

typedef struct mr_prompter mr_prompter;

typedef struct mr_chat {
  json_t *messages;             /* array, borrowed */
  json_t *tools, *documents;    /* or NULL */
  json_t *kwargs;               /* chat_template_kwargs: more variables, or NULL */
  bool add_generation_prompt;
  double now;                   /* job start, seconds since 1970 */
} mr_chat;

mr_code mr_prompter_open(mr_prompter **out, const char *model_path, mr_err *err);
void mr_prompter_close(mr_prompter *p);

const mr_vocab *mr_prompter_vocab(const mr_prompter *p); /* NULL: the model has none; rows of token ids only */
int mr_prompter_context(const mr_prompter *p);           /* tokens */
int32_t mr_prompter_vocab_size(const mr_prompter *p);    /* rows of the embedding */
const char *mr_prompter_template_source(const mr_prompter *p); /* NULL: none */
const char *mr_prompter_name(const mr_prompter *p);      /* general.name, else the file's name */

/* Renders and tokenizes with exactly one BOS. MR_E_DATA when the model has no template or the template refuses. */
mr_code mr_prompter_chat(const mr_prompter *p, const mr_chat *chat, mr_ids *out, mr_err *err);
/* Plain text of a completion: BOS as the vocabulary asks, control tokens are text. */
mr_code mr_prompter_text(const mr_prompter *p, const char *text, size_t len, mr_ids *out, mr_err *err);
/* A continuation after a prompt: no BOS. */
mr_code mr_prompter_continuation(const mr_prompter *p, const char *text, size_t len, mr_ids *out, mr_err *err);

#endif
