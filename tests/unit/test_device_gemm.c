/* The code for the makers' GEMM libraries, on libraries of our own that stand over the emulator:
 * the calls' order, sizes, errors and names; algorithms whose bits depend on the batch are found
 * and refused; a model's bits. The program is its own library: it exports their calls (linked with
 * -rdynamic). */
#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "io/mem.h"
#include "src/device_gemm_api.h"
#include "src/forward.h"
#include "tests/unit/gpu_rig.h"
#include "tests/unit/tiny_gguf.h"

/* ------------------------------------------------------------------ a library over sim */

enum {
  FAILED = 14,
  BAD = 7,
  RIGHT = 0,
  MIXES = 1,
  WRONG = 2,
  ADDS_WRONG = 3,
  UNFIT = 4,
  GREEDY = 5
};

typedef struct layout {
  int type;
  uint64_t rows, cols;
  int64_t ld;
} layout;

static struct {
  bool hip;
  mr_device *dev;
  int open;           /* handles, descriptions, layouts and wishes */
  int calls, fail_at; /* the n-th call fails; 0: none */
  int algos[8], n_algos;
  uint64_t workspace; /* that was granted */
  bool transposed, reduced;
  int counts[3]; /* products of 64, 256 and 1024 rows */
} fake;

#define CALL(cu, hi, params, pass)                                                                 \
  int cu params;                                                                                   \
  int hi params;                                                                                   \
  int hi params {                                                                                  \
    return cu pass;                                                                                \
  }                                                                                                \
  int cu params

#define COUNT_CALL                                                                                 \
  do {                                                                                             \
    if (++fake.calls == fake.fail_at)                                                              \
      return FAILED;                                                                               \
  } while (0)

static int make(void **out, size_t bytes) {
  COUNT_CALL;
  *out = calloc(1, bytes);
  fake.open++;
  return 0;
}

static int drop(void *p) {
  fake.open--;
  free(p);
  return 0;
}

CALL(cublasLtCreate, hipblasLtCreate, (void **out), (out)) {
  return make(out, 1);
}
CALL(cublasLtDestroy, hipblasLtDestroy, (void *p), (p)) {
  return drop(p);
}
CALL(cublasLtMatmulDescCreate, hipblasLtMatmulDescCreate, (void **out, int compute, int scale),
     (out, compute, scale)) {
  return compute != (fake.hip ? 2 : 68) || scale ? BAD : make(out, 1);
}
CALL(cublasLtMatmulDescSetAttribute, hipblasLtMatmulDescSetAttribute,
     (void *desc, int which, const void *value, size_t bytes), (desc, which, value, bytes)) {
  COUNT_CALL;
  fake.transposed = desc && which == (fake.hip ? 0 : 3) && bytes == 4 &&
                    *(const int32_t *)value == (fake.hip ? 112 : 1);
  return fake.transposed ? 0 : BAD;
}
CALL(cublasLtMatmulDescDestroy, hipblasLtMatmulDescDestroy, (void *p), (p)) {
  return drop(p);
}
CALL(cublasLtMatrixLayoutCreate, hipblasLtMatrixLayoutCreate,
     (void **out, int type, uint64_t rows, uint64_t cols, int64_t ld),
     (out, type, rows, cols, ld)) {
  int rc = ld < (int64_t)rows ? BAD : make(out, sizeof(layout));
  if (!rc)
    *(layout *)*out = (layout){type, rows, cols, ld};
  return rc;
}
CALL(cublasLtMatrixLayoutSetAttribute, hipblasLtMatrixLayoutSetAttribute,
     (void *p, int which, const void *value, size_t bytes), (p, which, value, bytes)) {
  COUNT_CALL;
  if (which != (fake.hip ? 6 : 4) || bytes != 8)
    return BAD;
  memcpy(&((layout *)p)->ld, value, bytes);
  return 0;
}
CALL(cublasLtMatrixLayoutDestroy, hipblasLtMatrixLayoutDestroy, (void *p), (p)) {
  return drop(p);
}
CALL(cublasLtMatmulPreferenceCreate, hipblasLtMatmulPreferenceCreate, (void **out), (out)) {
  return make(out, 1);
}
CALL(cublasLtMatmulPreferenceSetAttribute, hipblasLtMatmulPreferenceSetAttribute,
     (void *wish, int which, const void *value, size_t bytes), (wish, which, value, bytes)) {
  COUNT_CALL;
  if (which == 1 && bytes == 8)
    memcpy(&fake.workspace, value, bytes);
  else if (which == 3 && bytes == 4 && !fake.hip)
    fake.reduced = *(const uint32_t *)value != 0;
  else
    return BAD;
  return wish ? 0 : BAD;
}
CALL(cublasLtMatmulPreferenceDestroy, hipblasLtMatmulPreferenceDestroy, (void *p), (p)) {
  return drop(p);
}
size_t cublasLtGetVersion(void);
size_t cublasLtGetVersion(void) {
  return 130002;
}
int hipblasLtGetVersion(void *handle, int *version);
int hipblasLtGetVersion(void *handle, int *version) {
  *version = 1200;
  return handle ? 0 : BAD;
}

CALL(cublasLtMatmulAlgoGetHeuristic, hipblasLtMatmulAlgoGetHeuristic,
     (void *handle, void *desc, void *a, void *b, void *c, void *d, void *wish, int most,
      void *results, int *n),
     (handle, desc, a, b, c, d, wish, most, results, n)) {
  COUNT_CALL;
  const layout *w = a, *x = b, *y = d;
  if (!handle || !desc || !wish || c != d || most < fake.n_algos || w->rows != x->rows ||
      y->rows != w->cols || y->cols != x->cols)
    return BAD;
  for (*n = 0; *n < fake.n_algos; ++*n) {
    uint64_t algo = (uint64_t)fake.algos[*n];
    size_t bytes = algo == GREEDY ? fake.workspace + 1 : fake.workspace;
    if (fake.hip)
      ((mr_gemm_hip_choice *)results)[*n] =
          (mr_gemm_hip_choice){.algo = {algo}, .workspace = bytes, .state = algo == UNFIT};
    else
      ((mr_gemm_cuda_choice *)results)[*n] =
          (mr_gemm_cuda_choice){.algo = {algo}, .workspace = bytes, .state = algo == UNFIT};
  }
  return 0;
}

/* Our own kernel; algorithms with faults spoil its last row, or all. */
static int product(const layout *lw, const layout *lx, const layout *ly, const void *w,
                   const void *x, float *y, bool add, int algo, void *stream) {
  int rows = (int)lx->cols, n = (int)lw->cols;
  mr_gpu_gemm g = {.a = x, .w = w, .y = y, .ld = (size_t)ly->ld, .m = rows, .n = n};
  mr_grid grid = {.blocks = {(uint32_t)(n + 63) / 64, (uint32_t)(rows + 15) / 16, 1},
                  .warps = MR_GPU_WARPS,
                  .shared = MR_GPU_GEMM_SHARED(16, MR_GPU_BF16)};
  g.k = (int)lw->rows;
  g.accumulate = add;
  mr_gpu_finish f = {.ld = (size_t)ly->ld, .scale = 1.0000002f, .cols = n};
  bool spoil = (algo == MIXES && rows > 256) || algo == WRONG || (algo == ADDS_WRONG && add);
  f.x = algo == MIXES ? y + (size_t)(rows - 1) * g.ld : y;
  f.scale = algo == WRONG ? 2 : f.scale;
  mr_grid all = {.blocks = {(uint32_t)(n + 1023) / 1024, algo == MIXES ? 1 : (uint32_t)rows / 2, 1},
                 .warps = MR_GPU_WARPS};
  mr_code rc = fake.dev->ops->launch(fake.dev, stream, MR_GPU_gemm16_bf16, &grid, &g);
  if (!rc && spoil)
    rc = fake.dev->ops->launch(fake.dev, stream, MR_GPU_finish, &all, &f);
  return rc ? FAILED : 0;
}

CALL(cublasLtMatmul, hipblasLtMatmul,
     (void *handle, void *desc, const void *alpha, const void *a, void *a_layout, const void *b,
      void *b_layout, const void *beta, const void *c, void *c_layout, void *d, void *d_layout,
      const void *algo, void *workspace, size_t workspace_bytes, void *stream),
     (handle, desc, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algo,
      workspace, workspace_bytes, stream)) {
  COUNT_CALL;
  const layout *w = a_layout, *x = b_layout, *y = d_layout;
  float one, add;
  uint64_t which;
  memcpy(&one, alpha, sizeof one);
  memcpy(&add, beta, sizeof add);
  memcpy(&which, algo, sizeof which);
  int size = x->cols == 64 ? 0 : x->cols == 256 ? 1 : x->cols == 1024 ? 2 : -1;
  if (!handle || !desc || !fake.transposed || fake.reduced || size < 0 || one != 1 || c != d ||
      c_layout != d_layout || !workspace || workspace_bytes != fake.workspace ||
      w->type != MR_GEMM_BF16 || x->type != MR_GEMM_BF16 || y->type != MR_GEMM_F32 ||
      w->ld != (int64_t)w->rows || which >= UNFIT)
    return BAD;
  fake.counts[size]++;
  return product(w, x, y, a, b, d, add != 0, (int)which, stream);
}

/* ------------------------------------------------------------------ opening */

static void *own_library(const char *name) {
  bool mine = !strcmp(name, fake.hip ? "libhipblaslt.so" : "libcublasLt.so.12");
  return mine ? dlopen(NULL, RTLD_NOW) : NULL;
}

static void *no_library(const char *name) {
  (void)name;
  return NULL;
}

static void *other_library(const char *name) {
  (void)name;
  return dlopen("libm.so.6", RTLD_NOW);
}

static int64_t live_before;

static void begin(bool hip, size_t memory, const int *algos, int n) {
  mr_err err = MR_ERR_INIT;
  memset(&fake, 0, sizeof fake);
  live_before = mr_mem_live();
  fake.hip = hip;
  fake.n_algos = n;
  memcpy(fake.algos, algos, (size_t)n * sizeof *algos);
  mr_sim_opts o = {
      .machine = hip, .memory = memory, .guard = true, .emu = {.lazy = 1, .poison = 1}};
  assert_int_equal(mr_device_sim(&fake.dev, &o, &err), MR_OK);
  snprintf(fake.dev->name, sizeof fake.dev->name, hip ? "hip:0" : "cuda:0");
  mr_driver_library = own_library;
}

static void end(void) {
  mr_device_close(fake.dev);
  assert_int_equal(fake.open, 0);
  assert_int_equal(mr_mem_live(), live_before);
}

#define MEMORY ((size_t)256 << 20)
static const int right_one[] = {RIGHT};

static void not_there(void **state) {
  (void)state;
  for (int hip = 0; hip < 2; hip++) {
    mr_err err = MR_ERR_INIT;
    mr_device_gemm *g;
    begin(hip, MEMORY, right_one, 1);
    mr_driver_library = no_library;
    assert_int_equal(mr_device_gemm_open(&g, fake.dev, &err), MR_E_UNAVAILABLE);
    assert_non_null(strstr(err.text, hip ? "libhipblaslt.so" : "libcublasLt.so.13"));
    mr_driver_library = other_library;
    mr_err_clear(&err);
    assert_int_equal(mr_device_gemm_open(&g, fake.dev, &err), MR_E_UNAVAILABLE);
    assert_non_null(strstr(err.text, hip ? "has no hipblasLtCreate" : "has no cublasLtCreate"));
    snprintf(fake.dev->name, sizeof fake.dev->name, "sim");
    mr_err_clear(&err);
    assert_int_equal(mr_device_gemm_open(&g, fake.dev, &err), MR_E_UNAVAILABLE);
    end();
  }
}

/* The calls that are declared are those of the library, where this machine has it. */
static void calls_are_the_librarys(void **state) {
  (void)state;
  void *p = dlopen("libcublasLt.so.13", RTLD_LAZY | RTLD_LOCAL);
  if (!p)
    p = dlopen("libcublasLt.so.12", RTLD_LAZY | RTLD_LOCAL);
  if (!p)
    skip();
#define NAME(ours, name, args) assert_non_null(dlsym(p, "cublasLt" #name));
  MR_GEMM_CALLS(NAME)
#undef NAME
  dlclose(p);
}

/* ------------------------------------------------------------------ trials */

static const mr_gemm_plan *plan(mr_device_gemm *g, int n, int k) {
  mr_err err = MR_ERR_INIT;
  const mr_gemm_plan *p;
  if (mr_device_gemm_plan(g, n, k, &p, &err))
    fail_msg("%s", err.text);
  return p;
}

static void faults_are_found(void **state) {
  (void)state;
  static const struct {
    int algos[3], n;
    const char *words; /* NULL: the last one serves */
  } all[] = {{{RIGHT}, 1, NULL},
             {{MIXES}, 1, "100 x 128: our own, the library's has bits that depend on the batch"},
             {{ADDS_WRONG}, 1, "bits that depend on the batch"},
             {{WRONG}, 1, "is wrong"},
             {{UNFIT, GREEDY}, 2, "has no algorithm"},
             {{0}, 0, "has no algorithm"},
             {{MIXES, WRONG, RIGHT}, 3, NULL},
             {{UNFIT, GREEDY, RIGHT}, 3, NULL}};
  for (size_t i = 0; i < 2 * sizeof all / sizeof *all; i++) {
    mr_err err = MR_ERR_INIT;
    mr_device_gemm *g;
    begin(i % 2, MEMORY, all[i / 2].algos, all[i / 2].n);
    assert_int_equal(mr_device_gemm_open(&g, fake.dev, &err), MR_OK);
    assert_string_equal(mr_device_gemm_name(g), i % 2 ? "hipBLASLt 1200" : "cublasLt 130002");
    assert_int_equal(plan(g, 100, 128) != NULL, !all[i / 2].words);
    if (!strstr(mr_device_gemm_words(g),
                all[i / 2].words ? all[i / 2].words : "100 x 128: the library's"))
      fail_msg("%zu: %s", i, mr_device_gemm_words(g));
    int calls = fake.calls;
    plan(g, 100, 128);
    assert_int_equal(fake.calls, calls); /* what was found is kept */
    assert_null(plan(g, 20, 128));
    mr_device_gemm_close(g);
    end();
  }
}

/* Each call fails once: refused with words, or not for the library; nothing leaks. */
static void calls_that_fail(void **state) {
  (void)state;
  int refused = 0, unfit = 0, served = 0;
  for (int n = 1; !served && n < 100; n++) {
    mr_err err = MR_ERR_INIT;
    mr_device_gemm *g;
    begin(n % 2, MEMORY, right_one, 1);
    fake.fail_at = n;
    if (mr_device_gemm_open(&g, fake.dev, &err)) {
      assert_non_null(strstr(err.text, "error 14"));
      refused++;
    } else {
      const mr_gemm_plan *p = plan(g, 64, 64);
      unfit += !p;
      served += p != NULL;
      mr_device_gemm_close(g);
    }
    end();
  }
  assert_int_equal(served, 1);
  assert_true(refused > 3 && unfit > 10);
}

static void no_memory(void **state) {
  (void)state;
  mr_err err = MR_ERR_INIT;
  mr_device_gemm *g;
  const mr_gemm_plan *p;
  begin(false, (size_t)16 << 20, right_one, 1);
  assert_int_equal(mr_device_gemm_open(&g, fake.dev, &err), MR_E_UNAVAILABLE);
  assert_non_null(strstr(err.text, "--device-memory"));
  end();
  mr_err_clear(&err);
  begin(false, (size_t)34 << 20, right_one, 1);
  assert_int_equal(mr_device_gemm_open(&g, fake.dev, &err), MR_OK);
  assert_int_equal(mr_device_gemm_plan(g, 2048, 64, &p, &err), MR_E_UNAVAILABLE);
  assert_non_null(strstr(err.text, "trial of 2048 x 64"));
  mr_device_gemm_close(g);
  end();
}

/* ------------------------------------------------------------------ products */

enum { N = 70, K = 128, MOST = 1500, LD = 96 };

/* y of m rows on top of what fill left there. */
static void run(mr_device_gemm *g, rig *r, const mr_gemm_plan *p, const void *a, const void *w,
                int m, bool add, const float *before, float *out) {
  size_t bytes = (size_t)mr_gemm_padded(m) * LD * sizeof(float);
  float *y = rig_put(r, before, bytes);
  assert_int_equal(mr_device_gemm_run(g, r->stream, p, a, w, m, y, LD, add), MR_OK);
  rig_get(r, out, y, bytes);
  r->dev->ops->release(r->dev, r->blocks[--r->n_blocks]);
}

static void rows_are_cut(void **state) {
  (void)state;
  static const struct {
    int m, counts[3];
  } all[] = {
      {1, {1, 0, 0}}, {64, {1, 0, 0}}, {100, {2, 0, 0}}, {300, {1, 1, 0}}, {MOST, {0, 2, 1}}};
  static float before[1536 * LD], whole[2][1536 * LD], y[1536 * LD];
  static mr_gpu_bf16 a[1536 * K], w[N * K];
  mr_err err = MR_ERR_INIT;
  mr_device_gemm *g;
  begin(false, MEMORY, right_one, 1);
  rig r = {.dev = fake.dev};
  for (size_t i = 0; i < sizeof a / sizeof *a; i++)
    a[i] = mr_f32_to_bf16(uniform());
  for (size_t i = 0; i < sizeof w / sizeof *w; i++)
    w[i] = mr_f32_to_bf16(uniform());
  for (size_t i = 0; i < sizeof before / sizeof *before; i++)
    before[i] = uniform();
  assert_int_equal(r.dev->ops->stream_new(r.dev, &r.stream), MR_OK);
  assert_int_equal(mr_device_gemm_open(&g, r.dev, &err), MR_OK);
  const mr_gemm_plan *p = plan(g, N, K);
  assert_non_null(p);
  const void *at = rig_put(&r, a, sizeof a), *wt = rig_put(&r, w, sizeof w);
  for (int add = 0; add < 2; add++)
    run(g, &r, p, at, wt, MOST, add, before, whole[add]);
  for (int i = 0; i < N; i++)
    assert_true(fabsf(whole[1][i] - whole[0][i] - before[i]) < 1e-4f);
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    memset(fake.counts, 0, sizeof fake.counts);
    run(g, &r, p, at, wt, all[i].m, i % 2, before, y);
    assert_memory_equal(fake.counts, all[i].counts, sizeof fake.counts);
    for (int m = 0; m < all[i].m; m++) {
      assert_memory_equal(y + m * LD, whole[i % 2] + m * LD, N * sizeof *y);
      assert_memory_equal(y + m * LD + N, before + m * LD + N, (LD - N) * sizeof *y);
    }
  }
  fake.fail_at = fake.calls + 1;
  assert_int_equal(mr_device_gemm_run(g, r.stream, p, at, wt, 1, NULL, LD, false),
                   MR_E_UNAVAILABLE);
  assert_non_null(strstr(r.dev->why, "cublasLt 130002, a product of 70 x 128: error 14"));
  rig_free_all(&r);
  r.dev->ops->stream_free(r.dev, r.stream);
  mr_device_gemm_close(g);
  end();
}

/* ------------------------------------------------------------------ a model */

enum { TOKENS = 70 };

static void *take_pages(void *ctx, size_t bytes) {
  return mr_device_take(ctx, bytes);
}

/* Logits of the last token, which comes in a step by itself or with all before it. */
static void last_logits(const char *path, bool library, bool apart, float *out) {
  mr_err err = MR_ERR_INIT;
  mr_model *m;
  mr_kv *kv;
  mr_forward *f;
  mr_kv_seq seq;
  int32_t ids[TOKENS];
  begin(false, MEMORY, right_one, 1);
  assert_int_equal(mr_device_start(fake.dev, (size_t)64 << 20, &err), MR_OK);
  if (library)
    assert_int_equal(mr_device_gemm_open(&fake.dev->gemm, fake.dev, &err), MR_OK);
  assert_int_equal(mr_model_open(&m, path, &err), MR_OK);
  mr_kv_memory pages = {.ctx = fake.dev, .take = take_pages};
  assert_int_equal(mr_kv_open_on(&kv, &m->c, MR_KV_BF16, 8, &pages, &err), MR_OK);
  if (mr_forward_open_gpu(&f, m, fake.dev, kv, MR_GPU_ALL_BF16, 0, TOKENS, 1, &err))
    fail_msg("%s", err.text);
  assert_int_equal(mr_kv_seq_init(kv, &seq, 128, &err), MR_OK);
  for (int i = 0; i < TOKENS; i++)
    ids[i] = i * 37 % 256;
  memset(fake.counts, 0, sizeof fake.counts);
  for (int at = 0, n; at < TOKENS; at += n) {
    n = apart && at == 0 ? TOKENS - 1 : TOKENS - at;
    mr_run one = {.seq = &seq, .tokens = ids + at, .n = n};
    assert_int_equal(mr_kv_seq_reserve(kv, &seq, n), MR_OK);
    assert_int_equal(mr_forward_step(f, &one, 1, NULL, &err), MR_OK);
  }
  assert_int_equal(fake.counts[0] > 0, library);
  memcpy(out, mr_forward_logits(f, 0), TINY_VOCAB * sizeof *out);
  mr_kv_seq_free(kv, &seq);
  mr_forward_close(f);
  mr_kv_close(kv);
  mr_model_close(m);
  end();
}

static void a_models_bits(void **state) {
  (void)state;
  char path[64];
  float own[TINY_VOCAB], whole[TINY_VOCAB], apart[TINY_VOCAB];
  snprintf(path, sizeof path, "/tmp/mr_test_device_gemm_%d.gguf", (int)getpid());
  assert_true(tiny_gguf_write(path, -1));
  last_logits(path, false, false, own);
  last_logits(path, true, false, whole);
  last_logits(path, true, true, apart);
  unlink(path);
  assert_memory_equal(own, whole, sizeof own); /* this library's bits are our own */
  assert_memory_equal(whole, apart, sizeof whole);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(not_there),        cmocka_unit_test(calls_are_the_librarys),
      cmocka_unit_test(faults_are_found), cmocka_unit_test(calls_that_fail),
      cmocka_unit_test(no_memory),        cmocka_unit_test(rows_are_cut),
      cmocka_unit_test(a_models_bits),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
