#include "jobs/score_text.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "io/hash.h"
#include "io/mem.h"
#include "jobs/score_opts.h"

#define SQUAD (MR_IGNORE_SPACE | MR_IGNORE_CASE | MR_IGNORE_PUNCTUATION | MR_IGNORE_ARTICLES)
#define EXPONENT_MAX 99999

/* ------------------------------------------------------------------ characters */

static bool is_space(uint32_t c) {
  if (c < 0x80)
    return c == ' ' || (c >= 9 && c <= 13) || (c >= 0x1c && c <= 0x1f);
  if (c == 0x85)
    return true;
  utf8proc_category_t k = utf8proc_category((utf8proc_int32_t)c);
  return k == UTF8PROC_CATEGORY_ZS || k == UTF8PROC_CATEGORY_ZL || k == UTF8PROC_CATEGORY_ZP;
}

static bool is_digit(uint32_t c) {
  return c < 0x80 ? c >= '0' && c <= '9'
                  : utf8proc_category((utf8proc_int32_t)c) == UTF8PROC_CATEGORY_ND;
}

/* Letters and numbers of all scripts. */
static bool is_alnum(uint32_t c) {
  if (c < 0x80)
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
  utf8proc_category_t k = utf8proc_category((utf8proc_int32_t)c);
  return (k >= UTF8PROC_CATEGORY_LU && k <= UTF8PROC_CATEGORY_LO) ||
         (k >= UTF8PROC_CATEGORY_ND && k <= UTF8PROC_CATEGORY_NO);
}

static bool is_punct(uint32_t c) {
  return c > ' ' && c < 0x7f && !is_alnum(c);
}

static uint32_t lower(uint32_t c) {
  if (c < 0x80)
    return c >= 'A' && c <= 'Z' ? c + 32 : c;
  return (uint32_t)utf8proc_tolower((utf8proc_int32_t)c);
}

/* ------------------------------------------------------------------ normalization */

static void drop_characters(mr_str s, unsigned ignore, mr_text *out) {
  for (size_t i = 0; i < s.len;) {
    uint32_t c;
    int n = mr_utf8_next(s.s + i, s.len - i, &c);
    if (ignore & MR_IGNORE_CASE)
      c = lower(c);
    bool drop = (ignore & MR_IGNORE_PUNCTUATION && is_punct(c)) ||
                (ignore & MR_IGNORE_NUMBERS && is_digit(c));
    if (!drop)
      mr_text_add_code(out, c);
    i += (size_t)n;
  }
}

static bool is_article(const char *s, size_t len) {
  static const char *const articles[] = {"a", "an", "the"};
  for (size_t i = 0; i < sizeof articles / sizeof *articles; i++)
    if (strlen(articles[i]) == len && !strncasecmp(articles[i], s, len))
      return true;
  return false;
}

/* The end of the word (letters, numbers, _) at i; i itself if there is none. */
static size_t word_end(mr_str s, size_t i) {
  while (i < s.len) {
    uint32_t c;
    int n = mr_utf8_next(s.s + i, s.len - i, &c);
    if (!is_alnum(c) && c != '_')
      break;
    i += (size_t)n;
  }
  return i;
}

static void drop_articles(mr_str s, mr_text *out) {
  for (size_t i = 0; i < s.len;) {
    size_t end = word_end(s, i);
    uint32_t c;
    if (end == i) {
      end += (size_t)mr_utf8_next(s.s + i, s.len - i, &c);
      mr_text_add(out, s.s + i, end - i);
    } else if (is_article(s.s + i, end - i)) {
      mr_text_addc(out, ' ');
    } else {
      mr_text_add(out, s.s + i, end - i);
    }
    i = end;
  }
}

static void join_words(mr_str s, mr_text *out) {
  bool space = false, any = false;
  for (size_t i = 0; i < s.len;) {
    uint32_t c;
    int n = mr_utf8_next(s.s + i, s.len - i, &c);
    if (is_space(c)) {
      space = any;
    } else {
      if (space)
        mr_text_addc(out, ' ');
      mr_text_add(out, s.s + i, (size_t)n);
      space = false;
      any = true;
    }
    i += (size_t)n;
  }
}

static mr_str str_of(const mr_text *t) {
  return (mr_str){t->data ? t->data : "", t->len};
}

void mr_score_normalize(mr_str s, unsigned ignore, mr_text *out) {
  const unsigned characters = MR_IGNORE_CASE | MR_IGNORE_PUNCTUATION | MR_IGNORE_NUMBERS;
  mr_text a = {0}, b = {0};
  if (ignore & characters) {
    drop_characters(s, ignore, &a);
    s = str_of(&a);
  }
  if (ignore & MR_IGNORE_ARTICLES) {
    drop_articles(s, &b);
    s = str_of(&b);
  }
  if (ignore & MR_IGNORE_SPACE)
    join_words(s, out);
  else
    mr_text_add(out, s.s, s.len);
  out->failed |= a.failed || b.failed;
  mr_text_free(&a);
  mr_text_free(&b);
}

bool mr_score_contains(mr_str answer, mr_str ref) {
  return ref.len ? memmem(answer.s, answer.len, ref.s, ref.len) != NULL : answer.len == 0;
}

/* ------------------------------------------------------------------ words */

typedef struct words { /* by their hashes */
  uint64_t *hash;
  size_t n, cap;
  bool failed;
} words;

static void add_word(words *w, const char *s, size_t len) {
  if (!mr_mem_grow((void **)&w->hash, &w->cap, w->n + 1, sizeof *w->hash)) {
    w->failed = true;
    return;
  }
  w->hash[w->n++] = mr_hash_64(s, len);
}

/* Words of a normalized text, between single spaces. */
static void split_words(words *w, mr_str s) {
  for (size_t i = 0; i < s.len && !w->failed;) {
    const char *space = memchr(s.s + i, ' ', s.len - i);
    size_t end = space ? (size_t)(space - s.s) : s.len;
    if (end > i)
      add_word(w, s.s + i, end - i);
    i = end + 1;
  }
}

/* Runs of letters and numbers in lower case. */
static void split_runs(words *w, mr_str s) {
  mr_text word = {0};
  for (size_t i = 0; i < s.len && !w->failed;) {
    uint32_t c;
    i += (size_t)mr_utf8_next(s.s + i, s.len - i, &c);
    if (is_alnum(c)) {
      mr_text_add_code(&word, lower(c));
    } else if (word.len) {
      add_word(w, word.data, word.len);
      mr_text_clear(&word);
    }
  }
  if (word.len)
    add_word(w, word.data, word.len);
  w->failed |= word.failed;
  mr_text_free(&word);
}

static int by_value(const void *a, const void *b) {
  uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
  return x < y ? -1 : x > y;
}

/* Words that both have, each as often as the one that has it less. Sorts both. */
static size_t common(words *a, words *b) {
  size_t n = 0;
  if (a->n && b->n) {
    qsort(a->hash, a->n, sizeof *a->hash, by_value);
    qsort(b->hash, b->n, sizeof *b->hash, by_value);
  }
  for (size_t i = 0, j = 0; i < a->n && j < b->n;) {
    int order = by_value(&a->hash[i], &b->hash[j]);
    n += order == 0;
    i += order <= 0;
    j += order >= 0;
  }
  return n;
}

/* The harmonic mean of precision and recall. */
static double f_measure(size_t same, const words *a, const words *b) {
  return same ? 2.0 * (double)same / ((double)a->n + (double)b->n) : 0;
}

static void squad_words(words *w, mr_str s) {
  mr_text t = {0};
  mr_score_normalize(s, SQUAD, &t);
  split_words(w, str_of(&t));
  w->failed |= t.failed;
  mr_text_free(&t);
}

double mr_score_f1(mr_str answer, mr_str ref) {
  words a = {0}, b = {0};
  squad_words(&a, answer);
  squad_words(&b, ref);
  double f = a.failed || b.failed   ? -1
             : a.n == 0 || b.n == 0 ? (double)(a.n == b.n)
                                    : f_measure(common(&a, &b), &a, &b);
  mr_mem_free(a.hash);
  mr_mem_free(b.hash);
  return f;
}

/* The length of the longest common subsequence; `row` holds b->n + 1 zeros. */
static size_t longest_common(const words *a, const words *b, uint32_t *row) {
  for (size_t i = 0; i < a->n; i++) {
    uint32_t diagonal = 0;
    for (size_t j = 0; j < b->n; j++) {
      uint32_t above = row[j + 1];
      if (a->hash[i] == b->hash[j])
        row[j + 1] = diagonal + 1;
      else if (row[j] > above)
        row[j + 1] = row[j];
      diagonal = above;
    }
  }
  return row[b->n];
}

double mr_score_rouge_l(mr_str answer, mr_str ref) {
  words a = {0}, b = {0};
  double f = -1;
  split_runs(&a, answer);
  split_runs(&b, ref);
  if (!a.failed && !b.failed && a.n && b.n > MR_ROUGE_CELLS / a.n) {
    f = -2;
  } else if (!a.failed && !b.failed) {
    uint32_t *row = mr_mem_alloc(b.n + 1, sizeof *row);
    f = row ? f_measure(longest_common(&a, &b, row), &a, &b) : -1;
    mr_mem_free(row);
  }
  mr_mem_free(a.hash);
  mr_mem_free(b.hash);
  return f;
}

/* ------------------------------------------------------------------ numbers */

typedef struct number { /* digits * 10^exponent, without zeros at either end; 0 has no digits */
  bool negative;
  long exponent;
  mr_str digits; /* of the text: commas and a point may stand between them */
  size_t n;      /* digits in it */
} number;

static bool digit_at(mr_str s, size_t i) {
  return i < s.len && s.s[i] >= '0' && s.s[i] <= '9';
}

/* A comma that parts thousands: three digits follow, and no fourth. */
static bool is_thousands(mr_str s, size_t i, size_t from) {
  const char *comma = memchr(s.s + from, ',', i - from);
  size_t first = comma ? (size_t)(comma - s.s) - from : i - from;
  return i < s.len && s.s[i] == ',' && first >= 1 && first <= 3 && digit_at(s, i + 1) &&
         digit_at(s, i + 2) && digit_at(s, i + 3) && !digit_at(s, i + 4);
}

/* e+12 at i: its end and value; i if there is none. */
static size_t read_exponent(mr_str s, size_t i, long *value) {
  size_t at = i + 1;
  long v = 0;
  *value = 0;
  if (i >= s.len || (s.s[i] != 'e' && s.s[i] != 'E'))
    return i;
  bool negative = at < s.len && s.s[at] == '-';
  at += at < s.len && (s.s[at] == '-' || s.s[at] == '+');
  if (!digit_at(s, at))
    return i;
  for (; digit_at(s, at); at++)
    if ((v = v * 10 + (s.s[at] - '0')) > EXPONENT_MAX)
      return i;
  *value = negative ? -v : v;
  return at;
}

/* Takes zeros off both ends. `whole`: digits before the point. */
static void trim(number *x, size_t whole) {
  mr_str d = x->digits;
  while (d.len && (d.s[0] == '0' || d.s[0] == ',' || d.s[0] == '.')) {
    if (d.s[0] == '0' && whole)
      whole--;
    else if (d.s[0] == '0')
      x->exponent--;
    x->n -= d.s[0] == '0';
    d.s++, d.len--;
  }
  while (d.len && (d.s[d.len - 1] == '0' || d.s[d.len - 1] == ',' || d.s[d.len - 1] == '.')) {
    x->n -= d.s[d.len - 1] == '0';
    d.len--;
  }
  x->exponent += (long)whole;
  x->digits = d;
  if (!x->n)
    *x = (number){0};
}

/* A number that begins at i (a digit, or a point before one): its end. The exponent is that of
 * 0.DIGITS. */
static size_t read_number(mr_str s, size_t i, number *x) {
  size_t from = i, whole = 0;
  long exponent;
  *x = (number){0};
  while (digit_at(s, i) || is_thousands(s, i, from)) {
    whole += s.s[i] != ',';
    i++;
  }
  x->n = whole;
  if (i < s.len && s.s[i] == '.' && digit_at(s, i + 1))
    for (i++; digit_at(s, i); i++)
      x->n++;
  x->digits = (mr_str){s.s + from, i - from};
  i = read_exponent(s, i, &exponent);
  x->exponent = exponent;
  trim(x, whole);
  return i;
}

/* Whether the sign before `from` (perhaps with a $ between) is a minus, and no dash in "3-5". */
static bool is_negative(mr_str s, size_t from) {
  if (from && s.s[from - 1] == '$')
    from--;
  size_t dash = 0;
  if (from >= 1 && s.s[from - 1] == '-')
    dash = 1;
  else if (from >= 3 && !memcmp(s.s + from - 3, "\xE2\x88\x92", 3))
    dash = 3;
  if (!dash || from == dash)
    return dash > 0;
  size_t at = from - dash - 1; /* the character before it */
  for (int i = 0; i < 3 && at && (s.s[at] & 0xC0) == 0x80; i++)
    at--;
  uint32_t before;
  mr_utf8_next(s.s + at, from - dash - at, &before);
  return !is_alnum(before);
}

static bool last_number(mr_str s, bool first, number *x) {
  bool found = false;
  for (size_t i = 0; i < s.len;) {
    bool point = s.s[i] == '.' && digit_at(s, i + 1) && !digit_at(s, i ? i - 1 : s.len);
    if (!digit_at(s, i) && !point) {
      i++;
      continue;
    }
    bool negative = is_negative(s, i);
    i = read_number(s, i, x);
    x->negative = negative && x->n;
    found = true;
    if (first)
      break;
  }
  return found;
}

/* Behind the last ####, else the last of the text. */
static bool final_number(mr_str s, number *x) {
  for (size_t i = s.len; i >= 4; i--)
    if (!memcmp(s.s + i - 4, "####", 4)) {
      if (last_number((mr_str){s.s + i, s.len - i}, true, x))
        return true;
      break;
    }
  return last_number(s, false, x);
}

/* The next digit at or behind *at. */
static char next_digit(mr_str s, size_t *at) {
  while (*at < s.len && !digit_at(s, *at))
    ++*at;
  return *at < s.len ? s.s[(*at)++] : '\0';
}

bool mr_score_same_number(mr_str answer, mr_str ref) {
  number a, b;
  if (!final_number(answer, &a) || !final_number(ref, &b) || a.negative != b.negative ||
      a.exponent != b.exponent || a.n != b.n)
    return false;
  size_t i = 0, j = 0;
  for (size_t k = 0; k < a.n; k++)
    if (next_digit(a.digits, &i) != next_digit(b.digits, &j))
      return false;
  return true;
}

int mr_score_label(mr_str label) {
  char buf[16];
  int64_t v;
  if (label.len == 1 &&
      ((label.s[0] >= 'A' && label.s[0] <= 'Z') || (label.s[0] >= 'a' && label.s[0] <= 'z')))
    return (label.s[0] | 32) - 'a';
  if (!label.len || label.len >= sizeof buf)
    return -1;
  memcpy(buf, label.s, label.len);
  buf[label.len] = '\0';
  return mr_parse_int(buf, &v) && v >= 0 && v <= INT32_MAX ? (int)v : -1;
}
