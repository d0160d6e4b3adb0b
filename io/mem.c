#include "io/mem.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define HUGE_FROM ((size_t)4 << 20)
#define HUGE_PAGE ((size_t)2 << 20)

static _Atomic int64_t fail_in = -1;
static _Atomic int64_t live;

static int refused(void) {
  if (atomic_load_explicit(&fail_in, memory_order_relaxed) < 0)
    return 0;
  return atomic_fetch_sub(&fail_in, 1) == 0;
}

static void *counted(void *p) {
  if (p)
    atomic_fetch_add_explicit(&live, 1, memory_order_relaxed);
  return p;
}

int mr_mem_mul(size_t a, size_t b, size_t *out) {
  return !__builtin_mul_overflow(a, b, out);
}

void *mr_mem_alloc(size_t count, size_t size) {
  size_t n;
  if (!mr_mem_mul(count, size, &n) || refused())
    return NULL;
  return counted(calloc(n ? n : 1, 1));
}

void *mr_mem_resize(void *p, size_t count, size_t size) {
  size_t n;
  if (!mr_mem_mul(count, size, &n) || refused())
    return NULL;
  void *q = realloc(p, n ? n : 1);
  return p ? q : counted(q);
}

char *mr_mem_copy(const void *src, size_t len) {
  char *p = len < SIZE_MAX ? mr_mem_alloc(len + 1, 1) : NULL;
  if (p && len)
    memcpy(p, src, len);
  return p;
}

void mr_mem_free(void *p) {
  if (p)
    atomic_fetch_sub_explicit(&live, 1, memory_order_relaxed);
  free(p);
}

void *mr_mem_pages(size_t bytes) {
  if (bytes > SIZE_MAX - HUGE_PAGE || refused())
    return NULL;
  if (bytes < HUGE_FROM) {
    size_t n = (bytes + 63) & ~(size_t)63;
    void *p = aligned_alloc(64, n ? n : 64);
    if (p)
      memset(p, 0, n);
    return counted(p);
  }
  size_t n = (bytes + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1);
  void *p = aligned_alloc(HUGE_PAGE, n);
  if (!p)
    return NULL;
  madvise(p, n, MADV_HUGEPAGE);
  memset(p, 0, n);
  return counted(p);
}

int mr_mem_grow(void **items, size_t *cap, size_t need, size_t size) {
  if (need <= *cap)
    return 1;
  size_t n = *cap > SIZE_MAX / 2 ? need : *cap * 2;
  if (n < need)
    n = need;
  if (n < 8)
    n = 8;
  void *p = mr_mem_resize(*items, n, size);
  if (!p)
    return 0;
  *items = p;
  *cap = n;
  return 1;
}

void mr_mem_fail_after(int64_t n) {
  atomic_store(&fail_in, n);
}

int64_t mr_mem_live(void) {
  return atomic_load(&live);
}
