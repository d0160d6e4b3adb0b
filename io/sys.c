#include "io/sys.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static int os_open(const char *path, int flags, mode_t mode) {
  return open(path, flags | O_CLOEXEC, mode);
}

static void os_unload(const void *p, size_t len) {
  uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), at = (uintptr_t)p;
  uintptr_t from = (at + page - 1) / page * page, to = (at + len) / page * page;
  if (from < to)
    madvise((void *)from, to - from, MADV_DONTNEED);
}

static void *os_mmap(size_t len, int fd, off_t at) {
  return mmap(NULL, len, PROT_READ, MAP_PRIVATE, fd, at);
}

static int os_stat(const char *path, struct stat *st) {
  return stat(path, st);
}

static int os_fstat(int fd, struct stat *st) {
  return fstat(fd, st);
}

/* Never read from: what was written once ends every wait. */
static int wake_pipe[2] = {-1, -1};

bool mr_sys_wake_open(void) {
  return wake_pipe[0] >= 0 || pipe2(wake_pipe, O_CLOEXEC | O_NONBLOCK) == 0;
}

void mr_sys_wake(void) {
  int error = errno;
  if (wake_pipe[1] >= 0)
    (void)!write(wake_pipe[1], "", 1);
  errno = error;
}

static double wake_s; /* 0: never */

void mr_sys_wake_at(double seconds) {
  wake_s = seconds;
}

/* Milliseconds until wake_s, as poll takes them: a day at most. */
static int wake_ms(void) {
  if (wake_s <= 0)
    return -1;
  double left = wake_s - mr_sys_seconds();
  return left <= 0 ? 0 : left > 86400 ? 86400000 : (int)(1000 * left) + 1;
}

static int os_await(int fd) {
  struct pollfd p[] = {{.fd = fd, .events = POLLIN}, {.fd = wake_pipe[0], .events = POLLIN}};
  for (;;) {
    int ms = wake_ms(), n = poll(p, 2, ms); /* a descriptor of -1 is passed over */
    if (n < 0 && errno != EINTR)
      return -1;
    if ((n > 0 && p[1].revents) || (n == 0 && ms == 0)) {
      errno = EINTR;
      return -1;
    }
    if (n > 0)
      return 0;
  }
}

static int64_t os_clock_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int64_t os_wall_s(void) {
  return (int64_t)time(NULL);
}

const mr_sys mr_sys_os = {
    .open = os_open,
    .close = close,
    .read = read,
    .write = write,
    .pread = pread,
    .pwrite = pwrite,
    .fdatasync = fdatasync,
    .fsync = fsync,
    .ftruncate = ftruncate,
    .rename = rename,
    .unlink = unlink,
    .rmdir = rmdir,
    .mkdir = mkdir,
    .stat = os_stat,
    .fstat = os_fstat,
    .flock = flock,
    .mmap = os_mmap,
    .munmap = munmap,
    .unload = os_unload,
    .await = os_await,
    .clock_ns = os_clock_ns,
    .wall_s = os_wall_s,
};

const mr_sys *mr_sys_now = &mr_sys_os;

ssize_t mr_sys_read_full(int fd, void *buf, size_t n) {
  size_t done = 0;
  while (done < n) {
    ssize_t k = mr_sys_now->read(fd, (char *)buf + done, n - done);
    if (k < 0 && errno == EINTR)
      continue;
    if (k < 0)
      return -1;
    if (k == 0)
      break;
    done += (size_t)k;
  }
  return (ssize_t)done;
}

ssize_t mr_sys_pread_full(int fd, void *buf, size_t n, off_t at) {
  size_t done = 0;
  while (done < n) {
    ssize_t k = mr_sys_now->pread(fd, (char *)buf + done, n - done, at + (off_t)done);
    if (k < 0 && errno == EINTR)
      continue;
    if (k < 0)
      return -1;
    if (k == 0)
      break;
    done += (size_t)k;
  }
  return (ssize_t)done;
}

int mr_sys_pread_all(int fd, void *buf, size_t n, off_t at) {
  ssize_t k = mr_sys_pread_full(fd, buf, n, at);
  if (k >= 0 && (size_t)k < n)
    errno = EIO;
  return k == (ssize_t)n ? 0 : -1;
}

int mr_sys_write_full(int fd, const void *buf, size_t n) {
  size_t done = 0;
  while (done < n) {
    ssize_t k = mr_sys_now->write(fd, (const char *)buf + done, n - done);
    if (k < 0 && errno == EINTR)
      continue;
    if (k < 0)
      return -1;
    done += (size_t)k;
  }
  return 0;
}

int mr_sys_pwrite_full(int fd, const void *buf, size_t n, off_t at) {
  size_t done = 0;
  while (done < n) {
    ssize_t k = mr_sys_now->pwrite(fd, (const char *)buf + done, n - done, at + (off_t)done);
    if (k < 0 && errno == EINTR)
      continue;
    if (k < 0)
      return -1;
    done += (size_t)k;
  }
  return 0;
}

int mr_sys_make_dir(const char *path) {
  struct stat st;
  if (mr_sys_now->mkdir(path, 0777) == 0)
    return 0;
  int why = errno;
  if (why == EEXIST && mr_sys_now->stat(path, &st) == 0 && S_ISDIR(st.st_mode))
    return 0;
  errno = why;
  return -1;
}

void mr_sys_hold_standard_files(void) {
  int fd;
  do
    fd = open("/dev/null", O_RDWR); /* the lowest number that is free */
  while (fd >= 0 && fd <= STDERR_FILENO);
  if (fd > STDERR_FILENO)
    close(fd);
}

double mr_sys_seconds(void) {
  return (double)mr_sys_now->clock_ns() * 1e-9;
}
