/* journal.h: the append-only record of what a job has finished.
 *
 * Invariants of the state in OUT.run/ (commit.h and the tests cite them by number):
 *   J1  A record is good when its length fits the file, and its CRC matches the chain: each
 *       record's CRC32C starts from the CRC of the record before it. The journal is its longest
 *       prefix of good records, nothing else.
 *   J2  Whatever follows that prefix is a torn tail: it was never acknowledged, and is cut off
 *       before the next append.
 *   J3  The first record is the header, which binds the journal to one job (identity.h). A file
 *       without a good header does not come into being: it is written under another name, synced
 *       and renamed.
 *   J4  mr_journal_append returns MR_OK only after fdatasync of the record. After a failed write
 *       or sync the journal takes no more records: what the disk holds is unknown, and only a new
 *       replay may say.
 *   J5  Nothing in the file is trusted: a length or an index is checked before use, and a record
 *       that its reader refuses ends the good prefix like a wrong CRC.
 *   J6  A record is never changed or removed once the next one follows it.
 *
 * File: 8 bytes "MRJRNL1\n", then records:
 *   u32 payload bytes, u32 type, payload, u32 CRC32C(previous CRC; length, type and payload)
 * little-endian; the chain starts with the CRC of the magic. Record types and payloads:
 * journal.md in docs/.
 */
#ifndef MR_JOBS_JOURNAL_H
#define MR_JOBS_JOURNAL_H

#include <stddef.h>
#include <stdint.h>

#include "io/err.h"

typedef enum mr_record_type {
  MR_RECORD_HEADER = 1, /* JSON: identity.h */
  MR_RECORD_FRAME = 2,  /* rows that are done: framerec.h */
  MR_RECORD_RUN = 3     /* JSON: figures of one run, written when it stops in an orderly way */
} mr_record_type;

typedef struct mr_journal mr_journal;

/* Called for each good record in order. MR_OK; MR_E_DATA: refuse it (J5); anything else ends the
 * replay with that code, and nothing is cut. */
typedef mr_code (*mr_journal_visit)(void *ctx, uint32_t type, const unsigned char *payload,
                                    size_t len);

/* A new journal that holds the header. MR_E_CANTCREATE, MR_E_IO, MR_E_NOMEM. */
mr_code mr_journal_create(mr_journal **out, const char *path, const void *header, size_t len,
                          mr_err *err);
/* Replays, cuts the torn tail (J2) and opens for appending. MR_E_DATA: no good header. */
mr_code mr_journal_open(mr_journal **out, const char *path, mr_journal_visit visit, void *ctx,
                        mr_err *err);
/* Replays without changing a byte; *torn (may be NULL): bytes after the good prefix. */
mr_code mr_journal_read(const char *path, mr_journal_visit visit, void *ctx, uint64_t *torn,
                        mr_err *err);
mr_code mr_journal_append(mr_journal *j, uint32_t type, const void *payload, size_t len,
                          mr_err *err);
void mr_journal_close(mr_journal *j); /* NULL is fine */

#endif
