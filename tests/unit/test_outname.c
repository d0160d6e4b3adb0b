#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include <sys/stat.h>

#include "io/mem.h"
#include "jobs/outname.h"
#include "temp.h"

static mr_job job;
static mr_err err;

static mr_code set(const char *output) {
  mr_job_free(&job);
  mr_job_init(&job);
  mr_err_clear(&err);
  job.output = mr_mem_copy(output, strlen(output));
  return mr_outname_set(&job, &err);
}

static void is(const char *output, const char *base, mr_output_format f, const char *name) {
  assert_int_equal(set(output), MR_OK);
  assert_string_equal(job.base, base);
  assert_int_equal(job.format, f);
  assert_string_equal(job.output, name ? name : output);
}

static void names(void **state) {
  (void)state;
  is("a/out.jsonl.zst", "a/out", MR_OUT_ZST, NULL);
  is("out.jsonl.gz", "out", MR_OUT_GZ, NULL);
  is("out.jsonl", "out", MR_OUT_PLAIN, NULL);
  is("out", "out", MR_OUT_ZST, "out.jsonl.zst");
  is("out.v1", "out.v1", MR_OUT_ZST, "out.v1.jsonl.zst");
  is("d/.jsonl", "d/.jsonl", MR_OUT_ZST, "d/.jsonl.jsonl.zst"); /* an ending alone is no ending */
  assert_int_equal(set("-"), MR_OK);
  assert_int_equal(job.format, MR_OUT_STDOUT);
  assert_null(job.base);
}

static void others(void **state) {
  (void)state;
  static const char *const bad[] = {"",      "o.json", "o.zst", "o.jsonl.xz", "o.csv",
                                    "o.txt", "o.gz",   "dir/",  "o.jsonl.bz2"};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    assert_int_equal(set(bad[i]), MR_E_USAGE);
    assert_true(err.text[0]);
  }
  assert_int_equal(set(temp_dir), MR_E_USAGE);
  assert_non_null(strstr(err.text, "directory"));
  assert_int_equal(mkfifo(temp_path("fifo"), 0600), 0);
  assert_int_equal(set(temp_path("fifo")), MR_E_CANTCREATE);
  temp_text("file", "x");
  assert_int_equal(set(temp_path("file")), MR_OK); /* OUT; the file itself is not touched */
}

static mr_code check(const char *output, const char *input) {
  char *inputs[] = {(char *)(uintptr_t)input};
  assert_int_equal(set(output), MR_OK);
  job.inputs = inputs;
  job.n_inputs = 1;
  mr_code rc = mr_job_check_output(&job, &err);
  job.inputs = NULL;
  job.n_inputs = 0;
  return rc;
}

static void not_an_input(void **state) {
  (void)state;
  char in[300], link[300], dir[300], inside[320];
  snprintf(in, sizeof in, "%s", temp_text("in.jsonl", "{}\n"));
  snprintf(dir, sizeof dir, "%s", temp_path("d"));
  snprintf(inside, sizeof inside, "%s/x.jsonl", dir);
  snprintf(link, sizeof link, "%s", temp_path("link.jsonl"));
  assert_int_equal(mkdir(dir, 0700), 0);
  assert_int_equal(symlink(in, link), 0);
  assert_int_equal(check(temp_path("out.jsonl"), in), MR_OK);
  assert_int_equal(check(in, in), MR_E_USAGE);
  assert_int_equal(check(link, in), MR_E_USAGE); /* by another name */
  temp_text("d/x.jsonl", "{}\n");
  char out[330];
  snprintf(out, sizeof out, "%s/out.jsonl", dir);
  assert_int_equal(check(out, dir), MR_E_USAGE); /* it would be read next time */
  assert_non_null(strstr(err.text, "directory"));
  assert_int_equal(check(temp_path("out.jsonl"), dir), MR_OK);
  snprintf(inside, sizeof inside, "%s", temp_text("o.errors.jsonl", "{}\n"));
  assert_int_equal(check(temp_path("o.jsonl"), inside), MR_E_USAGE); /* OUT's other files */
  assert_int_equal(check("-", in), MR_OK);
  assert_int_equal(check(temp_path("out.jsonl"), temp_path("nothing")), MR_E_NOINPUT);
}

static void memory(void **state) {
  (void)state;
  mr_code rc = MR_E_NOMEM;
  for (int n = 0; n < 20 && rc; n++) {
    mr_job_free(&job);
    mr_job_init(&job);
    mr_err_clear(&err);
    job.output = mr_mem_copy("out", 3);
    mr_mem_fail_after(n);
    rc = mr_outname_set(&job, &err);
    mr_mem_fail_after(-1);
    assert_true(rc == MR_OK || rc == MR_E_NOMEM);
    assert_non_null(job.output);
  }
  assert_string_equal(job.output, "out.jsonl.zst");
  mr_job_free(&job);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(names), cmocka_unit_test(others),
                                     cmocka_unit_test(not_an_input), cmocka_unit_test(memory)};
  return cmocka_run_group_tests(tests, temp_begin, temp_end);
}
