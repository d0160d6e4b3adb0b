/* request.c: a plan record to an engine request (rows.h). */
#include <limits.h>
#include <string.h>

#include "io/hash.h"
#include "io/json.h"
#include "io/mem.h"
#include "jobs/rows.h"

/* Temperatures below this are greedy: dividing logits by less overflows float32. */
#define LEAST_TEMPERATURE 1e-5

static mr_code no_memory(mr_err *err) {
  return mr_err_set(err, MR_E_NOMEM, "out of memory for a row");
}

static mr_code copy_stop(const mr_params *p, mr_row_keep *keep, mr_sampling *s, mr_err *err) {
  size_t n = json_is_array(p->stop) ? json_array_size(p->stop) : p->stop != NULL;
  if (!n)
    return MR_OK;
  keep->stop = mr_mem_alloc(n, sizeof *keep->stop);
  if (!keep->stop)
    return no_memory(err);
  for (size_t i = 0; i < n; i++) {
    const json_t *v = json_is_array(p->stop) ? json_array_get(p->stop, i) : p->stop;
    keep->stop[i] =
        (char *)(uintptr_t)json_string_value(v); /* lives in keep->json; nobody writes to it */
  }
  s->stop = keep->stop;
  s->n_stop = (int)n;
  return MR_OK;
}

static mr_code copy_stop_ids(const mr_params *p, mr_row_keep *keep, mr_sampling *s, mr_err *err) {
  size_t n = json_array_size(p->stop_token_ids);
  if (!n)
    return MR_OK;
  keep->stop_ids = mr_mem_alloc(n, sizeof *keep->stop_ids);
  if (!keep->stop_ids)
    return no_memory(err);
  for (size_t i = 0; i < n; i++)
    keep->stop_ids[i] = (int32_t)json_number_value(json_array_get(p->stop_token_ids, i));
  s->stop_ids = keep->stop_ids;
  s->n_stop_ids = (int)n;
  return MR_OK;
}

static mr_code copy_bias(const mr_params *p, mr_row_keep *keep, mr_sampling *s, mr_err *err) {
  size_t n = json_object_size(p->logit_bias), i = 0;
  if (!n)
    return MR_OK;
  keep->bias = mr_mem_alloc(n, sizeof *keep->bias);
  if (!keep->bias)
    return no_memory(err);
  const char *key;
  json_t *v;
  json_object_foreach(p->logit_bias, key, v) {
    int64_t id = 0;
    mr_parse_int(key, &id);
    keep->bias[i++] = (mr_bias){(int32_t)id, (float)json_number_value(v)};
  }
  s->bias = keep->bias;
  s->n_bias = (int)n;
  return MR_OK;
}

static int clip(int64_t v) {
  return v > INT_MAX ? INT_MAX : (int)v;
}

static void fill_sampling(const mr_params *p, mr_sampling *s) {
  *s = mr_sampling_default;
  s->temperature = p->temperature < LEAST_TEMPERATURE ? 0 : (float)p->temperature;
  s->top_k = clip(p->top_k);
  s->top_p = (float)p->top_p;
  s->min_p = (float)p->min_p;
  s->repetition_penalty = (float)p->repetition_penalty;
  s->presence_penalty = (float)p->presence_penalty;
  s->frequency_penalty = (float)p->frequency_penalty;
  s->seed = (uint64_t)p->seed;
  s->has_seed = p->has_seed;
  s->max_tokens = clip(p->max_tokens);
  s->min_tokens = clip(p->min_tokens);
  s->ignore_eos = p->ignore_eos;
  s->logprobs = (int)p->logprobs;
  s->prompt_logprobs = (int)p->prompt_logprobs;
  s->echo = p->echo;
  s->n = (int)p->n;
  s->include_stop = p->include_stop;
  if (p->echo &&
      s->prompt_logprobs < s->logprobs) /* the prompt's tokens are listed with the answer's */
    s->prompt_logprobs = s->logprobs;
}

static mr_code fill(const mr_plan_record *rec, mr_request *req, mr_row_keep *keep, mr_err *err) {
  mr_params p;
  mr_row_error why = {0};
  size_t id_len;
  const char *id = mr_row_id(keep->json, &id_len);
  const json_t *params = json_object_get(keep->json, "params");
  if (!id || !mr_params_read(&p, params, NULL, MR_SHAPE_STORED, 0, &why))
    return mr_err_set(err, MR_E_DATA, "the plan is damaged: a row's parameters: %s", why.message);
  *req = (mr_request){.tag = rec->row,
                      .row = rec->row,
                      .row_key = mr_hash_64(id, id_len),
                      .task = rec->e.kind == MR_ROW_SCORE ? MR_TASK_SCORE : MR_TASK_GENERATE,
                      .prompt = rec->prompt,
                      .n_prompt = rec->e.n_prompt,
                      .cont = rec->cont,
                      .cont_len = rec->cont_len,
                      .n_cont = rec->n_cont,
                      .adapter = rec->e.adapter > INT_MAX ? -1 : (int)rec->e.adapter};
  fill_sampling(&p, &req->sampling);
  if (req->task == MR_TASK_SCORE)
    req->sampling.logprobs = 0; /* token_logprobs */
  mr_code rc = copy_stop(&p, keep, &req->sampling, err);
  if (rc == MR_OK)
    rc = copy_stop_ids(&p, keep, &req->sampling, err);
  return rc == MR_OK ? copy_bias(&p, keep, &req->sampling, err) : rc;
}

mr_code mr_row_request(const mr_plan_record *rec, const mr_vocab *v, mr_request *req,
                       mr_row_keep *keep, mr_err *err) {
  (void)v; /* token ids were checked against the model when the plan was made */
  *keep = (mr_row_keep){0};
  if (rec->e.kind == MR_ROW_BAD || rec->e.n_prompt < 1)
    return mr_err_set(err, MR_E_INTERNAL, "row %llu has nothing to run",
                      (unsigned long long)rec->row);
  keep->json = mr_json_load(rec->json, rec->json_len); /* our own text, checked by its digest */
  mr_code rc = keep->json ? fill(rec, req, keep, err) : no_memory(err);
  if (rc != MR_OK)
    mr_row_keep_free(keep);
  return rc;
}

void mr_row_keep_free(mr_row_keep *keep) {
  json_decref(keep->json);
  mr_mem_free(keep->bias);
  mr_mem_free(keep->stop_ids);
  mr_mem_free(keep->stop);
  *keep = (mr_row_keep){0};
}
