/* dispatch.c: which tables this CPU runs; sizes that do not depend on the table. See kernels.h. */
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"

enum { REF, AVX2, AVXVNNI, AVX512, TABLES };

static mr_kernels tables[TABLES];
static const char *names[TABLES + 1];
static pthread_once_t once = PTHREAD_ONCE_INIT;

#if defined(__x86_64__)
/* libgcc's checks cover the operating system's part (XCR0) too. */
static int has_avx2(void) {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi2");
}

static int has_avxvnni(void) {
  unsigned a, b, c, d;
  return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1) != 0;
}

static int has_avx512(void) {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}
#endif

static void fill(void) {
  int n = 0;
  for (int i = 0; i < TABLES; i++)
    tables[i] = *mr_kernels_ref();
  names[n++] = tables[REF].name;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (has_avx2()) {
    mr_k_fill_avx2(&tables[AVX2]);
    names[n++] = tables[AVX2].name;
  }
  if (has_avxvnni()) {
    mr_k_fill_avxvnni(&tables[AVXVNNI]);
    names[n++] = tables[AVXVNNI].name;
  }
  if (has_avx512()) {
    mr_k_fill_avx512(&tables[AVX512]);
    names[n++] = tables[AVX512].name;
  }
#endif
}

const char *const *mr_kernels_names(void) {
  pthread_once(&once, fill);
  return names;
}

const mr_kernels *mr_kernels_get(const char *name) {
  const char *const *can = mr_kernels_names();
  for (int i = 0; can[i] != NULL; i++) {
    if (strcmp(can[i], name) != 0)
      continue;
    for (int t = 0; t < TABLES; t++)
      if (strcmp(tables[t].name, name) == 0)
        return &tables[t];
  }
  return NULL;
}

const mr_kernels *mr_kernels_best(void) {
  const char *want = getenv("MILLRACE_ISA");
  if (want != NULL && want[0] != '\0')
    return mr_kernels_get(want);
  const char *const *can = mr_kernels_names();
  int n = 0;
  while (can[n] != NULL)
    n++;
  return mr_kernels_get(can[n - 1]);
}

const char *mr_scheme_name(mr_scheme scheme) {
  static const char *const scheme_names[MR_SCHEMES] = {"f32", "bf16", "int8"};
  return scheme_names[scheme];
}

const char *mr_kv_type_name(mr_kv_type type) {
  static const char *const type_names[MR_KV_TYPES] = {"f32", "f16", "bf16", "int8", "q4", "fp8"};
  return type_names[type];
}

size_t mr_kv_part_bytes(mr_kv_type type, int head_dim) {
  size_t n = (size_t)head_dim * MR_KV_BLOCK;
  switch (type) {
  case MR_KV_F32:
    return n * 4;
  case MR_KV_F16:
  case MR_KV_BF16:
    return n * 2;
  case MR_KV_INT8:
  case MR_KV_FP8:
    return (n + MR_KV_BLOCK * sizeof(float) + 63) / 64 * 64;
  case MR_KV_Q4: /* 16 bytes of codes and 4 of scales for each 32 values */
    return ((size_t)head_dim + 31) / 32 * 32 * 20;
  default:
    return 0;
  }
}

int mr_rotate_block(int n) {
  int block = n & -n;
  return block < 64 ? block : 64;
}

/* For each of G*32 query rows: q and the sum [head_dim], twice, scores of a span, 16 partial sums,
 * twice, five scalars; a block of K and a span of V as float32, or spans of both in 16 bits;
 * scores, twice, and p of 16 rows and four blocks. */
size_t mr_attn_scratch(int n_heads, int n_kv_heads, int head_dim) {
  size_t rows = (size_t)(n_heads / n_kv_heads) * MR_ATTN_TILE, keys = MR_ATTN_SPAN * MR_KV_BLOCK;
  size_t dim = ((size_t)head_dim + 15) / 16 * 16;
  size_t floats = rows * (3 * dim + keys + 2 * 16 + 5) + (keys + MR_KV_BLOCK) * dim;
  return (floats * sizeof(float) + 16 * 4 * MR_KV_BLOCK * 10 + 63) / 64 * 64;
}

/* For each row: the sum [head_dim], 16 partial sums, the maximum in a place of 16. */
size_t mr_attn_state(int n_heads, int n_kv_heads, int head_dim) {
  size_t dim = ((size_t)head_dim + 15) / 16 * 16;
  return (size_t)(n_heads / n_kv_heads) * (dim + 2 * 16);
}
