/* test_kernels.c: every slot of every table against plain double arithmetic written here, and batch
 * invariance bit by bit: rows alone equal rows in company, chunks equal the whole. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/dtype.h"
#include "kernels/kernels.h"

static uint64_t seed = 1;

static float uniform(void) { /* -1 .. 1 */
  seed = seed * 6364136223846793005u + 1442695040888963407u;
  return (float)(int32_t)(seed >> 32) / 2147483648.0f;
}

static void *take(size_t bytes) {
  void *p = aligned_alloc(64, (bytes + 127) / 64 * 64);
  assert_non_null(p);
  memset(p, 0, (bytes + 127) / 64 * 64);
  return p;
}

static float *random_floats(size_t n, float size) {
  float *p = take(n * sizeof *p);
  for (size_t i = 0; i < n; i++)
    p[i] = uniform() * size;
  return p;
}

static void close_to(const char *what, double got, double want, double tolerance) {
  if (fabs(got - want) <= tolerance)
    return;
  fail_msg("%s: got %.9g, want %.9g (tolerance %.3g)", what, got, want, tolerance);
}

typedef void (*table_test)(const mr_kernels *k);

static void on_every_table(table_test test) {
  const char *const *names = mr_kernels_names();
  for (int i = 0; names[i] != NULL; i++)
    test(mr_kernels_get(names[i]));
}

/* ------------------------------------------------------------------ the tables */
static void tables_are_found(void **state) {
  (void)state;
  const char *const *names = mr_kernels_names();
  assert_string_equal(names[0], "ref");
  int n = 0;
  for (; names[n] != NULL; n++)
    assert_string_equal(mr_kernels_get(names[n])->name, names[n]);
  assert_null(mr_kernels_get("z80"));
  const char *before = getenv("MILLRACE_ISA");
  char *saved = before != NULL ? strdup(before) : NULL;
  unsetenv("MILLRACE_ISA");
  assert_string_equal(mr_kernels_best()->name, names[n - 1]);
  setenv("MILLRACE_ISA", "ref", 1);
  assert_string_equal(mr_kernels_best()->name, "ref");
  setenv("MILLRACE_ISA", "z80", 1);
  assert_null(mr_kernels_best());
  if (saved != NULL)
    setenv("MILLRACE_ISA", saved, 1);
  else
    unsetenv("MILLRACE_ISA");
  free(saved);
}

/* ------------------------------------------------------------------ GEMM */
typedef struct problem {
  const mr_gemm_ops *o;
  int m, n, k, panels;
  float *x, *w, *bias; /* [m, k], [n, k], [n] */
  char *px, *pw;       /* packed */
} problem;

static void problem_pack(problem *p, const mr_gemm_ops *o) {
  int m = p->m, n = p->n, k = p->k;
  size_t rb = o->row_bytes(k), pb = o->panel_bytes(k);
  p->o = o;
  p->panels = (n + o->nr - 1) / o->nr;
  assert_int_equal(rb % 64, 0);
  assert_int_equal(pb % 64, 0);
  p->px = take(rb * (size_t)m);
  p->pw = take(pb * (size_t)p->panels);
  memset(p->pw, 0x55, pb * (size_t)p->panels); /* packing must not count on zeros */
  for (int i = 0; i < m; i++)
    o->pack_row(p->px + (size_t)i * rb, p->x + (size_t)i * (size_t)k, k);
  for (int i = 0; i < p->panels; i++) {
    int c = n - i * o->nr < o->nr ? n - i * o->nr : o->nr;
    o->pack_panel(p->pw + (size_t)i * pb, p->w + (size_t)i * (size_t)o->nr * (size_t)k, (size_t)k,
                  c, k);
  }
}

static problem problem_new(const mr_gemm_ops *o, int m, int n, int k) {
  problem p = {.m = m, .n = n, .k = k};
  p.x = random_floats((size_t)m * (size_t)k, 1.0f);
  p.w = random_floats((size_t)n * (size_t)k, 0.1f);
  p.bias = random_floats((size_t)n, 1.0f);
  problem_pack(&p, o);
  return p;
}

static void problem_free(problem *p) {
  free(p->x), free(p->w), free(p->bias), free(p->px), free(p->pw);
}

/* What rounding of both sides may cost: int8 by its step of 1/127 of a group's largest value. */
static double gemm_tolerance(const problem *p, mr_scheme s, int row, int col) {
  double xx = 0, ww = 0;
  for (int i = 0; i < p->k; i++) {
    double x = p->x[(size_t)row * (size_t)p->k + (size_t)i],
           w = p->w[(size_t)col * (size_t)p->k + (size_t)i];
    xx += x * x, ww += w * w;
  }
  double size = sqrt(xx * ww);
  return s == MR_SCHEME_F32 ? 2e-6 * size : s == MR_SCHEME_BF16 ? 8e-3 * size : 0.02 * size;
}

static void check_product(const problem *p, mr_scheme s, const float *y, size_t ldy, int bias,
                          float add) {
  for (int i = 0; i < p->m; i++)
    for (int j = 0; j < p->n; j++) {
      double sum = bias ? p->bias[j] : 0.0;
      for (int l = 0; l < p->k; l++)
        sum += (double)p->x[(size_t)i * (size_t)p->k + (size_t)l] *
               p->w[(size_t)j * (size_t)p->k + (size_t)l];
      char what[80];
      snprintf(what, sizeof what, "scheme %d, %dx%dx%d, y[%d, %d]", (int)s, p->m, p->n, p->k, i, j);
      double tolerance = gemm_tolerance(p, s, i, j) + 2e-7 * fabs(sum + add) + FLT_MIN;
      close_to(what, y[(size_t)i * ldy + (size_t)j], sum + add, tolerance);
    }
}

static void check_gemm(const mr_kernels *k, mr_scheme s, int m, int n, int kk) {
  problem p = problem_new(&k->gemm[s], m, n, kk);
  size_t ldy = (size_t)n + 3, total = (size_t)m * ldy;
  float *y = take(total * sizeof *y);
  for (size_t i = 0; i < total; i++)
    y[i] = 7.0f;
  p.o->gemm(y, ldy, p.px, m, p.pw, 0, p.panels, n, kk, NULL, 0);
  check_product(&p, s, y, ldy, 0, 0.0f);
  for (int i = 0; i < m; i++)
    for (int j = n; j < n + 3; j++)
      assert_true(y[(size_t)i * ldy + (size_t)j] == 7.0f);
  for (int i = 0; i < m; i++)
    for (int j = 0; j < n; j++)
      y[(size_t)i * ldy + (size_t)j] = 2.0f;
  p.o->gemm(y, ldy, p.px, m, p.pw, 0, p.panels, n, kk, p.bias, 1);
  check_product(&p, s, y, ldy, 1, 2.0f);
  free(y);
  problem_free(&p);
}

static void gemm_on(const mr_kernels *k) {
  static const int ks[] = {1, 16, 63, 64, 65, 100, 128, 192, 576};
  static const int ns[] = {1, 5, 16, 31, 32, 33, 64, 95};
  for (int s = 0; s < MR_SCHEMES; s++) {
    for (size_t i = 0; i < sizeof ks / sizeof *ks; i++)
      for (size_t j = 0; j < sizeof ns / sizeof *ns; j++)
        check_gemm(k, (mr_scheme)s, 3 + (int)j, ns[j], ks[i]);
    for (int m = 1; m <= 40; m++)
      check_gemm(k, (mr_scheme)s, m, 37, 130);
  }
}

static void gemm_is_right(void **state) {
  (void)state;
  on_every_table(gemm_on);
}

/* m rows at once, from every start, in any split of the panels: the bits of one row alone. */
static void invariance_of(const mr_kernels *k, mr_scheme s, int with_bias) {
  enum { M = 70, N = 75, K = 200 };
  problem p = problem_new(&k->gemm[s], M, N, K);
  const float *bias = with_bias ? p.bias : NULL;
  size_t rb = p.o->row_bytes(K);
  float *alone = take(M * N * 4), *y = take(M * N * 4);
  for (int i = 0; i < M; i++)
    p.o->gemm(alone + i * N, N, p.px + (size_t)i * rb, 1, p.pw, 0, p.panels, N, K, bias, 1);
  for (int m = 1; m <= M; m++)
    for (int i0 = 0; i0 + m <= M; i0 += m + 3) {
      memset(y, 0, (size_t)m * N * 4);
      int cut = m % (p.panels + 1);
      p.o->gemm(y, N, p.px + (size_t)i0 * rb, m, p.pw, 0, cut, N, K, bias, 1);
      p.o->gemm(y, N, p.px + (size_t)i0 * rb, m, p.pw, cut, p.panels, N, K, bias, 1);
      assert_memory_equal(y, alone + i0 * N, (size_t)m * N * 4);
    }
  free(alone), free(y);
  problem_free(&p);
}

static void invariance_on(const mr_kernels *k) {
  for (int s = 0; s < MR_SCHEMES; s++)
    for (int with_bias = 0; with_bias < 2; with_bias++)
      invariance_of(k, (mr_scheme)s, with_bias);
}

/* As many rows as take other loops: still the bits of one row alone. */
static void many_rows_on(const mr_kernels *k) {
  enum { M = 300, N = 75, K = 200 };
  static const int some[] = {128, 129, 161, 293};
  for (int s = 0; s < MR_SCHEMES; s++) {
    problem p = problem_new(&k->gemm[s], M, N, K);
    size_t rb = p.o->row_bytes(K);
    float *alone = take(M * N * 4), *y = take(M * N * 4);
    for (int i = 0; i < M; i++)
      p.o->gemm(alone + i * N, N, p.px + (size_t)i * rb, 1, p.pw, 0, p.panels, N, K, p.bias, 0);
    for (size_t i = 0; i < sizeof some / sizeof *some; i++) {
      int i0 = M - some[i];
      p.o->gemm(y, N, p.px + (size_t)i0 * rb, some[i], p.pw, 0, p.panels, N, K, p.bias, 0);
      assert_memory_equal(y, alone + i0 * N, (size_t)some[i] * N * 4);
    }
    free(alone), free(y);
    problem_free(&p);
  }
}

static void gemm_rows_do_not_see_each_other(void **state) {
  (void)state;
  on_every_table(invariance_on);
  on_every_table(many_rows_on);
}

/* AVX-VNNI changes the packing and the speed of the AVX2 table, and no bit. */
static void avxvnni_gives_the_bits_of_avx2(void **state) {
  (void)state;
  enum { M = 7, N = 45, K = 200 };
  const mr_kernels *a = mr_kernels_get("avx2"), *b = mr_kernels_get("avxvnni");
  if (a == NULL || b == NULL)
    skip();
  problem p = problem_new(&a->gemm[MR_SCHEME_I8], M, N, K);
  float *y = take(M * N * 4), *z = take(M * N * 4);
  p.o->gemm(y, N, p.px, M, p.pw, 0, p.panels, N, K, p.bias, 0);
  free(p.px), free(p.pw);
  problem_pack(&p, &b->gemm[MR_SCHEME_I8]);
  p.o->gemm(z, N, p.px, M, p.pw, 0, p.panels, N, K, p.bias, 0);
  assert_memory_equal(y, z, M * N * 4);
  free(y), free(z);
  problem_free(&p);
}

static void extremes_on(const mr_kernels *k) {
  enum { N = 33, K = 130 };
  static const float sizes[] = {0.0f, 1e-44f, 1e-38f, 1e-30f, 1e-12f, 1e12f, 1e15f};
  for (int s = 0; s < MR_SCHEMES; s++)
    for (size_t z = 0; z < sizeof sizes / sizeof *sizes; z++) {
      problem p = problem_new(&k->gemm[s], 2, N, K);
      float y[2 * N];
      for (int i = 0; i < 2 * K; i++)
        p.x[i] *= sizes[z];
      for (int i = 0; i < 2; i++)
        p.o->pack_row(p.px + (size_t)i * p.o->row_bytes(K), p.x + i * K, K);
      p.o->gemm(y, N, p.px, 2, p.pw, 0, p.panels, N, K, NULL, 0);
      check_product(&p, (mr_scheme)s, y, N, 0, 0.0f);
      problem_free(&p);
    }
}

/* A value that is not finite shows up in its own row, and only there. */
static void not_finite_on(const mr_kernels *k) {
  enum { N = 40, K = 130, M = 20 };
  static const float values[] = {NAN, INFINITY, -INFINITY, FLT_MAX};
  for (int s = 0; s < MR_SCHEMES; s++)
    for (int v = 0; v < 4; v++) {
      problem p = problem_new(&k->gemm[s], M, N, K);
      float y[M * N];
      for (int i = 0; i < K; i++)
        p.x[5 * K + i] = values[v];
      p.o->pack_row(p.px + 5 * p.o->row_bytes(K), p.x + 5 * K, K);
      p.o->gemm(y, N, p.px, M, p.pw, 0, p.panels, N, K, NULL, 0);
      for (int i = 0; i < M * N; i++)
        if (i / N != 5)
          assert_true(isfinite(y[i]));
      if (v < 3)
        assert_false(isfinite(y[5 * N]));
      problem_free(&p);
    }
}

static void gemm_extremes(void **state) {
  (void)state;
  on_every_table(extremes_on);
  on_every_table(not_finite_on);
}

/* ------------------------------------------------------------------ attention */
#define PAGES 80

typedef struct scene { /* one sequence of `len` tokens in pages, and its attention call */
  mr_attn a;
  int len;
  float *k, *v;   /* [len, n_kv_heads, head_dim] */
  float *q, *out; /* [len, n_heads, head_dim] */
  float slopes[16], sinks[16];
  uint8_t *memory;
  const uint8_t *pages[PAGES];
  uint8_t *scratch;
} scene;

/* E4M3 by way of float16, three bits after the leading one; below 2^-6 that or zero */
static double e4m3(double x) {
  int e;
  x = 256 * (double)mr_f16_to_f32(mr_f32_to_f16((float)(x / 256)));
  if (fabs(x) < 0.015625)
    return fabs(x) < 0.0078125 - 0.0009765625 ? 0 : copysign(0.015625, x);
  double m = frexp(x, &e);
  return ldexp(rint(m * 16), e - 4);
}

/* What is left of a token's K or V in 8 bits. */
static void as_8bit(float *x, int dim, mr_kv_type type) {
  float max = 0;
  for (int i = 0; i < dim; i++)
    max = fabsf(x[i]) > max ? fabsf(x[i]) : max;
  double scale = max / (type == MR_KV_INT8 ? 127.0 : 448.0);
  for (int i = 0; i < dim && max > 0; i++)
    x[i] = (float)(scale * (type == MR_KV_INT8 ? rint(x[i] / scale) : e4m3(x[i] / scale)));
}

static void scene_store(scene *s, const mr_kernels *k) {
  const mr_attn *a = &s->a;
  size_t part = mr_kv_part_bytes(a->type, a->head_dim);
  for (int t = 0; t < s->len; t++)
    for (int h = 0; h < a->n_kv_heads; h++) {
      size_t at = ((size_t)t * (size_t)a->n_kv_heads + (size_t)h) * (size_t)a->head_dim;
      uint8_t *p =
          s->memory + (s->pages[t / 32] - s->memory) + a->layer_offset + 2 * (size_t)h * part;
      k->kv_store(p, p + part, s->k + at, s->v + at, a->head_dim, t % 32, a->type);
    }
}

static void scene_new(scene *s, const mr_kernels *k, int heads, int kv_heads, int dim, int len,
                      mr_kv_type type) {
  size_t n = (size_t)len * (size_t)dim, part = mr_kv_part_bytes(type, dim);
  size_t page = 128 + 2 * part * (size_t)kv_heads;
  *s = (scene){.len = len};
  s->k = random_floats(n * (size_t)kv_heads, 2.0f);
  s->v = random_floats(n * (size_t)kv_heads, 2.0f);
  s->q = random_floats(n * (size_t)heads, 2.0f);
  s->out = take(n * (size_t)heads * 4);
  s->memory = take(page * PAGES);
  memset(s->memory, 0xff, page * PAGES); /* slots never written hold NaN */
  for (int i = 0; i < PAGES; i++)
    s->pages[i] = s->memory + (size_t)((i * 7) % PAGES) * page;
  s->scratch = take(mr_attn_scratch(heads, kv_heads, dim));
  size_t ld = (size_t)heads * (size_t)dim;
  s->a = (mr_attn){.q = s->q,
                   .q_ld = ld,
                   .out = s->out,
                   .out_ld = ld,
                   .n_q = len,
                   .n_heads = heads,
                   .n_kv_heads = kv_heads,
                   .head_dim = dim,
                   .type = type,
                   .pages = s->pages,
                   .layer_offset = 128,
                   .scale = 1.0f / sqrtf((float)dim)};
  for (int i = 0; i < 16; i++)
    s->slopes[i] = 0.01f * (float)(i + 1), s->sinks[i] = uniform();
  scene_store(s, k);
  for (int i = 0; type >= MR_KV_INT8 && i < len * kv_heads; i++) {
    as_8bit(s->k + (size_t)i * (size_t)dim, dim, type);
    as_8bit(s->v + (size_t)i * (size_t)dim, dim, type);
  }
}

static void scene_free(scene *s) {
  free(s->k), free(s->v), free(s->q), free(s->out), free(s->memory), free(s->scratch);
}

static int sees(const mr_attn *a, int pos, int key) {
  if (a->window > 0 && pos - key >= a->window)
    return 0;
  if (a->chunk > 0 && pos / a->chunk != key / a->chunk)
    return 0;
  return key <= pos;
}

static double plain_score(const scene *s, int t, int head, int key) {
  const mr_attn *a = &s->a;
  int kv = head / (a->n_heads / a->n_kv_heads), d = a->head_dim;
  const float *q = s->q + ((size_t)t * (size_t)a->n_heads + (size_t)head) * (size_t)d;
  const float *k = s->k + ((size_t)key * (size_t)a->n_kv_heads + (size_t)kv) * (size_t)d;
  double dot = 0;
  for (int i = 0; i < d; i++)
    dot += (double)q[i] * k[i];
  dot *= a->scale;
  if (a->softcap > 0)
    dot = a->softcap * tanh(dot / a->softcap);
  if (a->slopes != NULL)
    dot += a->slopes[head] * (double)(key - t);
  return dot;
}

/* Of sums of the stored values: 8 bits are known here, and queries and p have 16, on AMX 8. */
static double tolerance_of(const mr_kernels *k, mr_kv_type type) {
  int exact = (type == MR_KV_INT8 || type == MR_KV_FP8) && k->kv_type(64) != MR_KV_BF16;
  return type == MR_KV_F32 ? 2e-5 : exact ? 2e-3 : type == MR_KV_F16 ? 5e-3 : 4e-2;
}

static void check_row(const mr_kernels *k, const scene *s, const char *what, int t, int head) {
  const mr_attn *a = &s->a;
  int kv = head / (a->n_heads / a->n_kv_heads), d = a->head_dim;
  double want[256] = {0}, sum = a->sinks != NULL ? exp(a->sinks[head]) : 0.0;
  for (int key = 0; key <= t; key++) {
    if (!sees(a, t, key))
      continue;
    double p = exp(plain_score(s, t, head, key));
    sum += p;
    for (int i = 0; i < d; i++)
      want[i] +=
          p * s->v[((size_t)key * (size_t)a->n_kv_heads + (size_t)kv) * (size_t)d + (size_t)i];
  }
  double tolerance = tolerance_of(k, a->type);
  for (int i = 0; i < d; i++)
    close_to(what, s->out[((size_t)t * (size_t)a->n_heads + (size_t)head) * (size_t)d + (size_t)i],
             want[i] / sum, tolerance);
}

/* All tokens from `from` on, in tiles of `tile`, as a run that starts there. */
static void attend(const mr_kernels *k, scene *s, int from, int tile) {
  mr_attn a = s->a;
  a.pos0 = from;
  a.n_q = s->len - from;
  a.q += (size_t)from * a.q_ld;
  a.out += (size_t)from * a.out_ld;
  for (int h = 0; h < a.n_kv_heads; h++) {
    if (h + 1 < a.n_kv_heads) /* a hint: no bit changes */
      a.next = (mr_attn_next){s->pages, h + 1, mr_attn_first(&a, from) / 32, (s->len + 31) / 32};
    for (int q0 = 0; q0 < a.n_q; q0 += tile)
      k->attention(&a, h, q0, q0 + tile < a.n_q ? q0 + tile : a.n_q, s->scratch);
    a.next.pages = NULL;
  }
}

static void check_scene(const mr_kernels *k, scene *s, const char *what) {
  size_t bytes = (size_t)s->len * s->a.out_ld * 4;
  char label[120];
  snprintf(label, sizeof label, "%s, %s: heads %d/%d, dim %d, type %d", k->name, what, s->a.n_heads,
           s->a.n_kv_heads, s->a.head_dim, (int)s->a.type);
  attend(k, s, 0, 1);
  for (int t = 0; t < s->len; t += 1 + t / 8)
    for (int h = 0; h < s->a.n_heads; h++)
      check_row(k, s, label, t, h);
  float *alone = take(bytes);
  memcpy(alone, s->out, bytes);
  static const int tiles[] = {2, 3, 7, 32};
  for (int i = 0; i < 4; i++) {
    memset(s->out, 0, bytes);
    attend(k, s, 0, tiles[i]);
    assert_memory_equal(s->out, alone, bytes); /* whole, in tiles */
  }
  memset(s->out, 0, bytes);
  attend(k, s, s->len / 3, 32);
  size_t at = (size_t)(s->len / 3) * s->a.out_ld;
  assert_memory_equal(s->out + at, alone + at, bytes - at * 4); /* a later chunk */
  free(alone);
}

static void attention_on(const mr_kernels *k) {
  static const int dims[] = {16, 20, 32, 64, 80, 96, 128, 256};
  static const int ratios[] = {1, 3, 4, 7};
  for (int d = 0; d < 8; d++)
    for (int r = 0; r < 4; r++) {
      static const mr_kv_type types[] = {MR_KV_F32, MR_KV_F16, MR_KV_BF16, MR_KV_INT8, MR_KV_FP8};
      mr_kv_type type = types[(d + r) % 5];
      scene s;
      scene_new(&s, k, 2 * ratios[r], 2, dims[d], dims[d] > 64 ? 70 : 101, type);
      check_scene(k, &s, "plain");
      scene_free(&s);
    }
}

static void variants_of(const mr_kernels *k, int dim) {
  scene s;
  for (int type = MR_KV_F32; type <= MR_KV_FP8; type++) {
    if (mr_kv_packs((mr_kv_type)type) || (type > MR_KV_BF16 && dim != 64))
      continue;
    scene_new(&s, k, 6, 2, dim, 150, (mr_kv_type)type);
    s.a.window = 20;
    check_scene(k, &s, "window 20");
    s.a.window = 64, s.a.softcap = 3.0f;
    check_scene(k, &s, "window 64, softcap");
    s.a.window = 0, s.a.chunk = 40;
    check_scene(k, &s, "chunk 40");
    s.a.chunk = 0, s.a.softcap = 0, s.a.slopes = s.slopes;
    check_scene(k, &s, "slopes");
    s.a.slopes = NULL, s.a.sinks = s.sinks;
    check_scene(k, &s, "sinks");
    scene_free(&s);
  }
}
static void variants_on(const mr_kernels *k) {
  variants_of(k, 48);
  variants_of(k, 64);
}

/* More keys than a kernel takes at once. */
static void long_on(const mr_kernels *k) {
  static const int dims[] = {64, 80, 20, 128}, heads[] = {6, 2, 14, 10};
  static const mr_kv_type types[] = {MR_KV_F16, MR_KV_INT8, MR_KV_BF16, MR_KV_F16};
  for (int i = 0; i < 4; i++) {
    scene s;
    scene_new(&s, k, heads[i], 2, dims[i], 300, types[i]);
    check_scene(k, &s, "long");
    s.a.window = 150;
    check_scene(k, &s, "long, window 150");
    scene_free(&s);
  }
}

/* Pages that no token's window reaches may be absent. */
static void window_pages_on(const mr_kernels *k) {
  scene s;
  scene_new(&s, k, 2, 1, 32, 150, MR_KV_F16);
  s.a.window = 20;
  attend(k, &s, 140, 1);
  float *want = take(150 * 64 * 4);
  memcpy(want, s.out, 150 * 64 * 4);
  for (int i = 0; i < 3; i++)
    s.pages[i] = NULL;
  attend(k, &s, 140, 32);
  assert_memory_equal(want, s.out, 150 * 64 * 4);
  free(want);
  scene_free(&s);
}

/* Tokens of several sequences that begin with the same pages, together and one by one. */
static void shared_of(const mr_kernels *k, scene *s, int blocks) {
  enum { MEMBERS = 7 };
  const uint8_t *other[PAGES]; /* odd members': the same beginning, then pages in another order */
  mr_attn a[MEMBERS];
  size_t ld = s->a.out_ld;
  float *want = take(MEMBERS * ld * 4), *got = take(MEMBERS * ld * 4);
  for (int i = 0; i < PAGES; i++)
    other[i] = s->pages[i < blocks || i >= s->len / 32 ? i : s->len / 32 - 1 - i + blocks];
  for (int i = 0; i < MEMBERS; i++) {
    a[i] = s->a;
    a[i].pos0 = i % 3 == 0 ? blocks * 32 + i : s->len - 1 - 5 * i;
    a[i].n_q = 1;
    a[i].q += (size_t)a[i].pos0 * ld;
    a[i].pages = i % 2 ? other : s->pages;
    a[i].out = want + (size_t)i * ld;
    for (int h = 0; h < a[i].n_kv_heads; h++)
      k->attention(&a[i], h, 0, 1, s->scratch);
    a[i].out = got + (size_t)i * ld;
  }
  for (int h = 0; h < s->a.n_kv_heads; h++)
    k->attention_shared(a, MEMBERS, blocks, h, s->scratch);
  assert_memory_equal(want, got, MEMBERS * ld * 4);
  free(want), free(got);
}

static void shared_on(const mr_kernels *k) {
  static const int dims[] = {64, 80, 128, 32};
  for (int type = MR_KV_F32; k->attention_shared != NULL && type <= MR_KV_FP8; type++) {
    scene s;
    if (mr_kv_packs((mr_kv_type)type))
      continue;
    scene_new(&s, k, 6, 2, dims[type % 4], 350, (mr_kv_type)type);
    for (int i = 0; i < 16; i++)
      s.slopes[i] = 0.001f * (float)(i + 1);
    for (int blocks = 4; blocks <= 8; blocks += 4) {
      shared_of(k, &s, blocks);
      s.a.slopes = s.slopes, s.a.sinks = s.sinks, s.a.softcap = 4.0f;
      shared_of(k, &s, blocks);
    }
    scene_free(&s);
  }
}

/* Single tokens, split by split, against all at once. */
static void split_of(const mr_kernels *k, const scene *s, int pos) {
  const int keys = MR_ATTN_SPLIT * MR_KV_BLOCK;
  mr_attn a = s->a;
  size_t floats = mr_attn_state(a.n_heads, a.n_kv_heads, a.head_dim), ld = a.out_ld;
  float *want = take(ld * 4), *got = take(ld * 4), *states = take(3 * floats * 4);
  a.pos0 = pos;
  a.n_q = 1;
  a.q += (size_t)pos * a.q_ld;
  for (int h = 0; h < a.n_kv_heads; h++) {
    int first = mr_attn_first(&a, pos) / keys, n = pos / keys + 1 - first;
    assert_in_range(n, 1, 3);
    a.out = want;
    k->attention(&a, h, 0, 1, s->scratch);
    a.out = got;
    for (int i = n - 1; i >= 0; i--) /* in any order */
      k->attention_split(&a, h, first + i, states + (size_t)i * floats, s->scratch);
    k->attention_join(&a, h, states, n);
  }
  assert_memory_equal(want, got, ld * 4);
  free(want), free(got), free(states);
}

static void splits_on(const mr_kernels *k) {
  static const int at[] = {0, 700, 1023, 1024, 1056, 2047, 2048, 2190};
  static const mr_kv_type types[] = {MR_KV_F32, MR_KV_F16, MR_KV_INT8, MR_KV_FP8};
  static const int dims[] = {32, 80, 64, 20};
  if (k->attention_split == NULL)
    return;
  for (int type = 0; type < 4; type++) {
    scene s;
    scene_new(&s, k, 6, 2, dims[type], 2200, types[type]);
    for (int i = 0; i < 16; i++)
      s.slopes[i] = 0.001f * (float)(i + 1);
    for (int way = 0; way < 4; way++) {
      s.a.window = way == 1 ? 1100 : way == 2 ? 40 : 0;
      s.a.slopes = way == 3 ? s.slopes : NULL;
      s.a.sinks = way == 3 ? s.sinks : NULL;
      s.a.softcap = way == 3 ? 4.0f : 0;
      for (size_t i = 0; i < sizeof at / sizeof *at; i++)
        split_of(k, &s, at[i]);
      if (way == 0 || way == 3) /* of which a split ends among the shared ones, or with them */
        for (int blocks = 32; blocks <= 48; blocks += 16)
          shared_of(k, &s, blocks);
    }
    scene_free(&s);
  }
  scene s;
  scene_new(&s, k, 2, 1, 32, 1100, MR_KV_F16);
  check_scene(k, &s, "two splits");
  s.a.window = 90;
  s.a.sinks = s.sinks;
  check_scene(k, &s, "two splits, window 90, sinks");
  scene_free(&s);
}

static void attention_is_right(void **state) {
  (void)state;
  on_every_table(attention_on);
  on_every_table(variants_on);
  on_every_table(long_on);
  on_every_table(window_pages_on);
  on_every_table(shared_on);
  on_every_table(splits_on);
}

/* Other pages, other company: the tokens of one sequence are never touched by garbage beside them.
 */
static void odd_keys_of(const mr_kernels *k, mr_kv_type type, float *(*of)(scene *)) {
  scene s;
  scene_new(&s, k, 4, 2, 64, 40, type);
  for (int i = 0; i < 64; i++)
    of(&s)[i] = NAN;
  scene_store(&s, k);
  attend(k, &s, 0, 32);
  assert_true(isnan(s.out[39 * 256]));
  assert_true(isfinite(s.out[38 * 256]));       /* the token before it */
  assert_true(isfinite(s.out[39 * 256 + 128])); /* the other kv head */
  scene_free(&s);
}

static float *last_key(scene *s) { /* of head 0 */
  return s->k + 39 * 128;
}
static float *last_value(scene *s) {
  return s->v + 39 * 128;
}
static float *last_query(scene *s) {
  return s->q + 39 * 256;
}

static void odd_keys_on(const mr_kernels *k) {
  for (int type = MR_KV_F16; type <= MR_KV_FP8; type++) {
    if (mr_kv_packs((mr_kv_type)type))
      continue;
    odd_keys_of(k, (mr_kv_type)type, last_key);
    odd_keys_of(k, (mr_kv_type)type, last_query);
    if (type >= MR_KV_INT8) /* a masked one of 16 bits is multiplied by p = 0 */
      odd_keys_of(k, (mr_kv_type)type, last_value);
  }
}

static void attention_with_odd_keys(void **state) {
  (void)state;
  on_every_table(odd_keys_on);
}

/* Orthonormal, its own inverse, and every value of a block goes to all of it. */
static void rotation_on(const mr_kernels *k) {
  static const int dims[] = {20, 64, 80, 96, 128, 576};
  for (int i = 0; i < 6; i++) {
    int n = dims[i], block = mr_rotate_block(n);
    assert_true(block <= 64 && n % block == 0 && (block == 64 || n / block % 2));
    float *x = random_floats((size_t)n, 3.0f), *y = take((size_t)n * 4);
    memcpy(y, x, (size_t)n * 4);
    k->rotate(y, n);
    for (int j = 0; j < n; j++) {
      double want = 0;
      for (int l = 0; l < block; l++)
        want +=
            x[j / block * block + l] * (__builtin_popcount((unsigned)(j % block & l)) % 2 ? -1 : 1);
      close_to("rotate", y[j], want / sqrt(block), 1e-5);
    }
    k->rotate(y, n);
    for (int j = 0; j < n; j++)
      close_to("rotate back", y[j], x[j], 1e-5);
    free(x), free(y);
  }
}

static void keys_are_rotated(void **state) {
  (void)state;
  on_every_table(rotation_on);
}

/* 16 steps from least to largest, both as float16. */
static void as_q4(float *x, size_t stride, int n) {
  float least = INFINITY, most = -INFINITY;
  for (int i = 0; i < n; i++) {
    float *v = &x[(size_t)i * stride];
    *v = mr_f16_to_f32(mr_f32_to_f16(*v));
    least = *v < least ? *v : least;
    most = *v > most ? *v : most;
  }
  float step = mr_f16_to_f32(mr_f32_to_f16((most - least) / 15.0f));
  for (int i = 0; i < n && step > 0; i++) {
    float c = rintf((x[(size_t)i * stride] - least) / step);
    x[(size_t)i * stride] = (c > 15 ? 15 : c) * step + least;
  }
}

/* Blocks 0 .. last - 1 packed; block `last` in 16 bits at own, [n_kv_heads]. */
static void store_q4(const mr_kernels *k, scene *s, int last, uint8_t *own) {
  const mr_attn *a = &s->a;
  size_t part = mr_kv_part_bytes(MR_KV_Q4, a->head_dim);
  size_t own_part = mr_kv_part_bytes(MR_KV_OWN_TYPE, a->head_dim);
  for (int h = 0; h < a->n_kv_heads; h++)
    for (int b = 0; b <= last; b++) {
      uint8_t *to = own + (size_t)h * 2 * own_part;
      for (int t = b * 32; t < (b + 1) * 32 && t < s->len; t++) {
        size_t at = (size_t)(t * a->n_kv_heads + h) * (size_t)a->head_dim;
        k->kv_store(to, to + own_part, s->k + at, s->v + at, a->head_dim, t % 32, MR_KV_OWN_TYPE);
      }
      uint8_t *p = s->memory + (s->pages[b] - s->memory) + a->layer_offset + 2 * (size_t)h * part;
      if (b < last)
        k->kv_pack(p, p + part, to, a->head_dim, MR_KV_Q4);
    }
}

/* K and V as tokens of block `last` see them. */
static void see_q4(scene *s, int last) {
  const mr_attn *a = &s->a;
  size_t dim = (size_t)a->head_dim, token = (size_t)a->n_kv_heads * dim;
  for (int b = 0; b < last; b++)
    for (int h = 0; h < a->n_kv_heads; h++) {
      size_t at = (size_t)b * 32 * token + (size_t)h * dim;
      for (size_t d = 0; d < dim; d++)
        as_q4(s->k + at + d, token, 32);
      for (size_t t = 0; t < 32; t++)
        for (size_t d = 0; d < dim; d += 32)
          as_q4(s->v + at + t * token + d, 1, dim - d < 32 ? (int)(dim - d) : 32);
    }
}

static void packed_on(const mr_kernels *k) {
  static const int dims[] = {20, 64, 80, 128};
  for (int d = 0; d < 4; d++) {
    scene s;
    int from = 3 * 32, kv_heads = 2, dim = dims[d];
    scene_new(&s, k, 6, kv_heads, dim, from + 20, MR_KV_F16); /* room enough */
    size_t own_part = mr_kv_part_bytes(MR_KV_OWN_TYPE, dim), row = s.a.out_ld * 4;
    uint8_t *own = take((size_t)kv_heads * 2 * own_part);
    float *whole = take(20 * row);
    s.a.type = MR_KV_Q4;
    s.a.window = d == 1 ? 50 : 0;
    store_q4(k, &s, 3, own);
    see_q4(&s, 3);
    for (int tile = 20; tile > 0; tile -= 19) /* all at once, and one by one */
      for (int h = 0; h < kv_heads; h++)
        for (int q0 = 0; q0 < 20; q0 += tile) {
          mr_attn a = s.a;
          a.own = own + (size_t)h * 2 * own_part;
          a.pos0 = from, a.n_q = 20;
          a.q += (size_t)from * a.q_ld;
          a.out = tile == 20 ? whole : a.out + (size_t)from * a.out_ld;
          k->attention(&a, h, q0, q0 + tile, s.scratch);
        }
    assert_memory_equal(whole, s.out + (size_t)from * s.a.out_ld, 20 * row);
    for (int t = from; t < from + 20; t += 3)
      for (int h = 0; h < 6; h++)
        check_row(k, &s, "packed", t, h);
    free(own), free(whole);
    scene_free(&s);
  }
}

static void blocks_are_packed(void **state) {
  (void)state;
  on_every_table(packed_on);
}

/* ------------------------------------------------------------------ norms, rope, activations */
static void norms_on(const mr_kernels *k) {
  for (int n = 1; n < 700; n += 1 + n / 5) {
    float *x = random_floats((size_t)n, 3.0f), *w = random_floats((size_t)n, 1.0f);
    float *b = random_floats((size_t)n, 1.0f), *y = take((size_t)n * 4 + 4);
    double sum = 0, squares = 0, var = 0;
    for (int i = 0; i < n; i++)
      sum += x[i], squares += (double)x[i] * x[i];
    for (int i = 0; i < n; i++)
      var += (x[i] - sum / n) * (x[i] - sum / n);
    y[n] = 5.0f;
    k->rmsnorm(y, x, w, n, 1e-5f);
    double r = 1.0 / sqrt(squares / n + 1e-5);
    for (int i = 0; i < n; i++)
      close_to("rmsnorm", y[i], x[i] * r * w[i], 1e-5);
    k->layernorm(y, x, w, b, n, 1e-3f);
    r = 1.0 / sqrt(var / n + 1e-3);
    for (int i = 0; i < n; i++)
      close_to("layernorm", y[i], (x[i] - sum / n) * r * w[i] + b[i], 3e-5);
    assert_true(y[n] == 5.0f);
    k->layernorm(y, x, NULL, NULL, n, 1e-3f);
    k->rmsnorm(x, x, NULL, n, 1e-5f); /* in place, without weights */
    r = 1.0 / sqrt(squares / n + 1e-5);
    for (int i = 0; i < n; i++)
      assert_true(fabs(x[i]) <= sqrt(n) + 1e-3);
    free(x), free(w), free(b), free(y);
  }
}

static void rope_on(const mr_kernels *k) {
  for (int n = 2; n <= 256; n += n < 40 ? 2 : 34)
    for (int inter = 0; inter < 2; inter++) {
      float *x = random_floats((size_t)n + 1, 2.0f), *was = take((size_t)n * 4),
            *cs = take((size_t)n * 4);
      float end = x[n];
      memcpy(was, x, (size_t)n * 4);
      for (int i = 0; i < n / 2; i++)
        cs[i] = cosf((float)i * 0.7f), cs[n / 2 + i] = sinf((float)i * 0.7f);
      k->rope(x, cs, n, inter);
      for (int i = 0; i < n / 2; i++) {
        int a = inter ? 2 * i : i, b = inter ? 2 * i + 1 : i + n / 2;
        double c = cs[i], s = cs[n / 2 + i];
        close_to("rope", x[a], was[a] * c - was[b] * s, 1e-6);
        close_to("rope", x[b], was[a] * s + was[b] * c, 1e-6);
      }
      assert_true(x[n] == end);
      free(x), free(was), free(cs);
    }
}

static double plain_act(double x, mr_act act) {
  switch (act) {
  case MR_ACT_SILU:
    return x / (1 + exp(-x));
  case MR_ACT_GELU:
    return 0.5 * x * erfc(-x / sqrt(2.0));
  case MR_ACT_GELU_TANH:
    return 0.5 * x * (1 + tanh(sqrt(2.0 / 3.14159265358979) * (x + 0.044715 * x * x * x)));
  case MR_ACT_RELU:
    return x > 0 ? x : 0;
  case MR_ACT_RELU2:
    return x > 0 ? x * x : 0;
  case MR_ACT_QUICK_GELU:
    return x / (1 + exp(-1.702 * x));
  }
  return 0;
}

static void gate_on(const mr_kernels *k) {
  enum { N = 20011 };
  float *x = take(N * 4), *up = random_floats(N, 1.0f), *y = take(N * 4);
  for (int i = 0; i < N; i++)
    x[i] = (float)(i - N / 2) * 0.002f;
  for (int act = MR_ACT_SILU; act <= MR_ACT_QUICK_GELU; act++) {
    k->gate(y, x, NULL, N, (mr_act)act);
    for (int i = 0; i < N; i++) {
      double want = plain_act(x[i], (mr_act)act);
      close_to("act", y[i], want, 2e-6 * fabs(want) + 4e-7 * fmin(1.0, fabs(x[i])));
    }
    memcpy(y, x, N * 4);
    k->gate(y, y, up, N - 3, (mr_act)act); /* in place, times up, odd length */
    for (int i = 0; i < N - 3; i++) {
      double want = plain_act(x[i], (mr_act)act) * up[i];
      close_to("gate", y[i], want, 3e-6 * fabs(want) + 4e-7 * fmin(1.0, fabs(x[i])));
    }
    assert_true(y[N - 1] == x[N - 1]);
    float odd[3] = {NAN, INFINITY, 1e30f};
    k->gate(odd, odd, NULL, 3, (mr_act)act);
    assert_true(isnan(odd[0]) && odd[1] == INFINITY);
  }
  free(x), free(up), free(y);
}

static void small_ops_on(const mr_kernels *k) {
  for (int n = 1; n < 100; n++) {
    float *x = random_floats((size_t)n, 9.0f), *y = random_floats((size_t)n, 9.0f),
          *was = take((size_t)n * 4);
    memcpy(was, y, (size_t)n * 4);
    k->axpy(y, x, 0.37f, n);
    for (int i = 0; i < n; i++)
      close_to("axpy", y[i], was[i] + x[i] * 0.37, 2e-6);
    memcpy(was, x, (size_t)n * 4);
    k->scale(x, -1.5f, n);
    for (int i = 0; i < n; i++)
      assert_true(x[i] == was[i] * -1.5f);
    memcpy(was, x, (size_t)n * 4);
    k->softcap(x, 5.0f, n);
    for (int i = 0; i < n; i++) {
      double want = 5.0 * tanh(was[i] / 5.0);
      close_to("softcap", x[i], want, 1e-6 * fabs(want));
    }
    free(x), free(y), free(was);
  }
}

static void elementwise_is_right(void **state) {
  (void)state;
  on_every_table(norms_on);
  on_every_table(rope_on);
  on_every_table(gate_on);
  on_every_table(small_ops_on);
}

/* ------------------------------------------------------------------ over the vocabulary */
static void argmax_of(const mr_kernels *k, int n) {
  float *x = random_floats((size_t)n, 5.0f);
  int best = 0, bad;
  for (int i = 1; i < n; i++)
    if (x[i] > x[best])
      best = i;
  assert_int_equal(k->argmax(x, n, &bad), best);
  assert_int_equal(bad, 0);
  x[n - 1] = x[best]; /* a tie: the lower index */
  x[n / 2] = best < n / 2 ? -INFINITY : x[n / 2];
  assert_int_equal(k->argmax(x, n, &bad), best);
  assert_int_equal(bad, 0);
  x[n / 3] = NAN;
  int i = k->argmax(x, n, &bad);
  assert_true(bad == 1 && i >= 0 && i < n);
  x[n / 3] = INFINITY;
  (void)k->argmax(x, n, &bad);
  assert_int_equal(bad, 1);
  for (int j = 0; j < n; j++)
    x[j] = -INFINITY;
  assert_int_equal(k->argmax(x, n, &bad), 0);
  free(x);
}

static void argmax_on(const mr_kernels *k) {
  static const int many[] = {4095, 4096, 4097, 8200, 49152};
  for (int n = 1; n < 200; n++)
    argmax_of(k, n);
  for (size_t i = 0; i < 4 * sizeof many / sizeof *many; i++) /* the largest is anywhere */
    argmax_of(k, many[i / 4]);
}

static void logsumexp_on(const mr_kernels *k) {
  static const int ns[] = {1, 3, 15, 16, 17, 1000, 49152};
  for (size_t j = 0; j < sizeof ns / sizeof *ns; j++) {
    int n = ns[j];
    float *x = random_floats((size_t)n, 20.0f);
    if (n > 3)
      x[2] = -INFINITY;
    double max = -INFINITY, sum = 0;
    for (int i = 0; i < n; i++)
      max = fmax(max, x[i]);
    for (int i = 0; i < n; i++)
      sum += exp(x[i] - max);
    close_to("logsumexp", k->logsumexp(x, n), max + log(sum), 1e-6);
    free(x);
  }
}

static void vocabulary_ops_are_right(void **state) {
  (void)state;
  on_every_table(argmax_on);
  on_every_table(logsumexp_on);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(tables_are_found),
      cmocka_unit_test(gemm_is_right),
      cmocka_unit_test(avxvnni_gives_the_bits_of_avx2),
      cmocka_unit_test(gemm_rows_do_not_see_each_other),
      cmocka_unit_test(gemm_extremes),
      cmocka_unit_test(attention_is_right),
      cmocka_unit_test(attention_with_odd_keys),
      cmocka_unit_test(blocks_are_packed),
      cmocka_unit_test(keys_are_rotated),
      cmocka_unit_test(elementwise_is_right),
      cmocka_unit_test(vocabulary_ops_are_right),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
