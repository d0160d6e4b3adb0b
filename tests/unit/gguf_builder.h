/* gguf_builder.h: writes small GGUF files for tests, good ones and broken ones.
 *
 *     build b = {0};
 *     build_str(&b, "general.architecture", "llama");
 *     build_u32(&b, "llama.block_count", 1);
 *     build_tensor(&b, "output_norm.weight", MR_F32, 32, 0, bytes);      0: one dimension
 *     const char *path = build_file(&b);                    in a temporary folder; frees b
 *     ... build_remove(path);
 */
#ifndef MR_TESTS_GGUF_BUILDER_H
#define MR_TESTS_GGUF_BUILDER_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "io/gguf.h"
#include "io/text.h"
#include "kernels/dtype.h"

typedef struct build {
  mr_text kv, infos, data;
  uint64_t n_kv, n_tensors;
  uint32_t version; /* 0: 3 */
  uint32_t align;   /* 0: 32 */
} build;

static inline void put(mr_text *t, const void *p, size_t n) {
  mr_text_add(t, p, n);
}

static inline void put_u32(mr_text *t, uint32_t v) {
  put(t, &v, 4);
}

static inline void put_u64(mr_text *t, uint64_t v) {
  put(t, &v, 8);
}

static inline void put_str(mr_text *t, const char *s, size_t n) {
  put_u64(t, n);
  put(t, s, n);
}

static inline void build_key(build *b, const char *key, uint32_t type) {
  put_str(&b->kv, key, strlen(key));
  put_u32(&b->kv, type);
  b->n_kv++;
}

static inline void build_raw(build *b, const char *key, uint32_t type, const void *p, size_t n) {
  build_key(b, key, type);
  put(&b->kv, p, n);
}

static inline void build_u32(build *b, const char *key, uint32_t v) {
  build_raw(b, key, MR_GGUF_U32, &v, 4);
}

static inline void build_f32(build *b, const char *key, float v) {
  build_raw(b, key, MR_GGUF_F32, &v, 4);
}

static inline void build_str(build *b, const char *key, const char *s) {
  build_key(b, key, MR_GGUF_STRING);
  put_str(&b->kv, s, strlen(s));
}

static inline void build_array(build *b, const char *key, uint32_t item, uint64_t count,
                               const void *p, size_t n) {
  build_key(b, key, MR_GGUF_ARRAY);
  put_u32(&b->kv, item);
  put_u64(&b->kv, count);
  put(&b->kv, p, n);
}

static inline void build_pad(mr_text *t, size_t align) {
  while (t->len % align)
    mr_text_addc(t, 0);
}

static inline void build_info(build *b, const char *name, uint32_t n_dims, const uint64_t *dims,
                              uint32_t type, uint64_t offset) {
  put_str(&b->infos, name, strlen(name));
  put_u32(&b->infos, n_dims);
  for (uint32_t i = 0; i < n_dims && i < 4; i++)
    put_u64(&b->infos, dims[i]);
  put_u32(&b->infos, type);
  put_u64(&b->infos, offset);
  b->n_tensors++;
}

/* A tensor of `cols` values a row and `rows` rows (0: a vector); src NULL: a pattern of bytes. */
static inline void build_tensor(build *b, const char *name, int type, uint64_t cols, uint64_t rows,
                                const void *src) {
  uint64_t dims[2] = {cols, rows}, n = mr_dtype_bytes(type, cols * (rows ? rows : 1));
  build_pad(&b->data, b->align ? b->align : 32);
  build_info(b, name, rows ? 2 : 1, dims, (uint32_t)type, b->data.len);
  for (uint64_t i = 0; !src && i < n; i++)
    mr_text_addc(&b->data, (char)((i * 31 + b->data.len) & 0x3b));
  if (src)
    put(&b->data, src, n);
}

static inline mr_text build_bytes(build *b) {
  mr_text t = {0};
  put(&t, "GGUF", 4);
  put_u32(&t, b->version ? b->version : 3);
  put_u64(&t, b->n_tensors);
  put_u64(&t, b->n_kv);
  put(&t, b->kv.data, b->kv.len);
  put(&t, b->infos.data, b->infos.len);
  if (b->n_tensors)
    build_pad(&t, b->align ? b->align : 32);
  put(&t, b->data.data, b->data.len);
  mr_text_free(&b->kv);
  mr_text_free(&b->infos);
  mr_text_free(&b->data);
  *b = (build){0};
  return t;
}

static char build_dir[64]; /* empty: not made yet, or removed again */

static inline const char *build_folder(void) {
  if (!build_dir[0]) {
    snprintf(build_dir, sizeof build_dir, "/tmp/mr-test-gguf-XXXXXX");
    if (!mkdtemp(build_dir))
      abort();
  }
  return build_dir;
}

static inline const char *build_path(const char *name) {
  static char path[256];
  snprintf(path, sizeof path, "%s/%s", build_folder(), name);
  return path;
}

static inline const char *build_write(const char *name, const void *p, size_t n) {
  const char *path = build_path(name);
  FILE *f = fopen(path, "wb");
  if (!f || fwrite(p, 1, n, f) != n || fclose(f))
    abort();
  return path;
}

static inline const char *build_named(build *b, const char *name) {
  mr_text t = build_bytes(b);
  const char *path = build_write(name, t.data, t.len);
  mr_text_free(&t);
  return path;
}

static inline const char *build_file(build *b) {
  return build_named(b, "model.gguf");
}

/* Removes the file, and the folder with the last one. */
static inline void build_remove(const char *path) {
  unlink(path);
  if (rmdir(build_dir) == 0)
    build_dir[0] = '\0';
}

/* The metadata of a llama with 1 layer, width 32, 2 heads, 1 key head, feed-forward 64, 8 tokens.
 */
static inline void build_llama_keys(build *b) {
  build_str(b, "general.architecture", "llama");
  build_u32(b, "llama.block_count", 1);
  build_u32(b, "llama.context_length", 16);
  build_u32(b, "llama.embedding_length", 32);
  build_u32(b, "llama.feed_forward_length", 64);
  build_u32(b, "llama.attention.head_count", 2);
  build_u32(b, "llama.attention.head_count_kv", 1);
  build_f32(b, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
}

/* Its tensors, without the one named `leave_out` (may be NULL). */
static inline void build_llama_tensors(build *b, int type, const char *leave_out) {
  static const struct {
    const char *name;
    uint64_t cols, rows;
  } all[] = {{"token_embd.weight", 32, 8},         {"output_norm.weight", 32, 0},
             {"blk.0.attn_norm.weight", 32, 0},    {"blk.0.attn_q.weight", 32, 32},
             {"blk.0.attn_k.weight", 32, 16},      {"blk.0.attn_v.weight", 32, 16},
             {"blk.0.attn_output.weight", 32, 32}, {"blk.0.ffn_norm.weight", 32, 0},
             {"blk.0.ffn_gate.weight", 32, 64},    {"blk.0.ffn_up.weight", 32, 64},
             {"blk.0.ffn_down.weight", 64, 32}};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    if (!leave_out || strcmp(all[i].name, leave_out))
      build_tensor(b, all[i].name, all[i].rows ? type : MR_F32, all[i].cols, all[i].rows, NULL);
}

#endif
