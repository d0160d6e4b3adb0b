#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "io/mem.h"
#include "starve.h"
#include "vocab_builder.h"

static mr_vocab *good(const vocab_parts *p) {
  mr_err err = MR_ERR_INIT;
  mr_vocab *v = NULL;
  mr_code c = open_parts(p, &v, &err);
  if (c)
    print_message("%s\n", err.text);
  assert_int_equal(c, MR_OK);
  return v;
}

/* The file is refused with words that name the key. */
static void refused(const vocab_parts *p, const char *word) {
  mr_err err = MR_ERR_INIT;
  mr_vocab *v = NULL;
  assert_int_equal(open_parts(p, &v, &err), MR_E_DATA);
  assert_null(v);
  if (!strstr(err.text, word))
    print_message("no \"%s\" in: %s\n", word, err.text);
  assert_non_null(strstr(err.text, word));
}

static void tables_of_bpe(void **state) {
  (void)state;
  vocab_parts p = bpe_parts();
  mr_vocab *v = good(&p);
  mr_str s;
  assert_int_equal(mr_vocab_size(v), 268);
  assert_string_equal(mr_vocab_kind(v), "bpe");
  assert_string_equal(mr_vocab_pre(v), "gpt-2");
  assert_int_equal(mr_vocab_bos(v), 264);
  assert_int_equal(mr_vocab_eos(v), -1);
  assert_true(mr_vocab_adds_bos(v));
  for (int b = 0; b < 256; b++) {
    assert_true(mr_vocab_piece(v, b, &s));
    assert_int_equal(s.len, 1);
    assert_int_equal((uint8_t)s.s[0], b);
  }
  assert_true(mr_vocab_piece(v, 262, &s) && s.len == 4 && !memcmp(s.s, " wor", 4));
  assert_int_equal(mr_vocab_find(v, " wor", 4), 262);
  assert_int_equal(mr_vocab_find(v, "<|s|>", 5), 264);
  assert_int_equal(mr_vocab_find(v, "nothing", 7), -1);
  assert_false(mr_vocab_piece(v, -1, &s) || mr_vocab_piece(v, 268, &s));
  assert_true(mr_vocab_is_control(v, 264));
  assert_false(mr_vocab_is_control(v, 267) || mr_vocab_is_control(v, 268) ||
               mr_vocab_is_control(v, -5));
  mr_vocab_close(v);
}

static void tables_of_spm(void **state) {
  (void)state;
  vocab_parts p = spm_parts();
  mr_vocab *v = good(&p);
  assert_string_equal(mr_vocab_kind(v), "spm");
  assert_string_equal(mr_vocab_pre(v), "");
  assert_true(mr_vocab_adds_bos(v) && v->add_space_prefix);
  assert_int_equal(mr_vocab_find(v,
                                 "\xe2\x96\x81"
                                 "ab",
                                 5),
                   264);
  assert_int_equal(v->byte_id[0x41], 3 + 0x41);
  mr_vocab_close(v);
  p.bos = p.eos = -1; /* <s> and </s> are known by their place */
  p.space_prefix = 0;
  v = good(&p);
  assert_int_equal(mr_vocab_bos(v), 1);
  assert_int_equal(mr_vocab_eos(v), 2);
  assert_false(v->add_space_prefix);
  mr_vocab_close(v);
}

static void ends(void **state) {
  (void)state;
  vocab_parts p = bpe_parts();
  p.eos = 300, p.eot = 263;
  int32_t by_name = 265, text = add_token(&p, "<|endoftext|>", MR_TOKEN_USER, 0);
  int32_t turn = add_token(&p, "<end_of_turn>", MR_TOKEN_CONTROL, 0),
          end = add_token(&p, "<|end|>", MR_TOKEN_CONTROL, 0);
  while (p.n <= 300)
    add_token(&p, "", MR_TOKEN_NORMAL, 0);
  snprintf(p.text[300], sizeof p.text[300], "stop");
  mr_vocab *v = good(&p);
  assert_true(mr_vocab_is_end(v, 300) && mr_vocab_is_end(v, 263) && mr_vocab_is_end(v, by_name));
  assert_true(mr_vocab_is_end(v, turn) && mr_vocab_is_end(v, end));
  assert_false(mr_vocab_is_end(v, text) || mr_vocab_is_end(v, 264) || mr_vocab_is_end(v, -1));
  mr_vocab_close(v);
  add_token(&p, "<|return|>", MR_TOKEN_CONTROL, 0);
  add_token(&p, "<|call|>", MR_TOKEN_CONTROL, 0);
  v = good(&p);
  assert_false(mr_vocab_is_end(v, end)); /* ends a message there, not the turn */
  mr_vocab_close(v);
}

static void broken_bpe(void **state) {
  (void)state;
  vocab_parts p = bpe_parts(), q = p;
  q.model = NULL;
  refused(&q, "tokenizer.ggml.model");
  q = p, q.model = "t5";
  refused(&q, "t5");
  q = p, q.pre = "martian-pre";
  refused(&q, "martian-pre");
  q = p, q.n = 0;
  refused(&q, "tokenizer.ggml.tokens");
  q = p, q.tokens_as_numbers = true;
  refused(&q, "tokenizer.ggml.tokens");
  q = p, q.n_types = 10;
  refused(&q, "tokenizer.ggml.token_type");
  q = p, q.n_merges = 0;
  refused(&q, "tokenizer.ggml.merges");
  q = p, q.merges_as_numbers = true;
  refused(&q, "tokenizer.ggml.merges");
  static const char *const bad[] = {"", " ", "ab", "a ", " b", "abc"};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    q = p, q.merges[3] = bad[i];
    refused(&q, "tokenizer.ggml.merges: entry 3");
  }
}

static void broken_ids(void **state) {
  (void)state;
  vocab_parts p = bpe_parts(), q = p;
  q.bos = 268;
  refused(&q, "tokenizer.ggml.bos_token_id");
  q = p, q.eos = INT32_MAX;
  refused(&q, "tokenizer.ggml.eos_token_id");
  q = p, q.eot = 4000;
  refused(&q, "tokenizer.ggml.eot_token_id");
  q = p, q.bos = -1;
  refused(&q, "tokenizer.ggml.bos_token_id");
  q = p, q.add_eos = 1;
  refused(&q, "tokenizer.ggml.eos_token_id");
  q = p, q.pre = "llama-bpe", q.bos = q.add_bos = -1; /* the usual BOS, where there is none */
  mr_vocab *v = good(&q);
  assert_false(mr_vocab_adds_bos(v));
  mr_vocab_close(v);
}

static void broken_spm(void **state) {
  (void)state;
  vocab_parts p = spm_parts(), q = p;
  q.n_scores = 0;
  refused(&q, "tokenizer.ggml.scores");
  q = p, q.n_scores = 5;
  refused(&q, "tokenizer.ggml.scores");
  q = p, q.score[7] = (float)(0.0 / (q.score[0] * 0.0)); /* NaN */
  refused(&q, "tokenizer.ggml.scores");
}

/* Files that are odd but usable: of equal texts the lowest id, unknown types, parts that are no
 * token. */
static void odd(void **state) {
  (void)state;
  vocab_parts p = bpe_parts();
  int32_t again = add_token(&p, "he", MR_TOKEN_NORMAL, 0);
  add_token(&p, "", MR_TOKEN_CONTROL, 0);
  add_token(&p, "\xff\xfe", MR_TOKEN_NORMAL, 0);
  p.type[again] = 77;
  p.merges[p.n_merges++] = "zz top";
  p.merges[p.n_merges++] = "z z";
  mr_vocab *v = good(&p);
  assert_int_equal(mr_vocab_find(v, "he", 2), 256);
  assert_int_equal(mr_vocab_find(v, "\xff\xfe", 2), again + 2);
  mr_vocab_close(v);
}

static vocab_parts bert_parts(void) {
  vocab_parts p = {.model = "bert",
                   .n_types = 1,
                   .bos = 1,
                   .eos = 2,
                   .eot = -1,
                   .add_bos = -1,
                   .add_eos = -1,
                   .space_prefix = -1};
  add_token(&p, "[UNK]", MR_TOKEN_UNKNOWN, 0);
  add_token(&p, "[CLS]", MR_TOKEN_CONTROL, 0);
  add_token(&p, "[SEP]", MR_TOKEN_CONTROL, 0);
  add_token(&p, MR_SPACE_MARK "a", MR_TOKEN_NORMAL, 0);
  return p;
}

static void failing_memory(void **state) {
  (void)state;
  vocab_parts parts[] = {bpe_parts(), spm_parts(), bert_parts()};
  for (int k = 0; k < 3; k++) {
    build b = {0};
    build_parts(&b, &parts[k]);
    const char *path = build_file(&b);
    mr_gguf *g = NULL;
    mr_err first = MR_ERR_INIT;
    assert_int_equal(mr_gguf_open(&g, path, &first), MR_OK);
    int64_t live = mr_mem_live();
    bool more = true;
    for (int64_t n = 0; more; n++) {
      mr_err err = MR_ERR_INIT;
      mr_vocab *v = NULL;
      mr_mem_fail_after(n);
      mr_code c = mr_vocab_open(&v, g, &err);
      more = starved(n);
      assert_true(c == MR_OK || c == MR_E_NOMEM);
      assert_true((c == MR_OK) == (v != NULL));
      mr_vocab_close(v);
      assert_int_equal(mr_mem_live(), live);
    }
    mr_gguf_close(g);
    build_remove(path);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(tables_of_bpe), cmocka_unit_test(tables_of_spm),
      cmocka_unit_test(ends),          cmocka_unit_test(broken_bpe),
      cmocka_unit_test(broken_ids),    cmocka_unit_test(broken_spm),
      cmocka_unit_test(odd),           cmocka_unit_test(failing_memory),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
