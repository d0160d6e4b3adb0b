/* millrace model tokenize and millrace model detokenize. */
#include <getopt.h>
#include <stdio.h>
#include <string.h>

#include "io/json.h"
#include "io/lines.h"
#include "io/sys.h"
#include "jobs/cmd.h"
#include "src/tokenizer.h"

#define CHUNK ((size_t)1 << 16)
#define MAX_LINE ((size_t)256 << 20)

static const char tokenize_help[] =
    "Usage: millrace model tokenize [OPTION]... FILE [TEXT]\n"
    "Prints the token ids of TEXT (without it: of standard input) with the vocabulary of a model "
    "file.\n"
    "\n"
    "      --no-special     add no BOS or EOS\n"
    "      --parse-special  control tokens written in the text become tokens; else they are text\n"
    "      --jsonl          read lines {\"text\" or \"text_b64\", \"add_special\", "
    "\"parse_special\"},\n"
    "                       answer {\"ids\"} or {\"error\"} for each\n"
    "  -h, --help           show this page\n"
    "\n"
    "Exit status: 0 done, 1 some lines failed, 64 usage, 65 no usable vocabulary, 66 no such "
    "file.\n";

static const char detokenize_help[] =
    "Usage: millrace model detokenize [OPTION]... FILE [ID]...\n"
    "Prints the text of token ids (without any: read from standard input) with the vocabulary of a "
    "model file.\n"
    "\n"
    "      --control        write control tokens as text; else they are skipped\n"
    "      --jsonl          read lines {\"ids\"}, answer {\"text\"} or {\"error\"} for each\n"
    "  -h, --help           show this page\n"
    "\n"
    "Exit status: 0 done, 1 some lines failed, 64 usage, 65 no usable vocabulary or id, 66 no such "
    "file.\n";

typedef struct request {
  bool jsonl, no_special, parse, control, help;
  int first; /* index in argv of the first argument that is no option */
} request;

typedef struct session {
  mr_gguf *file;
  mr_vocab *vocab;
  request req;
} session;

/* Answers one line of JSON; MR_E_DATA is the line's own error. */
typedef mr_code (*answer_fn)(const session *s, json_t *line, mr_text *out, mr_err *err);

static mr_code parse_options(int argc, char **argv, const struct option *known, request *r,
                             mr_err *err) {
  optind = 0, opterr = 0;
  for (int o; (o = getopt_long(argc, argv, ":h", known, NULL)) != -1;) {
    switch (o) {
    case 'h':
      r->help = true;
      break;
    case 'j':
      r->jsonl = true;
      break;
    case 'n':
      r->no_special = true;
      break;
    case 'p':
      r->parse = true;
      break;
    case 'c':
      r->control = true;
      break;
    default:
      return mr_err_set(err, MR_E_USAGE, "unknown option %s (see millrace model %s --help)",
                        argv[optind - 1], argv[0]);
    }
  }
  r->first = optind;
  if (!r->help && r->first >= argc)
    return mr_err_set(err, MR_E_USAGE, "no model file named (see millrace model %s --help)",
                      argv[0]);
  return MR_OK;
}

static mr_code session_open(session *s, const char *path, mr_err *err) {
  mr_code c = mr_gguf_open(&s->file, path, err);
  if (!c && !mr_vocab_present(s->file))
    c = mr_err_at(err, MR_E_DATA, path, 0, -1,
                  "holds no vocabulary (tokenizer.ggml.tokens is missing)");
  return c ? c : mr_vocab_open(&s->vocab, s->file, err);
}

static void session_close(session *s) {
  mr_vocab_close(s->vocab);
  mr_gguf_close(s->file);
}

static mr_code put(const mr_text *t, mr_err *err) {
  if (t->failed)
    return mr_err_set(err, MR_E_NOMEM, "out of memory");
  if (fwrite(t->data, 1, t->len, stdout) != t->len)
    return mr_err_errno(err, MR_E_IO, "standard output", "write");
  return MR_OK;
}

/* Appends up to CHUNK bytes of standard input; *end when there is no more. */
static mr_code take_input(mr_text *t, bool *end, mr_err *err) {
  char chunk[CHUNK];
  ssize_t n = mr_sys_read_full(0, chunk, sizeof chunk);
  if (n < 0)
    return mr_err_errno(err, MR_E_IO, "standard input", "read");
  *end = (size_t)n < sizeof chunk;
  mr_text_add(t, chunk, (size_t)n);
  return t->failed ? mr_err_set(err, MR_E_NOMEM, "out of memory") : MR_OK;
}

static mr_code take_all(mr_text *t, mr_err *err) {
  mr_code c = MR_OK;
  for (bool end = false; !c && !end;)
    c = take_input(t, &end, err);
  return c;
}

/* ---- lines of JSON ---- */

static mr_code get_flag(json_t *line, const char *name, bool usual, bool *out, mr_err *err) {
  json_t *v = json_object_get(line, name);
  if (v && !json_is_boolean(v))
    return mr_err_set(err, MR_E_DATA, "\"%s\" is not true or false", name);
  *out = v ? json_is_true(v) : usual;
  return MR_OK;
}

/* Text of the line: "text", or the bytes of "text_b64". */
static mr_code get_text(json_t *line, mr_text *text, mr_err *err) {
  json_t *plain = json_object_get(line, "text"), *coded = json_object_get(line, "text_b64");
  json_t *v = plain ? plain : coded;
  if (!json_is_string(v) || (plain && coded))
    return mr_err_set(err, MR_E_DATA, "a line is an object with either \"text\" or \"text_b64\"");
  if (plain)
    mr_text_add(text, json_string_value(v), json_string_length(v));
  else if (!mr_base64_decode(json_string_value(v), json_string_length(v), text))
    return mr_err_set(err, MR_E_DATA, "\"text_b64\" is not base64");
  return text->failed ? mr_err_set(err, MR_E_NOMEM, "out of memory") : MR_OK;
}

/* What the vocabulary's own tools answer is what this command is asked for. */
static mr_code encode(const session *s, const mr_text *text, bool add, bool parse, mr_ids *ids,
                      mr_err *err) {
  int flags = (add ? MR_TOK_ADD_SPECIAL : 0) | (parse ? MR_TOK_PARSE_SPECIAL : 0) | MR_TOK_UPSTREAM;
  return mr_tokenizer_encode(s->vocab, text->data ? text->data : "", text->len, NULL, flags, ids,
                             err);
}

static mr_code answer_ids(const session *s, json_t *line, mr_text *out, mr_err *err) {
  bool add = true, parse = false;
  mr_text text = {0};
  mr_ids ids = {0};
  mr_code c = get_flag(line, "add_special", !s->req.no_special, &add, err);
  if (!c)
    c = get_flag(line, "parse_special", s->req.parse, &parse, err);
  if (!c)
    c = get_text(line, &text, err);
  if (!c)
    c = encode(s, &text, add, parse, &ids, err);
  if (!c) {
    mr_text_adds(out, "{\"ids\":[");
    for (size_t i = 0; i < ids.n; i++)
      mr_text_addf(out, i ? ",%d" : "%d", ids.ids[i]);
    mr_text_adds(out, "]}\n");
  }
  mr_text_free(&text);
  mr_ids_free(&ids);
  return c;
}

static mr_code push_id(const session *s, mr_detok *d, int64_t id, mr_text *out, mr_err *err) {
  if (id < 0 || id >= mr_vocab_size(s->vocab))
    return mr_err_set(err, MR_E_DATA,
                      "token id %lld is out of range (the vocabulary has %d tokens)", (long long)id,
                      mr_vocab_size(s->vocab));
  mr_detok_push(d, (int32_t)id, out);
  return MR_OK;
}

static mr_code answer_text(const session *s, json_t *line, mr_text *out, mr_err *err) {
  json_t *ids = json_object_get(line, "ids"), *id;
  if (!json_is_array(ids))
    return mr_err_set(err, MR_E_DATA, "a line is an object with \"ids\", an array");
  mr_detok d;
  mr_detok_init(&d, s->vocab, true, s->req.control);
  mr_text text = {0};
  mr_code c = MR_OK;
  size_t i;
  json_array_foreach(ids, i, id) {
    if (!c)
      c = push_id(s, &d, json_is_integer(id) ? json_integer_value(id) : -1, &text, err);
  }
  mr_detok_finish(&d, &text);
  if (!c) {
    mr_text_adds(out, "{\"text\":");
    mr_json_add_string(out, text.data ? text.data : "", text.len);
    mr_text_adds(out, "}\n");
    out->failed = out->failed || text.failed;
  }
  mr_text_free(&text);
  return c;
}

/* One line in, one line out. An error of the line is its answer; others end the command. */
static mr_code one_line(const session *s, answer_fn answer, const mr_line *line, int *bad,
                        mr_err *err) {
  mr_text out = {0};
  mr_err own = MR_ERR_INIT;
  json_t *v = NULL;
  if (line->too_long)
    mr_err_set(&own, MR_E_DATA, "the line has %zu bytes; the limit is %zu", line->len, MAX_LINE);
  else
    v = mr_json_parse(line->s, line->len, NULL, &own);
  mr_code c = v ? answer(s, v, &out, &own) : own.code;
  json_decref(v);
  if (c == MR_E_DATA) {
    mr_text_clear(&out);
    mr_text_adds(&out, "{\"error\":");
    mr_json_add_string(&out, own.text, strlen(own.text));
    mr_text_adds(&out, "}\n");
    ++*bad;
    c = MR_OK;
  }
  c = c ? mr_err_set(err, c, "%s", own.text) : put(&out, err);
  mr_text_free(&out);
  return c;
}

/* Answers the lines of standard input; memory is that of the longest line. */
static mr_code lines(const session *s, answer_fn answer, int *bad, mr_err *err) {
  const char *const inputs[] = {"-"};
  mr_source *src = NULL;
  mr_lines l;
  mr_line line;
  bool more = false;
  mr_code c = mr_source_open(&src, inputs, 1, err);
  mr_lines_init(&l, src, MAX_LINE, NULL);
  while (!c && !(c = mr_source_next(src, &more, err)) && more) {
    mr_lines_start(&l);
    while (!c && !(c = mr_lines_next(&l, &line, err)) && line.s)
      c = one_line(s, answer, &line, bad, err);
  }
  mr_lines_free(&l);
  mr_source_close(src);
  return c;
}

/* ---- one text ---- */

static mr_code tokenize_one(const session *s, int argc, char **argv, mr_err *err) {
  mr_text text = {0}, out = {0};
  mr_ids ids = {0};
  int at = s->req.first + 1;
  mr_code c = MR_OK;
  if (at < argc)
    mr_text_adds(&text, argv[at]);
  else
    c = take_all(&text, err);
  if (!c)
    c = encode(s, &text, !s->req.no_special, s->req.parse, &ids, err);
  for (size_t i = 0; !c && i < ids.n; i++)
    mr_text_addf(&out, i ? " %d" : "%d", ids.ids[i]);
  mr_text_addc(&out, '\n');
  if (!c)
    c = put(&out, err);
  mr_text_free(&text);
  mr_text_free(&out);
  mr_ids_free(&ids);
  return c;
}

static mr_code push_word(const session *s, mr_detok *d, const char *word, mr_text *out,
                         mr_err *err) {
  int64_t id;
  if (!mr_parse_int(word, &id))
    return mr_err_set(err, MR_E_DATA, "\"%.40s\" is not a token id", word);
  return push_id(s, d, id, out, err);
}

static mr_code detokenize_one(const session *s, int argc, char **argv, mr_err *err) {
  mr_text in = {0}, out = {0};
  mr_detok d;
  mr_detok_init(&d, s->vocab, true, s->req.control);
  mr_code c = MR_OK;
  int at = s->req.first + 1;
  if (at >= argc)
    c = take_all(&in, err);
  for (; !c && at < argc; at++)
    c = push_word(s, &d, argv[at], &out, err);
  for (char *p = in.data; !c && p && *(p += strspn(p, " \t\r\n,"));) {
    char *word = p;
    p += strcspn(p, " \t\r\n,");
    p += *p ? (*p = 0, 1) : 0;
    c = push_word(s, &d, word, &out, err);
  }
  mr_detok_finish(&d, &out);
  mr_text_addc(&out, '\n');
  if (!c)
    c = put(&out, err);
  mr_text_free(&in);
  mr_text_free(&out);
  return c;
}

static int finish(mr_code c, int bad, mr_err *err) {
  if (!c && fflush(stdout))
    c = mr_err_errno(err, MR_E_IO, "standard output", "write");
  if (c)
    mr_err_print(err, stderr);
  return c ? mr_err_exit(c) : bad ? 1 : 0;
}

int mr_cmd_model_tokenize(int argc, char **argv) {
  static const struct option known[] = {{"help", no_argument, NULL, 'h'},
                                        {"jsonl", no_argument, NULL, 'j'},
                                        {"no-special", no_argument, NULL, 'n'},
                                        {"parse-special", no_argument, NULL, 'p'},
                                        {0}};
  session s = {0};
  mr_err err = MR_ERR_INIT;
  int bad = 0;
  mr_code c = parse_options(argc, argv, known, &s.req, &err);
  if (!c && s.req.help)
    return fputs(tokenize_help, stdout), finish(c, 0, &err);
  if (!c && argc - s.req.first > (s.req.jsonl ? 1 : 2))
    c = mr_err_set(&err, MR_E_USAGE, "one argument too many: \"%s\"", argv[argc - 1]);
  if (!c)
    c = session_open(&s, argv[s.req.first], &err);
  if (!c)
    c = s.req.jsonl ? lines(&s, answer_ids, &bad, &err) : tokenize_one(&s, argc, argv, &err);
  session_close(&s);
  return finish(c, bad, &err);
}

int mr_cmd_model_detokenize(int argc, char **argv) {
  static const struct option known[] = {{"help", no_argument, NULL, 'h'},
                                        {"jsonl", no_argument, NULL, 'j'},
                                        {"control", no_argument, NULL, 'c'},
                                        {0}};
  session s = {0};
  mr_err err = MR_ERR_INIT;
  int bad = 0;
  mr_code c = parse_options(argc, argv, known, &s.req, &err);
  if (!c && s.req.help)
    return fputs(detokenize_help, stdout), finish(c, 0, &err);
  if (!c && s.req.jsonl && argc - s.req.first > 1)
    c = mr_err_set(&err, MR_E_USAGE, "one argument too many: \"%s\"", argv[argc - 1]);
  if (!c)
    c = session_open(&s, argv[s.req.first], &err);
  if (!c)
    c = s.req.jsonl ? lines(&s, answer_text, &bad, &err) : detokenize_one(&s, argc, argv, &err);
  session_close(&s);
  return finish(c, bad, &err);
}
