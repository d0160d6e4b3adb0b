/* assemble.h: the lines of all frames, in input order or in order of completion, in bounded
 * memory.
 *
 * Frames hold rows in the order in which they finished. For input order the journal is walked once
 * to learn how many bytes of text lie where, and the lines are sorted by linesort.h.
 */
#ifndef MR_JOBS_ASSEMBLE_H
#define MR_JOBS_ASSEMBLE_H

#include "jobs/linesort.h"
#include "jobs/rundir.h"

/* rows: how many lines there must be, one for each row below it. bucket_bytes 0: 64 MiB (tests take
 * less). MR_E_IO, MR_E_NOMEM, MR_E_DATA: a frame is damaged, or a row has not exactly one line. */
mr_code mr_assemble_run(const mr_paths *p, uint64_t rows, bool completion_order,
                        size_t bucket_bytes, mr_line_sink sink, void *ctx, mr_err *err);

#endif
