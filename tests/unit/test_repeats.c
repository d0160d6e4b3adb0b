#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "io/hash.h"
#include "io/mem.h"
#include "jobs/repeats.h"
#include "temp.h"

enum { ROWS = 300, IDS = 120 };

typedef struct seen {
  int n;
  bool row[ROWS];
} seen;

static void id_of(int row, char id[16]) {
  snprintf(id, 16, "id%d", row * 37 % IDS);
}

static mr_code found(void *ctx, const mr_plan_record *rec, const char *id, mr_err *err) {
  seen *s = ctx;
  char want[16];
  (void)err;
  id_of((int)rec->row, want);
  assert_string_equal(id, want);
  assert_false(s->row[rec->row]);
  s->row[rec->row] = true;
  s->n++;
  return MR_OK;
}

/* All ids have so many different hashes only: the ids themselves must tell them apart. */
static mr_code find(int hashes, size_t memory, seen *s, mr_err *e) {
  mr_plan_writer *w = NULL;
  mr_repeats *r = NULL;
  mr_code rc = mr_plan_create(&w, temp_dir, e);
  if (!rc && (rc = mr_plan_add_file(w, "rows.jsonl", e)) == MR_OK)
    rc = mr_repeats_open(&r, temp_dir, memory, e);
  for (int row = 0; !rc && row < ROWS; row++) {
    char id[16], json[40];
    id_of(row, id);
    int n = snprintf(json, sizeof json, "{\"id\":\"%s\"}", id);
    const mr_plan_record rec = {.e = {.kind = MR_ROW_PLAIN}, .json = json, .json_len = (size_t)n};
    rc = mr_plan_append(w, &rec, e);
    if (!rc)
      rc = mr_repeats_add(r, mr_hash_64(id, strlen(id)) % (uint64_t)hashes + 1, (uint64_t)row, e);
  }
  if (!rc)
    rc = mr_repeats_find(r, w, found, s, e);
  mr_repeats_close(r);
  mr_plan_abandon(w);
  return rc;
}

static void every_repetition_and_nothing_else(void **state) {
  (void)state;
  static const int hashes[] = {1, 3, 50, 1 << 30};
  for (size_t i = 0; i < sizeof hashes / sizeof *hashes; i++)
    for (size_t memory = 0; memory <= 100; memory += 100) {
      mr_err e = MR_ERR_INIT;
      seen s = {0};
      assert_int_equal(find(hashes[i], memory, &s, &e), MR_OK);
      assert_int_equal(s.n, ROWS - IDS);
      for (int row = 0; row < IDS; row++)
        assert_false(s.row[row]); /* the first of each id is no repetition */
    }
}

static void out_of_memory(void **state) {
  (void)state;
  int64_t live = mr_mem_live();
  int failed = 0;
  for (int n = 0;; n += 1 + n / 40, failed++) {
    mr_err e = MR_ERR_INIT;
    seen s = {0};
    mr_mem_fail_after(n);
    mr_code rc = n < 3 ? MR_E_NOMEM : find(50, 100, &s, &e); /* the plan's own: test_plan */
    mr_mem_fail_after(-1);
    assert_int_equal(mr_mem_live(), live);
    if (rc == MR_OK)
      break;
    assert_int_equal(rc, MR_E_NOMEM);
  }
  assert_true(failed > 50);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_repetition_and_nothing_else),
      cmocka_unit_test(out_of_memory),
  };
  return cmocka_run_group_tests(tests, temp_begin, temp_end);
}
