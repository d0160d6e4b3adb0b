/* cmd_bench_accuracy.c: see bench.h. The text is cut into windows that begin anew (accuracy.h). */
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "io/mem.h"
#include "io/sys.h"
#include "jobs/accuracy.h"
#include "jobs/bench.h"
#include "src/prompt.h"

#define TEXT_BYTES (64 << 10) /* read of each file */
#define FILE_TOKENS 2048      /* used of each file */

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

static mr_code run_file(mr_tally *t, mr_accuracy *a, const char *path, const mr_vocab *v,
                        mr_err *err) {
  mr_ids ids = {0};
  mr_code rc = read_ids(path, v, &ids, err);
  int n = ids.n < FILE_TOKENS ? (int)ids.n : FILE_TOKENS, most = mr_accuracy_window(a);
  int32_t window[MR_ACCURACY_WINDOW];
  int begin = mr_vocab_adds_bos(v) && mr_vocab_bos(v) >= 0;
  for (int at = 0, some; at < n && !rc; at += some) {
    some = n - at < most - begin ? n - at : most - begin;
    window[0] = mr_vocab_bos(v);
    memcpy(window + begin, ids.ids + at, (size_t)some * sizeof *window);
    rc = mr_accuracy_add(a, t, window, begin + some, err);
  }
  mr_ids_free(&ids);
  return rc;
}

static mr_code report(const char *what, mr_tally *t, bool json, mr_err *err) {
  mr_accuracy_sum s = mr_tally_sum(t);
  if (s.tokens == 0)
    return mr_err_set(err, MR_E_USAGE, "bench accuracy: %s holds no text", what);
  if (!json)
    return printf("%-40s %6lld tokens  KL %.5f  p99 %.4f  same first choice %.1f %%  perplexity "
                  "%+.2f %%\n",
                  what, (long long)s.tokens, s.kl, s.kl_p99, s.same_percent,
                  s.perplexity_percent) < 0
               ? mr_err_set(err, MR_E_IO, "cannot write to standard output")
               : MR_OK;
  json_t *out =
      json_pack("{s:s, s:I, s:f, s:f, s:f, s:f}", "text", what, "tokens", (json_int_t)s.tokens,
                "kl", s.kl, "kl_p99", s.kl_p99, "same_first_percent", s.same_percent,
                "perplexity_percent", s.perplexity_percent);
  mr_code rc = MR_OK;
  if (!out || json_dumpf(out, stdout, 0) || putchar('\n') == EOF)
    rc = mr_err_set(err, MR_E_IO, "cannot write to standard output");
  json_decref(out);
  return rc;
}

/* Each file by itself, then all together. */
static mr_code run_files(mr_accuracy *a, const mr_vocab *v, char **files, int n, bool json,
                         mr_err *err) {
  mr_tally all = {0}, one = {0};
  mr_code rc = MR_OK;
  for (int i = 0; i < n && !rc; i++) {
    mr_tally_free(&one);
    rc = run_file(&one, a, files[i], v, err);
    if (!rc)
      rc = report(files[i], &one, json, err);
    if (!rc)
      rc = mr_tally_join(&all, &one, err);
  }
  if (!rc)
    rc = report("all", &all, json, err);
  mr_tally_free(&all);
  mr_tally_free(&one);
  return rc;
}

mr_code mr_bench_accuracy(const char *model, int threads, mr_compute compute, int kv_type,
                          char **files, int n, bool json, mr_err *err) {
  mr_accuracy_way exact = {model, true, -1};
  mr_accuracy_way other = {model, compute == MR_COMPUTE_EXACT, kv_type};
  mr_accuracy *a = NULL;
  mr_prompter *p = NULL;
  mr_pool *pool = mr_pool_new(threads > 0 ? threads : mr_pool_cpus(), 0);
  mr_code rc = pool ? MR_OK : mr_err_set(err, MR_E_UNAVAILABLE, "the threads could not be had");
  if (!rc)
    rc = mr_prompter_open(&p, model, err);
  if (!rc && !mr_prompter_vocab(p))
    rc = mr_err_at(err, MR_E_DATA, model, 0, -1, "has no vocabulary to read text with");
  if (!rc)
    rc = mr_accuracy_open(&a, &exact, &other, pool, err);
  if (!rc)
    rc = run_files(a, mr_prompter_vocab(p), files, n, json, err);
  mr_accuracy_close(a);
  mr_prompter_close(p);
  mr_pool_free(pool);
  return rc;
}
