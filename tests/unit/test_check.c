#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "io/mem.h"
#include "jobs/check.h"
#include "jobs/commit.h"
#include "temp.h"

enum { ROWS = 600 };

/* A finished output, with `id_of` of each row in the lines' form. */
static void make_lines(mr_paths *p, mr_output_format format, const char *ending,
                       int (*id_of)(int row), const char *form) {
  mr_err e = MR_ERR_INIT;
  mr_commit *c;
  mr_job_identity id = {.rows = ROWS};
  mr_manifest m = {.n_files = 0};
  char base[256], output[300];
  snprintf(base, sizeof base, "%s", temp_path("o"));
  snprintf(output, sizeof output, "%s%s", base, ending);
  mr_hash_hex("in", 2, id.input_digest);
  mr_hash_hex("m", 1, id.model_digest);
  snprintf(id.numerics, sizeof id.numerics, "test");
  assert_int_equal(mr_identity_set_options(&id, json_object(), &e), MR_OK);
  assert_int_equal(mr_paths_make(p, base, output, &e), MR_OK);
  assert_int_equal(mr_commit_open(&c, p, &e), MR_OK);
  assert_int_equal(mr_commit_bind(c, &id, &e), MR_OK);
  for (int row = 0; row < ROWS; row++) {
    char line[256];
    int n = snprintf(line, sizeof line, form, id_of(row));
    mr_line_info info = {(uint64_t)row, MR_LINE_RESULT, 2, 1};
    assert_int_equal(mr_commit_add(c, &info, line, (size_t)n, &e), MR_OK);
  }
  assert_int_equal(mr_commit_assemble(c, format, 3, false, &m, &e), MR_OK);
  assert_int_equal(mr_commit_publish(c, &m, &e), MR_OK);
  mr_commit_close(c);
  mr_manifest_free(&m);
  mr_identity_free(&id);
}

#define USAGE "\"usage\":{\"prompt_tokens\":2,\"completion_tokens\":1}"

static void make_output(mr_paths *p, mr_output_format format, const char *ending,
                        int (*id_of)(int row)) {
  make_lines(p, format, ending, id_of, "{\"id\":\"r%d\"," USAGE "}\n");
}

static void remove_output(mr_paths *p) {
  unlink(p->final[MR_FINAL_OUTPUT]);
  unlink(p->final[MR_FINAL_MANIFEST]);
  mr_paths_free(p);
}

static mr_code look(const mr_paths *p, mr_check *c, mr_err *e) {
  mr_manifest m;
  mr_code rc = mr_manifest_load(&m, p->final[MR_FINAL_MANIFEST], e);
  if (rc)
    return rc;
  rc = mr_check_finished(c, p, &m, e);
  mr_manifest_free(&m);
  return rc;
}

static int own(int row) {
  return row;
}

static int repeated(int row) {
  return row >= 500 ? row - 500 : row == 40 ? 39 : row;
}

static const struct {
  mr_output_format format;
  const char *ending;
} formats[] = {{MR_OUT_ZST, ".jsonl.zst"}, {MR_OUT_PLAIN, ".jsonl"}, {MR_OUT_GZ, ".jsonl.gz"}};

static void a_whole_output_is_whole(void **state) {
  (void)state;
  for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
    mr_paths p;
    mr_err e = MR_ERR_INIT;
    mr_check c = {.rows = 0};
    make_output(&p, formats[i].format, formats[i].ending, own);
    assert_int_equal(look(&p, &c, &e), MR_OK);
    assert_int_equal(c.problems, 0);
    assert_int_equal(c.rows_ok, ROWS);
    assert_int_equal(c.prompt_tokens, 2 * ROWS);
    mr_check_free(&c);
    remove_output(&p);
  }
}

static void an_id_that_comes_twice_is_found(void **state) {
  (void)state;
  for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
    mr_paths p;
    mr_err e = MR_ERR_INIT;
    mr_check c = {.rows = 0};
    make_output(&p, formats[i].format, formats[i].ending, repeated);
    assert_int_equal(look(&p, &c, &e), MR_OK);
    assert_int_equal(c.problems, 100);
    assert_non_null(strstr(c.words.data, ":41: its id is that of line 40\n"));
    assert_non_null(strstr(c.words.data, ":501: its id is that of line 1\n"));
    assert_null(strstr(c.words.data, ":600:")); /* only the first ones are told */
    mr_check_free(&c);
    remove_output(&p);
  }
}

static void ids_are_those_of_the_rows(void **state) {
  (void)state;
  static const char *const forms[] = {
      "{\"id\":%d," USAGE "}\n", /* a number comes back as one */
      "{\"id\":\"a%d\",\"custom_id\":5,\"response\":{\"body\":{}}," USAGE "}\n", /* fields of rows
                                                                                  */
      "{\"id\":\"same\",\"custom_id\":\"r%d\",\"response\":{\"body\":{" USAGE "}}}\n"};
  for (size_t i = 0; i < 2 * sizeof forms / sizeof *forms; i++) {
    mr_paths p;
    mr_err e = MR_ERR_INIT;
    mr_check c = {.rows = 0};
    make_lines(&p, MR_OUT_PLAIN, ".jsonl", i % 2 ? repeated : own, forms[i / 2]);
    assert_int_equal(look(&p, &c, &e), MR_OK);
    assert_int_equal(c.problems, i % 2 ? 100 : 0);
    assert_int_equal(c.prompt_tokens, 2 * ROWS);
    mr_check_free(&c);
    remove_output(&p);
  }
}

static void every_damaged_byte_is_found(void **state) {
  (void)state;
  mr_paths p;
  make_output(&p, MR_OUT_ZST, ".jsonl.zst", own);
  FILE *f = fopen(p.final[MR_FINAL_OUTPUT], "r+b");
  fseek(f, 0, SEEK_END);
  long size = ftell(f);
  for (long at = 0; at < size; at += 1 + size / 150) {
    mr_err e = MR_ERR_INIT;
    mr_check c = {.rows = 0};
    fseek(f, at, SEEK_SET);
    int byte = fgetc(f);
    fseek(f, at, SEEK_SET);
    fputc(byte ^ 1 << at % 8, f);
    fflush(f);
    assert_int_equal(look(&p, &c, &e), MR_OK);
    assert_true(c.problems > 0);
    mr_check_free(&c);
    fseek(f, at, SEEK_SET);
    fputc(byte, f);
  }
  fclose(f);
  remove_output(&p);
}

static void out_of_memory_is_no_finding(void **state) {
  (void)state;
  mr_paths p;
  make_output(&p, MR_OUT_ZST, ".jsonl.zst", repeated);
  int64_t live = mr_mem_live();
  int failed = 0;
  for (int n = 0;; n += 1 + n / 50, failed++) {
    mr_err e = MR_ERR_INIT;
    mr_check c = {.rows = 0};
    mr_mem_fail_after(n);
    mr_code rc = look(&p, &c, &e);
    mr_mem_fail_after(-1);
    if (rc == MR_OK)
      assert_int_equal(c.problems, 100);
    mr_check_free(&c);
    assert_int_equal(mr_mem_live(), live);
    if (rc == MR_OK)
      break;
    assert_int_equal(rc, MR_E_NOMEM);
  }
  assert_true(failed > 60);
  remove_output(&p);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_whole_output_is_whole),
      cmocka_unit_test(an_id_that_comes_twice_is_found),
      cmocka_unit_test(ids_are_those_of_the_rows),
      cmocka_unit_test(every_damaged_byte_is_found),
      cmocka_unit_test(out_of_memory_is_no_finding),
  };
  return cmocka_run_group_tests(tests, temp_begin, temp_end);
}
