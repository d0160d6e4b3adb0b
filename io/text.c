#include "io/text.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "io/mem.h"

static bool reserve(mr_text *t, size_t more) {
  if (t->failed)
    return false;
  if (more > SIZE_MAX - t->len - 1 ||
      !mr_mem_grow((void **)&t->data, &t->cap, t->len + more + 1, 1)) {
    t->failed = true;
    return false;
  }
  return true;
}

void mr_text_add(mr_text *t, const void *bytes, size_t len) {
  if (!reserve(t, len))
    return;
  if (len)
    memcpy(t->data + t->len, bytes, len);
  t->len += len;
  t->data[t->len] = '\0';
}

void mr_text_adds(mr_text *t, const char *s) {
  mr_text_add(t, s, strlen(s));
}

void mr_text_addc(mr_text *t, char c) {
  mr_text_add(t, &c, 1);
}

void mr_text_addf(mr_text *t, const char *fmt, ...) {
  char small[256];
  va_list ap, again;
  va_start(ap, fmt);
  va_copy(again, ap);
  int n = vsnprintf(small, sizeof small, fmt, ap);
  va_end(ap);
  if (n < 0) {
    t->failed = true;
  } else if ((size_t)n < sizeof small) {
    mr_text_add(t, small, (size_t)n);
  } else if (reserve(t, (size_t)n)) {
    vsnprintf(t->data + t->len, (size_t)n + 1, fmt, again);
    t->len += (size_t)n;
  }
  va_end(again);
}

void mr_text_add_code(mr_text *t, uint32_t c) {
  char b[4];
  size_t n;
  if (c < 0x80) {
    b[0] = (char)c;
    n = 1;
  } else if (c < 0x800) {
    b[0] = (char)(0xC0 | c >> 6);
    b[1] = (char)(0x80 | (c & 63));
    n = 2;
  } else if (c < 0x10000) {
    b[0] = (char)(0xE0 | c >> 12);
    b[1] = (char)(0x80 | (c >> 6 & 63));
    b[2] = (char)(0x80 | (c & 63));
    n = 3;
  } else {
    b[0] = (char)(0xF0 | c >> 18);
    b[1] = (char)(0x80 | (c >> 12 & 63));
    b[2] = (char)(0x80 | (c >> 6 & 63));
    b[3] = (char)(0x80 | (c & 63));
    n = 4;
  }
  mr_text_add(t, b, n);
}

void mr_text_clear(mr_text *t) {
  t->len = 0;
  if (t->data)
    t->data[0] = '\0';
}

void mr_text_free(mr_text *t) {
  mr_mem_free(t->data);
  *t = (mr_text){0};
}

/* Length that the lead byte promises (0: not a lead byte) and the range of the second byte (Unicode
 * table 3-7). */
static int lead(unsigned char c, unsigned char *lo, unsigned char *hi) {
  *lo = 0x80;
  *hi = 0xBF;
  if (c < 0x80)
    return 1;
  if (c < 0xC2 || c > 0xF4)
    return 0;
  if (c == 0xE0)
    *lo = 0xA0;
  else if (c == 0xED)
    *hi = 0x9F;
  else if (c == 0xF0)
    *lo = 0x90;
  else if (c == 0xF4)
    *hi = 0x8F;
  return c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
}

/* Length of the sequence at s: > 0 valid, 0 invalid, -1 valid as far as it goes but cut by `len`.
 */
static int sequence(const char *s, size_t len) {
  unsigned char lo, hi;
  const unsigned char *u = (const unsigned char *)s;
  int n = lead(u[0], &lo, &hi);
  for (int i = 1; i < n; i++) {
    if ((size_t)i >= len)
      return -1;
    if (u[i] < lo || u[i] > hi)
      return 0;
    lo = 0x80;
    hi = 0xBF;
  }
  return n;
}

int64_t mr_utf8_valid(const char *s, size_t len) {
  size_t i = 0;
  while (i < len) {
    if (i + 8 <= len) {
      uint64_t w;
      memcpy(&w, s + i, 8);
      if (!(w & 0x8080808080808080u)) {
        i += 8;
        continue;
      }
    }
    int n = sequence(s + i, len - i);
    if (n <= 0)
      return (int64_t)i;
    i += (size_t)n;
  }
  return -1;
}

int mr_utf8_next(const char *s, size_t len, uint32_t *out) {
  const unsigned char *u = (const unsigned char *)s;
  int n = sequence(s, len);
  if (n <= 0) {
    *out = 0xFFFD;
    return 1;
  }
  uint32_t c = n == 1 ? u[0] : u[0] & (0xFFu >> (n + 1));
  for (int i = 1; i < n; i++)
    c = c << 6 | (u[i] & 63);
  *out = c;
  return n;
}

size_t mr_utf8_whole(const char *s, size_t len) {
  for (size_t back = 1; back <= 3 && back <= len; back++) {
    unsigned char c = (unsigned char)s[len - back];
    if ((c & 0xC0) == 0x80)
      continue;
    return sequence(s + len - back, back) < 0 ? len - back : len;
  }
  return len;
}

static int base64_digit(char c) {
  if (c >= 'A' && c <= 'Z')
    return c - 'A';
  if (c >= 'a' && c <= 'z')
    return c - 'a' + 26;
  if (c >= '0' && c <= '9')
    return c - '0' + 52;
  return c == '+' ? 62 : c == '/' ? 63 : -1;
}

bool mr_base64_decode(const char *s, size_t len, mr_text *t) {
  if (len % 4)
    return false;
  for (size_t i = 0; i < len; i += 4) {
    int pad = i + 4 == len ? (s[i + 3] == '=') + (s[i + 3] == '=' && s[i + 2] == '=') : 0;
    uint32_t v = 0;
    for (int k = 0; k < 4; k++) {
      int d = k >= 4 - pad ? 0 : base64_digit(s[i + (size_t)k]);
      if (d < 0)
        return false;
      v = v << 6 | (uint32_t)d;
    }
    char b[3] = {(char)(v >> 16), (char)(v >> 8), (char)v};
    mr_text_add(t, b, (size_t)(3 - pad));
  }
  return !t->failed;
}

bool mr_parse_real(const char *s, double *value) {
  char *end;
  if (!*s || isspace((unsigned char)*s))
    return false;
  errno = 0;
  *value = strtod(s, &end);
  return !*end && isfinite(*value);
}

bool mr_parse_int(const char *s, int64_t *value) {
  char *end;
  if (!*s || isspace((unsigned char)*s))
    return false;
  errno = 0;
  *value = strtoll(s, &end, 10);
  return !*end && errno == 0;
}

/* A number that is not negative, and the unit after it. */
static bool number_and_unit(const char *s, double *v, const char **unit) {
  char *end;
  if (!isdigit((unsigned char)*s))
    return false;
  *v = strtod(s, &end);
  *unit = end;
  return isfinite(*v);
}

bool mr_parse_size(const char *s, uint64_t *bytes) {
  static const struct {
    const char *name;
    int shift;
  } units[] = {{"", 0}, {"B", 0}, {"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}};
  double v;
  const char *unit;
  if (!number_and_unit(s, &v, &unit))
    return false;
  for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
    if (strcmp(unit, units[i].name))
      continue;
    v = ldexp(v, units[i].shift);
    if (v >= 9.2e18)
      return false;
    *bytes = (uint64_t)v;
    return true;
  }
  return false;
}

bool mr_parse_duration(const char *s, double *seconds) {
  static const struct {
    const char *name;
    double seconds;
  } units[] = {{"", 1}, {"s", 1}, {"m", 60}, {"h", 3600}, {"d", 86400}};
  double v;
  const char *unit;
  if (!number_and_unit(s, &v, &unit))
    return false;
  for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
    if (strcmp(unit, units[i].name))
      continue;
    *seconds = v * units[i].seconds;
    return *seconds < 1e9;
  }
  return false;
}

bool mr_parse_clock(const char *s, int *minutes) {
  if (strlen(s) != 5 || s[2] != ':')
    return false;
  for (int i = 0; i < 5; i++)
    if (i != 2 && !isdigit((unsigned char)s[i]))
      return false;
  int h = (s[0] - '0') * 10 + s[1] - '0', m = (s[3] - '0') * 10 + s[4] - '0';
  *minutes = h * 60 + m;
  return h < 24 && m < 60;
}

#define NEAR_MAX 64

static size_t edit_distance(const char *a, const char *b) {
  size_t n = strlen(a), m = strlen(b), row[NEAR_MAX + 1];
  if (n > NEAR_MAX || m > NEAR_MAX)
    return NEAR_MAX;
  for (size_t j = 0; j <= m; j++)
    row[j] = j;
  for (size_t i = 1; i <= n; i++) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= m; j++) {
      size_t best = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      if (row[j] + 1 < best)
        best = row[j] + 1;
      if (row[j - 1] + 1 < best)
        best = row[j - 1] + 1;
      row[j] = best;
    }
  }
  return row[m];
}

const char *mr_nearest(const char *word, const char *const *names, size_t n) {
  const char *best = NULL;
  size_t least = NEAR_MAX;
  for (size_t i = 0; i < n; i++) {
    size_t d = edit_distance(word, names[i]);
    if (d < least) {
      least = d;
      best = names[i];
    }
  }
  size_t len = strlen(word);
  return best && least <= len / 3 + 1 && least < len ? best : NULL;
}
