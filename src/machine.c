#include "src/machine.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "io/sys.h"

/* The first cap - 1 bytes of a small file; "" when it cannot be read. */
static void slurp(const char *path, char *buf, size_t cap) {
  int fd = mr_sys_now->open(path, O_RDONLY, 0);
  ssize_t n = -1;
  if (fd >= 0) {
    n = mr_sys_read_full(fd, buf, cap - 1);
    mr_sys_now->close(fd);
  }
  buf[n > 0 ? n : 0] = 0;
}

/* The number after `key` in text; 0: not there. */
static uint64_t field(const char *text, const char *key) {
  const char *at = strstr(text, key);
  uint64_t v = 0;
  return at && sscanf(at + strlen(key), "%" SCNu64, &v) == 1 ? v : 0;
}

mr_memory mr_machine_memory(void) {
  char text[4096];
  slurp("/proc/meminfo", text, sizeof text);
  mr_memory m = {field(text, "MemTotal:") * 1024, field(text, "MemAvailable:") * 1024};
  slurp("/sys/fs/cgroup/memory.max", text, sizeof text);
  uint64_t limit = field(text, "");
  slurp("/sys/fs/cgroup/memory.current", text, sizeof text);
  uint64_t used = field(text, "");
  slurp("/sys/fs/cgroup/memory.stat", text, sizeof text);
  uint64_t files = field(text, "inactive_file ");
  used -= files < used ? files : used;
  if (limit == 0 || limit >= m.total)
    return m; /* none, or "max" */
  uint64_t left = limit > used ? limit - used : 0;
  m.total = limit;
  m.available = left < m.available ? left : m.available;
  return m;
}

static double waited_s(void) {
  char text[128];
  uint64_t ran, waited;
  slurp("/proc/self/schedstat", text, sizeof text);
  return sscanf(text, "%" SCNu64 " %" SCNu64, &ran, &waited) == 2 ? (double)waited / 1e9 : 0;
}

mr_watch mr_machine_watch(void) {
  return (mr_watch){mr_sys_seconds(), waited_s()};
}

double mr_machine_waited_share(const mr_watch *w) {
  double took = mr_sys_seconds() - w->began_s;
  return took > 0 ? (waited_s() - w->waited_s) / took : 0;
}

const char *mr_machine_cpu(char *buf, size_t cap) {
  char text[4096];
  slurp("/proc/cpuinfo", text, sizeof text);
  const char *at = strstr(text, "model name");
  const char *colon = at ? strchr(at, ':') : NULL;
  size_t len = colon ? strcspn(colon + 1, "\n") : 0;
  snprintf(buf, cap, "%.*s", len > 1 ? (int)len - 1 : 3, len > 1 ? colon + 2 : "cpu");
  return buf;
}
