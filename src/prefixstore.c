#include "src/prefixstore.h"

#include <fcntl.h>
#include <inttypes.h>
#include <string.h>

#include "io/cachedir.h"
#include "io/hash.h"
#include "io/mem.h"
#include "io/sys.h"
#include "io/text.h"

#define MAGIC 0x325847504b524d89ull /* "\x89MRKPGX2" */

typedef struct header { /* then n_tokens ids, then the page */
  uint64_t magic, page_bytes;
  uint64_t tokens_check, page_check; /* xxh3-64 */
  uint64_t tree;
  int64_t n_tokens;
} header;

struct mr_prefixstore {
  char *dir;  /* as given */
  char *mine; /* DIR/<key> */
  size_t page_bytes;
  uint64_t max_bytes;
  mr_text path;
  int32_t *tokens; /* of a file; grown */
  size_t cap_tokens;
  uint8_t *page; /* scratch */
  mr_prefixstore_stats stats;
};

static mr_code make_dir(const char *path, mr_err *err) {
  if (mr_sys_make_dir(path) == 0)
    return MR_OK;
  return mr_err_errno(err, MR_E_CANTCREATE, path, "--prefix-cache: cannot create the directory");
}

static mr_code new_store(mr_prefixstore **out, const char *dir, const char *key, mr_err *err) {
  mr_text mine = {0};
  mr_prefixstore *s = mr_mem_alloc(1, sizeof *s);
  mr_text_addf(&mine, "%s/%s", dir, key);
  if (s && !mine.failed)
    s->dir = mr_mem_copy(dir, strlen(dir));
  if (!s || !s->dir) {
    mr_text_free(&mine);
    mr_mem_free(s);
    return mr_err_set(err, MR_E_NOMEM, "out of memory for the prefix cache");
  }
  s->mine = mine.data;
  *out = s;
  return MR_OK;
}

mr_code mr_prefixstore_open(mr_prefixstore **out, const char *dir, const char *key,
                            size_t page_bytes, uint64_t max_bytes, mr_err *err) {
  mr_prefixstore *s;
  mr_code rc = new_store(&s, dir, key, err);
  if (rc)
    return rc;
  s->page_bytes = page_bytes;
  s->max_bytes = max_bytes;
  s->page = mr_mem_alloc(page_bytes, 1);
  if (!s->page)
    rc = mr_err_set(err, MR_E_NOMEM, "out of memory for the prefix cache");
  if (!rc)
    rc = make_dir(s->dir, err);
  if (!rc)
    rc = make_dir(s->mine, err);
  if (rc)
    mr_prefixstore_close(s);
  else
    *out = s;
  return rc;
}

mr_code mr_prefixstore_look(mr_prefixstore **out, const char *dir, const char *key, mr_err *err) {
  struct stat st;
  *out = NULL;
  mr_code rc = new_store(out, dir, key, err);
  if (!rc && mr_sys_now->stat((*out)->mine, &st)) {
    mr_prefixstore_close(*out);
    *out = NULL;
  }
  return rc;
}

void mr_prefixstore_close(mr_prefixstore *s) {
  mr_err ignored = MR_ERR_INIT;
  if (!s)
    return;
  if (s->stats.written_bytes)
    mr_cachedir_trim(s->dir, ".page", s->max_bytes, &s->stats.removed_bytes, &ignored);
  mr_mem_free(s->dir);
  mr_mem_free(s->mine);
  mr_mem_free(s->tokens);
  mr_mem_free(s->page);
  mr_text_free(&s->path);
  mr_mem_free(s);
}

static bool name_file(mr_prefixstore *s, uint64_t tokens_check) {
  mr_text_clear(&s->path);
  mr_text_addf(&s->path, "%s/%016" PRIx64 ".page", s->mine, tokens_check);
  return !s->path.failed;
}

static uint64_t check_of(uint64_t tree, const int32_t *tokens, int n) {
  return tree ^ mr_hash_64(tokens, (size_t)n * sizeof *tokens);
}

bool mr_prefixstore_has(mr_prefixstore *s, uint64_t tree, const int32_t *tokens, int n) {
  struct stat st;
  return name_file(s, check_of(tree, tokens, n)) && mr_sys_now->stat(s->path.data, &st) == 0;
}

static bool read_file(mr_prefixstore *s, int fd, uint64_t tree, const int32_t *tokens, int n,
                      void *page) {
  header h;
  size_t len = (size_t)n * sizeof *tokens;
  if (!mr_mem_grow((void **)&s->tokens, &s->cap_tokens, (size_t)n, sizeof *tokens) ||
      mr_sys_read_full(fd, &h, sizeof h) != (ssize_t)sizeof h || h.magic != MAGIC ||
      h.page_bytes != s->page_bytes || h.n_tokens != n || h.tree != tree)
    return false;
  if (mr_sys_read_full(fd, s->tokens, len) != (ssize_t)len || memcmp(s->tokens, tokens, len))
    return false;
  return mr_sys_read_full(fd, page, s->page_bytes) == (ssize_t)s->page_bytes &&
         mr_hash_64(page, s->page_bytes) == h.page_check;
}

static bool get(mr_prefixstore *s, uint64_t tree, const int32_t *tokens, int n, void *page) {
  int fd =
      name_file(s, check_of(tree, tokens, n)) ? mr_sys_now->open(s->path.data, O_RDONLY, 0) : -1;
  if (fd < 0)
    return false;
  bool ok = read_file(s, fd, tree, tokens, n, page);
  if (ok)
    mr_cachedir_touch(fd);
  mr_sys_now->close(fd);
  if (!ok)
    mr_sys_now->unlink(s->path.data); /* so that it is written anew */
  s->stats.bad += !ok;
  return ok;
}

bool mr_prefixstore_get(mr_prefixstore *s, uint64_t tree, const int32_t *tokens, int n,
                        void *page) {
  bool ok = get(s, tree, tokens, n, page);
  s->stats.read_bytes += ok ? s->page_bytes : 0;
  return ok;
}

void mr_prefixstore_put(mr_prefixstore *s, uint64_t tree, const int32_t *tokens, int n,
                        const void *page) {
  mr_err ignored = MR_ERR_INIT;
  if (get(s, tree, tokens, n, s->page))
    return; /* another run was here before */
  header h = {.magic = MAGIC,
              .page_bytes = s->page_bytes,
              .tokens_check = check_of(tree, tokens, n),
              .page_check = mr_hash_64(page, s->page_bytes),
              .tree = tree,
              .n_tokens = n};
  if (!name_file(s, h.tokens_check))
    return;
  const mr_bytes parts[] = {
      {&h, sizeof h}, {tokens, (size_t)n * sizeof *tokens}, {page, s->page_bytes}};
  if (mr_cachedir_write(s->path.data, parts, 3, &ignored) == MR_OK)
    s->stats.written_bytes += s->page_bytes;
}

void mr_prefixstore_stats_get(const mr_prefixstore *s, mr_prefixstore_stats *out) {
  *out = s->stats;
}
