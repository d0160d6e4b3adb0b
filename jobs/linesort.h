/* linesort.h: one line for each row, given in any order, taken in input order, in bounded memory.
 *
 *     mr_linesort *s;
 *     mr_linesort_open(&s, "OUT.run/bucket", rows, 0, &err);
 *     for each line: mr_linesort_expect(s, row, bytes);           how much text lies where
 *     mr_linesort_begin(s, &err);
 *     for each line: mr_linesort_add(s, row, kind, line, len, &err);
 *     mr_linesort_emit(s, name, sink, ctx, &err);                 rows 0, 1, 2 ...
 *     mr_linesort_close(s);
 *
 * Ranges of rows are joined to buckets that take 16 to 64 MiB of memory (or one range, if that
 * alone has more). With one bucket everything is sorted in memory; with more, each line goes to its
 * bucket's file, packed; at the end the buckets are read one after the other, each sorted in
 * memory. The files are removed as they are read, and with the directory that holds them when a run
 * is killed.
 */
#ifndef MR_JOBS_LINESORT_H
#define MR_JOBS_LINESORT_H

#include "io/err.h"
#include "jobs/framerec.h"

typedef struct mr_linesort mr_linesort;

/* Gets each line once. */
typedef mr_code (*mr_line_sink)(void *ctx, uint64_t row, mr_line_kind kind, const char *line,
                                size_t len, mr_err *err);

/* `prefix` of the files' names, borrowed. bucket_bytes 0: as above (tests take less). MR_E_NOMEM.
 */
mr_code mr_linesort_open(mr_linesort **out, const char *prefix, uint64_t rows, size_t bucket_bytes,
                         mr_err *err);
void mr_linesort_expect(mr_linesort *s, uint64_t row, uint64_t bytes); /* row < rows */
mr_code mr_linesort_begin(mr_linesort *s, mr_err *err);
/* row < rows. MR_E_NOMEM, MR_E_CANTCREATE, MR_E_IO. */
mr_code mr_linesort_add(mr_linesort *s, uint64_t row, mr_line_kind kind, const char *line,
                        uint32_t len, mr_err *err);
/* MR_E_DATA, in the name of the file `name`: a row has not exactly one line. */
mr_code mr_linesort_emit(mr_linesort *s, const char *name, mr_line_sink sink, void *ctx,
                         mr_err *err);
void mr_linesort_close(mr_linesort *s); /* NULL is fine */

#endif
