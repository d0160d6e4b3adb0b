/* Adapters beside the base must give what the base gives with the adapters merged into it: a GGUF
 * model whose q and k lie in another order, and (where the data is, conformance.h) every directory
 * of tiny Hugging Face models, with all their linear layers adapted. A row's bits do not depend on
 * the adapters of its neighbours. And what is refused. */
#include <dirent.h>
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <math.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

#include "io/json.h"
#include "io/mem.h"
#include "src/forward.h"
#include "src/lora.h"
#include "src/names.h"
#include "tests/unit/conformance.h"
#include "tests/unit/temp.h"
#include "tests/unit/tiny_gguf.h"

#define RANK 3
#define V_RANK 2 /* by rank_pattern */
#define ALPHA 6.0
#define V_ALPHA 5.0
#define MAX_OUT 8192

/* ------------------------------------------------------------------ writing safetensors */

typedef struct out_tensor {
  char name[256];
  int deep, rows, cols; /* deep 0: a matrix */
  float *v;             /* owned */
} out_tensor;

typedef struct out_file {
  out_tensor t[MAX_OUT];
  int n;
} out_file;

static out_file merged, adapter;

static float *put(out_file *f, const char *name, int rows, int cols) {
  assert_true(f->n < MAX_OUT);
  out_tensor *t = &f->t[f->n++];
  snprintf(t->name, sizeof t->name, "%s", name);
  t->rows = rows;
  t->cols = cols;
  t->v = calloc((size_t)rows * (size_t)cols, sizeof(float));
  assert_non_null(t->v);
  return t->v;
}

static void clear(out_file *f) {
  for (int i = 0; i < f->n; i++)
    free(f->t[i].v);
  f->n = 0;
}

static void write_file(const out_file *f, const char *path) {
  json_t *root = json_object();
  size_t at = 0;
  for (int i = 0; i < f->n; i++) {
    size_t bytes = (size_t)f->t[i].rows * (size_t)f->t[i].cols * 4;
    json_t *shape = json_array();
    if (f->t[i].deep)
      json_array_append_new(shape, json_integer(f->t[i].deep));
    json_array_append_new(shape, json_integer(f->t[i].rows / (f->t[i].deep ? f->t[i].deep : 1)));
    json_array_append_new(shape, json_integer(f->t[i].cols));
    json_object_set_new(root, f->t[i].name,
                        json_pack("{s:s,s:o,s:[I,I]}", "dtype", "F32", "shape", shape,
                                  "data_offsets", (json_int_t)at, (json_int_t)(at + bytes)));
    at += bytes;
  }
  char *text = mr_json_dumps(root, JSON_COMPACT);
  uint64_t len = (strlen(text) + 7) / 8 * 8;
  FILE *out = fopen(path, "wb");
  assert_non_null(out);
  fwrite(&len, 8, 1, out);
  fprintf(out, "%-*s", (int)len, text);
  for (int i = 0; i < f->n; i++)
    fwrite(f->t[i].v, 4, (size_t)f->t[i].rows * (size_t)f->t[i].cols, out);
  assert_int_equal(fclose(out), 0);
  mr_mem_free(text);
  json_decref(root);
}

static const char *const plain_config =
    "{\"peft_type\":\"LORA\",\"r\":3,\"lora_alpha\":6,\"use_rslora\":true,\"bias\":\"none\","
    "\"target_modules\":\"all-linear\",\"rank_pattern\":{\"self_attn.v_proj\":2},"
    "\"alpha_pattern\":{\"self_attn.v_proj\":5}}";

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

static uint64_t state;

static void fill(float *v, size_t n, float scale) {
  for (size_t i = 0; i < n; i++)
    v[i] = tiny_random(&state) * scale;
}

static bool is_v(const char *module) {
  size_t n = strlen(module);
  return n > 17 && !strcmp(module + n - 16, "self_attn.v_proj");
}

/* A and B of a module, random; delta[n, k] is what they add to its weight. */
static void make_pair(const char *module, int n, int k, float *delta) {
  char name[400];
  int rank = is_v(module) ? V_RANK : RANK;
  double scale = (is_v(module) ? V_ALPHA : ALPHA) / sqrt(rank);
  snprintf(name, sizeof name, "base_model.model.%s.lora_A.weight", module);
  float *a = put(&adapter, name, rank, k);
  snprintf(name, sizeof name, "base_model.model.%s.lora_B.weight", module);
  float *b = put(&adapter, name, n, rank);
  fill(a, (size_t)rank * (size_t)k, 0.5f / sqrtf((float)k));
  fill(b, (size_t)rank * (size_t)n, 0.1f);
  for (int r = 0; r < n; r++)
    for (int i = 0; i < k; i++) {
      double sum = 0;
      for (int j = 0; j < rank; j++)
        sum += (double)b[r * rank + j] * a[j * k + i];
      delta[(size_t)r * (size_t)k + (size_t)i] = (float)(scale * sum);
    }
}

/* The same for an embedding: delta [vocab, d]. */
static void make_embedding(const char *module, int vocab, int d, float *delta) {
  char name[400];
  double scale = ALPHA / sqrt(RANK);
  snprintf(name, sizeof name, "base_model.model.%s.lora_embedding_A", module);
  float *a = put(&adapter, name, RANK, vocab);
  snprintf(name, sizeof name, "base_model.model.%s.lora_embedding_B", module);
  float *b = put(&adapter, name, d, RANK);
  fill(a, (size_t)RANK * (size_t)vocab, 0.3f);
  fill(b, (size_t)RANK * (size_t)d, 0.1f);
  for (int t = 0; t < vocab; t++)
    for (int i = 0; i < d; i++) {
      double sum = 0;
      for (int j = 0; j < RANK; j++)
        sum += (double)b[i * RANK + j] * a[j * vocab + t];
      delta[(size_t)t * (size_t)d + (size_t)i] = (float)(scale * sum);
    }
}

/* ------------------------------------------------------------------ running */

#define TOKENS 40
#define MAX_TOKENS 256

typedef struct engine {
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

static mr_code open_with(engine *e, mr_lora **l, const char *path, const char *const *dirs, int n,
                         mr_err *err) {
  *l = NULL;
  *e = (engine){.k = mr_kernels_best(), .pool = mr_pool_new(2, 0)};
  mr_code rc = mr_model_open(&e->m, path, err);
  if (!rc && n)
    rc = mr_lora_new(l, e->m, n, e->k, scheme, true, err);
  for (int i = 0; i < n && !rc; i++)
    rc = mr_lora_add(*l, i, "test", dirs[i], err);
  return rc;
}

static void open_rest(engine *e) {
  mr_err err = MR_ERR_INIT;
  assert_int_equal(mr_model_pack(e->m, e->k, scheme, e->pool, &err), MR_OK);
  assert_int_equal(mr_kv_open(&e->kv, &e->m->c, MR_KV_F32, 100, &err), MR_OK);
  assert_int_equal(mr_forward_open(&e->f, e->m, e->k, e->pool, e->kv, MAX_TOKENS, MAX_TOKENS, &err),
                   MR_OK);
}

static void close_all(engine *e, mr_lora *l) {
  mr_forward_close(e->f);
  mr_kv_close(e->kv);
  mr_lora_close(l);
  mr_model_close(e->m);
  mr_pool_free(e->pool);
}

static void sit(const engine *e, seat *s, int salt) {
  mr_err err = MR_ERR_INIT;
  assert_int_equal(mr_kv_seq_init(&s->seq, TOKENS, &err), MR_OK);
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

/* ------------------------------------------------------------------ GGUF */

/* Rows of q and k of llama-like files: the halves of a head by turns. */
static int in_hf(int r, bool turned) {
  int at = r % TINY_HEAD;
  return turned ? r - at + at / 2 + at % 2 * (TINY_HEAD / 2) : r;
}

static void merge_matrix(mr_matrix *w, const float *delta, bool turned) {
  float *v = calloc((size_t)w->n * (size_t)w->k, sizeof *v); /* freed with the process */
  for (int r = 0; r < w->n; r++) {
    mr_matrix_row(w, r, v + (size_t)r * (size_t)w->k);
    for (int i = 0; i < w->k; i++)
      v[(size_t)r * (size_t)w->k + (size_t)i] +=
          delta[(size_t)in_hf(r, turned) * (size_t)w->k + (size_t)i];
  }
  w->data = (const uint8_t *)v;
  w->dtype = MR_F32;
  w->mapped = false;
  w->row_bytes = (uint64_t)w->k * 4;
}

static void adapt_gguf(mr_model *m) {
  for (int l = 0; l < TINY_LAYERS; l++) {
    mr_layer *y = &m->layers[l];
    const struct {
      const char *name;
      mr_matrix *w;
      bool turned;
    } all[] = {{"self_attn.q_proj", &y->q, true},  {"self_attn.k_proj", &y->k, true},
               {"self_attn.v_proj", &y->v, false}, {"self_attn.o_proj", &y->o, false},
               {"mlp.gate_proj", &y->gate, false}, {"mlp.up_proj", &y->up, false},
               {"mlp.down_proj", &y->down, false}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
      char module[100];
      float *delta = calloc((size_t)all[i].w->n * (size_t)all[i].w->k, sizeof *delta);
      snprintf(module, sizeof module, "model.layers.%d.%s", l, all[i].name);
      make_pair(module, all[i].w->n, all[i].w->k, delta);
      merge_matrix(all[i].w, delta, all[i].turned);
      free(delta);
    }
  }
  float *delta = calloc(TINY_VOCAB * TINY_DIM, sizeof *delta);
  make_pair("lm_head", TINY_VOCAB, TINY_DIM, delta);
  merge_matrix(&m->head, delta, false);
  make_embedding("model.embed_tokens", TINY_VOCAB, TINY_DIM, delta);
  merge_matrix(&m->embed, delta, false);
  free(delta);
}

static const char *tiny_model(void) {
  const char *path = temp_path("tiny.gguf");
  assert_true(tiny_gguf_write(path, -1));
  return path;
}

static void test_gguf(void **unused) {
  (void)unused;
  mr_err err = MR_ERR_INIT;
  engine base, with;
  mr_lora *l, *none;
  char path[300];
  snprintf(path, sizeof path, "%s", tiny_model());
  assert_int_equal(open_with(&with, &none, path, NULL, 0, &err), MR_OK);
  state = 7;
  clear(&adapter);
  adapt_gguf(with.m);
  const char *dirs[2] = {write_adapter("one", plain_config), NULL};
  engine spare;
  assert_int_equal(open_with(&spare, &none, path, NULL, 0, &err), MR_OK);
  clear(&adapter);
  adapt_gguf(spare.m); /* another one */
  close_all(&spare, none);
  dirs[1] = write_adapter("two", plain_config);
  assert_int_equal(open_with(&base, &l, path, dirs, 2, &err), MR_OK);
  open_rest(&base);
  open_rest(&with);
  compare(&base, &with, "tiny.gguf");
  close_all(&base, l);
  close_all(&with, NULL);
}

static double rms(const float *a, const float *b, size_t n) {
  double sum = 0;
  for (size_t i = 0; i < n; i++)
    sum += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
  return sqrt(sum / (double)n);
}

/* Logits of the tiny model with an adapter merged into it (no dirs), or beside it. */
static float *answers(mr_scheme of, const char *path, const char *const *dirs, bool neighbours) {
  mr_err err = MR_ERR_INIT;
  engine e;
  mr_lora *l;
  scheme = of;
  assert_int_equal(open_with(&e, &l, path, dirs, dirs ? 2 : 0, &err), MR_OK);
  state = 7;
  clear(&adapter);
  if (!dirs)
    adapt_gguf(e.m);
  open_rest(&e);
  float *out = alone(&e, 1, dirs ? 1 : 0);
  if (neighbours)
    check_neighbours(&e, out);
  close_all(&e, l);
  scheme = MR_SCHEME_F32;
  return out;
}

/* Beside an int8 base A is int8, too: hardly further from float32 than an int8 base into which the
 * adapter was merged. */
static void test_fast(void **unused) {
  (void)unused;
  char path[300];
  snprintf(path, sizeof path, "%s", tiny_model());
  size_t n = (size_t)TOKENS * TINY_VOCAB;
  float *exact = answers(MR_SCHEME_F32, path, NULL, false);
  const char *dirs[2] = {write_adapter("one", plain_config), NULL};
  dirs[1] = dirs[0];
  float *joined = answers(MR_SCHEME_I8, path, NULL, false);
  float *beside = answers(MR_SCHEME_I8, path, dirs, true);
  double a = rms(joined, exact, n), b = rms(beside, exact, n);
  print_message("off by %.4f merged, %.4f beside\n", a, b);
  assert_true(a > 0 && b > 0 && b < 1.3 * a);
  free(exact);
  free(joined);
  free(beside);
}

/* A trained bias takes the place of the base's (none here); lora_bias is scaled. */
static void test_biases(void **unused) {
  (void)unused;
  mr_err err = MR_ERR_INIT;
  engine base;
  mr_lora *l;
  char path[300];
  snprintf(path, sizeof path, "%s", tiny_model());
  clear(&adapter);
  float *a =
      put(&adapter, "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight", RANK, TINY_DIM);
  put(&adapter, "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight", TINY_FF, RANK);
  float *b = put(&adapter, "base_model.model.model.layers.1.mlp.up_proj.lora_B.bias", 1, TINY_FF);
  float *q = put(&adapter, "base_model.model.model.layers.1.self_attn.q_proj.base_layer.bias", 1,
                 TINY_HEADS * TINY_HEAD);
  a[0] = 1;
  for (int i = 0; i < TINY_FF; i++)
    b[i] = (float)i;
  for (int i = 0; i < TINY_HEADS * TINY_HEAD; i++)
    q[i] = (float)i;
  const char *dir = write_adapter("bias", plain_config);
  assert_int_equal(open_with(&base, &l, path, &dir, 1, &err), MR_OK);
  const mr_lora_link *up = base.m->layers[1].up.lora, *query = base.m->layers[1].q.lora;
  assert_non_null(up->bias);
  assert_true(fabs(up->bias[5] - 5 * ALPHA / sqrt(RANK)) < 1e-5);
  assert_int_equal(query->rank, 0);
  for (int i = 0; i < TINY_HEADS * TINY_HEAD; i++)
    assert_true(query->bias[i] == (float)in_hf(i, true));
  assert_null(base.m->layers[0].up.lora);
  close_all(&base, l);
}

/* ------------------------------------------------------------------ refusals */

typedef struct refusal {
  const char *config, *tensor, *words;
  int rows, cols;
} refusal;

#define Q "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
#define PLAIN "{\"peft_type\":\"LORA\",\"r\":3,\"target_modules\":[\"q_proj\"]"

static void test_refused(void **unused) {
  (void)unused;
  static const refusal all[] = {
      {PLAIN "}", NULL, NULL, 0, 0},
      {"{\"peft_type\":\"IA3\",\"r\":3}", NULL, "\"IA3\"", 0, 0},
      {"{\"r\":3}", NULL, "peft_type is missing", 0, 0},
      {"[1]", NULL, "must hold an object", 0, 0},
      {"{", NULL, "", 0, 0},
      {PLAIN ",\"use_dora\":true}", NULL, "use_dora", 0, 0},
      {PLAIN ",\"modules_to_save\":[\"lm_head\"]}", NULL, "modules_to_save", 0, 0},
      {PLAIN ",\"init_lora_weights\":\"pissa_niter_4\"}", NULL, "pissa_niter_4", 0, 0},
      {PLAIN ",\"layer_replication\":[[0,1]]}", NULL, "layer_replication", 0, 0},
      {PLAIN ",\"bias\":\"some\"}", NULL, "bias is \"some\"", 0, 0},
      {PLAIN ",\"rank_pattern\":{\"q_proj\":0}}", NULL, "rank_pattern", 0, 0},
      {PLAIN ",\"rank_pattern\":{\"q_(proj\":2}}", NULL, "expression", 0, 0},
      {PLAIN ",\"rank_pattern\":{\"q_proj\":2}}", NULL, "[3, 64]", 0, 0},
      {PLAIN ",\"layers_to_transform\":[1]}", NULL, "do not name it", 0, 0},
      {"{\"peft_type\":\"LORA\",\"r\":3,\"target_modules\":[\"k_proj\"]}", NULL, "do not name it",
       0, 0},
      {"{\"peft_type\":\"LORA\",\"r\":3,\"target_modules\":\".*\\\\.k_proj\"}", NULL,
       "do not name it", 0, 0},
      {"{\"peft_type\":\"LORA\",\"r\":3,\"target_modules\":\"model.*q_proj\"}", NULL, NULL, 0, 0},
      {"{\"peft_type\":\"LORA\",\"r\":4}", NULL, "[3, 64]; this model", 0, 0},
      {"{\"peft_type\":\"LORA\",\"r\":0}", NULL, "r must be", 0, 0},
      {"{\"peft_type\":\"LORA\",\"r\":100000}", NULL, "r must be", 0, 0},
      {"{\"peft_type\":\"LORA\",\"r\":3}", "base_model.model.model.layers.0.mlp.odd.lora_A.weight",
       "lora_B.weight is missing", 3, 64},
      {"{\"peft_type\":\"LORA\",\"r\":3}", "base_model.model.score.weight", "none of an adapter", 3,
       64},
      {"{\"peft_type\":\"LORA\",\"r\":3}",
       "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", "none of an", 1,
       64},
      {"{\"peft_type\":\"LORA\",\"r\":3}", "base_model.model.model.layers.9.self_attn.q_proj.bias",
       "not a linear layer of this model", 1, 64},
      {"{\"peft_type\":\"LORA\",\"r\":3}", "base_model.model.model.norm.bias", "not a linear", 1,
       64},
  };
  char path[300];
  snprintf(path, sizeof path, "%s", tiny_model());
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    mr_err err = MR_ERR_INIT;
    engine e;
    mr_lora *l;
    clear(&adapter);
    put(&adapter, Q, 3, TINY_DIM);
    put(&adapter, "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight",
        TINY_HEADS * TINY_HEAD, 3);
    if (all[i].tensor)
      put(&adapter, all[i].tensor, all[i].rows, all[i].cols);
    const char *dir = write_adapter("refused", all[i].config);
    mr_code rc = open_with(&e, &l, path, &dir, 1, &err);
    if (all[i].words ? rc != MR_E_DATA || !strstr(err.text, all[i].words) : rc != MR_OK)
      fail_msg("%s %s: %d, %s", all[i].config, all[i].tensor ? all[i].tensor : "", (int)rc,
               err.text);
    close_all(&e, l);
  }
}

static void test_not_finite_or_absent(void **unused) {
  (void)unused;
  mr_err err = MR_ERR_INIT;
  engine e;
  mr_lora *l;
  char path[300];
  snprintf(path, sizeof path, "%s", tiny_model());
  clear(&adapter);
  put(&adapter, Q, 3, TINY_DIM)[70] = NAN;
  put(&adapter, "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight",
      TINY_HEADS * TINY_HEAD, 3);
  const char *dir = write_adapter("nan", PLAIN "}");
  assert_int_equal(open_with(&e, &l, path, &dir, 1, &err), MR_E_DATA);
  assert_non_null(strstr(err.text, "value 70 is not finite"));
  close_all(&e, l);
  mr_err_clear(&err);
  dir = "/nowhere/at/all";
  assert_int_equal(open_with(&e, &l, path, &dir, 1, &err), MR_E_NOINPUT);
  close_all(&e, l);
}

/* Each allocation of loading an adapter fails once; nothing leaks. */
static void starve(const char *path, const char *dir) {
  mr_err err = MR_ERR_INIT;
  mr_model *m;
  assert_int_equal(mr_model_open(&m, path, &err), MR_OK);
  int64_t live = mr_mem_live();
  mr_code rc = MR_E_NOMEM;
  for (int n = 0; n < 4000 && rc; n++) {
    mr_lora *l;
    mr_err_clear(&err);
    mr_mem_fail_after(n);
    rc = mr_lora_new(&l, m, 1, mr_kernels_ref(), MR_SCHEME_F32, true, &err);
    if (!rc)
      rc = mr_lora_add(l, 0, "test", dir, &err);
    mr_mem_fail_after(-1);
    mr_lora_close(l);
    assert_int_equal(mr_mem_live(), live);
    if (rc)
      assert_int_equal(rc, MR_E_NOMEM);
  }
  assert_int_equal(rc, MR_OK);
  mr_model_close(m);
}

static void test_no_memory(void **unused) {
  (void)unused;
  char path[300];
  snprintf(path, sizeof path, "%s", tiny_model());
  clear(&adapter);
  float *delta = calloc(TINY_DIM * TINY_FF, sizeof *delta);
  make_pair("model.layers.0.mlp.up_proj", TINY_FF, TINY_DIM, delta);
  free(delta);
  starve(path, write_adapter("memory", plain_config));
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
  state = 11;
  clear(&adapter);
  clear(&merged);
  adapt_directory(w, &c);
  dirs[0] = write_adapter("second", plain_config);
  clear(&adapter);
  clear(&merged);
  adapt_directory(w, &c);
  dirs[1] = dirs[0];
  dirs[0] = write_adapter("first", plain_config);
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

/* ------------------------------------------------------------------ latent attention */

enum { HEADS = 3, NOPE = 10, ROPE = 6, VALUES = 14, LATENT = 24, LOW = 20, WIDE = 48 };

static float *put_random(const char *name, int rows, int cols) {
  float *v = put(&merged, name, rows, cols);
  fill(v, (size_t)rows * (size_t)cols, 2 / sqrtf((float)cols));
  return v;
}

/* A small model of the kind of deepseek, whose queries have one matrix or (low) two. */
static const char *latent_model(bool low) {
  static char dir[300];
  char path[400], name[100];
  const struct {
    const char *name;
    int rows, cols; /* cols 0: ones */
  } layer[] = {
      {"input_layernorm", WIDE, 0},
      {"post_attention_layernorm", WIDE, 0},
      {"self_attn.kv_a_layernorm", LATENT, 0},
      {"self_attn.kv_a_proj_with_mqa", LATENT + ROPE, WIDE},
      {"self_attn.kv_b_proj", HEADS * (NOPE + VALUES), LATENT},
      {"self_attn.o_proj", WIDE, HEADS * VALUES},
      {"mlp.gate_proj", 64, WIDE},
      {"mlp.up_proj", 64, WIDE},
      {"mlp.down_proj", WIDE, 64},
      {low ? "self_attn.q_b_proj" : "self_attn.q_proj", HEADS * (NOPE + ROPE), low ? LOW : WIDE},
      {"self_attn.q_a_layernorm", LOW, 0},
      {"self_attn.q_a_proj", LOW, WIDE}};
  clear(&merged);
  state = 5;
  put_random("model.embed_tokens.weight", 96, WIDE);
  put_random("lm_head.weight", 96, WIDE);
  fill(put(&merged, "model.norm.weight", 1, WIDE), WIDE, 1);
  for (int l = 0; l < 2; l++)
    for (size_t i = 0; i < sizeof layer / sizeof *layer - (low ? 0 : 2); i++) {
      snprintf(name, sizeof name, "model.layers.%d.%s.weight", l, layer[i].name);
      if (layer[i].cols)
        put_random(name, layer[i].rows, layer[i].cols);
      else
        for (float *v = put(&merged, name, 1, layer[i].rows), *at = v; at < v + layer[i].rows;)
          *at++ = 1;
    }
  snprintf(dir, sizeof dir, "%s/latent", temp_dir);
  mkdir(dir, 0700);
  snprintf(path, sizeof path, "%s/model.safetensors", dir);
  write_file(&merged, path);
  snprintf(path, sizeof path, "%s/config.json", dir);
  FILE *f = fopen(path, "wb");
  assert_non_null(f);
  fprintf(f,
          "{\"model_type\":\"deepseek_v3\",\"hidden_size\":%d,\"intermediate_size\":64,"
          "\"vocab_size\":96,\"num_hidden_layers\":2,\"num_attention_heads\":%d,"
          "\"kv_lora_rank\":%d,\"qk_nope_head_dim\":%d,\"qk_rope_head_dim\":%d,"
          "\"v_head_dim\":%d,\"q_lora_rank\":%s,\"max_position_embeddings\":64,"
          "\"rms_norm_eps\":1e-6,\"tie_word_embeddings\":false}",
          WIDE, HEADS, LATENT, NOPE, ROPE, VALUES, low ? "20" : "null");
  fclose(f);
  return dir;
}

/* kv_b alone, beside each of what it is multiplied with, and all at once. */
static void test_latent(void **unused) {
  (void)unused;
  static const char *const sets[] = {"attn_kv_b", "attn_kv_b attn_q_b attn_q",
                                     "attn_kv_b attn_output", "attn_q_b attn_q attn_output", NULL};
  for (size_t i = 0; i < 2 * sizeof sets / sizeof *sets; i++) {
    const char *dir = latent_model(i % 2);
    only = sets[i / 2];
    one_directory((void **)&dir);
  }
  only = NULL;
  const char *dirs[2], *dir = latent_model(true);
  char whole[300];
  write_merged(dir, dirs, whole);
  starve(dir, dirs[0]);
}

/* In int8: hardly further from float32 beside the base than merged into it. */
static void test_latent_fast(void **unused) {
  (void)unused;
  mr_err err = MR_ERR_INIT;
  const char *dirs[2], *dir = latent_model(true);
  char whole[300];
  float *out[3];
  write_merged(dir, dirs, whole);
  for (int i = 0; i < 3; i++) { /* merged exactly, merged, beside */
    engine e;
    mr_lora *l;
    scheme = i ? MR_SCHEME_I8 : MR_SCHEME_F32;
    assert_int_equal(open_with(&e, &l, i < 2 ? whole : dir, dirs, i < 2 ? 0 : 1, &err), MR_OK);
    open_rest(&e);
    out[i] = alone(&e, 1, i == 2);
    close_all(&e, l);
  }
  scheme = MR_SCHEME_F32;
  double a = rms(out[1], out[0], TOKENS * 96), b = rms(out[2], out[0], TOKENS * 96);
  print_message("off by %.4f merged, %.4f beside\n", a, b);
  assert_true(a > 0 && b > 0 && b < 1.3 * a);
  for (int i = 0; i < 3; i++)
    free(out[i]);
}

/* A bias of queries goes through kv_b as the adapter leaves it; one of kv_b is refused. */
static void test_latent_bias(void **unused) {
  (void)unused;
  static const char q[] = "base_model.model.model.layers.1.self_attn.q_proj.base_layer.bias";
  mr_err err = MR_ERR_INIT;
  const char *dirs[2], *dir = latent_model(false);
  char whole[300];
  engine e;
  mr_lora *l;
  write_merged(dir, dirs, whole); /* `adapter` is that of dirs[1] */
  float *b = put(&adapter, q, 1, HEADS * (NOPE + ROPE)), *kv_b = NULL;
  fill(b, HEADS * (NOPE + ROPE), 1);
  for (int i = 0; i < merged.n; i++)
    if (!strcmp(merged.t[i].name, "model.layers.1.self_attn.kv_b_proj.weight"))
      kv_b = merged.t[i].v;
  const char *with = write_adapter("bias", plain_config);
  assert_int_equal(open_with(&e, &l, dir, &with, 1, &err), MR_OK);
  const float *bias = e.m->layers[1].q.lora->bias;
  assert_non_null(bias);
  for (int h = 0; h < HEADS; h++)
    for (int i = 0; i < LATENT + ROPE; i++) {
      double want = i < LATENT ? 0 : b[h * (NOPE + ROPE) + NOPE + i - LATENT];
      for (int j = 0; i < LATENT && j < NOPE; j++)
        want += (double)kv_b[(h * (NOPE + VALUES) + j) * LATENT + i] * b[h * (NOPE + ROPE) + j];
      assert_true(fabs(bias[h * (LATENT + ROPE) + i] - want) < 1e-5);
    }
  assert_null(e.m->layers[0].q.lora->bias);
  close_all(&e, l);
  put(&adapter, "base_model.model.model.layers.0.self_attn.kv_b_proj.lora_B.bias", 1,
      HEADS * (NOPE + VALUES));
  with = write_adapter("bias", plain_config);
  assert_int_equal(open_with(&e, &l, dir, &with, 1, &err), MR_E_DATA);
  assert_non_null(strstr(err.text, "bias of kv_b"));
  close_all(&e, l);
}

#define MAX_DIRS 128

static size_t find_directories(struct CMUnitTest *tests, size_t n) {
  static char paths[MAX_DIRS][PATH_MAX + 300];
  const char *root = data_path("tiny/hf");
  DIR *d = root ? opendir(root) : NULL;
  struct dirent *e;
  while (d && (e = readdir(d)) && n < MAX_DIRS) {
    if (*e->d_name == '.')
      continue;
    snprintf(paths[n], sizeof paths[n], "%s/%s", root, e->d_name);
    tests[n] = (struct CMUnitTest){strrchr(paths[n], '/') + 1, one_directory, temp_begin, temp_end,
                                   paths[n]};
    n++;
  }
  if (d)
    closedir(d);
  return n;
}

int main(void) {
  static struct CMUnitTest tests[MAX_DIRS] = {
      cmocka_unit_test_setup_teardown(test_gguf, temp_begin, temp_end),
      cmocka_unit_test_setup_teardown(test_fast, temp_begin, temp_end),
      cmocka_unit_test_setup_teardown(test_biases, temp_begin, temp_end),
      cmocka_unit_test_setup_teardown(test_refused, temp_begin, temp_end),
      cmocka_unit_test_setup_teardown(test_not_finite_or_absent, temp_begin, temp_end),
      cmocka_unit_test_setup_teardown(test_no_memory, temp_begin, temp_end),
      cmocka_unit_test_setup_teardown(test_latent, temp_begin, temp_end),
      cmocka_unit_test_setup_teardown(test_latent_fast, temp_begin, temp_end),
      cmocka_unit_test_setup_teardown(test_latent_bias, temp_begin, temp_end),
  };
  size_t n = find_directories(tests, 9);
  return _cmocka_run_group_tests("lora", tests, n, NULL, NULL);
}
