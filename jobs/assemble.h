/* assemble.h: the lines of all frames, in input order or in order of completion, in bounded
 * memory.
 *
 * Frames hold rows in the order in which they finished. In input order: the journal is walked
 * once to learn how many bytes of text lie in each range of rows; ranges are joined to buckets of
 * at most 64 MiB (or one range, if that alone has more). With one bucket everything is sorted in
 * memory; with more, the frames are read once, and each line goes to its bucket's file in
 * OUT.run, packed; then the buckets are read one after the other, each sorted in memory.
 */
#ifndef MR_JOBS_ASSEMBLE_H
#define MR_JOBS_ASSEMBLE_H

#include "jobs/framerec.h"
#include "jobs/rundir.h"

/* Gets each line once. */
typedef mr_code (*mr_assemble_sink)(void *ctx, uint64_t row, mr_line_kind kind, const char *line,
                                    size_t len, mr_err *err);

/* rows: how many lines there must be, one for each row below it. bucket_bytes 0: 64 MiB (tests take
 * less). MR_E_IO, MR_E_NOMEM, MR_E_DATA: a frame is damaged, or a row has not exactly one line. */
mr_code mr_assemble_run(const mr_paths *p, uint64_t rows, bool completion_order,
                        size_t bucket_bytes, mr_assemble_sink sink, void *ctx, mr_err *err);

#endif
