#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "io/mem.h"
#include "io/sys.h"
#include "io/text.h"
#include "src/pretok.h"

static mr_pretok *open_named(const char *name) {
  mr_err err = MR_ERR_INIT;
  mr_pretok *p = NULL;
  assert_int_equal(mr_pretok_open(&p, name, strlen(name), &err), MR_OK);
  return p;
}

/* The words of text, joined by '|'. */
static void expect(const char *name, const char *text, size_t len, const char *want) {
  mr_err err = MR_ERR_INIT;
  mr_pretok *p = open_named(name);
  mr_cuts c = {0};
  mr_text got = {0};
  assert_int_equal(mr_pretok_cut(p, text, len, &c, &err), MR_OK);
  for (size_t i = 0, from = 0; i < c.n; from = c.end[i++]) {
    assert_true(c.end[i] > from);
    if (i)
      mr_text_addc(&got, '|');
    mr_text_add(&got, text + from, c.end[i] - from);
  }
  assert_true(c.n == 0 || c.end[c.n - 1] == len);
  assert_string_equal(got.data ? got.data : "", want);
  mr_text_free(&got);
  mr_cuts_free(&c);
  mr_pretok_close(p);
}

#define CUT(name, text, want) expect(name, text, sizeof text - 1, want)

static void cuts(void **state) {
  (void)state;
  CUT("gpt-2", "", "");
  CUT("gpt-2", "I'm  here, 2024's", "I|'m| | here|,| 2024|'s");
  CUT("gpt-2", "a \t\nb  ", "a| \t|\n|b|  ");
  CUT("gpt-2", "HE'S", "HE|'|S");
  CUT("llama-bpe", "HE'S 12345\r\n\r\n  x", "HE|'S| |123|45|\r\n\r\n| | x");
  CUT("llama-bpe", "(foo) !!\n\nx", "(foo|)| !!\n\n|x");
  CUT("qwen2", "x123", "x|1|2|3");
  CUT("smollm", "ab 12", "ab| |1|2");
  CUT("falcon", "a+b=12345`", "a|+|b|=|123|45|`");
  CUT("default", "a+b=1234", "a|+|b|=|123|4");
  CUT("deepseek-llm", "Hi 12\n\xe4\xbd\xa0\xe5\xa5\xbd!  ",
      "Hi| |12|\n|\xe4\xbd\xa0\xe5\xa5\xbd|!|  ");
  CUT("deepseek-coder", "if x==10:", "if| x|==|1|0|:");
  CUT("deepseek-v3", "1234 _abc(d", "123|4| _|abc|(d");
  CUT("tekken", "camelCase ABCd 12", "camel|Case| ABCd| |1|2");
  CUT("gpt-4o", "don't HELLOworld 1234", "don't| HELLOworld| |123|4");
  CUT("bloom", "a b, c", "a| b|,| c");
  CUT("viking", "ab12 c", "ab|1|2| c");
  CUT("chameleon", "a    b\n1.", "a|    |b|\n|1|.");
}

/* White space is that of Unicode: U+0085 and U+3000 are, U+180E and U+200B are not. */
static void spaces(void **state) {
  (void)state;
  CUT("gpt-2",
      "a\xc2\x85\xe3\x80\x80"
      "b",
      "a|\xc2\x85|\xe3\x80\x80|b");
  CUT("gpt-2", "a \xe1\xa0\x8e\xe2\x80\x8b", "a| \xe1\xa0\x8e\xe2\x80\x8b");
}

static void nul_is_text(void **state) {
  (void)state;
  mr_err err = MR_ERR_INIT;
  mr_pretok *p = open_named("gpt-2");
  mr_cuts c = {0};
  assert_int_equal(mr_pretok_cut(p, "a\0b", 3, &c, &err), MR_OK);
  assert_int_equal(c.n, 3);
  mr_cuts_free(&c);
  mr_pretok_close(p);
}

static void names(void **state) {
  (void)state;
  static const char *const known[] = {"",           "llama3",   "dbrx",   "glm4",      "stablelm2",
                                      "qwen35",     "olmo",     "jais",   "mpt",       "refact",
                                      "command-r",  "exaone",   "llama4", "poro-chat", "seed-coder",
                                      "bailingmoe", "starcoder"};
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    mr_pretok_close(open_named(known[i]));
  static const char *const wrong[] = {"martian-pre", "llama3 llama-v3", "gpt", " "};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    mr_err err = MR_ERR_INIT;
    mr_pretok *p = NULL;
    assert_int_equal(mr_pretok_open(&p, wrong[i], strlen(wrong[i]), &err), MR_E_DATA);
    assert_null(p);
    assert_non_null(strstr(err.text, wrong[i]));
  }
}

static void properties(void **state) {
  (void)state;
  mr_pretok *a = open_named("llama-bpe"), *b = open_named("qwen2");
  assert_true(mr_pretok_whole_words(a) && mr_pretok_adds_bos(a));
  assert_false(mr_pretok_whole_words(b) || mr_pretok_adds_bos(b));
  mr_pretok_close(a);
  mr_pretok_close(b);
}

/* Long runs must not make the patterns quadratic. */
static void long_runs(void **state) {
  (void)state;
  static const char *const kinds[] = {"gpt-2",  "llama-bpe",    "qwen2",
                                      "smollm", "deepseek-llm", "deepseek-v3",
                                      "falcon", "tekken",       "gpt-4o"};
  static const char *const units[] = {" ", "\n", "a", "1", "!", "\xe4\xbd\xa0", " \t"};
  size_t n = 300000;
  char *text = malloc(n + 4);
  double start = mr_sys_seconds();
  for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
    mr_pretok *p = open_named(kinds[k]);
    mr_cuts c = {0};
    for (size_t u = 0; u < sizeof units / sizeof *units; u++) {
      size_t w = strlen(units[u]), len = n / w * w;
      mr_err err = MR_ERR_INIT;
      for (size_t i = 0; i < len; i++)
        text[i] = units[u][i % w];
      text[len] = 'x';
      assert_int_equal(mr_pretok_cut(p, text, len + 1, &c, &err), MR_OK);
      assert_int_equal(c.end[c.n - 1], len + 1);
    }
    mr_cuts_free(&c);
    mr_pretok_close(p);
  }
  assert_true(mr_sys_seconds() - start < 30);
  free(text);
}

static void failing_memory(void **state) {
  (void)state;
  int64_t live = mr_mem_live();
  bool done = false;
  for (int64_t n = 0; !done; n++) {
    mr_err err = MR_ERR_INIT;
    mr_pretok *p = NULL;
    mr_cuts c = {0};
    mr_mem_fail_after(n);
    mr_code r = mr_pretok_open(&p, "smollm", 6, &err);
    if (!r)
      r = mr_pretok_cut(p, "a b 12", 6, &c, &err);
    mr_mem_fail_after(-1);
    assert_true(r == MR_OK || r == MR_E_NOMEM);
    done = r == MR_OK;
    mr_cuts_free(&c);
    mr_pretok_close(p);
    assert_int_equal(mr_mem_live(), live);
    assert_true(n < 1000);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(cuts),           cmocka_unit_test(spaces),     cmocka_unit_test(nul_is_text),
      cmocka_unit_test(names),          cmocka_unit_test(properties), cmocka_unit_test(long_runs),
      cmocka_unit_test(failing_memory),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
