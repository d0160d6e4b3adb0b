#include "io/hash.h"

#include <fcntl.h>
#include <string.h>
#include <xxhash.h>

#include "io/mem.h"
#include "io/sys.h"

#define FILE_CHUNK ((size_t)1 << 20)

struct mr_hasher {
  XXH3_state_t *state; /* owned; the library allocates it for its alignment */
};

static void to_hex(XXH128_hash_t h, char hex[MR_HASH_HEX]) {
  static const char digit[] = "0123456789abcdef";
  XXH128_canonical_t c;
  XXH128_canonicalFromHash(&c, h);
  for (int i = 0; i < 16; i++) {
    hex[2 * i] = digit[c.digest[i] >> 4];
    hex[2 * i + 1] = digit[c.digest[i] & 15];
  }
  hex[32] = '\0';
}

mr_hasher *mr_hasher_new(void) {
  mr_hasher *h = mr_mem_alloc(1, sizeof *h);
  if (!h)
    return NULL;
  h->state = XXH3_createState();
  if (!h->state) {
    mr_mem_free(h);
    return NULL;
  }
  XXH3_128bits_reset(h->state);
  return h;
}

void mr_hasher_add(mr_hasher *h, const void *bytes, size_t len) {
  if (len)
    XXH3_128bits_update(h->state, bytes, len);
}

void mr_hasher_hex(const mr_hasher *h, char hex[MR_HASH_HEX]) {
  to_hex(XXH3_128bits_digest(h->state), hex);
}

void mr_hasher_free(mr_hasher *h) {
  if (!h)
    return;
  XXH3_freeState(h->state);
  mr_mem_free(h);
}

uint64_t mr_hash_64(const void *bytes, size_t len) {
  return XXH3_64bits(len ? bytes : "", len);
}

void mr_hash_128(const void *bytes, size_t len, uint64_t out[2]) {
  XXH128_hash_t h = XXH3_128bits(len ? bytes : "", len);
  out[0] = h.high64;
  out[1] = h.low64;
}

void mr_hash_hex(const void *bytes, size_t len, char hex[MR_HASH_HEX]) {
  to_hex(XXH3_128bits(len ? bytes : "", len), hex);
}

static mr_code hash_fd(int fd, const char *path, mr_hasher *h, void *buf, uint64_t *size,
                       mr_err *err) {
  for (;;) {
    ssize_t k = mr_sys_read_full(fd, buf, FILE_CHUNK);
    if (k < 0)
      return mr_err_errno(err, MR_E_IO, path, "cannot read");
    mr_hasher_add(h, buf, (size_t)k);
    *size += (uint64_t)k;
    if ((size_t)k < FILE_CHUNK)
      return MR_OK;
  }
}

mr_code mr_hash_file(const char *path, char hex[MR_HASH_HEX], uint64_t *size, mr_err *err) {
  int fd = mr_sys_now->open(path, O_RDONLY, 0);
  if (fd < 0)
    return mr_err_errno(err, MR_E_IO, path, "cannot open");
  uint64_t n = 0;
  mr_hasher *h = mr_hasher_new();
  void *buf = mr_mem_alloc(FILE_CHUNK, 1);
  mr_code rc =
      h && buf ? hash_fd(fd, path, h, buf, &n, err) : mr_err_set(err, MR_E_NOMEM, "out of memory");
  if (rc == MR_OK) {
    mr_hasher_hex(h, hex);
    if (size)
      *size = n;
  }
  mr_mem_free(buf);
  mr_hasher_free(h);
  mr_sys_now->close(fd);
  return rc;
}

uint32_t mr_crc32c(uint32_t crc, const void *bytes, size_t len) {
  const unsigned char *p = bytes;
  uint64_t c = ~crc;
#ifdef __SSE4_2__
  for (; len >= 8; len -= 8, p += 8) {
    uint64_t word;
    memcpy(&word, p, 8);
    c = __builtin_ia32_crc32di(c, word);
  }
  for (; len; len--)
    c = __builtin_ia32_crc32qi((uint32_t)c, *p++);
#else
  for (; len; len--) {
    c ^= *p++;
    for (int bit = 0; bit < 8; bit++)
      c = (c >> 1) ^ (0x82f63b78u & (0u - (c & 1)));
  }
#endif
  return ~(uint32_t)c;
}
