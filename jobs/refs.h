/* refs.h: references: what the answers of rows should be, by the id of the row.
 *
 *     mr_refs *r;
 *     mr_refs_open(&r, &(mr_refs_opts){.files = files, .n = n, .by = "topic"}, &err);   reads all
 *     mr_refs_find(r, id, len, &ref, &found, &err);   one row; marks it as asked for
 *     for (at = 0; mr_refs_rest(r, &at, &ref, &more, &err) == MR_OK && more;) ...  never asked for
 *     mr_refs_close(r);
 *
 * A line is a JSON object with an id (`custom_id` or `id`: a text or a whole number) and a field
 * with the acceptable answer: a text, a number, true or false, or a list of these. A line whose
 * answer is null or not there counts as no reference. Without an id it is of the row that would
 * stand in its place (row-<line>, file-<k>-row-<line>), so the input of a job is a file of
 * references too.
 *
 * Memory is 16 bytes a reference, sorted by the hash of the id; the texts lie in a file under
 * $TMPDIR (or /tmp) that has no name any more. Rows that come in the order of the references are
 * read from it in order. One thread uses it.
 */
#ifndef MR_JOBS_REFS_H
#define MR_JOBS_REFS_H

#include <jansson.h>
#include <stdbool.h>

#include "io/err.h"
#include "jobs/score_text.h"

#define MR_REFS_LINE_MAX ((size_t)16 << 20) /* bytes of a line */

typedef struct mr_refs mr_refs;

typedef struct mr_refs_opts { /* borrowed until open returns */
  const char *const *files;   /* as io/source.h takes them */
  int n;
  const char *field; /* with the answer; NULL: the first of mr_refs_fields that a line has */
  const char *by;    /* the field that gives the group, or NULL */
} mr_refs_opts;

typedef struct mr_ref { /* borrowed until the next call */
  mr_str id;
  mr_str group;          /* s NULL: the line has none */
  const json_t *answers; /* array of at least one text, number or boolean */
  bool asked;            /* an earlier call of find gave it */
} mr_ref;

/* MR_E_DATA: a line that is none, or an id that was there; it is named. No line has an answer.
 * MR_E_NOINPUT, MR_E_IO, MR_E_CANTCREATE, MR_E_NOMEM. */
mr_code mr_refs_open(mr_refs **out, const mr_refs_opts *opts, mr_err *err);
uint64_t mr_refs_count(const mr_refs *r);
uint64_t mr_refs_blank(const mr_refs *r); /* lines without an answer: they are none */
mr_code mr_refs_find(mr_refs *r, mr_str id, mr_ref *ref, bool *found, mr_err *err);
/* In the order of the files. */
mr_code mr_refs_rest(mr_refs *r, uint64_t *at, mr_ref *ref, bool *more, mr_err *err);
void mr_refs_close(mr_refs *r); /* NULL is fine */

/* "answer", "target", ...; NULL ends the list. */
extern const char *const mr_refs_fields[];
/* The member of an object that a name or a path (a.b.c) means, or NULL. */
const json_t *mr_refs_member(const json_t *object, const char *path);
/* The acceptable answers that a value holds, as a new array; NULL: none (null, an object, an empty
 * list), or out of memory (mr_json_ran_out). */
json_t *mr_refs_answers(const json_t *value);
/* Appends what a value says as a text: a text as it is, others as JSON. */
void mr_refs_text(const json_t *value, mr_text *out);

#endif
