/* Parking pages on disk: the choice, and that pages come back as they were. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "io/mem.h"
#include "src/kvtier.h"
#include "tests/unit/temp.h"

#define PAGES 12
#define B MR_KV_BLOCK

static mr_kv *kv;

static int setup(void **state) {
  mr_config c = {.n_layers = 2, .n_kv_heads = 1, .n_heads = 1, .head_dim = 32};
  mr_err err = MR_ERR_INIT;
  return temp_begin(state) || mr_kv_open(&kv, &c, MR_KV_F32, PAGES, &err);
}

static int teardown(void **state) {
  mr_kv_close(kv);
  return temp_end(state) || mr_mem_live();
}

static mr_kvtier *opened(mr_kv_policy policy, uint64_t disk) {
  mr_kvtier *t;
  mr_err err = MR_ERR_INIT;
  assert_int_equal(mr_kvtier_open(&t, kv, policy, disk, temp_dir, &err), MR_OK);
  return t;
}

static void fill(mr_kv_seq *s, int tokens, int with) {
  mr_err err = MR_ERR_INIT;
  assert_int_equal(mr_kv_seq_init(kv, s, PAGES * B, &err), MR_OK);
  assert_int_equal(mr_kv_seq_reserve(kv, s, tokens), MR_OK);
  s->len = tokens;
  for (int i = 0; i < mr_kv_seq_places(kv, s); i++)
    memset(mr_kv_page(kv, s->pages[i]), with + i, mr_kv_size_of_page(kv));
}

static void is_filled(const mr_kv_seq *s, int first, int end, int with) {
  for (int i = first; i < end; i++)
    for (size_t b = 0; b < mr_kv_size_of_page(kv); b++)
      assert_int_equal(s->at[i][b], (uint8_t)(with + i));
}

static mr_code all_fetched(mr_kvtier *t, mr_parked *p) {
  mr_code rc;
  while ((rc = mr_kvtier_fetched(t, p)) == MR_E_AGAIN)
    mr_kvtier_wait(t);
  return rc;
}

static void there_and_back(void **state) {
  (void)state;
  size_t page = mr_kv_size_of_page(kv);
  mr_kvtier *t = opened(MR_KV_SPILL, 100 * page);
  mr_kv_seq s;
  mr_parked p = {0};
  fill(&s, 5 * B + 3, 40);
  assert_true(mr_kvtier_spills(t, 4, 100, 0));
  assert_true(mr_kvtier_park(t, &s, 2, 6, s.len, &p));
  assert_true(p.n == 4 && p.first == 2 && p.len == 5 * B + 3);
  mr_kv_seq_free(kv, &s);
  fill(&s, 5 * B + 3, 90); /* other pages, other bits */
  mr_kvtier_fetch(t, &p, &s, 3);
  assert_int_equal(all_fetched(t, &p), MR_OK);
  assert_null(p.slots);
  is_filled(&s, 0, 3, 90); /* page 2 was there already */
  is_filled(&s, 3, 6, 40);
  mr_kvtier_stats st;
  mr_kvtier_stats_get(t, &st);
  assert_int_equal(st.spill_bytes, 4 * page);
  assert_int_equal(st.fetch_bytes, 3 * page);
  mr_kv_seq_free(kv, &s);
  mr_kvtier_close(t);
}

static void no_room(void **state) {
  (void)state;
  mr_kvtier *t = opened(MR_KV_SPILL, 3 * mr_kv_size_of_page(kv));
  mr_kv_seq s;
  mr_parked p = {0}, q = {0};
  fill(&s, 5 * B, 1);
  assert_false(mr_kvtier_spills(t, 4, 100, 1));
  assert_false(mr_kvtier_park(t, &s, 0, 5, s.len, &p));
  assert_true(p.n == 0 && !p.slots);
  while (!mr_kvtier_park(t, &s, 0, 3, 3 * B, &q)) /* the slots come back once they are written */
    mr_kvtier_wait(t);
  mr_kvtier_forget(t, &q);
  mr_kv_seq_free(kv, &s);
  mr_kvtier_close(t);
}

static void the_choice(void **state) {
  (void)state;
  uint64_t disk = 100 * mr_kv_size_of_page(kv);
  mr_kvtier *t = opened(MR_KV_AUTO, disk);
  assert_true(mr_kvtier_spills(t, 5, 5 * B, 1));      /* a second a token */
  assert_false(mr_kvtier_spills(t, 5, 5 * B, 1e-12)); /* nothing is slower than the disk */
  assert_false(mr_kvtier_spills(t, 5, 0, 1));
  mr_kvtier_close(t);
  t = opened(MR_KV_RECOMPUTE, disk);
  assert_false(mr_kvtier_spills(t, 5, 5 * B, 1));
  mr_kvtier_close(t);
  t = opened(MR_KV_AUTO, 0);
  assert_false(mr_kvtier_spills(t, 5, 5 * B, 1));
  mr_kvtier_wait(t);
  mr_kvtier_close(t);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(there_and_back),
      cmocka_unit_test(no_room),
      cmocka_unit_test(the_choice),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
