/* mem.h: the only allocator of the program.
 *
 * Sizes are (count, size) pairs whose product is checked. Memory comes zeroed where the name says
 * so. A failed call returns NULL; callers report MR_E_NOMEM. Tests make the n-th allocation fail
 * with mr_mem_fail_after. Thread safe.
 */
#ifndef MR_IO_MEM_H
#define MR_IO_MEM_H

#include <stddef.h>
#include <stdint.h>

void *mr_mem_alloc(size_t count, size_t size); /* zeroed; count*size == 0 gives a unique pointer */
void *mr_mem_resize(void *p, size_t count, size_t size); /* realloc; `p` stays valid on failure */
char *mr_mem_copy(const void *src, size_t len);          /* len bytes and a NUL */
void mr_mem_free(void *p);                               /* NULL is fine */

/* Zeroed, aligned to 64 bytes (2 MiB and huge pages advised from 4 MiB up). Freed with mr_mem_free.
 */
void *mr_mem_pages(size_t bytes);

/* Zeroed, aligned to 256 bytes, and followed by a page whose touch ends the program: finds reads
 * and writes past the end (of `bytes` rounded up to 256). Freed with mr_mem_free. */
void *mr_mem_guarded(size_t bytes);

/* Grows `*items` (elements of `size` bytes) to hold at least `need`; doubles. Returns 0 on failure.
 */
int mr_mem_grow(void **items, size_t *cap, size_t need, size_t size);

/* a*b in *out; 0 on overflow. */
int mr_mem_mul(size_t a, size_t b, size_t *out);

/* Tests: after n more allocations one fails (n = 0: the next one), then all succeed again; -1 turns
 * it off. */
void mr_mem_fail_after(int64_t n);
void mr_mem_fail_above(size_t bytes); /* tests: larger ones fail; 0 turns it off */
int64_t mr_mem_live(void); /* allocations not yet freed: leak checks */

#endif
