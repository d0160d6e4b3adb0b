#include "src/product.h"

#include <string.h>

mr_matrix mr_product_matrix(const mr_product *p, int n, int k) {
  return (mr_matrix){.n = n, .k = k, .dtype = MR_F32, .product = p};
}

size_t mr_product_room(const mr_product *p, int n) {
  size_t width = (size_t)p->w.k;
  return (p->kind == MR_PRODUCT_OUTPUT ? (size_t)n * width : width) + (size_t)p->latent;
}

/* Rows from .. to - 1 of one head. */
static void query_rows(const mr_product *p, int head, int from, int to, float *dst, float *room) {
  int in = p->w.k, latents = to < p->latent ? to : p->latent;
  float *q = room, *key = room + in;
  int64_t row = (int64_t)head * (p->nope + p->rope), pair = (int64_t)head * (p->nope + p->v);
  for (int i = 0; i < p->nope && from < latents; i++) {
    mr_matrix_row(&p->w, row + i, q);
    mr_matrix_row(&p->kv_b, pair + i, key);
    for (int r = from; r < latents; r++)
      mr_product_add(dst + (size_t)(r - from) * (size_t)in, q, key[r], in);
  }
  for (int r = from > p->latent ? from : p->latent; r < to; r++)
    mr_matrix_row(&p->w, row + p->nope + r - p->latent, dst + (size_t)(r - from) * (size_t)in);
}

static void query(const mr_product *p, int64_t first, int n, float *dst, float *room) {
  int size = p->latent + p->rope;
  for (int at = 0; at < n;) {
    int head = (int)((first + at) / size), from = (int)((first + at) % size);
    int to = from + n - at < size ? from + n - at : size;
    query_rows(p, head, from, to, dst + (size_t)at * (size_t)p->w.k, room);
    at += to - from;
  }
}

static void output(const mr_product *p, int64_t first, int n, int k, float *dst, float *room) {
  int width = p->w.k, size = p->latent + p->rope;
  float *value = room + (size_t)n * (size_t)width;
  for (int r = 0; r < n; r++)
    mr_matrix_row(&p->w, first + r, room + (size_t)r * (size_t)width);
  for (int j = 0; j < width; j++) {
    int head = j / p->v;
    mr_matrix_row(&p->kv_b, (int64_t)head * (p->nope + p->v) + p->nope + j % p->v, value);
    for (int r = 0; r < n; r++)
      mr_product_add(dst + (size_t)r * (size_t)k + (size_t)head * (size_t)size, value,
                     room[(size_t)r * (size_t)width + (size_t)j], p->latent);
  }
}

static void right(const mr_product *p, int64_t first, int n, int k, float *dst, float *room) {
  for (int r = 0; r < n; r++) {
    mr_matrix_row(&p->w, first + r, room);
    for (int i = 0; i < p->w.k; i++)
      mr_product_add(dst + (size_t)r * (size_t)k, p->right + (size_t)i * (size_t)k, room[i], k);
  }
}

void mr_product_rows(const mr_matrix *w, int64_t first, int n, float *dst, float *room) {
  const mr_product *p = w->product;
  memset(dst, 0, (size_t)n * (size_t)w->k * sizeof *dst);
  switch (p->kind) {
  case MR_PRODUCT_QUERY:
    query(p, first, n, dst, room);
    break;
  case MR_PRODUCT_OUTPUT:
    output(p, first, n, w->k, dst, room);
    break;
  case MR_PRODUCT_RIGHT:
    right(p, first, n, w->k, dst, room);
    break;
  }
}
