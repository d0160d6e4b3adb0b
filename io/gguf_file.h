/* gguf_file.h: private to io/gguf*.c: the open file as the parser leaves it. */
#ifndef MR_IO_GGUF_FILE_H
#define MR_IO_GGUF_FILE_H

#include "io/gguf.h"

/* Hash index over an array of structs that begin with their name (mr_str). */
typedef struct mr_gguf_index {
  uint32_t *slots; /* item + 1; 0: empty */
  size_t mask;
  uint64_t seed; /* so that a file cannot be made to collide */
} mr_gguf_index;

typedef struct mr_gguf_set { /* the metadata of one member */
  mr_gguf_kv *kv;
  size_t n, cap;
  mr_gguf_index index;
} mr_gguf_set;

typedef struct mr_gguf_member {
  char *path; /* owned */
  const uint8_t *base;
  uint64_t bytes;
} mr_gguf_member;

struct mr_gguf {
  int version;
  mr_gguf_member *files;
  size_t n_files, cap_files;
  mr_gguf_set meta; /* of the first member */
  mr_gguf_tensor *tensors;
  size_t n_tensors, cap_tensors;
  mr_gguf_index names;
};

/* Builds the index; SIZE_MAX: done; n: out of memory; else the first item whose name is taken. */
size_t mr_gguf_index_build(mr_gguf_index *x, const void *items, size_t stride, size_t n);
const void *mr_gguf_index_find(const mr_gguf_index *x, const void *items, size_t stride,
                               const char *name, size_t len);

const mr_gguf_kv *mr_gguf_set_find(const mr_gguf_set *set, const char *key);
/* The typed read behind mr_gguf_u32, on the metadata of any member. */
bool mr_gguf_set_u32(const mr_gguf_set *set, const mr_gguf_member *file, const char *key,
                     uint32_t *out, mr_err *err);

/* Bytes of a scalar of this type; 0: STRING, ARRAY or no type. */
int mr_gguf_width(int type);

#endif
