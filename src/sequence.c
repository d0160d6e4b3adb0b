#include "src/sequence.h"

#include <string.h>

#include "io/mem.h"

mr_code mr_sequence_init(mr_sequence *s, const mr_sampling *sampling, const mr_vocab *vocab,
                         const mr_kv *kv, int max_len, mr_err *err) {
  *s = (mr_sequence){.sampling = sampling, .vocab = vocab};
  s->out.stop_id = -1;
  s->out.greedy = true;
  if (vocab)
    mr_detok_init(&s->detok, vocab, false, false); /* it goes on after a prompt, so a leading space
                                                      stays */
  return mr_kv_seq_init(kv, &s->kv, max_len, err);
}

static mr_code no_memory(mr_err *err) {
  return mr_err_set(err, MR_E_NOMEM,
                    "out of memory for generated tokens; use a smaller --kv-memory or --max-batch");
}

/* Appends the picked token and its text. */
static mr_code append(mr_sequence *s, mr_err *err) {
  size_t n = (size_t)s->out.n_ids + 1;
  bool logprobs = s->sampling->logprobs >= 0;
  if (!mr_mem_grow((void **)&s->out.ids, &s->cap_ids, n, sizeof *s->out.ids))
    return no_memory(err);
  if (logprobs &&
      !mr_mem_grow((void **)&s->out.logprobs, &s->cap_logprobs, n, sizeof *s->out.logprobs))
    return no_memory(err);
  if (logprobs && s->vocab &&
      !mr_mem_grow((void **)&s->out.offsets, &s->cap_offsets, n, sizeof *s->out.offsets))
    return no_memory(err);
  s->out.ids[n - 1] = s->picked.id;
  if (logprobs)
    s->out.logprobs[n - 1] = s->picked;
  if (logprobs && s->vocab)
    s->out.offsets[n - 1] = (int)s->text.len;
  s->out.n_ids = (int)n;
  if (s->vocab)
    mr_detok_push(&s->detok, s->picked.id, &s->text);
  return s->text.failed ? no_memory(err) : MR_OK;
}

/* Cuts the text at the earliest stop string of it; false: there is none. */
static bool cut_at_stop(mr_sequence *s) {
  const mr_sampling *p = s->sampling;
  const char *first = NULL, *end = s->text.data + s->text.len;
  size_t first_len = 0, longest = 0;
  for (int i = 0; i < p->n_stop; i++) {
    size_t len = strlen(p->stop[i]);
    longest = len > longest ? len : longest;
    const char *from = s->text.data + s->search_from;
    const char *hit = len ? memmem(from, (size_t)(end - from), p->stop[i], len) : NULL;
    if (hit && (!first || hit < first)) {
      first = hit;
      first_len = len;
    }
  }
  if (!first) { /* the next token may complete one that has begun */
    size_t back = longest ? longest - 1 : 0;
    size_t next = s->text.len > back ? s->text.len - back : 0;
    s->search_from = next > s->search_from ? next : s->search_from;
    return false;
  }
  s->text.len = (size_t)(first - s->text.data) + (p->include_stop ? first_len : 0);
  s->text.data[s->text.len] = 0;
  s->detok.n_held = 0; /* what would follow is cut as well */
  return true;
}

static bool ends_text(const mr_sequence *s, const int32_t *ends, int n_ends) {
  if (s->out.n_sampled <= s->sampling->min_tokens)
    return false;
  for (int i = 0; i < n_ends; i++)
    if (ends[i] == s->picked.id)
      return true;
  return false;
}

mr_code mr_sequence_push(mr_sequence *s, const int32_t *ends, int n_ends, int max_new,
                         mr_err *err) {
  const mr_sampling *p = s->sampling;
  s->out.n_sampled++;
  bool ended = ends_text(s, ends, n_ends);
  bool keep = !ended;
  for (int i = 0; ended && p->include_stop && i < p->n_stop_ids; i++)
    keep = keep || p->stop_ids[i] == s->picked.id;
  mr_code rc = keep ? append(s, err) : MR_OK;
  if (rc)
    return rc;
  if (ended)
    return mr_sequence_end(s, MR_FINISH_STOP, s->picked.id, err);
  if (s->out.n_sampled < p->min_tokens)
    s->search_from = s->text.len;
  else if (p->n_stop && s->text.len && cut_at_stop(s))
    return mr_sequence_end(s, MR_FINISH_STOP, -1, err);
  if (s->out.n_sampled >= max_new)
    return mr_sequence_end(s, MR_FINISH_LENGTH, -1, err);
  return MR_OK;
}

mr_code mr_sequence_end(mr_sequence *s, mr_finish why, int32_t stop_id, mr_err *err) {
  if (s->done)
    return MR_OK;
  s->done = true;
  s->out.finish = why;
  s->out.stop_id = stop_id;
  if (!s->vocab)
    return MR_OK;
  mr_detok_finish(&s->detok, &s->text);
  mr_text_add(&s->text, "", 0); /* an empty text is a text */
  for (int i = 0; s->out.offsets && i < s->out.n_ids; i++)
    if ((size_t)s->out.offsets[i] > s->text.len)
      s->out.offsets[i] = (int)s->text.len;
  return s->text.failed ? no_memory(err) : MR_OK;
}

void mr_sequence_take(mr_sequence *s, mr_choice *out) {
  *out = s->out;
  out->text = s->text.data;
  out->text_len = s->text.len;
  s->out = (mr_choice){0};
  s->text = (mr_text){0};
}

void mr_sequence_free(mr_sequence *s, mr_kv *kv) {
  mr_choice_free(&s->out);
  mr_text_free(&s->text);
  mr_kv_seq_free(kv, &s->kv);
}

void mr_choice_free(mr_choice *c) {
  mr_mem_free(c->ids);
  mr_mem_free(c->logprobs);
  mr_mem_free(c->offsets);
  mr_mem_free(c->text);
}
