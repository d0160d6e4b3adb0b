/* identity.h: what a job's state and its outputs are bound to, and in words how two of them
 * differ.
 *
 * Two runs with equal identities write the same bytes; anything that could change a byte of the
 * output is in here. The job's first start is carried along (`created` in the results) but not
 * compared. The job's id says which job it is, whenever and in however many shards it runs: ids in
 * the results derive from it, so that they are the same in a run of the whole job and in its
 * shards.
 */
#ifndef MR_JOBS_IDENTITY_H
#define MR_JOBS_IDENTITY_H

#include <jansson.h>

#include "io/hash.h"
#include "io/text.h"

/* What --shard I/N computes: part of a job. of 0: the whole job, and nothing else is set. */
typedef struct mr_identity_part {
  int index, of;
  uint64_t job_rows; /* of all shards together */
  uint64_t cut;      /* mr_shard_cut, at most INT64_MAX */
} mr_identity_part;

typedef struct mr_job_identity {
  char job_id[MR_HASH_HEX];
  int64_t created;                  /* first start, seconds since 1970 */
  char input_digest[MR_HASH_HEX];   /* of the decompressed text of all inputs in order */
  char model_digest[MR_HASH_HEX];   /* of the model's files */
  char options_digest[MR_HASH_HEX]; /* of `options`, dumped with sorted keys */
  char numerics[160]; /* what the bits of a result depend on beside the model: mode, isa, ... */
  uint64_t rows;      /* of this shard, or of the job */
  mr_identity_part part;
  json_t *options; /* the result-changing options themselves, to say what differs; owned */
} mr_job_identity;

/* Sets options (takes the reference) and their digest. MR_E_NOMEM. */
mr_code mr_identity_set_options(mr_job_identity *id, json_t *options, mr_err *err);
/* job_id from the digests. */
void mr_identity_make_id(mr_job_identity *id);
/* As a JSON object (owned by the caller, NULL: out of memory) and back; MR_E_DATA when a member is
 * missing or odd. */
json_t *mr_identity_to_json(const mr_job_identity *id);
mr_code mr_identity_from_json(mr_job_identity *id, const json_t *o, mr_err *err);
/* The same from the text of the object: MR_E_DATA, MR_E_NOMEM. */
mr_code mr_identity_parse(mr_job_identity *id, const void *text, size_t len);
/* Appends what differs, in words ("the model file; option max-tokens (64, was 32)"); adds nothing
 * if they are equal. */
void mr_identity_differ(const mr_job_identity *old, const mr_job_identity *now, mr_text *words);
mr_code mr_identity_copy(mr_job_identity *to, const mr_job_identity *from, mr_err *err);
void mr_identity_free(mr_job_identity *id); /* frees what it owns and zeroes it */

#endif
