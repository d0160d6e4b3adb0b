/* estimate.h: how long a job will take: a short measurement of this machine with this model, and a
 * simulation of the job's steps.
 *
 *     mr_estimate_measure(&opts, &info, &e, &err);   opens the engine and times some steps;
 *     mr_estimate_known(&e, &info, &profile);        or what was measured before
 *     mr_estimate_run(&e, &info, &profile, next, ctx, &err);     rows in order of admission
 *
 * Measured: opening the model; prefill of a few lengths, and decoding with a few batches at two
 * lengths of context, each step's matrix products, attention and the rest apart; and the rate of
 * reading memory, which bounds attention over keys and values that rows do not share. It takes a
 * second or two with a small model, and at most about half a minute of steps with a large one.
 */
#ifndef MR_JOBS_ESTIMATE_H
#define MR_JOBS_ESTIMATE_H

#include "jobs/profile.h"
#include "jobs/simulate.h"
#include "src/engine.h"

typedef struct mr_time_estimate {
  mr_rates rates;            /* measured */
  double memory_bytes_per_s; /* measured */
  double gemm_flops_per_s;   /* of the layers in a full step */
  double load_s, peak_ops;   /* measured; peak_ops a second: the machine's speed then, 0: unknown */
  double start_s;            /* what every run takes besides: preflight, digest of the model ... */
  mr_sim sim;                /* by the rates alone */
  double said[MR_PARTS];     /* the same, all parts of the time */
  double parts[MR_PARTS];    /* what they will be, as earlier runs went */
  double prefill_s, decode_s; /* the steps' parts, otherwise divided */
  double seconds;             /* all together */
  const char *bound_by; /* "compute", "memory-bandwidth", "attention"; "rows", "kv-memory": the
                           batch is small for lack of them */
} mr_time_estimate;

/* Fills info with what the engine says of itself. MR_E_NOMEM, MR_E_UNAVAILABLE and the errors of
 * opening a model. */
mr_code mr_estimate_measure(const mr_engine_opts *opts, mr_engine_info *info, mr_time_estimate *out,
                            mr_err *err);
/* p->measured. */
void mr_estimate_known(mr_time_estimate *e, const mr_engine_info *info, const mr_profile *p);
/* For mr_profile_save. */
void mr_estimate_remember(const mr_time_estimate *e, mr_profile *p);
/* start_s is added to e->start_s by the caller where it knows more. */
mr_code mr_estimate_run(mr_time_estimate *e, const mr_engine_info *info, const mr_profile *p,
                        mr_sim_next next, void *ctx, mr_err *err);

#endif
