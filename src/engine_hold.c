/* What is left to do of the requests in flight, and who of them stands back before a deadline. */
#include "src/engine_int.h"

/* Tokens that the choices of f may still have: all together, and (returned) the most of one. */
static uint64_t left_of(const mr_flight *f, uint64_t *all) {
  uint64_t most = 0;
  for (int i = 0; f->r.task == MR_TASK_GENERATE && i < f->n_seqs; i++) {
    const mr_sequence *s = &f->seqs[i];
    if (s->done || s->out.n_sampled >= f->max_new)
      continue;
    uint64_t n = (uint64_t)(f->max_new - s->out.n_sampled);
    *all += n;
    most = n > most ? n : most;
  }
  return most;
}

void mr_engine_left_get(const mr_engine *e, mr_engine_left *out) {
  *out = (mr_engine_left){0, 0, 0, 0};
  for (const mr_flight *f = e->flights; f; f = f->next) {
    if (f->held) {
      out->held++;
      continue;
    }
    uint64_t longest = left_of(f, &out->tokens);
    out->longest = longest > out->longest ? longest : out->longest;
    out->prompt_tokens += f->spilled ? 0 : (uint64_t)(f->r.n_prompt - f->fed);
  }
}

bool mr_engine_hold(mr_engine *e) {
  mr_flight *longest = NULL;
  uint64_t most = 1, ignored = 0;
  for (mr_flight *f = e->flights; f; f = f->next) {
    bool waited_for = f->fed > 0 && f->fed < f->r.n_prompt;
    uint64_t n = f->held || waited_for ? 0 : left_of(f, &ignored);
    if (n < most)
      continue;
    longest = f;
    most = n;
  }
  if (longest)
    longest->held = ++e->n_held;
  return longest != NULL;
}

bool mr_engine_release(mr_engine *e) {
  mr_flight *last = NULL;
  for (mr_flight *f = e->flights; f; f = f->next)
    if (f->held && (!last || f->held > last->held))
      last = f;
  if (last)
    last->held = 0;
  return last != NULL;
}
