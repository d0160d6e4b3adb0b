#include "io/weights.h"

#include <stdio.h>
#include <string.h>

#include "io/hash.h"
#include "io/mem.h"
#include "io/sys.h"

bool mr_path_is_directory(const char *path) {
  struct stat st;
  return mr_sys_now->stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

mr_code mr_weights_open(mr_weights **out, const char *path, mr_err *err) {
  *out = NULL;
  mr_weights *w = mr_mem_alloc(1, sizeof *w);
  if (!w || !(w->path = mr_mem_copy(path, strlen(path)))) {
    mr_mem_free(w);
    return mr_err_at(err, MR_E_NOMEM, path, 0, -1, "no memory");
  }
  mr_code rc = mr_path_is_directory(path) ? mr_safetensors_open(&w->st, path, err)
                                          : mr_gguf_open(&w->gguf, path, err);
  if (rc)
    mr_weights_close(w);
  else
    *out = w;
  return rc;
}

void mr_weights_close(mr_weights *w) {
  if (!w)
    return;
  mr_gguf_close(w->gguf);
  mr_safetensors_close(w->st);
  mr_mem_free(w->path);
  mr_mem_free(w);
}

uint64_t mr_weights_bytes(const mr_weights *w) {
  return w->st ? mr_safetensors_bytes(w->st) : mr_gguf_bytes(w->gguf);
}

size_t mr_weights_n(const mr_weights *w) {
  return w->st ? mr_safetensors_n(w->st) : mr_gguf_n_tensors(w->gguf);
}

const mr_gguf_tensor *mr_weights_at(const mr_weights *w, size_t i) {
  return w->st ? mr_safetensors_at(w->st, i) : mr_gguf_tensor_at(w->gguf, i);
}

const mr_gguf_tensor *mr_weights_find(const mr_weights *w, const char *name) {
  return w->st ? mr_safetensors_find(w->st, name) : mr_gguf_find_tensor(w->gguf, name);
}

/* The name and digest of a file of the directory; nothing where it is not there and need not be. */
static mr_code add_file(mr_hasher *h, const char *dir, const char *name, bool needed, mr_err *err) {
  char path[4096], hex[MR_HASH_HEX];
  mr_err own = MR_ERR_INIT;
  if (snprintf(path, sizeof path, "%s/%s", dir, name) >= (int)sizeof path)
    return mr_err_at(err, MR_E_NOINPUT, dir, 0, -1, "the path is too long");
  mr_code rc = mr_hash_file(path, hex, NULL, &own);
  if (rc == MR_E_NOINPUT && !needed)
    return MR_OK;
  if (rc)
    return mr_err_at(err, rc, path, 0, -1, "%s", own.text);
  mr_hasher_add(h, name, strlen(name));
  mr_hasher_add(h, hex, MR_HASH_HEX - 1);
  return MR_OK;
}

/* All of a directory that its results depend on: what a text becomes and where it ends, too. */
static mr_code add_directory(mr_hasher *h, const mr_weights *w, mr_err *err) {
  static const char *const others[] = {
      "tokenizer.json",          "tokenizer_config.json",
      "special_tokens_map.json", "generation_config.json",
      "chat_template.jinja",     "additional_chat_templates/tool_use.jinja"};
  mr_code rc = add_file(h, w->path, "config.json", true, err);
  for (size_t i = 0; i < sizeof others / sizeof *others && !rc; i++)
    rc = add_file(h, w->path, others[i], false, err);
  for (size_t i = 0; i < mr_safetensors_n_files(w->st) && !rc; i++) {
    uint64_t bytes;
    const uint8_t *p = mr_safetensors_file(w->st, i, &bytes);
    mr_hasher_add(h, p, (size_t)bytes);
  }
  return rc;
}

mr_code mr_weights_digest(const mr_weights *w, char out[33], mr_err *err) {
  if (w->gguf)
    return mr_gguf_digest(w->gguf, out, err);
  mr_hasher *h = mr_hasher_new();
  if (!h)
    return mr_err_at(err, MR_E_NOMEM, w->path, 0, -1, "no memory");
  mr_code rc = add_directory(h, w, err);
  if (!rc)
    mr_hasher_hex(h, out);
  mr_hasher_free(h);
  return rc;
}
