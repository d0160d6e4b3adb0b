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
} mr_recipe_rows;

mr_code mr_recipe_open(mr_recipe **out, const mr_quantize_opts *o, mr_model *m, mr_out_plan *plan,
                       mr_err *err);
void mr_recipe_free(mr_recipe *r); /* NULL is fine */
mr_code mr_recipe_tensor(mr_recipe *r, const mr_out_tensor *t, mr_recipe_rows *from, mr_err *err);
int mr_recipe_count(const mr_recipe *r); /* matrices that were rounded by the texts so far */

#endif
