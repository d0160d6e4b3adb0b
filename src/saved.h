/* saved.h: the rows that were in flight when a run stopped, in two files of its state directory:
 * the tokens they had chosen, and their keys and values, so that the next run goes on from there.
 *
 *     mr_saver_open(&w, "OUT.run/kv", old, ..., max_bytes, seconds, &err);
 *     pages[i] = mr_saver_page(w, bytes);           for each page of a row,
 *     mr_saver_row(w, &r);                          for each row
 *     mr_saver_finish(w, &err);                     the new state takes the place of the old
 *
 *     mr_saved_open(&s, "OUT.run/kv", &err);        NULL: there is none, or no whole one
 *     const mr_saved_row *r = mr_saved_take(s, row);
 *     mr_saved_read(s, &r->pages[i], to);
 *
 * OUT.run/kv.rows holds the tokens and the places and digests of the pages, and ends with a digest
 * of itself; it is replaced at one stroke. OUT.run/kv.pages.0 or .1 holds the pages; it is not
 * synced: a page that did not survive is found out by its digest and computed again. A page may
 * stand in several rows. Nothing here is needed for a right result, so what is damaged, foreign or
 * does not fit the limits is left out.
 */
#ifndef MR_SRC_SAVED_H
#define MR_SRC_SAVED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "io/err.h"

#define MR_SAVED_DROPPED (-2) /* there was no page: nobody reads it */

typedef struct mr_saved_page {
  int64_t at;     /* in pages of the file; -1: not saved; MR_SAVED_DROPPED */
  uint64_t check; /* xxh3-64 */
} mr_saved_page;

typedef struct mr_saved_seq {
  int32_t n_picks, pick_bytes; /* tokens chosen, the one that ended it too: each as pick_bytes */
  int32_t fed;                 /* of them, stored */
  int32_t n_pages;             /* after the prompt's full ones */
} mr_saved_seq;

typedef struct mr_saved_row {
  uint64_t row, check; /* its number; a digest of its request */
  int32_t fed;         /* prompt tokens stored */
  int32_t n_pages, n_seqs, n_picks_bytes;
  const mr_saved_page *pages; /* [n_pages] of the prompt, then those of each sequence */
  const mr_saved_seq *seqs;   /* [n_seqs] */
  const uint8_t *picks;       /* [n_picks_bytes] of all sequences */
  bool taken;                 /* mr_saved_take was called; not stored */
} mr_saved_row;

typedef struct mr_saved mr_saved;
typedef struct mr_saver mr_saver;

/* *out NULL and MR_OK: there is nothing to go on from. MR_E_NOMEM. */
mr_code mr_saved_open(mr_saved **out, const char *prefix, mr_err *err);
void mr_saved_close(mr_saved *s); /* NULL is fine */
int mr_saved_rows(const mr_saved *s);
const mr_saved_row *mr_saved_at(const mr_saved *s, int i);
bool mr_saved_has(const mr_saved *s, uint64_t row);           /* NULL: false */
const mr_saved_row *mr_saved_take(mr_saved *s, uint64_t row); /* NULL: there is none */
int mr_saved_picks(const mr_saved_row *r); /* tokens chosen, of all its sequences */
/* Whether its pages have this size and layout: a digest of all that says what their bytes mean. */
bool mr_saved_fits(const mr_saved *s, size_t page_bytes, uint64_t layout);
/* False: it is not there, or has changed. */
bool mr_saved_read(const mr_saved *s, const mr_saved_page *p, void *to);

/* At most max_bytes of pages, written within about `seconds`. old (or NULL) stays readable.
 * MR_E_NOMEM, MR_E_CANTCREATE. */
mr_code mr_saver_open(mr_saver **out, const char *prefix, const mr_saved *old, size_t page_bytes,
                      uint64_t layout, uint64_t max_bytes, double seconds, mr_err *err);
mr_saved_page mr_saver_page(mr_saver *w, const void *bytes); /* at -1: no room, or no time */
bool mr_saver_has_room(const mr_saver *w);
uint64_t mr_saver_bytes(const mr_saver *w); /* of pages, so far */
void mr_saver_row(mr_saver *w, const mr_saved_row *r);
/* Frees w, whatever it returns. MR_E_NOMEM and errors of writing: the old state stays. */
mr_code mr_saver_finish(mr_saver *w, mr_err *err);
void mr_saver_abandon(mr_saver *w);

#endif
