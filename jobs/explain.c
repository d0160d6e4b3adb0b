#include "jobs/explain.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "src/machine.h"

typedef struct talk {
  const mr_explain_in *in;
  void (*say)(const char *sentence, void *to);
  void *to;
  char text[400];
} talk;

static void order(talk *t) {
  const mr_forecast *f = t->in->forecast;
  const mr_schedule_info *o = &f->order;
  bool off = t->in->job->no_prefix_sharing;
  if (o->groups == 0)
    t->say("order: no two prompts begin alike, so rows come by length, those with many output "
           "tokens and long ones first: then few are left over at the end, when the batch cannot "
           "be filled any more",
           t->to);
  else {
    snprintf(t->text, sizeof t->text,
             "order: %" PRIu64 " of %" PRIu64 " rows begin as others do, in %" PRIu64
             " groups (%" PRIu64 " rows the largest). The rows of a group come one after the "
             "other%s; groups with many output tokens and long rows come first, so that few rows "
             "are left over at the end",
             o->grouped_rows, f->rows, o->groups, o->largest_group,
             off ? "" : ", so that what they share is computed once and then leaves memory");
    t->say(t->text, t->to);
  }
  if (o->blended)
    t->say("blend: limits of output tokens are far apart, so rows with many of them, which hold "
           "memory, and rows that are mostly prompt, which are arithmetic, take turns (two scans, "
           "one from each end of that order): steps have both",
           t->to);
  if (off && f->shared_tokens) {
    snprintf(t->text, sizeof t->text,
             "--prefix-sharing is off: %" PRIu64 " prompt tokens are computed that need not be",
             f->shared_tokens);
    t->say(t->text, t->to);
  }
}

/* What happens when keys and values do not fit. */
static const char *policy_words(const mr_job *j) {
  switch (j->kv_policy) {
  case MR_KV_FEWER:
    return "fewer rows run at once (--kv-policy fewer)";
  case MR_KV_SPILL:
    return "rows go to disk and come back (--kv-policy spill)";
  case MR_KV_RECOMPUTE:
    return "rows are put off and computed again (--kv-policy recompute)";
  default:
    return j->kv_disk ? "rows wait, or go to disk and come back, or are computed again, whatever "
                        "costs least by the rates measured while it runs"
                      : "rows wait, or are computed again, whatever costs least; --kv-disk would "
                        "let them go to disk";
  }
}

static void cache(talk *t) {
  const mr_forecast *f = t->in->forecast;
  if (!t->in->job->prefix_cache)
    return;
  snprintf(t->text, sizeof t->text,
           "prefix cache: %" PRIu64 " prompt tokens are there from earlier runs%s",
           f->cached_tokens, f->cached_tokens ? "" : "; this one leaves what its rows share");
  t->say(t->text, t->to);
}

static void memory(talk *t) {
  const mr_sim *s = &t->in->estimate->sim;
  double steps = s->prefill_s + s->decode_s;
  if (s->parked > 0)
    snprintf(
        t->text, sizeof t->text,
        "memory: keys and values are full for %.0f %% of the time; then %s. About %.0f times a "
        "row is put away, with %.0f tokens to disk and %.0f to compute again. More "
        "--kv-memory makes the batch larger",
        steps > 0 ? 100 * s->kv_full_s / steps : 0, policy_words(t->in->job), s->parked, s->spilled,
        s->recomputed);
  else if (s->kv_full_s > 0)
    snprintf(t->text, sizeof t->text,
             "memory: keys and values are full for %.0f %% of the time; then %s. More --kv-memory "
             "makes the batch larger",
             steps > 0 ? 100 * s->kv_full_s / steps : 0, policy_words(t->in->job));
  else
    snprintf(t->text, sizeof t->text,
             "memory: keys and values of all rows in flight fit, at most %" PRIu64 " tokens",
             t->in->info->kv_tokens);
  t->say(t->text, t->to);
}

static void steps(talk *t) {
  const mr_engine_info *i = t->in->info;
  if (i->step_measured)
    snprintf(t->text, sizeof t->text,
             "steps have up to %d tokens: with more a token's matrix products take no less time on "
             "this machine, or a step would be long, as was measured once",
             i->max_step_tokens);
  else
    snprintf(t->text, sizeof t->text, "steps have up to %d tokens%s", i->max_step_tokens,
             t->in->job->max_step_tokens ? ", as --max-step-tokens says" : "");
  t->say(t->text, t->to);
}

static void bound(talk *t) {
  static const struct {
    const char *by, *words;
  } all[] = {
      {"compute", "the limit is arithmetic: matrix products of full steps take most of the time. "
                  "More or faster cores would help, a larger batch would not"},
      {"attention", "the limit is attention: prompts are long, and each token looks at all before "
                    "it"},
      {"memory-bandwidth", "the limit is reading the weights: each step reads all of them for the "
                           "tokens of few rows"},
      {"rows", "the limit is the number of rows: there are too few to fill a batch, so each step "
               "reads the weights for few tokens"},
      {"kv-memory", "the limit is memory for keys and values: it keeps the batch small. Raise "
                    "--kv-memory, or give --kv-disk"},
  };
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    if (!strcmp(all[i].by, t->in->estimate->bound_by))
      t->say(all[i].words, t->to);
}

static void deadline(talk *t) {
  double limit = t->in->job->time_limit_s, all = t->in->estimate->seconds;
  if (limit <= 0)
    return;
  if (all <= limit)
    snprintf(t->text, sizeof t->text, "the time limit of %.0f s is enough", limit);
  else
    snprintf(t->text, sizeof t->text,
             "the time limit of %.0f s is enough for about %.0f %% of the work; rows are chosen "
             "that end in time, and the next run goes on",
             limit, 100 * limit / all);
  t->say(t->text, t->to);
}

static void trust(talk *t) {
  int n = snprintf(t->text, sizeof t->text,
                   "the time is what this machine does now, with each row running to its limit of "
                   "output tokens (%" PRIu64 " in all): rows that end early make it shorter",
                   t->in->forecast->output_tokens);
  if (t->in->learnt_from && n > 0 && n < (int)sizeof t->text)
    snprintf(t->text + n, sizeof t->text - (size_t)n,
             ". %d earlier run%s of this model here corrected it", t->in->learnt_from,
             t->in->learnt_from == 1 ? "" : "s");
  t->say(t->text, t->to);
  if (t->in->waited_share <= MR_MACHINE_WAITED)
    return;
  snprintf(t->text, sizeof t->text,
           "other work had the processors for %.0f %% of the time of the measurement: without it "
           "the job takes less",
           100 * t->in->waited_share);
  t->say(t->text, t->to);
}

void mr_explain(const mr_explain_in *in, void (*say)(const char *sentence, void *to), void *to) {
  talk t = {.in = in, .say = say, .to = to};
  if (in->forecast->rows == 0)
    return;
  order(&t);
  cache(&t);
  memory(&t);
  steps(&t);
  bound(&t);
  deadline(&t);
  trust(&t);
}
