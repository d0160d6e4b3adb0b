/* fold.h: factors on the columns of matrices that are undone where the rows come from, so that the
 * model computes the same and its weights, or its activations, are easier to round.
 *
 * The input of q, k, v and of gate, up is divided in the norm before it; that of attention's output
 * matrix in the rows of v (heads that share keys share factors), that of down in the rows of up.
 *
 * SmoothQuant (Xiao et al. 2022): factor = max|x| ^ a / max|w| ^ (1 - a), a = 0.5, of the norms.
 * AWQ (Lin et al. 2023): factor = mean|x| ^ a, a chosen for each site by the error that
 * rounding then makes, weighted by the mean square of the activations.
 *
 *     mr_folds f;
 *     mr_folds_make(&f, m, calibration, &spec, pool, &err);
 *     const float *s = mr_folds_of(&f, layer, MR_SITE_QKV);   [k] on columns, or NULL: none
 *     mr_folds_free(&f);
 */
#ifndef MR_SRC_FOLD_H
#define MR_SRC_FOLD_H

#include "src/calibrate.h"

typedef enum mr_fold_method { MR_FOLD_SMOOTH, MR_FOLD_AWQ } mr_fold_method;

typedef struct mr_folds {
  int n_layers;
  float **scale; /* [n_layers * MR_SITES]; owned */
} mr_folds;

typedef struct mr_fold_spec {
  mr_fold_method method;
  /* AWQ: the rounding whose error counts */
  int group;    /* columns of a group; 0: 128 */
  int levels;   /* steps of a group; 0: 15 */
  bool centred; /* around 0; else from the smallest value to the largest */
} mr_fold_spec;

mr_code mr_folds_make(mr_folds *f, const mr_model *m, const mr_calibration *c,
                      const mr_fold_spec *spec, mr_pool *pool, mr_err *err);
void mr_folds_free(mr_folds *f);
const float *mr_folds_of(const mr_folds *f, int layer, mr_site_kind kind);
/* The factor of MR_SITE_OUT that row `row` of v is divided by. */
float mr_folds_value(const mr_folds *f, const mr_config *c, int layer, int row);

#endif
