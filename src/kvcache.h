/* kvcache.h: paged keys and values: a pool of pages with reference counts, and the block table of a
 * sequence.
 *
 * A block is MR_KV_BLOCK tokens of one sequence. Its layers are in groups of as many layers each,
 * and a page holds a block of one group, contiguous (one copy moves it): inside it for each layer
 * and kv head its K part, then its V part (kernels/kernels.h). Where some layers have a sliding
 * window and others have none, a group is of one kind: groups without a window come first, and the
 * pages of the others are given back alone once the window has passed their block. All other models
 * have one group of all layers.
 *
 * Types that pack a block once it is full (mr_kv_packs) keep the tokens of the block that is not in
 * `own` pages: there as soon as the sequence has room for a token, a few of the same pages whatever
 * its length. Sequences share full pages by reference (a prompt's choices, continuations, shared
 * prefixes); a partly filled page is copied before it is written by a second owner. No allocation
 * after mr_kv_open and mr_kv_seq_init.
 *
 * Where a sequence is put away page by page its places are numbered: the pages of each block, block
 * after block, then the own pages.
 */
#ifndef MR_SRC_KVCACHE_H
#define MR_SRC_KVCACHE_H

#include <stdbool.h>
#include <stdint.h>

#include "io/err.h"
#include "kernels/kernels.h"
#include "src/config.h"

typedef struct mr_kv mr_kv;

typedef struct mr_kv_seq { /* block table of one sequence; block i holds positions 32i.. */
  int32_t *pages;          /* [groups, cap_blocks] page numbers, -1 where dropped; owned */
  const uint8_t **at;      /* the same: address of each page, NULL where dropped; owned */
  int32_t *own;            /* [n_own] own pages; behind pages */
  int n_blocks, cap_blocks;
  int n_own;     /* 0, or as many as the type wants */
  int first;     /* layers with a window read no position below it (and write none) */
  int long_rope; /* 1: the prompt is longer than the original context (longrope) */
  int len; /* tokens stored; a caller may lower it (drafts that were refused) within a block */
} mr_kv_seq;

/* Blocks whose pages of layers with a window are given back: the first ones. */
static inline int mr_kv_seq_dropped(const mr_kv_seq *s) {
  int n = s->first / MR_KV_BLOCK;
  return n < s->n_blocks ? n : s->n_blocks;
}

/* How the layers of a model are grouped. */
typedef struct mr_kv_groups {
  int n, n_full; /* groups; of these, without a window: the first ones */
  int layers;    /* a group */
  int window;    /* of the others; 0: there are none */
} mr_kv_groups;

mr_kv_groups mr_kv_groups_of(const mr_config *c, mr_kv_type type);
size_t mr_kv_page_bytes(const mr_config *c, mr_kv_type type);
size_t mr_kv_token_bytes(const mr_config *c, mr_kv_type type); /* its share of a block */
int mr_kv_own_pages(const mr_config *c, mr_kv_type type);      /* of a sequence */

/* Where pages lie, if not in the host's memory: addresses of pages then belong to a device, and
 * only these calls read or write them. Each copies a page's bytes and waits for it. */
typedef struct mr_kv_memory {
  void *ctx;
  void *(*take)(void *ctx, size_t bytes); /* for as long as ctx lives; NULL: no room */
  mr_code (*copy)(void *ctx, void *dst, const void *src, size_t bytes);
  mr_code (*to_host)(void *ctx, void *dst, const void *src, size_t bytes);
  mr_code (*from_host)(void *ctx, void *dst, const void *src, size_t bytes);
  /* Beside the work of a step; staged 0: not there. A page goes out through one of `staged` places:
   * stage copies it into one, depart sends places on, and the pages may be written again; after
   * arrive_out they are at staged_at. Pages come in by send, from room (NULL: no memory), and are
   * there after arrive_in. */
  int staged;
  mr_code (*stage)(void *ctx, int place, const void *src, size_t bytes);
  mr_code (*depart)(void *ctx, int from, int end, size_t bytes);
  mr_code (*arrive_out)(void *ctx);
  const void *(*staged_at)(void *ctx, int place, size_t bytes);
  void *(*room)(void *ctx, size_t bytes);
  void (*room_free)(void *ctx, void *room);
  mr_code (*send)(void *ctx, void *dst, const void *src, size_t bytes);
  mr_code (*arrive_in)(void *ctx);
} mr_kv_memory;

/* n_pages pages in one allocation. memory: borrowed; NULL: the host's. */
mr_code mr_kv_open(mr_kv **out, const mr_config *c, mr_kv_type type, int n_pages, mr_err *err);
mr_code mr_kv_open_on(mr_kv **out, const mr_config *c, mr_kv_type type, int n_pages,
                      const mr_kv_memory *memory, mr_err *err);
void mr_kv_close(mr_kv *kv);
/* Before the first use: all pages are written once, so that the system has given them. */
void mr_kv_touch(mr_kv *kv);
int mr_kv_free_pages(const mr_kv *kv);
int mr_kv_total_pages(const mr_kv *kv); /* without those that are held back */
int mr_kv_most_pages(const mr_kv *kv);  /* with them */
/* The machine runs short of memory: pages that nobody has had yet are held back, so that the cache
 * grows no further; or (false) they may be had again. */
void mr_kv_hold_back(mr_kv *kv, bool yes);
mr_kv_type mr_kv_type_of(const mr_kv *kv);
mr_kv_groups mr_kv_groups_in(const mr_kv *kv);
int mr_kv_group(const mr_kv *kv, int layer);           /* that holds it */
size_t mr_kv_layer_offset(const mr_kv *kv, int layer); /* in a page of its group */
/* The first position that layers with a window read for the token at pos. */
int mr_kv_first(const mr_kv *kv, int pos);
int mr_kv_pages_for(const mr_kv *kv, int64_t tokens); /* of one sequence, own pages too */
/* The same without blocks below `block`, and without what lies before position `first` in layers
 * with a window. */
int mr_kv_pages_from(const mr_kv *kv, int64_t tokens, int block, int first);
/* K and V parts of the block that s->len lies in, as MR_KV_OWN_TYPE; NULL: its page has them. */
uint8_t *mr_kv_own_parts(const mr_kv *kv, const mr_kv_seq *s, int layer, int head);
size_t mr_kv_layer_bytes(const mr_kv *kv);
size_t mr_kv_size_of_page(const mr_kv *kv);         /* bytes */
uint8_t *mr_kv_page(const mr_kv *kv, int32_t page); /* its address, a device's or the host's */
bool mr_kv_on_device(const mr_kv *kv);
const mr_kv_memory *mr_kv_memory_of(const mr_kv *kv); /* NULL: the host's */
/* A page's bytes on the host: where they are, or copied into room (page bytes); NULL: the device
 * could not. */
const void *mr_kv_view(const mr_kv *kv, int32_t page, void *room);
/* Bytes of the host's memory into a page. MR_OK, or the device's error. */
mr_code mr_kv_write(const mr_kv *kv, int32_t page, const void *from);

/* A holder beside the block tables (the prefix tree): the page stays until it is dropped. It may
 * say of a page that it gives it up when asked (loose); such a page is lone while nobody else has
 * it. */
void mr_kv_page_hold(mr_kv *kv, int32_t page);
void mr_kv_page_drop(mr_kv *kv, int32_t page);
void mr_kv_page_loosen(mr_kv *kv, int32_t page, bool loose);
bool mr_kv_page_lone(const mr_kv *kv, int32_t page);
int mr_kv_lone_pages(const mr_kv *kv);

/* A block table with room for max_len tokens; owns no pages yet. */
mr_code mr_kv_seq_init(const mr_kv *kv, mr_kv_seq *s, int max_len, mr_err *err);
int mr_kv_seq_places(const mr_kv *kv, const mr_kv_seq *s);
int32_t mr_kv_seq_place(const mr_kv *kv, const mr_kv_seq *s, int place); /* its page, or -1 */
/* Pages at places from .. end - 1. */
int mr_kv_seq_count(const mr_kv *kv, const mr_kv_seq *s, int from, int end);
/* Pages that reserve would take for `more` tokens. */
int mr_kv_seq_wants(const mr_kv *kv, const mr_kv_seq *s, int more);
/* Makes room for `more` tokens after s->len: takes pages, copies a shared last block. MR_E_AGAIN
 * (nothing changed) when too few are free, MR_E_INTERNAL past max_len. Does not change s->len; the
 * forward pass does. */
mr_code mr_kv_seq_reserve(mr_kv *kv, mr_kv_seq *s, int more);
/* dst (initialized, empty, its max_len no smaller than len) shares the first `len` <= src->len
 * tokens of src by reference; fewer where they end inside a block that is packed; nothing
 * (dst->len 0) where src has dropped pages past them. */
void mr_kv_seq_share(mr_kv *kv, mr_kv_seq *dst, const mr_kv_seq *src, int len);
/* Goes on with `n` (1 to MR_KV_BLOCK, all of them if types pack) tokens of a block that others
 * hold, by reference; pages: [groups], -1 only below s->first. s->len must be a multiple of
 * MR_KV_BLOCK and below max_len. */
void mr_kv_seq_append(mr_kv *kv, mr_kv_seq *s, const int32_t *pages, int n);
/* The pages [groups] of block i, -1 where dropped; and holds others in place of those that it has:
 * the same keys and values, stored once. */
void mr_kv_seq_block(const mr_kv *kv, const mr_kv_seq *s, int i, int32_t *pages);
void mr_kv_seq_replace(mr_kv *kv, mr_kv_seq *s, int i, const int32_t *pages);
/* No window will read a position below `first` any more, stored already or yet to be brought: pages
 * of layers with windows that lie below it are given back, or not taken. */
void mr_kv_seq_drop(mr_kv *kv, mr_kv_seq *s, int first);
/* Gives back the pages; len = 0. */
void mr_kv_seq_release(mr_kv *kv, mr_kv_seq *s);
void mr_kv_seq_free(mr_kv *kv, mr_kv_seq *s); /* release and the table itself */

#endif
