#include <string.h>

#include "io/sys.h"
#include "jobs/report_files.h"
#include "jobs/roofline.h"
#include "jobs/rowlist.h"
#include "jobs/run.h"

#define ROOFLINE_S 0.02 /* for each limit */

/* The limits of this machine now, for MFU and MBU; without them the report has none. */
static void measure_peaks(mr_run *r) {
  mr_roofline limits;
  mr_report *p = &r->report;
  mr_err ignored = MR_ERR_INIT;
  mr_scheme scheme = p->info.products;
  if (!p->has_engine || mr_roofline_measure(mr_kernels_best(), p->info.threads, 1u << scheme,
                                            ROOFLINE_S, &limits, &ignored))
    return;
  p->peak_ops = limits.ops_per_s[scheme];
  p->peak_bytes = limits.bytes_per_s;
  snprintf(
      p->peak_basis, sizeof p->peak_basis,
      "measured after the run on %d threads: %s matrix product on data in the cache, memory triad",
      limits.threads, p->info.scheme);
}

/* What was said before against what was; and the profile learns, where it was this work that ran:
 * all in one run, without rows that were put away or taken from an earlier one, and without others
 * that had the processors for long. Rows that ended early leave their steps out on both sides. */
static void compare(mr_run *r) {
  mr_report *p = &r->report;
  const mr_engine_stats *s = &p->stats;
  if (!r->profile || !p->has_engine)
    return;
  const double took[MR_PARTS] = {p->load_s, s->gemm_s, s->attn_s, s->sample_s + s->other_s,
                                 p->total_s - p->load_s - s->step_s};
  uint64_t said = r->forecast.prompt_tokens + r->forecast.output_tokens;
  if (!r->job.no_prefix_sharing)
    said -= r->forecast.shared_tokens + r->forecast.cached_tokens;
  double share = said ? (double)s->batch_tokens_sum / (double)said : 0;
  double learn[MR_PARTS];
  p->predicted = true;
  p->predicted_runs = r->profile->runs;
  p->predicted_share = share;
  for (int i = 0; i < MR_PARTS; i++) {
    bool step = i != MR_PART_LOAD && i != MR_PART_REST;
    p->said_s[i] = r->said.parts[i];
    p->took_s[i] = took[i];
    learn[i] = r->said.said[i] * (step ? share : 1);
  }
  if (p->earlier_runs || s->preemptions || share < 0.1 || share > 1.2)
    return;
  double speed = p->peak_ops > 0 && r->said.peak_ops > 0 ? p->peak_ops / r->said.peak_ops : 0;
  if (mr_profile_learn(r->profile, learn, took, speed, p->waited_share))
    mr_profile_save(r->profile);
}

static void fill_report(mr_run *r, const mr_manifest *m) {
  const mr_commit_totals *t = mr_commit_totals_get(r->commit);
  mr_report *p = &r->report;
  p->id = &r->id;
  p->model_path = r->job.model;
  p->model_name = mr_prompter_name(r->prompter);
  p->output = r->job.output;
  p->inputs = r->inputs;
  p->rows = r->id.rows;
  p->rows_ok = t->rows_ok;
  p->rows_failed = t->rows_failed;
  p->prompt_tokens = t->prompt_tokens;
  p->output_tokens = t->output_tokens;
  p->lost_rows = t->lost_rows;
  p->earlier_runs = t->earlier_runs;
  p->earlier_s = t->earlier_s;
  p->peak_memory_bytes = r->now.memory_bytes;
  p->results_bytes = m->n_files ? m->files[0].bytes : 0;
  measure_peaks(r);
  p->total_s = mr_sys_seconds() - r->start_s;
  compare(r);
}

/* Which rows the lines of a shard's files belong to. */
static mr_code list_rows(mr_run *r, mr_manifest *m, mr_err *err) {
  mr_rowlist lists[MR_STREAMS] = {{.end = 0}};
  bool failed = false;
  for (uint64_t row = 0; row < mr_plan_rows(r->plan); row++)
    if (mr_shard_has(r->shard, row))
      mr_rowlist_add(&lists[mr_commit_has_failed(r->commit, mr_shard_local(r->shard, row))], row);
  for (int i = 0; i < MR_STREAMS; i++) {
    mr_rowlist_end(&lists[i]);
    failed |= lists[i].text.failed;
    m->row_list[i] = lists[i].text.data; /* the manifest's now */
  }
  return failed ? mr_err_set(err, MR_E_NOMEM, "out of memory for the list of rows") : MR_OK;
}

static mr_code finish(mr_run *r, mr_manifest *m, mr_err *err) {
  double t = mr_sys_seconds();
  bool to_stdout = r->job.format == MR_OUT_STDOUT;
  mr_code rc = mr_commit_assemble(r->commit, r->job.format, r->job.zstd_level,
                                  r->job.completion_order, m, err);
  r->report.rows_failed = mr_commit_totals_get(r->commit)->rows_failed;
  if (!rc && !to_stdout)
    rc = mr_report_count_errors(&r->report, r->paths.made[MR_FINAL_ERRORS], err);
  if (!rc && !to_stdout && r->shard)
    rc = list_rows(r, m, err);
  r->report.assemble_s = mr_sys_seconds() - t;
  if (rc)
    return rc;
  fill_report(r, m);
  if (to_stdout)
    return MR_OK;
  m->inputs = json_incref(r->inputs);
  json_t *score = mr_run_score(r), *o = mr_report_to_json(&r->report);
  if (!score || json_object_set(o, "score", score) == 0)
    rc = mr_report_put(o, r->commit, m, err);
  else
    rc = mr_err_set(err, MR_E_NOMEM, "out of memory for the report");
  json_decref(score);
  json_decref(o);
  return rc ? rc : mr_commit_publish(r->commit, m, err);
}

mr_code mr_run_finish(mr_run *r, mr_err *err) {
  mr_manifest m;
  memset(&m, 0, sizeof m);
  mr_run_tick(r, "assemble");
  mr_code rc = finish(r, &m, err);
  mr_manifest_free(&m);
  return rc;
}
