#include "jobs/texts.h"

#include <string.h>

#include "io/json.h"
#include "io/lines.h"
#include "io/mem.h"

#define MAX_LINE ((size_t)16 << 20)
#define EVERY 4 /* of so many windows one is held back */

typedef struct reader {
  mr_texts *t;
  const mr_prompter *p;
  const char *path;
  int window;
  int64_t max_tokens;
  mr_err *err;
} reader;

static mr_code no_memory(mr_err *err) {
  return mr_err_set(err, MR_E_NOMEM, "out of memory for the texts");
}

static mr_code add_ids(reader *r, const json_t *list, mr_ids *ids) {
  size_t i;
  json_t *v;
  json_array_foreach((json_t *)(uintptr_t)list, i, v) {
    json_int_t id = json_is_integer(v) ? json_integer_value(v) : -1;
    if (id < 0 || id >= mr_prompter_vocab_size(r->p))
      return mr_err_set(r->err, MR_E_DATA, "prompt: entry %zu is no token id of this model", i);
    if (!mr_ids_push(ids, (int32_t)id))
      return no_memory(r->err);
  }
  return MR_OK;
}

/* The text that follows the prompt: the first that is there. */
static mr_code add_answer(reader *r, const json_t *row, mr_ids *ids) {
  static const char *const keys[] = {"continuation", "output", "answer"};
  for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
    const json_t *v = json_object_get(row, keys[i]);
    if (json_is_array(v))
      v = json_array_get(v, 0);
    if (json_is_string(v))
      return mr_prompter_continuation(r->p, json_string_value(v), json_string_length(v), ids,
                                      r->err);
  }
  return MR_OK;
}

static mr_code row_ids(reader *r, const json_t *row, mr_ids *ids) {
  const json_t *body = json_object_get(row, "body");
  const json_t *o = json_is_object(body) ? body : row;
  json_t *messages = json_object_get(o, "messages");
  const json_t *text = json_object_get(o, "text"), *prompt = json_object_get(o, "prompt");
  mr_code rc;
  text = json_is_string(text) ? text : prompt;
  if (json_is_array(messages)) {
    mr_chat chat = {.messages = messages};
    rc = mr_prompter_chat(r->p, &chat, ids, r->err);
  } else if (json_is_string(text)) {
    rc = mr_prompter_text(r->p, json_string_value(text), json_string_length(text), ids, r->err);
  } else if (json_is_array(prompt)) {
    rc = add_ids(r, prompt, ids);
  } else {
    return mr_err_set(r->err, MR_E_DATA, "the row has neither text, prompt nor messages");
  }
  return rc ? rc : add_answer(r, row, ids);
}

/* Cuts ids into windows that the texts own. */
static mr_code add_windows(reader *r, const mr_ids *ids) {
  mr_texts *t = r->t;
  size_t n = ids->n;
  if ((int64_t)n > r->max_tokens - t->tokens)
    n = (size_t)(r->max_tokens - t->tokens);
  if (n < 2)
    return MR_OK;
  int32_t *own = mr_mem_alloc(n, sizeof *own);
  if (!own || !mr_mem_grow((void **)&t->own, &t->cap_own, t->n_own + 1, sizeof *t->own)) {
    mr_mem_free(own);
    return no_memory(r->err);
  }
  t->own[t->n_own++] = own;
  memcpy(own, ids->ids, n * sizeof *own);
  for (size_t at = 0, some; at < n; at += some) {
    some = n - at < (size_t)r->window ? n - at : (size_t)r->window;
    if (!mr_mem_grow((void **)&t->rows, &t->cap, t->n + 1, sizeof *t->rows))
      return no_memory(r->err);
    t->rows[t->n++] = (mr_tokens){own + at, (int)some};
  }
  t->tokens += (int64_t)n;
  return MR_OK;
}

static mr_code take_line(reader *r, const mr_line *line) {
  mr_ids ids = {0};
  json_t *row = NULL;
  mr_code rc = MR_OK;
  if (line->too_long)
    rc = mr_err_set(r->err, MR_E_DATA, "the line is longer than %zu MiB", MAX_LINE >> 20);
  else if (!(row = mr_json_parse(line->s, line->len, NULL, r->err)))
    rc = r->err->code;
  if (!rc)
    rc = row_ids(r, row, &ids);
  if (!rc)
    rc = add_windows(r, &ids);
  if (rc)
    mr_err_place(r->err, r->path, (int64_t)line->number, -1);
  json_decref(row);
  mr_ids_free(&ids);
  return rc;
}

static mr_code take_source(reader *r, mr_source *source) {
  mr_lines lines;
  mr_line line;
  bool more;
  mr_code rc;
  mr_lines_init(&lines, source, MAX_LINE, NULL);
  while (!(rc = mr_source_next(source, &more, r->err)) && more) {
    mr_lines_start(&lines);
    while (!rc && r->t->tokens < r->max_tokens && !(rc = mr_lines_next(&lines, &line, r->err)) &&
           line.s)
      rc = take_line(r, &line);
    if (rc || r->t->tokens >= r->max_tokens)
      break;
  }
  mr_lines_free(&lines);
  return rc;
}

/* Those held back go to the end, in order. */
static mr_code hold_back(mr_texts *t, mr_err *err) {
  mr_tokens *rows = mr_mem_alloc(t->n, sizeof *rows);
  size_t n = 0;
  if (!rows)
    return no_memory(err);
  for (int held = 0; held < 2; held++) {
    for (size_t i = 0; i < t->n; i++) {
      bool hold = t->n < EVERY ? t->n > 1 && i == t->n - 1 : i % EVERY == EVERY - 1;
      if (hold == held)
        rows[n++] = t->rows[i];
    }
    t->n_used = held ? t->n_used : (int)n;
  }
  mr_mem_free(t->rows);
  t->rows = rows;
  t->cap = t->n;
  return MR_OK;
}

mr_code mr_texts_read(mr_texts *t, const mr_prompter *p, const char *path, int window,
                      int64_t max_tokens, mr_err *err) {
  mr_err own = MR_ERR_INIT;
  reader r = {t, p, path, window, max_tokens, &own};
  mr_source *source = NULL;
  *t = (mr_texts){0};
  mr_code rc = mr_source_open(&source, &path, 1, &own);
  if (!rc)
    rc = take_source(&r, source);
  mr_source_close(source);
  if (!rc && !t->n)
    rc = mr_err_at(&own, MR_E_DATA, path, 0, -1, "holds no text of two tokens or more");
  if (!rc)
    rc = hold_back(t, &own);
  if (rc && err && !err->code)
    *err = own;
  return rc;
}

void mr_texts_free(mr_texts *t) {
  for (size_t i = 0; i < t->n_own; i++)
    mr_mem_free(t->own[i]);
  mr_mem_free(t->own);
  mr_mem_free(t->rows);
  *t = (mr_texts){0};
}
