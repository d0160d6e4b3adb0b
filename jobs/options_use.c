/* What is made of a job's options. */
#include "io/json.h"
#include "jobs/options.h"

bool mr_job_has_score(const mr_job *j) {
  const mr_score_opts *o = &j->score;
  return o->refs.n || o->metrics || o->ref_field || o->by || o->extract || o->extract_last ||
         o->ignore || o->outputs || o->skip_missing;
}

int mr_job_status(const mr_job *j, uint64_t rows, uint64_t failed) {
  double most = j->tolerate_percent ? j->tolerate * (double)rows : j->tolerate;
  return failed > 0 && (double)failed > most ? 1 : 0;
}

void mr_job_engine_opts(const mr_job *j, mr_engine_opts *o) {
  *o = (mr_engine_opts){.model_path = j->model,
                        .device = j->device,
                        .device_weights = j->device_weights,
                        .device_gemm = j->device_gemm,
                        .device_memory = j->device_memory,
                        .compute = j->compute,
                        .threads = j->threads,
                        .pin = j->pin,
                        .max_batch = j->max_batch,
                        .max_step_tokens = j->max_step_tokens,
                        .kv_memory = j->kv_memory,
                        .kv_disk = j->kv_disk,
                        .spill_dir = j->spill_dir,
                        .kv_policy = j->kv_policy,
                        .prefix_cache = j->prefix_cache,
                        .prefix_cache_bytes = j->prefix_cache_bytes,
                        .kv_type = j->kv_type,
                        .context = j->context,
                        .adapters = j->adapters,
                        .n_adapters = j->n_adapters,
                        .no_prefix_sharing = j->no_prefix_sharing};
}

json_t *mr_job_result_options(const mr_job *j) {
  json_t *o = json_object();
  if (!o)
    return NULL;
  int bad = json_object_set_new(o, "compute",
                                json_string(j->compute == MR_COMPUTE_EXACT ? "exact" : "fast"));
  bad |= json_object_set_new(o, "context", json_integer(j->context));
  bad |=
      json_object_set_new(o, "defaults", j->defaults ? json_deep_copy(j->defaults) : json_object());
  bad |= json_object_set_new(o, "duplicates",
                             json_string(j->duplicates == MR_DUP_REFUSE ? "refuse" : "error-row"));
  bad |= json_object_set_new(o, "keep-prompt", json_boolean(j->keep_prompt));
  const char *kv = j->kv_type < 0 ? "auto" : mr_kv_type_name((mr_kv_type)j->kv_type);
  bad |= json_object_set_new(o, "kv-type", json_string(kv));
  bad |= json_object_set_new(
      o, "long-prompt",
      json_string(j->long_prompt == MR_LONG_TRUNCATE_LEFT ? "truncate-left" : "error"));
  bad |= json_object_set_new(o, "max-line", json_integer((json_int_t)j->max_line));
  if (!bad)
    return o;
  json_decref(o);
  return NULL;
}
