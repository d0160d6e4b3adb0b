/* References and results: two bytes of options, then two texts parted by a byte 0. Every figure is
 * in its range, no row counts twice, each reference is found by its id, and what is printed is for
 * any terminal. */

#include "fuzz.h"
#include "io/json.h"
#include "io/mem.h"
#include "jobs/refs.h"
#include "jobs/score.h"

static void check_metric(const mr_score *s, mr_metric m) {
  bool bounded = m != MR_METRIC_PERPLEXITY && m != MR_METRIC_BITS_PER_BYTE;
  mr_mean e = mr_score_estimate(s, m);
  const mr_score_counts *c = mr_score_counts_get(s);
  fuzz_check(e.n <= c->results + c->missing);
  if (e.n == 0)
    return;
  fuzz_check(!bounded || (e.mean >= 0 && e.mean <= 1));
  if (bounded && e.n > 1)
    fuzz_check(e.low >= 0 && e.high <= 1 && e.low <= e.mean + 1e-9 && e.mean <= e.high + 1e-9 &&
               e.error >= 0);
}

static void check_output(const mr_score *s) {
  mr_text t = {0};
  json_t *o = mr_score_to_json(s);
  char *dumped = o ? mr_json_dumps(o, 0) : NULL;
  fuzz_check(dumped);
  json_t *again = mr_json_parse(dumped, strlen(dumped), NULL, NULL);
  fuzz_check(json_is_object(again));
  json_decref(again);
  json_decref(o);
  mr_mem_free(dumped);
  mr_score_table(s, &t);
  mr_score_brief(s, &t);
  fuzz_check(!t.failed && mr_utf8_valid(t.data, t.len) < 0);
  for (size_t i = 0; i < t.len; i++) /* nothing for a terminal to obey */
    fuzz_check((unsigned char)t.data[i] >= 0x20 || t.data[i] == '\n');
  mr_text_free(&t);
}

/* Each reference is found by its id, with at least one answer, and once. */
static void check_refs(const char *path, const mr_score_opts *o) {
  mr_refs *r;
  mr_ref ref, same;
  mr_err e = MR_ERR_INIT;
  bool more = true, found;
  uint64_t at = 0, n = 0;
  mr_code rc = mr_refs_open(
      &r, &(mr_refs_opts){.files = &path, .n = 1, .field = o->ref_field, .by = o->by}, &e);
  fuzz_check_error(rc, &e);
  fuzz_check(rc == MR_OK || !r);
  while (!rc && mr_refs_rest(r, &at, &ref, &more, &e) == MR_OK && more) {
    char *id = mr_mem_copy(ref.id.s, ref.id.len);
    fuzz_check(!ref.asked && json_array_size(ref.answers) > 0);
    fuzz_check(mr_refs_find(r, (mr_str){id, ref.id.len}, &same, &found, &e) == MR_OK);
    fuzz_check(found && !same.asked && same.id.len == ref.id.len);
    mr_mem_free(id);
    n++;
  }
  fuzz_check(rc || (n == mr_refs_count(r) && !more));
  mr_refs_close(r);
}

static void run(const mr_score_opts *o, const char *results) {
  mr_score *s;
  mr_err e = MR_ERR_INIT;
  mr_code rc = mr_score_open(&s, o, &e);
  if (!rc)
    rc = mr_score_read(s, &results, 1, &e);
  if (!rc)
    rc = mr_score_finish(s, &e);
  fuzz_check_error(rc, &e);
  if (!rc) {
    const mr_score_counts *c = mr_score_counts_get(s);
    fuzz_check(c->scored <= c->results && c->unreferenced <= c->results);
    for (int m = 0; m < MR_METRICS; m++)
      check_metric(s, (mr_metric)m);
    check_output(s);
  }
  mr_score_close(s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const char *const patterns[] = {NULL, "([A-Z]|[0-9]+)", "(a|b*)+c?", "^.*$"};
  if (size < 2)
    return 0;
  setenv("TMPDIR", fuzz_dir(), 1);
  const char *text = (const char *)data + 2, *end = (const char *)data + size;
  const char *zero = memchr(text, 0, (size_t)(end - text));
  const char *cut = zero ? zero : end, *rest = zero ? zero + 1 : end;
  char refs[128], results[128];
  char *list[] = {refs};
  snprintf(refs, sizeof refs, "%s", fuzz_write("refs.jsonl", text, (size_t)(cut - text)));
  snprintf(results, sizeof results, "%s", fuzz_write("results.jsonl", rest, (size_t)(end - rest)));
  mr_score_opts o = {.metrics = (data[0] & 1u ? (1u << MR_METRICS) - 1 : 0),
                     .extract = (char *)(uintptr_t)patterns[data[0] >> 1 & 3],
                     .ignore = data[1] & 63u,
                     .extract_last = data[0] >> 3 & 1,
                     .skip_missing = data[0] >> 4 & 1,
                     .outputs = (mr_outputs)((data[0] >> 5 & 3) % 3),
                     .by = data[1] & 64 ? (char *)(uintptr_t) "t.u" : NULL,
                     .ref_field = data[1] & 128 ? (char *)(uintptr_t) "a.b" : NULL};
  if (!o.extract)
    o.metrics &= ~(1u << MR_METRIC_REGEX);
  run(&o, results);
  o.refs = (mr_list){list, 1};
  check_refs(refs, &o);
  run(&o, results);
  return 0;
}
