#include "jobs/rowlist.h"

#include <inttypes.h>

static void put_run(mr_rowlist *l) {
  if (l->to == l->from)
    return;
  mr_text_addf(&l->text, "%s%" PRIu64 " %" PRIu64, l->text.len ? " " : "", l->from - l->end,
               l->to - l->from);
  l->end = l->to;
}

void mr_rowlist_add(mr_rowlist *l, uint64_t row) {
  if (l->to > l->from && row == l->to) {
    l->to++;
    return;
  }
  put_run(l);
  l->from = row;
  l->to = row + 1;
}

void mr_rowlist_end(mr_rowlist *l) {
  put_run(l);
  l->from = l->to;
  mr_text_add(&l->text, "", 0);
}

/* A number and what ends it: a space, or the end. */
static bool number(const char **s, uint64_t limit, uint64_t *v) {
  const char *p = *s;
  for (*v = 0; *p >= '0' && *p <= '9'; p++) {
    *v = *v * 10 + (uint64_t)(*p - '0');
    if (*v > limit)
      return false;
  }
  if (p == *s || (*p && *p != ' '))
    return false;
  *s = *p ? p + 1 : p;
  return true;
}

int mr_rowlist_next(mr_rowlist_at *at, uint64_t rows, uint64_t *row) {
  if (at->left == 0) {
    uint64_t skip, take;
    if (!*at->s)
      return 0;
    if (!number(&at->s, rows, &skip) || !number(&at->s, rows, &take) || take == 0 ||
        skip > rows - at->row || take > rows - at->row - skip)
      return -1;
    at->row += skip;
    at->left = take;
  }
  *row = at->row++;
  at->left--;
  return 1;
}
