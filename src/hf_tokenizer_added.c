/* Finds added tokens in a text: from the left, the longest at each place. */
#include <string.h>
#include <stdlib.h>
#include <utf8proc.h>

#include "io/mem.h"
#include "src/hf_tokenizer.h"

mr_code mr_hf_list_add(mr_hf_list *l, int32_t id, unsigned flags, const char *text, size_t len,
                       mr_err *err) {
  if (!len)
    return MR_OK;
  if (l->n == l->cap && !mr_mem_grow((void **)&l->t, &l->cap, l->n + 1, sizeof *l->t))
    return mr_hf_no_memory(err);
  char *copy = mr_mem_copy(text, len);
  if (!copy)
    return mr_hf_no_memory(err);
  l->t[l->n++] = (mr_hf_added){id, flags, copy, len};
  l->starts[(uint8_t)text[0]] = true;
  return MR_OK;
}

static int compare(const void *a, const void *b) {
  const mr_hf_added *s = a, *t = b;
  int d = memcmp(s->text, t->text, s->len < t->len ? s->len : t->len);
  return d ? d : s->len != t->len ? (s->len < t->len ? -1 : 1) : s->id - t->id;
}

void mr_hf_list_sort(mr_hf_list *l) {
  if (l->n)
    qsort(l->t, l->n, sizeof *l->t, compare);
}

void mr_hf_list_free(mr_hf_list *l) {
  for (size_t i = 0; i < l->n; i++)
    mr_mem_free(l->t[i].text);
  mr_mem_free(l->t);
  *l = (mr_hf_list){0};
}

/* First of t[lo, hi), all longer than `depth`, whose byte there is at least c. */
static size_t bound(const mr_hf_list *l, size_t lo, size_t hi, size_t depth, int c) {
  while (lo < hi) {
    size_t mid = lo + (hi - lo) / 2;
    if ((uint8_t)l->t[mid].text[depth] < c)
      lo = mid + 1;
    else
      hi = mid;
  }
  return lo;
}

/* The longest token at s within `room` bytes, or NULL. */
static const mr_hf_added *longest(const mr_hf_list *l, const char *s, size_t room,
                                  const uint8_t *plain, bool parse) {
  const mr_hf_added *best = NULL;
  size_t lo = 0, hi = l->n;
  bool special = parse;
  for (size_t depth = 0; lo < hi && depth < room; depth++) {
    int c = (uint8_t)s[depth];
    lo = bound(l, lo, hi, depth, c);
    hi = bound(l, lo, hi, depth, c + 1);
    special = special && !(plain && plain[depth]);
    for (; lo < hi && l->t[lo].len == depth + 1; lo++)
      if (special || !(l->t[lo].flags & MR_HF_SPECIAL))
        best = &l->t[lo];
  }
  return best;
}

static bool is_word(uint32_t c) {
  switch (utf8proc_category((utf8proc_int32_t)c)) {
  case UTF8PROC_CATEGORY_LU:
  case UTF8PROC_CATEGORY_LL:
  case UTF8PROC_CATEGORY_LT:
  case UTF8PROC_CATEGORY_LM:
  case UTF8PROC_CATEGORY_LO:
  case UTF8PROC_CATEGORY_MN:
  case UTF8PROC_CATEGORY_MC:
  case UTF8PROC_CATEGORY_ME:
  case UTF8PROC_CATEGORY_ND:
  case UTF8PROC_CATEGORY_NL:
  case UTF8PROC_CATEGORY_PC:
    return true;
  default:
    return c == 0x200c || c == 0x200d || (c >= 0x24b6 && c <= 0x24e9);
  }
}

/* Start of the character that ends before s[at], at > 0. */
static size_t back(const char *s, size_t at) {
  do
    at--;
  while (at && ((uint8_t)s[at] & 0xc0) == 0x80);
  return at;
}

static uint32_t code_at(const char *s, size_t len, size_t at) {
  uint32_t code;
  mr_utf8_next(s + at, len - at, &code);
  return code;
}

static bool stands_alone(const char *s, size_t len, size_t from, size_t to) {
  return (!from || !is_word(code_at(s, len, back(s, from)))) &&
         (to >= len || !is_word(code_at(s, len, to)));
}

static int add(mr_hf_spots *out, size_t at, size_t len, int32_t id) {
  if (out->n == out->cap && !mr_mem_grow((void **)&out->s, &out->cap, out->n + 1, sizeof *out->s))
    return 0;
  out->s[out->n++] = (mr_hf_spot){at, len, id};
  return 1;
}

/* Takes a match with the white space that belongs to it. */
static int take(const mr_hf_added *t, const char *s, size_t len, size_t from, size_t *done,
                mr_hf_spots *out) {
  size_t to = from + t->len;
  if (t->flags & MR_HF_LSTRIP)
    while (from > *done && mr_hf_is_space(code_at(s, len, back(s, from))))
      from = back(s, from);
  if (t->flags & MR_HF_RSTRIP)
    for (uint32_t code; to < len;) {
      size_t n = (size_t)mr_utf8_next(s + to, len - to, &code);
      if (!mr_hf_is_space(code))
        break;
      to += n;
    }
  if (*done < from && !add(out, *done, from - *done, -1))
    return 0;
  *done = to;
  return add(out, from, to - from, t->id);
}

mr_code mr_hf_find_added(const mr_hf_list *l, const char *s, size_t len, const uint8_t *plain,
                         bool parse, mr_hf_spots *out, mr_err *err) {
  size_t done = 0;
  for (size_t i = 0; i < len && l->n;) {
    const mr_hf_added *t =
        l->starts[(uint8_t)s[i]] ? longest(l, s + i, len - i, plain ? plain + i : NULL, parse) : 0;
    if (!t) {
      i++;
      continue;
    }
    if (!(t->flags & MR_HF_WORD) || stands_alone(s, len, i, i + t->len))
      if (!take(t, s, len, i, &done, out))
        return mr_hf_no_memory(err);
    i += t->len;
  }
  if (done < len && !add(out, done, len - done, -1))
    return mr_hf_no_memory(err);
  return MR_OK;
}
