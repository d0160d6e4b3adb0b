#include "io/lines.h"

#include <string.h>

void mr_lines_init(mr_lines *l, mr_source *source, size_t max_bytes, mr_hasher *hasher) {
  *l = (mr_lines){.source = source, .hasher = hasher, .max_bytes = max_bytes};
}

void mr_lines_free(mr_lines *l) {
  mr_text_free(&l->carry);
}

void mr_lines_start(mr_lines *l) {
  l->at = l->end = NULL;
  mr_text_clear(&l->carry);
  l->skipped = 0;
  l->number = 1;
  l->over = false;
}

/* The next block. Where a text ends, 0xFF (never a byte of UTF-8) goes into the digest, so that two
 * files do not look like one. */
static mr_code more(mr_lines *l, mr_err *err) {
  const char *data;
  size_t n;
  mr_code rc = mr_source_read(l->source, &data, &n, err);
  if (rc != MR_OK)
    return rc;
  l->at = data;
  l->end = data + n;
  l->over = n == 0;
  l->text_bytes += n;
  if (l->hasher)
    mr_hasher_add(l->hasher, n ? data : "\xff", n ? n : 1);
  return MR_OK;
}

static bool is_blank(const char *s, size_t len) {
  for (size_t i = 0; i < len; i++)
    if (s[i] != ' ' && s[i] != '\t' && s[i] != '\r')
      return false;
  return true;
}

/* Gives a whole line; false if it is blank. */
static bool give(mr_lines *l, const char *s, size_t len, mr_line *out) {
  if (l->number == 1 && len >= 3 && !memcmp(s, "\xEF\xBB\xBF", 3)) {
    s += 3;
    len -= 3;
  }
  if (len && s[len - 1] == '\r')
    len--;
  if (is_blank(s, len))
    return false;
  *out = (mr_line){.s = s, .len = len, .number = l->number};
  return true;
}

/* Keeps the beginning of a line whose end is not in sight, or only counts it when it is too long.
 */
static mr_code keep(mr_lines *l, const char *s, size_t len, mr_err *err) {
  if (l->skipped || l->carry.len + len > l->max_bytes) {
    l->skipped += (l->skipped ? 0 : l->carry.len) + len;
    mr_text_clear(&l->carry);
    return MR_OK;
  }
  mr_text_add(&l->carry, s, len);
  return l->carry.failed ? mr_err_set(err, MR_E_NOMEM, "out of memory for a line") : MR_OK;
}

/* The line that `keep` holds has ended; false if it is blank. */
static bool give_kept(mr_lines *l, mr_line *out) {
  if (!l->skipped)
    return give(l, l->carry.data ? l->carry.data : "", l->carry.len, out);
  *out = (mr_line){.s = "", .len = (size_t)l->skipped, .number = l->number, .too_long = true};
  return true;
}

/* One line that ends at `nl`, or the rest of the block when nl is NULL. *given: *out is set. */
static mr_code take(mr_lines *l, const char *nl, bool whole, mr_line *out, bool *given,
                    mr_err *err) {
  size_t len = (size_t)((nl ? nl : l->end) - l->at);
  const char *s = l->at;
  l->at = nl ? nl + 1 : l->end;
  if (whole && nl && len <= l->max_bytes) {
    *given = give(l, s, len, out);
    return MR_OK;
  }
  mr_code rc = len ? keep(l, s, len, err) : MR_OK;
  if (rc == MR_OK && nl)
    *given = give_kept(l, out);
  return rc;
}

/* Passes over newlines at once: a file may hold hundreds of millions. */
static void skip_empty(mr_lines *l) {
  while (l->at < l->end && *l->at == '\n') {
    l->at++;
    l->number++;
  }
}

static void forget(mr_lines *l) {
  mr_text_clear(&l->carry);
  l->skipped = 0;
}

mr_code mr_lines_next(mr_lines *l, mr_line *out, mr_err *err) {
  *out = (mr_line){0};
  bool whole = true; /* the line begins in this block */
  bool given = false;
  forget(l);
  while (!given) {
    if (whole)
      skip_empty(l);
    if (l->at == l->end) {
      mr_code rc = l->over ? MR_OK : more(l, err);
      if (rc != MR_OK)
        return rc;
      if (!l->over)
        continue;
      if (!whole) /* a last line without its newline */
        give_kept(l, out);
      return MR_OK;
    }
    const char *nl = memchr(l->at, '\n', (size_t)(l->end - l->at));
    mr_code rc = take(l, nl, whole, out, &given, err);
    if (rc != MR_OK)
      return rc;
    whole = nl != NULL;
    if (nl)
      l->number++;
    if (nl && !given)
      forget(l);
  }
  return MR_OK;
}
