/* starve.h: loops over every allocation of a call, also past those whose failure does no harm (the
 * compiler of expressions does without its memory): a loop that ends with the first success would
 * not try the others.
 *
 *     bool more = true;
 *     for (int64_t n = 0; more; n++) {
 *       mr_mem_fail_after(n);
 *       rc = call();
 *       more = starved(n);
 *       ... rc is MR_OK or MR_E_NOMEM
 *     }
 */
#ifndef MR_TESTS_STARVE_H
#define MR_TESTS_STARVE_H

#include <stdbool.h>

#include "io/mem.h"

/* Whether the allocation that mr_mem_fail_after(n) is about was asked for since. Turns it off. */
static inline bool starved(int64_t n) {
  bool yes = true;
  for (int64_t i = 0; i <= n && yes; i++) {
    void *p = mr_mem_alloc(1, 1);
    yes = p != NULL;
    mr_mem_free(p);
  }
  mr_mem_fail_after(-1);
  return yes;
}

#endif
