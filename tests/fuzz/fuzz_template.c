/* A template's source, a NUL, and its variables as JSON. */
#include "fuzz.h"
#include "io/json.h"
#include "src/template.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  const mr_template_limits limits = {.steps = 20000, .depth = 100, .output = 1 << 16};
  const uint8_t *nul = size ? memchr(data, 0, size) : NULL;
  size_t n = nul ? (size_t)(nul - data) : size;
  mr_err e = MR_ERR_INIT;
  mr_template *t;
  mr_code rc = mr_template_parse(&t, (const char *)data, n, &e);
  fuzz_check_error(rc, &e);
  if (rc)
    return 0;
  json_t *vars = nul ? mr_json_parse((const char *)nul + 1, size - n - 1, NULL, NULL) : NULL;
  if (!json_is_object(vars)) {
    json_decref(vars);
    vars = json_pack("{s:[{s:s, s:s}], s:b}", "messages", "role", "user", "content", "hi",
                     "add_generation_prompt", 1);
  }
  for (int i = 0; i < 2; i++) { /* rendering changes nothing: the second time gives the same */
    static mr_rendered first;
    mr_rendered r = {0};
    mr_code again = mr_template_render(t, vars, &limits, 1.7e9, &r, NULL, &e);
    fuzz_check_error(again, &e);
    fuzz_check(r.text.len == r.taint.len || again);
    fuzz_check(i == 0 || again == rc);
    fuzz_check(again || i == 0 ||
               (r.text.len == first.text.len &&
                (r.text.len == 0 || !memcmp(r.text.data, first.text.data, r.text.len))));
    mr_rendered_free(&first);
    first = r;
    rc = again;
    mr_err_clear(&e);
    if (i == 1) {
      mr_rendered_free(&first);
      memset(&first, 0, sizeof first);
    }
  }
  json_decref(vars);
  mr_template_free(t);
  return 0;
}
