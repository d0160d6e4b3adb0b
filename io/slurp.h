/* slurp.h: a whole small file, or the rest of a stream, into memory.
 *
 *     mr_text t = {0};
 *     mr_code rc = mr_slurp_file("config.json", 64 << 20, &t, err);
 *     mr_text_free(&t);
 *
 * The bytes are added to `out`, which the caller owns also after an error. Errors: MR_E_NOINPUT
 * (cannot open), MR_E_IO (cannot read), MR_E_DATA (more than `limit` bytes), MR_E_NOMEM; each with
 * the name of the file.
 */
#ifndef MR_IO_SLURP_H
#define MR_IO_SLURP_H

#include "io/err.h"
#include "io/text.h"

mr_code mr_slurp_file(const char *path, size_t limit, mr_text *out, mr_err *err);
/* fd stays open; `name` is for messages. */
mr_code mr_slurp(int fd, const char *name, size_t limit, mr_text *out, mr_err *err);

#endif
