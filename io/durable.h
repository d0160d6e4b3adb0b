/* durable.h: changes to the file system that survive a crash.
 *
 * A file's bytes are durable after fsync of the file; its name is durable after fsync of its
 * directory. These calls do both in the right order:
 *     mr_durable_mkdir(dir)               mkdir; sync the parent
 *     mr_durable_write(path, bytes, len)  path.tmp: create, write, fsync; rename; sync the
 * directory mr_durable_rename(from, to)         rename; sync the directories of `to` and of `from`
 *     mr_durable_remove_tree(dir)         unlink all below it and itself; follows no links
 *
 * A failed sync is reported and never retried: after one failure the kernel may have dropped the
 * dirty pages and a second call may succeed without having written anything. Whoever gets such an
 * error gives up on that file. Errors: MR_E_IO (disk full, sync failed), MR_E_CANTCREATE,
 * MR_E_NOMEM.
 */
#ifndef MR_IO_DURABLE_H
#define MR_IO_DURABLE_H

#include <stddef.h>

#include "io/err.h"

mr_code mr_durable_mkdir(const char *path, mr_err *err); /* an existing directory is fine */
mr_code mr_durable_write(const char *path, const void *bytes, size_t len, mr_err *err);
mr_code mr_durable_rename(const char *from, const char *to, mr_err *err);
mr_code mr_durable_remove_tree(const char *path, mr_err *err); /* nothing there is fine */
/* The file `last` in it goes when all others are gone; what others make there after that stays, and
 * so does the directory. */
mr_code mr_durable_remove_tree_last(const char *path, const char *last, mr_err *err);

/* fsync of a directory, and of the directory that holds `path`. */
mr_code mr_durable_sync_dir(const char *dir, mr_err *err);
mr_code mr_durable_sync_parent(const char *path, mr_err *err);

/* fsync / fdatasync of an open file, named `path` in errors. */
mr_code mr_durable_sync(int fd, const char *path, mr_err *err);
mr_code mr_durable_sync_data(int fd, const char *path, mr_err *err);

#endif
