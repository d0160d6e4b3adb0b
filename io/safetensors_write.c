#include "io/safetensors_write.h"

#include <fcntl.h>
#include <string.h>

#include "io/durable.h"
#include "io/json.h"
#include "io/mem.h"
#include "io/sys.h"

struct mr_st_writer {
  char *path; /* owned */
  int fd;     /* -1: closed */
  json_t *header;
  uint64_t head, bytes, written; /* of the header, of the tensors */
  bool bad, no_memory;
};

/* The name of a type, NULL: the format has none. */
static const char *name_of(int dtype, int *bytes) {
  static const struct {
    const char *name;
    int dtype, bytes;
  } all[] = {{"F32", 0, 4},  {"F16", 1, 2},  {"BF16", 30, 2}, {"F64", 28, 8},     {"I8", 24, 1},
             {"I16", 25, 2}, {"I32", 26, 4}, {"I64", 27, 8},  {"F8_E4M3", 64, 1}, {"U8", 65, 1}};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    if (all[i].dtype == dtype) {
      *bytes = all[i].bytes;
      return all[i].name;
    }
  return NULL;
}

mr_code mr_st_write_open(mr_st_writer **out, const char *path, mr_err *err) {
  *out = NULL;
  mr_st_writer *w = mr_mem_alloc(1, sizeof *w);
  if (!w)
    return mr_err_at(err, MR_E_NOMEM, path, 0, -1, "no memory");
  w->fd = -1;
  w->path = mr_mem_copy(path, strlen(path));
  w->header = json_object();
  if (!w->path || !w->header) {
    mr_st_write_free(w);
    return mr_err_at(err, MR_E_NOMEM, path, 0, -1, "no memory");
  }
  w->fd = mr_sys_now->open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (w->fd < 0) {
    mr_code rc = mr_err_errno(err, MR_E_CANTCREATE, path, "cannot create");
    mr_st_write_free(w);
    return rc;
  }
  *out = w;
  return MR_OK;
}

void mr_st_write_free(mr_st_writer *w) {
  if (!w)
    return;
  if (w->fd >= 0)
    mr_sys_now->close(w->fd);
  json_decref(w->header);
  mr_mem_free(w->path);
  mr_mem_free(w);
}

void mr_st_write_tensor(mr_st_writer *w, const char *name, int dtype, int n_dims,
                        const int64_t *dims) {
  int size = 0;
  const char *type = name_of(dtype, &size);
  uint64_t n = (uint64_t)size;
  json_t *shape = json_array();
  for (int i = n_dims - 1; i >= 0; i--) {
    w->bad |= dims[i] < 0 || (dims[i] > 0 && n > (uint64_t)INT64_MAX / (uint64_t)dims[i]);
    n *= (uint64_t)dims[i];
    if (json_array_append_new(shape, json_integer(dims[i])))
      w->no_memory = true;
  }
  w->bad |= !type || w->bytes > INT64_MAX - n || json_object_get(w->header, name);
  json_t *entry = json_pack("{s:s, s:o, s:[I, I]}", "dtype", type ? type : "", "shape", shape,
                            "data_offsets", (json_int_t)w->bytes, (json_int_t)(w->bytes + n));
  if (!entry || json_object_set_new(w->header, name, entry))
    w->no_memory = true;
  w->bytes += n;
}

mr_code mr_st_write_begin(mr_st_writer *w, mr_err *err) {
  mr_text head = {0};
  uint64_t len = 0;
  if (w->bad)
    return mr_err_at(err, MR_E_INTERNAL, w->path, 0, -1,
                     "a tensor has a name, type or shape that the format has not");
  mr_text_add(&head, &len, sizeof len);
  char *json = w->no_memory ? NULL : mr_json_dumps(w->header, JSON_COMPACT);
  if (json)
    mr_text_adds(&head, json);
  mr_mem_free(json);
  while (head.len % 8 && !head.failed)
    mr_text_addc(&head, ' ');
  if (!json || head.failed) {
    mr_text_free(&head);
    return mr_err_at(err, MR_E_NOMEM, w->path, 0, -1, "no memory for the file's header");
  }
  len = head.len - sizeof len;
  memcpy(head.data, &len, sizeof len);
  w->head = head.len;
  int failed = mr_sys_write_full(w->fd, head.data, head.len);
  mr_text_free(&head);
  return failed ? mr_err_errno(err, MR_E_IO, w->path, "cannot write") : MR_OK;
}

mr_code mr_st_write_data(mr_st_writer *w, const void *bytes, size_t n, mr_err *err) {
  if (n > w->bytes - w->written)
    return mr_err_at(err, MR_E_INTERNAL, w->path, 0, -1, "more bytes than the tensors have");
  w->written += n;
  return mr_sys_write_full(w->fd, bytes, n) ? mr_err_errno(err, MR_E_IO, w->path, "cannot write")
                                            : MR_OK;
}

mr_code mr_st_write_finish(mr_st_writer *w, mr_err *err) {
  if (w->written < w->bytes)
    return mr_err_at(err, MR_E_INTERNAL, w->path, 0, -1, "the tensors' bytes are not complete");
  mr_code rc = mr_durable_sync(w->fd, w->path, err);
  int fd = w->fd;
  w->fd = -1;
  if (mr_sys_now->close(fd) && !rc)
    rc = mr_err_errno(err, MR_E_IO, w->path, "cannot close");
  return rc;
}

uint64_t mr_st_write_bytes(const mr_st_writer *w) {
  return w->head + w->bytes;
}
