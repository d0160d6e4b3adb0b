/* manifest.h: OUT.manifest.json: what a finished job left, with a digest of each file and of
 * itself.
 *
 * The file is the compact dump with sorted keys and a newline, and carries the xxh3-128 of that
 * dump without its "digest" member: a manifest loads only if it is byte for byte what its content
 * would be written as.
 */
#ifndef MR_JOBS_MANIFEST_H
#define MR_JOBS_MANIFEST_H

#include "jobs/framerec.h"
#include "jobs/identity.h"

#define MR_MANIFEST_FILES 8

typedef struct mr_manifest_file {
  char *name;               /* without the directory: it lies beside the manifest */
  char digest[MR_HASH_HEX]; /* xxh3-128 of its bytes */
  uint64_t bytes, lines;    /* lines 0: not a file of rows */
} mr_manifest_file;

typedef struct mr_manifest {
  mr_job_identity id;
  uint64_t rows_ok, rows_failed, prompt_tokens, output_tokens;
  bool completion_order;
  /* A shard's rows (rowlist.h) by their numbers in the whole job, in the order of the lines of the
   * results and the errors; NULL: the whole job. Owned. */
  char *row_list[MR_STREAMS];
  json_t *inputs; /* plan.inputs of the run that finished it (inputs.h), or NULL; owned */
  mr_manifest_file files[MR_MANIFEST_FILES];
  int n_files;
} mr_manifest;

/* `path` gives the name: its last part. */
mr_code mr_manifest_add_file(mr_manifest *m, const char *path, const char digest[MR_HASH_HEX],
                             uint64_t bytes, uint64_t lines, mr_err *err);
/* The file's text; MR_E_NOMEM. */
mr_code mr_manifest_dump(const mr_manifest *m, mr_text *out, mr_err *err);
/* MR_E_NOINPUT: no such file; MR_E_DATA: damaged. On failure *m is empty. */
mr_code mr_manifest_load(mr_manifest *m, const char *path, mr_err *err);
const mr_manifest_file *mr_manifest_find(const mr_manifest *m, const char *path); /* by its last
                                                                                     part; or NULL
                                                                                   */
void mr_manifest_free(mr_manifest *m);

#endif
