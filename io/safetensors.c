#include "io/safetensors.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "io/json.h"
#include "io/mem.h"
#include "io/sys.h"

#define MAX_HEADER (100u << 20) /* bytes; the format's own limit */
#define MAX_INDEX (64u << 20)
#define PATH 4096

typedef struct shard {
  char *path; /* owned */
  const uint8_t *base;
  uint64_t bytes;
  json_t *header; /* the names of its tensors live here */
} shard;

struct mr_safetensors {
  shard *files;
  size_t n_files, cap_files;
  mr_gguf_tensor *tensors;
  size_t n, cap;
  json_t *names; /* name -> position in tensors */
};

/* The numbers are kernels/dtype's; a test holds them equal. */
static const struct dtype {
  const char *name;
  int dtype, bytes;
} dtypes[] = {{"F32", 0, 4},  {"F16", 1, 2},  {"BF16", 30, 2},    {"F64", 28, 8}, {"I8", 24, 1},
              {"I16", 25, 2}, {"I32", 26, 4}, {"I64", 27, 8},     {"U8", 65, 1},  {"BOOL", 65, 1},
              {"U32", 26, 4}, {"U16", 25, 2}, {"F8_E4M3", 64, 1}, {"U64", 27, 8}};

static mr_code bad(mr_err *err, const shard *f, const char *name, const char *what) {
  char shown[96];
  mr_str s = {name, strlen(name)};
  return mr_err_at(err, MR_E_DATA, f->path, 0, -1, "tensor %s: %s",
                   mr_gguf_show(s, shown, sizeof shown), what);
}

static const struct dtype *type_of(const json_t *v) {
  const char *s = json_string_value(v);
  for (size_t i = 0; s && i < sizeof dtypes / sizeof *dtypes; i++)
    if (strcmp(dtypes[i].name, s) == 0)
      return &dtypes[i];
  return NULL;
}

/* Dims in our order; *bytes: of the tensor. Those beyond the fourth (convolutions over video)
 * become one with it: nothing here reads such tensors. */
static bool read_shape(mr_gguf_tensor *t, const json_t *shape, uint64_t width, uint64_t *bytes) {
  size_t n = json_array_size(shape);
  if (!json_is_array(shape) || n > 8)
    return false;
  *bytes = width;
  t->n_dims = n < 4 ? (int)n : 4;
  for (size_t i = 0; i < 4; i++)
    t->dims[i] = 1;
  for (size_t i = 0; i < n; i++) {
    const json_t *v = json_array_get(shape, i);
    json_int_t d = json_integer_value(v);
    if (!json_is_integer(v) || d < 1 || *bytes > (uint64_t)INT64_MAX / (uint64_t)d)
      return false;
    *bytes *= (uint64_t)d;
    t->dims[n - 1 - i < 3 ? n - 1 - i : 3] *= d;
  }
  return true;
}

static bool read_span(const json_t *v, uint64_t room, uint64_t *from, uint64_t *to) {
  const json_t *a = json_array_get(v, 0), *b = json_array_get(v, 1);
  if (json_array_size(v) != 2 || !json_is_integer(a) || !json_is_integer(b))
    return false;
  json_int_t x = json_integer_value(a), y = json_integer_value(b);
  if (x < 0 || y < x || (uint64_t)y > room)
    return false;
  *from = (uint64_t)x;
  *to = (uint64_t)y;
  return true;
}

static mr_code add_tensor(mr_safetensors *s, const shard *f, uint64_t data, const char *name,
                          const json_t *v, mr_err *err) {
  const struct dtype *type = type_of(json_object_get(v, "dtype"));
  uint64_t bytes, from, to;
  if (!mr_mem_grow((void **)&s->tensors, &s->cap, s->n + 1, sizeof *s->tensors))
    return mr_err_at(err, MR_E_NOMEM, f->path, 0, -1, "no memory for the list of tensors");
  mr_gguf_tensor *t = &s->tensors[s->n];
  *t = (mr_gguf_tensor){.name = {name, strlen(name)}, .file = (int)s->n_files - 1};
  if (!*name)
    return mr_err_at(err, MR_E_DATA, f->path, 0, -1, "a tensor has an empty name");
  if (!type)
    return bad(err, f, name, "its dtype is missing or not supported");
  if (!read_shape(t, json_object_get(v, "shape"), (uint64_t)type->bytes, &bytes))
    return bad(err, f, name, "its shape must be at most 8 whole numbers above 0 and not too large");
  if (!read_span(json_object_get(v, "data_offsets"), f->bytes - data, &from, &to))
    return bad(err, f, name, "its data_offsets are wrong or lie outside the file");
  if (to - from != bytes)
    return bad(err, f, name, "its data_offsets do not fit its shape and dtype");
  t->dtype = type->dtype;
  t->bytes = bytes;
  t->data = f->base + data + from;
  if (json_object_get(s->names, name))
    return bad(err, f, name, "another file has a tensor of this name");
  if (json_object_set_new(s->names, name, json_integer((json_int_t)s->n)))
    return mr_err_at(err, MR_E_NOMEM, f->path, 0, -1, "no memory for the list of tensors");
  s->n++;
  return MR_OK;
}

static int by_data(const void *a, const void *b) {
  const mr_gguf_tensor *const *x = a, *const *y = b;
  return (*x)->data < (*y)->data ? -1 : (*x)->data > (*y)->data;
}

static mr_code check_overlap(const mr_safetensors *s, size_t first, const shard *f, mr_err *err) {
  size_t n = s->n - first;
  const mr_gguf_tensor **order = mr_mem_alloc(n, sizeof *order);
  if (!order)
    return mr_err_at(err, MR_E_NOMEM, f->path, 0, -1, "no memory for the list of tensors");
  for (size_t i = 0; i < n; i++)
    order[i] = &s->tensors[first + i];
  qsort(order, n, sizeof *order, by_data);
  mr_code rc = MR_OK;
  for (size_t i = 1; i < n && !rc; i++)
    if (order[i - 1]->data + order[i - 1]->bytes > order[i]->data)
      rc = bad(err, f, order[i]->name.s, "it overlaps another tensor");
  mr_mem_free(order);
  return rc;
}

static mr_code read_header(mr_safetensors *s, shard *f, mr_err *err) {
  uint64_t len = 0;
  size_t first = s->n;
  for (int i = 7; f->bytes >= 8 && i >= 0; i--)
    len = len << 8 | f->base[i];
  if (f->bytes < 8 || len > f->bytes - 8 || len > MAX_HEADER || len < 2)
    return mr_err_at(err, MR_E_DATA, f->path, 0, 0,
                     "this is no safetensors file: its header would have %llu bytes",
                     (unsigned long long)len);
  f->header = mr_json_parse((const char *)f->base + 8, (size_t)len, NULL, err);
  if (!f->header)
    return mr_err_place(err, f->path, 0, -1), err && err->code ? err->code : MR_E_DATA;
  if (!json_is_object(f->header))
    return mr_err_at(err, MR_E_DATA, f->path, 0, 8, "the header must be an object");
  mr_code rc = MR_OK;
  const char *name;
  json_t *v;
  json_object_foreach(f->header, name, v) {
    if (rc == MR_OK && strcmp(name, "__metadata__"))
      rc = add_tensor(s, f, 8 + len, name, v, err);
  }
  return rc ? rc : check_overlap(s, first, f, err);
}

/* O_NONBLOCK: a FIFO is refused, not waited for. */
static mr_code add_file(mr_safetensors *s, const char *path, mr_err *err) {
  struct stat st;
  void *p = MAP_FAILED;
  if (!mr_mem_grow((void **)&s->files, &s->cap_files, s->n_files + 1, sizeof *s->files))
    return mr_err_at(err, MR_E_NOMEM, path, 0, -1, "no memory");
  int fd = mr_sys_now->open(path, O_RDONLY | O_NONBLOCK, 0);
  if (fd < 0)
    return mr_err_errno(err, MR_E_NOINPUT, path, "cannot open the weights");
  mr_code rc = MR_OK;
  if (mr_sys_now->fstat(fd, &st) < 0)
    rc = mr_err_errno(err, MR_E_IO, path, "cannot read the weights");
  else if (!S_ISREG(st.st_mode) || st.st_size < 8)
    rc = mr_err_at(err, MR_E_DATA, path, 0, 0, "this is no safetensors file");
  else if ((p = mr_sys_now->mmap((size_t)st.st_size, fd, 0)) == MAP_FAILED)
    rc = mr_err_errno(err, MR_E_IO, path, "cannot map the file into memory");
  mr_sys_now->close(fd);
  if (rc)
    return rc;
  shard *f = &s->files[s->n_files++];
  *f = (shard){mr_mem_copy(path, strlen(path)), p, (uint64_t)st.st_size, NULL};
  return f->path ? read_header(s, f, err) : mr_err_at(err, MR_E_NOMEM, path, 0, -1, "no memory");
}

/* A plain name in the same directory. */
static bool plain_name(const char *name) {
  return name && *name && *name != '.' && !strchr(name, '/');
}

/* Opens each shard that the index names once, in the order of the names. */
static mr_code add_shards(mr_safetensors *s, const char *dir, const char *path, mr_err *err) {
  json_t *index = mr_json_read(path, MAX_INDEX, err), *seen = json_object();
  const json_t *map = json_object_get(index, "weight_map");
  char file[PATH];
  const char *name;
  json_t *v;
  mr_code rc = !index ? (err && err->code ? err->code : MR_E_DATA) : MR_OK;
  if (!rc && (!json_is_object(map) || !seen))
    rc = mr_err_at(err, MR_E_DATA, path, 0, -1, "weight_map is missing");
  json_object_foreach((json_t *)map, name, v) {
    const char *shard_name = json_string_value(v);
    if (rc || (shard_name && json_object_get(seen, shard_name)))
      continue;
    if (!plain_name(shard_name))
      rc = mr_err_at(err, MR_E_DATA, path, 0, -1, "weight_map names a file outside the directory");
    else if (snprintf(file, sizeof file, "%s/%s", dir, shard_name) >= (int)sizeof file)
      rc = mr_err_at(err, MR_E_DATA, path, 0, -1, "the name of a shard is too long");
    else if (json_object_set_new(seen, shard_name, json_true()))
      rc = mr_err_at(err, MR_E_NOMEM, path, 0, -1, "no memory");
    else
      rc = add_file(s, file, err);
  }
  json_object_foreach((json_t *)map, name, v) {
    if (!rc && !mr_safetensors_find(s, name))
      rc = mr_err_at(err, MR_E_DATA, path, 0, -1, "tensor %.64s is in no shard", name);
  }
  json_decref(seen);
  json_decref(index);
  return rc;
}

static mr_code open_all(mr_safetensors *s, const char *dir, mr_err *err) {
  char path[PATH];
  struct stat st;
  s->names = json_object();
  if (!s->names)
    return mr_err_at(err, MR_E_NOMEM, dir, 0, -1, "no memory");
  if (snprintf(path, sizeof path, "%s/model.safetensors.index.json", dir) >= (int)sizeof path)
    return mr_err_at(err, MR_E_NOINPUT, dir, 0, -1, "the path is too long");
  if (mr_sys_now->stat(path, &st) == 0)
    return add_shards(s, dir, path, err);
  snprintf(path, sizeof path, "%s/model.safetensors", dir);
  return add_file(s, path, err);
}

static mr_code open_file(mr_safetensors *s, const char *path, mr_err *err) {
  s->names = json_object();
  return s->names ? add_file(s, path, err) : mr_err_at(err, MR_E_NOMEM, path, 0, -1, "no memory");
}

static mr_code open_with(mr_safetensors **out, const char *path, mr_err *err,
                         mr_code (*fn)(mr_safetensors *, const char *, mr_err *)) {
  *out = NULL;
  mr_safetensors *s = mr_mem_alloc(1, sizeof *s);
  if (!s)
    return mr_err_at(err, MR_E_NOMEM, path, 0, -1, "no memory");
  mr_code rc = fn(s, path, err);
  if (rc)
    mr_safetensors_close(s);
  else
    *out = s;
  return rc;
}

mr_code mr_safetensors_open(mr_safetensors **out, const char *dir, mr_err *err) {
  return open_with(out, dir, err, open_all);
}

mr_code mr_safetensors_open_file(mr_safetensors **out, const char *path, mr_err *err) {
  return open_with(out, path, err, open_file);
}

void mr_safetensors_close(mr_safetensors *s) {
  if (!s)
    return;
  for (size_t i = 0; i < s->n_files; i++) {
    mr_sys_now->munmap((void *)(uintptr_t)s->files[i].base, (size_t)s->files[i].bytes);
    json_decref(s->files[i].header);
    mr_mem_free(s->files[i].path);
  }
  json_decref(s->names);
  mr_mem_free(s->files);
  mr_mem_free(s->tensors);
  mr_mem_free(s);
}

uint64_t mr_safetensors_bytes(const mr_safetensors *s) {
  uint64_t n = 0;
  for (size_t i = 0; i < s->n_files; i++)
    n += s->files[i].bytes;
  return n;
}

size_t mr_safetensors_n_files(const mr_safetensors *s) {
  return s->n_files;
}

const uint8_t *mr_safetensors_file(const mr_safetensors *s, size_t i, uint64_t *bytes) {
  *bytes = s->files[i].bytes;
  return s->files[i].base;
}

size_t mr_safetensors_n(const mr_safetensors *s) {
  return s->n;
}

const mr_gguf_tensor *mr_safetensors_at(const mr_safetensors *s, size_t i) {
  return &s->tensors[i];
}

const mr_gguf_tensor *mr_safetensors_find(const mr_safetensors *s, const char *name) {
  const json_t *at = json_object_get(s->names, name);
  return at ? &s->tensors[json_integer_value(at)] : NULL;
}
