/* engine.h: the whole boundary between the runner and the engine: open, estimate, admit, step,
 * collect, close.
 *
 *     mr_engine *e;  mr_engine_open(&e, &opts, prompter, &err);    loads and packs the weights
 *     for (;;) {
 *       while (there is a next request && (rc = mr_engine_admit(e, &req, &err)) == MR_OK) ...
 *                                      MR_E_AGAIN: full, step first
 *       if (mr_engine_active(e) == 0) break;
 *       mr_engine_step(e, &err);                                    one ragged batch
 *       while ((r = mr_engine_collect(e)) != NULL) { use r; mr_result_free(r); }
 *     }
 *     mr_engine_close(e);
 *
 * The runner knows no tensor; the engine knows no file of a job. One thread drives an engine.
 * A row's result depends on its request, the model, the compute mode, the instruction set and
 * nothing else.
 */
#ifndef MR_SRC_ENGINE_H
#define MR_SRC_ENGINE_H

#include "src/kvtier.h" /* mr_kv_policy */
#include "src/prefixstore.h"
#include "src/prompt.h"
#include "src/sampler.h"
#include "src/tune.h"

typedef struct mr_engine mr_engine;

typedef enum mr_compute { MR_COMPUTE_FAST, MR_COMPUTE_EXACT } mr_compute;

typedef struct mr_adapter {
  const char *name, *dir; /* of a PEFT adapter (lora.h); borrowed */
} mr_adapter;

typedef struct mr_engine_opts {
  const char *model_path;
  const char *device;     /* a name of device.h, "auto" or "cpu" (the same for now) */
  int device_weights;     /* how it holds them: 0: by file and memory; 1 bf16, 2 int8, 3 int4 */
  uint64_t device_memory; /* bytes of it that are taken; 0: nine tenths of what is free */
  int device_gemm;        /* 1: products of bfloat16 by the maker's library, where it is fit */
  mr_compute compute;
  int threads; /* 0: as many as the process may use */
  bool pin;
  int max_batch;       /* sequences in flight; 0: chosen */
  int max_step_tokens; /* T; 0: chosen */
  mr_tuning *tuning;   /* tune.h; measured by open if it was not yet; NULL: nothing is. Borrowed as
                          long as the engine lives */
  uint64_t kv_memory;  /* bytes; 0: chosen (a share of free memory) */
  uint64_t kv_disk;    /* bytes of keys and values that may be put away on disk; 0: none */
  const char *spill_dir; /* where; NULL: /var/tmp */
  mr_kv_policy kv_policy;
  int kv_type;                /* mr_kv_type, or -1: f32 in exact mode, else the table's */
  int context;                /* 0: the model's; lower: caps it */
  const mr_adapter *adapters; /* n_adapters */
  int n_adapters;
  bool no_prefix_sharing;      /* compute every prompt by itself; the results are the same */
  const char *prefix_cache;    /* directory of shared prefixes that outlast the run, or NULL */
  uint64_t prefix_cache_bytes; /* kept there */
  const char *model_digest;    /* with prefix_cache: of the model */
  mr_saved *saved;             /* what a run before left of its rows, or NULL; borrowed */
} mr_engine_opts;

typedef struct mr_engine_info {
  const char *arch, *isa, *scheme, *kv_type, *device, *kv_policy;
  const char *gemm; /* which shapes a library multiplies, and why not others; NULL: none */
  mr_scheme products; /* that scheme names, of the CPU's matrix products */
  int context, n_vocab, max_batch, max_step_tokens, threads;
  bool step_measured;                                /* max_step_tokens is the tuning's */
  uint64_t n_params, weight_bytes, packed_bytes;     /* packed: with the adapters */
  uint64_t kv_bytes_per_token, kv_memory, kv_tokens; /* budget in bytes and in tokens */
  uint64_t kv_disk;                                  /* as asked for */
  mr_kv_policy policy;                               /* that kv_policy names */
  /* src/kvcache.h: a sequence has kv_groups pages for each 32 tokens, of which kv_window_groups are
   * given back behind the window, and kv_own_pages beside. */
  uint64_t kv_page_bytes;
  int kv_groups, kv_window_groups, kv_window, kv_own_pages;
  double flops_per_prompt_token, flops_per_output_token;
  double load_s;
} mr_engine_info;

typedef enum mr_task { MR_TASK_GENERATE, MR_TASK_SCORE } mr_task;

typedef struct mr_request { /* everything is copied by admit */
  uint64_t tag;             /* returned with the result */
  uint64_t row;             /* its number in the job: by it a row is known again in `saved` */
  uint64_t expected;        /* what mr_engine_expect said; 0: it was not called */
  uint64_t row_key;         /* of the random generator: xxh3-64 of the row's id */
  mr_task task;
  const int32_t *prompt; /* n_prompt >= 1 ids */
  int n_prompt;
  int adapter;          /* 0: the base alone; i + 1: opts.adapters[i] */
  mr_sampling sampling; /* max_tokens clamped: n_prompt + max_tokens <= context; -1: up to it */
  /* SCORE: n_cont continuations, concatenated; lengths >= 1 each */
  const int32_t *cont;
  const int *cont_len;
  int n_cont;
} mr_request;

typedef enum mr_finish { MR_FINISH_STOP, MR_FINISH_LENGTH, MR_FINISH_ERROR } mr_finish;

typedef struct mr_choice {
  int32_t *ids; /* generated; the ending control token is left out, n_ids counts without it */
  int n_ids;
  int n_sampled; /* tokens computed, the ending one too: usage.completion_tokens */
  char *text;    /* UTF-8 with stop string cut; NULL without a vocabulary */
  size_t text_len;
  mr_finish finish;
  int32_t stop_id;      /* the token that ended it, or -1 */
  mr_sampled *logprobs; /* n_ids, or NULL */
  int *offsets;         /* n_ids offsets in `text` of each token's text, with logprobs; or NULL */
  /* SCORE */
  double sum_logprob;
  bool greedy; /* every token was the argmax */
} mr_choice;

typedef struct mr_result {
  uint64_t tag;
  mr_choice *choices; /* n for GENERATE, n_cont for SCORE */
  int n_choices;
  mr_sampled *prompt_logprobs; /* n_prompt (entry 0 unused), or NULL */
  int n_prompt;
  mr_err err;                               /* finish ERROR: why (non-finite logits ...) */
  double admitted_s, first_token_s, done_s; /* monotonic clock */
} mr_result;

void mr_result_free(mr_result *r);

typedef struct mr_engine_left { /* of the requests in flight that are not held back */
  uint64_t prompt_tokens;       /* to compute, or to be taken from others */
  uint64_t tokens;              /* that they may still choose at most, all together */
  uint64_t longest;             /* ... and the most of one choice */
  uint64_t held;                /* requests that are held back */
} mr_engine_left;

typedef struct mr_engine_stats { /* sums since open */
  uint64_t steps, output_tokens, logit_rows;
  uint64_t rows_fetched; /* of logits from a device that knew too little of them to choose */
  uint64_t prompt_tokens_computed; /* continuations that are scored, too */
  uint64_t prompt_tokens_shared;   /* taken from a prompt that began alike */
  uint64_t prompt_tokens_cached;   /* taken from the prefix cache of earlier runs */
  uint64_t cache_read_bytes, cache_written_bytes, cache_bad; /* bad: files that were not taken */
  double step_s, gemm_s, attn_s, sample_s, other_s;
  double flops, bytes;       /* done, and moved at least */
  uint64_t batch_tokens_sum; /* sum of T over steps */
  int max_batch_seen, active, waiting;
  uint64_t kv_pages_used, kv_pages_total, kv_pages_peak;
  uint64_t kv_pages_held_back; /* at most, while the machine's memory was low */
  uint64_t kv_spill_bytes, kv_fetch_bytes, kv_failures; /* failures: computed again */
  uint64_t preemptions, recomputed_tokens;              /* ... because memory ran out */
  double kv_stall_s;                                    /* waits for the disk */
  uint64_t resumed_rows, resumed_tokens; /* begun by a run before; output tokens it had chosen */
  uint64_t saved_rows, saved_bytes;      /* by mr_engine_save */
} mr_engine_stats;

/* info's step size by opts.max_step_tokens, else opts.tuning; on the CPU. */
void mr_engine_set_step(const mr_engine_opts *opts, mr_engine_info *info);
mr_code mr_engine_open(mr_engine **out, const mr_engine_opts *opts, const mr_prompter *p,
                       mr_err *err);
void mr_engine_close(mr_engine *e);
const mr_engine_info *mr_engine_describe(const mr_engine *e);
/* For measurements, before the first row: takes all memory of keys and values from the system, as a
 * long job has it. */
void mr_engine_touch(mr_engine *e);

/* The prefix cache of these options, to look into; *out NULL: there is none, or nothing for this
 * model. info: of mr_engine_estimate. MR_E_NOMEM. */
mr_code mr_engine_look_store(mr_prefixstore **out, const mr_engine_opts *opts,
                             const mr_engine_info *info, mr_err *err);

/* KV bytes, chosen batch and step size for these options without loading weights; fills *info
 * (load_s 0). */
mr_code mr_engine_estimate(const mr_engine_opts *opts, mr_engine_info *info, mr_err *err);

/* Blocks of 32 tokens that a sequence has at most in groups with a window; INT_MAX: no limit. */
int mr_engine_window_blocks(const mr_engine_info *info);

/* MR_E_AGAIN: no room now. MR_E_DATA: it can never run (its KV alone is over the budget; ids out of
 * range). */
mr_code mr_engine_admit(mr_engine *e, const mr_request *r, mr_err *err);
/* A row that will be admitted later, after those that were expected before: what its prompt shares
 * is kept in memory rather than what nobody wants. Returns its number, for `expected` of its
 * request; only a hint. */
uint64_t mr_engine_expect(mr_engine *e, int adapter, const int32_t *prompt, int n_prompt);
/* The machine's memory is low, or is not any more: until then keys and values take no memory beyond
 * what they have had already, as long as some request can go on with it. Results are the same. */
void mr_engine_memory_low(mr_engine *e, bool low);
int mr_engine_active(const mr_engine *e); /* requests admitted and not collected */
mr_code mr_engine_step(mr_engine *e, mr_err *err);
mr_result *mr_engine_collect(mr_engine *e); /* owned by the caller; NULL: none finished */
/* After the last step: shared prefixes go to the prefix cache, for about `seconds` at most. */
void mr_engine_keep_prefixes(mr_engine *e, double seconds);
/* The run stops: the rows in flight to the files of saved.h, the oldest first: the tokens of all
 * that generate, and keys and values as far as max_bytes and about `seconds` reach. Between two
 * steps; afterwards only close may follow. MR_E_NOMEM and errors of writing. */
mr_code mr_engine_save(mr_engine *e, const char *prefix, uint64_t max_bytes, double seconds,
                       mr_err *err);
void mr_engine_stats_get(const mr_engine *e, mr_engine_stats *out);
void mr_engine_left_get(const mr_engine *e, mr_engine_left *out);
/* Holds back the request that has most left to choose, the youngest of equals, so that the others
 * end sooner: it takes part in no step, but stays where it is. None that is in the middle of its
 * prompt; false: there is no other. Where nobody else can go on, all do. */
bool mr_engine_hold(mr_engine *e);
/* Lets the one go on that was held back last. false: there is none. */
bool mr_engine_release(mr_engine *e);

#endif
