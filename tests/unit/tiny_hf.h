/* tiny_hf.h: writes safetensors, and small models with random weights as Hugging Face directories.
 * Included after cmocka, or what stands for its assertions. */
#ifndef MR_TESTS_TINY_HF_H
#define MR_TESTS_TINY_HF_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <jansson.h>

#include "io/json.h"
#include "io/mem.h"
#include "tests/unit/temp.h"

#ifndef TINY_HF_WIDE
#define TINY_HF_WIDE 48
#define TINY_HF_VOCAB 96
#endif
#define MAX_OUT 8192 /* tensors */

typedef struct out_tensor {
  char name[256];
  int deep, rows, cols; /* deep 0: a matrix */
  float *v;             /* owned */
} out_tensor;

typedef struct out_file {
  out_tensor t[MAX_OUT];
  int n;
} out_file;

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

static uint64_t seed;

static void fill(float *v, size_t n, float scale) {
  for (size_t i = 0; i < n; i++) {
    float sum = 0; /* of uniform numbers: nearly normal, of variance 1 */
    for (int j = 0; j < 4; j++) {
      seed = seed * 6364136223846793005u + 1442695040888963407u;
      sum += (float)(seed >> 40) / (float)(1 << 24) - 0.5f;
    }
    v[i] = sum * 1.73f * scale;
  }
}

static float *put_random(out_file *f, const char *name, int rows, int cols) {
  float *v = put(f, name, rows, cols);
  fill(v, (size_t)rows * (size_t)cols, 2 / sqrtf((float)cols));
  return v;
}

typedef struct part { /* of a layer; cols 0: a vector of ones */
  const char *name;
  int rows, cols;
} part;

/* A small model of two layers as a directory, its tensors in f; its width and vocabulary are
 * TINY_HF_WIDE and TINY_HF_VOCAB. config: the other keys. */
static const char *write_model(out_file *f, const part *layer, size_t n, const char *config) {
  static char dir[300];
  char path[400], name[100];
  clear(f);
  seed = 5;
  put_random(f, "model.embed_tokens.weight", TINY_HF_VOCAB, TINY_HF_WIDE);
  put_random(f, "lm_head.weight", TINY_HF_VOCAB, TINY_HF_WIDE);
  fill(put(f, "model.norm.weight", 1, TINY_HF_WIDE), TINY_HF_WIDE, 1);
  for (int l = 0; l < 2; l++)
    for (size_t i = 0; i < n; i++) {
      snprintf(name, sizeof name, "model.layers.%d.%s.weight", l, layer[i].name);
      if (layer[i].cols)
        put_random(f, name, layer[i].rows, layer[i].cols);
      else
        for (float *v = put(f, name, 1, layer[i].rows), *at = v; at < v + layer[i].rows;)
          *at++ = 1;
    }
  snprintf(dir, sizeof dir, "%s/model", temp_dir);
  mkdir(dir, 0700);
  snprintf(path, sizeof path, "%s/model.safetensors", dir);
  write_file(f, path);
  snprintf(path, sizeof path, "%s/config.json", dir);
  FILE *out = fopen(path, "wb");
  assert_non_null(out);
  fprintf(out,
          "{\"hidden_size\":%d,\"vocab_size\":%d,\"num_hidden_layers\":2,"
          "\"max_position_embeddings\":256,\"rms_norm_eps\":1e-6,\"tie_word_embeddings\":false,%s}",
          TINY_HF_WIDE, TINY_HF_VOCAB, config);
  fclose(out);
  return dir;
}

typedef struct tiny_latent {
  int heads, nope, rope, v, latent, low;
} tiny_latent;

/* One with latent attention (deepseek), whose queries have one matrix or (low) two. */
static inline const char *write_latent(out_file *f, const tiny_latent *s, bool low) {
  const part layer[] = {{"input_layernorm", TINY_HF_WIDE, 0},
                        {"post_attention_layernorm", TINY_HF_WIDE, 0},
                        {"self_attn.kv_a_layernorm", s->latent, 0},
                        {"self_attn.kv_a_proj_with_mqa", s->latent + s->rope, TINY_HF_WIDE},
                        {"self_attn.kv_b_proj", s->heads * (s->nope + s->v), s->latent},
                        {"self_attn.o_proj", TINY_HF_WIDE, s->heads * s->v},
                        {"mlp.gate_proj", 96, TINY_HF_WIDE},
                        {"mlp.up_proj", 96, TINY_HF_WIDE},
                        {"mlp.down_proj", TINY_HF_WIDE, 96},
                        {low ? "self_attn.q_b_proj" : "self_attn.q_proj",
                         s->heads * (s->nope + s->rope), low ? s->low : TINY_HF_WIDE},
                        {"self_attn.q_a_layernorm", s->low, 0},
                        {"self_attn.q_a_proj", s->low, TINY_HF_WIDE}};
  char config[400], rank[20];
  snprintf(rank, sizeof rank, low ? "%d" : "null", s->low);
  snprintf(config, sizeof config,
           "\"model_type\":\"deepseek_v3\",\"intermediate_size\":96,\"num_attention_heads\":%d,"
           "\"kv_lora_rank\":%d,\"qk_nope_head_dim\":%d,\"qk_rope_head_dim\":%d,"
           "\"v_head_dim\":%d,\"q_lora_rank\":%s",
           s->heads, s->latent, s->nope, s->rope, s->v, rank);
  return write_model(f, layer, sizeof layer / sizeof *layer - (low ? 0 : 2), config);
}

#endif
