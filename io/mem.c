#include "io/mem.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define HUGE_FROM ((size_t)4 << 20)
#define HUGE_PAGE ((size_t)2 << 20)
#define GUARDED_ALIGN ((size_t)256)
#define SMALL_PAGE ((size_t)4 << 10)

static _Atomic int64_t fail_in = -1;
static _Atomic size_t fail_above;
static _Atomic int64_t live;

/* Big blocks of mr_mem_pages come from mmap: the system hands out their pages, cleared, when they
 * are touched, so that a budget costs nothing until it is used. */
typedef struct mapping {
  void *p, *start; /* what the caller has; what was mapped */
  size_t len;
  struct mapping *next;
} mapping;

static mapping *mappings;
static pthread_mutex_t mappings_lock = PTHREAD_MUTEX_INITIALIZER;

static int refused(size_t bytes) {
  size_t most = atomic_load_explicit(&fail_above, memory_order_relaxed);
  if (most && bytes > most)
    return 1;
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
  if (!mr_mem_mul(count, size, &n) || refused(n))
    return NULL;
  return counted(calloc(n ? n : 1, 1));
}

void *mr_mem_resize(void *p, size_t count, size_t size) {
  size_t n;
  if (!mr_mem_mul(count, size, &n) || refused(n))
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

/* NULL: p is none of them. */
static mapping *take_mapping(const void *p) {
  pthread_mutex_lock(&mappings_lock);
  mapping **link = &mappings;
  while (*link && (*link)->p != p)
    link = &(*link)->next;
  mapping *m = *link;
  if (m)
    *link = m->next;
  pthread_mutex_unlock(&mappings_lock);
  return m;
}

static void keep_mapping(mapping *m) {
  pthread_mutex_lock(&mappings_lock);
  m->next = mappings;
  mappings = m;
  pthread_mutex_unlock(&mappings_lock);
}

void mr_mem_free(void *p) {
  if (!p)
    return;
  atomic_fetch_sub_explicit(&live, 1, memory_order_relaxed);
  mapping *m = (uintptr_t)p % GUARDED_ALIGN ? NULL : take_mapping(p);
  if (m) {
    munmap(m->start, m->len);
    free(m);
  } else {
    free(p);
  }
}

/* len is a multiple of HUGE_PAGE, and the result aligned to it. */
static void *map_pages(size_t len) {
  mapping *m = malloc(sizeof *m);
  uint8_t *raw =
      mmap(NULL, len + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (!m || raw == MAP_FAILED) {
    free(m);
    if (raw != MAP_FAILED)
      munmap(raw, len + HUGE_PAGE);
    return NULL;
  }
  size_t head = (HUGE_PAGE - (uintptr_t)raw % HUGE_PAGE) % HUGE_PAGE;
  if (head)
    munmap(raw, head);
  if (head != HUGE_PAGE)
    munmap(raw + head + len, HUGE_PAGE - head);
  *m = (mapping){raw + head, raw + head, len, NULL};
  madvise(m->p, len, MADV_HUGEPAGE);
  keep_mapping(m);
  return m->p;
}

void *mr_mem_pages(size_t bytes) {
  if (bytes > SIZE_MAX - 2 * HUGE_PAGE || refused(bytes))
    return NULL;
  if (bytes < HUGE_FROM) {
    size_t n = (bytes + 63) & ~(size_t)63;
    void *p = aligned_alloc(64, n ? n : 64);
    if (p)
      memset(p, 0, n);
    return counted(p);
  }
  size_t n = (bytes + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1);
  return counted(map_pages(n));
}

void *mr_mem_guarded(size_t bytes) {
  if (bytes > SIZE_MAX - 2 * HUGE_PAGE || refused(bytes))
    return NULL;
  size_t n = (bytes + GUARDED_ALIGN - 1) & ~(GUARDED_ALIGN - 1);
  size_t room = (n + SMALL_PAGE - 1) & ~(SMALL_PAGE - 1), len = room + SMALL_PAGE;
  mapping *m = malloc(sizeof *m);
  uint8_t *raw = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (!m || raw == MAP_FAILED || mprotect(raw + room, SMALL_PAGE, PROT_NONE)) {
    if (raw != MAP_FAILED)
      munmap(raw, len);
    free(m);
    return NULL;
  }
  *m = (mapping){raw + room - n, raw, len, NULL};
  keep_mapping(m);
  return counted(m->p);
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

void mr_mem_fail_above(size_t bytes) {
  atomic_store(&fail_above, bytes);
}

int64_t mr_mem_live(void) {
  return atomic_load(&live);
}
