#include "io/gunzip.h"

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <zlib.h>

#include "io/mem.h"

struct mr_gunzip {
  z_stream z;
  bool inside;  /* a member has begun and not ended */
  bool any;     /* a member has ended */
  bool padding; /* zero bytes after a member: nothing else may follow */
};

static voidpf z_take(voidpf opaque, uInt items, uInt size) {
  (void)opaque;
  return mr_mem_alloc(items, size);
}

static void z_give(voidpf opaque, voidpf p) {
  (void)opaque;
  mr_mem_free(p);
}

mr_code mr_gunzip_open(mr_gunzip **out, mr_err *err) {
  mr_gunzip *g = mr_mem_alloc(1, sizeof *g);
  if (!g)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for gzip");
  g->z.zalloc = z_take;
  g->z.zfree = z_give;
  if (inflateInit2(&g->z, 15 + 16) != Z_OK) { /* 32 KiB window, gzip framing */
    mr_mem_free(g);
    return mr_err_set(err, MR_E_NOMEM, "out of memory for gzip");
  }
  *out = g;
  return MR_OK;
}

void mr_gunzip_feed(mr_gunzip *g, const void *in, size_t n) {
  g->z.next_in = (Bytef *)(uintptr_t)in;
  g->z.avail_in = (uInt)n;
}

/* Between members: skips padding, starts the next one. */
static mr_code between(mr_gunzip *g, mr_err *err) {
  while (g->any && g->z.avail_in && *g->z.next_in == 0) {
    g->padding = true;
    g->z.next_in++;
    g->z.avail_in--;
  }
  if (!g->z.avail_in)
    return MR_OK;
  if (g->padding || (g->any && *g->z.next_in != 0x1f))
    return mr_err_set(err, MR_E_DATA, "there is something else behind the gzip data");
  if (inflateReset(&g->z) != Z_OK)
    return mr_err_set(err, MR_E_INTERNAL, "gzip: cannot start a member");
  g->inside = true;
  return MR_OK;
}

mr_code mr_gunzip_read(mr_gunzip *g, void *out, size_t cap, size_t *got, mr_err *err) {
  g->z.next_out = out;
  g->z.avail_out = cap > INT_MAX ? INT_MAX : (uInt)cap;
  const uInt room = g->z.avail_out;
  while (g->z.avail_out) {
    if (!g->inside) {
      mr_code rc = between(g, err);
      if (rc != MR_OK)
        return rc;
      if (!g->inside)
        break;
    }
    int r = inflate(&g->z, Z_NO_FLUSH);
    if (r == Z_STREAM_END) {
      g->inside = false;
      g->any = true;
    } else if (r == Z_BUF_ERROR) { /* no progress: more input is needed */
      break;
    } else if (r == Z_MEM_ERROR) {
      return mr_err_set(err, MR_E_NOMEM, "out of memory for gzip");
    } else if (r != Z_OK) {
      return mr_err_set(err, MR_E_DATA, "gzip data is broken: %s",
                        g->z.msg ? g->z.msg : "no reason given");
    }
  }
  *got = room - g->z.avail_out;
  return MR_OK;
}

mr_code mr_gunzip_end(const mr_gunzip *g, mr_err *err) {
  if (g->inside || !g->any)
    return mr_err_set(err, MR_E_DATA, "gzip data is cut off: the end of the stream is missing");
  return MR_OK;
}

void mr_gunzip_close(mr_gunzip *g) {
  if (!g)
    return;
  inflateEnd(&g->z);
  mr_mem_free(g);
}
