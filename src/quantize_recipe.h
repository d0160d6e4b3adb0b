/* quantize_recipe.h: private to src/quantize*.c: what a calibration does to the tensors of a plan.
 *
 *     mr_recipe *r;
 *     mr_recipe_open(&r, opts, m, plan, &err);     runs the texts; folds factors into the plan
 *     mr_recipe_rows from;
 *     mr_recipe_tensor(r, t, &from, &err);         for each tensor: where its rows come from
 *     mr_recipe_free(r);
 */
#ifndef MR_SRC_QUANTIZE_RECIPE_H
#define MR_SRC_QUANTIZE_RECIPE_H

#include "src/grid.h"
#include "src/quantize_plan.h"

typedef struct mr_recipe mr_recipe;

typedef struct mr_recipe_rows { /* all borrowed until the next tensor */
  const float *w;      /* [rows, k] rounded or sparse weights; NULL: the plan's rows as they are */
  const mr_grid *grid; /* where they lie; NULL: on none */
  const float *importance; /* [k], or NULL */
  const mr_site *site;     /* what the texts said; NULL: nothing */
  /* of MR_FORM_INT8_OUTLIERS: columns that are 0 in w and stay as they were */
  int n_outliers;
  const int32_t *outliers; /* [n_outliers], rising */
  const float *kept;       /* [rows, n_outliers] */
} mr_recipe_rows;

/* spec: where values of matrices lie in a directory; NULL: the type of each tensor says it. */
mr_code mr_recipe_open(mr_recipe **out, const mr_quantize_opts *o, mr_model *m, mr_out_plan *plan,
                       const mr_grid_spec *spec, mr_err *err);
void mr_recipe_free(mr_recipe *r); /* NULL is fine */
mr_code mr_recipe_tensor(mr_recipe *r, const mr_out_tensor *t, mr_recipe_rows *from, mr_err *err);
/* Outlier columns of the tensor (MR_FORM_INT8_OUTLIERS; 0 else), known once the texts have run. */
int mr_recipe_outliers(const mr_recipe *r, const mr_out_tensor *t);
int mr_recipe_count(const mr_recipe *r); /* matrices that were rounded by the texts so far */

#endif
