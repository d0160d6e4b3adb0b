#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "src/charsmap.h"

enum { UNITS = 328, BYTES = 4 + 4 * UNITS + 6 };

/* "A" becomes "aa", "B" becomes "" (the table ends without a NUL after "z", which nothing uses). */
static void build(char map[BYTES]) {
  uint32_t unit[1 + UNITS] = {4 * UNITS};
  unit[1 + 0] = 256u << 10;                       /* the root's children from 256 on */
  unit[1 + (256 ^ 'A')] = 1u << 10 | 0x100 | 'A'; /* a leaf, its value beside it */
  unit[1 + (256 ^ 'A' ^ 1)] = 0;
  unit[1 + (256 ^ 'B')] = 7u << 10 | 0x100 | 'B';
  unit[1 + (256 ^ 'B' ^ 7)] = 2;
  memcpy(map, unit, sizeof unit);
  memcpy(map + sizeof unit, "aa\0\0z", 6);
}

static void finds_what_is_there(void **state) {
  char map[BYTES];
  mr_err e = MR_ERR_INIT;
  mr_str to;
  (void)state;
  build(map);
  assert_int_equal(mr_charsmap_check(map, sizeof map, &e), MR_OK);
  assert_true(mr_charsmap_find(map, sizeof map, "A", 1, &to));
  assert_int_equal(to.len, 2);
  assert_memory_equal(to.s, "aa", 2);
  assert_true(mr_charsmap_find(map, sizeof map, "Bx", 2, &to)); /* the shortest entry */
  assert_int_equal(to.len, 0);
  assert_false(mr_charsmap_find(map, sizeof map, "C", 1, &to));
  assert_false(mr_charsmap_find(map, sizeof map, "\xff", 1, &to));
  assert_false(mr_charsmap_find(map, sizeof map, "", 0, &to));
}

static void sizes_are_checked(void **state) {
  char map[BYTES];
  mr_err e = MR_ERR_INIT;
  (void)state;
  build(map);
  assert_int_equal(mr_charsmap_check(map, 0, &e), MR_E_DATA);
  assert_int_equal(mr_charsmap_check(map, 7, &e), MR_E_DATA);
  assert_int_equal(mr_charsmap_check(map, 4 * UNITS, &e), MR_E_DATA);
  map[0] |= 1;
  assert_int_equal(mr_charsmap_check(map, sizeof map, &e), MR_E_DATA);
}

/* Units that point anywhere are followed no further than the table. */
static void wild_units_do_no_harm(void **state) {
  char map[BYTES];
  uint64_t x = 3;
  (void)state;
  for (int k = 0; k < 20000; k++) {
    mr_str to;
    build(map);
    for (int i = 0; i < 40; i++) {
      x = x * 6364136223846793005u + 1442695040888963407u;
      map[4 + (x >> 33) % (sizeof map - 4)] = (char)(x >> 25);
    }
    const char text[] = {(char)(x >> 40), (char)(x >> 48), 'A', 'B', '\x7f'};
    for (size_t from = 0; from < sizeof text; from++)
      if (mr_charsmap_find(map, sizeof map, text + from, sizeof text - from, &to))
        assert_true(to.s >= map && to.s + to.len <= map + sizeof map);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(finds_what_is_there),
      cmocka_unit_test(sizes_are_checked),
      cmocka_unit_test(wild_units_do_no_harm),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
