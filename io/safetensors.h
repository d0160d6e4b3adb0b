/* safetensors.h: reads safetensors files, one or a directory of shards (format page: safetensors
 * README, "Format").
 *
 *     mr_safetensors *s;
 *     mr_safetensors_open(&s, dir, &err);      model.safetensors, or the shards of its index
 *     const mr_gguf_tensor *t = mr_safetensors_find(s, "model.norm.weight");
 *     mr_safetensors_close(s);
 *
 * Headers are hostile input: the header's length, types, shapes and offsets are checked against the
 * file before use; duplicate names (in a file or between shards), tensors that overlap and names of
 * shards that leave the directory are refused. Tensors are described as GGUF's are, so dims[0] is
 * the contiguous one (the last of the file's shape); a scalar has n_dims 0. Everything returned
 * lives until close.
 */
#ifndef MR_IO_SAFETENSORS_H
#define MR_IO_SAFETENSORS_H

#include "io/gguf.h"

typedef struct mr_safetensors mr_safetensors;

/* MR_E_NOINPUT: neither file is there; MR_E_DATA; MR_E_NOMEM. */
mr_code mr_safetensors_open(mr_safetensors **out, const char *dir, mr_err *err);
/* One file, whatever its name. */
mr_code mr_safetensors_open_file(mr_safetensors **out, const char *path, mr_err *err);
void mr_safetensors_close(mr_safetensors *s); /* NULL is fine */

uint64_t mr_safetensors_bytes(const mr_safetensors *s); /* of all files */
size_t mr_safetensors_n_files(const mr_safetensors *s);
/* The bytes of a file; borrowed. */
const uint8_t *mr_safetensors_file(const mr_safetensors *s, size_t i, uint64_t *bytes);
size_t mr_safetensors_n(const mr_safetensors *s);
const mr_gguf_tensor *mr_safetensors_at(const mr_safetensors *s, size_t i); /* one array */
const mr_gguf_tensor *mr_safetensors_find(const mr_safetensors *s, const char *name);

#endif
