/* Adapters of latent attention. With W the queries' (or the output's) matrix, K and V the parts of
 * kv_b = [K; V] of a head, and the adapter's B_w A_w, B A = [B_k; B_v] A beside W and kv_b, scales
 * in the B: the model multiplies by products (product.h), and they become
 *
 *     (K + B_k A)' (W + B_w A_w) = K' W + (K' B_w) A_w + A' (B_k' (W + B_w A_w))      queries
 *     (W + B_w A_w) (V + B_v A)  = W V  + B_w (A_w V)  + ((W + B_w A_w) B_v) A        output
 *
 * head by head. K' B_w and A_w V make one adapter of the product; the brackets of the last terms
 * have `rank` rows or columns a head, and A is the same in all of them. */
#include "src/lora_int.h"

#include <math.h>
#include <string.h>

#include "io/mem.h"
#include "src/product.h"

typedef struct builder {
  mr_lora *l;
  const mr_lora_latent *p;
  int heads;
  const mr_product *of; /* the product at hand */
  mr_lora_link *x;      /* ... its link */
  float *row;           /* of of->w */
} builder;

static float *block(builder *b, size_t rows, size_t cols) {
  return mr_lora_block(&b->l->raw, rows, cols * sizeof(float));
}

/* v [n, k] in place of the matrix that the product was made of: [rows, cols] of it. */
static float *joined(builder *b, const float *v, int n, int k, int rows, int cols) {
  mr_product p = *b->of;
  p.w = (mr_matrix){.n = n, .k = k, .dtype = MR_F32, .data = (const uint8_t *)v};
  p.w.row_bytes = (uint64_t)k * sizeof *v;
  mr_matrix w = mr_product_matrix(&p, rows, cols);
  float *out = block(b, (size_t)rows, (size_t)cols);
  float *room = mr_mem_alloc(mr_matrix_room(&w, 1), sizeof *room);
  for (int r = 0; out && room && r < rows; r++)
    mr_matrix_rows(&w, r, 1, out + (size_t)r * (size_t)cols, room);
  bool ok = room != NULL;
  mr_mem_free(room);
  return ok ? out : NULL;
}

/* Row r of W + B_w A_w into b->row. */
static const float *adapted_row(builder *b, const mr_lora_pair *w, int64_t r) {
  int k = b->of->w.k;
  mr_matrix_row(&b->of->w, r, b->row);
  for (int i = 0; i < w->rank; i++)
    mr_product_add(b->row, w->a + (size_t)i * (size_t)k, w->scale * w->b[r * w->rank + i], k);
  return b->row;
}

/* The link's part that all heads share. */
static bool share(builder *b, bool output) {
  const mr_lora_pair *kv = &b->p->kv_b;
  int latent = b->of->latent, rank = kv->rank;
  mr_lora *l = b->l;
  mr_lora_heads *h = mr_lora_block(&l->kept, 1, sizeof *h);
  float *turned = block(b, (size_t)latent, (size_t)rank);
  if (!h || !turned)
    return false;
  *h = (mr_lora_heads){output, b->heads, rank, latent + b->of->rope, latent, NULL};
  for (int r = 0; r < rank; r++)
    for (int i = 0; i < latent; i++)
      turned[(size_t)i * (size_t)rank + (size_t)r] = kv->a[(size_t)r * (size_t)latent + (size_t)i];
  b->x->heads = h;
  l->widest = latent > l->widest ? latent : l->widest;
  l->most_heads = b->heads;
  l->head_rank = rank > l->head_rank ? rank : l->head_rank;
  return output ? mr_lora_panels(l, &h->panels, kv->a, rank, latent, MR_LORA_UP)
                : mr_lora_panels(l, &h->panels, turned, latent, rank, MR_LORA_UP);
}

/* What A' (B_k' b) adds to the joined bias b of the queries. */
static void bias_of_heads(builder *b, const float *bias) {
  const mr_lora_pair *kv = &b->p->kv_b;
  const mr_product *of = b->of;
  int size = of->latent + of->rope;
  for (int h = 0; h < b->heads; h++)
    for (int i = 0; i < of->nope; i++)
      for (int j = 0; j < kv->rank; j++)
        mr_product_add(b->x->bias + (size_t)h * (size_t)size,
                       kv->a + (size_t)j * (size_t)of->latent,
                       kv->scale * kv->b[(h * (of->nope + of->v) + i) * kv->rank + j] *
                           bias[h * (of->nope + of->rope) + i],
                       of->latent);
}

static bool join_bias(builder *b, const mr_matrix *w) {
  const float *bias = b->p->q.bias;
  float *all = joined(b, bias, b->of->w.n, 1, w->n, 1);
  b->x->bias = mr_lora_block(&b->l->kept, (size_t)w->n, sizeof(float));
  if (!all || !b->x->bias)
    return false;
  memcpy(b->x->bias, all, (size_t)w->n * sizeof *all);
  bias_of_heads(b, bias);
  return true;
}

static bool queries(builder *b, const mr_matrix *w) {
  const mr_lora_pair *q = &b->p->q, *kv = &b->p->kv_b;
  const mr_product *of = b->of;
  int in = of->w.k, first = q->rank;
  b->x->up_rank = q->rank;
  b->x->rank = q->rank + b->heads * kv->rank;
  if (q->bias && !join_bias(b, w))
    return false;
  if (!b->x->rank)
    return true;
  float *a = b->x->a = block(b, (size_t)b->x->rank, (size_t)in);
  if (!a || (q->rank && !(b->x->b = joined(b, q->b, of->w.n, q->rank, w->n, q->rank))) ||
      (kv->rank && !share(b, false)))
    return false;
  if (q->rank)
    memcpy(a, q->a, (size_t)q->rank * (size_t)in * sizeof *a);
  for (size_t i = 0; i < (size_t)w->n * (size_t)q->rank; i++)
    b->x->b[i] *= q->scale;
  for (int h = 0; kv->rank && h < b->heads; h++, first += kv->rank)
    for (int i = 0; i < of->nope; i++) {
      const float *row = adapted_row(b, q, (int64_t)h * (of->nope + of->rope) + i);
      const float *of_k =
          kv->b + ((size_t)h * (size_t)(of->nope + of->v) + (size_t)i) * (size_t)kv->rank;
      for (int j = 0; j < kv->rank; j++)
        mr_product_add(a + (size_t)(first + j) * (size_t)in, row, kv->scale * of_k[j], in);
    }
  return true;
}

static bool output(builder *b, const mr_matrix *w) {
  const mr_lora_pair *o = &b->p->o, *kv = &b->p->kv_b;
  const mr_product *of = b->of;
  int width = of->w.k;
  b->x->rank = o->rank;
  b->x->up_rank = o->rank + b->heads * kv->rank;
  if (!b->x->up_rank)
    return true;
  b->x->b = block(b, (size_t)w->n, (size_t)b->x->up_rank);
  if (!b->x->b || (o->rank && !(b->x->a = joined(b, o->a, o->rank, width, o->rank, w->k))) ||
      (kv->rank && !share(b, true)))
    return false;
  for (int r = 0; r < w->n; r++) {
    float *to = b->x->b + (size_t)r * (size_t)b->x->up_rank;
    for (int i = 0; i < o->rank; i++)
      to[i] = o->scale * o->b[(size_t)r * (size_t)o->rank + (size_t)i];
    const float *row = kv->rank ? adapted_row(b, o, r) : NULL;
    for (int i = 0; row && i < width; i++) {
      int h = i / of->v, at = h * (of->nope + of->v) + of->nope + i % of->v;
      mr_product_add(to + o->rank + (size_t)h * (size_t)kv->rank,
                     kv->b + (size_t)at * (size_t)kv->rank, kv->scale * row[i], kv->rank);
    }
  }
  return true;
}

static bool all_finite(const float *v, size_t n) {
  for (size_t i = 0; v && i < n; i++)
    if (!isfinite(v[i]))
      return false;
  return true;
}

static bool link_finite(const mr_lora_link *x, const mr_matrix *w) {
  return all_finite(x->a, (size_t)x->rank * (size_t)w->k) &&
         all_finite(x->b, (size_t)x->up_rank * (size_t)w->n) && all_finite(x->bias, (size_t)w->n);
}

/* One of the two products. */
static mr_code add_product(builder *b, mr_matrix *w, int adapter, int layer, const char *where,
                           mr_err *err) {
  bool query = w->product->kind == MR_PRODUCT_QUERY;
  b->of = w->product;
  b->row = mr_mem_alloc((size_t)b->of->w.k, sizeof *b->row);
  b->x = mr_lora_link_of(b->l, w, adapter);
  bool ok = b->row && b->x && (query ? queries(b, w) : output(b, w));
  mr_mem_free(b->row);
  if (!ok)
    return mr_err_at(err, MR_E_NOMEM, where, 0, -1, "no memory for an adapter of layer %d", layer);
  if (!link_finite(b->x, w))
    return mr_err_at(err, MR_E_DATA, where, 0, -1,
                     "layer %d: what the adapter, scaled by lora_alpha, makes of latent attention "
                     "is beyond float32",
                     layer);
  return MR_OK;
}

mr_code mr_lora_add_latent(mr_lora *l, int adapter, int layer, const mr_lora_latent *p,
                           const char *where, mr_err *err) {
  mr_layer *y = &l->m->layers[layer];
  builder b = {.l = l, .p = p, .heads = l->m->c.n_heads};
  mr_code rc = MR_OK;
  if ((int64_t)b.heads * p->kv_b.rank > MR_LORA_HEADS_MAX)
    return mr_err_at(err, MR_E_DATA, where, 0, -1,
                     "layer %d: an adapter of kv_b_proj of rank %d in %d heads has %d ranks; at "
                     "most %d are supported",
                     layer, p->kv_b.rank, b.heads, b.heads * p->kv_b.rank, MR_LORA_HEADS_MAX);
  if (p->q.rank || p->q.bias || p->kv_b.rank)
    rc = add_product(&b, &y->q, adapter, layer, where, err);
  if (!rc && (p->o.rank || p->kv_b.rank))
    rc = add_product(&b, &y->o, adapter, layer, where, err);
  return rc;
}
