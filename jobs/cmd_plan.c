/* cmd_plan.c: `millrace plan`: checks every row and estimates the run, without running it. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "io/durable.h"
#include "io/json.h"
#include "io/mem.h"
#include "io/sys.h"
#include "io/weights.h"
#include "jobs/cmd.h"
#include "jobs/explain.h"
#include "jobs/forecast.h"
#include "jobs/preflight.h"
#include "jobs/roofline.h"
#include "jobs/rundir.h"
#include "jobs/score.h"
#include "jobs/signals.h"
#include "jobs/tuned.h"
#include "src/machine.h"

#define BAD_SHOWN 20

typedef struct planned {
  mr_job job;
  mr_prompter *prompter;
  mr_engine_opts opts;
  mr_tuning tuning; /* opts borrows it */
  mr_engine_info info;
  mr_preflight_stats stats;
  mr_plan *plan;
  mr_shard *shard;                                       /* NULL: the whole job */
  uint64_t rows, bad_rows, prompt_tokens, output_tokens; /* of what is asked for */
  mr_time_estimate estimate;
  mr_forecast forecast;
  int learnt_from; /* runs */
  double waited_share;
} planned;

/* ------------------------------------------------------------------ the spool */

static bool tick(void *ctx, const mr_preflight_stats *s) {
  (void)ctx;
  (void)s;
  return !mr_signals_stop();
}

/* Preflight into a directory of its own; the plan's files stay open after it is removed. */
static mr_code spool(planned *p, const char *dir, mr_err *err) {
  mr_plan_writer *w;
  mr_code rc = mr_plan_create(&w, dir, err);
  if (rc != MR_OK)
    return rc;
  rc = mr_preflight_run(&p->job, p->prompter, (double)mr_sys_now->wall_s(), p->info.context, w,
                        &p->stats, tick, NULL, err);
  if (rc != MR_OK) {
    mr_plan_abandon(w);
    return rc;
  }
  rc = mr_plan_finish(w, err);
  return rc == MR_OK ? mr_plan_open(&p->plan, dir, err) : rc;
}

static mr_code preflight(planned *p, mr_err *err) {
  mr_text dir = {0};
  mr_text_addf(&dir, "%s/millrace-plan-XXXXXX", mr_path_temporary());
  if (dir.failed)
    return mr_err_set(err, MR_E_NOMEM, "out of memory");
  bool made = mkdtemp(dir.data) != NULL;
  mr_code rc = made ? spool(p, dir.data, err)
                    : mr_err_errno(err, MR_E_CANTCREATE, dir.data, "cannot create");
  mr_err ignored = MR_ERR_INIT;
  if (made)
    mr_durable_remove_tree(dir.data, &ignored);
  mr_text_free(&dir);
  return rc;
}

/* The rows that --shard takes, or all of them. */
static mr_code take_rows(planned *p, mr_err *err) {
  mr_code rc = p->job.shard.of ? mr_shard_open(&p->shard, p->plan, p->job.shard, err) : MR_OK;
  mr_plan_scan s;
  mr_plan_scan_start(&s, p->plan, err);
  while (rc == MR_OK && mr_plan_scan_next(&s)) {
    bool bad = s.e->kind == MR_ROW_BAD;
    if (!mr_shard_has(p->shard, s.row))
      continue;
    p->rows++;
    p->bad_rows += bad;
    p->prompt_tokens += bad ? 0 : (uint64_t)s.e->n_prompt;
    p->output_tokens += bad ? 0 : (uint64_t)s.e->n_out;
  }
  return rc == MR_OK ? s.rc : rc;
}

/* ------------------------------------------------------------------ prediction */

static bool not_ours(void *ctx, uint64_t row) {
  return !mr_shard_has(((const planned *)ctx)->shard, row);
}

/* A job without a good row needs no engine, and nothing is measured. */
static mr_code measure(planned *p, mr_profile *profile, mr_err *err) {
  if (p->rows == p->bad_rows) {
    mr_profile_load(profile, &p->info);
    return MR_OK;
  }
  mr_watch watch = mr_machine_watch();
  mr_code rc = mr_estimate_measure(&p->opts, &p->info, &p->estimate, err);
  if (rc != MR_OK)
    return rc;
  mr_tuned_save(&p->tuning, &p->info);
  double waited = mr_machine_waited_share(&watch);
  mr_profile_load(profile, &p->info);
  if (waited > MR_MACHINE_WAITED && profile->measured && profile->waited < waited) {
    mr_estimate_known(&p->estimate, &p->info, profile); /* an earlier one had less company */
  } else {
    profile->waited = waited;
    mr_estimate_remember(&p->estimate, profile);
    mr_profile_save(profile);
  }
  p->waited_share = profile->waited;
  return MR_OK;
}

/* The prefix cache, where there is one: it is named by the digest of the model's bytes. */
static mr_code look_into_cache(planned *p, mr_prefixstore **cache, mr_err *err) {
  char digest[MR_HASH_HEX];
  mr_engine_opts o = p->opts;
  mr_weights *w;
  if (!p->opts.prefix_cache)
    return MR_OK;
  mr_code rc = mr_weights_open(&w, p->job.model, err);
  if (rc != MR_OK)
    return rc;
  rc = mr_weights_digest(w, digest, err);
  mr_weights_close(w);
  o.model_digest = digest;
  return rc != MR_OK ? rc : mr_engine_look_store(cache, &o, &p->info, err);
}

static mr_code predict(planned *p, mr_err *err) {
  mr_schedule *order = NULL;
  mr_prefixstore *cache = NULL;
  mr_profile *profile = mr_mem_alloc(1, sizeof *profile);
  mr_code rc = profile ? measure(p, profile, err) : mr_err_set(err, MR_E_NOMEM, "out of memory");
  if (rc == MR_OK)
    rc = mr_schedule_open(&order, p->plan, mr_path_temporary(), 0, not_ours, p, err);
  if (rc == MR_OK)
    rc = look_into_cache(p, &cache, err);
  p->estimate.start_s += p->stats.seconds;
  const mr_forecast_in in = {.plan = p->plan,
                             .order = order,
                             .no_sharing = p->job.no_prefix_sharing,
                             .cache = cache,
                             .info = &p->info,
                             .profile = profile};
  if (rc == MR_OK)
    rc = mr_forecast_run(&p->forecast, &in, &p->estimate, err);
  mr_prefixstore_close(cache);
  mr_schedule_close(order);
  p->learnt_from = rc == MR_OK ? profile->runs : 0;
  mr_mem_free(profile);
  return rc;
}

/* ------------------------------------------------------------------ bad rows */

typedef void (*bad_fn)(const mr_plan *p, const mr_plan_entry *e, const char *message, void *to);

/* The first BAD_SHOWN bad rows. */
static mr_code each_bad(const planned *all, bad_fn fn, void *to, mr_err *err) {
  const mr_plan *p = all->plan;
  uint64_t left = all->bad_rows < BAD_SHOWN ? all->bad_rows : BAD_SHOWN;
  mr_plan_scan s;
  mr_plan_scan_start(&s, p, err);
  while (left && mr_plan_scan_next(&s)) {
    const mr_plan_entry *e = s.e;
    if (e->kind != MR_ROW_BAD || !mr_shard_has(all->shard, s.row))
      continue;
    left--;
    mr_plan_record rec;
    mr_code rc = mr_plan_read(p, s.row, &rec, err);
    if (rc != MR_OK)
      return rc;
    json_t *v = mr_json_parse(rec.json, rec.json_len, NULL, NULL);
    const char *message =
        json_string_value(json_object_get(json_object_get(v, "error"), "message"));
    fn(p, e, message ? message : "?", to);
    json_decref(v);
    mr_plan_record_free(&rec);
  }
  return s.rc;
}

static const char *file_of(const mr_plan *p, const mr_plan_entry *e) {
  return e->file < mr_plan_n_files(p) ? mr_plan_files(p)[e->file] : "?";
}

static void print_bad(const mr_plan *p, const mr_plan_entry *e, const char *message, void *to) {
  (void)to;
  printf("  %s:%" PRIu64 ": %s\n", file_of(p, e), e->line, message);
}

static void add_bad(const mr_plan *p, const mr_plan_entry *e, const char *message, void *to) {
  mr_text *t = to;
  mr_text_adds(t, t->len && t->data[t->len - 1] == '}' ? ",{\"file\":" : "{\"file\":");
  mr_json_add_string(t, file_of(p, e), strlen(file_of(p, e)));
  mr_text_addf(t, ",\"line\":%" PRIu64 ",\"message\":", e->line);
  mr_json_add_string(t, message, strlen(message));
  mr_text_addc(t, '}');
}

/* ------------------------------------------------------------------ printing */

static void add_int(mr_text *t, const char *name, uint64_t v) {
  mr_text_addf(t, "%c\"%s\":%" PRIu64, t->len ? ',' : '{', name, v);
}

static void add_real(mr_text *t, const char *name, double v) {
  mr_text_addf(t, ",\"%s\":%.4g", name, v);
}

static mr_explain_in why(const planned *p) {
  return (mr_explain_in){.job = &p->job,
                         .info = &p->info,
                         .forecast = &p->forecast,
                         .estimate = &p->estimate,
                         .learnt_from = p->learnt_from,
                         .waited_share = p->waited_share};
}

static void print_why(const char *sentence, void *to) {
  (void)to;
  printf("  - %s\n", sentence);
}

static void add_why(const char *sentence, void *to) {
  mr_text *t = to;
  if (t->len && t->data[t->len - 1] != '[')
    mr_text_addc(t, ',');
  mr_json_add_string(t, sentence, strlen(sentence));
}

/* Bytes of keys and values a token, of layers with a window. */
static uint64_t window_bytes(const mr_engine_info *i) {
  return i->kv_bytes_per_token / (uint64_t)i->kv_groups * (uint64_t)i->kv_window_groups;
}

static double balance(const planned *p) {
  return mr_roofline_balance(p->estimate.gemm_flops_per_s, p->estimate.memory_bytes_per_s,
                             (double)p->info.packed_bytes, p->info.flops_per_prompt_token);
}

static mr_code print_json(const planned *p, mr_err *err) {
  mr_text t = {0};
  add_int(&t, "rows", p->rows);
  add_int(&t, "bad_rows", p->bad_rows);
  if (p->shard)
    mr_text_addf(&t, ",\"shard\":{\"index\":%d,\"of\":%d,\"job_rows\":%" PRIu64 "}",
                 p->job.shard.index, p->job.shard.of, mr_plan_rows(p->plan));
  add_int(&t, "input_files", p->stats.files);
  add_int(&t, "input_bytes", p->stats.input_bytes);
  add_int(&t, "adapters", (uint64_t)p->job.n_adapters);
  add_int(&t, "prompt_tokens", p->prompt_tokens);
  add_int(&t, "shared_prefix_tokens", p->forecast.shared_tokens);
  add_int(&t, "prefix_cache_tokens", p->forecast.cached_tokens);
  add_int(&t, "output_tokens_max", p->output_tokens);
  add_int(&t, "kv_bytes_per_token", p->info.kv_bytes_per_token);
  add_int(&t, "kv_window_bytes_per_token", window_bytes(&p->info));
  add_int(&t, "kv_memory_bytes", p->info.kv_memory);
  add_int(&t, "kv_tokens", p->info.kv_tokens);
  add_int(&t, "weight_bytes", p->info.packed_bytes);
  add_int(&t, "batch", (uint64_t)(p->estimate.sim.batch + 0.5));
  add_int(&t, "step_tokens", (uint64_t)p->info.max_step_tokens);
  add_real(&t, "balance_tokens", balance(p));
  add_int(&t, "context", (uint64_t)p->info.context);
  add_int(&t, "threads", (uint64_t)p->info.threads);
  add_real(&t, "gemm_flops_per_s", p->estimate.gemm_flops_per_s);
  add_real(&t, "memory_bytes_per_s", p->estimate.memory_bytes_per_s);
  add_real(&t, "load_seconds", p->estimate.parts[MR_PART_LOAD]);
  add_real(&t, "prefill_seconds", p->estimate.prefill_s);
  add_real(&t, "decode_seconds", p->estimate.decode_s);
  add_real(&t, "gemm_seconds", p->estimate.parts[MR_PART_GEMM]);
  add_real(&t, "attention_seconds", p->estimate.parts[MR_PART_ATTENTION]);
  add_real(&t, "steps", p->estimate.sim.steps);
  add_real(&t, "predicted_seconds", p->estimate.seconds);
  add_real(&t, "preflight_seconds", p->stats.seconds);
  mr_text_addf(&t, ",\"bound_by\":\"%s\",\"order\":{", p->estimate.bound_by);
  const mr_schedule_info *o = &p->forecast.order;
  mr_text_addf(&t,
               "\"groups\":%" PRIu64 ",\"grouped_rows\":%" PRIu64 ",\"largest_group\":%" PRIu64
               ",\"blended\":%s",
               o->groups, o->grouped_rows, o->largest_group, o->blended ? "true" : "false");
  mr_text_adds(&t, "},\"why\":[");
  mr_explain_in in = why(p);
  mr_explain(&in, add_why, &t);
  mr_text_adds(&t, "],\"bad\":[");
  mr_code rc = each_bad(p, add_bad, &t, err);
  mr_text_adds(&t, "]}");
  if (rc == MR_OK && t.failed)
    rc = mr_err_set(err, MR_E_NOMEM, "out of memory");
  if (rc == MR_OK)
    printf("%s\n", t.data);
  mr_text_free(&t);
  return rc;
}

static void print_time(const planned *p) {
  const mr_time_estimate *e = &p->estimate;
  printf("predicted         %.1f s: load %.1f s, prefill %.1f s, decode %.1f s, the rest %.1f s\n",
         e->seconds, e->parts[MR_PART_LOAD], e->prefill_s, e->decode_s, e->parts[MR_PART_REST]);
  printf(
      "                  in %.0f steps: matrix products %.1f s (%.0f Gflop/s), attention %.1f s,\n"
      "                  other %.1f s\n",
      e->sim.steps, e->parts[MR_PART_GEMM], e->gemm_flops_per_s / 1e9, e->parts[MR_PART_ATTENTION],
      e->parts[MR_PART_OTHER]);
}

static mr_code print_text(const planned *p, mr_err *err) {
  const double mib = 1 << 20;
  uint64_t bad = p->bad_rows;
  if (p->shard)
    printf("shard             %d/%d: %" PRIu64 " of the job's rows\n", p->job.shard.index,
           p->job.shard.of, p->rows);
  printf("rows              %" PRIu64 " in %" PRIu64 " files, read in %.1f s\n",
         mr_plan_rows(p->plan), p->stats.files, p->stats.seconds);
  printf("bad rows          %" PRIu64 "%s\n", bad,
         bad > BAD_SHOWN ? ", of which the first are:" : "");
  mr_code rc = each_bad(p, print_bad, NULL, err);
  if (rc != MR_OK)
    return rc;
  printf("prompt tokens     %" PRIu64 ", of which %s%" PRIu64 " begin as an earlier prompt does\n",
         p->prompt_tokens, p->forecast.shared_is_least ? "at least " : "",
         p->forecast.shared_tokens);
  printf("output tokens     %" PRIu64 " at most\n", p->output_tokens);
  printf("weights           %.0f MiB packed (%s)\n", (double)p->info.packed_bytes / mib,
         p->info.scheme);
  if (p->job.n_adapters)
    printf("adapters          %d\n", p->job.n_adapters);
  printf("keys and values   %" PRIu64 " bytes a token (%s), %.0f MiB for %" PRIu64 " tokens\n",
         p->info.kv_bytes_per_token, p->info.kv_type, (double)p->info.kv_memory / mib,
         p->info.kv_tokens);
  if (window_bytes(&p->info))
    printf("                  (%" PRIu64 " of the bytes only for the last %d tokens of a row)\n",
           window_bytes(&p->info), p->info.kv_window);
  printf("batch             %.0f rows, steps of up to %d tokens, %d threads\n",
         p->estimate.sim.batch, p->info.max_step_tokens, p->info.threads);
  if (balance(p) > 0)
    printf(
        "                  (from %.0f tokens on, arithmetic takes longer than reading weights)\n",
        balance(p));
  print_time(p);
  mr_explain_in in = why(p);
  puts("why");
  mr_explain(&in, print_why, NULL);
  return MR_OK;
}

/* ------------------------------------------------------------------ the command */

/* What a run would be told about its references. */
static mr_code check_score(const mr_job *j, mr_err *err) {
  mr_score *s = NULL;
  mr_code rc = mr_job_has_score(j) ? mr_score_open(&s, &j->score, err) : MR_OK;
  mr_score_close(s);
  return rc;
}

static mr_code plan_job(planned *p, mr_err *err) {
  mr_job_engine_opts(&p->job, &p->opts);
  mr_code rc = check_score(&p->job, err);
  if (rc == MR_OK)
    rc = mr_prompter_open(&p->prompter, p->job.model, err);
  if (rc == MR_OK)
    rc = mr_engine_estimate(&p->opts, &p->info, err);
  if (rc == MR_OK)
    mr_tuned_load(&p->tuning, &p->opts, &p->info);
  if (rc == MR_OK)
    rc = preflight(p, err);
  if (rc == MR_OK)
    rc = take_rows(p, err);
  if (rc == MR_OK)
    rc = predict(p, err);
  if (rc == MR_OK)
    rc = p->job.json ? print_json(p, err) : print_text(p, err);
  if (rc == MR_OK && mr_plan_rows(p->plan) > 0 &&
      mr_plan_rows(p->plan) == mr_plan_bad_rows(p->plan))
    rc = mr_err_set(err, MR_E_DATA, "none of the rows is valid");
  return rc;
}

int mr_cmd_plan(int argc, char **argv) {
  mr_err err = MR_ERR_INIT;
  planned p = {0};
  mr_job_init(&p.job);
  mr_code rc = mr_job_parse(&p.job, MR_CMD_PLAN, argc, argv, &err);
  if (rc == MR_OK && p.job.help) {
    mr_job_help(MR_CMD_PLAN);
  } else if (rc == MR_OK) {
    mr_signals_install();
    rc = plan_job(&p, &err);
  }
  if (rc != MR_OK)
    mr_err_print(&err, stderr);
  mr_shard_close(p.shard);
  mr_plan_close(p.plan);
  mr_prompter_close(p.prompter);
  mr_job_free(&p.job);
  return mr_err_exit(rc);
}
