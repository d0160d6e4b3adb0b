#include "src/prompt.h"

#include <string.h>

#include "io/mem.h"
#include "src/config.h"
#include "src/hf_dir.h"

struct mr_prompter {
  mr_vocab *vocab;                 /* NULL: none */
  mr_template *plain, *with_tools; /* NULL: none, or it does not parse */
  mr_err template_error;           /* why `plain` does not parse */
  json_t *variables;               /* special tokens by name */
  char *bos;                       /* text of BOS, owned; NULL: none */
  size_t bos_len;
  int context;
  int32_t vocab_size;
  char *name;
};

/* ---- opening ---- */

static mr_code read_sizes(mr_prompter *p, const mr_gguf *g, mr_err *err) {
  if (mr_gguf_find_tensor(g, "token_embd.weight")) {
    mr_config *c = mr_mem_alloc(1, sizeof *c);
    if (!c)
      return mr_err_set(err, MR_E_NOMEM, "out of memory");
    mr_code code = mr_config_from_gguf(c, g, err);
    p->context = c->context;
    p->vocab_size = c->n_vocab;
    mr_mem_free(c);
    return code;
  }
  char key[160]; /* a file that holds only a vocabulary */
  mr_str arch = {"", 0};
  uint32_t context = 0;
  mr_err ignored = MR_ERR_INIT;
  mr_gguf_str(g, "general.architecture", &arch, &ignored);
  snprintf(key, sizeof key, "%.*s.context_length", (int)(arch.len < 100 ? arch.len : 100), arch.s);
  mr_gguf_u32(g, key, &context, &ignored);
  p->context = context > INT32_MAX ? INT32_MAX : (int)context;
  p->vocab_size = p->vocab ? mr_vocab_size(p->vocab) : 0;
  return MR_OK;
}

/* What the number of a split model's part looks like: -00001-of-00003. */
static bool is_part(const char *s) {
  for (int i = 0; i < 15; i++) {
    static const char form[] = "-00000-of-00000";
    bool digit = s[i] >= '0' && s[i] <= '9';
    if (form[i] == '0' ? !digit : s[i] != form[i])
      return false;
  }
  return true;
}

/* Bytes that are no UTF-8 become U+FFFD. */
static bool read_name(mr_prompter *p, const char *path, bool file) {
  const char *slash = strrchr(path, '/'), *s = slash && slash[1] ? slash + 1 : path;
  size_t n = strlen(s);
  mr_text name = {0};
  if (file && n > 5 && !strcmp(s + n - 5, ".gguf"))
    n -= 5;
  if (file && n > 15 && is_part(s + n - 15))
    n -= 15;
  for (size_t at = 0; at < n;) {
    uint32_t code;
    at += (size_t)mr_utf8_next(s + at, n - at, &code);
    mr_text_add_code(&name, code);
  }
  p->name = name.data;
  if (name.failed || !name.data) {
    mr_text_free(&name);
    p->name = NULL;
  }
  return p->name != NULL;
}

/* A template that does not parse is passed over; one that memory was short for would be missed. */
static mr_code either_ran_out(mr_code plain, mr_code with_tools, mr_err *err) {
  return plain == MR_E_NOMEM || with_tools == MR_E_NOMEM
             ? mr_err_set(err, MR_E_NOMEM, "out of memory for the chat template")
             : MR_OK;
}

static mr_code read_template(mr_template **out, const mr_gguf *g, const char *key, mr_err *err) {
  mr_str text;
  mr_err wrong = MR_ERR_INIT;
  *out = NULL;
  if (!mr_gguf_str(g, key, &text, &wrong)) {
    if (wrong.code && err)
      *err = wrong;
    return wrong.code;
  }
  return mr_template_parse(out, text.s, text.len, err);
}

static mr_code read_templates(mr_prompter *p, const mr_gguf *g, mr_err *err) {
  mr_err ignored = MR_ERR_INIT;
  mr_code c = read_template(&p->plain, g, "tokenizer.chat_template", &p->template_error);
  mr_code of_tools = read_template(&p->with_tools, g, "tokenizer.chat_template.tool_use", &ignored);
  return either_ran_out(c, of_tools, err);
}

/* The text of a special token as a template variable. */
static bool set_token(mr_prompter *p, const char *name, int32_t id) {
  mr_str text;
  if (id < 0 || !mr_vocab_piece(p->vocab, id, &text) || mr_utf8_valid(text.s, text.len) >= 0)
    return true;
  return json_object_set_new(p->variables, name, json_stringn(text.s, text.len)) == 0;
}

static bool keep_bos(mr_prompter *p) {
  mr_str bos;
  if (mr_vocab_bos(p->vocab) < 0 || !mr_vocab_piece(p->vocab, mr_vocab_bos(p->vocab), &bos))
    return true;
  p->bos = mr_mem_copy(bos.s, bos.len);
  p->bos_len = bos.len;
  return p->bos != NULL;
}

static bool read_tokens(mr_prompter *p, const mr_gguf *g) {
  uint32_t unk = UINT32_MAX, pad = UINT32_MAX;
  mr_err ignored = MR_ERR_INIT;
  p->variables = json_object();
  if (!p->variables || !p->vocab)
    return p->variables != NULL;
  mr_gguf_u32(g, "tokenizer.ggml.unknown_token_id", &unk, &ignored);
  mr_gguf_u32(g, "tokenizer.ggml.padding_token_id", &pad, &ignored);
  return keep_bos(p) && set_token(p, "bos_token", mr_vocab_bos(p->vocab)) &&
         set_token(p, "eos_token", mr_vocab_eos(p->vocab)) &&
         set_token(p, "unk_token", unk <= INT32_MAX ? (int32_t)unk : -1) &&
         set_token(p, "pad_token", pad <= INT32_MAX ? (int32_t)pad : -1);
}

static mr_code fill(mr_prompter *p, const mr_gguf *g, const char *path, mr_err *err) {
  mr_code c = mr_vocab_present(g) ? mr_vocab_open(&p->vocab, g, err) : MR_OK;
  if (!c)
    c = read_sizes(p, g, err);
  if (!c)
    c = read_templates(p, g, err);
  if (!c && (!read_name(p, path, true) || !read_tokens(p, g)))
    c = mr_err_set(err, MR_E_NOMEM, "out of memory");
  return c;
}

/* ---- a directory ---- */

static mr_code dir_template(mr_template **out, const mr_text *source, mr_err *err) {
  return source->data ? mr_template_parse(out, source->data, source->len, err) : MR_OK;
}

static bool dir_tokens(mr_prompter *p, const mr_hf_dir *d) {
  static const char *const names[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                      "pad_token", "cls_token", "mask_token"};
  p->variables = json_object();
  for (size_t i = 0; p->variables && i < sizeof names / sizeof names[0]; i++) {
    const json_t *t = mr_hf_dir_token(d, names[i]);
    if (t && json_object_set_new(p->variables, names[i],
                                 json_stringn(json_string_value(t), json_string_length(t))))
      return false;
  }
  return p->variables && (!p->vocab || keep_bos(p));
}

static int limited(int64_t n) {
  return n > INT32_MAX ? INT32_MAX : (int)n;
}

/* A directory with weights must be of a known architecture; one with only a vocabulary need not. */
static mr_code dir_sizes(mr_prompter *p, const mr_hf_dir *d, mr_err *err) {
  if (mr_hf_dir_has_weights(d)) {
    mr_config *c = mr_mem_alloc(1, sizeof *c);
    if (!c)
      return mr_err_set(err, MR_E_NOMEM, "out of memory");
    mr_code code = mr_config_from_dir(c, d->path, err);
    p->context = c->context;
    p->vocab_size = c->n_vocab;
    mr_mem_free(c);
    return code;
  }
  p->context = limited(mr_hf_dir_context(d));
  if (!p->context)
    p->context = MR_DEFAULT_CONTEXT;
  p->vocab_size = limited(mr_hf_dir_vocab_size(d));
  if (!p->vocab_size && p->vocab)
    p->vocab_size = mr_vocab_size(p->vocab);
  return MR_OK;
}

static mr_code fill_from_dir(mr_prompter *p, const mr_hf_dir *d, mr_err *err) {
  mr_err ignored = MR_ERR_INIT;
  mr_code c = mr_hf_dir_vocab(d, &p->vocab, err);
  if (c)
    return c;
  c = dir_sizes(p, d, err);
  if (c)
    return c;
  c = dir_template(&p->plain, &d->plain, &p->template_error);
  c = either_ran_out(c, dir_template(&p->with_tools, &d->with_tools, &ignored), err);
  if (!c && (!read_name(p, d->path, false) || !dir_tokens(p, d)))
    c = mr_err_set(err, MR_E_NOMEM, "out of memory");
  return c;
}

/* ---- either ---- */

static mr_code open_dir(mr_prompter *p, const char *path, mr_err *err) {
  mr_hf_dir d;
  mr_code c = mr_hf_dir_open(&d, path, err);
  if (c)
    return c;
  c = fill_from_dir(p, &d, err);
  mr_hf_dir_close(&d);
  return c;
}

static mr_code open_file(mr_prompter *p, const char *path, mr_err *err) {
  mr_gguf *g = NULL;
  mr_code c = mr_gguf_open(&g, path, err);
  if (c)
    return c;
  c = fill(p, g, path, err);
  mr_gguf_close(g);
  return c;
}

mr_code mr_prompter_open(mr_prompter **out, const char *model_path, mr_err *err) {
  *out = NULL;
  mr_prompter *p = mr_mem_alloc(1, sizeof *p);
  if (!p)
    return mr_err_set(err, MR_E_NOMEM, "out of memory");
  p->template_error = (mr_err)MR_ERR_INIT;
  mr_code c =
      mr_hf_dir_is(model_path) ? open_dir(p, model_path, err) : open_file(p, model_path, err);
  if (c)
    mr_prompter_close(p);
  else
    *out = p;
  return c;
}

void mr_prompter_close(mr_prompter *p) {
  if (!p)
    return;
  mr_template_free(p->plain);
  mr_template_free(p->with_tools);
  mr_vocab_close(p->vocab);
  json_decref(p->variables);
  mr_mem_free(p->bos);
  mr_mem_free(p->name);
  mr_mem_free(p);
}

/* ---- what it knows ---- */

const mr_vocab *mr_prompter_vocab(const mr_prompter *p) {
  return p->vocab;
}

int mr_prompter_context(const mr_prompter *p) {
  return p->context;
}

int32_t mr_prompter_vocab_size(const mr_prompter *p) {
  return p->vocab_size;
}

const char *mr_prompter_name(const mr_prompter *p) {
  return p->name;
}

const json_t *mr_prompter_variables(const mr_prompter *p) {
  return p->variables;
}

const mr_template *mr_prompter_template(const mr_prompter *p, bool tools, mr_err *err) {
  if (tools && p->with_tools)
    return p->with_tools;
  if (p->plain)
    return p->plain;
  if (p->template_error.code && err && !err->code)
    *err = p->template_error;
  else if (!p->template_error.code)
    mr_err_set(err, MR_E_DATA,
               "the model has no chat template (tokenizer.chat_template, or chat_template.jinja of "
               "a directory): give the row a prompt "
               "instead of messages");
  return NULL;
}

/* ---- rows to ids ---- */

static mr_code need_vocab(const mr_prompter *p, mr_err *err) {
  if (p->vocab)
    return MR_OK;
  return mr_err_set(err, MR_E_DATA,
                    "the model has no vocabulary: give the row token ids instead of text");
}

static int set_or_null(json_t *o, const char *key, json_t *v) {
  return v ? json_object_set(o, key, v) : json_object_set_new(o, key, json_null());
}

/* New reference; NULL: out of memory. */
static json_t *variables_of(const mr_prompter *p, const mr_chat *chat) {
  json_t *v = json_copy(p->variables);
  bool good = v && (!chat->kwargs || json_object_update(v, chat->kwargs) == 0) &&
              set_or_null(v, "messages", chat->messages) == 0 &&
              set_or_null(v, "tools", chat->tools) == 0 &&
              set_or_null(v, "documents", chat->documents) == 0;
  /* A row may also set add_generation_prompt in its kwargs, where it means more than the default.
   */
  if (good && !(chat->kwargs && json_object_get(chat->kwargs, "add_generation_prompt")))
    good = json_object_set_new(v, "add_generation_prompt",
                               json_boolean(chat->add_generation_prompt)) == 0;
  if (good)
    return v;
  json_decref(v);
  return NULL;
}

/* The template itself wrote BOS first. */
static bool begins_with_bos(const mr_prompter *p, const mr_rendered *r) {
  return p->bos && p->bos_len && r->text.len >= p->bos_len &&
         memcmp(r->text.data, p->bos, p->bos_len) == 0 && !memchr(r->taint.data, 1, p->bos_len);
}

static mr_code tokenize(const mr_prompter *p, const mr_rendered *r, mr_ids *out, mr_err *err) {
  size_t before = out->n;
  if (mr_vocab_adds_bos(p->vocab) && !begins_with_bos(p, r) && mr_vocab_bos(p->vocab) >= 0 &&
      !mr_ids_push(out, mr_vocab_bos(p->vocab)))
    return mr_err_set(err, MR_E_NOMEM, "out of memory");
  mr_code c = mr_tokenizer_encode(p->vocab, r->text.data ? r->text.data : "", r->text.len,
                                  (const uint8_t *)r->taint.data, MR_TOK_PARSE_SPECIAL, out, err);
  if (c)
    out->n = before;
  return c;
}

mr_code mr_prompter_chat(const mr_prompter *p, const mr_chat *chat, mr_ids *out, mr_err *err) {
  mr_rendered r = {0};
  const mr_template *t = mr_prompter_template(p, json_array_size(chat->tools) > 0, err);
  if (!t)
    return err && err->code ? err->code : MR_E_DATA;
  mr_code c = need_vocab(p, err);
  if (c)
    return c;
  json_t *vars = variables_of(p, chat);
  if (!vars)
    return mr_err_set(err, MR_E_NOMEM, "out of memory");
  c = mr_template_render(t, vars, &mr_template_default_limits, chat->now, &r, NULL, err);
  json_decref(vars);
  if (!c)
    c = tokenize(p, &r, out, err);
  mr_rendered_free(&r);
  return c;
}

mr_code mr_prompter_text(const mr_prompter *p, const char *text, size_t len, mr_ids *out,
                         mr_err *err) {
  mr_code c = need_vocab(p, err);
  size_t before = out->n;
  if (c)
    return c;
  if (mr_vocab_adds_bos(p->vocab) && mr_vocab_bos(p->vocab) >= 0 &&
      !mr_ids_push(out, mr_vocab_bos(p->vocab)))
    return mr_err_set(err, MR_E_NOMEM, "out of memory");
  c = mr_tokenizer_encode(p->vocab, text, len, NULL, 0, out, err);
  if (c)
    out->n = before;
  return c;
}

mr_code mr_prompter_continuation(const mr_prompter *p, const char *text, size_t len, mr_ids *out,
                                 mr_err *err) {
  mr_code c = need_vocab(p, err);
  return c ? c : mr_tokenizer_encode(p->vocab, text, len, NULL, 0, out, err);
}
