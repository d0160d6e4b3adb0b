#include "src/special.h"

#include "io/mem.h"
#include "src/merge.h"

typedef struct finder {
  const mr_vocab *v;
  const char *text;
  size_t len;
  const uint8_t *plain;
  bool parse;
  int32_t *owner; /* [len] 0: free, id + 1: a token starts here, -1: inside of one or stripped */
  mr_heap heap;
} finder;

/* The longest token that stands at `at` within `room` bytes, or -1. */
static int32_t longest(const finder *f, size_t at, size_t room) {
  const mr_vocab *v = f->v;
  const uint8_t *s = (const uint8_t *)f->text + at;
  int32_t lo = v->special_from[s[0]], hi = v->special_from[s[0] + 1], best = -1;
  bool control = f->parse;
  for (uint32_t depth = 0; lo < hi && depth < room; depth++) {
    if (depth) {
      lo = mr_vocab_bound(v, v->special, lo, hi, depth, s[depth]);
      hi = mr_vocab_bound(v, v->special, lo, hi, depth, s[depth] + 1);
    }
    control = control && !(f->plain && f->plain[at + depth]);
    for (; lo < hi && mr_vocab_text(v, v->special[lo]).len == depth + 1; lo++)
      if (control || v->type[v->special[lo]] == MR_TOKEN_USER)
        best = v->special[lo];
  }
  return best;
}

static int propose(finder *f, size_t at, size_t room) {
  int32_t id = longest(f, at, room);
  if (id < 0)
    return 1;
  mr_candidate c = {.rank = -(int32_t)mr_vocab_text(f->v, id).len, .left = (int32_t)at, .id = id};
  return mr_heap_push(&f->heap, c);
}

static bool is_space(char c) {
  return c == ' ' || (c >= '\t' && c <= '\r');
}

static void take(finder *f, size_t at, size_t len, int32_t id) {
  size_t end = at + len;
  f->owner[at] = id + 1;
  for (size_t i = at + 1; i < end; i++)
    f->owner[i] = -1;
  if (f->v->mark[id] & MR_MARK_RSTRIP)
    for (; end < f->len && !f->owner[end] && is_space(f->text[end]); end++)
      f->owner[end] = -1;
}

/* Takes the candidates, best first. One that overlaps a taken token gives way to the longest that
 * still fits at its place. */
static int settle(finder *f) {
  while (f->heap.n) {
    mr_candidate c = mr_heap_pop(&f->heap);
    size_t at = (size_t)c.left, len = (size_t)-c.rank, room = 0;
    while (room < len && !f->owner[at + room])
      room++;
    if (room == len)
      take(f, at, len, c.id);
    else if (room && !propose(f, at, room))
      return 0;
  }
  return 1;
}

static int add(mr_spans *out, size_t at, size_t len, int32_t id) {
  if (out->n == out->cap && !mr_mem_grow((void **)&out->s, &out->cap, out->n + 1, sizeof *out->s))
    return 0;
  out->s[out->n++] = (mr_span){at, len, id};
  return 1;
}

static int collect(const finder *f, mr_spans *out) {
  for (size_t at = 0, end; at < f->len; at = end) {
    int32_t o = f->owner[at];
    end = at + 1;
    if (o > 0)
      end = at + mr_vocab_text(f->v, o - 1).len;
    else if (!o)
      while (end < f->len && !f->owner[end])
        end++;
    if (o >= 0 && !add(out, at, end - at, o - 1))
      return 0;
  }
  return 1;
}

int mr_special_split(const mr_vocab *v, const char *text, size_t len, const uint8_t *plain,
                     bool parse, mr_spans *out) {
  finder f = {.v = v, .text = text, .len = len, .plain = plain, .parse = parse};
  int ok = 1;
  for (size_t i = 0; ok && i < len; i++) {
    uint8_t c = (uint8_t)text[i];
    if (v->first_user[c] || (parse && v->special_from[c] < v->special_from[c + 1]))
      ok = propose(&f, i, len - i);
  }
  if (ok && !f.heap.n)
    return !len || add(out, 0, len, -1);
  if (ok)
    ok = (f.owner = mr_mem_alloc(len, sizeof *f.owner)) && settle(&f) && collect(&f, out);
  mr_mem_free(f.owner);
  mr_heap_free(&f.heap);
  return ok;
}

void mr_spans_free(mr_spans *s) {
  mr_mem_free(s->s);
  *s = (mr_spans){0};
}
