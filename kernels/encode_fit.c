#include "kernels/encode_fit.h"

#include <math.h>

#include "kernels/dtype.h"

#define TINY 1e-30f
#define GUESSES 24

/* How many steps the range is first cut into, beside the plain number: tenths up to one more or
 * fewer; then whole ones, since a group that was rounded before may not reach its ends. */
static float guess(int j) {
  return j < 21 ? 0.1f * (float)(j - 10) : (float)(19 - j);
}

float mr_k_mean_square(const float *x, int n) {
  float sum = 0;
  for (int i = 0; i < n; i++)
    sum += x[i] * x[i];
  return sum / (float)n;
}

void mr_k_fit_weights(float *w, const float *x, const float *importance, int n, float mean_square) {
  for (int i = 0; i < n; i++) {
    float large = sqrtf(mean_square + x[i] * x[i]);
    w[i] = importance ? importance[i] * large : large;
  }
}

typedef struct sums {         /* over a group, of weighted products */
  double w, x, q, qq, xq, xx; /* double: an error is a small difference of them */
} sums;

static void take(sums *s, double x, double w, double q) {
  s->w += w;
  s->x += w * x;
  s->q += w * q;
  s->qq += w * q * q;
  s->xq += w * x * q;
  s->xx += w * x * x;
}

/* The sums that depend on the guess, of all guesses side by side, so that they are computed
 * together. In float: they only choose. */
typedef struct lanes {
  float q[GUESSES], qq[GUESSES], xq[GUESSES];
} lanes;

static void try_all(lanes *restrict l, const float *restrict inv, const float *restrict x,
                    const float *restrict w, int n, float shift, float lo, float hi) {
  *l = (lanes){{0}, {0}, {0}};
  for (int i = 0; i < n; i++) {
    float v = x[i] - shift, wi = w[i], xi = x[i];
    for (int j = 0; j < GUESSES; j++) {
      float q = inv[j] * v;
      q = q < lo ? lo : q;
      q = q > hi ? hi : q;
      q = __builtin_rintf(q);
      l->q[j] += wi * q;
      l->qq[j] += wi * q * q;
      l->xq[j] += wi * xi * q;
    }
  }
}

/* The value furthest from 0, with its sign. */
static float extreme(const float *x, int n) {
  float best = 0;
  for (int i = 0; i < n; i++)
    best = fabsf(x[i]) > fabsf(best) ? x[i] : best;
  return best;
}

/* For any rounding q, s = sum(wxq) / sum(wqq) errs least, by sum(wxx) - sum(wxq)^2 / sum(wqq). */
float mr_k_fit_scale(const float *x, const float *w, int n, int lo, int hi) {
  float most = extreme(x, n), inv[GUESSES], gain = 0;
  lanes l;
  int best = -1;
  if (fabsf(most) < TINY)
    return 0;
  for (int j = 0; j < GUESSES; j++)
    inv[j] = ((float)lo - guess(j)) / most;
  try_all(&l, inv, x, w, n, 0, (float)lo, (float)hi);
  for (int j = 0; j < GUESSES; j++)
    if (l.qq[j] > 0 && l.xq[j] * l.xq[j] > gain * l.qq[j]) {
      gain = l.xq[j] * l.xq[j] / l.qq[j];
      best = j;
    }
  if (best < 0)
    return most / (float)lo;
  sums s = {0};
  for (int i = 0; i < n; i++)
    take(&s, x[i], w[i], mr_k_clamp_round(inv[best] * x[i], lo, hi));
  return (float)(s.xq / s.qq);
}

/* The best s and min for a rounding; a minimum below 0 is cut off unless `any`. Returns the error,
 * negative where there is no solution. */
static double solve(const sums *s, int any, float *scale, float *min) {
  double det = s->w * s->qq - s->q * s->q, d = 0, m = 0;
  if (det > 0) {
    d = (s->w * s->xq - s->x * s->q) / det;
    m = (s->q * s->xq - s->qq * s->x) / det;
  }
  if (det <= 0 || (m < 0 && !any)) {
    m = 0;
    d = s->qq > 0 ? s->xq / s->qq : 0;
  }
  if (!(d > 0))
    return -1;
  *scale = (float)d;
  *min = (float)m;
  double e = s->xx + d * d * s->qq + m * m * s->w - 2 * d * s->xq + 2 * m * s->x - 2 * d * m * s->q;
  return e > 0 ? e : 0;
}

/* The guess that errs least, -1: none. */
static int choose(const lanes *l, sums s, int any) {
  double least = -1;
  int best = -1;
  for (int j = 0; j < GUESSES; j++) {
    float d, m;
    s.q = l->q[j], s.qq = l->qq[j], s.xq = l->xq[j];
    double e = solve(&s, any, &d, &m);
    if (e >= 0 && (least < 0 || e < least)) {
      least = e;
      best = j;
    }
  }
  return best;
}

float mr_k_fit_scale_min(const float *x, const float *w, int n, int levels, int any, float *min) {
  float lo = x[0], hi = x[0], inv[GUESSES], scale = 0;
  sums s = {0}, exact = {0};
  lanes l;
  for (int i = 0; i < n; i++) {
    lo = x[i] < lo ? x[i] : lo;
    hi = x[i] > hi ? x[i] : hi;
    take(&s, x[i], w[i], 0);
  }
  lo = lo > 0 && !any ? 0 : lo;
  *min = -lo;
  if (!(hi - lo > TINY))
    return 0;
  for (int j = 0; j < GUESSES; j++)
    inv[j] = fmaxf((float)levels + guess(j), 0.5f) / (hi - lo);
  try_all(&l, inv, x, w, n, lo, 0, (float)levels);
  int best = choose(&l, s, any);
  if (best < 0)
    return (hi - lo) / (float)levels;
  for (int i = 0; i < n; i++)
    take(&exact, x[i], w[i], mr_k_clamp_round(inv[best] * (x[i] - lo), 0, levels));
  return solve(&exact, any, &scale, min) < 0 ? (hi - lo) / (float)levels : scale;
}

static const float iq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                              1,    13,   25,  38,  53,  69,  89,  113};
/* half-way between neighbours */
static const float between[15] = {-115.5f, -93.5f, -74,   -57,   -42, -28.5f, -16, -4.5f,
                                  7,       19,     31.5f, 45.5f, 61,  79,     101};

int mr_k_nearest_iq4(float v) {
  int i = v > between[7] ? 8 : 0;
  i += v > between[i + 3] ? 4 : 0;
  i += v > between[i + 1] ? 2 : 0;
  return i + (v > between[i] ? 1 : 0);
}

/* try_all with the table: its values are the first one and the gaps up to v. */
static void try_table(lanes *restrict l, const float *restrict inv, const float *restrict x,
                      const float *restrict w, int n) {
  *l = (lanes){{0}, {0}, {0}};
  for (int i = 0; i < n; i++) {
    float v[GUESSES], q[GUESSES];
    for (int j = 0; j < GUESSES; j++) {
      v[j] = inv[j] * x[i];
      q[j] = iq4[0];
    }
    for (int k = 0; k < 15; k++) {
      float gap = iq4[k + 1] - iq4[k], at = between[k];
      for (int j = 0; j < GUESSES; j++)
        q[j] += v[j] > at ? gap : 0;
    }
    float wi = w[i], wx = w[i] * x[i];
    for (int j = 0; j < GUESSES; j++) {
      l->qq[j] += wi * q[j] * q[j];
      l->xq[j] += wx * q[j];
    }
  }
}

float mr_k_fit_table(const float *x, const float *w, int n) {
  float most = extreme(x, n), inv[GUESSES], gain = 0;
  lanes l;
  int best = -1;
  if (fabsf(most) < TINY)
    return 0;
  for (int j = 0; j < GUESSES; j++) /* the extreme one goes to either end */
    inv[j] = (iq4[j % 2 ? 15 : 0] + 2 * (float)(j / 2 - 6)) / most;
  try_table(&l, inv, x, w, n);
  for (int j = 0; j < GUESSES; j++)
    if (l.qq[j] > 0 && l.xq[j] * l.xq[j] > gain * l.qq[j]) {
      gain = l.xq[j] * l.xq[j] / l.qq[j];
      best = j;
    }
  if (best < 0)
    return most / iq4[0];
  sums s = {0};
  for (int i = 0; i < n; i++)
    take(&s, x[i], w[i], iq4[mr_k_nearest_iq4(inv[best] * x[i])]);
  return (float)(s.xq / s.qq);
}

uint16_t mr_k_scale_f16(float d) {
  return mr_f32_to_f16(d > 65504 ? 65504 : d < -65504 ? -65504 : d);
}

void mr_k_store_u16(uint8_t *p, uint16_t v) {
  p[0] = (uint8_t)v;
  p[1] = (uint8_t)(v >> 8);
}
