#include "src/prefix.h"

#include <string.h>

#include "io/hash.h"
#include "io/mem.h"
#include "src/nextuse.h"

#define NONE (-1)
#define SIBLINGS 64 /* looked at for a common beginning */

/* Invariants
 * 1. refs of a node >= refs of each of its children: chains begin at the root. So a node that is
 * held has held ancestors, and a stored node has stored ancestors.
 * 2. A node with refs == 0 is computed and in the list of idle ones (else it is removed), children
 * before their parents: chains are released from their end.
 * 3. n_nodes <= cap - 1 where cap covers n_pages + `roomed`.
 * 4. The first `kept` pages of a node are all there (it is computed) or none, and so are the
 * others; these are loose iff wide == 0. */
typedef struct node {
  uint64_t hash;                           /* of the parent's hash and the tokens */
  uint64_t owner;                          /* age of who computes it; 0: nobody */
  int32_t parent, first_child, next, prev; /* siblings; `next` links free nodes, too */
  int32_t idle_next, idle_prev;
  int32_t refs, wide; /* requests; of these, that hold it wide */
  int32_t tree;
  int32_t slot_next; /* of the hash table */
  bool shared;       /* more than one request had it */
  bool looked;       /* for it in the store */
  bool stored;       /* it is there */
  int32_t tokens[MR_KV_BLOCK];
} node;

struct mr_prefix {
  mr_kv *kv;
  node *nodes; /* [cap] */
  size_t cap;
  int32_t *pages; /* [cap, groups] */
  size_t cap_pages;
  int groups, kept; /* pages of a node; of these, not given up alone */
  int reach;        /* blocks that a window reaches back */
  int32_t *slots;   /* [n_slots] heads of chains; a power of two */
  size_t n_slots;
  int32_t free, root_child;
  int32_t idle_first, idle_last;
  int n_nodes, n_held, n_wide, n_idle;
  int unspent;    /* lone pages that the last sweep left */
  int64_t roomed; /* nodes that live requests may make */
  mr_nextuse future;
  mr_prefix_keep keep;
  void *keep_ctx;
  int32_t *tokens; /* for keep; grown */
  size_t cap_tokens;
};

/* ---------------------------------------------------------------- memory */

static size_t slot_of(const mr_prefix *p, uint64_t hash) {
  return (size_t)hash & (p->n_slots - 1);
}

static void free_from(mr_prefix *p, size_t first) {
  for (size_t i = p->cap; i-- > first;) {
    p->nodes[i].next = p->free;
    p->free = (int32_t)i;
  }
}

static bool rehash(mr_prefix *p, size_t want) {
  size_t n = p->n_slots ? p->n_slots : 64;
  while (n < want)
    n *= 2;
  if (n == p->n_slots)
    return true;
  int32_t *slots = mr_mem_alloc(n, sizeof *slots);
  if (!slots)
    return false;
  memset(slots, 0xff, n * sizeof *slots); /* NONE */
  int32_t *old = p->slots;
  size_t n_old = p->n_slots;
  p->slots = slots;
  p->n_slots = n;
  for (size_t i = 0; i < n_old; i++)
    for (int32_t at = old[i], next; at != NONE; at = next) {
      next = p->nodes[at].slot_next;
      p->nodes[at].slot_next = slots[slot_of(p, p->nodes[at].hash)];
      slots[slot_of(p, p->nodes[at].hash)] = at;
    }
  mr_mem_free(old);
  return true;
}

static bool grow(mr_prefix *p, int64_t want) {
  size_t cap = p->cap, had = p->cap;
  if (want > INT32_MAX / 2)
    return false;
  if ((size_t)want > cap && !mr_mem_grow((void **)&p->nodes, &cap, (size_t)want, sizeof *p->nodes))
    return false;
  if (!mr_mem_grow((void **)&p->pages, &p->cap_pages, cap * (size_t)p->groups, sizeof *p->pages))
    return false;
  if (cap > had) {
    p->cap = cap;
    free_from(p, had);
  }
  return rehash(p, (size_t)want);
}

mr_code mr_prefix_open(mr_prefix **out, mr_kv *kv, mr_err *err) {
  mr_prefix *p = mr_mem_alloc(1, sizeof *p);
  if (!p)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for the tree of prefixes");
  mr_kv_groups g = mr_kv_groups_in(kv);
  p->kv = kv;
  p->groups = g.n;
  p->kept = g.n_full ? g.n_full : g.n;
  p->reach = (g.window + MR_KV_BLOCK - 2) / MR_KV_BLOCK;
  p->free = p->root_child = p->idle_first = p->idle_last = NONE;
  *out = p;
  return MR_OK;
}

void mr_prefix_close(mr_prefix *p) {
  if (!p)
    return;
  p->keep = NULL;
  mr_prefix_evict(p, mr_kv_most_pages(p->kv));
  mr_nextuse_free(&p->future);
  mr_mem_free(p->tokens);
  mr_mem_free(p->nodes);
  mr_mem_free(p->pages);
  mr_mem_free(p->slots);
  mr_mem_free(p);
}

mr_code mr_prefix_room(mr_prefix *p, int more, mr_err *err) {
  /* beside the held nodes only such with pages exist */
  if (!grow(p, p->roomed + more + mr_kv_most_pages(p->kv) + 1))
    return mr_err_set(err, MR_E_NOMEM, "out of memory for the tree of prefixes");
  p->roomed += more;
  return MR_OK;
}

void mr_prefix_unroom(mr_prefix *p, int more) {
  p->roomed -= more;
}

/* ---------------------------------------------------------------- nodes */

static uint64_t next_hash(uint64_t before, const int32_t *tokens) {
  struct {
    uint64_t before;
    int32_t tokens[MR_KV_BLOCK];
  } key = {before, {0}};
  memcpy(key.tokens, tokens, sizeof key.tokens);
  return mr_hash_64(&key, sizeof key);
}

static uint64_t hash_of(const mr_prefix *p, int tree, int32_t parent, const int32_t *tokens) {
  return next_hash(parent == NONE ? (uint64_t)tree : p->nodes[parent].hash, tokens);
}

static int32_t find(const mr_prefix *p, int tree, int32_t parent, const int32_t *tokens,
                    uint64_t hash) {
  int32_t at = p->n_slots ? p->slots[slot_of(p, hash)] : NONE;
  for (; at != NONE; at = p->nodes[at].slot_next) {
    const node *n = &p->nodes[at];
    if (n->hash == hash && n->parent == parent && n->tree == tree &&
        !memcmp(n->tokens, tokens, sizeof n->tokens))
      return at;
  }
  return NONE;
}

static int32_t *first_child(mr_prefix *p, int32_t parent) {
  return parent == NONE ? &p->root_child : &p->nodes[parent].first_child;
}

static int32_t *pages_of(const mr_prefix *p, int32_t at) {
  return &p->pages[(size_t)at * (size_t)p->groups];
}

static int32_t make(mr_prefix *p, int tree, int32_t parent, const int32_t *tokens, uint64_t hash) {
  int32_t at = p->free, *children = first_child(p, parent);
  node *n = &p->nodes[at];
  p->free = n->next;
  *n = (node){.hash = hash,
              .tree = tree,
              .parent = parent,
              .first_child = NONE,
              .next = *children,
              .prev = NONE,
              .idle_next = NONE,
              .idle_prev = NONE,
              .slot_next = p->slots[slot_of(p, hash)]};
  memcpy(n->tokens, tokens, sizeof n->tokens);
  for (int g = 0; g < p->groups; g++)
    pages_of(p, at)[g] = NONE;
  if (*children != NONE)
    p->nodes[*children].prev = at;
  *children = at;
  p->slots[slot_of(p, hash)] = at;
  p->n_nodes++;
  return at;
}

/* A leaf that is not in the idle list. */
static void discard(mr_prefix *p, int32_t at) {
  node *n = &p->nodes[at];
  int32_t *link = &p->slots[slot_of(p, n->hash)];
  while (*link != at)
    link = &p->nodes[*link].slot_next;
  *link = n->slot_next;
  if (n->prev == NONE)
    *first_child(p, n->parent) = n->next;
  else
    p->nodes[n->prev].next = n->next;
  if (n->next != NONE)
    p->nodes[n->next].prev = n->prev;
  n->next = p->free;
  p->free = at;
  p->n_nodes--;
}

static void idle_add(mr_prefix *p, int32_t at) {
  node *n = &p->nodes[at];
  n->idle_prev = p->idle_last;
  n->idle_next = NONE;
  *(p->idle_last == NONE ? &p->idle_first : &p->nodes[p->idle_last].idle_next) = at;
  p->idle_last = at;
  p->n_idle++;
}

static void idle_remove(mr_prefix *p, int32_t at) {
  node *n = &p->nodes[at];
  *(n->idle_prev == NONE ? &p->idle_first : &p->nodes[n->idle_prev].idle_next) = n->idle_next;
  *(n->idle_next == NONE ? &p->idle_last : &p->nodes[n->idle_next].idle_prev) = n->idle_prev;
  p->n_idle--;
}

/* ---------------------------------------------------------------- chains */

/* Blocks of a prompt from the first one on that no request holds, or holds wide. */
static int count_new(const mr_prefix *p, int tree, const int32_t *tokens, int n, bool wide) {
  int32_t parent = NONE;
  for (int i = 0; i < n; i++) {
    const int32_t *block = tokens + (size_t)i * MR_KV_BLOCK;
    parent = find(p, tree, parent, block, hash_of(p, tree, parent, block));
    if (parent == NONE || (wide ? p->nodes[parent].wide : p->nodes[parent].refs) == 0)
      return n - i;
  }
  return 0;
}

int mr_prefix_unheld(const mr_prefix *p, int tree, const int32_t *tokens, int n) {
  return count_new(p, tree, tokens, n, false);
}

int mr_prefix_unwide(const mr_prefix *p, int tree, const int32_t *tokens, int n) {
  return count_new(p, tree, tokens, n, true);
}

static void loosen(mr_prefix *p, int32_t at, bool loose) {
  for (int g = p->kept; mr_prefix_whole(p, at) && g < p->groups; g++)
    mr_kv_page_loosen(p->kv, pages_of(p, at)[g], loose);
}

void mr_prefix_acquire(mr_prefix *p, int tree, const int32_t *tokens, int n, bool wide,
                       int32_t *chain) {
  int32_t parent = NONE;
  for (int i = 0; i < n; i++) {
    const int32_t *block = tokens + (size_t)i * MR_KV_BLOCK;
    uint64_t hash = hash_of(p, tree, parent, block);
    int32_t at = find(p, tree, parent, block, hash);
    if (at == NONE)
      at = make(p, tree, parent, block, hash);
    else
      p->nodes[at].shared = true;
    if (p->nodes[at].refs == 0 && mr_prefix_computed(p, at))
      idle_remove(p, at);
    p->n_held += p->nodes[at].refs++ == 0;
    if (wide && p->nodes[at].wide++ == 0) {
      p->n_wide++;
      loosen(p, at, false);
    }
    chain[i] = parent = at;
  }
}

void mr_prefix_release(mr_prefix *p, const int32_t *chain, int n, bool wide, uint64_t age) {
  for (int i = n - 1; i >= 0; i--) {
    node *at = &p->nodes[chain[i]];
    if (at->owner == age)
      at->owner = 0;
    if (wide && --at->wide == 0) {
      p->n_wide--;
      loosen(p, chain[i], true);
    }
    if (--at->refs > 0)
      continue;
    p->n_held--;
    if (mr_prefix_computed(p, chain[i]))
      idle_add(p, chain[i]);
    else
      discard(p, chain[i]);
  }
}

/* ---------------------------------------------------------------- pages */

const int32_t *mr_prefix_pages(const mr_prefix *p, int32_t at) {
  return pages_of(p, at);
}

bool mr_prefix_computed(const mr_prefix *p, int32_t at) {
  return pages_of(p, at)[0] != NONE;
}

bool mr_prefix_whole(const mr_prefix *p, int32_t at) {
  return mr_prefix_computed(p, at) && pages_of(p, at)[p->groups - 1] != NONE;
}

bool mr_prefix_claim(mr_prefix *p, int32_t at, uint64_t age) {
  node *n = &p->nodes[at];
  if (n->owner && n->owner < age)
    return false;
  n->owner = age;
  return true;
}

static void take_pages(mr_prefix *p, int32_t at, const int32_t *pages, int from, int end) {
  int32_t *mine = pages_of(p, at);
  if (from == end || mine[from] != NONE || pages[from] == NONE)
    return;
  for (int g = from; g < end; g++) {
    mine[g] = pages[g];
    mr_kv_page_hold(p->kv, pages[g]);
  }
}

void mr_prefix_publish(mr_prefix *p, int32_t at, const int32_t *pages, uint64_t age) {
  node *n = &p->nodes[at];
  if (n->owner == age)
    n->owner = 0;
  if (n->parent != NONE && !mr_prefix_computed(p, n->parent))
    return;
  bool whole = mr_prefix_whole(p, at);
  take_pages(p, at, pages, 0, p->kept);
  if (mr_prefix_computed(p, at))
    take_pages(p, at, pages, p->kept, p->groups);
  if (!whole && n->wide == 0)
    loosen(p, at, true);
}

int mr_prefix_partial(const mr_prefix *p, int tree, int32_t parent, const int32_t *tokens, int n,
                      int32_t *best_at) {
  int best = 0;
  int32_t at = parent == NONE ? p->root_child : p->nodes[parent].first_child;
  if (n > MR_KV_BLOCK)
    n = MR_KV_BLOCK;
  for (int seen = 0; at != NONE && seen < SIBLINGS; at = p->nodes[at].next, seen++) {
    const node *c = &p->nodes[at];
    int same = 0;
    if (c->tree != tree || !mr_prefix_whole(p, at))
      continue;
    while (same < n && c->tokens[same] == tokens[same])
      same++;
    if (same > best) {
      best = same;
      *best_at = at;
    }
  }
  return best;
}

/* ---------------------------------------------------------------- what outlasts the run */

bool mr_prefix_first_look(mr_prefix *p, int32_t at) {
  bool first = !p->nodes[at].looked;
  p->nodes[at].looked = true;
  return first;
}

void mr_prefix_came_from_store(mr_prefix *p, int32_t at) {
  p->nodes[at].stored = true;
}

void mr_prefix_on_evict(mr_prefix *p, mr_prefix_keep keep, void *ctx) {
  p->keep = keep;
  p->keep_ctx = ctx;
}

static bool keep_node(mr_prefix *p, int32_t at) {
  int depth = 0, i;
  if (!p->keep || !p->nodes[at].shared || p->nodes[at].stored || !mr_prefix_whole(p, at))
    return true;
  for (int32_t up = at; up != NONE; up = p->nodes[up].parent)
    depth++;
  if (!mr_mem_grow((void **)&p->tokens, &p->cap_tokens, (size_t)depth * MR_KV_BLOCK,
                   sizeof *p->tokens))
    return false;
  i = depth;
  for (int32_t up = at; up != NONE; up = p->nodes[up].parent)
    memcpy(p->tokens + (size_t)--i * MR_KV_BLOCK, p->nodes[up].tokens, sizeof p->nodes[up].tokens);
  p->nodes[at].stored = true;
  return p->keep(p->keep_ctx, p->nodes[at].tree, p->tokens, depth * MR_KV_BLOCK, pages_of(p, at));
}

/* The node after `at` where parents come before their children; NONE: it was the last. */
static int32_t next_node(const mr_prefix *p, int32_t at) {
  if (p->nodes[at].first_child != NONE)
    return p->nodes[at].first_child;
  while (at != NONE && p->nodes[at].next == NONE)
    at = p->nodes[at].parent;
  return at == NONE ? NONE : p->nodes[at].next;
}

void mr_prefix_keep_all(mr_prefix *p) {
  int32_t at = p->root_child;
  while (at != NONE && keep_node(p, at))
    at = next_node(p, at);
}

/* ---------------------------------------------------------------- what is known of the future */

void mr_prefix_expect(mr_prefix *p, int tree, const int32_t *tokens, int n, uint64_t when) {
  uint64_t hash = (uint64_t)tree;
  for (int i = 0; i < n; i++) {
    hash = next_hash(hash, tokens + (size_t)i * MR_KV_BLOCK);
    mr_nextuse_add(&p->future, hash, when);
  }
}

void mr_prefix_came(mr_prefix *p, int tree, const int32_t *tokens, int n, uint64_t next) {
  uint64_t hash = (uint64_t)tree;
  for (int i = 0; i < n; i++) {
    hash = next_hash(hash, tokens + (size_t)i * MR_KV_BLOCK);
    mr_nextuse_remove(&p->future, hash, next);
  }
}

/* Of the idle leaves the one that is wanted last, or the first in their order that nobody wants.
 * There is a leaf: children of an idle node are idle. */
static int32_t victim(const mr_prefix *p) {
  int32_t best = NONE;
  uint64_t latest = 0;
  for (int32_t at = p->idle_first; at != NONE; at = p->nodes[at].idle_next) {
    if (p->nodes[at].first_child != NONE)
      continue;
    uint64_t when = mr_nextuse_of(&p->future, p->nodes[at].hash);
    if (when == MR_NEVER)
      return at;
    if (best == NONE || when > latest) {
      latest = when;
      best = at;
    }
  }
  return best;
}

static int drop_pages(mr_prefix *p, int32_t at, int from, int end) {
  int32_t *pages = pages_of(p, at);
  int n = 0;
  for (int g = from; g < end; g++) {
    if (pages[g] == NONE)
      continue;
    mr_kv_page_loosen(p->kv, pages[g], false);
    mr_kv_page_drop(p->kv, pages[g]);
    pages[g] = NONE;
    n++;
  }
  return n;
}

/* The pages of layers with a window, where nobody else has them. */
static int give_up(mr_prefix *p, int32_t at) {
  if (p->kept == p->groups || !mr_prefix_whole(p, at) ||
      !mr_kv_page_lone(p->kv, pages_of(p, at)[p->kept]))
    return 0;
  keep_node(p, at);
  p->nodes[at].looked = !p->nodes[at].stored; /* they may be had again */
  return drop_pages(p, at, p->kept, p->groups);
}

/* Whether some request goes no further than this block, or may go another way after it. */
static bool some_leave(const mr_prefix *p, int32_t at) {
  const node *n = &p->nodes[at];
  if (n->first_child == NONE || p->nodes[n->first_child].next != NONE)
    return true;
  const node *child = &p->nodes[n->first_child];
  return n->refs != child->refs ||
         mr_nextuse_rows(&p->future, n->hash) != mr_nextuse_rows(&p->future, child->hash);
}

static int sweep_spent(mr_prefix *p) {
  int done = 0, lone = mr_kv_lone_pages(p->kv);
  p->unspent = p->unspent < lone ? p->unspent : lone;
  if (lone == p->unspent)
    return 0;
  for (int32_t end = p->root_child; end != NONE; end = next_node(p, end)) {
    int back = 0;
    if (!some_leave(p, end))
      continue;
    for (int32_t at = end; at != NONE && (at == end || !some_leave(p, at));
         at = p->nodes[at].parent, back++)
      done += back >= p->reach ? give_up(p, at) : 0;
  }
  p->unspent = mr_kv_lone_pages(p->kv);
  return done;
}

static int evict_idle(mr_prefix *p, int n) {
  int done = 0;
  while (done < n && p->idle_first != NONE) {
    int32_t at = victim(p);
    idle_remove(p, at);
    keep_node(p, at);
    done += drop_pages(p, at, 0, p->groups);
    discard(p, at);
  }
  return done;
}

int mr_prefix_evict(mr_prefix *p, int n) {
  if (n <= 0)
    return 0;
  int done = sweep_spent(p);
  done += evict_idle(p, n - done);
  for (int32_t at = p->root_child; at != NONE && done < n && mr_kv_lone_pages(p->kv);
       at = next_node(p, at))
    done += give_up(p, at);
  return done;
}

int mr_prefix_common(const mr_prefix *p, const int32_t *chain, int n) {
  int i = 0;
  while (i < n && p->nodes[chain[i]].refs > 1)
    i++;
  return i;
}

int mr_prefix_held(const mr_prefix *p) {
  return p->kept * p->n_held + (p->groups - p->kept) * p->n_wide;
}

int mr_prefix_cached(const mr_prefix *p) {
  return p->kept * p->n_idle + mr_kv_lone_pages(p->kv);
}
