/* template.h: chat templates: the Jinja subset that real templates use, with limits.
 *
 *     mr_template *t;
 *     if (mr_template_parse(&t, src, len, &err)) ...            syntax error: line and what
 *     mr_template_render(t, vars, &limits, now, &out, &err);    vars: a JSON object, borrowed
 *     mr_rendered_free(&out);  mr_template_free(t);
 *
 * Sees nothing but its variables: no files, no imports, no clock except strftime_now at the given
 * time. Output remembers which bytes came from `tainted` variables: a user's text that looks like a
 * control token stays text when it is tokenized (tokenizer.h, `plain`).
 */
#ifndef MR_SRC_TEMPLATE_H
#define MR_SRC_TEMPLATE_H

#include <jansson.h>
#include <stdint.h>

#include "io/err.h"
#include "io/text.h"

typedef struct mr_template mr_template;

typedef struct mr_template_limits {
  int64_t steps; /* evaluated nodes */
  int depth;     /* nesting of calls, expressions and blocks */
  size_t output; /* bytes of output, and of any string on the way */
} mr_template_limits;

extern const mr_template_limits mr_template_default_limits;

typedef struct mr_rendered {
  mr_text text;
  mr_text taint; /* same length as text: 1 where the byte came from a tainted variable */
} mr_rendered;

mr_code mr_template_parse(mr_template **out, const char *src, size_t len, mr_err *err);
void mr_template_free(mr_template *t);

/* vars: an object of the template's global variables. Strings below the keys "messages", "tools"
 * and "documents" are tainted, all others trusted. A string that begins with the byte FF (which no
 * JSON text can hold) and goes on in decimal digits is an integer that needs more than 64 bits.
 * limits: NULL for the default ones. now: seconds since 1970 behind strftime_now (UTC); negative:
 * the function is not defined. out is zeroed, or was rendered into before; its memory is used
 * again. A template may be rendered by several threads at once.
 * MR_E_DATA with the template's own words when it calls raise_exception (raised is set to true, may
 * be NULL), or with line and reason when it fails or passes a limit. */
mr_code mr_template_render(const mr_template *t, json_t *vars, const mr_template_limits *limits,
                           double now, mr_rendered *out, bool *raised, mr_err *err);
void mr_rendered_free(mr_rendered *r);

#endif
