/* kvtier.h: where keys and values go when memory runs out: to disk and back, or nowhere, to be
 * computed again.
 *
 *     mr_kvtier_open(&t, kv, policy, disk_bytes, dir, &err);
 *     if (mr_kvtier_spills(t, pages, tokens, token_s) &&
 *         mr_kvtier_park(t, &seq, first, end, len, &p))
 *       mr_kv_seq_release(kv, &seq);              the pages are written behind
 *     ...
 *     mr_kv_seq_reserve(kv, &seq, ...);           pages to fetch into
 *     mr_kvtier_fetch(t, &p, &seq, from);
 *     while (mr_kvtier_fetched(t, &p) == MR_E_AGAIN) other work, or mr_kvtier_wait(t);
 *     MR_OK: seq's pages are as they were parked; MR_E_IO: compute them again
 *
 * A device's pages move beside its steps: what is parked is on its way to the host while the next
 * step runs, and is given to the disk later; what is fetched is there one call of fetched later.
 *
 * Whole sequences are parked. What could not be written, or comes back changed, is lost and has to
 * be computed again; by batch invariance that gives the same bits.
 */
#ifndef MR_SRC_KVTIER_H
#define MR_SRC_KVTIER_H

#include "src/kvcache.h"
#include "src/saved.h"

/* When memory runs out. */
typedef enum mr_kv_policy {
  MR_KV_AUTO,  /* what costs least, by measured rates */
  MR_KV_FEWER, /* admit fewer: it never runs out */
  MR_KV_SPILL,
  MR_KV_RECOMPUTE
} mr_kv_policy;

typedef struct mr_kvtier mr_kvtier;

typedef struct mr_parked { /* places first .. first + n - 1 of a sequence; zeroed: none */
  int32_t *slots;          /* owned; or, of a run before: */
  const mr_saved *saved;   /* borrowed */
  const mr_saved_page *pages;
  int first, n;
  int len; /* tokens up to their end */
  bool lost;
  /* while they are fetched for a device: what comes from the disk, and the pages it is for */
  uint8_t *room; /* [n] pages; owned */
  int32_t *to;   /* [n]; owned */
  bool sent;     /* on their way from room */
} mr_parked;

typedef struct mr_kvtier_stats {
  uint64_t spill_bytes, fetch_bytes, failures;
  double stall_s;
} mr_kvtier_stats;

/* disk_bytes 0: no disk. dir NULL: /var/tmp. MR_E_USAGE: MR_KV_SPILL without a disk; and as
 * mr_spill_open. */
mr_code mr_kvtier_open(mr_kvtier **out, mr_kv *kv, mr_kv_policy policy, uint64_t disk_bytes,
                       const char *dir, mr_err *err);
void mr_kvtier_close(mr_kvtier *t); /* NULL is fine */

bool mr_kvtier_has_disk(const mr_kvtier *t); /* with room left */
/* Whether to put `pages` on disk rather than compute `tokens` again at token_s seconds each. */
bool mr_kvtier_spills(const mr_kvtier *t, int pages, int64_t tokens, double token_s);

/* Copies the pages at places first .. end - 1, if they were not dropped; len is the number of
 * tokens up to there. False: no room, nothing is parked. */
bool mr_kvtier_park(mr_kvtier *t, const mr_kv_seq *s, int first, int end, int len, mr_parked *p);
/* Starts to bring back the pages that s has now at places that are not below `from`; the others are
 * forgotten. */
void mr_kvtier_fetch(mr_kvtier *t, mr_parked *p, const mr_kv_seq *s, int from);
/* MR_OK and MR_E_IO: p is empty again. */
mr_code mr_kvtier_fetched(mr_kvtier *t, mr_parked *p);
void mr_kvtier_forget(mr_kvtier *t, mr_parked *p);
/* Whether the page at place first + i was there; else it had been dropped. */
bool mr_kvtier_has(const mr_parked *p, int i);
/* Waits for page i (of n) of what is parked. False: it is lost. */
bool mr_kvtier_read(mr_kvtier *t, const mr_parked *p, int i, void *to);
void mr_kvtier_wait(mr_kvtier *t); /* until the disk has done something */

void mr_kvtier_stats_get(const mr_kvtier *t, mr_kvtier_stats *out);

#endif
