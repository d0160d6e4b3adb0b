/* weights.h: the tensors of a model, whatever holds them: a GGUF file or a directory of
 * safetensors.
 *
 *     mr_weights *w;
 *     mr_weights_open(&w, path, &err);            a directory, or a file
 *     const mr_gguf_tensor *t = mr_weights_find(w, name);
 *     mr_weights_close(w);
 *
 * Everything returned is borrowed until close. Errors are those of io/gguf.h and io/safetensors.h.
 */
#ifndef MR_IO_WEIGHTS_H
#define MR_IO_WEIGHTS_H

#include "io/safetensors.h"

typedef struct mr_weights {
  char *path;         /* as opened; owned */
  mr_gguf *gguf;      /* one of these two */
  mr_safetensors *st; /* (then path is a directory) */
} mr_weights;

mr_code mr_weights_open(mr_weights **out, const char *path, mr_err *err);
void mr_weights_close(mr_weights *w); /* NULL is fine */

bool mr_path_is_directory(const char *path);
uint64_t mr_weights_bytes(const mr_weights *w);
size_t mr_weights_n(const mr_weights *w);
const mr_gguf_tensor *mr_weights_at(const mr_weights *w, size_t i); /* one array: at(0) + i */
const mr_gguf_tensor *mr_weights_find(const mr_weights *w, const char *name); /* NULL: absent */

/* xxh3-128 of all files' bytes (of a directory: config.json, those of the tokenizer and the chat
 * templates, then the tensors' files) as 32 hex digits and a NUL. */
mr_code mr_weights_digest(const mr_weights *w, char out[33], mr_err *err);

#endif
