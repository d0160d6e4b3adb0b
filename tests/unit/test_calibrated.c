/* Models that are written with texts: factors change nothing by themselves, methods come nearer to
 * the source than plain rounding, sparse matrices are sparse, directories are read back. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "io/gguf_write.h"
#include "io/mem.h"
#include "jobs/accuracy.h"
#include "src/quantize.h"
#include "tests/unit/conformance.h"
#include "tests/unit/temp.h"
#include "tests/unit/tiny_gguf.h"

#define TINY_HF_WIDE 64
#define TINY_HF_VOCAB 256
#include "tests/unit/tiny_hf.h"

enum { TEXTS = 12, LENGTH = 100 };

static int32_t ids[TEXTS][LENGTH];
static mr_tokens texts[TEXTS];
static mr_pool *pool;
static char model[300];

static int begin(void **state) {
  uint64_t s = 5;
  if (temp_begin(state))
    return -1;
  for (int t = 0; t < TEXTS; t++) {
    for (int i = 0; i < LENGTH; i++)
      ids[t][i] = (int32_t)((s = s * 6364136223846793005u + 1442695040888963407u) >> 56);
    texts[t] = (mr_tokens){ids[t], LENGTH};
  }
  snprintf(model, sizeof model, "%s", temp_path("m.gguf"));
  tiny_gguf_write(model, -1);
  pool = mr_pool_new(2, 0);
  return pool ? 0 : -1;
}

static int end(void **state) {
  mr_pool_free(pool);
  return temp_end(state);
}

static mr_quantize_opts options(const char *in, const char *out, int dtype,
                                mr_quantize_method method, mr_sparsify sparsify) {
  return (mr_quantize_opts){.in = in,
                            .out = out,
                            .dtype = dtype,
                            .head_dtype = MR_F32,
                            .method = method,
                            .sparsify = sparsify,
                            .texts = texts,
                            .n_texts = method || sparsify ? TEXTS : 0,
                            .pool = pool};
}

/* KL of the file from the source, on the same texts. */
static double distance(const char *in, const char *out) {
  mr_accuracy_way x = {in, true, -1}, y = {out, true, -1};
  mr_accuracy *a;
  mr_tally t = {0};
  mr_err err = MR_ERR_INIT;
  if (mr_accuracy_open(&a, &x, &y, pool, &err))
    fail_msg("%s", err.text);
  for (int i = 0; i < 4; i++)
    assert_int_equal(mr_accuracy_add(a, &t, ids[i], LENGTH, &err), MR_OK);
  mr_accuracy_sum s = mr_tally_sum(&t);
  mr_tally_free(&t);
  mr_accuracy_close(a);
  return s.kl;
}

static bool plainly; /* rounding without a search */

static double written(const char *in, int dtype, mr_quantize_method method, mr_sparsify sparsify) {
  const char *out = temp_path("out.gguf");
  mr_quantize_opts o = options(in, out, dtype, method, sparsify);
  o.plain = plainly;
  mr_quantize_report r;
  mr_err err = MR_ERR_INIT;
  if (mr_quantize(&o, &r, &err))
    fail_msg("%s", err.text);
  assert_true(o.n_texts == 0 || r.n_calibrated > 0);
  return distance(in, out);
}

static void factors_change_nothing(void **state) {
  static const char *const dirs[] = {"qwen2",      "phi3",       "gemma3_text", "gpt_neox",
                                     "falcon_new", "starcoder2", "mixtral",     "gpt2"};
  (void)state;
  for (int m = MR_METHOD_SMOOTH; m <= MR_METHOD_AWQ; m++) {
    assert_true(written(model, MR_F32, (mr_quantize_method)m, MR_SPARSE_NO) < 1e-6);
    for (size_t i = 0; i < sizeof dirs / sizeof *dirs; i++) {
      char path[4200], rest[64];
      snprintf(rest, sizeof rest, "tiny/hf/%s", dirs[i]);
      const char *at = data_path(rest);
      if (!at)
        continue;
      snprintf(path, sizeof path, "%s", at);
      double kl = written(path, MR_F32, (mr_quantize_method)m, MR_SPARSE_NO);
      if (kl > 1e-6)
        fail_msg("%s, method %d: KL %g", dirs[i], m, kl);
    }
  }
}

static void methods_come_nearer(void **state) {
  static const int types[] = {MR_Q4_0, MR_Q4_1};
  (void)state;
  for (size_t i = 0; i < 2; i++) {
    double kl[5];
    plainly = true;
    double plain = written(model, types[i], MR_METHOD_NONE, MR_SPARSE_NO);
    plainly = false;
    for (int m = 0; m < 5; m++)
      kl[m] = written(model, types[i], (mr_quantize_method)m, MR_SPARSE_NO);
    print_message("%s: plain %.3f, search %.3f, importance %.3f, SmoothQuant %.3f, AWQ %.3f, GPTQ "
                  "%.3f\n",
                  mr_dtype_get(types[i])->name, plain, kl[0], kl[1], kl[2], kl[3], kl[4]);
    for (int m = 0; m < 5; m++) {
      assert_true(kl[m] < plain);
      assert_true(m == MR_METHOD_GPTQ || kl[MR_METHOD_GPTQ] < kl[m]);
    }
  }
  assert_true(written(model, MR_Q8_0, MR_METHOD_GPTQ, MR_SPARSE_NO) <
              written(model, MR_Q8_0, MR_METHOD_NONE, MR_SPARSE_NO));
}

static void assert_two_of_four(const char *path) {
  mr_gguf *g;
  mr_err err = MR_ERR_INIT;
  float row[512];
  int seen = 0;
  assert_int_equal(mr_gguf_open(&g, path, &err), MR_OK);
  for (size_t i = 0; i < mr_gguf_n_tensors(g); i++) {
    const mr_gguf_tensor *t = mr_gguf_tensor_at(g, i);
    if (t->n_dims != 2 || memcmp(t->name.s, "blk.", 4))
      continue;
    uint64_t bytes = mr_dtype_bytes(t->dtype, (uint64_t)t->dims[0]);
    for (int64_t r = 0; r < t->dims[1]; r++) {
      mr_dtype_get(t->dtype)->to_f32(row, t->data + (uint64_t)r * bytes, t->dims[0]);
      for (int64_t c = 0; c < t->dims[0]; c += 4)
        assert_true((row[c] == 0) + (row[c + 1] == 0) + (row[c + 2] == 0) + (row[c + 3] == 0) >= 2);
    }
    seen++;
  }
  assert_int_equal(seen, 7 * TINY_LAYERS);
  mr_gguf_close(g);
}

static void sparse_matrices(void **state) {
  (void)state;
  double wanda = written(model, MR_F16, MR_METHOD_NONE, MR_SPARSE_WANDA);
  assert_two_of_four(temp_path("out.gguf"));
  double gpt = written(model, MR_F16, MR_METHOD_NONE, MR_SPARSE_SPARSEGPT);
  assert_two_of_four(temp_path("out.gguf"));
  print_message("2:4: Wanda %.3f, SparseGPT %.3f\n", wanda, gpt);
  assert_true(gpt < wanda);
  written(model, MR_Q8_0, MR_METHOD_IMPORTANCE, MR_SPARSE_SPARSEGPT);
  assert_two_of_four(temp_path("out.gguf"));
}

/* Products of one layer at a time give the same file as all at once; so does one thread. */
static void budget_and_threads(void **state) {
  mr_quantize_opts o = options(model, temp_path("a"), MR_Q4_0, MR_METHOD_GPTQ, MR_SPARSE_NO);
  mr_quantize_report r;
  mr_err err = MR_ERR_INIT;
  mr_pool *one = mr_pool_new(1, 0);
  size_t n = 0, k = 0;
  (void)state;
  assert_int_equal(mr_quantize(&o, &r, &err), MR_OK);
  o.out = temp_path("b");
  o.products = 1;
  o.pool = one;
  assert_int_equal(mr_quantize(&o, &r, &err), MR_OK);
  mr_pool_free(one);
  char *a = read_whole(temp_path("a"), &n), *b = read_whole(temp_path("b"), &k);
  assert_int_equal(n, k);
  assert_memory_equal(a, b, n);
  free(a);
  free(b);
}

static const double limit[] = {[MR_FORM_GPTQ] = 0.4,
                               [MR_FORM_AWQ] = 0.4,
                               [MR_FORM_INT8] = 0.015,
                               [MR_FORM_INT8_OUTLIERS] = 0.015};

/* The KL of `in` written in a form with the method that is its own. */
static double form_distance(const char *in, int form, mr_quantize_method method) {
  char out[300];
  mr_quantize_report r;
  mr_err err = MR_ERR_INIT;
  snprintf(out, sizeof out, "%s", temp_path("dir"));
  mr_quantize_opts o = options(in, out, MR_F32, method, MR_SPARSE_NO);
  o.form = (mr_quantize_form)form;
  if (!method)
    o.method = form == MR_FORM_GPTQ   ? MR_METHOD_GPTQ
               : form == MR_FORM_AWQ  ? MR_METHOD_AWQ
               : form == MR_FORM_INT8 ? MR_METHOD_SMOOTH
                                      : MR_METHOD_IMPORTANCE;
  o.n_texts = TEXTS;
  if (mr_quantize_dir(&o, &r, &err))
    fail_msg("%s, form %d: %s", in, form, err.text);
  assert_int_equal(access(temp_path("dir.tmp"), F_OK), -1);
  double kl = distance(in, out);
  assert_int_equal(mr_quantize_dir(&o, &r, &err), MR_E_CANTCREATE); /* it is there */
  mr_err_clear(&err);
  assert_int_equal(mr_durable_remove_tree(out, &err), MR_OK);
  return kl;
}

static void directories(void **state) {
  static const char *const names[] = {
      "llama_gqa", "qwen2",     "gemma", "phi3",       "gpt_neox", "codegen",     "bloom",
      "mixtral",   "qwen3_moe", "gpt2",  "granitemoe", "gpt_oss",  "llama4_text", "deepseek_v3"};
  (void)state;
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    for (int form = MR_FORM_GPTQ; form <= MR_FORM_INT8_OUTLIERS; form++) {
      char in[4200], rest[64];
      snprintf(rest, sizeof rest, "tiny/hf/%s", names[i]);
      if (!data_path(rest))
        skip();
      snprintf(in, sizeof in, "%s", data_path(rest));
      bool four = form < MR_FORM_INT8; /* no 4-bit groups of 24, no int8 that is transposed */
      if (!strcmp(names[i], four ? "deepseek_v3" : "gpt2")) {
        mr_quantize_report r;
        mr_err err = MR_ERR_INIT;
        mr_quantize_opts o =
            options(in, temp_path("dir"), MR_F32, MR_METHOD_IMPORTANCE, MR_SPARSE_NO);
        o.form = (mr_quantize_form)form;
        assert_int_equal(mr_quantize_dir(&o, &r, &err), MR_E_UNAVAILABLE);
        continue;
      }
      double kl = form_distance(in, form, MR_METHOD_NONE);
      print_message("%s, form %d: KL %.4f\n", names[i], form, kl);
      assert_true(kl < limit[form] * (strcmp(names[i], "granitemoe") ? 1 : 4)); /* as its GGUF */
    }
}

/* Methods find the inputs of its matrices: each is better than rounding as if there were none. */
static void latent_attention(void **state) {
  static const tiny_latent sizes = {4, 16, 8, 24, 32, 32};
  static out_file f;
  (void)state;
  for (int low = 0; low < 2; low++) {
    char in[300];
    snprintf(in, sizeof in, "%s", write_latent(&f, &sizes, low));
    double plain = form_distance(in, MR_FORM_GPTQ, MR_METHOD_IMPORTANCE);
    for (int form = MR_FORM_GPTQ; form <= MR_FORM_INT8_OUTLIERS; form++) {
      double kl = form_distance(in, form, MR_METHOD_NONE);
      print_message("latent attention, form %d: KL %.4f (GPTQ's form by importance %.4f)\n", form,
                    kl, plain);
      assert_true(kl < 1.2 * limit[form]);
      assert_true(form != MR_FORM_GPTQ || kl < plain);
    }
    double folded = form_distance(in, MR_FORM_INT8, MR_METHOD_AWQ); /* int8 hides nothing */
    print_message("latent attention, int8 with AWQ's factors: KL %.5f\n", folded);
    assert_true(folded < 0.004);
    clear(&f);
  }
}

/* AWQ's factors go into the rows that hold values, wherever a tensor has them: beside int8, which
 * hides nothing. And a shared expert. */
static void factors_of_fused_rows(void **state) {
  static const char *const names[] = {"phi3", "gpt_neox", "codegen", "bloom", "qwen2_moe"};
  (void)state;
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    char in[4200], rest[64], out[300];
    mr_quantize_report r;
    mr_err err = MR_ERR_INIT;
    snprintf(rest, sizeof rest, "tiny/hf/%s", names[i]);
    if (!data_path(rest))
      skip();
    snprintf(in, sizeof in, "%s", data_path(rest));
    snprintf(out, sizeof out, "%s", temp_path("dir"));
    mr_quantize_opts o = options(in, out, MR_F32, MR_METHOD_AWQ, MR_SPARSE_NO);
    o.form = MR_FORM_INT8;
    assert_int_equal(mr_quantize_dir(&o, &r, &err), MR_OK);
    double kl = distance(in, out);
    print_message("%s: KL %.5f\n", names[i], kl);
    assert_true(kl < 0.004);
    assert_int_equal(mr_durable_remove_tree(out, &err), MR_OK);
  }
}

/* A column of outliers that the matrix has not is refused. */
static void outliers_are_checked(void **state) {
  char in[4200];
  mr_quantize_report r;
  mr_err err = MR_ERR_INIT;
  size_t len = 0;
  uint64_t head;
  mr_model *m;
  (void)state;
  if (!data_path("tiny/hf/qwen2"))
    skip();
  snprintf(in, sizeof in, "%s", data_path("tiny/hf/qwen2"));
  mr_quantize_opts o = options(in, temp_path("dir"), MR_F32, MR_METHOD_IMPORTANCE, MR_SPARSE_NO);
  o.form = MR_FORM_INT8_OUTLIERS;
  assert_int_equal(mr_quantize_dir(&o, &r, &err), MR_OK);
  char *file = read_whole(temp_path("dir/model.safetensors"), &len);
  assert_non_null(file);
  memcpy(&head, file, sizeof head);
  char *at = strstr(file + 8, "outlier_columns");
  assert_non_null(at);
  at = strstr(at, "data_offsets\":[");
  size_t offset = (size_t)strtoull(at + strlen("data_offsets\":["), NULL, 10);
  int32_t column;
  memcpy(&column, file + 8 + head + offset, 4);
  assert_in_range(column, 0, 1000);
  column = 1 << 20;
  memcpy(file + 8 + head + offset, &column, 4);
  temp_write("dir/model.safetensors", file, len);
  free(file);
  assert_int_equal(mr_model_open(&m, temp_path("dir"), &err), MR_E_DATA);
  assert_non_null(strstr(err.text, "outlier_columns"));
}

static void directories_refused(void **state) {
  static const char *const names[] = {"quant/awq-4bit-g32"};
  (void)state;
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    char in[4200], rest[64];
    mr_quantize_report r;
    mr_err err = MR_ERR_INIT;
    snprintf(rest, sizeof rest, "tiny/%s", names[i]);
    if (!data_path(rest))
      skip();
    snprintf(in, sizeof in, "%s", data_path(rest));
    mr_quantize_opts o = options(in, temp_path("dir"), MR_F32, MR_METHOD_GPTQ, MR_SPARSE_NO);
    o.form = MR_FORM_GPTQ;
    assert_int_equal(mr_quantize_dir(&o, &r, &err), MR_E_UNAVAILABLE);
    assert_int_equal(access(temp_path("dir"), F_OK), -1);
    assert_int_equal(access(temp_path("dir.tmp"), F_OK), -1);
  }
  mr_err err = MR_ERR_INIT;
  mr_quantize_report r;
  mr_quantize_opts o = options(model, temp_path("dir"), MR_F32, MR_METHOD_GPTQ, MR_SPARSE_NO);
  o.form = MR_FORM_GPTQ;
  assert_int_equal(mr_quantize_dir(&o, &r, &err), MR_E_UNAVAILABLE); /* a file */
}

#define LONG_NAME "a.tensor.that.nobody.reads.whose.name.is.as.long.as.can.be......"

/* The tiny model with a layer that it does not say it has, and a name as long as the format allows.
 */
static void write_extra(const char *path) {
  static const float zeros[64 * 64];
  const int64_t square[2] = {64, 64}, line[1] = {64};
  mr_gguf *g;
  mr_gguf_writer *w;
  mr_err err = MR_ERR_INIT;
  assert_int_equal(mr_gguf_open(&g, model, &err), MR_OK);
  assert_int_equal(mr_gguf_write_open(&w, path, &err), MR_OK);
  for (size_t i = 0; i < mr_gguf_n_kv(g); i++)
    mr_gguf_write_copy(w, mr_gguf_kv_at(g, i));
  size_t n = mr_gguf_n_tensors(g);
  for (size_t i = 0; i < n; i++) {
    const mr_gguf_tensor *t = mr_gguf_tensor_at(g, i);
    char name[MR_GGUF_NAME] = "";
    memcpy(name, t->name.s, t->name.len);
    assert_true(mr_gguf_write_tensor(w, name, t->dtype, t->n_dims, t->dims));
  }
  assert_true(mr_gguf_write_tensor(w, "blk.99999.attn_q.weight", MR_F32, 2, square));
  assert_true(mr_gguf_write_tensor(w, LONG_NAME, MR_F32, 1, line));
  assert_int_equal(mr_gguf_write_begin(w, &err), MR_OK);
  for (size_t i = 0; i < n; i++) {
    const mr_gguf_tensor *t = mr_gguf_tensor_at(g, i);
    assert_int_equal(mr_gguf_write_data(w, t->data, t->bytes, &err), MR_OK);
  }
  assert_int_equal(mr_gguf_write_data(w, zeros, sizeof zeros, &err), MR_OK);
  assert_int_equal(mr_gguf_write_data(w, zeros, 64 * 4, &err), MR_OK);
  assert_int_equal(mr_gguf_write_finish(w, &err), MR_OK);
  mr_gguf_write_free(w);
  mr_gguf_close(g);
}

/* Texts say nothing of layers that the model has not; they are rounded all the same. */
static void layers_beyond_the_last(void **state) {
  static const mr_quantize_method methods[] = {MR_METHOD_IMPORTANCE, MR_METHOD_AWQ, MR_METHOD_GPTQ};
  (void)state;
  write_extra(temp_path("extra.gguf"));
  for (size_t i = 0; i < sizeof methods / sizeof *methods; i++) {
    mr_quantize_report r;
    mr_err err = MR_ERR_INIT;
    mr_gguf *g;
    mr_quantize_opts o =
        options(temp_path("extra.gguf"), temp_path("m"), MR_Q4_1, methods[i], MR_SPARSE_NO);
    if (mr_quantize(&o, &r, &err))
      fail_msg("%s", err.text);
    assert_int_equal(mr_gguf_open(&g, temp_path("m"), &err), MR_OK);
    const mr_gguf_tensor *t = mr_gguf_find_tensor(g, "blk.99999.attn_q.weight");
    assert_true(t && t->dtype == MR_Q4_1);
    assert_non_null(mr_gguf_find_tensor(g, LONG_NAME));
    mr_gguf_close(g);
  }
}

/* A small directory, two layers, of which --type int8 and others can be written. */
static mr_quantize_opts of_directory(char in[4200]) {
  char *weights = realpath(data_path("tiny/hf/qwen2/model.safetensors"), NULL),
       *config = realpath(data_path("tiny/hf/qwen2/config.json"), NULL);
  snprintf(in, 4200, "%s", temp_path("in"));
  mkdir(in, 0700);
  assert_int_equal(symlink(weights, temp_path("in/model.safetensors")), 0);
  assert_int_equal(symlink(config, temp_path("in/config.json")), 0);
  free(weights);
  free(config);
  mr_quantize_opts o = options(in, temp_path("dir"), MR_F32, MR_METHOD_SMOOTH, MR_SPARSE_NO);
  o.form = MR_FORM_INT8;
  o.n_texts = 1;
  return o;
}

/* A file that is there and cannot be read is not left out. */
static void files_that_cannot_be_read(void **state) {
  char in[4200];
  mr_quantize_report r;
  mr_err err = MR_ERR_INIT;
  (void)state;
  if (!data_path("tiny/hf/qwen2"))
    skip();
  mr_quantize_opts o = of_directory(in);
  assert_int_equal(symlink("vocab.json", temp_path("in/vocab.json")), 0); /* of itself */
  assert_int_equal(mr_quantize_dir(&o, &r, &err), MR_E_NOINPUT);
  assert_non_null(strstr(err.file, "vocab.json"));
  assert_int_equal(access(temp_path("dir"), F_OK), -1);
}

/* Whichever of the last allocations fails, config.json is whole or is not written. */
static void whole_config_or_no_memory(void **state) {
  char in[4200];
  int64_t many = 1 << 24, total = many;
  size_t len = 0, n = 0;
  mr_quantize_report r;
  mr_err err = MR_ERR_INIT;
  (void)state;
  if (!data_path("tiny/hf/qwen2"))
    skip();
  mr_quantize_opts o = of_directory(in);
  mr_mem_fail_after(many);
  assert_int_equal(mr_quantize_dir(&o, &r, &err), MR_OK);
  for (void *p; (p = mr_mem_alloc(1, 1)) != NULL; total--)
    mr_mem_free(p);
  mr_mem_fail_after(-1);
  char *want = read_whole(temp_path("dir/config.json"), &len);
  for (int64_t i = total > 100 ? total - 100 : 0; i < total; i++) {
    mr_durable_remove_tree(temp_path("dir"), NULL);
    mr_err_clear(&err);
    mr_mem_fail_after(i);
    mr_code rc = mr_quantize_dir(&o, &r, &err);
    mr_mem_fail_after(-1);
    assert_true(rc == MR_OK || rc == MR_E_NOMEM);
    char *got = rc ? NULL : read_whole(temp_path("dir/config.json"), &n);
    assert_true(rc || (n == len && !memcmp(got, want, n)));
    free(got);
  }
  free(want);
}

static void allocations_fail(void **state) {
  mr_code rc = MR_E_NOMEM;
  (void)state;
  for (int n = 0; rc; n += 1 + n / 50) {
    mr_err err = MR_ERR_INIT;
    mr_quantize_report r;
    int64_t live = mr_mem_live();
    mr_quantize_opts o = options(model, temp_path("m"), MR_Q4_1, MR_METHOD_GPTQ, MR_SPARSE_NO);
    mr_mem_fail_after(n);
    rc = mr_quantize(&o, &r, &err);
    mr_mem_fail_after(-1);
    assert_int_equal(mr_mem_live(), live);
    assert_true(rc == MR_OK || rc == MR_E_NOMEM);
    assert_true(n < 10000);
  }
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, begin, end)

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(factors_change_nothing),
      TEST(methods_come_nearer),
      TEST(sparse_matrices),
      TEST(budget_and_threads),
      TEST(directories),
      TEST(latent_attention),
      TEST(factors_of_fused_rows),
      TEST(directories_refused),
      TEST(outliers_are_checked),
      TEST(allocations_fail),
      TEST(layers_beyond_the_last),
      TEST(files_that_cannot_be_read),
      TEST(whole_config_or_no_memory),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
