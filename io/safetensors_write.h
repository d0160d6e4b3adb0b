/* safetensors_write.h: writes one safetensors file (format page: safetensors README, "Format").
 *
 *     mr_st_writer *w;
 *     mr_st_write_open(&w, "dir/model.safetensors", &err);
 *     mr_st_write_tensor(w, "model.norm.weight", dtype, 1, dims); ...     dims[0] contiguous, as
 * GGUF mr_st_write_begin(w, &err); mr_st_write_data(w, bytes, n, &err); ...       the tensors'
 * bytes in their order mr_st_write_finish(w, &err);                   syncs and closes
 *     mr_st_write_free(w);
 *
 * The file is written under its own name: whoever wants it whole or not at all writes into a
 * directory that is renamed. Errors: MR_E_CANTCREATE, MR_E_IO, MR_E_NOMEM; MR_E_INTERNAL for a type
 * that the format has not, a name twice, or bytes that do not fit the tensors.
 */
#ifndef MR_IO_SAFETENSORS_WRITE_H
#define MR_IO_SAFETENSORS_WRITE_H

#include "io/safetensors.h"

typedef struct mr_st_writer mr_st_writer;

mr_code mr_st_write_open(mr_st_writer **out, const char *path, mr_err *err);
void mr_st_write_free(mr_st_writer *w); /* NULL is fine */
/* Types: F32 F16 BF16 F64 I8 I16 I32 I64 F8_E4M3 U8, by their numbers in kernels/dtype.h. */
void mr_st_write_tensor(mr_st_writer *w, const char *name, int dtype, int n_dims,
                        const int64_t *dims);
mr_code mr_st_write_begin(mr_st_writer *w, mr_err *err);
mr_code mr_st_write_data(mr_st_writer *w, const void *bytes, size_t n, mr_err *err);
mr_code mr_st_write_finish(mr_st_writer *w, mr_err *err);
uint64_t mr_st_write_bytes(const mr_st_writer *w); /* of the whole file; after begin */

#endif
