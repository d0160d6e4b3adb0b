/* gunzip.h: gzip members in a row, with their checksums verified (libarchive's gzip filter does not
 * look at them).
 *
 *     mr_gunzip *z;  mr_gunzip_open(&z, &err);
 *     mr_gunzip_feed(z, in, n);                     in is borrowed until it is used up
 *     while (mr_gunzip_read(z, out, cap, &got, &err) == MR_OK && got) ...    got 0: feed more
 *     mr_gunzip_end(z, &err);                       the input is over: an error if it was cut
 *
 * Zero bytes after the last member are padding, anything else there is an error, as in gzip(1).
 */
#ifndef MR_IO_GUNZIP_H
#define MR_IO_GUNZIP_H

#include <stddef.h>

#include "io/err.h"

typedef struct mr_gunzip mr_gunzip;

mr_code mr_gunzip_open(mr_gunzip **out, mr_err *err);
void mr_gunzip_feed(mr_gunzip *z, const void *in, size_t n);
/* MR_E_DATA: not gzip, wrong checksum or length, garbage behind. */
mr_code mr_gunzip_read(mr_gunzip *z, void *out, size_t cap, size_t *got, mr_err *err);
mr_code mr_gunzip_end(const mr_gunzip *z, mr_err *err);
void mr_gunzip_close(mr_gunzip *z); /* NULL is fine */

#endif
