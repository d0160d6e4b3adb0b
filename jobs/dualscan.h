/* dualscan.h: rows that cost arithmetic between rows that hold memory, so that steps have both.
 *
 * A row that chooses many tokens holds its keys and values for as many steps and brings one token
 * to each; a row with a long prompt and few tokens to choose fills steps with arithmetic and is
 * gone. In an order from the first kind to the second a job would decode in steps that are limited
 * by memory, and then read prompts in steps that are limited by arithmetic. As BlendServe does
 * (Zhao et al. 2024, section 5), two scans go through that order, one from each end, and the next
 * row is of that scan whose kind is behind. Neither leaves a group of rows with a common beginning
 * before it is through, so that two groups at most are begun at a time.
 *
 * BlendServe's density, arithmetic over memory, is (p + d) / (d * (p + d/2)) for a row of p prompt
 * and d output tokens, in tokens computed over tokens held times steps: between 1/d and 2/d
 * whatever p is. So rows are told apart by d alone, by its octave, and rows of neighbouring octaves
 * are not blended. What is balanced are prompt tokens that are computed against output tokens; the
 * latter lead by a quarter, as what is begun last should be soon done.
 *
 *     mr_dual_scan_open(&d, dir, 0, &err);
 *     mr_dual_scan_add(d, &row, &err); ...
 *     mr_dual_scan_sort(d, &err);
 *     while (mr_dual_scan_next(d, &row, &more, &err) == MR_OK && more) ...
 */
#ifndef MR_JOBS_DUALSCAN_H
#define MR_JOBS_DUALSCAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "io/err.h"

typedef struct mr_dual_scan mr_dual_scan;

typedef struct mr_scan_row { /* all fields of one size, so that no record has holes */
  uint32_t at;               /* its place in the order with one scan */
  uint32_t row;
  uint32_t part;            /* the first place of its part: parts come one after the other */
  uint32_t octave;          /* mr_scan_octave of its output tokens */
  uint32_t prefill, decode; /* prompt tokens that are computed for it; output tokens */
} mr_scan_row;

uint32_t mr_scan_octave(int64_t n_out);

/* Memory and temporary files as with mr_sorter_open, for two sorters at most. MR_E_NOMEM. */
mr_code mr_dual_scan_open(mr_dual_scan **out, const char *dir, size_t memory_bytes, mr_err *err);
/* No two rows have the same place. MR_E_NOMEM, MR_E_CANTCREATE, MR_E_IO. */
mr_code mr_dual_scan_add(mr_dual_scan *d, const mr_scan_row *row, mr_err *err);
mr_code mr_dual_scan_sort(mr_dual_scan *d, mr_err *err); /* no more are added */
mr_code mr_dual_scan_next(mr_dual_scan *d, uint64_t *row, bool *more, mr_err *err);
mr_code mr_dual_scan_rewind(mr_dual_scan *d, mr_err *err);
uint64_t mr_dual_scan_count(const mr_dual_scan *d);
bool mr_dual_scan_blends(const mr_dual_scan *d); /* false: one scan does */
void mr_dual_scan_close(mr_dual_scan *d);        /* NULL is fine */

#endif
