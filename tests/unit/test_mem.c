#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

#include "io/mem.h"

static void products_are_checked(void **state) {
  (void)state;
  size_t n;
  assert_true(mr_mem_mul(3, 5, &n) && n == 15);
  assert_false(mr_mem_mul(SIZE_MAX / 2, 3, &n));
  assert_null(mr_mem_alloc(SIZE_MAX / 2, 3));
  assert_null(mr_mem_resize(NULL, SIZE_MAX, 2));
}

static void nth_allocation_fails(void **state) {
  (void)state;
  int64_t before = mr_mem_live();
  mr_mem_fail_after(1);
  void *a = mr_mem_alloc(1, 8), *b = mr_mem_alloc(1, 8), *c = mr_mem_alloc(1, 8);
  mr_mem_fail_after(-1);
  assert_non_null(a);
  assert_null(b);
  assert_non_null(c);
  assert_int_equal(mr_mem_live(), before + 2);
  mr_mem_free(a);
  mr_mem_free(c);
  assert_int_equal(mr_mem_live(), before);
}

static void pages_are_aligned_and_zero(void **state) {
  (void)state;
  static const size_t sizes[] = {0, 1, 64, 100000, (size_t)5 << 20};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    unsigned char *p = mr_mem_pages(sizes[i]);
    assert_non_null(p);
    assert_int_equal((uintptr_t)p % 64, 0);
    for (size_t k = 0; k < sizes[i]; k += 511)
      assert_int_equal(p[k], 0);
    mr_mem_free(p);
  }
  assert_null(mr_mem_pages(SIZE_MAX));
}

static void growth_keeps_contents(void **state) {
  (void)state;
  int *items = NULL;
  size_t cap = 0;
  for (int i = 0; i < 1000; i++) {
    assert_true(mr_mem_grow((void **)&items, &cap, (size_t)i + 1, sizeof *items));
    items[i] = i;
  }
  for (int i = 0; i < 1000; i++)
    assert_int_equal(items[i], i);
  size_t old = cap;
  mr_mem_fail_after(0);
  assert_false(mr_mem_grow((void **)&items, &cap, cap + 1, sizeof *items));
  mr_mem_fail_after(-1);
  assert_int_equal(cap, old);
  assert_int_equal(items[999], 999);
  mr_mem_free(items);
}

static void copies_terminate(void **state) {
  (void)state;
  char *p = mr_mem_copy("ab\0c", 4);
  assert_memory_equal(p, "ab\0c", 5);
  mr_mem_free(p);
}

/* Whether a process that writes byte `at` ends by itself. */
static int may_write(volatile unsigned char *p, size_t at) {
  int status;
  pid_t child = fork();
  if (child == 0) {
    p[at] = 1;
    _exit(0);
  }
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static void guarded_memory_ends(void **state) {
  (void)state;
  static const size_t sizes[] = {1, 256, 5000, 8192};
  int64_t before = mr_mem_live();
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    size_t n = (sizes[i] + 255) & ~(size_t)255;
    unsigned char *p = mr_mem_guarded(sizes[i]);
    assert_non_null(p);
    assert_int_equal((uintptr_t)p % 256, 0);
    assert_true(may_write(p, n - 1));
    assert_false(may_write(p, n));
    mr_mem_free(p);
  }
  assert_int_equal(mr_mem_live(), before);
  assert_null(mr_mem_guarded(SIZE_MAX));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(products_are_checked),       cmocka_unit_test(nth_allocation_fails),
      cmocka_unit_test(pages_are_aligned_and_zero), cmocka_unit_test(growth_keeps_contents),
      cmocka_unit_test(copies_terminate),           cmocka_unit_test(guarded_memory_ends),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
