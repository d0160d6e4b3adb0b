#include "jobs/logprobs.h"

#include <string.h>

#include "io/json.h"

/* The bytes of a token into `bytes` (cleared first). */
static void bytes_of(const mr_vocab *v, int32_t id, mr_text *bytes) {
  mr_text_clear(bytes);
  if (v)
    mr_detok_bytes(v, id, bytes);
  else
    mr_text_addf(bytes, "token_id:%d", id);
}

static void add_string(mr_text *t, const mr_text *s) {
  t->failed = t->failed || s->failed;
  mr_json_add_string(t, s->data ? s->data : "", s->len);
}

/* ------------------------------------------------------------------ chat */

static void chat_token(mr_text *t, const mr_vocab *v, int32_t id, float logprob, mr_text *bytes) {
  bytes_of(v, id, bytes);
  mr_text_adds(t, "{\"token\":");
  add_string(t, bytes);
  mr_text_adds(t, ",\"logprob\":");
  mr_json_add_float(t, logprob);
  mr_text_adds(t, ",\"bytes\":");
  if (!v) {
    mr_text_adds(t, "null");
    return;
  }
  mr_text_addc(t, '[');
  for (size_t i = 0; i < bytes->len; i++)
    mr_text_addf(t, "%s%d", i ? "," : "", (unsigned char)bytes->data[i]);
  mr_text_addc(t, ']');
}

void mr_logprobs_chat(mr_text *t, const mr_vocab *v, const mr_sampled *list, int n) {
  mr_text bytes = {0};
  mr_text_adds(t, "{\"content\":[");
  for (int i = 0; i < n; i++) {
    const mr_sampled *s = &list[i];
    if (i)
      mr_text_addc(t, ',');
    chat_token(t, v, s->id, s->logprob, &bytes);
    mr_text_adds(t, ",\"top_logprobs\":[");
    for (int k = 0; k < s->n_top; k++) {
      if (k)
        mr_text_addc(t, ',');
      chat_token(t, v, s->top_id[k], s->top_logprob[k], &bytes);
      mr_text_addc(t, '}');
    }
    mr_text_adds(t, "]}");
  }
  mr_text_adds(t, "],\"refusal\":null}");
  mr_text_free(&bytes);
}

/* ------------------------------------------------------------------ completions */

static void quoted_token(mr_text *t, const mr_vocab *v, int32_t id, mr_text *bytes) {
  bytes_of(v, id, bytes);
  if (mr_utf8_valid(bytes->data ? bytes->data : "", bytes->len) < 0) {
    add_string(t, bytes);
    return;
  }
  mr_text_adds(t, "\"bytes:");
  for (size_t i = 0; i < bytes->len; i++)
    mr_text_addf(t, "\\\\x%02X", (unsigned char)bytes->data[i]);
  mr_text_addc(t, '"');
}

/* One name of a map, unless `names` (all before it, each quoted) has it: two tokens may have one
 * text. */
static bool add_name(mr_text *t, mr_text *names, const mr_vocab *v, int32_t id, mr_text *bytes) {
  size_t from = names->len;
  quoted_token(names, v, id, bytes);
  mr_text_addc(names, '\n');
  if (names->failed) {
    t->failed = true;
    return false;
  }
  const char *mine = names->data + from;
  size_t len = names->len - from;
  for (const char *p = names->data; p < mine;) {
    size_t n = strcspn(p, "\n") + 1;
    if (n == len && !memcmp(p, mine, len))
      return false;
    p += n;
  }
  if (from)
    mr_text_addc(t, ',');
  mr_text_add(t, mine, len - 1);
  mr_text_addc(t, ':');
  return true;
}

/* {"text": logprob} of the best, and the token itself where it is not among them. */
static void top_map(mr_text *t, const mr_vocab *v, const mr_sampled *s, mr_text *bytes) {
  mr_text names = {0};
  mr_text_addc(t, '{');
  bool listed = false;
  for (int k = 0; k < s->n_top; k++) {
    listed = listed || s->top_id[k] == s->id;
    if (add_name(t, &names, v, s->top_id[k], bytes))
      mr_json_add_float(t, s->top_logprob[k]);
  }
  if (!listed && add_name(t, &names, v, s->id, bytes))
    mr_json_add_float(t, s->logprob);
  mr_text_addc(t, '}');
  mr_text_free(&names);
}

size_t mr_logprobs_chars(const char *s, size_t len) {
  size_t n = 0;
  for (size_t i = 0; i < len; i++)
    n += ((unsigned char)s[i] & 0xC0) != 0x80;
  return n;
}

static void add_offsets(mr_text *t, const mr_vocab *v, const mr_logprobs_list *l, mr_text *bytes) {
  size_t chars = 0, at = 0;
  for (int i = 0; i < l->n_prompt; i++) {
    mr_text_addf(t, "%s%zu", i ? "," : "", chars < l->prompt_chars ? chars : l->prompt_chars);
    if (v && mr_vocab_is_control(v, l->prompt_ids[i]))
      continue;
    bytes_of(v, l->prompt_ids[i], bytes);
    chars += mr_logprobs_chars(bytes->data ? bytes->data : "", bytes->len);
  }
  chars = l->prompt_chars;
  for (int i = 0; i < l->n; i++) {
    size_t to = l->offsets && l->offsets[i] >= 0 ? (size_t)l->offsets[i] : at;
    to = to < at ? at : to > l->text_len ? l->text_len : to;
    chars += l->text ? mr_logprobs_chars(l->text + at, to - at) : 0;
    at = to;
    mr_text_addf(t, "%s%zu", i || l->n_prompt ? "," : "", chars);
  }
}

/* Walks the prompt's tokens, then the answer's; `i` counts both. */
static const mr_sampled *nth(const mr_logprobs_list *l, int i) {
  return i < l->n_prompt ? &l->prompt[i] : &l->list[i - l->n_prompt];
}

void mr_logprobs_completion(mr_text *t, const mr_vocab *v, const mr_logprobs_list *l) {
  mr_text bytes = {0};
  int n = l->n_prompt + l->n;
  mr_text_adds(t, "{\"tokens\":[");
  for (int i = 0; i < n; i++) {
    if (i)
      mr_text_addc(t, ',');
    quoted_token(t, v, i < l->n_prompt ? l->prompt_ids[i] : nth(l, i)->id, &bytes);
  }
  mr_text_adds(t, "],\"token_logprobs\":[");
  for (int i = 0; i < n; i++) {
    if (i)
      mr_text_addc(t, ',');
    if (i == 0 && l->n_prompt)
      mr_text_adds(t, "null");
    else
      mr_json_add_float(t, nth(l, i)->logprob);
  }
  mr_text_adds(t, "],\"top_logprobs\":[");
  for (int i = 0; i < n; i++) {
    if (i)
      mr_text_addc(t, ',');
    if (i == 0 && l->n_prompt)
      mr_text_adds(t, "null");
    else
      top_map(t, v, nth(l, i), &bytes);
  }
  mr_text_adds(t, "],\"text_offset\":[");
  add_offsets(t, v, l, &bytes);
  mr_text_adds(t, "]}");
  mr_text_free(&bytes);
}

/* ------------------------------------------------------------------ prompts */

void mr_logprobs_numbers(mr_text *t, const mr_sampled *list, int n, bool first_is_null) {
  mr_text_addc(t, '[');
  for (int i = 0; i < n; i++) {
    if (i)
      mr_text_addc(t, ',');
    if (i == 0 && first_is_null)
      mr_text_adds(t, "null");
    else
      mr_json_add_float(t, list[i].logprob);
  }
  mr_text_addc(t, ']');
}

void mr_logprobs_tops(mr_text *t, const mr_vocab *v, const mr_sampled *list, int n) {
  mr_text bytes = {0};
  mr_text_adds(t, "[null");
  for (int i = 1; i < n; i++) {
    mr_text_addc(t, ',');
    top_map(t, v, &list[i], &bytes);
  }
  mr_text_addc(t, ']');
  mr_text_free(&bytes);
}

static void by_id(mr_text *t, const mr_vocab *v, int32_t id, float logprob, int rank,
                  mr_text *bytes) {
  bytes_of(v, id, bytes);
  mr_text_addf(t, "\"%d\":{\"logprob\":", id);
  mr_json_add_float(t, logprob);
  if (rank)
    mr_text_addf(t, ",\"rank\":%d", rank);
  mr_text_adds(t, ",\"decoded_token\":");
  add_string(t, bytes);
  mr_text_addc(t, '}');
}

void mr_logprobs_by_id(mr_text *t, const mr_vocab *v, const mr_sampled *list, int n) {
  mr_text bytes = {0};
  mr_text_adds(t, "[null");
  for (int i = 1; i < n; i++) {
    const mr_sampled *s = &list[i];
    bool listed = false;
    mr_text_adds(t, ",{");
    for (int k = 0; k < s->n_top; k++) {
      if (k)
        mr_text_addc(t, ',');
      by_id(t, v, s->top_id[k], s->top_logprob[k], k + 1, &bytes);
      listed = listed || s->top_id[k] == s->id;
    }
    if (!listed) {
      if (s->n_top)
        mr_text_addc(t, ',');
      by_id(t, v, s->id, s->logprob, 0, &bytes);
    }
    mr_text_addc(t, '}');
  }
  mr_text_addc(t, ']');
  mr_text_free(&bytes);
}
