/* Heads and attention of kernels/gpu, on every emulated machine and in every order of threads,
 * against plain C in double; and that no bit depends on how the work was cut. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "tests/unit/gpu_rig.h"

#define PAGE MR_GPU_PAGE

typedef struct scene { /* one sequence: `before` tokens in its pages, n new ones */
  int heads, kv_heads, dim, before, n;
  int window, chunk;
  float softcap, size; /* size: of queries */
  bool slopes, sinks, wide;
  int kv; /* mr_gpu_kv */
  /* made of them */
  float *q, *k, *v; /* [n, heads, dim], [before + n, kv_heads, dim] */
  float slope[16], sink[16];
  int32_t *table;
  mr_gpu_attn args;
  size_t out_bytes;
} scene;

static double rounded(const scene *s, float x) {
  return s->wide ? x : mr_bf16_to_f32(mr_f32_to_bf16(x));
}

static float e4m3(uint8_t code) {
  float x = ldexpf(1 + (float)(code & 7) / 8, (code >> 3 & 15) - 7);
  return (code & 0x7f) < 8 ? 0 : code & 0x80 ? -x : x;
}

/* What value d of a token's head at `part` is. */
static float stored(const uint8_t *part, int kv, int dim, int slot, int d) {
  size_t at = (size_t)(slot * dim + d);
  const float *scales = (const float *)(const void *)(part + PAGE * dim);
  switch (kv) {
  case MR_GPU_KV_F32:
    return ((const float *)(const void *)part)[at];
  case MR_GPU_KV_F16:
    return mr_f16_to_f32(((const uint16_t *)(const void *)part)[at]);
  case MR_GPU_KV_BF16:
    return mr_bf16_to_f32(((const uint16_t *)(const void *)part)[at]);
  case MR_GPU_KV_INT8:
    return (float)(int8_t)part[at] * scales[slot];
  default:
    return e4m3(part[at]) * scales[slot];
  }
}

static void put_stored(uint8_t *part, int kv, int dim, int slot, int d, float x) {
  size_t at = (size_t)(slot * dim + d);
  float *scales = (float *)(void *)(part + PAGE * dim);
  if (kv == MR_GPU_KV_F32)
    ((float *)(void *)part)[at] = x;
  else if (kv == MR_GPU_KV_F16)
    ((uint16_t *)(void *)part)[at] = mr_f32_to_f16(x);
  else if (kv == MR_GPU_KV_BF16)
    ((uint16_t *)(void *)part)[at] = mr_f32_to_bf16(x);
  else
    part[at] = kv == MR_GPU_KV_INT8 ? (uint8_t)(int8_t)(x * 127) : (uint8_t)(uniform() * 60 + 60);
  if (kv >= MR_GPU_KV_INT8)
    scales[slot] = (kv == MR_GPU_KV_INT8 ? 1 / 127.0f : 1 / 448.0f) * (float)(1 + slot % 3);
}

static size_t bytes_of(int kv, int dim) {
  return mr_kv_part_bytes((mr_kv_type)kv, dim);
}

static size_t part_bytes(const scene *s) {
  return bytes_of(s->kv, s->dim);
}

/* Pages in reverse order, with a page that nobody owns before each. */
static uint8_t *fill_pages(const scene *s, int pages) {
  size_t part = part_bytes(s), page = 2 * (size_t)s->kv_heads * part;
  uint8_t *all = mr_mem_alloc(2 * (size_t)pages, page);
  assert_non_null(all);
  memset(all, 0xff, 2 * (size_t)pages * page); /* what is not written is NaN */
  for (int t = 0; t < s->before + s->n; t++)
    for (int h = 0; h < s->kv_heads; h++)
      for (int d = 0; d < s->dim; d++) {
        uint8_t *k = all + (size_t)s->table[t / PAGE] * page + (size_t)h * 2 * part;
        int from = (t * s->kv_heads + h) * s->dim + d, slot = t % PAGE;
        put_stored(k, s->kv, s->dim, slot, d, s->k[from]);
        put_stored(k + part, s->kv, s->dim, slot, d, s->v[from]);
        s->k[from] = stored(k, s->kv, s->dim, slot, d);
        s->v[from] = stored(k + part, s->kv, s->dim, slot, d);
      }
  return all;
}

static void scene_new(rig *r, scene *s) {
  int len = s->before + s->n, pages = (len + PAGE - 1) / PAGE;
  size_t q = (size_t)(s->n * s->heads * s->dim), kv = (size_t)(len * s->kv_heads * s->dim);
  s->q = random_floats(q, s->size > 0 ? s->size : 1);
  s->k = random_floats(kv, 1);
  s->v = random_floats(kv, 1);
  s->table = mr_mem_alloc((size_t)pages, sizeof *s->table);
  assert_non_null(s->table);
  for (int i = 0; i < pages; i++)
    s->table[i] = 2 * (pages - 1 - i) + 1;
  for (int h = 0; h < s->heads; h++) {
    s->slope[h] = 0.01f * (float)(h + 1);
    s->sink[h] = uniform();
  }
  uint8_t *all = fill_pages(s, pages);
  size_t page = 2 * (size_t)s->kv_heads * part_bytes(s);
  s->out_bytes = q * sizeof(float);
  s->args = (mr_gpu_attn){.q = rig_put(r, s->q, q * sizeof(float)),
                          .ld_q = (size_t)(s->heads * s->dim),
                          .ld_out = (size_t)(s->heads * s->dim),
                          .pages = rig_put(r, all, 2 * (size_t)pages * page),
                          .page_bytes = page,
                          .part_bytes = part_bytes(s),
                          .table = rig_put(r, s->table, (size_t)pages * sizeof *s->table),
                          .slopes = s->slopes ? rig_put(r, s->slope, sizeof s->slope) : NULL,
                          .sinks = s->sinks ? rig_put(r, s->sink, sizeof s->sink) : NULL,
                          .scale = 0.5f,
                          .softcap = s->softcap,
                          .reach = 60,
                          .group = s->heads / s->kv_heads,
                          .head_dim = s->dim,
                          .kv = s->kv,
                          .window = s->window,
                          .chunk = s->chunk,
                          .splits = (len + MR_GPU_SPLIT - 1) / MR_GPU_SPLIT};
  mr_mem_free(all);
}

static void scene_free(rig *r, scene *s) {
  mr_mem_free(s->q);
  mr_mem_free(s->k);
  mr_mem_free(s->v);
  mr_mem_free(s->table);
  rig_free_all(r);
}

/* ------------------------------------------------------------------ plain attention */

static bool sees(const scene *s, int pos, int key) {
  return key <= pos && (!s->window || pos - key < s->window) &&
         (!s->chunk || key / s->chunk == pos / s->chunk);
}

static double score(const scene *s, int t, int head, int key) {
  int kv = head / (s->heads / s->kv_heads);
  double dot = 0;
  for (int d = 0; d < s->dim; d++)
    dot += rounded(s, s->q[(t * s->heads + head) * s->dim + d]) *
           rounded(s, s->k[(key * s->kv_heads + kv) * s->dim + d]);
  dot *= 0.5;
  if (s->softcap > 0)
    dot = s->softcap * tanh(dot / s->softcap);
  return s->slopes ? dot - (double)s->slope[head] * (s->before + t - key) : dot;
}

static void check_row(const rig *r, const scene *s, const float *out, int t, int head) {
  static double p[2048];
  int pos = s->before + t, kv = head / (s->heads / s->kv_heads);
  double max = s->sinks ? s->sink[head] : -INFINITY, sum = 0;
  for (int key = 0; key <= pos; key++) {
    p[key] = sees(s, pos, key) ? score(s, t, head, key) : -INFINITY;
    max = fmax(max, p[key]);
  }
  sum = s->sinks ? exp(s->sink[head] - max) : 0;
  for (int key = 0; key <= pos; key++)
    sum += p[key] = exp(p[key] - max);
  for (int d = 0; d < s->dim; d++) {
    double want = 0;
    for (int key = 0; key <= pos; key++)
      want += p[key] / sum * rounded(s, s->v[(key * s->kv_heads + kv) * s->dim + d]);
    close_to(r, "attention", out[(t * s->heads + head) * s->dim + d], want, s->wide ? 1e-4 : 1e-2);
  }
}

/* ------------------------------------------------------------------ one way to cut it */

typedef struct way {
  int warps;
  bool parts, uni;
  bool group; /* each new token is a run of its own; they share the splits before all of them */
} way;

/* Tiles of rows from token `at` on, which is the first of n. */
static int cut_rows(const scene *s, int warps, int at, int n, mr_gpu_tile like, mr_gpu_tile *out) {
  int rows = n * (s->heads / s->kv_heads), each = 16 * warps, made = 0;
  like.pos = s->before + at;
  for (int first = 0; first < rows; first += each) {
    like.first = first;
    like.n = rows - first < each ? rows - first : each;
    out[made++] = like;
  }
  return made;
}

static int cut_tiles(rig *r, const scene *s, way w, mr_gpu_attn *a) {
  mr_gpu_tile tiles[64];
  int n = 0, group = s->heads / s->kv_heads;
  for (int t = 0; t < s->n && w.group; t++) {
    assert_true(n < 60);
    n +=
        cut_rows(s, w.warps, t, 1,
                 (mr_gpu_tile){
                     .row = t, .shared = s->before / MR_GPU_SPLIT, .carry = (s->n - 1 - t) * group},
                 tiles + n);
  }
  if (!w.group)
    n = cut_rows(s, w.warps, 0, s->n, (mr_gpu_tile){0}, tiles);
  assert_true(n <= 64);
  a->tiles = rig_put(r, tiles, (size_t)n * sizeof *tiles);
  return n;
}

static mr_grid sum_tiles(rig *r, const scene *s, way w, mr_gpu_attn *a, int tiles) {
  static const mr_gpu_kernel kernels[2][2] = {{MR_GPU_attn_bf16, MR_GPU_attn_wide},
                                              {MR_GPU_attn_uni_bf16, MR_GPU_attn_uni_wide}};
  mr_grid grid = {.blocks = {(uint32_t)tiles, (uint32_t)a->ys, w.parts ? (uint32_t)a->splits : 1},
                  .warps = (uint32_t)a->warps,
                  .shared = a->at.bytes};
  size_t rows = (size_t)(tiles * a->ys * 16 * a->warps);
  if (w.parts)
    a->parts = rig_new(r, rows * (size_t)a->splits * (size_t)(a->at.values + 2) * sizeof(float));
  rig_run(r, kernels[w.uni][s->wide], grid, a);
  grid.blocks[2] = 1;
  if (w.parts)
    rig_run(r, w.uni ? MR_GPU_merge_uni : MR_GPU_merge,
            (mr_grid){.blocks = {(uint32_t)tiles, (uint32_t)a->ys, 1}, .warps = MR_GPU_WARPS}, a);
  a->parts = NULL;
  return grid;
}

/* The splits before all new tokens, for all of them; the last token comes first. */
static void attend_group(rig *r, const scene *s, way w, mr_gpu_attn *a) {
  int32_t members[64], pos[64];
  mr_gpu_tile tiles[64], like = {.shared = s->before / MR_GPU_SPLIT};
  mr_gpu_attn x = *a;
  for (int t = 0; t < s->n; t++) {
    members[t] = s->n - 1 - t;
    pos[t] = s->before + t;
  }
  int n = cut_rows(s, a->warps, 0, s->n, like, tiles);
  size_t rows = (size_t)(s->n * s->heads / s->kv_heads * a->ys);
  x.tiles = rig_put(r, tiles, (size_t)n * sizeof *tiles);
  x.members = rig_put(r, members, (size_t)s->n * sizeof *members);
  x.pos = rig_put(r, pos, (size_t)s->n * sizeof *pos);
  x.carry = a->carry = rig_new(r, rows * (size_t)(a->at.values + 2) * sizeof(float));
  x.splits = like.shared;
  sum_tiles(r, s, w, &x, n);
  a->splits -= like.shared;
}

/* Returns how many rows were computed again; -1: it cannot be cut that way. */
static int attend(rig *r, scene *s, way w, float *out) {
  int redone = 0;
  mr_gpu_attn a = s->args;
  int32_t redo[4096];
  a.warps = w.warps;
  if (!mr_gpu_attn_fit(&a, s->wide, r->dev->shared_bytes) || (w.group && s->before < MR_GPU_SPLIT))
    return -1;
  int tiles = cut_tiles(r, s, w, &a);
  a.ys = s->kv_heads * a.chunks;
  a.out = rig_new(r, s->out_bytes);
  size_t rows = (size_t)(tiles * a.ys * 16 * w.warps);
  assert_true(rows <= sizeof redo / sizeof *redo);
  if (w.uni)
    a.redo = rig_new(r, rows * sizeof *redo);
  if (w.group)
    attend_group(r, s, w, &a);
  mr_grid grid = sum_tiles(r, s, w, &a, tiles);
  a.carry = NULL;
  if (w.uni)
    rig_run(r, s->wide ? MR_GPU_attn_wide : MR_GPU_attn_bf16, grid, &a);
  rig_get(r, out, a.out, s->out_bytes);
  if (w.uni)
    rig_get(r, redo, a.redo, rows * sizeof *redo);
  int own = (w.group ? 1 : s->n) * s->args.group; /* rows that are none may say anything */
  for (size_t i = 0; w.uni && i < rows; i++)
    redone += (int)(i % (size_t)(16 * w.warps)) < own && redo[i] == 1;
  return redone;
}

/* All ways give the same bits in one form, and what is right. */
static int check_scene(rig *r, scene s) {
  static const way ways[] = {{.warps = 1},
                             {.warps = 1, .parts = true},
                             {.warps = 4},
                             {.warps = 4, .parts = true},
                             {.warps = 1, .uni = true},
                             {.warps = 1, .uni = true, .parts = true},
                             {.warps = 4, .uni = true},
                             {.warps = 1, .group = true},
                             {.warps = 4, .group = true, .parts = true},
                             {.warps = 4, .group = true, .uni = true},
                             {.warps = 1, .group = true, .uni = true, .parts = true}};
  int redone = 0;
  scene_new(r, &s);
  float *first[2] = {NULL, NULL};
  for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
    float *out = mr_mem_alloc(s.out_bytes, 1);
    assert_non_null(out);
    int n = attend(r, &s, ways[i], out);
    redone = n > redone ? n : redone;
    float **like = &first[ways[i].uni];
    if (n >= 0 && *like && memcmp(out, *like, s.out_bytes))
      fail_msg("%s: %d heads of %d: bits depend on way %zu", r->dev->arch, s.heads, s.dim, i);
    for (int t = 0; n >= 0 && !*like && t < s.n; t++)
      for (int h = 0; h < s.heads; h++)
        check_row(r, &s, out, t, h);
    if (n >= 0 && !*like)
      *like = out;
    else
      mr_mem_free(out);
  }
  mr_mem_free(first[0]);
  mr_mem_free(first[1]);
  scene_free(r, &s);
  return redone;
}

/* ------------------------------------------------------------------ tests */

static void scenes(rig *r) {
  static const scene all[] = {
      {.heads = 2, .kv_heads = 1, .dim = 16, .before = 0, .n = 1},
      {.heads = 3, .kv_heads = 1, .dim = 64, .before = 290, .n = 1},
      {.heads = 4, .kv_heads = 2, .dim = 32, .before = 250, .n = 21, .sinks = true},
      {.heads = 2, .kv_heads = 2, .dim = 20, .before = 40, .n = 3, .softcap = 5},
      {.heads = 2, .kv_heads = 1, .dim = 144, .before = 5, .n = 2},
      {.heads = 2, .kv_heads = 1, .dim = 24, .before = 300, .n = 40, .window = 45},
      {.heads = 6, .kv_heads = 2, .dim = 16, .before = 780, .n = 6, .sinks = true, .slopes = true},
      {.heads = 2, .kv_heads = 1, .dim = 16, .before = 531, .n = 9, .window = 280},
      {.heads = 2, .kv_heads = 1, .dim = 144, .before = 515, .n = 2, .softcap = 5, .chunk = 400},
      {.heads = 2, .kv_heads = 1, .dim = 16, .before = 50, .n = 33, .chunk = 24, .slopes = true},
  };
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    for (int wide = 0; wide < 2; wide++) {
      scene s = all[i];
      s.wide = wide;
      s.kv = wide ? MR_GPU_KV_F32 : MR_GPU_KV_BF16;
      check_scene(r, s);
    }
}

static void attention_is_right(void **state) {
  (void)state;
  on_every_machine(scenes);
}

/* Every type of keys and values, whole words and single values, rounded and as pairs. */
static void types(rig *r) {
  static const int kv[] = {MR_GPU_KV_F16, MR_GPU_KV_BF16, MR_GPU_KV_INT8, MR_GPU_KV_FP8};
  static const scene all[] = {
      {.heads = 2, .kv_heads = 1, .dim = 32, .before = 290, .n = 1},
      {.heads = 2, .kv_heads = 2, .dim = 20, .before = 40, .n = 3},
      {.heads = 2, .kv_heads = 1, .dim = 19, .before = 30, .n = 5, .window = 9},
      {.heads = 2, .kv_heads = 1, .dim = 144, .before = 5, .n = 2},
  };
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    for (int k = 0; k < 4; k++) {
      scene s = all[i];
      s.wide = (k + i) % 2;
      s.kv = kv[k];
      check_scene(r, s);
    }
}

static void every_type_is_right(void **state) {
  (void)state;
  on_every_machine(types);
}

/* Scores far from phi: the unified form gives them up, and the running form gets them right. */
static void far_scores(rig *r) {
  scene s = {.heads = 2,
             .kv_heads = 1,
             .dim = 32,
             .before = 270,
             .n = 3,
             .size = 60,
             .kv = MR_GPU_KV_BF16};
  assert_true(check_scene(r, s) > 0);
}

static void far_scores_are_computed_again(void **state) {
  (void)state;
  on_every_machine(far_scores);
}

/* ------------------------------------------------------------------ heads */

typedef struct plain_head {
  bool layer, late, each, interleaved, bias, same; /* same: values are the keys */
  int n_rot, first, k_dims, rotate;
  float clip;
} plain_head;

static void plain_norm_head(double *x, const float *w, const float *b, int n, bool layer) {
  double mean = 0, var = 0;
  for (int i = 0; i < n && layer; i++)
    mean += x[i] / n;
  for (int i = 0; i < n; i++)
    var += (x[i] - mean) * (x[i] - mean) / n;
  for (int i = 0; i < n; i++)
    x[i] = (x[i] - mean) / sqrt(var + 1e-5) * w[i] + (b ? b[i] : 0);
}

static void plain_ready(double *x, const float *w, const float *b, int n, const float *rope,
                        const plain_head *p) {
  int half = p->n_rot / 2;
  if (!p->late)
    plain_norm_head(x, w, b, n, p->layer);
  for (int i = 0; i < half; i++) {
    double *a = x + p->first + (p->interleaved ? 2 * i : i);
    double *z = p->interleaved ? a + 1 : a + half, u = *a, v = *z;
    *a = u * rope[i] - v * rope[half + i];
    *z = u * rope[half + i] + v * rope[i];
  }
  if (p->late)
    plain_norm_head(x, w, b, n, p->layer);
}

/* By its definition: the sign of (i, j) is the parity of i & j. */
static void plain_rotate(double *x, int dim, int block) {
  double y[64];
  for (int at = 0; block && at < dim; at += block) {
    for (int i = 0; i < block; i++) {
      y[i] = 0;
      for (int j = 0; j < block; j++)
        y[i] += (__builtin_popcount((unsigned)(i & j)) % 2 ? -1 : 1) * x[at + j] / sqrt(block);
    }
    memcpy(x + at, y, (size_t)block * sizeof *y);
  }
}

enum { TOKENS = 2, QH = 3, KH = 2, DIM = 24 };

/* Within half a step of 8 bits, or what 16 or 32 leave. */
static double head_tolerance(int kv, double most) {
  return kv == MR_GPU_KV_F32    ? 1e-4
         : kv == MR_GPU_KV_F16  ? 1e-4 + most / 2000
         : kv == MR_GPU_KV_BF16 ? 1e-4 + most / 250
         : kv == MR_GPU_KV_INT8 ? 1e-4 + most / 253
                                : 1e-4 + most / 16; /* four bits */
}

static void check_stored(const rig *r, const char *what, const uint8_t *part, int kv, int slot,
                         const double *want) {
  double most = 0;
  for (int d = 0; d < DIM; d++)
    most = fmax(most, fabs(want[d]));
  for (int d = 0; d < DIM; d++)
    close_to(r, what, stored(part, kv, DIM, slot, d), want[d], head_tolerance(kv, most));
}

static double plain_clip(float x, float clip) {
  return clip > 0 ? fmax(-clip, fmin(x, clip)) : (double)x;
}

/* in: q, k, v, norms, rope, biases. */
static void check_ready(const rig *r, const plain_head *p, int kv, const float *const *in,
                        const int32_t *pos, const int32_t *page, const float *got_q,
                        const uint8_t *pages) {
  const float *q = in[0], *k = in[1], *v = in[2];
  size_t part = bytes_of(kv, DIM);
  for (int t = 0; t < TOKENS; t++)
    for (int h = 0; h < QH + KH; h++) {
      bool query = h < QH;
      int n = query || !p->k_dims ? DIM : p->k_dims, head = query ? h : h - QH;
      const float *from = query ? q + (t * QH + head) * DIM : k + (t * KH + head) * DIM;
      size_t norm = (size_t)((query ? 0 : QH * DIM) + (p->each ? head * n : 0));
      double x[DIM], y[DIM];
      for (int d = 0; d < DIM; d++)
        x[d] = plain_clip(from[d], p->clip);
      plain_ready(x, in[3] + norm, p->bias ? in[5] + norm : NULL, n, in[4] + t * p->n_rot, p);
      for (int d = 0; d < DIM && !query; d++)
        y[d] = plain_clip(p->same ? (float)x[d] : v[(t * KH + head) * DIM + d], p->clip);
      plain_rotate(x, DIM, p->rotate);
      for (int d = 0; d < DIM && query; d++)
        close_to(r, "a query", got_q[(t * QH + head) * DIM + d], x[d], 1e-4);
      const uint8_t *at = pages + (size_t)(page[t] * KH + head) * 2 * part;
      if (!query) {
        check_stored(r, "keys", at, kv, pos[t] % PAGE, x);
        check_stored(r, "values", at + part, kv, pos[t] % PAGE, y);
      }
    }
}

static void check_heads(rig *r, plain_head p, int kv) {
  static const int32_t pos[TOKENS] = {37, 38}, page[TOKENS] = {2, 1};
  float *q = random_floats(TOKENS * QH * DIM, 2), *k = random_floats(TOKENS * KH * DIM, 2);
  float *v = random_floats(TOKENS * KH * DIM, 2), *w = random_floats((QH + KH) * DIM, 1);
  float *rope = random_floats((size_t)TOKENS * (size_t)(p.n_rot + 1), 1);
  float *bias = random_floats((QH + KH) * DIM, 1);
  size_t part = bytes_of(kv, DIM), bytes = 3 * KH * 2 * part;
  p.rotate = kv > MR_GPU_KV_BF16 ? mr_rotate_block(DIM) : 0;
  static float got_q[TOKENS * QH * DIM];
  uint8_t *pages = mr_mem_alloc(bytes, 1);
  assert_non_null(pages);
  mr_gpu_heads a = {.q = rig_put(r, q, sizeof got_q),
                    .k = rig_put(r, k, TOKENS * KH * DIM * sizeof *k),
                    .v = p.same ? NULL : rig_put(r, v, TOKENS * KH * DIM * sizeof *v),
                    .ld_q = QH * DIM,
                    .ld_k = KH * DIM,
                    .ld_v = KH * DIM,
                    .q_norm = rig_put(r, w, QH * DIM * sizeof *w),
                    .k_norm = rig_put(r, w + QH * DIM, KH * DIM * sizeof *w),
                    .rope = rig_put(r, rope, (size_t)TOKENS * (size_t)p.n_rot * sizeof *rope),
                    .pos = rig_put(r, pos, sizeof pos),
                    .page = rig_put(r, page, sizeof page),
                    .pages = rig_new(r, bytes),
                    .page_bytes = KH * 2 * part,
                    .part_bytes = part,
                    .eps = 1e-5f,
                    .clip = p.clip,
                    .n_heads = QH,
                    .n_kv_heads = KH,
                    .head_dim = DIM,
                    .k_dims = p.k_dims ? p.k_dims : DIM,
                    .norm = p.layer ? MR_GPU_NORM_LAYER : MR_GPU_NORM_RMS,
                    .each = p.each,
                    .late = p.late,
                    .n_rot = p.n_rot,
                    .rope_first = p.first,
                    .interleaved = p.interleaved,
                    .kv = kv,
                    .rotate = p.rotate};
  a.q_norm_b = p.bias ? rig_put(r, bias, QH * DIM * sizeof *bias) : NULL;
  a.k_norm_b = p.bias ? rig_put(r, bias + QH * DIM, KH * DIM * sizeof *bias) : NULL;
  mr_grid grid = {.blocks = {TOKENS, (QH + KH + MR_GPU_WARPS - 1) / MR_GPU_WARPS, 1},
                  .warps = MR_GPU_WARPS,
                  .shared = MR_GPU_WARPS * DIM * sizeof(float)};
  rig_run(r, MR_GPU_heads, grid, &a);
  rig_get(r, got_q, a.q, sizeof got_q);
  rig_get(r, pages, a.pages, bytes);
  const float *in[] = {q, k, v, w, rope, bias};
  check_ready(r, &p, kv, in, pos, page, got_q, pages);
  float *mine[] = {q, k, v, w, rope, bias};
  for (size_t i = 0; i < sizeof mine / sizeof *mine; i++)
    mr_mem_free(mine[i]);
  mr_mem_free(pages);
  rig_free_all(r);
}

static void heads(rig *r) {
  static const plain_head kinds[] = {{.n_rot = 24},
                                     {.n_rot = 8, .first = 4, .interleaved = true},
                                     {.n_rot = 16, .late = true, .each = true},
                                     {.layer = true, .each = true, .clip = 1},
                                     {.layer = true, .each = true, .bias = true, .same = true},
                                     {.n_rot = 24, .k_dims = 16}};
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
    for (int kv = MR_GPU_KV_F32; kv <= MR_GPU_KV_FP8; kv++)
      if (kv != MR_KV_Q4)
        check_heads(r, kinds[i], kv);
}

static void heads_are_right(void **state) {
  (void)state;
  on_every_machine(heads);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(heads_are_right),
      cmocka_unit_test(attention_is_right),
      cmocka_unit_test(every_type_is_right),
      cmocka_unit_test(far_scores_are_computed_again),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
