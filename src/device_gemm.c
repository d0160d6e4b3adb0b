#include "src/device_gemm.h"

#include <dlfcn.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "io/mem.h"
#include "kernels/dtype.h"
#include "src/device_gemm_api.h"

#define WORKSPACE ((size_t)32 << 20)
#define CHOICES 8 /* algorithms that are tried for a shape */
#define SIZES 3
#define MOST_ROWS 1024
#define MOST_COLS 65536 /* of y: an output head is wider */
#define TABLE 65536     /* random weights; rows of the trial begin anywhere in it */
#define BASE 16         /* rows that are repeated in the trial */

static const int sizes[SIZES] = {MR_GEMM_ROWS, 256, MOST_ROWS};

struct mr_gemm_plan {
  int n, k;
  bool usable;
  uint64_t algo[8];
  void *w, *a[SIZES], *y[SIZES]; /* layouts */
  int64_t ld;                    /* of y's layouts as they are set */
  mr_gemm_plan *next;
};

struct mr_device_gemm {
  mr_device *d; /* borrowed */
  bool cuda;
  mr_gemm_numbers number;
  void *library, *handle, *desc, *wish, *workspace;
  mr_gemm_plan *plans; /* owned */
  char name[48], words[512];
#define FIELD(ours, name, args) int(*ours) args;
  MR_GEMM_CALLS(FIELD)
#undef FIELD
};

/* ------------------------------------------------------------------ open and close */

/* The name of a call that the library does not have, or NULL. */
static const char *bind(mr_device_gemm *g) {
  void *p;
  const char *symbol;
#define FIND(ours, name, args)                                                                     \
  symbol = g->cuda ? "cublasLt" #name : "hipblasLt" #name;                                         \
  p = dlsym(g->library, symbol);                                                                   \
  if (!p)                                                                                          \
    return symbol;                                                                                 \
  memcpy(&g->ours, &p, sizeof p);
  MR_GEMM_CALLS(FIND)
#undef FIND
  return NULL;
}

static void set_name(mr_device_gemm *g) {
  size_t (*of_cuda)(void) = NULL;
  int (*of_hip)(void *, int *) = NULL;
  void *p = dlsym(g->library, g->cuda ? "cublasLtGetVersion" : "hipblasLtGetVersion");
  int version = 0;
  if (p && g->cuda) {
    memcpy(&of_cuda, &p, sizeof p);
    version = (int)of_cuda();
  } else if (p) {
    memcpy(&of_hip, &p, sizeof p);
    of_hip(g->handle, &version);
  }
  snprintf(g->name, sizeof g->name, "%s %d", g->cuda ? "cublasLt" : "hipBLASLt", version);
}

static int prepare(mr_device_gemm *g) {
  uint64_t bytes = WORKSPACE;
  uint32_t none = 0;
  int32_t transposed = g->number.transposed;
  int error = g->create(&g->handle);
  if (!error)
    error = g->desc_new(&g->desc, g->number.compute, MR_GEMM_F32);
  if (!error)
    error = g->desc_set(g->desc, g->number.set_transposed, &transposed, sizeof transposed);
  if (!error)
    error = g->wish_new(&g->wish);
  if (!error)
    error = g->wish_set(g->wish, MR_GEMM_WISH_WORKSPACE, &bytes, sizeof bytes);
  if (!error && g->cuda)
    error = g->wish_set(g->wish, MR_GEMM_WISH_REDUCTION, &none, sizeof none);
  return error;
}

static mr_code start(mr_device_gemm *g, mr_err *err) {
  static const char *const names[2][2] = {{"libhipblaslt.so.0", "libhipblaslt.so"},
                                          {"libcublasLt.so.13", "libcublasLt.so.12"}};
  const char *const *name = names[g->cuda], *missing;
  for (int i = 0; i < 2 && !g->library; i++)
    g->library = mr_driver_library(name[i]);
  if (!g->library)
    return mr_err_set(err, MR_E_UNAVAILABLE, "no GEMM library: neither %s nor %s is there", name[0],
                      name[1]);
  if ((missing = bind(g)))
    return mr_err_set(err, MR_E_UNAVAILABLE, "the GEMM library has no %s", missing);
  int error = prepare(g);
  set_name(g);
  if (error)
    return mr_err_set(err, MR_E_UNAVAILABLE, "%s does not start: error %d", g->name, error);
  mr_code rc = g->d->ops->alloc(g->d, WORKSPACE, &g->workspace);
  return rc ? mr_err_set(err, rc == MR_E_NOMEM ? MR_E_UNAVAILABLE : rc,
                         "%s needs %zu bytes of device %s beside those taken; use a smaller "
                         "--device-memory",
                         g->name, WORKSPACE, g->d->name)
            : MR_OK;
}

mr_code mr_device_gemm_open(mr_device_gemm **out, mr_device *d, mr_err *err) {
  bool cuda = !strncmp(d->name, "cuda", 4);
  if (!cuda && strncmp(d->name, "hip", 3))
    return mr_err_set(err, MR_E_UNAVAILABLE, "device %s has no GEMM library", d->name);
  mr_device_gemm *g = mr_mem_alloc(1, sizeof *g);
  if (!g)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for the GEMM library");
  g->d = d;
  g->cuda = cuda;
  g->number = cuda ? MR_GEMM_CUDA : MR_GEMM_HIP;
  mr_code rc = start(g, err);
  if (rc)
    mr_device_gemm_close(g);
  else
    *out = g;
  return rc;
}

static void free_plan(mr_device_gemm *g, mr_gemm_plan *p) {
  void *all[] = {p->w, p->a[0], p->a[1], p->a[2], p->y[0], p->y[1], p->y[2]};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    if (all[i])
      g->layout_free(all[i]);
  mr_mem_free(p);
}

void mr_device_gemm_close(mr_device_gemm *g) {
  if (!g)
    return;
  for (mr_gemm_plan *p = g->plans, *next; p; p = next) {
    next = p->next;
    free_plan(g, p);
  }
  if (g->workspace)
    g->d->ops->release(g->d, g->workspace);
  if (g->wish)
    g->wish_free(g->wish);
  if (g->desc)
    g->desc_free(g->desc);
  if (g->handle)
    g->destroy(g->handle);
  if (g->library)
    dlclose(g->library);
  mr_mem_free(g);
}

const char *mr_device_gemm_name(const mr_device_gemm *g) {
  return g->name;
}

const char *mr_device_gemm_words(const mr_device_gemm *g) {
  return g->words;
}

/* ------------------------------------------------------------------ running */

/* With sizes[size] rows. Column-major: w is [k, n] transposed, a [k, rows], y [n, rows]. */
static int call(mr_device_gemm *g, mr_stream *s, const mr_gemm_plan *p, int size,
                const mr_gpu_bf16 *a, const mr_gpu_bf16 *w, float *y, bool accumulate) {
  float one = 1, beta = accumulate;
  return g->multiply(g->handle, g->desc, &one, w, p->w, a, p->a[size], &beta, y, p->y[size], y,
                     p->y[size], p->algo, g->workspace, WORKSPACE, s);
}

static int set_ld(mr_device_gemm *g, mr_gemm_plan *p, int64_t ld) {
  int error = 0;
  for (int i = 0; i < SIZES && p->ld != ld && !error; i++)
    error = g->layout_set(p->y[i], g->number.set_ld, &ld, sizeof ld);
  p->ld = error ? 0 : ld;
  return error;
}

mr_code mr_device_gemm_run(mr_device_gemm *g, mr_stream *s, const mr_gemm_plan *p,
                           const mr_gpu_bf16 *a, const mr_gpu_bf16 *w, int m, float *y, size_t ld,
                           bool accumulate) {
  int error = set_ld(g, (mr_gemm_plan *)(uintptr_t)p, (int64_t)ld);
  for (int at = 0, left = mr_gemm_padded(m), i; left > 0 && !error; left -= sizes[i]) {
    for (i = SIZES - 1; sizes[i] > left;)
      i--;
    error = call(g, s, p, i, a + (size_t)at * (size_t)p->k, w, y + (size_t)at * ld, accumulate);
    at += sizes[i];
  }
  if (!error)
    return MR_OK;
  snprintf(g->d->why, sizeof g->d->why, "%s, a product of %d x %d: error %d", g->name, p->n, p->k,
           error);
  return MR_E_UNAVAILABLE;
}

/* ------------------------------------------------------------------ the trial of an algorithm */

typedef struct trial {
  mr_device_gemm *g;
  mr_gemm_plan *p;
  mr_stream *s;
  mr_gpu_bf16 *table; /* [TABLE + k] of the host */
  float *first, *row; /* [BASE, 2, ld] what rows are, written and added to; [64, ld] pinned */
  uint8_t *piece;     /* pinned, [64, k] */
  void *a, *w, *y;    /* the device's: [MOST_ROWS, k], [n, k], [MOST_ROWS, ld] */
  size_t ld;
  mr_code rc;
} trial;

static size_t begin_of(int row, bool weight) {
  return (size_t)row * (weight ? 977 : 4099) % TABLE;
}

/* Which row is repeated at r: each of them at all places in a tile. */
static int base_of(int r) {
  return (7 * r + r / BASE) % BASE;
}

static const mr_gpu_bf16 *row_of(const trial *t, int r, bool weight) {
  return t->table + begin_of(weight ? r : 3 + base_of(r), weight);
}

static mr_code fill(trial *t, void *to, int rows, bool weight) {
  size_t bytes = (size_t)t->p->k * sizeof(mr_gpu_bf16);
  mr_code rc = MR_OK;
  for (int r0 = 0; r0 < rows && !rc; r0 += MR_GEMM_ROWS) {
    int n = rows - r0 < MR_GEMM_ROWS ? rows - r0 : MR_GEMM_ROWS;
    for (int r = 0; r < n; r++)
      memcpy(t->piece + (size_t)r * bytes, row_of(t, r0 + r, weight), bytes);
    rc = mr_device_put(t->g->d, t->s, (uint8_t *)to + (size_t)r0 * bytes, t->piece,
                       (size_t)n * bytes);
  }
  return rc;
}

static mr_code take(trial *t) {
  const mr_device_ops *o = t->g->d->ops;
  size_t n = (size_t)t->p->n, k = (size_t)t->p->k, row = t->ld * sizeof(float);
  uint32_t seed = 1;
  t->table = mr_mem_alloc(TABLE + k, sizeof *t->table);
  t->first = mr_mem_alloc(2 * BASE, row);
  mr_code rc = t->table && t->first ? o->stream_new(t->g->d, &t->s) : MR_E_NOMEM;
  if (!rc)
    rc = o->host_alloc(t->g->d, MR_GEMM_ROWS * row, (void **)&t->row);
  if (!rc)
    rc = o->host_alloc(t->g->d, MR_GEMM_ROWS * k * sizeof *t->table, (void **)&t->piece);
  if (!rc)
    rc = o->alloc(t->g->d, MOST_ROWS * k * sizeof *t->table, &t->a);
  if (!rc)
    rc = o->alloc(t->g->d, n * k * sizeof *t->table, &t->w);
  if (!rc)
    rc = o->alloc(t->g->d, MOST_ROWS * row, &t->y);
  for (size_t i = 0; !rc && i < TABLE + k; i++) {
    seed = seed * 1664525u + 1013904223u;
    t->table[i] = mr_f32_to_bf16((float)(int32_t)seed * 0x1p-31f);
  }
  if (!rc)
    rc = fill(t, t->a, MOST_ROWS, false);
  return rc ? rc : fill(t, t->w, t->p->n, true);
}

static void give_back(trial *t) {
  const mr_device_ops *o = t->g->d->ops;
  void *device[] = {t->a, t->w, t->y}, *pinned[] = {t->row, t->piece};
  for (size_t i = 0; i < sizeof device / sizeof *device; i++)
    if (device[i])
      o->release(t->g->d, device[i]);
  for (size_t i = 0; i < sizeof pinned / sizeof *pinned; i++)
    if (pinned[i])
      o->host_release(t->g->d, pinned[i]);
  o->stream_free(t->g->d, t->s);
  mr_mem_free(t->table);
  mr_mem_free(t->first);
}

/* A few values of a row against sums in double. */
static bool right(const trial *t, const float *y, int r) {
  for (int i = 0; i < 8; i++) {
    int j = (int)((int64_t)i * 7919 % t->p->n);
    const mr_gpu_bf16 *a = row_of(t, r, false), *w = row_of(t, j, true);
    double sum = 0, size = 0;
    for (int k = 0; k < t->p->k; k++) {
      double x = (double)mr_bf16_to_f32(a[k]) * mr_bf16_to_f32(w[k]);
      sum += x;
      size += fabs(x);
    }
    if (!(fabs((double)y[j] - sum) <= 1e-4 * size))
      return false;
  }
  return true;
}

/* NULL, or what is wrong with the rows of y: written (again 0), or added to once more. */
static const char *look(trial *t, int size, int again) {
  const mr_device_ops *o = t->g->d->ops;
  size_t row = t->ld * sizeof(float), values = (size_t)t->p->n * sizeof(float);
  for (int r0 = 0; r0 < sizes[size]; r0 += MR_GEMM_ROWS) {
    t->rc = o->copy(t->g->d, t->s, MR_TO_HOST, t->row, (uint8_t *)t->y + (size_t)r0 * row,
                    MR_GEMM_ROWS * row);
    mr_code waited = o->sync(t->g->d, t->s);
    if ((t->rc = t->rc ? t->rc : waited))
      return "does not run";
    for (int r = r0; r < r0 + MR_GEMM_ROWS; r++) {
      const float *y = t->row + (size_t)(r - r0) * t->ld;
      float *first = t->first + (size_t)(2 * base_of(r) + again) * t->ld;
      if (size == 0 && r < BASE)
        memcpy(first, y, values);
      if (size == 0 && r < BASE && !again && !right(t, y, r))
        return "is wrong";
      if (memcmp(first, y, values) != 0)
        return "has bits that depend on the batch";
    }
  }
  return NULL;
}

/* NULL, or what is wrong with the plan's algorithm. */
static const char *try_algo(trial *t) {
  for (int size = 0; size < SIZES; size++)
    for (int again = 0; again < 2; again++) {
      if (call(t->g, t->s, t->p, size, t->a, t->w, t->y, again))
        return "does not run";
      const char *why = look(t, size, again);
      if (why)
        return why;
    }
  return NULL;
}

/* ------------------------------------------------------------------ plans */

static int make_layouts(mr_device_gemm *g, mr_gemm_plan *p, size_t ld) {
  uint64_t n = (uint64_t)p->n, k = (uint64_t)p->k;
  int error = g->layout_new(&p->w, MR_GEMM_BF16, k, n, (int64_t)k);
  for (int i = 0; i < SIZES && !error; i++) {
    error = g->layout_new(&p->a[i], MR_GEMM_BF16, k, (uint64_t)sizes[i], (int64_t)k);
    if (!error)
      error = g->layout_new(&p->y[i], MR_GEMM_F32, n, (uint64_t)sizes[i], (int64_t)ld);
  }
  p->ld = (int64_t)ld;
  return error;
}

/* Tries what the library would choose for 256 rows. NULL, or why none of it serves. */
static const char *try_all(trial *t) {
  mr_device_gemm *g = t->g;
  mr_gemm_plan *p = t->p;
  mr_gemm_cuda_choice of_cuda[CHOICES] = {0};
  mr_gemm_hip_choice of_hip[CHOICES] = {0};
  const char *why = "has no algorithm";
  int n = 0;
  if (make_layouts(g, p, t->ld) ||
      g->choose(g->handle, g->desc, p->w, p->a[1], p->y[1], p->y[1], g->wish, CHOICES,
                g->cuda ? (void *)of_cuda : (void *)of_hip, &n))
    return why;
  for (int i = 0; i < n && i < CHOICES && !t->rc; i++) {
    if (g->cuda ? of_cuda[i].state : of_hip[i].state)
      continue;
    if ((g->cuda ? of_cuda[i].workspace : of_hip[i].workspace) > WORKSPACE)
      continue;
    if (g->cuda)
      memcpy(p->algo, of_cuda[i].algo, sizeof of_cuda[i].algo);
    else
      memcpy(p->algo, of_hip[i].algo, sizeof of_hip[i].algo);
    if (!(why = try_algo(t)))
      return NULL;
  }
  return why;
}

static void say(mr_device_gemm *g, const mr_gemm_plan *p, const char *why) {
  size_t used = strlen(g->words);
  snprintf(g->words + used, sizeof g->words - used, "%s%d x %d: %s%s", used ? "; " : "", p->n, p->k,
           why ? "our own, the library's " : "the library's", why ? why : "");
}

/* *why NULL: the plan serves. */
static mr_code try_shape(mr_device_gemm *g, mr_gemm_plan *p, const char **why) {
  trial t = {.g = g, .p = p, .ld = ((size_t)p->n + 15) & ~(size_t)15};
  *why = "is for 64 to 65536 columns";
  if (p->n < MR_GEMM_ROWS || p->n > MOST_COLS)
    return MR_OK;
  mr_code rc = take(&t);
  if (!rc) {
    *why = try_all(&t);
    rc = t.rc;
  }
  give_back(&t);
  return rc;
}

mr_code mr_device_gemm_plan(mr_device_gemm *g, int n, int k, const mr_gemm_plan **out,
                            mr_err *err) {
  mr_gemm_plan *p = g->plans;
  while (p && (p->n != n || p->k != k))
    p = p->next;
  if (!p) {
    const char *why;
    p = mr_mem_alloc(1, sizeof *p);
    if (!p)
      return mr_err_set(err, MR_E_NOMEM, "out of memory for the GEMM library");
    p->n = n;
    p->k = k;
    p->next = g->plans;
    g->plans = p;
    mr_code rc = try_shape(g, p, &why);
    if (rc == MR_E_NOMEM)
      return mr_err_set(err, MR_E_UNAVAILABLE,
                        "%s: no memory for a trial of %d x %d beside what is taken of device %s; "
                        "use a smaller --device-memory",
                        g->name, n, k, g->d->name);
    if (rc)
      return mr_device_fail(g->d, rc, err);
    p->usable = !why;
    say(g, p, why);
  }
  *out = p->usable ? p : NULL;
  return MR_OK;
}
