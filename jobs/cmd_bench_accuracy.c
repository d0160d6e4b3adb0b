/* cmd_bench_accuracy.c: see bench.h. The text is cut into windows that begin anew; both ways read
 * the same tokens, and after each their distributions over the vocabulary are compared in double.
 */
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "io/mem.h"
#include "io/sys.h"
#include "jobs/bench.h"
#include "kernels/pool.h"
#include "src/forward.h"
#include "src/tokenizer.h"

#define WINDOW 256            /* tokens */
#define STEP 64               /* tokens of a step: rows of logits in memory */
#define TEXT_BYTES (64 << 10) /* read of each file */
#define FILE_TOKENS 2048      /* used of each file */
#define MAX_TOKENS                                                                                 \
  (FILE_TOKENS + FILE_TOKENS / (WINDOW - 1) + 1) /* with one to begin each window */

typedef struct side { /* one way to compute */
  mr_model *m;
  mr_kv *kv;
  mr_forward *f;
  mr_kv_seq seq;
} side;

typedef struct tally {
  float *kl; /* of each token; owned */
  int n;
  double sum, nll[2]; /* of KL; of -ln p(next token), exact and fast */
  int same, next;     /* same first choice; tokens with a next one */
} tally;

static mr_code side_open(side *s, const char *path, mr_scheme scheme, mr_kv_type type,
                         const mr_kernels *k, mr_pool *pool, mr_err *err) {
  mr_code rc = mr_model_open(&s->m, path, err);
  if (!rc)
    rc = mr_model_pack(s->m, k, scheme, pool, err);
  if (!rc)
    rc = mr_kv_open(&s->kv, &s->m->c, type, WINDOW / MR_KV_BLOCK, err);
  if (!rc)
    rc = mr_forward_open(&s->f, s->m, k, pool, s->kv, STEP, STEP, err);
  if (!rc)
    rc = mr_kv_seq_init(&s->seq, WINDOW, err);
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
  for (int i = 0; i < n; i++)
    want[i] = 1;
  if (at == 0)
    mr_kv_seq_release(s->kv, &s->seq);
  mr_code rc = mr_kv_seq_reserve(s->kv, &s->seq, n);
  if (rc)
    return mr_err_set(err, MR_E_INTERNAL, "bench accuracy: a window has no room");
  return mr_forward_step(s->f, &(mr_run){.seq = &s->seq, .tokens = ids + at, .n = n, .want = want},
                         1, NULL, err);
}

/* ln p of token i is x[i] - logsumexp; KL of fast from exact. */
static void compare(tally *t, const mr_kernels *k, const float *exact, const float *fast, int n,
                    int32_t next) {
  int bad;
  double le = k->logsumexp(exact, n), lf = k->logsumexp(fast, n), kl = 0;
  for (int i = 0; i < n; i++) {
    double e = exact[i] - le;
    if (e > -40)
      kl += exp(e) * (e - (fast[i] - lf));
  }
  t->kl[t->n++] = (float)kl;
  t->sum += kl;
  t->same += k->argmax(exact, n, &bad) == k->argmax(fast, n, &bad);
  if (next < 0)
    return;
  t->nll[0] += le - exact[next];
  t->nll[1] += lf - fast[next];
  t->next++;
}

static mr_code run_window(tally *t, side s[2], const mr_kernels *k, const int32_t *ids, int n,
                          mr_err *err) {
  mr_code rc = MR_OK;
  for (int at = 0; at < n && !rc; at += STEP) {
    int some = n - at < STEP ? n - at : STEP;
    for (int i = 0; i < 2 && !rc; i++)
      rc = side_step(&s[i], ids, at, some, err);
    for (int i = 0; i < some && !rc; i++)
      compare(t, k, mr_forward_logits(s[0].f, i), mr_forward_logits(s[1].f, i), s[0].m->c.n_vocab,
              at + i + 1 < n ? ids[at + i + 1] : -1);
  }
  return rc;
}

static mr_code read_ids(const char *path, const mr_vocab *v, mr_ids *ids, mr_err *err) {
  char *text = mr_mem_alloc(TEXT_BYTES, 1);
  if (!text)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for the text");
  int fd = mr_sys_now->open(path, O_RDONLY, 0);
  ssize_t n = fd < 0 ? -1 : mr_sys_read_full(fd, text, TEXT_BYTES);
  mr_code rc = n < 0 ? mr_err_errno(err, MR_E_IO, path, "cannot read") : MR_OK;
  if (fd >= 0)
    mr_sys_now->close(fd);
  if (!rc)
    rc = mr_tokenizer_encode(v, text, (size_t)n, NULL, 0, ids, err);
  mr_mem_free(text);
  return rc;
}

static mr_code run_file(tally *t, side s[2], const mr_kernels *k, const char *path,
                        const mr_vocab *v, mr_err *err) {
  mr_ids ids = {0};
  mr_code rc = read_ids(path, v, &ids, err);
  int n = ids.n < FILE_TOKENS ? (int)ids.n : FILE_TOKENS;
  int32_t window[WINDOW];
  int begin = mr_vocab_adds_bos(v) && mr_vocab_bos(v) >= 0;
  for (int at = 0, some; at < n && !rc; at += some) {
    some = n - at < WINDOW - begin ? n - at : WINDOW - begin;
    window[0] = mr_vocab_bos(v);
    memcpy(window + begin, ids.ids + at, (size_t)some * sizeof *window);
    rc = run_window(t, s, k, window, begin + some, err);
  }
  mr_ids_free(&ids);
  return rc;
}

static int by_value(const void *a, const void *b) {
  float x = *(const float *)a, y = *(const float *)b;
  return (x > y) - (x < y);
}

static mr_code report(const char *what, tally *t, bool json, mr_err *err) {
  if (t->n == 0)
    return mr_err_set(err, MR_E_USAGE, "bench accuracy: %s holds no text", what);
  qsort(t->kl, (size_t)t->n, sizeof *t->kl, by_value);
  double mean = t->sum / t->n, p99 = t->kl[(int64_t)t->n * 99 / 100];
  double top = 100.0 * t->same / t->n;
  double ppl = t->next ? 100 * (exp((t->nll[1] - t->nll[0]) / t->next) - 1) : 0;
  if (!json)
    return printf("%-40s %6d tokens  KL %.5f  p99 %.4f  same first choice %.1f %%  perplexity "
                  "%+.2f %%\n",
                  what, t->n, mean, p99, top, ppl) < 0
               ? mr_err_set(err, MR_E_IO, "cannot write to standard output")
               : MR_OK;
  json_t *out =
      json_pack("{s:s, s:i, s:f, s:f, s:f, s:f}", "text", what, "tokens", t->n, "kl", mean,
                "kl_p99", p99, "same_first_percent", top, "perplexity_percent", ppl);
  mr_code rc = MR_OK;
  if (!out || json_dumpf(out, stdout, 0) || putchar('\n') == EOF)
    rc = mr_err_set(err, MR_E_IO, "cannot write to standard output");
  json_decref(out);
  return rc;
}

/* Each file by itself, then all together. */
static mr_code run_files(side s[2], const mr_kernels *k, const mr_vocab *v, char **files, int n,
                         bool json, mr_err *err) {
  tally all = {0}, one = {0};
  all.kl = mr_mem_alloc((size_t)n * MAX_TOKENS, sizeof *all.kl);
  one.kl = mr_mem_alloc(MAX_TOKENS, sizeof *one.kl);
  mr_code rc = all.kl && one.kl ? MR_OK : mr_err_set(err, MR_E_NOMEM, "out of memory");
  for (int i = 0; i < n && !rc; i++) {
    one = (tally){.kl = one.kl};
    rc = run_file(&one, s, k, files[i], v, err);
    if (!rc)
      rc = report(files[i], &one, json, err);
    for (int j = 0; j < one.n; j++)
      all.kl[all.n++] = one.kl[j];
    all.sum += one.sum, all.nll[0] += one.nll[0], all.nll[1] += one.nll[1];
    all.same += one.same, all.next += one.next;
  }
  if (!rc)
    rc = report("all", &all, json, err);
  mr_mem_free(all.kl);
  mr_mem_free(one.kl);
  return rc;
}

mr_code mr_bench_accuracy(const char *model, int threads, mr_compute compute, int kv_type,
                          char **files, int n, bool json, mr_err *err) {
  const mr_kernels *k = mr_kernels_best();
  side s[2] = {0};
  mr_vocab *v = NULL;
  mr_pool *pool = mr_pool_new(threads > 0 ? threads : mr_pool_cpus(), 0);
  mr_code rc = pool ? MR_OK : mr_err_set(err, MR_E_UNAVAILABLE, "the threads could not be had");
  bool exact = compute == MR_COMPUTE_EXACT;
  mr_kv_type type = kv_type >= 0 ? (mr_kv_type)kv_type : exact ? MR_KV_F32 : k->kv_type;
  if (!rc)
    rc = side_open(&s[0], model, MR_SCHEME_F32, MR_KV_F32, k, pool, err);
  if (!rc)
    rc = side_open(&s[1], model, exact ? MR_SCHEME_F32 : MR_SCHEME_I8, type, k, pool, err);
  if (!rc)
    rc = mr_vocab_open(&v, s[0].m->gguf, err);
  if (!rc)
    rc = run_files(s, k, v, files, n, json, err);
  mr_vocab_close(v);
  side_close(&s[0]);
  side_close(&s[1]);
  mr_pool_free(pool);
  return rc;
}
