/* calibrate.h: what the matrices of a model meet: statistics of the rows that they are multiplied
 * with, over some text.
 *
 *     mr_calibration *c;
 *     mr_calibrate(&c, m, texts, n, options, &err);     packs m in float32 and runs the texts
 *     const mr_site *s = mr_calibration_site(c, layer, MR_SITE_DOWN);    s->square[col] / s->n ...
 *     mr_calibration_free(c);
 *
 * Matrices that read the same rows share a site: a layer has four, with latent attention five. The
 * output's rows are there what its matrix in the checkpoint meets, not the sums of latents that it
 * meets here (product.h); kv_b has no site. With the products of columns
 * (Hessians of the layer's square error, [k, k] float32 a site) memory would grow with the square
 * of the width: they are gathered for a range of layers, as many as a budget holds, and the texts
 * run once for each range. Numbers depend on the texts alone, not on threads.
 */
#ifndef MR_SRC_CALIBRATE_H
#define MR_SRC_CALIBRATE_H

#include "kernels/pool.h"
#include "src/model.h"

typedef enum mr_site_kind {
  MR_SITE_QKV,  /* q, k, v: the normed stream */
  MR_SITE_OUT,  /* attention's output */
  MR_SITE_MLP,  /* gate and up, or the router and the experts' gates */
  MR_SITE_DOWN, /* act(gate) * up */
  MR_SITE_LOW,  /* latent attention: queries before their second matrix */
  MR_SITES
} mr_site_kind;

typedef struct mr_site {
  int k;          /* columns; 0: nothing seen */
  int64_t n;      /* rows seen */
  double *square; /* [k] sums of squares */
  float *most;    /* [k] largest absolute value */
  float *mean;    /* [k] sums of absolute values */
  float *h;       /* [k, k] sums of products, or NULL */
} mr_site;

typedef struct mr_tokens { /* one text */
  const int32_t *ids;
  int n; /* at most MR_CALIBRATE_WINDOW */
} mr_tokens;

#define MR_CALIBRATE_WINDOW 256 /* tokens */

typedef struct mr_calibration mr_calibration;

/* The model is packed in float32 and stays so. pool is borrowed until free. */
mr_code mr_calibration_open(mr_calibration **out, mr_model *m, mr_pool *pool, mr_err *err);
void mr_calibration_free(mr_calibration *c); /* NULL is fine */
/* Gathers over the texts; `products`: with h, of layers first .. first + n_layers - 1, whose h of
 * earlier calls are freed. Without: all layers. */
mr_code mr_calibration_run(mr_calibration *c, const mr_tokens *texts, int n, bool products,
                           int first, int n_layers, mr_err *err);
/* Layers whose products fit in so many bytes; at least 1. */
int mr_calibration_layers(const mr_calibration *c, uint64_t bytes);
const mr_site *mr_calibration_site(const mr_calibration *c, int layer, mr_site_kind kind);

/* The site of a tensor's stem ("attn_q", "ffn_down_exps"), -1: none. */
int mr_site_of(const char *stem);

#endif
