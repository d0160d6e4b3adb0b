/* accuracy.h: how far two ways to compute differ on the same tokens: two models, or two modes of
 * one.
 *
 *     mr_accuracy *a;
 *     mr_accuracy_open(&a, &(mr_accuracy_way){"ref.gguf", true}, &(mr_accuracy_way){"m.gguf",
 * true}, pool, &err); mr_tally t = {0}; mr_accuracy_add(a, &t, ids, n, &err);   a window: both read
 * it from an empty context mr_accuracy_sum s = mr_tally_sum(&t); mr_tally_free(&t);
 * mr_accuracy_close(a);
 *
 * After each token the two distributions over the vocabulary are compared in double: the divergence
 * (KL, in nats) of the second from the first, whether both have the same first choice, and what the
 * next token costs under each.
 */
#ifndef MR_JOBS_ACCURACY_H
#define MR_JOBS_ACCURACY_H

#include <stdbool.h>
#include <stdint.h>

#include "io/err.h"
#include "kernels/pool.h"

#define MR_ACCURACY_WINDOW 256 /* tokens of a window at most */

typedef struct mr_accuracy mr_accuracy;

typedef struct mr_accuracy_way {
  const char *model;
  bool exact;  /* float32; else int8 as in --compute fast */
  int kv_type; /* mr_kv_type; -1: the default of the two */
} mr_accuracy_way;

typedef struct mr_tally {
  float *kl; /* of each token; owned */
  size_t n, cap;
  double sum, nll[2]; /* of KL; of -ln p(next token), first and second way */
  int64_t same, next; /* same first choice; tokens with a next one */
} mr_tally;

typedef struct mr_accuracy_sum {
  int64_t tokens;
  double kl, kl_p99;
  double same_percent;
  double perplexity[2], perplexity_percent; /* what the second adds */
} mr_accuracy_sum;

/* Everything is opened here; pool is borrowed until close. MR_E_DATA: their vocabularies are not of
 * one size. */
mr_code mr_accuracy_open(mr_accuracy **out, const mr_accuracy_way *first,
                         const mr_accuracy_way *second, mr_pool *pool, mr_err *err);
void mr_accuracy_close(mr_accuracy *a);       /* NULL is fine */
int mr_accuracy_window(const mr_accuracy *a); /* tokens: the limit above, or the context */
mr_code mr_accuracy_add(mr_accuracy *a, mr_tally *t, const int32_t *ids, int n, mr_err *err);

/* b's tokens into a. */
mr_code mr_tally_join(mr_tally *a, const mr_tally *b, mr_err *err);
mr_accuracy_sum mr_tally_sum(mr_tally *t); /* sorts t->kl; zeros where nothing was added */
void mr_tally_free(mr_tally *t);

#endif
