/* plan.h: the plan file: every input row after preflight, spooled to disk so that memory does not
 * grow with the input.
 *
 * Three files in OUT.run/: plan.head (sums, names of inputs, digests), plan.data (records, appended
 * in input order) and plan.index (a fixed-size entry a row). A record holds what the rest of the
 * job needs, so that the input need not be read again:
 *   - good rows: JSON of the row (id, parameters, fields that pass through, warnings; the prompt
 *     only with --keep-prompt or echo), prompt ids, continuation ids;
 *   - bad rows: the error (message, type, param, code), custom_id or null, and the line.
 * Both files are hostile input when they are read back: sizes are checked, each record carries its
 * xxh3-64.
 */
#ifndef MR_JOBS_PLAN_H
#define MR_JOBS_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "io/err.h"
#include "io/text.h"

typedef enum mr_row_kind {
  MR_ROW_BATCH_CHAT,
  MR_ROW_BATCH_COMPLETION,
  MR_ROW_PLAIN,
  MR_ROW_SCORE,
  MR_ROW_BAD
} mr_row_kind;

typedef struct mr_plan_entry { /* 56 bytes, little-endian, as in plan.index */
  uint64_t offset;             /* of the record in plan.data */
  uint32_t bytes;
  uint32_t file;    /* index into the plan's input files */
  uint64_t line;    /* from 1, in the decompressed text */
  int32_t n_prompt; /* tokens */
  int32_t n_out;    /* tokens at most: max_tokens * n, or the continuations' lengths */
  uint32_t kind;    /* mr_row_kind */
  uint32_t adapter; /* 0: the base alone; i + 1: the job's adapter i */
  uint64_t check;   /* xxh3-64 of the record */
  uint64_t prefix;  /* mr_plan_prefix of the prompt; 0 for bad rows */
} mr_plan_entry;

typedef struct mr_plan_record { /* one row read back; owned, freed with mr_plan_record_free */
  uint64_t row;                 /* index in input order, from 0, bad rows counted */
  mr_plan_entry e;
  char *json; /* NUL-terminated */
  size_t json_len;
  int32_t *prompt; /* e.n_prompt ids */
  int32_t *cont;   /* continuations, concatenated */
  int *cont_len;
  int n_cont;
  uint64_t id_hash; /* xxh3-64 of the row's id, 0 without one; mr_row_parse's, not stored */
} mr_plan_record;

typedef struct mr_plan_writer mr_plan_writer;
typedef struct mr_plan mr_plan;

mr_code mr_plan_create(mr_plan_writer **out, const char *dir, mr_err *err);
/* The next input file (or archive member), by the name that messages use; records refer to it by
 * its number. */
mr_code mr_plan_add_file(mr_plan_writer *w, const char *name, mr_err *err);
/* rec->row is ignored: rows are appended in order; e.offset, bytes, check and prefix are
 * filled in. */
mr_code mr_plan_append(mr_plan_writer *w, const mr_plan_record *rec, mr_err *err);
/* A row that was appended, read back; and its record replaced by rec (of row rec->row; `old` is its
 * entry as read back). */
mr_code mr_plan_reread(mr_plan_writer *w, uint64_t row, mr_plan_record *rec, mr_err *err);
mr_code mr_plan_replace(mr_plan_writer *w, const mr_plan_entry *old, const mr_plan_record *rec,
                        mr_err *err);
/* The name of an input file that was added: *len bytes, not terminated, borrowed until the next. */
const char *mr_plan_file_name(const mr_plan_writer *w, uint32_t file, size_t *len);
const char *mr_plan_writer_dir(const mr_plan_writer *w);
/* What the plan was made from (hex, kept in the head); mr_preflight_run sets the digest of the
 * inputs. */
void mr_plan_set_digest(mr_plan_writer *w, const char *digest);
/* Syncs both files and the directory, and writes plan.head last: a plan without a whole head is
 * made again. Frees w, whatever it returns. */
mr_code mr_plan_finish(mr_plan_writer *w, mr_err *err);
void mr_plan_abandon(mr_plan_writer *w); /* frees w and removes its files; NULL is fine */

/* MR_E_NOINPUT: no plan.head there; MR_E_DATA: damaged. */
mr_code mr_plan_open(mr_plan **out, const char *dir, mr_err *err);
void mr_plan_close(mr_plan *p);
uint64_t mr_plan_rows(const mr_plan *p);
uint64_t mr_plan_bad_rows(const mr_plan *p);
uint64_t mr_plan_prompt_tokens(const mr_plan *p);
uint64_t mr_plan_output_tokens_max(const mr_plan *p);
const char *mr_plan_digest(const mr_plan *p); /* "": none */
uint32_t mr_plan_n_files(const mr_plan *p);
const char *const *mr_plan_files(const mr_plan *p); /* n_files names; what mr_render.files wants */
/* One row's entry, or its whole record. MR_E_IO, MR_E_DATA (damaged), MR_E_NOMEM. */
mr_code mr_plan_entry_read(const mr_plan *p, uint64_t row, mr_plan_entry *e, mr_err *err);
mr_code mr_plan_read(const mr_plan *p, uint64_t row, mr_plan_record *rec, mr_err *err);
void mr_plan_record_free(mr_plan_record *rec);

/* All entries in input order, a window of them in memory:
 *     mr_plan_scan s;
 *     mr_plan_scan_start(&s, p, err);
 *     while (mr_plan_scan_next(&s)) ...       s.row, s.e
 *     rc = s.rc;                              why it ended early, or MR_OK */
#define MR_PLAN_WINDOW 256
typedef struct mr_plan_scan {
  uint64_t row;
  const mr_plan_entry *e; /* until the next call */
  mr_code rc;
  const mr_plan *p;
  mr_err *err;
  uint64_t next, first, n; /* the row to come; the window's first row and rows */
  mr_plan_entry window[MR_PLAN_WINDOW];
} mr_plan_scan;
void mr_plan_scan_start(mr_plan_scan *s, const mr_plan *p, mr_err *err);
bool mr_plan_scan_next(mr_plan_scan *s);

/* Four keys of 16 bits, from the top: of the first 32, 64, 128 and 512 ids. Prompts that begin
 * alike lie together when they are sorted by it; unlike ones, and those of different adapters,
 * seldom do. */
uint64_t mr_plan_prefix(const int32_t *ids, int n, uint32_t adapter);

#endif
