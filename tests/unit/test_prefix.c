/* The tree of prefixes: chains, claims, pages that are given back, and a random comparison with a
 * plain list of prompts. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "io/mem.h"
#include "src/prefix.h"

#define B MR_KV_BLOCK
#define PAGES 40

static mr_kv *kv;
static mr_prefix *tree;

static int setup(void **state) {
  (void)state;
  mr_config c = {.n_layers = 1, .n_kv_heads = 1, .n_heads = 1, .head_dim = 32};
  mr_err err = MR_ERR_INIT;
  return mr_kv_open(&kv, &c, MR_KV_F32, PAGES, &err) || mr_prefix_open(&tree, kv, &err);
}

static int teardown(void **state) {
  (void)state;
  mr_prefix_close(tree);
  int left = PAGES - mr_kv_free_pages(kv);
  mr_kv_close(kv);
  return left + (int)mr_mem_live();
}

/* A prompt of n blocks, block i of kind[i] - '0'. */
static const int32_t *prompt(const char *kind) {
  static int32_t ids[16 * B];
  for (size_t i = 0; kind[i]; i++)
    for (int t = 0; t < B; t++)
      ids[i * B + (size_t)t] = (kind[i] - '0') * 100 + t;
  return ids;
}

static int32_t page_of(int32_t node) {
  return mr_prefix_pages(tree, node)[0];
}

static void acquire(const char *kind, int32_t *chain) {
  mr_err err = MR_ERR_INIT;
  int n = (int)strlen(kind);
  assert_int_equal(mr_prefix_room(tree, n, &err), MR_OK);
  mr_prefix_acquire(tree, 0, prompt(kind), n, false, chain);
}

static void release(const char *kind, const int32_t *chain, uint64_t age) {
  int n = (int)strlen(kind);
  mr_prefix_release(tree, chain, n, false, age);
  mr_prefix_unroom(tree, n);
}

/* Computes blocks from..to of a chain: their pages are the tree's alone afterwards. */
static void compute(const int32_t *chain, int from, int to, uint64_t age) {
  mr_kv_seq s;
  mr_err err = MR_ERR_INIT;
  int32_t pages[3];
  assert_int_equal(mr_kv_seq_init(kv, &s, 16 * B, &err), MR_OK);
  for (int i = from; i < to; i++) {
    bool there = mr_prefix_computed(tree, chain[i]);
    assert_true(mr_prefix_claim(tree, chain[i], age));
    assert_int_equal(mr_kv_seq_reserve(kv, &s, B), MR_OK);
    mr_kv_seq_block(kv, &s, s.len / B, pages);
    s.len += B;
    mr_prefix_publish(tree, chain[i], pages, age);
    assert_true((page_of(chain[i]) == pages[0]) == !there);
    assert_true(mr_prefix_whole(tree, chain[i]));
  }
  mr_kv_seq_free(kv, &s);
}

static void chains(void **state) {
  (void)state;
  int32_t a[4], b[4];
  acquire("1234", a);
  assert_int_equal(mr_prefix_unheld(tree, 0, prompt("1256"), 4), 2);
  acquire("1256", b);
  assert_int_equal(mr_prefix_held(tree), 6);
  assert_true(a[0] == b[0] && a[1] == b[1] && a[2] != b[2]);
  acquire("34", b + 2); /* the same blocks at another place are other nodes */
  assert_true(b[2] != a[2] && b[3] != a[3]);
  mr_prefix_release(tree, b + 2, 2, false, 9);
  mr_prefix_unroom(tree, 2);
  acquire("1256", b);
  release("1256", b, 2);
  release("1256", b, 2);
  release("1234", a, 1);
  assert_int_equal(mr_prefix_held(tree), 0); /* nothing was computed, nothing stays */
  assert_int_equal(mr_prefix_cached(tree), 0);
}

static void claims(void **state) {
  (void)state;
  int32_t a[3], b[3];
  acquire("123", a);
  acquire("124", b);
  assert_true(mr_prefix_claim(tree, a[0], 7));
  assert_true(mr_prefix_claim(tree, a[0], 7));
  assert_false(mr_prefix_claim(tree, b[0], 8)); /* wait for the older one */
  assert_true(mr_prefix_claim(tree, b[0], 3));  /* the oldest waits for nobody */
  assert_false(mr_prefix_claim(tree, a[0], 7));
  mr_prefix_release(tree, b, 3, false, 3); /* who goes leaves its work to the others */
  assert_true(mr_prefix_claim(tree, a[0], 7));
  mr_prefix_unroom(tree, 3);
  release("123", a, 7);
}

static void pages(void **state) {
  (void)state;
  int32_t a[4], b[4];
  acquire("1234", a);
  compute(a, 0, 4, 1);
  assert_int_equal(mr_kv_free_pages(kv), PAGES - 4);
  assert_int_equal(mr_prefix_evict(tree, 9), 0); /* held */
  release("1234", a, 1);
  assert_int_equal(mr_prefix_cached(tree), 4);
  acquire("1256", b);
  assert_int_equal(mr_prefix_cached(tree), 2);
  assert_true(page_of(b[1]) >= 0 && page_of(b[2]) < 0);
  assert_int_equal(mr_prefix_evict(tree, 1), 1); /* the leaf goes first */
  assert_int_equal(mr_prefix_unheld(tree, 0, prompt("1234"), 4), 2);
  acquire("1234", a);
  assert_true(page_of(a[2]) >= 0 && page_of(a[3]) < 0);
  release("1256", b, 2);
  release("1234", a, 3);
  assert_int_equal(mr_prefix_evict(tree, 9), 3);
  assert_int_equal(mr_kv_free_pages(kv), PAGES);
}

/* Two computed the same block: the first one's page stays. */
static void published_twice(void **state) {
  (void)state;
  int32_t a[1];
  mr_kv_seq s;
  mr_err err = MR_ERR_INIT;
  acquire("1", a);
  compute(a, 0, 1, 1);
  assert_int_equal(mr_kv_seq_init(kv, &s, B, &err), MR_OK);
  assert_int_equal(mr_kv_seq_reserve(kv, &s, B), MR_OK);
  s.len = B;
  mr_prefix_publish(tree, a[0], s.pages, 2);
  int32_t kept = page_of(a[0]);
  assert_true(kept != s.pages[0]);
  mr_kv_seq_replace(kv, &s, 0, &kept);
  assert_ptr_equal(s.at[0], mr_kv_page(kv, kept));
  assert_int_equal(mr_kv_free_pages(kv), PAGES - 1);
  mr_kv_seq_free(kv, &s);
  release("1", a, 1);
  assert_int_equal(mr_prefix_evict(tree, 1), 1);
}

static void partial(void **state) {
  (void)state;
  int32_t a[2], node = -1;
  acquire("12", a);
  compute(a, 0, 2, 1);
  int32_t ids[B];
  memcpy(ids, prompt("2"), sizeof ids);
  ids[20] = 9999;
  assert_int_equal(mr_prefix_partial(tree, 0, a[0], ids, B, &node), 20);
  assert_int_equal(node, a[1]);
  assert_int_equal(mr_prefix_partial(tree, 0, a[0], ids, 11, &node), 11);
  assert_int_equal(mr_prefix_partial(tree, 0, -1, ids, B, &node), 0);
  assert_int_equal(mr_prefix_partial(tree, 0, a[1], ids, B, &node), 0);
  release("12", a, 1);
  assert_int_equal(mr_prefix_evict(tree, 2), 2);
}

/* Random prompts come and go: what is held and stored is what a list of them says. */
static void against_a_list(void **state) {
  (void)state;
  enum { LIVE = 5, LEN = 5 };
  char kinds[LIVE][LEN + 1] = {{0}};
  int32_t chain[LIVE][LEN];
  uint32_t x = 12345;
  for (int step = 0; step < 3000; step++) {
    x = x * 1664525u + 1013904223u;
    int i = (int)(x >> 16) % LIVE;
    if (kinds[i][0]) {
      release(kinds[i], chain[i], (uint64_t)i + 1);
      kinds[i][0] = 0;
    } else {
      for (int k = 0; k < LEN; k++)
        kinds[i][k] = (char)('0' + (x >> (20 + k) & 1));
      acquire(kinds[i], chain[i]);
      int k = 0;
      while (k < LEN && page_of(chain[i][k]) >= 0)
        k++;
      mr_prefix_evict(tree, LEN - k - mr_kv_free_pages(kv));
      compute(chain[i], k, LEN, (uint64_t)i + 1);
    }
    int held = 0; /* distinct beginnings of the live prompts */
    for (int a = 0; a < LIVE; a++)
      for (int n = 1; kinds[a][0] && n <= LEN; n++) {
        bool first = true;
        for (int b = 0; b < a; b++)
          first = first && !(kinds[b][0] && !memcmp(kinds[a], kinds[b], (size_t)n));
        held += first;
      }
    assert_int_equal(mr_prefix_held(tree), held);
    assert_int_equal(mr_prefix_cached(tree) + held, PAGES - mr_kv_free_pages(kv));
  }
  for (int i = 0; i < LIVE; i++)
    if (kinds[i][0])
      release(kinds[i], chain[i], (uint64_t)i + 1);
}

static void out_of_memory(void **state) {
  (void)state;
  mr_err err = MR_ERR_INIT;
  mr_mem_fail_after(0);
  assert_int_equal(mr_prefix_room(tree, 1 << 16, &err), MR_E_NOMEM);
  mr_mem_fail_after(-1);
  mr_err_clear(&err);
  assert_int_equal(mr_prefix_room(tree, 8, &err), MR_OK);
  mr_prefix_unroom(tree, 8);
}

/* What nobody is known to want goes first, then what is wanted last; a leaf each time. */
static void the_future_is_known(void **state) {
  (void)state;
  const char *kinds[] = {"12", "34", "56", "78"};
  int32_t chain[2];
  for (uint64_t i = 0; i < 4; i++) {
    acquire(kinds[i], chain);
    compute(chain, 0, 2, i + 1);
    release(kinds[i], chain, i + 1);
  }
  mr_prefix_expect(tree, 0, prompt("12"), 2, 1);
  mr_prefix_expect(tree, 0, prompt("78"), 1, 2); /* its first block only */
  mr_prefix_expect(tree, 0, prompt("34"), 2, 3);
  assert_int_equal(mr_prefix_evict(tree, 3), 3); /* 6 after 5, and 8 after 7 */
  assert_int_equal(mr_prefix_unheld(tree, 0, prompt("12"), 2), 2);
  acquire("56", chain);
  assert_int_equal(page_of(chain[0]), -1);
  release("56", chain, 9);
  assert_int_equal(mr_prefix_evict(tree, 2), 2); /* 34, wanted last */
  acquire("34", chain);
  assert_int_equal(page_of(chain[0]), -1);
  release("34", chain, 9);
  mr_prefix_came(tree, 0, prompt("12"), 2, 2); /* and is gone again */
  assert_int_equal(mr_prefix_evict(tree, 2), 2);
  acquire("78", chain);
  assert_true(page_of(chain[0]) >= 0);
  release("78", chain, 9);
  mr_prefix_evict(tree, 9);
  mr_prefix_came(tree, 0, prompt("34"), 2, 9);
  mr_prefix_came(tree, 0, prompt("78"), 1, 9);
}

/* ---------------------------------------------------------------- windows in two of three layers
 */

/* A block has three pages, of which two are of layers with a window; it reaches two blocks back. */
static int setup_windows(void **state) {
  (void)state;
  mr_config c = {.n_layers = 3,
                 .n_kv_heads = 1,
                 .n_heads = 1,
                 .head_dim = 32,
                 .context = 1000,
                 .window = 40,
                 .windowed = {1, 0, 1}};
  mr_err err = MR_ERR_INIT;
  return mr_kv_open(&kv, &c, MR_KV_F32, PAGES, &err) || mr_prefix_open(&tree, kv, &err);
}

/* Which blocks of a chain are whole, as digits 0 and 1. */
static const char *whole(const int32_t *chain, int n) {
  static char out[17];
  for (int i = 0; i < n; i++)
    out[i] = mr_prefix_whole(tree, chain[i]) ? '1' : '0';
  out[n] = 0;
  return out;
}

static void spent_blocks_go_first(void **state) {
  (void)state;
  int32_t a[8], b[4], c[2];
  acquire("12345678", a);
  compute(a, 0, 8, 1);
  acquire("97", c);
  compute(c, 0, 2, 2);
  release("97", c, 2);
  assert_int_equal(mr_prefix_held(tree), 8); /* the pages without a window */
  assert_int_equal(mr_prefix_cached(tree), 8 * 2 + 2 * 3);
  mr_prefix_expect(tree, 0, prompt("12345"), 5, 1); /* who comes needs 4 and 5 */
  assert_int_equal(mr_prefix_evict(tree, 1), 4 * 2);
  assert_string_equal(whole(a, 8), "00011011");
  assert_int_equal(mr_prefix_cached(tree), 4 * 2 + 2 * 3);
  acquire("1239", b); /* who leaves the others is another end */
  mr_prefix_came(tree, 0, prompt("12345"), 5, 2);
  assert_int_equal(mr_prefix_evict(tree, 7), 6 + 2); /* idle ones, then whatever nobody has */
  assert_string_equal(whole(a, 8), "00001011");
  compute(a, 0, 3, 1); /* it keeps its first page and takes the others */
  assert_string_equal(whole(a, 8), "11101011");
  assert_int_equal(mr_prefix_evict(tree, 1), 2); /* 2 and 3 are needed for 9, 5 is not for 8 */
  release("1239", b, 3);
  release("12345678", a, 1);
  assert_int_equal(mr_prefix_held(tree), 0);
  assert_int_equal(mr_prefix_cached(tree), PAGES - mr_kv_free_pages(kv));
  mr_prefix_evict(tree, PAGES);
  assert_int_equal(mr_kv_free_pages(kv), PAGES);
}

/* Neither what is held wide nor what a block table has is given up. */
static void what_is_needed_stays(void **state) {
  (void)state;
  int32_t a[5], b[5], pages[3];
  mr_kv_seq s;
  mr_err err = MR_ERR_INIT;
  assert_int_equal(mr_prefix_room(tree, 5, &err), MR_OK);
  assert_int_equal(mr_prefix_unwide(tree, 0, prompt("12345"), 5), 5);
  mr_prefix_acquire(tree, 0, prompt("12345"), 5, true, a);
  assert_int_equal(mr_prefix_unwide(tree, 0, prompt("12346"), 5), 1);
  compute(a, 0, 5, 1);
  acquire("12345", b);
  assert_int_equal(mr_prefix_held(tree), 5 * 3);
  assert_int_equal(mr_prefix_cached(tree), 0);
  assert_int_equal(mr_prefix_evict(tree, PAGES), 0);
  mr_prefix_release(tree, a, 5, true, 1);
  mr_prefix_unroom(tree, 5);
  assert_int_equal(mr_prefix_held(tree), 5);
  assert_int_equal(mr_prefix_unwide(tree, 0, prompt("12345"), 5), 5);
  assert_int_equal(mr_prefix_cached(tree), 5 * 2);
  assert_int_equal(mr_kv_seq_init(kv, &s, B, &err), MR_OK);
  mr_kv_seq_append(kv, &s, mr_prefix_pages(tree, b[1]), B);
  assert_int_equal(mr_prefix_cached(tree), 4 * 2);
  assert_int_equal(mr_prefix_evict(tree, PAGES), 4 * 2);
  assert_string_equal(whole(b, 5), "01000");
  mr_kv_seq_block(kv, &s, 0, pages);
  mr_prefix_publish(tree, b[0], pages, 2); /* as if they were of that block */
  assert_memory_equal(mr_prefix_pages(tree, b[0]) + 1, pages + 1, 2 * sizeof *pages);
  assert_true(page_of(b[0]) != pages[0]);
  mr_kv_seq_free(kv, &s);
  release("12345", b, 2);
  assert_int_equal(mr_prefix_evict(tree, PAGES), 5 + 2 * 2);
}

static int kept;

static bool count_kept(void *ctx, int in, const int32_t *ids, int n, const int32_t *pages) {
  (void)ctx;
  kept++;
  return in == 0 && n % B == 0 && ids[0] == 100 && pages[0] >= 0 && pages[2] >= 0;
}

/* What goes to a store goes there while it is whole, and is looked for there again. */
static void kept_before_it_goes(void **state) {
  (void)state;
  int32_t a[4], b[4];
  mr_prefix_on_evict(tree, count_kept, NULL);
  acquire("1234", a);
  acquire("1234", b);
  assert_true(mr_prefix_first_look(tree, a[0]) && !mr_prefix_first_look(tree, a[0]));
  compute(a, 0, 4, 1);
  assert_int_equal(mr_prefix_evict(tree, 1), 4);
  assert_int_equal(kept, 2);
  assert_true(mr_prefix_first_look(tree, a[0]));
  release("1234", a, 1);
  release("1234", b, 2);
  assert_int_equal(mr_prefix_evict(tree, PAGES), 12 - 4);
  assert_int_equal(kept, 4);
  mr_prefix_on_evict(tree, NULL, NULL);
}

/* A node without a computed one before it takes nothing, and goes when nobody holds it. */
static void no_gaps(void **state) {
  (void)state;
  int32_t a[2], pages[3];
  mr_kv_seq s;
  mr_err err = MR_ERR_INIT;
  acquire("12", a);
  assert_int_equal(mr_kv_seq_init(kv, &s, B, &err), MR_OK);
  assert_int_equal(mr_kv_seq_reserve(kv, &s, B), MR_OK);
  mr_kv_seq_block(kv, &s, 0, pages);
  mr_prefix_publish(tree, a[1], pages, 1);
  assert_false(mr_prefix_computed(tree, a[1]));
  mr_kv_seq_free(kv, &s);
  release("12", a, 1);
  assert_int_equal(mr_prefix_cached(tree), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(chains),          cmocka_unit_test(claims),
      cmocka_unit_test(pages),           cmocka_unit_test(the_future_is_known),
      cmocka_unit_test(published_twice), cmocka_unit_test(partial),
      cmocka_unit_test(against_a_list),  cmocka_unit_test(out_of_memory),
  };
  const struct CMUnitTest windows[] = {
      cmocka_unit_test(spent_blocks_go_first),
      cmocka_unit_test(what_is_needed_stays),
      cmocka_unit_test(kept_before_it_goes),
      cmocka_unit_test(no_gaps),
      cmocka_unit_test(chains),
      cmocka_unit_test(claims),
  };
  return cmocka_run_group_tests(tests, setup, teardown) +
         cmocka_run_group_tests(windows, setup_windows, teardown);
}
