#include "jobs/params.h"

#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "io/json.h"
#include "src/sampler.h"

#define MAX_CHOICES 128
#define MAX_BIASES 4096
#define MAX_STOP_IDS 1024

/* ------------------------------------------------------------------ the table */

typedef enum type { T_INT, T_REAL, T_BOOL } type;

typedef struct scalar {
  const char *name;
  type type;
  size_t at; /* in mr_params */
  double min, max;
  bool above;       /* the value must be greater than min */
  double otherwise; /* when nobody sets it */
  const char *wanted;
} scalar;

#define AT(field) offsetof(mr_params, field)

static const scalar scalars[] = {
    {"max_tokens", T_INT, AT(max_tokens), 1, 0x1p63, false, -1, "a whole number from 1"},
    {"min_tokens", T_INT, AT(min_tokens), 0, INT_MAX, false, 0,
     "a whole number from 0 to 2147483647"},
    {"n", T_INT, AT(n), 1, MAX_CHOICES, false, 1, "a whole number from 1 to 128"},
    {"temperature", T_REAL, AT(temperature), 0, 1e6, false, 1, "a number from 0 to 1000000"},
    {"top_p", T_REAL, AT(top_p), 0, 1, true, 1, "a number above 0 and up to 1"},
    {"top_k", T_INT, AT(top_k), -1, INT_MAX, false, 0,
     "a whole number from 1 to 2147483647, or 0 or -1 for all tokens"},
    {"min_p", T_REAL, AT(min_p), 0, 1, false, 0, "a number from 0 to 1"},
    {"repetition_penalty", T_REAL, AT(repetition_penalty), 0, 100, true, 1,
     "a number above 0 and up to 100"},
    {"presence_penalty", T_REAL, AT(presence_penalty), -2, 2, false, 0, "a number from -2 to 2"},
    {"frequency_penalty", T_REAL, AT(frequency_penalty), -2, 2, false, 0, "a number from -2 to 2"},
    {"prompt_logprobs", T_INT, AT(prompt_logprobs), 0, MR_TOP_LOGPROBS_MAX, false, -1,
     "a whole number from 0 to 20"},
    {"ignore_eos", T_BOOL, AT(ignore_eos), 0, 1, false, 0, "true or false"},
    {"echo", T_BOOL, AT(echo), 0, 1, false, 0, "true or false"},
    {"include_stop_str_in_output", T_BOOL, AT(include_stop), 0, 1, false, 0, "true or false"},
    {"return_token_ids", T_BOOL, AT(return_token_ids), 0, 1, false, 0, "true or false"},
    {"add_generation_prompt", T_BOOL, AT(add_generation_prompt), 0, 1, false, 1, "true or false"},
    {"stream", T_BOOL, AT(stream), 0, 1, false, 0, "true or false"},
};
#define N_SCALARS (sizeof scalars / sizeof *scalars)

/* Read by code of their own below. */
static const char *const special[] = {
    "max_completion_tokens",
    "seed",
    "logprobs",
    "top_logprobs",
    "stop",
    "stop_token_ids",
    "logit_bias",
    "model",
    "best_of",
    "suffix",
    "tools",
    "tool_choice",
    "response_format",
    "chat_template_kwargs",
    "documents",
};
/* They change nothing about the answer. */
static const char *const ignored[] = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "request_id",
    "stream_options",
    "prompt_cache_key",
    "priority",
    "parallel_tool_calls",
    "cache_salt",
    "include_reasoning",
};
/* Known, and not supported: null, and where said another value, is as absent. */
static const struct {
  const char *name;
  const char *harmless; /* JSON text that changes nothing, or NULL */
} unsupported[] = {
    {"audio", NULL},
    {"modalities", "[\"text\"]"},
    {"prediction", NULL},
    {"web_search_options", NULL},
    {"functions", "[]"},
    {"function_call", "\"none\""},
    {"reasoning_effort", NULL},
    {"verbosity", NULL},
    {"guided_json", NULL},
    {"guided_regex", NULL},
    {"guided_choice", NULL},
    {"guided_grammar", NULL},
    {"structured_outputs", NULL},
    {"use_beam_search", "false"},
    {"length_penalty", "1.0"},
    {"early_stopping", "false"},
    {"bad_words", "[]"},
    {"allowed_token_ids", NULL},
    {"logits_processors", "[]"},
    {"truncate_prompt_tokens", NULL},
    {"skip_special_tokens", "true"},
    {"spaces_between_special_tokens", "true"},
    {"add_special_tokens", NULL},
    {"continue_final_message", "false"},
    {"chat_template", NULL},
    {"prompt_embeds", NULL},
    {"return_tokens_as_token_ids", "false"},
    {"lora_request", NULL},
};
#define COUNT(a) (sizeof(a) / sizeof *(a))

static bool is_one_of(const char *name, const char *const *names, size_t n) {
  for (size_t i = 0; i < n; i++)
    if (!strcmp(name, names[i]))
      return true;
  return false;
}

bool mr_params_is_known(const char *name) {
  for (size_t i = 0; i < N_SCALARS; i++)
    if (!strcmp(name, scalars[i].name))
      return true;
  for (size_t i = 0; i < COUNT(unsupported); i++)
    if (!strcmp(name, unsupported[i].name))
      return true;
  return is_one_of(name, special, COUNT(special)) || is_one_of(name, ignored, COUNT(ignored));
}

bool mr_params_is_ignored(const char *name) {
  return is_one_of(name, ignored, COUNT(ignored));
}

/* ------------------------------------------------------------------ errors */

bool mr_row_error_set(mr_row_error *e, const char *param, const char *code, const char *fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(e->message, sizeof e->message, fmt, ap);
  va_end(ap);
  e->message[mr_utf8_whole(e->message, strlen(e->message))] = '\0';
  snprintf(e->type, sizeof e->type, "invalid_request_error");
  snprintf(e->param, sizeof e->param, "%s", param ? param : "");
  e->param[mr_utf8_whole(e->param, strlen(e->param))] = '\0';
  snprintf(e->code, sizeof e->code, "%s", code ? code : "");
  return false;
}

/* "NAME is VALUE; it must be WANTED". */
static bool wrong(mr_row_error *why, const char *name, const json_t *v, const char *wanted) {
  mr_text t = {0};
  mr_json_add(&t, v);
  size_t n = t.len > 60 ? mr_utf8_whole(t.data, 60) : t.len;
  mr_row_error_set(why, name, "invalid_value", "%s is %.*s%s; it must be %s", name, (int)n,
                   t.data ? t.data : "?", t.len > 60 ? "..." : "", wanted);
  mr_text_free(&t);
  return false;
}

/* ------------------------------------------------------------------ scalars */

typedef struct reader {
  const json_t *body, *defaults;
  mr_shape shape;
  int n_vocab; /* 0: not known */
  mr_row_error *why;
} reader;

/* NULL where it is absent or null. */
static json_t *own(const json_t *object, const char *name) {
  json_t *v = json_object_get(object, name);
  return json_is_null(v) ? NULL : v;
}

static json_t *find(const reader *r, const char *name) {
  json_t *v = own(r->body, name);
  return v ? v : own(r->defaults, name);
}

/* An integer, or a real that is one. */
static bool is_whole(const json_t *v, int64_t *value) {
  if (json_is_integer(v)) {
    *value = json_integer_value(v);
    return true;
  }
  double d = json_real_value(v);
  if (!json_is_real(v) || d != floor(d) || fabs(d) > 9007199254740992.0)
    return false;
  *value = (int64_t)d;
  return true;
}

static bool in_range(const scalar *s, double v) {
  return (s->above ? v > s->min : v >= s->min) && v <= s->max;
}

static bool read_scalar(const scalar *s, const json_t *v, mr_params *p) {
  void *at = (char *)p + s->at;
  int64_t whole;
  switch (s->type) {
  case T_BOOL:
    *(bool *)at = v ? json_is_true(v) : s->otherwise > 0;
    return !v || json_is_boolean(v);
  case T_INT:
    *(int64_t *)at = (int64_t)s->otherwise;
    if (!v)
      return true;
    if (!is_whole(v, &whole) || !in_range(s, (double)whole))
      return false;
    *(int64_t *)at = whole;
    return true;
  default:
    *(double *)at = v ? json_number_value(v) : s->otherwise;
    return !v || (json_is_number(v) && in_range(s, json_number_value(v)));
  }
}

static bool read_scalars(const reader *r, mr_params *p) {
  for (size_t i = 0; i < N_SCALARS; i++) {
    const json_t *v = find(r, scalars[i].name);
    if (!read_scalar(&scalars[i], v, p))
      return wrong(r->why, scalars[i].name, v, scalars[i].wanted);
  }
  return true;
}

/* ------------------------------------------------------------------ the others */

/* max_completion_tokens is the newer name of max_tokens; a row's own value goes before any default.
 */
static bool read_max_tokens(const reader *r, mr_params *p) {
  static const char newer[] = "max_completion_tokens";
  const json_t *a = own(r->body, "max_tokens"), *b = own(r->body, newer);
  if (!b && !a)
    b = own(r->defaults, newer);
  if (!b)
    return true;
  int64_t v;
  if (!is_whole(b, &v) || v < 1)
    return wrong(r->why, newer, b, "a whole number from 1");
  if (a && p->max_tokens != v)
    return mr_row_error_set(r->why, newer, "invalid_value",
                            "max_tokens is %" PRId64 " and max_completion_tokens is %" PRId64
                            "; give one of them",
                            p->max_tokens, v);
  p->max_tokens = v;
  return true;
}

static bool read_seed(const reader *r, mr_params *p) {
  const json_t *v = find(r, "seed");
  p->has_seed = v != NULL;
  p->seed = 0;
  if (v && !is_whole(v, &p->seed))
    return wrong(r->why, "seed", v, "a whole number of 64 bits");
  return true;
}

static bool read_count(const reader *r, const char *name, const json_t *v, int64_t *to) {
  if (!is_whole(v, to) || *to < 0 || *to > MR_TOP_LOGPROBS_MAX)
    return wrong(r->why, name, v, "a whole number from 0 to 20");
  return true;
}

/* Chat has logprobs (true or false) with top_logprobs, completions a number; plain rows take both.
 */
static bool read_logprobs(const reader *r, mr_params *p) {
  const json_t *v = find(r, "logprobs"), *top = find(r, "top_logprobs");
  bool flag = r->shape != MR_SHAPE_COMPLETION && r->shape != MR_SHAPE_STORED;
  int64_t n_top = 0;
  p->logprobs = -1;
  if (top && !read_count(r, "top_logprobs", top, &n_top))
    return false;
  if (v && json_is_boolean(v) && flag)
    p->logprobs = json_is_true(v) ? n_top : -1;
  else if (v && r->shape == MR_SHAPE_CHAT)
    return wrong(r->why, "logprobs", v, "true or false (top_logprobs says how many)");
  else if (v && !read_count(r, "logprobs", v, &p->logprobs))
    return false;
  if (n_top && (p->logprobs < 0 || !flag))
    return mr_row_error_set(r->why, "top_logprobs", "invalid_value",
                            "top_logprobs is %" PRId64 ", which needs logprobs: true", n_top);
  return true;
}

static bool check_stop_text(const reader *r, const json_t *v, size_t i) {
  if (!json_is_string(v) || !json_string_length(v))
    return wrong(r->why, "stop", v, "a text, or a list of texts, none of them empty");
  if (strlen(json_string_value(v)) != json_string_length(v))
    return mr_row_error_set(r->why, "stop", "invalid_value", "stop[%zu] holds a NUL character", i);
  return true;
}

static bool read_stop(const reader *r, mr_params *p) {
  json_t *v = p->stop = find(r, "stop");
  if (!v)
    return true;
  if (!json_is_array(v))
    return check_stop_text(r, v, 0);
  if (json_array_size(v) > MR_STOPS_MAX)
    return mr_row_error_set(r->why, "stop", "invalid_value",
                            "stop has %zu texts; at most %d are allowed", json_array_size(v),
                            MR_STOPS_MAX);
  for (size_t i = 0; i < json_array_size(v); i++)
    if (!check_stop_text(r, json_array_get(v, i), i))
      return false;
  return true;
}

static bool is_token(const reader *r, int64_t id) {
  return id >= 0 && id < (r->n_vocab ? r->n_vocab : INT_MAX);
}

static bool read_stop_ids(const reader *r, mr_params *p) {
  json_t *v = p->stop_token_ids = find(r, "stop_token_ids");
  if (!v)
    return true;
  if (!json_is_array(v) || json_array_size(v) > MAX_STOP_IDS)
    return wrong(r->why, "stop_token_ids", v, "a list of at most 1024 token ids");
  for (size_t i = 0; i < json_array_size(v); i++) {
    int64_t id;
    if (!is_whole(json_array_get(v, i), &id) || !is_token(r, id))
      return mr_row_error_set(r->why, "stop_token_ids", "invalid_value",
                              "stop_token_ids[%zu] is not a token id from 0 to %d", i,
                              (r->n_vocab ? r->n_vocab : INT_MAX) - 1);
  }
  return true;
}

static bool read_bias(const reader *r, mr_params *p) {
  json_t *v = p->logit_bias = find(r, "logit_bias");
  if (!v)
    return true;
  if (!json_is_object(v) || json_object_size(v) > MAX_BIASES)
    return wrong(r->why, "logit_bias", v, "an object of at most 4096 token ids with numbers");
  const char *key;
  json_t *bias;
  json_object_foreach(v, key, bias) {
    int64_t id;
    if (key[0] < '0' || key[0] > '9' || !mr_parse_int(key, &id) || !is_token(r, id))
      return mr_row_error_set(
          r->why, "logit_bias", "invalid_value",
          "logit_bias has the key \"%.40s\", which is not a token id from 0 to %d", key,
          (r->n_vocab ? r->n_vocab : INT_MAX) - 1);
    if (!json_is_number(bias) || !(fabs(json_number_value(bias)) <= 100))
      return mr_row_error_set(r->why, "logit_bias", "invalid_value",
                              "logit_bias of token %s must be a number from -100 to 100", key);
  }
  return true;
}

static bool not_supported(mr_row_error *why, const char *name, const char *what) {
  return mr_row_error_set(why, name, "unsupported_parameter", "%s is not supported%s", name, what);
}

/* best_of equal to n is what n alone does. */
static bool check_best_of(const reader *r, const mr_params *p) {
  const json_t *v = find(r, "best_of");
  int64_t best;
  if (!v)
    return true;
  if (!is_whole(v, &best) || best < p->n)
    return wrong(r->why, "best_of", v, "a whole number that is not below n");
  return best == p->n || not_supported(r->why, "best_of", " above n");
}

static bool check_response_format(const reader *r) {
  const json_t *v = find(r, "response_format");
  if (!v)
    return true;
  const char *t = json_string_value(json_object_get(v, "type"));
  if (!t || (strcmp(t, "text") && strcmp(t, "json_object") && strcmp(t, "json_schema")))
    return wrong(r->why, "response_format", v, "an object with the type \"text\"");
  return !strcmp(t, "text") ||
         mr_row_error_set(r->why, "response_format", "unsupported_parameter",
                          "response_format %s is not supported; only text is", t);
}

static bool read_tools(const reader *r, mr_params *p) {
  json_t *v = p->tools = find(r, "tools");
  if (v && !json_is_array(v))
    return wrong(r->why, "tools", v, "a list of tools");
  for (size_t i = 0; i < json_array_size(v); i++) {
    const json_t *f = json_object_get(json_array_get(v, i), "function");
    if (!json_is_string(json_object_get(json_array_get(v, i), "type")) ||
        !json_is_string(json_object_get(f, "name")))
      return mr_row_error_set(
          r->why, "tools", "invalid_value",
          "tools[%zu] must be {\"type\": \"function\", \"function\": {\"name\": ...}}", i);
  }
  if (!json_array_size(v))
    p->tools = NULL;
  const json_t *c = find(r, "tool_choice");
  const char *choice = json_string_value(c);
  if (!c || (choice && !strcmp(choice, "auto")))
    return true;
  if (choice && !strcmp(choice, "none")) {
    p->tools = NULL;
    return true;
  }
  if (json_is_object(c) || (choice && !strcmp(choice, "required")))
    return not_supported(r->why, "tool_choice",
                         " beyond \"auto\" and \"none\": a call cannot be enforced");
  return wrong(r->why, "tool_choice", c, "\"auto\" or \"none\"");
}

static bool read_chat_values(const reader *r, mr_params *p) {
  p->chat_template_kwargs = find(r, "chat_template_kwargs");
  p->documents = find(r, "documents");
  p->model = find(r, "model");
  if (p->chat_template_kwargs && !json_is_object(p->chat_template_kwargs))
    return wrong(r->why, "chat_template_kwargs", p->chat_template_kwargs, "an object");
  if (p->documents && !json_is_array(p->documents))
    return wrong(r->why, "documents", p->documents, "a list of objects");
  for (size_t i = 0; i < json_array_size(p->documents); i++)
    if (!json_is_object(json_array_get(p->documents, i)))
      return mr_row_error_set(r->why, "documents", "invalid_value",
                              "documents[%zu] is not an object", i);
  if (p->model && !json_is_string(p->model))
    return wrong(r->why, "model", p->model, "a name");
  return true;
}

static bool check_unsupported(const reader *r) {
  const json_t *suffix = find(r, "suffix");
  if (suffix && !(json_is_string(suffix) && !json_string_length(suffix)))
    return not_supported(r->why, "suffix", ": this program completes text only at its end");
  for (size_t i = 0; i < COUNT(unsupported); i++) {
    const char *name = unsupported[i].name, *harmless = unsupported[i].harmless;
    const json_t *v = find(r, name);
    if (!v)
      continue;
    json_t *h = harmless ? mr_json_parse(harmless, strlen(harmless), NULL, NULL) : NULL;
    bool same = h && (json_equal(h, v) || (json_is_number(h) && json_is_number(v) &&
                                           json_number_value(h) == json_number_value(v)));
    json_decref(h);
    if (!same)
      return not_supported(r->why, name, "");
  }
  return true;
}

/* Values that only fit together. */
static bool check_together(const reader *r, const mr_params *p) {
  if (p->max_tokens >= 0 && p->min_tokens > p->max_tokens)
    return mr_row_error_set(r->why, "min_tokens", "invalid_value",
                            "min_tokens is %" PRId64 ", more than max_tokens, which is %" PRId64,
                            p->min_tokens, p->max_tokens);
  if (p->echo && (r->shape == MR_SHAPE_CHAT || r->shape == MR_SHAPE_PLAIN_CHAT))
    return not_supported(r->why, "echo", " for chats");
  return true;
}

bool mr_params_read(mr_params *p, const json_t *body, const json_t *defaults, mr_shape shape,
                    int n_vocab, mr_row_error *why) {
  const reader r = {body, defaults, shape, n_vocab, why};
  *p = (mr_params){0};
  return read_scalars(&r, p) && read_max_tokens(&r, p) && read_seed(&r, p) &&
         read_logprobs(&r, p) && read_stop(&r, p) && read_stop_ids(&r, p) && read_bias(&r, p) &&
         check_best_of(&r, p) && check_response_format(&r) && read_tools(&r, p) &&
         read_chat_values(&r, p) && check_unsupported(&r) && check_together(&r, p);
}

/* ------------------------------------------------------------------ writing */

static void key(mr_text *t, const char *name, bool *first) {
  if (!*first)
    mr_text_addc(t, ',');
  *first = false;
  mr_json_add_string(t, name, strlen(name));
  mr_text_addc(t, ':');
}

static void write_scalar(const scalar *s, const mr_params *p, mr_text *t, bool *first) {
  const void *at = (const char *)p + s->at;
  if (s->type == T_BOOL && *(const bool *)at != (s->otherwise > 0)) {
    key(t, s->name, first);
    mr_text_adds(t, *(const bool *)at ? "true" : "false");
  } else if (s->type == T_INT && *(const int64_t *)at != (int64_t)s->otherwise) {
    key(t, s->name, first);
    mr_json_add_int(t, *(const int64_t *)at);
  } else if (s->type == T_REAL && *(const double *)at != s->otherwise) {
    key(t, s->name, first);
    mr_json_add_real(t, *(const double *)at);
  }
}

void mr_params_write(const mr_params *p, mr_text *t) {
  bool first = true;
  mr_text_addc(t, '{');
  for (size_t i = 0; i < N_SCALARS; i++)
    if (scalars[i].at != AT(stream) && scalars[i].at != AT(add_generation_prompt))
      write_scalar(&scalars[i], p, t, &first);
  if (p->has_seed) {
    key(t, "seed", &first);
    mr_json_add_int(t, p->seed);
  }
  if (p->logprobs >= 0) {
    key(t, "logprobs", &first);
    mr_json_add_int(t, p->logprobs);
  }
  const struct {
    const char *name;
    const json_t *v;
  } values[] = {
      {"stop", p->stop}, {"stop_token_ids", p->stop_token_ids}, {"logit_bias", p->logit_bias}};
  for (size_t i = 0; i < COUNT(values); i++)
    if (values[i].v) {
      key(t, values[i].name, &first);
      mr_json_add(t, values[i].v);
    }
  mr_text_addc(t, '}');
}

/* ------------------------------------------------------------------ names */

static bool belongs(const char *name, mr_shape shape) {
  static const char *const completion[] = {"echo", "best_of", "suffix"};
  static const char *const chat[] = {"top_logprobs",         "tools",
                                     "tool_choice",          "add_generation_prompt",
                                     "chat_template_kwargs", "documents"};
  if (shape == MR_SHAPE_COMPLETION)
    return !is_one_of(name, chat, COUNT(chat));
  return shape != MR_SHAPE_CHAT || !is_one_of(name, completion, COUNT(completion));
}

static const char *nearest(const char *word) {
  const char *names[N_SCALARS + COUNT(special)];
  size_t n = 0;
  for (size_t i = 0; i < N_SCALARS; i++)
    names[n++] = scalars[i].name;
  for (size_t i = 0; i < COUNT(special); i++)
    names[n++] = special[i];
  return mr_nearest(word, names, n);
}

static bool unknown(const char *name, mr_row_error *why) {
  const char *near = nearest(name);
  return mr_row_error_set(why, name, "unknown_parameter", "unknown parameter %.80s%s%s%s", name,
                          near ? "; did you mean " : "", near ? near : "", near ? "?" : "");
}

bool mr_params_check_names(const json_t *body, mr_shape shape, mr_row_error *why) {
  const char *content = shape == MR_SHAPE_CHAT ? "messages" : "prompt";
  const char *other = shape == MR_SHAPE_CHAT ? "prompt" : "messages";
  const char *name;
  json_t *v;
  json_object_foreach((json_t *)(uintptr_t)body, name, v) {
    if (!strcmp(name, content) || json_is_null(v))
      continue;
    bool known = mr_params_is_known(name);
    if ((known && !belongs(name, shape)) || !strcmp(name, other))
      return mr_row_error_set(why, name, "unknown_parameter", "%s does not belong to %s", name,
                              shape == MR_SHAPE_CHAT ? "/v1/chat/completions" : "/v1/completions");
    if (!known)
      return unknown(name, why);
  }
  return true;
}

bool mr_params_check_defaults(const json_t *defaults, mr_row_error *why) {
  const char *name;
  json_t *v;
  json_object_foreach((json_t *)(uintptr_t)defaults, name, v) {
    if (!mr_params_is_known(name))
      return unknown(name, why);
  }
  mr_params p;
  return mr_params_read(&p, defaults, NULL, MR_SHAPE_PLAIN_TEXT, 0, why);
}
