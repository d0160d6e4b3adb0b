#include "jobs/score_line.h"

#include <string.h>

/* The i-th choice of an API's body. */
static const json_t *choice(const mr_score_line *l, int i) {
  return json_array_get(json_object_get(l->body, "choices"), (size_t)i);
}

static bool is_api(const mr_score_line *l) {
  return l->body != l->object;
}

/* The text of a choice: NULL if it has none. Content that is null (a tool call) is an empty answer.
 */
static const json_t *choice_text(const json_t *c) {
  const json_t *message = json_object_get(c, "message");
  return json_is_object(message) ? json_object_get(message, "content") : json_object_get(c, "text");
}

static int count_outputs(const mr_score_line *l) {
  size_t n = 0;
  if (is_api(l)) {
    n = json_array_size(json_object_get(l->body, "choices"));
    n = n && !choice_text(choice(l, 0)) ? 0 : n;
  } else {
    const json_t *output = json_object_get(l->object, "output");
    n = json_is_string(output) ? 1 : json_array_size(output);
  }
  return n > MR_SCORE_OUTPUTS_MAX ? MR_SCORE_OUTPUTS_MAX : (int)n;
}

/* Whether the results are fields of the line itself; fields of its input that are named response
 * or error may then stand beside them. */
static bool is_flat(const json_t *o) {
  static const char *const names[] = {"output", "usage", "logprob", "best"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (json_object_get(o, names[i]))
      return true;
  return false;
}

/* A status outside of 200 to 299, or an error. A flat result has neither. */
static bool has_failed(const json_t *o) {
  const json_t *error = json_object_get(o, "error"), *response = json_object_get(o, "response");
  const json_t *status = json_object_get(response, "status_code");
  if (!response)
    return json_is_object(error);
  return (error && !json_is_null(error)) || !json_is_object(response) ||
         (json_is_integer(status) &&
          (json_integer_value(status) < 200 || json_integer_value(status) > 299));
}

bool mr_score_line_read(mr_score_line *l, const json_t *object) {
  *l = (mr_score_line){.object = object, .body = object};
  if (!json_is_object(object))
    return false;
  bool flat = is_flat(object);
  const json_t *body = json_object_get(json_object_get(object, "response"), "body");
  const json_t *id = json_object_get(object, "custom_id");
  id = id ? id : json_object_get(object, "id");
  l->id = json_is_string(id) || json_is_integer(id) ? id : NULL;
  l->failed = !flat && has_failed(object);
  if (!flat && json_is_object(body))
    l->body = body;
  l->n_outputs = l->failed ? 0 : count_outputs(l);
  return true;
}

static mr_str text_of(const json_t *v) {
  return json_is_string(v) ? (mr_str){json_string_value(v), json_string_length(v)}
                           : (mr_str){"", 0};
}

mr_str mr_score_line_output(const mr_score_line *l, int i) {
  if (is_api(l))
    return text_of(choice_text(choice(l, i)));
  const json_t *output = json_object_get(l->object, "output");
  return text_of(json_is_array(output) ? json_array_get(output, (size_t)i) : output);
}

int mr_score_line_best(const mr_score_line *l, bool by_bytes) {
  const json_t *v = json_object_get(l->object, by_bytes ? "best_normalized" : "best");
  json_int_t i = json_integer_value(v);
  return json_is_integer(v) && i >= 0 && i <= INT32_MAX ? (int)i : -1;
}

/* ------------------------------------------------------------------ log-probabilities */

typedef struct sums {
  double sum, tokens;
  size_t seen; /* values, null or not */
  bool broken; /* a token without probability */
  bool prompt; /* the first value was null: the prompt comes first */
} sums;

static void add(sums *s, const json_t *v) {
  if (json_is_number(v)) {
    s->sum += json_number_value(v);
    s->tokens++;
  } else if (s->seen) {
    s->broken = true;
  } else {
    s->prompt = true;
  }
  s->seen++;
}

static void add_list(sums *s, const json_t *list) {
  for (size_t i = 0; i < json_array_size(list); i++)
    add(s, json_array_get(list, i));
}

/* One logprobs object, of a chat or of a completion. */
static void add_object(sums *s, const json_t *o) {
  const json_t *content = json_object_get(o, "content");
  for (size_t i = 0; i < json_array_size(content); i++)
    add(s, json_object_get(json_array_get(content, i), "logprob"));
  add_list(s, json_object_get(o, "token_logprobs"));
}

static const json_t *logprobs_of(const mr_score_line *l, int i) {
  if (is_api(l))
    return json_object_get(choice(l, i), "logprobs");
  const json_t *v = json_object_get(l->object, "logprobs");
  return json_is_array(v) ? json_array_get(v, (size_t)i) : v;
}

static bool add_outputs(const mr_score_line *l, double *sum, double *tokens, double *bytes) {
  bool ok = true, whole = true;
  for (int i = 0; ok && i < l->n_outputs; i++) {
    sums s = {0};
    add_object(&s, logprobs_of(l, i));
    ok = !s.broken && s.seen > 0;
    whole = whole && !s.prompt;
    *sum += s.sum;
    *tokens += s.tokens;
    *bytes += (double)mr_score_line_output(l, i).len;
  }
  if (!whole) /* with echo the text is not that of the tokens that have a value */
    *bytes = 0;
  return ok && *tokens > 0;
}

static bool add_scored(const mr_score_line *l, const char *name, const char *text, double *sum,
                       double *tokens, double *bytes) {
  sums s = {0};
  add_list(&s, json_object_get(l->object, name));
  *sum = s.sum;
  *tokens = s.tokens;
  *bytes = s.prompt ? 0 : (double)text_of(json_object_get(l->object, text)).len;
  return !s.broken && s.tokens > 0;
}

bool mr_score_line_logprobs(const mr_score_line *l, double *sum, double *tokens, double *bytes) {
  *sum = *tokens = *bytes = 0;
  if (l->failed)
    return false;
  if (l->n_outputs && logprobs_of(l, 0) && !json_is_null(logprobs_of(l, 0)))
    return add_outputs(l, sum, tokens, bytes);
  if (json_object_get(l->object, "token_logprobs"))
    return add_scored(l, "token_logprobs", "continuation", sum, tokens, bytes);
  return add_scored(l, "prompt_token_logprobs", "prompt", sum, tokens, bytes);
}
