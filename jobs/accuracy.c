#include "jobs/accuracy.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "io/mem.h"
#include "src/forward.h"

#define WINDOW MR_ACCURACY_WINDOW
#define STEP 64 /* tokens of a step: rows of logits in memory */

typedef struct side { /* one way to compute */
  mr_model *m;
  mr_kv *kv;
  mr_forward *f;
  mr_kv_seq seq;
} side;

struct mr_accuracy {
  side s[2];
  const mr_kernels *k;
};

static mr_code side_open(side *s, const mr_accuracy_way *w, const mr_kernels *k, mr_pool *pool,
                         mr_err *err) {
  mr_code rc = mr_model_open(&s->m, w->model, err);
  if (rc)
    return rc;
  mr_scheme scheme = mr_model_scheme(s->m, k, w->exact);
  mr_kv_type type =
      w->kv_type >= 0 ? (mr_kv_type)w->kv_type : mr_model_kv_type(s->m, k, scheme);
  rc = mr_model_pack(s->m, k, scheme, pool, err);
  if (!rc)
    rc = mr_kv_open(&s->kv, &s->m->c, type,
                    WINDOW / MR_KV_BLOCK * mr_kv_groups_of(&s->m->c, type).n +
                        mr_kv_own_pages(&s->m->c, type),
                    err);
  if (!rc)
    rc = mr_forward_open(&s->f, s->m, k, pool, s->kv, STEP, STEP, err);
  if (!rc)
    rc = mr_kv_seq_init(s->kv, &s->seq, WINDOW, err);
  return rc;
}

static void side_close(side *s) {
  if (s->kv)
    mr_kv_seq_free(s->kv, &s->seq);
  mr_forward_close(s->f);
  mr_kv_close(s->kv);
  mr_model_close(s->m);
}

/* Logits of `n` tokens from `at` of a window; at 0 starts anew. */
static mr_code side_step(side *s, const int32_t *ids, int at, int n, mr_err *err) {
  uint8_t want[STEP];
  memset(want, 1, sizeof want);
  if (at == 0)
    mr_kv_seq_release(s->kv, &s->seq);
  if (mr_kv_seq_reserve(s->kv, &s->seq, n))
    return mr_err_set(err, MR_E_INTERNAL, "a window of %d tokens has no room", at + n);
  return mr_forward_step(s->f, &(mr_run){.seq = &s->seq, .tokens = ids + at, .n = n, .want = want},
                         1, NULL, err);
}

mr_code mr_accuracy_open(mr_accuracy **out, const mr_accuracy_way *first,
                         const mr_accuracy_way *second, mr_pool *pool, mr_err *err) {
  *out = NULL;
  mr_accuracy *a = mr_mem_alloc(1, sizeof *a);
  if (!a)
    return mr_err_set(err, MR_E_NOMEM, "out of memory");
  a->k = mr_kernels_best();
  mr_code rc = side_open(&a->s[0], first, a->k, pool, err);
  if (!rc)
    rc = side_open(&a->s[1], second, a->k, pool, err);
  if (!rc && a->s[0].m->c.n_vocab != a->s[1].m->c.n_vocab)
    rc = mr_err_at(err, MR_E_DATA, second->model, 0, -1,
                   "has %d tokens and %s %d: they cannot be compared", a->s[1].m->c.n_vocab,
                   first->model, a->s[0].m->c.n_vocab);
  if (rc)
    mr_accuracy_close(a);
  else
    *out = a;
  return rc;
}

void mr_accuracy_close(mr_accuracy *a) {
  if (!a)
    return;
  side_close(&a->s[0]);
  side_close(&a->s[1]);
  mr_mem_free(a);
}

int mr_accuracy_window(const mr_accuracy *a) {
  int n = WINDOW;
  for (int i = 0; i < 2; i++)
    n = a->s[i].m->c.context < n ? a->s[i].m->c.context : n;
  return n;
}

/* ln p of token i is x[i] - logsumexp. */
static void compare(mr_tally *t, const mr_kernels *k, const float *x, const float *y, int n,
                    int32_t next) {
  int bad;
  double lx = k->logsumexp(x, n), ly = k->logsumexp(y, n), kl = 0;
  for (int i = 0; i < n; i++) {
    double e = x[i] - lx;
    if (e > -40)
      kl += exp(e) * (e - (y[i] - ly));
  }
  t->kl[t->n++] = (float)kl;
  t->sum += kl;
  t->same += k->argmax(x, n, &bad) == k->argmax(y, n, &bad);
  if (next < 0)
    return;
  t->nll[0] += lx - x[next];
  t->nll[1] += ly - y[next];
  t->next++;
}

static mr_code make_room(mr_tally *t, size_t more, mr_err *err) {
  return mr_mem_grow((void **)&t->kl, &t->cap, t->n + more, sizeof *t->kl)
             ? MR_OK
             : mr_err_set(err, MR_E_NOMEM, "out of memory for the divergence of each token");
}

mr_code mr_accuracy_add(mr_accuracy *a, mr_tally *t, const int32_t *ids, int n, mr_err *err) {
  mr_code rc = make_room(t, (size_t)n, err);
  if (n > mr_accuracy_window(a))
    rc = mr_err_set(err, MR_E_INTERNAL, "a window of %d tokens is too long", n);
  for (int at = 0; at < n && !rc; at += STEP) {
    int some = n - at < STEP ? n - at : STEP;
    for (int i = 0; i < 2 && !rc; i++)
      rc = side_step(&a->s[i], ids, at, some, err);
    for (int i = 0; i < some && !rc; i++)
      compare(t, a->k, mr_forward_logits(a->s[0].f, i), mr_forward_logits(a->s[1].f, i),
              a->s[0].m->c.n_vocab, at + i + 1 < n ? ids[at + i + 1] : -1);
  }
  return rc;
}

mr_code mr_tally_join(mr_tally *a, const mr_tally *b, mr_err *err) {
  mr_code rc = make_room(a, b->n, err);
  if (rc)
    return rc;
  for (size_t i = 0; i < b->n; i++)
    a->kl[a->n++] = b->kl[i];
  a->sum += b->sum;
  a->nll[0] += b->nll[0];
  a->nll[1] += b->nll[1];
  a->same += b->same;
  a->next += b->next;
  return MR_OK;
}

static int by_value(const void *a, const void *b) {
  float x = *(const float *)a, y = *(const float *)b;
  return (x > y) - (x < y);
}

mr_accuracy_sum mr_tally_sum(mr_tally *t) {
  mr_accuracy_sum s = {.tokens = (int64_t)t->n};
  if (!t->n)
    return s;
  qsort(t->kl, t->n, sizeof *t->kl, by_value);
  s.kl = fmax(t->sum / (double)t->n, 0); /* rounding may leave it a little below */
  s.kl_p99 = t->kl[t->n * 99 / 100];
  s.same_percent = 100.0 * (double)t->same / (double)t->n;
  for (int i = 0; i < 2 && t->next; i++)
    s.perplexity[i] = exp(t->nll[i] / (double)t->next);
  if (t->next)
    s.perplexity_percent = 100 * (exp((t->nll[1] - t->nll[0]) / (double)t->next) - 1);
  return s;
}

void mr_tally_free(mr_tally *t) {
  mr_mem_free(t->kl);
  *t = (mr_tally){0};
}
