#include "jobs/run.h"

#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include "io/json.h"
#include "io/mem.h"
#include "io/sys.h"
#include "io/weights.h"
#include "jobs/inputs.h"
#include "jobs/preflight.h"
#include "jobs/signals.h"
#include "jobs/tuned.h"
#include "src/lora.h"

#define DAY_S 86400

void mr_run_tick(mr_run *r, const char *phase) {
  struct rusage u;
  if (getrusage(RUSAGE_SELF, &u) == 0)
    r->now.memory_bytes = (uint64_t)u.ru_maxrss * 1024;
  r->now.phase = phase;
  mr_progress_update(r->progress, &r->now, mr_signals_take_progress());
}

/* Seconds from now until the clock next shows `minutes` of the day; mktime knows of days that have
 * not 24 hours. */
static double until(int minutes) {
  time_t now = (time_t)mr_sys_now->wall_s(), at = -1;
  struct tm t;
  if (!localtime_r(&now, &t))
    return DAY_S;
  const int today = t.tm_mday, month = t.tm_mon, year = t.tm_year;
  for (int day = 0; day < 3 && at <= now; day++) {
    t = (struct tm){.tm_year = year,
                    .tm_mon = month,
                    .tm_mday = today + day,
                    .tm_hour = minutes / 60,
                    .tm_min = minutes % 60,
                    .tm_isdst = -1};
    at = mktime(&t);
  }
  return at > now ? (double)(at - now) : DAY_S;
}

static void set_deadline(mr_run *r) {
  if (r->job.time_limit_s > 0)
    r->deadline_s = r->start_s + r->job.time_limit_s;
  if (r->job.until_min >= 0) {
    double at = r->start_s + until(r->job.until_min);
    if (r->deadline_s == 0 || at < r->deadline_s)
      r->deadline_s = at;
  }
  mr_sys_wake_at(r->job.expire ? 0 : r->deadline_s); /* --expire: all rows get a line, so the input
                                                        is awaited */
}

/* Everything that can be refused before a byte is written. */
static mr_code look(mr_run *r, mr_err *err) {
  const char *output = r->job.format == MR_OUT_STDOUT ? NULL : r->job.output;
  if (output && mr_utf8_valid(output, strlen(output)) >= 0)
    return mr_err_set(err, MR_E_USAGE,
                      "the output's name is not UTF-8; the manifest could not hold it");
  mr_code rc = mr_inputs_list(&r->job, &r->inputs, err);
  if (!rc)
    rc = mr_job_check_output(&r->job, err);
  if (!rc)
    rc = mr_paths_make(&r->paths, output ? r->job.base : NULL, output, err);
  if (!rc)
    rc = mr_prompter_open(&r->prompter, r->job.model, err);
  mr_job_engine_opts(&r->job, &r->engine_opts);
  if (!rc)
    rc = mr_engine_estimate(&r->engine_opts, &r->estimate, err);
  if (!rc)
    mr_tuned_load(&r->tuning, &r->engine_opts, &r->estimate);
  return rc;
}

static mr_code hash_model(mr_run *r, mr_err *err) {
  mr_weights *w;
  mr_code rc = mr_weights_open(&w, r->job.model, err);
  if (rc)
    return rc;
  rc = mr_weights_digest(w, r->id.model_digest, err);
  mr_weights_close(w);
  return rc;
}

/* Each adapter by its name and its files' bytes. */
static mr_code add_adapters(const mr_job *j, json_t *options, mr_err *err) {
  for (int i = 0; i < j->n_adapters; i++) {
    char hex[MR_HASH_HEX], key[300];
    mr_code rc = mr_lora_digest(j->adapters[i].dir, hex, err);
    if (rc)
      return rc;
    snprintf(key, sizeof key, "lora %s", j->adapters[i].name);
    if (json_object_set_new(options, key, json_string(hex)))
      return mr_err_set(err, MR_E_NOMEM, "out of memory");
  }
  return MR_OK;
}

/* --other-numerics: what is done stays, and the job keeps its name. */
static void accept_numerics(mr_run *r, const mr_job_identity *old) {
  if (!old || !r->job.other_numerics || !strcmp(old->numerics, r->id.numerics))
    return;
  fprintf(stderr,
          "millrace: rows that are done were computed with %s, the others will be with %s\n",
          old->numerics, r->id.numerics);
  memcpy(r->id.numerics, old->numerics, sizeof r->id.numerics);
}

static mr_code identify(mr_run *r, mr_err *err) {
  const mr_job_identity *old = mr_commit_identity(r->commit);
  const mr_engine_info *e = &r->estimate;
  snprintf(r->id.numerics, sizeof r->id.numerics, "numerics %d, %s, %s, %s, kv %s",
           MR_NUMERICS_VERSION, e->device, e->isa, e->scheme, e->kv_type);
  accept_numerics(r, old);
  r->id.created = old ? old->created : r->job.created >= 0 ? r->job.created : mr_sys_now->wall_s();
  mr_code rc = hash_model(r, err);
  r->engine_opts.model_digest = r->id.model_digest;
  json_t *options = rc ? NULL : mr_job_result_options(&r->job);
  /* It stands in the results of rows that name no model. */
  if (options &&
      json_object_set_new(options, "model-name", json_string(mr_prompter_name(r->prompter)))) {
    json_decref(options);
    options = NULL;
  }
  if (options && (rc = add_adapters(&r->job, options, err)))
    json_decref(options);
  return rc ? rc : mr_identity_set_options(&r->id, options, err);
}

/* A finished job whose inputs look as they did then: no need to read them. */
static bool is_finished_as_it_looks(mr_run *r) {
  const mr_manifest *m = mr_commit_finished(r->commit);
  if (!m || !mr_inputs_equal(m->inputs, r->inputs))
    return false;
  memcpy(r->id.input_digest, m->id.input_digest, sizeof r->id.input_digest);
  r->id.rows = m->id.rows;
  r->id.part = (mr_identity_part){.index = r->job.shard.index, .of = r->job.shard.of};
  return true;
}

static bool preflight_tick(void *ctx, const mr_preflight_stats *s) {
  mr_run *r = ctx;
  r->now.rows_done = s->rows;
  r->now.rows_failed = s->bad_rows;
  mr_run_tick(r, "preflight");
  if (mr_signals_stop())
    return false;
  return r->deadline_s == 0 || r->job.expire || mr_sys_seconds() < r->deadline_s;
}

static mr_code make_plan(mr_run *r, mr_err *err) {
  mr_plan_writer *w;
  mr_preflight_stats s;
  mr_sys_now->unlink(r->paths.plan_inputs);
  mr_code rc = mr_plan_create(&w, r->paths.run, err);
  if (rc)
    return rc;
  memset(&s, 0, sizeof s);
  rc = mr_preflight_run(&r->job, r->prompter, (double)r->id.created, r->estimate.context, w, &s,
                        preflight_tick, r, err);
  if (rc) {
    mr_plan_abandon(w);
    return rc;
  }
  rc = mr_plan_finish(w, err);
  return rc ? rc : mr_inputs_save(r->paths.plan_inputs, r->inputs, &r->id, err);
}

static mr_code take_shard(mr_run *r, mr_err *err) {
  mr_code rc = mr_shard_open(&r->shard, r->plan, r->job.shard, err);
  if (rc)
    return rc;
  r->id.part = (mr_identity_part){.index = r->job.shard.index,
                                  .of = r->job.shard.of,
                                  .job_rows = r->id.rows,
                                  .cut = mr_shard_cut(r->shard)};
  r->id.rows = mr_shard_rows(r->shard);
  return MR_OK;
}

static mr_code get_plan(mr_run *r, mr_err *err) {
  mr_err ignored = MR_ERR_INIT;
  mr_run_tick(r, "preflight");
  bool old = mr_inputs_match(r->paths.plan_inputs, r->inputs, &r->id) &&
             mr_plan_open(&r->plan, r->paths.run, &ignored) == MR_OK;
  mr_code rc = MR_OK;
  if (!old)
    rc = make_plan(r, err);
  if (!rc && !old)
    rc = mr_plan_open(&r->plan, r->paths.run, err);
  if (rc)
    return rc;
  const char *digest = mr_plan_digest(r->plan);
  if (strlen(digest) != MR_HASH_HEX - 1)
    return mr_err_at(err, MR_E_DATA, r->paths.run, 0, -1,
                     "the plan has no digest; remove it to begin anew");
  memcpy(r->id.input_digest, digest, MR_HASH_HEX);
  r->id.rows = mr_plan_rows(r->plan);
  return r->job.shard.of ? take_shard(r, err) : MR_OK;
}

/* With no row to run there is nothing to produce; the first refusal says what is wrong. */
static mr_code refuse_without_rows(mr_run *r, mr_err *err) {
  uint64_t rows = mr_plan_rows(r->plan);
  if (rows == 0 || mr_plan_bad_rows(r->plan) < rows)
    return MR_OK;
  mr_plan_record rec;
  mr_code rc = mr_plan_read(r->plan, 0, &rec, err);
  if (rc)
    return rc;
  json_t *o = mr_json_load(rec.json, rec.json_len);
  const json_t *e = json_object_get(o, "error");
  const char *why = json_string_value(json_object_get(json_is_object(e) ? e : o, "message"));
  const char *file =
      rec.e.file < mr_plan_n_files(r->plan) ? mr_plan_files(r->plan)[rec.e.file] : NULL;
  rc = mr_err_at(err, MR_E_DATA, file, (int64_t)rec.e.line, -1,
                 "no valid row in the input; the first of %llu says: %s", (unsigned long long)rows,
                 why ? why : "not a row");
  json_decref(o);
  mr_plan_record_free(&rec);
  return rc;
}

mr_code mr_run_prepare(mr_run *r, mr_err *err) {
  set_deadline(r);
  mr_code rc = look(r, err);
  if (!rc)
    rc = mr_commit_open(&r->commit, &r->paths, err);
  if (rc)
    return rc;
  r->was_new = mr_commit_identity(r->commit) == NULL;
  if (!mr_commit_finished(r->commit))
    rc = mr_run_score_open(r, err);
  if (!rc)
    rc = identify(r, err);
  if (!rc && !is_finished_as_it_looks(r)) {
    rc = get_plan(r, err);
    if (!rc && r->was_new)
      rc = refuse_without_rows(r, err);
  }
  if (!rc)
    rc = mr_commit_bind(r->commit, &r->id, err);
  r->finished = !rc && mr_commit_finished(r->commit);
  /* A state in which nothing was ever done, and the litter beside a finished job, need not stay. */
  if (mr_commit_finished(r->commit) || (rc && r->was_new)) {
    mr_err ignored = MR_ERR_INIT;
    mr_commit_discard(r->commit, &ignored);
  }
  r->report.preflight_s = mr_sys_seconds() - r->start_s;
  return rc;
}
