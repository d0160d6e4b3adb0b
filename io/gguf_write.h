/* gguf_write.h: writes a GGUF file, version 3 (format page: ggml docs/gguf.md).
 *
 *     mr_gguf_writer *w;
 *     mr_gguf_write_open(&w, path, &err);            creates PATH.tmp
 *     mr_gguf_write_str(w, "general.architecture", "llama", 5);  ...           the keys, in order
 *     mr_gguf_write_tensor(w, "token_embd.weight", dtype, 2, dims);  ...       the tensors
 *     mr_gguf_write_begin(w, &err);                  writes the header; the file has its full size
 *     mr_gguf_write_data(w, bytes, n, &err); ...     the tensors' bytes, in their order
 *     mr_gguf_write_finish(w, &err);                 syncs, renames to PATH, syncs the directory
 *     mr_gguf_write_free(w);                         without finish: removes PATH.tmp
 *
 * PATH either becomes a whole file or stays as it was. Keys and tensors are kept in memory until
 * begin; a failed allocation is reported there. Between begin and finish PATH.tmp can be opened by
 * mr_gguf_open: what was not written yet reads as zeros. After an error only free may be called.
 */
#ifndef MR_IO_GGUF_WRITE_H
#define MR_IO_GGUF_WRITE_H

#include "io/gguf.h"

#define MR_GGUF_NAME 65 /* bytes of a tensor's name (the format's limit is 64), and a NUL */

typedef struct mr_gguf_writer mr_gguf_writer;

/* MR_E_CANTCREATE, MR_E_NOMEM. */
mr_code mr_gguf_write_open(mr_gguf_writer **out, const char *path, mr_err *err);
void mr_gguf_write_free(mr_gguf_writer *w);              /* NULL is fine */
const char *mr_gguf_write_path(const mr_gguf_writer *w); /* of the temporary file */

void mr_gguf_write_str(mr_gguf_writer *w, const char *key, const char *s, size_t len);
void mr_gguf_write_u32(mr_gguf_writer *w, const char *key, uint32_t v);
void mr_gguf_write_f32(mr_gguf_writer *w, const char *key, float v);
void mr_gguf_write_bool(mr_gguf_writer *w, const char *key, bool v);
/* A key as another file has it. */
void mr_gguf_write_copy(mr_gguf_writer *w, const mr_gguf_kv *kv);
/* An array: then exactly `count` items by the calls below. */
void mr_gguf_write_array(mr_gguf_writer *w, const char *key, mr_gguf_type item, uint64_t count);
void mr_gguf_write_item_str(mr_gguf_writer *w, const char *s, size_t len);
void mr_gguf_write_item_i32(mr_gguf_writer *w, int32_t v);
void mr_gguf_write_item_f32(mr_gguf_writer *w, float v);

/* dims[0] is the contiguous one and a multiple of the type's block. Returns false for a name, type
 * or shape that the format has not; begin then fails too. */
bool mr_gguf_write_tensor(mr_gguf_writer *w, const char *name, int dtype, int n_dims,
                          const int64_t *dims);

mr_code mr_gguf_write_begin(mr_gguf_writer *w, mr_err *err);
uint64_t mr_gguf_write_bytes(const mr_gguf_writer *w); /* of the whole file; after begin */
/* Bytes of the tensors, one after the other; a call never crosses from one to the next. */
mr_code mr_gguf_write_data(mr_gguf_writer *w, const void *bytes, size_t n, mr_err *err);
/* MR_E_INTERNAL: tensors are missing. */
mr_code mr_gguf_write_finish(mr_gguf_writer *w, mr_err *err);

#endif
