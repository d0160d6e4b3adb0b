/* hf_dir.h: what a Hugging Face model directory says about text, apart from its weights.
 *
 *     mr_hf_dir d;  mr_hf_dir_open(&d, path, &err);     config.json must be there
 *     mr_hf_dir_vocab(&d, &v, &err);                    NULL: no tokenizer.json
 *     mr_hf_dir_close(&d);
 *
 * Read: config.json (context length, vocabulary size, eos_token_id; also inside of text_config),
 * tokenizer.json, tokenizer_config.json (special tokens, add_bos_token, add_eos_token,
 * added_tokens_decoder, chat_template), special_tokens_map.json, generation_config.json
 * (eos_token_id), chat_template.jinja and additional_chat_templates/tool_use.jinja. A generation
 * ends at the tokenizer's EOS and at the eos_token_id of generation_config.json, else that of
 * config.json; where neither names one, at the control tokens that are known to end a turn.
 * Sampling defaults of generation_config.json (temperature, top_p ...) are not applied: what a job
 * samples with is said by the job.
 */
#ifndef MR_SRC_HF_DIR_H
#define MR_SRC_HF_DIR_H

#include <jansson.h>

#include "src/tokenizer.h"

typedef struct mr_hf_dir {
  char *path;                                            /* owned, without slashes at its end */
  json_t *config, *tokenizer, *generation, *special_map; /* owned; all but config may be NULL;
                                                            tokenizer: tokenizer_config.json */
  mr_text plain, with_tools;                             /* chat templates; no data: none */
} mr_hf_dir;

bool mr_hf_dir_is(const char *path); /* a directory */
mr_code mr_hf_dir_open(mr_hf_dir *d, const char *path, mr_err *err);
void mr_hf_dir_close(mr_hf_dir *d);
bool mr_hf_dir_has_weights(const mr_hf_dir *d); /* model.safetensors or the index of its shards */

mr_code mr_hf_dir_vocab(const mr_hf_dir *d, mr_vocab **out, mr_err *err);
int64_t mr_hf_dir_context(const mr_hf_dir *d);    /* tokens; 0: not said */
int64_t mr_hf_dir_vocab_size(const mr_hf_dir *d); /* 0: not said */
/* Text of a special token ("bos_token" and others), or NULL. Borrowed. */
const json_t *mr_hf_dir_token(const mr_hf_dir *d, const char *name);

#endif
