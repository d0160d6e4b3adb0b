/* The page pool against a naive model: each sequence is an array of numbers; what is read back
 * through the block table must equal it, and the free count must equal the pages that no table
 * holds. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "io/mem.h"
#include "src/kvcache.h"

#define SEQS 12
#define MAX_LEN 300
#define PAGES 120

typedef struct twin { /* a sequence and what should be in it */
  mr_kv_seq seq;
  uint32_t value[MAX_LEN];
  int first; /* positions below are dropped */
} twin;

static const mr_config config = {.n_layers = 2, .n_heads = 4, .n_kv_heads = 2, .head_dim = 16};
/* Windows in all layers; and in four of six: a group without, two with one. */
static const mr_config all_windowed = {.n_layers = 2,
                                       .n_heads = 4,
                                       .n_kv_heads = 2,
                                       .head_dim = 16,
                                       .context = MAX_LEN,
                                       .window = 50,
                                       .windowed = {1, 1}};
static const mr_config mixed = {.n_layers = 6,
                                .n_heads = 4,
                                .n_kv_heads = 2,
                                .head_dim = 16,
                                .context = MAX_LEN,
                                .window = 50,
                                .windowed = {1, 0, 1, 1, 0, 1}};

static uint32_t next_random(uint64_t *state) {
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(*state >> 33);
}

static mr_kv *open_kv_of(const mr_config *c, int pages) {
  mr_err err = MR_ERR_INIT;
  mr_kv *kv = NULL;
  assert_int_equal(mr_kv_open(&kv, c, MR_KV_F32, pages, &err), MR_OK);
  return kv;
}

static mr_kv *open_kv(int pages) {
  return open_kv_of(&config, pages);
}

static int entry(const mr_kv_seq *s, int group, int block) {
  return group * s->cap_blocks + block;
}

/* Into each group another number. */
static void write_at(mr_kv *kv, mr_kv_seq *s, int pos, uint32_t value) {
  for (int g = 0; g < mr_kv_groups_in(kv).n; g++, value++)
    memcpy(mr_kv_page(kv, s->pages[entry(s, g, pos / MR_KV_BLOCK)]) + 4 * (pos % MR_KV_BLOCK),
           &value, 4);
}

static uint32_t read_at(const mr_kv_seq *s, int group, int pos) {
  uint32_t value;
  memcpy(&value, s->at[entry(s, group, pos / MR_KV_BLOCK)] + 4 * (pos % MR_KV_BLOCK), 4);
  return value - (uint32_t)group;
}

static void check_all(mr_kv *kv, twin *t) {
  uint8_t held[PAGES] = {0};
  int n_held = 0;
  for (int i = 0; i < SEQS; i++) {
    const mr_kv_seq *s = &t[i].seq;
    mr_kv_groups groups = mr_kv_groups_in(kv);
    int there = 0;
    for (int p = 0; p < s->n_blocks * groups.n; p++) {
      int at = entry(s, p % groups.n, p / groups.n), page = s->pages[at];
      assert_int_equal(page, mr_kv_seq_place(kv, s, p));
      if (p % groups.n >= groups.n_full && (p / groups.n + 1) * MR_KV_BLOCK <= s->first) {
        assert_int_equal(page, -1);
        assert_null(s->at[at]);
        continue;
      }
      assert_in_range(page, 0, PAGES - 1);
      assert_ptr_equal(s->at[at], mr_kv_page(kv, page));
      n_held += !held[page];
      held[page] = 1;
      there++;
    }
    assert_int_equal(mr_kv_seq_count(kv, s, 0, mr_kv_seq_places(kv, s)), there);
    for (int g = 0; g < groups.n; g++)
      for (int pos = g < groups.n_full ? 0 : mr_kv_seq_dropped(s) * MR_KV_BLOCK; pos < s->len;
           pos++)
        assert_int_equal(read_at(s, g, pos), t[i].value[pos]);
  }
  assert_int_equal(mr_kv_free_pages(kv), PAGES - n_held);
}

static void append(mr_kv *kv, twin *t, int more, uint64_t *rng) {
  if (t->seq.len + more > MAX_LEN)
    return;
  mr_kv_seq before = t->seq;
  int free_before = mr_kv_free_pages(kv);
  mr_code rc = mr_kv_seq_reserve(kv, &t->seq, more);
  if (rc == MR_E_AGAIN) {
    assert_memory_equal(&before, &t->seq, sizeof before);
    assert_int_equal(mr_kv_free_pages(kv), free_before);
    return;
  }
  assert_int_equal(rc, MR_OK);
  assert_int_equal(t->seq.len, before.len);
  for (int i = 0; i < more; i++) {
    t->value[t->seq.len] = next_random(rng);
    write_at(kv, &t->seq, t->seq.len, t->value[t->seq.len]);
    t->seq.len++;
  }
}

static void one_step(mr_kv *kv, twin *all, uint64_t *rng) {
  twin *t = &all[next_random(rng) % SEQS], *other = &all[next_random(rng) % SEQS];
  switch (next_random(rng) % 8) {
  case 0:
    if (t == other)
      break;
    mr_kv_seq_release(kv, &t->seq);
    mr_kv_seq_share(kv, &t->seq, &other->seq,
                    (int)(next_random(rng) % (unsigned)(other->seq.len + 1)));
    memcpy(t->value, other->value, sizeof t->value);
    break;
  case 1:
    mr_kv_seq_release(kv, &t->seq);
    break;
  case 2:
    mr_kv_seq_drop(kv, &t->seq, (int)(next_random(rng) % (unsigned)(t->seq.len + 1)));
    break;
  case 3: /* refused drafts */
    if (t->seq.len - t->seq.first > 5)
      t->seq.len -= (int)(next_random(rng) % 5);
    break;
  default:
    append(kv, t, 1 + (int)(next_random(rng) % 50), rng);
  }
}

static void random_operations(const mr_config *c) {
  mr_err err = MR_ERR_INIT;
  mr_kv *kv = open_kv_of(c, PAGES);
  static twin all[SEQS];
  for (int i = 0; i < SEQS; i++)
    assert_int_equal(mr_kv_seq_init(kv, &all[i].seq, MAX_LEN, &err), MR_OK);
  int64_t live = mr_mem_live();
  uint64_t rng = 7;
  for (int i = 0; i < 20000; i++) {
    one_step(kv, all, &rng);
    check_all(kv, all);
  }
  assert_int_equal(mr_mem_live(), live);
  for (int i = 0; i < SEQS; i++)
    mr_kv_seq_free(kv, &all[i].seq);
  assert_int_equal(mr_kv_free_pages(kv), PAGES);
  mr_kv_close(kv);
}

static void without_windows(void **state) {
  (void)state;
  random_operations(&config);
}

static void with_windows(void **state) {
  (void)state;
  random_operations(&all_windowed);
}

static void with_some_windows(void **state) {
  (void)state;
  random_operations(&mixed);
}

static void copies_the_shared_last_page_only(void **state) {
  (void)state;
  mr_err err = MR_ERR_INIT;
  mr_kv *kv = open_kv(8);
  mr_kv_seq a, b;
  assert_int_equal(mr_kv_seq_init(kv, &a, 200, &err), MR_OK);
  assert_int_equal(mr_kv_seq_init(kv, &b, 200, &err), MR_OK);
  assert_int_equal(mr_kv_seq_reserve(kv, &a, 70), MR_OK);
  a.len = 70;
  mr_kv_seq_share(kv, &b, &a, 70);
  assert_int_equal(mr_kv_free_pages(kv), 5);
  assert_int_equal(mr_kv_seq_reserve(kv, &b, 0), MR_OK);
  assert_int_equal(mr_kv_free_pages(kv), 5);
  assert_int_equal(mr_kv_seq_reserve(kv, &b, 1), MR_OK);
  assert_int_equal(mr_kv_free_pages(kv), 4);
  assert_int_equal(a.pages[0], b.pages[0]);
  assert_int_equal(a.pages[1], b.pages[1]);
  assert_int_not_equal(a.pages[2], b.pages[2]);
  int32_t own = a.pages[2]; /* now a's alone: no second copy */
  assert_int_equal(mr_kv_seq_reserve(kv, &a, 1), MR_OK);
  assert_int_equal(a.pages[2], own);
  mr_kv_seq_free(kv, &a);
  assert_int_equal(mr_kv_free_pages(kv), 5);
  mr_kv_seq_free(kv, &b);
  mr_kv_close(kv);
}

static void limits(void **state) {
  (void)state;
  mr_err err = MR_ERR_INIT;
  mr_kv *kv = open_kv(2);
  mr_kv_seq s;
  assert_int_equal(mr_kv_seq_init(kv, &s, 90, &err), MR_OK);
  assert_int_equal(mr_kv_seq_reserve(kv, &s, 97), MR_E_INTERNAL);
  assert_int_equal(mr_kv_seq_reserve(kv, &s, INT32_MAX), MR_E_INTERNAL);
  assert_int_equal(mr_kv_seq_reserve(kv, &s, -1), MR_E_INTERNAL);
  assert_int_equal(mr_kv_seq_reserve(kv, &s, 65), MR_E_AGAIN);
  assert_int_equal(mr_kv_seq_reserve(kv, &s, 64), MR_OK);
  assert_int_equal(mr_kv_free_pages(kv), 0);
  mr_kv_seq_free(kv, &s);
  mr_kv_close(kv);
  assert_int_equal(mr_kv_open(&kv, &config, MR_KV_F32, 0, &err), MR_E_INTERNAL);
}

static void sizes(void **state) {
  (void)state;
  assert_int_equal(mr_kv_page_bytes(&config, MR_KV_F32), 2 * 2 * 2 * 32 * 16 * 4);
  assert_int_equal(mr_kv_token_bytes(&config, MR_KV_F32), 2 * 2 * 2 * 16 * 4);
  assert_int_equal(mr_kv_page_bytes(&config, MR_KV_F16), 2 * 2 * 2 * 32 * 16 * 2);
  mr_kv *kv = open_kv(3);
  assert_int_equal(mr_kv_layer_bytes(kv) * 2, mr_kv_page_bytes(&config, MR_KV_F32));
  assert_ptr_equal(mr_kv_page(kv, 2), mr_kv_page(kv, 0) + 2 * mr_kv_page_bytes(&config, MR_KV_F32));
  assert_int_equal((uintptr_t)mr_kv_page(kv, 1) % 64, 0);
  assert_null(mr_kv_page(kv, -1));
  assert_int_equal(mr_kv_total_pages(kv), 3);
  assert_int_equal(mr_kv_type_of(kv), MR_KV_F32);
  mr_kv_close(kv);
}

static void every_allocation_may_fail(void **state) {
  (void)state;
  int64_t live = mr_mem_live();
  mr_code rc = MR_E_NOMEM;
  for (int n = 0; rc != MR_OK; n++) {
    mr_err err = MR_ERR_INIT;
    mr_kv *kv = NULL;
    mr_kv_seq s = {0};
    mr_mem_fail_after(n);
    rc = mr_kv_open(&kv, &config, MR_KV_F16, 4, &err);
    if (!rc)
      rc = mr_kv_seq_init(kv, &s, 100, &err);
    mr_mem_fail_after(-1);
    assert_true(rc == MR_OK || rc == MR_E_NOMEM);
    assert_true(n < 20);
    if (kv)
      mr_kv_seq_free(kv, &s);
    mr_kv_close(kv);
    assert_int_equal(mr_mem_live(), live);
  }
}

/* Own pages come with the first token, stay behind the blocks, and are copied before a second owner
 * writes. */
static void own_pages(void **state) {
  (void)state;
  mr_kv_seq a, b;
  mr_kv *q4;
  mr_err err = MR_ERR_INIT;
  assert_int_equal(mr_kv_open(&q4, &config, MR_KV_Q4, 40, &err), MR_OK);
  int own = mr_kv_own_pages(&config, MR_KV_Q4);
  assert_in_range(own, 1, 4);
  assert_int_equal(mr_kv_own_pages(&config, MR_KV_INT8), 0);
  assert_int_equal(mr_kv_pages_for(q4, 0), 0);
  assert_int_equal(mr_kv_pages_for(q4, 33), 2 + own);
  assert_int_equal(mr_kv_seq_init(q4, &a, 200, &err), MR_OK);
  assert_int_equal(mr_kv_seq_init(q4, &b, 200, &err), MR_OK);
  assert_null(mr_kv_own_parts(q4, &a, 0, 0));
  assert_int_equal(mr_kv_seq_wants(q4, &a, 40), 2 + own);
  assert_int_equal(mr_kv_seq_reserve(q4, &a, 40), MR_OK);
  a.len = 40;
  uint8_t *mine = mr_kv_own_parts(q4, &a, config.n_layers - 1, config.n_kv_heads - 1);
  mine[0] = 7;
  mr_kv_seq_share(q4, &b, &a, 30); /* inside a block that is packed: nothing */
  assert_int_equal(b.len, 0);
  mr_kv_seq_share(q4, &b, &a, 40);
  assert_int_equal(b.len, 40);
  assert_ptr_equal(mr_kv_own_parts(q4, &b, 1, 1), mr_kv_own_parts(q4, &a, 1, 1));
  assert_int_equal(mr_kv_seq_wants(q4, &b, 30), 1 + 1 + own); /* copies, and a block */
  assert_int_equal(mr_kv_seq_reserve(q4, &b, 30), MR_OK);
  assert_int_equal(mr_kv_seq_places(q4, &b), 3 + own);
  assert_int_equal(b.pages[0], a.pages[0]);
  uint8_t *other = mr_kv_own_parts(q4, &b, config.n_layers - 1, config.n_kv_heads - 1);
  assert_ptr_not_equal(other, mine);
  assert_int_equal(other[0], 7);
  a.len = 64;
  mr_kv_seq_append(q4, &a, b.pages, MR_KV_BLOCK);
  assert_int_equal(a.pages[2], b.pages[0]);
  assert_ptr_equal(mr_kv_own_parts(q4, &a, config.n_layers - 1, config.n_kv_heads - 1), mine);
  mr_kv_seq_drop(q4, &a, 96); /* there is no window */
  assert_int_equal(mr_kv_seq_dropped(&a), 0);
  mr_kv_seq_free(q4, &a);
  mr_kv_seq_free(q4, &b);
  assert_int_equal(mr_kv_free_pages(q4), 40);
  mr_kv_close(q4);
}

/* Layers of both kinds in groups of the same size; types that pack only where pages are not padded
 * by much. */
static void groups_of_layers(void **state) {
  (void)state;
  mr_config c = mixed;
  mr_kv_groups g = mr_kv_groups_of(&c, MR_KV_F16);
  assert_true(g.n == 3 && g.n_full == 1 && g.layers == 2 && g.window == 50);
  assert_int_equal(3 * mr_kv_page_bytes(&c, MR_KV_F16), 6 * 2 * 2 * 32 * 16 * 2);
  assert_int_equal(mr_kv_token_bytes(&c, MR_KV_F16), 6 * 2 * 2 * 16 * 2);
  mr_kv *kv = open_kv_of(&c, 9);
  static const int group[] = {1, 0, 1, 2, 0, 2};
  for (int i = 0; i < 6; i++) {
    assert_int_equal(mr_kv_group(kv, i), group[i]);
    assert_int_equal(mr_kv_layer_offset(kv, i) / mr_kv_layer_bytes(kv), i == 2 || i >= 4);
  }
  assert_true(mr_kv_first(kv, 49) == 0 && mr_kv_first(kv, 50) == 1 && mr_kv_first(kv, 99) == 50);
  assert_int_equal(mr_kv_pages_for(kv, 65), 9);
  assert_int_equal(mr_kv_pages_from(kv, 65, 0, 63), 3 + 2 * 2);
  assert_int_equal(mr_kv_pages_from(kv, 65, 1, 64), 2 + 2 * 1);
  mr_kv_close(kv);
  c.head_dim = 32;
  g = mr_kv_groups_of(&c, MR_KV_Q4); /* a page has room for one layer's and head's own parts */
  assert_true(g.n == 3 && mr_kv_own_pages(&c, MR_KV_Q4) == 12);
  c.n_kv_heads = 1; /* ... would have, if it were padded */
  g = mr_kv_groups_of(&c, MR_KV_Q4);
  assert_true(g.n == 1 && g.n_full == 1 && g.window == 0);
  c.window = MAX_LEN; /* it never passes anything */
  assert_int_equal(mr_kv_groups_of(&c, MR_KV_F16).n, 1);
  g = mr_kv_groups_of(&all_windowed, MR_KV_F16);
  assert_true(g.n == 1 && g.n_full == 0 && g.window == 50);
}

/* What is put back behind the window takes no pages there; nor does what is shared from there. */
static void room_behind_a_window(void **state) {
  (void)state;
  mr_err err = MR_ERR_INIT;
  mr_kv *kv = open_kv_of(&mixed, 30);
  mr_kv_seq a, b;
  assert_int_equal(mr_kv_seq_init(kv, &a, MAX_LEN, &err), MR_OK);
  assert_int_equal(mr_kv_seq_init(kv, &b, MAX_LEN, &err), MR_OK);
  mr_kv_seq_drop(kv, &a, 151);
  assert_int_equal(mr_kv_seq_wants(kv, &a, 200), 7 + 2 * 3);
  assert_int_equal(mr_kv_seq_reserve(kv, &a, 200), MR_OK);
  assert_int_equal(mr_kv_free_pages(kv), 30 - 13);
  assert_int_equal(mr_kv_seq_dropped(&a), 4);
  a.len = 200;
  mr_kv_seq_share(kv, &b, &a, 100); /* its window would reach what was dropped */
  assert_int_equal(b.len, 0);
  mr_kv_seq_share(kv, &b, &a, 200);
  assert_true(b.len == 200 && b.first == 151);
  assert_int_equal(mr_kv_free_pages(kv), 30 - 13);
  assert_int_equal(mr_kv_seq_wants(kv, &b, 1), 3); /* a copy of the last block */
  int32_t pages[3];
  mr_kv_seq_block(kv, &a, 0, pages);
  assert_true(pages[0] >= 0 && pages[1] == -1 && pages[2] == -1);
  mr_kv_seq_release(kv, &b);
  assert_true(b.first == 0 && b.n_blocks == 0);
  mr_kv_seq_block(kv, &a, 4, pages);
  mr_kv_seq_drop(kv, &b, 32);
  mr_kv_seq_append(kv, &b, pages, MR_KV_BLOCK); /* as its block 0 */
  assert_true(b.pages[0] == pages[0] && b.pages[entry(&b, 1, 0)] == -1);
  mr_kv_seq_free(kv, &a);
  assert_int_equal(mr_kv_free_pages(kv), 30 - 1);
  mr_kv_seq_free(kv, &b);
  mr_kv_close(kv);
}

/* A loose page is lone while its holder alone has it. */
static void lone_pages(void **state) {
  (void)state;
  mr_err err = MR_ERR_INIT;
  mr_kv *kv = open_kv(4);
  mr_kv_seq s;
  assert_int_equal(mr_kv_seq_init(kv, &s, MAX_LEN, &err), MR_OK);
  assert_int_equal(mr_kv_seq_reserve(kv, &s, 40), MR_OK);
  int32_t page = s.pages[0];
  mr_kv_page_hold(kv, page);
  mr_kv_page_loosen(kv, page, true);
  assert_int_equal(mr_kv_lone_pages(kv), 0);
  mr_kv_seq_release(kv, &s);
  assert_true(mr_kv_page_lone(kv, page) && mr_kv_lone_pages(kv) == 1);
  mr_kv_seq_append(kv, &s, &page, MR_KV_BLOCK);
  assert_int_equal(mr_kv_lone_pages(kv), 0);
  mr_kv_seq_release(kv, &s);
  mr_kv_page_loosen(kv, page, false);
  assert_int_equal(mr_kv_lone_pages(kv), 0);
  mr_kv_page_loosen(kv, page, true);
  assert_int_equal(mr_kv_lone_pages(kv), 1);
  mr_kv_page_drop(kv, page);
  assert_int_equal(mr_kv_lone_pages(kv), 0);
  assert_int_equal(mr_kv_free_pages(kv), 4);
  assert_int_equal(mr_kv_seq_reserve(kv, &s, 4 * MR_KV_BLOCK), MR_OK);
  assert_int_equal(mr_kv_lone_pages(kv), 0); /* who has it next knows nothing of that */
  mr_kv_seq_free(kv, &s);
  mr_kv_close(kv);
}

/* Pages that nobody has had are held back; those that were had come and go. */
static void held_back(void **state) {
  (void)state;
  mr_kv *kv = open_kv(PAGES);
  mr_kv_seq a, b;
  mr_err err = MR_ERR_INIT;
  assert_int_equal(mr_kv_seq_init(kv, &a, MAX_LEN, &err), MR_OK);
  assert_int_equal(mr_kv_seq_init(kv, &b, MAX_LEN, &err), MR_OK);
  assert_int_equal(mr_kv_seq_reserve(kv, &a, 3 * MR_KV_BLOCK), MR_OK);
  mr_kv_seq_release(kv, &a);
  assert_int_equal(mr_kv_seq_reserve(kv, &a, MR_KV_BLOCK), MR_OK);
  mr_kv_hold_back(kv, true);
  assert_int_equal(mr_kv_total_pages(kv), 3);
  assert_int_equal(mr_kv_most_pages(kv), PAGES);
  assert_int_equal(mr_kv_free_pages(kv), 2);
  assert_int_equal(mr_kv_seq_reserve(kv, &b, 2 * MR_KV_BLOCK + 1), MR_E_AGAIN);
  assert_int_equal(mr_kv_seq_reserve(kv, &b, 2 * MR_KV_BLOCK), MR_OK);
  assert_int_equal(mr_kv_free_pages(kv), 0);
  mr_kv_seq_free(kv, &a);
  assert_int_equal(mr_kv_free_pages(kv), 1);
  mr_kv_hold_back(kv, false);
  assert_int_equal(mr_kv_free_pages(kv), PAGES - 2);
  mr_kv_seq_free(kv, &b);
  mr_kv_close(kv);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(without_windows),
      cmocka_unit_test(with_windows),
      cmocka_unit_test(with_some_windows),
      cmocka_unit_test(groups_of_layers),
      cmocka_unit_test(room_behind_a_window),
      cmocka_unit_test(lone_pages),
      cmocka_unit_test(copies_the_shared_last_page_only),
      cmocka_unit_test(limits),
      cmocka_unit_test(held_back),
      cmocka_unit_test(sizes),
      cmocka_unit_test(every_allocation_may_fail),
      cmocka_unit_test(own_pages),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
