/* millrace model template: renders conversations with the chat template of a model or a file. */
#include <getopt.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "io/json.h"
#include "io/lines.h"
#include "io/mem.h"
#include "io/slurp.h"
#include "io/sys.h"
#include "jobs/cmd.h"
#include "src/prompt.h"

#define CHUNK ((size_t)1 << 16)
#define MAX_LINE ((size_t)256 << 20)
#define MAX_TEMPLATE ((size_t)16 << 20)
/* The clock of strftime_now where the variables do not set it: fixed, so that the same input always
 * gives the same output. 2026-03-05 14:07:09 UTC. */
#define CLOCK_S 1772719629.0

/* clang-format off */
static const char help[] =
    "Usage: millrace model template [OPTION]... (MODEL | --file T.jinja)\n"
    "Reads a JSON object of template variables (or a list of messages) from standard input\n"
    "and prints the conversation as the chat template renders it.\n"
    "\n"
    "      --file FILE   the template of a file instead of a model's\n"
    "      --jsonl       read lines of variables and answer each with {\"text\"} or {\"error\"}\n"
    "  -h, --help        show this page\n"
    "\n"
    "The variable `now` (\"2026-03-05T14:07:09\", or seconds since 1970) is the time that\n"
    "strftime_now tells, in UTC; null leaves the function undefined; without it the time is\n"
    "2026-03-05T14:07:09, so that output can be repeated. A model adds its special tokens\n"
    "(bos_token and others) to the variables.\n"
    "\n"
    "Exit status: 0 done (with --jsonl also when lines have errors), 64 usage, 65 a template\n"
    "or variables that cannot be used, 66 no such file.\n";
/* clang-format on */

typedef struct session {
  const char *model, *file;
  bool jsonl, help;
  mr_prompter *prompter;
  mr_template *own; /* of --file */
  const mr_template *t;
  mr_err broken; /* the template does not parse */
} session;

static mr_code read_options(int argc, char **argv, session *s, mr_err *err) {
  static const struct option known[] = {{"file", required_argument, NULL, 'f'},
                                        {"jsonl", no_argument, NULL, 'j'},
                                        {"help", no_argument, NULL, 'h'},
                                        {NULL, 0, NULL, 0}};
  static const char *const names[] = {"file", "jsonl", "help"};
  optind = 0, opterr = 0;
  for (int o; (o = getopt_long(argc, argv, ":h", known, NULL)) != -1;) {
    const char *given = argv[optind - 1], *near;
    if (o == 'f')
      s->file = optarg;
    else if (o == 'j')
      s->jsonl = true;
    else if (o == 'h')
      s->help = true;
    else if (o == ':')
      return mr_err_set(err, MR_E_USAGE, "option %s needs a value", given);
    else {
      near = mr_nearest(given + strspn(given, "-"), names, 3);
      return mr_err_set(err, MR_E_USAGE,
                        "unknown option %s%s%s (see millrace model template --help)", given,
                        near ? ": did you mean --" : "", near ? near : "");
    }
  }
  s->model = optind < argc ? argv[optind] : NULL;
  if (!s->help && !s->model == !s->file)
    return mr_err_set(err, MR_E_USAGE,
                      "name a model file or --file T.jinja (see millrace model template --help)");
  if (argc - optind > 1)
    return mr_err_set(err, MR_E_USAGE, "more than one model named: %s", argv[optind + 1]);
  return MR_OK;
}

/* A template that does not parse is an answer, not a failure to open. */
static mr_code open_template(session *s, mr_err *err) {
  mr_text src = {0};
  mr_code c;
  s->broken = (mr_err)MR_ERR_INIT;
  if (s->model) {
    c = mr_prompter_open(&s->prompter, s->model, err);
    s->t = c ? NULL : mr_prompter_template(s->prompter, false, &s->broken);
    return c;
  }
  c = mr_slurp_file(s->file, MAX_TEMPLATE, &src, err);
  if (!c) {
    c = mr_template_parse(&s->own, src.data ? src.data : "", src.len, &s->broken);
    if (c == MR_E_NOMEM)
      mr_err_set(err, c, "out of memory");
    else
      c = MR_OK;
    s->t = s->own;
    if (s->broken.code)
      snprintf(s->broken.file, sizeof s->broken.file, "%s", s->file);
  }
  mr_text_free(&src);
  return c;
}

/* ---- integers beyond 64 bits ---- */

/* End of an integer at s[at] that has no fraction and no exponent; 0: it has one, or fits 64 bits
 * anyway. */
static size_t big_end(const char *s, size_t len, size_t at) {
  size_t to = at + (s[at] == '-');
  while (to < len && s[to] >= '0' && s[to] <= '9')
    to++;
  bool real = to < len && (s[to] == '.' || s[to] == 'e' || s[to] == 'E');
  return real || to - at < 19 ? 0 : to;
}

/* `line` with its large integers as texts that begin with `mark`. Returns how many there are. */
static int mark_big(const char *s, size_t len, const char *mark, mr_text *out) {
  bool quoted = false;
  int n = 0;
  for (size_t i = 0; i < len;) {
    bool digit = (s[i] >= '0' && s[i] <= '9') || s[i] == '-';
    size_t to = !quoted && digit ? big_end(s, len, i) : 0;
    if (to) {
      mr_text_addf(out, "\"%s%.*s\"", mark, (int)(to - i), s + i);
      n++;
      i = to;
      continue;
    }
    size_t k = quoted && s[i] == '\\' && i + 1 < len ? 2 : 1;
    quoted ^= s[i] == '"';
    mr_text_add(out, s + i, k);
    i += k;
    while (k == 1 && !quoted && digit && i < len && s[i] >= '0' && s[i] <= '9') /* the rest of this
                                                                                   number */
      mr_text_addc(out, s[i++]);
  }
  return n;
}

static json_t *unmarked(json_t *v, const char *mark) {
  size_t n = strlen(mark), len = json_string_length(v);
  const char *s = json_string_value(v);
  char digits[64] = "\xff"; /* what mr_template_render reads as an integer */
  if (!s || len < n || memcmp(s, mark, n) || len - n > 50)
    return NULL;
  memcpy(digits + 1, s + n, len - n);
  return json_stringn_nocheck(digits, 1 + len - n);
}

static void restore_big(json_t *v, const char *mark) {
  const char *key;
  json_t *item, *big;
  size_t i;
  if (json_is_array(v)) {
    json_array_foreach(v, i, item) {
      if ((big = unmarked(item, mark)))
        json_array_set_new(v, i, big);
      else
        restore_big(item, mark);
    }
  } else if (json_is_object(v)) {
    json_object_foreach(v, key, item) {
      if ((big = unmarked(item, mark)))
        json_object_set_new_nocheck(v, key, big);
      else
        restore_big(item, mark);
    }
  }
}

/* JSON whose integers may have more than 64 bits. */
static json_t *parse_big(const char *s, size_t len, mr_err *err) {
  char mark[32];
  mr_text t = {0};
  json_t *v = NULL;
  for (int i = 0; i < 1000; i++) { /* a mark that the text does not hold */
    snprintf(mark, sizeof mark, "integer %d:", i);
    if (!memmem(s, len, mark, strlen(mark)))
      break;
  }
  if (mark_big(s, len, mark, &t) > 0 && !t.failed)
    v = mr_json_parse(t.data, t.len, NULL, err);
  if (v)
    restore_big(v, mark);
  mr_text_free(&t);
  return v;
}

static json_t *parse_variables(const char *s, size_t len, mr_err *err) {
  bool too_big = false;
  mr_err first = MR_ERR_INIT;
  json_t *v = mr_json_parse(s, len, &too_big, &first);
  if (!v && too_big)
    v = parse_big(s, len, err);
  if (!v)
    mr_err_set(err, first.code ? first.code : MR_E_DATA, "%s", first.text);
  return v;
}

/* ---- rendering ---- */

/* Takes `now` out of the variables: seconds, -1 for no clock. */
static bool take_clock(json_t *vars, double *now, mr_err *err) {
  json_t *v = json_object_get(vars, "now");
  struct tm t = {0};
  *now = CLOCK_S;
  if (json_is_null(v)) {
    *now = -1;
  } else if (json_is_number(v) && json_number_value(v) >= 0) {
    *now = json_number_value(v);
  } else if (v) {
    const char *s = json_string_value(v), *end = s ? strptime(s, "%Y-%m-%dT%H:%M:%S", &t) : NULL;
    if (!end || (*end && *end != '.' && *end != 'Z'))
      return mr_err_set(err, MR_E_DATA,
                        "now must be a time like 2026-03-05T14:07:09, seconds since 1970, or null"),
             false;
    *now = (double)timegm(&t);
  }
  json_object_del(vars, "now");
  return true;
}

static mr_code render(const session *s, const char *line, size_t len, mr_rendered *out,
                      mr_err *err) {
  double now;
  bool raised = false;
  if (s->broken.code) {
    *err = s->broken;
    return err->code;
  }
  mr_json_ran_out(); /* before this line */
  json_t *vars = parse_variables(line, len, err);
  if (json_is_array(vars))
    vars = json_pack("{s:o, s:b}", "messages", vars, "add_generation_prompt", 1);
  if (vars && !json_is_object(vars))
    mr_err_set(err, MR_E_DATA, "the variables must be a JSON object or a list of messages");
  if (vars && s->prompter)
    json_object_update_missing(vars, (json_t *)(uintptr_t)mr_prompter_variables(s->prompter));
  mr_code c = MR_E_DATA;
  if (json_is_object(vars) && take_clock(vars, &now, err))
    c = mr_template_render(s->t, vars, &mr_template_default_limits, now, out, &raised, err);
  json_decref(vars);
  if (mr_json_ran_out() || err->code == MR_E_NOMEM) { /* says nothing about the line */
    mr_err_clear(err);
    c = mr_err_set(err, MR_E_NOMEM, "out of memory");
  }
  return c;
}

/* The answer to a line; an error only when there is none for want of memory. */
static mr_code answer(const session *s, const char *line, size_t len, mr_rendered *r, mr_text *out,
                      mr_err *err) {
  mr_err e = MR_ERR_INIT;
  char words[sizeof e.file + sizeof e.text + 64];
  mr_code c = render(s, line, len, r, &e);
  if (c == MR_E_NOMEM)
    return mr_err_set(err, c, "%s", e.text);
  if (c == MR_OK) {
    mr_text_adds(out, "{\"text\": ");
    mr_json_add_string(out, r->text.data ? r->text.data : "", r->text.len);
    mr_text_adds(out, "}\n");
    return MR_OK;
  }
  mr_err_format(&e, words, sizeof words);
  mr_text_adds(out, "{\"error\": {\"message\": ");
  mr_json_add_string(out, words, strlen(words));
  mr_text_adds(out, "}}\n");
  return MR_OK;
}

static mr_code write_out(mr_text *t, mr_err *err) {
  if (t->failed)
    return mr_err_set(err, MR_E_NOMEM, "out of memory");
  mr_code c = t->len && mr_sys_write_full(1, t->data, t->len) < 0
                  ? mr_err_errno(err, MR_E_IO, "standard output", "cannot write")
                  : MR_OK;
  mr_text_clear(t);
  return c;
}

static mr_code serve_lines(const session *s, mr_err *err) {
  mr_text in = {0}, out = {0};
  mr_rendered r = {0};
  mr_code c = mr_slurp(0, "standard input", MAX_LINE * 4, &in, err);
  for (size_t at = 0; !c && at < in.len;) {
    const char *nl = memchr(in.data + at, '\n', in.len - at);
    size_t end = nl ? (size_t)(nl - in.data) : in.len, len = end - at;
    if (strspn(in.data + at, " \t\r") < len)
      c = answer(s, in.data + at, len, &r, &out, err);
    at = end + 1;
    if (!c && (out.len >= CHUNK || at >= in.len))
      c = write_out(&out, err);
  }
  mr_rendered_free(&r);
  mr_text_free(&in);
  mr_text_free(&out);
  return c;
}

static mr_code serve_one(const session *s, mr_err *err) {
  mr_text in = {0};
  mr_rendered r = {0};
  mr_code c = mr_slurp(0, "standard input", MAX_LINE, &in, err);
  if (!c)
    c = render(s, in.data ? in.data : "", in.len, &r, err);
  if (!c)
    c = write_out(&r.text, err);
  mr_rendered_free(&r);
  mr_text_free(&in);
  return c;
}

int mr_cmd_model_template(int argc, char **argv) {
  session s = {0};
  mr_err err = MR_ERR_INIT;
  mr_code c = read_options(argc, argv, &s, &err);
  if (!c && s.help) {
    fputs(help, stdout);
    return 0;
  }
  if (!c)
    c = open_template(&s, &err);
  if (!c)
    c = s.jsonl ? serve_lines(&s, &err) : serve_one(&s, &err);
  if (c)
    mr_err_print(&err, stderr);
  mr_template_free(s.own);
  mr_prompter_close(s.prompter);
  return mr_err_exit(c);
}
