/* Fast arithmetic beside the reference's values, within the loose bound of their FORMAT.md: int8
 * activations cannot meet the exact one. All tiny directories and GGUF files; skipped without the
 * data ($MR_DATA). And the real model as a directory of F16 tensors, which must answer as its GGUF
 * rounded to F16 does. */
#include <dirent.h>
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <unistd.h>

#include <cmocka.h>

#include "io/json.h"
#include "io/mem.h"
#include "kernels/dtype.h"
#pragma GCC diagnostic ignored "-Wunused-function" /* the exact checks are test_oracle's */
#include "tests/unit/oracle.h"
#include "tests/unit/temp.h"

#define SPREAD 0.5 /* of a case's logits: rms of the error at most */
#define MEAN 0.08  /* ... of all cases together */

static double sum_of_shares;
static int cases, right;

static void open_fast(engine *e, const char *path) {
  mr_err err = MR_ERR_INIT;
  *e = (engine){.k = mr_kernels_best(), .pool = mr_pool_new(mr_pool_cpus(), 0)};
  if (mr_model_open(&e->m, path, &err) || mr_model_pack(e->m, e->k, MR_SCHEME_I8, e->pool, &err) ||
      mr_kv_open(&e->kv, &e->m->c, e->k->kv_type(e->m->c.head_dim),
                 100 * mr_kv_groups_of(&e->m->c, e->k->kv_type(e->m->c.head_dim)).n, &err) ||
      mr_forward_open(&e->f, e->m, e->k, e->pool, e->kv, MAX_TOKENS, MAX_TOKENS, &err))
    fail_msg("%s: %s", path, err.text);
}

/* Logits after the prompt, in chunks of 48. */
static const float *last_logits(engine *e, probe *p) {
  mr_err err = MR_ERR_INIT;
  assert_int_equal(mr_kv_seq_init(e->kv, &p->seq, p->n, &err), MR_OK);
  p->seq.long_rope = p->n > e->m->c.rope_original_context;
  for (int at = 0; at < p->n; at += 48) {
    int n = p->n - at < 48 ? p->n - at : 48;
    mr_run run = {.seq = &p->seq, .tokens = p->ids + at, .n = n};
    assert_int_equal(mr_kv_seq_reserve(e->kv, &p->seq, n), MR_OK);
    assert_int_equal(mr_forward_step(e->f, &run, 1, NULL, &err), MR_OK);
  }
  mr_kv_seq_free(e->kv, &p->seq);
  return mr_forward_logits(e->f, 0);
}

static void check_one(engine *e, probe *p, const char *name) {
  int n = e->m->c.n_vocab, best = 0;
  const float *got = last_logits(e, p);
  double squares = 0;
  for (int i = 0; i < n; i++) {
    squares += pow((double)got[i] - p->last[i], 2);
    best = p->last[i] > p->last[best] ? i : best;
  }
  double share = sqrt(squares / n) / p->std;
  if (!(share <= SPREAD))
    fail_msg("%s, %s: the last logits are off by %.3f of their spread", name, p->id, share);
  sum_of_shares += share;
  cases++;
  right += best_of(e, got) == best;
}

static void check_model(const char *model, const char *stem, const char *name) {
  static probe p[MAX_SEQS];
  engine e;
  size_t len = 0;
  char path[PATH_MAX];
  snprintf(path, sizeof path, "%.3000s%scases.jsonl", stem, stem == model ? "/" : ".");
  char *lines = read_whole(path, &len);
  snprintf(path, sizeof path, "%.3000s%slogits.f32", stem, stem == model ? "/" : ".");
  char *logits = read_whole(path, &len);
  assert_non_null(lines);
  assert_non_null(logits);
  open_fast(&e, model);
  int n = read_probes(p, lines, MAX_SEQS, MAX_PROMPT, MAX_STEPS);
  for (int i = 0; i < n; i++) {
    p[i].last = (const float *)(const void *)(logits + (size_t)i * (size_t)e.m->c.n_vocab * 4);
    check_one(&e, &p[i], name);
  }
  engine_close(&e);
  free(lines);
  free(logits);
}

static void begin(void) {
  sum_of_shares = 0;
  cases = right = 0;
}

static void end(const char *what) {
  print_message("%s: %d cases, error %.3f of the spread on average, %d of %d best tokens right\n",
                what, cases, sum_of_shares / cases, right, cases);
  assert_true(sum_of_shares / cases <= MEAN);
  assert_true(right >= 0.85 * cases);
}

static void directories(void **state) {
  const char *root = data_path("tiny/hf");
  (void)state;
  DIR *d = root ? opendir(root) : NULL;
  struct dirent *e;
  char dir[PATH_MAX];
  if (!d)
    skip();
  begin();
  while ((e = readdir(d)))
    if (*e->d_name != '.') {
      snprintf(dir, sizeof dir, "%.2000s/%s", data_path("tiny/hf"), e->d_name);
      check_model(dir, dir, e->d_name);
    }
  closedir(d);
  end("directories");
}

static void gguf_files(void **state) {
  static const char *const folders[] = {"llama_gqa", "qwen2", "mixtral", "gemma3", "llama_k"};
  (void)state;
  if (!data_path("tiny/gguf"))
    skip();
  begin();
  for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
    char dir[PATH_MAX], model[PATH_MAX + 300], stem[PATH_MAX + 300];
    snprintf(dir, sizeof dir, "%.2000s/%s", data_path("tiny/gguf"), folders[i]);
    DIR *d = opendir(dir);
    struct dirent *e;
    while (d && (e = readdir(d))) {
      char *dot = strstr(e->d_name, ".gguf");
      if (!dot || dot[5] || strstr(e->d_name, "-of-"))
        continue;
      snprintf(model, sizeof model, "%.3000s/%s", dir, e->d_name);
      snprintf(stem, sizeof stem, "%.*s", (int)(strlen(model) - 5), model);
      check_model(model, stem, e->d_name);
    }
    if (d)
      closedir(d);
  }
  end("GGUF files");
}

/* ------------------------------------------------------------------ GGUF to a directory */

static const char smol[] = "models/SmolLM2-135M-Instruct.Q4_1.gguf";

typedef struct writer {
  FILE *data;
  json_t *head;
  int64_t at;
} writer;

/* Row r of q and k is elsewhere in a directory: GGUF has the halves of a head by turns. */
static int in_gguf(int r, int dim) {
  int at = r % dim, half = dim / 2;
  return dim ? r - at + at % half * 2 + at / half : r;
}

static void put_rows(writer *w, const char *name, const mr_matrix *m, int dim) {
  float *row = malloc((size_t)m->k * sizeof *row);
  uint16_t *half = malloc((size_t)m->k * sizeof *half);
  int64_t bytes = (int64_t)m->n * m->k * 2;
  assert_true(row && half);
  for (int r = 0; r < m->n; r++) {
    mr_matrix_row(m, dim ? in_gguf(r, dim) : r, row);
    for (int i = 0; i < m->k; i++)
      half[i] = mr_f32_to_f16(row[i]);
    fwrite(half, 2, (size_t)m->k, w->data);
  }
  json_object_set_new(w->head, name,
                      json_pack("{s:s,s:[i,i],s:[I,I]}", "dtype", "F16", "shape", m->n, m->k,
                                "data_offsets", (json_int_t)w->at, (json_int_t)(w->at + bytes)));
  w->at += bytes;
  free(row);
  free(half);
}

static void put_vector(writer *w, const char *name, const float *v, int n) {
  mr_matrix m = {.n = 1, .k = n, .dtype = MR_F32, .data = (const uint8_t *)v};
  m.row_bytes = (uint64_t)n * 4;
  put_rows(w, name, &m, 0);
  json_array_clear(json_object_get(json_object_get(w->head, name), "shape"));
  json_array_append_new(json_object_get(json_object_get(w->head, name), "shape"), json_integer(n));
}

static void put_layer(writer *w, const mr_model *m, int i) {
  const mr_layer *y = &m->layers[i];
  const struct {
    const char *name;
    const mr_matrix *w;
    int dim;
  } all[] = {{"self_attn.q_proj", &y->q, m->c.head_dim},
             {"self_attn.k_proj", &y->k, m->c.head_dim},
             {"self_attn.v_proj", &y->v, 0},
             {"self_attn.o_proj", &y->o, 0},
             {"mlp.gate_proj", &y->gate, 0},
             {"mlp.up_proj", &y->up, 0},
             {"mlp.down_proj", &y->down, 0}};
  char name[100];
  for (size_t j = 0; j < sizeof all / sizeof *all; j++) {
    snprintf(name, sizeof name, "model.layers.%d.%s.weight", i, all[j].name);
    put_rows(w, name, all[j].w, all[j].dim);
  }
  snprintf(name, sizeof name, "model.layers.%d.input_layernorm.weight", i);
  put_vector(w, name, y->attn_norm, m->c.d_model);
  snprintf(name, sizeof name, "model.layers.%d.post_attention_layernorm.weight", i);
  put_vector(w, name, y->ffn_norm, m->c.d_model);
}

static void write_config(const mr_config *c) {
  json_t *j = json_pack(
      "{s:s,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:f,s:f,s:b}", "model_type", "llama",
      "num_hidden_layers", c->n_layers, "hidden_size", c->d_model, "num_attention_heads",
      c->n_heads, "num_key_value_heads", c->n_kv_heads, "head_dim", c->head_dim,
      "intermediate_size", c->d_ff, "vocab_size", c->n_vocab, "max_position_embeddings", c->context,
      "rms_norm_eps", (double)c->eps, "rope_theta", (double)c->rope_base, "tie_word_embeddings", 1);
  assert_int_equal(json_dump_file(j, temp_path("config.json"), 0), 0);
  json_decref(j);
}

static void write_directory(const mr_model *m) {
  writer w = {fopen(temp_path("data"), "wb"), json_object(), 0};
  assert_non_null(w.data);
  put_rows(&w, "model.embed_tokens.weight", &m->embed, 0);
  put_vector(&w, "model.norm.weight", m->out_norm, m->c.d_model);
  for (int i = 0; i < m->c.n_layers; i++)
    put_layer(&w, m, i);
  fclose(w.data);
  write_config(&m->c);
  char *text = mr_json_dumps(w.head, JSON_COMPACT);
  char buf[1 << 16];
  uint64_t len = strlen(text);
  FILE *out = fopen(temp_path("model.safetensors"), "wb"), *in = fopen(temp_path("data"), "rb");
  assert_true(out && in);
  fwrite(&len, 8, 1, out);
  fwrite(text, 1, len, out);
  for (size_t n; (n = fread(buf, 1, sizeof buf, in)) > 0;)
    fwrite(buf, 1, n, out);
  fclose(in);
  assert_int_equal(fclose(out), 0);
  mr_mem_free(text);
  json_decref(w.head);
}

/* Rounds what the GGUF holds as the directory does. */
static void round_matrix(mr_matrix *m, float **own) {
  float *v = *own ? *own : malloc((size_t)m->n * (size_t)m->k * sizeof *v);
  assert_non_null(v);
  for (int r = 0; r < m->n && !*own; r++) {
    mr_matrix_row(m, r, v + (size_t)r * (size_t)m->k);
    for (int i = 0; i < m->k; i++)
      v[(size_t)r * (size_t)m->k + (size_t)i] =
          mr_f16_to_f32(mr_f32_to_f16(v[(size_t)r * (size_t)m->k + (size_t)i]));
  }
  *own = v;
  m->data = (const uint8_t *)v;
  m->dtype = MR_F32;
  m->row_bytes = (uint64_t)m->k * 4;
  m->mapped = false;
}

#define STEPS 12

/* Greedy tokens after a prompt, and the last logits of the prompt. */
static void answer(engine *e, int32_t *tokens, float *logits) {
  static const int32_t prompt[] = {504, 3575, 282, 4649, 314, 260, 1452, 28};
  mr_err err = MR_ERR_INIT;
  mr_kv_seq seq;
  assert_int_equal(mr_kv_seq_init(e->kv, &seq, 8 + STEPS, &err), MR_OK);
  for (int i = 0; i < STEPS; i++) {
    mr_run run = {.seq = &seq, .tokens = i ? &tokens[i - 1] : prompt, .n = i ? 1 : 8};
    assert_int_equal(mr_kv_seq_reserve(e->kv, &seq, run.n), MR_OK);
    assert_int_equal(mr_forward_step(e->f, &run, 1, NULL, &err), MR_OK);
    if (i == 0)
      memcpy(logits, mr_forward_logits(e->f, 0), (size_t)e->m->c.n_vocab * sizeof *logits);
    tokens[i] = best_of(e, mr_forward_logits(e->f, 0));
  }
  mr_kv_seq_free(e->kv, &seq);
}

static void open_exact(engine *e) {
  mr_err err = MR_ERR_INIT;
  assert_int_equal(mr_model_pack(e->m, e->k, MR_SCHEME_F32, e->pool, &err), MR_OK);
  assert_int_equal(mr_kv_open(&e->kv, &e->m->c, MR_KV_F32, 8, &err), MR_OK);
  assert_int_equal(mr_forward_open(&e->f, e->m, e->k, e->pool, e->kv, 32, 1, &err), MR_OK);
}

static void real_model_as_directory(void **state) {
  (void)state;
  mr_err err = MR_ERR_INIT;
  engine e = {.k = mr_kernels_best(), .pool = mr_pool_new(mr_pool_cpus(), 0)};
  int32_t a[STEPS], b[STEPS];
  if (access(smol, R_OK))
    skip();
  assert_int_equal(mr_model_open(&e.m, smol, &err), MR_OK);
  int n_vocab = e.m->c.n_vocab, n_layers = e.m->c.n_layers;
  float *x = malloc((size_t)n_vocab * sizeof *x), *y = malloc((size_t)n_vocab * sizeof *y);
  float **own = calloc((size_t)n_layers * 16 + 1, sizeof *own);
  assert_true(x && y && own);
  write_directory(e.m);
  round_matrix(&e.m->embed, &own[0]);
  round_matrix(&e.m->head, &own[0]);
  for (int i = 0; i < n_layers; i++)
    for (int j = 0; j < mr_layer_matrices(e.m, &e.m->layers[i]); j++)
      if (mr_layer_matrix(&e.m->layers[i], j)->n > 0)
        round_matrix(mr_layer_matrix(&e.m->layers[i], j), &own[1 + i * 16 + j]);
  open_exact(&e);
  answer(&e, a, x);
  engine_close(&e);
  for (int i = 0; i < n_layers * 16 + 1; i++)
    free(own[i]);
  e = (engine){.k = mr_kernels_best(), .pool = mr_pool_new(mr_pool_cpus(), 0)};
  if (mr_model_open(&e.m, temp_dir, &err))
    fail_msg("%s", err.text);
  open_exact(&e);
  answer(&e, b, y);
  engine_close(&e);
  double worst = 0;
  for (int i = 0; i < n_vocab; i++)
    worst = fmax(worst, fabs((double)x[i] - y[i]));
  print_message("SmolLM2 as a directory: logits within %.1e, %d tokens\n", worst, STEPS);
  assert_memory_equal(a, b, sizeof a);
  assert_true(worst < 2e-3);
  free(x);
  free(y);
  free(own);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(directories),
      cmocka_unit_test(gguf_files),
      cmocka_unit_test_setup_teardown(real_model_as_directory, temp_begin, temp_end),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
