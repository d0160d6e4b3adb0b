#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include <errno.h>

#include "io/mem.h"
#include "io/sys.h"
#include "jobs/plan.h"
#include "temp.h"

static mr_plan_record record(int i, int32_t *prompt, int32_t *cont, int *cont_len, char *json) {
  snprintf(json, 64, "{\"id\":\"r%d\"}", i);
  for (int k = 0; k < i % 7; k++)
    prompt[k] = i * 10 + k;
  cont[0] = i;
  cont[1] = i + 1;
  cont[2] = i + 2;
  cont_len[0] = 1;
  cont_len[1] = 2;
  return (mr_plan_record){.e = {.line = (uint64_t)i + 1,
                                .n_prompt = i % 7,
                                .n_out = 3,
                                .kind = i % 5 == 4 ? MR_ROW_BAD
                                        : i % 3    ? MR_ROW_SCORE
                                                   : MR_ROW_PLAIN},
                          .json = json,
                          .json_len = strlen(json),
                          .prompt = prompt,
                          .cont = cont,
                          .cont_len = cont_len,
                          .n_cont = i % 3 ? 2 : 0};
}

static mr_code write_plan(int rows, mr_err *e) {
  mr_plan_writer *w;
  mr_code rc = mr_plan_create(&w, temp_dir, e);
  if (rc != MR_OK)
    return rc;
  rc = mr_plan_add_file(w, "a.jsonl", e);
  if (rc == MR_OK)
    rc = mr_plan_add_file(w, "", e);
  for (int i = 0; i < rows && rc == MR_OK; i++) {
    int32_t prompt[8], cont[3];
    int cont_len[2];
    char json[64];
    const mr_plan_record rec = record(i, prompt, cont, cont_len, json);
    rc = mr_plan_append(w, &rec, e);
  }
  mr_plan_set_digest(w, "0123456789abcdef0123456789abcdef");
  if (rc == MR_OK)
    return mr_plan_finish(w, e);
  mr_plan_abandon(w);
  return rc;
}

static void rows_come_back(void **state) {
  (void)state;
  enum { ROWS = 5000 };
  mr_err e = MR_ERR_INIT;
  mr_plan *p;
  assert_int_equal(write_plan(ROWS, &e), MR_OK);
  assert_int_equal(mr_plan_open(&p, temp_dir, &e), MR_OK);
  assert_int_equal(mr_plan_rows(p), ROWS);
  assert_int_equal(mr_plan_bad_rows(p), ROWS / 5);
  assert_int_equal(mr_plan_output_tokens_max(p), 3 * (ROWS - ROWS / 5));
  assert_int_equal(mr_plan_n_files(p), 2);
  assert_string_equal(mr_plan_files(p)[0], "a.jsonl");
  assert_string_equal(mr_plan_files(p)[1], "");
  assert_string_equal(mr_plan_digest(p), "0123456789abcdef0123456789abcdef");
  for (int i = ROWS - 1; i >= 0; i -= 13) {
    int32_t prompt[8], cont[3];
    int cont_len[2];
    char json[64];
    const mr_plan_record want = record(i, prompt, cont, cont_len, json);
    mr_plan_record got;
    assert_int_equal(mr_plan_read(p, (uint64_t)i, &got, &e), MR_OK);
    assert_int_equal(got.row, i);
    assert_string_equal(got.json, json);
    assert_int_equal(got.e.line, i + 1);
    assert_int_equal(got.e.n_prompt, want.e.n_prompt);
    assert_memory_equal(got.prompt, prompt, sizeof *prompt * (size_t)want.e.n_prompt);
    assert_int_equal(got.n_cont, want.n_cont);
    if (want.n_cont)
      assert_memory_equal(got.cont, cont, sizeof cont);
    mr_plan_record_free(&got);
  }
  mr_plan_close(p);
}

static void an_empty_plan(void **state) {
  (void)state;
  mr_err e = MR_ERR_INIT;
  mr_plan *p;
  assert_int_equal(write_plan(0, &e), MR_OK);
  assert_int_equal(mr_plan_open(&p, temp_dir, &e), MR_OK);
  assert_int_equal(mr_plan_rows(p), 0);
  mr_plan_close(p);
}

/* Opens the plan and reads every row: the first code that is not MR_OK. */
static mr_code read_all(void) {
  mr_err e = MR_ERR_INIT;
  mr_plan *p;
  mr_code rc = mr_plan_open(&p, temp_dir, &e);
  if (rc != MR_OK)
    return rc;
  for (uint64_t i = 0; i < mr_plan_rows(p) && rc == MR_OK; i++) {
    mr_plan_record rec;
    rc = mr_plan_read(p, i, &rec, &e);
    if (rc == MR_OK)
      mr_plan_record_free(&rec);
  }
  mr_plan_close(p);
  return rc;
}

static void every_flipped_byte_is_found(void **state) {
  (void)state;
  static const char *const names[] = {"plan.head", "plan.index", "plan.data"};
  mr_err e = MR_ERR_INIT;
  assert_int_equal(write_plan(12, &e), MR_OK);
  assert_int_equal(read_all(), MR_OK);
  for (int n = 0; n < 3; n++) {
    FILE *f = fopen(temp_path(names[n]), "r+b");
    assert_non_null(f);
    fseek(f, 0, SEEK_END);
    long size = ftell(f);
    for (long at = 0; at < size; at++) {
      fseek(f, at, SEEK_SET);
      int c = fgetc(f);
      fseek(f, at, SEEK_SET);
      fputc(c ^ 0x10, f);
      fflush(f);
      if (read_all() != MR_E_DATA)
        fail_msg("a flipped bit in byte %ld of %s was not found", at, names[n]);
      fseek(f, at, SEEK_SET);
      fputc(c, f);
      fflush(f);
    }
    assert_int_equal(truncate(temp_path(names[n]), size - 1), 0);
    assert_int_equal(read_all(), MR_E_DATA);
    fputc(0, f);
    fclose(f);
    assert_int_equal(write_plan(12, &e), MR_OK);
  }
}

static void without_a_head_there_is_no_plan(void **state) {
  (void)state;
  mr_err e = MR_ERR_INIT;
  mr_plan_writer *w;
  assert_int_equal(write_plan(3, &e), MR_OK);
  assert_int_equal(mr_plan_create(&w, temp_dir, &e), MR_OK);
  assert_int_equal(read_all(), MR_E_NOINPUT);
  mr_plan_abandon(w);
  assert_int_equal(read_all(), MR_E_NOINPUT);
  assert_int_not_equal(access(temp_path("plan.data"), F_OK), 0);
}

static ssize_t full_disk(int fd, const void *buf, size_t n) {
  (void)fd, (void)buf, (void)n;
  errno = ENOSPC;
  return -1;
}

static void a_full_disk_is_an_error(void **state) {
  (void)state;
  mr_sys t = mr_sys_os;
  t.write = full_disk;
  mr_sys_now = &t;
  mr_err e = MR_ERR_INIT;
  mr_code rc = write_plan(10, &e);
  mr_sys_now = &mr_sys_os;
  assert_int_equal(rc, MR_E_IO);
  assert_int_equal(read_all(), MR_E_NOINPUT);
}

static void memory_may_run_out_anywhere(void **state) {
  (void)state;
  mr_err e = MR_ERR_INIT;
  mr_code rc = MR_E_NOMEM;
  for (int n = 0; rc != MR_OK && n < 500; n++) {
    mr_err_clear(&e);
    int64_t live = mr_mem_live();
    mr_mem_fail_after(n);
    rc = write_plan(10, &e);
    mr_mem_fail_after(-1);
    assert_int_equal(mr_mem_live(), live);
    if (rc != MR_OK)
      assert_int_equal(rc, MR_E_NOMEM);
  }
  assert_int_equal(rc, MR_OK);
  rc = MR_E_NOMEM;
  for (int n = 0; rc != MR_OK && n < 500; n++) {
    int64_t live = mr_mem_live();
    mr_mem_fail_after(n);
    rc = read_all();
    mr_mem_fail_after(-1);
    assert_int_equal(mr_mem_live(), live);
  }
  assert_int_equal(rc, MR_OK);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(rows_come_back),
      cmocka_unit_test(an_empty_plan),
      cmocka_unit_test(every_flipped_byte_is_found),
      cmocka_unit_test(without_a_head_there_is_no_plan),
      cmocka_unit_test(a_full_disk_is_an_error),
      cmocka_unit_test(memory_may_run_out_anywhere),
  };
  return cmocka_run_group_tests(tests, temp_begin, temp_end);
}
