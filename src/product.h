/* product.h: matrices that are the product of two that the checkpoint holds. Their rows are
 * computed as they are asked for, so that no copy of a product stays beside its panels.
 *
 * Latent attention (deepseek): keys and values are low-rank, k = A c and v = B c of one latent c a
 * token, which is what the cache holds. q.(A c) = (A' q).c, and the sum of values is B of the sum
 * of latents, so A joins the query's matrix and B the output's: attention runs over latents with
 * one key head. Embeddings of another width than the model's (opt) are multiplied by their
 * projection.
 */
#ifndef MR_SRC_PRODUCT_H
#define MR_SRC_PRODUCT_H

#include "src/model.h"

typedef enum mr_product_kind {
  MR_PRODUCT_QUERY,  /* rows of w through A: [heads*(latent + rope), in] */
  MR_PRODUCT_OUTPUT, /* columns of w through B: [d, heads*(latent + rope)]; those of rope are 0 */
  MR_PRODUCT_RIGHT   /* w times `right` */
} mr_product_kind;

struct mr_product {
  mr_product_kind kind;
  mr_matrix w;    /* QUERY [heads*(nope + rope), in], OUTPUT [d, heads*v], RIGHT [n, in] */
  mr_matrix kv_b; /* [heads*(nope + v), latent]: A above B, head by head */
  int nope, rope, v, latent;
  const float *right; /* RIGHT: [in, k]; borrowed */
};

/* y += a * x */
static inline void mr_product_add(float *y, const float *x, float a, int n) {
  for (int i = 0; i < n; i++)
    y[i] += a * x[i];
}

/* A matrix of these rows; p stays the caller's and must outlive it. */
mr_matrix mr_product_matrix(const mr_product *p, int n, int k);

/* Rows first .. first + n - 1 into dst [n, w->k]; room: mr_matrix_room(w, n) floats. Several rows
 * at once read their sources once. */
void mr_product_rows(const mr_matrix *w, int64_t first, int n, float *dst, float *room);
size_t mr_product_room(const mr_product *p, int n);

#endif
