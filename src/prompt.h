/* prompt.h: what the runner needs to turn a row into token ids before any weight is loaded:
 * vocabulary, chat template and context length of one model: a GGUF file or a Hugging Face
 * directory (hf_dir.h).
 *
 *     mr_prompter *p;  mr_prompter_open(&p, path, &err);       reads metadata only; immutable
 * afterwards mr_prompter_chat(p, &req, &ids, &err);   mr_prompter_text(p, text, len, &ids, &err);
 *
 * A template sees the row's chat_template_kwargs, the texts of the special tokens (bos_token,
 * eos_token, unk_token, pad_token, where the model has them; a directory's sep_token, cls_token and
 * mask_token too), and messages, tools and documents
 * (None when absent) and add_generation_prompt, as under transformers. Text of the row stays text
 * when it is tokenized.
 */
#ifndef MR_SRC_PROMPT_H
#define MR_SRC_PROMPT_H

#include <jansson.h>

#include "src/template.h"
#include "src/tokenizer.h"

typedef struct mr_prompter mr_prompter;

typedef struct mr_chat {
  json_t *messages;          /* array, borrowed */
  json_t *tools, *documents; /* or NULL */
  json_t *kwargs;            /* chat_template_kwargs: more variables, or NULL */
  bool add_generation_prompt;
  double now; /* job start, seconds since 1970 */
} mr_chat;

mr_code mr_prompter_open(mr_prompter **out, const char *model_path, mr_err *err);
void mr_prompter_close(mr_prompter *p);

const mr_vocab *mr_prompter_vocab(const mr_prompter *p); /* NULL: the model has none; rows of token
                                                            ids only */
int mr_prompter_context(const mr_prompter *p);           /* tokens */
int32_t mr_prompter_vocab_size(const mr_prompter *p);    /* rows of the embedding */
/* The parsed template (the one for tools when tools is true and the model has one), or NULL with
 * the error: the model has none, or it does not parse. Borrowed. */
const mr_template *mr_prompter_template(const mr_prompter *p, bool tools, mr_err *err);
/* bos_token and the like as template variables: an object, borrowed. */
const json_t *mr_prompter_variables(const mr_prompter *p);
/* The model's file without its directory, .gguf and the number of a part; a directory's name. */
const char *mr_prompter_name(const mr_prompter *p);

/* Renders and tokenizes with exactly one BOS where the vocabulary adds one or the template writes
 * it. The messages are as templates read them: content a string (or null), arguments of tool calls
 * objects. MR_E_DATA when the model has no template or the template refuses. Ids are appended to
 * out. */
mr_code mr_prompter_chat(const mr_prompter *p, const mr_chat *chat, mr_ids *out, mr_err *err);
/* Plain text of a completion: BOS as the vocabulary asks, control tokens are text. */
mr_code mr_prompter_text(const mr_prompter *p, const char *text, size_t len, mr_ids *out,
                         mr_err *err);
/* A continuation after a prompt: no BOS. */
mr_code mr_prompter_continuation(const mr_prompter *p, const char *text, size_t len, mr_ids *out,
                                 mr_err *err);

#endif
