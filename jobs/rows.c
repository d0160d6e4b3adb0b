#include "jobs/rows.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "io/hash.h"
#include "io/json.h"
#include "io/mem.h"
#include "jobs/messages.h"

#define MAX_CHOICES 1024

typedef struct row { /* one line on its way into a record */
  const mr_job *j;
  const mr_prompter *p;
  double now;
  int context;
  const mr_row_source *src;
  json_t *root;       /* the line */
  const json_t *body; /* in root: where the parameters stand */
  mr_row_kind kind;
  mr_shape shape;
  const char *id; /* borrowed from root or id_buf; NULL: none */
  size_t id_len;
  bool id_is_number;
  char id_buf[64];
  mr_params par;
  mr_ids prompt, cont;
  int *cont_len;      /* n_cont */
  size_t *cont_bytes; /* n_cont: of the text, or of the ids where it is ids */
  int n_cont;
  bool has_choices;
  json_t *warnings; /* or NULL */
  mr_row_error why;
  mr_code fatal; /* not the row's fault */
  mr_err *err;
} row;

static bool no_memory(row *r) {
  r->fatal = mr_err_set(r->err, MR_E_NOMEM, "out of memory for a row");
  return false;
}

/* A row's own fault, told by a lower layer; anything else ends the job. */
static bool blame(row *r, const mr_err *e, const char *param) {
  if (e->code == MR_E_DATA)
    return mr_row_error_set(&r->why, param, "invalid_value", "%s: %s", param, e->text);
  if (r->err && r->err->code == MR_OK)
    *r->err = *e;
  r->fatal = e->code;
  return false;
}

static bool warn(row *r, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

static bool warn(row *r, const char *fmt, ...) {
  char text[256];
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(text, sizeof text, fmt, ap);
  va_end(ap);
  if (!r->warnings)
    r->warnings = json_array();
  json_t *s = json_stringn(text, mr_utf8_whole(text, strlen(text)));
  return json_array_append_new(r->warnings, s) == 0 || no_memory(r); /* takes s, come what may */
}

/* ------------------------------------------------------------------ what the line is */

static const char *type_name(const json_t *v) {
  static const char *const names[] = {"an object", "an array", "a string", "a number",
                                      "a number",  "true",     "false",    "null"};
  return v ? names[json_typeof(v)] : "missing";
}

/* A number that did not fit: reads the line again with a wide net, to name the parameter. */
static bool too_big(row *r, const char *line, size_t len, const mr_err *e) {
  r->root = mr_json_parse_lossy(line, len);
  const json_t *id = json_object_get(r->root, "custom_id");
  if (!id)
    id = json_object_get(r->root, "id");
  if (json_is_string(id)) {
    r->id = json_string_value(id);
    r->id_len = json_string_length(id);
  }
  const json_t *body = json_object_get(r->root, "body");
  mr_params unused;
  if (r->root &&
      !mr_params_read(&unused, body ? body : r->root, NULL, MR_SHAPE_PLAIN_TEXT, 0, &r->why))
    return false;
  return mr_row_error_set(&r->why, NULL, "invalid_json", "%s (a number beyond 64 bits)", e->text);
}

static bool parse_line(row *r, const char *line, size_t len) {
  mr_err e = MR_ERR_INIT;
  bool big;
  r->root = mr_json_parse(line, len, &big, &e);
  if (r->root)
    return json_is_object(r->root) ||
           mr_row_error_set(&r->why, NULL, "invalid_row", "the line is %s; a row is a JSON object",
                            type_name(r->root));
  if (big)
    return too_big(r, line, len, &e);
  if (e.code == MR_E_DATA)
    return mr_row_error_set(&r->why, NULL, "invalid_json", "%s", e.text);
  return blame(r, &e, "row");
}

static json_t *field(const json_t *o, const char *name) {
  json_t *v = json_object_get(o, name);
  return json_is_null(v) ? NULL : v;
}

static bool read_custom_id(row *r) {
  const json_t *v = json_object_get(r->root, "custom_id");
  if (!json_is_string(v))
    return mr_row_error_set(&r->why, "custom_id", "invalid_value",
                            "custom_id is %s; it must be a text", type_name(v));
  r->id = json_string_value(v);
  r->id_len = json_string_length(v);
  if (r->id_len)
    return true;
  r->id = NULL;
  return mr_row_error_set(&r->why, "custom_id", "invalid_value", "custom_id is empty");
}

static bool read_endpoint(row *r) {
  const json_t *method = json_object_get(r->root, "method"), *url = json_object_get(r->root, "url");
  const char *m = json_string_value(method), *u = json_string_value(url);
  if (!m || strcmp(m, "POST"))
    return mr_row_error_set(&r->why, "method", "invalid_value",
                            "method is %s%.20s; it must be POST", m ? "" : type_name(method),
                            m ? m : "");
  if (u && !strcmp(u, "/v1/chat/completions")) {
    r->kind = MR_ROW_BATCH_CHAT;
    r->shape = MR_SHAPE_CHAT;
  } else if (u && !strcmp(u, "/v1/completions")) {
    r->kind = MR_ROW_BATCH_COMPLETION;
    r->shape = MR_SHAPE_COMPLETION;
  } else {
    return mr_row_error_set(&r->why, "url", "invalid_url",
                            "url is %s%.80s; it must be /v1/chat/completions or /v1/completions",
                            u ? "" : type_name(url), u ? u : "");
  }
  return true;
}

static bool read_batch(row *r) {
  static const char *const known[] = {"custom_id", "method", "url", "body"};
  if (!read_custom_id(r) || !read_endpoint(r))
    return false;
  r->body = json_object_get(r->root, "body");
  if (!json_is_object(r->body))
    return mr_row_error_set(&r->why, "body", r->body ? "invalid_value" : "missing_parameter",
                            "body is %s; it must be an object", type_name(r->body));
  const char *name;
  json_t *v;
  json_object_foreach(r->root, name, v) {
    bool ours = false;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
      ours = ours || !strcmp(name, known[i]);
    if (!ours && !warn(r, "the field %.80s beside body is ignored", name))
      return false;
  }
  return mr_params_check_names(r->body, r->shape, &r->why);
}

static bool read_plain_id(row *r) {
  const json_t *v = field(r->root, "id");
  if (json_is_string(v) && json_string_length(v)) {
    r->id = json_string_value(v);
    r->id_len = json_string_length(v);
    return true;
  }
  if (v && !json_is_integer(v))
    return mr_row_error_set(&r->why, "id", "invalid_value",
                            "id is %s; it must be a text that is not empty, or a whole number",
                            json_is_string(v) ? "empty" : type_name(v));
  r->id_is_number = v != NULL;
  if (v)
    snprintf(r->id_buf, sizeof r->id_buf, "%" JSON_INTEGER_FORMAT, json_integer_value(v));
  else if (r->src->file_index == 0)
    snprintf(r->id_buf, sizeof r->id_buf, "row-%" PRIu64, r->src->line);
  else
    snprintf(r->id_buf, sizeof r->id_buf, "file-%" PRIu32 "-row-%" PRIu64, r->src->file_index + 1,
             r->src->line);
  r->id = r->id_buf;
  r->id_len = strlen(r->id_buf);
  return true;
}

static bool read_plain(row *r) {
  bool prompt = field(r->root, "prompt"), chat = field(r->root, "messages");
  const json_t *cont = field(r->root, "continuation"), *choices = field(r->root, "choices");
  if (!read_plain_id(r))
    return false;
  if (prompt && chat)
    return mr_row_error_set(&r->why, "messages", "invalid_value",
                            "give prompt or messages, not both");
  if (cont && choices)
    return mr_row_error_set(&r->why, "choices", "invalid_value",
                            "give continuation or choices, not both");
  r->body = r->root;
  r->kind = cont || choices ? MR_ROW_SCORE : MR_ROW_PLAIN;
  r->has_choices = choices != NULL;
  r->shape = chat ? MR_SHAPE_PLAIN_CHAT : MR_SHAPE_PLAIN_TEXT;
  return true;
}

/* Which of the three kinds it is, by what it holds. */
static bool read_kind(row *r) {
  static const char *const batch[] = {"custom_id", "method", "url", "body"};
  if (json_object_get(r->root, "prompt") || json_object_get(r->root, "messages"))
    return read_plain(r);
  for (size_t i = 0; i < sizeof batch / sizeof *batch; i++)
    if (json_object_get(r->root, batch[i]))
      return read_batch(r);
  return mr_row_error_set(&r->why, NULL, "invalid_row",
                          "a row needs custom_id, method, url and body, or a prompt, or messages");
}

/* ------------------------------------------------------------------ tokens */

static bool push_ids(row *r, const json_t *list, mr_ids *to, const char *param) {
  int32_t n_vocab = mr_prompter_vocab_size(r->p);
  for (size_t i = 0; i < json_array_size(list); i++) {
    const json_t *v = json_array_get(list, i);
    if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) >= n_vocab)
      return mr_row_error_set(
          &r->why, param, "invalid_value",
          "%s[%zu] is %s; a token id of this model is a whole number from 0 to %d", param, i,
          json_is_integer(v) ? "out of range" : type_name(v), n_vocab - 1);
    if (!mr_ids_push(to, (int32_t)json_integer_value(v)))
      return no_memory(r);
  }
  return true;
}

static bool push_text(row *r, const json_t *text, mr_ids *to, const char *param, bool continues) {
  mr_err e = MR_ERR_INIT;
  const char *s = json_string_value(text);
  size_t n = json_string_length(text);
  if (!mr_prompter_vocab(r->p))
    return mr_row_error_set(&r->why, param, "invalid_value",
                            "the model has no tokenizer: give %s as token ids", param);
  mr_code rc = continues ? mr_prompter_continuation(r->p, s, n, to, &e)
                         : mr_prompter_text(r->p, s, n, to, &e);
  return rc == MR_OK || blame(r, &e, param);
}

/* A text or a list of token ids. */
static bool push_either(row *r, const json_t *v, mr_ids *to, const char *param, bool continues) {
  if (json_is_string(v))
    return push_text(r, v, to, param, continues);
  if (json_is_array(v) && json_array_size(v))
    return push_ids(r, v, to, param);
  return mr_row_error_set(&r->why, param, "invalid_value",
                          "%s is %s; it must be a text or a list of token ids", param,
                          json_is_array(v) ? "an empty list" : type_name(v));
}

/* The prompt itself: a list of one prompt counts as that prompt. */
static const json_t *single(const json_t *v) {
  const json_t *first = json_array_get(v, 0);
  return json_array_size(v) == 1 && !json_is_number(first) ? first : v;
}

static bool read_prompt(row *r) {
  const json_t *v = field(r->body, "prompt");
  if (!v)
    return mr_row_error_set(&r->why, "prompt", "missing_parameter", "prompt is missing");
  v = single(v);
  if (json_is_array(v) && json_array_size(v) > 1 && !json_is_number(json_array_get(v, 0)))
    return mr_row_error_set(&r->why, "prompt", "unsupported_value",
                            "prompt is a list of %zu prompts; give each a row of its own",
                            json_array_size(v));
  return push_either(r, v, &r->prompt, "prompt", false);
}

static bool read_chat(row *r) {
  json_t *messages = mr_messages_read(json_object_get(r->body, "messages"), &r->why);
  if (!messages)
    return r->why.code[0] ? false : no_memory(r);
  const mr_chat chat = {.messages = messages,
                        .tools = r->par.tools,
                        .documents = r->par.documents,
                        .kwargs = r->par.chat_template_kwargs,
                        .add_generation_prompt = r->par.add_generation_prompt,
                        .now = r->now};
  mr_err e = MR_ERR_INIT;
  mr_code rc = mr_prompter_chat(r->p, &chat, &r->prompt, &e);
  json_decref(messages);
  return rc == MR_OK || blame(r, &e, "messages");
}

static bool push_continuation(row *r, const json_t *v, int i, const char *param) {
  size_t before = r->cont.n;
  if (!push_either(r, v, &r->cont, param, true))
    return false;
  size_t n = r->cont.n - before;
  if (!n)
    return mr_row_error_set(&r->why, param, "invalid_value", "%s %d is empty", param, i);
  r->cont_len[i] = (int)n;
  r->cont_bytes[i] = json_is_string(v) ? json_string_length(v) : n;
  return true;
}

static bool read_continuations(row *r) {
  const char *param = r->has_choices ? "choices" : "continuation";
  const json_t *v = json_object_get(r->root, param);
  size_t n = r->has_choices ? json_array_size(v) : 1;
  if (r->has_choices && (!json_is_array(v) || !n || n > MAX_CHOICES))
    return mr_row_error_set(&r->why, param, "invalid_value",
                            "choices must be a list of 1 to %d texts", MAX_CHOICES);
  r->n_cont = (int)n;
  r->cont_len = mr_mem_alloc(n, sizeof *r->cont_len);
  r->cont_bytes = mr_mem_alloc(n, sizeof *r->cont_bytes);
  if (!r->cont_len || !r->cont_bytes)
    return no_memory(r);
  for (size_t i = 0; i < n; i++)
    if (!push_continuation(r, r->has_choices ? json_array_get(v, i) : v, (int)i, param))
      return false;
  return true;
}

static bool read_tokens(row *r) {
  bool chat = r->shape == MR_SHAPE_CHAT || r->shape == MR_SHAPE_PLAIN_CHAT;
  if (!(chat ? read_chat(r) : read_prompt(r)))
    return false;
  if (!r->prompt.n)
    return mr_row_error_set(&r->why, chat ? "messages" : "prompt", "invalid_value",
                            "the prompt has no tokens");
  return r->kind != MR_ROW_SCORE || read_continuations(r);
}

/* ------------------------------------------------------------------ the context's limit */

/* Tokens that must fit behind the prompt. */
static int64_t room_needed(const row *r) {
  int64_t need = 1;
  for (int i = 0; i < r->n_cont; i++)
    need = r->cont_len[i] > need ? r->cont_len[i] : need;
  return need;
}

/* Cuts the prompt's beginning so that `keep` tokens stay; a BOS in front stays in front. */
static bool truncate_left(row *r, size_t keep) {
  const mr_vocab *v = mr_prompter_vocab(r->p);
  size_t n = r->prompt.n, cut = n - keep;
  bool bos = v && mr_vocab_adds_bos(v) && r->prompt.ids[0] == mr_vocab_bos(v) && keep > 1;
  size_t from = bos ? cut + 1 : cut, to = bos ? 1 : 0;
  memmove(r->prompt.ids + to, r->prompt.ids + from, (n - from) * sizeof *r->prompt.ids);
  r->prompt.n = keep;
  return warn(r, "the prompt of %zu tokens was cut at its beginning to %zu", n, keep);
}

static bool fit_prompt(row *r) {
  int64_t need = room_needed(r), n = (int64_t)r->prompt.n;
  if (n + need <= r->context)
    return true;
  if (r->j->long_prompt == MR_LONG_TRUNCATE_LEFT && need < r->context) {
    int64_t want = r->par.max_tokens < 0 ? r->context : r->par.max_tokens;
    if (r->kind != MR_ROW_SCORE)
      need = want > r->context / 2 ? r->context / 2 : want;
    need = need < 1 ? 1 : need;
    return need < r->context ? truncate_left(r, (size_t)(r->context - need)) : true;
  }
  return mr_row_error_set(
      &r->why, r->shape == MR_SHAPE_CHAT || r->shape == MR_SHAPE_PLAIN_CHAT ? "messages" : "prompt",
      "context_length_exceeded",
      "the prompt has %" PRId64 " tokens and needs room for %" PRId64
      " more; the context is %d tokens, %" PRId64 " too few",
      n, need, r->context, n + need - r->context);
}

static bool clamp_max_tokens(row *r) {
  int64_t left = r->context - (int64_t)r->prompt.n;
  if (r->par.max_tokens > left && !warn(r,
                                        "max_tokens is %" PRId64 "; clamped to %" PRId64
                                        ", what the context of %d tokens leaves",
                                        r->par.max_tokens, left, r->context))
    return false;
  if (r->par.max_tokens < 0 || r->par.max_tokens > left)
    r->par.max_tokens = left;
  if (r->par.min_tokens > r->par.max_tokens)
    r->par.min_tokens = r->par.max_tokens;
  return true;
}

static bool check_lengths(row *r) {
  if (!fit_prompt(r))
    return false;
  return r->kind == MR_ROW_SCORE || clamp_max_tokens(r);
}

/* ------------------------------------------------------------------ the record */

static void add_key(mr_text *t, const char *name) {
  if (t->len > 1)
    mr_text_addc(t, ',');
  mr_json_add_string(t, name, strlen(name));
  mr_text_addc(t, ':');
}

static void add_text(mr_text *t, const char *name, const char *s, size_t len) {
  add_key(t, name);
  mr_json_add_string(t, s, len);
}

static void add_value(mr_text *t, const char *name, const json_t *v) {
  add_key(t, name);
  mr_json_add(t, v);
}

/* Names that a result has of its own: an input's field of that name gives way. */
static bool is_ours(const row *r, const char *name) {
  static const char *const generate[] = {
      "output",           "finish_reason",         "token_ids",
      "prompt_token_ids", "prompt_token_logprobs", "prompt_top_logprobs"};
  static const char *const score[] = {"logprob",         "token_logprobs",  "is_greedy",
                                      "choice_logprobs", "choice_tokens",   "best",
                                      "best_normalized", "prompt_token_ids"};
  const char *const *names = r->kind == MR_ROW_SCORE ? score : generate;
  size_t n =
      r->kind == MR_ROW_SCORE ? sizeof score / sizeof *score : sizeof generate / sizeof *generate;
  for (size_t i = 0; i < n; i++)
    if (!strcmp(name, names[i]))
      return true;
  return !strcmp(name, "usage") || !strcmp(name, "warnings");
}

/* True if a plain row's field comes back in its result. */
static bool passes(const row *r, const char *name) {
  static const char *const content[] = {"id", "prompt", "messages"};
  for (size_t i = 0; i < sizeof content / sizeof *content; i++)
    if (!strcmp(name, content[i]))
      return false;
  if (r->kind == MR_ROW_SCORE && (!strcmp(name, "continuation") || !strcmp(name, "choices")))
    return false;
  return !mr_params_is_known(name) || mr_params_is_ignored(name);
}

static bool add_fields(row *r, mr_text *t) {
  const char *name;
  json_t *v;
  bool any = false;
  json_object_foreach(r->root, name, v) {
    if (!passes(r, name))
      continue;
    if (is_ours(r, name)) {
      if (!warn(r, "the input's field %s gives way to the result's own", name))
        return false;
      continue;
    }
    if (!any)
      add_key(t, "fields");
    mr_text_addc(t, any ? ',' : '{');
    any = true;
    mr_json_add_string(t, name, strlen(name));
    mr_text_addc(t, ':');
    mr_json_add(t, v);
  }
  if (any)
    mr_text_addc(t, '}');
  return true;
}

/* What of the prompt the result needs again. */
static void add_prompt(const row *r, mr_text *t) {
  const json_t *prompt = json_object_get(r->body, "prompt");
  if (r->par.echo && json_is_string(single(prompt)))
    add_value(t, "echo", single(prompt));
  if (!r->j->keep_prompt || r->body != r->root)
    return;
  const char *const names[] = {"prompt", "messages", "continuation", "choices"};
  bool any = false;
  for (size_t i = 0; i < (r->kind == MR_ROW_SCORE ? 4u : 2u); i++) {
    const json_t *v = field(r->root, names[i]);
    if (!v)
      continue;
    if (!any)
      add_key(t, "kept");
    mr_text_addc(t, any ? ',' : '{');
    any = true;
    mr_json_add_string(t, names[i], strlen(names[i]));
    mr_text_addc(t, ':');
    mr_json_add(t, v);
  }
  if (any)
    mr_text_addc(t, '}');
}

static bool encode(row *r, mr_text *t) {
  mr_text_addc(t, '{');
  add_text(t, "id", r->id, r->id_len);
  if (r->id_is_number) {
    add_key(t, "id_is_number");
    mr_text_adds(t, "true");
  }
  if (r->par.model)
    add_value(t, "model", r->par.model);
  add_key(t, "params");
  mr_params_write(&r->par, t);
  add_prompt(r, t);
  if (r->body == r->root && !add_fields(r, t))
    return false;
  if (r->has_choices) {
    add_key(t, "choice_bytes");
    for (int i = 0; i < r->n_cont; i++)
      mr_text_addf(t, "%c%zu", i ? ',' : '[', r->cont_bytes[i]);
    mr_text_addc(t, ']');
  }
  if (r->warnings)
    add_value(t, "warnings", r->warnings);
  mr_text_addc(t, '}');
  return true;
}

static int32_t saturate(int64_t v) {
  return v > INT32_MAX ? INT32_MAX : (int32_t)v;
}

static int32_t out_tokens(const row *r) {
  if (r->kind == MR_ROW_SCORE)
    return saturate((int64_t)r->cont.n);
  return saturate(r->par.max_tokens * r->par.n);
}

/* A row of an adapter names it as its model; any other name means the base. */
static bool choose_adapter(row *r, uint32_t *adapter) {
  const char *name = json_string_value(r->par.model);
  *adapter = (uint32_t)mr_job_adapter(r->j, name);
  if (*adapter || !name || !r->j->n_adapters || !strcmp(name, mr_prompter_name(r->p)))
    return true;
  return warn(r, "the model %.100s is none of the adapters; the base answered", name);
}

static void fill_entry(mr_plan_record *rec, const mr_row_source *src, mr_row_kind kind,
                       size_t n_prompt, int32_t n_out) {
  rec->e = (mr_plan_entry){.file = src->file_index,
                           .line = src->line,
                           .n_prompt = saturate((int64_t)n_prompt),
                           .n_out = n_out,
                           .kind = kind};
}

/* Moves the row's parts into the record. */
static bool finish(row *r, mr_plan_record *rec) {
  mr_text t = {0};
  if (r->prompt.n > INT32_MAX || r->cont.n > INT32_MAX)
    return mr_row_error_set(&r->why, NULL, "invalid_value",
                            "the row has more than 2147483647 tokens");
  uint32_t adapter;
  if (!choose_adapter(r, &adapter) || !encode(r, &t) || t.failed) {
    mr_text_free(&t);
    return r->fatal != MR_OK ? false : no_memory(r);
  }
  fill_entry(rec, r->src, r->kind, r->prompt.n, out_tokens(r));
  rec->e.adapter = adapter;
  rec->json = t.data;
  rec->json_len = t.len;
  rec->prompt = r->prompt.ids;
  rec->cont = r->cont.ids;
  rec->cont_len = r->cont_len;
  rec->n_cont = r->n_cont;
  r->prompt = r->cont = (mr_ids){0};
  r->cont_len = NULL;
  return true;
}

static void add_or_null(mr_text *t, const char *name, const char *s) {
  if (*s) {
    add_text(t, name, s, strlen(s));
  } else {
    add_key(t, name);
    mr_text_adds(t, "null");
  }
}

static mr_code make_bad(const mr_row_source *src, const char *id, size_t id_len,
                        const mr_row_error *why, mr_plan_record *rec, mr_err *err) {
  mr_text t = {0}, e = {0};
  mr_text_addc(&e, '{');
  add_text(&e, "message", why->message, strlen(why->message));
  add_or_null(&e, "type", why->type);
  add_or_null(&e, "param", why->param);
  add_or_null(&e, "code", why->code);
  mr_text_addc(&e, '}');
  mr_text_addc(&t, '{');
  if (id)
    add_text(&t, "id", id, id_len);
  add_key(&t, "error");
  mr_text_add(&t, e.data, e.len);
  mr_text_addc(&t, '}');
  bool failed = t.failed || e.failed;
  mr_text_free(&e);
  if (failed) {
    mr_text_free(&t);
    return mr_err_set(err, MR_E_NOMEM, "out of memory for a row");
  }
  fill_entry(rec, src, MR_ROW_BAD, 0, 0);
  rec->json = t.data;
  rec->json_len = t.len;
  return MR_OK;
}

mr_code mr_row_bad(const mr_row_source *src, const char *custom_id, const mr_row_error *why,
                   mr_plan_record *rec, mr_err *err) {
  *rec = (mr_plan_record){0};
  return make_bad(src, custom_id, custom_id ? strlen(custom_id) : 0, why, rec, err);
}

/* ------------------------------------------------------------------ a line */

static bool parse(row *r, const char *line, size_t len) {
  if (!parse_line(r, line, len) || !read_kind(r))
    return false;
  if (!mr_params_read(&r->par, r->body, r->j->defaults, r->shape, mr_prompter_vocab_size(r->p),
                      &r->why))
    return false;
  if (r->par.stream && !warn(r, "stream is ignored: the result is one line"))
    return false;
  return read_tokens(r) && check_lengths(r);
}

static void free_row(row *r) {
  json_decref(r->root);
  json_decref(r->warnings);
  mr_ids_free(&r->prompt);
  mr_ids_free(&r->cont);
  mr_mem_free(r->cont_len);
  mr_mem_free(r->cont_bytes);
}

mr_code mr_row_parse(const mr_job *j, const mr_prompter *p, double now, int max_context,
                     const mr_row_source *src, const char *line, size_t len, mr_plan_record *rec,
                     mr_err *err) {
  row r = {.j = j, .p = p, .now = now, .src = src, .err = err};
  r.context = max_context > 0 ? max_context : mr_prompter_context(p);
  *rec = (mr_plan_record){0};
  mr_json_ran_out(); /* before this row */
  bool ok = parse(&r, line, len) && finish(&r, rec);
  if (mr_json_ran_out() && r.fatal == MR_OK)
    no_memory(&r);
  mr_code rc = r.fatal;
  if (!ok && rc == MR_OK)
    rc = make_bad(src, r.id, r.id_len, &r.why, rec, err);
  if (rc != MR_OK)
    mr_plan_record_free(rec);
  else if (r.id)
    rec->id_hash = mr_hash_64(r.id, r.id_len);
  free_row(&r);
  return rc;
}

const char *mr_row_id(const json_t *record, size_t *len) {
  const json_t *v = json_object_get(record, "id");
  *len = json_string_length(v);
  return json_string_value(v);
}
