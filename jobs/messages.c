#include "jobs/messages.h"

#include <string.h>

#include "io/json.h"
#include "io/text.h"

static bool bad(mr_row_error *why, size_t i, const char *what) {
  return mr_row_error_set(why, "messages", "invalid_value", "messages[%zu]%s", i, what);
}

static bool is_role(const char *role) {
  static const char *const roles[] = {"system",    "developer", "user",
                                      "assistant", "tool",      "function"};
  for (size_t i = 0; role && i < sizeof roles / sizeof *roles; i++)
    if (!strcmp(role, roles[i]))
      return true;
  return false;
}

/* Text parts as one string; NULL if there is another kind of part. */
static json_t *join_parts(const json_t *parts, size_t i, mr_row_error *why) {
  mr_text t = {0};
  bool ok = json_array_size(parts) > 0 || bad(why, i, ".content is an empty list");
  for (size_t k = 0; k < json_array_size(parts) && ok; k++) {
    const json_t *part = json_array_get(parts, k);
    const char *type = json_string_value(json_object_get(part, "type"));
    const json_t *text = json_object_get(part, "text");
    if (k)
      mr_text_addc(&t, '\n');
    if (json_is_string(part))
      mr_text_add(&t, json_string_value(part), json_string_length(part));
    else if (type && !strcmp(type, "text") && json_is_string(text))
      mr_text_add(&t, json_string_value(text), json_string_length(text));
    else
      ok = mr_row_error_set(
          why, "messages", "unsupported_content",
          "messages[%zu].content[%zu] is %.40s%s; only parts of text are supported", i, k,
          type ? type : "not a part", type ? ", or has no text" : "");
  }
  json_t *v = ok && !t.failed ? json_stringn(t.data ? t.data : "", t.len) : NULL;
  if (ok && !v)
    mr_row_error_set(why, "messages", NULL, "out of memory for messages[%zu]", i);
  mr_text_free(&t);
  return v;
}

/* Arguments as the object that their text spells, where it does. */
static bool read_calls(json_t *calls, size_t i, mr_row_error *why) {
  if (!json_is_array(calls))
    return bad(why, i, ".tool_calls is not a list");
  for (size_t k = 0; k < json_array_size(calls); k++) {
    json_t *f = json_object_get(json_array_get(calls, k), "function");
    if (!json_is_object(f) || !json_is_string(json_object_get(f, "name")))
      return bad(why, i, ".tool_calls holds something that is not a call of a function");
    const json_t *args = json_object_get(f, "arguments");
    json_t *object = json_is_string(args)
                         ? mr_json_load(json_string_value(args), json_string_length(args))
                         : NULL;
    if (object)
      json_object_set_new(f, "arguments", object);
  }
  return true;
}

/* Checks the copy `m` of one message and brings it into form. */
static bool read_message(json_t *m, size_t i, mr_row_error *why) {
  if (!json_is_object(m))
    return bad(why, i, " is not an object with role and content");
  const json_t *role = json_object_get(m, "role"), *content = json_object_get(m, "content");
  if (!json_is_string(role))
    return bad(why, i, ".role must be a text");
  const char *name = json_string_value(role);
  if (!is_role(name))
    return mr_row_error_set(why, "messages", "invalid_value",
                            "messages[%zu].role is \"%.40s\"; it must be one of system, developer, "
                            "user, assistant, tool, function",
                            i, name);
  json_t *calls = json_object_get(m, "tool_calls");
  if (calls && !json_is_null(calls) && !read_calls(calls, i, why))
    return false;
  if (json_is_array(content)) {
    json_t *text = join_parts(content, i, why);
    return text && json_object_set_new(m, "content", text) == 0;
  }
  bool may_lack = !strcmp(name, "assistant") && json_array_size(calls) > 0;
  if (json_is_string(content) || (may_lack && (!content || json_is_null(content))))
    return true;
  return bad(why, i,
             content && !json_is_null(content) ? ".content must be a text or a list of parts"
                                               : ".content is missing or null");
}

json_t *mr_messages_read(const json_t *messages, mr_row_error *why) {
  if (!messages || json_is_null(messages)) {
    mr_row_error_set(why, "messages", "missing_parameter", "messages is missing");
    return NULL;
  }
  if (!json_is_array(messages) || !json_array_size(messages)) {
    mr_row_error_set(why, "messages", "invalid_value",
                     "messages must be a list of at least one message");
    return NULL;
  }
  json_t *copy = json_deep_copy(messages);
  if (!copy)
    mr_row_error_set(why, "messages", NULL, "out of memory for messages");
  for (size_t i = 0; copy && i < json_array_size(copy); i++)
    if (!read_message(json_array_get(copy, i), i, why)) {
      json_decref(copy);
      copy = NULL;
    }
  return copy;
}
