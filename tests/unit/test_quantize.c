/* Models written as GGUF files. Directories of the conformance data, as F32, must give the
 * reference
 * values of the directory; files keep what they hold. */
#include <dirent.h>
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

#include "io/mem.h"
#include "io/sys.h"
#include "src/quantize.h"
#include "src/tokenizer.h"
#include "tests/unit/oracle.h"
#include "tests/unit/temp.h"

static mr_code quantize(const char *in, const char *out, int dtype, int threads,
                        mr_quantize_report *r, mr_err *err) {
  mr_quantize_opts o = {.in = in, .out = out, .dtype = dtype, .head_dtype = -1};
  o.pool = threads > 1 ? mr_pool_new(threads, 0) : NULL;
  mr_code rc = mr_quantize(&o, r, err);
  mr_pool_free(o.pool);
  return rc;
}

static const char *data(const char *rest) {
  const char *at = data_path(rest);
  if (!at)
    skip();
  return at;
}

static void check_model(const char *path, const char *dir, const char *name) {
  mr_err err = MR_ERR_INIT;
  engine e;
  if (engine_open(&e, path, mr_kernels_best()->name, &err))
    fail_msg("%s: %s", name, err.text);
  check_cases(&e, dir, MAX_SEQS, MAX_STEPS, name);
  engine_close(&e);
}

/* Every directory either is refused with a reason or gives the reference's numbers. */
static int whole_folder(const char *folder) {
  char root[4200], dir[4500];
  int done = 0;
  snprintf(root, sizeof root, "%s", data(folder));
  DIR *d = opendir(root);
  assert_non_null(d);
  for (struct dirent *entry; (entry = readdir(d));) {
    mr_quantize_report r;
    mr_err err = MR_ERR_INIT;
    if (*entry->d_name == '.')
      continue;
    snprintf(dir, sizeof dir, "%s/%s", root, entry->d_name);
    const char *out = temp_path("model.gguf");
    mr_code rc = quantize(dir, out, MR_F32, 2, &r, &err);
    if (rc == MR_E_UNAVAILABLE) {
      print_message("%s: %s\n", entry->d_name, err.text);
      assert_int_equal(access(out, F_OK), -1);
      continue;
    }
    if (rc)
      fail_msg("%s: %s", entry->d_name, err.text);
    check_model(out, dir, entry->d_name);
    unlink(out);
    done++;
  }
  closedir(d);
  return done;
}

static void directories(void **state) {
  (void)state;
  reset();
  int done = whole_folder("tiny/hf");
  report("directories as GGUF");
  assert_true(done >= 18);
}

static void quantized_directories(void **state) {
  (void)state;
  assert_int_equal(whole_folder("tiny/quant"), 9);
}

/* ------------------------------------------------------------------ files */

static char *whole(const char *path, size_t *len) {
  char *p = read_whole(path, len);
  assert_non_null(p);
  return p;
}

static void assert_same_file(const char *a, const char *b) {
  size_t n = 0, m = 0;
  char *x = whole(a, &n), *y = whole(b, &m);
  assert_int_equal(n, m);
  assert_memory_equal(x, y, n);
  free(x);
  free(y);
}

static void must(const char *in, const char *out, int dtype, int threads, mr_quantize_report *r) {
  mr_err err = MR_ERR_INIT;
  if (quantize(in, out, dtype, threads, r, &err))
    fail_msg("%s: %s", in, err.text);
}

/* Logits after a few tokens, bit by bit. */
static void assert_same_logits(const char *a, const char *b) {
  static const int32_t ids[] = {3, 14, 15, 92, 65, 35, 89, 79};
  mr_err err = MR_ERR_INIT;
  float *logits[2];
  int vocab = 0;
  for (int i = 0; i < 2; i++) {
    engine e;
    mr_kv_seq seq;
    assert_int_equal(engine_open(&e, i ? b : a, mr_kernels_best()->name, &err), MR_OK);
    assert_int_equal(mr_kv_seq_init(e.kv, &seq, 8, &err), MR_OK);
    assert_int_equal(mr_kv_seq_reserve(e.kv, &seq, 8), MR_OK);
    mr_run run = {.seq = &seq, .tokens = ids, .n = 8};
    assert_int_equal(mr_forward_step(e.f, &run, 1, NULL, &err), MR_OK);
    vocab = e.m->c.n_vocab;
    logits[i] = malloc((size_t)vocab * sizeof(float));
    memcpy(logits[i], mr_forward_logits(e.f, 0), (size_t)vocab * sizeof(float));
    mr_kv_seq_free(e.kv, &seq);
    engine_close(&e);
  }
  assert_memory_equal(logits[0], logits[1], (size_t)vocab * sizeof(float));
  free(logits[0]);
  free(logits[1]);
}

/* What is the same again: f16 as f32; a type written in its own type; any number of threads. */
static void what_stays(void **state) {
  static const int types[] = {MR_Q4_0, MR_Q4_K, MR_IQ4_XS, MR_Q2_K};
  mr_quantize_report r;
  (void)state;
  char f16[4200];
  snprintf(f16, sizeof f16, "%s", data("tiny/gguf/llama_gqa/llama_gqa-F16.gguf"));
  must(f16, temp_path("f32.gguf"), MR_F32, 1, &r);
  assert_same_logits(f16, temp_path("f32.gguf"));
  must(temp_path("f32.gguf"), temp_path("f16.gguf"), MR_F16, 1, &r);
  assert_same_logits(f16, temp_path("f16.gguf"));
  for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
    must(data("tiny/gguf/llama_k/llama_k-Q6_K.gguf"), temp_path("1"), types[i], 1, &r);
    assert_true(r.n_typed > 0 && r.n_copied == 1); /* the head is Q6_K already */
    must(data("tiny/gguf/llama_k/llama_k-Q6_K.gguf"), temp_path("2"), types[i], 3, &r);
    assert_same_file(temp_path("1"), temp_path("2"));
    must(temp_path("1"), temp_path("3"), types[i], 2, &r);
    assert_int_equal(r.n_copied, r.n_typed + 1);
    assert_same_file(temp_path("1"), temp_path("3"));
  }
}

static void split_files_become_one(void **state) {
  mr_quantize_report r;
  mr_err err = MR_ERR_INIT;
  mr_gguf *g;
  (void)state;
  must(data("tiny/gguf/llama_gqa/llama_gqa-Q8_0-split-00001-of-00003.gguf"), temp_path("one"),
       MR_Q8_0, 2, &r);
  assert_int_equal(r.n_copied, r.n_typed);
  assert_int_equal(mr_gguf_open(&g, temp_path("one"), &err), MR_OK);
  assert_int_equal(mr_gguf_files(g), 1);
  assert_null(mr_gguf_find(g, "split.count"));
  mr_gguf_close(g);
  char split[4200];
  snprintf(split, sizeof split, "%s",
           data("tiny/gguf/llama_gqa/llama_gqa-Q8_0-split-00001-of-00003.gguf"));
  assert_same_logits(split, temp_path("one"));
}

/* ------------------------------------------------------------------ tokenizers */

static void link_into(const char *dir, const char *name) {
  char to[600], from[4300];
  snprintf(from, sizeof from, "%s", data(dir));
  snprintf(to, sizeof to, "%s/%s", temp_dir, name);
  char *real = realpath(from, NULL);
  assert_non_null(real);
  assert_int_equal(symlink(real, to), 0);
  free(real);
}

/* The tokenizer of a directory gives the same ids from the file. */
static void tokenizer_is_kept(void **state) {
  mr_quantize_report r;
  mr_err err = MR_ERR_INIT;
  mr_gguf *g;
  mr_vocab *v;
  size_t len = 0, i;
  (void)state;
  link_into("tiny/hf/qwen2/model.safetensors", "model.safetensors");
  link_into("tiny/hf/qwen2/config.json", "config.json");
  link_into("tiny/tokenizer/tokenizer.json", "tokenizer.json");
  temp_text("chat_template.jinja", "{{ messages[0].content }}");
  must(temp_dir, temp_path("m.gguf"), MR_Q8_0, 2, &r);
  assert_int_equal(mr_gguf_open(&g, temp_path("m.gguf"), &err), MR_OK);
  assert_int_equal(mr_vocab_open(&v, g, &err), MR_OK);
  assert_string_equal(mr_vocab_pre(v), "gpt-2");
  assert_non_null(mr_gguf_find(g, "tokenizer.chat_template"));
  char *text = whole(data("tiny/tokenizer/samples.json"), &len);
  json_t *all = json_loadb(text, len, 0, NULL), *one;
  json_array_foreach(json_is_array(all) ? all : json_object_get(all, "samples"), i, one) {
    const json_t *s = json_object_get(one, "text"), *want = json_object_get(one, "ids");
    mr_ids ids = {0};
    assert_int_equal(mr_tokenizer_encode(v, json_string_value(s), json_string_length(s), NULL,
                                         MR_TOK_PARSE_SPECIAL, &ids, &err),
                     MR_OK);
    assert_int_equal(ids.n, json_array_size(want));
    for (size_t k = 0; k < ids.n; k++)
      assert_int_equal(ids.ids[k], json_integer_value(json_array_get(want, k)));
    mr_ids_free(&ids);
  }
  assert_true(i > 3);
  json_decref(all);
  free(text);
  mr_vocab_close(v);
  mr_gguf_close(g);
}

/* A tokenizer that GGUF cannot say is refused, and can be left out. */
static void tokenizer_is_refused(void **state) {
  mr_quantize_report r;
  mr_err err = MR_ERR_INIT;
  (void)state;
  link_into("tiny/hf/qwen2/model.safetensors", "model.safetensors");
  link_into("tiny/hf/qwen2/config.json", "config.json");
  temp_text("tokenizer.json",
            "{\"model\": {\"type\": \"WordLevel\", \"vocab\": {\"a\": 0, \"b\": 1}, "
            "\"unk_token\": \"a\"}}");
  assert_int_equal(quantize(temp_dir, temp_path("m"), MR_F16, 1, &r, &err), MR_E_UNAVAILABLE);
  assert_non_null(strstr(err.text, "--no-vocab"));
  mr_quantize_opts o = {.in = temp_dir, .out = temp_path("m"), .dtype = MR_F16, .head_dtype = -1};
  o.no_vocab = true;
  mr_err_clear(&err);
  assert_int_equal(mr_quantize(&o, &r, &err), MR_OK);
}

/* ------------------------------------------------------------------ what goes wrong */

static int calls, fail_at; /* writes and syncs */

static ssize_t failing_pwrite(int fd, const void *b, size_t n, off_t at) {
  if (calls++ == fail_at) {
    errno = ENOSPC;
    return -1;
  }
  return mr_sys_os.pwrite(fd, b, n, at);
}

static int failing_fsync(int fd) {
  if (calls++ == fail_at) {
    errno = EIO;
    return -1;
  }
  return mr_sys_os.fsync(fd);
}

static void old_file_survives(void **state) {
  mr_quantize_report r;
  mr_sys sys = mr_sys_os;
  mr_code rc = MR_E_IO;
  (void)state;
  sys.pwrite = failing_pwrite;
  sys.fsync = failing_fsync;
  temp_text("old", "as it was");
  char in[4200];
  snprintf(in, sizeof in, "%s", data("tiny/gguf/qwen2/qwen2-F16.gguf"));
  for (fail_at = 0; rc; fail_at++) {
    mr_err err = MR_ERR_INIT;
    size_t len = 0;
    calls = 0;
    mr_sys_now = &sys;
    rc = quantize(in, temp_path("old"), MR_Q8_0, 1, &r, &err);
    mr_sys_now = &mr_sys_os;
    assert_int_equal(access(temp_path("old.tmp"), F_OK), -1);
    if (!rc || calls > fail_at + 1) /* renamed already: the directory could not be synced */
      continue;
    char *text = whole(temp_path("old"), &len);
    if (len == 9)
      assert_string_equal(text, "as it was");
    free(text);
  }
  assert_true(fail_at > 10);
}

static void every_allocation_may_fail(void **state) {
  mr_quantize_report r;
  char in[4200];
  mr_code rc = MR_E_NOMEM;
  (void)state;
  snprintf(in, sizeof in, "%s", data("tiny/gguf/qwen2/qwen2-Q4_0.gguf"));
  for (int n = 0; rc; n++) {
    mr_err err = MR_ERR_INIT;
    int64_t live = mr_mem_live();
    mr_mem_fail_after(n);
    rc = quantize(in, temp_path("m"), MR_Q5_0, 1, &r, &err);
    mr_mem_fail_after(-1);
    assert_int_equal(mr_mem_live(), live);
    if (rc)
      assert_int_equal(rc, MR_E_NOMEM);
    assert_true(n < 10000);
  }
}

static void values_that_do_not_fit(void **state) {
  mr_quantize_report r;
  mr_err err = MR_ERR_INIT;
  size_t len = 0;
  (void)state;
  char *file = whole(data("tiny/gguf/qwen2/qwen2-F32.gguf"), &len);
  float big = 1e6f;
  mr_gguf *g;
  char path[4200];
  snprintf(path, sizeof path, "%s", data("tiny/gguf/qwen2/qwen2-F32.gguf"));
  assert_int_equal(mr_gguf_open(&g, path, &err), MR_OK);
  const mr_gguf_tensor *t = mr_gguf_find_tensor(g, "blk.0.attn_q.weight"), *last = t;
  for (size_t i = 0; i < mr_gguf_n_tensors(g); i++)
    last = mr_gguf_tensor_at(g, i)->data > last->data ? mr_gguf_tensor_at(g, i) : last;
  /* the last tensor ends where the file ends, but for padding */
  size_t end = (size_t)(last->data - t->data) + (last->bytes + 31) / 32 * 32;
  memcpy(file + len - end + 4 * (size_t)t->dims[0], &big, 4);
  mr_gguf_close(g);
  temp_write("bad.gguf", file, len);
  free(file);
  assert_int_equal(quantize(temp_path("bad.gguf"), temp_path("m"), MR_F16, 2, &r, &err), MR_E_DATA);
  assert_non_null(strstr(err.text, "blk.0.attn_q.weight, row 1 "));
  assert_int_equal(access(temp_path("m"), F_OK), -1);
  mr_err_clear(&err);
  assert_int_equal(quantize(temp_path("bad.gguf"), temp_path("m"), MR_BF16, 2, &r, &err), MR_OK);
}

static void names(void **state) {
  (void)state;
  assert_int_equal(mr_quantize_type("q4_K"), MR_Q4_K);
  assert_int_equal(mr_quantize_type("F16"), MR_F16);
  assert_int_equal(mr_quantize_type("iq2_xs"), -1);
  assert_int_equal(mr_quantize_type(""), -1);
  assert_int_equal(mr_quantize_fit(MR_Q4_K, 512), MR_Q4_K);
  assert_int_equal(mr_quantize_fit(MR_Q4_K, 576), MR_Q5_0);
  assert_int_equal(mr_quantize_fit(MR_IQ4_XS, 576), MR_IQ4_NL);
  assert_int_equal(mr_quantize_fit(MR_Q6_K, 40), MR_F16);
  assert_int_equal(mr_quantize_head_type(MR_Q4_0), MR_Q6_K);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, temp_begin, temp_end)

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(directories),
      TEST(quantized_directories),
      TEST(what_stays),
      TEST(split_files_become_one),
      TEST(tokenizer_is_kept),
      TEST(tokenizer_is_refused),
      TEST(old_file_survives),
      TEST(every_allocation_may_fail),
      TEST(values_that_do_not_fit),
      TEST(names),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
