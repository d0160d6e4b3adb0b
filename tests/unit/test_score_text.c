#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include <math.h>

#include "io/mem.h"
#include "jobs/score_opts.h"
#include "jobs/score_text.h"

static mr_str str(const char *s) {
  return (mr_str){s, strlen(s)};
}

static void normal(const char *s, unsigned ignore, const char *want) {
  mr_text t = {0};
  mr_score_normalize(str(s), ignore, &t);
  assert_string_equal(t.data ? t.data : "", want);
  mr_text_free(&t);
}

static void what_is_passed_over(void **state) {
  (void)state;
  normal(" A  b\n", MR_IGNORE_NOTHING, " A  b\n");
  normal(" A \t b\n\xC2\xA0", MR_IGNORE_SPACE, "A b");
  normal(" \n", MR_IGNORE_SPACE, "");
  normal("ÄÖ Z", MR_IGNORE_CASE, "äö z");
  normal("a.b, (c)! d\xE2\x80\x94x", MR_IGNORE_PUNCTUATION, "ab c d\xE2\x80\x94x");
  normal("a1b22", MR_IGNORE_NUMBERS, "ab");
  normal("The cat, a dog and an ant; them anthem", MR_IGNORE_ARTICLES | MR_IGNORE_SPACE,
         "cat, dog and ant; them anthem");
  normal("It's the-end", MR_IGNORE_ARTICLES, "It's  -end");
  normal(" The  U.S. ",
         MR_IGNORE_SPACE | MR_IGNORE_CASE | MR_IGNORE_PUNCTUATION | MR_IGNORE_ARTICLES, "us");
}

static void near(double x, double want) {
  if (fabs(x - want) > 1e-9)
    print_error("%.12g is not %.12g\n", x, want);
  assert_true(fabs(x - want) <= 1e-9);
}

static void words_in_common(void **state) {
  (void)state;
  near(mr_score_f1(str("The cat sat on the mat"), str("a cat on a mat")), 6.0 / 7);
  near(mr_score_f1(str("Paris!"), str("paris")), 1);
  near(mr_score_f1(str("b b b a"), str("b b c")), 4.0 / 6); /* "a" is an article */
  near(mr_score_f1(str(""), str("x")), 0);
  near(mr_score_f1(str("the"), str("")), 1); /* both are empty */
  near(mr_score_f1(str("x"), str("y")), 0);
}

static void the_longest_common_subsequence(void **state) {
  (void)state;
  near(mr_score_rouge_l(str("The quick brown dog jumps on the log."),
                        str("The quick brown fox jumps over the lazy dog")),
       10.0 / 17);
  near(mr_score_rouge_l(str("police killed the gunman"), str("police kill the gunman")), 0.75);
  near(mr_score_rouge_l(str("the gunman kill police"), str("police kill the gunman")), 0.5);
  near(mr_score_rouge_l(str(""), str("")), 0);
  near(mr_score_rouge_l(str("Größe, 5"), str("GRÖSSE größe 5")), 0.8);
  mr_text a = {0};
  for (int i = 0; i < 20000; i++)
    mr_text_adds(&a, "w ");
  mr_str s = {a.data, a.len};
  assert_true(mr_score_rouge_l(s, s) == -2); /* beyond the limit, and told */
  mr_text_free(&a);
}

static bool same(const char *a, const char *b) {
  return mr_score_same_number(str(a), str(b));
}

static void numbers(void **state) {
  (void)state;
  assert_true(same("so 6 * 7 = 42.", "steps... #### 42"));
  assert_true(same("first 5\n#### 1,234\nThat was all of 7.", "1234"));
  assert_true(same("$1,234.50", "1234.5"));
  assert_true(same("x = -3", "-3"));
  assert_true(same("x = \xE2\x88\x92"
                   "3",
                   "-3"));
  assert_true(same("-$5", "-5"));
  assert_true(same("pages 3-5", "5")); /* a dash */
  assert_true(same("caf\xC3\xA9-5", "5"));
  assert_true(same("\xE4\xB8\x96-5", "5"));
  assert_true(same("\xE2\x82\xAA-5", "-5")); /* a sign of money, whose last byte looks like a letter
                                              */
  assert_true(same("0.0500", ".05"));
  assert_true(same("12e2 units", "1200"));
  assert_true(same("0", "-0.0"));
  assert_true(same("007", "7"));
  assert_true(same("1, 2, 3", "3"));
  assert_true(same("1,2,3", "3"));
  assert_true(same("12345678901234567890123", "12345678901234567890123.0"));
  assert_false(same("12345678901234567890123", "12345678901234567890124"));
  assert_false(same("42", "-42"));
  assert_false(same("4.2", "42"));
  assert_false(same("none", "none"));
  assert_false(same("", "0"));
  assert_false(same("1e999999", "1")); /* not an exponent: ends on 999999 */
  assert_true(same("1e999999", "999999"));
  assert_true(same("#### none, 3 of 8", "3")); /* the first behind the mark */
}

static void contained(void **state) {
  (void)state;
  assert_true(mr_score_contains(str("abc"), str("bc")));
  assert_false(mr_score_contains(str("abc"), str("cb")));
  assert_false(mr_score_contains(str("abc"), str("")));
  assert_true(mr_score_contains(str(""), str("")));
}

static void labels(void **state) {
  (void)state;
  assert_int_equal(mr_score_label(str("A")), 0);
  assert_int_equal(mr_score_label(str("d")), 3);
  assert_int_equal(mr_score_label(str("2")), 2);
  assert_int_equal(mr_score_label(str("-1")), -1);
  assert_int_equal(mr_score_label(str("AB")), -1);
  assert_int_equal(mr_score_label(str("")), -1);
  assert_int_equal(mr_score_label(str("99999999999")), -1);
}

/* Memory that runs out is told, in every place. */
static void memory(void **state) {
  (void)state;
  int64_t live = mr_mem_live();
  double f = -1, r = -1;
  for (int n = 0; n < 100 && (f < 0 || r < 0); n++) {
    mr_mem_fail_after(n);
    f = mr_score_f1(str("the cat sat"), str("a cat"));
    mr_mem_fail_after(n);
    r = mr_score_rouge_l(str("the cat sat"), str("a cat"));
    mr_mem_fail_after(-1);
    assert_true(f == -1 || fabs(f - 2.0 / 3) < 1e-9);
    assert_true(r == -1 || fabs(r - 0.4) < 1e-9);
    assert_int_equal(mr_mem_live(), live);
  }
  assert_true(f > 0 && r > 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(what_is_passed_over),
                                     cmocka_unit_test(words_in_common),
                                     cmocka_unit_test(the_longest_common_subsequence),
                                     cmocka_unit_test(numbers),
                                     cmocka_unit_test(contained),
                                     cmocka_unit_test(labels),
                                     cmocka_unit_test(memory)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
