/* ref.c: the plain-C table; see kernels.h. */
#include "kernels/ref/ref.h"

#include <pthread.h>

static mr_kernels table = {.name = "ref"};
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void fill(void) {
  mr_k_fill_ref_gemm(&table);
  mr_k_fill_ref_elem(&table);
  mr_k_fill_ref_attn(&table);
}

const mr_kernels *mr_kernels_ref(void) {
  pthread_once(&once, fill);
  return &table;
}
