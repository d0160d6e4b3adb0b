#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "io/json.h"
#include "io/mem.h"
#include "jobs/messages.h"

static mr_row_error why;

static json_t *json(const char *s) {
  json_t *v = mr_json_parse(s, strlen(s), NULL, NULL);
  if (!v)
    fail_msg("%s", s);
  return v;
}

/* `want` NULL: as it was. */
static void becomes(const char *s, const char *want) {
  json_t *v = json(s), *was = json_deep_copy(v);
  json_t *m = mr_messages_read(v, &why), *w = json(want ? want : s);
  if (!m)
    fail_msg("%s: %s", s, why.message);
  if (!json_equal(m, w))
    fail_msg("%s gave another value", s);
  assert_true(json_equal(v, was)); /* the row's own messages stay as they are */
  json_decref(v);
  json_decref(was);
  json_decref(m);
  json_decref(w);
}

static void refused(const char *s, const char *words) {
  json_t *v = s ? json(s) : NULL;
  why = (mr_row_error){0};
  assert_null(mr_messages_read(v, &why));
  if (!strstr(why.message, words))
    fail_msg("%s: %s", s, why.message);
  assert_string_equal(why.param, "messages");
  assert_string_equal(why.type, "invalid_request_error");
  json_decref(v);
}

static void as_they_are(void **state) {
  (void)state;
  becomes("[{\"role\":\"user\",\"content\":\"x\",\"name\":\"n\",\"extra\":[1]}]", NULL);
  becomes("[{\"role\":\"system\",\"content\":\"\"},{\"role\":\"developer\",\"content\":\"d\"},"
          "{\"role\":\"user\",\"content\":\"u\"},{\"role\":\"assistant\",\"content\":\"a\"},"
          "{\"role\":\"tool\",\"content\":\"t\",\"tool_call_id\":\"1\"},"
          "{\"role\":\"function\",\"content\":\"f\"}]",
          NULL);
}

static void parts(void **state) {
  (void)state;
  becomes("[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},\"b\","
          "{\"type\":\"text\",\"text\":\"c\\u0000\"}]}]",
          "[{\"role\":\"user\",\"content\":\"a\\nb\\nc\\u0000\"}]");
  refused("[{\"role\":\"user\",\"content\":[]}]", "messages[0].content is an empty list");
  refused("[{\"role\":\"user\",\"content\":\"x\"},{\"role\":\"user\",\"content\":["
          "{\"type\":\"text\",\"text\":\"a\"},{\"type\":\"image_url\",\"image_url\":{}}]}]",
          "messages[1].content[1] is image_url");
  assert_string_equal(why.code, "unsupported_content");
  refused("[{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}]", "has no text");
  refused("[{\"role\":\"user\",\"content\":[5]}]", "content[0] is not a part");
}

static void calls(void **state) {
  (void)state;
  becomes("[{\"role\":\"assistant\",\"tool_calls\":[{\"type\":\"function\",\"function\":"
          "{\"name\":\"f\",\"arguments\":\"{\\\"a\\\": [1]}\"}}]}]",
          "[{\"role\":\"assistant\",\"tool_calls\":[{\"type\":\"function\",\"function\":"
          "{\"name\":\"f\",\"arguments\":{\"a\":[1]}}}]}]");
  becomes("[{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"function\":"
          "{\"name\":\"f\",\"arguments\":\"not JSON\"}}]}]",
          NULL);
  becomes("[{\"role\":\"assistant\",\"content\":\"x\",\"tool_calls\":null}]", NULL);
  refused("[{\"role\":\"assistant\",\"content\":null}]", "messages[0].content is missing or null");
  refused("[{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[]}]", "content is missing");
  refused("[{\"role\":\"user\",\"tool_calls\":[{\"function\":{\"name\":\"f\"}}]}]",
          "content is missing");
  refused("[{\"role\":\"assistant\",\"tool_calls\":{}}]", "tool_calls is not a list");
  refused("[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{}}]}]", "not a call");
}

static void no_messages(void **state) {
  (void)state;
  refused(NULL, "missing");
  refused("null", "missing");
  assert_string_equal(why.code, "missing_parameter");
  refused("[]", "at least one message");
  refused("{}", "list of at least one");
  refused("[5]", "messages[0] is not an object");
  refused("[{\"content\":\"x\"}]", "role must be a text");
  refused("[{\"role\":\"root\",\"content\":\"x\"}]", "\"root\"; it must be one of system");
  refused("[{\"role\":\"user\"}]", "content is missing");
  refused("[{\"role\":\"user\",\"content\":5}]", "must be a text or a list of parts");
}

static void memory(void **state) {
  (void)state;
  json_t *v = json("[{\"role\":\"user\",\"content\":[\"a\",\"b\"]},{\"role\":\"assistant\","
                   "\"content\":\"c\"}]");
  int64_t live = mr_mem_live();
  json_t *m = NULL;
  int n = 0;
  for (; n < 200 && !m; n++) {
    why = (mr_row_error){0};
    mr_mem_fail_after(n);
    m = mr_messages_read(v, &why);
    mr_mem_fail_after(-1);
    if (!m) {
      assert_true(mr_json_ran_out() || strstr(why.message, "out of memory"));
      assert_int_equal(mr_mem_live(), live);
    }
  }
  assert_true(m && n > 3);
  json_decref(m);
  json_decref(v);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(as_they_are), cmocka_unit_test(parts),
                                     cmocka_unit_test(calls), cmocka_unit_test(no_messages),
                                     cmocka_unit_test(memory)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
