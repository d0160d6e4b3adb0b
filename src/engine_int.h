/* engine_int.h: what the files of the engine share: engine.c (open, plan of memory), engine_admit.c
 * (requests come and go), engine_step.c (one ragged batch).
 *
 * A request in flight is an mr_flight. Its prompt is fed once, through sequence 0; when it is
 * complete the other sequences (choices or continuations) share its pages and go on alone.
 *
 * Invariants
 * 1. Pages are reserved in counts when a request is admitted: its nodes of the prefix tree (once
 * for all requests that hold them), the other full blocks of its prompt, and what each sequence may
 * need beyond them; pages_reserved + what held nodes have <= pages in all, and the rest of the
 * tree's pages is given back on demand. So with MR_KV_FEWER taking pages in a step cannot fail. Of
 * layers with a window a sequence has window_blocks at most. A request that brings more new nodes
 * than that does not hold them wide: it reserves so many blocks of them for itself, and the tree
 * gives back what lies behind its window.
 * 2. A sequence that is done holds no pages and no reservation of its own.
 * 3. With the other policies more is admitted than may fit. Who finds no page takes it from the
 * youngest, which is parked; it waits where all others are older or in the step already. So the
 * oldest always goes on, and it fits alone.
 * 4. flights holds the requests in order of admission; one leaves it for `finished` when all its
 * sequences are done.
 */
#ifndef MR_SRC_ENGINE_INT_H
#define MR_SRC_ENGINE_INT_H

#include "kernels/pool.h"
#include "src/engine.h"
#include "src/engine_device.h"
#include "src/forward.h"
#include "src/lora.h"
#include "src/prefix.h"
#include "src/prefixstore.h"
#include "src/sampler_best.h"
#include "src/sequence.h"

typedef enum mr_flight_state {
  MR_FLIGHT_ACTIVE,
  MR_FLIGHT_PARKED,  /* it holds no pages and no nodes of the tree */
  MR_FLIGHT_FETCHING /* its pages are being read */
} mr_flight_state;

typedef struct mr_flight {
  mr_request r;  /* a copy: all arrays owned */
  int32_t *ends; /* ids that end a choice; owned */
  int n_ends;
  int max_new;      /* GENERATE: tokens at most a choice */
  int fed;          /* prompt tokens done */
  uint64_t age;     /* its number in order of admission, from 1 */
  int32_t *chain;   /* [n_chain] nodes of the prefix tree, one a block of the prompt; owned */
  int n_chain;      /* not the block with the last token: its logits are needed */
  int partial_at;   /* block at which a common beginning was looked for last */
  bool shares;      /* it takes part in the prefix tree */
  bool wide;        /* it holds its nodes wide (prefix.h) */
  int shared_pages; /* of full blocks of the prompt beyond what its nodes hold */
  mr_flight_state state;
  uint64_t step;     /* the last one that it had a run in */
  uint64_t held;     /* its number among those that are held back, from 1; 0: it is not */
  bool spilled;      /* what it had computed is on disk: */
  bool lost;         /* ... or part of it was */
  mr_parked parked;  /* pages of its prompt, from fetch_at; the sequences have their own */
  int fetch_at;      /* tokens before that are the tree's */
  int parked_fed;    /* f->fed then */
  int parked_pages;  /* held then */
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
  mr_lora *lora; /* its adapters; NULL: none */
  const mr_kernels *k;
  mr_pool *pool;
  mr_engine_device device;
  mr_kv *kv;
  mr_prefix *prefix;     /* NULL: no sharing */
  mr_prefixstore *store; /* NULL: nothing outlasts the run */
  uint8_t *stored_block; /* one that is being read out of it, or written */
  double keep_until_s;   /* monotonic; 0: no limit */
  mr_kvtier *tier;
  mr_kv_policy policy;
  mr_saved *saved; /* borrowed; NULL: none */
  bool moved;      /* in this step a flight got back what it waits for */
  mr_kv_groups groups;
  int window_blocks; /* that a sequence has at most of layers with a window */
  mr_forward *forward;
  const mr_vocab *vocab; /* borrowed from the prompter; NULL: none */
  int32_t *ends;         /* ids that end a text in this model */
  size_t n_ends, cap_ends;
  int max_logits; /* rows of logits a step */

  mr_flight *flights, **flights_end;
  mr_flight *finished, **finished_end;
  int n_active;            /* requests admitted and not collected */
  int n_sequences;         /* of the flights, done or not */
  int n_live;              /* of these, not done */
  int pages_reserved;      /* beside the nodes of the tree */
  uint64_t expected, came; /* rows that were expected, and the last of them that is here */
  uint64_t admitted;       /* the age of the last one */
  int n_parked;
  uint64_t n_held;
  uint64_t blocked; /* flights this old and older may begin: a parked one goes first; 0: all */
  double share_sum; /* of the tokens that finished choices could have had, what they had, ... */
  uint64_t share_n; /* ... and how many choices that were */

  /* the step being built; no allocation while stepping */
  mr_run *runs; /* max_step_tokens */
  mr_run_owner *owners;
  uint64_t step; /* its number, from 1 */
  int n_runs, n_tokens, n_logits;
  uint8_t *ones;    /* max_step_tokens flags, all 1 */
  mr_gpu_ask *asks; /* [max_logits] rows of the step; NULL: the device does not choose */
  int32_t *fetch;   /* [max_logits] rows that are needed as a whole */
  mr_logit_job *jobs;
  size_t n_jobs, cap_jobs;
  uint8_t *scratch; /* threads * scratch_bytes: a copy of a row, then the sampler's */
  size_t scratch_bytes, copy_bytes;

  mr_engine_stats stats;
};

int mr_engine_pages(const mr_engine *e, int64_t tokens); /* of one sequence: its places */
int mr_engine_used_pages(const mr_engine *e);            /* by requests */

/* engine_memory.c: makes `want` pages free for f: idle ones of the tree, then those of the youngest
 * flight that is younger than f and not in the step. False: there are not so many. */
bool mr_flight_make_room(mr_engine *e, const mr_flight *f, int want);
/* Nodes for a new flight's prompt, and their end. */
mr_code mr_flight_join(mr_engine *e, mr_flight *f, mr_err *err);
void mr_flight_leave(mr_engine *e, mr_flight *f);
/* Takes what others computed of the prompt from f->fed on. False: an older flight computes what
 * comes next, so wait. */
bool mr_flight_share(mr_engine *e, mr_flight *f);
/* Of the next n prompt tokens, those that f may compute now. */
int mr_flight_claim(mr_engine *e, mr_flight *f, int n);
/* Tokens from `from` to f->fed are computed: others may have them. */
void mr_flight_publish(mr_engine *e, mr_flight *f, int from);

/* Nothing can go on with the pages that are not held back, if there are others: then they are
 * needed after all. */
bool mr_engine_needs_all(mr_engine *e);

/* Opens e->store. MR_E_CANTCREATE, MR_E_NOMEM. */
mr_code mr_engine_open_store(mr_engine *e, const mr_engine_opts *o, mr_err *err);

/* Pages that are reserved for it while it is active, beside its nodes of the tree. */
int mr_flight_reserved(const mr_flight *f);
/* engine_park.c: gives up its pages: to disk, or to be computed again. */
void mr_flight_park(mr_engine *e, mr_flight *f);
/* Between two steps: parked flights come back when there is room, the oldest first. */
void mr_engine_revive(mr_engine *e);
/* Tokens of the shortest of its sequences that were put away. */
int mr_flight_parked_len(const mr_flight *f);
/* The sequence whose table holds the prompt: of those that do, the one whose window has dropped
 * least of it. */
mr_sequence *mr_flight_holder(mr_flight *f);
/* An active flight that was spilled and holds what is the tree's: reads the rest. */
void mr_flight_fetch(mr_engine *e, mr_flight *f);
/* Waits until nothing of it is being read any more. */
void mr_flight_settle(mr_engine *e, mr_flight *f);
/* The slots that it holds. */
void mr_flight_forget(mr_engine *e, mr_flight *f);

/* engine_save.c: takes up what a run before had done of it. MR_E_NOMEM. */
mr_code mr_flight_resume(mr_engine *e, mr_flight *f, mr_err *err);
/* A digest of all that says what the bytes of a page mean, beside the model. */
uint64_t mr_engine_layout(const mr_engine_info *info);

/* The sequence is over: its pages and reservation are free again. */
void mr_flight_retire(mr_engine *e, mr_flight *f, mr_sequence *s);
/* All that is left of it ends with an error. */
void mr_flight_fail(mr_engine *e, mr_flight *f, const char *words);
/* Moves the flights whose sequences are all done to the finished ones. */
void mr_engine_sweep(mr_engine *e);
void mr_flight_free(mr_engine *e, mr_flight *f);

#endif
