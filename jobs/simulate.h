/* simulate.h: the steps that a job will take, from rates and limits, without running them.
 *
 * Rows come in the order of admission and run to their limit of output tokens. As the engine does
 * (engine_memory, engine_park), a row is admitted when what it is expected to hold has room by the
 * policy and the batch has a place; when memory is full the youngest row is put away, to disk or to
 * be computed again, and comes back when there is room; a step takes a
 * token of each row that decodes, then prefill up to the limit of tokens. A step of T tokens, L
 * rows of logits, P prefill tokens that attend to KP keys in all (KT, where they are what is left
 * of a prompt whose beginning is shared), and D decode tokens that attend to KD shared keys and to
 * KO of their own, takes, in seconds,
 *
 *     body(T) + head_share * body(L) + logit * L + step + token * T
 *     + prefill_token * P + prefill_key * KP + tail_key * KT
 *     + decode_token * D + decode_key * KD + decode_own_key * KO
 *
 * where body is interpolated between measured points.
 */
#ifndef MR_JOBS_SIMULATE_H
#define MR_JOBS_SIMULATE_H

#include <stdbool.h>

#include "io/err.h"
#include "src/kvtier.h" /* mr_kv_policy */

#define MR_RATE_POINTS 8

typedef struct mr_rate_point {
  double tokens, s;
} mr_rate_point;

typedef struct mr_rates {             /* seconds */
  mr_rate_point body[MR_RATE_POINTS]; /* matrix products of the layers; tokens ascending */
  int n_body;
  double head_share;                           /* the output matrix's arithmetic over the layers' */
  double prefill_token, prefill_key, tail_key; /* attention; tail: of rows that share a prefix */
  double decode_token, decode_key, decode_own_key; /* own: read from memory by one row only */
  double logit;                                    /* choosing a token */
  double step, token;                              /* all else */
} mr_rates;

typedef struct mr_limits {
  int batch, step_tokens, block; /* block: tokens of a KV page */
  double kv_tokens, disk_tokens; /* that memory and disk hold */
  double window_share;           /* of a row's keys and values, those of layers with a window ... */
  double window_tokens;          /* ... which hold so many tokens of it at most */
  mr_kv_policy policy;
  double disk_token_s; /* to disk and back, by which it is compared with computing it again */
  double copy_token_s; /* of the processors, each way; also out of the prefix cache */
} mr_limits;

typedef struct mr_sim_row {
  int n_prompt, n_shared, n_out; /* shared: need not be computed */
  int n_cached;                  /* of the shared ones, read from the prefix cache */
  bool score;                    /* n_out tokens are fed as prefill, with logits */
} mr_sim_row;

/* The next row in *row; false: there is none. */
typedef bool (*mr_sim_next)(void *ctx, mr_sim_row *row);

typedef struct mr_sim {
  double prefill_s, decode_s;     /* a step's time by its tokens */
  double gemm_s, attn_s, other_s; /* the same time by its cause */
  double steps, batch;            /* mean rows in flight */
  double kv_full_s, batch_full_s; /* time in steps when a row waited for memory, for a place */
  double parked;                  /* times that a row was put away */
  double spilled, recomputed;     /* tokens of these: to disk; computed again */
} mr_sim;

mr_code mr_simulate(const mr_rates *rates, const mr_limits *limits, mr_sim_next next, void *ctx,
                    mr_sim *out, mr_err *err);

double mr_rate_body(const mr_rates *r, double tokens);

#endif
