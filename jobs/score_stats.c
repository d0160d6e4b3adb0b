#include "jobs/score_stats.h"

#include <math.h>

#define Z95 1.959963984540054

void mr_stats_add(mr_stats *s, double value, double weight) {
  s->n++;
  s->x += value;
  s->w += weight;
  s->xx += value * value;
  s->xw += value * weight;
  s->ww += weight * weight;
  s->uneven |= (value != 0 && value != 1) || weight != 1;
}

void mr_stats_add_zeros(mr_stats *s, uint64_t n) {
  s->n += n;
  s->w += (double)n;
  s->ww += (double)n;
}

static void wilson(mr_mean *e) {
  double n = (double)e->n, z2 = Z95 * Z95;
  double middle = (e->mean + z2 / (2 * n)) / (1 + z2 / n);
  double half = Z95 / (1 + z2 / n) * sqrt(e->mean * (1 - e->mean) / n + z2 / (4 * n * n));
  e->low = fmax(0, middle - half);
  e->high = fmin(1, middle + half);
}

mr_mean mr_stats_estimate(const mr_stats *s, double least, double most) {
  mr_mean e = {.n = s->n, .mean = NAN, .error = NAN, .low = NAN, .high = NAN};
  if (s->n == 0 || s->w <= 0)
    return e;
  double n = (double)s->n;
  e.mean = s->x / s->w;
  if (s->n < 2)
    return e;
  double squares = s->xx - 2 * e.mean * s->xw + e.mean * e.mean * s->ww;
  e.error = sqrt(fmax(0, squares) * n / (n - 1)) / s->w;
  if (!s->uneven) {
    wilson(&e);
  } else {
    e.low = fmax(least, e.mean - Z95 * e.error);
    e.high = fmin(most, e.mean + Z95 * e.error);
  }
  return e;
}
