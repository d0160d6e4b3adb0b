/* Against a plain list of wishes, with many that fall onto one slot. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "io/mem.h"
#include "src/nextuse.h"

enum { KEYS = 300, ROUNDS = 40000 };

static uint64_t key(uint32_t i) {
  return i % 3 ? (uint64_t)i << 20 : (uint64_t)i * 0x9e3779b97f4a7c15u; /* two thirds collide */
}

static void as_a_list(void **state) {
  (void)state;
  static uint32_t count[KEYS];
  mr_nextuse u = {0};
  uint32_t r = 1;
  assert_true(mr_nextuse_of(&u, 5) == MR_NEVER);
  mr_nextuse_remove(&u, 5, 1);
  for (uint64_t round = 1; round < ROUNDS; round++) {
    r = r * 1664525u + 1013904223u;
    uint32_t k = (r >> 8) % KEYS;
    if ((r >> 28) < 8) {
      mr_nextuse_add(&u, key(k), round);
      count[k]++;
    } else {
      mr_nextuse_remove(&u, key(k), round);
      count[k] -= count[k] > 0;
    }
    k = (r >> 12) % KEYS;
    assert_true((mr_nextuse_of(&u, key(k)) == MR_NEVER) == (count[k] == 0));
  }
  mr_nextuse_free(&u);
  assert_int_equal(mr_mem_live(), 0);
}

static void when(void **state) {
  (void)state;
  mr_nextuse u = {0};
  mr_nextuse_add(&u, 7, 20);
  mr_nextuse_add(&u, 7, 10);
  assert_true(mr_nextuse_of(&u, 7) == 10);
  mr_nextuse_remove(&u, 7, 11);
  assert_true(mr_nextuse_of(&u, 7) == 11);
  mr_nextuse_remove(&u, 7, 12);
  assert_true(mr_nextuse_of(&u, 7) == MR_NEVER);
  mr_nextuse_free(&u);
}

static void without_memory(void **state) {
  (void)state;
  mr_nextuse u = {0};
  mr_mem_fail_after(0);
  mr_nextuse_add(&u, 7, 20);
  assert_true(mr_nextuse_of(&u, 7) == MR_NEVER);
  for (uint64_t i = 0; i < 127; i++)
    mr_nextuse_add(&u, i, 1);
  mr_mem_fail_after(0);
  for (uint64_t i = 200; i < 203; i++)
    mr_nextuse_add(&u, i, 1);
  mr_mem_fail_after(-1);
  assert_true(mr_nextuse_of(&u, 126) == 1);
  mr_nextuse_free(&u);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(as_a_list),
      cmocka_unit_test(when),
      cmocka_unit_test(without_memory),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
