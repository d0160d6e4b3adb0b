/* lora_rig.h: adapters with random factors, models with these merged into them, and steps of both,
 * for tests of adapters. Included after cmocka. */
#ifndef TESTS_UNIT_LORA_RIG_H
#define TESTS_UNIT_LORA_RIG_H

#include <limits.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

#include "io/mem.h"
#include "src/forward.h"
#include "src/lora.h"
#include "src/names.h"
#include "tests/unit/conformance.h"
#include "tests/unit/starve.h"
#include "tests/unit/tiny_hf.h"

#define V_RANK 2 /* by rank_pattern */
#define ALPHA 6.0
#define V_ALPHA 5.0

static out_file merged, adapter;

static int lora_rank = 3;

static const char *plain_config(void) {
  static char text[500];
  snprintf(
      text, sizeof text,
      "{\"peft_type\":\"LORA\",\"r\":%d,\"lora_alpha\":6,\"use_rslora\":true,\"bias\":\"none\","
      "\"target_parameters\":[\"experts.gate_up_proj\",\"experts.down_proj\","
      "\"input_linear.weight\",\"output_linear.weight\"],"
      "\"target_modules\":\"all-linear\",\"rank_pattern\":{\"self_attn.v_proj\":2},"
      "\"alpha_pattern\":{\"self_attn.v_proj\":5}}",
      lora_rank);
  return text;
}

static const char *write_adapter(const char *name, const char *config) {
  static char dir[4][300];
  static int at;
  char path[400];
  at = (at + 1) % 4;
  snprintf(dir[at], sizeof dir[at], "%s/%s", temp_dir, name);
  mkdir(dir[at], 0700);
  snprintf(path, sizeof path, "%s/adapter_config.json", dir[at]);
  FILE *f = fopen(path, "wb");
  assert_non_null(f);
  fputs(config, f);
  fclose(f);
  snprintf(path, sizeof path, "%s/adapter_model.safetensors", dir[at]);
  write_file(&adapter, path);
  return dir[at];
}

/* ------------------------------------------------------------------ adapters and what they add */

static bool is_v(const char *module) {
  size_t n = strlen(module);
  return n > 17 && !strcmp(module + n - 16, "self_attn.v_proj");
}

/* A [ranks, k] and B [n, ranks], random. */
static void put_pair(const char *module, int ranks, int n, int k, float **a, float **b) {
  char name[400];
  snprintf(name, sizeof name, "base_model.model.%s.lora_A.weight", module);
  *a = put(&adapter, name, ranks, k);
  snprintf(name, sizeof name, "base_model.model.%s.lora_B.weight", module);
  *b = put(&adapter, name, n, ranks);
  fill(*a, (size_t)ranks * (size_t)k, 0.5f / sqrtf((float)k));
  fill(*b, (size_t)ranks * (size_t)n, 0.1f);
}

/* A and B of a module, random; delta[n, k] is what they add to its weight. */
static void make_pair(const char *module, int n, int k, float *delta) {
  int rank = is_v(module) ? V_RANK : lora_rank;
  double scale = (is_v(module) ? V_ALPHA : ALPHA) / sqrt(rank);
  float *a, *b;
  put_pair(module, rank, n, k, &a, &b);
  for (int r = 0; r < n; r++)
    for (int i = 0; i < k; i++) {
      double sum = 0;
      for (int j = 0; j < rank; j++)
        sum += (double)b[r * rank + j] * a[j * k + i];
      delta[(size_t)r * (size_t)k + (size_t)i] = (float)(scale * sum);
    }
}

/* The same of n experts in one parameter, as PEFT stacks them: delta [experts, n, k]. `crossed`: A
 * meets the outputs, B the inputs. */
static void make_fused(const char *module, int experts, int n, int k, bool crossed, float *delta) {
  double scale = ALPHA / sqrt(lora_rank);
  int a_cols = crossed ? n : k, ranks = experts * lora_rank;
  float *a, *b;
  put_pair(module, ranks, crossed ? k : n, a_cols, &a, &b);
  for (int e = 0; e < experts; e++)
    for (int r = 0; r < n; r++)
      for (int i = 0; i < k; i++) {
        double sum = 0;
        for (int j = 0; j < lora_rank; j++)
          sum += (double)a[(e * lora_rank + j) * a_cols + (crossed ? r : i)] *
                 b[(crossed ? i : r) * ranks + j * experts + e];
        delta[((size_t)e * (size_t)n + (size_t)r) * (size_t)k + (size_t)i] = (float)(scale * sum);
      }
}

/* The same for an embedding: delta [vocab, d]. */
static void make_embedding(const char *module, int vocab, int d, float *delta) {
  char name[400];
  double scale = ALPHA / sqrt(lora_rank);
  snprintf(name, sizeof name, "base_model.model.%s.lora_embedding_A", module);
  float *a = put(&adapter, name, lora_rank, vocab);
  snprintf(name, sizeof name, "base_model.model.%s.lora_embedding_B", module);
  float *b = put(&adapter, name, d, lora_rank);
  fill(a, (size_t)lora_rank * (size_t)vocab, 0.3f);
  fill(b, (size_t)lora_rank * (size_t)d, 0.1f);
  for (int t = 0; t < vocab; t++)
    for (int i = 0; i < d; i++) {
      double sum = 0;
      for (int j = 0; j < lora_rank; j++)
        sum += (double)b[i * lora_rank + j] * a[j * vocab + t];
      delta[(size_t)t * (size_t)d + (size_t)i] = (float)(scale * sum);
    }
}

/* ------------------------------------------------------------------ running */

#define TOKENS 40
#define MAX_TOKENS 256

typedef struct engine {
  mr_device *dev; /* NULL: the CPU */
  mr_kv_memory pages;
  mr_model *m;
  const mr_kernels *k;
  mr_pool *pool;
  mr_kv *kv;
  mr_forward *f;
} engine;

typedef struct seat {
  mr_kv_seq seq;
  int32_t ids[TOKENS];
} seat;

static mr_scheme scheme = MR_SCHEME_F32;
static const mr_sim_opts *on_sim; /* not NULL: engines are opened on this emulated GPU */

static mr_code open_with(engine *e, mr_lora **l, const char *path, const char *const *dirs, int n,
                         mr_err *err) {
  *l = NULL;
  *e = (engine){.k = mr_kernels_best(), .pool = mr_pool_new(2, 0)};
  mr_code rc = mr_model_open(&e->m, path, err);
  if (!rc && n)
    rc = mr_lora_new(l, e->m, n, e->k, scheme, on_sim ? MR_LORA_ROWS : MR_LORA_PANELS, err);
  for (int i = 0; i < n && !rc; i++)
    rc = mr_lora_add(*l, i, "test", dirs[i], err);
  return rc;
}

static void *take_pages(void *ctx, size_t bytes) {
  return mr_device_take(ctx, bytes);
}

static mr_code open_on_sim(engine *e, mr_err *err) {
  mr_gpu_scheme held = scheme == MR_SCHEME_F32 ? MR_GPU_EXACT : MR_GPU_ALL_BF16;
  mr_code rc = mr_device_sim(&e->dev, on_sim, err);
  if (!rc)
    rc = mr_device_start(e->dev, on_sim->memory, err);
  if (rc)
    return rc;
  e->pages = (mr_kv_memory){.ctx = e->dev, .take = take_pages};
  rc = mr_kv_open_on(&e->kv, &e->m->c, MR_KV_F32, 100, &e->pages, err);
  return rc ? rc
            : mr_forward_open_gpu(&e->f, e->m, e->dev, e->kv, held, 0, MAX_TOKENS, MAX_TOKENS, err);
}

static void open_rest(engine *e) {
  mr_err err = MR_ERR_INIT;
  if (on_sim) {
    if (open_on_sim(e, &err))
      fail_msg("%s", err.text);
    return;
  }
  assert_int_equal(mr_model_pack(e->m, e->k, scheme, e->pool, &err), MR_OK);
  assert_int_equal(
      mr_kv_open(&e->kv, &e->m->c, MR_KV_F32, 100 * mr_kv_groups_of(&e->m->c, MR_KV_F32).n, &err),
      MR_OK);
  assert_int_equal(mr_forward_open(&e->f, e->m, e->k, e->pool, e->kv, MAX_TOKENS, MAX_TOKENS, &err),
                   MR_OK);
}

static void close_all(engine *e, mr_lora *l) {
  mr_forward_close(e->f);
  mr_kv_close(e->kv);
  mr_device_close(e->dev);
  mr_lora_close(l);
  mr_model_close(e->m);
  mr_pool_free(e->pool);
}

static void sit(const engine *e, seat *s, int salt) {
  mr_err err = MR_ERR_INIT;
  assert_int_equal(mr_kv_seq_init(e->kv, &s->seq, TOKENS, &err), MR_OK);
  for (int i = 0; i < TOKENS; i++)
    s->ids[i] = (i * 37 + salt * 11 + i * i) % e->m->c.n_vocab;
}

/* One step of n sequences, m tokens each from `at`, with these adapters; logits of all tokens of
 * sequence `which` to out. */
static void step(engine *e, seat *s, const int *adapters, int n, int at, int m, int which,
                 float *out) {
  static const uint8_t all[TOKENS] = {[0 ... TOKENS - 1] = 1};
  mr_run runs[8];
  mr_err err = MR_ERR_INIT;
  for (int i = 0; i < n; i++) {
    assert_int_equal(mr_kv_seq_reserve(e->kv, &s[i].seq, m), MR_OK);
    runs[i] = (mr_run){
        .seq = &s[i].seq, .tokens = s[i].ids + at, .n = m, .want = all, .adapter = adapters[i]};
  }
  assert_int_equal(mr_forward_step(e->f, runs, n, NULL, &err), MR_OK);
  for (int i = 0; i < m; i++)
    memcpy(out + (size_t)i * (size_t)e->m->c.n_vocab, mr_forward_logits(e->f, which * m + i),
           (size_t)e->m->c.n_vocab * sizeof *out);
}

/* Logits of one sequence alone. */
static float *alone(engine *e, int salt, int which) {
  seat s;
  float *out = calloc((size_t)TOKENS * (size_t)e->m->c.n_vocab, sizeof *out);
  sit(e, &s, salt);
  step(e, &s, &which, 1, 0, TOKENS, 0, out);
  mr_kv_seq_free(e->kv, &s.seq);
  return out;
}

static double difference(const float *a, const float *b, size_t n, double *spread) {
  double worst = 0, sum = 0, squares = 0;
  for (size_t i = 0; i < n; i++) {
    worst = isfinite(a[i]) ? fmax(worst, fabs((double)a[i] - b[i])) : INFINITY;
    sum += b[i];
    squares += (double)b[i] * b[i];
  }
  *spread = sqrt(fmax(squares / (double)n - sum / (double)n * (sum / (double)n), 1e-12));
  return worst;
}

/* Two adapters, in steps with and without neighbours. */
static void check_neighbours(engine *e, const float *one) {
  size_t row = (size_t)e->m->c.n_vocab;
  seat s[5];
  static const int who[5] = {1, 0, 2, 1, 2};
  float *out = calloc(TOKENS * row, sizeof *out);
  for (int i = 0; i < 5; i++)
    sit(e, &s[i], i == 3 ? 1 : 5 + i);
  for (int at = 0; at < TOKENS; at += 8) {
    step(e, s, who, 5, at, 8, 3, out);
    assert_memory_equal(out, one + (size_t)at * row, 8 * row * sizeof *out);
  }
  for (int i = 0; i < 5; i++)
    mr_kv_seq_free(e->kv, &s[i].seq);
  free(out);
}

static void compare(engine *base, engine *with, const char *name) {
  double spread, n = (double)TOKENS * base->m->c.n_vocab;
  float *a = alone(base, 1, 1), *b = alone(with, 1, 0), *plain = alone(base, 1, 0);
  double off = difference(a, b, (size_t)n, &spread);
  if (!(off <= 1e-3 * spread))
    fail_msg("%s: the adapter is off by %g of a spread of %g", name, off, spread);
  double moved = difference(a, plain, (size_t)n, &spread);
  if (!(moved > 0.02 * spread))
    fail_msg("%s: the adapter changes next to nothing (%g of %g)", name, moved, spread);
  check_neighbours(base, a);
  free(a);
  free(b);
  free(plain);
}

static double rms(const float *a, const float *b, size_t n) {
  double sum = 0;
  for (size_t i = 0; i < n; i++)
    sum += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
  return sqrt(sum / (double)n);
}

/* Each allocation of loading an adapter fails once; nothing leaks. */
static inline void starve(const char *path, const char *dir) {
  mr_err err = MR_ERR_INIT;
  mr_model *m;
  assert_int_equal(mr_model_open(&m, path, &err), MR_OK);
  int64_t live = mr_mem_live();
  mr_code rc = MR_E_NOMEM;
  bool more = true;
  for (int n = 0; n < 4000 && more; n++) {
    mr_lora *l;
    mr_err_clear(&err);
    mr_mem_fail_after(n);
    rc = mr_lora_new(&l, m, 1, mr_kernels_ref(), MR_SCHEME_F32, MR_LORA_PANELS, &err);
    if (!rc)
      rc = mr_lora_add(l, 0, "test", dir, &err);
    more = starved(n);
    mr_lora_close(l);
    assert_int_equal(mr_mem_live(), live);
    if (rc)
      assert_int_equal(rc, MR_E_NOMEM);
  }
  assert_int_equal(rc, MR_OK);
  mr_model_close(m);
}

/* ------------------------------------------------------------------ directories */

static const char *only; /* stems of what is adapted; NULL: all there is */

static bool adaptable(const mr_config *c, const char *module, int *layer) {
  int item;
  const char *stem = mr_names_module(module, layer, &item);
  return stem && (!only || strstr(only, stem)) && !strstr(stem, "norm") &&
         strcmp(stem, "position_embd") != 0 && !strstr(stem, "project_") &&
         strcmp(stem, "ffn_gate_inp_shexp") != 0 &&
         (*layer >= 0 || (!c->d_embed && c->tied != 1)) && *layer < c->n_layers;
}

/* An adapter's part of a tensor of all experts, [experts, rows, cols]. */
static void adapt_fused(const mr_config *c, const char *name, float *v, int rows, int cols) {
  char module[256];
  bool turned = c->arch.experts_columns;
  int n = turned ? cols : rows, k = turned ? rows : cols;
  size_t size = (size_t)n * (size_t)k, at;
  float *delta = calloc((size_t)c->n_experts, size * sizeof *delta);
  snprintf(module, sizeof module, "%s", name);
  *strrchr(module, '.') = 0; /* the parameter's own name */
  if (strstr(name, "gate_up_proj"))
    snprintf(module + strlen(module), sizeof module - strlen(module), ".base_layer");
  make_fused(module, c->n_experts, n, k, false, delta);
  for (int e = 0; e < c->n_experts; e++)
    for (int r = 0; r < rows; r++)
      for (int i = 0; i < cols; i++) {
        at = (size_t)e * size + (size_t)(turned ? i * k + r : r * k + i);
        v[(size_t)e * size + (size_t)(r * cols + i)] += delta[at];
      }
  free(delta);
}

/* The tensors of a directory with an adapter's part added, to `merged`; the adapter to `adapter`.
 */
static void adapt_directory(const mr_weights *w, const mr_config *c) {
  bool head = mr_weights_find(w, "lm_head.weight") || mr_weights_find(w, "embed_out.weight");
  for (size_t i = 0; i < mr_weights_n(w); i++) {
    const mr_gguf_tensor *t = mr_weights_at(w, i);
    char name[256];
    int layer, cols = (int)t->dims[0], rows = (int)(t->dims[1] * t->dims[2]);
    snprintf(name, sizeof name, "%.*s", (int)t->name.len, t->name.s);
    float *v = put(&merged, name, rows, cols);
    merged.t[merged.n - 1].deep = t->n_dims == 3 ? (int)t->dims[2] : 0;
    mr_dtype_get(t->dtype)->to_f32(v, t->data, (int64_t)rows * cols);
    char *end = strstr(name, ".weight");
    if (t->n_dims == 3 && t->dims[2] == c->n_experts && strncmp(name, "model.", 6) == 0) {
      adapt_fused(c, name, v, (int)t->dims[1], (int)t->dims[0]);
      continue;
    }
    if (t->n_dims != 2 || !end || end[7])
      continue;
    *end = 0;
    if (!adaptable(c, name, &layer) || (layer < 0 && !head))
      continue;
    bool turned = layer >= 0 && c->arch.hf_columns;
    bool embed = layer < 0 && !strstr(name, "head") && !strstr(name, "embed_out");
    int n = turned ? cols : rows, k = turned ? rows : cols;
    float *delta = calloc((size_t)rows * (size_t)cols, sizeof *delta);
    if (embed)
      make_embedding(name, rows, cols, delta);
    else
      make_pair(name, n, k, delta);
    for (int r = 0; r < rows; r++)
      for (int j = 0; j < cols; j++)
        v[r * cols + j] += turned ? delta[j * rows + r] : delta[r * cols + j];
    free(delta);
  }
}

/* Two adapters of a directory, and the second of them merged into it, in `whole`. */
static void write_merged(const char *dir, const char *dirs[2], char whole[300]) {
  mr_err err = MR_ERR_INIT;
  char to[400], from[PATH_MAX + 20];
  mr_weights *w;
  mr_config c;
  assert_int_equal(mr_weights_open(&w, dir, &err), MR_OK);
  assert_int_equal(mr_config_from_dir(&c, dir, &err), MR_OK);
  seed = 11;
  clear(&adapter);
  clear(&merged);
  adapt_directory(w, &c);
  dirs[0] = write_adapter("second", plain_config());
  clear(&adapter);
  clear(&merged);
  adapt_directory(w, &c);
  dirs[1] = dirs[0];
  dirs[0] = write_adapter("first", plain_config());
  snprintf(whole, 300, "%s/merged", temp_dir);
  mkdir(whole, 0700);
  snprintf(to, sizeof to, "%s/config.json", whole);
  snprintf(from, sizeof from, "%s/config.json", dir);
  unlink(to);
  assert_int_equal(symlink(from, to), 0);
  snprintf(to, sizeof to, "%s/model.safetensors", whole);
  write_file(&merged, to);
  mr_weights_close(w);
}

static void one_directory(void **path) {
  mr_err err = MR_ERR_INIT;
  char dir[PATH_MAX], whole[300];
  engine base, with;
  mr_lora *l, *none;
  const char *dirs[2];
  assert_non_null(realpath(*path, dir));
  write_merged(dir, dirs, whole);
  if (open_with(&base, &l, dir, dirs, 2, &err))
    fail_msg("%s: %s", dir, err.text);
  if (open_with(&with, &none, whole, NULL, 0, &err))
    fail_msg("%s, merged: %s", dir, err.text);
  open_rest(&base);
  open_rest(&with);
  compare(&base, &with, strrchr(dir, '/') + 1);
  close_all(&base, l);
  close_all(&with, NULL);
}

/* In int8, with B in float32 and (long ranks) in int8, an adapter is hardly further from float32
 * beside the base than merged into it; and its neighbours change no bit. */
static inline void check_fast(const char *dir) {
  for (lora_rank = 3; lora_rank < 50; lora_rank += 37) {
    mr_err err = MR_ERR_INIT;
    const char *dirs[2];
    char whole[300];
    float *out[3];
    double n = TOKENS * TINY_HF_VOCAB;
    write_merged(dir, dirs, whole);
    for (int i = 0; i < 3; i++) { /* merged exactly, merged, beside */
      engine e;
      mr_lora *l;
      scheme = i ? MR_SCHEME_I8 : MR_SCHEME_F32;
      assert_int_equal(open_with(&e, &l, i < 2 ? whole : dir, dirs, i < 2 ? 0 : 2, &err), MR_OK);
      open_rest(&e);
      out[i] = alone(&e, 1, i == 2);
      if (i == 2)
        check_neighbours(&e, out[2]);
      close_all(&e, l);
    }
    double a = rms(out[1], out[0], (size_t)n), b = rms(out[2], out[0], (size_t)n);
    print_message("rank %d: off by %.4f merged, %.4f beside\n", lora_rank, a, b);
    assert_true(a > 0 && b > 0 && b < 1.3 * a);
    for (int i = 0; i < 3; i++)
      free(out[i]);
  }
  lora_rank = 3;
  scheme = MR_SCHEME_F32;
}

/* Files of an adapter with a byte changed, in the header mostly, are taken or refused: no more. */
static inline void check_mangled(const char *dir, const char *with, int tries) {
  char path[400];
  size_t n = 0;
  int taken = 0;
  snprintf(path, sizeof path, "%s/adapter_model.safetensors", with);
  char *file = read_whole(path, &n);
  assert_non_null(file);
  uint64_t head;
  memcpy(&head, file, sizeof head);
  for (int i = 0; i < tries; i++) {
    mr_err err = MR_ERR_INIT;
    engine e;
    mr_lora *l;
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    size_t at = i % 8 ? 8 + (size_t)(seed >> 33) % head : (size_t)(seed >> 33) % n;
    char was = file[at];
    file[at] = i % 2 ? (char)('0' + (seed >> 20) % 10) : (char)(seed >> 24);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    fwrite(file, 1, n, f);
    assert_int_equal(fclose(f), 0);
    file[at] = was;
    mr_code rc = open_with(&e, &l, dir, &with, 1, &err);
    assert_true(rc == MR_OK || rc == MR_E_DATA);
    taken += rc == MR_OK;
    close_all(&e, l);
  }
  print_message("%d of %d mangled adapters are taken\n", taken, tries);
  assert_in_range(taken, 1, tries - 1);
  free(file);
}

/* The tensor of `merged` with this name. */
static inline float *tensor_of(const char *name) {
  for (int i = 0; i < merged.n; i++)
    if (!strcmp(merged.t[i].name, name))
      return merged.t[i].v;
  fail_msg("%s is missing", name);
  return NULL;
}

#endif
