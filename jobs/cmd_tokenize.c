/* millrace model tokenize and millrace model detokenize. */
#include <getopt.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "io/json.h"
#include "io/lines.h"
#include "io/sys.h"
#include "jobs/cmd.h"
#include "src/hf_dir.h"
#include "src/tokenizer.h"

#define CHUNK ((size_t)1 << 16)
#define MAX_LINE ((size_t)256 << 20)

/* clang-format off */
static const char tokenize_help[] =
    "Usage: millrace model tokenize [OPTION]... MODEL [TEXT]\n"
    "Prints the token ids of TEXT (without it: of standard input) with the vocabulary of\n"
    "a model file or directory, as a run would use them.\n"
    "\n"
    "      --no-special     add no BOS or EOS\n"
    "      --parse-special  control tokens written in the text become tokens, else they are text\n"
    "      --jsonl          read lines {\"text\" or \"text_b64\", \"add_special\",\n"
    "                       \"parse_special\"} and answer each with {\"ids\"} or {\"error\"}; the\n"
    "                       ids are those of the vocabulary's own tools: a second BOS before\n"
    "                       one in the text, bytes without a token left out\n"
    "  -h, --help           show this page\n"
    "\n"
    "Exit status: 0 done, 1 some lines failed, 64 usage, 65 no usable vocabulary or text,\n"
    "66 no such file.\n";

static const char detokenize_help[] =
    "Usage: millrace model detokenize [OPTION]... MODEL [ID]...\n"
    "Prints the text of token ids (without any: read from standard input) with the\n"
    "vocabulary of a model file or directory.\n"
    "\n"
    "      --control        write control tokens as text, else they are skipped\n"
    "      --jsonl          read lines {\"ids\"} and answer each with {\"text\"} or {\"error\"}\n"
    "  -h, --help           show this page\n"
    "\n"
    "Exit status: 0 done, 1 some lines failed, 64 usage, 65 no usable vocabulary or id,\n"
    "66 no such file.\n";
/* clang-format on */

typedef struct request {
  bool jsonl, control, help;
  int flags; /* MR_TOK_* */
  int first; /* index in argv of the first argument that is no option */
} request;

typedef struct session {
  mr_gguf *file;
  mr_vocab *vocab;
  request req;
} session;

/* Answers one line of JSON; MR_E_DATA is the line's own error. */
typedef mr_code (*answer_fn)(const session *s, json_t *line, mr_text *out, mr_err *err);

typedef struct command { /* what the two have of their own */
  const char *help;
  const struct option *known;
  int words_max; /* behind the model */
  answer_fn answer;
  /* One text from n words, or from all of standard input when there are none; without the newline.
   */
  mr_code (*one)(const session *s, char **words, int n, mr_text *out, mr_err *err);
} command;

static mr_code unknown_option(char **argv, const struct option *known, mr_err *err) {
  const char *names[8], *near = NULL;
  size_t n = 0;
  for (; known[n].name && n < sizeof names / sizeof names[0]; n++)
    names[n] = known[n].name;
  const char *given = argv[optind - 1];
  if (strncmp(given, "--", 2))
    return mr_err_set(err, MR_E_USAGE, "unknown option -%c (see millrace model %s --help)", optopt,
                      argv[0]);
  near = mr_nearest(given + strspn(given, "-"), names, n);
  return mr_err_set(err, MR_E_USAGE, "unknown option %s%s%s (see millrace model %s --help)", given,
                    near ? ": did you mean --" : "", near ? near : "", argv[0]);
}

static mr_code parse_options(int argc, char **argv, const struct option *known, request *r,
                             mr_err *err) {
  optind = 0, opterr = 0;
  r->flags = MR_TOK_ADD_SPECIAL;
  for (int o; (o = getopt_long(argc, argv, ":h", known, NULL)) != -1;) {
    switch (o) {
    case 'h':
      r->help = true;
      break;
    case 'j':
      r->jsonl = true;
      break;
    case 'n':
      r->flags &= ~MR_TOK_ADD_SPECIAL;
      break;
    case 'p':
      r->flags |= MR_TOK_PARSE_SPECIAL;
      break;
    case 'c':
      r->control = true;
      break;
    default:
      return unknown_option(argv, known, err);
    }
  }
  r->first = optind;
  if (!r->help && r->first >= argc)
    return mr_err_set(err, MR_E_USAGE, "no model file named (see millrace model %s --help)",
                      argv[0]);
  return MR_OK;
}

static mr_code session_open(session *s, const char *path, mr_err *err) {
  mr_code c;
  if (mr_hf_dir_is(path)) {
    mr_hf_dir d;
    c = mr_hf_dir_open(&d, path, err);
    c = c ? c : mr_hf_dir_vocab(&d, &s->vocab, err);
    mr_hf_dir_close(&d);
    return c || s->vocab ? c
                         : mr_err_at(err, MR_E_DATA, path, 0, -1,
                                     "holds no vocabulary (there is no tokenizer.json)");
  }
  c = mr_gguf_open(&s->file, path, err);
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

/* Sets or clears a flag as the line says; silent lines leave it as it is. */
static mr_code get_flag(json_t *line, const char *name, int flag, int *flags, mr_err *err) {
  json_t *v = json_object_get(line, name);
  if (v && !json_is_boolean(v))
    return mr_err_set(err, MR_E_DATA, "\"%s\" is not true or false", name);
  if (v)
    *flags = json_is_true(v) ? *flags | flag : *flags & ~flag;
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
  else if (!mr_base64_decode(json_string_value(v), json_string_length(v), text) && !text->failed)
    return mr_err_set(err, MR_E_DATA, "\"text_b64\" is not base64");
  return text->failed ? mr_err_set(err, MR_E_NOMEM, "out of memory") : MR_OK;
}

static mr_code encode(const session *s, const mr_text *text, int flags, mr_ids *ids, mr_err *err) {
  return mr_tokenizer_encode(s->vocab, text->data ? text->data : "", text->len, NULL, flags, ids,
                             err);
}

static mr_code answer_ids(const session *s, json_t *line, mr_text *out, mr_err *err) {
  int flags = s->req.flags | MR_TOK_UPSTREAM;
  mr_text text = {0};
  mr_ids ids = {0};
  mr_code c = get_flag(line, "add_special", MR_TOK_ADD_SPECIAL, &flags, err);
  if (!c)
    c = get_flag(line, "parse_special", MR_TOK_PARSE_SPECIAL, &flags, err);
  if (!c)
    c = get_text(line, &text, err);
  if (!c)
    c = encode(s, &text, flags, &ids, err);
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
    if (!c && !json_is_integer(id))
      c = mr_err_set(err, MR_E_DATA, "ids[%zu] is not a whole number", i);
    if (!c)
      c = push_id(s, &d, json_integer_value(id), &text, err);
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

static mr_code tokenize_one(const session *s, char **words, int n, mr_text *out, mr_err *err) {
  mr_text text = {0};
  mr_ids ids = {0};
  mr_code c = MR_OK;
  if (n)
    mr_text_adds(&text, words[0]);
  else
    c = take_all(&text, err);
  if (text.failed)
    c = mr_err_set(err, MR_E_NOMEM, "out of memory");
  if (!c)
    c = encode(s, &text, s->req.flags, &ids, err);
  for (size_t i = 0; !c && i < ids.n; i++)
    mr_text_addf(out, i ? " %d" : "%d", ids.ids[i]);
  mr_text_free(&text);
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

static mr_code detokenize_one(const session *s, char **words, int n, mr_text *out, mr_err *err) {
  mr_text in = {0};
  mr_detok d;
  mr_detok_init(&d, s->vocab, true, s->req.control);
  mr_code c = n ? MR_OK : take_all(&in, err);
  for (int i = 0; !c && i < n; i++)
    c = push_word(s, &d, words[i], out, err);
  for (char *p = in.data; !c && p && *(p += strspn(p, " \t\r\n,"));) {
    char *word = p;
    p += strcspn(p, " \t\r\n,");
    p += *p ? (*p = 0, 1) : 0;
    c = push_word(s, &d, word, out, err);
  }
  mr_detok_finish(&d, out);
  mr_text_free(&in);
  return c;
}

/* ---- the commands ---- */

static mr_code answer_one(const session *s, const command *cmd, char **words, int n, mr_err *err) {
  mr_text out = {0};
  mr_code c = cmd->one(s, words, n, &out, err);
  mr_text_addc(&out, '\n');
  if (!c)
    c = put(&out, err);
  mr_text_free(&out);
  return c;
}

static mr_code run(const command *cmd, int argc, char **argv, int *bad, mr_err *err) {
  session s = {0};
  mr_code c = parse_options(argc, argv, cmd->known, &s.req, err);
  if (c)
    return c;
  if (s.req.help)
    return fputs(cmd->help, stdout), MR_OK;
  char **words = argv + s.req.first + 1;
  int n = argc - s.req.first - 1;
  if (n > (s.req.jsonl ? 0 : cmd->words_max))
    return mr_err_set(err, MR_E_USAGE, "one argument too many: \"%s\"", argv[argc - 1]);
  c = session_open(&s, argv[s.req.first], err);
  if (!c)
    c = s.req.jsonl ? lines(&s, cmd->answer, bad, err) : answer_one(&s, cmd, words, n, err);
  session_close(&s);
  return c;
}

static int status_of(const command *cmd, int argc, char **argv) {
  mr_err err = MR_ERR_INIT;
  int bad = 0;
  mr_code c = run(cmd, argc, argv, &bad, &err);
  if (!c && fflush(stdout))
    c = mr_err_errno(&err, MR_E_IO, "standard output", "write");
  if (c)
    mr_err_print(&err, stderr);
  return c ? mr_err_exit(c) : bad ? 1 : 0;
}

int mr_cmd_model_tokenize(int argc, char **argv) {
  static const struct option known[] = {{"help", no_argument, NULL, 'h'},
                                        {"jsonl", no_argument, NULL, 'j'},
                                        {"no-special", no_argument, NULL, 'n'},
                                        {"parse-special", no_argument, NULL, 'p'},
                                        {0}};
  const command c = {tokenize_help, known, 1, answer_ids, tokenize_one};
  return status_of(&c, argc, argv);
}

int mr_cmd_model_detokenize(int argc, char **argv) {
  static const struct option known[] = {{"help", no_argument, NULL, 'h'},
                                        {"jsonl", no_argument, NULL, 'j'},
                                        {"control", no_argument, NULL, 'c'},
                                        {0}};
  const command c = {detokenize_help, known, INT_MAX, answer_text, detokenize_one};
  return status_of(&c, argc, argv);
}
