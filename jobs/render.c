#include "jobs/render.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "io/hash.h"
#include "io/json.h"
#include "jobs/logprobs.h"

typedef struct view { /* a row and its result while its line is written */
  const mr_render *r;
  const mr_plan_record *rec;
  const mr_result *res;
  json_t *json; /* of the record */
  mr_params par;
  mr_text *t;
} view;

/* ------------------------------------------------------------------ small parts */

static void key(mr_text *t, const char *name) {
  mr_text_addf(t, ",\"%s\":", name);
}

static void add_text(mr_text *t, const char *name, const char *s) {
  key(t, name);
  if (s)
    mr_json_add_string(t, s, strlen(s));
  else
    mr_text_adds(t, "null");
}

/* 16 hex digits that belong to this job, row and use. */
static void add_id(const view *v, const char *name, const char *prefix) {
  char buf[96];
  int n = snprintf(buf, sizeof buf, "%s %" PRIu64 " %s", v->r->job_id, v->rec->row, prefix);
  mr_text_addf(v->t, "\"%s\":\"%s%016" PRIx64 "\"", name, prefix, mr_hash_64(buf, (size_t)n));
}

static void add_ids(mr_text *t, const int32_t *ids, int n) {
  mr_text_addc(t, '[');
  for (int i = 0; i < n; i++)
    mr_text_addf(t, "%s%" PRId32, i ? "," : "", ids[i]);
  mr_text_addc(t, ']');
}

static void add_member(const view *v, const char *name, const char *member) {
  const json_t *value = json_object_get(v->json, member);
  if (!value)
    return;
  key(v->t, name);
  mr_json_add(v->t, value);
}

/* The members of an object, each with a comma before it. */
static void add_members(mr_text *t, json_t *object) {
  const char *name;
  json_t *value;
  json_object_foreach(object, name, value) {
    mr_text_addc(t, ',');
    mr_json_add_string(t, name, strlen(name));
    mr_text_addc(t, ':');
    mr_json_add(t, value);
  }
}

static const char *finish_name(mr_finish f) {
  return f == MR_FINISH_STOP ? "stop" : "length";
}

static void add_usage(const view *v) {
  int64_t out = 0, prompt = v->rec->e.n_prompt;
  for (int i = 0; i < v->res->n_choices; i++)
    out += v->rec->e.kind == MR_ROW_SCORE ? v->res->choices[i].n_ids : v->res->choices[i].n_sampled;
  key(v->t, "usage");
  mr_text_addf(v->t,
               "{\"prompt_tokens\":%" PRId64 ",\"completion_tokens\":%" PRId64
               ",\"total_tokens\":%" PRId64 "}",
               prompt, out, prompt + out);
}

/* Token ids are shown when they are asked for, and when there is no text. */
static bool shows_ids(const view *v) {
  return v->par.return_token_ids || !v->r->vocab;
}

/* ------------------------------------------------------------------ the text of a choice */

/* The prompt's text for echo: as it was given, or what its tokens spell. */
static void echo_text(const view *v, mr_text *out) {
  const json_t *given = json_object_get(v->json, "echo");
  if (given) {
    mr_text_add(out, json_string_value(given), json_string_length(given));
    return;
  }
  mr_detok d;
  if (!v->r->vocab)
    return;
  mr_detok_init(&d, v->r->vocab, true, false);
  for (int i = 0; i < v->rec->e.n_prompt; i++)
    mr_detok_push(&d, v->rec->prompt[i], out);
  mr_detok_finish(&d, out);
}

static void add_output(const view *v, const mr_choice *c) {
  mr_text whole = {0};
  if (v->par.echo)
    echo_text(v, &whole);
  mr_text_add(&whole, c->text, c->text_len);
  v->t->failed = v->t->failed || whole.failed;
  mr_json_add_string(v->t, whole.data ? whole.data : "", whole.len);
  mr_text_free(&whole);
}

/* The completions object, with the prompt's tokens in front under echo. */
static void add_logprobs(const view *v, const mr_choice *c) {
  if (v->par.logprobs < 0 || !c->logprobs) {
    mr_text_adds(v->t, v->par.logprobs < 0 ? "null"
                                           : "{\"tokens\":[],\"token_logprobs\":[],"
                                             "\"top_logprobs\":[],\"text_offset\":[]}");
    return;
  }
  mr_logprobs_list l = {.list = c->logprobs,
                        .n = c->n_ids,
                        .offsets = c->offsets,
                        .text = c->text,
                        .text_len = c->text_len};
  if (v->par.echo) {
    mr_text prompt = {0};
    echo_text(v, &prompt);
    l.prompt_chars = mr_logprobs_chars(prompt.data ? prompt.data : "", prompt.len);
    mr_text_free(&prompt);
  }
  if (v->par.echo && v->res->prompt_logprobs) {
    l.prompt_ids = v->rec->prompt;
    l.prompt = v->res->prompt_logprobs;
    l.n_prompt = v->rec->e.n_prompt;
  }
  mr_logprobs_completion(v->t, v->r->vocab, &l);
}

/* ------------------------------------------------------------------ kind 1: the OpenAI bodies */

static void chat_choice(const view *v, const mr_choice *c, int index) {
  mr_text_addf(v->t, "{\"index\":%d,\"message\":{\"role\":\"assistant\",\"content\":", index);
  add_output(v, c);
  mr_text_adds(v->t, ",\"refusal\":null},\"logprobs\":");
  if (v->par.logprobs >= 0)
    mr_logprobs_chat(v->t, v->r->vocab, c->logprobs, c->logprobs ? c->n_ids : 0);
  else
    mr_text_adds(v->t, "null");
  add_text(v->t, "finish_reason", finish_name(c->finish));
  if (shows_ids(v)) {
    key(v->t, "token_ids");
    add_ids(v->t, c->ids, c->n_ids);
  }
  mr_text_addc(v->t, '}');
}

static void prompt_logprobs(const view *v) {
  if (v->par.prompt_logprobs < 0 || !v->res->prompt_logprobs)
    return;
  key(v->t, "prompt_logprobs");
  mr_logprobs_by_id(v->t, v->r->vocab, v->res->prompt_logprobs, v->rec->e.n_prompt);
}

static void completion_choice(const view *v, const mr_choice *c, int index) {
  mr_text_addf(v->t, "{\"index\":%d", index);
  if (c->text) {
    key(v->t, "text");
    add_output(v, c);
  }
  key(v->t, "logprobs");
  add_logprobs(v, c);
  add_text(v->t, "finish_reason", finish_name(c->finish));
  if (shows_ids(v)) {
    key(v->t, "token_ids");
    add_ids(v->t, c->ids, c->n_ids);
    key(v->t, "prompt_token_ids");
    add_ids(v->t, v->rec->prompt, v->rec->e.n_prompt);
  }
  prompt_logprobs(v);
  mr_text_addc(v->t, '}');
}

static void add_body(const view *v) {
  bool chat = v->rec->e.kind == MR_ROW_BATCH_CHAT;
  const json_t *model = json_object_get(v->json, "model");
  mr_text_addc(v->t, '{');
  add_id(v, "id", chat ? "chatcmpl-" : "cmpl-");
  add_text(v->t, "object", chat ? "chat.completion" : "text_completion");
  mr_text_addf(v->t, ",\"created\":%" PRId64, v->r->created);
  if (model)
    add_member(v, "model", "model");
  else
    add_text(v->t, "model", v->r->model);
  mr_text_adds(v->t, ",\"choices\":[");
  for (int i = 0; i < v->res->n_choices; i++) {
    if (i)
      mr_text_addc(v->t, ',');
    if (chat)
      chat_choice(v, &v->res->choices[i], i);
    else
      completion_choice(v, &v->res->choices[i], i);
  }
  mr_text_addc(v->t, ']');
  add_usage(v);
  if (chat && shows_ids(v)) {
    key(v->t, "prompt_token_ids");
    add_ids(v->t, v->rec->prompt, v->rec->e.n_prompt);
  }
  if (chat)
    prompt_logprobs(v);
  mr_text_addc(v->t, '}');
}

static void add_response(const view *v, int status) {
  mr_text_addf(v->t, ",\"response\":{\"status_code\":%d,", status);
  add_id(v, "request_id", "req_");
  mr_text_adds(v->t, ",\"body\":");
}

static void batch_line(const view *v) {
  mr_text_addc(v->t, '{');
  add_id(v, "id", "batch_req_");
  add_member(v, "custom_id", "id");
  add_response(v, 200);
  add_body(v);
  mr_text_adds(v->t, "},\"error\":null");
  add_member(v, "warnings", "warnings");
  mr_text_adds(v->t, "}\n");
}

/* ------------------------------------------------------------------ kinds 2 and 3: flat */

/* Writes one value, or a list of them when there are several choices. */
static void each_choice(const view *v, const char *name,
                        void (*add)(const view *v, const mr_choice *c)) {
  key(v->t, name);
  bool list = v->par.n > 1;
  if (list)
    mr_text_addc(v->t, '[');
  for (int i = 0; i < v->res->n_choices; i++) {
    if (i)
      mr_text_addc(v->t, ',');
    add(v, &v->res->choices[i]);
  }
  if (list)
    mr_text_addc(v->t, ']');
}

static void add_finish(const view *v, const mr_choice *c) {
  mr_text_addf(v->t, "\"%s\"", finish_name(c->finish));
}

static void add_choice_ids(const view *v, const mr_choice *c) {
  add_ids(v->t, c->ids, c->n_ids);
}

/* {"id": ..., the input's fields, the prompt if it is kept */
static void flat_begin(const view *v) {
  const json_t *id = json_object_get(v->json, "id");
  mr_text_adds(v->t, "{\"id\":");
  if (json_is_true(json_object_get(v->json, "id_is_number")))
    mr_text_adds(v->t, json_string_value(id));
  else
    mr_json_add(v->t, id);
  add_members(v->t, json_object_get(v->json, "fields"));
  add_members(v->t, json_object_get(v->json, "kept"));
}

static void flat_end(const view *v) {
  add_usage(v);
  if (shows_ids(v)) {
    key(v->t, "prompt_token_ids");
    add_ids(v->t, v->rec->prompt, v->rec->e.n_prompt);
  }
  if (v->par.prompt_logprobs >= 0 && v->res->prompt_logprobs) {
    key(v->t, "prompt_token_logprobs");
    mr_logprobs_numbers(v->t, v->res->prompt_logprobs, v->rec->e.n_prompt, true);
  }
  if (v->par.prompt_logprobs > 0 && v->res->prompt_logprobs) {
    key(v->t, "prompt_top_logprobs");
    mr_logprobs_tops(v->t, v->r->vocab, v->res->prompt_logprobs, v->rec->e.n_prompt);
  }
  add_member(v, "warnings", "warnings");
  mr_text_adds(v->t, "}\n");
}

static void plain_line(const view *v) {
  flat_begin(v);
  if (v->r->vocab)
    each_choice(v, "output", add_output);
  each_choice(v, "finish_reason", add_finish);
  if (shows_ids(v))
    each_choice(v, "token_ids", add_choice_ids);
  if (v->par.logprobs >= 0)
    each_choice(v, "logprobs", add_logprobs);
  flat_end(v);
}

/* The index of the largest sum, or of the largest sum by byte. */
static int best_of(const view *v, const json_t *bytes) {
  int best = 0;
  double most = 0;
  for (int i = 0; i < v->res->n_choices; i++) {
    double n = bytes ? json_number_value(json_array_get(bytes, (size_t)i)) : 1;
    double score = v->res->choices[i].sum_logprob / (n > 0 ? n : 1);
    if (i == 0 || score > most) {
      best = i;
      most = score;
    }
  }
  return best;
}

static void score_choices(const view *v, const json_t *bytes) {
  key(v->t, "choice_logprobs");
  for (int i = 0; i < v->res->n_choices; i++) {
    mr_text_addc(v->t, i ? ',' : '[');
    mr_json_add_real(v->t, v->res->choices[i].sum_logprob);
  }
  mr_text_adds(v->t, "],\"choice_tokens\":");
  for (int i = 0; i < v->res->n_choices; i++)
    mr_text_addf(v->t, "%c%d", i ? ',' : '[', v->res->choices[i].n_ids);
  mr_text_addf(v->t, "],\"best\":%d,\"best_normalized\":%d", best_of(v, NULL), best_of(v, bytes));
}

static void score_line(const view *v) {
  const json_t *bytes = json_object_get(v->json, "choice_bytes");
  const mr_choice *c = &v->res->choices[0];
  flat_begin(v);
  if (bytes) {
    score_choices(v, bytes);
  } else {
    key(v->t, "logprob");
    mr_json_add_real(v->t, c->sum_logprob);
    key(v->t, "token_logprobs");
    mr_logprobs_numbers(v->t, c->logprobs, c->logprobs ? c->n_ids : 0, false);
    key(v->t, "is_greedy");
    mr_text_adds(v->t, c->greedy ? "true" : "false");
  }
  if (shows_ids(v)) {
    key(v->t, "token_ids");
    if (bytes)
      mr_text_addc(v->t, '[');
    for (int i = 0; i < v->res->n_choices; i++) {
      if (i)
        mr_text_addc(v->t, ',');
      add_choice_ids(v, &v->res->choices[i]);
    }
    if (bytes)
      mr_text_addc(v->t, ']');
  }
  flat_end(v);
}

/* ------------------------------------------------------------------ error lines */

static void add_error_object(mr_text *t, const mr_row_error *e) {
  mr_text_adds(t, "{\"message\":");
  mr_json_add_string(t, e->message, strlen(e->message));
  add_text(t, "type", *e->type ? e->type : NULL);
  add_text(t, "param", *e->param ? e->param : NULL);
  add_text(t, "code", *e->code ? e->code : NULL);
  mr_text_addc(t, '}');
}

/* id, custom_id, file and line: the same for every error line. */
static void error_begin(const view *v) {
  const json_t *id = json_object_get(v->json, "id");
  mr_text_addc(v->t, '{');
  add_id(v, "id", "batch_req_");
  key(v->t, "custom_id");
  if (id)
    mr_json_add(v->t, id);
  else
    mr_text_adds(v->t, "null");
  if (v->r->files)
    add_text(v->t, "file", v->r->files[v->rec->e.file]);
  mr_text_addf(v->t, ",\"line\":%" PRIu64, v->rec->e.line);
}

static void failed_line(const view *v, const mr_row_error *why) {
  error_begin(v);
  if (!strcmp(why->type, "batch_expired")) { /* never run: there is no response */
    mr_text_adds(v->t, ",\"response\":null,\"error\":{\"code\":\"batch_expired\",\"message\":");
    mr_json_add_string(v->t, why->message, strlen(why->message));
    mr_text_adds(v->t, "}}\n");
    return;
  }
  add_response(v, !strcmp(why->type, "invalid_request_error") ? 400 : 500);
  mr_text_adds(v->t, "{\"error\":");
  add_error_object(v->t, why);
  mr_text_adds(v->t, "}},\"error\":null}\n");
}

static void bad_line(const view *v) {
  error_begin(v);
  add_response(v, 400);
  mr_text_adds(v->t, "{\"error\":");
  mr_json_add(v->t, json_object_get(v->json, "error"));
  mr_text_adds(v->t, "}},\"error\":null}\n");
}

/* ------------------------------------------------------------------ entries */

static mr_code begin(view *v, const mr_render *r, const mr_plan_record *rec, mr_text *line,
                     mr_err *err) {
  *v = (view){.r = r, .rec = rec, .t = line};
  v->json = mr_json_load(rec->json, rec->json_len); /* our own text, checked by its digest */
  return v->json ? MR_OK : mr_err_set(err, MR_E_NOMEM, "out of memory for a result");
}

static mr_code end(view *v, mr_err *err) {
  json_decref(v->json);
  return v->t->failed ? mr_err_set(err, MR_E_NOMEM, "out of memory for a result") : MR_OK;
}

/* True if any choice failed; why says how. */
static bool has_failed(const mr_result *res, mr_row_error *why) {
  for (int i = 0; i < res->n_choices; i++)
    if (res->choices[i].finish == MR_FINISH_ERROR) {
      mr_row_error_set(why, NULL, "engine_error", "%s",
                       res->err.text[0] ? res->err.text : "the row failed");
      snprintf(why->type, sizeof why->type, "server_error");
      return true;
    }
  return false;
}

mr_code mr_render_result(const mr_render *r, const mr_plan_record *rec, const mr_result *res,
                         mr_text *line, bool *is_error, mr_err *err) {
  view v;
  mr_row_error why = {0};
  *is_error = false;
  mr_code rc = begin(&v, r, rec, line, err);
  if (rc != MR_OK)
    return rc;
  v.res = res;
  if (rec->e.kind == MR_ROW_BAD || res->n_choices < 1 ||
      !mr_params_read(&v.par, json_object_get(v.json, "params"), NULL, MR_SHAPE_STORED, 0, &why)) {
    json_decref(v.json);
    return mr_err_set(err, MR_E_INTERNAL, "a result without choices or parameters");
  }
  *is_error = has_failed(res, &why);
  if (*is_error)
    failed_line(&v, &why);
  else if (rec->e.kind == MR_ROW_SCORE)
    score_line(&v);
  else if (rec->e.kind == MR_ROW_PLAIN)
    plain_line(&v);
  else
    batch_line(&v);
  return end(&v, err);
}

mr_code mr_render_bad(const mr_render *r, const mr_plan_record *rec, mr_text *line, mr_err *err) {
  view v;
  mr_code rc = begin(&v, r, rec, line, err);
  if (rc != MR_OK)
    return rc;
  if (json_is_object(json_object_get(v.json, "error"))) {
    bad_line(&v);
    return end(&v, err);
  }
  json_decref(v.json);
  return mr_err_set(err, MR_E_INTERNAL, "a bad row without its error");
}

mr_code mr_render_failed(const mr_render *r, const mr_plan_record *rec, const mr_row_error *why,
                         mr_text *line, mr_err *err) {
  view v;
  mr_code rc = begin(&v, r, rec, line, err);
  if (rc != MR_OK)
    return rc;
  failed_line(&v, why);
  return end(&v, err);
}
