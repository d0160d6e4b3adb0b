/* framerec.h: the journal's record of one frame: where it lies, its digest, and whose lines it
 * holds.
 *
 * Payload: u8 stream, then varints (LEB128): offset, bytes, text bytes, prompt tokens, output
 * tokens, number of rows; u64 xxh3-64 of the frame; then for each line in the frame's order:
 * zigzag varint of the difference to the row before it (the first: to 0), varint of the line's
 * bytes with its newline. The line lengths must add up to the text bytes; every reader checks
 * that.
 */
#ifndef MR_JOBS_FRAMEREC_H
#define MR_JOBS_FRAMEREC_H

#include <stdbool.h>
#include <stdint.h>

#include "io/text.h"

typedef enum mr_line_kind { MR_LINE_RESULT, MR_LINE_ERROR } mr_line_kind; /* the stream too */
#define MR_STREAMS 2

typedef struct mr_frame_line {
  uint64_t row;
  uint32_t bytes; /* with the newline */
} mr_frame_line;

typedef struct mr_frame_rec {
  mr_line_kind stream;
  uint64_t offset, bytes; /* of the frame in the stream's file */
  uint64_t text_bytes;    /* decompressed */
  uint64_t prompt_tokens, output_tokens;
  uint64_t check; /* xxh3-64 of the frame's bytes */
  uint64_t n_lines;
  const unsigned char *lines, *end; /* decoding: the coded lines, borrowed from the payload */
} mr_frame_rec;

/* Appends the payload; rec->lines and end are not used. t->failed tells of missing memory. */
void mr_framerec_encode(const mr_frame_rec *rec, const mr_frame_line *lines, mr_text *t);

/* False unless the payload is whole: all lines are walked, rows are below `rows`, lengths add up.
 */
bool mr_framerec_decode(mr_frame_rec *rec, const unsigned char *payload, size_t len, uint64_t rows);

/* Walks the lines of a decoded record:  mr_frame_line l = {0}; const unsigned char *p = rec.lines;
 *                                       while (mr_framerec_next(&rec, &p, &l)) ... */
bool mr_framerec_next(const mr_frame_rec *rec, const unsigned char **p, mr_frame_line *l);

#endif
