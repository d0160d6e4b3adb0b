/* prefix.h: the radix tree over prompts: whose keys and values are stored, and who is computing
 * them.
 *
 * A node is one block of MR_KV_BLOCK tokens after its parent's; the way from the root spells the
 * beginning of a prompt. A node holds the block's pages once some request has computed it
 * (published), until they are needed for something else. A request acquires the chain of nodes of
 * its prompt when it comes and releases it when it goes:
 *
 *     mr_prefix_room(p, blocks)                        room for its nodes; the only allocation
 *     mr_prefix_acquire(p, tree, tokens, n, wide, chain)    finds nodes, makes those not there
 *     for each block, when the blocks before it are in the request's block table:
 *       mr_prefix_pages(p, chain[i])        they are there: share them by reference
 *       mr_prefix_claim(p, chain[i], age)   true: compute it; false: an older request does, wait
 *       mr_prefix_publish(p, chain[i], pages, age)     after it was computed
 *     mr_prefix_release(p, chain, n, wide, age)
 *
 * Ages are numbers from 1 that grow in order of admission. An older request takes a claim over from
 * a younger one, so nobody waits for somebody younger. Nodes that no request holds keep their pages
 * as long as nobody else needs them: mr_prefix_evict gives those back first that nobody is known to
 * want again (the least recently released of them), then those that are wanted last (Belady 1966).
 * A page is shared by reference and never written. Nothing here can fail but mr_prefix_room.
 *
 * Where some layers have a window (kvcache.h: groups) a node may lose their pages alone: it is
 * whole no more. That happens to nodes that no request holds `wide`, once no block table has the
 * pages: first to those that are spent: that lie a window and more before the next place where a
 * request is known to leave the chain, so that none will read them, as far as is known. A request
 * that goes on after a block needs whole nodes only for the window before that.
 */
#ifndef MR_SRC_PREFIX_H
#define MR_SRC_PREFIX_H

#include "src/kvcache.h"

typedef struct mr_prefix mr_prefix;

mr_code mr_prefix_open(mr_prefix **out, mr_kv *kv, mr_err *err);
void mr_prefix_close(mr_prefix *p); /* gives back the pages; NULL is fine */

/* Room for `more` nodes beyond those that exist or were asked for. MR_E_NOMEM. */
mr_code mr_prefix_room(mr_prefix *p, int more, mr_err *err);
/* The requests that asked for room are gone. */
void mr_prefix_unroom(mr_prefix *p, int more);

/* `tree`: prompts of different trees share nothing (the same tokens have other keys under another
 * adapter). Of the first n blocks of `tokens`: how many are held by no request yet, so would be
 * acquired for the first time. */
int mr_prefix_unheld(const mr_prefix *p, int tree, const int32_t *tokens, int n);
int mr_prefix_unwide(const mr_prefix *p, int tree, const int32_t *tokens, int n); /* ... wide */
/* wide: the nodes keep all of their pages as long; release is told the same. */
void mr_prefix_acquire(mr_prefix *p, int tree, const int32_t *tokens, int n, bool wide,
                       int32_t *chain);
void mr_prefix_release(mr_prefix *p, const int32_t *chain, int n, bool wide, uint64_t age);

/* [groups]; -1: not computed yet, or not there any more. */
const int32_t *mr_prefix_pages(const mr_prefix *p, int32_t node);
bool mr_prefix_computed(const mr_prefix *p, int32_t node);
bool mr_prefix_whole(const mr_prefix *p, int32_t node); /* computed, and all pages are there */
bool mr_prefix_claim(mr_prefix *p, int32_t node, uint64_t age);
/* A block's pages [groups]: the node takes those that it does not have. Those that it has are to be
 * had in their place. A node after one that was not computed takes none. */
void mr_prefix_publish(mr_prefix *p, int32_t node, const int32_t *pages, uint64_t age);

/* The longest beginning of `tokens` (n of them) that some whole node after `parent` (-1: the root)
 * begins with: a request may share its pages and go on in a copy. Returns its length, 0 without
 * one; looks at a bounded number of blocks. */
int mr_prefix_partial(const mr_prefix *p, int tree, int32_t parent, const int32_t *tokens, int n,
                      int32_t *node);

/* A node that was not computed yet: whether this is the first time that anybody asks. */
bool mr_prefix_first_look(mr_prefix *p, int32_t node);
/* The node's pages came from a store, and need not go there. */
void mr_prefix_came_from_store(mr_prefix *p, int32_t node);

/* Calls keep(ctx, tree, tokens, n, pages) for a whole block that more than one request had, with
 * all tokens up to its end: when pages of it are evicted, and with mr_prefix_keep_all, in which a
 * block comes after those before it, and which ends early when keep returns false. */
typedef bool (*mr_prefix_keep)(void *ctx, int tree, const int32_t *tokens, int n,
                               const int32_t *pages);
void mr_prefix_on_evict(mr_prefix *p, mr_prefix_keep keep, void *ctx);
void mr_prefix_keep_all(mr_prefix *p);

/* A request that will come as number `when` (they grow) has these first n blocks, whether they are
 * stored or not; and it has come: the next one that is known may come at `next`. Hints only. */
void mr_prefix_expect(mr_prefix *p, int tree, const int32_t *tokens, int n, uint64_t when);
void mr_prefix_came(mr_prefix *p, int tree, const int32_t *tokens, int n, uint64_t next);

/* Gives back about n pages that no request needs, and all of spent nodes; returns how many. */
int mr_prefix_evict(mr_prefix *p, int n);
/* How many of a chain's first n nodes other requests hold, too. */
int mr_prefix_common(const mr_prefix *p, const int32_t *chain, int n);
int mr_prefix_held(const mr_prefix *p);   /* pages that nodes have or will have by requests */
int mr_prefix_cached(const mr_prefix *p); /* pages that evict could give back */

#endif
