#include "src/hf_dir.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include "io/json.h"
#include "io/mem.h"
#include "io/slurp.h"
#include "io/sys.h"
#include "src/hf_tokenizer.h"

#define MAX_SMALL ((size_t)64 << 20)
#define MAX_TOKENIZER ((size_t)512 << 20)
#define MAX_TEMPLATE ((size_t)16 << 20)

bool mr_hf_dir_is(const char *path) {
  struct stat st;
  return mr_sys_now->stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

/* ---- files ---- */

/* The file of the directory; nothing is added when it is not there. */
static mr_code read_file(const mr_hf_dir *d, const char *name, size_t limit, mr_text *path,
                         mr_text *out, mr_err *err) {
  mr_text_clear(path);
  mr_text_addf(path, "%s/%s", d->path, name);
  if (path->failed)
    return mr_hf_no_memory(err);
  int fd = mr_sys_now->open(path->data, O_RDONLY | O_CLOEXEC, 0);
  if (fd < 0 && (errno == ENOENT || errno == ENOTDIR))
    return MR_OK;
  if (fd < 0)
    return mr_err_errno(err, MR_E_NOINPUT, path->data, "cannot open");
  mr_code c = mr_slurp(fd, path->data, limit, out, err);
  mr_sys_now->close(fd);
  return c;
}

/* The value of a JSON file, an object; NULL when it is not there. Integers beyond 64 bits, which
 * stand for "no limit" in these files, are reals. */
static mr_code read_json(const mr_hf_dir *d, const char *name, size_t limit, json_t **out,
                         mr_err *err) {
  mr_text path = {0}, t = {0};
  mr_err own = MR_ERR_INIT;
  bool too_big = false;
  *out = NULL;
  mr_code c = read_file(d, name, limit, &path, &t, err);
  if (!c && t.data) {
    size_t bom = mr_json_bom(t.data, t.len);
    *out = mr_json_parse(t.data + bom, t.len - bom, &too_big, &own);
    mr_json_ran_out();
    if (!*out && too_big)
      *out = mr_json_parse_lossy(t.data + bom, t.len - bom);
    if (!*out && mr_json_ran_out())
      c = mr_hf_no_memory(err);
    else if (!*out)
      c = mr_err_at(err, own.code ? own.code : MR_E_DATA, path.data, own.line, own.offset, "%s",
                    own.text);
    else if (!json_is_object(*out))
      c = mr_err_at(err, MR_E_DATA, path.data, 0, -1, "is not a JSON object");
  }
  mr_text_free(&path);
  mr_text_free(&t);
  return c;
}

/* ---- chat templates ---- */

static void take(mr_text *to, const json_t *s) {
  if (json_is_string(s) && !to->len)
    mr_text_add(to, json_string_value(s), json_string_length(s));
}

/* A template, or a list of named ones. */
static void read_config_templates(mr_hf_dir *d) {
  json_t *all = json_object_get(d->tokenizer, "chat_template"), *item;
  size_t i;
  take(&d->plain, all);
  json_array_foreach(all, i, item) {
    const char *name = json_string_value(json_object_get(item, "name"));
    const json_t *s = json_object_get(item, "template");
    if (name && !strcmp(name, "default"))
      take(&d->plain, s);
    else if (name && !strcmp(name, "tool_use"))
      take(&d->with_tools, s);
  }
}

static mr_code read_templates(mr_hf_dir *d, mr_err *err) {
  mr_text path = {0};
  mr_code c = read_file(d, "chat_template.jinja", MAX_TEMPLATE, &path, &d->plain, err);
  if (!c)
    c = read_file(d, "additional_chat_templates/tool_use.jinja", MAX_TEMPLATE, &path,
                  &d->with_tools, err);
  mr_text_free(&path);
  if (c)
    return c;
  read_config_templates(d);
  return d->plain.failed || d->with_tools.failed ? mr_hf_no_memory(err) : MR_OK;
}

/* ---- the directory ---- */

mr_code mr_hf_dir_open(mr_hf_dir *d, const char *path, mr_err *err) {
  size_t n = strlen(path);
  *d = (mr_hf_dir){0};
  while (n > 1 && path[n - 1] == '/')
    n--;
  d->path = mr_mem_copy(path, n);
  mr_code c = d->path ? MR_OK : mr_hf_no_memory(err);
  c = c ? c : read_json(d, "config.json", MAX_SMALL, &d->config, err);
  if (!c && !d->config)
    c = mr_err_at(err, MR_E_DATA, path, 0, -1,
                  "is a directory without config.json: it holds no model");
  c = c ? c : read_json(d, "tokenizer_config.json", MAX_SMALL, &d->tokenizer, err);
  c = c ? c : read_json(d, "special_tokens_map.json", MAX_SMALL, &d->special_map, err);
  c = c ? c : read_json(d, "generation_config.json", MAX_SMALL, &d->generation, err);
  c = c ? c : read_templates(d, err);
  if (c)
    mr_hf_dir_close(d);
  return c;
}

void mr_hf_dir_close(mr_hf_dir *d) {
  json_decref(d->config);
  json_decref(d->tokenizer);
  json_decref(d->generation);
  json_decref(d->special_map);
  mr_text_free(&d->plain);
  mr_text_free(&d->with_tools);
  mr_mem_free(d->path);
  *d = (mr_hf_dir){0};
}

bool mr_hf_dir_has_weights(const mr_hf_dir *d) {
  static const char *const names[] = {"model.safetensors", "model.safetensors.index.json"};
  char path[4096];
  struct stat st;
  for (int i = 0; i < 2; i++) {
    snprintf(path, sizeof path, "%s/%s", d->path, names[i]);
    if (mr_sys_now->stat(path, &st) == 0)
      return true;
  }
  return false;
}

/* A member of config.json, or of the part of it that describes the text model. */
static const json_t *member(const mr_hf_dir *d, const char *key) {
  static const char *const parts[] = {"text_config", "llm_config", "language_config"};
  const json_t *v = json_object_get(d->config, key);
  for (size_t i = 0; (!v || json_is_null(v)) && i < sizeof parts / sizeof parts[0]; i++)
    v = json_object_get(json_object_get(d->config, parts[i]), key);
  return v;
}

int64_t mr_hf_dir_context(const mr_hf_dir *d) {
  static const char *const keys[] = {"max_position_embeddings", "n_positions", "max_seq_len",
                                     "max_sequence_length",     "seq_length",  "n_ctx",
                                     "model_max_length"};
  for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
    json_int_t n = json_integer_value(member(d, keys[i]));
    if (n > 0)
      return n;
  }
  return 0;
}

int64_t mr_hf_dir_vocab_size(const mr_hf_dir *d) {
  json_int_t n = json_integer_value(member(d, "vocab_size"));
  return n > 0 ? n : 0;
}

const json_t *mr_hf_dir_token(const mr_hf_dir *d, const char *name) {
  const json_t *places[] = {d->tokenizer, d->special_map};
  for (int i = 0; i < 2; i++) {
    const json_t *t = json_object_get(places[i], name);
    if (json_is_object(t))
      t = json_object_get(t, "content");
    if (json_is_string(t))
      return t;
    if (json_is_null(t))
      return NULL; /* said to be none */
  }
  return NULL;
}

/* ---- the vocabulary ---- */

static int32_t id_of(const mr_hf_dir *d, const mr_vocab *v, const char *name) {
  const json_t *t = mr_hf_dir_token(d, name);
  return t ? mr_vocab_find(v, json_string_value(t), json_string_length(t)) : -1;
}

/* Puts the id at the front or the end of the list, or takes it out. */
static mr_code set_added(mr_ids *list, int32_t id, bool want, bool front, mr_err *err) {
  size_t n = 0;
  bool has = false;
  for (size_t i = 0; i < list->n; i++)
    has = has || list->ids[i] == id;
  if (has == want || id < 0)
    return MR_OK;
  if (!want) {
    for (size_t i = 0; i < list->n; i++)
      if (list->ids[i] != id)
        list->ids[n++] = list->ids[i];
    list->n = n;
    return MR_OK;
  }
  if (!mr_ids_push(list, id))
    return mr_hf_no_memory(err);
  if (front)
    memmove(list->ids + 1, list->ids, (list->n - 1) * sizeof *list->ids);
  list->ids[front ? 0 : list->n - 1] = id;
  return MR_OK;
}

/* One id, or a list of them; false when none is named. */
static bool mark_ends(mr_vocab *v, const json_t *ids) {
  bool any = false;
  for (size_t i = 0, n = json_is_array(ids) ? json_array_size(ids) : 1; i < n; i++) {
    const json_t *id = json_is_array(ids) ? json_array_get(ids, i) : ids;
    json_int_t k = json_is_integer(id) ? json_integer_value(id) : -1;
    if (k < 0 || k >= v->n)
      continue;
    any = true;
    v->mark[k] |= MR_MARK_END;
    if (v->eos < 0)
      v->eos = (int32_t)k;
  }
  return any;
}

static mr_code set_special(const mr_hf_dir *d, mr_vocab *v, mr_err *err) {
  const json_t *bos = json_object_get(d->tokenizer, "add_bos_token");
  const json_t *eos = json_object_get(d->tokenizer, "add_eos_token");
  mr_hf *h = v->hf;
  mr_code c = MR_OK;
  v->bos = id_of(d, v, "bos_token");
  v->eos = id_of(d, v, "eos_token");
  if (v->bos < 0 && h->prefix.n == 1)
    v->bos = h->prefix.ids[0];
  if (v->eos >= 0)
    v->mark[v->eos] |= MR_MARK_END;
  if (!mark_ends(v, json_object_get(d->generation, "eos_token_id")) &&
      !mark_ends(v, member(d, "eos_token_id")))
    mr_vocab_mark_ends(v);
  if (json_is_boolean(bos))
    c = set_added(&h->prefix, v->bos, json_is_true(bos), true, err);
  if (!c && json_is_boolean(eos))
    c = set_added(&h->suffix, v->eos, json_is_true(eos), false, err);
  for (size_t i = 0; i < h->prefix.n; i++)
    v->add_bos = v->add_bos || h->prefix.ids[i] == v->bos;
  v->add_eos = h->suffix.n > 0;
  return c;
}

mr_code mr_hf_dir_vocab(const mr_hf_dir *d, mr_vocab **out, mr_err *err) {
  json_t *root = NULL;
  mr_err own = MR_ERR_INIT;
  char path[512];
  *out = NULL;
  mr_code c = read_json(d, "tokenizer.json", MAX_TOKENIZER, &root, &own);
  if (!c && root)
    c = mr_hf_open(out, root, json_object_get(d->tokenizer, "added_tokens_decoder"), &own);
  if (!c && root)
    c = set_special(d, *out, &own);
  json_decref(root);
  if (!c)
    return MR_OK;
  mr_vocab_close(*out);
  *out = NULL;
  snprintf(path, sizeof path, "%s/tokenizer.json", d->path);
  return mr_err_at(err, c, own.file[0] ? own.file : path, own.line, own.offset, "%s", own.text);
}
