#include "io/gguf.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "io/gguf_file.h"
#include "io/mem.h"
#include "io/sys.h"

#define MAX_KEY 65535     /* bytes, the format's limit */
#define MAX_NAME 64       /* bytes, the format's limit */
#define MAX_DEPTH 4       /* arrays in arrays */
#define MAX_ALIGN 1048576 /* bytes; ours: far above what any writer uses */
#define MIN_KV 13         /* bytes in the file: length, type and one byte */
#define MIN_TENSOR 32     /* bytes in the file: length, n_dims, one dim, type, offset */
#define SHOW 96

typedef struct cursor {
  const char *path;
  const uint8_t *base;
  uint64_t size, pos;
  mr_err *err;
} cursor;

typedef struct extent {       /* where a tensor lies in the data section */
  uint64_t offset, bytes, at; /* at: byte of its entry, for messages */
  size_t tensor;
} extent;

#define BAD(c, at, ...) mr_err_at((c)->err, MR_E_DATA, (c)->path, 0, (int64_t)(at), __VA_ARGS__)
#define LL(x) ((unsigned long long)(x))

static const struct {
  int dtype, elements, bytes;
} blocks[] = {
    {0, 1, 4},      {1, 1, 2},      {2, 32, 18},   {3, 32, 20},    {6, 32, 22},    {7, 32, 24},
    {8, 32, 34},    {9, 32, 36},    {10, 256, 84}, {11, 256, 110}, {12, 256, 144}, {13, 256, 176},
    {14, 256, 210}, {15, 256, 292}, {16, 256, 66}, {17, 256, 74},  {18, 256, 98},  {19, 256, 50},
    {20, 32, 18},   {21, 256, 110}, {22, 256, 82}, {23, 256, 136}, {24, 1, 1},     {25, 1, 2},
    {26, 1, 4},     {27, 1, 8},     {28, 1, 8},    {29, 256, 56},  {30, 1, 2},     {34, 256, 54},
    {35, 256, 66},  {39, 32, 17},   {40, 64, 36},
};

bool mr_gguf_block(int dtype, int *elements, int *bytes) {
  for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++)
    if (blocks[i].dtype == dtype) {
      *elements = blocks[i].elements;
      *bytes = blocks[i].bytes;
      return true;
    }
  return false;
}

static uint64_t left(const cursor *c) {
  return c->size - c->pos;
}

static const uint8_t *take(cursor *c, uint64_t n, const char *what) {
  if (n > left(c)) {
    BAD(c, c->pos,
        "the file ends inside %s (%llu bytes needed, %llu left): it is cut short or damaged", what,
        LL(n), LL(left(c)));
    return NULL;
  }
  const uint8_t *p = c->base + c->pos;
  c->pos += n;
  return p;
}

static bool take_u32(cursor *c, uint32_t *v, const char *what) {
  const uint8_t *p = take(c, 4, what);
  if (p)
    memcpy(v, p, 4);
  return p != NULL;
}

static bool take_u64(cursor *c, uint64_t *v, const char *what) {
  const uint8_t *p = take(c, 8, what);
  if (p)
    memcpy(v, p, 8);
  return p != NULL;
}

static bool take_str(cursor *c, mr_str *s, uint64_t limit, const char *what) {
  uint64_t at = c->pos, n;
  if (!take_u64(c, &n, what))
    return false;
  if (n > limit || n > left(c)) {
    BAD(c, at, "%s says that it is %llu bytes long; %s is %llu", what, LL(n),
        n > limit ? "the limit" : "what is left of the file", LL(n > limit ? limit : left(c)));
    return false;
  }
  s->s = (const char *)take(c, n, what);
  s->len = (size_t)n;
  return true;
}

/* "key NAME" or "tensor NAME", for messages. */
static void show_as(const char *what, mr_str name, char buf[SHOW]) {
  size_t n = strlen(what);
  memcpy(buf, what, n);
  mr_gguf_show(name, buf + n, SHOW - n);
}

/* Keys and tensor names: not empty, no NUL. */
static bool take_name(cursor *c, mr_str *s, uint64_t limit, const char *what) {
  uint64_t at = c->pos;
  if (!take_str(c, s, limit, what))
    return false;
  if (s->len == 0 || memchr(s->s, 0, s->len)) {
    BAD(c, at, "%s %s", what, s->len ? "has a NUL byte in it" : "is empty");
    return false;
  }
  return true;
}

static bool check_bools(cursor *c, const uint8_t *p, uint64_t n, const char *key) {
  for (uint64_t i = 0; i < n; i++)
    if (p[i] > 1) {
      BAD(c, (uint64_t)(p - c->base) + i, "%s: a bool holds %d; only 0 and 1 are allowed", key,
          p[i]);
      return false;
    }
  return true;
}

static bool take_array(cursor *c, mr_gguf_kv *kv, const char *key, int depth);

static bool take_items(cursor *c, const mr_gguf_kv *kv, const char *key, int depth) {
  mr_str s;
  mr_gguf_kv inner;
  for (uint64_t i = 0; i < kv->count; i++)
    if (!(kv->item == MR_GGUF_STRING ? take_str(c, &s, UINT64_MAX, key)
                                     : take_array(c, &inner, key, depth + 1)))
      return false;
  return true;
}

static bool take_array(cursor *c, mr_gguf_kv *kv, const char *key, int depth) {
  uint64_t at = c->pos;
  uint32_t item;
  if (depth > MAX_DEPTH) {
    BAD(c, at, "%s: arrays are nested more than %d deep", key, MAX_DEPTH);
    return false;
  }
  if (!take_u32(c, &item, key) || !take_u64(c, &kv->count, key))
    return false;
  int width = mr_gguf_width((int)item);
  if (width == 0 && item != MR_GGUF_STRING && item != MR_GGUF_ARRAY) {
    BAD(c, at, "%s: array items have the unknown type %u", key, item);
    return false;
  }
  uint64_t least = width ? (uint64_t)width : item == MR_GGUF_STRING ? 8 : 12;
  if (kv->count > left(c) / least) {
    BAD(c, at, "%s says that it has %llu items; the file has only %llu bytes left", key,
        LL(kv->count), LL(left(c)));
    return false;
  }
  kv->item = (mr_gguf_type)item;
  kv->data = c->base + c->pos;
  if (!width ? !take_items(c, kv, key, depth) : !take(c, kv->count * least, key))
    return false;
  kv->bytes = (uint64_t)(c->base + c->pos - kv->data);
  return item != MR_GGUF_BOOL || check_bools(c, kv->data, kv->count, key);
}

static bool take_kv(cursor *c, mr_gguf_kv *kv) {
  char key[SHOW];
  uint32_t type;
  if (!take_name(c, &kv->key, MAX_KEY, "a key's name"))
    return false;
  show_as("key ", kv->key, key);
  uint64_t at = c->pos;
  if (!take_u32(c, &type, key))
    return false;
  kv->type = kv->item = (mr_gguf_type)type;
  kv->count = 1;
  if (type == MR_GGUF_ARRAY)
    return take_array(c, kv, key, 1);
  if (type == MR_GGUF_STRING) {
    mr_str s;
    if (!take_str(c, &s, UINT64_MAX, key))
      return false;
    kv->data = (const uint8_t *)s.s;
    kv->bytes = s.len;
    return true;
  }
  kv->bytes = (uint64_t)mr_gguf_width((int)type);
  if (kv->bytes == 0) {
    BAD(c, at, "%s has the unknown type %u", key, type);
    return false;
  }
  kv->data = take(c, kv->bytes, key);
  return kv->data && (type != MR_GGUF_BOOL || check_bools(c, kv->data, 1, key));
}

/* Builds an index over n items that begin with their names, and refuses a name that is there twice.
 */
static mr_code make_index(mr_gguf_index *x, const void *items, size_t stride, size_t n,
                          const char *what, const char *path, mr_err *err) {
  char name[SHOW];
  size_t i = mr_gguf_index_build(x, items, stride, n);
  if (i == SIZE_MAX)
    return MR_OK;
  if (i == n)
    return mr_err_at(err, MR_E_NOMEM, path, 0, -1, "no memory for an index of %zu names", n);
  show_as(what, *(const mr_str *)((const char *)items + i * stride), name);
  return mr_err_at(err, MR_E_DATA, path, 0, -1, "%s is there twice", name);
}

static mr_code take_set(cursor *c, mr_gguf_set *set, uint64_t n) {
  for (uint64_t i = 0; i < n; i++) {
    if (!mr_mem_grow((void **)&set->kv, &set->cap, set->n + 1, sizeof *set->kv))
      return mr_err_at(c->err, MR_E_NOMEM, c->path, 0, -1, "no memory for %llu keys", LL(n));
    if (!take_kv(c, &set->kv[set->n]))
      return MR_E_DATA;
    set->n++;
  }
  return make_index(&set->index, set->kv, sizeof *set->kv, set->n, "key ", c->path, c->err);
}

/* Dimensions, type and size in bytes; nothing here overflows whatever the file says. */
static bool take_shape(cursor *c, mr_gguf_tensor *t, const char *name) {
  uint64_t at = c->pos, n = 1;
  uint32_t n_dims, dtype;
  if (!take_u32(c, &n_dims, name))
    return false;
  if (n_dims < 1 || n_dims > 4) {
    BAD(c, at, "%s has %u dimensions; 1 to 4 are allowed", name, n_dims);
    return false;
  }
  t->n_dims = (int)n_dims;
  for (int i = 0; i < 4; i++) {
    uint64_t d = 1;
    at = c->pos;
    if (i < t->n_dims && !take_u64(c, &d, name))
      return false;
    if (d == 0 || d > INT64_MAX || n > INT64_MAX / d) {
      BAD(c, at, "%s: dimension %d is %llu; %s", name, i, LL(d),
          d ? "the product is too large" : "none may be 0");
      return false;
    }
    t->dims[i] = (int64_t)d;
    n *= d;
  }
  at = c->pos;
  if (!take_u32(c, &dtype, name))
    return false;
  int elements, bytes;
  if (dtype > INT32_MAX || !mr_gguf_block((int)dtype, &elements, &bytes)) {
    BAD(c, at, "%s has type %u, which is unknown or was removed from the format", name, dtype);
    return false;
  }
  if (t->dims[0] % elements || n / (uint64_t)elements > INT64_MAX / (uint64_t)bytes) {
    BAD(c, at,
        "%s: a row of %lld values is not a whole number of blocks of %d (type %u), or it is "
        "too large",
        name, (long long)t->dims[0], elements, dtype);
    return false;
  }
  t->dtype = (int)dtype;
  t->bytes = n / (uint64_t)elements * (uint64_t)bytes;
  return true;
}

static bool take_tensor(cursor *c, mr_gguf_tensor *t, extent *e, uint64_t align) {
  char name[SHOW];
  e->at = c->pos;
  if (!take_name(c, &t->name, MAX_NAME, "a tensor's name"))
    return false;
  show_as("tensor ", t->name, name);
  if (!take_shape(c, t, name) || !take_u64(c, &e->offset, name))
    return false;
  e->bytes = t->bytes;
  if (e->offset % align) {
    BAD(c, c->pos - 8, "%s: offset %llu is not a multiple of the alignment %llu", name,
        LL(e->offset), LL(align));
    return false;
  }
  return true;
}

static int by_offset(const void *a, const void *b) {
  uint64_t x = ((const extent *)a)->offset, y = ((const extent *)b)->offset;
  return (x > y) - (x < y);
}

/* The data section begins at `start`: every tensor must lie in the file, and none over another. */
static mr_code place(cursor *c, mr_gguf *g, extent *e, size_t n, uint64_t start) {
  char a[SHOW], b[SHOW];
  for (size_t i = 0; i < n; i++) {
    mr_gguf_tensor *t = &g->tensors[e[i].tensor];
    if (start > c->size || e[i].offset > c->size - start ||
        t->bytes > c->size - start - e[i].offset)
      return BAD(c, e[i].at,
                 "tensor %s needs bytes %llu to %llu of the data section; the file has %llu: it is "
                 "cut short "
                 "or damaged",
                 mr_gguf_show(t->name, a, sizeof a), LL(e[i].offset), LL(e[i].offset + t->bytes),
                 LL(start > c->size ? 0 : c->size - start));
    t->data = c->base + start + e[i].offset;
  }
  qsort(e, n, sizeof *e, by_offset);
  for (size_t i = 1; i < n; i++)
    if (e[i].offset - e[i - 1].offset < e[i - 1].bytes)
      return BAD(c, e[i].at, "tensor %s lies over tensor %s",
                 mr_gguf_show(g->tensors[e[i].tensor].name, a, sizeof a),
                 mr_gguf_show(g->tensors[e[i - 1].tensor].name, b, sizeof b));
  return MR_OK;
}

static mr_code take_tensors(cursor *c, mr_gguf *g, int file, uint64_t n, uint64_t align) {
  extent *e = NULL;
  size_t cap = 0;
  mr_code rc = MR_OK;
  for (uint64_t i = 0; i < n && rc == MR_OK; i++) {
    if (!mr_mem_grow((void **)&e, &cap, (size_t)i + 1, sizeof *e) ||
        !mr_mem_grow((void **)&g->tensors, &g->cap_tensors, g->n_tensors + 1, sizeof *g->tensors)) {
      rc = mr_err_at(c->err, MR_E_NOMEM, c->path, 0, -1, "no memory for %llu tensors", LL(n));
      break;
    }
    mr_gguf_tensor *t = &g->tensors[g->n_tensors];
    *t = (mr_gguf_tensor){.file = file};
    e[i].tensor = g->n_tensors;
    if (take_tensor(c, t, &e[i], align))
      g->n_tensors++;
    else
      rc = MR_E_DATA;
  }
  if (rc == MR_OK && n > 0)
    rc = place(c, g, e, (size_t)n, (c->pos + align - 1) / align * align);
  mr_mem_free(e);
  if (rc == MR_OK && n == 0 && left(c) >= align)
    rc = BAD(c, c->pos, "the file says that it has no tensors, but %llu bytes follow its keys",
             LL(left(c)));
  return rc;
}

static mr_code take_head(cursor *c, uint32_t *version, uint64_t *n_tensors, uint64_t *n_kv) {
  const uint8_t *magic = take(c, 4, "the magic number");
  if (!magic)
    return MR_E_DATA;
  if (memcmp(magic, "FUGG", 4) == 0)
    return BAD(c, 0, "this is a big-endian GGUF file; convert the model to little-endian");
  if (memcmp(magic, "GGUF", 4))
    return BAD(c, 0, "this is no GGUF file (it does not begin with \"GGUF\")");
  if (!take_u32(c, version, "the version"))
    return MR_E_DATA;
  if (*version != 2 && *version != 3)
    return BAD(c, 4, "GGUF version %u%s; versions 2 and 3 are supported: convert the model again",
               *version, (*version & 0xffff) == 0 && *version ? " (a big-endian file?)" : "");
  if (!take_u64(c, n_tensors, "the number of tensors") || !take_u64(c, n_kv, "the number of keys"))
    return MR_E_DATA;
  if (*n_kv > left(c) / MIN_KV)
    return BAD(c, 16, "the file says that it has %llu keys; it is too short for them", LL(*n_kv));
  if (*n_tensors > left(c) / MIN_TENSOR || *n_tensors > INT32_MAX)
    return BAD(c, 8, "the file says that it has %llu tensors; it is too short for them",
               LL(*n_tensors));
  return MR_OK;
}

static mr_code alignment(const mr_gguf_set *set, const mr_gguf_member *m, uint64_t *align,
                         mr_err *err) {
  mr_err own = MR_ERR_INIT;
  uint32_t a = 32;
  if (!mr_gguf_set_u32(set, m, "general.alignment", &a, &own) && own.code) {
    if (err)
      *err = own;
    return own.code;
  }
  if (a < 8 || a > MAX_ALIGN || (a & (a - 1)))
    return mr_err_at(err, MR_E_DATA, m->path, 0, -1,
                     "general.alignment is %u; it must be a power of two from 8 to %d", a,
                     MAX_ALIGN);
  *align = a;
  return MR_OK;
}

/* Parses member `file` (mapped already): its keys into *set, its tensors behind those that g has.
 */
static mr_code parse(mr_gguf *g, size_t file, mr_gguf_set *set, mr_err *err) {
  const mr_gguf_member *m = &g->files[file];
  cursor c = {m->path, m->base, m->bytes, 0, err};
  uint32_t version = 0;
  uint64_t n_tensors = 0, n_kv = 0, align = 0;
  mr_code rc = take_head(&c, &version, &n_tensors, &n_kv);
  if (rc == MR_OK)
    rc = take_set(&c, set, n_kv);
  if (rc == MR_OK)
    rc = alignment(set, m, &align, err);
  if (rc == MR_OK)
    rc = take_tensors(&c, g, (int)file, n_tensors, align);
  if (file == 0)
    g->version = (int)version;
  return rc;
}

static void free_set(mr_gguf_set *set) {
  mr_mem_free(set->kv);
  mr_mem_free(set->index.slots);
}

/* Maps one more member. O_NONBLOCK: a FIFO is refused, not waited for. */
static mr_code map_file(mr_gguf *g, const char *path, const char *what, mr_err *err) {
  struct stat st;
  void *p = MAP_FAILED;
  if (!mr_mem_grow((void **)&g->files, &g->cap_files, g->n_files + 1, sizeof *g->files))
    return mr_err_at(err, MR_E_NOMEM, path, 0, -1, "no memory");
  int fd = mr_sys_now->open(path, O_RDONLY | O_NONBLOCK, 0);
  if (fd < 0)
    return mr_err_errno(err, MR_E_NOINPUT, path, what);
  mr_code rc = MR_OK;
  if (mr_sys_now->fstat(fd, &st) < 0)
    rc = mr_err_errno(err, MR_E_IO, path, what);
  else if (!S_ISREG(st.st_mode))
    rc = mr_err_at(err, MR_E_DATA, path, 0, -1, "a model must be a regular file");
  else if (st.st_size == 0)
    rc = mr_err_at(err, MR_E_DATA, path, 0, 0, "the file is empty; this is no GGUF file");
  else if ((p = mr_sys_now->mmap((size_t)st.st_size, fd, 0)) == MAP_FAILED)
    rc = mr_err_errno(err, MR_E_IO, path, "cannot map the file into memory");
  mr_sys_now->close(fd);
  if (rc)
    return rc;
  mr_gguf_member *m = &g->files[g->n_files++];
  *m = (mr_gguf_member){mr_mem_copy(path, strlen(path)), p, (uint64_t)st.st_size};
  return m->path ? MR_OK : mr_err_at(err, MR_E_NOMEM, path, 0, -1, "no memory");
}

/* NAME-00001-of-00003.gguf with another number. `path` is owned by the caller and changed in place.
 */
static bool name_part(char *path, uint32_t part, uint32_t count) {
  char tail[32], old[32];
  size_t n = strlen(path);
  int len = snprintf(tail, sizeof tail, "-%05u-of-%05u.gguf", part, count);
  snprintf(old, sizeof old, "-of-%05u.gguf", count);
  if (len != 20 || n < 20 || strcmp(path + n - 14, old) || path[n - 20] != '-')
    return false;
  memcpy(path + n - 20, tail, 20);
  return true;
}

static mr_code open_part(mr_gguf *g, const char *path, uint32_t part, uint32_t count, mr_err *err) {
  char what[64];
  uint32_t no = UINT32_MAX;
  mr_err own = MR_ERR_INIT;
  mr_gguf_set set = {0};
  snprintf(what, sizeof what, "part %u of %u of this split model", part, count);
  mr_code rc = map_file(g, path, what, err);
  if (rc == MR_OK)
    rc = parse(g, g->n_files - 1, &set, err);
  if (rc == MR_OK) {
    mr_gguf_set_u32(&set, &g->files[g->n_files - 1], "split.no", &no, &own);
    if (no != part - 1)
      rc = mr_err_at(err, MR_E_DATA, path, 0, -1, "split.no does not say that this is %s", what);
  }
  free_set(&set);
  return rc;
}

static mr_code open_split(mr_gguf *g, uint32_t count, mr_err *err) {
  const char *first = g->files[0].path;
  uint32_t no = 0, total = 0;
  mr_err own = MR_ERR_INIT;
  mr_gguf_u32(g, "split.no", &no, &own);
  mr_gguf_u32(g, "split.tensors.count", &total, &own);
  if (own.code)
    return mr_err_at(err, own.code, own.file, 0, own.offset, "%s", own.text);
  if (no != 0)
    return mr_err_at(err, MR_E_DATA, first, 0, -1,
                     "this is part %u of %u of a split model; give its first part", no + 1, count);
  char *path = mr_mem_copy(first, strlen(first));
  mr_code rc = path ? MR_OK : mr_err_at(err, MR_E_NOMEM, first, 0, -1, "no memory");
  if (rc == MR_OK && !name_part(path, 1, count))
    rc = mr_err_at(err, MR_E_DATA, first, 0, -1,
                   "part 2 of %u of this split model is missing: the parts must be named "
                   "NAME-00001-of-%05u.gguf, NAME-00002-of-%05u.gguf and so on, in one folder",
                   count, count, count);
  for (uint32_t part = 2; part <= count && rc == MR_OK; part++) {
    name_part(path, part, count);
    rc = open_part(g, path, part, count, err);
  }
  mr_mem_free(path);
  if (rc == MR_OK && total && total != g->n_tensors)
    rc = mr_err_at(err, MR_E_DATA, first, 0, -1,
                   "split.tensors.count is %u; the parts hold %zu tensors", total, g->n_tensors);
  return rc;
}

static mr_code open_all(mr_gguf *g, const char *path, mr_err *err) {
  uint32_t count = 1;
  mr_err own = MR_ERR_INIT;
  mr_code rc = map_file(g, path, "cannot open the model", err);
  if (rc == MR_OK)
    rc = parse(g, 0, &g->meta, err);
  if (rc)
    return rc;
  if (!mr_gguf_u32(g, "split.count", &count, &own) && own.code)
    return mr_err_at(err, own.code, own.file, 0, own.offset, "%s", own.text);
  if (count > 1)
    rc = open_split(g, count, err);
  if (rc)
    return rc;
  return make_index(&g->names, g->tensors, sizeof *g->tensors, g->n_tensors, "tensor ", path, err);
}

mr_code mr_gguf_open(mr_gguf **out, const char *path, mr_err *err) {
  *out = NULL;
  mr_gguf *g = mr_mem_alloc(1, sizeof *g);
  if (!g)
    return mr_err_at(err, MR_E_NOMEM, path, 0, -1, "no memory");
  mr_code rc = open_all(g, path, err);
  if (rc)
    mr_gguf_close(g);
  else
    *out = g;
  return rc;
}

void mr_gguf_close(mr_gguf *g) {
  if (!g)
    return;
  for (size_t i = 0; i < g->n_files; i++) {
    mr_sys_now->munmap((void *)(uintptr_t)g->files[i].base, (size_t)g->files[i].bytes);
    mr_mem_free(g->files[i].path);
  }
  mr_mem_free(g->files);
  free_set(&g->meta);
  mr_mem_free(g->tensors);
  mr_mem_free(g->names.slots);
  mr_mem_free(g);
}
