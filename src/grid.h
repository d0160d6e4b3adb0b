/* grid.h: where the values of a quantized matrix may lie: w = scale * q + base with whole q from 0
 * to levels, scale and base for each group of consecutive columns of a row.
 *
 *     mr_grid g;
 *     mr_grid_open(&g, rows, k, spec, &err);
 *     mr_grid_fit(&g, row, w, importance);          for each row
 *     q = mr_grid_code(&g, row, col, v);  v = mr_grid_value(&g, row, col, q);
 *     mr_grid_close(&g);
 *
 * Scales are fitted as in kernels/encode_fit.h and then rounded as the format stores them.
 */
#ifndef MR_SRC_GRID_H
#define MR_SRC_GRID_H

#include <stdbool.h>
#include <stdint.h>

#include "io/err.h"

typedef enum mr_grid_kind {
  MR_GRID_CENTRED, /* base is -(levels + 1) / 2 scales: the middle code is 0 */
  MR_GRID_WHOLE,   /* base is -z scales, z whole from 0 to levels */
  MR_GRID_RANGED   /* base is any number */
} mr_grid_kind;

typedef struct mr_grid_spec {
  mr_grid_kind kind;
  int levels; /* largest code */
  int group;  /* columns; 0: all of a row */
  bool half;  /* scales are stored in f16, else in f32 */
  bool plain; /* the scale is the largest value's, not fitted */
} mr_grid_spec;

typedef struct mr_grid {
  mr_grid_spec spec;
  int rows, k, groups;
  float *scale, *base; /* [rows, groups]; owned */
} mr_grid;

mr_code mr_grid_open(mr_grid *g, int rows, int k, const mr_grid_spec *spec, mr_err *err);
void mr_grid_close(mr_grid *g);
/* importance: [k], or NULL. room: k floats. */
void mr_grid_fit(mr_grid *g, int row, const float *w, const float *importance, float *room);

static inline int mr_grid_at(const mr_grid *g, int row, int col) {
  return row * g->groups + col / g->spec.group;
}

int mr_grid_code(const mr_grid *g, int row, int col, float v);
float mr_grid_value(const mr_grid *g, int row, int col, int q);

#endif
