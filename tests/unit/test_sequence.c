/* One choice: tokens become text, and what ends it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "io/mem.h"
#include "src/sequence.h"
#include "tests/unit/tiny_gguf.h"

static mr_vocab *vocab;
static mr_kv *kv;
static const int32_t ends[] = {TINY_EOS, 'z'};

static int setup(void **state) {
  (void)state;
  char path[64];
  mr_gguf *g;
  mr_err e = MR_ERR_INIT;
  snprintf(path, sizeof path, "/tmp/mr_test_sequence_%d.gguf", (int)getpid());
  if (!tiny_gguf_write(path, -1) || mr_gguf_open(&g, path, &e))
    return -1;
  mr_code rc = mr_vocab_open(&vocab, g, &e);
  mr_gguf_close(g);
  unlink(path);
  const mr_config c = {.n_layers = 1, .n_kv_heads = 1, .n_heads = 1, .head_dim = 32};
  return rc || mr_kv_open(&kv, &c, MR_KV_F32, 1, &e);
}

static int teardown(void **state) {
  (void)state;
  mr_vocab_close(vocab);
  mr_kv_close(kv);
  return (int)mr_mem_live();
}

/* Feeds bytes and ids until the sequence is done; returns what it became. */
static mr_choice feed(const mr_sampling *p, const mr_vocab *v, const int32_t *ids, int n,
                      int max_new) {
  mr_sequence s;
  mr_choice out;
  mr_err e = MR_ERR_INIT;
  assert_int_equal(mr_sequence_init(&s, p, v, kv, 64, &e), MR_OK);
  for (int i = 0; i < n && !s.done; i++) {
    s.picked = (mr_sampled){.id = ids[i], .logprob = (float)-i};
    assert_int_equal(mr_sequence_push(&s, ends, 2, max_new, &e), MR_OK);
  }
  assert_true(s.done);
  mr_sequence_take(&s, &out);
  mr_mem_free(s.kv.pages);
  mr_mem_free(s.kv.at);
  return out;
}

static mr_choice feed_text(const mr_sampling *p, const char *text, int max_new) {
  int32_t ids[64];
  int n = (int)strlen(text);
  for (int i = 0; i < n; i++)
    ids[i] = (uint8_t)text[i];
  return feed(p, vocab, ids, n, max_new);
}

static mr_sampling greedy(void) {
  mr_sampling p = mr_sampling_default;
  p.logprobs = 0;
  return p;
}

static void check(mr_choice c, const char *text, int n_ids, int n_sampled, mr_finish why,
                  int32_t stop_id) {
  assert_string_equal(c.text, text);
  assert_int_equal(c.text_len, strlen(text));
  assert_int_equal(c.n_ids, n_ids);
  assert_int_equal(c.n_sampled, n_sampled);
  assert_int_equal(c.finish, why);
  assert_int_equal(c.stop_id, stop_id);
  for (int i = 0; i < n_ids; i++)
    assert_true(c.logprobs[i].logprob == (float)-i && (size_t)c.offsets[i] <= c.text_len);
  mr_choice_free(&c);
}

static void ends_by_token(void **state) {
  (void)state;
  mr_sampling p = greedy();
  int32_t ids[] = {'a', 'b', TINY_EOS, 'c'}, stop[] = {'z'};
  check(feed(&p, vocab, ids, 4, 9), "ab", 2, 3, MR_FINISH_STOP, TINY_EOS);
  check(feed_text(&p, "abz", 9), "ab", 2, 3, MR_FINISH_STOP, 'z');
  check(feed_text(&p, "abc", 2), "ab", 2, 2, MR_FINISH_LENGTH, -1);
  check(feed_text(&p, "z", 5), "", 0, 1, MR_FINISH_STOP, 'z');
  p.stop_ids = stop;
  p.n_stop_ids = 1;
  p.include_stop = true; /* keeps a stop token that was asked for, not the end of a text */
  check(feed_text(&p, "abz", 9), "abz", 3, 3, MR_FINISH_STOP, 'z');
  check(feed(&p, vocab, ids, 4, 9), "ab", 2, 3, MR_FINISH_STOP, TINY_EOS);
  p.include_stop = false;
  p.min_tokens = 3;
  check(feed_text(&p, "azbz", 9), "azb", 3, 4, MR_FINISH_STOP, 'z');
}

static void ends_by_string(void **state) {
  (void)state;
  char *stops[] = {"cde", "", "bcd", "\n\n"};
  mr_sampling p = greedy();
  p.stop = stops;
  p.n_stop = 4;
  check(feed_text(&p, "abcde", 9), "a", 4, 4, MR_FINISH_STOP, -1); /* whichever is complete first */
  check(feed_text(&p, "bcbcd", 9), "bc", 5, 5, MR_FINISH_STOP, -1);
  check(feed_text(&p, "x\n\ny", 9), "x", 3, 3, MR_FINISH_STOP, -1);
  check(feed_text(&p, "bcd", 3), "", 3, 3, MR_FINISH_STOP, -1); /* rather than by length */
  p.include_stop = true;
  check(feed_text(&p, "abcd", 9), "abcd", 4, 4, MR_FINISH_STOP, -1);
  p.include_stop = false;
  p.min_tokens = 4; /* a string that begins before is not one */
  check(feed_text(&p, "bcdebcdx", 9), "bcde", 7, 7, MR_FINISH_STOP, -1);
}

/* Characters appear when they are whole, or are sure to be none. */
static void characters(void **state) {
  (void)state;
  mr_sampling p = greedy();
  char *stops[] = {"\xE2\x82\xAC"};
  check(feed_text(&p, "a\xE2\x82\xAC", 4), "a\xE2\x82\xAC", 4, 4, MR_FINISH_LENGTH, -1);
  check(feed_text(&p, "a\xE2\x82", 3), "a\xEF\xBF\xBD", 3, 3, MR_FINISH_LENGTH, -1);
  check(feed_text(&p,
                  "\xE2"
                  "a",
                  2),
        "\xEF\xBF\xBD"
        "a",
        2, 2, MR_FINISH_LENGTH, -1);
  check(feed_text(&p, "\xE2\x82z", 9), "\xEF\xBF\xBD", 2, 3, MR_FINISH_STOP, 'z');
  p.stop = stops;
  p.n_stop = 1;
  check(feed_text(&p, "a\xE2\x82\xAC", 9), "a", 4, 4, MR_FINISH_STOP, -1);
}

static void without_vocabulary(void **state) {
  (void)state;
  mr_sampling p = greedy();
  int32_t ids[] = {5, 6, 7};
  mr_choice c = feed(&p, NULL, ids, 3, 3);
  assert_null(c.text);
  assert_null(c.offsets);
  assert_int_equal(c.n_ids, 3);
  assert_non_null(c.logprobs);
  mr_choice_free(&c);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(ends_by_token),
      cmocka_unit_test(ends_by_string),
      cmocka_unit_test(characters),
      cmocka_unit_test(without_vocabulary),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
