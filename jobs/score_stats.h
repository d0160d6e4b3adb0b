/* score_stats.h: means with their uncertainty, in constant memory.
 *
 * Each row adds a value and a weight; the mean is the sum of values by the sum of weights. With
 * weight 1 that is the plain mean and its standard error the sample's deviation by the root of n;
 * with other weights (the tokens of a row) it is the ratio estimator and its linearized standard
 * error (Cochran, Sampling Techniques, 6.3). Shares of rows (all values 0 or 1) get the interval
 * of Wilson (1927), which holds near 0 and 1 too; others 1.96 standard errors on both sides.
 */
#ifndef MR_JOBS_SCORE_STATS_H
#define MR_JOBS_SCORE_STATS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct mr_stats { /* zero bytes: no rows */
  uint64_t n;
  double x, w, xx, xw, ww;
  bool uneven; /* a value was neither 0 nor 1, or a weight not 1 */
} mr_stats;

typedef struct mr_mean {
  uint64_t n;
  double mean, error, low, high; /* NAN: n is too small (0 for the mean, below 2 for the rest) */
} mr_mean;

void mr_stats_add(mr_stats *s, double value, double weight);
void mr_stats_add_zeros(mr_stats *s, uint64_t n); /* n rows of value 0, weight 1 */
/* least, most: what means of uneven values can be. */
mr_mean mr_stats_estimate(const mr_stats *s, double least, double most);

#endif
