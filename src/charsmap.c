#include "src/charsmap.h"

#include <string.h>

static uint32_t unit_at(const char *map, size_t i) {
  uint32_t u;
  memcpy(&u, map + 4 + 4 * i, sizeof u);
  return u;
}

mr_code mr_charsmap_check(const char *map, size_t len, mr_err *err) {
  uint32_t bytes = 0;
  if (len >= 4)
    memcpy(&bytes, map, sizeof bytes);
  if (len < 8 || bytes < 4 || bytes % 4 || bytes > len - 4)
    return mr_err_set(err, MR_E_DATA,
                      "precompiled_charsmap: a trie of %u bytes does not fit its %zu bytes", bytes,
                      len);
  return MR_OK;
}

static size_t offset(uint32_t unit) {
  return (size_t)(unit >> 10) << ((unit & 0x200) >> 6);
}

bool mr_charsmap_find(const char *map, size_t map_len, const char *s, size_t len, mr_str *out) {
  uint32_t bytes;
  memcpy(&bytes, map, sizeof bytes);
  size_t n = bytes / 4, at = offset(unit_at(map, 0));
  for (size_t i = 0; i < len && s[i]; i++) {
    at ^= (uint8_t)s[i];
    if (at >= n)
      return false;
    uint32_t unit = unit_at(map, at);
    if ((unit & 0x800000ffu) != (uint8_t)s[i])
      return false;
    at ^= offset(unit);
    if (!(unit & 0x100))
      continue;
    if (at >= n)
      return false;
    size_t from = 4 + (size_t)bytes + (unit_at(map, at) & 0x7fffffffu);
    if (from >= map_len)
      return false;
    const char *end = memchr(map + from, 0, map_len - from);
    *out = (mr_str){map + from, end ? (size_t)(end - map) - from : map_len - from};
    return true;
  }
  return false;
}
