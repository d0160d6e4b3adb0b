/* A directory of safetensors with quantized matrices: GPTQ, AWQ, compressed-tensors INT8, and INT8
 * with outlier columns. Packings: src/matrix.h. */
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "io/durable.h"
#include "io/json.h"
#include "io/mem.h"
#include "io/safetensors_write.h"
#include "io/sys.h"
#include "io/text.h"
#include "kernels/dtype.h"
#include "src/names.h"
#include "src/quantize_recipe.h"

#define CHUNK ((size_t)1 << 20)
#define MAX_CONFIG ((size_t)64 << 20)

typedef struct job {
  const mr_quantize_opts *o;
  mr_quantize_report *r;
  mr_model *m;
  mr_out_plan plan;
  mr_grid_spec spec;
  mr_recipe *recipe;
  mr_st_writer *w;
  char *temp; /* OUT.tmp; owned */
  uint8_t *bytes;
  size_t cap;
  uint64_t done;
} job;

static mr_code no_memory(mr_err *err) {
  return mr_err_set(err, MR_E_NOMEM, "out of memory for a quantized matrix");
}

/* Room for n zeroed bytes in j->bytes. */
static bool room(job *j, size_t n) {
  if (n > j->cap) {
    mr_mem_free(j->bytes);
    j->bytes = mr_mem_alloc(n, 1);
    j->cap = j->bytes ? n : 0;
  }
  if (j->bytes)
    memset(j->bytes, 0, n);
  return j->bytes != NULL;
}

static mr_code put(job *j, size_t n, mr_err *err) {
  mr_code rc = mr_st_write_data(j->w, j->bytes, n, err);
  j->done += n;
  if (!rc && j->o->progress)
    j->o->progress(j->o->ctx, j->done, mr_st_write_bytes(j->w));
  return rc;
}

/* ------------------------------------------------------------------ which groups */

static mr_code choose_group(job *j, mr_err *err) {
  static const int groups[] = {128, 64, 32};
  int group = j->o->group;
  for (size_t g = 0; !group && g < 3; g++) {
    bool fits = true;
    for (size_t i = 0; i < j->plan.n; i++)
      fits &= j->plan.t[i].kind != MR_OUT_MATRIX || j->plan.t[i].dims[0] % groups[g] == 0;
    group = fits ? groups[g] : 0;
  }
  for (size_t i = 0; i < j->plan.n; i++) {
    const mr_out_tensor *t = &j->plan.t[i];
    if (t->kind == MR_OUT_MATRIX && (!group || t->dims[0] % group || t->rows % 8))
      return mr_err_at(err, MR_E_UNAVAILABLE, j->o->in, 0, -1,
                       "tensor %s [%lld, %lld] cannot be cut into 4-bit words and groups of %d",
                       t->name, (long long)t->rows, (long long)t->dims[0], group ? group : 32);
  }
  j->spec.group = group;
  return MR_OK;
}

static mr_code choose_spec(job *j, mr_err *err) {
  bool four = j->o->form == MR_FORM_GPTQ || j->o->form == MR_FORM_AWQ;
  j->spec = (mr_grid_spec){.kind = j->o->form == MR_FORM_AWQ ? MR_GRID_WHOLE : MR_GRID_CENTRED,
                           .levels = four ? 15 : 255,
                           .half = four,
                           .plain = !four};
  return four ? choose_group(j, err) : MR_OK;
}

/* ------------------------------------------------------------------ packing */

static void put_field(uint8_t *words, size_t word, int at, int code) {
  words[4 * word + (size_t)at / 2] |= (uint8_t)(code << at % 2 * 4);
}

static int code_at(const mr_recipe_rows *f, int row, int col) {
  return mr_grid_code(f->grid, row, col, f->w[(size_t)row * (size_t)f->grid->k + (size_t)col]);
}

static int zero_of(const mr_grid *g, int row, int group) {
  size_t at = (size_t)row * (size_t)g->groups + (size_t)group;
  return g->scale[at] != 0 ? (int)(-g->base[at] / g->scale[at] + 0.5f) : 8;
}

/* Scales as F16 [groups, n]. */
static mr_code put_scales(job *j, const mr_grid *g, mr_err *err) {
  size_t n = (size_t)g->rows * (size_t)g->groups;
  if (!room(j, 2 * n))
    return no_memory(err);
  for (int i = 0; i < g->groups; i++)
    for (int r = 0; r < g->rows; r++) {
      uint16_t h = mr_f32_to_f16(g->scale[(size_t)r * (size_t)g->groups + (size_t)i]);
      memcpy(j->bytes + 2 * ((size_t)i * (size_t)g->rows + (size_t)r), &h, 2);
    }
  return put(j, 2 * n, err);
}

/* Eight rows of the matrix a word, in GPTQ's order or AWQ's; stored zeros of GPTQ are less one. */
static mr_code put_zeros(job *j, const mr_grid *g, bool awq, mr_err *err) {
  static const int order[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  size_t words = (size_t)g->rows / 8;
  if (!room(j, 4 * words * (size_t)g->groups))
    return no_memory(err);
  for (int i = 0; i < g->groups; i++)
    for (int r = 0; r < g->rows; r++)
      put_field(j->bytes, (size_t)i * words + (size_t)r / 8, awq ? order[r % 8] : r % 8,
                zero_of(g, r, i) - (awq ? 0 : 1));
  return put(j, 4 * words * (size_t)g->groups, err);
}

static mr_code put_gptq(job *j, const mr_recipe_rows *f, mr_err *err) {
  const mr_grid *g = f->grid;
  size_t bytes = (size_t)g->k / 8 * (size_t)g->rows * 4;
  if (!room(j, bytes))
    return no_memory(err);
  for (int r = 0; r < g->rows; r++)
    for (int i = 0; i < g->k; i++)
      put_field(j->bytes, (size_t)(i / 8) * (size_t)g->rows + (size_t)r, i % 8, code_at(f, r, i));
  mr_code rc = put(j, bytes, err);
  if (!rc)
    rc = put_zeros(j, g, false, err);
  if (!rc)
    rc = put_scales(j, g, err);
  if (rc || !room(j, (size_t)g->k * 4))
    return rc ? rc : no_memory(err);
  for (int32_t i = 0; i < g->k; i++) {
    int32_t group = i / g->spec.group;
    memcpy(j->bytes + 4 * (size_t)i, &group, 4);
  }
  return put(j, (size_t)g->k * 4, err);
}

static mr_code put_awq(job *j, const mr_recipe_rows *f, mr_err *err) {
  static const int order[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  const mr_grid *g = f->grid;
  size_t words = (size_t)g->rows / 8, bytes = words * (size_t)g->k * 4;
  if (!room(j, bytes))
    return no_memory(err);
  for (int i = 0; i < g->k; i++)
    for (int r = 0; r < g->rows; r++)
      put_field(j->bytes, (size_t)i * words + (size_t)r / 8, order[r % 8], code_at(f, r, i));
  mr_code rc = put(j, bytes, err);
  if (!rc)
    rc = put_zeros(j, g, true, err);
  return rc ? rc : put_scales(j, g, err);
}

static mr_code put_outliers(job *j, const mr_recipe_rows *f, int64_t rows, mr_err *err) {
  size_t n = (size_t)f->n_outliers;
  if (!n)
    return MR_OK;
  if (!room(j, 2 * n * (size_t)rows))
    return no_memory(err);
  for (size_t i = 0; i < n * (size_t)rows; i++) {
    uint16_t h = mr_f32_to_f16(f->kept[i]);
    memcpy(j->bytes + 2 * i, &h, 2);
  }
  mr_code rc = put(j, 2 * n * (size_t)rows, err);
  if (rc || !room(j, 4 * n))
    return rc ? rc : no_memory(err);
  memcpy(j->bytes, f->outliers, 4 * n);
  return put(j, 4 * n, err);
}

static mr_code put_int8(job *j, const mr_recipe_rows *f, mr_err *err) {
  const mr_grid *g = f->grid;
  size_t bytes = (size_t)g->rows * (size_t)g->k;
  if (!room(j, bytes))
    return no_memory(err);
  for (int r = 0; r < g->rows; r++)
    for (int i = 0; i < g->k; i++)
      j->bytes[(size_t)r * (size_t)g->k + (size_t)i] = (uint8_t)(code_at(f, r, i) - 128);
  mr_code rc = put(j, bytes, err);
  if (rc || !room(j, 4 * (size_t)g->rows))
    return rc ? rc : no_memory(err);
  memcpy(j->bytes, g->scale, 4 * (size_t)g->rows);
  rc = put(j, 4 * (size_t)g->rows, err);
  return rc ? rc : put_outliers(j, f, g->rows, err);
}

/* ------------------------------------------------------------------ tensors */

typedef struct names { /* of the tensors that stand for one */
  char text[512];
  size_t stem; /* bytes before ".weight" */
} names;

static void declare(job *j, names *n, const char *ext, int dtype, int64_t rows, int64_t cols) {
  int64_t dims[2] = {cols, rows};
  snprintf(n->text + n->stem, sizeof n->text - n->stem, "%s", ext);
  mr_st_write_tensor(j->w, n->text, dtype, rows ? 2 : 1, dims);
}

static mr_code declare_tensor(job *j, const mr_out_tensor *t, mr_err *err) {
  names n = {{0}, 0};
  int64_t rows = t->rows, k = t->dims[0], groups = j->spec.group ? k / j->spec.group : 1;
  mr_str name = t->full;
  if (name.len + 32 > sizeof n.text)
    return mr_err_at(err, MR_E_UNAVAILABLE, j->o->in, 0, -1, "a tensor's name is too long");
  memcpy(n.text, name.s, name.len);
  if (t->kind != MR_OUT_MATRIX) {
    mr_st_write_tensor(j->w, n.text, t->dtype, t->n_dims, t->dims);
    return MR_OK;
  }
  n.stem = name.len - strlen(".weight");
  int outliers = mr_recipe_outliers(j->recipe, t);
  if (j->o->form == MR_FORM_GPTQ) {
    declare(j, &n, ".qweight", MR_I32, k / 8, rows);
    declare(j, &n, ".qzeros", MR_I32, groups, rows / 8);
    declare(j, &n, ".scales", MR_F16, groups, rows);
    declare(j, &n, ".g_idx", MR_I32, 0, k);
  } else if (j->o->form == MR_FORM_AWQ) {
    declare(j, &n, ".qweight", MR_I32, k, rows / 8);
    declare(j, &n, ".qzeros", MR_I32, groups, rows / 8);
    declare(j, &n, ".scales", MR_F16, groups, rows);
  } else {
    declare(j, &n, ".weight", MR_I8, rows, k);
    declare(j, &n, ".weight_scale", MR_F32, rows, 1);
  }
  if (outliers) {
    declare(j, &n, ".weight_outliers", MR_F16, rows, outliers);
    declare(j, &n, ".outlier_columns", MR_I32, 0, outliers);
  }
  return MR_OK;
}

/* What stays: copied, or as float32 where factors went in. */
static mr_code put_plain(job *j, const mr_out_tensor *t, mr_err *err) {
  mr_code rc = MR_OK;
  if (t->raw && !t->row && !t->col) {
    for (uint64_t at = 0, n; at < t->raw->bytes && !rc; at += n) {
      n = t->raw->bytes - at < CHUNK ? t->raw->bytes - at : CHUNK;
      rc = mr_st_write_data(j->w, t->raw->data + at, (size_t)n, err);
    }
    return rc;
  }
  size_t row = (size_t)t->dims[0] * sizeof(float);
  if (!room(j, row))
    return no_memory(err);
  for (int64_t r = 0; r < t->rows && !rc; r++) {
    mr_out_row(&j->plan, t, r, (float *)(void *)j->bytes);
    rc = put(j, row, err);
  }
  return rc;
}

static mr_code put_tensor(job *j, const mr_out_tensor *t, mr_err *err) {
  mr_recipe_rows from = {0};
  if (t->kind != MR_OUT_MATRIX)
    return t->kind == MR_OUT_NONE ? MR_OK : put_plain(j, t, err);
  mr_code rc = mr_recipe_tensor(j->recipe, t, &from, err);
  if (rc)
    return rc;
  if (!from.grid)
    return mr_err_at(err, MR_E_UNAVAILABLE, j->o->in, 0, -1,
                     "the texts say nothing of tensor %s: it cannot be rounded", t->name);
  j->r->n_typed++;
  return j->o->form == MR_FORM_GPTQ  ? put_gptq(j, &from, err)
         : j->o->form == MR_FORM_AWQ ? put_awq(j, &from, err)
                                     : put_int8(j, &from, err);
}

static mr_code write_weights(job *j, mr_err *err) {
  mr_text path = {0};
  mr_text_addf(&path, "%s/model.safetensors", j->temp);
  mr_code rc = path.failed ? no_memory(err) : mr_st_write_open(&j->w, path.data, err);
  mr_text_free(&path);
  for (size_t i = 0; i < j->plan.n && !rc; i++) {
    mr_out_tensor *t = &j->plan.t[i];
    if (t->kind != MR_OUT_MATRIX && (t->row || t->col))
      t->dtype = MR_F32;
    rc = t->kind == MR_OUT_NONE ? MR_OK : declare_tensor(j, t, err);
  }
  if (!rc)
    rc = mr_st_write_begin(j->w, err);
  for (size_t i = 0; i < j->plan.n && !rc; i++)
    rc = put_tensor(j, &j->plan.t[i], err);
  if (!rc)
    rc = mr_st_write_finish(j->w, err);
  if (!rc)
    j->r->bytes_out = mr_st_write_bytes(j->w);
  return rc;
}

/* ------------------------------------------------------------------ the other files */

/* Linear layers that stay as they are: the head, what chooses experts, the shared one's gate. */
static json_t *kept_modules(const job *j, bool head) {
  static const char *const stems[] = {"ffn_gate_inp", "ffn_gate_inp_shexp"};
  json_t *list = json_array();
  mr_names of;
  char name[MR_NAME];
  mr_names_open(&of, j->m->weights);
  if (head)
    json_array_append_new(list, json_string("lm_head"));
  for (int i = 0; i < j->m->c.n_layers; i++)
    for (size_t s = 0; s < sizeof stems / sizeof *stems; s++)
      if (j->m->layers[i].experts && mr_names_find(&of, i, stems[s], ".weight", 0, name)) {
        name[strlen(name) - strlen(".weight")] = 0;
        json_array_append_new(list, json_string(name));
      }
  return list;
}

static json_t *int8_config(const job *j) {
  return json_pack("{s:s, s:s, s:s, s:o, s:{s:{s:[s], s:{s:i, s:s, s:s, s:b, s:b}, s:{s:i, s:s, "
                   "s:s, s:b, s:b}}}}",
                   "quant_method", "compressed-tensors", "format", "int-quantized",
                   "quantization_status", "compressed", "ignore", kept_modules(j, true),
                   "config_groups", "group_0", "targets", "Linear", "weights", "num_bits", 8,
                   "type", "int", "strategy", "channel", "symmetric", 1, "dynamic", 0,
                   "input_activations", "num_bits", 8, "type", "int", "strategy", "token",
                   "symmetric", 1, "dynamic", 1);
}

static json_t *quantization_config(const job *j) {
  switch (j->o->form) {
  case MR_FORM_GPTQ:
    return json_pack("{s:s, s:i, s:i, s:b, s:b, s:f, s:s, s:b}", "quant_method", "gptq", "bits", 4,
                     "group_size", j->spec.group, "desc_act", 0, "sym", 1, "damp_percent", 0.01,
                     "checkpoint_format", "gptq", "static_groups", 1);
  case MR_FORM_AWQ:
    return json_pack("{s:s, s:i, s:i, s:b, s:s, s:o}", "quant_method", "awq", "bits", 4,
                     "group_size", j->spec.group, "zero_point", 1, "version", "gemm",
                     "modules_to_not_convert", kept_modules(j, false));
  case MR_FORM_INT8:
    return int8_config(j);
  default:
    return json_pack("{s:s, s:i}", "quant_method", "int8-outliers", "bits", 8);
  }
}

static mr_code write_config(const job *j, mr_err *err) {
  mr_text path = {0}, text = {0};
  mr_text_addf(&path, "%s/config.json", j->o->in);
  json_t *config = path.failed ? NULL : mr_json_read(path.data, MAX_CONFIG, err);
  if (!config) {
    mr_text_free(&path);
    return err->code ? err->code : no_memory(err);
  }
  mr_json_ran_out();
  json_t *q = quantization_config(j);
  char *dump = q && !mr_json_ran_out() && !json_object_set_new(config, "quantization_config", q)
                   ? mr_json_dumps(config, JSON_INDENT(2))
                   : NULL;
  mr_text_clear(&path);
  mr_text_addf(&path, "%s/config.json", j->temp);
  if (dump)
    mr_text_addf(&text, "%s\n", dump);
  mr_code rc = !dump || path.failed || text.failed
                   ? no_memory(err)
                   : mr_durable_write(path.data, text.data, text.len, err);
  mr_mem_free(dump);
  mr_text_free(&path);
  mr_text_free(&text);
  json_decref(config);
  return rc;
}

static mr_code copy_file(const job *j, const char *name, mr_err *err) {
  mr_text from = {0}, to = {0}, text = {0};
  mr_code rc = MR_OK;
  mr_text_addf(&from, "%s/%s", j->o->in, name);
  mr_text_addf(&to, "%s/%s", j->temp, name);
  errno = 0;
  int fd = from.failed || to.failed ? -1 : mr_sys_now->open(from.data, O_RDONLY | O_CLOEXEC, 0);
  bool absent = fd < 0 && (errno == ENOENT || errno == ENOTDIR);
  char *buf = fd >= 0 ? mr_mem_alloc(CHUNK, 1) : NULL;
  ssize_t n = 0;
  while (buf && (n = mr_sys_read_full(fd, buf, CHUNK)) > 0)
    mr_text_add(&text, buf, (size_t)n);
  if (n < 0)
    rc = mr_err_errno(err, MR_E_IO, from.data, "cannot read");
  else if (text.failed || from.failed || to.failed || (fd >= 0 && !buf))
    rc = no_memory(err);
  else if (fd < 0 && !absent)
    rc = mr_err_errno(err, MR_E_NOINPUT, from.data, "cannot open");
  else if (fd >= 0)
    rc = mr_durable_write(to.data, text.data ? text.data : "", text.len, err);
  if (fd >= 0)
    mr_sys_now->close(fd);
  mr_mem_free(buf);
  mr_text_free(&from);
  mr_text_free(&to);
  mr_text_free(&text);
  return rc;
}

static mr_code copy_files(const job *j, mr_err *err) {
  static const char *const files[] = {"tokenizer.json",
                                      "tokenizer_config.json",
                                      "special_tokens_map.json",
                                      "generation_config.json",
                                      "chat_template.jinja",
                                      "tokenizer.model",
                                      "vocab.json",
                                      "merges.txt",
                                      "added_tokens.json"};
  mr_code rc = MR_OK;
  for (size_t i = 0; i < sizeof files / sizeof *files && !rc; i++)
    rc = copy_file(j, files[i], err);
  return rc;
}

/* ------------------------------------------------------------------ the whole */

static mr_code fill(job *j, mr_err *err) {
  mr_code rc = mr_model_open(&j->m, j->o->in, err);
  if (!rc)
    rc = mr_out_plan_dir(&j->plan, j->m, err);
  if (!rc && j->m->c.arch.hf_columns && j->o->form >= MR_FORM_INT8)
    rc =
        mr_err_at(err, MR_E_UNAVAILABLE, j->o->in, 0, -1,
                  "int8 forms are of linear layers; these matrices are stored transposed: gptq and "
                  "awq can be written");
  if (!rc)
    rc = choose_spec(j, err);
  if (!rc)
    rc = mr_durable_mkdir(j->temp, err);
  if (!rc)
    rc = mr_recipe_open(&j->recipe, j->o, j->m, &j->plan, &j->spec, err);
  if (!rc)
    rc = write_weights(j, err);
  if (!rc)
    rc = write_config(j, err);
  return rc ? rc : copy_files(j, err);
}

mr_code mr_quantize_dir(const mr_quantize_opts *o, mr_quantize_report *r, mr_err *err) {
  job j = {.o = o, .r = r};
  struct stat st;
  mr_text temp = {0};
  *r = (mr_quantize_report){0};
  if (mr_sys_now->stat(o->out, &st) == 0)
    return mr_err_at(err, MR_E_CANTCREATE, o->out, 0, -1, "exists");
  mr_text_addf(&temp, "%s.tmp", o->out);
  if (temp.failed)
    return no_memory(err);
  j.temp = temp.data;
  mr_code rc = mr_durable_remove_tree(j.temp, err);
  if (!rc)
    rc = fill(&j, err);
  if (!rc)
    rc = mr_durable_sync_dir(j.temp, err);
  if (!rc)
    rc = mr_durable_rename(j.temp, o->out, err);
  if (!rc) {
    r->bytes_in = mr_weights_bytes(j.m->weights);
    r->n_tensors = (int)j.plan.n;
    r->n_calibrated = mr_recipe_count(j.recipe);
  } else {
    mr_durable_remove_tree(j.temp, NULL);
  }
  mr_st_write_free(j.w);
  mr_recipe_free(j.recipe);
  mr_out_plan_free(&j.plan);
  mr_model_close(j.m);
  mr_mem_free(j.bytes);
  mr_text_free(&temp);
  return rc;
}
