#include "jobs/report.h"

#include <math.h>
#include <string.h>

#include "io/mem.h"
#include "jobs/roofline.h"

#define BIN_FIRST_S 1e-6
#define BIN_RATIO 1.02
#define TIMELINE_STEP_S 0.25

void mr_histogram_add(mr_histogram *h, double seconds) {
  double at = seconds > BIN_FIRST_S ? log(seconds / BIN_FIRST_S) / log(BIN_RATIO) : 0;
  int i = at < MR_HISTOGRAM_BINS ? (int)at : MR_HISTOGRAM_BINS - 1;
  h->bin[i]++;
  h->n++;
  h->sum_s += seconds;
  if (seconds > h->max_s)
    h->max_s = seconds;
}

double mr_histogram_quantile(const mr_histogram *h, double q) {
  uint64_t want = (uint64_t)ceil(q * (double)h->n), sum = 0;
  if (h->n == 0)
    return 0;
  for (int i = 0; i < MR_HISTOGRAM_BINS; i++) {
    sum += h->bin[i];
    if (sum >= want && sum > 0) {
      double middle = BIN_FIRST_S * pow(BIN_RATIO, i + 0.5);
      return middle < h->max_s ? middle : h->max_s;
    }
  }
  return h->max_s;
}

void mr_report_init(mr_report *r) {
  memset(r, 0, sizeof *r);
  r->timeline.step_s = TIMELINE_STEP_S;
}

void mr_report_free(mr_report *r) {
  json_decref(r->errors);
  mr_report_init(r);
}

void mr_report_row(mr_report *r, const mr_result *res) {
  int most = 0;
  for (int i = 0; i < res->n_choices; i++)
    if (res->choices[i].n_sampled > most)
      most = res->choices[i].n_sampled;
  if (most > 0 && res->first_token_s >= res->admitted_s)
    mr_histogram_add(&r->ttft, res->first_token_s - res->admitted_s);
  if (most > 1 && res->done_s >= res->first_token_s)
    mr_histogram_add(&r->tpot, (res->done_s - res->first_token_s) / (most - 1));
}

/* Two points become one, and each point is twice as long from now on. */
static void merge_points(mr_timeline *t) {
  for (int i = 0; i < t->n / 2; i++) {
    const mr_timeline_point *a = &t->point[2 * i], *b = a + 1;
    t->point[i] =
        (mr_timeline_point){a->seconds + b->seconds, a->tokens + b->tokens, a->batch + b->batch};
  }
  t->n /= 2;
  t->step_s *= 2;
}

void mr_report_sample(mr_report *r, double seconds, double tokens, int batch) {
  mr_timeline *t = &r->timeline;
  if (t->n == 0 || t->point[t->n - 1].seconds >= t->step_s) {
    if (t->n == MR_TIMELINE_POINTS)
      merge_points(t);
    t->point[t->n++] = (mr_timeline_point){0, 0, 0};
  }
  mr_timeline_point *p = &t->point[t->n - 1];
  p->seconds += seconds;
  p->tokens += tokens;
  p->batch += batch * seconds;
}

/* JSON has no NaN and no infinity: such a figure is null. Four digits are plenty. */
static json_t *real(double x) {
  if (!isfinite(x))
    return json_null();
  double unit = x != 0 ? pow(10, floor(log10(fabs(x))) - 5) : 1;
  return json_real(unit > 0 && isfinite(x / unit) ? round(x / unit) * unit : x);
}

static json_t *count(uint64_t n) {
  return json_integer((json_int_t)n);
}

static json_t *latency(const mr_histogram *h) {
  return json_pack(
      "{s:o, s:o, s:o, s:o, s:o, s:o}", "p50", real(1e3 * mr_histogram_quantile(h, 0.50)), "p90",
      real(1e3 * mr_histogram_quantile(h, 0.90)), "p99", real(1e3 * mr_histogram_quantile(h, 0.99)),
      "mean", real(h->n ? 1e3 * h->sum_s / (double)h->n : 0), "max", real(1e3 * h->max_s), "rows",
      count(h->n));
}

static json_t *seconds(const mr_report *r) {
  const mr_engine_stats *s = &r->stats;
  double known = r->preflight_s + r->load_s + r->run_s + r->commit_s + r->assemble_s;
  double other = r->total_s > known ? r->total_s - known : 0;
  return json_pack("{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:{s:o, s:o, s:o, s:o}}", "preflight",
                   real(r->preflight_s), "load", real(r->load_s), "run", real(r->run_s), "commit",
                   real(r->commit_s), "assemble", real(r->assemble_s), "other", real(other),
                   "total", real(r->total_s), "steps", "gemm", real(s->gemm_s), "attention",
                   real(s->attn_s), "sampling", real(s->sample_s), "other", real(s->other_s));
}

static double per(double a, double b) {
  return b > 0 ? a / b : 0;
}

static json_t *throughput(const mr_report *r) {
  const mr_engine_stats *s = &r->stats;
  double busy_s = r->run_s + r->commit_s;
  return json_pack("{s:o, s:o, s:o, s:o}", "output_tokens_per_s",
                   real(per((double)s->output_tokens, busy_s)), "prompt_tokens_per_s",
                   real(per((double)s->prompt_tokens_computed, busy_s)), "rows_per_s",
                   real(per((double)r->rows_this_run, busy_s)), "output_tokens_per_s_whole",
                   real(per((double)s->output_tokens, r->total_s)));
}

static json_t *batch(const mr_report *r) {
  const mr_engine_stats *s = &r->stats;
  double in_flight = 0, time_s = 0;
  for (int i = 0; i < r->timeline.n; i++) {
    in_flight += r->timeline.point[i].batch;
    time_s += r->timeline.point[i].seconds;
  }
  return json_pack("{s:o, s:o, s:o, s:i, s:i, s:i, s:b, s:o}", "steps", count(s->steps),
                   "tokens_per_step", real(per((double)s->batch_tokens_sum, (double)s->steps)),
                   "sequences_mean", real(per(in_flight, time_s)), "sequences_max",
                   s->max_batch_seen, "limit", r->info.max_batch, "step_tokens_limit",
                   r->info.max_step_tokens, "step_tokens_measured", r->info.step_measured,
                   "preemptions", count(s->preemptions));
}

static json_t *engine(const mr_report *r) {
  const mr_engine_info *e = &r->info;
  if (!r->has_engine)
    return json_null();
  return json_pack("{s:s*, s:s*, s:s*, s:s*, s:s*, s:i, s:i, s:o, s:o, s:o, s:o, s:o, s:o}", "arch",
                   e->arch, "device", e->device, "isa", e->isa, "scheme", e->scheme, "kv_type",
                   e->kv_type, "threads", e->threads, "context", e->context, "params",
                   count(e->n_params), "weight_bytes", count(e->weight_bytes), "packed_bytes",
                   count(e->packed_bytes), "kv_memory_bytes", count(e->kv_memory),
                   "kv_bytes_per_token", count(e->kv_bytes_per_token), "kv_peak_share",
                   real(per((double)r->stats.kv_pages_peak, (double)r->stats.kv_pages_total)));
}

/* What was done when memory for keys and values ran out. */
static json_t *kv(const mr_report *r) {
  const mr_engine_stats *s = &r->stats;
  double page = per((double)r->info.kv_memory, (double)s->kv_pages_total);
  return json_pack("{s:s*, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "policy",
                   r->info.kv_policy, "preemptions", count(s->preemptions), "recomputed_tokens",
                   count(s->recomputed_tokens), "spill_bytes", count(s->kv_spill_bytes),
                   "fetch_bytes", count(s->kv_fetch_bytes), "disk_failures", count(s->kv_failures),
                   "stall_seconds", real(s->kv_stall_s), "resumed_rows", count(s->resumed_rows),
                   "resumed_tokens", count(s->resumed_tokens), "held_back_bytes",
                   count((uint64_t)((double)s->kv_pages_held_back * page)));
}

static json_t *prefix_cache(const mr_report *r) {
  const mr_engine_stats *s = &r->stats;
  return json_pack("{s:o, s:o, s:o, s:o}", "tokens", count(s->prompt_tokens_cached), "read_bytes",
                   count(s->cache_read_bytes), "written_bytes", count(s->cache_written_bytes),
                   "bad_files", count(s->cache_bad));
}

/* What the time was said to be before, part by part. */
static json_t *prediction(const mr_report *r) {
  if (!r->predicted)
    return json_null();
  double said = 0, took = 0;
  json_t *parts = json_object();
  for (int i = 0; i < MR_PARTS; i++) {
    said += r->said_s[i];
    took += r->took_s[i];
    json_object_set_new(
        parts, mr_part_names[i],
        json_pack("{s:o, s:o}", "predicted", real(r->said_s[i]), "took", real(r->took_s[i])));
  }
  return json_pack("{s:o, s:o, s:o, s:o, s:i, s:o}", "predicted_seconds", real(said),
                   "took_seconds", real(took), "share_of_tokens", real(r->predicted_share),
                   "waited_share", real(r->waited_share), "learnt_from_runs", r->predicted_runs,
                   "parts", parts);
}

static json_t *timeline(const mr_timeline *t) {
  json_t *at = json_array(), *rate = json_array(), *size = json_array();
  double s = 0;
  for (int i = 0; i < t->n; i++) {
    const mr_timeline_point *p = &t->point[i];
    json_array_append_new(at, real(s + p->seconds / 2));
    json_array_append_new(rate, real(per(p->tokens, p->seconds)));
    json_array_append_new(size, real(per(p->batch, p->seconds)));
    s += p->seconds;
  }
  return json_pack("{s:o, s:o, s:o}", "seconds", at, "output_tokens_per_s", rate, "sequences",
                   size);
}

/* Where the run phase went: the least time of its arithmetic and of its memory traffic at the
 * machine's limits, which overlap at best, and what is left over the longer of the two. */
static json_t *diagnosis(const mr_report *r) {
  double compute = per(r->stats.flops, r->peak_ops), memory = per(r->stats.bytes, r->peak_bytes);
  double most = compute > memory ? compute : memory;
  double rest = r->run_s > most ? r->run_s - most : 0;
  const char *by = rest > most ? "overhead" : compute >= memory ? "compute" : "memory";
  const mr_engine_info *i = &r->info;
  double balance = mr_roofline_balance(r->peak_ops, r->peak_bytes, (double)i->packed_bytes,
                                       i->flops_per_prompt_token);
  return json_pack("{s:o, s:o, s:o, s:s, s:o}", "compute_seconds", real(compute), "memory_seconds",
                   real(memory), "rest_seconds", real(rest), "bound_by", by, "balance_tokens",
                   real(balance));
}

/* MFU: arithmetic done over what the machine could have done in the run phase; MBU: bytes moved at
 * least, likewise. */
static bool add_peaks(const mr_report *r, json_t *o) {
  bool run = r->has_engine && r->run_s > 0;
  json_t *mfu =
      run && r->peak_ops > 0 ? real(r->stats.flops / r->run_s / r->peak_ops) : json_null();
  json_t *mbu =
      run && r->peak_bytes > 0 ? real(r->stats.bytes / r->run_s / r->peak_bytes) : json_null();
  json_t *peaks = json_pack("{s:o, s:o, s:s}", "ops_per_s", real(r->peak_ops), "bytes_per_s",
                            real(r->peak_bytes), "basis", r->peak_basis);
  int bad = json_object_set_new(o, "mfu", mfu); /* each takes its value, also when it fails */
  bad |= json_object_set_new(o, "mbu", mbu);
  bad |= json_object_set_new(o, "peaks", peaks);
  bool known = run && r->peak_ops > 0 && r->peak_bytes > 0;
  bad |= json_object_set_new(o, "diagnosis", known ? diagnosis(r) : json_null());
  return !bad;
}

static json_t *shared_json(const json_t *o) {
  return o ? json_deep_copy(o) : json_null();
}

/* A path may hold any bytes; JSON only UTF-8. */
static json_t *any_text(const char *s) {
  json_t *o = json_string(s ? s : "");
  if (o || !s)
    return o;
  mr_text t = {0};
  for (; *s; s++)
    mr_text_addc(&t, (unsigned char)*s < 0x80 ? *s : '?');
  o = t.failed ? NULL : json_string(t.data);
  mr_text_free(&t);
  return o;
}

static bool add_identity(const mr_report *r, json_t *o) {
  const mr_job_identity *id = r->id;
  json_t *model = json_pack("{s:o, s:o, s:s}", "path", any_text(r->model_path), "name",
                            any_text(r->model_name), "digest", id->model_digest);
  json_t *digests = json_pack("{s:s, s:s, s:s}", "inputs", id->input_digest, "model",
                              id->model_digest, "options", id->options_digest);
  int bad = json_object_set_new(o, "version", json_string(MR_VERSION));
  bad |= json_object_set_new(o, "job_id", json_string(id->job_id));
  bad |= json_object_set_new(o, "created", json_integer(id->created));
  bad |= json_object_set_new(o, "output", any_text(r->output));
  bad |= json_object_set_new(o, "model", model);
  bad |= json_object_set_new(o, "numerics", json_string(id->numerics));
  bad |= json_object_set_new(o, "digests", digests);
  bad |= json_object_set_new(o, "options", shared_json(id->options));
  bad |= json_object_set_new(o, "inputs", shared_json(r->inputs));
  return !bad;
}

json_t *mr_report_to_json(const mr_report *r) {
  json_t *o = json_pack(
      "{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, "
      "s:o}",
      "rows", count(r->rows), "rows_ok", count(r->rows_ok), "rows_failed", count(r->rows_failed),
      "rows_this_run", count(r->rows_this_run), "prompt_tokens", count(r->prompt_tokens),
      "prefill_tokens_computed", count(r->stats.prompt_tokens_computed), "prefill_tokens_shared",
      count(r->stats.prompt_tokens_shared), "output_tokens", count(r->output_tokens), "seconds",
      seconds(r), "ttft_ms", latency(&r->ttft), "tpot_ms", latency(&r->tpot), "throughput",
      throughput(r), "batch", batch(r), "engine", engine(r), "kv_spill_bytes",
      count(r->stats.kv_spill_bytes), "kv_fetch_bytes", count(r->stats.kv_fetch_bytes),
      "peak_memory_bytes", count(r->peak_memory_bytes), "errors",
      r->errors ? shared_json(r->errors) : json_object(), "timeline", timeline(&r->timeline));
  json_t *runs = json_pack("{s:o, s:o, s:o}", "earlier", count(r->earlier_runs), "earlier_seconds",
                           real(r->earlier_s), "rows_lost_and_redone", count(r->lost_rows));
  int bad = json_object_set_new(o, "runs", runs);
  bad |= json_object_set_new(o, "kv", kv(r));
  bad |= json_object_set_new(o, "prediction", prediction(r));
  bad |= json_object_set_new(o, "prefix_cache", prefix_cache(r));
  bad |= json_object_set_new(o, "results_bytes", count(r->results_bytes));
  if (!bad && add_peaks(r, o) && add_identity(r, o))
    return o;
  json_decref(o);
  return NULL;
}
