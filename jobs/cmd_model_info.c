/* cmd_model_info.c: `millrace model info MODEL`: checks all of a model and says what it is. */
#include <getopt.h>
#include <jansson.h>
#include <string.h>

#include "io/err.h"
#include "io/gguf.h"
#include "io/json.h"
#include "io/mem.h"
#include "io/safetensors.h"
#include "io/text.h"
#include "jobs/cmd.h"
#include "src/hf_dir.h"
#include "src/model.h"
#include "src/tokenizer.h"

static const char usage[] =
    "usage: millrace model info [--json] MODEL\n"
    "\n"
    "Checks all of a GGUF model file (its first part, if it is split; a file that holds only a "
    "vocabulary too)\n"
    "or of a Hugging Face directory, and prints what it is.\n"
    "\n"
    "  --json      print one JSON object\n"
    "  -h, --help  print this page\n"
    "\n"
    "Exit status: 0 the file is usable, 65 it is not, 66 there is no such file.\n";

typedef struct subject { /* what was opened */
  const char *path;
  bool is_dir;
  mr_hf_dir dir;
  mr_safetensors *st; /* of a directory, for what its files hold; NULL: none */
  const mr_gguf *g;   /* NULL: a directory */
  mr_model *m;        /* NULL: only a vocabulary */
  mr_gguf *own;       /* g, when there is no model that owns it */
  mr_vocab *v;        /* NULL: none */
} subject;

typedef struct type_sum {
  const char *name;
  int count;
  uint64_t bytes;
} type_sum;

enum { MAX_TYPES = MR_U8 + 1 };

/* Without tensors the file must hold a vocabulary; with tensors it must be a whole model. */
static mr_code open_file(subject *s, const char *path, mr_err *err) {
  mr_code rc = mr_gguf_open(&s->own, path, err);
  s->g = s->own;
  if (rc == MR_OK && mr_gguf_n_tensors(s->g) > 0) {
    mr_gguf_close(s->own);
    s->own = NULL;
    rc = mr_model_open(&s->m, path, err);
    s->g = rc == MR_OK ? s->m->gguf : NULL;
  } else if (rc == MR_OK && !mr_vocab_present(s->g)) {
    rc = mr_err_at(err, MR_E_DATA, path, 0, -1, "the file holds neither tensors nor a vocabulary");
  }
  if (rc == MR_OK && mr_vocab_present(s->g))
    rc = mr_vocab_open(&s->v, s->g, err);
  return rc;
}

static mr_code open_dir(subject *s, const char *path, mr_err *err) {
  mr_code rc = mr_hf_dir_open(&s->dir, path, err);
  s->is_dir = true;
  if (rc == MR_OK)
    rc = mr_hf_dir_vocab(&s->dir, &s->v, err);
  if (rc == MR_OK && (mr_hf_dir_has_weights(&s->dir) || !s->v)) {
    rc = mr_safetensors_open(&s->st, path, err);
    if (rc == MR_OK)
      rc = mr_model_open(&s->m, path, err);
  }
  return rc;
}

static mr_code open_subject(subject *s, const char *path, mr_err *err) {
  s->path = path;
  mr_code rc = mr_hf_dir_is(path) ? open_dir(s, path, err) : open_file(s, path, err);
  if (rc)
    mr_err_place(err, path, 0, -1);
  return rc;
}

/* ---- files and directories alike ---- */

static size_t n_tensors(const subject *s) {
  return s->g ? mr_gguf_n_tensors(s->g) : s->st ? mr_safetensors_n(s->st) : 0;
}

static const mr_gguf_tensor *tensor_at(const subject *s, size_t i) {
  return s->g ? mr_gguf_tensor_at(s->g, i) : mr_safetensors_at(s->st, i);
}

static int n_files(const subject *s) {
  return s->g ? mr_gguf_files(s->g) : s->st ? (int)mr_safetensors_n_files(s->st) : 0;
}

static uint64_t n_bytes(const subject *s) {
  return s->g ? mr_gguf_bytes(s->g) : s->st ? mr_safetensors_bytes(s->st) : 0;
}

static bool has_template(const subject *s) {
  return s->g ? mr_gguf_find(s->g, "tokenizer.chat_template") != NULL : s->dir.plain.data != NULL;
}

static void close_subject(subject *s) {
  mr_vocab_close(s->v);
  mr_model_close(s->m);
  mr_gguf_close(s->own);
  mr_safetensors_close(s->st);
  mr_hf_dir_close(&s->dir);
}

static int sum_types(const subject *s, type_sum sums[MAX_TYPES]) {
  int n = 0;
  for (int type = 0; type < MAX_TYPES; type++) {
    type_sum t = {mr_dtype_get(type)->name, 0, 0};
    for (size_t i = 0; i < n_tensors(s); i++)
      if (tensor_at(s, i)->dtype == type) {
        t.count++;
        t.bytes += tensor_at(s, i)->bytes;
      }
    if (t.count)
      sums[n++] = t;
  }
  return n;
}

/* The architecture or the name, in printable form; "" where there is none. */
static const char *text_of(const subject *s, const char *key, char *buf, size_t cap) {
  mr_str t = {"", 0};
  if (s->g) {
    mr_gguf_str(s->g, key, &t, NULL);
  } else if (!strcmp(key, "general.architecture")) {
    const json_t *v = json_object_get(s->dir.config, "model_type");
    t = (mr_str){json_is_string(v) ? json_string_value(v) : "", json_string_length(v)};
  }
  return mr_gguf_show(t, buf, cap);
}

static void warnings(const subject *s, mr_text *out) {
  char name[80];
  if (!s->m)
    return;
  if (s->m->c.context_assumed)
    mr_text_addf(out, "the file says no context length; %d is assumed\n", s->m->c.context);
  if (s->m->n_unused)
    mr_text_addf(out, "%d unknown tensors are ignored, the first is %s\n", s->m->n_unused,
                 mr_gguf_show(s->m->unused, name, sizeof name));
  if (!s->v)
    mr_text_adds(out, "there is no vocabulary: only rows of token ids can be served\n");
}

static void page_model(const mr_model *m) {
  const mr_config *c = &m->c;
  printf("architecture    %s\n", c->arch.name);
  printf("name            %s\n", c->name[0] ? c->name : "-");
  printf("parameters      %llu\n", (unsigned long long)m->n_params);
  printf("layers          %d\n", c->n_layers);
  printf("width           %d, feed-forward %d\n", c->d_model, c->d_ff);
  printf("heads           %d of %d, %d for keys and values\n", c->n_heads, c->head_dim,
         c->n_kv_heads);
  if (c->n_experts)
    printf("experts         %d of %d, %d a token%s\n", c->n_experts, c->d_expert, c->n_experts_used,
           c->d_shared ? ", one shared" : "");
  printf("context         %d tokens%s\n", c->context, c->context_assumed ? " (assumed)" : "");
  if (c->window)
    printf("window          %d tokens\n", c->window);
  printf("output head     %d rows%s\n", c->n_vocab,
         mr_model_tied(m) ? ", tied with the embedding" : "");
}

static void page(const subject *s) {
  char buf[80];
  type_sum sums[MAX_TYPES];
  printf("file            %s\n", s->g ? mr_gguf_path(s->g) : s->path);
  if (s->g)
    printf("format          GGUF version %d, ", mr_gguf_version(s->g));
  else
    printf("format          safetensors, ");
  printf("%d file%s, %llu bytes\n", n_files(s), n_files(s) == 1 ? "" : "s",
         (unsigned long long)n_bytes(s));
  if (s->m) {
    page_model(s->m);
  } else {
    printf("architecture    %s\n", text_of(s, "general.architecture", buf, sizeof buf));
    printf("name            %s\n", text_of(s, "general.name", buf, sizeof buf));
    printf("contents        a vocabulary only\n");
  }
  if (s->v) {
    const char *pre = mr_vocab_pre(s->v);
    printf("vocabulary      %s%s%s, %d tokens, bos %d%s, eos %d\n", mr_vocab_kind(s->v),
           *pre ? " " : "", pre, mr_vocab_size(s->v), mr_vocab_bos(s->v),
           mr_vocab_adds_bos(s->v) ? " (added)" : "", mr_vocab_eos(s->v));
    printf("chat template   %s\n", has_template(s) ? "yes" : "no");
  }
  int n = sum_types(s, sums);
  for (int i = 0; i < n; i++)
    printf("%-15s %-8s %5d tensors %14llu bytes\n", i ? "" : "tensors", sums[i].name, sums[i].count,
           (unsigned long long)sums[i].bytes);
  mr_text w = {0};
  warnings(s, &w);
  for (char *line = w.data; line && *line; line = strchr(line, '\n') + 1)
    printf("warning         %.*s\n", (int)strcspn(line, "\n"), line);
  mr_text_free(&w);
}

static json_t *json_model(const mr_model *m) {
  const mr_config *c = &m->c;
  return json_pack("{s:I s:i s:i s:i s:i s:i s:i s:i s:i s:i s:b s:b}", "parameters",
                   (json_int_t)m->n_params, "layers", c->n_layers, "d_model", c->d_model, "d_ff",
                   c->d_ff, "heads", c->n_heads, "kv_heads", c->n_kv_heads, "head_dim", c->head_dim,
                   "context", c->context, "window", c->window, "vocab_rows", c->n_vocab,
                   "context_assumed", c->context_assumed, "tied_head",
                   mr_model_tied(m));
}

static json_t *json_vocab(const mr_vocab *v) {
  return json_pack("{s:s s:s s:i s:i s:i s:b}", "kind", mr_vocab_kind(v), "pre", mr_vocab_pre(v),
                   "size", mr_vocab_size(v), "bos", mr_vocab_bos(v), "eos", mr_vocab_eos(v),
                   "adds_bos", mr_vocab_adds_bos(v));
}

static json_t *json_types(const subject *s) {
  type_sum sums[MAX_TYPES];
  int n = sum_types(s, sums);
  json_t *list = json_array();
  for (int i = 0; i < n; i++)
    json_array_append_new(list, json_pack("{s:s s:i s:I}", "type", sums[i].name, "count",
                                          sums[i].count, "bytes", (json_int_t)sums[i].bytes));
  return list;
}

static json_t *json_warnings(const subject *s) {
  mr_text w = {0};
  json_t *list = json_array();
  warnings(s, &w);
  for (char *line = w.data; line && *line; line = strchr(line, '\n') + 1)
    json_array_append_new(list, json_stringn(line, strcspn(line, "\n")));
  mr_text_free(&w);
  return list;
}

/* A path need not be UTF-8; JSON text must be. */
static const char *path_of(const subject *s, char *buf, size_t cap) {
  const char *path = s->g ? mr_gguf_path(s->g) : s->path;
  mr_str t = {path, strlen(path)};
  return mr_utf8_valid(t.s, t.len) < 0 ? t.s : mr_gguf_show(t, buf, cap);
}

static mr_code print_json(const subject *s, mr_err *err) {
  char arch[80], name[80], path[512];
  mr_json_ran_out(); /* before this */
  json_t *o = json_pack(
      "{s:s s:s s:o s:i s:I s:s s:s s:b s:o s:o}", "file", path_of(s, path, sizeof path), "format",
      s->g ? "gguf" : "safetensors", "gguf_version",
      s->g ? json_integer(mr_gguf_version(s->g)) : json_null(), "files", n_files(s), "bytes",
      (json_int_t)n_bytes(s), "architecture", text_of(s, "general.architecture", arch, sizeof arch),
      "name", s->m ? s->m->c.name : text_of(s, "general.name", name, sizeof name), "chat_template",
      has_template(s), "tensors", json_types(s), "warnings", json_warnings(s));
  json_object_set_new(o, "model", s->m ? json_model(s->m) : json_null());
  json_object_set_new(o, "vocabulary", s->v ? json_vocab(s->v) : json_null());
  char *text = mr_json_dumps(o, JSON_INDENT(2));
  bool no_memory = !text || mr_json_ran_out(); /* a member may be missing */
  json_decref(o);
  bool failed = !no_memory && puts(text) == EOF;
  mr_mem_free(text);
  if (no_memory)
    return mr_err_set(err, MR_E_NOMEM, "out of memory for the page");
  return failed ? mr_err_errno(err, MR_E_IO, NULL, "cannot write to standard output") : MR_OK;
}

static int report(mr_code rc, const mr_err *err) {
  if (rc)
    mr_err_print(err, stderr);
  return mr_err_exit(rc);
}

int mr_cmd_model_info(int argc, char **argv) {
  static const struct option options[] = {
      {"json", no_argument, NULL, 'j'}, {"help", no_argument, NULL, 'h'}, {NULL, 0, NULL, 0}};
  mr_err err = MR_ERR_INIT;
  subject s = {0};
  bool json = false;
  optind = 0;
  opterr = 0;
  for (int c; (c = getopt_long(argc, argv, "h", options, NULL)) != -1;) {
    if (c == 'h')
      return fputs(usage, stdout) == EOF ? MR_E_IO : 0;
    if (c == '?')
      return report(mr_err_set(&err, MR_E_USAGE, "model info: unknown option %s (try --help)",
                               argv[optind - 1]),
                    &err);
    json = true;
  }
  if (argc - optind != 1)
    return report(mr_err_set(&err, MR_E_USAGE, "model info: give one model file (try --help)"),
                  &err);
  mr_code rc = open_subject(&s, argv[optind], &err);
  if (rc == MR_OK && json)
    rc = print_json(&s, &err);
  else if (rc == MR_OK)
    page(&s);
  close_subject(&s);
  if (rc == MR_OK && fflush(stdout) == EOF)
    rc = mr_err_errno(&err, MR_E_IO, NULL, "cannot write to standard output");
  return report(rc, &err);
}
