/* commit.h: finished lines into frames, frames into the journal, and at the end the final files.
 *
 *     mr_commit *c;
 *     mr_commit_open(&c, &paths, &err);            lock, replay; old = mr_commit_identity(c)
 *     mr_commit_bind(c, &id, &err);                new state, or the old one if nothing differs
 *     for each finished row: mr_commit_add(c, &line, text, len, &err);
 *     mr_commit_flush(c, &err);
 *     mr_commit_assemble(c, ..., &err);            final.* in OUT.run
 *     mr_commit_publish(c, manifest, &err);        final names, manifest last, OUT.run removed
 *     mr_commit_close(c);
 *
 * Invariants (J1 to J6: journal.h; tests cite them by number):
 *   C1  A row is done if and only if a good journal record names it. No row is named twice.
 *   C2  A frame is written and synced (fdatasync) before the record that names it is written, and
 *       the record is synced before any caller learns that its rows are done.
 *   C3  Frames lie in results.frames and errors.frames without gaps, in the order of their
 *       records. Bytes after the last named frame are a torn tail, and are cut off before the
 *       next frame is written.
 *   C4  A record whose frame is not there or whose digest differs ends the good prefix: its rows,
 *       and those of every later record, are computed again.
 *   C5  After one failed write or sync nothing more is written by this process. A failed sync is
 *       never retried.
 *   C6  Final files are whole and synced in OUT.run before any final name exists. Names appear in
 *       a fixed order, the manifest last, and every directory is synced before the manifest is
 *       renamed.
 *   C7  While there is no good manifest the state in OUT.run is complete enough to make every
 *       final file again, with the same bytes; once there is one, OUT.run is litter.
 *   C8  A new state is created only where no output exists: what carries a final name later is
 *       ours to replace.
 *   C9  The bytes of the results and errors files depend on the lines and the options only, not
 *       on the order in which rows finished, on frames, kills or resumes.
 *
 *           bind         add, flush        assemble              publish
 *   (none) ------> running ------> all done ------> final.* made ------> names, manifest -->
 * finished ^        |  kill or stop  |                 |                    |  kill
 *            +--------+----------------+-----------------+--------------------+  = open again
 *
 * One thread uses a commit. Flushing waits for the disk (two syncs), at most about every two
 * seconds.
 */
#ifndef MR_JOBS_COMMIT_H
#define MR_JOBS_COMMIT_H

#include "jobs/framerec.h"
#include "jobs/identity.h"
#include "jobs/manifest.h"
#include "jobs/options.h"
#include "jobs/rundir.h"

typedef struct mr_commit mr_commit;

typedef struct mr_line_info {
  uint64_t row;
  mr_line_kind kind;
  uint64_t prompt_tokens, output_tokens; /* as the line's usage says; 0 for errors */
} mr_line_info;

typedef struct mr_commit_totals {
  uint64_t rows_ok, rows_failed, prompt_tokens, output_tokens; /* durable */
  uint64_t frames, frame_bytes, text_bytes;
  uint64_t lost_rows;    /* named by records that C4 dropped when the state was opened */
  uint64_t earlier_runs; /* RUN records */
  double earlier_s;      /* seconds of those runs together */
} mr_commit_totals;

/* Takes the lock (MR_E_STOPPED when another run holds it), reads the manifest, replays the journal.
 * `p` is borrowed until close. MR_E_CANTCREATE, MR_E_DATA (damaged journal header), MR_E_IO,
 * MR_E_NOMEM. */
mr_code mr_commit_open(mr_commit **out, const mr_paths *p, mr_err *err);
/* The identity that the state or the finished output is bound to; NULL: it is new. Borrowed. */
const mr_job_identity *mr_commit_identity(const mr_commit *c);
/* The manifest of a finished job whose files are all there; NULL: it is not finished. Borrowed. */
const mr_manifest *mr_commit_finished(const mr_commit *c);
/* MR_E_DATA when an old identity differs, saying in what; else creates the state or goes on with
 * the old one, and fills id->job_id and id->created from it. MR_E_CANTCREATE: C8. */
mr_code mr_commit_bind(mr_commit *c, mr_job_identity *id, mr_err *err);

bool mr_commit_is_done(const mr_commit *c, uint64_t row);    /* or buffered to be */
uint64_t mr_commit_done_rows(const mr_commit *c);            /* done or buffered */
bool mr_commit_has_failed(const mr_commit *c, uint64_t row); /* after assembly: its line is an error
                                                              */
const mr_commit_totals *mr_commit_totals_get(const mr_commit *c);

/* One finished row; `text` is one line with its newline. Buffered; flushes when a frame is full. */
mr_code mr_commit_add(mr_commit *c, const mr_line_info *line, const char *text, size_t len,
                      mr_err *err);
/* Flushes when something has been buffered for two seconds. */
mr_code mr_commit_tick(mr_commit *c, mr_err *err);
mr_code mr_commit_flush(mr_commit *c, mr_err *err);
/* Writes the RUN record: the figures of this run, with at least "seconds". */
mr_code mr_commit_note_run(mr_commit *c, const json_t *figures, mr_err *err);

/* All rows are in: makes the results and the errors file (assemble.h) and adds them to the
 * manifest's files. */
mr_code mr_commit_assemble(mr_commit *c, mr_output_format format, int zstd_level,
                           bool completion_order, mr_manifest *m, mr_err *err);
/* Writes one of the report files into OUT.run and adds it to the manifest. */
mr_code mr_commit_put(mr_commit *c, int final, const void *bytes, size_t len, mr_manifest *m,
                      mr_err *err);
/* C6; then removes OUT.run, if it can. */
mr_code mr_commit_publish(mr_commit *c, const mr_manifest *m, mr_err *err);
/* Removes OUT.run while the lock is held: nothing in it is needed. It ends c, but for closing. */
mr_code mr_commit_discard(mr_commit *c, mr_err *err);
void mr_commit_close(mr_commit *c); /* NULL is fine */

#endif
