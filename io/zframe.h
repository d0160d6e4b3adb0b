/* zframe.h: independent zstd frames, and the standard seek table that ends a file of them.
 *
 * Each frame carries its content size and checksum, so it can be read alone, and damage to its
 * content is found.
 *
 *     mr_zpack *z;  mr_zpack_open(&z, level, &err);
 *     mr_zpack_frame(z, text, len, &out, &err);     appends a frame to `out`, notes its sizes
 *     mr_zpack_table(z, &out, &err);                appends the seek table of all frames so far
 *     mr_zpack_close(z);
 *
 *     mr_zfile *f;  mr_zfile_open(&f, path, &err);  reads and checks the table
 *     for (i = 0; i < mr_zfile_frames(f); i++) mr_zfile_read(f, i, &text, &err);
 *     mr_zfile_close(f);
 *
 * Format: zstd frames as in RFC 8878, then one skippable frame (magic 0x184D2A5E) with an entry
 * of 12 bytes a frame (compressed size, content size, low 32 bits of XXH64 of the content) and a
 * 9-byte footer (number of frames, descriptor 0x80: checksums present, magic 0x8F92EAB1), as in
 * zstd's contrib/seekable_format specification. What is read is hostile: sizes are checked
 * against the file before anything is allocated.
 */
#ifndef MR_IO_ZFRAME_H
#define MR_IO_ZFRAME_H

#include <stdint.h>

#include "io/err.h"
#include "io/text.h"

#define MR_ZFRAME_MAX ((size_t)1 << 31) /* bytes of content in one frame */

typedef struct mr_zpack mr_zpack;
typedef struct mr_zfile mr_zfile;

mr_code mr_zpack_open(mr_zpack **out, int level, mr_err *err);
mr_code mr_zpack_frame(mr_zpack *z, const void *text, size_t len, mr_text *out, mr_err *err);
mr_code mr_zpack_table(mr_zpack *z, mr_text *out, mr_err *err);
void mr_zpack_close(mr_zpack *z); /* NULL is fine */

/* Appends the content of one whole frame of `len` bytes to `out`. MR_E_DATA: not exactly one good
 * frame that states its size, or more than max bytes. `name` is used in errors. */
mr_code mr_zframe_unpack(const void *frame, size_t len, size_t max, const char *name, mr_text *out,
                         mr_err *err);

mr_code mr_zfile_open(mr_zfile **out, const char *path, mr_err *err);
uint32_t mr_zfile_frames(const mr_zfile *f);
uint64_t mr_zfile_text_bytes(const mr_zfile *f);
mr_code mr_zfile_read(mr_zfile *f, uint32_t i, mr_text *out, mr_err *err); /* replaces what `out`
                                                                              held */
void mr_zfile_close(mr_zfile *f);

#endif
