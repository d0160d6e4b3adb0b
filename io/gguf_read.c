/* gguf_read.c: names, typed reads and the digest of an open GGUF file. */
#include <math.h>
#include <string.h>
#include <xxhash.h>

#include "io/gguf.h"
#include "io/gguf_file.h"
#include "io/hash.h"
#include "io/mem.h"
#include "io/sys.h"

#define N_TYPES 13

static const struct {
  const char *name;
  int width;
} types[N_TYPES] = {{"an 8-bit number", 1}, {"an 8-bit number", 1}, {"a 16-bit number", 2},
                    {"a 16-bit number", 2}, {"a 32-bit number", 4}, {"a 32-bit number", 4},
                    {"a float32", 4},       {"a bool", 1},          {"a string", 0},
                    {"an array", 0},        {"a 64-bit number", 8}, {"a 64-bit number", 8},
                    {"a float64", 8}};

int mr_gguf_width(int type) {
  return type >= 0 && type < N_TYPES ? types[type].width : 0;
}

static const mr_str *name_of(const void *items, size_t stride, size_t i) {
  return (const mr_str *)((const char *)items + i * stride);
}

static bool equal(const mr_str *a, const char *s, size_t len) {
  return a->len == len && memcmp(a->s, s, len) == 0;
}

/* The slot that holds the name, or the empty one where it would go. */
static size_t probe(const mr_gguf_index *x, const void *items, size_t stride, const char *s,
                    size_t len) {
  size_t i = (size_t)XXH3_64bits_withSeed(s, len, x->seed) & x->mask;
  while (x->slots[i] && !equal(name_of(items, stride, x->slots[i] - 1), s, len))
    i = (i + 1) & x->mask;
  return i;
}

size_t mr_gguf_index_build(mr_gguf_index *x, const void *items, size_t stride, size_t n) {
  size_t size = 8;
  while (size < n * 2)
    size *= 2;
  x->slots = n < UINT32_MAX ? mr_mem_alloc(size, sizeof *x->slots) : NULL;
  if (!x->slots)
    return n;
  x->mask = size - 1;
  x->seed = (uint64_t)mr_sys_now->clock_ns() ^ (uintptr_t)x;
  for (size_t i = 0; i < n; i++) {
    const mr_str *name = name_of(items, stride, i);
    size_t at = probe(x, items, stride, name->s, name->len);
    if (x->slots[at])
      return i;
    x->slots[at] = (uint32_t)i + 1;
  }
  return SIZE_MAX;
}

const void *mr_gguf_index_find(const mr_gguf_index *x, const void *items, size_t stride,
                               const char *name, size_t len) {
  if (!x->slots)
    return NULL;
  uint32_t slot = x->slots[probe(x, items, stride, name, len)];
  return slot ? (const char *)items + (slot - 1) * stride : NULL;
}

const char *mr_gguf_path(const mr_gguf *g) {
  return g->files[0].path;
}

int mr_gguf_version(const mr_gguf *g) {
  return g->version;
}

int mr_gguf_files(const mr_gguf *g) {
  return (int)g->n_files;
}

uint64_t mr_gguf_bytes(const mr_gguf *g) {
  uint64_t n = 0;
  for (size_t i = 0; i < g->n_files; i++)
    n += g->files[i].bytes;
  return n;
}

size_t mr_gguf_n_kv(const mr_gguf *g) {
  return g->meta.n;
}

const mr_gguf_kv *mr_gguf_kv_at(const mr_gguf *g, size_t i) {
  return &g->meta.kv[i];
}

size_t mr_gguf_n_tensors(const mr_gguf *g) {
  return g->n_tensors;
}

const mr_gguf_tensor *mr_gguf_tensor_at(const mr_gguf *g, size_t i) {
  return &g->tensors[i];
}

const mr_gguf_kv *mr_gguf_set_find(const mr_gguf_set *set, const char *key) {
  return mr_gguf_index_find(&set->index, set->kv, sizeof *set->kv, key, strlen(key));
}

const mr_gguf_kv *mr_gguf_find(const mr_gguf *g, const char *key) {
  return mr_gguf_set_find(&g->meta, key);
}

const mr_gguf_tensor *mr_gguf_find_tensor(const mr_gguf *g, const char *name) {
  return mr_gguf_index_find(&g->names, g->tensors, sizeof *g->tensors, name, strlen(name));
}

static bool is_int(mr_gguf_type t) {
  return mr_gguf_width((int)t) && t != MR_GGUF_F32 && t != MR_GGUF_F64 && t != MR_GGUF_BOOL;
}

static const uint8_t *item_at(const mr_gguf_kv *kv, uint64_t i) {
  return i < kv->count ? kv->data + i * (uint64_t)mr_gguf_width((int)kv->item) : NULL;
}

int64_t mr_gguf_item_int(const mr_gguf_kv *kv, uint64_t i) {
  const uint8_t *p = item_at(kv, i);
  uint64_t u = 0;
  if (!p || !(is_int(kv->item) || kv->item == MR_GGUF_BOOL))
    return 0;
  memcpy(&u, p, (size_t)mr_gguf_width((int)kv->item));
  switch (kv->item) {
  case MR_GGUF_I8:
    return (int8_t)u;
  case MR_GGUF_I16:
    return (int16_t)u;
  case MR_GGUF_I32:
    return (int32_t)u;
  case MR_GGUF_U64:
    return u > INT64_MAX ? INT64_MAX : (int64_t)u;
  default:
    return (int64_t)u;
  }
}

double mr_gguf_item_real(const mr_gguf_kv *kv, uint64_t i) {
  const uint8_t *p = item_at(kv, i);
  float f;
  double d;
  if (!p || (kv->item != MR_GGUF_F32 && kv->item != MR_GGUF_F64))
    return (double)mr_gguf_item_int(kv, i);
  if (kv->item == MR_GGUF_F64) {
    memcpy(&d, p, sizeof d);
    return d;
  }
  memcpy(&f, p, sizeof f);
  return (double)f;
}

mr_str mr_gguf_item_str(const mr_gguf_kv *kv, uint64_t *cursor) {
  mr_str none = {NULL, 0};
  uint64_t n;
  if (kv->type != MR_GGUF_ARRAY || kv->item != MR_GGUF_STRING || kv->bytes < 8 ||
      *cursor > kv->bytes - 8)
    return none;
  memcpy(&n, kv->data + *cursor, 8);
  if (n > kv->bytes - 8 - *cursor)
    return none;
  mr_str s = {(const char *)kv->data + *cursor + 8, (size_t)n};
  *cursor += 8 + n;
  return s;
}

static bool refuse(const mr_gguf_kv *kv, const mr_gguf_member *file, const char *key,
                   const char *need, mr_err *err) {
  mr_err_at(err, MR_E_DATA, file->path, 0, kv->data - file->base, "key %s is %s; %s is needed", key,
            types[kv->type].name, need);
  return false;
}

bool mr_gguf_set_u32(const mr_gguf_set *set, const mr_gguf_member *file, const char *key,
                     uint32_t *out, mr_err *err) {
  const mr_gguf_kv *kv = mr_gguf_set_find(set, key);
  if (!kv)
    return false;
  if (!is_int(kv->type))
    return refuse(kv, file, key, "a whole number", err);
  int64_t v = mr_gguf_item_int(kv, 0);
  if (v < 0 || v > UINT32_MAX) {
    mr_err_at(err, MR_E_DATA, file->path, 0, kv->data - file->base,
              "key %s is %lld; 0 to 4294967295 is allowed", key, (long long)v);
    return false;
  }
  *out = (uint32_t)v;
  return true;
}

bool mr_gguf_u32(const mr_gguf *g, const char *key, uint32_t *out, mr_err *err) {
  return mr_gguf_set_u32(&g->meta, &g->files[0], key, out, err);
}

bool mr_gguf_f32(const mr_gguf *g, const char *key, float *out, mr_err *err) {
  const mr_gguf_kv *kv = mr_gguf_find(g, key);
  if (!kv)
    return false;
  if (kv->type != MR_GGUF_F32 && kv->type != MR_GGUF_F64)
    return refuse(kv, &g->files[0], key, "a real number", err);
  double v = mr_gguf_item_real(kv, 0);
  if (isfinite(v) && (v > 3.4028234e38 || v < -3.4028234e38)) {
    mr_err_at(err, MR_E_DATA, g->files[0].path, 0, kv->data - g->files[0].base,
              "key %s is %g, too large", key, v);
    return false;
  }
  *out = (float)v;
  return true;
}

bool mr_gguf_bool(const mr_gguf *g, const char *key, bool *out, mr_err *err) {
  const mr_gguf_kv *kv = mr_gguf_find(g, key);
  if (!kv)
    return false;
  if (kv->type != MR_GGUF_BOOL)
    return refuse(kv, &g->files[0], key, "a bool", err);
  *out = kv->data[0] != 0;
  return true;
}

bool mr_gguf_str(const mr_gguf *g, const char *key, mr_str *out, mr_err *err) {
  const mr_gguf_kv *kv = mr_gguf_find(g, key);
  if (!kv)
    return false;
  if (kv->type != MR_GGUF_STRING)
    return refuse(kv, &g->files[0], key, "a string", err);
  *out = (mr_str){(const char *)kv->data, (size_t)kv->bytes};
  return true;
}

const char *mr_gguf_show(mr_str s, char *buf, size_t cap) {
  size_t n = 0;
  for (size_t i = 0; i < s.len; i++) {
    unsigned char c = (unsigned char)s.s[i];
    bool plain = c >= 0x20 && c < 0x7f;
    if (n + (plain ? 1 : 4) + 4 > cap) {
      memcpy(buf + n, "...", 3);
      n += 3;
      break;
    }
    if (plain)
      buf[n++] = (char)c;
    else
      n += (size_t)snprintf(buf + n, cap - n, "\\x%02x", c);
  }
  buf[n] = '\0';
  return buf;
}

mr_code mr_gguf_digest(const mr_gguf *g, char out[33], mr_err *err) {
  mr_hasher *h = mr_hasher_new();
  if (!h)
    return mr_err_set(err, MR_E_NOMEM, "no memory for a digest");
  for (size_t i = 0; i < g->n_files; i++)
    mr_hasher_add(h, g->files[i].base, (size_t)g->files[i].bytes);
  mr_hasher_hex(h, out);
  mr_hasher_free(h);
  return MR_OK;
}
