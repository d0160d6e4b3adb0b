/* spill.h: blocks of one size put away in a temporary file, and brought back.
 *
 *     mr_spill *s;  mr_spill_open(&s, dir, slot_bytes, max_bytes, &err);
 *     int slot = mr_spill_put(s, bytes);     copied at once, written behind; -1: there is no room
 *     mr_spill_get(s, slot, to);             starts to bring it back
 *     while (mr_spill_state(s, slot) == MR_SPILL_READING) do something else, or mr_spill_wait(s);
 *     state is MR_SPILL_READY: `to` holds the bytes that were put; MR_SPILL_BAD: they are lost
 *     mr_spill_drop(s, slot);
 *     mr_spill_close(s);
 *
 * One thread of its own does the writing, reading and checking (xxh3-64 of each slot), in the order
 * of the calls; past a few blocks waiting to be written, put waits. The file has no name once it is
 * open, so nothing is left behind by a kill; it bypasses the page cache where the file system can.
 * An error of the disk never comes back as an error here: a slot that could not be written or read,
 * or whose bytes have changed, is BAD, and after a few of these there is no room any more. One
 * thread calls.
 */
#ifndef MR_IO_SPILL_H
#define MR_IO_SPILL_H

#include "io/err.h"

#define MR_SPILL_BYTES_PER_S 300e6 /* to reckon with, each way, until a disk was measured */

typedef struct mr_spill mr_spill;

typedef enum mr_spill_status {
  MR_SPILL_FREE,
  MR_SPILL_WRITING,
  MR_SPILL_STORED,
  MR_SPILL_READING,
  MR_SPILL_READY,
  MR_SPILL_BAD
} mr_spill_status;

typedef struct mr_spill_stats { /* sums since open */
  uint64_t written_bytes, read_bytes, failures;
  double write_s, read_s; /* of the thread */
  double stall_s;         /* the caller waited in put, get, wait and drop */
} mr_spill_stats;

/* MR_E_CANTCREATE: no file can be made in dir; MR_E_NOMEM; MR_E_UNAVAILABLE: no thread. */
mr_code mr_spill_open(mr_spill **out, const char *dir, size_t slot_bytes, uint64_t max_bytes,
                      mr_err *err);
void mr_spill_close(mr_spill *s); /* what is waiting is not written; NULL is fine */

int mr_spill_put(mr_spill *s, const void *bytes);
/* `to` (slot_bytes) must stay until the slot is READY or BAD. A READY one may be asked for
 * again. */
void mr_spill_get(mr_spill *s, int slot, void *to);
mr_spill_status mr_spill_state(mr_spill *s, int slot);
/* Until something that was waiting is done; at once if nothing is. */
void mr_spill_wait(mr_spill *s);
void mr_spill_drop(mr_spill *s, int slot);

int mr_spill_room(mr_spill *s); /* slots that are free */
void mr_spill_stats_get(mr_spill *s, mr_spill_stats *out);

#endif
