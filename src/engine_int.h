/* engine_int.h: what the files of the engine share: engine.c (open, plan of memory), engine_admit.c
 * (requests come and go), engine_step.c (one ragged batch).
 *
 * A request in flight is an mr_flight. Its prompt is fed once, through sequence 0; when it is
 * complete the other sequences (choices or continuations) share its pages and go on alone.
 *
 * Invariants
 * 1. Pages are reserved in counts when a request is admitted: those of the full prompt pages once,
 * and what each sequence may need beyond them; pages_reserved <= pages in all. So taking pages in a
 * step cannot fail.
 * 2. A sequence that is done holds no pages and no reservation of its own.
 * 3. flights holds the requests in order of admission; one leaves it for `finished` when all its
 * sequences are done.
 */
#ifndef MR_SRC_ENGINE_INT_H
#define MR_SRC_ENGINE_INT_H

#include "kernels/pool.h"
#include "src/engine.h"
#include "src/forward.h"
#include "src/sequence.h"

typedef struct mr_flight {
  mr_request r;  /* a copy: all arrays owned */
  int32_t *ends; /* ids that end a choice; owned */
  int n_ends;
  int max_new;       /* GENERATE: tokens at most a choice */
  int fed;           /* prompt tokens done */
  int shared_pages;  /* full pages of the prompt */
  mr_sequence *seqs; /* n_seqs */
  int n_seqs, n_live;
  const int32_t **cont; /* SCORE: start of each continuation in r.cont; owned */
  mr_result *result;    /* being filled */
  struct mr_flight *next;
} mr_flight;

typedef enum mr_job_kind { MR_JOB_PICK, MR_JOB_PROMPT, MR_JOB_CONT } mr_job_kind;

typedef struct mr_logit_job { /* what is done with one row of logits */
  mr_job_kind kind;
  mr_flight *f;
  mr_sequence *s; /* PICK, CONT */
  int row;        /* of the step's logits */
  int pos;        /* PROMPT, CONT: index of the token that is scored */
  bool shared;    /* other jobs read the row too */
  mr_code code;   /* result */
  int rank;
} mr_logit_job;

typedef struct mr_run_owner {
  mr_flight *f;
  mr_sequence *s; /* NULL: the prompt */
} mr_run_owner;

struct mr_engine {
  mr_engine_info info;
  mr_model *model;
  const mr_kernels *k;
  mr_pool *pool;
  mr_kv *kv;
  mr_forward *forward;
  const mr_vocab *vocab; /* borrowed from the prompter; NULL: none */
  int32_t *ends;         /* ids that end a text in this model */
  size_t n_ends, cap_ends;
  int max_logits; /* rows of logits a step */

  mr_flight *flights, **flights_end;
  mr_flight *finished, **finished_end;
  int n_active;    /* requests admitted and not collected */
  int n_sequences; /* of the flights, done or not */
  int n_live;      /* of these, not done */
  int pages_reserved;

  /* the step being built; no allocation while stepping */
  mr_run *runs; /* max_step_tokens */
  mr_run_owner *owners;
  int n_runs, n_tokens, n_logits;
  uint8_t *ones; /* max_step_tokens flags, all 1 */
  mr_logit_job *jobs;
  size_t n_jobs, cap_jobs;
  uint8_t *scratch; /* threads * scratch_bytes: a copy of a row, then the sampler's */
  size_t scratch_bytes, copy_bytes;

  mr_engine_stats stats;
};

int mr_engine_pages(int64_t tokens);

/* The sequence is over: its pages and reservation are free again. */
void mr_flight_retire(mr_engine *e, mr_flight *f, mr_sequence *s);
/* All that is left of it ends with an error. */
void mr_flight_fail(mr_engine *e, mr_flight *f, const char *words);
/* Moves the flights whose sequences are all done to the finished ones. */
void mr_engine_sweep(mr_engine *e);
void mr_flight_free(mr_engine *e, mr_flight *f);

#endif
