#include "src/quantize.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "io/mem.h"
#include "kernels/encode.h"
#include "src/quantize_recipe.h"

#define SLAB ((size_t)8 << 20) /* bytes of encoded rows in memory */

/* ------------------------------------------------------------------ types */

static const struct {
  int dtype;
  int file_type; /* general.file_type of a file that is mostly this */
  int narrow;    /* the nearest one with blocks of 32; of those that have them: F16 */
  int head;
} types[] = {{MR_F32, 0, MR_F32, MR_F32},         {MR_F16, 1, MR_F16, MR_F16},
             {MR_BF16, 32, MR_BF16, MR_BF16},     {MR_Q8_0, 7, MR_F16, MR_Q8_0},
             {MR_Q4_0, 2, MR_F16, MR_Q6_K},       {MR_Q4_1, 3, MR_F16, MR_Q6_K},
             {MR_Q5_0, 8, MR_F16, MR_Q6_K},       {MR_Q5_1, 9, MR_F16, MR_Q6_K},
             {MR_Q2_K, 10, MR_Q4_0, MR_Q6_K},     {MR_Q3_K, 12, MR_Q4_0, MR_Q6_K},
             {MR_Q4_K, 15, MR_Q5_0, MR_Q6_K},     {MR_Q5_K, 17, MR_Q5_1, MR_Q6_K},
             {MR_Q6_K, 18, MR_Q8_0, MR_Q6_K},     {MR_IQ4_NL, 25, MR_F16, MR_Q6_K},
             {MR_IQ4_XS, 30, MR_IQ4_NL, MR_Q6_K}, {MR_MXFP4, 38, MR_F16, MR_Q8_0}};
#define N_TYPES (sizeof types / sizeof *types)

static size_t index_of(int dtype) {
  size_t i = 0;
  while (i < N_TYPES && types[i].dtype != dtype)
    i++;
  return i;
}

int mr_quantize_type(const char *name) {
  for (size_t i = 0; i < N_TYPES; i++) {
    const char *a = mr_dtype_get(types[i].dtype)->name, *b = name;
    while (*a && tolower((unsigned char)*a) == tolower((unsigned char)*b))
      a++, b++;
    if (!*a && !*b)
      return types[i].dtype;
  }
  return -1;
}

const char *mr_quantize_types(void) {
  return "f32 f16 bf16 q8_0 q6_k q5_k q5_1 q5_0 q4_k q4_1 q4_0 iq4_nl iq4_xs mxfp4 q3_k q2_k";
}

int mr_quantize_head_type(int dtype) {
  size_t i = index_of(dtype);
  return i < N_TYPES ? types[i].head : dtype;
}

int mr_quantize_fit(int dtype, int64_t cols) {
  while (cols % mr_dtype_get(dtype)->block)
    dtype = types[index_of(dtype)].narrow;
  return dtype;
}

/* ------------------------------------------------------------------ rows */

typedef struct slab { /* rows that are encoded together */
  const mr_out_plan *plan;
  const mr_out_tensor *t;
  int64_t first; /* row */
  int n, chunk;  /* rows; of an item */
  uint8_t *out;  /* n encoded rows */
  uint64_t row_bytes;
  float *line; /* [workers, widest] */
  size_t widest;
  float *even;         /* [widest] ones: all columns count alike; NULL: plain rounding */
  int64_t *bad;        /* [items] the first row that cannot be written, -1: none */
  mr_recipe_rows from; /* of a calibration */
} slab;

static bool writable(const float *x, int64_t n, float limit) {
  bool ok = true;
  for (int64_t i = 0; i < n; i++)
    ok &= fabsf(x[i]) <= limit; /* false for NaN */
  return ok;
}

/* A row whose codes are known. */
static void encode_codes(const slab *s, int row, uint8_t *dst, uint8_t *codes) {
  const mr_grid *g = s->from.grid;
  const float *x = s->from.w + (size_t)row * (size_t)g->k;
  for (int i = 0; i < g->k; i++)
    codes[i] = (uint8_t)mr_grid_code(g, row, i, x[i]);
  size_t at = (size_t)row * (size_t)g->groups;
  mr_encode_codes(s->t->dtype, dst, g->scale + at, g->base + at, codes, g->k);
}

static const float *row_of(const slab *s, int64_t row, float *room) {
  if (s->from.w)
    return s->from.w + row * s->t->dims[0];
  mr_out_row(s->plan, s->t, row, room);
  return room;
}

static void encode_item(void *ctx, int item, int worker) {
  slab *s = ctx;
  int64_t n = s->t->dims[0];
  float *room = s->line + (size_t)worker * s->widest;
  float limit = s->t->dtype == MR_F16 ? 65504 : 3.4e38f;
  int stop = (item + 1) * s->chunk < s->n ? (item + 1) * s->chunk : s->n;
  mr_encoder to = mr_encoder_get(s->t->dtype);
  s->bad[item] = -1;
  for (int i = item * s->chunk; i < stop && s->bad[item] < 0; i++) {
    const float *x = row_of(s, s->first + i, room);
    uint8_t *dst = s->out + (uint64_t)i * s->row_bytes;
    if (!writable(x, n, limit))
      s->bad[item] = s->first + i;
    else if (s->from.grid)
      encode_codes(s, (int)s->first + i, dst, (uint8_t *)room);
    else
      to(dst, x, s->from.importance ? s->from.importance : s->even, n);
  }
}

static mr_code encode_slab(slab *s, mr_pool *pool, mr_err *err) {
  int workers = pool ? mr_pool_threads(pool) : 1;
  s->chunk = s->n / (4 * workers) + 1;
  int items = (s->n + s->chunk - 1) / s->chunk;
  if (pool)
    mr_pool_run(pool, encode_item, s, items);
  else
    for (int i = 0; i < items; i++)
      encode_item(s, i, 0);
  for (int i = 0; i < items; i++)
    if (s->bad[i] >= 0)
      return mr_err_at(err, MR_E_DATA, s->plan->m->weights->path, 0, -1,
                       "tensor %s, row %lld holds a value that %s cannot: NaN, infinite%s",
                       s->t->name, (long long)s->bad[i], mr_dtype_get(s->t->dtype)->name,
                       s->t->dtype == MR_F16 ? " or above 65504 (take bf16)" : "");
  return MR_OK;
}

/* ------------------------------------------------------------------ the file */

typedef struct job {
  const mr_quantize_opts *o;
  mr_quantize_report *r;
  mr_model *m;
  mr_out_plan plan;
  mr_gguf_writer *w;
  mr_recipe *recipe; /* NULL: no texts */
  slab s;
  uint64_t done, all; /* bytes of tensors */
} job;

static bool copied(const mr_out_tensor *t) {
  return t->raw && t->raw->dtype == t->dtype && !t->col && !t->row;
}

static void choose_types(job *j) {
  mr_quantize_report *r = j->r;
  int head = j->o->head_dtype >= 0 ? j->o->head_dtype : mr_quantize_head_type(j->o->dtype);
  double bits = 0, weights = 0;
  for (size_t i = 0; i < j->plan.n; i++) {
    mr_out_tensor *t = &j->plan.t[i];
    int wish = t->kind == MR_OUT_HEAD ? head : j->o->dtype;
    if (t->kind != MR_OUT_PLAIN) {
      t->dtype = mr_quantize_fit(wish, t->dims[0]);
      double n = (double)t->dims[0] * (double)t->rows;
      weights += n;
      bits += 8 * (double)mr_dtype_bytes(t->dtype, (uint64_t)t->dims[0]) * (double)t->rows;
      r->n_typed += t->dtype == j->o->dtype;
      if (t->dtype != wish && r->n_other++ == 0) {
        memcpy(r->first_other, t->name, sizeof r->first_other);
        r->first_other_dtype = t->dtype;
      }
    }
    r->n_copied += t->kind != MR_OUT_PLAIN && copied(t);
    j->all += mr_dtype_bytes(t->dtype, (uint64_t)t->dims[0]) * (uint64_t)t->rows;
  }
  r->n_tensors = (int)j->plan.n;
  r->weighted_bits = weights > 0 ? bits / weights : 0;
}

/* Keys that say how a file was stored, not what it holds. */
static bool of_storage(mr_str key) {
  static const char *const names[] = {"general.file_type", "general.quantization_version",
                                      "general.alignment"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (key.len == strlen(names[i]) && !memcmp(key.s, names[i], key.len))
      return true;
  return key.len > 6 && !memcmp(key.s, "split.", 6);
}

static mr_code keys(job *j, mr_err *err) {
  mr_code rc = MR_OK;
  size_t type = index_of(j->o->dtype);
  if (j->m->gguf)
    for (size_t i = 0; i < mr_gguf_n_kv(j->m->gguf); i++) {
      const mr_gguf_kv *kv = mr_gguf_kv_at(j->m->gguf, i);
      if (!of_storage(kv->key))
        mr_gguf_write_copy(j->w, kv);
    }
  else
    mr_out_config(j->w, j->m);
  if (!j->m->gguf && !j->o->no_vocab)
    rc = mr_out_vocab(j->w, j->o->in, j->m->c.n_vocab, err);
  mr_gguf_write_u32(j->w, "general.quantization_version", 2);
  mr_gguf_write_u32(j->w, "general.file_type", (uint32_t)types[type].file_type);
  return rc;
}

static mr_code header(job *j, mr_err *err) {
  mr_code rc = keys(j, err);
  for (size_t i = 0; i < j->plan.n && !rc; i++) {
    const mr_out_tensor *t = &j->plan.t[i];
    if (!mr_gguf_write_tensor(j->w, t->name, t->dtype, t->n_dims, t->dims))
      rc = mr_err_at(err, MR_E_UNAVAILABLE, j->o->in, 0, -1, "tensor %s cannot be written to GGUF",
                     t->name);
  }
  if (!rc)
    rc = mr_gguf_write_begin(j->w, err);
  if (!rc)
    rc = mr_out_check(j->m, mr_gguf_write_path(j->w), err);
  if (!rc && !j->m->gguf && !j->o->no_vocab)
    rc = mr_out_check_vocab(j->o->in, mr_gguf_write_path(j->w), err);
  return rc;
}

static mr_code write_bytes(job *j, const uint8_t *bytes, size_t n, mr_err *err) {
  mr_code rc = mr_gguf_write_data(j->w, bytes, n, err);
  j->done += n;
  if (!rc && j->o->progress)
    j->o->progress(j->o->ctx, j->done, j->all);
  return rc;
}

static mr_code write_tensor(job *j, const mr_out_tensor *t, mr_err *err) {
  mr_code rc = MR_OK;
  j->s.from = (mr_recipe_rows){0};
  if (j->recipe)
    rc = mr_recipe_tensor(j->recipe, t, &j->s.from, err);
  if (copied(t) && !j->s.from.w) {
    for (uint64_t at = 0, n; at < t->raw->bytes && !rc; at += n) {
      n = t->raw->bytes - at < SLAB ? t->raw->bytes - at : SLAB;
      rc = write_bytes(j, t->raw->data + at, (size_t)n, err);
    }
    return rc;
  }
  slab *s = &j->s;
  s->t = t;
  s->row_bytes = mr_dtype_bytes(t->dtype, (uint64_t)t->dims[0]);
  int most = (int)(SLAB / s->row_bytes < INT32_MAX / 2 ? SLAB / s->row_bytes : INT32_MAX / 2);
  most = most < 1 ? 1 : most;
  for (s->first = 0; s->first < t->rows && !rc; s->first += s->n) {
    s->n = t->rows - s->first < most ? (int)(t->rows - s->first) : most;
    rc = encode_slab(s, j->o->pool, err);
    if (!rc)
      rc = write_bytes(j, s->out, (size_t)s->n * s->row_bytes, err);
  }
  return rc;
}

static mr_code take_memory(job *j, mr_err *err) {
  size_t workers = j->o->pool ? (size_t)mr_pool_threads(j->o->pool) : 1, largest = SLAB, lines;
  j->s = (slab){.plan = &j->plan};
  for (size_t i = 0; i < j->plan.n; i++) {
    const mr_out_tensor *t = &j->plan.t[i];
    size_t row = (size_t)mr_dtype_bytes(t->dtype, (uint64_t)t->dims[0]);
    largest = row > largest ? row : largest;
    j->s.widest = (size_t)t->dims[0] > j->s.widest ? (size_t)t->dims[0] : j->s.widest;
  }
  j->s.bad = mr_mem_alloc(4 * workers + 1, sizeof *j->s.bad);
  j->s.out = mr_mem_alloc(largest, 1);
  j->s.even = mr_mem_alloc(j->s.widest, sizeof *j->s.even);
  for (size_t i = 0; j->s.even && i < j->s.widest; i++)
    j->s.even[i] = 1;
  if (mr_mem_mul(workers, j->s.widest, &lines))
    j->s.line = mr_mem_alloc(lines, sizeof *j->s.line);
  bool whole = j->s.bad && j->s.out && j->s.line && j->s.even;
  if (j->o->plain) {
    mr_mem_free(j->s.even);
    j->s.even = NULL;
  }
  return whole ? MR_OK : mr_err_set(err, MR_E_NOMEM, "out of memory for rows to encode");
}

static mr_code run(job *j, mr_err *err) {
  mr_code rc = mr_model_open(&j->m, j->o->in, err);
  if (!rc)
    rc = mr_out_plan_make(&j->plan, j->m, err);
  if (rc)
    return rc;
  choose_types(j);
  rc = take_memory(j, err);
  if (!rc)
    rc = mr_gguf_write_open(&j->w, j->o->out, err);
  if (!rc && j->o->n_texts)
    rc = mr_recipe_open(&j->recipe, j->o, j->m, &j->plan, NULL, err);
  if (!rc)
    rc = header(j, err);
  for (size_t i = 0; i < j->plan.n && !rc; i++)
    rc = write_tensor(j, &j->plan.t[i], err);
  if (!rc)
    rc = mr_gguf_write_finish(j->w, err);
  if (!rc) {
    j->r->n_calibrated = j->recipe ? mr_recipe_count(j->recipe) : 0;
    j->r->bytes_in = mr_weights_bytes(j->m->weights);
    j->r->bytes_out = mr_gguf_write_bytes(j->w);
  }
  return rc;
}

mr_code mr_quantize(const mr_quantize_opts *o, mr_quantize_report *r, mr_err *err) {
  job j = {.o = o, .r = r};
  *r = (mr_quantize_report){0};
  mr_code rc = mr_encoder_get(o->dtype) && index_of(o->dtype) < N_TYPES
                   ? run(&j, err)
                   : mr_err_set(err, MR_E_USAGE, "this type is not written");
  mr_gguf_write_free(j.w);
  mr_recipe_free(j.recipe);
  mr_mem_free(j.s.bad);
  mr_mem_free(j.s.out);
  mr_mem_free(j.s.line);
  mr_mem_free(j.s.even);
  mr_out_plan_free(&j.plan);
  mr_model_close(j.m);
  return rc;
}
