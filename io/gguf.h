/* gguf.h: reads GGUF model files, versions 2 and 3, single or split (format page: ggml
 * docs/gguf.md).
 *
 *     mr_gguf *g;
 *     if (mr_gguf_open(&g, path, &err)) ...          maps the file and checks every size in it
 *     const mr_gguf_kv *kv = mr_gguf_find(g, "llama.block_count");
 *     mr_gguf_close(g);
 *
 * A file is hostile input: counts, lengths, offsets, alignment, types and names are checked against
 * the file's size before use; nothing is allocated by a number in the file alone. A split file is
 * opened by its first member; the others are found beside it. Everything returned lives in the
 * mapping and is borrowed until close. Keys are those of the first member. Refused, beside what
 * does not fit the file: duplicate keys and tensor names, empty names and names with a NUL, tensors
 * that overlap, a big-endian file.
 *
 * Sizes of the tensor types are a fact of the format, so this module has its own table of them
 * (folders do not include sideways); a test holds it equal to kernels/dtype.
 */
#ifndef MR_IO_GGUF_H
#define MR_IO_GGUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "io/err.h"
#include "io/text.h"

typedef enum mr_gguf_type {
  MR_GGUF_U8,
  MR_GGUF_I8,
  MR_GGUF_U16,
  MR_GGUF_I16,
  MR_GGUF_U32,
  MR_GGUF_I32,
  MR_GGUF_F32,
  MR_GGUF_BOOL,
  MR_GGUF_STRING,
  MR_GGUF_ARRAY,
  MR_GGUF_U64,
  MR_GGUF_I64,
  MR_GGUF_F64
} mr_gguf_type;

typedef struct mr_gguf_kv {
  mr_str key;
  mr_gguf_type type;
  mr_gguf_type item;   /* ARRAY: type of the items */
  uint64_t count;      /* ARRAY: number of items; else 1 */
  const uint8_t *data; /* the value's bytes, unaligned; ARRAY: the first item; STRING: its text */
  uint64_t bytes;      /* of data */
} mr_gguf_kv;

typedef struct mr_gguf_tensor {
  mr_str name;
  int dtype;           /* mr_dtype (kernels/dtype.h): the GGML type number */
  int n_dims;          /* 1..4 */
  int64_t dims[4];     /* ne[0] (contiguous) first; unused ones are 1 */
  const uint8_t *data; /* aligned as the file says (32 unless general.alignment) */
  uint64_t bytes;
  int file; /* index of the split member */
} mr_gguf_tensor;

typedef struct mr_gguf mr_gguf;

mr_code mr_gguf_open(mr_gguf **out, const char *path, mr_err *err);
void mr_gguf_close(mr_gguf *g);

const char *mr_gguf_path(const mr_gguf *g);
int mr_gguf_version(const mr_gguf *g);
int mr_gguf_files(const mr_gguf *g);
uint64_t mr_gguf_bytes(const mr_gguf *g); /* of all members */
size_t mr_gguf_n_kv(const mr_gguf *g);
const mr_gguf_kv *mr_gguf_kv_at(const mr_gguf *g, size_t i);
size_t mr_gguf_n_tensors(const mr_gguf *g);
const mr_gguf_tensor *mr_gguf_tensor_at(const mr_gguf *g, size_t i); /* one array: at(0) + i */

const mr_gguf_kv *mr_gguf_find(const mr_gguf *g, const char *key);             /* NULL: absent */
const mr_gguf_tensor *mr_gguf_find_tensor(const mr_gguf *g, const char *name); /* NULL: absent */

/* Typed reads. Return false when the key is absent; set *err (MR_E_DATA, naming the key) and return
 * false when it has another type or does not fit. Integers of any width are accepted; reals as F32
 * or F64. */
bool mr_gguf_u32(const mr_gguf *g, const char *key, uint32_t *out, mr_err *err);
bool mr_gguf_f32(const mr_gguf *g, const char *key, float *out, mr_err *err);
bool mr_gguf_bool(const mr_gguf *g, const char *key, bool *out, mr_err *err);
bool mr_gguf_str(const mr_gguf *g, const char *key, mr_str *out, mr_err *err);

/* Items of an array of integers or reals, i < kv->count (a U64 above INT64_MAX gives INT64_MAX).
 * Also reads a scalar (i = 0). Other types and indices give 0. */
int64_t mr_gguf_item_int(const mr_gguf_kv *kv, uint64_t i);
double mr_gguf_item_real(const mr_gguf_kv *kv, uint64_t i);

/* Walks an array of strings in order: start with *cursor = 0, call count times. */
mr_str mr_gguf_item_str(const mr_gguf_kv *kv, uint64_t *cursor);

/* A name from a file in printable ASCII, cut to cap (at least 8) with "...": for messages. Returns
 * buf. */
const char *mr_gguf_show(mr_str s, char *buf, size_t cap);

/* Block of a tensor type: elements and bytes. False: no such type. */
bool mr_gguf_block(int dtype, int *elements, int *bytes);

/* xxh3-128 of the whole file(s) as 32 hex digits and a NUL: the model's digest. Reads all of it. */
mr_code mr_gguf_digest(const mr_gguf *g, char out[33], mr_err *err);

#endif
