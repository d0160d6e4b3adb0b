/* source.h: the inputs of a job as one sequence of texts, whatever they are packed in.
 *
 *     mr_source *s;
 *     mr_source_open(&s, inputs, n, &err);         expands globs and directories, opens no file
 *     while (mr_source_next(s, &more, &err) == MR_OK && more)        a file, or an archive's member
 *       while (mr_source_read(s, &data, &len, &err) == MR_OK && len)  its text, block by block
 *         ...
 *     mr_source_close(s);
 *
 * Inputs are files, globs (* ? [), directories (their files whose names are those of rows, sorted,
 * not deeper) and "-" for standard input. What a file is, its first bytes say: plain text, gzip,
 * zstd, xz, bzip2, tar (plain or compressed) or zip. Names of rows: .jsonl .ndjson, these with .gz
 * .zst .xz .bz2, and in directories also archives (.tar .tgz .zip, compressed tar). A name that
 * promises a format over other bytes (or none) is an error. Archive members are regular files; a
 * member with an absolute path, with "..", a link, a device or a FIFO makes the whole archive
 * refused: MR_E_DATA. Memory is bounded whatever the data expands to (zstd windows up to 128 MiB,
 * xz up to 1 GiB). No file is ever written and no program run.
 */
#ifndef MR_IO_SOURCE_H
#define MR_IO_SOURCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "io/err.h"

typedef struct mr_source mr_source;

/* MR_E_NOINPUT: an input is not there, a glob matches nothing, a directory has no file of rows. */
mr_code mr_source_open(mr_source **out, const char *const *inputs, int n, mr_err *err);
void mr_source_close(mr_source *s); /* NULL is fine */

/* The files found, in order ("-": standard input); borrowed. */
size_t mr_source_n_paths(const mr_source *s);
const char *mr_source_path(const mr_source *s, size_t i);

/* Goes to the next text; *more is false at the end. What is left of the text before it is passed
 * over. */
mr_code mr_source_next(mr_source *s, bool *more, mr_err *err);
/* "path", or "path:member". Borrowed until the next call of next. */
const char *mr_source_name(const mr_source *s);
/* The next block of text, borrowed until the next call. *len 0: the end of this text. MR_E_DATA,
 * MR_E_IO. */
mr_code mr_source_read(mr_source *s, const char **data, size_t *len, mr_err *err);

uint64_t mr_source_file_bytes(const mr_source *s); /* read from files so far */

#endif
