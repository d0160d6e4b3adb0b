#include "io/gguf_write.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include "io/durable.h"
#include "io/mem.h"
#include "io/sys.h"
#include "io/text.h"

#define ALIGN 32 /* the format's default */

typedef struct tensor {
  uint64_t offset, bytes; /* in the data section */
} tensor;

struct mr_gguf_writer {
  char *path, *temp; /* owned */
  int fd;            /* -1: closed */
  mr_text kv, info;  /* the header's two parts as they will be written */
  uint64_t n_kv;
  tensor *tensors; /* owned */
  size_t n_tensors, cap_tensors;
  bool bad;            /* a tensor that the format has not */
  uint64_t data_at;    /* of the data section in the file; 0: not begun */
  uint64_t data_bytes; /* of the data section */
  size_t current;      /* tensor whose bytes come next */
  uint64_t written;    /* of it */
};

static void put_u32(mr_text *t, uint32_t v) {
  mr_text_add(t, &v, sizeof v);
}

static void put_u64(mr_text *t, uint64_t v) {
  mr_text_add(t, &v, sizeof v);
}

static void put_str(mr_text *t, const char *s, size_t len) {
  put_u64(t, len);
  mr_text_add(t, s, len);
}

static uint64_t aligned(uint64_t n) {
  return (n + ALIGN - 1) / ALIGN * ALIGN;
}

static void key(mr_gguf_writer *w, const char *name, mr_gguf_type type) {
  put_str(&w->kv, name, strlen(name));
  put_u32(&w->kv, (uint32_t)type);
  w->n_kv++;
}

mr_code mr_gguf_write_open(mr_gguf_writer **out, const char *path, mr_err *err) {
  size_t n = strlen(path);
  *out = NULL;
  mr_gguf_writer *w = mr_mem_alloc(1, sizeof *w);
  if (!w)
    return mr_err_at(err, MR_E_NOMEM, path, 0, -1, "no memory");
  w->fd = -1;
  w->path = mr_mem_copy(path, n);
  w->temp = mr_mem_alloc(n + 5, 1);
  if (!w->path || !w->temp) {
    mr_gguf_write_free(w);
    return mr_err_at(err, MR_E_NOMEM, path, 0, -1, "no memory");
  }
  snprintf(w->temp, n + 5, "%s.tmp", path);
  w->fd = mr_sys_now->open(w->temp, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (w->fd < 0) {
    mr_code rc = mr_err_errno(err, MR_E_CANTCREATE, w->temp, "cannot create");
    mr_gguf_write_free(w);
    return rc;
  }
  *out = w;
  return MR_OK;
}

void mr_gguf_write_free(mr_gguf_writer *w) {
  if (!w)
    return;
  if (w->fd >= 0) {
    mr_sys_now->close(w->fd);
    mr_sys_now->unlink(w->temp);
  }
  mr_text_free(&w->kv);
  mr_text_free(&w->info);
  mr_mem_free(w->tensors);
  mr_mem_free(w->path);
  mr_mem_free(w->temp);
  mr_mem_free(w);
}

const char *mr_gguf_write_path(const mr_gguf_writer *w) {
  return w->temp;
}

void mr_gguf_write_str(mr_gguf_writer *w, const char *name, const char *s, size_t len) {
  key(w, name, MR_GGUF_STRING);
  put_str(&w->kv, s, len);
}

void mr_gguf_write_u32(mr_gguf_writer *w, const char *name, uint32_t v) {
  key(w, name, MR_GGUF_U32);
  put_u32(&w->kv, v);
}

void mr_gguf_write_f32(mr_gguf_writer *w, const char *name, float v) {
  key(w, name, MR_GGUF_F32);
  mr_text_add(&w->kv, &v, sizeof v);
}

void mr_gguf_write_bool(mr_gguf_writer *w, const char *name, bool v) {
  key(w, name, MR_GGUF_BOOL);
  mr_text_addc(&w->kv, v ? 1 : 0);
}

void mr_gguf_write_copy(mr_gguf_writer *w, const mr_gguf_kv *kv) {
  put_str(&w->kv, kv->key.s, kv->key.len);
  put_u32(&w->kv, (uint32_t)kv->type);
  w->n_kv++;
  if (kv->type == MR_GGUF_STRING)
    put_u64(&w->kv, kv->bytes);
  if (kv->type == MR_GGUF_ARRAY) {
    put_u32(&w->kv, (uint32_t)kv->item);
    put_u64(&w->kv, kv->count);
  }
  mr_text_add(&w->kv, kv->data, (size_t)kv->bytes);
}

void mr_gguf_write_array(mr_gguf_writer *w, const char *name, mr_gguf_type item, uint64_t count) {
  key(w, name, MR_GGUF_ARRAY);
  put_u32(&w->kv, (uint32_t)item);
  put_u64(&w->kv, count);
}

void mr_gguf_write_item_str(mr_gguf_writer *w, const char *s, size_t len) {
  put_str(&w->kv, s, len);
}

void mr_gguf_write_item_i32(mr_gguf_writer *w, int32_t v) {
  mr_text_add(&w->kv, &v, sizeof v);
}

void mr_gguf_write_item_f32(mr_gguf_writer *w, float v) {
  mr_text_add(&w->kv, &v, sizeof v);
}

/* Bytes of the tensor; 0: the format has no such one. */
static uint64_t size_of(int dtype, int n_dims, const int64_t *dims) {
  int block = 0, bytes = 0;
  uint64_t n = 1;
  if (!mr_gguf_block(dtype, &block, &bytes) || n_dims < 1 || n_dims > 4 || dims[0] % block)
    return 0;
  for (int i = 0; i < n_dims; i++) {
    if (dims[i] < 1 || n > (uint64_t)INT64_MAX / 512 / (uint64_t)dims[i])
      return 0;
    n *= (uint64_t)dims[i];
  }
  return n / (uint64_t)block * (uint64_t)bytes;
}

bool mr_gguf_write_tensor(mr_gguf_writer *w, const char *name, int dtype, int n_dims,
                          const int64_t *dims) {
  uint64_t bytes = size_of(dtype, n_dims, dims);
  size_t len = strlen(name);
  if (!bytes || len < 1 || len >= MR_GGUF_NAME) {
    w->bad = true;
    return false;
  }
  if (!mr_mem_grow((void **)&w->tensors, &w->cap_tensors, w->n_tensors + 1, sizeof *w->tensors)) {
    w->info.failed = true;
    return true;
  }
  w->tensors[w->n_tensors++] = (tensor){w->data_bytes, bytes};
  put_str(&w->info, name, len);
  put_u32(&w->info, (uint32_t)n_dims);
  for (int i = 0; i < n_dims; i++)
    put_u64(&w->info, (uint64_t)dims[i]);
  put_u32(&w->info, (uint32_t)dtype);
  put_u64(&w->info, w->data_bytes);
  w->data_bytes += aligned(bytes);
  return true;
}

mr_code mr_gguf_write_begin(mr_gguf_writer *w, mr_err *err) {
  static const uint32_t magic = 0x46554747, version = 3;
  mr_text head = {0};
  if (w->bad)
    return mr_err_at(err, MR_E_INTERNAL, w->path, 0, -1,
                     "a tensor has a name, type or shape that the format has not");
  put_u32(&head, magic);
  put_u32(&head, version);
  put_u64(&head, w->n_tensors);
  put_u64(&head, w->n_kv);
  if (w->kv.len)
    mr_text_add(&head, w->kv.data, w->kv.len);
  if (w->info.len)
    mr_text_add(&head, w->info.data, w->info.len);
  w->data_at = aligned(head.len);
  while (head.len < w->data_at && !head.failed)
    mr_text_addc(&head, 0);
  mr_code rc = MR_OK;
  if (head.failed || w->kv.failed || w->info.failed)
    rc = mr_err_at(err, MR_E_NOMEM, w->path, 0, -1, "no memory for the file's header");
  else if (mr_sys_write_full(w->fd, head.data, head.len) ||
           mr_sys_now->ftruncate(w->fd, (off_t)(w->data_at + w->data_bytes)))
    rc = mr_err_errno(err, MR_E_IO, w->temp, "cannot write");
  mr_text_free(&head);
  return rc;
}

uint64_t mr_gguf_write_bytes(const mr_gguf_writer *w) {
  return w->data_at + w->data_bytes;
}

mr_code mr_gguf_write_data(mr_gguf_writer *w, const void *bytes, size_t n, mr_err *err) {
  const tensor *t = w->current < w->n_tensors ? &w->tensors[w->current] : NULL;
  if (!t || n > t->bytes - w->written)
    return mr_err_at(err, MR_E_INTERNAL, w->path, 0, -1, "more bytes than the tensors have");
  if (mr_sys_pwrite_full(w->fd, bytes, n, (off_t)(w->data_at + t->offset + w->written)))
    return mr_err_errno(err, MR_E_IO, w->temp, "cannot write");
  w->written += n;
  if (w->written == t->bytes) {
    w->current++;
    w->written = 0;
  }
  return MR_OK;
}

mr_code mr_gguf_write_finish(mr_gguf_writer *w, mr_err *err) {
  if (w->current < w->n_tensors)
    return mr_err_at(err, MR_E_INTERNAL, w->path, 0, -1, "tensor %zu of %zu was not written",
                     w->current + 1, w->n_tensors);
  mr_code rc = mr_durable_sync(w->fd, w->temp, err);
  int fd = w->fd;
  w->fd = -1;
  if (mr_sys_now->close(fd) && !rc)
    rc = mr_err_errno(err, MR_E_IO, w->temp, "cannot close");
  if (!rc)
    rc = mr_durable_rename(w->temp, w->path, err);
  if (rc)
    mr_sys_now->unlink(w->temp);
  return rc;
}
