/* profile.h: what is known of this machine with this model: rates that `plan` has measured, and by
 * how much earlier runs took longer or shorter than was said, part by part.
 *
 *     mr_profile p;  mr_profile_load(&p, &info);        nothing known: factors are 1
 *     seconds of part i = what the rates say * p.factor[i]
 *     mr_profile_learn(&p, said, took, speed, waited);  after a run
 *     mr_profile_save(&p);
 *
 * A file of JSON for each machine and model in $MILLRACE_CACHE, else $XDG_CACHE_HOME/millrace, else
 * ~/.cache/millrace. It only ever changes what is said, never what is done, so that it may be
 * missing, foreign or damaged, or not writable. MILLRACE_CACHE empty: no such file.
 */
#ifndef MR_JOBS_PROFILE_H
#define MR_JOBS_PROFILE_H

#include <jansson.h>

#include "jobs/simulate.h"
#include "src/engine.h"

typedef enum mr_part { /* of a run's time */
                       MR_PART_LOAD,
                       MR_PART_GEMM, /* of the steps: matrix products, */
                       MR_PART_ATTENTION,
                       MR_PART_OTHER, /* choosing tokens, and all else in steps */
                       MR_PART_REST,  /* preflight, commits, assembly */
                       MR_PARTS
} mr_part;

extern const char *const mr_part_names[MR_PARTS]; /* as in the report's `prediction` */

typedef struct mr_profile {
  char path[4096]; /* "": there is no place for it */
  int runs;        /* that it has learnt from */
  double factor[MR_PARTS];
  bool measured; /* the rest is set */
  mr_rates rates;
  double load_s, memory_bytes_per_s;
  double peak_ops; /* a second, when they were measured: the machine's speed */
  double waited;   /* of the time of that measurement, mr_machine_waited_share */
} mr_profile;

/* The file of a kind ("profile" ...) for the machine and model; makes its folder. False: there is
 * no place. */
bool mr_profile_path(char *path, size_t size, const char *kind, const mr_engine_info *info);

/* Writes such a file whole, or leaves it. Takes o; NULL: nothing. */
void mr_profile_write(const char *path, json_t *o);

void mr_profile_load(mr_profile *p, const mr_engine_info *info);
void mr_profile_save(const mr_profile *p);

/* said: by the rates alone, without factors; took: seconds. speed: the machine's during the run
 * over its speed when the rates were measured; 0: not known. waited: mr_machine_waited_share; with
 * more than MR_MACHINE_WAITED the run does not count, and false is returned. A run counts for a
 * third, the first few for more; a factor stays within 4/5 and 5/4. */
bool mr_profile_learn(mr_profile *p, const double said[MR_PARTS], const double took[MR_PARTS],
                      double speed, double waited);

#endif
