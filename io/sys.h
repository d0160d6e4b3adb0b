/* sys.h: the only place that opens, reads, writes, syncs, renames, locks, maps or reads a clock.
 *
 * Calls go through a table that tests replace: fail the n-th call, give short counts, drop or tear
 * unsynced writes at a crash. All calls return -1 and set errno as the system call of the same name
 * does. mr_sys_read_full and friends loop over EINTR and short counts; the raw calls do not.
 */
#ifndef MR_IO_SYS_H
#define MR_IO_SYS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>

typedef struct mr_sys {
  int (*open)(const char *path, int flags, mode_t mode);
  int (*close)(int fd);
  ssize_t (*read)(int fd, void *buf, size_t n);
  ssize_t (*write)(int fd, const void *buf, size_t n);
  ssize_t (*pread)(int fd, void *buf, size_t n, off_t at);
  ssize_t (*pwrite)(int fd, const void *buf, size_t n, off_t at);
  int (*fdatasync)(int fd);
  int (*fsync)(int fd);
  int (*ftruncate)(int fd, off_t size);
  int (*rename)(const char *from, const char *to);
  int (*unlink)(const char *path);
  int (*rmdir)(const char *path);
  int (*mkdir)(const char *path, mode_t mode);
  int (*stat)(const char *path, struct stat *st);
  int (*fstat)(int fd, struct stat *st);
  int (*flock)(int fd, int operation);
  void *(*mmap)(size_t len, int fd, off_t at); /* private, read only; MAP_FAILED on failure */
  int (*munmap)(void *p, size_t len);
  /* The pages that lie wholly in this part of a mapping need not stay in memory; they are read
   * again when they are touched. */
  void (*unload)(const void *p, size_t len);
  int (*await)(int fd); /* 0: there is something to read, or the end; -1 with EINTR: mr_sys_wake */
  int64_t (*clock_ns)(void); /* monotonic */
  int64_t (*wall_s)(void);   /* seconds since 1970 */
} mr_sys;

extern const mr_sys mr_sys_os;   /* the operating system */
extern const mr_sys *mr_sys_now; /* the table in force; tests point it elsewhere */

/* Everything or an error: loops over EINTR and short counts. A read that meets the end of the file
 * early returns the bytes that were there. */
ssize_t mr_sys_read_full(int fd, void *buf, size_t n);
ssize_t mr_sys_pread_full(int fd, void *buf, size_t n, off_t at);
/* All n bytes: 0, or -1; where the file ends before them errno is EIO, not what it was before. */
int mr_sys_pread_all(int fd, void *buf, size_t n, off_t at);
int mr_sys_write_full(int fd, const void *buf, size_t n);
int mr_sys_pwrite_full(int fd, const void *buf, size_t n, off_t at);

/* A directory that is there already is fine. 0, or -1 and errno is mkdir's. */
int mr_sys_make_dir(const char *path);

/* Ends every wait of `await`, now and from now on: what a signal that asks to stop calls (it may,
 * from its handler). mr_sys_wake_open makes that possible; false: it could not (no descriptors
 * left). */
bool mr_sys_wake_open(void);
void mr_sys_wake(void);
/* Ends waits that last longer than until mr_sys_seconds() is this; 0: nothing does. */
void mr_sys_wake_at(double seconds);

/* Opens /dev/null where standard input, output or error is closed: otherwise the next file would
 * get that number, and messages would be written into it. */
void mr_sys_hold_standard_files(void);

/* Seconds as double, monotonic. */
double mr_sys_seconds(void);

#endif
