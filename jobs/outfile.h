/* outfile.h: writes lines of JSON in one of the output formats and digests what it writes.
 *
 *     mr_outfile *o;  mr_outfile_open(&o, path, MR_OUT_ZST, level, &err);
 *     mr_outfile_line(o, line, len, &err); ...
 *     mr_outfile_finish(o, &info, &err);    the rest, the seek table; synced
 *     mr_outfile_close(o);                  without finish: abandoned
 *
 * The bytes depend on the lines only: a zstd frame ends after 256 lines or 1 MiB of text,
 * whichever is first; gzip carries no time and no name.
 */
#ifndef MR_JOBS_OUTFILE_H
#define MR_JOBS_OUTFILE_H

#include "io/hash.h"
#include "jobs/options.h"

typedef struct mr_outfile mr_outfile;

typedef struct mr_outfile_info {
  uint64_t bytes, lines;
  char digest[MR_HASH_HEX]; /* xxh3-128 of the bytes */
} mr_outfile_info;

/* `path` is not used with MR_OUT_STDOUT. MR_E_CANTCREATE, MR_E_NOMEM. */
mr_code mr_outfile_open(mr_outfile **out, const char *path, mr_output_format format, int zstd_level,
                        mr_err *err);
mr_code mr_outfile_line(mr_outfile *o, const char *line, size_t len, mr_err *err);
mr_code mr_outfile_finish(mr_outfile *o, mr_outfile_info *info, mr_err *err);
void mr_outfile_close(mr_outfile *o); /* NULL is fine */

#endif
